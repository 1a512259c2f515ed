"""data.dedup: crops of the same waveform, within a dataset and across several."""

import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from ranks import STILL, curve, pretrain

from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.engine.data.loader import Loader
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training import pretraining
from omnilead.engine.training.config import build_config
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.pretraining import PretrainTask
from omnilead.engine.training.run_folder import RunFolder

ALONE = Ranks(0, 1, torch.device("cpu"), None)
SOURCE = "training/synthetic-ningbo"


def renamed(record, folder, name):
    """The ECG of a record under another name."""
    (folder / f"{name}.hea").write_text(record.read_text().replace(record.stem, name))
    shutil.copy(record.with_suffix(".mat"), folder / f"{name}.mat")


@pytest.fixture(scope="module")
def two(archive, tmp_path_factory):
    """Two datasets: the first has three ECGs twice and one three times; the second has the first's
    ECGs but for two, and 5 of its own."""
    root = tmp_path_factory.mktemp("two")
    made = []
    for name, sources in (("one", [SOURCE]), ("two", [SOURCE, "training/synthetic-georgia"])):
        for source in sources:
            shutil.copytree(archive / source, root / name / source)
        records = sorted((root / name / SOURCE / "g1").glob("*.hea"))
        if name == "one":
            for i in (0, 1, 2, 3, 3):
                copies = len(list(records[0].parent.glob("JS9*.hea")))
                renamed(records[i], records[0].parent, f"JS9000{copies}")
        else:
            for record in records[-2:] + sorted((root / name / sources[1]).rglob("*.hea"))[5:]:
                record.unlink()
                record.with_suffix(".mat").unlink()
        out = ShardOptions(str(root / f"{name}-set"), plan="all", quiet=True)
        made.append(shard(open_sources(str(root / name)), out))
    return made


def settings(*datasets, **data):
    urls = [dataset.root.url for dataset in datasets]
    return build_config({"data": {"datasets": urls, **data}, "train": {"batch_crops": 8}})


def task_of(*datasets, **data):
    return PretrainTask.prepare(settings(*datasets, **data), datasets, ALONE)


def expected(*datasets):
    """The rows that are kept, found one by one."""
    seen, rows = set(), []
    for dataset in datasets:
        kept = []
        for row in np.flatnonzero(dataset.column("halves") == 2):
            content = dataset.read(row).tobytes()
            if content not in seen:
                kept.append(int(row))
            seen.add(content)
        rows.append(kept)
    return rows


def test_exactly_the_first_of_each_waveform_is_kept(two):
    one, other = two
    crops = [int((dataset.column("halves") == 2).sum()) for dataset in two]
    (kept,) = expected(one)
    assert crops[0] - len(kept) == 5
    for datasets in ([one], [one, other], [other, one]):
        task = task_of(*datasets, dedup=True)
        assert [rows.tolist() for rows in task.selection.rows] == expected(*datasets)
        out = sum(map(len, datasets)) - sum(map(len, expected(*datasets)))
        assert task.left_out_crops_text() == f", data.dedup leaves out {out} copies"
        assert not any("waveform" in remark for remark in task.remarks)
        task = task_of(*datasets)
        assert f"{out} of {sum(map(len, datasets))} crops for pre-training have" in task.remarks[-1]
        assert task.left_out_crops_text() == "" and not task.selection.rows
    assert len(expected(one, other)[1]) == 5


def test_without_copies_nothing_is_said_and_it_counts_only_what_is_trained_on(two):
    one, other = two
    task = task_of(other, dedup=True)
    assert task.copies == 0 and len(task.selection.rows[0]) == len(other)
    assert not any("waveform" in remark for remark in task_of(other).remarks)
    ningbo = 'source == "synthetic-ningbo"'
    with pytest.raises(ConfigError, match=r"all 29 crops of .*two-set for pre-training are in the"):
        task_of(one, other, dedup=True, where=ningbo)
    copied = set(one.column("record")[np.setdiff1d(range(len(one)), expected(one)[0])])
    assert len(copied) == 5
    once = " and ".join(f'record != "{name}"' for name in copied)
    assert task_of(one, where=once).copies == 0


def test_what_the_model_has_seen_is_what_was_drawn(two):
    config = settings(*two, dedup=True)
    task = PretrainTask.prepare(config, two, ALONE)
    uses = PretrainTask.crop_uses(config, {"crops_seen": 80}, "", two)
    loader = Loader(config.loader, two, torch.device("cpu"), task.selection)
    places = loader.order.places(0, 80)
    loader.close()
    for d, (_, times, _) in enumerate(uses):
        drawn = np.bincount(places.row[places.dataset == d], minlength=len(two[d]))
        assert times.tolist() == drawn.tolist()


def note(folder):
    find = pretraining.first_of_each_waveform

    def noted(*arguments):
        (folder / f"rank-{os.environ['RANK']}").touch()
        return find(*arguments)

    pretraining.first_of_each_waveform = noted


def test_runs_resume_bit_for_bit_and_two_ranks_draw_the_same(two, tmp_path):
    how = {"data__datasets": [dataset.root.url for dataset in two], "data__dedup": True}
    how |= STILL
    train = partial(pretrain, tmp_path, "", **how)
    said = train("whole").good().splitlines()
    assert "data.dedup leaves out" in said[0]
    train("parts", train__steps=2).good()
    assert "resumes after step 2" in train("parts").good()
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    train("ranks", world=2, before=partial(note, tmp_path)).good()
    states = []
    for name in ("whole", "ranks"):
        path = RunFolder(tmp_path / name).newest_checkpoint()
        states.append((path / "loader-rank0.json").read_text())
    assert states[0] == states[1]
    assert [path.name for path in tmp_path.glob("rank-*")] == ["rank-0"]
    losses = [[row["loss"] for row in curve(tmp_path / name)] for name in ("whole", "ranks")]
    assert np.allclose(*losses, rtol=1e-3)
    line = train("whole", data__dedup=False).one_line()
    assert "data.dedup changed from True to False" in line
