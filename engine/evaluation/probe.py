"""Linear probes of frozen embeddings, and a model with one as its head.

    fit = fit_scaled(linear, ProbeData(train_ND, labels_NK, valid_ND, valid_labels_NK, test_ND))
    fit.scores_NK                        # of the test rows
    save_with_head(model, shown, readout, labels, data, seen, Path("MODEL"))

Each record is one row, the mean over its halves. Probes are fitted on train, chosen on valid and
scored on test. Linear: a logistic regression for each class, softmax for exclusive classes, ridge
regression for values, Cox regression for survival. Features and values are standardised by the
training rows. The penalty minimises the mean squared error of probabilities or values on the valid
rows, which is defined even for a class without positives; in survival, the partial likelihood.

Axes: N rows, D width of an embedding, K classes. Labels that are NaN are unknown.
"""

import os
from collections.abc import Callable, Sequence
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
from omnilead.engine.common import ConfigError, describe_leads
from omnilead.engine.data.seen import joined
from omnilead.engine.evaluation.metrics import Array
from omnilead.engine.inference.readout import Readout
from omnilead.engine.inference.trained_model import TrainedModel
from omnilead.engine.model.folder import write
from omnilead.engine.model.input import Input
from omnilead.engine.tasks.config import TaskConfig
from omnilead.engine.tasks.kinds import OF_VALUES, WITH_THRESHOLDS, cox, thresholds
from omnilead.engine.tasks.labels import DX_ROLES, TaskLabels, read_task, unknown_patients

# Of the penalty on the mean loss; strongest first, because each starts from the last solution
STRENGTHS = (3e2, 1e2, 3e1, 1e1, 3.0, 1.0, 3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
LIMITS = {"maxiter": 1000, "ftol": 1e-10, "gtol": 1e-6}

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


Probe = Callable[[ProbeData], ProbeFit]


def labels_to_probe(dataset: Dataset, task: TaskConfig) -> TaskLabels:
    """ConfigError if there is nothing to fit on."""
    if task.kind == "identity":
        raise ConfigError("is of patients: use identification, without a table")
    labels = read_task(task, [dataset])
    for split in ("train", "valid"):
        if not len(labels.rows(0, split)):
            mend = "a probe needs train, valid, test"
            if labels.role == "dx":
                mend += f"; {DX_ROLES}"
            name = labels.name or dataset.root.url
            raise ConfigError(f"{name}: no record is in the split {split}: {mend}")
        if split == "train" or task.kind == "survival":
            require_unlike(labels, split, dataset)
    return labels


def require_free(out: Path, flag: str) -> None:
    """ConfigError unless the folder can be made."""
    if os.path.lexists(out):
        raise ConfigError(f"{flag} {out}: exists: choose another folder")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {out}: no folder can be made in {folder}: choose another")


def save_with_head(
    model: TrainedModel,
    shown: Input,
    readout: Readout,
    labels: TaskLabels,
    data: ProbeData,
    fitted: Sequence[pa.Table],
    out: Path,
) -> None:
    """Writes the model with the linear probe as its head, for `omnilead predict` and `evaluate`.
    `shown`: the leads that the probe was fitted on; `fitted`: its crops (engine.data.seen)."""
    fit = fit_scaled(linear, data._replace(test_ND=data.valid_ND))
    task = labels.task
    head: dict[str, Any] = {"task": task.name, "kind": task.kind, "unit": task.unit, **labels.facts}
    head["definition"] = {**head["definition"], "head": ""}
    if task.kind == "regression":
        head |= {"center": fit.center_K.tolist(), "scale": fit.scale_K.tolist()}
    elif task.kind in WITH_THRESHOLDS:
        head["thresholds"] = thresholds(data.valid_labels_NK, fit.scores_NK)
    weights = {}
    for name, tensor in model.encoder.state_dict().items():
        weights[f"encoder.{name}"] = tensor
    weights_DK = fit.weights_DK.astype(np.float32)
    weights["head.weight"] = torch.from_numpy(weights_DK[1:].T.copy())
    weights["head.bias"] = torch.from_numpy(weights_DK[0].copy())
    document = model.config | {
        "head": head,
        "readout": "+".join(readout),
        # The head was fitted without missing leads
        "trained": model.history | {"rlm": 0},
    }
    signals = model.preprocessing | {"seen": describe_leads(shown.seen).split(",")}
    card, seen = _card(labels, readout, data), joined([model.seen, *fitted])
    write(out, weights, document, signals, card, model.code, seen)


def _card(labels: TaskLabels, readout: Readout, data: ProbeData) -> str:
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


def fit_scaled(fit: Probe, data: ProbeData) -> ProbeFit:
    """Standardises values by the training rows before the fit, and scales the scores back to their
    unit."""
    if data.kind != "regression":
        return fit(data)
    center = np.nanmean(data.labels_NK, 0)
    deviation = np.nanstd(data.labels_NK, 0)
    scale = np.where(deviation > 0, deviation, 1.0)
    labels = (data.labels_NK - center) / scale
    valid_labels = (data.valid_labels_NK - center) / scale
    fitted = fit(data._replace(labels_NK=labels, valid_labels_NK=valid_labels))
    scores_NK = fitted.scores_NK * scale + center
    return fitted._replace(scores_NK=scores_NK, center_K=center, scale_K=scale)


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
        valid_NK = outputs(data.kind, valid, weights)
        test_NK = outputs(data.kind, test, weights)
        error = _error(valid_NK, data.valid_labels_NK, data.kind)
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
        product = x.T @ y_N[known] / n
        weights.append(np.linalg.solve(square + penalty, product))
    return np.stack(weights, axis=1)


def proportional_hazards(x_ND: Array, y_N1: Array, strength: float, start: Array) -> Array:
    """[1 + D, 1], as `logistic`: least mean loss of the events + strength / 2 * squared weights.
    The intercept stays 0."""
    x_ND1 = torch.from_numpy(np.insert(x_ND, 0, 1.0, axis=1))
    y = torch.from_numpy(y_N1)

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
    x_ND: Array,
    y_NK: Array,
    strength: float,
    start: Array,
    exclusive: bool,
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
        penalty = (penalty_D1 / 2 * w_DK.square()).sum()
        gradient_DK = gradient_DK * scale_DK
        return float(value / n + penalty), gradient_DK.ravel().numpy()

    scale = scale_DK.numpy()
    first = (start / scale).ravel()
    done = minimize(objective, first, jac=True, method="L-BFGS-B", options=LIMITS)
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
                valid_NK = _linked(data.kind, layers(valid).double().numpy())
                test_NK = _linked(data.kind, layers(test).double().numpy())
            error = _error(valid_NK, data.valid_labels_NK, data.kind)
            fits.append(ProbeFit(test_NK, decay, error))
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
    every = (train_ND, *others)
    return tuple((x_ND.astype(np.float64) - mean_D) * scale_D for x_ND in every)


def moments(x_ND: Array) -> tuple[Array, Array]:
    """The mean of each feature, and 1 / its standard deviation: 0 for a constant one."""
    mean_D = x_ND.mean(0, dtype=np.float64)
    deviation_D = x_ND.std(0, dtype=np.float64)
    scale_D = 1 / np.maximum(deviation_D, 1e-12)
    return mean_D, np.where(deviation_D > 0, scale_D, 0.0)


def _error(scores_NK: Array, labels_NK: Array, kind: str) -> float:
    if kind == "survival":
        return event_loss(torch.from_numpy(scores_NK), torch.from_numpy(labels_NK)).item()
    return float(np.nanmean(np.square(scores_NK - labels_NK)))
