"""The leads that a model uses (its input has only these, or the others as zeros), and random lead
masking (RLM), Oh et al. 2022: each half is shown a random subset of them."""

from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from ...settings.errors import ConfigError
from ...settings.leads import ALL_LEADS, parse_leads
from .stage import STRICT, Node, Nodes, Params, Random, Stage

# in YAML, 3 is a number
AsText = BeforeValidator(lambda value: str(value) if type(value) is int else value)


@checked_dataclass(frozen=True, config=STRICT)
class LeadSettings:
    leads: Annotated[str | tuple[str, ...], AsText] = "12"  # leads that the model uses
    padded: bool = True  # keep the other leads as zeros; false: leave them out

    @property
    def seen_leads(self) -> tuple[int, ...]:
        return parse_leads(self.leads, "augment.leads")

    @property
    def output_leads(self) -> tuple[int, ...]:
        return ALL_LEADS if self.padded else self.seen_leads

    @property
    def noise_leads(self) -> tuple[int, ...]:
        """Leads that get noise: all of them if some are later computed from others."""
        return self.output_leads


def limb_leads(lead_1: Node, lead_2: Node) -> list[Node]:
    """Returns I, II, III, aVR, aVL and aVF, from I and II (Einthoven, Goldberger)."""
    return [
        lead_1,
        lead_2,
        lead_2 - lead_1,
        (lead_1 + lead_2) * -0.5,
        lead_1 - lead_2 * 0.5,
        lead_2 - lead_1 * 0.5,
    ]


class Leads(Stage):
    """Leave out the leads that the model does not use: before the noise, unless LimbLeads needs
    them afterwards."""

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
    rlm_keep_one: bool = False  # never mask all leads of a half (the paper's masking can)


class UsableLeads(Stage):
    """Zero the leads that the model does not use or the record lacks."""

    settings: RandomLeadSettings
    fits_single_crop_writer = True
    active = True  # always: missing leads are known only when it draws

    @property
    def changes_zeros(self) -> bool:
        return False

    def usable_leads(self, random: Random) -> np.ndarray:
        """bool [L, 1], or [B, 1, L, 1] if records lack leads"""
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
    """Zeroes unusable leads, and in each half each usable lead where u < p (augmentations.py:199-201)."""

    stream = 5
    examples = ({"rlm": 0.5}, {"rlm": 0.9, "rlm_keep_one": True}, {"leads": "I,V1"})

    @property
    def changes_zeros(self) -> bool:
        """True if one lead is always kept: it must have been measured."""
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
        """bool [B, S, L, 1]: the leads to keep in each view or window of `random`."""
        usable = self.usable_leads(random)
        u = np.where(usable, random.uniform(self.stream, self.settings.output_leads), -1.0)
        keep: np.ndarray = (u >= self.settings.rlm) & usable
        if self.settings.rlm_keep_one:  # every lead is equally likely to have the largest u
            largest = u.max(axis=-2, keepdims=True)
            keep |= (u == largest) & usable
        return keep
