"""data.hold_out: patients held out of training for validation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from ranks import pretrain, rows

from omnilead.data_tools.build import ShardOptions, shard
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.sources import open_sources
from omnilead.engine.common import ConfigError
from omnilead.engine.config import build
from omnilead.engine.data.leakage import patient_ids, validation_split
from omnilead.engine.data.loader import Loader
from omnilead.engine.data.order import DatasetRows, Order
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.pretraining import PretrainTask
from omnilead.engine.training.validation import training_roles


class Named:
    """The parts of a Dataset that names are read from, a thousand rows each."""

    def __init__(self, **columns: Any) -> None:
        self.rows = pa.table(columns)

    def table(self, names: list[str]) -> pa.Table:
        return self.rows.select(names)

    def parts(self, names: Sequence[str]) -> list[pa.RecordBatch]:
        return list(self.rows.select(names).to_batches(max_chunksize=1000))


def many(patients: int, first: int = 0) -> Any:
    """Two records each, every third patient unknown."""
    numbers = np.repeat(np.arange(first, first + patients), 2)
    names = pa.array([None if n % 3 == 0 else f"p{n}" for n in numbers.tolist()], pa.string())
    records = [f"r{i}" for i in range(2 * first, 2 * (first + patients))]
    return Named(
        source=["s"] * len(records),
        patient=names,
        record=records,
        waveform=np.arange(len(records), dtype=np.uint64),
    )


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_patients_are_held_out_with_all_their_records(share: float) -> None:
    data = many(30_000)
    trained, held = validation_split(data, share)
    assert (trained ^ held).all()
    known = np.array([p is not None for p in data.table(["patient"])["patient"].to_pylist()])
    assert (held[::2] == held[1::2])[known[::2]].all() and (held[::2] != held[1::2])[
        ~known[::2]
    ].any()
    for units in (held[::2][known[::2]], held[~known]):
        assert abs(units.mean() - share) < 4 * np.sqrt(share * (1 - share) / len(units))
    assert not (
        held & ~validation_split(data, share + 0.1)[1]
    ).any()  # a larger share keeps who was held out


def test_a_patient_and_a_record_with_the_same_name_are_different() -> None:
    data: Any = Named(
        source=["s", "s", "s", "t", "s"],
        patient=["7", None, "", "7", "7"],
        record=["1", "7", "7", "2", "3"],
    )
    assert len(set(ids := patient_ids([data])[0].tolist())) == 3 and ids[0] == ids[4]
    assert patient_ids([data, data])[1].min() > patient_ids([data])[0].max()


def test_more_data_does_not_change_who_is_held_out() -> None:
    before, after = validation_split(many(500), 0.3)[1], validation_split(many(900), 0.3)[1]
    assert (after[: len(before)] == before).all()


def test_copies_of_held_out_ecgs_are_not_trained_on() -> None:
    """However far apart the two are."""
    names = [f"p{i}" for i in range(3000)]
    data: Any = Named(
        source=["s"] * 3000,
        patient=names,
        record=names,
        waveform=np.arange(3000, dtype=np.uint64) % 1500,
    )
    trained, held = validation_split(data, 0.3)
    assert held.any() and trained.any()
    assert (trained == ~(held | np.roll(held, 1500))).all()


def test_held_out_patients_are_never_trained_on_at_any_world_size_or_restart(
    dataset: Dataset,
) -> None:
    config = build(
        {"data": {"datasets": [dataset.root.url], "hold_out": 0.2}, "train": {"batch_crops": 16}}
    )
    patients = patient_ids([dataset])[0]
    held = DatasetRows.of(dataset, **training_roles(config), held=True)
    out = set(patients[held.row(np.arange(len(held)))].tolist())
    order = Order((DatasetRows.of(dataset, **training_roles(config)),), 16)
    steps = 3 * order.steps_per_epoch
    seen = order.places(0, steps * 16).row
    assert out and not out & set(patients[seen].tolist())
    pool = DatasetRows.of(dataset, pretrain=True, halves=2)
    everybody, trained = (
        set(patients[part.row(np.arange(len(part)))].tolist()) for part in (pool, order.rows[0])
    )
    assert everybody == out | trained
    roles, cpu = training_roles(config), torch.device("cpu")
    for world in (1, 2, 4):
        loaders = [
            Loader(config.loader, [dataset], cpu, rank, world, **roles) for rank in range(world)
        ]
        first = [next(iter(loader)) for loader in loaders]
        assert (
            np.concatenate([batch.places.row for batch, _ in first]).tolist() == seen[:16].tolist()
        )
        state = first[0][1]
        again = Loader(config.loader, [dataset], cpu, 0, world, state, **roles)
        batch, _ = next(iter(again))
        assert batch.places.row.tolist() == seen[16 : 16 + 16 // world].tolist()
        for loader in (*loaders, again):
            loader.close()


def pretraining(dataset: Dataset, **data: Any) -> PretrainTask:
    """The task alone, with its remarks before the first step."""
    config = build({"data": {"datasets": [dataset.root.url], **data}})
    return PretrainTask(config, [dataset], Ranks(0, 1, torch.device("cpu"), None))


@pytest.fixture(scope="module")
def bare(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A dataset without roles."""
    out = tmp_path_factory.mktemp("bare") / "bare"
    return shard(
        open_sources(str(archive / "training" / "ningbo")),
        ShardOptions(str(out), plan="all", quiet=True),
    )


def test_without_roles_only_held_out_patients_give_a_validation_loss(bare: Dataset) -> None:
    task = pretraining(bare)
    assert task.held_out.crops == 0 and "data.hold_out=0.05" in task.remarks[0]
    task = pretraining(bare, hold_out=0.3)
    assert task.held_out.crops > 0 and not task.remarks
    with pytest.raises(ConfigError, match="hold_out=1e-09"):
        pretraining(bare, hold_out=1e-9)
    with pytest.raises(ConfigError, match=r"hold_out=1\.0"):
        pretraining(bare, hold_out=1.0)


def test_a_run_validates_on_held_out_patients_and_cannot_change_their_share(
    bare: Dataset, tmp_path: Path
) -> None:
    how = {"train__steps": 2, "train__validate_every": 1, "train__batch_crops": 4}
    ended = pretrain(tmp_path, bare.root.url, data__hold_out=0.3, **how)
    assert ended.ok, ended.output
    assert [row["step"] for row in rows(tmp_path / "run", "validation.jsonl")] == [0, 1, 2]
    ended = pretrain(tmp_path, bare.root.url, data__hold_out=0.2, **how)
    assert (
        ended.codes == [2]
        and "data.hold_out changed from 0.3 to 0.2" in ended.output
        and ended.output.count("\n") == 1
    )


@pytest.mark.parametrize(
    "side, roles, warned",
    [("valid", {}, True), ("train", {}, True), ("valid", {"dx": "test"}, False)],
)
def test_validation_on_training_crops_is_a_warning(
    side: str, roles: dict[str, str], warned: bool, dataset: Dataset
) -> None:
    assert (
        any("trained on" in remark for remark in pretraining(dataset, **{side: roles}).remarks)
        == warned
    )
