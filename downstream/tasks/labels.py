"""Reads the labels and splits of a task, for every crop of its datasets.

    labels = read_task(TaskConfig("rhythm", "multiclass", labels="rhythm.csv"), [Dataset.open("DATASET")])
    labels.y[0], labels.classes         # float32 [crops, K], NaN where unknown; names of the K columns
    labels.rows_of_dataset(0, "train")             # crops of the first dataset in the training split that have a known label

A sheet of labels is read (sheet.py), its rows are joined to crops (join.py), its cells become numbers
(values.py), and its records are split by patient (people.py, splits.py); remarks.py and refused.py say what was found.
`guess_kind` (guess.py) chooses the kind of a sheet's labels.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256

import numpy as np
import pyarrow as pa

from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.data_tools.ecg.record_tables import RESERVED_COLUMNS
from omnilead.engine.data.where import where_mask
from omnilead.engine.settings.errors import ConfigError, Facts, Flag

from .config import TaskConfig
from .join import JoinedSheet, join_own_columns, join_sheet, split_by_dataset
from .kinds import Array
from .people import people_of, people_of_sheet, unknown_patients_remark
from .refused import remarks_on_refused
from .remarks import remarks_on_labels
from .sheet import SURVIVAL_COLUMNS, label_columns
from .splits import SPLITS, TEST, split_by_role, split_crops
from .values import task_outputs_and_values

DX_ROLES_HINT = "shard --dx-sources names the sources whose records have diagnosis roles"


@dataclass(frozen=True, eq=False)
class TaskLabels:
    task: TaskConfig  # the settings of the task, with columns, classes and folds filled in
    classes: tuple[str, ...]  # names of the K outputs; empty for identity
    # for each dataset, the labels of its crops: float32 [crops, K]. Multiclass is one-hot; survival
    # has times, negative if censored. For identity: the patients, int64 [crops]
    y: list[Array]
    # for each dataset, int8 [crops]: an index into SPLITS; 0 for crops without a known label
    split: list[Array]
    remarks: list[str] = field(default_factory=list)
    # where messages say that the labels come from: the label table or, if columns of the datasets
    # are the labels, the first dataset. "" if the labels are the diagnoses or patients of the
    # datasets, and the splits are the roles of their crops
    name: str = ""
    # the columns of the label table that are used, as text; None without a table
    table: pa.Table | None = None
    # for each dataset, int64 [crops]: an odd id for the crop's patient or, if the patient is unknown,
    # an even id for its record; all crops with one id must be in one split
    patients: list[Array] = field(default_factory=list)
    # number of labelled records without a known patient, and of all labelled records
    unknown: tuple[int, int] = (0, 0)
    # for each dataset, the row in `table` of each crop; -1 for crops without a row
    row_of_crop: list[Array] = field(default_factory=list)
    # for messages: how many crops of train and valid the setting data.where leaves out; "" without it
    left_out: str = ""

    def rows_of_dataset(self, dataset: int, split: str) -> Array:
        return np.flatnonzero(self.split[dataset] == SPLITS.index(split))

    def rows_of_all_datasets(self, split: str) -> Array:
        """Returns the crops of a split as indices into the crops of all datasets, one dataset after
        the other."""
        return np.flatnonzero(np.concatenate(self.split) == SPLITS.index(split))

    @cached_property
    def all_y(self) -> Array:
        """The labels of the crops of all datasets, one dataset after the other."""
        return np.concatenate(self.y)

    @cached_property
    def all_patients(self) -> Array:
        return np.concatenate(self.patients)

    def y_of(self, split: str) -> Array:
        """Returns the labels of all crops of a split."""
        return np.concatenate([y[self.rows_of_dataset(n, split)] for n, y in enumerate(self.y)])

    @property
    def role(self) -> str:
        """The argument of Dataset.select for the role that alone decides the split: "dx" or
        "identity". It is "" if the task has a label table or columns, or if task.split is neither
        auto nor roles."""
        if self.task.labels or self.task.columns or self.task.split not in ("auto", "roles"):
            return ""
        return "identity" if self.task.kind == "identity" else "dx"

    @property
    def is_split_by_role(self) -> bool:
        """True if labelled crops are split by the datasets' roles."""
        return self.task.split == "roles" or (self.task.split == "auto" and not self.task.labels)

    @property
    def resampling_unit(self) -> str:
        """What bootstrap intervals resample: patients, or records where the patients are
        unknown."""
        without, records = self.unknown
        if not without:
            return "patients"
        return "records" if without == records else "patients (records where they are unknown)"

    @property
    def resume_facts(self) -> Facts:
        """The facts, as JSON types, that must be the same when a training is resumed."""
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


def read_task(task: TaskConfig, datasets: Sequence[Dataset], where: str = "") -> TaskLabels:
    """Returns the labels and splits of a task; raises ConfigError if the sheet does not fit the
    task or the datasets. `where` is data.where, the condition on crops of train and valid."""
    if task.kind == "identity" or not (task.labels or task.columns):
        labels = _labels_of_roles(task, datasets)
    else:
        labels = _labels_of_columns(task, datasets, where)
    return _apply_where(labels, datasets, where) if where else labels


def _labels_of_roles(task: TaskConfig, datasets: Sequence[Dataset]) -> TaskLabels:
    """Returns the labels and splits of the paper's tasks: the labels are in the datasets, and their
    roles decide the splits."""
    is_identity = task.kind == "identity"
    if is_identity and (task.labels or task.columns):
        raise ConfigError(
            f"task.kind=identity: its labels are the dataset's patients, not "
            f"{task.labels or task.columns}: leave them out"
        )
    if task.kind not in ("identity", "multilabel"):
        raise ConfigError(
            f"task.kind={task.kind} needs labels: name a label table: ",
            Flag("--labels"),
            " my.csv, or a column of the dataset: ",
            Flag("--set task.columns=[age]"),
        )
    if task.split not in ("auto", "roles"):
        raise ConfigError(
            f"task.split={task.split} needs a label table: name one with ",
            Flag("--labels"),
            ", or use task.split=roles",
        )
    split = split_by_role(datasets, "id_role" if is_identity else "dx_role")
    labelled_N = np.concatenate(split) > 0
    people = people_of(datasets)
    patients = people.owner_ids_by_dataset(datasets)
    remarks = people.doubtful_ids_remark(labelled_N)
    if is_identity:
        return TaskLabels(task, (), patients, split, remarks, patients=patients)
    y = [dataset.labels.astype(np.float32) for dataset in datasets]
    unknown = people.unknown_patient_and_record_counts(datasets, labelled_N)
    remarks = [*unknown_patients_remark(unknown), *remarks]
    return TaskLabels(task, CLASSES, y, split, remarks, patients=patients, unknown=unknown)


def _labels_of_columns(task: TaskConfig, datasets: Sequence[Dataset], where: str) -> TaskLabels:
    if task.kind == "survival" and not task.columns:
        task = replace(task, columns=SURVIVAL_COLUMNS)
    sheet = join_sheet(task, datasets, where) if task.labels else join_own_columns(task, datasets)
    task = replace(task, columns=label_columns(task, sheet.name, sheet.cells))
    if task.kind != "multiclass" or task.classes:
        sheet = sheet.without_missing_words(task.columns, task.classes)
    sheet = sheet.without_missing_words(sheet.fold_columns)
    task, classes, y_RK = task_outputs_and_values(task, sheet)
    y = _y_of_crops(y_RK, sheet)
    labelled_N = _labelled_crops(task, sheet, y)
    people = people_of_sheet(sheet, datasets)
    splits = split_crops(task, sheet, datasets, labelled_N, people)
    split_N = np.where(labelled_N, splits.split_N, 0).astype(np.int8)
    unknown = people.unknown_patient_and_record_counts(datasets, labelled_N)
    remarks = [
        *(*sheet.remarks, *splits.remarks, *unknown_patients_remark(unknown)),
        *(*people.doubtful_ids_remark(labelled_N), *remarks_on_labels(task, sheet, y_RK)),
    ]
    if task.labels:
        remarks += remarks_on_refused(task, sheet, datasets, classes, y_RK)
    return TaskLabels(
        replace(task, folds=splits.folds),
        classes,
        y,
        split_by_dataset(split_N, datasets),
        remarks,
        sheet.name,
        _used_columns(task, sheet, where) if task.labels else None,
        people.owner_ids_by_dataset(datasets),
        unknown,
        sheet.row_of_crop,
    )


def _y_of_crops(y_RK: Array, sheet: JoinedSheet) -> list[Array]:
    unknown_1K = np.full((1, y_RK.shape[1]), np.nan, np.float32)
    # Crops without a row have row -1, which is all NaN here
    with_unknown = np.append(y_RK, unknown_1K, axis=0)
    return [with_unknown[row] for row in sheet.row_of_crop]


def _labelled_crops(task: TaskConfig, sheet: JoinedSheet, y: list[Array]) -> Array:
    """Returns bool [crops of all datasets]: True for crops with a known label. Raises ConfigError
    if there are none."""
    labelled_N = np.concatenate([~np.isnan(y_NK).all(1) for y_NK in y])
    if not labelled_N.any():
        raise ConfigError(
            f"{sheet.name}: no record has a known label in {', '.join(task.columns)}: fill in the "
            "cells"
        )
    return labelled_N


def _used_columns(task: TaskConfig, sheet: JoinedSheet, where: str) -> pa.Table:
    always = (*RESERVED_COLUMNS, *task.columns)
    names = [name for name in sheet.cells.column_names if name in always or name in where]
    return sheet.cells.select(names).replace_schema_metadata()


def _apply_where(labels: TaskLabels, datasets: Sequence[Dataset], where: str) -> TaskLabels:
    """Returns the labels without those crops of train and valid for which `where` is not true."""
    split, crops = [], 0
    for n, dataset in enumerate(datasets):
        cells = None
        if labels.table:
            row = labels.row_of_crop[n]
            cells = labels.table.take(pa.array(row, mask=row < 0))
        out_N = (labels.split[n] < TEST) & ~where_mask(dataset, where, cells)
        crops += int((labels.split[n][out_N] > 0).sum())
        split.append(np.where(out_N, np.int8(0), labels.split[n]))
    left_out = f", data.where={where!r} leaves out {crops:,} crops"
    return replace(labels, split=split, left_out=left_out)
