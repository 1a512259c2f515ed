"""Records as the Challenge's eight databases have them: their names, lengths and sampling rates, the
styles of their headers, and what is wrong in a few of them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..ecg.record import HEART_AXIS_CODES, LEADS, SCORED_CLASSES, SCP_CODES, SYNTHETIC
from .ptbxl import SCP_OF_CLASS
from .wfdb_files import write_record

FOLDER_RECORDS = 1000
FLAT_SHARE = 0.003  # probability of flat chest leads
INVALID_SHARE = 0.003  # probability of unmeasured samples in a Ningbo record
NOT_MEASURED = -32768  # in WFDB
# Codes of diagnoses that are not scored
UNSCORED = ("428750005", "164873001", "55827005", "164865005", "425623009", "251238007", "6180003")


@dataclass(frozen=True)
class Database:
    """One of the Challenge's databases. `records`: number in the real database; ids run from
    `first` to `last`."""

    prefix: str
    digits: int
    first: int
    last: int
    records: int
    fs_hz: int = 500
    mains_hz: int = 50
    durations_s: tuple[tuple[int, float], ...] = ((10, 1.0),)  # (seconds, share)
    # `# Age: 78` and `16x1+24 1000.0(0)/mV`; else `#Age: 78` and `16+24 1000/mV`
    spaced: bool = False
    date: str = ""
    unit: str = "mV"
    codes: tuple[tuple[str, str], ...] = ()  # (class, code) if it does not use a class's first code


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
    """Damage one record [samples, 12] in place: disconnected electrodes, unmeasured samples. `u`:
    its random numbers."""
    if u[0] < FLAT_SHARE:
        digital[:, 6 + int(u[1] * 6) :] = 0
    if database == "ningbo" and u[2] < INVALID_SHARE:
        start = int(u[3] * len(digital) * 0.99)
        digital[start : start + 1 + int(u[4] * 20), 6 + int(u[5] * 6)] = NOT_MEASURED


def dx_codes(database: str, names: list[str]) -> list[str]:
    """The Dx codes that this database uses for these classes."""
    code_of = {name: codes[0] for name, codes in SCORED_CLASSES} | dict(DATABASES[database].codes)
    if database == "ptb-xl":
        code_of |= {name: SCP_CODES[scp] for name, scp in SCP_OF_CLASS.items()} | HEART_AXIS_CODES
    return [code_of[name] for name in names] or [UNSCORED[0]]  # every header has a diagnosis


def header_comments(
    name: str, age: int, female: bool, codes: list[str], u: np.ndarray
) -> list[str]:
    """Returns Age, Sex, Dx, Rx, Hx, Sx. As in real headers, outside PTB-XL some are unknown and some Dx are
    malformed."""
    years, sex = str(age), "Female" if female else "Male"
    dx = ",".join(codes)
    if name != "ptb-xl":
        if u[6] < 0.25:
            codes = [*codes, UNSCORED[int(u[6] * 4 * len(UNSCORED))]]
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
    """The path of a record's files without their ending. `prefix`: what all names of this seed begin with."""
    facts = DATABASES[database]
    folder = (record - facts.first) // FOLDER_RECORDS + 1
    name = f"{prefix}{facts.prefix}{record:0{facts.digits}d}"
    return f"training/{SYNTHETIC}{database}/g{folder}/{name}"


def write_challenge_record(
    path: Path, database: Database, digital: np.ndarray, comments: list[str]
) -> None:
    """The signal is a MATLAB level 4 file: five int32 (int16 matrix, 12 x n, real, length of the name),
    `val`, samples."""
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
