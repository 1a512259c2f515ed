"""Timing on a noisy machine: fresh processes, an uncounted warm-up, CPU-seconds as well as seconds,
all repeats counted.

    results, left_out, partial = run_cases({"name": (function, arguments), ...}, repeats=5)

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
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import comb
from multiprocessing import resource_tracker
from pathlib import Path
from types import MappingProxyType
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
    """Results of cases, why others were left out, and the repeats of those that ran out of time too
    early for a result."""

    results: Results
    left_out: dict[str, str]
    partial: dict[str, Samples]


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
    partial: Mapping[str, Samples] = MappingProxyType({}),
) -> Outcome:
    """Measures cases. `keep` is called with the outcome after each process. A case that runs out
    of time has a result if it has at least LEAST_REPEATS; otherwise its repeats are `partial`,
    and the next call can go on with them."""
    samples = {name: list(partial.get(name, [])) for name in cases}
    results: Results = {}
    left_out: dict[str, str] = {}
    ended = set[str]()

    def outcome() -> Outcome:
        measured = {name: results[name] for name in cases if name in results}
        return Outcome(
            measured,
            left_out,
            {name: each for name, each in samples.items() if each and name not in results},
        )

    for turn in range(1 if at_once else repeats):
        for name, (function, arguments) in cases.items():
            missing = repeats - len(samples[name])
            if name in ended or not missing:
                continue
            say(name if at_once else f"{name} ({turn + 1} of {repeats})")
            reason = ""
            try:
                answer = call_fresh(
                    timed, function, arguments, missing if at_once else 1, keep=samples[name].append
                )
                if answer:
                    results[name] = answer
                    ended.add(name)
            except CaseError as error:
                reason = str(error)
                ended.add(name)
            if reason not in ("", OUT_OF_TIME, OVER_TIME):
                results.pop(name, None)
                samples[name].clear()
            if len(samples[name]) >= min(LEAST_REPEATS, repeats):
                results[name] = summary(samples[name])
            elif reason:
                left_out[name] = reason
                say(
                    f"{name}: left out: {reason}"
                    + f" ({len(samples[name])} of {repeats} repeats kept)" * bool(samples[name])
                )
            keep(outcome())
    return outcome()


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
    now, limit = time.monotonic(), seconds or limit_s
    ends = [(now + limit, OVER_TIME)] if limit else []
    ends += [(deadline, OUT_OF_TIME)] if deadline is not None else []
    end, late = min(ends, default=(None, ""))
    if end is not None and end <= now:
        raise CaseError(late)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, function, arguments, keep is not None))
    resource_tracker.ensure_running()  # start it now: starting it later would unblock the signal
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT}
    )  # Ctrl-C while the child starts would print a traceback
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    answer = stopped = Answer(error=late)
    try:
        while ours.poll(None if end is None else max(0.0, end - time.monotonic())):
            message = ours.recv()
            if message.last:
                answer = message
                break
            if keep:
                keep(message.value)
    except EOFError:
        answer = Answer(error="its process died")
    finally:
        if answer is stopped:  # or interrupted
            kill(process.pid)
    process.join(EXIT_S)
    if process.is_alive():  # a library hangs at exit
        kill(process.pid)
    if answer.error:
        raise CaseError(answer.error)
    return answer.value


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


@contextlib.contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """torch warns ("warn") or raises ("error") where the host waits for the GPU. Its warning
    that this is a prototype is ignored: where warnings are errors, it would be raised after the
    mode was set, and leave it on."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode(mode)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
    alive = [psutil.Process(child.pid).cpu_times() for child in multiprocessing.active_children()]
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in ended) + sum(
        used.user + used.system for used in alive
    )


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


def rates(rows: Iterable[Mapping[str, float]], crops: float, prefix: str = "") -> dict[str, Any]:
    """Rates per second and per CPU-second, for rows (turns) of `crops` crops each."""
    rows = list(rows)
    clocks = {"per_s": "wall_s", "per_cpu_s": "cpu_s"}
    return {
        prefix + figure: spread(crops / row[clock] for row in rows)
        for figure, clock in clocks.items()
    }


def summary(samples: Samples) -> dict[str, Any]:
    return {
        "per_s": spread(sample["units"] / sample["wall_s"] for sample in samples),
        "per_cpu_s": spread(sample["units"] / max(sample["cpu_s"], 1e-9) for sample in samples),
        **{
            key: max(sample[key] for sample in samples)
            for key in ("peak_mb", "gpu_peak_mb")
            if key in samples[0]
        },
        "units": samples[0]["units"],
        "repeats": len(samples),
    }


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
