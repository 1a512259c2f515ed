"""Models whose files are another's work, with a sha256 that fits: one line says what is wrong, and no
number comes out of them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import omnilead
from omnilead.__main__ import main
from omnilead.downstream.inference.trees import Trees
from omnilead.engine.model import folder as folders
from omnilead.engine.settings.errors import ConfigError

NAN = float("nan")


def sealed(folder, **changes):
    config = json.loads((folder / folders.CONFIG).read_text()) | changes
    folders.write_config(folder, config)
    return folder


def with_weights(folder, change):
    weights = load_file(folder / folders.WEIGHTS)
    change(weights)
    save_file(weights, folder / folders.WEIGHTS)
    return sealed(folder)


@pytest.fixture
def boosted(saved_model):
    """Two trees on the mean of 32 numbers."""
    folder = saved_model()
    trees = Trees(7, 2, 1)
    trees.feature[[0, 3]] = torch.tensor([3, 5])
    trees.child[:] = torch.arange(7)[:, None]
    trees.child[0] = torch.tensor([1, 2, 1])
    trees.child[3] = torch.tensor([4, 5, 4])
    trees.root[1] = 3
    trees.value.data[:] = torch.tensor([0, 0.3, -0.4, 0, 0.5, -0.1, 0])
    head = {"task": "af", "kind": "binary", "classes": ["AF"], "thresholds": [0.5], "trees": [7, 2]}
    own = {f"head.{name}": weights for name, weights in trees.state_dict().items()}
    with_weights(folder, lambda weights: weights.update(own))
    return sealed(folder, head=head)


def put(name, value, where=slice(None)):
    def change(weights):
        weights[name] = weights[name].clone()
        weights[name][where] = value

    return change


def cast(name, dtype):
    return lambda weights: weights.update({name: weights[name].to(dtype)})


def predicted(folder):
    signal = np.random.default_rng(0).normal(0, 0.2, (12, 5000))
    return omnilead.load(folder).predict(signal, fs_hz=500, leads="12")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *[
            (put("head.threshold", value), "head.threshold: a value is out of range")
            for value in (NAN, np.inf, -np.inf)
        ],
        (put("head.threshold", NAN, 6), "head.threshold: a value is out of range"),  # of a leaf
        (put("head.value", np.inf), "head.value: a value is out of range"),
        (put("head.root", 7), "head.root: a value is out of range"),
        (put("head.child", 0), "head.child: a value is out of range"),
        (cast("head.output", torch.float32), "head.output is torch.float32, not torch.int64"),
        (cast("head.feature", torch.int32), "head.feature is torch.int32, not torch.int64"),
        (cast("head.child", torch.bool), "head.child is torch.bool, not torch.int64"),
        (cast("head.value", torch.uint64), "head.value is torch.uint64, not torch.float32"),
        (cast("head.value", torch.complex64), "head.value is torch.complex64, not"),
        (cast("encoder.layers.0.fc1.bias", torch.int8), "fc1.bias is torch.int8, not"),
        (put("encoder.layers.0.fc1.bias", NAN, 3), "the model's outputs are not finite"),
        (put("encoder.layers.0.fc1.bias", 3e38), "the model's outputs are not finite"),
    ],
)
def test_forged_weights_are_one_line(change, says, boosted):
    """Trees would take NaN of the encoder for what was not measured."""
    assert 0 < predicted(boosted)["AF"] < 1
    with_weights(boosted, change)
    with pytest.raises(ConfigError, match=rf"\A[^\n]*{says}[^\n]*\Z"):
        predicted(boosted)


@pytest.mark.parametrize("rlm", [[[]], "0.5", NAN, None])
def test_how_leads_were_masked_is_unknown_if_it_is_no_number(rlm, saved_model):
    folder = sealed(saved_model(), trained={"rlm": rlm})
    assert "is not known to have been trained" in omnilead.load(folder).missing_leads_doubt()


def cut(weights):
    return weights[:100]


def other_type(weights):
    return weights.replace(b"F32", b"F99")


@pytest.mark.parametrize("change", [cut, other_type])
@pytest.mark.parametrize(
    "command",
    [
        "pretrain --start {model} --data {data} --out {out} --set train.steps=1",
        "finetune --task age --start {model} --data {data} --out {out} --set train.steps=1",
        "embed --model {model} --data {data} --out {out}.parquet",
        "convert to-fairseq {model} {out}.pt",
    ],
)
def test_weights_that_cannot_be_read_are_one_line(
    command, change, saved_model, dataset, tmp_path, capsys
):
    folder = saved_model()
    file = folder / folders.WEIGHTS
    file.write_bytes(change(file.read_bytes()))
    sealed(folder)
    given = command.format(model=folder, data=dataset.root.url, out=tmp_path / "out")
    assert main(given.split()) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note:")]
    assert len(err) == 1 and f"{file}: cannot be read as safetensors: " in err[0], err
