"""Batches ahead of their use: in order, in so many buffers and no more, and stopped at once."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from engine.data.prefetch import read_ahead
from shards_made import Batch, batches

from data_tools.dataset import CROP_SHAPE, Dataset
from engine.data import reader as module
from engine.data.reader import CropReader
from tests.waiting import until


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


def settle(noted: Noted, expected: int) -> int:
    """How far the thread goes when nobody takes anything."""
    until(lambda: noted.asked >= expected)
    time.sleep(0.1)
    return noted.asked


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


@pytest.mark.parametrize("depth, in_use", [(0, 1), (1, 1), (2, 1), (4, 1), (2, 3)])
def test_read_ahead_order_depth_and_buffers(small: Dataset, depth: int, in_use: int) -> None:
    rows = [[i % 20, (3 * i) % 20, (7 * i) % 20] for i in range(12)] + [[4]]
    noted, buffers, seen = Noted(batches(*rows)), set(), []
    ahead = read_ahead(noted, CropReader([small]), (3, *CROP_SHAPE), depth, in_use)
    for i, (request, crops, report) in enumerate(ahead):
        assert request.row.tolist() == rows[i] == report.row.tolist()
        if i < 3:  # long enough for every other buffer to be filled: this one must not change meanwhile
            expected = depth + max(in_use, i + 1)
            assert settle(noted, expected) == expected
        assert crops.shape == (len(rows[i]), *CROP_SHAPE)
        seen.append((rows[i], crops))
        for those, still in seen[-in_use:]:
            assert all(np.array_equal(crop, small.read(row)) for crop, row in zip(still, those, strict=True))
        buffers.add(crops.ctypes.data)
    assert i == len(rows) - 1 and len(buffers) <= depth + in_use
    assert not readers()


def test_read_ahead_closed_early_stops_at_once(small: Dataset) -> None:
    noted = Noted(batches(*([[1, 2]] * 1000)))
    ahead = read_ahead(noted, CropReader([small]), (2, *CROP_SHAPE), depth=2)
    next(ahead)
    assert len(readers()) == 1
    ahead.close()
    assert not readers() and noted.asked <= 4
    ahead = read_ahead(noted, CropReader([small]), (2, *CROP_SHAPE))
    next(ahead)
    del ahead
    gc.collect()
    assert not readers()


def test_read_ahead_closed_early_leaves_the_rest_unread(small: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch is read until the generator is closed."""
    gather, noted, closed = CropReader([small]), Noted(batches(*([[1, 2]] * 10))), threading.Event()
    real = gather.read

    def gated(*batch: Any) -> Any:
        assert noted.asked == 1 or closed.wait()
        return real(*batch)

    monkeypatch.setattr(gather, "read", gated)
    ahead = read_ahead(noted, gather, (2, *CROP_SHAPE), depth=6)
    next(ahead)
    (reader,) = readers()
    join = reader.join
    monkeypatch.setattr(reader, "join", lambda timeout: closed.set() or join())
    ahead.close()
    assert noted.asked <= 3 and not readers()


def test_read_ahead_raises_in_turn(small: Dataset) -> None:
    for noted, error in (
        (Noted(batches([1], [2], [3]), fail_at=2), RuntimeError),
        (Noted(batches([1], [2], [99], [3])), IndexError),
        (Noted(batches([1], [2], [3, 4, 5], [3])), ValueError),
    ):
        ahead = read_ahead(noted, CropReader([small]), (2, *CROP_SHAPE), depth=3)
        assert [next(ahead).request.row[0] for _ in range(2)] == [1, 2]
        with pytest.raises(error):
            next(ahead)
        assert not readers() and list(ahead) == []


def test_read_ahead_gives_its_buffers_back_after_an_error(small: Dataset) -> None:
    gc.collect()
    gc.disable()  # nothing but reference counts
    try:
        size = psutil.Process().memory_info().rss
        gather, full = CropReader([small]), list(range(20)) * 3
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
from engine.data.prefetch import read_ahead
from engine.data.reader import CropReader
class B: dataset, row = np.zeros(2, int), np.array([1, 2])
@contextmanager
def never(shard):
    threading.Event().wait()
    yield ""
d = Dataset.open({url!r})
ahead = read_ahead([B] * 50, CropReader([d], staged={staged}), (2, 12, 5000))
{last}
"""


@pytest.mark.parametrize(
    "staged, last",
    [*[("None", "next(ahead)")] * 4, ("{0: never}", "threading.Thread(target=next, args=(ahead,), daemon=True).start()")],
)
def test_a_program_ends_though_its_batches_were_forgotten(small: Dataset, staged: str, last: str) -> None:
    """Nor does it crash, which it would do now and then if a daemon thread were in C++ by then."""
    program, root = PROGRAM.format(url=small.root.url, staged=staged, last=last), Path(module.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
