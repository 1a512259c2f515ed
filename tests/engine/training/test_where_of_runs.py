"""data.where in runs: what is trained and validated on, what is said, and resuming."""

import json
import os
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from ranks import finetune, pretrain

from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.downstream.tasks.config import FinetuneConfig, TaskConfig
from omnilead.downstream.tasks.labels import read_task
from omnilead.engine.data import where
from omnilead.engine.data.loader import Loader
from omnilead.engine.data.order import DatasetRows, Selection
from omnilead.engine.data.patients import patient_ids
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.run_files import LABELS
from omnilead.engine.training.checkpoint_files import read_state
from omnilead.engine.training.config import build_config
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.pretraining import PretrainTask
from omnilead.engine.training.run_folder import RunFolder
from omnilead.engine.training.train import refuse_changes
from omnilead.engine.training.validation import training_selection

ALONE = Ranks(0, 1, torch.device("cpu"), None)
FEW = {"batch_crops": 8}
OLD = "age >= 60 and not flags.einthoven"


@pytest.fixture(scope="module")
def bare(archive, tmp_path_factory):
    """A dataset without roles."""
    out = str(tmp_path_factory.mktemp("bare") / "dataset")
    return shard(open_sources(str(archive)), ShardOptions(out, plan="all", quiet=True))


def old(dataset):
    age = dataset.table(["age"])["age"].to_pylist()
    return np.array([years is not None and years >= 60 for years in age])


def rows_of(dataset, selection):
    rows = DatasetRows.select(dataset, selection)
    return set(rows.row(np.arange(len(rows))).tolist())


def test_a_run_draws_and_validates_on_these_crops_alone(bare):
    config = build_config(
        {"data": {"datasets": [bare.root.url], "where": OLD, "hold_out": 0.3}, "train": FEW}
    )
    selection = training_selection(config)
    trained, held = rows_of(bare, selection), rows_of(bare, replace(selection, held=True))
    every = training_selection(build_config({"data": {"hold_out": 0.3}}))
    kept = set(np.flatnonzero(old(bare)).tolist())
    assert (
        trained == rows_of(bare, every) & kept
        and held == rows_of(bare, replace(every, held=True)) & kept
    )
    assert 0 < len(trained) < len(rows_of(bare, every))
    with closing(Loader(config.loader, [bare], torch.device("cpu"), selection)) as loader:
        batch, state = next(iter(loader))
        assert set(batch.places.row.tolist()) <= trained
        assert state["recipe"]["roles"]["where"] == OLD


def test_data_valid_is_chosen_by_it_too(dataset):
    data = {"datasets": [dataset.root.url], "valid": {"dx": "train"}}
    for expression in ("", OLD):
        config = build_config({"data": data | {"where": expression}, "train": FEW})
        task = PretrainTask.prepare(config, [dataset], ALONE)
        held = rows_of(dataset, task.validation_loss.selection)
        assert held == rows_of(dataset, Selection(dx="train", halves=2, where=expression))
    assert held and held <= set(np.flatnonzero(old(dataset)).tolist())


def test_it_is_said_and_evaluated_once_by_one_rank(bare, tmp_path):
    before = partial(note, tmp_path)
    how = {"train__steps": 2, "train__validate_every": 1, "data__hold_out": 0.3, "data__where": OLD}
    said = pretrain(tmp_path, bare.root.url, world=2, before=before, **how).good()
    every = training_selection(build_config({"data": {"hold_out": 0.3}}))
    out = len(rows_of(bare, every)) - len(rows_of(bare, replace(every, where=OLD)))
    assert f"data.where={OLD!r} leaves out {out} crops" in said.splitlines()[0]
    assert (tmp_path / "calls-0").read_text().split() == ["holds"]
    assert not (tmp_path / "calls-1").exists()
    line = pretrain(tmp_path, bare.root.url, **how | {"data__where": "age >= 61"}).one_line()
    assert f"data.where changed from {OLD} to age >= 61" in line
    line = pretrain(tmp_path, bare.root.url, **how | {"data__where": ""}).one_line()
    assert f"data.where changed from {OLD} to :" in line


def note(folder):
    real = where._Evaluator.evaluate

    def holds(self, node):
        if type(node).__name__ == "BoolOp":
            with open(folder / f"calls-{os.environ['RANK']}", "a") as file:
                file.write("holds\n")
        return real(self, node)

    where._Evaluator.evaluate = holds


def test_runs_begun_before_there_were_expressions_and_dedup_resume(bare, tmp_path):
    pretrain(tmp_path, bare.root.url, train__steps=1).good()
    path = RunFolder(tmp_path / "run").newest_checkpoint()
    state = read_state(path)
    data = state["config"]["data"]
    assert data.pop("where") == "" and data.pop("dedup") is False
    config = build_config(state["config"])
    task = PretrainTask.prepare(config, [bare], ALONE)
    refuse_changes(path, state, task)
    with closing(Loader(config.loader, [bare], torch.device("cpu"), task.selection)) as loader:
        assert loader.recipe["roles"] == {"halves": 2, "pretrain": True}


@pytest.mark.parametrize("hold_out", [0.0, 0.3])
def test_an_expression_that_leaves_nothing_is_one_line(bare, dataset, tmp_path, hold_out):
    urls = [bare.root.url, dataset.root.url]
    how = {"data__datasets": urls[:1], "data__hold_out": hold_out}
    line = pretrain(tmp_path, "", data__where="age > 200", **how).one_line()
    assert "data.where='age > 200'" in line and "Traceback" not in line
    line = pretrain(tmp_path, "", data__where="ages > 200", **how).one_line()
    assert "no column 'ages'" in line


def label_table(dataset, path):
    """Binary labels of most records, split by patient."""
    records = dict(zip(dataset.column("record"), patient_ids([dataset])[0].tolist(), strict=True))
    lines = ["record,v,quality,split"]
    for n, (record, person) in enumerate(records.items()):
        if n % 5:
            split = ("train", "train", "valid", "test")[(person >> 1) % 4]
            lines.append(f"{record},{n % 2},{n % 7},{split}")
    path.write_text("\n".join(lines))
    return str(path)


def test_columns_of_a_label_table_choose_what_is_fine_tuned_on(bare, tmp_path):
    table = label_table(bare, tmp_path / "my.csv")
    task = TaskConfig(kind="binary", labels=table, columns=("v",))
    every, some = read_task(task, [bare]), read_task(task, [bare], "quality >= 3 and age >= 60")
    quality = {}
    for line in (tmp_path / "my.csv").read_text().splitlines()[1:]:
        record, _, value, _ = line.split(",")
        quality[record] = int(value)
    good = [quality.get(record, 0) >= 3 for record in bare.column("record")] & old(bare)
    for split in ("train", "valid"):
        expected = [row for row in every.rows_of_dataset(0, split).tolist() if good[row]]
        assert some.rows_of_dataset(0, split).tolist() == expected and expected
    assert some.rows_of_dataset(0, "test").tolist() == every.rows_of_dataset(0, "test").tolist()
    left = int((every.split[0] > 0).sum() - (some.split[0] > 0).sum())
    assert some.left_out == f", data.where='quality >= 3 and age >= 60' leaves out {left} crops"
    assert "quality" in some.table.column_names and "quality" not in every.table.column_names
    assert some.resume_facts["sha256"] != every.resume_facts["sha256"] and every.left_out == ""


def test_fine_tuning_says_it_and_refuses_to_resume_with_another(bare, tmp_path):
    table = label_table(bare, tmp_path / "my.csv")
    pretrain(tmp_path, bare.root.url, "base", train__steps=1, train__validate_every=0).good()
    base = tmp_path / "base"
    how = {"task__labels": table, "task__kind": "binary", "task__columns": ["v"]}
    tune = partial(finetune, tmp_path, bare.root.url, base, "diagnosis", "tuned", **how)
    said = tune(data__where="quality >= 3").good()
    assert "data.where='quality >= 3' leaves out" in said.splitlines()[0]
    config = build_config(
        read_state(RunFolder(tmp_path / "tuned").newest_checkpoint())["config"], FinetuneConfig
    )
    assert config.data.where == "quality >= 3"
    assert (tmp_path / "tuned" / LABELS).exists()
    meta = json.loads((tmp_path / "tuned" / "model" / "config.json").read_text())
    assert meta["trained"]["step"] in (2, 4)
    assert "cannot say what it was trained on" not in said
    line = tune(data__where="quality >= 2").one_line()
    assert "data.where changed from quality >= 3 to quality >= 2" in line
    # the same expression over a table whose values have changed
    (tmp_path / "my.csv").write_text((tmp_path / "my.csv").read_text().replace(",6,", ",1,"))
    line = tune(data__where="quality >= 3", train__steps=5).one_line()
    assert "cannot resume: labels.sha256 changed" in line
    line = finetune(
        tmp_path, bare.root.url, base, "diagnosis", "none", data__where="quality > 9", **how
    ).one_line()
    assert "nothing to learn from, data.where='quality > 9' leaves out" in line


def test_roles_as_splits_are_chosen_from_too(dataset):
    task = TaskConfig()
    every, some = read_task(task, [dataset]), read_task(task, [dataset], OLD)
    kept = old(dataset)
    for split in ("train", "valid"):
        rows = every.rows_of_dataset(0, split)
        assert some.rows_of_dataset(0, split).tolist() == rows[kept[rows]].tolist()
    with pytest.raises(ConfigError, match="no column 'quality'"):
        read_task(task, [dataset], "quality > 3")
