"""What a model said of held-out ECGs and what was so, scored: numbers with 95 % intervals, and JSON of them.

    Diagnoses(labels_NK, scores_NK, records, patients, facts).document()["score"]       # the Challenge score, of halves of 5 s
    Identities(gallery_PD, gallery_ids, probe_QD, probe_ids, facts).document()["score"]   # accuracy

Arrays in: no model and no dataset is needed. Intervals are bootstraps over patients, all of a patient's halves together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from data_tools.dataset import CLASSES
from engine.evaluation.metrics import METRICS, Diagnosis, MetricError, bootstrap, identification, outputs_of

Array = np.ndarray
RESAMPLES = 1000
BINS = 10  # of probabilities, each as wide


@dataclass(frozen=True, eq=False)
class Diagnoses:
    """One row a half of 5 s, as in the paper; `record`: the mean probability over a record's halves."""

    labels_NK: Array
    scores_NK: Array  # probabilities
    records_N: Sequence[Any]
    patients_N: Sequence[Any]
    facts: dict[str, Any] = field(default_factory=dict)  # model, data, role, leads
    notes: Sequence[str] = ()  # what a reader should know of the data
    resamples: int = RESAMPLES

    @cached_property
    def half(self) -> dict[str, Any]:
        return scored(self.labels_NK, self.scores_NK, self.patients_N, self.resamples)

    @cached_property
    def record(self) -> dict[str, Any]:
        return scored(*by_record(self.labels_NK, self.scores_NK, self.records_N, self.patients_N), self.resamples)

    @property
    def remarks(self) -> list[str]:
        """What qualifies the numbers."""
        told, half = list(self.notes), self.half
        if absent := half["without_positives"]:
            among = f"{len(absent)} of {len(CLASSES)} classes have no positives: {', '.join(absent)}"
            told.append(f"{among}. AUROC and AUPRC leave them out.")
        if always := half["without_negatives"]:
            told.append(f"Every row has {', '.join(always)}: AUROC is not defined there.")
        if half["patients"] == 1:
            told.append("All rows are of one patient: there are no intervals.")
        return told

    def document(self) -> dict[str, Any]:
        own = {"unit": "half", **self.half, "score": self.half["metrics"]["challenge"]}
        whole = {"task": "diagnosis", **self.facts, **own, "record": {"unit": "record", **self.record}, "remarks": self.remarks}
        return {key: nullable(value) for key, value in whole.items()}


def scored(labels: Array, scores: Array, patients: Sequence[Any], resamples: int = RESAMPLES) -> dict[str, Any]:
    """n, patients, metrics, intervals, classes, without_positives, without_negatives."""
    if not np.isfinite(scores).all():
        rows = ~np.isfinite(scores).all(1)
        raise MetricError(f"the model gave NaN for {rows.sum():,} of {len(scores):,} rows: its weights or its input are broken")
    diagnosis = Diagnosis(labels, outputs_of(scores), scores)
    found = diagnosis.summary()
    low, high = bootstrap(diagnosis, patients, resamples)
    return {
        "n": len(labels),
        "patients": len(set(patients)),
        "metrics": {name: found.pop(name) for name in METRICS}
        | {"calibration_error": calibration(diagnosis.labels, scores)[-1]},
        "intervals": {name: [float(a), float(b)] for name, a, b in zip(METRICS, low, high, strict=True)},
        **found,
    }


def by_record(
    labels: Array, scores: Array, records: Sequence[Any], patients: Sequence[Any]
) -> tuple[Array, Array, Sequence[Any]]:
    """Mean probabilities of each record, in the order of their names."""
    _, first, record_N, halves = np.unique(np.asarray(records), return_index=True, return_inverse=True, return_counts=True)
    sums = np.zeros((len(first), scores.shape[1]))
    np.add.at(sums, record_N, scores)
    return np.asarray(labels)[first], sums / halves[:, None], np.asarray(patients)[first].tolist()


def calibration(labels: Array, scores: Array) -> tuple[Array, Array, Array, float]:
    """Of each tenth of probabilities, over all classes: the mean of those in it, the share that holds, how many there are;
    and the expected calibration error, the mean distance of the two shares, each probability counting once."""
    p, y = scores.ravel().astype(float), labels.ravel()
    bin_of = np.minimum((p * BINS).astype(int), BINS - 1)
    number = np.bincount(bin_of, minlength=BINS)
    said, held = (np.bincount(bin_of, v, BINS) / np.maximum(number, 1) for v in (p, y))
    return said, held, number, float((np.abs(said - held) * number).sum() / len(p))


@dataclass(frozen=True, eq=False)
class Identities:
    gallery_PD: Array
    gallery_ids: Sequence[Any]
    probe_QD: Array
    probe_ids: Sequence[Any]
    facts: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    resamples: int = RESAMPLES

    @cached_property
    def found(self) -> dict[str, Any]:
        return identification(self.gallery_PD, self.gallery_ids, self.probe_QD, self.probe_ids)

    @cached_property
    def interval(self) -> list[float]:
        hits = self.found["hits"]
        span = bootstrap(lambda weight: weight @ hits / weight.sum(), self.probe_ids, self.resamples)
        return [float(end) for end in span]

    @property
    def remarks(self) -> list[str]:
        told, found = list(self.notes), self.found
        if found["n_gallery"] == 1:
            told.append("The gallery holds one entry: accuracy and chance say nothing.")
        elif found["ties"] > 0.5:
            told.append("Most probes are equally similar to several patients: the embeddings have collapsed, or are copies.")
        if found["one_sided"]:
            told.append(f"Probes of patients whom the gallery lacks: {found['one_sided']:,}; they count as misses.")
        return told

    def document(self) -> dict[str, Any]:
        found = self.found
        metrics = {name: found[name] for name in ("accuracy", "top5", "chance", "ties")}
        counts = {"n": found["n_probes"], "gallery": found["n_gallery"], "one_sided": found["one_sided"]}
        own = {"unit": "patient", **counts, "metrics": metrics, "intervals": {"accuracy": self.interval}}
        more = {"classes": {}, "cmc": found["cmc"].tolist(), "score": found["accuracy"], "remarks": self.remarks}
        whole = {"task": "identification", **self.facts, **own, **more}
        return {key: nullable(value) for key, value in whole.items()}


def nullable(value: Any) -> Any:
    """For JSON, which has no NaN."""
    if isinstance(value, dict):
        return {key: nullable(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [nullable(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
