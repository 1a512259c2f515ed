"""Decodes EDF and EDF+C files with ECG leads. Leads are identified by their labels: `I`, `ECG II`, `EKG V1`,
`Lead aVR`. Inverted leads, such as Cabrera's `ECG -aVR`, are inverted again, with a warning.

Besides the samples, only the header's numbers, labels and units are read, and code and sex from
EDF+'s patient field: no names, dates, annotations or comments. Plain EDF's patient field is free
text and is not read at all. Refused: BDF, EDF+D (which has gaps), and files over 12 MiB (17 minutes
of 12 leads at 500 Hz; cut Holter recordings into pieces first).
"""

import math
import re

import numpy as np

from ...ecg.record import LEAD_INDEX, LEADS, MV_PER_UNIT, unit_name
from ...ecg.resampling import rate_ratio
from ...io.errors import ReadError
from .base import DecodedEcg, FileFormat

MAX_EDF_BYTES = 12 * 2**20
# (name, bytes) of each signal field. The header stores a field of all signals before the next field. Fields
# without a name are not read
HEADER_FIELDS = (
    ("label", 16),
    ("", 80),
    ("unit", 8),
    ("low", 8),
    ("high", 8),
    ("digital_low", 8),
    ("digital_high", 8),
    ("", 80),
    ("samples", 8),
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(E[+-]?\d+)?", re.ASCII | re.IGNORECASE)
# A hyphen separates the word ECG, EKG or LEAD from the lead if it follows the word directly (`ECG-I`) or has a
# space on both sides (`ECG - I`). Any other hyphen is a minus sign (`ECG -I`)
_LABEL = re.compile(r"(?:(?:ECG|EKG|LEAD)(?:-[ _.:]*|[ _.:]*(?:-[ _.:]+)?))*(-?)(.*)", re.DOTALL)
# The patient field of EDF+: code, sex, birthdate, name
_PATIENT_FIELD = re.compile(r"(\S+) ([MFX]) (?:X|\d\d-[A-Z]{3}-\d{4}) \S", re.ASCII | re.IGNORECASE)


def decode(data: bytes) -> DecodedEcg:
    if data[:1] == b"\xff":
        raise ReadError(
            "BDF", "BDF files, which have samples of 24 bits, are not read: convert the file to EDF"
        )
    signals = _parse_header(data)
    sizes = [_whole_number(size, "samples of a record", 1) for size in signals["samples"]]
    records = _whole_number(_text(data[236:244]), "records", 1)
    duration_s = _number(_text(data[244:252]), "duration of a record")
    header = 256 * (len(sizes) + 1)
    expected = header + 2 * records * sum(sizes)
    if len(data) != expected:
        reason = "truncated file" if len(data) < expected else "file length"
        raise ReadError(reason, f"{len(data)} of {expected} bytes")
    steps = np.frombuffer(data, "<i2", offset=header).reshape(records, sum(sizes))
    leads, inverted = _leads_and_inverted(np.split(steps, np.cumsum(sizes)[:-1], axis=1), signals)
    if not leads:
        raise ReadError(
            "no known lead", f"none of {len(sizes)} signals is labelled as one of the 12 leads"
        )
    # Numbers of samples that a lead has in one data record
    samples = {len(uv) // records for uv in leads.values()}
    if len(samples) > 1 or duration_s <= 0:
        stated = ", ".join(map(str, sorted(samples)))
        raise ReadError(
            "sampling rate",
            f"leads with {stated} samples in a data record of {duration_s:g} s: only leads with one "
            "common rate over 0 are read",
        )
    fs_hz = samples.pop() / duration_s
    rate_ratio(fs_hz)  # raises a ReadError if the rate is not supported
    warnings = []
    if inverted:
        detail = f"{' '.join(inverted)}: labelled with a minus, inverted again"
        warnings.append(("inverted lead", detail))
    return DecodedEcg(leads, fs_hz, *_patient_and_sex(data), tuple(warnings))


def _leads_and_inverted(
    steps: list[np.ndarray], signals: dict[str, list[str]]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return ({lead: microvolts} of the signals labelled as one of the twelve leads, leads that were inverted)."""
    leads: dict[str, np.ndarray] = {}
    inverted = []
    for row, step in enumerate(steps):
        fields = {name: texts[row] for name, texts in signals.items()}
        sign, name = _sign_and_lead(fields["label"])
        if name not in LEAD_INDEX:
            continue
        lead = LEADS[LEAD_INDEX[name]]
        if lead in leads:
            raise ReadError("duplicated lead", lead)
        leads[lead] = _microvolts(step.ravel(), fields, lead)
        if sign:
            leads[lead] = -leads[lead]
            inverted.append(lead)
    return leads, inverted


FIRST_BYTES = (b"0       ", b"\xffBIOSEMI")
FORMAT = FileFormat(
    lambda head, name: head[:8] in FIRST_BYTES or name.lower().endswith((".edf", ".bdf")),
    decode,
    MAX_EDF_BYTES,
)


def _parse_header(data: bytes) -> dict[str, list[str]]:
    """Return {field name: one text for each signal} of the fields that are read."""
    if data[:8] != b"0       ":
        raise ReadError("unknown format", "not EDF: it does not begin with version 0")
    if data[192:197] == b"EDF+D":
        raise ReadError("EDF+D", "a recording with gaps is not read: cut it into EDF+C")
    count = _whole_number(_text(data[252:256]), "number of signals", 1)
    if _whole_number(_text(data[184:192]), "header size", 1) != 256 * (count + 1):
        raise ReadError(
            "header size", f"the stated size is not that of a header with {count} signals"
        )
    place, fields = 256, {}
    for name, width in HEADER_FIELDS:
        if name:
            fields[name] = [
                _text(data[place + row * width : place + (row + 1) * width]) for row in range(count)
            ]
        place += width * count
    return fields


def _sign_and_lead(label: str) -> tuple[str, str]:
    """Return the label's sign, "-" or "", and the name of its lead in capitals."""
    text = label.upper().replace("(", "").replace(")", "")
    before = "-" if text.startswith("-") else ""  # a sign before the word, as in `-ECG I`
    match = _LABEL.fullmatch(text.lstrip("- "))
    assert match  # the pattern matches any text
    return before or match[1], match[2]


def _text(field: bytes) -> str:
    return field.decode("latin-1").strip(" \0")


def _number(text: str, name: str) -> float:
    """Parse a number in the header, where numbers are stored as text."""
    if not _NUMBER.fullmatch(text) or not math.isfinite(value := float(text)):
        raise ReadError("header", f"{name}: {text!r} is not a number")
    return value


def _whole_number(text: str, name: str, least: int) -> int:
    if (value := _number(text, name)) < least or value % 1:
        raise ReadError("header", f"{name}: {text!r} is not a whole number of at least {least}")
    return int(value)


def _microvolts(steps: np.ndarray, fields: dict[str, str], lead: str) -> np.ndarray:
    low, high, first, last = (
        _number(fields[name], name) for name in ("low", "high", "digital_low", "digital_high")
    )
    unit_uv = 1000 * MV_PER_UNIT[unit_name(fields["unit"])]
    gain = (high - low) / (last - first) if last > first else 0.0
    if not 0 < abs(gain * unit_uv) <= 1000:
        raise ReadError(
            "gain",
            f"lead {lead}: {low:g} to {high:g} {fields['unit']} for stored values from {first:g} to {last:g}: "
            "only steps over 0 and up to 1000 uV are read",
        )
    return (steps * gain + (low - gain * first)) * unit_uv


def _patient_and_sex(data: bytes) -> tuple[str | None, None, str | None]:
    """Return (code, None for the age, sex) from the patient field if it is valid EDF+. Otherwise return three
    times None, because a name could be taken for a code."""
    person = _PATIENT_FIELD.match(_text(data[8:88])) if data[192:196] == b"EDF+" else None
    return (
        (None if person[1] == "X" else person[1], None, person[2]) if person else (None, None, None)
    )
