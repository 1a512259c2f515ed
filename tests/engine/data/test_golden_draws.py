"""Golden values of augmentation parameters and of the validation split: resumed runs and published
tables depend on them."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from omnilead.engine.data.augmentations import AugmentConfig
from omnilead.engine.data.augmentations.threekg import ThreeKG
from omnilead.engine.data.augmenter import Augmenter
from omnilead.engine.data.order import Places
from omnilead.engine.data.patients import uniform_hashes

PLACES = Places(np.array([0, 0, 1]), np.array([5, 10**6, 7]), np.array([0, 3, 40]))
SUMS = {
    "paper": (
        AugmentConfig(noise="physio4", per_lead=True, powerline_components=2),
        {
            "powerline_amplitude": 0.771910887,
            "powerline_phase": -6.59074614,
            "powerline_hz": -33.8371015,
            "emg_amplitude": 1.12421435,
            "white_start": -5512062.67,
            "wander_amplitude": 1.18006728,
            "wander_phase": 26.8292115,
            "wander_hz": 0.858500565,
            "wander_gain": 5.65337726,
            "shift_amplitude": 0.566217176,
            "shift_start": 6313.42603,
            "shift_stop": 7554.8524,
            "keep": -0.0598909748,
            "start": 2384.63871,
        },
    ),
    "authors": (
        AugmentConfig(noise="authors_physio4", leads="I,II,V3", rlm_keep_one=True),
        {
            "powerline_amplitude": 0.0334603204,
            "powerline_phase": 0.47758228,
            "powerline_hz": -2.92433628,
            "emg_amplitude": 1.12421435,
            "white_start": -5512062.67,
            "wander_amplitude": -0.0228110781,
            "wander_phase": -0.578088999,
            "wander_hz": -0.057981155,
            "wander_gain": 5.65337726,
            "shift_amplitude": -5.81436477,
            "shift_start": 110.534304,
            "shift_stop": -81.3267684,
            "keep": 6.72067355,
            "start": 2384.63871,
        },
    ),
    "3kg": (
        AugmentConfig(threekg=ThreeKG()),
        {
            "matrix": -8.29171117,
            "window_start": 2137.64563,
            "window_stop": 3657.56509,
            "window_wrap": 617.726168,
            "keep": -0.0598909748,
            "start": 2384.63871,
        },
    ),
}


@pytest.mark.parametrize(("config", "expected"), SUMS.values(), ids=SUMS)
def test_augmentation_parameters_never_change(config, expected):
    """Weighted sums, so that swapping two values is detected."""
    p = Augmenter(config, "window", 11, torch.device("cpu")).draw_parameters(PLACES)
    seen = {
        name: float(values.astype(float).ravel() @ np.cos(np.arange(values.size)))
        for name, values in p.items()
    }
    assert seen == pytest.approx(expected, rel=1e-5)


def test_the_validation_split_never_changes():
    assert uniform_hashes(pa.array(["georgia/E00001", "ptb-xl/17"])).tolist() == [
        0.40636932224432776,
        0.16880769554133535,
    ]
