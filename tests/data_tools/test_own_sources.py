"""What a user's own source may do, and what the machine's failures do to records."""

import errno
import os
import sys
import threading
import time

import numpy as np
import pytest
from handmade import build, ecg, write_challenge
from listed import Listed, listed

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg.record import LEADS, EcgRecord
from omnilead.data_tools.io.errors import StorageError, machine_error
from omnilead.data_tools.io.storage import LocalFolder
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.base import Source

pytestmark = pytest.mark.usefixtures("small_shards")
BUFFER = np.zeros((12, 12_000), np.int16)


class Remote(LocalFolder):
    """Its sources are read by several threads."""

    remote = True


class OneBuffer(Source):
    """Fills the same buffer for each record, as fast readers do."""

    name = "shared"

    def __init__(self, root):
        super().__init__(root)
        self.inside, self.most = 0, 0

    def keys(self):
        return (f"r{number}" for number in range(12))

    def read(self, key):
        self.inside += 1
        self.most = max(self.most, self.inside)
        BUFFER[:] = ecg(12_000, seed=int(key[1:]))
        time.sleep(0.002)  # another thread could begin
        self.inside -= 1
        return EcgRecord(key, BUFFER, 500.0, LEADS, "uV", source=self.name)


class Threaded(OneBuffer):
    """Says that several threads may call it."""

    thread_safe = True
    meeting = threading.Barrier(2, timeout=60)
    met = False

    def read(self, key):
        if key in ("r0", "r1") and not Threaded.met:
            self.meeting.wait()
            Threaded.met = True
        return EcgRecord(key, ecg(5000, seed=int(key[1:])), 500.0, LEADS, "uV", source=self.name)


@pytest.mark.parametrize("place", [LocalFolder, Remote])
def test_a_source_may_fill_one_buffer_for_every_record(place, tmp_path):
    source = OneBuffer(place("/"))
    made = shard([source], ShardOptions(str(tmp_path / "out"), plan="all", quiet=True))
    rows = made.table(["record", "start_s"]).to_pylist()
    assert len(rows) == 24 and source.most == 1
    for row, place_of_row in enumerate(rows):
        start = round(500 * place_of_row["start_s"])
        right = ecg(12_000, seed=int(place_of_row["record"][1:]))[:, start : start + 5000]
        crop = made.read(row)
        np.testing.assert_array_equal(crop[:, : right.shape[1]], right[:, :5000])
    assert verify(made, [OneBuffer(LocalFolder("/"))]) == []


def test_a_source_that_says_so_is_called_by_several_threads(tmp_path):
    """They meet: one alone would wait in vain."""
    made = shard([Threaded(Remote("/"))], ShardOptions(str(tmp_path / "out"), quiet=True))
    assert len(made) == 12


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.ENOSPC, errno.ETIMEDOUT]
)
def test_a_failure_of_the_machine_refuses_no_record(number, tmp_path, monkeypatch):
    """The command stops, and goes on when it is typed again."""
    records = {f"r{i}": ("mine", f"who{i}", i) for i in range(5)}
    read = Listed.read

    def fails(source, name):
        if name == "r3":
            raise OSError(number, os.strerror(number), "r3.dat")
        return read(source, name)

    with monkeypatch.context() as patch:
        patch.setattr(Listed, "read", fails)
        with pytest.raises(StorageError, match=r"r3\.dat: .*this machine failed, not the file"):
            listed(tmp_path / "out", **records)
    assert len(listed(tmp_path / "out", **records)) == 5


def test_a_file_that_cannot_be_opened_for_lack_of_descriptors_stops_the_build(
    tmp_path, monkeypatch
):
    for number in range(3):
        write_challenge(tmp_path / "in", f"e{number}", ecg(5000, number))
    open_file = os.open

    def fails(path, *how, **options):
        if str(path).endswith("e1.mat"):
            raise OSError(errno.EMFILE, "Too many open files", path)
        return open_file(path, *how, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        with pytest.raises(StorageError, match=r"e1\.mat: Too many open files: this machine"):
            build(tmp_path / "in", tmp_path / "out")
    assert len(build(tmp_path / "in", tmp_path / "out")) == 3
    assert len(Dataset.open(str(tmp_path / "out"))) == 3


OWN = """
import numpy as np
from names_of_leads import NAMES
from omnilead.data_tools.ecg.record import EcgRecord
from omnilead.data_tools.sources import Source

SCALE = 1

class Own(Source):
    name = "own"

    def keys(self):
        return iter(["a"])

    def read(self, key):
        rng = np.random.default_rng(0)
        return EcgRecord(key, SCALE * rng.integers(-9, 9, (12, 5000)), 500.0, NAMES, "uV", source=self.name)
"""


@pytest.mark.parametrize("changed", ["own.py", "names_of_leads.py"])
def test_a_changed_reader_is_not_the_same_reader(changed, tmp_path, shell):
    """Above its class, or in a file beside it."""
    (tmp_path / "names_of_leads.py").write_text(f"NAMES = {LEADS}\n")
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.raw").touch()
    words = ("shard", tmp_path / "in", "--source", f"{tmp_path / 'own.py'}:Own", "--out")
    how = (tmp_path / "out", "--plan", "all", "--workers", 1)
    try:
        shell.run(*words, *how)
        assert "already finished: nothing was done" in shell.run(*words, *how)[1]
        text = (tmp_path / changed).read_text()
        other = text.replace("SCALE = 1", "SCALE = 2").replace("'I', 'II'", "'II', 'I'")
        (tmp_path / changed).write_text(other)
        assert other != text
        assert "is already finished (from other input or options)" in shell.error(*words, *how)
    finally:
        sys.modules.pop("own", None)
        sys.modules.pop("names_of_leads", None)
        sys.path.remove(str(tmp_path))


def test_which_errors_are_the_machines():
    assert machine_error(ValueError("no header")) is None
    assert machine_error(PermissionError(errno.EACCES, "no")) is None
    assert machine_error(OSError("Can't read data (errno = 5, error message = 'I/O')"))
    wrapped = ValueError("a library's own")
    wrapped.__context__ = OSError(errno.ENOSPC, "full")
    assert machine_error(wrapped)
