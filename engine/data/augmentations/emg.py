"""Muscle noise (electromyographic)."""

import numpy as np

from omnilead.engine.data.augmentations.noise import PhysiologicalNoise
from omnilead.engine.data.augmentations.stage import WHITE_BANK, Params, Random
from omnilead.engine.data.counter import RandomStream


class Emg(PhysiologicalNoise):
    """n(t) ~ N(0, a^2), a ~ U(0, max): in each lead of each crop a random slice of the bank."""

    kind = "emg"
    stream = 7
    from_bank = ("emg_amplitude", "white_start")
    examples = ({"noise": "emg"}, {"noise": "authors_emg"}, {"noise": "emg", "per_lead": True})

    def draw(self, random: Random) -> Params:
        leads = self.settings.noise_leads
        # each lead has its own amplitude in the authors' code (augmentations.py:92)
        share = random.uniform(self.stream, leads if self.authors else self.leads)
        place = random.uniform(RandomStream.WHITE, leads)
        start = place * (WHITE_BANK - random.samples)
        return {
            "emg_amplitude": share * self.settings.amplitude_mv.emg,
            "white_start": start.astype(np.int32),
        }
