"""Shared by all tests: one small synthetic archive, and where the real ECGs lie if they do."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from data_tools.build import Settings, shard
from data_tools.dataset import Dataset
from data_tools.sources import open_sources
from data_tools.synth import synthesise

REAL = Path(__file__).parents[2] / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What only a GPU can show is skipped where there is none; torch is asked only if such a test is there."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def real_ecgs() -> Path:
    """863 real ECGs of six databases, which are not part of the project."""
    if not (REAL / "ecg").is_dir():
        pytest.skip("the real ECGs are not here (../shared/ecg)")
    return REAL / "ecg"


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 synthetic PTB-XL patients with two sessions and 60 records of the other databases. Read only."""
    out = tmp_path_factory.mktemp("archive") / "synthetic"
    synthesise(out, patients=60, sessions=2, seed=7, progress=False)
    return out


@pytest.fixture(scope="session")
def dataset(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The archive as tar and zarr, read only."""
    out = tmp_path_factory.mktemp("dataset") / "both"
    return shard(open_sources(str(archive)), Settings(str(out), format="both", quiet=True))
