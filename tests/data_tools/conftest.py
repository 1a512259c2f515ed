"""Fixtures for the tests of data_tools."""

import pytest
from shell import Shell

from omnilead.data_tools.build import plan
from omnilead.data_tools.build import shards as shard_writers
from omnilead.data_tools.extras.synthetic.archive import synthesise


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


@pytest.fixture(scope="module")
def small_shards():
    """Four crops in a shard and in a storage object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 4)
        patch.setattr(shard_writers, "SHARD_CROPS", 4)
        yield
