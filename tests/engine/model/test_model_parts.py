"""Each part of the model against the plain way to write it, and the settings against wrong ones."""

import copy
import dataclasses
import re
import runpy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import SMALL
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.common import ConfigError
from engine.model import position
from engine.model.config import ModelConfig, flops_per_crop, flops_per_segment, kept_per_crop, masked_share
from engine.model.encoder import Encoder, Linear, manual_attention
from engine.model.features import ConvStack, NormGelu
from engine.model.init_weights import initialise
from engine.model.kernels.dropout import chosen, dropout
from engine.model.kernels.gelu import gelu
from engine.model.position import Blocks, PositionalConvolution
from engine.model.pretrainer import Pretrainer
from engine.model.quantizer import Quantizer, perplexity, temperature
from engine.objectives.config import ObjectiveConfig


def test_the_paper_s_model_has_as_many_parameters_as_the_authors() -> None:
    with torch.device("meta"):
        model = Pretrainer(ModelConfig(), ObjectiveConfig())
    assert sum(p.numel() for p in model.parameters()) == 90_883_072
    assert ModelConfig().tokens(2500) == 156


def test_flops_are_those_counted_by_hand() -> None:
    conv = 1250 * 24 * 256 + (625 + 312 + 156) * 512 * 256
    encoder = 156 * 256 * 768 + 156 * 48 * 128 * 768 + 12 * (156 * (4 * 768**2 + 2 * 768 * 3072) + 2 * 156**2 * 768)
    bare = 3 * 2 * (conv + encoder)
    assert flops_per_segment(ModelConfig(), local=False) == bare
    heads = flops_per_segment(ModelConfig()) - bare
    per_token = 768 * 256 + 256 * 640 + 256 * 256 + 640 * 128 + 101 * 256
    assert heads == pytest.approx(6 * per_token * 156 * masked_share(ModelConfig(), 156))
    assert round(flops_per_crop(ModelConfig()) / 1e9, 1) == 175.9


def test_what_a_step_holds_is_what_autograd_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the paper's encoder, eager, with a fused attention; by tensors that have shapes and no numbers."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, dropout_p: fused(q, k, v, dropout_p)[0])
    config, saved = dataclasses.replace(ModelConfig(), position="blocks"), []
    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        encoder = Encoder(config).bfloat16()
        encoder(torch.empty(2 * 64, 12, 2500))
    weights = {p.untyped_storage()._cdata for p in encoder.parameters()}
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    bytes_saved = sum(size for storage, size in sizes.items() if storage not in weights)
    assert 0.8 < bytes_saved / (64 * 2 * kept_per_crop(config)) < 1


def test_float32_is_made_exact_by_programs_and_not_by_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    found = runpy.run_path(position.__file__)
    assert torch.backends.cudnn.allow_tf32
    found["exact_float32"]()
    assert not torch.backends.cudnn.allow_tf32


def test_torch_s_compiler_may_say_that_float32_is_exact() -> None:
    """On a GPU it warns in these words, and these tests make errors of other warnings."""
    words = "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled"
    assert torch.__file__ and words in (Path(torch.__file__).parent / "_inductor" / "compile_fx.py").read_text()
    warnings.warn(words, stacklevel=1)
    with pytest.raises(UserWarning):
        warnings.warn("another", stacklevel=1)


@pytest.mark.parametrize("samples", [2500, 799])
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_patches_are_convolutions(norm: str, samples: int) -> None:
    config = dataclasses.replace(SMALL, conv=((24, 2), (16, 4), (16, 2)), conv_norm=norm, feature_grad=1.0)
    stack = ConvStack(config)
    initialise(stack)
    for name, p in stack.named_parameters():
        if "norm" in name:
            nn.init.normal_(p)
    x = torch.randn(3, 12, samples, requires_grad=True)
    y, inputs = x, 12
    for i, (width, kernel) in enumerate(config.conv):
        block = stack.blocks[i]
        y = F.conv1d(y, block.weight.view(width, kernel, inputs).transpose(1, 2), stride=kernel)
        if norm == "group" and i == 0:
            y = F.group_norm(y, width, block.norm.weight, block.norm.bias)
        elif norm == "layer":
            y = F.layer_norm(y.transpose(1, 2), (width,), block.norm.weight, block.norm.bias).transpose(1, 2)
        y, inputs = F.gelu(y), width
    torch.testing.assert_close(stack(x), y.transpose(1, 2), rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(y)
    (wanted,) = torch.autograd.grad((y * weight).sum(), x)
    (got,) = torch.autograd.grad((stack(x) * weight.transpose(1, 2)).sum(), x)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype, far", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("keep", [2500, 1999])
def test_norm_and_gelu_a_few_rows_at_a_time(keep: int, dtype: torch.dtype, far: float) -> None:
    """Rows of 10 numbers' mean, not of 0: variance must not be lost in it. 100 rows of 2,500 are several parts on 8 threads."""
    torch.manual_seed(0)
    y, weight, bias = 10 + torch.randn(100, 2500, 32).cumsum(1) / 50, torch.rand(32), torch.randn(32)
    grad = torch.randn(100, keep, 32)
    leaves = [a.to(dtype).requires_grad_() for a in (y, weight, bias)]
    exact = [a.detach().double().requires_grad_() for a in leaves]
    wanted = F.gelu(F.group_norm(exact[0].transpose(1, 2), 32, *exact[1:], 1e-5).transpose(1, 2)[:, :keep])
    got = NormGelu.apply(*leaves, keep, 1e-5)
    wanted.backward(grad.to(dtype).double())
    got.backward(grad.to(dtype))
    for mine, theirs in [(got, wanted), *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))]:
        assert mine.dtype == dtype
        assert (mine - theirs).abs().max() <= far * theirs.abs().max()


def test_the_features_gradient_is_scaled_or_stopped() -> None:
    x, grads = torch.randn(2, 12, 320), {}
    for factor in (1.0, 0.1, 0.0):
        torch.manual_seed(0)
        encoder = Encoder(dataclasses.replace(SMALL, feature_grad=factor))
        initialise(encoder, torch.Generator().manual_seed(0))
        z, penalty = encoder.features(x)
        (z.square().mean() * 3 + z.sum() + penalty).backward()
        grads[factor] = encoder.conv.blocks[1].weight.grad
    torch.testing.assert_close(grads[0.1], 0.1 * grads[1.0])
    assert grads[0.0] is None


@pytest.mark.parametrize("form", ["conv", "blocks", "dft", "auto"])
@pytest.mark.parametrize("kernel", [16, 7])
def test_positional_convolution_is_torch_s_with_weight_norm(kernel: int, form: str) -> None:
    ours, theirs = PositionalConvolution(24, kernel, 4, form), nn.Conv1d(24, 24, kernel, padding=kernel // 2, groups=4)
    theirs = nn.utils.parametrizations.weight_norm(theirs, dim=2)
    with torch.no_grad():
        ours.gain.copy_(theirs.parametrizations.weight.original0.mul_(1.5))
        ours.direction.copy_(theirs.parametrizations.weight.original1)
        ours.bias.copy_(theirs.bias)
    x = torch.randn(2, 40, 24)
    wanted = F.gelu(theirs(x.transpose(1, 2))[:, :, :40]).transpose(1, 2)
    torch.testing.assert_close(ours(x), wanted, rtol=1e-5, atol=2e-6)
    ours(x).square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(ours.gain.grad, theirs.parametrizations.weight.original0.grad, rtol=1e-4, atol=5e-5)
    torch.testing.assert_close(ours.direction.grad, theirs.parametrizations.weight.original1.grad, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("form", ["blocks", "dft"])
def test_positions_are_exact(form: str) -> None:
    """The paper's length, kernel and groups; in float64, so that nothing but rounding could differ."""
    made = PositionalConvolution(64, 128, 16).double()
    initialise(nn.ModuleList([made]), torch.Generator().manual_seed(0))
    x, results = torch.randn(2, 156, 64, dtype=torch.float64), []
    for made.form in ("conv", form):
        leaf = x.clone().requires_grad_()
        made.zero_grad()
        y = made(leaf)
        (y * x.cos()).sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad.clone() for p in made.parameters())])
    for wanted, got in zip(*results, strict=True):
        assert got.dtype == torch.float64
        assert (got - wanted).abs().max() <= 1e-12 * max(1, wanted.abs().max())


def test_gradients_of_positions_in_blocks_are_gathered() -> None:
    """In bf16 they are nearly as exact as the convolution's own, 1.7e-3, and no number is added to from several places: a GPU
    would do that in any order."""
    x, grad = torch.randn(2, 8, 156, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = torch.randn(64, 4, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    exact, leaves = [t.double().requires_grad_() for t in (x, weight)], [t.clone().requires_grad_() for t in (x, weight)]
    wanted = F.conv1d(F.pad(exact[0].transpose(1, 2), (64, 63)), exact[1], groups=16).transpose(1, 2)
    wanted = [wanted.detach(), *torch.autograd.grad(wanted, exact, grad.double())]
    with Operations() as seen:
        y = Blocks.apply(*leaves, 16)
        got = [y.detach(), *torch.autograd.grad(y, leaves, grad)]
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in zip(got, wanted, strict=True)]
    assert max(errors[:2]) < 1.8e-3 and errors[2] < 3e-3
    assert "aten.bmm.default" in seen.names
    assert not [name for name in seen.names if re.search("index_put|scatter|index_add|unfold_backward", name)]


class Operations(TorchDispatchMode):
    """The names of all that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_positions_in_autocast() -> None:
    made, x = PositionalConvolution(24, 7, 4), torch.randn(2, 40, 24)
    initialise(nn.ModuleList([made]), torch.Generator().manual_seed(0))
    results = []
    for made.form in ("conv", "blocks"):
        with torch.autocast("cpu", torch.bfloat16):
            y = made(x)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), list(made.parameters()))])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < 0.01 * other.norm()


@pytest.mark.parametrize("tokens, kernel", [(156, 128), (7, 16), (1, 5), (31, 1)])
def test_positions_by_cosines_are_the_convolution(tokens: int, kernel: int) -> None:
    """At the paper's length, and where the kernel is longer than the input; in bf16 no further off than bf16 itself."""
    made, x = PositionalConvolution(24, kernel, 4), torch.randn(3, tokens, 24)
    encoder = nn.ModuleList([made])
    initialise(encoder, torch.Generator().manual_seed(0))
    results = []
    for form in ("conv", "dft"):
        made.form, leaf = form, x.clone().requires_grad_()
        made.zero_grad()
        y = made(leaf)
        (y * x.cos()).sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad.clone() for p in made.parameters())])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    low = made.bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), results[0][0], rtol=0.02, atol=0.02 * float(results[0][0].abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_linear_is_the_plain_one(dtype: torch.dtype) -> None:
    linear = Linear(24, 40).to(dtype)
    x, grad = torch.randn(4, 150, 24, dtype=dtype), torch.randn(4, 150, 40, dtype=dtype)
    found = []
    for function in (copy.deepcopy(linear).double(), linear, torch.compile(linear, backend="aot_eager", fullgraph=True)):
        exact = not found
        leaf = (x.double() if exact else x.clone()).requires_grad_()
        y = function(leaf)
        grads = torch.autograd.grad(y, [leaf, *function.parameters()], grad.to(y.dtype))
        found.append([t.detach().double() for t in (y, *grads)])
    for wanted, plain, compiled in zip(*found, strict=True):
        rounding = torch.finfo(dtype).eps * float(wanted.abs().max())
        for got in (plain, compiled):
            torch.testing.assert_close(got, wanted, rtol=0, atol=(1 if dtype == torch.bfloat16 else 8) * rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_gelu_is_the_exact_one(dtype: torch.dtype) -> None:
    """To the last bit of bf16, and float32 is left alone."""
    x = torch.linspace(-9, 9, 100_001, dtype=dtype)
    grad = torch.cos(x)
    found = []
    for function in (F.gelu, torch.compile(gelu, backend="aot_eager", fullgraph=True)):
        leaf = (x.clone() if found else x.double()).requires_grad_()
        y = function(leaf)
        found.append([y.detach().double(), torch.autograd.grad(y, leaf, grad.to(y.dtype))[0].double()])
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=2e-6)


def test_fused_attention_is_the_manual_one() -> None:
    x = torch.randn(2, 12, 320)
    outputs = []
    for kind in ("sdpa", "cudnn", "short", "manual"):
        encoder = Encoder(dataclasses.replace(SMALL, attention=kind, heads=3))
        initialise(encoder, torch.Generator().manual_seed(0))
        c = encoder(x)
        c.square().sum().backward()
        outputs.append((c, encoder.layers[0].attention.qkv.weight.grad))
    for manual, *fused in zip(*outputs[::-1], strict=True):
        for one in fused:
            torch.testing.assert_close(one, manual, rtol=1e-4, atol=1e-5)
    q = torch.randn(3, 1, 2, 5, 8)
    with_dropout = Encoder(dataclasses.replace(SMALL, attention_dropout=0.1, heads=3))  # auto, on a CPU: manual
    initialise(with_dropout, torch.Generator().manual_seed(0))
    torch.testing.assert_close(with_dropout.eval()(x), outputs[0][0], rtol=1e-4, atol=1e-5)
    assert with_dropout.train()(x).isfinite().all()
    dropped = manual_attention(*q, dropout_p=0.5)
    assert dropped.shape == (1, 2, 5, 8) and not torch.allclose(dropped, manual_attention(*q))


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("shape, p", [((40, 50, 60), 0.1), ((333, 7), 0.25), ((3,), 0.5)])
def test_dropout(shape: tuple[int, ...], p: float, how: str) -> None:
    drop = partial(torch.compile(dropout, backend="aot_eager", fullgraph=True) if how == "compiled" else dropout, p=p)
    torch.manual_seed(0)
    x = torch.ones(shape, requires_grad=True)
    y = drop(x)
    share = float((y.detach() == 0).float().mean())
    assert share == pytest.approx(p, abs=0.5 if x.numel() < 10 else 5 * (p * (1 - p) / x.numel()) ** 0.5)
    assert float(y.detach().max()) == pytest.approx(1 / (1 - p), rel=1e-4)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # type: ignore[arg-type]
    assert not torch.equal(drop(x), y) or x.numel() < 10
    torch.manual_seed(0)
    assert torch.equal(drop(x), y)
    assert dropout(x, p, training=False) is x and dropout(x, 0.0) is x
    neighbours = (y.detach() == 0).float().flatten()[: x.numel() // 4 * 4].view(-1, 4)
    if len(neighbours) > 1000:  # the four numbers of one draw are independent
        assert (torch.corrcoef(neighbours.t()) - torch.eye(4)).abs().max() < 0.03


def test_hashed_dropout_has_no_pattern() -> None:
    """Neighbours, columns and rows, and masks of seeds that differ by one bit: as independent as random numbers."""
    count, p, z = 768 * 1000, 0.1, []
    seeds = [(0, 0), (0, 1), (1, 0), (0, -(2**31)), (2**30, 7), (-1, 2**20)]
    kept = (chosen(torch.empty(count), p, torch.tensor(pair, dtype=torch.int32)) for pair in seeds)
    masks = [(keep.float() - (1 - p)) / 0.3 for keep in kept]
    for i, one in enumerate(masks):
        z.append(one.mean())
        z += [(one[lag:] * one[:-lag]).mean() for lag in (1, 2, 3, 64, 156, 768, 1024, 65536)]
        z += [(one[lag:] * other[: count - lag]).mean() for other in masks[:i] for lag in (0, 1, 768)]
    scaled = torch.stack(z) * count**0.5
    assert scaled.abs().max() < 4.5 and scaled.std() == pytest.approx(1, abs=0.2)


@pytest.mark.gpu
def test_a_gpus_kernels_drop_the_same_forward_and_backward() -> None:
    """The mask is computed twice, and the GELU is the short one."""
    x = (
        torch.linspace(0.1, 4, 300 * 768, device="cuda")
        .view(300, 768)
        .mul(torch.tensor([1.0, -1.0], device="cuda").repeat(384))
    )
    x = x.bfloat16().requires_grad_()
    y = torch.compile(lambda x: dropout(gelu(x), 0.25), fullgraph=True)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    kept = y.detach() != 0
    assert float(kept.float().mean()) == pytest.approx(0.75, abs=0.01)
    leaf = x.detach().double().requires_grad_()
    (wanted := F.gelu(leaf)).sum().backward()
    assert leaf.grad is not None
    for got, exact in ((y.detach(), wanted.detach()), (grad, leaf.grad)):
        torch.testing.assert_close(got.double(), torch.where(kept, exact / 0.75, 0), rtol=0.01, atol=0.01)


def one_hot_quantizer(q: Quantizer, z: torch.Tensor, tau: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """As the authors: a straight-through one-hot vector times the codebook."""
    logits = q.logits(z).view(*z.shape[:2], q.books, q.codes)
    soft = ((logits + noise) / tau).softmax(-1)
    hard = F.one_hot(soft.argmax(-1), q.codes).float()
    return torch.einsum("rmgv,gvd->rmgd", hard - soft.detach() + soft, q.codebook).flatten(2)


def test_looking_codes_up_is_the_one_hot_product() -> None:
    q = Quantizer(SMALL, 32)
    initialise(q, torch.Generator().manual_seed(1))
    z, valid, tau = torch.randn(3, 9, 32), torch.ones(3, 9, dtype=torch.bool), torch.tensor(1.7)
    noise, weight = -torch.empty(3, 9, 2, 16).exponential_().log(), torch.randn(3, 9, 32)
    grads = []
    for values in (q(z, valid, tau, noise).values_RMP, one_hot_quantizer(q, z, tau, noise)):
        q.zero_grad()
        (values * weight).sum().backward()
        grads.append([values, *(p.grad.clone() for p in q.parameters())])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_without_noise_the_most_probable_code_is_taken_and_padding_is_not_counted() -> None:
    q = Quantizer(SMALL, 32)
    initialise(q, torch.Generator().manual_seed(1))
    z, valid = torch.randn(2, 8, 32), torch.arange(8) < torch.tensor([[8], [3]])
    out = q(z, valid, torch.ones(()), None)
    logits = q.logits(z).view(2, 8, 2, 16)
    assert torch.equal(out.codes_RMG, logits.argmax(-1))
    assert out.tokens == 11
    used = logits[valid]
    torch.testing.assert_close(out.share_GV / 11, used.softmax(-1).mean(0))
    torch.testing.assert_close(out.hard_GV / 11, F.one_hot(used.argmax(-1), 16).float().mean(0))
    assert perplexity(torch.full((2, 16), 1 / 16)) == pytest.approx(32, rel=1e-4)


def test_the_temperature_falls_to_its_end() -> None:
    config = ModelConfig()
    assert temperature(config, 0) == 2
    assert temperature(config, 1000) == pytest.approx(1.990025, abs=1e-6)
    assert temperature(config, 36_923) == pytest.approx(1.663, abs=1e-3)
    assert temperature(config, 277_258) > 0.5 == temperature(config, 277_259)


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 770},
        {"heads": 0},
        {"layers": 2.5},
        {"conv": ()},
        {"conv": ((256, 0),)},
        {"conv_norm": "batch"},
        {"attention": "fused"},
        {"attention": "short", "heads": 6},
        {"position": "fft"},
        {"dropout": 1.0},
        {"dropout": float("nan")},
        {"codebooks": 3},
        {"position_groups": 7},
        {"tau_start": 0.1},
        {"width": 10**9},
        {"feature_grad": True},
    ],
)
def test_wrong_settings_are_one_line_that_names_the_key(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**wrong)  # type: ignore[arg-type]
    assert f"model.{next(iter(wrong))}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"local": 0, "contrast": 0}, {"local": -1}, {"negatives": 0}, {"temperature": 0}, {"method": "byol"}, {"form": "x"}],
)
def test_wrong_objectives_are_one_line_that_names_the_key(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"objective.{next(iter(wrong))}"):
        ObjectiveConfig(**wrong)  # type: ignore[arg-type]
