"""Labels and splits of a task, for every crop of its datasets.

    labels = read_task(TaskConfig("rhythm", "multiclass", labels="rhythm.csv"), [Dataset.open("DATASET")])
    labels.y[0], labels.classes         # float32 [crops, K], NaN where unknown; names of the K columns
    labels.rows(0, "train")             # crops of the first dataset in the training split that have a known label
    guess(TaskConfig(labels="my.csv"))  # sets the kind that the columns suggest

A table is CSV (commas, semicolons or tabs) or parquet: `record`, `source` where databases share
names, the labels, and `fold` or `split`. An empty cell is unknown. A record is named as in the
dataset, or by its path in the archive.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import SequenceMatcher
from hashlib import sha256
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.data_tools.ecg.record_tables import (
    RESERVED,
    SHOWN,
    as_text,
    doubtful_patients,
    find,
    index_in,
    missing_words,
    read_table,
    some,
)
from omnilead.data_tools.io.errors import DataError

from ..data.patients import ids_of, owners_of, patient_source, uniforms
from ..data.where import holds
from ..settings.errors import ConfigError, Facts, listed
from .config import TaskConfig, TaskKind
from .kinds import EMPTY, KINDS, Array

SPLITS = ("", "train", "valid", "test")  # by their numbers in TaskLabels.split
TRAIN, TEST = 1, 3
SPLIT_OF = {
    "": 0,
    "train": 1,
    "valid": 2,
    "val": 2,
    "validation": 2,
    "dev": 2,
    "test": 3,
    "gallery": 3,
    "probe": 3,
}
TIMED = ("time", "event")  # columns of survival
OWN_COLUMNS = ("age", "sex")  # a dataset's own columns
NO = ("0", "0.0", "false", "no", "n", "nein", "falsch", "negative", "negativ", "-")
YES = ("1", "1.0", "true", "yes", "y", "ja", "j", "wahr", "positive", "positiv", "+")
BOOLEANS = dict.fromkeys(NO, 0) | dict.fromkeys(YES, 1)
PLAIN = ("0", "0.0", "false", "1", "1.0", "true")  # not worth a remark
INDEX = re.compile(r"|Unnamed: \d+")  # pandas' row numbers
DX_ROLES = "shard --dx-sources names the sources whose records have diagnosis roles"
FEW = 10  # a column of numbers with at most this many values holds classes
MAX_VALUES = 100  # classes of multiclass, and folds
RARE = 5  # fewer examples of a class teach it badly, or are a slip of the pen
UNKNOWN = re.compile("-1|-?9+")  # codes that tables have for it
# What looks like a number, read or not: 63, 1,5, 1.234,5, > 89
NUMERIC = re.compile(r"[<>=~≤≥]*\s*[+-]?\d[\d.,' ]*")


@dataclass(frozen=True, eq=False)
class TaskLabels:
    task: TaskConfig  # with columns, classes and folds filled in
    classes: tuple[str, ...]  # names of the K outputs; empty for identity
    # by dataset [crops, K] float32; multiclass: one-hot; survival: times, negative if censored;
    # identity: patients, int64 [crops]
    y: list[Array]
    split: list[Array]  # by dataset [crops] int8, as in SPLITS; 0 where no label is known
    remarks: list[str] = field(default_factory=list)
    name: str = ""  # of the table in messages; "": the labels are roles of the datasets
    table: pa.Table | None = None  # the columns of the label table that are used, as text
    # By dataset [crops] int64: ids of those who must be in one split, patients (odd) or else records
    patients: list[Array] = field(default_factory=list)
    unknown: tuple[int, int] = (0, 0)  # labelled records without a patient, all labelled records
    row: list[Array] = field(default_factory=list)  # by dataset, each crop's of `table`; -1: none
    left_out: str = ""  # how many crops of train and valid data.where leaves out

    def rows(self, dataset: int, split: str) -> Array:
        return np.flatnonzero(self.split[dataset] == SPLITS.index(split))

    def of(self, split: str) -> Array:
        """The labels of all crops of a split."""
        return np.concatenate([y[self.rows(n, split)] for n, y in enumerate(self.y)])

    @property
    def role(self) -> str:
        """The role, as an argument of Dataset.select, that alone decides the split; "" if labels or
        folds do."""
        if self.task.labels or self.task.columns or self.task.split not in ("auto", "roles"):
            return ""
        return "identity" if self.task.kind == "identity" else "dx"

    @property
    def by_role(self) -> bool:
        """Whether the datasets' roles decide the split, among the labelled crops."""
        return self.task.split == "roles" or (self.task.split == "auto" and not self.task.labels)

    @property
    def units(self) -> str:
        """What is resampled for an interval."""
        without, records = self.unknown
        if not without:
            return "patients"
        return "records" if without == records else "patients (records where they are unknown)"

    @property
    def facts(self) -> Facts:
        """Facts that must not change when a training is resumed, as JSON."""
        task = replace(self.task, labels=self.task.labels.rpartition("/")[2])
        digest = ""
        if not self.role:
            arrays = map(np.ascontiguousarray, [*self.y, *self.split])
            digests = b"".join(sha256(array.data).digest() for array in arrays)
            digest = sha256(digests).hexdigest()
        facts = {
            "definition": asdict(task),
            "classes": self.classes,
            "sha256": digest,
            "unknown_patients": self.unknown,
        }
        as_json: Facts = json.loads(json.dumps(facts))
        return as_json


class LabelTable(NamedTuple):
    # in messages; also says so if few of its records are in the data, the likely cause of any error
    name: str
    cells: pa.Table  # of text, null: unknown
    row: list[Array]  # by dataset, the row of each crop; -1: none
    remarks: list[str]


def read_task(task: TaskConfig, datasets: Sequence[Dataset], where: str = "") -> TaskLabels:
    """Reads labels and splits; ConfigError if the table does not fit the task or the datasets.
    `where`: data.where, of what is in train and valid."""
    if task.kind == "identity" or not (task.labels or task.columns):
        labels = _of_roles(task, datasets)
    else:
        labels = _of_columns(task, datasets, where)
    if not where:
        return labels
    split, crops = [], 0
    for n, dataset in enumerate(datasets):
        cells = None
        if labels.table:
            cells = labels.table.take(pa.array(labels.row[n], mask=labels.row[n] < 0))
        out_N = (labels.split[n] < TEST) & ~holds(dataset, where, cells)
        crops += int((labels.split[n][out_N] > 0).sum())
        split.append(np.where(out_N, np.int8(0), labels.split[n]))
    left_out = f", data.where={where!r} leaves out {crops:,} crops"
    return replace(labels, split=split, left_out=left_out)


def _of_columns(task: TaskConfig, datasets: Sequence[Dataset], where: str) -> TaskLabels:
    if task.kind == "survival" and not task.columns:
        task = replace(task, columns=TIMED)
    table = _joined(task, datasets, where) if task.labels else _own_columns(task, datasets)
    task = replace(task, columns=_columns(task, table.name, table.cells))
    if task.kind != "multiclass" or task.classes:
        table = _without_words(table, task.columns, task.classes)
    folds = [name for name in ("fold", "split") if name in table.cells.column_names]
    table = _without_words(table, folds)
    task, classes, y_NK = _values(task, table)
    y_NK = np.append(y_NK, np.full((1, y_NK.shape[1]), np.nan, np.float32), axis=0)  # row -1
    y = [y_NK[row] for row in table.row]
    known = _known(task, table, y)
    people = _people(table, datasets)
    task, split_N, remarks = _splits(task, table, datasets, known, people)
    unknown = _unknown(datasets, known, people)
    remarks = [*table.remarks, *remarks, *unknown_patients(unknown)]
    remarks += _doubtful_patients(people, known)
    remarks += _doubtful_classes(task, table, y_NK) + _codes_of_unknown(task, table)
    remarks += _counted(task, table, y_NK) + _words_read(task, table)
    split = by_dataset(np.where(known, split_N, 0).astype(np.int8), datasets)
    patients = ids_of(datasets, people.owner_N, people.known_N)
    used_cells = None
    if task.labels:
        kept = (*RESERVED, *task.columns)
        used = [name for name in table.cells.column_names if name in kept or name in where]
        used_cells = table.cells.select(used)
    return TaskLabels(
        task, classes, y, split, remarks, table.name, used_cells, patients, unknown, table.row
    )


def _maybe_missing(column: pa.ChunkedArray, beside_plus: bool) -> pa.ChunkedArray:
    """Which cells hold a word that may mean that there is no value. In a table with +, - is no."""
    is_word = missing_words(column)
    if beside_plus:
        is_word = pc.and_not(is_word, pc.fill_null(pc.equal(column, "-"), False))
    return is_word


def _has_plus(cells: pa.Table, columns: Sequence[str]) -> bool:
    return any(pc.any(pc.equal(cells[name], "+")).as_py() for name in columns)


def _without_words(
    table: LabelTable, names: Sequence[str], classes: Sequence[str] = ()
) -> LabelTable:
    """Words such as NA are empty cells in these columns, unless they are among the classes. Remarks say
    so."""
    cells, remarks = table.cells, list(table.remarks)
    beside_plus = _has_plus(cells, [name for name in names if name in cells.column_names])
    for place, name in enumerate(cells.column_names):
        if name not in names:
            continue
        named = pc.is_in(cells[name], pa.array(classes, pa.string()))
        is_word = pc.and_not(_maybe_missing(cells[name], beside_plus), named)
        words = cells[name].filter(is_word)
        if not len(words):
            continue
        cells = cells.set_column(place, name, pc.if_else(is_word, None, cells[name]))
        remarks.append(
            f"{table.name}: {_quoted(words)} in column {name!r} ({len(words):,} rows) is taken for an "
            "empty cell, which is unknown: if it means something else, write that"
        )
    return table._replace(cells=cells, remarks=remarks)


def _quoted(words: pa.ChunkedArray) -> str:
    return listed([repr(word) for word in sorted(words.unique().to_pylist())], SHOWN)


def _known(task: TaskConfig, table: LabelTable, y: list[Array]) -> Array:
    """Which crops of all datasets have a label."""
    known = np.concatenate([~np.isnan(one).all(1) for one in y])
    if not known.any():
        raise ConfigError(
            f"{table.name}: no record has a known label in {', '.join(task.columns)}: fill in the "
            "cells"
        )
    return known


def _doubtful_classes(task: TaskConfig, table: LabelTable, y_NK: Array) -> list[str]:
    """Classes that may be misspelt, and those with too few records to learn or to score."""
    if not task.labels or not KINDS[task.kind].of_classes:
        return []
    classes = task.classes or task.columns
    used = np.unique(np.concatenate(table.row))
    positive = (y_NK[used] > 0).sum(0).tolist()
    records = dict(zip(classes, positive, strict=True))
    remarks = []
    for one, other in combinations(classes, 2):
        few, many = sorted((one, other), key=records.__getitem__)
        if _alike(few, many) and records[few] < max(RARE, records[many] / 10):
            spelt = f"{few!r} ({records[few]:,} records) and {many!r} ({records[many]:,})"
            remarks.append(f"{task.labels}: are {spelt} the same class? They are trained as two")
    negative = (y_NK[used] == 0).sum(0)
    never = [name for name, count in zip(classes, negative, strict=True) if not count]
    if never and task.kind != "multiclass":
        remarks.append(f"{task.labels}: no record is 0 in {listed(never, SHOWN)}: {EMPTY}")
    rarest_first = sorted(classes, key=records.__getitem__)
    rare = [f"{name} ({records[name]})" for name in rarest_first if records[name] < RARE]
    if rare:
        named = listed(rare, SHOWN)
        remarks.append(
            f"{task.labels}: fewer than {RARE} records are positive in {named}: "
            "too few to learn or to choose a threshold by"
        )
    return remarks


def _counted(task: TaskConfig, table: LabelTable, y_NK: Array) -> list[str]:
    """What the labels are taken for, and how many records have each."""
    if not task.labels:
        return []
    rows = np.unique(np.concatenate(table.row))
    y_NK = y_NK[rows[rows >= 0]]
    unknown = int(np.isnan(y_NK).all(1).sum())
    positive = (y_NK > 0).sum(0)
    if task.kind == "binary":
        counts = f"{positive[0]:,} yes, {int((y_NK == 0).sum()):,} no"
    elif KINDS[task.kind].of_classes:
        names = task.classes or task.columns
        most = sorted(zip(positive.tolist(), names, strict=True), reverse=True)
        counts = listed([f"{name} {count:,}" for count, name in most], SHOWN)
    elif task.kind == "survival":
        counts = f"{positive[0]:,} with the event, {int((y_NK < 0).sum()):,} without"
    else:
        counts = f"{len(y_NK) - unknown:,} from {np.nanmin(y_NK):g} to {np.nanmax(y_NK):g}"
    return [
        f"{task.labels}: {', '.join(task.columns[:SHOWN])}{', ...' * (len(task.columns) > SHOWN)}: "
        f"{task.kind}: {counts}, {unknown:,} unknown"
    ]


def _words_read(task: TaskConfig, table: LabelTable) -> list[str]:
    """Which words were taken for 0 and which for 1."""
    if task.kind == "multiclass":
        return []
    cells = {str(cell).lower() for name in task.columns for cell in table.cells[name].unique()}
    said = [
        f"{word} is {value}"
        for word, value in BOOLEANS.items()
        if word in cells and word not in PLAIN
    ]
    return [f"{task.labels}: {', '.join(said)}"] if said else []


def _codes_of_unknown(task: TaskConfig, table: LabelTable) -> list[str]:
    """Numbers such as -9 or 999, apart from all others."""
    if not task.labels or task.kind not in ("multiclass", "regression"):
        return []
    remarks = []
    for name in task.columns:
        values = pc.unique(table.cells[name]).drop_null().to_pylist()
        if len(values) < 3 or not _numbers(values):
            continue
        numbers = sorted(map(float, values))
        low, high = numbers[0], numbers[-1]
        codes = [low] if low < 0 <= numbers[1] else []
        if high - numbers[-2] > numbers[-2] - low:
            codes.append(high)
        remarks += [
            f"{task.labels}: does {code:g} in column {name!r} mean unknown? Then leave these cells "
            "empty"
            for code in codes
            if UNKNOWN.fullmatch(f"{code:g}")
        ]
    return remarks


def _alike(one: str, other: str) -> bool:
    """Whether two names differ in case, or in one letter of at least five. Digits count: grade1 is
    not grade2."""
    if one.casefold() == other.casefold():
        return True
    shorter, digits = min(len(one), len(other)), re.compile(r"\D")
    if shorter < 5 or digits.sub("", one) != digits.sub("", other):
        return False
    return SequenceMatcher(None, one, other).ratio() >= 1 - 1 / shorter


def _of_roles(task: TaskConfig, datasets: Sequence[Dataset]) -> TaskLabels:
    """The paper's tasks: labels and splits are in the dataset."""
    identity = task.kind == "identity"
    if identity and (task.labels or task.columns):
        raise ConfigError(
            f"task.kind=identity: its labels are the dataset's patients, not "
            f"{task.labels or task.columns}"
        )
    if task.kind not in ("identity", "multilabel"):
        raise ConfigError(
            f"task.kind={task.kind}: name a label table: --labels my.csv, or --set "
            "task.columns=[age]"
        )
    if task.split not in ("auto", "roles"):
        raise ConfigError(
            f"task.split={task.split}: the split of a label table: name one with --labels, or use "
            "roles"
        )
    split = _by_role(datasets, "id_role" if identity else "dx_role")
    people = People(*owners_of(datasets))
    patients = ids_of(datasets, people.owner_N, people.known_N)
    doubtful = _doubtful_patients(people, np.concatenate(split) > 0)
    if identity:
        return TaskLabels(task, (), patients, split, doubtful, patients=patients)
    y = [dataset.labels.astype(np.float32) for dataset in datasets]
    unknown = _unknown(datasets, np.concatenate(split) > 0, people)
    remarks = unknown_patients(unknown) + doubtful
    return TaskLabels(task, CLASSES, y, split, remarks, patients=patients, unknown=unknown)


class People(NamedTuple):
    """Who must be in one split: the patients, or where they are unknown the records."""

    names: pa.Array
    owner_N: Array  # of each crop of all datasets, the index of its owner in `names`
    known_N: Array  # whether that is a patient


def _people(table: LabelTable, datasets: Sequence[Dataset]) -> People:
    """A column `patient` of the label table counts where a dataset knows no patient."""
    people = People(*owners_of(datasets))
    if people.known_N.all() or "patient" not in table.cells.column_names:
        return people
    cells = table.cells["patient"].combine_chunks()
    row_N = np.concatenate(table.row)
    given_N = (row_N >= 0) & ~people.known_N
    given_N[given_N] = cells.is_valid().to_numpy(zero_copy_only=False)[row_N[given_N]]
    source = pa.concat_tables([dataset.table(["source"]) for dataset in datasets])["source"]
    named = pc.binary_join_element_wise(
        patient_source(source.filter(pa.array(given_N)).combine_chunks()),
        cells.take(pa.array(row_N[given_N])),
        "/",
    ).dictionary_encode()
    every = pa.concat_arrays([people.names, named.dictionary]).dictionary_encode()
    owner_N = every.indices.to_numpy()[people.owner_N]
    owner_N[given_N] = every.indices.to_numpy()[len(people.names) + named.indices.to_numpy()]
    return People(every.dictionary, owner_N, people.known_N | given_N)


def _unknown(datasets: Sequence[Dataset], known: Array, people: People) -> tuple[int, int]:
    """How many labelled records have no patient, and how many there are."""
    record_N = data_records(datasets).key_of_crop
    without = len(np.unique(record_N[known & ~people.known_N]))
    return without, len(np.unique(record_N[known]))


def unknown_patients(unknown: Sequence[int]) -> list[str]:
    without, records = unknown
    if not without:
        return []
    return [
        f"patients unknown for {without:,} of {records:,} records: split by record, scores may be "
        "too high"
    ]


def _doubtful_patients(people: People, known: Array) -> list[str]:
    """`known`: the crops that have a label."""
    owners = np.unique(people.owner_N[known & people.known_N])
    doubt = doubtful_patients(people.names.take(pa.array(owners)))
    return [doubt] if doubt else []


def _own_columns(task: TaskConfig, datasets: Sequence[Dataset]) -> LabelTable:
    if unknown := [name for name in task.columns if name not in OWN_COLUMNS]:
        raise ConfigError(
            f"task.columns: {unknown[0]!r} is not in the dataset, which has age and sex: name a "
            "table: --labels"
        )
    cells = pa.concat_tables([dataset.table(["record", *task.columns]) for dataset in datasets])
    rows = by_dataset(np.arange(len(cells)), datasets)
    return LabelTable(datasets[0].root.url, as_text(cells), rows, [])


def by_dataset(values_N: Array, datasets: Sequence[Dataset]) -> list[Array]:
    """The values of each dataset's crops, of those of all crops."""
    ends = np.cumsum([len(dataset) for dataset in datasets])[:-1]
    return np.split(values_N, ends)


def choosing(columns: Sequence[str]) -> str:
    """What to type for these label columns; commands with several tasks have no --columns."""
    return f"--columns {' '.join(columns)}, or columns: [{', '.join(columns)}] in a YAML task"


def guess(task: TaskConfig) -> TaskConfig:
    """Sets the kind that the label columns suggest."""
    cells = _read(task)
    columns = _columns(task, task.labels, cells)
    values, words = {}, {}
    beside_plus = _has_plus(cells, columns)
    for name in columns:
        is_word = _maybe_missing(cells[name], beside_plus)
        values[name] = pc.drop_null(cells[name].filter(pc.invert(is_word))).unique().to_pylist()
        words[name] = cells[name].filter(is_word)
    filled = [name for name in columns if values[name]]
    text = [name for name in filled if not _numbers(values[name])]
    of_two = [name for name in filled if {value.lower() for value in values[name]} <= {*BOOLEANS}]
    others: Sequence[str] = of_two or [name for name in columns if name not in text]
    if {*TIMED} < {*columns}:
        others = TIMED
    odd = next((name for name in filled if name not in others), "")
    kind: TaskKind = "regression"
    if set(columns) == set(TIMED):
        return replace(task, kind="survival", columns=TIMED)
    if of_two == filled:
        kind = "binary" if len(columns) == 1 else "multilabel"
    elif len(columns) == 1 and (text or len(values[columns[0]]) <= FEW):
        kind = "multiclass"
        _require_classes(f"{task.labels}: column {columns[0]!r}", values[columns[0]])
        _refuse_a_third(f"{task.labels}: column {columns[0]!r}", cells[columns[0]])
    elif odd:
        mend = f"leave it out: {choosing(others)}"
        if not text:
            mend += "; or choose the kind: --kind regression"
        elif not others:
            mend = (
                f"for texts as classes, choose one column: {choosing(text[:1])}; else write 0 and 1"
            )
        others_here = [value for value in values[odd] if value.lower() not in BOOLEANS]
        culprit = (others_here or values[odd])[0]
        raise ConfigError(
            f"{task.labels}: column {odd!r} holds {'texts' if odd in text else 'numbers'} such "
            f"as {culprit[:40]!r}, not {'0 and 1' if of_two else '0, 1 or numbers'}: {mend}"
        )
    doubtful = [name for name in columns if len(words[name])]
    if doubtful and kind != "multiclass":
        name = doubtful[0]
        raise ConfigError(
            f"{task.labels}: {_quoted(words[name])} in column {name!r} ({len(words[name]):,} rows): is "
            f"it unknown, or a class? Choose the kind: --kind {kind} if it is unknown, --kind multiclass "
            "if it is a class (in a YAML task: kind)"
        )
    return replace(task, kind=kind, columns=columns)


def _require_classes(column: str, values: Sequence[str]) -> None:
    """Refuses to take a column of numbers for classes because some cells are not read as one."""
    numeric = [value for value in values if NUMERIC.fullmatch(value)]
    unread = [value for value in values if not _numbers([value])]
    if numeric and unread:
        read = next((value for value in numeric if value not in unread), numeric[0])
        raise ConfigError(
            f"{column} is neither numbers nor classes: it holds {read[:40]!r} and "
            f"{unread[0][:40]!r}: write numbers with a point and leave unknown cells empty, or "
            "choose the kind: --kind multiclass"
        )
    if unread and len(values) > FEW and all(value[0].isdigit() for value in values):
        raise ConfigError(
            f"{column} holds numbers followed by something else, such as {values[0][:40]!r}: leave "
            "the unit out, or choose the kind: --kind multiclass"
        )


def _refuse_a_third(column: str, cells: pa.ChunkedArray) -> None:
    """Refuses to guess what a value means that stands beside yes and no. 0, 1, 2, ... are classes."""
    counts = Counter(cells.drop_null().to_pylist())
    others = [value for value in counts if value.lower() not in BOOLEANS]
    sides = {BOOLEANS.get(value.lower()) for value in counts}
    numbers = sorted(map(float, counts)) if _numbers([*counts]) else []
    if len(sides) < 3 or numbers == list(range(len(counts))):
        return
    shown = listed([f"{value[:40]!r} in {n:,} rows" for value, n in counts.most_common()], FEW)
    raise ConfigError(
        f"{column} holds {shown}: does {listed([repr(one[:40]) for one in others], SHOWN)} mean unknown? "
        "Then leave these cells empty. If it is a class, choose the kind: --kind multiclass (in a YAML "
        "task: kind)"
    )


def _read(task: TaskConfig, where: str = "") -> pa.Table:
    used = task.columns and (*task.columns, *re.findall(r"\w+", where))
    try:
        return read_table(task.labels, used=used)
    except DataError as error:
        raise ConfigError(str(error)) from None


def _columns(task: TaskConfig, name: str, cells: pa.Table) -> tuple[str, ...]:
    others = (column for column in cells.column_names if column not in RESERVED)
    every = tuple(column for column in others if not INDEX.fullmatch(column))
    absent = [column for column in task.columns if column not in every]
    if not every and not absent:
        absent = ["of labels"]
    if absent:
        raise ConfigError(
            f"{name}: no column {absent[0]!r}: its label columns are {', '.join(every) or 'none'}"
        )
    return task.columns or every


def _joined(task: TaskConfig, datasets: Sequence[Dataset], where: str) -> LabelTable:
    """Finds the table's row for each crop by the name of its record."""
    url, cells = task.labels, _read(task, where)
    data = data_records(datasets)
    try:
        matches = find(url, cells, data.keys, data.names)
    except DataError as error:
        raise ConfigError(f"{error}{_pseudonyms(url, datasets)}") from None
    remarks, name = [], url
    if matches.missing:
        remarks.append(f"{url}: {matches.missing}")
        if matches.mostly:
            examples = ", ".join(data.names[:SHOWN].to_pylist())
            name = (
                f"{remarks[0]}, which has {examples}, ...: check that the table belongs to the data"
            )
            remarks[0] += _pseudonyms(url, datasets)
    bare = np.flatnonzero(matches.row < 0)
    if len(bare):
        all_records = f"{len(data.keys):,} records of the data"
        remarks.append(f"{url}: has no row for {some(bare, data.keys)} of {all_records}")
    return LabelTable(name, cells, by_dataset(matches.row[data.key_of_crop], datasets), remarks)


def _pseudonyms(url: str, datasets: Sequence[Dataset]) -> str:
    """What to do if the data do not have the names that a table has."""
    if not any(one.meta.get("pseudonyms") for one in datasets):
        return ""
    return (
        f"; the data have pseudonyms: omnilead labels table {url} --out DIR --pseudonymize KEYFILE "
        "writes the table with them"
    )


class DataRecords(NamedTuple):
    """The records of some datasets, each once."""

    keys: pa.Array  # source/record
    names: pa.Array  # record
    key_of_crop: Array  # indices into both


def data_records(datasets: Sequence[Dataset]) -> DataRecords:
    crops = pa.concat_tables([dataset.table(["source", "record"]) for dataset in datasets])
    key = pc.binary_join_element_wise(crops["source"], crops["record"], "/")
    key = key.combine_chunks().dictionary_encode()
    key_of_crop = key.indices.to_numpy()
    first = np.unique(key_of_crop, return_index=True)[1]
    names = crops["record"].take(pa.array(first)).combine_chunks()
    return DataRecords(key.dictionary, names, key_of_crop)


def _numbers(values: Sequence[str]) -> bool:
    try:
        return bool(np.isfinite([float(value) for value in values]).all())
    except ValueError:
        return False


def _in_order(values: Sequence[str]) -> list[str]:
    return sorted(values, key=(lambda value: (float(value), value)) if _numbers(values) else None)


def _values(task: TaskConfig, table: LabelTable) -> tuple[TaskConfig, tuple[str, ...], Array]:
    """The task with its classes, the names of the K outputs, and y [rows, K]."""
    if KINDS[task.kind].one_column and len(task.columns) != 1:
        raise ConfigError(
            f"{table.name}: a {task.kind} task has one column, not {', '.join(task.columns)}: "
            f"{choosing(['NAME'])}"
        )
    if task.kind == "multiclass":
        return _one_hot(task, table)
    if task.kind == "survival":
        return task, ("risk",), _signed_times(task, table)
    y = [_parsed(task.kind, table, name) for name in task.columns]
    return task, task.columns, np.stack(y, axis=1)


def _one_hot(task: TaskConfig, table: LabelTable) -> tuple[TaskConfig, tuple[str, ...], Array]:
    (name,) = task.columns
    column = table.cells[name].combine_chunks()
    used = np.isin(np.arange(len(column)), np.concatenate(table.row))
    classes = task.classes
    if not classes:
        of_data = pc.drop_null(column.filter(pa.array(used)))
        classes = tuple(_in_order(of_data.unique().to_pylist()))
        _ask_of_words(table, name, of_data, classes)
    if len(classes) > MAX_VALUES:
        raise ConfigError(
            f"{table.name}: {name} has {len(classes):,} values: use at most {MAX_VALUES} classes"
        )
    code = index_in(column, pa.array(classes, pa.string()))
    unknown = used & (code < 0) & column.is_valid().to_numpy(zero_copy_only=False)
    if unknown.any():
        cell = _cell(table, name, int(unknown.argmax()))
        raise ConfigError(f"{cell} is not one of its classes {', '.join(classes)}")
    y_NK = (code[:, None] == np.arange(len(classes))).astype(np.float32)
    y_NK[code < 0] = np.nan
    return replace(task, classes=classes), classes, y_NK


def _ask_of_words(table: LabelTable, name: str, cells: pa.Array, classes: Sequence[str]) -> None:
    """An error if a class may be a word for a missing value: only the user knows."""
    words = cells.filter(missing_words(cells))
    if not len(words):
        return
    others = [one for one in classes if one not in words.unique().to_pylist()]
    both, without = (
        json.dumps(some, ensure_ascii=False) if len(some) <= FEW else "[...]"
        for some in (list(classes), others)
    )
    raise ConfigError(
        f"{table.name}: {_quoted(words)} in column {name!r} ({len(words):,} rows): is it a class, or "
        f"unknown? Set task.classes, which names all classes: --set 'task.classes={both}' if it is "
        f"one, --set 'task.classes={without}' if it is unknown"
    )


def _signed_times(task: TaskConfig, table: LabelTable) -> Array:
    """[rows, 1]: the time of the event; negative: of the last contact without it."""
    if len(task.columns) != 2:
        raise ConfigError(
            f"{table.name}: a survival task has two columns, the time and whether the event "
            f"happened then, not {', '.join(task.columns)}: "
            f"{choosing(['TIME', 'EVENT'])}"
        )
    time_N = _parsed("survival", table, task.columns[0])
    event_N = _parsed("binary", table, task.columns[1])
    sign_N = 2 * event_N - 1
    return np.asarray((time_N * sign_N)[:, None])


def _parsed(kind: TaskKind, table: LabelTable, name: str) -> Array:
    coded = table.cells[name].combine_chunks().dictionary_encode()
    values, mend = [], "0 or 1, true or false, yes or no"
    if not KINDS[kind].of_classes:
        mend = "a number" if kind == "regression" else "a number above 0"
    for text in coded.dictionary.to_pylist():
        if KINDS[kind].of_classes:
            values.append(BOOLEANS.get(text.lower(), np.inf))
        else:
            values.append(float(text) if _numbers([text]) else np.inf)
    with np.errstate(over="ignore"):  # too large for float32: infinite, which is refused
        numbers = np.array([*values, np.nan], np.float32)
    number_N = numbers[pc.fill_null(coded.indices, len(values)).to_numpy(zero_copy_only=False)]
    wrong_N = np.isinf(number_N)
    if kind == "survival":
        wrong_N |= number_N <= 0
    if wrong_N.any():
        raise ConfigError(
            f"{_cell(table, name, int(wrong_N.argmax()))} is not {mend}; leave it empty if unknown"
        )
    return np.asarray(number_N)


def _cell(table: LabelTable, column: str, row: int) -> str:
    return (
        f"{table.name}: column {column!r} of record {table.cells['record'][row]}: "
        f"{str(table.cells[column][row])[:40]!r}"
    )


def _coded(split: pa.ChunkedArray) -> Array:
    """Split names as numbers: 0 where there is none, -1 if the name is unknown."""
    known = index_in(pc.utf8_lower(pc.fill_null(split, "")), pa.array(SPLIT_OF))
    return np.asarray(np.array([*SPLIT_OF.values(), -1], np.int8)[known])


def _splits(
    task: TaskConfig,
    table: LabelTable,
    datasets: Sequence[Dataset],
    known: Array,
    people: People,
) -> tuple[TaskConfig, Array, list[str]]:
    """The task with its folds, the split of each crop of all datasets, and remarks."""
    columns = [name for name in ("fold", "split") if name in table.cells.column_names]
    how = task.split
    if how == "auto":
        how = "8:1:1" if task.labels else "roles"
        if columns:
            how = "column"
    if how == "roles":
        return task, np.concatenate(_by_role(datasets, "dx_role")), []
    if how == "column" and not columns:
        raise ConfigError(
            f"{table.name}: task.split=column, but it has neither `fold` nor `split`: use "
            "task.split=8:1:1"
        )
    if how == "column":
        task, split = _by_column(task, table, columns[0], known, people)
    else:
        task = replace(task, folds={})
        # first come those whom data.hold_out holds out: test
        split = 3 - np.digitize(uniforms(people.names), (0.1, 0.2))[people.owner_N]
    without_copies = _without_copies(split, datasets, known)
    remarks = []
    if left_out := int((without_copies != split).sum()):
        remarks.append(f"{left_out:,} crops are left out: copies of ECGs in valid or test")
    if nowhere := int((known & (split == 0)).sum()):
        remarks.append(
            f"{nowhere:,} crops are left out: their {columns[0]} does not belong to train, valid or test"
        )
    return task, without_copies, remarks


def _without_copies(split: Array, datasets: Sequence[Dataset], known: Array) -> Array:
    """Copies of test ECGs are not used for training or validation, nor those of validation ECGs
    for training: their split becomes 0."""
    waveform = np.concatenate([dataset.column("waveform") for dataset in datasets])
    split = split.copy()
    for side in (3, 2):
        held_out = waveform[known & (split == side)]
        earlier = (split > 0) & (split < side) & known
        split[earlier & np.isin(waveform, held_out)] = 0
    return split


def _by_role(datasets: Sequence[Dataset], role: str) -> list[Array]:
    return [_coded(dataset.table([role])[role]) for dataset in datasets]


def _by_column(
    task: TaskConfig,
    table: LabelTable,
    column: str,
    known: Array,
    people: People,
) -> tuple[TaskConfig, Array]:
    """The task with its folds, and the split of each crop. A patient in two folds is an error."""
    cells = table.cells[column].combine_chunks().dictionary_encode()
    values: list[str] = cells.dictionary.to_pylist()
    if len(values) > MAX_VALUES:
        raise ConfigError(
            f"{table.name}: {column} has {len(values):,} values: use at most {MAX_VALUES}"
        )
    if column == "split":
        number = _coded(pa.chunked_array([cells.dictionary]))
        if (number < 0).any():
            raise ConfigError(
                f"{table.name}: split {values[int(number.argmin())]!r}: write train, valid or test"
            )
    else:
        task = replace(task, folds=task.folds or _last_folds(table.name, values))
        number = _folds(task, values)
    none = len(values)  # the code of an empty cell, and of a crop without a row
    code_of_row = pc.fill_null(cells.indices, none).to_numpy(zero_copy_only=False)
    code_N = np.append(code_of_row, none)[np.concatenate(table.row)]
    seen = np.zeros((len(people.names), none + 1), bool)  # which patient is in which fold
    seen[people.owner_N[known], code_N[known]] = True
    seen[:, none] = False
    twice = np.flatnonzero(seen.sum(1) > 1)
    if len(twice):
        folds = " and ".join(values[fold] for fold in np.flatnonzero(seen[twice[0]])[:2])
        raise ConfigError(
            f"{table.name}: patient {people.names[int(twice[0])]} is in {column}s {folds}: put each "
            "patient in one"
        )
    return task, np.append(number, 0)[code_N]


def _last_folds(name: str, values: list[str]) -> Any:
    """task.folds if none are given: the last is test, the one before it valid."""
    ordered = _in_order(values)
    if len(ordered) < 3:
        raise ConfigError(
            f"{name}: folds {', '.join(ordered)}: at least 3 are needed, for train, valid and test"
        )
    return {
        "train": tuple(ordered[:-2]),
        "valid": tuple(ordered[-2:-1]),
        "test": tuple(ordered[-1:]),
    }


def _folds(task: TaskConfig, values: list[str]) -> Array:
    """The split of each value; 0 where task.folds does not name it."""
    split_of = {fold: SPLIT_OF[split] for split, of in task.folds.items() for fold in of}
    # pandas writes whole numbers as 1.0 in a column with empty cells
    splits = [split_of.get(v, split_of.get(v.removesuffix(".0"), 0)) for v in values]
    return np.array(splits, np.int8)
