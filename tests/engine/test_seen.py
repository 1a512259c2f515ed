"""A model knows which patients and waveforms it has seen, and whoever tests it is told."""

import re
import shutil
import sys
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parent / "training"))  # the helpers lie there
from handmade import ecg
from ranks import finetune, pretrain

import omnilead
from omnilead.data_tools.ecg.record import LEADS, EcgRecord
from omnilead.data_tools.io.storage import LocalFolder
from omnilead.data_tools.sharding.leave_out import LeaveOut
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.base import Source
from omnilead.data_tools.sources.detect import open_sources
from omnilead.downstream.interop.hub import files_to_upload
from omnilead.downstream.tasks.config import TaskConfig
from omnilead.downstream.tasks.labels import read_task
from omnilead.engine.data import seen
from omnilead.engine.data.order import DatasetRows, Order
from omnilead.engine.data.patients import patient_ids, validation_split
from omnilead.engine.model.folder import read_document, write_config
from omnilead.engine.settings.errors import ConfigError
from tests.conftest import save_probed
from tests.downstream.evaluate.conftest import quick  # noqa: F401

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
    record = seen.seen_record_of_crops(whole, rows, "unlabelled")
    assert len(record) == len(np.unique(people[rows])) + len(
        np.unique(whole.column("waveform")[rows])
    )
    found = seen.uses_by_crop(record, whole, np.arange(len(whole)))
    assert np.array_equal(found >= 0, np.isin(people, people[rows]))
    more = seen.join_seen_records(
        [record, seen.seen_record_of_crops(whole, rows[:5], "labelled"), seen.NOTHING_SEEN]
    )
    again = seen.uses_by_crop(more, whole, np.arange(len(whole)))
    assert np.array_equal(again == seen.LABELLED, np.isin(people, people[:5]))
    assert np.array_equal(again >= 0, found >= 0) and len(more) == len(record)


def test_a_waveform_under_another_name_is_known_again(whole, archive, tmp_path):
    """With pseudonyms no name is the same. The names of a hospital's own patients are not
    published; they could be guessed."""
    options = ShardOptions(str(tmp_path / "other"), pseudonym_key=bytes(32), **ALL)
    other = shard(open_sources(str(archive)), options)
    record = seen.seen_record_of_crops(whole, np.arange(len(whole)), "unlabelled")
    assert (seen.uses_by_crop(record, other, np.arange(len(other))) >= 0).all()
    patients = record.filter(record["patient"])
    assert (seen.uses_by_crop(patients, other, np.arange(len(other))) < 0).all()
    assert seen.without_guessable_hashes(record).equals(record)


@pytest.mark.parametrize("damage", [b"", b"PAR1", None])
def test_a_damaged_record_is_one_line(whole, damage, tmp_path):
    path, record = (
        tmp_path / "seen.parquet",
        seen.seen_record_of_crops(whole, np.arange(5), "selected"),
    )
    path.write_bytes(seen.to_bytes(record))
    assert seen.read_seen_record(path).equals(record)
    if damage is None:
        pq.write_table(record.drop_columns(["use"]), path)
    else:
        path.write_bytes(damage)
    with pytest.raises(
        ConfigError, match=r"seen.parquet: cannot be read: .*: copy it again"
    ) as caught:
        seen.read_seen_record(path)
    assert "\n" not in str(caught.value)


ONE = DatasetRows.from_sizes("one", [15, 15, 10], np.arange(0, 40, 2))
TWO = DatasetRows.from_sizes("two", [9])


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
        for d, times in enumerate(made.times_drawn(crops)):
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
    rows = read_task(TaskConfig(kind="binary", labels=table), [whole]).rows_of_dataset(0, "test")
    people, complete = patient_ids([whole])[0], whole.column("halves") == 2
    tested = set(people[rows])
    expected = str(len(tested & set(people[complete]))), str(len(tested)), "scored here"
    assert 5 < int(expected[0]) <= int(expected[1])
    found = omnilead.bench([str(base)], data=url, tasks=[table], out=tmp_path / "bench")
    omnilead.fit(base, data=url, labels=table, out=tmp_path / "probed")
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
    assert not (seen.uses_by_crop(record, whole, np.flatnonzero(is_held)) >= 0).any()


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
        rows = known.rows_of_dataset(0, split)
        assert (seen.uses_by_crop(model.seen, whole, rows) == seen.LABELLED).all()
    chosen = seen.seen_record_of_crops(whole, rows, "selected")
    people = patient_ids([whole])[0] | 1
    (note,) = seen.seen_notes(chosen, [whole], [rows], [people], "scored here")
    told = "that are scored here helped to choose the model in validation"
    assert re.search(rf"Leakage: \d+ of the \d+ [\w ]+ {told}", note)


def test_records_are_not_called_patients(whole, base):
    """Where patients are unknown, records are counted, and the sentence says so."""
    rows, known = np.arange(len(whole)), patient_ids([whole])[0] | 1
    half = np.where(rows % 2, known, known - 1)
    words = {}
    for name, ids in (("all", known), ("some", half), ("none", known - 1)):
        (note,) = seen.seen_notes(
            seen.read_seen_record(base / "model" / "seen.parquet"),
            [whole],
            [rows],
            [ids],
            "scored here",
        )
        words[name] = re.sub(r"\d+", "N", note).partition("of the N ")[2]
    assert words == {
        "all": "patients that are scored here, without labels.",
        "some": "patients and records of unknown patients that are scored here, without labels.",
        "none": "records that are scored here, without labels.",
    }


def test_models_of_unknown_origin_say_so(saved_model, whole, quick, tmp_path):  # noqa: F811
    table = labels(whole, tmp_path / "my.csv", [0, 1])
    model, url = saved_model(), whole.root.url
    found = omnilead.bench([str(model)], data=url, tasks=[table], out=tmp_path / "bench")
    omnilead.fit(model, data=url, labels=table, out=tmp_path / "probed")
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
    assert len(record) and not record.equals(seen.unknown_seen_record())
    shutil.rmtree(copied)
    from omnilead.engine.pretrain import main

    assert main(["--export", str(tmp_path / "run")]) == 0
    assert "cannot say what it was trained on" in capsys.readouterr().err
    assert omnilead.load(tmp_path / "run").seen.equals(record)  # what was written before
    shutil.rmtree(tmp_path / "run" / "model")
    assert main(["--export", str(tmp_path / "run")]) == 0
    assert omnilead.load(tmp_path / "run").seen.equals(seen.unknown_seen_record())


def test_the_record_is_part_of_the_folder(base, tmp_path):
    """Checked by its sha256, also if it is missing; pushed with the model."""
    folder = Path(shutil.copytree(base / "model", tmp_path / "model"))
    assert files_to_upload(folder)["seen.parquet"] == (folder / "seen.parquet").read_bytes()
    (folder / "seen.parquet").unlink()
    with pytest.raises(ConfigError, match=r"seen.parquet: no such file"):
        omnilead.load(folder)


class Clinic(Source):
    """An ECG of each patient; without a name for the patient, of each record."""

    name = "clinic"

    def __init__(self, source, patients, seed=0, named=True, licence="unknown"):
        super().__init__(LocalFolder("/"))
        self.source, self.patients, self.seed, self.named = source, patients, seed, named
        self.licence = licence

    def keys(self):
        return map(str, self.patients)

    def read(self, key):
        signal = ecg(seed=self.seed + int(key))
        name = f"r{key}_{self.seed}" if self.named else key
        patient = key if self.named else None
        return EcgRecord(name, signal, 500.0, LEADS, "uV", source=self.source, patient=patient)


def made_of(clinic, out, *before, **options):
    """`before`: datasets that come first."""
    sources = [source for made in before for source in open_sources(made.root.url)]
    sources += [clinic] if clinic else []
    return shard(sources, ShardOptions(str(out), workers=1, **ALL, **options))


def asked(record, dataset):
    """How many of the patients of a dataset are in a record."""
    patients = record.filter(record["patient"])
    return int((seen.uses_by_crop(patients, dataset, np.arange(len(dataset))) >= 0).sum())


def guessed(record, source, candidates):
    """The names that a stranger finds who has the program and a model's record."""
    names = pa.array([f"{source}/{one}" for one in candidates])
    words = [seen._name_hashes(names, key) for key in (seen.PUBLIC_NAME_KEY, b"omnilead removed")]
    known = record["hash"].to_numpy()
    return {candidates[i] for hashes in words for i in np.flatnonzero(np.isin(hashes, known))}


IDS = [100_000 + 123 * n for n in range(16)]


@pytest.fixture(scope="module")
def clinics(tmp_path_factory):
    """Datasets of 16 patients with ids of six digits, by source and whether patients are known."""
    tmp = tmp_path_factory.mktemp("clinics")

    @cache
    def made(source, named=True):
        return made_of(Clinic(source, IDS, named=named), tmp / f"{source}{named}")

    return made


@pytest.mark.parametrize("named", [True, False], ids=["patients", "records"])
@pytest.mark.parametrize("source", ["arrays", "wfdb", "clinic", "muse-xml", "ptb-xl", "synthetic"])
def test_nobody_finds_names_from_a_model_folder(source, named, clinics, base, tmp_path, capsys):
    """Of whatever source: an array, WFDB with --patients, a plug-in, a hospital's files, or one that only
    bears the name of a published archive. The owner of the dataset can ask."""
    dataset, candidates = clinics(source, named), list(range(100_000, 102_000))
    record = seen.seen_record_of_crops(dataset, np.arange(len(dataset)), "unlabelled")
    folder = Path(shutil.copytree(base / "model", tmp_path / "model"))
    (folder / "seen.parquet").write_bytes(seen.to_bytes(record))
    write_config(folder, read_document(folder / "config.json"))
    (tmp_path / "pushed").write_bytes(as_file(files_to_upload(folder)["seen.parquet"]))
    for path in (folder / "seen.parquet", tmp_path / "pushed"):
        found = seen.read_seen_record(path)
        assert guessed(found, source, candidates) == set()
        assert asked(found, dataset) == len(IDS) and found["patient"].to_numpy().sum() == len(IDS)
    text = b"".join(file.read_bytes() for file in folder.iterdir())
    assert not any(
        key in text for key in (dataset.name_key, bytes.fromhex(dataset.name_key.decode()))
    )
    assert "open hashes" not in capsys.readouterr().err


def as_file(content):
    return content if isinstance(content, bytes) else content.read_bytes()


def test_open_hashes_of_earlier_versions_are_read_and_not_published(
    clinics, base, tmp_path, capsys
):
    dataset = clinics("clinic")
    record = seen.seen_record_of_crops(dataset, np.arange(len(dataset)), "unlabelled")
    names = pa.array([f"clinic/{one}" for one in IDS])
    waves = record.filter(pc.invert(record["patient"]))
    people = {
        "hash": np.sort(seen._name_hashes(names, seen.PUBLIC_NAME_KEY)),
        "patient": [True] * len(IDS),
    }
    people |= {"use": [0] * len(IDS), "guessable": [False] * len(IDS)}
    old = seen.join_seen_records(
        [waves, pa.table(people, seen.SEEN_SCHEMA)]
    ).replace_schema_metadata(None)
    folder = Path(shutil.copytree(base / "model", tmp_path / "model"))
    (folder / "seen.parquet").write_bytes(seen.to_bytes(old))
    write_config(folder, read_document(folder / "config.json"))
    found = omnilead.load(folder).seen
    said = capsys.readouterr().err
    assert said.count("has open hashes of patients, as earlier versions wrote them") == 1
    assert "those of a model that RUN was started from stay" in said
    assert guessed(found, "clinic", list(range(100_000, 102_000))) == set(IDS)
    assert asked(found, dataset) == len(IDS)
    grown = seen.join_seen_records([found, record])  # a model that was started from it
    (tmp_path / "grown").write_bytes(seen.to_bytes(grown))
    for record in (found, seen.read_seen_record(tmp_path / "grown")):
        assert guessed(seen.without_guessable_hashes(record), "clinic", IDS) == set()
    (tmp_path / "pushed").write_bytes(as_file(files_to_upload(folder)["seen.parquet"]))
    assert "left out 16 open hashes of patients" in capsys.readouterr().err
    assert not seen.read_seen_record(tmp_path / "pushed")["patient"].to_numpy().any()
    assert omnilead.load("small").seen["patient"].to_numpy().any()
    assert capsys.readouterr().err.count("open hashes") == 0


def test_patients_are_known_again_in_another_dataset_of_the_same_key(tmp_path):
    """Other ECGs of the same patients, under the same KEYFILE, and of a published archive. Under another
    key whoever tests the model is told that it cannot be known."""
    several = {
        "plain": ("clinic", {}),
        "one": ("clinic", {"pseudonym_key": bytes(32)}),
        "other": ("clinic", {"pseudonym_key": b"k" * 32}),
        "public": ("ptb-xl", {}),
    }
    made = {}
    for seed in (0, 1000):
        for name, (source, options) in several.items():
            clinic = Clinic(source, IDS, seed, licence="CC-BY-4.0")
            made[name, seed] = made_of(clinic, tmp_path / f"{name}{seed}", **options)
    told = {}
    for name in several:
        dataset = made[name, 0]
        record = seen.seen_record_of_crops(dataset, np.arange(len(dataset)), "labelled")
        for other in several:
            test, rows = made[other, 1000], np.arange(16)
            of_crops = patient_ids([test])
            notes = seen.seen_notes(record, [test], [rows], of_crops, "scored here")
            leaks = [note.split(" on ")[1][:2] for note in notes if "with labels" in note]
            told[name, other] = (*leaks, *("key" for note in notes if "key of another" in note))
    assert told == {
        (one, other): ("16",)
        if one == other != "plain"
        else ("key",)
        if "public" not in (one, other)
        else ()
        for one in several
        for other in several
    }


def test_the_key_of_a_dataset_stays_in_those_made_from_it(tmp_path):
    out = tmp_path / "out"
    first = made_of(Clinic("clinic", IDS), out)
    record = seen.seen_record_of_crops(first, np.arange(len(first)), "unlabelled")
    more = made_of(Clinic("clinic", [*IDS[:4], 5], seed=1000), tmp_path / "more", first)
    theirs = np.flatnonzero(np.char.endswith(more.column("record").astype(str), "_1000"))
    assert (seen.uses_by_crop(record, more, theirs) >= 0).sum() == 4
    (tmp_path / "who").write_text(f"{IDS[0]}")
    leave_out = LeaveOut.read(str(tmp_path / "who"), None)
    left = made_of(None, tmp_path / "left", more, leave_out=leave_out)
    again = made_of(Clinic("clinic", [*IDS[:4], 6], seed=2000), tmp_path / "again", left)
    assert asked(record, left) == 15 + 3 and asked(record, again) == 15 + 3 + 4
    assert again.name_key == left.name_key == first.name_key
    assert made_of(Clinic("clinic", IDS), tmp_path / "same").name_key == first.name_key
    assert made_of(Clinic("clinic", IDS[1:]), tmp_path / "fewer").name_key != first.name_key


def test_a_key_does_not_begin_with_public_data(tmp_path):
    """What is computed from a published archive alone is no secret of those who are added."""
    out, how = tmp_path / "out", {"licence": "CC-BY-4.0"}
    public = made_of(Clinic("ptb-xl", IDS, **how), out)
    assert public.name_key is None
    assert made_of(Clinic("georgia", IDS, named=False, **how), tmp_path / "b").name_key is None
    assert made_of(Clinic("georgia", IDS, **how), tmp_path / "c").name_key  # of the user's table
    both = made_of(Clinic("clinic", IDS, seed=1000), tmp_path / "both", public)
    record = seen.seen_record_of_crops(both, np.arange(len(both)), "unlabelled")
    assert guessed(record, "ptb-xl", IDS) == set(IDS) and guessed(record, "clinic", IDS) == set()
    assert asked(record, both) == 2 * len(IDS)
