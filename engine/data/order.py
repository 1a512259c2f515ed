"""Which crop comes when: a pure function of the seed, the position and the datasets, whose whole state is `crops_seen`.

    rows = DatasetRows.of(Dataset.open("DATASET"), pretrain=True)
    order = Order((rows,), batch_crops=512, seed=0)
    order.batch(step)                       # the global batch: the same crops in the same order at every world size
    order.slice(step, rank, world)          # this rank's part of it
    order.places(crops_seen, 512).row       # to resume is to ask again

Nothing is shuffled in memory: a keyed permutation maps a position to a row, so step 10**7 costs what step 0 costs: 0.20 ms
for 512 crops of 10**7, 0.26 ms in block order.

One dataset: position p of epoch e is permute(p, N, key(seed, e)). An epoch ends with its last full batch; the rows left over
differ from epoch to epoch. Several datasets: each is a stream of its own, with epochs of its own and nothing left over;
`deal` says whose turn a position is, and how many turns that dataset has had before.

Block order (block_shards = G > 0) permutes the shards, then the crops within each block of G shards, so that a batch needs
G shards and not all of them. A batch is then as mixed as its shards are, which are written as a permutation of all crops.
`quality`, for 10**6 crops in 977 shards and batches of 512:

    block_shards                       0      1      8     32    128
    correlation of position, row   -.002   .038  -.001  -.001  -.001      by chance: 1 / sqrt(blocks)
    shards in a batch                399    1.1    8.0   31.8    122
    95 % row span of a batch        .946   .026   .776   .923   .942
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count as counting
from typing import Any

import numpy as np

from data_tools.dataset import SHARD_CROPS, Dataset
from engine.data.counter import MAX_SIZE, RandomStream, bits, permute
from engine.data.validation_split import sides

DEAL = 2**30  # places over which given weights come out exactly, rounded to 2**-30
SAMPLED_BATCHES = 256
LOOK_AHEAD = 4096


class OrderError(Exception):
    """An order that cannot be: one line, with the value seen and what to change."""


def deal(position: np.ndarray, quotas: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Whose turn each position is, and how many turns that dataset has had before: (int16, int64), in closed form.

    The quotas are dealt out as evenly as they can be: of any run of places each dataset has its share to within a few, so
    every batch and every rank's slice is mixed alike. Each stream is gone through in order, or its blocks would be of no use.
    """
    cycle, place = np.divmod(position, sum(quotas))
    dataset, turn = np.full(position.shape, len(quotas) - 1, np.int16), np.empty(position.shape, np.int64)
    open_ = np.ones(position.shape, bool)
    for d, quota in enumerate(quotas[:-1]):  # each against all that come after it
        rest = sum(quotas[d:])
        before = _dealt(place, quota, rest)
        taken = open_ & (_dealt(place + 1, quota, rest) > before)
        dataset[taken], turn[taken] = d, (cycle * quota + before)[taken]
        open_ &= ~taken
        place = place - before
    turn[open_] = (cycle * quotas[-1] + place)[open_]
    return dataset, turn


def turns_before(position: int, quotas: Sequence[int], dataset: int) -> int:
    """How many turns a dataset has had before a position, whosever turn that is."""
    cycle, place = divmod(position, sum(quotas))
    for d in range(dataset):
        place -= _dealt(place, quotas[d], sum(quotas[d:]))
    return cycle * quotas[dataset] + int(_dealt(place, quotas[dataset], sum(quotas[dataset:])))


def _dealt(places: Any, quota: int, rest: int) -> Any:
    """How many of the first so many places are one dataset's, which has `quota` of each `rest` (Bresenham)."""
    return (places * quota + rest // 2) // rest


@dataclass(frozen=True, eq=False)
class DatasetRows:
    """The rows of one dataset that take part. In a zarr store a shard is one of its storage objects."""

    name: str
    numbers: np.ndarray | None  # row numbers, ascending, 4 bytes each; None: all rows
    first: np.ndarray  # [shards + 1] how many of the rows that take part lie before each shard
    shard_first: np.ndarray  # [shards + 1] how many rows lie before each shard

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        pretrain: bool | None = None,
        dx: str | None = None,
        identity: str | None = None,
        halves: int | None = None,
        hold_out: float = 0.0,
        held: bool = False,
    ) -> "DatasetRows":
        """Of a role (see Dataset.select); halves=2 leaves out the crops whose second half is empty. `hold_out`: without that
        share of the patients, or with `held` they alone (engine.data.validation_split)."""
        name, crops = dataset.root.url, [int(shard["crops"]) for shard in dataset.shards]
        if not crops:  # zarr alone
            crops = [min(SHARD_CROPS, len(dataset) - start) for start in range(0, len(dataset), SHARD_CROPS)]
        if sum(crops) != len(dataset):
            raise OrderError(f"{name}: its shards hold {sum(crops)} crops and its table {len(dataset)}: run data_tools verify")
        numbers = None if (pretrain, dx, identity) == (None,) * 3 else dataset.select(pretrain, dx, identity)
        wanted = [] if halves is None else [dataset.column("halves") >= halves]
        wanted += [sides(dataset, hold_out)[held]] if hold_out else []
        for keep in wanted:
            numbers = np.flatnonzero(keep) if numbers is None else numbers[keep[numbers]]
        if numbers is not None and not len(numbers):
            asked: dict[str, Any] = {"pretrain": pretrain, "dx": dx, "identity": identity, "halves": halves}
            asked |= {"data.hold_out": hold_out, "held": held} if hold_out else {}
            text = ", ".join(f"{key}={value!r}" for key, value in asked.items() if value is not None)
            raise OrderError(f"{name}: no crop has {text}; its roles are {dataset.meta.get('roles')}: select others")
        return cls.among(name, crops, numbers)

    @classmethod
    def among(cls, name: str, shard_crops: Sequence[int], numbers: np.ndarray | None = None) -> "DatasetRows":
        """The given rows of shards of these sizes."""
        shard_first = np.concatenate([[0], np.cumsum(shard_crops, dtype=np.int64)])
        if numbers is None or len(numbers) == shard_first[-1]:
            return cls(name, None, shard_first, shard_first)
        small = numbers.astype(np.int32 if shard_first[-1] < 2**31 else np.int64)
        return cls(name, small, np.searchsorted(small, shard_first.astype(small.dtype)), shard_first)

    def __len__(self) -> int:
        return int(self.first[-1])

    def row(self, index: np.ndarray) -> np.ndarray:
        """Row numbers of the index-th that take part."""
        return index if self.numbers is None else self.numbers[index].astype(np.int64)

    def after(self, row: int) -> int:
        """The next one that takes part; after the last the first."""
        if self.numbers is None:
            return (row + 1) % len(self)
        return int(self.numbers[np.searchsorted(self.numbers, row, side="right") % len(self)])

    def shard(self, row: np.ndarray) -> np.ndarray:
        return np.asarray(np.searchsorted(self.shard_first, row, side="right") - 1)


@dataclass(frozen=True, eq=False)
class Places:
    """What lies at consecutive positions. `epoch` is the dataset's own: with (dataset, row) it keys the augmentation."""

    dataset: np.ndarray  # int16 [n]
    row: np.ndarray  # int64 [n]
    epoch: np.ndarray  # int64 [n]

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, part: slice) -> "Places":
        return Places(self.dataset[part], self.row[part], self.epoch[part])


@dataclass(frozen=True)
class Order:
    rows: tuple[DatasetRows, ...]
    batch_crops: int  # of all ranks together
    seed: int = 0
    weights: tuple[float, ...] | None = None  # None: by size, so that each dataset is gone through equally often
    block_shards: int = 0

    def __post_init__(self) -> None:
        if not self.rows:
            raise OrderError("no dataset: give at least one")
        for key, least in (("train.batch_crops", 1), ("train.seed", 0), ("pipeline.block_shards", 0)):
            if (value := getattr(self, key.split(".")[1])) < least:
                raise OrderError(f"{key}={value}: {least} or more is needed")
        if self.weights is not None:
            if len(self.weights) != len(self.rows):
                raise OrderError(f"pipeline.weights={self.weights}: {len(self.rows)} datasets: give one for each, or none")
            if not all(0 < weight < math.inf for weight in self.weights):
                raise OrderError(f"pipeline.weights={self.weights}: each must be positive: leave out what is not wanted")
        for rows in self.rows:
            if not 0 < len(rows) <= MAX_SIZE:
                raise OrderError(f"{rows.name}: {len(rows)} crops selected, 1 to 2**40 can be ordered: select other rows")
        if not self.crops_per_epoch:
            total = sum(map(len, self.rows))
            raise OrderError(f"train.batch_crops={self.batch_crops}: {total} crops are selected: lower it to {total} or less")
        if not all(self._quotas):
            raise OrderError(f"pipeline.weights={self.weights}: one share is below 2**-30: raise it, or leave the dataset out")

    @property
    def crops_per_epoch(self) -> int:
        """The same for all ranks; with several datasets, of all their crops together."""
        return sum(map(len, self.rows)) // self.batch_crops * self.batch_crops

    @property
    def steps_per_epoch(self) -> int:
        return self.crops_per_epoch // self.batch_crops

    @cached_property
    def _quotas(self) -> tuple[int, ...]:
        """Places of each dataset in one cycle of `deal`: its size, or by largest remainder its share of 2**30."""
        sizes = [len(rows) for rows in self.rows]
        if len(sizes) == 1 or (self.weights is None and sum(sizes) <= DEAL):
            return tuple(sizes)
        weights = self.weights or sizes
        shares = [weight / sum(weights) * DEAL for weight in weights]
        quotas = [int(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda d: (quotas[d] - shares[d], d))
        for d in by_remainder[: DEAL - sum(quotas)]:
            quotas[d] += 1
        return tuple(quotas)

    def places(self, crops_seen: int, count: int) -> Places:
        """The `count` crops that follow the first `crops_seen` of the run."""
        if crops_seen < 0 or count < 0:
            raise OrderError(f"crops_seen {crops_seen}, count {count}: neither may be negative")
        return self._at(np.arange(crops_seen, crops_seen + count, dtype=np.int64))

    def _at(self, position: np.ndarray) -> Places:
        dataset, turn = deal(position, self._quotas)
        row, epoch = np.empty((2, len(position)), np.int64)
        for d in range(len(self.rows)):
            mine = np.flatnonzero(dataset == d)
            row[mine], epoch[mine] = self.own(d, turn[mine])
        return Places(dataset, row, epoch)

    def own(self, dataset: int, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A dataset's crops by their turns: (row, epoch)."""
        epoch, i = np.divmod(turn, self.crops_per_epoch if len(self.rows) == 1 else len(self.rows[dataset]))
        return self._row(dataset, epoch, i), epoch

    def batch(self, step: int) -> Places:
        return self.slice(step, 0, 1)

    def slice(self, step: int, rank: int, world: int, steps: int = 1, micro: int | None = None) -> Places:
        """A rank's share of the global batch; of so many `steps`, one after the other. Parts of `micro` crops that all ranks
        take at the same time lie side by side in the batch: the same crops meet, whatever the number of ranks."""
        if world < 1 or self.batch_crops % world:
            raise OrderError(
                f"train.batch_crops={self.batch_crops} cannot be shared equally by {world} ranks: make it a multiple of {world}"
            )
        if step < 0 or not 0 <= rank < world:
            raise OrderError(f"step {step}, rank {rank} of {world}: steps and ranks count from 0")
        each = self.batch_crops // world
        micro = micro or each
        if each % micro:
            raise OrderError(f"train.micro_batch={micro}: must divide the {each} crops of a rank")
        first = np.arange(step, step + steps, dtype=np.int64) * self.batch_crops + rank * micro
        parts = np.arange(each // micro)[:, None] * (micro * world) + np.arange(micro)
        return self._at((first[:, None] + parts.reshape(-1)).reshape(-1))

    def _row(self, dataset: int, epoch: np.ndarray, i: np.ndarray) -> np.ndarray:
        rows = self.rows[dataset]
        if not 0 < self.block_shards < len(rows.first) - 1:  # all in one block
            return rows.row(permute(i, len(rows), bits(self.seed, RandomStream.ORDER, dataset, epoch)))
        index = np.empty_like(i)
        for e in np.unique(epoch).tolist():
            now = epoch == e
            index[now] = _index_in_blocks(_layout(rows, self.seed, dataset, e, self.block_shards), i[now])
        return rows.row(index)


@dataclass(frozen=True, eq=False)
class _Layout:
    """The shards of one epoch in their order, those left out that have no row to give."""

    index: np.ndarray  # [shards] of the first row of each, among the rows that take part
    before: np.ndarray  # [shards + 1] rows of the shards before it in this epoch
    block_first: np.ndarray  # [blocks + 1] rows of the blocks before it
    block_key: np.ndarray  # [blocks]


@lru_cache(maxsize=64)
def _layout(rows: DatasetRows, seed: int, dataset: int, epoch: int, block_shards: int) -> _Layout:
    """The only work that grows with the shards, done once an epoch: 1 to 5 ms for 10,000."""
    crops = np.diff(rows.first)
    filled = np.flatnonzero(crops)
    shard = filled[permute(np.arange(len(filled)), len(filled), bits(seed, RandomStream.SHARD_ORDER, dataset, epoch))]
    before = np.concatenate([[0], np.cumsum(crops[shard])])
    block_first = np.append(before[:-1:block_shards], before[-1])
    keys = bits(seed, RandomStream.BLOCK_ORDER, dataset, epoch, np.arange(len(block_first) - 1))
    return _Layout(rows.first[shard], before, block_first, keys)


def _index_in_blocks(layout: _Layout, i: np.ndarray) -> np.ndarray:
    block = np.searchsorted(layout.block_first, i, side="right") - 1
    start, end = layout.block_first[block], layout.block_first[block + 1]
    j = start + permute(i - start, end - start, layout.block_key[block])
    k = np.searchsorted(layout.before, j, side="right") - 1
    return np.asarray(layout.index[k] + j - layout.before[k])


def quality(order: Order, epoch: int = 0) -> dict[str, float]:
    """How well an epoch is shuffled, from 256 of its batches: the correlation of position and row (0 is best), the shards
    that a batch comes from, and the middle 95 % of a batch's rows as a share of all rows (.95 is best)."""
    steps = np.unique(np.linspace(0, order.steps_per_epoch - 1, SAMPLED_BATCHES).astype(np.int64))
    row_offset = np.cumsum([0, *(rows.shard_first[-1] for rows in order.rows)])
    rows, positions, shards = [], [], []
    for start in (epoch * order.crops_per_epoch + steps * order.batch_crops).tolist():
        places = order.places(start, order.batch_crops)
        rows.append(places.row + row_offset[places.dataset])
        positions.append(np.arange(start, start + order.batch_crops))
        shards.append(len(np.unique(_shards(order, places)[0])))
    row, position = np.concatenate(rows), np.concatenate(positions)
    low, high = np.percentile(np.array(rows), (2.5, 97.5), axis=1)
    return {
        "correlation": float(np.corrcoef(position, row)[0, 1]) if row.min() < row.max() else 0.0,
        "shards_per_batch": float(np.mean(shards)),
        "row_span_95": float(np.mean(high - low) / row_offset[-1]),
    }


def shards_needed(order: Order, dataset: int, crops_seen: int) -> Iterator[int]:
    """A dataset's shards in the order in which they are first needed from here on, each once an epoch of it; no end."""
    first = turns_before(crops_seen, order._quotas, dataset)
    now, named = -1, set[int]()
    for start in counting(first, LOOK_AHEAD):
        row, epoch = order.own(dataset, np.arange(start, start + LOOK_AHEAD, dtype=np.int64))
        shard = order.rows[dataset].shard(row)
        _, new = np.unique(epoch * len(order.rows[dataset].first) + shard, return_index=True)
        for k in np.sort(new).tolist():
            if epoch[k] != now:
                now, named = int(epoch[k]), set()
            if shard[k] not in named:
                named.add(int(shard[k]))
                yield int(shard[k])


def _shards(order: Order, places: Places) -> tuple[np.ndarray, np.ndarray]:
    """The shard of each place, numbered through all datasets, and the number of the first shard of each dataset."""
    offsets = np.cumsum([0, *(len(rows.first) - 1 for rows in order.rows)])
    shard = np.empty(len(places), np.int64)
    for d, rows in enumerate(order.rows):
        mine = places.dataset == d
        shard[mine] = rows.shard(places.row[mine]) + offsets[d]
    return shard, offsets
