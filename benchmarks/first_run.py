"""Check a new GPU machine: what is installed, does every backend train, what does a step wait for,
does the model learn?

    python -m benchmarks.first_run DIR --device cuda                   then `pytest -m gpu` and `make bench-gpu`
    python -m benchmarks.first_run DIR --device cuda --only profile|train

Each check runs in its own process with its own time limit, the most useful first.
DIR/first_run.json is written after each; the same command again runs only what is missing, failed
or was of another commit (without git: OMNILEAD_REVISION). DIR keeps the dataset, logs, traces and the trained model.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import omnilead
from benchmarks import program_parser
from benchmarks.e2e import LoopRun, precision, pretrain
from benchmarks.measure import CaseError, call_fresh, make_dataset, say
from benchmarks.run import machine_facts
from omnilead.data_tools.sharding.roles import RoleSources
from omnilead.downstream.reproduce.jobs import read_json, write_json
from omnilead.engine.settings.commandline import positive_integer

PROFILE_LINES = 25  # how many lines of the profile's table of operations are kept
Found = dict[str, Any]
Check = tuple[str, float, Callable[[], Found]]  # (name, time limit in seconds, function)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = program_parser("first_run", __doc__)
    add = parser.add_argument
    add("dir", metavar="DIR", type=Path)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--model", default="paper", help="paper, or the name of a config in configs/pretrain")
    add("--only", default="", metavar="REGEX", help="of checks: install, smoke, profile, train")
    add(
        "--batch",
        type=positive_integer,
        default=256,
        help="crops a step in profile and train (256)",
    )
    add("--crops", type=positive_integer, default=24_000, help="of the synthetic dataset (24000)")
    add("--seconds", type=positive_integer, default=240, help="duration of training (240)")
    options = parser.parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    place = options.dir / "first_run.json"
    results: dict[str, Found] = read_json(place)
    commit = machine_facts()["git"]["commit"]
    for name, limit_s, check in make_dataset_and_yield_checks(options):
        before = results.get(name, {"error": "missing"})
        done = "error" not in before and before.get("commit") == commit
        if done or not re.search(options.only, name):
            continue
        began = time.monotonic()
        try:
            results[name] = call_fresh(check, seconds=limit_s)
        except CaseError as error:
            results[name] = {"error": str(error)}
        results[name] |= {"took_s": round(time.monotonic() - began, 1), "commit": commit}
        write_json(place, results)
        say(f"{name}: {json.dumps(results[name])[:300]}")
    return int(any("error" in result for result in results.values()))


def make_dataset_and_yield_checks(options: argparse.Namespace) -> Iterator[Check]:
    """Yields all checks, the most useful first. Makes the dataset that they need, if it is missing."""
    place = options.dir.absolute()
    yield "install", 120, machine_facts
    if not (place / "dataset" / "dataset.json").exists():
        # Pre-training uses everyone except patients with two sessions, whom the probe of the check `train`
        # needs
        everyone = RoleSources(pretrain=("all",), id_share=1.0)
        make_dataset(place, options.crops, plan="paper", role_sources=everyone)
    run = LoopRun(str(place / "dataset"), "", options.device, options.model, options.batch)
    has_dali = options.device == "cuda" and find_spec("nvidia.dali")
    for backend in ("torch", "dali") if has_dali else ("torch",):
        for model in dict.fromkeys(("small", options.model)):
            name = f"smoke {backend} {model}"
            settings = (f"pipeline.backend={backend}", "train.compile=eager")
            small_run = replace(run, model=model, batch=min(16, options.batch), settings=settings)
            yield (
                name,
                120,
                partial(smoke, replace(small_run, run=str(place / name.replace(" ", "-")))),
            )
    tried = os.getpid()
    yield "profile", 240, partial(profile, replace(run, run=str(place / f"profile-{tried}")))
    training = partial(train, replace(run, run=str(place / f"train-{tried}")), options.seconds)
    yield "train", options.seconds + 600, training


def read_metrics(run: LoopRun) -> list[Found]:
    """Returns the lines of metrics.jsonl of a run."""
    lines = Path(run.run, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def smoke(run: LoopRun) -> Found:
    """Trains for two steps, with checkpoint, export and report. Returns the last metrics."""
    pretrain(run, "train.steps=2", "train.log_every=1")
    return read_metrics(run)[-1]


def profile(run: LoopRun) -> Found:
    """Traces `run.steps` steps of the training loop. Returns the last metrics and the slowest operations.
    RUN/profile keeps the operations and the trace."""
    from omnilead.engine.training.profiling import WARM_UP_STEPS

    steps = WARM_UP_STEPS + run.steps + 1
    pretrain(run, f"train.steps={steps}", options=("--profile", str(run.steps)))
    operators = Path(run.run, "profile/operators.txt").read_text().splitlines()
    return read_metrics(run)[-1] | {"operators": operators[:PROFILE_LINES]}


def train(run: LoopRun, seconds: float) -> Found:
    """Trains for `seconds`, then compares the embeddings of the trained model with those of a model with random
    weights. Returns the first and last metrics, and the scores."""
    from omnilead.engine import pretrain as program
    from omnilead.engine.training.loop import Loop

    def until_stopped(loop: Loop, *_: Any) -> bool:
        end = time.monotonic() + seconds

        def stop_after_time() -> None:  # the loop calls it after each step
            loop.terminated |= time.monotonic() > end  # ends the training, as SIGTERM does

        return original(loop, argparse.Namespace(step=stop_after_time))

    original, Loop.train = Loop.train, until_stopped  # type: ignore[method-assign]
    pretrain(run, "train.steps=1000000", "train.log_every=10", "train.validate_every=250")
    if program.main(["--export", run.run]):
        raise CaseError(f"omnilead pretrain --export {run.run} failed: the lines above say why")
    compared = omnilead.bench(
        [f"trained={run.run}"],
        data=run.dataset,
        tasks=["diagnosis"],
        out=f"{run.run}-bench",
        device=run.device,
        precision=precision(),
    )
    scores = [{key: row[key] for key in ("model", "metrics")} for row in compared["rows"]]
    return {"first": read_metrics(run)[0], "last": read_metrics(run)[-1], "scores": scores}


if __name__ == "__main__":
    sys.exit(main())
