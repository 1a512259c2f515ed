"""A stranger's checkpoint with code in its pickles, and a manifest that fits: no command runs the code."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import pretrain, settings, start, wait

from data_tools.dataset import Dataset
from engine import convert
from engine.model.folder import LoadError
from engine.pretrain import main
from engine.training import checkpoint
from engine.training.checkpoint import CheckpointError, WriteError
from engine.training.finetuning import read_start
from engine.training.weights_only import FORBID, FORCE, refused
from tests.forks import started

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


class Payload:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


@pytest.fixture(scope="module")
def genuine(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("genuine")
    ended = pretrain(tmp, dataset.root.url, train__steps=1, train__schedule="fixed")
    assert ended.ok, ended.output
    return tmp / "run"


def poisoned(genuine: Path, tmp: Path, name: str) -> Path:
    """With a payload in one file, and the manifest rewritten."""
    run = Path(shutil.copytree(genuine, tmp / "run"))
    shutil.rmtree(run / "model")
    step = run / "checkpoints" / "step-1"
    content = torch.load(step / MODEL, weights_only=True)
    torch.save(content | {"optimizer_state_dict": content["module"], "payload": Payload(tmp / "executed")}, step / name)
    manifest = json.loads((step / checkpoint.MANIFEST).read_text())
    manifest[name] = {"bytes": (step / name).stat().st_size, "crc32c": checkpoint.crc32c(step / name)}
    (step / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    return run


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_no_command_runs_a_payload(name: str, genuine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = poisoned(genuine, tmp_path, name)
    file = run / "checkpoints" / "step-1" / name
    for ended in (
        lambda: main(["--export", str(run)]),
        lambda: convert.main(["to-fairseq", str(run), str(tmp_path / "a.pt")]),
        lambda: convert.main(["from-fairseq", str(file), str(tmp_path / "out")]),
    ):
        assert ended() == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
    main(["--export", str(run)])
    assert f"{file}: would run code" in capsys.readouterr().err
    for begin in (run, file):
        with pytest.raises(LoadError):
            read_start(str(begin))
    assert not (tmp_path / "executed").exists() and not (run / "model").exists()


def test_a_pickle_under_the_name_of_a_model_is_not_run(saved_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved_model()
    torch.save({"payload": Payload(tmp_path / "executed")}, folder / "model.safetensors")
    with pytest.raises(LoadError):
        read_start(str(folder))
    assert not (tmp_path / "executed").exists()


def unguarded() -> None:
    """Whatever is in a checkpoint, it is taken for good: what is left is how it is read."""
    checkpoint.fault = lambda path: None


def read_by_deepspeed(step: Path, trace: Path, out: Path) -> None:
    """In a process of its own."""
    told = {}
    for read in (checkpoint.full_weights, checkpoint.to_universal):
        try:
            read(step)
            told[read.__name__] = "read"
        except (CheckpointError, WriteError) as error:
            told[read.__name__] = str(error)
    os.environ[FORBID] = "1"
    torch.load(step / MODEL, weights_only=False)  # as it would be by anyone else
    told["before, after, environment"] = [trace.exists(), FORCE in os.environ, os.environ[FORBID]]
    out.write_text(json.dumps(told))


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_deepspeed_runs_no_payload(name: str, dataset: Dataset, genuine: Path, tmp_path: Path) -> None:
    """Export's zero_to_fp32 and the cut for other ranks, then resuming."""
    run, trace = poisoned(genuine, tmp_path, name), tmp_path / "executed"
    step = run / "checkpoints" / "step-1"
    started(read_by_deepspeed, step, trace, tmp_path / "told.json", out=tmp_path / "out.txt").join()
    told = json.loads((tmp_path / "told.json").read_text())
    assert told.pop("before, after, environment") == [name == MODEL, False, "1"]
    assert all(f"{step}: would run code" in text and "\n" not in text for text in told.values()), told
    trace.unlink(missing_ok=True)
    arguments = settings(tmp_path, dataset.root.url, train__steps=2, train__schedule="fixed")
    for before in (None, unguarded):
        (tmp_path / "out.txt").unlink(missing_ok=True)
        ended = wait(tmp_path, start(tmp_path, arguments, before=before))
        assert ended.codes == [2] and ended.output.count("\n") == 1 and "would run code" in ended.output, ended.output
    assert not trace.exists()


def test_a_universal_folder_that_was_planted_is_not_read(dataset: Dataset, genuine: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(genuine, tmp_path / "run"))
    planted = run / "checkpoints" / "step-1" / checkpoint.UNIVERSAL
    (planted / "zero" / "encoder.norm.weight").mkdir(parents=True)
    for place in (planted / MODEL, planted / "zero" / "encoder.norm.weight" / "fp32.pt"):
        torch.save(Payload(tmp_path / "executed"), place)
    ended = pretrain(tmp_path, dataset.root.url, world=2, train__steps=2, train__schedule="fixed")
    assert ended.ok, ended.output
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("harm", ["cut", "empty", "legacy", "not a pickle", "torchscript"])
def test_files_that_are_no_checkpoint(harm: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.zeros(99)}, path, _use_new_zipfile_serialization=harm != "legacy")
    assert harm == "legacy" or refused(path) is None
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-300])
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "not a pickle":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", b"hello")
    elif harm == "torchscript":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/constants.pkl", b"hello")
    assert refused(path)
