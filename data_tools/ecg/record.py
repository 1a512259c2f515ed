"""One ECG as stored in an archive: the record, its leads, units and diagnoses.

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
from .constants import ABBREVIATIONS as ABBREVIATIONS
from .constants import LEADS as LEADS
from .constants import MAYBE_MISSING as MAYBE_MISSING
from .constants import SCORED_CLASSES as SCORED_CLASSES
from .constants import SYNTHETIC as SYNTHETIC
from .constants import VENDORS as VENDORS

LEAD_INDEX = {lead.upper(): i for i, lead in enumerate(LEADS)} | {"DI": 0, "DII": 1, "DIII": 2}

# By their numbers in SCP-ECG and MDC
SCP_LEADS = dict(
    zip(("1", "2", "61", "62", "63", "64", "3", "4", "5", "6", "7", "8"), LEADS, strict=True)
)

AGE_UNITS = {
    "years": 1.0,
    "months": 1 / 12,
    "weeks": 7 / 365.25,
    "days": 1 / 365.25,
    "hours": 1 / 8766,
}  # in years
# 45 Y, 45 years, 45,5
AGE_IN_YEARS = re.compile(
    r"\s*(\d{1,3}(?:[.,]\d{1,2})?)\s*(?:y|yrs?|years?)?\s*", re.ASCII | re.IGNORECASE
)
SEXES = {"m": "M", "male": "M", "f": "F", "female": "F", "w": "F"}
# Words by which files say that age or sex is unknown
UNKNOWN_WORDS = MAYBE_MISSING | {"", "un", "u", "o", "other", "unspecified"}
# What spreadsheets and floating-point columns make of a long number: 1.23457E+10
ROUNDED_NUMBER = re.compile(r"\d(?:[.,]\d+)?[eE]\+\d+")
# Before the names of synthetic records and patients, with the seed of `synth`: seeds share nobody
SYNTHETIC_NAME = re.compile(r"syn\d+_", re.ASCII)
MV_PER_UNIT = {"V": 1e3, "mV": 1.0, "uV": 1e-3, "nV": 1e-6}
_UNIT_SPELLINGS = {"v": "V", "mv": "mV", "uv": "uV", "µv": "uV", "μv": "uV", "nv": "nV"}


@dataclass(frozen=True, slots=True)
class Header:
    """The facts about a record that planning needs before its signal is read."""

    name: str
    source: str
    samples: int
    fs_hz: float
    fingerprint: bytes = (
        b""  # hash of the header text (checksums, sizes); part of the dataset's identity
    )
    stamp: bytes = b""  # size and time of its files; a continued run reads changed files again
    patient: str | None = None  # where it is known without the signal


@dataclass(frozen=True, slots=True)
class EcgRecord:
    """`signal` is [leads, samples]; physical value = (signal - baseline) / gain, in `unit`."""

    name: str
    signal: np.ndarray
    fs_hz: float
    leads: tuple[str, ...]
    unit: str = "mV"
    gain: tuple[float, ...] | float = 1.0
    baseline: tuple[float, ...] | float = 0.0
    invalid: int | None = None  # the digital value that stands for "not measured"; NaN always does
    source: str = ""
    patient: str | None = None
    age: float | None = None
    sex: str | None = None
    dx: tuple[str, ...] = ()
    warnings: tuple[tuple[str, str], ...] = ()  # (reason, detail): usable, but noted in rejects.csv
    stored: Any = None  # the StoredCrops of a dataset; then `signal` is empty

    def __post_init__(self) -> None:
        """Validate: a user's source may return anything. An invalid record is refused and the run
        continues."""
        rows = len(self.leads)
        if self.signal.ndim != 2 or self.signal.dtype.kind not in "iuf" or len(self.signal) != rows:
            raise ReadError(
                "signal shape", f"{self.signal.dtype} {self.signal.shape} for {rows} leads"
            )
        scales = (self.gain, self.baseline)
        shapes = [
            (len(scale),) if isinstance(scale, tuple) else np.shape(scale) for scale in scales
        ]
        if any(shape not in ((), (rows,)) for shape in shapes):
            raise ReadError(
                "gain",
                f"{np.size(self.gain)} gains and {np.size(self.baseline)} baselines for {rows} "
                "leads",
            )
        texts = (self.name, self.source, self.patient or "", self.sex or "", *self.leads, *self.dx)
        are_texts = all(isinstance(text, str) for text in texts)
        if not are_texts or not isinstance(self.age, int | float | None):
            raise ReadError(
                "record field",
                "name, source, patient, sex, leads and dx are text, age is Python's int or float",
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
    """The namespace of a source's patient ids. All formats of hospitals' files share one."""
    return VENDORS[0] if source in VENDORS else source


def plain_patient_id(text: str) -> str:
    """A patient's id as a dataset has it, however it was spelt: 7.0 is 7, and Unicode is composed. One
    that is too long, or has other characters than letters, digits, _ and -, ends with a hash: two people
    must not become one."""
    text = re.sub(r"^(\d+)\.0+$", r"\1", unicodedata.normalize("NFC", text.strip()))
    if ROUNDED_NUMBER.fullmatch(text):
        raise ReadError("patient id", f"{text} lacks digits: save ids as text or whole numbers")
    stem = record_stem(f"{text}.")
    return text if stem == text else hashed_name(stem, text)


def known_patient(text: str | None) -> str | None:
    """Returns plain_patient_id(text), or None if the text says that the patient is unknown."""
    text = (text or "").strip()
    return None if not text or text.lower() in MAYBE_MISSING else plain_patient_id(text)


def hashed_name(stem: str, text: str) -> str:
    """A unique name of letters, digits, _ and - for a text that has other characters or is too
    long."""
    digest = sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{stem[:43]}_{digest[:20]}"


def record_stem(key: str, longest: int | None = 64) -> str:
    return (
        re.sub(r"[^A-Za-z0-9_-]+", "_", key.rsplit("/", 1)[-1].rsplit(".", 1)[0])[:longest] or "_"
    )


def real_source(source: str) -> str:
    """The database that a synthetic one imitates; of a real one, itself."""
    return source.removeprefix(SYNTHETIC)


def synthetic_prefix(name: str) -> str:
    """Returns the prefix of a synthetic record's or patient's name; "" for a real one."""
    prefix = SYNTHETIC_NAME.match(name)
    return prefix[0] if prefix else ""


def lead_name(text: str) -> str:
    """Returns the name as spelled in LEADS if it is one of them, else unchanged."""
    return LEADS[LEAD_INDEX[text.upper()]] if text.upper() in LEAD_INDEX else text


def unit_name(text: str) -> str:
    """Normalise a unit: `mv`, `mV`, `MV` -> `mV`. Unknown units are refused; a guess could be wrong
    by a factor of 1,000."""
    try:
        return _UNIT_SPELLINGS[text.strip().lower()]
    except KeyError:
        raise ReadError("unknown unit", repr(text[:20])) from None


@lru_cache(maxsize=64)  # most records of an archive have the same leads
def lead_rows(names: tuple[str, ...]) -> Mapping[int, int]:
    """Map indices in LEADS to rows of the signal; channels that are not ECG leads are ignored."""
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
    """True if a lead ever changes; a constant one was not connected."""
    return bool(np.fmax.reduce(uv, initial=-np.inf) != np.fmin.reduce(uv, initial=np.inf))


def add_limb_leads(signals: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add missing limb leads by Einthoven's and Goldberger's equations if I and II were
    measured."""
    i, ii = (signals.get(lead, np.zeros(0)) for lead in ("I", "II"))
    if len(i) != len(ii) or not len(i) or not (is_changing(i) and is_changing(ii)):
        return signals
    return {"III": ii - i, "aVR": -(i + ii) / 2, "aVL": i - ii / 2, "aVF": ii - i / 2} | signals


def clean_age(value: object) -> float | None:
    """Age in years, or None. Ages over 89 (PTB-XL writes 300) become 90, because they could
    identify a person."""
    age = to_number(value)
    if math.isnan(age) and (match := AGE_IN_YEARS.fullmatch(str(value))):
        age = float(match[1].replace(",", "."))
    return min(age, 90.0) if 0 <= age <= 300 else None


def clean_sex(value: object) -> str | None:
    return SEXES.get(str(value).strip().lower())


def age_and_sex_warnings(
    stated: Mapping[str, object], **read: object
) -> tuple[tuple[str, str], ...]:
    """Returns warnings for a stated age or sex that could not be parsed."""
    warnings = []
    for what, value in read.items():
        text = "" if stated.get(what) is None else str(stated[what]).strip()
        if value is None and text.lower() not in UNKNOWN_WORDS:
            # Longer ones may be a year of birth or a name
            warnings.append(
                (f"{what} not understood", text if len(text) < 4 else "over 3 characters")
            )
    return tuple(warnings)


# SNOMED code -> index in CLASSES
CLASS_OF_CODE = {code: i for i, (_, codes) in enumerate(SCORED_CLASSES) for code in codes}


def parse_pairs(text: str) -> dict[str, str]:
    """`word value, word value, ...` as a dictionary."""
    return dict(pair.strip().split(maxsplit=1) for pair in text.split(","))


# Words in `Dx:` of CPSC 2018's first release, and the codes that these records have today
CPSC_WORDS = parse_pairs("""
Normal 426783006, AF 164889003, I-AVB 270492004, LBBB 164909002, RBBB 59118001, PAC 284470004,
PVC 164884008, STD 429622005, STE 164931005
""")

# PTB-XL's SCP statements that name a scored class (NORM is a verdict, not a rhythm, so it has
# none). PVC has an unscored code, because the Challenge files PTB-XL's PVCs under ventricular
# ectopics
SCP_CODES = parse_pairs("""
AFIB 164889003, AFLT 164890007, CLBBB 164909002, CRBBB 713427006, 1AVB 270492004, IRBBB 713426002,
LAFB 445118002, LPR 164947007, LVOLT 251146004, LNGQT 111975006, IVCD 698252002, SR 426783006,
PAC 284470004, SVARR 63593006, PACE 10370003, PVC 164884008, QWAVE 164917005, SARRH 427393009,
SBRAD 426177001, STACH 427084000, NT_ 164934002, NDT 164934002, INVT 59931005
""")
HEART_AXIS_CODES = {"LAD": "39732003", "ALAD": "39732003", "RAD": "47665007", "ARAD": "47665007"}


def parse_dx(text: str) -> tuple[str, ...]:
    """The fields of `Dx:`, with CPSC's words replaced by codes."""
    fields = [field.strip() for field in text.split(",") if field.strip()]
    return tuple(CPSC_WORDS.get(field, field) for field in fields)


def snomed_codes_and_word_count(dx: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Returns (distinct SNOMED codes in order, number of other words): free text is counted, never
    copied."""
    codes = [word for word in dx if word.isascii() and word.isdigit() and len(word) <= 18]
    return tuple(dict.fromkeys(codes)), len(dx) - len(codes)


def class_row(dx: tuple[str, ...]) -> list[bool]:
    """26 booleans: a class is true if any of its equivalent codes is present. Unscored codes are
    ignored."""
    present = {CLASS_OF_CODE.get(code) for code in dx}
    return [i in present for i in range(len(SCORED_CLASSES))]
