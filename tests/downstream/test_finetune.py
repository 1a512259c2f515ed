"""Fine-tuning for diagnosis and identification: what is trained, validated, exported, refused."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent / "training"))  # the helpers lie there
import omnilead
from omnilead.data_tools.ecg.mean_beat import RHYTHM_MEASUREMENTS, measurements
from omnilead.data_tools.ecg.record_tables import read_table
from omnilead.data_tools.sharding.roles import RoleSources
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.downstream import convert, embed, evaluate, predict
from omnilead.downstream.finetune import main
from omnilead.downstream.finetuning import task as finetuning_task
from omnilead.downstream.finetuning.choose_settings import read_settings
from omnilead.downstream.finetuning.start import read_start_model, select_leads
from omnilead.downstream.finetuning.task import FinetuneTask, make_targets
from omnilead.downstream.reports import run_report
from omnilead.downstream.reports.page import metric_title
from omnilead.downstream.tasks.classifier import Classifier
from omnilead.downstream.tasks.config import FinetuneConfig, TaskConfig
from omnilead.downstream.tasks.labels import read_task
from omnilead.downstream.tasks.metrics import MEASURES, measure
from omnilead.engine.data import leakage
from omnilead.engine.data.patients import patient_ids
from omnilead.engine.data.seen import LABELLED, kinds_of_use, name_keys
from omnilead.engine.model.config import ModelConfig, flops_per_crop, parse_settings
from omnilead.engine.model.encoder import Encoder, pool
from omnilead.engine.model.encoders import initialise
from omnilead.engine.model.folder import LoadError, write_config
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.files import CONFIGS
from omnilead.engine.settings.metrics import METRIC_OF, Metric
from omnilead.engine.settings.run_files import LABELS
from omnilead.engine.training import checkpoint_files
from omnilead.engine.training.config import BestMetric, build_config
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.export import full_weights
from omnilead.engine.training.run_folder import RunFolder
from omnilead.engine.training.task import best_metric_and_sign
from tests.conftest import save_probed
from tests.downstream.evaluate.conftest import quick  # noqa: F401
from tests.downstream.test_convert import Malice
from tests.engine.training.ranks import TINY, column, curve, finetune, pretrain, rows, run, tuning
from tests.tables import tabulated

KINDS = {"diagnosis": "multilabel", "identification": "identity"}
GOLDEN = {
    "diagnosis": [0.721692, 0.713469, 0.703964, 0.700679],
    "identification": [256.05212, 235.53243, 235.18805, 235.06735],
}
EXACT = ("step", "crops_seen", "loss", "accuracy", "lr", "grad_norm")


@pytest.fixture(scope="module")
def base(dataset, tmp_path_factory):
    """A tiny pre-trained model, with its settings beside it."""
    tmp = tmp_path_factory.mktemp("base")
    assert pretrain(tmp, dataset.root.url, train__steps=2, objective__local=0).ok
    return tmp / "run"


@pytest.fixture
def tune(dataset, base, tmp_path):
    """Fine-tunes `base`: task, name, world and changes as of ranks.finetune."""
    return partial(finetune, tmp_path, dataset.root.url, base)


@pytest.fixture
def tuned(tune):
    """The same, of a run that ends well: its output."""

    def made(*given, **changes):
        ended = tune(*given, **changes)
        assert ended.ok, ended.output
        return ended.output

    return made


def note_ranks_that_compare(folder):
    compare = finetuning_task.refuse_leak

    def noting(*sides):
        (folder / f"compared-{os.environ['RANK']}").touch()
        compare(*sides)

    finetuning_task.refuse_leak = noting


def test_one_rank_compares_the_roles_of_datasets_for_all(base, dataset, other, tmp_path):
    both = [dataset.root.url, other.root.url]
    arguments = tuning(tmp_path, "", base, "diagnosis", data__datasets=both)
    ended = run(tmp_path, arguments, world=2, before=partial(note_ranks_that_compare, tmp_path))
    assert "is trained on in" in ended.one_line()
    assert [path.name for path in tmp_path.glob("compared-*")] == ["compared-0"]


@pytest.mark.parametrize(
    ("task", "stage", "world"), [("diagnosis", 1, 1), ("identification", 3, 2)]
)
def test_evaluate_agrees_with_the_runs_validation(
    task, stage, world, tuned, dataset, base, tmp_path
):
    diagnoses, run = task == "diagnosis", tmp_path / "run"
    said = tuned(task, world=world, train__zero_stage=stage)
    assert ("no positive examples in validation, threshold 0.5: " in said) == diagnoses
    assert all(np.isfinite(value) for row in rows(run) for value in row.values())
    np.testing.assert_allclose([row["loss"] for row in rows(run)], GOLDEN[task], rtol=2e-4)
    figure = "auroc" if diagnoses else "identification_accuracy"
    first, *valid = rows(run, "validation.jsonl")
    best = max(valid, key=lambda row: row[figure])
    assert first["step"] == 0 and json.loads((run / "run.json").read_text())["best"] == figure
    assert (run / "checkpoints" / "best").read_text() == f"step-{best['step']}"
    assert json.loads((run / "result.json").read_text())["converged"] is False
    assert f"<figcaption>{metric_title(figure)}</figcaption>" in run_report.report_page(run)
    model, before = omnilead.load(run), omnilead.load(base)
    assert model.config["head"]["task"] == task and (model.head is not None) == diagnoses
    old, new = before.encoder.state_dict(), model.encoder.state_dict()
    moved = [name for name, w in new.items() if not w.equal(old[name])]
    assert len(moved) > len(new) / 3 and not any(name.startswith("conv.") for name in moved)
    found = omnilead.evaluate(run, data=dataset.root.url, role="valid")
    tested = best["challenge" if diagnoses else figure]
    assert found["score"] == pytest.approx(tested, abs=1e-6)


def test_only_a_head_that_sees_all_tokens_is_trained(tuned, dataset, base, tmp_path):
    """In its checkpoint, in the exported model, and by `evaluate`."""
    how = {"encoder__frozen": True, "task__head": "attention", "task__head_options": {"heads": 4}}
    tuned("diagnosis", train__precision="fp32", train__save_every_steps=1, **how)
    run = tmp_path / "run"
    model = omnilead.load(run)
    assert model.head.heads == 4 and "all tokens" in (run / "model" / "README.md").read_text()
    before, after = (omnilead.load(one).encoder.state_dict() for one in (base, run))
    assert all(after[name].equal(weights) for name, weights in before.items() if name in after)
    two, four = (full_weights(run / "checkpoints" / f"step-{step}") for step in (2, 4))
    assert not two["head.query"].equal(four["head.query"])
    x_RLT = torch.randn(2, 12, 2500, generator=torch.Generator().manual_seed(0))
    tokens = model.encoder(x_RLT)
    swapped = tokens[:, torch.randperm(tokens.shape[1])]  # weighs tokens by what they are
    torch.testing.assert_close(model.head(tokens), model.head(swapped))
    torch.testing.assert_close(model.logits(x_RLT), model.head(tokens))
    row, shape = rows(run)[0], parse_settings(ModelConfig, model.config["model"], "model")
    flops = row["mfu"] * 1e12 / row["crops_per_s"]  # of a device with 1 TFLOP/s
    assert flops == pytest.approx(flops_per_crop(shape, local=False) / 3)
    found = omnilead.evaluate(run, data=dataset.root.url, role="valid")
    best = max(rows(run, "validation.jsonl")[1:], key=lambda row: row["auroc"])
    assert found["score"] == pytest.approx(best["challenge"], abs=1e-6)


def test_a_frozen_encoder_is_exported_as_it_was_though_bf16_rounds_it(
    tuned, base, tmp_path, capsys
):
    run, begin = tmp_path / "run", tmp_path / "begin"
    shutil.copytree(base, begin)
    how = {"encoder__frozen": True, "train__precision": "bf16", "train__steps": 2}
    tuned("diagnosis", start=str(begin), **how)
    before, rounded = omnilead.load(base).encoder, full_weights(RunFolder(run).newest_checkpoint())
    exact = before.state_dict()
    after = omnilead.load(run).encoder.state_dict()
    assert all(weights.equal(exact[name]) for name, weights in after.items())
    name = "layers.1.fc2.weight"
    assert not rounded[f"encoder.{name}"].equal(exact[name])
    changed = load_file(begin / "model" / "model.safetensors")
    changed[f"encoder.{name}"] *= 1.01
    save_file(changed, begin / "model" / "model.safetensors")
    write_config(begin / "model", json.loads((begin / "model" / "config.json").read_text()))
    for says in ("has changed", "cannot be read again: "):
        assert main(["--export", str(run)]) == 0
        told = f"start={begin}: the exported encoder is rounded to bf16, since the start {says}"
        assert told in capsys.readouterr().err
        assert omnilead.load(run).encoder.state_dict()[name].equal(rounded[f"encoder.{name}"])
        shutil.rmtree(begin, ignore_errors=True)


def test_a_head_that_sees_all_tokens_is_trained_with_its_encoder(tuned, tune, base, tmp_path):
    """With dropout, and resumed bit for bit; not with another number of heads."""
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        tuned("diagnosis", name, task__head="attention", train__steps=steps)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert curve(whole, EXACT) == curve(parts, EXACT)
    assert rows(whole, "validation.jsonl") == rows(parts, "validation.jsonl")
    one, two = (full_weights(RunFolder(run).newest_checkpoint()) for run in (whole, parts))
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
    model, before = omnilead.load(whole), omnilead.load(base)
    assert model.head.heads == 16
    moved = "layers.1.fc2.weight"
    assert not model.encoder.state_dict()[moved].equal(before.encoder.state_dict()[moved])
    other = tune("diagnosis", "whole", task__head="attention", task__head_options={"heads": 8})
    assert "task.head_options.heads changed from None to 8" in other.one_line()


def test_fine_tuning_begins_at_a_probe(tuned, tune, dataset, base, saved_model, tmp_path):
    """With its read-out and linear layer: before the first step the scores are the probe's."""
    data, probed, run = dataset.root.url, tmp_path / "probed", tmp_path / "run"
    save_probed(base, data, "diagnosis", probed, readout="mean+rhythm")
    at_probe = {"start": str(probed), "task__head": "start", "train__precision": "fp32"}
    tuned("diagnosis", **at_probe)
    before, after = omnilead.load(probed), omnilead.load(run)
    assert after.readout == ("mean", "rhythm") and not after.head.weight.equal(before.head.weight)
    first, *valid = (row["auroc"] for row in rows(run, "validation.jsonl"))
    for model, auroc in ((probed, first), (run, max(valid))):
        found = omnilead.evaluate(model, data=data, role="valid")
        assert found["metrics"]["auroc"] == pytest.approx(auroc, abs=1e-6)
    age = {"task": "age", "kind": "regression", "classes": ["age"], "center": [6], "scale": [1]}
    for says, changes in (
        ("has no linear layer: omnilead fit", {"start": str(base)}),
        ("the labels are multilabel: AF", {"start": str(saved_model(head=age))}),
        ("bf16 would round the head of task.head=start", {"train__precision": "bf16"}),
    ):
        assert says in tune("diagnosis", "bad", **at_probe | changes).one_line()


def test_two_ranks_recognise_patients_as_one_does(tuned, tune, base, tmp_path):
    how = {"encoder__activation_dropout": 0.0, "encoder__feature_grad": 1.0}
    tuned("identification", "whole", **how)
    tuned("identification", "two", 2, train__zero_stage=3, **how)
    state = checkpoint_files.read_state(RunFolder(tmp_path / "whole").newest_checkpoint())
    assert "causal" not in state["finetuning"]["architecture"]  # nor in those of older runs
    whole, two = (
        [[row[key] for key in EXACT] for row in rows(tmp_path / name)] for name in ("whole", "two")
    )
    np.testing.assert_allclose(two, whole, rtol=2e-4)
    elsewhere = tune("identification", "whole", start=str(CONFIGS / "pretrain" / "quickstart.yaml"))
    assert f"cannot resume: start changed from {base} to " in elsewhere.one_line()


@pytest.mark.slow
def test_training_with_layer_decay(tuned, tune, dataset, base, tmp_path):
    """Each weight moves by its own rate; clipping is of the norm of all groups; exact resume."""
    how = {"encoder__layer_decay": 0.5, "encoder__activation_dropout": 0.0}
    how |= {"encoder__feature_grad": 1.0, "train__validate_every": 0, "train__clip_norm": 0.01}
    # AdamW's first step is the rate of each weight, whatever its gradient
    tuned("diagnosis", "first", **how, train__steps=1, train__eps=1e-16, train__weight_decay=0)
    before, after = (
        full_weights(RunFolder(run).newest_checkpoint()) for run in (base, tmp_path / "first")
    )
    for name, share in {"conv.blocks.0.weight": 1 / 4, "layers.0.fc1.weight": 1 / 2}.items():
        moved = (after[f"encoder.{name}"] - before[f"encoder.{name}"]).abs().detach().median()
        assert float(moved) == pytest.approx(1e-3 * share, rel=1e-3)
    assert column(tmp_path / "first", "lr") == [1e-3]
    plans = {"alone": [(1, 4, 0)], "parts": [(1, 2, 1), (1, 4, 1)], "whole": [(1, 4, 1)]}
    plans |= {"two": [(1, 2, 2), (2, 4, 2)], "three": [(2, 4, 3)]}
    for name, plan in plans.items():
        for world, steps, stage in plan:
            ranks = {"train__steps": steps, "train__zero_stage": stage}
            assert tune("diagnosis", name, world, **how | ranks).ok
    curves = {name: curve(tmp_path / name, EXACT) for name in plans}
    assert curves["parts"] == curves["whole"]
    values = {name: [list(row.values()) for row in rows] for name, rows in curves.items()}
    for name in ("whole", "two", "three"):
        np.testing.assert_allclose(values[name], values["alone"], rtol=2e-4)
    assert min(column(tmp_path / "alone", "grad_norm")) > 0.01  # it was clipped
    plain = tune(
        "diagnosis", "whole", **how | {"encoder__layer_decay": 1.0, "train__zero_stage": 1}
    )
    assert "encoder.layer_decay changed from 0.5 to 1.0" in plain.one_line()
    frozen = tune("diagnosis", "frozen", **how | {"encoder__frozen": True})
    assert "encoder.layer_decay=0.5: encoder.frozen=true trains only the head" in frozen.one_line()


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32")]
)
def test_a_nan_in_one_group_of_weights_skips_the_step_of_all(
    stage, precision, tune, tmp_path, monkeypatch
):
    forward = Classifier.forward

    def poisoned(self, *args):
        out = forward(self, *args)
        if isinstance(out, dict):
            out["loss"] = out["loss"] + float("nan") * self.head.weight.sum()
        return out

    how = {"encoder__layer_decay": 0.5, "train__validate_every": 0, "train__zero_stage": stage}
    how |= {"train__precision": precision, "train__clip_norm": 0.01}
    assert tune("diagnosis", "run", **how, train__steps=1).ok
    good = full_weights(RunFolder(tmp_path / "run").newest_checkpoint())
    monkeypatch.setattr(Classifier, "forward", poisoned)
    assert tune("diagnosis", "run", **how, train__steps=3).ok
    assert column(tmp_path / "run", "skipped_steps") == [0, 1, 2]
    after = full_weights(RunFolder(tmp_path / "run").newest_checkpoint())
    assert all(after[name].equal(good[name]) for name in good)


def test_a_folder_with_another_run_is_refused(tune, tuned, dataset, base, tmp_path, capsys):
    pre, holds = shutil.copytree(base, tmp_path / "pre"), "holds another run, a"
    says = f"pre: {holds} pre-training (step 2): use --out NEW; only `omnilead pretrain`"
    assert says in tune("diagnosis", "pre").one_line()
    assert main(["--export", str(pre)]) == 2 and says in capsys.readouterr().err
    tuned("diagnosis", "dx", train__steps=1)
    says = (
        f"dx: {holds} fine-tuning for diagnosis (step 1): use --out NEW; only `omnilead finetune`"
    )
    assert says in tune("identification", "dx").one_line()
    assert says in pretrain(tmp_path, dataset.root.url, name="dx").one_line()
    assert (pre / "metrics.jsonl").read_bytes() == (base / "metrics.jsonl").read_bytes()
    shutil.copytree(base / "model", tmp_path / "head")
    assert (
        "head: is a model, which a run in this folder would hide"
        in tune("diagnosis", "head").one_line()
    )


def test_which_metric_chooses_the_best_step():
    for given, names, found in (
        (None, ("auroc", "challenge", "loss"), ("auroc", 1)),
        ("challenge", ("auroc", "challenge", "loss"), ("challenge", 1)),
        ("loss", ("loss",), ("loss", -1)),
    ):
        assert best_metric_and_sign(given, names) == found
    with pytest.raises(ConfigError, match=r"train\.best=auroc: .* use identification_accuracy"):
        best_metric_and_sign("auroc", ("identification_accuracy",))
    for names in MEASURES.values():  # what this error recommends can be set
        assert set(names) <= set(get_args(BestMetric))


@pytest.mark.parametrize("lower", [True, False])
def test_a_record_is_all_that_a_new_metric_needs_to_choose_a_checkpoint(lower, monkeypatch):
    """One that should fall and did not say so would choose the worst checkpoint."""
    monkeypatch.setitem(METRIC_OF, "kappa", Metric("kappa", "kappa", lower, ("binary",)))
    assert best_metric_and_sign(None, ("kappa", "loss")) == ("kappa", -1 if lower else 1)


def test_random_weights_of_a_pretraining_file(tune, tuned, tmp_path):
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text(TINY)
    how = {"start": str(tiny), "augment__leads": "2", "augment__padded": False}
    how |= {"augment__rlm": 0.5, "augment__noise": "physio3"}
    tuned("diagnosis", train__steps=1, **how)
    model = omnilead.load(tmp_path / "run")
    assert model.config["model"]["leads"] == 2 and model.preprocessing["leads"] == ["I", "II"]
    tuned("diagnosis", train__steps=2, **how)  # goes on
    tiny.write_text(TINY.replace("ffn: 32", "ffn: 64"))
    ended = tune("diagnosis", train__steps=3, **how)
    assert "finetuning.architecture.ffn changed from 32 to 64" in ended.one_line()


def test_fewer_channels_are_the_same_as_zeros(base):
    begin, there = read_start_model(str(base)), torch.tensor([0, 1, 7])
    x_RLT = torch.randn(3, 12, 2500, generator=torch.Generator().manual_seed(1))
    few = x_RLT[:, there]
    outputs = []
    for padded, x in ((True, torch.zeros_like(x_RLT).index_copy(1, there, few)), (False, few)):
        augment = {"leads": "I,II,V2", "padded": padded, "rlm": 0.0}
        config = build_config({"start": str(base), "augment": augment}, FinetuneConfig)
        encoder = Encoder(config.tuned_architecture(begin.model), mask=False).eval()
        encoder.load_state_dict(select_leads(begin, config))
        outputs.append(encoder(x))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    other = replace(begin.input, leads=(7, 0, 1))
    with pytest.raises(
        ConfigError, match=r"takes the leads as V2,I,II: reorder .* --leads I,II,V2$"
    ):
        select_leads(begin._replace(input=other, kind=None), config)


@pytest.mark.parametrize("width", [32, 64])  # with a projection, and without
def test_an_ecg_of_zeros_has_a_bounded_gradient(width):
    small = {"conv": [[16, 2], [32, 8]], "width": width, "layers": 4, "heads": 2, "ffn": 32}
    encoder = Encoder(build_config({"model": {**small, "position_kernel": 8}}).model, mask=False)
    initialise(encoder, torch.Generator().manual_seed(0))
    model = Classifier(encoder, TaskConfig(), 26)
    model(torch.zeros(1, 2, 12, 640), torch.ones(1, 26), torch.ones(1, 2))["loss"].backward()
    assert all(p.grad is None or float(p.grad.norm()) < 1e3 for p in encoder.parameters())


def test_arcface_with_learnt_scale_and_growing_margin(tune, tuned, tmp_path):
    """Class vectors start at the means of their classes only once: a resumed run is the same
    run."""
    learned = {"task__scale": "learned", "task__margin_warmup": 0.5, "task__class_vectors": "means"}
    margins = []
    arguments, whole = FinetuneTask.arguments, tmp_path / "whole"

    def spy(self, *given):
        found = arguments(self, *given)
        margins.append(float(found[-1]))
        return found

    with mock.patch.object(FinetuneTask, "arguments", spy):
        tuned("identification", "whole", **learned, train__save_every_steps=1)
    assert margins == [0.0, 0.5, 1.0, 1.0]
    first, last = (full_weights(whole / "checkpoints" / f"step-{step}") for step in (2, 4))
    assert first["log_scale"] != last["log_scale"]
    assert "log_scale" not in omnilead.load(whole).encoder.state_dict()
    ended = tune("identification", "whole", **learned, train__steps=5)
    assert "train.steps changed from 4 to 5" in ended.one_line()
    part = shutil.copytree(whole, tmp_path / "part")
    for name in ("step-3", "step-4"):
        shutil.rmtree(part / "checkpoints" / name)
    (part / "checkpoints" / "latest").write_text("step-2")
    with mock.patch.object(FinetuneTask, "_begin_at_means", side_effect=AssertionError):
        tuned("identification", "part", **learned)
    assert curve(part, EXACT) == curve(whole, EXACT)


def test_class_vectors_initialised_with_means(base, dataset, tmp_path):
    # as a kill in the first save leaves it: not resumed
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    tree = {
        "start": str(base),
        "run": str(tmp_path),
        "train": {"precision": "fp32"},
        "task": {"kind": "identity", "class_vectors": "means"},
    }
    config = build_config(tree, FinetuneConfig)
    task = FinetuneTask.prepare(config, [dataset], Ranks(0, 1, torch.device("cpu"), None))
    model = task.model(torch.Generator().manual_seed(0))
    assert isinstance(model, Classifier) and model.training
    encoder = model.encoder.eval()
    y, rows_ = task.targets.y[0], task.labels.rows_of_dataset(0, "train")
    unit = {int(k): [] for k in np.unique(y[rows_])}  # type: ignore[var-annotated]
    for row in rows_:
        for half in range(dataset.column("halves")[row]):
            x_RLT = torch.from_numpy(
                dataset.read(row)[:, half * 2500 : half * 2500 + 2500] / 1000
            ).float()[None]
            with torch.no_grad():
                unit[int(y[row])].append(F.normalize(pool(encoder(x_RLT)), dim=-1)[0])
    mean_D = torch.stack([one for some in unit.values() for one in some]).mean(0)
    means_CD = torch.stack([torch.stack(some).mean(0) - mean_D for some in unit.values()])
    torch.testing.assert_close(
        model.head.weight.detach(), F.normalize(means_CD, dim=-1), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("task", ["diagnosis", "identification"])
def test_missing_halves_are_ignored(task):
    small = build_config({"model": {"width": 16, "layers": 1, "heads": 2, "ffn": 16}}).model
    encoder = Encoder(FinetuneConfig(start="x").tuned_architecture(small), mask=False)
    seeded = torch.Generator().manual_seed(0)
    initialise(encoder, seeded)
    model = Classifier(encoder, TaskConfig(kind=KINDS[task]), 26, seeded).eval()
    x = torch.randn(2, 2, 12, 640)
    labels = (torch.rand(2, 26) > 0.5).float() if task == "diagnosis" else torch.tensor([3, 25])
    there = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    losses = model(x, labels, there)
    x[1, 1] = 1e3
    again = model(x, labels, there)
    assert losses["loss"].equal(again["loss"]) and losses["accuracy"].equal(again["accuracy"])
    alone = [
        model(x[[i]][:, [half]], labels[[i]], torch.ones(1, 1))["loss"]
        for i, half in there.nonzero().tolist()
    ]
    torch.testing.assert_close(losses["loss"], torch.stack(alone).mean())


def test_classes_are_numbered_by_patient(dataset):
    known = read_task(TaskConfig(kind="identity"), [dataset])
    (patients,), targets = known.y, make_targets(known)
    (labels,), classes = targets.y, targets.outputs
    trained = dataset.select(identity="train")
    patients, labels = patients[trained], labels[trained]
    assert classes == len(np.unique(patients)) == labels.max() + 1
    assert ((labels[:, None] == labels) == (patients[:, None] == patients)).all()


@pytest.fixture(scope="module")
def other(dataset, archive, tmp_path_factory):
    """The same records with other roles."""
    out = str(tmp_path_factory.mktemp("other") / "seed1")
    roles = RoleSources.from_facts(dataset.facts)
    return shard(
        open_sources(str(archive)), ShardOptions(out, seed=1, role_sources=roles, quiet=True)
    )


def test_datasets_with_contradictory_roles_are_refused(tune, dataset, other):
    sides = [[one.select(pretrain=True), leakage.held_out_rows(one)] for one in (dataset, other)]
    with pytest.raises(ConfigError, match="is trained on"):
        leakage.refuse_leak([dataset, other], *zip(*sides, strict=True))
    tables = {one.root.url: one.table().to_pydict() for one in (dataset, other)}
    pattern = r"(record|patient) (\S+)/(\S+) is trained on in (\S+) and held out in (\S+):"
    for task, role in (("diagnosis", "dx_role"), ("identification", "id_role")):
        line = tune(task, data__datasets=list(tables)).output
        found = re.search(pattern, line)
        assert found, line
        kind, source, name, *where = found.groups()
        assert set(where) == set(tables)
        trained, held_out = (
            {
                roles
                for *names, roles in zip(table["source"], table[kind], table[role], strict=True)
                if names == [source, name]
            }
            for table in (tables[url] for url in where)
        )
        assert "train" in trained and held_out & {"valid", "test", "gallery", "probe"}
    ended = tune("diagnosis", data__datasets=[dataset.root.url] * 2)
    assert ended.codes == [2] and "are the same data" in ended.output


def test_invalid_settings_are_one_line(tune, tuned, archive, tmp_path):
    source = open_sources(str(archive / "training" / "synthetic-ningbo"))
    bare = shard(source, ShardOptions(str(tmp_path / "bare"), plan="all", quiet=True))
    two, data = str(tmp_path / "two"), {"data__datasets": [bare.root.url]}
    tuned("diagnosis", "two", augment__leads="2", train__steps=1, augment__padded=False)
    cases = [
        ("nothing to learn from; shard --dx-sources names", data),
        ("no crop with identity=train", {**data, "task__kind": "identity"}),
        ("start='': name a pre-trained", {"start": ""}),
        ("no such folder", {"start": str(tmp_path / "nothing")}),
        ("was trained on the leads I,II only", {"start": two, "augment__leads": "3"}),
        ("task.kind", {"task__kind": "sex"}),
        ("use halves", {"pipeline__views": "window"}),
        ("encoder.dropout=1.5: input should be", {"encoder__dropout": 1.5}),
        ("task.folds would be ignored", {"task__folds": {"train": [1], "test": [2]}}),
        ("compares the patients of a", {"task__kind": "survival", "train__micro_batch": 1}),
    ]
    for kind in ("regression", "survival", "identity"):
        weighed = {"task__kind": kind, "task__class_weights": "balanced"}
        cases.append((f"kind {kind} has no class weights", weighed))
    for says, changes in cases:
        assert says in tune("diagnosis", "bad", **changes).one_line()


@pytest.fixture
def table(dataset, tmp_path):
    """Numbers, text and zeros for every record except the first, whose cells are empty."""
    path = tmp_path / "mine.csv"
    names = list(dict.fromkeys(dataset.column("record")))
    cells = [f"{name},{i % 7}.5,{'abc'[i % 3]},{i % 2}" for i, name in enumerate(names[1:])]
    path.write_text("\n".join(["record,number,letter,odd", f"{names[0]},,,", *cells]))
    return path


def require_notes_on_rates(run, dataset, tmp_path, capsys):
    """Trained on ECGs of 500 Hz: those of 100 Hz lack waves, of which predict tells. So does
    evaluate if it was trained on 100 Hz. Of a model of an earlier version nobody knows."""
    slow = tmp_path / "slow.npy"
    np.save(slow, np.random.default_rng(0).normal(0, 0.3, (12, 1000)))
    document = json.loads((run / "model" / "config.json").read_text())
    assert document["head"]["source_hz"] == [500, 500]

    def predicted(out, command=predict):
        words = ["--model", str(run), "--data", str(slow), "--fs", "100", "--unit", "mV", "--out"]
        assert command.main([*words, str(tmp_path / out)]) == 0
        return capsys.readouterr().err

    assert "recorded at" not in predicted("E.parquet", embed)  # which has no scores
    fitted = "Hz, while the head was fitted on ECGs of {} Hz"
    assert predicted("F.csv").count(f"ECGs recorded at 100 {fitted.format(500)}") == 1
    document["head"]["source_hz"] = [100, 100]
    write_config(run / "model", document)
    remarks = omnilead.evaluate(run, data=dataset.root.url)["remarks"]
    assert sum(f"500 to 1000 {fitted.format(100)}" in remark for remark in remarks) == 1
    del document["head"]["source_hz"]
    write_config(run / "model", document)
    assert "recorded at" not in predicted("G.csv")


def require_notes_on_what_was_fitted(run, dataset, archive, tmp_path, capsys):
    """A dataset's ECGs, and files."""
    seen = omnilead.load(run).seen
    crops = dataset.table(["source", "record", "patient", "waveform"])
    is_fitted = kinds_of_use(seen, crops, name_keys([dataset])).of_waveform == LABELLED
    names = np.array(crops["record"])
    fitted, other = names[is_fitted][0], np.setdiff1d(names, names[is_fitted])[0]
    told = f"{len(set(names[is_fitted]))} of the {len(set(names))} ECGs read were fitted on"

    def predicted(data, out):
        words = ["--model", str(run), "--data", str(data), "--out", str(tmp_path / out)]
        assert predict.main(words) == 0
        return capsys.readouterr().err

    assert predicted(dataset.root.url, "all.csv").count(told) == 1
    of_file = predicted(next(archive.rglob(f"{fitted}.hea")), "fitted.csv")
    assert "1 of the 1 ECGs read were fitted on" in of_file
    assert "ECGs read were fitted on" not in predicted(
        next(archive.rglob(f"{other}.hea")), "other.csv"
    )


@pytest.mark.parametrize(
    ("kind", "column", "outputs", "figure"),
    [
        ("regression", "number", ["number"], "mae"),
        ("multiclass", "letter", ["a", "b", "c"], "auroc"),
        ("multilabel", "odd", ["odd"], "auroc"),
    ],
)
def test_a_users_own_label_table(
    kind, column, outputs, figure, table, tune, tuned,
    dataset, archive, tmp_path, capsys,
):  # fmt: skip
    run, weights = tmp_path / "run", "none" if kind == "regression" else "balanced"
    how = {"task__kind": kind, "task__columns": [column], "task__labels": str(table)}
    how["task__class_weights"] = weights
    tuned("diagnosis", train__steps=2, **how)
    head = omnilead.load(run).config["head"]
    state = checkpoint_files.read_state(run / "checkpoints" / "step-2")
    assert (head["kind"], head["classes"]) == (kind, outputs)
    assert head["definition"]["labels"] == "mine.csv"
    assert figure in rows(run, "validation.jsonl")[1] and "loss" in rows(run)[0]
    known = read_task(TaskConfig(kind=kind, labels=str(table), columns=(column,)), [dataset])
    assert state["labels"]["sha256"] == known.resume_facts["sha256"]
    assert len(known.rows_of_dataset(0, "train")) < len(dataset)
    kept = read_table(str(run / LABELS))
    assert kept.equals(read_table(str(table)).select(["record", column]))  # no other column
    if kind == "regression":
        y = known.y_of("train")[:, 0]
        assert head["center"] + head["scale"] == pytest.approx([y.mean(), y.std()])
    elif kind == "multilabel":
        assert head["thresholds"] == state["best"]["thresholds"] and 0 < head["thresholds"][0] < 1
        require_notes_on_rates(run, dataset, tmp_path, capsys)
        require_notes_on_what_was_fitted(run, dataset, archive, tmp_path, capsys)
    table.rename(moved := tmp_path / "moved.csv")
    assert evaluate.main(["--model", str(run), "--data", dataset.root.url]) == 0  # it keeps labels
    text = moved.read_text().replace("0.5,a", "0.5,b").replace("1.5", "2.5", 1)
    table.write_text(text.replace(",1\n", ",0\n", 1))
    assert "labels.sha256 changed from" in tune("diagnosis", train__steps=3, **how).one_line()


@pytest.fixture
def deaths(dataset, tmp_path):
    """A table of times to death, whose hazard is the eighth power of the heart rate, or to the last
    contact; and the logarithm of the hazard by record."""
    rng, rows, risks = np.random.default_rng(0), ["record,time,event,split"], {}
    patients = patient_ids([dataset])[0]
    splits = np.array(["train", "train", "train", "test", "valid"])[rng.permutation(10**4) % 5]
    for row, name in enumerate(dataset.column("record")):
        if name in risks:
            continue
        mv = dataset[row].signal_uv[:, :2500] / 1000
        risks[name] = -8 * measurements(mv[None])[0, RHYTHM_MEASUREMENTS.index("RR mean")]
        died, seen = rng.exponential(np.exp([-risks[name], -3]))
        rows.append(f"{name},{min(died, seen)},{died <= seen:d},{splits[patients[row]]}")
    path = tmp_path / "deaths.csv"
    path.write_text("\n".join(rows))
    return path, risks


@pytest.mark.filterwarnings("ignore:.* lack leads")  # of few synthetic ECGs
def test_the_risk_of_a_fast_heart_is_found(deaths, tuned, tune, dataset, base, tmp_path):
    """By a probe as well as by the true hazard; fine-tuning begins there, on two ranks as on one."""
    (path, risks), data, probed = deaths, dataset.root.url, tmp_path / "probed"
    save_probed(base, data, path, probed, readout="mean+rhythm")
    labels = read_task(TaskConfig(kind="survival", labels=str(path)), [dataset])
    tested = dict.fromkeys(dataset.column("record")[labels.rows_of_dataset(0, "test")])
    y = dict(zip(dataset.column("record"), labels.y[0], strict=True))
    times, true = np.stack([y[name] for name in tested]), [[risks[name]] for name in tested]
    known = measure("survival", times, np.array(true))["c_index"]
    found = omnilead.evaluate(probed, data=data, labels=path)["record"]
    assert found["n"] == len(tested) and 0.75 < known < found["metrics"]["c_index"] + 0.05
    how = {"task__kind": "survival", "task__labels": str(path), "start": str(probed)}
    how |= {"task__head": "start", "task__columns": ["time", "event"]}
    said = tuned("diagnosis", train__best="c_index", **how)
    assert "is survival (the time until an event): risk. Crops of 10 s: " in said
    assert "training crops with the event" in said
    run = tmp_path / "run"
    first, *valid = (row["c_index"] for row in rows(run, "validation.jsonl"))
    page = tmp_path / "page.html"
    for model, c_index in ((probed, first), (run, max(valid))):
        scored = omnilead.evaluate(model, data=data, labels=path, role="valid", report=page)
        assert scored["metrics"].keys() == {"c_index"} and "Kaplan" in page.read_text()
        assert scored["score"] == pytest.approx(c_index, abs=1e-6)
    other = tune("diagnosis", train__steps=5, train__micro_batch=2, **how)
    assert "train.micro_batch x ranks changed from " in other.one_line()
    tuned("diagnosis", "both", world=2, train__steps=2, train__validate_every=0, **how)
    for one, two in zip(rows(run)[:2], rows(tmp_path / "both"), strict=True):
        assert (one["loss"], one["grad_norm"]) == pytest.approx(
            (two["loss"], two["grad_norm"]), rel=1e-3
        )
    with pytest.warns(UserWarning, match="of the 180 ECGs read were fitted on"):
        table = omnilead.predict(run, data=data)
    assert table.column_names[-1] == "risk" and len(table) == len(risks)
    page = tmp_path / "page.html"
    assert omnilead.evaluate(run, data=data, report=page)["n"] and "Kaplan" in page.read_text()
    path.write_text(re.sub(r",1,valid", ",0,valid", path.read_text()))
    said = tuned("diagnosis", "unchosen", train__steps=1, **how)
    assert "no event in validation: the newest checkpoint counts as the best" in said
    path.write_text(re.sub(r",1,train", ",0,train", path.read_text()))
    line = tune("diagnosis", "none", **how).one_line()
    assert "the training split has no event, so there is nothing to learn" in line


def test_the_first_best_step_is_exported_and_training_stops(tuned, tmp_path, monkeypatch):
    """The untrained model and steps with NaN are never the best; by the CinC score, another step is
    the best. Also after an interruption: the checkpoint knows the number of validations without
    improvement."""
    nan, steps = float("nan"), (0, 2, 4, 5, 6, 8)
    figures = iter(zip((0.9, nan, 0.5, 0.3, 0.5, nan), steps, strict=True))
    monkeypatch.setattr(
        FinetuneTask,
        "validate",
        lambda *_: dict(zip(("auroc", "challenge"), next(figures), strict=True)),
    )
    for last in (5, 100, 100):  # the third finds it finished
        said = tuned("diagnosis", train__steps=last, train__patience=3)
        assert "done:" in said
    run = tmp_path / "run"
    assert tuple(row["step"] for row in rows(run, "validation.jsonl")) == steps
    assert [row["step"] for row in rows(run)] == list(range(1, 9))
    converged = "best auroc 0.5000 at step 4, and 3 validations since without improvement"
    assert f"converged: {converged}\n" in said
    result = json.loads((run / "result.json").read_text())
    assert result["converged"] and result["curve"] == [[0, 0.9], [4, 0.5], [5, 0.3], [6, 0.5]]
    assert (run / "checkpoints" / "best").read_text() == "step-4"
    assert omnilead.load(run).history["step"] == 4
    assert (
        "0.5000, at step 4. These are the weights of step 4"
        in (run / "model" / "README.md").read_text()
    )


def test_a_run_has_one_learning_rate(tune, tmp_path):
    several = tune("diagnosis", train__lr=[1e-4, 3e-4])
    assert "train.lr=[0.0001, 0.0003]: a run has one learning rate" in several.one_line()
    assert not (tmp_path / "run").exists()
    one = build_config({"start": "x", "train": {"lr": [1e-4]}}, FinetuneConfig)
    assert one.train.lr == 1e-4


@pytest.mark.parametrize(
    ("kind", "cell", "says"),
    tabulated("""
binary     | 1  | has only positives of v: nothing to tell apart; an empty cell is
multilabel | 1  | has only positives of v: nothing to tell apart; an empty cell is
binary     | 0  | has no positive of v: nothing to tell apart
multiclass | a  | the training split has only a: nothing to tell apart
regression | 61 | all known values of v in the training split are equal
binary     |    | has no crop with a known label in the training split
"""),
)
def test_labels_that_cannot_be_learnt_are_refused(kind, cell, says, tune, dataset, tmp_path):
    path, names = tmp_path / "mine.csv", list(dict.fromkeys(dataset.column("record")))
    tested = [f"{name},{i % 2},test" for i, name in enumerate(names[:3])]
    trained = [f"{name},{cell},train" for name in names[3:]]
    path.write_text("\n".join(["record,v,split", *tested, *trained]))
    how = {"task__kind": kind, "task__labels": str(path)}
    assert says in tune("diagnosis", "bad", **how).one_line()
    absent = [f"X{i},1,train" for i in range(len(names) + 1)]
    with path.open("a") as file:  # most of its records are of another dataset
        file.write("\n".join(["", *absent]))
    strangers = f"mine.csv: {len(absent)} (X0, X1, X2, ...) of {len(names) + len(absent)} records"
    line = tune("diagnosis", "bad", **how).one_line()
    assert 0 <= line.find(f"{strangers} are not in the data, which has ") < line.find(says)


def test_settings_that_suit_the_labels(table, dataset, base, tmp_path, monkeypatch, capsys):
    start = {"start": str(base), "data.datasets": [dataset.root.url]}
    given = {**start, "task.labels": str(table), "task.columns": ["odd"]}
    config = read_settings(None, given)
    t, crops = config.train, len(read_task(config.task, [dataset]).y_of("train"))
    assert (config.task.kind, config.task.name, t.batch_crops) == ("binary", "mine", crops // 10)
    assert t.validate_every == crops // t.batch_crops and t.steps == 40 * t.validate_every
    assert t.patience > 0 and t.lr == 1e-3
    random = {**given, "start": str(CONFIGS / "pretrain" / "quickstart.yaml")}
    frozen = {**random, "encoder.feature_grad": 0}
    shares = [read_settings(None, one).encoder.feature_grad for one in (given, random, frozen)]
    assert shares == [0, 1, 0]
    own = {"train.epochs": 2, "train.lr": 1e-4, "train.batch_crops": 4}
    capsys.readouterr()
    mine = read_settings(None, {**given, "task.columns": ["letter"], **own})
    assert capsys.readouterr().out.startswith(
        "mine: the table looks like multiclass (each ECG has exactly one of them; --kind if not). "
        f"{crops} training crops, used 4 at a time (a step), for at most 2 x through all; "
        "learning rate 0.0001. Every "
    )
    t = mine.train
    assert (mine.task.kind, t.steps, t.lr, t.batch_crops) == ("multiclass", None, 1e-4, 4)
    run = tmp_path / "run"  # resumed without the length that it was given
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(mine.tree()))
    again = {**given, "task.columns": ["letter"], "run": str(run)}
    assert read_settings(None, again).train.epochs is None  # nothing to resume yet
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    resumed = read_settings(None, again).train
    assert (resumed.epochs, resumed.steps, resumed.batch_crops) == (2, None, 4)
    assert read_settings(None, {**again, "train.steps": 3}).train.epochs is None
    monkeypatch.setenv("WORLD_SIZE", "3")
    t = read_settings(None, {**given, "train.micro_batch": 2}).train
    assert 0 == t.batch_crops % 6 < t.batch_crops
    monkeypatch.delenv("WORLD_SIZE")
    sex = read_settings(None, {**start, "task.name": "sex"}).task
    assert (sex.name, sex.classes) == ("sex", ("F", "M"))
    for wrong, says in (
        ({}, "--labels my.csv"),
        ({"task.name": "sax"}, "did you mean sex"),
        ({"task.labels": "x.csv"}, "x.csv"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_settings(None, {**start, **wrong})


def test_no_command_runs_a_payload(base, saved_model, tmp_path, capsys):
    """In a checkpoint whose manifest lists it, or in what is called safetensors."""
    run, trace = tmp_path / "run", tmp_path / "executed"
    shutil.copytree(base, run, ignore=shutil.ignore_patterns("model"))
    (weights,) = run.glob("checkpoints/*/mp_rank_00_model_states.pt")
    named = saved_model() / "model.safetensors"
    for file in (weights, named):
        torch.save({"payload": Malice(os.system, f"touch {trace}")}, file)
    manifest = json.loads((weights.parent / checkpoint_files.MANIFEST).read_text())
    manifest[weights.name] = {
        "bytes": weights.stat().st_size,
        "crc32c": checkpoint_files.crc32c(weights),
    }
    (weights.parent / checkpoint_files.MANIFEST).write_text(json.dumps(manifest))
    assert checkpoint_files.find_fault(weights.parent) is None
    for words in (
        ["to-fairseq", str(run), str(tmp_path / "a.pt")],
        ["from-fairseq", str(weights), str(tmp_path / "out")],
    ):
        assert convert.main(words) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
    for begin in (run, weights, named.parent):
        with pytest.raises(LoadError):
            read_start_model(str(begin))
    assert not trace.exists()
