"""Damage to the files of a killed build: another run checks them, and rebuilds those that fail."""

import random
import shutil

import pytest
from handmade import build, files, flip

from omnilead.data_tools.dataset import META
from omnilead.data_tools.io.errors import DatasetError, StorageError
from omnilead.data_tools.io.storage import LocalFolder
from omnilead.data_tools.sharding import finishing
from omnilead.data_tools.sharding import shards as shard_writers
from omnilead.data_tools.sharding.verify import verify

FLIPS, AT_ONCE = 120, 6
pytestmark = pytest.mark.usefixtures("small_shards")


def no_space(*arguments):
    raise StorageError("killed")


@pytest.fixture(scope="module")
def unfinished(small, small_shards, tmp_path_factory):
    """A dataset in four shards and four storage objects: whole, and killed before dataset.json."""
    whole, killed = (tmp_path_factory.mktemp("unfinished") / name for name in ("whole", "killed"))
    write = LocalFolder.write

    def dies(self, name, data):
        if name == META:
            raise StorageError("killed")
        write(self, name, data)

    build(small, whole, format="both")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFolder, "write", dies)
        with pytest.raises(StorageError, match="killed"):
            build(small, killed, format="both")
    return whole, killed


def test_flipped_bits_are_repaired(small, unfinished, tmp_path):
    whole, killed = unfinished
    right, draw = files(whole), random.Random(0)
    names = sorted(name for name, data in files(killed).items() if data)
    assert {name.split("/")[0] for name in names} == {
        ".build",
        "README.md",
        "croissant.json",
        "rejects.csv",
        "samples.parquet",
        "shards",
        "store.zarr",
    }
    for turn in range(FLIPS // AT_ONCE):
        out = tmp_path / str(turn)
        shutil.copytree(killed, out)
        for name in draw.sample(names, AT_ONCE):
            flip(out / name, draw.randrange((out / name).stat().st_size), 1 << draw.randrange(8))
        build(small, out, format="both")
        assert files(out) == right
        shutil.rmtree(out)


def test_the_shards_of_a_build_with_another_plan_get_other_roles(small, tmp_path, monkeypatch):
    """No shard is built again."""
    with monkeypatch.context() as patch:
        patch.setattr(finishing, "assign_roles", no_space)
        with pytest.raises(StorageError, match="killed"):
            build(small, tmp_path / "out")
    shards = {path: path.stat().st_ino for path in tmp_path.glob("out/shards/*")}
    made = build(small, tmp_path / "out", plan="all")
    assert {path: path.stat().st_ino for path in tmp_path.glob("out/shards/*")} == shards
    assert verify(made) == []
    assert len(made.select(pretrain=True)) == len(made)
    build(small, tmp_path / "right", plan="all")
    assert files(tmp_path / "out") == files(tmp_path / "right")


def test_shards_that_are_whole_are_not_written_again(small, unfinished, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(unfinished[1], out)
    (out / "shards/00002.tar").unlink()
    flip(out / "store.zarr/c/3/0/0", 70_000)
    kept = [path for name in ("shards/*.tar", "store.zarr/c/*/0/0") for path in out.glob(name)]
    before = {path: path.stat().st_ino for path in kept}
    build(small, out, format="both")
    again = {str(path.relative_to(out)) for path in kept if path.stat().st_ino != before[path]}
    assert again == {"store.zarr/c/3/0/0"}


def test_a_shard_damaged_before_its_zarr_copy_is_rebuilt_by_the_next_run(
    small, unfinished, tmp_path, monkeypatch
):
    out, write = tmp_path / "out", shard_writers.write_zarr

    def write_from_damaged(*arguments):
        flip(out / "shards/00001.tar", 70_000)
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shard_writers, "write_zarr", write_from_damaged)
        with pytest.raises(DatasetError, match=r"shards/00001\.tar: .*crc32c: run again"):
            build(small, out, format="both")
    build(small, out, format="both")
    assert files(out) == files(unfinished[0])
