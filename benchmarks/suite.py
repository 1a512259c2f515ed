"""All that a machine can tell in one record: `make bench` on a CPU, `make bench-gpu` on a GPU.

    python -m benchmarks.run suite [--minutes 15]
    python -m benchmarks.run suite --device cuda --minutes 10      and the tests that need a GPU
    python -m benchmarks.run suite --kind gpu --model quickstart   the same, tried on a CPU

Each part is a benchmark of its own with fewer cases than when it is run alone, in the order of what is worth most. A part that
would begin after --minutes is left out, and one that is not done a minute and a half later is stopped: the record says so. What
needs a package that is not there is left out by name.
"""

import argparse
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import measure as measuring
from benchmarks import run
from benchmarks.measure import CaseError, Progress

ROOT = Path(__file__).parents[1]
GRACE_MINUTES = 1.5  # after --minutes a case that has begun may end; then it is stopped
NEEDED = {"DALI": ("nvidia.dali", "the loader's dali backend"), "DeepSpeed": ("deepspeed", "e2e, start, the ranks of scaling")}
INGEST = r"^read|^ingest: omnilead, tar$|^ingest: re-creation|^verify$"
LOADER = r"^gather: tar, batch 256$|: (torch|resident), batch 256$|^RLM: dali|loader, 0 workers$|DataLoader, 0 workers"


def parts(kind: str, options: argparse.Namespace) -> list[list[str]]:
    """As they are typed."""
    model, device = ["--model", options.model], ["--device", options.device]
    records, repeats = ["--records", str(options.records)], ["--repeats", str(options.repeats)]
    loop = [] if options.model == "paper" else model  # e2e and scaling choose a model that the device can bear
    if kind == "cpu":
        return [
            ["step", *model, *repeats, "--steps", "1"],
            ["ingest", *records, *repeats, "--headers", "200000", "--only", INGEST],
            ["loader", *records, *repeats, "--seconds", "1.5", "--only", LOADER],
            ["step", *model, *repeats, "--explain"],
            ["e2e", *loop, "--repeats", str(5 * options.repeats), "--records", "400", "--only", "tar|resident"],
            ["embed", *loop, *repeats, "--records", "200", "--only", "tar|500 Hz"],
            ["start", *repeats, "--steps", "20"],
            ["scaling", *loop, *repeats, "--steps", "4", "--huge", "1000000"],
        ]
    return [
        ["step", *device, *model, *repeats, "--brief"],
        ["e2e", *device, *loop, *repeats, *records],
        ["loader", *device, *records, *repeats, "--alone"],
        ["embed", *device, *loop, *repeats, *records],
        ["start", *device, *repeats, "--only", "deepspeed"],
        ["step", *device, *model, *repeats, "--explain"],
        ["step", *device, *model, *repeats, "--autotune"],
    ]


def measure(work: Path, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    kind = options.kind or ("gpu" if options.device == "cuda" else "cpu")
    began, done, left_out = time.monotonic(), list[dict[str, Any]](), dict[str, str]()
    for package, (module, what) in NEEDED.items():
        if lacks(module):
            left_out[package] = f"not installed: without it there is no {what}"
            progress(f"{package} is {left_out[package]}")
    tests = gpu_tests(progress) if kind == "gpu" else None
    measuring.end = began + 60 * (options.minutes + GRACE_MINUTES)
    for number, words in enumerate(parts(kind, options)):
        name, minutes = " ".join(words), (time.monotonic() - began) / 60
        if minutes >= options.minutes:
            left_out[name] = f"{minutes:.1f} minutes were over: --minutes {options.minutes:g}"
            continue
        progress(f"=== {name} ({minutes:.1f} minutes so far)")
        place = work / str(number)
        place.mkdir()
        try:
            part = run.measured(place, run.parse(words)) | {"took_s": round(time.monotonic() - began - 60 * minutes)}
            if not part["results"]:
                raise CaseError("; ".join(part.get("left_out", {}).values()) or "it has no results")
            done.append(part)
        except (Exception, SystemExit) as error:  # the others may still tell something
            left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            progress(f"left out: {name}: {left_out[name]}")
    measuring.end = None
    if not done:
        raise SystemExit(f"benchmarks.run: nothing was measured: {'; '.join(left_out.values())[:300]}")
    return {"parts": done, "left_out": left_out, "kind": kind} | ({"gpu_tests": tests} if tests else {})


def lacks(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ModuleNotFoundError:
        return True


def gpu_tests(progress: Progress) -> dict[str, Any]:
    """`pytest -m gpu`: what it said last. On a machine without one they are skipped, and it says so."""
    progress("=== pytest -m gpu")
    if lacks("pytest"):
        return {"passed": False, "said": "pytest is not installed"}
    command = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--no-header")
    try:
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    except subprocess.TimeoutExpired:
        return {"passed": False, "said": "not done within 240 s"}
    lines = (answer.stdout.strip() or answer.stderr.strip()).splitlines()  # a conftest that fails is an error alone
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    for line in [*failed, *lines[-1:]]:
        progress(line)
    return {"passed": answer.returncode == 0, "said": lines[-1] if lines else "", "failed": failed}
