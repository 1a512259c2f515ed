"""Check a new GPU machine: what is installed, does every backend train, what does a step wait for,
does the model learn?

    python -m benchmarks.first_run DIR --device cuda                   then `pytest -m gpu` and `make bench-gpu`
    python -m benchmarks.first_run DIR --device cuda --only profile|train --set train.compile=step

Each check runs in its own process with its own time limit, the most useful first.
DIR/first_run.json is written after each; the same command again runs only what is missing or
failed. DIR keeps the dataset, logs, traces and the trained model.
"""

import argparse
import importlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.e2e import LoopRun, precision, pretrain
from benchmarks.measure import CaseError, call_fresh, make_dataset, say
from omnilead.data_tools.cli import Parser
from omnilead.engine.common import write_whole

PACKAGES = (
    "torch",
    "deepspeed",
    "nvidia.dali",
    "zarr",
    "wfdb",
    "webdataset",
    "soundfile",
    "s3fs",
    "distributed",
    "pytest",
)
NEEDED = {"torch", "deepspeed", "zarr", "wfdb"}
TOP = 25  # lines of a profile
Found = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "python -m benchmarks.first_run",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("dir", metavar="DIR", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--model", default="paper", help="paper, or the name of a config in configs/pretrain"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help="run only these checks: install, smoke, profile, train",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.b=c",
        help="a setting for profile and train",
    )
    parser.add_argument(
        "--batch", type=int, default=256, help="crops per step in profile and train (default: 256)"
    )
    parser.add_argument(
        "--crops", type=int, default=24_000, help="size of the synthetic dataset (default: 24000)"
    )
    parser.add_argument(
        "--seconds", type=float, default=240, help="duration of training (default: 240)"
    )
    options = parser.parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    place = options.dir / "first_run.json"
    results: dict[str, Found] = json.loads(place.read_text()) if place.exists() else {}
    for name, limit_s, check in checks(options):
        if "error" not in results.get(name, {"error": ""}) or not re.search(options.only, name):
            continue
        began = time.monotonic()
        try:
            results[name] = call_fresh(check, seconds=limit_s)
        except CaseError as error:
            results[name] = {"error": str(error)}
        results[name]["took_s"] = round(time.monotonic() - began, 1)
        write_whole(place, json.dumps(results, indent=1) + "\n")
        say(f"{name}: {json.dumps(results[name])[:300]}")
    return int(any("error" in result for result in results.values()))


def checks(options: argparse.Namespace) -> Iterator[tuple[str, float, Callable[[], Found]]]:
    """(name, time limit in seconds, function) of each check."""
    place, backends = options.dir.absolute(), ["torch"]
    if options.device == "cuda":
        backends += ["dali"] if installed("nvidia.dali") else []
    run = LoopRun(
        str(place / "dataset"),
        "",
        options.device,
        options.model,
        options.batch,
        settings=tuple(options.set),
    )
    yield "install", 120, install
    if not (place / "dataset" / "dataset.json").exists():
        make_dataset(place, options.crops, plan="paper", role_sources=every_source())
    for backend in backends:
        for model in dict.fromkeys(("small", options.model)):
            name = f"smoke {backend} {model}"
            settings = (f"pipeline.backend={backend}", "train.compile=eager")
            one = replace(
                run,
                run=str(place / name.replace(" ", "-")),
                model=model,
                batch=min(16, options.batch),
                settings=settings,
            )
            yield name, 120, partial(smoke, one)
    yield "profile", 240, partial(profile, replace(run, run=str(place / f"profile-{os.getpid()}")))
    yield (
        "train",
        options.seconds + 240,
        partial(train, replace(run, run=str(place / f"train-{os.getpid()}")), options.seconds),
    )


def every_source() -> Any:
    """All records are used for pre-training except patients with two sessions, whom the probe
    needs."""
    from omnilead.data_tools.splits import RoleSources

    return RoleSources(pretrain=("all",), id_share=1.0)


def installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def install() -> Found:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = str(getattr(importlib.import_module(name), "__version__", "installed"))
        except Exception as error:  # a broken package can raise anything
            found[name] = f"{type(error).__name__}: {error}"[:200]
            if name in NEEDED:
                raise CaseError(f"{name}: {found[name]}") from None
    return found


def smoke(run: LoopRun) -> Found:
    """Run two steps, a checkpoint, an export and a report."""
    pretrain(run, f"{run.run}.txt", "train.steps=2", "train.log_every=1")
    return json.loads((Path(run.run) / "metrics.jsonl").read_text().splitlines()[-1])  # type: ignore[no-any-return]


def profile(run: LoopRun) -> Found:
    """Trace steps of the training loop: RUN/profile has the trace and the slowest operations."""
    from omnilead.engine.training.profiler import WARM_UP

    steps = WARM_UP + run.steps + 1
    pretrain(run, f"{run.run}.txt", f"train.steps={steps}", profiled=run.steps)
    folder = Path(run.run)
    operators = (folder / "profile" / "operators.txt").read_text().splitlines()
    last: Found = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return last | {"operators": operators[:TOP]}


def train(run: LoopRun, seconds: float) -> Found:
    """Train for this many seconds; then run a linear probe on the model's embeddings and on those
    of random weights."""
    from benchmarks.embed import untrained
    from omnilead.engine import embed
    from omnilead.engine import pretrain as program
    from omnilead.engine.training.loop import Loop

    def until_stopped(loop: Loop, *_: Any) -> bool:
        timer = threading.Timer(seconds, setattr, (loop, "terminated", True))  # as SIGTERM does
        timer.daemon = True
        timer.start()
        return original(loop)

    original, Loop.train = Loop.train, until_stopped  # type: ignore[method-assign]
    pretrain(
        run,
        f"{run.run}.txt",
        "train.steps=1000000",
        "train.log_every=10",
        "train.validate_every=250",
    )
    if program.main(["--export", run.run]):
        raise CaseError("the export failed")
    lines = (Path(run.run) / "metrics.jsonl").read_text().splitlines()
    untrained(Path(f"{run.run}-random"), run.model)
    found: Found = {"first": json.loads(lines[0]), "last": json.loads(lines[-1])}
    for name, model in (("trained", run.run), ("random", f"{run.run}-random")):
        scores = f"{run.run}-{name}.json"
        words = [
            "--model",
            model,
            "--data",
            run.dataset,
            "--probe",
            "--json",
            scores,
            "--device",
            run.device,
        ]
        if embed.main([*words, "--precision", precision()]):
            raise CaseError(f"the probe of {name} weights failed")
        found[name] = json.loads(Path(scores).read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
