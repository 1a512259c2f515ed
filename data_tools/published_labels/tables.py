"""Write label tables of published archives (`omnilead labels ptbxl SRC --out DIR`), and copy a user's own
table with pseudonyms (`omnilead labels table my.csv --out DIR --pseudonymize KEYFILE`).

A table is a parquet file with columns `source` and `record`, as in a dataset of the archive, one
column per label, and `fold`, if folds are published. An empty cell means unknown. The JSON file
beside it has the meaning of the columns, the files that were read, and counts. Only codes, numbers
and record ids are copied: no free text, dates or patients.

All but MIMIC-IV-ECG publish labels directly. Those of MIMIC-IV-ECG are made from
machine_measurements.csv: the ECG carts' computer interpretations as codes, and measurements.
mimic_statements.csv has the codes and their patterns; a change of it, or of the patterns below,
raises STATEMENT_PATTERNS_VERSION. A finding is 1 if a statement names it, empty if it is only hedged
("possible", "cannot rule out", "borderline"), and 0 if it is negated or not mentioned. If the
program gave up ("no further analysis"), findings that are not mentioned are empty. These are
computer interpretations, not a physician's. No folds are published: split by patient.
"""

import csv
import hashlib
import json
import os
import posixpath
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
from tqdm import tqdm

from ..ecg.pseudonyms import pseudonym
from ..ecg.record import (
    SCORED_CLASSES,
    SYNTHETIC,
    VENDORS,
    clean_age,
    parse_dx,
    record_stem,
    snomed_codes_and_word_count,
    synthetic_prefix,
)
from ..ecg.record_names import PTBXL_FILE_NAME as PTBXL_NAME
from ..ecg.record_names import row_number
from ..ecg.record_tables import read_table as read_record_table
from ..io.errors import DataError, ReadError, StorageError, one_line, printable
from ..io.spreadsheet import to_number
from ..io.storage import Folder, dataset_folder, explain_write_errors, prefetch, write_whole
from ..sharding.finishing import parquet_bytes
from ..sources.base import dataset_patient, links_hint, name_with_folders, read_safely, read_table
from ..sources.code15 import EXAMS_CSV, MAX_EXAMS_CSV
from ..sources.wfdb import MAX_HEADER_BYTES, checked_name, parse_header
from ..sources.wfdb_archives import (
    ACCEPTABLE_LIST,
    PTBXL_CSV_PATHS,
    EcgArrhythmia,
    PhysioNet2011,
    PhysioNet2021,
    WfdbFolder,
    WfdbSource,
    parse_statements,
)
from ..sources.zip_folder import archive_folder_and_names

NAME_COLUMNS = ("source", "record", "patient")
UNKNOWN = -1  # value of an unknown label in columns of 0 and 1; columns of measurements have NaN
MAX_FILE_BYTES = 2**30  # a larger file of an archive is not read
_RECORD_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

_TRUE_OR_FALSE = {"true": 1, "1": 1, "1.0": 1, "false": 0, "0": 0, "0.0": 0}
SUPERCLASSES = {
    "MI": "myocardial infarction",
    "STTC": "ST/T change",
    "CD": "conduction disturbance",
    "HYP": "hypertrophy",
}
CODE15_NAMES = {
    "1dAVb": "first degree AV block",
    "RBBB": "right bundle branch block",
    "LBBB": "left bundle branch block",
    "SB": "sinus bradycardia",
    "AF": "atrial fibrillation",
    "ST": "sinus tachycardia",
    "normal_ecg": "normal ECG",
    "is_male": "male sex",
    "death": "died during follow-up; known for one exam of each patient",
}
# {label: (its meaning, its value for each record)}. Values are 0, 1 and UNKNOWN as int8, or floats
Labels = dict[str, tuple[str, np.ndarray]]
# Label sets of PTB-XL. A column of scp_statements.csv with the name of the set marks its statements
_STATEMENT_KINDS = ("diagnostic", "form", "rhythm")
# {label set of PTB-XL: the column of scp_statements.csv that has the label of each diagnostic statement}
_CLASS_COLUMNS = {"subdiagnostic": "diagnostic_subclass", "superdiagnostic": "diagnostic_class"}
STATEMENT_PATTERNS_VERSION = 1
MIMIC_MEASUREMENTS = "machine_measurements.csv"
REPORT_COLUMNS = tuple(f"report_{i}" for i in range(18))
INTERVAL_COLUMNS = (
    "rr_interval",
    "p_onset",
    "p_end",
    "qrs_onset",
    "qrs_end",
    "t_end",
    "p_axis",
    "qrs_axis",
    "t_axis",
)
# {label: (its meaning, where the interval starts, where it ends)}
INTERVALS = {
    "RR": ("RR interval", "zero", "rr_interval"),
    "P": ("duration of the P wave", "p_onset", "p_end"),
    "PR": ("PR interval", "p_onset", "qrs_onset"),
    "QRS": ("QRS duration", "qrs_onset", "qrs_end"),
    "QT": ("QT interval, not corrected for the rate,", "qrs_onset", "t_end"),
}
MAX_MS = 5000  # larger times (29999, 32767, 65535, ...) stand for "not measured"
UNREAD = "UNREAD"  # the code of statements that say that the cart's program gave up
ANY_STATEMENT = 1 << 63  # the bit that is set for records with at least one statement

with open(Path(__file__).with_name("mimic_statements.csv"), newline="", encoding="utf-8") as _file:
    CODES = {
        code: (means, re.compile(pattern)) for code, means, pattern in list(csv.reader(_file))[1:]
    }
_HEDGED = re.compile(
    r"\b(?:possibl[ey]|probabl[ey]|likely|suggests?|suggestive|suspect(?:ed)?|consider|consistent "
    r"with|compatible with|may"
    r"|might|could|cannot (?:rule out|exclude)|rule out|versus|vs|criteria for|borderline(?! "
    r"(?:abnormal )?ecg))\b|\?"
)
# Words of doubt that come directly after a finding
_HEDGED_AFTER = re.compile(
    r"\w*(?: can ?not be (?:ruled out|excluded)| is borderline| or aberr|\?)"
)
_NEGATED = re.compile(
    r"\b(?:no(?! further)|not|without|absence of|negative for)\b(?:(?!\b(?:but|with)\b)[^,;:.])*$"
)


class PublishedLabels(NamedTuple):
    """A label table before it is written."""

    name: str  # file name of the table and of the JSON file beside it, without suffix
    about: str  # what the labels are, for the JSON file
    read: tuple[str, ...]  # paths of the archive's files whose SHA-256 the JSON file states
    source: str | Sequence[str]  # the source of all records, or of each record
    records: Sequence[str] | np.ndarray  # ids of the records
    labels: Labels
    fold: np.ndarray | None = None


def write_labels(
    archive: str, url: str, out: str, key: bytes | None, anonymous: bool, quiet: bool
) -> Iterator[str]:
    """Write all label tables of an archive and yield a line about each. With a key, record ids are replaced
    by pseudonyms."""
    place = dataset_folder(out)
    if archive == "table":
        table = pseudonymize_labels(url, key)
    else:
        # This raises an error if there is no such folder
        root, _ = archive_folder_and_names(url, anonymous)
    if not place.remote:
        with explain_write_errors(place.url, "tables"):
            os.makedirs(place.url, exist_ok=True)
            remove_leftovers(Path(place.url))
    write = (
        place.write
        if place.remote
        else lambda name, data: write_whole(Path(place.path(name)), data)
    )
    if archive == "table":
        name = posixpath.basename(url).rpartition(".")[0]
        write(f"{name}.parquet", parquet_bytes(table))
        copied = ", ".join(name for name in table.column_names if name not in NAME_COLUMNS)
        yield (
            f"{place.path(name)}.parquet: {len(table):,} records have their pseudonyms, right only where the "
            "table has the record's own name or its path in the archive, and not the end of a name or a "
            "path with folders above the archive: what reads the table says how many of its records "
            "are not in the data; copied as "
            f"they are, so make sure that they name nobody: {copied}"
        )
        return
    for published in LABEL_READERS[archive](root, quiet):
        table, labels = _to_arrow(published, key)
        if not labels:
            yield f"{published.name}: not written, because no record has such a label"
            continue
        read = {
            name: hashlib.sha256(root.read(name, MAX_FILE_BYTES)).hexdigest()
            for name in published.read
        }
        facts = {
            "archive": archive,
            "about": published.about,
            "sha256": read,
            "records": len(table),
            "labels": labels,
        }
        write(f"{published.name}.json", (json.dumps(facts, indent=1) + "\n").encode())
        write(f"{published.name}.parquet", parquet_bytes(table))
        yield f"{place.path(published.name)}.parquet: {len(table):,} records, {len(labels)} labels"


def pseudonymize_labels(url: str, key: bytes | None) -> pa.Table:
    """Return a user's label table with the names of records and patients replaced by the pseudonyms that a
    dataset made with this key has. As the dataset is not at hand, the table must have the records' own
    names; approximate names, which ecg.record_names would find, get a wrong pseudonym."""
    cells = read_record_table(url)
    if key is None:
        raise DataError(
            f"labels table {url}: needs --pseudonymize KEYFILE. If the dataset was made without a key, use "
            "the table as it is: --labels reads it"
        )
    if "source" not in cells.column_names:
        raise DataError(
            f"{url}: a pseudonym depends on the source: add a column `source`, such as muse-xml; "
            "`omnilead show DATASET` lists the sources of a dataset"
        )
    rows = cells.select([name for name in NAME_COLUMNS if name in cells.column_names]).to_pylist()
    for number, row in enumerate(rows):
        source, record = row["source"], row["record"]
        if not (source and record):
            place = f"{url}: row {row_number(cells, number)}"
            raise DataError(f"{place} has an empty cell in `source` or `record`: fill it in")
        record = record.replace("\\", "/")
        name = record_stem(record)
        if source in VENDORS or source == WfdbFolder.name:
            name = name_with_folders(record, name)
        row["record"] = pseudonym(key, "r", source, re.sub(*PTBXL_NAME, name))
        row["patient"] = dataset_patient(key, source, row.get("patient"))
    for name in NAME_COLUMNS:
        if name in cells.column_names:
            place = cells.column_names.index(name)
            cells = cells.set_column(
                place, name, pa.array([row[name] for row in rows], pa.string())
            )
    return cells.replace_schema_metadata()


def _to_arrow(published: PublishedLabels, key: bytes | None) -> tuple[pa.Table, dict[str, Any]]:
    """Return (the label table, {label: meaning and counts}). Labels that no record has are left out."""
    if wrong := next((name for name in published.records if not _RECORD_ID.fullmatch(name)), None):
        raise DataError(
            f"{', '.join(published.read)}: {printable(wrong[:40])!r} cannot be a record's id: restore the "
            "file"
        )
    sources = (
        [published.source] * len(published.records)
        if isinstance(published.source, str)
        else published.source
    )
    names = [pseudonym(key, "r", *pair) for pair in zip(sources, published.records, strict=True)]
    columns = {"source": pa.array(sources, pa.string()), "record": pa.array(names, pa.string())}
    labels: dict[str, Any] = {}
    for name, (means, values) in published.labels.items():
        measured = values.dtype.kind == "f"
        column = pa.array(values, mask=np.isnan(values) if measured else values == UNKNOWN)
        known, positive = len(column) - column.null_count, int((values == 1).sum())
        if known if measured else positive:
            count = (
                {"median": round(pc.quantile(column)[0].as_py(), 3)}
                if measured
                else {"positive": positive}
            )
            columns[name], labels[name] = column, {"means": means, "known": known} | count
    if published.fold is not None:
        columns["fold"] = pa.array(published.fold, pa.int8())
    return pa.table(columns), labels


def ptbxl_labels(root: Folder, quiet: bool) -> Iterator[PublishedLabels]:
    """Yield the label sets of PTB-XL's benchmark (Strodthoff et al. 2020,
    doi:10.1109/JBHI.2020.3022989). As in the benchmark, a statement counts whatever its likelihood is,
    a set has only the records with at least one of its labels, and labels are in alphabetical order."""
    read, known, source, records, fold, likelihood = _read_ptbxl_tables(root)
    for kind, label_of in _label_sets(known).items():
        labels = _labels_of_set(known, label_of, ~np.isnan(likelihood))
        kept = np.zeros(len(records), bool)
        for _, has in labels.values():
            kept |= has
        chosen = {name: (means, has[kept].astype(np.int8)) for name, (means, has) in labels.items()}
        about = (
            f"PTB-XL, {kind} statements as in its benchmark (Strodthoff et al. 2020); records "
            "without one are left out"
        )
        name = f"ptbxl-{kind}"
        yield PublishedLabels(name, about, read, source, records[kept], chosen, fold[kept])
    about = (
        "PTB-XL, likelihood of each statement in per cent: 0 if it is stated without one, empty "
        "if it is not stated"
    )
    percents = {}
    for column, (name, row) in zip(likelihood.T, known.items(), strict=True):
        percents[name] = (row["description"], column)
    yield PublishedLabels("ptbxl-likelihood", about, read, source, records, percents, fold)


class _PtbXlTables(NamedTuple):
    """The contents of ptbxl_database.csv and scp_statements.csv."""

    read: tuple[str, str]  # paths of the two files
    known: dict[str, dict[str, str]]  # {statement: its row of scp_statements.csv}
    source: str
    records: np.ndarray
    fold: np.ndarray
    # Likelihood of each statement in per cent: 0 if it is stated without one, NaN if it is not stated
    likelihood: np.ndarray  # float32 [records, statements]


def _read_ptbxl_tables(root: Folder) -> _PtbXlTables:
    place = next(filter(root.exists, PTBXL_CSV_PATHS), PTBXL_CSV_PATHS[0])
    read = (place, posixpath.join(posixpath.dirname(place), "scp_statements.csv"))
    if not root.exists(read[1]):
        raise StorageError(f"{root.url}: has no {read[1]}: copy this file from PTB-XL's release")
    columns = ("", "description", *_STATEMENT_KINDS, *_CLASS_COLUMNS.values())
    known = {row[""]: row for row in read_table(root, read[1], MAX_EXAMS_CSV, columns)}
    columns = ("ecg_id", "patient_id", "scp_codes", "strat_fold")
    rows = list(read_table(root, place, MAX_EXAMS_CSV, columns))
    prefix = synthetic_prefix(rows[0]["patient_id"]) if rows else ""
    records = np.array([f"{prefix}HR{row['ecg_id'].removesuffix('.0'):0>5}" for row in rows])
    fold = np.array([to_number(row["strat_fold"]) for row in rows])
    if not np.isin(fold, np.arange(1, 11)).all():
        raise StorageError(
            f"{root.url}/{place}: strat_fold is not 1 to 10 in every row: get the file again"
        )
    likelihood = np.full((len(rows), len(known)), np.nan, np.float32)
    for i, row in enumerate(rows):
        likelihoods = parse_statements(row["scp_codes"])
        likelihood[i] = [likelihoods.get(name, np.nan) for name in known]
    source = SYNTHETIC * bool(prefix) + "ptb-xl"
    return _PtbXlTables(read, known, source, records, fold, likelihood)


def _labels_of_set(
    known: dict[str, dict[str, str]], label_of: dict[str, str], is_stated: np.ndarray
) -> Labels:
    """Return the labels of one label set, in alphabetical order. `label_of`: {statement: its label in this
    set}. `is_stated`: [records, statements]."""
    labels: Labels = {}
    for label in sorted(set(label_of.values()) - {""}):
        stated = [name for name in known if label_of.get(name) == label]
        means = f"{SUPERCLASSES.get(label, label)}: {', '.join(stated)}"
        if stated == [label]:
            means = known[label]["description"]
        columns = [name in stated for name in known]
        labels[label] = (means, np.any(is_stated[:, columns], axis=1))
    return labels


def _label_sets(known: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return {label set: {statement: its label in this set}}."""
    sets = {"all": {name: name for name in known}}
    for kind in _STATEMENT_KINDS:
        sets[kind] = {
            name: name for name, row in known.items() if _TRUE_OR_FALSE.get(row[kind]) == 1
        }
    for kind, column in _CLASS_COLUMNS.items():
        sets[kind] = {name: known[name][column] for name in sets["diagnostic"]}
    return sets


def code15_labels(root: Folder, quiet: bool) -> Iterator[PublishedLabels]:
    """Yield the labels in exams.csv of CODE-15 % (Ribeiro et al. 2021, doi:10.5281/zenodo.4916206). No folds
    are published: split by patient."""
    rows = list(
        read_table(root, EXAMS_CSV, MAX_EXAMS_CSV, ("exam_id", *CODE15_NAMES, "age", "timey"))
    )
    records = [row["exam_id"] for row in rows]
    labels: Labels = {}
    for name, means in CODE15_NAMES.items():
        values = [_TRUE_OR_FALSE.get(row[name].lower(), UNKNOWN) for row in rows]
        labels[name] = (means, np.array(values, np.int8))
    ages = np.array([clean_age(row["age"]) for row in rows], np.float32)
    years = np.array([to_number(row["timey"]) for row in rows], np.float32)
    labels["age"] = ("age in years, 90 for all over 89", ages)
    years = np.where(years > 0, years, np.nan).astype(np.float32)
    labels["timey"] = ("years to death or to the last contact, empty if not above 0", years)
    about = "CODE-15 %, labels of exams.csv"
    yield PublishedLabels("code15", about, (EXAMS_CSV,), "code15", records, labels)


def header_labels(
    archive: type[WfdbSource], title: str, root: Folder, quiet: bool
) -> Iterator[PublishedLabels]:
    """Yield two label tables from the `Dx` lines of all headers: one with the 26 scored diagnoses, one with all
    SNOMED CT codes."""
    source = archive(root)
    keys = [key for key in source.keys() if key.endswith(".hea")]  # noqa: SIM118
    read = partial(read_safely, partial(_name_and_diagnoses, root))
    headers = prefetch(read, keys) if root.remote else map(read, keys)
    headers = tqdm(headers, total=len(keys), unit=" headers", disable=quiet)
    # If two records have the same name, the first one counts, as in a dataset
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for key, header in zip(keys, headers, strict=True):
        if not isinstance(header, ReadError):
            name, dx = header
            rows.setdefault((source.source_of(key), name), dx)
    if not rows:
        raise StorageError(f"{root.url}: has no readable header of {title}{links_hint(root)}")
    sources, records = zip(*rows, strict=True)
    unread = len(keys) - len(rows)
    note = f" ({unread} of {len(keys)} headers are unreadable or duplicates)" if unread else ""
    about = title + ", {} of the headers" + note
    codes = list(map(frozenset, rows.values()))
    what = about.format("the 26 scored diagnoses")
    labels = _labels_of_codes(codes, SCORED_CLASSES)
    yield PublishedLabels(f"{source.name}-scored", what, (), sources, records, labels)
    what = about.format("all SNOMED CT codes")
    labels = _labels_of_codes(
        codes, [(code, (code,)) for code in sorted(frozenset().union(*codes))]
    )
    yield PublishedLabels(f"{source.name}-all", what, (), sources, records, labels)


def _labels_of_codes(
    diagnoses: list[frozenset[str]], kinds: Iterable[tuple[str, tuple[str, ...]]]
) -> Labels:
    """Return a label for each (name, codes) of `kinds`: 1 for records that have one of the codes."""
    labels: Labels = {}
    for name, codes in kinds:
        has = [not dx.isdisjoint(codes) for dx in diagnoses]
        labels[name] = (f"SNOMED CT {' or '.join(codes)}", np.array(has, np.int8))
    return labels


def _name_and_diagnoses(root: Folder, key: str) -> tuple[str, tuple[str, ...]]:
    header = parse_header(root.read(key, MAX_HEADER_BYTES))
    return checked_name(header.name, key), snomed_codes_and_word_count(parse_dx(header.dx))[0]


def physionet2011_labels(root: Folder, quiet: bool) -> Iterator[PublishedLabels]:
    """Yield the quality labels of set-a, from its lists of acceptable and unacceptable ECGs. The label is
    unknown if an ECG is in both lists or in neither."""
    place = PhysioNet2011(root).places()[0]
    names = ("RECORDS", ACCEPTABLE_LIST, "RECORDS-unacceptable")
    read = tuple(posixpath.join(place, name) for name in names)
    try:
        records, good, bad = (root.read(name, MAX_HEADER_BYTES).decode().split() for name in read)
    except (ReadError, UnicodeDecodeError) as error:
        raise StorageError(one_line(f"{root.url}: {error}: restore the file")) from None
    is_good, is_bad = np.isin(records, good), np.isin(records, bad)
    values = np.where(is_good == is_bad, UNKNOWN, is_good).astype(np.int8)
    about = (
        "PhysioNet/CinC Challenge 2011, set-a, quality as judged by people; empty where undecided"
    )
    labels = {"acceptable": ("acceptable for interpretation", values)}
    yield PublishedLabels("physionet2011", about, read, "physionet2011", records, labels)


def mimic_labels(root: Folder, quiet: bool) -> Iterator[PublishedLabels]:
    """Yield two label tables of MIMIC-IV-ECG: statements of the carts' programs, and measured intervals."""
    table = _read_mimic_measurements(root)
    studies = table["study_id"].to_numpy()
    codes = np.zeros((2, len(table)), np.uint64)
    for name in tqdm(REPORT_COLUMNS, unit=" columns", disable=quiet):
        codes |= _asserted_and_possible_bits(table[name].unify_dictionaries().combine_chunks())
    about = (
        f"MIMIC-IV-ECG, the carts' computer interpretations, pattern list {STATEMENT_PATTERNS_VERSION}: 1 stated, 0 "
        "not, empty hedged"
    )
    has_statement = codes[0] != 0
    labels = _statement_labels(codes[:, has_statement])
    read, source = (MIMIC_MEASUREMENTS,), "mimic-iv-ecg"
    yield PublishedLabels(
        "mimic-iv-ecg-statements", about, read, source, studies[has_statement], labels
    )
    about = (
        "MIMIC-IV-ECG, intervals and axes measured by the carts' programs; empty where not measured"
    )
    labels = _interval_labels(table)
    yield PublishedLabels("mimic-iv-ecg-intervals", about, read, source, studies, labels)


def _statement_labels(codes: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
    """Return a label for each code. `codes`: the bits of stated and of hedged codes, [2, records]."""
    bit = {code: np.uint64(1 << i) for i, code in enumerate(CODES)}
    unread = codes[0] & bit[UNREAD] != 0
    labels = {}
    for code, (means, _) in CODES.items():
        stated, hedged = codes & bit[code] != 0
        values = np.where(hedged | unread, UNKNOWN, 0)
        labels[code] = (means, np.where(stated, 1, values).astype(np.int8))
    return labels


def _interval_labels(table: pa.Table) -> dict[str, tuple[str, np.ndarray]]:
    """Return the intervals and axes of each record, NaN where not measured."""
    x = {"zero": np.zeros(len(table), np.float32)}
    for name in INTERVAL_COLUMNS:
        values = table[name].to_numpy()
        largest = 180 if "axis" in name else MAX_MS
        x[name] = np.where(np.abs(values) <= largest, values, np.nan)
    # If the onset or end of the P wave was not measured, this is NaN, and so are all measurements of P
    p_wave = 0 * (x["p_onset"] + x["p_end"])
    x["p_onset"] = x["p_onset"] + p_wave
    x["p_axis"] = x["p_axis"] + p_wave
    labels = {}
    for name, (means, start, end) in INTERVALS.items():
        span = x[end] - x[start]
        span = np.where(span > 0, span, np.nan)
        labels[name] = (f"{means} in ms", span.astype(np.float32))
    for wave in ("P", "QRS", "T"):
        labels[f"{wave}_axis"] = (f"axis of {wave} in degrees", x[f"{wave.lower()}_axis"])
    return labels


def _read_mimic_measurements(root: Folder) -> pa.Table:
    """Return the needed columns of machine_measurements.csv."""
    # Dictionary columns, because statements repeat: each distinct one is searched for findings only once
    words = pa.dictionary(pa.int32(), pa.binary())
    kinds = {
        "study_id": pa.string(),
        **dict.fromkeys(REPORT_COLUMNS, words),
        **dict.fromkeys(INTERVAL_COLUMNS, pa.float32()),
    }
    parsing = pacsv.ParseOptions(newlines_in_values=True)
    converting = pacsv.ConvertOptions(column_types=kinds, include_columns=list(kinds))
    try:
        data = pa.BufferReader(root.read(MIMIC_MEASUREMENTS, MAX_FILE_BYTES))
        return pacsv.read_csv(data, parse_options=parsing, convert_options=converting)
    except (ReadError, pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise StorageError(
            one_line(f"{root.url}: {MIMIC_MEASUREMENTS}: {error}: restore the file")
        ) from None


def _asserted_and_possible_bits(column: pa.DictionaryArray) -> np.ndarray:
    """Return the bits of the codes that each text states, and of those that it hedges: uint64 [2, rows]."""
    of_texts = [
        asserted_and_possible_codes(text.decode(errors="replace")[:300])
        for text in column.dictionary.to_pylist()
    ]
    codes: np.ndarray = np.array([*of_texts, (0, 0)], np.uint64).T[
        :, column.indices.fill_null(len(of_texts)).to_numpy()
    ]
    return codes


@lru_cache(maxsize=2**16)
def asserted_and_possible_codes(text: str) -> tuple[int, int]:
    """Returns (bits of the codes that a text states, bits of the codes that it only calls possible)."""
    text = " ".join(text.lower().split())
    stated, hedged = ANY_STATEMENT if text else 0, 0
    for i, (_, pattern) in enumerate(CODES.values()):
        for mention in pattern.finditer(text):
            if _HEDGED.search(text[: mention.end()]) or _HEDGED_AFTER.match(text, mention.end()):
                hedged |= 1 << i
            elif not _NEGATED.search(text[: mention.start()]):
                stated |= 1 << i
    return stated, hedged


def remove_leftovers(place: Path) -> None:
    """Remove the temporary files in a folder whose processes, on this machine, no longer run."""
    temporary = re.compile(rf"\..+\.{re.escape(socket.gethostname())}\.(\d+)")
    for path in place.iterdir():
        if (match := temporary.fullmatch(path.name)) and not os.path.exists(f"/proc/{match[1]}"):
            path.unlink(missing_ok=True)


LABEL_READERS: dict[str, Callable[[Folder, bool], Iterator[PublishedLabels]]] = {
    "ptbxl": ptbxl_labels,
    "code15": code15_labels,
    "physionet2021": partial(header_labels, PhysioNet2021, "PhysioNet/CinC Challenge 2021"),
    "ecg-arrhythmia": partial(header_labels, EcgArrhythmia, "ecg-arrhythmia"),
    "physionet2011": physionet2011_labels,
    "mimic-iv-ecg": mimic_labels,
}
