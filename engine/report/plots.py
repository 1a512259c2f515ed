"""Charts as inline SVG for the reports: numbers in, a string out. The same numbers give the same
bytes.

    line_chart("Loss", [Line("loss", "training", steps, values)])    curves over steps; non-finite values are marked gaps
    histogram("Similarity", [("positive pairs", values), ...])       the distribution of each group
    rank_chart("Code usage", counts_GV)                              how often each code was used, most used first
    ecg_chart("Crop 1", mv_SLT, names, fs_hz)                        leads under each other, on one scale

No plotting library: the report needs colours for light and dark pages and values at the pointer
(report.html).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from omnilead.engine.evaluation.metrics import Array

WIDTH, HEIGHT = 384.0, 212.0
WIDE = 2 * WIDTH + 52.0  # two charts side by side, with the gap and margins between them
ECG_WIDTH = 588.0  # two to a row
LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 40.0, 26.0  # margins around the plot
MAX_POINTS = 480  # of a curve
SMOOTHED_FROM = 60  # points; from there a moving average is drawn over the curve


@dataclass(frozen=True, eq=False)
class Line:
    key: str
    label: str
    x: Array
    y: Array  # NaN or infinite where there is no number
    colour: int = 0
    dashed: bool = False
    chance: float | None = None  # the value of guessing


@dataclass(frozen=True)
class LineStyle:
    unit: str = ""
    percent: bool = False
    log: bool = False
    floor: float | None = None  # the y axis reaches at least down to it
    smooth: bool = True
    x_label: str = "step"
    outline: bool = False  # of bins: filled, without markers
    width: float = WIDTH
    level: str = "chance"  # name of Line.chance


@dataclass(frozen=True)
class PlotArea:
    """Maps numbers to pixels of a chart."""

    x0: float
    x1: float
    y0: float
    y1: float
    width: float = WIDTH - LEFT - RIGHT
    height: float = HEIGHT - TOP - BOTTOM
    left: float = LEFT
    top: float = TOP
    log: bool = False

    def x(self, value: float) -> float:
        return float(self.left + (value - self.x0) / (self.x1 - self.x0) * self.width)

    def y(self, value: float) -> float:
        at = (math.log10(value) if self.log else value) - self.y0
        return float(self.top + self.height - at / (self.y1 - self.y0) * self.height)

    def path(self, x: Array, y: Array) -> str:
        """An SVG path, with a gap where y is not finite."""
        parts, pen = [], "M"
        for a, b in zip(x.tolist(), y.tolist(), strict=True):
            if not math.isfinite(b):
                pen = "M"
                continue
            parts.append(f"{pen}{self.x(a):.1f} {self.y(b):.1f}")
            pen = "L"
        return "".join(parts)

    def vertical(
        self,
        kind: str,
        value: float,
        title: str = "",
        dotted: bool = False,
        length: float | None = None,
    ) -> str:
        """A line at this x; `length`: in pixels, upwards from the axis."""
        top = self.top if length is None else self.top + self.height - length
        return rule(kind, self.x(value), top, self.x(value), self.top + self.height, title, dotted)

    def horizontal(self, kind: str, value: float, title: str = "", dotted: bool = False) -> str:
        return rule(
            kind, self.left, self.y(value), self.left + self.width, self.y(value), title, dotted
        )

    def x_tick(self, value: float, unit: str = "") -> str:
        label = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        return text(self.x(value), self.top + self.height + 18, label + unit, "middle")

    def y_axis(self, percent: bool = False) -> Iterator[str]:
        factor, sign = (100, " %") if percent else (1, "")
        if self.log:
            first, last = math.floor(self.y0), math.ceil(self.y1)
            marks = [
                10.0**e * m
                for e in range(first, last + 1)
                for m in ((1,) if last - first > 3 else (1, 2, 5))
            ]
            marks = [mark for mark in marks if self.y0 <= math.log10(mark) <= self.y1]
        else:
            marks = ticks(self.y0, self.y1, 6)
        write = "{:g}".format if self.log else tick_labels([mark * factor for mark in marks])
        for mark in marks:
            yield self.horizontal("grid", mark)
            yield text(self.left - 7, self.y(mark) + 4, write(mark * factor) + sign, "end")


def tag(name: str, inside: str = "", /, **attributes: Any) -> str:
    """An SVG element. Floats are rounded to a tenth of a pixel, empty attributes are left out."""
    texts = {
        key: f"{value:.1f}" if isinstance(value, float) else str(value)
        for key, value in attributes.items()
    }
    written = "".join(
        f' {key.strip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in texts.items()
        if value
    )
    return f"<{name}{written}>{inside}</{name}>"


def text(x: float, y: float, content: str, anchor: str = "", kind: str = "", **more: Any) -> str:
    if not content:
        return ""
    return tag(
        "text", escape(content), class_=kind, x=float(x), y=float(y), text_anchor=anchor, **more
    )


def rule(
    kind: str, x1: float, y1: float, x2: float, y2: float, title: str = "", dotted: bool = False
) -> str:
    inside = tag("title", escape(title)) if title else ""
    dashes = "2 3" if dotted else ""
    return tag(
        "line",
        inside,
        class_=kind,
        x1=float(x1),
        y1=float(y1),
        x2=float(x2),
        y2=float(y2),
        stroke_dasharray=dashes,
    )


def curve(kind: str, path: str, **more: Any) -> str:
    return tag("path", class_=f"curve {kind}", d=path, **more)


def svg(
    kind: str, title: str, width: float, height: float, parts: Sequence[str], /, **data: str
) -> str:
    inside = text(0, 13, title, kind="title") + "".join(parts)
    data = {f"data_{name}": value for name, value in data.items()}
    return tag(
        "svg",
        inside,
        class_=f"chart {kind}",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=title,
        **data,
    )


def legend(lines: Sequence[Line]) -> str:
    """The legend below the title."""
    parts, x = "", 0.0
    for line in lines:
        parts += rule(f"curve s{line.colour}{' dashed' * line.dashed}", x, 26, x + 16, 26)
        parts += text(x + 21, 30, line.label, kind="key")
        x += 37 + 6.1 * len(line.label)
    return parts


def line_chart(
    title: str,
    lines: Sequence[Line],
    style: LineStyle = LineStyle(),
    span: Array | None = None,
    marks: Sequence[tuple[float, str, str]] = (),
) -> str:
    """`span`: x values that the axis must cover; `marks`: x, what to show at the pointer, and a
    label."""
    lines, right, bottom = (
        [line for line in lines if len(line.x)],
        style.width - RIGHT,
        HEIGHT - BOTTOM,
    )
    chance = {line.chance: line.colour for line in reversed(lines) if line.chance is not None}
    numbers = np.concatenate([*(line.y[np.isfinite(line.y)] for line in lines), list(chance), []])
    log = style.log and len(numbers) > 0 and bool(numbers.min() > 0)
    steps = np.concatenate([np.zeros(0) if span is None else span, *(line.x for line in lines)])
    low, high = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 0.0)
    only, (low, high) = low == high, (low, high) if high > low else (low - 1, high + 1)
    area = PlotArea(low, high, *_y_range(numbers, style.floor, log), right - LEFT, log=log)
    x_ticks = [
        tick
        for tick in ticks(low, high, round(style.width / 80))
        if style.outline or tick == int(tick)
    ]
    parts = [legend(lines) if len(lines) > 1 or style.outline else ""]
    parts += [*area.y_axis(style.percent), *map(area.x_tick, [high - 1] if only else x_ticks)]
    parts += [text(LEFT - 7, HEIGHT - 8, style.x_label, "end"), text(right, 13, style.unit, "end")]
    for x, reading, label in marks:
        if low <= x <= high:
            at_end = area.x(x) > right - 52
            parts.append(area.vertical("axis", x, reading, dotted=True))
            parts.append(
                text(area.x(x) + (-4 if at_end else 4), TOP - 1, label, "end" if at_end else "")
            )
    for i, (value, colour) in enumerate(chance.items()):
        kind = f"level s{colour}" if len(chance) > 1 else "level axis"
        reading = f"{style.level} {value:.2%}" if style.percent else f"{style.level} {value:.3g}"
        parts += [
            area.horizontal(kind, value, reading),
            text(right, area.y(value) - 4, style.level * (i == 0), "end"),
        ]
    for line in lines:
        parts += _curve(line, area, style)
    parts.append(
        rule("cross", 0, TOP, 0, bottom) + '<g class="read"></g>'
    )  # the values at the pointer
    facts = {
        name: getattr(area, name)
        for name in ("x0", "x1", "y0", "y1", "left", "top", "width", "height")
    }
    facts |= {"log": int(log), "scale": 100 if style.percent else 1}
    data = {name: f"{value:.10g}" for name, value in facts.items()} | {"across": style.x_label}
    data["unit"] = " %" if style.percent else style.unit and f" {style.unit}"
    return svg(
        "lines wide" if style.width == WIDE else "lines", title, style.width, HEIGHT, parts, **data
    )


def _curve(line: Line, area: PlotArea, style: LineStyle) -> Iterator[str]:
    x, y = thinned(line.x, line.y)
    data = {"data_key": line.key, "data_label": line.label, "data_colour": str(line.colour)}
    path, kind, good = area.path(x, y), f"s{line.colour}{' dashed' * line.dashed}", np.isfinite(y)
    if style.outline:
        yield curve(f"data fill {kind}", path, **data)
    elif style.smooth and good.sum() > SMOOTHED_FROM:
        mean = 10 ** smoothed(np.log10(y)) if area.log else smoothed(y)
        yield curve(f"raw data s{line.colour}", path, **data) + curve(kind, area.path(x, mean))
    else:
        yield curve(f"data {kind}", path, **data)
        alone = good & ~np.r_[False, good[:-1]] & ~np.r_[good[1:], False]
        for a, b in zip(
            *(values[good if good.sum() <= 24 else alone] for values in (x, y)), strict=True
        ):
            yield tag("circle", class_=f"f{line.colour}", cx=area.x(a), cy=area.y(b), r=2.4)
    for a in line.x[~np.isfinite(line.y)][:200]:
        yield area.vertical("lost", a, "not finite", length=7)


def thinned(x: Array, y: Array, limit: int = MAX_POINTS) -> tuple[Array, Array]:
    """At most `limit` points: the lowest and the highest of each stretch, in their order."""
    if len(x) <= limit:
        return x, y
    length = -(-len(y) // (limit // 2))
    rows = np.pad(y.astype(float), (0, -len(y) % length), constant_values=np.nan).reshape(
        -1, length
    )
    good, starts = np.isfinite(rows), np.arange(len(rows)) * length
    lowest, highest = (
        np.where(good, rows, np.inf).argmin(1),
        np.where(good, rows, -np.inf).argmax(1),
    )
    kept = np.unique([starts + lowest, starts + highest])
    return x[kept], y[kept]


def smoothed(y: Array) -> Array:
    """The mean of the neighbours within a thirtieth of the curve; NaN where y is."""
    good = np.isfinite(y)
    window = np.ones(2 * max(1, len(y) // 60) + 1)
    weight, sums = (
        np.convolve(values, window, "same")
        for values in (good.astype(float), np.where(good, y, 0.0))
    )
    return np.where(good, sums / np.maximum(weight, 1), np.nan)


def _y_range(numbers: Array, floor: float | None, log: bool) -> tuple[float, float]:
    if not len(numbers):
        return 0.0, 1.0
    low, high = float(numbers.min()), float(numbers.max())
    if log:
        low, high = math.log10(low), math.log10(high)
    elif floor is not None:
        low = min(low, floor)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (low if not log and low == floor else low - room), high + room


def histogram(title: str, groups: Sequence[tuple[str, Array]], bins: int = 60) -> str:
    """The share of each group's numbers in each bin."""
    groups = [
        (label, values[np.isfinite(values)])
        for label, values in groups
        if np.isfinite(values).any()
    ]
    numbers = np.concatenate([values for _, values in groups]) if groups else np.zeros(1)
    low, high = float(numbers.min()), float(numbers.max())
    edges = (
        np.linspace(low, high, bins + 1)
        if high - low > 1e-9
        else np.linspace(low - 0.5, high + 0.5, bins + 1)
    )
    lines = []
    for i, (label, values) in enumerate(groups):
        shares = np.repeat(np.histogram(values, edges)[0] / len(values), 2)
        lines.append(
            Line(
                label,
                f"{label}, mean {values.mean():.2f}",
                np.repeat(edges, 2),
                np.r_[0, shares, 0],
                i,
            )
        )
    means = [(float(values.mean()), f"mean {values.mean():.3f}", "") for _, values in groups]
    return line_chart(
        title,
        lines,
        LineStyle(percent=True, floor=0, x_label="", outline=True, width=WIDE),
        edges,
        means,
    )


def rank_chart(title: str, counts_GV: Array) -> str:
    """The share of each code, largest first; dotted: all equal."""
    shares_GV = -np.sort(-counts_GV / np.maximum(counts_GV.sum(1, keepdims=True), 1), axis=1)
    codes = counts_GV.shape[1]
    edges, lines = np.repeat(np.arange(codes + 1.0), 2), []
    for g, share_V in enumerate(shares_GV):
        label = f"book {g + 1}: {int((share_V > 0).sum())} of {codes}"
        lines.append(
            Line(
                f"codebook {g + 1}",
                label,
                edges,
                np.r_[0, np.repeat(share_V, 2), 0],
                g % 5,
                chance=1 / codes,
            )
        )
    return line_chart(
        title, lines, LineStyle(percent=True, floor=0, x_label="", outline=True, level="all equal")
    )


def ecg_chart(
    title: str, mv_SLT: Array, leads: Sequence[str], fs_hz: float, step_mv: float = 2.0
) -> str:
    """Halves side by side; a lead that is all zeros is a grey line."""
    halves, rows, samples = mv_SLT.shape
    half_s, width, height = samples / fs_hz, ECG_WIDTH - LEFT - RIGHT, 26.0 * rows
    area = PlotArea(0, halves * half_s, -step_mv * (rows - 0.4), step_mv * 0.6, width, height)
    parts = [area.x_tick(tick, " s") for tick in ticks(0, halves * half_s, 10)]
    parts.append(text(0, 30, f"{step_mv:g} mV from lead to lead; grey: masked out"))
    parts += [area.vertical("axis", half_s * s, dotted=True) for s in range(1, halves)]
    for row in range(rows):
        level = -step_mv * row
        parts.append(text(LEFT - 8, area.y(level) + 4, leads[row], "end"))
        for s in range(halves):
            t, mv = thinned(np.arange(samples) / fs_hz + s * half_s, mv_SLT[s, row].astype(float))
            mv = np.clip(mv, -step_mv, step_mv)  # up to the lines of the neighbours
            kind, path = "s0" if mv.any() else "axis", area.path(t, mv + level)
            parts.append(tag("path", class_=kind, fill="none", stroke_width=".8", d=path))
    return svg("", title, ECG_WIDTH, TOP + BOTTOM + height, parts)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers within the range."""
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if (high - low) / (step * m) <= about)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_labels(values: Sequence[float]) -> Callable[[float], str]:
    """A format for numbers that are written below each other."""
    largest = max((abs(v) for v in values), default=0.0)
    if largest and (largest < 1e-3 or largest >= 1e6):
        return lambda v: (
            f"{v:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e") if v else "0"
        )
    digits = next(
        (d for d in range(6) if all(math.isclose(v, round(v, d), abs_tol=1e-9) for v in values)), 6
    )
    return lambda v: f"{v:,.{digits}f}"
