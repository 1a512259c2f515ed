"""Mains hum."""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from omnilead.engine.data.augmentations.noise import NoiseSettings, PhysiologicalNoise
from omnilead.engine.data.augmentations.stage import (
    ONE_FOR_ALL,
    STRICT,
    TAU,
    Nodes,
    Params,
    Random,
    Wave,
)


@checked_dataclass(frozen=True, config=STRICT)
class PowerlineSettings(NoiseSettings):
    # 60 in the Americas; authors_powerline picks 50 or 60 at random
    powerline_hz: Literal[50, 60] = 50
    # number of harmonics of powerline_hz
    powerline_components: Annotated[int, Field(ge=1, le=4)] = 1


class Powerline(PhysiologicalNoise):
    """n(t) = sum_k a_k cos(2 pi k f t + phi), a_k ~ U(0, max), phi ~ U(0, 2 pi)"""

    settings: PowerlineSettings
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
        # the same for all components, as in the paper
        turn = random.uniform(self.stream, self.leads)
        hz: Any = self.settings.powerline_hz
        if self.authors:  # 50 or 60 Hz at random (augmentations.py:61)
            american = random.uniform(self.stream, ONE_FOR_ALL, [1]) >= 0.5
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
