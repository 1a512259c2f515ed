"""All that a machine can tell in one record: `make bench` on a CPU, `make bench-gpu` on a GPU.

    python -m benchmarks.run suite [--minutes 15]
    python -m benchmarks.run suite --device cuda --minutes 10 --out record.json --work DIR
    python -m benchmarks.run suite --device cuda --stages smoke,tests,step
    python -m benchmarks.run suite --kind gpu --model quickstart       the same cases, tried on a CPU

A case is a process of its own with its own time limit: one that fails or hangs costs nothing else. Cases run in order of value,
what is not timed several at once, and nothing runs longer than --minutes. The record is saved after each case. The same command
again, with the same --out, measures what is still missing; --work keeps the dataset, logs and trained models for it.
"""

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import measure as measuring
from benchmarks import run
from benchmarks.measure import OVER, CaseError, call_fresh, kill
from engine.common import write_whole

Part = dict[str, Any]
NO_TIME = "no time was left"
COMPILE = "compile "
LEAST_S = 15  # a case that would have less does not begin
COMPILING = 0.35  # of the time; what is not compiled by then is compiled when it is measured
INGEST = r"^read|^ingest: omnilead, tar$|^ingest: re-creation|^verify$"
LOADER = r"^gather: tar, batch 256$|: (torch|resident), batch 256$|^RLM: dali|loader, 0 workers$|DataLoader, 0 workers"
STAGES = {
    "cpu": ("step", "ingest", "loader", "explain", "loop", "embed", "start", "scaling"),
    "gpu": ("install", "smoke", "tests", "step", "loader", "loop", "profile", "train", "explain", "embed", "start"),
}
NEED_DATA = {"smoke", "loader", "loop", "profile", "train"}


@dataclass(frozen=True)
class Case:
    stage: str
    name: str
    limit_s: float
    function: Callable[..., Part]  # of a module; a part of a record, or facts
    arguments: tuple[Any, ...] = ()
    benchmark: str = ""  # of the part
    together: str = ""  # cases of this name, which are not timed, run side by side
    makes: Path | None = None  # what is not in the record but in the working folder
    share: float = 1.0  # of the minutes, after which it is stopped

    @property
    def title(self) -> str:
        return f"{self.stage}: {self.name}"

    def done(self, record: Part) -> bool:
        if self.makes and self.makes.exists():
            return True
        return self.title.replace(COMPILE, "") in record["cases"]  # a step that is measured needs no compiled code


class Sizes(NamedTuple):
    records: int
    crops: int  # of a step of the loop
    turns: int
    steps: int  # of a turn
    batches: tuple[int, ...]  # of the step
    fed: tuple[int, ...]  # by the loader, the second one first
    threads: int
    train_s: float


SIZES = {
    "cuda": Sizes(24_000, 256, 5, 10, (64, 256, 512, 128), (64, 256, 1024), 4, 240),
    "cpu": Sizes(200, 4, 3, 1, (2, 4), (4, 8), 1, 0.5),
}


def cpu_cases(options: argparse.Namespace, work: Path) -> Iterator[Case]:
    """Benchmarks as they are typed, with fewer cases than when they are run alone."""
    model, records = ["--model", options.model], ["--records", str(options.records or 1000)]
    repeats, loop = ["--repeats", str(options.repeats)], [] if options.model == "paper" else model
    rows = {
        "step": ["step", *model, *repeats, "--steps", "1"],
        "ingest": ["ingest", *records, *repeats, "--headers", "200000", "--only", INGEST],
        "loader": ["loader", *records, *repeats, "--seconds", "1.5", "--only", LOADER],
        "explain": ["step", *model, *repeats, "--explain"],
        "loop": ["e2e", *loop, "--repeats", str(5 * options.repeats), "--records", "400", "--only", "tar|resident"],
        "embed": ["embed", *loop, *repeats, "--records", "200", "--only", "tar|500 Hz"],
        "start": ["start", *repeats, "--steps", "20"],
        "scaling": ["scaling", *loop, *repeats, "--steps", "4", "--huge", "1000000"],
    }
    for stage, words in rows.items():
        yield Case(stage, " ".join(words), 600, command, (words, work))


def gpu_cases(options: argparse.Namespace, work: Path, out: Path) -> Iterator[Case]:
    """In order of value."""
    from benchmarks import checks, e2e, feed, step

    device, sizes = options.device, SIZES[options.device]
    cores, data = len(os.sched_getaffinity(0)), work / "dataset"
    base = step.Run(step.OURS, "bf16", model=options.model, device=device, threads=1, steps=sizes.steps)
    runs = step.by_value(base, sizes.batches)
    backends = ["torch", "resident", *(["dali"] if present("nvidia.dali") else [])]

    def setup(name: str, **how: Any) -> e2e.Setup:
        given: Part = {"model": options.model, "batch": sizes.crops, "steps": sizes.steps, "turns": sizes.turns, "threads": 1}
        return e2e.Setup(str(data), str(work / f"{plain(name)}-{os.getpid()}"), device, **given | how)

    first: Part = {"together": "first"}
    yield Case("install", "imports and versions", 120, checks.install, **first)
    made, arguments = data / "dataset.json", (work, options.records or sizes.records, max(1, cores // 2))
    yield Case("data", "a dataset", 200, checks.dataset, arguments, makes=made, **first)
    for one in runs:
        if one.side == step.OURS and one.compiled != "eager":
            made = work / "compiled" / plain(one.name)
            how = {"share": COMPILING, "makes": made}
            yield Case("step", f"{COMPILE}{one.name}", 150, step.compiled, (one, made), **first, **how)
    for backend in backends:
        for model in dict.fromkeys(("small", options.model)):
            how: Part = {"model": model, "batch": min(16, sizes.crops), "settings": (f"pipeline.backend={backend}",)}
            arguments = (setup(f"smoke {model} {backend}", **how),)
            yield Case("smoke", f"{model}, {backend}", 120, checks.smoke, arguments, together="smoke")
    for file in checks.gpu_test_files():
        yield Case("tests", file, 180, checks.tests, (file,), together="smoke")

    steps = [Case("step", one.name, 90, step.alone, (one, options.repeats), "step") for one in runs]
    first_fed = f"batch {sizes.fed[1]}"
    fed = [
        Case("loader", name, 75, feed.alone, (name, case, data, sizes.threads, options.repeats), "loader")
        for name, case in feed.cases(data, device, sizes.threads, sizes.fed).items()
    ]
    fed.sort(key=lambda case: (not case.name.endswith(first_fed), not case.name.startswith("RLM")))
    loops = [
        Case("loop", source, 130, e2e.alone, (source, setup(f"loop {source}", settings=e2e.SOURCES[source])), "e2e")
        for source in ("resident", "tar", "torch")
    ]
    yield from (*steps[:6], loops[0], *fed[:4], loops[1], *steps[6:])
    resident = ("pipeline.backend=resident",)
    yield Case("profile", "the loop", 200, checks.profile, (setup("profile", settings=resident), out, runs))
    mine = setup("train", settings=() if "dali" in backends else resident)
    yield Case("train", "and a probe", sizes.train_s + 200, checks.train, (mine, out, runs, sizes.train_s))
    yield from (loops[2], *fed[4:])
    words = ["--device", device, "--repeats", str(options.repeats)]
    model = ["--model", options.model]
    yield Case("explain", "stages of a step", 200, command, (["step", *words, *model, "--explain"], work))
    yield Case("embed", "embeddings", 200, command, (["embed", *words, *model, "--records", "1000"], work))
    yield Case("start", "the quick start", 200, command, (["start", *words, "--only", "deepspeed"], work))


def plain(name: str) -> str:
    """As a name of a file."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)[:120]


def present(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return find_spec(module) is not None
    return False


def command(words: Sequence[str], work: Path) -> Part:
    """A benchmark as it is typed."""
    with tempfile.TemporaryDirectory(dir=work) as place:
        part = run.measured(Path(place), run.parse(words))
    if not part["results"]:
        raise CaseError("; ".join(part.get("left_out", {}).values()) or "it has no results")
    return part


def within(function: Callable[..., Part], arguments: tuple[Any, ...], log: Path, limit_s: float) -> Part:
    """In a process of its own. What it says goes to a file, and in the end, if it hangs, where."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(0.9 * limit_s)
    measuring.end = time.monotonic() + 0.9 * limit_s
    try:
        return function(*arguments)
    except (CaseError, SystemExit):
        raise
    except Exception:
        traceback.print_exc()
        raise


def table(options: argparse.Namespace, kind: str, work: Path, out: Path) -> list[Case]:
    stages = options.stages or STAGES[kind]
    if unknown := [stage for stage in stages if stage not in STAGES[kind]]:
        run.refuse(f"--stages {unknown[0]}: no such stage: use {', '.join(STAGES[kind])}")
    more = {"data"} if NEED_DATA & {*stages} else set()
    cases = cpu_cases(options, work) if kind == "cpu" else gpu_cases(options, work, out)
    return [case for case in cases if case.stage in {*stages, *more} and re.search(options.only, case.name)]


def main(options: argparse.Namespace, began: float) -> int:
    kind = options.kind or ("gpu" if options.device == "cuda" else "cpu")
    run.check_model(options.model)
    os.environ["PYTHONUNBUFFERED"] = "1"  # of the cases
    settings = {name: getattr(options, name) for name in ("device", "model", "records", "repeats")}
    new = {"benchmark": "suite", "kind": kind, "config": settings, "parts": [], "checks": {}, "cases": {}, "left_out": {}}
    out, record = begun(options.out, run.environment() | new | {"took_s": 0})
    before = record["took_s"]
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omnilead-suite-")))
        (work / "logs").mkdir(parents=True, exist_ok=True)
        cases = table(options, kind, work, out)
        suite = Suite(record, out, work, began, began + 60 * options.minutes, cases)
        try:
            suite.measure()
        except KeyboardInterrupt:
            print(f"benchmarks.run: interrupted: --out {out} goes on with what is missing", file=sys.stderr)
            return 130
    record["took_s"] = before + round(time.monotonic() - began)
    for name, reason in record["left_out"].items():
        run.say(f"left out: {name}: {reason}")
    if "fastest" in record:
        run.say(f"the fastest step: {' '.join(record['fastest'])}")
    if not suite.any():
        print(f"benchmarks.run: nothing was measured: {'; '.join(record['left_out'].values())[:300]}", file=sys.stderr)
        return 1
    return run.save(record, out)


def begun(out: Path | None, new: Part) -> tuple[Path, Part]:
    """The record to go on with: that of --out; else today's, if it is of this machine and revision and lacks something."""
    path = out or run.RESULTS / run.file_name(new)
    if not path.exists():
        return path, new
    try:
        old: Part = json.loads(path.read_text())
        differs = [key for key in ("benchmark", "kind", "config", "versions") if old[key] != new[key]]
        differs += [key for key, inner in (("git", "commit"), ("hardware", "short")) if old[key][inner] != new[key][inner]]
    except (ValueError, LookupError, TypeError):
        differs = ["form"]
    if not differs and (out or old["left_out"]):
        return path, old
    if out:
        run.refuse(f"--out {out}: is a record of another {', '.join(differs)}: name another file")
    return run.free(path), new


@dataclass
class Suite:
    record: Part
    out: Path
    work: Path
    began: float
    end: float  # by time.monotonic
    cases: Sequence[Case]

    def measure(self) -> None:
        """What failed before comes last."""
        left = [case for case in self.cases if not case.done(self.record)]
        left.sort(key=lambda case: not case.together and self.record["left_out"].get(case.title, NO_TIME) != NO_TIME)
        for _, group in groupby(left, key=lambda case: case.together or case.title):
            many = list(group)
            if len(many) == 1:
                self.keep(many[0], *self.attempt(many[0]))
                continue
            with ThreadPoolExecutor(max(1, min(4, len(os.sched_getaffinity(0)) // 4))) as pool:
                try:
                    tries = {pool.submit(self.attempt, case): case for case in many}
                    for future in as_completed(tries):
                        self.keep(tries[future], *future.result())
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    for process in multiprocessing.active_children():
                        kill(process.pid)
                    raise

    def attempt(self, case: Case) -> tuple[Part | None, str, float]:
        """What it found, or why not; and its seconds."""
        began = time.monotonic()
        limit = min(case.limit_s, self.began + case.share * (self.end - self.began) - began)
        if limit < min(LEAST_S, case.limit_s):
            return None, NO_TIME, 0.0
        try:
            found = call_fresh(within, case.function, case.arguments, self.log(case), limit, limit_s=limit)
            return found, "", time.monotonic() - began
        except CaseError as error:
            told = f"{OVER} ({limit:.3g} s)" if str(error) == OVER else str(error)
            return None, told, time.monotonic() - began

    def keep(self, case: Case, found: Part | None, error: str, seconds: float) -> None:
        left_out = self.record["left_out"]
        if found is None:
            if error != NO_TIME or not case.makes:
                left_out[case.title] = error
        else:
            left_out.pop(case.title, None)
            if not case.makes:
                self.record["cases"][case.title] = round(seconds, 1)
            self.add(case, found)
        if self.any():
            with contextlib.suppress(OSError):  # run.save finds another place in the end
                write_whole(self.out, json.dumps(self.record, indent=1) + "\n")
        if error == NO_TIME:
            return
        run.say(f"{(time.monotonic() - self.began) / 60:.1f} min: {case.title}: {error or rates(found)} ({seconds:.0f} s)")
        if error and self.log(case).exists():
            lines = self.log(case).read_text(errors="replace").splitlines()[-12:]
            print("\n".join(f"    {line[:200]}" for line in lines), file=sys.stderr, flush=True)

    def add(self, case: Case, found: Part) -> None:
        if "results" not in found:
            self.record["checks"][case.title] = found
            return
        config = {key: self.record["config"][key] for key in ("device", "model")}
        part = {"benchmark": case.benchmark, "config": config, "left_out": {}} | found
        parts = self.record["parts"]
        same = next((one for one in parts if one["benchmark"] == part["benchmark"]), None)
        if same is None:
            parts.append(same := part)
        for key in ("input", "results", "left_out"):
            same[key] = same[key] | part[key]
        if case.benchmark == "step":
            from benchmarks import step

            runs = [one.arguments[0] for one in self.cases if one.benchmark == "step"]
            step.completed(same["results"], runs)
            if best := step.fastest(same["results"], runs):
                self.record["fastest"] = [f"--set {each}" for each in step.settings(best)]

    def any(self) -> bool:
        return bool(self.record["parts"] or self.record["checks"])

    def log(self, case: Case) -> Path:
        return self.work / "logs" / f"{plain(case.title)}.txt"


def rates(found: Part | None) -> str:
    figures = [r["per_s"]["median"] for r in (found or {}).get("results", {}).values() if "per_s" in r]
    return ", ".join(f"{figure:.4g}/s" for figure in figures) or "done"
