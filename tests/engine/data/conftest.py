"""Datasets that a test may damage."""

from contextlib import ExitStack, closing

import pytest
from shards_made import make_dataset
from staged import CROPS, room

from omnilead.data_tools.io import storage
from omnilead.data_tools.sharding import shards as shard_writers
from omnilead.engine.data import staging
from omnilead.engine.data.staging import Staging


@pytest.fixture
def small(tmp_path):
    return make_dataset(tmp_path / "small", shards=5, crops=4)


@pytest.fixture
def twin(tmp_path, monkeypatch):
    """Tar and zarr, four crops in each file."""
    monkeypatch.setattr(shard_writers, "SHARD_CROPS", 4)
    return make_dataset(tmp_path / "twin", shards=5, crops=4, zarr=True)


@pytest.fixture(scope="session")
def ten(tmp_path_factory):
    """Ten shards of two crops. Read only."""
    return make_dataset(tmp_path_factory.mktemp("ten") / "ten", shards=10, crops=CROPS, seed=5)


@pytest.fixture
def staged(tmp_path):
    """Makes caches in the test's folder, which are closed at the end, with their threads."""
    with ExitStack() as opened:

        def stage(dataset, shards=10, order=(), **how):
            """With room for so many shards of the dataset; `order`: in which they are needed."""
            needed = ((0, shard) for shard in order)
            return opened.enter_context(
                closing(Staging({0: dataset}, tmp_path, room(dataset, shards), needed, **how))
            )

        yield stage


@pytest.fixture
def small_and_quick(monkeypatch):
    monkeypatch.setattr(staging, "PART_BYTES", 100_000)
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(staging, "POLL_S", 0.01)
    monkeypatch.setattr(staging, "WAIT_S", 0.1)
