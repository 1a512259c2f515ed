"""Resampling to 500 Hz and from it: polyphase FIR, anti-aliased.

up, down = rate_ratio(257.0)              # ReadError if there is no such ratio
resample(x, up, down)                     # along axis 1
"""

from fractions import Fraction
from functools import lru_cache

import numpy as np

from ..io.errors import ReadError
from .constants import FS_HZ as FS_HZ

RATE_RANGE_HZ = (50.0, 2000.0)
MAX_RATE_RATIO = 2000  # limit for `up` and `down`: the polyphase filter's length grows with them
TAPS_PER_PHASE, KAISER_BETA = 10, 5.0


@lru_cache(maxsize=256)
def rate_ratio(fs_hz: float) -> tuple[int, int]:
    """Returns (up, down), the factors from this rate to 500 Hz; a ReadError if there are none."""
    if not RATE_RANGE_HZ[0] <= fs_hz <= RATE_RANGE_HZ[1]:
        raise ReadError(
            "sampling rate", "{} Hz: {:g} to {:g} is read".format(fs_hz, *RATE_RANGE_HZ)
        )
    ratio = Fraction(FS_HZ) / Fraction(fs_hz).limit_denominator(100)
    if max(ratio.numerator, ratio.denominator) > MAX_RATE_RATIO:
        raise ReadError(
            "sampling rate", f"{fs_hz} Hz has no ratio to 500 Hz within {MAX_RATE_RATIO}"
        )
    return ratio.numerator, ratio.denominator


@lru_cache(maxsize=16)
def _filter(up: int, down: int) -> np.ndarray:
    from scipy.signal import firwin  # half a second, which archives at 500 Hz need not wait for

    half = TAPS_PER_PHASE * max(up, down)
    taps: np.ndarray = (
        firwin(2 * half + 1, 1.0 / max(up, down), window=("kaiser", KAISER_BETA)) * up
    )
    return taps


def resample(x: np.ndarray, up: int, down: int) -> np.ndarray:
    """Resample; output k is at source time k * down / up. Edge values pad the signal, to avoid a
    step at its start and end."""
    from scipy.signal import upfirdn

    taps = _filter(up, down)
    reach = -(-(len(taps) // 2) // up)
    reach += -reach % down  # to a whole number of phases
    padded = np.pad(x, ((0, 0), (reach, reach)), mode="edge")
    delay = reach * up + len(taps) // 2  # of the first output, in up-sampled samples
    lead_in = -delay % down  # zero taps that align it with the output grid
    filtered: np.ndarray = upfirdn(
        np.concatenate([np.zeros(lead_in), taps]), padded, up, down, axis=1
    )
    first = (delay + lead_in) // down
    return filtered[:, first : first + -(-x.shape[1] * up // down)]
