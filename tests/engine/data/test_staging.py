"""The cache of remote shards: prefetching, the size limit, sharing between processes; never a wrong
byte."""

import errno
import os
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from handmade import flip
from shards_made import crops_of, make_dataset, read
from staged import cached, held, named, path_of, right, room, through

from omnilead.data_tools.dataset import Dataset, DatasetError
from omnilead.engine.data import staging as module
from omnilead.engine.data.reader import CropReader
from omnilead.engine.data.staging import Staging, StagingError
from tests.forks import started
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("small_and_quick")

# Order and bounds


def test_the_first_shard_is_available_before_the_others(ten, staged):
    opened = threading.Event()

    def gate(root, name, start, size):
        assert "00004" in name or opened.wait()
        return root.inner.read_range(name, start, size)

    dataset, root = through(ten, gate)
    staging = staged(dataset, order=[4, 9, 2, 0, 1, 3], ahead=3)
    assert right(path_of(staging, 4), ten, 4)
    # 4 is done with, so 0 is one of the next three
    until(lambda: sorted(root.shards()) == [0, 2, 4, 9])
    opened.set()
    assert right(path_of(staging, 2), ten, 2)
    until(lambda: sorted(root.shards()) == [0, 1, 2, 3, 4, 9])


def test_the_bound_holds_at_every_moment(ten, tmp_path, staged):
    sizes = []

    def weigh(root, name, start, size):
        sizes.append(cached(tmp_path))
        return root.inner.read_range(name, start, size)

    dataset, root = through(ten, weigh)
    order = [*range(10)] * 2
    staging = staged(dataset, 4.01, iter(order), ahead=2)
    for shard in order:
        with held(staging, shard) as (path,):
            assert right(path, ten, shard)
    assert max(sizes) == room(ten, 4)
    # nothing that was coming was evicted
    assert Counter(root.shards()) == dict.fromkeys(range(10), 2)


def test_the_least_recently_used_shard_is_evicted_first(ten, tmp_path, staged):
    staging = staged(ten, 3)
    for shard in (0, 1, 2, 0, 5):
        path_of(staging, shard)
    left = {ten.shards[shard].sha256 for shard in (0, 2, 5)}
    assert {path.stem for path in tmp_path.glob("*.tar")} == left


def test_prefetch_does_not_evict_the_current_block(ten, staged, monkeypatch):
    claim, found_no_room = Staging._claim_download, []

    def noted(staging, key, needed):
        lock, room = claim(staging, key, needed)
        found_no_room.extend([key[1]] * (not room))
        return lock, room

    monkeypatch.setattr(Staging, "_claim_download", noted)
    dataset, root = through(ten)
    staging = staged(dataset, 3, range(10), ahead=3, together=3)
    for shard in [2, 0, 1] * 3:
        assert right(path_of(staging, shard), ten, shard)
    found_no_room.clear()
    until(lambda: root.shards()[3:] or {3, 4, 5} <= {*found_no_room})
    assert sorted(root.shards()) == [0, 1, 2]
    for shard in (5, 3, 4):
        assert right(path_of(staging, shard), ten, shard)


def test_an_evicted_shard_is_downloaded_before_its_next_use(ten, staged):
    staging = staged(ten, 2, [0, 1, 2, 3, 0, 1], ahead=1)
    first, *_ = (Path(path_of(staging, shard)) for shard in (0, 1, 2))
    assert not first.exists()
    path_of(staging, 3)
    until(first.exists)


def test_holding_a_shard_again_does_not_advance_the_order(ten, staged):
    """Three shards are all in use; the order needs them again next, but has not advanced yet."""
    order = iter([0, 1, 2] * 10)
    staging = staged(ten, 3, order, ahead=4, together=3)
    for shard in (0, 0, 0, 1, 2, 1, 0):
        path_of(staging, shard)
    assert len(list(order)) == 30 - 4 - 3


def test_a_lock_on_a_file_that_was_just_evicted_is_none(tmp_path, monkeypatch):
    """It waited for the lock of the evictor."""
    path = tmp_path / "file"
    path.touch()

    def evicted(*_):
        path.unlink()
        path.touch()  # already fetched again

    monkeypatch.setattr(module.fcntl, "flock", evicted)
    assert module._open_locked(path, os.O_RDONLY, module.fcntl.LOCK_SH) is None


def test_held_shards_are_not_evicted(ten, staged):
    staging = staged(ten, 2, range(10))
    with held(staging, 0) as (first,):
        for shard in (1, 2, 3):
            assert right(path_of(staging, shard), ten, shard)
        assert right(first, ten, 0)
    says = r"cannot hold the shards of one batch.*pipeline\.block_shards"
    with pytest.raises(StagingError, match=says), held(staging, 0, 1, 2):
        pass
    path_of(staging, 4), path_of(staging, 5)
    assert not Path(first).exists()
    says = r"no space for .*00001\.tar: other processes hold all of it"
    with held(staged(ten, 1), 0), pytest.raises(StagingError, match=says):
        path_of(staged(ten, 1, timeout_s=0.05), 1)


# Failures


@pytest.fixture
def over():
    """Set at the end of the test, so that a stalled call leaves no thread behind."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("error", [DatasetError, StagingError])
def test_storage_errors_stop_the_run_and_truncated_shards_may_be_skipped(
    error, ten, tmp_path, staged
):
    """The storage has already retried."""

    def fail(root, name, start, size):
        data = root.inner.read_range(name, start, size)
        if "00001" not in name:
            return data
        if error is StagingError:
            raise OSError(errno.EIO, "Input/output error")
        return data[:-1]

    dataset, root = through(ten, fail)
    staging = staged(dataset)
    with pytest.raises(error, match=r"\A[^\n]*ten/shards/00001\.tar[^\n]*\Z"):
        path_of(staging, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    with closing(CropReader([dataset], on_corrupt="skip", staging=staging)) as reader:
        if error is StagingError:
            with pytest.raises(StagingError):
                read(reader, [2])
        else:
            assert read(reader, [2])[1].row.tolist() == [4]
            assert root.shards().count(1) == 2  # not for each crop


def test_a_download_with_a_wrong_checksum_is_repeated_once(ten, tmp_path, staged):
    def flip_one(root, name, start, size):
        data = bytearray(root.inner.read_range(name, start, size))
        data[-1] ^= start == 0 and ("00003" in name or root.reads.count((name, 0)) == 1)
        return bytes(data)

    dataset, root = through(ten, flip_one)
    staging = staged(dataset)
    with pytest.raises(DatasetError, match=r"\A\S*00003\.tar: its bytes fail their sha256, twice"):
        path_of(staging, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    with (
        closing(CropReader([dataset], staging=staging)) as reader,
        pytest.raises(DatasetError, match=r"00003\.tar: .*sha256, twice.*crop 6 at byte \d+"),
    ):
        read(reader, [6])
    assert right(path_of(staging, 1), ten, 1) and root.shards() == [3, 3, 1, 1]


def test_a_full_disk(ten, tmp_path, staged, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "pwrite", full)
    says = rf"{re.escape(str(tmp_path))}: No space left on device, .*00001\.tar.*cache_dir"
    with pytest.raises(StagingError, match=says):
        path_of(staged(ten), 1)
    assert cached(tmp_path) == 0


@pytest.mark.parametrize(
    "harm",
    [lambda path: flip(path, 70_000), lambda path: os.truncate(path, 100_000), Path.unlink],
    ids=["flipped", "truncated", "deleted"],
)
def test_a_cached_file_that_is_damaged_later_is_downloaded_again(harm, ten, staged, caplog):
    dataset, root = through(ten)
    staging = staged(dataset)
    path = Path(path_of(staging, 1))
    harm(path)
    with closing(CropReader([dataset], staging=staging)) as reader:
        out, report = read(reader, range(1, 5))
    assert np.array_equal(out, crops_of(ten, range(1, 5)))
    assert root.shards().count(1) == 2 and report.skipped == ()
    assert (str(path) in caplog.text) == (harm != Path.unlink)


def test_a_bad_crop_in_an_intact_shard_names_both_files(ten, staged):
    """The shard matches dataset.json, but not samples.parquet."""
    staging = staged(ten)
    path = re.escape(path_of(staging, 1))
    with closing(CropReader([ten], staging=staging)) as reader:
        reader._sources[0].crc = reader._sources[0].crc ^ 1
        says = rf"\A{path}, downloaded twice: [^\n]*/00001\.tar: crop 2 "
        with pytest.raises(DatasetError, match=says):
            read(reader, [2])


def test_files_of_an_earlier_run_are_verified_and_count_towards_the_bound(ten, tmp_path, staged):
    first = staged(ten)
    paths = [Path(path_of(first, shard)) for shard in range(6)]
    first.close()
    flip(paths[0], 9)
    dataset, root = through(ten)
    again = staged(dataset)
    assert all(right(path_of(again, shard), ten, shard) for shard in (0, 1))
    assert root.shards() == [0] and cached(tmp_path) == room(ten, 6)
    staged(ten, 3, order=[2, 5])
    assert cached(tmp_path) <= room(ten, 3)
    assert paths[2].exists() and paths[5].exists()  # what comes next stays


def test_close_wakes_waiting_readers(ten, staged, over):
    """Even if the storage never answers."""
    dataset, root = through(ten, lambda *_: bytes(over.wait()))
    before = set(named("staging"))
    staging = staged(dataset, order=[1], timeout_s=1e6)
    until(lambda: root.reads)
    threading.Timer(0.05, staging.close).start()
    with pytest.raises(StagingError, match=r"00001\.tar: the cache was closed"):
        path_of(staging, 1)
    over.set()
    until(lambda: not set(named("staging")) - before)


# Several processes


def read_shards(tmp, url, shards, most, last_part):
    """`last_part`: the one in which it hangs."""
    module.PART_BYTES, module.POLL_S = 50_000, 0.01
    dataset = Dataset.open(url)

    def slowly(root, name, start, size):
        with open(tmp / "notes", "a") as file:
            file.write(f"{name} {start}\n")
        time.sleep(1e6 if start == last_part else 0.02)
        return root.inner.read_range(name, start, size)

    staging = Staging({0: through(dataset, slowly)[0]}, tmp / "cache", room(dataset, most), ())
    for shard in shards:
        with held(staging, shard) as (path,):  # else the other process may evict it
            assert right(path, dataset, shard)


def start(ten, tmp, shards, most, last_part=-1):
    (tmp / "cache").mkdir(exist_ok=True)
    return started(read_shards, tmp, ten.root.url, shards, most, last_part, out=tmp / "out")


def test_two_processes_share_a_cache(ten, tmp_path):
    processes = [start(ten, tmp_path, list(range(10)), 10) for _ in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    parts = (tmp_path / "notes").read_text().splitlines()
    assert len(parts) == len(set(parts))  # every part came once
    assert len(list(tmp_path.glob("cache/*.tar"))) == 10
    assert not list(tmp_path.glob("cache/*.partial"))


def test_two_processes_in_a_tight_cache(ten, tmp_path):
    """They evict each other's shards: slow, but the bytes are right and the limit holds."""
    rng, cache = np.random.default_rng(1), tmp_path / "cache"
    processes = [start(ten, tmp_path, rng.integers(0, 10, 25).tolist(), 3) for _ in range(2)]

    def both_ended():
        assert cached(cache) <= room(ten, 3)
        return None not in [process.exitcode for process in processes]

    until(both_ended)
    assert [process.exitcode for process in processes] == [0, 0]
    # no more was evicted than the limit asks for
    assert cached(cache) == room(ten, 3)


# room for another shard that nobody holds; the same shard
@pytest.mark.parametrize(("last_part", "shard"), [(50_000, 4), (0, 3)])
def test_a_killed_download_is_taken_over(last_part, shard, ten, tmp_path):
    notes, cache = tmp_path / "notes", tmp_path / "cache"
    process = start(ten, tmp_path, [3], 1, last_part)
    until(lambda: notes.exists() and f" {last_part}" in notes.read_text())
    process.kill()
    process.join()
    assert len(list(cache.glob("*.partial"))) == 1
    with closing(Staging({0: ten}, cache, room(ten, 1), ())) as staging:
        assert right(path_of(staging, shard), ten, shard)


def test_two_processes_waiting_for_each_others_space_do_not_deadlock(ten, staged, monkeypatch):
    """Two ranks need two shards each, with space for two in all: if each holds one, neither gets
    its second."""
    monkeypatch.setattr(module, "TRIES", 20)
    monkeypatch.setattr(module, "WAIT_S", 1.0)
    met, second, lock = threading.Barrier(2), {1, 5}, Staging._lock_shard

    def meet(staging, key, locks):
        if key[1] in second:
            second.remove(key[1])
            met.wait()
        return lock(staging, key, locks)

    def read_two(staging, shards):
        with held(staging, *shards) as paths:
            for path, shard in zip(paths, shards, strict=True):
                assert right(path, ten, shard)

    monkeypatch.setattr(Staging, "_lock_shard", meet)
    stagings = [staged(ten, 2, timeout_s=0.3) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read_two, stagings, [(0, 1), (4, 5)]))
    assert not second


def test_batches_from_staged_and_local_shards(ten, tmp_path):
    local = make_dataset(tmp_path / "local", shards=2, seed=9)
    other = make_dataset(tmp_path / "other", shards=2, seed=8)
    order = [(d, shard) for shard in range(2) for d in (1, 2)]
    with closing(Staging({1: ten, 2: other}, tmp_path / "cache", room(other, 4), order)) as staging:
        reader = CropReader([local, ten, other], staging=staging)
        for rows in ([0, 1, 7, 3], [5, 19, 2, 1], [7, 18, 0, 0]):
            out, _ = read(reader, rows, np.array([0, 1, 2, 1]))
            for crop, one, row in zip(out, (local, ten, other, ten), rows, strict=True):
                assert np.array_equal(crop, one.read(row))
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        opened = [os.path.realpath(link) for link in links]
        assert sum(str(tmp_path / "local" / "shards") in path for path in opened) == 2
        # or the disk fills
        assert not any("/cache/" in path and ".tar" in path for path in opened)
