"""An evaluation -> one HTML page that shows how good the model is, and where it errs, with nothing to load from elsewhere.

    report(DiagnosisResult(labels_NK, scores_NK, records, patients, facts), Path("report.html"))
    report(IdentificationResult(gallery_PD, gallery_ids, probe_QD, probe_ids, facts), Path("report.html"))

`facts` is what stands under the title and at the end: the model, the data, the role, the leads.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.dataset import CLASSES
from engine.common import write_whole
from engine.evaluation import charts, page, squares
from engine.evaluation.charts import Line, Look
from engine.evaluation.metrics import Array, outputs_of
from engine.evaluation.results import DiagnosisResult, IdentificationResult, calibration
from engine.evaluation.run_report import flat

SHOWN = 11  # classes with curves of their own, the most frequent
OTHERS = 200_000  # pairs of different patients in the histogram
NAMES = {"challenge": "Challenge score", "auroc": "AUROC", "auprc": "AUPRC", "accuracy": "Accuracy", "f_measure": "F measure"}
PERCENT = ("accuracy",)
HEAD = ("class", "positives", "said", "AUROC", "AUPRC", "F", "sensitivity", "specificity")


def write_report(evaluation: DiagnosisResult | IdentificationResult, out: Path) -> Path:
    """All of the page or nothing."""
    write_whole(out, build(evaluation))
    return out


def build(evaluation: DiagnosisResult | IdentificationResult) -> str:
    parts = diagnosis_parts(evaluation) if isinstance(evaluation, DiagnosisResult) else identification_parts(evaluation)
    about = page.part("The evaluation", page.table([(key, value) for key, value in flat(evaluation.facts)]))
    title = str(evaluation.facts.get("model", "model"))
    return page.page(f"{title}: evaluation", [*parts, about if evaluation.facts else ""])


def _heading(kind: str, facts: Mapping[str, Any], counts: list[str]) -> str:
    told = [f"{name} {facts[name]}" for name in ("role", "leads") if name in facts]
    return page.header(kind, str(facts.get("model", "model")), counts + told)


def number(value: float, percent: bool = False) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.1%}" if percent else f"{value:.3f}"


def between(span: list[float], percent: bool = False) -> str:
    return f"{number(span[0], percent)} to {number(span[1], percent)}" if math.isfinite(span[0]) else "no interval"


# Diagnosis


def diagnosis_parts(told: DiagnosisResult) -> Iterator[str]:
    half = told.half
    yield _heading("Diagnosis", told.facts, [f"{half['n']:,} halves of 5 s of {told.record['n']:,} records"])
    yield page.tiles(tiles_of(half))
    yield page.small(
        "One sample is a half of 5 s, as in the paper; a class is said to hold where its probability is above 0.5. "
        "Small: 95 % intervals, patients drawn anew. AUROC, AUPRC and F are means over the classes that have them."
    )
    yield page.remarks(told.remarks)
    yield page.part("By record: the mean probability over its halves", page.tiles(tiles_of(told.record)))
    yield page.section("As the threshold falls", [(chart, False) for chart in threshold_charts(told)], columns=4)
    outputs = outputs_of(told.scores_NK)
    labels = np.asarray(told.labels_NK, bool)
    cards = [
        (squares.reliability(*calibration(labels, told.scores_NK)), False),
        (squares.confusions(labels, outputs, CLASSES), True),
    ]
    yield page.section("What it says", cards)
    yield page.part("Classes", class_table(half["classes"]))


def tiles_of(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key, name in NAMES.items():
        percent = key in PERCENT
        yield name, number(result["metrics"][key], percent), between(result["intervals"][key], percent)


def threshold_charts(told: DiagnosisResult) -> Iterator[str]:
    labels, scores = np.asarray(told.labels_NK, bool), np.asarray(told.scores_NK)
    yield squares.trade_offs("All classes together", labels.ravel(), scores.ravel())
    positives = labels.sum(0)
    for k in np.argsort(-positives, kind="stable")[:SHOWN].tolist():
        if 0 < positives[k] < len(labels):
            yield squares.trade_offs(CLASSES[k], labels[:, k], scores[:, k])


def class_table(classes: Mapping[str, Mapping[str, float]]) -> str:
    rows, dim = [], []
    for name, of in classes.items():
        dim.append(not of["positives"])
        figures = [number(of[key]) for key in ("auroc", "auprc", "f_measure", "sensitivity", "specificity")]
        rows.append([name + " (no positives)" * dim[-1], f"{of['positives']:,}", f"{of['predicted']:,}", *figures])
    return page.grid(HEAD, rows, dim)


# Identification


def identification_parts(told: IdentificationResult) -> Iterator[str]:
    found = told.scores
    counts = [f"{found['n_probes']:,} probes against {found['n_gallery']:,} in the gallery"]
    yield _heading("Patient identification", told.facts, counts)
    yield page.tiles(
        [
            ("Accuracy", number(found["accuracy"], True), between(told.interval, True)),
            ("Among the first five", number(found["top5"], True), "of probes"),
            ("Chance", f"{found['chance']:.2%}", "a draw from the gallery"),
            ("Ties", number(found["ties"], True), "of probes have several best"),
            ("Without gallery entry", f"{found['one_sided']:,}", "probes, never hits"),
        ]
    )
    yield page.small(
        "A probe is a hit if the gallery entry most similar to it (cosine) is of the same patient; entries as similar count "
        "by what a draw among them would give. Small: 95 % interval, patients drawn anew."
    )
    yield page.remarks(told.remarks)
    yield page.section("Patients known again", [(rank_curve(found), False), (similarities(told), True)])


def rank_curve(found: Mapping[str, Any]) -> str:
    cmc = found["cmc"]
    ranks = np.arange(1, len(cmc) + 1)
    lines = [
        Line("cmc", "patient among the first", ranks, cmc),
        Line("chance", "by chance", ranks, np.minimum(ranks * found["chance"], 1), 1, dashed=True),
    ]
    look = Look(percent=True, floor=0, smooth=False, across="rank")
    return charts.line_chart("Patient among the most similar", lines, look)


def similarities(told: IdentificationResult) -> str:
    groups = [
        ("same patient", told.scores["same"]),
        ("other patients", other_pairs(told)),
        ("most similar other", told.scores["other"]),
    ]
    return charts.histogram("Similarity to the gallery (cosine)", groups)


def other_pairs(told: IdentificationResult) -> Array:
    """Cosines of pairs of different patients, drawn with a fixed seed."""
    rng = np.random.default_rng(0)
    p, q = (rng.integers(0, n, OTHERS) for n in (len(told.gallery_PD), len(told.probe_QD)))
    differ = np.asarray(told.gallery_ids)[p] != np.asarray(told.probe_ids)[q]
    p, q = p[differ], q[differ]
    gallery, probes = (
        np.asarray(v, float) / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-300)
        for v in (told.gallery_PD, told.probe_QD)
    )
    parts = [np.einsum("nd,nd->n", gallery[p[at : at + 4096]], probes[q[at : at + 4096]]) for at in range(0, len(p), 4096)]
    return np.concatenate(parts) if parts else np.zeros(0)
