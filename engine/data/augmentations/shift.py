"""Jumps of the baseline."""

from typing import Any

import numpy as np

from omnilead.engine.data.augmentations.noise import PhysiologicalNoise
from omnilead.engine.data.augmentations.stage import Nodes, Params, Random, Wave


class Shift(PhysiologicalNoise):
    """n(t) = n from start to stop and 0 elsewhere, n ~ U(-max, max). The paper only says "a randomly
    sampled span". Here: length N(0.2 T, (0.04 T)^2), as the authors' code; any position."""

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
        # the lower bound is 5 sigma away, the upper 20
        length = np.clip(length, 1, random.samples)
        place = random.uniform(self.stream, self.leads, [2])
        start = np.floor(place * (random.samples - length))
        u = random.uniform(self.stream, self.leads)
        amplitude = (2 * u - 1) * self.settings.amplitude_mv.shift
        if self.authors:  # +1 or -1 mV for each lead, minus one U(0, max) for all
            # (augmentations.py:124-126; they probably meant times)
            up = random.uniform(self.stream, self.settings.noise_leads, [3]) < 0.5
            amplitude = np.where(up, 1.0, -1.0) - u * self.settings.amplitude_mv.shift
        stop = np.floor(start + length)
        return {"shift_amplitude": amplitude, "shift_start": start, "shift_stop": stop}

    def wave(self, p: Nodes, ops: Any) -> Wave:
        inside = (ops.sample >= p["shift_start"]) & (ops.sample < p["shift_stop"])
        return p["shift_amplitude"], inside
