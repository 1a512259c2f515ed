"""Computes the metrics of every kind of task from numpy arrays, by their usual definitions.

    measure("multiclass", y_NK, scores_NK)["auroc"]   MEASURES of binary, multilabel, multiclass, regression and survival
    challenge_score(labels, outputs)                  the PhysioNet/CinC Challenge 2021's score, of [n, 26] zeros and ones
    statistic_of("binary", y_N1, scores_N1).summary() the measures, and figures for each class
    identification_scores(gallery_PD, gallery_ids, probe_QD, probe_ids)["accuracy"]
    mean, half = mean_and_half_width([0.701, 0.695, 0.704])    a 95 % t interval
    low, high = bootstrap_interval(statistic_of("binary", y_N1, scores_N1), patients, 1000)    95 %, by resampling patients
    if has_few_patients(kind, labels_NK, patients):       where a bootstrap says nothing: of two positives it can be 1 to 1
        intervals |= exact_intervals(metrics, labels_NK, patients)       # exact ones, or NaN

NaN in y is an unknown label, which is ignored. Means are over the classes (columns) for which a
metric is defined. In survival y are times, negative if censored.

The Challenge's classes are in the order of challenge_weights.csv, which is its weights.csv (BSD
2-clause, from GitHub: physionetchallenges/evaluation-2021). Its weights are multiples of 1/80, so
the score's sums are exact integers.

Axes: N rows, K classes, P gallery entries, Q probes, D width of an embedding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from itertools import pairwise
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from omnilead.data_tools.dataset import CLASSES
from omnilead.engine.settings.errors import Facts, OutputError
from omnilead.engine.settings.metrics import COSINE_TIE, METRIC_OF

Array = np.ndarray
Names = Sequence[str]
Floats = Sequence[float] | None
# The names of the metrics of each kind of task; the first is its score. For the Challenge's 26
# classes, `challenge` comes before them
MEASURES: dict[str, list[str]] = {}
for _metric in METRIC_OF.values():
    for _kind in _metric.kinds:
        MEASURES.setdefault(_kind, []).append(_metric.name)
NORMAL_CLASS = CLASSES.index("NSR")
CHALLENGE_WEIGHTS_FILE = "challenge_weights.csv"
WEIGHT_UNIT = 80  # the weights of the Challenge are multiples of 1/80
# A class counts as predicted above this probability, unless the model has a threshold for it
DEFAULT_THRESHOLD = 0.5
CALIBRATION_BINS = 10  # number of equally wide bins of probabilities
# A bootstrap needs a class that at least this many patients have and as many do not have; in
# survival, at least this many patients with the event
FEW_PATIENTS = 10
TOO_FEW_NOTE = (
    f"No class has {FEW_PATIENTS} patients with it and {FEW_PATIENTS} without it, or fewer than {FEW_PATIENTS} had the event: "
    "AUROC and other metrics of classes and events"
)
STANDARD_NORMAL = NormalDist()
# Limits of two corrections by bca_interval: of the share of resamples below the value, and of the
# acceleration. Beyond them few resamples are left, and an interval would shrink to the lowest or
# highest of them
BIAS_LIMITS = (0.1, 0.9)
MAX_ACCELERATION = 0.25
SIMILARITY_BLOCK = 2**23  # number of similarities computed at a time: 64 MB


class MetricError(OutputError):
    """Raised for numbers that cannot be scored. Its message is one line."""


@cache
def challenge_weights() -> Array:
    """Returns int64 [26, 26]: the credit, in eightieths, for predicting one class when another is
    true."""
    lines = (files("omnilead.downstream.tasks") / CHALLENGE_WEIGHTS_FILE).read_text().splitlines()
    table = np.genfromtxt(lines, delimiter=",", skip_header=1)
    return np.asarray(np.rint(table[:, 1:] * WEIGHT_UNIT), np.int64)


def predict_classes(kind: str, scores: Array, thresholds: Floats = None) -> Array:
    """Returns bool [N, K]: True for classes whose score is strictly above their threshold
    (fairseq-signals binary_cross_entropy.py:28) or, for multiclass, for the most probable class."""
    if kind == "multiclass":
        best_N1 = scores.argmax(1)[:, None]
        return np.asarray(best_N1 == np.arange(scores.shape[1]))
    return np.asarray(scores > np.asarray(thresholds or DEFAULT_THRESHOLD))


def measure(
    kind: str, y_NK: Array, scores_NK: Array, thresholds: Floats = None, classes: Names = ()
) -> dict[str, float]:
    """Returns the metrics that MEASURES lists for `kind`. Labels `y_NK` are 0, 1 or NaN (unknown),
    and scores are probabilities. For regression both are values; for survival they are times and
    risks."""
    return statistic_of(kind, y_NK, scores_NK, thresholds, classes).measures()


def statistic_of(
    kind: str, y_NK: Any, scores_NK: Any, thresholds: Floats = None, classes: Names = ()
) -> "Classification | Regression":
    y, scores = np.asarray(y_NK), np.asarray(scores_NK)
    classes = classes or list(map(str, range(y.shape[-1])))
    if kind == "regression":
        return Regression(y, scores, classes)
    if kind == "survival":
        return Concordance(y, scores, classes)
    outputs = predict_classes(kind, scores, thresholds)
    return Classification(y, outputs, scores, classes, kind)


def challenge_score(labels: Array, outputs: Array) -> float:
    """Returns the score of the Challenge: 1 if all outputs are correct, and 0 if they are no better
    than predicting "normal" for every row, or if every label is normal. It has no lower bound."""
    return challenge_statistic(labels, outputs)(np.ones(len(labels), np.int64))


def challenge_statistic(labels: Array, outputs: Array) -> Callable[[Array], float]:
    """Returns a function that takes a weight for each row, and returns the challenge_score of the
    rows so weighted."""
    return partial(
        _challenge_of_credits,
        *challenge_credits_and_norms(*bool_labels_and_outputs(labels, outputs)),
    )


def challenge_credits_and_norms(labels: Array, outputs: Array) -> tuple[Array, Array]:
    """Returns credits and norms, both [3, N], for three sets of predictions: the outputs, the
    labels, and "normal" for every row. A credit is in eightieths. A norm is the number of classes
    that are labelled or predicted."""
    normal = np.zeros_like(labels)
    normal[:, NORMAL_CLASS] = True
    # float32 is exact here: a sum has at most 676 terms, which are whole numbers of up to 80, and so
    # stays far below 2**24
    y = labels.astype(np.float32)
    worth_NK = y @ challenge_weights().astype(np.float32)
    credit_3N, norm_3N = [], []
    for predicted_NK in (outputs, labels, normal):
        credit_3N.append((worth_NK * predicted_NK).sum(1))
        norm_3N.append((labels | predicted_NK).sum(1))
    return np.array(credit_3N, np.int64), np.maximum(norm_3N, 1)


def _challenge_of_credits(credit_3N: Array, norm_3N: Array, weight_N: Array) -> float:
    """Returns the Challenge score of weighted rows. It first sums the credits of the rows with
    the same norm, as integers, so that the order of the rows does not matter."""
    columns = zip(norm_3N, credit_3N * weight_N, strict=True)
    sums = np.array([np.bincount(norm_N, credit_N, 27) for norm_N, credit_N in columns])
    # Labels and "normal" have equal credits only if every row is labelled normal or has no label
    if (sums[1] == sums[2]).all():
        return 0.0
    norms = np.maximum(np.arange(27), 1)
    observed, correct, inactive = (sums / norms).sum(1) / WEIGHT_UNIT
    return float((observed - inactive) / (correct - inactive))


def bool_labels_and_outputs(
    labels: Array, outputs: Array, classes: int = len(CLASSES)
) -> tuple[Array, Array]:
    """Returns labels and outputs as bool arrays of the same shape [n, classes]. Raises MetricError
    if they have other shapes or values."""
    arrays = []
    for name, values in (("labels", labels), ("outputs", outputs)):
        array = np.asarray(values)
        if array.ndim != 2 or array.shape[1] != classes or not len(array):
            raise MetricError(
                f"{name} have shape {list(array.shape)}: must be [n, {classes}] with n at least 1"
            )
        wrong_values = np.count_nonzero((array != 0) & (array != 1))
        if wrong_values:
            raise MetricError(
                f"{name}: {wrong_values:,} of {array.size:,} values are neither 0 nor 1"
            )
        arrays.append(array.astype(bool))
    y, p = arrays
    if len(y) != len(p):
        raise MetricError(f"labels have {len(y):,} rows, but outputs have {len(p):,}")
    return y, p


def order_and_run_ends(score_N: Array) -> tuple[Array, Array]:
    """Returns the order of the rows by descending score, and for each run of equal scores the
    position of its last row in this order."""
    order = np.argsort(-score_N)
    score = score_N[order]
    ends = np.append(score[1:] != score[:-1], True)
    return order, np.flatnonzero(ends)


class Ranking:
    """Computes AUROC and AUPRC of one class for any row weights. The rows are sorted only once.
    Only runs of equal scores that contain a positive add to the areas."""

    def __init__(self, y_N: Array, score_N: Array) -> None:
        """Sorts the rows. Labels `y_N` are 0, 1 or NaN: rows with NaN are ignored."""
        known_rows = np.flatnonzero(~np.isnan(y_N))
        order, last = order_and_run_ends(score_N[known_rows])
        self.order = known_rows[order]
        self.positive = np.flatnonzero(y_N[self.order] > 0)
        runs = np.unique(np.searchsorted(last, self.positive))
        first = np.append(0, last[:-1] + 1)[runs]
        stop = last[runs] + 1
        self.first_positive = np.searchsorted(self.positive, first)
        edges = np.unique([0, *first, *stop])
        self.edges = edges[edges < len(order)]  # weights are summed from each edge to the next
        self.first = np.searchsorted(edges, first)
        self.stop = np.searchsorted(edges, stop)

    def auroc_and_auprc(self, weight_NB: Array) -> Array:
        """Returns AUROC and AUPRC [2, B] for B sets of row weights. Without positives both are NaN.
        Without negatives AUROC is NaN and AUPRC is 1."""
        if not len(self.positive):
            return np.full((2, weight_NB.shape[1]), np.nan)
        weight_NB = weight_NB[self.order]
        new = np.add.reduceat(weight_NB[self.positive], self.first_positive)
        sums = np.cumsum(np.add.reduceat(weight_NB, self.edges), 0)
        before = np.insert(sums, 0, 0, axis=0)  # total weight of the rows before each edge
        start, end = before[self.first], before[self.stop]
        true = np.cumsum(new, 0)  # weight of the positives up to the end of each run
        positives = true[-1]
        negatives = before[-1] - positives
        # Each positive counts the negatives with a lower score, and half of those with the same
        # score
        below = negatives - (end - true + start - true + new) / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            auroc = (new * below).sum(0) / (positives * negatives)
            auprc = (new * true / np.maximum(end, 1e-9)).sum(0) / positives
        areas = np.where(positives > 0, [auroc, auprc], np.nan)
        areas[0, negatives <= 0] = np.nan
        return areas


def weighted_measures(y_N: Array, score_N: Array, weight_NB: Array) -> dict[str, Array]:
    """Returns auroc, auprc and brier of one class, the metrics by which models are compared, for B
    sets of row weights at once: each is [B]. AUROC and AUPRC are NaN without positives or without
    negatives."""
    auroc_B, auprc_B = Ranking(y_N, score_N).auroc_and_auprc(weight_NB)
    auprc_B[np.isnan(auroc_B)] = np.nan
    sums_2N = np.stack([squared_errors(y_N, score_N), ~np.isnan(y_N)], dtype=np.float32)
    error_B, known_B = sums_2N @ weight_NB
    with np.errstate(invalid="ignore"):
        brier_B = error_B / known_B
    return {"auroc": auroc_B, "auprc": auprc_B, "brier": brier_B}


def squared_errors(y: Array, scores: Array) -> Array:
    """Returns squared errors, and 0 where the label is unknown. Their mean over the rows of a class
    is its Brier score. Exclusive classes are scored like any others, each against the rest. Brier's
    own score is a sum over K classes, and so K times the mean of their scores."""
    return np.where(np.isnan(y), 0, np.square(scores - y))


class Statistic(ABC):
    """Base class for computing the metrics that MEASURES lists for a kind, with any row weights."""

    names: Names
    once_N: Array  # the weights that count each row once: all 1

    def __call__(self, weight_N: Array) -> Array:
        """Returns the metrics that `names` lists, where row i counts weight_N[i] times."""
        means = self.means(weight_N)
        return np.array([means[name] for name in self.names])

    @abstractmethod
    def by_class(self, weight_N: Array) -> dict[str, Array]: ...

    def means(self, weight_N: Array) -> dict[str, float]:
        means = {}
        for name, values_K in self.by_class(weight_N).items():
            means[name] = _finite_mean(values_K)
        return means

    def measures(self) -> dict[str, float]:
        return dict(zip(self.names, self(self.once_N).tolist(), strict=True))


class Classification(Statistic):
    """Computes the metrics of kinds with classes. Rows are sorted once, so that a bootstrap
    resample costs only a few cumulative sums."""

    def __init__(
        self,
        labels: Array,
        outputs: Array,
        scores: Array,
        classes: Names = CLASSES,
        kind: str = "multilabel",
    ) -> None:
        y_NK, scores = np.asarray(labels, np.float64), np.asarray(scores)
        self.known = ~np.isnan(y_NK)
        self.labels, outputs = bool_labels_and_outputs(np.nan_to_num(y_NK), outputs, len(classes))
        if scores.dtype.kind != "f":
            scores = scores.astype(float)
        if scores.shape != y_NK.shape:
            raise MetricError(
                f"scores have shape {list(scores.shape)}, but labels have shape {list(y_NK.shape)}"
            )
        if lost := np.count_nonzero(np.isnan(scores)):
            raise MetricError(f"{lost:,} of {scores.size:,} scores are NaN")
        self.classes, self.names = tuple(classes), MEASURES[kind]
        self.outputs = outputs & self.known
        self.once_N = np.ones(len(y_NK), np.int64)
        if self.classes == CLASSES and self.known.all():
            self.names = ("challenge", *self.names)
            self.credits = challenge_credits_and_norms(self.labels, self.outputs)
        self.rated_N = self.known.any(1)
        wrong_NK = self.labels != self.outputs
        self.right_N = self.rated_N & ~wrong_NK.any(1)
        error_NK = squared_errors(y_NK, scores)
        cells = (
            self.labels & self.outputs,
            self.outputs,
            self.labels,
            self.known,
            error_NK,
        )
        self.cells_NX = np.concatenate(cells, 1).astype(np.float64)
        self.rankings = list(map(Ranking, y_NK.T, scores.T))

    def means(self, weight_N: Array) -> dict[str, float]:
        means = super().means(weight_N)
        with np.errstate(invalid="ignore"):  # NaN if no row has a known label
            means["accuracy"] = weight_N @ self.right_N / (weight_N @ self.rated_N)
        means["balanced_accuracy"] = means["sensitivity"]
        if "challenge" in self.names:
            means["challenge"] = _challenge_of_credits(*self.credits, weight_N)
        return means

    def by_class(self, weight_N: Array) -> dict[str, Array]:
        """Returns auroc, auprc, f_measure, sensitivity, specificity and brier of each class; NaN
        where a denominator is zero."""
        weight_N1 = weight_N[:, None]
        areas = [ranking.auroc_and_auprc(weight_N1) for ranking in self.rankings]
        auroc_K, auprc_K = np.concatenate(areas, 1)
        sums_5K = (weight_N @ self.cells_NX).reshape(5, -1)
        true_K, predicted_K, positives_K, known_K, error_K = sums_5K
        negatives_K = known_K - positives_K
        with np.errstate(invalid="ignore"):
            return {
                "auroc": auroc_K,
                "auprc": auprc_K,
                "f_measure": 2 * true_K / (predicted_K + positives_K),
                "sensitivity": true_K / positives_K,
                "specificity": (negatives_K - (predicted_K - true_K)) / negatives_K,
                "brier": error_K / known_K,
            }

    def summary(self) -> Facts:
        """Returns the measures; in `classes`, the numbers of each class; and in `without_positives`
        and `without_negatives`, the classes that have none of these and therefore no AUROC."""
        columns = self.by_class(self.once_N)
        columns["positives"] = self.labels.sum(0)
        columns["predicted"] = self.outputs.sum(0)
        columns["n"] = self.known.sum(0)
        classes = values_by_class(self.classes, columns)
        never, always = [], []
        for name, row in classes.items():
            if not row["positives"]:
                never.append(name)
            elif row["positives"] == row["n"]:
                always.append(name)
        return {
            **self.measures(),
            "classes": classes,
            "without_positives": never,
            "without_negatives": always,
        }


class Regression(Statistic):
    names = MEASURES["regression"]

    def __init__(self, values: Array, predictions: Array, classes: Names) -> None:
        if lost := np.count_nonzero(~np.isfinite(predictions)):
            raise MetricError(f"{lost:,} of {predictions.size:,} predictions are not finite")
        self.known, self.classes = np.isfinite(values), tuple(classes)
        self.values = np.where(self.known, values, 0).astype(np.float64)
        self.errors = np.where(self.known, predictions - self.values, 0.0)
        self.once_N = np.ones(len(values), np.int64)

    def by_class(self, weight_N: Array) -> dict[str, Array]:
        """Returns the MEASURES of regression, mean_error and sd_error for each output; NaN where a
        denominator is zero."""
        w, e = weight_N[:, None] * self.known, self.errors
        with np.errstate(invalid="ignore", divide="ignore"):
            n = w.sum(0)
            shift = (w * e).sum(0) / n
            square = (w * e * e).sum(0)
            y = self.values - (w * self.values).sum(0) / n
            p = y + e - shift
            yy = (w * (y * y)).sum(0)
            pp = (w * (p * p)).sum(0)
            yp = (w * (y * p)).sum(0)
            columns = {
                "mae": (w * abs(e)).sum(0) / n,
                "rmse": np.sqrt(square / n),
                "r2": 1 - square / yy,
                "pearson": yp / np.sqrt(yy * pp),
                "mean_error": shift,
                "sd_error": np.sqrt(np.maximum(square / n - shift**2, 0)),
            }
        for value_K in columns.values():
            value_K[~np.isfinite(value_K)] = np.nan
        return columns

    def summary(self) -> Facts:
        columns = self.by_class(self.once_N) | {"n": self.known.sum(0)}
        return self.measures() | {"classes": values_by_class(self.classes, columns)}


class Concordance(Regression):
    """Harrell's C-index for any row weights: the share of comparable pairs in which the row with
    the earlier event has the higher risk. A pair is comparable if one row had the event, and the
    other was followed for longer or was censored at the time of that event. Equal risks count half.

    Counts pairs in n log n, with one cumulative sum for each bit of the ranks of the risks: among
    rows whose ranks agree in all higher bits, those with the bit are above the others. A weighting
    of 100,000 rows takes 20 ms."""

    names = MEASURES["survival"]

    def __init__(self, values: Array, predictions: Array, classes: Names) -> None:
        super().__init__(values, predictions, classes)
        # a row with an unknown label has time 0, so that it is never followed for longer than an event
        y = self.values[:, 0]
        # from the longest time to the shortest; at equal times, the censored rows first
        rows = np.lexsort((y > 0, -np.abs(y)))
        _, first, same = np.unique(
            y[rows],
            return_index=True,
            return_inverse=True,
        )
        event = np.flatnonzero(y[rows] > 0)
        longer = first[same[event]]  # for each event, how many rows were followed for longer
        rank = np.unique(predictions[rows, 0], return_inverse=True)[1]
        self.events = rows[event]
        self.rank = rank[event]
        self.levels = []
        for bit in range(int(rank.max()).bit_length() + 1):
            group = rank >> bit
            by_group = np.argsort(group, kind="stable")
            key = group[by_group] * len(y) + by_group
            begins = group[event] * len(y)
            start = np.searchsorted(key, begins)
            stop = np.searchsorted(key, begins + longer)
            self.levels.append((rows[by_group], start, stop))

    def by_class(self, weight_N: Array) -> dict[str, Array]:
        # for each level and each event, the weight of the rows in the event's group that were
        # followed for longer than the event
        longer = []
        for rows, start, stop in self.levels:
            before = np.append(0, np.cumsum(weight_N[rows]))
            longer.append(before[stop] - before[start])
        above = longer[0] / 2
        for bit, (half, with_bit) in enumerate(pairwise(longer)):
            above = above + (with_bit - half) * (self.rank >> bit & 1)
        weight = weight_N[self.events]
        with np.errstate(invalid="ignore"):  # NaN if no pair is comparable
            c_index = weight @ above / (weight @ longer[-1])
        return {
            "positives": weight.sum(keepdims=True),
            "c_index": np.array([c_index]),
        }


def kaplan_meier_curve(y_N: Array) -> tuple[Array, Array]:
    """Returns the corners of the Kaplan-Meier curve from time 0 to the last contact: the times, and
    the shares without the event. `y_N`: times, negative if censored."""
    times, events = np.unique(y_N[y_N > 0], return_counts=True)
    length = np.sort(np.abs(y_N))
    at_risk = len(y_N) - np.searchsorted(length, times)
    share = np.append(1, np.cumprod(1 - events / at_risk))
    x = np.append(0, times.repeat(2))
    return np.append(x, length[-1:]), share.repeat(2)


def values_by_class(classes: Names, columns: Mapping[str, Array]) -> dict[str, Facts]:
    """Returns {class: {column: value}}."""
    table: dict[str, Facts] = {}
    for k, name in enumerate(classes):
        table[name] = {column: values_K[k].item() for column, values_K in columns.items()}
    return table


def _finite_mean(values_K: Array) -> float:
    finite_K = values_K[np.isfinite(values_K)]
    return float(finite_K.mean()) if len(finite_K) else np.nan


def identification_scores(
    gallery_PD: Array, gallery_ids: Sequence[Any], probe_QD: Array, probe_ids: Sequence[Any]
) -> Facts:
    """Scores patient identification: how often the gallery entry with the highest cosine similarity
    to a probe is of the same patient (paper, "Patient identification").

    A tie counts as the expected result of a random draw among its entries; a zero vector ties with
    all. `ties`: the share of probes with several best entries; `chance`: the accuracy of a random
    draw from the gallery; `one_sided`: probes whose patient is not in the gallery, always misses;
    `cmc`: the share of probes whose patient is among the first 1, 2, ... entries; `hits`, `same`,
    `other`: for each probe the expected hit, and the highest similarity to the same and to other
    patients."""
    gallery = _unit_embeddings(gallery_PD, gallery_ids, "gallery")
    probes = _unit_embeddings(probe_QD, probe_ids, "probe")
    names = np.concatenate([np.asarray(gallery_ids), np.asarray(probe_ids)])
    ids = np.unique(names, return_inverse=True)[1]
    gallery_patients, probe_patients = ids[: len(gallery)], ids[len(gallery) :]
    blocks = _similarity_counts_by_block(gallery, gallery_patients, probes, probe_patients)
    better, tied, right, best, same, other = map(np.concatenate, zip(*blocks, strict=True))
    within_QR = _probability_within_rank(better, tied, right, min(len(gallery), 50))
    entries_Q = np.bincount(gallery_patients, minlength=ids.max() + 1)[probe_patients]
    cmc = within_QR.mean(0)
    return {
        "accuracy": float(cmc[0]),
        "top5": float(cmc[min(5, len(cmc)) - 1]),
        "ties": float((best > 1).mean()),
        "chance": float(entries_Q.mean() / len(gallery)),
        "n_probes": len(probes),
        "n_gallery": len(gallery),
        "one_sided": int((entries_Q == 0).sum()),
        "cmc": cmc,
        "hits": within_QR[:, 0],
        "same": same,
        "other": other,
    }


def _unit_embeddings(vectors: Array, ids: Sequence[Any], name: str) -> Array:
    array = np.asarray(vectors, np.float64)
    if array.ndim != 2 or not len(array) or len(array) != len(ids):
        raise MetricError(
            f"{name} embeddings have shape {list(array.shape)}, for {len(ids):,} patients: must be "
            "[patients, width], with at least one patient"
        )
    finite_N = np.isfinite(array).all(1)
    if not finite_N.all():
        lost = np.count_nonzero(~finite_N)
        raise MetricError(f"{lost:,} of {len(array):,} {name} embeddings are not finite")
    return unit_vectors(array)


def unit_vectors(x_ND: Array) -> Array:
    """Scales rows to length 1; rows of zeros stay zero."""
    largest = np.abs(x_ND).max(1, keepdims=True, initial=0)
    # Without this division, the squares of small numbers would underflow
    x_ND = x_ND / np.where(largest > 0, largest, 1)
    length = np.linalg.norm(x_ND, axis=1, keepdims=True)
    return np.asarray(x_ND / np.where(length > 0, length, 1))


def _similarity_counts_by_block(
    gallery: Array, gallery_patients: Array, probes: Array, probe_patients: Array
) -> Iterator[tuple[Array, ...]]:
    """Yields six arrays for each block of probes. The first four are numbers of gallery entries:
    more similar to the probe than the best entry of its own patient; as similar as that entry; as
    similar and of the same patient; tied for the highest similarity. The last two are the highest
    similarity to the same patient, and to other patients."""
    step = max(1, SIMILARITY_BLOCK // len(gallery))
    for start in range(0, len(probes), step):
        similarity = probes[start : start + step] @ gallery.T
        own_patient = probe_patients[start : start + step, None] == gallery_patients
        same = similarity.max(1, where=own_patient, initial=-np.inf)
        other = similarity.max(1, where=~own_patient, initial=-np.inf)
        first = np.maximum(same, other)
        tied = np.abs(similarity - same[:, None]) <= COSINE_TIE
        yield (
            (similarity > same[:, None] + COSINE_TIE).sum(1),
            tied.sum(1),
            (tied & own_patient).sum(1),
            (similarity >= first[:, None] - COSINE_TIE).sum(1),
            np.where(np.isfinite(same), same, np.nan),
            np.where(np.isfinite(other), other, np.nan),
        )


def _probability_within_rank(better: Array, tied: Array, right: Array, ranks: int) -> Array:
    """Returns [Q, ranks]: the probability that the probe's patient is among the first 1, 2, ...
    entries, with ties in random order."""
    missed = np.ones(len(better))
    probabilities = []
    for rank in range(ranks):
        drawn_before = rank - better  # number of tied entries that are drawn before this rank
        left = tied - drawn_before
        drawing = (drawn_before >= 0) & (left > 0)
        chance = np.maximum(left - right, 0) / np.maximum(left, 1)
        missed = missed * np.where(drawing, chance, 1.0)
        probabilities.append(1 - missed)
    return np.stack(probabilities, 1)


class Calibration(NamedTuple):
    """How well probabilities agree with labels, for each bin of probabilities, over all classes."""

    mean: Array  # mean probability in each bin
    share: Array  # share of positives in each bin; NaN in bins with fewer than FEW_PATIENTS rows
    examples: Array  # number of known labels in each bin
    error: float  # expected calibration error over all bins


def calibration_curve(labels: Array, scores: Array) -> Calibration:
    """Returns how well probabilities agree with the known labels, in bins of equal width."""
    is_known = ~np.isnan(labels.astype(float))
    p, y = scores[is_known].astype(float), labels[is_known]
    bin_of = np.minimum((p * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    row_of = np.nonzero(is_known)[0]
    count = np.bincount(bin_of, minlength=CALIBRATION_BINS)
    n = np.maximum(count, 1)
    mean = np.bincount(bin_of, p, CALIBRATION_BINS) / n
    true = np.bincount(bin_of, y, CALIBRATION_BINS) / n
    gap = np.abs(mean - true)
    error = (gap * count).sum() / max(len(p), 1)
    for b in range(CALIBRATION_BINS):
        if len(np.unique(row_of[bin_of == b])) < FEW_PATIENTS:
            true[b] = np.nan
    return Calibration(mean, true, count, float(error))


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean, and half the width of its 95 % t interval. The half width of a single value
    is NaN."""
    array = np.asarray(values, float)
    if not array.size or not np.isfinite(array).all():
        raise MetricError(
            f"{list(array)}: an interval needs at least one value, and finite values only"
        )
    if len(array) == 1:
        return float(array[0]), np.nan
    # imported here, as scipy.stats is slow to import and most commands do not need it
    from scipy import stats

    width = stats.t.ppf(0.975, len(array) - 1)
    half = width * array.std(ddof=1) / np.sqrt(len(array))
    return float(array.mean()), float(half)


def exact_interval(positives: int, people: int) -> list[float]:
    """Returns the exact 95 % interval (Clopper and Pearson) of the share positives / people."""
    from scipy import stats

    return list(map(float, stats.binomtest(positives, people).proportion_ci()))


def bootstrap_interval(statistic: Callable[[Array], Any], groups: Sequence[Any], n: int) -> Array:
    """Returns the 95 % interval [2, ...] of `statistic`, a function of how often each row was
    drawn, from `n` resamples. Patients (`groups`) are drawn with all their rows. A resample on
    which the statistic is undefined (NaN) is left out. The interval is NaN if there is only one
    patient."""
    patient_N = _group_numbers(groups)
    patients = int(patient_N.max()) + 1
    rng = np.random.default_rng(0)
    values = [statistic(np.ones(len(patient_N), np.int64))]
    for _ in range(n):
        drawn_P = np.bincount(rng.integers(patients, size=patients), minlength=patients)
        values.append(statistic(drawn_P[patient_N]))
    statistics = np.array(values, float)
    if patients == 1:
        statistics[1:] = np.nan
    return np.apply_along_axis(bca_interval, 0, statistics)


def bca_interval(value_B: Array) -> Array:
    """Returns the 95 % interval (low, high) of a statistic. `value_B` holds its value, and then its
    values on resamples. The percentiles are corrected for bias and skewness (Efron 1987, BCa). The
    interval is NaN where the statistic is undefined.

    Plain percentiles are biased: a resample repeats positives, which rank beside themselves, so its
    AUPRC is higher than on the rows themselves. Plain 95 % percentiles covered the AUPRC of 5 folds
    in 69 of 100 draws, these cover it in 93 (tests/downstream/evaluation/test_intervals.py). The
    acceleration is a sixth of the skewness of the resamples, as it is for sums."""
    value, drawn_B = value_B[0], value_B[1:][np.isfinite(value_B[1:])]
    if not np.isfinite(value) or not len(drawn_B):
        return np.full(2, np.nan)
    below = (np.mean(drawn_B < value) + np.mean(drawn_B <= value)) / 2
    bias = STANDARD_NORMAL.inv_cdf(np.clip(below, *BIAS_LIMITS))
    gap_B = drawn_B - drawn_B.mean()
    spread = np.sqrt(np.mean(gap_B**2))
    skewness = np.mean((gap_B / spread) ** 3) if spread > 0 else 0.0
    acceleration = np.clip(skewness / 6, -MAX_ACCELERATION, MAX_ACCELERATION)
    shares = []
    for tail in (0.025, 0.975):
        z = bias + STANDARD_NORMAL.inv_cdf(tail)
        shares.append(STANDARD_NORMAL.cdf(bias + z / (1 - acceleration * z)))
    low, high = np.quantile(drawn_B, shares)
    return np.array([min(low, value), max(high, value)])


def _group_numbers(groups: Sequence[Any] | Array) -> Array:
    """Returns the number of the group of each row, counted from 0."""
    return np.unique(np.asarray(groups), return_inverse=True)[1]


def has_few_patients(kind: str, labels_NK: Array, patients: Sequence[Any] | Array) -> bool:
    """Returns True if each class has fewer than FEW_PATIENTS patients with it, or without it. For
    survival: if fewer patients than that had the event."""
    if kind == "regression":
        return False
    patient_N = _group_numbers(patients)
    for y_N in labels_NK.T:
        with_it = without_it = np.unique(patient_N[y_N > 0])
        if kind != "survival":
            without_it = np.unique(patient_N[y_N == 0])
        if min(len(with_it), len(without_it)) >= FEW_PATIENTS:
            return False
    return True


def exact_intervals(
    metrics: Mapping[str, Any], labels_NK: Array, patients: Sequence[Any]
) -> dict[str, list[float]]:
    """Returns exact intervals of accuracy and, for a single class, of sensitivity and specificity.
    The other intervals are NaN. If two rows are of the same patient, or if there is only one row,
    all are NaN."""
    intervals = {name: [np.nan, np.nan] for name in metrics}
    if not len(set(patients)) == len(labels_NK) > 1:
        return intervals
    known_NK = ~np.isnan(labels_NK.astype(float))
    rows = {"accuracy": known_NK.any(1)}
    if labels_NK.shape[1] == 1:
        rows["sensitivity"] = labels_NK == 1
        rows["specificity"] = labels_NK == 0
    for name, counted in rows.items():
        n = int(counted.sum())
        if n and name in metrics:
            intervals[name] = exact_interval(round(metrics[name] * n), n)
    return intervals
