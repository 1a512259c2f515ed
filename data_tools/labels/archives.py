"""Labels that archives publish directly: PTB-XL, CODE-15 % and the PhysioNet/CinC Challenge
2021."""

import posixpath
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from omnilead.data_tools.errors import ReadError, StorageError
from omnilead.data_tools.labels import UNKNOWN, PublishedLabels
from omnilead.data_tools.record import (
    CLASSES,
    as_number,
    class_row,
    clean_age,
    only_codes,
    parse_dx,
)
from omnilead.data_tools.sources import PhysioNet2021
from omnilead.data_tools.sources.base import read_safely, read_table
from omnilead.data_tools.sources.code15 import MAX_TABLE, TABLE
from omnilead.data_tools.sources.physionet2021 import TABLE_PLACES
from omnilead.data_tools.sources.ptbxl import statements
from omnilead.data_tools.sources.wfdb_header import MAX_BYTES, parse_header
from omnilead.data_tools.sources.wfdb_signals import own_name
from omnilead.data_tools.storage import Folder, links_in, prefetch

_TRUTH = {"true": 1, "1": 1, "1.0": 1, "false": 0, "0": 0, "0.0": 0}
SUPERCLASSES = {
    "MI": "myocardial infarction",
    "STTC": "ST/T change",
    "CD": "conduction disturbance",
    "HYP": "hypertrophy",
}
CODE15 = {
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
Labels = dict[str, tuple[str, np.ndarray]]  # meaning and values
_SETS = ("diagnostic", "form", "rhythm")
_CLASSES = {"subdiagnostic": "diagnostic_subclass", "superdiagnostic": "diagnostic_class"}


def ptbxl(root: Folder, quiet: bool) -> Iterator[PublishedLabels]:
    """The label sets of PTB-XL's benchmark (Strodthoff et al. 2020,
    doi:10.1109/JBHI.2020.3022989). As there, statements count at any likelihood, a set omits
    records without one of its labels, and labels are in alphabetical order."""
    read, known, records, fold, likelihood = _ptbxl_tables(root)
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
        yield PublishedLabels(name, about, read, "ptb-xl", records[kept], chosen, fold[kept])
    about = (
        "PTB-XL, likelihood of each statement in per cent: 0 if it is stated without one, empty "
        "if it is not stated"
    )
    percents = {}
    for column, (name, row) in zip(likelihood.T, known.items(), strict=True):
        percents[name] = (row["description"], column)
    yield PublishedLabels("ptbxl-likelihood", about, read, "ptb-xl", records, percents, fold)


class _PtbXlTables(NamedTuple):
    read: tuple[str, str]  # the files
    known: dict[str, dict[str, str]]  # scp_statements.csv by statement
    records: np.ndarray
    fold: np.ndarray
    likelihood: np.ndarray  # float32 [records, statements], NaN if not stated


def _ptbxl_tables(root: Folder) -> _PtbXlTables:
    place = next((place for place in TABLE_PLACES if root.exists(place)), TABLE_PLACES[0])
    read = (place, posixpath.join(posixpath.dirname(place), "scp_statements.csv"))
    if not root.exists(read[1]):
        raise StorageError(f"{root.url}: no {read[1]}: copy it from PTB-XL's release")
    columns = ("", "description", *_SETS, *_CLASSES.values())
    known = {row[""]: row for row in read_table(root, read[1], MAX_TABLE, columns)}
    rows = list(read_table(root, place, MAX_TABLE, ("ecg_id", "scp_codes", "strat_fold")))
    records = np.array([f"HR{row['ecg_id'].removesuffix('.0'):0>5}" for row in rows])
    fold = np.array([as_number(row["strat_fold"]) for row in rows])
    if not np.isin(fold, np.arange(1, 11)).all():
        raise StorageError(
            f"{root.url}/{place}: strat_fold is not 1 to 10 in every row: restore the file"
        )
    likelihood = np.full((len(rows), len(known)), np.nan, np.float32)
    for i, row in enumerate(rows):
        given = statements(row["scp_codes"])
        likelihood[i] = [given.get(name, np.nan) for name in known]
    return _PtbXlTables(read, known, records, fold, likelihood)


def _labels_of_set(
    known: dict[str, dict[str, str]], label_of: dict[str, str], is_stated: np.ndarray
) -> Labels:
    """The labels of a set, in alphabetical order. `is_stated` [records, statements]."""
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
    """For each label set the label that a statement has there."""
    sets = {"all": {name: name for name in known}}
    for kind in _SETS:
        sets[kind] = {name: name for name, row in known.items() if _TRUTH.get(row[kind]) == 1}
    for kind, column in _CLASSES.items():
        sets[kind] = {name: known[name][column] for name in sets["diagnostic"]}
    return sets


def code15(root: Folder, quiet: bool) -> Iterator[PublishedLabels]:
    """The columns of exams.csv (Ribeiro et al. 2021, doi:10.5281/zenodo.4916206). No folds are
    published: split by patient."""
    rows = list(read_table(root, TABLE, MAX_TABLE, ("exam_id", *CODE15, "age", "timey")))
    records = [row["exam_id"] for row in rows]
    labels: Labels = {}
    for name, means in CODE15.items():
        values = [_TRUTH.get(row[name].lower(), UNKNOWN) for row in rows]
        labels[name] = (means, np.array(values, np.int8))
    ages = np.array([clean_age(row["age"]) for row in rows], np.float32)
    years = np.array([as_number(row["timey"]) for row in rows], np.float32)
    labels["age"] = ("age in years, 90 for all over 89", ages)
    labels["timey"] = ("years to death or to the last contact", years)
    about = "CODE-15 %, labels of exams.csv"
    yield PublishedLabels("code15", about, (TABLE,), "code15", records, labels)


def physionet2021(root: Folder, quiet: bool) -> Iterator[PublishedLabels]:
    """Labels from the `Dx` line of every header: the 26 scored diagnoses, and all SNOMED CT
    codes."""
    source = PhysioNet2021(root)
    keys = [key for key in source.keys() if key.endswith(".hea")]  # noqa: SIM118
    read = partial(read_safely, partial(_diagnoses, root))
    headers = prefetch(read, keys) if root.remote else map(read, keys)
    headers = tqdm(headers, total=len(keys), unit=" headers", disable=quiet)
    # Of records with the same name the first counts, as in a dataset
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for key, found in zip(keys, headers, strict=True):
        if not isinstance(found, ReadError):
            name, dx = found
            rows.setdefault((source.source_of(key), name), dx)
    if not rows:
        raise StorageError(f"{root.url}: no readable header of the Challenge{links_in(root)}")
    sources, records = zip(*rows, strict=True)
    unread = len(keys) - len(rows)
    note = f" ({unread} of {len(keys)} headers are unreadable or duplicates)" if unread else ""
    about = "PhysioNet/CinC Challenge 2021, {} of the headers" + note
    diagnoses = list(rows.values())
    what = about.format("the 26 scored diagnoses")
    labels = _scored(diagnoses)
    yield PublishedLabels("physionet2021-scored", what, (), sources, records, labels)
    what = about.format("all SNOMED CT codes")
    labels = _every_code(diagnoses)
    yield PublishedLabels("physionet2021-all", what, (), sources, records, labels)


def _scored(diagnoses: list[tuple[str, ...]]) -> Labels:
    is_scored = np.array([class_row(dx) for dx in diagnoses], np.int8).T
    labels: Labels = {}
    for (name, codes), values in zip(CLASSES, is_scored, strict=True):
        labels[name] = (f"SNOMED CT {' or '.join(codes)}", values)
    return labels


def _every_code(diagnoses: list[tuple[str, ...]]) -> Labels:
    labels: Labels = {}
    for code in sorted({code for dx in diagnoses for code in dx}):
        has = [code in dx for dx in diagnoses]
        labels[code] = (f"SNOMED CT {code}", np.array(has, np.int8))
    return labels


def _diagnoses(root: Folder, key: str) -> tuple[str, tuple[str, ...]]:
    header = parse_header(root.read(key, MAX_BYTES))
    return own_name(header.name, key), only_codes(parse_dx(header.dx))[0]
