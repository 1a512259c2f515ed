"""A dataset as a sequence of ECGs, and CSV tables that are safe in a spreadsheet: no formulas,
numbers stay numbers."""

import csv
import io
from itertools import islice

import numpy as np
import pyarrow as pa
import pytest

from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.data_tools.io.spreadsheet import csv_text, quote_formulas, unquote_cell

FORMULAS = ["=1+1", "+1+1|x", "-2+3+cmd", "@SUM(A1)", "\t=1", "-", "+-5", "'=1", "''-5", "\r=1"]
KEPT = ["-5", "-0.25", "+1e-3", "-0.2 0.3", "-inf", "a=1", "", "'", "georgia"]


@pytest.mark.parametrize("cell", FORMULAS + KEPT)
def test_formulas_are_quoted_and_numbers_are_not(cell):
    quoted = f"'{cell}" if cell in FORMULAS else cell
    text = io.StringIO(csv_text([(cell, -0.5)]), newline="")
    assert list(csv.reader(text)) == [[quoted, "-0.5"]]
    assert unquote_cell(quoted) == cell
    table = quote_formulas(pa.table({cell: [cell, None], "number": [-0.5, 1]}))
    assert table.to_pydict() == {quoted: [quoted, None], "number": [-0.5, 1]}


def test_a_carriage_return_does_not_start_a_new_line():
    assert csv_text([("a\r=1", "\r=1")]) == '"a\r=1","\'\r=1"\n'


def test_a_dataset_is_a_sequence_of_ecgs(dataset):
    last, rows = len(dataset) - 1, dataset.table().to_pylist()
    for row in (0, last, int(np.flatnonzero(dataset.column("halves") == 1)[0])):
        ecg, facts = dataset[row], rows[row]
        assert np.array_equal(ecg.signal_uv, dataset.read(row))
        assert ecg.signal_mv.dtype == np.float32
        np.testing.assert_allclose(ecg.signal_mv, ecg.signal_uv / 1000, rtol=1e-6)
        for name in ("record", "patient", "age", "sex", "dx", "halves", "missing_leads"):
            assert getattr(ecg, name) == facts[name]
        has = zip(CLASSES, facts["labels"], strict=True)
        assert ecg.labels == [name for name, there in has if there]
    assert dataset[-1].row == dataset[np.int64(last)].row == last
    assert [ecg.row for ecg in islice(dataset, 3)] == [0, 1, 2]
    for row in (last + 1, -last - 2):
        with pytest.raises(IndexError, match=f"row {row}: .* has crops 0 to {last}"):
            dataset[row]
    assert repr(dataset).startswith(f"Dataset({dataset.root.url!r}: {last + 1:,} crops of ")
    assert "\n" not in repr(dataset) and "signal" not in repr(dataset[0])


def test_row_groups_are_read_only_once(dataset):
    """As in a dataset of more than 65,536 crops."""
    opened = Dataset.open(dataset.root.url)
    whole = opened._read_row_group(0)
    opened.__dict__["_group_begins"] = np.array([0, 5, 5])
    opened.__dict__["_read_row_group"] = lambda group: whole.slice([0, 5, 5][group])
    assert [opened[row].record for row in range(8)] == dataset.column("record")[:8].tolist()
