"""What frozen embeddings are worth: linear probe, k nearest neighbours, patient identification.

    scores = probe(dataset, halves)      # halves: embeddings of the crops of probe_rows(dataset), one row for each half
    print(report(scores))

Diagnosis: one row for each record, the mean over its halves; fitted on dx train, chosen on valid, scored on test. Features are
standardised by the training rows; penalty and number of neighbours are chosen by the mean squared error of probabilities on the
valid rows, which is defined even where a class has no positive. Identification: the first 5 s of each gallery and probe crop,
by cosine (paper, section "Patient identification").

Axes: N rows, D width of an embedding, K classes, H halves.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from scipy.optimize import minimize
from scipy.special import expit

from data_tools.dataset import Dataset
from engine.common import ConfigError
from engine.data.leakage import patient_ids
from engine.evaluation.metrics import METRICS, Array, identification, outputs_of, summary, unit_vectors
from engine.evaluation.results import by_record

STRENGTHS = (1.0, 0.1, 0.01, 1e-3, 1e-4)  # of the penalty on the mean loss; strongest first, each starts from the last solution
NEIGHBOURS = (1, 5, 10, 20, 50, 100)
BLOCK = 1024  # rows compared at a time
DX, IDENTITY = ("train", "valid", "test"), ("gallery", "probe")


class ProbeData(NamedTuple):
    train_ND: Array
    labels_NK: Array
    valid_ND: Array
    valid_labels_NK: Array
    test_ND: Array


class ProbeFit(NamedTuple):
    scores_NK: Array  # probabilities of the test rows
    chosen: float
    error: float  # on the valid rows


def probe_rows(dataset: Dataset) -> Array:
    """Rows of the crops that the probes need."""
    rows = [dataset.select(dx=role) for role in DX] + [dataset.select(identity=role) for role in IDENTITY]
    if not any(map(len, rows)):
        raise ConfigError(f"{dataset.root.url}: no crop has a role: build it with `data_tools shard --plan paper`")
    return np.unique(np.concatenate(rows))


def probe(dataset: Dataset, halves: pa.Table) -> dict[str, Any]:
    row_H = halves["row"].to_numpy()
    c_HD = halves["embedding"].combine_chunks().flatten().to_numpy().reshape(len(row_H), -1)
    scores: dict[str, Any] = {}
    of_role = {role: np.flatnonzero(np.isin(row_H, dataset.select(dx=role))) for role in DX}
    if all(map(len, of_role.values())):
        (train, y), (valid, valid_y), (test, test_y) = (records(dataset, row_H[at], c_HD[at]) for at in of_role.values())
        for name, fit in PROBES.items():
            fitted = fit(ProbeData(train, y, valid, valid_y, test))
            numbers = summary(test_y, outputs_of(fitted.scores_NK), fitted.scores_NK)
            scores[name] = {metric: numbers[metric] for metric in METRICS} | {"chosen": fitted.chosen}
        scores["records"] = {role: len(x) for role, x in zip(DX, (train, valid, test), strict=True)}
    first_H, ids = np.diff(row_H, prepend=-1) != 0, patient_ids([dataset])[0]
    gallery, probes = (np.flatnonzero(first_H & np.isin(row_H, dataset.select(identity=role))) for role in IDENTITY)
    if len(gallery) and len(probes):
        found = identification(c_HD[gallery], ids[row_H[gallery]].tolist(), c_HD[probes], ids[row_H[probes]].tolist())
        names = ("accuracy", "top5", "chance", "n_probes", "n_gallery", "one_sided")
        scores["identification"] = {name: found[name] for name in names}
    return scores


def records(dataset: Dataset, row_H: Array, c_HD: Array) -> tuple[Array, Array]:
    """Mean embeddings [N, D] and labels [N, 26] of the records."""
    sources, names = dataset.table(["source", "record"]).take(row_H).to_pydict().values()
    keys = [f"{source}/{name}" for source, name in zip(sources, names, strict=True)]
    labels, c_ND, _ = by_record(dataset.labels[row_H], c_HD, keys, keys)
    return c_ND, labels


def report(scores: dict[str, Any]) -> str:
    lines = []
    if count := scores.get("records"):
        lines.append(f"diagnosis, {count['test']:,} records of test ({count['train']:,} train, {count['valid']:,} valid)")
        lines.append(f"{'':18}" + "".join(f"{metric:>11}" for metric in METRICS))
        for name, parameter in (("linear", "strength"), ("nearest", "k")):
            numbers = "".join(f"{scores[name][metric]:11.4f}" for metric in METRICS)
            lines.append(f"{name:18}{numbers}   {parameter} {scores[name]['chosen']:g}")
    if found := scores.get("identification"):
        against = f"{found['n_probes']:,} probes, {found['n_gallery']:,} in the gallery; chance {found['chance']:.4f}"
        absent = f"; {found['one_sided']:,} of patients not in the gallery: misses" if found["one_sided"] else ""
        lines.append(f"{'identification':18}{found['accuracy']:11.4f}   {against}{absent}")
    return "\n".join(lines)


def linear(data: ProbeData, strengths: Sequence[float] = STRENGTHS) -> ProbeFit:
    """One logistic regression for each class, all solved together by L-BFGS."""
    train, valid, test = standardised(data.train_ND, data.valid_ND, data.test_ND)
    fits: list[ProbeFit] = []
    weights = np.zeros((train.shape[1] + 1, data.labels_NK.shape[1]))
    for strength in strengths:
        weights = logistic(train, data.labels_NK, strength, weights)
        error = _error(expit(valid @ weights[1:] + weights[0]), data.valid_labels_NK)
        fits.append(ProbeFit(expit(test @ weights[1:] + weights[0]), strength, error))
    return min(fits, key=lambda fit: fit.error)


def logistic(x_ND: Array, y_NK: Array, strength: float, start: Array | None = None) -> Array:
    """[1 + D, K], intercepts first: least mean log loss + strength / 2 * squared weights (not intercepts)."""
    y, shape = y_NK.astype(np.float64), (x_ND.shape[1] + 1, y_NK.shape[1])

    def loss(flat: Array) -> tuple[float, Array]:
        w = flat.reshape(shape)
        z_NK = x_ND @ w[1:] + w[0]
        value = (np.logaddexp(0, z_NK) - y * z_NK).sum() / len(y) + strength / 2 * np.square(w[1:]).sum()
        residual_NK = (expit(z_NK) - y) / len(y)
        gradient = np.concatenate([residual_NK.sum(0)[None], x_ND.T @ residual_NK + strength * w[1:]])
        return float(value), gradient.ravel()

    first = np.zeros(shape) if start is None else start
    done = minimize(loss, first.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 1000, "ftol": 1e-10, "gtol": 1e-6})
    return np.asarray(done.x.reshape(shape))


def nearest(data: ProbeData, neighbours: Sequence[int] = NEIGHBOURS) -> ProbeFit:
    """The share of positives among the k training rows of greatest cosine."""
    train, valid, test = (unit_vectors(x) for x in standardised(data.train_ND, data.valid_ND, data.test_ND))
    possible = [k for k in neighbours if k <= len(train)] or [len(train)]
    shares = votes(train, data.labels_NK, valid, possible)
    errors = {k: _error(share_NK, data.valid_labels_NK) for k, share_NK in shares.items()}
    k = min(errors, key=errors.__getitem__)
    return ProbeFit(votes(train, data.labels_NK, test, [k])[k], k, errors[k])


def votes(train_ND: Array, labels_NK: Array, query_ND: Array, neighbours: Sequence[int]) -> dict[int, Array]:
    """For each k the shares of positives [N, K]; of equally similar rows the first counts."""
    labels = labels_NK.astype(np.float64)
    shares: dict[int, list[Array]] = {k: [] for k in neighbours}
    for at in range(0, len(query_ND), BLOCK):
        order = np.argsort(-(query_ND[at : at + BLOCK] @ train_ND.T), axis=1, kind="stable")[:, : max(neighbours)]
        for k, blocks in shares.items():
            blocks.append(labels[order[:, :k]].mean(1))
    return {k: np.concatenate(blocks) for k, blocks in shares.items()}


def standardised(train_ND: Array, *others: Array) -> tuple[Array, ...]:
    """By mean and standard deviation of the first; features that are constant there become zero."""
    mean, deviation = train_ND.mean(0, dtype=np.float64), train_ND.std(0, dtype=np.float64)
    scale = np.where(deviation > 0, 1 / np.maximum(deviation, 1e-12), 0.0)
    return tuple((x.astype(np.float64) - mean) * scale for x in (train_ND, *others))


def _error(scores_NK: Array, labels_NK: Array) -> float:
    return float(np.square(scores_NK - labels_NK).mean())


PROBES: dict[str, Callable[[ProbeData], ProbeFit]] = {"linear": linear, "nearest": nearest}
