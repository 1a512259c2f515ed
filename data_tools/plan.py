"""Plan which crop goes into which shard: a seeded permutation of all crops over shards of 1,024,
made from headers only.

The plan is stored in columns, about a hundred bytes per record, so that eleven million records fit
into one machine's memory.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, sha256
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm.auto import tqdm

from omnilead.data_tools import cluster
from omnilead.data_tools.cli import keep_freed_memory
from omnilead.data_tools.dataset import FORMAT_VERSION, SHARD_CROPS
from omnilead.data_tools.errors import ReadError, StorageError, printable
from omnilead.data_tools.prepare import SPEC_HASH, crop_count, dropped_s
from omnilead.data_tools.record import Header
from omnilead.data_tools.record_tables import patients_of, read_patients
from omnilead.data_tools.shard_writers import MAX_NAME
from omnilead.data_tools.sources.base import Source, links_in, located, read_safely, record_stem
from omnilead.data_tools.storage import prefetch

Reject = tuple[str, str, str, str]  # source, record, reason, detail
# archive, key, label, patient that a table names, crop of the record
PlannedCrops = list[tuple[int, str, str, str | None, int]]
SCAN_CHUNK = 2048
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
SCANNED = pa.schema(
    [
        ("archive", pa.int16()),  # index of the plan's sources
        ("key", pa.large_string()),
        ("label", pa.large_string()),  # source/record
        ("source", pa.large_string()),
        ("fingerprint", pa.uint64()),
        ("stamp", pa.uint64()),
        ("crops", pa.int32()),
        ("dropped_s", pa.float64()),
    ]
)


class PlannedShard(NamedTuple):
    crops: PlannedCrops
    identity: (
        str  # shards with the same identity have the same bytes, wherever the archive is stored
    )
    content: str  # also changes if the archive's files are modified


@dataclass(frozen=True)
class ShardPlan:
    sources: tuple[Source, ...]
    # The usable records, with the columns of SCANNED and the patients that a table names
    records: pa.Table
    tables: str  # a hash of the sources' tables
    first_crop: np.ndarray  # [records + 1] number of each record's first crop
    order: np.ndarray  # [crops] permutation
    seen: dict[str, int]  # number of records by source
    rejects: list[Reject]

    @property
    def shards(self) -> int:
        return -(-len(self.order) // SHARD_CROPS)

    def shard(self, index: int) -> PlannedShard:
        crops = self.order[index * SHARD_CROPS : (index + 1) * SHARD_CROPS]
        records = np.searchsorted(self.first_crop, crops, side="right") - 1
        parts = (crops - self.first_crop[records]).tolist()
        rows = self.records.take(pa.array(records)).to_pydict()
        marks = (
            f"{a}#{b}:{c:016x}" if d is None else f"{a}#{b}:{c:016x} {d}"
            for a, b, c, d in zip(
                rows["label"], parts, rows["fingerprint"], rows["patient"], strict=True
            )
        )
        identity = sha256(
            "\n".join([f"{FORMAT_VERSION} {SPEC_HASH} {self.tables}", *marks]).encode()
        )
        content = sha256(identity.digest() + np.array(rows["stamp"], np.uint64).tobytes())
        names = ("archive", "key", "label", "patient")
        planned = list(zip(*(rows[name] for name in names), parts, strict=True))
        return PlannedShard(planned, identity.hexdigest(), content.hexdigest())


class _Scan(NamedTuple):
    """The headers of a chunk of keys."""

    number: int
    records: pa.Table  # the usable ones, with the columns of SCANNED
    refused: list[tuple[str, Reject]]  # by key


def make_plan(
    sources: Iterable[Source],
    seed: int,
    workers: int = 1,
    dask: str | None = None,
    quiet: bool = True,
    patients: str | None = None,
) -> ShardPlan:
    """Read all headers in parallel and plan the shards. `patients`: a table that names them."""
    sources = tuple(sources)
    people = read_patients(patients) if patients else None  # before hours of reading
    scans: list[_Scan] = []
    with tqdm(unit=" records", desc="headers", disable=quiet) as bar:
        for scan in cluster.run(_scan, _chunks(sources), workers, dask):
            scans.append(scan)
            bar.update(len(scan.records) + len(scan.refused))
    if not scans:
        raise _no_records(sources)
    scans.sort(key=lambda scan: scan.number)  # they finish in any order
    scanned = pa.concat_tables(scan.records for scan in scans).combine_chunks()
    refused = [one for scan in scans for one in scan.refused]
    seen = _counts(scanned["source"], refused)
    is_first = _first_of_name(scanned["label"])
    records = scanned.filter(pa.array(is_first))
    refused += _read_already(scanned.filter(pa.array(~is_first)))
    rejects = _with_unique_names(refused, records["label"])
    named = pa.nulls(len(records), pa.string())
    if patients and people and len(records):
        named = patients_of(patients, people, records["label"].combine_chunks().cast(pa.string()))
    records = records.append_column("patient", named)
    first_crop = np.concatenate([[0], np.cumsum(records["crops"].to_numpy(), dtype=np.int64)])
    order = permutation(int(first_crop[-1]), seed)
    return ShardPlan(sources, records, _tables(sources), first_crop, order, seen, rejects)


def _tables(sources: Iterable[Source]) -> str:
    tables = sha256()
    for source in sources:
        tables.update(sha256(source.tables()).digest())
    return tables.hexdigest()


def _no_records(sources: Iterable[Source]) -> StorageError:
    places = (source.root.url + links_in(source.root) for source in sources)
    return StorageError(f"no records in {', '.join(places)}")


def _counts(sources: pa.ChunkedArray, refused: Iterable[tuple[str, Reject]]) -> dict[str, int]:
    """The number of records by source, usable or not."""
    counts = Counter(source for _, (source, *_) in refused)
    for row in pc.value_counts(sources).to_pylist():
        counts[row["values"]] += row["counts"]
    return dict(sorted(counts.items()))


def _read_already(records: pa.Table) -> Iterator[tuple[str, Reject]]:
    for key, label in zip(*records.select(["key", "label"]).to_pydict().values(), strict=True):
        source, _, name = label.partition("/")
        yield key, (source, name, "record read already", f"another {name} came first")


def _first_of_name(labels: pa.ChunkedArray) -> np.ndarray:
    """A mask of the records whose name no record before has, as it will be in a tar: a-b/c and
    a/b-c are the same there."""
    tar_names = pc.replace_substring(labels.combine_chunks(), "/", "-")
    numbers = pc.dictionary_encode(tar_names).indices.to_numpy()
    is_first = np.zeros(len(labels), bool)
    is_first[np.unique(numbers, return_index=True)[1]] = True
    return is_first


def permutation(count: int, seed: int) -> np.ndarray:
    """A permutation by SplitMix64 hashes of a counter, since a library's generator may change
    between versions."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(seed * 0xD1B54A32D192ED03 % 2**64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


def _chunks(sources: tuple[Source, ...]) -> Iterator[tuple[int, int, Source, list[str]]]:
    number = 0
    for archive, source in enumerate(sources):
        keys = iter(source.keys())
        while chunk := list(islice(keys, SCAN_CHUNK)):
            yield number, archive, source, chunk
            number += 1


def _scan(task: tuple[int, int, Source, list[str]]) -> _Scan:
    keep_freed_memory()
    number, archive, source, keys = task
    rows: list[dict[str, Any]] = []
    refused: list[tuple[str, Reject]] = []
    read = partial(read_safely, source.header)
    headers = prefetch(read, keys) if source.root.remote else map(read, keys)
    for key, header in zip(keys, headers, strict=True):
        if isinstance(header, ReadError):
            name, filed, error = source.name_for(key), source.source_of(key), header
        else:
            name, filed = header.name, header.source
            try:
                rows.append({"archive": archive, "key": key} | _scanned(header))
                continue
            except ReadError as refusal:
                error = refusal
        refused.append((key, (filed, record_stem(name), error.reason, error.detail)))
    return _Scan(number, pa.Table.from_pylist(rows, SCANNED), refused)


def _scanned(header: Header) -> dict[str, Any]:
    """The columns of SCANNED; a ReadError if the record can have no place in a shard."""
    name, source = header.name, header.source
    if not (_NAME.fullmatch(name) and _NAME.fullmatch(source)):
        raise ReadError("record name", "letters, digits, _ and - only, 64 at most")
    crops = crop_count(header.samples, header.fs_hz)
    if not crops:
        raise ReadError("too short", f"{header.samples / header.fs_hz:.2f} s, 5 s are needed")
    if (length := len(f"{source}-{name}-{crops - 1:03d}.json")) > MAX_NAME:
        raise ReadError("record name", f"{length} characters in a shard, {MAX_NAME} at most")
    return {
        "label": f"{source}/{name}",
        "source": source,
        "fingerprint": _hash(header.fingerprint + f"{header.samples} {header.fs_hz}".encode()),
        "stamp": _hash(header.stamp),
        "crops": crops,
        "dropped_s": dropped_s(header.samples, header.fs_hz),
    }


def _hash(words: bytes) -> int:
    return int.from_bytes(blake2b(words, digest_size=8).digest())


def _with_unique_names(refused: list[tuple[str, Reject]], labels: pa.ChunkedArray) -> list[Reject]:
    """Give each refused record a unique name in rejects.csv: its path if another record has its
    name."""
    names = pa.array([f"{source}/{name}" for _, (source, name, *_) in refused], labels.type)
    used = pc.is_in(names, labels).to_pylist()
    taken: set[tuple[str, str]] = set()
    rejects = []
    for (path, (source, name, reason, detail)), elsewhere in zip(refused, used, strict=True):
        if elsewhere or (source, name) in taken:
            name = printable(path)
        while (source, name) in taken:
            name += " again"  # the same path in another archive
        taken.add((source, name))
        rejects.append((source, name, reason, located(path, detail)))
    return rejects
