"""A bounded local cache of remote shards, which are downloaded before they are needed and verified
before they are used.

    order of shards -> [4 threads: root.read_range, 8 MiB a part -> sha256 + SHA.partial -> rename]
    -> SHA.tar -> hold_shards, paths

The shards that the order needs next are downloaded while earlier ones are read. The least recently
used shard is evicted first, but never one in use. Files are named by checksum, so datasets and the
ranks of a node can share one directory, on a local disk. Locks are flocks, released by the system
when a process ends or is killed: the downloading process locks SHA.partial, which has its full size
from the start; readers lock SHA.tar (shared); a process that makes room locks `lock`.
"""

import atexit
import fcntl
import hashlib
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice, takewhile
from pathlib import Path

from omnilead.data_tools.dataset import DataError, Dataset, DatasetError
from omnilead.data_tools.io.storage import write_at

PART_BYTES = 8 * 2**20
DOWNLOADS = 4  # concurrent downloads; each takes memory for one part only
POLL_S = 0.05  # seconds between looks at what other processes have done
# while other processes hold the space: number of tries, and longest pause between two in seconds
TRIES, WAIT_S = 6, 10.0
MORE_SPACE = "raise pipeline.cache_bytes, or lower pipeline.block_shards"
CACHED_NAME = re.compile(r"[0-9a-f]{64}\.(?:tar|partial)", re.ASCII)
Key = tuple[int, int]  # dataset, shard


class StagingError(DataError):
    """Raised for a problem with network, disk or space rather than a damaged dataset. It stops
    the run, as skipping crops would not help."""


class NoRoom(StagingError):
    """Raised if other processes hold all the space. They may be waiting for space that this
    process holds."""


class Staging:
    def __init__(
        self,
        datasets: Mapping[int, Dataset],
        cache_dir: str | os.PathLike[str],
        max_bytes: int,
        order: Iterable[Key] = (),
        together: int = 1,
        ahead: int = 4,
        timeout_s: float = 60,
    ) -> None:
        """`order`: the shards in the order of use. `together`: how many consecutive shards of
        each dataset are in use at a time. `ahead`: how many shards to prefetch. `timeout_s`: how
        long to wait for space that other processes hold."""
        self.datasets, self.cache = datasets, Path(cache_dir)
        self.max_bytes, self.timeout_s = max_bytes, timeout_s
        self._shards = {}
        for d, dataset in datasets.items():
            for s, shard in enumerate(dataset.shards):
                self._shards[d, s] = shard
        self._order = iter(order)
        # for each dataset, the shards in use: the last `together` that the run has reached in the
        # order
        self._current = {d: deque[Key](maxlen=together) for d in datasets}
        self._coming = list(islice(self._order, ahead))
        self._tried: set[Key] = set()  # shards that have been downloaded, or are being downloaded
        self._failed: dict[Key, DatasetError] = {}
        self._verified: set[Key] = set()
        self._closing, self._changed = False, threading.Condition()
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            with self._cache_lock():
                self._make_room(None, 0, True)  # evicts shards if an earlier run had a larger limit
        except OSError as error:
            raise StagingError(
                f"pipeline.cache_dir={self.cache}: {error.strerror}: choose another directory"
            ) from None
        atexit.register(self.close)
        # daemon threads, so that a program can exit without waiting for the network
        for _ in range(DOWNLOADS):
            threading.Thread(target=self._prefetch, name="staging", daemon=True).start()

    @contextmanager
    def hold_shards(self, keys: Iterable[Key]) -> Iterator[dict[Key, str | DatasetError]]:
        """Yields, for each shard, the path of its verified local copy, or the error that makes
        it unusable. No process evicts these shards before the end of the block. If processes
        wait for each other's space, this one releases all its shards and tries again."""
        keys = list(keys)
        need = sum(map(self._shard_bytes, keys))
        if need > self.max_bytes:
            raise StagingError(
                f"{self.cache}: its limit of {self.max_bytes} bytes cannot hold the shards of one batch "
                f"({need} bytes): {MORE_SPACE}"
            )
        for left in reversed(range(TRIES)):
            with ExitStack() as locks:
                try:
                    paths = {key: self._lock_shard(key, locks) for key in keys}
                except NoRoom:
                    if not left:
                        raise
                else:
                    yield paths
                    return
            time.sleep(random.random() * WAIT_S)

    def close(self) -> None:
        """Stops the downloads at their next part; calls that wait for a shard raise an error.
        The files stay for the next run."""
        atexit.unregister(self.close)
        self._closing = True
        self._notify()

    def _lock_shard(self, key: Key, locks: ExitStack) -> str | DatasetError:
        with self._changed:
            if key in self._coming and key not in self._current[key[0]]:
                reached = self._coming.index(key) + 1
                for coming_key in self._coming[:reached]:
                    self._current[coming_key[0]].append(coming_key)
                new_keys = list(islice(self._order, reached))
                self._coming = self._coming[reached:] + new_keys
                # shards that come again may have been evicted
                self._tried.difference_update(new_keys)
                self._failed = {
                    failed_key: error
                    for failed_key, error in self._failed.items()
                    if failed_key not in new_keys
                }
            locks.callback(self._notify)
            self._changed.notify_all()
        try:
            if key not in self._failed:
                lock = self._fetch(key, needed=True)
                assert lock is not None
                locks.callback(os.close, lock)
        except DatasetError as error:
            self._failed[key] = error
        return self._failed.get(key) or str(self._local_path(key))

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _prefetch(self) -> None:
        while not self._closing:
            with self._changed:
                waiting = [*chain(*self._current.values()), *self._coming]
                key = next(
                    (
                        waiting_key
                        for waiting_key in waiting
                        if waiting_key not in self._tried and waiting_key not in self._failed
                    ),
                    None,
                )
                if key is None:
                    self._changed.wait()
                    continue
                self._tried.add(key)
            # ignored here: the call that needs the shard will get the same error
            with suppress(DataError):
                if (lock := self._fetch(key, needed=False)) is not None:
                    os.close(lock)
                    continue
                with self._changed:  # no space yet
                    self._changed.wait(1)
                    self._tried.discard(key)

    def _fetch(self, key: Key, needed: bool) -> int | None:
        """Returns a descriptor with a shared lock on the verified file; None if there is not yet
        space to prefetch it."""
        end = time.monotonic() + self.timeout_s
        try:
            while not self._closing:
                lock = _open_locked(self._local_path(key), os.O_RDONLY, fcntl.LOCK_SH)
                if lock is not None and self._is_intact(key, lock):
                    with suppress(PermissionError):  # the file may belong to another user
                        # makes it the most recently used file, which is evicted last
                        os.utime(lock)
                    return lock
                partial, room = self._claim_download(key, needed)
                if partial is not None:
                    self._download(key, partial)
                elif not room and not needed:
                    return None
                elif not room and time.monotonic() > end:
                    raise NoRoom(
                        f"{self.cache}: no space for {self._file_name(key)}: other processes hold all "
                        f"of it: {MORE_SPACE}"
                    )
                else:  # another process downloads the shard, or holds the space
                    with self._changed:
                        self._changed.wait(POLL_S)
        except OSError as error:  # usually a full disk
            why = error.strerror or str(error)
            raise StagingError(
                f"{self.cache}: {why}, when storing {self._file_name(key)}: free space, or set pipeline.cache_dir"
            ) from None
        raise StagingError(
            f"{self._file_name(key)}: the cache was closed before this shard was in it"
        )

    def _is_intact(self, key: Key, lock: int) -> bool:
        """Returns True if the cached file is intact; deletes it otherwise. A file that an
        earlier run has left is verified before its first use."""
        if key not in self._verified:
            with open(os.dup(lock), "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != self._shards[key].sha256:
                    self._local_path(key).unlink(missing_ok=True)
                    os.close(lock)
                    return False
            self._verified.add(key)
        return True

    def _claim_download(self, key: Key, needed: bool) -> tuple[int | None, bool]:
        """Returns (descriptor of the locked partial file, True if there is space). The
        descriptor is None if there is no space, or if another process has the shard or downloads
        it."""
        partial = self._local_path(key).with_suffix(".partial")
        with self._cache_lock():
            dead = _open_locked(partial, os.O_RDWR, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if dead is not None:  # a killed process has left the partial file
                partial.unlink()
                os.close(dead)
            if partial.exists() or self._local_path(key).exists():
                return None, True
            if not self._make_room(key, self._shard_bytes(key), needed):
                return None, False
            lock = _open_locked(partial, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is not None:
                os.ftruncate(lock, self._shard_bytes(key))
            return lock, True

    def _download(self, key: Key, lock: int) -> None:
        """Downloads to the locked partial file, and renames it if its checksum is right. Tries
        twice."""
        partial, size = self._local_path(key).with_suffix(".partial"), self._shard_bytes(key)
        name, root = f"shards/{self._shards[key].name}", self.datasets[key[0]].root
        try:
            for _ in range(2):
                sha256 = hashlib.sha256()
                for start in range(0, size, PART_BYTES):
                    part_bytes = min(PART_BYTES, size - start)
                    part = root.read_range(name, start, part_bytes)
                    if self._closing:
                        return
                    missing = part_bytes - len(part)
                    if missing:  # the transfer was cut, or the file is too short
                        break
                    sha256.update(part)
                    write_at(lock, part, start)
                if not missing and sha256.hexdigest() == self._shards[key].sha256:
                    os.fsync(lock)
                    # under the lock, as a listing in another process could otherwise see neither
                    # name, or both
                    with self._cache_lock():
                        os.rename(partial, self._local_path(key))
                    self._verified.add(key)
                    return
            fault = (
                f"byte {start}: {missing} bytes are missing"
                if missing
                else "its bytes fail their sha256"
            )
            raise DatasetError(
                f"{self._file_name(key)}: {fault}, twice (in two downloads): restore the file"
            )
        except FileNotFoundError:
            raise DatasetError(f"{self._file_name(key)}: no such file: restore it") from None
        finally:
            partial.unlink(missing_ok=True)
            os.close(lock)

    def _make_room(self, key: Key | None, need: int, needed: bool) -> bool:
        """Makes room for `need` bytes, and returns True if there is enough. Evicts unlocked
        files, the least recently used first. `needed`: the shard is needed at once; if
        that is not enough, also evicts shards that the order needs now or next, beginning with the
        one that it needs last."""
        files = []
        for entry in os.scandir(self.cache):
            if CACHED_NAME.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    files.append((entry.stat().st_mtime_ns, entry.stat().st_size, Path(entry.path)))
        bytes_used = need + sum(size for _, size, _ in files)
        present = {path.stem for _, _, path in files}
        with self._changed:
            order = [*chain(*self._current.values()), *self._coming]
        rank = {
            self._local_path(ordered_key): i
            for i, ordered_key in reversed(list(enumerate(order, 1)))
        }
        if not needed:
            # the run has meanwhile passed this shard, which need no longer be prefetched
            if key not in order:
                return False
            # shards that come before this one in the order still need space of their own
            earlier = set(takewhile(lambda ordered_key: ordered_key != key, order))
            bytes_used += sum(
                self._shard_bytes(earlier_key)
                for earlier_key in earlier
                if self._local_path(earlier_key).stem not in present
            )
            files = [file for file in files if file[2] not in rank]
        for _, size, path in sorted(
            files, key=lambda file: (file[2] in rank, -rank.get(file[2], 0), file[0])
        ):
            if bytes_used <= self.max_bytes:
                break
            lock = _open_locked(path, os.O_RDONLY, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is not None:
                path.unlink()
                os.close(lock)
                bytes_used -= size
        return bytes_used <= self.max_bytes

    @contextmanager
    def _cache_lock(self) -> Iterator[None]:
        """Holds a lock that all threads and processes share: only one at a time counts, evicts,
        claims or renames files."""
        with open(self.cache / "lock", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _local_path(self, key: Key) -> Path:
        return self.cache / f"{self._shards[key].sha256}.tar"

    def _shard_bytes(self, key: Key) -> int:
        return self._shards[key].bytes

    def _file_name(self, key: Key) -> str:
        return f"{self.datasets[key[0]].root.url}/shards/{self._shards[key].name}"


def _open_locked(path: Path, flags: int, operation: int) -> int | None:
    """Returns a locked descriptor of the file that now has this name; None if the file is gone
    or another process has locked it."""
    try:
        file = os.open(path, flags | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, operation)
        if os.path.samestat(
            os.fstat(file), os.stat(path)
        ):  # the file was not renamed or unlinked between open and flock
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None
