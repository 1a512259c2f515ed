"""Augmentations of ECG crops in torch, on any device. dali.py has the same formulas as a DALI graph.

    augment_draws.draws(config, seed, epoch, crop) -> parameters p x -> 3KG matrix -> + gain * wave
    of each noise -> limb leads from I and II -> model's leads -> * window * lead mask -> x

`augment` is deterministic: all random numbers are in p. Random lead masking (RLM) comes last, so
masked leads and missing leads are exactly zero. The formulas are from Oh et al. 2022, appendix B.
The variants of the authors' code (kinds authors_*) draw their parameters differently and recompute
the limb leads from I and II.

Shapes: B crops, S adjacent halves or views, L leads, T samples, K components. x is [B, S, L, T]
float32 millivolts; p holds [B, S, 1 or L, 1 or K]. One half (S = 1) becomes two views if p has
parameters for two. `python -m omnilead.engine.report.picture
augmentations.png --data DATASET` draws every augmentation.
"""

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from omnilead.engine.common import ALL, OWN, ConfigError, parse_leads

PAPER_NOISE = ("powerline", "emg", "wander", "shift")
AUTHORS_NOISE = tuple(f"authors_{kind}" for kind in PAPER_NOISE)
NOISE_SETS = {
    "physio3": PAPER_NOISE[:3],
    "physio4": PAPER_NOISE,
    "authors_physio3": AUTHORS_NOISE[:3],
    "authors_physio4": AUTHORS_NOISE,
}
WANDER_COMPONENTS = 3
TAU = 2 * math.pi
FINE = 50  # samples in a fine step of `cosines`: about the square root of T

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
# in YAML, 3 is a number
AsText = BeforeValidator(lambda value: str(value) if type(value) is int else value)
Millivolts = Annotated[float, Field(ge=0, le=10)]


@checked_dataclass(frozen=True, config=STRICT)
class AmplitudeMv:
    """Largest amplitude of each kind of noise, as in the paper; the authors' code has 0.1
    (tasks/ecg_pretraining.py:136)."""

    powerline: Millivolts = 0.5  # mains hum
    emg: Millivolts = 0.5  # muscle noise
    wander: Millivolts = 0.5  # baseline wander
    shift: Millivolts = 0.5  # jumps of the baseline


@checked_dataclass(frozen=True, config=STRICT)
class ThreeKG:
    """3KG: the heart seen from another angle (Gopal et al. 2021; fairseq-signals
    perturb_ecg_dataset.py:120-199)."""

    # largest angle of the dipole's three rotations; each is uniform within +- this
    angle_deg: Annotated[float, Field(ge=0, le=180)] = 45.0
    # largest scale factor; one for each axis, uniform from 1 to this
    scale: Annotated[float, Field(ge=1, le=10)] = 1.5
    # share of the samples to zero, in one cyclic window per lead
    time_mask: Annotated[float, Field(ge=0, le=0.99)] = 0.5


@checked_dataclass(frozen=True, config=STRICT)
class AugmentConfig:
    # random lead masking: probability of zeroing each lead of each half; 0 = off
    rlm: Annotated[float, Field(ge=0, le=1)] = 0.5
    rlm_keep_one: bool = False  # never mask all leads of a half (the paper's masking can)
    # kinds of noise, or a set: physio3, physio4, authors_physio3, authors_physio4
    noise: str | tuple[str, ...] = ()
    amplitude_mv: AmplitudeMv = field(default_factory=AmplitudeMv)
    # 60 in the Americas; authors_powerline picks 50 or 60 at random
    powerline_hz: Literal[50, 60] = 50
    # number of harmonics of powerline_hz
    powerline_components: Annotated[int, Field(ge=1, le=4)] = 1
    # draw noise parameters for each lead instead of once for all; white noise always differs by
    # lead
    per_lead: bool = False
    # recompute the limb leads from I and II after adding noise; None: for authors_* only
    dependency: bool | None = None
    threekg: ThreeKG | None = None
    leads: Annotated[str | tuple[str, ...], AsText] = "12"  # leads that the model uses
    padded: bool = True  # keep the other leads as zeros; false: leave them out
    # your own function(x_BSLT, generator) as file.py:function, applied after the others:
    # omnilead.engine.data.augmenter
    extra: str = ""

    def __post_init__(self) -> None:
        if self.rlm == 1 and not self.rlm_keep_one:
            raise ConfigError(
                "augment.rlm=1: this masks every lead: use less than 1, or rlm_keep_one: true"
            )
        for kind in self.kinds:
            if kind not in PAPER_NOISE + AUTHORS_NOISE:
                known = ", ".join([*PAPER_NOISE, *AUTHORS_NOISE, *NOISE_SETS])
                raise ConfigError(
                    f"augment.noise={self.noise!r}: unknown kind {kind!r}: use {known}"
                )
        if len(set(map(formula, self.kinds))) < len(self.kinds):
            raise ConfigError(
                f"augment.noise={self.noise!r}: a kind occurs twice: give each once, the paper's "
                "or the authors'"
            )
        if self.per_lead and any(kind in AUTHORS_NOISE for kind in self.kinds):
            raise ConfigError(
                "augment.per_lead=True: the authors' kinds fix what is drawn per lead: use false"
            )
        if self.extra and not OWN.fullmatch(self.extra):
            raise ConfigError(f"augment.extra={self.extra!r}: must be file.py:function")
        parse_leads(self.leads, "augment.leads")

    @property
    def kinds(self) -> tuple[str, ...]:
        names = self.noise.split(",") if isinstance(self.noise, str) else self.noise
        return tuple(
            kind for name in names if name for kind in NOISE_SETS.get(name.strip(), (name.strip(),))
        )

    @property
    def changes_zeros(self) -> bool:
        """Whether missing leads must be masked explicitly: they would get noise, or be the one lead
        that rlm_keep_one keeps."""
        return bool(self.kinds) or self.threekg is not None or self.rlm_keep_one

    @property
    def refits_limb_leads(self) -> bool:
        authors = any(kind in AUTHORS_NOISE for kind in self.kinds)
        return bool(self.kinds) and (authors if self.dependency is None else self.dependency)

    @property
    def seen(self) -> tuple[int, ...]:
        return parse_leads(self.leads, "augment.leads")

    @property
    def output_leads(self) -> tuple[int, ...]:
        return ALL if self.padded else self.seen

    @property
    def noise_leads(self) -> tuple[int, ...]:
        """Leads that get noise: all of them if some leads are later computed from others."""
        return ALL if self.refits_limb_leads or self.threekg else self.output_leads


def formula(kind: str) -> str:
    return kind.removeprefix("authors_")


def left_out(config: AugmentConfig, p: Mapping[str, Any], applied: str) -> list[str]:
    """What a second implementation of `augment` would leave out: settings that differ from their
    defaults, and names in p, that are not in its list of what it applies."""
    default, needed = type(config)(), set(p)
    for setting in fields(config):
        if getattr(config, setting.name) != getattr(default, setting.name):
            needed.add(setting.name)
    return sorted(needed - set(applied.split()))


class Axis(NamedTuple):
    """Three time axes, each [T] float32."""

    sample: Tensor
    time_s: Tensor
    # time modulo 0.1 s, the common period of all mains hum: float32 loses the phase of large angles
    mains_s: Tensor


def time_axis(samples: int, fs_hz: float, device: torch.device | str = "cpu") -> Axis:
    index = np.arange(samples)
    time_s = index / fs_hz
    mains_s = (time_s + 0.05) % 0.1 - 0.05
    axes = [torch.from_numpy(axis.astype(np.float32)) for axis in (index, time_s, mains_s)]
    return Axis(*(axis.to(device) for axis in axes))


def augment(x: Tensor, p: Mapping[str, Tensor], config: AugmentConfig, time: Axis) -> Tensor:
    """Apply the augmentations of `config` with the parameters p. Overwrites x where it can.

    The kind emg needs p["white"], standard normal noise [.., S, len(config.noise_leads), T].
    """
    if config.threekg:
        x = p["matrix"] @ x
    noise_first = config.noise_leads != config.output_leads
    if not noise_first:
        x = _select(x, config.output_leads)
    if config.kinds:
        x = _add_noise(x, p, config, time)
    if config.refits_limb_leads:  # it is linear: once after all kinds equals once after each
        x = refit_limb_leads(x)
    if noise_first:
        x = _select(x, config.output_leads)
    if config.threekg and config.threekg.time_mask:
        x = _multiply(x, outside_window(p, time))
    if "keep" in p:
        x = _multiply(x, p["keep"])
    return x


def shared_wave(kind: str, p: Mapping[str, Tensor], time: Axis) -> Tensor:
    """A kind of noise other than emg, gain included: [.., S, 1 or L, T]."""
    gain, wave = _noise(kind, p, time)
    return wave if gain is None else gain * wave


def _noise(kind: str, p: Mapping[str, Tensor], time: Axis) -> tuple[Tensor | None, Tensor]:
    """A gain [.., S, 1 or L, 1], None for 1, and a wave [.., S, 1 or L, T]."""
    if kind == "powerline":
        # n(t) = sum_k a_k cos(2 pi k f t + phi), a_k ~ U(0, max), phi ~ U(0, 2 pi)
        a, hz, phase = p["powerline_amplitude"], p["powerline_hz"], p["powerline_phase"]
        return None, cosines(a, hz, phase, time.mains_s)
    if kind == "emg":
        # n(t) ~ N(0, a^2), a ~ U(0, max)
        return p["emg_amplitude"], p["white"]
    if kind == "wander":
        # n(t) = C sum_k a_k cos(2 pi k df t + phi_k), C ~ N(1, 0.5^2), a_k ~ U(0, max),
        # df ~ U(0.01, 0.2) Hz
        a, hz, phase = p["wander_amplitude"], p["wander_hz"], p["wander_phase"]
        return p["wander_gain"], cosines(a, hz, phase, time.time_s)
    # shift: n(t) = n from start to stop and 0 elsewhere, n ~ U(-max, max)
    return p["shift_amplitude"], inside_shift(p, time)


def _add_noise(x: Tensor, p: Mapping[str, Tensor], config: AugmentConfig, time: Axis) -> Tensor:
    shared, by_lead = [], []
    for kind in config.kinds:
        gain, wave = _noise(formula(kind), p, time)
        per_lead = wave.shape[-2] > 1 or (gain is not None and gain.shape[-2] > 1)
        if per_lead:
            by_lead.append((gain, wave))
        else:
            shared.append(wave if gain is None else gain * wave)
    if shared:  # summed first: their sum takes 1/L of the memory of x
        total = functools.reduce(operator.add, shared)
        x = _owned(x, total).add_(total)
    for gain, wave in by_lead:
        x = _owned(x, wave)
        if gain is None:
            x.add_(wave)
        else:
            x.addcmul_(gain, wave.to(x.dtype))  # the shift's wave is bool
    return x


def cosines(amplitude: Tensor, hz: Tensor, phase: Tensor, time_s: Tensor) -> Tensor:
    """sum_k a_k cos(2 pi f_k t + phi_k), over the last axis of a, f and phi.

    cos(u + v) = cos u cos v - sin u sin v, where u is every 50th sample and v the offset from it,
    0 to 49: 50 times fewer cosines. It also holds for time modulo 0.1 s, where t is u + v up to a
    whole number of periods.
    """
    coarse_s, fine_s = time_s[::FINE], time_s[:FINE]
    total: Tensor | None = None
    for k in range(amplitude.shape[-1]):
        a = amplitude[..., k : k + 1, None]
        omega = TAU * hz[..., k : k + 1]
        u = (omega * coarse_s + phase[..., k : k + 1])[..., None]
        v = (omega * fine_s)[..., None, :]
        if total is None:
            total = (a * u.cos()) * v.cos()
        else:  # in place: a new tensor would be one more pass over memory
            total.addcmul_(a * u.cos(), v.cos())
        total.addcmul_(a * u.sin(), v.sin(), value=-1)
    assert total is not None
    return total.flatten(-2)[..., : time_s.shape[0]]


def inside_shift(p: Mapping[str, Tensor], time: Axis) -> Tensor:
    return (time.sample >= p["shift_start"]) & (time.sample < p["shift_stop"])


def outside_window(p: Mapping[str, Tensor], time: Axis) -> Tensor:
    """True outside a cyclic window from start to stop."""
    before = (time.sample < p["window_start"]) & (time.sample >= p["window_wrap"])
    return before | (time.sample >= p["window_stop"])


def refit_limb_leads(x: Tensor) -> Tensor:
    """Recompute III, aVR, aVL and aVF from I and II."""
    made = derived_leads(x[..., 0:1, :], x[..., 1:2, :])
    return torch.cat([x[..., 0:2, :], *made, x[..., 6:12, :]], dim=-2)


def derived_leads(one: Tensor, two: Tensor) -> list[Tensor]:
    """III, aVR, aVL and aVF (Einthoven, Goldberger)."""
    return [two - one, (one + two) * -0.5, one - two * 0.5, two - one * 0.5]


def _select(x: Tensor, leads: tuple[int, ...]) -> Tensor:
    if leads == ALL:
        return x
    return torch.cat([x[..., lead : lead + 1, :] for lead in leads], dim=-2)


def _multiply(x: Tensor, factor: Tensor) -> Tensor:
    return _owned(x, factor).mul_(factor)


def _owned(x: Tensor, other: Tensor) -> Tensor:
    """x, or a copy of it in the shape of the result, if one half becomes two views."""
    shape = torch.broadcast_shapes(x.shape, other.shape)
    return x if x.shape == shape else x.expand(shape).clone()
