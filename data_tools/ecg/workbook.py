"""Read a sheet of an Excel workbook as a table of text. This needs openpyxl.

cells = read_workbook(data, "Sheet2")       # "": the only sheet
file, sheet = workbook_and_sheet("labels.xlsx:Sheet2")
"""

import io
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..io.errors import DataError

XLSX_AND_SHEET = re.compile(r"(.*\.xlsx)(?::(.+))?", re.IGNORECASE | re.DOTALL)


def is_workbook(url: str) -> bool:
    return bool(XLSX_AND_SHEET.fullmatch(url))


def workbook_and_sheet(url: str) -> tuple[str, str]:
    """Split FILE.xlsx:SHEET into (FILE.xlsx, SHEET). Without a sheet, or for a file of another type, the
    sheet is ""."""
    named = XLSX_AND_SHEET.fullmatch(url)
    return (named[1], named[2] or "") if named else (url, "")


def table_name(url: str) -> str:
    """Returns the name of a table: its file name without suffix, and the sheet if one is given."""
    place, sheet = workbook_and_sheet(url)
    return f"{Path(place).stem} {sheet}".strip()


def read_workbook(data: bytes, sheet: str) -> pa.Table:
    """Return a sheet of the workbook whose bytes are `data`. `sheet` may be "" if there is only one."""
    try:
        import openpyxl
    except ImportError:
        raise DataError(
            "the file is a workbook or another archive: save the sheet as CSV UTF-8, or pip install "
            "openpyxl"
        ) from None
    book, formulas = (
        openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=values)
        for values in (True, False)
    )
    names = book.sheetnames
    if sheet and sheet not in names:
        raise DataError(f"the file has no sheet {sheet!r}: its sheets are {', '.join(names)}")
    if not sheet and len(names) > 1:
        raise DataError(
            f"the file has the sheets {', '.join(names)}: name one, such as labels.xlsx:{names[0]}"
        )
    rows = [[*row] for row in book[sheet or names[0]].iter_rows(values_only=True)]
    for number, row in enumerate(formulas[sheet or names[0]].iter_rows(values_only=True)):
        for value, formula in zip(rows[number], row, strict=False):
            if value is None and formula is not None:
                raise DataError(
                    f"row {number + 1} has the formula {formula} without its value: open the workbook in a "
                    "spreadsheet program and save it, or replace formulas by values"
                )
    header = [_cell_text(cell) or "" for cell in rows[0]] if rows else []
    return _text_table(header, [[_cell_text(cell) for cell in row] for row in rows[1:]])


def _text_table(header: Sequence[str], rows: Sequence[Sequence[str | None]]) -> pa.Table:
    """Returns the rows as a table. Short rows are filled with empty cells; columns without a name and
    without a filled cell are left out."""
    columns, names = [], []
    for place, name in enumerate(header):
        cells = [row[place] if place < len(row) else None for row in rows]
        if name or any(cells):
            columns.append(pa.array(cells, pa.string()))
            names.append(name)
    return pa.table(columns, names)


def _cell_text(cell: Any) -> str | None:
    """Returns a cell as text, as a spreadsheet program would write it into a CSV file."""
    if cell is None:
        return None
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return cell.isoformat() if isinstance(cell, date) else str(cell)
