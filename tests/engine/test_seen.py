"""A model knows which patients and waveforms it has seen, and whoever tests it is told."""

import re
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parent / "training"))  # the helpers lie there
from ranks import finetune, pretrain

import omnilead
from omnilead.data_tools.build import ShardOptions, shard
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.sources import open_sources
from omnilead.engine.common import ConfigError
from omnilead.engine.data import seen
from omnilead.engine.data.order import DatasetRows, Order
from omnilead.engine.data.patients import patient_ids, validation_split
from omnilead.engine.interop.hub import published
from omnilead.engine.tasks.config import TaskConfig
from omnilead.engine.tasks.labels import read_task
from tests.conftest import save_probed
from tests.engine.evaluate.conftest import quick  # noqa: F401

ALL = {"plan": "all", "quiet": True}
SEEN = re.compile(
    r"pre-training has seen (\d+) of the (\d+) [\w ]+ that are ([\w ]+), without labels"
)


@pytest.fixture(scope="module")
def whole(archive, tmp_path_factory):
    """All of the archive for pre-training."""
    out = str(tmp_path_factory.mktemp("whole") / "dataset")
    return shard(open_sources(str(archive)), ShardOptions(out, **ALL))


@pytest.fixture(scope="module")
def base(whole, tmp_path_factory):
    """Pre-trained on all of it."""
    tmp = tmp_path_factory.mktemp("base")
    trained = partial(pretrain, tmp, whole.root.url, objective__local=0, train__validate_every=0)
    batch = int((whole.column("halves") == 2).sum()) // 2
    trained("run", train__steps=4, train__batch_crops=batch).good()
    return tmp / "run"


def labels(dataset, path, values, **columns):
    """A table of all records of a dataset."""
    records = list(dict.fromkeys(dataset.column("record")))
    cells = {"record": records, "v": values} | columns
    for name, given in cells.items():
        cells[name] = [given[i % len(given)] for i in range(len(records))]
    lines = [
        ",".join(cells),
        *(",".join(map(str, row)) for row in zip(*cells.values(), strict=True)),
    ]
    Path(path).write_text("\n".join(lines))
    return str(path)


def test_a_record_of_use(whole):
    """Patients and waveforms, each with its last use; records are joined and survive a file."""
    people = patient_ids([whole])[0]
    rows = np.arange(30)
    record = seen.seen_in(whole, rows, "unlabelled")
    assert len(record) == len(np.unique(people[rows])) + len(
        np.unique(whole.column("waveform")[rows])
    )
    found = seen.uses(record, whole, np.arange(len(whole)))
    assert np.array_equal(found >= 0, np.isin(people, people[rows]))
    more = seen.joined([record, seen.seen_in(whole, rows[:5], "labelled"), seen.NOTHING])
    again = seen.uses(more, whole, np.arange(len(whole)))
    assert np.array_equal(again == seen.LABELLED, np.isin(people, people[:5]))
    assert np.array_equal(again >= 0, found >= 0) and len(more) == len(record)


def test_a_waveform_under_another_name_is_known_again(whole, archive, tmp_path):
    """With pseudonyms no name is the same. The names of a hospital's own patients are not
    published; they could be guessed."""
    options = ShardOptions(str(tmp_path / "other"), pseudonym_key=bytes(32), **ALL)
    other = shard(open_sources(str(archive)), options)
    record = seen.seen_in(whole, np.arange(len(whole)), "unlabelled")
    assert (seen.uses(record, other, np.arange(len(other))) >= 0).all()
    patients = record.filter(record["patient"])
    assert (seen.uses(patients, other, np.arange(len(other))) < 0).all()
    assert seen.publishable(record).equals(record)


@pytest.mark.parametrize("damage", [b"", b"PAR1", None])
def test_a_damaged_record_is_one_line(whole, damage, tmp_path):
    path, record = tmp_path / "seen.parquet", seen.seen_in(whole, np.arange(5), "selected")
    path.write_bytes(seen.as_bytes(record))
    assert seen.read(path).equals(record)
    if damage is None:
        pq.write_table(record.drop_columns(["use"]), path)
    else:
        path.write_bytes(damage)
    with pytest.raises(
        ConfigError, match=r"seen.parquet: cannot be read: .*: copy it again"
    ) as caught:
        seen.read(path)
    assert "\n" not in str(caught.value)


ONE = DatasetRows.among("one", [15, 15, 10], np.arange(0, 40, 2))
TWO = DatasetRows.among("two", [9])


@pytest.mark.parametrize("block_shards", [0, 1, 2])
@pytest.mark.parametrize(
    "rows, weights",
    [
        ((ONE,), None),
        ((TWO,), None),
        ((ONE, TWO), None),
        ((ONE, TWO), (3.0, 1.0)),
        ((TWO, ONE, TWO), (0.1, 7, 1)),
    ],
)
def test_how_often_each_crop_was_drawn(rows, weights, block_shards):
    """In a part of an epoch and in many."""
    made = Order(rows, 6, seed=3, weights=weights, block_shards=block_shards)
    for crops in (0, 6, 12, 18, 30, 96, 120, 600):
        places = made.places(0, crops)
        for d, times in enumerate(made.drawn(crops)):
            of_dataset = places.row[places.dataset == d]
            assert times.tolist() == np.bincount(of_dataset, minlength=len(times)).tolist()


def test_pre_training_on_all_is_told_by_whatever_tests_it(whole, base, quick, tmp_path):  # noqa: F811
    """Of the patients in an 8:1:1 test, a pre-training on everything has seen all, and one with
    data.hold_out=0.1 none."""
    table, url = labels(whole, tmp_path / "my.csv", [0, 1]), whole.root.url
    said = finetune(
        tmp_path, url, base, "diagnosis", "tuned", task__labels=table, task__kind="binary"
    ).good()
    assert SEEN.search(said)[3] == "in validation or test"
    rows = read_task(TaskConfig(kind="binary", labels=table), [whole]).rows(0, "test")
    people, complete = patient_ids([whole])[0], whole.column("halves") == 2
    tested = set(people[rows])
    expected = str(len(tested & set(people[complete]))), str(len(tested)), "scored here"
    assert 5 < int(expected[0]) <= int(expected[1])
    made = {"out": tmp_path / "bench", "head": str(tmp_path / "probed")}
    found = omnilead.bench([str(base)], data=url, tasks=[table], **made)
    for model, remarks in (
        ("base", found["notes"]),
        ("tuned", omnilead.evaluate(tmp_path / "tuned", data=url, labels=table)["remarks"]),
        ("probed", omnilead.evaluate(tmp_path / "probed", data=url, labels=table)["remarks"]),
    ):
        (said,) = [remark for remark in remarks if SEEN.search(remark)]
        assert SEEN.search(said).groups() == expected, model
        assert "with labels" not in str(remarks).replace("without labels", "")
    held = pretrain(
        tmp_path,
        url,
        "held",
        train__steps=8,
        objective__local=0,
        data__hold_out=0.1,
        data__train={},
    )
    assert held.ok, held.output
    said = finetune(
        tmp_path,
        url,
        tmp_path / "held",
        "diagnosis",
        "again",
        task__labels=table,
        task__kind="binary",
    )
    of_test = omnilead.evaluate(tmp_path / "again", data=url, labels=table)["remarks"]
    assert not [remark for remark in of_test if "seen" in remark or "Leakage" in remark]
    record = omnilead.load(tmp_path / "held").seen
    _, is_held = validation_split(whole, 0.1)
    assert not (seen.uses(record, whole, np.flatnonzero(is_held)) >= 0).any()


def test_another_split_of_the_same_data_is_leakage(whole, base, quick, tmp_path):  # noqa: F811
    """Told by evaluate, bench and a fine-tuning that starts there; what trained a model stays
    known through all its stages, also where the same data have another name."""
    url = whole.root.url
    table = labels(whole, tmp_path / "first.csv", [0, 1])
    people = dict(zip(whole.column("record"), patient_ids([whole])[0].tolist(), strict=True))
    folds = [people[record] % 3 for record in dict.fromkeys(whole.column("record"))]
    other = labels(whole, tmp_path / "other.csv", [0, 1], fold=folds)
    save_probed(base, url, table, tmp_path / "probed")
    leak = "Leakage: the model was trained with labels on"
    own = omnilead.evaluate(tmp_path / "probed", data=url, labels=table)
    assert leak not in str(own["remarks"])
    (remark,) = [
        remark
        for remark in omnilead.evaluate(tmp_path / "probed", data=url, labels=other)["remarks"]
        if leak in remark
    ]
    assert re.search(r"on \d+ of the \d+ [\w ]+ that are scored here\.$", remark)
    found = omnilead.bench(
        [f"probed={tmp_path / 'probed'}"], data=url, tasks=[table, other], out=tmp_path / "bench"
    )
    told = [note.partition(": ")[0] for note in found["notes"] if leak in note]
    assert told == ["probed, other"]
    save_probed(tmp_path / "probed", url, other, tmp_path / "twice")
    assert leak in str(omnilead.evaluate(tmp_path / "twice", data=url, labels=table)["remarks"])
    copied = shutil.copytree(url, tmp_path / "copy")
    said = finetune(
        tmp_path,
        str(copied),
        tmp_path / "probed",
        "diagnosis",
        "tuned",
        task__labels=other,
        task__kind="binary",
    ).good()
    assert leak in said
    assert leak in str(omnilead.evaluate(tmp_path / "tuned", data=url, labels=table)["remarks"])


def test_a_probe_is_fitted_on_validation_too(whole, base, tmp_path):
    """Cross-validation needs no second set. Whoever only helped to choose another model is no test
    of it either."""
    table = labels(whole, tmp_path / "my.csv", [0, 1])
    save_probed(base, whole.root.url, table, tmp_path / "probed")
    model = omnilead.load(tmp_path / "probed")
    known = read_task(TaskConfig(kind="binary", labels=table), [whole])
    for split in ("train", "valid"):
        rows = known.rows(0, split)
        assert (seen.uses(model.seen, whole, rows) == seen.LABELLED).all()
    chosen = seen.seen_in(whole, rows, "selected")
    people = patient_ids([whole])[0] | 1
    (note,) = seen.notes(chosen, [whole], [rows], [people], "scored here")
    told = "that are scored here helped to choose the model in validation"
    assert re.search(rf"Leakage: \d+ of the \d+ [\w ]+ {told}", note)


def test_records_are_not_called_patients(whole, base):
    """Where patients are unknown, records are counted, and the sentence says so."""
    rows, known = np.arange(len(whole)), patient_ids([whole])[0] | 1
    half = np.where(rows % 2, known, known - 1)
    words = {}
    for name, ids in (("all", known), ("some", half), ("none", known - 1)):
        (note,) = seen.notes(
            seen.read(base / "model" / "seen.parquet"), [whole], [rows], [ids], "scored here"
        )
        words[name] = re.sub(r"\d+", "N", note).partition("of the N ")[2]
    assert words == {
        "all": "patients that are scored here, without labels.",
        "some": "patients and records of unknown patients that are scored here, without labels.",
        "none": "records that are scored here, without labels.",
    }


def test_models_of_unknown_origin_say_so(saved_model, whole, quick, tmp_path):  # noqa: F811
    table = labels(whole, tmp_path / "my.csv", [0, 1])
    made = {"out": tmp_path / "bench", "head": str(tmp_path / "probed")}
    found = omnilead.bench([str(saved_model())], data=whole.root.url, tasks=[table], **made)
    unknown = "It is not known what the model was trained on elsewhere"
    assert unknown in str(found["notes"])
    assert "All crops of this dataset are synthetic." in str(found["notes"])
    # Also at its next stage
    again = omnilead.evaluate(tmp_path / "probed", data=whole.root.url, labels=table)
    assert unknown in str(again["remarks"])


def test_an_export_without_its_data_says_so(whole, tmp_path, capsys):
    copied = shutil.copytree(whole.root.url, tmp_path / "copy")
    ended = pretrain(tmp_path, str(copied), train__steps=1, objective__local=0, data__train={})
    assert ended.ok, ended.output
    record = omnilead.load(tmp_path / "run").seen
    assert len(record) and not record.equals(seen.UNKNOWN)
    shutil.rmtree(copied)
    from omnilead.engine.pretrain import main

    assert main(["--export", str(tmp_path / "run")]) == 0
    assert "cannot say what it was trained on" in capsys.readouterr().err
    assert omnilead.load(tmp_path / "run").seen.equals(seen.UNKNOWN)


def test_the_record_is_part_of_the_folder(base, tmp_path):
    """Checked by its sha256, also if it is missing; pushed with the model."""
    folder = Path(shutil.copytree(base / "model", tmp_path / "model"))
    assert published(folder)["seen.parquet"] == (folder / "seen.parquet").read_bytes()
    (folder / "seen.parquet").unlink()
    with pytest.raises(ConfigError, match=r"seen.parquet: no such file"):
        omnilead.load(folder)


def test_a_hospitals_own_ids_are_not_published(whole, base, tmp_path, capsys, monkeypatch):
    """They could be found from a list of ids, unless they are pseudonyms."""
    monkeypatch.setattr(seen, "VENDORS", ("synthetic-ptb-xl",))
    record = seen.seen_in(Dataset.open(whole.root.url), np.arange(len(whole)), "unlabelled")
    public = seen.publishable(record)
    assert 0 < len(public) < len(record) and public["patient"].to_numpy().any()
    folder = Path(shutil.copytree(base / "model", tmp_path / "model"))
    monkeypatch.setattr("omnilead.engine.interop.hub.seen_by", lambda folder: record)
    assert len(published(folder)["seen.parquet"]) < len(seen.as_bytes(record))
    assert "hashes of a hospital's own ids of patients" in capsys.readouterr().err
