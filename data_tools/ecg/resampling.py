"""Resample ECGs to 500 Hz or from 500 Hz, with a polyphase FIR filter against aliasing.

up, down = rate_ratio(257.0)              # ReadError if the rate cannot be resampled
resample(x, up, down)                     # along axis 1
"""

from fractions import Fraction
from functools import lru_cache

import numpy as np

from ..io.errors import ReadError
from .constants import FS_HZ as FS_HZ

RATE_RANGE_HZ = (50.0, 2000.0)
# Limit for the factors `up` and `down`, with which the length of the polyphase filter grows
MAX_RATE_RATIO = 2000
TAPS_PER_PHASE, KAISER_BETA = 10, 5.0


@lru_cache(maxsize=256)
def rate_ratio(fs_hz: float) -> tuple[int, int]:
    """Returns (up, down), with 500 Hz = fs_hz * up / down. Raises a ReadError if the rate is out of
    range or the factors are too large."""
    if not RATE_RANGE_HZ[0] <= fs_hz <= RATE_RANGE_HZ[1]:
        raise ReadError(
            "sampling rate", "{} Hz: {:g} to {:g} Hz can be read".format(fs_hz, *RATE_RANGE_HZ)
        )
    ratio = Fraction(FS_HZ) / Fraction(fs_hz).limit_denominator(100)
    if max(ratio.numerator, ratio.denominator) > MAX_RATE_RATIO:
        raise ReadError(
            "sampling rate",
            f"{fs_hz} Hz to 500 Hz needs factors {ratio.numerator} / {ratio.denominator}, but {MAX_RATE_RATIO} is the "
            "largest that can be used",
        )
    return ratio.numerator, ratio.denominator


@lru_cache(maxsize=16)
def _filter(up: int, down: int) -> np.ndarray:
    # Imported here, because the import takes half a second and archives at 500 Hz do not need it
    from scipy.signal import firwin

    half = TAPS_PER_PHASE * max(up, down)
    taps: np.ndarray = (
        firwin(2 * half + 1, 1.0 / max(up, down), window=("kaiser", KAISER_BETA)) * up
    )
    return taps


def resample(x: np.ndarray, up: int, down: int) -> np.ndarray:
    """Return `x` resampled along axis 1: sample k of the result lies at position k * down / up of `x`.
    The signal is padded with its first and last value, to avoid a step at its start and end."""
    from scipy.signal import upfirdn

    taps = _filter(up, down)
    reach = -(-(len(taps) // 2) // up)
    reach += -reach % down  # rounded up to a multiple of `down`
    padded = np.pad(x, ((0, 0), (reach, reach)), mode="edge")
    # Position, at the up-sampled rate, of the filter's output for the first sample of `x`. Leading zero
    # taps shift it to the next multiple of `down`, because upfirdn returns only every `down`-th position
    delay = reach * up + len(taps) // 2
    lead_in = -delay % down
    filtered: np.ndarray = upfirdn(
        np.concatenate([np.zeros(lead_in), taps]), padded, up, down, axis=1
    )
    first = (delay + lead_in) // down
    return filtered[:, first : first + -(-x.shape[1] * up // down)]
