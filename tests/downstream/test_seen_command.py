"""omnilead seen: which records, patients and waveforms a run or a model was trained on."""

import csv
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "training"))  # the helpers lie there
from test_muse_xml import TRUTH, muse

from omnilead.__main__ import main
from omnilead.data_tools.ecg.pseudonyms import read_key
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.engine.data.loader import crop_order
from omnilead.engine.data.patients import patient_ids
from omnilead.engine.data.seen import read_seen_record, seen_record_of_crops, to_bytes
from omnilead.engine.model.folder import read_document, write_config
from omnilead.engine.training.checkpoint_files import read_state
from omnilead.engine.training.config import build_config
from omnilead.engine.training.run_folder import RunFolder
from omnilead.engine.training.validation import training_selection
from tests.engine.training.ranks import finetune, pretrain

ALL = {"plan": "all", "quiet": True}
STEPS, BATCH = 7, 40


@pytest.fixture(scope="module")
def whole(archive, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("whole") / "dataset")
    return shard(open_sources(str(archive)), ShardOptions(out, **ALL))


@pytest.fixture(scope="module")
def run(whole, dataset, tmp_path_factory):
    """Some crops were drawn more than once, some never."""
    tmp = tmp_path_factory.mktemp("run")
    how = {"data__datasets": [whole.root.url], "train__batch_crops": BATCH}
    how |= {"data__where": "age >= 40", "train__steps": STEPS, "train__validate_every": 0}
    pretrain(tmp, "", objective__local=0, **how).good()
    return tmp / "run"


def seen(capsys, *words):
    code = main(["seen", *map(str, words)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out, said.err


def counted(text):
    """The numbers of the table: {use: (crops, records, patients)}."""
    found = {}
    for line in text.splitlines():
        name, numbers = line[:12].strip(), line[12:].split()
        if name in ("not seen", "unlabelled", "selected", "labelled"):
            found[name] = tuple(int(number.replace(",", "")) for number in numbers)
    return found


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def drawn_by(run, dataset):
    """How often the crops of a run's only dataset were drawn, step by step."""
    state = read_state(RunFolder(run).newest_checkpoint())
    config = build_config(state["config"])
    order = crop_order(config.loader, [dataset], training_selection(config))
    times = np.zeros(len(dataset), int)
    for step in range(state["step"]):
        np.add.at(times, order.batch(step).row, 1)
    return times


def test_a_run_says_how_often_each_record_was_drawn(run, whole, tmp_path, capsys):
    times = drawn_by(run, whole)
    assert times.sum() == STEPS * BATCH and times.max() > 1 and not times.all()
    code, said, _ = seen(capsys, run, "--out", tmp_path / "seen.csv")
    assert code == 0 and f"{run}, step {STEPS}: has seen" in said
    assert f"crops drawn: {STEPS * BATCH}, the same one at most {times.max()} times" in said
    record = whole.column("record")
    expected = {name: int(times[record == name].sum()) for name in dict.fromkeys(record)}
    rows = rows_of(tmp_path / "seen.csv")
    assert {row["record"]: int(row["times"]) for row in rows} == expected
    waves, people = whole.column("waveform"), patient_ids([whole])[0]
    copies = np.isin(waves, waves[times > 0])
    known = np.isin(people, people[times > 0])
    assert counted(said) == {
        "not seen": (
            int((~copies).sum()),
            len(set(record) - set(record[copies])),
            len(set(people[~known])),
        ),
        "unlabelled": (int(copies.sum()), len(set(record[copies])), len(set(people[known]))),
        "selected": (0, 0, 0),
        "labelled": (0, 0, 0),
    }
    of = {row["record"]: row for row in rows}
    assert {name for name in of if of[name]["waveform"]} == set(record[copies])
    assert {name for name in of if of[name]["owner"]} == set(record[known])
    assert {row["waveform"] for row in rows} == {"", "unlabelled"}
    patients = dict(zip(record, whole.table(["patient"])["patient"].to_pylist(), strict=True))
    assert {name: of[name]["patient"] or None for name in of} == patients


def test_a_model_says_it_from_hashes_alone(run, whole, tmp_path, capsys):
    _, of_run, _ = seen(capsys, run, "--out", tmp_path / "run.csv")
    model = shutil.copytree(run / "model", tmp_path / "model")
    code, said, _ = seen(capsys, model, "--data", whole.root.url, "--out", tmp_path / "model.csv")
    assert code == 0 and counted(said) == counted(of_run) and "drawn" not in said
    by_run, by_model = rows_of(tmp_path / "run.csv"), rows_of(tmp_path / "model.csv")
    assert [row | {"times": ""} for row in by_run] == by_model
    code, said, _ = seen(capsys, model)
    assert code == 0 and said.count("\n") == 1 and f"step {STEPS}: has seen" in said
    assert seen(capsys, "--model", model) == seen(capsys, f"--model={model}") == (code, said, "")


def test_a_stranger_asks_about_ecgs_under_other_names(run, whole, archive, tmp_path, capsys):
    """A dataset with pseudonyms, and single files."""
    options = ShardOptions(str(tmp_path / "other"), pseudonym_key=bytes(32), **ALL)
    other = shard(open_sources(str(archive)), options)
    _, of_run, _ = seen(capsys, run)
    code, said, _ = seen(capsys, run, "--data", other.root.url, "--out", tmp_path / "other.csv")
    crops = counted(of_run)["unlabelled"][0]
    assert code == 0 and counted(said)["unlabelled"] == (crops, counted(of_run)["unlabelled"][1], 0)
    assert "drawn" not in said and {row["times"] for row in rows_of(tmp_path / "other.csv")} == {""}
    times, record = drawn_by(run, whole), whole.column("record")
    known, unknown = record[times > 0][0], record[~np.isin(record, record[times > 0])][0]
    files = [next(Path(archive).rglob(f"{name}.hea")) for name in (known, unknown)]
    code, said, _ = seen(capsys, run / "model", "--data", *files, "--out", tmp_path / "files.csv")
    assert code == 0 and [row["record"] for row in rows_of(tmp_path / "files.csv")] == [
        known,
        unknown,
    ]
    assert [row["waveform"] for row in rows_of(tmp_path / "files.csv")] == ["unlabelled", ""]
    assert [line for line in said.splitlines() if line in map(str, files)] == [
        str(f) for f in files
    ]


def test_fine_tuning_keeps_what_its_start_saw(run, whole, tmp_path, capsys):
    records = dict(zip(whole.column("record"), patient_ids([whole])[0].tolist(), strict=True))
    lines = ["record,v,split"]
    for n, (name, person) in enumerate(records.items()):
        lines.append(f"{name},{n % 2},{('train', 'valid', 'test')[(person >> 1) % 3]}")
    (tmp_path / "my.csv").write_text("\n".join(lines))
    how = {"task__labels": str(tmp_path / "my.csv"), "task__kind": "binary", "train__steps": 2}
    finetune(tmp_path, whole.root.url, run, "diagnosis", "tuned", **how).good()
    code, said, _ = seen(capsys, tmp_path / "tuned", "--out", tmp_path / "tuned.csv")
    counts = counted(said)
    assert code == 0 and all(counts[use][0] for use in ("unlabelled", "selected", "labelled"))
    rows = rows_of(tmp_path / "tuned.csv")
    assert sum(int(row["times"]) for row in rows) == 2 * 8
    for row in rows:
        split = ("train", "valid", "test")[(records[row["record"]] >> 1) % 3]
        assert (split == "train" or row["times"] == "0") and (
            row["times"] == "0" or row["waveform"] == "labelled"
        )
    of_model = seen(capsys, tmp_path / "tuned" / "model", "--data", whole.root.url)[1]
    assert counted(of_model)["selected"] == counts["selected"]


def test_what_is_unknown_and_what_is_wrong_is_one_line(run, whole, saved_model, tmp_path, capsys):
    code, said, _ = seen(capsys, saved_model(), "--data", whole.root.url)
    assert code == 0 and "it is not known what else it was trained on" in said
    assert "is known to have seen 0 waveforms of 0 patients" in said and counted(said)[
        "unlabelled"
    ] == (0, 0, 0)
    (tmp_path / "broken.hea").write_text("broken 12 500")
    wrong = partial(seen, capsys)
    for words, why in (
        ((tmp_path / "nosuch",), "no such folder"),
        (
            (run / "model", "--out", tmp_path / "x.csv"),
            "there are no ECGs to list: name some with --data",
        ),
        ((run / "model", "--data", tmp_path / "none"), "none: does not exist"),
        ((run / "model", "--data", tmp_path / "broken.hea"), "broken.hea"),
        ((run, "--out", tmp_path / "no" / "x.csv"), "does not exist"),
        ((run, "--out", tmp_path), "is a folder"),
    ):
        code, out, err = wrong(*words)
        assert code == 2 and out == "" and why in err and err.count("\n") == 1, err
    assert not (tmp_path / "x.csv").exists()


def test_a_run_whose_data_are_gone_says_so(whole, tmp_path, capsys):
    copied = shutil.copytree(whole.root.url, tmp_path / "copy")
    how = {"train__steps": 1, "objective__local": 0, "data__datasets": [str(copied)]}
    pretrain(tmp_path, "", **how).good()
    _, before, _ = seen(capsys, tmp_path / "run" / "model", "--data", whole.root.url)
    shutil.rmtree(copied)
    code, said, err = seen(capsys, tmp_path / "run", "--data", whole.root.url)
    assert code == 0 and "cannot say what it was trained on" in err
    assert "is known to have seen 0 waveforms" in said and "run/model may know more" in said
    assert "it is not known what else" in said and counted(said)["unlabelled"] == (0, 0, 0)
    assert counted(before)["unlabelled"][0] > 0
    assert seen(capsys, tmp_path / "run" / "model", "--data", whole.root.url)[1] == before
    assert main(["pretrain", "--export", str(tmp_path / "run")]) == 0
    assert "cannot say what it was trained on" in capsys.readouterr().err
    assert seen(capsys, tmp_path / "run" / "model", "--data", whole.root.url)[1] == before


def test_a_model_forgets_nothing_when_its_run_goes_on_and_its_data_vanish(whole, tmp_path, capsys):
    """What earlier weights have seen is a part of what these have."""
    copied = shutil.copytree(whole.root.url, tmp_path / "copy")
    how = {"objective__local": 0, "data__datasets": [str(copied)]}
    pretrain(tmp_path, "", train__steps=1, **how).good()
    model = tmp_path / "run" / "model"
    written = read_seen_record(model / "seen.parquet")
    shutil.copytree(model, tmp_path / "earlier")
    pretrain(tmp_path, "", train__steps=2, **how).good()
    shutil.rmtree(model)
    shutil.copytree(tmp_path / "earlier", model)
    shutil.rmtree(copied)
    assert main(["pretrain", "--export", str(tmp_path / "run")]) == 0
    hashes = read_seen_record(model / "seen.parquet")["hash"].to_pylist()
    assert sorted(hashes) == sorted([-1, *written["hash"].to_pylist()]) and len(hashes) > 8


def test_a_run_knows_its_data_in_any_folder(whole, tmp_path, monkeypatch, capsys):
    """It was begun in one folder and started again in another, each time with the path as seen from there."""
    (tmp_path / "ds").symlink_to(whole.root.url)
    (tmp_path / "deep" / "down").mkdir(parents=True)
    how = {"objective__local": 0, "train__steps": 2}
    monkeypatch.chdir(tmp_path / "deep" / "down")
    pretrain(tmp_path, "../../ds", **how).good()
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["config"]["data"]["datasets"] == ["../../ds"]
    assert facts["dataset_paths"] == [whole.root.url]
    model = tmp_path / "run" / "model"
    written = (model / "seen.parquet").read_bytes()
    monkeypatch.chdir(tmp_path / "deep")
    assert "cannot say" not in pretrain(tmp_path, "../ds", **how).good()
    assert (model / "seen.parquet").read_bytes() == written
    code, said, err = seen(capsys, "../run", "--out", "seen.csv")
    assert code == 0 and "crops drawn: 16," in said and err == "" and len(rows_of(Path("seen.csv")))
    assert f"\n{whole.root.url}\n" in said
    code, typed, _ = seen(capsys, "../run", "--data", "../ds")
    assert code == 0 and counted(typed) == counted(said)


def test_a_run_finds_data_that_have_moved_once_it_is_started_again(whole, tmp_path, capsys):
    copied = shutil.copytree(whole.root.url, tmp_path / "copy")
    how = {"objective__local": 0, "train__steps": 1}
    pretrain(tmp_path, str(copied), **how).good()
    copied.rename(tmp_path / "moved")
    assert "cannot say" in seen(capsys, tmp_path / "run", "--data", whole.root.url)[2]
    assert "cannot say" not in pretrain(tmp_path, str(tmp_path / "moved"), **how).good()
    code, said, err = seen(capsys, tmp_path / "run")
    assert code == 0 and f"\n{tmp_path / 'moved'}\n" in said and err == ""


@pytest.mark.parametrize("pseudonyms", [False, True], ids=["own key", "KEYFILE"])
def test_the_owner_asks_about_another_ecg_of_a_patient(pseudonyms, run, tmp_path, capsys):
    """By the dataset that the model was trained on, or by the KEYFILE. Whoever has only the model and
    the file does not learn it."""
    for place, gain in (("old", 1.0), ("new", 0.5)):
        (tmp_path / place).mkdir()
        leads = {name: gain * uv for name, uv in TRUTH.items()}
        (tmp_path / place / "a.xml").write_text(muse(leads))
    key = tmp_path / "KEYFILE"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    secret = {"pseudonym_key": read_key(str(key))} if pseudonyms else {}
    made = {}
    for place in ("old", "new"):
        options = ShardOptions(str(tmp_path / f"of_{place}"), **secret, **ALL)
        sources = open_sources(str(tmp_path / place))
        made[place] = shard(sources, options)
    model = Path(shutil.copytree(run / "model", tmp_path / "model"))
    record = seen_record_of_crops(made["old"], np.arange(len(made["old"])), "labelled")
    (model / "seen.parquet").write_bytes(to_bytes(record))
    write_config(model, read_document(model / "config.json"))
    file, new, old = tmp_path / "new" / "a.xml", made["new"].root.url, made["old"].root.url
    asks = {"file": [file], "dataset": [new]}
    if pseudonyms:
        asks["key"] = [file, "--pseudonymize", key]
    else:
        asks["both"] = [old, file]
        asks["datasets"] = [new, old]
    told = {}
    for name, words in asks.items():
        out = tmp_path / "out.csv"
        code, said, _ = seen(capsys, model, "--data", *words, "--out", out)
        assert code == 0
        (row,) = [row for row in rows_of(out) if row["waveform"] == ""]
        told[name] = row["owner"], "by the key of another dataset" in said
    found, unknown = ("labelled", False), ("", True)
    if pseudonyms:
        assert told == {"file": unknown, "dataset": found, "key": found}
        code, _, err = seen(capsys, model, "--data", new, "--pseudonymize", key)
        assert code == 2 and "--pseudonymize" in err
    else:
        assert told == {"file": unknown, "dataset": unknown, "both": found, "datasets": found}
