"""Makes remarks on the labels of a sheet: which of them are doubtful, how its words were read, and
how many labels there are."""

import re
from difflib import SequenceMatcher
from itertools import combinations

import numpy as np
import pyarrow.compute as pc

from omnilead.data_tools.ecg.record_names import NAMES_IN_MESSAGE
from omnilead.engine.settings.errors import join_first_names

from .config import TaskConfig
from .join import JoinedSheet
from .kinds import EMPTY_CELL_NOTE, KINDS, Array
from .sheet import BOOLEANS, are_numbers

# words whose meaning needs no remark
UNREMARKABLE_WORDS = ("0", "0.0", "false", "1", "1.0", "true")
# a class with fewer records than this is learnt badly, or its name is a typing error
RARE_CLASS_RECORDS = 5
# numbers that often stand for a missing value: -1, 9, 99, -9, -99, ...
UNKNOWN_CODE = re.compile("-1|-?9+")


def remarks_on_labels(task: TaskConfig, sheet: JoinedSheet, y_RK: Array) -> list[str]:
    """Returns remarks on the labels of a sheet. `y_RK` has a row for each row of the sheet."""
    if not task.labels:
        return []
    y_RK = y_RK[sheet.used_rows]
    remarks = []
    if KINDS[task.kind].has_classes:
        positive = (y_RK > 0).sum(0).tolist()
        records_of = dict(zip(task.classes or task.columns, positive, strict=True))
        remarks += _remarks_on_spelling(records_of)
        if task.kind != "multiclass":
            remarks += _remarks_on_missing_zeros(task, y_RK)
        remarks += _remarks_on_rare_classes(records_of)
    if task.kind in ("multiclass", "regression"):
        remarks += _remarks_on_codes(task, sheet)
    remarks.append(_counts_text(task, y_RK))
    if task.kind != "multiclass":
        remarks += _remarks_on_words(task, sheet)
    return [f"{task.labels}: {remark}" for remark in remarks]


def _remarks_on_spelling(records_of: dict[str, int]) -> list[str]:
    """Returns remarks on classes whose names may be two spellings of one name."""
    remarks = []
    by_spelling: dict[str, list[str]] = {}
    for name in records_of:
        by_spelling.setdefault(name.casefold(), []).append(name)
    for names in by_spelling.values():
        if len(names) > 1:
            counts = [f"{name!r} ({records_of[name]:,} records)" for name in names]
            remarks.append(
                f"{' and '.join(counts)} differ only in case and are {len(names)} classes: if they are "
                "one, write them alike"
            )
    for pair in combinations(records_of, 2):
        few, many = sorted(pair, key=records_of.__getitem__)
        if _may_be_one_name(few, many) and records_of[few] < max(
            RARE_CLASS_RECORDS, records_of[many] / 10
        ):
            spelt = f"{few!r} ({records_of[few]:,} records) and {many!r} ({records_of[many]:,})"
            remarks.append(f"are {spelt} the same class? They are trained as two")
    return remarks


def _may_be_one_name(name: str, other: str) -> bool:
    """Returns True if two names of at least five characters differ in about one letter, apart from
    case. Their digits must be equal: grade1 is not grade2."""
    name, other = name.casefold(), other.casefold()
    shorter = min(len(name), len(other))
    if name == other or shorter < 5 or re.sub(r"\D", "", name) != re.sub(r"\D", "", other):
        return False
    return SequenceMatcher(None, name, other).ratio() >= 1 - 1 / shorter


def _remarks_on_missing_zeros(task: TaskConfig, y_RK: Array) -> list[str]:
    negative = (y_RK == 0).sum(0)
    never = [name for name, records in zip(task.columns, negative, strict=True) if not records]
    return (
        [f"no record is 0 in {join_first_names(never, NAMES_IN_MESSAGE)}: {EMPTY_CELL_NOTE}"]
        if never
        else []
    )


def _remarks_on_rare_classes(records_of: dict[str, int]) -> list[str]:
    """Returns a remark on the classes with too few records for learning or for choosing a threshold."""
    rarest_first = sorted(records_of, key=records_of.__getitem__)
    rare = [
        f"{name} ({records_of[name]})"
        for name in rarest_first
        if records_of[name] < RARE_CLASS_RECORDS
    ]
    if not rare:
        return []
    return [
        f"fewer than {RARE_CLASS_RECORDS} records are positive in {join_first_names(rare, NAMES_IN_MESSAGE)}: too few to learn "
        "or to choose a threshold by"
    ]


def _remarks_on_codes(task: TaskConfig, sheet: JoinedSheet) -> list[str]:
    """Returns remarks on numbers that may mean "unknown": -1 or -9 if no other number is negative,
    or 999 if it is far above all others."""
    remarks = []
    for name in task.columns:
        values = pc.unique(sheet.cells[name]).drop_null().to_pylist()
        if len(values) < 3 or not are_numbers(values):
            continue
        numbers = sorted(map(float, values))
        lowest, highest, second_highest = numbers[0], numbers[-1], numbers[-2]
        apart = []
        if lowest < 0 <= numbers[1]:
            apart.append(lowest)
        if highest - second_highest > second_highest - lowest:
            apart.append(highest)
        remarks += [
            f"does {number:g} in column {name!r} mean unknown? Then leave these cells empty"
            for number in apart
            if UNKNOWN_CODE.fullmatch(f"{number:g}")
        ]
    return remarks


def _counts_text(task: TaskConfig, y_RK: Array) -> str:
    """Returns a text with the label columns, their kind, and how many records have each label."""
    unknown = int(np.isnan(y_RK).all(1).sum())
    positive = (y_RK > 0).sum(0)
    if task.kind == "binary":
        counts = f"{positive[0]:,} yes, {int((y_RK == 0).sum()):,} no"
    elif KINDS[task.kind].has_classes:
        names = task.classes or task.columns
        most_first = sorted(zip(positive.tolist(), names, strict=True), reverse=True)
        counts = join_first_names(
            [f"{name} {records:,}" for records, name in most_first], NAMES_IN_MESSAGE
        )
    elif task.kind == "survival":
        counts = f"{positive[0]:,} with the event, {int((y_RK < 0).sum()):,} without"
    else:
        counts = f"{len(y_RK) - unknown:,} from {np.nanmin(y_RK):g} to {np.nanmax(y_RK):g}"
    return f"{join_first_names(task.columns, NAMES_IN_MESSAGE)}: {task.kind}: {counts}, {unknown:,} unknown"


def _remarks_on_words(task: TaskConfig, sheet: JoinedSheet) -> list[str]:
    """Returns a remark on which words were read as 0 and which as 1."""
    cells = {str(cell).lower() for name in task.columns for cell in sheet.cells[name].unique()}
    if task.positive:
        return [f"{task.positive} in column {task.columns[0]!r} is 1, all other values are 0"]
    words = [
        word
        for word in sorted(BOOLEANS, key=BOOLEANS.__getitem__)
        if word in cells and word not in UNREMARKABLE_WORDS
    ]
    return [", ".join(f"{word} is {BOOLEANS[word]}" for word in words)] if words else []
