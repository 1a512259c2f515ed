"""Measure the time from the command to the first training step, for the quick start on a synthetic dataset,
which is started as a user would start it.

The clock runs from the start of the command until metrics.jsonl has its first line, that of step 1
(after the validation at step 0). Imports come from the page cache.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks import ROOT
from benchmarks.measure import (
    CaseError,
    Cases,
    Result,
    describe_input,
    make_dataset,
    median_and_range,
)

# Crops of the dataset. The commands that the quick start names if it finds no dataset make about 230
QUICK_START_CROPS = 300
LAUNCHERS = {
    "deepspeed engine/pretrain.py": (sys.executable, "-m", "deepspeed.launcher.runner", "-q"),
    "python engine/pretrain.py": (sys.executable,),
}


def prepare_input_and_cases(work: Path, options: argparse.Namespace) -> tuple[Result, Cases]:
    dataset = make_dataset(work, QUICK_START_CROPS)
    cases: Cases = {}
    for name, launcher in LAUNCHERS.items():
        command = (*launcher, "engine/pretrain.py")
        cases[f"first step: {name}"] = (repeat_start, (command, work, options.repeats))
    return describe_input(dataset, device=options.device), cases


def repeat_start(command: Sequence[str], work: Path, repeats: int) -> Result:
    runs = [wall_and_cpu_s_of_start(command, work) for _ in range(repeats + 1)][1:]
    seconds, cpu_seconds = zip(*runs, strict=True)
    return {
        "seconds": median_and_range(seconds),
        "cpu_seconds": median_and_range(cpu_seconds),
        "repeats": repeats,
    }


def wall_and_cpu_s_of_start(command: Sequence[str], work: Path) -> tuple[float, float]:
    """Starts a training and returns (seconds, CPU-seconds) until its metrics.jsonl has the first line."""
    run, first, began = work / "run", None, time.perf_counter()
    metrics = run / "metrics.jsonl"
    words = [*command, "--set", f"run={run}", f"data.datasets=[{work}/dataset]", "train.steps=1"]
    with open(work / "run.txt", "w+") as log:  # a pipe would block when it is full
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        while process.poll() is None:
            if not first and metrics.exists() and metrics.stat().st_size:
                first = time.perf_counter() - began, tree_cpu_s(process.pid)
            time.sleep(0.02)
        log.seek(0)
        last = log.read().strip().splitlines()[-1:]
    if process.returncode or not first:
        raise CaseError(
            f"{' '.join(command)} exited with {process.returncode}, or wrote no metrics: its last line is {last}"
        )
    shutil.rmtree(run)
    return first


def tree_cpu_s(pid: int) -> float:
    """Returns the CPU-seconds that a process and all its children have used so far. Children that have ended
    count, too."""
    seconds = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with suppress(psutil.Error):  # raised if the process has just ended
            seconds += sum(process.cpu_times()[:4])
    return seconds
