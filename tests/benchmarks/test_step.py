"""The re-creation of the authors' step gives our loss and gradients for the same weights and draws;
what is compared."""

import argparse
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import report, step, tables
from benchmarks.authors_step import compute_mask_indices
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


@pytest.mark.gpu
def test_the_bare_step_never_waits(tiny: str) -> None:
    advance = step.ours(step.StepRun(step.OURS, "bf16", batch=4, model=tiny, device="cuda"))
    advance()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")


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


@pytest.mark.gpu
def test_the_recreation_gives_our_loss_and_gradients_on_a_gpu() -> None:
    assert step.disagreement(replace(BASE, device="cuda")) <= step.TOLERANCE["cuda"]
