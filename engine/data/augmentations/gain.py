"""A random gain for each lead, since electrodes and amplifiers differ."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from .leads import LeadSettings
from .stage import STRICT, Node, Nodes, Params, Random, Stage


@checked_dataclass(frozen=True, config=STRICT)
class GainSettings(LeadSettings):
    # each lead of each half is multiplied by a random factor from 1 / (1 + gain) to 1 + gain; 0 =
    # off. The limb leads then no longer follow from I and II
    gain: Annotated[float, Field(ge=0, le=9)] = 0.0


class Gain(Stage):
    """Multiplies each lead by a log-uniform gain: halving is as likely as doubling."""

    settings: GainSettings
    stream = 17
    examples = ({"gain": 0.2},)
    changes_zeros = False

    @property
    def active(self) -> bool:
        return self.settings.gain > 0

    @property
    def description(self) -> str:
        return f"gain {self.settings.gain}"

    def draw(self, random: Random) -> Params:
        u = random.uniform(self.stream, self.settings.output_leads)
        return {"gain": np.exp((2 * u - 1) * np.log1p(self.settings.gain))}

    def apply(self, x: Node, p: Nodes, ops: Any) -> Node:
        return ops.multiply(x, p["gain"])
