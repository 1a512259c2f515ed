"""Reads ECGs for a trained model: crops of a dataset, or records of archives, files and arrays, in
parts of equal batches.

    opened = open_data(EcgOptions(("DATASET",)), model.input)
    for batch in opened.source().read_batches([0, 2], progress):    # CropBatch, of these parts
        ...

A part is always the same PART_BATCHES batches, so results do not depend on where a run was
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
    Prepared,
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
PART_BATCHES = 16
SKIPS_SHOWN = 5  # a folder may have 100,000 files that are no ECGs
RecordCrop = tuple[int, Prepared, int]  # the number of a record, the record, and which of its crops
# A column: a crop's flags as in a dataset, such as einthoven,implausible; null: none
FLAGS = "flags"
# A column of predictions: the file that an ECG came from; null: a dataset, or names are pseudonyms
PATH = "path"
CROP_COLUMNS = {
    "source": pa.string(),
    "record": pa.string(),
    "patient": pa.string(),
    "row": pa.int64(),
    "start_s": pa.float64(),
    FLAGS: pa.string(),
}


class Skipped(NamedTuple):
    """An ECG that is left out."""

    path: str
    reason: str


@dataclass(frozen=True)
class EcgOptions:
    """Options: the ECGs to read, and how to read them."""

    data: tuple[str, ...]  # a dataset; or folders, records, arrays, hospital files
    per: Per = "crop"
    leads: str | None = None  # shown to the model; also the names of the rows of arrays
    fs_hz: float | None = None  # sampling rate of arrays
    unit: str = ""  # unit of arrays; "": mV
    batch: int = 0  # crops encoded at a time; 0: 16, on a GPU 256
    workers: int = 0  # reading threads; 0: a quarter of the cores, with a GPU all
    # auto: stop, but leave out what cannot be read in a folder
    on_corrupt: Literal["auto", "stop", "skip"] = "auto"
    anonymous: bool = False  # public s3:// data without credentials
    pseudonymize: str | None = None  # a key file
    pin: bool = False  # batches in pinned memory, from which a GPU copies without waiting
    skip_numbers: Iterator[int] = field(
        default_factory=count, compare=False
    )  # counts the ECGs that are left out

    def skips_unreadable(self, of_folder: bool = False) -> bool:
        """True if unreadable data are left out. `of_folder`: in a file that the user did not
        name."""
        return self.on_corrupt == "skip" or (self.on_corrupt == "auto" and of_folder)


class SourceCrops(NamedTuple):
    """The crops of a source that are in a CropBatch."""

    part: int
    table: pa.Table  # COLUMNS and PATH, one row for each crop
    record_B: Array  # number of each crop's record, ascending
    missing_BL: Array | None = None  # leads that the model uses but does not get


class Waveforms(NamedTuple):
    """The number of each crop's ECG, and its waveform as in a dataset."""

    ecg_N: Array
    waveform_N: Array


def _record_numbers(table: pa.Table) -> Array:
    """Numbers the records of rows in the order of their first rows."""
    names = pc.binary_join_element_wise(table["source"], table["record"], "\t")
    numbers: Array = names.combine_chunks().dictionary_encode().indices.to_numpy()
    return numbers


class DatasetSource:
    """Crops of a dataset. Every source has the same members: `parts`, their number;
    `count_units`, in some of them; `read_batches`, which calls `progress` with the number of units
    read; `skipped`, the ECGs left out of each part that was read; `left_out`, those in no part;
    `rates_hz`, the recording rates; `heart_rates` of the ECGs read; and `waveforms`."""

    unit = " crops"
    skipped: Mapping[int, list[Skipped]] = {}  # crops are skipped one by one, where they are read

    def __init__(
        self,
        dataset: Dataset,
        rows: Array,
        batch: int,
        per: Per,
        left_out: Sequence[Skipped] = (),
        **reading: Any,
    ) -> None:
        """`rows`: the order of the crops; with per="record" they are sorted by record. `reading`:
        see dataset_batches."""
        self.dataset, self.batch, self.reading = dataset, batch, reading
        self.left_out = left_out
        self.heart_rates = HeartRates()
        table = dataset.table([name for name in CROP_COLUMNS if name != "row"])
        flags = pc.binary_join(table[FLAGS], ",")
        flags = pc.if_else(pc.equal(flags, ""), pa.scalar(None, pa.string()), flags)
        table = table.set_column(table.column_names.index(FLAGS), FLAGS, flags)
        table = table.append_column("row", pa.array(np.arange(len(dataset))))
        self.table = table.append_column(PATH, pa.nulls(len(dataset), pa.string()))
        self.record = np.arange(len(rows))
        if per == "record":
            rows, self.record = self._sorted_rows_and_records(rows)
        # A part begins where a record begins
        first = np.flatnonzero(np.diff(self.record, prepend=-1))
        wanted = np.arange(0, len(rows), batch * PART_BATCHES)
        begins = first[np.searchsorted(first, wanted, side="right") - 1]
        self.rows = rows
        self.begins = np.append(np.unique(begins), len(rows))
        self.parts = len(self.begins) - 1

    @property
    def rates_hz(self) -> set[float]:
        return set(np.unique(self.dataset.column("fs_source_hz")[self.rows]).tolist())

    @property
    def waveforms(self) -> Waveforms:
        waveform_N = self.dataset.column("waveform")[self.rows]
        return Waveforms(_record_numbers(self.table)[self.rows], waveform_N)

    def _sorted_rows_and_records(self, rows: Array) -> tuple[Array, Array]:
        """Returns the rows sorted by record, and the number of each row's record."""
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
            yield batch._replace(crops=SourceCrops(part, table, self.record[at_B]))
            progress(len(at_B))


class RecordSource:
    """Records by number. `read` is called from several threads and returns a
    data_tools.sources.Prepared, or says why the record is left out. `paths`: the file of each."""

    unit = " records"
    left_out: Sequence[Skipped] = ()

    def __init__(
        self,
        paths: Sequence[str | None],
        read: Callable[[int], Prepared | Skipped],
        batch: int,
        workers: int,
    ) -> None:
        self.paths, self.read, self.batch, self.workers = paths, read, batch, workers
        self.parts = -(-len(paths) // (batch * PART_BATCHES))
        self.skipped: dict[int, list[Skipped]] = {}
        self.rates_hz: set[float] = set()  # recording rates of the ECGs read so far
        self.heart_rates = HeartRates()
        self.crops_read = array("Q")  # for each crop: the number of its ECG, its waveform

    @property
    def waveforms(self) -> Waveforms:
        """The waveforms of what was read."""
        crops = np.array(self.crops_read, np.uint64).reshape(-1, 2)
        return Waveforms(crops[:, 0], crops[:, 1])

    def _record_range(self, part: int) -> range:
        size = self.batch * PART_BATCHES
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
        self, part: int, records: Iterator[Prepared | Skipped], progress: Callable[[int], Any]
    ) -> Iterator[RecordCrop]:
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
        rows.append(ecg._asdict() | {"start_s": ecg.start_s[crop], FLAGS: flags, PATH: path})
    # without a column `row`: null
    table = pa.Table.from_pylist(rows, schema=pa.schema({**CROP_COLUMNS, PATH: pa.string()}))
    uv_BLT = np.stack([ecg.crops_uv[crop] for _, ecg, crop in crops])
    halves_B = np.array([ecg.halves[crop] for _, ecg, crop in crops])
    record_B = np.array([number for number, _, _ in crops])
    return CropBatch(uv_BLT, halves_B, SourceCrops(part, table, record_B))


CropSource = DatasetSource | RecordSource


class OpenedData(NamedTuple):
    identity: dict[str, Any]  # JSON that tells these ECGs from others
    source: Callable[[], CropSource]
    private: str = ""  # says what in the table identifies patients


def open_data(options: EcgOptions, model_input: Input) -> OpenedData:
    dataset = dataset_of(options)
    if dataset is not None:
        rows = np.arange(len(dataset))
        return OpenedData(
            {"data": dataset.fingerprint},
            partial(dataset_source, dataset, rows, model_input, options),
        )
    key = read_key(options.pseudonymize) if options.pseudonymize else None
    records = list(records_to_read(options, model_input))
    digest = hashlib.sha256(key or b"")  # with a key, nobody without it can guess names and compare
    for record in records:
        digest.update(json.dumps([record.name, record.stamp.decode()]).encode())
    identity = {"data": digest.hexdigest(), "fs_hz": options.fs_hz, "unit": options.unit}
    if key:
        identity["pseudonyms"] = key_fingerprint(key)
    private = "" if key else next((record.private for record in records if record.private), "")
    return OpenedData(identity, partial(record_source, records, key, model_input, options), private)


def dataset_of(options: EcgOptions) -> Dataset | None:
    """Returns the dataset that `data` names; None if it names files."""
    for url in options.data:
        remote = "://" in url
        if not remote and not Path(url, META).is_file():
            continue
        try:
            dataset = Dataset.open(url, options.anonymous)
        except DataError:
            if remote:  # a remote folder may be an archive
                continue
            raise
        if len(options.data) > 1:
            raise ConfigError(
                Flag("--data"),
                f" {' '.join(options.data)}: give one dataset, or files, but not both",
            )
        if options.pseudonymize:
            raise ConfigError(
                Flag("--pseudonymize"),
                f" {options.pseudonymize}: a dataset's names are those it was made with: use it with "
                "`omnilead shard`",
            )
        return dataset
    return None


def skip_or_stop(
    options: EcgOptions, name: str, reason: object, of_folder: bool = False
) -> Skipped:
    if options.pseudonymize and isinstance(reason, ReadError):
        name, reason = "a record", reason.reason  # names and details may tell who it is
    if not options.skips_unreadable(of_folder):
        raise DataError(
            f"{name}: ",
            reason,
            ": fix it, or leave it out (embed, predict: ",
            Flag("--on-corrupt"),
            " skip)",
        )
    number = next(options.skip_numbers)  # atomic: several threads skip records
    line = f"skipped: {name}: {reason}"
    if number == SKIPS_SHOWN:
        line = "skipped: more, which are only counted"
    if number <= SKIPS_SHOWN:
        with tqdm.external_write_mode(file=sys.stderr):  # above a progress bar
            tell(line)
    return Skipped(name, str(reason))


def dataset_source(
    dataset: Dataset, rows: Array, model_input: Input, options: EcgOptions
) -> DatasetSource:
    """Leaves out crops without any of the model's leads, or shorter than its window. A record that has no other crops counts as
    unreadable."""
    url = dataset.root.url
    if dataset.root.remote and options.per == "record":
        raise ConfigError(
            Flag("--per"),
            f" record of {url}: remote crops are read shard by shard: use crop or half",
        )
    blank = ~model_input.usable_crops(dataset)[rows]
    if blank.all():
        raise ConfigError(
            Flag("--data"), f" {url}: {model_input.missing_text}: choose other ", Flag("--leads")
        )
    left_out = []
    if blank.any():
        table = dataset.table(["source", "record"]).take(rows)
        names = pc.binary_join_element_wise(*table.columns, "/")
        without, others = names.filter(pa.array(blank)), names.filter(pa.array(~blank))
        lost = without.filter(pc.invert(pc.is_in(without, others))).unique().to_pylist()
        left_out = [
            skip_or_stop(options, f"{url}: {name}", model_input.missing_text) for name in lost
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
    name: str
    stamp: bytes  # digest that changes with the content
    read: Callable[[], Prepared | ReadError]
    label: str  # its name without folders and odd characters, for the table; if not unique, `name`
    private: str = ""  # says what in its row identifies the patient
    of_folder: bool = False  # the user named its folder, not the file


def records_to_read(options: EcgOptions, model_input: Input) -> Iterator[RecordToRead]:
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
                f" {url}: neither a dataset, folder nor .hea, .npy, .npz, .xml, .dcm file",
            )
        else:
            raise ConfigError(Flag("--data"), f" {url}: does not exist")


def pseudonym_mark(keyfile: str) -> str:
    """Returns the mark of this key, as in the dataset.json of a dataset with its pseudonyms."""
    return str(key_fingerprint(read_key(keyfile)))


def crops_of_files(options: EcgOptions) -> list[dict[str, Any]]:
    """Returns the record of each crop, as in Prepared, and its waveform
    (data_tools.dataset.crc_and_waveform_hash)."""
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
        raise ConfigError(Flag("--data"), f" {options.data[0]}: no ECG can be read: give others")
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
        _tell_notes([source.left_out])
        missing = []
        for key in source.keys():  # noqa: SIM118 - no dictionary
            if isinstance(key, AbsentKey):
                missing.append(source.name_for(key))
                continue
            stamp = source.root.stamp(key) or source.root.stamp(key.rpartition("#")[0])
            record = _source_record(source, key, f"{source.root.url}/{key}", stamp)
            yield record._replace(of_folder=True)
        _tell_notes([missing_note(source.root.url, missing, source.root.private)])
        if isinstance(source, HospitalFiles):
            _tell_notes(source.notes())


def _tell_notes(notes: Iterable[str]) -> None:
    for note in notes:
        if note and launched_rank().rank == 0:
            tell(f"note: {note}")


def _source_record(source: Source, key: str, name: str, stamp: bytes) -> RecordToRead:
    read = partial(prepare_record, source, key)
    return RecordToRead(name, stamp, read, source.name_for(key), source.private)


class EcgArray(NamedTuple):
    suffix: str  # appended to the file's name
    label: str
    values: Callable[[], Array]


def array_records(
    path: Path, options: EcgOptions, model_input: Input, of_folder: bool = False
) -> Iterator[RecordToRead]:
    if options.fs_hz is None:
        raise ConfigError(Flag("--data"), f" {path}: give its sampling rate with ", Flag("--fs"))
    try:
        ecgs = _arrays_in(path)
        stamp = f"{path.stat().st_size},{path.stat().st_mtime_ns}".encode()
        if not ecgs:
            raise ArrayError("has no ECG")
    except (ArrayError, OSError) as error:
        if not of_folder:
            raise ConfigError(Flag("--data"), f" {path}: ", error) from None
        refusal = ReadError(str(error))
        yield RecordToRead(str(path), b"", lambda: refusal, path.stem, of_folder=True)
        return
    for ecg in ecgs:
        read = partial(_read_array, ecg, options, model_input)
        yield RecordToRead(f"{path}{ecg.suffix}", stamp, read, ecg.label, of_folder=of_folder)


def _arrays_in(path: Path) -> list[EcgArray]:
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
        raise ArrayError(f"shape {shape}, not [leads, samples] or [ECGs, leads, samples]")
    # Opened again when it is read: a process cannot map the files of a large folder at once
    return [EcgArray("", path.stem, partial(open_npy, path))] if values.size else []


def _read_array(ecg: EcgArray, options: EcgOptions, model_input: Input) -> Prepared | ReadError:
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
        return Prepared("array", ecg.label, None, *cut[:4], options.fs_hz)
    except (ArrayError, SignalError, OSError) as error:
        return ReadError(str(error))


def record_source(
    records: Sequence[RecordToRead], key: bytes | None, model_input: Input, options: EcgOptions
) -> RecordSource:
    """Returns the source of these records. `key`: gives records and patients their pseudonyms."""
    labels = Counter(record.label for record in records)

    def read(number: int) -> Prepared | Skipped:
        record = records[number]
        ecg = record.read()
        if isinstance(ecg, Prepared):
            ecg = drop_unusable_crops(ecg, model_input)
        if isinstance(ecg, ReadError):
            return skip_or_stop(options, record.name, ecg, record.of_folder)
        if labels[record.label] > 1:
            ecg = ecg._replace(record=record.name)
        return pseudonymize_record(key, ecg)

    paths = [None if key else record.name for record in records]
    return RecordSource(paths, read, options.batch, options.workers)


def drop_unusable_crops(ecg: Prepared, model_input: Input) -> Prepared | ReadError:
    """Drops crops without a window, and crops in which all leads that the model uses are zero, that
    is, not recorded."""
    measured_B = ecg.crops_uv[:, list(model_input.seen_leads)].any(axis=(1, 2))
    there = np.flatnonzero(measured_B & (model_input.count_windows(ecg.halves) > 0)).tolist()
    if len(there) == len(ecg.halves):
        return ecg
    if not there:
        return ReadError(model_input.missing_text)
    return ecg._replace(
        crops_uv=ecg.crops_uv[there],
        start_s=tuple(ecg.start_s[i] for i in there),
        halves=tuple(ecg.halves[i] for i in there),
        flags=tuple(ecg.flags[i] for i in there),
    )
