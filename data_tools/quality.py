"""What is odd about a finished crop, as flags: nothing here changes a sample or refuses one.

`flat:V1` a lead that never changes; `saturated` clipped at +-32.767 mV; `large` beyond +-20 mV, more than hearts give;
`einthoven` limb leads that contradict each other by more than 20 uV (swapped or mislabelled leads, or a bad resampling).
"""

import numpy as np

LARGE_UV, EINTHOVEN_UV = 20_000, 20
# Twice (derived - stored) of III, aVR, aVL and aVF, from I, II, III, aVR, aVL, aVF: doubled, so that there are no halves.
_TWICE_RESIDUAL = np.array(
    [[-2, 2, -2, 0, 0, 0], [-1, -1, 0, -2, 0, 0], [2, -1, 0, 0, -2, 0], [-1, 2, 0, 0, 0, -2]], np.float32
)


def amplitude_flags(low: np.ndarray, high: np.ndarray) -> list[str]:
    return ["large"] if int(high.max()) > LARGE_UV or int(low.min()) < -LARGE_UV else []


def einthoven_flags(crop: np.ndarray, missing: np.ndarray) -> list[str]:
    """III = II - I, and the three augmented leads follow from I and II; only what is there can be compared."""
    if missing[:2].any():
        return []
    twice_residual = _TWICE_RESIDUAL @ crop[:6].astype(np.float32)  # whole numbers below 2**24: exact
    if missing[2:6].any():
        twice_residual[missing[2:6]] = 0
    return ["einthoven"] if max(twice_residual.max(), -twice_residual.min()) > 2 * EINTHOVEN_UV else []
