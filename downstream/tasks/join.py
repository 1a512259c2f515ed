"""Joins a label sheet to datasets: finds the row of the sheet for each of their crops.

sheet = join_sheet(TaskConfig(labels="my.csv"), [dataset])
sheet.cells["af"], sheet.row_of_crop[0]     # texts by row; the row of each of the dataset's crops, or -1

A record is named as in the dataset, or by its path in the archive.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg.record_names import (
    NAMES_IN_MESSAGE,
    count_and_first_names,
    match_records,
)
from omnilead.data_tools.ecg.record_tables import cells_as_text
from omnilead.data_tools.io.errors import DataError, Flag
from omnilead.engine.settings.errors import ConfigError

from .config import TaskConfig
from .kinds import Array
from .sheet import FOLD_COLUMNS, has_plus, may_be_missing, quote_words, read_sheet

DATASET_COLUMNS = ("age", "sex")  # columns of a dataset that can be labels without a sheet


class JoinedSheet(NamedTuple):
    # where the sheet is, for messages. If few of its records are in the data, `name` says that as
    # well, since it is the likely cause of any error
    name: str
    cells: pa.Table  # as text; null where a cell is empty
    # for each dataset, the row in `cells` of each crop; -1 for crops without a row
    row_of_crop: list[Array]
    remarks: list[str]

    @property
    def fold_columns(self) -> list[str]:
        return [name for name in FOLD_COLUMNS if name in self.cells.column_names]

    @property
    def used_rows(self) -> Array:
        """The rows whose record is in the data."""
        rows = np.unique(np.concatenate(self.row_of_crop))
        return np.asarray(rows[rows >= 0])

    def without_missing_words(self, columns: Sequence[str], classes: Sequence[str] = ()) -> Self:
        """Returns the sheet with empty cells in place of words such as NA in these columns, unless
        the word is one of the classes. A remark says which words were emptied."""
        cells, remarks = self.cells, list(self.remarks)
        columns = [name for name in cells.column_names if name in columns]
        minus_is_no = has_plus(cells, columns)
        for name in columns:
            is_class = pc.is_in(cells[name], pa.array(classes, pa.string()))
            is_word = pc.and_not(may_be_missing(cells[name], minus_is_no), is_class)
            words = cells[name].filter(is_word)
            if not len(words):
                continue
            remarks.append(
                f"{self.name}: {quote_words(words)} in column {name!r} ({len(words):,} rows) is taken for "
                "an empty cell, which is unknown: if it means something else, write that"
            )
            place = cells.column_names.index(name)
            cells = cells.set_column(place, name, pc.if_else(is_word, None, cells[name]))
        return self._replace(cells=cells, remarks=remarks)


def join_sheet(task: TaskConfig, datasets: Sequence[Dataset], where: str) -> JoinedSheet:
    """Returns the sheet with its row for each crop, found by the name of the crop's record."""
    url, cells = task.labels, read_sheet(task, where)
    data = data_records(datasets)
    try:
        matches = match_records(url, cells, data.keys, data.names)
    except DataError as error:
        raise ConfigError(error, _pseudonym_hint(url, datasets)) from None
    name = url
    remarks = [f"{url}: {note}" for note in matches.notes]
    if matches.mostly_missing:
        examples = ", ".join(data.names[:NAMES_IN_MESSAGE].to_pylist())
        name = f"{remarks[0]}, which has {examples}, ...: check that the table belongs to the data"
        remarks[0] += _pseudonym_hint(url, datasets)
    without_row = np.flatnonzero(matches.row < 0)
    if len(without_row):
        all_records = f"{len(data.keys):,} records of the data"
        remarks.append(
            f"{url}: has no row for {count_and_first_names(without_row, data.keys)} of {all_records}"
        )
    rows = split_by_dataset(matches.row[data.key_of_crop], datasets)
    is_shared = np.asarray(
        pc.is_in(data.keys, pa.array(records_in_several_datasets(datasets), pa.string()))
    )
    shared = np.flatnonzero(is_shared & (matches.row >= 0))
    if len(shared):
        remarks.append(
            f"{url}: {count_and_first_names(shared, data.keys)} records are in several datasets: the table's row "
            "counts for each of them"
        )
    return JoinedSheet(name, cells, rows, remarks)


def _pseudonym_hint(url: str, datasets: Sequence[Dataset]) -> str:
    """Returns what to do with a sheet of original names if the data have pseudonyms; "" if they
    have none."""
    if not any(dataset.facts.pseudonyms for dataset in datasets):
        return ""
    return (
        f"; the data have pseudonyms: omnilead labels table {url} --out DIR --pseudonymize KEYFILE "
        "writes the table with them"
    )


def join_own_columns(task: TaskConfig, datasets: Sequence[Dataset]) -> JoinedSheet:
    """Returns the datasets' own label columns, age and sex, as a sheet with a row for each crop."""
    if unknown := [name for name in task.columns if name not in DATASET_COLUMNS]:
        raise ConfigError(
            f"task.columns: {unknown[0]!r} is not in the dataset, which has only age and sex: "
            "name a label table: ",
            Flag("--labels"),
        )
    cells = pa.concat_tables([dataset.table(["record", *task.columns]) for dataset in datasets])
    rows = split_by_dataset(np.arange(len(cells)), datasets)
    return JoinedSheet(datasets[0].root.url, cells_as_text(cells), rows, [])


class DataRecords(NamedTuple):
    """The distinct records of some datasets."""

    keys: pa.Array  # of each record, its source and name, as source/name
    names: pa.Array  # name of each record
    key_of_crop: Array  # for each crop, the index of its record in `keys` and `names`


def data_records(datasets: Sequence[Dataset]) -> DataRecords:
    crops = pa.concat_tables([dataset.table(["source", "record"]) for dataset in datasets])
    key = pc.binary_join_element_wise(crops["source"], crops["record"], "/")
    key = key.combine_chunks().dictionary_encode()
    key_of_crop = key.indices.to_numpy()
    first = np.unique(key_of_crop, return_index=True)[1]
    names = crops["record"].take(pa.array(first)).combine_chunks()
    return DataRecords(key.dictionary, names, key_of_crop)


def record_of_crop(datasets: Sequence[Dataset]) -> Array:
    """Returns a number for each crop's record. Records of different datasets have different
    numbers, even if their names are equal."""
    numbers_of_datasets, count = [], 0
    for dataset in datasets:
        records = data_records([dataset])
        numbers_of_datasets.append(records.key_of_crop + count)
        count += len(records.keys)
    return np.concatenate(numbers_of_datasets)


def records_in_several_datasets(datasets: Sequence[Dataset]) -> list[str]:
    """Returns the records, as source/record, that are in more than one of the datasets."""
    if len(datasets) < 2:
        return []
    keys = pa.chunked_array([data_records([dataset]).keys for dataset in datasets])
    counts = keys.value_counts()
    names: list[str] = (
        counts.field("values").filter(pc.greater(counts.field("counts"), 1)).to_pylist()
    )
    return names


def split_by_dataset(values_N: Array, datasets: Sequence[Dataset]) -> list[Array]:
    """Splits an array over the crops of all datasets into one array for each dataset."""
    ends = np.cumsum([len(dataset) for dataset in datasets])[:-1]
    return np.split(values_N, ends)
