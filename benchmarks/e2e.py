"""Measure the overhead of the training loop, with its loader, DeepSpeed, optimiser and log, over a bare
training step.

For each data source, a fresh process starts `engine/pretrain.py` and replaces its loop by turns of
a few steps each:

    bare     benchmarks.step: forward, backward, AdamW on one batch; no DeepSpeed, no loader, no log
    held     the loop on one batch
    loaded   the loop on the loader's batches

Overhead is the time of `loaded` above `bare`, in CPU-seconds on a CPU, in seconds on a GPU; the
loader's part is the time of `loaded` above `held`. Both are medians over adjacent turns with 95 %
intervals. Each turn ends with a log line, on a CPU five times as many as train.log_every asks for;
a checkpoint is saved twice after the turns: the training waits for the second copy (`checkpoint`),
and it is on the disk later (`written`). Stall is the share of the time in which the loop waits
for a batch. Sources: tar (with the device's default backend) and zarr.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    CaseError,
    Cases,
    Result,
    describe_input,
    interval,
    make_dataset,
    median_and_range,
    percentages,
    rates,
    time_in_turns,
    time_work,
)

DEFAULT_MODEL = {"cpu": "small", "cuda": "paper"}
# Configs measured beside the default one. The steps of s4_cpc are so short that training on a GPU may wait for
# the loader
MORE_MODELS = {"cpu": (), "cuda": ("s4_cpc",)}
DEFAULT_BATCH = {"cpu": 64, "cuda": 256}  # 64 crops are the batch in the config `small`
STEPS_PER_TURN = {"cpu": 2, "cuda": 20}
DATA_SOURCES = {  # name of a source -> the settings that choose it
    "tar": (),
    "zarr": ("pipeline.backend=torch", "pipeline.source=zarr"),
}


@dataclass(frozen=True)
class LoopRun:
    """A case of the benchmark: a config and a source of data."""

    dataset: str
    run: str
    device: str = "cpu"
    model: str = "small"
    batch: int = 64  # crops per rank
    steps: int = 10  # steps per turn
    turns: int = 3
    threads: int = 2
    settings: tuple[str, ...] = ()  # further words for --set
    sides: tuple[str, ...] = ("bare", "held", "loaded")
    environment: dict[str, str] = field(default_factory=dict)


def loop_run_from_options(options: argparse.Namespace, work: Path) -> LoopRun:
    """Return the case for the options of the command line."""
    device = options.device
    model, batch = options.model or DEFAULT_MODEL[device], options.batch or DEFAULT_BATCH[device]
    dataset, run = str(work / "dataset"), str(work / "run")
    steps = options.steps or STEPS_PER_TURN[device]
    return LoopRun(dataset, run, device, model, batch, steps, options.repeats)


def prepare_input_and_cases(work: Path, options: argparse.Namespace) -> tuple[Result, Cases]:
    dataset = make_dataset(work, options.records or 600, format="both")
    base = loop_run_from_options(options, work)
    models = [base.model, *([] if options.model else MORE_MODELS[base.device])]
    cases: Cases = {}
    for model in models:
        for name, settings in DATA_SOURCES.items():
            run = replace(base, run=f"{base.run}-{name}-{model}", model=model, settings=settings)
            cases[f"{name}: {model}, {base.batch} crops"] = (compare_sides, (run,))
    model = " and ".join(models)
    facts = {"device": base.device, "model": model, "batch": base.batch, "steps": base.steps}
    return describe_input(dataset, **facts, precision=precision()), cases


def compare_sides(run: LoopRun) -> Result:
    """Time the sides `bare`, `held` and `loaded` (see the docstring of this file) in turns. Return their rates
    and the overheads in percent."""
    return rates_and_percentages(loop_turns(run), run.device)


def loop_turns(run: LoopRun) -> Result:
    """Start a training that runs the sides of `run` in turns, in place of Loop.train. Return what
    time_sides_in_turns measures. Loop.train stays replaced for the rest of this process."""
    os.environ.update(run.environment)
    import torch

    from omnilead.engine.training.loop import Loop

    torch.set_num_threads(run.threads)
    measured: Result = {}

    def train(loop: Loop, *_: Any) -> bool:
        measured.update(time_sides_in_turns(loop, run, original))
        return False  # says that training has not ended, so that no model is exported

    original, Loop.train = Loop.train, train  # type: ignore[method-assign]
    pretrain(run, "train.steps=1000000", "train.log_every=1000000")
    return measured


def pretrain(run: LoopRun, *settings: str, options: Sequence[str] = ()) -> None:
    """Run engine/pretrain.py in this process, with its output in a file beside the run. If it fails, raise
    a CaseError with the last line of the output."""
    from benchmarks.step import config_name
    from omnilead.engine import pretrain

    log = Path(f"{run.run}.{os.environ.get('RANK', 0)}.txt")
    settings = (
        f"run={run.run}",
        f"data.datasets={json.dumps([run.dataset])}",
        f"train.batch_crops={run.batch * int(os.environ.get('WORLD_SIZE', 1))}",
        f"train.precision={precision()}",
        "train.epochs=null",
        "train.schedule=fixed",
        "train.validate_every=0",
        "train.peak_tflops=1",  # any value, so that the peak for MFU is not measured
        "augment.rlm=0.5",
        *settings,
        *run.settings,
    )
    words = ["--config", config_name(run.model), *options, "--set", *settings]
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code = pretrain.main(words)
    if code:
        raise CaseError(log.read_text().strip().splitlines()[-1])


def time_sides_in_turns(loop: Any, run: LoopRun, train: Callable[[Any], bool]) -> Result:
    """Time turns of the run's sides inside a started training loop, and two checkpoints after them. `train`
    is the original Loop.train."""
    from benchmarks import step
    from omnilead.engine.training.train import COMPILE_DEFAULTS

    batches, load = iter(loop.loader), loop._next_batch
    first, state = load(batches)
    # a copy, because the loader will overwrite the buffer of the first batch
    held_batch = replace(first, x_BSLT=first.x_BSLT.clone())
    waits: list[float] = []
    save = loop._save
    # Loop.train ends with a checkpoint and a diagnosis, which must not count in each turn
    loop._save, loop._diagnose = (lambda: None), (lambda batch: None)

    def timed_next_batch(_: Any) -> Any:
        """Load the next batch, and add the seconds that it took to `waits`."""
        asked_at_s = time.perf_counter()
        batch = load(batches)
        waits.append(time.perf_counter() - asked_at_s)
        return batch

    def run_steps(next_batch: Callable[[Any], Any]) -> dict[str, float]:
        waits.clear()
        loop._next_batch, loop.total = next_batch, loop.progress.step + run.steps
        train(loop)
        step.synchronize(run.device)
        return {"waited_s": sum(waits)}

    def run_bare_steps() -> None:
        for _ in range(run.steps):
            advance()
        step.synchronize(run.device)

    if "bare" in run.sides:
        step_run = step.StepRun(step.OURS, precision(), run.batch, run.model, device=run.device)
        advance = step.prepare_ours(replace(step_run, compiled=COMPILE_DEFAULTS[run.device]))
    sides: Any = {
        "bare": run_bare_steps,
        "held": lambda: run_steps(lambda _: (held_batch, state)),
        "loaded": lambda: run_steps(timed_next_batch),
    }
    run_sides = {name: sides[name] for name in run.sides}
    rows = time_in_turns(run_sides, run.turns, run.steps * run.batch)
    last = loop.progress.step
    # two checkpoints, of which the second is reported: the first also allocates memory that later ones reuse
    for number in (last - 1, last):
        loop.progress.step = number
        saved = time_work(save)
        written = time_work(loop.writer.wait)
    return {
        "rows": rows,
        "checkpoint_s": saved["wall_s"],
        "written_s": saved["wall_s"] + written["wall_s"],
        "backend": loop.loader.backend,
    }


def precision() -> str:
    """Return bf16 or fp32: what `train.precision: auto` means on this machine."""
    from omnilead.engine.training.config import has_bf16

    return "bf16" if has_bf16() else "fp32"


def rates_and_percentages(measured: Result, device: str) -> Result:
    """Return the rates of `loaded` and `bare`, and overheads in percent, which compare adjacent turns."""
    rows = measured.pop("rows")

    def percent_above(side: str, other: str) -> dict[str, float]:
        return interval(p - 100 for p in percentages(rows[side], rows[other], device))

    return {
        **rates(rows["loaded"]),
        **rates(rows["bare"], "bare_"),
        "overhead_pct": percent_above("loaded", "bare"),
        "loop_pct": percent_above("held", "bare"),
        "loader_pct": percent_above("loaded", "held"),
        "stall_pct": median_and_range(
            100 * row["waited_s"] / row["wall_s"] for row in rows["loaded"]
        ),
        "repeats": len(rows["loaded"]),
        **measured,
    }
