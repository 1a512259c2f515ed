"""Where a step's time goes: the forward and backward time of each stage, and the least time it
needs (a roofline model).

A stage is a module or method of the model; its inputs are recorded in one real step. Its work is at
least the matrix products that torch counts (not those in our own kernels) and moving each tensor
that enters or leaves once: inputs, outputs, weights and their gradients. The predicted time is the
longer of operations / peak and bytes / bandwidth, where peak and bandwidth are those of a large
matrix product and a large copy on this machine. Sorted by gap (measured minus predicted), this is a
work list. Nested stages are not in the sum. If the sum is below the whole step, the rest is glue;
if above, stages leave data in the cache for the next. Times are CPU-milliseconds on a CPU,
milliseconds between events on a GPU, where stages are compiled.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import step
from benchmarks.measure import call_fresh, say, spread
from benchmarks.step import StepRun
from omnilead.engine.model.config import ObjectiveConfig
from omnilead.engine.model.draws import row_keys
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.training.train import INDUCTOR_OPTIONS

REPEATS = {"cpu": 3, "cuda": 20}
BATCH = {"cpu": 4, "cuda": 256}
SUM, WHOLE, OPTIMIZER = "all stages", "the whole step", "gradient norm, AdamW"
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
AHEAD = 20_000_000  # GPU cycles, 10 ms
OPTIMIZER_BYTES = {
    "fp32": 32,
    "autocast": 32,
    "bf16": 30,
}  # per parameter: gradient, float32 weight, two moments, bf16 copy
STAGES = {  # attribute of the model -> (name, enclosing stage)
    "encoder.features": ("convolutions and feature norm", ""),
    "encoder.enter": ("projection, mask, position, norm", ""),
    "encoder.position": ("positional convolution", "encoder.enter"),
    "encoder.layers.0": ("layer", ""),
    "encoder.layers.0.attention": ("attention of a layer", "encoder.layers.0"),
    "encoder.layers.0.fc1": ("fc1 of a layer", "encoder.layers.0"),
    "encoder.layers.0.fc2": ("fc2 of a layer", "encoder.layers.0"),
    "draw": ("draws", ""),
    "compare": ("quantizer, projections, local loss", ""),
    "pool": ("pooling", ""),
}


class Stage(NamedTuple):
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    times: int = 1  # number of layers
    within: str = ""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and return a part of a record."""
    base = step.base_run(options)
    run = replace(base, batch=options.batch or BATCH[base.device])
    machine = call_fresh(this_machine, run)
    say(f"{run.batch} crops, stage by stage")
    facts = step.describe(run) | {
        "crops": run.batch,
        "precision": run.precision,
        "compiled": run.compiled,
    }
    return {
        "input": facts,
        "machine": machine,
        "results": compare(call_fresh(measured, run), machine),
    }


def measured(run: StepRun) -> dict[str, dict[str, Any]]:
    """Milliseconds, operations and bytes of each stage and of the whole step. Call it in a fresh
    process."""
    step.set_up(run)
    model = Pretrainer(run.config, ObjectiveConfig()).to(run.device).train()
    optimize, gradients = (
        step.optimizer(model, run.precision),
        [torch.randn_like(p) for p in model.parameters()],
    )

    def update() -> None:
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        optimize()

    results: dict[str, dict[str, Any]] = {}
    for stage in recorded_stages(model, run):
        # stages share code, which for a second shape would get dynamic shapes, which are slower
        torch.compiler.reset()
        flops, bytes_ = count(stage, model, run)
        function = stage.function
        if run.compiled != "eager":
            function = torch.compile(function, dynamic=False, options=INDUCTOR_OPTIONS)
        ms = times_ms(partial(both_ways, function, stage.arguments, run), run.device)
        results[stage.name] = {
            "flops": flops * stage.times,
            "bytes": bytes_ * stage.times,
            "within": bool(stage.within),
        }
        results[stage.name]["times_ms"] = [each * stage.times for each in ms]
        model.zero_grad()
    weights = sum(p.numel() for p in model.parameters())
    results[OPTIMIZER] = {
        "flops": 0,
        "bytes": weights * OPTIMIZER_BYTES[run.precision],
        "within": False,
    }
    results[OPTIMIZER]["times_ms"] = times_ms(update, run.device)
    torch.compiler.reset()
    results[WHOLE] = {"times_ms": times_ms(step.ours(run), run.device)}
    return results


def recorded_stages(model: Pretrainer, run: StepRun) -> list[Stage]:
    """The stages with their inputs in one real step."""
    recorded: dict[str, Stage] = {}
    originals = []

    def recording(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
        name, within = STAGES[path]

        def record(*arguments: Any) -> Any:
            kept = tree_map_only(
                Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), arguments
            )
            recorded[path] = Stage(
                name, function, kept, run.config.layers if ".layers." in path else 1, within
            )
            return function(*arguments)

        return record

    for path in STAGES:
        owner, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        if isinstance(part := getattr(owner, name), nn.Module):
            owner, name = part, "forward"
        originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, recording(path, getattr(owner, name)))
    x_BSLT = torch.randn(run.batch, 2, run.config.leads, step.SAMPLES, device=run.device)
    keys_BS = torch.from_numpy(row_keys(1, 0, np.arange(run.batch))).to(run.device)
    both_ways(
        lambda *batch: model(*batch)["loss"],
        (x_BSLT, keys_BS, torch.tensor(1.9, device=run.device)),
        run,
    )
    for owner, name, function in originals:
        setattr(owner, name, function)
    model.zero_grad()
    return [recorded[path] for path in STAGES]


def both_ways(
    function: Callable[..., Any], arguments: tuple[Any, ...], run: StepRun
) -> list[Tensor]:
    """Run forward, and backward from gradients of ones if any; returns the outputs."""
    for x in leaves(arguments):
        x.grad = None
    with torch.autocast(run.device, torch.bfloat16, enabled=run.precision == "autocast"):
        out = leaves(function(*arguments))
    if differentiable := [y for y in out if y.requires_grad]:
        torch.autograd.backward(differentiable, [torch.ones_like(y) for y in differentiable])
    return out


def leaves(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def count(stage: Stage, model: nn.Module, run: StepRun) -> tuple[int, int]:
    """Operations of matrix products, and the least bytes to move: forward reads inputs and
    weights and writes outputs; backward reads all of these or their gradients again and writes
    the gradients of inputs and weights."""
    with FlopCounterMode(display=False) as counter:
        out = both_ways(stage.function, stage.arguments, run)
    weights = sum(p.nbytes for p in model.parameters() if p.grad is not None)
    inputs = leaves(stage.arguments)
    moved = (
        sum((3 if x.requires_grad else 2) * x.nbytes for x in inputs)
        + 3 * weights
        + 2 * sum(y.nbytes for y in out)
    )
    return counter.get_total_flops(), moved


def times_ms(once: Callable[[], Any], device: str) -> list[float]:
    once()
    times = []
    for _ in range(REPEATS[device]):
        if device == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(
                AHEAD
            )  # lets the host launch ahead, as in a step; small kernels would wait for it otherwise
            began.record()
            once()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended))
        else:
            since = time.process_time()
            once()
            times.append((time.process_time() - since) * 1e3)
    return times


def this_machine(run: StepRun) -> dict[str, Any]:
    """The rates of a large matrix product and a large copy, each the fastest of several. Call it in
    a fresh process."""
    step.set_up(run)
    dtype, size = (
        torch.float32 if run.precision == "fp32" else torch.bfloat16,
        step.PRODUCT_SIZE[run.device],
    )
    a, b = (torch.randn(size, size, device=run.device).to(dtype) for _ in range(2))
    product_ms = min(
        times_ms(lambda: torch.mm(a, b), run.device) + times_ms(lambda: torch.mm(a, b), run.device)
    )
    source = torch.ones(COPY_BYTES[run.device] // 4, device=run.device)
    target = torch.empty_like(source)
    copy_ms = min(times_ms(lambda: target.copy_(source), run.device))
    name = torch.cuda.get_device_name() if run.device == "cuda" else "this machine, per CPU-second"
    rates = {
        "tflops": 2 * size**3 / product_ms / 1e9,
        "gb_per_s": 2 * source.nbytes / copy_ms / 1e6,
    }
    return {"name": name, "source": "measured: product and copy"} | rates


def compare(
    stages: dict[str, dict[str, Any]], machine: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Predicted and measured times of each stage, largest gap first; then the sum and the whole
    step."""
    results: dict[str, dict[str, Any]] = {}
    whole = stages.pop(WHOLE)
    for name, stage in stages.items():
        ms = spread(stage["times_ms"])
        by_product, by_bytes = (
            stage["flops"] / machine["tflops"] / 1e9,
            stage["bytes"] / machine["gb_per_s"] / 1e6,
        )
        predicted = max(by_product, by_bytes)
        results[name] = {"ms": ms, "predicted_ms": predicted, "gap_ms": ms["median"] - predicted}
        results[name] |= {
            "bound": "memory" if by_bytes > by_product else "compute",
            "within": stage["within"],
        }
        results[name] |= {"gflop": stage["flops"] / 1e9, "gb": stage["bytes"] / 1e9}
    results = dict(sorted(results.items(), key=lambda item: -float(item[1]["gap_ms"])))
    counted = [result for result in results.values() if not result["within"]]
    both = {key: sum(float(r[key]) for r in counted) for key in ("predicted_ms", "gflop", "gb")}
    summed = {key: sum(float(r["ms"][key]) for r in counted) for key in ("median", "low", "high")}
    for name, ms in ((SUM, summed), (WHOLE, spread(whole["times_ms"]))):
        results[name] = {
            "ms": ms,
            **both,
            "gap_ms": ms["median"] - both["predicted_ms"],
            "bound": "",
        }
    return results
