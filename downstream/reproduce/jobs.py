"""Runs a plan of commands below a folder DIR, each in a process of its own, several at a time, on this
machine or on a Dask cluster. Jobs that are done are not run again.

    folder = WorkDir(Path("DIR"))
    folder.note_commands(plan)                             # ConfigError if DIR has results of other commands
    with open_executor_and_slots(4) as (executor, slots):
        code = run_jobs(folder, plan, executor, slots)

DIR/jobs/JOB.out .err .json     output of a job; the seconds it took, or why it failed
    commands.json               the command of every job

A job is done when what it makes exists. If a worker dies, so does the process of its job; Dask then
runs the job on another worker, where it resumes from its last checkpoint. A job's process holds
jobs/NAME.lock, so that two commands on one folder, or a worker that has lost its cluster, never run
the same job at the same time.
"""

import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from omnilead.data_tools.io.cluster import dask_client
from omnilead.data_tools.io.storage import locked_by_another, write_whole
from omnilead.data_tools.io.terminal import echo, say, tell
from omnilead.engine.settings.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.2
RUN_OMNILEAD = ("-m", "omnilead")  # the arguments of `python` that start omnilead
# `python -ISc CHILD_CODE ...` runs `python ...` in a process that the kernel kills when the thread
# that started it ends
CHILD_CODE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.executable, "
    "[sys.executable, *sys.argv[1:]])"
)
STOPPED = "stopped"
COMMANDS_FILE = "commands.json"
MAX_PATHS_LISTED = 3  # at most this many paths are listed in a message
# THREAD_LOCAL.environment holds the environment variables for the jobs that a thread starts
THREAD_LOCAL = threading.local()


@dataclass(frozen=True)
class Job:
    name: str  # such as pretrain/MODEL or finetune/MODEL/CELL
    command: tuple[str, ...]  # begins with `omnilead` or `python`
    needs: tuple[str, ...]  # names of the jobs that must be done before this one
    makes: str  # the path below DIR that exists once the job is done
    minutes: float = 0  # how long the job is expected to take
    basis: str = ""  # checksum of the settings that the command does not show; "" if there are none

    @property
    def kind(self) -> str:
        """Returns the first part of the name, such as pretrain."""
        return self.name.partition("/")[0]

    @property
    def python_arguments(self) -> tuple[str, ...]:
        """Returns the arguments of `python` that run the command."""
        program, *words = self.command
        return (*RUN_OMNILEAD, *words) if program == "omnilead" else tuple(words)


def job_of_step(
    step: Mapping[str, Any], words: Mapping[str, Any], earlier: Iterable[str], out: Path
) -> Job:
    """Returns the job of a step in a plan's YAML. A step states a command (`run`) and a path that
    the command makes (`makes`), in the folder NAME below DIR, or below DIR itself if the path
    begins with /. `words` replace the names in braces. The job needs those of the `earlier` jobs
    whose folders its command names."""
    name, makes = step["name"].format_map(words), step["makes"].format_map(words)
    command = tuple(shlex.split(step["run"].format_map(words)))
    read = set()
    for word in command:
        path = PurePosixPath(word.partition(f"{out}/")[2])
        read |= {str(path), *map(str, path.parents)}
    needs = tuple(other for other in earlier if other in read)
    path_made = str(PurePosixPath("/", name, makes))[1:]
    return Job(name, command, needs, path_made)


@dataclass(frozen=True)
class WorkDir:
    """The folder DIR with the results, logs and commands of the jobs."""

    path: Path

    def job_file(self, job: Job, suffix: str) -> Path:
        return self.path / "jobs" / f"{job.name.replace('/', '_')}.{suffix}"

    def read_outcome(self, job: Job, key: str) -> Any:
        """Returns what was noted when the job last ended: with key "seconds", how long it took; with
        key "error", why it failed. None if this was not noted."""
        return read_json(self.job_file(job, "json")).get(key)

    def is_done(self, job: Job) -> bool:
        """Returns True if the path that the job makes exists. If this is a JSON file, it must also
        be readable, not empty, and have no undefined score."""
        path = self.path / job.makes
        if path.suffix != ".json":
            return path.exists()
        tree = read_json(path)
        return bool(tree) and tree.get("score", 0) is not None

    def unfinished_jobs(self, jobs: Iterable[Job]) -> list[Job]:
        return [job for job in jobs if not self.is_done(job)]

    def note_commands(self, jobs: Collection[Job], places: Mapping[str, str] | None = None) -> None:
        """Creates the folder and notes the commands of the jobs in it. ConfigError if the folder has
        results of other commands, or results of jobs that need such results. `places`: {path: word
        that replaces it in the notes}, for paths that may change."""
        (self.path / "jobs").mkdir(parents=True, exist_ok=True)
        path = self.path / COMMANDS_FILE
        before, commands_now, changed = read_json(path), dict[str, str](), set[str]()
        refused = []
        for job in jobs:
            text = shlex.join(job.command) + job.basis
            for place, word in {str(self.path): "DIR", **(places or {})}.items():
                text = text.replace(place, word)
            commands_now[job.name] = text
            if before.get(job.name, text) != text or changed.intersection(job.needs):
                changed.add(job.name)
                if self.is_done(job):
                    refused.append(str(self.path / job.name))
        if refused:
            and_more = (
                f" and {len(refused) - MAX_PATHS_LISTED} more"
                if len(refused) > MAX_PATHS_LISTED
                else ""
            )
            raise ConfigError(
                f"these results were made by other commands or settings than this plan's: "
                f"{', '.join(refused[:MAX_PATHS_LISTED])}{and_more}: remove them, or use another --out"
            )
        write_json(path, before | commands_now)


def read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file; empty if the file is missing or holds something else."""
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def expected_seconds(folder: WorkDir, jobs: Collection[Job]) -> dict[str, float]:
    """Returns {job: seconds} for the jobs that are not done. Their planned time is multiplied by
    the ratio of actual to planned time of the finished jobs of the same kind."""
    took, minutes = defaultdict[str, float](float), defaultdict[str, float](float)
    for job in jobs:
        seconds = folder.read_outcome(job, "seconds")
        if seconds and folder.is_done(job):
            took[job.kind] += seconds
            minutes[job.kind] += job.minutes
    expected = {}
    for job in folder.unfinished_jobs(jobs):
        pace = took[job.kind] / minutes[job.kind] if minutes[job.kind] else 60
        expected[job.name] = job.minutes * pace
    return expected


def forecast_text(jobs: Collection[Job], expected: Mapping[str, float], at_once: int) -> str:
    left = [job for job in jobs if job.name in expected]
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(job.kind for job in left).items())
    text = f"{len(left)} of {len(jobs)} jobs left{f' ({kinds})' if kinds else ''}: about "
    return f"{text}{duration_text(sum(expected.values()) / at_once)}, {at_once} at a time"


def show_plan(folder: WorkDir, jobs: Collection[Job], at_once: int) -> int:
    """Prints the command and the expected time of every job, and the expected time of all jobs that
    are not done. Returns the exit code."""
    expected = expected_seconds(folder, jobs)
    for job in jobs:
        state = f"about {duration_text(expected[job.name])}" if job.name in expected else "done"
        echo(f"# {job.name}: {state}\n{shlex.join(job.command)}")
    echo(f"# {forecast_text(jobs, expected, at_once)}")
    return 0


@contextmanager
def open_executor_and_slots(
    jobs: int, cluster: str = ""
) -> Iterator[tuple[Executor, Callable[[], int]]]:
    """Connects to a Dask cluster, or opens `jobs` threads on this machine. Yields an executor, and
    a function that returns how many jobs can run at a time."""
    if cluster:
        with dask_client(cluster) as client:
            yield client.get_executor(pure=False), lambda: sum(client.nthreads().values())
    else:
        with local_executor(jobs) as executor:
            yield executor, lambda: jobs


def local_executor(jobs: int) -> ThreadPoolExecutor:
    """Returns an executor whose threads start jobs. Each thread has its share of the cores, and one
    of the GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(torch.cuda.device_count())) if visible is None else visible.split(",")
    gpus = [gpu for gpu in names if gpu]
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    numbers = itertools.count()

    def set_thread_environment() -> None:
        THREAD_LOCAL.environment = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))
        }
        if gpus:
            THREAD_LOCAL.environment["CUDA_VISIBLE_DEVICES"] = gpus[next(numbers) % len(gpus)]

    return ThreadPoolExecutor(jobs, initializer=set_thread_environment)


def run_jobs(
    folder: WorkDir,
    jobs: Collection[Job],
    executor: Executor,
    slots: Callable[[], int],
    on_done: Callable[[Job], None] = lambda job: None,
) -> int:
    """Runs jobs in their order, up to slots() at a time, until no job can be started or SIGTERM or
    Ctrl-C stops them. A job that needs a failed job does not run. Returns the exit code: 130 after
    Ctrl-C, 1 if a job failed, else 0."""
    waiting = folder.unfinished_jobs(jobs)
    running: dict[Future[str], Job] = {}
    failed: dict[str, str] = {}
    done = {job.name for job in jobs} - {job.name for job in waiting}
    say(forecast_text(jobs, expected_seconds(folder, jobs), slots()))
    with _stop_file_and_signals(folder) as (stop, signals):
        while True:
            ready = [job for job in waiting if done.issuperset(job.needs)]
            for job in ready[: 0 if stop.exists() else max(0, slots() - len(running))]:
                waiting.remove(job)
                running[executor.submit(run_job, folder, job, job.python_arguments, stop)] = job
            if not running:
                break
            for future in wait(running, POLL_S * 5, FIRST_COMPLETED).done:
                job = running.pop(future)
                why = _report_end(folder, job, future, f"[{len(done) + 1}/{len(jobs)}]")
                if not why:
                    done.add(job.name)
                    on_done(job)
                elif why != STOPPED:
                    failed[job.name] = why
    # The failures are printed again at the end, where the user looks for them
    for name, why in failed.items():
        tell(f"{name} failed: {why}")
    return 130 if signal.SIGINT in signals else int(bool(failed))


def _report_end(folder: WorkDir, job: Job, future: Future[str], number: str) -> str:
    """Prints how a job ended and, if it failed, notes why. Returns "" if the job is done, else the
    reason."""
    error = future.exception()  # set if the worker raised an error, or died repeatedly
    why = f"{type(error).__name__}: {error}" if error else future.result()
    if not why:
        say(
            f"{number} {job.name}: done in {duration_text(folder.read_outcome(job, 'seconds') or 0)}"
        )
    elif why == STOPPED:
        say(f"{job.name}: stopped")
    else:
        write_json(folder.job_file(job, "json"), {"error": why})
        say(f"{job.name} failed: {why}")
    return why


@contextmanager
def _stop_file_and_signals(folder: WorkDir) -> Iterator[tuple[Path, list[int]]]:
    """Yields the path of a file that exists after SIGTERM or Ctrl-C, and a list of the signals
    received. A file is used because workers on other machines can see it, but do not get the
    signal."""
    signals: list[int] = []
    stop = folder.path / "jobs" / f"stop-{socket.gethostname()}-{os.getpid()}"

    def ask_to_stop(number: int, _: object) -> None:
        signals.append(number)
        stop.touch()
        os.write(2, b"stopping: each job writes a checkpoint first\n")

    stop.unlink(missing_ok=True)
    with ExitStack() as after:
        after.callback(stop.unlink, missing_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            after.callback(signal.signal, number, signal.signal(number, ask_to_stop))
        yield stop, signals


def run_job(folder: WorkDir, job: Job, words: Sequence[str], stop: Path) -> str:
    """Runs `python WORDS` in a process of its own, and waits for its end. Returns "" if the job is
    done, else the reason why it is not. `stop`: the file whose existence stops the job."""
    with open(folder.job_file(job, "lock"), "w") as lock:
        while locked_by_another(lock, str(folder.path)) and not stop.exists():
            time.sleep(POLL_S)
        if stop.exists():
            return STOPPED
        if folder.is_done(job):
            return ""
        path_made = folder.path / job.makes
        path_made.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with (
            open(folder.job_file(job, "out"), "ab") as out,
            open(folder.job_file(job, "err"), "wb") as err,
        ):
            child = subprocess.Popen(
                [sys.executable, "-ISc", CHILD_CODE, *words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=_child_environment(), start_new_session=True, pass_fds=[lock.fileno()],
            )  # fmt: skip
        while child.poll() is None and not stop.exists():
            time.sleep(POLL_S)
        # A process that still runs gets SIGTERM: it writes a checkpoint and exits
        child.terminate()
        code = child.wait()
    if folder.is_done(job):
        write_json(folder.job_file(job, "json"), {"seconds": round(time.monotonic() - started, 3)})
        # Hundreds of fine-tunings would fill a disk with checkpoints
        if job.kind == "finetune":
            shutil.rmtree(path_made.parent / "checkpoints", ignore_errors=True)
        return ""
    if stop.exists() and code <= 0:
        return STOPPED
    if code == 0:
        return f"left no valid {job.makes}"
    for line in reversed(folder.job_file(job, "err").read_text(errors="replace").split("\n")):
        if line.strip():
            return line.strip()[:300]
    return f"exit code {code}"


def _child_environment() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": paths} | getattr(THREAD_LOCAL, "environment", {})


def duration_text(seconds: float) -> str:
    """Returns a duration in a suitable unit: "2 min" for 90 seconds."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
