"""A dataset on disk or in a bucket, and its crops.

`Dataset.open` reads only dataset.json. Columns are read on demand; crops are read by offset and
checked against their crc32c.

    dataset = Dataset.open("DATASET")
    ecg = dataset[0]    # an Ecg with ecg.signal_mv, ecg.record, ecg.age, ecg.labels
    dataset.torch("pretrain")    # for other programs, by role; also webdataset, zarr
"""

import hashlib
import json
import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import ValidationError

from ..ecg.constants import (
    CROP_BYTES,
    CROP_SHAPE,
    LEADS,
    PUBLIC_LICENCES,
    PUBLIC_PATIENTS,
    SYNTHETIC,
)
from ..ecg.pseudonyms import key_fingerprint
from ..io.errors import (
    MISSING_FILE,
    ChunkError,
    DatasetError,
    ReadError,
    naming_arguments_in_errors,
    one_line,
)
from ..io.storage import Folder, dataset_folder
from .facts import (
    CLASSES,
    COLUMN_RANGES,
    COLUMNS,
    FORMAT_MINOR,
    FORMAT_VERSION,
    MAX_META_BYTES,
    META,
    NAME_KEY,
    NULLABLE_COLUMNS,
    ROLE_WORDS,
    SAMPLES,
    STORE,
    DatasetFacts,
    ShardFacts,
    fingerprint,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CACHED_ROW_GROUPS = 4  # row groups of samples.parquet that stay in memory; one has 65,536 crops


@dataclass(frozen=True, eq=False)
class Ecg:
    """One crop of 10 s. If `halves` is 1, only its first 5 s are a recording, and the rest is zero."""

    row: int
    # int16 [12, 5000], leads in the order of data_tools.ecg.constants.LEADS
    signal_uv: np.ndarray = field(repr=False)
    source: str
    record: str
    patient: str | None
    start_s: float
    halves: int
    missing_leads: list[str]  # leads that were not measured: their samples are zero
    flags: list[str]
    pretrain: bool
    dx_role: str | None
    id_role: str | None
    dx: list[str]  # SNOMED codes
    labels: list[str]  # names from CLASSES
    age: float | None
    sex: str | None
    fs_source_hz: float

    @property
    def signal_mv(self) -> np.ndarray:
        return self.signal_uv.astype(np.float32) / 1000

    def plot(self) -> "Figure":
        """Draws the crop's twelve leads on ECG paper, to scale."""
        from ..ecg.paper import ecg_figure, patient_caption, rate_and_axis_text

        title = f"{self.source}/{self.record}, from {self.start_s:g} s"
        caption = patient_caption(self.age, self.sex, self.dx)
        caption = (
            f"{rate_and_axis_text(self.signal_uv, self.halves, self.missing_leads)}. {caption}"
        )
        if self.flags:  # flags come first, because the end of a long caption is cut off
            caption = f"flagged: {', '.join(self.flags)}. {caption}"
        return ecg_figure(self.signal_uv, self.halves, title, caption, self.missing_leads)

    def _repr_png_(self) -> bytes:
        """Returns the figure that `plot` draws, as the PNG that a notebook shows."""
        from ..ecg.paper import png_bytes

        return png_bytes(self.plot())


@dataclass(frozen=True)
class Dataset:
    """A sequence of `Ecg`, one per crop."""

    root: Folder
    meta: dict[str, Any]  # all contents of dataset.json; `facts` has what readers rely on

    @classmethod
    @naming_arguments_in_errors()
    def open(cls, url: str, anonymous: bool = False) -> Self:
        return cls.of_folder(dataset_folder(url, anonymous))

    @classmethod
    def of_folder(cls, root: Folder, earlier_format: bool = False) -> Self:
        """Opens a dataset in a folder. With `earlier_format`, also opens a dataset of an earlier omnilead,
        which stored crops and columns in the same places as this version."""
        dataset = cls(root, _read_meta(root))
        if dataset.format_minor < FORMAT_MINOR and not earlier_format:
            raise DatasetError(
                f"{root.url}: made by an earlier omnilead, in format 1.{dataset.format_minor}, while this one reads "
                f"1.{FORMAT_MINOR}: convert it with omnilead shard {root.url} --out NEW"
            )
        return dataset

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self.root, self.meta)  # cached values are not pickled

    def __hash__(self) -> int:
        return hash((self.root.url, self.fingerprint))

    def __len__(self) -> int:
        return self.facts.crops

    def __repr__(self) -> str:
        records = sum(source.records["used"] for source in self.facts.sources)
        formats = " and ".join(self.facts.formats)
        return (
            f"Dataset({self.root.url!r}: {len(self):,} crops of {records:,} records, {formats}, "
            f"{self.fingerprint[:8]})"
        )

    def __getitem__(self, row: int) -> Ecg:
        row = operator.index(row)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row}: {self.root.url} has crops 0 to {len(self) - 1}")
        row %= len(self)
        group = int(np.searchsorted(self._group_begins, row, side="right")) - 1
        facts = self._read_row_group(group).slice(row - self._group_begins[group], 1).to_pylist()[0]
        facts["labels"] = label_names(facts["labels"])
        return Ecg(row, self.read(row), **facts)

    def __iter__(self) -> Iterator[Ecg]:
        return map(self.__getitem__, range(len(self)))

    @cached_property
    def facts(self) -> DatasetFacts:
        return DatasetFacts.model_validate(self.meta)

    @property
    def fingerprint(self) -> str:
        return self.facts.fingerprint

    @property
    def preprocessing_sha256(self) -> str:
        return self.facts.preprocessing_sha256

    @property
    def format_minor(self) -> int:
        """The minor version of the dataset's format."""
        return self.facts.format_minor

    @property
    def shards(self) -> list[ShardFacts]:
        return self.facts.shards

    @property
    def synthetic_crops(self) -> int:
        crops = 0
        for source in self.facts.sources:
            if source.name.startswith(SYNTHETIC):
                crops += source.crops
        return crops

    @cached_property
    def public_sources(self) -> set[str]:
        """Returns the sources whose record names are public: published archives, which are recognised by
        name and licence, and synthetic archives."""
        public = set()
        for source in self.facts.sources:
            name = source.name
            published = PUBLIC_LICENCES.get(name.removeprefix(SYNTHETIC))
            if published and (name.startswith(SYNTHETIC) or source.licence == published):
                public.add(name)
        return public

    def public_name_mask(self, part: pa.RecordBatch) -> np.ndarray:
        """Returns a mask of the rows in `part` whose patient id is public or, if the patient is unknown,
        whose record name is public. Patient ids are private if the archive publishes none, because they
        come from a user's table."""
        name_patients = [
            name for name in self.public_sources if name.removeprefix(SYNTHETIC) in PUBLIC_PATIENTS
        ]
        is_known = pc.fill_null(pc.not_equal(part["patient"], ""), False)
        of_patients = pc.is_in(part["source"], pa.array(name_patients, pa.string()))
        of_records = pc.is_in(part["source"], pa.array(sorted(self.public_sources), pa.string()))
        return np.asarray(pc.if_else(is_known, of_patients, of_records))

    @cached_property
    def name_key(self) -> bytes | None:
        """Returns the secret key with which models hash the names that they store; None if all names are
        public.

        If this dataset was made from another one, the metadata of samples.parquet holds the other
        dataset's key. Otherwise the key is a hash of samples.parquet and of the shards' entries in
        dataset.json, so that the same archives give the same key."""
        with self._arrow_errors():
            stated = self._samples.fragments[0].physical_schema.metadata or {}
        if NAME_KEY in stated:
            return bytes(stated[NAME_KEY][:64])  # BLAKE2b takes at most 64 bytes as a key
        sources = {source.name for source in self.facts.sources}
        owners = self.row_batches(["source", "patient"])
        if (
            sources
            and sources <= self.public_sources
            and all(self.public_name_mask(part).all() for part in owners)
        ):
            return None
        key = blake2b(self._samples_bytes, key=NAME_KEY, digest_size=32)
        key.update(json.dumps(self.meta["shards"]).encode())
        return key.hexdigest().encode()

    @property
    def name_mark(self) -> str | None:
        """Returns a text that identifies a secret key without disclosing it: the key of the dataset's
        pseudonyms or, in a dataset without pseudonyms, name_key. Returns None if there is neither key."""
        return self.facts.pseudonyms or key_fingerprint(self.name_key)

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Returns the rows of samples.parquet in shard order. Local files are memory-mapped; only the given
        columns are decoded."""
        with self._arrow_errors():
            table = self._samples.read(columns)
        self._check(table)
        if "shard" in table.column_names and self.shards:
            counts = [shard.crops for shard in self.shards]
            numbers = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
            if not np.array_equal(table["shard"], numbers):
                raise self._samples_error(f"the column shard does not match the shards in {META}")
        return table

    def _check(self, table: pa.Table | pa.RecordBatch) -> None:
        """Raises a DatasetError if a column has values that version 1 does not allow. Anybody may
        have written the file."""
        for name in table.column_names:
            column = table[name]
            if name not in NULLABLE_COLUMNS and column.null_count:
                raise self._samples_error(f"{name} is missing in some rows")
            try:
                column.validate(full=True)
            except pa.ArrowInvalid:
                raise self._samples_error(f"{name} has text that is not UTF-8") from None
            if pa.types.is_nested(column.type) and pc.list_flatten(column).null_count:
                raise self._samples_error(f"{name} has a list with a missing value")
            if name in COLUMN_RANGES:
                low, high = COLUMN_RANGES[name]
                values = column.to_numpy()
                if not ((values >= low) & (values <= high)).all():
                    raise self._samples_error(
                        f"{name} has values that are not from {low:g} to {high:g}"
                    )
            if name in ROLE_WORDS and not set(column.drop_null().unique().to_pylist()) <= set(
                ROLE_WORDS[name]
            ):
                raise self._samples_error(
                    f"{name} has values other than {', '.join(ROLE_WORDS[name])}"
                )

    def _samples_error(self, why: str) -> DatasetError:
        return DatasetError(f"{self.root.url}/{SAMPLES}: {why}: build the dataset again")

    @property
    def stored_columns(self) -> list[str]:
        """The columns that samples.parquet has, which may differ from the columns of this version."""
        with self._arrow_errors():
            return list(self._samples.fragments[0].physical_schema.names)

    def row_batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of samples.parquet in batches, which need less memory than the whole `table`."""
        with self._arrow_errors():
            for group in self._samples.fragments[0].split_by_row_group():
                for batch in group.to_table(COLUMNS, list(columns)).to_batches():
                    self._check(batch)
                    yield batch

    @cached_property
    def _group_begins(self) -> np.ndarray:
        """Returns the number of the first row of each row group of samples.parquet."""
        with self._arrow_errors():
            return np.cumsum(
                [0, *(group.num_rows for group in self._samples.fragments[0].row_groups[:-1])]
            )

    @cached_property
    def _read_row_group(self) -> Any:
        columns = [name for name in COLUMNS.names if name in Ecg.__annotations__]
        fragment = self._samples.fragments[0]

        @lru_cache(CACHED_ROW_GROUPS)
        def read(group: int) -> pa.Table:
            with self._arrow_errors():
                table = fragment.subset(row_group_ids=[group]).to_table(COLUMNS, columns)
            self._check(table)
            return table

        return read

    @cached_property
    def _samples(self) -> pq.ParquetDataset:
        source = pa.BufferReader(self._samples_bytes)
        return pq.ParquetDataset(source, memory_map=True, schema=COLUMNS)

    @cached_property
    def _samples_bytes(self) -> pa.Buffer:
        """Returns the contents of samples.parquet after checking their sha256, because parquet itself
        misses some flipped bits. The contents of a remote file stay in memory."""
        facts = self.facts.samples
        if self.root.remote:
            data = pa.py_buffer(self.root.read(SAMPLES, facts.bytes))
        else:
            data = pa.memory_map(f"{self.root.url}/{SAMPLES}").read_buffer()
        if hashlib.sha256(data).hexdigest() != facts.sha256:
            raise DatasetError(f"{self.root.url}/{SAMPLES}: fails its sha256: restore the file")
        self._check_columns(pq.read_metadata(pa.BufferReader(data)))
        return data

    def _check_columns(self, facts: pq.FileMetaData) -> None:
        """Raises a DatasetError if the number of rows or the type of a column is wrong."""
        file = f"{self.root.url}/{SAMPLES}"
        if facts.num_rows != len(self):
            raise DatasetError(
                f"{file}: {facts.num_rows} rows, {len(self)} expected: restore the file"
            )
        for column in facts.schema.to_arrow_schema():
            index = COLUMNS.get_field_index(column.name)
            if index >= 0 and column.type != COLUMNS.field(index).type:
                raise DatasetError(
                    f"{file}: {column.name} is {column.type}, not {COLUMNS.field(index).type}: restore the file"
                )

    @contextmanager
    def _arrow_errors(self) -> Iterator[None]:
        try:
            yield
        except pa.ArrowMemoryError:
            raise
        except (OSError, pa.ArrowException, ReadError) as error:
            why = "missing" if isinstance(error, FileNotFoundError) else error
            file = f"{self.root.url}/{SAMPLES}"
            raise DatasetError(one_line(f"{file}: {why}: restore the file")) from None

    def column(self, name: str) -> np.ndarray:
        values: np.ndarray = self.table([name])[name].to_numpy()
        return values

    @property
    def labels(self) -> np.ndarray:
        """Returns bool [crops, 26]: True where the record of a crop has a diagnosis of CLASSES."""
        column = self.table(["labels"])["labels"].combine_chunks().flatten()
        values: np.ndarray = column.to_numpy(zero_copy_only=False)
        return values.reshape(len(self), len(CLASSES))

    @cached_property
    def addresses(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (shards, offsets, crc32c) of all crops, which take 16 bytes of memory per crop."""
        table = self.table(["shard", "offset", "crc32c"])
        return tuple(table[name].to_numpy() for name in ("shard", "offset", "crc32c"))

    def select(
        self, pretrain: bool | None = None, dx: str | None = None, identity: str | None = None
    ) -> np.ndarray:
        """Returns the row numbers of the crops that have all of the given roles: select(dx="test"),
        select(pretrain=True), select(identity="gallery")."""
        keep = np.ones(len(self), bool)
        for name, role in (("pretrain", pretrain), ("dx_role", dx), ("id_role", identity)):
            if role is not None:
                keep &= self.column(name) == role
        return np.flatnonzero(keep)

    def read(self, row: int, check: bool = True) -> np.ndarray:
        """Returns the crop of a row, int16 [12, 5000] in microvolts. With `check`, checks its crc32c."""
        row = range(len(self))[row]
        shard, offset, crc = (int(column[row]) for column in self.addresses)
        return self.read_at(row, shard, offset, crc if check else None)

    def read_at(self, row: int, shard: int, offset: int, crc: int | None) -> np.ndarray:
        """Returns the crop of a row whose shard and offset are known. Its crc32c must be `crc`, unless
        `crc` is None."""
        name = STORE if shard < 0 else f"shards/{self.shards[shard].name}"
        try:
            if shard < 0:
                crop = np.empty(CROP_SHAPE, "<i2")
                self.chunks.read(row, crop)
                data = crop.tobytes()
            else:
                data = self.root.read_range(name, offset, CROP_BYTES)
        except (OSError, ValueError, ChunkError) as error:
            raise DatasetError(
                one_line(f"{self.root.url}/{name}: crop {row}: {error}: restore the file")
            ) from None
        if crc not in (None, google_crc32c.value(data)):
            raise DatasetError(
                f"{self.root.url}/{name}: crop {row} at byte {offset} fails its crc32c: restore "
                "the file"
            )
        return np.frombuffer(data, "<i2").reshape(CROP_SHAPE)

    def torch(self, role: str, labels: str | Sequence[str] | None = None) -> Any:
        """Returns the crops of a role as a map-style dataset of (x, y) for PyTorch.

        x is float32 [12, 5000] in millivolts. y holds `labels`: names of labels of the dataset, or
        a CSV or parquet table of labels. Without `labels`, y is the crop's row."""
        from .other_programs import Crops

        return Crops(self, role, labels)

    def webdataset(self, role: str, **options: Any) -> Any:
        """Returns the crops of a role as a webdataset.WebDataset, to which `options` are passed."""
        from .other_programs import web_dataset

        return web_dataset(self, role, options)

    def keys(self, role: str) -> set[str]:
        """Returns the keys that a role's crops have in the shards: source-record-NNN."""
        from .other_programs import sample_keys

        return sample_keys(self, role)

    def zarr(self) -> Any:
        """Returns all crops as a zarr.Array. The row numbers that `select` returns are rows of this array."""
        from .other_programs import zarr_array

        return zarr_array(self, STORE)

    def features(self) -> Any:
        """Returns the datasets.Features of the shards, for Hugging Face's load_dataset."""
        from .other_programs import hugging_face_features

        return hugging_face_features(COLUMNS)

    @cached_property
    def chunks(self) -> Any:
        """The reader of the zarr copy: `chunks.read(row, out)` reads one crop into `out`."""
        from .zarr_reader import Chunks

        return Chunks(self.root, STORE, len(self))


def _read_meta(root: Folder) -> dict[str, Any]:
    """Returns the contents of dataset.json. Raises a DatasetError if they are not valid in version 1."""
    url = root.url
    try:
        meta = json.loads(root.read(META, MAX_META_BYTES))
        # Raises a ValueError for half of a surrogate pair, which JSON allows but UTF-8 cannot encode
        json.dumps(meta, ensure_ascii=False).encode()
    except ReadError as error:
        why = str(error)
        if error.reason == MISSING_FILE:
            why = (
                f"no {META} (not a dataset, or an unfinished one: `omnilead shard SRC --out "
                "DATASET` makes or finishes it)"
            )
            if not root.remote and not os.path.exists(url):
                why = (
                    "does not exist: give a dataset's folder (`omnilead shard SRC --out "
                    "DATASET` makes one)"
                )
        raise DatasetError(f"{url}: {why}") from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(
            one_line(f"{url}/{META}: not JSON ({error}): restore the file")
        ) from None
    version = meta.get("format_version") if isinstance(meta, dict) else None
    if version != FORMAT_VERSION:
        raise DatasetError(
            f"{url}: format version {version}, this program reads {FORMAT_VERSION}: use a "
            "matching version of omnilead"
        )
    if meta.get("fingerprint") != fingerprint(meta):
        raise DatasetError(
            f"{url}/{META}: the fingerprint does not match the contents (edited by hand?): "
            "restore the file"
        )
    try:
        facts = DatasetFacts.model_validate(meta)
    except ValidationError as error:
        wrong = error.errors()[0]["loc"][0]
        raise DatasetError(
            f"{url}/{META}: the entry {wrong} is not valid in version {FORMAT_VERSION}: restore the file"
        ) from None
    names = {shard.name for shard in facts.shards}
    stored = len(facts.shards), sum(shard.crops for shard in facts.shards)
    if stored != (len(names), facts.crops if names else 0) or ("tar" in facts.formats) != bool(
        names
    ):
        found = (
            f"{stored[0]} shards with {stored[1]} crops, {facts.crops} crops in all, "
            f"formats {facts.formats}"
        )
        raise DatasetError(
            f"{url}/{META}: its entries contradict each other ({found}): restore the file"
        )
    return dict(meta)


def flag_mask(table: pa.Table, names: Sequence[str]) -> np.ndarray:
    """Returns a mask of the rows of samples.parquet that have one of these flags. The name `flat`
    stands for flat:I, flat:II and so on."""
    flags = table["flags"].combine_chunks()
    has_flag = np.zeros(len(table), bool)
    rows = np.asarray(pc.list_parent_indices(flags))
    kinds = pc.replace_substring_regex(pc.list_flatten(flags), ":.*", "")
    has_flag[rows[np.asarray(pc.is_in(kinds, pa.array(names, pa.string())))]] = True
    return has_flag


def label_names(labels: list[bool]) -> list[str]:
    return [name for name, has in zip(CLASSES, labels, strict=True) if has]


def crc_and_waveform_hash(crop: np.ndarray) -> tuple[int, int]:
    """Returns (crc32c of the crop, its waveform hash)."""
    limb, chest = crop[: len(LEADS) // 2], crop[len(LEADS) // 2 :]
    first = google_crc32c.value(limb)
    return google_crc32c.extend(first, chest), first << 32 | google_crc32c.value(chest)
