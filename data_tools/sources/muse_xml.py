"""GE MUSE's XML export, one resting ECG a file: the rhythm waveform of its leads, not the median beat that stands before it.

MUSE stores I, II and V1 to V6; III, aVR, aVL and aVF are computed from I and II where the file has none. Of all else in it
only the patient's id, age and sex are read: no names, dates, statements or comments. A DOCTYPE is allowed, entities are not.
"""

import binascii
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import NoReturn
from xml.parsers import expat

import numpy as np

from data_tools.errors import ReadError
from data_tools.record import EcgRecord, clean_age, clean_sex
from data_tools.sources.base import Source, path_name, record_stem

MAX_BYTES, MAX_DEPTH, MAX_LEADS = 6 * 2**20, 32, 64  # a 10 s ECG has 0.2 MB
YEARS = {"YEARS": 1.0, "MONTHS": 1 / 12, "WEEKS": 7 / 365.25, "DAYS": 1 / 365.25, "HOURS": 1 / 8766}
# Fields that would shift or scale the samples, and their only value that is read
_WAVEFORM = {"SampleType": "CONTINUOUS_SAMPLES", "SampleExponent": "0"}
_LEAD = {"LeadAmplitudeUnits": "MICROVOLTS", "LeadTimeOffset": "0", "LeadOffsetFirstSample": "0", "FirstSampleBaseline": "0"}
_LEAD |= {"LeadSampleSize": "2"}
_COUNTS = ("LeadByteCountTotal", "LeadSampleCountTotal", "LeadDataCRC32")
_WANTED = {  # all that is read, by the path below the root
    ("PatientDemographics",): {"PatientID", "PatientAge", "AgeUnits", "Gender"},
    ("Waveform",): {"WaveformType", "SampleBase", *_WAVEFORM},
    ("Waveform", "LeadData"): {"LeadID", "LeadOff", "LeadAmplitudeUnitsPerBit", "WaveFormData", *_COUNTS, *_LEAD},
}
Fields = dict[str, str]


class MuseXml(Source):
    name = "muse-xml"

    def keys(self) -> Iterator[str]:
        return (name for name in self.root.names() if name.lower().endswith(".xml"))

    def notes(self) -> list[str]:
        hold = "a dataset of it holds the files' names and the hospital's patient ids"
        return [f"{self.root.url}: {hold}: --pseudonymize KEYFILE replaces both"]

    def read(self, key: str) -> EcgRecord:
        person, waveforms = _parse(self.root.read(key, MAX_BYTES))
        rhythms = [(fields, leads) for fields, leads in waveforms if fields.get("WaveformType", "").lower() == "rhythm"]
        if len(rhythms) != 1:
            raise ReadError("rhythm waveform", f"{len(rhythms)} of {len(waveforms)} waveforms, 1 is read")
        fields, leads = rhythms[0]
        _check(fields, _WAVEFORM)
        if twice := [name for name, count in Counter(lead.get("LeadID", "") for lead in leads).items() if count > 1]:
            raise ReadError("duplicated lead", twice[0][:10])
        signals = _with_limb_leads({name: uv for name, uv in map(_samples, leads) if uv is not None})
        if len({len(uv) for uv in signals.values()}) != 1:
            raise ReadError("sample count", "the leads have different lengths" if signals else "no lead was measured")
        age = clean_age(_number(person, "PatientAge") * YEARS.get(person.get("AgeUnits", "YEARS").upper(), np.nan))
        patient, sex = person.get("PatientID") or None, clean_sex(person.get("Gender"))
        signal, fs_hz, name = np.array(list(signals.values())), _number(fields, "SampleBase"), path_name(key, record_stem(key))
        return EcgRecord(name, signal, fs_hz, tuple(signals), "uV", source=self.name, patient=patient, age=age, sex=sex)


def _parse(data: bytes) -> tuple[Fields, list[tuple[Fields, list[Fields]]]]:
    """The patient's fields, and each waveform's with those of its leads."""
    person: Fields = {}
    waveforms: list[tuple[Fields, list[Fields]]] = []
    path: list[str] = []
    text: list[str] = []

    def start(tag: str, _: object) -> None:
        path.append(tag)
        text.clear()
        if len(path) == 1 and tag != "RestingECG":
            raise ReadError("not MUSE XML", f"its root is {tag[:40]}")
        if len(path) > MAX_DEPTH:
            raise ReadError("XML too deep", f"over {MAX_DEPTH} levels")
        if path[1:] == ["Waveform"]:
            waveforms.append(({}, []))
        elif path[1:] == ["Waveform", "LeadData"]:
            waveforms[-1][1].append({})
        if len(waveforms) > MAX_LEADS or (waveforms and len(waveforms[-1][1]) > MAX_LEADS):
            raise ReadError("signal count", f"over {MAX_LEADS} waveforms or leads")

    def end(tag: str) -> None:
        place = tuple(path[1:-1])
        if tag in _WANTED.get(place, ()):
            fields = person if place[0] == "PatientDemographics" else waveforms[-1][0]
            (waveforms[-1][1][-1] if len(place) == 2 else fields)[tag] = "".join(text).strip()
        path.pop()
        text.clear()

    def refuse(*_: object) -> NoReturn:
        raise ReadError("XML entity", "entities are not read")

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, text.append
    parser.EntityDeclHandler = parser.SkippedEntityHandler = refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise ReadError("malformed XML", str(error)[:80]) from None
    return person, waveforms


def _check(fields: Fields, expected: Fields) -> None:
    if wrong := next((name for name, value in expected.items() if fields.get(name, value).upper() != value), None):
        raise ReadError(wrong, f"{fields[wrong][:20]!r}, only {expected[wrong]} is read")


def _number(fields: Fields, name: str) -> float:
    try:
        return float(fields[name])
    except (KeyError, ValueError):
        return np.nan


def _samples(fields: Fields) -> tuple[str, np.ndarray | None]:
    """A lead's name and its microvolts, None if it was off. Counts and checksum have to hold where the file states them."""
    name = fields.get("LeadID", "")
    _check(fields, _LEAD)
    if "LeadAmplitudeUnits" not in fields:
        raise ReadError("unknown unit", f"lead {name[:10]} states none")
    if not 0 < (uv_per_step := _number(fields, "LeadAmplitudeUnitsPerBit")) <= 1000:
        raise ReadError("gain", f"lead {name[:10]}: {fields.get('LeadAmplitudeUnitsPerBit', 'none')[:20]} uV per step")
    try:
        data = binascii.a2b_base64("".join(fields.get("WaveFormData", "").split()), strict_mode=True)
    except ValueError as error:
        raise ReadError("base64", f"lead {name[:10]}: {error}") from None
    for field, value in zip(_COUNTS, (len(data), len(data) // 2, zlib.crc32(data)), strict=True):
        if field in fields and _number(fields, field) != value:
            raise ReadError(field, f"lead {name[:10]}: {value} found, {fields[field][:20]} stated")
    if len(data) % 2:
        raise ReadError("sample count", f"lead {name[:10]}: an odd number of bytes")
    steps = np.frombuffer(data, "<i2")
    measured = fields.get("LeadOff", "FALSE").upper() == "FALSE" and not (steps == -32768).any()
    return name, steps * uv_per_step if measured else None


def _with_limb_leads(signals: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Einthoven's and Goldberger's equations."""
    if not {"I", "II"} <= set(signals) or len(signals["I"]) != len(signals["II"]):
        return signals
    i, ii = signals["I"], signals["II"]
    return {"III": ii - i, "aVR": -(i + ii) / 2, "aVL": i - ii / 2, "aVF": ii - i / 2} | signals
