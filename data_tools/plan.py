"""What goes into which shard, decided from headers alone: a seeded permutation of all crops over shards of 1,024.

The plan is columns, not objects: about a hundred bytes a record, so that eleven million records fit one machine.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, sha256
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from data_tools import cluster, pseudonyms
from data_tools.dataset import FORMAT_VERSION, SHARD_CROPS
from data_tools.errors import ReadError, StorageError, printable
from data_tools.prepare import SPEC_HASH, crop_count, dropped_s
from data_tools.sources.base import Source, carefully, located, record_stem
from data_tools.storage import ahead, links_in
from data_tools.tar import MAX_NAME

Reject = tuple[str, str, str, str]  # source, record, reason, detail
SCAN_CHUNK = 2048
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


class PlannedShard(NamedTuple):
    crops: list[tuple[int, str, str, int]]  # archive, key, label, crop of the record
    identity: str  # two shards with the same identity have the same bytes, wherever the archive lies
    seen: str  # the same, and the files were not touched since


@dataclass(frozen=True)
class ShardPlan:
    """One entry a usable record; crops are numbered record by record, `order` is their permutation."""

    sources: tuple[Source, ...]
    archive: np.ndarray  # into sources
    keys: pa.Array
    labels: pa.Array  # "source/record"
    fingerprints: np.ndarray  # uint64
    stamps: np.ndarray  # uint64
    tables: str  # a hash of the sources' tables
    first_crop: np.ndarray  # [records + 1]
    order: np.ndarray  # [crops]
    seen: dict[str, int]  # records by source name, but for known ones
    dropped_s: dict[str, float]
    rejects: list[Reject]

    @property
    def shards(self) -> int:
        return -(-len(self.order) // SHARD_CROPS)

    def shard(self, index: int) -> PlannedShard:
        crops = self.order[index * SHARD_CROPS : (index + 1) * SHARD_CROPS]
        records = np.searchsorted(self.first_crop, crops, side="right") - 1
        parts = (crops - self.first_crop[records]).tolist()
        taken = pa.array(records)
        keys, labels = self.keys.take(taken).to_pylist(), self.labels.take(taken).to_pylist()
        marks = (f"{a}#{b}:{c:016x}" for a, b, c in zip(labels, parts, self.fingerprints[records].tolist(), strict=True))
        identity = sha256("\n".join([f"{FORMAT_VERSION} {SPEC_HASH} {self.tables}", *marks]).encode())
        seen = sha256(identity.digest() + self.stamps[records].tobytes())
        crops_of = list(zip(self.archive[records].tolist(), keys, labels, parts, strict=True))
        return PlannedShard(crops_of, identity.hexdigest(), seen.hexdigest())


def make_plan(
    sources: Iterable[Source],
    seed: int,
    known: Collection[str] = (),
    key: bytes | None = None,
    workers: int = 1,
    dask: str | None = None,
    quiet: bool = True,
) -> ShardPlan:
    """Read every header. `known` are the "source/record" labels, as shown under `key`, of a dataset that is being extended:
    those records are neither taken nor counted twice."""
    sources = tuple(sources)
    columns: dict[int, _Scan] = {}
    with tqdm(unit=" records", desc="headers", disable=quiet) as bar:
        for scan in cluster.run(_scan, _chunks(sources), workers, dask):
            columns[scan.chunk] = scan
            bar.update(scan.seen)
    scans = [columns[chunk] for chunk in sorted(columns)]
    if not scans:
        raise StorageError(f"no records in {', '.join(source.root.url + links_in(source.root) for source in sources)}")
    labels = pa.concat_arrays([scan.labels for scan in scans])
    old = _among(labels, known, key)
    first = _first_of_each(pc.replace_substring(labels, "/", "-"))  # a-b/c and a/b-c are one name in a shard
    fresh = first & ~old
    refused = [refused for scan in scans for refused in scan.refused]
    again = pa.array(~first & ~old)
    keys = pa.concat_arrays([scan.keys for scan in scans])
    for path, label in zip(keys.filter(again).to_pylist(), labels.filter(again).to_pylist(), strict=True):
        source, _, name = label.partition("/")
        refused.append((path, (source, name, "record read already", f"another {name} came first")))
    rejects = _each_by_its_name(refused, labels.filter(pa.array(first)), known, key)
    crops = np.concatenate([scan.crops for scan in scans])[fresh]
    first_crop = np.concatenate([[0], np.cumsum(crops, dtype=np.int64)])
    seen, known_already = _sum(scan.seen_by_source for scan in scans), _by_source(labels, old)
    if not first_crop[-1]:
        reasons = ", ".join(
            sorted({reason for _, _, reason, _ in rejects} | ({"in --extend's already"} if old.any() else set()))
        )
        raise StorageError(f"no usable record in {', '.join(source.root.url for source in sources)} ({reasons})")
    return ShardPlan(
        sources,
        np.concatenate([np.full(len(scan.crops), scan.archive, np.int16) for scan in scans])[fresh],
        keys.filter(pa.array(fresh)),
        labels.filter(pa.array(fresh)),
        np.concatenate([scan.fingerprints for scan in scans])[fresh],
        np.concatenate([scan.stamps for scan in scans])[fresh],
        sha256(b"".join(sha256(source.tables()).digest() for source in sources)).hexdigest(),
        first_crop,
        permutation(int(first_crop[-1]), seed),
        {name: count - int(known_already.get(name, 0)) for name, count in seen.items()},
        _by_source(labels, fresh * np.concatenate([scan.dropped_s for scan in scans])),
        rejects,
    )


def permutation(count: int, seed: int) -> np.ndarray:
    """Sorted by a mixed counter (SplitMix64): no library's generator, so no library's next version changes it."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(seed * 0xD1B54A32D192ED03 % 2**64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


@dataclass(frozen=True)
class _Scan:
    chunk: int
    archive: int
    keys: pa.Array
    labels: pa.Array
    fingerprints: np.ndarray
    stamps: np.ndarray
    crops: np.ndarray
    seen: int
    seen_by_source: dict[str, int]
    dropped_s: np.ndarray
    refused: list[tuple[str, Reject]]  # with their keys


def _chunks(sources: tuple[Source, ...]) -> Iterator[tuple[int, int, Source, list[str]]]:
    number = 0
    for archive, source in enumerate(sources):
        keys = iter(source.keys())
        while chunk := list(islice(keys, SCAN_CHUNK)):
            yield number, archive, source, chunk
            number += 1


def _scan(task: tuple[int, int, Source, list[str]]) -> _Scan:
    chunk, archive, source, keys = task
    rows: list[tuple[str, str, int, int, int, float]] = []
    refused: list[tuple[str, Reject]] = []
    seen: dict[str, int] = {}
    read = partial(carefully, source.header)
    for key, header in zip(keys, ahead(read, keys) if source.root.remote else map(read, keys), strict=True):
        name, filed = source.called(key), source.source_of(key)
        try:
            if isinstance(header, ReadError):
                raise header
            name, filed = header.name, header.source
            if not (_NAME.fullmatch(name) and _NAME.fullmatch(filed)):
                raise ReadError("record name", "letters, digits, _ and - only, 64 at most")
            crops = crop_count(header.samples, header.fs_hz)
            if not crops:
                raise ReadError("too short", f"{header.samples / header.fs_hz:.2f} s, 5 s are needed")
            if (length := len(f"{filed}-{name}-{crops - 1:03d}.json")) > MAX_NAME:
                raise ReadError("record name", f"{length} characters in a shard, {MAX_NAME} at most")
            lost = dropped_s(header.samples, header.fs_hz)
            words = header.fingerprint + f"{header.samples} {header.fs_hz}".encode()
            rows.append((key, f"{filed}/{name}", _hash(words), _hash(header.stamp), crops, lost))
        except ReadError as error:
            refused.append((key, (filed, record_stem(name), error.reason, error.detail)))
        seen[filed] = seen.get(filed, 0) + 1
    columns: list[Any] = list(zip(*rows, strict=True)) or [()] * 6
    return _Scan(
        chunk,
        archive,
        pa.array(columns[0], pa.large_string()),
        pa.array(columns[1], pa.large_string()),
        np.array(columns[2], np.uint64),
        np.array(columns[3], np.uint64),
        np.array(columns[4], np.int32),
        len(keys),
        seen,
        np.array(columns[5], np.float64),
        refused,
    )


def _hash(words: bytes) -> int:
    return int.from_bytes(blake2b(words, digest_size=8).digest())


def _each_by_its_name(
    refused: list[tuple[str, Reject]], labels: pa.Array, known: Collection[str], key: bytes | None
) -> list[Reject]:
    """Every refused record has a name of its own in rejects.csv: its path, if another record has its name."""
    asked = pa.array([f"{source}/{name}" for _, (source, name, *_) in refused], labels.type)
    used = pc.is_in(asked, labels).to_numpy(zero_copy_only=False) | _among(asked, known, key)
    taken: set[tuple[str, str]] = set()
    rejects = []
    for (path, (source, name, reason, detail)), elsewhere in zip(refused, used.tolist(), strict=True):
        if elsewhere or (source, name) in taken:
            name = printable(path)
        while (source, name) in taken:
            name += " again"  # in another archive
        taken.add((source, name))
        rejects.append((source, name, reason, located(path, detail)))
    return rejects


def _first_of_each(labels: pa.Array) -> np.ndarray:
    first = np.zeros(len(labels), bool)
    first[np.unique(pc.dictionary_encode(labels).indices.to_numpy(), return_index=True)[1]] = True
    return first


def _among(labels: pa.Array, known: Collection[str], key: bytes | None) -> np.ndarray:
    if not known:
        return np.zeros(len(labels), bool)
    pairs = (label.split("/", 1) for label in labels.to_pylist())
    return np.fromiter((f"{s}/{pseudonyms.shown(key, 'r', s, n)}" in known for s, n in pairs), bool, len(labels))


def _by_source(labels: pa.Array, values: np.ndarray) -> dict[str, float]:
    names = pc.dictionary_encode(pc.list_element(pc.split_pattern(labels, "/", max_splits=1), 0))
    sums = np.bincount(names.indices.to_numpy(), values, len(names.dictionary))
    return dict(zip(names.dictionary.to_pylist(), sums.tolist(), strict=True))


def _sum(dictionaries: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for dictionary in dictionaries:
        for name, value in dictionary.items():
            total[name] = total.get(name, 0) + value
    return dict(sorted(total.items()))
