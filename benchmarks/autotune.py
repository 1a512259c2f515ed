"""Which settings are the fastest here: a short sweep, and the --set lines that use what it found.

    python -m benchmarks.run step --autotune [--device cpu|cuda] [--model paper] [--precision bf16] [--batches 64 128 256 512]

First the micro-batch, smallest first, until memory is full or the rate falls; of those within 2 % of the fastest, the largest,
because the crops of a micro-batch are CMSC's candidates. Then one setting after another at that micro-batch: torch.compile,
how attention and the positional convolution are computed; kept if 1 % faster. Every try is a process of its own.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import step
from benchmarks.measure import Progress, run_cases
from benchmarks.step import FIGURE, OURS, Run
from engine.training.throughput import COMPILED

SWEEP = {"cpu": (2, 4, 8), "cuda": (64, 128, 256, 512)}
STEPS = {"cpu": 1, "cuda": 10}
CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {
    "cpu": {"attention": ("sdpa", "manual"), "position": ("conv", "dft")},  # compiling takes minutes there, for nothing
    "cuda": {
        "compiled": ("step", "eager"),
        "attention": ("flash", "efficient", "cudnn", "short", "manual"),
        "position": ("conv", "blocks", "dft"),
    },
}
ALIKE, BETTER, FALLING = 0.98, 1.01, 0.97

Rate = Callable[[Run], float]  # crops a second; 0: it could not be


def measure(work: Path, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    if options.precision == "autocast":
        step.refuse("--precision autocast: the loop has fp32 and bf16: use one of them")
    base = replace(step.base_run(options), precision=options.precision, compiled=COMPILED[options.device])
    base = replace(base, steps=options.steps or STEPS[base.device])
    results, left_out = dict[str, Any](), dict[str, str]()

    def rate(run: Run) -> float:
        found = run_cases(step.cases([run]), options.repeats, progress, left_out, in_one_process=True)
        results.update(found)
        step.completed(results, [run])
        return float(found[run.name][FIGURE[run.device]]["median"]) if run.name in found else 0.0

    rate(replace(base, side=step.PRODUCT))  # what MFU is a share of
    batches = tuple(sorted(options.batches or SWEEP[base.device]))
    best = search(base, batches, CHOICES[base.device], rate)
    if best is None:
        step.refuse(f"--batches {' '.join(map(str, batches))}: none could be trained: {'; '.join(left_out.values())}")
    print(step.table(results))
    for name, reason in left_out.items():
        print(f"{name}: not possible: {reason}")
    print(f"fastest: {best.name}\n{' '.join(f'--set {each}' for each in settings(best))}")
    return {"input": step.facts(base), "results": results, "left_out": left_out, "best": best.name, "settings": settings(best)}


def search(base: Run, batches: tuple[int, ...], choices: dict[str, tuple[Any, ...]], rate: Rate) -> Run | None:
    rates: dict[Run, float] = {}
    for batch in batches:
        run = replace(base, side=OURS, batch=batch)
        rates[run] = rate(run)
        if rates[run] < FALLING * max(rates.values()) or rates[run] == 0:
            break
    fastest = max(rates.values())
    if fastest == 0:
        return None
    best = max((run for run, found in rates.items() if found >= ALIKE * fastest), key=lambda run: run.batch)
    reached = rates[best]
    for key, values in choices.items():
        for value in values:
            found = rate(run := replace(best, **{key: value}))
            if found > BETTER * reached:
                best, reached = run, found
    return best


def settings(run: Run) -> list[str]:
    return [
        f"train.precision={run.precision}",
        f"train.micro_batch={run.batch}",
        f"train.compile={run.compiled}",
        f"model.attention={run.attention}",
        f"model.position={run.position}",
    ]
