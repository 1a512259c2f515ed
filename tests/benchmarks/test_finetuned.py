"""Fine-tuned models are scored as `omnilead evaluate` scores them; starts are compared seed by
seed, patient by patient."""

import json

import numpy as np
import pytest

import omnilead
from benchmarks import finetuned, trials
from omnilead.data_tools.dataset import CLASSES
from omnilead.downstream.evaluation.identification import identify
from omnilead.downstream.evaluation.results import EvalOptions, find_task, score_task
from omnilead.engine.data.datasets import Datasets
from tests.conftest import save_model

DIAGNOSIS = {
    "task": "diagnosis",
    "kind": "multilabel",
    "classes": list(CLASSES),
    "thresholds": [0.5] * 25 + [0.9],
}


def run_of(folder, name, converged=True, **model):
    save_model(folder / name / "model", **model)
    (folder / name / "result.json").write_text(
        json.dumps({"converged": converged, "validations_since": 10 * converged})
    )
    return f"{name}={folder / name}"


def scored(runs, task, dataset, folder):
    words = ["--data", dataset.root.url, "--out", str(folder / "out"), "--task", task]
    assert finetuned.main([*runs, *words]) == 0
    return json.loads((folder / "out/bench.json").read_text())


def test_means_over_seeds_and_their_differences(dataset, tmp_path):
    runs = [run_of(tmp_path, "diagnosis-1-random-1", head=DIAGNOSIS)]  # of other leads
    for n in (1, 2):
        runs.append(run_of(tmp_path, f"diagnosis-12-random-{n}", head=DIAGNOSIS))
        w2v = f"diagnosis-12-w2v-x-{n}"
        runs.append(run_of(tmp_path, w2v, n == 1, head=DIAGNOSIS, layers=3 - n))
    facts = {"config": {"train": {"lr": 1e-4}}, "rates": [["0.0001", 25], ["1e-05", 25]]}
    (tmp_path / "diagnosis-12-w2v-x-1/run.json").write_text(json.dumps(facts))
    found = scored(runs, "diagnosis", dataset, tmp_path)
    tuned, random = found["rows"]
    assert list(found["models"]) == ["w2v-x", "random"] == [tuned["model"], random["model"]]
    model = omnilead.load(tmp_path / "diagnosis-12-random-1")
    whole = score_task(
        model, Datasets((dataset,)), find_task(model), EvalOptions(leads="12")
    ).record_scores
    assert tuned["n"] == random["n"] == whole["n"] and random["patients"] == whole["patients"]
    names = ["auroc", "auprc", "brier", "challenge", "challenge_chosen"]
    assert {name: of[:1] for name, of in random["each"].items()} == {
        name: [pytest.approx(whole["metrics"][name], abs=1e-6)] for name in names
    }
    gaps = [gap for gap in found["differences"] if gap["against"] == "random"]
    assert [gap["metric"] for gap in gaps] == list(tuned["metrics"])
    for gap in gaps:  # the first seed's models are equal
        one, two = tuned["each"][gap["metric"]]
        assert random["each"][gap["metric"]] == [pytest.approx(one, abs=1e-9)] * 2
        assert gap["difference"] == pytest.approx((two - one) / 2, abs=1e-6)
        assert gap["interval"][0] <= gap["difference"] <= gap["interval"][1]
    assert found["notes"][1:] == [
        "diagnosis, leads 12, w2v-x: 1 of 2 not converged, 1 of them best at the last step.",
        "diagnosis, leads 12, w2v-x: the chosen learning rate, 0.0001, is the highest tried.",
    ]


def test_identification_is_scored_as_by_evaluate(dataset, tmp_path):
    runs = [run_of(tmp_path, "identification-12-random-1")]
    (row,) = scored(runs, "identification", dataset, tmp_path)["rows"]
    model = omnilead.load(tmp_path / "identification-12-random-1")
    probes = identify(model, Datasets((dataset,)), EvalOptions(leads="12")).scores
    assert row["metrics"]["accuracy"] == pytest.approx(np.mean(probes["hits"]))
    assert row["n"] == probes["n_probes"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["a"],
            "no NAME has the form diagnosis-12-START-SEED: give each run as NAME=RUN with such a NAME",
        ),
        (
            ["diagnosis-12-random-1", "diagnosis-12-random-2", "diagnosis-12-w2v-1"],
            "the starts have different seeds: random 1 2; w2v 1: give runs with the same seeds for each start",
        ),
    ],
)
def test_wrong_runs_are_one_line(names, says, dataset, tmp_path, capsys):
    words = ["--task", "diagnosis", "--data", dataset.root.url, "--out", str(tmp_path)]
    assert finetuned.main([*(f"{name}=RUN" for name in names), *words]) == 2
    assert capsys.readouterr().err == f"benchmarks.finetuned: {says}\n"


@pytest.mark.parametrize(("higher", "best"), [(True, "1e-3"), (False, "1e-4")])
def test_of_several_rates_the_best_by_validation_is_copied(higher, best, tmp_path):
    for rate, value in (("1e-4", 0.25), ("1e-3", 0.75), ("1e-2", 0.5)):
        result = {"best": value, "higher_is_better": higher, "step": 9, "converged": True}
        (tmp_path / rate).mkdir()
        (tmp_path / rate / "result.json").write_text(json.dumps(result))
        (tmp_path / rate / "run.json").write_text(json.dumps({"rate": rate}))
    runs = [f"A-{rate}={tmp_path / rate}" for rate in ("1e-4", "1e-3", "1e-2")]
    assert trials.main([*runs, "B-1=nowhere", "--of", "A", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out/run.json").read_text())
    assert found["rate"] == best and found["rates"][1] == ["0.001", 9, "0.7500", "yes"]
