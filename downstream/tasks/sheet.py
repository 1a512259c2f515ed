"""Reads a label sheet: its label columns, and which of its cells are words, numbers or missing
values.

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

from omnilead.data_tools.ecg.record_names import NAMES_IN_MESSAGE
from omnilead.data_tools.ecg.record_tables import RESERVED_COLUMNS, missing_words, read_table
from omnilead.data_tools.io.errors import DataError, Flag
from omnilead.engine.settings.errors import ConfigError, join_first_names

from .config import TaskConfig

SURVIVAL_COLUMNS = ("time", "event")  # label columns of a survival task
FOLD_COLUMNS = ("fold", "split")
# Words for no and for yes as people and spreadsheets write them, in lower case, by language
NO_AND_YES = {
    "numbers and signs": ("0 0.0 -", "1 1.0 +"),
    "English": ("no n false negative", "yes y true positive"),
    "German": ("nein n falsch negativ", "ja j wahr positiv"),
    "French": ("non n faux négatif negatif", "oui o vrai positif"),
    "Spanish": ("no n falso negativo", "sí si verdadero positivo"),
    "Italian": ("no n falso negativo", "sì si vero positivo"),
    "Portuguese": ("não nao n falso negativo", "sim verdadeiro positivo"),
    "Dutch": ("nee n onwaar negatief", "ja j waar positief"),
    "Swedish and Danish": ("nej n falskt falsk", "ja j sant sand"),
    "Polish": ("nie n fałsz", "tak prawda"),
    "Czech": ("ne n nepravda", "ano pravda"),
    "Turkish": ("hay\u0131r hayir", "evet"),
}
BOOLEANS: dict[str, int] = {}
for _no, _yes in NO_AND_YES.values():
    BOOLEANS |= dict.fromkeys(_no.split(), 0) | dict.fromkeys(_yes.split(), 1)
ROW_NUMBERS = re.compile(r"|Unnamed: \d+")  # names that pandas gives to a column of row numbers
MAX_VALUES = 100  # limit for the classes of a multiclass task, and for the folds of a sheet


def read_sheet(task: TaskConfig, where: str = "") -> pa.Table:
    """Returns the label table of a task, all cells as text. `where` is data.where, whose columns
    are used, too."""
    used = task.columns and (*task.columns, *re.findall(r"\w+", where))
    try:
        return read_table(task.labels, used=used)
    except DataError as error:
        raise ConfigError(error) from None


def label_columns(task: TaskConfig, sheet: str, cells: pa.Table) -> tuple[str, ...]:
    """Returns the columns that the task names or, if it names none, all columns that hold
    labels."""
    available = tuple(
        name
        for name in cells.column_names
        if name not in RESERVED_COLUMNS and not ROW_NUMBERS.fullmatch(name)
    )
    if not available:
        columns = ", ".join(map(repr, cells.column_names))
        raise ConfigError(
            f"{sheet}: has no column of labels, only {columns}: add one, with a label for each record"
        )
    absent = [name for name in task.columns if name not in available]
    if absent:
        raise ConfigError(
            f"{sheet}: no column {absent[0]!r}: its label columns are {', '.join(available)}"
        )
    return task.columns or available


def columns_hint_parts(columns: Sequence[str]) -> tuple[str, str]:
    """Returns the parts of an error that say how to choose these label columns: by --columns or,
    for commands that take several tasks and have no --columns, in a YAML task."""
    in_yaml = f"or columns: [{', '.join(columns)}] in a YAML task"
    return Flag("--columns"), f" {' '.join(columns)}, {in_yaml}"


def has_plus(cells: pa.Table, columns: Sequence[str]) -> bool:
    """Returns True if any of these columns has a cell "+". If so, "-" in these columns means no, not
    a missing value."""
    return any(pc.any(pc.equal(cells[name], "+")).as_py() for name in columns)


def may_be_missing(column: pa.ChunkedArray, minus_is_no: bool) -> pa.ChunkedArray:
    """Returns a bool for each cell: True for a word, such as NA, that may stand for a missing
    value. With `minus_is_no`, "-" is not one of these words."""
    is_word = missing_words(column)
    if minus_is_no:
        is_word = pc.and_not(is_word, pc.fill_null(pc.equal(column, "-"), False))
    return is_word


def quote_words(words: pa.ChunkedArray) -> str:
    """Returns the distinct words, quoted and joined, for a message."""
    return join_first_names(
        [repr(word) for word in sorted(words.unique().to_pylist())], NAMES_IN_MESSAGE
    )


def are_numbers(values: Sequence[str]) -> bool:
    try:
        return bool(np.isfinite([float(value) for value in values]).all())
    except ValueError:
        return False


def sort_values(values: Sequence[str]) -> list[str]:
    """Returns the values sorted, by size if all are numbers."""
    if are_numbers(values):
        return sorted(values, key=lambda value: (float(value), value))
    return sorted(values)
