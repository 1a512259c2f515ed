"""Crops as stored (int16 microvolts, twelve leads) -> what a trained model takes: its leads, in its scale.

Input.of(preprocessing, channels)(uv_NLT)       -> x_NLT
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
    """An ECG that cannot be used: one line that says what to change."""


@dataclass(frozen=True)
class Input:
    """What a trained model takes, out of its preprocessing.json."""

    leads: tuple[int, ...]  # its channels
    seen: tuple[int, ...]  # those that it was trained to look at; the others are zeros
    scale: str = "millivolt"

    @classmethod
    def of(cls, document: Mapping[str, Any], channels: int) -> "Input":
        for key, wanted in (("fs_hz", FS_HZ), ("segment_s", HALF / FS_HZ)):
            if document.get(key) != wanted:
                raise ConfigError(f"{key}={document.get(key)!r}: this program knows {wanted:g}")
        if document.get("scale") not in list(SCALES):
            raise ConfigError(f"scale={document.get('scale')!r}: this program knows {' and '.join(SCALES)}")
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
        """The same model shown fewer leads, the others being zeros."""
        wanted = parse_leads(leads)
        foreign = [lead for lead in wanted if lead not in self.seen]
        if foreign:
            raise ConfigError(
                f"leads={describe_leads(wanted)}: the model was trained to look at {describe_leads(self.seen)} only"
            )
        if not self.padded and set(wanted) != set(self.leads):
            raise ConfigError(f"leads={describe_leads(wanted)}: the model needs all of {describe_leads(self.leads)}")
        return replace(self, seen=wanted)

    def require(self, present: Iterable[int]) -> None:
        given = set(present)
        told = f"leads={describe_leads(sorted(given))}"
        if self.padded and not given & set(self.seen):
            raise SignalError(f"{told}: the model looks at {describe_leads(self.seen)}: give at least one of them")
        lacking = [lead for lead in self.leads if lead not in given]
        if lacking and not self.padded:
            raise SignalError(f"{told}: the model needs {describe_leads(lacking)} too")

    def __call__(self, uv_NLT: Tensor) -> Tensor:
        """uv_NLT: twelve leads in order, zeros where nothing was measured; statistics, if any, are over all of T."""
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
        """x_RLT of crops [B, 12, 5000]: their halves of 5 s, crop by crop, of which the second may not be there."""
        x_BLT = self(uv_BLT)
        if (halves_B == 2).all():
            return _halved(x_BLT)
        short, there = (
            torch.from_numpy(np.flatnonzero(which)).to(x_BLT.device, non_blocking=True)
            for which in (halves_B == 1, np.arange(2) < halves_B[:, None])
        )
        if self.scale == "zscore":  # statistics of what is there
            x_BLT[short, :, :HALF] = self(uv_BLT[short, :, :HALF])
        return _halved(x_BLT)[there]


def _halved(x_BLT: Tensor) -> Tensor:
    x_RLT: Tensor = x_BLT.unflatten(2, (2, HALF)).transpose(1, 2).flatten(0, 1)
    return x_RLT
