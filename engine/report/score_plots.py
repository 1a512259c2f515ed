"""Charts of an evaluation, like those of plots.py: numbers in, SVG out.

roc_and_pr("AF", label_N, score_N)                               both curves side by side
calibration_chart(mean, true, count, error)                      predicted probability against observed frequency
confusion_chart(labels_NK, outputs_NK, names)                    predicted classes of the samples of each class
agreement_charts("age", value_N, prediction_N, "years")          predicted against true values, and Bland-Altman
clinical_chart("A0001", "M, 63", mv_LT)                          an ECG in print layout: 3 x 4 leads and a rhythm strip
"""

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from omnilead.engine.common import LEADS
from omnilead.engine.evaluation.metrics import Array, counts, ranked
from omnilead.engine.report.plots import (
    ECG_WIDTH,
    LEFT,
    PlotArea,
    curve,
    svg,
    tag,
    text,
    thinned,
    ticks,
)

CELL, NAMES, HEAD = 26.0, 62.0, 96.0  # of the confusion chart
LONGEST, FEW = 18, 12  # characters of a name; classes that fit into a narrow card
DOTS = 1500  # drawn of many
SPREAD = 1.96  # standard deviations: 95 % of normally distributed differences
FS_HZ, COLUMN_S, SHOWN_S = 500, 2.5, 10.0
PX_PER_S, PX_PER_MV, ROW_MV = 57.0, 22.8, 2.6  # 25 mm/s and 10 mm/mV, at 2.28 pixels a millimetre


def roc_and_pr(title: str, label_N: Array, score_N: Array) -> str:
    """ROC and precision-recall curves; dotted: chance."""
    true, false = (np.append(0.0, part) for part in counts(label_N, *ranked(score_N)))
    positives, negatives = true[-1], false[-1]
    sensitivity, fallout = true / max(positives, 1), false / max(negatives, 1)
    precision = true[1:] / (true + false)[1:]
    auroc = float(np.trapezoid(sensitivity, fallout)) if positives and negatives else np.nan
    auprc = float((np.diff(sensitivity) * precision).sum()) if positives else np.nan
    base, ends = positives / max(positives + negatives, 1), np.array([0.0, 1.0])
    roc, pr = (PlotArea(0, 1, 0, 1, 120, 120, left, 46) for left in (24, 176))
    parts = [
        *_unit_square(roc, "sensitivity", "false positive rate", f"area {auroc:.3f}"),
        curve("chance", roc.path(ends, ends)),
        curve("s0", roc.path(*_thin(fallout, sensitivity))),
        *_unit_square(pr, "precision", "recall", f"area {auprc:.3f}"),
        curve("chance", pr.path(ends, np.array([base, base]))),
        curve(
            "s1",
            pr.path(*_thin(np.append(0.0, sensitivity[1:]), np.append(precision[:1], precision))),
        ),
        text(300, 13, f"{int(positives):,} of {int(positives + negatives):,}", "end"),
    ]
    return svg("", title, 300, 186, parts)


def _thin(x: Array, y: Array, limit: int = 160) -> tuple[Array, Array]:
    """Points at about equal distances along the curve."""
    if len(x) <= limit:
        return x, y
    length = np.append(0.0, np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y))))
    kept = np.unique(np.searchsorted(length, np.linspace(0, length[-1], limit)).clip(0, len(x) - 1))
    return x[kept], y[kept]


def _unit_square(area: PlotArea, y_label: str, x_label: str, note: str) -> Iterator[str]:
    right, bottom = area.left + area.width, area.top + area.height
    yield area.vertical("grid", 0.5) + area.horizontal("grid", 0.5)
    box = {"x": area.left, "y": area.top, "width": area.width, "height": area.height}
    yield tag(
        "rect", class_="axis", fill="none", **{name: float(value) for name, value in box.items()}
    )
    yield text(area.left, area.top - 6, y_label) + text(right, area.top - 6, note, "end", "key")
    yield text(area.left, bottom + 14, "0") + text(right, bottom + 14, x_label, "end")
    yield text(area.left - 5, area.top + 8, "1", "end") + text(area.left - 5, bottom, "0", "end")


def calibration_chart(mean: Array, true: Array, count: Array, error: float) -> str:
    """Above: a dot for each bin of probabilities; below: how many there are, as a logarithm."""
    area = PlotArea(0, 1, 0, 1, 312, 312, LEFT, 46)
    parts = [
        *_unit_square(
            area, "observed frequency", "predicted probability", f"calibration error {error:.3f}"
        )
    ]
    there, ends = count > 0, np.array([0.0, 1.0])
    parts += [
        curve("chance", area.path(ends, ends)),
        curve("s0", area.path(mean[there], true[there])),
    ]
    decades, low, floor = (
        max(math.ceil(math.log10(max(count.max(), 1)) + 1e-9), 1),
        90,
        area.top + area.height + 130.0,
    )
    step = area.width / len(count)
    for i in np.flatnonzero(there).tolist():
        reading = (
            f"predicted {mean[i]:.3f}, observed {true[i]:.3f}, {int(count[i]):,} probabilities"
        )
        title = tag("title", escape(reading))
        height = float(
            low * (math.log10(count[i]) + 0.15) / (decades + 0.15)
        )  # a sliver for a single one
        box = {
            "x": area.left + i * step + 1,
            "y": floor - height,
            "width": step - 2,
            "height": height,
        }
        parts.append(tag("circle", title, class_="f0", cx=area.x(mean[i]), cy=area.y(true[i]), r=4))
        parts.append(tag("rect", title, class_="f0", opacity=".35", **box))
    parts += [
        text(LEFT - 5, floor, "1", "end"),
        text(LEFT - 5, floor - low + 8, f"{10**decades:g}", "end"),
    ]
    parts.append(text(LEFT, floor + 14, "probabilities in each bin (logarithmic)"))
    return svg("", "Calibration", area.left + area.width + 26, floor + 20, parts)


def confusion_chart(labels_NK: Array, outputs_NK: Array, names: Sequence[str]) -> str:
    """For the samples of each class, the share for which it was predicted (the diagonal:
    sensitivity), and the shares for which other classes were predicted wrongly."""
    share_KK, positives = confusion_shares(labels_NK, outputs_NK), labels_NK.sum(0)
    names = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}\u2026" for name in names]
    columns = [*names, "nothing"] if np.nan_to_num(share_KK[:, -1]).any() else names
    few, longest = len(names) <= FEW, max(map(len, columns))
    cell, left, top = (
        max(CELL, min(52.0, 290 / len(columns))),
        max(NAMES, 6.2 * longest + 14),
        max(HEAD, 5.6 * longest + 48),
    )
    notes = (
        "per cent of each class (row) with each prediction (column)",
        "blue: right, brown: wrong or none",
    )
    parts = (
        [text(0, 31, notes[0]), text(0, 46, notes[1])] if few else [text(0, 31, "; ".join(notes))]
    )
    for k, name in enumerate(columns):
        place = f"translate({left + cell * (k + 0.5) + 3:g} {top - 6:g}) rotate(-60)"
        parts.append(tag("text", escape(name), transform=place))
    for j, name in enumerate(names):
        faint = "" if positives[j] else ".45"
        parts.append(text(left - 6, top + cell * (j + 0.5) + 4, name, "end", opacity=faint))
        for k, column in enumerate(columns):
            share, x, y = share_KK[j, k], left + cell * k, top + cell * j
            box = {"x": x + 0.5, "y": y + 0.5, "width": cell - 1, "height": cell - 1, "rx": 2}
            parts.append(tag("rect", class_="none", opacity=".5", **box))
            if share >= 0.005:
                title = tag(
                    "title",
                    escape(f"{name}: {column} predicted for {share:.1%} of {positives[j]:,}"),
                )
                parts.append(
                    tag(
                        "rect",
                        title,
                        class_=f"f{int(j != k)}",
                        opacity=f"{0.1 + 0.75 * share:.2f}",
                        **box,
                    )
                )
            if share >= 0.095 or (few and share >= 0.005):
                parts.append(
                    text(x + cell / 2, y + cell / 2 + 3, f"{100 * share:.0f}", "middle", "number")
                )
    width, height = left + cell * len(columns) + 30, top + cell * len(names) + 4
    return svg(
        "" if few else "wide", "Confusions", max(width, 340.0 if few else 0.0), height, parts
    )


def confusion_shares(labels_NK: Array, outputs_NK: Array) -> Array:
    """[K, K + 1]; last column: nothing was predicted. NaN where no sample has the class."""
    labels, outputs = labels_NK.astype(np.float64), outputs_NK.astype(bool)
    wrong = labels.T @ (outputs & ~labels_NK.astype(bool))
    np.fill_diagonal(wrong, (labels * outputs).sum(0))
    silent = labels.T @ ~outputs.any(1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.column_stack([wrong, silent]) / labels.sum(0)[:, None])


def agreement_charts(name: str, value_N: Array, prediction_N: Array, unit: str = "") -> list[str]:
    """Predictions against true values, and their differences with the mean and the limits of
    agreement."""
    shown = np.random.default_rng(0).permutation(len(value_N))[:DOTS]
    unit, both = f", {unit}" * bool(unit), np.concatenate([value_N, prediction_N])
    low, high = float(both.min()), float(both.max())
    ends, mean_N, error_N = (
        np.array([low, high]),
        (value_N + prediction_N) / 2,
        prediction_N - value_N,
    )
    mean, spread = float(error_N.mean()), SPREAD * float(error_N.std())
    same = _dots(
        f"{name}{unit}", "true", "predicted", value_N[shown], prediction_N[shown], ends, ends, []
    )
    levels = [
        (mean, f"mean {mean:+.3g}"),
        (mean - spread, f"{mean - spread:+.3g}"),
        (mean + spread, f"{mean + spread:+.3g}"),
    ]
    reach = np.array([min(error_N.min(), mean - spread), max(error_N.max(), mean + spread)])
    title = f"Bland-Altman: predicted - true{unit}"
    return [
        same,
        _dots(
            title, "mean of both", "difference", mean_N[shown], error_N[shown], ends, reach, levels
        ),
    ]


def _dots(
    title: str,
    x_label: str,
    y_label: str,
    x: Array,
    y: Array,
    xs: Array,
    ys: Array,
    levels: Sequence[tuple[float, str]],
) -> str:
    """`levels`: horizontal lines; without them the diagonal."""
    (x0, x1), (y0, y1) = (
        (low - room, high + room) for low, high in (xs, ys) for room in [0.04 * (high - low) or 0.5]
    )
    area = PlotArea(x0, x1, y0, y1, 312, 260, LEFT, 46)
    parts = [*area.y_axis(), *map(area.x_tick, ticks(x0, x1, 6)), text(LEFT, 36, y_label)]
    parts.append(text(LEFT + area.width, area.top + area.height + 34, x_label, "end"))
    parts.append(
        curve(
            "s0 dots",
            "".join(f"M{area.x(a):.1f} {area.y(b):.1f}h0" for a, b in zip(x, y, strict=True)),
        )
    )
    parts += [] if levels else [curve("chance", area.path(xs, xs))]
    for level, label in levels:
        parts.append(area.horizontal("level axis", level, label))
        parts.append(text(LEFT + 4, area.y(level) - 4, label, kind="key"))
    return svg("", title, LEFT + area.width + 26, area.top + area.height + 40, parts)


def clinical_chart(title: str, note: str, mv_LT: Array) -> str:
    """Twelve leads at 500 Hz on ECG paper, each centred on its median; a lead of zeros is grey.
    Columns past the end of a short ECG start from its beginning again."""
    length_s, x0, top = mv_LT.shape[1] / FS_HZ, 10.0, 42.0
    area = PlotArea(
        0, SHOWN_S, -3.5 * ROW_MV, 0.5 * ROW_MV, PX_PER_S * SHOWN_S, PX_PER_MV * 4 * ROW_MV, x0, top
    )
    right, bottom = area.left + area.width, area.top + area.height
    grid = [f"M{area.x(s):.1f} {top}V{bottom:.1f}" for s in np.arange(0, SHOWN_S + 0.1, 0.2)]
    grid += [f"M{x0} {y:.1f}H{right:.1f}" for y in np.arange(top, bottom + 1, PX_PER_MV / 2)]
    parts = [text(0, 30, note), tag("path", class_="grid", fill="none", d="".join(grid))]
    cells = [(lead, i % 3, COLUMN_S * (i // 3), COLUMN_S, 160) for i, lead in enumerate(LEADS)]
    for lead, row, start_s, seconds, points in [
        *cells,
        ("II", 3, 0.0, min(SHOWN_S, length_s), 480),
    ]:
        mv, first = mv_LT[LEADS.index(lead)], round(start_s % length_s * FS_HZ)
        part = mv[first : first + round(seconds * FS_HZ)].astype(float)
        t, y = thinned(start_s + np.arange(len(part)) / FS_HZ, part - np.median(mv), points)
        path = area.path(t, y.clip(-ROW_MV, ROW_MV) - ROW_MV * row)
        parts.append(
            tag(
                "path",
                class_="trace" if mv.any() else "axis",
                fill="none",
                stroke_width=".9",
                d=path,
            )
        )
        parts.append(text(area.x(start_s) + 3, area.y(-ROW_MV * row) - 22, lead, kind="key"))
    return svg("", title, ECG_WIDTH, bottom + 6, parts)
