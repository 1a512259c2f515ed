"""Shards and chunks that are not what they were: an error that names them, and no wrong byte."""

import os
import re
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from engine.data.prefetch import read_ahead
from shards_made import batches, flip, make_dataset, read, take_all, tar_path

from data_tools import zarr_writer
from data_tools.dataset import CROP_BYTES, CROP_SHAPE, Dataset, DatasetError
from engine.data.reader import CropReader


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


TAR_DAMAGE = ["flipped", "truncated", "emptied", "missing", "swapped", "a folder"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", TAR_DAMAGE)
def test_damaged_tar_is_named_and_not_handed_out(small: Dataset, kind: str, threads: int) -> None:
    text, row = damage_tar(small, kind)
    yielded = []
    ahead = read_ahead(batches([17, 18], [12, 13, row, 14], [16]), CropReader([small], threads=threads), (4, *CROP_SHAPE))
    with pytest.raises(DatasetError, match=f"^{text}[^\n]*restore the file$"):
        take_all(ahead, yielded, small)
    assert yielded == [[17, 18]]


def test_a_short_read_is_noticed_unchecked(small: Dataset) -> None:
    """Or the rest of the crop would be what was in the buffer before."""
    damage_tar(small, "truncated")
    with pytest.raises(DatasetError, match=r"crop 9 at byte \d+: the file ends 119000 bytes too early"):
        read(CropReader([small], check="never"), [8, 9])


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
    ahead = read_ahead(batches([17, 18], [12, 13, 9, 14], [16]), CropReader([twin], source="zarr"), (4, *CROP_SHAPE))
    with pytest.raises(DatasetError, match=rf"{OBJECT}: crop 9: [^\n]*restore the file$"):
        take_all(ahead, yielded, twin)
    assert yielded == [[17, 18]]


@pytest.mark.parametrize("kind", [kind for kind in ZARR_DAMAGE if kind != "swapped"])
def test_damaged_zarr_is_noticed_unchecked(twin: Dataset, kind: str) -> None:
    """By its own checks; and what is absent is zeros for zarr, so `never` would train on silence."""
    gather = CropReader([twin], source="zarr", check="never")
    read(gather, [0])
    damage_zarr(twin, kind)
    with pytest.raises(DatasetError, match="crop 9"):
        read(gather, [9])


def test_zeros_that_zarr_does_not_write_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_writer, "SHARD_CROPS", 4)
    monkeypatch.setattr(np.random, "default_rng", lambda seed: Halved(seed))
    quiet = make_dataset(tmp_path / "quiet", shards=2, crops=4, zarr=True)
    out, _ = read(CropReader([quiet], source="zarr"), [0, 1, 6, 7])
    assert out[::2].any() and not out[1::2].any()
    assert all(np.array_equal(crop, quiet.read(row)) for crop, row in zip(out, [0, 1, 6, 7], strict=True))


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
        CropReader([twin], source="zarr")
