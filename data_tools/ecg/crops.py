"""Turn a record of any archive into crops of 10 s: 12 leads in order, 500 Hz, int16 microvolts.

Leads are placed by name; physical = (digital - baseline) / gain; other rates are resampled
(polyphase FIR, anti-aliased); a lead that was not measured becomes zeros and is listed as missing.
A record that already has this form is copied bit for bit. `SPEC` describes all this; its hash goes
into every dataset and every model trained on it.

Flags mark unusual crops and do not change them: `flat:V1` a lead that never changes; `saturated`
clipped at +-32.767 mV; `large` beyond +-20 mV, more than a heart produces; `einthoven` limb leads
inconsistent by more than 20 uV (swapped or mislabelled leads, or bad resampling); `zeros` all leads
are exactly zero for half a second or more (padding, or a part that is lost). All crops of a record
whose amplitude no heart has also have the flag `implausible`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import compress
from typing import Protocol

import numpy as np

from ..io.errors import ReadError
from .constants import CROP as CROP
from .constants import HALF as HALF
from .constants import IMPLAUSIBLE as IMPLAUSIBLE
from .record import LEADS, MV_PER_UNIT, EcgRecord, lead_rows, unit_name
from .resampling import FS_HZ, KAISER_BETA, TAPS_PER_PHASE, rate_ratio, resample

LEADS_IN_ORDER = {lead: lead for lead in range(len(LEADS))}
MAX_UV = 32_767  # samples beyond it are clipped, and their crop gets the flag `saturated`
# Floating-point samples are clipped to this before resampling, because larger ones would overflow
# in the filter
MAX_MV = 1e9
LARGE_UV, EINTHOVEN_UV = 20_000, 20
# So many samples in a row that are 0 in all leads set the flag `zeros`. In 3,585 ECGs of the
# Challenge's databases, the longest such run had 2 samples
ZERO_RUN = 250
# Limits for the typical amplitude of an ECG: the median, over its leads and seconds, of the range of
# the samples within one second. It was 340 to 3,440 in 1,800 ECGs
PLAUSIBLE_UV = (100, 4000)
# The reason, in `EcgRecord.warnings`, of a record with an amplitude outside PLAUSIBLE_UV
IMPLAUSIBLE_AMPLITUDE = "implausible amplitude"
# Multiplied by the stored limb leads I, II, III, aVR, aVL and aVF, this matrix gives, for III, aVR,
# aVL and aVF, the value derived from I and II minus the stored value. All is doubled, so that the
# factors are whole numbers
_TWICE_RESIDUAL = np.array(
    [[-2, 2, -2, 0, 0, 0], [-1, -1, 0, -2, 0, 0], [2, -1, 0, 0, -2, 0], [-1, 2, 0, 0, 0, -2]],
    np.float32,
)

SPEC = {
    "fs_hz": FS_HZ,
    "leads": list(LEADS),
    "uv_per_lsb": 1.0,
    "crop_samples": CROP,
    "remainder": "at least 2500 samples: a last crop, its second half zero; less: dropped",
    "invalid": "a lead with any sample not measured is zero in that crop",
    "saturation_uv": MAX_UV,
    "filter": "none",
    "normalisation": "none",
    "resampling": f"polyphase FIR, Kaiser beta {KAISER_BETA}, {TAPS_PER_PHASE} zero crossings "
    "a side, edges held",
}
SPEC_HASH = hashlib.sha256(json.dumps(SPEC, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Crop:
    """Metadata of a crop, without its samples."""

    start_s: float
    halves: int
    missing: tuple[str, ...]
    flags: tuple[str, ...]


class StoredCrops(Protocol):
    """The crops of a record of an existing dataset: they are copied instead of made anew."""

    count: int

    def read(self, index: int, out: np.ndarray) -> Crop:
        """Write the samples of crop `index` into `out` and return its metadata."""


def samples_at_500_hz(samples: int, fs_hz: float) -> int:
    """Return how many samples a signal has after resampling to 500 Hz."""
    up, down = rate_ratio(fs_hz)
    return -(-samples * up // down)


def crop_count(samples: int, fs_hz: float) -> int:
    """Return how many crops of 10 s a signal gives; a remainder of 5 s or more gives one more."""
    full, rest = divmod(samples_at_500_hz(samples, fs_hz), CROP)
    return full + (rest >= HALF)


def record_crop_count(record: EcgRecord) -> int:
    """Return how many crops a record gives, including those that may be refused later."""
    if record.stored:
        return int(record.stored.count)
    return crop_count(record.signal.shape[1], record.fs_hz)


def dropped_samples(samples: int, fs_hz: float) -> int:
    """Return how many samples at 500 Hz, at the end of a record, are in no crop."""
    return samples_at_500_hz(samples, fs_hz) % CROP % HALF


def prepare_crop(record: EcgRecord, index: int, out: np.ndarray) -> Crop:
    """Write crop `index` of the record into `out` [12, 5000] int16 and return its metadata. Raise a
    ReadError if no lead of the crop is valid."""
    if record.stored:
        stored: Crop = record.stored.read(index, out)
        return stored
    body, mask, flags = fill_crop(record, index, out)
    start_s, missing = index * CROP / FS_HZ, mask.tolist()
    flags += _sample_flags(body, missing)
    flat = sum(flag.startswith("flat:") for flag in flags)
    if flat + sum(missing) == len(LEADS):
        raise ReadError(
            "no valid lead", f"at {start_s:g} s: {_no_valid_lead_reason(record, mask, flat)}"
        )
    return Crop(start_s, body.shape[1] // HALF, tuple(compress(LEADS, missing)), tuple(flags))


def _no_valid_lead_reason(record: EcgRecord, missing_L: np.ndarray, flat: int) -> str:
    recorded = len(lead_rows(tuple(record.leads)))
    with_gaps = int(missing_L.sum()) - (len(LEADS) - recorded)
    reasons = []
    if with_gaps:
        reasons.append(
            f"{with_gaps} of {recorded} leads have samples that were not measured (one leaves out the lead)"
        )
    if flat:
        reasons.append(f"{flat} of {recorded} leads never change")
    return ", ".join(reasons)


def crop_flags(record: EcgRecord, crop: Crop) -> tuple[str, ...]:
    """Return the flags of a crop, with `implausible` added if its record has that warning."""
    if any(reason == IMPLAUSIBLE_AMPLITUDE for reason, _ in record.warnings):
        return (*crop.flags, IMPLAUSIBLE)
    return crop.flags


def signal_in_microvolts(record: EcgRecord) -> np.ndarray:
    """Return the signal of a record in microvolts, NaN where it was not measured. The baseline is not
    subtracted."""
    values = record.signal.astype(np.float64)
    there = np.isfinite(values) if record.invalid is None else record.signal != record.invalid
    return np.where(there, values * _uv_per_step(record), np.nan)


def _uv_per_step(record: EcgRecord) -> np.ndarray:
    """Returns how many microvolts one step of the signal is: a column with a number for each lead, or
    one number for all leads."""
    per_mv = np.asarray(record.gain, np.float64).reshape(-1, 1)
    return np.asarray(1000 * MV_PER_UNIT[unit_name(record.unit)] / per_mv)


def implausible_amplitude_text(
    signal: np.ndarray, fs_hz: float, uv_per_step: np.ndarray | None = None
) -> str:
    """Returns the typical amplitude of an ECG as text if it is implausible, else "". `signal` is
    [leads, samples], NaN where it was not measured, in microvolts or, if `uv_per_step` is given, in steps
    of that size. Leads that never change do not count."""
    second = int(fs_hz)
    ranges = _peak_to_peak(
        signal[:, : signal.shape[1] // second * second].reshape(len(signal), -1, second)
    )
    if uv_per_step is not None:
        ranges *= uv_per_step
    ranges = ranges[_peak_to_peak(signal) != 0]
    ranges = ranges[np.isfinite(ranges)]
    typical_uv = float(np.median(ranges)) if len(ranges) else PLAUSIBLE_UV[0]
    if PLAUSIBLE_UV[0] <= typical_uv <= PLAUSIBLE_UV[1]:
        return ""
    return f"{typical_uv / 1000:.3g} mV within a second"


def _peak_to_peak(signal: np.ndarray) -> np.ndarray:
    """Returns maximum minus minimum along the last axis, in float64, because int16 would overflow."""
    high, low = np.fmax.reduce(signal, -1), np.fmin.reduce(signal, -1)
    return np.asarray(np.subtract(high, low, dtype=np.float64))


def with_amplitude_warning(record: EcgRecord) -> EcgRecord:
    """Return the record, with a warning added if its amplitude is implausible."""
    if record.stored or any(reason == IMPLAUSIBLE_AMPLITUDE for reason, _ in record.warnings):
        return record
    try:
        rows = list(lead_rows(record.leads).values())
        with np.errstate(all="ignore"):
            if record.signal.dtype.kind == "f" or bool((record.signal == record.invalid).any()):
                doubt = implausible_amplitude_text(signal_in_microvolts(record)[rows], record.fs_hz)
            else:
                # Nearly all records are whole numbers without gaps. Measuring their amplitude in steps of
                # the signal, without converting it to microvolts, is ten times as fast
                uv_per_step = np.broadcast_to(_uv_per_step(record), (len(record.leads), 1))
                doubt = implausible_amplitude_text(
                    record.signal[rows], record.fs_hz, uv_per_step[rows]
                )
    except (ReadError, ArithmeticError, TypeError, ValueError):
        # The same error will occur when the crops are made, and will be reported then
        return record
    if not doubt:
        return record
    warning = IMPLAUSIBLE_AMPLITUDE, f"{doubt}: are unit and gain right?"
    return replace(record, warnings=(*record.warnings, warning))


def _sample_flags(body: np.ndarray, missing: list[bool]) -> list[str]:
    # As lists, because for twelve numbers Python is faster than numpy
    low, high = body.min(axis=1).tolist(), body.max(axis=1).tolist()
    flags = [
        f"flat:{lead}"
        for lead, a, b, gone in zip(LEADS, low, high, missing, strict=True)
        if a == b and not gone
    ]
    if max(high) > LARGE_UV or min(low) < -LARGE_UV:
        flags.append("large")
    if _has_zeros(
        body, [lead for lead, (a, b) in enumerate(zip(low, high, strict=True)) if a != b]
    ):
        flags.append("zeros")
    # From I and II, the other limb leads can be derived, and compared with the stored ones
    if not any(missing[:2]):
        # float32 is exact here, because all numbers are whole and below 2**24
        twice_residual = _TWICE_RESIDUAL @ body[:6].astype(np.float32)
        if any(missing[2:6]):
            twice_residual[missing[2:6]] = 0
        if max(twice_residual.max(), -twice_residual.min()) > 2 * EINTHOVEN_UV:
            flags.append("einthoven")
    return flags


def _has_zeros(body: np.ndarray, changing: list[int]) -> bool:
    """True if the leads that change are zero for ZERO_RUN samples in a row."""
    # Any run of ZERO_RUN samples includes one whose index is a multiple of ZERO_RUN. Testing only
    # these samples first saves time
    if body[:, ::ZERO_RUN][changing].any(axis=0).all():
        return False
    signal = body[changing].any(axis=0)
    edges = np.flatnonzero(np.diff(signal, prepend=True, append=True))
    return bool(np.diff(edges)[::2].max(initial=0) >= ZERO_RUN)


def fill_crop(
    record: EcgRecord, index: int, out: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Write crop `index` of the record into `out`. Return (the part of `out` with signal, a mask of
    the missing leads, flags: `saturated` if samples were clipped)."""
    length = samples_at_500_hz(record.signal.shape[1], record.fs_hz)
    start = index * CROP
    stop = min(start + CROP, length)
    if stop - start < CROP:  # of a remainder under 10 s, the crop has the first 5 s
        stop = start + HALF
    if stop > length or start < 0:
        raise ReadError("too short", f"a record of {length / FS_HZ:g} s has no crop {index}")
    rows = lead_rows(tuple(record.leads))
    flags: list[str] = []
    out[:, stop - start :] = 0
    body = out[:, : stop - start]
    try:
        if _is_canonical(record, rows):
            body[:] = record.signal[:, start:stop]
            missing = body.min(axis=1) == -MAX_UV - 1
        else:
            missing, flags = _convert_samples(record, rows, start, body)
    except (ArithmeticError, TypeError, ValueError) as error:
        # A source class written by a user may return fields of any kind
        raise ReadError(
            "unreadable record", f"its conversion to microvolts failed with {type(error).__name__}"
        ) from None
    body[missing] = 0
    return body, missing, flags


def _is_canonical(record: EcgRecord, rows: Mapping[int, int]) -> bool:
    """True if the samples can be copied without conversion: 12 leads in order, 500 Hz, whole
    microvolts, no baseline."""
    if (
        record.signal.dtype != np.int16
        or rate_ratio(record.fs_hz) != (1, 1)
        or unit_name(record.unit) != "mV"
    ):
        return False
    if len(record.leads) != len(LEADS) or rows != LEADS_IN_ORDER:
        return False
    if record.invalid not in (None, -MAX_UV - 1):
        return False
    if record.invalid is None and int(record.signal.min()) < -MAX_UV:
        return False
    return _is_all(record.gain, 1000.0) and _is_all(record.baseline, 0.0)


def _is_all(value: tuple[float, ...] | float, expected: float) -> bool:
    if isinstance(value, tuple):  # numpy would convert the tuple, which takes 1.5 us a crop longer
        return value == (expected,) * len(value)
    return bool(np.equal(value, expected).all())


def _convert_samples(
    record: EcgRecord, rows: Mapping[int, int], start: int, body: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Convert a signal of any number type, lead order and sampling rate into `body`, reading only the
    samples that this crop needs. Return (a mask of the missing leads, flags)."""
    leads, taken = list(rows), list(rows.values())
    first, last, lead_in = _source_range_and_lead_in(record, start, body.shape[1])
    values, invalid = millivolts_and_unmeasured(record, taken, first, last)
    if (ratio := rate_ratio(record.fs_hz)) != (1, 1):  # the ratio of 500.001 Hz, too, is (1, 1)
        values = resample(values, *ratio)[:, lead_in : lead_in + body.shape[1]]
    values *= 1000.0
    np.rint(values, out=values)
    saturated = bool(values.max() > MAX_UV or values.min() < -MAX_UV)
    body[:] = 0
    body[leads] = np.clip(values, -MAX_UV, MAX_UV, out=values)
    missing = np.ones(len(LEADS), bool)
    missing[leads] = invalid.any(axis=1)
    return missing, ["saturated"] if saturated else []


def millivolts_and_unmeasured(
    record: EcgRecord, taken: list[int], first: int, last: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the samples [first, last) of the rows `taken` in millivolts, 0 where not measured;
    a mask of the samples that were not measured)."""
    shape = len(record.leads)
    gain = np.full(shape, record.gain, np.float64)
    baseline = np.full(shape, record.baseline, np.float64)
    if not ((gain > 0).all() and np.isfinite([gain, baseline]).all()):
        raise ReadError("gain", f"{record.gain}"[:60])
    is_float = record.signal.dtype.kind == "f"
    # Damaged files can have signalling NaNs, whose conversion would cause a warning
    with np.errstate(invalid="ignore"):
        values = record.signal[taken, first:last].astype(np.float64)
    invalid = ~np.isfinite(values) if is_float else np.zeros(values.shape, bool)
    if record.invalid is not None:
        invalid |= values == record.invalid
    values[invalid] = 0.0
    with np.errstate(over="ignore"):  # values that overflow here are clipped below
        if baseline.any() or (gain != 1.0).any():
            values -= baseline[taken, None]
            values /= gain[taken, None]
        values *= MV_PER_UNIT[unit_name(record.unit)]
    if is_float:
        np.clip(values, -MAX_MV, MAX_MV, out=values)
    values[invalid] = 0.0
    return values, invalid


def _source_range_and_lead_in(record: EcgRecord, start: int, length: int) -> tuple[int, int, int]:
    """Return (first, last, lead_in) for the samples [start, start + length) at 500 Hz: the source
    samples [first, last) are to be resampled, and the first `lead_in` samples of the result are to
    be dropped, as they lie before `start`.

    `first` is a multiple of `down`, so every sample has the same filter phase and input as when the
    whole record is resampled: a crop does not depend on how the record is cut."""
    samples = record.signal.shape[1]
    up, down = rate_ratio(record.fs_hz)
    if up == down:
        return start, start + length, 0
    # How many source samples the filter reads on each side of an output sample
    margin = -(-TAPS_PER_PHASE * max(up, down) // up) + 1
    block = max(0, start * down // up - margin) // down
    last = min(samples, -(-(start + length) * down // up) + margin)
    return block * down, last, start - block * up
