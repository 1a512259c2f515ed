"""Honest timing on a noisy machine: fresh processes, a warm-up that does not count, CPU-seconds beside seconds, all repeats.

    results = run_cases({"name": (function, arguments), ...}, repeats=5, progress=print)

Cases that are compared take turns (A B C A B C ...), so that a drift of the machine's speed meets all of them. On a GPU that
nobody shares, `in_one_process` takes all repeats of a case in the process that has warmed up.
"""

import contextlib
import inspect
import multiprocessing
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from math import comb
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

# A module's function and its arguments. It returns the units of work done, and is called once before it counts; or it is a
# generator that yields once when it is warm and then the units: a stream that has started. One that can be measured again and
# again in one process yields units until it is sent True.
Case = tuple[Callable[..., Any], tuple[Any, ...]]
Progress = Callable[[str], None]


OVER = "stopped: its time was over"
SPREAD = 3  # repeats that show one
ENOUGH = 6  # for `middle` to bear its name
EXIT_S = 10  # for a process to end, once it has answered or was killed
end: float | None = None  # by time.monotonic: a suite's; nothing is measured beyond it


class CaseError(Exception):
    """A case that could not be measured: one line."""


def run_cases(
    cases: Mapping[str, Case],
    repeats: int,
    progress: Progress,
    left_out: dict[str, str] | None = None,
    in_one_process: bool = False,
) -> dict[str, dict[str, Any]]:
    """-> for each case: units per second and per CPU-second (median, lowest, highest), peak memory. A case that fails ends the
    benchmark, or goes to `left_out` with its reason; one that only the end of the time stopped keeps its samples, if they are
    SPREAD or more."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    failed, stopped = dict[str, str](), set[str]()
    turns, at_once = (1, repeats) if in_one_process else (repeats, 1)
    for turn in range(turns):
        for name, case in cases.items():
            if name in failed or name in stopped:
                continue
            progress(f"{name} ({turn + 1} of {turns})" if turns > 1 else name)
            try:
                samples[name] += call_fresh(_timed, *case, True, at_once)
            except CaseError as error:
                if str(error) == OVER and len(samples[name]) >= SPREAD:
                    progress(f"{name}: {error}: {len(samples[name])} repeats count")
                    stopped.add(name)
                    continue
                if left_out is None:
                    raise SystemExit(f"benchmarks: {name}: {error}") from None
                progress(f"{name}: left out: {error}")
                failed[name] = str(error)
    if left_out is not None:
        left_out.update(failed)
    return {name: summary(runs) for name, runs in samples.items() if name not in failed}


def in_fresh_process(function: Callable[..., Any], *arguments: Any, warm_up: bool = True) -> dict[str, float]:
    result: dict[str, float] = call_fresh(_timed, function, arguments, warm_up, 1)[0]
    return result


def call_fresh(function: Callable[..., Any], *arguments: Any, limit_s: float | None = None) -> Any:
    """function(*arguments) in a process of its own, or a CaseError with the last line of what went wrong. The process is killed
    after limit_s seconds, by default at `end`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, function, arguments))
    resource_tracker.ensure_running()  # whose start would lift what follows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it begins so: it would print a traceback
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    answer, error = None, OVER
    try:
        if ours.poll(left_s() if limit_s is None else limit_s):
            answer, error = ours.recv()
    except EOFError:
        error = "its process died"
    finally:
        if error == OVER:  # or interrupted
            kill(process.pid)
    process.join(EXIT_S)
    if process.is_alive():  # what a library does at its end may hang
        kill(process.pid)
    if error:
        raise CaseError(error)
    return answer


def kill(pid: int | None) -> None:
    """With all that it has started."""
    with contextlib.suppress(psutil.Error):
        whole = psutil.Process(pid)
        for process in [*whole.children(recursive=True), whole]:
            with contextlib.suppress(psutil.Error):
                process.kill()


def left_s() -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())


def _child(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of all that runs in a shell's background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        pipe.send((function(*arguments), None))
    except BaseException as error:  # its reason belongs to the parent
        told = " ".join(str(error).split())[:300]
        pipe.send((None, told if isinstance(error, CaseError | SystemExit) else f"{type(error).__name__}: {told}"))


def timed(case: Case, repeats: int) -> dict[str, Any]:
    """A case measured in this process."""
    return summary(_timed(*case, True, repeats))


def _timed(function: Callable[..., Any], arguments: tuple[Any, ...], warm_up: bool, repeats: int) -> list[dict[str, float]]:
    stream = function(*arguments) if inspect.isgeneratorfunction(function) else None
    if stream:
        next(stream)
    elif warm_up:  # page cache, imports, caches of parsers
        function(*arguments)
    runs = []
    for _ in range(repeats):
        cpu, wall = cpu_s(), time.perf_counter()
        units = next(stream) if stream else function(*arguments)
        wall, cpu = time.perf_counter() - wall, cpu_s() - cpu
        runs.append({"units": units, "wall_s": wall, "cpu_s": cpu, "peak_mb": _peak_mb()} | gpu_peak_mb())
    if stream:  # its threads and workers end before the interpreter does
        with contextlib.suppress(StopIteration):
            stream.send(True)
    return runs


def _peak_mb() -> float:
    """Of this process, without workers. getrusage would not do: a child begins with its parent's peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def gpu_peak_mb() -> dict[str, float]:
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    return {"gpu_peak_mb": torch.cuda.max_memory_allocated() / 2**20} if on_gpu else {}


def cpu_s() -> float:
    """Of this process and its workers: in microseconds, and of workers that still run in hundredths of a second."""
    alive = [psutil.Process(child.pid).cpu_times() for child in multiprocessing.active_children()]
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in ended) + sum(used.user + used.system for used in alive)


def spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def middle(values: Iterable[float]) -> dict[str, float]:
    """The median, and between which two of the values it lies with 95 %, whatever they are distributed as; of fewer than ENOUGH
    the lowest and the highest."""
    values = sorted(values)
    n, beyond = len(values), 0
    while 2 * sum(comb(n, i) for i in range(beyond + 2)) <= 0.05 * 2**n:  # so often more than those lie on one side of it
        beyond += 1
    return {"median": statistics.median(values), "low": values[beyond], "high": values[n - 1 - beyond]}


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "per_s": spread(run["units"] / run["wall_s"] for run in runs),
        "per_cpu_s": spread(run["units"] / max(run["cpu_s"], 1e-9) for run in runs),
        **{key: max(run[key] for run in runs) for key in ("peak_mb", "gpu_peak_mb") if key in runs[0]},
        "units": runs[0]["units"],
        "repeats": len(runs),
    }
