"""Reads ECGs for a trained model: crops of a dataset, or records of archives, files and arrays, in
parts of equal batches.

    opened = open_data(EcgOptions(("DATASET",)), model.input)
    for batch in opened.source().read_batches([0, 2], progress):    # CropBatch, of these parts
        ...

A part is always the same BATCHES_PER_PART batches, so results do not depend on where a run was
interrupted. Records from files are prepared by the dataset builder's own code.
"""

import hashlib
import json
import sys
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm.auto import tqdm

from omnilead.data_tools.dataset import META, Dataset, crc_and_waveform_hash
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.ecg.mean_beat import HeartRates
from omnilead.data_tools.io.npz import ArrayError, npz_array, npz_names, open_npy
from omnilead.data_tools.io.storage import prefetch
from omnilead.data_tools.io.terminal import tell
from omnilead.data_tools.sources.detect import (
    AbsentKey,
    DataError,
    PreparedRecord,
    ReadError,
    Source,
    UnknownArchive,
    key_fingerprint,
    missing_note,
    open_sources,
    prepare_record,
    pseudonymize_record,
    read_key,
)
from omnilead.data_tools.sources.hospital_files import HOSPITAL_ENDINGS, HospitalFiles
from omnilead.engine.data.batches import CropBatch, dataset_batches
from omnilead.engine.model.input import Input, SignalError
from omnilead.engine.settings.errors import ConfigError, Flag
from omnilead.engine.settings.files import ARRAY_SUFFIXES
from omnilead.engine.settings.launcher import launched_rank
from omnilead.engine.settings.leads import ALL_LEADS, leads_in_order

from ..tasks.kinds import Array
from .trained_model import cut_crops

Per = Literal["crop", "record", "half", "first"]
BATCHES_PER_PART = 16
# Only so many skipped files are printed, because a folder may have 100,000 files that are no ECGs
SKIPS_SHOWN = 5
# (number of the record, the record, index of the crop in it)
RecordCrop = tuple[int, PreparedRecord, int]
# The column with the flags of a crop, as in a dataset, such as einthoven,implausible; null if there
# are none
FLAGS_COLUMN = "flags"
# The column of predictions with the file that an ECG came from; null if it came from a dataset, or
# if names are replaced by pseudonyms
PATH_COLUMN = "path"
CROP_COLUMNS = {
    "source": pa.string(),
    "record": pa.string(),
    "patient": pa.string(),
    "row": pa.int64(),
    "start_s": pa.float64(),
    FLAGS_COLUMN: pa.string(),
}


class Skipped(NamedTuple):
    """An ECG that is left out, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class EcgOptions:
    """Options that say which ECGs to read, and how to read them."""

    data: tuple[str, ...]  # one dataset; or folders, records, arrays and hospital files
    per: Per = "crop"
    leads: str | None = None  # leads shown to the model; for arrays, also the names of the rows
    fs_hz: float | None = None  # sampling rate of arrays
    unit: str = ""  # unit of arrays; "": mV
    batch: int = 0  # crops encoded at a time; 0: 16 on a CPU, 256 on a GPU
    workers: int = 0  # number of reading threads; 0: all cores with a GPU, else a quarter of them
    # What to do with unreadable data. "auto": skip them in a folder, stop elsewhere
    on_corrupt: Literal["auto", "stop", "skip"] = "auto"
    anonymous: bool = False  # whether to read public s3:// data without credentials
    pseudonymize: str | None = None  # path of a key file, by which names become pseudonyms
    # Whether batches are in pinned memory, from which a GPU copies without waiting
    pin: bool = False
    # Counts the ECGs that are left out
    skip_numbers: Iterator[int] = field(default_factory=count, compare=False)

    def skips_unreadable(self, of_folder: bool = False) -> bool:
        """Returns True if unreadable data are left out, False if they are an error. `of_folder`:
        the data are in a folder that the user named, not in a file that the user named."""
        return self.on_corrupt == "skip" or (self.on_corrupt == "auto" and of_folder)


class CropFacts(NamedTuple):
    """Facts about the crops of one batch, which stand in CropBatch.crops."""

    part: int
    table: pa.Table  # the columns CROP_COLUMNS and PATH_COLUMN, with a row for each crop
    record_B: Array  # the number of each crop's record, ascending
    missing_BL: Array | None = None  # True for leads that the model uses but does not get


class WaveformHashes(NamedTuple):
    """For each crop, the number of its ECG and the hash of its waveform, as in a dataset."""

    ecg_N: Array
    waveform_N: Array


def _record_numbers(table: pa.Table) -> Array:
    """Returns the number of the record of each row. Records are numbered in the order in which they
    first occur."""
    names = pc.binary_join_element_wise(table["source"], table["record"], "\t")
    numbers: Array = names.combine_chunks().dictionary_encode().indices.to_numpy()
    return numbers


class DatasetSource:
    """Reads the crops of a dataset. Every source has these members: `parts`, the number of parts;
    `count_units`, the number of crops or records in some parts; `read_batches`, which calls
    `progress` with the number of units read; `skipped`, the ECGs that were left out of each part
    that was read; `left_out`, the ECGs that are in no part; `rates_hz`, the recording rates;
    `heart_rates` of the ECGs that were read; and `waveform_hashes`."""

    unit = " crops"
    # Always empty, because `dataset_batches` skips single crops itself
    skipped: Mapping[int, list[Skipped]] = {}

    def __init__(
        self,
        dataset: Dataset,
        rows: Array,
        batch: int,
        per: Per,
        left_out: Sequence[Skipped] = (),
        **reading: Any,
    ) -> None:
        """`rows`: the crops to read, in this order or, with per="record", sorted by record.
        `reading`: further arguments of dataset_batches."""
        self.dataset, self.batch, self.reading = dataset, batch, reading
        self.left_out = left_out
        self.heart_rates = HeartRates()
        table = dataset.table([name for name in CROP_COLUMNS if name != "row"])
        flags = pc.binary_join(table[FLAGS_COLUMN], ",")
        flags = pc.if_else(pc.equal(flags, ""), pa.scalar(None, pa.string()), flags)
        table = table.set_column(table.column_names.index(FLAGS_COLUMN), FLAGS_COLUMN, flags)
        table = table.append_column("row", pa.array(np.arange(len(dataset))))
        self.table = table.append_column(PATH_COLUMN, pa.nulls(len(dataset), pa.string()))
        self.record = np.arange(len(rows))
        if per == "record":
            rows, self.record = self._sorted_rows_and_records(rows)
        # A part begins where a record begins, so that no record is split between parts
        first = np.flatnonzero(np.diff(self.record, prepend=-1))
        wanted = np.arange(0, len(rows), batch * BATCHES_PER_PART)
        begins = first[np.searchsorted(first, wanted, side="right") - 1]
        self.rows = rows
        self.begins = np.append(np.unique(begins), len(rows))
        self.parts = len(self.begins) - 1

    @property
    def rates_hz(self) -> set[float]:
        return set(np.unique(self.dataset.column("fs_source_hz")[self.rows]).tolist())

    @property
    def waveform_hashes(self) -> WaveformHashes:
        waveform_N = self.dataset.column("waveform")[self.rows]
        return WaveformHashes(_record_numbers(self.table)[self.rows], waveform_N)

    def _sorted_rows_and_records(self, rows: Array) -> tuple[Array, Array]:
        """Returns the rows sorted by record, and the number of the record of each row."""
        order = [(name, "ascending") for name in ("source", "record", "start_s")]
        table = self.table.take(rows).sort_by(order)
        numbers = _record_numbers(table)
        return table["row"].to_numpy(), np.cumsum(np.diff(numbers, prepend=0) != 0)

    def count_units(self, parts: Iterable[int]) -> int:
        return sum(int(self.begins[part + 1] - self.begins[part]) for part in parts)

    def read_batches(
        self, parts: Sequence[int], progress: Callable[[int], Any]
    ) -> Generator[CropBatch, None, None]:
        rows: list[Array] = []
        for part in parts:
            rows_of_part = self.rows[self.begins[part] : self.begins[part + 1]]
            rows += np.split(rows_of_part, range(self.batch, len(rows_of_part), self.batch))
        position = np.empty(len(self.dataset), np.int64)
        position[self.rows] = np.arange(len(self.rows))
        for batch in dataset_batches(self.dataset, rows, **self.reading):
            at_B = position[batch.crops]
            part = int(np.searchsorted(self.begins, at_B[0], side="right")) - 1
            table = self.table.take(batch.crops)
            sources, starts_s = table["source"].to_pylist(), table["start_s"].to_pylist()
            for uv_LT, source, start_s in zip(batch.uv_BLT, sources, starts_s, strict=True):
                if not start_s:
                    self.heart_rates.add(source, np.asarray(uv_LT))
            yield batch._replace(crops=CropFacts(part, table, self.record[at_B]))
            progress(len(at_B))


class RecordSource:
    """Reads records by their number. `read` is called from several threads. It returns a record as
    a data_tools.sources.base.PreparedRecord, or a Skipped that says why it is left out. `paths`: the
    file of each record, or None."""

    unit = " records"
    left_out: Sequence[Skipped] = ()

    def __init__(
        self,
        paths: Sequence[str | None],
        read: Callable[[int], PreparedRecord | Skipped],
        batch: int,
        workers: int,
    ) -> None:
        self.paths, self.read, self.batch, self.workers = paths, read, batch, workers
        self.parts = -(-len(paths) // (batch * BATCHES_PER_PART))
        self.skipped: dict[int, list[Skipped]] = {}
        self.rates_hz: set[float] = set()  # recording rates of the ECGs read so far
        self.heart_rates = HeartRates()
        # For each crop, two numbers: the number of its ECG, and the hash of its waveform
        self.crops_read = array("Q")

    @property
    def waveform_hashes(self) -> WaveformHashes:
        """Returns the hashes of the waveforms of the crops that were read so far."""
        crops = np.array(self.crops_read, np.uint64).reshape(-1, 2)
        return WaveformHashes(crops[:, 0], crops[:, 1])

    def _record_range(self, part: int) -> range:
        """Returns the numbers of the records in a part."""
        size = self.batch * BATCHES_PER_PART
        return range(len(self.paths))[part * size : (part + 1) * size]

    def count_units(self, parts: Iterable[int]) -> int:
        return sum(len(self._record_range(part)) for part in parts)

    def read_batches(
        self, parts: Sequence[int], progress: Callable[[int], Any]
    ) -> Generator[CropBatch, None, None]:
        numbers = (number for part in parts for number in self._record_range(part))
        with closing(prefetch(self.read, numbers, self.workers)) as records:
            for part in parts:
                crops = self._read_crops(part, records, progress)
                while chunk := list(islice(crops, self.batch)):
                    yield _make_batch(part, chunk, self.paths)

    def _read_crops(
        self, part: int, records: Iterator[PreparedRecord | Skipped], progress: Callable[[int], Any]
    ) -> Iterator[RecordCrop]:
        """Yields the crops of a part. Notes what is skipped, and the recording rates, heart rates
        and waveform hashes of the others."""
        self.skipped[part] = []
        for number, record in zip(self._record_range(part), records, strict=False):
            progress(1)
            if isinstance(record, Skipped):
                self.skipped[part].append(record)
                continue
            self.rates_hz.add(record.fs_hz)
            self.heart_rates.add(record.source, record.crops_uv[0])
            for crop_uv in record.crops_uv:
                self.crops_read.extend((number, crc_and_waveform_hash(crop_uv)[1]))
            for crop in range(len(record.halves)):
                yield number, record, crop


def _make_batch(part: int, crops: Sequence[RecordCrop], paths: Sequence[str | None]) -> CropBatch:
    rows = []
    for number, ecg, crop in crops:
        flags, path = ",".join(ecg.flags[crop]) or None, paths[number]
        rows.append(
            ecg._asdict() | {"start_s": ecg.start_s[crop], FLAGS_COLUMN: flags, PATH_COLUMN: path}
        )
    # Records have no key `row`, the row of a dataset, so that column becomes null
    table = pa.Table.from_pylist(rows, schema=pa.schema({**CROP_COLUMNS, PATH_COLUMN: pa.string()}))
    uv_BLT = np.stack([ecg.crops_uv[crop] for _, ecg, crop in crops])
    halves_B = np.array([ecg.halves[crop] for _, ecg, crop in crops])
    record_B = np.array([number for number, _, _ in crops])
    return CropBatch(uv_BLT, halves_B, CropFacts(part, table, record_B))


CropSource = DatasetSource | RecordSource


class OpenedData(NamedTuple):
    """The ECGs that the options name, ready to be read."""

    # Facts, fit for JSON, that tell these ECGs, and how they are read, from others
    identity: dict[str, Any]
    source: Callable[[], CropSource]
    private: str = ""  # names what in the table can identify patients; "" if nothing does


def open_data(options: EcgOptions, model_input: Input) -> OpenedData:
    """Finds the ECGs that the options name. Returns them unread."""
    dataset = find_dataset(options)
    if dataset is not None:
        rows = np.arange(len(dataset))
        return OpenedData(
            {"data": dataset.fingerprint},
            partial(dataset_source, dataset, rows, model_input, options),
        )
    key = read_key(options.pseudonymize) if options.pseudonymize else None
    records = list(records_to_read(options, model_input))
    # The digest includes the key, so that only its owner can guess names and compare digests
    digest = hashlib.sha256(key or b"")
    for record in records:
        digest.update(json.dumps([record.name, record.stamp.decode()]).encode())
    identity = {"data": digest.hexdigest(), "fs_hz": options.fs_hz, "unit": options.unit}
    if key:
        identity["pseudonyms"] = key_fingerprint(key)
    private = "" if key else next((record.private for record in records if record.private), "")
    return OpenedData(identity, partial(record_source, records, key, model_input, options), private)


def find_dataset(options: EcgOptions) -> Dataset | None:
    """Opens the dataset that `data` names; None if `data` names files or folders of files."""
    for url in options.data:
        remote = "://" in url
        if not remote and not Path(url, META).is_file():
            continue
        try:
            dataset = Dataset.open(url, options.anonymous)
        except DataError:
            if remote:  # a remote folder that is no dataset may be an archive of records
                continue
            raise
        if len(options.data) > 1:
            raise ConfigError(
                Flag("--data"),
                f" {' '.join(options.data)}: give either one dataset, or files without a dataset",
            )
        if options.pseudonymize:
            raise ConfigError(
                Flag("--pseudonymize"),
                f" {options.pseudonymize}: the names in a dataset cannot be replaced: give the key to "
                "`omnilead shard` when the dataset is made",
            )
        return dataset
    return None


def skip_or_stop(
    options: EcgOptions, name: str, reason: object, of_folder: bool = False
) -> Skipped:
    """Returns a Skipped for an ECG that cannot be read. Prints a line for each of the first
    SKIPS_SHOWN. DataError if the options say to stop."""
    if options.pseudonymize and isinstance(reason, ReadError):
        # The name of a record, and details of the error, may identify the patient
        name, reason = "a record", reason.reason
    if not options.skips_unreadable(of_folder):
        raise DataError(
            f"{name}: ",
            reason,
            ": fix it, or leave it out (embed, predict: ",
            Flag("--on-corrupt"),
            " skip)",
        )
    # Several threads may skip records at a time, but no two get the same number: `next` is atomic
    # here
    number = next(options.skip_numbers)
    line = f"skipped: {name}: {reason}"
    if number == SKIPS_SHOWN:
        line = "skipped: more, which are only counted"
    if number <= SKIPS_SHOWN:
        # The line is printed above a progress bar
        with tqdm.external_write_mode(file=sys.stderr):
            tell(line)
    return Skipped(name, str(reason))


def dataset_source(
    dataset: Dataset, rows: Array, model_input: Input, options: EcgOptions
) -> DatasetSource:
    """Returns a source of the dataset's crops, without those that have none of the model's leads or
    are shorter than its window. A record that loses all its crops counts as unreadable."""
    url = dataset.root.url
    if dataset.root.remote and options.per == "record":
        raise ConfigError(
            Flag("--per"),
            f" record: {url} is remote, so its crops are read shard by shard, not by record: use crop or "
            "half",
        )
    blank = ~model_input.usable_crops(dataset)[rows]
    if blank.all():
        raise ConfigError(
            Flag("--data"),
            f" {url}: {model_input.unusable_crops_text}: choose other ",
            Flag("--leads"),
        )
    left_out = []
    if blank.any():
        table = dataset.table(["source", "record"]).take(rows)
        names = pc.binary_join_element_wise(*table.columns, "/")
        without, others = names.filter(pa.array(blank)), names.filter(pa.array(~blank))
        lost = without.filter(pc.invert(pc.is_in(without, others))).unique().to_pylist()
        left_out = [
            skip_or_stop(options, f"{url}: {name}", model_input.unusable_crops_text)
            for name in lost
        ]
    return DatasetSource(
        dataset,
        rows[~blank],
        options.batch,
        options.per,
        left_out,
        on_corrupt="skip" if options.skips_unreadable() else "stop",
        threads=options.workers,
        pin=options.pin,
    )


class RecordToRead(NamedTuple):
    """A record that was found but not read yet."""

    name: str
    stamp: bytes  # a digest that changes with the content of the file
    read: Callable[[], PreparedRecord | ReadError]
    # The record's name in the table, without folders and odd characters. If two records have the
    # same label, the table has `name` instead
    label: str
    private: str = ""  # names what in its row can identify the patient; "" if nothing does
    of_folder: bool = False  # True if the user named the record's folder, not the record


def records_to_read(options: EcgOptions, model_input: Input) -> Iterator[RecordToRead]:
    """Yields the records that the options name: arrays, single records, hospital files, and those
    of archives and folders."""
    for url in options.data:
        exists = Path(url).exists()
        if url.endswith(ARRAY_SUFFIXES) and exists:
            yield from array_records(Path(url), options, model_input)
        elif url.lower().endswith((".hea", *HOSPITAL_ENDINGS)):
            folder, _, key = (url if "/" in url else f"./{url}").rpartition("/")
            kind = "wfdb" if url.endswith(".hea") else "hospital"
            source = open_sources(folder or "/", kind, options.anonymous)[0]
            yield _source_record(source, key, url, source.root.stamp(key))
        elif "://" in url or Path(url).is_dir() or url.lower().endswith(".zip"):
            yield from _archive_records(url, options, model_input)
        elif exists:
            raise ConfigError(
                Flag("--data"),
                f" {url}: this is neither a dataset nor a folder, nor a file of ECGs: name a .hea, .npy, .npz, "
                ".xml or .dcm file",
            )
        else:
            raise ConfigError(Flag("--data"), f" {url}: does not exist")


def pseudonym_mark(keyfile: str) -> str:
    """Returns the mark that identifies this key, without revealing it. The dataset.json of a
    dataset whose names were hashed with the key has the same mark."""
    return str(key_fingerprint(read_key(keyfile)))


def crops_of_files(options: EcgOptions) -> list[dict[str, Any]]:
    """Returns a dictionary for each crop of the files: the fields of its record, as in PreparedRecord,
    and `waveform`, the hash of its waveform (data_tools.dataset.crc_and_waveform_hash)."""
    crops: list[dict[str, Any]] = []
    skipped = 0
    key = read_key(options.pseudonymize) if options.pseudonymize else None
    for record in records_to_read(options, Input(ALL_LEADS, ALL_LEADS)):
        ecg = record.read()
        if isinstance(ecg, ReadError):
            skip_or_stop(options, record.name, ecg, record.of_folder)
            skipped += 1
            continue
        names = pseudonymize_record(key, ecg)._asdict()
        crops += [names | {"waveform": crc_and_waveform_hash(crop)[1]} for crop in ecg.crops_uv]
    if not crops:
        raise ConfigError(
            Flag("--data"),
            f" {options.data[0]}: no ECG in these data can be read: give other files",
        )
    if skipped > SKIPS_SHOWN:
        tell(f"skipped: {skipped:,} ECGs in all")
    return crops


def array_files(url: str) -> list[Path]:
    """Returns the .npy and .npz files at a path: the file itself, or those in a folder."""
    if url.endswith(ARRAY_SUFFIXES):
        return [Path(url)]
    paths = Path(url).rglob("*")
    return sorted(path for path in paths if path.suffix in ARRAY_SUFFIXES and not path.is_symlink())


def _archive_records(url: str, options: EcgOptions, model_input: Input) -> Iterator[RecordToRead]:
    """Yields the records of an archive, or of the array files in a folder, and prints notes on
    records that are left out."""
    try:
        sources = open_sources(
            url,
            anonymous=options.anonymous,
            besides=options.data,
            private=bool(options.pseudonymize),
        )
    except DataError as error:
        files = array_files(url) if isinstance(error, UnknownArchive) else []
        for path in files:
            yield from array_records(path, options, model_input, of_folder=True)
        if files:
            return
        if not isinstance(error, UnknownArchive):
            raise ConfigError(error) from None
        found, _, more = error.args
        mend = "`omnilead shard --source`, and give the dataset"
        raise ConfigError(found, mend, more) from None
    for source in sources:
        _print_notes([source.left_out])
        missing = []
        for key in source.keys():  # noqa: SIM118 - no dictionary
            if isinstance(key, AbsentKey):
                missing.append(source.name_for(key))
                continue
            stamp = source.root.stamp(key) or source.root.stamp(key.rpartition("#")[0])
            record = _source_record(source, key, f"{source.root.url}/{key}", stamp)
            yield record._replace(of_folder=True)
        _print_notes([missing_note(source.root.url, missing, source.root.private)])
        if isinstance(source, HospitalFiles):
            _print_notes(source.notes())


def _print_notes(notes: Iterable[str]) -> None:
    """Prints the notes that are not empty, on rank 0 only."""
    for note in notes:
        if note and launched_rank().rank == 0:
            tell(f"note: {note}")


def _source_record(source: Source, key: str, name: str, stamp: bytes) -> RecordToRead:
    read = partial(prepare_record, source, key)
    return RecordToRead(name, stamp, read, source.name_for(key), source.private)


class EcgArray(NamedTuple):
    """An ECG as an array in a file, which may hold several."""

    suffix: str  # appended to the path of the file to name the ECG, such as [3]
    label: str
    values: Callable[[], Array]


def array_records(
    path: Path, options: EcgOptions, model_input: Input, of_folder: bool = False
) -> Iterator[RecordToRead]:
    """Yields a record for each ECG in an array file. If the file cannot be read, raises ConfigError
    or, if it was found in a folder, yields one unreadable record."""
    if options.fs_hz is None:
        raise ConfigError(
            Flag("--data"),
            f" {path}: the file does not state its sampling rate: give it with ",
            Flag("--fs"),
        )
    try:
        ecgs = _ecgs_in_file(path)
        stamp = f"{path.stat().st_size},{path.stat().st_mtime_ns}".encode()
        if not ecgs:
            raise ArrayError("the file has no ECG")
    except (ArrayError, OSError) as error:
        if not of_folder:
            raise ConfigError(Flag("--data"), f" {path}: ", error) from None
        refusal = ReadError(str(error))
        yield RecordToRead(str(path), b"", lambda: refusal, path.stem, of_folder=True)
        return
    for ecg in ecgs:
        read = partial(_read_array, ecg, options, model_input)
        yield RecordToRead(f"{path}{ecg.suffix}", stamp, read, ecg.label, of_folder=of_folder)


def _ecgs_in_file(path: Path) -> list[EcgArray]:
    """Returns the ECGs in an .npy or .npz file."""
    if zipfile.is_zipfile(path):
        return [
            EcgArray(f"[{name}]", name, partial(npz_array, path, name)) for name in npz_names(path)
        ]
    values = open_npy(path)
    if values.ndim == 3:
        return [
            EcgArray(f"[{i}]", f"{path.stem}[{i}]", partial(values.__getitem__, i))
            for i in range(len(values))
        ]
    if values.ndim != 2 and values.size:
        shape = list(values.shape)
        raise ArrayError(f"its shape is {shape}, not [leads, samples] or [ECGs, leads, samples]")
    # The file is opened again when it is read, because a process cannot map all files of a large
    # folder at the same time
    return [EcgArray("", path.stem, partial(open_npy, path))] if values.size else []


def _read_array(
    ecg: EcgArray, options: EcgOptions, model_input: Input
) -> PreparedRecord | ReadError:
    """Returns the prepared crops of an array, or the reason why it cannot be used."""
    leads = [LEADS[i] for i in leads_in_order(options.leads or "12")]
    assert options.fs_hz is not None
    try:
        values = ecg.values()
        rows, columns = values.shape if values.ndim == 2 else (0, 0)
        if not options.leads and rows and len(leads) not in (rows, columns):
            transposed = f" and {columns} columns: transpose it to [leads, samples], and"
            middle = transposed if rows > columns else f", not {len(leads)}:"
            return ReadError(f"has {rows:,} rows{middle} name its rows with --leads")
        cut = cut_crops(values, options.fs_hz, leads, options.unit, model_input)
        return PreparedRecord("array", ecg.label, None, *cut[:4], options.fs_hz)
    except (ArrayError, SignalError, OSError) as error:
        return ReadError(str(error))


def record_source(
    records: Sequence[RecordToRead], key: bytes | None, model_input: Input, options: EcgOptions
) -> RecordSource:
    """Returns a source that reads these records. `key`: the key by which records and patients get
    pseudonyms, if any."""
    labels = Counter(record.label for record in records)

    def read(number: int) -> PreparedRecord | Skipped:
        record = records[number]
        ecg = record.read()
        if isinstance(ecg, PreparedRecord):
            ecg = drop_unusable_crops(ecg, model_input)
        if isinstance(ecg, ReadError):
            return skip_or_stop(options, record.name, ecg, record.of_folder)
        if labels[record.label] > 1:
            ecg = ecg._replace(record=record.name)
        return pseudonymize_record(key, ecg)

    paths = [None if key else record.name for record in records]
    return RecordSource(paths, read, options.batch, options.workers)


def drop_unusable_crops(ecg: PreparedRecord, model_input: Input) -> PreparedRecord | ReadError:
    """Returns the record without crops that are shorter than a window, and without crops in which
    all leads that the model uses are zero, which means that they were not recorded. ReadError if no
    crop is left."""
    measured_B = ecg.crops_uv[:, list(model_input.seen_leads)].any(axis=(1, 2))
    there = np.flatnonzero(measured_B & (model_input.count_windows(ecg.halves) > 0)).tolist()
    if len(there) == len(ecg.halves):
        return ecg
    if not there:
        return ReadError(model_input.unusable_crops_text)
    return ecg._replace(
        crops_uv=ecg.crops_uv[there],
        start_s=tuple(ecg.start_s[i] for i in there),
        halves=tuple(ecg.halves[i] for i in there),
        flags=tuple(ecg.flags[i] for i in there),
    )
