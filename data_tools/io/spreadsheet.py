"""CSV that is safe to open in a spreadsheet: a cell that would be a formula gets a leading
apostrophe, which reading removes.

    as_csv([("record", "age"), ("=1+2", 60)])       # "record,age\\n'=1+2,60\\n"
    without_formulas(table)         # an arrow table of any size, for pyarrow's faster writer
    unquoted("'=1+2")                               # "=1+2"

A text that itself begins with apostrophes before such a character gets one more, so that reading
always gives the original.
"""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

# a spreadsheet takes a cell that begins with one of these characters for a formula
FORMULA_START = r"'*[=+\-@\t\r\n]"
FORMULA_PATTERN = re.compile(FORMULA_START)
QUOTED_FORMULA = (
    f"^'({FORMULA_START})"  # replace by \1 to unquote; also in arrow's regular expressions
)


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """A CSV table of a few rows."""
    text, line = io.StringIO(), io.StringIO()
    # Python before 3.13 quotes a carriage return only if lines end with one
    writer = csv.writer(line, lineterminator="\r\n")
    for row in rows:
        writer.writerow([quote_cell(cell) if isinstance(cell, str) else cell for cell in row])
        text.write(line.getvalue().removesuffix("\r\n") + "\n")
        line.seek(0)
        line.truncate()
    return text.getvalue()


def quote_formulas(table: pa.Table) -> pa.Table:
    """The table with the cells and column names as `csv_text` would write them."""
    columns = [
        _quote_column(column) if pa.types.is_string(column.type) else column
        for column in table.columns
    ]
    return pa.Table.from_arrays(columns, [quote_cell(name) for name in table.column_names])


def _quote_column(column: pa.ChunkedArray) -> pa.Array:
    cells = column.combine_chunks()
    suspect = pc.fill_null(pc.match_substring_regex(cells, f"^{FORMULA_START}"), False)
    safe = pa.array(map(quote_cell, cells.filter(suspect).to_pylist()), cells.type)
    return pc.replace_with_mask(cells, suspect, safe)


def quote_cell(cell: str) -> str:
    """Quotes a cell that may be a formula. One or more numbers, such as -0.5, stay unchanged."""
    formula = FORMULA_PATTERN.match(cell) and any(
        math.isnan(to_number(word)) for word in cell.split()
    )
    return f"'{cell}" if formula else cell


def unquote_cell(cell: str) -> str:
    return re.sub(QUOTED_FORMULA, r"\1", cell)


def to_number(value: object) -> float:
    """Converts a cell to a number; NaN if it is none."""
    try:
        return float(str(value))
    except ValueError:
        return math.nan
