"""Crops from the zarr twin without zarr-python, which costs 0.5 to 2 ms a chunk: 70 us here, nearly all of it Blosc's.

    store.zarr/c/<k>/0/0: 1,024 crops, each a chunk of its own | index: (start, length) of each | crc32c of the index
    chunk: 16 bytes that say how long it is, raw and packed | LZ4 of shuffled bits | crc32c of everything before

Only the layout that data_tools writes is read; a test holds it against zarr-python. Every length is checked before memory is
allocated or written to.
"""

import json
from functools import lru_cache
from typing import Any

import google_crc32c
import numcodecs.blosc
import numpy as np

from data_tools.dataset import CROP_BYTES, CROP_SHAPE, STORE
from data_tools.errors import ChunkError, DatasetError, ReadError, one_line
from data_tools.storage import Folder

numcodecs.blosc.use_threads = False  # its own would be shared, and locked, by all of ours
BLOSC = numcodecs.blosc.Blosc()
BLOSC_HEADER, CRC = 16, 4
MAX_CHUNK = BLOSC_HEADER + CROP_BYTES + CRC  # what Blosc cannot pack it copies
INDEXES = 256  # kept, of 16 kB each as data_tools writes them
MAX_META = 2**20
MAX_BLOCK = 2**20  # an index of 16 MB
ABSENT = 2**64 - 1  # a start: the chunk is all zeros, and was not written


class Chunks:
    """`read` may be called from several threads at a time."""

    def __init__(self, root: Folder, crops: int) -> None:
        self.root = root
        self.meta = read_meta(root)
        try:
            self.block = int(self.meta["chunk_grid"]["configuration"]["chunk_shape"][0])  # crops in one storage object
        except (LookupError, TypeError, ValueError) as error:
            raise _unusable(root, f"{type(error).__name__} {error}: restore the file") from None
        self.layout = layout(crops, self.block)
        wrong = differs(self.meta, self.layout)
        if wrong or not 0 < self.block <= MAX_BLOCK:
            raise _unusable(root, f"{wrong}: only what data_tools writes is read")
        self._index = lru_cache(INDEXES)(self.index)

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
        decode(self.root.read_range(self.name(block), start, length), length, crop)
        return True

    def index(self, block: int) -> np.ndarray:
        """(start, length) of each chunk of a storage object."""
        name, size = self.name(block), index_bytes(self.block)
        index = self.root.read_range(name, max(0, self.root.size(name) - size), size)
        return np.frombuffer(_checked(index, size, "the file's index"), "<u8").reshape(self.block, 2)


def index_bytes(block: int) -> int:
    return 16 * block + CRC


def decode(chunk: bytes, length: int, crop: np.ndarray) -> None:
    packed = _checked(chunk, length, "its chunk")
    raw, whole = (int.from_bytes(packed[at : at + 4], "little") for at in (4, 12))
    if (raw, whole) != (CROP_BYTES, len(packed)):
        raise ChunkError(f"its chunk says {raw} bytes out of {whole}, not {CROP_BYTES} out of {len(packed)}")
    try:
        BLOSC.decode(packed, out=crop)
    except RuntimeError as error:
        raise ChunkError(f"its chunk does not decode ({error})") from None


def _checked(data: bytes, size: int, what: str) -> np.ndarray:
    """Without its crc32c, which holds."""
    if len(data) < size or size <= CRC:
        raise ChunkError(f"the file ends {size - len(data)} bytes too early")
    body = np.frombuffer(data, np.uint8)[:-CRC]  # google_crc32c takes no memoryview
    if google_crc32c.value(body) != int.from_bytes(data[-CRC:], "little"):
        raise ChunkError(f"{what} fails its crc32c")
    return body


def _unusable(root: Folder, why: str) -> DatasetError:
    return DatasetError(one_line(f"{root.url}/{STORE}/zarr.json: {why}"))


def read_meta(root: Folder) -> Any:
    """zarr.json as it is."""
    try:
        return json.loads(root.read(f"{STORE}/zarr.json", MAX_META))
    except (ReadError, ValueError, RecursionError) as error:
        raise _unusable(root, f"{type(error).__name__} {error}: restore the file") from None


def layout(crops: int, block: int) -> dict[str, Any]:
    """zarr.json as data_tools has it written."""
    little, crc32c = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
    packing = {"typesize": 2, "cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0}
    sharding = {
        "chunk_shape": [1, *CROP_SHAPE],
        "codecs": [little, {"name": "blosc", "configuration": packing}, crc32c],
        "index_codecs": [little, crc32c],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [crops, *CROP_SHAPE],
        "data_type": "int16",
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [block, *CROP_SHAPE]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
        "dimension_names": ["crop", "lead", "sample"],
        "storage_transformers": [],
    }


def differs(found: Any, due: Any, name: str = "") -> str:
    """The first thing in `due` that `found` has otherwise, or nothing."""
    if isinstance(due, dict) and isinstance(found, dict):
        parts = ((found.get(key), value, f"{name}.{key}".lstrip(".")) for key, value in due.items())
    elif isinstance(due, list) and isinstance(found, list) and len(due) == len(found):
        parts = ((one, value, name) for one, value in zip(found, due, strict=True))
    else:
        return "" if found == due else f"{name} is {found!r} and not {due!r}"[:200]
    return next(filter(None, (differs(*part) for part in parts)), "")
