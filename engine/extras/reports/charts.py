"""The figures of the reports, drawn with matplotlib: numbers in, a picture for the page out.

curves_over_steps("Loss", [Curve("training", steps, values)])
roc_and_precision_recall("AF", label_N, score_N)
bland_altman(value_N, prediction_N, "years")
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ...training.metrics import FEW as FEW_RECORDS
from ...training.metrics import Array, Ranking, confusion_shares, ranked
from .page import Picture, picture

BLUE, BROWN, GREY = "#2f6690", "#c0641c", "#75757d"
COLOURS = (BLUE, BROWN, "#2a7a4f", "#5b3a72")
WRONG = "#c0392b"  # values that are not finite
STYLE: Any = {
    "font.size": 9,
    "text.parse_math": False,
    "text.color": "#14141c",
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "xtick.labelcolor": GREY,
    "ytick.labelcolor": GREY,
    "grid.color": "#ececf0",
    "legend.fontsize": 8,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.bbox": None,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "omnilead",  # without one, ids are random
}
styled = matplotlib.rc_context(STYLE)  # a decorator
GUIDE: Any = {"color": GREY, "ls": ":", "lw": 1.2}  # chance, means, equality
SIZE_IN = (4.1, 2.6)  # three beside each other
SMOOTHED_FROM = 120  # points; of more, the medians of as many stretches are drawn over them
LONGEST, FEW = 18, 12  # characters of a class name; classes whose small shares are written, too
SPREAD = 1.96  # standard deviations: 95 % of normally distributed differences


class Curve(NamedTuple):
    label: str
    x: Array
    y: Array  # NaN or infinite where there is no number
    dashed: bool = False


def figure_and_axes(size: tuple[float, float] = SIZE_IN) -> tuple[Figure, Axes]:
    figure = Figure(size, layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    return figure, axes


def legend_above(axes: Axes) -> None:
    place: Any = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1), "ncols": 3}
    axes.legend(**place, borderpad=0.2, columnspacing=1, handlelength=1.4, handletextpad=0.5)


@styled
def curves_over_steps(
    title: str,
    curves: Sequence[Curve],
    *,
    percent: bool = False,
    log: bool = False,
    from_zero: bool = False,
    chance: float = np.nan,
    best: float | None = None,
) -> Picture:
    """`chance`: the value of guessing; `best`: the step that is exported."""
    figure, axes = figure_and_axes()
    for curve, colour in zip(curves, COLOURS, strict=False):
        draw_over_steps(axes, curve, colour)
    if np.isfinite(chance):
        value = f"{chance:.2%}" if percent else f"{chance:.3g}"
        axes.axhline(chance, color=BROWN, ls=":", label=f"chance {value}")
    if best is not None:
        axes.axvline(best, **GUIDE, label=f"best at step {best:,.0f}")
    values = np.concatenate([curve.y for curve in curves])
    values = values[np.isfinite(values)]
    # over fewer than two powers of ten, a logarithmic axis has one labelled tick or none
    if log and len(values) and values.max() > 100 * values.min() > 0:
        axes.set_yscale("log")
        write_numbers(axes)
    elif from_zero and not (values < 0).any():
        axes.set_ylim(bottom=0)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("step")
    if len(axes.get_legend_handles_labels()[1]) > 1:
        legend_above(axes)
    return picture(title, figure)


def write_numbers(axes: Axes) -> None:
    """On a logarithmic axis, instead of powers in the language of formulas."""
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_minor_formatter("")


def draw_over_steps(axes: Axes, curve: Curve, colour: str) -> None:
    """Red marks on the step axis: what is not finite."""
    good = np.isfinite(curve.y)
    x, y = curve.x[good], curve.y[good]
    style: Any = {"color": colour, "ls": "--" if curve.dashed else "-", "label": curve.label}
    if len(x) <= SMOOTHED_FROM:
        axes.plot(x, y, marker=".", ms=4, **style)
    else:
        # As an image, however many points there are: none is left out, and the page stays small
        axes.plot(x, y, color=colour, lw=0.7, alpha=0.35, rasterized=True)
        axes.plot(*medians(x, y), lw=1.8, **style)
    lost = curve.x[~good]
    bottom = axes.get_xaxis_transform()
    axes.plot(lost, 0 * lost, "|", color=WRONG, ms=14, transform=bottom, rasterized=True)


def medians(x: Array, y: Array) -> tuple[Array, Array]:
    """Of stretches of neighbours."""
    parts = np.array_split(np.arange(len(x)), SMOOTHED_FROM)
    middle_x, middle_y = ([np.median(values[part]) for part in parts] for values in (x, y))
    return np.array(middle_x), np.array(middle_y)


@styled
def kaplan_meier_curves(curves: Sequence[Curve], unit: str) -> Picture:
    figure, axes = figure_and_axes((6.4, 3.2))
    for curve in curves:
        axes.plot(curve.x, curve.y, label=curve.label)
    axes.set(xlabel=unit, ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    legend_above(axes)
    return picture("Without the event, by thirds of the risk", figure)


@styled
def rank_curves(shares: Mapping[str, Array]) -> Picture:
    """The share of probes whose patient is among the first of the gallery, by how many these are."""
    figure, axes = figure_and_axes((6.4, 2.7))
    for label, share in shares.items():
        axes.plot(np.arange(1, len(share) + 1), share, ".-", ms=4, label=label)
    axes.set(xlabel="rank", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    legend_above(axes)
    return picture("Patient among the most similar", figure)


@styled
def similarity_histogram(groups: Mapping[str, Array]) -> Picture:
    """The share of each group's cosines in each bin; dotted: the means."""
    figure, axes = figure_and_axes((6.4, 2.7))
    finite = {label: values[np.isfinite(values)] for label, values in groups.items()}
    edges = np.histogram_bin_edges(np.concatenate([*finite.values()]).round(9), 60)
    edges[[0, -1]] += (-1e-9, 1e-9)  # values were rounded
    for (label, values), colour in zip(finite.items(), COLOURS, strict=False):
        if len(values):
            shares = np.histogram(values, edges)[0] / len(values)
            name = f"{label}, mean {values.mean():.2f}"
            axes.stairs(shares, edges, fill=True, alpha=0.2, color=colour)
            axes.stairs(shares, edges, color=colour, label=name)
            axes.axvline(values.mean(), color=colour, ls=":")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    legend_above(axes)
    return picture("Similarity to the gallery (cosine)", figure)


@styled
def roc_and_precision_recall(title: str, label_N: Array, score_N: Array) -> Picture:
    """Dotted: chance."""
    label_N = label_N.astype(float)
    auroc, auprc = Ranking(label_N, score_N).areas(np.ones((len(label_N), 1)))[:, 0]
    order, last = ranked(score_N)
    rows = last + 1
    true = np.cumsum(label_N[order])[last]
    positives, total = int(true[-1]), len(label_N)
    precision = true / rows
    sensitivity = np.append(0.0, true / max(positives, 1))
    fallout = np.append(0.0, (rows - true) / max(total - positives, 1))
    figure = Figure((4.1, 2.1), layout="constrained")
    roc, recall = figure.subplots(1, 2)
    roc.plot(fallout, sensitivity, color=BLUE)
    roc.plot([0, 1], [0, 1], **GUIDE)
    roc.set(xlabel="false positive rate", ylabel="sensitivity", title=f"ROC, area {auroc:.3f}")
    recall.plot(sensitivity, np.append(precision[:1], precision), color=BROWN)
    recall.axhline(positives / total, **GUIDE)
    recall.set(xlabel="recall", ylabel="precision", title=f"P-R, area {auprc:.3f}")
    for axes in (roc, recall):
        set_unit_square(axes)
    return picture(f"{title}: {positives:,} of {total:,}", figure)


def set_unit_square(axes: Axes) -> None:
    ticks = (0, 0.5, 1)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xticks=ticks, yticks=ticks, aspect="equal")


@styled
def calibration_curve(mean: Array, true: Array, count: Array, error: float) -> Picture:
    """Above: a dot for each bin of enough records; below: how many probabilities there are in each,
    as a logarithm."""
    figure = Figure((4.1, 5.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    enough = np.isfinite(true)
    upper.plot([0, 1], [0, 1], **GUIDE)
    upper.plot(mean[enough], true[enough], "o-", color=BLUE)
    upper.set(ylabel="observed frequency", xlim=(0, 1), ylim=(-0.02, 1.02))
    few = f"bins of fewer than {FEW_RECORDS} records have no dot"
    filled = count > 0
    centres = (np.flatnonzero(filled) + 0.5) / len(count)
    lower.bar(centres, count[filled], 0.9 / len(count), color=BLUE, alpha=0.4)
    lower.set(xlim=(0, 1), yscale="log", ylim=(0.7, 10 * max(count.max(), 1)))
    lower.set(xlabel=f"predicted probability\n({few})", ylabel="number")
    write_numbers(lower)
    return picture(f"Calibration, error {error:.3f}", figure)


@styled
def confusion_matrix(labels_NK: Array, outputs_NK: Array, names: Sequence[str]) -> Picture:
    """Each row: the share of a class's samples for which it was predicted (the diagonal:
    sensitivity), and the shares for which other classes were predicted wrongly."""
    share_KK = np.nan_to_num(confusion_shares(labels_NK, outputs_NK))
    rows = [shortened(name) for name in names]
    columns = [*rows, "nothing"] if share_KK[:, -1].any() else rows
    share_KK = share_KK[:, : len(columns)]
    cell_in, label_in = np.clip(3 / len(columns), 0.27, 0.6), 0.08 * max(map(len, columns))
    width_in, height_in = cell_in * len(columns) + label_in, cell_in * len(rows) + label_in
    figure, axes = figure_and_axes((max(width_in + 0.4, 4.1), height_in + 1))
    axes.grid(visible=False)
    right = np.eye(len(rows), len(columns), dtype=bool)[..., None]
    colour = np.where(right, matplotlib.colors.to_rgb(BLUE), matplotlib.colors.to_rgb(BROWN))
    strength = 0.85 * share_KK.clip(0, 1)[..., None]
    axes.imshow(np.concatenate([colour, strength], axis=2), interpolation="nearest")
    written_from = 0.005 if len(names) <= FEW else 0.095
    for j, k in np.argwhere(share_KK >= written_from):
        number = f"{100 * share_KK[j, k]:.0f}"
        axes.text(k, j, number, size=7, ha="center", va="center")
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("% of each class (row) with each prediction\nblue: right, brown: wrong or none")
    return picture("Confusions", figure)


def shortened(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}\u2026"


@styled
def predicted_against_true(
    name: str, value_N: Array, prediction_N: Array, unit: str = ""
) -> Picture:
    """Dotted: where both are equal."""
    figure, axes = figure_and_axes((4.1, 3.6))
    axes.plot(value_N, prediction_N, ".", alpha=0.4, mew=0, rasterized=True)
    axes.axline((value_N[0], value_N[0]), slope=1, **GUIDE)
    axes.set(xlabel=with_unit("true", unit), ylabel=with_unit("predicted", unit))
    return picture(f"{name}: predicted and true", figure)


@styled
def bland_altman(value_N: Array, prediction_N: Array, unit: str = "") -> Picture:
    """Dotted: the mean difference, and the limits of agreement."""
    figure, axes = figure_and_axes((4.1, 3.6))
    error_N = prediction_N - value_N
    both_N = (value_N + prediction_N) / 2
    axes.plot(both_N, error_N, ".", alpha=0.4, mew=0, rasterized=True)
    mean, reach = error_N.mean(), SPREAD * error_N.std()
    for word, level in (("", mean - reach), ("mean ", mean), ("", mean + reach)):
        axes.axhline(level, **GUIDE)
        edge = axes.get_yaxis_transform()
        axes.text(1.01, level, f"{word}{level:+.3g}", transform=edge, va="center")
    axes.set(xlabel=with_unit("mean of both", unit), ylabel=with_unit("difference", unit))
    return picture("Bland-Altman: predicted - true", figure)


def with_unit(label: str, unit: str) -> str:
    return f"{label}, {unit}" if unit else label
