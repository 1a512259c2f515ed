"""Augmentations: the same in torch and DALI, the authors' values, and anatomical relations between
leads.

Shapes: B crops, S views, L leads, T samples.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from augmenting import (
    EVERYTHING,
    FS_HZ,
    PLAIN,
    REFERENCE,
    SAMPLES,
    Params,
    apply,
    assert_uniform,
    many,
    parameters,
    signal,
)
from scipy.spatial.transform import Rotation

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.common import ConfigError
from omnilead.engine.config import build
from omnilead.engine.data import dali
from omnilead.engine.data.augment import (
    AugmentConfig,
    ThreeKG,
    refit_limb_leads,
)
from omnilead.engine.data.augment_draws import (
    DOWER,
    FROM_DIPOLE,
    INVERSE_DOWER,
    TO_DIPOLE,
    draws,
    threekg_matrix,
)
from omnilead.engine.data.augmenter import Augmenter
from omnilead.engine.report import picture


def apply_in_dali(x: np.ndarray, p: Params, config: AugmentConfig) -> np.ndarray:
    """Run a DALI pipeline on the CPU on x and p; each of its samples is one crop, without the batch
    axis."""
    from nvidia.dali import fn
    from nvidia.dali.pipeline import Pipeline

    not_in_dali = ("emg_amplitude", "white_start", "white")
    given = {name: values for name, values in p.items() if name not in not_in_dali} | {"x": x}
    make = cast(Any, Pipeline)
    pipeline = make(batch_size=len(x), num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        nodes = {name: fn.external_source(name=name, batch=True) for name in given}
        pipeline.set_outputs(dali.augment_graph(nodes["x"], nodes, config, dali.constant_axis()))
    pipeline.build()
    for name, values in given.items():
        pipeline.feed_input(name, list(values))
    made = torch.from_numpy(np.stack([np.array(sample) for sample in pipeline.run()[0]]))
    if "white_start" in p:
        augmenter = Augmenter(config, "halves", 5, torch.device("cpu"))
        augmenter.add_white_noise(made, augmenter.to_device(p))
    result: np.ndarray = made.numpy()
    return result


@pytest.mark.parametrize("config", EVERYTHING.values(), ids=EVERYTHING)
def test_torch_and_dali_agree_with_float64(config: AugmentConfig, bank: np.ndarray) -> None:
    x, p = signal(), parameters(config, bank)
    expected, made = apply(x, p, config, exact=True), apply(x, p, config)
    assert made.dtype == np.float32 and made.shape == (3, 2, len(config.output_leads), SAMPLES)
    np.testing.assert_allclose(made, expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(apply_in_dali(x, p, config), expected, atol=1e-5, rtol=0)
    if config.leads == "12":
        assert np.abs(expected - x).max() > 0.05  # it did something


@pytest.mark.parametrize("kind", ["powerline", "wander"])
@pytest.mark.parametrize("samples", [49, 1234, SAMPLES, 5000])
def test_float32_keeps_the_phase_at_any_length(kind: str, samples: int, bank: np.ndarray) -> None:
    config = AugmentConfig(rlm=0, noise=kind, powerline_components=4, powerline_hz=60)
    p = parameters(config, bank, samples=samples)
    x = np.zeros((3, 2, 12, samples), np.float32)
    a, hz, phase = (
        p[f"{kind}_{name}"][..., None].astype(np.float64) for name in ("amplitude", "hz", "phase")
    )
    waves = a * np.cos(2 * np.pi * hz * np.arange(samples) / FS_HZ + phase)
    exact = np.broadcast_to(waves.sum(axis=-2) * p.get("wander_gain", 1), x.shape)
    np.testing.assert_allclose(apply(x, p, config), exact, atol=1e-5, rtol=0)


# What the authors' code did, with their numbers in the order in which they draw them


def _authors_parameters(kind: str, r: np.random.RandomState, maximum: float) -> Params:
    """Draws of fairseq-signals augmentations.py (lines in brackets); the first one decides whether
    to augment at all."""
    u = r.uniform
    u()
    if kind == "powerline":  # (60-63, 71)
        named = {
            "amplitude": u(0, maximum),
            "hz": 50 if u() > 0.5 else 60,
            "phase": u(0, 2 * np.pi),
        }
        return {f"powerline_{name}": _f32(value) for name, value in named.items()}
    if kind == "emg":  # (92-93)
        return {
            "emg_amplitude": _f32(u(0, maximum, (12, 1))),
            "white": _f32(r.normal(0, 1, (12, SAMPLES))),
        }
    if kind == "shift":  # (124-131)
        amplitude = r.choice([1, -1], size=(12, 1)) - u(0, maximum)
        length = r.normal(0.2 * SAMPLES, 0.04 * SAMPLES)
        start = int(u(0, SAMPLES - length))
        return {
            "shift_amplitude": _f32(amplitude),
            "shift_start": _f32(start),
            "shift_stop": _f32(int(start + length)),
        }
    if kind == "wander":  # (162-180)
        waves = {"gain": r.normal(1, 0.5, (12, 1)), "amplitude": u(0, maximum, 3)}
        waves["hz"], waves["phase"] = np.array(
            [(u(0.01, 0.2), u(0, 2 * np.pi)) for _ in range(3)]
        ).T
        return {f"wander_{name}": _f32(values) for name, values in waves.items()}
    return {"keep": (u(0, 1, 12) >= 0.5)[None, :, None]}  # (200)


def _f32(values: Any) -> np.ndarray:
    """[S, leads, K] with S = 1."""
    array = np.asarray(values, np.float32)
    return array[None] if array.ndim == 2 else array.reshape(1, 1, -1)


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
def test_parameters_give_the_values_of_the_authors_code(
    kind: str, defaults: str, seed: int
) -> None:
    if not REFERENCE.exists():
        pytest.skip("the authors' outputs are not here (../shared/parity/masks_and_augs.npz)")
    with np.load(REFERENCE) as reference:
        x, expected = (
            reference["x"][None],
            reference[f"{NAMES[kind]}_{defaults}defaults_seed{seed}"],
        )
    maximum = 0.1 if defaults == "task" else {"shift": 0.25}.get(kind, 0.5)
    noise = () if kind == "rlm" else (f"authors_{kind}",)
    config = AugmentConfig(
        noise=noise, dependency=False if (kind, defaults) == ("shift", "class") else None
    )
    p = _authors_parameters(kind, np.random.RandomState(seed), maximum)
    np.testing.assert_allclose(apply(x, p, config)[0], expected, atol=5e-6, rtol=0)


# Anatomy


def limb_residual(x: np.ndarray) -> float:
    return float(np.abs(refit_limb_leads(torch.from_numpy(x)).numpy() - x).max())


def test_limb_leads_are_consistent_where_they_are_recomputed(bank: np.ndarray) -> None:
    assert limb_residual(signal()) < 1e-5
    for name in (
        "authors physio4 and rlm",
        "physio3 with limb leads refitted",
        "3kg without time mask",
    ):
        config = replace(EVERYTHING[name], rlm=0)
        assert limb_residual(apply(signal(), parameters(config, bank), config)) < 1e-5
    for name in (
        "powerline",
        "3kg",
    ):  # equal noise on all leads, or a separate window for each, breaks the relations
        assert (
            limb_residual(apply(signal(), parameters(EVERYTHING[name], bank), EVERYTHING[name]))
            > 0.05
        )
    loose = AugmentConfig(rlm=0, noise="authors_wander", dependency=False)
    assert limb_residual(apply(signal(), parameters(loose, bank), loose)) > 0.05


def test_dower_and_its_inverse() -> None:
    published = [
        [0.632, -0.235, 0.059],
        [0.235, 1.066, -0.132],
        [-0.515, 0.157, -0.917],
        [0.044, 0.164, -1.387],
    ]
    published += [
        [0.882, 0.098, -1.277],
        [1.213, 0.127, -0.601],
        [1.125, 0.127, -0.086],
        [0.831, 0.076, 0.230],
    ]
    np.testing.assert_allclose(DOWER, published, atol=5e-3)
    np.testing.assert_allclose(INVERSE_DOWER, np.linalg.pinv(published), atol=5e-4)


def test_threekg_without_rotation_is_the_projection_onto_three_dimensions() -> None:
    still = threekg_matrix(np.zeros(3), np.ones(3))
    assert np.linalg.matrix_rank(still, tol=1e-6) == 3
    np.testing.assert_allclose(still @ still, still, atol=1e-9)
    np.testing.assert_allclose(still, FROM_DIPOLE @ TO_DIPOLE, atol=1e-12)
    config = AugmentConfig(rlm=0, threekg=ThreeKG(angle_deg=0, scale=1, time_mask=0))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 2, 12, 100)).astype(np.float32)
    once = apply(x, draws(config, 0, np.zeros(2, int), np.arange(2)), config)
    twice = apply(once, draws(config, 9, np.zeros(2, int), np.arange(2)), config)
    np.testing.assert_allclose(twice, once, atol=1e-3)
    assert np.abs(once - x).max() > 0.1


def test_rotations_are_scipys_and_keep_the_length_of_the_dipole() -> None:
    rng = np.random.default_rng(0)
    angle, scale, x = (
        rng.uniform(-45, 45, (50, 3)),
        rng.uniform(1, 1.5, (50, 3)),
        rng.normal(size=(12, 40)),
    )
    turned = threekg_matrix(np.deg2rad(angle), np.ones((50, 3))) @ x
    np.testing.assert_allclose(
        np.linalg.norm(TO_DIPOLE @ turned, axis=1),
        np.linalg.norm(TO_DIPOLE @ x, axis=0)[None].repeat(50, 0),
        rtol=1e-9,
    )
    whole = scale[:, :, None] * Rotation.from_euler("zyx", angle, degrees=True).as_matrix()
    np.testing.assert_allclose(
        threekg_matrix(np.deg2rad(angle), scale), FROM_DIPOLE @ whole @ TO_DIPOLE, atol=1e-12
    )


def test_threekg_draws_angles_scales_and_windows() -> None:
    config = AugmentConfig(rlm=0, threekg=ThreeKG())
    p = many(config, 2000)
    stretched = TO_DIPOLE @ p["matrix"].astype(np.float64) @ np.linalg.pinv(TO_DIPOLE)  # S R again
    scale = np.linalg.norm(stretched, axis=-1)
    assert_uniform(scale, 1, 1.5 + 1e-5)
    angles = Rotation.from_matrix((stretched / scale[..., None]).reshape(-1, 3, 3)).as_euler(
        "zyx", degrees=True
    )
    assert_uniform(angles, -45.001, 45.001)
    assert_uniform(p["window_start"], 0, SAMPLES)
    assert np.abs(np.corrcoef(p["window_start"].reshape(-1, 24).T) - np.eye(24)).max() < 0.1
    np.testing.assert_array_equal(
        p["window_stop"] - p["window_start"], np.full((2000, 2, 12, 1), 1250)
    )
    np.testing.assert_array_equal(
        (apply(signal(5), {k: v[:5] for k, v in p.items()}, config) == 0).sum(axis=-1), 1250
    )


def test_a_shift_is_constant_and_lasts_as_long_as_drawn() -> None:
    config = AugmentConfig(rlm=0, noise="shift")
    p = many(config, 50)
    after = apply(np.zeros((50, 2, 12, SAMPLES), np.float32), p, config)
    np.testing.assert_array_equal(
        (after != 0).sum(axis=-1)[..., None],
        (p["shift_stop"] - p["shift_start"]).repeat(12, axis=2),
    )
    np.testing.assert_array_equal(np.unique(after), np.unique([0, *p["shift_amplitude"].ravel()]))


@pytest.mark.parametrize("start", [0, 1, 1249, 1250, 1251, 2499])
def test_the_window_is_cyclic(start: int) -> None:
    config = AugmentConfig(rlm=0, threekg=ThreeKG())
    p = draws(config, 0, np.zeros(1, int), np.zeros(1, int))
    before = apply(
        signal(1),
        p | {"window_start": p["window_start"] * 0 + 9e9, "window_wrap": p["window_wrap"] * 0},
        config,
    )
    windows = {"start": start, "stop": start + 1250, "wrap": start - 1250}
    after = apply(
        signal(1),
        p | {f"window_{k}": np.full((1, 2, 12, 1), v, np.float32) for k, v in windows.items()},
        config,
    )
    inside = (np.arange(SAMPLES) - start) % SAMPLES < SAMPLES // 2
    np.testing.assert_array_equal(after, np.where(inside, 0, before))


# Views and leads


def test_one_half_becomes_two_views(bank: np.ndarray) -> None:
    for config in (
        EVERYTHING["physio4 and rlm"],
        EVERYTHING["3kg"],
        AugmentConfig(),
        replace(PLAIN, noise="emg"),
    ):
        p, x = parameters(config, bank), signal(views=1)
        twice = np.concatenate([x, x], axis=1)
        views = apply(x, p, config)
        np.testing.assert_allclose(views, apply(twice, p, config), atol=1e-6)
        assert not np.array_equal(views[:, 0], views[:, 1])


@pytest.mark.parametrize("name", ["physio4 per lead and rlm", "authors physio4 and rlm", "3kg"])
def test_a_lead_subset_equals_rows_of_all_twelve(name: str, bank: np.ndarray) -> None:
    config = EVERYTHING[name]
    padded, fewer = replace(config, leads="3"), replace(config, leads="I,II,V2", padded=False)
    full, zeros, rows = (apply(signal(), parameters(c, bank), c) for c in (config, padded, fewer))
    seen = [0, 1, 7]
    np.testing.assert_array_equal(zeros[:, :, seen], full[:, :, seen])
    np.testing.assert_array_equal(rows, full[:, :, seen])
    assert not np.delete(zeros, seen, axis=2).any()


# Settings that cannot be

WRONG: dict[str, dict[str, object]] = {
    "augment.rlm=1.5: input should be less than or equal to 1": {"rlm": 1.5},
    "augment.rlm=nan: input should be a finite number": {"rlm": float("nan")},
    "augment.rlm=True": {"rlm": True},
    "augment.rlm=1: this masks every lead: use less than 1, or rlm_keep_one: true": {"rlm": 1},
    "augment.noise='hum': unknown kind 'hum': use powerline": {"noise": "hum"},
    "a kind occurs twice": {"noise": ["emg", "authors_emg"]},
    "augment.amplitude_mv.emg=-1": {"amplitude_mv": {"emg": -1}},
    "augment.powerline_hz=55: input should be 50 or 60": {"powerline_hz": 55},
    "augment.powerline_components=9: input should be less than or equal to 4": {
        "powerline_components": 9
    },
    "augment.per_lead=True: the authors' kinds": {"noise": "authors_physio3", "per_lead": True},
    "augment.threekg.scale=0.5: input should be greater than or equal to 1": {
        "threekg": {"scale": 0.5}
    },
    "augment.threekg.time_mask=1: input should be less than or equal to 0.99": {
        "threekg": {"time_mask": 1}
    },
    "augment.threekg.angle_deg='45'": {"threekg": {"angle_deg": "45"}},
    "augment.leads='X': no lead is called 'X'": {"leads": "X"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings_report_key_value_and_fix(message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build({"augment": WRONG[message]})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_sets_of_noise_by_name_or_by_list() -> None:
    assert AugmentConfig(noise="physio3").kinds == ("powerline", "emg", "wander")
    assert (
        AugmentConfig(noise="powerline, shift").kinds
        == AugmentConfig(noise=("powerline", "shift")).kinds
    )
    assert AugmentConfig(noise=("authors_physio3", "shift")).kinds[2:] == (
        "authors_wander",
        "shift",
    )
    assert AugmentConfig(noise="").kinds == AugmentConfig().kinds == ()


def test_the_picture(small: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert picture.main([str(tmp_path / "out.png"), "--data", small.root.url, "--crop", "3"]) == 0
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    for wrong in ([str(tmp_path)], [small.root.url, "--crop", "20"]):
        assert picture.main([str(tmp_path / "none.png"), "--data", *wrong]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and err.startswith("omnilead.engine.report.picture: ")
