"""Encoder and quantiser against straightforward implementations; the settings, and the model's
cost."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from tiny import SMALL
from torch import nn

from omnilead.engine.common import ConfigError
from omnilead.engine.model.config import (
    ModelConfig,
    ObjectiveConfig,
    flops_per_crop,
    masked_share,
    validated,
)
from omnilead.engine.model.encoder import ConvStack, Encoder, PositionalConvolution
from omnilead.engine.model.init_weights import initialise
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.model.quantizer import Quantizer, temperature
from omnilead.engine.objectives.local import perplexity


def test_the_paper_s_model_has_as_many_parameters_as_the_authors() -> None:
    with torch.device("meta"):
        model = Pretrainer(ModelConfig(), ObjectiveConfig())
    assert sum(p.numel() for p in model.parameters()) == 90_883_072
    assert ModelConfig().tokens(2500) == 156


def test_flops_are_those_counted_by_hand() -> None:
    conv = 1250 * 24 * 256 + (625 + 312 + 156) * 512 * 256
    encoder = (
        156 * 256 * 768
        + 156 * 48 * 128 * 768
        + 12 * (156 * (4 * 768**2 + 2 * 768 * 3072) + 2 * 156**2 * 768)
    )
    bare = 3 * 2 * (conv + encoder)
    assert flops_per_crop(ModelConfig(), local=False) == 2 * bare
    heads = flops_per_crop(ModelConfig()) / 2 - bare
    per_token = 768 * 256 + 256 * 640 + 256 * 256 + 640 * 128 + 101 * 256
    assert heads == pytest.approx(6 * per_token * 156 * masked_share(ModelConfig(), 156))
    assert round(flops_per_crop(ModelConfig()) / 1e9, 1) == 175.9


@pytest.mark.parametrize("samples", [2500, 799])
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_patches_are_convolutions(norm: str, samples: int) -> None:
    config = dataclasses.replace(
        SMALL, conv=((24, 2), (16, 4), (16, 2)), conv_norm=norm, feature_grad=1.0
    )
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
            y = F.layer_norm(
                y.transpose(1, 2), (width,), block.norm.weight, block.norm.bias
            ).transpose(1, 2)
        y, inputs = F.gelu(y), width
    torch.testing.assert_close(stack(x), y.transpose(1, 2), rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(y)
    (expected,) = torch.autograd.grad((y * weight).sum(), x)
    (got,) = torch.autograd.grad((stack(x) * weight.transpose(1, 2)).sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_features_gradient_is_scaled_or_stopped() -> None:
    x, grads = torch.randn(2, 12, 320), {}
    for factor in (1.0, 0.1, 0.0):
        encoder = Encoder(dataclasses.replace(SMALL, feature_grad=factor))
        initialise(encoder, torch.Generator().manual_seed(0))
        z, penalty = encoder.features(x)
        (z.square().mean() * 3 + z.sum() + penalty).backward()
        grads[factor] = encoder.conv.blocks[1].weight.grad
    torch.testing.assert_close(grads[0.1], 0.1 * grads[1.0])
    assert grads[0.0] is None


@pytest.mark.parametrize(("kernel", "training"), [(16, True), (7, False)])
def test_positional_convolution_is_torch_s_with_weight_norm(kernel: int, training: bool) -> None:
    config = dataclasses.replace(
        SMALL, width=24, heads=2, position_kernel=kernel, position_groups=4
    )
    ours, theirs = (
        PositionalConvolution(config).train(training),
        nn.Conv1d(24, 24, kernel, padding=kernel // 2, groups=4),
    )
    theirs = nn.utils.parametrizations.weight_norm(theirs, dim=2)
    with torch.no_grad():
        ours.gain.copy_(theirs.parametrizations.weight.original0.mul_(1.5))
        ours.direction.copy_(theirs.parametrizations.weight.original1)
        ours.bias.copy_(theirs.bias)
    x = torch.randn(2, 40, 24)
    expected = F.gelu(theirs(x.transpose(1, 2))[:, :, :40]).transpose(1, 2)
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=2e-6)
    ours(x).square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(
        ours.gain.grad, theirs.parametrizations.weight.original0.grad, rtol=1e-4, atol=5e-5
    )
    torch.testing.assert_close(
        ours.direction.grad, theirs.parametrizations.weight.original1.grad, rtol=1e-4, atol=5e-5
    )


def test_kernels_do_not_change_the_encoder() -> None:
    results = []
    for kernels in ("plain", "auto"):
        encoder = Encoder(dataclasses.replace(SMALL, kernels=kernels))
        initialise(encoder, torch.Generator().manual_seed(0))
        c = encoder(torch.randn(2, 12, 320, generator=torch.Generator().manual_seed(1)))
        (c * c.detach().cos()).sum().backward()
        results.append([c.detach(), *(p.grad for p in encoder.parameters() if p.grad is not None)])
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


def one_hot_quantizer(
    q: Quantizer, z: torch.Tensor, tau: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """As in the authors' code: a straight-through one-hot vector times the codebook."""
    logits = q.logits(z).view(*z.shape[:2], q.books, q.codes)
    soft = ((logits + noise) / tau).softmax(-1)
    hard = F.one_hot(soft.argmax(-1), q.codes).float()
    return torch.einsum("rmgv,gvd->rmgd", hard - soft.detach() + soft, q.codebook).flatten(2)


def test_code_lookup_equals_the_one_hot_product() -> None:
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
        {"width": 770}, {"heads": 0}, {"layers": 2.5}, {"conv": []}, {"conv": [[256, 0]]}, {"conv_norm": "batch"},
        {"kernels": "fast"}, {"dropout": 1.0}, {"dropout": float("nan")}, {"code_width": 255}, {"width": 32, "heads": 3},
        {"tau_start": 0.1}, {"width": 10**9}, {"feature_grad": True}, {"patches": 7}, {"codebooks": 3},
        {"position_groups": 7}, {"conv_norm": "x" * 10_000},
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line_that_names_the_key(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        validated(ModelConfig, wrong, "model")
    text = str(caught.value)
    assert f"model.{next(iter(wrong))}" in text and "\n" not in text and len(text) < 300


@pytest.mark.parametrize(
    "wrong",
    [{"local": -1}, {"negatives": 0}, {"temperature": 0}, {"method": "byol"}, {"form": "x"}],
)
def test_wrong_objectives_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        ObjectiveConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"objective\.local=0 and objective\.contrast=0"):
        ObjectiveConfig(local=0, contrast=0)
