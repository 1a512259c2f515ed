"""omnilead.downstream.evaluate: its numbers against plain loops over the same crops, and its
warnings."""

import json
import shutil

import fsspec
import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file

import omnilead
from omnilead.data_tools.dataset import CLASSES
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.ecg.record_tables import read_table
from omnilead.downstream.evaluate import label_table_of_run, main
from omnilead.downstream.evaluation import identification, results
from omnilead.downstream.inference.trained_model import HeadInfo
from omnilead.downstream.tasks import metrics
from omnilead.downstream.tasks.config import TaskConfig
from omnilead.downstream.tasks.labels import read_task
from omnilead.downstream.tasks.metrics import challenge_score
from omnilead.engine.data.datasets import Datasets
from omnilead.engine.data.patients import patient_ids
from omnilead.engine.model.folder import write_config
from tests.downstream.evaluate.conftest import (
    DIAGNOSIS,
    IDENTIFICATION,
)


def halves_of(data, rows, leads=tuple(range(12))):
    """Every half that was recorded, in millivolts, other leads zero; and its crop."""
    halves, crops = [], []
    for row in rows.tolist():
        for half in range(int(data.column("halves")[row])):
            mv = data.read(row)[:, 2500 * half : 2500 * (half + 1)] / 1000.0
            mv[[lead for lead in range(12) if lead not in leads]] = 0
            halves.append(torch.tensor(mv, dtype=torch.float32))
            crops.append(row)
    return torch.stack(halves), np.array(crops)


def accuracy(gallery, probes, own, asked):
    g, p = (torch.nn.functional.normalize(c.double(), dim=1) for c in (gallery, probes))
    return float((own[(p @ g.T).argmax(1).numpy()] == asked).mean())


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def noted(document, words):
    return words in " ".join(document["remarks"])


# Numbers
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leads", [None, "V2,ii"])
def test_diagnosis_scores_equal_a_loop_over_halves(leads, data, diagnostic, evaluated):
    document = evaluated(
        diagnostic, "--role", "valid", "--batch", 3, *(("--leads", leads) if leads else ())
    )
    seen = (1, 7) if leads else tuple(range(12))
    x, crops = halves_of(data, data.select(dx="valid"), seen)
    probability = omnilead.load(diagnostic).logits(x).sigmoid().numpy()[:, ::-1]
    labels = data.labels[crops]
    assert document["score"] == pytest.approx(challenge_score(labels, probability > 0.5), abs=1e-9)
    about = [document[name] for name in ("n", "unit", "role", "data", "leads")]
    names = ",".join(LEADS[lead] for lead in seen)
    assert about == [len(crops), "half", "valid", data.fingerprint, names]
    names = data.column("record")[crops]
    each = [np.flatnonzero(names == name) for name in np.unique(names)]
    means = np.stack([probability[rows].mean(0) > 0.5 for rows in each])
    average_records = challenge_score(np.stack([labels[rows[0]] for rows in each]), means)
    record = document["record"]
    assert record["metrics"]["challenge"] == pytest.approx(average_records, abs=1e-9)
    assert record["n"] == len(each) < len(np.unique(crops))  # some records have several crops
    assert document["classes"]["NSR"]["positives"] == labels[:, CLASSES.index("NSR")].sum()
    assert document["intervals"]["challenge"] == [None, None]  # too few patients of each class


def test_identification_equals_a_loop_over_gallery_crops(data, pretrained, evaluated):
    """A model without a head, on the first 5 s of each crop."""
    document, model = evaluated(pretrained), omnilead.load(pretrained)
    patient = data.column("patient")
    gallery, probe = data.select(identity="gallery"), data.select(identity="probe")
    first = [model.pool_tokens(halves_of(data, rows)[0][::2]) for rows in (gallery, probe)]
    assert document["score"] == pytest.approx(accuracy(*first, patient[gallery], patient[probe]))
    assert [document[name] for name in ("n", "gallery", "one_sided")] == [100, 100, 0]
    assert document["metrics"]["ties"] == 0
    assert document["metrics"]["chance"] == 0.01 < document["score"]


def test_identification_has_random_weights_of_the_architecture_beside_it(
    data, pretrained, evaluated, tmp_path
):
    """`pretrained` has the random weights of seed 0."""
    trained = tmp_path / "trained"
    shutil.copytree(pretrained, trained)
    drawn = torch.Generator().manual_seed(1)
    weights = load_file(trained / "model.safetensors")
    changed = {name: w + 0.1 * torch.randn(w.shape, generator=drawn) for name, w in weights.items()}
    save_file(changed, trained / "model.safetensors", metadata={"format": "pt"})
    write_config(trained, json.loads((trained / "config.json").read_text()))
    before, after = evaluated(pretrained), evaluated(trained)
    random = [document["metrics"]["random_weights"] for document in (before, after)]
    assert random == [before["score"]] * 2 and after["score"] != before["score"]
    assert after["intervals"]["random_weights"] == before["intervals"]["accuracy"]
    assert noted(before, "Random weights of the same architecture recognise as many patients")


def test_identification_in_validation_compares_the_halves_of_a_crop(data, saved_model, evaluated):
    folder = saved_model(head=IDENTIFICATION | {"source_hz": [100, 100]})
    document = evaluated(folder, "--role", "valid")
    assert sum("while the head was fitted on ECGs of 100 Hz" in x for x in document["remarks"]) == 1
    rows = data.select(identity="valid")
    rows = rows[data.column("halves")[rows] == 2]
    c = omnilead.load(folder).pool_tokens(halves_of(data, rows)[0])
    patient = patient_ids([data])[0][rows]
    assert document["score"] == pytest.approx(accuracy(c[::2], c[1::2], patient, patient))
    assert document["n"] == document["gallery"] == len(rows)


def test_a_model_of_three_leads(saved_model, evaluated, refused):
    folder = saved_model(leads=3, preprocessing={"leads": ["I", "II", "V2"]}, head=DIAGNOSIS)
    document = evaluated(folder, "--role", "valid")
    assert document["leads"] == "I,II,V2"
    assert evaluated(folder, "--role", "valid", "--leads", 3) == document
    for leads, named in (("12", "I,II,V2"), ("2", "I,II,V2"), ("V9", "V9")):
        refused(f"--leads {leads}: .*{named}", folder, "--leads", leads)


def test_the_first_half_of_a_normalised_crop(data, saved_model, evaluated):
    """Statistics are over the whole crop, without the zeros after its end."""
    folder = saved_model(preprocessing={"scale": "zscore"})
    model = omnilead.load(folder)

    def scaled(row):
        halves = int(data.column("halves")[row])
        uv = data.read(row)[:, : 2500 * halves].astype(float)
        z = (uv - uv.mean(1, keepdims=True)) / np.maximum(uv.std(1, keepdims=True), 1e-3)
        return torch.tensor(z, dtype=torch.float32).unflatten(1, (halves, 2500)).transpose(0, 1)

    patient = data.column("patient")
    sides = [data.select(identity=role) for role in ("gallery", "probe")]
    first, asked = (
        model.pool_tokens(torch.stack([scaled(row)[0] for row in side])) for side in sides
    )
    by_hand = accuracy(first, asked, *(patient[side] for side in sides))
    assert evaluated(folder)["score"] == pytest.approx(by_hand)
    gallery = identification.identify(model, Datasets((data,)), results.EvalOptions()).gallery_PD
    np.testing.assert_allclose(gallery, first, atol=1e-5)


# Other tasks
# ----------------------------------------------------------------------------------------------------------------

NAMES = ["AF", "none", "other"]
FOLDS = {
    "name": "rhythm",
    "kind": "multiclass",
    "columns": ["rhythm"],
    "classes": NAMES,
    "split": "auto",
    "folds": {"train": ["1"], "valid": ["2"], "test": ["3"]},
    "labels": "rhythm.csv",
}
RHYTHM = {"task": "rhythm", "kind": "multiclass", "classes": NAMES, "definition": FOLDS}
BEATS = {
    "task": "beats",
    "kind": "multilabel",
    "classes": ["SB", "never"],
    "thresholds": [0.7, 0.2],
    "definition": {"name": "beats", "kind": "multilabel", "columns": ["SB", "never"]},
}


@pytest.fixture(scope="module")
def tables(data, tmp_path_factory):
    """rhythm.csv, with folds by patient; beats.csv, with splits, in which a fifth is unknown."""
    place = tmp_path_factory.mktemp("tables")
    table = data.table(["source", "record"]).to_pydict()
    records = dict(zip(zip(*table.values(), strict=True), range(len(data)), strict=True))
    patient, dx = patient_ids([data])[0], data.labels
    lines = {
        "rhythm": ["record,source,rhythm,fold"],
        "beats": ["record;source;SB;never;split"],
    }
    for (source, record), row in records.items():
        af, sb = dx[row, CLASSES.index("AF")], int(dx[row, CLASSES.index("SB")])
        rhythm = "AF" if af else "none" if dx[row, CLASSES.index("NSR")] else "other"
        lines["rhythm"].append(f"{record},{source},{rhythm},{patient[row] % 5 % 3 + 1}")
        split = ("train", "valid", "test")[patient[row] % 5 % 3]
        lines["beats"].append(f"{record};{source};{sb if row % 5 else ''};0;{split}")
    for name, content in lines.items():
        (place / f"{name}.csv").write_text("\n".join(content))
    return place


def test_exclusive_classes_equal_a_loop(data, tables, saved_model, evaluated):
    folder = saved_model(head=RHYTHM)
    document = evaluated(folder, "--labels", tables / "rhythm.csv")
    table = str(tables / "rhythm.csv")
    task = TaskConfig("rhythm", "multiclass", labels=table, classes=tuple(NAMES))
    labels = read_task(task, [data])
    rows = labels.rows_of_dataset(0, "test")
    x, crops = halves_of(data, rows)
    p, y = omnilead.load(folder).logits(x).softmax(1).numpy(), labels.y[0][crops]
    assert document["metrics"]["accuracy"] == pytest.approx((p.argmax(1) == y.argmax(1)).mean())
    assert document["score"] == pytest.approx(metrics.measure("multiclass", y, p)["auroc"])
    about = [document[name] for name in ("task", "kind", "n")]
    assert about == ["rhythm", "multiclass", len(crops)]
    assert [document["classes"][name]["positives"] for name in NAMES] == y.sum(0).tolist()
    assert set(document["groups"]) == {"age", "sex", "source"} and not noted(document, "leakage")
    assert sum(of["n"] for of in document["groups"]["sex"].values()) == document["record"]["n"]
    known = (labels.split[0] > 0).sum()
    said = f"{len(rows)} of {known} labelled crops are in the split test. To score all"
    assert noted(document, said)


def test_unknown_labels_thresholds_and_a_class_without_positives(
    data, tables, saved_model, evaluated
):
    folder, table = saved_model(head=BEATS), tables / "beats.csv"
    document = evaluated(folder, "--labels", table, "--role", "valid")
    labels = read_task(TaskConfig("beats", labels=str(table)), [data])
    x, crops = halves_of(data, labels.rows_of_dataset(0, "valid"))
    p, y = omnilead.load(folder).scores(x).numpy(), labels.y[0][crops]
    known = ~np.isnan(y[:, 0])
    classes = document["classes"]
    assert classes["SB"]["predicted"] == (p[known, 0] > 0.7).sum()
    assert classes["SB"]["n"] == known.sum() < len(crops) == document["n"]
    assert document["thresholds"] == [0.7, 0.2] and classes["never"]["auroc"] is None
    assert noted(document, "1 of 2 classes have no positives: never.")
    assert noted(document, f"{(~known).sum()} of {y.size} labels are unknown")


@pytest.mark.parametrize("role", ["valid", "test"])
def test_the_score_that_finds_95_of_100_records_is_of_validation(role):
    """A threshold chosen on test would be flattered there."""
    y_N1 = (np.arange(80)[:, None] // 2 % 2).astype(float)  # two halves of 40 records
    score_N1 = (np.arange(80)[:, None] % 2 + y_N1 + 1) / 4  # of a record, 0.375 or 0.625
    records = [f"r{i // 2}" for i in range(80)]
    head = HeadInfo("af", "binary", ("AF",), (0.5,))
    result = results.TaskResult(y_N1, score_N1, records, records, {"role": role}, head=head)
    line = "AF: 95 % sensitivity with 0.6250 for the threshold, specificity 1.00"
    assert (line in result.remarks) == (role == "valid")


def test_a_diagnosis_has_the_challenge_score_at_0_5_and_at_chosen_thresholds(
    data, saved_model, evaluated
):
    before = evaluated(saved_model("a", head=DIAGNOSIS), "--role", "valid")
    chosen = [0.2] * 13 + [0.6] * 13
    model = saved_model("b", head=DIAGNOSIS | {"thresholds": chosen})
    after = evaluated(model, "--role", "valid")
    assert after["score"] == before["score"] and noted(after, "as in the Challenge")
    options, task = results.EvalOptions("valid"), results.load_task("diagnosis")
    result = results.score_task(omnilead.load(model), Datasets((data,)), task, options)
    score = after["metrics"].pop("challenge_chosen")
    expected = challenge_score(result.labels_NK, result.scores_NK > np.array(chosen))
    assert score == pytest.approx(expected, abs=1e-6)
    assert score != after["score"] and after["metrics"] == before["metrics"]


def test_labels_that_a_model_names_are_not_opened(
    data,
    tables,
    saved_model,
    refused,
    evaluated,
    tmp_path,
    monkeypatch,
):
    """They may be an address inside the network, or any file of this machine."""
    run, secret, opened = tmp_path / "run", tmp_path / "secret.csv", []
    secret.write_text("record,password\na,hunter2\n")
    (run / "code").mkdir(parents=True)
    monkeypatch.setattr(fsspec, "open", lambda url, *_: opened.append(url))
    monkeypatch.chdir(tables)
    places = [str(tables / "rhythm.csv"), str(secret), "http://127.0.0.1:1/x", "s3://b/l.csv"]
    for n, place in enumerate([*places, "rhythm.csv"]):
        model = saved_model(f"m{n}", head=RHYTHM | {"definition": FOLDS | {"labels": place}})
        (run / "model").unlink(missing_ok=True)
        (run / "model").symlink_to(model)
        for config in ({"task": {"labels": place}}, {"base": str(secret)}):
            (run / "config.yaml").write_text(json.dumps(config))
            refused(
                f"labels of the model's task rhythm, {place}, are not stored with the model: give .* --labels",
                run,
            )
    kept = run / "labels.parquet"
    kept.symlink_to(secret)  # nor what lies elsewhere
    refused("are not stored with the model", run)
    named = saved_model("named", head=RHYTHM | {"task": str(secret), "definition": {}})
    refused("fine-tuned for .*secret.csv', which is no shipped task", named)
    assert not opened
    monkeypatch.undo()
    kept.unlink()
    parquet.write_table(read_table(places[0]), kept)  # as training leaves it
    assert label_table_of_run(str(run)) == str(kept) and label_table_of_run(f"{run}/model") == ""
    own, given = (evaluated(run, *how) for how in ((), ("--labels", places[0])))
    assert own == json.loads(json.dumps(given).replace(places[0], str(kept)))
    assert given["labels"] == places[0]


def test_labels_must_fit_the_model(tables, saved_model, refused, tmp_path):
    rhythm, beats = saved_model("a", head=RHYTHM), saved_model("b", head=BEATS)
    two = saved_model("c", head=RHYTHM | {"classes": NAMES[:2]})
    four = saved_model("d", head=RHYTHM | {"classes": [*NAMES, "paced"]})
    folds, splits = tables / "rhythm.csv", tables / "beats.csv"
    for model, labels, message in (
        (rhythm, splits, "no column 'rhythm': its label columns are SB, never"),
        (beats, folds, "no column 'SB'"),
        (two, folds, "the model knows 2 classes, not other: use other --labels"),
        (four, folds, "the model knows 4 classes, of which the labels have AF, none, other"),
    ):
        refused(message, model, "--labels", labels)
    other_kind = "is regression, but the model was fine-tuned for rhythm, of kind multiclass"
    refused(f"--task age: the kind of this task {other_kind}", rhythm, "--task", "age")
    refused("--task 'ages': .*did you mean age", rhythm, "--task", "ages")
    other = tmp_path / "other.csv"
    for model, content, message in (
        (rhythm, folds.read_text().replace("other", "strange"), "'strange' is not one of the"),
        (
            beats,
            splits.read_text().replace(";test", ";valid"),
            "no record of .* is in the split test",
        ),
        (beats, splits.read_text().replace(";1;0", ";0;0"), "none of its .* has a positive label"),
    ):
        other.write_text(content)
        refused(message, model, "--labels", other)


@pytest.mark.parametrize("kind", ["multilabel", "regression"])
def test_one_of_a_models_two_columns(kind, tables, saved_model, evaluated):
    ends = {"center": [0, 1], "scale": [1, 2]} if kind == "regression" else {}
    definition = BEATS["definition"] | {"kind": kind}
    thresholds = [] if ends else BEATS["thresholds"]
    head = BEATS | {"kind": kind, "thresholds": thresholds, "definition": definition} | ends
    task = {"name": "beats", "kind": kind, "columns": ["SB"], "labels": str(tables / "beats.csv")}
    (tables / "one.yaml").write_text(json.dumps({"task": task}))
    document = evaluated(saved_model(head=head), "--task", tables / "one.yaml")
    assert list(document["classes"]) == ["SB"] and document["n"] > 0


# Warnings
# -----------------------------------------------------------------------------------------------------------------


def test_the_report_and_the_remarks(copy, diagnostic, tmp_path, capsys):
    page, other = tmp_path / "page.html", copy(plan="paper-split")
    given = ["--model", str(diagnostic), "--data", other, "--role", "valid"]
    assert main([*given, "--report", str(page)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == str(page)
    no_point = "95 % sensitivity takes 20 positives"
    for words in ("classes have no positives", "--plan paper-split", "dataset.json", no_point):
        assert words in text and words in page.read_text()
    assert "halves of 5 s" not in text.partition("No class")[0]
    assert main([*given, "--halves"]) == 0
    halves = capsys.readouterr().out.splitlines()
    assert halves[1].startswith("to report: CinC 2021 score") and "halves of 5 s" in halves[2]
    assert len(text.splitlines()) < 21 and max(map(len, text.splitlines())) < 250


@pytest.mark.parametrize(
    ("task", "column", "roles"),
    [("diagnosis", "dx_role", ["test"]), ("identification", "id_role", ["gallery", "probe"])],
)
def test_crops_without_any_of_the_models_leads_are_left_out(
    task, column, roles, data, diagnostic,
    evaluated, refused, monkeypatch,
):  # fmt: skip
    role = data.column(column)
    rows = np.flatnonzero(np.isin(role, roles))
    lost, blank = rows[[0, -1]], role == ""
    blank[lost] = True
    monkeypatch.setattr(
        "omnilead.engine.model.input.crops_without_leads",
        lambda dataset, leads: blank & (leads == (7,)),
    )
    how = diagnostic, "--task", task
    few, whole = evaluated(*how, "--leads", "V2"), evaluated(*how)
    note = f"2 of {len(rows):,} crops are left out: none of V2 was recorded in them."
    assert noted(few, note) and not noted(whole, "left out")
    counted = [document["n"] + document.get("gallery", 0) for document in (whole, few)]
    fewer = data.column("halves")[lost].sum() if task == "diagnosis" else 2
    assert counted[0] - counted[1] == fewer
    blank[:] = True
    refused("no valid lead: the model uses V2, of which none was recorded", *how, "--leads", "V2")
