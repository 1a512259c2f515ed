"""Fits linear probes to frozen embeddings.

    probe = fit_linear_probe(ProbeData(x_ND, y_NK, patient_N, "multilabel"))
    probe.scores(test_ND)                # probabilities, values or risks

Each record is one row, the mean over its halves. Linear: a logistic regression for each class,
softmax for exclusive classes, ridge regression for values, Cox regression for survival. Features
and values are standardised by the training rows. The penalty, the same for all classes, is chosen
by cross-validation over the patients of the training rows: it minimises the mean squared error of
probabilities or values of those held out; in survival, the partial likelihood.

Axes: N rows, D width of an embedding, K classes. Labels that are NaN are unknown.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GroupKFold
from sklearn.preprocessing import StandardScaler
from torch import nn

from omnilead.data_tools.io.cluster import reuse_processes, run_in_order

from ..tasks.kinds import KINDS, event_loss
from ..tasks.metrics import Array

# Strengths of the L2 penalty, which are multiplied by the number of features. The strongest is
# first, because each fit starts from the solution of the fit before
PENALTY_STRENGTHS = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
SOLVER_STEPS = 1000  # a solver stops after this many steps
LOGISTIC_TOLERANCE = 1e-3  # a tolerance of a tenth of this changes no score in the fourth digit
DEFAULT_FOLDS = 5  # number of folds of a cross-validation
MAX_SENT_JOB_BYTES = 2**27  # jobs with larger embeddings are not sent to other processes
ROWS_FOR_ONE_FOLD = 5000  # with more rows than this, only one of the folds is held out
# If the error at a penalty exceeds the least error of the fold by this share, weaker penalties are
# not tried
STOP_IF_WORSE_BY = 0.02
ABSENT_CLASS_LOGIT = -20.0  # logit of a class that no training row has, where classes are exclusive


class ProbeData(NamedTuple):
    """The rows that a probe is fitted on: features, labels, patients, and the kind of task."""

    x_ND: Array
    y_NK: Array
    patient_N: Array
    kind: str

    def take(self, rows: Array) -> "ProbeData":
        return ProbeData(self.x_ND[rows], self.y_NK[rows], self.patient_N[rows], self.kind)


class Probe(NamedTuple):
    """A fitted probe. Its `head` maps embeddings to outputs, and can become the head of a model. In
    a regression, it was fitted to standardised values: value = output * scale + center."""

    kind: str
    head: nn.Module
    center_K: Array
    scale_K: Array
    strength: float = 0.0  # the penalty that was chosen, one of PENALTY_STRENGTHS

    def scores(self, x_ND: Array) -> Array:
        """Returns probabilities, values or risks, by the kind of task."""
        with torch.no_grad():
            logits_NK = self.head(torch.from_numpy(x_ND.astype(np.float64))).double()
            scores_NK = KINDS[self.kind].scores(logits_NK).numpy()
        return np.asarray(scores_NK * self.scale_K + self.center_K)


Fit = Callable[[ProbeData], Probe]
Weights = tuple[Array, Array]  # weights [K, D] and intercepts [K] of K outputs
_in_processes = ContextVar("in_processes", default=False)


class ProbeJob(NamedTuple):
    """The rows to fit a probe on, and the rows that the probe then scores."""

    fit: Fit
    data: ProbeData
    used_K: Array  # True for the outputs that are scored
    test_ND: Array

    def scores(self) -> Array:
        """Fits the probe. Returns its scores of `test_ND` for the outputs `used_K`."""
        solved_K = self.used_K
        # Exclusive classes are fitted together, so those that are not scored are fitted, too
        if KINDS[self.data.kind].exclusive:
            solved_K = np.ones_like(self.used_K)
        probe = self.fit(self.data._replace(y_NK=self.data.y_NK[:, solved_K]))
        return probe.scores(self.test_ND)[:, self.used_K[solved_K]]


def run_probe_jobs(jobs: Iterable[ProbeJob]) -> Iterator[Array]:
    """Yields the scores of each job. Inside `fitting_in_processes`, as many processes fit at a time
    as PyTorch has threads. The first job must have the most data, because it decides whether
    processes are used."""
    queue = iter(jobs)
    first = next(queue)
    is_small = first.data.x_ND.nbytes + first.test_ND.nbytes <= MAX_SENT_JOB_BYTES
    processes = fit_process_count() if is_small else 1
    return run_in_order(ProbeJob.scores, chain([first], queue), processes)


def fit_process_count() -> int:
    return torch.get_num_threads() if _in_processes.get() else 1


@contextmanager
def fitting_in_processes() -> Iterator[None]:
    """Lets several processes fit probes while the block runs. Only commands may use it, because in
    a user's script each process would run the script again."""
    token = _in_processes.set(True)
    try:
        with reuse_processes():
            yield
    finally:
        _in_processes.reset(token)


def standardise_labels(data: ProbeData) -> tuple[ProbeData, Array, Array]:
    """Returns the data with standardised labels, and the center [K] and scale [K] of the labels.
    Labels that are classes or times of events are not changed: center 0, scale 1."""
    outputs = data.y_NK.shape[1]
    if not KINDS[data.kind].has_scale:
        return data, np.zeros(outputs), np.ones(outputs)
    scaler = StandardScaler().fit(data.y_NK)
    return data._replace(y_NK=scaler.transform(data.y_NK)), scaler.mean_, scaler.scale_


def fit_linear_probe(data: ProbeData) -> Probe:
    """Returns a linear probe, fitted with the penalty that has the least error on held-out patients
    of the training rows. If all rows are of one patient, the strongest penalty is used."""
    data, center_K, scale_K = standardise_labels(data)
    kind = KINDS[data.kind]
    errors, tried = np.zeros(len(PENALTY_STRENGTHS)), len(PENALTY_STRENGTHS)
    for train_rows, held_out in train_and_held_out_rows(data.patient_N):
        least = np.inf
        for number, probe in enumerate(
            _fit_each_penalty(data.take(train_rows), PENALTY_STRENGTHS[:tried])
        ):
            scores_NK = probe.scores(data.x_ND[held_out])
            error = len(held_out) * kind.held_out_error(scores_NK, data.y_NK[held_out])
            errors[number] += error
            least = min(least, error)
            if error > least + STOP_IF_WORSE_BY * abs(least):
                tried = number + 1
                break
    best = PENALTY_STRENGTHS[int(np.argmin(errors[:tried]))]
    (probe,) = _fit_each_penalty(data, [best])
    return probe._replace(center_K=center_K, scale_K=scale_K)


def train_and_held_out_rows(patient_N: Array) -> Iterator[tuple[Array, Array]]:
    """Yields (training rows, held-out rows) for each fold of the patients. If there are many rows,
    only the first fold is yielded; if there is one patient, none."""
    count = min(DEFAULT_FOLDS, len(np.unique(patient_N)))
    if count < 2:
        return
    splits = GroupKFold(count).split(patient_N, groups=patient_N)
    for train_rows, held_out in splits:
        yield train_rows, held_out
        if len(patient_N) > ROWS_FOR_ONE_FOLD:
            return


def _fit_each_penalty(data: ProbeData, strengths: Sequence[float]) -> Iterator[Probe]:
    """Yields a probe for each penalty strength, fitted on all rows of `data`."""
    scaler = StandardScaler().fit(data.x_ND)
    x_ND, outputs = scaler.transform(data.x_ND), data.y_NK.shape[1]
    alphas = [strength * x_ND.shape[1] for strength in strengths]
    fits = SOLVERS[data.kind](x_ND, data.y_NK, alphas)
    for strength, (weights_KD, bias_K) in zip(strengths, fits, strict=True):
        layer = nn.Linear(x_ND.shape[1], outputs).double()
        # The layer will take features that are not standardised, so the scaler's numbers become part
        # of its weights
        weights_KD = weights_KD / scaler.scale_
        layer.weight.data = torch.from_numpy(weights_KD)
        layer.bias.data = torch.from_numpy(bias_K - weights_KD @ scaler.mean_)
        yield Probe(data.kind, layer, np.zeros(outputs), np.ones(outputs), strength)


def solve_logistic(x_ND: Array, y_NK: Array, alphas: Sequence[float]) -> Iterator[Weights]:
    """Yields the logistic regressions of the K outputs for each alpha. They minimise the summed
    loss of the known labels + alpha / 2 * squared weights. scikit-learn's LogisticRegression gives
    the same, but takes two to four times as long. An output without positives or without negatives
    gets its base rate."""
    x_ND = x_ND.astype(np.float64)
    weights_KD, bias_K = np.zeros((y_NK.shape[1], x_ND.shape[1])), np.zeros(y_NK.shape[1])
    for alpha in alphas:
        weights_KD, bias_K = weights_KD.copy(), bias_K.copy()
        for k, y_N in enumerate(y_NK.T):
            known_N = ~np.isnan(y_N)
            y_N, positives, n = y_N[known_N], y_N[known_N].sum(), known_N.sum()
            if 0 < positives < n:
                known_ND = x_ND if known_N.all() else x_ND[known_N]
                weights_KD[k], bias_K[k] = _logistic_weights_and_bias(
                    known_ND, y_N, alpha / n, weights_KD[k], bias_K[k]
                )
            else:
                bias_K[k] = np.log((positives + 0.5) / (n - positives + 0.5))
        yield weights_KD, bias_K


def _logistic_weights_and_bias(
    x_ND: Array, y_N: Array, penalty: float, weights_D: Array, bias: float
) -> tuple[Array, float]:
    """Returns the weights and the bias of one logistic regression. The solver starts from
    `weights_D` and `bias`."""

    def loss_and_gradient(w_D1: Array) -> tuple[float, Array]:
        w_D, logit_N = w_D1[:-1], x_ND @ w_D1[:-1] + w_D1[-1]
        error_N = (expit(logit_N) - y_N) / len(y_N)
        loss = (np.logaddexp(0, logit_N) - y_N * logit_N).mean()
        gradient_D = error_N @ x_ND + penalty * w_D
        return loss + penalty / 2 * w_D @ w_D, np.append(gradient_D, error_N.sum())

    limits = {
        "maxiter": SOLVER_STEPS,
        "maxls": 50,
        "ftol": 64 * np.finfo(float).eps,
        "gtol": LOGISTIC_TOLERANCE,
    }
    start_D1 = np.append(weights_D, bias)
    w_D1 = minimize(loss_and_gradient, start_D1, jac=True, method="L-BFGS-B", options=limits).x
    return w_D1[:-1], w_D1[-1]


def solve_softmax(x_ND: Array, y_NK: Array, alphas: Sequence[float]) -> Iterator[Weights]:
    """Yields the softmax regression over exclusive classes for each alpha."""
    known_N = ~np.isnan(y_NK).any(1)
    x_ND, class_N = x_ND[known_N].astype(np.float64), y_NK[known_N].argmax(1)
    present = np.unique(class_N)
    model = LogisticRegression(tol=LOGISTIC_TOLERANCE, warm_start=True, max_iter=SOLVER_STEPS)
    for alpha in alphas:
        weights_KD = np.zeros((y_NK.shape[1], x_ND.shape[1]))
        bias_K = np.full(y_NK.shape[1], ABSENT_CLASS_LOGIT)
        bias_K[present] = 0
        # Of two classes, scikit-learn returns weights for the second only
        if len(present) == 2:
            model.set_params(C=1 / alpha).fit(x_ND, class_N)
            weights_KD[present[1]], bias_K[present[1]] = model.coef_[0], model.intercept_[0]
        elif len(present) > 2:
            model.set_params(C=1 / alpha).fit(x_ND, class_N)
            weights_KD[present], bias_K[present] = model.coef_, model.intercept_
        yield weights_KD, bias_K


def solve_ridge(x_ND: Array, y_NK: Array, alphas: Sequence[float]) -> Iterator[Weights]:
    """Yields the ridge regressions of the K outputs for each alpha."""
    known_NK = ~np.isnan(y_NK)
    for alpha in alphas:
        weights_KD, bias_K = np.zeros((y_NK.shape[1], x_ND.shape[1])), np.zeros(y_NK.shape[1])
        # Columns whose labels are known in the same rows are fitted together
        for known_N in np.unique(known_NK.T, axis=0):
            same_K = (known_N == known_NK.T).all(1)
            if known_N.any():
                model = Ridge(alpha).fit(x_ND[known_N], y_NK[known_N][:, same_K])
                weights_KD[same_K], bias_K[same_K] = model.coef_, model.intercept_
        yield weights_KD, bias_K


def solve_cox(x_ND: Array, y_N1: Array, alphas: Sequence[float]) -> Iterator[Weights]:
    """Yields the Cox regression for each alpha. It minimises the summed loss of the events + alpha
    / 2 * squared weights."""
    x, y, events = torch.from_numpy(x_ND).double(), torch.from_numpy(y_N1), max((y_N1 > 0).sum(), 1)
    weights_D = np.zeros(x_ND.shape[1])
    for alpha in alphas:

        def loss_and_gradient(
            w_D: Array, penalty: float = alpha / events / 2
        ) -> tuple[float, Array]:
            w_D1 = torch.tensor(w_D[:, None], requires_grad=True)
            value = event_loss(x @ w_D1, y) + penalty * w_D1.square().sum()
            (gradient_D1,) = torch.autograd.grad(value, w_D1)
            return value.item(), gradient_D1[:, 0].numpy()

        limits = {"maxiter": SOLVER_STEPS, "ftol": 1e-10, "gtol": 1e-6}
        weights_D = minimize(
            loss_and_gradient, weights_D, jac=True, method="L-BFGS-B", options=limits
        ).x
        yield weights_D[None], np.zeros(1)


SOLVERS = {
    "binary": solve_logistic,
    "multilabel": solve_logistic,
    "multiclass": solve_softmax,
    "regression": solve_ridge,
    "survival": solve_cox,
}
