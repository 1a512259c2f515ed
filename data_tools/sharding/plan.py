"""Plan which crop goes into which shard: a seeded permutation of all crops over shards of 1,024,
made from headers only.

The plan is held in columns, of which texts lie in temporary files, about a hundred bytes per record,
so that eleven million records fit into one machine's memory.
"""

import mmap
import re
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from itertools import compress, islice
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm.auto import tqdm

from ..dataset import FORMAT_VERSION, SHARD_CROPS
from ..ecg.crops import SPEC_HASH, crop_count, dropped_samples
from ..ecg.record import Header, record_stem
from ..ecg.record_names import count_and_first
from ..ecg.record_tables import patients_of, read_patients
from ..ecg.resampling import FS_HZ
from ..io import cluster
from ..io.errors import MISSING_FILE, ReadError, StorageError, printable
from ..io.storage import prefetch, write_errors
from ..io.terminal import keep_freed_memory, tell
from ..sources.base import Source, links_in, located, read_safely, shown_patient
from .known import KnownRecords, hash_of, member_hashes, read_signals
from .rejects import Reject
from .shards import MAX_NAME

# archive, key, label, patient that a table names, crop of the record
PlannedCrops = list[tuple[int, str, str, str | None, int]]
SCAN_CHUNK = 2048
READ_ALREADY = "record read already"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
NUMBERS = np.dtype(
    [
        ("archive", "i2"),  # index of the plan's sources
        ("crops", "i4"),
        ("dropped", "i4"),  # samples at 500 Hz that are in no crop
        ("fingerprint", "u8"),
        ("stamp", "u8"),
        ("waveform", "u8"),  # equal for copies, as far as headers tell
    ]
)


class PlannedShard(NamedTuple):
    crops: PlannedCrops
    numbers: np.ndarray  # of the crops, counted record by record
    identity: (
        str  # shards with the same identity have the same bytes, wherever the archive is stored
    )
    content: str  # also changes if the archive's files are modified


class Texts:
    """A column of texts in temporary files, whose pages the system may forget: those of ten million
    records would fill half of what planning may take."""

    def __init__(self) -> None:
        self.data = tempfile.TemporaryFile()  # noqa: SIM115
        self.offsets = tempfile.TemporaryFile()  # noqa: SIM115
        for file in (self.data, self.offsets):
            weakref.finalize(self, file.close)
        self.offsets.write(bytes(8))
        self.count = self.size = 0

    def add(self, texts: list[str]) -> None:
        encoded = [text.encode() for text in texts]
        ends = self.size + np.cumsum([len(text) for text in encoded], dtype=np.int64)
        with write_errors(tempfile.gettempdir(), "the plan"):
            self.data.write(b"".join(encoded))
            self.offsets.write(ends.tobytes())
        self.count += len(texts)
        self.size = int(ends[-1]) if texts else self.size

    def column(self) -> pa.Array:
        """Read from the files as it is used. What was read counts as memory while it is kept."""
        offsets, data = self._mapped(self.offsets), self._mapped(self.data)
        return pa.Array.from_buffers(pa.large_string(), self.count, [None, offsets, data])

    @staticmethod
    def _mapped(file: IO[bytes]) -> pa.Buffer:
        with write_errors(tempfile.gettempdir(), "the plan"):
            file.flush()
        if not file.tell():
            return pa.py_buffer(b"")
        return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@dataclass(frozen=True)
class ShardPlan:
    sources: tuple[Source, ...]
    # Of each usable record: its key in the archive, source/record, NUMBERS, and the patient that a
    # table names. A record whose name came before has no crops.
    keys: Texts
    labels: Texts
    numbers: np.ndarray
    patients: pa.Array
    known_patients: Texts  # that its archive names, as the dataset shows them; "": none
    tables: str  # a hash of the sources' tables
    seed: int
    shard_crops: int  # crops of each shard but the last
    seen: dict[str, int]  # number of records by source
    rejects: list[Reject]

    @cached_property
    def crops(self) -> int:
        return int(self.numbers["crops"].sum(dtype=np.int64))

    @property
    def shards(self) -> int:
        return -(-self.crops // self.shard_crops)

    def planned(self, shards: Iterable[int]) -> Iterator[PlannedShard]:
        """These shards."""
        columns = self.keys.column(), self.labels.column(), self.patients
        order = permutation(self.crops, self.seed)
        first_crop = np.cumsum(np.append(0, self.numbers["crops"]), dtype=np.int64)
        for index in shards:
            crops = order[index * self.shard_crops : (index + 1) * self.shard_crops]
            records = np.searchsorted(first_crop, crops, side="right") - 1
            yield self._planned(crops, records, crops - first_crop[records], columns)

    def _planned(
        self,
        crops: np.ndarray,
        records: np.ndarray,
        parts: np.ndarray,
        columns: tuple[pa.Array, ...],
    ) -> PlannedShard:
        rows = pa.array(records)
        keys, labels, patients = (column.take(rows).to_pylist() for column in columns)
        numbers = self.numbers[records]
        fingerprints = numbers["fingerprint"].tolist()
        marks = (
            f"{a}#{b}:{c:016x}" if d is None else f"{a}#{b}:{c:016x} {d}"
            for a, b, c, d in zip(labels, parts.tolist(), fingerprints, patients, strict=True)
        )
        identity = sha256(
            "\n".join([f"{FORMAT_VERSION} {SPEC_HASH} {self.tables}", *marks]).encode()
        )
        content = sha256(identity.digest() + numbers["stamp"].tobytes())
        archives = numbers["archive"].tolist()
        planned = list(zip(archives, keys, labels, patients, parts.tolist(), strict=True))
        return PlannedShard(planned, crops, identity.hexdigest(), content.hexdigest())

    def facts(self, source: str) -> tuple[str | None, float]:
        """Its licence, None if no record can be used, and the seconds of its records that are in no
        crop."""
        is_from = np.asarray(pc.starts_with(self.labels.column(), f"{source}/"))
        records = self.numbers[is_from & (self.numbers["crops"] > 0)]
        licence = self.sources[records["archive"][0]].licence if len(records) else None
        return licence, round(int(records["dropped"].sum()) / FS_HZ, 3)


class _Scan(NamedTuple):
    """The headers of a chunk of keys."""

    number: int
    # Of the usable records, as in ShardPlan
    keys: list[str]
    labels: list[str]
    patients: list[str]
    numbers: np.ndarray
    members: np.ndarray  # hashes of their names in a tar, where a-b/c and a/b-c are the same
    refused: list[tuple[str, Reject]]  # by key
    seen: Counter[str]  # number of records by source, usable or not


class _Scanned:
    """The headers of all keys."""

    def __init__(self) -> None:
        self.keys, self.labels, self.patients = Texts(), Texts(), Texts()
        self.numbers, self.members = bytearray(), bytearray()
        self.refused: list[tuple[str, Reject]] = []
        self.seen: Counter[str] = Counter()

    def add(self, scan: _Scan) -> None:
        self.keys.add(scan.keys)
        self.labels.add(scan.labels)
        self.patients.add(scan.patients)
        self.numbers += scan.numbers.tobytes()
        self.members += scan.members.tobytes()
        self.refused += scan.refused
        self.seen += scan.seen


def make_plan(
    sources: Iterable[Source],
    seed: int,
    workers: int = 1,
    dask: str | None = None,
    quiet: bool = True,
    patients: str | None = None,
    key: bytes | None = None,
    known: KnownRecords | None = None,
    shard_crops: int | None = None,
) -> ShardPlan:
    """Read all headers in parallel and plan the shards. `patients`: a table that names them; `key`: of
    pseudonyms; `known`: records that a dataset has, which are left out; `shard_crops`: None as usual."""
    sources = tuple(sources)
    people = read_patients(patients) if patients else None  # before hours of reading
    scans = cluster.run(partial(_scan, key), _chunks(sources), workers, dask)
    scanned, had = _read_headers(scans, known, quiet)
    if not scanned.seen and not had.seen:
        raise _no_records(sources)
    if known and had.seen:
        unlike = _unlike(sources, had, known, workers, dask, quiet)
        scanned.refused += _other_ecgs(unlike, had, known)
    known_labels = had.labels
    del had
    keys, labels, known_patients = scanned.keys, scanned.labels, scanned.patients
    numbers = np.frombuffer(scanned.numbers, NUMBERS)
    again = _again(np.frombuffer(scanned.members, np.uint64), labels.column())
    numbers["crops"][again] = 0
    refused = [*scanned.refused, *_read_already(keys.column(), labels.column(), again)]
    seen = dict(sorted(scanned.seen.items()))
    del scanned  # 16 bytes per record that are not needed further
    named: pa.Array = pa.nulls(labels.count)
    if patients and people and labels.count:
        named = _named(patients, people, labels.column(), again, known_labels.column())
    return ShardPlan(
        sources,
        keys,
        labels,
        numbers,
        named,
        known_patients,
        _tables(sources),
        seed,
        shard_crops or SHARD_CROPS,
        seen,
        _with_unique_names(refused, labels.column(), again),
    )


def _read_headers(
    scans: Iterable[_Scan], known: KnownRecords | None, quiet: bool
) -> tuple[_Scanned, _Scanned]:
    """The records, and those whose names are known."""
    scanned, had = _Scanned(), _Scanned()
    with tqdm(unit=" records", desc="headers", disable=quiet) as bar:
        for scan in _in_order(scans):
            bar.update(scan.seen.total())
            if known:
                scan, of_known_names = _parted(scan, known)
                had.add(of_known_names)
            scanned.add(scan)
    return scanned, had


def _other_ecgs(
    unlike: Iterable[tuple[int, ReadError]], had: _Scanned, known: KnownRecords
) -> list[tuple[str, Reject]]:
    """The records that bear the name of another ECG of the dataset, or cannot be compared with it."""
    keys, labels = had.keys.column(), had.labels.column()
    refused: dict[int, tuple[str, Reject]] = {}
    others = []
    for row, error in unlike:
        if error.reason == MISSING_FILE:  # only a table or a header of the archive names it
            continue
        source, _, name = labels[row].as_py().partition("/")
        refused[row] = _by_its_path(keys[row].as_py(), (source, name, error.reason, error.detail))
        if error.reason == READ_ALREADY:
            others.append(row)
    if same := had.seen.total() - len(refused):
        left_out = f"{same:,} records are" if same > 1 else "1 record is"
        tell(f"note: {left_out} left out: the dataset has them")
    if others:
        shown = f"{len(others):,}" if known.key else count_and_first(np.sort(others), keys)
        tell(
            f"warning: records with the name of another ECG of the dataset are refused: {shown}: rename "
            "their files and append them again"
        )
    return [refused[row] for row in sorted(refused)]


def _unlike(
    sources: tuple[Source, ...],
    had: _Scanned,
    known: KnownRecords,
    workers: int,
    dask: str | None,
    quiet: bool,
) -> Iterator[tuple[int, ReadError]]:
    """The rows, in any order, of the records that are not the ECGs which the dataset has under their
    names, and why."""
    keys, labels = had.keys.column(), had.labels.column()
    archives = np.frombuffer(had.numbers, NUMBERS)["archive"]
    members = np.frombuffer(had.members, np.uint64)

    def chunk(begin: int) -> tuple[int, list[tuple[int, str, str]]]:
        columns = (keys.slice(begin, SCAN_CHUNK), labels.slice(begin, SCAN_CHUNK))
        texts = (column.to_pylist() for column in columns)
        return begin, list(zip(archives[begin : begin + SCAN_CHUNK].tolist(), *texts, strict=True))

    read = partial(read_signals, sources, known.removed, known.key)
    chunks = map(chunk, range(0, len(keys), SCAN_CHUNK))
    with tqdm(total=len(keys), unit=" records", desc="comparing", disable=quiet) as bar:
        for begin, signals in cluster.run(read, chunks, workers, dask):
            bar.update(len(signals))
            expected = known.signals_of(members[begin : begin + len(signals)])
            for row, (signal, right) in enumerate(zip(signals, expected, strict=True), begin):
                if isinstance(signal, ReadError):
                    yield row, signal
                elif signal != right:
                    _, _, name = labels[row].as_py().partition("/")
                    yield row, ReadError(READ_ALREADY, f"another {name} came first")


def _by_its_path(path: str, reject: Reject) -> tuple[str, Reject]:
    """The reject of a record whose name another one has."""
    source, name, reason, detail = reject
    shown = printable(path)
    return path, (source, shown if shown != name else f"{name} again", reason, detail)


def _in_order(scans: Iterable[_Scan]) -> Iterator[_Scan]:
    """They finish in any order."""
    early: dict[int, _Scan] = {}
    due = 0
    for scan in scans:
        early[scan.number] = scan
        while due in early:
            yield early.pop(due)
            due += 1


def _named(
    url: str, people: pa.Table, labels: pa.Array, again: np.ndarray, known: pa.Array
) -> pa.Array:
    """The patient that a table names, of each record. `known`: others that the table may name."""
    first = np.delete(np.arange(len(labels)), again)
    records = pa.concat_arrays([labels.take(pa.array(first)), known]).cast(pa.string())
    patients = patients_of(url, people, records)
    rows = np.full(len(labels), len(patients))
    rows[first] = np.arange(len(first))
    return patients.take(pa.array(rows, mask=rows == len(patients)))


def _tables(sources: Iterable[Source]) -> str:
    tables = sha256()
    for source in sources:
        tables.update(sha256(source.tables()).digest())
    return tables.hexdigest()


def _no_records(sources: Iterable[Source]) -> StorageError:
    places = (source.root.url + links_in(source.root) for source in sources)
    return StorageError(f"no records in {', '.join(places)}")


def _again(members: np.ndarray, labels: pa.Array) -> np.ndarray:
    """The records whose name in a tar one before has. Only where hashes are equal are names
    compared."""
    ordered = np.sort(members)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    doubtful = np.flatnonzero(pc.is_in(pa.array(members), pa.array(twice)))
    names = pc.replace_substring(labels.take(pa.array(doubtful)), "/", "-")
    numbers = pc.dictionary_encode(names).indices.to_numpy()
    return np.delete(doubtful, np.unique(numbers, return_index=True)[1])


def _read_already(
    keys: pa.Array, labels: pa.Array, again: np.ndarray
) -> Iterator[tuple[str, Reject]]:
    for row in again:
        source, _, name = labels[row].as_py().partition("/")
        reject = source, name, READ_ALREADY, f"another {name} came first"
        yield keys[row].as_py(), reject


def permutation(count: int, seed: int) -> np.ndarray:
    """A permutation by SplitMix64 hashes of a counter, since a library's generator may change
    between versions."""
    x = np.arange(count, dtype=np.uint64)
    x += np.uint64(seed * 0xD1B54A32D192ED03 % 2**64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return np.argsort(x, kind="stable")


def _chunks(sources: tuple[Source, ...]) -> Iterator[tuple[int, int, Source, list[str]]]:
    number = 0
    for archive, source in enumerate(sources):
        keys = iter(source.keys())
        while chunk := list(islice(keys, SCAN_CHUNK)):
            yield number, archive, source, chunk
            number += 1


def _scan(secret: bytes | None, task: tuple[int, int, Source, list[str]]) -> _Scan:
    keep_freed_memory()
    number, archive, source, keys = task
    usable: list[str] = []
    labels: list[str] = []
    patients: list[str] = []
    numbers: list[tuple[Any, ...]] = []
    refused: list[tuple[str, Reject]] = []
    seen: Counter[str] = Counter()
    read = partial(read_safely, source.header)
    headers = prefetch(read, keys) if source.root.remote else map(read, keys)
    for key, header in zip(keys, headers, strict=True):
        if isinstance(header, ReadError):
            name, filed, error = source.name_for(key), source.source_of(key), header
        else:
            name, filed = header.name, header.source
            try:
                patient = shown_patient(secret, filed, header.patient) or ""
                numbers.append((archive, *_numbers(header)))
                patients.append(patient)
                usable.append(key)
                labels.append(f"{filed}/{name}")
                seen[filed] += 1
                continue
            except ReadError as refusal:
                error = refusal
        seen[filed] += 1
        refused.append((key, (filed, record_stem(name), error.reason, error.detail)))
    members = member_hashes((label.split("/") for label in labels), secret)
    arrays = np.array(numbers, NUMBERS), members
    return _Scan(number, usable, labels, patients, *arrays, refused, seen)


def _numbers(header: Header) -> tuple[int, ...]:
    """The NUMBERS of a record besides its archive; a ReadError if it can have no place in a
    shard."""
    crops = crop_count(header.samples, header.fs_hz)
    check_name(header.source, header.name, crops)
    if not crops:
        raise ReadError("too short", f"{header.samples / header.fs_hz:.2f} s, 5 s are needed")
    length_and_rate = f"{header.samples} {header.fs_hz}".encode()
    fingerprint = hash_of(header.fingerprint + length_and_rate)
    same_waveform = hash_of(header.waveform + length_and_rate) if header.waveform else fingerprint
    dropped = dropped_samples(header.samples, header.fs_hz)
    return crops, dropped, fingerprint, hash_of(header.stamp), same_waveform


def check_name(source: str, name: str, crops: int) -> None:
    """A ReadError if the crops of a record can have no names in a shard."""
    if not (_NAME.fullmatch(name) and _NAME.fullmatch(source)):
        raise ReadError("record name", "letters, digits, _ and - only, 64 at most")
    if (length := len(f"{source}-{name}-{crops - 1:03d}.json")) > MAX_NAME:
        raise ReadError("record name", f"{length} characters in a shard, {MAX_NAME} at most")


def _parted(scan: _Scan, known: KnownRecords) -> tuple[_Scan, _Scan]:
    """The new records of a chunk, and those of known names."""
    is_known = known.has(scan.members)
    new, had = _taken(scan, ~is_known), _taken(scan, is_known)
    new.numbers["dropped"][np.isin(new.members, known.refused)] = 0  # they were counted then
    hashes = member_hashes((reject for _, reject in scan.refused), known.key)
    for (path, reject), of_known_name in zip(scan.refused, known.has(hashes), strict=True):
        if of_known_name and reject[2] == MISSING_FILE:  # as in _other_ecgs
            had.seen[reject[0]] += 1
            continue
        new.seen[reject[0]] += 1
        new.refused.append(_by_its_path(path, reject) if of_known_name else (path, reject))
    return new, had


def _taken(scan: _Scan, chosen: np.ndarray) -> _Scan:
    texts = scan.keys, scan.labels, scan.patients
    keys, labels, patients = (list(compress(column, chosen)) for column in texts)
    seen = Counter(label.partition("/")[0] for label in labels)
    numbers, members = scan.numbers[chosen], scan.members[chosen]
    return _Scan(scan.number, keys, labels, patients, numbers, members, [], seen)


def _with_unique_names(
    refused: list[tuple[str, Reject]], labels: pa.Array, again: np.ndarray
) -> list[Reject]:
    """Give each refused record a unique name in rejects.csv: its path if another record has its
    name. `again`: the records that are not used."""
    names = [f"{source}/{name}" for _, (source, name, *_) in refused]
    is_refused = np.array(pc.is_in(labels, pa.array(names, labels.type)))
    is_refused[again] = False
    used = set(labels.filter(pa.array(is_refused)).to_pylist())
    taken: set[tuple[str, str]] = set()
    rejects = []
    for (path, (source, name, reason, detail)), label in zip(refused, names, strict=True):
        if label in used or (source, name) in taken:
            name = printable(path)
        while (source, name) in taken:
            name += " again"  # the same path in another archive
        taken.add((source, name))
        rejects.append((source, name, reason, located(path, detail)))
    return rejects
