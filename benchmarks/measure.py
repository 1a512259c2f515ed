"""Measure times on a noisy machine: in fresh processes, after a warm-up that does not count, in CPU-seconds as
well as seconds, and with all repeats reported.

    for name, result, reason in run_cases({"name": (function, arguments), ...}, repeats=5): ...

Cases that are compared take turns (A B C A B C ...), so that changes of the machine's speed affect
all of them. On a GPU that is not shared, `at_once` runs all repeats of a case in one process.
"""

import multiprocessing
import os
import resource
import shutil
import signal
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import psutil
from scipy.stats import binom

from omnilead.engine.settings.errors import ConfigError

# (a module-level function, its arguments). The function may be a generator. Then it yields once after its
# warm-up, perhaps a dict of facts for the result, and after that, for each repeat, how many units of work it
# did. Any other function measures itself and returns its result as a dict.
Case = tuple[Callable[..., Any], tuple[Any, ...]]
Cases = dict[str, Case]
Result = dict[str, Any]
# A record is the JSON file with the results of one command. A part of it has the config, input and results
# of one benchmark
Part = dict[str, Any]
Rows = Sequence[Mapping[str, float]]  # for each repeat: units, wall_s and cpu_s
Outcome = tuple[str, Result, str]  # (case, its result, "") or (case, {}, why it has no result)

OUT_OF_TIME = "stopped: out of time"  # the reason why a case was stopped at the deadline
OVER_TIME = "stopped: over its time limit"  # the reason why a case was stopped after its time limit
BUG_PREFIX = "bug: "  # prefix of the reason if an error is not one of EXPECTED_ERRORS
LEAST_REPEATS = 3  # fewer repeats do not show how much a measurement varies
LEAST_FOR_INTERVAL = 6  # a 95 % interval needs at least so many values
EXIT_S = 10  # how long a process may take to exit after it has sent its answer
deadline = inf  # when measuring stops, as a time of time.monotonic
limit_s = inf  # time limit of each process


class CaseError(Exception):
    """Raised if a case could not be measured; the message gives the reason in one line."""


# Errors that only mean that this machine cannot run a case. torch.OutOfMemoryError is another one, which
# _run_in_child recognizes by its name
EXPECTED_ERRORS = (CaseError, ConfigError, SystemExit, ModuleNotFoundError, OSError, MemoryError)


def say(text: str) -> None:
    print(f"benchmark: {text}", file=sys.stderr, flush=True)


def run_cases(cases: Cases, repeats: int, at_once: bool = False) -> Iterator[Outcome]:
    """Yields the outcome of each case, and yields it again after each further repeat. A case that runs out of time
    keeps its result if it has at least LEAST_REPEATS repeats. With `at_once`, all repeats of a case run in
    one process; otherwise the cases take turns."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for turn in range(1 if at_once else repeats):
        for name, (function, arguments) in cases.items():
            if name not in samples:  # already done: the case failed, or measured itself
                continue
            say(name if at_once else f"{name} ({turn + 1} of {repeats})")
            count = repeats if at_once else 1
            reason = ""
            try:
                answer = call_fresh(measure_case, function, arguments, count, rows=samples[name])
            except CaseError as error:
                answer, reason = None, str(error)
            if answer:  # the case measured itself
                del samples[name]
                yield name, answer, ""
                continue
            rows = samples.pop(name) if reason else samples[name]
            if len(rows) >= LEAST_REPEATS and reason in ("", OUT_OF_TIME, OVER_TIME):
                yield name, summarise(rows), ""
            elif reason:
                say(f"{name}: left out: {reason}")
                yield name, {}, reason


def call_fresh(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = inf,
    rows: list[dict[str, float]] | None = None,
) -> Any:
    """Returns what function(*arguments) returns in a fresh process. Raises a CaseError with the reason in one
    line if it fails. The process and its children are killed after `seconds`, after `limit_s` or at the
    deadline. With `rows`, the function gets one more argument, `send`: a row passed to it is appended to
    `rows` at once."""
    left = deadline - time.monotonic()
    wait_s, late = min((left, OUT_OF_TIME), (min(seconds, limit_s), OVER_TIME))
    if wait_s <= 0:
        raise CaseError(late)
    end = time.monotonic() + wait_s
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(
        target=_run_in_child, args=(sender, function, arguments, rows is not None)
    )
    process.start()
    sender.close()
    try:
        row: Result | None = {}
        while row is not None:
            if not receiver.poll(None if end == inf else max(0.0, end - time.monotonic())):
                raise CaseError(late)
            row, value, error = receiver.recv()
            if rows is not None and row:
                rows.append(row)
        process.join(EXIT_S)
    except EOFError:
        raise CaseError("its process ended without an answer, e.g. killed for memory") from None
    finally:
        # The process may still run: it is late, Ctrl-C was pressed, or a library hangs at exit
        kill_tree(process.pid)
        process.join(EXIT_S)
    if error:
        raise CaseError(error)
    return value


def kill_tree(pid: int | None) -> None:
    """Kills a process and all its children."""
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with suppress(psutil.Error):
                process.kill()


def _run_in_child(
    pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...], sends: bool
) -> None:
    # Ctrl-C is left to the parent, which then kills this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        send = [lambda row: pipe.send((row, None, ""))] if sends else []
        pipe.send((None, function(*arguments, *send), ""))
    except BaseException as error:  # sent to the parent, which reports it
        reason = " ".join(str(error).split())[:300]
        if not isinstance(error, CaseError | SystemExit):
            reason = f"{type(error).__name__}: {reason}"
        # OutOfMemoryError is compared by name, because torch may not be imported
        if not isinstance(error, EXPECTED_ERRORS) and type(error).__name__ != "OutOfMemoryError":
            reason = BUG_PREFIX + reason
            traceback.print_exc()
        pipe.send((None, None, reason))


def measure_case(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    repeats: int,
    send: Callable[[dict[str, float]], None],
) -> Any:
    """Measures a case in this process, and sends a row for each repeat. If the case measures itself, returns its
    result instead."""
    stream = function(*arguments)
    if isinstance(stream, dict):
        return stream
    # The warm-up, which fills the page cache and caches of parsers, and imports modules
    facts = next(stream)
    facts = facts if isinstance(facts, dict) else {}
    for _ in range(repeats):
        sample = time_work(lambda: {"units": next(stream)})
        send(sample | peaks_mb() | facts)
    stream.close()  # the case ends its threads and workers here, before the interpreter exits
    return None


def time_work(work: Callable[[], dict[str, float] | None]) -> dict[str, float]:
    """Does some work, and returns its seconds and CPU-seconds together with the dict that it returns."""
    wall, cpu = time.perf_counter(), cpu_s()
    returned = work() or {}
    return {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu} | returned


def time_in_turns(
    sides: Mapping[str, Callable[[], dict[str, float] | None]], turns: int, units: float
) -> dict[str, list[dict[str, float]]]:
    """Times several functions (`sides`) in alternating turns in this process, and returns the rows of each. The
    first turn of each is not counted. The order of the sides is reversed every other turn."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            rows[name].append({"units": units} | time_work(sides[name]))
    return {name: turns_of_side[1:] for name, turns_of_side in rows.items()}


def peaks_mb() -> dict[str, float]:
    """Returns the peak memory of this process, without its workers, and of the GPU if torch uses one."""
    # From /proc, because in getrusage a child process starts with the peak of its parent
    status = Path("/proc/self/status").read_text()
    peaks = {"peak_mb": int(status.split("VmHWM:")[1].split()[0]) / 1024}
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        peaks["gpu_peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return peaks


def cpu_s() -> float:
    """Returns the CPU-seconds that this process and its worker processes have used so far. Those of running
    workers are exact to hundredths of a second, all others to microseconds."""
    total_s = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        times = resource.getrusage(who)
        total_s += times.ru_utime + times.ru_stime
    for child in multiprocessing.active_children():
        running = psutil.Process(child.pid).cpu_times()
        total_s += running.user + running.system
    return total_s


def median_and_range(values: Iterable[float]) -> dict[str, float]:
    """Returns the median, the lowest and the highest value."""
    values = list(values)
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def interval(values: Iterable[float]) -> dict[str, float]:
    """Returns the median and its 95 % interval. The interval makes no assumption about the distribution: its
    ends are two of the values, chosen because the number of values below the true median is binomial. For
    fewer than LEAST_FOR_INTERVAL values, the ends are the lowest and the highest value."""
    values = sorted(values)
    cut = max(0, int(binom.ppf(0.025, len(values), 0.5)) - 1)
    return {"median": statistics.median(values), "low": values[cut], "high": values[-1 - cut]}


def rates(rows: Rows, prefix: str = "") -> Result:
    """Returns median and range of the units done per second and per CPU-second."""
    return {
        f"{prefix}per_s": median_and_range(row["units"] / row["wall_s"] for row in rows),
        f"{prefix}per_cpu_s": median_and_range(
            row["units"] / max(row["cpu_s"], 1e-9) for row in rows
        ),
    }


def percentages(rows: Rows, others: Rows, device: str) -> list[float]:
    """Returns the time of each of `rows` as a percentage of the time of the same turn in `others`. Times are
    CPU-seconds on a CPU, seconds on a GPU."""
    clock = "cpu_s" if device == "cpu" else "wall_s"
    return [100 * row[clock] / other[clock] for row, other in zip(rows, others, strict=True)]


def summarise(samples: Rows) -> Result:
    """Returns the result of a case from the rows of its repeats."""
    result = rates(samples)
    for key in ("peak_mb", "gpu_peak_mb"):
        if key in samples[0]:
            result[key] = max(sample[key] for sample in samples)
    if "attention" in samples[0]:
        result["attention"] = samples[0]["attention"]
    return result | {"units": samples[0]["units"], "repeats": len(samples)}


def make_dataset(
    work: Path, records: int, keep_archive: bool = False, plan: str = "all", **options: Any
) -> Any:
    """Makes a dataset of about `records` synthetic crops of 10 s in work/dataset, and returns it. `plan` and
    `options` are those of data_tools.sharding.shard.ShardOptions."""
    from omnilead.data_tools.sharding.shard import ShardOptions, shard
    from omnilead.data_tools.sources.detect import open_sources
    from omnilead.data_tools.synthetic import archive as synth

    say(f"a dataset of about {records} crops")
    archive, workers = work / "archive", max(1, min(8, (os.cpu_count() or 1) // 2))
    patients = max(2, records // 2)
    synth.synthesise(archive, patients, two_sessions=0, seed=11, workers=workers, progress=False)
    shard_options = ShardOptions(
        str(work / "dataset"), plan=plan, workers=workers, quiet=True, **options
    )
    dataset = shard(open_sources(str(archive)), shard_options)
    if not keep_archive:
        shutil.rmtree(archive)
    return dataset


def describe_input(dataset: Any, **facts_of_case: Any) -> Result:
    """Returns what a record says about the input data of a benchmark."""
    from omnilead.data_tools.synthetic.archive import ARCHIVE_VERSION

    facts = {"archive": f"synthetic-{ARCHIVE_VERSION}", "crops": len(dataset)}
    return facts | {"dataset": dataset.fingerprint} | facts_of_case


def reserve_port() -> socket.socket:
    """Returns a socket bound to a free port. Until it is closed, the system gives the port to no one else, but a
    process that names the port can listen on it."""
    port = socket.socket()
    port.bind(("", 0))
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return port
