"""A whole step: golden numbers, learning, every method, other encoders, low precision, one
graph."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tiny import SMALL, STILL, by_numpy, keys, seeded, waves
from torch import Tensor, nn

from omnilead.engine.common import ConfigError
from omnilead.engine.model.config import ObjectiveConfig
from omnilead.engine.model.draws import Draws, draw
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.training.train import compile_model

GOLDEN = {
    "loss": 6.714488,
    "loss_local": 4.815771,
    "loss_diversity": 0.1407744,
    "loss_features": 0.009498719,
    "accuracy_local": 0.04753464,
    "prob_perplexity": 27.49522,
    "code_perplexity": 15.16531,
    "masked": 196,
    "masked_share": 0.49,
    "loss_global": 1.789653,
    "accuracy_global": 0.625,
    "grad": 2.975036,
}
# Loss and norm of the gradient of ten steps with dropout, float32 on a CPU.
CURVE = [
    (6.768626, 2.743508),
    (6.652479, 1.941247),
    (6.667246, 2.077028),
    (6.462405, 2.613627),
    (6.044433, 4.386055),
    (5.464172, 3.823433),
    (5.164070, 3.214021),
    (4.998110, 2.667914),
    (4.788863, 1.161112),
    (4.799133, 0.667173),
]


def step(model: Pretrainer, crops: int = 4) -> dict[str, Tensor]:
    return dict(model(waves(crops), keys(crops), torch.tensor(2.0), ids_B=torch.arange(crops) // 2))


def test_golden_losses_and_gradient() -> None:
    """Numbers from when this code agreed with the authors' (tests/engine/test_parity.py); they
    reveal changed results."""
    model = by_numpy(seeded())
    out = step(model)
    out["loss"].backward()
    grad = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    values = {name: float(value.detach()) for name, value in out.items()} | {"grad": float(grad)}
    assert values == pytest.approx(GOLDEN, rel=2e-4)


def test_the_golden_curve() -> None:
    """Optimisations must not silently change results: draws, dropout masks, losses, gradients."""
    dropped = dict.fromkeys(STILL, 0.1)
    model = by_numpy(seeded(dataclasses.replace(SMALL, **dropped)))
    sgd, values = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9), []
    torch.manual_seed(0)
    for epoch in range(len(CURVE)):
        loss = model(waves(4), keys(4, epoch), torch.tensor(2.0))["loss"]
        sgd.zero_grad()
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        sgd.step()
        values.append((float(loss.detach()), float(norm)))
    for got, expected in zip(values, CURVE, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


def test_only_the_loss_has_a_gradient_and_it_is_the_weighted_sum() -> None:
    out = step(seeded(objective=ObjectiveConfig(local=2, diversity=0.3, features=5, contrast=0.5)))
    assert [name for name, value in out.items() if value.requires_grad] == ["loss"]
    weights = {"local": 2, "diversity": 0.3, "features": 5, "global": 0.5}
    torch.testing.assert_close(
        out["loss"].detach(), sum(w * out[f"loss_{name}"] for name, w in weights.items())
    )


def test_spare_slots_change_nothing() -> None:
    """M slots, some invalid, give the same as exactly one slot per masked token."""
    model = seeded()
    config = dataclasses.replace(SMALL, mask_trim=True)
    padded = draw(config, keys(4).flatten(), 50, 100)
    used = int(padded.valid_RM.sum(1)[0])
    assert padded.valid_RM[:, :used].all() and used < padded.valid_RM.shape[1]
    assert padded.noise_RMGV is not None
    slots = (padded.slot_RM, padded.valid_RM, padded.times_RMM[:, :, :used], padded.noise_RMGV)
    tight = Draws(padded.mask_RN, *(part[:, :used] for part in slots))
    results = []
    for draws in (padded, tight):
        model.zero_grad()
        out = model(waves(4), tau=torch.tensor(2.0), draws=draws)
        out["loss"].backward()
        results.append(
            list(out.values()) + [p.grad.clone() for p in model.parameters() if p.grad is not None]
        )
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class ConvEncoder(nn.Module):
    """A different encoder: patches, then a depthwise convolution over time with gated mixing of
    channels."""

    width = feature_width = 32

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.mask = (
            nn.Conv1d(12, 32, 16, 16),
            nn.LayerNorm(32),
            nn.Parameter(torch.zeros(32)),
        )
        self.mix, self.gate = nn.Conv1d(32, 32, 31, padding=15, groups=32), nn.Linear(32, 64)

    def features(self, x_RLT: Tensor) -> tuple[Tensor, Tensor]:
        z_RNF = self.patches(x_RLT).transpose(1, 2)
        return self.norm(z_RNF), z_RNF.square().mean()

    def context(self, z_RNF: Tensor, mask_RN: Tensor | None) -> Tensor:
        x = z_RNF if mask_RN is None else torch.where(mask_RN[..., None], self.mask, z_RNF)
        y: Tensor = x + F.glu(self.gate(F.silu(self.mix(x.transpose(1, 2))).transpose(1, 2)))
        return y


class Tokens(nn.Module):
    """A minimal encoder."""

    width = 24

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv1d(12, 24, 50, 50)

    def forward(self, x_RLT: Tensor) -> Tensor:
        y: Tensor = self.patches(x_RLT).transpose(1, 2).tanh()
        return y


@pytest.mark.parametrize(
    "objective, encoder",
    [
        (ObjectiveConfig(contrast=0), None),
        (ObjectiveConfig(local=0), None),
        (ObjectiveConfig(local=0, method="simclr", detach_norm=True), None),
        (ObjectiveConfig(local=0, method="3kg"), None),
        (ObjectiveConfig(form="authors", gathered=False), None),
        (ObjectiveConfig(), ConvEncoder),
        (ObjectiveConfig(local=0), Tokens),
    ],
    ids=["w2v", "cmsc", "simclr", "3kg", "authors", "another encoder", "the least encoder"],
)
def test_every_method_learns(objective: ObjectiveConfig, encoder: type[nn.Module] | None) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Pretrainer(
        dataclasses.replace(SMALL, layers=1), objective, encoder and encoder(), generator
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3 if encoder else 2e-3)
    x, ids, losses = waves(8), torch.arange(8), []
    for epoch in range(25):
        loss = model(x, keys(8, epoch), torch.tensor(2.0), ids_B=ids)["loss"]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5]), losses


def test_an_encoder_that_cannot_be_masked_is_refused_for_the_local_objective() -> None:
    with pytest.raises(ConfigError, match=r"objective\.local"):
        Pretrainer(SMALL, ObjectiveConfig(), encoder=Tokens())


@pytest.mark.parametrize("pure", [False, True], ids=["autocast", "weights"])
def test_bf16_is_finite_and_near(pure: bool) -> None:
    exact = step(seeded().eval())
    model = seeded().eval()
    if pure:
        model = model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=not pure):
        out = step(model)
    out["loss"].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    for name in ("loss_local", "loss_features", "loss_global"):
        assert float(out[name]) == pytest.approx(float(exact[name]), rel=0.05)
        assert out[name].dtype == torch.float32


def test_dropout_drops_and_evaluation_does_not() -> None:
    model = seeded(
        dataclasses.replace(
            SMALL, dropout=0.3, activation_dropout=0.2, attention_dropout=0.1, input_dropout=0.1
        )
    )
    assert step(model)["loss"] != step(model)["loss"]
    model.eval()
    assert step(model)["loss"] == step(model)["loss"]


def test_other_lengths_and_leads() -> None:
    model = seeded(dataclasses.replace(SMALL, leads=3, conv_norm="layer", mask_trim=True))
    loss = model(torch.randn(2, 2, 3, 999), keys(2), torch.tensor(1.0))["loss"]
    loss.backward()
    assert loss.isfinite()


def test_initial_weights_follow_the_generator_alone() -> None:
    one, other = seeded(), seeded()
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )
    assert float(one.encoder.layers[0].fc1.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    torch.testing.assert_close(one.encoder.position.weight(), one.encoder.position.direction)


@pytest.mark.parametrize("how", ["layers", "step"])
def test_nothing_in_a_step_breaks_the_graph(how: str) -> None:
    """One graph, or one for each part, for any draws: only traced, as compiling would take
    minutes."""
    model = seeded(dataclasses.replace(SMALL, layers=1))
    compiled = copy.deepcopy(model)
    compile_model(compiled, how, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for epoch in range(3):
            grads = []
            for m in (compiled, model):
                m.zero_grad()
                loss = m(waves(2), keys(2, epoch), torch.tensor(2.0 - 0.1 * epoch))["loss"]
                loss.backward()
                grads.append(
                    [loss.detach(), *(p.grad.clone() for p in m.parameters() if p.grad is not None)]
                )
            for got, expected in zip(*grads, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "how", ["plain eager", "auto eager", "plain layers", "auto layers", "auto step"]
)
def test_a_gpu_computes_what_a_cpu_does(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, compiled = how.split()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    config = dataclasses.replace(SMALL, kernels=kernels)
    losses, grads = [], []
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        model = seeded(config).to(device)
        compile_model(model, compiled if device.type == "cuda" else "eager")
        out = model(waves(4).to(device), keys(4).to(device), torch.tensor(2.0).to(device))
        out["loss"].backward()
        losses.append({name: value.detach().cpu() for name, value in out.items()})
        grads.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    for got, expected in zip(*grads[::-1], strict=True):
        torch.testing.assert_close(
            got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
        )


@pytest.mark.gpu
def test_a_gpu_draws_what_a_cpu_does() -> None:
    mine, theirs = (
        draw(SMALL, keys(16).flatten().to(device), 50, 20) for device in ("cuda", "cpu")
    )
    for got, expected in zip(mine[:4], theirs[:4], strict=True):
        assert got is not None and expected is not None and torch.equal(got.cpu(), expected)
    assert mine.noise_RMGV is not None
    torch.testing.assert_close(mine.noise_RMGV.cpu(), theirs.noise_RMGV, rtol=1e-4, atol=1e-4)
