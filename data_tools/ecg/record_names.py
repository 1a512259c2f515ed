"""Find the row of a table that belongs to each record of a dataset.

    matches = match_records("my.csv", cells, keys, names)
    matches.row[7]      # the row of the eighth record; -1: none

A table names a record as the dataset does (ward_3_A1), or by its path in the archive, with or without
the file's suffix (ward 3/A1.xml). If a row matches no record in this way, three approximate ways are
tried, and a note tells how many rows they matched: the name with _ for unusual characters of the
file's name; the path without its first folders (C:\\ecgs\\ward 3\\A1.xml); and the end of a record's
name (A1), if no other name has this end.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..io.errors import DataError

NAMES_IN_MESSAGE = 3  # how many names a message shows at most
FIRST_ROW_NUMBER = 2  # number that a spreadsheet shows for the row below the header
# Key in a table's metadata. Its value lists the rows, counted from 0, that follow an empty line in the file
EMPTY_LINES_KEY = b"empty lines"
FILE_ENDING = r"\.[A-Za-z]\w{1,3}$"
ODD_CHARACTERS = "[^A-Za-z0-9_-]+"  # a dataset's record names have _ in their place
# Pattern and replacement: from a file name of PTB-XL to the record name that the Challenge gives it
PTBXL_FILE_NAME = (r"^(syn\d+_)?(\d{5})_[hl]r$", r"\1HR\2")
# Pattern and replacement that drop the first part, up to _, of a name: SOURCE/FIRST_REST becomes
# SOURCE/REST, and FIRST_REST becomes REST
FIRST_PART, WITHOUT_FIRST = "^((?:[^/]*/)?)[^/_]*_([^/]+)$", r"\1\2"
SYNTHETIC_NAME = r"(?:^|[/_])syn\d+_"
WHOLE_FLOAT = r"^(\d+)\.0$"  # a whole number as spreadsheets and pandas may write it: 7.0
# A decimal number is no path, so that 1.5 does not match the record 1_5
DECIMAL_NUMBER = r"^[+-]?\d*[.,]\d+$"
# The ways in which a row can match a record. Notes report all of them but EXACT
EXACT, CHARACTERS, FOLDERS, END = range(4)
MATCH_NOTES = {
    CHARACTERS: "are matched with _ for unusual characters of a file's name",
    FOLDERS: "are matched without their first folders",
    END: "are matched by the end of a name in the data, since no other name has this end",
}


class Matches(NamedTuple):
    row: np.ndarray  # for each record of the dataset, its row in the table; -1 if it has none
    notes: list[str]  # notes for the user: rows without a record, and approximate matches
    mostly_missing: bool  # True if most rows of the table match no record


def row_number(cells: pa.Table, row: int) -> int:
    """Return the number that a spreadsheet shows for row `row` (from 0) of a table."""
    metadata = cells.schema.metadata or {}
    empty_lines = json.loads(metadata.get(EMPTY_LINES_KEY, "[]"))
    return FIRST_ROW_NUMBER + row + bisect_right(empty_lines, row)


def match_records(url: str, cells: pa.Table, keys: pa.Array, names: pa.Array) -> Matches:
    """Finds the row of the table `cells` for each record of a dataset. `keys` are the records as
    SOURCE/RECORD, `names` as RECORD. `url` is the table's, for messages."""
    by_source = "source" in cells.column_names
    # The names of the dataset's records, with which those in the table are compared. If the table has no
    # column `source`, records of two databases that have the same name have equal targets
    targets = keys if by_source else names
    record = cells["record"].combine_chunks()
    source = cells["source"].combine_chunks() if by_source else None
    target_of_row = np.full(len(record), -1)
    way_of_row = np.full(len(record), EXACT)
    for way, spelling in _name_spellings(record):
        target = index_in(_prefix_source(spelling, source), targets)
        if way != EXACT:  # a record that some row names exactly is not matched approximately
            target[np.isin(target, target_of_row[way_of_row == EXACT])] = -1
        new = (target_of_row < 0) & (target >= 0)
        target_of_row[new], way_of_row[new] = target[new], way
        if (target_of_row >= 0).all():
            break
    left = np.flatnonzero(target_of_row < 0)
    if len(left):
        ends = _prefix_source(_to_record_names(_record_paths(record)), source).take(pa.array(left))
        taken = np.unique(target_of_row[target_of_row >= 0])
        target_of_row[left] = _match_by_end(url, cells, left, ends, targets, taken)
        way_of_row[left] = END
    rows, missing = np.flatnonzero(target_of_row >= 0), np.flatnonzero(target_of_row < 0)
    _refuse_ambiguous(url, cells, rows, target_of_row[rows], keys, targets)
    row_of_key = np.full(len(keys), -1)
    row_of_key[target_of_row[rows]] = rows
    notes = list(_match_notes(record, targets, target_of_row, way_of_row))
    return Matches(row_of_key, notes, len(missing) > len(rows))


def _match_notes(
    record: pa.Array, targets: pa.Array, target_of_row: np.ndarray, way_of_row: np.ndarray
) -> Iterator[str]:
    """Yields notes on the rows that match no record, and on those that match one only approximately."""
    missing = np.flatnonzero(target_of_row < 0)
    if len(missing):
        yield (
            f"{count_and_first_names(missing, record)} of {len(record):,} records are not in the data"
            + _lost_zeros_note(record.take(pa.array(missing)), targets)
        )
    for way, how in MATCH_NOTES.items():
        matched = np.flatnonzero((target_of_row >= 0) & (way_of_row == way))
        if len(matched):
            example = f"{record[int(matched[0])]} is {targets[int(target_of_row[matched[0]])]}"
            yield f"{count_and_first_names(matched, record)} of {len(record):,} records {how}: {example}"


def _lost_zeros_note(absent: pa.Array, targets: pa.Array) -> str:
    """Returns a note if some name of `absent` seems to have lost its leading zeros in a spreadsheet (6304
    for 06304), else ""."""
    numbers = absent.filter(pc.match_substring_regex(absent, "^[1-9]"))
    for names in (targets, pc.replace_substring_regex(targets, "^.*[/_]", "")):
        place = index_in(numbers, pc.replace_substring_regex(names, "^0+", ""))
        if (place >= 0).any():
            row = int(np.flatnonzero(place >= 0)[0])
            return (
                f"; {numbers[row]} may be {names[int(place[row])]}: did a spreadsheet drop zeros?"
            )
    return ""


def _name_spellings(record: pa.Array) -> Iterator[tuple[int, pa.Array]]:
    """Yields (way, names): the record names of a table, converted in each way in which a dataset may have
    named them. The most exact ways come first, except that the
    file names of PTB-XL, which are EXACT too, come last."""
    yield EXACT, record
    path = _record_paths(record)
    yield EXACT, _to_record_names(path, odd_files=True)
    yield CHARACTERS, _to_record_names(path)
    while pc.any(pc.match_substring(path, "/")).as_py():
        # The first folder is dropped, because it may lie above the archive
        path = pc.replace_substring_regex(path, "^[^/]*/", "")
        yield FOLDERS, _to_record_names(path)
    yield EXACT, pc.replace_substring_regex(path, *PTBXL_FILE_NAME)


def _record_paths(record: pa.Array) -> pa.Array:
    """Returns the record names of a table as paths, without suffix and with / between folders. 7.0 becomes
    7; other decimal numbers become null."""
    record = pc.replace_substring_regex(record, WHOLE_FLOAT, r"\1")
    path = pc.replace_substring(pc.replace_substring_regex(record, FILE_ENDING, ""), "\\", "/")
    path = pc.replace_substring_regex(path, r"^(\./+)+", "")
    return pc.if_else(
        pc.match_substring_regex(record, DECIMAL_NUMBER), pa.scalar(None, path.type), path
    )


def _to_record_names(path: pa.Array, odd_files: bool = False) -> pa.Array:
    """Converts paths to record names as sources.base.name_with_folders does: folders and file joined by _, and _
    for odd characters. With `odd_files`, the file's own name keeps its odd characters."""
    folders = pc.replace_substring_regex(path, "/?[^/]*$", "")
    folders = pc.replace_substring_regex(folders, ODD_CHARACTERS, "_")
    file = pc.replace_substring_regex(path, "^.*/", "")
    if not odd_files:
        file = pc.replace_substring_regex(file, ODD_CHARACTERS, "_")
    joined = pc.binary_join_element_wise(folders, file, "_")
    return pc.if_else(pc.equal(folders, ""), file, joined)


def _prefix_source(names: pa.Array, source: pa.Array | None) -> pa.Array:
    """Return SOURCE/NAME for each name; the names unchanged if `source` is None."""
    return names if source is None else pc.binary_join_element_wise(source, names, "/")


def _match_by_end(
    url: str,
    cells: pa.Table,
    rows: np.ndarray,
    ends: pa.Array,
    targets: pa.Array,
    taken: np.ndarray,
) -> np.ndarray:
    """Return, for each of `rows`, the index of the only target whose name ends with the row's `ends`; -1 if
    there is none, or if it is one of `taken`, the targets that other rows match. If several names have
    this end, raise a DataError if `taken` is empty, and return -1 otherwise. Synthetic targets are left
    out: without the seed at its beginning, the name of a synthetic record may equal that of a real one."""
    is_synthetic = pc.match_substring_regex(targets, SYNTHETIC_NAME)
    names = targets.filter(pc.invert(is_synthetic)).unique()
    distinct = ends.drop_null().unique()
    end_of_pair, name_of_pair = _pair_ends_with_names(distinct, names)
    names_of_end = np.bincount(end_of_pair, minlength=len(distinct))
    shared = np.flatnonzero(names_of_end > 1)
    if len(shared) and not len(taken):
        end = distinct[int(shared[0])]
        row = int(rows[pc.index(ends, end).as_py()])
        alike = np.sort(name_of_pair[end_of_pair == shared[0]])
        first, second = names.take(pa.array(alike[:2])).to_pylist()
        raise DataError(
            f"{url}: {end} (row {row_number(cells, row)}) is the end of two names, {first} and {second}: write the "
            "record's name with its folders"
        )
    target_of_pair = index_in(names.take(pa.array(name_of_pair)), targets)
    target_of_pair[(names_of_end[end_of_pair] > 1) | np.isin(target_of_pair, taken)] = -1
    pair_of_row = index_in(ends, distinct.take(pa.array(end_of_pair)))
    return np.asarray(np.append(target_of_pair, -1)[pair_of_row])


def _pair_ends_with_names(ends: pa.Array, names: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns (indices in `ends`, indices in `names`) of all pairs in which the name has this end."""
    pairs = [np.empty((2, 0), int)]
    rest, name = names, np.arange(len(names))
    while len(rest):
        goes_on = pc.match_substring_regex(rest, FIRST_PART)
        rest, name = rest.filter(goes_on), name[np.asarray(goes_on)]
        rest = pc.replace_substring_regex(rest, FIRST_PART, WITHOUT_FIRST)
        end = index_in(rest, ends)
        pairs.append(np.stack([end, name])[:, end >= 0])
    end, name = np.concatenate(pairs, axis=1)
    return end, name


def _refuse_ambiguous(
    url: str,
    cells: pa.Table,
    rows: np.ndarray,
    target_of_row: np.ndarray,
    keys: pa.Array,
    targets: pa.Array,
) -> None:
    """Raises a DataError if no row matches a record, if a matched name belongs to several records, or if
    several rows match the same record."""
    record = cells["record"]
    if not len(rows):
        in_table = ", ".join(map(str, record[:NAMES_IN_MESSAGE].to_pylist()))
        in_data = ", ".join(map(str, targets[:NAMES_IN_MESSAGE].to_pylist()))
        raise DataError(
            f"{url}: none of its {len(record):,} records is in the data: the table has names like {in_table}, "
            f"the data like {in_data}: write the names of the data"
        )
    target_of_key = targets.dictionary_encode().indices.to_numpy()
    rows_of_target = np.bincount(target_of_key[target_of_row], minlength=len(keys))
    keys_of_target = np.bincount(target_of_key, minlength=len(keys))
    shared = np.flatnonzero((rows_of_target > 0) & (keys_of_target > 1))
    if len(shared):
        twice = keys.take(pa.array(np.flatnonzero(target_of_key == shared[0]))).to_pylist()
        raise DataError(
            f"{url}: {' and '.join(twice[:2])} have the same record name: add a column `source` to the "
            "table"
        )
    again = np.flatnonzero(rows_of_target > 1)
    if len(again):
        first, second = rows[target_of_key[target_of_row] == again[0]][:2].tolist()
        raise DataError(
            f"{url}: record {record[first]} is in rows {row_number(cells, first)} and "
            f"{row_number(cells, second)}: keep one of them"
        )


def index_in(values: pa.Array, among: pa.Array) -> np.ndarray:
    """Return the index of each value in `among`; -1 for a value that is null or not there."""
    index = pc.fill_null(pc.index_in(values, among), -1)
    return np.array(index.to_numpy(zero_copy_only=False))


def count_and_first_names(positions: np.ndarray, names: pa.Array) -> str:
    """Returns how many positions there are, with the names at the first of them: 12 (a, b, c, ...)."""
    shown = ", ".join(map(str, names.take(pa.array(positions[:NAMES_IN_MESSAGE])).to_pylist()))
    return f"{len(positions):,} ({shown}{', ...' if len(positions) > NAMES_IN_MESSAGE else ''})"
