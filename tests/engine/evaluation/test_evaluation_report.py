"""The report of an evaluation: it stands alone, shows what was measured, and draws any numbers."""

import html
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from pages import check, curves

from omnilead.data_tools.dataset import CLASSES
from omnilead.engine.evaluate import lines
from omnilead.engine.evaluation.metrics import calibration, confusion_shares
from omnilead.engine.evaluation.results import IdentificationResult, TaskResult, by_record
from omnilead.engine.inference.trained_model import HeadInfo
from omnilead.engine.report import evaluation_report

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
        y, scores = 60 + 9 * rng.normal(size=(60, k)), 60 + 9 * rng.normal(size=(120, k))
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


@pytest.mark.parametrize("name", RESULTS)
def test_any_numbers_are_drawn(name, golden):
    """What is printed, the ids of curves, and the page without its charts."""
    result = RESULTS[name]
    page = evaluation_report.build(result)
    assert check(page) and "<b>w2v" not in page
    document = json.loads(json.dumps(result.document(), allow_nan=False))
    assert document["score"] == next(iter(document["metrics"].values()))
    words = re.sub("<svg.*?</svg>|<style.*?</style>", "", page, flags=re.S)
    words = html.unescape(re.sub(r"(\s*<[^>]+>\s*)+", "\n", words))
    drawn = [name for name in sorted(curves(page)) if not re.search(r"^$|_\d+$", name)]
    golden(f"{name}.txt", "\n".join([*lines({"dataset": "", **document}), *drawn, words]))


@pytest.mark.parametrize(("positives", "negatives"), [(2, 25), (25, 2)])
def test_few_positives_have_an_exact_interval_or_none(positives, negatives):
    """Clopper-Pearson: if all of n are right, the lower end is 0.025 ** (1 / n)."""
    document = of_patients(positives, negatives).document()
    sizes = {"accuracy": 27, "sensitivity": positives, "specificity": negatives}
    exact = {name: [pytest.approx(0.025 ** (1 / n)), 1.0] for name, n in sizes.items()}
    exact |= {name: [None, None] for name in ("auroc", "auprc", "f_measure", "brier")}
    for part in (document, document["record"], document["groups"]["sex"]["F"]):
        assert part["metrics"]["auroc"] == 1 and part["intervals"] == exact


def test_a_bin_of_few_records_has_no_dot():
    few = of_patients(5, 25)  # scores of 0.9 and 0.1
    _, true, count, _ = calibration(few.labels_NK, few.scores_NK)
    assert count[[1, 9]].tolist() == [25, 5] and true[1] == 0 and np.isnan(true[9])
    assert "bins of fewer than 10 records" in evaluation_report.build(few)


def test_predicted_and_true_values_are_drawn():
    result = of_kind("regression", ["QRS"], 0.0)
    charts = check(evaluation_report.build(result))
    same, difference = [chart for chart in charts if chart.get("aria-label")]
    assert same.get("aria-label") == "QRS, ms"
    assert difference.get("aria-label") == "Bland-Altman: predicted - true, ms"
    (dots,) = (node for node in difference.iter("g") if node.get("id") == "dots")
    assert dots[0].get("d", "").count("M") == 60  # records
    error = result.scores_NK - result.labels_NK
    assert f"mean {error.mean():+.3g}" in "".join(difference.itertext())
    assert result.worst(1) == [int(np.abs(error).argmax())]
    two = of_kind("regression", ["age", "QRS"], 0.0)
    two.labels_NK[:, 1] *= 1e-3
    two.scores_NK[:] = two.labels_NK
    two.scores_NK[7] += [2, 0.1]  # QRS is off by more of its standard deviations
    assert two.worst(1) == [7] and evaluation_report.reading(two, 7).startswith("QRS ")


@pytest.mark.parametrize(
    ("kind", "classes", "words"),
    [
        ("binary", ["AF"], "AF: labelled (yes|no), probability"),
        ("multiclass", ["AF", "AFL", "SB"], r"labelled (AF|AFL|SB) \(0.\d+\), predicted"),
        ("regression", ["QRS"], r"QRS [\d.]+, predicted [\d.]+ ms"),
    ],
)
def test_the_ecgs_with_the_largest_errors_are_drawn(kind, classes, words, dataset):
    result = replace(of_kind(kind, classes), crops_N=np.repeat(np.arange(60), 2))
    drawn = check(evaluation_report.build(result, dataset))[-12:]
    assert len(drawn) == 12
    for chart in drawn:
        assert re.search(rf"r\d+: (40-59|18-39|unknown)\s+{words}", "".join(chart.itertext()))
        assert sum(node.get("id") == "trace" for node in chart.iter()) >= 9


def test_a_record_is_the_mean_of_its_halves():
    labels, scores = usual(6).labels_NK, usual(6).scores_NK
    order = [3, 0, 5, 2, 1, 4]
    names, patients = (np.repeat([*text], 2)[order] for text in ("abc", "xyz"))
    y, p, found = by_record(labels[order], scores[order], names, patients)
    np.testing.assert_allclose(p, scores.reshape(3, 2, 26).mean(1))
    assert (y == labels[::2]).all() and found == [*"xyz"]


def test_calibration_by_hand():
    labels, scores = np.array([[1, 0, 1, 1]], bool), np.array([[0.95, 0.05, 0.05, 1.0]])
    mean, true, count, error = calibration(labels.repeat(10, 0), scores.repeat(10, 0))
    assert count.tolist() == [20, 0, 0, 0, 0, 0, 0, 0, 0, 20]
    assert mean[[0, 9]] == pytest.approx([0.05, 0.975]) and true[[0, 9]].tolist() == [0.5, 1.0]
    assert error == pytest.approx((0.45 + 0.025) / 2)


def test_confusions_by_hand():
    """Two rows of AF, one of which also has AFL: predicting AFL for it is no confusion."""
    labels, outputs = np.zeros((3, 26), bool), np.zeros((3, 26), bool)
    labels[:2, 0] = labels[0, 1] = True
    outputs[0, [0, 1, 2]] = True
    share = confusion_shares(labels, outputs)
    assert share[0, [0, 1, 2, 26]].tolist() == [0.5, 0.0, 0.5, 0.5]
    assert share[1, [0, 1, 2, 26]].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert np.isnan(share[2]).all() and share.shape == (26, 27)
