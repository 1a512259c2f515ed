"""Settings of a model's input: window length, sampling rate, frequency band and scale. input.py
applies them."""

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from omnilead.data_tools.ecg.resampling import MAX_RATE_RATIO, RATE_RANGE_HZ, rate_ratio
from omnilead.data_tools.io.errors import ReadError

from ..data.config import CROP, FS_HZ, HALF
from ..settings.errors import ConfigError, one_line_errors
from .config import STRICT

HALF_S, CROP_S = HALF / FS_HZ, CROP / FS_HZ
SCALE_MEANINGS = {
    "millivolt": "millivolts, not normalised",
    "zscore": "mean 0 and standard deviation 1 in each lead of each record of 10 s",
    "layernorm": "mean 0 and standard deviation 1 over all leads of each window",
}
DEFAULT_INPUT = {"fs_hz": 500, "scale": "millivolt"}


class InputFormat:
    """The format in which a model sees an ECG: the length of a window in s, the sampling rate, the band-pass,
    the largest amplitude and the scale."""

    window_s: float
    fs_hz: float
    band_hz: tuple[float, float] | None
    clip_mv: float | None
    scale: str

    @property
    def preprocessing_fields(self) -> dict[str, Any]:
        """Return the format as it is stored in preprocessing.json, without the leads. The length of a window
        is left out if it is 5 s; band-pass and largest amplitude are left out if there are none."""
        signals: dict[str, Any] = {"fs_hz": self.fs_hz, "scale": self.scale}
        if self.window_s != HALF_S:
            signals["segment_s"] = self.window_s
        if self.band_hz:
            signals["band_hz"] = list(self.band_hz)
        if self.clip_mv:
            signals["clip_mv"] = self.clip_mv
        return signals

    @property
    def uses_stored_halves(self) -> bool:
        """True if the windows are the two halves of a crop as they are stored: not filtered,
        resampled, clipped or scaled."""
        return self.preprocessing_fields == DEFAULT_INPUT

    @property
    def resamples_by_halves(self) -> bool:
        """True if each half of a crop is resampled separately: windows of 5 s without a band-pass."""
        return self.window_s == HALF_S and not self.band_hz

    @property
    def samples(self) -> int:
        """The number of samples in a window at the model's sampling rate."""
        if self.resamples_by_halves:
            return resampled_length(self.fs_hz, HALF)
        return int(self.window_s * self.fs_hz + 1e-6)


@one_line_errors
@checked_dataclass(frozen=True, config=STRICT)
class InputConfig(InputFormat):
    """The section `input` of the settings: the format in which the encoder sees crops. All crops are stored
    as 10 s at 500 Hz."""

    # length in s of a window, which the encoder sees at once; a crop of 10 s has as many as fit
    window_s: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 5.0
    # sampling rate of a window in Hz
    fs_hz: Annotated[float, Field(ge=50, le=500, allow_inf_nan=False)] = 500.0
    # limits in Hz of a zero-phase Butterworth band-pass of order 2, for example [0.5, 40]; null: no filter
    band_hz: tuple[float, float] | None = None
    # amplitudes above this value in mV are clipped to it, after resampling; null: no clipping
    clip_mv: Annotated[float | None, Field(gt=0, le=1000, allow_inf_nan=False)] = None
    # millivolt: not normalised; zscore: mean 0 and standard deviation 1 in each lead of a crop; layernorm: mean 0
    # and standard deviation 1 over all leads of a window together
    scale: Literal["millivolt", "zscore", "layernorm"] = "millivolt"

    def __post_init__(self) -> None:
        check_rate_and_band(self.fs_hz, self.band_hz, "input.")


def check_rate_and_band(fs_hz: Any, band_hz: Any, section: str = "") -> None:
    """Raise ConfigError if fs_hz or band_hz is not valid. `section` precedes their names in the message."""
    try:
        rate_ratio(fs_hz)
    except (ReadError, TypeError):
        bounds = " to ".join(map("{:g}".format, RATE_RANGE_HZ))
        raise ConfigError(
            f"{section}fs_hz={fs_hz!r}: must be {bounds} Hz, and its ratio to {FS_HZ:g} Hz a fraction of "
            f"whole numbers up to {MAX_RATE_RATIO}"
        ) from None
    if band_hz is None:
        return
    try:
        low, high = band_hz
        fits = 0.01 <= low < high < min(fs_hz, FS_HZ) / 2
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ConfigError(
            f"{section}band_hz={band_hz!r}: give [LOW, HIGH], from 0.01 Hz to less than half of "
            f"fs_hz={fs_hz:g}, or null"
        )


def resampled_length(fs_hz: float, samples: int) -> int:
    """Return the number of samples at fs_hz of a signal that has `samples` samples at 500 Hz."""
    up, down = rate_ratio(fs_hz)
    return -(-samples * down // up)
