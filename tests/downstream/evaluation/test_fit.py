"""omnilead fit: it writes a model with a head, says how good it is, and predict says it again."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow.csv import read_csv, write_csv

import omnilead
from omnilead.__main__ import main
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.downstream.evaluation.fit import class_lines
from omnilead.downstream.evaluation.heads import ecgs_and_patients_text
from omnilead.downstream.inference.trained_model import HeadInfo, load
from tests.conftest import save_model

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture(scope="module")
def sheet(dataset, tmp_path_factory):
    """Patients are known in one source only."""
    records = np.unique(dataset.column("record"))
    ill = np.resize(["ja", *["nein"] * 6], len(records))
    path = tmp_path_factory.mktemp("sheet") / "mine.csv"
    write_csv(pa.table({"record": records, "ill": ill, "age": np.arange(len(records))}), path)
    return path


def ill_alone(sheet):
    """The table without the other column, with the same name."""
    (folder := sheet.parent / "alone").mkdir(exist_ok=True)
    table = read_csv(sheet).select(["record", "ill"])
    write_csv(table, folder / sheet.name)
    return folder / sheet.name


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("encoder") / "model")


def test_it_says_how_good_it_is_and_other_columns_change_nothing(
    encoder, sheet, dataset, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    data, head, out = dataset.root.url, tmp_path / "head", tmp_path / "MODEL"
    given = ["--model", str(encoder), "--data", data, "--labels", str(sheet), "--columns", "ill"]
    assert main(["fit", *given, "--leads", "I,V2", "--out", str(out)]) == 0
    said, notes = capsys.readouterr()
    fitted = omnilead.fit(encoder, data=data, labels=ill_alone(sheet), leads="I,V2", out=head)
    for name in ("model.safetensors", "preprocessing.json", "README.md", "seen.parquet"):
        assert (out / name).read_bytes() == (head / name).read_bytes()
    of_head = json.loads((out / "config.json").read_text())["head"]
    assert of_head == json.loads((head / "config.json").read_text())["head"]
    assert fitted.scores == of_head["cross_validated"]
    assert fitted.report.replace(str(head), str(out)).splitlines()[:3] == said.splitlines()[:3]
    ecg = dataset[0]
    signal = {"fs_hz": 500, "leads": ["I", "V2"]}
    rows = [LEADS.index(name) for name in signal["leads"]]
    assert fitted.predict(ecg.signal_mv[rows], **signal) == load(fitted).predict(
        ecg.signal_mv[rows], **signal
    )
    found = of_head["cross_validated"]
    assert found["folds"] == 5 and 0 <= found["metrics"]["auroc"] <= 1
    fitted, score, point, test = said.splitlines()
    assert fitted.startswith(
        f"{out}: a linear layer on {encoder} read out as mean, leads I,V2, fitted on "
    )
    low, high = found["intervals"]["auroc"]
    assert f"AUROC {found['metrics']['auroc']:.3f} ({low:.3f} to {high:.3f})" in score
    lowest, specificity = found["sensitive"]["ill"]
    assert (
        point
        == f"ill: 95 % sensitivity with {lowest:.4f} for the threshold, specificity {specificity:.2f}"
    )
    assert f"omnilead evaluate --model {out} --data {data} --labels {sheet}" in test
    assert "ill: binary: " in notes and "nein is 0, ja is 1" in notes
    assert not list(tmp_path.glob("*.parts"))
    card = (out / "README.md").read_text()
    assert "of unknown patients" in card and "people" not in card and score in card
    predictions = tmp_path / "F.csv"
    assert main(["predict", "--model", str(out), "--data", data, "--out", str(predictions)]) == 0
    assert f"note: {predictions}: the model: {score}; {point}\n" in capsys.readouterr().err
    assert of_head["source_hz"] == [257, 500]
    np.save("slow.npy", np.random.default_rng(0).normal(0, 0.3, (12, 1000)))
    slow = ["predict", "--model", str(out), "--data", "slow.npy", "--fs", "100", "--unit", "mV"]
    assert main([*slow, "--out", "slow.csv"]) == 0
    assert "ECGs recorded at 100 Hz, while the head was fitted on" in capsys.readouterr().err
    evaluated = omnilead.evaluate(out, data=data, labels=str(sheet), leads="I,V2")
    assert any("`omnilead bench --folds 5` tests every" in note for note in evaluated["remarks"])
    assert not any("Leakage" in note for note in evaluated["remarks"])
    assert not any("recorded at" in note for note in evaluated["remarks"])
    assert f"The model: {score}; {point}." in evaluated["remarks"]


def test_rates_at_which_a_head_may_not_hold(encoder):
    """Where an ECG lacks waves that others have, of those that the model sees."""
    model = load(encoder)
    assert model.note_on_rates([100.0]) == ""  # it has no head
    model.head_info = HeadInfo("t", "binary", ("AF",), (0.5,), source_hz=(500.0, 1000.0))
    assert model.note_on_rates([250.0, 400.0, 2000.0]) == ""
    assert model.note_on_rates([500.0, 128.0, 100.0]) == (
        "ECGs recorded at 100 to 128 Hz, while the head was fitted on ECGs of 500 to 1000 Hz: the "
        "slower lack fast waves, so its scores may not hold for these"
    )
    model.head_info = replace(model.head_info, source_hz=(100.0, 100.0))
    assert "ECGs recorded at 500 Hz, while" in model.note_on_rates([100.0, 500.0])
    model.input = replace(model.input, band_hz=(0.5, 40.0))
    assert model.note_on_rates([100.0, 500.0]) == ""


def test_what_a_head_of_values_says(encoder, sheet, dataset, tmp_path):
    found = omnilead.fit(
        encoder, data=dataset.root.url, labels=sheet, columns=["age"], kind="regression", folds=2,
        reader="boosted", out=tmp_path / "MODEL",
    )  # fmt: skip
    assert found.scores["folds"] == 2 and found.scores["metrics"].keys() == {
        "mae",
        "rmse",
        "r2",
        "pearson",
    }
    assert "boosted trees" in found.sentences[0] and "mean absolute error " in found.sentences[1]
    assert "sensitivity" not in str(found.sentences)


def test_what_a_fold_cannot_learn_is_not_tested(encoder, dataset, tmp_path):
    """A class with one positive, and values that are known once; both still have an output."""
    records = np.unique(dataset.column("record"))
    wide, once = np.arange(len(records)), np.full(len(records), np.nan)
    split = np.resize(["train", "train", "train", "test"], len(records))
    once[0] = 70.0
    classes = {"ill": wide % 3 == 0, "rare": wide == 0, "even": wide % 2 == 0}
    for kind, columns in (("regression", {"ef": wide, "mass": once}), ("multilabel", classes)):
        sheet, out = tmp_path / f"{kind}.csv", tmp_path / kind
        cells = {name: np.asarray(column, float) for name, column in columns.items()}
        write_csv(pa.table({"record": records, "split": split, **cells}), sheet)
        found = omnilead.fit(
            encoder, data=dataset.root.url, labels=sheet, kind=kind, columns=[*columns], out=out
        )
        assert (
            found.scores["left_out"] == [list(columns)[1]]
            and None not in found.scores["metrics"].values()
        )
        assert f"not tested, since a fold had too few labels: {list(columns)[1]}" in found.sentences
        head = load(out).head_info
        assert head.classes == (*columns,) and head.cross_validated.left_out == (*columns,)[1:2]
    even, ill = found.sentences[-3:-1]
    scores = found.scores["classes"]
    assert scores["even"]["positives"] == classes["even"][split == "train"].sum()
    assert (
        even
        == f"even: AUROC {scores['even']['auroc']:.3f}, {scores['even']['positives']} of {found.scores['n']} ECGs"
    )
    assert ill.startswith("ill: AUROC 0.") and scores.keys() == {"even", "ill"}
    means = [figures["auroc"] for figures in scores.values()]
    assert found.scores["metrics"]["auroc"] == pytest.approx(np.mean(means))


def test_of_many_classes_the_rarer_are_summarised():
    scores = {f"c{i}": {"positives": i, "n": 90, "auroc": i / 100} for i in range(60, 80)}
    scores["c79"]["auroc"] = None
    lines = class_lines(scores)
    assert lines[:2] == ["c79: no AUROC, 79 of 90 ECGs", "c78: AUROC 0.780, 78 of 90 ECGs"]
    assert lines[12:] == ["8 rarer classes: AUROC 0.600 to 0.670; config.json has each"]
    assert class_lines({"ill": scores["c60"]}) == []


def test_a_folder_of_others_is_not_taken_for_its_embeddings(
    encoder, sheet, dataset, tmp_path, capsys
):
    (others := tmp_path / "MODEL.parts").mkdir()
    (others / "thesis.txt").write_text("mine")
    given = ["--model", str(encoder), "--data", dataset.root.url, "--labels", str(sheet)]
    assert main(["fit", *given, "--columns", "ill", "--out", str(tmp_path / "MODEL")]) == 2
    assert (
        "MODEL.parts: only saved embeddings may be in this folder, but it has thesis.txt"
        in capsys.readouterr().err
    )
    assert (others / "thesis.txt").read_text() == "mine"


def test_ecgs_of_valid_alone_are_enough(encoder, sheet, dataset, tmp_path):
    table = read_csv(sheet).select(["record", "ill"])
    split = np.resize(["valid", "valid", "valid", "test"], len(table))
    write_csv(table.append_column("split", pa.array(split)), tmp_path / "mine.csv")
    found = omnilead.fit(
        encoder, data=dataset.root.url, labels=tmp_path / "mine.csv", out=tmp_path / "MODEL"
    )
    assert found.scores["n"] == (split == "valid").sum()


def test_how_many_people_a_head_was_fitted_on():
    """Ids of patients are odd; others are of records."""
    assert ecgs_and_patients_text(np.array([1, 1, 3])) == "3 ECGs of 2 patients"
    assert ecgs_and_patients_text(np.array([2, 4])) == "2 ECGs of unknown patients"
    assert (
        ecgs_and_patients_text(np.array([1, 3, 3, 2]))
        == "3 ECGs of 2 patients and 1 of unknown patients"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--labels nowhere.csv", "nowhere.csv"),
        ("--labels same.csv", "nothing to learn or to score; an empty cell is unknown: write 0"),
        (
            "--labels mine.csv --columns ill --out .",
            "--out .: already exists: choose another folder",
        ),
        ("--labels mine.csv --columns ill --folds 999", "--folds 999: only "),
        ("--labels gaps.csv", "no record of train and valid has a known label in well: leave"),
        ("--labels mine.csv --columns ill --leads X", "no lead is called 'X'"),
    ],
)
def test_refusals_are_one_line(
    words, message, encoder, sheet, dataset, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_bytes(sheet.read_bytes())
    records = read_csv(sheet).select(["record"])
    write_csv(records.append_column("ill", pa.array(np.ones(len(records)))), "same.csv")
    ill, split = np.arange(len(records)) % 2, np.resize(["train", "valid", "test"], len(records))
    well = np.where(split == "test", "1", "")
    gaps = pa.table({"record": records["record"], "ill": ill, "well": well, "split": split})
    write_csv(gaps, "gaps.csv")
    given = ["--model", str(encoder), "--data", dataset.root.url, "--out", "MODEL", *words.split()]
    assert main(["fit", *given]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("omnilead fit: ") and message in error
    assert not (tmp_path / "MODEL").exists()
