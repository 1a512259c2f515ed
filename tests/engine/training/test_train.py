"""A run from settings to RUN/model: what it leaves, when it is resumed or refused, and errors of
one line."""

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import TINY, curve, pretrain, rows, run, settings
from safetensors import SafetensorError
from safetensors.torch import load_file

import omnilead
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.errors import StorageError
from omnilead.engine.config import CONFIGS, build
from omnilead.engine.model import folder
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.pretrain import main
from omnilead.engine.training.checkpoint import crc32c
from omnilead.engine.training.pretraining import PretrainTask

# The keys of every line in metrics.jsonl
PROMISED = """step, crops_seen, epoch, loss, loss_local, loss_global, loss_diversity, loss_features, lr, grad_norm, crops_per_s,
data_wait_pct, mfu, code_perplexity, prob_perplexity, gumbel_tau, masked_share, accuracy_local, accuracy_global, skipped_steps,
memory_gb"""
# Loss and gradient norm on a CPU in float32 with one thread: made by this code, which parity holds
# against the authors'.
GOLDEN = [
    (15.659563, 10.109829),
    (15.452528, 9.237267),
    (14.841668, 7.907982),
    (14.372859, 7.406862),
    (15.136886, 7.681124),
]
LONG = {"train__schedule": "fixed"}


def test_a_run_writes_all_its_files(dataset: Dataset, tmp_path: Path) -> None:
    how = {"train__steps": 5, "train__validate_every": 3, "train__keep": 1}
    ended = pretrain(tmp_path, dataset.root.url, **how)
    assert ended.ok, ended.output
    out, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    assert all(
        list(row) == list(PretrainTask.keys) == PROMISED.replace("\n", " ").split(", ")
        for row in rows(out)
    )
    assert all(
        value is not None and np.isfinite(value) for row in rows(out) for value in row.values()
    )
    np.testing.assert_allclose(
        [(row["loss"], row["grad_norm"]) for row in rows(out)], GOLDEN, rtol=2e-4
    )
    valid = rows(out, "validation.jsonl")
    assert [row["step"] for row in valid] == [0, 3, 5] and len({row["loss"] for row in valid}) == 3
    assert all(0 <= row["identification_accuracy"] <= 1 for row in valid)
    facts = json.loads((out / "run.json").read_text())
    assert (
        facts["datasets"] == [dataset.fingerprint]
        and facts["best"] == "loss"
        and "dropout is off" in facts["validation"]
    )
    # whatever it was built for
    assert facts["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert (
        facts["preprocessing_sha256"] == dataset.meta["preprocessing_sha256"]
        and facts["hardware"]["cores"] >= 1
    )
    assert (
        list((out / "tensorboard").iterdir()) and "Global loss" in (out / "report.html").read_text()
    )
    best = f"step-{min(valid[1:], key=lambda row: row['loss'])['step']}"
    assert (checkpoints / "best").read_text() == best and {
        p.name for p in checkpoints.glob("step-*")
    } == {best, "step-5"}
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["trained"]["rlm"] == facts["config"]["augment"]["rlm"] == 0.5
    # weights as readable as the rest
    assert len({path.stat().st_mode for path in (out / "model").iterdir()}) == 1
    weights = load_file(out / "model" / "model.safetensors")
    model = Pretrainer(
        build({"model": config["model"]}).model, build({"objective": config["objective"]}).objective
    )
    model.load_state_dict(weights)
    assert "not normalised" in (out / "model" / "README.md").read_text()
    assert omnilead.load(out).embed(dataset.read(0), 500, "12", "uV").shape == (
        model.encoder.width,
    )
    progress = [line for line in ended.output.splitlines() if line.startswith("step ")]
    assert len(progress) == 5 and all(
        "crops/s, data wait" in line and "MFU" in line and "left" in line for line in progress
    )

    metrics = (out / "metrics.jsonl").read_text()
    # finished: nothing is done again
    assert "done: " in pretrain(tmp_path, dataset.root.url, **how).output
    assert (out / "metrics.jsonl").read_text() == metrics
    (out / "model" / "model.safetensors").unlink()
    assert run(tmp_path, ["--export", str(out)]).ok
    exported = load_file(out / "model" / "model.safetensors")
    assert all(weights[name].equal(exported[name]) for name in weights)


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
)
def test_a_run_resumed_across_an_epoch_is_bit_for_bit_the_same(
    stage: int, precision: str, dataset: Dataset, tmp_path: Path
) -> None:
    # 4 steps per epoch
    how = {
        "train__zero_stage": stage,
        "train__precision": precision,
        "train__batch_crops": 16,
    }
    for name, lengths in (("whole", [6]), ("parts", [3, 6])):
        for steps in lengths:
            ended = pretrain(tmp_path, dataset.root.url, name, **how, train__steps=steps)
            assert ended.ok, ended.output
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert 1 < rows(whole)[-1]["epoch"] < 3 and [row["step"] for row in rows(parts)] == list(
        range(1, 7)
    )
    assert curve(whole) == curve(parts)
    one, two = (load_file(path / "model" / "model.safetensors") for path in (whole, parts))
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


def test_the_papers_literal_model_trains_resumes_and_is_exported(
    dataset: Dataset, tmp_path: Path
) -> None:
    for name, lengths in (("whole", [4]), ("parts", [2, 4])):
        for steps in lengths:
            arguments = settings(
                tmp_path, dataset.root.url, name, train__steps=steps, train__epochs=None
            )
            (tmp_path / "tiny.yaml").write_text(f"base: {CONFIGS}/pretrain/paper.yaml{TINY}")
            ended = run(tmp_path, arguments)
            assert ended.ok, ended.output
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert curve(whole) == curve(parts) and len(rows(parts)) == 4
    assert all(
        row["loss"] == pytest.approx(row["loss_local"] + row["loss_global"], rel=1e-6)
        for row in rows(parts)
    )
    model = omnilead.load(parts)
    assert [model.config["model"][name] for name in ("conv_norm", "mask_starts")] == [
        "layer",
        "bernoulli",
    ]
    one, other = (
        omnilead.load(path).embed(dataset.read(0), 500, "12", "uV") for path in (whole, parts)
    )
    assert torch.equal(one, other)


def test_changed_data_or_settings_are_refused_by_name(dataset: Dataset, tmp_path: Path) -> None:
    how: dict[str, Any] = {"train__steps": 2, **LONG}
    assert pretrain(tmp_path, dataset.root.url, **how).ok
    before = curve(tmp_path / "run")
    for change, says in (
        ({"train__lr": 1e-4}, "train.lr changed from 0.001 to 0.0001"),
        ({"train__batch_crops": 4}, "train.batch_crops changed from 8 to 4"),
        ({"augment__rlm": 0.1}, "augment.rlm changed from 0.5 to 0.1"),
        ({"train__zero_stage": 2}, "zero_stage changed from 1 to 2"),
        ({"train__micro_batch": 4}, "train.micro_batch x ranks changed from 8 to 4"),
        ({"train__steps": 1}, "has done 2 steps, more than 1"),
    ):
        assert says in pretrain(tmp_path, dataset.root.url, **how | change).one_line()
    path = next((tmp_path / "run" / "checkpoints").glob("step-*")) / "state.json"
    state, manifest = json.loads(path.read_text()), path.parent / "manifest.json"
    for name, value in (("datasets", ["0" * 64]), ("preprocessing_sha256", "1" * 64)):
        path.write_text(json.dumps(state | {name: value}))
        facts = {"bytes": path.stat().st_size, "crc32c": crc32c(path)}
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {path.name: facts}))
        assert f"{name} changed from" in pretrain(tmp_path, dataset.root.url, **how).one_line()
    assert curve(tmp_path / "run") == before  # nothing was lost
    assert json.loads((tmp_path / "run/run.json").read_text())["steps"] == 2


def test_wrong_input_is_one_line(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "dataset.json").write_text("{}")
    arguments, url = settings(tmp_path, dataset.root.url), dataset.root.url
    ds = {name: tmp_path / f"{name}.json" for name in ("type", "key")}
    ds["type"].write_text('{"zero_optimization": {"stage": 1, "reduce_bucket_size": "big"}}')
    ds["key"].write_text('{"zero_optimization": {"stage": 1, "no_such_key": 1}}')
    for says, words in (
        ("no dataset.json", settings(tmp_path, str(tmp_path / "nowhere"))),
        ("the same data", [*arguments, "--set", f"data.datasets=[{url}, {url}]"]),
        ("did you mean train.steps", ["--set", "train.stesp=1"]),
        ("train.batch_crops=200: ", [*arguments, "--set", "train.batch_crops=200"]),
        ("file: ", [*arguments, "--set", f"run={tmp_path}/file"]),
        ("file/run: ", [*arguments, "--set", f"run={tmp_path}/file/run"]),
        ("other: is a dataset", [*arguments, "--set", f"run={tmp_path}/other"]),
        ("has no checkpoint", ["--export", str(tmp_path / "nothing")]),
        ("hold_out=1e-06", [*arguments, "--set", "data.hold_out=1e-6"]),
        *(
            ("DeepSpeed refuses it", [*arguments, "--set", f"train.deepspeed={path}"])
            for path in ds.values()
        ),
    ):
        assert says in run(tmp_path, words).one_line()
    assert len(list((tmp_path / "other").iterdir())) == 1
    assert "WORLD_SIZE=0" in run(tmp_path, arguments, WORLD_SIZE="0").one_line()
    monkeypatch.chdir(tmp_path)  # without arguments it is the quick start
    says = run(tmp_path, ["--local_rank=0"]).one_line()
    assert (
        "omnilead synth demo/archive" in says
        and "omnilead shard demo/archive --out demo/dataset" in says
    )


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            StorageError("s3://ecgs/dataset.json: the server does not answer"),
            2,
            "pretrain: s3://ecgs/dataset.json: the serv",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0"),
            1,
            "memory: lower train.micro_batch",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            1,
            "memory: lower train.micro_batch",
        ),
        (RuntimeError("can't start new thread"), 1, "memory: lower train.micro_batch"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "memory: lower train.micro_batch"),
        (MemoryError(), 1, "memory: lower train.micro_batch"),
        (
            OSError(errno.EROFS, "Read-only file system", "/run/x"),
            2,
            "/run/x: Read-only file system: choose another",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "/run/x"),
            1,
            "/run/x: No space left on device",
        ),
        (
            UnicodeEncodeError("utf-8", "r\udcff", 1, 2, "surrogates not allowed"),
            2,
            "'r\\udcff': not UTF-8",
        ),
        (KeyboardInterrupt(), 130, "the same command continues"),
        (
            KeyboardInterrupt("interrupted after a checkpoint"),
            130,
            "pretrain: interrupted after a checkpoint",
        ),
    ],
)
def test_errors_of_libraries_and_the_system_are_one_line(
    error: BaseException,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("omnilead.engine.training.train.train", fail)
    assert main([]) == code
    line = capsys.readouterr().err
    assert says in line and line.count("\n") == 1


def test_a_full_disk_at_the_end_is_one_line(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(folder, "save_weights", no_room)
        ended = pretrain(tmp_path, dataset.root.url, train__steps=1)
    assert (
        ended.codes == [1]
        and "No space left on device: free disk space, then --export"
        in ended.output.splitlines()[-1]
    )
    assert "Traceback" not in ended.output and not list((tmp_path / "run").glob(".model*"))
    assert pretrain(tmp_path, dataset.root.url, train__steps=1).ok
