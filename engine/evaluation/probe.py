"""Scores frozen embeddings: linear probe and k nearest neighbours for any task, and patient
identification.

    scores = probe(dataset, halves)      # halves: embeddings of the crops of probe_rows(dataset), one row for each half
    scores = probe(dataset, halves, labels_to_probe(dataset, "", "my.csv"))       # for a label table
    print(report(scores))

Each record is one row, the mean over its halves. Probes are fitted on train, chosen on valid and
scored on test. Linear: a logistic regression for each class, softmax for exclusive classes, ridge
regression for values. Features and values are standardised by the training rows. Penalty and number
of neighbours minimise the mean squared error of probabilities or values on the valid rows, which is
defined even for a class without positives. Without a task: diagnosis by the dataset's roles, and
identification by cosine of the first 5 s of gallery and probe crops (paper, section "Patient
identification").

Axes: N rows, D width of an embedding, K classes, H halves. Labels that are NaN are unknown.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from scipy.special import expit, softmax
from torch import Tensor

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.common import ConfigError
from omnilead.engine.data.leakage import patient_ids
from omnilead.engine.evaluation.metrics import METRICS, Array, identification, measure, unit_vectors
from omnilead.engine.evaluation.results import by_record, load_task
from omnilead.engine.inference.commands import prepare, refuse_ranks
from omnilead.engine.inference.inputs import dataset_of, dataset_source
from omnilead.engine.inference.outputs import embeddings, matrix, whole
from omnilead.engine.tasks.config import TaskConfig
from omnilead.engine.tasks.labels import TaskLabels, guess, read_task

# Of the penalty on the mean loss; strongest first, because each starts from the last solution
STRENGTHS = (1.0, 0.1, 0.01, 1e-3, 1e-4)
NEIGHBOURS = (1, 5, 10, 20, 50, 100)
BLOCK = 1024  # rows compared at a time
SPLITS, IDENTITY = ("train", "valid", "test"), ("gallery", "probe")


class ProbeData(NamedTuple):
    train_ND: Array
    labels_NK: Array
    valid_ND: Array
    valid_labels_NK: Array
    test_ND: Array
    kind: str = "multilabel"


class ProbeFit(NamedTuple):
    scores_NK: Array  # probabilities or values of the test rows
    chosen: float
    error: float  # on the valid rows


def labels_to_probe(
    dataset: Dataset, name: str, url: str, splits: Sequence[str] = SPLITS
) -> TaskLabels | None:
    """The labels of the task `name`, or of the table `url`, whose kind is guessed; None if
    neither is given. ConfigError if one of `splits` has none."""
    if not (name or url):
        return None
    task = load_task(name) if name else guess(TaskConfig(Path(url).stem[:64], labels=url))
    task = replace(task, labels=url or task.labels)
    if task.kind == "identity":
        raise ConfigError(f"--task {name}: leave it out: identification is then probed")
    labels = read_task(task, [dataset])
    if empty := [split for split in splits if not len(labels.rows(0, split))]:
        raise ConfigError(
            f"{labels.name or dataset.root.url}: no record is in the split {empty[0]}: a probe "
            f"needs {', '.join(splits)}"
        )
    for split in (split for split in splits if split != "valid"):
        require_unlike(labels, split, dataset)
    return labels


def probe_model(
    model: str | Path, data: str | Sequence[str], task: str = "", labels: str = "", **options: Any
) -> dict[str, Any]:
    """The scores of a trained model's embeddings. `options`: as of
    engine.inference.commands.embeddings."""
    refuse_ranks("probes are")
    setup = prepare(model, data, per="half", **options)
    dataset = dataset_of(setup.options)
    if dataset is None:
        raise ConfigError(
            f"--data {setup.options.data[0]}: a probe needs a dataset with splits: make one "
            "with `omnilead shard`"
        )
    table = labels_to_probe(dataset, task, labels)
    rows = probe_rows(dataset, table)
    source = dataset_source(dataset, rows, setup.input, setup.options)
    halves = whole(source, embeddings(setup.model), setup.input, "half")
    return probe(dataset, halves, table) | {"precision": setup.precision}


def require_unlike(labels: TaskLabels, split: str, dataset: Dataset) -> None:
    if not unlike(labels.y[0][labels.rows(0, split)]).any():
        raise ConfigError(
            f"{labels.name or dataset.root.url}: all labels of the split {split} are the same: "
            "nothing to learn or to score"
        )


def unlike(y_NK: Array) -> Array:
    """bool [K]: the known labels are not all the same."""
    unknown_NK, inf = np.isnan(y_NK), np.inf
    return np.asarray(
        np.where(unknown_NK, inf, y_NK).min(0, initial=inf)
        < np.where(unknown_NK, -inf, y_NK).max(0, initial=-inf)
    )


def probe_rows(dataset: Dataset, labels: TaskLabels | None = None) -> Array:
    """Rows of the crops that the probes need."""
    if labels:
        return np.flatnonzero(labels.split[0])
    rows = [dataset.select(dx=role) for role in SPLITS] + [
        dataset.select(identity=role) for role in IDENTITY
    ]
    if not any(map(len, rows)):
        raise ConfigError(
            f"{dataset.root.url}: no crop has a role: build it with `omnilead shard --plan paper`"
        )
    return np.unique(np.concatenate(rows))


def probe(dataset: Dataset, halves: pa.Table, labels: TaskLabels | None = None) -> dict[str, Any]:
    row_H, c_HD = halves["row"].to_numpy(), matrix(halves)
    task = labels or read_task(TaskConfig(), [dataset])
    kind = task.task.kind
    scores: dict[str, Any] = {"task": task.task.name, "kind": kind} if labels else {}
    parts = []
    for split in SPLITS:
        there = np.isin(row_H, task.rows(0, split))
        if not there.any():
            break
        parts.append(records(dataset, row_H[there], c_HD[there], task.y[0]))
    else:
        train, valid, (test_ND, y_NK) = parts
        data = ProbeData(*train, *valid, test_ND, kind)
        for name, fit in PROBES.items():
            one = fit_scaled(fit, data)
            metrics = measure(kind, y_NK, one.scores_NK, classes=task.classes)
            if not labels:
                metrics = {key: metrics[key] for key in METRICS}
            scores[name] = {**metrics, "chosen": one.chosen}
        scores["records"] = {name: len(x) for name, (x, _) in zip(SPLITS, parts, strict=True)}
    if not labels:
        scores.update(identified(dataset, row_H, c_HD))
    return scores


def fit_scaled(fit: "Callable[[ProbeData], ProbeFit]", data: ProbeData) -> ProbeFit:
    """Standardises values by the training rows before the fit, and scales the scores back to their
    unit."""
    if data.kind != "regression":
        return fit(data)
    center, scale = np.nanmean(data.labels_NK, 0), np.nanstd(data.labels_NK, 0)
    scale = np.where(scale > 0, scale, 1.0)
    labels, valid_labels = (
        (y_NK - center) / scale for y_NK in (data.labels_NK, data.valid_labels_NK)
    )
    one = fit(data._replace(labels_NK=labels, valid_labels_NK=valid_labels))
    return one._replace(scores_NK=one.scores_NK * scale + center)


def identified(dataset: Dataset, row_H: Array, c_HD: Array) -> dict[str, Any]:
    first_H, ids = np.diff(row_H, prepend=-1) != 0, patient_ids([dataset])[0]
    gallery, probes = (
        np.flatnonzero(first_H & np.isin(row_H, dataset.select(identity=role))) for role in IDENTITY
    )
    if not (len(gallery) and len(probes)):
        return {}
    found = identification(
        c_HD[gallery], ids[row_H[gallery]].tolist(), c_HD[probes], ids[row_H[probes]].tolist()
    )
    names = ("accuracy", "top5", "chance", "n_probes", "n_gallery", "one_sided")
    return {"identification": {name: found[name] for name in names}}


def records(dataset: Dataset, row_H: Array, c_HD: Array, y_NK: Array) -> tuple[Array, Array]:
    """Mean embeddings [N, D] and labels [N, K] of the records."""
    sources, names = dataset.table(["source", "record"]).take(row_H).to_pydict().values()
    keys = [f"{source}/{name}" for source, name in zip(sources, names, strict=True)]
    labels, c_ND, _ = by_record(y_NK[row_H], c_HD, keys, keys)
    return c_ND, labels


def report(scores: dict[str, Any]) -> str:
    """The scores for the terminal."""
    lines = []
    if count := scores.get("records"):
        metrics = [name for name in scores["linear"] if name != "chosen"]
        width = max(11, *(len(metric) + 2 for metric in metrics))
        lines.append(
            f"{scores.get('task', 'diagnosis')}, {count['test']:,} records of test "
            f"({count['train']:,} train, {count['valid']:,} valid)"
        )
        lines.append(f"{'':18}" + "".join(f"{metric:>{width}}" for metric in metrics))
        for name, parameter in (("linear", "strength"), ("nearest", "k")):
            numbers = "".join(f"{scores[name][metric]:{width}.4f}" for metric in metrics)
            lines.append(f"{name:18}{numbers}   {parameter} {scores[name]['chosen']:g}")
    if found := scores.get("identification"):
        line = f"{'identification':18}{found['accuracy']:11.4f}   {found['n_probes']:,} probes, "
        line += f"{found['n_gallery']:,} in the gallery; chance {found['chance']:.4f}"
        if found["one_sided"]:
            line += f"; {found['one_sided']:,} of patients not in the gallery: misses"
        lines.append(line)
    return "\n".join(lines)


def linear(data: ProbeData) -> ProbeFit:
    """Solves all classes together, by L-BFGS, in the basis of the principal components, which
    changes no solution."""
    parts = standardised(data.train_ND, data.valid_ND, data.test_ND)
    variance_D, basis_DD = np.linalg.eigh(parts[0].T @ parts[0])
    train, valid, test = (x_ND @ basis_DD[:, variance_D > 1e-12 * variance_D[-1]] for x_ND in parts)
    link: Callable[[Array], Array] = {
        "regression": np.asarray,
        "multiclass": lambda z: softmax(z, 1),
    }.get(data.kind, expit)
    fits: list[ProbeFit] = []
    weights = np.zeros((train.shape[1] + 1, data.labels_NK.shape[1]))
    for strength in STRENGTHS:
        if data.kind == "regression":
            weights = ridge(train, data.labels_NK, strength)
        else:
            weights = logistic(train, data.labels_NK, strength, weights, data.kind == "multiclass")
        error = _error(link(valid @ weights[1:] + weights[0]), data.valid_labels_NK)
        fits.append(ProbeFit(link(test @ weights[1:] + weights[0]), strength, error))
    return min(fits, key=lambda fit: fit.error)


def ridge(x_ND: Array, y_NK: Array, strength: float) -> Array:
    """[1 + D, K], intercepts first: least mean squared error + strength * squared weights (not
    intercepts)."""
    x, penalty = np.insert(x_ND, 0, 1.0, axis=1), strength * np.eye(x_ND.shape[1] + 1)
    penalty[0, 0] = 0
    known = [np.flatnonzero(~np.isnan(y_N)) for y_N in y_NK.T]
    solve = (
        np.linalg.solve(x[n].T @ x[n] / len(n) + penalty, x[n].T @ y_NK[n, k] / len(n))
        for k, n in enumerate(known)
    )
    return np.stack(list(solve), axis=1)


def logistic(
    x_ND: Array, y_NK: Array, strength: float, start: Array | None = None, exclusive: bool = False
) -> Array:
    """[1 + D, K], intercepts first: least mean log loss + strength / 2 * squared weights (not
    intercepts).

    Each weight is scaled by the curvature of the loss along it, so that few steps suffice if
    features are uncorrelated.
    """
    labels_NK = torch.from_numpy(y_NK.astype(np.float64))
    known_NK, target_NK = (~labels_NK.isnan()).double(), labels_NK.nan_to_num()
    x_ND1 = torch.from_numpy(np.insert(x_ND, 0, 1.0, axis=1))
    n = len(x_ND)
    penalty_D1 = torch.full((x_ND1.shape[1], 1), strength, dtype=torch.float64)
    penalty_D1[0] = 0
    scale_DK = (_curvature(x_ND1, target_NK, known_NK) + penalty_D1).clamp_min(1e-12).rsqrt()
    loss = _exclusive_loss if exclusive else _independent_loss

    def objective(flat: Array) -> tuple[float, Array]:
        w_DK = torch.from_numpy(flat).view_as(scale_DK) * scale_DK
        value, p_NK = loss(x_ND1 @ w_DK, target_NK, known_NK)
        gradient_DK = x_ND1.T @ ((p_NK - target_NK) * known_NK / n) + penalty_D1 * w_DK
        value = value / n + (penalty_D1 / 2 * w_DK.square()).sum()
        return float(value), (gradient_DK * scale_DK).ravel().numpy()

    first = np.zeros(tuple(scale_DK.shape)) if start is None else start / scale_DK.numpy()
    limits = {"maxiter": 1000, "ftol": 1e-10, "gtol": 1e-6}
    done = minimize(objective, first.ravel(), jac=True, method="L-BFGS-B", options=limits)
    return np.asarray(done.x.reshape(first.shape) * scale_DK.numpy())


def _curvature(x_ND: Tensor, y_NK: Tensor, known_NK: Tensor) -> Tensor:
    """Of the mean loss along each weight, if every row has the share of positives of its class."""
    n = len(x_ND)
    share_K = ((y_NK.sum(0) + 1) / (known_NK.sum(0) + 2)).clamp(0.5 / n, 1 - 0.5 / n)
    return x_ND.square().mean(0)[:, None] * (share_K * (1 - share_K) * known_NK.mean(0))


def _exclusive_loss(z_NK: Tensor, y_NK: Tensor, known_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy and the probabilities of a softmax."""
    return z_NK.logsumexp(1).sum() - (y_NK * z_NK).sum(), z_NK.softmax(1)


def _independent_loss(z_NK: Tensor, y_NK: Tensor, known_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of known labels and the probabilities of a sigmoid."""
    return ((F.softplus(z_NK) - y_NK * z_NK) * known_NK).sum(), z_NK.sigmoid()


def nearest(data: ProbeData) -> ProbeFit:
    """The share of positives, or the mean value, among the k training rows with the highest
    cosine."""
    train, valid, test = (
        unit_vectors(x) for x in standardised(data.train_ND, data.valid_ND, data.test_ND)
    )
    shares = votes(train, data.labels_NK, valid, [k for k in NEIGHBOURS if k <= len(train)])
    error, k = min((_error(share_NK, data.valid_labels_NK), k) for k, share_NK in shares.items())
    return ProbeFit(votes(train, data.labels_NK, test, [k])[k], k, error)


def votes(
    train_ND: Array, labels_NK: Array, query_ND: Array, neighbours: Sequence[int]
) -> dict[int, Array]:
    """For each k the means of the neighbours' known labels [N, K], or of all rows' if none is
    known. Of equally similar rows the first counts."""
    known = ~np.isnan(labels_NK.astype(np.float64))
    labels = np.where(known, labels_NK, 0).astype(np.float64)
    usual_K = np.nanmean(labels_NK.astype(np.float64), 0)
    shares: dict[int, list[Array]] = {k: [] for k in neighbours}
    for start in range(0, len(query_ND), BLOCK):
        similarity = query_ND[start : start + BLOCK] @ train_ND.T
        order = np.argsort(-similarity, axis=1, kind="stable")[:, : max(neighbours)]
        for k, blocks in shares.items():
            near = order[:, :k]
            count = known[near].sum(1)
            mean = labels[near].sum(1) / np.maximum(count, 1)
            blocks.append(np.where(count > 0, mean, usual_K))
    return {k: np.concatenate(blocks) for k, blocks in shares.items()}


def standardised(train_ND: Array, *others: Array) -> tuple[Array, ...]:
    """Standardises by mean and standard deviation of the first; features that are constant there
    become zero."""
    mean, deviation = train_ND.mean(0, dtype=np.float64), train_ND.std(0, dtype=np.float64)
    scale = np.where(deviation > 0, 1 / np.maximum(deviation, 1e-12), 0.0)
    return tuple((x.astype(np.float64) - mean) * scale for x in (train_ND, *others))


def _error(scores_NK: Array, labels_NK: Array) -> float:
    return float(np.nanmean(np.square(scores_NK - labels_NK)))


PROBES: dict[str, Callable[[ProbeData], ProbeFit]] = {"linear": linear, "nearest": nearest}
