"""Read crops from the zarr copy without zarr-python. A chunk takes 77 us, nearly all of it in Blosc;
with zarr-python it takes 0.5 to 2 ms.

    store.zarr/c/<k>/0/0: 1,024 crops, one chunk each | index: (start, length) of each | crc32c of
    the index chunk: Blosc's 16-byte header with raw and packed length | LZ4 of shuffled bits |
    crc32c of everything before

Only the layout that data_tools writes is supported; a test compares it with zarr-python. Every
length is checked before memory is allocated or written.
"""

import json
from functools import lru_cache
from typing import Any

import google_crc32c
import numcodecs.blosc
import numpy as np

from ..ecg.constants import CROP_BYTES, CROP_SHAPE, LEADS
from ..io.errors import ChunkError, DatasetError, ReadError, one_line
from ..io.storage import Folder

# With Blosc's own threads, the threads that read chunks would wait for a lock of Blosc
numcodecs.blosc.use_threads = False
BLOSC = numcodecs.blosc.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.blosc.BITSHUFFLE)
BLOSC_HEADER, CRC = 16, 4
# The largest chunk is a crop that Blosc cannot compress and stores as it is
MAX_CHUNK_BYTES = BLOSC_HEADER + CROP_BYTES + CRC
CACHED_INDEXES = 256  # indexes that stay in memory, one per storage object, 16 kB each
MAX_ZARR_JSON_BYTES = 2**20
MAX_CROPS_PER_OBJECT = 2**20  # crops in a storage object, whose index then takes 16 MB
# These attributes tell other programs what the zarr copy holds, and where the roles of its crops are
ZARR_ATTRIBUTES = {
    "leads": list(LEADS),
    "unit": "uV",
    "fs_hz": 500,
    "roles": {"file": "samples.parquet", "columns": ["pretrain", "dx_role", "id_role"]},
}
ABSENT_CHUNK = 2**64 - 1  # start and length, in the index, of a chunk that does not exist


class Chunks:
    """Reads chunks of the zarr copy in the folder `store`. Several threads may call `read` at once."""

    def __init__(self, root: Folder, store: str, crops: int) -> None:
        self.root = root
        self.store = store
        file = f"{root.url}/{store}/zarr.json"
        try:
            self.meta = json.loads(root.read(f"{store}/zarr.json", MAX_ZARR_JSON_BYTES))
            grid = self.meta["chunk_grid"]["configuration"]
            self.block = int(grid["chunk_shape"][0])  # crops in one storage object
        except (ReadError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise DatasetError(
                one_line(f"{file}: {type(error).__name__} {error}: restore the file")
            ) from None
        self.layout = zarr_json(crops, self.block)
        # Attributes are not compared, because users may add some
        names = self.layout.keys() - {"attributes"}
        wrong = [
            f"{name} is {self.meta.get(name)}"
            for name in sorted(names)
            if self.meta.get(name) != self.layout[name]
        ]
        if wrong or not 0 < self.block <= MAX_CROPS_PER_OBJECT:
            raise DatasetError(
                one_line(
                    f"{file}: not the layout that data_tools writes: {wrong[:1]}: restore the file"
                )
            )
        self._index = lru_cache(CACHED_INDEXES)(self.index)

    def object_name(self, block: int) -> str:
        return f"{self.store}/c/{block}/0/0"

    def read(self, row: int, crop: np.ndarray) -> None:
        """Reads the samples of a row into `crop`."""
        block, slot = divmod(row, self.block)
        start, length = self._index(block)[slot].tolist()
        if (
            not BLOSC_HEADER + CRC <= length <= MAX_CHUNK_BYTES
            or start > MAX_CHUNK_BYTES * self.block
        ):
            raise ChunkError(
                f"its index states an impossible chunk of {length} bytes at byte {start}"
            )
        decode_chunk(self.root.read_range(self.object_name(block), start, length), length, crop)

    def index(self, block: int) -> np.ndarray:
        """Returns (start, length) of each chunk of a storage object, as its index states them."""
        name, size = self.object_name(block), index_bytes(self.block)
        index = self.root.read_range(name, max(0, self.root.size(name) - size), size)
        return np.frombuffer(_check_crc(index, size, "the file's index"), "<u8").reshape(
            self.block, 2
        )


def index_bytes(block: int) -> int:
    return 16 * block + CRC


def decode_chunk(chunk: bytes, length: int, crop: np.ndarray) -> None:
    packed = _check_crc(chunk, length, "its chunk")
    raw, whole = (int.from_bytes(packed[start : start + 4], "little") for start in (4, 12))
    if (raw, whole) != (CROP_BYTES, len(packed)):
        raise ChunkError(
            f"its chunk states a size of {raw} bytes, {whole} compressed, instead of {CROP_BYTES} and "
            f"{len(packed)}"
        )
    try:
        BLOSC.decode(packed, out=crop)
    except RuntimeError as error:
        raise ChunkError(f"its chunk cannot be decoded ({error})") from None


def _check_crc(data: bytes, size: int, what: str) -> np.ndarray:
    """Checks the crc32c at the end of the data, which should have `size` bytes. Returns the data
    without it. Errors call the data `what`."""
    if len(data) < size or size <= CRC:
        raise ChunkError(f"the file ends {size - len(data)} bytes too early")
    body = np.frombuffer(data, np.uint8)[:-CRC]  # google_crc32c takes no memoryview
    if google_crc32c.value(body) != int.from_bytes(data[-CRC:], "little"):
        raise ChunkError(f"{what} fails its crc32c")
    return body


def zarr_json(crops: int, block: int) -> dict[str, Any]:
    """Returns the contents of zarr.json, in the same order as zarr-python writes them."""
    little, crc32c = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
    packing = {"typesize": 2, "cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0}
    sharding = {
        "chunk_shape": [1, *CROP_SHAPE],
        "codecs": [little, {"name": "blosc", "configuration": packing}, crc32c],
        "index_codecs": [little, crc32c],
        "index_location": "end",
    }
    return {
        "shape": [crops, *CROP_SHAPE],
        "data_type": "int16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [block, *CROP_SHAPE]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": ZARR_ATTRIBUTES,
        "dimension_names": ["crop", "lead", "sample"],
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }
