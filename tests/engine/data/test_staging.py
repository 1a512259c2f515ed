"""Shards from far away: in time, in bounds, once for all processes, and never a wrong byte."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from shards_made import Batch, make_dataset
from staged import CROPS, Root, cached, named, right, room, through

from data_tools.dataset import CROP_SHAPE, Dataset, DatasetError
from engine.data import reader as gathering
from engine.data import staging as module
from engine.data.reader import CropReader
from engine.data.staging import Staging, StagingError
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("small_and_quick")

# Order and bounds


def test_the_first_shard_is_there_before_the_others(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    opened = threading.Event()

    def gate(root: Root, name: str, start: int, size: int) -> bytes:
        assert "00004" in name or opened.wait()
        return root.inner.read_range(name, start, size)

    dataset, root = through(ten, gate)
    stagings.append(Staging(dataset, tmp_path, room(ten, 10), ahead=3, order=[4, 9, 2, 0, 1, 3]))
    assert right(stagings[0].path(4), ten, 4)
    until(lambda: sorted(root.shards()) == [0, 2, 4, 9])  # 4 is done with, so 0 is one of the next three
    opened.set()
    assert right(stagings[0].path(2), ten, 2)
    until(lambda: sorted(root.shards()) == [0, 1, 2, 3, 4, 9])


def test_the_bound_holds_at_every_moment(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    sizes = []

    def weigh(root: Root, name: str, start: int, size: int) -> bytes:
        sizes.append(cached(tmp_path))
        return root.inner.read_range(name, start, size)

    dataset, root = through(ten, weigh)
    order = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] * 2
    stagings.append(Staging(dataset, tmp_path, room(ten, 4) + 1000, ahead=2, order=iter(order)))
    for shard in order:
        with stagings[0].hold(shard) as path:
            assert right(path, ten, shard)
    assert max(sizes) == room(ten, 4)
    assert Counter(root.shards()) == dict.fromkeys(range(10), 2)  # nothing that was coming was evicted


def test_two_datasets_of_one_batch_that_do_not_fit_are_told_at_once(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    other = make_dataset(tmp_path / "other", shards=2, crops=CROPS, seed=6)
    first, second = (Staging(dataset, tmp_path / "cache", room(ten, 3)) for dataset in (ten, other))
    stagings += [first, second]
    first.beside, second.beside = [second], [first]
    too_much = pytest.raises(StagingError, match="do not hold the shards of one batch")
    with first.hold(0), first.hold(1), second.hold(0), first.hold(1), too_much, second.hold(1):
        pass
    with second.hold(0), second.hold(1):
        pass


def test_the_longest_unneeded_goes_first(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    stagings.append(Staging(ten, tmp_path, room(ten, 3)))
    for shard in (0, 1, 2, 0, 5):
        stagings[0].path(shard)
    assert {path.stem for path in tmp_path.glob("*.tar")} == {ten.shards[s]["sha256"] for s in (0, 2, 5)}


def test_a_prefetch_does_not_drive_out_the_current_block(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    dataset, root = through(ten)
    stagings.append(Staging(dataset, tmp_path, room(ten, 3), ahead=3, order=range(10), together=3))
    for _ in range(3):
        for shard in (2, 0, 1):
            assert right(stagings[0].path(shard), ten, shard)
            time.sleep(0.03)
    assert Counter(root.shards()) == {0: 1, 1: 1, 2: 1}
    for shard in (5, 3, 4):
        assert right(stagings[0].path(shard), ten, shard)


def test_a_shard_that_was_evicted_is_fetched_before_its_next_turn(
    ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    stagings.append(Staging(ten, tmp_path, room(ten, 2), ahead=1, order=[0, 1, 2, 3, 0, 1]))
    first = Path(stagings[0].path(0))
    for shard in (1, 2):
        stagings[0].path(shard)
    assert not first.exists()
    stagings[0].path(3)
    until(first.exists)


def test_asking_again_does_not_advance(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    """Of three shards, all in use: the order comes back to them at once, but the time for that has not come."""
    order = iter([0, 1, 2] * 10)
    stagings.append(Staging(ten, tmp_path, room(ten, 3), ahead=4, order=order, together=3))
    for shard in (0, 0, 0, 1, 2, 1, 0):
        stagings[0].path(shard)
    assert len(list(order)) == 30 - 4 - 3


def test_a_lock_on_a_file_that_was_just_evicted_is_none(tmp_path: Path) -> None:
    path, locks = tmp_path / "file", []
    path.touch()
    evictor = module._open_locked(path, os.O_RDONLY, module.fcntl.LOCK_EX)
    waiting = threading.Thread(target=lambda: locks.append(module._open_locked(path, os.O_RDONLY, module.fcntl.LOCK_SH)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    path.unlink()
    path.touch()  # already fetched again
    os.close(evictor)
    waiting.join(5)
    assert locks == [None]


def test_what_is_held_stays(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    staging = Staging(ten, tmp_path, room(ten, 2), order=range(10))
    stagings.append(staging)
    with staging.hold(0) as first:
        for shard in (1, 2, 3):
            assert right(staging.path(shard), ten, shard)
        assert right(first, ten, 0)
        with (
            staging.hold(1),
            pytest.raises(StagingError, match=r"do not hold the shards of one batch.*lower pipeline\.block_shards"),
            staging.hold(2),
        ):
            pass
    staging.path(4), staging.path(5)
    assert not Path(first).exists()


def test_a_cache_smaller_than_a_shard(ten: Dataset, tmp_path: Path) -> None:
    with pytest.raises(StagingError, match=r"cannot hold one shard of \d+: allow more"):
        Staging(ten, tmp_path, room(ten, 1) - 1)


def test_a_cache_full_of_anothers_shards(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    stagings += [Staging(ten, tmp_path, room(ten, 1)), Staging(ten, tmp_path, room(ten, 1), timeout_s=0.05)]
    with stagings[0].hold(0), pytest.raises(StagingError, match=r"no room for .*00001\.tar: others hold all of it"):
        stagings[1].path(1)


# Failures


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set at the test's end: what stalls until then leaves no thread behind."""
    event = threading.Event()
    yield event
    event.set()


def failing(how_often: float, kind: str, over: threading.Event) -> Callable[[Root, str, int, int], bytes]:
    """Each part fails so often, and comes then."""
    tries: Counter[tuple[str, int]] = Counter()

    def fail(root: Root, name: str, start: int, size: int) -> bytes:
        tries[name, start] += 1
        if tries[name, start] <= how_often:
            if kind == "500":
                raise OSError(errno.EIO, "We encountered an internal error. Please try again.\nOr not.")
            if kind == "stalls":
                over.wait()
            if kind == "cuts":
                return root.inner.read_range(name, start, size)[:-1]
        return root.inner.read_range(name, start, size)

    return fail


@pytest.mark.parametrize("kind", ["500", "stalls", "cuts"])
def test_a_server_that_fails_now_and_then(
    ten: Dataset, tmp_path: Path, stagings: list[Staging], over: threading.Event, kind: str
) -> None:
    dataset, root = through(ten, failing(2, kind, over))
    stagings.append(Staging(dataset, tmp_path, room(ten, 10), order=[1], timeout_s=0.3 if kind == "stalls" else 60))
    assert right(stagings[0].path(1), ten, 1)
    assert min(Counter(root.reads).values()) == 3


@pytest.mark.parametrize("kind, error", [("500", StagingError), ("stalls", StagingError), ("cuts", DatasetError)])
def test_a_server_that_fails_for_ever(
    ten: Dataset, tmp_path: Path, stagings: list[Staging], over: threading.Event, kind: str, error: type[DatasetError]
) -> None:
    """A failing place stops the run; only a file that is too short may be skipped."""
    dataset, _ = through(ten, failing(1e9, kind, over))
    stagings.append(Staging(dataset, tmp_path, room(ten, 10), timeout_s=0.05 if kind == "stalls" else 60))
    with pytest.raises(DatasetError, match=r"\A[^\n]*ten/shards/00001\.tar: byte 0 after 5 tries: [^\n]*\Z") as caught:
        stagings[0].path(1)
    assert type(caught.value) is error
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    gather = CropReader([dataset], on_corrupt="skip", staged={0: stagings[0].hold})
    if error is StagingError:
        with pytest.raises(StagingError):
            gather.read(np.zeros(1, int), np.array([2]), np.empty((1, *CROP_SHAPE), np.int16))
        assert gather.skipped == 0


def test_bytes_that_are_wrong_once_are_fetched_again(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    seen: Counter[int] = Counter()

    def flip_once(root: Root, name: str, start: int, size: int) -> bytes:
        seen[start] += 1
        data = bytearray(root.inner.read_range(name, start, size))
        data[5] ^= start == 100_000 and seen[start] == 1
        return bytes(data)

    stagings.append(Staging(through(ten, flip_once)[0], tmp_path, room(ten, 10)))
    assert right(stagings[0].path(1), ten, 1) and seen[0] == 2


def test_a_full_disk(ten: Dataset, tmp_path: Path, stagings: list[Staging], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "pwrite", full)
    stagings.append(Staging(ten, tmp_path, room(ten, 10)))
    with pytest.raises(
        StagingError, match=rf"{re.escape(str(tmp_path))}/\w+\.tar: No space left on device, .*00001\.tar.*cache_dir"
    ):
        stagings[0].path(1)
    assert cached(tmp_path) == 0


@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_a_file_of_the_cache_that_is_damaged_later_is_fetched_again(
    ten: Dataset, tmp_path: Path, stagings: list[Staging], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, root = through(ten)
    stagings.append(Staging(dataset, tmp_path, room(ten, 10)))
    path, out = Path(stagings[0].path(1)), np.empty((4, *CROP_SHAPE), np.int16)
    if damage == "flipped":
        data = bytearray(path.read_bytes())
        data[70_000] ^= 1
        path.write_bytes(data)
    elif damage == "truncated":
        os.truncate(path, 100_000)
    else:
        path.unlink()
    with closing(CropReader([dataset], staged={0: stagings[0].hold})) as gather:
        gather.read(np.zeros(4, int), np.arange(1, 5), out)
    assert all(np.array_equal(crop, ten.read(row)) for row, crop in enumerate(out, 1))
    assert root.shards().count(1) == 2 and gather.skipped == 0
    assert (str(path) in caplog.text) == (damage != "deleted")


def test_a_crop_that_is_wrong_in_a_whole_shard_names_both_files(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    """The shard is as dataset.json says, and samples.parquet says something else."""
    stagings.append(Staging(ten, tmp_path, room(ten, 10)))
    path = stagings[0].path(1)
    with closing(CropReader([ten], staged={0: stagings[0].hold})) as gather:
        gather._sources[0].crc = gather._sources[0].crc ^ 1
        with pytest.raises(DatasetError, match=rf"\A{re.escape(path)}, fetched twice: [^\n]*/00001\.tar: crop 2 "):
            gather.read(np.zeros(1, int), np.array([2]), np.empty((1, *CROP_SHAPE), np.int16))


def test_what_an_earlier_run_left_is_verified(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    first = Staging(ten, tmp_path, room(ten, 10))
    paths = [Path(first.path(shard)) for shard in (0, 1)]
    first.close()
    damaged = bytearray(paths[0].read_bytes())
    damaged[9] ^= 1
    paths[0].write_bytes(damaged)
    dataset, root = through(ten)
    stagings.append(Staging(dataset, tmp_path, room(ten, 10)))
    assert all(right(stagings[0].path(shard), ten, shard) for shard in (0, 1))
    assert root.shards() == [0]


def test_what_an_earlier_run_left_is_within_the_bound_too(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    stagings.append(Staging(ten, tmp_path, room(ten, 10)))
    for shard in range(6):
        stagings[0].path(shard)
    before = cached(tmp_path)
    stagings.append(Staging(ten, tmp_path, room(ten, 3), order=[2, 5]))
    assert before == room(ten, 6) and cached(tmp_path) <= room(ten, 3)
    assert {stagings[1]._file(shard).exists() for shard in (2, 5)} == {True}  # what comes next stays


def test_close_wakes_who_waits(ten: Dataset, tmp_path: Path, over: threading.Event) -> None:
    """Though no answer ever comes."""
    dataset, root = through(ten, lambda *_: bytes(over.wait()))
    before = set(named("staging"))
    staging = Staging(dataset, tmp_path, room(ten, 10), timeout_s=1e6)
    closer = threading.Thread(target=lambda: until(lambda: root.reads) and staging.close())
    closer.start()
    with pytest.raises(StagingError, match=r"00001\.tar: the cache was closed"):
        staging.path(1)
    closer.join()
    until(lambda: not set(named("staging")) - before)


# Several processes

PROGRAM = """
import sys, time
from pathlib import Path
from data_tools.dataset import Dataset
from engine.data import staging
staging.PART_BYTES, staging.POLL_S = 50_000, 0.01
url, cache, notes, shards, max_shards, last_part = sys.argv[1:]
dataset = Dataset.open(url)
class Slow:
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)
    def read_range(self, name, start, size):
        with open(notes, "a") as file: file.write(f"{name} {start}\\n")
        time.sleep(1e6 if start == int(last_part) else 0.02)
        return self.inner.read_range(name, start, size)
one = staging.Staging(Dataset(Slow(dataset.root), dataset.meta), cache, int(max_shards) * dataset.shards[0]["bytes"])
for shard in map(int, shards.split(",")):
    with one.hold(shard) as path:
        assert Path(path).read_bytes() == Path(url, "shards", dataset.shards[shard]["name"]).read_bytes(), shard
"""


def start(
    ten: Dataset, cache: Path, notes: Path, shards: list[int], max_shards: int, last_part: int = -1
) -> "subprocess.Popen[bytes]":
    """`last_part`: the one in which it hangs."""
    arguments = [ten.root.url, str(cache), str(notes), ",".join(map(str, shards)), str(max_shards), str(last_part)]
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], cwd=Path(module.__file__).parents[2])


def test_two_processes_share_a_cache(ten: Dataset, tmp_path: Path) -> None:
    cache, notes = tmp_path / "cache", tmp_path / "notes"
    processes = [start(ten, cache, notes, list(range(10)), 10) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert set(Counter(notes.read_text().splitlines()).values()) == {1}  # every part came once
    assert len(list(cache.glob("*.tar"))) == 10 and not list(cache.glob("*.partial"))


def test_two_processes_in_a_tight_cache(ten: Dataset, tmp_path: Path) -> None:
    """They evict what the other one wanted: slow, but the bytes are right and the bound holds."""
    cache, rng = tmp_path / "cache", np.random.default_rng(1)
    cache.mkdir()
    processes = [start(ten, cache, tmp_path / "notes", rng.integers(0, 10, 25).tolist(), 3) for _ in range(2)]
    most = 0
    while any(process.poll() is None for process in processes):
        most = max(most, cached(cache))
        time.sleep(0.001)
    assert [process.returncode for process in processes] == [0, 0]
    assert room(ten, 2) < most <= room(ten, 3)


def test_a_killed_download_is_taken_over(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    cache, notes = tmp_path / "cache", tmp_path / "notes"
    process = start(ten, cache, notes, [3], 1, last_part=50_000)
    until(lambda: notes.exists() and len(notes.read_text().splitlines()) >= 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(cache.glob("*.partial"))) == 1
    stagings.append(Staging(ten, cache, room(ten, 1)))
    assert right(stagings[0].path(4), ten, 4)  # its room is needed, and it is nobody's
    process = start(ten, cache, notes, [3], 1, last_part=0)
    until(lambda: bool(list(cache.glob("*.partial"))))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert right(stagings[0].path(3), ten, 3)


def test_two_that_wait_for_each_others_room_let_go(
    ten: Dataset, tmp_path: Path, stagings: list[Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, two shards each, room for two: as each has one, neither gets its second."""
    monkeypatch.setattr(gathering, "ROOM_TRIES", 20)
    monkeypatch.setattr(gathering, "ROOM_WAIT_S", 1.0)
    monkeypatch.setattr(Staging, "_within_time", lambda self, call: call())  # the limit is for room alone
    stagings += [Staging(ten, tmp_path, room(ten, 2), timeout_s=0.3) for _ in range(2)]
    met = threading.Barrier(2)
    first = {0, 4}  # of each

    def hold(staging: Staging, shard: int) -> AbstractContextManager[str]:
        if shard - 1 in first:
            first.remove(shard - 1)
            met.wait()
        return staging.hold(shard)

    def read(staging: Staging, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *CROP_SHAPE), np.int16)
        with closing(CropReader([ten], staged={0: partial(hold, staging)})) as gather:
            gather.read(np.zeros(len(rows), int), rows, out)
        return out

    batches = [np.array([0, 1, 2, 3]), np.array([8, 9, 10, 11])]  # shards 0 and 1, 4 and 5
    with ThreadPoolExecutor(2) as pool:
        read_out = list(pool.map(read, stagings, batches))
    assert not first and met.broken is False
    for rows, out in zip(batches, read_out, strict=True):
        assert all(np.array_equal(crop, ten.read(row)) for crop, row in zip(out, rows.tolist(), strict=True))


def test_batches_from_staged_and_local_shards(ten: Dataset, tmp_path: Path, stagings: list[Staging]) -> None:
    local = make_dataset(tmp_path / "local", shards=2, seed=9)
    stagings.append(Staging(ten, tmp_path / "cache", room(ten, 4), order=range(10)))
    gather, out = CropReader([local, ten], staged={1: stagings[0].hold}), np.empty((4, *CROP_SHAPE), np.int16)
    for rows in ([0, 1, 7, 3], [5, 19, 2, 11], [7, 18, 0, 10]):
        request = Batch(np.array([0, 1, 0, 1]), np.array(rows))
        gather.read(request.dataset, request.row, out)
        for crop, d, row in zip(out, request.dataset, rows, strict=True):
            assert np.array_equal(crop, (local, ten)[d].read(row))
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert sum(str(tmp_path / "local") in path for path in opened) == 2
    assert not [path for path in opened if path.endswith((".tar", ".tar (deleted)")) and "/cache/" in path]  # or the disk fills
