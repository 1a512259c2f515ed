"""Decodes HL7's Annotated ECG (aECG, the FDA's format), with one ECG per file. The first sequence set of a
rhythm is read, never a derived beat.

A sample is origin + digits x scale, in the units of each lead. Apart from the signal, only the
subject's id, sex and reported age are read: no names, birth dates, comments or annotations.
"""

from xml.etree.ElementTree import Element

import numpy as np

from ...ecg.record import AGE_UNITS, LEADS, MV_PER_UNIT, unit_name
from ...io.errors import ReadError
from ...io.spreadsheet import to_number
from .base import MAX_XML_BYTES, DecodedEcg, FileFormat, age_in_years, parse_xml, root_tag

SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
YEARS_PER_UCUM_UNIT = dict(zip(("a", "mo", "wk", "d", "h"), AGE_UNITS.values(), strict=True))
AGE_CODES = ("21612-7", "30525-0")  # LOINC codes of "Age - Reported" and "Age"
# {code: lead}. Leads that are derived from EASI leads have other codes, such as MDC_ECG_LEAD_dI, and are not read
LEAD_OF_CODE = {f"MDC_ECG_LEAD_{name}": lead for lead in LEADS for name in (lead, lead.upper())}
NOT_MEASURED = -32768  # some devices write this value for samples that were not measured
_SUBJECT_PATH = "componentOf/timepointEvent/componentOf/subjectAssignment/subject/trialSubject"
_SEX_TAG = "administrativeGenderCode"
_SKIPPED_ELEMENTS = frozenset(
    (
        "derivation",
        "subjectOf",
        "author",
        "secondaryPerformer",
        "definition",
        "location",
        "clinicalTrial",
    )
)


def decode(data: bytes) -> DecodedEcg:
    root = parse_xml(data, _SKIPPED_ELEMENTS)
    if root.tag != "AnnotatedECG":
        raise ReadError("unknown format", f"not aECG: its root element is {root.tag[:40]}")
    series = [
        element
        for element in root.iterfind("component/series")
        if _attribute(element, "code", "code") != "REPRESENTATIVE_BEAT"
    ]
    sets = [element for rhythm in series for element in rhythm.iterfind("component/sequenceSet")]
    if not sets:
        raise ReadError("rhythm waveform", f"{len(series)} rhythm series, none with a sequence set")
    signals, rates = {}, set()
    for sequence in sets[0].iterfind("component/sequence"):
        code = _attribute(sequence, "code", "code")
        if code.startswith("TIME_"):
            rates.add(_rate_hz(sequence))
        elif lead := LEAD_OF_CODE.get(code):
            if lead in signals:
                raise ReadError("duplicated lead", lead)
            signals[lead] = _microvolts(sequence, lead)
    if len(rates) != 1:
        raise ReadError(
            "sampling rate", f"{len(rates)} different rates in one sequence set, exactly 1 is read"
        )
    notes = []
    if len(sets) > 1:
        notes.append(("further waveforms", f"the first of {len(sets)} sequence sets was read"))
    patient = _attribute(root, f"{_SUBJECT_PATH}/id", "extension")
    sex = _attribute(root, f"{_SUBJECT_PATH}/*/{_SEX_TAG}", "code")
    return DecodedEcg(signals, rates.pop(), patient or None, _age(root), sex, tuple(notes))


FORMAT = FileFormat(lambda head, name: root_tag(head) == "AnnotatedECG", decode, MAX_XML_BYTES)


def _attribute(element: Element, path: str, name: str) -> str:
    child = element.find(path)
    return "" if child is None else child.get(name, "").strip()


def _value_and_unit(sequence: Element, tag: str) -> tuple[float, str]:
    """Return (value, unit) of an element; the value is NaN if it is not a number."""
    return to_number(_attribute(sequence, f"value/{tag}", "value")), _attribute(
        sequence, f"value/{tag}", "unit"
    )


def _rate_hz(sequence: Element) -> float:
    step, unit = _value_and_unit(sequence, "increment")
    if unit not in SECONDS_PER_UNIT or not 1e-9 < step < np.inf:
        raise ReadError(
            "sampling rate",
            f"time increment of {step:g} {unit[:10] or 'without a unit'}: only a positive one in s, ms or us is read",
        )
    return round(1 / (step * SECONDS_PER_UNIT[unit]), 6)


def _microvolts(sequence: Element, lead: str) -> np.ndarray:
    origin, origin_unit = _value_and_unit(sequence, "origin")
    scale, unit = _value_and_unit(sequence, "scale")
    if np.isfinite(origin) and scale > 0:
        step, offset = (
            scale * _microvolts_per_unit(unit),
            origin * _microvolts_per_unit(origin_unit) if origin else 0.0,
        )
        if step <= 1000 and abs(offset) <= 1e6:
            digits = _parse_integers(sequence.findtext("value/digits", ""), lead)
            uv = digits * step + offset
            uv[digits == NOT_MEASURED] = np.nan
            return uv
    raise ReadError(
        "gain",
        f"lead {lead}: scale {scale:g} {unit[:10]}, origin {origin:g} {origin_unit[:10]}: only a scale over 0 "
        "and up to 1000 uV and an origin within 1 V are read",
    )


def _microvolts_per_unit(unit: str) -> float:
    return MV_PER_UNIT[unit_name(unit)] * 1000


def _parse_integers(text: str, lead: str) -> np.ndarray:
    """Parse whole numbers. A lone `-`, which numpy reads as 0, and `5-3`, which it reads as two numbers, are
    refused."""
    data = f" {text} ".encode()
    letters = np.frombuffer(data, np.uint8)
    signs = np.flatnonzero(letters == ord("-"))
    lone = (letters[signs - 1] > ord(" ")) | (letters[signs + 1] < ord("0"))
    if data.translate(None, b"0123456789- \n\r\t") or lone.any():
        raise ReadError("sample data", f"lead {lead}: a sample is not a whole number")
    digits = np.fromstring(text.strip(), np.int64, sep=" ")
    if np.abs(digits).max(initial=0) > 2**31:
        raise ReadError("sample data", f"lead {lead}: a sample does not fit in 32 bits")
    return digits


def _age(root: Element) -> float | str | None:
    age: float | str | None = None
    for stated in root.iterfind("controlVariable/relatedObservation"):
        if _attribute(stated, "code", "code") in AGE_CODES:
            number, unit = (_attribute(stated, "value", name) for name in ("value", "unit"))
            age = age_in_years(number, unit, YEARS_PER_UCUM_UNIT)
            if isinstance(age, float) and age >= 0:
                break
    return age
