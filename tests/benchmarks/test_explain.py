"""The stages of a step: recorded inputs of a real step, and the operations and bytes that each
needs."""

from collections import Counter

import pytest
import torch

from benchmarks import explain, step
from omnilead.engine.model.config import ObjectiveConfig, flops_per_crop
from omnilead.engine.model.pretrainer import Pretrainer

MACHINE = {"name": "a machine", "tflops": 0.01, "gb_per_s": 1.0, "source": "made up"}


def test_a_step_by_its_stages(tiny: str) -> None:
    run = step.StepRun(step.OURS, "bf16", batch=2, model=tiny, threads=1)
    measured = explain.measured(run)
    flops = sum(
        stage["flops"]
        for name, stage in measured.items()
        if name != explain.WHOLE and not stage["within"]
    )
    assert (
        1 <= flops / (2 * flops_per_crop(run.config)) < 1.2
    )  # the local loss computes more than the formula asks for
    assert (
        measured["fc1 of a layer"]["flops"]
        == 3 * 2 * run.config.layers * 4 * run.config.tokens(2500) * 48 * 96
    )
    results = explain.compare(measured, MACHINE)
    *stages, (_, summed), (_, whole) = results.items()
    gaps = [r["gap_ms"] for _, r in stages]
    assert gaps == sorted(gaps, reverse=True) and len(gaps) == len(explain.STAGES) + 1
    assert all(r["ms"]["low"] <= r["ms"]["median"] <= r["ms"]["high"] for r in results.values())
    assert summed["gflop"] == pytest.approx(flops / 1e9) and whole["ms"]["median"] > 0


def test_the_predicted_work_of_a_stage() -> None:
    run = step.StepRun(step.OURS, "fp32")
    linear, x_ND = torch.nn.Linear(8, 4), torch.randn(10, 8, requires_grad=True)
    flops, moved = explain.count(explain.Stage("linear", linear, (x_ND,)), linear, run)
    assert flops == 3 * 2 * 10 * 8 * 4
    assert moved == 4 * (3 * 80 + 3 * (32 + 4) + 2 * 40)  # input, weights, output
    stage = {"flops": 1e9, "bytes": 1e6, "times_ms": [7.0, 5.0, 6.0], "within": False}
    measured = {
        "a": stage,
        "b": stage | {"within": True, "bytes": 1e9},
        explain.WHOLE: {"times_ms": [9.0]},
    }
    results = explain.compare(measured, MACHINE)
    assert results["a"]["predicted_ms"] == pytest.approx(100) and results["a"]["bound"] == "compute"
    assert results["b"]["predicted_ms"] == pytest.approx(1000) and results["b"]["bound"] == "memory"
    assert (
        results[explain.SUM]["ms"]["median"] == 6.0 and results[explain.SUM]["gflop"] == 1.0
    )  # without b, which lies within


def test_every_weight_has_a_stage_and_the_model_is_as_before(tiny: str) -> None:
    run = step.StepRun(step.OURS, "fp32", batch=2, model=tiny, threads=1)
    model = Pretrainer(run.config, ObjectiveConfig()).train()
    stages = explain.recorded_stages(model, run)
    assert (
        model.encoder.position.forward.__func__ is type(model.encoder.position).forward
    )  # nothing records any more
    for stage in stages:
        if not stage.within:
            explain.both_ways(stage.function, stage.arguments, run)
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert all(
        name.startswith("encoder.layers.1.") for name in without
    )  # the first layer stands for all


def test_each_stage_is_compiled_for_its_own_shape(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fc1 and fc2 share code: the second would be compiled with dynamic shapes."""
    done: list[str] = []
    monkeypatch.setattr(
        torch, "compile", lambda function, **how: done.append("compile") or function
    )
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))
    monkeypatch.setattr(step, "ours", lambda run: lambda: None)
    explain.measured(
        step.StepRun(step.OURS, "fp32", batch=2, model=tiny, threads=1, compiled="step")
    )
    assert Counter(done) == {"reset": len(explain.STAGES) + 1, "compile": len(explain.STAGES)}
