"""Fixtures for the tests of data_tools."""

from contextlib import contextmanager

import pytest
from handmade import build
from shell import Shell

from omnilead.data_tools.sharding import plan
from omnilead.data_tools.sharding import shards as shard_writers
from omnilead.data_tools.synthetic.archive import synthesise


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A synthetic archive of 15 records of 10 s; ten of them are two sessions of five PTB-XL
    patients. Read only."""
    out = tmp_path_factory.mktemp("small") / "archive"
    synthesise(out, patients=5, two_sessions=1, seed=7, progress=False)
    return out


@pytest.fixture
def shell(capsys):
    return Shell(capsys)


@contextmanager
def four_crops():
    """In a shard and in a storage object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 4)
        patch.setattr(shard_writers, "SHARD_CROPS", 4)
        yield


@pytest.fixture(scope="module")
def small_shards():
    with four_crops():
        yield


@pytest.fixture(scope="session")
def more(tmp_path_factory):
    """An archive to add. Read only."""
    out = tmp_path_factory.mktemp("more") / "archive"
    synthesise(out, patients=3, two_sessions=1, seed=8, progress=False)
    return out


@pytest.fixture(scope="session")
def old(small, tmp_path_factory):
    """The dataset of `small`. Read only."""
    out = tmp_path_factory.mktemp("old") / "out"
    with four_crops():
        build(small, out)
    return out
