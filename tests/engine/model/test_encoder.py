"""Encoder and quantiser against straightforward implementations; the settings, and the model's
cost."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny import SMALL, seeded, waves
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from omnilead.engine.model.config import (
    ModelConfig,
    ObjectiveConfig,
    flops_per_crop,
    parse_settings,
)
from omnilead.engine.model.encoder import (
    Attention,
    ConvStack,
    Encoder,
    PositionalConvolution,
    attention_backend,
    take_tokens,
)
from omnilead.engine.model.encoders import initialise
from omnilead.engine.model.objectives import perplexity
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.model.quantizer import Quantizer, temperature
from omnilead.engine.settings.errors import ConfigError


def test_the_paper_s_model_has_as_many_parameters_as_the_authors():
    with torch.device("meta"):
        model = Pretrainer(ModelConfig(), ObjectiveConfig())
    assert sum(p.numel() for p in model.parameters()) == 90_883_072
    assert ModelConfig().tokens(2500) == 156
    assert round(flops_per_crop(ModelConfig()) / 1e9, 1) == 175.9


@pytest.mark.parametrize("samples", [2500, 799])
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_patches_are_convolutions(norm, samples):
    conv = ((24, 2), (16, 4), (16, 2))
    stack = ConvStack(replace(SMALL, conv=conv, conv_norm=norm, feature_grad=1.0))
    initialise(stack)
    for name, p in stack.named_parameters():
        if "norm" in name:
            nn.init.normal_(p)
    x = torch.randn(3, 12, samples, requires_grad=True)
    y, inputs = x, 12
    for block, (width, kernel) in zip(stack.blocks, conv, strict=True):
        y = F.conv1d(y, block.weight.view(width, kernel, inputs).transpose(1, 2), stride=kernel)
        if norm == "group" and y.shape[1] == 24:
            y = F.group_norm(y, width, block.norm.weight, block.norm.bias)
        elif norm == "layer":
            y = F.layer_norm(y.mT, (width,), block.norm.weight, block.norm.bias).mT
        y, inputs = F.gelu(y), width
    assert_close(stack(x), y.mT, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(y)
    expected = torch.autograd.grad((y * weight).sum(), x)
    got = torch.autograd.grad((stack(x).mT * weight).sum(), x)
    assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_features_gradient_is_scaled_or_stopped():
    x, grads = torch.randn(2, 12, 320), {}
    for factor in (1.0, 0.1, 0.0):
        encoder = Encoder(replace(SMALL, feature_grad=factor))
        initialise(encoder, torch.Generator().manual_seed(0))
        z, penalty = encoder.features(x)
        (z.square().mean() * 3 + z.sum() + penalty).backward()
        grads[factor] = encoder.conv.blocks[1].weight.grad
    assert_close(grads[0.1], 0.1 * grads[1.0])
    assert grads[0.0] is None


@pytest.mark.parametrize(("kernel", "training"), [(16, True), (7, False)])
def test_positional_convolution_is_torch_s_with_weight_norm(kernel, training):
    config = replace(SMALL, width=24, heads=2, position_kernel=kernel, position_groups=4)
    ours = PositionalConvolution(config).train(training)
    conv = nn.Conv1d(24, 24, kernel, padding=kernel // 2, groups=4)
    theirs = nn.utils.parametrizations.weight_norm(conv, dim=2)
    norm = theirs.parametrizations.weight
    with torch.no_grad():
        ours.gain.copy_(norm.original0.mul_(1.5))
        ours.direction.copy_(norm.original1)
        ours.bias.copy_(theirs.bias)
    x = torch.randn(2, 40, 24)
    expected = F.gelu(theirs(x.mT)[:, :, :40]).mT
    assert_close(ours(x), expected, rtol=1e-5, atol=2e-6)
    ours(x).square().sum().backward()
    expected.square().sum().backward()
    grads = [ours.gain.grad, ours.direction.grad]
    assert_close(grads, [norm.original0.grad, norm.original1.grad], rtol=1e-4, atol=5e-5)


def test_kernels_do_not_change_the_encoder():
    results = []
    for kernels in ("plain", "auto"):
        encoder = Encoder(replace(SMALL, kernels=kernels))
        initialise(encoder, torch.Generator().manual_seed(0))
        c = encoder(torch.randn(2, 12, 320, generator=torch.Generator().manual_seed(1)))
        (c * c.detach().cos()).sum().backward()
        results.append([c.detach(), *(p.grad for p in encoder.parameters() if p.grad is not None)])
    for plain, fast in zip(*results, strict=True):
        assert_close(fast, plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


def quantizer():
    made = Quantizer(SMALL, 32)
    initialise(made, torch.Generator().manual_seed(1))
    return made


def one_hot_product(q, z, tau, noise):
    """As in the authors' code: a straight-through one-hot vector times the codebook."""
    logits = q.logits(z).view(*z.shape[:2], q.books, q.codes)
    soft = ((logits + noise) / tau).softmax(-1)
    hard = F.one_hot(soft.argmax(-1), q.codes).float()
    return torch.einsum("rmgv,gvd->rmgd", hard - soft.detach() + soft, q.codebook).flatten(2)


def test_code_lookup_equals_the_one_hot_product():
    q, z, tau = quantizer(), torch.randn(3, 9, 32), torch.tensor(1.7)
    valid = torch.ones(3, 9, dtype=torch.bool)
    noise, weight = -torch.empty(3, 9, 2, 16).exponential_().log(), torch.randn(3, 9, 32)
    values = [q(z, valid, tau, noise).values_RMP, one_hot_product(q, z, tau, noise)]
    grads = [torch.autograd.grad((value * weight).sum(), [*q.parameters()]) for value in values]
    assert_close(*values, rtol=1e-4, atol=1e-5)
    assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_without_noise_the_most_probable_code_is_taken_and_padding_is_not_counted():
    q, z, valid = quantizer(), torch.randn(2, 8, 32), torch.arange(8) < torch.tensor([[8], [3]])
    out = q(z, valid, torch.ones(()), None)
    logits = q.logits(z).view(2, 8, 2, 16)
    assert torch.equal(out.codes_RMG, logits.argmax(-1))
    assert out.tokens == 11
    used = logits[valid]
    assert_close(out.share_GV / 11, used.softmax(-1).mean(0))
    assert_close(out.hard_GV / 11, F.one_hot(used.argmax(-1), 16).float().mean(0))
    assert perplexity(torch.full((2, 16), 1 / 16)) == pytest.approx(32, rel=1e-4)


def test_the_temperature_falls_to_its_end():
    config = ModelConfig()
    assert temperature(config, 0) == 2
    assert temperature(config, 1000) == pytest.approx(1.990025, abs=1e-6)
    assert temperature(config, 36_923) == pytest.approx(1.663, abs=1e-3)
    assert temperature(config, 277_258) > 0.5 == temperature(config, 277_259)


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 770}, {"layers": 2.5}, {"conv": []}, {"conv": [[256, 0]]},
        {"dropout": 1.0}, {"dropout": float("nan")}, {"code_width": 255}, {"width": 32, "heads": 3},
        {"tau_start": 0.1}, {"width": 10**9}, {"feature_grad": True}, {"patches": 7}, {"codebooks": 3},
        {"position_groups": 7}, {"conv_norm": "x" * 10_000}, {"causal": True},
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line_that_names_the_key(wrong):
    with pytest.raises(ConfigError) as caught:
        parse_settings(ModelConfig, wrong, "model")
    text = str(caught.value)
    assert f"model.{next(iter(wrong))}" in text and "\n" not in text and len(text) < 300


@pytest.mark.parametrize(
    "wrong",
    [{"local": -1}, {"negatives": 0}, {"temperature": 0}, {"form": "x"}],
)
def test_wrong_objectives_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"ObjectiveConfig: {next(iter(wrong))}="):
        ObjectiveConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"objective\.local=0 and objective\.contrast=0"):
        ObjectiveConfig(local=0, contrast=0)
    with pytest.raises(
        ConfigError, match=r"method='byol': use cmsc, simclr, 3kg, cpc, jepa, or your"
    ):
        ObjectiveConfig(method="byol")
    with pytest.raises(ConfigError, match=r"objective\.options=.*method=3kg takes no options"):
        ObjectiveConfig(method="3kg", options={"steps": 2})


@pytest.mark.parametrize("kernels", ["plain", "auto"])
def test_a_causal_encoder_sees_all_before_and_nothing_after(kernels):
    settings = {"conv_norm": "layer", "position_kernel": 64, "kernels": kernels}
    still, causal = (
        seeded(replace(SMALL, causal=causal, **settings)).encoder for causal in (False, True)
    )
    x_RLT = waves(1)[:, 0]
    x_RLT.requires_grad_()
    for encoder, sees in ((causal, False), (still, True)):
        (grad,) = torch.autograd.grad(encoder(x_RLT)[0, 20].square().sum(), x_RLT)
        by_token_N = grad[0].unflatten(1, (-1, 16)).abs().sum((0, 2))
        nothing = 1e-6 * by_token_N.max()  # the kernels on a CPU round
        assert (by_token_N[:21] > nothing).all()
        assert bool((by_token_N[21:] > nothing).any()) == sees
    assert_close(causal.eval()(x_RLT[..., :400]), causal(x_RLT)[:, :25], rtol=1e-4, atol=1e-5)


def test_which_attention_runs_is_known():
    dropped = replace(SMALL, attention_dropout=0.1)
    for config, expected in (
        (SMALL, "omnilead"),
        (replace(SMALL, kernels="plain"), "flash"),
        (replace(dropped, kernels="plain"), "math"),
        (replace(SMALL, causal=True, conv_norm="layer"), "flash"),
    ):
        assert attention_backend(Encoder(config)) == expected
    assert attention_backend(nn.Linear(2, 2)) == "none"
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_backend(Encoder(replace(SMALL, kernels="plain"))) == "math"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_said_of_attention_is_what_runs(dropout, causal, device):
    config = replace(SMALL, width=64, heads=1, kernels="plain", causal=causal, conv_norm="layer")
    layer = Attention(replace(config, attention_dropout=dropout)).to(device, torch.bfloat16)
    x = torch.randn(4, 156, 64, device=device, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        layer(x)
    ran = {event.key for event in traced.key_averages()}
    name = attention_backend(layer)
    name = "attention_math" if name == "math" else f"{name}_attention"
    assert any(key.startswith(f"aten::_scaled_dot_product_{name}") for key in ran)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_takes_no_mask(causal, monkeypatch):
    """With one, torch's fastest implementations on a GPU are out."""
    asked, attend = [], F.scaled_dot_product_attention

    def noted(*tensors, **how):
        asked.append((len(tensors), set(how)))
        return attend(*tensors, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    config = replace(SMALL, kernels="plain", causal=causal, conv_norm="layer")
    Encoder(config).train()(waves(3)[:, 0])
    assert asked == [(3, {"dropout_p", "is_causal"})] * SMALL.layers


def test_dropped_tokens_are_never_seen():
    encoder = seeded(SMALL).encoder.eval()
    z_RNF, penalty = encoder.features(torch.randn(2, 12, 2500))
    tokens = z_RNF.shape[1]
    assert penalty.shape == ()
    keep_RK = torch.stack([torch.randperm(tokens)[:40] for _ in range(2)])
    c_RKD = encoder.context(z_RNF, None, keep_RK)
    assert c_RKD.shape == (2, 40, SMALL.width)
    hidden_RN = torch.ones(2, tokens, dtype=torch.bool).scatter_(1, keep_RK, False)
    other_RNF = torch.where(hidden_RN[..., None], torch.randn_like(z_RNF), z_RNF)
    assert encoder.context(other_RNF, None, keep_RK).equal(c_RKD)
    every_RN = torch.stack([torch.randperm(tokens) for _ in range(2)])
    expected = take_tokens(encoder.context(z_RNF, None), every_RN)
    assert_close(encoder.context(z_RNF, None, every_RN), expected, rtol=1e-4, atol=1e-5)
