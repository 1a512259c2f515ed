"""The zarr twin: one int16 array [crops, 12, 5000] in samples.parquet's order, zarr v3, one storage object per 1,024 crops.

Inner chunks are single crops, compressed with Blosc (LZ4, bitshuffle) and closed by a crc32c of their own.
"""

import hashlib
import os
from contextlib import suppress
from functools import partial
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from tqdm import tqdm

from data_tools import cluster
from data_tools.dataset import CROP_BYTES, CROP_SHAPE, SHARD_CROPS, STORE, open_store
from data_tools.errors import DatasetError, ReadError, StorageError
from data_tools.storage import Folder, ahead
from data_tools.tar import part_name
from data_tools.zarr_reader import layout, read_meta

MARKER = ".build/zarr-"
Task = tuple[Folder, int, list[tuple[str, int, int]]]  # where, block, (tar, offset, crc32c) of each crop


def write(table: pa.Table, shards: list[dict[str, Any]], out: Folder, workers: int, dask: str | None, quiet: bool) -> None:
    """From the finished tar shards; blocks that stand already are kept."""
    _create(out, len(table))
    shard, offset, crc = (table[name].to_numpy() for name in ("shard", "offset", "crc32c"))

    def tasks() -> Any:
        for block in range(-(-len(table) // SHARD_CROPS)):
            rows = range(block * SHARD_CROPS, min((block + 1) * SHARD_CROPS, len(table)))
            yield out, block, [(f"shards/{shards[shard[i]]['name']}", int(offset[i]), int(crc[i])) for i in rows]

    with tqdm(total=len(table), unit=" crops", desc="zarr", disable=quiet) as bar:
        for crops in cluster.run(write_block, tasks(), workers, dask):
            bar.update(crops)


def _create(out: Folder, crops: int) -> None:
    import zarr
    from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec

    for name in [name for name in out.names(STORE) if name.endswith(".partial")]:  # zarr's, of a run that was killed
        out.remove(name)
    if out.exists(f"{STORE}/zarr.json"):
        with suppress(DatasetError):
            if read_meta(out) == layout(crops, SHARD_CROPS):
                return
        out.remove(STORE)
    for name in [name for name in out.names(".build") if name.startswith(MARKER)]:
        out.remove(name)
    inner = (BytesCodec(endian="little"), BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=2), Crc32cCodec())
    create = partial(
        zarr.create_array,
        f"{out.url}/{STORE}",
        shape=(crops, *CROP_SHAPE),
        chunks=(SHARD_CROPS, *CROP_SHAPE),
        dtype="int16",
        fill_value=0,
        serializer=ShardingCodec(chunk_shape=(1, *CROP_SHAPE), codecs=inner),
        compressors=None,
        filters=None,
        dimension_names=("crop", "lead", "sample"),
        overwrite=True,  # of an attempt whose answer was lost
    )
    try:
        out.patiently(f"{out.url}/{STORE}", create)
    except OSError as error:
        raise StorageError(f"writing {STORE} in {out.url}: {error.strerror or error}") from None


def write_block(task: Task) -> int:
    out, block, crops = task
    mark = hashlib.sha256(str([crc for _, _, crc in crops]).encode()).hexdigest().encode()
    marker = f"{MARKER}{block:05d}"
    with suppress(ReadError):  # not there
        if out.read(marker, 64) == mark:
            return len(crops)
    data = np.empty((len(crops), *CROP_SHAPE), "<i2")

    def read(crop: tuple[str, int, int]) -> bytes:
        return out.read_range(*crop[:2], CROP_BYTES)

    pieces = ahead(read, crops) if out.remote else map(read, crops)
    for row, (ecg, (name, offset, crc)) in enumerate(zip(pieces, crops, strict=True)):
        if google_crc32c.value(ecg) != crc:
            out.remove(part_name(os.path.basename(name)))
            raise DatasetError(f"{out.url}/{name}: the crop at byte {offset} fails its crc32c: run again to make the file anew")
        data[row] = np.frombuffer(ecg, "<i2").reshape(CROP_SHAPE)

    def put() -> None:
        open_store(out, "r+")[block * SHARD_CROPS : block * SHARD_CROPS + len(crops)] = data

    try:
        out.patiently(f"{out.url}/{STORE} block {block}", put)
        if not out.remote:
            _sync(f"{out.url}/{STORE}/c/{block}/0/0")
        out.write(marker, mark)
    except OSError as error:
        raise StorageError(f"writing {STORE} block {block} in {out.url}: {error.strerror or error}") from None
    return len(crops)


def _sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)
