"""Write archives of synthetic patients in the layouts of real archives, so that every tool can be tried
without real data.

plan (which records, in blocks of up to 64 patients) -> for each block: draw patients (patients.py),
simulate their sessions (ecg.py), damage a few records as in real archives, write header + signal
(challenge.py, ptbxl.py) -> ptbxl_database.csv, scp_statements.csv, SYNTHETIC.txt

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
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm.auto import tqdm

from ..ecg.record import CLASS_ABBREVIATIONS
from ..io import cluster
from ..io.errors import DataError
from . import challenge, ptbxl
from .challenge import DATABASES, damage_record
from .ecg import simulate
from .patients import BLOCK_PATIENTS, Findings, SyntheticPatients, draw_patients

LAYOUTS = ("physionet2021", "ptbxl")
# Version of the archives that `synth` makes. In version 1, a patient's two sessions were less alike than
# real ones, and all patients had two. In version 2, databases, records and patients had the names of
# real ones
ARCHIVE_VERSION = 3
TWO_SESSIONS_SHARE = 0.11  # share of PTB-XL's patients with two sessions, as in the real PTB-XL
# Two databases have sampling rates other than 500 Hz. Each of them gets this share of the patients
# outside PTB-XL
OTHER_RATE_SHARE = 0.01
# Probability that a finding of a record is missed, and also that a record gets a wrong one
LABEL_FLIP_SHARE = 0.03
# The key of a random generator includes one of these numbers, or of those in synthetic.patients, which
# stands for what is drawn
DAMAGE_AND_TEXT_KEY = 4
LENGTH_KEY = 5
DIAGNOSIS_ERROR_KEY = 6
SECOND_SESSION_KEY = 8
_NOT_SIMULATED = ("BBB", "LPR")  # two classes that the signal model does not produce


@dataclass(frozen=True)
class Block:
    """Up to BLOCK_PATIENTS patients of one database and record length, with all their sessions: the unit
    of work of a worker process."""

    database: str
    key: tuple[int, ...]
    samples: int
    first_patient: int
    ids: list[dict[int, int]]  # for each session: {index of the patient in the block: record id}


def patients_of_other_databases(patients: int) -> dict[str, int]:
    """Return the number of patients of each of the seven databases other than PTB-XL: `patients` in all,
    in the real proportions. Each patient has one recording."""
    share = max(1, round(OTHER_RATE_SHARE * patients)) if patients >= 50 else 0
    small = {name: min(DATABASES[name].last, share) for name in ("st_petersburg_incart", "ptb")}
    large = {
        name: database.records
        for name, database in DATABASES.items()
        if name not in small and name != "ptb-xl"
    }
    rest, total = patients - sum(small.values()), sum(large.values())
    if rest > total:
        raise DataError(
            f"patients={patients} is too large: the databases other than PTB-XL have "
            f"{total + patients - rest} ids: use fewer"
        )
    shares = {name: rest * records / total for name, records in large.items()}
    counts = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(large, key=lambda name: counts[name] - shares[name])
    for name in by_remainder[: rest - sum(counts.values())]:
        counts[name] += 1
    return counts | small


def plan_blocks(
    patients: int,
    two_sessions: float = TWO_SESSIONS_SHARE,
    seed: int = 0,
    layout: str = "physionet2021",
) -> list[Block]:
    """Return the blocks of records to make.

    More `patients` only add patients to PTB-XL, but the ids of second sessions may change in the block that was
    the last one. The other databases grow, too, but may lose their last record, because shares are rounded.
    A larger share of `two_sessions` adds second sessions, and changes the ids of the records that are planned
    after them. Records whose ids change keep their signals."""
    for name, value, least in (("patients", patients, 1), ("seed", seed, 0)):
        if value < least:
            raise DataError(f"{name}={value}: must be at least {least}")
    if not 0 <= two_sessions <= 1:
        raise DataError(f"two_sessions={two_sessions}: must be a share from 0 to 1")
    if layout not in LAYOUTS:
        raise DataError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    counts = {"ptb-xl": patients}
    if layout == "physionet2021":
        counts |= patients_of_other_databases(patients)
    blocks: list[Block] = []
    for number, (name, database) in enumerate(DATABASES.items()):
        share = two_sessions if name == "ptb-xl" else 0.0
        planned = _database_blocks(name, (seed, number), counts.get(name, 0), share)
        used = [record for ids in planned[-1].ids for record in ids.values()] if planned else [0]
        if max(used) > database.last:
            raise DataError(
                f"patients={patients}, two_sessions={two_sessions:g}: needs record ids above {database.last}, the "
                "largest five-digit id of PTB-XL: use fewer patients"
            )
        blocks += planned
    return blocks


def _database_blocks(
    name: str, key: tuple[int, int], patients: int, two_sessions: float
) -> list[Block]:
    """Return the blocks of a database. In each block, the record ids of second sessions follow those of
    first sessions."""
    database = DATABASES[name]
    seconds, share = zip(*database.durations_s, strict=True)
    drawn = np.random.default_rng([*key, LENGTH_KEY]).choice(len(seconds), patients, p=share)
    blocks = []
    second_sessions = 0  # how many were planned so far
    for length, dur_s in enumerate(seconds):
        records = np.flatnonzero(drawn == length).tolist()
        for first in range(0, len(records), BLOCK_PATIENTS):
            chosen = records[first : first + BLOCK_PATIENTS]
            block_key = (*key, length, first // BLOCK_PATIENTS)
            start = database.first + second_sessions
            ids = [{i: start + record for i, record in enumerate(chosen)}]
            if name == "ptb-xl":
                chance = np.random.default_rng([*block_key, SECOND_SESSION_KEY]).random(
                    BLOCK_PATIENTS
                )
                twice = np.flatnonzero(chance[: len(chosen)] < two_sessions).tolist()
                after = start + chosen[-1] + 1
                ids.append({i: after + n for n, i in enumerate(twice)})
                second_sessions += len(twice)
            blocks.append(Block(name, block_key, dur_s * database.fs_hz, first, ids))
    return blocks


def _recorded_diagnoses(
    key: tuple[int, ...], who: list[int], present: Findings, without: tuple[str, ...]
) -> list[list[str]]:
    """Return the diagnoses that each record states: its findings, of which a few are missed, and a few
    wrong ones."""
    rng = np.random.default_rng([*key, DIAGNOSIS_ERROR_KEY])
    names = [name for name in CLASS_ABBREVIATIONS if name not in (*without, *_NOT_SIMULATED)]
    missed = (rng.random((len(names), BLOCK_PATIENTS)) < LABEL_FLIP_SHARE)[:, who]
    wrong = np.where(
        rng.random(BLOCK_PATIENTS) < LABEL_FLIP_SHARE,
        rng.integers(0, len(names), BLOCK_PATIENTS),
        -1,
    )[who]
    return [
        [
            name
            for n, name in enumerate(names)
            if (present[name][i] and not missed[n, i]) or wrong[i] == n
        ]
        for i in range(len(who))
    ]


class Session(NamedTuple):
    """One session of a block's patients; arrays have an entry for each of its records."""

    patients: SyntheticPatients
    digital: np.ndarray  # the signals: int16 [records, samples, 12 leads]
    diagnoses: list[list[str]]
    # [records, 12] random numbers: columns 0 to 5 decide what is damaged, the others what texts say
    u: np.ndarray


def sessions_of(block: Block) -> Iterator[Session]:
    """Yield the simulated sessions of a block, with a few records damaged."""
    database = DATABASES[block.database]
    without = ptbxl.CLASSES_WITHOUT_STATEMENT if block.database == "ptb-xl" else ()
    patients = draw_patients(block.key, without)
    for session, ids in enumerate(block.ids):
        key = (*block.key, session)
        who = list(ids)
        made = simulate(
            patients, key, who, block.samples, database.fs_hz, database.mains_hz, without
        )
        u = np.random.default_rng([*key, DAMAGE_AND_TEXT_KEY]).random((BLOCK_PATIENTS, 12))[who]
        for digital, numbers in zip(made.digital, u, strict=True):
            damage_record(digital, block.database, numbers)
        yield Session(
            patients, made.digital, _recorded_diagnoses(key, who, made.present, without), u
        )


def write_block(out: Path, layout: str, block: Block) -> tuple[int, list[dict[str, object]]]:
    """Make and write the records of a block. Return (their number, their rows of ptbxl_database.csv, which
    only records of PTB-XL have)."""
    name, rows = block.database, []
    prefix = f"syn{block.key[0]}_"
    for ids, session in zip(block.ids, sessions_of(block), strict=True):
        for i, (patient, record) in enumerate(ids.items()):
            age = int(session.patients.age[patient])
            female = bool(session.patients.female[patient])
            digital, classes, u = session.digital[i], session.diagnoses[i], session.u[i]
            if layout == "ptbxl":
                ptbxl.write_ptbxl_record(out / ptbxl.record_path(prefix, record), digital)
            else:
                path = out / challenge.record_path(name, prefix, record)
                codes = challenge.dx_codes(name, classes)
                comments = challenge.header_comments(name, age, female, codes, u)
                challenge.write_challenge_record(path, DATABASES[name], digital, comments)
            if name == "ptb-xl":
                patient_id = 10_001 + block.first_patient + patient
                row = ptbxl.database_row(prefix, record, patient_id, age, female, classes, u)
                rows.append(row)
    return sum(map(len, block.ids)), rows


def synthesise(
    out: str | Path,
    patients: int,
    two_sessions: float = TWO_SESSIONS_SHARE,
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
        raise DataError(f"{out}: archives are made on a local disk only: choose a local folder")
    out, blocks = Path(out), plan_blocks(patients, two_sessions, seed, layout)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is not empty: choose a new folder, or delete this one first")
    out.mkdir(parents=True, exist_ok=True)
    arguments = (
        f"version={ARCHIVE_VERSION} patients={patients} two_sessions={two_sessions:g} seed={seed} "
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
        (out / "scp_statements.csv").write_text(ptbxl.statement_table())
    ptbxl.write_database(out, rows)
    return dict(counts)
