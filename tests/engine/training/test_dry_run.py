"""pretrain --dry-run and finetune --dry-run: what a training would be."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import BatchNorm1d, SyncBatchNorm

from omnilead.downstream import finetune
from omnilead.engine import pretrain
from omnilead.engine.data.loader import Batch, crop_order
from omnilead.engine.model.s4 import StateSpace
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.dry_run import (
    gpu_operations,
    peak_activation_bytes_per_crop,
    saved_tensor_bytes,
    state_bytes,
)
from omnilead.engine.training.pretraining import PretrainTask
from omnilead.engine.training.read_settings import read_settings
from omnilead.engine.training.run_folder import open_datasets
from omnilead.engine.training.train import batch_norm_remarks, recompute_layers

ROOT = Path(__file__).parents[3]
SMALL = ["model.conv=[[8,4],[8,4],[8,4]]", "model.width=16", "model.layers=2", "model.heads=2"]
SMALL += ["model.ffn=32", "model.position_groups=2", "train.precision=fp32"]


def words(dataset, tmp_path, *more):
    out = str(tmp_path / "run")
    return ["--data", dataset.root.url, "--out", out, *more]


def test_nothing_is_written_and_eight_gpus_share(dataset, tmp_path, capsys):
    settings = ["--set", *SMALL, "train.batch_crops=32", "train.epochs=null", "train.steps=10"]
    assert pretrain.main(words(dataset, tmp_path, *settings, "--dry-run", "8")) == 0
    assert not (tmp_path / "run").exists()
    said = capsys.readouterr().out
    assert "  batch_crops: 32\n" in said
    assert "training: 10 steps, 1 x 4 crops on each of 8 GPUs: " in said
    assert "batch norm" not in said
    assert "activations of 4 crops" in said and "GFLOP a crop" in said
    assert "an epoch is " in said and "time on H100 or H200, at least: " in said
    assert pretrain.main(words(dataset, tmp_path, *settings, "train.steps=0", "--dry-run")) == 2


@pytest.mark.parametrize("window_s", [5, 10, 2.5])
def test_of_fine_tuning(window_s, dataset, saved_model, tmp_path, capsys):
    model = saved_model("start", preprocessing={"window_s": window_s})
    how = ["--start", str(model), "--task", "diagnosis", "--dry-run"]
    assert finetune.main(words(dataset, tmp_path, *how)) == 0
    said = capsys.readouterr().out
    assert "memory of the GPU, an estimate: " in said and "time on H100 or H200, " in said


def test_of_the_papers_model(dataset, tmp_path, capsys):
    how = ["--config", "w2v_cmsc_rlm", "--set", "train.batch_crops=16", "train.epochs=null"]
    how += ["train.steps=1000000", "train.precision=bf16"]
    assert pretrain.main(words(dataset, tmp_path, *how, "--dry-run", "8")) == 0
    said = capsys.readouterr().out
    assert "90,883,072 parameters, 175.9 GFLOP a crop" in said
    assert "at least: 19 minutes, 13,985 crops/s" in said
    assert "disk: 1.27 GB a checkpoint" in said
    with pytest.raises(SystemExit):
        pretrain.main(words(dataset, tmp_path, *how, "--dry-run", "--profile", "2"))
    assert "--dry-run runs no step" in capsys.readouterr().err


CONFIGS = sorted(path.stem for path in (ROOT / "configs" / "pretrain").glob("*.yaml"))


@pytest.mark.parametrize("config", CONFIGS)
def test_every_shipped_config_has_a_time_before_there_is_a_dataset(config, capsys):
    assert pretrain.main(["--config", config, "--dry-run", "8", "--crops", "1000000"]) == 0
    said = capsys.readouterr().out
    (crops_s,) = re.findall(
        r"^time on H100 or H200, .*?: .*?, ([\d,]+) crops/s", said, re.MULTILINE
    )
    assert int(crops_s.replace(",", "")) > 1000
    assert "data: 1,000,000 crops of as many patients, which nobody has looked at" in said


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        ("small", [], "each of 8 GPUs: 0.08 of an epoch; train.epochs=1 reads every crop once\n"),
        ("small", [], "\nmoney, at least: less than 0.01, 0.00 GPU-hours at 3\n"),
        ("s4_cpc", [], "at least: .*, but with 8 crops at a time a GPU also waits for its kernels"),
        ("s4_cpc", [], "each of 8 GPUs: 20 epochs\n"),
        ("s4_cpc", ["train.batch_crops=2048"], "time on H100 or H200, an estimate: "),
        ("ecg_cpc", [], "\ndoubtful: batch norm on 8 ranks: .* model.options={norm: layer}"),
    ],
)
def test_what_a_planner_may_not_see_by_himself(config, settings, says, capsys):
    how = ["--config", config, "--dry-run", "8", "--crops", "1e6", "--hourly", "3"]
    assert pretrain.main([*how, "--set", "train.log_every=10", *settings]) == 0
    assert re.search(says, capsys.readouterr().out)


def test_batch_norm_is_doubted_on_several_ranks():
    own, synchronized = (torch.nn.Sequential(kind(4)) for kind in (BatchNorm1d, SyncBatchNorm))
    assert "batch norm on 2 ranks" in batch_norm_remarks(own, 2)[0]
    assert batch_norm_remarks(own, 1) == batch_norm_remarks(synchronized, 2) == []


def test_the_estimate_is_what_was_measured(capsys):
    """One H100, the paper's model, 512 crops in bf16: 1,748 crops/s."""
    how = ["--config", "w2v_cmsc_rlm", "--dry-run", "1", "--crops", "1000000"]
    how += ["--hourly", "2.5", "--set", "train.epochs=20", "data.hold_out=0.1"]
    assert pretrain.main(how) == 0
    said = capsys.readouterr().out
    trained, steps, crops_s, money, hours = (
        float(re.search(pattern, said)[1].replace(",", ""))
        for pattern in (
            r"at, ([\d,]+) to train on",
            r"training: ([\d,]+) steps, 1 x 512 crops",
            r" ([\d,]+) crops/s",
            r"\nmoney, an estimate: ([\d.]+)",
            r"([\d.]+) GPU-hours at 2.5\n",
        )
    )
    assert crops_s == pytest.approx(1748, rel=0.001)
    assert trained == pytest.approx(900_000, rel=0.01) and steps == trained // 512 * 20
    assert hours == pytest.approx(steps * 512 / crops_s / 3600, rel=0.01)
    assert money == pytest.approx(2.5 * hours, rel=0.01)


def test_layers_that_are_computed_again_take_a_third_longer(capsys):
    rates = []
    for again in ("false", "true"):
        settings = ["model.layers=2", f"train.recompute_layers={again}", "train.epochs=1"]
        how = ["--config", "w2v_cmsc_rlm", "--dry-run", "8", "--crops", "4000"]
        assert pretrain.main([*how, "--set", *settings]) == 0
        found = re.search(r" ([\d,]+) crops/s", capsys.readouterr().out)
        rates.append(int(found[1].replace(",", "")))
    assert rates[0] / rates[1] == pytest.approx(4 / 3, rel=0.001)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--crops", "9"], "--crops: is for --dry-run"),
        (["--crops", "1.5"], "--crops: '1.5':"),
        (["--crops", "1e99"], "--crops: '1e99':"),
        (["--hourly", "9"], "--hourly: is for --dry-run"),
        (["--dry-run", "--crops", "9", "--data", "D"], "--crops 9: instead of --data"),
        (["--dry-run", "--hourly", "nan"], "'nan': must be a number of at least 0, such as 2.5"),
        (["--dry-run", "--crops", "100"], "train.batch_crops=512: 100 crops are selected"),
    ],
)
def test_options_of_a_dry_run_that_cannot_be_are_refused(given, says, capsys):
    try:
        code = pretrain.main(["--config", "w2v_cmsc_rlm", *given])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["input.fs_hz=250", "input.scale=zscore"],
        ["input.window_s=10", "objective.contrast=0"],
        ["train.recompute_layers=true", "model.dropout=0.1", "model.layers=8"],
    ],
)
def test_activations_are_what_autograd_keeps(settings, dataset):
    """Counted on tensors with numbers, by their addresses."""
    every = ["run=nowhere", f'data.datasets=["{dataset.root.url}"]', *SMALL, *settings]
    config = read_settings("w2v_cmsc_rlm", [*every, "train.batch_crops=8"])
    datasets = open_datasets(config)
    task = PretrainTask.prepare(config, datasets, Ranks(0, 1, torch.device("cpu"), None))
    loader = replace(config.loader, windows=task.windows)
    places = crop_order(loader, datasets, task.selection).batch(0)[:3]
    model = task.model(torch.Generator().manual_seed(0)).train()
    if config.train.recompute_layers:
        recompute_layers(model)
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    x_BSLT = torch.randn(3, 2, 12, 2500)
    masks = None if task.input.uses_stored_halves else np.ones((3, task.windows, 12, 1), bool)
    arguments = task.arguments(Batch(x_BSLT, places, keep_BSL1=masks), 1, 1)
    with gpu_operations(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(*arguments)
    for p in model.parameters():
        kept.pop(p.untyped_storage().data_ptr(), None)
    counted = sum(storage.nbytes() for storage in kept.values())
    assert saved_tensor_bytes(task, model, places) == pytest.approx(counted, rel=0.02)
    if config.train.recompute_layers:
        order = crop_order(loader, datasets, task.selection)
        least = peak_activation_bytes_per_crop(task, model, order)
        model.encoder.recomputes = False
        whole = saved_tensor_bytes(task, model, places)
        assert counted < 0.7 * whole
        assert 3 * least == pytest.approx(counted + (whole - counted) / 8, rel=0.05)


def test_s4_is_counted_with_its_kernels_of_a_gpu():
    """Between chunks they keep no states, which are as large as the input."""
    space, shapes = StateSpace(8, states=4, bidirectional=False, length=40), []
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        gpu_operations(space),
        torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(x.shape), lambda x: x),
    ):
        assert space(torch.randn(7, 40, 8)).shape == (7, 40, 8)
    assert [shape for shape in shapes if 40 in shape] == [(7, 40, 8)]
    assert not any(7 * 2 in shape for shape in shapes)  # chunks: of 32 tokens on a CPU
    assert not space.in_registers


def test_weights_gradients_and_adamw_are_spread_by_zero_stage():
    model = torch.nn.ParameterList([torch.empty(900), torch.empty(100)])
    model[1].requires_grad_(False)

    def of(*how):
        return list(state_bytes(model, *how).values())

    assert of(torch.float32, 0, 8) == [4000, 3600, 7200]
    assert of(torch.bfloat16, 1, 8) == [2000, 1800, 10800 / 8]
    assert of(torch.bfloat16, 2, 8) == [2000, 1800 / 8, 10800 / 8]
    assert of(torch.bfloat16, 3, 8) == [2000 / 8, 1800 / 8, 10800 / 8]


def test_a_plug_in_that_needs_numbers_is_told_of(dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Encoder(torch.nn.Module):\n"
        "    def __init__(self, leads, width=8):\n"
        "        super().__init__()\n"
        "        self.width, self.conv = width, torch.nn.Conv1d(leads, width, 25, 25)\n"
        "    def forward(self, x):\n"
        "        y = self.conv(x)\n"
        "        return (y + float(y.sum()) * 0).mT\n"
    )
    own = ["model.encoder=own.py:Encoder", "objective.local=0", "train.batch_crops=8"]
    assert pretrain.main(words(dataset, tmp_path, "--set", *own, "--dry-run")) == 0
    assert "without activations of 8 crops: the plug-in needs numbers" in capsys.readouterr().out
