"""An ECG as its owner has it -> what a trained model takes: leads by name, 500 Hz, whole microvolts, 5 s at a time.

    crops(signal_LT, 250, "II,V1", "mV", wanted)    -> int16 [B, 12, 5000], where each starts and how many halves it has
    Input.of(preprocessing, channels)(uv_NLT)       -> x_NLT, the model's channels in its scale

An ECG in memory is cut by `data_tools.prepare`, as into a dataset, so a record has one embedding, wherever it comes from.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_tools.errors import ReadError
from data_tools.prepare import MAX_RATIO, RATE_RANGE_HZ, crop_count, fill, rate_ratio, samples_at_500
from data_tools.record import MV_PER_UNIT, EcgRecord, unit_name
from engine.common import ALL, LEADS, ConfigError, describe_leads, leads_in_order, parse_leads
from engine.data.augmenter import CROP, FS_HZ, HALF, MV_PER_UV

LARGE_MV, HUGE_MV, TINY_MV = 20.0, 100.0, 0.01  # of a typical lead: median, peak, peak; hearts give 0.1 to 10 mV at the peak
NOT_MEASURED = -32_768  # in int16
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


class EcgCrops(NamedTuple):
    uv_BLT: np.ndarray  # int16 [B, 12, 5000]; what was not measured is zero
    start_s: tuple[float, ...]
    halves: tuple[int, ...]


def crops(signal: Any, fs_hz: float, leads: str | Iterable[str], unit: str, wanted: Input) -> EcgCrops:
    """One ECG [L, T], cut from its start. As in a dataset, a rest of 5 s is a crop with one half, and less is not used; an ECG
    of less than 5 s is refused, being nothing that the model has ever seen. A lead with NaN (in int16 -32768, in a masked array
    what is masked) somewhere in a crop is zero in all of it; crops without a measured lead, or in which every lead is flat, are
    left out."""
    given = leads_in_order(leads)
    wanted.require(given)
    values, names = _values(signal, len(given)), tuple(LEADS[lead] for lead in given)
    invalid = NOT_MEASURED if values.dtype == np.int16 else None  # as loadmat leaves it
    record = EcgRecord("", values, _rate(fs_hz), names, _unit(unit), invalid=invalid)
    samples = record.signal.shape[1]
    count = crop_count(samples, record.fs_hz)
    if not count:
        seconds = samples_at_500(samples, record.fs_hz) / FS_HZ
        raise SignalError(f"{seconds:g} s of signal: the model takes 5 s at a time: give at least that")
    _plausible(record, unit)
    uv_BLT = np.empty((count, len(LEADS), CROP), np.int16)
    told: list[tuple[float, int]] = []
    for index in range(count):
        body, missing, _ = fill(record, index, uv_BLT[len(told)])
        flat = body.min(axis=1) == body.max(axis=1)  # as in a dataset, which takes no crop without a lead that moves
        if not (missing[list(wanted.seen)].all() or (flat | missing).all()):
            told.append((index * CROP / FS_HZ, body.shape[1] // HALF))
    if not told:
        raise SignalError("no valid lead: in every 10 s all leads are flat, or all that the model looks at have NaN")
    return EcgCrops(uv_BLT[: len(told)], *(tuple(column) for column in zip(*told, strict=True)))


def _values(signal: Any, rows: int) -> np.ndarray:
    if isinstance(signal, Tensor):
        signal = signal.detach().cpu()
        signal = (signal.double() if signal.is_floating_point() else signal).numpy()
    array = np.asarray(signal)
    if array.dtype.kind not in "iuf":
        raise SignalError(f"signal is {array.dtype}: numbers are needed")
    if array.ndim != 2 or len(array) != rows:
        raise SignalError(f"signal has the shape {list(array.shape)} for {rows} leads: [leads, samples] is needed")
    none: float = np.nan
    if array.dtype.kind == "i" and array.dtype.itemsize == 2:  # in whatever order of bytes
        array, none = array.astype(np.int16, copy=False), NOT_MEASURED
    return np.where(np.ma.getmaskarray(signal), none, array) if np.ma.is_masked(signal) else array


def _unit(name: str) -> str:
    try:
        return unit_name(str(name))
    except ReadError:
        raise SignalError(f"unit={name!r}: use V, mV or uV") from None


def _rate(fs_hz: float) -> float:
    low, high = RATE_RANGE_HZ
    try:
        rate = float(fs_hz)
    except (TypeError, ValueError):
        rate = 0.0
    if not low <= rate <= high:
        raise SignalError(f"fs_hz={fs_hz!r}: use samples a second, {low:g} to {high:g}")
    try:
        rate_ratio(rate)
    except ReadError:
        raise SignalError(f"fs_hz={fs_hz!r}: has no ratio to {FS_HZ:g} Hz within {MAX_RATIO}: resample it before") from None
    return rate


def _plausible(record: EcgRecord, unit: str) -> None:
    """A factor of 1,000 is not to be mistaken for an ECG. Single leads may be off: the typical one counts."""
    signal, mv = record.signal, MV_PER_UNIT[record.unit]
    measured = np.isfinite(signal) if record.invalid is None else signal != record.invalid
    there = signal if measured.all() else np.where(measured, signal, 0)
    peaks = mv * np.maximum(there.max(axis=1).astype(np.float64), -there.min(axis=1).astype(np.float64))
    peaks = peaks[measured.any(axis=1)]
    if not peaks.size:
        return
    peak = float(np.median(peaks))
    seen = f"a typical lead peaks at {peak:.3g} mV"
    middle = mv * float(np.median(np.abs(signal[measured].astype(np.float64)))) if peaks.max() > LARGE_MV else 0.0
    if middle > LARGE_MV or peak > HUGE_MV:
        raise SignalError(f"unit={unit!r}: {seen} (median {middle:.3g} mV), which no heart gives: is the unit smaller?")
    if 0 < peak < TINY_MV:
        raise SignalError(f"unit={unit!r}: {seen}, which is no ECG: is the unit larger?")
