"""What a fine-tuned model learns to output: targets of every crop, from the labels of its task.

targets = make_targets(labels)            # ConfigError if the labels cannot be learnt
targets.y[dataset][row], targets.outputs
targets.values(scores_RK)                 # from the model's scale to that of the labels
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omnilead.engine.common import ConfigError
from omnilead.engine.tasks import kinds
from omnilead.engine.tasks.labels import TaskLabels


@dataclass
class Targets:
    y: list[np.ndarray]  # by dataset; of regression standardised; of identity: classes
    outputs: int
    center_K: np.ndarray = field(default_factory=lambda: np.zeros(1))  # of regression
    scale_K: np.ndarray = field(default_factory=lambda: np.ones(1))
    balanced_2K: np.ndarray | None = None  # weights of negative and positive labels
    remarks: list[str] = field(default_factory=list)

    def standardised(self, y_NK: np.ndarray) -> np.ndarray:
        return np.asarray((y_NK - self.center_K) / self.scale_K, np.float32)

    def values(self, scores_RK: np.ndarray) -> np.ndarray:
        return np.asarray(scores_RK * self.scale_K + self.center_K)


def make_targets(labels: TaskLabels) -> Targets:
    if labels.task.kind == "identity":
        return _patients(labels)
    name = labels.name or "data.datasets"
    y_NK = labels.of("train")
    if unknown := named(labels, np.isnan(y_NK).all(0)):
        raise ConfigError(
            f"{name}: no crop of the training split has a known label in {unknown}: leave the "
            "column out"
        )
    if labels.task.kind == "regression":
        return _standardised(labels, y_NK, name)
    return _classes(labels, y_NK, name)


def _patients(labels: TaskLabels) -> Targets:
    """Classes are the patients of the training split; those of other crops are arbitrary."""
    trained = np.unique(labels.of("train"))
    y = [np.clip(np.searchsorted(trained, ids), 0, len(trained) - 1) for ids in labels.y]
    return Targets(y, len(trained), remarks=[f"{len(trained):,} identities"])


def _standardised(labels: TaskLabels, y_NK: np.ndarray, name: str) -> Targets:
    center_K = np.asarray(np.nanmean(y_NK, 0, np.float64))
    scale_K = np.asarray(np.nanstd(y_NK, 0, np.float64))
    if equal := named(labels, scale_K == 0):
        raise ConfigError(
            f"{name}: all known values of {equal} in the training split are equal: nothing to learn"
        )
    targets = Targets([], len(labels.classes), center_K, scale_K)
    targets.y = [targets.standardised(y) for y in labels.y]
    return targets


def _classes(labels: TaskLabels, y_NK: np.ndarray, name: str) -> Targets:
    kind = labels.task.kind
    there_K = (y_NK > 0).any(0)
    positives_only = kind == "binary" and not (y_NK == 0).any()
    if there_K.sum() < (2 if kind == "multiclass" else 1) or positives_only:
        only = "positives of " * (kind == "binary") + named(labels, there_K)
        has = f"only {only}" if there_K.any() else f"no positive of {named(labels, ~there_K)}"
        raise ConfigError(f"{name}: the training split has {has}: nothing to tell apart")
    targets = Targets(labels.y, len(labels.classes))
    if not there_K.all():
        targets.remarks = [f"no positive examples in training: {named(labels, ~there_K)}"]
    if labels.task.class_weights == "balanced":
        targets.balanced_2K = kinds.balanced(kind, y_NK)
    return targets


def named(labels: TaskLabels, these_K: Any) -> str:
    return ", ".join(name for name, this in zip(labels.classes, these_K, strict=True) if this)
