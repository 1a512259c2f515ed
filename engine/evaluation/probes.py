"""What frozen embeddings are worth: a linear classifier, nearest neighbours, and recognising a patient. Arrays in, scores out.

    linear(train, labels, valid, valid_labels, test)     probabilities [n, K] of test, and the strength that was chosen
    nearest(train, labels, valid, valid_labels, test)    the same, and how many neighbours

Features are standardised by the training rows. What there is to choose is chosen by the mean squared error of probabilities on
the valid rows, which is defined even where a class has no positive.

Axes: N rows, D width of an embedding, K classes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

Array = np.ndarray
STRENGTHS = (1.0, 0.1, 0.01, 1e-3, 1e-4)  # of the penalty on the mean loss; strong ones first, each starts where the last ended
NEIGHBOURS = (1, 5, 10, 20, 50, 100)
BLOCK = 1024  # rows compared at a time


class Probed(NamedTuple):
    scores_NK: Array
    chosen: float
    error: float  # on the valid rows


class Rows(NamedTuple):
    train_ND: Array
    labels_NK: Array
    valid_ND: Array
    valid_labels_NK: Array
    test_ND: Array


def linear(rows: Rows, strengths: Sequence[float] = STRENGTHS) -> Probed:
    """One logistic regression for each class, all in one problem of scipy's L-BFGS."""
    train, valid, test = standardised(rows.train_ND, rows.valid_ND, rows.test_ND)
    found: list[Probed] = []
    weights = np.zeros((train.shape[1] + 1, rows.labels_NK.shape[1]))
    for strength in strengths:
        weights = logistic(train, rows.labels_NK, strength, weights)
        error = _error(expit(valid @ weights[1:] + weights[0]), rows.valid_labels_NK)
        found.append(Probed(expit(test @ weights[1:] + weights[0]), strength, error))
    return min(found, key=lambda one: one.error)


def logistic(x_ND: Array, y_NK: Array, strength: float, start: Array | None = None) -> Array:
    """[1 + D, K], the intercepts first: least mean log loss + strength / 2 * squared weights (not intercepts)."""
    y, shape = y_NK.astype(np.float64), (x_ND.shape[1] + 1, y_NK.shape[1])

    def loss(flat: Array) -> tuple[float, Array]:
        w = flat.reshape(shape)
        z_NK = x_ND @ w[1:] + w[0]
        value = (np.logaddexp(0, z_NK) - y * z_NK).sum() / len(y) + strength / 2 * np.square(w[1:]).sum()
        wrong_NK = (expit(z_NK) - y) / len(y)
        gradient = np.concatenate([wrong_NK.sum(0)[None], x_ND.T @ wrong_NK + strength * w[1:]])
        return float(value), gradient.ravel()

    first = np.zeros(shape) if start is None else start
    done = minimize(loss, first.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 1000, "ftol": 1e-10, "gtol": 1e-6})
    return np.asarray(done.x.reshape(shape))


def nearest(rows: Rows, neighbours: Sequence[int] = NEIGHBOURS) -> Probed:
    """The share of positives among the k training rows of greatest cosine."""
    train, valid, test = (_units(x) for x in standardised(rows.train_ND, rows.valid_ND, rows.test_ND))
    possible = [k for k in neighbours if k <= len(train)] or [len(train)]
    best = [Probed(np.empty(0), k, _error(s, rows.valid_labels_NK)) for k, s in votes(train, rows.labels_NK, valid, possible)]
    k = int(min(best, key=lambda one: one.error).chosen)
    scores = votes(train, rows.labels_NK, test, [k])[0][1]
    return Probed(scores, k, min(one.error for one in best))


def votes(train_ND: Array, labels_NK: Array, asked_ND: Array, neighbours: Sequence[int]) -> list[tuple[int, Array]]:
    """(k, shares of positives [n, K]) for each k; of equally similar rows the first counts."""
    most, labels = max(neighbours), labels_NK.astype(np.float64)
    shares: list[list[Array]] = [[] for _ in neighbours]
    for at in range(0, len(asked_ND), BLOCK):
        order = np.argsort(-(asked_ND[at : at + BLOCK] @ train_ND.T), axis=1, kind="stable")[:, :most]
        for k, found in zip(neighbours, shares, strict=True):
            found.append(labels[order[:, :k]].mean(1))
    return [(k, np.concatenate(found)) for k, found in zip(neighbours, shares, strict=True)]


def standardised(train_ND: Array, *others: Array) -> tuple[Array, ...]:
    """By the mean and deviation of the first; what does not vary there is zero."""
    mean, deviation = train_ND.mean(0, dtype=np.float64), train_ND.std(0, dtype=np.float64)
    scale = np.where(deviation > 0, 1 / np.maximum(deviation, 1e-12), 0.0)
    return tuple((x.astype(np.float64) - mean) * scale for x in (train_ND, *others))


def _units(x_ND: Array) -> Array:
    return np.asarray(x_ND / np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12))


def _error(scores_NK: Array, labels_NK: Array) -> float:
    return float(np.square(scores_NK - labels_NK).mean())


PROBES: dict[str, Callable[[Rows], Probed]] = {"linear": linear, "nearest": nearest}
