"""Trainings from Python: several in one process, each as if it were alone, leaving nothing
behind."""

import gc
import os
import signal
import sys
import threading
from unittest import mock

import pytest
import torch
import yaml
from ranks import TINY, curve, drawn_nothing, rows

import omnilead
from omnilead.data_tools.dataset import Dataset
from omnilead.downstream.reports import run_report
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training.loop import Loop
from tests.forks import started

TRAIN = "omnilead.engine.training.train"
SMALL = {"train.steps": 3, "train.validate_every": 3, "train.valid_batches": 1}


def left():
    """The process state that a training must leave as it was, or clean up."""
    gc.collect()
    models = sum(type(thing) is Pretrainer for thing in gc.get_objects())
    return (
        dict(os.environ),
        sys.excepthook,
        torch.get_rng_state().tolist(),
        models,
        threading.active_count(),
        torch.are_deterministic_algorithms_enabled(),
        (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision),
    )


def notebook(tmp, url):
    """Cells of a notebook, one after the other."""
    torch.set_num_threads(1)
    names = Dataset.open(url).table(["record"])["record"].to_pylist()

    def trained(name, **settings):
        return omnilead.pretrain(
            tmp / "tiny.yaml", data=Dataset.open(url), out=tmp / name, **SMALL | settings
        )

    run = trained("first")
    assert os.fspath(run) == str(tmp / "first") and run.report.is_file()
    assert "<iframe" in run._repr_html_() and run.model().digest == omnilead.load(run).digest
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert [row["step"] for row in run.validation] == [0, 3]
    run_report.report_page = drawn_nothing
    linear = torch.nn.functional.linear
    trained("zero3", **{"train.zero_stage": 3, "train.steps": 1, "train.validate_every": 0})
    # which DeepSpeed replaces by one whose gradients round differently
    assert torch.nn.functional.linear is linear
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    before = left()
    csv = tmp / "labels.csv"
    lines = [f"{name},{i % 2}\n" for i, name in enumerate(sorted(set(names)))]
    csv.write_text("record,tall\n" + "".join(lines))
    how = {"train.steps": 2, "train.batch_crops": 8}
    tuned = omnilead.finetune(run, data=url, labels=csv, out=tmp / "tuned", **how)
    answer = tuned.model().predict(Dataset.open(url)[0].signal_mv, fs_hz=500, leads="12")
    assert list(answer) == ["tall"] and 0 < answer["tall"] < 1
    with pytest.raises(ConfigError, match=r"^steps: no such setting: did you mean train\.steps"):
        trained("wrong", steps=1)
    with pytest.raises(ConfigError, match=r"^train\.micro_batch=3: must divide"):
        trained("wrong", **{"train.micro_batch": 3})
    strict = {"train.deterministic": True}
    thread = threading.Thread(target=trained, args=("thread",), kwargs=strict)
    thread.start()
    thread.join()

    def interrupted(loop, batch, step=Loop._step):
        if loop.progress.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(loop, batch)

    with (
        mock.patch.object(Loop, "_step", interrupted),
        pytest.raises(KeyboardInterrupt, match="start the same run again to resume it"),
    ):
        trained("resumed")
    with (
        mock.patch(f"{TRAIN}.make_engine", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        trained("resumed")  # before there is a model
    assert [row["step"] for row in trained("resumed").metrics] == [1, 2, 3]
    assert left() == before


@pytest.mark.slow
def test_several_in_one_process_equal_those_of_separate_ones(training, dataset, tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    process = started(notebook, tmp_path, dataset.root.url, out=tmp_path / "log")
    process.join()
    assert process.exitcode == 0, (tmp_path / "log").read_text()[-3000:]
    training("alone", **{name.replace(".", "__"): value for name, value in SMALL.items()}).good()
    curves = [curve(tmp_path / name) for name in ("alone", "first", "thread", "resumed")]
    assert curves == curves[:1] * 4


def test_a_notebook_shows_a_bar(training, monkeypatch):
    monkeypatch.setattr("omnilead.engine.training.loggers.is_notebook", lambda: True)
    output = training(train__steps=2).good()
    assert "\nstep 1/2" not in output and "2/2" in output and "loss" in output


def test_the_model_card_names_data_and_metrics(training, tmp_path):
    training(train__steps=2, train__validate_every=2).good()
    _, head, text = (tmp_path / "run" / "model" / "README.md").read_text().split("---\n")
    facts, (_, measured) = yaml.safe_load(head), rows(tmp_path / "run", "validation.jsonl")
    assert "synthetic-ptb-xl" in facts["datasets"] and "ecg" in facts["tags"]
    assert facts["license"] == "unknown"
    (result,) = facts["model-index"][0]["results"]
    told = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert told["loss"] == round(measured["loss"], 4)
    assert f"| loss | {measured['loss']:.4f} |" in text
