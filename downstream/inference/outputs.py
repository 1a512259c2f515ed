"""Computes the table of a model's outputs for a dataset or single records. The table is made in parts,
so that the work can resume after a kill.

    output = embedding_output(model)                                        # or prediction_output(model)
    with ParquetParts(Path("F.parquet"), job, rank, world) as parts:  # job: all that determines the content, as plain JSON
        missing = compute_parts(source, output, model.input, "crop", parts)
    table = compute_table(source, output, model.input, "half")                # the same without files

`per`: one row for each window of the model (of 5 s: half), each crop's first window, each crop of
10 s (the mean of its windows) or each record (the mean of all its windows). Parts (downstream.inference.ecg_reader) are kept in
F.parquet.parts/ until the table is complete. A damaged part is computed again; a part of another job
is refused. Under torchrun or deepspeed, rank r of W computes parts r, r + W, ..., and the rank that
finishes last joins all parts. Ranks share only the folder, and no rank waits for another. A CSV file
cannot hold the job that wrote it, so the job is kept beside it, in .F.csv.job.
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
from omnilead.engine.settings.errors import ConfigError, Facts, OutputError, join_first_names
from omnilead.engine.settings.leads import ALL_LEADS, describe_leads

from ..tasks.kinds import KINDS, Array
from ..tasks.readout import PAPER_READOUT
from .ecg_reader import CROP_COLUMNS, FLAGS_COLUMN, PATH_COLUMN, CropSource, Per, Skipped
from .trained_model import NOT_FINITE_MESSAGE, TrainedModel

CSV_SUFFIX = ".csv"
EMBEDDING_COLUMN = "embedding"  # name of the column that holds a vector
# The column of predictions with the leads that the model uses but did not get, such as II,V1; null
# if it got all
MISSING_LEADS_COLUMN = "missing_leads"
# A parquet file's metadata say under this key which job wrote the file
JOB_METADATA_KEY = b"omnilead"
# The metadata of a part list under this key the records of the part that could not be read
SKIPPED_METADATA_KEY = b"omnilead.skipped"


class RowCounts(NamedTuple):
    """How many rows a table has, how many of them are doubtful, and how many records could not be
    read."""

    rows: int = 0
    lacking: int = 0  # rows that lack leads that the model uses
    implausible: int = 0  # rows with an implausible amplitude
    refused: int = 0  # records that could not be read

    def add_table(self, table: pa.Table, refused: int) -> "RowCounts":
        """Returns the counts with those of a further table added."""
        lacking = implausible = 0
        if MISSING_LEADS_COLUMN in table.column_names:
            lacking = len(table) - table[MISSING_LEADS_COLUMN].null_count
        if FLAGS_COLUMN in table.column_names:
            of_rows = pc.match_substring(table[FLAGS_COLUMN], IMPLAUSIBLE)
            implausible = pc.sum(of_rows, min_count=0).as_py()
        added = len(table), lacking, implausible, refused
        return RowCounts(*map(sum, zip(self, added, strict=True)))


class Output(NamedTuple):
    """What a model computes for each window, and which columns are made from the means over
    windows."""

    model: TrainedModel
    forward: Callable[[Tensor], Tensor]
    # The table's columns: CROP_COLUMNS, for predictions MISSING_LEADS_COLUMN and PATH_COLUMN, and
    # those that `columns` makes
    schema: pa.Schema
    columns: Callable[[Array], list[pa.Array]]
    what: str  # what the outputs are, for messages, such as "embeddings of 768"
    job: Facts  # settings of the job that embeddings by the paper's read-out do not have
    sentences: Sequence[str] = ()  # notes for the user on how good the model is
    scores: bool = False  # True if the outputs are scores by the model's head


def embedding_output(model: TrainedModel, readout: str = "") -> Output:
    """Returns the output that makes embeddings. `readout`: see downstream.tasks.readout; "" for the
    model's own read-out."""
    parts = model.suitable_readout(readout)
    output = vector_output(model, partial(model.read, readout=parts), model.readout_width(parts))
    return (
        output if parts == (PAPER_READOUT,) else output._replace(job={"readout": "+".join(parts)})
    )


def vector_output(model: TrainedModel, forward: Callable[[Tensor], Tensor], width: int) -> Output:
    """Returns an output that stores the result of `forward` in one column, as vectors of this
    width."""

    def columns(c_ND: Array) -> list[pa.Array]:
        return [pa.FixedSizeListArray.from_arrays(pa.array(c_ND.reshape(-1)), width)]

    schema = pa.schema([*CROP_COLUMNS.items(), (EMBEDDING_COLUMN, pa.list_(pa.float32(), width))])
    return Output(model, forward, schema, columns, f"embeddings of {width}", {})


def embedding_matrix(table: pa.Table) -> Array:
    """Returns the vectors of a table as a matrix with the same rows."""
    return np.asarray(
        table[EMBEDDING_COLUMN].combine_chunks().flatten().to_numpy().reshape(len(table), -1)
    )


def prediction_output(model: TrainedModel) -> Output:
    """Returns the output that makes predictions: probabilities and decisions at the model's
    thresholds, or values in their unit."""
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
        [
            *CROP_COLUMNS.items(),
            (MISSING_LEADS_COLUMN, pa.string()),
            (PATH_COLUMN, pa.string()),
            *fields,
        ]
    )
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise ConfigError(
                f"two columns of the table would be called {name!r}: fine-tune the model with another "
                "name for the label"
            )
    meaning = {
        "task": head.task,
        "kind": head.kind,
        "classes": head.classes,
        "thresholds": head.thresholds,
        "unit": head.unit,
    }
    what = f"predictions of {head.task} ({join_first_names(head.classes, 3)})"
    columns = partial(kind.output_columns, classes=head.classes, thresholds=head.thresholds)
    job = {"predictions": meaning}
    return Output(
        model, model.scores, schema, columns, what, job, head.score_sentences, scores=True
    )


def part_tables(
    source: CropSource,
    output: Output,
    model_input: Input,
    parts: Sequence[int],
    per: Per,
    progress: Callable[[int], Any] = lambda units: None,
) -> Iterator[tuple[int, pa.Table]]:
    """Yields (number, table) of each of these parts."""
    empty = set(parts)

    def prepare_windows(uv_BLT: Tensor, halves_B: Array) -> Tensor:
        # Windows are normalised over the whole crop, so all are made before those after the first
        # are dropped
        x_RLT = model_input.windows(uv_BLT, halves_B)
        if per != "first":
            return x_RLT
        count_B = model_input.count_windows(halves_B)
        first_B = torch.from_numpy(np.cumsum(count_B) - count_B)
        return x_RLT.index_select(0, first_B.to(x_RLT.device))

    with closing(source.read_batches(parts, progress)) as batches:
        crops: Iterable[CropBatch] = batches
        if MISSING_LEADS_COLUMN in output.schema.names:
            crops = mark_missing_leads(batches, output.model.input, model_input)
        outputs = predict(crops, prepare_windows, output.forward, output.model.device)
        for part, group in groupby(outputs, key=lambda batch: batch[0].crops.part):
            empty.remove(part)
            yield part, _part_table(list(group), output, per)
    # These parts have no row, because none of their records or crops could be read
    for part in sorted(empty):
        yield part, output.schema.empty_table()


def mark_missing_leads(
    batches: Iterable[CropBatch], used: Input, shown: Input
) -> Iterator[CropBatch]:
    """Yields the batches with `missing_BL`: True for each lead that the model uses, but that was
    not recorded or is not shown to it."""
    used_L, hidden_L = np.isin(ALL_LEADS, used.seen_leads), ~np.isin(ALL_LEADS, shown.seen_leads)
    for batch in batches:
        missing_BL = used_L & (hidden_L | ~batch.uv_BLT.any(axis=2))
        yield batch._replace(crops=batch.crops._replace(missing_BL=missing_BL))


def _part_table(batches: list[tuple[CropBatch, Array]], output: Output, per: Per) -> pa.Table:
    """Returns the table of a part. The outputs of a row are the means of y_HD over its windows
    H."""
    y_HD = np.concatenate([y_HD for _, y_HD in batches])
    if not np.isfinite(y_HD).all():
        raise OutputError(NOT_FINITE_MESSAGE)
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
        columns[FLAGS_COLUMN] = _joined_flags(crops[FLAGS_COLUMN], crop_H, first_N)
    if per == "half":
        columns["start_s"] = _window_starts(rows, crop_H, output.model.input)
    if MISSING_LEADS_COLUMN in output.schema.names:
        columns[MISSING_LEADS_COLUMN] = _missing_leads(batches, crop_H, first_N)
    if PATH_COLUMN in output.schema.names:
        columns[PATH_COLUMN] = rows[PATH_COLUMN]
    return pa.Table.from_arrays([*columns.values(), *output.columns(y_ND)], schema=output.schema)


def _window_starts(rows: pa.Table, crop_H: Array, model_input: Input) -> pa.Array:
    """Returns the start of each window in seconds. The second window of a crop starts later than
    the crop does."""
    window_H = np.arange(len(crop_H)) - np.searchsorted(crop_H, crop_H)
    return pa.array(rows["start_s"].to_numpy() + window_H * model_input.window_s)


def _joined_flags(flags_B: pa.ChunkedArray, crop_H: Array, first_N: Array) -> pa.Array:
    """Returns the flags of all crops of each row, joined by commas."""
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
    """Returns the names of the leads that are missing in any crop of a row, for each row."""
    missing_BL = np.concatenate([batch.crops.missing_BL for batch, _ in batches])
    missing_NL = np.logical_or.reduceat(missing_BL[crop_H], first_N)
    names = [describe_leads(np.flatnonzero(missing_L)) or None for missing_L in missing_NL]
    return pa.array(names, pa.string())


class ParquetParts:
    """Keeps the parts of a table in a folder, and joins them into one file when all are there."""

    def __init__(self, out: Path, job: Facts, rank: int = 0, world: int = 1) -> None:
        self.out, self.rank, self.world = out, rank, world
        # What is read back from JSON has lists in place of tuples
        self.job = json.loads(json.dumps(job))
        self.folder = out.with_name(f"{out.name}.parts")
        self.finished = out.exists()
        # Number of rows of `out`, known to the rank that has joined the parts. If `out` is a parquet
        # file that was there before, rank 0 knows it
        self.rows: int | None = None
        # The counts of `out`, known only to the rank that has joined the parts
        self.counts = RowCounts()
        self._lock: Any = None
        if not self.finished:
            self._lock_folder()
            return
        self._require_same_job(read_job(out), out)
        if rank == 0 and out.suffix != CSV_SUFFIX:
            self.rows = pq.read_metadata(out).num_rows

    def _lock_folder(self) -> None:
        """Locks the folder for this rank, and raises ConfigError if it has parts of another job."""
        if self.folder.is_file():
            raise ConfigError(
                f"{self.out}: its parts need the folder {self.folder}, which is a file: remove that file, "
                "or choose another name for the output"
            )
        self.folder.mkdir(exist_ok=True)
        lock = self.folder / f"lock-{self.rank}-of-{self.world}"
        with ExitStack() as refused:
            self._lock = refused.enter_context(open(lock, "w"))
            if locked_by_another(self._lock, str(self.out)):
                raise OutputError(
                    f"{self.out}: another process is writing this file: wait for it, or choose another file"
                )
            for path in self.folder.glob("*.parquet"):
                before = read_job(path)
                if before is not None:
                    self._require_same_job(before, self.folder)
            refused.pop_all()  # from here on the lock is held until `__exit__`

    def _require_same_job(self, job: Any, place: Path) -> None:
        """Raises ConfigError if `job`, which wrote the file or folder `place`, is not this job."""
        before = job if isinstance(job, dict) else {}
        for name in sorted(self.job.keys() | before.keys()):
            was, now = before.get(name), self.job.get(name)
            if was != now:
                self._refuse_other_job(place, f"{name} was {str(was)[:60]}, now {str(now)[:60]}")

    def _refuse_other_job(self, place: Path, why: str) -> None:
        """Raises ConfigError, because another job wrote the file or folder `place`. `why`: how that
        job differs from this one."""
        raise ConfigError(
            f"{place}: another job wrote it ({why}): remove it, or choose another file"
        )

    def require_columns(self, names: Sequence[str]) -> None:
        """Raises ConfigError if parts in the folder have other columns, which means that an earlier
        version of this program wrote them."""
        for path in self.folder.glob("*.parquet"):
            try:
                before = pq.read_schema(path).names
            # The part is damaged, or another rank has removed it
            except (pa.ArrowException, OSError):
                continue
            for name in set(names) ^ set(before):
                what = "without" if name in names else "with"
                self._refuse_other_job(self.folder, f"its parts are {what} a column {name}")

    def _read_part(self, number: int, schema: pa.Schema | None = None) -> pa.Table | None:
        """Returns the table of a part; None if the part is missing or damaged."""
        try:
            return pq.read_table(
                self._part_path(number), schema=schema, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError):
            return None

    def _part_path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.parquet"

    def own_parts(self, count: int) -> range:
        """Returns the numbers of the parts that this rank computes, out of `count`."""
        return range(self.rank, count, self.world)

    def missing_parts(self, count: int) -> list[int]:
        """Returns the numbers of those parts of this rank that are missing or damaged; none if the
        whole file exists."""
        numbers = [number for number in self.own_parts(count) if self._read_part(number) is None]
        # `out` is looked for last, because another rank may remove the parts as soon as it exists
        self.finished = self.out.exists()
        return [] if self.finished else numbers

    def write_part(self, number: int, table: pa.Table, skipped: Sequence[Skipped] = ()) -> None:
        """Writes a part. Does nothing if other ranks have completed the file in the meantime."""
        buffer = io.BytesIO()
        facts = {JOB_METADATA_KEY: json.dumps(self.job), SKIPPED_METADATA_KEY: json.dumps(skipped)}
        table = table.replace_schema_metadata(facts)
        pq.write_table(table, buffer, write_page_checksum=True)
        try:
            write_whole(self._part_path(number), buffer.getvalue())
        # A run with another number of ranks has joined all parts and removed the folder
        except FileNotFoundError:
            self.finished = self.out.exists()
            if not self.finished:
                raise

    def join_parts(
        self, count: int, schema: pa.Schema, left_out: Sequence[Skipped] = ()
    ) -> list[int]:
        """Joins all parts into one file, atomically. Returns the numbers of missing parts, which
        other ranks compute. Ranks that finish together may all join the parts, and then write the
        same bytes. `left_out`: ECGs that are in no part."""
        missing: list[int] = []
        try:
            if not self.out.exists():
                facts = schema.with_metadata({JOB_METADATA_KEY: json.dumps(self.job)})
                missing = self._join_into_file(count, facts, list(left_out))
        except FileNotFoundError:  # another rank has joined all parts and removed them
            if not self.out.exists():
                raise
        return [] if self.out.exists() else missing

    def _join_into_file(self, count: int, schema: pa.Schema, skipped: list[Skipped]) -> list[int]:
        """Joins all parts in a temporary file, and renames it to `out`. Returns the numbers of
        missing parts; if there are any, `out` is not written."""
        files = set(os.listdir(self.folder))
        missing = [number for number in range(count) if self._part_path(number).name not in files]
        if missing:
            return missing
        # The name includes the number of ranks and the process, because a run with another number
        # of ranks may join the parts at the same time
        joined = self.folder / f"whole-{self.rank}-of-{self.world}-{os.getpid()}"
        counts = RowCounts()
        with _table_writer(joined, schema, self.out.suffix == CSV_SUFFIX) as write:
            for number in range(count):
                table = self._read_part(number, schema)
                if table is None:
                    missing.append(number)
                    continue
                of_part = json.loads(
                    pq.read_schema(self._part_path(number)).metadata.get(
                        SKIPPED_METADATA_KEY, b"[]"
                    )
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
        if self.out.suffix == CSV_SUFFIX:
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
        # The parts are not needed any more, even if another rank has joined them
        if self.out.exists():
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _table_writer(
    path: Path, schema: pa.Schema, as_csv: bool
) -> Iterator[Callable[[pa.Table], None]]:
    """Yields a function that appends a table to the file. In parquet, each table becomes a row
    group."""
    if not as_csv:
        with pq.ParquetWriter(path, schema) as writer:
            yield writer.write_table
        return
    with csv.CSVWriter(path, quote_formulas(schema.empty_table()).schema) as writer:
        yield lambda table: writer.write_table(quote_formulas(table))


def skipped_file(out: Path) -> Path:
    """Returns the path of the file beside `out` that lists the skipped ECGs."""
    return out.with_name(f"{out.name}.skipped.csv")


def has_skipped_file(out: Path) -> bool:
    """Returns True if `out` has a file of skipped ECGs that this program has written."""
    try:
        with open(skipped_file(out), "rb") as file:
            return file.readline().strip() == ",".join(Skipped._fields).encode()
    except FileNotFoundError:
        return False


def write_skipped(out: Path, skipped: Sequence[Skipped]) -> None:
    """Writes the file that lists the skipped ECGs. If there are none, removes such a file of an
    earlier job."""
    place = skipped_file(out)
    is_own = has_skipped_file(out)
    if skipped:
        if place.exists() and not is_own:
            raise OutputError(f"{place}: another program wrote this file: move it{RESUMABLE}")
        write_whole(place, csv_text([Skipped._fields, *skipped]))
    elif is_own:
        # an earlier job with the same `out` left this list, and this job has skipped no ECG
        place.unlink(missing_ok=True)


def job_record_path(out: Path) -> Path:
    """Returns the path of the file that says which job wrote a CSV file."""
    return out.with_name(f".{out.name}.job")


def read_job(path: Path) -> Any:
    """Returns the job that wrote a file, from the metadata of a parquet file, or from the record
    beside a CSV file. None if the record is missing, damaged, or about an earlier CSV file of the
    same name."""
    try:
        if path.suffix == CSV_SUFFIX:
            record = json.loads(job_record_path(path).read_text())
            return record["job"] if record["bytes"] == path.stat().st_size else None
        return json.loads((pq.read_schema(path).metadata or {}).get(JOB_METADATA_KEY, b"null"))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return None


def compute_parts(
    source: CropSource, output: Output, model_input: Input, per: Per, parts: ParquetParts
) -> list[int]:
    """Computes this rank's parts, and joins all parts into the file if none is missing. Returns the
    numbers of the missing parts."""
    parts.require_columns(output.schema.names)
    missing = parts.missing_parts(source.parts)
    total = source.count_units(parts.own_parts(source.parts))
    with progress_bar(total, source.unit, total - source.count_units(missing), parts.rank) as bar:
        for number, table in part_tables(source, output, model_input, missing, per, bar.update):
            parts.write_part(number, table, source.skipped.get(number, ()))
            if parts.finished:
                break
    return parts.join_parts(source.parts, output.schema, source.left_out)


def compute_table(source: CropSource, output: Output, model_input: Input, per: Per) -> pa.Table:
    """Returns the table of all parts, which is computed in memory."""
    numbers = range(source.parts)
    with progress_bar(source.count_units(numbers), source.unit) as bar:
        parts = part_tables(source, output, model_input, numbers, per, bar.update)
        table = pa.concat_tables(table for _, table in parts)
    refused = sum(map(len, source.skipped.values()))
    if refused and not len(table):
        raise nothing_read_error(refused)
    return table


def nothing_read_error(refused: int) -> DataError:
    """Returns the error for data of which no record can be read."""
    return DataError(f"no record can be read: {refused:,} skipped, for the reasons above")


def progress_bar(total: int, unit: str, done: int = 0, rank: int = 0) -> "tqdm[None]":
    return tqdm(
        total=total,
        initial=done,
        unit=unit,
        disable=rank > 0 or not is_interactive(),
        dynamic_ncols=True,
    )
