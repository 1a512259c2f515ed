"""Damage to the files of a killed build: another run rebuilds the files that fail their checks; verify finds the rest."""

import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from handmade import build, files, flip

from data_tools import plan, zarr_writer
from data_tools.dataset import META
from data_tools.errors import DatasetError, StorageError
from data_tools.storage import LocalFolder
from data_tools.verify import verify

FLIPS, AT_ONCE = 200, 5


@pytest.fixture(scope="module", autouse=True)
def small_shards() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 4)
        patch.setattr(zarr_writer, "SHARD_CROPS", 4)
        yield


@pytest.fixture(scope="module")
def unfinished(small: Path, small_shards: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dataset in four shards and four storage objects: whole, and killed before dataset.json."""
    whole, killed = (tmp_path_factory.mktemp("unfinished") / name for name in ("whole", "killed"))
    write = LocalFolder.write

    def dies(self: LocalFolder, name: str, data: bytes) -> None:
        if name == META:
            raise StorageError("killed")
        write(self, name, data)

    build(small, whole, format="both")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFolder, "write", dies)
        with pytest.raises(StorageError, match="killed"):
            build(small, killed, format="both")
    return whole, killed


def test_flipped_bits_are_repaired_or_found(small: Path, unfinished: tuple[Path, Path], tmp_path: Path) -> None:
    """Each flipped bit is repaired or found; small files, and files with patients and roles, are always repaired."""
    whole, killed = unfinished
    right, draw = files(whole), random.Random(0)
    names = sorted(name for name, data in files(killed).items() if data)
    assert {name.split("/")[0] for name in names} == {".build", "rejects.csv", "samples.parquet", "shards", "store.zarr"}
    for turn in range(FLIPS // AT_ONCE):
        out = tmp_path / str(turn)
        shutil.copytree(killed, out)
        flipped = draw.sample(names, AT_ONCE)
        for name in flipped:
            flip(out / name, draw.randrange((out / name).stat().st_size), 1 << draw.randrange(8))
        with suppress(DatasetError):  # from a damaged shard no zarr twin is made: see the next test
            build(small, out, format="both")
        found = " ".join(verify(build(small, out, format="both")))
        wrong = {name for name, data in files(out).items() if right[name] != data}
        assert wrong <= set(flipped) and all(name in found for name in wrong) and bool(found) == bool(wrong)
        assert all(name.endswith(".tar") or "/c/" in name for name in wrong)
        shutil.rmtree(out)


def test_a_shard_too_damaged_for_the_zarr_copy_is_rebuilt(small: Path, unfinished: tuple[Path, Path], tmp_path: Path) -> None:
    whole, killed = unfinished
    out = tmp_path / "out"
    shutil.copytree(killed, out)
    shutil.rmtree(out / "store.zarr")
    flip(out / "shards/00001.tar", 70_000)
    with pytest.raises(DatasetError, match=r"shards/00001\.tar: .*crc32c: run again"):
        build(small, out, format="both")
    build(small, out, format="both")
    assert files(out) == files(whole)
