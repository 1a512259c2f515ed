"""Crops by offset, straight out of the shards into a buffer that is used again and again.

A batch is two arrays, dataset and row. Its reads are sorted by shard and offset for the disk's sake, shared out among
threads, and each is one os.preadv of 120,000 bytes into the crop's own place in the batch: nothing is copied, nothing is
pickled, and memory does not grow with the dataset beyond its addresses (16 bytes a crop) and a bit for each checked crop.

Or each thread reads every crop to its own Desk, where something is made of it while it is in that core's cache.

A crop's crc32c is checked at its first reading in this process (`check`), before anybody sees its bytes: 5 us a crop in
hardware, which keep the GIL, where preadv gives it up. google_crc32c takes a numpy array without a copy, though it refuses the
writable memoryview of the same bytes.

The zarr twin is read and decoded chunk by chunk (data_tools/zarr_reader.py): half the bytes, five times the CPU time.
"""

import errno
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import google_crc32c
import numpy as np

from data_tools.dataset import CROP_BYTES, CROP_SHAPE, ChunkError, Dataset, DatasetError
from engine.data.meter import StageTimer
from engine.data.order import DatasetRows
from engine.data.staging import NoRoom, StagingError

MAX_DESCRIPTORS = 256
SMALLEST_SHARE = 8  # crops: below it, waking a thread costs more than its reads
UNCHECKED = -1
ROOM_TRIES, ROOM_WAIT_S = 6, 10.0  # for shards that together need room which others hold
MACHINE_IS_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # says nothing about the file
Hold = Callable[[int], AbstractContextManager[str]]  # shard -> local path, which stays there meanwhile: Staging.hold

log = logging.getLogger(__name__)


class Bad(NamedTuple):
    """A crop that cannot be used, at one place of its batch."""

    position: int
    dataset: int
    row: int
    reason: str


class Read(NamedTuple):
    dataset: int
    shard: int
    offset: int  # in zarr: among the chunks of its storage object
    position: int
    row: int
    crc: int  # or UNCHECKED


@dataclass(frozen=True)
class Report:
    row: np.ndarray  # the rows that are in the batch: those asked for, save for the skipped
    skipped: tuple[Bad, ...]  # each crop left out
    failed: Bad | None = None  # the first that was not to be left out

    def part(self, these: slice) -> "Report":
        """Of one batch of several that were read together. An error is raised when its batch's turn comes."""
        if self.failed and these.start <= self.failed.position < these.stop:
            raise DatasetError(self.failed.reason)
        mine = (bad for bad in self.skipped if these.start <= bad.position < these.stop)
        return Report(self.row[these], tuple(bad._replace(position=bad.position - these.start) for bad in mine))


class Desk(NamedTuple):
    """Of one reading thread."""

    place: Callable[[int], np.ndarray]  # position in the batch -> int16 [12, 5000], where that crop is read to
    done: Callable[[int, int], Any]  # position, row: the crop is there, and is right


Desks = Callable[[], Desk]


class _File:
    """A descriptor that is closed when its last user lets go, so that eviction cannot pull it from under a reading thread
    (whose number might by then mean another file)."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class _Source:
    """What CropReader keeps of one dataset."""

    def __init__(self, dataset: Dataset, source: str | None, hold: Hold | None) -> None:
        formats = dataset.meta["formats"]
        self.source = source or ("tar" if "tar" in formats else "zarr")
        if self.source not in formats:
            raise DatasetError(f"{dataset.root.url} holds {' and '.join(formats)}, not {self.source}")
        if dataset.root.remote and self.source == "tar" and hold is None:
            raise DatasetError(f"{dataset.root.url} is far away: its shards are read through a cache (Staging)")
        self.dataset, self.url, self.crops = dataset, dataset.root.url, len(dataset)
        self.hold = hold if self.source == "tar" else None
        self.names = [f"shards/{shard['name']}" for shard in dataset.shards]
        self.shard, self.offset, self.crc = dataset.addresses
        if not self.crops:
            raise DatasetError(f"{self.url}: it has no crops")
        if self.source == "tar" and not (self.shard.min() >= 0 and self.shard.max() < len(self.names)):
            raise DatasetError(f"{self.url}: samples.parquet names shards that dataset.json does not")
        self.checked = np.zeros(-(-self.crops // 8), np.uint8)
        self.chunks = dataset.chunks if self.source == "zarr" else None

    def addresses(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """shard and offset, or storage object and place in it."""
        if self.chunks:
            return np.divmod(rows, self.chunks.block)
        return self.shard[rows], self.offset[rows]

    def where(self, read: "Read") -> str:
        if self.chunks:
            return f"{self.url}/{self.chunks.name(read.shard)}: crop {read.row}"
        return f"{self.url}/{self.names[read.shard]}: crop {read.row} at byte {read.offset}"

    def is_checked(self, rows: np.ndarray) -> np.ndarray:
        seen: np.ndarray = self.checked[rows >> 3] >> (rows & 7) & 1 == 1
        return seen

    def check_off(self, rows: np.ndarray) -> None:
        np.bitwise_or.at(self.checked, rows >> 3, (1 << (rows & 7)).astype(np.uint8))


class CropReader:
    """`read` is called from one thread at a time."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        check: Literal["first", "always", "never"] = "first",
        on_corrupt: Literal["stop", "skip"] = "stop",
        threads: int = 2,
        pin: bool = False,
        source: Literal["tar", "zarr"] | None = None,
        staged: Mapping[int, Hold] | None = None,
        rows: Sequence[DatasetRows] | None = None,
        meter: StageTimer | None = None,
    ) -> None:
        """`source`: which twin to read, tar if it is there. `staged`: for datasets (by index) that are far away. `rows`: which
        crops of each dataset may come in the place of a bad one; None: any."""
        self.meter = meter or StageTimer()
        self.check, self.on_corrupt, self.threads, self.pin = check, on_corrupt, threads, pin
        self._sources = [_Source(dataset, source, (staged or {}).get(i)) for i, dataset in enumerate(datasets)]
        self._file = lru_cache(MAX_DESCRIPTORS - threads)(_File)  # each thread may hold one that was just evicted
        self._pool = ThreadPoolExecutor(max(1, threads - 1), "gather")  # the caller reads a share too
        self._rows = rows or [DatasetRows.among(dataset.root.url, [len(dataset)]) for dataset in datasets]
        self._met: set[tuple[int, int]] = set()

    @property
    def skipped(self) -> int:
        """Crops found bad in this process, each counted once."""
        return len(self._met)

    def close(self) -> None:
        self._pool.shutdown()
        self._file.cache_clear()

    def read(self, dataset_index: np.ndarray, row: np.ndarray, out: np.ndarray | Desks, late: bool = False) -> Report:
        """Crops [n] -> out, int16 [n, 12, 5000] in microvolts, or the desks that it makes. Raises before a wrong byte is handed
        out: what is in `out` after an error is not to be used. `late`: a bad crop's error is left to Report.part."""
        index, rows = np.asarray(dataset_index, np.int64), np.array(row, np.int64)
        if isinstance(out, np.ndarray):
            if out.shape != (len(rows), *CROP_SHAPE) or out.dtype != np.int16 or not out.flags.c_contiguous:
                raise ValueError(f"{out.dtype} {list(out.shape)} cannot hold {len(rows)} crops of int16 {list(CROP_SHAPE)}")
            out = partial(Desk, out.__getitem__, lambda position, row: None)
        with self.meter.timed("read"):
            bad = sorted(self._fill(index, rows, out))
            if bad and self.on_corrupt == "stop":
                if late:
                    return Report(rows, (), bad[0])
                raise DatasetError(bad[0].reason)
            skipped = [skip for one in bad for skip in self._substitute(one, rows, out)]
        return Report(rows, tuple(skipped))

    def _substitute(self, bad: Bad, rows: np.ndarray, out: Desks) -> Iterator[Bad]:
        """The next row that takes part and reads well comes instead: the same one on every rank and after every restart."""
        p, d, those = bad.position, bad.dataset, self._rows[bad.dataset]
        for step in count(1):
            if (d, bad.row) not in self._met:
                self._met.add((d, bad.row))
                log.warning("skipped: %s", bad.reason)
            yield bad
            if step == len(those):
                raise DatasetError(f"{self._sources[d].url}: not one of its {len(those)} crops that take part reads well")
            rows[p] = those.after(int(rows[p]))
            again = self._fill(np.array([d]), rows[p : p + 1], out, p)
            if not again:
                return
            bad = again[0]

    def _fill(self, index: np.ndarray, rows: np.ndarray, out: Desks, at: int = 0) -> list[Bad]:
        """To the places from `at`."""
        reads: list[Read] = []
        for d in np.unique(index).tolist():
            source, positions = self._sources[d], np.flatnonzero(index == d)
            mine = rows[positions]
            if mine.min() < 0 or mine.max() >= source.crops:
                raise IndexError(f"{source.url}: rows {mine.min()} to {mine.max()} of {source.crops}")
            due = np.full(len(mine), self.check == "always") if self.check != "first" else ~source.is_checked(mine)
            crc = np.where(due, source.crc[mine].astype(np.int64), UNCHECKED)
            shard, offset = source.addresses(mine)
            by = np.lexsort((offset, shard))
            columns = [column[by].tolist() for column in (shard, offset, positions + at, mine, crc)]
            reads += map(Read, [d] * len(mine), *columns)
        bad = self._read_all(reads, out)
        wrong = np.zeros(len(rows), bool)
        wrong[[one.position - at for one in bad]] = True
        for d, source in enumerate(self._sources):
            if self.check != "never":
                source.check_off(rows[(index == d) & ~wrong])
        return bad

    def _read_all(self, reads: list[Read], out: Desks, again: bool = True) -> list[Bad]:
        """What is wrong in a cache alone is fetched again, once."""
        with self._held(dict.fromkeys((read.dataset, read.shard) for read in reads)) as paths:
            size = max(-(-len(reads) // self.threads), SMALLEST_SHARE)
            shares = [reads[at : at + size] for at in range(0, len(reads), size)] or [[]]
            others = [self._pool.submit(self._read_share, share, out, paths) for share in shares[1:]]
            try:
                bad = self._read_share(shares[0], out, paths)
            finally:
                wait(others)  # or they would write into a buffer that its owner has back
            bad += [one for other in others for one in other.result()]
            wrong = {one.position for one in bad}
            redo = {read.position: read for read in reads if read.position in wrong and isinstance(paths.get(read[:2]), str)}
            if not (again and redo):
                return bad
            for path in {str(paths[read[:2]]) for read in redo.values()}:
                log.warning("%s: this file of the cache is damaged, and fetched again", path)
                Path(path).unlink(missing_ok=True)
        return [one for one in bad if one.position not in redo] + self._read_all(list(redo.values()), out, again=False)

    @contextmanager
    def _held(self, shards: Iterable[tuple[int, int]]) -> Iterator[dict[tuple[int, int], str | DatasetError]]:
        """Paths of those that are far away. The caller waits for them, no thread of the pool does. If ranks that share a cache
        wait for each other's room, it lets go of all and asks again."""
        for left in reversed(range(ROOM_TRIES)):
            with ExitStack() as held:
                try:
                    paths = {(d, shard): _enter(held, hold(shard)) for d, shard in shards if (hold := self._sources[d].hold)}
                except NoRoom:
                    if not left:
                        raise
                else:
                    yield paths
                    return
            time.sleep(random.random() * ROOM_WAIT_S)

    def _read_share(self, reads: list[Read], out: Desks, paths: Mapping[tuple[int, int], Any]) -> list[Bad]:
        bad: list[Bad] = []
        place, done = out()
        opened: tuple[int, int] | None = None
        file: _File | None = None
        value = google_crc32c.value
        for read in reads:
            d, shard, offset, position, row, crc = read
            crop, source = place(position), self._sources[d]
            try:
                if source.chunks:
                    if not source.chunks.read(row, crop):  # zeros for what is not there: they are checked in any case
                        crc = int(source.crc[row])
                else:
                    if opened != (d, shard) or file is None:
                        file, opened = None, (d, shard)
                        file = self._open(d, shard, paths)
                    got = _read_crop(file.fd, crop, offset)
                    if got < CROP_BYTES:
                        bad.append(self._bad(read, f"the file ends {CROP_BYTES - got} bytes too early", paths))
                        continue
                if crc != UNCHECKED and value(crop) != crc:
                    bad.append(self._bad(read, "it fails its crc32c", paths))
                else:
                    done(position, row)
            except ChunkError as error:
                bad.append(self._bad(read, str(error), paths))
            except FileNotFoundError:
                bad.append(self._bad(read, "no such file", paths))
            except OSError as error:
                if error.errno in MACHINE_IS_FULL:
                    raise
                bad.append(self._bad(read, str(error.strerror), paths))
            except DatasetError as error:
                bad.append(Bad(position, d, row, f"{error} (crop {row} at byte {offset})"))
        return bad

    def _open(self, d: int, shard: int, paths: Mapping[tuple[int, int], Any]) -> _File:
        path = paths.get((d, shard))
        if path is None:
            return self._file(f"{self._sources[d].url}/{self._sources[d].names[shard]}")
        if isinstance(path, DatasetError):
            raise path
        return _File(path)  # not kept: an open descriptor would hold the disk space of an evicted shard

    def _bad(self, read: Read, what: str, paths: Mapping[tuple[int, int], Any]) -> Bad:
        where = self._sources[read.dataset].where(read)
        if isinstance(path := paths.get(read[:2]), str):
            where = f"{path}, fetched twice: {where}"
        return Bad(read.position, read.dataset, read.row, f"{where}: {what}: restore the file")


def _enter(held: ExitStack, shard: AbstractContextManager[str]) -> str | DatasetError:
    try:
        return held.enter_context(shard)
    except StagingError:
        raise
    except DatasetError as error:
        return error


def _read_crop(fd: int, crop: Any, offset: int) -> int:
    """-> how many of its bytes were there."""
    got = os.preadv(fd, [crop], offset)
    while 0 < got < CROP_BYTES:  # the end of the file, or a network file system that gives what it has
        more = os.preadv(fd, [crop.reshape(-1).view(np.uint8)[got:]], offset + got)
        if not more:
            break
        got += more
    return got
