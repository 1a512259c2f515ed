"""The re-creation of the authors' step gives our loss and gradients for the same weights and draws;
what is compared."""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import measure, report, step, tables
from benchmarks.authors_step import compute_mask_indices, draw
from benchmarks.measure import CaseError
from omnilead.engine.interop import fairseq
from omnilead.engine.interop.parity import authors_adam
from omnilead.engine.model.config import ModelConfig

torch.set_num_threads(1)
SMALL: dict[str, Any] = {
    "width": 48,
    "layers": 2,
    "heads": 4,
    "ffn": 96,
    "codes": 16,
    "projection": 32,
    "code_width": 32,
}
SMALL |= {"conv": ((32, 2),) * 4, "position_kernel": 16}
CONFIGS = {
    "small": ModelConfig(**SMALL),
    "one codebook, odd kernel, other spans": ModelConfig(
        **SMALL | {"codebooks": 1, "position_kernel": 15, "mask_span": 6}
    ),
    "plain kernels": ModelConfig(**SMALL | {"kernels": "plain"}),
    "no projection": ModelConfig(**SMALL | {"conv": ((48, 2),) * 4}),
}
BASE = step.StepRun(step.OURS, "fp32", threads=1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_recreation_gives_our_loss_and_gradients(config: ModelConfig) -> None:
    step.set_up(BASE)
    (model, loss), (again, expected) = step.both_sides(config, pairs=3)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    mine = fairseq.to_theirs({name: grad(p) for name, p in model.named_parameters()}, config)
    largest = max(float(grad(p).abs().max()) for p in again.parameters())
    for name, p in again.named_parameters():
        scale = float(grad(p).abs().max())
        scale = (
            largest if scale < 1e-6 * largest else scale
        )  # the key's bias: zero but for rounding
        assert float((mine[name] - grad(p)).abs().max()) <= 1e-4 * scale, name


def grad(p: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def test_masks_are_the_authors() -> None:
    """Spans, and every row trimmed to the smallest count."""
    np.random.seed(0)
    config = ModelConfig()
    counts = [compute_mask_indices(config, 8, 156).sum(1) for _ in range(50)]
    assert all(len(set(count.tolist())) == 1 for count in counts)
    mean = float(np.mean([count[0] for count in counts]))
    assert 55 < mean < 70  # 64 for 4 pairs, 55 for 64


def test_negatives_are_others_of_the_same_segment() -> None:
    drawn = draw(ModelConfig(), 100, 4, 156, torch.device("cpu"))
    masked = int(drawn.mask_indices[0].sum())
    other = drawn.neg_idxs.view(4, masked, 100) - masked * torch.arange(4)[:, None, None]
    assert other.min() == 0 and other.max() == masked - 1
    assert not (other == torch.arange(masked)[:, None]).any()


def test_adam_is_the_authors_and_for_small_eps_torchs() -> None:
    torch.manual_seed(0)
    mine, other = nn.Linear(5, 3), nn.Linear(5, 3)
    other.load_state_dict(mine.state_dict())
    adam = step.ADAM._replace(lr=1e-2, eps=1e-12)
    reference = torch.optim.AdamW(other.parameters(), adam.lr, adam.betas, adam.eps, adam.decay)
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for i in range(1, 4):
        for model in (mine, other):
            for p in model.parameters():
                p.grad = torch.sin(i * p.detach()) + 0.1
        authors_adam(mine, adam, moments, i)
        reference.step()
    for a, b in zip(mine.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    ("side", "precision"),
    [
        (step.OURS, "fp32"),
        (step.OURS, "autocast"),
        (step.OURS, "bf16"),
        (step.RECREATION, "fp32"),
        (step.RECREATION, "autocast"),
    ],
)
def test_each_case_trains(
    side: str, precision: str, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[nn.Module] = []
    for name in ("Pretrainer", "AuthorsStep"):
        monkeypatch.setattr(step, name, remember(getattr(step, name), made))
    stream = step.step(replace(BASE, side=side, precision=precision, batch=2, model=tiny))
    assert next(stream) == 0
    before = [p.detach().clone() for p in made[0].parameters()]
    assert next(stream) == 4  # two steps of two crops
    after = list(made[0].parameters())
    assert {p.dtype for p in after} == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) > 0.6 * len(after)
    assert all(p.isfinite().all() for p in after)
    assert torch.backends.cudnn.allow_tf32 == (
        side == step.RECREATION
    )  # torch's own, which our programs turn off


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def remember(kind: Any, made: list[nn.Module]) -> Any:
    def make(*arguments: Any) -> nn.Module:
        made.append(kind(*arguments))
        return made[-1]

    return make


def test_a_model_by_its_name() -> None:
    assert step.model_of("paper") == ModelConfig() == step.load(step.config_file("paper")).model
    assert replace(BASE, model="small", kernels="plain").config.kernels == "plain"
    assert step.model_of("small").width == 128


def test_the_bare_step_copies_as_the_loop_does(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From pinned memory, so that nothing waits for the device."""
    copied: list[np.ndarray] = []

    def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
        copied.append(array)
        return torch.from_numpy(array).to(device)

    monkeypatch.setattr(step, "to_device", to_device)
    advance = step.ours(replace(BASE, batch=2, model=tiny))
    advance(), advance()
    assert [keys.shape for keys in copied] == [(2, 2), (2, 2)] and not np.array_equal(*copied)


@pytest.mark.gpu
def test_the_bare_step_never_waits(tiny: str) -> None:
    advance = step.ours(step.StepRun(step.OURS, "bf16", batch=4, model=tiny, device="cuda"))
    advance()
    with measure.sync_debug_mode("error"):
        advance()


def part_of(rates: dict[str, float], on: str = "cpu", **facts: Any) -> dict[str, Any]:
    spreads = {name: {"median": rate, "low": rate, "high": rate} for name, rate in rates.items()}
    results = {
        name: {"per_s": each, "per_cpu_s": each, "peak_mb": 1024.0}
        for name, each in spreads.items()
    }
    config = {"device": on, "repeats": 3}
    return {
        "benchmark": "step",
        "config": config,
        "input": {"model": "paper", "gflop_per_crop": 175.9} | facts,
        "results": results,
    }


def test_ratios_compare_equal_batches_and_the_best_way_counts() -> None:
    rates = {run.name: 1.0 for run in step.runs(replace(BASE, compiled="step"), [4, 8])}
    rates |= {
        "matrix product: fp32": 352.0,
        "matrix product: bf16": 1760.0,
        "omnilead: fp32, 4 crops": 1.05,
    }
    rates |= {
        "omnilead: bf16, step compiled, 4 crops": 3.2,
        "omnilead: bf16, step compiled, 8 crops": 9.0,
    }
    rates["re-creation of fairseq-signals' step: fp32, 8 crops"] = 3.0
    table, fastest, note = tables.step(part_of(rates))
    assert fastest == "Fastest in bf16: omnilead: bf16, step compiled, 8 crops."
    assert (
        "| omnilead: bf16, step compiled, 4 crops | 3.2 | 3.2 | 3.2 to 3.2 | 32 % | 3.20x | 1.0 "
        "GB |" in table
    )
    assert (
        "| omnilead: bf16, step compiled, 8 crops | 9 | 9 | 9 to 9 | 90 % | 3.00x |" in table
        and "as released" in note
    )
    judged = [
        (case, value) for case, value, _ in report.judged(part_of(rates))
    ]  # the fewest crops are compared
    assert judged == [
        ("omnilead: bf16, step compiled, 4 crops", 3.2),
        ("omnilead: fp32, 4 crops", 1.05),
    ]
    for device, measured in (("NVIDIA H200", True), ("NVIDIA A100", False)):
        ((case, value, bar),) = report.judged(part_of(rates, "cuda", device=device))
        assert bool(case) == measured and not bar.met(value)
    del rates["matrix product: bf16"]
    assert "| 3.2 to 3.2 |  | 3.20x |" in next(tables.step(part_of(rates)))


def test_on_a_gpu_the_authors_autocast_is_also_a_baseline() -> None:
    runs = step.runs(replace(BASE, device="cuda"), [64])
    assert len({run.name for run in runs}) == len(runs)
    rates = {run.name: 2.0 if run.precision == "autocast" else 1.0 for run in runs}
    assert "| 1.00x 0.50x (its autocast) |" in next(
        tables.step(part_of(rates, "cuda", device="NVIDIA H200"))
    )


@pytest.mark.parametrize("difference", [2e-4, float("nan")])
def test_nothing_is_timed_while_the_sides_disagree(
    difference: float, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "call_fresh", lambda *_: difference)
    options = argparse.Namespace(device="cpu", model=tiny, batch=2, steps=None)
    with pytest.raises(SystemExit, match="nothing was timed"):
        step.prepare(Path(), options)
    monkeypatch.setattr(step, "call_fresh", lambda *_: 5e-5)
    prepared = step.prepare(Path(), options)
    assert prepared.input["loss_difference"] == 5e-5 and len(prepared.cases) == 2 + 2 + 3


def test_a_suite_compiles_its_cases_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the named cases, in a share of the time; a failure is ignored."""
    filled: list[tuple[str, float]] = []

    def call_fresh(function: Any, run: step.StepRun, seconds: float = 0) -> float:
        if function is step.disagreement:
            return 0.0
        assert function is step.warm
        filled.append((run.name, seconds))
        raise CaseError("no compiler")

    monkeypatch.setattr(step, "call_fresh", call_fresh)
    monkeypatch.setattr(step, "describe", lambda run: {})
    monkeypatch.setattr(measure, "deadline", time.monotonic() + 100)
    prepared = step.prepare(
        Path(), argparse.Namespace(device="cuda", model="small", batch=None, steps=None)
    )
    names = [name for name in prepared.cases if "64 crops" in name]
    prepared.warm_up(names)
    assert (
        sorted(name for name, _ in filled) == sorted(name for name in names if "compiled" in name)
        and len(filled) == 3
    )
    assert all(30 < seconds <= 100 * step.FILL_SHARE for _, seconds in filled)
    monkeypatch.setattr(measure, "deadline", time.monotonic())
    prepared.warm_up(names)
    assert len(filled) == 3


@pytest.mark.gpu
def test_the_recreation_gives_our_loss_and_gradients_on_a_gpu() -> None:
    assert step.disagreement(replace(BASE, device="cuda")) <= step.TOLERANCE["cuda"]
