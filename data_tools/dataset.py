"""The dataset on disk or in a bucket, format version 1: the one room that the data tools and the engine both enter.

    DATASET/dataset.json      what it is: preprocessing, sources, roles, shards with their sha256, the fingerprint
            samples.parquet   one row a crop, in shard order
            rejects.csv       every record, lead or crop that was refused, repaired or flagged
            shards/00000.tar  <key>.ecg = int16 little-endian [12, 5000] microvolts, <key>.json; 00000.idx for DALI
            store.zarr/       optional twin: int16 [crops, 12, 5000]

`Dataset.open` reads dataset.json and nothing else; columns are read when asked for, crops by offset with their checksum.
"""

import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_tools.errors import ChunkError as ChunkError  # the engine has these, and as_csv, from here
from data_tools.errors import DataError as DataError
from data_tools.errors import DatasetError as DatasetError
from data_tools.errors import ReadError, one_line
from data_tools.record import ABBREVIATIONS, LEADS
from data_tools.storage import Folder, folder_of_dataset
from data_tools.tables import as_csv as as_csv

FORMAT_VERSION = 1
CLASSES = ABBREVIATIONS  # the columns of `labels`
PLANS = ("paper", "all", "paper-split")
ROLES = {"dx", "id", "pretrain"}  # for which sources may be named
CROP_SAMPLES = 5000
CROP_SHAPE = (len(LEADS), CROP_SAMPLES)
CROP_BYTES = 2 * len(LEADS) * CROP_SAMPLES
SHARD_CROPS = 1024
META, SAMPLES, REJECTS, STORE = "dataset.json", "samples.parquet", "rejects.csv", "store.zarr"
MAX_META = 256 * 2**20
_SHARD, _SHA256 = re.compile(r"[A-Za-z0-9_-]{1,64}\.tar", re.ASCII), re.compile(r"[0-9a-f]{64}")

COLUMNS = pa.schema(
    [
        ("shard", pa.int32()),  # -1 in a dataset that is only zarr, where the row is the address
        ("offset", pa.int64()),
        ("crc32c", pa.uint32()),
        ("waveform", pa.uint64()),  # crc32c of the limb leads, then of the chest leads: equal for equal waveforms
        ("source", pa.string()),
        ("record", pa.string()),
        ("patient", pa.string()),
        ("start_s", pa.float64()),
        ("halves", pa.uint8()),
        ("missing_leads", pa.list_(pa.string())),
        ("flags", pa.list_(pa.string())),
        ("pretrain", pa.bool_()),
        ("dx_role", pa.string()),
        ("id_role", pa.string()),
        ("dx", pa.list_(pa.string())),
        ("labels", pa.list_(pa.bool_(), 26)),
        ("age", pa.float32()),
        ("sex", pa.string()),
        ("fs_source_hz", pa.float64()),
    ]
)
NOT_ALWAYS = ("patient", "dx_role", "id_role", "age", "sex")  # all other columns say something of every crop


class Meta(dict[str, Any]):
    """What dataset.json says: to need what it does not say is that file's error, and no program's."""

    def __missing__(self, name: str) -> Any:
        raise DatasetError(f"{META}: says nothing of {name}: restore the file")


@dataclass(frozen=True)
class Dataset:
    root: Folder
    meta: dict[str, Any]

    @classmethod
    def open(cls, url: str, anonymous: bool = False) -> "Dataset":
        root = folder_of_dataset(url, anonymous)
        try:
            meta = json.loads(root.read(META, MAX_META))
        except ReadError as error:
            hint = "unfinished, or no dataset: `python -m data_tools shard SRC --out DATASET` finishes or makes one"
            raise DatasetError(f"{url}: no {META} ({hint})" if error.reason == "missing file" else f"{url}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise DatasetError(one_line(f"{url}/{META}: not JSON ({error}): restore the file")) from None
        version = meta.get("format_version") if isinstance(meta, dict) else None
        if version != FORMAT_VERSION:
            raise DatasetError(f"{url}: format version {version}, this program reads {FORMAT_VERSION}: use its own version")
        if meta.get("fingerprint") != fingerprint(meta):
            raise DatasetError(f"{url}/{META}: its fingerprint is not that of its contents: it was changed by hand")
        if wrong := misshapen(meta):
            raise DatasetError(f"{url}/{META}: {wrong} has not the form of version {FORMAT_VERSION}: restore the file")
        held, names = sum(shard["crops"] for shard in meta["shards"]), {shard["name"] for shard in meta["shards"]}
        if names and (held, len(names)) != (meta["crops"], len(meta["shards"])):
            told = f"{len(names)} shards of {held} crops, and {meta['crops']} crops in all"
            raise DatasetError(f"{url}/{META}: contradicts itself ({told}): restore the file")
        return cls(root, Meta(meta))

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self.root, self.meta)  # another process reads for itself

    def __hash__(self) -> int:
        return hash((self.root.url, self.fingerprint))

    def __len__(self) -> int:
        return int(self.meta["crops"])

    @property
    def fingerprint(self) -> str:
        return str(self.meta["fingerprint"])

    @property
    def shards(self) -> list[dict[str, Any]]:
        return list(self.meta["shards"])

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows in shard order. On a local disk the file is mapped, and only the columns asked for are decoded."""
        with self._arrow_errors():
            table = self._samples.read(columns)
        if table.num_rows != len(self):
            raise DatasetError(
                f"{self.root.url}: {SAMPLES} has {table.num_rows} rows, {META} says {len(self)}: restore the file"
            )
        if lacking := [name for name in table.column_names if name not in NOT_ALWAYS and table[name].null_count]:
            raise DatasetError(f"{self.root.url}/{SAMPLES}: {lacking[0]} is missing in some rows: build the dataset again")
        return table

    def parts(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The same rows by and by, for what needs only some of them at a time."""
        with self._arrow_errors():
            for group in self._samples.fragments[0].split_by_row_group():
                yield from group.to_table(COLUMNS, list(columns)).to_batches()

    @cached_property
    def _samples(self) -> pq.ParquetDataset:
        """Its bytes are right: parquet's own checks do not see every flipped bit. Those from far away are kept, or each column
        would fetch them again."""
        told, file = self.meta["samples"], f"{self.root.url}/{SAMPLES}"
        source: Any = file
        if self.root.remote:
            data = self.root.read(SAMPLES, told["bytes"])
            source, digest = io.BytesIO(data), hashlib.sha256(data)
        else:
            with open(file, "rb") as opened:
                digest = hashlib.file_digest(opened, "sha256")
        if digest.hexdigest() != told["sha256"]:
            raise DatasetError(f"{file}: fails its sha256: restore the file")
        return pq.ParquetDataset(source, memory_map=True, schema=COLUMNS)

    @contextmanager
    def _arrow_errors(self) -> Iterator[None]:
        file = f"{self.root.url}/{SAMPLES}"
        try:
            yield
        except FileNotFoundError:
            raise DatasetError(f"{file}: missing: restore the file") from None
        except pa.ArrowMemoryError:
            raise
        except (OSError, pa.ArrowException, ReadError) as error:
            raise DatasetError(one_line(f"{file}: {error}: restore the file")) from None

    def column(self, name: str) -> np.ndarray:
        values: np.ndarray = self.table([name])[name].to_numpy()
        return values

    @property
    def labels(self) -> np.ndarray:
        """bool [crops, 26]: which of CLASSES each crop's record has."""
        values: np.ndarray = self.table(["labels"])["labels"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return values.reshape(len(self), len(CLASSES))

    @cached_property
    def addresses(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """shard, offset and crc32c of every crop: 16 bytes each."""
        table = self.table(["shard", "offset", "crc32c"])
        return tuple(table[name].to_numpy() for name in ("shard", "offset", "crc32c"))

    def select(self, pretrain: bool | None = None, dx: str | None = None, identity: str | None = None) -> np.ndarray:
        """Rows of a role: select(dx="test"), select(pretrain=True), select(identity="gallery")."""
        keep = np.ones(len(self), bool)
        for name, wanted in (("pretrain", pretrain), ("dx_role", dx), ("id_role", identity)):
            if wanted is not None:
                keep &= self.column(name) == wanted
        return np.flatnonzero(keep)

    def read(self, row: int, check: bool = True) -> np.ndarray:
        """One crop, int16 [12, 5000] in microvolts."""
        shard, offset, crc = (int(column[row]) for column in self.addresses)
        name = STORE if shard < 0 else f"shards/{self.shards[shard]['name']}"
        try:
            if shard < 0:
                crop = np.empty(CROP_SHAPE, "<i2")
                self.chunks.read(row, crop)
                data = crop.tobytes()
            else:
                data = self.root.read_range(name, offset, CROP_BYTES)
        except (OSError, ValueError, ChunkError) as error:
            raise DatasetError(one_line(f"{self.root.url}/{name}: crop {row}: {error}: restore the file")) from None
        if check and google_crc32c.value(data) != crc:
            raise DatasetError(f"{self.root.url}/{name}: crop {row} at byte {offset} fails its crc32c: restore the file")
        return np.frombuffer(data, "<i2").reshape(CROP_SHAPE)

    @cached_property
    def chunks(self) -> Any:
        """The zarr twin, crop by crop: `chunks.read(row, out)`."""
        from data_tools.zarr_reader import Chunks

        return Chunks(self.root, len(self))

    @cached_property
    def store(self) -> Any:
        """The zarr twin as zarr-python reads it."""
        return open_store(self.root, "r")


def misshapen(meta: dict[str, Any]) -> str | None:
    """The first thing that readers build upon and that is not as they expect it."""

    def has(facts: Any, **kinds: type) -> bool:
        return isinstance(facts, dict) and all(type(facts.get(name)) is kind for name, kind in kinds.items())

    def is_shard(facts: Any) -> bool:
        """Name and sum become names of files: nothing else may be in them."""
        return (
            has(facts, name=str, crops=int, bytes=int, sha256=str)
            and bool(_SHARD.fullmatch(facts["name"]) and _SHA256.fullmatch(facts["sha256"]))
            and min(facts["crops"], facts["bytes"]) >= 0
        )

    def is_source(facts: Any) -> bool:
        return has(facts, name=str, licence=str, records=dict, crops=int, dropped_s=float) and has(
            facts["records"], seen=int, used=int, refused=int
        )

    def are_names(names: Any) -> bool:
        return isinstance(names, list) and all(isinstance(name, str) for name in names)

    shards, sources, whose = meta.get("shards"), meta.get("sources", []), meta.get("role_sources", {})
    share = meta.get("id_share", 1)
    right = {
        "crops": has(meta, crops=int),
        "samples": has(meta.get("samples"), bytes=int, sha256=str),
        "rejects": "rejects" not in meta or has(meta["rejects"], bytes=int, sha256=str),  # not in the first datasets
        "shards": isinstance(shards, list) and all(map(is_shard, shards)),
        "formats": meta.get("formats") in ((["tar"], ["tar", "zarr"]) if shards else (["zarr"],)),
        "seed": isinstance(meta.get("seed", 0), int),
        "plan": meta.get("plan", "all") in PLANS,
        "id_share": isinstance(share, int | float) and 0 <= share <= 1,
        "role_sources": isinstance(whose, dict) and whose.keys() <= ROLES and all(map(are_names, whose.values())),
        "roles": isinstance(meta.get("roles", {}), dict),
        "sources": isinstance(sources, list) and all(map(is_source, sources)),
    }
    return next((name for name, holds in right.items() if not holds), None)


def open_store(root: Folder, mode: str) -> Any:
    import zarr

    try:
        options = {"anon": True} if getattr(root, "anonymous", False) else None
        return zarr.open_array(f"{root.url}/{STORE}", mode=mode, storage_options=options)
    except (FileNotFoundError, LookupError, TypeError, ValueError, AttributeError) as error:  # all of a damaged zarr.json
        raise DatasetError(one_line(f"{root.url}/{STORE}: {error}")) from None


def fingerprint(meta: dict[str, Any]) -> str:
    """Of everything that dataset.json says, which names every shard and table by its sha256."""
    rest = {name: value for name, value in meta.items() if name != "fingerprint"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def waveform(crop: np.ndarray) -> tuple[int, int]:
    """(crc32c of the crop, its waveform hash). One and a half passes at memory speed."""
    limb, chest = crop[: len(LEADS) // 2], crop[len(LEADS) // 2 :]
    first = google_crc32c.value(limb)
    return google_crc32c.extend(first, chest), first << 32 | google_crc32c.value(chest)
