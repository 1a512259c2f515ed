"""Whole shards of a far-away dataset in a bounded local cache, before they are needed and verified before they are used.

    order of shards -> [4 threads: root.read_range, 8 MiB a part -> sha256 + SHA.partial -> rename] -> SHA.tar -> hold, path

Up to `ahead` shards that the order will ask for next are fetched while earlier ones are read; the one asked longest ago
goes first when room is needed, never one that somebody holds. Names are checksums, so datasets and the ranks of a node
share one directory (on a local disk: every claim is a flock, which ends with its process, however that ends):
SHA.partial is locked by who downloads it, and has its full size from the start, so that a listing counts it;
SHA.tar is locked (shared) by who reads it; `lock` by who makes room.
"""

import atexit
import fcntl
import hashlib
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, takewhile
from pathlib import Path

from data_tools.dataset import Dataset, DatasetError

PART_BYTES = 8 * 2**20
DOWNLOADS = 4  # at once: their parts are all the memory this takes
MORE = "allow more (pipeline.cache_bytes)"
ELSEWHERE = "make room or mend it there, or name another place (pipeline.cache_dir)"
TRIES, FIRST_WAIT_S = 5, 0.5  # of a part, each of which the storage has already tried several times
POLL_S = 0.05  # for what other processes do
_CACHED = re.compile(r"[0-9a-f]{64}\.(?:tar|partial)", re.ASCII)


class StagingError(DatasetError):
    """Network, disk or room, not the dataset's bytes: skipping crops would not help, so it stops the run in any case."""


class NoRoom(StagingError):
    """Other processes hold it all, and may be waiting for what this one holds."""


class Staging:
    def __init__(
        self,
        dataset: Dataset,
        cache_dir: str | os.PathLike[str],
        max_bytes: int,
        ahead: int = 4,
        order: Iterable[int] = (),
        together: int = 1,
        timeout_s: float = 60,
    ) -> None:
        """`order`: shards in the order in which they will be asked for, of which `together` neighbours are in use at a time
        (order.block_shards). `timeout_s`: for one part, and for room while other shards are held; else four times that."""
        self.dataset, self.cache, self.max_bytes, self.shards = dataset, Path(cache_dir), max_bytes, dataset.shards
        self.ahead, self.together, self.timeout_s = ahead, together, timeout_s
        largest = max((self._bytes(shard) for shard in range(len(self.shards))), default=0)
        if max_bytes < largest:
            raise StagingError(f"{self.cache}: a cache of {max_bytes} bytes cannot hold one shard of {largest}: {MORE}")
        self._order = iter(order)
        self._current: list[int] = []  # the last `together` that the order has reached: asked for in every batch
        self._coming: list[int] = list(islice(self._order, ahead))
        self._asked: list[int] = []  # somebody waits for these
        self._held: Counter[int] = Counter()
        self.beside: Sequence[Staging] = ()  # of other datasets, in the same cache for the same batches
        self._done: dict[int, DatasetError | None] = {}  # None: in the cache, unless another process has evicted it since
        self._busy: set[int] = set()
        self._later: set[int] = set()  # no room as yet
        self._verified: set[int] = set()
        self._closing = threading.Event()
        self._state = threading.Condition()
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            with self._alone():
                self._make_room(None, 0)  # an earlier run may have had more
        except OSError as error:
            raise StagingError(f"{self.cache}: {error.strerror}: {ELSEWHERE}") from None
        atexit.register(self.close)
        for _ in range(DOWNLOADS):  # daemons: a program that ends must not wait for the network
            threading.Thread(target=self._work, name="staging", daemon=True).start()

    def path(self, shard: int) -> str:
        """Waits until the shard is there. It stays until its room is needed: `hold` it to be sure."""
        with self.hold(shard) as path:
            return path

    @contextmanager
    def hold(self, shard: int) -> Iterator[str]:
        """A verified shard's local path; the file is not evicted, by any process, before the end of the block."""
        with self._state:
            self._advance(shard)
            more = 0 if shard in self._held else self._bytes(shard)
            if more + self.held_bytes + sum(one.held_bytes for one in self.beside) > self.max_bytes:
                raise StagingError(
                    f"{self.cache}: {self.max_bytes} bytes do not hold the shards of one batch: "
                    f"{MORE}, or lower pipeline.block_shards"
                )
            self._held[shard] += 1
        try:
            lock = self._wait_and_lock(shard)
            try:
                yield str(self._file(shard))
            finally:
                os.close(lock)
        finally:
            with self._state:
                self._held -= Counter([shard])  # keeps positive counts only
                self._later.clear()
                self._state.notify_all()

    @property
    def held_bytes(self) -> int:
        return sum(map(self._bytes, self._held))

    def close(self) -> None:
        """Whoever waits gets an error; downloads end at their next part. What is in the cache stays for the next run."""
        atexit.unregister(self.close)
        self._closing.set()
        with self._state:
            self._state.notify_all()

    def _advance(self, shard: int) -> None:
        if shard in self._coming and shard not in self._current:
            reached = self._coming.index(shard) + 1
            new = list(islice(self._order, reached))
            self._current = (self._current + self._coming[:reached])[-self.together :]
            self._coming = self._coming[reached:] + new
            for one in new:
                if one in self._done and self._done[one] is None:
                    del self._done[one]  # it may have been evicted since its last turn: looked for again
        self._later.clear()
        self._state.notify_all()

    def _wait_and_lock(self, shard: int) -> int:
        """-> a descriptor with a shared lock on the file, which is the file of that name."""
        while True:
            with self._state:
                self._asked.append(shard)
                self._state.notify_all()
                self._state.wait_for(lambda: shard in self._done or self._closing.is_set())
                self._asked.remove(shard)
                self._go_on(shard)
                error = self._done[shard]
                if isinstance(error, NoRoom):
                    del self._done[shard]  # later there may be
                if error is not None:
                    raise type(error)(str(error))
            lock = _open_locked(self._file(shard), os.O_RDONLY, fcntl.LOCK_SH)
            if lock is not None:
                with suppress(PermissionError):  # another user's
                    os.utime(lock)  # the newest: evicted last
                return lock
            with self._state:
                self._done.pop(shard, None)  # another process needed the room

    def _work(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._closing.is_set() or self._next() is not None)
                shard = self._next()
                if self._closing.is_set() or shard is None:
                    return
                self._busy.add(shard)
            error: DatasetError | None = None
            there = True
            try:
                there = self._stage(shard)
            except DatasetError as failed:
                error = failed
            except Exception as failed:  # disk full, most of all; whoever waits must hear of any
                why = getattr(failed, "strerror", None) or f"{type(failed).__name__}: {failed}"
                error = StagingError(f"{self._file(shard)}: {why}, while {self._name(shard)} was fetched: {ELSEWHERE}")
            with self._state:
                self._busy.remove(shard)
                if there:
                    self._done[shard] = error
                else:
                    self._later.add(shard)
                self._state.notify_all()

    def _next(self) -> int | None:
        waiting = (shard for shard in [*self._current, *self._coming] if shard not in self._later)
        return next((s for s in [*self._asked, *waiting] if s not in self._busy and s not in self._done), None)

    def _go_on(self, shard: int) -> None:
        if self._closing.is_set():
            raise StagingError(f"{self._name(shard)}: the cache was closed")

    def _stage(self, shard: int) -> bool:
        """Until the verified file stands under its name, whoever brought it; False: no room, and nobody waits for it."""
        began = time.monotonic()
        while not self._stands(shard):
            self._go_on(shard)
            lock, room = self._claim(shard)
            if lock is not None:
                self._download(shard, lock)
                return True
            if not room and shard not in self._asked:
                return False
            others = len(self._held) > 1 or any(one._held for one in self.beside)
            if not room and time.monotonic() - began > self.timeout_s * (1 if others else 4):
                raise NoRoom(f"{self.cache}: no room for {self._name(shard)}: others hold all of it: {MORE}")
            self._closing.wait(POLL_S)  # another process downloads it, or holds the room
        return True

    def _claim(self, shard: int) -> tuple[int | None, bool]:
        """-> (descriptor of the locked partial file if it is ours to download, whether there is room)"""
        partial, size = self._file(shard).with_suffix(".partial"), self._bytes(shard)
        with self._alone():
            dead = _open_locked(partial, os.O_RDWR, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if dead is not None:  # its process is
                partial.unlink()
                os.close(dead)
            if partial.exists() or self._file(shard).exists():
                return None, True
            if not self._make_room(shard, size):
                return None, False
            lock = _open_locked(partial, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is not None:
                os.ftruncate(lock, size)
            return lock, True

    def _stands(self, shard: int) -> bool:
        """A file of an earlier run is read through once before it is trusted."""
        lock = _open_locked(self._file(shard), os.O_RDONLY, fcntl.LOCK_SH)
        if lock is None:
            return False
        try:
            if shard not in self._verified:
                with open(os.dup(lock), "rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != self.shards[shard]["sha256"]:
                        self._file(shard).unlink(missing_ok=True)
                        return False
                self._verified.add(shard)
            return True
        finally:
            os.close(lock)

    def _download(self, shard: int, lock: int) -> None:
        """Into the locked partial file; renamed if its bytes are right, else once more."""
        partial, size = self._file(shard).with_suffix(".partial"), self._bytes(shard)
        try:
            for _ in range(2):
                sha256 = hashlib.sha256()
                for start in range(0, size, PART_BYTES):
                    part = self._part(shard, start, min(PART_BYTES, size - start))
                    sha256.update(part)
                    if os.pwrite(lock, part, start) != len(part):
                        raise OSError("the disk took only a part")
                if sha256.hexdigest() == self.shards[shard]["sha256"]:
                    os.fsync(lock)
                    with self._alone():  # a listing meanwhile might see neither name, or both
                        os.rename(partial, self._file(shard))
                    self._verified.add(shard)
                    return
            raise DatasetError(f"{self._name(shard)}: its bytes fail their sha256, twice: restore the file")
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(lock)

    def _part(self, shard: int, start: int, size: int) -> bytes:
        name, what, kind = f"shards/{self.shards[shard]['name']}", "", DatasetError
        for attempt in range(TRIES):
            self._go_on(shard)
            try:
                part = self._within_time(lambda: self.dataset.root.read_range(name, start, size))
                self._go_on(shard)
                if len(part) == size:
                    return part
                what, kind = f"{len(part)} of {size} bytes came", DatasetError  # cut on the way, or the file is too short
            except StagingError:
                raise
            except FileNotFoundError:
                raise DatasetError(f"{self._name(shard)}: no such file: restore it") from None
            except Exception as error:
                what, kind = " ".join(f"{type(error).__name__}: {error}".split()), StagingError
            if attempt < TRIES - 1:
                self._closing.wait(FIRST_WAIT_S * 2**attempt * (0.5 + random.random()))
        raise kind(f"{self._name(shard)}: byte {start} after {TRIES} tries: {what}"[:300])

    def _within_time(self, call: Callable[[], bytes]) -> bytes:
        """A server that holds the line and says nothing is given up, with its thread."""
        result: list[bytes | BaseException] = []

        def run() -> None:
            try:
                result.append(call())
            except BaseException as error:
                result.append(error)
            with self._state:
                self._state.notify_all()

        threading.Thread(target=run, name="staging-part", daemon=True).start()
        with self._state:
            self._state.wait_for(lambda: result or self._closing.is_set(), self.timeout_s)
        if not result:
            raise TimeoutError(f"nothing came in {self.timeout_s:g} s")
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def _make_room(self, shard: int | None, need: int) -> bool:
        """Evicts files that nobody has locked, those asked for longest ago first; what the order needs now or next only for a
        shard that is asked for (or for none), and of that the farthest first."""
        files = []
        for entry in os.scandir(self.cache):
            if _CACHED.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    files.append((entry.stat().st_mtime_ns, entry.stat().st_size, Path(entry.path)))
        used, there = need + sum(size for _, size, _ in files), {path.stem for _, _, path in files}
        with self._state:
            order, asked = [*self._current, *self._coming], shard is None or shard in self._asked
            failed = {one for one, error in self._done.items() if error is not None}
        if not asked:  # nor does it take the room of those before it that are still to be fetched
            sooner = set(takewhile(lambda one: one != shard, order)) - failed
            used += sum(self._bytes(one) for one in sooner if self._file(one).stem not in there)
        rank = {self._file(one): i for i, one in reversed(list(enumerate(order, 1)))}
        files = [file for file in files if asked or file[2] not in rank]
        victims = sorted(files, key=lambda file: (file[2] in rank, -rank.get(file[2], 0), file[0]))
        for _, size, path in victims:
            if used <= self.max_bytes:
                break
            lock = _open_locked(path, os.O_RDONLY, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is not None:
                path.unlink()
                os.close(lock)
                used -= size
        return used <= self.max_bytes

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread of one process at a time counts, evicts, claims and renames."""
        with open(self.cache / "lock", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _file(self, shard: int) -> Path:
        return self.cache / f"{self.shards[shard]['sha256']}.tar"

    def _bytes(self, shard: int) -> int:
        return int(self.shards[shard]["bytes"])

    def _name(self, shard: int) -> str:
        return f"{self.dataset.root.url}/shards/{self.shards[shard]['name']}"


def _open_locked(path: Path, flags: int, operation: int) -> int | None:
    """-> a locked descriptor of the file that bears this name now, or None: it is gone, or another has it."""
    try:
        file = os.open(path, flags | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, operation)
        if os.path.samestat(os.fstat(file), os.stat(path)):  # not renamed or unlinked between the two
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None
