"""The order of crops: a pure function of the seed, the position and the datasets. The only state to
save is `crops_seen`.

    rows = DatasetRows.select(Dataset.open("DATASET"), Selection(pretrain=True))
    order = Order((rows,), batch_crops=512, seed=0)
    order.batch(step)                       # the global batch: the same crops in the same order for every world size
    order.places_of_rank(step, rank, world)    # this rank's part of it
    order.places(crops_seen, 512).row       # to resume, start from crops_seen

Nothing is shuffled in memory: a keyed permutation maps a position to a row, in 0.20 ms for 512 of
10**7 crops at any step.

One dataset: position p of epoch e is permute(p, N, key(seed, e)). The incomplete last batch of an
epoch is dropped: different rows in each epoch. Several datasets: each has its own epochs and drops
nothing; `dataset_and_draw_number` assigns positions to datasets.

Block order (block_shards = G > 0) permutes the shards, then the crops within each block of G
shards, so that a batch needs only G shards. Crops are in random order across shards, so batches are
well mixed for G of 8 and more (benchmarks/RESULTS.md, "shuffle quality").
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import count
from typing import Any

import numpy as np

from omnilead.data_tools.dataset import SHARD_CROPS, Dataset

from ..settings.counter import MAX_PERMUTED, RandomStream, bits, permute
from ..settings.errors import ConfigError
from .patients import cached_choice, validation_split
from .where import where_mask

# number of positions in a cycle (Order._quotas), in which each dataset has its share, rounded to
# 2**-30
CYCLE_POSITIONS = 2**30
LOOK_AHEAD_CROPS = 4096  # number of crops whose shards `shards_needed` finds at a time


class OrderError(ConfigError):
    """Raised if the settings allow no order of crops, or if no crops are selected."""


def dataset_and_draw_number(
    position: np.ndarray, quotas: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns, in closed form, the dataset of each position (int16) and how many earlier positions
    belong to that dataset (int64).

    Quotas are spread as evenly as possible: in any range of positions each dataset has its share to
    within a few, so every batch and every rank's slice has the same mixture. Each dataset is still
    read in its own order, which block order needs.
    """
    cycle, place = np.divmod(position, sum(quotas))
    dataset = np.full(position.shape, len(quotas) - 1, np.int16)
    turn = np.empty(position.shape, np.int64)
    left = np.ones(position.shape, bool)
    # decides which positions dataset d has, and which the later datasets share
    for d, quota in enumerate(quotas[:-1]):
        remaining_quota = sum(quotas[d:])
        before, after = (
            _count_own_positions(place, quota, remaining_quota),
            _count_own_positions(place + 1, quota, remaining_quota),
        )
        is_own = left & (after > before)
        dataset[is_own], turn[is_own] = d, (cycle * quota + before)[is_own]
        left &= ~is_own
        place = place - before
    turn[left] = (cycle * quotas[-1] + place)[left]
    return dataset, turn


def _count_own_positions(places: Any, quota: int, remaining_quota: int) -> Any:
    """Returns how many of the first `places` positions belong to a dataset that gets `quota` of
    every `remaining_quota` positions, evenly spread (Bresenham's algorithm)."""
    return (places * quota + remaining_quota // 2) // remaining_quota


@dataclass(frozen=True, eq=False)
class Selection:
    """Says which crops of the datasets are drawn; by default all."""

    # roles, as in Dataset.select; None: any role
    pretrain: bool | None = None
    dx: str | None = None
    identity: str | None = None
    # least number of halves of 5 s that a crop must have: 2 leaves out crops whose second half is
    # empty
    halves: int | None = None
    # share of the patients that are held out (validation_split): they are left out or, with `held`,
    # are the only ones selected
    hold_out: float = 0.0
    held: bool = False
    where: str = ""  # an expression that selects crops (data.where); "": all crops
    # for each dataset, the rows to select from if no role is given; (): all rows
    rows: Sequence[np.ndarray] = ()

    def criteria(self) -> dict[str, Any]:
        """Returns the criteria that are set, in JSON's types. The rows of a dataset are given by
        their sha256."""
        chosen: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "rows" and value != field.default:
                chosen[field.name] = value
        if self.rows:
            chosen["rows"] = [sha256(numbers.tobytes()).hexdigest() for numbers in self.rows]
        return chosen


ALL_CROPS = Selection()


@dataclass(frozen=True, eq=False)
class DatasetRows:
    """The selected rows of one dataset. If a dataset is stored only as zarr, each storage object
    counts as a shard."""

    name: str
    # selected row numbers, ascending, 4 bytes each if possible; None: all rows
    numbers: np.ndarray | None
    first: np.ndarray  # [shards + 1] number of selected rows before each shard
    shard_first: np.ndarray  # [shards + 1] number of rows, selected or not, before each shard

    @classmethod
    def select(
        cls,
        dataset: Dataset,
        selection: Selection = ALL_CROPS,
        dataset_index: int = 0,
    ) -> "DatasetRows":
        """Returns the selected rows of a dataset. `dataset_index`: the dataset's index in
        `selection.rows`."""
        name, crops = dataset.root.url, [shard.crops for shard in dataset.shards]
        if not crops:  # the dataset is stored only as zarr
            starts = range(0, len(dataset), SHARD_CROPS)
            crops = [min(SHARD_CROPS, len(dataset) - start) for start in starts]
        if sum(crops) != len(dataset):
            raise OrderError(
                f"{name}: {sum(crops)} crops in its shards, {len(dataset)} in its table: run "
                "omnilead verify"
            )
        numbers = selection.rows[dataset_index] if selection.rows else None
        role = selection.pretrain, selection.dx, selection.identity
        if role != (None, None, None):
            numbers = dataset.select(*role)
        masks = []
        if selection.halves is not None:
            masks.append(dataset.column("halves") >= selection.halves)
        if selection.hold_out:
            masks.append(validation_split(dataset, selection.hold_out)[selection.held])
        if selection.where:
            masks.append(cached_choice(dataset, selection.where, where_mask))
        for keep in masks:
            numbers = np.flatnonzero(keep) if numbers is None else numbers[keep[numbers]]
        if numbers is not None and not len(numbers):
            names = {"hold_out": "data.hold_out", "where": "data.where"}
            criteria = replace(selection, rows=()).criteria()
            text = ", ".join(
                f"{names.get(name, name)}={value!r}" for name, value in criteria.items()
            )
            raise OrderError(
                f"{name}: no crop has {text}; its roles are {dataset.facts.roles.model_dump()}: select "
                "other crops"
            )
        return cls.from_sizes(name, crops, numbers)

    @classmethod
    def from_sizes(
        cls, name: str, shard_crops: Sequence[int], numbers: np.ndarray | None = None
    ) -> "DatasetRows":
        """Returns the rows `numbers` of a dataset whose shards have `shard_crops` crops each;
        None: all rows."""
        shard_first = np.concatenate([[0], np.cumsum(shard_crops, dtype=np.int64)])
        if numbers is None or len(numbers) == shard_first[-1]:
            return cls(name, None, shard_first, shard_first)
        numbers = numbers.astype(np.int32 if shard_first[-1] < 2**31 else np.int64)
        # both in one dtype, since searchsorted would otherwise copy the numbers
        first = np.searchsorted(numbers, shard_first.astype(numbers.dtype))
        return cls(name, numbers, first, shard_first)

    def __len__(self) -> int:
        return int(self.first[-1])

    def row(self, index: np.ndarray) -> np.ndarray:
        """Returns the row numbers of the selected rows with these indices."""
        return index if self.numbers is None else self.numbers[index].astype(np.int64)

    def next_selected_row(self, row: int) -> int:
        """Returns the selected row that follows `row`; after the last one, the first."""
        if self.numbers is None:
            return (row + 1) % len(self)
        return int(self.numbers[np.searchsorted(self.numbers, row, side="right") % len(self)])

    def shard(self, row: np.ndarray) -> np.ndarray:
        return np.asarray(np.searchsorted(self.shard_first, row, side="right") - 1)


@dataclass(frozen=True, eq=False)
class Places:
    """The dataset, row and epoch of crops that are drawn one after the other. Each dataset
    counts its own epochs. The augmentation of a crop depends on (dataset, row, epoch)."""

    dataset: np.ndarray  # int16 [n]
    row: np.ndarray  # int64 [n]
    epoch: np.ndarray  # int64 [n]

    def __len__(self) -> int:
        return len(self.row)

    def take(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns one value for each of these crops. `values`: for each dataset, an array with a
        value for each of its crops."""
        values_of_crops = np.empty((len(self), *values[0].shape[1:]), values[0].dtype)
        for d, dataset_values in enumerate(values):
            is_own = self.dataset == d
            values_of_crops[is_own] = dataset_values[self.row[is_own]]
        return values_of_crops

    def __getitem__(self, part: slice) -> "Places":
        return Places(self.dataset[part], self.row[part], self.epoch[part])


@dataclass(frozen=True)
class Order:
    rows: tuple[DatasetRows, ...]
    batch_crops: int  # crops in a global batch, over all ranks
    seed: int = 0
    # sampling weight of each dataset; None: its number of selected crops, so that every crop is
    # drawn equally often
    weights: tuple[float, ...] | None = None
    block_shards: int = 0

    def __post_init__(self) -> None:
        weights, total = self.weights, sum(map(len, self.rows))
        if not self.rows:
            raise OrderError("no dataset: give at least one")
        for rows in self.rows:
            if not 0 < len(rows) <= MAX_PERMUTED:
                raise OrderError(
                    f"{rows.name}: {len(rows)} crops are selected: select from 1 to 2**40"
                )
        if not 1 <= self.batch_crops <= total:
            raise OrderError(
                f"train.batch_crops={self.batch_crops}: {total} crops are selected: use a "
                f"number from 1 to {total}"
            )
        if weights is not None:
            positive = all(0 < weight < math.inf for weight in weights)
            if len(weights) != len(self.rows) or not positive:
                raise OrderError(
                    f"pipeline.weights={weights}: give a positive number for each of "
                    f"{len(self.rows)} datasets, or null"
                )
        if not all(self._quotas):
            raise OrderError(
                f"pipeline.weights={weights}: one weight is below 2**-30 of their sum: raise it, or leave "
                "the dataset out"
            )

    @property
    def crops_per_epoch(self) -> int:
        """Returns the number of crops in an epoch, over all ranks and datasets."""
        return self.steps_per_epoch * self.batch_crops

    @property
    def steps_per_epoch(self) -> int:
        return sum(map(len, self.rows)) // self.batch_crops

    @cached_property
    def _quotas(self) -> tuple[int, ...]:
        """Returns how many positions each dataset has in one cycle of `dataset_and_draw_number`.
        For a single dataset, and without weights for up to 2**30 crops, this is its number of
        crops; else it is its share of 2**30, rounded by largest remainder."""
        sizes = [len(rows) for rows in self.rows]
        if len(sizes) == 1 or (self.weights is None and sum(sizes) <= CYCLE_POSITIONS):
            return tuple(sizes)
        weights = self.weights or sizes
        shares = [weight / sum(weights) * CYCLE_POSITIONS for weight in weights]
        quotas = [int(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda d: (quotas[d] - shares[d], d))
        for d in by_remainder[: CYCLE_POSITIONS - sum(quotas)]:
            quotas[d] += 1
        return tuple(quotas)

    def places(self, crops_seen: int, count: int) -> Places:
        """Returns the `count` crops that follow the first `crops_seen` crops of the run."""
        return self._places_at(np.arange(crops_seen, crops_seen + count, dtype=np.int64))

    def times_drawn(self, crops_seen: int) -> list[np.ndarray]:
        """Returns, for each dataset, how often each of its crops is among the first `crops_seen`
        crops of the run."""
        times = []
        cycle, place = divmod(crops_seen, sum(self._quotas))
        for d, rows in enumerate(self.rows):
            quota, size = self._quotas[d], self._epoch_crops(d)
            drawn_positions = _count_own_positions(place, quota, sum(self._quotas[d:]))
            place -= drawn_positions
            epochs, begun = divmod(cycle * quota + drawn_positions, size)
            counts = np.full(len(rows), epochs, np.int32)
            counts[self._selected_index(d, np.full(begun, epochs), np.arange(begun))] += 1
            if size < len(rows):
                dropped = np.arange(size, len(rows))
                for epoch in range(epochs):
                    counts[self._selected_index(d, np.full(len(dropped), epoch), dropped)] -= 1
            of_crops = np.zeros(rows.shard_first[-1], np.int32)
            of_crops[rows.row(np.arange(len(rows)))] = counts
            times.append(of_crops)
        return times

    def batch(self, step: int) -> Places:
        return self.places_of_rank(step, 0, 1)

    def places_of_rank(
        self, step: int, rank: int, world: int, steps: int = 1, micro: int | None = None
    ) -> Places:
        """Returns a rank's share of `steps` successive global batches. The micro-batches that
        all ranks process at the same time are adjacent in the global batch, so the same crops
        are contrasted whatever the number of ranks."""
        if world < 1 or self.batch_crops % world:
            raise OrderError(
                f"train.batch_crops={self.batch_crops} cannot be shared equally by {world} ranks: "
                f"make it a multiple of {world}"
            )
        rank_crops = self.batch_crops // world
        micro = micro or rank_crops
        if rank_crops % micro:
            raise OrderError(
                f"train.micro_batch={micro}: must divide the {rank_crops} crops of a rank"
            )
        first = np.arange(step, step + steps, dtype=np.int64) * self.batch_crops + rank * micro
        parts = np.arange(rank_crops // micro)[:, None] * (micro * world) + np.arange(micro)
        return self._places_at((first[:, None] + parts.reshape(-1)).reshape(-1))

    def _places_at(self, position: np.ndarray) -> Places:
        dataset, turn = dataset_and_draw_number(position, self._quotas)
        row, epoch = np.empty((2, len(position)), np.int64)
        for d, rows in enumerate(self.rows):
            own_positions = np.flatnonzero(dataset == d)
            epoch[own_positions], i = np.divmod(turn[own_positions], self._epoch_crops(d))
            row[own_positions] = rows.row(self._selected_index(d, epoch[own_positions], i))
        return Places(dataset, row, epoch)

    def _epoch_crops(self, dataset: int) -> int:
        """Returns the number of crops in one epoch of a dataset. A single dataset drops the
        incomplete last batch; several datasets drop nothing."""
        return self.crops_per_epoch if len(self.rows) == 1 else len(self.rows[dataset])

    def _selected_index(self, dataset: int, epoch: np.ndarray, i: np.ndarray) -> np.ndarray:
        rows = self.rows[dataset]
        if not 0 < self.block_shards < len(rows.first) - 1:  # one block
            return permute(i, len(rows), bits(self.seed, RandomStream.ORDER, dataset, epoch))
        index = np.empty_like(i)
        for e in np.unique(epoch).tolist():
            layout = _epoch_layout(rows, self.seed, dataset, e, self.block_shards)
            in_epoch = epoch == e
            index[in_epoch] = _row_after_block_shuffle(layout, i[in_epoch])
        return index


@dataclass(frozen=True, eq=False)
class _EpochLayout:
    """The order of the shards in one epoch, without empty shards."""

    index: np.ndarray  # [shards] for each shard, the index of its first row among the selected rows
    # [shards + 1] number of rows before each shard, in the order of this epoch
    before: np.ndarray
    block_first: np.ndarray  # [blocks + 1] number of rows before each block
    block_key: np.ndarray  # [blocks] key of the permutation within each block


@lru_cache(maxsize=64)
def _epoch_layout(
    rows: DatasetRows, seed: int, dataset: int, epoch: int, block_shards: int
) -> _EpochLayout:
    """Returns the order of shards in an epoch. This is the only work that grows with the number
    of shards: 1 to 5 ms for 10,000 shards, once per epoch."""
    crops = np.diff(rows.first)
    filled = np.flatnonzero(crops)
    key = bits(seed, RandomStream.SHARD_ORDER, dataset, epoch)
    shard = filled[permute(np.arange(len(filled)), len(filled), key)]
    before = np.concatenate([[0], np.cumsum(crops[shard])])
    block_first = np.append(before[:-1:block_shards], before[-1])
    keys = bits(seed, RandomStream.BLOCK_ORDER, dataset, epoch, np.arange(len(block_first) - 1))
    return _EpochLayout(rows.first[shard], before, block_first, keys)


def _row_after_block_shuffle(layout: _EpochLayout, i: np.ndarray) -> np.ndarray:
    block = np.searchsorted(layout.block_first, i, side="right") - 1
    start, end = layout.block_first[block], layout.block_first[block + 1]
    j = start + permute(i - start, end - start, layout.block_key[block])
    k = np.searchsorted(layout.before, j, side="right") - 1
    return np.asarray(layout.index[k] + j - layout.before[k])


def shards_needed(order: Order, crops_seen: int) -> Iterator[tuple[int, int]]:
    """Yields (dataset, shard) endlessly, in the order in which the shards are needed after the
    first `crops_seen` crops. Each shard comes once in each epoch of its dataset."""
    epochs: dict[int, tuple[int, set[int]]] = {}
    for start in count(crops_seen, LOOK_AHEAD_CROPS):
        places = order.places(start, LOOK_AHEAD_CROPS)
        shard = np.empty(LOOK_AHEAD_CROPS, np.int64)
        for d, rows in enumerate(order.rows):
            is_own = places.dataset == d
            shard[is_own] = rows.shard(places.row[is_own])
        columns = (column.tolist() for column in (places.dataset, places.epoch, shard))
        for d, epoch, number in dict.fromkeys(zip(*columns, strict=True)):
            epoch_now, given_shards = epochs.get(d, (-1, set()))
            if epoch_now != epoch:
                given_shards = set()
                epochs[d] = epoch, given_shards
            if number not in given_shards:
                given_shards.add(number)
                yield d, number
