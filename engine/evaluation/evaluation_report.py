"""The HTML report of an evaluation: how good the model is, and where it errs.

    html = build(DiagnosisResult(labels_NK, scores_NK, records, patients, facts))
    html = build(IdentificationResult(gallery_PD, gallery_ids, probe_QD, probe_ids, facts))

`facts`: the model, the data, the role and the leads.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from data_tools.dataset import CLASSES
from engine.evaluation import plots
from engine.evaluation.metrics import Array, outputs_of, unit_vectors
from engine.evaluation.plots import Line, LineStyle
from engine.evaluation.results import DiagnosisResult, IdentificationResult, calibration
from engine.evaluation.run_report import ReportSection, flat, render

CLASSES_SHOWN = 11  # with curves of their own, the most frequent
OTHER_PAIRS = 200_000  # pairs of different patients in the histogram
NAMES = {"challenge": "Challenge score", "auroc": "AUROC", "auprc": "AUPRC", "accuracy": "Accuracy", "f_measure": "F measure"}
COLUMNS = ("auroc", "auprc", "f_measure", "sensitivity", "specificity")


def build(result: DiagnosisResult | IdentificationResult) -> str:
    kind, counts, sections = diagnosis(result) if isinstance(result, DiagnosisResult) else identification(result)
    facts, name = result.facts, str(result.facts.get("model", "model"))
    heading = [counts, *(f"{key} {facts[key]}" for key in ("role", "leads") if key in facts)]
    sections.append(ReportSection("The evaluation", table=list(flat(facts))))
    return render(f"{name}: evaluation", kind, name, heading, sections)


def shown(value: float, percent: bool = False) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.1%}" if percent else f"{value:.3f}"


def interval(ends: list[float], percent: bool = False) -> str:
    return f"{shown(ends[0], percent)} to {shown(ends[1], percent)}" if math.isfinite(ends[0]) else "no interval"


def diagnosis(result: DiagnosisResult) -> tuple[str, str, list[ReportSection]]:
    half, labels = result.half, np.asarray(result.labels_NK, bool)
    note = (
        "One sample is a half of 5 s, as in the paper; a class is predicted where its probability is above 0.5. Small: 95 % "
        "intervals by bootstrap over patients. AUROC, AUPRC and F are means over the classes for which they are defined."
    )
    errors = [
        plots.calibration_chart(*calibration(labels, result.scores_NK)),
        plots.confusion_chart(labels, outputs_of(result.scores_NK), CLASSES),
    ]
    rows: list[Sequence[str]] = [("class", "positives", "predicted", "AUROC", "AUPRC", "F", "sensitivity", "specificity")]
    for name, of in half["classes"].items():
        label = name if of["positives"] else f"{name} (no positives)"
        rows.append((label, f"{of['positives']:,}", f"{of['predicted']:,}", *(shown(of[key]) for key in COLUMNS)))
    sections = [
        ReportSection(tiles=list(scores(half)), note=note, remarks=result.remarks),
        ReportSection("By record: mean probability over its halves", tiles=list(scores(result.record))),
        ReportSection("ROC and precision-recall curves", charts=list(threshold_charts(labels, result.scores_NK)), columns=4),
        ReportSection("Calibration and confusions", charts=errors),
        ReportSection("Classes", grid=rows),
    ]
    return "Diagnosis", f"{half['n']:,} halves of 5 s of {result.record['n']:,} records", sections


def scores(part: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key, name in NAMES.items():
        percent = key == "accuracy"
        yield name, shown(part["metrics"][key], percent), interval(part["intervals"][key], percent)


def threshold_charts(labels: Array, scores: Array) -> Iterator[str]:
    yield plots.roc_and_pr("All classes together", labels.ravel(), scores.ravel())
    positives = labels.sum(0)
    for k in np.argsort(-positives, kind="stable")[:CLASSES_SHOWN].tolist():
        if 0 < positives[k] < len(labels):
            yield plots.roc_and_pr(CLASSES[k], labels[:, k], scores[:, k])


def identification(result: IdentificationResult) -> tuple[str, str, list[ReportSection]]:
    found = result.scores
    tiles = [
        ("Accuracy", shown(found["accuracy"], True), interval(result.interval, True)),
        ("Among the first five", shown(found["top5"], True), "of probes"),
        ("Chance", f"{found['chance']:.2%}", "a random draw from the gallery"),
        ("Ties", shown(found["ties"], True), "of probes have several best matches"),
        ("Not in the gallery", f"{found['one_sided']:,}", "probes, always misses"),
    ]
    note = (
        "A probe is a hit if the gallery entry most similar to it (cosine) is of the same patient; ties count by what a random "
        "draw among them would give. Small: 95 % interval by bootstrap over patients."
    )
    ranks = np.arange(1, len(found["cmc"]) + 1)
    lines = [
        Line("cmc", "patient among the first", ranks, found["cmc"]),
        Line("chance", "by chance", ranks, np.minimum(ranks * found["chance"], 1), 1, dashed=True),
    ]
    style = LineStyle(percent=True, floor=0, smooth=False, x_label="rank")
    groups = [("same patient", found["same"]), ("other patients", other_pairs(result)), ("most similar other", found["other"])]
    similarity = plots.histogram("Similarity to the gallery (cosine)", groups)
    charts = [plots.line_chart("Patient among the most similar", lines, style), similarity]
    counts = f"{found['n_probes']:,} probes against {found['n_gallery']:,} in the gallery"
    sections = [
        ReportSection(tiles=tiles, note=note, remarks=result.remarks),
        ReportSection("Patients recognised", charts=charts),
    ]
    return "Patient identification", counts, sections


def other_pairs(result: IdentificationResult) -> Array:
    """Cosines of random pairs of different patients, with a fixed seed."""
    rng = np.random.default_rng(0)
    p, q = (rng.integers(0, n, OTHER_PAIRS) for n in (len(result.gallery_PD), len(result.probe_QD)))
    differ = np.asarray(result.gallery_ids)[p] != np.asarray(result.probe_ids)[q]
    gallery, probes = (unit_vectors(np.asarray(c, float)) for c in (result.gallery_PD, result.probe_QD))
    blocks = np.array_split(np.stack([p[differ], q[differ]]), 50, axis=1)
    return np.concatenate([np.einsum("nd,nd->n", gallery[p], probes[q]) for p, q in blocks])
