"""A sheet of labels: its columns, and what its cells hold.

    cells = read_sheet(task)                        # all columns as text, null where a cell is empty
    names = label_columns(task, "my.csv", cells)    # ("af", "lbbb"): neither names nor folds of records

A sheet is CSV (commas, semicolons or tabs) or parquet: `record`, `source` where databases share
names, the labels, and `fold` or `split`. An empty cell is unknown.
"""

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.ecg.record_names import SHOWN
from omnilead.data_tools.ecg.record_tables import RESERVED, missing_words, read_table
from omnilead.data_tools.io.errors import DataError, Flag
from omnilead.engine.settings.errors import ConfigError, listed

from .config import TaskConfig

TIMED = ("time", "event")  # columns of survival
FOLD_COLUMNS = ("fold", "split")
NO = ("0", "0.0", "false", "no", "n", "nein", "falsch", "negative", "negativ", "-")
YES = ("1", "1.0", "true", "yes", "y", "ja", "j", "wahr", "positive", "positiv", "+")
BOOLEANS = dict.fromkeys(NO, 0) | dict.fromkeys(YES, 1)
ROW_NUMBERS = re.compile(r"|Unnamed: \d+")  # names that pandas gives to a column of them
MAX_VALUES = 100  # classes of multiclass, and folds


def read_sheet(task: TaskConfig, where: str = "") -> pa.Table:
    """`where`: data.where, whose columns are used, too."""
    used = task.columns and (*task.columns, *re.findall(r"\w+", where))
    try:
        return read_table(task.labels, used=used)
    except DataError as error:
        raise ConfigError(error) from None


def label_columns(task: TaskConfig, sheet: str, cells: pa.Table) -> tuple[str, ...]:
    """The columns that the task names, or else all that hold labels."""
    available = tuple(
        name
        for name in cells.column_names
        if name not in RESERVED and not ROW_NUMBERS.fullmatch(name)
    )
    absent = [name for name in task.columns if name not in available]
    if not available and not absent:
        absent = ["of labels"]
    if absent:
        raise ConfigError(
            f"{sheet}: no column {absent[0]!r}: its label columns are "
            f"{', '.join(available) or 'none'}"
        )
    return task.columns or available


def type_columns(columns: Sequence[str]) -> tuple[str, str]:
    """What to type for these label columns, as parts of an error; commands with several tasks have no
    --columns."""
    in_yaml = f"or columns: [{', '.join(columns)}] in a YAML task"
    return Flag("--columns"), f" {' '.join(columns)}, {in_yaml}"


def has_plus(cells: pa.Table, columns: Sequence[str]) -> bool:
    """Whether any of these columns has a cell +; a cell - beside it is no, not a missing value."""
    return any(pc.any(pc.equal(cells[name], "+")).as_py() for name in columns)


def may_be_missing(column: pa.ChunkedArray, minus_is_no: bool) -> pa.ChunkedArray:
    """Which cells hold a word, such as NA, that may mean that there is no value."""
    is_word = missing_words(column)
    if minus_is_no:
        is_word = pc.and_not(is_word, pc.fill_null(pc.equal(column, "-"), False))
    return is_word


def quoted(words: pa.ChunkedArray) -> str:
    """The different ones of these cells, for a message."""
    return listed([repr(word) for word in sorted(words.unique().to_pylist())], SHOWN)


def are_numbers(values: Sequence[str]) -> bool:
    try:
        return bool(np.isfinite([float(value) for value in values]).all())
    except ValueError:
        return False


def in_order(values: Sequence[str]) -> list[str]:
    """Sorted as numbers if all are numbers."""
    if are_numbers(values):
        return sorted(values, key=lambda value: (float(value), value))
    return sorted(values)
