"""data.where: selects the crops that a run uses, by an expression over columns of samples.parquet
and of a label table.

    age >= 18 and not flags.einthoven
    sex == "F" and source in ["ptb-xl", "georgia"]
    18 <= age < 60 or age is None

    where_mask(dataset, "age >= 18")        # bool [crops]

Columns are compared with numbers and texts; flags.NAME is whether a crop has the flag. As in SQL, what
is compared with a missing value is unknown, as is its `not`, and a crop is used only if the whole is
true. Nothing is executed: what is not listed here is an error.
"""

import ast
import warnings
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import COLUMNS, Dataset, flag_mask
from omnilead.data_tools.ecg.constants import CROP_FLAGS, MAYBE_MISSING

from ..settings.errors import ConfigError

MAX_CHARACTERS = 500  # longest expression; this also limits how deep it can be nested
# a message shows the unusable part of an expression only if it is nested no deeper than this
MAX_SHOWN_DEPTH = 100
HOW_TO_WRITE = 'write, for example, age >= 18 and not flags.einthoven, sex == "F", record in ["A", "B"], age is None'
FLAG_COLUMNS = [f"flags.{flag}" for flag in CROP_FLAGS]
ARROW_FUNCTIONS: dict[type[ast.AST], Any] = {
    ast.And: pc.and_kleene,
    ast.Or: pc.or_kleene,
    ast.Not: pc.invert,
    # raises an error for an unsigned column, where -2 would wrap around to 254
    ast.USub: pc.negate_checked,
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}


def where_mask(dataset: Dataset, where: str, cells: pa.Table | None = None) -> np.ndarray:
    """Returns bool [crops]: True where the expression is true. `cells`: columns of a label
    table, with a row for each crop; they take precedence over the dataset's columns."""
    try:
        if len(where) > MAX_CHARACTERS:
            raise ValueError(f"has more than {MAX_CHARACTERS} characters: shorten it")
        truth = _Evaluator(dataset, cells).evaluate(_parse_expression(where.strip()))
        if not isinstance(truth, pa.BooleanArray):
            raise ValueError(f"must be true or false for each crop: {HOW_TO_WRITE}")
    except (SyntaxError, ValueError, OverflowError, RecursionError, pa.ArrowException) as error:
        why = str(error).partition("\n")[0]
        if isinstance(error, SyntaxError):
            why = f"not understood at character {error.offset}: {HOW_TO_WRITE}"
        elif isinstance(error, RecursionError):
            why = f"nested too deeply: {HOW_TO_WRITE}"
        raise ConfigError(f"data.where={where[:MAX_CHARACTERS]!r}: {why}") from None
    return np.asarray(pc.fill_null(truth, False))


def _words_as_null(values: Any) -> Any:
    if not isinstance(values, pa.StringArray):
        return values
    words = pa.array(sorted(MAYBE_MISSING))
    return pc.if_else(pc.is_in(pc.utf8_lower(values), words), None, values)


def _parse_expression(where: str) -> ast.expr:
    # hides Python's warnings, for example about 5in [5] or "\\d"
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(where, mode="eval").body


def _expression_text(refused: ast.expr) -> str:
    """Returns the text of an expression. Raises RecursionError if the expression is nested
    deeper than MAX_SHOWN_DEPTH. Python's recursion limit cannot be relied on, because PyTorch's
    compiler raises it."""
    level: list[ast.AST] = [refused]
    depth = 0
    while level:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth += 1
    if depth > MAX_SHOWN_DEPTH:
        raise RecursionError
    return ast.unparse(refused)


class _Evaluator:
    """Evaluates an expression over the columns of a dataset and of a label table."""

    def __init__(self, dataset: Dataset, cells: pa.Table | None) -> None:
        self.dataset, self.cells = dataset, cells or pa.table({})

    def evaluate(self, node: ast.expr) -> Any:
        """Returns the value of an expression for each crop, or a constant; null where the value
        is unknown."""
        match node:
            case ast.Constant(bool() | int() | float() | str() as value):
                return pa.scalar(value)
            case ast.Name(name):
                return self.column(name)
            case ast.Attribute(ast.Name(name), item):
                return self.column(f"{name}.{item}")
            case ast.UnaryOp(ast.Not() | ast.USub() as op, part):
                return ARROW_FUNCTIONS[type(op)](self.evaluate(part))
            case ast.BoolOp(op, parts):
                return reduce(ARROW_FUNCTIONS[type(op)], map(self.evaluate, parts))
            case ast.Compare(left, ops, others):
                return reduce(pc.and_kleene, map(self.compare, [left, *others], ops, others))
        raise ValueError(f"{_expression_text(node)} cannot be used: {HOW_TO_WRITE}")

    def compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        match op, right:
            case ast.NotIn(), _:
                return pc.invert(self.compare(left, ast.In(), right))
            case ast.In(), ast.List([_, *_] as values):
                equal = (self.compare(left, ast.Eq(), value) for value in values)
                return reduce(pc.or_kleene, equal)
            case ast.Is(), ast.Constant(None):
                return pc.is_null(self.evaluate(left))
            case ast.IsNot(), ast.Constant(None):
                return pc.is_valid(self.evaluate(left))
        if type(op) not in ARROW_FUNCTIONS:
            raise ValueError(
                f"{_expression_text(right)} cannot be used after is or in: {HOW_TO_WRITE}"
            )
        sides = [self.evaluate(left), self.evaluate(right)]
        if sum(pa.types.is_string(side.type) for side in sides) == 1:
            # a label table holds numbers as text, and words such as NA where a number is missing
            sides = [pc.cast(_words_as_null(side), pa.float64()) for side in sides]
        return ARROW_FUNCTIONS[type(op)](*sides)

    def column(self, name: str) -> pa.Array:
        of_labels = self.cells.column_names
        dataset_columns = [field.name for field in COLUMNS if not pa.types.is_nested(field.type)]
        column_names = [*of_labels, *dataset_columns, *FLAG_COLUMNS]
        if name not in column_names:
            raise ValueError(f"there is no column {name!r}: use {', '.join(column_names)}")
        if name in FLAG_COLUMNS:
            flag = name.removeprefix("flags.")
            return pa.array(flag_mask(self.dataset.table(["flags"]), [flag]))
        table = self.cells if name in of_labels else self.dataset.table([name])
        column = table[name].combine_chunks()
        if pa.types.is_floating(column.type):  # a plug-in may have stored NaN for an unknown age
            column = pc.if_else(pc.is_nan(column), None, column)
        return column
