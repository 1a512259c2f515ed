"""Crops out of the zarr twin without zarr-python, which costs 0.5 to 2 ms a chunk: here it is 70 us, nearly all of it Blosc's.

    store.zarr/c/<k>/0/0: 1,024 crops, each a chunk of its own | index: (start, length) of each | crc32c of the index
    chunk: 16 bytes that say how long it is, raw and packed | LZ4 of shuffled bits | crc32c of what stands before

Only the layout that data_tools writes is read, and anything else refused; it is that of zarr v3's specification, and a test
holds it against zarr-python. Every length is checked before memory is asked for or written to.
"""

import json
from functools import lru_cache
from typing import Any

import google_crc32c
import numcodecs.blosc
import numpy as np

from data_tools.dataset import CROP_BYTES, CROP_SHAPE, STORE, Dataset, DatasetError

numcodecs.blosc.use_threads = False  # its own would be shared, and locked, by all of ours
BLOSC = numcodecs.blosc.Blosc()
BLOSC_HEADER, CRC = 16, 4
MAX_CHUNK = BLOSC_HEADER + CROP_BYTES + CRC  # what Blosc cannot pack it copies
INDEXES = 256  # kept, of 16 kB each as data_tools writes them
MAX_META = 2**20
MAX_BLOCK = 2**20  # an index of 16 MB
ABSENT = 2**64 - 1  # a start: the chunk is all zeros, and was not written


class ChunkError(Exception):
    """What is wrong with a chunk, in the words that come after its name."""


class Chunks:
    """`read` may be called from several threads at a time."""

    def __init__(self, dataset: Dataset) -> None:
        self.root = dataset.root
        self.block = _block(dataset)  # crops in one storage object
        self._index = lru_cache(INDEXES)(self._read_index)

    def name(self, block: int) -> str:
        return f"{STORE}/c/{block}/0/0"

    def read(self, row: int, crop: np.ndarray) -> bool:
        """-> whether it is there; if not, it is zeros."""
        try:
            return self._read(row, crop)
        except ChunkError:
            if not self.root.remote:
                raise
            return self._read(row, crop)  # what a network did once it does not do twice

    def _read(self, row: int, crop: np.ndarray) -> bool:
        block, slot = divmod(row, self.block)
        start, length = self._index(block)[slot].tolist()
        if start == ABSENT:
            crop[:] = 0
            return False
        if not BLOSC_HEADER + CRC <= length <= MAX_CHUNK or start > MAX_CHUNK * self.block:
            raise ChunkError(f"its index says {length} bytes at {start}")
        packed = _checked(self.root.read_range(self.name(block), start, length), length, "its chunk")
        raw, whole = (int.from_bytes(packed[at : at + 4], "little") for at in (4, 12))
        if (raw, whole) != (CROP_BYTES, len(packed)):
            raise ChunkError(f"its chunk says {raw} bytes out of {whole}, not {CROP_BYTES} out of {len(packed)}")
        try:
            BLOSC.decode(packed, out=crop)
        except RuntimeError as error:
            raise ChunkError(f"its chunk does not decode ({error})") from None
        return True

    def _read_index(self, block: int) -> np.ndarray:
        name, size = self.name(block), 16 * self.block + CRC
        index = self.root.read_range(name, max(0, self.root.size(name) - size), size)
        return np.frombuffer(_checked(index, size, "the file's index"), "<u8").reshape(self.block, 2)


def _checked(data: bytes, size: int, what: str) -> np.ndarray:
    """Without its crc32c, which holds."""
    if len(data) < size:
        raise ChunkError(f"the file ends {size - len(data)} bytes too early")
    body = np.frombuffer(data, np.uint8)[:-CRC]  # google_crc32c takes no memoryview
    if google_crc32c.value(body) != int.from_bytes(data[-CRC:], "little"):
        raise ChunkError(f"{what} fails its crc32c")
    return body


def _block(dataset: Dataset) -> int:
    where = f"{dataset.root.url}/{STORE}/zarr.json"
    try:
        meta = json.loads(dataset.root.read_range(f"{STORE}/zarr.json", 0, MAX_META))
        block = int(meta["chunk_grid"]["configuration"]["chunk_shape"][0])
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise DatasetError(f"{where}: {type(error).__name__} {error}: restore the file"[:300]) from None
    wrong = _differs(meta, _layout(len(dataset), block))
    if wrong or not 0 < block <= MAX_BLOCK:
        raise DatasetError(f"{where}: {wrong}: only what data_tools writes is read")
    return block


def _layout(crops: int, block: int) -> dict[str, Any]:
    little, crc32c = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
    sharding = {
        "chunk_shape": [1, *CROP_SHAPE],
        "codecs": [little, {"name": "blosc"}, crc32c],
        "index_codecs": [little, crc32c],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "shape": [crops, *CROP_SHAPE],
        "data_type": "int16",
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [block, *CROP_SHAPE]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }


def _differs(found: Any, due: Any, name: str = "") -> str:
    """The first thing in `due` that is otherwise, or nothing."""
    if isinstance(due, dict) and isinstance(found, dict):
        parts = ((found.get(key), value, f"{name}.{key}".lstrip(".")) for key, value in due.items())
    elif isinstance(due, list) and isinstance(found, list) and len(due) == len(found):
        parts = ((one, value, name) for one, value in zip(found, due, strict=True))
    else:
        return "" if found == due else f"{name} is {found!r} and not {due!r}"[:200]
    return next(filter(None, (_differs(*part) for part in parts)), "")
