"""The input of a model: the leads, windows, rate, band and scale in which it sees an ECG.

Datasets and loaders have crops of 10 s at 500 Hz in millivolts, as two halves. One crop becomes

    band-pass -> resample -> clip -> zscore -> windows -> leads masked -> layernorm

    model.input.windows(uv_BLT, halves_B)           -> x_RLT, the windows of stored crops (int16 microvolts, twelve leads)
    model.input.cut_windows(x_BLT, halves_B)        -> x_BSLT, from the model's leads in millivolts at 500 Hz
    model.input.count(halves_B)                     how many windows that crops have

Crops are filtered whole: what is zero-phase at 10 s has edges inside, if it is done by halves. Only
an input of 5 s without a band is resampled by halves, as ever. Where a crop has only its first half,
that half is all that is filtered, normalised and cut.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg.resampling import rate_ratio, resample

from ..data.augmenter import crops_without_leads
from ..data.config import CROP, FS_HZ, HALF, MV_PER_UV
from ..settings.errors import ConfigError
from ..settings.leads import ALL_LEADS, describe_leads, leads_in_order, parse_leads
from .window import (
    CROP_S,
    HALF_S,
    SCALE_MEANINGS,
    InputFormat,
    check_rate_and_band,
    resampled_length,
)

BAND_PASS_ORDER = 2
# Samples by which scipy.signal.sosfiltfilt extends a signal at both ends, for this order
BAND_PASS_EDGE_SAMPLES = 15
FAST_FFT_MULTIPLE = (
    1024  # lengths that are multiples of it take half to a quarter of the time of others
)
# Samples that a convolution makes at each place: 0.15 ms a crop of a CPU core at 100 Hz; one by one
# takes five times as long, a dense matrix ten times
RESAMPLED_BLOCK_SAMPLES = 32
CROPS_PER_FILTER = (
    4  # crops filtered at a time on a CPU: 0.75 ms each of a core; all 64 at once, 1.9
)


class SignalError(ConfigError):
    """An ECG that this model cannot use."""


@dataclass(frozen=True)
class Input(InputFormat):
    """The input of a trained model, from its preprocessing.json."""

    leads: tuple[int, ...]  # one for each channel
    seen_leads: tuple[int, ...]  # leads that it was trained on; the others are zeros
    scale: str = "millivolt"
    fs_hz: float = FS_HZ  # sampling rate inside the model; crops always have 500 Hz
    window_s: float = HALF_S
    band_hz: tuple[float, float] | None = None
    clip_mv: float | None = None

    @classmethod
    def from_document(cls, document: Any, channels: int) -> "Input":
        if document.get("scale") not in list(SCALE_MEANINGS):
            raise ConfigError(
                f"scale={document.get('scale')!r}: supported: {' and '.join(SCALE_MEANINGS)}"
            )
        window_s, fs_hz, band_hz = map(document.get, ("segment_s", "fs_hz", "band_hz"))
        check_rate_and_band(fs_hz, band_hz)
        if type(window_s) not in (int, float) or not 0 < window_s <= CROP_S:
            raise ConfigError(
                f"segment_s={window_s!r}: must be above 0 and at most {CROP_S:g} s, a crop"
            )
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
        band = (float(band_hz[0]), float(band_hz[1])) if band_hz else None
        clip_mv = document.get("clip_mv")
        if clip_mv is not None and not (type(clip_mv) in (int, float) and 0 < clip_mv <= 1000):
            raise ConfigError(f"clip_mv={clip_mv!r}: must be above 0 and at most 1000 mV")
        return cls(leads, seen, document["scale"], float(fs_hz), float(window_s), band, clip_mv)

    @property
    def takes_all_leads(self) -> bool:
        return set(self.leads) == set(ALL_LEADS)

    def limited_to(self, leads: str | Iterable[str]) -> "Input":
        """The input of the same model with fewer leads; the others are zeros."""
        lead_numbers = parse_leads(leads)
        if not set(lead_numbers) <= set(self.seen_leads):
            raise ConfigError(
                f"leads={describe_leads(lead_numbers)}: the model was trained on "
                f"{describe_leads(self.seen_leads)} only"
            )
        if not self.takes_all_leads and set(lead_numbers) != set(self.leads):
            raise ConfigError(
                f"leads={describe_leads(lead_numbers)}: the model needs all of "
                f"{describe_leads(self.leads)}"
            )
        return replace(self, seen_leads=lead_numbers)

    def require_leads(self, present: Iterable[int]) -> None:
        given_leads = sorted(set(present))
        missing = [lead for lead in self.leads if lead not in given_leads]
        if self.takes_all_leads and not set(given_leads) & set(self.seen_leads):
            needed = f"the model was trained on {describe_leads(self.seen_leads)}: give at least one of them"
            raise SignalError(f"leads={describe_leads(given_leads)}: {needed}")
        if missing and not self.takes_all_leads:
            raise SignalError(
                f"leads={describe_leads(given_leads)}: the model needs {describe_leads(missing)} too"
            )

    @property
    def shortest_ecg_s(self) -> float:
        """The shortest ECG in s that has a window: crops have 5 or 10 s."""
        return HALF_S if self.window_s <= HALF_S else CROP_S

    def count_windows(self, halves: Any = 2) -> Any:
        """The number of windows that lie within the measured halves of a crop, or of each of
        several crops."""
        return np.floor(np.asarray(halves) * (HALF_S / self.window_s) + 1e-9).astype(np.int64)

    def usable_crops(self, dataset: Dataset) -> np.ndarray:
        """bool [crops]: True for crops that have a window and at least one of the model's leads."""
        has_window = self.count_windows(dataset.column("halves")) > 0
        return np.asarray(has_window & ~crops_without_leads(dataset, self.seen_leads))

    @property
    def unusable_crops_text(self) -> str:
        """The reason, for a message, why crops are unusable."""
        leads = describe_leads(self.seen_leads)
        return f"no valid lead: the model uses {leads}, of which none was recorded{self.too_short_hint}"

    @property
    def too_short_hint(self) -> str:
        """Words to append to the reason if a crop may be too short; else ""."""
        if self.shortest_ecg_s == HALF_S:
            return ""
        return f", or shorter than {self.window_s:g} s, which the model takes at once"

    def windows(self, uv_BLT: Tensor, halves_B: np.ndarray) -> Tensor:
        """x_RLT: all windows of crops [B, 12, 5000], crop by crop."""
        x_RLT = self.padded_windows(uv_BLT, halves_B).flatten(0, 1)
        there_BS = np.arange(self.count_windows()) < self.count_windows(halves_B)[:, None]
        there_R = torch.from_numpy(np.flatnonzero(there_BS)).to(x_RLT.device, non_blocking=True)
        return x_RLT if there_BS.all() else x_RLT[there_R]

    def padded_windows(self, uv_BLT: Tensor, halves_B: np.ndarray) -> Tensor:
        """x_BSLT: equally many windows for each crop; missing windows are zeros."""
        # One at a time: indexing with a list would make a GPU wait
        if self.leads != ALL_LEADS:
            uv_BLT = torch.stack([uv_BLT[:, lead] for lead in self.leads], 1)
        x_BLT = uv_BLT.float() * MV_PER_UV
        for channel, lead in enumerate(self.leads):
            if lead not in self.seen_leads:
                x_BLT[:, channel] = 0.0
        return self.cut_windows(x_BLT, halves_B)

    def cut_windows(
        self,
        x_BLT: Tensor,
        halves_B: np.ndarray,
        keep_BSL1: Tensor | None = None,
        start_B: Tensor | None = None,
    ) -> Tensor:
        """x_BSLT: adjacent windows, as many as `keep_BSL1` has. `start_B` (0 to 1): their start, as
        a share of the room that they leave in the crop. A lead that is all zeros in a crop, or not
        kept in a window, is zero and does not count in a mean."""
        crops_BLT, x_BLT = x_BLT, self._process_measured_halves(x_BLT, halves_B)
        count = self.count_windows() if keep_BSL1 is None else keep_BSL1.shape[1]
        samples = count * self.samples
        if start_B is None:
            x_BLT = x_BLT[..., :samples]
        else:
            first_B = (start_B * (x_BLT.shape[2] - samples + 1)).long()
            index = first_B[:, None, None] + torch.arange(samples, device=x_BLT.device)
            x_BLT = x_BLT.gather(2, index.expand(-1, x_BLT.shape[1], -1))
        x_BSLT: Tensor = x_BLT.unflatten(2, (count, self.samples)).transpose(1, 2)
        if keep_BSL1 is not None:
            x_BSLT = x_BSLT * keep_BSL1
        if self.scale != "layernorm":
            return x_BSLT
        there_BSL1 = (crops_BLT != 0).any(-1, keepdim=True)[:, None]
        if keep_BSL1 is not None:
            there_BSL1 = there_BSL1 & keep_BSL1
        return normalise(x_BSLT, there_BSL1, (2, 3))

    def _process_measured_halves(self, x_BLT: Tensor, halves_B: np.ndarray) -> Tensor:
        """Crops at the model's rate, zero after their measured halves."""
        if self.uses_stored_halves or (halves_B == 2).all():
            return self._process(x_BLT)
        samples = (
            2 * self.samples if self.resamples_by_halves else resampled_length(self.fs_hz, CROP)
        )
        crops_BLT = x_BLT.new_zeros(*x_BLT.shape[:2], samples)
        for halves in np.unique(halves_B).tolist():
            crops = torch.from_numpy(np.flatnonzero(halves_B == halves)).to(x_BLT.device)
            measured_BLT = self._process(x_BLT[crops, :, : halves * HALF])
            crops_BLT[crops, :, : measured_BLT.shape[2]] = measured_BLT
        return crops_BLT

    def _process(self, x_BLT: Tensor) -> Tensor:
        """Filters, resamples, clips and scales crops whose halves were all measured."""
        crops_BLT = x_BLT
        if self.band_hz:
            at_a_time = CROPS_PER_FILTER if x_BLT.device.type == "cpu" else len(x_BLT)
            parts = [band_pass(chunk_BLT, self.band_hz) for chunk_BLT in x_BLT.split(at_a_time)]
            x_BLT = torch.cat(parts)
        if self.fs_hz != FS_HZ and self.resamples_by_halves:
            x_BLT = resample_tensor(x_BLT.unflatten(2, (-1, HALF)), self.fs_hz).flatten(2)
        elif self.fs_hz != FS_HZ:
            x_BLT = resample_tensor(x_BLT, self.fs_hz)
        if self.clip_mv:
            x_BLT = x_BLT.clamp(-self.clip_mv, self.clip_mv)
        if self.scale != "zscore":
            return x_BLT
        return normalise(x_BLT, (crops_BLT != 0).any(-1, keepdim=True), (2,))


def normalise(x: Tensor, is_measured: Tensor, axes: tuple[int, ...]) -> Tensor:
    """x with mean 0 and standard deviation 1 over these axes together. Leads that were not measured
    become zeros and do not count."""
    share = is_measured.double().mean(axes, keepdim=True).clamp_min(1e-6)
    wide = x.double()
    wide = (wide - (wide * is_measured).mean(axes, keepdim=True) / share) * is_measured
    deviation = (wide.square().mean(axes, keepdim=True) / share).sqrt()
    return (wide / deviation.clamp_min(1e-6)).float()


def band_pass(x: Tensor, band_hz: tuple[float, float]) -> Tensor:
    """scipy.signal.sosfiltfilt(butter(2, band_hz, "bandpass", fs=500, output="sos"), x) along the
    last axis: once forwards and once backwards, each a convolution with the filter's response to
    an impulse, in the frequency domain. A band-pass gives 0 for a constant, so that subtracting
    the first sample is the state that sosfiltfilt starts in."""
    edge = BAND_PASS_EDGE_SAMPLES
    before = 2 * x[..., :1] - x[..., 1 : edge + 1].flip(-1)
    after = 2 * x[..., -1:] - x[..., -1 - edge : -1].flip(-1)
    y = torch.cat([before, x, after], -1)
    samples = y.shape[-1]
    length = -(-2 * samples // FAST_FFT_MULTIPLE) * FAST_FFT_MULTIPLE
    response = _band_pass_response(band_hz, samples, length, x.device)
    for _ in range(2):
        y = torch.fft.irfft(torch.fft.rfft(y - y[..., :1], length) * response, length)
        y = y[..., :samples].flip(-1)
    return y[..., edge:-edge]


@lru_cache(maxsize=4)
def _band_pass_response(
    band_hz: tuple[float, float], samples: int, length: int, device: torch.device
) -> Tensor:
    from scipy.signal import butter, sosfilt  # half a second, for models with a filter only

    impulse = np.zeros(samples)
    impulse[0] = 1.0
    sos = butter(BAND_PASS_ORDER, band_hz, "bandpass", fs=FS_HZ, output="sos")
    spectrum = np.fft.rfft(sosfilt(sos, impulse), length)
    return torch.from_numpy(spectrum).to(device, torch.complex64)


def resample_tensor(x: Tensor, fs_hz: float) -> Tensor:
    """data_tools.ecg.resampling.resample from 500 Hz along the last axis, as a convolution whose
    every output is a block of samples."""
    down, up = rate_ratio(fs_hz)
    if up == down:  # 499.999 Hz counts as 500 Hz
        return x
    blocks = -(-RESAMPLED_BLOCK_SAMPLES // up)
    weight_UK = _resampling_weights(up, down, blocks, x.device)
    stride = blocks * down
    margin = (weight_UK.shape[1] - stride) // 2
    samples = x.shape[-1]
    padding = -samples % stride
    rows_R1T = F.pad(x.reshape(-1, 1, samples), (margin, margin + padding), mode="replicate")
    made_RUN = F.conv1d(rows_R1T, weight_UK[:, None], stride=stride)
    samples_made = made_RUN.transpose(1, 2).reshape(*x.shape[:-1], -1)
    return samples_made[..., : resampled_length(fs_hz, samples)]


@lru_cache(maxsize=2)
def _resampling_weights(up: int, down: int, blocks: int, device: torch.device) -> Tensor:
    """[blocks * up, K]: the weight of each of K neighbouring samples at 500 Hz in each of blocks *
    up output samples."""
    reach = -(-10 * max(up, down) // up)  # reach of the filter in samples at 500 Hz
    margin = -(-reach // down)
    weights = resample(np.eye((blocks + 2 * margin) * down), up, down)
    middle = weights[:, margin * up : (margin + blocks) * up].T
    return torch.from_numpy(np.ascontiguousarray(middle)).to(device, torch.float32)


def describe_input_format(signals: Mapping[str, Any]) -> str:
    """The input in words for model cards: for example 500 Hz, 5 s at a time, millivolts, not
    normalised."""
    band = signals.get("band_hz")
    filtered = f"band-passed from {band[0]:g} to {band[1]:g} Hz, " if band else ""
    clipped = f"limited to +-{signals['clip_mv']:g} mV, " if signals.get("clip_mv") else ""
    window_s = signals.get("segment_s", HALF_S)
    return (
        f"{signals['fs_hz']:g} Hz, {window_s:g} s at a time, {filtered}{clipped}"
        f"{SCALE_MEANINGS[signals['scale']]}"
    )
