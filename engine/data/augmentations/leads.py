"""Selects the leads that a model uses, and masks random ones. Leads that the model does not use
are left out of its input, or are zeros in it. Random lead masking (RLM, Oh et al. 2022) shows
the model a random subset of the leads in each half of a crop."""

from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from ...settings.errors import ConfigError
from ...settings.leads import ALL_LEADS, parse_leads
from .stage import STRICT, Node, Nodes, Params, Random, Stage

# YAML reads `leads: 3` as a number
AsText = BeforeValidator(lambda value: str(value) if type(value) is int else value)


@checked_dataclass(frozen=True, config=STRICT)
class LeadSettings:
    leads: Annotated[str | tuple[str, ...], AsText] = "12"  # leads that the model uses
    # true: leads that the model does not use are zeros in its input; false: they are left out
    padded: bool = True

    @property
    def seen_leads(self) -> tuple[int, ...]:
        return parse_leads(self.leads, "augment.leads")

    @property
    def output_leads(self) -> tuple[int, ...]:
        return ALL_LEADS if self.padded else self.seen_leads

    @property
    def noise_leads(self) -> tuple[int, ...]:
        """Returns the leads to which noise is added. NoiseSettings overrides this: all leads get
        noise if the limb leads are recomputed afterwards."""
        return self.output_leads


def limb_leads(lead_1: Node, lead_2: Node) -> list[Node]:
    """Returns I, II, III, aVR, aVL and aVF, computed from I and II (Einthoven, Goldberger)."""
    return [
        lead_1,
        lead_2,
        lead_2 - lead_1,
        (lead_1 + lead_2) * -0.5,
        lead_1 - lead_2 * 0.5,
        lead_2 - lead_1 * 0.5,
    ]


class Leads(Stage):
    """Leaves out the leads that the model does not use, before noise is added. Not active if
    LimbLeads needs all leads after the noise: LimbLeads then leaves them out."""

    settings: LeadSettings
    examples = ({"leads": "3", "padded": False},)
    changes_zeros = False

    @property
    def active(self) -> bool:
        return self.settings.noise_leads != ALL_LEADS

    def check(self) -> None:
        parse_leads(self.settings.leads, "augment.leads")

    def apply(self, x: Node, p: Nodes, ops: Any) -> Node:
        return ops.cat([ops.lead(x, lead) for lead in self.settings.output_leads])


@checked_dataclass(frozen=True, config=STRICT)
class RandomLeadSettings(LeadSettings):
    # random lead masking: probability of zeroing each lead of each half; 0 = off
    rlm: Annotated[float, Field(ge=0, le=1)] = 0.5
    # true: at least one lead of each half stays unmasked; the masking of Oh et al. 2022 may mask all
    # leads
    rlm_keep_one: bool = False


class UsableLeads(Stage):
    """Zeroes the leads that the model does not use and the leads that the record lacks."""

    settings: RandomLeadSettings
    fits_single_crop_writer = True
    active = True  # always active, because only `draw` learns which leads of a crop are missing

    @property
    def changes_zeros(self) -> bool:
        return False

    def usable_leads(self, random: Random) -> np.ndarray:
        """Returns bool [L, 1], True for each lead that the model uses. If `random` knows which
        leads of each crop were measured: [B, 1, L, 1], True for each lead that is used and
        measured."""
        leads = self.settings.output_leads
        usable = np.isin(leads, self.settings.seen_leads)[:, None]
        if random.measured_BL is not None:
            usable = usable & random.measured_BL[:, None, list(leads), None]
        return usable

    def draw(self, random: Random) -> Params:
        shows_all = self.settings.output_leads == self.settings.seen_leads
        if shows_all and random.measured_BL is None:
            return {}
        usable = self.usable_leads(random)
        shape = np.broadcast_shapes(random.crop.shape, random.view.shape, usable.shape)
        return {"keep": np.broadcast_to(usable, shape)}

    def apply(self, x: Node, p: Nodes, ops: Any) -> Node:
        return ops.multiply(x, p["keep"]) if "keep" in p else x


class RandomLeads(UsableLeads):
    """Zeroes the unusable leads and, in each half, each usable lead with probability `rlm`
    (fairseq-signals augmentations.py:199-201)."""

    stream = 5
    examples = ({"rlm": 0.5}, {"rlm": 0.9, "rlm_keep_one": True}, {"leads": "I,V1"})

    @property
    def changes_zeros(self) -> bool:
        """True with `rlm_keep_one`: the stage leaves zeros as they are, but must know which leads
        were measured, since it keeps one of these."""
        return self.settings.rlm_keep_one

    @property
    def description(self) -> str:
        return f"lead masking {self.settings.rlm}" if self.settings.rlm else ""

    def check(self) -> None:
        if self.settings.rlm == 1 and not self.settings.rlm_keep_one:
            raise ConfigError(
                "augment.rlm=1: this masks every lead: use less than 1, or rlm_keep_one: true"
            )

    def draw(self, random: Random) -> Params:
        return {"keep": self.keep_masks(random)} if self.settings.rlm else super().draw(random)

    def keep_masks(self, random: Random) -> np.ndarray:
        """Returns bool [B, S, L, 1], True for each lead to keep in each half, view or window of
        `random`."""
        usable = self.usable_leads(random)
        u = np.where(usable, random.uniform(self.stream, self.settings.output_leads), -1.0)
        keep: np.ndarray = (u >= self.settings.rlm) & usable
        # keeps the lead with the largest u, which is any usable lead with equal probability
        if self.settings.rlm_keep_one:
            largest = u.max(axis=-2, keepdims=True)
            keep |= (u == largest) & usable
        return keep
