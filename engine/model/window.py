"""Settings of the input: the window, rate, band and scale in which a model sees an ECG (input.py)."""

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
    """The window of a model's input, and what follows from it."""

    window_s: float
    fs_hz: float
    band_hz: tuple[float, float] | None
    clip_mv: float | None
    scale: str

    @property
    def preprocessing_fields(self) -> dict[str, Any]:
        """The window as in preprocessing.json, without the leads. The defaults (5 s, no band, no
        limit) are left out."""
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
        """True if its windows are the halves of a crop as they are stored."""
        return self.preprocessing_fields == DEFAULT_INPUT

    @property
    def resamples_by_halves(self) -> bool:
        """True if each half of a crop is resampled on its own."""
        return self.window_s == HALF_S and not self.band_hz

    @property
    def samples(self) -> int:
        """The number of samples in a window."""
        if self.resamples_by_halves:
            return resampled_length(self.fs_hz, HALF)
        return int(self.window_s * self.fs_hz + 1e-6)


@one_line_errors
@checked_dataclass(frozen=True, config=STRICT)
class InputConfig(InputFormat):
    """The section `input` of the settings: what the encoder sees of a crop of 10 s at 500 Hz."""

    # seconds that the encoder sees at once; a crop has as many windows side by side as fit
    window_s: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 5.0
    fs_hz: Annotated[float, Field(ge=50, le=500, allow_inf_nan=False)] = 500.0  # sampling rate
    # for example [0.5, 40]: zero-phase Butterworth band-pass of order 2; null: none
    band_hz: tuple[float, float] | None = None
    # largest amplitude, after resampling: larger ones become it; null: none
    clip_mv: Annotated[float | None, Field(gt=0, le=1000, allow_inf_nan=False)] = None
    # zscore: each lead of 10 s has mean 0 and deviation 1; layernorm: all leads of a window
    scale: Literal["millivolt", "zscore", "layernorm"] = "millivolt"

    def __post_init__(self) -> None:
        check_rate_and_band(self.fs_hz, self.band_hz, "input.")


def check_rate_and_band(fs_hz: Any, band_hz: Any, section: str = "") -> None:
    """Raises ConfigError if crops cannot be resampled or filtered like this."""
    try:
        rate_ratio(fs_hz)
    except (ReadError, TypeError):
        bounds = " to ".join(map("{:g}".format, RATE_RANGE_HZ))
        raise ConfigError(
            f"{section}fs_hz={fs_hz!r}: must be {bounds}, and its ratio to {FS_HZ:g} one of whole "
            f"numbers up to {MAX_RATE_RATIO}"
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
    """The samples at fs_hz of a signal that has `samples` at 500 Hz."""
    up, down = rate_ratio(fs_hz)
    return -(-samples * down // up)
