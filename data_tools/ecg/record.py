"""Define an ECG as an archive stores it: the record, and the names of its leads, units and diagnoses.

All sources return `EcgRecord`s; the later steps (prepare, build, verify, plots) see nothing else of
an archive.
"""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np

from ..io.errors import ReadError
from ..io.spreadsheet import to_number
from .constants import CLASS_ABBREVIATIONS as CLASS_ABBREVIATIONS
from .constants import LEADS as LEADS
from .constants import MAYBE_MISSING as MAYBE_MISSING
from .constants import SCORED_CLASSES as SCORED_CLASSES
from .constants import SYNTHETIC as SYNTHETIC
from .constants import VENDORS as VENDORS

LEAD_INDEX = {lead.upper(): i for i, lead in enumerate(LEADS)} | {"DI": 0, "DII": 1, "DIII": 2}

# The lead for each lead number of SCP-ECG and MDC
SCP_LEADS = dict(
    zip(("1", "2", "61", "62", "63", "64", "3", "4", "5", "6", "7", "8"), LEADS, strict=True)
)

# How many years one unit of age is
AGE_UNITS = {
    "years": 1.0,
    "months": 1 / 12,
    "weeks": 7 / 365.25,
    "days": 1 / 365.25,
    "hours": 1 / 8766,
}
# An age in years, such as 45 Y, 45 years or 45,5
AGE_IN_YEARS = re.compile(
    r"\s*(\d{1,3}(?:[.,]\d{1,2})?)\s*(?:y|yrs?|years?)?\s*", re.ASCII | re.IGNORECASE
)
SEXES = {"m": "M", "male": "M", "f": "F", "female": "F", "w": "F"}
# Words, in lower case, by which files say that age or sex is unknown
UNKNOWN_WORDS = MAYBE_MISSING | {"", "un", "u", "o", "other", "unspecified"}
# A long number as spreadsheets and floating-point columns write it, rounded: 1.23457E+10
ROUNDED_NUMBER = re.compile(r"\d(?:[.,]\d+)?[eE]\+\d+")
# Prefix of the names of synthetic records and patients. It includes the seed given to `synth`, so that
# archives of two seeds have no names in common
SYNTHETIC_NAME_PREFIX = re.compile(r"syn\d+_", re.ASCII)
MV_PER_UNIT = {"V": 1e3, "mV": 1.0, "uV": 1e-3, "nV": 1e-6}
_UNIT_SPELLINGS = {"v": "V", "mv": "mV", "uv": "uV", "µv": "uV", "μv": "uV", "nv": "nV"}


@dataclass(frozen=True, slots=True)
class Header:
    """What planning needs to know about a record before its signal is read."""

    name: str
    source: str
    samples: int
    fs_hz: float
    # Hash of the header text, with its checksums and sizes. It is part of what identifies a dataset
    fingerprint: bytes = b""
    # Size and time of the record's files, by which a continued run finds the files that have changed
    stamp: bytes = b""
    # Id of the patient. None if it is unknown, or known only when the signal is read
    patient: str | None = None


@dataclass(frozen=True, slots=True)
class EcgRecord:
    """An ECG as its source stores it. `signal` is [leads, samples]; the physical value, in `unit`, is
    (signal - baseline) / gain."""

    name: str
    signal: np.ndarray
    fs_hz: float
    leads: tuple[str, ...]
    unit: str = "mV"
    gain: tuple[float, ...] | float = 1.0
    baseline: tuple[float, ...] | float = 0.0
    # The value of `signal` that stands for "not measured". NaN always does
    invalid: int | None = None
    source: str = ""
    patient: str | None = None
    age: float | None = None
    sex: str | None = None
    dx: tuple[str, ...] = ()
    # (reason, detail) of each problem that leaves the record usable. rejects.csv lists them
    warnings: tuple[tuple[str, str], ...] = ()
    # If the record comes from a dataset: its StoredCrops. `signal` is then empty
    stored: Any = None

    def __post_init__(self) -> None:
        """Check the fields, which a source class written by a user may fill with anything. A ReadError
        makes the run refuse this record and continue."""
        rows = len(self.leads)
        if self.signal.ndim != 2 or self.signal.dtype.kind not in "iuf" or len(self.signal) != rows:
            raise ReadError(
                "signal shape",
                f"{self.signal.dtype} {self.signal.shape} for {rows} leads: numbers [leads, samples] are needed",
            )
        scales = (self.gain, self.baseline)
        shapes = [
            (len(scale),) if isinstance(scale, tuple) else np.shape(scale) for scale in scales
        ]
        if any(shape not in ((), (rows,)) for shape in shapes):
            raise ReadError(
                "gain",
                f"{np.size(self.gain)} gains and {np.size(self.baseline)} baselines for {rows} "
                "leads: give one of each for all leads, or a tuple with one for each lead",
            )
        texts = (self.name, self.source, self.patient or "", self.sex or "", *self.leads, *self.dx)
        are_texts = all(isinstance(text, str) for text in texts)
        if not are_texts or not isinstance(self.age, int | float | None):
            raise ReadError(
                "record field",
                "name, source, patient, sex, leads and dx must be text, age a Python int or float",
            )
        dx, others = snomed_codes_and_word_count(self.dx)
        object.__setattr__(self, "dx", dx)
        if others:
            warning = (
                "diagnosis without a code",
                f"{others} not copied: `dx` holds SNOMED codes, which are digits",
            )
            object.__setattr__(self, "warnings", (*self.warnings, warning))


def patient_source(source: str) -> str:
    """Return the namespace of a source's patient ids. It is the source itself, but all formats of hospitals'
    files share one namespace."""
    return VENDORS[0] if source in VENDORS else source


def plain_patient_id(text: str) -> str:
    """Return a patient's id in the form that a dataset stores. Different spellings of an id give the same
    result: 7.0 becomes 7, and Unicode is composed (NFC). An id that is too long, or has characters other
    than letters, digits, _ and -, is shortened and gets a hash at its end, so that the ids of two people
    stay different."""
    text = re.sub(r"^(\d+)\.0+$", r"\1", unicodedata.normalize("NFC", text.strip()))
    if ROUNDED_NUMBER.fullmatch(text):
        raise ReadError(
            "patient id",
            f"{text} lacks digits: save ids as text or whole numbers, not as rounded ones",
        )
    stem = record_stem(f"{text}.")
    return text if stem == text else hashed_name(stem, text)


def known_patient(text: str | None) -> str | None:
    """Returns plain_patient_id(text), or None if the text says that the patient is unknown."""
    text = (text or "").strip()
    return None if not text or text.lower() in MAYBE_MISSING else plain_patient_id(text)


def hashed_name(stem: str, text: str) -> str:
    """Return the beginning of `stem`, followed by a hash of `text`: a name that is short and unique to
    this text. `stem`: the text with other characters than letters, digits, _ and - replaced."""
    digest = sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{stem[:43]}_{digest[:20]}"


def record_stem(key: str, longest: int | None = 64) -> str:
    """Return the file name of a path without folders and suffix, with _ for characters other than
    letters, digits, _ and -."""
    return (
        re.sub(r"[^A-Za-z0-9_-]+", "_", key.rsplit("/", 1)[-1].rsplit(".", 1)[0])[:longest] or "_"
    )


def real_source(source: str) -> str:
    """Return the name of the real database that a synthetic one imitates; a real name is unchanged."""
    return source.removeprefix(SYNTHETIC)


def synthetic_prefix(name: str) -> str:
    """Returns the prefix, such as syn1_, of the name of a synthetic record or patient; "" for a real name."""
    prefix = SYNTHETIC_NAME_PREFIX.match(name)
    return prefix[0] if prefix else ""


def lead_name(text: str) -> str:
    """Returns the lead's name as LEADS spells it; a name that is not in LEADS is unchanged."""
    return LEADS[LEAD_INDEX[text.upper()]] if text.upper() in LEAD_INDEX else text


def unit_name(text: str) -> str:
    """Return the standard spelling of a unit: `mV` for `mv`, `mV` and `MV`. An unknown unit is a
    ReadError, because a guess could be wrong by a factor of 1,000."""
    try:
        return _UNIT_SPELLINGS[text.strip().lower()]
    except KeyError:
        raise ReadError("unknown unit", repr(text[:20])) from None


@lru_cache(maxsize=64)  # cached, because most records of an archive have the same leads
def lead_rows(names: tuple[str, ...]) -> Mapping[int, int]:
    """Return the row of the signal for each index in LEADS that was recorded. Channels that are not ECG
    leads are ignored."""
    rows: dict[int, int] = {}
    for row, name in enumerate(names):
        lead = LEAD_INDEX.get(name.strip().upper())
        if lead is None:
            continue
        if lead in rows:
            raise ReadError("duplicated lead", LEADS[lead])
        rows[lead] = row
    if not rows:
        raise ReadError("no known lead", ", ".join(names)[:80])
    return rows


def is_changing(uv: np.ndarray) -> bool:
    """True if the samples of a lead are not all equal. A lead that never changes was not connected."""
    return bool(np.fmax.reduce(uv, initial=-np.inf) != np.fmin.reduce(uv, initial=np.inf))


def add_limb_leads(signals: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the leads with missing limb leads added, derived from I and II by Einthoven's and
    Goldberger's equations. Without a measured I and II, nothing is added."""
    i, ii = (signals.get(lead, np.zeros(0)) for lead in ("I", "II"))
    if len(i) != len(ii) or not len(i) or not (is_changing(i) and is_changing(ii)):
        return signals
    return {"III": ii - i, "aVR": -(i + ii) / 2, "aVL": i - ii / 2, "aVF": ii - i / 2} | signals


def clean_age(value: object) -> float | None:
    """Return an age in years, or None if the value is not an age. Ages over 89 (PTB-XL writes 300)
    become 90, because they could identify a person."""
    age = to_number(value)
    if math.isnan(age) and (match := AGE_IN_YEARS.fullmatch(str(value))):
        age = float(match[1].replace(",", "."))
    return min(age, 90.0) if 0 <= age <= 300 else None


def clean_sex(value: object) -> str | None:
    """Return M or F, or None if the value says neither."""
    return SEXES.get(str(value).strip().lower())


def age_and_sex_warnings(
    stated: Mapping[str, object], **read: object
) -> tuple[tuple[str, str], ...]:
    """Returns a warning (reason, detail) for an age or sex that the file states, but that could not be
    parsed. `stated`: the values in the file; `read`: what was parsed from them, None if nothing."""
    warnings = []
    for what, value in read.items():
        text = "" if stated.get(what) is None else str(stated[what]).strip()
        if value is None and text.lower() not in UNKNOWN_WORDS:
            # A text of over 3 characters may be a year of birth or a name, so it is not copied
            warnings.append(
                (f"{what} not understood", text if len(text) < 4 else "over 3 characters")
            )
    return tuple(warnings)


# Index in SCORED_CLASSES of each SNOMED CT code that is scored
CLASS_OF_CODE = {code: i for i, (_, codes) in enumerate(SCORED_CLASSES) for code in codes}


def parse_pairs(text: str) -> dict[str, str]:
    """Return {word: value} for a text `word value, word value, ...`."""
    return dict(pair.strip().split(maxsplit=1) for pair in text.split(","))


# The first release of CPSC 2018 has words in `Dx:`. These are the SNOMED CT codes that the same records
# have today
CODE_OF_CPSC_WORD = parse_pairs("""
Normal 426783006, AF 164889003, I-AVB 270492004, LBBB 164909002, RBBB 59118001, PAC 284470004,
PVC 164884008, STD 429622005, STE 164931005
""")

# SNOMED CT code of each of PTB-XL's SCP statements that names a scored class. NORM is not among them,
# because it is a verdict, not a rhythm. PVC has an unscored code, because the Challenge files
# PTB-XL's PVCs under ventricular ectopics
SCP_CODES = parse_pairs("""
AFIB 164889003, AFLT 164890007, CLBBB 164909002, CRBBB 713427006, 1AVB 270492004, IRBBB 713426002,
LAFB 445118002, LPR 164947007, LVOLT 251146004, LNGQT 111975006, IVCD 698252002, SR 426783006,
PAC 284470004, SVARR 63593006, PACE 10370003, PVC 164884008, QWAVE 164917005, SARRH 427393009,
SBRAD 426177001, STACH 427084000, NT_ 164934002, NDT 164934002, INVT 59931005
""")
HEART_AXIS_CODES = {"LAD": "39732003", "ALAD": "39732003", "RAD": "47665007", "ARAD": "47665007"}


def parse_dx(text: str) -> tuple[str, ...]:
    """Return the comma-separated fields of a `Dx:` line, with CPSC's words replaced by codes."""
    fields = [field.strip() for field in text.split(",") if field.strip()]
    return tuple(CODE_OF_CPSC_WORD.get(field, field) for field in fields)


def snomed_codes_and_word_count(dx: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Returns (the distinct SNOMED CT codes in their order, how many entries are no codes). Free text is
    only counted, never copied."""
    codes = [word for word in dx if word.isascii() and word.isdigit() and len(word) <= 18]
    return tuple(dict.fromkeys(codes)), len(dx) - len(codes)


def class_row(dx: tuple[str, ...]) -> list[bool]:
    """Return a boolean for each of the 26 scored classes: true if any of the class's codes is present.
    Unscored codes are ignored."""
    present = {CLASS_OF_CODE.get(code) for code in dx}
    return [i in present for i in range(len(SCORED_CLASSES))]
