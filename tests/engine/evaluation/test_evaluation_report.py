"""The report of an evaluation: it stands alone, shows what was measured, and draws any numbers."""

import json
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from pages import check, curves

from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.engine.evaluate import lines
from omnilead.engine.evaluation.metrics import (
    calibration,
    challenge_score,
    confusion_shares,
    measure,
    predicted,
)
from omnilead.engine.evaluation.results import IdentificationResult, TaskResult, by_record
from omnilead.engine.inference.trained_model import HeadInfo
from omnilead.engine.report import charts, evaluation_report

FACTS = {"model": "runs/<b>w2v</b>", "data": "0f3a", "role": "test", "leads": "I,II,V2"}
Result = TaskResult | IdentificationResult


def diagnosis(labels: Any, scores: Any) -> TaskResult:
    names = [f"r{i // 2}" for i in range(len(labels))]
    return TaskResult(np.asarray(labels), np.asarray(scores), names, names, FACTS, resamples=20)


def usual(n: int = 200) -> TaskResult:
    rng = np.random.default_rng(0)
    labels = np.repeat(rng.random((n // 2, 26)) < np.linspace(0, 0.3, 26), 2, 0)
    return diagnosis(labels, np.clip(0.4 * labels + 0.7 * rng.random(labels.shape), 0, 1))


def identification(gallery: Any, probes: Any, ids: Any = None) -> IdentificationResult:
    own = [f"p{i}" for i in range(len(gallery))]
    given = np.asarray(gallery), own, np.asarray(probes), ids or own[: len(probes)]
    return IdentificationResult(*given, FACTS, resamples=20)


def of_kind(kind: str, classes: Any, unknown: float = 0.2) -> TaskResult:
    """A result for 60 records with two halves, some of whose labels are unknown; three ages, one of
    a single record."""
    rng, n, k = np.random.default_rng(1), 120, len(classes)
    y, scores = (rng.random((n // 2, k)) < 0.4).astype(np.float32), rng.random((n, k))
    if kind == "multiclass":
        y, scores = np.eye(k)[rng.integers(0, k, n // 2)], scores / scores.sum(1, keepdims=True)
    if kind == "regression":
        y, scores = 60 + 9 * rng.normal(size=(n // 2, k)), 60 + 9 * rng.normal(size=(n, k))
    y[rng.random(n // 2) < unknown, : 1 if kind == "multilabel" else None] = np.nan
    sized = dict.fromkeys(
        {"regression": ("center", "scale")}.get(kind, ("thresholds",) * (kind != "multiclass")),
        (0.4,) * k,
    )
    head = HeadInfo("my task", kind, tuple(classes), unit="ms" * (kind == "regression"), **sized)  # type: ignore[arg-type]
    names = [f"r{i // 2}" for i in range(n)]
    ages = np.array(["40-59"] * 2 + ["18-39"] * 60 + ["unknown"] * 58)
    return TaskResult(
        np.repeat(y, 2, 0),
        scores,
        names,
        names,
        FACTS,
        head=head,
        groups_N={"age": ages},
        resamples=20,
    )


ROW, NONE = np.eye(26, dtype=bool)[:1], np.zeros((6, 26), bool)
RESULTS: dict[str, Result] = {
    "usual diagnoses": usual(),
    "no positives at all": diagnosis(NONE, np.full((6, 26), 0.2)),
    "every class of every row": diagnosis(~NONE, np.full((6, 26), 0.9)),
    "one row": diagnosis(ROW, ROW * 0.8),
    "all equal scores": diagnosis(usual().labels_NK, np.full((200, 26), 0.5)),
    "zeros and ones": diagnosis(usual().labels_NK, usual().labels_NK.astype(np.float32)),
    "one class": of_kind("binary", ["<i>AF"]),
    "classes with unknown labels": of_kind(
        "multilabel", ["AF", "AFL", "a diagnosis with quite a long name"]
    ),
    "the 26 with unknown labels": of_kind("multilabel", CLASSES),
    "exclusive classes": of_kind("multiclass", ["a", "b", "c", "d"]),
    "many exclusive classes": of_kind("multiclass", [f"class {i}" for i in range(40)]),
    "values": of_kind("regression", ["QRS"], 0.5),
    "two kinds of values": of_kind("regression", ["QRS", "QT"]),
    "usual identities": identification(*np.random.default_rng(0).normal(size=(2, 30, 8))),
    "one patient": identification(np.ones((1, 4)), np.ones((1, 4))),
    "zero vectors": identification(np.zeros((20, 4)), np.zeros((20, 4))),
    "nobody is in the gallery": identification(np.eye(4), np.eye(4), ["x", "y", "z", "w"]),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_any_numbers_are_drawn(result: Result) -> None:
    html = evaluation_report.build(result)
    assert len(check(html)) >= 2 and "<b>w2v" not in html
    document = json.loads(json.dumps(result.document(), allow_nan=False))
    assert document["score"] == next(iter(document["metrics"].values()))
    assert (document["role"], document["leads"]) == ("test", "I,II,V2")


def test_the_page_of_a_task_shows_classes_and_groups() -> None:
    result = of_kind("multilabel", ["AF", "AFL"])
    html, document = evaluation_report.build(result), result.document()
    assert (
        document["classes"]["AF"]["threshold"] == 0.4
        and document["classes"]["AF"]["n"] < document["classes"]["AFL"]["n"]
    )
    group = document["groups"]["age"]
    assert {name: of["n"] for name, of in group.items()} == {"18-39": 30, "40-59": 1, "unknown": 29}
    assert document["record"]["n"] == 60 and group["40-59"]["intervals"]["auroc"] == [None, None]
    rows = np.arange(2, 62)
    y, p, _ = by_record(
        result.labels_NK[rows], result.scores_NK[rows], [f"{i // 2:02}" for i in rows], ["x"] * 60
    )
    auroc = measure("multilabel", y, p, (0.4, 0.4))["auroc"]
    assert (
        group["18-39"]["metrics"]["auroc"] == pytest.approx(auroc)
        and f"<td>{auroc:.3f}</td>" in html
    )
    assert "of 240 labels are unknown" in html and "AFL" in html and "Records by age" in html


def of_patients(positives: int, negatives: int, halves: int = 1) -> TaskResult:
    """A perfect classifier of patients with one record each, all of them women."""
    y = np.repeat(np.arange(positives + negatives) < positives, halves)[:, None].astype(float)
    names, head = (
        np.repeat(np.arange(positives + negatives), halves),
        HeadInfo("af", "binary", ("AF",), (0.5,)),
    )
    return TaskResult(
        y, 0.1 + 0.8 * y, names, names, FACTS, head=head, groups_N={"sex": np.array(["F"] * len(y))}
    )


def test_few_positives_have_an_exact_interval_or_none() -> None:
    """Clopper-Pearson: if all of n are right, the lower end is 0.025 ** (1 / n)."""
    for positives, negatives in ((2, 25), (25, 2)):
        result = of_patients(positives, negatives)
        document = result.document()
        for part in (document, document["record"], document["groups"]["sex"]["F"]):
            ends = part["intervals"]
            assert part["metrics"]["auroc"] == 1 and ends["auroc"] == ends["auprc"] == ends[
                "f_measure"
            ] == [None, None]
            for name, n in (
                ("accuracy", 27),
                ("sensitivity", positives),
                ("specificity", negatives),
            ):
                assert ends[name] == [pytest.approx(0.025 ** (1 / n)), 1.0]
        group = document["groups"]["sex"]["F"]
        assert (group["n"], group["positives"]) == (27, {"AF": positives})
        said = "Fewer than 10 patients with or without the class"
        html = evaluation_report.build(result)
        assert said in document["remarks"][0] and html.count(said) == 2  # also below the group
        assert (
            f"<td>27</td><td>27</td><td>{positives}</td><td>1.000</td><td>no interval</td>" in html
        )
        printed = [line.split() for line in lines({"dataset": "", **document})]
        assert ["auroc", "1.0000", "1.0000"] in printed and ["AF", str(positives), "0.5"] in [
            words[:3] for words in printed
        ]
    two_halves = of_patients(5, 25, 2).half["intervals"]  # 10 positive rows, but of five patients
    assert np.isnan(list(two_halves.values())).all()
    enough = of_patients(10, 10).document()
    assert enough["intervals"]["auroc"] == [1, 1] and not enough["remarks"]
    assert "no interval" not in evaluation_report.build(of_patients(10, 10))


def test_groups_of_several_classes_show_the_rarest_and_the_most_frequent() -> None:
    result = of_kind("multilabel", ["AF", "AFL"], 0.0)
    positives = result.groups["age"]["unknown"]["positives"]
    assert positives == {
        name: int(result.labels_NK[62::2, k].sum()) for k, name in enumerate(["AF", "AFL"])
    }
    low, high = sorted(positives.values())
    assert (
        low < high
        and f"<td>29</td><td>29</td><td>{low} to {high}</td>" in evaluation_report.build(result)
    )


def test_the_page_begins_with_whole_records() -> None:
    html, result = evaluation_report.build(usual()), usual()
    titles = re.findall("<h2>(.*?)</h2>", html)
    assert (
        titles[:2] == ["Records", "Halves of 5 s, as in the paper"]
        and "<p>100 records, 200 halves of 5 s" in html
    )
    first, second = (
        f"<b>{part['metrics']['auroc']:.3f}</b>" for part in (result.record, result.half)
    )
    assert 0 < html.find(first) < html.find(titles[1]) < html.find(second)
    assert f"<td>{result.record['classes']['TInv']['auroc']:.3f}</td>" in html


def test_predicted_and_true_values_are_drawn() -> None:
    result = of_kind("regression", ["QRS"], 0.0)
    same, difference = [
        chart for chart in check(evaluation_report.build(result)) if chart.get("aria-label")
    ]
    assert (same.get("aria-label"), difference.get("aria-label")) == (
        "QRS, ms",
        "Bland-Altman: predicted - true, ms",
    )
    (dots,) = (node for node in difference.iter("g") if node.get("id") == "dots")
    assert dots[0].get("d", "").count("M") == 60  # records
    error = result.scores_NK - result.labels_NK
    assert f"mean {error.mean():+.3g}" in ElementTree.tostring(difference, "unicode")
    assert result.worst(1) == [int(np.abs(error).argmax())]


def test_the_ecgs_with_the_largest_errors_are_drawn(dataset: Dataset) -> None:
    for kind, classes, words in (
        ("binary", ["AF"], "AF: labelled (yes|no), probability"),
        ("multiclass", ["AF", "AFL", "SB"], r"labelled (AF|AFL|SB) \(0.\d+\), predicted"),
        ("regression", ["QRS"], r"QRS [\d.]+, predicted [\d.]+ ms"),
    ):
        result = replace(of_kind(kind, classes), crops_N=np.repeat(np.arange(60), 2))
        drawn = check(evaluation_report.build(result, dataset))[-12:]
        assert len(drawn) == 12
        for chart in drawn:
            text = "".join(chart.itertext())
            assert re.search(r"r\d+: (40-59|18-39|unknown)", text) and re.search(words, text), text
            assert sum(node.get("id") == "trace" for node in chart.iter()) >= 9


def test_one_patient_has_no_intervals() -> None:
    document = RESULTS["one patient"].document()
    assert document["metrics"] == {"accuracy": 1.0, "top5": 1.0, "chance": 1.0, "ties": 0.0}
    assert (
        document["intervals"] == {"accuracy": [None, None]}
        and "say nothing" in document["remarks"][-1]
    )


def test_random_weights_stand_beside_a_model_that_recognises_patients() -> None:
    eye, mixed = np.eye(4), np.eye(4)[[1, 0, 2, 3]]
    better, worse = (
        replace(identification(eye, a), untrained=identification(eye, b))
        for a, b in ((eye, mixed), (mixed, eye))
    )
    document = better.document()
    assert (document["score"], document["metrics"]["random_weights"]) == (
        1.0,
        0.5,
    ) and not document["remarks"]
    low, high = document["intervals"]["random_weights"]
    assert 0 <= low <= 0.5 <= high <= 1
    assert any(
        line.startswith(f"random weights    0.5000  {low:.4f} to")
        for line in lines({"dataset": "", **document})
    )
    html = evaluation_report.build(better)
    assert f"<span>Random weights</span><b>50.0%</b><small>{100 * low:.1f}% to" in html
    assert "untrained" in curves(html)
    assert "recognise as many patients" in worse.remarks[-1] and worse.remarks[
        -1
    ] in evaluation_report.build(worse)


def test_the_page_shows_what_was_measured() -> None:
    result = usual()
    score = challenge_score(result.labels_NK, predicted("binary", result.scores_NK))
    low, high = result.half["intervals"]["challenge"]
    html = evaluation_report.build(result)
    assert (
        low < score < high and f"<b>{score:.3f}</b><small>{low:.3f} to {high:.3f}</small>" in html
    )
    assert "1 of 26 classes have no positives: AF." in html and html.count("(no positives)") == 1
    charts = {chart.get("aria-label") for chart in check(html)}
    assert {
        "All classes together",
        "TInv",
        "Calibration",
        "Confusions",
    } <= charts and "AF" not in charts


def test_a_record_is_the_mean_of_its_halves() -> None:
    labels, scores = usual(6).labels_NK, usual(6).scores_NK
    order = [3, 0, 5, 2, 1, 4]
    y, p, patients = by_record(
        labels[order],
        scores[order],
        np.array(list("aabbcc"))[order],
        np.array(list("xxyyzz"))[order],
    )
    np.testing.assert_allclose(p, scores.reshape(3, 2, 26).mean(1))
    assert (y == labels[::2]).all() and patients == ["x", "y", "z"]
    document = usual().document()
    assert (document["n"], document["record"]["n"], document["record"]["unit"]) == (
        200,
        100,
        "record",
    )


def test_calibration_by_hand() -> None:
    labels, scores = np.array([[1, 0, 1, 1]], bool), np.array([[0.95, 0.05, 0.05, 1.0]])
    mean, true, count, error = calibration(labels, scores)
    assert count.tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert (mean[[0, 9]].tolist(), true[[0, 9]].tolist()) == ([0.05, 0.975], [0.5, 1.0])
    assert error == pytest.approx((0.45 + 0.025) / 2)


def test_confusions_by_hand() -> None:
    """Two rows of AF, one of which also has AFL: predicting AFL for it is no confusion."""
    labels, outputs = np.zeros((3, 26), bool), np.zeros((3, 26), bool)
    labels[:2, 0] = labels[0, 1] = True
    outputs[0, [0, 1, 2]] = True
    share = confusion_shares(labels, outputs)
    assert share[0, [0, 1, 2, 26]].tolist() == [0.5, 0.0, 0.5, 0.5]
    assert share[1, [0, 1, 2, 26]].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert np.isnan(share[2]).all() and share.shape == (26, 27)


def test_curves_end_where_they_must() -> None:
    labels = usual(2000).labels_NK
    chart = charts.roc_and_pr("TInv", labels[:, 25], usual(2000).scores_NK[:, 25])
    drawn = {node.get("id"): node for node in ElementTree.fromstring(chart).iter("g")}
    roc, pr = (drawn[name][0].get("d", "").split("L") for name in ("roc", "pr"))
    assert roc[0].split() == ["M", "24", "166"] and roc[-1].split() == ["144", "46"]
    assert pr[-1].split()[0] == "296"
    assert len(roc) <= 500
