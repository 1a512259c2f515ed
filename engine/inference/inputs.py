"""Reads ECGs for a trained model: crops of a dataset, or records of archives, files and arrays, in
parts of equal batches.

    identity, open_it = open_data(args, model.input)        # args: of engine.embed or engine.predict
    for batch in open_it().batches([0, 2], progress):       # CropBatch for engine.inference.predict, of these parts
        ...

A part is always the same PART_BATCHES batches, so results do not depend on where a run was
interrupted. Records from files are prepared by the dataset builder's own code.
"""

import argparse
import hashlib
import json
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm.auto import tqdm

from omnilead.data_tools.cli import tell
from omnilead.data_tools.dataset import META, Dataset
from omnilead.data_tools.sources import (
    ENDINGS,
    DataError,
    Prepared,
    ReadError,
    Source,
    key_mark,
    open_sources,
    prepared,
    pseudonymised,
    read_key,
)
from omnilead.engine.common import (
    ARRAYS,
    LEADS,
    ConfigError,
    describe_leads,
    environment,
    leads_in_order,
    prefetch,
)
from omnilead.engine.data.augmenter import none_measured
from omnilead.engine.inference.npz import ArrayError, load_npz, npz_names, open_npy
from omnilead.engine.inference.predict import CropBatch, dataset_batches
from omnilead.engine.inference.trained_model import crops
from omnilead.engine.model.input import Input, SignalError

Per = Literal["crop", "record", "half", "first"]
PART_BATCHES = 16
COLUMNS = {
    "source": pa.string(),
    "record": pa.string(),
    "patient": pa.string(),
    "row": pa.int64(),
    "start_s": pa.float64(),
}


class EmbeddedCrops(NamedTuple):
    """Which crops are in a CropBatch of a source."""

    part: int
    table: pa.Table  # COLUMNS, one row for each crop
    record_B: np.ndarray  # number of each crop's record, ascending
    missing_B: np.ndarray | None = (
        # one bit for each lead that the model uses but does not get (engine.inference.outputs)
        None
    )


class DatasetSource:
    """Crops of a dataset. A source has `parts`, `count` (units in some of them) and `batches`,
    which calls `progress` with the number of units read."""

    unit = " crops"

    def __init__(
        self, dataset: Dataset, rows: np.ndarray, batch: int, per: Per, **reading: Any
    ) -> None:
        """`rows`: the order of the crops; with per="record" they are sorted by record. `reading`:
        see dataset_batches."""
        self.dataset, self.batch, self.reading = dataset, batch, reading
        self.table = dataset.table([name for name in COLUMNS if name != "row"])
        self.table = self.table.append_column("row", pa.array(np.arange(len(dataset))))
        self.record = np.arange(len(rows))
        if per == "record":
            chosen = self.table.take(rows).sort_by(
                [(name, "ascending") for name in ("source", "record", "start_s")]
            )
            rows = chosen["row"].to_numpy()
            names = pc.binary_join_element_wise(
                chosen["source"], chosen["record"], "\t"
            ).combine_chunks()
            self.record = np.cumsum(
                np.diff(names.dictionary_encode().indices.to_numpy(), prepend=0) != 0
            )
        first = np.flatnonzero(
            np.diff(self.record, prepend=-1)
        )  # a part begins where a record begins
        begins = first[
            np.searchsorted(first, np.arange(0, len(rows), batch * PART_BATCHES), side="right") - 1
        ]
        self.rows, self.begins = rows, np.append(np.unique(begins), len(rows))
        self.parts = len(self.begins) - 1

    def count(self, parts: Iterable[int]) -> int:
        return sum(int(self.begins[part + 1] - self.begins[part]) for part in parts)

    def batches(
        self, parts: Sequence[int], progress: Callable[[int], Any]
    ) -> Generator[CropBatch, None, None]:
        spans = (range(self.begins[part], self.begins[part + 1]) for part in parts)
        rows = [
            self.rows[span[at : at + self.batch]]
            for span in spans
            for at in range(0, len(span), self.batch)
        ]
        position = np.empty(len(self.dataset), np.int64)
        position[self.rows] = np.arange(len(self.rows))
        for batch in dataset_batches(self.dataset, rows, **self.reading):
            at = position[batch.crops]
            part = int(np.searchsorted(self.begins, at[0], side="right")) - 1
            yield batch._replace(
                crops=EmbeddedCrops(part, self.table.take(batch.crops), self.record[at])
            )
            progress(len(at))


class RecordSource:
    """Records by number. `read` is called from several threads and returns a
    data_tools.sources.Prepared, or None to leave the record out."""

    unit = " records"

    def __init__(self, records: int, read: Callable[[int], Any], batch: int, workers: int) -> None:
        self.records, self.read, self.batch, self.workers = records, read, batch, workers
        self.parts = -(-records // (batch * PART_BATCHES))

    def _numbers(self, part: int) -> range:
        return range(self.records)[
            part * self.batch * PART_BATCHES : (part + 1) * self.batch * PART_BATCHES
        ]

    def count(self, parts: Iterable[int]) -> int:
        return sum(len(self._numbers(part)) for part in parts)

    def batches(
        self, parts: Sequence[int], progress: Callable[[int], Any]
    ) -> Generator[CropBatch, None, None]:
        numbers = (number for part in parts for number in self._numbers(part))
        with closing(prefetch(self.read, numbers, self.workers)) as records:
            for part in parts:
                crops = self._crops(part, records, progress)
                while chunk := list(islice(crops, self.batch)):
                    uv_BLT = np.stack([record.crops_uv[i] for _, record, i in chunk])
                    halves_B = np.array([record.halves[i] for _, record, i in chunk])
                    columns = zip(
                        *((r.source, r.record, r.patient, None, r.start_s[i]) for _, r, i in chunk),
                        strict=True,
                    )
                    arrays = [
                        pa.array(column, kind)
                        for column, kind in zip(columns, COLUMNS.values(), strict=True)
                    ]
                    record_B = np.array([number for number, _, _ in chunk])
                    table = pa.Table.from_arrays(arrays, list(COLUMNS))
                    yield CropBatch(uv_BLT, halves_B, EmbeddedCrops(part, table, record_B))

    def _crops(
        self, part: int, records: Iterator[Any], progress: Callable[[int], Any]
    ) -> Iterator[tuple[int, Any, int]]:
        for number, record in zip(self._numbers(part), records, strict=False):
            progress(1)
            yield from ((number, record, i) for i in range(len(record.halves) if record else 0))


CropSource = DatasetSource | RecordSource


def open_data(
    args: argparse.Namespace, model_input: Input
) -> tuple[dict[str, Any], Callable[[], CropSource]]:
    """Facts that identify the ECGs of --data, and a function that opens them."""
    key = read_key(args.pseudonymize) if args.pseudonymize else None
    if (dataset := dataset_of(args)) is not None:
        if key:
            made = "a dataset's names are those it was made with: use it with `omnilead shard`"
            raise ConfigError(f"--pseudonymize {args.pseudonymize}: {made}")
        rows = np.arange(len(dataset))
        return {"data": dataset.fingerprint}, partial(
            dataset_source, args, dataset, model_input, rows
        )
    records = list(records_of(args, model_input))
    digest = hashlib.sha256(key or b"")  # with a key, nobody without it can guess names and compare
    for record in records:
        digest.update(json.dumps([record.name, record.stamp.decode()]).encode())
    identity = {"data": digest.hexdigest(), "fs_hz": args.fs, "unit": args.unit}
    identity |= {"pseudonyms": key_mark(key)} if key else {}
    private = next((record.private for record in records if record.private), "")
    if private and not key and environment()[0] == 0:
        tell(f"note: {args.out} will hold {private}: --pseudonymize KEYFILE replaces both")
    return identity, partial(record_source, args, model_input, records, key)


def dataset_of(args: argparse.Namespace) -> Dataset | None:
    """The dataset that --data names; None if it names files."""
    for url in args.data:
        remote = "://" in url
        if remote or Path(url, META).is_file():
            with suppress(*[DataError] * remote):  # it may be an archive
                dataset = Dataset.open(url, args.anonymous)
                if len(args.data) > 1:
                    raise ConfigError(
                        f"--data {' '.join(args.data)}: give one dataset, or files, but not both"
                    )
                return dataset
    return None


def skip(args: argparse.Namespace, name: str, reason: object) -> None:
    if args.on_corrupt == "stop":
        raise ConfigError(f"{name}: {reason}: fix it, or skip such data with --on-corrupt skip")
    with tqdm.external_write_mode(file=sys.stderr):  # above a progress bar
        tell(f"skipped: {name}: {reason}")


def no_leads(model_input: Input) -> str:
    return (
        f"no valid lead: the model uses {describe_leads(model_input.seen)}, of which none was "
        "recorded"
    )


def dataset_source(
    args: argparse.Namespace, dataset: Dataset, model_input: Input, rows: np.ndarray
) -> DatasetSource:
    """Leaves out crops without any of the model's leads. A record that has no other crops counts as
    unreadable."""
    if dataset.root.remote and args.per == "record":
        raise ConfigError(
            f"--per record of {dataset.root.url}: remote crops are read shard by shard: use crop "
            "or half"
        )
    blank = none_measured(dataset, model_input.seen)[rows]
    if blank.all():
        raise ConfigError(
            f"--data {dataset.root.url}: {no_leads(model_input)}: choose other --leads"
        )
    if blank.any():
        names = pc.binary_join_element_wise(
            *dataset.table(["source", "record"]).take(rows).columns, "/"
        )
        without, others = (names.filter(pa.array(which)) for which in (blank, ~blank))
        for name in without.filter(pc.invert(pc.is_in(without, others))).unique().to_pylist():
            skip(args, f"{dataset.root.url}: {name}", no_leads(model_input))
    reading = {
        "on_corrupt": args.on_corrupt,
        "threads": args.workers,
        "pin": args.device.startswith("cuda"),
    }
    return DatasetSource(dataset, rows[~blank], args.batch, args.per, **reading)


class RecordToRead(NamedTuple):
    name: str
    stamp: bytes  # changes with the content
    read: Callable[[], Prepared | ReadError]
    label: str  # its name without folders and odd characters, for the table; if not unique, `name`
    private: str = ""  # what in its table row tells who the patient is


def records_of(args: argparse.Namespace, model_input: Input) -> Iterator[RecordToRead]:
    for url in args.data:
        if url.endswith(ARRAYS) and Path(url).exists():
            yield from arrays(args, Path(url), model_input)
        elif url.lower().endswith((".hea", *ENDINGS)):
            place, _, key = (url if "/" in url else f"./{url}").rpartition("/")
            source = open_sources(
                place or "/", "wfdb" if url.endswith(".hea") else "hospital", args.anonymous
            )[0]
            yield _of_source(source, key, url, source.root.stamp(key))
        elif "://" in url or Path(url).is_dir():
            try:
                sources = open_sources(
                    url,
                    anonymous=args.anonymous,
                    besides=args.data,
                    private=bool(args.pseudonymize),
                )
            except DataError as error:
                other = "set its format with `omnilead shard --source`, and give the dataset"
                raise ConfigError(
                    str(error).replace("set its format with --source", other)
                ) from None
            for source in sources:
                if source.left_out and environment()[0] == 0:
                    tell(f"note: {source.left_out}")
                for key in source.keys():  # noqa: SIM118 - no dictionary
                    stamp = b"" if source.root.remote else source.root.stamp(key)
                    yield _of_source(source, key, f"{source.root.url}/{key}", stamp)
        else:
            what = (
                "neither a dataset, folder nor .hea, .npy, .npz, .xml, .dcm file"
                if Path(url).exists()
                else "does not exist"
            )
            raise ConfigError(f"--data {url}: {what}")


def _of_source(source: Source, key: str, name: str, stamp: bytes) -> RecordToRead:
    return RecordToRead(
        name, stamp, partial(prepared, source, key), source.name_for(key), source.private
    )


def arrays(args: argparse.Namespace, path: Path, model_input: Input) -> Iterator[RecordToRead]:
    if args.fs is None:
        raise ConfigError(f"--data {path}: give its sampling rate with --fs")
    leads = [LEADS[i] for i in leads_in_order(args.leads or "12")]

    def read(label: str, values_of: Callable[[], np.ndarray]) -> Prepared | ReadError:
        try:
            values = values_of()
            if not args.leads and values.ndim == 2 and len(values) != len(leads):
                return ReadError(
                    f"has {len(values)} rows, not {len(leads)}: name its rows with --leads"
                )
            return Prepared(
                "array", label, None, *crops(values, args.fs, leads, args.unit, model_input)
            )
        except (ArrayError, SignalError, OSError) as error:
            return ReadError(str(error))

    ecgs: list[tuple[str, str, Callable[[], np.ndarray]]]  # suffix of the name, label, values
    try:
        if zipfile.is_zipfile(path):
            ecgs = [
                (f"[{name}]", name, partial(lambda one: load_npz(path, [one])[one], name))
                for name in npz_names(path)
            ]
        else:
            whole = open_npy(path)
            ecgs = [("", path.stem, lambda: whole)] if whole.size else []
            if whole.ndim == 3:
                ecgs = [
                    (f"[{i}]", f"{path.stem}[{i}]", partial(whole.__getitem__, i))
                    for i in range(len(whole))
                ]
            elif whole.ndim != 2:
                raise ConfigError(
                    f"--data {path}: shape {list(whole.shape)}, not [leads, samples] or [ECGs, "
                    "leads, samples]"
                )
        stamp = f"{path.stat().st_size},{path.stat().st_mtime_ns}".encode()
    except (ArrayError, OSError) as error:
        raise ConfigError(f"--data {path}: {error}") from None
    if not ecgs:
        raise ConfigError(f"--data {path}: has no ECG")
    for suffix, label, values_of in ecgs:
        yield RecordToRead(f"{path}{suffix}", stamp, partial(read, label, values_of), label)


def record_source(
    args: argparse.Namespace, model_input: Input, records: Sequence[RecordToRead], key: bytes | None
) -> RecordSource:
    """`key`: gives records and patients their pseudonyms."""
    labels = Counter(record.label for record in records)

    def read(number: int) -> Prepared | None:
        record = records[number]
        ecg = record.read()
        if isinstance(ecg, Prepared):
            if labels[record.label] > 1:
                ecg = ecg._replace(record=record.name)
            ecg = with_leads(ecg, model_input)
        if isinstance(ecg, Prepared):
            return pseudonymised(key, ecg)
        skip(args, record.name, ecg)
        return None

    return RecordSource(len(records), read, args.batch, args.workers)


def with_leads(ecg: Prepared, model_input: Input) -> Prepared | ReadError:
    """Leaves out crops in which all leads that the model uses are zero, that is, not recorded."""
    there = np.flatnonzero(ecg.crops_uv[:, list(model_input.seen)].any(axis=(1, 2))).tolist()
    if len(there) == len(ecg.halves):
        return ecg
    if not there:
        return ReadError(no_leads(model_input))
    starts, halves = tuple(ecg.start_s[i] for i in there), tuple(ecg.halves[i] for i in there)
    return ecg._replace(crops_uv=ecg.crops_uv[there], start_s=starts, halves=halves)
