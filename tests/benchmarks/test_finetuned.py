"""Fine-tuned models are scored as `omnilead evaluate` scores them; starts are compared seed by
seed, patient by patient."""

import json

import numpy as np
import pytest

import omnilead
from benchmarks import finetuned
from omnilead.data_tools.dataset import CLASSES
from omnilead.engine.evaluation.results import EvalOptions, identify, score_task
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


def test_means_over_seeds_and_their_differences(dataset, tmp_path):
    runs = [run_of(tmp_path, f"diagnosis-12-random-{seed}", head=DIAGNOSIS) for seed in (1, 2)]
    runs += [
        run_of(tmp_path, f"diagnosis-12-w2v-x-{n + 1}", not n, head=DIAGNOSIS, layers=2 - n)
        for n in (0, 1)
    ]
    runs += [
        run_of(tmp_path, "diagnosis-1-random-1", head=DIAGNOSIS),
        run_of(tmp_path, "identification-12-random-1"),
    ]
    tried = [["0.0001", 25, "0.9", "yes"], ["1e-05", 25, "0.8", "yes"]]
    facts = {"config": {"train": {"lr": 1e-4}}, "rates": tried}
    (tmp_path / "diagnosis-12-w2v-x-1/run.json").write_text(json.dumps(facts))
    words = ["--data", dataset.root.url, "--out", str(tmp_path / "out"), "--task"]
    assert finetuned.main([*runs, *words, "diagnosis"]) == 0
    found = json.loads((tmp_path / "out/bench.json").read_text())
    tuned, random = found["rows"]
    assert list(found["models"]) == ["w2v-x", "random"] == [tuned["model"], random["model"]]

    model = omnilead.load(str(tmp_path / "diagnosis-12-random-1"))
    task = finetuned.chosen_task(model)
    whole = score_task(model, dataset, task, EvalOptions(leads="12")).record
    assert tuned["n"] == random["n"] == whole["n"] and random["patients"] == whole["patients"]
    for name, of in random["each"].items():
        assert of == pytest.approx([whole["metrics"][name]] * 2, abs=1e-6)
    assert {"auroc", "auprc", "brier", "challenge", "challenge_chosen"} == set(random["each"])
    gaps = [gap for gap in found["differences"] if gap["against"] == "random"]
    assert [gap["metric"] for gap in gaps] == list(tuned["metrics"])
    for gap in gaps:
        of = tuned["each"][gap["metric"]]
        assert gap["model"] == "w2v-x" and of[0] == pytest.approx(
            random["each"][gap["metric"]][0], abs=1e-9
        )
        assert gap["difference"] == pytest.approx((of[1] - of[0]) / 2, abs=1e-6)
        assert gap["interval"][0] <= gap["difference"] <= gap["interval"][1]
    assert found["notes"][1:] == [
        "diagnosis, leads 12, w2v-x: 1 of 2 not converged, 1 of them best at the last step.",
        "diagnosis, leads 12, w2v-x: the chosen learning rate, 0.0001, is the highest tried.",
    ]
    text = (tmp_path / "out/bench.md").read_text()
    assert f"{tuned['each']['auroc'][0]:.3f}, {tuned['each']['auroc'][1]:.3f}" in text

    assert finetuned.main([*runs, *words, "identification"]) == 0
    (row,) = json.loads((tmp_path / "out/bench.json").read_text())["rows"]
    probes = identify(
        omnilead.load(str(tmp_path / "identification-12-random-1")),
        dataset,
        EvalOptions(leads="12"),
    ).scores
    assert (
        row["metrics"]["accuracy"] == pytest.approx(np.mean(probes["hits"]))
        and row["n"] == probes["n_probes"]
    )


def test_wrong_runs_are_one_line(dataset, tmp_path, capsys):
    words = ["--task", "diagnosis", "--data", dataset.root.url, "--out", str(tmp_path)]
    assert finetuned.main(["a=b", *words]) == 2
    assert (
        capsys.readouterr().err == "benchmarks.finetuned: no run is named diagnosis-12-START-SEED\n"
    )
    runs = [f"diagnosis-12-{name}=RUN" for name in ("random-1", "random-2", "w2v-1")]
    assert finetuned.main([*runs, *words]) == 2
    assert (
        capsys.readouterr().err
        == "benchmarks.finetuned: seeds random 1 2; w2v 1: name the same for each\n"
    )
