"""The HTML report of an evaluation: how good the model is, and where it is wrong.

    html = report_page(TaskResult(labels_NK, scores_NK, records, patients, facts), dataset)      # of any kind but identity
    html = report_page(IdentificationResult(gallery_PD, gallery_ids, probe_QD, probe_ids, facts))

`facts`: the model, the data, the role and the leads. `dataset`: used to draw the ECGs with the
largest errors.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

import omnilead.data_tools.ecg.paper as paper
from omnilead.engine.data.datasets import Datasets
from omnilead.engine.settings.errors import Facts
from omnilead.engine.settings.metrics import METRIC_OF

from ..evaluation.identification import IdentificationResult
from ..evaluation.results import TaskResult, nan_to_none, scored_windows_text, sentence_to_report
from ..inference.trained_model import HeadInfo
from ..tasks.kinds import KINDS
from ..tasks.metrics import TOO_FEW_NOTE, Array, kaplan_meier_curve, predict_classes
from . import charts
from .page import Picture, metric_title, number_text, readable_items, render_page, to_picture

MAX_CLASSES_DRAWN = 6  # counts and curves are of at most this many classes, the most frequent
WORST_ECGS = 12  # at most this many ECGs are drawn, those with the largest errors
NO_INTERVAL = "no interval"
NO_INTERVAL_NOTE = f"{TOO_FEW_NOTE} have no interval, nor has a score on which all resamples agree."
COUNT_TITLES = {
    "positives": "Positives",
    "predicted": "Predicted",
    "n": "Known",
    "threshold": "Threshold",
}
Table = list[list[str]]


def report_page(
    result: TaskResult | IdentificationResult, data: Datasets | None = None, halves: bool = False
) -> str:
    """Returns the HTML report of an evaluation. `halves`: if True, it also lists the scores of single
    windows."""
    content = (
        task_page_content(result, data, halves)
        if isinstance(result, TaskResult)
        else identification_page_content(result)
    )
    facts, name = result.facts, str(result.facts.get("model", "model"))
    heading = [
        content.pop("counts"),
        *(f"{key} {facts[key]}" for key in ("role", "leads") if key in facts),
    ]
    return render_page(
        "evaluation.html",
        title=f"{name}: evaluation",
        name=name,
        heading=heading,
        remarks=result.remarks,
        evaluation=list(readable_items(facts)),
        **content,
    )


def interval_text(ends: Sequence[float], percent: bool = False) -> str:
    if not math.isfinite(ends[0]):
        return NO_INTERVAL
    return f"{number_text(ends[0], percent)} to {number_text(ends[1], percent)}"


def task_page_content(result: TaskResult, data: Datasets | None, halves: bool) -> dict[str, Any]:
    half, record, head = result.half_scores, result.record_scores, result.head
    windows, sentence = (
        scored_windows_text(result.facts),
        sentence_to_report(nan_to_none({"record": record})),
    )
    y_NK, scores_NK, _ = result.record_labels_scores_patients()
    y_NK = np.asarray(y_NK, float)
    by = "By class" if KINDS[head.kind].has_classes else "By column"
    tables = {}
    if len(record["classes"]) > 1:
        tables[by] = class_table(record["classes"])
    for name, groups in result.group_scores.items():
        if len(groups) < 2:  # the scores of a single group would repeat those of all records
            continue
        tables[f"By {name}"] = group_table(name, groups, next(iter(record["intervals"])))
    without = any(NO_INTERVAL in row for table in tables.values() for row in table)
    content_of_kind = {"regression": agreement_content, "survival": survival_content}.get(
        head.kind, decision_content
    )
    worst = []
    if data is not None and result.crops_N is not None and head.kind != "survival":
        worst = [draw_ecg(result, data, row) for row in result.worst_rows(WORST_ECGS)]
    return {
        "kind": f"{head.task}, {head.kind}",
        "counts": f"{record['n']:,} records",
        "scores": score_table(record, half if halves else None, windows),
        "scores_note": f"{sentence[0].upper()}{sentence[1:]}. "
        + scoring_note(head, windows, result.resampling_unit),
        "worst": worst,
        "tables": tables,
        "tables_note": NO_INTERVAL_NOTE if without else "",
        **content_of_kind(head, y_NK, scores_NK),
    }


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
        note += (
            "A class is predicted where its probability is above its threshold; PPV and NPV hold where it "
            "is as frequent as here. "
        )
    if head.kind == "multilabel":
        note += "Accuracy: the share of which all labels are right. "
    return note + (
        "AUROC and other figures of classes are means over the classes for which they are defined; "
        "unknown labels are ignored."
    )


def score_table(record: Facts, half: Facts | None, windows: str) -> Table:
    table = [["", "Records", "95 % interval"]]
    if half:
        table[0] += [windows.capitalize(), "95 % interval"]
    for key in record["intervals"]:
        percent = METRIC_OF[key].percent
        row = [metric_title(key)]
        for part in (record, half) if half else (record,):
            row.append(number_text(part["metrics"][key], percent))
            row.append(interval_text(part["intervals"][key], percent))
        table.append(row)
    return table


def class_table(classes: Mapping[str, Facts]) -> Table:
    columns = [key for key in (*COUNT_TITLES, *METRIC_OF) if key in next(iter(classes.values()))]
    table = [["", *(COUNT_TITLES.get(key) or metric_title(key) for key in columns)]]
    for name, figures in classes.items():
        row = [f"{name} (no positives)" if figures.get("positives") == 0 else name]
        for key in columns:
            figure = figures[key]
            row.append(f"{figure:,}" if isinstance(figure, int) else number_text(figure))
        table.append(row)
    return table


def group_table(name: str, groups: Mapping[str, Facts], score: str) -> Table:
    """Returns a table with the score of each group, and the number of positives of its rarest and
    of its most frequent class."""
    table = [
        [
            name.capitalize(),
            "Records",
            "Patients",
            "Positives",
            metric_title(score),
            "95 % interval",
        ]
    ]
    for value, group in groups.items():
        counts, positives = sorted(group.get("positives", {}).values()), "-"
        if counts:
            positives = " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1])))
        row = [value, f"{group['n']:,}", f"{group['patients']:,}", positives]
        table.append(
            [*row, number_text(group["metrics"][score]), interval_text(group["intervals"][score])]
        )
    return table


def decision_content(head: HeadInfo, y_NK: Array, scores_NK: Array) -> dict[str, Any]:
    """Returns counts of records at the operating points of the model, and curves of the most
    frequent classes."""
    frequent = np.argsort(-(y_NK == 1).sum(0), kind="stable")[:MAX_CLASSES_DRAWN].tolist()
    of_which = ""
    if len(head.classes) > MAX_CLASSES_DRAWN:
        of_which = f" of the {MAX_CLASSES_DRAWN} most frequent classes"
    curves: list[Picture] = []
    tables: dict[str, list[Table]] = {}
    for k in frequent:
        is_known = ~np.isnan(y_NK[:, k])
        label_N, score_N = y_NK[is_known, k] == 1, scores_NK[is_known, k]
        if 0 < label_N.sum() < len(label_N):
            title = f"{head.classes[k]}: {label_N.sum():,} of {len(label_N):,}"
            curves.append(charts.curves_of_class(title, label_N, score_N))
    if head.kind == "multiclass":
        tables["Predicted classes"] = [confusion_table(head, y_NK, scores_NK)]
    for point, thresholds in operating_points(head).items():
        for k in frequent:
            name = head.classes[k]
            if name in thresholds:
                table = two_by_two_table(name, thresholds[name], y_NK[:, k], scores_NK[:, k])
                title = f"Records at the model's {point}{of_which}"
                tables.setdefault(title, []).append(table)
    return {"decisions": tables, "curves_title": f"Curves{of_which}", "curves": curves}


def operating_points(head: HeadInfo) -> dict[str, dict[str, float]]:
    """Returns {name of an operating point: {class: the score above which it is predicted}}."""
    points = {}
    if head.thresholds:
        points["threshold"] = dict(zip(head.classes, head.thresholds, strict=True))
    if cross_validated := head.cross_validated:
        lowest = {name: score for name, (score, _) in cross_validated.sensitive.items()}
        point = "score with 95 % sensitivity in cross-validation"
        points[point] = {name: float(np.nextafter(score, 0)) for name, score in lowest.items()}
    return points


def two_by_two_table(name: str, threshold: float, y_N: Array, score_N: Array) -> Table:
    above_N = score_N > threshold  # rows with an unknown label are in none of the four counts
    true_positive, false_negative = int(above_N[y_N == 1].sum()), int((~above_N[y_N == 1]).sum())
    false_positive, true_negative = int(above_N[y_N == 0].sum()), int((~above_N[y_N == 0]).sum())
    ppv = share_text(true_positive, false_positive)
    npv = share_text(true_negative, false_negative)
    sensitivity = share_text(true_positive, false_negative)
    specificity = share_text(true_negative, false_positive)
    return [
        [name, "labelled yes", "labelled no", ""],
        [f"above {threshold:.3g}", f"{true_positive:,}", f"{false_positive:,}", f"PPV {ppv}"],
        ["not above", f"{false_negative:,}", f"{true_negative:,}", f"NPV {npv}"],
        ["", f"sensitivity {sensitivity}", f"specificity {specificity}", ""],
    ]


def share_text(part: int, rest: int) -> str:
    return f"{part / (part + rest):.1%}" if part + rest else "-"


def confusion_table(head: HeadInfo, y_NK: Array, scores_NK: Array) -> Table:
    """Returns a table of how many records of each class (row) were predicted as each class
    (column)."""
    is_known = ~np.isnan(y_NK).any(1)
    counts_KK = (y_NK[is_known] == 1).T.astype(int) @ predict_classes(
        "multiclass", scores_NK[is_known]
    )
    table = [["true, predicted", *head.classes]]
    for name, counts in zip(head.classes, counts_KK, strict=True):
        table.append([name, *(f"{count:,}" for count in counts)])
    return table


def agreement_content(head: HeadInfo, y_NK: Array, scores_NK: Array) -> dict[str, Any]:
    curves = []
    for k, name in enumerate(head.classes):
        is_known = np.isfinite(y_NK[:, k])
        if is_known.any():
            predictions = scores_NK[is_known, k].astype(float)
            curves.append(charts.agreement_plots(name, y_NK[is_known, k], predictions, head.unit))
    return {"decisions": {}, "curves_title": "Predicted and true values", "curves": curves}


def survival_content(head: HeadInfo, y_NK: Array, scores_NK: Array) -> dict[str, Any]:
    """Returns Kaplan-Meier curves of the records in thirds of the predicted risk, and a table of
    how many records are at risk over time."""
    is_known = ~np.isnan(y_NK[:, 0])
    y_N, risk_N = y_NK[is_known, 0], scores_NK[is_known, 0]
    third_N = np.searchsorted(np.quantile(risk_N, (1 / 3, 2 / 3)), risk_N)
    unit = head.unit or "time"
    ticks = MaxNLocator(7).tick_values(0, np.abs(y_N).max())[:-1]
    table, lines = [[f"at risk, {unit}", *map("{:.3g}".format, ticks)]], {}
    for third, name in enumerate(("lowest risks", "middle", "highest risks")):
        y_G = y_N[third_N == third]
        if len(y_G):  # a third may be empty if risks are equal
            lines[name] = kaplan_meier_curve(y_G)
            table.append([name, *(f"{(np.abs(y_G) >= tick).sum():,}" for tick in ticks)])
    curve = charts.share_curves("Without the event, by thirds of the risk", unit, lines)
    return {
        "decisions": {"Kaplan-Meier curves": [table]},
        "curves_title": "",
        "curves": [curve],
    }


def draw_ecg(result: TaskResult, data: Datasets, row: int) -> Picture:
    assert result.crops_N is not None
    crop = data[int(result.crops_N[row])]
    groups = [str(values[row]) for name, values in result.groups_N.items() if name != "source"]
    figure = paper.ecg_figure(crop.signal_uv, crop.halves, missing=crop.missing_leads)
    for text in (*figure.texts, *figure.axes[0].texts):
        # a large font, because two ECGs stand side by side, each shrunk to half its size
        text.set_fontsize(13)
    record_text = ", ".join([str(result.records_N[row]), *groups])
    title = f"{record_text}: {largest_error_text(result, row)}"
    return to_picture(title, figure, "webp", dpi=90, pil_kwargs={"lossless": True})


def largest_error_text(result: TaskResult, row: int) -> str:
    """Returns the label and the prediction of an ECG as a text, for the output with the largest error
    or, in multiclass, for the labelled and the predicted class."""
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


def identification_page_content(result: IdentificationResult) -> dict[str, Any]:
    scores, random = result.scores, result.untrained
    table = [["", "", "95 % interval"]]
    table.append(
        [
            "Accuracy",
            number_text(scores["accuracy"], True),
            interval_text(result.accuracy_interval, True),
        ]
    )
    if random:
        ends = interval_text(random.accuracy_interval, True)
        table.append(
            ["Accuracy of random weights", number_text(random.scores["accuracy"], True), ends]
        )
    table += [
        ["Accuracy by chance", f"{scores['chance']:.2%}", ""],
        ["Patient among the first five", number_text(scores["top5"], True), ""],
        ["Probes with several best matches", number_text(scores["ties"], True), ""],
        ["Probes of patients not in the gallery", f"{scores['one_sided']:,}", ""],
    ]
    note = (
        "A probe is a hit if the gallery entry most similar to it (cosine) is of the same patient; a tie "
        "counts as the expected result of a random draw among its entries, a patient who is not in the "
        "gallery as a miss. 95 % intervals by resampling patients."
    )
    ranks = np.arange(1, len(scores["cmc"]) + 1)
    lines = {"the model": (ranks, scores["cmc"])}
    if random:
        lines["random weights"] = ranks, random.scores["cmc"]
    lines["by chance"] = ranks, np.minimum(ranks * scores["chance"], 1)
    return {
        "kind": "Patient identification",
        "counts": f"{scores['n_probes']:,} probes against {scores['n_gallery']:,} in the gallery",
        "scores": table,
        "scores_note": note,
        "decisions": {},
        "tables": {},
        "tables_note": "",
        "worst": [],
        "curves_title": "Patients recognised",
        "curves": [charts.share_curves("Patient among the most similar", "rank", lines)],
    }
