"""Augmentations: one formula in three libraries, the draws' distributions and keys, and oracles of anatomy.

Shapes: B crops, S views, L leads, T samples.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from engine.pipelines import picture
from engine.pipelines.augment import (
    AmplitudeMv,
    AugmentConfig,
    Ops,
    ThreeKG,
    augment,
    axis,
    dali_ops,
    numpy_ops,
    refit_limb_leads,
    torch_ops,
)
from engine.pipelines.augment_draws import (
    DOWER,
    FROM_DIPOLE,
    INVERSE_DOWER,
    TO_DIPOLE,
    WHITE_BANK,
    draws,
    threekg_matrix,
    white,
    white_bank,
)
from engine.pipelines.leads import LEADS, ConfigError

FS_HZ, SAMPLES = 500.0, 2500
REFERENCE = Path(__file__).parents[3].parent / "shared" / "parity" / "masks_and_augs.npz"
NUMPY, TORCH = numpy_ops(), torch_ops()
PLAIN = AugmentConfig(rlm=0)
CROPS = np.array([7, 3, 1_000_000])
Params = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def bank() -> np.ndarray:
    return white_bank(5)


def signal(crops: int = 3, samples: int = SAMPLES, views: int = 2) -> np.ndarray:
    """[B, S, L, T] of some heart's dipole: Einthoven and Dower hold."""
    rng = np.random.default_rng(1)
    dipole = rng.normal(size=(crops, views, 3, samples))
    return (FROM_DIPOLE @ dipole).astype(np.float32)


def parameters(config: AugmentConfig, bank: np.ndarray, crop_B: np.ndarray = CROPS, samples: int = SAMPLES) -> Params:
    p = draws(config, 5, np.full(crop_B.shape, 2), crop_B, samples=samples)
    return p | {"white": white(bank, p["white_start"], samples)} if "white_start" in p else p


def apply(x: np.ndarray, p: Params, config: AugmentConfig, ops: Ops = NUMPY) -> np.ndarray:
    time = axis(x.shape[-1], FS_HZ, ops)
    if ops is not TORCH:
        return np.asarray(augment(x, p, config, time, ops))
    given: Any = {name: torch.from_numpy(values) for name, values in p.items()}
    result: np.ndarray = augment(torch.from_numpy(x.copy()), given, config, time, ops).numpy()
    return result


def apply_in_dali(x: np.ndarray, p: Params, config: AugmentConfig) -> np.ndarray:
    """A pipeline on the CPU that is fed x and p; each sample of it is one crop, without the batch axis."""
    from nvidia.dali import fn
    from nvidia.dali.pipeline import Pipeline

    given = {name: values for name, values in p.items() if name != "white_start"} | {"x": x}
    ops, make = dali_ops(), cast(Any, Pipeline)
    pipeline = make(batch_size=len(x), num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        nodes = {name: fn.external_source(name=name, batch=True) for name in given}
        pipeline.set_outputs(augment(nodes["x"], nodes, config, axis(x.shape[-1], FS_HZ, ops), ops))
    pipeline.build()
    for name, values in given.items():
        pipeline.feed_input(name, list(values))
    return np.stack([np.array(sample) for sample in pipeline.run()[0]])


EVERYTHING = {
    "rlm": AugmentConfig(),
    "powerline": replace(PLAIN, noise="powerline"),
    "powerline of 3 components": replace(PLAIN, noise="powerline", powerline_components=3, powerline_hz=60),
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
    "all at once, three leads": AugmentConfig(noise="physio4", threekg=ThreeKG(), leads="3", padded=False),
    "physio3 and rlm, two padded leads": AugmentConfig(noise="physio3", leads="2"),
    "physio3 and rlm, one lead": AugmentConfig(noise="physio3", leads="1", padded=False),
}


@pytest.mark.parametrize("config", EVERYTHING.values(), ids=EVERYTHING)
def test_numpy_torch_and_dali_agree(config: AugmentConfig, bank: np.ndarray) -> None:
    x, p = signal(), parameters(config, bank)
    expected = apply(x, p, config)
    assert expected.dtype == np.float32 and expected.shape == (3, 2, len(config.output_leads), SAMPLES)
    np.testing.assert_allclose(apply(x, p, config, TORCH), expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(apply_in_dali(x, p, config), expected, atol=1e-5, rtol=0)
    if config.leads == "12":
        assert np.abs(expected - x).max() > 0.05  # it did something


@pytest.mark.parametrize("samples", [1234, 49, 5000])
def test_any_length(samples: int, bank: np.ndarray) -> None:
    config = EVERYTHING["physio4 and rlm"]
    x, p = signal(samples=samples), parameters(config, bank, samples=samples)
    np.testing.assert_allclose(apply(x, p, config, TORCH), apply(x, p, config), atol=1e-5, rtol=0)


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
@pytest.mark.parametrize("kind", ["powerline", "wander"])
def test_float32_keeps_the_phase(kind: str, ops: Ops, bank: np.ndarray) -> None:
    config = AugmentConfig(rlm=0, noise=kind, powerline_components=4, powerline_hz=60)
    p, x = parameters(config, bank), np.zeros((3, 2, 12, SAMPLES), np.float32)
    a, hz, phase = (p[f"{kind}_{name}"][..., None].astype(np.float64) for name in ("amplitude", "hz", "phase"))
    exact = (a * np.cos(2 * np.pi * hz * np.arange(SAMPLES) / FS_HZ + phase)).sum(axis=-2) * p.get("wander_gain", 1)
    np.testing.assert_allclose(apply(x, p, config, ops), np.broadcast_to(exact, x.shape), atol=1e-5, rtol=0)


def test_torch_compiles_it_whole(bank: np.ndarray) -> None:
    """Without a break in the graph there is no synchronisation with the host."""
    config = replace(EVERYTHING["physio4 and rlm"], threekg=ThreeKG())
    x, p, time = signal(), parameters(config, bank), axis(SAMPLES, FS_HZ, TORCH)
    given = {name: torch.from_numpy(values) for name, values in p.items()}

    def step(x: torch.Tensor, given: dict[str, torch.Tensor]) -> Any:
        return augment(x, given, config, time, TORCH)

    compiled: Callable[..., torch.Tensor] = torch.compile(step, fullgraph=True, dynamic=False, backend="eager")
    np.testing.assert_allclose(compiled(torch.from_numpy(x), given).numpy(), apply(signal(), p, config), atol=1e-5)


# What the authors' code did, with their numbers in the order in which they draw them


def _authors_parameters(kind: str, r: np.random.RandomState, maximum: float) -> Params:
    """fairseq-signals augmentations.py, lines in brackets; each begins with a draw that decides whether to act at all."""
    u = r.uniform
    u()
    if kind == "powerline":  # (60-63, 71)
        named = {"amplitude": u(0, maximum), "hz": 50 if u() > 0.5 else 60, "phase": u(0, 2 * np.pi)}
        return {f"powerline_{name}": _f32(value) for name, value in named.items()}
    if kind == "emg":  # (92-93)
        return {"emg_amplitude": _f32(u(0, maximum, (12, 1))), "white": _f32(r.normal(0, 1, (12, SAMPLES)))}
    if kind == "shift":  # (124-131)
        amplitude = r.choice([1, -1], size=(12, 1)) - u(0, maximum)
        length = r.normal(0.2 * SAMPLES, 0.04 * SAMPLES)
        start = int(u(0, SAMPLES - length))
        return {"shift_amplitude": _f32(amplitude), "shift_start": _f32(start), "shift_stop": _f32(int(start + length))}
    if kind == "wander":  # (162-180)
        waves = {"gain": r.normal(1, 0.5, (12, 1)), "amplitude": u(0, maximum, 3)}
        waves["hz"], waves["phase"] = np.array([(u(0.01, 0.2), u(0, 2 * np.pi)) for _ in range(3)]).T
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
def test_the_authors_values(kind: str, defaults: str, seed: int) -> None:
    if not REFERENCE.exists():
        pytest.skip("the authors' outputs are not here (../shared/parity/masks_and_augs.npz)")
    with np.load(REFERENCE) as reference:
        x, expected = reference["x"][None], reference[f"{NAMES[kind]}_{defaults}defaults_seed{seed}"]
    maximum = 0.1 if defaults == "task" else {"shift": 0.25}.get(kind, 0.5)
    noise = () if kind == "rlm" else (f"authors_{kind}",)
    config = AugmentConfig(noise=noise, dependency=False if (kind, defaults) == ("shift", "class") else None)
    p = _authors_parameters(kind, np.random.RandomState(seed), maximum)
    for ops in (NUMPY, TORCH):
        np.testing.assert_allclose(apply(x, p, config, ops)[0], expected, atol=5e-6, rtol=0)


# The draws


def test_draws_belong_to_the_crop(bank: np.ndarray) -> None:
    config = replace(EVERYTHING["physio4 per lead and rlm"], threekg=ThreeKG())
    epoch, crop = np.array([0, 0, 1, 3, 3]), np.array([5, 9, 5, 123_456_789, 0])
    whole, order = draws(config, 11, epoch, crop), np.array([3, 1, 4, 0, 2])
    permuted = draws(config, 11, epoch[order], crop[order])
    parts = [draws(config, 11, epoch[i : i + 1], crop[i : i + 1]) for i in range(5)]
    three_views = draws(config, 11, epoch, crop, views=3)
    for name, values in whole.items():
        assert values.dtype in (np.float32, np.bool_) or name == "white_start"
        assert values.shape[:2] == (5, 2) and (values.shape[2] in (1, 12))
        np.testing.assert_array_equal(permuted[name], values[order])
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)
        np.testing.assert_array_equal(three_views[name][:, :2], values)


def test_draws_differ_by_seed_epoch_crop_and_view() -> None:
    config = replace(EVERYTHING["physio4 and rlm"], threekg=ThreeKG())
    one = draws(config, 1, np.array([0, 1, 0]), np.array([4, 4, 5]))
    other = draws(config, 2, np.array([0, 1, 0]), np.array([4, 4, 5]))
    for name, values in one.items():
        if name == "powerline_hz":
            continue
        rows = [*values.reshape(6, -1), other[name][0, 0].ravel()]
        assert len({row.tobytes() for row in rows}) == 7, name


def test_a_lead_draws_the_same_whichever_leads_are_seen() -> None:
    twelve = draws(AugmentConfig(noise="physio4", per_lead=True), 1, np.zeros(9, int), np.arange(9))
    three = draws(AugmentConfig(noise="physio4", per_lead=True, leads="3", padded=False), 1, np.zeros(9, int), np.arange(9))
    for name, values in three.items():
        np.testing.assert_array_equal(values, twelve[name][:, :, [0, 1, 7]])


def many(config: AugmentConfig, crops: int = 4000) -> Params:
    return draws(config, 3, np.zeros(crops, int), np.arange(crops))


def assert_uniform(values: np.ndarray, low: float, high: float) -> None:
    """By its quartiles and ends, which 8,000 draws hit within 2 % of the range."""
    tolerance = 0.02 * (high - low)
    assert low <= values.min() and values.max() <= high
    quartiles = low + (high - low) * np.array([0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(np.quantile(values, [0, 0.25, 0.5, 0.75, 1]), quartiles, atol=tolerance)


@pytest.mark.parametrize("per_lead", [False, True])
def test_the_papers_distributions(per_lead: bool) -> None:
    largest = AmplitudeMv(powerline=0.5, emg=0.4, wander=0.3, shift=0.2)
    p = many(AugmentConfig(noise="physio4", per_lead=per_lead, amplitude_mv=largest, powerline_components=2))
    leads = 12 if per_lead else 1
    assert {values.shape[2] for name, values in p.items() if name not in ("keep", "white_start")} == {leads}
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
    assert np.abs(np.corrcoef(amplitudes) - np.eye(4)).max() < 0.05  # no two streams draw the same numbers


def test_the_authors_distributions() -> None:
    p = many(AugmentConfig(noise="authors_physio4", amplitude_mv=AmplitudeMv(0.1, 0.1, 0.1, 0.1)))
    shapes = {name: values.shape[2:] for name, values in p.items()}
    assert shapes["powerline_amplitude"] == (1, 1) and shapes["emg_amplitude"] == (12, 1)
    assert shapes["wander_gain"] == (12, 1) and shapes["wander_hz"] == (1, 3) and shapes["shift_amplitude"] == (12, 1)
    assert abs((p["powerline_hz"] == 60).mean() - 0.5) < 0.02 and np.unique(p["powerline_hz"]).tolist() == [50, 60]
    assert_uniform(p["wander_hz"], 0.01, 0.2)
    assert np.abs(np.corrcoef(p["wander_hz"].reshape(-1, 3).T) - np.eye(3)).max() < 0.05
    sign = np.where(p["shift_amplitude"] > 0, 1, -1)
    assert abs((sign > 0).mean() - 0.5) < 0.01
    assert_uniform(sign - p["shift_amplitude"], 0, 0.1)
    assert np.ptp(sign - p["shift_amplitude"], axis=2).max() < 1e-6  # one U(0, max) for all leads


def test_white_noise_is_white_and_each_leads_own(bank: np.ndarray) -> None:
    p = draws(AugmentConfig(noise="emg"), 5, np.zeros(20, int), np.arange(20))
    noise = white(bank, p["white_start"], SAMPLES)
    assert noise.shape == (20, 2, 12, SAMPLES)
    assert abs(noise.mean()) < 0.005 and abs(noise.std() - 1) < 0.005 and abs((noise**4).mean() - 3) < 0.05
    assert abs((noise[..., 1:] * noise[..., :-1]).mean()) < 0.005
    between = np.corrcoef(noise[0].reshape(24, SAMPLES))
    assert np.abs(between - np.eye(24)).max() < 0.12
    same = white(torch.from_numpy(bank), torch.from_numpy(p["white_start"]), SAMPLES)
    np.testing.assert_array_equal(same.numpy(), noise)


# Random lead masking


def test_masked_leads_are_exactly_zero_and_the_others_whole(bank: np.ndarray) -> None:
    config = AugmentConfig(noise="physio4", threekg=ThreeKG(time_mask=0))
    p = parameters(config, bank)
    bare = {name: values for name, values in p.items() if name != "keep"}
    for ops in (NUMPY, TORCH):
        masked, whole = apply(signal(), p, config, ops), apply(signal(), bare, config, ops)
        np.testing.assert_array_equal(masked, np.where(p["keep"], whole, 0))
        assert np.all((masked == 0).all(axis=-1) == ~p["keep"][..., 0])


def test_half_of_the_leads_independently_for_each_half() -> None:
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
    assert (sure.sum(axis=-1) == 1).all() and np.abs(sure.mean(axis=(0, 1)) - 1 / leads).max() < 0.03


# Anatomy


def limb_residual(x: np.ndarray) -> float:
    return float(np.abs(refit_limb_leads(x, NUMPY) - x).max())


def test_limb_leads_stay_limb_leads_where_they_should(bank: np.ndarray) -> None:
    assert limb_residual(signal()) < 1e-5
    for name in ("authors physio4 and rlm", "physio3 with limb leads refitted", "3kg without time mask"):
        config = replace(EVERYTHING[name], rlm=0)
        assert limb_residual(apply(signal(), parameters(config, bank), config)) < 1e-5
    for name in ("powerline", "3kg"):  # the same noise on all leads cannot fit, nor a window of its own for each lead
        assert limb_residual(apply(signal(), parameters(EVERYTHING[name], bank), EVERYTHING[name])) > 0.05
    loose = AugmentConfig(rlm=0, noise="authors_wander", dependency=False)
    assert limb_residual(apply(signal(), parameters(loose, bank), loose)) > 0.05


def test_dower_and_its_inverse() -> None:
    published = [[0.632, -0.235, 0.059], [0.235, 1.066, -0.132], [-0.515, 0.157, -0.917], [0.044, 0.164, -1.387]]
    published += [[0.882, 0.098, -1.277], [1.213, 0.127, -0.601], [1.125, 0.127, -0.086], [0.831, 0.076, 0.230]]
    np.testing.assert_allclose(DOWER, published, atol=5e-3)
    np.testing.assert_allclose(INVERSE_DOWER, np.linalg.pinv(published), atol=5e-4)


def test_a_view_from_nowhere_else_is_the_projection_onto_three_dimensions() -> None:
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
    angle, scale, x = rng.uniform(-45, 45, (50, 3)), rng.uniform(1, 1.5, (50, 3)), rng.normal(size=(12, 40))
    turned = threekg_matrix(np.deg2rad(angle), np.ones((50, 3))) @ x
    np.testing.assert_allclose(
        np.linalg.norm(TO_DIPOLE @ turned, axis=1), np.linalg.norm(TO_DIPOLE @ x, axis=0)[None].repeat(50, 0), rtol=1e-9
    )
    whole = scale[:, :, None] * Rotation.from_euler("zyx", angle, degrees=True).as_matrix()
    np.testing.assert_allclose(threekg_matrix(np.deg2rad(angle), scale), FROM_DIPOLE @ whole @ TO_DIPOLE, atol=1e-12)


def test_threekg_draws_angles_scales_and_windows() -> None:
    config = AugmentConfig(rlm=0, threekg=ThreeKG())
    p = many(config, 2000)
    stretched = TO_DIPOLE @ p["matrix"].astype(np.float64) @ np.linalg.pinv(TO_DIPOLE)  # S R again
    scale = np.linalg.norm(stretched, axis=-1)
    assert_uniform(scale, 1, 1.5 + 1e-5)
    angles = Rotation.from_matrix((stretched / scale[..., None]).reshape(-1, 3, 3)).as_euler("zyx", degrees=True)
    assert_uniform(angles, -45.001, 45.001)
    assert_uniform(p["window_start"], 0, SAMPLES)
    assert np.abs(np.corrcoef(p["window_start"].reshape(-1, 24).T) - np.eye(24)).max() < 0.1
    np.testing.assert_array_equal(p["window_stop"] - p["window_start"], np.full((2000, 2, 12, 1), 1250))
    np.testing.assert_array_equal((apply(signal(5), {k: v[:5] for k, v in p.items()}, config) == 0).sum(axis=-1), 1250)


def test_a_shift_is_constant_and_lasts_as_long_as_drawn() -> None:
    config = AugmentConfig(rlm=0, noise="shift")
    p = many(config, 50)
    after = apply(np.zeros((50, 2, 12, SAMPLES), np.float32), p, config)
    np.testing.assert_array_equal((after != 0).sum(axis=-1)[..., None], (p["shift_stop"] - p["shift_start"]).repeat(12, axis=2))
    np.testing.assert_array_equal(np.unique(after), np.unique([0, *p["shift_amplitude"].ravel()]))


def test_torch_works_in_place() -> None:
    x = torch.from_numpy(signal())
    given: Any = {name: torch.from_numpy(v) for name, v in draws(AugmentConfig(noise="wander"), 5, CROPS * 0, CROPS).items()}
    assert augment(x, given, AugmentConfig(noise="wander"), axis(SAMPLES, FS_HZ, TORCH), TORCH).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("start", [0, 1, 1249, 1250, 1251, 2499])
def test_the_window_is_cyclic(start: int) -> None:
    config = AugmentConfig(rlm=0, threekg=ThreeKG())
    p = draws(config, 0, np.zeros(1, int), np.zeros(1, int))
    before = apply(signal(1), p | {"window_start": p["window_start"] * 0 + 9e9, "window_wrap": p["window_wrap"] * 0}, config)
    windows = {"start": start, "stop": start + 1250, "wrap": start - 1250}
    after = apply(signal(1), p | {f"window_{k}": np.full((1, 2, 12, 1), v, np.float32) for k, v in windows.items()}, config)
    inside = (np.arange(SAMPLES) - start) % SAMPLES < SAMPLES // 2
    np.testing.assert_array_equal(after, np.where(inside, 0, before))


# Views and leads


def test_one_half_becomes_two_views(bank: np.ndarray) -> None:
    for config in (EVERYTHING["physio4 and rlm"], EVERYTHING["3kg"], AugmentConfig(), replace(PLAIN, noise="emg")):
        p, x = parameters(config, bank), signal(views=1)
        twice = np.concatenate([x, x], axis=1)
        for ops in (NUMPY, TORCH):
            views = apply(x, p, config, ops)
            np.testing.assert_allclose(views, apply(twice, p, config, ops), atol=1e-6)
            assert not np.array_equal(views[:, 0], views[:, 1])


@pytest.mark.parametrize("name", ["physio4 per lead and rlm", "authors physio4 and rlm", "3kg"])
def test_fewer_leads_are_rows_of_the_twelve(name: str, bank: np.ndarray) -> None:
    config = EVERYTHING[name]
    padded, fewer = replace(config, leads="3"), replace(config, leads="I,II,V2", padded=False)
    full, zeros, rows = (apply(signal(), parameters(c, bank), c) for c in (config, padded, fewer))
    seen = [0, 1, 7]
    np.testing.assert_array_equal(zeros[:, :, seen], full[:, :, seen])
    np.testing.assert_array_equal(rows, full[:, :, seen])
    assert not np.delete(zeros, seen, axis=2).any()


# Settings that cannot be

WRONG: dict[str, Callable[[], object]] = {
    "augment.rlm=1.5: must be a number from 0 to 1": lambda: AugmentConfig(rlm=1.5),
    "augment.rlm=nan": lambda: AugmentConfig(rlm=float("nan")),
    "augment.rlm=True": lambda: AugmentConfig(rlm=True),
    "augment.rlm=1: zeroes every lead: use less than 1, or rlm_keep_one: true": lambda: AugmentConfig(rlm=1),
    "augment.noise='hum': no kind is called 'hum': use powerline": lambda: AugmentConfig(noise="hum"),
    "a kind occurs twice": lambda: AugmentConfig(noise=("emg", "authors_emg")),
    "augment.amplitude_mv.emg=-1: must be a number from 0 to 10": lambda: AmplitudeMv(emg=-1),
    "augment.powerline_hz=55: no mains has it: use 50 or 60": lambda: AugmentConfig(powerline_hz=55),
    "augment.powerline_components=9": lambda: AugmentConfig(powerline_components=9),
    "augment.per_lead=True: the authors' kinds": lambda: AugmentConfig(noise="authors_physio3", per_lead=True),
    "augment.threekg.scale=0.5: must be a number from 1 to 10": lambda: ThreeKG(scale=0.5),
    "augment.threekg.time_mask=1: must": lambda: ThreeKG(time_mask=1),
    "augment.threekg.angle_deg='45'": lambda: ThreeKG(angle_deg="45"),  # type: ignore[arg-type]
    "augment.leads='X': no lead is called 'X'": lambda: AugmentConfig(leads="X"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings_name_key_value_and_mend(message: str) -> None:
    with pytest.raises(ConfigError) as error:
        WRONG[message]()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_sets_of_noise_by_name_or_by_list() -> None:
    assert AugmentConfig(noise="physio3").kinds == ("powerline", "emg", "wander")
    assert AugmentConfig(noise="powerline, shift").kinds == AugmentConfig(noise=("powerline", "shift")).kinds
    assert AugmentConfig(noise=("authors_physio3", "shift")).kinds[2:] == ("authors_wander", "shift")
    assert AugmentConfig(noise="").kinds == AugmentConfig().kinds == ()


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert picture.main([str(tmp_path / "out.png"), "--lead", "V2"]) == 0
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    for arguments in (["--lead", "X"], ["--lead", "I,II"], ["--data", str(tmp_path)]):
        assert picture.main([str(tmp_path / "none.png"), *arguments]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and err.startswith("engine.pipelines.picture: ")
    assert picture.main([str(tmp_path / "missing" / "out.png")]) == 2
