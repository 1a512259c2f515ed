"""Compute random numbers with SplitMix64. It is written here, because a library's generator may change
between versions."""

import numpy as np

GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio
M1, M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the multipliers of Stafford's variant 13


def mix(x: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's finaliser in place. It maps uint64 one to one, and each bit of the input affects
    all bits of the output."""
    # Only one scratch array is used, because allocating pages takes longer than the arithmetic
    shifted = x >> 30
    x ^= shifted
    x *= M1
    x ^= np.right_shift(x, 27, out=shifted)
    x *= M2
    x ^= np.right_shift(x, 31, out=shifted)
    return x
