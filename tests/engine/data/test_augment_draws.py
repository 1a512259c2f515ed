"""Augmentation parameters: keys, distributions, lead masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from augmenting import (
    EVERYTHING,
    SAMPLES,
    apply,
    assert_uniform,
    many,
    parameters,
    signal,
)

from omnilead.engine.common import LEADS
from omnilead.engine.data.augment import (
    AmplitudeMv,
    AugmentConfig,
    ThreeKG,
)
from omnilead.engine.data.augment_draws import (
    WHITE_BANK,
    draws,
    white,
)


def test_draws_do_not_depend_on_the_batch(bank: np.ndarray) -> None:
    config = replace(EVERYTHING["physio4 per lead and rlm"], threekg=ThreeKG())
    epoch, crop = np.array([0, 0, 1, 3, 3]), np.array([5, 9, 5, 123_456_789, 0])
    whole, order = draws(config, 11, epoch, crop), np.array([3, 1, 4, 0, 2])
    permuted = draws(config, 11, epoch[order], crop[order])
    parts = [draws(config, 11, epoch[i : i + 1], crop[i : i + 1]) for i in range(5)]
    for name, values in whole.items():
        assert values.dtype in (np.float32, np.bool_) or name == "white_start"
        assert values.shape[:2] == (5, 2) and (values.shape[2] in (1, 12))
        np.testing.assert_array_equal(permuted[name], values[order])
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)


def test_draws_differ_by_seed_epoch_crop_and_view() -> None:
    config = replace(EVERYTHING["physio4 and rlm"], threekg=ThreeKG())
    one = draws(config, 1, np.array([0, 1, 0]), np.array([4, 4, 5]))
    other = draws(config, 2, np.array([0, 1, 0]), np.array([4, 4, 5]))
    for name, values in one.items():
        if name == "powerline_hz":
            continue
        rows = [*values.reshape(6, -1), other[name][0, 0].ravel()]
        assert len({row.tobytes() for row in rows}) == 7, name


def test_draws_of_a_lead_do_not_depend_on_the_other_leads() -> None:
    twelve = draws(AugmentConfig(noise="physio4", per_lead=True), 1, np.zeros(9, int), np.arange(9))
    three = draws(
        AugmentConfig(noise="physio4", per_lead=True, leads="3", padded=False),
        1,
        np.zeros(9, int),
        np.arange(9),
    )
    for name, values in three.items():
        np.testing.assert_array_equal(values, twelve[name][:, :, [0, 1, 7]])


@pytest.mark.parametrize("per_lead", [False, True])
def test_the_papers_distributions(per_lead: bool) -> None:
    largest = AmplitudeMv(powerline=0.5, emg=0.4, wander=0.3, shift=0.2)
    p = many(
        AugmentConfig(
            noise="physio4", per_lead=per_lead, amplitude_mv=largest, powerline_components=2
        )
    )
    leads = 12 if per_lead else 1
    assert {
        values.shape[2] for name, values in p.items() if name not in ("keep", "white_start")
    } == {leads}
    assert_uniform(p["powerline_amplitude"], 0, 0.5)
    assert_uniform(p["powerline_phase"], 0, 2 * np.pi)
    np.testing.assert_array_equal(p["powerline_phase"][..., 0], p["powerline_phase"][..., 1])
    assert np.unique(p["powerline_hz"]).tolist() == [50, 100]
    assert_uniform(p["emg_amplitude"], 0, 0.4)
    assert_uniform(p["white_start"], 0, WHITE_BANK - SAMPLES)
    assert_uniform(p["wander_amplitude"], 0, 0.3)
    assert_uniform(p["wander_phase"], 0, 2 * np.pi)
    assert_uniform(p["wander_hz"][..., 0], 0.01, 0.2)
    np.testing.assert_allclose(p["wander_hz"][..., 2], 3 * p["wander_hz"][..., 0], rtol=1e-6)
    assert abs(p["wander_gain"].mean() - 1) < 0.02 and abs(p["wander_gain"].std() - 0.5) < 0.02
    assert_uniform(p["shift_amplitude"], -0.2, 0.2)
    length = p["shift_stop"] - p["shift_start"]
    assert abs(length.mean() - 500) < 5 and abs(length.std() - 100) < 5
    assert p["shift_start"].min() >= 0 and p["shift_stop"].max() <= SAMPLES
    assert_uniform(p["shift_start"] / (SAMPLES - length), 0, 1)
    amplitudes = np.stack([p[name][..., 0].ravel() for name in p if name.endswith("amplitude")])
    assert (
        np.abs(np.corrcoef(amplitudes) - np.eye(4)).max() < 0.05
    )  # no two streams draw the same numbers


def test_the_authors_distributions() -> None:
    p = many(AugmentConfig(noise="authors_physio4", amplitude_mv=AmplitudeMv(0.1, 0.1, 0.1, 0.1)))
    shapes = {name: values.shape[2:] for name, values in p.items()}
    assert shapes["powerline_amplitude"] == (1, 1) and shapes["emg_amplitude"] == (12, 1)
    assert (
        shapes["wander_gain"] == (12, 1)
        and shapes["wander_hz"] == (1, 3)
        and shapes["shift_amplitude"] == (12, 1)
    )
    assert abs((p["powerline_hz"] == 60).mean() - 0.5) < 0.02 and np.unique(
        p["powerline_hz"]
    ).tolist() == [50, 60]
    assert_uniform(p["wander_hz"], 0.01, 0.2)
    assert np.abs(np.corrcoef(p["wander_hz"].reshape(-1, 3).T) - np.eye(3)).max() < 0.05
    sign = np.where(p["shift_amplitude"] > 0, 1, -1)
    assert abs((sign > 0).mean() - 0.5) < 0.01
    assert_uniform(sign - p["shift_amplitude"], 0, 0.1)
    assert np.ptp(sign - p["shift_amplitude"], axis=2).max() < 1e-6  # one U(0, max) for all leads


def test_white_noise_is_white_and_independent_between_leads(bank: np.ndarray) -> None:
    p = draws(AugmentConfig(noise="emg"), 5, np.zeros(20, int), np.arange(20))
    start = torch.from_numpy(p["white_start"])
    noise = white(torch.from_numpy(bank), start, SAMPLES).numpy()
    assert noise.shape == (20, 2, 12, SAMPLES)
    assert (
        abs(noise.mean()) < 0.005
        and abs(noise.std() - 1) < 0.005
        and abs((noise**4).mean() - 3) < 0.05
    )
    assert abs((noise[..., 1:] * noise[..., :-1]).mean()) < 0.005
    between = np.corrcoef(noise[0].reshape(24, SAMPLES))
    assert np.abs(between - np.eye(24)).max() < 0.12
    np.testing.assert_array_equal(noise[7, 1, 3], bank[start[7, 1, 3, 0] :][:SAMPLES])


# Random lead masking


def test_masked_leads_are_exactly_zero_and_the_others_unchanged(bank: np.ndarray) -> None:
    config = AugmentConfig(noise="physio4", threekg=ThreeKG(time_mask=0))
    p = parameters(config, bank)
    bare = {name: values for name, values in p.items() if name != "keep"}
    masked, whole = apply(signal(), p, config), apply(signal(), bare, config)
    np.testing.assert_array_equal(masked, np.where(p["keep"], whole, 0))
    assert np.all((masked == 0).all(axis=-1) == ~p["keep"][..., 0])


def test_rlm_masks_half_of_the_leads_independently_for_each_half() -> None:
    keep = many(AugmentConfig())["keep"][..., 0]
    assert abs(keep.mean() - 0.5) < 0.01 and np.abs(keep.mean(axis=0) - 0.5).max() < 0.04
    assert np.abs(np.corrcoef(keep.reshape(len(keep), 24).T) - np.eye(24)).max() < 0.08
    assert abs(many(AugmentConfig(rlm=0.2))["keep"].mean() - 0.8) < 0.01
    assert "keep" not in many(AugmentConfig(rlm=0), 4)


@pytest.mark.parametrize("leads", range(1, 13))
@pytest.mark.parametrize("padded", [True, False])
def test_keep_one_on_any_number_of_leads(leads: int, padded: bool) -> None:
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
    assert (sure.sum(axis=-1) == 1).all() and np.abs(
        sure.mean(axis=(0, 1)) - 1 / leads
    ).max() < 0.03
