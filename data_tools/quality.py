"""What is odd about a finished crop, as flags: nothing here changes a sample or refuses one.

`flat:V1` a lead that never changes; `saturated` clipped at +-32.767 mV; `large` beyond +-20 mV, more than hearts give;
`einthoven` limb leads that contradict each other by more than 20 uV (swapped or mislabelled leads, or a bad resampling).
"""

import numpy as np

from data_tools.record import LEADS

LARGE_UV, EINTHOVEN_UV = 20_000, 20
# Twice (derived - stored) of III, aVR, aVL and aVF, from I, II, III, aVR, aVL, aVF: doubled, so that there are no halves.
_TWICE_RESIDUAL = np.array(
    [[-2, 2, -2, 0, 0, 0], [-1, -1, 0, -2, 0, 0], [2, -1, 0, 0, -2, 0], [-1, 2, 0, 0, 0, -2]], np.float32
)


def flags_of(crop: np.ndarray, missing: list[bool]) -> list[str]:
    """`crop`: the part that is signal. `missing`: which leads were not measured, and are zeros."""
    low, high = crop.min(axis=1).tolist(), crop.max(axis=1).tolist()  # of twelve numbers Python is faster than numpy
    flags = [f"flat:{lead}" for lead, a, b, gone in zip(LEADS, low, high, missing, strict=True) if a == b and not gone]
    if max(high) > LARGE_UV or min(low) < -LARGE_UV:
        flags.append("large")
    if _contradict(crop, missing):
        flags.append("einthoven")
    return flags


def _contradict(crop: np.ndarray, missing: list[bool]) -> bool:
    """III = II - I, and the three augmented leads follow from I and II; only what is there can be compared."""
    if any(missing[:2]):
        return False
    twice_residual = _TWICE_RESIDUAL @ crop[:6].astype(np.float32)  # whole numbers below 2**24: exact
    if any(missing[2:6]):
        twice_residual[missing[2:6]] = 0
    return bool(max(twice_residual.max(), -twice_residual.min()) > 2 * EINTHOVEN_UV)
