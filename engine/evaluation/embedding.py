"""Crops of a dataset, or of records from anywhere, to a table of embeddings; reading goes on while the encoder works.

    stream = DatasetStream(dataset, rows, batch, per="crop")              # or RecordStream(records, batch, workers)
    for part, table in tables(stream, encoder(model, model.input), range(stream.parts), "crop"):
        ...

    source, record, patient, row (of the dataset), start_s, embedding fixed_size_list<float32>[D]

`per`: a row for each half of 5 s, for each crop of 10 s (the mean of its halves), or for each record (the mean of all its
halves). A part is PART_BATCHES batches and always the same ones, so what is computed does not depend on where a run stopped.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import torch

from data_tools.dataset import CROP_SHAPE, Dataset
from engine.common import ConfigError
from engine.data.augmenter import FS_HZ, HALF
from engine.data.prefetch import read_ahead
from engine.data.preprocess import Input
from engine.data.reader import CropReader
from engine.data.transfer import Upload, download
from engine.model.inference import NOT_FINITE, TrainedModel

Per = Literal["crop", "record", "half"]
PART_BATCHES = 16
TEXTS = ("source", "record", "patient")
COLUMNS = [*((name, pa.string()) for name in TEXTS), ("row", pa.int64()), ("start_s", pa.float64())]
Encoded = Callable[[], np.ndarray]  # waits for c_HD of the halves that are there, crop by crop, float32
T = TypeVar("T")


def schema(width: int) -> pa.Schema:
    return pa.schema([*COLUMNS, ("embedding", pa.list_(pa.float32(), width))])


class Crops(NamedTuple):
    """Of records that stand together. `record_B` numbers them, ascending."""

    part: int
    last: bool  # of its part
    units: int  # by which the stream's total has come nearer
    uv_BLT: np.ndarray  # int16 [B, 12, 5000], valid until the next ones are asked for
    halves_B: np.ndarray
    record_B: np.ndarray
    about: pa.Table  # COLUMNS, a row for each crop


class Stream(Protocol):
    unit: str
    parts: int

    def count(self, parts: Sequence[int]) -> int:
        """Units in these parts."""

    def __call__(self, parts: Sequence[int]) -> Generator[Crops, None, None]:
        """All batches of these parts, in order."""


class Request(NamedTuple):
    part: int
    last: bool
    at: int  # in the stream's order of rows
    dataset: np.ndarray
    row: np.ndarray


class DatasetStream:
    unit = " crops"

    def __init__(
        self, dataset: Dataset, rows: np.ndarray, batch: int, per: Per, gather: CropReader | None = None, threads: int = 2
    ) -> None:
        """`rows`: in which order they come; for per="record" by record."""
        self.gather = gather or CropReader([dataset], threads=threads)
        self.about = dataset.table([*TEXTS, "start_s", "halves"])
        if per == "record":
            names = self.about.select(["source", "record"]).append_column("row", pa.array(np.arange(len(self.about))))
            chosen = names.take(rows).append_column("start_s", self.about["start_s"].take(rows))
            rows = chosen.sort_by([(name, "ascending") for name in ("source", "record", "start_s")])["row"].to_numpy()
        self.rows, self.batch = rows, batch
        self.record = _runs(self.about.select(["source", "record"]).take(rows)) if per == "record" else np.arange(len(rows))
        first = np.flatnonzero(np.diff(self.record, prepend=-1))  # where a part may begin
        wanted = np.arange(0, len(rows), batch * PART_BATCHES)
        begins: Any = np.unique(first[np.searchsorted(first, wanted, side="right") - 1]) if len(rows) else []
        self.begins, self.parts = [*map(int, begins), len(rows)], len(begins)

    def count(self, parts: Sequence[int]) -> int:
        return sum(self.begins[part + 1] - self.begins[part] for part in parts)

    def requests(self, parts: Sequence[int]) -> Iterator[Request]:
        for part in parts:
            end = self.begins[part + 1]
            for at in range(self.begins[part], end, self.batch):
                rows = self.rows[at : min(at + self.batch, end)]
                yield Request(part, at + self.batch >= end, at, np.zeros(len(rows), np.int64), rows)

    def __call__(self, parts: Sequence[int]) -> Generator[Crops, None, None]:
        with closing(read_ahead(self.requests(parts), self.gather, (self.batch, *CROP_SHAPE))) as filled:
            for request, crops, report in filled:
                good = report.row == request.row  # what came in place of a bad crop is not what was asked for
                about = self.about.take(request.row[good])
                halves = about["halves"].to_numpy()
                about = about.drop_columns("halves").append_column("row", pa.array(request.row[good]))
                record = self.record[request.at : request.at + len(good)][good]
                uv_BLT = crops if good.all() else crops[good]
                yield Crops(request.part, request.last, len(good), uv_BLT, halves, record, about)


def _runs(names: pa.Table) -> np.ndarray:
    """Numbers of the runs of equal rows."""
    new = np.zeros(len(names), bool)
    for name in names.column_names:
        codes = names[name].combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
        new[1:] |= np.diff(codes) != 0
    return np.cumsum(new)


class Loaded(NamedTuple):
    """A record in memory."""

    source: str
    record: str
    patient: str | None
    uv_BLT: np.ndarray  # int16 [B, 12, 5000]
    start_s: Sequence[float]
    halves: Sequence[int]


class RecordStream:
    """`read` is called from several threads; None: the record is left out."""

    unit = " records"

    def __init__(self, records: int, read: Callable[[int], Loaded | None], batch: int, workers: int) -> None:
        self.read, self.batch, self.workers, self.records = read, batch, workers, records
        self.each = batch * PART_BATCHES  # records in a part
        self.parts = -(-records // self.each)

    def _numbers(self, part: int) -> range:
        return range(part * self.each, min((part + 1) * self.each, self.records))

    def count(self, parts: Sequence[int]) -> int:
        return sum(len(self._numbers(part)) for part in parts)

    def __call__(self, parts: Sequence[int]) -> Generator[Crops, None, None]:
        wanted = (number for part in parts for number in self._numbers(part))
        with (
            ThreadPoolExecutor(self.workers, "records") as pool,
            closing(ahead(pool, self.read, wanted, 4 * self.workers)) as read,
        ):
            for part in parts:
                held: list[tuple[int, Loaded]] = []
                units = 0
                for number, loaded in zip(self._numbers(part), read, strict=False):
                    units += 1
                    held += [(number, loaded)] if loaded else []
                    while sum(len(one.halves) for _, one in held) > self.batch:
                        batch, held = _first(held, self.batch)
                        yield _crops(batch, part, False, units)
                        units = 0
                yield _crops(held, part, True, units)


def _first(held: list[tuple[int, Loaded]], room: int) -> tuple[list[tuple[int, Loaded]], list[tuple[int, Loaded]]]:
    """`room` crops of what is held, and the rest."""
    taken: list[tuple[int, Loaded]] = []
    rest: list[tuple[int, Loaded]] = []
    for number, one in held:
        taken += [(number, _slice(one, slice(0, room)))] if room else []
        rest += [(number, _slice(one, slice(room, None)))] if len(one.halves) > room else []
        room = max(0, room - len(one.halves))
    return taken, rest


def _crops(held: list[tuple[int, Loaded]], part: int, last: bool, units: int) -> Crops:
    rows = [
        {"source": one.source, "record": one.record, "patient": one.patient, "row": None, "start_s": start}
        for _, one in held
        for start in one.start_s
    ]
    uv_BLT = np.concatenate([np.empty((0, *CROP_SHAPE), np.int16), *(one.uv_BLT for _, one in held)])
    halves_B = np.array([half for _, one in held for half in one.halves], np.int64)
    record_B = np.array([number for number, one in held for _ in one.halves], np.int64)
    return Crops(part, last, units, uv_BLT, halves_B, record_B, pa.Table.from_pylist(rows, pa.schema(COLUMNS)))


def _slice(one: Loaded, part: slice) -> Loaded:
    return one._replace(uv_BLT=one.uv_BLT[part], start_s=one.start_s[part], halves=one.halves[part])


def ahead(pool: ThreadPoolExecutor, call: Callable[[int], T], numbers: Iterable[int], most: int) -> Generator[T, None, None]:
    """Results as they were asked for, `most` of them under way."""
    rest = iter(numbers)
    under_way: deque[Future[T]] = deque(pool.submit(call, n) for n in islice(rest, most))
    try:
        while under_way:
            done = under_way.popleft().result()
            under_way.extend(pool.submit(call, n) for n in islice(rest, 1))
            yield done
    finally:
        for future in under_way:
            future.cancel()


def encoder(model: TrainedModel, wanted: Input) -> Callable[[Crops], Encoded]:
    """Launches the encoder; the crops' memory may then be used again."""
    upload = Upload(model.device) if model.device.type == "cuda" else None

    @torch.inference_mode()
    def encode(crops: Crops) -> Encoded:
        if not len(crops.halves_B):
            return torch.zeros(0, model.encoder.width).numpy
        uv_BLT = torch.from_numpy(crops.uv_BLT)
        there = upload(uv_BLT) if upload else uv_BLT.to(model.device)
        encoded = download(model.pooled(wanted.halves(there, crops.halves_B)))
        if upload:
            upload.wait()
        return encoded

    return encode


def tables(
    stream: Stream, encode: Callable[[Crops], Encoded], parts: Sequence[int], per: Per, told: Callable[[int], Any] = int
) -> Iterator[tuple[int, pa.Table]]:
    """(part, its table); `told` hears of every batch. The next batch is launched before the last one's result is waited for."""
    done: list[tuple[Crops, np.ndarray]] = []
    waiting: tuple[Crops, Encoded] | None = None
    with closing(stream(parts)) as batches:
        for crops in chain(batches, [None]):
            launched = (crops._replace(uv_BLT=np.empty(0, np.int16)), encode(crops)) if crops else None
            if waiting:
                done.append((waiting[0], waiting[1]()))
                told(waiting[0].units)
                if waiting[0].last:
                    yield waiting[0].part, _table(done, per)
                    done = []
            waiting = launched


def _table(done: list[tuple[Crops, np.ndarray]], per: Per) -> pa.Table:
    about = pa.concat_tables([crops.about.select([name for name, _ in COLUMNS]) for crops, _ in done])
    halves_B = np.concatenate([crops.halves_B for crops, _ in done]).astype(np.int64)
    record_B = np.concatenate([crops.record_B for crops, _ in done])
    c_HD = np.concatenate([vectors for _, vectors in done])
    crop_H = np.repeat(np.arange(len(halves_B)), halves_B)
    group_H = {"half": np.arange(len(crop_H)), "crop": crop_H, "record": record_B[crop_H]}[per]
    first = np.flatnonzero(np.diff(group_H, prepend=-1))
    if len(c_HD):
        c_HD = np.add.reduceat(c_HD, first) / np.diff(first, append=len(c_HD))[:, None].astype(np.float32)
    found = about.take(crop_H[first])
    if per == "half":
        second_H = np.diff(crop_H, prepend=-1) == 0
        starts = found["start_s"].to_numpy() + second_H * (HALF / FS_HZ)
        found = found.set_column(found.column_names.index("start_s"), "start_s", pa.array(starts))
    flat = pa.array(np.ascontiguousarray(c_HD, np.float32).reshape(-1))
    embedding = pa.FixedSizeListArray.from_arrays(flat, c_HD.shape[1])
    return found.append_column("embedding", embedding).cast(schema(c_HD.shape[1]))


def finite(table: pa.Table) -> None:
    """A model whose weights have gone wrong must not fill a table quietly."""
    vectors = table["embedding"].combine_chunks().flatten().to_numpy()
    if not np.isfinite(vectors).all():
        raise ConfigError(NOT_FINITE)
