"""Crops by offset: the right bytes in the right places, or an error that says which are wrong, and never anything else."""

import errno
import gc
import logging
import os
from pathlib import Path

import google_crc32c
import numpy as np
import psutil
import pytest
from shards_made import flip, make_dataset, read, tar_path

from data_tools.dataset import CROP_SHAPE, Dataset, DatasetError
from engine.data import reader as module
from engine.data.reader import Bad, CropReader, Report

# Equality


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("source, count", [("tar", 150), ("zarr", 150)])
def test_gives_what_the_dataset_gives(dataset: Dataset, source: str, count: int, threads: int) -> None:
    rng = np.random.default_rng(3)
    gather = CropReader([dataset], threads=threads, source=source)
    rows = np.concatenate([rng.integers(0, len(dataset), count), [5, 6, 7, 5, 0, len(dataset) - 1]]).tolist()
    for _ in range(2):  # checked, then unchecked
        out, report = read(gather, rows)
        assert all(np.array_equal(crop, dataset.read(row)) for crop, row in zip(out, rows, strict=True))
        assert report.row.tolist() == rows and report.skipped == ()


def test_mixes_datasets_and_formats(dataset: Dataset, small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(small.meta, "formats", ["tar"])
    only_zarr = Dataset(dataset.root, dataset.meta | {"formats": ["zarr"]})
    gather = CropReader([dataset, small, only_zarr])
    index, rows = np.array([1, 0, 2, 1, 0, 2, 2]), np.array([19, 3, 8, 0, 40, 9, 100])
    out = np.empty((7, *CROP_SHAPE), np.int16)
    gather.read(index, rows, out)
    for crop, d, row in zip(out, index, rows, strict=True):
        assert np.array_equal(crop, [dataset, small, dataset][d].read(row))


def test_refuses_buffers_and_rows_that_do_not_fit(small: Dataset) -> None:
    gather = CropReader([small])
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
        CropReader([small], source="zarr")


def test_refuses_a_table_of_another_dataset(small: Dataset, tmp_path: Path) -> None:
    other = make_dataset(tmp_path / "other", shards=6)
    with pytest.raises(DatasetError, match=r"24 rows, dataset\.json says 20"):
        CropReader([Dataset(other.root, other.meta | {"crops": 20})])
    with pytest.raises(DatasetError, match="names shards that"):
        CropReader([Dataset(other.root, other.meta | {"shards": small.shards})])
    Path(other.root.url, "samples.parquet").replace(Path(small.root.url, "samples.parquet"))
    with pytest.raises(DatasetError, match=r"^[^\n]*/small/samples\.parquet: fails its sha256[^\n]*$"):
        CropReader([Dataset.open(small.root.url)])


# Checks


@pytest.mark.parametrize("source", ["tar", "zarr"])
def test_check_modes(twin: Dataset, source: str) -> None:
    """A byte flipped after the first reading: `always` sees it. zarr's own crc32c sees it in any mode."""
    gathers = {check: CropReader([twin], check=check, source=source) for check in ("first", "always", "never")}
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
        read(CropReader([twin], source=source), [3, 9])  # another process: its first reading


def test_first_checks_each_crop_once(small: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    real = google_crc32c.value
    monkeypatch.setattr(google_crc32c, "value", lambda data: checked.append(1) or real(data))
    gather = CropReader([small])
    for rows, due in (([3, 4, 5], 3), ([5, 4, 3], 0), ([5, 6, 11], 2), ([0, 8, 16, 19], 4), ([0, 8, 16, 19], 0)):
        checked.clear()
        read(gather, rows)
        assert len(checked) == due


def test_a_crop_that_failed_is_checked_again(small: Dataset) -> None:
    path, offset = tar_path(small, 7)
    flip(path, offset)
    gather = CropReader([small])
    for _ in range(2):
        with pytest.raises(DatasetError, match="crop 7"):
            read(gather, [6, 7])
    flip(path, offset)
    assert np.array_equal(read(gather, [7])[0][0], small.read(7))


# Skipping


@pytest.mark.parametrize("source", ["tar", "zarr"])
def test_skip_counts_logs_and_takes_the_next(twin: Dataset, source: str, caplog: pytest.LogCaptureFixture) -> None:
    for row in (9, 10):
        flip(tar_path(twin, row)[0], tar_path(twin, row)[1]) if source == "tar" else None
    if source == "zarr":
        flip(Path(twin.root.url, "store.zarr/c/2/0/0"), 120_000 + 50)
        flip(Path(twin.root.url, "store.zarr/c/2/0/0"), 240_000 + 50)
    rows = [3, 9, 10, 11, 9, 19]
    gathers = [CropReader([twin], on_corrupt="skip", threads=t, source=source) for t in (1, 2)]
    with caplog.at_level(logging.WARNING):
        out, report = read(gathers[0], rows)
        read(gathers[0], rows)
    assert report.row.tolist() == [3, 11, 11, 11, 11, 19]
    assert all(np.array_equal(crop, twin.read(row)) for crop, row in zip(out, report.row, strict=True))
    assert [(bad.dataset, bad.row) for bad in report.skipped] == [(0, 9), (0, 10), (0, 10), (0, 9), (0, 10)]
    assert gathers[0].skipped == 2 and len(caplog.records) == 2
    one_by_one = [read(gathers[1], [row])[1].row[0] for row in rows]
    assert one_by_one == report.row.tolist()


def test_skip_goes_round_and_ends(small: Dataset) -> None:
    damaged = Path(small.root.url, "shards", "00004.tar")
    damaged.unlink()
    gather = CropReader([small], on_corrupt="skip")
    out, report = read(gather, [18])
    assert report.row.tolist() == [0] and np.array_equal(out[0], small.read(0))
    for path in damaged.parent.iterdir():
        path.unlink()
    with pytest.raises(DatasetError, match="not one of its 20 crops"):
        read(CropReader([small], on_corrupt="skip"), [18])


def test_a_full_machine_is_no_reason_to_skip(small: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = CropReader([small], on_corrupt="skip")

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
    gather, rng = CropReader([many], threads=2), np.random.default_rng(0)
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


@pytest.mark.parametrize("position", [0, 3, 4, 7])
def test_what_is_bad_is_told_by_its_own_batch_of_those_read_together(position: int) -> None:
    """First and last of each: an error that no batch told would let wrong bytes through."""
    rows, halves = np.arange(8), (slice(0, 4), slice(4, 8))
    bad = Bad(position, 0, position, "it is bad")
    for number, these in enumerate(halves):
        mine = Report(rows, (bad,)).part(these)
        assert mine.row.tolist() == rows[these].tolist()
        assert [one.position for one in mine.skipped] == [position % 4] * (position // 4 == number)
        if position // 4 == number:
            with pytest.raises(DatasetError, match="it is bad"):
                Report(rows, (), bad).part(these)
        else:
            assert Report(rows, (), bad).part(these).skipped == ()
