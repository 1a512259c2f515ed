"""Physiological noise of four kinds (Oh et al. 2022, appendix B), and the limb leads recomputed
after it.

The kinds authors_* are those of the authors' code, fairseq-signals augmentations.py: they draw their
parameters differently and recompute the limb leads from I and II.
"""

from dataclasses import field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from ...settings.counter import RandomStream
from ...settings.errors import ConfigError
from ...settings.leads import ALL_LEADS
from .leads import LeadSettings, limb_leads
from .stage import (
    ONE_DRAW_FOR_ALL_LEADS,
    STRICT,
    TAU,
    WHITE_BANK_SIZE,
    Node,
    Nodes,
    Noise,
    Params,
    Random,
    Stage,
    Wave,
)

PAPER_NOISE = ("powerline", "emg", "wander", "shift")
AUTHORS_NOISE = tuple(f"authors_{kind}" for kind in PAPER_NOISE)
NOISE_SETS = {
    "physio3": PAPER_NOISE[:3],
    "physio4": PAPER_NOISE,
    "authors_physio3": AUTHORS_NOISE[:3],
    "authors_physio4": AUTHORS_NOISE,
}
WANDER_COMPONENTS = 3
Millivolts = Annotated[float, Field(ge=0, le=10)]


@checked_dataclass(frozen=True, config=STRICT)
class AmplitudeMv:
    """Largest amplitude of each kind of noise in mV. The defaults are those of Oh et al. 2022; the
    code of the paper's authors uses 0.1 (fairseq-signals tasks/ecg_pretraining.py:136)."""

    powerline: Millivolts = 0.5  # mains hum
    emg: Millivolts = 0.5  # muscle noise
    wander: Millivolts = 0.5  # baseline wander
    shift: Millivolts = 0.5  # jumps of the baseline


@checked_dataclass(frozen=True, config=STRICT)
class NoiseSettings(LeadSettings):
    # kinds of noise (powerline, emg, wander, shift, or one of these with the prefix authors_), or a
    # set of kinds: physio3, physio4, authors_physio3, authors_physio4
    noise: str | tuple[str, ...] = ()
    amplitude_mv: AmplitudeMv = field(default_factory=AmplitudeMv)
    # true: draw the parameters of the noise for each lead; false: draw them once for all leads.
    # White noise always differs between leads
    per_lead: bool = False
    # true: recompute the limb leads from I and II after adding noise; None: only if the name of a
    # kind of noise begins with authors_
    dependency: bool | None = None
    # frequency of the mains, 60 in the Americas; authors_powerline picks 50 or 60 at random instead
    powerline_hz: Literal[50, 60] = 50
    # number of harmonics of powerline_hz
    powerline_components: Annotated[int, Field(ge=1, le=4)] = 1

    @property
    def kinds(self) -> tuple[str, ...]:
        names = self.noise.split(",") if isinstance(self.noise, str) else self.noise
        return tuple(
            kind for name in names if name for kind in NOISE_SETS.get(name.strip(), (name.strip(),))
        )

    @property
    def recomputes_limb_leads(self) -> bool:
        authors = any(kind in AUTHORS_NOISE for kind in self.kinds)
        return bool(self.kinds) and (authors if self.dependency is None else self.dependency)

    @property
    def noise_leads(self) -> tuple[int, ...]:
        return ALL_LEADS if self.recomputes_limb_leads else self.output_leads


class PhysiologicalNoise(Noise):
    """Noise of one kind, made as the paper describes it (kinds in PAPER_NOISE) or as the code of the
    paper's authors makes it (AUTHORS_NOISE)."""

    settings: NoiseSettings
    kind = ""

    @property
    def is_authors_variant(self) -> bool:
        return f"authors_{self.kind}" in self.settings.kinds

    @property
    def active(self) -> bool:
        return self.is_authors_variant or self.kind in self.settings.kinds

    @property
    def description(self) -> str:
        return f"authors_{self.kind}" if self.is_authors_variant else self.kind

    @property
    def fits_single_crop_writer(self) -> bool:
        return not (self.is_authors_variant or self.settings.per_lead)

    @property
    def leads(self) -> tuple[int, ...]:
        """Returns the leads for which parameters are drawn. Without `per_lead`, these are
        ONE_DRAW_FOR_ALL_LEADS."""
        return self.settings.noise_leads if self.settings.per_lead else ONE_DRAW_FOR_ALL_LEADS

    def check(self) -> None:
        named, kinds = f"augment.noise={self.settings.noise!r}", self.settings.kinds
        for kind in kinds:
            if kind not in PAPER_NOISE + AUTHORS_NOISE:
                known_kinds = ", ".join([*PAPER_NOISE, *AUTHORS_NOISE, *NOISE_SETS])
                raise ConfigError(f"{named}: unknown kind {kind!r}: use {known_kinds}")
        if len({kind.removeprefix("authors_") for kind in kinds}) < len(kinds):
            raise ConfigError(
                f"{named}: a kind occurs twice: give each kind once, with or without authors_"
            )
        if self.settings.per_lead and set(kinds) & set(AUTHORS_NOISE):
            raise ConfigError(
                "augment.per_lead=True: authors_* noise itself sets what is drawn for each lead: use false"
            )


class Powerline(PhysiologicalNoise):
    """Mains hum: n(t) = sum_k a_k cos(2 pi k f t + phi), a_k ~ U(0, max), phi ~ U(0, 2 pi)"""

    kind = "powerline"
    stream = 6
    examples = (
        {"noise": "powerline"},
        {"noise": "authors_powerline"},
        {"noise": "powerline", "powerline_components": 3, "powerline_hz": 60, "per_lead": True},
    )

    def draw(self, random: Random) -> Params:
        count = self.settings.powerline_components
        share = random.uniform(self.stream, self.leads, range(2, 2 + count))
        # all components have the same phase, as in Oh et al. 2022
        turn = random.uniform(self.stream, self.leads)
        hz: Any = self.settings.powerline_hz
        # the code of the paper's authors picks 50 or 60 Hz at random (fairseq-signals
        # augmentations.py:61)
        if self.is_authors_variant:
            american = random.uniform(self.stream, ONE_DRAW_FOR_ALL_LEADS, [1]) >= 0.5
            hz = np.where(american, 60, 50)
        return {
            "powerline_amplitude": share * self.settings.amplitude_mv.powerline,
            "powerline_phase": np.broadcast_to(turn * TAU, share.shape),
            "powerline_hz": np.broadcast_to(hz * np.arange(1, 1 + count), share.shape),
        }

    def wave(self, p: Nodes, ops: Any) -> Wave:
        a, hz, phase = p["powerline_amplitude"], p["powerline_hz"], p["powerline_phase"]
        count = self.settings.powerline_components
        return None, ops.cosines(a, hz, phase, ops.mains_s, count)


class Emg(PhysiologicalNoise):
    """Muscle (electromyographic) noise: n(t) ~ N(0, a^2), a ~ U(0, max). Each lead of each crop
    gets a random slice of the bank of white noise."""

    kind = "emg"
    stream = 7
    bank_parameters = ("emg_amplitude", "white_start")
    examples = ({"noise": "emg"}, {"noise": "authors_emg"}, {"noise": "emg", "per_lead": True})

    def draw(self, random: Random) -> Params:
        leads = self.settings.noise_leads
        # each lead has its own amplitude in the code of the paper's authors (fairseq-signals
        # augmentations.py:92)
        share = random.uniform(self.stream, leads if self.is_authors_variant else self.leads)
        place = random.uniform(RandomStream.WHITE, leads)
        start = place * (WHITE_BANK_SIZE - random.samples)
        return {
            "emg_amplitude": share * self.settings.amplitude_mv.emg,
            "white_start": start.astype(np.int32),
        }


class Wander(PhysiologicalNoise):
    """Baseline wander: n(t) = C sum_k a_k cos(2 pi k df t + phi_k), C ~ N(1, 0.5^2), a_k ~ U(0, max),
    df ~ U(0.01, 0.2) Hz"""

    kind = "wander"
    stream = 8
    examples = (
        {"noise": "wander"},
        {"noise": "authors_wander"},
        {"noise": "wander", "per_lead": True},
    )

    def draw(self, random: Random) -> Params:
        leads, first = self.leads, [3 * WANDER_COMPONENTS]
        share = random.uniform(self.stream, leads, range(WANDER_COMPONENTS))
        turn = random.uniform(self.stream, leads, range(WANDER_COMPONENTS, 2 * WANDER_COMPONENTS))
        # the code of the paper's authors draws three frequencies, not one and its multiples, and C for
        # each lead (fairseq-signals augmentations.py:160-180)
        if self.is_authors_variant:
            place = random.uniform(
                self.stream,
                ONE_DRAW_FOR_ALL_LEADS,
                range(2 * WANDER_COMPONENTS, 3 * WANDER_COMPONENTS),
            )
            hz = 0.01 + place * 0.19
            spread = random.normal(self.stream, self.settings.noise_leads, first)
        else:
            place = random.uniform(self.stream, leads, [2 * WANDER_COMPONENTS])
            hz = (0.01 + place * 0.19) * np.arange(1, 1 + WANDER_COMPONENTS)
            spread = random.normal(self.stream, leads, first)
        return {
            "wander_amplitude": share * self.settings.amplitude_mv.wander,
            "wander_phase": turn * TAU,
            "wander_hz": hz,
            "wander_gain": 1 + 0.5 * spread,
        }

    def wave(self, p: Nodes, ops: Any) -> Wave:
        a, hz, phase = p["wander_amplitude"], p["wander_hz"], p["wander_phase"]
        return p["wander_gain"], ops.cosines(a, hz, phase, ops.time_s, WANDER_COMPONENTS)


class Shift(PhysiologicalNoise):
    """Jumps of the baseline: n(t) = n from start to stop and 0 elsewhere, n ~ U(-max, max). The
    paper (Oh et al. 2022) only says "a randomly sampled span". Here the length of the span is
    drawn from N(0.2 T, (0.04 T)^2), as in the code of the paper's authors, and its position is
    uniform."""

    kind = "shift"
    stream = 9
    examples = (
        {"noise": "shift"},
        {"noise": "authors_shift"},
        {"noise": "shift", "per_lead": True},
    )

    def draw(self, random: Random) -> Params:
        spread = random.normal(self.stream, self.leads, [1])
        length = (0.2 + 0.04 * spread) * random.samples
        # hardly ever clips: the lower bound is 5 standard deviations from the mean, the upper 20
        length = np.clip(length, 1, random.samples)
        place = random.uniform(self.stream, self.leads, [2])
        start = np.floor(place * (random.samples - length))
        u = random.uniform(self.stream, self.leads)
        amplitude = (2 * u - 1) * self.settings.amplitude_mv.shift
        # The code of the paper's authors takes +1 or -1 mV for each lead, and subtracts one U(0, max)
        # for all leads (fairseq-signals augmentations.py:124-126). They probably meant to multiply
        # the two.
        if self.is_authors_variant:
            up = random.uniform(self.stream, self.settings.noise_leads, [3]) < 0.5
            amplitude = np.where(up, 1.0, -1.0) - u * self.settings.amplitude_mv.shift
        stop = np.floor(start + length)
        return {"shift_amplitude": amplitude, "shift_start": start, "shift_stop": stop}

    def wave(self, p: Nodes, ops: Any) -> Wave:
        inside = (ops.sample >= p["shift_start"]) & (ops.sample < p["shift_stop"])
        return p["shift_amplitude"], inside


class LimbLeads(Stage):
    """Recomputes III, aVR, aVL and aVF from I and II, and returns only the output leads.
    Recomputing is linear: once after all noise gives the same as once after each kind of noise."""

    settings: NoiseSettings
    examples = ({"noise": "wander", "dependency": True},)

    @property
    def active(self) -> bool:
        return self.settings.recomputes_limb_leads

    def apply(self, x: Node, p: Nodes, ops: Any) -> Node:
        leads = [ops.lead(x, lead) for lead in ALL_LEADS]
        leads[:6] = limb_leads(*leads[:2])
        return ops.cat([leads[lead] for lead in self.settings.output_leads])
