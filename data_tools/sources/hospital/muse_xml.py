"""Decodes GE MUSE's XML export, with one resting ECG per file. The rhythm waveform is read, not the median
beat before it.

MUSE stores I, II and V1 to V6. Apart from the signal, only the patient's id, age and sex are read:
no names, dates, statements or comments. A DOCTYPE is allowed, entities are not.
"""

import zlib
from xml.etree.ElementTree import Element

import numpy as np

from ...ecg.record import AGE_UNITS, lead_name
from ...io.errors import ReadError
from ...io.spreadsheet import to_number
from .base import (
    MAX_XML_BYTES,
    DecodedEcg,
    FileFormat,
    age_in_years,
    decode_base64,
    parse_xml,
    root_tag,
)

MAX_LEADS = 64
# Fields that could shift or scale the samples. If a file has such a field, only this value is accepted
_ACCEPTED_OF_WAVEFORM = {"SampleType": "CONTINUOUS_SAMPLES", "SampleExponent": "0"}
_ACCEPTED_OF_LEAD = {
    "LeadAmplitudeUnits": "MICROVOLTS",
    "LeadTimeOffset": "0",
    "LeadOffsetFirstSample": "0",
    "FirstSampleBaseline": "0",
    "LeadSampleSize": "2",
}
_COUNT_AND_CHECKSUM_FIELDS = ("LeadByteCountTotal", "LeadSampleCountTotal", "LeadDataCRC32")
Fields = dict[str, str]


def decode(data: bytes) -> DecodedEcg:
    root = parse_xml(data)
    if root.tag != "RestingECG":
        raise ReadError("unknown format", f"not MUSE XML: its root element is {root.tag[:40]}")
    waveforms = root.findall("Waveform")
    rhythms = [
        waveform
        for waveform in waveforms
        if waveform.findtext("WaveformType", "").strip().lower() == "rhythm"
    ]
    if len(rhythms) != 1:
        raise ReadError(
            "rhythm waveform",
            f"{len(rhythms)} of {len(waveforms)} waveforms are rhythms, exactly 1 is read",
        )
    fields, leads = _fields(rhythms[0]), [_fields(lead) for lead in rhythms[0].iterfind("LeadData")]
    if len(leads) > MAX_LEADS:
        raise ReadError("signal count", f"{len(leads)} leads, {MAX_LEADS} at most")
    _check_fields(fields, _ACCEPTED_OF_WAVEFORM)
    if leads and not any(map(_is_lead_on, leads)):
        raise ReadError("no valid lead", f"the file states LeadOff for all {len(leads)} leads")
    signals: dict[str, np.ndarray | None] = {}
    for lead in leads:
        name = lead_name(lead.get("LeadID", ""))
        if name in signals:
            raise ReadError("duplicated lead", name[:10])
        signals[name] = _microvolts(lead, name)
    person = next(map(_fields, root.iterfind("PatientDemographics")), {})
    age = age_in_years(
        person.get("PatientAge", ""), person.get("AgeUnits", "years").lower(), AGE_UNITS
    )
    return DecodedEcg(
        {name: uv for name, uv in signals.items() if uv is not None},
        to_number(fields.get("SampleBase")),
        person.get("PatientID"),
        age,
        person.get("Gender"),
    )


FORMAT = FileFormat(lambda head, name: root_tag(head) == "RestingECG", decode, MAX_XML_BYTES)


def _fields(element: Element) -> Fields:
    return {child.tag: (child.text or "").strip() for child in element}


def _check_fields(fields: Fields, expected: Fields) -> None:
    for name, value in expected.items():
        if fields.get(name, value).upper() != value:
            raise ReadError(name, f"{fields[name][:20]!r}, only {value} is read")


def _is_lead_on(fields: Fields) -> bool:
    return fields.get("LeadOff", "FALSE").upper() == "FALSE"


def _microvolts(fields: Fields, name: str) -> np.ndarray | None:
    """Return a lead's microvolts; None if the lead was off or has samples that were not measured. If the file
    states a number of samples and a checksum, the data must agree with them."""
    _check_fields(fields, _ACCEPTED_OF_LEAD)
    if "LeadAmplitudeUnits" not in fields:
        raise ReadError("unknown unit", f"lead {name[:10]} states no unit")
    if not 0 < (uv_per_step := to_number(fields.get("LeadAmplitudeUnitsPerBit"))) <= 1000:
        raise ReadError(
            "gain",
            f"lead {name[:10]}: {fields.get('LeadAmplitudeUnitsPerBit', 'none')[:20]} uV per step, only over 0 "
            "and up to 1000 are read",
        )
    data = decode_base64(fields.get("WaveFormData", ""), f"lead {name[:10]}: ")
    for field, value in zip(
        _COUNT_AND_CHECKSUM_FIELDS, (len(data), len(data) // 2, zlib.crc32(data)), strict=True
    ):
        if field in fields and to_number(fields[field]) != value:
            raise ReadError(field, f"lead {name[:10]}: {value} found, {fields[field][:20]} stated")
    if len(data) % 2:
        raise ReadError(
            "sample count", f"lead {name[:10]}: an odd number of bytes, each sample has 2"
        )
    steps = np.frombuffer(data, "<i2")
    measured = _is_lead_on(fields) and not (steps == -32768).any()
    return steps * uv_per_step if measured else None
