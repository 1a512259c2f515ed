"""Fixtures for all tests: a small synthetic archive and dataset, a saved model, and the real ECGs
if available."""

import contextlib
import gc
import os
from dataclasses import asdict
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Too little is compiled for a CPU to start a pool of compilers
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

from omnilead.data_tools.sharding.roles import RoleSources
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.data_tools.synthetic.archive import synthesise
from tests import unsynced  # noqa: F401
from tests.forks import freeze

with contextlib.suppress(ImportError):  # may be missing where only the GPU tests run
    import hypothesis

    hypothesis.settings.register_profile(
        "repeatable",
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        derandomize=True,
    )
    hypothesis.settings.load_profile("repeatable")

REAL = Path(__file__).parents[2] / "shared"


def pytest_configure(config):
    """xdist gives out files as they stand, not first those of most tests."""
    config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Imports all tests."""
    gc.disable()
    collected = yield
    freeze()
    gc.enable()
    return collected


def pytest_collection_modifyitems(items):
    """Files with slow tests come first, so that no worker is left alone with one at the end. Skip GPU
    tests if there is no GPU; import torch only if such a test was collected."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_addoption(parser):
    parser.addoption("--write-golden", action="store_true", help="texts that tests compare")


@pytest.fixture
def golden(request):
    """Compares a text with a file in the folder golden beside the test."""

    def compare(name, text):
        path = request.path.parent / "golden" / name
        if request.config.getoption("--write-golden"):
            path.write_text(text)
        assert text == path.read_text(), f"if this is wanted: pytest --write-golden {request.path}"

    return compare


@pytest.fixture
def key_file(tmp_path):
    """A key of pseudonyms, as short as is allowed, which nobody else may read."""
    path = tmp_path / "key"
    path.write_bytes(bytes(range(16)))
    path.chmod(0o600)
    return path


@pytest.fixture
def in_parts(monkeypatch):
    """Reads and writes of open files answer with 64 KiB at most, as a network file system may."""
    pread, preadv, pwrite = os.pread, os.preadv, os.pwrite

    def part(data):
        return memoryview(data).cast("B")[: 2**16]

    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 2**16), at))
    monkeypatch.setattr(os, "preadv", lambda file, into, at: preadv(file, [part(into[0])], at))
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, part(data), at))
    read = os.read
    monkeypatch.setattr(os, "read", lambda file, size: read(file, min(size, 2**16)))


@pytest.fixture(scope="session")
def real_ecgs():
    """863 real ECGs from six databases, which are not part of the project."""
    if not (REAL / "ecg").is_dir():
        pytest.skip("no real ECGs in ../shared/ecg")
    return REAL / "ecg"


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """60 synthetic PTB-XL patients with two sessions and 60 records of the other databases. Read
    only."""
    out = tmp_path_factory.mktemp("archive") / "synthetic"
    synthesise(out, patients=60, two_sessions=1, seed=7, progress=False)
    return out


@pytest.fixture(scope="session")
def dataset(archive, tmp_path_factory):
    """The archive as tar and zarr, read only. All sources are used for pre-training, and all
    patients with two sessions for testing: otherwise so few records would give almost no
    gallery."""
    out = tmp_path_factory.mktemp("dataset") / "both"
    whose = RoleSources(pretrain=("all",), id_share=1.0)
    return shard(
        open_sources(str(archive)),
        ShardOptions(str(out), format="both", role_sources=whose, quiet=True),
    )


@pytest.fixture
def saved_model(tmp_path):
    return lambda folder="run/model", **how: save_model(tmp_path / folder, **how)


def save_model(
    folder,
    leads=12,
    head=None,
    preprocessing=None,
    readout="mean",
    **model,
):
    """A small untrained model as engine.training.train exports it. `preprocessing`: changes;
    `model`: for ModelConfig."""
    import torch

    from omnilead.data_tools.ecg.constants import LEADS
    from omnilead.engine.model import folder as folders
    from omnilead.engine.model.config import ModelConfig, ObjectiveConfig
    from omnilead.engine.model.pretrainer import Pretrainer

    small = {
        "conv": ((16, 8),) * 2,
        "width": 32,
        "layers": 2,
        "heads": 4,
        "ffn": 48,
        "position_kernel": 16,
        "position_groups": 4,
    }
    config = ModelConfig(
        **{"leads": leads, "codes": 8, "code_width": 16, "projection": 16, **small, **model}
    )
    objective = ObjectiveConfig()
    seeded = torch.Generator().manual_seed(0)
    weights = dict(Pretrainer(config, objective, generator=seeded).state_dict())
    if head and head.get("classes"):
        weights["head.weight"] = torch.randn(len(head["classes"]), config.width, generator=seeded)
        weights["head.bias"] = torch.randn(len(head["classes"]), generator=seeded)
    document = {
        "model": asdict(config),
        "objective": asdict(objective),
        "trained": {"step": 1, "rlm": 0.5},
        "readout": readout,
    }
    signal = {
        "fs_hz": 500,
        "leads": list(LEADS[:leads]),
        "segment_s": 5.0,
        "scale": "millivolt",
        "sha256": "0",
    }
    folders.write_model(
        folder, weights, document | ({"head": head} if head else {}), signal | (preprocessing or {})
    )
    return folder


def save_probed(model, data, task, out, readout="", leads="12", reader="linear"):
    """Writes the model that `omnilead fit` writes; its task may also be one of the dataset's own
    labels. `task`: a table, or a name."""
    from omnilead.downstream.evaluation.embedders import EmbedOptions
    from omnilead.downstream.evaluation.fit import FitOptions, fit_task
    from omnilead.downstream.evaluation.plan import task_of_table
    from omnilead.downstream.evaluation.results import load_task

    options = FitOptions(
        data=data,
        out=str(out),
        model=str(model),
        leads=leads,
        reader=reader,
        embedding=EmbedOptions(readout),
    )
    of_table = str(task).endswith(".csv")
    fit_task(task_of_table(str(task)) if of_table else load_task(task), options)
