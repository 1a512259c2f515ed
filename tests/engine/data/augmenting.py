"""Signals, parameters and one call, for the tests of augmentations.

Shapes: B crops, S views, L leads, T samples.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from omnilead.engine.data.augment import (
    AugmentConfig,
    Axis,
    ThreeKG,
    augment,
    time_axis,
)
from omnilead.engine.data.augment_draws import FROM_DIPOLE, draws, white

FS_HZ, SAMPLES = 500.0, 2500
REFERENCE = Path(__file__).parents[3].parent / "shared" / "parity" / "masks_and_augs.npz"
PLAIN = AugmentConfig(rlm=0)
CROPS = np.array([7, 3, 1_000_000])
Params = dict[str, np.ndarray]
EVERYTHING = {
    "rlm": AugmentConfig(),
    "powerline": replace(PLAIN, noise="powerline"),
    "powerline of 3 components": replace(
        PLAIN, noise="powerline", powerline_components=3, powerline_hz=60
    ),
    "emg": replace(PLAIN, noise="emg"),
    "wander": replace(PLAIN, noise="wander"),
    "shift": replace(PLAIN, noise="shift"),
    "authors powerline": replace(PLAIN, noise="authors_powerline"),
    "authors emg": replace(PLAIN, noise="authors_emg"),
    "authors wander": replace(PLAIN, noise="authors_wander"),
    "authors shift": replace(PLAIN, noise="authors_shift"),
    "physio4 and rlm": AugmentConfig(noise="physio4"),
    "physio4 per lead and rlm": AugmentConfig(noise="physio4", per_lead=True),
    "authors physio4 and rlm": AugmentConfig(noise="authors_physio4"),
    "physio3 with limb leads refitted": replace(PLAIN, noise="physio3", dependency=True),
    "3kg": replace(PLAIN, threekg=ThreeKG()),
    "3kg without time mask": replace(PLAIN, threekg=ThreeKG(time_mask=0)),
    "all at once, three leads": AugmentConfig(
        noise="physio4", threekg=ThreeKG(), leads="3", padded=False
    ),
    "physio3 and rlm, two padded leads": AugmentConfig(noise="physio3", leads="2"),
    "physio3 and rlm, one lead": AugmentConfig(noise="physio3", leads="1", padded=False),
}


def signal(crops: int = 3, samples: int = SAMPLES, views: int = 2) -> np.ndarray:
    """[B, S, L, T] computed from a dipole, so that Einthoven's and Dower's relations hold."""
    rng = np.random.default_rng(1)
    dipole = rng.normal(size=(crops, views, 3, samples))
    return (FROM_DIPOLE @ dipole).astype(np.float32)


def parameters(
    config: AugmentConfig, bank: np.ndarray, crop_B: np.ndarray = CROPS, samples: int = SAMPLES
) -> Params:
    p = draws(config, 5, np.full(crop_B.shape, 2), crop_B, samples=samples)
    if "white_start" in p:
        start = torch.from_numpy(p["white_start"])
        p["white"] = white(torch.from_numpy(bank), start, samples).numpy()
    return p


def apply(x: np.ndarray, p: Params, config: AugmentConfig, exact: bool = False) -> np.ndarray:
    """`exact`: in float64."""
    time = time_axis(x.shape[-1], FS_HZ)
    tensors = {name: torch.from_numpy(values) for name, values in p.items()}
    signal = torch.from_numpy(x.copy())
    if exact:
        time, signal = Axis(*(values.double() for values in time)), signal.double()
        for name, values in tensors.items():
            tensors[name] = values.double() if values.dtype == torch.float32 else values
    result: np.ndarray = augment(signal, tensors, config, time).numpy()
    return result


def many(config: AugmentConfig, crops: int = 4000) -> Params:
    return draws(config, 3, np.zeros(crops, int), np.arange(crops))


def assert_uniform(values: np.ndarray, low: float, high: float) -> None:
    """Check quartiles and extremes, which 8,000 draws match within 2 % of the range."""
    tolerance = 0.02 * (high - low)
    assert low <= values.min() and values.max() <= high
    quartiles = low + (high - low) * np.array([0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(
        np.quantile(values, [0, 0.25, 0.5, 0.75, 1]), quartiles, atol=tolerance
    )
