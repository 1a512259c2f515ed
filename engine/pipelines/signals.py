"""An ECG as its owner has it -> what a trained model takes: leads by name, 500 Hz, whole microvolts, 5 s at a time.

    microvolts(signal_LT, 250, (1, 6), "mV")        -> uv_LT [12, T at 500 Hz], NaN where nothing was measured
    crops(signal_LT, 250, "II,V1", "mV", wanted)    -> int16 [B, 12, 5000], where each starts and how many halves it has
    Input.of(preprocessing, channels)(uv_NLT)       -> x_NLT, the model's channels in its scale

An ECG in memory is treated as `data_tools` treats it in a dataset (same filter, same rounding, same rule for samples that were
not measured), so a record has one embedding, wherever it comes from. A test holds the two equal.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.signal import resample_poly
from torch import Tensor

from engine.pipelines.batched import CROP, FS_HZ, HALF, MV_PER_UV
from engine.pipelines.leads import ALL, LEADS, ConfigError, describe, in_order, parse

UV_PER_UNIT = {"v": 1e6, "mv": 1e3, "uv": 1.0, "µv": 1.0, "μv": 1.0}
MAX_UV = 32_767
RATES_HZ, MAX_RATIO = (50.0, 2000.0), 2000
LARGE_MV, HUGE_MV, TINY_MV = 20.0, 100.0, 0.01  # of a typical lead: median, peak, peak; hearts give 0.1 to 10 mV at the peak
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
        if document.get("scale") not in SCALES:
            raise ConfigError(f"scale={document.get('scale')!r}: this program knows {' and '.join(SCALES)}")
        names = document.get("leads")
        if not isinstance(names, list) or len(names) != channels:
            raise ConfigError(f"leads={names!r}: the model has {channels} channels: name the lead of each")
        leads = in_order(names)
        seen = parse(document.get("seen", names), "seen")
        if not set(seen) <= set(leads):
            raise ConfigError(f"seen={describe(seen)}: not all of them are among leads={describe(leads)}")
        return cls(leads, seen, document["scale"])

    @property
    def padded(self) -> bool:
        return set(self.leads) == set(ALL)

    def limited_to(self, leads: str | Iterable[str]) -> "Input":
        """The same model shown fewer leads, the others being zeros."""
        wanted = parse(leads)
        foreign = [lead for lead in wanted if lead not in self.seen]
        if foreign:
            raise ConfigError(f"leads={describe(wanted)}: the model was trained to look at {describe(self.seen)} only")
        if not self.padded and set(wanted) != set(self.leads):
            raise ConfigError(f"leads={describe(wanted)}: the model needs all of {describe(self.leads)}")
        return replace(self, seen=wanted)

    def require(self, present: Iterable[int]) -> None:
        given = set(present)
        told = f"leads={describe(sorted(given))}"
        if self.padded and not given & set(self.seen):
            raise SignalError(f"{told}: the model looks at {describe(self.seen)}: give at least one of them")
        lacking = [lead for lead in self.leads if lead not in given]
        if lacking and not self.padded:
            raise SignalError(f"{told}: the model needs {describe(lacking)} too")

    def __call__(self, uv_NLT: Tensor) -> Tensor:
        """uv_NLT: twelve leads in order, zeros where nothing was measured; statistics, if any, are over all of T."""
        picked = uv_NLT if self.leads == ALL else uv_NLT[:, list(self.leads)]
        x: Tensor = picked.float() * MV_PER_UV
        if self.scale == "zscore":
            wide = x.double() - x.mean(-1, keepdim=True, dtype=torch.float64)
            x = (wide / wide.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6)).float()
        hidden = [channel for channel, lead in enumerate(self.leads) if lead not in self.seen]
        if hidden:
            x[:, hidden] = 0.0
        return x

    def halves(self, uv_BLT: Tensor, halves_B: np.ndarray) -> Tensor:
        """x_RLT of crops [B, 12, 5000]: their halves of 5 s, crop by crop, of which the second may not be there."""
        x_BLT = self(uv_BLT)
        short = np.flatnonzero(halves_B == 1)
        if len(short) and self.scale == "zscore":  # statistics of what is there
            x_BLT[short, :, :HALF] = self(uv_BLT[short, :, :HALF])
        x_RLT: Tensor = x_BLT.unflatten(2, (2, HALF)).transpose(1, 2).flatten(0, 1)
        there = np.flatnonzero(np.arange(2) < halves_B[:, None])
        return x_RLT[torch.from_numpy(there).to(x_RLT.device)] if len(short) else x_RLT


class Crops(NamedTuple):
    uv_BLT: np.ndarray  # int16 [B, 12, 5000]; what was not measured is zero
    start_s: tuple[float, ...]
    halves: tuple[int, ...]


def crops(signal: Any, fs_hz: float, leads: str | Iterable[str], unit: str, wanted: Input) -> Crops:
    """One ECG [L, T], cut from its start. As in a dataset, a rest of 5 s is a crop with one half, and less is not used; an ECG
    of less than 5 s is refused, being nothing that the model has ever seen. Crops without any measured lead are left out."""
    given = in_order(leads)
    wanted.require(given)
    uv_LT = microvolts(signal, fs_hz, given, unit)
    full, rest = divmod(uv_LT.shape[1], CROP)
    count = full + (rest >= HALF)
    if not count:
        raise SignalError(f"{uv_LT.shape[1] / FS_HZ:g} s of signal: the model takes 5 s at a time: give at least that")
    uv_BLT = np.zeros((count, len(LEADS), CROP), np.int16)
    told: list[tuple[float, int]] = []
    for start in range(0, count * CROP, CROP):
        halves = 2 if start + CROP <= uv_LT.shape[1] else 1
        body = uv_LT[:, start : start + halves * HALF]
        if np.isfinite(body[list(wanted.seen)]).any():
            uv_BLT[len(told), :, : body.shape[1]] = np.nan_to_num(body)
            told.append((start / FS_HZ, halves))
    if not told:
        raise SignalError("nothing was measured: every lead that the model looks at has NaN in every 10 s")
    return Crops(uv_BLT[: len(told)], *(tuple(column) for column in zip(*told, strict=True)))


def microvolts(signal: Any, fs_hz: float, given: tuple[int, ...], unit: str) -> np.ndarray:
    """float32 [12, T at 500 Hz]. A lead with NaN somewhere in a crop of 10 s is NaN in all of that crop."""
    values = _values(signal, len(given))
    factor = UV_PER_UNIT.get(str(unit).strip().lower())
    if factor is None:
        raise SignalError(f"unit={unit!r}: use V, mV or uV")
    up, down = _ratio(fs_hz)
    values *= factor
    values[~np.isfinite(values)] = np.nan
    _plausible(values / 1e3, str(unit))
    if up != down:
        values = resample_poly(values, up, down, axis=1, padtype="edge")
    np.clip(np.rint(values, out=values), -MAX_UV, MAX_UV, out=values)
    uv_LT = np.full((len(LEADS), values.shape[1]), np.nan, np.float32)
    uv_LT[list(given)] = values
    for start in range(0, uv_LT.shape[1], CROP):
        crop = uv_LT[:, start : start + CROP]
        crop[np.isnan(crop).any(1)] = np.nan
    return uv_LT


def _values(signal: Any, rows: int) -> np.ndarray:
    if isinstance(signal, Tensor):
        signal = signal.detach().cpu().double().numpy()
    array = np.asarray(signal)
    if array.dtype.kind not in "iuf":
        raise SignalError(f"signal is {array.dtype}: numbers are needed")
    if array.ndim != 2 or len(array) != rows:
        raise SignalError(f"signal has the shape {list(array.shape)} for {rows} leads: [leads, samples] is needed")
    return array.astype(np.float64)


def _ratio(fs_hz: float) -> tuple[int, int]:
    """up, down: as the dataset builder has them."""
    try:
        rate = float(fs_hz)
    except (TypeError, ValueError):
        rate = math.nan
    if not RATES_HZ[0] <= rate <= RATES_HZ[1]:
        raise SignalError(f"fs_hz={fs_hz!r}: use samples a second, {RATES_HZ[0]:g} to {RATES_HZ[1]:g}")
    ratio = Fraction(int(FS_HZ)) / Fraction(rate).limit_denominator(100)
    if max(ratio.numerator, ratio.denominator) > MAX_RATIO:
        raise SignalError(f"fs_hz={fs_hz!r}: has no ratio to {FS_HZ:g} Hz within {MAX_RATIO}: resample it before")
    return ratio.numerator, ratio.denominator


def _plausible(mv_LT: np.ndarray, unit: str) -> None:
    """A factor of 1,000 is not to be mistaken for an ECG. Single leads may be off: the typical one counts."""
    size = np.abs(mv_LT[np.isfinite(mv_LT).any(1)])
    if not size.size:
        return
    middle, peak = float(np.nanmedian(size)), float(np.median(np.nanmax(size, axis=1)))
    seen = f"a typical lead peaks at {peak:.3g} mV"
    if middle > LARGE_MV or peak > HUGE_MV:
        raise SignalError(f"unit={unit!r}: {seen} (median {middle:.3g} mV), which no heart gives: is the unit smaller?")
    if 0 < peak < TINY_MV:
        raise SignalError(f"unit={unit!r}: {seen}, which is no ECG: is the unit larger?")
