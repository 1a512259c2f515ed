"""Computes scores with 95 % intervals, and paired differences between models. All are computed on the
same bootstrap resamples of the test patients and of the draws of labels.

    weight_NB = bootstrap_weights(patient_N)              # B weightings of the rows; the first counts each once
    samples = mean_over_classes(metrics_by_class("multilabel", y_NK, scores_NK, weight_NB))     # metrics [B]
    rows_and_differences({("A", "sex", "12", 1.0): (facts, samples), ...}, {"A": ""})           # rows and differences
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from omnilead.engine.settings.errors import Facts

from ..tasks.kinds import KINDS
from ..tasks.metrics import Array, bca_interval, exact_interval, statistic_of, weighted_measures

ROW_KEYS = ("model", "task", "leads", "share")  # the keys that together identify a row
RESAMPLES = 1000
# The function metrics.bca_interval makes the intervals, except that of an accuracy of 0 or 1, which
# is exact. A bench.json without `interval_method` has plain percentiles
INTERVAL_METHOD = "BCa"
RANKING_METRICS = ("auroc", "auprc", "c_index")  # these metrics rank ECGs by their scores
METRIC_RANGES = {"mae": (0, np.inf), "rmse": (0, np.inf), "r2": (-np.inf, 1), "pearson": (-1, 1)}
DEFAULT_METRIC_RANGE = (0, 1)  # the range of all other metrics
# {metric: its values on the B weightings of the rows}, [B] or, for each of K classes, [K, B]
Samples = dict[str, Array]
Scored = tuple[Facts, Samples]
Scores = dict[tuple[Any, ...], Scored]  # by ROW_KEYS


def bootstrap_weights(group_N: Array) -> Array:
    """Returns weights [N, B]: how often each row counts in each of B weightings. In the first, each
    row counts once. In each of the others, a row counts as often as its group was drawn in a
    bootstrap of the groups, or the weight is NaN if there is only one group."""
    groups, group_N = np.unique(group_N, return_inverse=True)
    n, rng = len(groups), np.random.default_rng(0)
    columns_BG: list[Array] = [np.ones(n)]
    for _ in range(RESAMPLES):
        drawn_G = np.bincount(rng.integers(n, size=n), minlength=n)
        columns_BG.append(drawn_G if n > 1 else np.array([np.nan]))
    return np.asarray(np.stack(columns_BG, 1, dtype=np.float32)[group_N])


def average_draws(draws: Sequence[Samples], seed: int = 1) -> Samples:
    """Returns the metrics, averaged over draws of labels or of random weights. For n draws,
    each resample averages n - 1 draws that are picked at random with replacement. These means vary as
    much as the mean of n draws does (Rao and Wu 1988)."""
    n, fewer = len(draws), max(1, len(draws) - 1)
    weight_BR = np.random.default_rng(seed).multinomial(fewer, np.full(n, 1 / n), RESAMPLES) / fewer
    weight_RB = np.vstack([np.full(n, 1 / n), weight_BR]).T
    means = {}
    for name in draws[0]:
        means[name] = sum(
            weight_B * samples[name] for samples, weight_B in zip(draws, weight_RB, strict=True)
        )
    return means


def metrics_by_class(kind: str, y_NK: Array, scores_NK: Array, weight_NB: Array) -> Samples:
    """Returns {metric: values [K, B]}, for each class and weighting. In a regression, the values
    are means over the K columns, with the shape [1, B]."""
    if not KINDS[kind].has_classes:
        statistic = statistic_of(kind, y_NK, scores_NK)
        values_MB = np.stack([statistic(weight_N) for weight_N in weight_NB.T], 1)
        return dict(zip(statistic.names, values_MB[:, None], strict=True))
    columns = zip(y_NK.T, scores_NK.T, strict=True)
    classes = [weighted_measures(y_N, score_N, weight_NB) for y_N, score_N in columns]
    return {name: np.stack([metrics[name] for metrics in classes]) for name in classes[0]}


def cross_validated_metrics(
    kind: str, y_NK: Array, scores_NK: Array, weight_NB: Array, fold_N: Array
) -> Samples:
    """Returns {metric: values [K, B]} of cross-validation. Each fold has a probe of its own, so
    scores of two folds can be compared only if they are values or probabilities. Metrics that rank
    ECGs therefore rank them within each fold, and average over the folds. The weight of a fold is
    its number of pairs of an ECG with the class and an ECG without it. In survival, the weight is
    the number of events of the fold. A fold in which the metric is undefined has no weight."""
    samples = metrics_by_class(kind, y_NK, scores_NK, weight_NB)
    ranks = [name for name in RANKING_METRICS if name in samples]
    sums = {name: np.zeros_like(samples[name]) for name in ranks}
    counts = {name: np.zeros_like(samples[name]) for name in ranks}
    for fold in np.unique(fold_N) if ranks else ():
        rows = fold_N == fold
        y_RK, weight_RB = y_NK[rows], weight_NB[rows]
        of_fold_KB = (y_RK > 0).T @ weight_RB
        if KINDS[kind].has_classes:
            of_fold_KB = of_fold_KB * ((y_RK == 0).T @ weight_RB)
        ranked = metrics_by_class(kind, y_RK, scores_NK[rows], weight_RB)
        for name in ranks:
            defined_KB = (of_fold_KB > 0) & ~np.isnan(ranked[name])
            sums[name] += np.where(defined_KB, ranked[name] * of_fold_KB, 0)
            counts[name] += np.where(defined_KB, of_fold_KB, 0)
    with np.errstate(invalid="ignore"):  # a class for which no fold has weight gets NaN
        return samples | {name: sums[name] / counts[name] for name in ranks}


def widen_spread(samples: Samples, fold_N: Array) -> Samples:
    """Widens the spread of the resamples by sqrt(1 + K / (K - 1)), as in the corrected t test of
    Nadeau and Bengio (2003). The probes of K folds share most of their ECGs, so their errors are
    correlated, and resampling the test patients does not show this. Without the factor, 95 %
    intervals covered the AUROC on 1,300 other ECGs in 33 of 40 draws of 360 ECGs of PTB-XL; with
    the factor, in all 40."""
    folds, wider = len(np.unique(fold_N)), {}
    factor = np.sqrt(1 + folds / (folds - 1)) if folds > 1 else 1.0
    for name, value_KB in samples.items():
        # numpy would warn about a metric that is undefined in all resamples; it stays NaN
        with warnings.catch_warnings(action="ignore"):
            mean_K1 = np.nanmean(value_KB[:, 1:], 1, keepdims=True)
        drawn = mean_K1 + factor * (value_KB[:, 1:] - mean_K1)
        drawn = drawn.clip(*METRIC_RANGES.get(name, DEFAULT_METRIC_RANGE))
        wider[name] = np.hstack([value_KB[:, :1], drawn])
    return wider


def mean_over_classes(samples: Samples, is_few: bool = False) -> Samples:
    """Returns the mean of each metric [K, B] over the classes for which it is defined. `is_few`:
    there are too few patients for a bootstrap, so the values on resamples become NaN."""
    means = {}
    # numpy would warn about a metric that is defined for no class; it stays NaN
    with warnings.catch_warnings(action="ignore"):
        for name, value_KB in samples.items():
            means[name] = np.nanmean(value_KB, 0)
            if is_few:
                means[name][1:] = np.nan
    return means


def rows_and_differences(scores: Scores, random: Mapping[str, str]) -> Facts:
    """Returns the rows of bench.json, and their differences from the first model and from random
    weights of the same architecture. `random`: {name of a row: name of its row of random
    weights}."""
    rows, differences, first = [], [], next(iter(random))
    settings = list(dict.fromkeys(key[1:] for key in scores))
    for key in sorted(scores, key=lambda key: settings.index(key[1:])):
        facts, samples = scores[key]
        about = dict(zip(ROW_KEYS, key, strict=True))
        row: Facts = {**about, **facts, "metrics": {}, "intervals": {}}
        for name, value_B in samples.items():
            people = facts["patients"] if name == "accuracy" else 0
            row["metrics"][name] = float(value_B[0])
            row["intervals"][name] = score_interval(value_B, people)
        rows.append(row)
        for other in dict.fromkeys([random[key[0]], first]):
            # A row that does not identify patients has no score of identification to compare with
            if other == key[0] or (other, *key[1:]) not in scores:
                continue
            _, against = scores[other, *key[1:]]
            for name, value_B in samples.items():
                gap_B = value_B - against[name]
                gap = {"difference": float(gap_B[0]), "interval": score_interval(gap_B)}
                differences.append({**about, "against": other, "metric": name, **gap})
    return {"rows": rows, "differences": differences, "interval_method": INTERVAL_METHOD}


def score_interval(value_B: Array, people: int = 0) -> list[float]:
    """Returns the 95 % interval of a score or of a difference. If a score is a share of `people` and
    is 0 or 1, resamples never change it, so the interval is Clopper and Pearson's. If all resamples
    agree, the interval is NaN, unless the value is 0, as the difference between equal models."""
    if people > 1 and np.isclose(value_B[0], (0, 1)).any():
        return exact_interval(round(value_B[0]) * people, people)
    ends: list[float] = bca_interval(value_B).tolist()
    if value_B[0] and np.isclose(ends[0], ends[1]):
        return [np.nan, np.nan]
    return ends
