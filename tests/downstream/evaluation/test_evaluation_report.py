"""The report of an evaluation: it stands alone, shows what was measured, and draws any numbers."""

import json
from dataclasses import replace

import numpy as np
import pytest
from pages import words

from omnilead.data_tools.dataset import CLASSES
from omnilead.downstream.evaluate import score_lines
from omnilead.downstream.evaluation.identification import IdentificationResult
from omnilead.downstream.evaluation.results import TaskResult, labels_scores_patients_by_record
from omnilead.downstream.inference.trained_model import CrossValidation, HeadInfo
from omnilead.downstream.reports import bench_report, evaluation_report
from omnilead.downstream.tasks.metrics import calibration_curve

FACTS = {"model": "runs/<b>w2v</b>", "data": "0f3a", "role": "test", "leads": "I,II,V2"}


def diagnosis(labels, scores):
    names = [f"r{i // 2}" for i in range(len(labels))]
    return TaskResult(np.asarray(labels), np.asarray(scores), names, names, FACTS, resamples=20)


def usual(n=200):
    rng = np.random.default_rng(0)
    labels = np.repeat(rng.random((n // 2, 26)) < np.linspace(0, 0.3, 26), 2, 0)
    return diagnosis(labels, np.clip(0.4 * labels + 0.7 * rng.random(labels.shape), 0, 1))


def identification(gallery, probes, ids=None):
    own = [f"p{i}" for i in range(len(gallery))]
    given = np.asarray(gallery), own, np.asarray(probes), ids or own[: len(probes)]
    return IdentificationResult(*given, FACTS, resamples=20)


def of_kind(kind, classes, unknown=0.2):
    """A result for 60 records with two halves, some of whose labels are unknown; three ages, one of
    a single record."""
    rng, k = np.random.default_rng(1), len(classes)
    y, scores = (rng.random((60, k)) < 0.4).astype(np.float32), rng.random((120, k))
    how = {}
    if kind == "multiclass":
        y, scores = np.eye(k)[rng.integers(0, k, 60)], scores / scores.sum(1, keepdims=True)
    elif kind == "regression":
        y, scores = (10.0 ** -np.arange(k) * (60 + 9 * rng.normal(size=(n, k))) for n in (60, 120))
        how = {"center": (0.4,) * k, "scale": (0.4,) * k, "unit": "ms"}
    else:
        how = {"thresholds": (0.4,) * k}
    y[rng.random(60) < unknown, : 1 if kind == "multilabel" else None] = np.nan
    head = HeadInfo("my task", kind, tuple(classes), **how)
    names = [f"r{i // 2}" for i in range(120)]
    groups = {"age": np.repeat(["40-59", "18-39", "unknown"], [2, 60, 58])}
    y = np.repeat(y, 2, 0)
    return TaskResult(y, scores, names, names, FACTS, head=head, groups_N=groups, resamples=20)


def timed(y, risks):
    """Two halves of each record; y: times, negative if censored."""
    names, head = (
        np.repeat(np.arange(len(y)), 2),
        HeadInfo("death", "survival", ("risk",), unit="years"),
    )
    y, scores = np.repeat(y, 2)[:, None], np.repeat(risks, 2)[:, None]
    groups = {"sex": np.where(names % 3, "M", "F")}
    return TaskResult(y, scores, names, names, FACTS, head=head, groups_N=groups, resamples=20)


def of_patients(positives, negatives, halves=1, misses=0):
    """A classifier of patients with one record each, all of them women, that misses the first."""
    names = np.repeat(np.arange(positives + negatives), halves)
    y = (names < positives)[:, None].astype(float)
    head, women = HeadInfo("af", "binary", ("AF",), (0.5,)), {"sex": np.array(["F"] * len(y))}
    scores = 0.1 + 0.8 * y
    scores[:misses] = 0
    return TaskResult(y, scores, names, names, FACTS, head=head, groups_N=women)


TIMES = np.arange(1.0, 31)
RIGHT, MIXED = (
    identification(np.eye(4), np.eye(4)[order]) for order in ([*range(4)], [1, 0, 2, 3])
)
ROW, NONE = np.eye(26, dtype=bool)[:1], np.zeros((6, 26), bool)
RESULTS = {
    "usual diagnoses": usual(),
    "no positives at all": diagnosis(NONE, np.full((6, 26), 0.2)),
    "every class of every row": diagnosis(~NONE, np.full((6, 26), 0.9)),
    "one row": diagnosis(ROW, ROW * 0.8),
    "all equal scores": diagnosis(usual().labels_NK, np.full((200, 26), 0.5)),
    "zeros and ones": diagnosis(usual().labels_NK, usual().labels_NK.astype(np.float32)),
    "one class": of_kind("binary", ["<i>AF"]),
    "the 26 with unknown labels": of_kind("multilabel", CLASSES),
    "two classes with unknown labels": of_kind("multilabel", ["AF", "AFL"]),
    "exclusive classes": of_kind("multiclass", ["a", "b", "c", "d"]),
    "many exclusive classes": of_kind("multiclass", [f"class {i}" for i in range(40)]),
    "two kinds of values": of_kind("regression", ["QRS", "QT"]),
    "few positives": of_patients(2, 25),
    "few negatives": of_patients(25, 2),
    "ten positive halves of five patients": of_patients(5, 25, 2),
    "perfect": of_patients(16, 16),
    "one miss": of_patients(16, 16, misses=2),
    "one event, and one risk": timed([-2.0, 1e-3, -1e4, -1e4], np.zeros(4)),
    "all die in the order of their risk": timed(TIMES, -TIMES),
    "a third dies": timed(np.append(TIMES, [-30.0] * 15), np.append(-TIMES, [-50] * 15)),
    "few die": timed(np.append(TIMES[:9], [-30.0] * 20), np.zeros(29)),
    "one patient": identification(np.ones((1, 4)), np.ones((1, 4))),
    "zero vectors": identification(np.zeros((20, 4)), np.zeros((20, 4))),
    "better than random weights": replace(RIGHT, untrained=MIXED),
    "worse than random weights": replace(MIXED, untrained=RIGHT),
    "nobody is in the gallery": identification(np.eye(4), np.eye(4), ["x", "y", "z", "w"]),
}


DRAWN = ("one class", "exclusive classes", "two kinds of values")  # with their ECGs


@pytest.mark.parametrize("name", RESULTS)
def test_any_numbers_are_drawn(name, dataset, golden):
    """What is printed, and what the page says."""
    result = RESULTS[name]
    if name in DRAWN:
        result = replace(result, crops_N=np.repeat(np.arange(60), 2))
    page = words(evaluation_report.report_page(result, dataset))
    document = json.loads(json.dumps(result.document(), allow_nan=False))
    assert document["score"] == next(iter(document["metrics"].values()))
    golden(f"{name}.txt", "\n".join([*score_lines({"dataset": "", **document}), page]))


def test_a_record_is_the_mean_of_its_halves():
    labels, scores = usual(6).labels_NK, usual(6).scores_NK
    order = [3, 0, 5, 2, 1, 4]
    names, patients = (np.repeat([*text], 2)[order] for text in ("abc", "xyz"))
    y, p, found = labels_scores_patients_by_record(labels[order], scores[order], names, patients)
    np.testing.assert_allclose(p, scores.reshape(3, 2, 26).mean(1))
    assert (y == labels[::2]).all() and found == [*"xyz"]


def test_calibration_by_hand():
    """A bin of few records has no share of positives, however many classes they have."""
    labels, scores = np.array([[1, 0, 1, 1, 1]], bool), np.array([[0.95, 0.05, 0.05, 1.0, 0.5]])
    labels, scores = labels.repeat(10, 0), scores.repeat(10, 0)
    labels[9, 4] = scores[9, 4] = 0
    mean, true, count, error = calibration_curve(labels, scores)
    assert count.tolist() == [21, 0, 0, 0, 0, 9, 0, 0, 0, 20]
    assert mean[[0, 5, 9]] == pytest.approx([1 / 21, 0.5, 0.975])
    assert true[[0, 5, 9]] == pytest.approx([10 / 21, np.nan, 1.0], nan_ok=True)
    assert error == pytest.approx((9 + 9 * 0.5 + 20 * 0.025) / 50)


def test_counts_by_hand():
    """Unknown labels are not counted; a score at the threshold is not above it."""
    y_N = np.array([1, 1, 1, 0, 0, 0, 0, np.nan])
    score_N = np.array([0.9, 0.6, 0.5, 0.8, 0.5, 0.2, 0.1, 0.9])
    assert evaluation_report.two_by_two_table("AF", 0.5, y_N, score_N) == [
        ["AF", "labelled yes", "labelled no", ""],
        ["above 0.5", "2", "1", "PPV 66.7%"],
        ["not above", "1", "3", "NPV 75.0%"],
        ["", "sensitivity 66.7%", "specificity 75.0%", ""],
    ]
    nobody = evaluation_report.two_by_two_table("AF", 2.0, y_N[3:], score_N[3:])
    assert nobody[1:3] == [["above 2", "0", "0", "PPV -"], ["not above", "0", "4", "NPV 100.0%"]]
    assert nobody[3][1] == "sensitivity -"
    unknown = evaluation_report.two_by_two_table("AF", 0.5, np.full(8, np.nan), score_N)
    assert unknown[1:3] == [["above 0.5", "0", "0", "PPV -"], ["not above", "0", "0", "NPV -"]]


def test_counts_of_exclusive_classes_by_hand():
    """Rows are true classes, columns predicted ones."""
    head = HeadInfo("t", "multiclass", ("a", "b"))
    y_NK = np.array([[1, 0], [1, 0], [1, 0], [0, 1], [np.nan, np.nan]])
    scores_NK = np.array([[0.9, 0.1], [0.3, 0.7], [0.2, 0.8], [0.1, 0.9], [0.5, 0.5]])
    table = evaluation_report.confusion_table(head, y_NK, scores_NK)
    assert table[1:] == [["a", "1", "2"], ["b", "0", "1"]]


def test_the_sensitive_point_of_cross_validation_has_counts():
    """Its score is the lowest that counts as predicted."""
    y_N1, scores_N1 = np.array([[1.0], [1.0], [0.0]]), np.array([[0.9], [0.25], [0.1]])
    scored = CrossValidation(5, 3, {}, {}, sensitive={"AF": (0.25, 0.9)})
    head = HeadInfo("t", "binary", ("AF",), (0.5,), cross_validated=scored)
    of_threshold, of_sensitivity = evaluation_report.decision_content(head, y_N1, scores_N1)[
        "decisions"
    ].values()
    assert of_threshold[0][1][1:3] == ["1", "0"] and of_sensitivity[0][1][1:3] == ["2", "0"]


def test_one_score_has_one_interval():
    """Where a group has all records, as where there is one source: that of the whole."""
    result = of_kind("binary", ["AF"], unknown=0)
    result = replace(result, groups_N={"source": np.repeat("mine", 120)}, resamples=400)
    assert result.group_scores["source"]["mine"]["intervals"] == result.record_scores["intervals"]


@pytest.mark.parametrize(
    ("ends", "difference", "metric", "said"),
    [
        ((-0.004, 0.011), 0.003, "auroc", "`A` and B cannot be told apart: difference in AUROC -0.004 to +0.011"),
        ((0.004, 0.011), 0.007, "auroc", "B is better than `A`: difference in AUROC +0.004 to +0.011"),
        ((-0.011, -0.004), -0.007, "auroc", "`A` is better than B: difference in AUROC +0.004 to +0.011"),
        ((0.5, 1.5), 1.0, "mae", "`A` is better than B: difference in mean absolute error -1.500 to -0.500"),
    ],
)  # fmt: skip
def test_a_comparison_ends_with_a_verdict(ends, difference, metric, said):
    key = {"task": "mine: ill", "leads": "12", "share": 1.0}
    scores = {"A": 0.8, "B": 0.9 if difference > 0 else 0.7, "random weights": 0.99, "C": None}
    rows = [
        {"model": name, **key, "n": 363, "patients": 350, "metrics": {metric: value}, "intervals": {metric: [0, 1]}}
        for name, value in scores.items()
    ]  # fmt: skip
    gap = {"model": "B", **key, "against": "A", "metric": metric, "difference": difference}
    document = {
        "models": dict.fromkeys(scores, "random weights"),
        "data": "ds",
        "rows": rows,
        "differences": [{**gap, "interval": list(ends)}],
        "notes": ["A note."],
    }
    text = bench_report.comparison_markdown(document)
    assert text.endswith(f"- A note.\n\nmine: ill, 12 leads: {said} on 363 ECGs.\n")


def test_a_lower_brier_score_is_better_in_the_figure():
    key = {"model": "A", "task": "t", "leads": "12", "share": 1.0}
    row = {**key, "n": 9, "patients": 9, "metrics": {"brier": 0.1}, "intervals": {"brier": [0, 1]}}
    figure = bench_report.draw_comparison({"models": {"A": ""}, "rows": [row]})
    assert figure.axes[0].get_xlabel() == "Brier score, lower is better; line: 95 % interval"
