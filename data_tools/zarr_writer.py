"""Write the zarr copy: a zarr v3 int16 array [crops, 12, 5000] in samples.parquet's order, 1,024
crops per storage object.

Each crop is a chunk, compressed with Blosc (LZ4, bitshuffle) and followed by its crc32c, in zarr's
sharding codec. The bytes are the same as zarr-python's, but an object appears completely or not at
all.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from omnilead.data_tools import cluster
from omnilead.data_tools.dataset import CROP_BYTES, SHARD_CROPS, STORE
from omnilead.data_tools.errors import DatasetError, ReadError
from omnilead.data_tools.storage import Folder, prefetch
from omnilead.data_tools.tar import part_name
from omnilead.data_tools.zarr_reader import ABSENT, BLOSC, CRC, layout

Block = tuple[int, list[tuple[str, int, int]]]  # number; tar, offset and crc32c of each crop


def write(
    table: pa.Table,
    shards: list[dict[str, Any]],
    out: Folder,
    workers: int,
    dask: str | None,
    quiet: bool,
) -> None:
    """Write the copy from the finished tar shards. Blocks that an interrupted run has finished are
    kept."""
    shard, offset, crc = (table[name].to_numpy() for name in ("shard", "offset", "crc32c"))

    def blocks() -> Iterator[Block]:
        for start in range(0, len(table), SHARD_CROPS):
            rows = range(start, min(start + SHARD_CROPS, len(table)))
            yield (
                start // SHARD_CROPS,
                [(f"shards/{shards[shard[i]]['name']}", int(offset[i]), int(crc[i])) for i in rows],
            )

    ours = {f"{STORE}/zarr.json"} | {
        f"{STORE}/c/{i}/0/0" for i in range(-(-len(table) // SHARD_CROPS))
    }
    for name in [
        name for name in out.names(STORE) if name not in ours
    ]:  # left by an interrupted run with other settings
        out.remove(name)
    out.write(f"{STORE}/zarr.json", json.dumps(layout(len(table), SHARD_CROPS), indent=2).encode())
    with tqdm(total=len(table), unit=" crops", desc="zarr", disable=quiet) as bar:
        for written in cluster.run(partial(write_block, out, SHARD_CROPS), blocks(), workers, dask):
            bar.update(written)


def write_block(out: Folder, size: int, block: Block) -> int:
    number, crops = block
    mark = _sha256(str([size, *(crc for _, _, crc in crops)]).encode())
    name, marker = f"{STORE}/c/{number}/0/0", f".build/zarr-{number:05d}"
    largest = size * 2 * CROP_BYTES
    with suppress(ReadError):  # not written yet
        if out.read(marker, 128) == mark + _sha256(out.read(name, largest)):
            return len(crops)

    def packed(crop: tuple[str, int, int]) -> bytes:
        tar, offset, crc = crop
        ecg = out.read_range(tar, offset, CROP_BYTES)
        if google_crc32c.value(ecg) != crc:
            out.remove(part_name(os.path.basename(tar)))
            raise DatasetError(
                f"{out.url}/{tar}: the crop at byte {offset} fails its crc32c: run again to "
                "rebuild the file"
            )
        return _with_crc(BLOSC.encode(np.frombuffer(ecg, "<i2")))

    chunks = list(prefetch(packed, crops) if out.remote else map(packed, crops))
    index = np.full((size, 2), ABSENT, "<u8")
    lengths = np.array([len(chunk) for chunk in chunks])
    index[: len(chunks)] = np.stack([np.cumsum(lengths) - lengths, lengths], axis=1)
    data = b"".join([*chunks, _with_crc(index.tobytes())])
    out.write(name, data)
    out.write(marker, mark + _sha256(data))
    return len(crops)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _with_crc(data: bytes) -> bytes:
    return data + int(google_crc32c.value(data)).to_bytes(CRC, "little")
