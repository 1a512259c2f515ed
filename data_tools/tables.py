"""CSV tables as spreadsheets may open them: a cell that they would take for a formula begins with an apostrophe."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

FORMULA = tuple("=+-@\t\r\n")


def as_csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([quoted(cell) for cell in row] for row in rows)
    return text.getvalue()


def quoted(cell: Any) -> Any:
    """Numbers stay numbers, several in one cell too. Before Python 3.13 `csv` leaves a carriage return as it is: a new line."""
    if not isinstance(cell, str):
        return cell
    text = cell.replace("\r", " ")
    return text if not cell.startswith(FORMULA) or all(map(_is_number, cell.split())) else f"'{text}"


def unquoted(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(FORMULA) else cell


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
