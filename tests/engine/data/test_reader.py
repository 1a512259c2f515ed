"""Reading crops: the right bytes in the right places, or an error with the file and the crop; never
a wrong byte."""

import errno
import gc
import logging
import os
import re
import struct
import subprocess
import sys
import threading
import tracemalloc
import weakref
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import google_crc32c
import numpy as np
import pytest
import zarr
from handmade import flip
from shards_made import Batch, batches, crops_of, make_dataset, read, take_all, tar_path

from omnilead.data_tools.dataset import CROP_BYTES, CROP_SHAPE, Dataset, DatasetError
from omnilead.data_tools.sharding import shards as shard_writers
from omnilead.engine.data import reader as module
from omnilead.engine.data.reader import CropReader, read_ahead
from omnilead.engine.data.staging import Staging
from tests.forks import started
from tests.waiting import HANG_S, until


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("source", ["tar", "zarr"])
def test_reader_equals_dataset_read(dataset, source, threads):
    drawn = np.random.default_rng(3).integers(0, len(dataset), 60)
    rows = [*drawn.tolist(), 5, 6, 7, 5, 0, len(dataset) - 1]
    reader = CropReader([dataset], threads=threads, source=source)
    for _ in range(2):  # checked, then unchecked
        out, report = read(reader, rows)
        assert np.array_equal(out, crops_of(dataset, rows))
        assert report.row.tolist() == rows and report.skipped == ()


@pytest.mark.parametrize("source", ["tar", "zarr", "cache"])
def test_crops_that_arrive_in_parts_are_whole(twin, source, tmp_path, in_parts):
    """Also in the local copy of a remote shard."""
    staging = Staging({0: twin}, tmp_path / "cache", 10**8) if source == "cache" else None
    with closing(CropReader([twin], source=None if staging else source, staging=staging)) as reader:
        out, _ = read(reader, [3, 9, 8])
        if staging:
            staging.close()
            copies = sorted(path.read_bytes() for path in (tmp_path / "cache").glob("*.tar"))
            shards = (tar_path(twin, row)[0].read_bytes() for row in (3, 9))
            assert copies == sorted(shards)
    assert np.array_equal(out, crops_of(twin, [3, 9, 8]))


def test_mixes_datasets_and_formats(dataset, small):
    only_zarr = Dataset(dataset.root, dataset.meta | {"formats": ["zarr"]})
    index, rows = np.array([1, 0, 2, 1, 0, 2, 2]), [19, 3, 8, 0, 40, 9, 100]
    out, _ = read(CropReader([dataset, small, only_zarr]), rows, index)
    for crop, d, row in zip(out, index, rows, strict=True):
        assert np.array_equal(crop, [dataset, small, dataset][d].read(row))


def test_refuses_buffers_rows_and_formats_that_do_not_fit(small):
    reader, one = CropReader([small]), Batch(np.zeros(1, int), np.zeros(1, int))
    for out in (np.empty((2, *CROP_SHAPE), np.int16), np.empty((1, *CROP_SHAPE), np.float32)):
        with pytest.raises(ValueError, match="cannot hold 1 crops"):
            reader.read(one, out)
    for row in (-1, 20):
        with pytest.raises(IndexError):
            read(reader, [row])
    with pytest.raises(DatasetError, match="has tar, not zarr"):
        CropReader([small], source="zarr")


def test_refuses_a_table_of_another_dataset(small, tmp_path):
    other = make_dataset(tmp_path / "other", shards=6)
    with pytest.raises(DatasetError, match=r"24 rows, 20 expected"):
        CropReader([Dataset(other.root, other.meta | {"crops": 20})])
    with pytest.raises(DatasetError, match="the column shard does not match the shards in"):
        CropReader([Dataset(other.root, other.meta | {"shards": small.shards})])
    Path(other.root.url, "samples.parquet").replace(Path(small.root.url, "samples.parquet"))
    with pytest.raises(
        DatasetError, match=r"^[^\n]*/small/samples\.parquet: fails its sha256[^\n]*$"
    ):
        CropReader([Dataset.open(small.root.url)])


# Checks


@pytest.mark.parametrize("source", ["tar", "zarr"])
def test_check_modes(twin, source):
    """A byte is flipped after the first read: `always` detects it. zarr's own crc32c detects it in
    any mode."""
    checks = ("first", "never", "always")
    first, never, always = (CropReader([twin], check=check, source=source) for check in checks)
    for reader in (first, never, always):
        read(reader, [9])
    good, detecting = twin.read(9).copy(), {always, CropReader([twin], source=source)}
    if source == "tar":
        path, offset = tar_path(twin, 9)
        flip(path, offset + 777)
        for reader in (first, never):
            assert np.sum(read(reader, [9])[0] != good) == 1
    else:
        flip(Path(twin.root.url, OBJECT), 120_000 + 50)
        detecting |= {first, never}
    for reader in detecting:
        with pytest.raises(DatasetError, match="crop 9"):
            read(reader, [3, 9])


def test_first_checks_each_crop_once_and_bad_ones_again(small, monkeypatch):
    checked, real = [], google_crc32c.value
    monkeypatch.setattr(google_crc32c, "value", lambda data: checked.append(1) or real(data))
    reader = CropReader([small])
    for rows, due in (([3, 4, 5], 3), ([5, 4, 3], 0), ([5, 6, 11], 2), ([0, 8, 16, 19], 4)):
        checked.clear()
        read(reader, rows)
        assert len(checked) == due
    path, offset = tar_path(small, 7)
    flip(path, offset)
    for _ in range(2):
        with pytest.raises(DatasetError, match="crop 7"):
            read(reader, [6, 7])
    flip(path, offset)
    assert np.array_equal(read(reader, [7])[0][0], small.read(7))


# Damage


def damage_tar(dataset, kind):
    """Damage a file and return what the error must name. Row 9 is the second crop of the third
    shard."""
    path, offset = tar_path(dataset, 9)
    harm = {
        "flipped": lambda: flip(path, offset + CROP_BYTES - 1),
        "truncated": lambda: os.truncate(path, offset + 1000),
        "emptied": lambda: os.truncate(path, 0),
        "missing": path.unlink,
        "swapped": lambda: swap(path, tar_path(dataset, 0)[0]),
        "a folder": lambda: (path.unlink(), path.mkdir()),
    }
    harm[kind]()
    return "^" + re.escape(f"{path}: crop 9 at byte {offset}: ")


def ends_before_row_9(reader, dataset, text):
    yielded = []
    ahead = read_ahead(batches([17, 18], [12, 13, 9, 14], [16]), reader, (4, *CROP_SHAPE))
    with pytest.raises(DatasetError, match=f"{text}[^\n]*restore the file$"):
        take_all(ahead, yielded, dataset)
    assert yielded == [[17, 18]]


def swap(path, other):
    aside = path.with_suffix(".aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


@pytest.mark.parametrize(
    "kind", ["flipped", "truncated", "emptied", "missing", "swapped", "a folder"]
)
def test_damaged_tar_is_named_and_never_returned(small, kind):
    text = damage_tar(small, kind)
    for threads in (1, 2):
        ends_before_row_9(CropReader([small], threads=threads), small, text)


def test_a_short_read_is_detected_without_checksums(small):
    """Otherwise the rest of the crop would be old data from the buffer."""
    damage_tar(small, "truncated")
    short = r"crop 9 at byte \d+: the file is 119000 bytes too short"
    with pytest.raises(DatasetError, match=short):
        read(CropReader([small], check="never"), [8, 9])


OBJECT = "store.zarr/c/2/0/0"
INDEX_BYTES = 4 * 16 + 4


def damage_zarr(dataset, kind):
    path = Path(dataset.root.url, OBJECT)
    index = path.stat().st_size - INDEX_BYTES
    simple = {
        "flipped": lambda: flip(path, 120_000 + 50),
        "flipped index": lambda: flip(path, index + 16),
        "truncated": lambda: os.truncate(path, 150_000),
        "emptied": lambda: os.truncate(path, 0),
        "missing": path.unlink,
        "swapped": lambda: swap(path, path.parents[2] / "1/0/0"),
    }
    simple.get(kind, lambda: rewrite(path, index, kind))()


def rewrite(path, index, kind):
    """Deliberate damage: every crc32c is right, but the data are wrong."""
    data = bytearray(path.read_bytes())
    start, length = struct.unpack_from("<QQ", data, index + 16)
    header = {"raw size": 4, "packed size": 12}
    if kind in header:
        at = start + header[kind]
        struct.pack_into("<I", data, at, struct.unpack_from("<I", data, at)[0] + 8)
    elif kind == "no Blosc":
        data[start + 2] = 0x04  # flags: shuffled bits of nothing that it knows
        data[start + 16 : start + 500] = bytes(484)
    entry = {
        "nowhere": (2**63, length),
        "endless": (start, 2**62),
        "tiny": (start, 3),
        "absent": (2**64 - 1, 2**64 - 1),
    }
    struct.pack_into("<QQ", data, index + 16, *entry.get(kind, (start, length)))
    for low, high in ((start, start + length), (index, len(data))):
        struct.pack_into("<I", data, high - 4, google_crc32c.value(bytes(data[low : high - 4])))
    path.write_bytes(data)


ZARR_DAMAGE = """flipped, flipped index, truncated, emptied, missing, swapped, raw size, packed size,
no Blosc, nowhere, endless, tiny, absent"""


@pytest.mark.parametrize("kind", re.split(r",\s", ZARR_DAMAGE))
def test_damaged_zarr_is_named_and_never_returned(twin, kind):
    """Also without our checksums, by zarr's own."""
    unchecked = CropReader([twin], source="zarr", check="never")
    read(unchecked, [0])
    damage_zarr(twin, kind)
    ends_before_row_9(CropReader([twin], source="zarr"), twin, f"{OBJECT}: crop 9: ")
    if kind != "swapped":
        with pytest.raises(DatasetError, match="crop 9"):
            read(unchecked, [9])


class EveryOther:
    """Random bytes, every other crop of them zeros."""

    def __init__(self, seed):
        self.drawn = 0

    def bytes(self, count):
        self.drawn += 1
        return b"\x01" * count if self.drawn % 2 else bytes(count)


def test_zeros_that_zarr_does_not_write_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writers, "SHARD_CROPS", 4)
    monkeypatch.setattr(np.random, "default_rng", EveryOther)
    quiet = make_dataset(tmp_path / "quiet", shards=2, crops=4, zarr=True)
    out, _ = read(CropReader([quiet], source="zarr"), range(8))
    assert out[::2].any() and not out[1::2].any()
    store = zarr.open_array(f"{quiet.root.url}/store.zarr", mode="r")
    assert np.array_equal(out, store[:])


ZARR_JSON = 'little>big int16>uint16 blosc>zstd "end>"start crc32c>crc32 {>[ 20,>21,'


def test_an_unexpected_zarr_layout_is_refused(twin):
    path = Path(twin.root.url, "store.zarr/zarr.json")
    text = path.read_text()
    for change in ZARR_JSON.split():
        path.write_text(text.replace(*change.split(">")))
        with pytest.raises(DatasetError, match=r"^[^\n]*zarr\.json: [^\n]*$"):
            CropReader([Dataset.open(twin.root.url)], source="zarr")


# Skipping


@pytest.mark.parametrize("source", ["tar", "zarr"])
def test_skip_counts_logs_and_takes_the_next(twin, source, caplog):
    for row, at in ((9, 120_050), (10, 240_050)):
        flip(*(tar_path(twin, row) if source == "tar" else (Path(twin.root.url, OBJECT), at)))
    rows = [3, 9, 10, 11, 9, 19]
    readers = [CropReader([twin], on_corrupt="skip", threads=t, source=source) for t in (1, 2)]
    with caplog.at_level(logging.WARNING):
        out, report = read(readers[0], rows)
        read(readers[0], rows)
    assert report.row.tolist() == [3, 11, 11, 11, 11, 19]
    assert np.array_equal(out, crops_of(twin, report.row))
    assert [bad.row for bad in report.skipped] == [9, 10, 10, 9, 10]
    assert readers[0].skipped == 2 and len(caplog.records) == 2
    assert [read(readers[1], [row])[1].row[0] for row in rows] == report.row.tolist()


def test_skip_wraps_around_and_ends(small):
    damaged = Path(small.root.url, "shards", "00004.tar")
    damaged.unlink()
    out, report = read(CropReader([small], on_corrupt="skip"), [18])
    assert report.row.tolist() == [0] and np.array_equal(out[0], small.read(0))
    for path in damaged.parent.iterdir():
        path.unlink()
    with pytest.raises(DatasetError, match="none of its 20 selected crops"):
        read(CropReader([small], on_corrupt="skip"), [18])


def test_too_many_open_files_is_not_a_corrupt_crop(small, monkeypatch):
    reader = CropReader([small], on_corrupt="skip")

    def no_more(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module.os, "open", no_more)
    with pytest.raises(OSError, match="Too many"):
        read(reader, [3])
    assert reader.skipped == 0


def test_descriptors_and_memory_are_bounded(tmp_path):
    many = make_dataset(tmp_path / "many", shards=1000, crops=1, distinct=7)
    expected, rng = crops_of(many, range(7)), np.random.default_rng(0)
    before, most = len(os.listdir("/proc/self/fd")), 0
    with closing(CropReader([many], threads=2)) as reader:
        for _ in range(30):
            rows = rng.integers(0, 1000, 64)
            assert np.array_equal(read(reader, rows)[0], expected[rows % 7])
            most = max(most, len(os.listdir("/proc/self/fd")) - before)
    assert 100 < most <= module.MAX_DESCRIPTORS
    assert len(os.listdir("/proc/self/fd")) <= before
    process = started(take_no_more_memory, many.root.url, out=tmp_path / "out")
    process.join()
    assert process.exitcode == 0, (tmp_path / "out").read_text()


def take_no_more_memory(url):
    """In a process of its own, where nothing else takes memory."""
    many, rng, taken = Dataset.open(url), np.random.default_rng(0), []
    reader = CropReader([many], threads=2)
    tracemalloc.start()
    for i in range(2_000):
        read(reader, rng.integers(0, 1000, 2))
        if i in (1000, 1999):
            gc.collect()
            taken.append(tracemalloc.get_traced_memory()[0])
    assert taken[1] - taken[0] < 50_000, taken


# Reading ahead


class Idle(SimpleQueue):
    """Says whether the prefetching thread waits for a buffer."""

    waits = False

    def get(self):
        if threading.current_thread().name != "prefetch":
            return super().get()
        Idle.waits = self.empty()
        buffer = super().get()
        Idle.waits = False
        return buffer


class Noted:
    """An iterator of requests that counts how many were taken."""

    def __init__(self, requests, fail_at=-1):
        self.requests, self.asked, self.fail_at = requests, 0, fail_at

    def __iter__(self):
        for i, request in enumerate(self.requests):
            if i == self.fail_at:
                raise RuntimeError("no more requests")
            self.asked += 1
            yield request


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("depth, in_use", [(0, 1), (2, 1), (2, 3)])
def test_read_ahead_order_depth_and_buffers(small, depth, in_use, monkeypatch):
    monkeypatch.setattr(module, "SimpleQueue", Idle)
    rows = [[i % 20, (3 * i) % 20, (7 * i) % 20] for i in range(12)] + [[4]]
    noted, buffers, seen = Noted(batches(*rows)), set(), []
    ahead = read_ahead(noted, CropReader([small]), (3, *CROP_SHAPE), depth, in_use)
    for i, (request, crops, report) in enumerate(ahead):
        assert request.row.tolist() == rows[i] == report.row.tolist()
        # until every other buffer is filled: this one must not change meanwhile
        if i < 2:
            expected = depth + max(in_use, i + 1)
            until(lambda expected=expected: noted.asked >= expected and Idle.waits)
            assert noted.asked == expected
        assert crops.shape == (len(rows[i]), *CROP_SHAPE)
        seen.append((rows[i], crops))
        for those, still in seen[-in_use:]:
            assert np.array_equal(still, crops_of(small, those))
        buffers.add(crops.ctypes.data)
    assert i == len(rows) - 1 and len(buffers) <= depth + in_use and not threads()


def test_closing_early_stops_the_thread_and_reads_no_more(small, monkeypatch):
    """The second batch is being read when the generator is closed."""
    reader, noted, closed = CropReader([small]), Noted(batches(*([[1, 2]] * 10))), threading.Event()
    real = reader.read

    def gated(*batch):
        assert noted.asked == 1 or closed.wait()
        return real(*batch)

    monkeypatch.setattr(reader, "read", gated)
    ahead = read_ahead(noted, reader, (2, *CROP_SHAPE), depth=6)
    next(ahead)
    (thread,) = threads()
    join = thread.join
    monkeypatch.setattr(thread, "join", lambda timeout: closed.set() or join())
    ahead.close()
    assert noted.asked <= 3 and not threads()
    ahead = read_ahead(Noted(batches(*([[1, 2]] * 10))), CropReader([small]), (2, *CROP_SHAPE))
    next(ahead)
    del ahead
    gc.collect()
    assert not threads()


def test_errors_are_raised_in_turn_and_free_the_buffers(small, monkeypatch):
    for noted, error in (
        (Noted(batches([1], [2], [3]), fail_at=2), RuntimeError),
        (Noted(batches([1], [2], [99], [3])), IndexError),
        (Noted(batches([1], [2], [3, 4, 5], [3])), ValueError),
    ):
        ahead = read_ahead(noted, CropReader([small]), (2, *CROP_SHAPE), depth=3)
        assert [next(ahead)[0].row[0] for _ in range(2)] == [1, 2]
        with pytest.raises(error):
            next(ahead)
        assert not threads() and list(ahead) == []
    reader, made = CropReader([small]), []
    real = reader.buffers
    monkeypatch.setattr(
        reader, "buffers", lambda *how: made.extend(map(weakref.ref, out := real(*how))) or out
    )
    gc.disable()  # nothing but reference counts
    try:
        ahead = read_ahead(batches([1], [99]), reader, (2, *CROP_SHAPE))
        with pytest.raises(IndexError):
            list(ahead)
        del ahead
        assert len(made) == 3 and all(buffer() is None for buffer in made)
    finally:
        gc.enable()


PROGRAM = """
import os, sys, threading
from contextlib import contextmanager
import numpy as np
from omnilead.data_tools.dataset import Dataset
from omnilead.engine.data.reader import CropReader, read_ahead
from omnilead.engine.data.staging import Staging
class Request: dataset, row = np.zeros(2, int), np.array([1, 2])
class Stuck:
    datasets, entered = {0: None}, threading.Event()
    @contextmanager
    def hold_shards(self, shards):
        self.entered.set()
        threading.Event().wait()
        yield {}
class NoImport:
    def find_spec(name, *_):
        if threading.current_thread() is not threading.main_thread():
            os._exit(3)
stuck = sys.argv[2] == "stuck"
reader = CropReader([Dataset.open(sys.argv[1])], pin=stuck, staging=Stuck() if stuck else None)
sys.meta_path.insert(0, NoImport)
ahead = read_ahead([Request] * 50, reader, (2, 12, 5000))
if stuck:
    threading.Thread(target=next, args=(ahead,), daemon=True).start()
    Stuck.entered.wait()
else:
    next(ahead)
"""


def test_the_interpreter_exits_while_batches_are_prefetched(small):
    """It must not crash (a daemon thread in C++ code would cause it) nor hang (a thread that
    imports a module would)."""
    command = [sys.executable, "-c", PROGRAM, small.root.url]
    where = Path(module.__file__).parents[2]
    both = [
        subprocess.Popen([*command, shards], cwd=where, stderr=subprocess.PIPE, text=True)
        for shards in ("stuck", "there")
    ]
    assert [(one.communicate(timeout=HANG_S)[1], one.returncode) for one in both] == [("", 0)] * 2


def test_an_interpreter_that_exits_before_the_thread_starts_reads_nothing(monkeypatch):
    """The generator runs in a thread of its own, and the main thread ends."""
    exits = SimpleNamespace(register=lambda stop: stop(), unregister=lambda stop: None)
    monkeypatch.setattr(module, "atexit", exits)
    assert list(module.fill_ahead([1], lambda *_: "made", ["a buffer"])) == []
    assert not threads()
