"""Draw the augmentation parameters of a crop with counter-based random numbers: a function of
(seed, epoch, crop, view).

    p = draws(config, seed, epoch_B, crop_B)        arrays for augment.augment, [B, S, 1 or L, 1 or K] float32 or bool
    p["white"] = white(bank, p["white_start"], T)   for the kind emg; call bank = white_bank(seed) once

They do not depend on rank, batch size, order of crops, restarts or which other leads are used.
Fresh white noise for each crop would cost ten times as much as all other draws, so each lead of
each crop gets a random slice of a fixed noise bank. Distributions: Oh et al. 2022, appendix B, and
fairseq-signals augmentations.py for the kinds authors_*.

Shapes: B crops, S views, L leads, T samples, K components.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from torch import Tensor

from omnilead.engine.data import counter
from omnilead.engine.data.augment import TAU, WANDER_COMPONENTS, AugmentConfig, ThreeKG
from omnilead.engine.data.counter import RandomStream

Params = dict[str, np.ndarray]
ONE_FOR_ALL = (0,)  # in place of lead numbers: one draw for all leads
# 16 MiB: fits in a CPU's cache, and the noise of two leads overlaps with probability 0.001
WHITE_BANK = 2**22

# From I II V1..V6 to Frank's X (left), Y (inferior), Z (posterior): Edenbrandt and Pahlm 1988. Its
# pseudo-inverse is Dower's matrix to within 0.005 and inverts it exactly, so the dipole of a view
# is exactly the rotated dipole.
INVERSE_DOWER = np.array(
    [
        [0.156, -0.010, -0.172, -0.074, 0.122, 0.231, 0.239, 0.194],
        [-0.227, 0.887, 0.057, -0.019, -0.106, -0.022, 0.041, 0.048],
        [0.022, 0.102, -0.229, -0.310, -0.246, -0.063, 0.055, 0.108],
    ]
)
DOWER = np.linalg.pinv(INVERSE_DOWER)
INDEPENDENT = (0, 1, 6, 7, 8, 9, 10, 11)
# I II III aVR aVL aVF from I and II
_LIMB = np.array([[1, 0], [0, 1], [-1, 1], [-0.5, -0.5], [1, -0.5], [-0.5, 1]])
_TO_12 = np.block([[_LIMB, np.zeros((6, 6))], [np.zeros((6, 2)), np.eye(6)]])
TO_DIPOLE = np.zeros((3, 12))  # [3, 12]
TO_DIPOLE[:, INDEPENDENT] = INVERSE_DOWER
FROM_DIPOLE = _TO_12 @ DOWER  # [12, 3]


class _Draw:
    """Random numbers [B, S, leads, slots]. Slot n is the n-th number that a stream draws for a
    lead."""

    def __init__(self, seed: int, epoch_B: np.ndarray, crop_B: np.ndarray, views: int = 2) -> None:
        epoch, crop = np.broadcast_arrays(np.atleast_1d(epoch_B), np.atleast_1d(crop_B))
        self.seed = seed
        self.epoch = epoch[:, None, None, None]
        self.crop = crop[:, None, None, None]
        self.view = np.arange(views)[:, None, None]

    def uniform(
        self, stream: RandomStream, leads: Sequence[int], slots: Sequence[int]
    ) -> np.ndarray:
        return counter.uniform(self.seed, stream, *self._counters(leads, slots))

    def normal(
        self, stream: RandomStream, leads: Sequence[int], slots: Sequence[int]
    ) -> np.ndarray:
        return counter.normal(self.seed, stream, *self._counters(leads, slots))

    def _counters(self, leads: Sequence[int], slots: Sequence[int]) -> tuple[np.ndarray, ...]:
        lead = np.array(leads)[:, None]
        return self.epoch, self.crop, self.view, lead, np.array(slots)


def draws(
    config: AugmentConfig,
    seed: int,
    epoch_B: np.ndarray,
    crop_B: np.ndarray,
    samples: int = 2500,
    measured_BL: np.ndarray | None = None,
) -> Params:
    """Draw parameters for both halves or views of each crop. `crop_B`: the augmenter.crop_key of
    each crop. `measured_BL`: bool [B, 12], which leads were recorded; None: all."""
    draw = _Draw(seed, epoch_B, crop_B)
    p: Params = {}
    if config.threekg:
        p.update(_threekg(draw, config.threekg, config.output_leads, samples))
    for kind in config.kinds:
        p.update(_NOISE[kind](draw, config, samples))
    whole = config.output_leads == config.seen
    if config.rlm or not whole or measured_BL is not None:
        p["keep"] = _keep(draw, config, measured_BL)
    for name, values in p.items():
        if values.dtype not in (np.bool_, np.int32):
            values = values.astype(np.float32)
        p[name] = np.ascontiguousarray(values)
    return p


def lead_masks(
    config: AugmentConfig,
    seed: int,
    epoch_B: np.ndarray,
    crop_B: np.ndarray,
    windows: int,
    measured_BL: np.ndarray | None = None,
) -> np.ndarray:
    """bool [B, windows, L, 1]: the leads that random lead masking keeps in each window."""
    return _keep(_Draw(seed, epoch_B, crop_B, windows), config, measured_BL)


def _keep(draw: _Draw, config: AugmentConfig, measured_BL: np.ndarray | None) -> np.ndarray:
    """Random lead masking: each lead of each half is zeroed where u < p (Oh et al. 2022;
    augmentations.py:199-201)."""
    leads = config.output_leads
    usable = np.isin(leads, config.seen)[:, None]
    if measured_BL is not None:
        usable = usable & measured_BL[:, None, list(leads), None]
    u = draw.uniform(RandomStream.LEAD_MASK, leads, [0])
    u = np.where(usable, u, -1.0)
    keep: np.ndarray = (u >= config.rlm) & usable
    if config.rlm_keep_one:  # every lead is equally likely to have the largest u
        largest = u.max(axis=-2, keepdims=True)
        keep |= (u == largest) & usable
    return keep


def _powerline(draw: _Draw, config: AugmentConfig, samples: int) -> Params:
    count = config.powerline_components
    leads = _noise_leads(config)
    share = draw.uniform(RandomStream.POWERLINE, leads, range(2, 2 + count))
    # the same for all components, as in the paper
    turn = draw.uniform(RandomStream.POWERLINE, leads, [0])
    hz = config.powerline_hz * np.arange(1, 1 + count)
    return {
        "powerline_amplitude": share * config.amplitude_mv.powerline,
        "powerline_phase": np.broadcast_to(turn * TAU, share.shape),
        "powerline_hz": np.broadcast_to(hz, share.shape),
    }


def _authors_powerline(draw: _Draw, config: AugmentConfig, samples: int) -> Params:
    """50 or 60 Hz at random (augmentations.py:61)."""
    p = _powerline(draw, config, samples)
    american = draw.uniform(RandomStream.POWERLINE, ONE_FOR_ALL, [1]) >= 0.5
    harmonic = p["powerline_hz"] / config.powerline_hz
    p["powerline_hz"] = harmonic * np.where(american, 60, 50)
    return p


def _emg(draw: _Draw, config: AugmentConfig, samples: int, own: bool = False) -> Params:
    leads = config.noise_leads if own else _noise_leads(config)
    share = draw.uniform(RandomStream.EMG, leads, [0])
    place = draw.uniform(RandomStream.WHITE, config.noise_leads, [0])
    start = place * (WHITE_BANK - samples)
    return {
        "emg_amplitude": share * config.amplitude_mv.emg,
        "white_start": start.astype(np.int32),
    }


def _authors_emg(draw: _Draw, config: AugmentConfig, samples: int) -> Params:
    """Each lead has its own amplitude (augmentations.py:92)."""
    return _emg(draw, config, samples, own=True)


def _wander(draw: _Draw, config: AugmentConfig, samples: int) -> Params:
    count = WANDER_COMPONENTS
    leads = _noise_leads(config)
    share = draw.uniform(RandomStream.WANDER, leads, range(count))
    turn = draw.uniform(RandomStream.WANDER, leads, range(count, 2 * count))
    place = draw.uniform(RandomStream.WANDER, leads, [2 * count])
    base_hz = 0.01 + place * 0.19
    spread = draw.normal(RandomStream.WANDER, leads, [3 * count])
    return {
        "wander_amplitude": share * config.amplitude_mv.wander,
        "wander_phase": turn * TAU,
        "wander_hz": base_hz * np.arange(1, 1 + count),
        "wander_gain": 1 + 0.5 * spread,
    }


def _authors_wander(draw: _Draw, config: AugmentConfig, samples: int) -> Params:
    """Three independent frequencies, and C for each lead (augmentations.py:160-180)."""
    count = WANDER_COMPONENTS
    share = draw.uniform(RandomStream.WANDER, ONE_FOR_ALL, range(2 * count, 3 * count))
    spread = draw.normal(RandomStream.WANDER, config.noise_leads, [3 * count])
    p = _wander(draw, config, samples)
    p["wander_hz"] = 0.01 + share * 0.19
    p["wander_gain"] = 1 + 0.5 * spread
    return p


def _shift(draw: _Draw, config: AugmentConfig, samples: int) -> Params:
    """The paper only says "a randomly sampled span". Here: length N(0.2 T, (0.04 T)^2), as the
    authors' code; any position."""
    leads = _noise_leads(config)
    share = 2 * draw.uniform(RandomStream.SHIFT, leads, [0]) - 1
    spread = draw.normal(RandomStream.SHIFT, leads, [1])
    length = (0.2 + 0.04 * spread) * samples
    length = np.clip(length, 1, samples)  # the lower bound is 5 sigma away, the upper 20
    place = draw.uniform(RandomStream.SHIFT, leads, [2])
    start = np.floor(place * (samples - length))
    return {
        "shift_amplitude": share * config.amplitude_mv.shift,
        "shift_start": start,
        "shift_stop": np.floor(start + length),
    }


def _authors_shift(draw: _Draw, config: AugmentConfig, samples: int) -> Params:
    """+1 or -1 mV for each lead, minus one U(0, max) for all (augmentations.py:124-126; they
    probably meant times)."""
    up = draw.uniform(RandomStream.SHIFT, config.noise_leads, [3]) < 0.5
    share = draw.uniform(RandomStream.SHIFT, ONE_FOR_ALL, [0])
    p = _shift(draw, config, samples)
    subtracted = share * config.amplitude_mv.shift
    p["shift_amplitude"] = np.where(up, 1.0, -1.0) - subtracted
    return p


def _noise_leads(config: AugmentConfig) -> tuple[int, ...]:
    return config.noise_leads if config.per_lead else ONE_FOR_ALL


_NOISE = {
    "powerline": _powerline,
    "emg": _emg,
    "wander": _wander,
    "shift": _shift,
    "authors_powerline": _authors_powerline,
    "authors_emg": _authors_emg,
    "authors_wander": _authors_wander,
    "authors_shift": _authors_shift,
}


def _threekg(draw: _Draw, threekg: ThreeKG, leads: tuple[int, ...], samples: int) -> Params:
    u = draw.uniform(RandomStream.ROTATION, ONE_FOR_ALL, range(6))[:, :, 0]
    angle_rad = np.deg2rad(threekg.angle_deg) * (2 * u[..., :3] - 1)
    scale = 1 + (threekg.scale - 1) * u[..., 3:]
    p = {"matrix": threekg_matrix(angle_rad, scale)}
    if threekg.time_mask:
        place = draw.uniform(RandomStream.TIME_MASK, leads, [0])
        start = np.floor(place * samples)
        stop = start + np.floor(threekg.time_mask * samples)
        p["window_start"] = start
        p["window_stop"] = stop
        p["window_wrap"] = stop - samples
    return p


def threekg_matrix(angle_rad: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """[..., 12, 12] float64: twelve leads -> dipole -> rotated, then scaled along each axis ->
    twelve leads.

    The dipole has only three components, so even angle 0 with scale 1 is a projection, not the
    identity.
    """
    stretched = scale[..., None] * rotation(angle_rad)
    return np.asarray(FROM_DIPOLE @ stretched @ TO_DIPOLE)


def rotation(angle_rad: np.ndarray) -> np.ndarray:
    """[..., 3] -> [..., 3, 3]: rotate about the fixed axes z, then y, then x (scipy's
    Rotation.from_euler("zyx"))."""
    about_z = _about(2, angle_rad[..., 0])
    about_y = _about(1, angle_rad[..., 1])
    about_x = _about(0, angle_rad[..., 2])
    return np.asarray(about_x @ about_y @ about_z)


def _about(axis: int, angle: np.ndarray) -> np.ndarray:
    i, j = (axis + 1) % 3, (axis + 2) % 3
    matrix = np.zeros((*angle.shape, 3, 3))
    matrix[..., axis, axis] = 1
    matrix[..., i, i] = np.cos(angle)
    matrix[..., j, j] = np.cos(angle)
    matrix[..., j, i] = np.sin(angle)
    matrix[..., i, j] = -np.sin(angle)
    return matrix


@lru_cache(maxsize=1)  # shared by all loaders of a run
def white_bank(seed: int) -> np.ndarray:
    """Standard normal float32 numbers; they take 0.2 s."""
    numbers = counter.normal(seed, RandomStream.WHITE, np.arange(WHITE_BANK))
    return numbers.astype(np.float32)


def white(bank: Tensor, start: Tensor, samples: int) -> Tensor:
    """Copy noise [.., L, T] from a bank at p["white_start"], [.., L, 1]."""
    windows = bank.unfold(0, samples, 1)
    slices = windows.index_select(0, start.reshape(-1))
    return slices.view(*start.shape[:-1], samples)
