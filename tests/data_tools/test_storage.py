"""Local files where the file system answers in parts; a file that reaches a bucket in part."""

import re
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from handmade import build

from omnilead.data_tools.io import storage
from omnilead.data_tools.io.errors import ReadError, StorageError
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.detect import open_sources

PART = 2**16


def test_files_are_read_whole(in_parts, tmp_path):
    content = np.random.default_rng(0).bytes(3 * PART + 5)
    (tmp_path / "x").write_bytes(content)
    place = folder(tmp_path)
    assert place.read("x", len(content)) == content
    assert place.read("x", PART + 1, cut=True) == content[: PART + 1]
    assert place.read_range("x", 7, 2 * PART) == content[7 : 7 + 2 * PART]
    assert place.read_range("x", PART, 10 * PART) == content[PART:]
    assert place.read_range("x", len(content), 1) == b""
    with pytest.raises(ReadError, match="file too large"):
        place.read("x", len(content) - 1)


def test_no_record_is_refused_and_no_crop_damaged(in_parts, small, tmp_path):
    made = build(small, tmp_path / "out", format="both")
    assert sum(source["records"]["refused"] for source in made.meta["sources"]) == 0
    assert len(list(made)) == 15
    assert verify(made, open_sources(str(small))) == []


@pytest.mark.parametrize("arrived", [3, 5])
def test_a_file_that_arrives_with_another_size_is_no_upload(arrived, tmp_path, monkeypatch):
    """Neither published nor removed here."""

    def put_file(bucket, path, name):
        bucket.pipe_file(name, b"12345"[:arrived])

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    (tmp_path / "x").write_bytes(b"1234")
    url = f"memory:/{tmp_path}"
    with pytest.raises(
        StorageError, match=re.escape(f"x: {arrived} of 4 bytes arrived: run again")
    ):
        folder(url).publish(tmp_path / "x", "x")
    assert (tmp_path / "x").read_bytes() == b"1234"


def test_threads_that_write_files_of_one_name_in_two_folders(tmp_path, monkeypatch):
    """As storage objects of the zarr copy are called, which threads of a Dask worker write."""
    publish, both = storage.publish, Barrier(2)

    def together(temporary, final):
        both.wait()
        publish(temporary, final)

    monkeypatch.setattr(storage, "publish", together)
    names = ["store.zarr/c/0/0/0", "store.zarr/c/1/0/0"]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: folder(tmp_path).write(name, name.encode()), names))
    assert [(tmp_path / name).read_text() for name in names] == names


def test_a_write_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "shards").write_text("a file")
    with pytest.raises(StorageError, match="writing shards/x"):
        folder(tmp_path).write("shards/x", b"1")
    assert list((tmp_path / ".build/tmp").iterdir()) == []
