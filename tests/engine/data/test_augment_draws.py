"""Augmentation parameters: keys, distributions, lead masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from augmenting import (
    EVERYTHING,
    FS_HZ,
    SAMPLES,
    apply,
    assert_uniform,
    correlation,
    drawn,
    many,
    parameters,
    signal,
)

from omnilead.data_tools.ecg.constants import LEADS
from omnilead.engine.data.augmentations import AugmentConfig
from omnilead.engine.data.augmentations.noise import AmplitudeMv
from omnilead.engine.data.augmentations.stage import WHITE_BANK_SIZE
from omnilead.engine.data.augmentations.threekg import ThreeKG
from omnilead.engine.data.torch_ops import TorchOps


def test_draws_do_not_depend_on_the_batch():
    config = replace(EVERYTHING["physio4 per lead"], threekg=ThreeKG())
    epoch, crop = np.array([0, 0, 1, 3, 3]), np.array([5, 9, 5, 123_456_789, 0])
    whole = drawn(config, 11, epoch, crop)
    for rows in ([3, 1, 4, 0, 2], [2]):
        part = drawn(config, 11, epoch[rows], crop[rows])
        for name, values in whole.items():
            assert values.dtype in (np.float32, np.bool_) or name == "white_start"
            assert values.shape[:2] == (5, 2) and values.shape[2] in (1, 12)
            np.testing.assert_array_equal(part[name], values[rows])


def test_draws_differ_by_seed_epoch_crop_and_view():
    config = replace(EVERYTHING["physio4"], threekg=ThreeKG())
    one, other = (drawn(config, seed, np.array([0, 1, 0]), np.array([4, 4, 5])) for seed in (1, 2))
    for name in one.keys() - {"powerline_hz"}:
        rows = np.concatenate([one[name], other[name]]).reshape(12, -1)
        assert len(np.unique(rows, axis=0)) == 12, name


@pytest.mark.parametrize("per_lead", [False, True])
def test_the_papers_distributions(per_lead):
    largest = AmplitudeMv(powerline=0.5, emg=0.4, wander=0.3, shift=0.2)
    config = AugmentConfig(noise="physio4", per_lead=per_lead, amplitude_mv=largest)
    p = many(replace(config, powerline_components=2))
    shared = p.keys() - {"keep", "white_start"}
    assert {p[name].shape[2] for name in shared} == {12 if per_lead else 1}
    for name, low, high in (
        ("powerline_amplitude", 0, 0.5),
        ("powerline_phase", 0, 2 * np.pi),
        ("emg_amplitude", 0, 0.4),
        ("white_start", 0, WHITE_BANK_SIZE - SAMPLES),
        ("wander_amplitude", 0, 0.3),
        ("wander_phase", 0, 2 * np.pi),
        ("shift_amplitude", -0.2, 0.2),
    ):
        assert_uniform(p[name], low, high)
    assert_uniform(p["wander_hz"][..., 0], 0.01, 0.2)
    np.testing.assert_array_equal(p["powerline_phase"][..., 0], p["powerline_phase"][..., 1])
    assert np.unique(p["powerline_hz"]).tolist() == [50, 100]
    np.testing.assert_allclose(p["wander_hz"][..., 2], 3 * p["wander_hz"][..., 0], rtol=1e-6)
    assert abs(p["wander_gain"].mean() - 1) < 0.02 and abs(p["wander_gain"].std() - 0.5) < 0.02
    length = p["shift_stop"] - p["shift_start"]
    assert abs(length.mean() - 500) < 5 and abs(length.std() - 100) < 5
    assert p["shift_start"].min() >= 0 and p["shift_stop"].max() <= SAMPLES
    assert_uniform(p["shift_start"] / (SAMPLES - length), 0, 1)
    amplitudes = np.stack([p[name][..., 0].ravel() for name in p if name.endswith("amplitude")])
    # no two streams draw the same numbers
    assert correlation(amplitudes) < 0.05


def test_the_authors_distributions():
    p = many(AugmentConfig(noise="authors_physio4", amplitude_mv=AmplitudeMv(0.1, 0.1, 0.1, 0.1)))
    assert p["powerline_amplitude"].shape[2:] == (1, 1) and p["wander_hz"].shape[2:] == (1, 3)
    for name in ("emg_amplitude", "wander_gain", "shift_amplitude"):
        assert p[name].shape[2:] == (12, 1)
    assert np.unique(p["powerline_hz"]).tolist() == [50, 60]
    assert abs((p["powerline_hz"] == 60).mean() - 0.5) < 0.02
    assert_uniform(p["wander_hz"], 0.01, 0.2)
    assert correlation(p["wander_hz"].reshape(-1, 3).T) < 0.05
    sign = np.where(p["shift_amplitude"] > 0, 1, -1)
    assert abs((sign > 0).mean() - 0.5) < 0.01
    assert_uniform(sign - p["shift_amplitude"], 0, 0.1)
    assert np.ptp(sign - p["shift_amplitude"], axis=2).max() < 1e-6  # one U(0, max) for all leads


def test_white_noise_is_white_and_independent_between_leads():
    p = drawn(AugmentConfig(noise="emg"), 5, np.zeros(20, int), np.arange(20))
    start = torch.from_numpy(p["white_start"])
    ops = TorchOps(SAMPLES, FS_HZ, torch.device("cpu"), 5)
    noise = ops.white_noise(start).numpy()
    assert noise.shape == (20, 2, 12, SAMPLES)
    assert abs(noise.mean()) < 0.005 and abs(noise.std() - 1) < 0.005
    assert abs((noise**4).mean() - 3) < 0.05
    assert abs((noise[..., 1:] * noise[..., :-1]).mean()) < 0.005
    assert correlation(noise[0].reshape(24, SAMPLES)) < 0.12
    np.testing.assert_array_equal(noise[7, 1, 3], ops.bank[start[7, 1, 3, 0] :][:SAMPLES])


def test_a_gain_is_log_uniform_for_each_lead_of_each_half():
    p = many(AugmentConfig(rlm=0, gain=1.0))
    assert_uniform(np.log2(p["gain"]), -1, 1)
    assert correlation(p["gain"].reshape(-1, 24).T) < 0.08
    x = signal(4000, samples=2)
    np.testing.assert_array_equal(apply(x, p, AugmentConfig(rlm=0, gain=1.0)), x * p["gain"])


# Random lead masking


def test_masked_leads_are_exactly_zero_and_the_others_unchanged():
    config = AugmentConfig(noise="physio4", threekg=ThreeKG(time_mask=0))
    p = parameters(config)
    bare = {name: values for name, values in p.items() if name != "keep"}
    masked, whole = apply(signal(), p, config), apply(signal(), bare, config)
    np.testing.assert_array_equal(masked, np.where(p["keep"], whole, 0))
    assert np.all((masked == 0).all(axis=-1) == ~p["keep"][..., 0])


def test_rlm_masks_half_of_the_leads_independently_for_each_half():
    keep = many(AugmentConfig())["keep"][..., 0]
    assert abs(keep.mean() - 0.5) < 0.01 and np.abs(keep.mean(axis=0) - 0.5).max() < 0.04
    assert correlation(keep.reshape(len(keep), 24).T) < 0.08
    assert abs(many(AugmentConfig(rlm=0.2))["keep"].mean() - 0.8) < 0.01
    assert "keep" not in many(AugmentConfig(rlm=0), 4)


@pytest.mark.parametrize("leads", range(1, 13))
@pytest.mark.parametrize("padded", [True, False])
def test_keep_one_on_any_number_of_leads(leads, padded):
    config = AugmentConfig(leads=LEADS[:leads], padded=padded)
    free = many(config)["keep"][..., 0]
    kept = many(replace(config, rlm_keep_one=True))["keep"][..., 0]
    assert free.shape[2] == (12 if padded else leads) and not free[..., leads:].any()
    nothing = ~free.any(axis=-1)
    assert abs(nothing.mean() - 0.5**leads) < 0.02
    assert kept.any(axis=-1).all()
    np.testing.assert_array_equal(kept[~nothing], free[~nothing])
    assert (kept[nothing].sum(axis=-1) == 1).all()
    sure = many(replace(config, rlm=1, rlm_keep_one=True))["keep"][..., :leads, 0]
    assert (sure.sum(axis=-1) == 1).all()
    assert np.abs(sure.mean(axis=(0, 1)) - 1 / leads).max() < 0.03
