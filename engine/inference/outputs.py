"""A model's outputs for a dataset or single records as a table, made in parts, so that the work can
resume after a kill.

    output = embeddings(model)                                        # or predictions(model)
    with ParquetParts(Path("F.parquet"), job, rank, world) as parts:  # job: all that determines the content, as plain JSON
        missing = make(source, output, model.input, "crop", parts)
    table = whole(source, output, model.input, "half")                # the same without files

`per`: one row for each half of 5 s, each crop's first half, each crop of 10 s (the mean of its
halves) or each record (the mean of all its halves). Parts (engine.inference.inputs) are kept in
F.parquet.parts/ until the table is complete; a damaged part is computed again, one of another job
is refused. Under torchrun or deepspeed, rank r of W computes parts r, r + W, ..., and the rank that
finishes last joins all of them. Ranks share nothing but the folder: none waits for another.
"""

import fcntl
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import csv
from torch import Tensor
from tqdm.auto import tqdm

from omnilead.data_tools.cli import interactive
from omnilead.data_tools.dataset import without_formulas
from omnilead.engine.common import ALL, ConfigError, OutputError, describe_leads, sync, write_whole
from omnilead.engine.data.augmenter import FS_HZ, HALF
from omnilead.engine.inference.inputs import COLUMNS, CropSource, Per
from omnilead.engine.inference.predict import CropBatch, predict
from omnilead.engine.inference.trained_model import NOT_FINITE, TrainedModel
from omnilead.engine.model.input import Input

CSV = ".csv"
RESUMABLE = ": run the same command again to resume"
VECTOR = "embedding"  # a column
# a column of predictions: leads that the model uses but did not get, such as II,V1; null: none
MISSING = "missing_leads"
KEY = b"omnilead"  # in a parquet file's metadata: the job


class Output(NamedTuple):
    """A model's outputs for each half of 5 s, and the columns made from their means."""

    model: TrainedModel
    forward: Callable[[Tensor], Tensor]
    schema: pa.Schema  # COLUMNS, perhaps MISSING, and those that `columns` makes
    columns: Callable[[np.ndarray], list[pa.Array]]
    what: str  # for messages
    job: dict[str, Any]  # what distinguishes it from embeddings


def embeddings(model: TrainedModel) -> Output:
    return vectors(model, model.pooled, model.encoder.width)


def vectors(model: TrainedModel, forward: Callable[[Tensor], Tensor], width: int) -> Output:
    """What `forward` gives, in one column."""

    def columns(c_ND: np.ndarray) -> list[pa.Array]:
        return [pa.FixedSizeListArray.from_arrays(pa.array(c_ND.reshape(-1)), width)]

    described = pa.schema([*COLUMNS.items(), (VECTOR, pa.list_(pa.float32(), width))])
    return Output(model, forward, described, columns, f"embeddings of {width}", {})


def matrix(table: pa.Table) -> np.ndarray:
    """The vectors of a table, one row each."""
    return np.asarray(table[VECTOR].combine_chunks().flatten().to_numpy().reshape(len(table), -1))


def predictions(model: TrainedModel) -> Output:
    """Probabilities and the decisions at the model's thresholds, or values in their unit."""
    head = model.head_info
    if head is None or not head.classes:
        what = (
            "only pre-trained"
            if head is None
            else f"fine-tuned for {head.task}, which needs no classes"
        )
        raise ConfigError(
            f"the model was {what}: fine-tune it with `omnilead finetune`, or use `omnilead embed`"
        )
    number = pa.float32()
    if head.kind == "regression":
        fields = [(f"{name}_{head.unit}" if head.unit else name, number) for name in head.classes]
    elif head.kind == "multiclass":
        fields = [("predicted", pa.string()), *((name, number) for name in head.classes)]
    else:
        fields = [
            one
            for name in head.classes
            for one in ((name, number), (f"{name}_predicted", pa.bool_()))
        ]
    described = pa.schema([*COLUMNS.items(), (MISSING, pa.string()), *fields])
    if twice := [name for name in described.names if described.names.count(name) > 1]:
        raise ConfigError(
            f"two columns would be called {twice[0]!r}: fine-tune the model with another name for "
            "that label"
        )

    def columns(y_NK: np.ndarray) -> list[pa.Array]:
        scores = [pa.array(y_N) for y_N in y_NK.T]
        if head.kind == "regression":
            return scores
        if head.kind == "multiclass":
            return [pa.array(head.classes).take(pa.array(y_NK.argmax(1))), *scores]
        decisions = (y_NK > np.array(head.thresholds)).T
        return [one for pair in zip(scores, map(pa.array, decisions), strict=True) for one in pair]

    meaning = {
        "task": head.task,
        "kind": head.kind,
        "classes": head.classes,
        "thresholds": head.thresholds,
        "unit": head.unit,
    }
    what = (
        f"predictions of {head.task} "
        f"({', '.join(head.classes[:3])}{', ...' * (len(head.classes) > 3)})"
    )
    return Output(model, model.scores, described, columns, what, {"predictions": meaning})


def tables(
    source: CropSource,
    output: Output,
    model_input: Input,
    parts: Sequence[int],
    per: Per,
    progress: Callable[[int], Any] = lambda units: None,
) -> Iterator[tuple[int, pa.Table]]:
    """Yields the table of each part."""
    empty = set(parts)

    def prepare(uv_BLT: Tensor, halves_B: np.ndarray) -> Tensor:
        x_RLT = model_input.halves(uv_BLT, halves_B)  # normalised over the whole crop
        first_B = torch.from_numpy(np.cumsum(halves_B, dtype=np.int64) - halves_B)
        return x_RLT.index_select(0, first_B.to(x_RLT.device)) if per == "first" else x_RLT

    with closing(source.batches(parts, progress)) as batches:
        noted = MISSING in output.schema.names
        crops = with_missing_leads(batches, output.model.input, model_input) if noted else batches
        given = predict(crops, prepare, output.forward, output.model.device)
        for part, group in groupby(given, key=lambda batch: batch[0].crops.part):
            empty.remove(part)
            yield part, _table(list(group), output, per)
    for part in sorted(empty):  # none of its records or crops could be read
        yield part, output.schema.empty_table()


def with_missing_leads(
    batches: Iterable[CropBatch], used: Input, shown: Input
) -> Iterator[CropBatch]:
    """Notes which of the leads that the model uses were not recorded, or are not shown to it."""
    bit_L = np.array([1 << lead if lead in used.seen else 0 for lead in ALL], np.int16)
    hidden_L = ~np.isin(ALL, shown.seen)
    for batch in batches:
        missing_BL = hidden_L | ~batch.uv_BLT.any(axis=2)
        yield batch._replace(crops=batch.crops._replace(missing_B=missing_BL @ bit_L))


def _table(given: list[tuple[CropBatch, np.ndarray]], output: Output, per: Per) -> pa.Table:
    crops = pa.concat_tables([batch.crops.table.select(list(COLUMNS)) for batch, _ in given])
    halves_B = np.concatenate([batch.halves_B for batch, _ in given])
    crop_H = np.repeat(np.arange(len(crops)), 1 if per == "first" else halves_B)
    record_B = np.concatenate([batch.crops.record_B for batch, _ in given])
    y_HD = np.concatenate([y_HD for _, y_HD in given])
    if not np.isfinite(y_HD).all():
        raise OutputError(NOT_FINITE)
    group_H = {
        "half": np.arange(len(crop_H)),
        "first": crop_H,
        "crop": crop_H,
        "record": record_B[crop_H],
    }[per]
    first = np.flatnonzero(np.diff(group_H, prepend=-1))
    y_ND = np.add.reduceat(y_HD, first) / np.diff(first, append=len(y_HD))[:, None].astype(
        np.float32
    )
    rows = crops.take(crop_H[first])
    if MISSING in output.schema.names:
        missing_B = np.concatenate([batch.crops.missing_B for batch, _ in given])
        missing_N = np.bitwise_or.reduceat(
            missing_B[crop_H], first
        )  # of a record: in any of its crops
        names = [
            describe_leads(lead for lead in ALL if bits >> lead & 1) or None
            for bits in missing_N.tolist()
        ]
        rows = rows.append_column(MISSING, pa.array(names, pa.string()))
    if per == "half":
        second_H = np.diff(crop_H, prepend=-1) == 0
        starts = pa.array(rows["start_s"].to_numpy() + second_H * (HALF / FS_HZ))
        rows = rows.set_column(rows.column_names.index("start_s"), "start_s", starts)
    return pa.Table.from_arrays([*rows.columns, *output.columns(y_ND)], schema=output.schema)


class ParquetParts:
    def __init__(self, out: Path, job: dict[str, Any], rank: int = 0, world: int = 1) -> None:
        self.out, self.job, self.folder = (
            out,
            json.loads(json.dumps(job)),
            out.with_name(f"{out.name}.parts"),
        )
        self.rank, self.world, self.finished = rank, world, out.exists()
        self.rows: int | None = None  # of `out`, on the rank that has joined it
        self.lacking = 0  # rows with missing leads, on that rank
        self._lock: Any = None
        if self.finished:
            if out.suffix != CSV:
                self._require_same(_job_of(out), out)
                self.rows = None if rank else pq.read_metadata(out).num_rows
            return
        if self.folder.is_file():
            raise ConfigError(f"{out}: {self.folder} is a file: remove it, or choose another file")
        self.folder.mkdir(exist_ok=True)
        self._lock = open(self.folder / f"lock-{rank}-of-{world}", "w")  # noqa: SIM115 - held until the end
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"{out}: another process is writing it") from None
        except OSError:  # a file system without locks: two processes would write the same bytes
            pass
        for path in self.folder.glob("*.parquet"):
            if (before := _job_of(path)) is not None:
                self._require_same(before, self.folder)

    def _require_same(self, job: Any, place: Path) -> None:
        before = job if isinstance(job, dict) else {}
        if differ := sorted(
            name
            for name in self.job.keys() | before.keys()
            if self.job.get(name) != before.get(name)
        ):
            was, now = (str(job.get(differ[0]))[:60] for job in (before, self.job))
            raise ConfigError(
                f"{place}: of another job: {differ[0]} was {was}, now {now}: remove it, or choose "
                "another file"
            )

    def _read(self, number: int, described: pa.Schema | None = None) -> pa.Table | None:
        """A part's table; None if it is missing or damaged."""
        try:
            return pq.read_table(
                self._path(number), schema=described, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError):
            return None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.parquet"

    def missing(self, count: int) -> list[int]:
        """This rank's parts that are still missing or damaged."""
        numbers = [
            number for number in range(self.rank, count, self.world) if self._read(number) is None
        ]
        self.finished = (
            self.out.exists()
        )  # checked last: another rank removes the parts only after this file exists
        return [] if self.finished else numbers

    def write(self, number: int, table: pa.Table) -> None:
        buffer = io.BytesIO()
        pq.write_table(
            table.replace_schema_metadata({KEY: json.dumps(self.job)}),
            buffer,
            write_page_checksum=True,
        )
        write_whole(self._path(number), buffer.getvalue())

    def join(self, count: int, described: pa.Schema) -> list[int]:
        """Joins all parts into one file, atomically. Returns the missing parts, which are other
        ranks'. Ranks that finish together may all join: they write the same bytes."""
        try:
            missing = (
                []
                if self.out.exists()
                else self._join(count, described.with_metadata({KEY: json.dumps(self.job)}))
            )
        except FileNotFoundError:  # another rank has joined the parts and removed them
            if not self.out.exists():
                raise
        return [] if self.out.exists() else missing

    def _join(self, count: int, described: pa.Schema) -> list[int]:
        there, whole = set(os.listdir(self.folder)), self.folder / f"whole-{self.rank}"
        missing = [number for number in range(count) if self._path(number).name not in there]
        if missing:
            return missing
        rows, lacking, as_csv = 0, 0, self.out.suffix == CSV
        written = without_formulas(described.empty_table()).schema if as_csv else described
        with (csv.CSVWriter if as_csv else pq.ParquetWriter)(whole, written) as writer:
            for number in range(count):
                table = self._read(number, described)
                if table is None:
                    missing.append(number)
                elif len(table):
                    table = table.replace_schema_metadata(described.metadata)
                    writer.write_table(
                        without_formulas(table) if as_csv else table
                    )  # one row group in parquet
                    rows += len(table)
                    lacking += (
                        len(table) - table[MISSING].null_count
                        if MISSING in table.column_names
                        else 0
                    )
        if missing:
            return missing
        with open(whole, "rb") as file:
            os.fsync(file.fileno())
        os.replace(whole, self.out)
        sync(self.out.parent)
        self.rows, self.lacking = rows, lacking
        return []

    def __enter__(self) -> "ParquetParts":
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock:
            self._lock.close()
        if self.out.exists():  # the parts are no longer needed, whichever rank joined them
            shutil.rmtree(self.folder, ignore_errors=True)


def _job_of(path: Path) -> Any:
    """The job in a file's metadata; None if it has none or is damaged."""
    try:
        return json.loads((pq.read_schema(path).metadata or {}).get(KEY, b"null"))
    except (pa.ArrowException, OSError, ValueError):
        return None


def make(
    source: CropSource, output: Output, model_input: Input, per: Per, parts: ParquetParts
) -> list[int]:
    """Computes this rank's parts, and joins the file if no part is missing. Returns the missing
    parts."""
    mine = range(parts.rank, source.parts, parts.world)
    missing, total = parts.missing(source.parts), source.count(mine)
    with progress_bar(total, source.unit, total - source.count(missing), parts.rank) as bar:
        for number, table in tables(source, output, model_input, missing, per, bar.update):
            parts.write(number, table)
    return parts.join(source.parts, output.schema)


def whole(source: CropSource, output: Output, model_input: Input, per: Per) -> pa.Table:
    """The table of all parts, in memory."""
    parts = range(source.parts)
    with progress_bar(source.count(parts), source.unit) as bar:
        return pa.concat_tables(
            table for _, table in tables(source, output, model_input, parts, per, bar.update)
        )


def progress_bar(total: int, unit: str, done: int = 0, rank: int = 0) -> "tqdm[None]":
    return tqdm(
        total=total,
        initial=done,
        unit=unit,
        disable=rank > 0 or not interactive(),
        dynamic_ncols=True,
    )
