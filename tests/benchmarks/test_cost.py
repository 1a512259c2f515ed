"""What a step must cost, by formula: its operations are the model's, its stages those that are timed. What a cluster sends."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from benchmarks import cost, fleet, stages, step
from engine.model.config import ModelConfig, ObjectiveConfig, flops_per_crop
from engine.model.pretrainer import Pretrainer
from engine.training import throughput

SMALL: dict[str, Any] = {"width": 48, "layers": 2, "heads": 4, "ffn": 96, "codes": 16, "projection": 32, "code_width": 32}
SMALL |= {"conv": ((32, 2),) * 4, "position_kernel": 16}
CONFIGS = {
    "small": ModelConfig(**SMALL),
    "layer norms, no projection, other kernels": ModelConfig(
        **SMALL | {"conv": ((16, 5), (48, 4)), "conv_norm": "layer", "mask_span": 6, "codebooks": 1, "leads": 3}
    ),
}
MACHINE = cost.Machine("a machine", {"bf16": 100.0, "fp32": 10.0}, 1000.0, "made up")


@pytest.mark.parametrize("config", [ModelConfig(), *CONFIGS.values()], ids=["paper", *CONFIGS])
@pytest.mark.parametrize("local", [True, False])
def test_operations_are_those_of_the_model(config: ModelConfig, local: bool) -> None:
    for batch in (1, 7):
        found = sum(one.all_flops for one in cost.stages(config, batch, "bf16", local=local))
        assert found == pytest.approx(batch * flops_per_crop(config, local=local), rel=1e-12)
    assert sum(one.all_flops for one in cost.stages(ModelConfig(), 1, "fp32")) / 1e9 == pytest.approx(175.9, abs=0.05)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("local", [1.0, 0.0])
def test_parameters_are_those_of_the_model(config: ModelConfig, local: float) -> None:
    model = Pretrainer(config, ObjectiveConfig(local=local))
    assert sum(p.numel() for p in model.parameters()) == cost.parameters(config, local > 0)
    assert cost.parameters(ModelConfig()) == 90_883_072


def test_bytes_of_a_product_and_of_an_elementwise_stage() -> None:
    """Counted by hand: one layer, 4 rows of 156 tokens."""
    config = ModelConfig(layers=1)
    found = {one.name: one for one in cost.stages(config, 2, "bf16")}
    tokens = 4 * 156
    x, w, y = tokens * 768 * 2, 768 * 3072 * 2, tokens * 3072 * 2
    assert found["fc1"].forward_bytes == x + w + y
    assert found["fc1"].backward_bytes == (y + w + x) + (y + x + w)  # the input's gradient, the weight's
    assert found["GELU"].forward_bytes == 2 * y and found["GELU"].backward_bytes == 3 * y
    assert found["attention"].forward_bytes == 4 * x  # q, k, v in, one out: no scores
    single = {one.name: one for one in cost.stages(config, 2, "fp32")}
    assert single["fc1"].all_bytes == 2 * found["fc1"].all_bytes and single["fc1"].all_flops == found["fc1"].all_flops


def test_time_is_the_longer_of_both_roofs() -> None:
    compute = cost.Stage("compute", flops=1e12, forward_bytes=1.0, backward_bytes=1.0, times=3)
    assert compute.ms(MACHINE, "bf16") == pytest.approx(3 * 3 * 10) and compute.ms(MACHINE, "fp32") == pytest.approx(900)
    memory = cost.Stage("memory", flops=0, forward_bytes=1e9, backward_bytes=3e9)
    assert memory.ms(MACHINE, "bf16") == pytest.approx(1 + 3)
    assert (compute.bound(MACHINE, "bf16"), memory.bound(MACHINE, "bf16")) == ("compute", "memory")
    mixed = cost.Stage("compute-bound one way, memory-bound the other", flops=1e11, forward_bytes=1.0, backward_bytes=9e9)
    assert mixed.ms(MACHINE, "bf16") == pytest.approx(1 + 9)


def test_an_h200_could_do_more_than_the_bar() -> None:
    """Else the bar would be no bar: nothing in the formula asks for more than the machine has."""
    possible = 512e3 / cost.total_ms(cost.stages(ModelConfig(), 512, "bf16"), cost.MACHINES["h200"], "bf16")
    assert fleet.BAR_CROPS_PER_S < possible < 790e3 / 175.9
    assert (cost.MACHINES["h200"].gb_per_s, cost.MACHINES["h200"].source) == (4800, "bf16 measured, else data sheet")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_stages_timed_are_those_of_the_formula(config: ModelConfig) -> None:
    """And what each gives back has the shape that the next one wants, and a gradient for what it was given."""
    torch.manual_seed(0)
    model = Pretrainer(config, ObjectiveConfig()).train()
    run = step.Run(step.OURS, "fp32", 2)
    found = stages.timed(model, 2, "fp32", "cpu")
    assert {*found, "gradient norm, AdamW"} == {one.name for one in cost.stages(config, 2, "fp32")}
    for name, (function, inputs) in found.items():
        stages.both_ways(function, inputs, run)()
        wanted = [x for x in inputs if x.requires_grad]
        assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in wanted), name
        assert wanted or name in ("convolution 1", "draws")
    used = {name for name, p in model.named_parameters() if p.grad is not None}
    lacking = {name for name, _ in model.named_parameters()} - used
    assert all(name.startswith("encoder.layers.1.") for name in lacking)  # the first layer stands for all


@pytest.mark.parametrize("precision", step.PRECISIONS)
def test_a_step_explained(precision: str, tiny: str) -> None:
    run = step.Run(step.OURS, precision, batch=2, model=tiny, threads=1)
    formula = cost.stages(run.config, 2, precision)
    machine = cost.Machine("a machine", dict.fromkeys(step.PRECISIONS, 0.01), 1.0, "made up")
    results = stages.beside(formula, stages.measured(run), machine, precision)
    gaps = [r["gap_ms"] for name, r in results.items() if name not in (stages.SUM, stages.WHOLE)]
    assert gaps == sorted(gaps, reverse=True) and len(gaps) == len(formula)
    assert all(r["ms"]["low"] <= r["ms"]["median"] <= r["ms"]["high"] for r in results.values())
    assert results[stages.SUM]["gflop"] == pytest.approx(2 * flops_per_crop(run.config) / 1e9)
    assert results[stages.SUM]["predicted_ms"] == pytest.approx(cost.total_ms(formula, machine, precision))


def test_each_stage_is_compiled_for_its_own_shape(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fc1 and fc2 are the same code: the second would be compiled for any shape."""
    done: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: done.append(how) or function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))
    monkeypatch.setattr(step, "ours", lambda run: lambda: None)
    stages.measured(step.Run(step.OURS, "fp32", batch=2, model=tiny, threads=1, compiled="step"))
    each = ["reset", {"dynamic": False, "options": throughput.AGAIN}]
    assert done == [*each * (len(stages.timed(Pretrainer(ModelConfig(**SMALL), ObjectiveConfig()), 2, "fp32", "cpu"))), "reset"]


def test_stages_are_compiled_as_the_loop_compiles(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch is given by train.compile=layers, and what of it each stage has: all but diversity and the loss of what is
    pooled."""
    done: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: done.append(function) or function)
    monkeypatch.setattr(step, "ours", lambda run: lambda: None)
    monkeypatch.setattr(stages, "times_ms", lambda *_: [1.0])
    found = stages.measured(step.Run(step.OURS, "fp32", batch=2, model=tiny, threads=1, compiled="layers"))
    names = [*found][: [*found].index("gradient norm, AdamW")]
    inner = [function.__name__ for function in done[:2]]
    assert sorted(inner) == ["codes", "pool"] and len(done) == 2 + len(names) - len(stages.PARTLY)
    model = Pretrainer(ModelConfig(**SMALL), ObjectiveConfig())
    throughput.compile_model(model, "layers")
    loops = {getattr(function, "__name__", "") for function in done[2 + len(names) - len(stages.PARTLY) :]}
    assert loops == {"features", "enter", "_call_impl", "draw", "compare", "pool"}  # layers between: every stage is in one
    done.clear()
    stages.measured(step.Run(step.OURS, "fp32", batch=2, model=tiny, threads=1))
    assert done == []


def test_a_gpu_waits_for_the_host_before_a_stage_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.record, self.synchronize = lambda: told.append("event"), lambda: told.append("wait")

        def elapsed_time(self, other: Any) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: told.append("sleep"))
    assert stages.times_ms(lambda: told.append("work"), "cuda") == [2.0] * stages.REPEATS["cuda"]
    assert told == ["work", *["sleep", "event", "work", "event", "wait"] * stages.REPEATS["cuda"]]


def test_a_layers_stage_counts_once_for_each_layer() -> None:
    formula = [one for one in cost.stages(ModelConfig(), 4, "bf16") if one.name in ("fc1", "projection")]
    results = stages.beside(formula, {"fc1": [2.0], "projection": [2.0], stages.WHOLE: [30.0]}, MACHINE, "bf16")
    assert results["fc1"]["ms"]["median"] == 24.0 and results["projection"]["ms"]["median"] == 2.0
    assert results[stages.SUM]["ms"]["median"] == 26.0 and results[stages.WHOLE]["ms"]["median"] == 30.0


def test_one_gpu_sends_nothing() -> None:
    alone = fleet.step(ModelConfig(), 1, 512, 2700.0)
    assert alone.megabytes == 0 and alone.efficiency == alone.overlapped == 1
    assert fleet.hours(ModelConfig(), 2700 * 3600, 1, 512, 2700.0) == pytest.approx(1.0)


def test_scores_grow_with_the_candidates() -> None:
    """64 GPUs x 512 crops: 1,024 halves against 65,536, of which 1,024 are there on one GPU too."""
    found = fleet.step(ModelConfig(), 64, 512, 2700.0)
    assert found.scores_s == pytest.approx(3 * 2 * 1024 * (65_536 - 1024) * 768 / 50e12)
    spent = found.gradients_s + found.weights_s + found.candidates_s + found.scores_s
    assert found.efficiency == pytest.approx(found.compute_s / (found.compute_s + spent))


def test_what_a_cluster_sends() -> None:
    eight = fleet.step(ModelConfig(), 8, 64, 2700.0)
    weights, candidates = 3 * 2 * 90_883_072, 2 * 8 * 64 * 2 * 768 * 4  # gradients go around twice: an all-reduce
    assert eight.megabytes == pytest.approx(7 / 8 * (weights + candidates) / 1e6)
    assert eight.gradients_s == pytest.approx(2 * eight.weights_s) == pytest.approx(7 / 8 * 4 * 90_883_072 / 450e9 + 14 * 5e-6)
    kept = [fleet.step(ModelConfig(), gpus, 512, 2700.0) for gpus in fleet.RANKS]
    assert all(a.efficiency > b.efficiency for a, b in pairwise(kept))
    assert all(one.efficiency <= one.overlapped < 1 and math.isfinite(one.compute_s) for one in kept)
