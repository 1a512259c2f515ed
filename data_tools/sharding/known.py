"""The records that a dataset has already, when others are appended to it: by their names, and whether
a record of a known name is the ECG that the dataset has or another one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from ..dataset import CROP_SHAPE, Dataset, waveform
from ..ecg.crops import crop_count, prepare_crop
from ..ecg.pseudonyms import Removed, pseudonym
from ..ecg.record import EcgRecord
from ..io.errors import ReadError
from ..io.storage import prefetch
from ..io.terminal import keep_freed_memory
from ..sources.base import Source, read_safely, shown_patient


@dataclass(frozen=True)
class KnownRecords:
    members: np.ndarray  # member_hash of each record, ascending
    signals: np.ndarray  # of each record, as signal_of
    refused: np.ndarray  # member_hash of each record in its rejects.csv
    removed: Removed  # patients and waveforms that must not come back
    key: bytes | None  # of the dataset's pseudonyms

    @classmethod
    def of_dataset(
        cls, made: Dataset, rejects: Iterable[Sequence[str]], key: bytes | None
    ) -> "KnownRecords":
        hashes, waveforms = [], []
        # As numbers of Python, ten million would take a gigabyte
        for part in made.parts(["source", "record", "waveform"]):
            names = (part[column].to_pylist() for column in ("source", "record"))
            hashes.append(np.fromiter(map(member_hash, *names), np.uint64, len(part)))
            waveforms.append(part["waveform"].to_numpy())
        of_crops = np.concatenate(hashes)
        order = np.argsort(of_crops, kind="stable")
        members, first = np.unique(of_crops[order], return_index=True)
        signals = np.add.reduceat(np.concatenate(waveforms)[order], first)
        refused = member_hashes(rejects, None)  # they have their pseudonyms
        return cls(members, signals, refused, made.removed, key)

    def has(self, members: np.ndarray) -> np.ndarray:
        """Which of these records the dataset has."""
        return np.asarray(self.members[self._rows(members)] == members)

    def signals_of(self, members: np.ndarray) -> list[int]:
        """The signals of records that the dataset has."""
        signals: list[int] = self.signals[self._rows(members)].tolist()
        return signals

    def _rows(self, members: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.members[:-1], members)


def member_hash(source: str, name: str) -> int:
    """Of a record's name in a tar."""
    return hash_of(f"{source}-{name}".encode())


def member_hashes(names: Iterable[Sequence[str]], key: bytes | None) -> np.ndarray:
    """`names`: source and name of each record, perhaps with more."""
    hashes = []
    for source, name, *_ in names:
        hashes.append(member_hash(source, pseudonym(key, "r", source, name)))
    return np.array(hashes, np.uint64)


def hash_of(words: bytes) -> int:
    return int.from_bytes(blake2b(words, digest_size=8).digest())


def read_signals(
    sources: tuple[Source, ...],
    removed: Removed,
    key: bytes | None,
    task: tuple[int, list[tuple[int, str, str]]],
) -> tuple[int, list[int | ReadError]]:
    """Reads a chunk of records, of which the archive, the key in it and the label are given. -> the
    chunk's number, and of each record signal_of, or why it is refused."""
    keep_freed_memory()
    number, records = task

    def read(place: tuple[int, str, str]) -> int | ReadError:
        archive, path, label = place
        record = read_safely(sources[archive].read, path)
        if isinstance(record, ReadError):
            return record
        source = label.partition("/")[0]
        try:
            removed.refuse(source, shown_patient(key, source, record.patient))
            return signal_of(record, removed)
        except ReadError as error:
            return error

    remote = any(source.root.remote for source in sources)
    signals = prefetch(read, records) if remote else map(read, records)
    return number, list(signals)


def signal_of(record: EcgRecord, removed: Removed) -> int:
    """The sum of the waveform hashes of the crops that a dataset has of a record."""
    total = used = 0
    refusal = ReadError("too short")
    crop = np.empty(CROP_SHAPE, "<i2")
    for part in range(crop_count(record.signal.shape[1], record.fs_hz)):
        try:
            prepare_crop(record, part, crop)
            hashed = waveform(crop)[1]
            removed.refuse("", str(hashed))
        except ReadError as error:
            refusal = error
        else:
            total += hashed
            used += 1
    if not used:
        raise refusal
    return total % 2**64
