"""Signals, parameters and one call, for the tests of augmentations.

Shapes: B crops, S views, L leads, T samples.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from omnilead.engine.data.augmentations import AugmentConfig
from omnilead.engine.data.augmentations.stage import Random, augment, draw_parameters
from omnilead.engine.data.augmentations.threekg import FROM_DIPOLE, ThreeKG
from omnilead.engine.data.torch_ops import TorchOps

FS_HZ, SAMPLES = 500.0, 2500
REFERENCE = Path(__file__).parents[3].parent / "shared" / "parity" / "masks_and_augs.npz"
PLAIN = AugmentConfig(rlm=0)
CROPS = np.array([7, 3, 1_000_000])
AUTHORS = [f"authors_{kind}" for kind in ("powerline", "emg", "wander", "shift")]
EVERYTHING = {
    "rlm": AugmentConfig(),
    **{kind: replace(PLAIN, noise=kind) for kind in ("powerline", "emg", "wander", "shift")},
    **{kind: replace(PLAIN, noise=kind) for kind in AUTHORS},
    "3 components": replace(PLAIN, noise="powerline", powerline_components=3, powerline_hz=60),
    "physio4": AugmentConfig(noise="physio4"),
    "physio4 per lead": AugmentConfig(noise="physio4", per_lead=True),
    "authors_physio4": AugmentConfig(noise="authors_physio4"),
    "refitted": replace(PLAIN, noise="physio3", dependency=True),
    "3kg": replace(PLAIN, threekg=ThreeKG()),
    "3kg without time mask": replace(PLAIN, threekg=ThreeKG(time_mask=0)),
    "all": AugmentConfig(noise="physio4", threekg=ThreeKG(), leads="3", padded=False),
    "two padded leads": AugmentConfig(noise="physio3", leads="2"),
    "one lead": AugmentConfig(noise="physio3", leads="1", padded=False),
}


def signal(crops=3, samples=SAMPLES, views=2):
    """[B, S, L, T] computed from a dipole, so that Einthoven's and Dower's relations hold."""
    rng = np.random.default_rng(1)
    dipole = rng.normal(size=(crops, views, 3, samples))
    return (FROM_DIPOLE @ dipole).astype(np.float32)


def drawn(config, seed, epoch_B, crop_B, samples=SAMPLES):
    return draw_parameters(config.stages, Random(seed, epoch_B, crop_B, samples=samples))


def parameters(config, crop_B=CROPS, samples=SAMPLES):
    return drawn(config, 5, np.full(crop_B.shape, 2), crop_B, samples)


def apply(x, p, config, exact=False, bank=None):
    """`exact`: in float64. `bank`: of white noise, else that of seed 5."""
    ops = TorchOps(x.shape[-1], FS_HZ, torch.device("cpu"), 5)
    if bank is not None:
        ops.bank = torch.from_numpy(bank)
    tensors = {name: torch.from_numpy(values) for name, values in p.items()}
    signal = torch.from_numpy(x.copy())
    if exact:
        signal = signal.double()
        ops.sample, ops.time_s, ops.mains_s = (
            axis.double() for axis in (ops.sample, ops.time_s, ops.mains_s)
        )
        for name, values in tensors.items():
            if values.is_floating_point():
                tensors[name] = values.double()
    return augment(signal, tensors, config.stages, ops).numpy()


def many(config, crops=4000):
    return drawn(config, 3, np.zeros(crops, int), np.arange(crops))


def assert_uniform(values, low, high):
    """Check quartiles and extremes, which 8,000 draws match within 2 % of the range."""
    assert low <= values.min() and values.max() <= high
    quarters = np.linspace(0, 1, 5)
    found = (np.quantile(values, quarters) - low) / (high - low)
    np.testing.assert_allclose(found, quarters, atol=0.02)


def correlation(rows):
    """The largest between two of the rows."""
    return float(np.abs(np.corrcoef(rows) - np.eye(len(rows))).max())
