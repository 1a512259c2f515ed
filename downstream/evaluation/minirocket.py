"""MiniRocket (Dempster, Schmidt and Webb 2021): random but nearly fixed convolutions of an ECG.

    rocket = MiniRocket(windows_RLT, leads=(0, 6))      # at 100 Hz; the windows give the thresholds
    rocket(x_RLT)                                       # [R, 9996]

84 kernels of 9 taps, three of them 2 and six -1, at up to 32 dilations; each pair of kernel and
dilation sums a random subset of the leads. A feature is the share of samples at which that
convolution is above a threshold: what it gives at a random sample of a random window. Every second
kernel counts only samples for which no tap is beyond the window. Written from the paper.
"""

from collections import Counter
from hashlib import sha256
from itertools import combinations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..tasks.metrics import Array

REACH = 4  # taps to each side
TWOS = list(combinations(range(2 * REACH + 1), 3))
KERNELS = len(TWOS)
THRESHOLDS = 119  # of each kernel: 9,996 in all
DILATIONS = 32
MOST_LEADS = 9  # in a sum


class MiniRocket:
    def __init__(self, windows_RLT: Tensor, leads: tuple[int, ...]) -> None:
        rng = np.random.default_rng(0)
        channels, samples = windows_RLT.shape[1:]
        number = np.arange(THRESHOLDS) * DILATIONS // THRESHOLDS
        longest = (samples - 1) / (2 * REACH)
        dilation_F = longest ** (number / (DILATIONS - 1))
        counts = Counter(dilation_F.astype(int).tolist())
        self.convolutions: list[tuple[int, Tensor, Tensor]] = []  # dilation, weights, thresholds
        for dilation, count in counts.items():
            weight_KLT = torch.from_numpy(_weights(rng, channels, leads)).float()
            windows_K = rng.integers(len(windows_RLT), size=KERNELS)
            y_KKT = _convolved(windows_RLT[windows_K], dilation, weight_KLT)
            sample_KF = rng.integers(samples, size=(KERNELS, count))
            y_KT = y_KKT.diagonal().T
            threshold_KF = y_KT.gather(1, torch.from_numpy(sample_KF))
            self.convolutions.append((dilation, weight_KLT, threshold_KF))
        numbers = sha256()
        for _, weight_KLT, threshold_KF in self.convolutions:
            for part in (weight_KLT, threshold_KF):
                numbers.update(part.numpy().tobytes())
        self.digest = numbers.hexdigest()

    def __call__(self, x_RLT: Tensor) -> Tensor:
        shares = []
        for dilation, weight_KLT, threshold_KF in self.convolutions:
            y_RKT = _convolved(x_RLT, dilation, weight_KLT)
            for side in (0, 1):
                edge = side * dilation * REACH
                some_RKT = y_RKT[:, side::2, edge : y_RKT.shape[2] - edge]
                for threshold_K in threshold_KF[side::2].T:
                    above_RKT = some_RKT > threshold_K[:, None]
                    shares.append(above_RKT.float().mean(2))
        return torch.cat(shares, 1)


def _weights(rng: np.random.Generator, channels: int, leads: tuple[int, ...]) -> Array:
    """[KERNELS, channels, taps]: 0 in leads that a kernel does not sum."""
    weight_KLT = np.zeros((KERNELS, channels, 2 * REACH + 1))
    for weight_LT, twos in zip(weight_KLT, TWOS, strict=True):
        count = int(2 ** rng.uniform(0, np.log2(min(len(leads), MOST_LEADS) + 1)))
        summed = rng.permutation(leads)[:count]
        weight_LT[summed] = -1
        weight_LT[summed[:, None], twos] = 2
    return weight_KLT


def _convolved(x_RLT: Tensor, dilation: int, weight_KLT: Tensor) -> Tensor:
    return F.conv1d(x_RLT, weight_KLT, dilation=dilation, padding=dilation * REACH)
