"""The input of a trained model: its leads, sampling rate and scale, from preprocessing.json.

model.input.halves(uv_BLT, halves_B)            -> x_RLT, 5 s segments of stored crops (int16 microvolts, twelve leads)
model.input.scaled(x_BSLT)                      -> x_BSLT, from the model's leads in millivolts at 500 Hz (a loader's batch)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.prepare import rate_ratio, resample
from omnilead.data_tools.record import RATE_RANGE_HZ
from omnilead.engine.common import ALL, ConfigError, describe_leads, leads_in_order, parse_leads
from omnilead.engine.data.augmenter import FS_HZ, HALF, MV_PER_UV

SCALES = {
    "millivolt": "millivolts, not normalised",
    "zscore": "mean 0 and standard deviation 1 in each lead of each record of 10 s",
    "layernorm": "mean 0 and standard deviation 1 over all leads of each 5 s",
}
DEFAULT_INPUT = {"fs_hz": 500, "scale": "millivolt"}
# axes of x_BSLT that share a mean and a standard deviation
TOGETHER = {
    "zscore": (1, 3),
    "layernorm": (2, 3),
}


class SignalError(ConfigError):
    """An ECG that this model cannot use."""


@dataclass(frozen=True)
class Input:
    """The input of a trained model, from its preprocessing.json."""

    leads: tuple[int, ...]  # one for each channel
    seen: tuple[int, ...]  # leads that it was trained on; the others are zeros
    scale: str = "millivolt"
    fs_hz: float = FS_HZ  # sampling rate inside the model; its input always has 500 Hz

    @classmethod
    def of(cls, document: Mapping[str, Any], channels: int) -> "Input":
        for key, known in (("segment_s", [HALF / FS_HZ]), ("scale", list(SCALES))):
            if document.get(key) not in known:
                raise ConfigError(
                    f"{key}={document.get(key)!r}: supported: {' and '.join(map(str, known))}"
                )
        fs_hz: Any = document.get("fs_hz")
        try:
            rate_ratio(fs_hz)
        except (ReadError, TypeError):
            raise ConfigError(
                f"fs_hz={fs_hz!r}: must be {' to '.join(map('{:g}'.format, RATE_RANGE_HZ))}"
            ) from None
        names = document.get("leads")
        if not isinstance(names, list) or len(names) != channels:
            raise ConfigError(
                f"leads={names!r}: the model has {channels} channels: list one lead for each"
            )
        leads = leads_in_order(names)
        seen = parse_leads(document.get("seen", names), "seen")
        if not set(seen) <= set(leads):
            raise ConfigError(
                f"seen={describe_leads(seen)}: not all of them are among "
                f"leads={describe_leads(leads)}"
            )
        return cls(leads, seen, document["scale"], float(fs_hz))

    @property
    def padded(self) -> bool:
        return set(self.leads) == set(ALL)

    def limited_to(self, leads: str | Iterable[str]) -> "Input":
        """The input of the same model with fewer leads; the others are zeros."""
        chosen = parse_leads(leads)
        if not set(chosen) <= set(self.seen):
            raise ConfigError(
                f"leads={describe_leads(chosen)}: the model was trained on "
                f"{describe_leads(self.seen)} only"
            )
        if not self.padded and set(chosen) != set(self.leads):
            raise ConfigError(
                f"leads={describe_leads(chosen)}: the model needs all of "
                f"{describe_leads(self.leads)}"
            )
        return replace(self, seen=chosen)

    def require(self, present: Iterable[int]) -> None:
        given = sorted(set(present))
        missing = [lead for lead in self.leads if lead not in given]
        if self.padded and not set(given) & set(self.seen):
            needed = (
                f"the model was trained on {describe_leads(self.seen)}: give at least one of them"
            )
            raise SignalError(f"leads={describe_leads(given)}: {needed}")
        if missing and not self.padded:
            raise SignalError(
                f"leads={describe_leads(given)}: the model needs {describe_leads(missing)} too"
            )

    def scaled(self, x_BSLT: Tensor, there_BS: Tensor | None = None) -> Tensor:
        """Resample and scale leads in millivolts at 500 Hz. A lead that is all zeros in a half
        (in a crop if `there_BS`, which halves exist, is given) stays zero and does not count in
        a mean."""
        if self.fs_hz != FS_HZ:
            x_BSLT = x_BSLT @ _resampling(self.fs_hz, x_BSLT.device)
        if (axes := TOGETHER.get(self.scale)) is None:
            return x_BSLT
        there_BSL = (x_BSLT != 0).any(-1)
        there_BSL = (
            there_BSL if there_BS is None else there_BSL.any(1, keepdim=True) & there_BS[..., None]
        )
        there = there_BSL.double()[..., None]
        share = there.mean(axes, keepdim=True).clamp_min(1e-6)
        wide = x_BSLT.double()
        wide = (wide - (wide * there).mean(axes, keepdim=True) / share) * there
        return (
            wide / (wide.square().mean(axes, keepdim=True) / share).sqrt().clamp_min(1e-6)
        ).float()

    def halves(self, uv_BLT: Tensor, halves_B: np.ndarray) -> Tensor:
        """x_RLT: the 5 s halves of crops [B, 12, 5000], crop by crop. Samples that were not
        measured are zeros; some crops have only a first half."""
        picked = (
            uv_BLT
            if self.leads == ALL
            else torch.stack([uv_BLT[:, lead] for lead in self.leads], 1)
        )
        x_BSLT = (picked.float() * MV_PER_UV).unflatten(2, (2, HALF)).transpose(1, 2)
        there_BS, unseen_L = np.arange(2) < halves_B[:, None], ~np.isin(self.leads, self.seen)
        for channel in np.flatnonzero(
            unseen_L
        ).tolist():  # one at a time: indexing with a list would make a GPU wait
            x_BSLT[:, :, channel] = 0.0
        x_RLT = self.scaled(
            x_BSLT, torch.from_numpy(there_BS).to(x_BSLT.device, non_blocking=True)
        ).flatten(0, 1)
        there_R = torch.from_numpy(np.flatnonzero(there_BS)).to(x_RLT.device, non_blocking=True)
        return x_RLT if there_BS.all() else x_RLT[there_R]


@lru_cache(maxsize=2)
def _resampling(fs_hz: float, device: torch.device) -> Tensor:
    """[2500, T]: a matrix that resamples 5 s at 500 Hz to another rate, with the filter that is
    used to build datasets."""
    up, down = rate_ratio(fs_hz)  # from fs_hz to 500 Hz
    return torch.from_numpy(resample(np.eye(HALF), down, up)).to(device, torch.float32)
