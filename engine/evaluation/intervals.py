"""Intervals of metrics from few positives or negatives, where a bootstrap says nothing: of two
positives it can be 1 to 1.

if few_patients(labels_NK, patients):
    intervals |= intervals_of_few(metrics, labels_NK, patients)       # exact ones, or NaN
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from omnilead.engine.evaluation.metrics import Array, exact_interval

FEW = 10  # patients with the class, or without it
TOO_FEW = (
    f"Fewer than {FEW} patients with or without the class, in every class: AUROC and other "
    "metrics of classes"
)


def few_patients(labels_NK: Array, patients: Sequence[Any]) -> bool:
    """Whether no class has FEW patients with it and FEW without it."""
    patient_N = np.unique(np.asarray(patients), return_inverse=True)[1]
    for y_N in labels_NK.T:
        with_it, without_it = (len(np.unique(patient_N[y_N == label])) for label in (1, 0))
        if min(with_it, without_it) >= FEW:
            return False
    return True


def intervals_of_few(
    metrics: Mapping[str, Any], labels_NK: Array, patients: Sequence[Any]
) -> dict[str, list[float]]:
    """Exact intervals of the shares of rows, if each row is another patient; otherwise none."""
    shares = {"accuracy": int((~np.isnan(labels_NK.astype(float))).any(1).sum())}
    if labels_NK.shape[1] == 1:
        shares |= {
            "sensitivity": int((labels_NK == 1).sum()),
            "specificity": int((labels_NK == 0).sum()),
        }
    independent = len(set(patients)) == len(labels_NK) > 1
    found = {name: [math.nan, math.nan] for name in metrics}
    for name, n in shares.items():
        if independent and n and name in metrics:
            found[name] = exact_interval(round(metrics[name] * n), n)
    return found
