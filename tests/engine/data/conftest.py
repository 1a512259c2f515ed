"""Datasets that a test may damage."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shards_made import make_dataset
from staged import CROPS

from omnilead.data_tools import storage, zarr_writer
from omnilead.data_tools.dataset import Dataset
from omnilead.engine.data import staging
from omnilead.engine.data.augment_draws import white_bank
from omnilead.engine.data.staging import Staging


@pytest.fixture
def small(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "small", shards=5, crops=4)


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Tar and zarr, four crops in each file."""
    monkeypatch.setattr(zarr_writer, "SHARD_CROPS", 4)
    return make_dataset(tmp_path / "twin", shards=5, crops=4, zarr=True)


@pytest.fixture(scope="session")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Ten shards of two crops. Read only."""
    return make_dataset(tmp_path_factory.mktemp("ten") / "ten", shards=10, crops=CROPS, seed=5)


@pytest.fixture
def stagings() -> Iterator[list[Staging]]:
    """A list of caches that are closed at the end, with their threads."""
    made: list[Staging] = []
    yield made
    for one in made:
        one.close()


@pytest.fixture
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PART_BYTES", 100_000)
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(staging, "POLL_S", 0.01)


@pytest.fixture(scope="module")
def bank() -> np.ndarray:
    return white_bank(5)
