"""Guesses the kind of a task from the cells of its label columns.

guess_kind(TaskConfig(labels="my.csv"))     # the same with `kind` and `columns`

Columns of 0 and 1, or yes and no, are binary or multilabel; one column of texts or of few numbers is
multiclass, of many numbers regression; `time` and `event` are survival. Which of two other values
counts as 1, and whatever else a column may mean, is a ConfigError that says what to type.
"""

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.ecg.record_names import NAMES_IN_MESSAGE
from omnilead.data_tools.ecg.record_tables import undo_decimal_point
from omnilead.engine.settings.errors import ConfigError, Flag, join_first_names

from .config import TaskConfig, TaskKind
from .sheet import (
    BOOLEANS,
    SURVIVAL_COLUMNS,
    are_numbers,
    columns_hint_parts,
    has_plus,
    label_columns,
    may_be_missing,
    quote_words,
    read_sheet,
)

# a column of numbers with at most this many different values holds classes
MAX_NUMERIC_CLASSES = 10
MAX_SHOWN_CHARACTERS = 40  # a message shows at most this many characters of a cell
# Matches cells that look like a number, even if float() cannot read them: "63", "1,5", "1.234,5" or
# "> 89"
LOOKS_NUMERIC = re.compile(r"[<>=~≤≥]*\s*[+-]?\d[\d.,' ]*")


class LabelColumn(NamedTuple):
    name: str
    sheet: pa.Table
    values: list[str]  # distinct values of the cells, without the words in `words`
    words: pa.ChunkedArray  # cells with a word, such as NA, that may stand for a missing value

    @property
    def is_yes_or_no(self) -> bool:
        return bool(self.values) and {value.lower() for value in self.values} <= BOOLEANS.keys()

    @property
    def is_text(self) -> bool:
        return not are_numbers(self.values)

    def quote_value(self, value: str) -> str:
        return repr(undo_decimal_point(self.sheet, self.name, value)[:MAX_SHOWN_CHARACTERS])


def guess_kind(task: TaskConfig) -> TaskConfig:
    """Returns the task with the kind that its label columns suggest, and with the names of these
    columns."""
    columns = _read_columns(task)
    names = tuple(column.name for column in columns)
    if set(names) == set(SURVIVAL_COLUMNS):
        return replace(task, kind="survival", columns=SURVIVAL_COLUMNS)
    if task.positive:
        kind: TaskKind = "binary"
    elif task.classes:
        kind = "multiclass"
    else:
        kind = _guess_kind_of_columns(task.labels, columns)
    if kind != "multiclass":
        _ask_about_words(task, columns, kind)
    return replace(task, kind=kind, columns=names)


def _read_columns(task: TaskConfig) -> list[LabelColumn]:
    cells = read_sheet(task)
    names = label_columns(task, task.labels, cells)
    minus_is_no = has_plus(cells, names)
    columns = []
    for name in names:
        is_word = may_be_missing(cells[name], minus_is_no)
        filled = pc.drop_null(cells[name].filter(pc.invert(is_word)))
        words = cells[name].filter(is_word)
        columns.append(LabelColumn(name, cells, filled.unique().to_pylist(), words))
    return columns


def _guess_kind_of_columns(sheet: str, columns: Sequence[LabelColumn]) -> TaskKind:
    filled = [column for column in columns if column.values]
    if all(column.is_yes_or_no for column in filled):
        return "binary" if len(columns) == 1 else "multilabel"
    if len(columns) > 1:
        _refuse_mixed_columns(sheet, columns)
        _refuse_pairs_of_numbers(sheet, filled)
        return "regression"
    (column,) = columns
    if not column.is_text and len(column.values) > MAX_NUMERIC_CLASSES:
        return "regression"
    _refuse_unread_numbers(sheet, column)
    _refuse_a_third_value(sheet, column)
    _ask_which_is_positive(sheet, column)
    return "multiclass"


def _refuse_mixed_columns(sheet: str, columns: Sequence[LabelColumn]) -> None:
    """Raises an error for the first column whose values are unlike those of the other columns: it
    is hardly meant as a label."""
    yes_or_no = [column.name for column in columns if column.is_yes_or_no]
    texts = [column.name for column in columns if column.is_text]
    alike = yes_or_no or [column.name for column in columns if column.name not in texts]
    is_survival = {column.name for column in columns} > set(SURVIVAL_COLUMNS)
    if is_survival:
        alike = [*SURVIVAL_COLUMNS]
    odd = next((column for column in columns if column.values and column.name not in alike), None)
    if not odd:
        return
    if is_survival:
        what = "is neither time nor event"
    else:
        others = [value for value in odd.values if value.lower() not in BOOLEANS]
        what = (
            f"holds {'texts' if odd.is_text else 'numbers'} such as {odd.quote_value(others[0])}, "
        )
        what += "not 0 and 1" if yes_or_no else "not 0, 1 or numbers"
    cure: tuple[str, ...]
    if not texts:
        or_else = "; or choose the kind: ", Flag("--kind"), " regression"
        cure = "leave it out: ", *columns_hint_parts(alike), *or_else
    elif not alike:
        choose = "for texts as classes, choose one column: "
        cure = choose, *columns_hint_parts(texts[:1]), "; else write 0 and 1"
    else:
        cure = "leave it out: ", *columns_hint_parts(alike)
    raise ConfigError(f"{sheet}: column {odd.name!r} {what}: ", *cure)


def _refuse_pairs_of_numbers(sheet: str, columns: Sequence[LabelColumn]) -> None:
    """Raises an error if no column has more than two values: columns of, say, 1 and 2 hardly hold
    numbers to predict."""
    if any(len(column.values) > 2 for column in columns):
        return
    pair = next(column for column in columns if not column.is_yes_or_no)
    raise ConfigError(
        f"{sheet}: column {pair.name!r} holds only {' and '.join(map(pair.quote_value, pair.values))}: "
        "write 0 and 1; if they are numbers to predict, choose the kind: ",
        Flag("--kind"),
        " regression",
    )


def _ask_which_is_positive(sheet: str, column: LabelColumn) -> None:
    """Raises an error if a column has two values: it asks which of them counts as 1, as only the
    user can tell."""
    if len(column.values) != 2:
        return
    first, second = map(column.quote_value, column.values)
    if column.values[0].casefold() == column.values[1].casefold():
        raise ConfigError(
            f"{sheet}: column {column.name!r} holds {first} and {second}, which differ only in case: "
            "write them alike"
        )
    raise ConfigError(
        f"{sheet}: column {column.name!r} holds {first} and {second}: which of them counts as 1? ",
        Flag("--positive"),
        f" {shlex.quote(column.values[0])} or ",
        Flag("--positive"),
        f" {shlex.quote(column.values[1])}; as two classes, choose the kind: ",
        Flag("--kind"),
        " multiclass",
    )


def _refuse_unread_numbers(sheet: str, column: LabelColumn) -> None:
    """Raises an error if some cells of a column look like numbers but cannot be read as numbers, so
    that the column is not taken for classes by mistake."""
    numeric = [value for value in column.values if LOOKS_NUMERIC.fullmatch(value)]
    unread = [value for value in column.values if not are_numbers([value])]
    if numeric and unread:
        read = [value for value in numeric if value not in unread] or numeric
        raise ConfigError(
            f"{sheet}: column {column.name!r} is neither numbers nor classes: it holds "
            f"{column.quote_value(read[0])} and {column.quote_value(unread[0])}: write numbers with a decimal point and "
            "leave unknown cells empty, or choose the kind: ",
            Flag("--kind"),
            " multiclass",
        )
    begin_with_digits = all(value[0].isdigit() for value in column.values)
    if unread and len(column.values) > MAX_NUMERIC_CLASSES and begin_with_digits:
        raise ConfigError(
            f"{sheet}: column {column.name!r} holds numbers followed by something else, such as "
            f"{column.quote_value(column.values[0])}: leave the unit out, or choose the kind: ",
            Flag("--kind"),
            " multiclass",
        )


def _refuse_a_third_value(sheet: str, column: LabelColumn) -> None:
    """Raises an error if a column holds yes, no and another value, whose meaning only the user can
    tell. Values 0, 1, 2, ... are accepted as classes."""
    rows_of = Counter(column.sheet[column.name].drop_null().to_pylist())
    sides = {BOOLEANS.get(value.lower()) for value in rows_of}
    if len(sides) < 3:  # it lacks one of the three: yes, no, another value
        return
    if are_numbers([*rows_of]) and sorted(map(float, rows_of)) == list(range(len(rows_of))):
        return
    values = [
        f"{column.quote_value(value)} in {rows:,} rows" for value, rows in rows_of.most_common()
    ]
    others = [column.quote_value(value) for value in rows_of if value.lower() not in BOOLEANS]
    raise ConfigError(
        f"{sheet}: column {column.name!r} holds {join_first_names(values, MAX_NUMERIC_CLASSES)}: does "
        f"{join_first_names(others, NAMES_IN_MESSAGE)} mean unknown? Then leave these cells empty. If it is a class, "
        "choose the kind: ",
        Flag("--kind"),
        " multiclass (in a YAML task: kind)",
    )


def _ask_about_words(task: TaskConfig, columns: Sequence[LabelColumn], kind: TaskKind) -> None:
    for column in columns:
        if not len(column.words):
            continue
        cells = f"{task.labels}: {quote_words(column.words)} in column {column.name!r} ({len(column.words):,} rows): "
        if task.positive:
            raise ConfigError(
                f"{cells}does it mean unknown? Then empty these cells. If it means not {task.positive}, write 0"
            )
        raise ConfigError(
            cells,
            "does it mean unknown, or is it a class? Choose the kind: ",
            Flag("--kind"),
            f" {kind} if it means unknown, ",
            Flag("--kind"),
            " multiclass if it is a class (in a YAML task: kind)",
        )
