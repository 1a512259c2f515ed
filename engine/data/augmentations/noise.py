"""What the four kinds of physiological noise have in common (Oh et al. 2022, appendix B), and the
limb leads after it.

The kinds authors_* are those of the authors' code, fairseq-signals augmentations.py: they draw their
parameters differently and recompute the limb leads from I and II.
"""

from dataclasses import field
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from omnilead.engine.common import ALL, ConfigError
from omnilead.engine.data.augmentations.leads import LeadSettings, limb_leads
from omnilead.engine.data.augmentations.stage import ONE_FOR_ALL, STRICT, Node, Nodes, Noise, Stage

PAPER_NOISE = ("powerline", "emg", "wander", "shift")
AUTHORS_NOISE = tuple(f"authors_{kind}" for kind in PAPER_NOISE)
NOISE_SETS = {
    "physio3": PAPER_NOISE[:3],
    "physio4": PAPER_NOISE,
    "authors_physio3": AUTHORS_NOISE[:3],
    "authors_physio4": AUTHORS_NOISE,
}
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
class NoiseSettings(LeadSettings):
    # kinds of noise, or a set: physio3, physio4, authors_physio3, authors_physio4
    noise: str | tuple[str, ...] = ()
    amplitude_mv: AmplitudeMv = field(default_factory=AmplitudeMv)
    # draw noise parameters for each lead instead of once for all; white noise always differs by
    # lead
    per_lead: bool = False
    # recompute the limb leads from I and II after adding noise; None: for authors_* only
    dependency: bool | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        names = self.noise.split(",") if isinstance(self.noise, str) else self.noise
        return tuple(
            kind for name in names if name for kind in NOISE_SETS.get(name.strip(), (name.strip(),))
        )

    @property
    def refits_limb_leads(self) -> bool:
        authors = any(kind in AUTHORS_NOISE for kind in self.kinds)
        return bool(self.kinds) and (authors if self.dependency is None else self.dependency)

    @property
    def noise_leads(self) -> tuple[int, ...]:
        return ALL if self.refits_limb_leads else self.output_leads


class PhysiologicalNoise(Noise):
    """One of PAPER_NOISE, or the authors' variant of it."""

    settings: NoiseSettings
    kind = ""

    @property
    def authors(self) -> bool:
        return f"authors_{self.kind}" in self.settings.kinds

    @property
    def described(self) -> str:
        named = {self.kind, f"authors_{self.kind}"} & set(self.settings.kinds)
        return "".join(named)

    @property
    def by_crop(self) -> bool:
        return not (self.authors or self.settings.per_lead)

    @property
    def leads(self) -> tuple[int, ...]:
        """Leads for which parameters are drawn."""
        return self.settings.noise_leads if self.settings.per_lead else ONE_FOR_ALL

    def check(self) -> None:
        named, kinds = f"augment.noise={self.settings.noise!r}", self.settings.kinds
        for kind in kinds:
            if kind not in PAPER_NOISE + AUTHORS_NOISE:
                known = ", ".join([*PAPER_NOISE, *AUTHORS_NOISE, *NOISE_SETS])
                raise ConfigError(f"{named}: unknown kind {kind!r}: use {known}")
        if len({kind.removeprefix("authors_") for kind in kinds}) < len(kinds):
            raise ConfigError(
                f"{named}: a kind occurs twice: give each once, the paper's or the authors'"
            )
        if self.settings.per_lead and set(kinds) & set(AUTHORS_NOISE):
            raise ConfigError(
                "augment.per_lead=True: the authors' kinds fix what is drawn per lead: use false"
            )


class LimbLeads(Stage):
    """Recompute III, aVR, aVL and aVF from I and II, and keep the leads that the model uses. It is
    linear: once after all kinds of noise equals once after each."""

    settings: NoiseSettings
    examples = ({"noise": "wander", "dependency": True},)

    @property
    def active(self) -> bool:
        return self.settings.refits_limb_leads

    def apply(self, x: Node, p: Nodes, ops: Any) -> Node:
        leads = [ops.lead(x, lead) for lead in ALL]
        leads[:6] = limb_leads(*leads[:2])
        return ops.cat([leads[lead] for lead in self.settings.output_leads])
