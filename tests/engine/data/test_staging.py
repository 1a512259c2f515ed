"""The cache of remote shards: prefetching, the size limit, sharing between processes; never a wrong
byte."""

import errno
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shards_made import make_dataset, read
from staged import Root, cached, held, named, path_of, right, room, stage, through

from omnilead.data_tools.dataset import Dataset, DatasetError
from omnilead.engine.data import staging as module
from omnilead.engine.data.reader import CropReader
from omnilead.engine.data.staging import Staging, StagingError
from tests.forks import started
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("small_and_quick")

# Order and bounds


def test_the_first_shard_is_available_before_the_others(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    opened = threading.Event()

    def gate(root: Root, name: str, start: int, size: int) -> bytes:
        assert "00004" in name or opened.wait()
        return root.inner.read_range(name, start, size)

    dataset, root = through(ten, gate)
    stagings.append(stage(dataset, tmp_path, room(ten, 10), ahead=3, order=[4, 9, 2, 0, 1, 3]))
    assert right(path_of(stagings[0], 4), ten, 4)
    until(
        lambda: sorted(root.shards()) == [0, 2, 4, 9]
    )  # 4 is done with, so 0 is one of the next three
    opened.set()
    assert right(path_of(stagings[0], 2), ten, 2)
    until(lambda: sorted(root.shards()) == [0, 1, 2, 3, 4, 9])


def test_the_bound_holds_at_every_moment(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    sizes = []

    def weigh(root: Root, name: str, start: int, size: int) -> bytes:
        sizes.append(cached(tmp_path))
        return root.inner.read_range(name, start, size)

    dataset, root = through(ten, weigh)
    order = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] * 2
    stagings.append(stage(dataset, tmp_path, room(ten, 4) + 1000, ahead=2, order=iter(order)))
    for shard in order:
        with held(stagings[0], shard) as (path,):
            assert right(path, ten, shard)
    assert max(sizes) == room(ten, 4)
    assert Counter(root.shards()) == dict.fromkeys(
        range(10), 2
    )  # nothing that was coming was evicted


def test_the_least_recently_used_shard_is_evicted_first(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    stagings.append(stage(ten, tmp_path, room(ten, 3)))
    for shard in (0, 1, 2, 0, 5):
        path_of(stagings[0], shard)
    assert {path.stem for path in tmp_path.glob("*.tar")} == {
        ten.shards[s]["sha256"] for s in (0, 2, 5)
    }


def test_prefetch_does_not_evict_the_current_block(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    dataset, root = through(ten)
    stagings.append(stage(dataset, tmp_path, room(ten, 3), ahead=3, order=range(10), together=3))
    for _ in range(3):
        for shard in (2, 0, 1):
            assert right(path_of(stagings[0], shard), ten, shard)
            time.sleep(0.03)
    assert Counter(root.shards()) == {0: 1, 1: 1, 2: 1}
    for shard in (5, 3, 4):
        assert right(path_of(stagings[0], shard), ten, shard)


def test_an_evicted_shard_is_downloaded_before_its_next_use(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    stagings.append(stage(ten, tmp_path, room(ten, 2), ahead=1, order=[0, 1, 2, 3, 0, 1]))
    first = Path(path_of(stagings[0], 0))
    for shard in (1, 2):
        path_of(stagings[0], shard)
    assert not first.exists()
    path_of(stagings[0], 3)
    until(first.exists)


def test_holding_a_shard_again_does_not_advance_the_order(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    """Three shards are all in use; the order needs them again next, but has not advanced yet."""
    order = iter([0, 1, 2] * 10)
    stagings.append(stage(ten, tmp_path, room(ten, 3), ahead=4, order=order, together=3))
    for shard in (0, 0, 0, 1, 2, 1, 0):
        path_of(stagings[0], shard)
    assert len(list(order)) == 30 - 4 - 3


def test_a_lock_on_a_file_that_was_just_evicted_is_none(tmp_path: Path) -> None:
    path, locks = tmp_path / "file", []
    path.touch()
    evictor = module._open_locked(path, os.O_RDONLY, module.fcntl.LOCK_EX)
    waiting = threading.Thread(
        target=lambda: locks.append(module._open_locked(path, os.O_RDONLY, module.fcntl.LOCK_SH))
    )
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    path.unlink()
    path.touch()  # already fetched again
    os.close(evictor)
    waiting.join(5)
    assert locks == [None]


def test_held_shards_are_not_evicted(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    staging = stage(ten, tmp_path, room(ten, 2), order=range(10))
    stagings.append(staging)
    with held(staging, 0) as (first,):
        for shard in (1, 2, 3):
            assert right(path_of(staging, shard), ten, shard)
        assert right(first, ten, 0)
    with (
        pytest.raises(
            StagingError, match=r"cannot hold the shards of one batch.*pipeline\.block_shards"
        ),
        held(staging, 0, 1, 2),
    ):
        pass
    path_of(staging, 4), path_of(staging, 5)
    assert not Path(first).exists()


def test_a_cache_full_of_shards_that_another_process_holds(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    stagings += [
        stage(ten, tmp_path, room(ten, 1)),
        stage(ten, tmp_path, room(ten, 1), timeout_s=0.05),
    ]
    with (
        held(stagings[0], 0),
        pytest.raises(
            StagingError, match=r"no space for .*00001\.tar: other processes hold all of it"
        ),
    ):
        path_of(stagings[1], 1)


# Failures


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set at the end of the test, so that a stalled call leaves no thread behind."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("cut", [False, True])
def test_storage_errors_stop_the_run_and_truncated_shards_may_be_skipped(
    ten: Dataset, tmp_path: Path, stagings: list[Staging], cut: bool
) -> None:
    """The storage has already retried."""

    def fail(root: Root, name: str, start: int, size: int) -> bytes:
        if cut or "00001" not in name:
            return root.inner.read_range(name, start, size)[: -1 if "00001" in name else None]
        raise OSError(errno.EIO, "Input/output error")

    dataset, root = through(ten, fail)
    stagings.append(stage(dataset, tmp_path, room(ten, 10)))
    with pytest.raises(
        DatasetError if cut else StagingError, match=r"\A[^\n]*ten/shards/00001\.tar[^\n]*\Z"
    ):
        path_of(stagings[0], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    with closing(CropReader([dataset], on_corrupt="skip", staging=stagings[0])) as reader:
        if cut:
            assert (
                read(reader, [2])[1].row.tolist() == [4] and root.shards().count(1) == 2
            )  # not for each crop
        else:
            with pytest.raises(StagingError):
                read(reader, [2])


def test_a_download_with_a_wrong_checksum_is_repeated(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    seen: Counter[int] = Counter()

    def flip_once(root: Root, name: str, start: int, size: int) -> bytes:
        seen[start] += 1
        data = bytearray(root.inner.read_range(name, start, size))
        data[5] ^= start == 100_000 and seen[start] == 1
        return bytes(data)

    stagings.append(stage(through(ten, flip_once)[0], tmp_path, room(ten, 10)))
    assert right(path_of(stagings[0], 1), ten, 1) and seen[0] == 2


def test_a_full_disk(
    ten: Dataset, tmp_path: Path, stagings: list[Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "pwrite", full)
    stagings.append(stage(ten, tmp_path, room(ten, 10)))
    with pytest.raises(
        StagingError,
        match=rf"{re.escape(str(tmp_path))}: No space left on device, .*00001\.tar.*cache_dir",
    ):
        path_of(stagings[0], 1)
    assert cached(tmp_path) == 0


@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_a_cached_file_that_is_damaged_later_is_downloaded_again(
    ten: Dataset,
    tmp_path: Path,
    stagings: list[Staging],
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset, root = through(ten)
    stagings.append(stage(dataset, tmp_path, room(ten, 10)))
    path = Path(path_of(stagings[0], 1))
    if damage == "flipped":
        data = bytearray(path.read_bytes())
        data[70_000] ^= 1
        path.write_bytes(data)
    elif damage == "truncated":
        os.truncate(path, 100_000)
    else:
        path.unlink()
    with closing(CropReader([dataset], staging=stagings[0])) as reader:
        out, report = read(reader, range(1, 5))
    assert all(np.array_equal(crop, ten.read(row)) for row, crop in enumerate(out, 1))
    assert root.shards().count(1) == 2 and report.skipped == ()
    assert (str(path) in caplog.text) == (damage != "deleted")


def test_a_bad_crop_in_an_intact_shard_names_both_files(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    """The shard matches dataset.json, but not samples.parquet."""
    stagings.append(stage(ten, tmp_path, room(ten, 10)))
    path = path_of(stagings[0], 1)
    with closing(CropReader([ten], staging=stagings[0])) as reader:
        reader._sources[0].crc = reader._sources[0].crc ^ 1
        with pytest.raises(
            DatasetError,
            match=rf"\A{re.escape(path)}, downloaded twice: [^\n]*/00001\.tar: crop 2 ",
        ):
            read(reader, [2])


def test_files_of_an_earlier_run_are_verified(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    first = stage(ten, tmp_path, room(ten, 10))
    paths = [Path(path_of(first, shard)) for shard in (0, 1)]
    first.close()
    damaged = bytearray(paths[0].read_bytes())
    damaged[9] ^= 1
    paths[0].write_bytes(damaged)
    dataset, root = through(ten)
    stagings.append(stage(dataset, tmp_path, room(ten, 10)))
    assert all(right(path_of(stagings[0], shard), ten, shard) for shard in (0, 1))
    assert root.shards() == [0]


def test_files_of_an_earlier_run_count_towards_the_bound(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    stagings.append(stage(ten, tmp_path, room(ten, 10)))
    for shard in range(6):
        path_of(stagings[0], shard)
    before = cached(tmp_path)
    stagings.append(stage(ten, tmp_path, room(ten, 3), order=[2, 5]))
    assert before == room(ten, 6) and cached(tmp_path) <= room(ten, 3)
    assert {stagings[1]._file((0, shard)).exists() for shard in (2, 5)} == {
        True
    }  # what comes next stays


def test_close_wakes_waiting_readers(ten: Dataset, tmp_path: Path, over: threading.Event) -> None:
    """Even if the storage never answers."""
    dataset, root = through(ten, lambda *_: bytes(over.wait()))
    before = set(named("staging"))
    staging = stage(dataset, tmp_path, room(ten, 10), order=[1], timeout_s=1e6)
    until(lambda: root.reads)
    threading.Timer(0.05, staging.close).start()
    with pytest.raises(StagingError, match=r"00001\.tar: the cache was closed"):
        path_of(staging, 1)
    over.set()
    until(lambda: not set(named("staging")) - before)


# Several processes


def read_shards(
    url: str, cache: str, notes: str, shards: list[int], max_shards: int, last_part: int = -1
) -> None:
    """`last_part`: the one in which it hangs."""
    module.PART_BYTES, module.POLL_S = 50_000, 0.01
    dataset = Dataset.open(url)

    def slowly(root: Root, name: str, start: int, size: int) -> bytes:
        with open(notes, "a") as file:
            file.write(f"{name} {start}\n")
        time.sleep(1e6 if start == last_part else 0.02)
        return root.inner.read_range(name, start, size)

    staging = stage(through(dataset, slowly)[0], Path(cache), room(dataset, max_shards))
    for shard in shards:
        assert right(path_of(staging, shard), dataset, shard)


def start(
    ten: Dataset, tmp_path: Path, shards: list[int], max_shards: int, last_part: int = -1
) -> Any:
    arguments = (
        ten.root.url,
        str(tmp_path / "cache"),
        str(tmp_path / "notes"),
        shards,
        max_shards,
        last_part,
    )
    return started(read_shards, *arguments, out=tmp_path / "out")


def test_two_processes_share_a_cache(ten: Dataset, tmp_path: Path) -> None:
    processes = [start(ten, tmp_path, list(range(10)), 10) for _ in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert set(Counter((tmp_path / "notes").read_text().splitlines()).values()) == {
        1
    }  # every part came once
    assert len(list(tmp_path.glob("cache/*.tar"))) == 10 and not list(
        tmp_path.glob("cache/*.partial")
    )


def test_two_processes_in_a_tight_cache(ten: Dataset, tmp_path: Path) -> None:
    """They evict each other's shards: slow, but the bytes are right and the limit holds."""
    rng, most = np.random.default_rng(1), 0
    (tmp_path / "cache").mkdir()
    processes = [start(ten, tmp_path, rng.integers(0, 10, 25).tolist(), 3) for _ in range(2)]
    while any(process.exitcode is None for process in processes):
        most = max(most, cached(tmp_path / "cache"))
        time.sleep(0.002)
    assert [process.exitcode for process in processes] == [0, 0]
    assert room(ten, 2) < most <= room(ten, 3)


def test_a_killed_download_is_taken_over(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    notes, cache = tmp_path / "notes", tmp_path / "cache"
    for last_part, shard in (
        (50_000, 4),
        (0, 3),
    ):  # room for another shard that nobody holds; the same shard
        process = start(ten, tmp_path, [3], 1, last_part)
        until(
            lambda part=last_part: (
                notes.exists() and f" {part}" in notes.read_text() and list(cache.glob("*.partial"))
            )
        )
        process.kill()
        process.join()
        notes.unlink()
        assert len(list(cache.glob("*.partial"))) == 1
        stagings.append(stage(ten, cache, room(ten, 1)))
        assert right(path_of(stagings[-1], shard), ten, shard)


def test_two_processes_waiting_for_each_others_space_do_not_deadlock(
    ten: Dataset, tmp_path: Path, stagings: list[Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks need two shards each, with space for two in all: if each holds one, neither gets
    its second."""
    monkeypatch.setattr(module, "TRIES", 20)
    monkeypatch.setattr(module, "WAIT_S", 1.0)
    stagings += [stage(ten, tmp_path, room(ten, 2), timeout_s=0.3) for _ in range(2)]
    met, second, lock = threading.Barrier(2), {1, 5}, Staging._lock

    def meet(staging: Staging, key: tuple[int, int], locks: ExitStack) -> Any:
        if key[1] in second:
            second.remove(key[1])
            met.wait()
        return lock(staging, key, locks)

    def read_two(staging: Staging, shards: tuple[int, int]) -> list[bool]:
        with held(staging, *shards) as paths:
            return [right(path, ten, shard) for path, shard in zip(paths, shards, strict=True)]

    monkeypatch.setattr(Staging, "_lock", meet)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read_two, stagings, [(0, 1), (4, 5)])) == [[True, True]] * 2
    assert not second


def test_batches_from_staged_and_local_shards(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    local, other = (
        make_dataset(tmp_path / "local", shards=2, seed=9),
        make_dataset(tmp_path / "other", shards=2, seed=8),
    )
    order = [(d, shard) for shard in range(2) for d in (1, 2)]
    stagings.append(Staging({1: ten, 2: other}, tmp_path / "cache", room(other, 4), order))
    reader = CropReader([local, ten, other], staging=stagings[0])
    for rows in ([0, 1, 7, 3], [5, 19, 2, 1], [7, 18, 0, 0]):
        datasets = [0, 1, 2, 1]
        out, _ = read(reader, rows, np.array(datasets))
        for crop, d, row in zip(out, datasets, rows, strict=True):
            assert np.array_equal(crop, (local, ten, other)[d].read(row))
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert sum(str(tmp_path / "local") in path for path in opened) == 2
    assert not [
        path for path in opened if path.endswith((".tar", ".tar (deleted)")) and "/cache/" in path
    ]  # or the disk fills
