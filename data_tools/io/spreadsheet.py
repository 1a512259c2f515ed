"""Write CSV that is safe to open in a spreadsheet: a cell that a spreadsheet would take for a formula
gets a leading apostrophe, which reading removes.

    csv_text([("record", "age"), ("=1+2", 60)])     # "record,age\\n'=1+2,60\\n"
    quote_formulas(table)           # an arrow table of any size, for pyarrow's faster writer
    unquote_cell("'=1+2")                           # "=1+2"

A text that itself begins with apostrophes and then a character of formulas also gets one more
apostrophe, so that reading always gives the original.
"""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

# A spreadsheet takes a cell for a formula if it begins with one of the characters in brackets
FORMULA_START = r"'*[=+\-@\t\r\n]"
FORMULA_PATTERN = re.compile(FORMULA_START)
# Matches the start of a formula and the apostrophe before it. Replacing the match by \1 removes the
# apostrophe, in arrow as well
QUOTED_FORMULA = f"^'({FORMULA_START})"


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Returns a CSV table of a few rows as text."""
    text, line = io.StringIO(), io.StringIO()
    # Before 3.13, Python puts quotes around a cell that contains \r only if the lines' ending contains it, too
    writer = csv.writer(line, lineterminator="\r\n")
    for row in rows:
        writer.writerow([quote_cell(cell) if isinstance(cell, str) else cell for cell in row])
        text.write(line.getvalue().removesuffix("\r\n") + "\n")
        line.seek(0)
        line.truncate()
    return text.getvalue()


def quote_formulas(table: pa.Table) -> pa.Table:
    """Returns the table with cells and column names quoted as `csv_text` quotes them."""
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
    """Adds an apostrophe to a cell that may be a formula. A cell of numbers, such as -0.5,
    stays unchanged."""
    formula = FORMULA_PATTERN.match(cell) and any(
        math.isnan(to_number(word)) for word in cell.split()
    )
    return f"'{cell}" if formula else cell


def unquote_cell(cell: str) -> str:
    return re.sub(QUOTED_FORMULA, r"\1", cell)


def to_number(value: object) -> float:
    """Returns the number in a cell; NaN if the cell is not a number."""
    try:
        return float(str(value))
    except ValueError:
        return math.nan
