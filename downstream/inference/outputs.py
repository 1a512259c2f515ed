"""A model's outputs for a dataset or single records as a table, made in parts, so that the work can
resume after a kill.

    output = embedding_output(model)                                        # or prediction_output(model)
    with ParquetParts(Path("F.parquet"), job, rank, world) as parts:  # job: all that determines the content, as plain JSON
        missing = make_parts(source, output, model.input, "crop", parts)
    table = whole_table(source, output, model.input, "half")                # the same without files

`per`: one row for each window of the model (of 5 s: half), each crop's first window, each crop of
10 s (the mean of its windows) or each record (the mean of all its windows). Parts (downstream.inference.ecg_reader) are kept in
F.parquet.parts/ until the table is complete; a damaged part is computed again, one of another job
is refused. Under torchrun or deepspeed, rank r of W computes parts r, r + W, ..., and the rank that
finishes last joins all of them. Ranks share nothing but the folder: none waits for another. A CSV
file cannot say which job wrote it: .F.csv.job says so to whoever comes later.
"""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from pyarrow import csv
from torch import Tensor
from tqdm.auto import tqdm

from omnilead.data_tools.dataset import DataError
from omnilead.data_tools.ecg.constants import IMPLAUSIBLE
from omnilead.data_tools.io.spreadsheet import csv_text, quote_formulas
from omnilead.data_tools.io.storage import locked_by_another, sync_folder, write_whole
from omnilead.data_tools.io.terminal import is_interactive
from omnilead.engine.data.batches import CropBatch, predict
from omnilead.engine.model.input import Input
from omnilead.engine.settings.commandline import RESUMABLE
from omnilead.engine.settings.errors import ConfigError, Facts, OutputError, first_names
from omnilead.engine.settings.leads import ALL_LEADS, describe_leads

from ..tasks.kinds import KINDS, Array
from ..tasks.readout import PAPER_READOUT
from .ecg_reader import CROP_COLUMNS, FLAGS, PATH, CropSource, Per, Skipped
from .trained_model import NOT_FINITE, TrainedModel

CSV = ".csv"
EMBEDDING = "embedding"  # name of a column
# a column of predictions: leads that the model uses but did not get, such as II,V1; null: none
MISSING = "missing_leads"
JOB_KEY = b"omnilead"  # in a parquet file's metadata: the job
SKIPPED_KEY = b"omnilead.skipped"  # in a part's metadata: its records that could not be read


class Counts(NamedTuple):
    """Counts of the doubtful rows of a table, and of the records that could not be read."""

    rows: int = 0
    lacking: int = 0  # rows that lack leads which the model uses
    implausible: int = 0
    refused: int = 0

    def add_table(self, table: pa.Table, refused: int) -> "Counts":
        lacking = implausible = 0
        if MISSING in table.column_names:
            lacking = len(table) - table[MISSING].null_count
        if FLAGS in table.column_names:
            of_rows = pc.match_substring(table[FLAGS], IMPLAUSIBLE)
            implausible = pc.sum(of_rows, min_count=0).as_py()
        added = len(table), lacking, implausible, refused
        return Counts(*map(sum, zip(self, added, strict=True)))


class Output(NamedTuple):
    """A model's outputs for each window, and the columns made from their means."""

    model: TrainedModel
    forward: Callable[[Tensor], Tensor]
    schema: pa.Schema  # COLUMNS, perhaps MISSING and PATH, and those that `columns` makes
    columns: Callable[[Array], list[pa.Array]]
    what: str  # names the outputs in messages
    job: Facts  # settings that tell this output from embeddings
    sentences: Sequence[str] = ()  # notes on the model for the user
    scores: bool = False  # True if these are scores of the model's head


def embedding_output(model: TrainedModel, readout: str = "") -> Output:
    """Returns the output for embeddings. `readout`: downstream.tasks.readout; "": the model's
    own."""
    parts = model.suitable_readout(readout)
    output = vector_output(model, partial(model.read, readout=parts), model.readout_width(parts))
    return (
        output if parts == (PAPER_READOUT,) else output._replace(job={"readout": "+".join(parts)})
    )


def vector_output(model: TrainedModel, forward: Callable[[Tensor], Tensor], width: int) -> Output:
    """Returns an output with the result of `forward` in one column."""

    def columns(c_ND: Array) -> list[pa.Array]:
        return [pa.FixedSizeListArray.from_arrays(pa.array(c_ND.reshape(-1)), width)]

    schema = pa.schema([*CROP_COLUMNS.items(), (EMBEDDING, pa.list_(pa.float32(), width))])
    return Output(model, forward, schema, columns, f"embeddings of {width}", {})


def embedding_matrix(table: pa.Table) -> Array:
    """Returns the vectors of a table, one row each."""
    return np.asarray(
        table[EMBEDDING].combine_chunks().flatten().to_numpy().reshape(len(table), -1)
    )


def prediction_output(model: TrainedModel) -> Output:
    """Returns the output for predictions: probabilities and decisions at the model's thresholds, or
    values in their unit."""
    head = model.head_info
    if head is None or not head.classes:
        was = f"fine-tuned for {head.task}, which needs no classes" if head else "only pre-trained"
        raise ConfigError(
            f"the model was {was}: fine-tune it with `omnilead finetune`, fit a head to it with `omnilead "
            "fit`, or use `omnilead embed`"
        )
    kind = KINDS[head.kind]
    fields = kind.output_fields(head.classes, head.unit)
    schema = pa.schema(
        [*CROP_COLUMNS.items(), (MISSING, pa.string()), (PATH, pa.string()), *fields]
    )
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise ConfigError(
                f"two columns would be called {name!r}: fine-tune the model with another name for "
                "that label"
            )
    meaning = {
        "task": head.task,
        "kind": head.kind,
        "classes": head.classes,
        "thresholds": head.thresholds,
        "unit": head.unit,
    }
    what = f"predictions of {head.task} ({first_names(head.classes, 3)})"
    columns = partial(kind.output_columns, classes=head.classes, thresholds=head.thresholds)
    job = {"predictions": meaning}
    return Output(model, model.scores, schema, columns, what, job, head.sentences, scores=True)


def part_tables(
    source: CropSource,
    output: Output,
    model_input: Input,
    parts: Sequence[int],
    per: Per,
    progress: Callable[[int], Any] = lambda units: None,
) -> Iterator[tuple[int, pa.Table]]:
    """Yields the table of each part."""
    empty = set(parts)

    def prepare_windows(uv_BLT: Tensor, halves_B: Array) -> Tensor:
        x_RLT = model_input.windows(uv_BLT, halves_B)  # normalised over the whole crop
        if per != "first":
            return x_RLT
        count_B = model_input.count_windows(halves_B)
        first_B = torch.from_numpy(np.cumsum(count_B) - count_B)
        return x_RLT.index_select(0, first_B.to(x_RLT.device))

    with closing(source.read_batches(parts, progress)) as batches:
        crops: Iterable[CropBatch] = batches
        if MISSING in output.schema.names:
            crops = note_missing_leads(batches, output.model.input, model_input)
        outputs = predict(crops, prepare_windows, output.forward, output.model.device)
        for part, group in groupby(outputs, key=lambda batch: batch[0].crops.part):
            empty.remove(part)
            yield part, _part_table(list(group), output, per)
    for part in sorted(empty):  # none of its records or crops could be read
        yield part, output.schema.empty_table()


def note_missing_leads(
    batches: Iterable[CropBatch], used: Input, shown: Input
) -> Iterator[CropBatch]:
    """Notes which of the leads that the model uses were not recorded, or are not shown to it."""
    used_L, hidden_L = np.isin(ALL_LEADS, used.seen_leads), ~np.isin(ALL_LEADS, shown.seen_leads)
    for batch in batches:
        missing_BL = used_L & (hidden_L | ~batch.uv_BLT.any(axis=2))
        yield batch._replace(crops=batch.crops._replace(missing_BL=missing_BL))


def _part_table(batches: list[tuple[CropBatch, Array]], output: Output, per: Per) -> pa.Table:
    """Means of the outputs y_HD over the windows H of each row N."""
    y_HD = np.concatenate([y_HD for _, y_HD in batches])
    if not np.isfinite(y_HD).all():
        raise OutputError(NOT_FINITE)
    halves_B = np.concatenate([batch.halves_B for batch, _ in batches])
    windows_B = 1 if per == "first" else output.model.input.count_windows(halves_B)
    crop_H = np.repeat(np.arange(len(halves_B)), windows_B)
    group_H = crop_H
    if per == "half":
        group_H = np.arange(len(crop_H))
    elif per == "record":
        group_H = np.concatenate([batch.crops.record_B for batch, _ in batches])[crop_H]
    first_N = np.flatnonzero(np.diff(group_H, prepend=-1))
    count_N = np.diff(first_N, append=len(y_HD)).astype(np.float32)
    y_ND = np.add.reduceat(y_HD, first_N) / count_N[:, None]
    crops = pa.concat_tables([batch.crops.table for batch, _ in batches])
    rows = crops.take(crop_H[first_N])
    columns = {name: rows[name] for name in CROP_COLUMNS}
    if per == "record":
        columns[FLAGS] = _joined_flags(crops[FLAGS], crop_H, first_N)
    if per == "half":
        columns["start_s"] = _window_starts(rows, crop_H, output.model.input)
    if MISSING in output.schema.names:
        columns[MISSING] = _missing_leads(batches, crop_H, first_N)
    if PATH in output.schema.names:
        columns[PATH] = rows[PATH]
    return pa.Table.from_arrays([*columns.values(), *output.columns(y_ND)], schema=output.schema)


def _window_starts(rows: pa.Table, crop_H: Array, model_input: Input) -> pa.Array:
    """Returns the start of each window in seconds; a crop's second window starts later than the
    crop."""
    window_H = np.arange(len(crop_H)) - np.searchsorted(crop_H, crop_H)
    return pa.array(rows["start_s"].to_numpy() + window_H * model_input.window_s)


def _joined_flags(flags_B: pa.ChunkedArray, crop_H: Array, first_N: Array) -> pa.Array:
    """Returns the flags of all crops of each row."""
    if flags_B.null_count == len(flags_B):
        return pa.nulls(len(first_N), pa.string())
    joined = []
    for crops in np.split(crop_H, first_N[1:]):
        flags = flags_B.take(pa.array(np.unique(crops))).drop_null().to_pylist()
        joined.append(",".join(dict.fromkeys(",".join(flags).split(","))) or None)
    return pa.array(joined, pa.string())


def _missing_leads(
    batches: list[tuple[CropBatch, Array]], crop_H: Array, first_N: Array
) -> pa.Array:
    """Returns the names of the leads that are missing in any crop of a row."""
    missing_BL = np.concatenate([batch.crops.missing_BL for batch, _ in batches])
    missing_NL = np.logical_or.reduceat(missing_BL[crop_H], first_N)
    names = [describe_leads(np.flatnonzero(missing_L)) or None for missing_L in missing_NL]
    return pa.array(names, pa.string())


class ParquetParts:
    """The parts of a table, in a folder until all are there."""

    def __init__(self, out: Path, job: Facts, rank: int = 0, world: int = 1) -> None:
        self.out, self.rank, self.world = out, rank, world
        self.job = json.loads(json.dumps(job))  # with lists for tuples, as JSON is read back
        self.folder = out.with_name(f"{out.name}.parts")
        self.finished = out.exists()
        self.rows: int | None = None  # rows of `out`, on the rank that has joined its parts
        self.counts = Counts()  # complete on the same rank
        self._lock: Any = None
        if not self.finished:
            self._lock_folder()
            return
        self._require_same(read_job(out), out)
        if rank == 0 and out.suffix != CSV:
            self.rows = pq.read_metadata(out).num_rows

    def _lock_folder(self) -> None:
        """Locks the folder for this rank, and refuses parts of another job."""
        if self.folder.is_file():
            raise ConfigError(
                f"{self.out}: {self.folder} is a file: remove it, or choose another file"
            )
        self.folder.mkdir(exist_ok=True)
        lock = self.folder / f"lock-{self.rank}-of-{self.world}"
        with ExitStack() as refused:
            self._lock = refused.enter_context(open(lock, "w"))
            if locked_by_another(self._lock, str(self.out)):
                raise OutputError(f"{self.out}: another process is writing it")
            for path in self.folder.glob("*.parquet"):
                before = read_job(path)
                if before is not None:
                    self._require_same(before, self.folder)
            refused.pop_all()  # the lock is held until the end

    def _require_same(self, job: Any, place: Path) -> None:
        before = job if isinstance(job, dict) else {}
        for name in sorted(self.job.keys() | before.keys()):
            was, now = before.get(name), self.job.get(name)
            if was != now:
                self._refuse_file(place, f"{name} was {str(was)[:60]}, now {str(now)[:60]}")

    def _refuse_file(self, place: Path, why: str) -> None:
        raise ConfigError(f"{place}: of another job: {why}: remove it, or choose another file")

    def require_columns(self, names: Sequence[str]) -> None:
        """Refuses parts with other columns: an earlier version began them."""
        for path in self.folder.glob("*.parquet"):
            try:
                before = pq.read_schema(path).names
            except (pa.ArrowException, OSError):  # damaged, or another rank has removed it
                continue
            for name in set(names) ^ set(before):
                what = "without" if name in names else "with"
                self._refuse_file(self.folder, f"its parts are {what} a column {name}")

    def _read_part(self, number: int, schema: pa.Schema | None = None) -> pa.Table | None:
        """Reads a part's table; None if it is missing or damaged."""
        try:
            return pq.read_table(
                self._part_path(number), schema=schema, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError):
            return None

    def _part_path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.parquet"

    def own_parts(self, count: int) -> range:
        """Returns this rank's parts, out of `count`."""
        return range(self.rank, count, self.world)

    def missing_parts(self, count: int) -> list[int]:
        """Returns this rank's parts that are still missing or damaged."""
        numbers = [number for number in self.own_parts(count) if self._read_part(number) is None]
        # Checked last: another rank removes the parts only after this file exists
        self.finished = self.out.exists()
        return [] if self.finished else numbers

    def write_part(self, number: int, table: pa.Table, skipped: Sequence[Skipped] = ()) -> None:
        buffer = io.BytesIO()
        facts = {JOB_KEY: json.dumps(self.job), SKIPPED_KEY: json.dumps(skipped)}
        table = table.replace_schema_metadata(facts)
        pq.write_table(table, buffer, write_page_checksum=True)
        try:
            write_whole(self._part_path(number), buffer.getvalue())
        except FileNotFoundError:  # ranks of another number have joined all parts and removed them
            self.finished = self.out.exists()
            if not self.finished:
                raise

    def join_parts(
        self, count: int, schema: pa.Schema, left_out: Sequence[Skipped] = ()
    ) -> list[int]:
        """Joins all parts into one file, atomically. Returns the numbers of missing parts, which
        other ranks compute. Ranks that finish together may all join: they write the same bytes.
        `left_out`: ECGs that are in no part."""
        missing: list[int] = []
        try:
            if not self.out.exists():
                facts = schema.with_metadata({JOB_KEY: json.dumps(self.job)})
                missing = self._join_into_file(count, facts, list(left_out))
        except FileNotFoundError:  # another rank has joined the parts and removed them
            if not self.out.exists():
                raise
        return [] if self.out.exists() else missing

    def _join_into_file(self, count: int, schema: pa.Schema, skipped: list[Skipped]) -> list[int]:
        files = set(os.listdir(self.folder))
        missing = [number for number in range(count) if self._part_path(number).name not in files]
        if missing:
            return missing
        # also unlike that of ranks of another number, who may join at the same time
        joined = self.folder / f"whole-{self.rank}-of-{self.world}-{os.getpid()}"
        counts = Counts()
        with _table_writer(joined, schema, self.out.suffix == CSV) as write:
            for number in range(count):
                table = self._read_part(number, schema)
                if table is None:
                    missing.append(number)
                    continue
                of_part = json.loads(
                    pq.read_schema(self._part_path(number)).metadata.get(SKIPPED_KEY, b"[]")
                )
                skipped += (Skipped(*ecg) for ecg in of_part)
                counts = counts.add_table(table, len(of_part))
                if len(table):
                    write(table.replace_schema_metadata(schema.metadata))
        if missing:
            return missing
        if counts.refused and not counts.rows:
            shutil.rmtree(self.folder)
            raise nothing_read_error(counts.refused)
        with open(joined, "rb") as file:
            os.fsync(file.fileno())
        if self.out.suffix == CSV:
            record = {"job": self.job, "bytes": joined.stat().st_size}
            write_whole(job_record_path(self.out), json.dumps(record))
        write_skipped(self.out, skipped)
        os.replace(joined, self.out)
        sync_folder(self.out.parent)
        self.rows, self.counts = counts.rows, counts
        return []

    def __enter__(self) -> "ParquetParts":
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock:
            self._lock.close()
        if self.out.exists():  # the parts are no longer needed, whichever rank joined them
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _table_writer(
    path: Path, schema: pa.Schema, as_csv: bool
) -> Iterator[Callable[[pa.Table], None]]:
    """Appends tables to a file: in parquet, one row group each."""
    if not as_csv:
        with pq.ParquetWriter(path, schema) as writer:
            yield writer.write_table
        return
    with csv.CSVWriter(path, quote_formulas(schema.empty_table()).schema) as writer:
        yield lambda table: writer.write_table(quote_formulas(table))


def skipped_file(out: Path) -> Path:
    """Returns the path beside `out` that lists what was skipped."""
    return out.with_name(f"{out.name}.skipped.csv")


def has_skipped_file(out: Path) -> bool:
    """True if there is such a file, written by this program."""
    try:
        with open(skipped_file(out), "rb") as file:
            return file.readline().strip() == ",".join(Skipped._fields).encode()
    except FileNotFoundError:
        return False


def write_skipped(out: Path, skipped: Sequence[Skipped]) -> None:
    place = skipped_file(out)
    is_own = has_skipped_file(out)
    if skipped:
        if place.exists() and not is_own:
            raise OutputError(f"{place}: is of another program: move it{RESUMABLE}")
        write_whole(place, csv_text([Skipped._fields, *skipped]))
    elif is_own:  # it describes an earlier file of this name
        place.unlink(missing_ok=True)


def job_record_path(out: Path) -> Path:
    """Returns the path of the file that says which job has written a CSV file."""
    return out.with_name(f".{out.name}.job")


def read_job(path: Path) -> Any:
    """Reads the job from a file's metadata, or from the record of a CSV file; None if it is
    missing, damaged, or of an earlier file of this name."""
    try:
        if path.suffix == CSV:
            record = json.loads(job_record_path(path).read_text())
            return record["job"] if record["bytes"] == path.stat().st_size else None
        return json.loads((pq.read_schema(path).metadata or {}).get(JOB_KEY, b"null"))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return None


def make_parts(
    source: CropSource, output: Output, model_input: Input, per: Per, parts: ParquetParts
) -> list[int]:
    """Computes this rank's parts, and joins the file if no part is missing. Returns the missing
    parts."""
    parts.require_columns(output.schema.names)
    missing = parts.missing_parts(source.parts)
    total = source.count_units(parts.own_parts(source.parts))
    with progress_bar(total, source.unit, total - source.count_units(missing), parts.rank) as bar:
        for number, table in part_tables(source, output, model_input, missing, per, bar.update):
            parts.write_part(number, table, source.skipped.get(number, ()))
            if parts.finished:
                break
    return parts.join_parts(source.parts, output.schema, source.left_out)


def whole_table(source: CropSource, output: Output, model_input: Input, per: Per) -> pa.Table:
    """Returns the table of all parts, in memory."""
    numbers = range(source.parts)
    with progress_bar(source.count_units(numbers), source.unit) as bar:
        parts = part_tables(source, output, model_input, numbers, per, bar.update)
        table = pa.concat_tables(table for _, table in parts)
    refused = sum(map(len, source.skipped.values()))
    if refused and not len(table):
        raise nothing_read_error(refused)
    return table


def nothing_read_error(refused: int) -> DataError:
    return DataError(f"no record can be read: {refused:,} skipped, for the reasons above")


def progress_bar(total: int, unit: str, done: int = 0, rank: int = 0) -> "tqdm[None]":
    return tqdm(
        total=total,
        initial=done,
        unit=unit,
        disable=rank > 0 or not is_interactive(),
        dynamic_ncols=True,
    )
