"""Who does which job, among workers that share nothing but a folder.

    claim = take(folder, "pretrain_w2v-12")     # None: someone else has it, and lives
    ...                                         # a thread touches the file every BEAT_S
    claim.release()                             # or the worker dies, and after STALE_S the job is anyone's

NAME.claim-1, NAME.claim-2, ...: the highest number holds. To take a job over is to create the next number, which the file
system lets one worker do; nothing is ever deleted, so nobody can take away a claim that he has not seen. Times are the file
system's own, so clocks of hosts need not agree. A dead process of this host is known at once.
"""

import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

BEAT_S, STALE_S = 10.0, 90.0


def here() -> str:
    """This host, and in it this container."""
    return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"


def now(folder: Path) -> float:
    """By the clock of the file system."""
    probe = folder / f".clock.{here().replace('/', '.')}.{os.getpid()}.{threading.get_ident()}"
    probe.write_bytes(b"")
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def newest(folder: Path, name: str) -> int:
    """0: never claimed."""
    return max((int(path.name.rpartition("-")[2]) for path in folder.glob(f"{name}.claim-*")), default=0)


def held(folder: Path, name: str) -> bool:
    """By someone who lives."""
    number = newest(folder, name)
    if not number:
        return False
    path = folder / f"{name}.claim-{number}"
    beat = path.stat().st_mtime
    if beat == 0 or now(folder) - beat > STALE_S:
        return False
    try:
        owner = json.loads(path.read_text())
    except ValueError:  # being written
        return True
    return not (owner["where"] == here() and not _alive(owner["pid"]))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def take(folder: Path, name: str) -> "Claim | None":
    number = newest(folder, name)
    if held(folder, name):
        return None
    path = folder / f"{name}.claim-{number + 1}"
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return None
    with os.fdopen(file, "w") as out:
        out.write(json.dumps({"where": here(), "pid": os.getpid(), "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}) + "\n")
    return Claim(folder, name, number + 1)


@dataclass
class Claim:
    folder: Path
    name: str
    number: int
    lost: bool = False  # someone thought this worker dead, and has begun
    _end: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.claim-{self.number}"

    def _beat(self) -> None:
        while not self._end.wait(BEAT_S):
            try:
                self.lost = self.lost or newest(self.folder, self.name) > self.number
                os.utime(self.path)
            except OSError:  # the file system is away for a while; the others see it by the time
                continue

    def release(self) -> None:
        self._end.set()
        self._thread.join()
        os.utime(self.path, (0, 0))
