"""Embeddings of a dataset or of single records as a parquet file, in parts: killed and started again, it goes on.

    source = DatasetSource(dataset, rows, batch, per="crop")          # or RecordSource(count, read, batch, workers)
    with ParquetParts(Path("F.parquet"), job) as parts:               # job: all that decides the content, as plain JSON
        for number, table in tables(source, model, model.input, parts.missing(source.parts), "crop"):
            parts.write(number, table)
        parts.join(source.parts, schema(width))

`per`: one row for each half of 5 s, each crop of 10 s (the mean of its halves) or each record (the mean of all its halves). A
part is always the same PART_BATCHES batches, so the result does not depend on where a run was stopped. Parts are kept in
F.parquet.parts/ until the table is complete; a damaged part is made again, those of another job are refused.
"""

import fcntl
import io
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_tools.dataset import Dataset
from engine.common import ConfigError, sync, write_whole
from engine.data.augmenter import FS_HZ, HALF
from engine.data.preprocess import Input
from engine.evaluation.predict import CropBatch, dataset_batches, predict
from engine.model.inference import NOT_FINITE, TrainedModel

Per = Literal["crop", "record", "half"]
PART_BATCHES = 16
COLUMNS = {"source": pa.string(), "record": pa.string(), "patient": pa.string(), "row": pa.int64(), "start_s": pa.float64()}
KEY = b"omnilead"  # of a parquet file's metadata: the job


def schema(width: int) -> pa.Schema:
    return pa.schema([*COLUMNS.items(), ("embedding", pa.list_(pa.float32(), width))])


class EmbeddedCrops(NamedTuple):
    """What a CropBatch of a source consists of."""

    part: int
    table: pa.Table  # COLUMNS, one row for each crop
    record_B: np.ndarray  # numbers the records, ascending


class DatasetSource:
    """Crops of a dataset. A source has `parts`, `count` (units in some of them) and `batches`, which calls `progress` with the
    units that were read."""

    unit = " crops"

    def __init__(self, dataset: Dataset, rows: np.ndarray, batch: int, per: Per, **reading: Any) -> None:
        """`rows`: the order of the crops; with per="record" they are sorted by record. `reading`: see dataset_batches."""
        self.dataset, self.batch, self.reading = dataset, batch, reading
        self.table = dataset.table([name for name in COLUMNS if name != "row"])
        self.table = self.table.append_column("row", pa.array(np.arange(len(dataset))))
        self.record = np.arange(len(rows))
        if per == "record":
            chosen = self.table.take(rows).sort_by([(name, "ascending") for name in ("source", "record", "start_s")])
            rows = chosen["row"].to_numpy()
            names = pc.binary_join_element_wise(chosen["source"], chosen["record"], "\t").combine_chunks()
            self.record = np.cumsum(np.diff(names.dictionary_encode().indices.to_numpy(), prepend=0) != 0)
        first = np.flatnonzero(np.diff(self.record, prepend=-1))  # a part begins with a record
        begins = first[np.searchsorted(first, np.arange(0, len(rows), batch * PART_BATCHES), side="right") - 1]
        self.rows, self.begins = rows, np.append(np.unique(begins), len(rows))
        self.parts = len(self.begins) - 1

    def count(self, parts: Iterable[int]) -> int:
        return sum(int(self.begins[part + 1] - self.begins[part]) for part in parts)

    def batches(self, parts: Sequence[int], progress: Callable[[int], Any]) -> Generator[CropBatch, None, None]:
        spans = (range(self.begins[part], self.begins[part + 1]) for part in parts)
        rows = [self.rows[span[at : at + self.batch]] for span in spans for at in range(0, len(span), self.batch)]
        position = np.empty(len(self.dataset), np.int64)
        position[self.rows] = np.arange(len(self.rows))
        for batch in dataset_batches(self.dataset, rows, **self.reading):
            at = position[batch.crops]
            part = int(np.searchsorted(self.begins, at[0], side="right")) - 1
            yield batch._replace(crops=EmbeddedCrops(part, self.table.take(batch.crops), self.record[at]))
            progress(len(at))


class RecordSource:
    """Records by number. `read` is called from several threads and returns a data_tools.sources.Prepared, or None to leave the
    record out."""

    unit = " records"

    def __init__(self, records: int, read: Callable[[int], Any], batch: int, workers: int) -> None:
        self.records, self.read, self.batch, self.workers = records, read, batch, workers
        self.parts = -(-records // (batch * PART_BATCHES))

    def _numbers(self, part: int) -> range:
        return range(self.records)[part * self.batch * PART_BATCHES : (part + 1) * self.batch * PART_BATCHES]

    def count(self, parts: Iterable[int]) -> int:
        return sum(len(self._numbers(part)) for part in parts)

    def batches(self, parts: Sequence[int], progress: Callable[[int], Any]) -> Generator[CropBatch, None, None]:
        numbers = (number for part in parts for number in self._numbers(part))
        with (
            ThreadPoolExecutor(self.workers, "records") as pool,
            closing(results_in_order(pool, self.read, numbers, 4 * self.workers)) as records,
        ):
            for part in parts:
                crops = self._crops(part, records, progress)
                while chunk := list(islice(crops, self.batch)):
                    uv_BLT = np.stack([record.crops_uv[i] for _, record, i in chunk])
                    halves_B = np.array([record.halves[i] for _, record, i in chunk])
                    columns = zip(*((r.source, r.record, r.patient, None, r.start_s[i]) for _, r, i in chunk), strict=True)
                    arrays = [pa.array(column, kind) for column, kind in zip(columns, COLUMNS.values(), strict=True)]
                    record_B = np.array([number for number, _, _ in chunk])
                    table = pa.Table.from_arrays(arrays, list(COLUMNS))
                    yield CropBatch(uv_BLT, halves_B, EmbeddedCrops(part, table, record_B))

    def _crops(self, part: int, records: Iterator[Any], progress: Callable[[int], Any]) -> Iterator[tuple[int, Any, int]]:
        for number, record in zip(self._numbers(part), records, strict=False):
            progress(1)
            yield from ((number, record, i) for i in range(len(record.halves) if record else 0))


CropSource = DatasetSource | RecordSource


def results_in_order(
    pool: ThreadPoolExecutor, call: Callable[[int], Any], numbers: Iterator[int], limit: int
) -> Generator[Any, None, None]:
    """call(number) of all numbers, at most `limit` of them ahead of what was asked for."""
    pending: deque[Future[Any]] = deque(pool.submit(call, number) for number in islice(numbers, limit))
    try:
        while pending:
            result = pending.popleft().result()
            pending.extend(pool.submit(call, number) for number in islice(numbers, 1))
            yield result
    finally:
        for future in pending:
            future.cancel()


def tables(
    source: CropSource,
    model: TrainedModel,
    model_input: Input,
    parts: Sequence[int],
    per: Per,
    progress: Callable[[int], Any] = lambda units: None,
) -> Iterator[tuple[int, pa.Table]]:
    """The table of each part."""
    empty = set(parts)
    with closing(source.batches(parts, progress)) as batches:
        outputs = predict(batches, model_input.halves, model.pooled, model.device)
        for part, group in groupby(outputs, key=lambda output: output[0].crops.part):
            empty.remove(part)
            yield part, _table(list(group), per)
    for part in sorted(empty):  # none of its records or crops could be read
        yield part, schema(model.encoder.width).empty_table()


def _table(outputs: list[tuple[CropBatch, np.ndarray]], per: Per) -> pa.Table:
    crops = pa.concat_tables([batch.crops.table.select(list(COLUMNS)) for batch, _ in outputs])
    crop_H = np.repeat(np.arange(len(crops)), np.concatenate([batch.halves_B for batch, _ in outputs]))
    record_B = np.concatenate([batch.crops.record_B for batch, _ in outputs])
    c_HD = np.concatenate([c_HD for _, c_HD in outputs])
    if not np.isfinite(c_HD).all():
        raise ConfigError(NOT_FINITE)
    group_H = {"half": np.arange(len(crop_H)), "crop": crop_H, "record": record_B[crop_H]}[per]
    first = np.flatnonzero(np.diff(group_H, prepend=-1))
    c_HD = np.add.reduceat(c_HD, first) / np.diff(first, append=len(c_HD))[:, None].astype(np.float32)
    rows = crops.take(crop_H[first])
    if per == "half":
        second_H = np.diff(crop_H, prepend=-1) == 0
        starts = pa.array(rows["start_s"].to_numpy() + second_H * (HALF / FS_HZ))
        rows = rows.set_column(rows.column_names.index("start_s"), "start_s", starts)
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(c_HD.reshape(-1)), c_HD.shape[1])
    return rows.append_column("embedding", embedding).cast(schema(c_HD.shape[1]))


class ParquetParts:
    def __init__(self, out: Path, job: dict[str, Any]) -> None:
        self.out, self.job, self.folder = out, json.loads(json.dumps(job)), out.with_name(f"{out.name}.parts")
        self.finished = out.exists()
        if self.finished:
            self._require_same(_job_of(out), out)
            return
        if self.folder.is_file():
            raise ConfigError(f"--out {out}: {self.folder} is a file: remove it, or choose another --out")
        self.folder.mkdir(exist_ok=True)
        self._lock = open(self.folder / "lock", "w")  # noqa: SIM115 - held until the end
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out {out}: another process is writing it") from None
        for path in self.folder.glob("*.parquet"):
            if (before := _job_of(path)) is not None:
                self._require_same(before, path)

    def _require_same(self, job: Any, place: Path) -> None:
        before = job if isinstance(job, dict) else {}
        if differ := sorted(name for name in self.job.keys() | before.keys() if self.job.get(name) != before.get(name)):
            was, now = (str(job.get(differ[0]))[:60] for job in (before, self.job))
            raise ConfigError(f"{place}: of another job: {differ[0]} was {was}, now {now}: remove it, or choose another --out")

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.parquet"

    def missing(self, count: int) -> list[int]:
        """Parts that are still to be made, damaged ones included."""
        return [number for number in range(count) if not self._is_whole(number)]

    def _is_whole(self, number: int) -> bool:
        try:
            pq.read_table(self._path(number), page_checksum_verification=True)
            return True
        except (pa.ArrowException, OSError):
            return False

    def write(self, number: int, table: pa.Table) -> None:
        buffer = io.BytesIO()
        pq.write_table(table.replace_schema_metadata({KEY: json.dumps(self.job)}), buffer, write_page_checksum=True)
        write_whole(self._path(number), buffer.getvalue())

    def join(self, count: int, described: pa.Schema) -> None:
        """All parts in one file, which appears when it is complete; each is a row group."""
        described, whole = described.with_metadata({KEY: json.dumps(self.job)}), self.folder / "whole"
        with pq.ParquetWriter(whole, described) as writer:
            for number in range(count):
                table = pq.read_table(self._path(number), schema=described)
                if len(table):
                    writer.write_table(table.replace_schema_metadata(described.metadata))
        with open(whole, "rb") as file:
            os.fsync(file.fileno())
        os.replace(whole, self.out)
        sync(self.out.parent)
        shutil.rmtree(self.folder)

    def __enter__(self) -> "ParquetParts":
        return self

    def __exit__(self, *error: object) -> None:
        if not self.finished:
            self._lock.close()


def _job_of(path: Path) -> Any:
    """None: the file is damaged, or has none."""
    try:
        return json.loads((pq.read_schema(path).metadata or {}).get(KEY, b"null"))
    except (pa.ArrowException, OSError, ValueError):
        return None
