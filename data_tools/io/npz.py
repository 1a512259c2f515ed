"""Read arrays from untrusted .npy and .npz files, without pickle and without more memory than the file
can fill.

numpy allocates whatever the header of an .npz member asks for; here the header is checked against
the size of the file first.
"""

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

# Limits for one array in an .npz file, where a few compressed bytes can expand to any size. Compressed
# ECGs take at least a tenth of their size, ECGs with padding at least a hundredth
MAX_ARRAY_BYTES = 2**32
ANY_RATIO_BYTES, MAX_COMPRESSION = 2**26, 200
HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class ArrayError(ValueError):
    """A file of arrays cannot be read. The message says why in one line, without the file's name."""


@contextmanager
def _array_errors() -> Iterator[None]:
    """Turns all errors that numpy's parsers raise in the block into ArrayErrors."""
    try:
        yield
    except Exception as error:
        text = " ".join(f"cannot be read as numbers: {str(error) or type(error).__name__}".split())
        raise ArrayError(text[:300]) from None


@_array_errors()
def open_npy(path: Path) -> np.ndarray:
    """Memory-maps a .npy file. numpy itself compares the file's size with its header."""
    mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


@_array_errors()
def npz_names(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


@_array_errors()
def npz_array(path: Path, name: str) -> np.ndarray:
    with zipfile.ZipFile(path) as archive:
        member = name if name in archive.namelist() else f"{name}.npy"
        info = archive.getinfo(member)
        packed = max(ANY_RATIO_BYTES, MAX_COMPRESSION * info.compress_size)
        with archive.open(info) as file:
            _check_header(file, min(info.file_size, MAX_ARRAY_BYTES, packed))
        with archive.open(info) as file:
            values: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return values


def _check_header(file: Any, size: int) -> None:
    version = np.lib.format.read_magic(file)
    if version not in HEADER_READERS:
        raise ValueError(f"version {version} of the .npy format is not supported")
    shape, _, kind = HEADER_READERS[version](file)
    if min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize > size:
        raise ValueError(
            f"its header announces {list(shape)} {kind}, more than the {size} bytes that are accepted"
        )
