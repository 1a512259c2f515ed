"""Read tables about records, such as labels or patients: CSV or parquet with a column `record`, and a
column `source` if records of several databases have the same name.

    cells = read_table("my.csv")                # all columns as text, null where a cell is empty
    patients = patients_of("who.csv", read_patients("who.csv"), keys)   # null where unknown

The separator of a CSV is a comma, a semicolon or a tab, or what a first line `sep=;` says. If the
separator is not a comma, 40,1 is a number, read as 40.1 (undo_decimal_point gives back 40,1 for messages).
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
from .record_names import EMPTY_LINES_KEY, NAMES_IN_MESSAGE, WHOLE_FLOAT, match_records
from .workbook import is_workbook, read_workbook, workbook_and_sheet

RESERVED_COLUMNS = ("record", "source", "patient", "fold", "split")
# The name that read_table gives to columns of ptbxl_database.csv
PTBXL_COLUMNS = {
    "filename_hr": "record",
    "patient_id": "patient",
}
# A number with a decimal comma, such as 40,1 or -0,5e-3, but neither 1,234,567 nor 1.234,5
DECIMAL_COMMA = r"^([+-]?\d*),(\d+(?:[eE][+-]?\d+)?)$"
DECIMAL_POINT = DECIMAL_COMMA.replace(",", r"\.", 1)
# Key in a table's metadata. Its value lists the columns whose numbers have a decimal comma in the file
DECIMAL_COMMA_COLUMNS_KEY = b"decimal commas"
AGES_OVER_89 = ("300", "300.0")
# The first line, such as sep=;, that tells Excel the separator. Excel does not show this line
SEPARATOR_LINE = re.compile(r"(?i)\"?sep=(.)\"?(?:\r\n|\r|\n)")
EMPTY_LINE = re.compile(r"(?>\r\n|\r|\n){2}")
# A number in which the point or comma may be a thousands separator: 1.234
MAYBE_THOUSANDS = r"^[+-]?[1-9]\d{0,2}[.,]\d{3}$"


def read_cells(
    url: str, contents: str = "labels", key: str = "record", used: Sequence[str] = ()
) -> pa.Table:
    """Reads all columns of a CSV, parquet or Excel file as text; names of reserved columns become lower
    case. `contents`: what the table is about, for messages. `key`: a column by which the separator of a
    CSV is found. `used`: the columns in which a decimal comma is read as a point; if empty, all."""
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
    except Exception as error:  # object stores and pyarrow raise errors of many types
        why = one_line(str(error), 200)
        kind = "a workbook" if is_workbook(url) else "CSV or parquet"
        raise DataError(f"{url}: cannot be read as {kind}: {why}") from None
    names = cells.column_names
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{url}: two columns are called {twice[0]!r}: rename one")
    return cells.replace_schema_metadata(metadata) if metadata else cells


def undo_decimal_point(cells: pa.Table, column: str, text: str) -> str:
    """Returns a cell as the file spells it: 40,1 for the cell 40.1 if the file has decimal commas."""
    metadata = cells.schema.metadata or {}
    with_commas = json.loads(metadata.get(DECIMAL_COMMA_COLUMNS_KEY, "[]"))
    return re.sub(DECIMAL_POINT, r"\1,\2", text) if column in with_commas else text


def read_table(url: str, contents: str = "labels", used: Sequence[str] = ()) -> pa.Table:
    """Return a table that has a column `record`, with all cells as text and patient ids in the form that
    a dataset stores. ptbxl_database.csv is such a table, too."""
    cells = read_cells(url, contents, used=used)
    names = cells.column_names
    if PTBXL_COLUMNS.keys() <= set(names) and "record" not in names:
        names = [PTBXL_COLUMNS.get(name, name) for name in names]
        cells = cells.rename_columns(names)
    if "record" not in names:
        raise DataError(
            f"{url}: its columns are {', '.join(names[:10])}: a column `record` must name the ECGs: "
            "rename the column that has their names"
        )
    if not len(cells):
        raise DataError(f"{url}: has a header, but no rows: add a row for each ECG")
    if contents == "labels":
        for name in cells.column_names:
            if name.lower() == "age" and (not used or name in used):
                of_old = pc.sum(pc.is_in(cells[name], pa.array(AGES_OVER_89)), min_count=0).as_py()
                _note_ages_of_300(url, name, of_old)
    if "patient" in names:  # ids are converted to the form that a dataset stores
        coded = cells["patient"].combine_chunks().dictionary_encode()
        try:
            plain = pa.array(map(known_patient, coded.dictionary.to_pylist()), pa.string())
        except ReadError as error:
            raise DataError(f"{url}: {error}") from None
        cells = cells.set_column(names.index("patient"), "patient", plain.take(coded.indices))
    return cells


@cache  # so that the note comes once, although a table is read several times
def _note_ages_of_300(url: str, column: str, rows: int) -> None:
    if rows:
        where = f"{rows:,} row{'s' * (rows > 1)}"
        tell(
            f"note: {url}: {column} is 300 in {where}, as PTB-XL writes ages over 89, and is read as 300: write "
            "90 as a dataset has it, or leave the cell empty"
        )


class _Header(NamedTuple):
    names: list[str]  # the names of the columns
    separator: str
    lines: int  # how many lines of the file the header takes
    is_all: bool  # True if the file has nothing below the header


def _parse_header(text: str, key: str, separators: Sequence[str]) -> _Header:
    """Return the header as split by the one of `separators` that yields a column `key`; if none does, by
    the one that yields the most columns."""
    headers = []
    for separator in separators:
        lines = io.StringIO(text, newline="")
        reader = csv.reader(lines, delimiter=separator)
        try:
            names = [unquote_cell(cell) for cell in next(reader, [])]
        except csv.Error:
            raise DataError(
                "the first line has a quote that is not closed: add the quote"
            ) from None
        header = _Header(names, separator, reader.line_num, not lines.read(2**10).strip())
        if len(names) > 1 and _normalize_column_name(key) in map(_normalize_column_name, names):
            return header
        headers.append(header)
    return max(headers, key=lambda header: len(header.names))


def _read_csv_and_metadata(
    data: bytes, key: str, used: Sequence[str]
) -> tuple[pa.Table, dict[bytes, str]]:
    """Returns the cells of a CSV file, and metadata: the columns whose decimal commas were read as points,
    and the rows that follow empty lines."""
    text = decode_text(data)
    separators = [",", ";", "\t"]
    if stated := SEPARATOR_LINE.match(text):
        text, separators = text[stated.end() :], [stated[1]]
    names, separator, lines, is_all = _parse_header(text, key, separators)
    if is_all:
        return pa.table({name: pa.array([], pa.string()) for name in names}), {}
    read = pa_csv.ReadOptions(column_names=names, skip_rows=lines)
    parse = pa_csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    convert = pa_csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), null_values=[""], strings_can_be_null=True
    )
    cells = pa_csv.read_csv(pa.BufferReader(text.encode()), read, parse, convert)
    columns = []
    with_commas = []
    for name, column in zip(names, cells.columns, strict=True):
        column = pc.replace_substring_regex(column, QUOTED_FORMULA, r"\1")
        if (
            separator != ","
            and _normalize_column_name(name) not in RESERVED_COLUMNS
            and (not used or _normalize_column_name(name) in used)
        ):
            _refuse_ambiguous_decimals(name, pc.drop_null(pc.unique(column)))
            if pc.any(pc.match_substring_regex(column, DECIMAL_COMMA)).as_py():
                column = pc.replace_substring_regex(column, DECIMAL_COMMA, r"\1.\2")
                with_commas.append(_normalize_column_name(name))
        columns.append(column)
    metadata = {}
    if with_commas:
        metadata[DECIMAL_COMMA_COLUMNS_KEY] = json.dumps(with_commas)
    if EMPTY_LINE.search(text):
        metadata[EMPTY_LINES_KEY] = json.dumps(_rows_after_empty_lines(text, separator))
    return pa.table(columns, names), metadata


def _rows_after_empty_lines(text: str, separator: str) -> list[int]:
    """Return the rows, counted from 0 below the header, that follow an empty line; a row that follows two
    empty lines is returned twice. pyarrow skips empty lines without telling."""
    lines, after_empty = 0, []
    for cells in csv.reader(io.StringIO(text, newline=""), delimiter=separator):
        if cells:
            lines += 1
        else:
            after_empty.append(lines - 1)  # minus 1, because the header is no row
    return after_empty


def _refuse_ambiguous_decimals(name: str, values: pa.Array) -> None:
    """Raises a DataError if a column has numbers with a point and numbers with a comma, or if all numbers
    with a point or comma look like 1.234 and there are whole numbers such as 987. In both cases, 1.234
    may mean 1234."""
    like = {}
    for what, pattern in (
        ("point", r"^[+-]?\d*\.\d+$"),
        ("comma", r"^[+-]?\d*,\d+$"),
        ("thousands", MAYBE_THOUSANDS),
        ("whole", r"^[+-]?\d{1,3}$"),
    ):
        like[what] = values.filter(pc.match_substring_regex(values, pattern)).to_pylist()
    marked, other = like["point"] + like["comma"], like["whole"]
    if like["point"] and like["comma"]:
        other = like["comma"]
    elif len(like["thousands"]) < len(marked):
        # A value such as 12.5 shows that the point or comma is a decimal one
        return
    if marked and other:
        raise DataError(
            f"column {name!r} holds {marked[0]} and {other[0]}: write numbers without thousands "
            f"separators, decimals as {'1.0' if like['point'] else '1,0'}, or leave the column out"
        )


def decode_text(data: bytes) -> str:
    """Return the text of a CSV file, which may be UTF-8 or UTF-16."""
    if data.startswith(b"PK"):
        raise DataError("the file is a workbook or another archive: save the sheet as CSV UTF-8")
    # Excel saves "Unicode text" as UTF-16
    utf16 = data.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        raise DataError("the text of the file is not UTF-8: save it as CSV UTF-8") from None


def _require_utf8(cells: pa.Table) -> None:
    """Raises a DataError if a table has text that is not UTF-8, which arrow does not check when it reads
    parquet."""
    for name, column in zip(cells.column_names, cells.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            raise DataError(
                f"the text of column {name!r} is not UTF-8: save the table again"
            ) from None


def _normalize_column_name(column: str) -> str:
    name = column.strip()
    return name.lower() if name.lower() in RESERVED_COLUMNS else name


def cells_as_text(cells: pa.Table) -> pa.Table:
    """Return all cells as text, null where a cell is empty. Words such as NA stay as they are."""
    columns = []
    for name, column in zip(cells.column_names, cells.columns, strict=True):
        text = pc.utf8_trim_whitespace(_column_as_text(column))
        text = pc.if_else(pc.equal(text, ""), None, text)
        if name == "index":
            text = pc.replace_substring_regex(text, WHOLE_FLOAT, r"\1")
        columns.append(text)
    return pa.table(columns, cells.column_names)


def _column_as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a column as text. Whole numbers have neither point nor exponent, unless they are too large
    to be exact."""
    if not pa.types.is_floating(column.type):
        return pc.cast(column, pa.string())
    if column.type == pa.float16():  # arrow cannot round float16
        column = pc.cast(column, pa.float32())
    column = pc.if_else(pc.is_nan(column), None, column)
    exact = 2.0 ** (53 if column.type == pa.float64() else 24)
    whole = pc.and_(pc.equal(pc.floor(column), column), pc.less(pc.abs(column), exact))
    digits = pc.cast(pc.cast(pc.if_else(whole, column, 0), pa.int64()), pa.string())
    return pc.if_else(whole, digits, pc.cast(column, pa.string()))


def missing_words(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a mask: true where a cell is a word, such as NA, that may mean a missing value."""
    words = pa.array(sorted(MAYBE_MISSING))
    return pc.fill_null(pc.is_in(pc.utf8_lower(column), words), False)


def read_patients(url: str) -> pa.Table:
    """Return a table with the columns `record` and `patient`, and warn of ids that may be spellings of one
    id. ptbxl_database.csv is such a table, too."""
    cells = read_table(url, "patients")
    if "patient" not in cells.column_names:
        names = ", ".join(cells.column_names[:10])
        raise DataError(
            f"{url}: its columns are {names}: a column `patient` must name the patients"
        )
    owners = cells["patient"]
    if "source" in cells.column_names:
        owners = pc.binary_join_element_wise(cells["source"], owners, "/")
    if doubt := similar_ids_warning(owners.combine_chunks()):
        tell(f"warning: {url}: {doubt}")
    return cells


def similar_ids_warning(owners: pa.Array) -> str:
    """Returns a warning that names patient ids that may be spellings of one id; "" if there are none.
    `owners` are PATIENT or SOURCE/PATIENT."""
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
    """Returns the groups of patient ids that differ only in leading zeros or in case."""
    ids = pc.drop_null(pc.unique(owners))
    folded = pc.replace_substring_regex(pc.utf8_lower(ids), r"^((?:.*/)?)0+(\d+)$", r"\1\2")
    code = folded.dictionary_encode().indices.to_numpy()
    doubtful = np.flatnonzero(np.bincount(code, minlength=1)[code] > 1)
    groups: dict[int, list[str]] = {}
    for number, name in zip(code[doubtful], ids.take(pa.array(doubtful)).to_pylist(), strict=True):
        groups.setdefault(number, []).append(name)
    return [sorted(group) for group in groups.values()]


def patients_of(url: str, cells: pa.Table, keys: pa.Array) -> pa.Array:
    """Return the patient of each record in `keys` (SOURCE/RECORD) according to the table `cells`; null if
    unknown. Print notes on rows of the table that match no record, or only approximately."""
    matches = match_records(url, cells, keys, pc.replace_substring_regex(keys, "^[^/]*/", ""))
    for note in matches.notes:
        tell(f"note: {url}: {note}")
    rows = pa.array(matches.row, mask=matches.row < 0)
    return cells["patient"].combine_chunks().take(rows)
