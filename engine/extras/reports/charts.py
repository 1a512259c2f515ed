"""The figures of the reports, drawn with matplotlib: numbers in, inline SVG out.

    line_chart("Loss", [Line("loss", "training", steps, values)])    curves over steps
    histogram("Similarity", [("positive pairs", values), ...])       the distribution of each group
    roc_and_pr("AF", label_N, score_N)                               both curves side by side
    calibration_chart(mean, true, count, error)                      predicted and observed frequency
    confusion_chart(labels_NK, outputs_NK, names)                    what is predicted for each class
    agreement_charts("age", value_N, prediction_N, "years")          scatter plot and Bland-Altman plot
    clinical_chart("A0001", "M, 63", dataset[7])                     3 x 4 leads and a rhythm strip

The page sets the colours: every colour of COLOURS becomes a variable of report.html, which has one
value for light and one for dark pages. The same numbers give the same bytes.
"""

import io
import re
from collections.abc import Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import FuncFormatter, MaxNLocator

import omnilead.data_tools.extras.plots as plots
from omnilead.data_tools.dataset import Ecg

from ...training.metrics import FEW as FEW_RECORDS
from ...training.metrics import Array, Ranking, confusion_shares, ranked
from .page import Line, LineStyle

# Names of the colours in report.html. Here each has a number that nothing else in a figure has.
SERIES = ("#c0c0c0", "#c0c0c1", "#c0c0c2", "#c0c0c3", "#c0c0c4")
INK = "#c0c0d0"
GREY = "#c0c0d1"
RULE = "#c0c0d2"
AXIS = "#c0c0d3"
COLOURS = {colour: f"--c{i}" for i, colour in enumerate(SERIES)}
COLOURS |= {INK: "--ink", GREY: "--grey", RULE: "--rule", AXIS: "--axis"}
COLOURS |= {plots.INK: "--ink", plots.GREY: "--grey"}
WRONG = SERIES[4]  # values that are not finite
Style = dict[str, Any]
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "omnilead",  # without one, ids are random
    "text.parse_math": False,
    "text.color": GREY,
    "font.size": 11,
    "axes.edgecolor": AXIS,
    "axes.linewidth": 0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 1,
    "lines.linewidth": 1.8,
    "lines.solid_joinstyle": "round",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.pad": 6,
    "xtick.labelcolor": GREY,
    "ytick.labelcolor": GREY,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0.4,
    "legend.handlelength": 1.5,
    "legend.columnspacing": 1.2,
}
_styled = matplotlib.rc_context(STYLE)  # a decorator
UNNAMED = dict.fromkeys(("Date", "Creator", "Format", "Type"))
DOTTED: Style = {"lw": 1.2, "ls": (0, (2, 3))}
GUIDE: Style = {"color": AXIS, **DOTTED}

# Sizes are in units of the drawing, which is scaled to its card: about pixels.
WIDTH, HEIGHT = 384.0, 212.0
WIDE = 2 * WIDTH + 52  # two charts side by side, with the gap and margins between them
ECG_WIDTH = 588.0  # two to a row
# Margins around the plot
LEFT, RIGHT = 52.0, 8.0
TOP, BOTTOM = 40.0, 26.0

MAX_POINTS = 480  # of a curve
SMOOTHED_FROM = 60  # points; from there a moving average is drawn over the curve
LONGEST, FEW = 18, 12  # characters of a class name; classes that fit into a narrow card
DOTS = 1500  # drawn of many
SPREAD = 1.96  # standard deviations: 95 % of normally distributed differences


class Drawing:
    """A figure with its title, and axes that are placed in units of the drawing."""

    def __init__(self, title: str, width: float = WIDTH, height: float = HEIGHT) -> None:
        self.title = title
        self.width, self.height = width, height
        self.figure = Figure((width / 72, height / 72), facecolor="none")
        self.text(0, 13, title, color=INK, size=13.5, weight=700)

    def axes(
        self,
        left: float = LEFT,
        top: float = TOP,
        width: float | None = None,
        height: float | None = None,
    ) -> Axes:
        if width is None:
            width = self.width - LEFT - RIGHT
        if height is None:
            height = self.height - TOP - BOTTOM
        bottom = self.height - top - height
        units = (self.width, self.height, self.width, self.height)
        place = np.divide((left, bottom, width, height), units)
        return self.figure.add_axes(tuple(place), facecolor="none")

    def text(self, x: float, y: float, content: str, **style: Any) -> None:
        self.figure.text(x / self.width, 1 - y / self.height, content, **style)

    def svg(self, kind: str = "") -> str:
        """SVG to stand in a page: without header, fonts, and colours of its own."""
        file = io.StringIO()
        self.figure.savefig(file, format="svg", metadata=UNNAMED)
        inside = file.getvalue().partition("</defs>")[2]  # matplotlib's style would reach the page
        inside = re.sub(r'(?<= d=")[^"]*', _shortened, inside)
        inside = re.sub(r"font-family: [^;\"]*;? ?", "", re.sub(r"\n\s*", "\n", inside))
        inside = inside.replace("xlink:href", "href")
        for colour, name in COLOURS.items():
            inside = inside.replace(colour, f"var({name})")
        return (
            f'<svg class="chart {kind}" viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escape(self.title)}">{inside}'
        )


def _shortened(path: re.Match[str]) -> str:
    """A path in tenths of a unit: a third of the size."""
    return re.sub(r"(\.\d)\d+", r"\1", path[0]).replace(" \n", " ")


@_styled
def line_chart(
    title: str,
    lines: Sequence[Line],
    style: LineStyle,
    span: Array | None = None,
    mark: tuple[float, str] | None = None,
) -> str:
    """`span`: x values that the axis must cover; `mark`: an x, and what is there."""
    drawing = Drawing(title)
    axes = drawing.axes()
    axes.grid(visible=False, axis="x")
    for line in lines:
        _draw_line(axes, line, style)
    _set_axes(axes, lines, style, span)
    drawing.text(LEFT - 7, HEIGHT - 8, style.x_label, ha="right")
    drawing.text(WIDTH - RIGHT, 13, style.unit, ha="right")
    for line in lines:
        if line.chance is not None:
            chance = f"chance {line.chance:.2%}" if style.percent else f"chance {line.chance:.3g}"
            axes.axhline(line.chance, color=SERIES[line.colour], **DOTTED)
            along = axes.get_yaxis_transform()
            axes.text(1, line.chance, chance, ha="right", va="bottom", transform=along)
    low, high = axes.get_xlim()
    if mark and not low <= mark[0] <= high:
        mark = None
    if mark:
        axes.axvline(mark[0], label=mark[1], **GUIDE)
    if len(lines) > 1 or mark:
        _legend(axes)
    return drawing.svg()


def _draw_line(axes: Axes, line: Line, style: LineStyle) -> None:
    colour = SERIES[line.colour]
    curve: Style = {"color": colour, "label": line.label, "gid": line.key}
    if line.dashed:
        curve["ls"] = (0, (3, 2))
    good = np.isfinite(line.y)
    x, y = thinned(line.x, np.where(good, line.y, np.nan))
    shown = np.isfinite(y)
    if style.smooth and shown.sum() > SMOOTHED_FROM:
        log = style.log and bool((y[shown] > 0).all())
        mean = 10 ** smoothed(np.log10(y)) if log else smoothed(y)
        axes.plot(x, y, color=colour, lw=1, alpha=0.32)
        axes.plot(x, mean, **curve)
    else:
        axes.plot(x, y, **curve)
        dots = shown
        if shown.sum() > 24:  # only those without a neighbour, which a line would not show
            padded = np.pad(shown, 1)
            dots = shown & ~padded[:-2] & ~padded[2:]
        axes.plot(x[dots], y[dots], "o", color=colour, ms=4.8, mew=0, clip_on=False)
    for step in line.x[~good][:200]:
        axes.axvline(step, ymax=0.05, color=WRONG, lw=1.6, gid="lost")


def _set_axes(
    axes: Axes, lines: Sequence[Line], style: LineStyle, span: Array | None = None
) -> None:
    steps = [line.x for line in lines]
    if span is not None:
        steps.append(span)
    low = float(min(x.min() for x in steps))
    high = float(max(x.max() for x in steps))
    if low == high:
        low, high = low - 1, high + 1
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=style.x_label in ("step", "rank")))
    axes.xaxis.set_major_formatter(_number)
    axes.margins(y=0.06)
    levels = [line.chance for line in lines if line.chance is not None]
    values = np.concatenate([levels, *(line.y for line in lines)])
    values = values[np.isfinite(values)]
    # over fewer than two powers of ten, a logarithmic axis has one labelled tick or none
    if style.log and len(values) and values.max() > 100 * values.min() > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_number)
        axes.yaxis.set_minor_formatter("")
        return
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(_per_cent if style.percent else _number)
    if style.floor is not None and len(values) and values.min() >= style.floor:
        axes.set_ylim(bottom=style.floor)


@FuncFormatter
def _number(value: float, _: Any = None) -> str:
    return f"{value:z,.10g}"


@FuncFormatter
def _per_cent(value: float, _: Any = None) -> str:
    return f"{100 * value:z,.6g} %"


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1), ncols=5, columnspacing=0.8)


def thinned(x: Array, y: Array, limit: int = MAX_POINTS) -> tuple[Array, Array]:
    """At most `limit` points: the lowest and the highest of each stretch, in their order."""
    if len(x) <= limit:
        return x, y
    good = np.isfinite(y)
    low = np.where(good, y, np.inf)
    high = np.where(good, y, -np.inf)
    kept = set()
    for stretch in np.array_split(np.arange(len(y)), limit // 2):
        kept |= {stretch[low[stretch].argmin()], stretch[high[stretch].argmax()]}
    rows = sorted(kept)
    return x[rows], y[rows]


def smoothed(y: Array) -> Array:
    """The mean of the neighbours within a thirtieth of the curve; NaN where y is."""
    good = np.isfinite(y)
    reach = max(1, len(y) // 60)
    window = np.ones(2 * reach + 1)
    weight = np.convolve(good.astype(float), window, "same")
    sums = np.convolve(np.where(good, y, 0.0), window, "same")
    return np.where(good, sums / np.maximum(weight, 1), np.nan)


@_styled
def histogram(title: str, groups: Sequence[tuple[str, Array]]) -> str:
    """The share of each group's numbers in each bin; dotted: the means."""
    finite = {}
    for label, values in groups:
        good = np.isfinite(values)
        if good.any():
            finite[label] = values[good]
    together = np.concatenate([*finite.values(), []])
    edges = np.histogram_bin_edges(together.round(9), 60)
    edges[[0, -1]] += (-1e-9, 1e-9)  # values were rounded
    drawing = Drawing(title, WIDE)
    axes = drawing.axes()
    for i, (label, values) in enumerate(finite.items()):
        mean = values.mean()
        shares = np.histogram(values, edges)[0] / len(values)
        style: Style = {"color": SERIES[i % len(SERIES)]}
        axes.stairs(shares, edges, fill=True, alpha=0.2, **style)
        name = f"{label}, mean {mean:.2f}"
        axes.stairs(shares, edges, lw=1.4, label=name, gid=name, **style)
        axes.axvline(mean, **GUIDE)
    axes.margins(x=0)
    axes.yaxis.set_major_formatter(_per_cent)
    _legend(axes)
    return drawing.svg("wide")


@_styled
def roc_and_pr(title: str, label_N: Array, score_N: Array) -> str:
    """ROC and precision-recall curves; dotted: chance."""
    label_N = label_N.astype(float)
    auroc, auprc = Ranking(label_N, score_N).areas(np.ones((len(label_N), 1)))[:, 0]
    order, last = ranked(score_N)
    rows = last + 1
    true = np.cumsum(label_N[order])[last]
    positives, total = int(true[-1]), len(label_N)
    precision = true / rows
    sensitivity = np.append(0.0, true / max(positives, 1))
    fallout = np.append(0.0, (rows - true) / max(total - positives, 1))
    drawing = Drawing(title, 300, 186)
    drawing.text(300, 13, f"{positives:,} of {total:,}", ha="right")
    roc = _unit_square(drawing, 24, 120)
    roc.plot([0, 1], [0, 1], **GUIDE)
    roc.plot(fallout, sensitivity, color=SERIES[0], gid="roc")
    pr = _unit_square(drawing, 176, 120)
    pr.plot([0, 1], [positives / total] * 2, **GUIDE)
    pr.plot(sensitivity, np.append(precision[:1], precision), color=SERIES[1], gid="pr")
    _name_axes(roc, "false positive rate", "sensitivity", f"area {auroc:.3f}")
    _name_axes(pr, "recall", "precision", f"area {auprc:.3f}")
    return drawing.svg()


def _unit_square(drawing: Drawing, left: float, size: float) -> Axes:
    axes = drawing.axes(left, 46, size, size)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    ticks = (0, 0.5, 1)
    axes.set_xticks(ticks, ["0", "", ""])
    axes.set_yticks(ticks, ["0", "", "1"])
    axes.spines[:].set_linewidth(1)
    return axes


def _name_axes(axes: Axes, x_label: str, y_label: str, note: str = "") -> None:
    place: Style = {"xycoords": "axes fraction", "textcoords": "offset points", "color": GREY}
    axes.annotate(x_label, (1, 0), (0, -14), ha="right", **place)
    axes.annotate(y_label, (0, 1), (0, 6), **place)
    axes.annotate(note, (1, 1), (0, 6), ha="right", **place | {"color": INK})


@_styled
def calibration_chart(mean: Array, true: Array, count: Array, error: float) -> str:
    """Above: a dot for each bin of enough records; below: how many probabilities there are in each,
    as a logarithm."""
    filled, enough = count > 0, np.isfinite(true)
    drawing = Drawing("Calibration", 384, 520)
    upper = _unit_square(drawing, 46, 312)
    upper.plot([0, 1], [0, 1], **GUIDE)
    drawing.text(46, 388, f"bins of fewer than {FEW_RECORDS} records have no dot")
    upper.plot(mean[enough], true[enough], "o-", color=SERIES[0], ms=8, mew=0)
    note = f"calibration error {error:.3f}"
    _name_axes(upper, "predicted probability", "observed frequency", note)
    lower = drawing.axes(46, 398, 312, 90)
    width = 1 / len(count)
    centres = width * (np.flatnonzero(filled) + 0.5)
    lower.bar(centres, count[filled], 0.9 * width, color=SERIES[0], alpha=0.35)
    lower.set(xlim=(0, 1), xticks=(), yscale="log")
    lower.set_ylim(0.7, 10 * max(count.max(), 1))
    lower.yaxis.set_major_formatter(_number)
    lower.minorticks_off()
    drawing.text(46, 502, "probabilities in each bin (logarithmic)")
    return drawing.svg()


@_styled
def confusion_chart(labels_NK: Array, outputs_NK: Array, names: Sequence[str]) -> str:
    """Each row: the share of a class's samples for which it was predicted (the diagonal:
    sensitivity), and the shares for which other classes were predicted wrongly."""
    share_KK = np.nan_to_num(confusion_shares(labels_NK, outputs_NK))
    names = [f"{name[: LONGEST - 1]}\u2026" if len(name) > LONGEST else name for name in names]
    columns = list(names)
    if share_KK[:, -1].any():
        columns.append("nothing")
    few = len(names) <= FEW
    longest = max(map(len, columns))
    cell = max(26.0, min(52.0, 290 / len(columns)))
    left = max(62.0, 6.2 * longest + 14)
    top = max(96.0, 5.6 * longest + 48)
    width, height = cell * len(columns), cell * len(names)
    turned: Style = {"rotation": 60, "ha": "left", "rotation_mode": "anchor"}
    drawing = Drawing("Confusions", max(left + width + 30, 340.0), top + height + 4)
    drawing.text(0, 31, "per cent of each class (row) with each prediction (column)")
    drawing.text(0, 46, "blue: right, brown: wrong or none")
    axes = drawing.axes(left, top, width, height)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(columns)), columns, **turned)
    axes.set_yticks(range(len(names)), names)
    for k in np.flatnonzero(labels_NK.sum(0) == 0):
        axes.get_yticklabels()[k].set_alpha(0.45)
    _draw_shares(axes, share_KK[:, : len(columns)], cell, 0.005 if few else 0.095)
    return drawing.svg("" if few else "wide")


def _draw_shares(axes: Axes, share_KK: Array, cell: float, written_from: float) -> None:
    """A square for each share, and the numbers that are large enough to be written."""
    j, k = np.nonzero(share_KK >= 0.005)
    if len(j):  # matplotlib cannot colour nothing
        strength: Any = 0.1 + 0.75 * share_KK[j, k].clip(0, 1)
        colours = np.where(j == k, SERIES[0], SERIES[1])
        axes.scatter(k, j, (cell - 2) ** 2, colours, marker="s", alpha=strength, lw=0)
    for j, k in np.argwhere(share_KK >= written_from):
        number = f"{100 * share_KK[j, k]:.0f}"
        axes.text(k, j, number, size=9, color=INK, ha="center", va="center")


@_styled
def agreement_charts(name: str, value_N: Array, prediction_N: Array, unit: str = "") -> list[str]:
    """Predictions against true values, and their differences with the mean and the limits of
    agreement."""
    if unit:
        unit = f", {unit}"
    rng = np.random.default_rng(0)
    shown = rng.permutation(len(value_N))[:DOTS]
    error_N = prediction_N - value_N
    mean, reach = error_N.mean(), SPREAD * error_N.std()
    same = Drawing(f"{name}{unit}", 384, 346)
    axes = _dots(same, value_N[shown], prediction_N[shown], "true", "predicted")
    axes.axline((value_N[0], value_N[0]), slope=1, **GUIDE)

    difference = Drawing(f"Bland-Altman: predicted - true{unit}", 384, 346)
    both_N = (value_N[shown] + prediction_N[shown]) / 2
    axes = _dots(difference, both_N, error_N[shown], "mean of both", "difference")
    place: Style = {"textcoords": "offset points", "color": INK}
    place["xycoords"] = axes.get_yaxis_transform()
    for level, word in ((mean - reach, ""), (mean, "mean "), (mean + reach, "")):
        axes.axhline(level, **GUIDE)
        axes.annotate(f"{word}{level:+.3g}", (0, level), (4, 3), **place)
    return [same.svg(), difference.svg()]


def _dots(drawing: Drawing, x: Array, y: Array, x_label: str, y_label: str) -> Axes:
    """One path for all dots, a tenth of the size of a marker for each."""
    points = np.stack([x, y], 1).repeat(2, axis=0)
    axes = drawing.axes(LEFT, 46, 312, 260)
    path = Outline(points, [Outline.MOVETO, Outline.LINETO] * len(x))
    path.should_simplify = False  # each dot is a line without length, with round ends
    style: Style = {"edgecolor": SERIES[0], "lw": 4, "alpha": 0.4, "capstyle": "round"}
    axes.add_patch(PathPatch(path, fill=False, gid="dots", **style))
    axes.autoscale_view()
    axes.xaxis.set_major_formatter(_number)
    axes.yaxis.set_major_formatter(_number)
    _name_axes(axes, "", y_label)
    drawing.text(LEFT + 312, 340, x_label, ha="right")
    return axes


@_styled
def clinical_chart(title: str, note: str, ecg: Ecg) -> str:
    """A crop on ECG paper, with lines 5 mm apart."""
    width, height = 570.0, 570 * plots.PAPER_MM[1] / plots.PAPER_MM[0]
    drawing = Drawing(title, ECG_WIDTH, height + 60)
    drawing.text(0, 30, note)
    axes = drawing.axes(10, 40, width, height)
    plots.draw_grid(axes, 5, RULE, 1)
    said = plots.draw_ecg(axes, ecg.signal_uv, ecg.halves, ecg.missing_leads)
    for line in axes.lines:
        if line.get_gid() == "trace":
            x, y = map(np.asarray, line.get_data())
            line.set_data(*thinned(x, y, len(x) // 8))
    drawing.text(10, height + 55, "   ".join(said))
    return drawing.svg()
