"""engine.evaluate: its numbers against plain loops over the same crops, its warnings, and what it refuses."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import engine
from data_tools.build import ShardOptions, shard
from data_tools.dataset import CLASSES, Dataset, fingerprint
from data_tools.sources import open_sources
from data_tools.splits import RoleSources
from data_tools.synth import synthesise
from engine.common import LEADS
from engine.data.leakage import patient_ids, split_of
from engine.evaluate import labels_of_run, lines, main
from engine.evaluation import metrics, results
from engine.evaluation.metrics import challenge_score
from engine.model.folder import seal
from engine.tasks.config import TaskConfig
from engine.tasks.labels import TaskLabels, read_task
from tests.conftest import save_model
from tests.engine.training.ranks import free_port
from tests.forks import started

Saved, Evaluated, Refused = Callable[..., Path], Callable[..., dict[str, Any]], Callable[..., None]
Patch = pytest.MonkeyPatch
DIAGNOSIS = {"task": "diagnosis", "classes": list(CLASSES)}
IDENTIFICATION = {"task": "identification"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """One of the validation crops has only one half."""
    place = tmp_path_factory.mktemp("evaluate")
    synthesise(place / "archive", patients=100, two_sessions=1, seed=5, progress=False)
    options = ShardOptions(str(place / "dataset"), role_sources=RoleSources(id_share=1.0), quiet=True)
    dataset = shard(open_sources(str(place / "archive")), options)
    assert sorted(set(dataset.column("halves")[dataset.select(dx="valid")].tolist())) == [1, 2]
    return dataset


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("pretrained") / "model")


@pytest.fixture(scope="module")
def diagnostic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head has the classes in another order."""
    return save_model(tmp_path_factory.mktemp("diagnostic") / "model", head=DIAGNOSIS | {"classes": list(reversed(CLASSES))})


@pytest.fixture(autouse=True)
def quick(monkeypatch: Patch) -> None:
    monkeypatch.setattr(results, "bootstrap", lambda statistic, groups, n: metrics.bootstrap(statistic, groups, n // 50))


def quick_main(arguments: list[str]) -> int:
    """In a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "bootstrap", lambda statistic, groups, n: metrics.bootstrap(statistic, groups, n // 50))
        return main(arguments)


@pytest.fixture
def copy(data: Dataset, tmp_path: Path) -> Callable[..., str]:
    """The same dataset with changes in dataset.json."""

    def make(**changes: Any) -> str:
        place = tmp_path / "copy"
        place.mkdir()
        for name in ("samples.parquet", "shards"):
            (place / name).symlink_to(Path(data.root.url) / name)
        meta = data.meta | changes
        (place / "dataset.json").write_text(json.dumps(meta | {"fingerprint": fingerprint(meta)}))
        return str(place)

    return make


@pytest.fixture
def evaluated(data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Evaluated:
    def run(model: Path, *arguments: object) -> dict[str, Any]:
        code = main([str(a) for a in ("--model", model, "--data", data.root.url, "--json", tmp_path / "f.json", *arguments)])
        text, err = capsys.readouterr()
        assert (code, err) == (0, "")
        document: dict[str, Any] = json.loads((tmp_path / "f.json").read_text())
        assert f"{document['score']:.4f}" in text and document["score"] == next(iter(document["metrics"].values()))
        assert all(remark in text.splitlines() for remark in document["remarks"])
        return document

    return run


@pytest.fixture
def refused(data: Dataset, capsys: pytest.CaptureFixture[str]) -> Refused:
    def run(pattern: str, model: object, *arguments: object, code: int = 2) -> None:
        ended = main([str(a) for a in ("--model", model, "--data", data.root.url, *arguments)])
        out, err = capsys.readouterr()
        assert (ended, out, err.count("\n")) == (code, "", 1), err
        assert err.startswith("omnilead evaluate: ") and re.search(pattern, err), err

    return run


def halves_of(data: Dataset, rows: np.ndarray, leads: tuple[int, ...] = tuple(range(12))) -> tuple[torch.Tensor, np.ndarray]:
    """Every half that was recorded, in millivolts, other leads zero; and its crop."""
    halves, crops = [], []
    for row in rows.tolist():
        for half in range(int(data.column("halves")[row])):
            mv = data.read(row)[:, 2500 * half : 2500 * (half + 1)] / 1000.0
            mv[[lead for lead in range(12) if lead not in leads]] = 0
            halves.append(torch.tensor(mv, dtype=torch.float32))
            crops.append(row)
    return torch.stack(halves), np.array(crops)


def accuracy(gallery: torch.Tensor, probes: torch.Tensor, own: np.ndarray, asked: np.ndarray) -> float:
    g, p = (torch.nn.functional.normalize(c.detach().double(), dim=1) for c in (gallery, probes))
    return float((own[(p @ g.T).argmax(1).numpy()] == asked).mean())


# Numbers ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leads", [None, "V2,ii"])
def test_diagnosis_scores_equal_a_loop_over_halves(
    leads: str | None, data: Dataset, diagnostic: Path, evaluated: Evaluated
) -> None:
    document = evaluated(diagnostic, "--role", "valid", "--batch", 3, *(("--leads", leads) if leads else ()))
    seen = (1, 7) if leads else tuple(range(12))
    x, crops = halves_of(data, data.select(dx="valid"), seen)
    probability = engine.load(diagnostic).logits(x).sigmoid().detach().numpy()[:, ::-1]
    labels = data.labels[crops]
    assert document["score"] == pytest.approx(challenge_score(labels, probability > 0.5), abs=1e-9)
    assert (document["n"], document["unit"], document["role"]) == (len(crops), "half", "valid")
    assert (document["data"], document["leads"]) == (data.fingerprint, ",".join(LEADS[lead] for lead in seen))
    names = data.column("record")[crops]
    each = [np.flatnonzero(names == name) for name in np.unique(names)]
    means = np.stack([probability[rows].mean(0) > 0.5 for rows in each])
    of_records = challenge_score(np.stack([labels[rows[0]] for rows in each]), means)
    assert document["record"]["metrics"]["challenge"] == pytest.approx(of_records, abs=1e-9)
    assert document["record"]["n"] == len(each) < len(np.unique(crops)) < document["n"]  # some records have several crops
    assert document["classes"]["NSR"]["positives"] == labels[:, CLASSES.index("NSR")].sum()
    assert document["intervals"]["challenge"][0] <= document["score"] <= document["intervals"]["challenge"][1]


def test_identification_equals_a_loop_over_gallery_crops(data: Dataset, pretrained: Path, evaluated: Evaluated) -> None:
    """A model without a head, on the first 5 s of each crop."""
    document, model, patient = evaluated(pretrained), engine.load(pretrained), data.column("patient")
    gallery, probe = data.select(identity="gallery"), data.select(identity="probe")
    first = [model.pooled(halves_of(data, rows)[0][::2]) for rows in (gallery, probe)]
    assert document["score"] == pytest.approx(accuracy(*first, patient[gallery], patient[probe]))
    assert (document["n"], document["gallery"], document["one_sided"]) == (100, 100, 0)
    assert document["metrics"]["ties"] == 0 and document["metrics"]["chance"] == 0.01 < document["score"]


def test_identification_in_validation_compares_the_halves_of_a_crop(
    data: Dataset, saved_model: Saved, evaluated: Evaluated
) -> None:
    folder = saved_model(head=IDENTIFICATION)
    document = evaluated(folder, "--role", "valid")
    rows = data.select(identity="valid")
    rows = rows[data.column("halves")[rows] == 2]
    c = engine.load(folder).pooled(halves_of(data, rows)[0])
    name = np.array([p or r for p, r in zip(data.column("patient")[rows], data.column("record")[rows], strict=True)])
    assert document["score"] == pytest.approx(accuracy(c[::2], c[1::2], name, name))
    assert document["n"] == document["gallery"] == len(rows)


def test_a_model_of_three_leads(data: Dataset, saved_model: Saved, evaluated: Evaluated, refused: Refused) -> None:
    folder = saved_model(leads=3, preprocessing={"leads": ["I", "II", "V2"]}, head=DIAGNOSIS)
    document = evaluated(folder, "--role", "valid")
    x, crops = halves_of(data, data.select(dx="valid"))
    probability = engine.load(folder).logits(x[:, [0, 1, 7]]).sigmoid().detach().numpy()
    assert document["score"] == pytest.approx(challenge_score(data.labels[crops], probability > 0.5), abs=1e-9)
    assert document["leads"] == "I,II,V2" and evaluated(folder, "--role", "valid", "--leads", 3) == document
    for leads, named in (("12", "I,II,V2"), ("2", "I,II,V2"), ("V9", "V9")):
        refused(f"--leads {leads}: .*{named}", folder, "--leads", leads)


def test_normalisation_uses_only_what_was_recorded(data: Dataset, saved_model: Saved, evaluated: Evaluated) -> None:
    """A model of normalised signals: statistics are over the whole record, without the zeros after its end."""
    folder = saved_model(head=DIAGNOSIS, preprocessing={"scale": "zscore"})
    model = engine.load(folder)

    def scaled(rows: np.ndarray) -> list[torch.Tensor]:
        parts = []
        for row in rows.tolist():
            halves = int(data.column("halves")[row])
            uv = data.read(row)[:, : 2500 * halves].astype(float)
            z = (uv - uv.mean(1, keepdims=True)) / np.maximum(uv.std(1, keepdims=True), 1e-3)
            parts.append(torch.tensor(z, dtype=torch.float32).unflatten(1, (halves, 2500)).transpose(0, 1))
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


# Other tasks ----------------------------------------------------------------------------------------------------------------

FOLDS = {"name": "rhythm", "kind": "multiclass", "columns": ["rhythm"], "classes": ["AF", "none", "other"], "split": "auto"}
FOLDS |= {"folds": {"train": ["1"], "valid": ["2"], "test": ["3"]}, "labels": "rhythm.csv"}
RHYTHM = {"task": "rhythm", "kind": "multiclass", "classes": ["AF", "none", "other"], "definition": FOLDS}
BEATS = {"task": "beats", "kind": "multilabel", "classes": ["SB", "never"], "thresholds": [0.7, 0.2]}
BEATS |= {"definition": {"name": "beats", "kind": "multilabel", "columns": ["SB", "never"]}}
AGE = {"task": "age", "kind": "regression", "classes": ["age"], "unit": "years", "center": [60.0], "scale": [15.0]}


@pytest.fixture(scope="module")
def tables(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rhythm.csv, with folds by patient; beats.csv, with splits, in which a fifth is unknown."""
    place = tmp_path_factory.mktemp("tables")
    table = data.table(["source", "record"]).to_pydict()
    records = dict(zip(zip(*table.values(), strict=True), range(len(data)), strict=True))
    patient, dx = patient_ids([data])[0], data.labels
    lines: dict[str, list[str]] = {"rhythm": ["record,source,rhythm,fold"], "beats": ["record;source;SB;never;split"]}
    for (source, record), row in records.items():
        af, sb = dx[row, CLASSES.index("AF")], int(dx[row, CLASSES.index("SB")])
        rhythm = "AF" if af else "none" if dx[row, CLASSES.index("NSR")] else "other"
        lines["rhythm"].append(f"{record},{source},{rhythm},{patient[row] % 5 % 3 + 1}")
        split = ("train", "valid", "test")[patient[row] % 5 % 3]
        lines["beats"].append(f"{record};{source};{sb if row % 5 else ''};0;{split}")
    for name, content in lines.items():
        (place / f"{name}.csv").write_text("\n".join(content))
    return place


def test_exclusive_classes_equal_a_loop(data: Dataset, tables: Path, saved_model: Saved, evaluated: Evaluated) -> None:
    folder = saved_model(head=RHYTHM)
    document = evaluated(folder, "--labels", tables / "rhythm.csv")
    labels = read_task(TaskConfig("rhythm", "multiclass", labels=str(tables / "rhythm.csv")), [data])
    x, crops = halves_of(data, labels.rows(0, "test"))
    p, y = engine.load(folder).logits(x).softmax(1).detach().numpy(), labels.y[0][crops]
    assert document["metrics"]["accuracy"] == pytest.approx((p.argmax(1) == y.argmax(1)).mean())
    assert document["score"] == pytest.approx(metrics.measure("multiclass", y, p)["auroc"])
    assert (document["task"], document["kind"], document["n"]) == ("rhythm", "multiclass", len(crops))
    assert [document["classes"][name]["positives"] for name in RHYTHM["classes"]] == y.sum(0).tolist()
    assert set(document["groups"]) == {"age", "sex", "source"} and not any("leakage" in of for of in document["remarks"])
    assert sum(of["n"] for of in document["groups"]["sex"].values()) == document["record"]["n"]


def test_unknown_labels_thresholds_and_a_class_without_positives(
    data: Dataset, tables: Path, saved_model: Saved, evaluated: Evaluated, tmp_path: Path, capsys: Any
) -> None:
    folder, table = saved_model(head=BEATS), tables / "beats.csv"
    document = evaluated(folder, "--labels", table, "--role", "valid")
    labels = read_task(TaskConfig("beats", labels=str(table)), [data])
    x, crops = halves_of(data, labels.rows(0, "valid"))
    p, y = engine.load(folder).scores(x).detach().numpy(), labels.y[0][crops]
    known = ~np.isnan(y[:, 0])
    assert document["classes"]["SB"]["predicted"] == (p[known, 0] > 0.7).sum()
    assert document["classes"]["SB"]["n"] == known.sum() < len(crops) == document["n"]
    assert document["thresholds"] == [0.7, 0.2] and document["classes"]["never"]["auroc"] is None
    remarks, unknown = " ".join(document["remarks"]), f"{(~known).sum()} of {y.size} labels are unknown"
    assert "1 of 2 classes have no positives: never." in remarks and unknown in remarks
    page = tmp_path / "page.html"
    assert main(["--model", str(folder), "--data", data.root.url, "--labels", str(table), "--report", str(page)]) == 0
    assert "SB" in capsys.readouterr().out and "records with the largest errors" in page.read_text()


def test_ages_of_the_dataset(data: Dataset, saved_model: Saved, evaluated: Evaluated) -> None:
    folder = saved_model(head=AGE)
    document = evaluated(folder, "--task", "age")
    rows = read_task(TaskConfig("age", "regression", columns=("age",), split="8:1:1"), [data]).rows(0, "test")
    x, crops = halves_of(data, rows)
    error = engine.load(folder).logits(x).detach().numpy()[:, 0] * 15 + 60 - data.column("age")[crops]
    assert document["score"] == document["metrics"]["mae"] == pytest.approx(np.abs(error).mean(), rel=1e-4)
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
    result = results.score_task(engine.load(model), data, task, options)
    score = after["metrics"].pop("challenge_chosen")
    assert score == pytest.approx(challenge_score(result.labels_NK, result.scores_NK > np.array(chosen)), abs=1e-6)
    assert score != after["score"] and after["metrics"] == before["metrics"]
    low, high = after["intervals"]["challenge_chosen"]
    assert low <= score <= high
    text = [line[:18].rstrip() for line in lines(result.document())]
    assert text.index("challenge, chosen") == text.index("challenge at 0.5") + 1


def test_labels_must_fit_the_model(tables: Path, saved_model: Saved, refused: Refused, tmp_path: Path) -> None:
    rhythm, beats, folds = saved_model("a", head=RHYTHM), saved_model("b", head=BEATS), tables / "rhythm.csv"
    refused("labels of the task rhythm are not in rhythm.csv: .*--labels", rhythm)
    run = tmp_path / "run"  # of a run the table is found where it was in training
    run.mkdir()
    (run / "model").symlink_to(rhythm)
    (run / "config.yaml").write_text(json.dumps({"task": {"labels": str(tables / "rhythm.csv")}}))
    assert labels_of_run(str(run)) == str(tables / "rhythm.csv") and labels_of_run(str(rhythm)) == ""
    (run / "config.yaml").write_text(json.dumps({"task": {"labels": str(tables / "moved.csv")}}))
    refused("labels of the task rhythm are not in rhythm.csv: .*--labels", run)
    refused("no column 'rhythm': its label columns are SB, never", rhythm, "--labels", tables / "beats.csv")
    refused("no column 'SB'", beats, "--labels", folds)
    refused("--task age: is regression, the model is fine-tuned for rhythm, which is multiclass", rhythm, "--task", "age")
    refused("--task 'ages': .*did you mean age", rhythm, "--task", "ages")
    other = tmp_path / "other.csv"
    other.write_text(folds.read_text().replace("other", "strange"))
    refused("'strange' is not one of its classes AF, none, other", rhythm, "--labels", other)
    two = saved_model("c", head=RHYTHM | {"classes": ["AF", "none"]})
    refused("the model knows 2 classes, not other: use other --labels", two, "--labels", folds)
    four = saved_model("d", head=RHYTHM | {"classes": ["AF", "none", "other", "paced"]})
    refused("the model knows 4 classes, of which the labels have AF, none, other", four, "--labels", folds)
    lines = (tables / "beats.csv").read_text().splitlines()
    other.write_text("\n".join(line.replace(";test", ";valid") for line in lines))
    refused(f"{other}: no record of .* is in the split test", beats, "--labels", other)
    other.write_text("\n".join([lines[0], *(line.replace(";1;0", ";0;0") for line in lines[1:])]))
    refused("none of its .* crops of the split test has a positive label", beats, "--labels", other)


def test_folds_that_differ_from_training_are_a_warning(tables: Path, saved_model: Saved, evaluated: Evaluated) -> None:
    folds = {"train": ["2"], "valid": ["1"], "test": ["3"]}
    folder = saved_model(head=RHYTHM | {"definition": FOLDS | {"folds": {}, "split": "8:1:1"}})
    assert not any("leakage" in of for of in evaluated(folder, "--labels", tables / "rhythm.csv")["remarks"])
    (tables / "task.yaml").write_text(json.dumps({"task": FOLDS | {"folds": folds, "labels": str(tables / "rhythm.csv")}}))
    assert any("other folds" in of for of in evaluated(folder, "--task", tables / "task.yaml")["remarks"])


def test_another_split_of_the_training_data_is_a_warning(
    data: Dataset, tables: Path, saved_model: Saved, evaluated: Evaluated
) -> None:
    """For example, because another label table has no column for the split."""
    table = tables / "rhythm.csv"
    trained = read_task(TaskConfig("rhythm", "multiclass", labels=str(table)), [data]).facts["sha256"]
    for digest, leaks in ((trained, False), ("another", True)):
        folder = saved_model(f"{digest[:7]}/model", head=RHYTHM | {"definition": FOLDS, "sha256": digest})
        config = json.loads((folder / "config.json").read_text())
        seal(folder, config | {"trained": {"datasets": [data.fingerprint]}})
        assert any("other labels or another split" in of for of in evaluated(folder, "--labels", table)["remarks"]) == leaks


# Warnings -----------------------------------------------------------------------------------------------------------------


def test_the_report_and_the_remarks(copy: Any, diagnostic: Path, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "page.html"
    other = copy(plan="paper-split")
    assert main(["--model", str(diagnostic), "--data", other, "--role", "valid", "--report", str(page)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == str(page)
    for words in ("classes have no positives", "--plan paper-split", "dataset.json"):
        assert words in text and words in page.read_text()
    assert len(text.splitlines()) < 16 and max(map(len, text.splitlines())) < 250


@pytest.mark.parametrize("roles", [{"test"}, {"gallery", "probe"}])
def test_crops_without_any_of_the_models_leads_are_left_out(
    roles: set[str], data: Dataset, diagnostic: Path, evaluated: Evaluated, refused: Refused, monkeypatch: Patch
) -> None:
    role = data.column("dx_role" if roles == {"test"} else "id_role")
    task = "diagnosis" if roles == {"test"} else "identification"
    rows = np.flatnonzero(np.isin(role, list(roles)))
    lost = rows[[0, -1]]
    blank = np.isin(np.arange(len(data)), [*lost, *np.flatnonzero(role == "")])
    monkeypatch.setattr(results, "none_measured", lambda dataset, leads: blank & (leads == (7,)))
    few, whole = (evaluated(diagnostic, "--task", task, *leads) for leads in (("--leads", "V2"), ()))
    note = f"2 of {len(rows):,} crops are left out: none of V2 was recorded in them."
    assert note in few["remarks"] and not any("left out" in remark for remark in whole["remarks"])
    counted = [document["n"] + document.get("gallery", 0) for document in (whole, few)]
    assert counted[0] - counted[1] == (data.column("halves")[lost].sum() if task == "diagnosis" else 2)
    blank[:] = True
    refused("no valid lead: the model uses V2, of which none was recorded", diagnostic, "--task", task, "--leads", "V2")


def test_training_on_another_split_is_a_warning(data: Dataset, saved_model: Saved, evaluated: Evaluated) -> None:
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


# Errors -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "task", "pattern"),
    [
        (None, "diagnosis", "no head, it is only pre-trained: fine-tune it"),
        (IDENTIFICATION, "diagnosis", "no head, it is fine-tuned for identification"),
        ({"task": "diagnosis", "classes": ["AF", "NSR"]}, "auto", "2 classes, not AFL, BBB"),
    ],
)
def test_a_model_without_the_tasks_head(head: Any, task: str, pattern: str, saved_model: Saved, refused: Refused) -> None:
    refused(pattern, saved_model(head=head), "--task", task)


def test_data_without_held_out_crops(data: Dataset, diagnostic: Path, refused: Refused, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Dataset, "labels", np.zeros((len(data), 26), bool))
        refused(r"none of its \d+ crops with dx=test has a scored diagnosis", diagnostic)
    select = Dataset.select
    monkeypatch.setattr(Dataset, "select", lambda self, **role: select(self, **role)[:0])
    monkeypatch.setattr(TaskLabels, "rows", lambda self, *split: np.zeros(0, int))
    refused("no crop has dx=test: .*--plan paper, .* shard --dx-sources", diagnostic)
    refused("no crop has id=gallery", diagnostic, "--task", "identification")
    refused("no crop has id=valid and two halves", diagnostic, "--task", "identification", "--role", "valid")


def test_arguments_and_files_are_checked_before_the_work(pretrained: Path, tmp_path: Path, refused: Refused) -> None:
    refused("none: no dataset.json", pretrained, "--data", tmp_path / "none")
    refused("none: ", tmp_path / "none")
    refused("--json .*none", pretrained, "--json", tmp_path / "none" / "f.json")
    refused(f"--report {tmp_path}: ", pretrained, "--report", tmp_path)
    refused("--batch 0", pretrained, "--batch", 0)
    refused("the same file", pretrained, "--json", tmp_path / "f", "--report", tmp_path / ".." / tmp_path.name / "f")
    if not torch.cuda.is_available():
        refused("--device cuda", pretrained, "--device", "cuda")


def test_a_full_disk_names_the_output(data: Dataset, pretrained: Path, tmp_path: Path, capsys: Any, monkeypatch: Patch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("engine.common.os.fsync", full)
    assert main(["--model", str(pretrained), "--data", data.root.url, "--json", str(tmp_path / "f")]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"omnilead evaluate: --json {tmp_path / 'f'}: No space left on device: ")
    assert err.count("\n") == 1 and not (tmp_path / "f").exists()


def test_a_closed_pipe_ends_it_silently(data: Dataset, pretrained: Path, capsys: Any, monkeypatch: Patch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert main(["--model", str(pretrained), "--data", data.root.url]) == 0
    assert capsys.readouterr().err == ""


def test_interrupted_is_one_line(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.evaluate.evaluate", stopped)
    assert main(["--model", "m", "--data", "d"]) == 130
    assert capsys.readouterr().err == "omnilead evaluate: interrupted\n"


@pytest.mark.parametrize(("key", "value"), [("fs_hz", 250), ("uv_per_lsb", 4.88)])
def test_another_rate_or_unit_is_refused(key: str, value: float, copy: Any, pretrained: Path, refused: Refused) -> None:
    refused(f"{key}={value}, the model takes", pretrained, "--data", copy(**{key: value}))


@pytest.mark.parametrize("head", [DIAGNOSIS, IDENTIFICATION], ids=["diagnosis", "identification"])
def test_nan_outputs_of_a_model_are_refused(head: Any, saved_model: Saved, tmp_path: Path, refused: Refused) -> None:
    folder = saved_model(head=head)
    weights = load_file(folder / "model.safetensors")
    weights[next(name for name in weights if name.startswith("encoder.layers"))][:] = np.nan
    save_file(weights, folder / "model.safetensors")
    seal(folder, json.loads((folder / "config.json").read_text()))
    refused(r"NaN for \d+ of|embeddings are not finite", folder, "--json", tmp_path / "f.json", code=1)
    assert not (tmp_path / "f.json").exists()


def damaged(data: Dataset, row: int, place: Path) -> Path:
    shutil.copytree(data.root.url, place)
    number, offset, _ = (int(column[row]) for column in data.addresses)
    path = place / "shards" / str(data.shards[number]["name"])
    content = bytearray(path.read_bytes())
    content[offset + 100] ^= 1
    path.write_bytes(content)
    return place


def test_a_damaged_crop_is_named(data: Dataset, diagnostic: Path, tmp_path: Path, refused: Refused) -> None:
    row = int(data.select(dx="test")[0])
    refused(rf"00000.tar: crop {row} at byte \d+: .*crc32c", diagnostic, "--data", damaged(data, row, tmp_path / "damaged"))


def test_public_data_need_no_credentials(pretrained: Path, refused: Refused, monkeypatch: Patch) -> None:
    def open_dataset(url: str, anonymous: bool = False) -> Dataset:
        raise FileNotFoundError(2, f"anonymous={anonymous}", url)

    monkeypatch.setattr(Dataset, "open", open_dataset)
    refused("s3://b/d: anonymous=True", pretrained, "--data", "s3://b/d", "--anonymous")


def test_ranks_share_the_crops(diagnostic: Path, data: Dataset, tmp_path: Path) -> None:
    """The same bytes as from one process; a rank that meets a damaged crop ends the others."""
    alone, shared = tmp_path / "alone.json", tmp_path / "shared.json"
    arguments = ["--model", str(diagnostic), "--data", data.root.url, "--batch", "4", "--json"]
    assert main([*arguments, str(alone)]) == 0
    codes, said = of_two_ranks([*arguments, str(shared)], tmp_path)
    assert codes == [0, 0] and said.count("challenge") == 1 and shared.read_bytes() == alone.read_bytes(), said
    row = int(data.select(dx="test")[-1])
    url = damaged(data, row, tmp_path / "copy")
    codes, said = of_two_ranks(["--model", str(diagnostic), "--data", str(url), "--batch", "4"], tmp_path)
    assert sorted(codes) == [1, 2] and f"crop {row} at byte" in said and "another rank died" in said


def of_two_ranks(arguments: list[str], folder: Path) -> tuple[list[int], str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [place | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(2)]
    both = [started(quick_main, [*arguments, f"--local_rank={n}"], out=folder / "said", env=ranks[n]) for n in range(2)]
    for process in both:
        process.join()
    said = (folder / "said").read_text()
    (folder / "said").unlink()
    return [process.exitcode for process in both], said
