"""data.hold_out: patients held out of training for validation."""

import json
import os
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch
from ranks import column, pretrain

from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.engine.data import patients
from omnilead.engine.data.leakage import refuse_leak
from omnilead.engine.data.loader import Loader
from omnilead.engine.data.order import DatasetRows, Order, Selection
from omnilead.engine.data.patients import patient_ids, validation_split
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training import pretraining as pretraining_task
from omnilead.engine.training.config import build_config
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.pretraining import PretrainTask
from omnilead.engine.training.validation import selected_rows, training_selection


class Named:
    """The parts of a Dataset that names are read from, a thousand rows each."""

    def __init__(self, **columns):
        self.rows = pa.table(columns)

    def __len__(self):
        return len(self.rows)

    def table(self, names):
        return self.rows.select(names)

    def row_batches(self, names):
        return list(self.rows.select(names).to_batches(max_chunksize=1000))


def many(patients):
    """Two records each, every third patient unknown."""
    names = [f"p{n}" if n % 3 else None for n in range(patients) for _ in range(2)]
    return Named(
        source=["s"] * len(names),
        patient=pa.array(names, pa.string()),
        record=[f"r{i}" for i in range(len(names))],
        waveform=np.arange(len(names), dtype=np.uint64),
    )


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_patients_are_held_out_with_all_their_records(share):
    data = many(30_000)
    trained, held = validation_split(data, share)
    assert (trained ^ held).all()
    one, two = held.reshape(-1, 2).T
    known = np.arange(30_000) % 3 > 0
    assert (one == two)[known].all() and not (one == two)[~known].all()
    for units in (one[known], one[~known]):
        assert abs(units.mean() - share) < 4 * np.sqrt(share * (1 - share) / len(units))
    # a larger share keeps who was held out, and more data changes nothing
    assert not (held & ~validation_split(data, share + 0.1)[1]).any()
    assert (validation_split(many(40_000), share)[1][: len(held)] == held).all()


def test_a_patient_and_a_record_with_the_same_name_are_different():
    data = Named(
        source=["s", "s", "s", "t", "s"],
        patient=["7", None, "", "7", "7"],
        record=["1", "7", "7", "2", "3"],
    )
    assert len(set(ids := patient_ids([data])[0].tolist())) == 3 and ids[0] == ids[4]
    other = Named(source=["t", "s"], patient=["8", "7"], record=["1", "9"])
    both = patient_ids([data, other])  # the same patient in two datasets
    assert (both[0] == ids).all() and both[1][1] == ids[0] and both[1][0] not in ids


def test_copies_of_held_out_ecgs_are_not_trained_on():
    """However far apart the two are."""
    names = [f"p{i}" for i in range(3000)]
    waveform = np.arange(3000, dtype=np.uint64) % 1500
    data = Named(source=["s"] * 3000, patient=names, record=names, waveform=waveform)
    trained, held = validation_split(data, 0.3)
    assert held.any() and trained.any()
    assert (trained == ~(held | np.roll(held, 1500))).all()


def test_held_out_patients_are_never_trained_on_at_any_world_size_or_restart(dataset):
    data = {"datasets": [dataset.root.url], "hold_out": 0.2}
    config = build_config({"data": data, "train": {"batch_crops": 16}})
    trained, cpu = training_selection(config), torch.device("cpu")
    patients = patient_ids([dataset])[0]

    def patients_of(selection):
        rows = DatasetRows.select(dataset, selection)
        return set(patients[rows.row(np.arange(len(rows)))].tolist())

    order = Order((DatasetRows.select(dataset, trained),), 16)
    seen = order.places(0, 3 * order.steps_per_epoch * 16).row
    out = patients_of(replace(trained, held=True))
    assert out and not out & set(patients[seen].tolist())
    assert patients_of(Selection(pretrain=True, halves=2)) == out | patients_of(trained)

    def first(rank, world, state=None):
        with closing(Loader(config.loader, [dataset], cpu, trained, rank, world, state)) as loader:
            batch, after = next(iter(loader))
            return batch.places.row.tolist(), after

    for world in (1, 2, 4):
        parts = [first(rank, world) for rank in range(world)]
        assert [row for rows, _ in parts for row in rows] == seen[:16].tolist()
        assert first(0, world, parts[0][1])[0] == seen[16 : 16 + 16 // world].tolist()


def pretraining(*datasets, **data):
    """The task alone, with its remarks before the first step."""
    config = build_config(
        {"data": {"datasets": [dataset.root.url for dataset in datasets], **data}}
    )
    return PretrainTask.prepare(config, datasets, Ranks(0, 1, torch.device("cpu"), None))


@pytest.fixture(scope="module")
def bare(archive, tmp_path_factory):
    """A dataset without roles."""
    out = str(tmp_path_factory.mktemp("bare") / "bare")
    sources = open_sources(str(archive / "training" / "synthetic-ningbo"))
    return shard(sources, ShardOptions(out, plan="all", quiet=True))


def test_without_roles_only_held_out_patients_give_a_validation_loss(bare):
    task = pretraining(bare)
    assert task.validation_loss.crops == 0 and "data.hold_out=0.1" in task.remarks[0]
    task = pretraining(bare, hold_out=0.3)
    assert task.validation_loss.crops > 0 and not task.remarks
    for share in (1e-9, 1.0):
        with pytest.raises(ConfigError, match=f"hold_out={share}"):
            pretraining(bare, hold_out=share)


@pytest.fixture(scope="module")
def renamed(archive, tmp_path_factory):
    """The ECGs of `dataset` and `bare` under other names of patients and records."""
    out = str(tmp_path_factory.mktemp("renamed") / "renamed")
    options = ShardOptions(
        out, plan="all", quiet=True, pseudonym_key=b"a key of 32 bytes for the names "
    )
    return shard(open_sources(str(archive)), options)


def test_what_one_dataset_holds_out_another_may_not_train_on(dataset, bare, renamed):
    for role, held in (("dx", "test"), ("identity", "gallery")):
        sides = [[dataset.select(**{role: side})] * 2 for side in ("train", held)]
        refuse_leak([dataset] * 2, *sides)
    pretraining(dataset, dataset)
    pretraining(dataset, bare)  # without roles, bare holds out nothing; dataset none of its ECGs
    leak = "waveform .* is trained on in .*renamed.* and held out in "
    with pytest.raises(ConfigError, match=leak + dataset.root.url):
        pretraining(dataset, renamed)
    pretraining(bare, renamed)
    with pytest.raises(ConfigError, match=leak.replace("renamed", "bare")):
        pretraining(bare, renamed, hold_out=0.3)


def answer(task):
    """Which crops a task trains on and validates on, and what it tells the user."""
    sides = task.selection, task.validation_loss.selection
    rows = [[selected_rows(dataset, side).tolist() for side in sides] for dataset in task.datasets]
    return [rows, task.remarks]


def noted(call, path):
    def noting(*arguments):
        with open(path, "a") as file:
            file.write(f"{call.__name__}\n")
        return call(*arguments)

    return noting


def note(folder):
    """Each rank notes its answer, and what it has computed for it."""
    calls = folder / f"calls-{os.environ['RANK']}"
    patients._validation_split = noted(patients._validation_split, calls)
    pretraining_task.refuse_leak = noted(pretraining_task.refuse_leak, calls)
    prepare = PretrainTask.prepare

    def prepared(*arguments):
        task = prepare(*arguments)
        (folder / f"answer-{os.environ['RANK']}").write_text(json.dumps(answer(task)))
        return task

    PretrainTask.prepare = prepared


def test_one_rank_holds_out_and_looks_for_leakage_and_tells_the_others(
    dataset, bare, renamed, tmp_path
):
    def two_ranks(*datasets):
        urls = [one.root.url for one in datasets]
        how = {"data__datasets": urls, "data__hold_out": 0.3, "train__steps": 1}
        return pretrain(tmp_path, "", world=2, before=partial(note, tmp_path), **how)

    two_ranks(bare, dataset).good()
    calls = ["_validation_split", "_validation_split", "refuse_leak"]
    # afterwards the export opens the datasets again
    assert (tmp_path / "calls-0").read_text().split()[:3] == calls
    assert not (tmp_path / "calls-1").exists()
    alone = answer(pretraining(bare, dataset, hold_out=0.3))
    for rank in range(2):
        assert json.loads((tmp_path / f"answer-{rank}").read_text()) == alone
    refused = two_ranks(bare, renamed)
    assert "waveform" in refused.one_line() and not (tmp_path / "calls-1").exists()


def test_a_run_validates_on_held_out_patients_and_cannot_change_their_share(bare, tmp_path):
    how = {"train__steps": 2, "train__validate_every": 1, "train__batch_crops": 4}
    pretrain(tmp_path, bare.root.url, data__hold_out=0.3, **how).good()
    assert column(tmp_path / "run", name="validation.jsonl") == [0, 1, 2]
    line = pretrain(tmp_path, bare.root.url, data__hold_out=0.2, **how).one_line()
    assert "data.hold_out changed from 0.3 to 0.2" in line


@pytest.mark.parametrize(
    "changes, warned",
    [({"valid": {}}, True), ({"train": {}}, True), ({"valid": {"dx": "test"}}, False)],
)
def test_validation_on_training_crops_is_a_warning(changes, warned, dataset):
    remarks = pretraining(dataset, **changes).remarks
    assert any("trained on" in remark for remark in remarks) == warned
