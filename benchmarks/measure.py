"""Timing on a noisy machine: fresh processes, an uncounted warm-up, CPU-seconds as well as seconds,
all repeats counted.

    results, left_out = run_cases({"name": (function, arguments), ...}, repeats=5)

Cases that are compared take turns (A B C A B C ...), so that changes of the machine's speed affect
all of them. On a GPU that is not shared, `at_once` runs all repeats of a case in one process.
"""

import contextlib
import inspect
import multiprocessing
import os
import resource
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import comb, inf
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from omnilead.engine.common import ConfigError

# A module-level function and its arguments. The function returns the units of work it did, and is
# called once as a warm-up; or it is a generator that yields once when warm, and then units until it
# is sent True; or it measures itself and returns its result as a dict.
Case = tuple[Callable[..., Any], tuple[Any, ...]]
Results = dict[str, dict[str, Any]]
Samples = list[dict[str, float]]

OUT_OF_TIME = "stopped: out of time"  # the deadline
OVER_TIME = "stopped: over its time limit"  # limit_s
BUG = "bug: "  # how the reason of an error begins that is none of EXPECTED
LEAST_REPEATS = 3  # needed for a spread
INTERVAL_FROM = 6  # values needed for a 95 % interval
EXIT_S = 10  # time for a process to exit after it answered or was killed
deadline: float | None = None  # in time.monotonic: nothing is measured after it
limit_s: float | None = None  # time limit of one process, in seconds


class CaseError(Exception):
    """Why a case could not be measured, in one line."""


# Why a machine may be unable to run a case; so is torch.OutOfMemoryError.
EXPECTED = (CaseError, ConfigError, SystemExit, ModuleNotFoundError, OSError, MemoryError)


class Outcome(NamedTuple):
    """Results of cases, and why others were left out."""

    results: Results
    left_out: dict[str, str]


class Answer(NamedTuple):
    """What a process sends: values to keep, and at last what the function returned or why it
    failed."""

    value: Any = None
    error: str = ""
    last: bool = True


class Benchmark(NamedTuple):
    """The result of a benchmark's prepare(): the input, the cases, additional results for the
    record, and a warm-up that is called with the names of the cases before they are measured."""

    input: dict[str, Any]
    cases: dict[str, Case]
    extra: Callable[[], dict[str, Any]] = dict
    warm_up: Callable[[Collection[str]], None] = lambda names: None


def say(text: str) -> None:
    print(f"benchmark: {text}", file=sys.stderr, flush=True)


def run_cases(
    cases: Mapping[str, Case],
    repeats: int,
    at_once: bool = False,
    keep: Callable[[Outcome], None] = lambda outcome: None,
    samples: dict[str, Samples] | None = None,
) -> Outcome:
    """Measures cases. `keep` is called with the outcome after each process. A case that runs out
    of time has a result if it has at least LEAST_REPEATS. `samples` holds repeats that were made
    before, and gets the new ones."""
    if samples is None:
        samples = {}
    for name in cases:
        samples.setdefault(name, [])
    outcome = Outcome({}, {})
    ended: set[str] = set()
    for turn in range(1 if at_once else repeats):
        for name, (function, arguments) in cases.items():
            missing = repeats - len(samples[name])
            if name in ended or missing <= 0:
                continue
            say(name if at_once else f"{name} ({turn + 1} of {repeats})")
            count = missing if at_once else 1
            reason = ""
            try:
                answer = call_fresh(timed, function, arguments, count, keep=samples[name].append)
            except CaseError as error:
                answer, reason = None, str(error)
            if answer:  # the case measured itself
                outcome.results[name] = answer
            elif len(samples[name]) >= LEAST_REPEATS and reason in ("", OUT_OF_TIME, OVER_TIME):
                outcome.results[name] = summary(samples[name])
            elif reason:
                outcome.results.pop(name, None)
                outcome.left_out[name] = reason
                if reason not in (OUT_OF_TIME, OVER_TIME):
                    samples[name].clear()
                say(f"{name}: left out: {reason} ({len(samples[name])} of {repeats} repeats kept)")
            if answer or reason:
                ended.add(name)
            keep(outcome)
    return outcome


def call_fresh(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float | None = None,
    keep: Callable[[Any], None] | None = None,
) -> Any:
    """Call function(*arguments) in a fresh process; CaseError gives the reason of a failure in
    one line. The process and its children are killed after `seconds` (default: `limit_s`) and at
    the deadline. With `keep`, the function's last argument is a function whose argument is sent
    to `keep` at once, so that it is not lost with the process."""
    left = inf if deadline is None else deadline - time.monotonic()
    wait_s, late = min((left, OUT_OF_TIME), (seconds or limit_s or inf, OVER_TIME))
    if wait_s <= 0:
        raise CaseError(late)
    end = time.monotonic() + wait_s
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, function, arguments, keep is not None))
    start_blocked(process)
    theirs.close()
    try:
        while ours.poll(None if end == inf else max(0.0, end - time.monotonic())):
            answer: Answer = ours.recv()
            if answer.last:
                break
            if keep:
                keep(answer.value)
        else:
            raise CaseError(late)
    except EOFError:
        raise CaseError("its process died") from None
    except BaseException:  # late, or interrupted
        kill(process.pid)
        raise
    finally:
        process.join(EXIT_S)
        if process.is_alive():  # a library hangs at exit
            kill(process.pid)
    if answer.error:
        raise CaseError(answer.error)
    return answer.value


def start_blocked(process: Any) -> None:
    """Start a process that gets no SIGINT while it starts: Ctrl-C would print its traceback."""
    resource_tracker.ensure_running()  # start it now: starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill(pid: int | None) -> None:
    """Kill a process and all its children."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _child(
    pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...], keeps: bool
) -> None:
    if (
        signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    ):  # shells ignore it for background jobs
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def keep(value: Any) -> None:
        pipe.send(Answer(value, last=False))

    try:
        pipe.send(Answer(function(*arguments, keep) if keeps else function(*arguments)))
    except BaseException as error:  # the parent reports it
        reason = " ".join(str(error).split())[:300]
        if not isinstance(error, CaseError | SystemExit):
            reason = f"{type(error).__name__}: {reason}"
        if (
            not isinstance(error, EXPECTED) and type(error).__name__ != "OutOfMemoryError"
        ):  # torch may not be imported
            reason = BUG + reason
            traceback.print_exc()
        pipe.send(Answer(error=reason))


def timed(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    repeats: int,
    keep: Callable[[Any], None],
) -> Any:
    """Measure a case in this process and `keep` a sample of each repeat; if the case measures
    itself, return its result."""
    stream = function(*arguments) if inspect.isgeneratorfunction(function) else None
    first = (
        next(stream) if stream else function(*arguments)
    )  # the warm-up: page cache, imports, caches of parsers
    if isinstance(first, dict):
        return first
    for _ in range(repeats):
        cpu, wall = cpu_s(), time.perf_counter()
        units = next(stream) if stream else function(*arguments)
        wall, cpu = time.perf_counter() - wall, cpu_s() - cpu
        keep({"units": units, "wall_s": wall, "cpu_s": cpu} | peaks_mb())
    if stream:  # end its threads and workers before the interpreter exits
        with contextlib.suppress(StopIteration):
            stream.send(True)
    return None


def take_turns(
    sides: Mapping[str, Callable[[], Any]], turns: int
) -> dict[str, list[dict[str, float]]]:
    """Seconds and CPU-seconds of alternating turns of all sides in this process, after an
    uncounted turn of each. The order is reversed every other turn. A dict that a side returns is
    added to its row."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            wall, cpu = time.perf_counter(), cpu_s()
            more = sides[name]() or {}
            if turn:
                rows[name].append(
                    {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu} | more
                )
    return rows


def peaks_mb() -> dict[str, float]:
    """Peak memory of this process, without workers. Not from getrusage, where a child starts with
    its parent's peak."""
    peaks = {
        "peak_mb": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    }
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        peaks["gpu_peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return peaks


def cpu_s() -> float:
    """CPU-seconds of this process (to microseconds) and its workers (of running ones, to hundredths
    of a second)."""
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        times = resource.getrusage(who)
        used += times.ru_utime + times.ru_stime
    for child in multiprocessing.active_children():
        running = psutil.Process(child.pid).cpu_times()
        used += running.user + running.system
    return used


def spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def interval(values: Iterable[float]) -> dict[str, float]:
    """The median and its distribution-free 95 % interval, between two of the values (the number
    of values below the true median is binomial). For fewer than INTERVAL_FROM values, the lowest
    and highest."""
    values = sorted(values)
    n, cut = len(values), 0
    while 2 * sum(comb(n, i) for i in range(cut + 2)) <= 0.05 * 2**n:
        cut += 1
    return {"median": statistics.median(values), "low": values[cut], "high": values[n - 1 - cut]}


def rates(rows: Sequence[Mapping[str, float]], crops: float, prefix: str = "") -> dict[str, Any]:
    """Rates per second and per CPU-second, for rows (turns) of `crops` crops each."""
    return {
        f"{prefix}per_s": spread(crops / row["wall_s"] for row in rows),
        f"{prefix}per_cpu_s": spread(crops / row["cpu_s"] for row in rows),
    }


def summary(samples: Samples) -> dict[str, Any]:
    found: dict[str, Any] = {
        "per_s": spread(sample["units"] / sample["wall_s"] for sample in samples),
        "per_cpu_s": spread(sample["units"] / max(sample["cpu_s"], 1e-9) for sample in samples),
    }
    for key in ("peak_mb", "gpu_peak_mb"):
        if key in samples[0]:
            found[key] = max(sample[key] for sample in samples)
    return found | {"units": samples[0]["units"], "repeats": len(samples)}


def make_dataset(work: Path, records: int, keep_archive: bool = False, **options: Any) -> Any:
    """Make work/dataset with about `records` synthetic crops of 10 s. `options`: of
    data_tools.build.ShardOptions."""
    from omnilead.data_tools.build import ShardOptions, shard
    from omnilead.data_tools.sources import open_sources
    from omnilead.data_tools.synthetic import archive as synth

    say(f"a dataset of about {records} crops")
    archive, workers = str(work / "archive"), max(1, min(8, (os.cpu_count() or 1) // 2))
    synth.synthesise(
        work / "archive",
        patients=max(2, records // 2),
        two_sessions=0,
        seed=11,
        workers=workers,
        progress=False,
    )
    settings = ShardOptions(
        str(work / "dataset"), quiet=True, workers=workers, **{"plan": "all"} | options
    )
    dataset = shard(open_sources(archive), settings)
    if not keep_archive:
        shutil.rmtree(archive)
    return dataset


def describe(dataset: Any, **more: Any) -> dict[str, Any]:
    """The facts about the input data for a record."""
    from omnilead.data_tools.synthetic.archive import VERSION

    return {
        "archive": f"synthetic-{VERSION}",
        "crops": len(dataset),
        "dataset": dataset.fingerprint,
    } | more
