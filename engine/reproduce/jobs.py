"""A folder DIR of jobs: its progress and the settings it was started with; running the jobs, each in a
process of its own, several at a time, on this machine or on a Dask cluster.

    with on_this_machine(4) as executor:                          # or distributed's client.get_executor()
        failed, interrupted = run_jobs(jobs, folder, executor, lambda: 4, on_done=print)

DIR/pretrain/MODEL/  finetune/MODEL/CELL/     runs, as `omnilead pretrain` and `finetune` write them
    scores/MODEL/CELL.json                    what `omnilead evaluate` wrote
    jobs/JOB.out .err .json                   output of a job; the seconds it took, or why it failed
    settings/*.json  starts/*.yaml            data and settings, which must not change; models with random weights
    table-N.md .csv .json

A job is done when its result exists. If a worker dies, so does the process of its job; Dask then
runs the job on another worker, where it resumes from its last checkpoint. A job's process holds
jobs/NAME.lock, so that two commands on one folder, or a worker that has lost its cluster, never run
the same job at the same time.
"""

import fcntl
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from omnilead.data_tools.cli import say
from omnilead.engine.common import ConfigError, write_whole
from omnilead.engine.reproduce.paper import Settings
from omnilead.engine.reproduce.plan import Job, JobPlan

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.2
# `python -ISc CHILD ...` is `python ...`, but the kernel kills it when the thread that started it
# ends
CHILD = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.executable, "
    "[sys.executable, *sys.argv[1:]])"
)
STOPPED = "stopped"
THREAD = threading.local()  # .environment: for the jobs that this thread starts


@dataclass(frozen=True)
class WorkDir:
    path: Path

    def file(self, job: Job, suffix: str) -> Path:
        return self.path / "jobs" / f"{job.name.replace('/', '_')}.{suffix}"

    def done(self, job: Job) -> bool:
        if job.result.startswith("scores/"):
            return self.score(job) is not None
        return (self.path / job.result).exists()

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        return [job for job in jobs if not self.done(job)]

    def score(self, job: Job, metric: str = "") -> float | None:
        """The evaluation's main score, or another of its metrics. None if it has not been measured
        or is not a number."""
        tree = read_json(self.path / job.result)
        value = tree.get("metrics", {}).get(metric) if metric else tree.get("score")
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def seconds(self, job: Job) -> float:
        """How long the job took; 0 if unknown."""
        return float(read_json(self.file(job, "json")).get("seconds", 0))

    def failure(self, job: Job) -> str:
        """Why its last attempt failed; empty if it did not."""
        return str(read_json(self.file(job, "json")).get("error", ""))

    def start(self, plan: JobPlan) -> None:
        """Creates the folder, or refuses one that was started with other data or settings."""
        for name in ("jobs", "settings", "starts"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._same_settings("data", {"scale": plan.scale.name} | asdict(plan.data))
        for name, settings in plan.settings.items():
            self._same_settings(name, settings)
        for start, tree in plan.starts.items():
            write_whole(self.path / start, yaml.safe_dump(tree, sort_keys=False))

    def _same_settings(self, name: str, settings: Settings) -> None:
        path = self.path / "settings" / f"{name}.json"
        old, new = read_json(path), json.loads(json.dumps(settings))
        for key in {**old, **new} if old else ():
            was, now = old.get(key), new.get(key)
            if was != now and key != "path":
                raise ConfigError(
                    f"--out {self.path}: was started with other settings ({name}: {key} was "
                    f"{str(was)[:40]} and is {str(now)[:40]}): use another --out"
                )
        write_json(path, new)


def read_json(path: Path) -> Settings:
    """The JSON object in a file; empty if it is missing or holds something else."""
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def on_this_machine(jobs: int) -> ThreadPoolExecutor:
    """Each thread starts its jobs with its share of the cores, and of the GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(torch.cuda.device_count())) if visible is None else visible.split(",")
    gpus = [gpu for gpu in names if gpu]
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    numbers = itertools.count()

    def start_thread() -> None:
        THREAD.environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
        if gpus:
            THREAD.environment["CUDA_VISIBLE_DEVICES"] = gpus[next(numbers) % len(gpus)]

    return ThreadPoolExecutor(jobs, initializer=start_thread)


def run_jobs(
    jobs: Sequence[Job],
    folder: WorkDir,
    executor: Executor,
    slots: Callable[[], int],
    on_done: Callable[[Job], None],
) -> tuple[dict[str, str], bool]:
    """Runs up to slots() jobs at a time, in their order, until none is left that can run, or SIGTERM
    or Ctrl-C stops them. Returns why jobs failed, by name, and whether it was Ctrl-C. A job that needs a
    failed one does not run."""
    waiting = folder.missing(jobs)
    running: dict[Future[str], Job] = {}
    failed: dict[str, str] = {}
    done = {job.name for job in jobs} - {job.name for job in waiting}
    with _stop_file(folder) as (stop, signals):
        while True:
            ready = [job for job in waiting if done.issuperset(job.needs)]
            for job in ready[: 0 if stop.exists() else max(0, slots() - len(running))]:
                waiting.remove(job)
                running[executor.submit(run_job, folder, job, stop)] = job
            if not running:
                return failed, signal.SIGINT in signals
            for future in wait(running, POLL_S * 5, FIRST_COMPLETED).done:
                job = running.pop(future)
                error = future.exception()  # of the worker, which died repeatedly, for example
                why = f"{type(error).__name__}: {error}" if error else future.result()
                if not why:
                    done.add(job.name)
                    took = duration(folder.seconds(job))
                    say(f"[{len(done)}/{len(jobs)}] {job.name}: done in {took}")
                    on_done(job)
                elif why == STOPPED:
                    say(f"{job.name}: stopped")
                else:
                    failed[job.name] = why
                    write_json(folder.file(job, "json"), {"error": why})
                    say(f"{job.name} failed: {why}")


@contextmanager
def _stop_file(folder: WorkDir) -> Iterator[tuple[Path, list[int]]]:
    """A path that exists after SIGTERM or Ctrl-C, and these signals. Unlike them, it reaches
    workers on other machines."""
    signals: list[int] = []
    stop = folder.path / "jobs" / f"stop-{socket.gethostname()}-{os.getpid()}"

    def ask(number: int, _: object) -> None:
        signals.append(number)
        stop.touch()
        os.write(2, b"stopping: each job writes a checkpoint first\n")

    stop.unlink(missing_ok=True)
    with ExitStack() as after:
        after.callback(stop.unlink, missing_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            after.callback(signal.signal, number, signal.signal(number, ask))
        yield stop, signals


def run_job(folder: WorkDir, job: Job, stop: Path) -> str:
    """On a worker: runs the job's command. Returns "" if it is done, else why not."""
    with open(folder.file(job, "lock"), "w") as lock:
        if not alone(lock, stop):
            return STOPPED
        if folder.done(job):
            return ""
        (folder.path / job.result).parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with open(folder.file(job, "out"), "ab") as out, open(folder.file(job, "err"), "wb") as err:
            child = subprocess.Popen(
                [sys.executable, "-ISc", CHILD, *job.command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=_environment(), start_new_session=True, pass_fds=[lock.fileno()],
            )  # fmt: skip
        while child.poll() is None and not stop.exists():
            time.sleep(POLL_S)
        child.terminate()  # if it still runs, it writes a checkpoint and exits
        code = child.wait()
    if folder.done(job):
        write_json(folder.file(job, "json"), {"seconds": round(time.monotonic() - started, 3)})
        if job.kind == "finetune":  # hundreds of checkpoints would fill a disk
            shutil.rmtree((folder.path / job.result).parent / "checkpoints", ignore_errors=True)
        return ""
    if stop.exists() and code <= 0:
        return STOPPED
    if code == 0:
        return f"left no valid {job.result}"
    for line in reversed(folder.file(job, "err").read_text(errors="replace").split("\n")):
        if line.strip():
            return line.strip()[:300]
    return f"exit code {code}"


def alone(lock: Any, stop: Path) -> bool:
    """Wait until no other command runs the job; False: asked to stop."""
    while not stop.exists():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(POLL_S)
        except OSError:  # a file system without locks
            return True
        else:
            return True
    return False


def _environment() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": paths} | getattr(THREAD, "environment", {})


def duration(seconds: float) -> str:
    """90 -> 2 min"""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
