"""The interface `Source`: a source yields the keys of an archive's records and reads a record by its key.

For your own format, write a subclass with two methods and pass `--source your_file.py:YourClass`:
see docs/own_format.md.
"""

import csv
import hashlib
import io
import os
import posixpath
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial, wraps
from itertools import groupby
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np

from ..ecg.crops import CROP, Crop, crop_count, crop_flags, prepare_crop, with_amplitude_warning
from ..ecg.pseudonyms import pseudonym
from ..ecg.record import LEADS, EcgRecord, Header, known_patient, patient_source, record_stem
from ..io.errors import MISSING_FILE, ReadError, StorageError, machine_error, printable
from ..io.storage import Folder
from ..io.terminal import tell

_USER_SOURCE_LOCK = threading.RLock()
P = ParamSpec("P")
T = TypeVar("T")
# A RECORDS file of PhysioNet lists the records in its folder, or its subfolders, whose names end in a slash
RECORDS, MAX_RECORDS = "RECORDS", 2**28


class AbsentKey(str):
    """The key of a record whose file is missing, although a table of the archive lists the record."""

    table: str  # path of the file that lists the record


def absent_key(path: str, table: str) -> AbsentKey:
    key = AbsentKey(path)
    key.table = table
    return key


def missing_note(place: str, names: Sequence[str], private: bool = False) -> str:
    """Return a note that the files of these records are missing; "" if `names` is empty. `place` begins the
    note; if `private`, it states no names."""
    if not names:
        return ""
    count = f"{len(names):,} record{'s' * (len(names) > 1)}"
    shown = "" if private else f" ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
    return f"{place}: files of {count} are missing{shown}: is the copy complete?"


class Source(ABC):
    """Reads the ECGs of an archive.

    Sources are pickled and sent to worker processes, so keep only small objects in `self`."""

    name = ""
    licence = "unknown"
    # Note for the user on files of the folder that no source reads, and on WFDB records outside the folder's
    # archives; only the first source of a folder has this note
    left_out = ""
    # What in the archive may identify its patients, such as "the file names"; stated in a warning to the user
    private = ""
    # Identifies the key of the pseudonyms if the source is a dataset that has pseudonyms; None otherwise
    pseudonyms: str | None = None
    # Set to True in a source of your own if `read` and `header` may be called from several threads at once:
    # records on s3:// are then read faster
    thread_safe = False

    def __init__(self, root: Folder) -> None:
        self.root = root

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """Yield the keys of all records, in an order that depends only on the archive."""

    @abstractmethod
    def read(self, key: str) -> EcgRecord:
        """Read one record. Raise a ReadError to refuse the record."""

    def header(self, key: str) -> Header:
        """Return the facts about a record that planning needs. Override this method if the format can
        provide them without reading the signal."""
        record = self.read(key)
        content = hashlib.blake2b(np.ascontiguousarray(record.signal).data, digest_size=8).digest()
        return Header(
            record.name,
            record.source or self.source_of(key),
            record.signal.shape[1],
            record.fs_hz,
            content,
            patient=record.patient,
        )

    @staticmethod
    def detect(names: set[str]) -> bool:
        """Return True if a folder that contains these names may be an archive of this class."""
        return False

    def has_records(self) -> bool:
        """Return True if a folder that `detect` accepted really is an archive of this class: folders of
        other archives can contain the same names."""
        return True

    def places(self) -> list[str]:
        """Return the paths of the folders whose WFDB records this source reads; "" stands for the root."""
        return []

    def links(self) -> Iterator[str]:
        """Yield the paths of links that point to folders and lie in the folders that this source reads.
        The source does not follow these links."""
        for place in self.places():
            yield from self.root.links(place)

    def source_of(self, key: str) -> str:
        """Return the database that a record belongs to; an archive may contain several databases."""
        return self.name

    def name_for(self, key: str) -> str:
        """Return the name under which a record that cannot be read is reported."""
        return record_stem(key)

    def path_of(self, key: str) -> str:
        """Return the path at which a user finds a record."""
        return key

    def tables(self) -> bytes:
        """Return as bytes what affects the output besides the records, such as tables of patients, ages
        and diagnoses."""
        return b""

    def notes(self) -> list[str]:
        """Return notes for the user on the archive as a whole."""
        return []

    def __iter__(self) -> Iterator[EcgRecord]:
        return (self.read(key) for key in self.keys())


def read_safely(call: Callable[[str], T], key: str) -> T | ReadError:
    """Call a source's `header` or `read` with a key. An exception refuses only this record and is returned
    as a ReadError. An error of the storage or a lack of memory is raised, which stops the run."""
    try:
        if not key.isprintable():
            raise ReadError(
                "file name", "the name is not UTF-8 or contains control characters: rename the file"
            )
        if isinstance(key, AbsentKey):
            raise ReadError(MISSING_FILE, f"listed in {key.table}")
        return call(key)
    except ReadError as error:
        return error
    except (StorageError, MemoryError):
        raise
    except Exception as error:  # a user's own source may raise anything on a broken file
        if failure := machine_error(error):
            raise failure from None
        return ReadError("unreadable record", type(error).__name__)


def read_record(source: Source, key: str) -> EcgRecord:
    """Read a record, and add a warning if its amplitude is implausible.

    A user's own source may fill the same buffer for every record, so the signal is copied. Such a source is
    called from one thread at a time, unless its `thread_safe` is True."""
    if is_builtin(source):
        return with_amplitude_warning(source.read(key))
    with nullcontext() if source.thread_safe else _USER_SOURCE_LOCK:
        record = source.read(key)
        if not record.stored:
            record = replace(record, signal=record.signal.copy())
    return with_amplitude_warning(record)


def read_header(source: Source, key: str) -> Header:
    """Read a record's header. A user's own source is called from one thread at a time, unless its
    `thread_safe` is True, because its `header` may call `read`."""
    with nullcontext() if is_builtin(source) or source.thread_safe else _USER_SOURCE_LOCK:
        return source.header(key)


def is_builtin(source: Source) -> bool:
    return type(source).__module__.startswith(__name__.rpartition(".")[0])


class PreparedRecord(NamedTuple):
    """A record as a dataset would store it, cut into crops."""

    source: str
    record: str
    patient: str | None
    crops_uv: np.ndarray  # int16 [crops, 12 leads, 5000 samples]
    start_s: tuple[float, ...]
    halves: tuple[int, ...]
    flags: tuple[tuple[str, ...], ...]
    fs_hz: float  # sampling rate of the recording, before resampling


def prepare_record(source: Source, key: str) -> PreparedRecord | ReadError:
    """Read one record from its archive and prepare its crops, without a dataset. Return a ReadError if the
    record is refused."""
    return read_safely(partial(_prepare_record, source), key)


def _prepare_record(source: Source, key: str) -> PreparedRecord:
    record = read_record(source, key)
    count = crop_count(record.signal.shape[1], record.fs_hz)
    if not count:
        raise ReadError("too short", f"{record.signal.shape[1] / record.fs_hz:g} s, 5 s at least")
    samples = np.empty((count, len(LEADS), CROP), np.int16)
    crops: list[Crop] = []
    for index in range(count):
        try:
            crops.append(prepare_crop(record, index, samples[len(crops)]))
        except ReadError as error:
            if error.reason != "no valid lead" or (index + 1 == count and not crops):
                raise
    starts, halves = tuple(crop.start_s for crop in crops), tuple(crop.halves for crop in crops)
    name = record.source or source.source_of(key)
    flags = tuple(crop_flags(record, crop) for crop in crops)
    patient = known_patient(record.patient)
    samples = samples[: len(crops)]
    return PreparedRecord(name, record.name, patient, samples, starts, halves, flags, record.fs_hz)


def pseudonymize_record(key: bytes | None, ecg: PreparedRecord) -> PreparedRecord:
    """Return the record with the record name and patient id that a dataset made with this key would store."""
    record = pseudonym(key, "r", ecg.source, ecg.record)
    return ecg._replace(record=record, patient=dataset_patient(key, ecg.source, ecg.patient))


def dataset_patient(key: bytes | None, source: str, patient: str | None) -> str | None:
    """Return the id that a dataset stores for a patient: a pseudonym, or without a `key` the id itself; None if
    the patient is unknown."""
    name = known_patient(patient)
    return pseudonym(key, "p", patient_source(source), name) if name else None


def name_with_folders(key: str, stem: str) -> str:
    """Return a record name that includes the names of the folders below the root, because in some archives
    every patient's folder contains a `rec_1`."""
    place = re.sub(r"[^A-Za-z0-9_-]+", "_", posixpath.dirname(key))
    name = f"{place}_{stem}" if place else stem
    if len(name) > 64:
        raise ReadError(
            "record name", f"{len(name)} characters with its folders, 64 at most: shorten the names"
        )
    return name


def detail_with_path(key: str, detail: str) -> str:
    """Return the detail of a ReadError, with the record's path put first unless the detail begins with it."""
    path = printable(key)
    # The detail may instead begin with the path of the record's signal file, which differs from
    # `path` only in its ending
    if detail.startswith((f"{path}: ", f"{path.rpartition('.')[0] or path}.")):
        return detail
    return f"{path}: {detail}" if detail else path


def headers_and_orphans(names: Iterator[str], suffix: str) -> Iterator[str]:
    """Yield the header files, and the signal files without a header, which are refused when they are read.
    `names` must be sorted by folder."""
    for _, folder in groupby(names, posixpath.dirname):
        has_header: dict[str, bool] = {}
        for name in folder:
            stem, dot, ending = name.rpartition(".")
            if dot + ending in (".hea", suffix):
                has_header[stem] = has_header.get(stem, False) or ending == "hea"
        yield from (stem + (".hea" if has_header[stem] else suffix) for stem in has_header)


def absent_records(
    root: Folder, lists: Iterable[str], endings: tuple[str, ...], within: Collection[str] = ()
) -> Iterator[AbsentKey]:
    """Yield a key for each record or folder that does not exist although one of these RECORDS files lists it.

    A record exists if there is a file with its name and one of the `endings`. `within`: the folders to check;
    if empty, all are checked."""
    yielded = set()
    for table in lists:
        folder = posixpath.dirname(table)
        there: set[str] | None = None
        try:
            lines = root.read(table, MAX_RECORDS).decode("utf-8", "replace").split("\n")
        except ReadError as error:
            if error.reason != MISSING_FILE:  # not every archive has such a list
                why = f"a list {RECORDS}: {error.reason}" if root.private else error
                tell(f"note: {root.url}: {why}: not compared with the files")
            continue
        for line in filter(None, map(str.strip, lines)):
            path = posixpath.join(folder, line)
            if path in yielded or (within and path.split("/")[0] not in within):
                continue
            if path.endswith("/"):
                key = path.rstrip("/")
                is_there = next(root.names(key), None) is not None
            else:
                key = f"{path}.hea"
                if there is None:
                    names = root.names(folder)
                    there = {name.rpartition(".")[0] for name in names if name.endswith(endings)}
                is_there = path in there
            if not is_there:
                yielded.add(path)
                yield absent_key(key, table)


def read_table(
    root: Folder, name: str, limit: int, columns: tuple[str, ...]
) -> Iterator[dict[str, str]]:
    """Yield the rows of an archive's CSV table, with only these columns. The column "" is the first one,
    whatever its name. Cells missing in a short row are empty. An unreadable table stops the run, because
    without it every record would fail."""
    try:
        text = root.read(name, limit).decode("utf-8-sig", "replace")
    except ReadError as error:
        raise StorageError(f"{root.url}: {error}") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        fields = list(reader.fieldnames or ("",))
        if missing := set(columns) - {"", *fields}:
            raise StorageError(f"{root.url}/{name}: no column {', '.join(sorted(missing))}")
        if "" in columns and fields[0] and fields[0] in columns:
            raise StorageError(
                f"{root.url}/{name}: the first column, before {fields[0]}, is missing: restore "
                "the file"
            )
        for row in reader:
            yield {column: (row[column or fields[0]] or "").strip() for column in columns}
    except csv.Error as error:
        raise StorageError(f"{root.url}/{name}: line {reader.line_num}: {error}") from None


def threadsafe_cache(function: Callable[P, T]) -> Callable[P, T]:
    """Cache a function's results like lru_cache, also for threads: if several threads need a table at once,
    one of them reads it while the others wait."""
    remembered, lock = lru_cache(maxsize=4)(function), threading.Lock()

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return remembered(*args, **kwargs)  # type: ignore[arg-type]

    call.cache_clear = remembered.cache_clear  # type: ignore[attr-defined]
    return call


def links_hint(place: Folder) -> str:
    """Return a hint that a folder contains a link to a folder; "" if it contains none. The hint is added to
    the error that nothing was found in the folder."""
    names = () if place.remote else place.names()
    link = next(
        (
            name
            for name in names
            if os.path.islink(path := place.path(name)) and os.path.isdir(path)
        ),
        None,
    )
    if link is None:
        return ""
    return (
        f" ({'one' if place.private else link} is a link, and such folders are not entered: name "
        "the folder itself)"
    )
