"""Assigns each crop to a split: by a column of the sheet, by the datasets' roles, or at random by
patient."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg.record_names import index_in
from omnilead.engine.data.patients import uniform_hashes
from omnilead.engine.settings.errors import ConfigError

from .config import TaskConfig
from .join import JoinedSheet
from .kinds import Array
from .people import People
from .sheet import MAX_VALUES, sort_values

SPLITS = ("", "train", "valid", "test")  # the number of a split is its index
TRAIN, VALID, TEST = 1, 2, 3
# Numbers of the splits by the names that tables and roles use for them
SPLIT_NUMBERS = {
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


class Splits(NamedTuple):
    split_N: Array  # for each crop of all datasets, its split as an index into SPLITS; 0: none
    folds: Any  # task.folds, or the default folds
    remarks: Sequence[str] = ()


def split_crops(
    task: TaskConfig,
    sheet: JoinedSheet,
    datasets: Sequence[Dataset],
    labelled_N: Array,
    people: People,
) -> Splits:
    columns, how = sheet.fold_columns, task.split
    if how == "auto":
        how = "8:1:1" if task.labels else "roles"
        if columns:
            how = "column"
    if how == "roles":
        return Splits(np.concatenate(split_by_role(datasets, "dx_role")), task.folds)
    if how == "column" and not columns:
        raise ConfigError(
            f"{sheet.name}: task.split=column needs a column `fold` or `split`, but there is none: add "
            "it, or use task.split=8:1:1"
        )
    if how == "column":
        split_N, folds = _splits_and_folds(task, sheet, columns[0], labelled_N, people)
    else:
        folds = {}
        # Patients with the lowest hashes are in test, because data.hold_out keeps those with the
        # lowest hashes out of pre-training, too
        split_N = TEST - np.digitize(uniform_hashes(people.names), (0.1, 0.2))[people.owner_N]
    without_copies_N = _without_copies(split_N, datasets, labelled_N)
    remarks = []
    if copies := int((without_copies_N != split_N).sum()):
        remarks.append(f"{copies:,} crops are left out: copies of ECGs in valid or test")
    if nowhere := int((labelled_N & (split_N == 0)).sum()):
        remarks.append(
            f"{nowhere:,} crops are left out: their {columns[0]} does not belong to train, valid or test"
        )
    return Splits(without_copies_N, folds, remarks)


def split_by_role(datasets: Sequence[Dataset], role: str) -> list[Array]:
    return [_split_numbers(dataset.table([role])[role]) for dataset in datasets]


def _split_numbers(names: pa.ChunkedArray) -> Array:
    """Returns the number of the split with each of these names; 0 for an empty name, -1 for an
    unknown one."""
    place = index_in(pc.utf8_lower(pc.fill_null(names, "")), pa.array(SPLIT_NUMBERS))
    return np.asarray(np.array([*SPLIT_NUMBERS.values(), -1], np.int8)[place])


def _without_copies(split_N: Array, datasets: Sequence[Dataset], labelled_N: Array) -> Array:
    """Returns the splits, with 0 for crops that copy a held-out ECG: copies of test ECGs in training
    and validation, and copies of validation ECGs in training."""
    waveform_N = np.concatenate([dataset.column("waveform") for dataset in datasets])
    split_N = split_N.copy()
    for side in (TEST, VALID):
        held_out = waveform_N[labelled_N & (split_N == side)]
        earlier_N = (split_N > 0) & (split_N < side) & labelled_N
        split_N[earlier_N & np.isin(waveform_N, held_out)] = 0
    return split_N


def _splits_and_folds(
    task: TaskConfig, sheet: JoinedSheet, column: str, labelled_N: Array, people: People
) -> tuple[Array, Any]:
    """Returns the split of each crop, and the folds of each split. Raises ConfigError if a patient
    is in two folds."""
    cells = sheet.cells[column].combine_chunks().dictionary_encode()
    values: list[str] = cells.dictionary.to_pylist()
    if len(values) > MAX_VALUES:
        raise ConfigError(
            f"{sheet.name}: column {column!r} has {len(values):,} values: use at most {MAX_VALUES}"
        )
    folds: Any = task.folds
    if column == "split":
        split_of_value = _split_numbers(pa.chunked_array([cells.dictionary]))
        if (split_of_value < 0).any():
            wrong = values[int(split_of_value.argmin())]
            raise ConfigError(f"{sheet.name}: split {wrong!r}: write train, valid or test")
    else:
        folds = folds or _default_folds(sheet.name, values)
        split_of_value = _splits_of_folds(folds, values)
    empty = len(values)  # stands for an empty cell, and for a crop without a row
    value_of_row = pc.fill_null(cells.indices, empty).to_numpy(zero_copy_only=False)
    value_N = np.append(value_of_row, empty)[np.concatenate(sheet.row_of_crop)]
    counts_N = labelled_N & (value_N != empty)
    patient, two = _patient_and_two_folds(
        people.owner_N[counts_N], value_N[counts_N], (len(people.names), empty)
    )
    if two:
        raise ConfigError(
            f"{sheet.name}: patient {people.names[patient]} is in {column}s "
            f"{' and '.join(values[fold] for fold in two)}: put each patient in one"
        )
    return np.append(split_of_value, 0)[value_N], folds


def _patient_and_two_folds(
    patient_N: Array, fold_N: Array, shape: tuple[int, int]
) -> tuple[int, list[int]]:
    """Returns the first patient who is in several folds, and two of these folds. The folds are
    empty if there is no such patient."""
    is_in = np.zeros(shape, bool)
    is_in[patient_N, fold_N] = True
    patient = int((is_in.sum(1) > 1).argmax())
    folds = np.flatnonzero(is_in[patient])
    return patient, folds[:2].tolist() if len(folds) > 1 else []


def _default_folds(sheet: str, values: list[str]) -> dict[str, tuple[str, ...]]:
    """Returns the folds of each split if task.folds names none: the last fold is test, the one
    before it valid, and the others are train."""
    ordered = sort_values(values)
    if len(ordered) < 3:
        raise ConfigError(
            f"{sheet}: folds {', '.join(ordered)}: at least 3 are needed, for train, valid and test"
        )
    *train, valid, test = ordered
    return {"train": tuple(train), "valid": (valid,), "test": (test,)}


def _splits_of_folds(folds: Any, values: list[str]) -> Array:
    """Returns the number of the split of each fold in `values`; 0 for folds that `folds` does not
    name."""
    split_of: dict[str, int] = {}
    for split, names in folds.items():
        split_of |= dict.fromkeys(names, SPLIT_NUMBERS[split])
    # pandas writes whole numbers as 1.0 in a column with empty cells
    splits = [split_of.get(v, split_of.get(v.removesuffix(".0"), 0)) for v in values]
    return np.array(splits, np.int8)
