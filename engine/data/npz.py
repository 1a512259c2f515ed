"""Arrays from .npy and .npz files of unknown origin: no pickle, and no more memory than the file has bytes to fill it with.

numpy believes a header and allocates what it says; here it is held against the size of the file first.
"""

import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

MAX_BYTES = 2**32  # of one array in an .npz, which a few compressed bytes can unfold to
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class ArrayError(ValueError):
    """One line without the file's name."""


def open_npy(path: Path) -> np.ndarray:
    """Mapped, not read."""
    try:
        with open(path, "rb") as file:
            _check_header(file, path.stat().st_size)
        mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return mapped
    except Exception as error:  # of many kinds, whatever a damaged header makes of numpy's parsers
        raise _refused(error) from None


def npz_names(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except Exception as error:
        raise _refused(error) from None


def load_npz(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """All arrays, or those named."""
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if names is None or name in names:
                    with archive.open(info) as file:
                        _check_header(file, min(info.file_size, MAX_BYTES))
                    with archive.open(info) as file:
                        found[name] = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:
        raise _refused(error) from None
    return found


def _check_header(file: Any, size: int) -> None:
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"version {version} of the format is not read")
    shape, _, kind = HEADERS[version](file)
    if min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize > size:
        raise ValueError(f"its header says {list(shape)} of {kind}, and there is room for {size} bytes")


def _refused(error: Exception) -> ArrayError:
    return ArrayError(" ".join(f"cannot be read as numbers: {str(error) or type(error).__name__}".split())[:300])
