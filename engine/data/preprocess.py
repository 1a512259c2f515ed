"""The input of a trained model, from crops as stored (int16 microvolts, twelve leads).

Input.of(preprocessing, channels)(uv_NLT)       -> x_NLT, the model's leads in its scale
model.input.halves(uv_BLT, halves_B)            -> x_RLT, segments of 5 s
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.common import ALL, ConfigError, describe_leads, leads_in_order, parse_leads
from engine.data.augmenter import FS_HZ, HALF, MV_PER_UV

SCALES = {
    "millivolt": "millivolts, not normalised",
    "zscore": "mean 0 and standard deviation 1 in each lead of each record of 10 s",
}


class SignalError(ConfigError):
    """An ECG that cannot be used."""


@dataclass(frozen=True)
class Input:
    """The input of a trained model, from its preprocessing.json."""

    leads: tuple[int, ...]  # its channels
    seen: tuple[int, ...]  # those it was trained on; the others are zeros
    scale: str = "millivolt"

    @classmethod
    def of(cls, document: Mapping[str, Any], channels: int) -> "Input":
        for key, known in (("fs_hz", [FS_HZ]), ("segment_s", [HALF / FS_HZ]), ("scale", list(SCALES))):
            if document.get(key) not in known:
                raise ConfigError(f"{key}={document.get(key)!r}: this program knows {' and '.join(map(str, known))}")
        names = document.get("leads")
        if not isinstance(names, list) or len(names) != channels:
            raise ConfigError(f"leads={names!r}: the model has {channels} channels: name the lead of each")
        leads = leads_in_order(names)
        seen = parse_leads(document.get("seen", names), "seen")
        if not set(seen) <= set(leads):
            raise ConfigError(f"seen={describe_leads(seen)}: not all of them are among leads={describe_leads(leads)}")
        return cls(leads, seen, document["scale"])

    @property
    def padded(self) -> bool:
        return set(self.leads) == set(ALL)

    def limited_to(self, leads: str | Iterable[str]) -> "Input":
        """The same model given fewer leads; the others are zeros."""
        chosen = parse_leads(leads)
        if not set(chosen) <= set(self.seen):
            raise ConfigError(f"leads={describe_leads(chosen)}: the model was trained on {describe_leads(self.seen)} only")
        if not self.padded and set(chosen) != set(self.leads):
            raise ConfigError(f"leads={describe_leads(chosen)}: the model needs all of {describe_leads(self.leads)}")
        return replace(self, seen=chosen)

    def require(self, present: Iterable[int]) -> None:
        given = sorted(set(present))
        missing = [lead for lead in self.leads if lead not in given]
        if self.padded and not set(given) & set(self.seen):
            needed = f"the model was trained on {describe_leads(self.seen)}: give at least one of them"
            raise SignalError(f"leads={describe_leads(given)}: {needed}")
        if missing and not self.padded:
            raise SignalError(f"leads={describe_leads(given)}: the model needs {describe_leads(missing)} too")

    def __call__(self, uv_NLT: Tensor) -> Tensor:
        """uv_NLT: twelve leads in order, zeros where nothing was measured; zscore is over all of T."""
        picked = uv_NLT if self.leads == ALL else torch.stack([uv_NLT[:, lead] for lead in self.leads], 1)
        x: Tensor = picked.float() * MV_PER_UV
        if self.scale == "zscore":
            wide = x.double() - x.mean(-1, keepdim=True, dtype=torch.float64)
            x = (wide / wide.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6)).float()
        for channel, lead in enumerate(self.leads):
            if lead not in self.seen:
                x[:, channel] = 0.0  # one by one: a GPU would wait for a list of them
        return x

    def halves(self, uv_BLT: Tensor, halves_B: np.ndarray) -> Tensor:
        """x_RLT of crops [B, 12, 5000]: their halves of 5 s, crop by crop; some crops have only a first half."""
        x_BLT = self(uv_BLT)
        if (halves_B == 2).all():
            return _halved(x_BLT)
        short, there = (
            torch.from_numpy(np.flatnonzero(which)).to(x_BLT.device, non_blocking=True)
            for which in (halves_B == 1, np.arange(2) < halves_B[:, None])
        )
        if self.scale == "zscore":  # of the first half alone
            x_BLT[short, :, :HALF] = self(uv_BLT[short, :, :HALF])
        return _halved(x_BLT)[there]


def _halved(x_BLT: Tensor) -> Tensor:
    x_RLT: Tensor = x_BLT.unflatten(2, (2, HALF)).transpose(1, 2).flatten(0, 1)
    return x_RLT
