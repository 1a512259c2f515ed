"""The time from the command to the first step: the quick start on a synthetic dataset, started as a
user would.

The clock runs from the start of the command until metrics.jsonl has its first line, that of step 1
(after the validation at step 0), or until the command ends: steps, validation, checkpoint, export,
report. Imports come from the page cache.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import Benchmark, CaseError, describe, make_dataset, spread

ROOT = Path(__file__).parents[1]
CROPS = 300  # about as many as the quick start makes if there is no dataset
DEEPSPEED, PYTHON = "deepspeed engine/pretrain.py", "python engine/pretrain.py"
COMMANDS = {
    DEEPSPEED: (sys.executable, "-m", "deepspeed.launcher.runner", "-q", "engine/pretrain.py"),
    PYTHON: (sys.executable, "engine/pretrain.py"),
}


def prepare(work: Path, options: argparse.Namespace) -> Benchmark:
    dataset, steps = make_dataset(work, CROPS), options.steps or 150
    cases = {
        f"first step: {DEEPSPEED}": (repeated, (DEEPSPEED, str(work), 1, options.repeats, True)),
        f"{steps} steps and the end: {DEEPSPEED}": (
            repeated,
            (DEEPSPEED, str(work), steps, options.repeats),
        ),
        f"first step: {PYTHON}": (repeated, (PYTHON, str(work), 1, options.repeats, True)),
    }
    return Benchmark(describe(dataset, device=options.device), cases)


def repeated(
    name: str, work: str, steps: int, repeats: int, until_first: bool = False
) -> dict[str, Any]:
    runs = [
        start(COMMANDS[name], Path(work) / "run", f"{work}/dataset", steps, until_first)
        for _ in range(repeats + 1)
    ][1:]
    seconds, cpu_seconds = zip(*runs, strict=True)
    return {"seconds": spread(seconds), "cpu_seconds": spread(cpu_seconds), "repeats": repeats}


def start(
    command: Sequence[str], run: Path, dataset: str, steps: int, until_first: bool
) -> tuple[float, float]:
    """Seconds and CPU-seconds to the first line of metrics.jsonl, or to the end of the command."""
    settings = (f"run={run}", f"data.datasets=[{dataset}]", f"train.steps={steps}")
    words = [*command, *(word for each in settings for word in ("--set", each))]
    metrics, first, before, began = run / "metrics.jsonl", None, children_s(), time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:  # not a pipe, which would block when full
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        )
        while process.poll() is None:
            if until_first and not first and metrics.exists() and metrics.stat().st_size:
                first = time.perf_counter() - began, tree_s(process.pid)
            time.sleep(0.02)
        ended = time.perf_counter() - began, children_s() - before
        log.seek(0)
        last = (log.read().strip().splitlines() or [""])[-1]
    if process.returncode or not metrics.exists():
        raise CaseError(f"{' '.join(command)} exited with {process.returncode}: {last}")
    shutil.rmtree(run)
    return first or ended


def children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def tree_s(pid: int) -> float:
    """CPU-seconds of a process and all its children so far, including those that have ended."""
    seconds = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            seconds += sum(process.cpu_times()[:4])
    return seconds
