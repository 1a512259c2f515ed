"""The order of crops: a function of the position, the same for every world size, with complete
epochs and weighted mixtures."""

import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.data import order as order_module
from omnilead.engine.data.order import DatasetRows, Order, OrderError, Places, deal, shards_needed

fewer = settings(max_examples=40)


def sized(crops: int, shard: int = 16, name: str = "fake") -> DatasetRows:
    return DatasetRows.among(name, [min(shard, crops - start) for start in range(0, crops, shard)])


@st.composite
def any_rows(draw: st.DrawFn) -> DatasetRows:
    """Shards, some of them empty, of which all or some rows are selected."""
    shards = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
    chosen = draw(st.none() | st.sets(st.integers(0, sum(shards) - 1), min_size=1))
    return DatasetRows.among("some", shards, None if chosen is None else np.array(sorted(chosen)))


@st.composite
def any_order(draw: st.DrawFn, datasets: int = 4) -> Order:
    rows = tuple(draw(st.lists(any_rows(), min_size=1, max_size=datasets)))
    weights = draw(st.none() | st.tuples(*[st.floats(0.05, 20)] * len(rows)))
    batch = draw(st.integers(1, sum(map(len, rows))))
    return Order(rows, batch, draw(st.integers(0, 2**64)), weights, draw(st.integers(0, 5)))


def numbers(rows: DatasetRows) -> list[int]:
    return rows.row(np.arange(len(rows))).tolist()  # type: ignore[no-any-return]


def listed(places: Places) -> list[tuple[int, int, int]]:
    return list(
        zip(places.dataset.tolist(), places.row.tolist(), places.epoch.tolist(), strict=True)
    )


def walk(order: Order) -> Iterator[tuple[int, int, int]]:
    """The whole run, one crop at a time."""
    position = 0
    while True:
        yield from listed(order.places(position, 1))
        position += 1


@fewer
@given(any_order(datasets=1), st.integers(0, 10**6))
def test_an_epoch_is_a_permutation_without_the_incomplete_batch(order: Order, epoch: int) -> None:
    places = order.places(epoch * order.crops_per_epoch, order.crops_per_epoch)
    (rows,) = order.rows
    assert len(set(places.row.tolist())) == len(places) == len(rows) - len(rows) % order.batch_crops
    assert set(places.row.tolist()) <= set(numbers(rows))
    assert (places.epoch == epoch).all() and not places.dataset.any()
    assert order.crops_per_epoch == order.steps_per_epoch * order.batch_crops


@pytest.mark.parametrize("crops", [1, 2, 3, 1024, 65_537])
def test_an_epoch_of_any_size_is_complete(crops: int) -> None:
    for block_shards in (0, 2):
        row = Order((sized(crops),), 1, block_shards=block_shards).places(0, crops).row
        assert len(set(row.tolist())) == crops


@fewer
@given(any_order())
def test_each_of_several_datasets_has_its_own_complete_epochs(order: Order) -> None:
    order = replace(
        order, rows=(*order.rows, sized(7)), weights=order.weights and (*order.weights, 1.0)
    )
    places = order.places(0, 400)
    for d, rows in enumerate(order.rows):
        row, epoch = places.row[places.dataset == d], places.epoch[places.dataset == d]
        assert (epoch == np.arange(len(row)) // len(rows)).all()
        for start in range(0, len(row), len(rows)):
            part = row[start : start + len(rows)].tolist()
            assert len(set(part)) == len(part)
            assert (
                set(part) <= set(numbers(rows))
                if len(part) < len(rows)
                else sorted(part) == numbers(rows)
            )


@fewer
@given(any_order(), st.integers(0, 300), st.integers(0, 100))
def test_resuming_anywhere_gives_the_uninterrupted_order(
    order: Order, crops_seen: int, count: int
) -> None:
    uninterrupted = list(islice(walk(order), crops_seen + count))
    again = Order(
        tuple(pickle.loads(pickle.dumps(order.rows))),
        order.batch_crops,
        order.seed,
        order.weights,
        order.block_shards,
    )
    assert listed(again.places(crops_seen, count)) == uninterrupted[crops_seen:]


@fewer
@given(any_order(), st.integers(0, 50), st.integers(1, 5))
def test_several_steps_at_once_equal_single_steps(order: Order, step: int, steps: int) -> None:
    for world in (w for w in (1, 2, 3) if order.batch_crops % w == 0):
        one_by_one = [
            place
            for s in range(step, step + steps)
            for place in listed(order.slice(s, world - 1, world))
        ]
        assert listed(order.slice(step, world - 1, world, steps)) == one_by_one


@fewer
@given(any_rows(), st.integers(0, 4), st.integers(0, 10**4))
def test_all_world_sizes_share_the_same_global_batches(
    rows: DatasetRows, block_shards: int, step: int
) -> None:
    order = Order(
        (rows, sized(840)), batch_crops=840, seed=3, weights=(1, 2), block_shards=block_shards
    )
    whole = listed(order.batch(step))
    assert whole == listed(order.places(step * 840, 840))
    for world in range(1, 9):
        slices = [listed(order.slice(step, rank, world)) for rank in range(world)]
        assert [len(part) for part in slices] == [840 // world] * world
        assert list(chain(*slices)) == whole  # in order, so no rank has a crop of another's


@pytest.mark.parametrize("part", [8, 24, 48])
def test_contrasted_crops_are_the_same_for_all_world_sizes(part: int) -> None:
    """For each part of the global batch that all ranks process at the same time."""
    order = Order((sized(1000),), batch_crops=48, seed=3)
    whole = listed(order.batch(7)) + listed(order.batch(8))
    for world in (1, 2, 4, 8):
        micro = part // world
        shares = [listed(order.slice(7, rank, world, 2, micro)) for rank in range(world)]
        met = [
            chain(*(share[at : at + micro] for share in shares))
            for at in range(0, 96 // world, micro)
        ]
        assert list(chain(*met)) == whole
    with pytest.raises(
        OrderError, match=r"train\.micro_batch=5: must divide the 24 crops of a rank"
    ):
        order.slice(0, 0, 2, micro=5)


@pytest.mark.parametrize("block_shards", [0, 4])
def test_seeking_to_step_ten_million(block_shards: int) -> None:
    """The result equals counting all earlier positions of each dataset."""
    order = Order((sized(101), sized(50)), batch_crops=2, weights=(2, 1), block_shards=block_shards)
    far = order.batch(10**7)
    before = np.zeros(2, np.int64)
    for start in range(0, 2 * 10**7, 4 * 10**6):
        before += np.bincount(
            deal(np.arange(start, start + 4 * 10**6), order._quotas)[0], minlength=2
        )
    for dataset, row, epoch in listed(far):
        alone = Order((order.rows[dataset],), 1, block_shards=block_shards)
        assert epoch == before[dataset] // len(alone.rows[0])
        if (
            dataset == 0
        ):  # a dataset's stream does not depend on the others, only on its place among them
            assert row == alone.places(int(before[0]), 1).row[0]
        before[dataset] += 1
    single = Order((sized(101),), batch_crops=2, block_shards=block_shards)
    whole_epoch = single.places(2 * 10**7 // 100 * 100, 100)
    assert listed(single.batch(10**7)) == listed(whole_epoch)[2 * 10**7 % 100 :][:2]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    for block_shards in (0, 4):
        order = Order((sized(1000),), 10, seed=0, block_shards=block_shards)
        epochs = [order.places(e * 1000, 1000).row for e in range(5)]
        epochs += [replace(order, seed=seed).places(0, 1000).row for seed in (1, 2, 2**63)]
        same = [np.mean(a == b) for k, a in enumerate(epochs) for b in epochs[:k]]
        assert max(same) < 0.01
        assert (
            order.places(0, 1000).row
            == Order((sized(1000),), 10, block_shards=block_shards).places(0, 1000).row
        ).all()


def test_two_datasets_of_one_size_have_different_orders() -> None:
    places = Order((sized(500), sized(500)), 10).places(0, 1000)
    first, second = (places.row[places.dataset == d] for d in (0, 1))
    assert len(first) == len(second) == 500 and np.mean(first == second) < 0.02


def test_weights_do_not_matter_for_one_dataset() -> None:
    rows = sized(997)
    plain = Order((rows,), 8, seed=5).places(0, 3000)
    assert listed(Order((rows,), 8, seed=5, weights=(0.3,)).places(0, 3000)) == listed(plain)


@fewer
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.integers(0, 2**40))
def test_weights_hold_in_every_run_of_positions(weights: list[float], start: int) -> None:
    order = Order(tuple(sized(64) for _ in weights), 16, weights=tuple(weights))
    dataset = order.places(start, 5000).dataset
    for d, weight in enumerate(weights):
        expected = 5000 * weight / sum(weights)
        assert abs(np.sum(dataset == d) - expected) <= len(weights)
        assert abs(np.sum(dataset[:512] == d) - expected * 512 / 5000) <= len(
            weights
        )  # in every batch, too


@fewer
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(0, 10))
def test_deal_gives_each_dataset_its_quota_in_order(quotas: list[int], cycle: int) -> None:
    total = sum(quotas)
    dataset, turn = deal(np.arange(cycle * total, (cycle + 2) * total), quotas)
    for d, quota in enumerate(quotas):
        assert (turn[dataset == d] == cycle * quota + np.arange(2 * quota)).all()


def test_without_weights_every_crop_comes_once_before_any_repeat() -> None:
    order = Order((sized(1000), sized(10), sized(333)), 1)
    places = order.places(0, 2 * 1343)
    assert (np.bincount(places.dataset) == [2000, 20, 666]).all()
    assert sorted(listed(places)[:1343]) == [
        (d, r, 0) for d, n in enumerate((1000, 10, 333)) for r in range(n)
    ]


@fewer
@given(any_rows(), st.integers(1, 5), st.integers(0, 3))
def test_a_block_contains_only_its_own_shards(
    rows: DatasetRows, block_shards: int, epoch: int
) -> None:
    order = Order((rows,), 1, block_shards=block_shards)
    shard = rows.shard(order.places(epoch * len(rows), len(rows)).row)
    sizes = np.bincount(shard, minlength=len(rows.first) - 1)
    assert (sizes == np.diff(rows.first)).all()
    seen: set[int] = set()
    left = shard
    while len(left):
        block = list(dict.fromkeys(left.tolist()))[
            :block_shards
        ]  # the next G shards, which fill what follows by themselves
        size = int(sizes[block].sum())
        assert set(left[:size].tolist()) == set(block) and not seen & set(block)
        seen |= set(block)
        left = left[size:]


def test_block_order_mixes_the_crops_of_a_block_and_the_blocks_themselves() -> None:
    rows = sized(64 * 100, shard=100)
    order = Order((rows,), 100, block_shards=8)
    shard = np.stack([rows.shard(order.places(e * 6400, 6400).row) for e in range(3)])
    assert all(len(set(batch.tolist())) == 8 for batch in shard[0].reshape(64, 100))
    blocks = [{frozenset(part.tolist()) for part in epoch.reshape(8, 800)} for epoch in shard]
    assert not blocks[0] & blocks[1] and not blocks[1] & blocks[2]
    one_block = replace(order, block_shards=1000)  # more than there are: all of them
    assert sorted(one_block.places(0, 6400).row.tolist()) == list(range(6400))


@fewer
@given(any_order(), st.integers(0, 200))
def test_shards_are_needed_in_the_order_in_which_their_crops_come(
    order: Order, crops_seen: int
) -> None:
    expected: dict[tuple[int, int, int], None] = {}
    for d, row, epoch in listed(order.places(crops_seen, 200)):
        expected[d, epoch, int(order.rows[d].shard(np.array([row]))[0])] = None
    with patch.object(order_module, "LOOK_AHEAD", 64):
        assert list(islice(shards_needed(order, crops_seen), len(expected))) == [
            (d, shard) for d, _, shard in expected
        ]


@pytest.mark.parametrize("block_shards", [0, 32])
def test_memory_does_not_grow_with_ten_million_crops(block_shards: int) -> None:
    order = Order((sized(10**7, shard=1024),), 512, block_shards=block_shards)
    order.batch(0)
    tracemalloc.start()
    for step in (1, 10**4, 10**7):
        order.batch(step)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (
        200_000 if not block_shards else 2_000_000
    )  # a layout of 10,000 shards is held for each of a few epochs


def test_orders_never_change() -> None:
    """These values must never change: resumed runs and published tables depend on them."""
    one, two = sized(1000), sized(333)
    assert listed(Order((one,), 10, seed=42).places(998, 4)) == [
        (0, 165, 0),
        (0, 570, 0),
        (0, 153, 1),
        (0, 598, 1),
    ]
    assert listed(Order((one,), 10, seed=42, block_shards=4).places(998, 4)) == [
        (0, 608, 0),
        (0, 600, 0),
        (0, 277, 1),
        (0, 276, 1),
    ]
    assert listed(Order((one, two), 10, seed=42).places(10_000, 6)) == [
        (0, 863, 7),
        (1, 8, 7),
        (0, 427, 7),
        (0, 135, 7),
        (0, 303, 7),
        (1, 203, 7),
    ]
    assert listed(
        Order((one, two), 10, seed=42, weights=(0.4, 0.6), block_shards=2).places(10**12, 6)
    ) == [
        (1, 31, 1801801800),
        (1, 26, 1801801800),
        (0, 117, 400000000),
        (1, 316, 1801801800),
        (0, 60, 400000000),
        (1, 19, 1801801800),
    ]


def test_rows_of_a_dataset_follow_its_roles(dataset: Dataset) -> None:
    everything, pretrain = DatasetRows.of(dataset), DatasetRows.of(dataset, pretrain=True)
    assert len(everything) == len(dataset) and numbers(everything) == list(range(len(dataset)))
    assert numbers(pretrain) == dataset.select(pretrain=True).tolist()
    assert numbers(DatasetRows.of(dataset, dx="test")) == dataset.select(dx="test").tolist()
    halves = dataset.column("halves")
    assert numbers(DatasetRows.of(dataset, halves=2)) == np.flatnonzero(halves == 2).tolist()
    both = DatasetRows.of(dataset, pretrain=True, halves=2)
    assert numbers(both) == [row for row in dataset.select(pretrain=True) if halves[row] == 2]
    assert everything.shard(np.arange(len(dataset))).tolist() == dataset.column("shard").tolist()
    batch = Order((both,), 8, seed=1).batch(0)
    assert all(dataset.read(row).shape == (12, 5000) for row in batch.row.tolist())
    with pytest.raises(
        OrderError, match=r"no crop has dx='tset', halves=2; its roles are .*'train'.*: select"
    ) as error:
        DatasetRows.of(dataset, dx="tset", halves=2)
    assert "\n" not in str(error.value)


def test_a_zarr_store_has_shards_of_its_storage_objects(dataset: Dataset) -> None:
    alone = Dataset(dataset.root, dataset.meta | {"shards": [], "crops": 2500})
    rows = DatasetRows.of(alone)
    assert len(rows) == 2500 and rows.shard(np.array([0, 1023, 1024, 2499])).tolist() == [
        0,
        0,
        1,
        2,
    ]


def test_shards_that_do_not_add_up_are_refused(dataset: Dataset) -> None:
    with pytest.raises(OrderError, match="run omnilead verify"):
        DatasetRows.of(Dataset(dataset.root, dataset.meta | {"crops": 5 * len(dataset)}))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"rows": ()}, "no dataset"),
        ({"batch_crops": 0}, "train.batch_crops=0"),
        ({"batch_crops": 101}, "train.batch_crops=101: 100 crops are selected: use 1 to 100"),
        (
            {"weights": (1.0, 2.0)},
            "pipeline.weights=.1.0, 2.0.: give a positive number for each of 1",
        ),
        ({"weights": (0.0,)}, "give a positive number"),
        ({"weights": (float("nan"),)}, "give a positive number"),
        ({"rows": (sized(5), sized(9)), "batch_crops": 2, "weights": (1.0, 1e-12)}, "below 2..-30"),
        (
            {"rows": (DatasetRows.among("empty", [3], np.array([], int)),)},
            "empty: 0 crops are selected",
        ),
    ],
)
def test_an_invalid_order_is_a_one_line_error(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(OrderError, match=message) as error:
        Order(**({"rows": (sized(100),), "batch_crops": 10} | wrong))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "call, arguments, message",
    [
        (Order.slice, (0, 0, 3), "train.batch_crops=10 cannot be shared equally by 3 ranks"),
        (Order.slice, (0, 0, 0), "by 0 ranks"),
    ],
)
def test_invalid_positions_and_world_sizes_are_refused(
    call: Callable[..., Places], arguments: tuple[int, ...], message: str
) -> None:
    with pytest.raises(OrderError, match=message):
        call(Order((sized(100),), 10), *arguments)
