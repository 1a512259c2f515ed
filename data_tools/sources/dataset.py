"""A dataset as a source: its crops are copied to another dataset.

    omnilead shard OLD MORE --out NEW

The crc32c of each crop is checked before the crop is copied. Names that are pseudonyms stay as they are.
The archive that OLD was made from is not needed.
"""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..dataset import Dataset, DatasetError
from ..dataset.rejects import CROP_FLAG_REASONS, FLAG_REASONS, read_rejects
from ..ecg.constants import IMPLAUSIBLE, LEADS
from ..ecg.crops import CROP, HALF, IMPLAUSIBLE_AMPLITUDE, Crop
from ..ecg.record import EcgRecord, Header
from ..ecg.resampling import FS_HZ
from ..io.errors import ReadError, StorageError
from ..io.storage import Folder
from .base import Source

RECORD_COLUMNS = ("patient", "age", "sex", "dx", "fs_source_hz")
CROP_COLUMNS = (
    "shard",
    "offset",
    "crc32c",
    "waveform",
    "start_s",
    "halves",
    "missing_leads",
    "flags",
)
# Rows of the table that are converted to Python objects at a time, which limits the memory
BATCH_ROWS = 65_536


class StoredDataset(Source):
    """Reads the records of one source of a dataset.

    A key is the record's name followed, as JSON, by what the dataset's tables state of the record, so that
    reading a record needs no table."""

    def __init__(self, root: Folder, name: str, licence: str, pseudonyms: str | None) -> None:
        super().__init__(root)
        self.name, self.licence, self.pseudonyms = name, licence, pseudonyms

    def keys(self) -> Iterator[str]:
        """Yield the key of each record, sorted by name. The key states where the record's crops are stored: by
        shard and offset, or in a zarr copy by row."""
        dataset = open_dataset(self.root)
        table = dataset.table(["source", "record", *RECORD_COLUMNS, *CROP_COLUMNS])
        table = table.append_column("row", pa.array(np.arange(len(table))))
        table = table.filter(pc.equal(table["source"], self.name))
        order = pc.sort_indices(table, [("record", "ascending"), ("start_s", "ascending")])
        rows = (row for part in _index_batches(order) for row in table.take(part).to_pylist())
        warnings = self._warnings(dataset)
        for name, of_record in groupby(rows, lambda row: row["record"]):
            crops = list(of_record)
            facts = [crops[0][column] for column in RECORD_COLUMNS]
            places = [[crop[column] for column in (*CROP_COLUMNS, "row")] for crop in crops]
            yield f"{name} {json.dumps([facts, places, warnings.get(name, [])])}"

    def _warnings(self, dataset: Dataset) -> dict[str, list[tuple[str, str]]]:
        """Return {record: its warnings in rejects.csv}. Warnings about single crops are left out, because
        copying the crops finds them again."""
        warnings: dict[str, list[tuple[str, str]]] = {}
        for source, record, reason, detail in read_rejects(dataset):
            if source == self.name and reason in FLAG_REASONS and reason not in CROP_FLAG_REASONS:
                warnings.setdefault(record, []).append((reason, detail))
        return warnings

    def header(self, key: str) -> Header:
        name, record, crops, _ = _parse_key(key)
        last = crops[-1]
        samples = round(last["start_s"] * FS_HZ) + last["halves"] * HALF
        sums = json.dumps([[crop["start_s"], crop["crc32c"], crop["flags"]] for crop in crops])
        facts = json.dumps([record[column] for column in RECORD_COLUMNS])
        mark = f"{sums} {facts}".encode()
        return Header(name, self.name, samples, float(FS_HZ), mark, patient=record["patient"])

    def read(self, key: str) -> EcgRecord:
        name, record, crops, warnings = _parse_key(key)
        implausible = any(IMPLAUSIBLE in crop["flags"] for crop in crops)
        if implausible and not any(reason == IMPLAUSIBLE_AMPLITUDE for reason, _ in warnings):
            warnings.append([IMPLAUSIBLE_AMPLITUDE, ""])
        return EcgRecord(
            name,
            np.empty((len(LEADS), 0), np.int16),
            float(record["fs_source_hz"]),
            LEADS,
            source=self.name,
            patient=record["patient"],
            age=record["age"],
            sex=record["sex"],
            dx=tuple(record["dx"]),
            warnings=tuple((reason, detail) for reason, detail in warnings),
            stored=CopiedCrops(self.root, crops),
        )

    def name_for(self, key: str) -> str:
        return key.partition(" ")[0]

    def path_of(self, key: str) -> str:
        return self.name_for(key)

    def waveform_sum(self, key: str) -> int:
        """Return the sum of the waveform hashes of a record's crops, by which two records are compared."""
        waveforms: list[int] = [crop["waveform"] for crop in _parse_key(key)[2]]
        return sum(waveforms) % 2**64

    def notes(self) -> list[str]:
        facts = {source.name: source for source in open_dataset(self.root).facts.sources}
        refused = facts[self.name].records["refused"]
        if not refused:
            return []
        records = "1 record" if refused == 1 else f"{refused:,} records"
        place = f"{self.root.url}/rejects.csv"
        return [f"{self.root.url}: does not hold {records} of {self.name} that {place} lists"]


class CopiedCrops:
    """Reads the crops of a record one by one, when each is needed, because a long record has hundreds."""

    def __init__(self, root: Folder, crops: Sequence[dict[str, Any]]) -> None:
        self.root = root
        self.crops = {round(crop["start_s"] * FS_HZ) // CROP: crop for crop in crops}
        self.count = max(self.crops) + 1

    def read(self, index: int, out: np.ndarray) -> Crop:
        if index not in self.crops:
            raise ReadError(
                "no valid lead", f"the dataset has no crop at {index * CROP / FS_HZ:g} s"
            )
        crop = self.crops[index]
        place = (crop[name] for name in ("row", "shard", "offset", "crc32c"))
        try:
            out[:] = open_dataset(self.root).read_at(*place)
        except DatasetError as error:  # the dataset is damaged, not the record
            raise StorageError(error) from None
        flags = tuple(flag for flag in crop["flags"] if flag != IMPLAUSIBLE)
        return Crop(crop["start_s"], crop["halves"], tuple(crop["missing_leads"]), flags)


def dataset_sources(root: Folder) -> list[Source]:
    facts = open_dataset(root).facts
    return [
        StoredDataset(root, source.name, source.licence, facts.pseudonyms)
        for source in facts.sources
        if source.crops
    ]


@lru_cache(maxsize=4)
def open_dataset(root: Folder) -> Dataset:
    """Open a dataset of the current format or an earlier one. Only its tables and samples are read."""
    return Dataset.of_folder(root, earlier_format=True)


def _index_batches(order: pa.Array) -> Iterator[pa.Array]:
    for start in range(0, len(order), BATCH_ROWS):
        yield order.slice(start, BATCH_ROWS)


class _StoredRecord(NamedTuple):
    name: str
    columns: dict[str, Any]  # {name: value} of RECORD_COLUMNS
    # For each crop, in order of time: {name: value} of CROP_COLUMNS and "row"
    crops: list[dict[str, Any]]
    warnings: list[list[str]]


def _parse_key(key: str) -> _StoredRecord:
    name, _, text = key.partition(" ")
    facts, places, warnings = json.loads(text)
    crops = [dict(zip((*CROP_COLUMNS, "row"), place, strict=True)) for place in places]
    return _StoredRecord(name, dict(zip(RECORD_COLUMNS, facts, strict=True)), crops, warnings)
