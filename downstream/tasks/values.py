"""Converts the cells of each row of a sheet to the numbers that a model has to output.

task, outputs, y_RK = task_outputs_and_values(task, sheet)     # float32 [rows, K], NaN where unknown

Multiclass is one-hot; times of survival are negative if censored.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.ecg.record_names import index_in
from omnilead.data_tools.ecg.record_tables import missing_words, undo_decimal_point
from omnilead.engine.settings.errors import ConfigError, Flag, join_first_names

from .config import TaskConfig, TaskKind
from .join import JoinedSheet
from .kinds import KINDS, Array
from .sheet import BOOLEANS, MAX_VALUES, are_numbers, columns_hint_parts, quote_words, sort_values

MAX_SHOWN_CLASSES = 10  # a message lists at most this many classes


def task_outputs_and_values(
    task: TaskConfig, sheet: JoinedSheet
) -> tuple[TaskConfig, tuple[str, ...], Array]:
    """Returns the task with its classes, the names of the K outputs, and the values [rows, K]."""
    if task.positive and task.kind != "binary":
        raise ConfigError(
            f"task.positive={task.positive!r}: is for kind binary, not {task.kind}: leave it out"
        )
    if KINDS[task.kind].one_column and len(task.columns) != 1:
        raise ConfigError(
            f"{sheet.name}: a {task.kind} task has one label column, not {', '.join(task.columns)}: ",
            *columns_hint_parts(["NAME"]),
        )
    if task.positive:
        return task, (f"{task.columns[0]}={task.positive}",), _positive_column(task, sheet)
    if task.kind == "multiclass":
        task = replace(task, classes=task.classes or _classes_in_data(task, sheet))
        return task, task.classes, _one_hot(task, sheet)
    if task.kind == "survival":
        return task, ("risk",), _signed_times(task, sheet)
    y = [_column_values(task.kind, sheet, name) for name in task.columns]
    return task, task.columns, np.stack(y, axis=1)


def _positive_column(task: TaskConfig, sheet: JoinedSheet) -> Array:
    """Returns [rows, 1]: 1 where the cell is task.positive, 0 where it holds another value, NaN
    where it is empty."""
    (name,) = task.columns
    column = sheet.cells[name].combine_chunks()
    values = column.drop_null().unique().to_pylist()
    typed = {undo_decimal_point(sheet.cells, name, value): value for value in values}
    positive = task.positive if task.positive in values else typed.get(task.positive)
    if positive is None:
        raise ConfigError(
            f"{sheet.name}: column {name!r} has no {task.positive!r}, which is to count as 1: choose "
            f"one of its values {join_first_names(list(map(repr, sort_values(values))), MAX_SHOWN_CLASSES)}"
        )
    y_R = pc.cast(pc.equal(column, positive), pa.float32())
    return np.asarray(y_R.to_numpy(zero_copy_only=False))[:, None]


def _classes_in_data(task: TaskConfig, sheet: JoinedSheet) -> tuple[str, ...]:
    """Returns the values of the label column that occur among the records in the data, sorted."""
    (name,) = task.columns
    cells = sheet.cells[name].combine_chunks().take(pa.array(sheet.used_rows))
    classes = sort_values(pc.drop_null(cells).unique().to_pylist())
    _ask_whether_words_are_classes(sheet.name, name, cells, classes)
    return tuple(classes)


def _ask_whether_words_are_classes(
    sheet: str, column: str, cells: pa.Array, classes: Sequence[str]
) -> None:
    """Raises an error if a class may be a word for a missing value: only the user can tell."""
    words = cells.filter(missing_words(cells))
    if not len(words):
        return
    others = [name for name in classes if name not in words.unique().to_pylist()]
    raise ConfigError(
        f"{sheet}: {quote_words(words)} in column {column!r} ({len(words):,} rows): is it a class, or "
        "does it mean unknown? If it means unknown, empty these cells; if it is a class, write another word. A "
        "fine-tuning can also name its classes: if it is a class, ",
        Flag(f"--set 'task.classes={_classes_as_json(classes)}'"),
        "; if it means unknown, ",
        Flag(f"--set 'task.classes={_classes_as_json(others)}'"),
    )


def _classes_as_json(classes: Sequence[str]) -> str:
    return json.dumps(classes, ensure_ascii=False) if len(classes) <= MAX_SHOWN_CLASSES else "[...]"


def _one_hot(task: TaskConfig, sheet: JoinedSheet) -> Array:
    (name,) = task.columns
    if len(task.classes) > MAX_VALUES:
        raise ConfigError(
            f"{sheet.name}: column {name!r} has {len(task.classes):,} classes: use at most {MAX_VALUES}"
        )
    column = sheet.cells[name].combine_chunks()
    code_R = index_in(column, pa.array(task.classes, pa.string()))
    used_R = np.isin(np.arange(len(column)), sheet.used_rows)
    filled_R = column.is_valid().to_numpy(zero_copy_only=False)
    other_R = used_R & filled_R & (code_R < 0)
    if other_R.any():
        cell = _describe_cell(sheet, name, int(other_R.argmax()))
        raise ConfigError(
            f"{cell} is not one of the classes {', '.join(task.classes)}: correct it, or task.classes"
        )
    y_RK = (code_R[:, None] == np.arange(len(task.classes))).astype(np.float32)
    y_RK[code_R < 0] = np.nan
    return np.asarray(y_RK)


def _signed_times(task: TaskConfig, sheet: JoinedSheet) -> Array:
    """Returns [rows, 1]: the time of the event or, if there was none, minus the time of the last
    contact."""
    if len(task.columns) != 2:
        raise ConfigError(
            f"{sheet.name}: a survival task has two columns, the time and whether the event "
            f"happened then, not {', '.join(task.columns)}: ",
            *columns_hint_parts(["TIME", "EVENT"]),
        )
    time, event = task.columns
    time_R = _column_values("survival", sheet, time)
    event_R = _column_values("binary", sheet, event)
    sign_R = 2 * event_R - 1
    return np.asarray((time_R * sign_R)[:, None])


def _column_values(kind: TaskKind, sheet: JoinedSheet, name: str) -> Array:
    cells = sheet.cells[name].combine_chunks().dictionary_encode()
    texts = cells.dictionary.to_pylist()
    expected = "a number" if kind == "regression" else "a number above 0"
    if KINDS[kind].has_classes:
        expected = "0 or 1, true or false, yes or no"
        values = [BOOLEANS.get(text.lower(), np.inf) for text in texts]
    else:
        values = [float(text) if are_numbers([text]) else np.inf for text in texts]
    # a number too large for float32 becomes infinite, which is refused
    with np.errstate(over="ignore"):
        numbers = np.array([*values, np.nan], np.float32)
    empty = len(texts)
    number_R = numbers[pc.fill_null(cells.indices, empty).to_numpy(zero_copy_only=False)]
    wrong_R = np.isinf(number_R)
    if kind == "survival":
        wrong_R |= number_R <= 0
    if wrong_R.any():
        cell = _describe_cell(sheet, name, int(wrong_R.argmax()))
        raise ConfigError(f"{cell} is not {expected}; leave it empty if unknown")
    return np.asarray(number_R)


def _describe_cell(sheet: JoinedSheet, column: str, row: int) -> str:
    record, text = sheet.cells["record"][row], str(sheet.cells[column][row])
    text = undo_decimal_point(sheet.cells, column, text)
    return f"{sheet.name}: column {column!r} of record {record}: {text[:40]!r}"
