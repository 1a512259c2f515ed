"""Crops by offset: the right bytes in the right places, or an error that says which are wrong, and never anything else."""

import errno
import gc
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_tools import store
from data_tools.dataset import COLUMNS, CROP_BYTES, CROP_SHAPE, Dataset, DatasetError, fingerprint
from data_tools.shards import TarWriter
from data_tools.storage import folder
from engine.pipelines import gather as module
from engine.pipelines.gather import Filled, Gather, Report, read_ahead


def make_dataset(
    root: Path, shards: int, crops: int = 4, seed: int = 0, zarr: bool = False, distinct: int | None = None
) -> Dataset:
    """Shards of white noise. With `distinct` the later shards are hard links of the first ones."""
    rng, rows, entries = np.random.default_rng(seed), [], []
    (root / "shards").mkdir(parents=True)
    for s in range(shards):
        name, same = f"{s:05d}.tar", s % (distinct or shards)
        if same != s:
            os.link(root / "shards" / f"{same:05d}.tar", root / "shards" / name)
            entries.append(entries[same] | {"name": name})
            rows += [row | {"shard": s} for row in rows[same * crops : (same + 1) * crops]]
            continue
        with open(root / "shards" / name, "wb") as file:
            tar = TarWriter(file)
            for c in range(crops):
                data = rng.bytes(CROP_BYTES)
                rows.append({"shard": s, "offset": tar.add(f"{s}-{c}", data, b"{}"), "crc32c": google_crc32c.value(data)})
            tar.close()
        entries.append({"name": name, "crops": crops, "bytes": tar.size, "sha256": tar.sha256.hexdigest()})
    table = pa.table({n: pa.array([r[n] for r in rows], COLUMNS.field(n).type) for n in ("shard", "offset", "crc32c")})
    pq.write_table(table, root / "samples.parquet")
    if zarr:
        store.write(table, entries, folder(root), 1, None, True)
    meta = {"format_version": 1, "crops": len(rows), "formats": ["tar", "zarr"] if zarr else ["tar"], "shards": entries}
    samples = (root / "samples.parquet").read_bytes()
    meta["samples"] = {"bytes": len(samples), "sha256": hashlib.sha256(samples).hexdigest()}
    folder(root).write("dataset.json", json.dumps(meta | {"fingerprint": fingerprint(meta)}).encode())
    return Dataset.open(str(root))


@dataclass
class Batch:
    dataset: np.ndarray
    row: np.ndarray


def batches(*rows: list[int]) -> list[Batch]:
    return [Batch(np.zeros(len(r), np.int16), np.array(r)) for r in rows]


def read(gather: Gather, rows: list[int]) -> tuple[np.ndarray, Report]:
    out = np.full((len(rows), *CROP_SHAPE), 7, np.int16)
    return out, gather.read(np.zeros(len(rows), np.int16), np.array(rows), out)


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def tar_path(dataset: Dataset, row: int) -> tuple[Path, int]:
    shard, offset, _ = dataset.addresses
    return Path(dataset.root.url, "shards", dataset.shards[shard[row]]["name"]), int(offset[row])


@pytest.fixture
def small(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "small", shards=5, crops=4)


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Tar and zarr, four crops in each file."""
    monkeypatch.setattr(store, "SHARD_CROPS", 4)
    return make_dataset(tmp_path / "twin", shards=5, crops=4, zarr=True)


# Equality


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("source, count", [("tar", 150), ("zarr", 150)])
def test_gives_what_the_dataset_gives(dataset: Dataset, source: str, count: int, threads: int) -> None:
    rng = np.random.default_rng(3)
    gather = Gather([dataset], threads=threads, source=source)
    rows = np.concatenate([rng.integers(0, len(dataset), count), [5, 6, 7, 5, 0, len(dataset) - 1]]).tolist()
    for _ in range(2):  # checked, then unchecked
        out, report = read(gather, rows)
        assert all(np.array_equal(crop, dataset.read(row)) for crop, row in zip(out, rows, strict=True))
        assert report.row.tolist() == rows and report.skipped == ()


def test_mixes_datasets_and_formats(dataset: Dataset, small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(small.meta, "formats", ["tar"])
    only_zarr = Dataset(dataset.root, dataset.meta | {"formats": ["zarr"]})
    gather = Gather([dataset, small, only_zarr])
    index, rows = np.array([1, 0, 2, 1, 0, 2, 2]), np.array([19, 3, 8, 0, 40, 9, 100])
    out = np.empty((7, *CROP_SHAPE), np.int16)
    gather.read(index, rows, out)
    for crop, d, row in zip(out, index, rows, strict=True):
        assert np.array_equal(crop, [dataset, small, dataset][d].read(row))


def test_refuses_buffers_and_rows_that_do_not_fit(small: Dataset) -> None:
    gather = Gather([small])
    one = np.zeros(1, np.int16)
    for out in (
        np.empty((2, *CROP_SHAPE), np.int16),
        np.empty((1, *CROP_SHAPE), np.float32),
        np.empty((1, 24, 5000), np.int16)[:, ::2],
    ):
        with pytest.raises(ValueError, match="cannot hold 1 crops"):
            gather.read(one, one, out)
    for row in (-1, 20):
        with pytest.raises(IndexError):
            read(gather, [row])


def test_refuses_a_source_that_is_not_there(small: Dataset) -> None:
    with pytest.raises(DatasetError, match="holds tar, not zarr"):
        Gather([small], source="zarr")


def test_refuses_a_table_of_another_dataset(small: Dataset, tmp_path: Path) -> None:
    other = make_dataset(tmp_path / "other", shards=6)
    with pytest.raises(DatasetError, match=r"24 rows, dataset\.json says 20"):
        Gather([Dataset(other.root, other.meta | {"crops": 20})])
    with pytest.raises(DatasetError, match="names shards that"):
        Gather([Dataset(other.root, other.meta | {"shards": small.shards})])
    Path(other.root.url, "samples.parquet").replace(Path(small.root.url, "samples.parquet"))
    with pytest.raises(DatasetError, match=r"^[^\n]*/small/samples\.parquet: fails its sha256[^\n]*$"):
        Gather([Dataset.open(small.root.url)])


# Checks


@pytest.mark.parametrize("source", ["tar", "zarr"])
def test_check_modes(twin: Dataset, source: str) -> None:
    """A byte flipped after the first reading: `always` sees it. zarr's own crc32c sees it in any mode."""
    gathers = {check: Gather([twin], check=check, source=source) for check in ("first", "always", "never")}
    for gather in gathers.values():
        read(gather, [9])
    good = twin.read(9).copy()
    if source == "tar":
        path, offset = tar_path(twin, 9)
        flip(path, offset + 777)
        assert np.sum(read(gathers["first"], [9])[0] != good) == 1
        assert np.sum(read(gathers["never"], [9])[0] != good) == 1
    else:
        flip(Path(twin.root.url, "store.zarr/c/2/0/0"), 120_000 + 50)
    for check in ("always",) if source == "tar" else gathers:
        with pytest.raises(DatasetError, match="crop 9"):
            read(gathers[check], [9])
    with pytest.raises(DatasetError, match="crop 9"):
        read(Gather([twin], source=source), [3, 9])  # another process: its first reading


def test_first_checks_each_crop_once(small: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    real = google_crc32c.value
    monkeypatch.setattr(google_crc32c, "value", lambda data: checked.append(1) or real(data))
    gather = Gather([small])
    for rows, due in (([3, 4, 5], 3), ([5, 4, 3], 0), ([5, 6, 11], 2), ([0, 8, 16, 19], 4), ([0, 8, 16, 19], 0)):
        checked.clear()
        read(gather, rows)
        assert len(checked) == due


def test_a_crop_that_failed_is_checked_again(small: Dataset) -> None:
    path, offset = tar_path(small, 7)
    flip(path, offset)
    gather = Gather([small])
    for _ in range(2):
        with pytest.raises(DatasetError, match="crop 7"):
            read(gather, [6, 7])
    flip(path, offset)
    assert np.array_equal(read(gather, [7])[0][0], small.read(7))


# Damage


def damage_tar(dataset: Dataset, kind: str) -> tuple[str, int]:
    """-> what the error must say, and the bad row. Row 9 is the second crop of the third shard."""
    path, offset = tar_path(dataset, 9)
    if kind == "flipped":
        flip(path, offset + CROP_BYTES - 1)
    elif kind == "truncated":
        os.truncate(path, offset + 1000)
    elif kind == "emptied":
        os.truncate(path, 0)
    elif kind == "missing":
        path.unlink()
    elif kind == "swapped":
        other, aside = tar_path(dataset, 0)[0], path.with_suffix(".aside")
        path.rename(aside), other.rename(path), aside.rename(other)
    elif kind == "a folder":
        path.unlink()
        path.mkdir()
    return re.escape(f"{path}: crop 9 at byte {offset}: "), 9


def take_all(ahead: Iterable[Filled[Batch]], yielded: list[list[int]], dataset: Dataset) -> None:
    for request, crops, _ in ahead:
        yielded.append(request.row.tolist())
        assert all(np.array_equal(crop, dataset.read(row)) for crop, row in zip(crops, request.row, strict=True))


TAR_DAMAGE = ["flipped", "truncated", "emptied", "missing", "swapped", "a folder"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", TAR_DAMAGE)
def test_damaged_tar_is_named_and_not_handed_out(small: Dataset, kind: str, threads: int) -> None:
    text, row = damage_tar(small, kind)
    yielded = []
    ahead = read_ahead(batches([17, 18], [12, 13, row, 14], [16]), Gather([small], threads=threads), (4, *CROP_SHAPE))
    with pytest.raises(DatasetError, match=f"^{text}[^\n]*restore the file$"):
        take_all(ahead, yielded, small)
    assert yielded == [[17, 18]]


def test_a_short_read_is_noticed_unchecked(small: Dataset) -> None:
    """Or the rest of the crop would be what was in the buffer before."""
    damage_tar(small, "truncated")
    with pytest.raises(DatasetError, match=r"crop 9 at byte \d+: the file ends 119000 bytes too early"):
        read(Gather([small], check="never"), [8, 9])


OBJECT = "store.zarr/c/2/0/0"
INDEX_BYTES = 4 * 16 + 4


def damage_zarr(dataset: Dataset, kind: str) -> None:
    path = Path(dataset.root.url, OBJECT)
    index = path.stat().st_size - INDEX_BYTES
    if kind == "flipped":
        flip(path, 120_000 + 50)
    elif kind == "flipped index":
        flip(path, index + 16)
    elif kind == "truncated":
        os.truncate(path, 150_000)
    elif kind == "emptied":
        os.truncate(path, 0)
    elif kind == "missing":
        path.unlink()
    elif kind == "swapped":
        other, aside = path.parents[2] / "1/0/0", path.with_suffix(".aside")
        path.rename(aside), other.rename(path), aside.rename(other)
    else:
        rewrite(path, index, kind)


def rewrite(path: Path, index: int, kind: str) -> None:
    """What no accident does: every crc32c holds, and something is wrong all the same."""
    data = bytearray(path.read_bytes())
    start, length = (int.from_bytes(data[index + at : index + at + 8], "little") for at in (16, 24))
    header = {"raw size": 4, "packed size": 12}
    if kind in header:
        at = start + header[kind]
        data[at : at + 4] = (int.from_bytes(data[at : at + 4], "little") + 8).to_bytes(4, "little")
    elif kind == "no Blosc":
        data[start + 2] = 0x04  # flags: shuffled bits of nothing that it knows
        data[start + 16 : start + 500] = bytes(484)
    entry = {"nowhere": (2**63, length), "endless": (start, 2**62), "tiny": (start, 3), "absent": (2**64 - 1, 2**64 - 1)}
    if kind in entry:
        data[index + 16 : index + 32] = b"".join(value.to_bytes(8, "little") for value in entry[kind])
    for low, high in ((start, start + length), (index, len(data))):
        data[high - 4 : high] = google_crc32c.value(bytes(data[low : high - 4])).to_bytes(4, "little")
    path.write_bytes(data)


ZARR_DAMAGE = ["flipped", "flipped index", "truncated", "emptied", "missing", "swapped"]
ZARR_DAMAGE += ["raw size", "packed size", "no Blosc", "nowhere", "endless", "tiny", "absent"]


@pytest.mark.parametrize("kind", ZARR_DAMAGE)
def test_damaged_zarr_is_named_and_not_handed_out(twin: Dataset, kind: str) -> None:
    damage_zarr(twin, kind)
    yielded = []
    ahead = read_ahead(batches([17, 18], [12, 13, 9, 14], [16]), Gather([twin], source="zarr"), (4, *CROP_SHAPE))
    with pytest.raises(DatasetError, match=rf"{OBJECT}: crop 9: [^\n]*restore the file$"):
        take_all(ahead, yielded, twin)
    assert yielded == [[17, 18]]


@pytest.mark.parametrize("kind", [kind for kind in ZARR_DAMAGE if kind != "swapped"])
def test_damaged_zarr_is_noticed_unchecked(twin: Dataset, kind: str) -> None:
    """By its own checks; and what is absent is zeros for zarr, so `never` would train on silence."""
    gather = Gather([twin], source="zarr", check="never")
    read(gather, [0])
    damage_zarr(twin, kind)
    with pytest.raises(DatasetError, match="crop 9"):
        read(gather, [9])


def test_zeros_that_zarr_does_not_write_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SHARD_CROPS", 4)
    monkeypatch.setattr(np.random, "default_rng", lambda seed: Halved(seed))
    quiet = make_dataset(tmp_path / "quiet", shards=2, crops=4, zarr=True)
    out, _ = read(Gather([quiet], source="zarr"), [0, 1, 6, 7])
    assert out[::2].any() and not out[1::2].any()
    assert all(np.array_equal(crop, quiet.store[row]) for crop, row in zip(out, [0, 1, 6, 7], strict=True))


class Halved:
    """Every other crop is zeros."""

    def __init__(self, seed: int) -> None:
        self.drawn = 0

    def bytes(self, count: int) -> bytes:
        self.drawn += 1
        return b"\x01" * count if self.drawn % 2 else bytes(count)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"little"', '"big"', "endian"),
        ('"int16"', '"uint16"', "data_type is 'uint16'"),
        ('"blosc"', '"zstd"', "name is 'zstd' and not 'blosc'"),
        ('"end"', '"start"', "index_location"),
        ('"crc32c"', '"crc32"', "crc32c"),
        ("{", "[", "JSON"),
        ("20,", "21,", "shape is 21 and not 20"),
    ],
)
def test_another_layout_of_zarr_is_refused(twin: Dataset, old: str, new: str, told: str) -> None:
    path = Path(twin.root.url, "store.zarr/zarr.json")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DatasetError, match=rf"zarr\.json: [^\n]*{told}"):
        Gather([twin], source="zarr")


# Skipping


@pytest.mark.parametrize("source", ["tar", "zarr"])
def test_skip_counts_logs_and_takes_the_next(twin: Dataset, source: str, caplog: pytest.LogCaptureFixture) -> None:
    for row in (9, 10):
        flip(tar_path(twin, row)[0], tar_path(twin, row)[1]) if source == "tar" else None
    if source == "zarr":
        flip(Path(twin.root.url, "store.zarr/c/2/0/0"), 120_000 + 50)
        flip(Path(twin.root.url, "store.zarr/c/2/0/0"), 240_000 + 50)
    rows = [3, 9, 10, 11, 9, 19]
    gathers = [Gather([twin], on_corrupt="skip", threads=t, source=source) for t in (1, 2)]
    with caplog.at_level(logging.WARNING):
        out, report = read(gathers[0], rows)
        read(gathers[0], rows)
    assert report.row.tolist() == [3, 11, 11, 11, 11, 19]
    assert all(np.array_equal(crop, twin.read(row)) for crop, row in zip(out, report.row, strict=True))
    assert [(d, row) for d, row, _ in report.skipped] == [(0, 9), (0, 10), (0, 10), (0, 9), (0, 10)]
    assert gathers[0].skipped == 2 and len(caplog.records) == 2
    one_by_one = [read(gathers[1], [row])[1].row[0] for row in rows]
    assert one_by_one == report.row.tolist()


def test_skip_goes_round_and_ends(small: Dataset) -> None:
    damaged = Path(small.root.url, "shards", "00004.tar")
    damaged.unlink()
    gather = Gather([small], on_corrupt="skip")
    out, report = read(gather, [18])
    assert report.row.tolist() == [0] and np.array_equal(out[0], small.read(0))
    for path in damaged.parent.iterdir():
        path.unlink()
    with pytest.raises(DatasetError, match="not one of its 20 crops"):
        read(Gather([small], on_corrupt="skip"), [18])


def test_a_full_machine_is_no_reason_to_skip(small: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = Gather([small], on_corrupt="skip")

    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module.os, "open", no_more)
    with pytest.raises(OSError, match="Too many"):
        read(gather, [3])
    assert gather.skipped == 0


# Bounds


def test_descriptors_and_memory_are_bounded(tmp_path: Path) -> None:
    many = make_dataset(tmp_path / "many", shards=2000, crops=1, distinct=7)
    expected = [many.read(row) for row in range(7)]
    gather, rng = Gather([many], threads=2), np.random.default_rng(0)
    before, most = len(os.listdir("/proc/self/fd")), 0
    out = np.zeros((64, *CROP_SHAPE), np.int16)
    for _ in range(60):
        rows = rng.integers(0, 2000, 64)
        gather.read(np.zeros(64, np.int16), rows, out)
        most = max(most, len(os.listdir("/proc/self/fd")) - before)
        assert all(np.array_equal(crop, expected[row % 7]) for crop, row in zip(out[::9], rows[::9], strict=True))
    assert 100 < most <= module.MAX_DESCRIPTORS
    size = []
    for i in range(10_000):
        gather.read(np.zeros(2, np.int16), rng.integers(0, 2000, 2), out[:2])
        if i in (1000, 9999):
            gc.collect()
            size.append(psutil.Process().memory_info().rss)
    assert size[1] - size[0] < 4 * 2**20
    gather.close()
    assert len(os.listdir("/proc/self/fd")) <= before


# Reading ahead


class Noted:
    """Requests that say how far they were asked for."""

    def __init__(self, requests: list[Batch], fail_at: int = -1) -> None:
        self.requests, self.asked, self.fail_at = requests, 0, fail_at

    def __iter__(self) -> Iterator[Batch]:
        for i, request in enumerate(self.requests):
            if i == self.fail_at:
                raise RuntimeError("no more requests")
            self.asked += 1
            yield request


def settle(noted: Noted) -> int:
    """How far the thread goes when nobody takes anything."""
    last = -1
    while last != noted.asked:
        last = noted.asked
        time.sleep(0.1)
    return last


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


@pytest.mark.parametrize("depth, in_use", [(0, 1), (1, 1), (2, 1), (4, 1), (2, 3)])
def test_read_ahead_order_depth_and_buffers(small: Dataset, depth: int, in_use: int) -> None:
    rows = [[i % 20, (3 * i) % 20, (7 * i) % 20] for i in range(12)] + [[4]]
    noted, buffers, seen = Noted(batches(*rows)), set(), []
    ahead = read_ahead(noted, Gather([small]), (3, *CROP_SHAPE), depth, in_use)
    for i, (request, crops, report) in enumerate(ahead):
        assert request.row.tolist() == rows[i] == report.row.tolist()
        if i < 3:  # long enough for every other buffer to be filled: this one must not change meanwhile
            assert settle(noted) == depth + max(in_use, i + 1)
        assert crops.shape == (len(rows[i]), *CROP_SHAPE)
        seen.append((rows[i], crops))
        for those, still in seen[-in_use:]:
            assert all(np.array_equal(crop, small.read(row)) for crop, row in zip(still, those, strict=True))
        buffers.add(crops.ctypes.data)
    assert i == len(rows) - 1 and len(buffers) <= depth + in_use
    assert not readers()


def test_read_ahead_closed_early_stops_at_once(small: Dataset) -> None:
    noted = Noted(batches(*([[1, 2]] * 1000)))
    ahead = read_ahead(noted, Gather([small]), (2, *CROP_SHAPE), depth=2)
    next(ahead)
    assert len(readers()) == 1
    start = time.monotonic()
    ahead.close()
    assert time.monotonic() - start < 1 and not readers() and noted.asked <= 4
    ahead = read_ahead(noted, Gather([small]), (2, *CROP_SHAPE))
    next(ahead)
    del ahead
    gc.collect()
    assert not readers()


def test_read_ahead_closed_early_leaves_the_rest_unread(small: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    gather, noted = Gather([small]), Noted(batches(*([[1, 2]] * 10)))
    real = gather.read
    monkeypatch.setattr(gather, "read", lambda *batch: time.sleep(0.2) or real(*batch))
    ahead = read_ahead(noted, gather, (2, *CROP_SHAPE), depth=6)
    next(ahead)
    ahead.close()
    assert noted.asked <= 3 and not readers()


def test_read_ahead_raises_in_turn(small: Dataset) -> None:
    for noted, error in (
        (Noted(batches([1], [2], [3]), fail_at=2), RuntimeError),
        (Noted(batches([1], [2], [99], [3])), IndexError),
        (Noted(batches([1], [2], [3, 4, 5], [3])), ValueError),
    ):
        ahead = read_ahead(noted, Gather([small]), (2, *CROP_SHAPE), depth=3)
        assert [next(ahead).request.row[0] for _ in range(2)] == [1, 2]
        with pytest.raises(error):
            next(ahead)
        assert not readers() and list(ahead) == []


def test_read_ahead_gives_its_buffers_back_after_an_error(small: Dataset) -> None:
    gc.collect()
    gc.disable()  # nothing but reference counts
    try:
        size = psutil.Process().memory_info().rss
        gather, full = Gather([small]), list(range(20)) * 3
        for _ in range(20):
            with pytest.raises(IndexError):
                list(read_ahead(batches(full, [99]), gather, (64, *CROP_SHAPE), depth=0))
        assert psutil.Process().memory_info().rss - size < 60 * 2**20
    finally:
        gc.enable()


PROGRAM = """
import threading
from contextlib import contextmanager
import numpy as np
from data_tools.dataset import Dataset
from engine.pipelines.gather import Gather, read_ahead
class B: dataset, row = np.zeros(2, int), np.array([1, 2])
@contextmanager
def never(shard):
    threading.Event().wait()
    yield ""
d = Dataset.open({url!r})
ahead = read_ahead([B] * 50, Gather([d], staged={staged}), (2, 12, 5000))
{last}
"""


@pytest.mark.parametrize(
    "staged, last",
    [*[("None", "next(ahead)")] * 4, ("{0: never}", "threading.Thread(target=next, args=(ahead,), daemon=True).start()")],
)
def test_a_program_ends_though_its_batches_were_forgotten(small: Dataset, staged: str, last: str) -> None:
    """Nor does it crash, which it would do now and then if a daemon thread were in C++ by then."""
    program, root = PROGRAM.format(url=small.root.url, staged=staged, last=last), Path(module.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, timeout=30, check=False).returncode == 0
