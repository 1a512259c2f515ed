"""Scores against the official functions' numbers, against plain loops, and against what follows
from their definitions."""

import csv
import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilead.data_tools.ecg.record import CLASS_ABBREVIATIONS, SCORED_CLASSES
from omnilead.downstream.tasks import metrics
from omnilead.downstream.tasks.metrics import (
    Classification,
    MetricError,
    bootstrap_interval,
    challenge_score,
    identification_scores,
    mean_and_half_width,
    measure,
    predict_classes,
    statistic_of,
)
from omnilead.engine.settings.metrics import METRIC_OF

VECTORS = Path(__file__).parents[4] / "shared" / "cinc" / "vectors.npz"
# of the Challenge's weights.csv
SHA256 = "668cb04555a97e8977488cb4bb6088d0d2bf9e59557945deedf29d5065c14d2b"
SEEDS = st.integers(0, 2**32 - 1)
FILE = Path(metrics.__file__).with_name(metrics.CHALLENGE_WEIGHTS_FILE)


def rows(*named):
    """One row for each text of abbreviations."""
    return np.array([[name in text.split() for name in CLASS_ABBREVIATIONS] for text in named])


def diagnosed(labels, scores):
    return Classification(labels, predict_classes("binary", scores), scores).summary()


# The figures
# --------------------------------------------------------------------------------------------------------------


def test_the_weights_are_the_challenges_in_the_datasets_order():
    content = FILE.read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256
    head, *table = csv.reader(content.decode().splitlines())
    assert [tuple(row[0].split("|")) for row in table] == [codes for _, codes in SCORED_CLASSES]
    assert head[1:] == [row[0] for row in table]
    assert (
        metrics.challenge_weights() / metrics.WEIGHT_UNIT
        == np.array([row[1:] for row in table], float)
    ).all()


@pytest.mark.parametrize("case", range(23))
def test_all_agree_with_the_official_functions(case):
    if not VECTORS.is_file():
        pytest.skip("the official functions' numbers are not here (../shared/cinc)")
    vectors = np.load(VECTORS, allow_pickle=False)
    prefix = f"{vectors['case_ids'][case]}_"
    official = {
        name.removeprefix(prefix): vectors[name]
        for name in vectors.files
        if name.startswith(prefix)
    }
    labels, outputs, scores = official["labels"], official["binary"], official["scalar"]
    found = Classification(labels, outputs, scores).summary()
    figures = {}
    for name in ("challenge", "auroc", "auprc", "accuracy", "f_measure"):
        figures[name] = found[name]
    for name in ("auroc", "auprc", "f_measure"):
        figures[f"{name}_classes"] = [of[name] for of in found["classes"].values()]
    for name, value in figures.items():
        np.testing.assert_allclose(value, official[name], rtol=0, atol=1e-10)
    assert challenge_score(labels.astype(int), outputs.astype(np.float32)) == found["challenge"]
    credit, norm = metrics.challenge_credits_and_norms(labels, outputs)
    sums = [official[name] for name in ("observed", "correct", "inactive")]
    np.testing.assert_allclose((credit / norm).sum(1) / metrics.WEIGHT_UNIT, sums, rtol=1e-12)


# By hand: AF and AFL are worth a half of each other, AF a quarter of NSR
# ---------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "outputs", "score"),
    [
        ("AF", "AF", 1),
        ("AF", "", -1 / 7),  # (0 - 1 / 8) / (1 - 1 / 8)
        ("AF", "NSR", 0),
        ("AF", "AFL", 1 / 7),  # (1 / 4 - 1 / 8) / (1 - 1 / 8)
        ("AF", "AF AFL", 5 / 7),  # ((1 + 1 / 2) / 2 - 1 / 8) / (1 - 1 / 8)
        ("NSR|NSR", "AF|", 0),  # by definition
        ("", "AF", 0),  # unscored labels: false positives cost nothing
        ("|AF", "AF AFL|AF", 1),
        ("AF|NSR", "AF|AF", 0),  # (1 + 1 / 8 - 1 - 1 / 8) / (2 - 1 - 1 / 8)
    ],
)
def test_scores_by_hand(labels, outputs, score):
    found = challenge_score(rows(*labels.split("|")), rows(*outputs.split("|")))
    assert found == pytest.approx(score, abs=1e-12)


def test_what_scores_a_task_can_choose_its_checkpoints():
    scoring = [one for one in METRIC_OF.values() if one.kinds]
    assert all(one.lower_is_better is not None for one in scoring)


def test_areas_by_hand():
    labels = rows("AF", "", "AF", "")
    scores = np.zeros((4, 26))
    scores[:, 0] = [0.9, 0.8, 0.8, 0.1]  # of four pairs three in order, one tied
    found = diagnosed(labels, scores)
    af, *others = found["classes"].values()
    names = ("auroc", "auprc", "f_measure", "sensitivity", "specificity")
    assert [af[name] for name in names] == pytest.approx([0.875, 5 / 6, 0.8, 1, 0.5])
    assert np.isnan([[of["auroc"], of["auprc"]] for of in others]).all()
    assert (found["auroc"], found["f_measure"], found["accuracy"]) == (0.875, 0.8, 0.75)
    assert found["without_positives"] == list(CLASS_ABBREVIATIONS[1:])
    scores[:, 0] = [math.inf, math.inf, -math.inf, -math.inf]  # logits that saturate are equal, too
    assert diagnosed(labels, scores)["classes"]["AF"]["auroc"] == 0.5
    every = diagnosed(rows("AF", "AF"), scores[:2])
    assert every["without_negatives"] == ["AF"] and every["classes"]["AF"]["auprc"] == 1
    assert np.isnan([every["classes"]["AF"][name] for name in ("auroc", "specificity")]).all()


def test_brier_scores_by_hand():
    """Unknown labels are ignored."""
    y = np.array([[1, 0], [0, np.nan], [1, 0], [0, 0]])
    scores = np.array([[0.9, 0.2], [0.4, 0.9], [0.5, 0.0], [0.1, 0.1]])
    a, b = (0.01 + 0.16 + 0.25 + 0.01) / 4, (0.04 + 0.0 + 0.01) / 3
    found = statistic_of("multilabel", y, scores, classes="ab").summary()
    assert [of["brier"] for of in found["classes"].values()] == pytest.approx([a, b])
    assert found["brier"] == pytest.approx((a + b) / 2)  # b has no positives, and yet a score
    assert measure("binary", y[:, :1], scores[:, :1])["brier"] == pytest.approx(a)


def test_a_probability_of_one_half_is_negative():
    scores = np.array([0.5, np.nextafter(0.5, 1), 0.1])
    assert predict_classes("binary", scores).tolist() == [False, True, False]


# Against loops
# ------------------------------------------------------------------------------------------------------------


def slow_areas(y, score):
    """The official definition, threshold by threshold: trapezia of sensitivity over specificity;
    steps of precision."""
    points = [(0.0, 1.0)]
    area = precision = 0.0
    for threshold in sorted(set(score.tolist()), reverse=True):
        said = score >= threshold
        tp, fp = float((said & y).sum()), float((said & ~y).sum())
        points.append((tp / y.sum(), 1 - fp / (~y).sum()))
        (before, specific), (now, specific_now) = points[-2:]
        area += (now - before) * (specific + specific_now) / 2
        precision += (now - before) * tp / (tp + fp)
    return area, precision


@st.composite
def rated(draw, least=1):
    """Labels and scores with many ties."""
    n, levels = draw(st.integers(least, 40)), draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(SEEDS))
    labels = rng.random((n, 26)) < draw(st.sampled_from([0.02, 0.2, 0.6]))
    return labels, rng.integers(0, levels + 1, (n, 26)) / levels


@settings(max_examples=60)
@given(rated(2))
def test_areas_agree_with_loops(given_):
    labels, scores = given_
    classes = diagnosed(labels, scores)["classes"].values()
    for y, score, of in zip(labels.T, scores.T, classes, strict=True):
        if 0 < y.sum() < len(y):
            assert (of["auroc"], of["auprc"]) == pytest.approx(slow_areas(y, score), abs=1e-12)


@settings(max_examples=60)
@given(rated(), SEEDS)
def test_the_order_of_the_rows_does_not_matter(given_, seed):
    labels, outputs = given_[0], predict_classes("binary", given_[1])
    order = np.random.default_rng(seed).permutation(len(labels))
    whole = challenge_score(labels, outputs)
    assert challenge_score(labels[order], outputs[order]) == whole  # to the bit


@settings(max_examples=60)
@given(rated(), SEEDS)
def test_a_weight_equals_that_many_copies(given_, seed):
    labels, scores = given_
    weight = np.random.default_rng(seed).integers(0, 4, len(labels))
    weight[0] += not weight.any()
    arrays = labels, predict_classes("binary", scores), scores
    copies = Classification(*(np.repeat(array, weight, 0) for array in arrays))
    expected = copies(copies.once_N)
    np.testing.assert_allclose(Classification(*arrays)(weight), expected, rtol=0, atol=1e-12)


# Other tasks
# --------------------------------------------------------------------------------------------------------------


def test_unknown_labels_are_ignored():
    """Each class is scored as if there were only the rows in which it is known."""
    rng, thresholds = np.random.default_rng(0), (0.3, 0.5, 0.7)
    y, scores = (rng.random((60, 3)) < 0.4).astype(float), rng.integers(0, 9, (60, 3)) / 8
    y[rng.random(y.shape) < 0.3] = np.nan
    y[7] = np.nan
    found = measure("multilabel", y, scores, thresholds, "abc")
    known = ~np.isnan(y)
    alone = [
        measure("binary", y[there, k : k + 1], scores[there, k : k + 1], [thresholds[k]])
        for k, there in enumerate(known.T)
    ]
    for name in ("auroc", "auprc", "f_measure", "sensitivity", "specificity"):
        assert found[name] == pytest.approx(np.mean([one[name] for one in alone]))
    right = (((scores > thresholds) == y) | ~known).all(1)[known.any(1)]
    assert found["accuracy"] == pytest.approx(right.mean()) and "challenge" not in found
    counted = statistic_of("multilabel", y, scores, thresholds, "abc").summary()["classes"]
    assert [of["n"] for of in counted.values()] == known.sum(0).tolist()
    nothing = measure("binary", np.full((2, 1), np.nan), np.zeros((2, 1)))
    assert np.isnan(list(nothing.values())).all()


def test_the_challenge_scores_only_its_own_classes_where_all_are_known():
    y, scores = rows("AF", "NSR").astype(float), np.full((2, 26), 0.25)
    assert next(iter(measure("multilabel", y, scores, classes=CLASS_ABBREVIATIONS))) == "challenge"
    assert next(iter(measure("multilabel", y, scores))) == "auroc"  # of other classes
    y[0, 3] = np.nan
    assert "challenge" not in measure("multilabel", y, scores, classes=CLASS_ABBREVIATIONS)


def test_exclusive_classes_by_hand():
    """Six rows, one of them unknown: of a two of three, of b one of one, of c none of one."""
    y = np.eye(3)[[0, 0, 0, 1, 2, 2]]
    y[5] = np.nan
    scores = np.array([[6, 3, 1], [5, 1, 4], [2, 5, 3], [1, 8, 1], [4, 3, 3], [0, 0, 10]]) / 10
    assert measure("multiclass", y, scores) == {
        "auroc": pytest.approx((5 / 6 + 1 + 2.5 / 4) / 3),
        "auprc": pytest.approx((11 / 12 + 1 + 1 / 3) / 3),
        "accuracy": 3 / 5,
        "balanced_accuracy": pytest.approx((2 / 3 + 1 + 0) / 3),
        "f_measure": pytest.approx((4 / 6 + 2 / 3 + 0) / 3),
        # (p_a - y_a)^2 + (p_b - y_b)^2 + (p_c - y_c)^2 of each row, over 5 rows and 3 classes
        "brier": pytest.approx((0.26 + 0.42 + 0.98 + 0.06 + 0.74) / 15),
    }


@settings(max_examples=30)
@given(st.integers(3, 40), SEEDS)
def test_regression_agrees_with_loops(n, seed):
    rng = np.random.default_rng(seed)
    y = rng.normal(60, 15, (n, 2))
    p, weight = y * 0.8 + rng.normal(5, 9, (n, 2)), rng.integers(0, 4, n)
    weight[:3], y[1, 0] = 1, np.nan
    expected = []
    for true, said in zip(y.T, p.T, strict=True):
        copies = np.repeat(np.arange(n), weight * ~np.isnan(true))
        t, e = true[copies], (said - true)[copies]
        r2 = 1 - (e @ e) / ((t - t.mean()) @ (t - t.mean()))
        r = np.corrcoef(t, said[copies])[0, 1]
        expected.append([abs(e).mean(), math.sqrt(e @ e / len(e)), r2, r])
    found = statistic_of("regression", y, p, classes=("age", "ef"))
    np.testing.assert_allclose(found(weight), np.mean(expected, 0), rtol=1e-9)
    of, error = found.summary()["classes"]["ef"], p[:, 1] - y[:, 1]
    spread = pytest.approx((error.mean(), error.std()))
    assert of["n"] == n and (of["mean_error"], of["sd_error"]) == spread
    equal = measure("regression", np.ones((n, 1)), p[:, :1])
    assert np.isnan([equal["r2"], equal["pearson"]]).all() and equal["mae"] > 0


# What cannot be scored
# ----------------------------------------------------------------------------------------------------

Y, P = rows("AF", "NSR"), np.full((2, 26), 0.25)
BAD = {
    "NaN": (Y, Y, np.where(Y, np.nan, P), "2 of 52 scores are NaN"),
    "a label that is 2": (Y * 2, Y, P, "labels: 2 of 52 values are neither 0 nor 1"),
    "scores as outputs": (Y, P, P, "outputs: 52 of 52 values are neither 0 nor 1"),
    "too few classes": (Y[:, :5], Y[:, :5], P[:, :5], r"labels have shape \[2, 5\]"),
    "no rows": (Y[:0], Y[:0], P[:0], r"labels have shape \[0, 26\]"),
    "another number of rows": (Y, Y[:1], P, "labels have 2 rows, but outputs have 1"),
    "other scores": (Y, Y, P[:1], r"scores have shape \[1, 26\], but labels have shape"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_rows_are_an_error_of_one_line(case):
    *arrays, message = case
    with pytest.raises(MetricError, match=message) as raised:
        Classification(*arrays)
    assert "\n" not in str(raised.value)


def test_values_that_are_not_finite_are_an_error():
    with pytest.raises(MetricError, match="1 of 3 predictions are not finite"):
        measure("regression", np.ones((3, 1)), np.array([[1.0], [np.inf], [2.0]]))


# Identification
# -----------------------------------------------------------------------------------------------------------


def slow_identification(gallery, own, probes, asked):
    """(accuracy, ties) probe by probe, of small whole numbers, whose cosines are compared without
    rounding."""
    hits, ties = [], []
    length = np.maximum((gallery**2).sum(1), 1)  # 1, 2 or 3
    for probe, patient in zip(probes, asked, strict=True):
        dots = gallery @ probe
        signed = np.sign(dots) * dots**2 * 6 // length
        first = np.flatnonzero(signed == signed.max())
        hits.append(np.mean([own[i] == patient for i in first]))
        ties.append(len(first) > 1)
    return float(np.mean(hits)), float(np.mean(ties))


@settings(max_examples=80)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    SEEDS,
    st.sampled_from([1, 7, 2**23]),
)
def test_identification_agrees_with_loops_for_any_block_size(p, q, seed, block):
    rng = np.random.default_rng(seed)
    gallery, probes = rng.integers(-1, 2, (p, 3)), rng.integers(-1, 2, (q, 3))
    own, asked = rng.integers(0, p, p).tolist(), rng.integers(0, p + 2, q).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "SIMILARITY_BLOCK", block)
        found = identification_scores(gallery, own, 1e-30 * probes, asked)
    expected = slow_identification(gallery, own, probes, asked)
    assert (found["accuracy"], found["ties"]) == pytest.approx(expected)
    assert found["one_sided"] == sum(patient not in own for patient in asked)
    assert found["chance"] == pytest.approx(np.mean([own.count(patient) / p for patient in asked]))
    assert (np.diff(found["cmc"]) >= -1e-12).all()
    assert found["cmc"][-1] == pytest.approx(1 - found["one_sided"] / q)
    assert found["accuracy"] <= found["top5"] <= 1


def test_identification_does_not_depend_on_vector_length():
    gallery = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    ids = list(range(50))
    found = identification_scores(gallery, ids, 3 * gallery[::-1], ids[::-1])
    names = ("accuracy", "ties", "chance", "one_sided")
    assert [found[name] for name in names] == [1, 0, 0.02, 0]
    np.testing.assert_allclose(found["same"], 1.0)
    assert (found["other"] < 1 - 1e-6).all()
    assert identification_scores(gallery, ids, np.roll(gallery, 1, 0), ids)["accuracy"] == 0.0


def test_bad_embeddings_are_an_error_of_one_line():
    good, bad = np.ones((3, 4)), np.ones((3, 4))
    bad[1, 2] = np.nan
    for gallery, n, probes, message in (
        (good, 3, bad, "1 of 3 probe embeddings are not finite"),
        (good, 2, good, r"gallery embeddings have shape \[3, 4\], for 2 patients"),
        (good[:0], 0, good, "with at least one patient"),
    ):
        with pytest.raises(MetricError, match=message):
            identification_scores(gallery, range(n), probes, range(3))


# Intervals
# ----------------------------------------------------------------------------------------------------------------


def test_intervals_over_seeds():
    half = 4.302652730 * 0.02 / math.sqrt(3)  # t of two degrees, from a table
    assert mean_and_half_width([0.70, 0.72, 0.74]) == pytest.approx((0.72, half))
    assert math.isnan(mean_and_half_width([0.7])[1])
    for bad in ([], [0.7, math.nan]):
        with pytest.raises(MetricError):
            mean_and_half_width(bad)


def test_patients_are_drawn_with_all_their_rows():
    """The mean of 400 rows of 20 patients who always agree with themselves is as sure as 20
    numbers, not as 400."""
    value = np.repeat(np.random.default_rng(1).normal(size=20), 20)

    def mean(weight):
        assert (weight.reshape(20, 20) == weight[::20, None]).all()
        return weight @ value / weight.sum()

    patients = np.repeat(np.arange(20), 20)
    low, high = bootstrap_interval(mean, patients, n=2000)
    assert (high - low) / 2 == pytest.approx(1.96 * value[::20].std() / math.sqrt(20), rel=0.1)
    assert low < value.mean() < high
    assert np.array_equal(bootstrap_interval(mean, patients, n=2000), [low, high])


def test_the_interval_of_every_score():
    rng = np.random.default_rng(0)
    labels = rng.random((200, 26)) < 0.1
    scores = np.clip(labels * 0.5 + rng.random((200, 26)) * 0.6, 0, 1)
    diagnosis = Classification(labels, predict_classes("binary", scores), scores)
    low, high = bootstrap_interval(diagnosis, rng.integers(0, 90, 200), n=200)
    found = diagnosis(diagnosis.once_N)
    assert ((low <= found) & (found <= high)).all() and (low < high).sum() == 7  # sensitivity is 1
    assert np.isnan(bootstrap_interval(diagnosis, np.zeros(200), n=3)).all()  # one patient
    nothing = Classification(rows("", ""), rows("", ""), np.zeros((2, 26)))
    for ends in bootstrap_interval(nothing, [0, 1], n=20):
        assert np.isnan(ends[[1, 2, 4]]).all()  # not defined on any resample
        assert (ends[0], ends[3]) == (0, 1)


# Time to event
# --------------------------------------------------------------------------------------------------------------


def c_index(y_N, risk_N, weight_N):
    """Harrell's, over all pairs: i had the event, and j was followed for longer or censored then."""
    time, event = np.abs(y_N), y_N > 0
    longer = (time > time[:, None]) | ((time == time[:, None]) & ~event)
    pairs = (event[:, None] & longer) * weight_N[:, None] * weight_N
    above = (risk_N[:, None] > risk_N) + (risk_N[:, None] == risk_N) / 2
    return (pairs * above).sum() / pairs.sum()


@given(st.integers(2, 60), st.sampled_from([2, 5, 1000]), SEEDS)
@settings(max_examples=60)
def test_the_c_index_agrees_with_all_pairs(n, values, seed):
    """With ties in time, in risk and in both, censored and unknown times, and rows drawn twice."""
    rng = np.random.default_rng(seed)
    y_N = rng.integers(1, values + 1, n) * rng.choice([-1.0, 1.0, 1.0], n)
    y_N[rng.random(n) < 0.1] = np.nan
    risk_N = rng.integers(0, values, n).astype(float)
    statistic = statistic_of("survival", y_N[:, None], risk_N[:, None], classes=["risk"])
    for weight_N in (np.ones(n, int), rng.integers(0, 3, n)):
        with np.errstate(invalid="ignore"):
            expected = c_index(y_N, risk_N, weight_N)
        np.testing.assert_allclose(statistic(weight_N), [expected], rtol=1e-12)
    of = statistic.summary()["classes"]["risk"]
    assert (of["positives"], of["n"]) == ((y_N > 0).sum(), (~np.isnan(y_N)).sum())


def test_the_share_without_the_event_is_kaplan_and_meiers():
    """Six patients by hand: one is censored when another has the event, and counts as at risk."""
    x, y = metrics.kaplan_meier_curve(np.array([1.0, -2, 2, 3, 3, -4]))
    assert x.tolist() == [0, 1, 1, 2, 2, 3, 3, 4]
    by_hand = np.cumprod([1, 5 / 6, 4 / 5, 1 / 3])
    np.testing.assert_allclose(y, by_hand.repeat(2))
    assert [a.tolist() for a in metrics.kaplan_meier_curve(np.array([-1.0]))] == [[0, 1], [1, 1]]
