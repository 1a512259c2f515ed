"""Reads arrays of many ECGs, and tables beside them. ROOT/arrays.yaml describes both.

    file: ecg.npy                # or a pattern, as records/*.h5; .npy, .npz, HDF5, .zarr
    fs_hz: 500                   # or a column of the table
    unit: mV                     # V, mV, uV, or how many microvolts one step is
    leads: 12                    # in the order of LEADS; or their names in order
    table: metadata.csv
    patient: subject_id          # a column

docs/arrays.md lists all entries. A missing entry is filled in only if one value is possible. Each ECG has a
key `file#row`. Files are opened once in each process and read by row.
"""

import glob
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from ..ecg.crops import (
    IMPLAUSIBLE_AMPLITUDE,
    implausible_amplitude_text,
    signal_in_microvolts,
)
from ..ecg.record import (
    LEADS,
    MV_PER_UNIT,
    SYNTHETIC,
    EcgRecord,
    Header,
    age_and_sex_warnings,
    clean_age,
    clean_sex,
    lead_rows,
    record_stem,
    unit_name,
)
from ..ecg.record_tables import cells_as_text, read_cells
from ..ecg.resampling import rate_ratio
from ..io.errors import DataError, Flag, ReadError, one_line
from ..io.spreadsheet import to_number
from ..io.storage import Folder
from .array_files import (
    ARRAY_ENDINGS,
    LOCAL_ONLY,
    array_errors,
    arrays_in,
    open_array,
    path_inside,
    strip_padding,
)
from .base import Source, name_with_folders, threadsafe_cache
from .zip_folder import is_in_zip

YAML, MAX_YAML = "arrays.yaml", 2**16
TABLE_ENDINGS = (".csv", ".parquet")
TABLE_COLUMNS = {"record", "patient", "age", "sex", "index", "fs_hz"}
REQUIRED_ENTRIES = {
    "fs_hz": "the sampling rate in Hz, or a column of the table",
    "unit": "mV, uV, V, or how many microvolts one step is",
    "leads": "12 (I II III aVR aVL aVF V1 to V6), or the names of all leads in order",
}
MAX_ECGS, MAX_ARRAY_SAMPLES, MAX_ARRAY_TABLE = 20_000_000, 2_000_000, 2**29
FINGERPRINT_SAMPLES = 64  # number of first samples of each lead that go into a record's fingerprint
NOT_MEASURED = -32_768  # value of int16 samples that were not measured


class ArrayDescription(BaseModel):
    """The entries of arrays.yaml, which describe the arrays."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    file: str  # name of the file, or a pattern for several files
    dataset: str = ""  # name of the array in an HDF5, .npz or zarr file
    layout: tuple[str, ...] = ()
    leads: tuple[str, ...]
    unit: str
    fs_hz: str
    padding: Literal["", "zeros"] = ""
    table: str = ""
    # Each entry down to `index` names a column of the table; without a table, it names an array in the file
    record: str = ""
    patient: str = ""
    age: str = ""
    sex: str = ""
    index: str = ""  # column with the number of the ECG in the array, from 0
    name: str = "arrays"  # name of the database
    licence: str = "unknown"

    @field_validator("layout", "leads", mode="before")
    @classmethod
    def _split_words(cls, words: Any) -> Any:
        if isinstance(words, str | int):
            words = str(words).replace(",", " ").split()
        return LEADS if words == ["12"] else words

    @property
    def columns(self) -> dict[str, str]:
        named = self.model_dump(include=TABLE_COLUMNS, exclude_defaults=True)
        if not math.isnan(to_number(self.fs_hz)):
            del named["fs_hz"]
        return named

    @property
    def has_many_ecgs(self) -> bool:
        """Return True if a file has many ECGs."""
        return "ecgs" in self.layout


class ArrayTable(NamedTuple):
    """The cells of a table as text. `rows` is {number of an ECG as text, or name of its file without folder and
    extension: its row}; None if the rows are in the order of the ECGs."""

    cells: pa.Table
    rows: Mapping[str, int] | None


class ArraySource(Source):
    name = "arrays"

    def __init__(self, root: Folder, options: Mapping[str, Any] | None = None) -> None:
        """Read arrays.yaml and check the tables. `options`: the fs_hz, unit and leads that the user states if
        there is no arrays.yaml."""
        super().__init__(root)
        try:
            self.facts = _read_description(root, dict(options or {}))
            if self.facts.table:
                _read_table(root, self.facts)
            else:
                for name in self.facts.columns.values():
                    _read_column(root, _array_files(root, self.facts.file)[0], name, self.facts)
        except DataError as error:
            why = error.reason if root.private and isinstance(error, ReadError) else error
            raise DataError(f"{root.url}: {why}") from None
        self.name, self.licence = self.facts.name, self.facts.licence
        if self.facts.patient:
            self.private = "the table's names of records and patients"

    @staticmethod
    def detect(names: set[str]) -> bool:
        return YAML in names

    def keys(self) -> Iterator[str]:
        for part in _array_files(self.root, self.facts.file):
            count = 1
            if self.facts.has_many_ecgs:
                with suppress(ReadError):  # `read` raises the same error for the first key
                    count = _count_ecgs(self.root, part, self.facts)
            for row in range(count):
                yield f"{part}#{row}"

    def notes(self) -> list[str]:
        """Return notes on how the files were understood, because nothing would reveal a wrong rate or row
        order."""
        facts = self.facts
        text = f"{self.root.url}: ECGs are read as [{', '.join(facts.layout)}]"
        with suppress(ReadError):  # `read` raises the same error
            shape = _open_array(self.root, _array_files(self.root, facts.file)[0], facts).shape
            if (fs_hz := to_number(facts.fs_hz)) > 0:
                length_s = shape[facts.layout.index("samples")] / fs_hz
                text += f", {length_s:g} s long in the first file{', padded' * bool(facts.padding)}"
        if facts.table and facts.has_many_ecgs and not facts.index:
            text += "; the rows of the table are in the order of the ECGs"
        return [text, self._unread_table_note()]

    def _unread_table_note(self) -> str:
        """Return a note if a table with the name of the array's file is not read; "" otherwise."""
        facts, root = self.facts, self.root
        stem = _array_files(root, facts.file)[0].rpartition(".")[0]
        tables = [f"{stem}{ending}" for ending in TABLE_ENDINGS if root.exists(f"{stem}{ending}")]
        if facts.table or not tables:
            return ""
        if root.private:
            return f"{root.url}: a table has the array's name and is not read: name it in {YAML}"
        columns = []
        with suppress(DataError):  # the file is not a readable table
            columns = read_cells(root.path(tables[0]), "patients").column_names
        words = {
            "table": tables[0],
            "patient": "patient_id" if "patient_id" in columns else "COLUMN",
        }
        words |= {name: name for name in ("record", "patient", "age", "sex") if name in columns}
        if root.exists(YAML):
            lines = "; ".join(f"{word}: {value}" for word, value in words.items())
            mend = f"add to {YAML} the lines {lines}"
        else:
            leads = "12" if facts.leads == LEADS else f"[{', '.join(facts.leads)}]"
            words = {
                "file": facts.file,
                "fs_hz": facts.fs_hz,
                "unit": facts.unit,
                "leads": leads,
                **words,
            }
            facts_said = ", ".join(f"{word}: {value}" for word, value in words.items())
            mend = f"instead of --fs, --unit and --leads write {YAML} with {{{facts_said}}}"
        return f"{root.url}: {tables[0]} is not read: to use it, {mend}"

    def tables(self) -> bytes:
        table = self.facts.table and self.root.read(self.facts.table, MAX_ARRAY_TABLE)
        return f"{self.facts} {table!r}".encode()

    def name_for(self, key: str) -> str:
        part, _, row = key.rpartition("#")
        return f"{record_stem(part)}_{row}" if self.facts.has_many_ecgs else record_stem(part)

    def header(self, key: str) -> Header:
        """Return a record's header. Of a .npy file only the first samples are read."""
        record = self._read_ecg(key)
        content = record.signal[:, :FINGERPRINT_SAMPLES].tobytes()
        stamp = self.root.stamp(key.rpartition("#")[0])
        samples, fs_hz, patient = record.signal.shape[1], record.fs_hz, record.patient
        return Header(record.name, self.name, samples, fs_hz, content, stamp, patient)

    def read(self, key: str) -> EcgRecord:
        record = self._read_ecg(key)
        measured = np.any(record.signal, axis=1)
        if not measured.any():
            raise ReadError("no valid lead", "all samples are 0")
        leads = tuple(compress(record.leads, measured.tolist()))
        record = replace(record, signal=record.signal[measured], leads=leads)
        with np.errstate(invalid="ignore", over="ignore"):
            doubt = implausible_amplitude_text(signal_in_microvolts(record), record.fs_hz)
        if doubt:
            doubt += ": is the unit right?"
            warnings = (*record.warnings, (IMPLAUSIBLE_AMPLITUDE, doubt))
            record = replace(record, warnings=warnings)
        return record

    def _read_ecg(self, key: str) -> EcgRecord:
        facts = self.facts
        part, _, row = key.rpartition("#")
        values, cells = (
            _open_array(self.root, part, facts),
            _ecg_cells(self.root, part, int(row), facts),
        )
        index_of = {"ecgs": int(row), "1": 0}
        with array_errors(part):
            signal = np.asarray(
                values[tuple(index_of.get(axis, slice(None)) for axis in facts.layout)]
            )
        if facts.layout.index("samples") < facts.layout.index("leads"):
            signal = signal.T
        if facts.padding:
            signal = strip_padding(signal)
        name = name_with_folders(part, self.name_for(key))
        if facts.record:
            if not cells["record"]:
                raise ReadError("record name", f"the cell in column {facts.record} is empty")
            name = record_stem(cells["record"].replace("/", "_") + ".", longest=None)
        fs_hz = to_number(cells.get("fs_hz", facts.fs_hz))
        rate_ratio(fs_hz)  # raises a ReadError if the rate is not supported
        age, sex = clean_age(cells.get("age")), clean_sex(cells.get("sex"))
        return EcgRecord(
            name,
            signal,
            fs_hz,
            facts.leads,
            gain=1 / _mv_per_step(facts.unit),
            invalid=NOT_MEASURED if signal.dtype == np.int16 else None,
            source=self.name,
            patient=cells.get("patient"),
            age=age,
            sex=sex,
            warnings=age_and_sex_warnings(cells, age=age, sex=sex),
        )


def _mv_per_step(unit: str) -> float:
    mv = to_number(unit) / 1000
    if math.isnan(mv):
        mv = MV_PER_UNIT[unit_name(unit)]
    if not 0 < mv < math.inf:
        raise DataError(f"unit: {unit} is not a positive number: write {REQUIRED_ENTRIES['unit']}")
    return mv


# arrays.yaml


def _read_description(root: Folder, words: Any) -> ArrayDescription:
    if root.remote or is_in_zip(root):
        raise DataError(LOCAL_ONLY)
    described = root.exists(YAML)
    if described:
        if words:
            raise DataError(
                f"{YAML} describes the arrays: leave out ",
                Flag("--fs"),
                ", ",
                Flag("--unit"),
                " and ",
                Flag("--leads"),
            )
        words = _read_yaml(root)
    if "file" not in words:
        files = [name for name in root.children() if name.endswith(ARRAY_ENDINGS)]
        if len(files) != 1:
            kinds = ", ".join(ARRAY_ENDINGS)
            raise DataError(
                f"{len(files)} files end in {kinds}, not exactly one: add `file: NAME` or a pattern to {YAML}"
            )
        words["file"] = glob.escape(files[0])
        if not described and not words.keys() >= REQUIRED_ENTRIES.keys():
            raise DataError(*_shortest_yaml_error(root, files[0]))
    try:
        facts = ArrayDescription.model_validate(words)
    except ValidationError as error:
        first = error.errors()[0]
        word = str(first["loc"][0])
        mend = REQUIRED_ENTRIES.get(word, f"not one of {', '.join(ArrayDescription.model_fields)}")
        raise DataError(f"{YAML}: {word}: {first['msg']}: {mend}") from None
    if facts.name.startswith(SYNTHETIC):
        raise DataError(
            f"name: {facts.name}: names that begin with {SYNTHETIC} are for the artificial ECGs of "
            "`omnilead synth`: choose another name"
        )
    lead_rows(facts.leads)
    _mv_per_step(facts.unit)
    if "fs_hz" not in facts.columns:
        rate_ratio(float(facts.fs_hz))
    return _complete_description(root, facts)


def _read_yaml(root: Folder) -> dict[Any, Any]:
    data = root.read(YAML, MAX_YAML)
    try:
        words = yaml.safe_load(data)
    except Exception as error:  # tags in a YAML file may raise many kinds of errors
        raise DataError(one_line(f"{YAML} is not valid YAML: {error}", 200)) from None
    if not isinstance(words, dict):
        raise DataError(
            f"{YAML} holds no entries: write one `name: value` on each line, such as `fs_hz: 500`"
        )
    return words


def _complete_description(root: Folder, facts: ArrayDescription) -> ArrayDescription:
    """Return `facts` with the dataset and the layout filled in from the first file. Raise an error if not
    exactly one of each is possible."""
    part = _array_files(root, facts.file)[0]
    if not facts.dataset:
        facts = facts.model_copy(update={"dataset": _only_array(root, part)})
    if not facts.layout:
        shape = open_array(root, part, facts.dataset).shape
        facts = facts.model_copy(update={"layout": _only_layout(shape, len(facts.leads))})
    axes = set(facts.layout)
    known = {"leads", "samples"} <= axes <= {"ecgs", "leads", "samples", "1"}
    if not known or len(axes) < len(facts.layout):
        order = ", ".join(facts.layout)
        raise DataError(
            f"layout: [{order}]: name each axis of the array once: leads, samples, ecgs for many ECGs, and 1 "
            "for an axis of length 1"
        )
    return facts


def _only_array(root: Folder, part: str) -> str:
    """Return the name of the only array in a file that can hold ECGs; "" if the file is a single array."""
    arrays = arrays_in(root, part)
    candidates = [name for name, values in arrays.items() if len(values.shape) > 1]
    if len(candidates) != 1:
        shown = ", ".join(f"{name} {list(values.shape)}" for name, values in arrays.items())
        raise DataError(
            f"{part} holds {shown or 'no array'}, not exactly one array that can hold ECGs: add "
            f"`dataset: NAME` to {YAML}"
        )
    return candidates[0]


def _shortest_yaml_error(root: Folder, part: str) -> tuple[str, ...]:
    """Return the text, in parts, of an error that shows the shortest possible arrays.yaml for a file."""
    dataset = _only_array(root, part)
    values = open_array(root, part, dataset)
    leads = "12" if 12 in values.shape else "[I, II, ...]"
    inside = f"dataset: {dataset}, " if dataset else ""
    return (
        Flag("--source"),
        f" arrays needs {YAML} there; the shortest for {part}, {values.dtype} "
        f"{list(values.shape)}, is {{file: {part}, {inside}fs_hz: HZ, unit: UNIT, leads: {leads}}} "
        f"with HZ {REQUIRED_ENTRIES['fs_hz']}, UNIT {REQUIRED_ENTRIES['unit']}; or give ",
        Flag("--fs"),
        " HZ ",
        Flag("--unit"),
        " UNIT ",
        Flag("--leads"),
        f" {leads}",
    )


def _only_layout(shape: tuple[int, ...], leads: int) -> tuple[str, ...]:
    """Return the axes of an array. Raise a DataError unless its shape fits exactly one layout."""
    if len(shape) not in (2, 3):
        axes = "[ecgs, 1, samples, leads]"
        raise DataError(
            f"the array has shape {list(shape)}: name its axes in {YAML}, such as `layout: {axes}`"
        )
    readings: list[tuple[str, ...]] = [("leads", "samples"), ("samples", "leads")]
    if len(shape) == 3:
        readings = [("ecgs", *axes) for axes in readings]
    possible = [axes for axes in readings if shape[axes.index("leads")] == leads]
    if len(possible) == 1:
        return possible[0]
    either, other = (f"layout: [{', '.join(axes)}]" for axes in readings)
    raise DataError(
        f"an array of shape {list(shape)} with {leads} leads fits {'both' if possible else 'neither'} "
        f"{either} {'and' if possible else 'nor'} {other}: write the layout and all leads in order in {YAML}"
    )


# Files and tables


def _array_files(root: Folder, pattern: str) -> list[str]:
    """Return the files that match the pattern, in alphabetical order."""
    parts = sorted(glob.glob(pattern, root_dir=root.url, recursive=True))
    if not parts:
        raise DataError(f"file: {pattern}: no file has this name or matches this pattern")
    return parts


@lru_cache(maxsize=32)
def _open_array(root: Folder, part: str, facts: ArrayDescription) -> Any:
    values = open_array(root, part, facts.dataset)
    most = {"ecgs": MAX_ECGS, "samples": MAX_ARRAY_SAMPLES, "leads": len(facts.leads), "1": 1}
    shape = dict(zip(facts.layout, values.shape, strict=False))
    if (
        len(values.shape) != len(facts.layout)
        or shape["leads"] != len(facts.leads)
        or any(size > most[axis] for axis, size in shape.items())
        or values.dtype.kind not in "iuf"
    ):
        seen = f"{part}: {values.dtype} {list(values.shape)}"
        wanted = f"[{', '.join(facts.layout)}] with {len(facts.leads)} leads"
        raise ReadError("unexpected array shape", f"{seen}, expected {wanted}")
    return values


def _count_ecgs(root: Folder, part: str, facts: ArrayDescription) -> int:
    """Return the number of ECGs in a file."""
    return (
        int(_open_array(root, part, facts).shape[facts.layout.index("ecgs")])
        if facts.has_many_ecgs
        else 1
    )


@threadsafe_cache
def _read_table(root: Folder, facts: ArrayDescription) -> ArrayTable:
    path, columns = path_inside(root, facts.table), facts.columns
    if path.stat().st_size > MAX_ARRAY_TABLE:
        raise ReadError("file too large", f"{facts.table}: over {MAX_ARRAY_TABLE:,} bytes")
    if not columns:
        raise DataError(
            f"table: {facts.table}: {YAML} names none of its columns: add `patient: COLUMN`"
        )
    cells = read_cells(str(path), "patients", next(iter(columns.values())))
    if absent := set(columns.values()) - set(cells.column_names):
        there = ", ".join(cells.column_names[:20])
        raise DataError(
            f"{facts.table}: no column {', '.join(sorted(absent))}: the table has {there}"
        )
    cells = cells_as_text(pa.table([cells[name] for name in columns.values()], list(columns)))
    if not facts.has_many_ecgs:
        if not facts.record:
            raise DataError(
                f"{facts.table}: a table for files with one ECG each needs a column with the files' names without "
                f"folder and extension: add `record: COLUMN` to {YAML}"
            )
        return ArrayTable(cells, _row_of_text(cells["record"], facts.record))
    parts = _array_files(root, facts.file)
    if len(parts) > 1:
        raise DataError(
            f"table: {facts.table}: a table can describe only one file of many ECGs, but {facts.file} matches "
            f"{len(parts):,} files"
        )
    total = _count_ecgs(root, parts[0], facts)
    if not facts.index:
        if len(cells) != total:
            raise DataError(
                f"{facts.table}: {len(cells):,} rows for {total:,} ECGs: add `index: COLUMN`, the column with "
                f"the number of each ECG from 0, to {YAML}"
            )
        return ArrayTable(cells, None)
    rows = _row_of_text(cells["index"], facts.index)
    if others := rows.keys() - set(map(str, range(total))):
        raise DataError(
            f"index: {facts.index}: {min(others)} is not the number of an ECG: the {total:,} ECGs are "
            "numbered from 0"
        )
    return ArrayTable(cells, rows)


def _row_of_text(column: pa.ChunkedArray, name: str) -> dict[str, int]:
    keys = column.fill_null("").to_pylist()
    rows = {key: row for row, key in enumerate(keys)}
    if len(rows) < len(keys):
        raise DataError(
            f"{name}: {len(rows):,} different values in {len(keys):,} rows: each row needs a value of its own"
        )
    return rows


@lru_cache(maxsize=32)
def _read_column(root: Folder, part: str, name: str, facts: ArrayDescription) -> list[str]:
    """Read the array `name`, which holds one value for each ECG of a file, as text."""
    values, count = open_array(root, part, name), _count_ecgs(root, part, facts)
    if values.shape != (count,) or values.dtype.kind not in "iufbSU":
        what = f"{part}: {name} is {values.dtype} {list(values.shape)} for {count} ECGs"
        raise ReadError("unexpected array shape", what)
    return [cell.decode() if isinstance(cell, bytes) else str(cell) for cell in values[:].tolist()]


def _ecg_cells(root: Folder, part: str, row: int, facts: ArrayDescription) -> dict[str, str | None]:
    """Return {entry of arrays.yaml: cell} of an ECG, from the table or from arrays in the same file."""
    if not facts.table:
        return {
            role: _read_column(root, part, name, facts)[row] for role, name in facts.columns.items()
        }
    table, table_row = _read_table(root, facts), row
    if table.rows is not None:
        key = str(row) if facts.has_many_ecgs else Path(part).stem
        if key not in table.rows:
            raise ReadError("not in the table", f"no row for {key}")
        table_row = table.rows[key]
    cells: dict[str, str | None] = table.cells.slice(table_row, 1).to_pylist()[0]
    return cells
