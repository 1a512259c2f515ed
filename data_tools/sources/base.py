"""The `Source` interface: lists the keys of an archive's records and reads a record for each key.

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

_ONE_THREAD = threading.RLock()
P = ParamSpec("P")
T = TypeVar("T")
# PhysioNet's lists: the names of the records in a folder, or of its subfolders with a slash at the end
RECORDS, MAX_RECORDS = "RECORDS", 2**28


class AbsentKey(str):
    """The key of a record that a table of the archive lists, although its file is missing."""

    table: str


def absent_key(path: str, table: str) -> AbsentKey:
    key = AbsentKey(path)
    key.table = table
    return key


def missing_note(place: str, names: Sequence[str], private: bool = False) -> str:
    """A note on the records whose files are missing; "" if there are none."""
    if not names:
        return ""
    count = f"{len(names):,} record{'s' * (len(names) > 1)}"
    shown = "" if private else f" ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
    return f"{place}: files of {count} are missing{shown}: is the copy complete?"


class Source(ABC):
    """An archive. Sources are pickled and sent to worker processes, so keep only small objects in
    `self`."""

    name = ""
    licence = "unknown"
    # A note on what no source of the folder reads, and on WFDB records beside its archives
    left_out = ""
    private = ""  # the names and ids in it that tell who the patients are
    pseudonyms: str | None = None  # of a dataset: the mark of the key that made its names
    # In your own source: True if `read` and `header` may be called from several threads at once, as for s3://
    thread_safe = False

    def __init__(self, root: Folder) -> None:
        self.root = root

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """The keys of all records, in an order that depends only on the archive."""

    @abstractmethod
    def read(self, key: str) -> EcgRecord:
        """Read one record; raise a ReadError to refuse it."""

    def header(self, key: str) -> Header:
        """Returns what planning needs. Override this if the format can provide it without
        reading the signal."""
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
        """True if a folder with these names is such an archive."""
        return False

    def has_records(self) -> bool:
        """True if a detected folder really is such an archive: other archives can have the same
        names."""
        return True

    def places(self) -> list[str]:
        """The folders whose WFDB records it reads; "" is all."""
        return []

    def links(self) -> Iterator[str]:
        """Links to folders in what it reads, which it does not follow."""
        for place in self.places():
            yield from self.root.links(place)

    def source_of(self, key: str) -> str:
        """The database that a record belongs to; an archive may have several."""
        return self.name

    def name_for(self, key: str) -> str:
        """The name for a record that cannot be read."""
        return record_stem(key)

    def path_of(self, key: str) -> str:
        """Returns the path at which a user finds a record."""
        return key

    def tables(self) -> bytes:
        """Other input that affects the output, such as tables of patients, ages and diagnoses."""
        return b""

    def notes(self) -> list[str]:
        """Notes on the archive as a whole, for the user."""
        return []

    def __iter__(self) -> Iterator[EcgRecord]:
        return (self.read(key) for key in self.keys())


def read_safely(call: Callable[[str], T], key: str) -> T | ReadError:
    """Call a source's `header` or `read`. An exception refuses only this record; failing storage
    or a lack of memory stops the run."""
    try:
        if not key.isprintable():
            raise ReadError("file name", "not UTF-8, or with control characters")
        if isinstance(key, AbsentKey):
            raise ReadError(MISSING_FILE, f"in {key.table}")
        return call(key)
    except ReadError as error:
        return error
    except (StorageError, MemoryError):
        raise
    except Exception as error:  # a user's parser failed on a broken file
        if failure := machine_error(error):
            raise failure from None
        return ReadError("unreadable record", type(error).__name__)


def read_record(source: Source, key: str) -> EcgRecord:
    """Reads a record, with a warning if its amplitude is implausible. A user's own source may fill
    one buffer for every record, so its signal is copied, and it is called from one thread at a time unless it
    says that it is `thread_safe`."""
    if is_builtin(source):
        return with_amplitude_warning(source.read(key))
    with nullcontext() if source.thread_safe else _ONE_THREAD:
        record = source.read(key)
        if not record.stored:
            record = replace(record, signal=record.signal.copy())
    return with_amplitude_warning(record)


def read_header(source: Source, key: str) -> Header:
    """Reads a record's header; `source.header` may call `source.read`."""
    with nullcontext() if is_builtin(source) or source.thread_safe else _ONE_THREAD:
        return source.header(key)


def is_builtin(source: Source) -> bool:
    return type(source).__module__.startswith(__name__.rpartition(".")[0])


class Prepared(NamedTuple):
    """A record as it would be stored in a dataset."""

    source: str
    record: str
    patient: str | None
    crops_uv: np.ndarray  # int16 [n, 12, 5000]
    start_s: tuple[float, ...]
    halves: tuple[int, ...]
    flags: tuple[tuple[str, ...], ...]
    fs_hz: float  # rate at which it was recorded


def prepare_record(source: Source, key: str) -> Prepared | ReadError:
    """Read and prepare one record directly from its archive, without a dataset."""
    return read_safely(partial(_prepare_record, source), key)


def _prepare_record(source: Source, key: str) -> Prepared:
    record = read_record(source, key)
    count = crop_count(record.signal.shape[1], record.fs_hz)
    if not count:
        raise ReadError("too short", f"{record.signal.shape[1] / record.fs_hz:g} s")
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
    return Prepared(name, record.name, patient, samples, starts, halves, flags, record.fs_hz)


def pseudonymize_record(key: bytes | None, ecg: Prepared) -> Prepared:
    """Returns the record with the names that a dataset made with this key has."""
    record = pseudonym(key, "r", ecg.source, ecg.record)
    return ecg._replace(record=record, patient=dataset_patient(key, ecg.source, ecg.patient))


def dataset_patient(key: bytes | None, source: str, patient: str | None) -> str | None:
    """A patient's id in a dataset; None if it is unknown."""
    name = known_patient(patient)
    return pseudonym(key, "p", patient_source(source), name) if name else None


def path_name(key: str, stem: str) -> str:
    """A name that includes the folders below the root; in some archives every patient's folder has
    a `rec_1`."""
    place = re.sub(r"[^A-Za-z0-9_-]+", "_", posixpath.dirname(key))
    name = f"{place}_{stem}" if place else stem
    if len(name) > 64:
        raise ReadError("record name", f"{len(name)} characters with its folders, 64 at most")
    return name


def detail_with_path(key: str, detail: str) -> str:
    """The detail of a refusal, starting with the record's path."""
    path = printable(key)
    if detail.startswith(
        (f"{path}: ", f"{path.rpartition('.')[0] or path}.")
    ):  # or the path of its signal file
        return detail
    return f"{path}: {detail}" if detail else path


def headers_and_orphans(names: Iterator[str], suffix: str) -> Iterator[str]:
    """Header files, and signal files without a header, which will be refused; `names` must be
    sorted by folder."""
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
    """The records and folders in these RECORDS files that are not there. `endings`: of a record's
    files. `within`: only what is in one of these folders; none: everything."""
    yielded = set()
    for table in lists:
        folder = posixpath.dirname(table)
        there: set[str] | None = None
        try:
            lines = root.read(table, MAX_RECORDS).decode("utf-8", "replace").split("\n")
        except ReadError as error:
            if error.reason != MISSING_FILE:  # not every archive has a list
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
    """Read only these columns of an archive's CSV table; "" is the first one, whatever its name.
    Cells missing in a short row are empty. An unreadable table stops the run, because it would
    make every record fail."""
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
    """lru_cache for threads: if several need a table at once, one fetches it and the others
    wait."""
    remembered, lock = lru_cache(maxsize=4)(function), threading.Lock()

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return remembered(*args, **kwargs)  # type: ignore[arg-type]

    call.cache_clear = remembered.cache_clear  # type: ignore[attr-defined]
    return call


def links_hint(place: Folder) -> str:
    """A hint for the error message when nothing was found in an archive."""
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
