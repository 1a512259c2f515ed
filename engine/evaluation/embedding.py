"""Writes a model's outputs for a dataset or single records as a table, in parts, so that it can resume after a kill.

    output = embeddings(model)                                        # or predictions(model)
    with ParquetParts(Path("F.parquet"), job, rank, world) as parts:  # job: all that determines the content, as plain JSON
        for number, table in tables(source, output, model.input, parts.missing(source.parts), "crop"):
            parts.write(number, table)
        parts.join(source.parts, output.schema)

`per`: one row for each half of 5 s, each crop of 10 s (the mean of its halves) or each record (the mean of all its halves).
Parts (engine.evaluation.inputs) are kept in F.parquet.parts/ until the table is complete; a damaged part is computed again, one
of another job is refused. Under torchrun or deepspeed, rank r of W computes parts r, r + W, ..., and the rank that finishes
last joins all of them. Ranks share nothing but the folder: none waits for another.
"""

import argparse
import errno
import fcntl
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
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

from data_tools.cli import interactive, keep_freed_memory, show
from data_tools.dataset import DataError
from engine.common import ConfigError, OutputError, cores_per_rank, environment, sync, write_whole, writing
from engine.data.augmenter import FS_HZ, HALF
from engine.data.preprocess import Input
from engine.evaluation.inputs import COLUMNS, CropSource, Per, dataset_of, dataset_source, open_data
from engine.evaluation.predict import CropBatch, predict
from engine.evaluation.probe import labels_to_probe, probe, probe_rows, report
from engine.evaluation.results import nullable
from engine.model.inference import NOT_FINITE, TrainedModel, load
from engine.model.kernels import chosen_device

CSV = ".csv"
SHOWN = 8  # numbers in a message
KEY = b"omnilead"  # in a parquet file's metadata: the job
RESUMABLE = ": run the same command again to resume"
PERMANENT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)  # the same command would fail again


class Output(NamedTuple):
    """A model's outputs for each half of 5 s, and the columns made from their means."""

    model: TrainedModel
    forward: Callable[[Tensor], Tensor]
    schema: pa.Schema  # COLUMNS, and those that `columns` makes
    columns: Callable[[np.ndarray], list[pa.Array]]
    what: str  # for messages
    job: dict[str, Any]  # what distinguishes it from embeddings


def embeddings(model: TrainedModel) -> Output:
    width = model.encoder.width

    def columns(c_ND: np.ndarray) -> list[pa.Array]:
        return [pa.FixedSizeListArray.from_arrays(pa.array(c_ND.reshape(-1)), width)]

    described = pa.schema([*COLUMNS.items(), ("embedding", pa.list_(pa.float32(), width))])
    return Output(model, model.pooled, described, columns, f"embeddings of {width}", {})


def predictions(model: TrainedModel) -> Output:
    """Probabilities and the decisions at the model's thresholds, or values in their unit."""
    head = model.head_info
    if head is None or not head.classes:
        what = "only pre-trained" if head is None else f"fine-tuned for {head.task}, which needs no classes"
        raise ConfigError(f"the model was {what}: fine-tune it with `omnilead finetune`, or use `omnilead embed`")
    number = pa.float32()
    if head.kind == "regression":
        fields = [(f"{name}_{head.unit}" if head.unit else name, number) for name in head.classes]
    elif head.kind == "multiclass":
        fields = [("predicted", pa.string()), *((name, number) for name in head.classes)]
    else:
        fields = [one for name in head.classes for one in ((name, number), (f"{name}_predicted", pa.bool_()))]
    described = pa.schema([*COLUMNS.items(), *fields])
    if twice := [name for name in described.names if described.names.count(name) > 1]:
        raise ConfigError(f"two columns would be called {twice[0]!r}: fine-tune the model with another name for that label")

    def columns(y_NK: np.ndarray) -> list[pa.Array]:
        scores = [pa.array(y_N) for y_N in y_NK.T]
        if head.kind == "regression":
            return scores
        if head.kind == "multiclass":
            return [pa.array(head.classes).take(pa.array(y_NK.argmax(1))), *scores]
        decisions = (y_NK > np.array(head.thresholds)).T
        return [one for pair in zip(scores, map(pa.array, decisions), strict=True) for one in pair]

    meaning = {"task": head.task, "kind": head.kind, "classes": head.classes, "thresholds": head.thresholds, "unit": head.unit}
    what = f"predictions of {head.task} ({', '.join(head.classes[:3])}{', ...' * (len(head.classes) > 3)})"
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
    with closing(source.batches(parts, progress)) as batches:
        given = predict(batches, model_input.halves, output.forward, output.model.device)
        for part, group in groupby(given, key=lambda batch: batch[0].crops.part):
            empty.remove(part)
            yield part, _table(list(group), output, per)
    for part in sorted(empty):  # none of its records or crops could be read
        yield part, output.schema.empty_table()


def _table(given: list[tuple[CropBatch, np.ndarray]], output: Output, per: Per) -> pa.Table:
    crops = pa.concat_tables([batch.crops.table.select(list(COLUMNS)) for batch, _ in given])
    crop_H = np.repeat(np.arange(len(crops)), np.concatenate([batch.halves_B for batch, _ in given]))
    record_B = np.concatenate([batch.crops.record_B for batch, _ in given])
    y_HD = np.concatenate([y_HD for _, y_HD in given])
    if not np.isfinite(y_HD).all():
        raise ConfigError(NOT_FINITE)
    group_H = {"half": np.arange(len(crop_H)), "crop": crop_H, "record": record_B[crop_H]}[per]
    first = np.flatnonzero(np.diff(group_H, prepend=-1))
    y_ND = np.add.reduceat(y_HD, first) / np.diff(first, append=len(y_HD))[:, None].astype(np.float32)
    rows = crops.take(crop_H[first])
    if per == "half":
        second_H = np.diff(crop_H, prepend=-1) == 0
        starts = pa.array(rows["start_s"].to_numpy() + second_H * (HALF / FS_HZ))
        rows = rows.set_column(rows.column_names.index("start_s"), "start_s", starts)
    return pa.Table.from_arrays([*rows.columns, *output.columns(y_ND)], schema=output.schema)


class ParquetParts:
    def __init__(self, out: Path, job: dict[str, Any], rank: int = 0, world: int = 1) -> None:
        self.out, self.job, self.folder = out, json.loads(json.dumps(job)), out.with_name(f"{out.name}.parts")
        self.rank, self.world, self.finished = rank, world, out.exists()
        self.rows: int | None = None  # of `out`, on the rank that has joined it
        self._lock: Any = None
        if self.finished:
            if out.suffix != CSV:
                self._require_same(_job_of(out), out)
                self.rows = None if rank else pq.read_metadata(out).num_rows
            return
        if self.folder.is_file():
            raise ConfigError(f"--out {out}: {self.folder} is a file: remove it, or choose another --out")
        self.folder.mkdir(exist_ok=True)
        self._lock = open(self.folder / f"lock-{rank}-of-{world}", "w")  # noqa: SIM115 - held until the end
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out {out}: another process is writing it") from None
        except OSError:  # a file system without locks: two processes would write the same bytes
            pass
        for path in self.folder.glob("*.parquet"):
            if (before := _job_of(path)) is not None:
                self._require_same(before, path)

    def _require_same(self, job: Any, place: Path) -> None:
        before = job if isinstance(job, dict) else {}
        if differ := sorted(name for name in self.job.keys() | before.keys() if self.job.get(name) != before.get(name)):
            was, now = (str(job.get(differ[0]))[:60] for job in (before, self.job))
            raise ConfigError(f"{place}: of another job: {differ[0]} was {was}, now {now}: remove it, or choose another --out")

    def _read(self, number: int, described: pa.Schema | None = None) -> pa.Table | None:
        """A part's table; None if it is missing or damaged."""
        try:
            return pq.read_table(self._path(number), schema=described, page_checksum_verification=True)
        except (pa.ArrowException, OSError):
            return None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.parquet"

    def missing(self, count: int) -> list[int]:
        """This rank's parts that are still missing or damaged."""
        numbers = [number for number in range(self.rank, count, self.world) if self._read(number) is None]
        self.finished = self.out.exists()  # checked last: another rank removes the parts only after this file exists
        return [] if self.finished else numbers

    def write(self, number: int, table: pa.Table) -> None:
        buffer = io.BytesIO()
        pq.write_table(table.replace_schema_metadata({KEY: json.dumps(self.job)}), buffer, write_page_checksum=True)
        write_whole(self._path(number), buffer.getvalue())

    def join(self, count: int, described: pa.Schema) -> list[int]:
        """Joins all parts into one file, atomically. Returns the missing parts, which are other ranks'. Ranks that finish
        together may all join: they write the same bytes."""
        try:
            missing = [] if self.out.exists() else self._join(count, described.with_metadata({KEY: json.dumps(self.job)}))
        except FileNotFoundError:  # another rank has joined the parts and removed them
            if not self.out.exists():
                raise
        return [] if self.out.exists() else missing

    def _join(self, count: int, described: pa.Schema) -> list[int]:
        there, whole = set(os.listdir(self.folder)), self.folder / f"whole-{self.rank}"
        missing = [number for number in range(count) if self._path(number).name not in there]
        if missing:
            return missing
        rows = 0
        with (csv.CSVWriter if self.out.suffix == CSV else pq.ParquetWriter)(whole, described) as writer:
            for number in range(count):
                table = self._read(number, described)
                if table is None:
                    missing.append(number)
                elif len(table):
                    writer.write_table(table.replace_schema_metadata(described.metadata))  # one row group in parquet
                    rows += len(table)
        if missing:
            return missing
        with open(whole, "rb") as file:
            os.fsync(file.fileno())
        os.replace(whole, self.out)
        sync(self.out.parent)
        self.rows = rows
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


def command(name: str, args: argparse.Namespace, work: Callable[[argparse.Namespace], int]) -> int:
    """Runs engine.embed, engine.predict or engine.bench after their arguments are read; returns the exit code."""
    resumable = RESUMABLE if args.out else ""
    try:
        return work(args)
    except (ConfigError, DataError) as error:
        message, code = str(error), 2
    except OutputError as error:
        message, code = str(error), 1
    except OSError as error:
        ours = args.out and str(error.filename or args.out).startswith(str(args.out))
        place = f"--out {args.out}" if ours or not error.filename else error.filename
        code = 2 if error.errno in PERMANENT else 1
        message = f"{place}: {error.strerror or error}{resumable * (code == 1)}"
    except KeyboardInterrupt:
        message, code = f"interrupted{resumable}", 130
    rank = os.environ.get("RANK", "0")
    if rank == "0" or args.began:  # before that, every rank has the same error
        of_rank = f"rank {rank}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        print(f"{name}: {of_rank}{' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def run(args: argparse.Namespace, output_of: Callable[[TrainedModel], Output]) -> int:
    (rank, world, _), cores = environment(), cores_per_rank()
    args.device = str(chosen_device(args.device))
    on_gpu = args.device.startswith("cuda")
    args.batch = args.batch or (256 if on_gpu else 16)
    args.workers = args.workers or (cores if on_gpu else max(1, cores // 4))
    model, model_input = prepare_model(args)
    output = output_of(model)
    if args.out is None:
        if world > 1:
            raise ConfigError(f"WORLD_SIZE={world}: probes are computed by one process: start it without deepspeed or torchrun")
        return score(args, output, model_input)
    job = {"model": model.digest, "leads": args.leads, "per": args.per, "batch": args.batch, "precision": args.precision}
    job |= {"device": torch.device(args.device).type, "on_corrupt": args.on_corrupt}
    identity, opened = open_data(args, model_input)
    with ParquetParts(args.out, job | output.job | identity, rank, world) as parts:
        left = [] if parts.finished else make(args, opened(), output, model_input, parts)
    if left and world == 1:
        raise OutputError(f"{args.out}: part {left[0]} cannot be read back{RESUMABLE}")
    if left:
        numbers = ", ".join(map(str, left[:SHOWN])) + ", ..." * (len(left) > SHOWN)
        return show(f"rank {rank} of {world}: done; others compute parts {numbers} (none runs? start the same command again)\n")
    return 0 if parts.rows is None else show(f"{args.out}: {parts.rows:,} {output.what}, computed in {args.precision}\n")


def make(args: argparse.Namespace, source: CropSource, output: Output, model_input: Input, parts: ParquetParts) -> list[int]:
    """Computes this rank's parts, and joins the file if no part is missing. Returns the missing parts."""
    mine = range(parts.rank, source.parts, parts.world)
    missing, total = parts.missing(source.parts), source.count(mine)
    args.began = True
    with progress_bar(total, source.unit, total - source.count(missing), parts.rank) as bar:
        for number, table in tables(source, output, model_input, missing, args.per, bar.update):
            parts.write(number, table)
    return parts.join(source.parts, output.schema)


def progress_bar(total: int, unit: str, done: int = 0, rank: int = 0) -> "tqdm[None]":
    return tqdm(total=total, initial=done, unit=unit, disable=rank > 0 or not interactive())


def score(args: argparse.Namespace, output: Output, model_input: Input) -> int:
    if (dataset := dataset_of(args)) is None:
        raise ConfigError(f"--data {args.data[0]}: a probe needs a dataset with splits: make one with `omnilead shard`")
    labels = labels_to_probe(dataset, args.task, args.labels)
    source = dataset_source(args, dataset, model_input, probe_rows(dataset, labels))
    parts = range(source.parts)
    with progress_bar(source.count(parts), source.unit) as bar:
        halves = pa.concat_tables(table for _, table in tables(source, output, model_input, parts, args.per, bar.update))
    scores = probe(dataset, halves, labels) | {"precision": args.precision}
    if args.json:
        with writing(args.json, "--json"):
            write_whole(args.json, json.dumps(nullable(scores), indent=1) + "\n")
    return show(report(scores) + "\n")


def prepare_model(args: argparse.Namespace) -> tuple[TrainedModel, Input]:
    """The model on its device, and its input."""
    device = chosen_device(args.device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_rank())
    keep_freed_memory()
    model = load(args.model, args.code)
    if args.precision == "auto":
        args.precision = "bf16" if device.type == "cuda" and model.history.get("precision") == "bf16" else "fp32"
    model.to(device, torch.bfloat16 if args.precision == "bf16" else torch.float32)
    return model, model.input.limited_to(args.leads) if args.leads else model.input
