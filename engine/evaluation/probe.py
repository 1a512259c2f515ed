"""Scores frozen embeddings: linear probe and k nearest neighbours for any task, and patient
identification.

    scores = probe(dataset, halves)      # halves: embeddings of the crops of probe_rows(dataset), one row for each half
    scores = probe(dataset, halves, labels_to_probe(dataset, "", "my.csv"))       # for a label table
    print(report(scores))

Each record is one row, the mean over its halves. Probes are fitted on train, chosen on valid and
scored on test. Linear: a logistic regression for each class, softmax for exclusive classes, ridge
regression for values, Cox regression for survival, which has no nearest neighbours. Features and
values are standardised by the training rows. Penalty and number of neighbours minimise the mean
squared error of probabilities or values on the valid rows, which is defined even for a class
without positives; in survival, the partial likelihood. Without a task: diagnosis by the dataset's
roles, and
identification by cosine of the first 5 s of gallery and probe crops (paper, section "Patient
identification").

Axes: N rows, D width of an embedding, K classes, H halves. Labels that are NaN are unknown.
"""

import os
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
from torch import Tensor, nn

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.commandline import writing
from omnilead.engine.common import ConfigError, describe_leads
from omnilead.engine.data.patients import patient_ids
from omnilead.engine.data.seen import joined, seen_in
from omnilead.engine.evaluation.metrics import Array, identification, measure, unit_vectors
from omnilead.engine.evaluation.results import (
    EvalOptions,
    by_record,
    leakage,
    load_task,
    record_names,
    shown_input,
)
from omnilead.engine.inference.commands import Setup, prepare, refuse_ranks
from omnilead.engine.inference.inputs import dataset_of, dataset_source
from omnilead.engine.inference.outputs import embeddings, matrix, whole
from omnilead.engine.inference.readout import place_of_mean
from omnilead.engine.inference.trained_model import TrainedModel, load
from omnilead.engine.model.folder import write
from omnilead.engine.model.input import Input
from omnilead.engine.tasks.config import TaskConfig
from omnilead.engine.tasks.kinds import OF_VALUES, WITH_THRESHOLDS, cox, thresholds
from omnilead.engine.tasks.labels import TaskLabels, guess, read_task, unknown_patients

# Of the penalty on the mean loss; strongest first, because each starts from the last solution
STRENGTHS = tuple(float(f"{digit}e{power}") for power in range(2, -5, -1) for digit in (3, 1))
NEIGHBOURS = (1, 5, 10, 20, 50, 100)
LIMITS = {"maxiter": 1000, "ftol": 1e-10, "gtol": 1e-6}
SHOWN = ("linear", "nearest")
BLOCK = 1024  # rows compared at a time
SPLITS = ("train", "valid", "test")
IDENTITY = ("gallery", "probe")

# Of the network of two layers
HIDDEN = 128
DECAYS = (0.01, 0.1, 1.0)
EPOCHS = 40
BATCH = 64


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
    # Of the linear probe: intercepts, then one row per dimension
    weights_DK: Array = np.zeros((0, 0))
    # Of regression: value = output * scale + center
    center_K: Array = np.zeros(0)
    scale_K: Array = np.zeros(0)


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
    for split in splits:
        if not len(labels.rows(0, split)):
            raise ConfigError(
                f"{labels.name or dataset.root.url}: no record is in the split {split}: a probe "
                f"needs {', '.join(splits)}"
            )
        if split != "valid" or task.kind == "survival":
            require_unlike(labels, split, dataset)
    return labels


def probe_model(
    model: str | Path,
    data: str | Sequence[str],
    task: str = "",
    labels: str = "",
    readout: str = "",
    out: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The scores of a trained model's embeddings. `out`: a folder for the model with the linear
    probe as its head. `options`: as of engine.inference.commands.embed."""
    refuse_ranks("probes are")
    if out:
        require_free(Path(out))
    setup = prepare(model, data, per="half", **options)
    dataset = dataset_of(setup.options)
    if dataset is None:
        raise ConfigError(
            f"--data {setup.options.data[0]}: a probe needs a dataset with splits: make one "
            "with `omnilead shard`"
        )
    table = labels_to_probe(dataset, task, labels)
    if out and not table:
        raise ConfigError(f"--out {out}: a head needs labels: give --task or --labels")
    rows = probe_rows(dataset, table)
    source = dataset_source(dataset, rows, setup.input, setup.options)
    parts = setup.model.readout_of(readout)
    halves = whole(source, embeddings(setup.model, readout), setup.input, "half")
    mean = place_of_mean(parts, setup.model.encoder.width)
    scores = probe(dataset, halves, table, mean) | {"precision": setup.precision}
    scores["remarks"] = remarks(setup, dataset, table)
    if out and table:
        if "linear" not in scores:
            raise ConfigError(f"--out {out}: no labelled record has a lead that the model is shown")
        exact = setup.model
        if setup.precision == "bf16":  # its weights were rounded
            exact = load(model, bool(setup.model.code))
        fitted, _ = probe_data(dataset, halves, table)
        with writing(Path(out), "--out"):
            save_with_head(exact, setup.input, parts, table, fitted, dataset, Path(out))
    return scores


def remarks(setup: Setup, dataset: Dataset, labels: TaskLabels | None) -> list[str]:
    """What a reader of the scores must know."""
    notes = shown_input(setup.model, dataset, EvalOptions(leads=setup.options.leads or ""))[1]
    if labels is None:
        return notes
    rows = labels.rows(0, "test")
    return [*notes, *labels.remarks, *leakage(setup.model, dataset, rows, labels.patients[0])]


def require_free(out: Path) -> None:
    """ConfigError unless the folder can be made."""
    if os.path.lexists(out):
        raise ConfigError(f"--out {out}: exists: choose another folder")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: no folder can be made in {folder}: choose another")


def save_with_head(
    model: TrainedModel,
    shown: Input,
    readout: tuple[str, ...],
    labels: TaskLabels,
    data: ProbeData,
    dataset: Dataset,
    out: Path,
) -> None:
    """Writes the model with the linear probe as its head, for `omnilead predict` and `evaluate`.
    `shown`: the leads that the probe was fitted on."""
    fit = fit_scaled(linear, data)
    task = labels.task
    valid_NK = outputs(task.kind, data.valid_ND, fit.weights_DK)
    head: dict[str, Any] = {"task": task.name, "kind": task.kind, "unit": task.unit, **labels.facts}
    head["definition"] = {**head["definition"], "head": ""}
    if task.kind == "regression":
        head |= {"center": fit.center_K.tolist(), "scale": fit.scale_K.tolist()}
    elif task.kind in WITH_THRESHOLDS:
        head["thresholds"] = thresholds(data.valid_labels_NK, valid_NK)
    encoder = model.encoder.state_dict()
    weights = {f"encoder.{name}": tensor for name, tensor in encoder.items()}
    weights_DK = fit.weights_DK.astype(np.float32)
    weights["head.weight"] = torch.from_numpy(weights_DK[1:].T.copy())
    weights["head.bias"] = torch.from_numpy(weights_DK[0].copy())
    fitted = [
        seen_in(dataset, labels.rows(0, split), use)
        for split, use in (("train", "labelled"), ("valid", "selected"))
    ]
    document = model.config | {
        "head": head,
        "readout": "+".join(readout),
        # The head was fitted without missing leads
        "trained": model.history | {"rlm": 0},
    }
    signals = model.preprocessing | {"seen": describe_leads(shown.seen).split(",")}
    card, seen = _card(labels, readout, data), joined([model.seen, *fitted])
    write(out, weights, document, signals, card, model.code, seen)


def _card(labels: TaskLabels, readout: tuple[str, ...], data: ProbeData) -> str:
    unknown = "".join(f"Labels: {remark}. " for remark in unknown_patients(labels.unknown))
    return (
        f"# ECG {labels.task.name}: a linear probe\n\nA frozen encoder, read out as "
        f"{'+'.join(readout)}, and a linear layer fitted on {len(data.train_ND):,} records, its "
        f"penalty chosen on {len(data.valid_ND):,} others. config.json says what data trained the "
        f"encoder and the layer. {unknown}This is not a medical device: whatever is built on it must "
        "be validated for its use and its population.\n"
    )


def require_unlike(labels: TaskLabels, split: str, dataset: Dataset) -> None:
    kind = labels.task.kind
    if unlike(kind, labels.y[0][labels.rows(0, split)]).any():
        return
    what = f"all labels of the split {split} are the same"
    if kind == "survival":
        what = f"no event in the split {split}"
    name = labels.name or dataset.root.url
    raise ConfigError(f"{name}: {what}: nothing to learn or to score")


def unlike(kind: str, y_NK: Array) -> Array:
    """bool [K]: the known labels are not all the same; in survival, there is an event."""
    if kind == "survival":
        return np.asarray((y_NK > 0).any(0))
    unknown_NK = np.isnan(y_NK)
    least_K = np.where(unknown_NK, np.inf, y_NK).min(0, initial=np.inf)
    most_K = np.where(unknown_NK, -np.inf, y_NK).max(0, initial=-np.inf)
    return np.asarray(least_K < most_K)


def probe_rows(dataset: Dataset, labels: TaskLabels | None = None) -> Array:
    """Rows of the crops that the probes need."""
    if labels:
        return np.flatnonzero(labels.split[0])
    rows = [dataset.select(dx=role) for role in SPLITS]
    rows += [dataset.select(identity=role) for role in IDENTITY]
    if not any(map(len, rows)):
        raise ConfigError(
            f"{dataset.root.url}: no crop has a role: build it with `omnilead shard --plan paper`"
        )
    return np.unique(np.concatenate(rows))


def probe(
    dataset: Dataset,
    halves: pa.Table,
    labels: TaskLabels | None = None,
    compared: slice = slice(None),
) -> dict[str, Any]:
    """`compared`: the dimensions by which patients are identified."""
    row_H = halves["row"].to_numpy()
    task = labels or read_task(TaskConfig(), [dataset])
    kind = task.task.kind
    scores: dict[str, Any] = {}
    if labels:
        scores = {"task": task.task.name, "kind": kind}
    if all(np.isin(row_H, task.rows(0, split)).any() for split in SPLITS):
        data, y_NK = probe_data(dataset, halves, task)
        for name in SHOWN[:1] if kind == "survival" else SHOWN:
            fit = fit_scaled(PROBES[name], data)
            metrics = measure(kind, y_NK, fit.scores_NK, classes=task.classes)
            scores[name] = {**metrics, "chosen": fit.chosen}
        counts = len(data.train_ND), len(data.valid_ND), len(data.test_ND)
        scores["records"] = dict(zip(SPLITS, counts, strict=True))
    if not labels:
        scores.update(identified(dataset, row_H, matrix(halves)[:, compared]))
    return scores


def probe_data(dataset: Dataset, halves: pa.Table, labels: TaskLabels) -> tuple[ProbeData, Array]:
    """The records of train, valid and test; the labels of test."""
    row_H = halves["row"].to_numpy()
    c_HD = matrix(halves)
    parts = []
    for split in SPLITS:
        there = np.isin(row_H, labels.rows(0, split))
        parts.append(records(dataset, row_H[there], c_HD[there], labels.y[0]))
    train, valid, (test_ND, y_NK) = parts
    unknown = np.array(labels.classes)[np.isnan(train[1]).all(0)]
    if len(unknown):
        raise ConfigError(
            f"{labels.name}: no record of the split train has a known label in "
            f"{', '.join(unknown)}: leave the column out, or fill in its cells"
        )
    return ProbeData(*train, *valid, test_ND, labels.task.kind), y_NK


def fit_scaled(fit: "Callable[[ProbeData], ProbeFit]", data: ProbeData) -> ProbeFit:
    """Standardises values by the training rows before the fit, and scales the scores back to their
    unit."""
    if data.kind != "regression":
        return fit(data)
    center = np.nanmean(data.labels_NK, 0)
    deviation = np.nanstd(data.labels_NK, 0)
    scale = np.where(deviation > 0, deviation, 1.0)
    labels = (data.labels_NK - center) / scale
    valid_labels = (data.valid_labels_NK - center) / scale
    one = fit(data._replace(labels_NK=labels, valid_labels_NK=valid_labels))
    scores_NK = one.scores_NK * scale + center
    return one._replace(scores_NK=scores_NK, center_K=center, scale_K=scale)


def identified(dataset: Dataset, row_H: Array, c_HD: Array) -> dict[str, Any]:
    first_H = np.diff(row_H, prepend=-1) != 0
    ids_H = patient_ids([dataset])[0][row_H]
    vectors, patients = [], []
    for role in IDENTITY:
        taken_H = first_H & np.isin(row_H, dataset.select(identity=role))
        if not taken_H.any():
            return {}
        vectors.append(c_HD[taken_H])
        patients.append(ids_H[taken_H].tolist())
    found = identification(vectors[0], patients[0], vectors[1], patients[1])
    names = ("accuracy", "top5", "chance", "n_probes", "n_gallery", "one_sided")
    return {"identification": {name: found[name] for name in names}}


def records(dataset: Dataset, row_H: Array, c_HD: Array, y_NK: Array) -> tuple[Array, Array]:
    """Mean embeddings [N, D] and labels [N, K] of the records."""
    names = record_names(dataset, row_H)
    labels, c_ND, _ = by_record(y_NK[row_H], c_HD, names, names)
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
        heads = "".join(f"{metric:>{width}}" for metric in metrics)
        lines.append(f"{'':18}{heads}")
        for name, parameter in (("linear", "strength"), ("nearest", "k")):
            values = scores.get(name)
            if not values:
                continue
            numbers = "".join(f"{values[metric]:{width}.4f}" for metric in metrics)
            lines.append(f"{name:18}{numbers}   {parameter} {values['chosen']:g}")
    if found := scores.get("identification"):
        line = f"{'identification':18}{found['accuracy']:11.4f}   {found['n_probes']:,} probes, "
        line += f"{found['n_gallery']:,} in the gallery; chance {found['chance']:.4f}"
        if found["one_sided"]:
            line += f"; {found['one_sided']:,} of patients not in the gallery: misses"
        lines.append(line)
    return "\n".join([*lines, *scores.get("remarks", ())])


def linear(data: ProbeData) -> ProbeFit:
    """Solves all classes together, by L-BFGS, in the basis of the principal components, which
    changes no solution."""
    parts = standardised(data.train_ND, data.valid_ND, data.test_ND)
    variance_D, basis_DD = np.linalg.eigh(parts[0].T @ parts[0])
    basis_DC = basis_DD[:, variance_D > 1e-12 * variance_D[-1]]
    train, valid, test = (x_ND @ basis_DC for x_ND in parts)
    fits: list[ProbeFit] = []
    classes = data.labels_NK.shape[1]
    weights = np.zeros((train.shape[1] + 1, classes))
    for strength in STRENGTHS:
        if data.kind == "regression":
            weights = ridge(train, data.labels_NK, strength)
        elif data.kind == "survival":
            weights = proportional_hazards(train, data.labels_NK, strength, weights)
        else:
            weights = logistic(train, data.labels_NK, strength, weights, data.kind == "multiclass")
        error = _error(outputs(data.kind, valid, weights), data.valid_labels_NK, data.kind)
        test_NK = outputs(data.kind, test, weights)
        fits.append(ProbeFit(test_NK, strength, error, weights))
    best = min(fits, key=lambda fit: fit.error)
    mean_D, scale_D = moments(data.train_ND)
    weights_DK = scale_D[:, None] * (basis_DC @ best.weights_DK[1:])
    intercept_K = best.weights_DK[0] - mean_D @ weights_DK
    return best._replace(weights_DK=np.vstack([intercept_K, weights_DK]))


def outputs(kind: str, x_ND: Array, weights_DK: Array) -> Array:
    """What a linear layer predicts; its first row of weights are the intercepts."""
    return _linked(kind, x_ND @ weights_DK[1:] + weights_DK[0])


def _linked(kind: str, z_NK: Array) -> Array:
    """Probabilities, or values."""
    if kind in OF_VALUES:
        return z_NK
    if kind == "multiclass":
        return np.asarray(softmax(z_NK, 1))
    return np.asarray(expit(z_NK))


def ridge(x_ND: Array, y_NK: Array, strength: float) -> Array:
    """[1 + D, K], intercepts first: least mean squared error + strength * squared weights (not
    intercepts)."""
    x_ND1 = np.insert(x_ND, 0, 1.0, axis=1)
    penalty = strength * np.eye(x_ND1.shape[1])
    penalty[0, 0] = 0
    weights = []
    for y_N in y_NK.T:
        known = np.flatnonzero(~np.isnan(y_N))
        n = len(known)
        x = x_ND1[known]
        square = x.T @ x.copy() / n  # a matrix product: BLAS rounds x.T @ x otherwise
        weights.append(np.linalg.solve(square + penalty, x.T @ y_N[known] / n))
    return np.stack(weights, axis=1)


def proportional_hazards(x_ND: Array, y_N1: Array, strength: float, start: Array) -> Array:
    """[1 + D, 1], as `logistic`: least mean loss of the events + strength / 2 * squared weights.
    The intercept stays 0."""
    x_ND1, y = torch.from_numpy(np.insert(x_ND, 0, 1.0, axis=1)), torch.from_numpy(y_N1)

    def objective(flat: Array) -> tuple[float, Array]:
        w_D1 = torch.tensor(flat[:, None], requires_grad=True)
        value = event_loss(x_ND1 @ w_D1, y) + strength / 2 * w_D1.square().sum()
        (gradient_D1,) = torch.autograd.grad(value, w_D1)
        return value.item(), gradient_D1[:, 0].numpy()

    done = minimize(objective, start[:, 0], jac=True, method="L-BFGS-B", options=LIMITS)
    return np.asarray(done.x[:, None])


def event_loss(risk_N1: Tensor, y_N1: Tensor) -> Tensor:
    """The mean loss of the events; 0 if there is none."""
    event_N1 = y_N1 > 0
    return (cox(risk_N1, y_N1) * event_N1).sum() / event_N1.sum().clamp_min(1)


def logistic(
    x_ND: Array, y_NK: Array, strength: float, start: Array | None = None, exclusive: bool = False
) -> Array:
    """[1 + D, K], intercepts first: least mean log loss + strength / 2 * squared weights (not
    intercepts).

    Each weight is scaled by the curvature of the loss along it, so that few steps suffice if
    features are uncorrelated.
    """
    labels_NK = torch.from_numpy(y_NK.astype(np.float64))
    known_NK = (~labels_NK.isnan()).double()
    target_NK = labels_NK.nan_to_num()
    x_ND1 = torch.from_numpy(np.insert(x_ND, 0, 1.0, axis=1))
    n = len(x_ND)
    penalty_D1 = torch.full((x_ND1.shape[1], 1), strength, dtype=torch.float64)
    penalty_D1[0] = 0
    curvature_DK = _curvature(x_ND1, target_NK, known_NK) + penalty_D1
    scale_DK = curvature_DK.clamp_min(1e-12).rsqrt()
    loss = _exclusive_loss if exclusive else _independent_loss

    def objective(flat: Array) -> tuple[float, Array]:
        w_DK = torch.from_numpy(flat).view_as(scale_DK) * scale_DK
        value, p_NK = loss(x_ND1 @ w_DK, target_NK, known_NK)
        slope_NK = (p_NK - target_NK) * known_NK / n
        gradient_DK = x_ND1.T @ slope_NK + penalty_D1 * w_DK
        value = value / n + (penalty_D1 / 2 * w_DK.square()).sum()
        return float(value), (gradient_DK * scale_DK).ravel().numpy()

    scale = scale_DK.numpy()
    first = np.zeros(scale.shape) if start is None else start / scale
    done = minimize(objective, first.ravel(), jac=True, method="L-BFGS-B", options=LIMITS)
    return np.asarray(done.x.reshape(scale.shape) * scale)


def _curvature(x_ND: Tensor, y_NK: Tensor, known_NK: Tensor) -> Tensor:
    """Of the mean loss along each weight, if every row has the share of positives of its class."""
    n = len(x_ND)
    share_K = (y_NK.sum(0) + 1) / (known_NK.sum(0) + 2)
    share_K = share_K.clamp(0.5 / n, 1 - 0.5 / n)
    variance_K = share_K * (1 - share_K) * known_NK.mean(0)
    return x_ND.square().mean(0)[:, None] * variance_K


def _exclusive_loss(z_NK: Tensor, y_NK: Tensor, known_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy and the probabilities of a softmax."""
    loss = z_NK.logsumexp(1).sum() - (y_NK * z_NK).sum()
    return loss, z_NK.softmax(1)


def _independent_loss(z_NK: Tensor, y_NK: Tensor, known_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of known labels and the probabilities of a sigmoid."""
    loss_NK = (F.softplus(z_NK) - y_NK * z_NK) * known_NK
    return loss_NK.sum(), z_NK.sigmoid()


def nearest(data: ProbeData) -> ProbeFit:
    """The share of positives, or the mean value, among the k training rows with the highest
    cosine."""
    parts = standardised(data.train_ND, data.valid_ND, data.test_ND)
    train, valid, test = map(unit_vectors, parts)
    possible = [k for k in NEIGHBOURS if k <= len(train)]
    shares = votes(train, data.labels_NK, valid, possible)
    errors = {k: _error(share_NK, data.valid_labels_NK) for k, share_NK in shares.items()}
    best = min(possible, key=lambda k: errors[k])  # the fewest of equally good
    test_NK = votes(train, data.labels_NK, test, [best])[best]
    return ProbeFit(test_NK, best, errors[best])


def votes(
    train_ND: Array, labels_NK: Array, query_ND: Array, neighbours: Sequence[int]
) -> dict[int, Array]:
    """For each k the means of the neighbours' known labels [N, K], or of all rows' if none is
    known. Of equally similar rows the first counts."""
    labels_NK = labels_NK.astype(np.float64)
    known = ~np.isnan(labels_NK)
    labels = np.where(known, labels_NK, 0)
    usual_K = np.nanmean(labels_NK, 0)
    shares: dict[int, list[Array]] = {k: [] for k in neighbours}
    for start in range(0, len(query_ND), BLOCK):
        similarity = query_ND[start : start + BLOCK] @ train_ND.T
        order = np.argsort(-similarity, axis=1, kind="stable")
        for k, blocks in shares.items():
            near = order[:, :k]
            count = known[near].sum(1)
            mean = labels[near].sum(1) / np.maximum(count, 1)
            blocks.append(np.where(count > 0, mean, usual_K))
    return {k: np.concatenate(blocks) for k, blocks in shares.items()}


def network(data: ProbeData) -> ProbeFit:
    """A network of two layers. Its weight decay and its number of epochs minimise the error on the
    valid rows."""
    parts = standardised(data.train_ND, data.valid_ND, data.test_ND)
    train, valid, test = (torch.from_numpy(x_ND).float() for x_ND in parts)
    labels_NK = torch.from_numpy(data.labels_NK.astype(np.float32))
    known_NK = (~labels_NK.isnan()).float()
    target_NK = labels_NK.nan_to_num()
    fits: list[ProbeFit] = []
    for decay in DECAYS:
        generator = torch.Generator().manual_seed(0)
        layers, last = _layers(train.shape[1], labels_NK.shape[1], generator)
        if data.kind not in OF_VALUES:  # begins at the classes' frequencies
            share_K = (target_NK.sum(0) + 0.5) / (known_NK.sum(0) + 1)
            last.bias.data = share_K.logit()
        adam = torch.optim.AdamW(layers.parameters(), lr=1e-3, weight_decay=decay)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(train), generator=generator).split(BATCH):
                z_NK = layers(train[rows])
                loss = _network_loss(data.kind, z_NK, target_NK[rows], known_NK[rows])
                adam.zero_grad()
                loss.backward()
                adam.step()
            with torch.no_grad():
                valid_NK, test_NK = (
                    _linked(data.kind, layers(x_ND).double().numpy()) for x_ND in (valid, test)
                )
            fits.append(ProbeFit(test_NK, decay, _error(valid_NK, data.valid_labels_NK, data.kind)))
    return min(fits, key=lambda fit: fit.error)


def _layers(
    width: int, outputs: int, generator: torch.Generator
) -> tuple[nn.Sequential, nn.Linear]:
    """The network, and its last layer."""
    hidden, last = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, outputs)
    nn.init.xavier_uniform_(hidden.weight, generator=generator)
    nn.init.zeros_(hidden.bias)
    nn.init.zeros_(last.weight)  # a random one is never quite unlearned from a few hundred records
    nn.init.zeros_(last.bias)
    return nn.Sequential(hidden, nn.GELU(), last), last


def _network_loss(kind: str, z_NK: Tensor, y_NK: Tensor, known_NK: Tensor) -> Tensor:
    if kind == "survival":
        return event_loss(z_NK, y_NK)
    if kind == "regression":
        return ((z_NK - y_NK).square() * known_NK).sum() / len(z_NK)
    loss = _exclusive_loss if kind == "multiclass" else _independent_loss
    return loss(z_NK, y_NK, known_NK)[0] / len(z_NK)


def standardised(train_ND: Array, *others: Array) -> tuple[Array, ...]:
    """Standardises by mean and standard deviation of the first; features that are constant there
    become zero."""
    mean_D, scale_D = moments(train_ND)
    return tuple((x_ND.astype(np.float64) - mean_D) * scale_D for x_ND in (train_ND, *others))


def moments(x_ND: Array) -> tuple[Array, Array]:
    """The mean of each feature, and 1 / its standard deviation: 0 for a constant one."""
    mean_D = x_ND.mean(0, dtype=np.float64)
    deviation_D = x_ND.std(0, dtype=np.float64)
    scale_D = 1 / np.maximum(deviation_D, 1e-12)
    return mean_D, np.where(deviation_D > 0, scale_D, 0.0)


def _error(scores_NK: Array, labels_NK: Array, kind: str = "") -> float:
    if kind == "survival":
        return event_loss(torch.from_numpy(scores_NK), torch.from_numpy(labels_NK)).item()
    return float(np.nanmean(np.square(scores_NK - labels_NK)))


Probe = Callable[[ProbeData], ProbeFit]
PROBES: dict[str, Probe] = {"linear": linear, "nearest": nearest, "network": network}
