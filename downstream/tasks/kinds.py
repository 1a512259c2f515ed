"""The kinds of tasks. Each is a class with the loss, scores, targets and chance levels of its tasks;
logits are [R, K], of R samples for K outputs.

kind = KINDS["multilabel"]
loss_R, share_R = kind.loss_and_known_share(logits_RK, y_RK)      # unknown labels (NaN) are ignored
kind.scores(logits_RK)                            # probabilities; for regression and survival, the logits
kind.make_targets(y, train_NK, classes, "my.csv", False)       # ConfigError if the labels cannot be learnt

The labels of survival are times [R, 1], negative if censored then; its logits are risks: logarithms
of hazard ratios. Identity has patients as its labels: ArcFace learns it (downstream.tasks.classifier).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor

from omnilead.engine.settings.errors import ConfigError, join_first_names

from .config import TaskKind

Array = np.ndarray
Names = Sequence[str]
MIN_POSITIVES = 20  # with fewer positives than this, one of them is more than 5 %
EMPTY_CELL_NOTE = "an empty cell is unknown: write 0 where a label is absent"


@dataclass
class Targets:
    """What a model learns: the value of each output, for the crops of each dataset."""

    # for each dataset: its labels, standardised for regression; for identity, class numbers
    y: list[Array]
    outputs: int
    # for regression: the mean label of each output
    center_K: Array = field(default_factory=lambda: np.zeros(1))
    # for regression: the standard deviation of its labels
    scale_K: Array = field(default_factory=lambda: np.ones(1))
    # class weights of negative and of positive labels; None: all labels weigh the same
    balanced_2K: Array | None = None
    remarks: list[str] = field(default_factory=list)

    def standardise(self, y_NK: Array) -> Array:
        return np.asarray((y_NK - self.center_K) / self.scale_K, np.float32)

    def to_label_scale(self, scores_RK: Array) -> Array:
        """Converts scores from the scale of the model to the scale of the labels."""
        return np.asarray(scores_RK * self.scale_K + self.center_K)


class Kind(ABC):
    name: ClassVar[TaskKind]
    meaning: ClassVar[str]
    has_classes: ClassVar[bool] = True  # True if outputs are classes, False if they are values
    one_column: ClassVar[bool] = False  # True if the label table must have exactly one label column
    exclusive: ClassVar[bool] = False  # True if each ECG has exactly one of the classes
    # True if a label above 0 is an example of a class, or an event
    has_positives: ClassVar[bool] = True
    # Why a probe cannot be scored at a small share of the labels. The text ends an error that names
    # the labelled patients of train and the records of test: these are "both" and "them"
    why_share_is_too_small = "no class has positives and negatives in both"
    # The fields of a model's HeadInfo that hold one number for each output
    head_numbers: ClassVar[tuple[str, ...]] = ()

    @property
    def has_thresholds(self) -> bool:
        return "thresholds" in self.head_numbers

    @property
    def has_scale(self) -> bool:
        return "scale" in self.head_numbers

    @abstractmethod
    def cell_losses_and_known(self, logits_RK: Tensor, y_RK: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss of each label, and which labels are known. Both are [R, K], for
        multiclass [R, 1]."""

    def loss_and_known_share(
        self, logits_RK: Tensor, y_RK: Tensor, weights_RK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns two numbers for each sample: the summed loss of its known labels divided by the
        number of all labels, and the share of known labels. The sum of the first divided by the sum
        of the second is the mean over known labels."""
        loss_RK, known_RK = self.cell_losses_and_known(logits_RK, y_RK)
        if weights_RK is not None:
            loss_RK = loss_RK * weights_RK
        loss_R = (loss_RK * known_RK).sum(1) / loss_RK.shape[1]
        return loss_R, known_RK.float().mean(1)

    def are_right(self, logits_RK: Tensor, y_RK: Tensor) -> Tensor:
        """Returns bool [R]: True for samples whose known labels are all predicted correctly."""
        predicted_RK = logits_RK > 0
        positive_RK = y_RK > 0
        right_RK = (predicted_RK == positive_RK) | y_RK.isnan()
        return right_RK.all(1)

    def scores(self, logits_RK: Tensor) -> Tensor:
        return logits_RK

    def varying_outputs(self, y_NK: Array) -> Array:
        """Returns bool [K]: True for outputs whose known labels are not all equal, so that a probe
        can learn something."""
        unknown_NK = np.isnan(y_NK)
        least_K = np.where(unknown_NK, np.inf, y_NK).min(0, initial=np.inf)
        most_K = np.where(unknown_NK, -np.inf, y_NK).max(0, initial=-np.inf)
        return np.asarray(least_K < most_K)

    def why_nothing_varies(self, split: str) -> str:
        """Returns the reason why no output varies, for a message."""
        return f"all labels of the split {split} are the same"

    def held_out_error(self, scores_NK: Array, y_NK: Array) -> float:
        """Returns the error by which the penalty of a probe is chosen: the mean squared error of
        known labels, which is defined even for a class without positives."""
        known_NK = ~np.isnan(y_NK)
        return float(np.square(scores_NK - y_NK)[known_NK].sum() / max(known_NK.sum(), 1))

    def label_weights(self, y_NK: Array, balanced_2K: Array) -> Array:
        """Returns the weight of each label [N, K]; for multiclass [N, 1]."""
        negative_K, positive_K = balanced_2K
        return np.asarray(np.where(y_NK > 0, positive_K, negative_K))

    def make_targets(
        self, y: list[Array], train_NK: Array, classes: Names, labels: str, balanced: bool
    ) -> Targets:
        """Returns the targets of labels `y`, which is a list by dataset. `train_NK`: the labels of
        the training split. `labels`: the name of the label table, for messages. `balanced`: with
        class weights. Raises ConfigError if the labels cannot be learnt."""
        if unknown := join_selected(classes, np.isnan(train_NK).all(0)):
            raise ConfigError(
                f"{labels}: no crop of the training split has a known label in {unknown}: leave the "
                "column out"
            )
        return self.targets_of_known(y, train_NK, classes, labels, balanced)

    @abstractmethod
    def targets_of_known(
        self, y: list[Array], train_NK: Array, classes: Names, labels: str, balanced: bool
    ) -> Targets:
        """Returns what `make_targets` returns. The caller has checked that each column has a known
        label in the training split."""

    def chance_metrics_in_training(self, targets: Targets) -> dict[str, float]:
        """Returns the training metrics that a model reaches by guessing; {} if none are known."""
        return {}

    @abstractmethod
    def chance_metrics(self, y: Array, windows_N: Array, targets: Targets) -> dict[str, float]:
        """Returns the validation metrics of a model that knows only how frequent each label is.
        `y`: the held-out labels. `windows_N`: the number of windows of each crop."""

    def why_no_best_step(self, y: Array) -> str:
        """Returns the reason why the held-out labels cannot tell which step is best; "" if they
        can."""
        return ""

    def output_fields(self, classes: Names, unit: str) -> list[tuple[str, pa.DataType]]:
        """Returns the names and types of the columns in a table of predictions."""
        return [(name, pa.float32()) for name in classes]

    def output_columns(self, y_NK: Array, classes: Names, thresholds: Any) -> list[pa.Array]:
        return [pa.array(y_N) for y_N in y_NK.T]


class _ClassKind(Kind):
    """A kind whose labels are 0, 1 or NaN (unknown)."""

    def targets_of_known(
        self, y: list[Array], train_NK: Array, classes: Names, labels: str, balanced: bool
    ) -> Targets:
        there_K = np.asarray((train_NK > 0).any(0))
        if has := self.why_not_learnable(train_NK, there_K, classes):
            raise ConfigError(f"{labels}: the training split has {has}")
        targets = Targets(y, len(classes))
        if not there_K.all():
            absent = join_selected(classes, ~there_K)
            targets.remarks = [f"no positive examples in training: {absent}"]
        if balanced:
            targets.balanced_2K = self.balanced_weights(train_NK)
        return targets

    def why_not_learnable(self, train_NK: Array, there_K: Array, classes: Names) -> str:
        if not there_K.any():
            return f"no positive of {join_selected(classes, ~there_K)}: nothing to tell apart"
        if not (train_NK == 0).any():
            only = join_selected(classes, there_K)
            return f"only positives of {only}: nothing to tell apart; {EMPTY_CELL_NOTE}"
        return ""

    def balanced_weights(self, y_NK: Array) -> Array:
        """Returns [2, K]: the weights of negative and of positive labels, inverse to their
        frequency and 1 on average."""
        known_K = np.maximum((~np.isnan(y_NK)).sum(0), 1)
        negative_K = (y_NK == 0).sum(0)
        positive_K = (y_NK > 0).sum(0)
        counts_2K = np.maximum([negative_K, positive_K], 1)
        return np.asarray(known_K / self.group_count(y_NK) / counts_2K, np.float32)

    def group_count(self, y_NK: Array) -> int:
        """Returns into how many groups the labels of a class divide the samples: with it and without
        it."""
        return 2

    def chance_metrics(self, y: Array, windows_N: Array, targets: Targets) -> dict[str, float]:
        known_NK = windows_N[:, None] * ~np.isnan(y)
        share_K = (known_NK * (y > 0)).sum(0) / np.maximum(known_NK.sum(0), 1)
        return {"auroc": 0.5} | self.chance_metrics_of_shares(share_K)

    @abstractmethod
    def chance_metrics_of_shares(self, share_K: Array) -> dict[str, float]: ...


class BinaryKind(_ClassKind):
    name: ClassVar[TaskKind] = "binary"
    meaning = "each ECG has it or not"
    one_column = True
    head_numbers = ("thresholds",)

    def cell_losses_and_known(self, logits_RK: Tensor, y_RK: Tensor) -> tuple[Tensor, Tensor]:
        known_RK = ~y_RK.isnan()
        y_RK = y_RK.nan_to_num()
        loss_RK = F.binary_cross_entropy_with_logits(logits_RK, y_RK, reduction="none")
        return loss_RK, known_RK

    def scores(self, logits_RK: Tensor) -> Tensor:
        return logits_RK.sigmoid()

    def chance_metrics_of_shares(self, share_K: Array) -> dict[str, float]:
        if not share_K.any():
            return {}
        return {"auprc": float(share_K[share_K > 0].mean())}

    def output_fields(self, classes: Names, unit: str) -> list[tuple[str, pa.DataType]]:
        fields = []
        for name in classes:
            fields += [(name, pa.float32()), (f"{name}_predicted", pa.bool_())]
        return fields

    def output_columns(self, y_NK: Array, classes: Names, thresholds: Any) -> list[pa.Array]:
        columns = []
        decisions_KN = (y_NK > np.array(thresholds)).T
        for score_N, decision_N in zip(y_NK.T, decisions_KN, strict=True):
            columns += [pa.array(score_N), pa.array(decision_N)]
        return columns


class MultilabelKind(BinaryKind):
    name: ClassVar[TaskKind] = "multilabel"
    meaning = "an ECG can have none, one or several of them"
    one_column = False


class MulticlassKind(_ClassKind):
    name: ClassVar[TaskKind] = "multiclass"
    meaning = "each ECG has exactly one of them"
    one_column = True
    exclusive = True

    def cell_losses_and_known(self, logits_RK: Tensor, y_RK: Tensor) -> tuple[Tensor, Tensor]:
        known_R1 = ~y_RK[:, :1].isnan()
        loss_R = F.cross_entropy(logits_RK, y_RK.nan_to_num(), reduction="none")
        return loss_R[:, None], known_R1

    def are_right(self, logits_RK: Tensor, y_RK: Tensor) -> Tensor:
        return logits_RK.argmax(1) == y_RK.argmax(1)

    def scores(self, logits_RK: Tensor) -> Tensor:
        return logits_RK.softmax(1)

    def why_not_learnable(self, train_NK: Array, there_K: Array, classes: Names) -> str:
        if why := super().why_not_learnable(train_NK, there_K, classes):
            return why
        if there_K.sum() == 1:
            return f"only {join_selected(classes, there_K)}: nothing to tell apart"
        return ""

    def group_count(self, y_NK: Array) -> int:
        """Returns into how many groups the labels divide the samples: one for each class."""
        return int(y_NK.shape[1])

    def label_weights(self, y_NK: Array, balanced_2K: Array) -> Array:
        _, positive_K = balanced_2K
        of_class_N1 = np.nansum(y_NK * positive_K, axis=1, keepdims=True)
        return np.asarray(of_class_N1, np.float32)

    def chance_metrics_of_shares(self, share_K: Array) -> dict[str, float]:
        return {"accuracy": float(share_K.max())}

    def output_fields(self, classes: Names, unit: str) -> list[tuple[str, pa.DataType]]:
        return [("predicted", pa.string()), *super().output_fields(classes, unit)]

    def output_columns(self, y_NK: Array, classes: Names, thresholds: Any) -> list[pa.Array]:
        best = pa.array(classes).take(pa.array(y_NK.argmax(1)))
        return [best, *super().output_columns(y_NK, classes, thresholds)]


class RegressionKind(Kind):
    """A kind whose labels are numbers, which are standardised. Where the error is above one
    standard deviation, the loss grows linearly (smooth L1), so that a few wrong labels do not
    dominate."""

    name: ClassVar[TaskKind] = "regression"
    meaning = "numbers"
    has_classes = False
    has_positives = False
    head_numbers = ("center", "scale")

    def cell_losses_and_known(self, logits_RK: Tensor, y_RK: Tensor) -> tuple[Tensor, Tensor]:
        known_RK = ~y_RK.isnan()
        loss_RK = F.smooth_l1_loss(logits_RK, y_RK.nan_to_num(), reduction="none")
        return loss_RK, known_RK

    def targets_of_known(
        self, y: list[Array], train_NK: Array, classes: Names, labels: str, balanced: bool
    ) -> Targets:
        center_K = np.asarray(np.nanmean(train_NK, 0, np.float64))
        scale_K = np.asarray(np.nanstd(train_NK, 0, np.float64))
        if equal := join_selected(classes, scale_K == 0):
            raise ConfigError(
                f"{labels}: all known values of {equal} in the training split are equal, so there is "
                "nothing to learn: leave the column out"
            )
        targets = Targets([], len(classes), center_K, scale_K)
        targets.y = [targets.standardise(y_NK) for y_NK in y]
        return targets

    def chance_metrics(self, y: Array, windows_N: Array, targets: Targets) -> dict[str, float]:
        error = float(np.nanmean(np.abs(y - targets.center_K)))
        return {"mae": error, "r2": 0.0}

    def output_fields(self, classes: Names, unit: str) -> list[tuple[str, pa.DataType]]:
        suffix = f"_{unit}" if unit else ""
        return [(f"{name}{suffix}", pa.float32()) for name in classes]


class SurvivalKind(Kind):
    name: ClassVar[TaskKind] = "survival"
    meaning = "the time until an event"
    has_classes = False
    why_share_is_too_small = "no event in one of them"

    def cell_losses_and_known(self, logits_RK: Tensor, y_RK: Tensor) -> tuple[Tensor, Tensor]:
        return cox_loss(logits_RK, y_RK), y_RK > 0

    def targets_of_known(
        self, y: list[Array], train_NK: Array, classes: Names, labels: str, balanced: bool
    ) -> Targets:
        events = int((train_NK > 0).sum())
        if not events:
            raise ConfigError(
                f"{labels}: the training split has no event, so there is nothing to learn"
            )
        return Targets(y, 1, remarks=[f"{events:,} training crops with the event"])

    def chance_metrics(self, y: Array, windows_N: Array, targets: Targets) -> dict[str, float]:
        return {"c_index": 0.5}

    def why_no_best_step(self, y: Array) -> str:
        return "" if (y > 0).any() else "no event in validation"

    def varying_outputs(self, y_NK: Array) -> Array:
        return np.asarray((y_NK > 0).any(0))

    def why_nothing_varies(self, split: str) -> str:
        return f"no event in the split {split}"

    def held_out_error(self, scores_NK: Array, y_NK: Array) -> float:
        return event_loss(torch.from_numpy(scores_NK), torch.from_numpy(y_NK)).item()


class IdentityKind(Kind):
    """A kind whose labels are patients. The patients of the training split are its classes."""

    name: ClassVar[TaskKind] = "identity"
    meaning = "which ECGs are of the same patient"

    def cell_losses_and_known(self, logits_RK: Tensor, y_RK: Tensor) -> tuple[Tensor, Tensor]:
        raise TypeError("kind identity has no loss of labels: ArcFace learns the patients")

    def make_targets(
        self, y: list[Array], train_NK: Array, classes: Names, labels: str, balanced: bool
    ) -> Targets:
        # No check for columns without a known label, as no patient is unknown
        return self.targets_of_known(y, train_NK, classes, labels, balanced)

    def targets_of_known(
        self, y: list[Array], train_NK: Array, classes: Names, labels: str, balanced: bool
    ) -> Targets:
        """Returns the class of each crop as targets. The classes are the patients of the training
        split, numbered from 0; crops of other patients get an arbitrary number."""
        trained = np.unique(train_NK)
        numbers = [np.clip(np.searchsorted(trained, ids), 0, len(trained) - 1) for ids in y]
        remark = f"{len(trained):,} patients to tell apart"
        return Targets(numbers, len(trained), remarks=[remark])

    def chance_metrics_in_training(self, targets: Targets) -> dict[str, float]:
        return {"accuracy": 1 / targets.outputs}

    def chance_metrics(self, y: Array, windows_N: Array, targets: Targets) -> dict[str, float]:
        _, counts = np.unique(y, return_counts=True)
        share = counts / counts.sum()
        return {"identification_accuracy": float(share @ share)}


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        BinaryKind(),
        MultilabelKind(),
        MulticlassKind(),
        RegressionKind(),
        SurvivalKind(),
        IdentityKind(),
    )
}


def join_selected(classes: Names, selected_K: Any) -> str:
    return ", ".join(compress(classes, selected_K))


def cox_loss(risk_R1: Tensor, y_R1: Tensor) -> Tensor:
    """Returns the loss that each row would have with an event: minus the logarithm of the partial
    likelihood (Cox 1972), which is the row's share of the hazard of all rows still at risk. The
    share is multiplied by the number of these rows, so that equal risks cost 0 in a batch of any
    size.

    Ties are handled as by Breslow: the halves of a crop always tie, and Efron's correction would
    count them as two patients."""
    risk_R = risk_R1[:, 0]
    # rows without a label have time 0, so that they are never at risk
    time_R = y_R1[:, 0].abs().nan_to_num()
    order = time_R.argsort(descending=True)
    at_risk_R = torch.searchsorted(-time_R[order], -time_R, right=True)
    total_R = risk_R[order].logcumsumexp(0)[at_risk_R - 1]
    return (total_R - at_risk_R.to(risk_R).log() - risk_R)[:, None]


def event_loss(risk_N1: Tensor, y_N1: Tensor) -> Tensor:
    """Returns the mean cox_loss of the rows with an event; 0 if there are none."""
    event_N1 = y_N1 > 0
    return (cox_loss(risk_N1, y_N1) * event_N1).sum() / event_N1.sum().clamp_min(1)


def best_thresholds(y_NK: Array, scores_NK: Array) -> list[float]:
    """Returns for each class the threshold with the highest F1; 0.5 for a class without
    positives."""
    return list(map(_best_threshold, y_NK.T, scores_NK.T))


def _best_threshold(y_N: Array, score_N: Array) -> float:
    known = ~np.isnan(y_N)
    y, score = y_N[known], score_N[known]
    order = np.argsort(-score, kind="stable")
    positive = y[order] > 0
    if not positive.any():
        return 0.5
    score = np.append(score[order], 0.0)
    above, below = score[:-1], score[1:]  # the scores above and below each possible threshold
    true = np.cumsum(positive)  # number of positives among the 1, 2, ... highest scores
    predicted = np.arange(1, len(true) + 1)
    f1 = 2 * true / (predicted + true[-1])
    f1[above == below] = -1
    best = int(f1.argmax())
    return float((above[best] + below[best]) / 2)


def sensitivity_points(y_NK: Array, scores_NK: Array, classes: Names) -> dict[str, list[float]]:
    """Returns for each class the score that 95 % of its positives reach, and the specificity at
    this score. Leaves out classes with fewer than MIN_POSITIVES positives or without negatives."""
    points = {}
    for name, y_N, score_N in zip(classes, y_NK.T, scores_NK.T, strict=True):
        positive, negative = np.sort(score_N[y_N > 0]), score_N[y_N == 0]
        if len(positive) >= MIN_POSITIVES and len(negative):
            lowest = positive[len(positive) // MIN_POSITIVES]
            points[name] = [float(lowest), float((negative < lowest).mean())]
    return points


def sensitivity_sentences(points: Mapping[str, Sequence[float]], classes: Names) -> list[str]:
    """Returns a sentence on each of the points of sensitivity_points, and one on the classes
    without a point."""
    sentences = []
    for name, (lowest, specificity) in points.items():
        sentences.append(
            f"{name}: 95 % sensitivity with {lowest:.4f} for the threshold, specificity {specificity:.2f}"
        )
    if without := [name for name in classes if name not in points]:
        sentences.append(
            f"no score with 95 % sensitivity for {join_first_names(without, 5)}: that takes {MIN_POSITIVES} "
            "positives and a negative"
        )
    return sentences
