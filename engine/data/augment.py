"""Augmentations of ECG crops. Each is one formula that runs in numpy, in torch on any device and in
DALI.

    augment_draws.draws(config, seed, epoch, crop) -> parameters p x -> 3KG matrix -> + gain * wave
    of each noise -> limb leads from I and II -> model's leads -> * window * lead mask -> x

`augment` is deterministic: all random numbers are in p. Random lead masking (RLM) comes last, so
masked leads and missing leads are exactly zero. The formulas are from Oh et al. 2022, appendix B.
The variants of the authors' code (kinds authors_*) draw their parameters differently and recompute
the limb leads from I and II.

Shapes: B crops, S adjacent halves or views, L leads, T samples, K components. x is [B, S, L, T]
float32 millivolts; p holds [B, S, 1 or L, 1 or K]. DALI has no B axis. numpy and torch turn one
half (S = 1) into two views if p has parameters for two. `python -m omnilead.engine.report.picture
augmentations.png --data DATASET` draws every augmentation.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

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
FINE = 50  # samples in a fine step of _factored_cosines: about the square root of T

STRICT = ConfigDict(strict=True, extra="forbid")
Millivolts = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
Array = Any  # numpy array, torch tensor or DALI node
Product = tuple[Array, Array]  # gain [.., S, 1|L, 1], wave [.., S, 1|L, T]


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
    angle_deg: Annotated[float, Field(ge=0, le=180, allow_inf_nan=False)] = 45.0
    # largest scale factor; one for each axis, uniform from 1 to this
    scale: Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)] = 1.5
    # share of the samples to zero, in one cyclic window per lead
    time_mask: Annotated[float, Field(ge=0, le=0.99, allow_inf_nan=False)] = 0.5


@checked_dataclass(frozen=True, config=STRICT)
class AugmentConfig:
    # random lead masking: probability of zeroing each lead of each half; 0 = off
    rlm: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    rlm_keep_one: bool = False  # never mask all leads of a half (the paper's masking can)
    noise: (
        str | tuple[str, ...]
    ) = ()  # kinds of noise, or a set: physio3, physio4, authors_physio3, authors_physio4
    amplitude_mv: AmplitudeMv = field(default_factory=AmplitudeMv)
    powerline_hz: Literal[50, 60] = (
        50  # 60 in the Americas; authors_powerline picks 50 or 60 at random
    )
    powerline_components: Annotated[int, Field(ge=1, le=4)] = (
        1  # number of harmonics of powerline_hz
    )
    # draw noise parameters for each lead instead of once for all; white noise always differs by
    # lead
    per_lead: bool = False
    dependency: bool | None = (
        None  # recompute the limb leads from I and II after adding noise; None: for authors_* only
    )
    threekg: ThreeKG | None = None
    leads: str | tuple[str, ...] = "12"  # leads that the model uses
    padded: bool = True  # keep the other leads as zeros; false: leave them out
    # your own function(x_BSLT, generator) as file.py:function, applied after the others:
    # engine.data.extra
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


class Axis(NamedTuple):
    """Three time axes, each [T]."""

    index: Array
    time_s: Array
    # time modulo 0.1 s, the common period of all mains hum: float32 loses the phase of large angles
    mains_s: Array


@dataclass(frozen=True)
class Ops:
    """The operations that the three libraries write differently; + - * < & are the same in all."""

    constant: Callable[[np.ndarray], Array]
    cosines: Callable[
        [Array, Array, Array, Array, int], Array
    ]  # a, f, phi, t, K -> sum_k a_k cos(2 pi f_k t + phi_k)
    rows: Callable[[Array, int, int], Array]  # leads i to j
    cat: Callable[[Sequence[Array]], Array]  # along the leads
    mix: Callable[[Array, Array], Array]  # [.., L, L] @ [.., L, T]
    add: Callable[[Array, Sequence[Product]], Array]  # x + sum of gain * wave; may overwrite x
    mul: Callable[[Array, Array], Array]  # x * factor; may overwrite x


def axis(samples: int, fs_hz: float, ops: Ops) -> Axis:
    index = np.arange(samples)
    time_s = index / fs_hz
    mains_s = (time_s + 0.05) % 0.1 - 0.05
    return Axis(*(ops.constant(values.astype(np.float32)) for values in (index, time_s, mains_s)))


def augment(x: Array, p: Mapping[str, Array], config: AugmentConfig, time: Axis, ops: Ops) -> Array:
    """Apply the augmentations of `config` with the parameters p. torch overwrites x where it can.

    The kind emg needs p["white"], standard normal noise [.., S, len(config.noise_leads), T].
    """
    if config.threekg:
        x = ops.mix(p["matrix"], x)
    if config.noise_leads == config.output_leads:
        x = _select(x, config.output_leads, ops)
    if config.kinds:
        x = ops.add(x, [WAVES[formula(kind)](p, time, config, ops) for kind in config.kinds])
    if config.refits_limb_leads:  # it is linear: once after all kinds equals once after each
        x = refit_limb_leads(x, ops)
    if config.noise_leads != config.output_leads:
        x = _select(x, config.output_leads, ops)
    if config.threekg and config.threekg.time_mask:
        x = ops.mul(x, outside_window(p, time))
    return ops.mul(x, p["keep"]) if "keep" in p else x


def powerline(p: Mapping[str, Array], time: Axis, config: AugmentConfig, ops: Ops) -> Product:
    """n(t) = sum_k a_k cos(2 pi k f t + phi), a_k ~ U(0, max), phi ~ U(0, 2 pi)."""
    a, f, phi = p["powerline_amplitude"], p["powerline_hz"], p["powerline_phase"]
    return 1.0, ops.cosines(a, f, phi, time.mains_s, config.powerline_components)


def emg(p: Mapping[str, Array], time: Axis, config: AugmentConfig, ops: Ops) -> Product:
    """n(t) ~ N(0, a^2), a ~ U(0, max)."""
    return p["emg_amplitude"], p["white"]


def wander(p: Mapping[str, Array], time: Axis, config: AugmentConfig, ops: Ops) -> Product:
    """n(t) = C sum_k a_k cos(2 pi k df t + phi_k), C ~ N(1, 0.5^2), a_k ~ U(0, max), df ~ U(0.01,
    0.2) Hz."""
    a, f, phi = p["wander_amplitude"], p["wander_hz"], p["wander_phase"]
    return p["wander_gain"], ops.cosines(a, f, phi, time.time_s, WANDER_COMPONENTS)


def shift(p: Mapping[str, Array], time: Axis, config: AugmentConfig, ops: Ops) -> Product:
    """n(t) = n from start to stop and 0 elsewhere, n ~ U(-max, max)."""
    return p["shift_amplitude"], (time.index >= p["shift_start"]) & (time.index < p["shift_stop"])


WAVES = {"powerline": powerline, "emg": emg, "wander": wander, "shift": shift}


def outside_window(p: Mapping[str, Array], time: Axis) -> Array:
    """True outside a cyclic window from start to stop."""
    return (time.index < p["window_start"]) & (time.index >= p["window_wrap"]) | (
        time.index >= p["window_stop"]
    )


def refit_limb_leads(x: Array, ops: Ops) -> Array:
    """Recompute III, aVR, aVL and aVF from I and II (Einthoven, Goldberger)."""
    one, two = ops.rows(x, 0, 1), ops.rows(x, 1, 2)
    made = [two - one, (one + two) * -0.5, one - two * 0.5, two - one * 0.5]
    return ops.cat([ops.rows(x, 0, 2), *made, ops.rows(x, 6, 12)])


def _select(x: Array, leads: tuple[int, ...], ops: Ops) -> Array:
    return x if leads == ALL else ops.cat([ops.rows(x, lead, lead + 1) for lead in leads])


def _plain_cosines(
    cos: Callable[[Array], Array], part: Callable[[Array, int], Array]
) -> Callable[..., Array]:
    def cosines(amplitude: Array, hz: Array, phase: Array, time_s: Array, count: int) -> Array:
        waves = (
            part(amplitude, k) * cos(TAU * part(hz, k) * time_s + part(phase, k))
            for k in range(count)
        )
        return functools.reduce(operator.add, waves)

    return cosines


def _factored_cosines(
    amplitude: Array, hz: Array, phase: Array, time_s: Array, count: int
) -> Array:
    """The same with cos(u + v) = cos u cos v - sin u sin v, where u is every 50th sample and v the
    offset from it, 0 to 49: 50 times fewer cosines. It also holds for time modulo 0.1 s, where t is
    u + v up to a whole number of periods.
    """
    coarse_s, fine_s = time_s[::FINE], time_s[:FINE]
    total = None
    for k in range(count):
        a, omega, phi = amplitude[..., k : k + 1], TAU * hz[..., k : k + 1], phase[..., k : k + 1]
        u, v = (omega * coarse_s + phi)[..., None], (omega * fine_s)[..., None, :]
        a = a[..., None]
        first = (a * u.cos()) * v.cos() if total is None else total.addcmul_(a * u.cos(), v.cos())
        total = first.addcmul_(a * u.sin(), v.sin(), value=-1)
    return total.flatten(-2)[..., : time_s.shape[0]]  # type: ignore[union-attr]


def numpy_ops() -> Ops:
    return Ops(
        constant=np.asarray,
        cosines=_plain_cosines(np.cos, lambda a, k: a[..., k : k + 1]),
        rows=lambda x, i, j: x[..., i:j, :],
        cat=lambda parts: np.concatenate(parts, axis=-2),
        mix=np.matmul,
        add=lambda x, products: sum((gain * wave for gain, wave in products), x),
        mul=operator.mul,
    )


def torch_ops() -> Ops:
    """Work in place, in few passes over x. torch.compile can fuse them into one kernel."""
    import torch

    broadcast_shapes: Any = torch.broadcast_shapes  # not typed

    def owned(x: Array, *others: Array) -> Array:
        """x, or a copy of it in the shape of the result, if one half becomes two views."""
        shape = broadcast_shapes(x.shape, *(other.shape for other in others))
        return x if x.shape == shape else x.expand(shape).clone()

    def add(x: Array, products: Sequence[Product]) -> Array:
        def per_lead(product: Product) -> bool:
            gain, wave = product
            return wave.shape[-2] > 1 or (not isinstance(gain, float) and gain.shape[-2] > 1)

        if shared := [gain * wave for gain, wave in products if not per_lead((gain, wave))]:
            total = functools.reduce(operator.add, shared)  # takes 1/L of the memory of x
            x = owned(x, total).add_(total)
        for gain, wave in filter(per_lead, products):
            x = owned(x, wave)
            x = (
                x.add_(wave) if isinstance(gain, float) else x.addcmul_(gain, wave.to(x.dtype))
            )  # the shift's wave is bool
        return x

    return Ops(
        constant=torch.from_numpy,
        cosines=_factored_cosines,
        rows=lambda x, i, j: x[..., i:j, :],
        cat=lambda parts: torch.cat(list(parts), dim=-2),
        mix=torch.matmul,
        add=add,
        mul=lambda x, factor: owned(x, factor).mul_(factor),
    )


def dali_ops() -> Ops:
    """For a DALI pipeline, whose samples have no batch axis: x_SLT. On the CPU it is several times
    slower than torch."""
    from nvidia.dali import fn, types
    from nvidia.dali import math as dali_math

    constant: Any = types.Constant  # not typed

    def mix(matrix: Array, x: Array) -> Array:
        """Matrix product as a sum over leads of column times row: DALI has none."""
        products = (matrix[:, :, lead : lead + 1] * x[:, lead : lead + 1, :] for lead in ALL)
        return functools.reduce(operator.add, products)

    return Ops(
        constant=constant,
        cosines=_plain_cosines(dali_math.cos, lambda a, k: a[:, :, k : k + 1]),
        rows=lambda x, i, j: x[:, i:j, :],
        cat=lambda parts: fn.cat(*parts, axis=1),
        mix=mix,
        add=lambda x, products: functools.reduce(
            operator.add, (gain * wave for gain, wave in products), x
        ),
        mul=operator.mul,
    )
