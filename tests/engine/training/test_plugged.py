"""Whole trainings with a user's own encoder and augmentation, and from the weights of another
run."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks import curve, finetune, pretrain, rows
from safetensors.torch import load_file
from torch import nn

import omnilead
from omnilead.data_tools.dataset import Dataset
from omnilead.engine import embed
from omnilead.engine.common import ConfigError, merge, overridden
from omnilead.engine.config import TrainConfig
from omnilead.engine.data.extra import ExtraAugmentation
from omnilead.engine.interop.onnx import to_onnx
from omnilead.engine.model.folder import LoadError
from omnilead.engine.training.continuing import read_config

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    width, feature_width = 8, 4

    def __init__(self, leads, kernel=50):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(leads, 4, kernel, kernel), nn.BatchNorm1d(4), nn.Linear(4, 8)
        self.mask = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.context(self.features(x)[0], None)

    def features(self, x):
        z = self.norm(self.conv(x)).transpose(1, 2)
        return z, z.square().mean()

    def context(self, z, mask):
        return self.out(z if mask is None else torch.where(mask[..., None], self.mask, z))

class Top(nn.Sequential):
    def __init__(self, width, outputs):
        super().__init__(nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, outputs))

class Odd(Top):
    def __init__(self, width, outputs):
        super().__init__(width, outputs + 1)

def noise(x, generator):
    return x.add_(0.1 * torch.randn(x.shape, generator=generator))
"""
EXACT = ("step", "loss", "grad_norm")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="module")
def base(own: Path, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of that encoder and augmentation with the masked objective, interrupted once."""
    tmp = tmp_path_factory.mktemp("base")
    for name, lengths in (("whole", [4]), ("parts", [2, 4])):
        for steps in lengths:
            ended = pretrain(tmp, dataset.root.url, name, **settings(own), train__steps=steps)
            assert ended.ok, ended.output
    return tmp


def settings(own: Path, **more: Any) -> dict[str, Any]:
    how = {
        "model__encoder": f"{own}:Net",
        "model__options": {"kernel": 25},
        "augment__extra": f"{own}:noise",
    }
    return how | {"train__schedule": "fixed", "train__precision": "bf16"} | more


def test_a_run_resumes_bit_for_bit_with_buffers_and_draws(base: Path) -> None:
    assert curve(base / "whole", EXACT) == curve(base / "parts", EXACT)
    one, two = (
        load_file(base / name / "model" / "model.safetensors") for name in ("whole", "parts")
    )
    assert (
        one["encoder.norm.num_batches_tracked"].dtype == torch.int64
        and one["encoder.norm.running_mean"].any()
    )
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
    assert json.loads((base / "whole" / "run.json").read_text())["code"].keys() == {"own.py"}


def test_code_in_a_model_folder_runs_only_on_request(
    base: Path, own: Path, dataset: Dataset, tmp_path: Path
) -> None:
    run = tmp_path / "copy"
    shutil.copytree(base / "whole" / "model", run)
    assert "with its code in this folder" in (run / "README.md").read_text()
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["encoder"] == "own.py:Net" and "own.py" in config["sha256"]
    with pytest.raises(
        LoadError,
        match=r"code in that folder, own\.py, which runs only if asked: .*--code.*code=True",
    ):
        omnilead.load(run)
    model = omnilead.load(run, code=True)
    first = model.embed(dataset.read(0), 500, "12", "uV")
    assert first.shape == (8,) and model.encoder.norm.num_batches_tracked.dtype == torch.int64
    own_class: type[nn.Module] = type(model.encoder)
    assert (
        omnilead.load(run, encoder=own_class).embed(dataset.read(0), 500, "12", "uV").equal(first)
    )
    how = ["--model", str(run), "--data", dataset.root.url, "--out", str(tmp_path / "e.parquet")]
    assert embed.main(how) == 2 and embed.main([*how, "--code"]) == 0
    (run / "own.py").write_text(OWN + "print('changed')")
    with pytest.raises(LoadError, match=r"own\.py: was changed or damaged"):
        omnilead.load(run, code=True)
    (run / "own.py").unlink()
    with pytest.raises(
        LoadError, match=r"own\.py: the file with the encoder is not in config\.json"
    ):
        omnilead.load(run, code=True)
    assert omnilead.load(run, encoder=own_class).code == {}


def test_fine_tuning_from_a_plugged_in_encoder(
    base: Path, own: Path, dataset: Dataset, tmp_path: Path
) -> None:
    url, start = dataset.root.url, base / "whole"
    refused = finetune(tmp_path, url, start, "diagnosis")
    assert "runs only if asked" in refused.one_line()
    fewer = finetune(
        tmp_path, url, start, "diagnosis", code=True, augment__leads="2", augment__padded=False
    )
    assert "own.py:Net cannot take fewer leads: use augment.padded=true" in fewer.one_line()
    odd = finetune(tmp_path, url, start, "diagnosis", code=True, task__head=f"{own}:Odd")
    assert "Odd, 8 wide, 26 outputs: returns [4, 27]" in odd.one_line()
    top = f"{own}:Top"
    ended = finetune(
        tmp_path,
        url,
        start,
        "diagnosis",
        world=2,
        code=True,
        task__head=top,
        train__precision="bf16",
    )
    assert ended.ok, ended.output
    tuned = omnilead.load(tmp_path / "run", code=True)
    assert (
        tuned.config["model"]["options"] == {"kernel": 25}
        and tuned.config["head"]["definition"]["head"] == "own.py:Top"
    )
    assert len(tuned.predict(dataset.read(0), 500, "12", "uV")) == 26
    with pytest.raises(LoadError, match="its head is code in that folder"):
        omnilead.load(tmp_path / "run", encoder=type(tuned.encoder))
    classes: dict[str, Any] = {"encoder": type(tuned.encoder), "head": type(tuned.head)}
    assert omnilead.load(tmp_path / "run", **classes).classes == tuned.classes
    assert (
        'omnilead.load("THIS_FOLDER", code=True)'
        in (tmp_path / "run" / "model" / "README.md").read_text()
    )
    assert (tmp_path / "run" / "model" / "own.py").read_text() == OWN


def test_a_missing_or_changed_code_file_prevents_a_resume(
    own: Path, base: Path, dataset: Dataset, tmp_path: Path
) -> None:
    shutil.copytree(base / "parts", tmp_path / "run")
    how = settings(own, train__steps=5)
    own.write_text(OWN + "# another\n")
    try:
        assert (
            "cannot resume: code.own.py changed from sha256"
            in pretrain(tmp_path, dataset.root.url, **how).one_line()
        )
        own.unlink()
        line = pretrain(tmp_path, dataset.root.url, **how).one_line()
        assert "own.py: the run's copy is" in line and "run/code/own.py" in line
    finally:
        own.write_text(OWN)


def test_the_resnet_trains_and_is_tuned_on_fewer_leads(dataset: Dataset, tmp_path: Path) -> None:
    resnet = {"model__encoder": "resnet", "model__options": {"widths": [8, 16]}, "train__steps": 2}
    views = {"pipeline__views": "window", "objective__method": "simclr"}
    url = dataset.root.url
    assert (
        "has no features() and context()" in pretrain(tmp_path, url, "local", **resnet).one_line()
    )
    ended = pretrain(tmp_path, url, "base", **resnet, **views, objective__local=0)
    assert ended.ok and all(row["mfu"] > 0 for row in rows(tmp_path / "base")), ended.output
    if find_spec("onnxruntime"):
        assert to_onnx(omnilead.load(tmp_path / "base"), tmp_path / "base.onnx") < 1e-4
    ended = finetune(
        tmp_path,
        url,
        tmp_path / "base",
        "diagnosis",
        "two",
        augment__leads="2",
        augment__padded=False,
    )
    assert ended.ok, ended.output
    assert omnilead.load(tmp_path / "two").to(torch.bfloat16).embed(
        dataset.read(0)[:2], 500, "I,II", "uV"
    ).shape == (16,)
    assert "1-D residual network" in (tmp_path / "two" / "model" / "README.md").read_text()


def test_continued_pretraining(own: Path, base: Path, dataset: Dataset, tmp_path: Path) -> None:
    url, start, how = (
        dataset.root.url,
        str(base / "whole"),
        settings(own, train__steps=1, augment__rlm=0.25),
    )
    ended = pretrain(tmp_path, url, "more", start=start, **how, train__lr=1e-12)
    assert (
        ended.ok
        and "the encoder and the heads of the local objective loaded; new: the optimiser"
        in ended.output
    )
    before, after = (
        load_file(Path(run) / "model" / "model.safetensors") for run in (start, tmp_path / "more")
    )
    assert all(
        torch.allclose(before[name], after[name], 1e-2, 1e-4)
        for name in before
        if "running" not in name and "batches" not in name
    )
    config = json.loads((tmp_path / "more" / "model" / "config.json").read_text())
    assert (
        config["continued"]["start"] == start
        and config["continued"]["step"] == 4
        and len(config["trained"]["splits"]) == 2
    )
    assert "weights of whole." in (tmp_path / "more" / "model" / "README.md").read_text()
    anew = pretrain(tmp_path, url, "anew", start=start, **how, model__codes=16)
    assert "the encoder loaded; new: the heads of the local objective, the optimiser" in anew.output
    other = pretrain(tmp_path, url, "other", start=start, train__steps=1)
    assert "another architecture: model.encoder is 'own.py:Net' there, '' here" in other.one_line()
    fewer = pretrain(
        tmp_path,
        url,
        "fewer",
        start=start,
        **how,
        model__leads=2,
        augment__leads="2",
        augment__padded=False,
    )
    assert "model.leads is 12 there, 2 here" in fewer.one_line()
    with pytest.raises(
        ConfigError, match=r"augment\.extra=.*:noise is code: .*name the file: --set augment"
    ):
        read_config(None, {"start": start})
    code = {"model.encoder": f"{own}:Net", "augment.extra": f"{own}:noise"}
    kept = read_config(None, {"start": start, "run": "x"} | code)
    assert (
        kept.model.options == {"kernel": 25}
        and kept.objective.local == 1
        and kept.run == "x"
        and not kept.data.datasets
    )
    assert (
        kept.train.batch_crops
        == yaml.safe_load(Path(start, "config.yaml").read_text())["train"]["batch_crops"]
    )
    strange = Path(shutil.copytree(start, tmp_path / "strange"))
    for key, value in (
        ("train.track", ["wandb"]),
        ("train.deepspeed", "/x.json"),
        ("pipeline.cache_dir", "/x"),
        ("base", "/x"),
    ):
        own_settings = yaml.safe_load(Path(start, "config.yaml").read_text())
        merged = merge(own_settings, overridden({}, {key: value}))
        (strange / "config.yaml").write_text(yaml.safe_dump(merged))
        says = (
            "base: no such setting"
            if key == "base"
            else f"{key}=.* is a file or a service: .*--set {key}="
        )
        with pytest.raises(ConfigError, match=says):
            read_config(None, {"start": str(strange)} | code)
        if key != "base":
            assert (
                read_config(None, {"start": str(strange), key: value} | code).train.batch_crops
                == kept.train.batch_crops
            )
    (strange / "config.yaml").rename(tmp_path / "elsewhere.yaml")
    (strange / "config.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    with pytest.raises(ConfigError, match="is a link, which is not followed"):
        read_config(None, {"start": str(strange)} | code)
    folder = read_config(None, {"start": f"{start}/model", "model.encoder": code["model.encoder"]})
    assert (
        folder.model == kept.model
        and folder.objective == kept.objective
        and folder.train == TrainConfig()
    )
    assert (
        read_config("quickstart", {"start": start}).train
        == read_config(None).train
        != TrainConfig()
    )
    # One without the local objective, for one with it
    assert pretrain(tmp_path, url, "cmsc", train__steps=1, objective__local=0).ok
    both = pretrain(tmp_path, url, "both", start=str(tmp_path / "cmsc"), train__steps=1)
    assert (
        "the encoder loaded; new: the mask embedding, the heads of the local objective, the "
        "optimiser" in both.output
    )
    assert finetune(tmp_path, url, tmp_path / "cmsc", "identification", "tuned", train__steps=1).ok
    run, folder = (
        read_config(None, {"start": f"{tmp_path}/{name}"}) for name in ("tuned", "tuned/model")
    )
    assert (run.model, run.objective, run.train) == (folder.model, folder.objective, folder.train)


def test_a_users_own_augmentation(tmp_path: Path, dataset: Dataset) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def half(x, generator):\n    return x[:1]\ndef more(x, generator):\n    return x + 1\n"
        + OWN
    )
    cpu = torch.device("cpu")
    x = torch.ones(2, 2, 3, 5)
    x[0, 1, 2] = 0  # a masked lead
    y = ExtraAugmentation(f"{path}:more", 1, 0, cpu)(x.clone(), 3)
    assert y.equal(2 * x)
    first, again, later, rank = (
        ExtraAugmentation(f"{path}:noise", 1, r, cpu)(x.clone(), step)
        for step, r in ((3, 0), (3, 0), (4, 0), (3, 1))
    )
    assert first.equal(again) and not first.equal(later) and not first.equal(rank)
    with pytest.raises(
        ConfigError, match=r"augment\.extra=.*half: \[2, 2, 3, 5\] became \[1, 2, 3, 5\]"
    ):
        ExtraAugmentation(f"{path}:half", 1, 0, cpu)(x, 0)
    refused = pretrain(
        tmp_path, dataset.root.url, augment__extra=f"{path}:more", pipeline__backend="dali"
    )
    assert "pipeline.backend=dali: cannot run augment.extra=" in refused.one_line()
