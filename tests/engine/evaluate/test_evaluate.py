"""omnilead.engine.evaluate: its numbers against plain loops over the same crops, and its
warnings."""

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file

import omnilead
from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.engine.common import LEADS
from omnilead.engine.data.leakage import patient_ids, split_of
from omnilead.engine.evaluate import labels_of_run, lines, main
from omnilead.engine.evaluation import metrics, results
from omnilead.engine.evaluation.metrics import challenge_score
from omnilead.engine.model.folder import seal
from omnilead.engine.tasks.config import TaskConfig
from omnilead.engine.tasks.labels import read_table, read_task
from tests.engine.evaluate.conftest import (
    DIAGNOSIS,
    IDENTIFICATION,
    Evaluated,
    Patch,
    Refused,
    Saved,
)


def halves_of(
    data: Dataset, rows: np.ndarray, leads: tuple[int, ...] = tuple(range(12))
) -> tuple[torch.Tensor, np.ndarray]:
    """Every half that was recorded, in millivolts, other leads zero; and its crop."""
    halves, crops = [], []
    for row in rows.tolist():
        for half in range(int(data.column("halves")[row])):
            mv = data.read(row)[:, 2500 * half : 2500 * (half + 1)] / 1000.0
            mv[[lead for lead in range(12) if lead not in leads]] = 0
            halves.append(torch.tensor(mv, dtype=torch.float32))
            crops.append(row)
    return torch.stack(halves), np.array(crops)


def accuracy(
    gallery: torch.Tensor, probes: torch.Tensor, own: np.ndarray, asked: np.ndarray
) -> float:
    g, p = (torch.nn.functional.normalize(c.detach().double(), dim=1) for c in (gallery, probes))
    return float((own[(p @ g.T).argmax(1).numpy()] == asked).mean())


# Numbers
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leads", [None, "V2,ii"])
def test_diagnosis_scores_equal_a_loop_over_halves(
    leads: str | None, data: Dataset, diagnostic: Path, evaluated: Evaluated
) -> None:
    document = evaluated(
        diagnostic, "--role", "valid", "--batch", 3, *(("--leads", leads) if leads else ())
    )
    seen = (1, 7) if leads else tuple(range(12))
    x, crops = halves_of(data, data.select(dx="valid"), seen)
    probability = omnilead.load(diagnostic).logits(x).sigmoid().detach().numpy()[:, ::-1]
    labels = data.labels[crops]
    assert document["score"] == pytest.approx(challenge_score(labels, probability > 0.5), abs=1e-9)
    assert (document["n"], document["unit"], document["role"]) == (len(crops), "half", "valid")
    assert (document["data"], document["leads"]) == (
        data.fingerprint,
        ",".join(LEADS[lead] for lead in seen),
    )
    names = data.column("record")[crops]
    each = [np.flatnonzero(names == name) for name in np.unique(names)]
    means = np.stack([probability[rows].mean(0) > 0.5 for rows in each])
    of_records = challenge_score(np.stack([labels[rows[0]] for rows in each]), means)
    assert document["record"]["metrics"]["challenge"] == pytest.approx(of_records, abs=1e-9)
    assert (
        document["record"]["n"] == len(each) < len(np.unique(crops)) < document["n"]
    )  # some records have several crops
    assert document["classes"]["NSR"]["positives"] == labels[:, CLASSES.index("NSR")].sum()
    assert document["intervals"]["challenge"] == [None, None]  # too few patients of each class


def test_identification_equals_a_loop_over_gallery_crops(
    data: Dataset, pretrained: Path, evaluated: Evaluated
) -> None:
    """A model without a head, on the first 5 s of each crop."""
    document, model, patient = (
        evaluated(pretrained),
        omnilead.load(pretrained),
        data.column("patient"),
    )
    gallery, probe = data.select(identity="gallery"), data.select(identity="probe")
    first = [model.pooled(halves_of(data, rows)[0][::2]) for rows in (gallery, probe)]
    assert document["score"] == pytest.approx(accuracy(*first, patient[gallery], patient[probe]))
    assert (document["n"], document["gallery"], document["one_sided"]) == (100, 100, 0)
    assert (
        document["metrics"]["ties"] == 0
        and document["metrics"]["chance"] == 0.01 < document["score"]
    )


def test_identification_has_random_weights_of_the_architecture_beside_it(
    data: Dataset, pretrained: Path, evaluated: Evaluated, tmp_path: Path
) -> None:
    """`pretrained` has the random weights of seed 0."""
    trained = tmp_path / "trained"
    shutil.copytree(pretrained, trained)
    drawn = torch.Generator().manual_seed(1)
    weights = load_file(trained / "model.safetensors")
    changed = {name: w + 0.1 * torch.randn(w.shape, generator=drawn) for name, w in weights.items()}
    save_file(changed, trained / "model.safetensors", metadata={"format": "pt"})
    seal(trained, json.loads((trained / "config.json").read_text()))
    before, after = evaluated(pretrained), evaluated(trained)
    assert (
        before["metrics"]["random_weights"]
        == before["score"]
        == after["metrics"]["random_weights"]
        != after["score"]
    )
    assert after["intervals"]["random_weights"] == before["intervals"]["accuracy"]
    assert (
        "Random weights of the same architecture recognise as many patients"
        in before["remarks"][-1]
    )


def test_identification_in_validation_compares_the_halves_of_a_crop(
    data: Dataset, saved_model: Saved, evaluated: Evaluated
) -> None:
    folder = saved_model(head=IDENTIFICATION)
    document = evaluated(folder, "--role", "valid")
    rows = data.select(identity="valid")
    rows = rows[data.column("halves")[rows] == 2]
    c = omnilead.load(folder).pooled(halves_of(data, rows)[0])
    name = np.array(
        [
            p or r
            for p, r in zip(data.column("patient")[rows], data.column("record")[rows], strict=True)
        ]
    )
    assert document["score"] == pytest.approx(accuracy(c[::2], c[1::2], name, name))
    assert document["n"] == document["gallery"] == len(rows)


def test_a_model_of_three_leads(
    data: Dataset, saved_model: Saved, evaluated: Evaluated, refused: Refused
) -> None:
    folder = saved_model(leads=3, preprocessing={"leads": ["I", "II", "V2"]}, head=DIAGNOSIS)
    document = evaluated(folder, "--role", "valid")
    x, crops = halves_of(data, data.select(dx="valid"))
    probability = omnilead.load(folder).logits(x[:, [0, 1, 7]]).sigmoid().detach().numpy()
    assert document["score"] == pytest.approx(
        challenge_score(data.labels[crops], probability > 0.5), abs=1e-9
    )
    assert (
        document["leads"] == "I,II,V2"
        and evaluated(folder, "--role", "valid", "--leads", 3) == document
    )
    for leads, named in (("12", "I,II,V2"), ("2", "I,II,V2"), ("V9", "V9")):
        refused(f"--leads {leads}: .*{named}", folder, "--leads", leads)


def test_normalisation_uses_only_what_was_recorded(
    data: Dataset, saved_model: Saved, evaluated: Evaluated
) -> None:
    """A model of normalised signals: statistics are over the whole record, without the zeros after
    its end."""
    folder = saved_model(head=DIAGNOSIS, preprocessing={"scale": "zscore"})
    model = omnilead.load(folder)

    def scaled(rows: np.ndarray) -> list[torch.Tensor]:
        parts = []
        for row in rows.tolist():
            halves = int(data.column("halves")[row])
            uv = data.read(row)[:, : 2500 * halves].astype(float)
            z = (uv - uv.mean(1, keepdims=True)) / np.maximum(uv.std(1, keepdims=True), 1e-3)
            parts.append(
                torch.tensor(z, dtype=torch.float32).unflatten(1, (halves, 2500)).transpose(0, 1)
            )
        return parts

    rows, patient = data.select(dx="valid"), data.column("patient")
    probability = model.logits(torch.cat(scaled(rows))).sigmoid().detach().numpy()
    labels = np.repeat(data.labels[rows], data.column("halves")[rows], axis=0)
    document = evaluated(folder, "--role", "valid")
    assert document["score"] == pytest.approx(challenge_score(labels, probability > 0.5), abs=1e-9)
    sides = [data.select(identity=role) for role in ("gallery", "probe")]
    first = [model.pooled(torch.stack([x[0] for x in scaled(rows)])) for rows in sides]
    by_hand = accuracy(*first, *(patient[rows] for rows in sides))
    assert evaluated(folder, "--task", "identification")["score"] == pytest.approx(by_hand)
    gallery = results.identify(model, data, results.EvalOptions()).gallery_PD
    np.testing.assert_allclose(gallery, first[0].detach(), atol=1e-5)


# Other tasks
# ----------------------------------------------------------------------------------------------------------------

FOLDS = {
    "name": "rhythm",
    "kind": "multiclass",
    "columns": ["rhythm"],
    "classes": ["AF", "none", "other"],
    "split": "auto",
}
FOLDS |= {"folds": {"train": ["1"], "valid": ["2"], "test": ["3"]}, "labels": "rhythm.csv"}
RHYTHM = {
    "task": "rhythm",
    "kind": "multiclass",
    "classes": ["AF", "none", "other"],
    "definition": FOLDS,
}
BEATS = {
    "task": "beats",
    "kind": "multilabel",
    "classes": ["SB", "never"],
    "thresholds": [0.7, 0.2],
}
BEATS |= {"definition": {"name": "beats", "kind": "multilabel", "columns": ["SB", "never"]}}
AGE = {
    "task": "age",
    "kind": "regression",
    "classes": ["age"],
    "unit": "years",
    "center": [60.0],
    "scale": [15.0],
}


@pytest.fixture(scope="module")
def tables(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rhythm.csv, with folds by patient; beats.csv, with splits, in which a fifth is unknown."""
    place = tmp_path_factory.mktemp("tables")
    table = data.table(["source", "record"]).to_pydict()
    records = dict(zip(zip(*table.values(), strict=True), range(len(data)), strict=True))
    patient, dx = patient_ids([data])[0], data.labels
    lines: dict[str, list[str]] = {
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


def test_exclusive_classes_equal_a_loop(
    data: Dataset, tables: Path, saved_model: Saved, evaluated: Evaluated
) -> None:
    folder = saved_model(head=RHYTHM)
    document = evaluated(folder, "--labels", tables / "rhythm.csv")
    labels = read_task(
        TaskConfig("rhythm", "multiclass", labels=str(tables / "rhythm.csv")), [data]
    )
    x, crops = halves_of(data, labels.rows(0, "test"))
    p, y = omnilead.load(folder).logits(x).softmax(1).detach().numpy(), labels.y[0][crops]
    assert document["metrics"]["accuracy"] == pytest.approx((p.argmax(1) == y.argmax(1)).mean())
    assert document["score"] == pytest.approx(metrics.measure("multiclass", y, p)["auroc"])
    assert (document["task"], document["kind"], document["n"]) == (
        "rhythm",
        "multiclass",
        len(crops),
    )
    assert [document["classes"][name]["positives"] for name in RHYTHM["classes"]] == y.sum(
        0
    ).tolist()
    assert set(document["groups"]) == {"age", "sex", "source"} and not any(
        "leakage" in of for of in document["remarks"]
    )
    assert sum(of["n"] for of in document["groups"]["sex"].values()) == document["record"]["n"]
    rows, known = len(labels.rows(0, "test")), int((labels.split[0] > 0).sum())
    assert any(
        f"{rows} of {known} labelled crops are in the split test. To score all" in of
        for of in document["remarks"]
    )


def test_unknown_labels_thresholds_and_a_class_without_positives(
    data: Dataset,
    tables: Path,
    saved_model: Saved,
    evaluated: Evaluated,
    tmp_path: Path,
    capsys: Any,
) -> None:
    folder, table = saved_model(head=BEATS), tables / "beats.csv"
    document = evaluated(folder, "--labels", table, "--role", "valid")
    labels = read_task(TaskConfig("beats", labels=str(table)), [data])
    x, crops = halves_of(data, labels.rows(0, "valid"))
    p, y = omnilead.load(folder).scores(x).detach().numpy(), labels.y[0][crops]
    known = ~np.isnan(y[:, 0])
    assert document["classes"]["SB"]["predicted"] == (p[known, 0] > 0.7).sum()
    assert document["classes"]["SB"]["n"] == known.sum() < len(crops) == document["n"]
    assert document["thresholds"] == [0.7, 0.2] and document["classes"]["never"]["auroc"] is None
    remarks, unknown = (
        " ".join(document["remarks"]),
        f"{(~known).sum()} of {y.size} labels are unknown",
    )
    assert "1 of 2 classes have no positives: never." in remarks and unknown in remarks
    page = tmp_path / "page.html"
    assert (
        main(
            [
                "--model",
                str(folder),
                "--data",
                data.root.url,
                "--labels",
                str(table),
                "--report",
                str(page),
            ]
        )
        == 0
    )
    assert "SB" in capsys.readouterr().out and "records with the largest errors" in page.read_text()


def test_ages_of_the_dataset(data: Dataset, saved_model: Saved, evaluated: Evaluated) -> None:
    folder = saved_model(head=AGE)
    document = evaluated(folder, "--task", "age")
    rows = read_task(TaskConfig("age", "regression", columns=("age",), split="8:1:1"), [data]).rows(
        0, "test"
    )
    x, crops = halves_of(data, rows)
    error = (
        omnilead.load(folder).logits(x).detach().numpy()[:, 0] * 15 + 60 - data.column("age")[crops]
    )
    assert (
        document["score"]
        == document["metrics"]["mae"]
        == pytest.approx(np.abs(error).mean(), rel=1e-4)
    )
    assert document["value_unit"] == "years"
    assert document["classes"]["age"]["mean_error"] == pytest.approx(error.mean(), rel=1e-3)


def test_a_diagnosis_has_the_challenge_score_at_0_5_and_at_chosen_thresholds(
    data: Dataset, saved_model: Saved, evaluated: Evaluated
) -> None:
    before = evaluated(saved_model("a", head=DIAGNOSIS), "--role", "valid")
    chosen = [0.2] * 13 + [0.6] * 13
    model = saved_model("b", head=DIAGNOSIS | {"thresholds": chosen})
    after = evaluated(model, "--role", "valid")
    assert after["score"] == before["score"] and "as in the Challenge" in " ".join(after["remarks"])
    options, task = results.EvalOptions("valid"), results.load_task("diagnosis")
    result = results.score_task(omnilead.load(model), data, task, options)
    score = after["metrics"].pop("challenge_chosen")
    assert score == pytest.approx(
        challenge_score(result.labels_NK, result.scores_NK > np.array(chosen)), abs=1e-6
    )
    assert score != after["score"] and after["metrics"] == before["metrics"]
    text = [line[:18].rstrip() for line in lines(result.document())]
    assert text.index("challenge, chosen") == text.index("challenge at 0.5") + 1


def test_labels_that_a_model_names_are_not_opened(
    data: Dataset,
    tables: Path,
    saved_model: Saved,
    refused: Refused,
    evaluated: Evaluated,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    """They may be an address inside the network, or any file of this machine."""
    run, secret, opened = tmp_path / "run", tmp_path / "secret.csv", []
    secret.write_text("record,password\na,hunter2\n")
    (run / "code").mkdir(parents=True)
    monkeypatch.setattr(fsspec, "open", lambda url, *_: opened.append(url))
    monkeypatch.chdir(tables)
    for n, place in enumerate(
        (
            str(tables / "rhythm.csv"),
            str(secret),
            "http://127.0.0.1:1/x",
            "s3://b/l.csv",
            "rhythm.csv",
        )
    ):
        model = saved_model(f"m{n}", head=RHYTHM | {"definition": FOLDS | {"labels": place}})
        (run / "model").unlink(missing_ok=True)
        (run / "model").symlink_to(model)
        for config in ({"task": {"labels": place}}, {"base": str(secret)}):
            (run / "config.yaml").write_text(json.dumps(config))
            refused(
                f"the model does not keep the labels of its task rhythm, {place}: give them with "
                "--labels",
                run,
            )
    (run / "labels.parquet").symlink_to(secret)  # nor what lies elsewhere
    refused("the model does not keep the labels", run)
    named = saved_model("named", head=RHYTHM | {"task": str(secret), "definition": {}})
    refused("fine-tuned for .*secret.csv', which is no shipped task", named)
    assert not opened
    monkeypatch.undo()
    (run / "labels.parquet").unlink()
    parquet.write_table(
        read_table(str(tables / "rhythm.csv")), run / "labels.parquet"
    )  # as training leaves it
    assert (
        labels_of_run(str(run)) == str(run / "labels.parquet")
        and labels_of_run(f"{run}/model") == ""
    )
    kept, given = (evaluated(run, *how) for how in ((), ("--labels", tables / "rhythm.csv")))
    assert kept.pop("labels") == str(run / "labels.parquet") != given.pop("labels")
    assert kept == given


def test_labels_must_fit_the_model(
    tables: Path, saved_model: Saved, refused: Refused, tmp_path: Path
) -> None:
    rhythm, beats, folds = (
        saved_model("a", head=RHYTHM),
        saved_model("b", head=BEATS),
        tables / "rhythm.csv",
    )
    refused(
        "no column 'rhythm': its label columns are SB, never",
        rhythm,
        "--labels",
        tables / "beats.csv",
    )
    refused("no column 'SB'", beats, "--labels", folds)
    refused(
        "--task age: is regression, the model is fine-tuned for rhythm, which is multiclass",
        rhythm,
        "--task",
        "age",
    )
    refused("--task 'ages': .*did you mean age", rhythm, "--task", "ages")
    other = tmp_path / "other.csv"
    other.write_text(folds.read_text().replace("other", "strange"))
    refused("'strange' is not one of its classes AF, none, other", rhythm, "--labels", other)
    two = saved_model("c", head=RHYTHM | {"classes": ["AF", "none"]})
    refused("the model knows 2 classes, not other: use other --labels", two, "--labels", folds)
    four = saved_model("d", head=RHYTHM | {"classes": ["AF", "none", "other", "paced"]})
    refused(
        "the model knows 4 classes, of which the labels have AF, none, other",
        four,
        "--labels",
        folds,
    )
    lines = (tables / "beats.csv").read_text().splitlines()
    other.write_text("\n".join(line.replace(";test", ";valid") for line in lines))
    refused(f"{other}: no record of .* is in the split test", beats, "--labels", other)
    other.write_text("\n".join([lines[0], *(line.replace(";1;0", ";0;0") for line in lines[1:])]))
    refused("none of its .* crops of the split test has a positive label", beats, "--labels", other)


def test_folds_that_differ_from_training_are_a_warning(
    tables: Path, saved_model: Saved, evaluated: Evaluated
) -> None:
    folds = {"train": ["2"], "valid": ["1"], "test": ["3"]}
    folder = saved_model(head=RHYTHM | {"definition": FOLDS | {"folds": {}, "split": "8:1:1"}})
    assert not any(
        "leakage" in of for of in evaluated(folder, "--labels", tables / "rhythm.csv")["remarks"]
    )
    (tables / "task.yaml").write_text(
        json.dumps({"task": FOLDS | {"folds": folds, "labels": str(tables / "rhythm.csv")}})
    )
    assert any(
        "other folds" in of for of in evaluated(folder, "--task", tables / "task.yaml")["remarks"]
    )


def test_another_split_of_the_training_data_is_a_warning(
    data: Dataset, tables: Path, saved_model: Saved, evaluated: Evaluated
) -> None:
    """For example, because another label table has no column for the split."""
    table = tables / "rhythm.csv"
    trained = read_task(TaskConfig("rhythm", "multiclass", labels=str(table)), [data]).facts[
        "sha256"
    ]
    for digest, leaks in ((trained, False), ("another", True)):
        folder = saved_model(
            f"{digest[:7]}/model", head=RHYTHM | {"definition": FOLDS, "sha256": digest}
        )
        config = json.loads((folder / "config.json").read_text())
        seal(folder, config | {"trained": {"datasets": [data.fingerprint]}})
        remarks = evaluated(folder, "--labels", table)["remarks"]
        assert any("other labels or another split" in of for of in remarks) == leaks
        assert not any(
            "To score all" in of for of in remarks
        )  # a part of the training data is kept for the test


# Warnings
# -----------------------------------------------------------------------------------------------------------------


def test_the_report_and_the_remarks(
    copy: Any, diagnostic: Path, tmp_path: Path, capsys: Any
) -> None:
    page = tmp_path / "page.html"
    other = copy(plan="paper-split")
    assert (
        main(
            ["--model", str(diagnostic), "--data", other, "--role", "valid", "--report", str(page)]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == str(page)
    for words in ("classes have no positives", "--plan paper-split", "dataset.json"):
        assert words in text and words in page.read_text()
    assert len(text.splitlines()) < 16 and max(map(len, text.splitlines())) < 250


@pytest.mark.parametrize("roles", [{"test"}, {"gallery", "probe"}])
def test_crops_without_any_of_the_models_leads_are_left_out(
    roles: set[str],
    data: Dataset,
    diagnostic: Path,
    evaluated: Evaluated,
    refused: Refused,
    monkeypatch: Patch,
) -> None:
    role = data.column("dx_role" if roles == {"test"} else "id_role")
    task = "diagnosis" if roles == {"test"} else "identification"
    rows = np.flatnonzero(np.isin(role, list(roles)))
    lost = rows[[0, -1]]
    blank = np.isin(np.arange(len(data)), [*lost, *np.flatnonzero(role == "")])
    monkeypatch.setattr(results, "none_measured", lambda dataset, leads: blank & (leads == (7,)))
    few, whole = (
        evaluated(diagnostic, "--task", task, *leads) for leads in (("--leads", "V2"), ())
    )
    note = f"2 of {len(rows):,} crops are left out: none of V2 was recorded in them."
    assert note in few["remarks"] and not any("left out" in remark for remark in whole["remarks"])
    counted = [document["n"] + document.get("gallery", 0) for document in (whole, few)]
    assert counted[0] - counted[1] == (
        data.column("halves")[lost].sum() if task == "diagnosis" else 2
    )
    blank[:] = True
    refused(
        "no valid lead: the model uses V2, of which none was recorded",
        diagnostic,
        "--task",
        task,
        "--leads",
        "V2",
    )


def test_training_on_another_split_is_a_warning(
    data: Dataset, saved_model: Saved, evaluated: Evaluated
) -> None:
    folder, mine = saved_model(head=DIAGNOSIS), split_of(data)
    elsewhere = mine | {"fingerprint": "0", "seed": 1}
    for splits, warned in (
        ([mine], False),
        ([mine | {"fingerprint": "0"}], False),  # a role depends on the seed and on the patient
        ([elsewhere | {"sources": ["mimic-iv-ecg"]}], False),
        ([mine, elsewhere], True),  # of an earlier stage
        ("by hand", False),
    ):
        document = json.loads((folder / "config.json").read_text())
        seal(folder, document | {"trained": {"splits": splits}})
        remarks = evaluated(folder, "--role", "valid")["remarks"]
        assert any("(seed 1, here 0)" in remark for remark in remarks) == warned, splits
