"""The order of crops: a function of the position, the same for every world size, with complete
epochs and weighted mixtures."""

import pickle
import tracemalloc
from dataclasses import replace
from itertools import chain, islice
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.data import order as order_module
from omnilead.engine.data.order import (
    DatasetRows,
    Order,
    OrderError,
    Selection,
    dataset_and_draw_number,
    shards_needed,
)

fewer = settings(max_examples=40)


def sized(crops, shard=16):
    sizes = [min(shard, crops - start) for start in range(0, crops, shard)]
    return DatasetRows.from_sizes("fake", sizes)


@st.composite
def any_rows(draw):
    """Shards, some of them empty, of which all or some rows are selected."""
    shards = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
    chosen = draw(st.none() | st.sets(st.integers(0, sum(shards) - 1), min_size=1))
    return DatasetRows.from_sizes(
        "some", shards, None if chosen is None else np.array(sorted(chosen))
    )


@st.composite
def any_order(draw, datasets=4):
    rows = tuple(draw(st.lists(any_rows(), min_size=1, max_size=datasets)))
    weights = draw(st.none() | st.tuples(*[st.floats(0.05, 20)] * len(rows)))
    batch = draw(st.integers(1, sum(map(len, rows))))
    return Order(rows, batch, draw(st.integers(0, 2**64)), weights, draw(st.integers(0, 5)))


def numbers(rows):
    return rows.row(np.arange(len(rows))).tolist()


def listed(places):
    """Dataset, row and epoch of each crop."""
    return np.stack([places.dataset, places.row, places.epoch], axis=1).tolist()


@fewer
@given(any_order(datasets=1), st.integers(0, 10**6))
def test_an_epoch_is_a_permutation_without_the_incomplete_batch(order, epoch):
    places = order.places(epoch * order.crops_per_epoch, order.crops_per_epoch)
    (rows,) = order.rows
    assert len(set(places.row.tolist())) == len(places) == len(rows) - len(rows) % order.batch_crops
    assert set(places.row.tolist()) <= set(numbers(rows))
    assert (places.epoch == epoch).all() and not places.dataset.any()
    assert order.crops_per_epoch == order.steps_per_epoch * order.batch_crops


@fewer
@given(any_order())
def test_each_of_several_datasets_has_its_own_complete_epochs(order):
    weights = order.weights and (*order.weights, 1.0)
    order = replace(order, rows=(*order.rows, sized(7)), weights=weights)
    places = order.places(0, 400)
    for d, rows in enumerate(order.rows):
        row, epoch = places.row[places.dataset == d], places.epoch[places.dataset == d]
        assert (epoch == np.arange(len(row)) // len(rows)).all()
        for start in range(0, len(row), len(rows)):
            part = row[start : start + len(rows)].tolist()
            left = set(numbers(rows)) - set(part)
            assert len(left) == len(rows) - len(part)  # each of its rows at most once


@fewer
@given(any_order(), st.integers(0, 300), st.integers(0, 100))
def test_resuming_anywhere_gives_the_uninterrupted_order(order, crops_seen, count):
    one_by_one = [listed(order.places(crops_seen + i, 1))[0] for i in range(count)]
    again = replace(order, rows=pickle.loads(pickle.dumps(order.rows)))
    assert listed(again.places(crops_seen, count)) == one_by_one
    assert listed(again.places(0, crops_seen + count))[crops_seen:] == one_by_one


@settings(max_examples=10)
@given(any_rows(), st.integers(0, 4), st.integers(0, 10**4))
def test_all_world_sizes_share_the_same_global_batches(rows, block_shards, step):
    order = Order((rows, sized(840)), 840, seed=3, weights=(1, 40), block_shards=block_shards)
    whole = [listed(order.batch(step)), listed(order.batch(step + 1))]
    assert whole[0] == listed(order.places(step * 840, 840))
    for world in range(1, 9):
        slices = [listed(order.places_of_rank(step, rank, world)) for rank in range(world)]
        assert [len(part) for part in slices] == [840 // world] * world
        assert list(chain(*slices)) == whole[0]  # in order, so no rank has a crop of another's
        several = listed(order.places_of_rank(step, world - 1, world, steps=2))
        assert several == whole[0][-840 // world :] + whole[1][-840 // world :]


@pytest.mark.parametrize("part", [8, 24, 48])
def test_contrasted_crops_are_the_same_for_all_world_sizes(part):
    """For each part of the global batch that all ranks process at the same time."""
    order = Order((sized(1000),), batch_crops=48, seed=3)
    whole = listed(order.batch(7)) + listed(order.batch(8))
    for world in (1, 2, 4, 8):
        micro = part // world
        shares = [listed(order.places_of_rank(7, rank, world, 2, micro)) for rank in range(world)]
        met = [
            chain(*(share[at : at + micro] for share in shares))
            for at in range(0, 96 // world, micro)
        ]
        assert list(chain(*met)) == whole


@pytest.mark.parametrize("block_shards", [0, 4])
def test_seeking_to_step_ten_million(block_shards):
    """The result equals counting all earlier positions of each dataset."""
    order = Order((sized(101), sized(50)), batch_crops=2, weights=(2, 1), block_shards=block_shards)
    before = np.zeros(2, np.int64)
    for start in range(0, 2 * 10**7, 4 * 10**6):
        dataset, _ = dataset_and_draw_number(np.arange(start, start + 4 * 10**6), order._quotas)
        before += np.bincount(dataset, minlength=2)
    for dataset, row, epoch in listed(order.batch(10**7)):
        alone = Order((order.rows[dataset],), 1, block_shards=block_shards)
        assert epoch == before[dataset] // len(alone.rows[0])
        # a dataset's stream does not depend on the others, only on its place among them
        if dataset == 0:
            assert row == alone.places(int(before[0]), 1).row[0]
        before[dataset] += 1


@pytest.mark.parametrize("block_shards", [0, 4])
def test_epochs_seeds_and_datasets_differ(block_shards):
    order = Order((sized(1000), sized(1000)), 10, seed=0, block_shards=block_shards)
    epochs = []
    for run in (order, *(replace(order, seed=seed) for seed in (1, 2, 2**63))):
        places = run.places(0, 4000)
        epochs += [places.row[places.dataset == d].reshape(2, 1000) for d in (0, 1)]
    rows = np.concatenate(epochs)
    assert max(np.mean(a == b) for k, a in enumerate(rows) for b in rows[:k]) < 0.01


@fewer
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=6), st.integers(0, 2**40))
def test_weights_hold_in_every_run_of_positions(weights, start):
    order = Order(tuple(sized(64) for _ in weights), 16, weights=tuple(weights))
    dataset = order.places(start, 5000).dataset
    share = np.array(weights) / sum(weights)
    for count in (512, 5000):  # in every batch, too
        found = np.bincount(dataset[:count], minlength=len(weights))
        assert np.abs(found - count * share).max() <= len(weights)


@fewer
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(0, 10))
def test_deal_gives_each_dataset_its_quota_in_order(quotas, cycle):
    total = sum(quotas)
    dataset, turn = dataset_and_draw_number(np.arange(cycle * total, (cycle + 2) * total), quotas)
    for d, quota in enumerate(quotas):
        assert (turn[dataset == d] == cycle * quota + np.arange(2 * quota)).all()


def test_without_weights_every_crop_comes_once_before_any_repeat():
    sizes = (1000, 10, 333)
    places = Order(tuple(sized(size) for size in sizes), 1).places(0, 1343)
    expected = [[d, r, 0] for d, size in enumerate(sizes) for r in range(size)]
    assert sorted(listed(places)) == expected


@fewer
@given(any_rows(), st.integers(1, 5), st.integers(0, 3))
def test_a_block_contains_only_its_own_shards(rows, block_shards, epoch):
    order = Order((rows,), 1, block_shards=block_shards)
    left = rows.shard(order.places(epoch * len(rows), len(rows)).row)
    sizes = np.bincount(left, minlength=len(rows.first) - 1)
    assert (sizes == np.diff(rows.first)).all()
    while len(left):
        # the next G shards, which fill what follows by themselves
        block = list(dict.fromkeys(left.tolist()))[:block_shards]
        size = int(sizes[block].sum())
        assert set(left[:size].tolist()) == set(block)
        left = left[size:]


def test_block_order_mixes_the_crops_of_a_block_and_the_blocks_themselves():
    rows = sized(64 * 100, shard=100)
    order = Order((rows,), 100, block_shards=8)
    shard = np.stack([rows.shard(order.places(e * 6400, 6400).row) for e in range(3)])
    assert all(len(set(batch.tolist())) == 8 for batch in shard[0].reshape(64, 100))
    blocks = [{frozenset(part.tolist()) for part in epoch.reshape(8, 800)} for epoch in shard]
    assert not blocks[0] & blocks[1] and not blocks[1] & blocks[2]


@fewer
@given(any_order(), st.integers(0, 200))
def test_shards_are_needed_in_the_order_in_which_their_crops_come(order, crops_seen):
    expected = {}
    for d, row, epoch in listed(order.places(crops_seen, 200)):
        expected[d, epoch, int(order.rows[d].shard(np.array([row]))[0])] = None
    with patch.object(order_module, "LOOK_AHEAD_CROPS", 64):
        needed = list(islice(shards_needed(order, crops_seen), len(expected)))
    assert needed == [(d, shard) for d, _, shard in expected]


# a layout of 10,000 shards is held for each of a few epochs
@pytest.mark.parametrize(("block_shards", "most"), [(0, 200_000), (32, 2_000_000)])
def test_memory_does_not_grow_with_ten_million_crops(block_shards, most):
    order = Order((sized(10**7, shard=1024),), 512, block_shards=block_shards)
    order.batch(0)
    tracemalloc.start()
    for step in (1, 10**4, 10**7):
        order.batch(step)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < most


def test_orders_never_change():
    """These values must never change: resumed runs and published tables depend on them."""
    one, both = (sized(1000),), (sized(1000), sized(333))
    places = Order(one, 10, seed=42).places(998, 4)
    assert places.row.tolist() == [165, 570, 153, 598] and places.epoch.tolist() == [0, 0, 1, 1]
    places = Order(one, 10, seed=42, block_shards=4).places(998, 4)
    assert places.row.tolist() == [608, 600, 277, 276] and places.epoch.tolist() == [0, 0, 1, 1]
    places = Order(both, 10, seed=42).places(10_000, 6)
    assert places.dataset.tolist() == [0, 1, 0, 0, 0, 1] and set(places.epoch.tolist()) == {7}
    assert places.row.tolist() == [863, 8, 427, 135, 303, 203]
    weighted = Order(both, 10, seed=42, weights=(0.4, 0.6), block_shards=2)
    assert listed(weighted.places(10**12, 6)) == [
        [1, 31, 1801801800],
        [1, 26, 1801801800],
        [0, 117, 400000000],
        [1, 316, 1801801800],
        [0, 60, 400000000],
        [1, 19, 1801801800],
    ]


def test_rows_of_a_dataset_follow_its_roles(dataset):
    for roles in ({}, {"pretrain": True}, {"dx": "test"}):
        assert (
            numbers(DatasetRows.select(dataset, Selection(**roles)))
            == dataset.select(**roles).tolist()
        )
    pretrain, halves = dataset.select(pretrain=True), dataset.column("halves")
    both = DatasetRows.select(dataset, Selection(pretrain=True, halves=2))
    assert numbers(both) == pretrain[halves[pretrain] == 2].tolist()
    everything = np.arange(len(dataset))
    shard = DatasetRows.select(dataset).shard(everything)
    assert shard.tolist() == dataset.column("shard").tolist()
    says = r"\A.*no crop has dx='tset', halves=2; its roles are .*'train'.*: select.*\Z"
    with pytest.raises(OrderError, match=says):
        DatasetRows.select(dataset, Selection(dx="tset", halves=2))


def test_after_a_row_comes_the_next_selected_one():
    """It replaces a row that cannot be read."""
    some, every = (DatasetRows.from_sizes("d", [10], rows) for rows in (np.array([2, 5, 9]), None))
    assert [some.next_selected_row(row) for row in (2, 3, 5, 9)] == [5, 5, 9, 2]
    assert [every.next_selected_row(row) for row in (2, 9)] == [3, 0]


def test_a_zarr_store_has_shards_of_its_storage_objects(dataset):
    rows = DatasetRows.select(Dataset(dataset.root, dataset.meta | {"shards": [], "crops": 2500}))
    assert rows.shard(np.array([0, 1023, 1024, 2499])).tolist() == [0, 0, 1, 2]
    with pytest.raises(OrderError, match="run omnilead verify"):
        DatasetRows.select(Dataset(dataset.root, dataset.meta | {"crops": 5 * len(dataset)}))


NOTHING = DatasetRows.from_sizes("empty", [3], np.array([], int))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"rows": ()}, "no dataset"),
        ({"batch_crops": 0}, "train.batch_crops=0"),
        (
            {"batch_crops": 101},
            "train.batch_crops=101: 100 crops are selected: use a number from 1 to 100",
        ),
        ({"weights": (1.0, 2.0)}, "pipeline.weights=.1.0, 2.0.: give a positive number for each"),
        ({"weights": (0.0,)}, "give a positive number"),
        ({"weights": (float("nan"),)}, "give a positive number"),
        ({"rows": (sized(50), sized(90)), "weights": (1.0, 1e-12)}, "below 2..-30"),
        ({"rows": (NOTHING,)}, "empty: 0 crops are selected"),
    ],
)
def test_an_invalid_order_is_a_one_line_error(wrong, message):
    with pytest.raises(OrderError, match=rf"\A.*{message}.*\Z"):
        Order(**({"rows": (sized(100),), "batch_crops": 10} | wrong))


@pytest.mark.parametrize(
    "world, micro, message",
    [
        (3, None, "train.batch_crops=10 cannot be shared equally by 3 ranks"),
        (0, None, "by 0 ranks"),
        (2, 4, "train.micro_batch=4: must divide the 5 crops of a rank"),
    ],
)
def test_impossible_shares_are_refused(world, micro, message):
    with pytest.raises(OrderError, match=message):
        Order((sized(100),), 10).places_of_rank(0, 0, world, micro=micro)
