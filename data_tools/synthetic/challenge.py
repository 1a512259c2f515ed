"""Write records like those of the Challenge's eight databases: with the same names, lengths, sampling
rates and header styles, and with the faults that a few real records have."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..ecg.record import HEART_AXIS_CODES, LEADS, SCORED_CLASSES, SCP_CODES, SYNTHETIC
from .ptbxl import SCP_OF_CLASS
from .wfdb_files import write_record

RECORDS_PER_FOLDER = 1000
FLAT_SHARE = 0.003  # probability that a record has flat chest leads
INVALID_SHARE = 0.003  # probability that a record of Ningbo has samples that were not measured
NOT_MEASURED = -32768  # WFDB's value for a sample that was not measured
# SNOMED CT codes of diagnoses that the Challenge does not score
UNSCORED_CODES = (
    "428750005",
    "164873001",
    "55827005",
    "164865005",
    "425623009",
    "251238007",
    "6180003",
)


@dataclass(frozen=True)
class Database:
    """One of the Challenge's databases. Its record ids run from `first` to `last`; the real database has
    `records` of them."""

    prefix: str
    digits: int
    first: int
    last: int
    records: int
    fs_hz: int = 500
    mains_hz: int = 50
    durations_s: tuple[tuple[int, float], ...] = ((10, 1.0),)  # (seconds, share of records)
    # The style of headers. If true, `# Age: 78` and `16x1+24 1000.0(0)/mV`, else `#Age: 78` and
    # `16+24 1000/mV`
    spaced: bool = False
    date: str = ""
    unit: str = "mV"
    # (class, code) of each class for which the database does not use the first code in SCORED_CLASSES
    codes: tuple[tuple[str, str], ...] = ()


# (seconds, share of records) of each length that a database has
_CPSC_S = ((6, 0.04), (10, 0.47), (12, 0.10), (15, 0.14), (20, 0.10), (30, 0.10), (60, 0.05))
_GEORGIA_S = ((10, 0.96), (5, 0.04))
_RBBB, _LBBB, _PAC = ("RBBB", "59118001"), ("LBBB", "164909002"), ("PAC", "63593006")
_OTHER_PVC, _VPB = ("PVC", "164884008"), ("PVC", "17338001")
_DATES = (" 15-May-2020 15:35:30", " 05-May-2020 14:50:55", " 25-Mar-2021 16:25:18")
DATABASES = {
    "cpsc_2018": Database(
        "A", 4, 1, 6877, 6877, durations_s=_CPSC_S, spaced=True, codes=(_RBBB, _LBBB, _OTHER_PVC)
    ),
    "cpsc_2018_extra": Database(
        "Q", 4, 1, 3581, 3453, durations_s=_CPSC_S, date=_DATES[0], codes=(_RBBB, _LBBB, _PAC)
    ),
    "st_petersburg_incart": Database("I", 4, 1, 75, 74, 257, durations_s=((60, 1.0),), spaced=True),
    "ptb": Database("S", 4, 1, 549, 516, 1000, durations_s=((30, 1.0),), spaced=True),
    "ptb-xl": Database("HR", 5, 1, 99_999, 21_837, spaced=True, unit="mv"),
    "georgia": Database(
        "E", 5, 1, 10_344, 10_344, 500, 60, _GEORGIA_S, date=_DATES[1], codes=(_RBBB, _LBBB, _VPB)
    ),
    "chapman_shaoxing": Database("JS", 5, 1, 10_646, 10_247, codes=(_RBBB, _VPB)),
    "ningbo": Database("JS", 5, 10_647, 45_551, 34_905, date=_DATES[2]),
}


def damage_record(digital: np.ndarray, database: str, u: np.ndarray) -> None:
    """Damage one record, [samples, 12 leads], in place, if its random numbers `u` say so, as they do for a few
    records: it gets flat chest leads, or samples that were not measured."""
    if u[0] < FLAT_SHARE:
        digital[:, 6 + int(u[1] * 6) :] = 0
    if database == "ningbo" and u[2] < INVALID_SHARE:
        start = int(u[3] * len(digital) * 0.99)
        digital[start : start + 1 + int(u[4] * 20), 6 + int(u[5] * 6)] = NOT_MEASURED


def dx_codes(database: str, names: list[str]) -> list[str]:
    """Return the SNOMED CT codes by which the headers of this database name these classes."""
    code_of = {name: codes[0] for name, codes in SCORED_CLASSES} | dict(DATABASES[database].codes)
    if database == "ptb-xl":
        code_of |= {name: SCP_CODES[scp] for name, scp in SCP_OF_CLASS.items()} | HEART_AXIS_CODES
    codes = [code_of[name] for name in names]
    return codes or [UNSCORED_CODES[0]]  # every header states some diagnosis


def header_comments(
    name: str, age: int, female: bool, codes: list[str], u: np.ndarray
) -> list[str]:
    """Returns the header lines Age, Sex, Dx, Rx, Hx and Sx. As in real headers, outside PTB-XL a few ages
    and sexes are unknown, and a few Dx lines are malformed."""
    years, sex = str(age), "Female" if female else "Male"
    dx = ",".join(codes)
    if name != "ptb-xl":
        if u[6] < 0.25:
            codes = [*codes, UNSCORED_CODES[int(u[6] * 4 * len(UNSCORED_CODES))]]
        years = "NaN" if u[7] < 0.02 else years
        sex = ("NaN" if u[8] < 0.005 else "Unknown") if u[8] < 0.01 else sex
        codes = [*codes, codes[-1]] if u[9] < 0.005 else codes
        dx = (",," if u[10] < 0.003 else ",").join(codes) + ("," if u[10] > 0.997 else "")
    rows = [f"Age: {years}", f"Sex: {sex}", f"Dx: {dx}", "Rx: Unknown", "Hx: Unknown"]
    if name != "georgia" or u[11] >= 0.5:
        rows.append("Sx: Unknown")
    mark = "# " if DATABASES[name].spaced else "#"
    return [mark + row for row in rows]


def record_path(database: str, prefix: str, record: int) -> str:
    """Return the path of a record's two files without suffix. `prefix`: what all names of this seed
    begin with, such as syn1_."""
    facts = DATABASES[database]
    folder = (record - facts.first) // RECORDS_PER_FOLDER + 1
    name = f"{prefix}{facts.prefix}{record:0{facts.digits}d}"
    return f"training/{SYNTHETIC}{database}/g{folder}/{name}"


def write_challenge_record(
    path: Path, database: Database, digital: np.ndarray, comments: list[str]
) -> None:
    """Write the header and the signal of a record. The signal is a MATLAB level 4 file: five int32 (type
    int16, 12 rows, columns, no imaginary part, length of the name), the name `val`, and the samples."""
    scale = "x1+24 1000.0(0)" if database.spaced else "+24 1000"
    first_bytes = np.array([30, 12, len(digital), 0, 4], "<i4").tobytes() + b"val\0"
    write_record(
        path,
        digital,
        f"12 {database.fs_hz} {len(digital)}{database.date}",
        f".mat 16{scale}/{database.unit}",
        LEADS,
        np.int16,
        comments,
        first_bytes,
    )
