"""Write the files that hold a dataset's crops: tar shards, and the zarr copy that is made from them.

Tar shards, for WebDataset and DALI, are uncompressed ustar with `<key>.ecg`, then `<key>.json`, and a
separate index file. Headers are written by hand in a fixed 512-byte form without times, owners or
links, so the same crops give the same bytes.

The copy is a zarr v3 int16 array [crops, 12, 5000] in samples.parquet's order, 1,024 crops per
storage object. Each crop is a chunk, compressed with Blosc (LZ4, bitshuffle) and followed by its
crc32c, in zarr's sharding codec. The bytes are the same as zarr-python's, but an object appears
completely or not at all.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import BinaryIO

import google_crc32c
import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from ..dataset import CROP_BYTES, SHARD_CROPS, STORE, ShardFacts
from ..dataset.zarr_reader import ABSENT_CHUNK, BLOSC, CRC, zarr_json
from ..io import cluster
from ..io.errors import DatasetError, ReadError
from ..io.storage import Folder, prefetch

TAR_BLOCK, MAX_NAME = 512, 99
MAX_INDEX_BYTES = 2**26
OCTAL_SIZE = re.compile(b"[0-7]{11}")
OWNER, TIME = b"0000644\0" + b"0000000\0" * 2, b"00000000000\0"
HEADER_REST = b"0" + bytes(100) + b"ustar\00000" + bytes(64) + b"0000000\0" * 2 + bytes(167)
# The part of a header's checksum that is the same for all members. The checksum field itself counts as
# eight spaces
CONSTANT_CHECKSUM = sum(OWNER + TIME + HEADER_REST) + 8 * 32
# Number of a storage object of the zarr copy; tar, offset and crc32c of each of its crops
ZarrBlock = tuple[int, list[tuple[str, int, int]]]


def shard_name(number: int) -> str:
    return f"{number:05d}.tar"


def index_name(shard: str) -> str:
    return f"shards/{shard.removesuffix('.tar')}.idx"


def part_name(shard: str) -> str:
    """Returns the name of a shard's part file, which holds its rows while the dataset is unfinished."""
    return f".build/{shard.removesuffix('.tar')}.parquet"


def member_header(name: str, size: int) -> bytes:
    """Returns the ustar header of a regular file with mode 0644, owner 0 and time 0."""
    raw = name.encode("ascii")
    if len(raw) > MAX_NAME or not 0 <= size < 8**11:
        raise ValueError(
            f"no tar header for {name!r} with {size} bytes: the limits are {MAX_NAME} characters "
            "and 8 GiB"
        )
    octal = b"%011o\0" % size
    total = sum(raw) + sum(octal) + CONSTANT_CHECKSUM
    return raw.ljust(100, b"\0") + OWNER + octal + TIME + b"%06o\0 " % total + HEADER_REST


class TarWriter:
    """Appends crops to an open file and keeps its size, sha256 and index."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()
        self.index: list[str] = []

    def add(self, key: str, ecg: bytes | memoryview, text: bytes) -> int:
        """Writes one crop and returns the offset of its signal in the tar."""
        self._write(member_header(f"{key}.ecg", len(ecg)))
        offset = self.size
        self._write(ecg)
        between = bytes(-len(ecg) % TAR_BLOCK) + member_header(f"{key}.json", len(text))
        self.index.append(
            _index_line(
                offset, len(ecg), f"{key}.ecg", self.size + len(between), len(text), f"{key}.json"
            )
        )
        self._write(between + text + bytes(-len(text) % TAR_BLOCK))
        return offset

    def close(self) -> str:
        """Writes the end of the tar and returns the text of its index."""
        self._write(bytes(2 * TAR_BLOCK))
        return _index_text(self.index)

    def _write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)


def make_index(shard: memoryview, offsets: Iterable[int]) -> str:
    """Returns the index of a finished shard, made from the headers of its members."""
    lines = []
    for offset in offsets:
        ecg, size = member_name_and_size(shard, offset)
        below = offset + size + -size % TAR_BLOCK + TAR_BLOCK
        text, length = member_name_and_size(shard, below)
        lines.append(_index_line(offset, size, ecg, below, length, text))
    return _index_text(lines)


def member_name_and_size(shard: memoryview, offset: int) -> tuple[str, int]:
    """Returns (name, size) of the member whose data start at `offset`. Raises a ValueError if there is
    none."""
    header = bytes(shard[max(0, offset - TAR_BLOCK) : max(0, offset)])
    name, size = header[:100].rstrip(b"\0"), header[124:135]
    if not name.isascii() or not OCTAL_SIZE.fullmatch(size):
        raise ValueError(f"no tar member at byte {offset}")
    return name.decode(), int(size, 8)


def _index_line(offset: int, size: int, ecg: str, below: int, length: int, text: str) -> str:
    return f"ecg {offset} {size} {ecg} json {below} {length} {text}\n"


def _index_text(lines: list[str]) -> str:
    return f"v1.2 {len(lines)}\n" + "".join(lines)


def write_zarr(
    table: pa.Table,
    shards: list[ShardFacts],
    out: Folder,
    workers: int,
    dask: str | None,
    quiet: bool,
) -> None:
    """Writes the zarr copy from the finished tar shards. Storage objects that an interrupted run has
    finished are not written again."""
    shard, offset, crc = (table[name].to_numpy() for name in ("shard", "offset", "crc32c"))

    def blocks() -> Iterator[ZarrBlock]:
        for start in range(0, len(table), SHARD_CROPS):
            rows = range(start, min(start + SHARD_CROPS, len(table)))
            yield (
                start // SHARD_CROPS,
                [(f"shards/{shards[shard[i]].name}", int(offset[i]), int(crc[i])) for i in rows],
            )

    expected = {f"{STORE}/zarr.json"} | {
        f"{STORE}/c/{i}/0/0" for i in range(-(-len(table) // SHARD_CROPS))
    }
    for name in set(out.names(STORE)) - expected:  # left by an interrupted run with other settings
        out.remove(name)
    out.write(
        f"{STORE}/zarr.json", json.dumps(zarr_json(len(table), SHARD_CROPS), indent=2).encode()
    )
    with tqdm(total=len(table), unit=" crops", desc="zarr", disable=quiet) as bar:
        for written in cluster.run(
            partial(write_zarr_block, out, SHARD_CROPS), blocks(), workers, dask
        ):
            bar.update(written)


def write_zarr_block(out: Folder, size: int, block: ZarrBlock) -> int:
    number, crops = block
    mark = _sha256(str([size, *(crc for _, _, crc in crops)]).encode())
    name, marker = f"{STORE}/c/{number}/0/0", f".build/zarr-{number:05d}"
    largest = size * 2 * CROP_BYTES
    with suppress(ReadError):  # not written yet
        if out.read(marker, 128) == mark + _sha256(out.read(name, largest)):
            return len(crops)

    def compress_crop(crop: tuple[str, int, int]) -> bytes:
        tar, offset, crc = crop
        ecg = out.read_range(tar, offset, CROP_BYTES)
        if google_crc32c.value(ecg) != crc:
            out.remove(part_name(os.path.basename(tar)))
            raise DatasetError(
                f"{out.url}/{tar}: the crop at byte {offset} fails its crc32c: run again to "
                "rebuild the file"
            )
        return _append_crc(BLOSC.encode(np.frombuffer(ecg, "<i2")))

    chunks = list(prefetch(compress_crop, crops) if out.remote else map(compress_crop, crops))
    index = np.full((size, 2), ABSENT_CHUNK, "<u8")
    lengths = np.array([len(chunk) for chunk in chunks])
    index[: len(chunks)] = np.stack([np.cumsum(lengths) - lengths, lengths], axis=1)
    data = b"".join([*chunks, _append_crc(index.tobytes())])
    out.write(name, data)
    out.write(marker, mark + _sha256(data))
    return len(crops)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _append_crc(data: bytes) -> bytes:
    return data + int(google_crc32c.value(data)).to_bytes(CRC, "little")
