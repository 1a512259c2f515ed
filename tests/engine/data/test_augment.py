"""Augmentations: the values that the authors' code gives, and anatomical relations between leads.

Shapes: B crops, S views, L leads, T samples.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from augmenting import (
    EVERYTHING,
    FS_HZ,
    PLAIN,
    REFERENCE,
    SAMPLES,
    apply,
    assert_uniform,
    correlation,
    drawn,
    many,
    parameters,
    signal,
)
from scipy.spatial.transform import Rotation

from omnilead.engine.data.augmentations import AugmentConfig
from omnilead.engine.data.augmentations.noise import LimbLeads
from omnilead.engine.data.augmentations.threekg import (
    DOWER,
    FROM_DIPOLE,
    INVERSE_DOWER,
    TO_DIPOLE,
    threekg_matrix,
)
from omnilead.engine.data.torch_ops import TorchOps
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training.config import build_config


@pytest.mark.parametrize("config", EVERYTHING.values(), ids=EVERYTHING)
def test_torch_agrees_with_float64(config):
    x, p = signal(), parameters(config)
    expected, made = apply(x, p, config, exact=True), apply(x, p, config)
    assert made.dtype == np.float32 and made.shape == (3, 2, len(config.output_leads), SAMPLES)
    np.testing.assert_allclose(made, expected, atol=1e-5, rtol=0)
    if config.leads == "12":
        assert np.abs(expected - x).max() > 0.05  # it did something


@pytest.mark.parametrize("kind", ["powerline", "wander"])
@pytest.mark.parametrize("samples", [49, 1234, SAMPLES, 5000])
def test_float32_keeps_the_phase_at_any_length(kind, samples):
    config = AugmentConfig(rlm=0, noise=kind, powerline_components=4, powerline_hz=60)
    p = parameters(config, samples=samples)
    x = np.zeros((3, 2, 12, samples), np.float32)
    names = ("amplitude", "hz", "phase")
    a, hz, phase = (p[f"{kind}_{name}"][..., None].astype(np.float64) for name in names)
    waves = a * np.cos(2 * np.pi * hz * np.arange(samples) / FS_HZ + phase)
    exact = np.broadcast_to(waves.sum(axis=-2) * p.get("wander_gain", 1), x.shape)
    np.testing.assert_allclose(apply(x, p, config), exact, atol=1e-5, rtol=0)


# What the authors' code did, with their numbers in the order in which they draw them


def _authors_parameters(kind, r, maximum):
    """Draws of fairseq-signals augmentations.py (lines in brackets); the first one decides whether
    to augment at all."""
    u = r.uniform
    u()
    if kind == "powerline":  # (60-63, 71)
        named = {"powerline_amplitude": u(0, maximum), "powerline_hz": 50 if u() > 0.5 else 60}
        named["powerline_phase"] = u(0, 2 * np.pi)
    elif kind == "emg":  # (92-93)
        named = {"emg_amplitude": u(0, maximum, (12, 1)), "bank": r.normal(0, 1, (12, SAMPLES))}
    elif kind == "shift":  # (124-131)
        named = {"shift_amplitude": r.choice([1, -1], size=(12, 1)) - u(0, maximum)}
        length = r.normal(0.2 * SAMPLES, 0.04 * SAMPLES)
        start = int(u(0, SAMPLES - length))
        named |= {"shift_start": start, "shift_stop": int(start + length)}
    elif kind == "wander":  # (162-180)
        named = {"wander_gain": r.normal(1, 0.5, (12, 1)), "wander_amplitude": u(0, maximum, 3)}
        waves = np.array([(u(0.01, 0.2), u(0, 2 * np.pi)) for _ in range(3)])
        named |= {"wander_hz": waves[:, 0], "wander_phase": waves[:, 1]}
    else:  # (200)
        return {"keep": (u(0, 1, 12) >= 0.5)[None, :, None]}
    # [S, leads, K] with S = 1
    return {name: np.atleast_2d(values).astype(np.float32)[None] for name, values in named.items()}


NAMES = {
    "powerline": "powerline_noise",
    "emg": "emg_noise",
    "shift": "baseline_shift",
    "wander": "baseline_wander",
    "rlm": "random_leads_masking",
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("defaults", ["task", "class"])
@pytest.mark.parametrize("kind", NAMES)
def test_parameters_give_the_values_of_the_authors_code(kind, defaults, seed):
    if not REFERENCE.exists():
        pytest.skip("the authors' outputs are not here (../shared/parity/masks_and_augs.npz)")
    with np.load(REFERENCE) as reference:
        x = reference["x"][None]
        expected = reference[f"{NAMES[kind]}_{defaults}defaults_seed{seed}"]
    maximum = 0.1 if defaults == "task" else {"shift": 0.25}.get(kind, 0.5)
    loose = False if (kind, defaults) == ("shift", "class") else None
    config = AugmentConfig(noise="" if kind == "rlm" else f"authors_{kind}", dependency=loose)
    p = _authors_parameters(kind, np.random.RandomState(seed), maximum)
    bank = p.pop("bank", None)
    if kind == "emg":
        bank = bank.flatten()
        p["white_start"] = SAMPLES * np.arange(12)[None, :, None]
    after = apply(x, p, config, bank=bank)[0]
    np.testing.assert_allclose(after, expected, atol=5e-6, rtol=0)


# Anatomy


LOOSE = replace(PLAIN, noise="authors_wander", dependency=False)


@pytest.mark.parametrize(
    ("config", "consistent"),
    [
        (replace(EVERYTHING["authors_physio4"], rlm=0), True),
        (EVERYTHING["refitted"], True),
        (EVERYTHING["3kg without time mask"], True),
        # equal noise on all leads, or a separate window for each, breaks the relations
        (EVERYTHING["powerline"], False),
        (EVERYTHING["3kg"], False),
        (LOOSE, False),
    ],
)
def test_limb_leads_are_consistent_where_they_are_recomputed(config, consistent):
    x = torch.from_numpy(apply(signal(), parameters(config), config))
    ops = TorchOps(SAMPLES, FS_HZ, torch.device("cpu"), 5)
    residual = float((LimbLeads(PLAIN).apply(x, {}, ops) - x).abs().max())
    assert residual < 1e-5 if consistent else residual > 0.05


def test_dower_its_inverse_and_the_limb_leads():
    published = [
        [0.632, -0.235, 0.059],
        [0.235, 1.066, -0.132],
        [-0.515, 0.157, -0.917],
        [0.044, 0.164, -1.387],
        [0.882, 0.098, -1.277],
        [1.213, 0.127, -0.601],
        [1.125, 0.127, -0.086],
        [0.831, 0.076, 0.230],
    ]
    np.testing.assert_allclose(DOWER, published, atol=5e-3)
    limb = np.array([[1, 0], [0, 1], [-1, 1], [-0.5, -0.5], [1, -0.5], [-0.5, 1]])
    np.testing.assert_allclose(FROM_DIPOLE[:6], limb @ DOWER[:2], atol=1e-12)
    np.testing.assert_allclose(INVERSE_DOWER, np.linalg.pinv(published), atol=5e-4)


def test_threekg_without_rotation_is_the_projection_onto_three_dimensions():
    still = threekg_matrix(np.zeros(3), np.ones(3))
    assert np.linalg.matrix_rank(still, tol=1e-6) == 3
    np.testing.assert_allclose(still @ still, still, atol=1e-9)
    np.testing.assert_allclose(still, FROM_DIPOLE @ TO_DIPOLE, atol=1e-12)


def test_rotations_are_scipys():
    rng = np.random.default_rng(0)
    angle, scale = rng.uniform(-45, 45, (50, 3)), rng.uniform(1, 1.5, (50, 3))
    whole = scale[:, :, None] * Rotation.from_euler("zyx", angle, degrees=True).as_matrix()
    made = threekg_matrix(np.deg2rad(angle), scale)
    np.testing.assert_allclose(made, FROM_DIPOLE @ whole @ TO_DIPOLE, atol=1e-12)


def test_threekg_draws_angles_scales_and_windows():
    p = many(EVERYTHING["3kg"], 2000)
    stretched = TO_DIPOLE @ p["matrix"].astype(np.float64) @ np.linalg.pinv(TO_DIPOLE)  # S R again
    scale = np.linalg.norm(stretched, axis=-1)
    assert_uniform(scale, 1, 1.5 + 1e-5)
    turned = Rotation.from_matrix((stretched / scale[..., None]).reshape(-1, 3, 3))
    assert_uniform(turned.as_euler("zyx", degrees=True), -45.001, 45.001)
    assert_uniform(p["window_start"], 0, SAMPLES)
    assert correlation(p["window_start"].reshape(-1, 24).T) < 0.1
    assert (p["window_stop"] - p["window_start"] == 1250).all()


def test_a_shift_is_constant_and_lasts_as_long_as_drawn():
    p = many(EVERYTHING["shift"], 50)
    after = apply(np.zeros((50, 2, 12, SAMPLES), np.float32), p, EVERYTHING["shift"])
    length = (p["shift_stop"] - p["shift_start"])[..., 0]
    assert ((after != 0).sum(axis=-1) == length).all()
    np.testing.assert_array_equal(np.unique(after), np.unique([0, *p["shift_amplitude"].ravel()]))


@pytest.mark.parametrize("start", [0, 1, 1249, 1250, 1251, 2499])
def test_the_window_is_cyclic(start):
    p = drawn(EVERYTHING["3kg"], 0, np.zeros(1, int), np.zeros(1, int))

    def windowed(start, stop, wrap):
        window = {"window_start": start, "window_stop": stop, "window_wrap": wrap}
        values = {k: np.full((1, 2, 12, 1), v, np.float32) for k, v in window.items()}
        return apply(signal(1), p | values, EVERYTHING["3kg"])

    inside = (np.arange(SAMPLES) - start) % SAMPLES < SAMPLES // 2
    expected = np.where(inside, 0, windowed(9e9, 9e9, 0))
    np.testing.assert_array_equal(windowed(start, start + 1250, start - 1250), expected)


# Views and leads


@pytest.mark.parametrize("name", ["physio4 per lead", "authors_physio4", "3kg"])
def test_a_lead_subset_equals_rows_of_all_twelve(name):
    config = EVERYTHING[name]
    configs = (config, replace(config, leads="3"), replace(config, leads="I,II,V2", padded=False))
    full, zeros, rows = (apply(signal(), parameters(c), c) for c in configs)
    seen = [0, 1, 7]
    np.testing.assert_array_equal(zeros[:, :, seen], full[:, :, seen])
    np.testing.assert_array_equal(rows, full[:, :, seen])
    assert not np.delete(zeros, seen, axis=2).any()


# Settings that cannot be

WRONG = [
    ("rlm", float("nan"), "=nan: input should be a finite number"),
    ("rlm", True, "=True"),
    ("rlm", 1, "=1: this masks every lead: use less than 1, or rlm_keep_one: true"),
    ("noise", "hum", "='hum': unknown kind 'hum': use powerline"),
    ("noise", ["emg", "authors_emg"], "a kind occurs twice"),
    ("powerline_hz", 55, "=55: input should be 50 or 60"),
    ("threekg", {"scale": 0.5}, ".scale=0.5: input should be greater than or equal to 1"),
    ("leads", "X", "='X': no lead is called 'X'"),
]


@pytest.mark.parametrize(("key", "value", "says"), WRONG)
def test_wrong_settings_report_key_value_and_fix(key, value, says):
    with pytest.raises(ConfigError, match=rf"\Aaugment\.{key}.*{re.escape(says)}.*\Z"):
        build_config({"augment": {key: value}})


def test_sets_of_noise_by_name_or_by_list():
    with pytest.raises(ConfigError, match=r"augment\.per_lead=True: authors_\*"):
        build_config({"augment": {"noise": "authors_physio3", "per_lead": True}})
    for noise, kinds in {
        "": (),
        "physio3": ("powerline", "emg", "wander"),
        "powerline, shift": ("powerline", "shift"),
        ("authors_wander", "shift"): ("authors_wander", "shift"),
    }.items():
        assert AugmentConfig(noise=noise).kinds == kinds
