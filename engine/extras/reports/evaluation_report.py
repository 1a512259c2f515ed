"""The HTML report of an evaluation: how good the model is, and where it is wrong.

    html = build(TaskResult(labels_NK, scores_NK, records, patients, facts), dataset)      # of any kind but identity
    html = build(IdentificationResult(gallery_PD, gallery_ids, probe_QD, probe_ids, facts))

`facts`: the model, the data, the role and the leads. `dataset`: used to draw the ECGs with the
largest errors.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

import omnilead.data_tools.extras.plots as plots
from omnilead.data_tools.dataset import Dataset

from ...evaluation.identification import IdentificationResult
from ...evaluation.results import TaskResult, pieces
from ...inference.trained_model import HeadInfo
from ...settings.errors import Facts
from ...settings.metrics import METRIC_OF
from ...tasks.kinds import KINDS
from ...training.metrics import TOO_FEW, Array, calibration, kaplan_meier, predicted, unit_vectors
from . import charts
from .page import Picture, ReportSection, picture, readable, render, shown, titled

CLASSES_SHOWN = 11  # the most frequent classes, which have curves of their own
CONFUSED = 30  # classes in the confusion chart, the most frequent
WORST = 12  # ECGs drawn
NO_INTERVAL = "no interval"
OTHER_PAIRS = 200_000  # pairs of different patients in the histogram
COUNTS = {
    "positives": "Positives",
    "predicted": "Predicted",
    "n": "Known",
    "threshold": "Threshold",
}


def build(result: TaskResult | IdentificationResult, dataset: Dataset | None = None) -> str:
    if isinstance(result, TaskResult):
        kind, counts, sections = scored(result, dataset)
    else:
        kind, counts, sections = identification(result)
    facts, name = result.facts, str(result.facts.get("model", "model"))
    heading = [counts, *(f"{key} {facts[key]}" for key in ("role", "leads") if key in facts)]
    sections.append(ReportSection("The evaluation", facts=list(readable(facts))))
    return render(f"{name}: evaluation", kind, name, heading, sections)


def interval(ends: list[float], percent: bool = False) -> str:
    if not math.isfinite(ends[0]):
        return NO_INTERVAL
    return f"{shown(ends[0], percent)} to {shown(ends[1], percent)}"


def scored(result: TaskResult, dataset: Dataset | None) -> tuple[str, str, list[ReportSection]]:
    half, record, head = result.half, result.record, result.head
    windows = pieces(result.facts)
    y_NK, scores_NK, _ = result.of_records()
    figures = {"regression": agreement, "survival": survival}.get(head.kind, decisions)
    note = scoring_note(head, windows, result.units)
    by = "By class" if KINDS[head.kind].of_classes else "By column"
    sections = [
        ReportSection("Scores", table=score_table(record, half, windows), note=note),
        ReportSection(remarks=result.remarks),
        *figures(head, np.asarray(y_NK, float), scores_NK),
        ReportSection(by, table=class_table(record["classes"])),
    ]
    for name, groups in result.groups.items():
        sections.append(group_section(name, groups, list(record["intervals"]), len(head.classes)))
    if dataset is not None and result.crops_N is not None and head.kind != "survival":
        ecgs = [ecg(result, dataset, row) for row in result.worst(WORST)]
        title = f"The {len(ecgs)} records with the largest errors"
        sections.append(ReportSection(title, pictures=ecgs))
    counts = f"{record['n']:,} records, {half['n']:,} {windows}"
    return f"{head.task}, {head.kind}", counts, sections


def scoring_note(head: HeadInfo, windows: str, units: str) -> str:
    note = f"Of a record: the mean over its {windows}. 95 % bootstrap intervals over {units}. "
    if head.kind == "regression":
        return f"{note}In {head.unit or 'its own unit'}."
    if head.kind == "survival":
        return (
            f"{note}C-index: of the pairs of records in which one is known to have had the event "
            "first, the share in which its risk is higher; 0.5 by chance. Positives had the event."
        )
    if head.kind == "multiclass":
        note += "The most probable class is predicted. "
    else:
        note += "A class is predicted where its probability is above its threshold. "
    if head.kind == "multilabel":
        note += "Accuracy: the share of which all labels are right. "
    return note + (
        "AUROC and other figures of classes are means over the classes for which they are defined; "
        "unknown labels are ignored."
    )


def score_table(record: Facts, half: Facts, windows: str) -> list[list[str]]:
    table = [["", "Records", "95 % interval", windows.capitalize(), "95 % interval"]]
    for key in record["intervals"]:
        percent = METRIC_OF[key].percent
        row = [titled(key)]
        for part in (record, half):
            row.append(shown(part["metrics"][key], percent))
            row.append(interval(part["intervals"][key], percent))
        table.append(row)
    return table


def class_table(classes: Mapping[str, Facts]) -> list[list[str]]:
    columns = [key for key in (*COUNTS, *METRIC_OF) if key in next(iter(classes.values()))]
    table = [["Class", *(COUNTS.get(key) or titled(key) for key in columns)]]
    for name, figures in classes.items():
        row = [f"{name} (no positives)" if figures.get("positives") == 0 else name]
        for key in columns:
            figure = figures[key]
            row.append(f"{figure:,}" if isinstance(figure, int) else shown(figure))
        table.append(row)
    return table


def group_section(
    name: str, groups: Mapping[str, Facts], metrics: Sequence[str], classes: int
) -> ReportSection:
    first, *others = metrics
    counted = any("positives" in group for group in groups.values())
    head = [name.capitalize(), "Records", "Patients"]
    if counted:
        head.append("Positives")
    table = [[*head, titled(first), "95 % interval", *map(titled, others)]]
    for value, group in groups.items():
        row = [value, f"{group['n']:,}", f"{group['patients']:,}"]
        if "positives" in group:
            counts = group["positives"].values()  # of the rarest and the most frequent class
            row.append(" to ".join(f"{n:,}" for n in sorted({min(counts), max(counts)})))
        row += [shown(group["metrics"][first]), interval(group["intervals"][first])]
        table.append(row + [shown(group["metrics"][key]) for key in others])
    notes = []
    if classes > 1 and counted:
        notes.append("Positives: of the rarest and of the most frequent class.")
    if any(NO_INTERVAL in row for row in table):
        notes.append(f"{TOO_FEW} have no interval, nor has a score on which all resamples agree.")
    return ReportSection(f"Records by {name}", table=table, note=" ".join(notes))


def decisions(head: HeadInfo, y: Array, scores: Array) -> Iterator[ReportSection]:
    """Curves, calibration and confusions."""
    names = list(head.classes)
    curves = list(threshold_curves(y, scores, names))
    yield ReportSection("ROC and precision-recall curves", pictures=curves)
    labels, outputs = y == 1, predicted(head.kind, scores, head.thresholds) & ~np.isnan(y)
    frequent = np.sort(most_frequent(y)[:CONFUSED])
    title = "Calibration and confusions"
    if len(names) > CONFUSED:
        title += f" of the {CONFUSED} most frequent classes"
    if len(names) == 1:  # no and yes as two classes
        known = ~np.isnan(y[:, 0])
        labels, outputs = np.hstack([~labels, labels])[known], np.hstack([~outputs, outputs])[known]
        names, frequent = [f"not {names[0]}", names[0]], np.arange(2)
    labels, outputs = labels[:, frequent], outputs[:, frequent]
    confusions = charts.confusion_matrix(labels, outputs, [names[k] for k in frequent])
    calibrated = charts.calibration_curve(*calibration(y, scores))
    yield ReportSection(title, pictures=[calibrated, confusions])


def most_frequent(y: Array) -> Array:
    return np.argsort(-(y == 1).sum(0), kind="stable")


def threshold_curves(y: Array, scores: Array, names: Sequence[str]) -> Iterator[Picture]:
    known = ~np.isnan(y)
    if len(names) > 1:
        yield charts.roc_and_precision_recall("All classes", y[known] == 1, scores[known])
    for k in most_frequent(y)[:CLASSES_SHOWN].tolist():
        label_N, score_N = y[known[:, k], k] == 1, scores[known[:, k], k]
        if 0 < label_N.sum() < len(label_N):
            yield charts.roc_and_precision_recall(names[k], label_N, score_N)


def agreement(head: HeadInfo, y: Array, scores: Array) -> Iterator[ReportSection]:
    """Predictions against true values, by column."""
    for k, name in enumerate(head.classes):
        known = np.isfinite(y[:, k])
        if known.any():
            values, predictions = y[known, k], scores[known, k].astype(float)
            scatter = charts.predicted_against_true(name, values, predictions, head.unit)
            differences = charts.bland_altman(values, predictions, head.unit)
            yield ReportSection(f"Predicted {name}", pictures=[scatter, differences])


def survival(head: HeadInfo, y: Array, scores: Array) -> Iterator[ReportSection]:
    """Kaplan-Meier curves of the records in thirds of the predicted risk."""
    known = ~np.isnan(y[:, 0])
    y_N, risk_N = y[known, 0], scores[known, 0]
    third_N = np.searchsorted(np.quantile(risk_N, (1 / 3, 2 / 3)), risk_N)
    unit = head.unit or "time"
    ticks = MaxNLocator(7).tick_values(0, np.abs(y_N).max())[:-1]
    table = [[f"At risk, {unit}", *map("{:.3g}".format, ticks)]]
    curves = []
    for third, name in enumerate(("lowest risks", "middle", "highest risks")):
        y_G = y_N[third_N == third]
        if not len(y_G):  # equal risks
            continue
        curves.append(charts.Curve(name, *kaplan_meier(y_G)))
        table.append([name, *(f"{(np.abs(y_G) >= tick).sum():,}" for tick in ticks)])
    kept = charts.kaplan_meier_curves(curves, unit)
    yield ReportSection("Kaplan-Meier curves", pictures=[kept], table=table)


def ecg(result: TaskResult, dataset: Dataset, row: int) -> Picture:
    assert result.crops_N is not None
    crop = dataset[int(result.crops_N[row])]
    groups = [str(values[row]) for name, values in result.groups_N.items() if name != "source"]
    figure = plots.ecg_figure(crop.signal_uv, crop.halves, missing=crop.missing_leads)
    for text in (*figure.texts, *figure.axes[0].texts):
        text.set_fontsize(13)  # two ECGs beside each other, at half their size on paper
    who = ", ".join([str(result.records_N[row]), *groups])
    return picture(
        f"{who}: {reading(result, row)}", figure, "webp", dpi=90, pil_kwargs={"lossless": True}
    )


def reading(result: TaskResult, row: int) -> str:
    """The largest error, in words."""
    head, names = result.head, result.head.classes
    y_K, score_K = np.asarray(result.labels_NK, float)[row], result.scores_NK[row]
    if head.kind == "multiclass":
        true, best = int(np.nanargmax(y_K)), int(score_K.argmax())
        return (
            f"labelled {names[true]} ({score_K[true]:.3f}), predicted {names[best]} "
            f"({score_K[best]:.3f})"
        )
    k = int(result.errors_NK[row].argmax())
    if head.kind == "regression":
        return f"{names[k]} {y_K[k]:.4g}, predicted {score_K[k]:.4g} {head.unit}"
    return f"{names[k]}: labelled {'yes' if y_K[k] else 'no'}, probability {score_K[k]:.3f}"


def identification(result: IdentificationResult) -> tuple[str, str, list[ReportSection]]:
    scores = result.scores
    tiles = [
        ("Accuracy", shown(scores["accuracy"], True), interval(result.interval, True)),
        ("Among the first five", shown(scores["top5"], True), "of probes"),
        ("Chance", f"{scores['chance']:.2%}", "a random draw from the gallery"),
        ("Ties", shown(scores["ties"], True), "of probes have several best matches"),
        ("Not in the gallery", f"{scores['one_sided']:,}", "probes, counted as misses"),
    ]
    note = (
        "A probe is a hit if the gallery entry most similar to it (cosine) is of the same patient; a "
        "tie counts as the expected result of a random draw among its entries. Small: 95 % bootstrap "
        "interval over patients."
    )
    if result.untrained:
        share, ends = result.untrained.scores["accuracy"], interval(result.untrained.interval, True)
        tiles.insert(1, ("Random weights", shown(share, True), ends))
        note += " Random weights: those of the same architecture, on the same pairs."
    ranks = np.arange(1, len(scores["cmc"]) + 1)
    shares = {
        "patient among the first": scores["cmc"],
        "by chance": np.minimum(ranks * scores["chance"], 1),
    }
    if result.untrained:
        shares["random weights"] = result.untrained.scores["cmc"]
    cosines = {
        "same patient": scores["same"],
        "other patients": other_pairs(result),
        "most similar other": scores["other"],
    }
    pictures = [charts.rank_curves(shares), charts.similarity_histogram(cosines)]
    counts = f"{scores['n_probes']:,} probes against {scores['n_gallery']:,} in the gallery"
    sections = [
        ReportSection(tiles=tiles, note=note, remarks=result.remarks),
        ReportSection("Patients recognised", pictures=pictures),
    ]
    return "Patient identification", counts, sections


def other_pairs(result: IdentificationResult) -> Array:
    """Cosines of random pairs of different patients, with a fixed seed."""
    rng = np.random.default_rng(0)
    p = rng.integers(0, len(result.gallery_PD), OTHER_PAIRS)
    q = rng.integers(0, len(result.probe_QD), OTHER_PAIRS)
    differ = np.asarray(result.gallery_ids)[p] != np.asarray(result.probe_ids)[q]
    gallery = unit_vectors(np.asarray(result.gallery_PD, float))
    probes = unit_vectors(np.asarray(result.probe_QD, float))
    blocks = np.array_split(np.stack([p[differ], q[differ]]), 50, axis=1)
    return np.concatenate([np.einsum("nd,nd->n", gallery[p], probes[q]) for p, q in blocks])
