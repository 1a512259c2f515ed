"""The kind of a sheet's labels, guessed from its cells.

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

MOST_NUMERIC_CLASSES = 10  # a column of numbers with at most this many values holds classes
SHOWN_LETTERS = 40  # characters of a cell that a message shows
# What looks like a number, read or not: 63, 1,5, 1.234,5, > 89
LOOKS_NUMERIC = re.compile(r"[<>=~≤≥]*\s*[+-]?\d[\d.,' ]*")


class LabelColumn(NamedTuple):
    name: str
    sheet: pa.Table
    values: list[str]  # distinct values, without `words`
    words: pa.ChunkedArray  # the cells that may mean that there is no value

    @property
    def is_yes_or_no(self) -> bool:
        return bool(self.values) and {value.lower() for value in self.values} <= BOOLEANS.keys()

    @property
    def is_text(self) -> bool:
        return not are_numbers(self.values)

    def quote_value(self, value: str) -> str:
        return repr(undo_decimal_point(self.sheet, self.name, value)[:SHOWN_LETTERS])


def guess_kind(task: TaskConfig) -> TaskConfig:
    """Sets the kind that the label columns suggest."""
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
        _refuse_a_mixture(sheet, columns)
        _refuse_pairs_of_numbers(sheet, filled)
        return "regression"
    (column,) = columns
    if not column.is_text and len(column.values) > MOST_NUMERIC_CLASSES:
        return "regression"
    _refuse_unread_numbers(sheet, column)
    _refuse_a_third_value(sheet, column)
    _ask_which_is_positive(sheet, column)
    return "multiclass"


def _refuse_a_mixture(sheet: str, columns: Sequence[LabelColumn]) -> None:
    """Refuses the first column that is unlike the others: it is hardly meant as a label."""
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
    """Refuses columns of two numbers each, such as 1 and 2: hardly values to predict."""
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
    """Asks which of two values counts as 1: only the user knows."""
    if len(column.values) != 2:
        return
    first, second = map(column.quote_value, column.values)
    if column.values[0].casefold() == column.values[1].casefold():
        raise ConfigError(
            f"{sheet}: column {column.name!r} holds {first} and {second}, which differ only in case: "
            "write one of them"
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
    """Refuses to take a column of numbers for classes because some cells are not read as one."""
    numeric = [value for value in column.values if LOOKS_NUMERIC.fullmatch(value)]
    unread = [value for value in column.values if not are_numbers([value])]
    if numeric and unread:
        read = [value for value in numeric if value not in unread] or numeric
        raise ConfigError(
            f"{sheet}: column {column.name!r} is neither numbers nor classes: it holds "
            f"{column.quote_value(read[0])} and {column.quote_value(unread[0])}: write numbers with a point and "
            "leave unknown cells empty, or choose the kind: ",
            Flag("--kind"),
            " multiclass",
        )
    begin_with_digits = all(value[0].isdigit() for value in column.values)
    if unread and len(column.values) > MOST_NUMERIC_CLASSES and begin_with_digits:
        raise ConfigError(
            f"{sheet}: column {column.name!r} holds numbers followed by something else, such as "
            f"{column.quote_value(column.values[0])}: leave the unit out, or choose the kind: ",
            Flag("--kind"),
            " multiclass",
        )


def _refuse_a_third_value(sheet: str, column: LabelColumn) -> None:
    """Refuses to guess the meaning of a value beside yes and no. 0, 1, 2, ... are classes."""
    rows_of = Counter(column.sheet[column.name].drop_null().to_pylist())
    sides = {BOOLEANS.get(value.lower()) for value in rows_of}
    if len(sides) < 3:  # not all of yes, no and another value
        return
    if are_numbers([*rows_of]) and sorted(map(float, rows_of)) == list(range(len(rows_of))):
        return
    values = [
        f"{column.quote_value(value)} in {rows:,} rows" for value, rows in rows_of.most_common()
    ]
    others = [column.quote_value(value) for value in rows_of if value.lower() not in BOOLEANS]
    raise ConfigError(
        f"{sheet}: column {column.name!r} holds {join_first_names(values, MOST_NUMERIC_CLASSES)}: does "
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
                f"{cells}is it unknown? Empty these cells if it is, or write 0 for not {task.positive}"
            )
        raise ConfigError(
            cells,
            "is it unknown, or a class? Choose the kind: ",
            Flag("--kind"),
            f" {kind} if it is unknown, ",
            Flag("--kind"),
            " multiclass if it is a class (in a YAML task: kind)",
        )
