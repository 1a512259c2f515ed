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
STARTS = r"'*[=+\-@\t\r\n]"
FORMULA = re.compile(STARTS)
QUOTED = f"^'({STARTS})"  # replace by \1 to unquote; also in arrow's regular expressions


def as_csv(rows: Iterable[Sequence[Any]]) -> str:
    """A CSV table of a few rows."""
    text, line = io.StringIO(), io.StringIO()
    # Python before 3.13 quotes a carriage return only if lines end with one
    writer = csv.writer(line, lineterminator="\r\n")
    for row in rows:
        writer.writerow([quoted(cell) if isinstance(cell, str) else cell for cell in row])
        text.write(line.getvalue().removesuffix("\r\n") + "\n")
        line.seek(0)
        line.truncate()
    return text.getvalue()


def without_formulas(table: pa.Table) -> pa.Table:
    """The table with the cells and column names as `as_csv` would write them."""
    columns = [
        _quoted(column) if pa.types.is_string(column.type) else column for column in table.columns
    ]
    return pa.Table.from_arrays(columns, [quoted(name) for name in table.column_names])


def _quoted(column: pa.ChunkedArray) -> pa.Array:
    cells = column.combine_chunks()
    suspect = pc.fill_null(pc.match_substring_regex(cells, f"^{STARTS}"), False)
    safe = pa.array(map(quoted, cells.filter(suspect).to_pylist()), cells.type)
    return pc.replace_with_mask(cells, suspect, safe)


def quoted(cell: str) -> str:
    """Cells of one or more numbers, such as -0.5, stay unchanged."""
    formula = FORMULA.match(cell) and any(math.isnan(as_number(word)) for word in cell.split())
    return f"'{cell}" if formula else cell


def unquoted(cell: str) -> str:
    return re.sub(QUOTED, r"\1", cell)


def as_number(value: object) -> float:
    """NaN if the text is not a number."""
    try:
        return float(str(value))
    except ValueError:
        return math.nan
