"""Timing on a noisy machine: fresh processes, an uncounted warm-up, CPU-seconds as well as seconds, all repeats counted.

    results, left_out = run_cases({"name": (function, arguments), ...}, repeats=5)

Cases that are compared take turns (A B C A B C ...), so that changes of the machine's speed affect all of them. On a GPU that
is not shared, `at_once` runs all repeats of a case in one process.
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
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import comb
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import psutil

# A module-level function and its arguments. The function returns the units of work it did, and is called once as a warm-up; or
# it is a generator that yields once when warm, and then units until it is sent True; or it measures itself and returns its
# result as a dict.
Case = tuple[Callable[..., Any], tuple[Any, ...]]
Results = dict[str, dict[str, Any]]

OUT_OF_TIME = "stopped: out of time"
LEAST_REPEATS = 3  # needed for a spread
INTERVAL_FROM = 6  # values needed for a 95 % interval
EXIT_S = 10  # time for a process to exit after it answered or was killed
deadline: float | None = None  # in time.monotonic: nothing is measured after it
limit_s: float | None = None  # time limit of one process


class CaseError(Exception):
    """Why a case could not be measured, in one line."""


class Benchmark(NamedTuple):
    """The result of a benchmark's prepare(): the input, the cases, additional results for the record, and a warm-up that is
    called with the names of the cases before they are measured."""

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
    keep: Callable[[Results, dict[str, str]], None] = lambda results, left_out: None,
) -> tuple[Results, dict[str, str]]:
    """The results of cases, and why others were left out. `keep` is called with both after each process. A case that runs out
    of time keeps its repeats if there are at least LEAST_REPEATS."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    results: Results = {}
    left_out: dict[str, str] = {}
    for turn in range(1 if at_once else repeats):
        for name, (function, arguments) in cases.items():
            if name in left_out or (name in results and not samples[name]):
                continue
            say(name if at_once else f"{name} ({turn + 1} of {repeats})")
            try:
                answer = call_fresh(timed, function, arguments, repeats if at_once else 1)
                if isinstance(answer, dict):
                    results[name] = answer
                else:
                    samples[name] += answer
                    if len(samples[name]) >= min(LEAST_REPEATS, repeats):
                        results[name] = summary(samples[name])
            except CaseError as error:
                if name not in results or str(error) != OUT_OF_TIME:
                    results.pop(name, None)
                    left_out[name] = str(error)
                    say(f"{name}: left out: {error}")
            keep(results, left_out)
    return {name: results[name] for name in cases if name in results}, left_out


def call_fresh(function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
    """Call function(*arguments) in a fresh process; CaseError gives the reason of a failure in one line. The process and its
    children are killed after `seconds` (default: `limit_s`) and at the deadline."""
    limits = [seconds or limit_s, None if deadline is None else deadline - time.monotonic()]
    limit = min((each for each in limits if each is not None), default=None)
    if limit is not None and limit <= 0:
        raise CaseError(OUT_OF_TIME)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, function, arguments))
    resource_tracker.ensure_running()  # start it now: starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C while the child starts would print a traceback
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    answer, error = None, OUT_OF_TIME
    try:
        if ours.poll(limit):
            answer, error = ours.recv()
    except EOFError:
        error = "its process died"
    finally:
        if error == OUT_OF_TIME:  # or interrupted
            kill(process.pid)
    process.join(EXIT_S)
    if process.is_alive():  # a library hangs at exit
        kill(process.pid)
    if error:
        raise CaseError(error)
    return answer


def kill(pid: int | None) -> None:
    """Kill a process and all its children."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _child(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # shells ignore it for background jobs
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        pipe.send((function(*arguments), None))
    except BaseException as error:  # the parent reports it
        reason = " ".join(str(error).split())[:300]
        pipe.send((None, reason if isinstance(error, CaseError | SystemExit) else f"{type(error).__name__}: {reason}"))


def timed(function: Callable[..., Any], arguments: tuple[Any, ...], repeats: int) -> Any:
    """Measure samples of a case in this process, or return its result if it measures itself."""
    stream = function(*arguments) if inspect.isgeneratorfunction(function) else None
    first = next(stream) if stream else function(*arguments)  # the warm-up: page cache, imports, caches of parsers
    if isinstance(first, dict):
        return first
    samples = []
    for _ in range(repeats):
        cpu, wall = cpu_s(), time.perf_counter()
        units = next(stream) if stream else function(*arguments)
        wall, cpu = time.perf_counter() - wall, cpu_s() - cpu
        samples.append({"units": units, "wall_s": wall, "cpu_s": cpu} | peaks_mb())
    if stream:  # end its threads and workers before the interpreter exits
        with contextlib.suppress(StopIteration):
            stream.send(True)
    return samples


def take_turns(sides: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, list[dict[str, float]]]:
    """Seconds and CPU-seconds of alternating turns of all sides in this process, after an uncounted turn of each. The order is
    reversed every other turn. A dict that a side returns is added to its row."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            wall, cpu = time.perf_counter(), cpu_s()
            more = sides[name]() or {}
            if turn:
                rows[name].append({"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu} | more)
    return rows


@contextlib.contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """torch warns ("warn") or raises ("error") where the host waits for the GPU. Its warning that this is a
    prototype is ignored: where warnings are errors, it would be raised after the mode was set, and leave it on."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode(mode)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peaks_mb() -> dict[str, float]:
    """Peak memory of this process, without workers. Not from getrusage, where a child starts with its parent's peak."""
    peaks = {"peak_mb": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024}
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        peaks["gpu_peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return peaks


def cpu_s() -> float:
    """CPU-seconds of this process (to microseconds) and its workers (of running ones, to hundredths of a second)."""
    alive = [psutil.Process(child.pid).cpu_times() for child in multiprocessing.active_children()]
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in ended) + sum(used.user + used.system for used in alive)


def spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def interval(values: Iterable[float]) -> dict[str, float]:
    """The median and its distribution-free 95 % interval, between two of the values (the number of values below the true median
    is binomial). For fewer than INTERVAL_FROM values, the lowest and highest."""
    values = sorted(values)
    n, cut = len(values), 0
    while 2 * sum(comb(n, i) for i in range(cut + 2)) <= 0.05 * 2**n:
        cut += 1
    return {"median": statistics.median(values), "low": values[cut], "high": values[n - 1 - cut]}


def rates(rows: Iterable[Mapping[str, float]], crops: float, prefix: str = "") -> dict[str, Any]:
    """Rates per second and per CPU-second, for rows (turns) of `crops` crops each."""
    rows = list(rows)
    clocks = {"per_s": "wall_s", "per_cpu_s": "cpu_s"}
    return {prefix + figure: spread(crops / row[clock] for row in rows) for figure, clock in clocks.items()}


def summary(samples: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "per_s": spread(sample["units"] / sample["wall_s"] for sample in samples),
        "per_cpu_s": spread(sample["units"] / max(sample["cpu_s"], 1e-9) for sample in samples),
        **{key: max(sample[key] for sample in samples) for key in ("peak_mb", "gpu_peak_mb") if key in samples[0]},
        "units": samples[0]["units"],
        "repeats": len(samples),
    }


def make_dataset(work: Path, records: int, keep_archive: bool = False, **options: Any) -> Any:
    """Make work/dataset with about `records` synthetic crops of 10 s. `options`: of data_tools.build.ShardOptions."""
    from data_tools import synth
    from data_tools.build import ShardOptions, shard
    from data_tools.sources import open_sources

    say(f"a dataset of about {records} crops")
    archive, workers = str(work / "archive"), max(1, min(8, (os.cpu_count() or 1) // 2))
    synth.synthesise(work / "archive", patients=max(2, records // 2), two_sessions=0, seed=11, workers=workers, progress=False)
    settings = ShardOptions(str(work / "dataset"), quiet=True, workers=workers, **{"plan": "all"} | options)
    dataset = shard(open_sources(archive), settings)
    if not keep_archive:
        shutil.rmtree(archive)
    return dataset


def describe(dataset: Any, **more: Any) -> dict[str, Any]:
    """The facts about the input data for a record."""
    from data_tools.synth import VERSION

    return {"archive": f"synthetic-{VERSION}", "crops": len(dataset), "dataset": dataset.fingerprint} | more
