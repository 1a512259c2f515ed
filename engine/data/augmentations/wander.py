"""Baseline wander."""

from typing import Any

import numpy as np

from omnilead.engine.data.augmentations.noise import PhysiologicalNoise
from omnilead.engine.data.augmentations.stage import ONE_FOR_ALL, TAU, Nodes, Params, Random, Wave

COMPONENTS = 3


class Wander(PhysiologicalNoise):
    """n(t) = C sum_k a_k cos(2 pi k df t + phi_k), C ~ N(1, 0.5^2), a_k ~ U(0, max),
    df ~ U(0.01, 0.2) Hz"""

    kind = "wander"
    stream = 8
    examples = (
        {"noise": "wander"},
        {"noise": "authors_wander"},
        {"noise": "wander", "per_lead": True},
    )

    def draw(self, random: Random) -> Params:
        leads, first = self.leads, [3 * COMPONENTS]
        share = random.uniform(self.stream, leads, range(COMPONENTS))
        turn = random.uniform(self.stream, leads, range(COMPONENTS, 2 * COMPONENTS))
        if self.authors:  # three frequencies, and C for each lead (augmentations.py:160-180)
            place = random.uniform(self.stream, ONE_FOR_ALL, range(2 * COMPONENTS, 3 * COMPONENTS))
            hz = 0.01 + place * 0.19
            spread = random.normal(self.stream, self.settings.noise_leads, first)
        else:
            place = random.uniform(self.stream, leads, [2 * COMPONENTS])
            hz = (0.01 + place * 0.19) * np.arange(1, 1 + COMPONENTS)
            spread = random.normal(self.stream, leads, first)
        return {
            "wander_amplitude": share * self.settings.amplitude_mv.wander,
            "wander_phase": turn * TAU,
            "wander_hz": hz,
            "wander_gain": 1 + 0.5 * spread,
        }

    def wave(self, p: Nodes, ops: Any) -> Wave:
        a, hz, phase = p["wander_amplitude"], p["wander_hz"], p["wander_phase"]
        return p["wander_gain"], ops.cosines(a, hz, phase, ops.time_s, COMPONENTS)
