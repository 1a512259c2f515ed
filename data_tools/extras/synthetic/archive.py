"""Archives of synthetic patients in the layouts of real archives, so that every tool can be tried
without real data.

plan (which records, in blocks of up to 64 patients) -> for each block: draw patients, simulate
their sessions (synthetic.ecg), damage a few records as in real archives, write header + signal ->
ptbxl_database.csv, scp_statements.csv, SYNTHETIC.txt

`physionet2021` is the Challenge's training set: training/<database>/g<k>/<record>.hea + .mat, with
the lengths, sampling rates, comment styles and quirks of its eight databases. `ptbxl` is PTB-XL's
own release: records500/<k>/ <id>_hr.hea + .dat. Databases are called synthetic-..., and the names
of records and patients begin with syn<seed>_, so that nothing made from them can pass for real, and
two seeds share nobody. For the same seed, PTB-XL recordings have the same samples in both layouts.
The bytes depend only on the arguments, not on `workers` (on another CPU, float32 may change a
sample by 1 uV).

    omnilead synth OUT --patients 100
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from ...ecg.record import (
    ABBREVIATIONS,
    CLASSES,
    HEART_AXIS_CODES,
    LEADS,
    SCP_CODES,
    SYNTHETIC,
    pairs,
)
from ...io import cluster
from ...io.errors import DataError
from ...io.spreadsheet import as_csv
from .ecg import simulate
from .patients import BLOCK, Findings, SyntheticPatients, draw_patients

LAYOUTS = ("physionet2021", "ptbxl")
# In version 1, two sessions were less alike than real ones, and all patients had two; in version 2,
# databases, records and patients had the names of real ones
VERSION = 3
FOLDER_RECORDS = 1000
TWO_SESSIONS = 0.11  # share of PTB-XL's patients, as in the real PTB-XL
# Share of the other patients, for each of the two databases that do not have 500 Hz
SMALL_SHARE = 0.01
FLAT = 0.003  # probability of flat chest leads
INVALID = 0.003  # probability of unmeasured samples in a Ningbo record
# Probability that a finding is missed, and, per record, that a wrong one is added
LABEL_FLIP = 0.03
# Last part of a generator's key; continues the numbers in synthetic.patients
CLINIC = 4
LENGTH = 5
READER = 6
TWICE = 8
_NEVER = ("BBB", "LPR")  # two classes that the signal model does not produce


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
_UNSCORED_PVC, _VPB = ("PVC", "164884008"), ("PVC", "17338001")
_DATES = (" 15-May-2020 15:35:30", " 05-May-2020 14:50:55", " 25-Mar-2021 16:25:18")
DATABASES = {
    "cpsc_2018": Database(
        "A", 4, 1, 6877, 6877, durations_s=_CPSC_S, spaced=True, codes=(_RBBB, _LBBB, _UNSCORED_PVC)
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
_UNSCORED = ("428750005", "164873001", "55827005", "164865005", "425623009", "251238007", "6180003")
# PTB-XL's statement for each class; two classes have none, so its patients never have them
_SCP = pairs("""
AF AFIB, AFL AFLT, LBBB CLBBB, RBBB CRBBB, IAVB 1AVB, IRBBB IRBBB, LAnFB LAFB, LQRSV LVOLT,
LQT LNGQT, NSIVCB IVCD, NSR SR, PAC PAC, PR PACE, PVC PVC, QAb QWAVE, SA SARRH, SB SBRAD,
STach STACH, TAb NT_, TInv INVT
""")
# for scp_statements.csv: kind, superclass and subclass of each statement
_STATEMENTS = """
NORM diagnostic NORM NORM, CLBBB diagnostic CD CLBBB, CRBBB diagnostic CD CRBBB,
IRBBB diagnostic CD IRBBB, LAFB diagnostic CD LAFB/LPFB, IVCD diagnostic CD IVCD,
1AVB diagnostic CD _AVB, LNGQT diagnostic+form STTC STTC, NST_ diagnostic+form STTC NST_,
LVOLT form, QWAVE form, NT_ form, INVT form, PAC form, PVC form, SR rhythm, AFIB rhythm,
AFLT rhythm, STACH rhythm, SARRH rhythm, SBRAD rhythm, PACE rhythm
"""
# Written without a likelihood
_RHYTHM_SCP = {"AFIB", "AFLT", "SR", "PACE", "SARRH", "SBRAD", "STACH", "PAC", "PVC"}
_NOT_IN_PTBXL = ("Brady", "PRWP")

_CSV_HEADER = """
ecg_id patient_id age sex height weight nurse site device recording_date report scp_codes
heart_axis infarction_stadium1 infarction_stadium2 validated_by second_opinion
initial_autogenerated_report validated_by_human baseline_drift static_noise burst_noise
electrodes_problems extra_beats pacemaker strat_fold filename_lr filename_hr
"""
CSV_COLUMNS = tuple(_CSV_HEADER.split())
_REPORT = pairs("""
NSR sinusrhythmus, SB sinusbradykardie, STach sinustachykardie, SA sinus arrhythmie,
AF vorhofflimmern, AFL vorhofflattern, LBBB linksschenkelblock, RBBB rechtsschenkelblock,
PR schrittmacher-ekg, LAD linkstyp, RAD rechtstyp, LQRSV periphere niederspannung
""")


@dataclass(frozen=True)
class Block:
    """Up to BLOCK patients of one database and record length, with all their sessions: one task for
    a worker."""

    database: str
    key: tuple[int, ...]
    samples: int
    first_patient: int
    ids: list[dict[int, int]]  # for each session: {patient of the block: record}


def allocate(patients: int) -> dict[str, int]:
    """Distribute `patients` with one recording each over the seven databases other than PTB-XL, in
    the real proportions."""
    share = max(1, round(SMALL_SHARE * patients)) if patients >= 50 else 0
    small = {name: min(DATABASES[name].last, share) for name in ("st_petersburg_incart", "ptb")}
    large = {
        name: one.records
        for name, one in DATABASES.items()
        if name not in small and name != "ptb-xl"
    }
    rest, total = patients - sum(small.values()), sum(large.values())
    if rest > total:
        raise DataError(
            f"patients={patients} is too large: outside PTB-XL there are "
            f"{total + patients - rest} ids"
        )
    shares = {name: rest * records / total for name, records in large.items()}
    counts = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(large, key=lambda name: counts[name] - shares[name])
    for name in by_remainder[: rest - sum(counts.values())]:
        counts[name] += 1
    return counts | small


def plan(
    patients: int, two_sessions: float = TWO_SESSIONS, seed: int = 0, layout: str = "physionet2021"
) -> list[Block]:
    """Plan which records to make. With more `patients`, earlier records stay the same, except
    for the ids of the last block; a larger share of `two_sessions` only adds second sessions."""
    for name, value, least in (("patients", patients, 1), ("seed", seed, 0)):
        if value < least:
            raise DataError(f"{name}={value}: must be at least {least}")
    if not 0 <= two_sessions <= 1:
        raise DataError(f"two_sessions={two_sessions}: must be a share from 0 to 1")
    if layout not in LAYOUTS:
        raise DataError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    counts = {"ptb-xl": patients}
    if layout == "physionet2021":
        counts |= allocate(patients)
    blocks: list[Block] = []
    for number, (name, database) in enumerate(DATABASES.items()):
        share = two_sessions if name == "ptb-xl" else 0.0
        planned = _blocks(name, (seed, number), counts.get(name, 0), share)
        used = [record for ids in planned[-1].ids for record in ids.values()] if planned else [0]
        if max(used) > database.last:
            raise DataError(
                f"patients={patients}, two_sessions={two_sessions:g}: PTB-XL's five-digit ids end "
                f"at {database.last}"
            )
        blocks += planned
    return blocks


def _blocks(name: str, key: tuple[int, int], patients: int, two_sessions: float) -> list[Block]:
    """The blocks of a database. The ids of second sessions follow those of their block."""
    database = DATABASES[name]
    seconds, share = zip(*database.durations_s, strict=True)
    drawn = np.random.default_rng([*key, LENGTH]).choice(len(seconds), patients, p=share)
    blocks = []
    again = 0  # number of second sessions so far
    for length, dur_s in enumerate(seconds):
        records = np.flatnonzero(drawn == length).tolist()
        for first in range(0, len(records), BLOCK):
            chosen = records[first : first + BLOCK]
            block_key = (*key, length, first // BLOCK)
            start = database.first + again
            ids = [{i: start + record for i, record in enumerate(chosen)}]
            if name == "ptb-xl":
                chance = np.random.default_rng([*block_key, TWICE]).random(BLOCK)
                twice = np.flatnonzero(chance[: len(chosen)] < two_sessions).tolist()
                after = start + chosen[-1] + 1
                ids.append({i: after + n for n, i in enumerate(twice)})
                again += len(twice)
            blocks.append(Block(name, block_key, dur_s * database.fs_hz, first, ids))
    return blocks


def damage(digital: np.ndarray, database: str, u: np.ndarray) -> None:
    """Damage one record [samples, 12] in place: disconnected electrodes, unmeasured samples. `u`:
    its random numbers."""
    if u[0] < FLAT:
        digital[:, 6 + int(u[1] * 6) :] = 0
    if database == "ningbo" and u[2] < INVALID:
        start = int(u[3] * len(digital) * 0.99)
        digital[
            start : start + 1 + int(u[4] * 20), 6 + int(u[5] * 6)
        ] = -32768  # means not measured in WFDB


def _comments(name: str, age: int, female: bool, codes: list[str], u: np.ndarray) -> list[str]:
    """Age, Sex, Dx, Rx, Hx, Sx. As in real headers, outside PTB-XL some are unknown and some Dx are
    malformed."""
    years, sex = str(age), "Female" if female else "Male"
    dx = ",".join(codes)
    if name != "ptb-xl":
        if u[6] < 0.25:
            codes = [*codes, _UNSCORED[int(u[6] * 4 * len(_UNSCORED))]]
        years = "NaN" if u[7] < 0.02 else years
        sex = ("NaN" if u[8] < 0.005 else "Unknown") if u[8] < 0.01 else sex
        codes = [*codes, codes[-1]] if u[9] < 0.005 else codes
        dx = (",," if u[10] < 0.003 else ",").join(codes) + ("," if u[10] > 0.997 else "")
    rows = [f"Age: {years}", f"Sex: {sex}", f"Dx: {dx}", "Rx: Unknown", "Hx: Unknown"]
    if name != "georgia" or u[11] >= 0.5:
        rows.append("Sx: Unknown")
    mark = "# " if DATABASES[name].spaced else "#"
    return [mark + row for row in rows]


def _codes(database: str, names: list[str]) -> list[str]:
    """The Dx codes that this database uses for these classes."""
    code_of = {name: codes[0] for name, codes in CLASSES} | dict(DATABASES[database].codes)
    if database == "ptb-xl":
        code_of |= {name: SCP_CODES[scp] for name, scp in _SCP.items()} | HEART_AXIS_CODES
    return [code_of[name] for name in names] or [_UNSCORED[0]]  # every header has a diagnosis


def _write(
    path: Path, database: Database, digital: np.ndarray, comments: list[str], layout: str
) -> None:
    """Write header and signal. The Challenge's signal is a MATLAB level 4 file: five int32
    (int16 matrix, 12 x n, real, length of the name), `val`, samples. PTB-XL's release has the aV
    leads in capitals and unsigned checksums."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sums = np.ascontiguousarray(digital.T).sum(1, dtype=np.int16)  # overflow as WFDB's checksums do
    if layout == "ptbxl":
        suffix, form, date, first_bytes = ".dat", "16 1000.0(0)/mV", "", b""
        leads, sums = [lead.upper() for lead in LEADS], sums.view(np.uint16)
    else:
        suffix, date, leads = ".mat", database.date, list(LEADS)
        scale = "x1+24 1000.0(0)" if database.spaced else "+24 1000"
        form = f"16{scale}/{database.unit}"
        first_bytes = np.array([30, 12, len(digital), 0, 4], "<i4").tobytes() + b"val\0"
    lines = [f"{path.name} 12 {database.fs_hz} {len(digital)}{date}"]
    rows = zip(leads, digital[0].tolist(), sums.tolist(), strict=True)
    lines += [
        f"{path.name}{suffix} {form} 16 0 {initial} {total} 0 {lead}"
        for lead, initial, total in rows
    ]
    path.with_suffix(suffix).write_bytes(first_bytes + digital.astype("<i2", copy=False).tobytes())
    path.with_suffix(".hea").write_bytes("\n".join([*lines, *comments, ""]).encode())


def _statements(names: list[str], likelihood: float) -> dict[str, float]:
    """`scp_codes` of ptbxl_database.csv."""
    scp: dict[str, float] = {}
    if names in (["NSR"], ["SB"], ["SA"]):
        scp["NORM"] = 100.0
    for name in names:
        if name in _SCP:
            scp[_SCP[name]] = 0.0 if _SCP[name] in _RHYTHM_SCP else likelihood
    return scp or {"NST_": 100.0}  # PTB-XL's statement for the first of _UNSCORED


_FIRST_DATE = datetime(1984, 11, 9, 9, 17, 34)


def _report(names: list[str], is_normal: bool) -> str:
    words = [_REPORT[name] for name in names if name in _REPORT]
    if is_normal:
        words.append("sonst normales ekg")
    return " ".join(words) or "ekg"


def _csv_row(
    prefix: str, ecg_id: int, patient: int, age: int, female: bool, names: list[str], u: np.ndarray
) -> dict[str, object]:
    """One row of ptbxl_database.csv. It includes free text, people and dates, to test that they are
    filtered out."""
    scp = _statements(names, (100.0, 80.0, 50.0)[int(u[6] * 3)])
    # Ids are in order of time
    minutes = timedelta(minutes=100 * ecg_id + int(u[8] * 90))
    stem = f"{ecg_id // 1000 * 1000:05d}/{prefix}{ecg_id:05d}"
    axes = [name for name in names if name in HEART_AXIS_CODES]
    return dict.fromkeys(CSV_COLUMNS, "") | {
        "ecg_id": ecg_id,
        "patient_id": f"{prefix}{patient}",
        "age": 300.0 if age > 89 else float(age),
        "sex": int(female),
        "height": "" if u[9] < 0.6 else 150.0 + int(u[9] * 45),
        "weight": "" if u[10] < 0.5 else 40.0 + int(u[10] * 60),
        "nurse": float(int(u[11] * 12)),
        "site": float(int(u[7] * 4)),
        "device": ("CS-12   E", "AT-6 C 5.5", "AT-6 C")[int(u[8] * 3)],
        "recording_date": _FIRST_DATE + minutes,
        "report": _report(names, "NORM" in scp),
        "scp_codes": scp,
        "heart_axis": axes[0] if axes else "MID" if u[7] < 0.05 else "",
        "validated_by": float(int(u[9] * 8)) if u[10] < 0.4 else "",
        "second_opinion": u[10] > 0.97,
        "initial_autogenerated_report": False,
        "validated_by_human": True,
        "baseline_drift": " , V6" if u[11] < 0.05 else "",
        "static_noise": " , I-AVR,  " if u[11] > 0.9 else "",
        "extra_beats": "VES" if "PVC" in names else "",
        "pacemaker": "ja, pacemaker" if "PR" in names else "",
        "strat_fold": patient % 10 + 1,
        "filename_lr": f"records100/{stem}_lr",
        "filename_hr": f"records500/{stem}_hr",
    }


def _read(
    key: tuple[int, ...], who: list[int], present: Findings, without: tuple[str, ...]
) -> list[list[str]]:
    """The recorded diagnoses of each record: a few findings are missed, and a few wrong ones are
    added."""
    rng = np.random.default_rng([*key, READER])
    names = [name for name in ABBREVIATIONS if name not in (*without, *_NEVER)]
    missed = (rng.random((len(names), BLOCK)) < LABEL_FLIP)[:, who]
    wrong = np.where(rng.random(BLOCK) < LABEL_FLIP, rng.integers(0, len(names), BLOCK), -1)[who]
    return [
        [
            name
            for n, name in enumerate(names)
            if (present[name][i] and not missed[n, i]) or wrong[i] == n
        ]
        for i in range(len(who))
    ]


def sessions_of(
    block: Block,
) -> Iterator[tuple[SyntheticPatients, np.ndarray, list[list[str]], np.ndarray]]:
    """For each session: the patients, signals int16 [records, samples, 12], diagnoses, and random
    numbers for the metadata."""
    database = DATABASES[block.database]
    without = _NOT_IN_PTBXL if block.database == "ptb-xl" else ()
    patients = draw_patients(block.key, without)
    for session, ids in enumerate(block.ids):
        key = (*block.key, session)
        who = list(ids)
        made = simulate(
            patients, key, who, block.samples, database.fs_hz, database.mains_hz, without
        )
        u = np.random.default_rng([*key, CLINIC]).random((BLOCK, 12))[who]
        for digital, numbers in zip(made.digital, u, strict=True):
            damage(digital, block.database, numbers)
        yield patients, made.digital, _read(key, who, made.present, without), u


def write_block(out: Path, layout: str, block: Block) -> tuple[int, list[dict[str, object]]]:
    """Make and write a block's records. Returns their number, and rows of ptbxl_database.csv for
    PTB-XL records."""
    database, rows = DATABASES[block.database], []
    prefix = f"syn{block.key[0]}_"
    for ids, (patients, digital, diagnoses, u) in zip(block.ids, sessions_of(block), strict=True):
        for i, (patient, record_id) in enumerate(ids.items()):
            names = diagnoses[i]
            age = int(patients.age[patient])
            female = bool(patients.female[patient])
            if layout == "ptbxl":
                folder = f"records500/{record_id // 1000 * 1000:05d}"
                path = out / folder / f"{prefix}{record_id:05d}_hr"
                comments = list[str]()
            else:
                number = (record_id - database.first) // FOLDER_RECORDS + 1
                folder = f"training/{SYNTHETIC}{block.database}/g{number}"
                path = out / folder / f"{prefix}{database.prefix}{record_id:0{database.digits}d}"
                comments = _comments(
                    block.database, age, female, _codes(block.database, names), u[i]
                )
            _write(path, database, digital[i], comments, layout)
            if block.database == "ptb-xl":
                number = 10_001 + block.first_patient + patient
                rows.append(_csv_row(prefix, record_id, number, age, female, names, u[i]))
    return sum(map(len, block.ids)), rows


def _statement_table() -> str:
    kinds = ("diagnostic", "form", "rhythm")
    rows = [["", "description", *kinds, "diagnostic_class", "diagnostic_subclass"]]
    for line in _STATEMENTS.split(","):
        name, stated, *classes = line.split()
        flags = ("1.0" if kind in stated else "" for kind in kinds)
        rows.append([name, name, *flags, *(classes or ("", ""))])
    return as_csv(rows)


def synthesise(
    out: str | Path,
    patients: int,
    two_sessions: float = TWO_SESSIONS,
    seed: int = 0,
    layout: str = "physionet2021",
    workers: int = 1,
    progress: bool = True,
) -> dict[str, int]:
    """Write an archive into the new or empty folder `out`. Returns the number of records per
    database.

    There are `patients` PTB-XL patients, and a share `two_sessions` of them has a second recording.
    The Challenge's layout has as many patients again, with one recording each, spread over the
    other seven databases.
    """
    if "://" in str(out):
        raise DataError(f"{out}: archives are made on a local disk: choose a folder")
    out, blocks = Path(out), plan(patients, two_sessions, seed, layout)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is not empty: choose a new folder, or delete this one first")
    out.mkdir(parents=True, exist_ok=True)
    arguments = (
        f"version={VERSION} patients={patients} two_sessions={two_sessions:g} seed={seed} "
        f"layout={layout}"
    )
    (out / "SYNTHETIC.txt").write_text(
        f"Synthetic ECGs of synthetic patients: no person's data.\nsynth {arguments}\n"
    )
    counts = Counter[str]()
    for block in blocks:
        counts[block.database] += sum(map(len, block.ids))
    rows: list[dict[str, object]] = []
    with tqdm(total=counts.total(), unit=" records", disable=not progress) as bar:
        for made, ptbxl_rows in cluster.run(partial(write_block, out, layout), blocks, workers):
            rows += ptbxl_rows
            bar.update(made)
    if layout == "ptbxl":
        (out / "scp_statements.csv").write_text(_statement_table())
    rows.sort(key=lambda row: int(str(row["ecg_id"])))
    records = [CSV_COLUMNS, *([row[name] for name in CSV_COLUMNS] for row in rows)]
    (out / "ptbxl_database.csv").write_text(as_csv(records), encoding="utf-8")
    return dict(counts)
