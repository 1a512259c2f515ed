"""Decodes GE CardioSoft's XML export, which UK Biobank uses too, with one ECG per file. The first strip is
read. The median beats are not read, nor the full disclosure, because programs disagree on the order of the
full disclosure's samples.

An ECG at rest has its leads in StripData, an exercise ECG in a Strip there. UK Biobank's exercise
ECGs have leads I, 2 and 3; as nothing says that the last two are II and III, they are ignored.
Apart from the signal, only the patient's id, age and sex are read.
"""

from xml.etree.ElementTree import Element

import numpy as np

from ...ecg.record import AGE_UNITS, lead_name
from ...io.errors import ReadError
from ...io.spreadsheet import to_number
from .base import DecodedEcg, FileFormat, age_in_years, parse_xml, root_tag

# A full disclosure of some minutes takes most of these bytes
MAX_CARDIOSOFT_BYTES = 12 * 2**20
MAX_LEADS = 64
NOT_MEASURED = -32768
_SKIPPED_ELEMENTS = frozenset(
    ("FullDisclosureData", "RestingECGMeasurements", "MedianData", "VectorLoops", "TrendData")
)
Fields = dict[str, Element]


def decode(data: bytes) -> DecodedEcg:
    root = parse_xml(data, _SKIPPED_ELEMENTS)
    if root.tag != "CardiologyXML":
        raise ReadError(
            "unknown format", f"not CardioSoft XML: its root element is {root.tag[:40]}"
        )
    strips = []
    for place in (*root.iterfind("StripData"), *root.iterfind("Strip/StripData")):
        strips += [(place, strip) for strip in place.findall("Strip") or [place]]
    has_full = root.find("FullDisclosure") is not None
    if not strips:
        instead = "only a full disclosure, which is not read" if has_full else "no StripData"
        raise ReadError("rhythm waveform", f"{instead}: export the ECG with its strip of 10 s")
    warnings = []
    if len(strips) > 1:
        warnings.append(("further waveforms", f"the first of {len(strips)} strips was read"))
    if has_full:
        warnings.append(("further waveforms", "the full disclosure was not read"))
    person = {field.tag: field for field in root.iterfind("PatientInfo/*")}
    place, strip = strips[0]
    fields = {field.tag: field for field in (*place, *strip)}
    return DecodedEcg(
        _signals(strip, fields),
        _quantity(fields, "SampleRate", "Hz", "sampling rate"),
        _text(person, "PID"),
        age_in_years(_text(person, "Age"), _unit(person, "Age").lower() or "years", AGE_UNITS),
        _text(person, "Gender"),
        tuple(warnings),
    )


FORMAT = FileFormat(
    lambda head, name: root_tag(head) == "CardiologyXML", decode, MAX_CARDIOSOFT_BYTES
)


def _signals(strip: Element, fields: Fields) -> dict[str, np.ndarray]:
    uv_per_step = _quantity(fields, "Resolution", "uVperLsb", "gain")
    if uv_per_step > 1000:
        raise ReadError("gain", f"Resolution: {uv_per_step:g} uV per step, 1000 at most")
    leads = strip.findall("WaveformData")
    if not 0 < len(leads) <= MAX_LEADS:
        raise ReadError("signal count", f"{len(leads)} leads, only 1 to {MAX_LEADS} are read")
    _check_count(fields, "NumberOfLeads", len(leads), "signal count")
    signals: dict[str, np.ndarray] = {}
    for lead in leads:
        name = lead_name(lead.get("lead", "").strip())
        if name in signals:
            raise ReadError("duplicated lead", name[:10])
        steps = _parse_steps(lead.text or "", f"lead {name[:10]}")
        _check_count(fields, "ChannelSampleCountTotal", len(steps), "sample count")
        signals[name] = np.where(steps == NOT_MEASURED, np.nan, steps * uv_per_step)
    return signals


def _text(fields: Fields, name: str) -> str:
    return (fields[name].text or "").strip() if name in fields else ""


def _unit(fields: Fields, name: str) -> str:
    return fields[name].get("units", "").strip() if name in fields else ""


def _quantity(fields: Fields, name: str, unit: str, reason: str) -> float:
    """Return the value of a field, a positive number. Raise a ReadError if its unit is not `unit`."""
    text, stated = _text(fields, name), _unit(fields, name)
    if stated.lower() != unit.lower():
        raise ReadError("unknown unit", f"{name} in {stated[:20]!r}, only {unit} is read")
    number = to_number(text)
    if not 0 < number < np.inf:
        raise ReadError(
            reason,
            f"{name}: {text[:20]!r} is not a positive number, with a decimal point if needed",
        )
    return number


def _check_count(fields: Fields, name: str, counted: int, reason: str) -> None:
    if name in fields and to_number(_text(fields, name)) != counted:
        stated = _text(fields, name)[:20]
        raise ReadError(reason, f"{counted} found, {name} states {stated!r}: export the ECG again")


def _parse_steps(text: str, where: str) -> np.ndarray:
    """Parse whole numbers that are separated by commas."""
    try:
        # int() would accept underscores and digits of other scripts
        if not text.isascii() or "_" in text:
            raise ValueError
        return np.array(list(map(int, text.split(","))), np.int32)
    except (ValueError, OverflowError):
        raise ReadError(
            "sample data", f"{where}: the samples are not whole numbers separated by commas"
        ) from None
