"""Whole trainings with a user's own encoder, augmentation and objective, and from the weights of
another run."""

import json
import re
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from ranks import STILL, column, curve, finetune, pretrain, rows
from safetensors.torch import load_file

import omnilead
from omnilead.downstream import embed
from omnilead.downstream.after_training import AFTER_TRAINING
from omnilead.downstream.interop.onnx import to_onnx
from omnilead.engine.data import patients
from omnilead.engine.data.augmentations import AugmentConfig
from omnilead.engine.data.augmenter import ExtraAugmentation
from omnilead.engine.data.loader import Loader, LoaderConfig
from omnilead.engine.data.order import Places
from omnilead.engine.data.seen import LABELLED, uses_by_crop
from omnilead.engine.model.folder import LoadError
from omnilead.engine.run import TrainingRun
from omnilead.engine.settings.commandline import apply_overrides
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.files import merge
from omnilead.engine.training.config import TrainConfig
from omnilead.engine.training.export import full_weights
from omnilead.engine.training.read_settings import read_settings
from omnilead.engine.training.run_folder import RunFolder

OWN = """
import torch
from torch import nn
from omnilead.engine.model.draws import uniform
from omnilead.engine.model.objectives import all_gather

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

class Apart(nn.Module):
    def __init__(self, encoder, size=4):
        super().__init__()
        self.out, self.norm = nn.Linear(encoder.width, size), nn.BatchNorm1d(size)

    def forward(self, encoder, x_BSLT, keys_BS):
        kept = uniform(keys_BS.flatten(), 16) > 0.25
        g = self.out(encoder(x_BSLT.flatten(0, 1)).mean(1) * kept)
        near = (self.norm(g) - g).square().mean()
        return {"apart": (g @ all_gather(g).T).logsumexp(1).mean(), "size": g.square().mean()} | (
            {"near": near} if self.out.out_features == 4 else {})

def noise(x, generator):
    return x.add_(0.1 * torch.randn(x.shape, generator=generator))
"""
EXACT = ("step", "loss", "grad_norm")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="module")
def base(own, dataset, tmp_path_factory):
    """A run of that encoder and augmentation with the masked objective, interrupted once."""
    tmp = tmp_path_factory.mktemp("base")
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        pretrain(tmp, dataset.root.url, name, **settings(own), train__steps=steps).good()
    return tmp


def settings(own, **more):
    how = {
        "model__encoder": f"{own}:Net",
        "model__options": {"kernel": 25},
        "augment__extra": f"{own}:noise",
    }
    return how | {"train__schedule": "fixed", "train__precision": "bf16"} | more


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def card(run):
    return (run / "model" / "README.md").read_text()


def test_a_run_resumes_bit_for_bit_with_buffers_and_draws(base):
    assert curve(base / "whole", EXACT) == curve(base / "parts", EXACT)
    one, two = weights(base / "whole"), weights(base / "parts")
    assert one["encoder.norm.num_batches_tracked"].dtype == torch.int64
    assert one["encoder.norm.running_mean"].any()
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
    assert json.loads((base / "whole" / "run.json").read_text())["code"].keys() == {"own.py"}


def test_code_in_a_model_folder_runs_only_on_request(base, dataset, tmp_path):
    run = tmp_path / "copy"
    shutil.copytree(base / "whole" / "model", run)
    assert "with its code in this folder" in (run / "README.md").read_text()
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["encoder"] == "own.py:Net" and "own.py" in config["sha256"]
    says = r"code in own\.py of that folder, which runs only if you allow it: .*`code`.*code=True"
    with pytest.raises(LoadError, match=says):
        omnilead.load(run)
    with pytest.raises(LoadError, match=says):
        TrainingRun(run, AFTER_TRAINING).model()
    model = omnilead.load(run, code=True)
    first = model.embed(dataset.read(0), 500, "12", "uV")
    assert (
        first.shape == (2 * 8 + 68,) and model.encoder.norm.num_batches_tracked.dtype == torch.int64
    )
    own_class = type(model.encoder)
    again = omnilead.load(run, encoder=own_class)
    assert again.embed(dataset.read(0), 500, "12", "uV").equal(first)
    how = ["--model", str(run), "--data", dataset.root.url, "--out", str(tmp_path / "e.parquet")]
    assert embed.main(how) == 2 and embed.main([*how, "--code"]) == 0
    (run / "own.py").write_text(OWN + "print('changed')")
    with pytest.raises(LoadError, match=r"own\.py: was changed or damaged"):
        omnilead.load(run, code=True)
    (run / "own.py").unlink()
    says = r"own\.py: this file with the encoder is missing, or config\.json does not list it"
    with pytest.raises(LoadError, match=says):
        omnilead.load(run, code=True)
    assert omnilead.load(run, encoder=own_class).code == {}


def test_fine_tuning_from_a_plugged_in_encoder(base, own, dataset, tmp_path):
    tune = partial(finetune, tmp_path, dataset.root.url, base / "whole", "diagnosis")
    assert "runs only if you allow it" in tune().one_line()
    fewer = tune(code=True, augment__leads="2", augment__padded=False).one_line()
    assert "own.py:Net cannot take fewer leads: use augment.padded=true" in fewer
    odd = tune(code=True, task__head=f"{own}:Odd").one_line()
    assert "Odd, 8 wide, 26 outputs: the head returns [4, 27]" in odd
    tune(world=2, code=True, task__head=f"{own}:Top", train__precision="bf16").good()
    run = tmp_path / "run"
    tuned = omnilead.load(run, code=True)
    assert tuned.config["model"]["options"] == {"kernel": 25}
    assert tuned.config["head"]["definition"]["head"] == "own.py:Top"
    assert len(tuned.predict(dataset.read(0), 500, "12", "uV")) == 26
    classes = {"encoder": type(tuned.encoder)}
    with pytest.raises(LoadError, match=r"the head is code in own\.py of that folder"):
        omnilead.load(run, **classes)
    assert omnilead.load(run, **classes, head=type(tuned.head)).classes == tuned.classes
    assert 'omnilead.load("THIS_FOLDER", code=True)' in card(run)
    assert (run / "model" / "own.py").read_text() == OWN


CPC = {"objective__method": "cpc", "objective__options": {"steps": 3}, "model__causal": True}
CPC |= {"model__conv_norm": "layer"}


@pytest.mark.parametrize("method", ["own", "cpc"])
def test_an_objective_with_weights_resumes_bit_for_bit(method, own, training, tmp_path):
    how = CPC | {"objective__local": 0, "train__validate_every": 2}
    if method == "own":  # with a batch norm, and beside the local objective
        how = {"objective__method": f"{own}:Apart", "train__validate_every": 2}
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        training(name, **how, train__steps=steps).good()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    names = ["loss_global"] if method == "cpc" else ["loss_apart", "loss_size", "loss_near"]
    assert curve(whole, [*EXACT, *names]) == curve(parts, [*EXACT, *names])
    assert rows(whole, "validation.jsonl") == rows(parts, "validation.jsonl")
    assert all(np.isfinite(column(whole, name, "validation.jsonl")).all() for name in names)
    one, two = (full_weights(RunFolder(run).newest_checkpoint()) for run in (whole, parts))
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
    assert any(name.startswith("plugin.") for name in one)
    exported = weights(whole)
    assert not any(name.startswith("plugin.") for name in exported)
    assert ("encoder.mask_embedding" in exported) == (method == "own")
    assert omnilead.load(whole).encoder.causal == (method == "cpc")  # no code is needed
    card = (whole / "model" / "README.md").read_text()
    assert ("causal transformer" in card) == (method == "cpc")


JEPA = {"objective__local": 0, "objective__method": "jepa", "model__conv_norm": "layer"}
JEPA |= {"objective__options": {"momentum": 0.5}, "train__validate_every": 2}
SPREAD = "target_spread"


def test_jepa_resumes_bit_for_bit_and_exports_the_average(training, tmp_path):
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        training(name, **JEPA, train__steps=steps, train__micro_batch=4).good()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert curve(whole, [*EXACT, "loss_jepa", SPREAD]) == curve(
        parts, [*EXACT, "loss_jepa", SPREAD]
    )
    assert rows(whole, "validation.jsonl") == rows(parts, "validation.jsonl")
    kept, exported = full_weights(RunFolder(whole).newest_checkpoint()), weights(whole)
    assert not any(name.startswith("plugin.") for name in exported)
    assert exported.keys() == weights(parts).keys()
    for name, weight in exported.items():
        assert weight.equal(weights(parts)[name])
        assert weight.equal(kept[name.replace("encoder.", "plugin.target.", 1)])
    assert not exported["encoder.layers.0.fc1.weight"].allclose(kept["encoder.layers.0.fc1.weight"])

    training("more", start=str(whole), **JEPA, train__steps=1, train__lr=1e-9).good()
    more = full_weights(RunFolder(tmp_path / "more").newest_checkpoint())
    name = "layers.0.fc1.weight"  # the average begins anew with the weights it starts from
    np.testing.assert_allclose(
        more[f"plugin.target.{name}"], exported[f"encoder.{name}"], rtol=1e-5
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_jepa_on_two_ranks_is_that_on_one(stage, training, tmp_path):
    zero = tmp_path / "zero.json"  # of stage 3: small weights are divided as well
    settings = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    zero.write_text(json.dumps({"zero_optimization": settings}))
    for name, world in (("one", 1), ("two", 2)):
        for steps in (2, 4):  # a checkpoint between
            how = {"train__deepspeed": str(zero), "train__steps": steps}
            training(name, world, **STILL, **JEPA, **how).good()
    one, two = tmp_path / "one", tmp_path / "two"
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(column(two, name), column(one, name), rtol=2e-5)
    for name, weight in weights(one).items():
        np.testing.assert_allclose(weights(two)[name], weight, rtol=1e-3, atol=1e-5)


def believe_the_synthetic():
    """Labels of synthetic patients are taken for unknown, as they are unrelated to the ECGs."""
    patients.SYNTHETIC = "no source"


BOTH = {"objective__attributes": {"age": 1.0, "sex": 0.5}}


def test_a_run_with_age_and_sex_resumes_on_any_ranks_and_exports_no_heads(
    training, dataset, tmp_path
):
    train = partial(training, before=believe_the_synthetic, train__validate_every=2)
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        ended = train(name, train__steps=steps, **BOTH).good()
    assert re.search(r"age is known of [89]\d\.\d% of the crops\nsex is known of 9", ended)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    names = ["loss_age", "loss_sex"]
    assert curve(whole, [*EXACT, *names]) == curve(parts, [*EXACT, *names])
    assert rows(whole, "validation.jsonl") == rows(parts, "validation.jsonl")
    assert names[0] in rows(whole, "validation.jsonl")[0]
    exported = weights(whole)
    assert exported.keys() == weights(parts).keys()
    assert all(exported[name].equal(weights(parts)[name]) for name in exported)
    assert "attributes.weight" in full_weights(RunFolder(whole).newest_checkpoint())
    assert not any(name.startswith("attributes.") for name in exported)
    assert "1.0 x age, 0.5 x sex" in (whole / "model" / "README.md").read_text()
    assert LABELLED in uses_by_crop(omnilead.load(whole).seen, dataset, np.arange(len(dataset)))
    changed = train("whole", train__steps=4).one_line()
    assert "objective.attributes.age changed from 1.0 to None" in changed

    for name, world in (("one", 1), ("two", 2)):
        for steps in (1, 3):
            train(name, world if steps == 3 else 1, **STILL, **BOTH, train__steps=steps).good()
    for name in ("loss", *names, "grad_norm"):
        one, two = (column(tmp_path / run, name) for run in ("one", "two"))
        np.testing.assert_allclose(two, one, rtol=2e-5)
    more = train("more", start=str(whole), **BOTH, train__steps=1).good()
    assert "new: the objective's own weights, the optimiser" in more


def test_age_and_sex_that_nobody_knows_are_an_error(training):
    line = training(**BOTH).one_line()
    assert "objective.attributes: no real ECG here has a known age: leave age out" in line


def test_an_objective_of_one_s_own_in_a_run(own, training, tmp_path):
    how = {"objective__method": f"{own}:Apart", "objective__options": {"size": 3}}
    how |= {"objective__local": 0, "train__steps": 3, "train__validate_every": 3}
    training("one", **STILL, **how).good()
    training("two", world=2, **STILL, **how, train__zero_stage=3).good()
    one, two = tmp_path / "one", tmp_path / "two"
    for name in ("loss", "loss_apart", "loss_size", "grad_norm"):
        np.testing.assert_allclose(column(two, name), column(one, name), rtol=2e-5)
    valid = ([row["loss_apart"] for row in rows(run, "validation.jsonl")] for run in (one, two))
    np.testing.assert_allclose(*valid, rtol=2e-5)
    training("short", **STILL, **how | {"train__steps": 1}).good()
    third, first = (
        full_weights(RunFolder(run).newest_checkpoint()) for run in (one, tmp_path / "short")
    )
    assert not third["plugin.out.weight"].allclose(first["plugin.out.weight"])
    assert (one / "code" / "own.py").read_text() == OWN
    document = json.loads((one / "model" / "config.json").read_text())
    assert document["objective"]["method"] == "own.py:Apart"
    wrong = how | {"objective__options": {"width": 3}}
    assert "unexpected keyword argument 'width'" in training("wrong", **wrong).one_line()
    start = str(one)
    with pytest.raises(
        ConfigError, match=r"objective\.method=.*Apart is code: to run that code, name"
    ):
        read_settings(None, {"start": start})
    for method, options in ((f"{own}:Apart", {"size": 3}), ("cmsc", {})):
        continued = read_settings(None, {"start": start, "objective.method": method})
        assert continued.objective.options == options
    more = training("more", start=start, **how).good()
    assert "the encoder loaded; new: the objective's own weights, the optimiser" in more


def test_a_missing_or_changed_code_file_prevents_a_resume(own, base, training, tmp_path):
    shutil.copytree(base / "parts", tmp_path / "run")
    training = partial(training, **settings(own, train__steps=5))
    own.write_text(OWN + "# another\n")
    try:
        assert "cannot resume: code.own.py changed from sha256" in training().one_line()
        own.unlink()
        line = training().one_line()
        assert "own.py: the run's copy is" in line and "run/code/own.py" in line
    finally:
        own.write_text(OWN)


def test_the_resnet_trains_and_is_tuned_on_fewer_leads(training, dataset, tmp_path):
    resnet = {"model__encoder": "resnet", "model__options": {"widths": [8, 16]}, "train__steps": 2}
    assert "lacks features(), context() or feature_width" in training("local", **resnet).one_line()
    views = {"pipeline__views": "window", "objective__method": "simclr", "objective__local": 0}
    training("base", **resnet, **views).good()
    base, two = tmp_path / "base", tmp_path / "two"
    assert min(column(base, "mfu")) > 0
    if find_spec("onnxruntime"):
        assert to_onnx(omnilead.load(base), tmp_path / "base.onnx") < 1e-4
    leads = {"augment__leads": "2", "augment__padded": False}
    finetune(tmp_path, dataset.root.url, base, "diagnosis", "two", **leads).good()
    model = omnilead.load(two).to(torch.bfloat16)
    assert model.embed(dataset.read(0)[:2], 500, "I,II", "uV").shape == (16,)
    assert "1-D residual network" in card(two)


def test_continued_pretraining(own, base, training, tmp_path):
    start = str(base / "whole")
    more = partial(training, start=start, **settings(own, train__steps=1, augment__rlm=0.25))
    output = more("more", train__lr=1e-12).good()
    says = "the encoder and the heads of the local objective loaded; new: the optimiser"
    assert says in output
    before, after = weights(base / "whole"), weights(tmp_path / "more")
    for name in before:
        if "running" not in name and "batches" not in name:
            assert torch.allclose(before[name], after[name], 1e-2, 1e-4)
    config = json.loads((tmp_path / "more" / "model" / "config.json").read_text())
    assert config["continued"]["start"] == start and config["continued"]["step"] == 4
    assert "weights of whole." in card(tmp_path / "more")
    before, after = (
        set(omnilead.load(run, code=True).seen["hash"].to_pylist())
        for run in (start, tmp_path / "more")
    )
    assert len(before) > 0 and before <= after
    says = "the encoder loaded; new: the heads of the local objective, the optimiser"
    assert says in more("anew", model__codes=16).good()
    other = training("other", start=start, train__steps=1).one_line()
    assert "another architecture: model.encoder is 'own.py:Net' there, '' here" in other
    two = {"model__leads": 2, "augment__leads": "2", "augment__padded": False}
    assert "model.leads is 12 there, 2 here" in more("fewer", **two).one_line()


def test_a_start_without_the_local_objective(training, dataset, tmp_path):
    """For a pre-training with it, and for a fine-tuning."""
    training("cmsc", train__steps=1, objective__local=0).good()
    start = tmp_path / "cmsc"
    says = "the encoder loaded; new: the mask embedding, the heads of the local objective, the "
    assert says + "optimiser" in training("both", start=str(start), train__steps=1).good()
    task = ("identification", "tuned")
    finetune(tmp_path, dataset.root.url, start, *task, train__steps=1).good()
    run, folder = (
        read_settings(None, {"start": f"{tmp_path}/{name}"}) for name in ("tuned", "tuned/model")
    )
    assert (run.model, run.objective, run.train) == (folder.model, folder.objective, folder.train)


def test_the_settings_of_the_start_are_kept(own, base, tmp_path):
    start = str(base / "whole")
    says = r"augment\.extra=.*:noise is code: .*name the file: --set augment"
    with pytest.raises(ConfigError, match=says):
        read_settings(None, {"start": start})
    code = {"model.encoder": f"{own}:Net", "augment.extra": f"{own}:noise"}
    kept = read_settings(None, {"start": start, "run": "x"} | code)
    assert kept.model.options == {"kernel": 25} and kept.objective.local == 1
    saved = yaml.safe_load(Path(start, "config.yaml").read_text())
    assert kept.run == "x" and not kept.data.datasets
    assert kept.train.batch_crops == saved["train"]["batch_crops"]
    folder = read_settings(
        None, {"start": f"{start}/model", "model.encoder": code["model.encoder"]}
    )
    assert (folder.model, folder.objective) == (kept.model, kept.objective)
    assert folder.train == TrainConfig()
    plain = read_settings(None).train
    assert read_settings("quickstart", {"start": start}).train == plain != TrainConfig()

    strange = Path(shutil.copytree(start, tmp_path / "strange"))
    begin = {"start": str(strange)} | code
    for key, value in (
        ("train.track", ["wandb"]),
        ("train.deepspeed", "/x.json"),
        ("pipeline.cache_dir", "/x"),
    ):
        merged = merge(saved, apply_overrides({}, {key: value}))
        (strange / "config.yaml").write_text(yaml.safe_dump(merged))
        says = f"{key}=.* is a file or a service: .*--set {key}="
        with pytest.raises(ConfigError, match=says):
            read_settings(None, begin)
        assert read_settings(None, begin | {key: value}).train.batch_crops == kept.train.batch_crops
    (strange / "config.yaml").write_text(yaml.safe_dump(saved | {"base": "/x"}))
    with pytest.raises(ConfigError, match="base: no such setting"):
        read_settings(None, begin)
    (strange / "config.yaml").rename(tmp_path / "elsewhere.yaml")
    (strange / "config.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    with pytest.raises(ConfigError, match="is a link, which is not followed"):
        read_settings(None, begin)


FAULTS = {
    "crops must be independent": [
        "x - x.mean(0, keepdim=True)",
        "x[:1].expand_as(x)",
        "x[-1:].expand_as(x)",
        "x.flip(0)",
        "x.roll(1, 0)",
        "x.roll(2, 0)",
        "x[[1, 0, 3, 2, 5, 4, 7, 6]]",
        "x + 0.1 * x[torch.randperm(len(x))]",
    ],
    "returns NaN or infinity for noise": [
        "x.index_fill(0, torch.tensor([5]), float('nan'))",
        "x / (x - x)",
    ],
    "returns something else for the same batch": [
        "x * (1 + 0.1 * (time.time() % 1))",
        "x + OWN.random()",
        "x + 0.01 * torch.randn(x.shape, generator=MINE)",
    ],
}


@pytest.mark.parametrize(
    ("says", "expression"), [(says, one) for says, all_of in FAULTS.items() for one in all_of]
)
def test_a_fault_of_an_own_augmentation_is_said_before_training(
    says, expression, dataset, tmp_path
):
    path = tmp_path / "mine.py"
    path.write_text(
        "import random, time, torch\n"
        "OWN, MINE = random.Random(), torch.Generator()\n"
        f"def faulty(x, draw):\n    return {expression}\n"
    )
    config = LoaderConfig(batch_crops=4, augment=AugmentConfig(extra=f"{path}:faulty"))
    with pytest.raises(ConfigError, match=rf"^augment\.extra={path}:faulty: .*{says}") as caught:
        Loader(config, [dataset], torch.device("cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "expression",
    [
        "x * draw.uniform(1, 1) + draw.normal(12, 1)",
        "x.mul_(torch.rand(len(x), 1, 1, 1, generator=draw))",
        "x * (torch.rand(1) + np.random.rand() + random.random())",
        "x / x.std(-1, keepdim=True)",  # NaN in a masked lead, which is then zero
        "x + torch.randn(x.shape)",
        "x.roll(1, 1)",
    ],
)
def test_an_own_augmentation_without_a_fault_is_no_error(expression, dataset, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        f"import random, numpy as np, torch\ndef right(x, draw):\n    return {expression}\n"
    )
    before = torch.get_rng_state()
    config = LoaderConfig(batch_crops=4, augment=AugmentConfig(extra=f"{path}:right"))
    Loader(config, [dataset], torch.device("cpu")).close()
    assert torch.get_rng_state().equal(before)


def test_a_users_own_augmentation(tmp_path):
    path = tmp_path / "mine.py"
    half = "def half(x, generator):\n    return x[:1]\n"
    path.write_text(half + "def more(x, generator):\n    return x + 1\n" + OWN)
    x = torch.ones(2, 2, 3, 5)
    x[0, 1, 2] = 0  # a masked lead

    def augmented(name, step=3, rank=0):
        own = ExtraAugmentation([(f"{path}:{name}", {})], 1, rank, torch.device("cpu"))
        return own(x.clone(), Places(*np.zeros((3, 2), np.int64)), step)

    assert augmented("more").equal(2 * x)
    first = augmented("noise")
    assert first.equal(augmented("noise"))
    assert not first.equal(augmented("noise", step=4)) and not first.equal(
        augmented("noise", rank=1)
    )
    says = r"augment\.extra=.*half: \[2, 2, 3, 5\] became \[1, 2, 3, 5\]"
    with pytest.raises(ConfigError, match=says):
        augmented("half")
