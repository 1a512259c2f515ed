"""Honest timing on a noisy machine: fresh processes, a warm-up that does not count, CPU-seconds beside seconds, all repeats.

Cases that are compared take turns (A B C A B C ...), so that a drift of the machine's speed meets all of them.
"""

import inspect
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

# A module's function and its arguments. It returns the units of work done, and is called once before it counts; or it is a
# generator that yields once when it is warm and then the units: a stream that has started.
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def run_cases(cases: Mapping[str, Case], repeats: int, progress: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """-> for each case: units per second and per CPU-second (median, lowest, highest), peak memory."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for repeat in range(repeats):
        for name, (function, arguments) in cases.items():
            progress(f"{name} ({repeat + 1} of {repeats})")
            samples[name].append(in_fresh_process(function, *arguments))
    return {name: summary(runs) for name, runs in samples.items()}


def in_fresh_process(function: Callable[..., Any], *arguments: Any, warm_up: bool = True) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, function, arguments, warm_up))
    process.start()
    theirs.close()
    try:
        result: dict[str, float] = ours.recv()
    except EOFError:
        raise SystemExit(f"benchmarks: {function.__name__} died: run it alone to see why") from None
    process.join()
    return result


def _child(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...], warm_up: bool) -> None:
    stream = function(*arguments) if inspect.isgeneratorfunction(function) else None
    if stream:
        next(stream)
    elif warm_up:  # page cache, imports, caches of parsers
        function(*arguments)
    cpu, wall = _cpu_s(), time.perf_counter()
    units = next(stream) if stream else function(*arguments)
    wall, cpu = time.perf_counter() - wall, _cpu_s() - cpu
    pipe.send({"units": units, "wall_s": wall, "cpu_s": cpu, "peak_mb": _peak_mb()})
    for _ in stream or ():  # its threads and workers end before the interpreter does
        pass


def _peak_mb() -> float:
    """Of this process. getrusage would not do: a child begins with its parent's peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _cpu_s() -> float:
    """Of this process and its workers: in microseconds, and of workers that still run in hundredths of a second."""
    alive = [psutil.Process(child.pid).cpu_times() for child in multiprocessing.active_children()]
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in ended) + sum(used.user + used.system for used in alive)


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "low": min(values), "high": max(values)}

    return {
        "per_s": spread([run["units"] / run["wall_s"] for run in runs]),
        "per_cpu_s": spread([run["units"] / max(run["cpu_s"], 1e-9) for run in runs]),
        "peak_mb": max(run["peak_mb"] for run in runs),
        "units": runs[0]["units"],
        "repeats": len(runs),
    }
