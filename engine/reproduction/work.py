"""One worker: take a job that can be begun, run its command, write down how it went; until none is left.

    Worker(place, plan, after, say).work()

Workers of any number of hosts share DIR and nothing else (claims). A worker that is killed takes its job's process with it; the
job goes on where its run stands as soon as someone takes it. A failed job is left for those who start later.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.reproduction import claims
from engine.reproduction.claims import Claim
from engine.reproduction.plan import Job, Plan
from engine.reproduction.workdir import Place, stem

ROOT = Path(__file__).resolve().parents[2]
POLL_S, GRACE_S = 0.2, 300.0  # GRACE_S: for a checkpoint, once asked to stop
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


@dataclass
class Worker:
    place: Place
    plan: Plan
    after: Callable[[Job], None]  # a job is done
    say: Callable[[str], None]
    stop: Path | None = None  # ends when this file appears
    since: float = 0.0  # by the file system's clock: failures before are tried again
    stopped: bool = False
    _known_done: set[str] = field(default_factory=set)

    def work(self) -> bool:
        """Whether it has come to the end: nothing is left that it could do or wait for."""
        self.since = claims.now(self.place.jobs)
        before = [signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)]
        try:
            while not self._is_stopped():
                job, wait = self._next()
                if job is not None:
                    self._try(job)
                elif wait:
                    time.sleep(POLL_S * 5)
                else:
                    return True
            return False
        finally:
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
                signal.signal(number, handler)

    def _stop(self, *_: Any) -> None:
        self.stopped = True

    def _is_stopped(self) -> bool:
        self.stopped = self.stopped or bool(self.stop and self.stop.exists())
        return self.stopped

    def done(self, job: Job) -> bool:
        if job.name not in self._known_done and self.place.done(job):
            self._known_done.add(job.name)
        return job.name in self._known_done

    def _next(self) -> tuple[Job | None, bool]:
        """A job to begin, and whether there is one to wait for."""
        wait = False
        for job in self.plan.jobs:
            if self.done(job) or self.place.failed_since(job, self.since):
                continue
            if not all(self.done(self.plan.named[name]) for name in job.needs):
                continue
            if not self.place.held(job):
                return job, False
            wait = True
        return None, wait

    def _try(self, job: Job) -> None:
        claim = claims.take(self.place.jobs, stem(job))
        if claim is None:
            return
        try:
            if not self.done(job) and not self.place.failed_since(job, self.since):
                self._run(job, claim)
        finally:
            claim.release()

    def _run(self, job: Job, claim: Claim) -> None:
        started = time.monotonic()
        (self.place.out / job.result).parent.mkdir(parents=True, exist_ok=True)
        with open(self.place.of(job, "out"), "ab") as out, open(self.place.of(job, "err"), "wb") as err:
            child = subprocess.Popen(
                [sys.executable, *job.command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=environment(), start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        code = self._wait(child, claim)
        if claim.lost:
            self.say(f"{job.name}: another worker has it")
            return
        why, took = self._verdict(job, code), time.monotonic() - started
        if self.done(job):
            self.place.keep(self.place.of(job, "json"), {"seconds": round(took, 3), "where": claims.here()})
            self.place.of(job, "failed").unlink(missing_ok=True)
            self.place.tidy(job)
            self.say(f"{job.name}: done in {spoken(took)}")
            self.after(job)
        elif self.stopped and code <= 0:
            self.say(f"{job.name}: stopped")
        else:
            self.place.keep(self.place.of(job, "failed"), {"why": why, "code": code, "where": claims.here()})
            self.say(f"{job.name} failed: {why}")

    def _wait(self, child: subprocess.Popen[bytes], claim: Claim) -> int:
        """SIGTERM is passed on, and answered with a checkpoint; a lost claim ends the job at once."""
        asked = 0.0
        while True:
            try:
                return child.wait(POLL_S)
            except subprocess.TimeoutExpired:
                pass
            if claim.lost or (asked and time.monotonic() - asked > GRACE_S):
                os.killpg(child.pid, signal.SIGKILL)
            elif self._is_stopped() and not asked:
                asked = time.monotonic()
                child.terminate()

    def _verdict(self, job: Job, code: int) -> str:
        """Why it failed; empty: it did not."""
        if code:
            return last_line(self.place.of(job, "err")) or f"ended with {code} and said nothing"
        try:
            return "" if self.place.accept(job) else f"ended with 0 but left no {job.result}"
        except (OSError, ValueError) as error:
            return " ".join(str(error).split())


def _die_with_parent() -> None:
    """kill -9 of a worker must not leave a process that goes on writing to a run which someone else then takes."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""


def spoken(seconds: float) -> str:
    """90 -> 2 min"""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
