"""Linear probes of frozen embeddings, and a model with one as its head.

    fit = fit_scaled(linear, ProbeData(train_ND, labels_NK, patient_N, test_ND))
    fit.scores_NK                        # of the test rows
    save_with_head(model, shown, readout, labels, linear, data, seen, Path("MODEL"))

Each record is one row, the mean over its halves. Linear: a logistic regression for each class,
softmax for exclusive classes, ridge regression for values, Cox regression for survival. Features
and values are standardised by the training rows. The penalty is chosen by cross-validation over
the patients of the training rows: it minimises the mean squared error of probabilities or values
of those held out, which is defined even for a class without positives; in survival, the partial
likelihood.

Axes: N rows, D width of an embedding, K classes. Labels that are NaN are unknown.
"""

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from scipy.special import expit, softmax
from torch import Tensor, nn

from omnilead.data_tools.io.terminal import tell

from ..data.seen import joined
from ..inference.trained_model import TrainedModel
from ..inference.trees import Trees
from ..model.folder import write
from ..model.input import Input
from ..model.readout import Readout
from ..settings.errors import ConfigError
from ..settings.leads import describe_leads
from ..tasks.kinds import KINDS, cox, sensitive, thresholds
from ..tasks.labels import TaskLabels, unknown_patients
from ..training.metrics import Array

# Of the penalty on the mean loss; strongest first, because each starts from the last solution
STRENGTHS = (3e2, 1e2, 3e1, 1e1, 3.0, 1.0, 3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
LIMITS = {"maxiter": 1000, "ftol": 1e-10, "gtol": 1e-6}
FOLDS = 5  # of cross-validation
MANY = 5000  # rows, of which one fold is enough
WORSE = 0.05  # than the least error of a fold: weaker penalties are not tried


class ProbeData(NamedTuple):
    train_ND: Array
    labels_NK: Array
    patient_N: Array
    test_ND: Array
    kind: str = "multilabel"

    def of(self, rows: Array, test_rows: Array) -> "ProbeData":
        """Some of the training rows, others of which are tested."""
        return ProbeData(
            self.train_ND[rows],
            self.labels_NK[rows],
            self.patient_N[rows],
            self.train_ND[test_rows],
            self.kind,
        )


class ProbeFit(NamedTuple):
    scores_NK: Array  # probabilities or values of the test rows
    chosen: float = 0.0  # the penalty of a linear probe
    # Of the linear probe: intercepts, then one row per dimension
    weights_DK: Array = np.zeros((0, 0))
    # Of regression: value = output * scale + center
    center_K: Array = np.zeros(0)
    scale_K: Array = np.zeros(0)
    trees: Trees | None = None  # of boosting


Probe = Callable[[ProbeData], ProbeFit]


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
    probe: Probe,
    data: ProbeData,
    fitted: pa.Table,
    out: Path,
) -> None:
    """Writes the model with the probe as its head, for `omnilead predict` and `evaluate`.
    `shown`: the leads that the probe was fitted on; `fitted`: its crops (engine.data.seen)."""
    fit = fit_scaled(probe, data)
    task = labels.task
    head: dict[str, Any] = {"task": task.name, "kind": task.kind, "unit": task.unit, **labels.facts}
    head["definition"] = {**head["definition"], "head": ""}
    if task.kind == "regression":
        head |= {"center": fit.center_K.tolist(), "scale": fit.scale_K.tolist()}
    elif KINDS[task.kind].has_thresholds:
        scored = held_out(probe, data)
        head["thresholds"] = thresholds(*scored)
        for line in sensitive(*scored, labels.classes):
            tell(f"{out}, by cross-validation: {line}")
    if fit.trees:
        head["trees"] = [len(fit.trees.feature), len(fit.trees.root)]
    modules = nn.ModuleDict({"encoder": model.encoder, "head": fit.trees or _layer(fit)})
    document = model.config | {
        "head": head,
        "readout": "+".join(readout),
        # The head was fitted without missing leads
        "trained": model.history | {"rlm": 0},
    }
    signals = model.preprocessing | {"seen": describe_leads(shown.seen).split(",")}
    made = "boosted trees" if fit.trees else "a linear layer"
    card, seen = _card(labels, readout, made, data), joined([model.seen, fitted])
    write(out, modules.state_dict(), document, signals, card, model.code, seen)


def _layer(fit: ProbeFit) -> nn.Linear:
    weights_KD = torch.from_numpy(fit.weights_DK.T).float()
    layer = nn.Linear(weights_KD.shape[1] - 1, len(weights_KD))
    layer.weight.data = weights_KD[:, 1:].contiguous()
    layer.bias.data = weights_KD[:, 0].clone()
    return layer


def _card(labels: TaskLabels, readout: Readout, made: str, data: ProbeData) -> str:
    unknown = "".join(f"Labels: {remark}. " for remark in unknown_patients(labels.unknown))
    people = len(np.unique(data.patient_N))
    return (
        f"# ECG {labels.task.name}: {made} on a frozen encoder\n\nThe encoder is read out as "
        f"{'+'.join(readout)}. The head, {made}, was fitted on labelled ECGs of {people:,} people, "
        "whom cross-validation held out in turn to choose it and its thresholds. config.json says "
        f"what data trained both. {unknown}"
        "This is not a medical device: whatever is built on it must be validated for its use and its "
        "population.\n"
    )


def fit_scaled(fit: Probe, data: ProbeData) -> ProbeFit:
    """Standardises values by the training rows before the fit, and scales the scores back to their
    unit."""
    if data.kind != "regression":
        return fit(data)
    center = np.nanmean(data.labels_NK, 0)
    deviation = np.nanstd(data.labels_NK, 0)
    scale = np.where(deviation > 0, deviation, 1.0)
    fitted = fit(data._replace(labels_NK=(data.labels_NK - center) / scale))
    scores_NK = fitted.scores_NK * scale + center
    return fitted._replace(scores_NK=scores_NK, center_K=center, scale_K=scale)


def linear(data: ProbeData) -> ProbeFit:
    """The fit with the penalty whose error is least on patients held out of the training rows; with a
    single patient, the strongest."""
    errors = []
    for rest, held in folds(data.patient_N):
        of_fold: list[float] = []
        for fit in _penalties(data.of(rest, held)):
            of_fold.append(_error(fit.scores_NK, data.labels_NK[held], data.kind) * len(held))
            if of_fold[-1] > min(of_fold) + WORSE * abs(min(of_fold)):
                break
        errors.append(of_fold)
    error = [sum(of) for of in zip(*errors, strict=False)]  # of the penalties tried in each fold
    best = int(np.argmin(error or [0.0]))
    return next(islice(_penalties(data), best, None))


def least_squares(data: ProbeData) -> ProbeFit:
    """Ridge regression also of classes, whose scores are no probabilities. For many features."""
    if data.kind == "survival":
        return linear(data)
    return linear(data._replace(kind="regression"))


def folds(patient_N: Array) -> Iterator[tuple[Array, Array]]:
    """Training rows, and those of a fold of the patients. Of many rows, one fold alone."""
    patients = np.random.default_rng(0).permutation(np.unique(patient_N))
    count = min(FOLDS, len(patients))
    if count < 2:
        return
    for fold in range(count if len(patient_N) <= MANY else 1):
        held = np.isin(patient_N, patients[fold::count])
        yield np.flatnonzero(~held), np.flatnonzero(held)


def held_out(probe: Probe, data: ProbeData) -> tuple[Array, Array]:
    """Labels and scores of training rows by probes of other patients."""
    labels, scores = [data.labels_NK[:0]], [data.labels_NK[:0]]
    for rest, held in folds(data.patient_N):
        labels.append(data.labels_NK[held])
        scores.append(probe(data.of(rest, held)).scores_NK)
    return np.concatenate(labels), np.concatenate(scores)


def _penalties(data: ProbeData) -> Iterator[ProbeFit]:
    """Solves all classes together, by L-BFGS, in the basis of the principal components, which
    changes no solution."""
    train, test = standardised(data.train_ND, data.test_ND)
    basis_DC = principal(train)
    train, test = train @ basis_DC, test @ basis_DC
    mean_D, scale_D = moments(data.train_ND)
    weights = np.zeros((train.shape[1] + 1, data.labels_NK.shape[1]))
    for strength in STRENGTHS:
        if data.kind == "regression":
            weights = ridge(train, data.labels_NK, strength)
        elif data.kind == "survival":
            weights = proportional_hazards(train, data.labels_NK, strength, weights)
        else:
            weights = logistic(train, data.labels_NK, strength, weights, data.kind == "multiclass")
        weights_DK = scale_D[:, None] * (basis_DC @ weights[1:])
        intercept_K = weights[0] - mean_D @ weights_DK
        scores_NK = outputs(data.kind, test, weights)
        yield ProbeFit(scores_NK, strength, np.vstack([intercept_K, weights_DK]))


def principal(x_ND: Array) -> Array:
    """The directions [D, C] in which these rows vary."""
    wide = x_ND.shape[1] > len(x_ND)
    variance, basis = np.linalg.eigh(x_ND @ x_ND.T if wide else x_ND.T @ x_ND)
    kept = variance > 1e-12 * variance[-1]
    if wide:
        return np.asarray(x_ND.T @ (basis[:, kept] / np.sqrt(variance[kept])))
    return np.asarray(basis[:, kept])


def outputs(kind: str, x_ND: Array, weights_DK: Array) -> Array:
    """What a linear layer predicts; its first row of weights are the intercepts."""
    return linked(kind, x_ND @ weights_DK[1:] + weights_DK[0])


def linked(kind: str, z_NK: Array) -> Array:
    """Probabilities, or values."""
    if not KINDS[kind].of_classes:
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
    weights = np.zeros((x_ND1.shape[1], y_NK.shape[1]))
    known_NK = ~np.isnan(y_NK)
    for pattern_N in np.unique(known_NK, axis=1).T:  # one system for all that are known of the same
        if not (n := pattern_N.sum()):
            continue
        same = (known_NK == pattern_N[:, None]).all(0)
        x = x_ND1[pattern_N]
        square = x.T @ x.copy() / n  # a matrix product: BLAS rounds x.T @ x otherwise
        product = x.T @ y_NK[pattern_N][:, same] / n
        weights[:, same] = np.linalg.solve(square + penalty, product)
    return weights


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
    known_NK = ~np.isnan(labels_NK)
    return float(np.square(scores_NK - labels_NK)[known_NK].sum() / max(known_NK.sum(), 1))
