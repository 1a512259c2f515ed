"""Charts as inline SVG: numbers in, a string for an HTML page out, with nothing to load.

    line_chart("Loss", [Line("loss", "training", steps, values)])    curves over steps; what is not finite is a gap and a mark
    histogram("Similarity", [("positive pairs", values), ...])       shares of each group
    rank_chart("Code usage", counts_GV)                              how often each code was used, most used first
    ecg_chart("Sample 1", mv_SLT, names, fs_hz)                      leads under each other, on one scale

Colours, fonts and the reading at the pointer are the page's (engine.evaluation.page). Same numbers, same bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

Array = np.ndarray
WIDTH, HEIGHT = 384.0, 212.0
WIDE = 2 * WIDTH + 52.0  # as wide as two of them side by side: the page's gap and margins included
ECG_WIDTH = 588.0  # two to a row
LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 40.0, 26.0  # of the plot, within its chart
MOST_POINTS = 480  # of a curve: more than its pixels show
END = ' text-anchor="end"'
SMOOTHED_FROM = 60  # points; above it the mean of neighbours is drawn over them


@dataclass(frozen=True, eq=False)
class Line:
    key: str
    label: str
    x: Array
    y: Array  # as long as x; NaN or infinite where there is no number
    colour: int = 0
    dashed: bool = False
    chance: float | None = None  # what guessing gives


@dataclass(frozen=True)
class Look:
    """How a chart of curves is drawn."""

    unit: str = ""
    percent: bool = False  # shares, shown as per cent
    log: bool = False
    floor: float | None = None  # the axis reaches at least down to it
    smooth: bool = True
    across: str = "step"  # what the curves run over


@dataclass(frozen=True)
class Scale:
    """Where a chart's numbers lie on it."""

    x0: float
    x1: float
    y0: float
    y1: float
    width: float = WIDTH
    height: float = HEIGHT
    log: bool = False

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        at = (math.log10(value) if self.log else value) - self.y0
        return self.height - BOTTOM - at / (self.y1 - self.y0) * (self.height - TOP - BOTTOM)


def line_chart(
    title: str, lines: Sequence[Line], look: Look = Look(), span: Array | None = None, best: float | None = None
) -> str:
    """`span`: steps that the axis reaches over, whether or not these curves do; `best`: the one to mark."""
    lines = [line for line in lines if len(line.x)]
    numbers = np.concatenate([line.y[np.isfinite(line.y)] for line in lines]) if lines else np.zeros(0)
    chance = {line.chance: line.colour for line in reversed(lines) if line.chance is not None}  # alike: drawn once
    numbers = np.concatenate([numbers, list(chance)])
    log = look.log and len(numbers) > 0 and numbers.min() > 0
    steps = np.concatenate([np.zeros(0) if span is None else span, *(line.x for line in lines)])
    steps = steps if len(steps) else np.zeros(1)
    scale = Scale(*_x_range(steps), *_y_range(numbers, look.floor, log), log=log)
    parts = _y_axis(scale, look) + _x_axis(scale, steps, look.across)
    if best is not None and scale.x0 <= best <= scale.x1:
        at = scale.x(best)
        end = at > scale.width - 60
        parts.append(_rule("axis", (at, at), (TOP, HEIGHT - BOTTOM), f"best at step {best:,.0f}", dotted=True))
        parts.append(f'<text x="{at - 4 if end else at + 4:.1f}" y="{TOP - 1:g}"{END * end}>best</text>')
    parts += _levels(chance, scale, look.percent)
    for line in lines:
        parts += _curve(line, scale, look.smooth)
    facts = {
        "x0": scale.x0,
        "x1": scale.x1,
        "y0": scale.y0,
        "y1": scale.y1,
        "log": int(log),
        "scale": 100 if look.percent else 1,
    }
    facts |= {"left": LEFT, "top": TOP, "width": scale.width - LEFT - RIGHT, "height": HEIGHT - TOP - BOTTOM}
    data = "".join(f' data-{name}="{value:.10g}"' for name, value in facts.items())
    data += (
        f' data-across="{escape(look.across)}" data-unit="{escape(" %" if look.percent else look.unit and " " + look.unit)}"'
    )
    keys = _keys([(line.label, line.colour, line.dashed) for line in lines]) if len(lines) > 1 else ""
    read = _rule("cross", (0, 0), (TOP, HEIGHT - BOTTOM)) + '<g class="read"></g>'
    return _chart("lines", title, scale, [keys, *parts, read], data)


def _levels(chance: dict[float, int], scale: Scale, percent: bool) -> Iterator[str]:
    """A dotted line where guessing would be; in the colour of its curve, if there are several."""
    for at, (value, colour) in enumerate(chance.items()):
        told, y = f"chance {value:.2%}" if percent else f"chance {value:.3g}", scale.y(value)
        kind = f"level s{colour}" if len(chance) > 1 else "level axis"
        yield _rule(kind, (LEFT, scale.width - RIGHT), (y, y), told)
        if at == 0:
            yield f'<text x="{scale.width - RIGHT:g}" y="{y - 4:.1f}"{END}>chance</text>'


def _curve(line: Line, scale: Scale, smooth: bool) -> list[str]:
    x, y = thinned(line.x, line.y)
    at = f'data-key="{escape(line.key)}" data-label="{escape(line.label)}" data-colour="{line.colour}"'
    whole, dashed, good = _path(x, y, scale), " dashed" * line.dashed, np.isfinite(y)
    parts = []
    if smooth and good.sum() > SMOOTHED_FROM:
        mean = 10 ** smoothed(np.log10(y)) if scale.log else smoothed(y)
        parts.append(f'<path class="curve raw data s{line.colour}" {at} d="{whole}"/>')
        parts.append(f'<path class="curve s{line.colour}{dashed}" d="{_path(x, mean, scale)}"/>')
    else:
        parts.append(f'<path class="curve data s{line.colour}{dashed}" {at} d="{whole}"/>')
        alone = good & ~np.r_[False, good[:-1]] & ~np.r_[good[1:], False]
        marked = good if good.sum() <= 24 else alone
        parts += [
            f'<circle class="f{line.colour}" cx="{scale.x(a):.1f}" cy="{scale.y(b):.1f}" r="2.4"/>'
            for a, b in zip(x[marked], y[marked], strict=True)
        ]
    bottom = HEIGHT - BOTTOM
    lost = [scale.x(a) for a in line.x[~np.isfinite(line.y)][:200]]
    return parts + [_rule("lost", (a, a), (bottom - 7, bottom), "not finite") for a in lost]


def thinned(x: Array, y: Array) -> tuple[Array, Array]:
    """At most MOST_POINTS: of each stretch its lowest and its highest, in their order."""
    if len(x) <= MOST_POINTS:
        return x, y
    length = -(-len(y) // (MOST_POINTS // 2))
    rows = np.pad(y.astype(float), (0, -len(y) % length), constant_values=np.nan).reshape(-1, length)
    good, starts = np.isfinite(rows), np.arange(len(rows)) * length
    lowest, highest = np.where(good, rows, np.inf).argmin(1), np.where(good, rows, -np.inf).argmax(1)
    kept = np.unique([starts + lowest, starts + highest])
    return x[kept], y[kept]


def smoothed(y: Array) -> Array:
    """The mean of the neighbours within a thirtieth of the curve, NaN where it is."""
    good = np.isfinite(y)
    half = max(1, len(y) // 60)
    window = np.ones(2 * half + 1)
    weight = np.convolve(good.astype(float), window, "same")
    sums = np.convolve(np.where(good, y, 0.0), window, "same")
    return np.where(good, sums / np.maximum(weight, 1), np.nan)


def _path(x: Array, y: Array, scale: Scale) -> str:
    parts, pen = [], "M"
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if not math.isfinite(b):
            pen = "M"
            continue
        parts.append(f"{pen}{scale.x(a):.1f} {scale.y(b):.1f}")
        pen = "L"
    return "".join(parts)


def histogram(title: str, groups: Sequence[tuple[str, Array]], bins: int = 60) -> str:
    """Shares of each group's numbers, as outlines over one axis."""
    groups = [(label, values[np.isfinite(values)]) for label, values in groups]
    groups = [(label, values) for label, values in groups if len(values)]
    every = np.concatenate([values for _, values in groups]) if groups else np.zeros(1)
    low, high = float(every.min()), float(every.max())
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, bins + 1)
    shares = [np.histogram(values, edges)[0] / len(values) for _, values in groups]
    scale = Scale(low, high, 0, max([1e-9, *(float(share.max()) for share in shares)]) * 1.05, WIDE)
    parts = _y_axis(scale, Look(percent=True)) + [_tick_x(scale, tick) for tick in ticks(low, high, 7)]
    for i, ((label, values), share) in enumerate(zip(groups, shares, strict=True)):
        corners = [
            (scale.x(edge), scale.y(s)) for s, pair in zip(share, pairwise(edges.tolist()), strict=True) for edge in pair
        ]
        outline = "L".join(f"{a:.1f} {b:.1f}" for a, b in corners)
        floor = scale.y(0)
        parts.append(
            f'<path class="f{i}" opacity=".2" d="M{scale.x(low):.1f} {floor:.1f}L{outline}L{scale.x(high):.1f} {floor:.1f}Z"/>'
        )
        parts.append(f'<path class="curve s{i}" data-key="{escape(label)}" d="M{outline}"/>')
        mean = scale.x(float(values.mean()))
        parts.append(_rule(f"s{i}", (mean, mean), (TOP, floor), f"mean {values.mean():.3f}", dotted=True))
    keys = [(f"{label}, mean {values.mean():.2f}", i, False) for i, (label, values) in enumerate(groups)]
    return _chart("bins", title, scale, [_keys(keys), *parts])


def rank_chart(title: str, counts_GV: Array) -> str:
    """Each row's shares, largest first; a dotted line where all would be equal."""
    totals = np.maximum(counts_GV.sum(1, keepdims=True), 1)
    shares_GV = -np.sort(-counts_GV / totals, axis=1)
    codes = counts_GV.shape[1]
    scale = Scale(0, codes, 0, max(float(shares_GV.max()), 1.5 / codes) * 1.05)
    parts = _y_axis(scale, Look(percent=True)) + [_tick_x(scale, tick) for tick in ticks(0, codes, 7)]
    equal = scale.y(1 / codes)
    parts.append(_rule("axis", (LEFT, scale.width - RIGHT), (equal, equal), "all equal", dotted=True))
    keys = []
    for g, share_V in enumerate(shares_GV):
        colour = g % 5
        outline = "L".join(f"{scale.x(i + side):.1f} {scale.y(float(s)):.1f}" for i, s in enumerate(share_V) for side in (0, 1))
        parts.append(f'<path class="curve s{colour}" data-key="codebook {g + 1}" d="M{outline}"/>')
        keys.append((f"book {g + 1}: {int((counts_GV[g] > 0).sum())} of {codes}", colour, False))
    return _chart("bins", title, scale, [_keys(keys), *parts])


def ecg_chart(title: str, mv_SLT: Array, leads: Sequence[str], fs_hz: float, step_mv: float = 2.0) -> str:
    """Halves side by side; a lead that is all zeros is a grey line."""
    halves, rows, samples = mv_SLT.shape
    height, half_s = TOP + BOTTOM + 26.0 * rows, samples / fs_hz
    scale = Scale(0, halves * half_s, -step_mv * (rows - 0.4), step_mv * 0.6, ECG_WIDTH, height)
    parts = [_tick_x(scale, tick, " s") for tick in ticks(0, halves * half_s, 10)]
    parts.append(f'<text x="0" y="30">{step_mv:g} mV from lead to lead; grey: masked out</text>')
    seams = [scale.x(half_s * s) for s in range(1, halves)]
    parts += [_rule("axis", (seam, seam), (TOP, height - BOTTOM), dotted=True) for seam in seams]
    for row in range(rows):
        level = -step_mv * row
        parts.append(f'<text x="{LEFT - 8:g}" y="{scale.y(level) + 4:.1f}" text-anchor="end">{escape(leads[row])}</text>')
        for s in range(halves):
            t, mv = thinned(np.arange(samples) / fs_hz + s * half_s, mv_SLT[s, row].astype(float))
            mv = np.clip(mv, -step_mv, step_mv)  # as far as the neighbours' lines
            path, masked = _path(t, mv + level, scale), not mv.any()
            parts.append(f'<path fill="none" class="{"axis" if masked else "s0"}" stroke-width=".8" d="{path}"/>')
    return _chart("ecg", title, scale, parts)


def _chart(kind: str, title: str, scale: Scale, parts: Sequence[str], data: str = "") -> str:
    box, name = f'viewBox="0 0 {scale.width:g} {scale.height:g}"', escape(title)
    heading = f'<text class="title" x="0" y="13">{name}</text>'
    return f'<svg class="chart {kind}" {box} role="img" aria-label="{name}"{data}>{heading}{"".join(parts)}</svg>'


def _rule(kind: str, x: tuple[float, float], y: tuple[float, float], title: str = "", dotted: bool = False) -> str:
    at = f'x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}"'
    pattern, inside = ' stroke-dasharray="2 3"' * dotted, f"<title>{escape(title)}</title>" if title else ""
    return f'<line class="{kind}" {at}{pattern}>{inside}</line>'


def _keys(entries: Sequence[tuple[str, int, bool]]) -> str:
    """The names of the curves, under the title."""
    parts, x = [], 0.0
    for label, colour, dashed in entries:
        parts.append(_rule(f"curve s{colour}{' dashed' * dashed}", (x, x + 16), (26, 26)))
        parts.append(f'<text class="key" x="{x + 21:g}" y="30">{escape(label)}</text>')
        x += 37 + 6.1 * len(label)
    return "".join(parts)


def _x_range(steps: Array) -> tuple[float, float]:
    low, high = float(steps.min()), float(steps.max())
    return (low, high) if high > low else (low - 1, high + 1)


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


def _y_axis(scale: Scale, look: Look) -> list[str]:
    if scale.log:
        first, last = math.floor(scale.y0), math.ceil(scale.y1)
        marks = [10.0**e * m for e in range(first, last + 1) for m in ((1,) if last - first > 3 else (1, 2, 5))]
        marks = [m for m in marks if scale.y0 <= math.log10(m) <= scale.y1]
    else:
        marks = ticks(scale.y0, scale.y1, 6)
    times, sign = (100, " %") if look.percent else (1, "")
    write = labels([m * times for m in marks]) if not scale.log else "{:g}".format
    parts = []
    for mark in marks:
        y = scale.y(mark)
        parts.append(_rule("grid", (LEFT, scale.width - RIGHT), (y, y)))
        parts.append(f'<text x="{LEFT - 7:g}" y="{y + 4:.1f}" text-anchor="end">{write(mark * times)}{sign}</text>')
    if look.unit:
        parts.append(f'<text x="{scale.width - RIGHT:g}" y="13" text-anchor="end">{escape(look.unit)}</text>')
    return parts


def _x_axis(scale: Scale, steps: Array, across: str) -> list[str]:
    only = float(steps.min()) == float(steps.max())
    marks = [float(steps[0])] if only else [t for t in ticks(scale.x0, scale.x1, round(scale.width / 80)) if t == int(t)]
    name = f'<text x="{LEFT - 7:g}" y="{scale.height - 8:g}" text-anchor="end">{escape(across)}</text>'
    return [name, *(_tick_x(scale, mark) for mark in marks)]


def _tick_x(scale: Scale, mark: float, unit: str = "") -> str:
    text = f"{mark:,.0f}" if abs(mark) >= 1000 else f"{mark:.3g}"
    return f'<text x="{scale.x(mark):.1f}" y="{scale.height - 8:g}" text-anchor="middle">{text}{unit}</text>'


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers within the range."""
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if (high - low) / (step * m) <= about)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def labels(values: Sequence[float]) -> Callable[[float], str]:
    """How to write numbers that stand under each other."""
    largest = max((abs(v) for v in values), default=0.0)
    if largest and (largest < 1e-3 or largest >= 1e6):
        return lambda v: f"{v:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e") if v else "0"
    digits = next((d for d in range(6) if all(math.isclose(v, round(v, d), abs_tol=1e-9) for v in values)), 6)
    return lambda v: f"{v:,.{digits}f}"
