"""Plan which crop goes into which shard. The plan is a seeded permutation of all crops, cut into shards
of 1,024 crops, and needs only the records' headers.

The plan is held in columns, which take about a hundred bytes per record; columns of texts lie in
temporary files. So the plan of eleven million records fits into one machine's memory.
"""

import mmap
import re
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from itertools import islice
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm.auto import tqdm

from ..dataset import FORMAT_VERSION, SHARD_CROPS
from ..dataset.rejects import Reject
from ..ecg.crops import SPEC_HASH, crop_count, dropped_samples
from ..ecg.pseudonyms import pseudonym
from ..ecg.record import Header, known_patient, record_stem
from ..ecg.record_tables import patients_of, read_patients
from ..ecg.resampling import FS_HZ
from ..io import cluster
from ..io.errors import MISSING_FILE, DataError, Flag, ReadError, StorageError, printable
from ..io.plugins import plugin_code
from ..io.splitmix import GOLDEN_GAMMA, mix
from ..io.storage import explain_write_errors, prefetch
from ..io.terminal import keep_freed_memory, tell
from ..sources.base import (
    AbsentKey,
    Source,
    detail_with_path,
    is_builtin,
    links_hint,
    read_header,
    read_safely,
)
from ..sources.dataset import StoredDataset
from .same_records import RECORD_READ_ALREADY, compare_records, hash_bytes, member_hashes
from .shards import MAX_NAME

# For each crop: number of the archive, key in it, label (source/record), patient that a table names,
# and number of the crop in the record
PlannedCrops = list[tuple[int, str, str, str | None, int]]
KEYS_PER_TASK = 2048

_SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
PLANNING_NUMBERS = np.dtype(
    [
        ("archive", "i2"),  # index into ShardPlan.sources
        ("crops", "i4"),
        ("dropped", "i4"),  # samples at 500 Hz that are in no crop
        ("fingerprint", "u8"),
        ("stamp", "u8"),
    ]
)


class PlannedShard(NamedTuple):
    crops: PlannedCrops
    numbers: np.ndarray  # number of each crop, counted through the crops of all records in turn
    # Shards with the same identity have the same bytes, wherever the archive is stored
    identity: str
    # A hash that, unlike `identity`, also changes if a file of the archive is written again
    content: str


class TextColumn:
    """A column of texts in temporary files, whose pages the system may drop from memory. Held in memory, the
    texts of ten million records would fill half of what planning may take."""

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
        with explain_write_errors(tempfile.gettempdir(), "the plan"):
            self.data.write(b"".join(encoded))
            self.offsets.write(ends.tobytes())
        self.count += len(texts)
        self.size = int(ends[-1]) if texts else self.size

    def column(self) -> pa.Array:
        """Returns the column as an array on a new memory map of the files. In an older map, all pages that
        have been read count as memory."""
        offsets, data = self._map_file(self.offsets), self._map_file(self.data)
        return pa.Array.from_buffers(pa.large_string(), self.count, [None, offsets, data])

    @staticmethod
    def _map_file(file: IO[bytes]) -> pa.Buffer:
        with explain_write_errors(tempfile.gettempdir(), "the plan"):
            file.flush()
        if not file.tell():
            return pa.py_buffer(b"")
        return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@dataclass(frozen=True)
class ShardPlan:
    sources: tuple[Source, ...]
    # keys, labels, numbers and patients have one entry for each usable record: its key in the archive, its
    # label source/record, its PLANNING_NUMBERS, and the patient that a table names for it. A record gets no
    # crops if an earlier record has its name
    keys: TextColumn
    labels: TextColumn
    numbers: np.ndarray
    patients: pa.Array
    # A hash of the tables in the sources, such as tables of patients, and of users' code that reads a source
    tables: str
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
        """Yields the shards with these numbers, each with its crops."""
        columns = self.keys.column(), self.labels.column(), self.patients
        order = permutation(self.crops, self.seed)
        first_crop = np.cumsum(np.append(0, self.numbers["crops"]), dtype=np.int64)
        for index in shards:
            crops = order[index * self.shard_crops : (index + 1) * self.shard_crops]
            records = np.searchsorted(first_crop, crops, side="right") - 1
            yield self._plan_shard(crops, records, crops - first_crop[records], columns)

    def _plan_shard(
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

    def licence_and_dropped_s(self, source: str) -> tuple[str | None, float]:
        """Returns (licence, dropped seconds) of a source. The licence is None if no record of the
        source can be used. The dropped seconds are those at the ends of records that are in no crop."""
        is_from = np.asarray(pc.starts_with(self.labels.column(), f"{source}/"))
        records = self.numbers[is_from & (self.numbers["crops"] > 0)]
        licences = [self.sources[archive].licence for archive in np.unique(records["archive"])]
        if len(different := list(dict.fromkeys(licences))) > 1:
            tell(
                f"note: {source} has several licences, dataset.json names the first: {', '.join(different)}"
            )
        licence = licences[0] if licences else None
        return licence, round(int(records["dropped"].sum()) / FS_HZ, 3)


# Of a refused record: number of its archive, its key in the archive, and its line for rejects.csv
Refused = tuple[int, str, Reject]


class _ChunkHeaders(NamedTuple):
    """What the headers of one chunk of records say."""

    # keys, labels, numbers and members have an entry for each usable record
    keys: list[str]
    labels: list[str]
    numbers: np.ndarray
    members: np.ndarray  # hashes of the names in a tar, where a-b/c and a/b-c have the same name
    refused: list[Refused]
    seen: Counter[str]  # number of records by source, usable or not
    with_patient: Counter[str]  # number of usable records with a known patient, by source


class _AllHeaders:
    """Collects what the headers of all records say."""

    def __init__(self) -> None:
        self.keys, self.labels = TextColumn(), TextColumn()
        self.numbers, self.members = bytearray(), bytearray()
        self.refused: list[Refused] = []
        self.seen: Counter[str] = Counter()
        # By archive and source: number of usable records, and of usable records with a known patient
        self.usable: Counter[tuple[int, str]] = Counter()
        self.with_patient: Counter[tuple[int, str]] = Counter()

    def add(self, scan: _ChunkHeaders) -> None:
        self.keys.add(scan.keys)
        self.labels.add(scan.labels)
        self.numbers += scan.numbers.tobytes()
        self.members += scan.members.tobytes()
        self.refused += scan.refused
        self.seen += scan.seen
        if len(scan.numbers):
            archive = int(scan.numbers["archive"][0])
            for label in scan.labels:
                self.usable[archive, label.partition("/")[0]] += 1
            for source, count in scan.with_patient.items():
                self.with_patient[archive, source] += count


def make_plan(
    sources: Iterable[Source],
    seed: int,
    workers: int = 1,
    dask: str | None = None,
    quiet: bool = True,
    patients: str | None = None,
    key: bytes | None = None,
    shard_crops: int | None = None,
) -> ShardPlan:
    """Reads all headers in parallel and plans the shards. `patients`: a table that names the patient of
    each record; `key`: the key of pseudonyms; `shard_crops`: None means SHARD_CROPS."""
    sources = tuple(sources)
    # A wrong table must fail before hours of reading headers
    people = read_patients(patients) if patients else None
    scanned = _AllHeaders()
    scans = cluster.run_in_order(partial(_scan_headers, key), _key_chunks(sources), workers, dask)
    with tqdm(unit=" records", desc="headers", disable=quiet) as bar:
        for scan in scans:
            bar.update(scan.seen.total())
            scanned.add(scan)
    if not scanned.seen:
        raise _no_records_error(sources)
    if not people:
        _check_patients(sources, scanned)
    keys, labels = scanned.keys, scanned.labels
    numbers = np.frombuffer(scanned.numbers, PLANNING_NUMBERS)
    doubtful = _records_with_equal_hash(np.frombuffer(scanned.members, np.uint64))
    hidden = np.array([not source.pseudonyms and key is not None for source in sources])
    key_of_row = hidden[numbers["archive"][doubtful]]
    first, again = _repeated_name_rows(doubtful, labels.column(), key_of_row, key)
    numbers["crops"][again] = 0
    refused, seen = scanned.refused, scanned.seen
    del scanned  # frees the hashes of names, 8 bytes per record
    in_dataset = any(isinstance(source, StoredDataset) for source in sources)
    refused = _drop_refusals_found_elsewhere(refused, labels.column(), seen, in_dataset)
    columns = keys.column(), labels.column()
    refused += _refuse_repeated_names(
        sources, columns, numbers, (first, again), seen, workers, dask, quiet
    )
    named: pa.Array = pa.nulls(labels.count)
    if patients and people and labels.count:
        named = _patients_from_table(patients, people, labels.column(), again)
    return ShardPlan(
        sources,
        keys,
        labels,
        numbers,
        named,
        _hash_tables(sources),
        seed,
        shard_crops or SHARD_CROPS,
        dict(sorted(seen.items())),
        _uniquely_named_rejects(sources, key, refused, labels.column(), again),
    )


def _check_patients(sources: Sequence[Source], scanned: _AllHeaders) -> None:
    """Raises an error if a dataset knows the patients of a source, but no record of the same source in an
    archive has a known patient. It is not raised if this can be chance: if, with the dataset's share of
    unknown patients, at least one in a hundred archives of this size would have none."""
    for (archive, name), known in scanned.with_patient.items():
        if not isinstance(sources[archive], StoredDataset):
            continue
        unknown = 1 - known / scanned.usable[archive, name]
        others = [pair for pair in scanned.usable if pair[1] == name and pair[0] != archive]
        for other in others:
            is_dataset = isinstance(sources[other[0]], StoredDataset)
            count = scanned.usable[other]
            if not is_dataset and not scanned.with_patient[other] and unknown**count < 0.01:
                raise DataError(
                    f"the patients of the new records of {name} are unknown, but the dataset knows patients "
                    "of this source, and one of them could be in train and in test: name the patients with ",
                    Flag("--patients"),
                    " FILE",
                )


def _drop_refusals_found_elsewhere(
    refused: list[Refused], labels: pa.Array, seen: Counter[str], in_dataset: bool
) -> list[Refused]:
    """Returns the refusals without those of records whose file is missing but that another source has, and
    subtracts these records from `seen`. Only records that a table of their archive lists can be dropped;
    with `in_dataset` all records can, because a dataset among the sources may have them."""
    missing: list[Refused] = []
    left: list[Refused] = []
    for archive, key, reject in refused:
        is_missing = reject[2] == MISSING_FILE and (in_dataset or isinstance(key, AbsentKey))
        (missing if is_missing else left).append((archive, key, reject))
    names = pa.array((f"{source}/{name}" for *_, (source, name, *_) in missing), labels.type)
    for record, is_there in zip(missing, pc.is_in(names, labels).to_pylist(), strict=True):
        if is_there:
            seen[record[2][0]] -= 1
        else:
            left.append(record)
    return left


def _refuse_repeated_names(
    sources: tuple[Source, ...],
    columns: tuple[pa.Array, pa.Array],
    numbers: np.ndarray,
    pairs: tuple[np.ndarray, np.ndarray],
    seen: Counter[str],
    workers: int,
    dask: str | None,
    quiet: bool,
) -> Iterator[Refused]:
    """Yields a refusal for each record that has the name of an earlier record. If one of the two is in a
    dataset and both are the same ECG, yields nothing: the earlier record is used. `columns`: keys and
    labels of all records; `pairs`: rows of the earlier and of the later record of each pair."""
    keys, labels = columns
    first, again = pairs
    archives = numbers["archive"]
    kinds = np.array([isinstance(source, StoredDataset) for source in sources])
    of_dataset = kinds[archives[first]] | kinds[archives[again]]
    compared = compare_records(
        sources, keys, archives, first[of_dataset], again[of_dataset], workers, dask, quiet
    )
    why = dict(compared)
    same = others = 0
    for row, is_compared in zip(again.tolist(), of_dataset.tolist(), strict=True):
        source, _, name = labels[row].as_py().partition("/")
        if is_compared and row not in why:
            seen[source] -= 1
            same += 1
            continue
        error = why.get(row, ReadError(RECORD_READ_ALREADY, f"another {name} came first"))
        others += is_compared and error.reason == RECORD_READ_ALREADY
        reject = source, name, error.reason, error.detail
        yield int(archives[row]), keys[row].as_py(), reject
    if same:
        left_out = f"{same:,} records are" if same > 1 else "1 record is"
        tell(f"note: {left_out} in several sources, and used once")
    if others:
        records = (
            f"{others:,} records are refused that have"
            if others > 1
            else "1 record is refused that has"
        )
        tell(
            f"warning: {records} the name of another ECG: rename their files; rejects.csv "
            "names them"
        )


def _patients_from_table(
    url: str, people: pa.Table, labels: pa.Array, again: np.ndarray
) -> pa.Array:
    """Returns each record's patient from the table; null for the records in `again`, which are not used."""
    first = np.delete(np.arange(len(labels)), again)
    patients = patients_of(url, people, labels.take(pa.array(first)).cast(pa.string()))
    rows = np.full(len(labels), len(patients))
    rows[first] = np.arange(len(first))
    return patients.take(pa.array(rows, mask=rows == len(patients)))


def _hash_tables(sources: Iterable[Source]) -> str:
    tables = sha256()
    for source in sources:
        tables.update(sha256(source.tables()).digest())
        if not is_builtin(source):
            tables.update(sha256(plugin_code(type(source))).digest())
    return tables.hexdigest()


def _no_records_error(sources: Iterable[Source]) -> StorageError:
    places = (source.root.url + links_hint(source.root) for source in sources)
    return StorageError(f"no records in {', '.join(places)}")


def _records_with_equal_hash(members: np.ndarray) -> np.ndarray:
    """Returns the rows of records whose name in a tar has the same hash as another record's name."""
    ordered = np.sort(members)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return np.flatnonzero(pc.is_in(pa.array(members), pa.array(twice)))


def _repeated_name_rows(
    doubtful: np.ndarray, labels: pa.Array, hidden: np.ndarray, key: bytes | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row of the earlier record, row of the later record) for pairs with the same name in a tar.
    `doubtful`: rows of the records to compare; `hidden`: mask of those whose name the key will replace
    by a pseudonym."""
    shown = []
    for label, is_hidden in zip(labels.take(pa.array(doubtful)).to_pylist(), hidden, strict=True):
        source, _, name = label.partition("/")
        shown.append(f"{source}-{pseudonym(key, 'r', source, name) if is_hidden else name}")
    names = pa.array(shown, pa.string())
    numbers = pc.dictionary_encode(names).indices.to_numpy()
    _, places = np.unique(numbers, return_index=True)
    is_again = np.ones(len(doubtful), bool)
    is_again[places] = False
    return doubtful[places][numbers[is_again]], doubtful[is_again]


def permutation(count: int, seed: int) -> np.ndarray:
    """Returns a random permutation of range(count). It comes from SplitMix64 hashes of a counter,
    because a library's generator may change between versions."""
    x = np.arange(count, dtype=np.uint64)
    x += np.uint64(seed * 0xD1B54A32D192ED03 % 2**64)
    x *= np.uint64(GOLDEN_GAMMA)
    return np.argsort(mix(x), kind="stable")


def _key_chunks(sources: tuple[Source, ...]) -> Iterator[tuple[int, Source, list[str]]]:
    for archive, source in enumerate(sources):
        keys = iter(source.keys())
        while chunk := list(islice(keys, KEYS_PER_TASK)):
            yield archive, source, chunk


def _scan_headers(secret: bytes | None, task: tuple[int, Source, list[str]]) -> _ChunkHeaders:
    keep_freed_memory()
    archive, source, keys = task
    if source.pseudonyms:
        secret = None
    usable: list[str] = []
    labels: list[str] = []
    numbers: list[tuple[Any, ...]] = []
    refused: list[Refused] = []
    seen: Counter[str] = Counter()
    with_patient: Counter[str] = Counter()
    read = partial(read_safely, partial(read_header, source))
    headers = prefetch(read, keys) if source.root.remote else map(read, keys)
    for key, header in zip(keys, headers, strict=True):
        if isinstance(header, ReadError):
            name, filed, error = source.name_for(key), source.source_of(key), header
        else:
            name, filed = header.name, header.source
            try:
                has_patient = known_patient(header.patient) is not None
                numbers.append((archive, *_planning_numbers(header)))
                usable.append(key)
                labels.append(f"{filed}/{name}")
                seen[filed] += 1
                with_patient[filed] += has_patient
                continue
            except ReadError as refusal:
                error = refusal
        seen[filed] += 1
        refused.append((archive, key, (filed, record_stem(name), error.reason, error.detail)))
    members = member_hashes((label.split("/") for label in labels), secret)
    arrays = np.array(numbers, PLANNING_NUMBERS), members
    return _ChunkHeaders(usable, labels, *arrays, refused, seen, with_patient)


def _planning_numbers(header: Header) -> tuple[int, ...]:
    """Returns a record's PLANNING_NUMBERS without the first, which is the number of its archive. Raises a
    ReadError if the record cannot be stored in a shard."""
    crops = crop_count(header.samples, header.fs_hz)
    check_member_name(header.source, header.name, crops)
    if not crops:
        raise ReadError("too short", f"{header.samples / header.fs_hz:.2f} s, 5 s are needed")
    length_and_rate = f"{header.samples} {header.fs_hz}".encode()
    fingerprint = hash_bytes(header.fingerprint + length_and_rate)
    dropped = dropped_samples(header.samples, header.fs_hz)
    return crops, dropped, fingerprint, hash_bytes(header.stamp)


def check_member_name(source: str, name: str, crops: int) -> None:
    """Raises a ReadError if the record's name cannot be used for its crops in a shard."""
    if not (_SAFE_NAME.fullmatch(name) and _SAFE_NAME.fullmatch(source)):
        raise ReadError(
            "record name", "may have only letters, digits, _ and -, and at most 64 of them"
        )
    if (length := len(f"{source}-{name}-{crops - 1:03d}.json")) > MAX_NAME:
        raise ReadError("record name", f"{length} characters in a shard, {MAX_NAME} at most")


def reject_line(
    archive: Source, key: bytes | None, source: str, name: str, reason: str, detail: str
) -> Reject:
    """Returns a line of rejects.csv. If names become pseudonyms, the line has no detail, because the
    detail may contain names of files."""
    if archive.pseudonyms:
        return source, name, reason, ""
    return source, pseudonym(key, "r", source, name), reason, "" if key else detail


def _uniquely_named_rejects(
    sources: Sequence[Source],
    secret: bytes | None,
    refused: list[Refused],
    labels: pa.Array,
    again: np.ndarray,
) -> list[Reject]:
    """Returns the lines of rejects.csv with a unique name for each refused record: its path if another
    record has its name. `again`: rows of the records that are not used, because an earlier record has
    their name; `secret`: the key of pseudonyms."""
    names = [f"{source}/{name}" for *_, (source, name, *_) in refused]
    is_refused = np.array(pc.is_in(labels, pa.array(names, labels.type)))
    is_refused[again] = False
    used = set(labels.filter(pa.array(is_refused)).to_pylist())
    taken: set[tuple[str, str]] = set()
    rejects = []
    for (archive, key, (source, name, reason, detail)), label in zip(refused, names, strict=True):
        path = sources[archive].path_of(key)
        if label in used or (source, name) in taken:
            name = shown if (shown := printable(path)) != name else f"{name} again"
        while (source, name) in taken:
            name += " again"  # a record in another archive has the same path
        taken.add((source, name))
        rejects.append(
            reject_line(
                sources[archive], secret, source, name, reason, detail_with_path(path, detail)
            )
        )
    return rejects
