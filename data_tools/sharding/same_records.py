"""Tell whether a record is the same ECG as a dataset's record of the same name."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b

import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from ..dataset import CROP_SHAPE, crc_and_waveform_hash
from ..ecg.crops import prepare_crop, record_crop_count
from ..ecg.pseudonyms import pseudonym
from ..ecg.record import EcgRecord
from ..io import cluster
from ..io.errors import MISSING_FILE, ReadError
from ..io.storage import prefetch
from ..io.terminal import keep_freed_memory
from ..sources.base import Source, read_record, read_safely
from ..sources.dataset import StoredDataset

RECORD_READ_ALREADY = "record read already"
PAIRS_PER_TASK = 512  # pairs of records that are compared in one task
Places = list[tuple[int, str]]  # for each record: number of its archive, its key in the archive


def member_hash(source: str, name: str) -> int:
    """Returns a hash of the name that a record has in a tar, where a-b/c and a/b-c have the same name."""
    return hash_bytes(f"{source}-{name}".encode())


def member_hashes(names: Iterable[Sequence[str]], key: bytes | None) -> np.ndarray:
    """Returns hashes of records' names in a tar. `names`: source and name of each record; more items
    are ignored. `key`: the key of pseudonyms."""
    hashes = []
    for source, name, *_ in names:
        hashes.append(member_hash(source, pseudonym(key, "r", source, name)))
    return np.array(hashes, np.uint64)


def hash_bytes(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())


def compare_records(
    sources: tuple[Source, ...],
    keys: pa.Array,
    archives: np.ndarray,
    first: np.ndarray,
    again: np.ndarray,
    workers: int,
    dask: str | None,
    quiet: bool,
) -> Iterator[tuple[int, ReadError]]:
    """Yields (row, reason for its refusal) for each row in `again` whose record cannot be read, or is another ECG
    than the record of the row at the same place in `first`. `keys` and `archives` have one entry per row."""

    def places_of(rows: np.ndarray) -> Places:
        return list(
            zip(archives[rows].tolist(), keys.take(pa.array(rows)).to_pylist(), strict=True)
        )

    chunks = (
        (again[part], places_of(first[part]), places_of(again[part]))
        for part in (slice(i, i + PAIRS_PER_TASK) for i in range(0, len(again), PAIRS_PER_TASK))
    )
    compared = cluster.run(partial(_compare_chunk, sources), chunks, workers, dask)
    with tqdm(total=len(again), unit=" records", desc="comparing", disable=quiet) as bar:
        for count, unlike in compared:
            bar.update(count)
            yield from unlike


def _compare_chunk(
    sources: tuple[Source, ...], task: tuple[np.ndarray, Places, Places]
) -> tuple[int, list[tuple[int, ReadError]]]:
    keep_freed_memory()
    rows, first, again = task

    def compare(pair: tuple[tuple[int, str], tuple[int, str]]) -> ReadError | None:
        one, other = (_waveform_sum(sources[archive], key) for archive, key in pair)
        # If the signal file of `other` is missing, there is nothing to compare, and it counts as the same ECG
        if isinstance(other, ReadError):
            return None if other.reason == MISSING_FILE else other
        if one == other:
            return None
        archive, key = pair[1]
        return ReadError(
            RECORD_READ_ALREADY, f"another {sources[archive].name_for(key)} came first"
        )

    remote = any(source.root.remote for source in sources)
    pairs = list(zip(first, again, strict=True))
    found = prefetch(compare, pairs) if remote else map(compare, pairs)
    unlike = [(row, error) for row, error in zip(rows.tolist(), found, strict=True) if error]
    return len(rows), unlike


def _waveform_sum(source: Source, key: str) -> int | ReadError:
    if isinstance(source, StoredDataset):
        return source.waveform_sum(key)
    record = read_safely(partial(read_record, source), key)
    if isinstance(record, ReadError):
        return record
    try:
        return waveform_sum(record)
    except ReadError as error:
        return error


def waveform_sum(record: EcgRecord) -> int:
    """Returns the sum of the waveform hashes of all crops that a dataset can have of a record. Raises a
    ReadError if there are no such crops."""
    total = used = 0
    refusal = ReadError("too short")
    crop = np.empty(CROP_SHAPE, "<i2")
    for part in range(record_crop_count(record)):
        try:
            prepare_crop(record, part, crop)
        except ReadError as error:
            refusal = error
        else:
            total += crc_and_waveform_hash(crop)[1]
            used += 1
    if not used:
        raise refusal
    return total % 2**64
