"""From the command to the first step: the quick start on a synthetic dataset, as a user types it.

    python -m benchmarks.run start [--steps 150]

The clock runs from the moment the command is started until metrics.jsonl has its first line, that of step 1 (after the
validation at step 0), and on until the command ends: steps, validation, checkpoint, export, report. Imports come from the page
cache.
"""

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import OVER, CaseError, Progress, left_s, spread
from benchmarks.run import only
from data_tools import synth
from data_tools.build import ShardOptions, shard
from data_tools.dataset import Dataset
from data_tools.sources import open_sources

ROOT = Path(__file__).parents[1]
PATIENTS = 100  # as the quick start asks for where there is no dataset


def measure(work: Path, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    progress("the demo's dataset")
    synth.synthesise(work / "archive", patients=PATIENTS, sessions=2, seed=0, progress=False)
    shard(open_sources(str(work / "archive")), ShardOptions(str(work / "dataset"), quiet=True))
    dataset, left_out, results = Dataset.open(str(work / "dataset")), dict[str, str](), dict[str, Any]()
    if importlib.util.find_spec("deepspeed") is None:
        left_out["start"] = "deepspeed is not installed"
    for name, command in () if left_out else only(COMMANDS, options.only).items():
        runs = []
        try:
            for turn in range(options.repeats + 1):  # the first does not count
                progress(f"{name} ({turn} of {options.repeats})" if turn else f"{name}, not counted")
                steps = options.steps if turn and name == WHOLE else 1
                runs.append(started(command, work / f"run-{turn}", dataset.root.url, steps))
                shutil.rmtree(work / f"run-{turn}")
            results |= told(name, runs[1:], options.steps)
        except (CaseError, OSError) as error:
            left_out[name] = str(error)
    for name, result in results.items():
        print(
            f"{name}: {result['seconds']['median']:.1f} s ({result['seconds']['low']:.1f} to {result['seconds']['high']:.1f})"
        )
    given = {"archive": "synthetic", "crops": len(dataset), "dataset": dataset.fingerprint, "device": options.device}
    return {"input": given, "results": results, "left_out": left_out}


WHOLE = "deepspeed engine/pretrain.py"
COMMANDS = {
    WHOLE: (sys.executable, "-m", "deepspeed.launcher.runner", "-q", "engine/pretrain.py"),
    "python engine/pretrain.py": (sys.executable, "engine/pretrain.py"),
}


def started(command: Sequence[str], run: Path, dataset: str, steps: int) -> dict[str, float]:
    """Seconds to the first line of metrics.jsonl and to the end, and CPU-seconds of both."""
    settings = (f"run={run}", f"data.datasets=[{dataset}]", f"train.steps={steps}")
    whole = [*command, *(part for each in settings for part in ("--set", each))]
    metrics, before, began = run / "metrics.jsonl", children_s(), time.perf_counter()
    first = first_cpu = 0.0
    with tempfile.TemporaryFile("w+") as said:  # a pipe that nobody reads is full at 64 kB
        process = subprocess.Popen(whole, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True)
        try:
            while process.poll() is None:
                if not first and metrics.exists() and metrics.stat().st_size:
                    first, first_cpu = time.perf_counter() - began, session_s(process.pid)
                if left_s() == 0:
                    raise CaseError(OVER)
                time.sleep(0.02)
            ended = time.perf_counter() - began
            if not first and metrics.exists():  # between two looks
                first, first_cpu = ended, children_s() - before
        finally:  # of a session of its own, nobody else's Ctrl-C reaches it
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        last = (said.read().strip().splitlines() or [""])[-1]
    if process.returncode or not first:
        raise CaseError(f"{' '.join(command)} ended with {process.returncode}: {last}")
    return {"first": first, "first_cpu": first_cpu, "whole": ended, "whole_cpu": children_s() - before}


def children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def session_s(session: int) -> float:
    """CPU-seconds so far of all processes of a session, and of those that they have waited for."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += sum(int(part) for part in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def told(name: str, runs: Sequence[dict[str, float]], steps: int) -> dict[str, dict[str, Any]]:
    parts = {f"first step: {name}": "first"} | ({f"{steps} steps and the end: {name}": "whole"} if name == WHOLE else {})
    return {
        what: {
            "seconds": spread(run[key] for run in runs),
            "cpu_seconds": spread(run[f"{key}_cpu"] for run in runs),
            "repeats": len(runs),
        }
        for what, key in parts.items()
    }
