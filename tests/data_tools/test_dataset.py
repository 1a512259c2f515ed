"""Tables that a spreadsheet opens: no cell is a formula, and numbers are numbers."""

import csv
import io

import pytest

from data_tools.dataset import as_csv, unquoted

FORMULAS = ["=1+1", "+1+1|x", "-2+3+cmd", "@SUM(A1)", "\t=1", "-", "+-5"]
KEPT = ["-5", "-0.25", "+1e-3", "-0.2 0.3", "-inf", "a=1", "", "'", "georgia"]


@pytest.mark.parametrize("cell", FORMULAS + KEPT)
def test_formulas_are_quoted_and_numbers_are_not(cell: str) -> None:
    ((read, number),) = csv.reader(io.StringIO(as_csv([(cell, -0.5)]), newline=""))
    assert read == ("'" + cell if cell in FORMULAS else cell) and number == "-0.5"
    assert unquoted(read) == cell


def test_a_carriage_return_starts_no_line() -> None:
    assert as_csv([("a\r=1", "\r=1")]) == "a =1,' =1\n"
