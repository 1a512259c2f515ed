"""The input of a model: the leads, windows, rate, band and scale in which it sees an ECG.

Datasets and loaders hold crops of 10 s at 500 Hz, as two halves. In millivolts, a crop goes through

    band-pass -> resample -> clip -> zscore -> windows -> leads masked -> layernorm

    model.input.windows(uv_BLT, halves_B)           -> x_RLT, the windows of stored crops (int16 microvolts, twelve leads)
    model.input.cut_windows(x_BLT, halves_B)        -> x_BSLT, from the model's leads in millivolts at 500 Hz
    model.input.count_windows(halves_B)             -> the number of windows of each crop

Crops are filtered whole, because a zero-phase filter that ran on each half would leave edges in the
middle. Only for windows of 5 s without a band-pass is each half resampled separately. If only the first
half of a crop was measured, that half alone is filtered, normalised and cut.
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
# Samples by which scipy.signal.sosfiltfilt extends a signal at both ends for a filter of order 2
BAND_PASS_EDGE_SAMPLES = 15
# An FFT whose length is a multiple of 1024 takes half to a quarter of the time of others
FAST_FFT_MULTIPLE = 1024
# Resampling makes at least 32 output samples at each position of a convolution. For a crop and 100 Hz this
# takes a CPU core 0.15 ms. One sample at each position would take five times as long, a dense matrix ten times
RESAMPLED_BLOCK_SAMPLES = 32
# Crops that a CPU filters at a time. A crop takes a core 0.75 ms; if 64 are filtered at once, 1.9 ms
CROPS_PER_FILTER = 4


class SignalError(ConfigError):
    """Raised if an ECG does not fit the model, for example in its leads, length or sampling rate."""


@dataclass(frozen=True)
class Input(InputFormat):
    """The input of a trained model: its format and its leads, as stored in preprocessing.json."""

    leads: tuple[int, ...]  # the lead in each input channel
    seen_leads: tuple[int, ...]  # leads that the model was trained on; other leads are set to zeros
    scale: str = "millivolt"
    fs_hz: float = FS_HZ  # sampling rate of the windows; stored crops always have 500 Hz
    window_s: float = HALF_S
    band_hz: tuple[float, float] | None = None
    clip_mv: float | None = None

    @classmethod
    def from_document(cls, document: Any, channels: int) -> "Input":
        """Return the input that a preprocessing.json describes, for a model with `channels` channels."""
        if document.get("scale") not in list(SCALE_MEANINGS):
            raise ConfigError(
                f"scale={document.get('scale')!r}: use one of {', '.join(SCALE_MEANINGS)}"
            )
        window_s, fs_hz, band_hz = map(document.get, ("segment_s", "fs_hz", "band_hz"))
        check_rate_and_band(fs_hz, band_hz)
        if type(window_s) not in (int, float) or not 0 < window_s <= CROP_S:
            raise ConfigError(
                f"segment_s={window_s!r}: must be above 0 and at most {CROP_S:g} s, the length of a crop"
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
        """True if the model has a channel for each of the twelve leads. An ECG may then lack leads, whose
        channels are zeros."""
        return set(self.leads) == set(ALL_LEADS)

    def limited_to(self, leads: str | Iterable[str]) -> "Input":
        """Return the input of the same model with only these leads; channels of other leads are zeros."""
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
        """Raise SignalError if an ECG with these leads lacks one that the model needs."""
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
        """The length in s of the shortest ECG from which the model gets a window: 5 or 10, a half or a
        whole crop."""
        return HALF_S if self.window_s <= HALF_S else CROP_S

    def count_windows(self, halves: Any = 2) -> Any:
        """Return the number of windows that fit into the measured part of a crop. `halves` (1 or 2) is how
        many halves were measured, or an array of such numbers for several crops."""
        return np.floor(np.asarray(halves) * (HALF_S / self.window_s) + 1e-9).astype(np.int64)

    def usable_crops(self, dataset: Dataset) -> np.ndarray:
        """Return bool [crops]: True for crops that are long enough for a window and in which at least one
        of the model's leads was recorded."""
        has_window = self.count_windows(dataset.column("halves")) > 0
        return np.asarray(has_window & ~crops_without_leads(dataset, self.seen_leads))

    @property
    def unusable_crops_text(self) -> str:
        """Words for a message, which say why crops cannot be used."""
        leads = describe_leads(self.seen_leads)
        return f"no valid lead: the model uses {leads}, of which none was recorded{self.too_short_hint}"

    @property
    def too_short_hint(self) -> str:
        """Words to append to a message, which say that a crop may also be too short; "" if none can be."""
        if self.shortest_ecg_s == HALF_S:
            return ""
        return f", or shorter than {self.window_s:g} s, the length of the model's window"

    def windows(self, uv_BLT: Tensor, halves_B: np.ndarray) -> Tensor:
        """Return all windows of the crops [B, 12, 5000] as x_RLT, crop by crop, without windows in halves
        that were not measured."""
        x_RLT = self.padded_windows(uv_BLT, halves_B).flatten(0, 1)
        there_BS = np.arange(self.count_windows()) < self.count_windows(halves_B)[:, None]
        there_R = torch.from_numpy(np.flatnonzero(there_BS)).to(x_RLT.device, non_blocking=True)
        return x_RLT if there_BS.all() else x_RLT[there_R]

    def padded_windows(self, uv_BLT: Tensor, halves_B: np.ndarray) -> Tensor:
        """Return the windows of the crops [B, 12, 5000] as x_BSLT. Each crop has equally many; windows in
        halves that were not measured are zeros."""
        # Leads are taken one at a time, because indexing with a list would make a GPU wait
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
        """Return adjacent windows of each crop as x_BSLT.

        `keep_BSL1` is False where a lead is masked in a window, and gives the number S of windows;
        without it, S is as many as fit. `start_B` (0 to 1) is where the first window starts, as a
        share of the samples that the S windows leave free in the crop. A lead that is all zeros in a
        crop, or masked in a window, stays zero and does not count in means and deviations."""
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
        """Return crops filtered, resampled, clipped and scaled, with zeros in the halves that were not
        measured."""
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
        """Filter, resample, clip and scale whole crops or first halves of crops."""
        crops_BLT = x_BLT
        if self.band_hz:
            at_a_time = CROPS_PER_FILTER if x_BLT.device.type == "cpu" else len(x_BLT)
            parts = [band_pass(chunk_BLT, self.band_hz) for chunk_BLT in x_BLT.split(at_a_time)]
            x_BLT = torch.cat(parts)
        if self.fs_hz != FS_HZ and self.resamples_by_halves:
            x_BLT = resample_from_500_hz(x_BLT.unflatten(2, (-1, HALF)), self.fs_hz).flatten(2)
        elif self.fs_hz != FS_HZ:
            x_BLT = resample_from_500_hz(x_BLT, self.fs_hz)
        if self.clip_mv:
            x_BLT = x_BLT.clamp(-self.clip_mv, self.clip_mv)
        if self.scale != "zscore":
            return x_BLT
        return normalise(x_BLT, (crops_BLT != 0).any(-1, keepdim=True), (2,))


def normalise(x: Tensor, is_measured: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return x with mean 0 and standard deviation 1 over all of `axes` together. Leads that were not
    measured become zeros and do not count in the mean and deviation."""
    share = is_measured.double().mean(axes, keepdim=True).clamp_min(1e-6)
    wide = x.double()
    wide = (wide - (wide * is_measured).mean(axes, keepdim=True) / share) * is_measured
    deviation = (wide.square().mean(axes, keepdim=True) / share).sqrt()
    return (wide / deviation.clamp_min(1e-6)).float()


def band_pass(x: Tensor, band_hz: tuple[float, float]) -> Tensor:
    """Return scipy.signal.sosfiltfilt(butter(2, band_hz, "bandpass", fs=500, output="sos"), x) along the
    last axis. The filter runs once forwards and once backwards, each time as a product of spectra with
    its impulse response. sosfiltfilt starts in the state for a constant signal; here the first sample
    is subtracted instead, which is the same, because a band-pass gives 0 for a constant."""
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
    """Return the spectrum of the band-pass's response to an impulse, for FFTs of this length."""
    # imported here, because it takes half a second and only models with a band-pass need it
    from scipy.signal import butter, sosfilt

    impulse = np.zeros(samples)
    impulse[0] = 1.0
    sos = butter(BAND_PASS_ORDER, band_hz, "bandpass", fs=FS_HZ, output="sos")
    spectrum = np.fft.rfft(sosfilt(sos, impulse), length)
    return torch.from_numpy(spectrum).to(device, torch.complex64)


def resample_from_500_hz(x: Tensor, to_hz: float) -> Tensor:
    """Resample x from 500 Hz to to_hz along the last axis, as data_tools.ecg.resampling.resample does. A
    convolution makes a block of output samples at each position."""
    down, up = rate_ratio(to_hz)
    if up == down:  # true for 500 Hz and for rates that are rounded to it, such as 499.999 Hz
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
    return samples_made[..., : resampled_length(to_hz, samples)]


@lru_cache(maxsize=2)
def _resampling_weights(up: int, down: int, blocks: int, device: torch.device) -> Tensor:
    """Return the weights [blocks * up, K] of the convolution in resample_from_500_hz. At each position it makes
    blocks * up output samples, each a weighted sum of K neighbouring samples at 500 Hz."""
    # the resampling filter reaches this many samples at 500 Hz to each side
    reach = -(-10 * max(up, down) // up)
    margin = -(-reach // down)
    weights = resample(np.eye((blocks + 2 * margin) * down), up, down)
    middle = weights[:, margin * up : (margin + blocks) * up].T
    return torch.from_numpy(np.ascontiguousarray(middle)).to(device, torch.float32)


def describe_input_format(signals: Mapping[str, Any]) -> str:
    """Return the input format in words for a model card, for example "500 Hz, 5 s at a time, millivolts,
    not normalised"."""
    band = signals.get("band_hz")
    filtered = f"band-passed from {band[0]:g} to {band[1]:g} Hz, " if band else ""
    clipped = f"limited to +-{signals['clip_mv']:g} mV, " if signals.get("clip_mv") else ""
    window_s = signals.get("segment_s", HALF_S)
    return (
        f"{signals['fs_hz']:g} Hz, {window_s:g} s at a time, {filtered}{clipped}"
        f"{SCALE_MEANINGS[signals['scale']]}"
    )
