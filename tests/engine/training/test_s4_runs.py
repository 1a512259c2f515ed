"""Runs with S4 and CPC, as shipped but for their size: resumed bit for bit, embedded, planned; and
shares of the learning rate."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from pyarrow import parquet
from ranks import column, curve, rows, run
from safetensors.torch import load_file
from torch import nn

import omnilead
from omnilead.__main__ import main
from omnilead.engine import pretrain
from omnilead.engine.model.input import resample_from_500_hz
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training.config import build_config, check_config, load_config
from omnilead.engine.training.export import full_weights
from omnilead.engine.training.optimizer import lr_groups
from omnilead.engine.training.run_folder import RunFolder

OPTIONS = {"width": 16, "layers": 2}
HOW = ["train.epochs=null", "train.batch_crops=8", "train.log_every=1", "train.precision=fp32"]
HOW += ["train.peak_tflops=1.0", "train.timeout_s=600.0"]


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def shipped(tmp_path, dataset, config, name, world=1, **changes):
    options = load_config(config).model.options | OPTIONS
    sets = {"run": str(tmp_path / name), "data.datasets": [dataset.root.url]}
    sets |= {"model.options": options, **changes}
    words = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in sets.items()]
    return run(tmp_path, ["--config", config, "--set", *HOW, *words], world)


@pytest.mark.parametrize("config", ["ecg_cpc", "s4_cpc", "s4_jepa"])
def test_a_run_resumes_bit_for_bit_and_embeds(config, dataset, tmp_path):
    train = partial(shipped, tmp_path, dataset, config, train__validate_every=2)
    train = partial(train, train__schedule="fixed")  # else a step depends on how many follow
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        train(name, train__steps=steps).good()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert curve(whole) == curve(parts) and weights(whole).keys() == weights(parts).keys()
    assert rows(whole, "validation.jsonl") == rows(parts, "validation.jsonl")
    one, two = (full_weights(RunFolder(folder).newest_checkpoint()) for folder in (whole, parts))
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
    assert not any(name.startswith("plugin.") for name in weights(whole))
    losses = column(whole, "loss_jepa" if config == "s4_jepa" else "loss_global")
    assert np.isfinite(losses).all() and losses == column(whole, "loss")
    lr = load_config(config).train.lr
    rates = column(whole, "lr")
    assert max(rates) <= lr and (config != "ecg_cpc" or set(rates) == {lr})
    model = omnilead.load(whole)
    uv_LT = dataset.read(0)
    x_RLT = model.segments(uv_LT, 500, "12", "uV")
    assert len(x_RLT) == 4
    assert (x_RLT.abs().max() <= 3) == (config == "ecg_cpc" or np.abs(uv_LT).max() <= 3000)
    out = tmp_path / "embeddings.parquet"
    words = ["embed", "--model", str(whole), "--data", dataset.root.url, "--out", str(out)]
    assert main(words) == 0
    table = parquet.read_table(out)
    assert len(table) == len(dataset)


def test_ranks_share_what_has_other_rates(dataset, tmp_path):
    how = {"train__steps": 3, "model__options": {"norm": "layer", "dropout": 0.0} | OPTIONS}
    for name, world, stage in (("one", 1, 0), ("part", 1, 1), ("two", 2, 2), ("three", 2, 3)):
        train = partial(shipped, tmp_path, dataset, "s4_cpc", name, world, train__zero_stage=stage)
        train(**how).good()
        for key in ("loss", "grad_norm"):
            np.testing.assert_allclose(
                column(tmp_path / name, key), column(tmp_path / "one", key), rtol=2e-4
            )


def test_a_plan_of_the_authors_recipe(dataset, tmp_path, capsys):
    out, data = str(tmp_path / "run"), dataset.root.url
    how = ["--set", "train.batch_crops=16"]
    assert (
        pretrain.main(["--config", "ecg_cpc", "--data", data, "--out", out, *how, "--dry-run"]) == 0
    )
    said = capsys.readouterr().out
    assert "model: 3,194,880 parameters, 5.401 GFLOP a crop" in said
    assert "activations of 16 crops" in said
    assert (
        type(resample_from_500_hz(torch.ones(1, 5000), 240)) is torch.Tensor
    )  # what follows has numbers


def test_each_weight_is_in_the_group_of_its_part():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleDict({"stem": nn.Linear(2, 3), "layers": nn.Linear(3, 3)})
            self.plugin = nn.Linear(3, 1)

    model = Model()
    groups = lr_groups(model, {"stem": 0.01, "context": 0.1})
    assert [share for share, _ in groups] == [0.01, 0.1, 1.0]
    parts = [model.encoder["stem"], model.encoder["layers"], model.plugin]
    for (_, group), part in zip(groups, parts, strict=True):
        assert set(group) == set(part.parameters())
    (alone,) = lr_groups(model, {})
    assert alone == (1.0, list(model.parameters()))
    assert len(lr_groups(model, {"stem": 0.5, "head": 0.5})) == 2
    model.encoder["stem"].requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"lr_factors=\{'stem': 0\.01\}: this model has no trained"
    ):
        lr_groups(model, {"stem": 0.01})


def test_a_weight_moves_by_its_share(dataset, tmp_path):
    """AdamW's first step is lr times the sign of the gradient."""
    how = {"train__steps": 1, "train__weight_decay": 0.0, "train__save_every_steps": 1}
    shipped(tmp_path, dataset, "ecg_cpc", "run", **how).good()
    after = full_weights(RunFolder(tmp_path / "run").newest_checkpoint())
    config = load_config(
        "ecg_cpc", {"model.options": load_config("ecg_cpc").model.options | OPTIONS}
    )
    generator = torch.Generator().manual_seed(config.train.seed)
    before = Pretrainer(config.model, config.objective, generator=generator).state_dict()
    for name, share in (
        ("encoder.stem.0.weight", 0.01),
        ("encoder.layers.0.space.C", 0.1),
        ("plugin.map.weight", 1.0),
    ):
        moved = (after[name] - before[name]).abs().median()
        assert float(moved) == pytest.approx(share * config.train.lr, rel=0.02)
    assert after["encoder.layers.0.space.log_dt"].equal(before["encoder.layers.0.space.log_dt"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train": {"lr_factors": {"steam": 0.1}}}, "input should be 'stem', 'context' or 'head'"),
        (
            {"train": {"lr_factors": {"stem": 0}}},
            "train.lr_factors.stem=0: input should be greater",
        ),
        ({"objective": {"windows": 5}}, "objective.windows=5: a crop has fewer windows"),
        ({"input": {"clip_mv": 0}}, "input.clip_mv=0: input should be greater than 0"),
    ],
)
def test_wrong_settings_are_one_line(settings, says):
    tree = load_config("ecg_cpc").tree() | {"data": {"datasets": ["D"]}}
    for section, values in settings.items():
        tree[section] = tree[section] | values
    with pytest.raises(ConfigError) as raised:
        check_config(build_config(tree), 1)
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_what_contrasts_two_windows_keeps_them():
    tree = {"data": {"datasets": ["D"]}, "objective": {"windows": 1}, "train": {"steps": 1}}
    with pytest.raises(ConfigError, match=r"windows=1: objective\.method=cmsc contrasts two"):
        check_config(build_config(tree), 1)


def test_weights_go_on_in_a_config_that_leaves_out_defaults(dataset, tmp_path):
    """As those of a converted checkpoint, whose options are all spelt out."""
    how = {"model__options": OPTIONS | {"norm": "batch", "states": 8, "kernels": [3, 1, 1, 1]}}
    shipped(tmp_path, dataset, "ecg_cpc", "one", train__steps=1, **how).good()
    more = {"start": str(tmp_path / "one"), "model__options": OPTIONS | {"norm": "batch"}}
    said = shipped(tmp_path, dataset, "ecg_cpc", "two", train__steps=1, **more).good()
    assert "the encoder loaded" in said
