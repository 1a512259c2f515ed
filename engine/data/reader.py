"""Reads crops by offset from the shards into reused buffers, verifies them, and prefetches batches in
a thread.

A request names the dataset and the row of each crop (engine.data.order.Places). Reads are sorted by
shard and offset and split among threads. From tar, a crop is read by os.preadv straight to its place
in the batch, 120,000 bytes without a copy. The reader keeps 17 bytes for each crop of a dataset.
Instead of filling a batch, a thread can read a few crops at a time into memory of its own, and hand
them to a CropSink while they are in its core's cache.

With check="first", a crop's crc32c is verified when this process first reads it, in 5 us. The zarr
copy is decoded chunk by chunk (data_tools/dataset/zarr_reader.py): half the bytes, five times the CPU time.

    reader = CropReader([dataset])
    report = reader.read(places, out)                            # int16 [n, 12, 5000]
    for request, crops, report in read_ahead(requests, reader, (256, *CROP_SHAPE)): ...
"""

import atexit
import ctypes
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import google_crc32c
import numpy as np
import torch

from omnilead.data_tools.dataset import CROP_BYTES, CROP_SHAPE, ChunkError, Dataset, DatasetError
from omnilead.data_tools.io.storage import read_into

from .order import DatasetRows, Places
from .staging import Key, Staging

MAX_DESCRIPTORS = 256
# least number of crops per thread: waking a thread for fewer costs more than reading them
LEAST_READS_PER_THREAD = 8
SKIP_CHECKSUM = -1
# these errors do not mean that a file is bad: the machine has no descriptors or memory left
RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

log = logging.getLogger(__name__)


def use_one_thread() -> None:
    """Keeps torch from starting OpenMP threads for the operations of the calling thread, since
    they would take cores from the training step."""
    # makes torch initialise its number of threads in this thread now. Otherwise it would do so at
    # its first operation, and reset the number that is set for OpenMP below
    torch.get_num_threads()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).omp_set_num_threads(1)


class BadCrop(NamedTuple):
    """An unreadable crop, with its position in the batch."""

    position: int
    dataset: int
    row: int
    reason: str


class _CropRead(NamedTuple):
    dataset: int
    shard: int
    offset: int  # in bytes; in zarr, the index among the chunks of the storage object
    position: int
    row: int
    crc: int  # the checksum to verify, or SKIP_CHECKSUM


@dataclass(frozen=True)
class ReadReport:
    # the row of each crop in the batch: the requested one, except where a bad crop was replaced
    row: np.ndarray
    skipped: tuple[BadCrop, ...]  # bad crops that were replaced
    failed: BadCrop | None = None  # with on_corrupt=stop, the first bad crop if there is one

    def report_of_batch(self, crops: slice) -> "ReadReport":
        """Returns the report on one of several batches that were read together. Raises
        DatasetError if the bad crop in `failed` belongs to that batch."""
        if self.failed and crops.start <= self.failed.position < crops.stop:
            raise DatasetError(self.failed.reason)
        inside = [
            bad_crop for bad_crop in self.skipped if crops.start <= bad_crop.position < crops.stop
        ]
        skipped = (
            bad_crop._replace(position=bad_crop.position - crops.start) for bad_crop in inside
        )
        return ReadReport(self.row[crops], tuple(skipped))


class CropSink(Protocol):
    """Takes crops as they are read, in place of an array for the whole batch. All threads write
    to it at the same time."""

    crops_per_write: int

    def write(self, crops_BLT: torch.Tensor, positions: list[int], rows: list[int]) -> None:
        """Takes the first len(positions) crops of a buffer, which were all read without error.
        `positions` and `rows`: their positions in the batch, and their rows in their datasets. The
        replacement of a bad crop comes in a call of its own, with another row than the requested
        one."""


class _File:
    """A file descriptor that is closed after its last use, so that eviction from the cache cannot
    close it during a read."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class _DatasetBeingRead:
    """A dataset as CropReader reads it: in which format, where each crop is, and which crops
    have been verified."""

    def __init__(self, dataset: Dataset, source: str | None, staged: bool) -> None:
        self.url = dataset.root.url
        formats = dataset.facts.formats
        source = source or ("tar" if "tar" in formats else "zarr")
        if source not in formats:
            raise DatasetError(
                f"{self.url}: has {' and '.join(formats)}, not {source}: change pipeline.source"
            )
        if dataset.root.remote and source == "tar" and not staged:
            raise DatasetError(
                f"{self.url} is remote: its shards are read through a cache: set pipeline.cache_dir"
            )
        if not len(dataset):
            raise DatasetError(f"{self.url}: the dataset has no crops")
        self.staged = staged and source == "tar"
        self.names = [f"shards/{shard.name}" for shard in dataset.shards]
        self.shard, self.offset, self.crc = dataset.addresses
        self.checked = np.zeros(len(dataset), bool)
        self.chunks = dataset.chunks if source == "zarr" else None

    def shards_and_offsets(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (shard, offset) for each row; in a zarr copy, (storage object, index of the
        chunk in that object)."""
        if self.chunks:
            return np.divmod(rows, self.chunks.block)
        return self.shard[rows], self.offset[rows]

    def describe_read(self, read: _CropRead) -> str:
        if self.chunks:
            return f"{self.url}/{self.chunks.object_name(read.shard)}: crop {read.row}"
        return f"{self.url}/{self.names[read.shard]}: crop {read.row} at byte {read.offset}"


# for each remote shard of a batch, its local copy or why it is unusable
Paths = dict[Key, str | DatasetError]


class CropReader:
    """Reads and verifies crops. Call `read` from one thread at a time."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        check: Literal["first", "always", "never"] = "first",
        on_corrupt: Literal["stop", "skip"] = "stop",
        threads: int = 2,
        pin: bool = False,
        source: Literal["tar", "zarr"] | None = None,
        staging: Staging | None = None,
        rows: Sequence[DatasetRows] | None = None,
    ) -> None:
        """`source`: the format to read; None: tar if the dataset has it, else zarr. `staging`:
        the local cache of remote datasets. `rows`: for each dataset, the crops that may replace
        a bad one; None: any crop."""
        self.check, self.on_corrupt, self.staging = check, on_corrupt, staging
        self.threads, self.pin = threads, pin and torch.cuda.is_available()
        staged = staging.datasets if staging else {}
        self._sources = [
            _DatasetBeingRead(dataset, source, d in staged) for d, dataset in enumerate(datasets)
        ]
        # keeps fewer files than the limit, as each thread may still hold one that was evicted
        self._file = lru_cache(MAX_DESCRIPTORS - threads)(_File)
        # has one thread less than `threads`, as the calling thread reads too
        self._pool = ThreadPoolExecutor(max(1, threads - 1), "reader", use_one_thread)
        self._rows = rows or [
            DatasetRows.from_sizes(dataset.root.url, [len(dataset)]) for dataset in datasets
        ]
        self._bad: set[tuple[int, int]] = set()

    @property
    def skipped(self) -> int:
        """Returns the number of bad crops that this process has skipped, each counted once."""
        return len(self._bad)

    def close(self) -> None:
        self._pool.shutdown()
        self._file.cache_clear()

    def buffers(self, count: int, crops: int) -> list[np.ndarray]:
        """Returns `count` buffers for `crops` crops each, in pinned memory with `pin` if there
        is a GPU."""
        buffers = []
        for _ in range(count):
            buffer = torch.empty((crops, *CROP_SHAPE), dtype=torch.int16, pin_memory=self.pin)
            buffers.append(buffer.numpy())
        return buffers

    def read(self, places: Places, output: np.ndarray) -> ReadReport:
        """Reads the crops at `places` into `output`, int16 [n, 12, 5000] in microvolts. Raises
        DatasetError at a bad crop that may not be skipped; `output` is then invalid."""
        count = len(places.row)
        if output.dtype != np.int16 or output.shape != (count, *CROP_SHAPE):
            raise ValueError(
                f"an array of {output.dtype} {list(output.shape)} cannot hold {count} crops of int16 "
                f"{list(CROP_SHAPE)}"
            )
        return self.read_to(places, output).report_of_batch(slice(0, count))

    def read_to(self, places: Places, output: np.ndarray | CropSink) -> ReadReport:
        """Reads crops into an array or a CropSink. A bad crop that may not be skipped raises no
        error here, but in the report's method `report_of_batch`."""
        index, rows = np.asarray(places.dataset, np.int64), np.array(places.row, np.int64)
        bad_crops = sorted(self._read(index, rows, output))
        if bad_crops and self.on_corrupt == "stop":
            return ReadReport(rows, (), bad_crops[0])
        skipped: list[BadCrop] = []
        for bad_crop in bad_crops:
            skipped += self._substitute(bad_crop, rows, output)
        return ReadReport(rows, tuple(skipped))

    def _substitute(
        self, bad_crop: BadCrop, rows: np.ndarray, output: np.ndarray | CropSink
    ) -> list[BadCrop]:
        """Replaces a bad crop by the next good selected row, which is the same on every rank and
        after every restart. Returns all bad crops that were skipped, the given one first."""
        p, d, allowed = bad_crop.position, bad_crop.dataset, self._rows[bad_crop.dataset]
        skipped: list[BadCrop] = []
        while True:
            if (d, bad_crop.row) not in self._bad:
                self._bad.add((d, bad_crop.row))
                log.warning("skipped: %s", bad_crop.reason)
            skipped.append(bad_crop)
            if len(skipped) == len(allowed):
                raise DatasetError(
                    f"{self._sources[d].url}: none of its {len(allowed)} selected crops can be read"
                )
            rows[p] = allowed.next_selected_row(int(rows[p]))
            still_bad = self._read(np.array([d]), rows[p : p + 1], output, p)
            if not still_bad:
                return skipped
            bad_crop = still_bad[0]

    def _read(
        self, index: np.ndarray, rows: np.ndarray, output: np.ndarray | CropSink, first: int = 0
    ) -> list[BadCrop]:
        """Reads these rows into consecutive positions of `output`, from `first` on. Returns the
        bad crops."""
        reads: list[_CropRead] = []
        for d in np.unique(index).tolist():
            reads += self._in_file_order(d, np.flatnonzero(index == d), rows, first)
        bad_crops = self._read_all(reads, output)
        if self.check != "never":
            is_good = np.ones(len(rows), bool)
            is_good[[bad_crop.position - first for bad_crop in bad_crops]] = False
            for d, source in enumerate(self._sources):
                source.checked[rows[(index == d) & is_good]] = True
        return bad_crops

    def _in_file_order(
        self, d: int, positions: np.ndarray, rows: np.ndarray, first: int
    ) -> Iterator[_CropRead]:
        """Returns the reads of one dataset, sorted by shard and offset."""
        source, rows = self._sources[d], rows[positions]
        if rows.min() < 0 or rows.max() >= len(source.checked):
            raise IndexError(
                f"{source.url}: rows {rows.min()} to {rows.max()} are not all in the dataset, which has "
                f"{len(source.checked)} crops"
            )
        crc = source.crc[rows].astype(np.int64)
        if self.check == "never":
            crc[:] = SKIP_CHECKSUM
        elif self.check == "first":
            crc[source.checked[rows]] = SKIP_CHECKSUM
        shard, offset = source.shards_and_offsets(rows)
        order = np.lexsort((offset, shard))
        columns = (np.full(len(rows), d), shard, offset, positions + first, rows, crc)
        return map(_CropRead, *(column[order].tolist() for column in columns))

    def _read_all(
        self, reads: list[_CropRead], output: np.ndarray | CropSink, retry: bool = True
    ) -> list[BadCrop]:
        """Divides the reads among the threads and returns the bad crops. Damaged files in the
        cache are downloaded again, once."""
        shards = dict.fromkeys(read[:2] for read in reads if self._sources[read.dataset].staged)
        if not (self.staging and shards):
            return self._read_in_threads(reads, output, {})
        with self.staging.hold_shards(shards) as paths:
            bad_crops = self._read_in_threads(reads, output, paths)
            positions = {bad_crop.position for bad_crop in bad_crops if retry}
            failed = [read for read in reads if read.position in positions]
            retried = [read for read in failed if isinstance(paths.get(read[:2]), str)]
            for path in sorted({str(paths[read[:2]]) for read in retried}):
                log.warning("%s: the cached file is damaged: downloading it again", path)
                Path(path).unlink(missing_ok=True)
        if not retried:
            return bad_crops
        redone = {read.position for read in retried}
        lost = [bad_crop for bad_crop in bad_crops if bad_crop.position not in redone]
        return lost + self._read_all(retried, output, retry=False)

    def _read_in_threads(
        self, reads: list[_CropRead], output: np.ndarray | CropSink, paths: Paths
    ) -> list[BadCrop]:
        size = max(-(-len(reads) // self.threads), LEAST_READS_PER_THREAD)
        futures = []
        for start in range(size, len(reads), size):
            share = reads[start : start + size]
            futures.append(self._pool.submit(self._read_share, share, output, paths))
        try:
            bad_crops = self._read_share(reads[:size], output, paths)
        finally:
            wait(futures)  # otherwise threads could still write to a buffer after it was returned
        for future in futures:
            bad_crops += future.result()
        return bad_crops

    def _read_share(
        self, reads: list[_CropRead], output: np.ndarray | CropSink, paths: Paths
    ) -> list[BadCrop]:
        """Reads one thread's share of the crops, and returns the bad ones."""
        files = _CurrentShard(self._file, self._sources, paths)
        if isinstance(output, np.ndarray):
            results = [self._read_crop(read, output[read.position], files) for read in reads]
            return [bad_crop for bad_crop in results if bad_crop]
        bad_crops: list[BadCrop] = []
        crops_BLT = torch.empty((output.crops_per_write, *CROP_SHAPE), dtype=torch.int16)
        buffers = list(crops_BLT.numpy())
        positions: list[int] = []
        rows: list[int] = []
        for read in reads:
            if bad_crop := self._read_crop(read, buffers[len(positions)], files):
                bad_crops.append(bad_crop)
                continue
            positions.append(read.position)
            rows.append(read.row)
            if len(positions) == len(buffers):
                output.write(crops_BLT, positions, rows)
                positions, rows = [], []
        if positions:
            output.write(crops_BLT, positions, rows)
        return bad_crops

    def _read_crop(
        self, read: _CropRead, crop: np.ndarray, files: "_CurrentShard"
    ) -> BadCrop | None:
        source, problem = self._sources[read.dataset], ""
        try:
            if source.chunks:
                source.chunks.read(read.row, crop)
            else:
                missing = CROP_BYTES - read_into(files.descriptor(read), crop, read.offset)
                if missing:
                    problem = f"the file is {missing} bytes too short"
            if not problem and read.crc != SKIP_CHECKSUM and google_crc32c.value(crop) != read.crc:
                problem = "it fails its crc32c"
        except DatasetError as error:  # the whole shard could not be fetched
            reason = f"{error} (crop {read.row} at byte {read.offset})"
            return BadCrop(read.position, read.dataset, read.row, reason)
        except ChunkError as error:
            problem = str(error)
        except OSError as error:
            if error.errno in RESOURCE_ERRORS:
                raise
            problem = error.strerror or str(error)
        if not problem:
            return None
        path = files.paths.get(read[:2])
        where = f"{path}, downloaded twice: " * bool(path) + source.describe_read(read)
        reason = f"{where}: {problem}: restore the file"
        return BadCrop(read.position, read.dataset, read.row, reason)


class _CurrentShard:
    """Keeps the shard open that a thread is reading. As the thread's crops are sorted by shard,
    it opens each shard once."""

    def __init__(
        self, open_file: Callable[[str], _File], sources: Sequence[_DatasetBeingRead], paths: Paths
    ) -> None:
        self.open_file, self.sources, self.paths = open_file, sources, paths
        self.key: Key | None = None
        self.file: _File | None = None

    def descriptor(self, read: _CropRead) -> int:
        if self.file is None or self.key != read[:2]:
            self.file, self.key = self._open(read), read[:2]
        return self.file.fd

    def _open(self, read: _CropRead) -> _File:
        path = self.paths.get(read[:2])
        if path is None:
            source = self.sources[read.dataset]
            return self.open_file(f"{source.url}/{source.names[read.shard]}")
        if isinstance(path, DatasetError):
            raise path
        # not by open_file, which keeps descriptors open: an evicted shard would stay on the disk
        return _File(path)


Request = TypeVar("Request")
Buffer = TypeVar("Buffer")
Result = TypeVar("Result")


def fill_ahead(
    requests: Iterable[Request],
    make: Callable[[Request, Buffer], Result],
    buffers: Sequence[Buffer],
    in_use: int = 1,
) -> Generator[Result, None, None]:
    """Runs make(request, buffer) in a thread, and yields the results in the order of the
    requests. The last `in_use` results stay valid; asking for the next one lets the thread reuse
    the oldest buffer. If `make` fails for a request, its error is raised in place of the result."""
    free: SimpleQueue[Buffer | None] = SimpleQueue()
    ready: SimpleQueue[tuple[Buffer, Result] | BaseException | None] = SimpleQueue()
    for buffer in buffers:
        free.put(buffer)
    thread = threading.Thread(
        target=_make_all, args=(iter(requests), make, free, ready), name="prefetch", daemon=True
    )

    def stop() -> None:
        with suppress(Empty):
            while True:
                free.get_nowait()
        free.put(None)
        if thread.is_alive():  # a thread that starts later finds None in `free`, and stops
            # 2 s are longer than a disk read takes. A thread that waits for the network is
            # abandoned
            thread.join(timeout=2)

    # Stops the thread at interpreter exit: a daemon thread that is then inside numpy's C++ code
    # aborts the process with SIGABRT (in 3 exits of 10).
    atexit.register(stop)
    used: deque[Buffer] = deque()
    try:
        thread.start()
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            used.append(item[0])
            yield item[1]
            if len(used) == in_use:
                free.put(used.popleft())
    finally:
        # drops the last result: an error keeps this frame alive, and the frame would keep the
        # buffer
        item = None
        atexit.unregister(stop)
        stop()


def _make_all(
    requests: Iterator[Request],
    make: Callable[[Request, Any], Any],
    free: "SimpleQueue[Any]",
    ready: "SimpleQueue[Any]",
) -> None:
    use_one_thread()
    try:
        while (buffer := free.get()) is not None:
            request = next(requests, None)
            if request is None:
                break
            ready.put((buffer, make(request, buffer)))
    except BaseException as error:
        ready.put(error)
    else:
        ready.put(None)


def read_ahead(
    requests: Iterable[Places],
    reader: CropReader,
    shape: tuple[int, ...],
    depth: int = 2,
    in_use: int = 1,
) -> Generator[tuple[Places, np.ndarray, ReadReport], None, None]:
    """Yields (request, its crops, report) for each request, and reads at most `depth` requests
    ahead of those in use. A request has at most shape[0] crops."""

    def fill(request: Places, buffer: np.ndarray) -> tuple[Places, np.ndarray, ReadReport]:
        crops = buffer[: len(request.row)]
        return request, crops, reader.read(request, crops)

    return fill_ahead(requests, fill, reader.buffers(depth + in_use, shape[0]), in_use)
