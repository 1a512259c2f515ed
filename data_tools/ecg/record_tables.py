"""Tables that name records, such as labels or patients: CSV or parquet with a column `record`, and
`source` where databases share names.

    cells = read_table("my.csv")                # all columns as text, null where a cell is empty
    patients = patients_of("who.csv", read_patients("who.csv"), keys)   # null where unknown

The separator of a CSV is a comma, a semicolon or a tab, or what a first line `sep=;` says. Where it is no
comma, 40,1 is a number, read as 40.1 (as_typed gives it back for a message).
record_names.py finds the rows of records.
"""

import csv
import io
import json
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pa_csv
from pyarrow import parquet

from ..io.errors import DataError, ReadError, one_line
from ..io.spreadsheet import QUOTED_FORMULA, unquote_cell
from ..io.storage import missing_package
from ..io.terminal import tell
from .record import MAYBE_MISSING, known_patient
from .record_names import EMPTY_LINES, NAMES_IN_MESSAGE, WHOLE_FLOAT, match_records
from .workbook import is_workbook, read_workbook, workbook_and_sheet

RESERVED = ("record", "source", "patient", "fold", "split")
PTBXL_TABLE = {
    "filename_hr": "record",
    "patient_id": "patient",
}  # columns of ptbxl_database.csv, and what they are here
# 40,1 and also -0,5e-3, but neither 1,234,567 nor 1.234,5
DECIMAL_COMMA = r"^([+-]?\d*),(\d+(?:[eE][+-]?\d+)?)$"
DECIMAL_POINT = DECIMAL_COMMA.replace(",", r"\.", 1)
DECIMAL_COMMA_COLUMNS = b"decimal commas"  # in a table's metadata: the columns that had them
AGES_OVER_89 = ("300", "300.0")
# How Excel writes the separator, in a line that it does not show
SEPARATOR_LINE = re.compile(r"(?i)\"?sep=(.)\"?(?:\r\n|\r|\n)")
EMPTY_LINE = re.compile(r"(?>\r\n|\r|\n){2}")
# More than a thousand, perhaps
THOUSANDS = r"^[+-]?[1-9]\d{0,2}[.,]\d{3}$"


def read_cells(
    url: str, contents: str = "labels", key: str = "record", used: Sequence[str] = ()
) -> pa.Table:
    """Reads all columns as text; names of reserved columns become lower case. `key`: a column that
    the table must have. `used`: columns that may hold numbers; if empty, all."""
    metadata: dict[bytes, str] = {}
    try:
        place, sheet = workbook_and_sheet(url)
        with fsspec.open(place, "rb").open() as file:
            data = file.read()
        if data[:4] == b"PAR1":
            cells = parquet.read_table(io.BytesIO(data))
        elif is_workbook(url) and data[:2] == b"PK":
            cells = read_workbook(data, sheet)
        else:
            cells, metadata = _read_csv_and_metadata(data, key, used)
        cells = cells_as_text(
            cells.rename_columns([_normalize_column_name(column) for column in cells.column_names])
        )
        _require_utf8(cells)
    except pa.ArrowMemoryError:
        raise
    except ImportError as error:
        raise DataError(missing_package(url, error)) from None
    except FileNotFoundError:
        raise DataError(f"{url}: no such file: name a CSV or parquet file of {contents}") from None
    except IsADirectoryError:
        raise DataError(f"{url}: is a folder: name a CSV or parquet file of {contents}") from None
    except Exception as error:  # many kinds: from object stores, pyarrow, a missing package
        why = one_line(str(error), 200)
        kind = "a workbook" if is_workbook(url) else "CSV or parquet"
        raise DataError(f"{url}: cannot be read as {kind}: {why}") from None
    names = cells.column_names
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{url}: two columns are called {twice[0]!r}: rename one")
    return cells.replace_schema_metadata(metadata) if metadata else cells


def undo_decimal_point(cells: pa.Table, column: str, text: str) -> str:
    """Returns a cell as its file spells it: 40,1 was read as 40.1."""
    metadata = cells.schema.metadata or {}
    with_commas = json.loads(metadata.get(DECIMAL_COMMA_COLUMNS, "[]"))
    return re.sub(DECIMAL_POINT, r"\1,\2", text) if column in with_commas else text


def read_table(url: str, contents: str = "labels", used: Sequence[str] = ()) -> pa.Table:
    """A table that names records."""
    cells = read_cells(url, contents, used=used)
    names = cells.column_names
    if PTBXL_TABLE.keys() <= set(names) and "record" not in names:
        names = [PTBXL_TABLE.get(name, name) for name in names]
        cells = cells.rename_columns(names)
    if "record" not in names:
        raise DataError(
            f"{url}: its columns are {', '.join(names[:10])}: a column `record` must name the ECGs: "
            "rename the one that does"
        )
    if not len(cells):
        raise DataError(f"{url}: has a header, but no rows: add a row for each ECG")
    if contents == "labels":
        for name in cells.column_names:
            if name.lower() == "age" and (not used or name in used):
                of_old = pc.sum(pc.is_in(cells[name], pa.array(AGES_OVER_89)), min_count=0).as_py()
                _note_ages_of_300(url, name, of_old)
    if "patient" in names:  # as a dataset writes them
        coded = cells["patient"].combine_chunks().dictionary_encode()
        try:
            plain = pa.array(map(known_patient, coded.dictionary.to_pylist()), pa.string())
        except ReadError as error:
            raise DataError(f"{url}: {error}") from None
        cells = cells.set_column(names.index("patient"), "patient", plain.take(coded.indices))
    return cells


@cache  # a table is read more than once
def _note_ages_of_300(url: str, column: str, rows: int) -> None:
    if rows:
        where = f"{rows:,} row{'s' * (rows > 1)}"
        tell(
            f"note: {url}: {column} is 300 in {where}, as PTB-XL writes ages over 89, and is read as 300: write "
            "90 as a dataset has it, or leave the cell empty"
        )


class _Header(NamedTuple):
    names: list[str]
    mark: str  # the separator
    lines: int  # number of lines that the header takes
    is_all: bool  # True if the file has no other lines


def _parse_header(text: str, key: str, marks: Sequence[str]) -> _Header:
    """The separator is the one that yields a column `key`, or else the most columns."""
    headers = []
    for mark in marks:
        lines = io.StringIO(text, newline="")
        reader = csv.reader(lines, delimiter=mark)
        try:
            names = [unquote_cell(cell) for cell in next(reader, [])]
        except csv.Error:
            raise DataError("the first line has a quote that is not closed") from None
        header = _Header(names, mark, reader.line_num, not lines.read(2**10).strip())
        if len(names) > 1 and _normalize_column_name(key) in map(_normalize_column_name, names):
            return header
        headers.append(header)
    return max(headers, key=lambda header: len(header.names))


def _read_csv_and_metadata(
    data: bytes, key: str, used: Sequence[str]
) -> tuple[pa.Table, dict[bytes, str]]:
    """Returns the cells and metadata: which columns had decimal commas (read as points), and
    where empty lines are."""
    text = decode_text(data)
    marks = [",", ";", "\t"]
    if separator := SEPARATOR_LINE.match(text):
        text, marks = text[separator.end() :], [separator[1]]
    names, mark, lines, is_all = _parse_header(text, key, marks)
    if is_all:
        return pa.table({name: pa.array([], pa.string()) for name in names}), {}
    read = pa_csv.ReadOptions(column_names=names, skip_rows=lines)
    parse = pa_csv.ParseOptions(delimiter=mark, newlines_in_values=True)
    convert = pa_csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), null_values=[""], strings_can_be_null=True
    )
    cells = pa_csv.read_csv(pa.BufferReader(text.encode()), read, parse, convert)
    columns = []
    with_commas = []
    for name, column in zip(names, cells.columns, strict=True):
        column = pc.replace_substring_regex(column, QUOTED_FORMULA, r"\1")
        if (
            mark != ","
            and _normalize_column_name(name) not in RESERVED
            and (not used or _normalize_column_name(name) in used)
        ):
            _require_one_mark(name, pc.drop_null(pc.unique(column)))
            if pc.any(pc.match_substring_regex(column, DECIMAL_COMMA)).as_py():
                column = pc.replace_substring_regex(column, DECIMAL_COMMA, r"\1.\2")
                with_commas.append(_normalize_column_name(name))
        columns.append(column)
    metadata = {}
    if with_commas:
        metadata[DECIMAL_COMMA_COLUMNS] = json.dumps(with_commas)
    if EMPTY_LINE.search(text):
        metadata[EMPTY_LINES] = json.dumps(_empty_lines(text, mark))
    return pa.table(columns, names), metadata


def _empty_lines(text: str, mark: str) -> list[int]:
    """The rows before which there is an empty line, which pyarrow leaves out."""
    rows, empty_lines = 0, []
    for cells in csv.reader(io.StringIO(text, newline=""), delimiter=mark):
        if cells:
            rows += 1
        else:
            empty_lines.append(rows - 1)  # the header is none
    return empty_lines


def _require_one_mark(name: str, values: pa.Array) -> None:
    """Refuses 1.234 beside 12,5, and beside 987: it may mean 1234."""
    like = {}
    for what, pattern in (
        ("point", r"^[+-]?\d*\.\d+$"),
        ("comma", r"^[+-]?\d*,\d+$"),
        ("thousands", THOUSANDS),
        ("whole", r"^[+-]?\d{1,3}$"),
    ):
        like[what] = values.filter(pc.match_substring_regex(values, pattern)).to_pylist()
    marked, other = like["point"] + like["comma"], like["whole"]
    if like["point"] and like["comma"]:
        other = like["comma"]
    elif len(like["thousands"]) < len(marked):  # a decimal is among them
        return
    if marked and other:
        raise DataError(
            f"column {name!r} holds {marked[0]} and {other[0]}: write numbers without thousands "
            f"separators, decimals as {'1.0' if like['point'] else '1,0'}, or leave the column out"
        )


def decode_text(data: bytes) -> str:
    if data.startswith(b"PK"):
        raise DataError("it is a workbook or another archive: save the sheet as CSV UTF-8")
    utf16 = data.startswith((BOM_UTF16_LE, BOM_UTF16_BE))  # Excel's "Unicode text"
    try:
        return data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        raise DataError("its text is not UTF-8: save it as CSV UTF-8") from None


def _require_utf8(cells: pa.Table) -> None:
    """Refuses a parquet file with texts that are not UTF-8, which arrow does not check."""
    for name, column in zip(cells.column_names, cells.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            raise DataError(f"the text of column {name!r} is not UTF-8: save it again") from None


def _normalize_column_name(column: str) -> str:
    return column.strip().lower() if column.strip().lower() in RESERVED else column.strip()


def cells_as_text(cells: pa.Table) -> pa.Table:
    """The cells as text; null where one is empty. A word such as NA is a text like any other."""
    columns = []
    for name, column in zip(cells.column_names, cells.columns, strict=True):
        text = pc.utf8_trim_whitespace(_column_as_text(column))
        text = pc.if_else(pc.equal(text, ""), None, text)
        if name == "index":
            text = pc.replace_substring_regex(text, WHOLE_FLOAT, r"\1")
        columns.append(text)
    return pa.table(columns, cells.column_names)


def _column_as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a column as text: whole numbers without point and exponent, if they are exact."""
    if not pa.types.is_floating(column.type):
        return pc.cast(column, pa.string())
    if column.type == pa.float16():  # which arrow cannot round
        column = pc.cast(column, pa.float32())
    column = pc.if_else(pc.is_nan(column), None, column)
    exact = 2.0 ** (53 if column.type == pa.float64() else 24)
    whole = pc.and_(pc.equal(pc.floor(column), column), pc.less(pc.abs(column), exact))
    digits = pc.cast(pc.cast(pc.if_else(whole, column, 0), pa.int64()), pa.string())
    return pc.if_else(whole, digits, pc.cast(column, pa.string()))


def missing_words(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a mask of the cells with a word, such as NA, that may mean a missing value."""
    words = pa.array(sorted(MAYBE_MISSING))
    return pc.fill_null(pc.is_in(pc.utf8_lower(column), words), False)


def read_patients(url: str) -> pa.Table:
    """A table with the columns `record` and `patient`, or ptbxl_database.csv."""
    cells = read_table(url, "patients")
    if "patient" not in cells.column_names:
        names = ", ".join(cells.column_names[:10])
        raise DataError(f"{url}: its columns are {names}: a column `patient` must name the people")
    owners = cells["patient"]
    if "source" in cells.column_names:
        owners = pc.binary_join_element_wise(cells["source"], owners, "/")
    if doubt := similar_ids_warning(owners.combine_chunks()):
        tell(f"warning: {url}: {doubt}")
    return cells


def similar_ids_warning(owners: pa.Array) -> str:
    """Says which ids may be spellings of one; "" if none. `owners`: PATIENT or SOURCE/PATIENT."""
    groups = similar_ids(owners)
    if not groups:
        return ""
    shown = ", ".join(" and ".join(group) for group in groups[:NAMES_IN_MESSAGE])
    return (
        f"patients {shown}{', ...' * (len(groups) > NAMES_IN_MESSAGE)} differ only in zeros or in case "
        f"({len(groups):,} in all) and count as different people: if they are the same, write their "
        "ids alike"
    )


def similar_ids(owners: pa.Array) -> list[list[str]]:
    """Groups ids that differ only in leading zeros or in case."""
    ids = pc.drop_null(pc.unique(owners))
    folded = pc.replace_substring_regex(pc.utf8_lower(ids), r"^((?:.*/)?)0+(\d+)$", r"\1\2")
    code = folded.dictionary_encode().indices.to_numpy()
    doubtful = np.flatnonzero(np.bincount(code, minlength=1)[code] > 1)
    groups: dict[int, list[str]] = {}
    for number, name in zip(code[doubtful], ids.take(pa.array(doubtful)).to_pylist(), strict=True):
        groups.setdefault(number, []).append(name)
    return [sorted(group) for group in groups.values()]


def patients_of(url: str, cells: pa.Table, keys: pa.Array) -> pa.Array:
    """The patient of each of these source/record; null where unknown. Tells which records of the
    table are not among them."""
    matches = match_records(url, cells, keys, pc.replace_substring_regex(keys, "^[^/]*/", ""))
    for note in matches.notes:
        tell(f"note: {url}: {note}")
    rows = pa.array(matches.row, mask=matches.row < 0)
    return cells["patient"].combine_chunks().take(rows)
