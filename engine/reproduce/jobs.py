"""Run jobs, each in a process of its own, several at a time: on this machine or on a
Dask cluster.

    with on_this_machine(4) as executor:                          # or distributed's client.get_executor()
        failed, interrupted = run_jobs(jobs, folder, executor, lambda: 4, on_done=print)

A job is done when its result exists. If a worker dies, so does the process of its job; Dask then
runs the job on another worker, where it resumes from its last checkpoint. A job's process holds
jobs/NAME.lock, so that two commands on one folder, or a worker that has lost its cluster, never run
the same job at the same time.
"""

import fcntl
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from omnilead.data_tools.cli import say
from omnilead.engine.reproduce.plan import Job
from omnilead.engine.reproduce.workdir import WorkDir, write_json

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
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
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


def _environment() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": paths} | getattr(THREAD, "environment", {})


def duration(seconds: float) -> str:
    """90 -> 2 min"""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
