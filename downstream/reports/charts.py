"""Draws the figures of the reports with matplotlib. Each function turns numbers into a picture for
a page.

curves_over_steps("Loss", {"training": (steps, values)})
curves_of_class("AF", label_N, score_N)
agreement_plots("age", value_N, prediction_N, "years")
"""

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator, PercentFormatter
from sklearn.metrics import precision_recall_curve, roc_curve

from ..tasks.metrics import Array, Ranking, calibration_curve
from .page import Picture, to_picture

Line = tuple[Array, Array]
CHART_STYLE: Any = {
    "font.size": 9,
    "text.parse_math": False,
    "axes.prop_cycle": cycler(color=("#2f6690", "#c0641c", "#2a7a4f", "#5b3a72")),
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.bbox": None,
    "svg.fonttype": "none",  # text is stored as text, not as outlines
    "svg.hashsalt": "omnilead",  # without a fixed salt, the ids in a file are random
}
styled = matplotlib.rc_context(CHART_STYLE)  # decorates functions that draw
# dotted lines for chance, equality, the best step, and a mean with its limits
GUIDE_STYLE: Any = {"color": "#75757d", "ls": ":", "lw": 1.2}
MANY_POINTS = 1000  # a line with more points is drawn as an image, so that the page stays small
# 95 % of normally distributed differences lie within this many standard deviations of their mean
LIMITS_SD = 1.96


def figure_and_panels(count: int, size_in: float = 2.4) -> tuple[Figure, Any]:
    figure = Figure((size_in * count, size_in), layout="constrained")
    return figure, figure.subplots(1, count)


@styled
def curves_over_steps(
    title: str,
    lines: Mapping[str, Line],
    percent: bool = False,
    chance: float = np.nan,
    best: float | None = None,
) -> Picture:
    """Draws values over training steps. `lines`: {name: (steps, values)}. `chance`: the value that
    guessing reaches. `best`: the step that is exported."""
    figure = Figure((4.1, 2.6), layout="constrained")
    axes = figure.subplots()
    for (name, (x, y)), style in zip(lines.items(), cycle(("-", "--"))):
        axes.plot(x, y, style, marker=".", ms=3, lw=1, label=name, rasterized=len(x) > MANY_POINTS)
    if np.isfinite(chance):
        axes.axhline(chance, **GUIDE_STYLE, label=f"chance {chance:.3g}")
    if best is not None:
        axes.axvline(best, **GUIDE_STYLE, label=f"best at step {best:,.0f}")
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("step")
    if len(axes.lines) > 1:
        axes.legend(fontsize=8)
    return to_picture(title, figure)


@styled
def curves_of_class(title: str, label_N: Array, score_N: Array) -> Picture:
    """Draws the ROC curve, the precision-recall curve and calibration. Dotted lines are chance or
    perfect calibration."""
    auroc, auprc = Ranking(label_N, score_N).auroc_and_auprc(np.ones((len(label_N), 1)))[:, 0]
    fallout, sensitivity, _ = roc_curve(label_N, score_N, drop_intermediate=False)
    precision, found, _ = precision_recall_curve(label_N, score_N)
    mean, share, _, error = calibration_curve(label_N[:, None], score_N[:, None])
    enough = np.isfinite(share)

    figure, (roc, recall, calibrated) = figure_and_panels(3)
    roc.plot(fallout, sensitivity)
    roc.plot([0, 1], [0, 1], **GUIDE_STYLE)
    roc.set(xlabel="1 - specificity", ylabel="sensitivity", title=f"ROC, area {auroc:.3f}")
    recall.plot(found, precision)
    recall.axhline(label_N.mean(), **GUIDE_STYLE)
    recall.set(xlabel="sensitivity", ylabel="precision (PPV)", title=f"P-R, area {auprc:.3f}")
    calibrated.plot(mean[enough], share[enough], "o-")
    calibrated.plot([0, 1], [0, 1], **GUIDE_STYLE)
    calibrated.set(xlabel="predicted probability", ylabel="observed frequency")
    calibrated.set_title(f"calibration, error {error:.3f}")
    for axes in (roc, recall, calibrated):
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    return to_picture(title, figure)


@styled
def agreement_plots(name: str, value_N: Array, prediction_N: Array, unit: str) -> Picture:
    """Draws predicted against true values, and a Bland-Altman plot with the mean difference and the
    limits of agreement."""
    in_unit = f", {unit}" if unit else ""
    figure, (scatter, bland_altman) = figure_and_panels(2, 3.6)
    scatter.plot(value_N, prediction_N, ".", alpha=0.4, mew=0, rasterized=True)
    scatter.axline((value_N[0], value_N[0]), slope=1, **GUIDE_STYLE)
    scatter.set(xlabel=f"true{in_unit}", ylabel=f"predicted{in_unit}")
    error_N = prediction_N - value_N
    both_N = (value_N + prediction_N) / 2
    bland_altman.plot(both_N, error_N, ".", alpha=0.4, mew=0, rasterized=True)
    mean, reach = error_N.mean(), LIMITS_SD * error_N.std()
    for level in (mean - reach, mean, mean + reach):
        bland_altman.axhline(level, **GUIDE_STYLE)
        edge = bland_altman.get_yaxis_transform()
        bland_altman.text(1.01, level, f"{level:+.3g}", transform=edge, va="center")
    bland_altman.set(xlabel=f"mean of both{in_unit}", ylabel="predicted - true")
    return to_picture(name, figure)


@styled
def share_curves(title: str, xlabel: str, lines: Mapping[str, Line]) -> Picture:
    """Draws curves of a share (of patients or of records) over time or over rank."""
    figure = Figure((6.4, 3.2), layout="constrained")
    axes: Axes = figure.subplots()
    for name, (x, y) in lines.items():
        axes.plot(x, y, label=name)
    axes.set(xlabel=xlabel, ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(fontsize=8)
    return to_picture(title, figure)
