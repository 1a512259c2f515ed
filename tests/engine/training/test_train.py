"""A run from settings to RUN/model: what it leaves, when it is resumed or refused, and errors of
one line."""

import errno
import json
import os
import re
from functools import partial

import numpy as np
import pytest
import torch
from ranks import TINY, column, curve, rows, run, settings
from safetensors.torch import load_file

import omnilead
from omnilead.data_tools.io.errors import StorageError
from omnilead.downstream.reports import run_report
from omnilead.engine.model import encoder, folder
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.pretrain import main
from omnilead.engine.settings.files import CONFIGS
from omnilead.engine.training.checkpoint_files import crc32c
from omnilead.engine.training.config import build_config
from omnilead.engine.training.pretraining import PretrainTask

# The keys of every line in metrics.jsonl
PROMISED = """step, crops_seen, epoch, loss, loss_local, loss_global, loss_diversity, loss_features, lr, grad_norm, crops_per_s,
data_wait_pct, mfu, code_perplexity, prob_perplexity, gumbel_tau, masked_share, accuracy_local, accuracy_global, skipped_steps,
memory_gb"""
# Loss and gradient norm on a CPU in float32 with one thread: made by this code, which parity holds
# against the authors'.
GOLDEN = [
    (16.229628, 9.043360),
    (16.385338, 9.327674),
    (13.966713, 7.812811),
    (15.511444, 7.606655),
    (14.873086, 6.408950),
]


def test_a_run_writes_all_its_files(training, dataset, tmp_path):
    training = partial(training, train__steps=5, train__validate_every=3, train__keep=1)
    output = training().good()
    out = tmp_path / "run"
    promised = PROMISED.replace("\n", " ").split(", ")
    for row in rows(out):
        assert list(row) == list(PretrainTask.keys) == promised
        assert np.isfinite(list(row.values())).all()
    found = [(row["loss"], row["grad_norm"]) for row in rows(out)]
    np.testing.assert_allclose(found, GOLDEN, rtol=2e-4)
    valid = rows(out, "validation.jsonl")
    assert [row["step"] for row in valid] == [0, 3, 5] and len({row["loss"] for row in valid}) == 3
    assert all(0 <= row["identification_accuracy"] <= 1 for row in valid)
    facts = json.loads((out / "run.json").read_text())
    assert facts["datasets"] == [dataset.fingerprint] and facts["best"] == "loss"
    assert facts["attention"] == "omnilead" and "loader torch, attention omnilead)\n" in output
    assert "dropout is off" in facts["validation"] and facts["hardware"]["cores"] >= 1
    # whatever it was built for
    assert facts["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert facts["preprocessing_sha256"] == dataset.meta["preprocessing_sha256"]
    assert list((out / "tensorboard").iterdir())
    page = run_report.report_page(out)
    assert "Crops per second" in page and "Loss" in page
    best = f"step-{min(valid[1:], key=lambda row: row['loss'])['step']}"
    assert (out / "checkpoints" / "best").read_text() == best
    assert {path.name for path in out.glob("checkpoints/step-*")} == {best, "step-5"}
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["trained"]["rlm"] == facts["config"]["augment"]["rlm"] == 0.5
    # weights as readable as the rest
    assert len({path.stat().st_mode for path in (out / "model").iterdir()}) == 1
    built = build_config({"model": config["model"], "objective": config["objective"]})
    model = Pretrainer(built.model, built.objective)
    weights = load_file(out / "model" / "model.safetensors")
    model.load_state_dict(weights)
    assert "not normalised" in (out / "model" / "README.md").read_text()
    embedding = omnilead.load(out).embed(dataset.read(0), 500, "12", "uV")
    assert embedding.shape == (2 * model.encoder.width + 68,)  # mean, std and rhythm
    progress = "step .*crops/s, data wait .*MFU.*left"
    assert len(re.findall(progress, output)) == 5

    metrics = (out / "metrics.jsonl").read_text()
    assert "done: " in training().output  # finished: nothing is done again
    assert (out / "metrics.jsonl").read_text() == metrics
    (out / "model" / "model.safetensors").unlink()
    run(tmp_path, ["--export", str(out)]).good()
    assert_same_weights(weights, load_file(out / "model" / "model.safetensors"))


def assert_same_weights(one, two):
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
)
def test_a_run_resumed_across_an_epoch_is_bit_for_bit_the_same(
    stage, precision, training, tmp_path
):
    # 4 steps per epoch
    how = {"train__zero_stage": stage, "train__precision": precision, "train__batch_crops": 16}
    for name, steps in (("whole", 6), ("parts", 3), ("parts", 6)):
        training(name, **how, train__steps=steps).good()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert 1 < rows(whole)[-1]["epoch"] < 3 and column(parts) == [1, 2, 3, 4, 5, 6]
    assert curve(whole) == curve(parts)
    models = (load_file(path / "model" / "model.safetensors") for path in (whole, parts))
    assert_same_weights(*models)


def test_layers_that_are_computed_again_change_no_loss(training, tmp_path, monkeypatch):
    """And a run may go on without them."""
    calls, checkpoint = [], encoder.checkpoint
    monkeypatch.setattr(
        encoder, "checkpoint", lambda *x, **how: calls.append(x) or checkpoint(*x, **how)
    )
    training("plain", train__steps=3).good()
    assert not calls
    training("parts", train__steps=2, train__recompute_layers=True).good()
    assert len(calls) == 2 * 2  # layers, steps
    training("parts", train__steps=3).good()
    assert len(calls) == 2 * 2 and curve(tmp_path / "plain") == curve(tmp_path / "parts")


def test_the_papers_literal_model_trains_resumes_and_is_exported(dataset, tmp_path):
    for name, steps in (("whole", 2), ("run", 1), ("run", 2)):
        how = {"train__steps": steps, "train__epochs": None}
        arguments = settings(tmp_path, dataset.root.url, name, **how)
        (tmp_path / "tiny.yaml").write_text(f"base: {CONFIGS}/pretrain/paper.yaml{TINY}")
        run(tmp_path, arguments).good()
    assert curve(tmp_path / "whole") == curve(tmp_path / "run") and len(rows(tmp_path / "run")) == 2
    for row in rows(tmp_path / "run"):
        assert row["loss"] == pytest.approx(row["loss_local"] + row["loss_global"], rel=1e-6)
    model = json.loads((tmp_path / "run" / "model" / "config.json").read_text())["model"]
    assert (model["conv_norm"], model["mask_starts"]) == ("layer", "bernoulli")


def test_changed_data_or_settings_are_refused_by_name(training, dataset, tmp_path):
    training = partial(training, **{"train__steps": 2, "train__schedule": "fixed"})
    training().good()
    before = curve(tmp_path / "run")
    for name, value, says in (
        ("train__lr", 1e-4, "train.lr changed from 0.001 to 0.0001"),
        ("train__batch_crops", 4, "train.batch_crops changed from 8 to 4"),
        ("augment__rlm", 0.1, "augment.rlm changed from 0.5 to 0.1"),
        ("train__zero_stage", 2, "zero_stage changed from 1 to 2"),
        ("train__micro_batch", 4, "train.micro_batch x ranks changed from 8 to 4"),
        ("train__steps", 1, "has done 2 steps, more than the 1 of this run"),
    ):
        assert says in training(**{name: value}).one_line()
    (step,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    state, manifest = (json.loads((step / f).read_text()) for f in ("state.json", "manifest.json"))
    url, crops = dataset.root.url, f"{len(dataset):,} crops, fingerprint"
    data = f"datasets changed from {url} ({crops} 00000000) to {url} ({crops} {dataset.fingerprint[:8]})"
    preprocessed = f"from 11111111 to {dataset.meta['preprocessing_sha256'][:8]}"
    for name, value, says in (
        ("datasets", ["0" * 64], f"cannot resume: {data}: "),
        ("preprocessing_sha256", "1" * 64, f"preprocessing_sha256 changed {preprocessed}: "),
    ):
        path = step / "state.json"
        path.write_text(json.dumps(state | {name: value}))
        manifest["state.json"] = {"bytes": path.stat().st_size, "crc32c": crc32c(path)}
        (step / "manifest.json").write_text(json.dumps(manifest))
        assert says in training().one_line()
    assert curve(tmp_path / "run") == before  # nothing was lost
    scheduled = partial(training, "scheduled", train__schedule="warmup_cosine")
    scheduled().good()
    longer = scheduled(train__steps=3).one_line()
    assert "train.steps changed from 2 to 3: change it back, or use --out NEW; to train" in longer
    assert f"longer: --start {tmp_path / 'scheduled'} --out NEW" in longer


def test_wrong_input_is_one_line(dataset, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "dataset.json").write_text("{}")
    for name, value in (("reduce_bucket_size", "big"), ("no_such_key", 1)):
        ds = {"zero_optimization": {"stage": 1, name: value}}
        (tmp_path / f"{name}.json").write_text(json.dumps(ds))
    url = dataset.root.url
    arguments = settings(tmp_path, url)
    for setting, says in (
        (f"data.datasets=[{tmp_path}/nowhere]", "nowhere: does not exist"),
        (f"data.datasets=[{url}, {url}]", "the same data"),
        ("train.stesp=1", "did you mean train.steps"),
        ("train.batch_crops=200", "train.batch_crops=200: "),
        (f"run={tmp_path}/file", "file: "),
        (f"run={tmp_path}/file/run", "file/run: "),
        (f"run={tmp_path}/other", "other: is a dataset"),
        ("data.hold_out=1e-6", "hold_out=1e-06"),
        (f"train.deepspeed={tmp_path}/reduce_bucket_size.json", "DeepSpeed refuses it"),
        (f"train.deepspeed={tmp_path}/no_such_key.json", "DeepSpeed refuses it"),
    ):
        assert says in run(tmp_path, [*arguments, "--set", setting]).one_line()
    assert len(list((tmp_path / "other").iterdir())) == 1
    nothing = ["--export", str(tmp_path / "nothing")]
    assert "has no checkpoint" in run(tmp_path, nothing).one_line()
    assert "WORLD_SIZE=0" in run(tmp_path, arguments, WORLD_SIZE="0").one_line()
    monkeypatch.chdir(tmp_path)  # without arguments it is the quick start
    says = "omnilead synth demo/archive .*omnilead shard demo/archive --out demo/dataset"
    assert re.search(says, run(tmp_path, ["--local_rank=0"]).one_line())


MEMORY = "memory: lower train.micro_batch"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (StorageError("s3://ecgs: no answer"), 2, "pretrain: s3://ecgs: no answer"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0"), 1, MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 1, MEMORY),
        (RuntimeError("can't start new thread"), 1, MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, MEMORY),
        (MemoryError(), 1, MEMORY),
        (OSError(errno.EROFS, "Read-only", "/run/x"), 2, "/run/x: Read-only: choose another"),
        (OSError(errno.ENOSPC, "No space left on device", "/run/x"), 1, "/run/x: No space left"),
        (UnicodeEncodeError("utf-8", "r\udcff", 1, 2, "surrogates"), 2, "'r\\udcff': not UTF-8"),
        (KeyboardInterrupt(), 130, "the same command continues"),
        (KeyboardInterrupt("after a checkpoint"), 130, "pretrain: after a checkpoint"),
    ],
)
def test_errors_of_libraries_and_the_system_are_one_line(error, code, says, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr("omnilead.engine.training.run_folder.open_datasets", fail)
    assert main([]) == code
    line = capsys.readouterr().err
    assert says in line and line.count("\n") == 1


SAVE, NORM_GROUPS = "checkpoint_engine.save(state_dict, path)", "optimizer._get_norm_groups()"


def other_save(self, state_dict, path, tag): ...


@pytest.mark.parametrize(
    ("place", "function", "says"),
    [
        ("checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine.save", None, SAVE),
        ("checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine.save", other_save, SAVE),
        ("zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_norm_groups", None, NORM_GROUPS),
        ("zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_norm_groups", other_save, NORM_GROUPS),
    ],
)
def test_another_deepspeed_is_refused_before_the_first_step(
    place, function, says, training, monkeypatch
):
    """One that lacks a function that training replaces, or calls it differently."""
    monkeypatch.setattr(f"deepspeed.runtime.{place}", function)
    line = training(train__zero_stage=3).one_line()
    assert f": has no {says}, which training replaces: pip install deepspeed==" in line


def test_a_full_disk_at_the_end_is_one_line(training, tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(folder, "save_weights", no_room)
        says = "No space left on device: free disk space, then omnilead pretrain --export"
        assert says in training(train__steps=1).last_line(1)
    assert not list((tmp_path / "run").glob(".model*"))
    training(train__steps=1).good()
