"""What every hospital format is: a test whether a file is of it, and a decoder."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Decoded(NamedTuple):
    """An ECG decoded from a vendor's file."""

    signals: dict[str, np.ndarray]  # microvolts by lead name; NaN: not measured
    fs_hz: float
    patient: str | None = None
    age: float | None = None  # years
    sex: str | None = None
    warnings: tuple[tuple[str, str], ...] = ()


class Format(NamedTuple):
    """A file format with one ECG per file."""

    looks_like: Callable[[bytes, str], bool]  # the file's first 4 KiB and its name; never raises
    decode: Callable[[bytes], Decoded]  # the whole file; a ReadError refuses it
    max_bytes: int
