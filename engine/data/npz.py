"""Arrays from untrusted .npy and .npz files: no pickle, and no more memory than the file can fill.

numpy allocates whatever a header says; here the header is checked against the size of the file first.
"""

import math
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

MAX_BYTES = 2**32  # of one array in an .npz, which a few compressed bytes can unfold to
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class ArrayError(ValueError):
    """One line without the file's name."""


@contextmanager
def _array_errors() -> Iterator[None]:
    """A damaged file raises errors of many kinds in numpy's parsers."""
    try:
        yield
    except Exception as error:
        text = " ".join(f"cannot be read as numbers: {str(error) or type(error).__name__}".split())
        raise ArrayError(text[:300]) from None


@_array_errors()
def open_npy(path: Path) -> np.ndarray:
    """Mapped, not read."""
    with open(path, "rb") as file:
        _check_header(file, path.stat().st_size)
    mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


@_array_errors()
def npz_names(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


@_array_errors()
def load_npz(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """All arrays, or those named."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if names is None or name in names:
                with archive.open(info) as file:
                    _check_header(file, min(info.file_size, MAX_BYTES))
                with archive.open(info) as file:
                    found[name] = np.lib.format.read_array(file, allow_pickle=False)
    return found


def _check_header(file: Any, size: int) -> None:
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"version {version} of the format is not read")
    shape, _, kind = HEADERS[version](file)
    if min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize > size:
        raise ValueError(f"its header says {list(shape)} of {kind}, and there is room for {size} bytes")
