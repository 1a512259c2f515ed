"""Charts of shares against shares, as inline SVG like engine.evaluation.charts: what an evaluation's page is made of.

trade_offs("AF", label_N, score_N)                 sensitivity and precision as the threshold falls, side by side
reliability(said, held, number, error)             do 30 % of what is called 30 % likely hold?
confusions(labels_NK, outputs_NK, names)           what is said of whom
"""

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from engine.evaluation.metrics import Array, counts, ranked

MOST_POINTS = 160
PAIR_WIDTH, PAIR_HEIGHT, SIDE = 300.0, 186.0, 120.0
CELL, NAMES, HEAD = 26.0, 62.0, 96.0
LEAST_SHOWN = 0.005


def trade_offs(title: str, label_N: Array, score_N: Array) -> str:
    """ROC and precision-recall curve; dotted: what guessing gives."""
    true, false = (np.append(0.0, part) for part in counts(label_N, *ranked(score_N)))
    positives, negatives = true[-1], false[-1]
    sensitivity, fallout = true / max(positives, 1), false / max(negatives, 1)
    precision = true[1:] / (true + false)[1:]
    auroc = float(np.trapezoid(sensitivity, fallout)) if positives and negatives else np.nan
    auprc = float((np.diff(sensitivity) * precision).sum()) if positives else np.nan
    base = positives / max(positives + negatives, 1)
    parts = [
        *_square(24, "sensitivity", "false alarms", f"area {auroc:.3f}"),
        _line("axis", 24, [0.0, 1.0], [0.0, 1.0], True),
        _line("curve s0", 24, *_thin(fallout, sensitivity)),
        *_square(176, "precision", "recall", f"area {auprc:.3f}"),
        _line("axis", 176, [0.0, 1.0], [base, base], True),
        _line("curve s1", 176, *_thin(np.append(0.0, sensitivity[1:]), np.append(precision[:1], precision))),
    ]
    count = f"{int(positives):,} of {int(positives + negatives):,}"
    parts.append(f'<text x="{PAIR_WIDTH:g}" y="13" text-anchor="end">{count}</text>')
    return _svg("lines-pair", title, PAIR_WIDTH, PAIR_HEIGHT, parts)


def reliability(said: Array, held: Array, number: Array, error: float) -> str:
    """Above: a dot for each tenth of the probabilities; below: how many there are, by the power of ten."""
    side, left, top, low = 312.0, 46.0, 46.0, 90.0
    parts = _square(left, "share that holds", "probability said", f"calibration error {error:.3f}", side, top)
    parts.append(_line("axis", left, [0.0, 1.0], [0.0, 1.0], True, side, top))
    there = number > 0
    parts.append(_line("curve s0", left, said[there], held[there], False, side, top))
    floor, most = top + side + 40 + low, max(math.ceil(math.log10(max(number.max(), 1)) + 1e-9), 1)
    step = side / len(number)
    for i in np.flatnonzero(there).tolist():
        told = f"<title>said {said[i]:.3f}, held {held[i]:.3f}, {int(number[i]):,} probabilities</title>"
        at = f'cx="{left + said[i] * side:.1f}" cy="{top + (1 - held[i]) * side:.1f}" r="4"'
        height = low * (math.log10(number[i]) + 0.15) / (most + 0.15)  # of a single one, a sliver
        box = f'x="{left + i * step + 1:.1f}" y="{floor - height:.1f}" width="{step - 2:.1f}" height="{height:.1f}"'
        parts.append(f'<circle class="f0" {at}>{told}</circle><rect class="f0" opacity=".35" {box}>{told}</rect>')
    parts += [f'<text x="{left - 5:g}" y="{floor:g}" text-anchor="end">1</text>']
    parts += [f'<text x="{left - 5:g}" y="{floor - low + 8:g}" text-anchor="end">{10**most:g}</text>']
    parts += [f'<text x="{left:g}" y="{floor + 14:g}">probabilities in each tenth (logarithm)</text>']
    return _svg("dots", "Reliability", left + side + 26, floor + 20, parts)


def confusions(labels_NK: Array, outputs_NK: Array, names: Sequence[str]) -> str:
    """Of the rows that have a class, the share for which it was put out (the diagonal: sensitivity), and for which another was
    put out that they do not have. Other diagnoses that they do have are no confusions, and left out."""
    share_KK = confusion_shares(labels_NK, outputs_NK)
    positives = labels_NK.sum(0)
    columns = [*names, "nothing"]
    told = "per cent of the rows with a diagnosis (row) of which one is said (column): blue rightly, brown wrongly or none"
    parts = [f'<text x="0" y="31">{told}</text>']
    for k, name in enumerate(columns):
        x, y = NAMES + CELL * (k + 0.5) + 3, HEAD - 6
        parts.append(f'<text transform="translate({x:g} {y:g}) rotate(-60)">{escape(name)}</text>')
    for j, name in enumerate(names):
        y, shown = HEAD + CELL * j, positives[j] > 0
        kind = "" if shown else ' opacity=".45"'
        parts.append(f'<text x="{NAMES - 6:g}" y="{y + CELL / 2 + 4:g}" text-anchor="end"{kind}>{escape(name)}</text>')
        parts += [_cell(j, k, share_KK[j, k], name, column, int(positives[j])) for k, column in enumerate(columns)]
    width, height = NAMES + CELL * len(columns) + 30, HEAD + CELL * len(names) + 4
    return _svg("cells", "What is said of whom", width, height, parts)


def confusion_shares(labels_NK: Array, outputs_NK: Array) -> Array:
    """[K, K + 1], the last column: nothing was put out at all. NaN where no row has the class."""
    labels, outputs = labels_NK.astype(np.float64), outputs_NK.astype(bool)
    wrong = labels.T @ (outputs & ~labels_NK.astype(bool))
    np.fill_diagonal(wrong, (labels * outputs).sum(0))
    silent = labels.T @ ~outputs.any(1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.column_stack([wrong, silent]) / labels.sum(0)[:, None])


def _cell(j: int, k: int, share: float, row: str, column: str, positives: int) -> str:
    at = f'x="{NAMES + CELL * k + 0.5:g}" y="{HEAD + CELL * j + 0.5:g}" width="{CELL - 1:g}" height="{CELL - 1:g}" rx="2"'
    empty = f'<rect class="none" opacity=".5" {at}/>'
    if not share >= LEAST_SHOWN:
        return empty
    told = f"<title>{escape(row)}: {escape(column)} said of {share:.1%} of {positives:,}</title>"
    colour = 0 if j == k else 1
    text = f'x="{NAMES + CELL * (k + 0.5):g}" y="{HEAD + CELL * (j + 0.5) + 3:g}" text-anchor="middle"'
    number = f'<text class="number" {text}>{100 * share:.0f}</text>' if share >= 0.095 else ""
    return f'{empty}<rect class="f{colour}" opacity="{0.1 + 0.75 * share:.2f}" {at}>{told}</rect>{number}'


def _square(left: float, up: str, across: str, note: str, side: float = SIDE, top: float = 46.0) -> list[str]:
    bottom = top + side
    box = f'<rect class="axis" fill="none" x="{left:g}" y="{top:g}" width="{side:g}" height="{side:g}"/>'
    texts = [(left, top - 6, "start", up), (left + side, bottom + 14, "end", across)]
    texts += [(left - 5, top + 8, "end", "1"), (left - 5, bottom, "end", "0"), (left, bottom + 14, "start", "0")]
    inside = f'<text class="key" x="{left + side:g}" y="{top - 6:g}" text-anchor="end">{escape(note)}</text>'
    written = [f'<text x="{x:g}" y="{y:g}" text-anchor="{side_}">{escape(text)}</text>' for x, y, side_, text in texts]
    half = [(left, left + side, top + side / 2, top + side / 2), (left + side / 2, left + side / 2, top, bottom)]
    rules = [f'<line class="grid" x1="{a:g}" x2="{b:g}" y1="{c:g}" y2="{d:g}"/>' for a, b, c, d in half]
    return [*rules, box, inside, *written]


def _line(kind: str, left: float, x: Array | list[float], y: Array | list[float], dotted: bool = False, *at: float) -> str:
    side, top = at or (SIDE, 46.0)
    points = "L".join(f"{left + a * side:.1f} {top + (1 - b) * side:.1f}" for a, b in zip(x, y, strict=True))
    pattern = ' stroke-dasharray="2 3"' * dotted
    return f'<path class="{kind}" fill="none"{pattern} d="M{points}"/>' if points else ""


def _thin(x: Array, y: Array) -> tuple[Array, Array]:
    """Points at about equal distances along the curve."""
    if len(x) <= MOST_POINTS:
        return x, y
    length = np.append(0.0, np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y))))
    kept = np.unique(np.searchsorted(length, np.linspace(0, length[-1], MOST_POINTS)).clip(0, len(x) - 1))
    return x[kept], y[kept]


def _svg(kind: str, title: str, width: float, height: float, parts: Sequence[str]) -> str:
    name = escape(title)
    heading = f'<text class="title" x="0" y="13">{name}</text>'
    box = f'viewBox="0 0 {width:g} {height:g}"'
    return f'<svg class="chart {kind}" {box} role="img" aria-label="{name}">{heading}{"".join(parts)}</svg>'
