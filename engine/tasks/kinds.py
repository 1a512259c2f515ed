"""Losses, scores and class weights of each kind of task, from the logits of R samples for K
outputs.

loss_R, share_R = loss("multilabel", logits_RK, y_RK)        # unknown labels (NaN) are ignored
scores("multiclass", logits_RK)                              # probabilities; for regression and survival, the logits

The labels of survival are times [R, 1], negative if censored then; its logits are risks: logarithms
of hazard ratios.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from omnilead.engine.tasks.config import TaskKind

Array = np.ndarray
WITH_THRESHOLDS = ("binary", "multilabel")
MEANINGS = {
    "binary": "each ECG has it or not",
    "multilabel": "an ECG can have none, one or several of them",
    "multiclass": "each ECG has exactly one of them",
    "regression": "numbers",
    "survival": "the time until an event",
    "identity": "which ECGs are of the same patient",
}
OF_VALUES = ("regression", "survival")  # neither classes nor probabilities


def cell_losses(kind: TaskKind, logits_RK: Tensor, y_RK: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each label, and which are known: [R, K], for multiclass [R, 1]. A regression's
    labels are standardised: beyond one deviation its loss grows linearly (smooth L1), so that a
    few wrong labels do not dominate."""
    if kind == "survival":
        return cox(logits_RK, y_RK), y_RK > 0
    known_RK = ~y_RK.isnan()
    y_RK = y_RK.nan_to_num()
    if kind == "multiclass":
        loss_R = F.cross_entropy(logits_RK, y_RK, reduction="none")
        return loss_R[:, None], known_RK[:, :1]
    if kind == "regression":
        loss_RK = F.smooth_l1_loss(logits_RK, y_RK, reduction="none")
    else:
        loss_RK = F.binary_cross_entropy_with_logits(logits_RK, y_RK, reduction="none")
    return loss_RK, known_RK


def cox(risk_R1: Tensor, y_R1: Tensor) -> Tensor:
    """Minus the logarithm of the partial likelihood (Cox 1972) of each row if it had the event:
    of its hazard as a share of that of all rows not yet censored or gone, times their number, so
    that equal risks cost 0 in a batch of any size.

    Tied times as by Breslow: the halves of a crop always tie, and Efron's correction would take
    them for two patients."""
    risk_R = risk_R1[:, 0]
    time_R = y_R1[:, 0].abs().nan_to_num()  # unknown: 0, so never at risk
    order = time_R.argsort(descending=True)
    at_risk_R = torch.searchsorted(-time_R[order], -time_R, right=True)
    total_R = risk_R[order].logcumsumexp(0)[at_risk_R - 1]
    return (total_R - at_risk_R.to(risk_R).log() - risk_R)[:, None]


def loss(
    kind: TaskKind, logits_RK: Tensor, y_RK: Tensor, weights_RK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For each sample: the summed loss of its known labels divided by the number of all labels,
    and the share that is known. The sum of the first divided by the sum of the second is the
    mean over known labels."""
    loss_RK, known_RK = cell_losses(kind, logits_RK, y_RK)
    if weights_RK is not None:
        loss_RK = loss_RK * weights_RK
    loss_R = (loss_RK * known_RK).sum(1) / loss_RK.shape[1]
    return loss_R, known_RK.float().mean(1)


def right(kind: TaskKind, logits_RK: Tensor, y_RK: Tensor) -> Tensor:
    """Whether all known labels of a sample are predicted."""
    if kind == "multiclass":
        return logits_RK.argmax(1) == y_RK.argmax(1)
    predicted_RK = logits_RK > 0
    positive_RK = y_RK > 0
    right_RK = (predicted_RK == positive_RK) | y_RK.isnan()
    return right_RK.all(1)


def scores(kind: TaskKind, logits_RK: Tensor) -> Tensor:
    if kind == "multiclass":
        return logits_RK.softmax(1)
    if kind in OF_VALUES:
        return logits_RK
    return logits_RK.sigmoid()


def balanced(kind: TaskKind, y_NK: Array) -> Array:
    """[2, K]: weights of negative and positive labels, inverse to their frequency, 1 on average."""
    known_K = np.maximum((~np.isnan(y_NK)).sum(0), 1)
    negative_K = (y_NK == 0).sum(0)
    positive_K = (y_NK > 0).sum(0)
    counts_2K = np.maximum([negative_K, positive_K], 1)
    groups = y_NK.shape[1] if kind == "multiclass" else 2
    return np.asarray(known_K / groups / counts_2K, np.float32)


def weights(kind: TaskKind, y_NK: Array, balanced_2K: Array) -> Array:
    """The weight of each label [N, K]; for multiclass [N, 1]."""
    negative_K, positive_K = balanced_2K
    if kind == "multiclass":
        of_class_N1 = np.nansum(y_NK * positive_K, axis=1, keepdims=True)
        return np.asarray(of_class_N1, np.float32)
    return np.asarray(np.where(y_NK > 0, positive_K, negative_K))


def thresholds(y_NK: Array, scores_NK: Array) -> list[float]:
    """For each class, the threshold with the highest F1; 0.5 if it has no positives."""
    return list(map(_threshold, y_NK.T, scores_NK.T))


def _threshold(y_N: Array, score_N: Array) -> float:
    known = ~np.isnan(y_N)
    y, score = y_N[known], score_N[known]
    order = np.argsort(-score, kind="stable")
    positive = y[order] > 0
    if not positive.any():
        return 0.5
    score = np.append(score[order], 0.0)
    above, below = score[:-1], score[1:]  # a threshold lies between them
    true = np.cumsum(positive)  # positives among the 1, 2, ... highest scores
    predicted = np.arange(1, len(true) + 1)
    f1 = 2 * true / (predicted + true[-1])
    f1[above == below] = -1
    best = int(f1.argmax())
    return float((above[best] + below[best]) / 2)


def sensitive(y_NK: Array, scores_NK: Array, classes: tuple[str, ...]) -> list[str]:
    """From which score of each class on 95 % of its positives lie, and the specificity there."""
    said = []
    for name, y_N, score_N in zip(classes, y_NK.T, scores_NK.T, strict=True):
        positive, negative = np.sort(score_N[y_N > 0]), score_N[y_N == 0]
        if len(positive) >= 20 and len(negative):  # of fewer, one is more than 5 %
            lowest = positive[len(positive) // 20]
            said.append(
                f"{name}: 95 % sensitivity from {lowest:.4f} on, specificity {(negative < lowest).mean():.2f}"
            )
    return said
