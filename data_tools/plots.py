"""Figures: an ECG on ECG paper, to scale, and an overview of a dataset.

    plot_ecg(dataset[7])                    # a crop on ECG paper; notebooks display it
    plot_ecg(dataset[7]).savefig("ecg.png")

`omnilead show DATASET|RECORD --png FILE` draws the same. matplotlib is imported only to draw.
"""

import os
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from omnilead.data_tools.dataset import Dataset, Ecg
from omnilead.data_tools.prepare import FS_HZ, HALF
from omnilead.data_tools.record import ABBREVIATIONS, CLASS_OF, LEADS
from omnilead.data_tools.storage import replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI, MM_PER_INCH = 150, 25.4
MM_PER_S = 25.0
COLUMN_S = 2.5
GAINS_MM_PER_MV = (10.0, 5.0)  # standard gain; half gain for traces that would leave the paper

# A4 landscape, so that a print at 100 % is to scale. The axes are in millimetres from the grid's
# lower left corner
PAGE_MM, PAPER_MM, PAPER_AT_MM = (297.0, 210.0), (270.0, 175.0), (13.5, 13.0)
TRACE_X_MM = 15.0  # x of second 0; the calibration pulse is to its left
ROWS_Y_MM = (140.0, 100.0, 60.0, 20.0)  # baselines: three rows of four leads, then the rhythm strip
FLAT_MV = 0.005  # a lead that varies less has no signal; one step of usual converters

FONT = "DejaVu Sans"  # comes with matplotlib, so figures look the same everywhere
INK, GREY, PAPER, GRID_1_MM, GRID_5_MM = "#14141c", "#75757d", "#fffcfb", "#f8dcda", "#eeb0ad"
ROLE_COLOURS = (
    "#2f6690",
    "#db963a",
    "#b3d4e6",
    "#7d7d88",
    "#d9d9d4",
    "#3d2c4a",
)  # differ in lightness, for any colour vision


def plot_ecg(ecg: Ecg) -> "Figure":
    """A figure of a crop's twelve leads on ECG paper, to scale; notebooks display it."""
    title = f"{ecg.source}/{ecg.record}, from {ecg.start_s:g} s"
    caption = caption_of(ecg.age, ecg.sex, ecg.dx)
    return ecg_figure(ecg.signal_uv, ecg.halves, title, caption, ecg.missing_leads)


class _Cell(NamedTuple):
    """A place of the printout and the part of a lead that is drawn there."""

    lead: str
    row: int
    start_s: float
    end_s: float


def ecg_figure(
    signal_uv: np.ndarray,
    halves: int,
    title: str = "",
    caption: str = "",
    missing: Collection[str] = (),
) -> "Figure":
    """Draw a crop [12, 5000]: 3 rows of 4 leads, 2.5 s each and contiguous in time, and a rhythm
    strip.

    Each lead is centred on its median, as AC-coupled carts do. A crop of 5 s is drawn again in
    the last two columns."""
    mv = signal_uv[:, : HALF * halves] / 1000.0
    length_s = mv.shape[1] / FS_HZ
    shown = {}
    for lead, values in zip(LEADS, mv, strict=True):
        if lead not in missing:
            shown[lead] = values - np.median(values)
    cells = _cells(shown, length_s)
    gain, notes = GAINS_MM_PER_MV[0], list[str]()
    traces = [_trace_mm(shown, cell, length_s, gain) for cell in cells]
    # A trace may reach into the next row, but not cross its baseline
    edges = (PAPER_MM[1], *ROWS_Y_MM, 0.0)
    if any(
        _leaves(trace, edges[cell.row + 2], edges[cell.row])
        for trace, cell in zip(traces, cells, strict=True)
    ):
        gain = GAINS_MM_PER_MV[1]
        traces = [_trace_mm(shown, cell, length_s, gain) for cell in cells]
        notes.append(f"half gain: too tall for {GAINS_MM_PER_MV[0]:g} mm/mV")
    if any(_leaves(trace, 0.0, PAPER_MM[1]) for trace in traces):
        notes.append("cut at the edge of the paper")
    if halves == 1:
        notes.append(f"{length_s:g} s long: its end is not the last column's")

    figure, axes = _paper()
    _draw_pulses(axes, gain)
    for cell, trace in zip(cells, traces, strict=True):
        _draw_lead(axes, cell, trace if cell.lead in shown else None)
    scale = f"{MM_PER_S:g} mm/s   {gain:g} mm/mV   {FS_HZ:g} Hz"
    _margins(figure, title, caption, scale, "   ".join(notes))
    return figure


def _cells(shown: Mapping[str, np.ndarray], length_s: float) -> list[_Cell]:
    """Four columns of three leads, and the rhythm strip: II, or the first lead with a signal."""
    cells = []
    for i, lead in enumerate(LEADS):
        column, row = divmod(i, 3)
        cells.append(_Cell(lead, row, COLUMN_S * column, COLUMN_S * (column + 1)))
    rhythm = "II"
    for lead in ("II", *LEADS):
        if lead in shown and np.ptp(shown[lead]) > FLAT_MV:
            rhythm = lead
            break
    cells.append(_Cell(rhythm, 3, 0.0, length_s))
    return cells


def _trace_mm(
    shown: Mapping[str, np.ndarray], cell: _Cell, length_s: float, gain: float
) -> np.ndarray:
    """[points, (x, y)]; a sample on the edge of two columns is in both."""
    first = round(cell.start_s % length_s * FS_HZ)
    last = first + round((cell.end_s - cell.start_s) * FS_HZ)
    mv = shown.get(cell.lead, np.empty(0))[first : last + 1]
    x = TRACE_X_MM + MM_PER_S * (cell.start_s + np.arange(len(mv)) / FS_HZ)
    return np.stack([x, ROWS_Y_MM[cell.row] + gain * mv], axis=1)


def _draw_pulses(axes: "Axes", gain: float) -> None:
    x = (2, 5, 5, 10, 10, 13)
    style = {"color": INK, "lw": 0.9, "solid_joinstyle": "miter", "label": "calibration"}
    for row_y in ROWS_Y_MM:
        pulse = row_y + gain * np.array([0, 0, 1, 1, 0, 0])
        axes.plot(x, pulse, **style)  # type: ignore[arg-type]


def caption_of(age: float | None, sex: str | None, dx: Sequence[str]) -> str:
    names = [ABBREVIATIONS[CLASS_OF[code]] if code in CLASS_OF else code for code in dx]
    return ", ".join(filter(None, ["" if age is None else f"{age:.0f} years", sex, *names]))


def _leaves(trace: np.ndarray, floor: float, ceiling: float) -> bool:
    return bool(np.any(trace[:, 1] < floor) or np.any(trace[:, 1] > ceiling))


def _draw_lead(axes: "Axes", cell: _Cell, trace: np.ndarray | None) -> None:
    from matplotlib.patheffects import withStroke

    lead, y = cell.lead, ROWS_Y_MM[cell.row]
    x = TRACE_X_MM + MM_PER_S * cell.start_s
    end_x = TRACE_X_MM + MM_PER_S * cell.end_s
    if cell.start_s > 0:
        axes.plot([x, x], [y - 4, y + 4], color=INK, lw=0.7, label="separator")
    if trace is None:
        axes.plot([x, end_x], [y, y], color=GREY, lw=0.9, ls=(0, (5, 4)), label=f"missing {lead}")
        _write(
            axes, (x + end_x) / 2, y + 1.5, "missing", 9, color=GREY, style="italic", ha="center"
        )
    else:
        axes.plot(
            trace[:, 0],
            trace[:, 1],
            color=INK,
            lw=0.9,
            solid_joinstyle="round",
            zorder=3,
            label=f"trace {lead}",
        )
    halo = [withStroke(linewidth=3, foreground=PAPER)]  # keeps the name legible on a trace
    _write(
        axes,
        x + 1.2,
        y + 6,
        lead,
        10,
        weight="bold",
        label=f"name {lead}",
        zorder=4,
        path_effects=halo,
    )


def _paper() -> "tuple[Figure, Axes]":
    """An empty page with ECG paper, and its axes in millimetres."""
    from matplotlib.collections import LineCollection

    (page_w, page_h), (w, h), (left, bottom) = PAGE_MM, PAPER_MM, PAPER_AT_MM
    figure = _figure((page_w / MM_PER_INCH, page_h / MM_PER_INCH))
    axes = figure.add_axes(
        (left / page_w, bottom / page_h, w / page_w, h / page_h), facecolor=PAPER
    )
    axes.set(xlim=(0, w), ylim=(0, h), xticks=[], yticks=[], autoscale_on=False)
    for step, colour, lw in ((1, GRID_1_MM, 0.35), (5, GRID_5_MM, 0.6)):
        lines = [((x, 0.0), (x, h)) for x in np.arange(0, w + 1, step)]
        lines += [((0.0, y), (w, y)) for y in np.arange(0, h + 1, step)]
        grid = LineCollection(
            lines, colors=colour, linewidths=lw, zorder=0.5, snap=True, label=f"grid {step} mm"
        )
        axes.add_collection(grid, autolim=False)
    axes.spines[:].set(color=GRID_5_MM, linewidth=0.8)
    return figure, axes


def _figure(size: tuple[float, float], **options: Any) -> "Figure":
    """An empty figure that notebooks display; pyplot's figures need `%matplotlib inline` for
    that."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=DPI, facecolor="white", **options)
    FigureCanvasAgg(figure)
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: "Figure") -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png", dpi=figure.dpi / 1.5)
    return file.getvalue()


def _margins(figure: "Figure", title: str, caption: str, scale: str, notes: str) -> None:
    """Write the text around the paper."""
    (page_w, page_h), (w, h), (left, bottom) = PAGE_MM, PAPER_MM, PAPER_AT_MM
    x, right, footer_y = left / page_w, (left + w) / page_w, (bottom - 5.5) / page_h
    lines = textwrap.wrap(caption, 125)
    caption = "\n".join(lines[:2]) + (" …" if lines[2:] else "")
    _write(
        figure,
        x,
        (bottom + h + 12) / page_h,
        title[:80] + ("…" if title[80:] else ""),
        13,
        weight="bold",
    )
    _write(
        figure, x, (bottom + h + 9.5) / page_h, caption, 9, color=GREY, va="top", linespacing=1.25
    )
    _write(figure, x, footer_y, scale, 9.5, weight="bold" if "gain" in notes else "normal")
    _write(figure, right, footer_y, notes, 9, color=GREY, ha="right")


def _write(
    where: "Figure | Axes",
    x: float,
    y: float,
    text: str,
    size: float,
    color: str = INK,
    **style: object,
) -> None:
    style |= {"fontsize": size, "color": color, "fontfamily": FONT, "parse_math": False}
    where.text(x, y, text, **style)  # type: ignore[arg-type]


def dataset_figure(dataset: Dataset) -> "Figure":
    table, labels = (
        dataset.table(["source", "pretrain", "dx_role", "id_role"]),
        dataset.labels.sum(axis=0).tolist(),
    )
    columns = (table[name].to_pylist() for name in ("source", "pretrain", "dx_role", "id_role"))
    counts: dict[str, Counter[str]] = {}
    for source, pretrain, dx, identity in zip(*columns, strict=True):
        role = (
            f"diagnosis {dx}"
            if dx in ("valid", "test")
            else "pre-training"
            if pretrain
            else "kept out"
        )
        role = "gallery or probe" if identity in ("gallery", "probe") else role
        counts.setdefault(source, Counter())[role] += 1
    classes = dict(zip(ABBREVIATIONS, labels, strict=True)) if any(labels) else {}
    return summary_figure(
        counts, classes, f"{len(dataset):,} crops of 10 s, plan {dataset.meta['plan']}"
    )


def summary_figure(
    counts: Mapping[str, Mapping[str, int]], class_counts: Mapping[str, int], title: str
) -> "Figure":
    """Left: number of crops by source and role (counts[source][role]). Right: number of crops with
    each diagnosis class."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    slots = max(len(counts), len(ABBREVIATIONS) if class_counts else 0, 8)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03)
    figure = _figure((12.5, 1.8 + 0.22 * slots), layout=layout)
    figure.suptitle(
        title,
        x=0.012,
        ha="left",
        fontsize=13,
        fontweight="bold",
        color=INK,
        family=FONT,
        parse_math=False,
    )
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1.0))
    total = sum(sum(roles.values()) for roles in counts.values())
    for axes, words in (
        (left, f"{total:,} crops by source and role"),
        (right, "crops with each diagnosis class"),
    ):
        axes.set_title(words, loc="left", fontsize=10, color=INK, family=FONT)
    _draw_bars(left, counts, max(len(counts), 0.55 * slots))
    if total:  # below the axis, where there are no bars
        at, font = (-0.01, -1.1 / slots), {"family": FONT, "size": 9}
        left.legend(
            loc="upper left", bbox_to_anchor=at, ncols=4, frameon=False, prop=font, borderaxespad=0
        )
    if class_counts:
        classes = {name: {"": class_counts.get(name, 0)} for name in ABBREVIATIONS}
        _draw_bars(right, classes, len(classes), wide_range=True)
    else:
        right.set_axis_off()
        _write(
            right,
            0.5,
            0.5,
            "no diagnosis labels",
            10,
            color=GREY,
            style="italic",
            ha="center",
            va="center",
        )
    return figure


def _draw_bars(
    axes: "Axes", counts: Mapping[str, Mapping[str, int]], slots: float, wide_range: bool = False
) -> None:
    """A stacked bar for each name, longest first, with its total after it. `wide_range`: use a
    logarithmic scale if the longest is more than 50 times the shortest."""
    totals = {name: sum(parts.values()) for name, parts in counts.items()}
    order = sorted(totals, key=lambda name: (-totals[name], name))
    known = [total for total in totals.values() if total] or [1]
    start = _scale_bars(axes, min(known), max(known), wide_range)
    left = np.full(len(order), start)
    parts = dict.fromkeys(part for parts in counts.values() for part in parts)
    rows = range(len(order))
    for part, colour in zip(parts, cycle(ROLE_COLOURS)):
        values = np.array([counts[name].get(part, 0) for name in order])
        width = np.maximum(values - start, 0)
        label = f"{part}  {values.sum():,}"
        bars = axes.barh(rows, width, 0.68, left=left, color=colour, label=label)
        left += width
    if parts:
        words = [f"{totals[name]:,}" for name in order]
        axes.bar_label(bars, words, padding=4, size=8, family=FONT, color=INK)
    axes.set_yticks(rows, order, parse_math=False)
    _style_bars(axes, slots)


def _scale_bars(axes: "Axes", lowest: int, highest: int, wide_range: bool) -> float:
    """Sets the scale, with room for the totals. Returns where the bars start."""
    from matplotlib.ticker import MaxNLocator

    if wide_range and highest / lowest > 50:
        start = lowest / 2
        axes.set_xscale("log")
        axes.set_xlim(start, highest * (highest / lowest) ** 0.14)
        axes.set_xlabel("crops, logarithmic scale", fontsize=8, color=GREY, family=FONT)
        return start
    axes.set_xlim(0, highest * 1.14)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return 0.0


def _style_bars(axes: "Axes", slots: float) -> None:
    axes.set_ylim(slots - 0.4, -0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(axis="x", which="both", colors=GREY, labelsize=8, labelfontfamily=FONT)
    axes.tick_params(axis="y", length=0, labelcolor=INK, labelsize=9, labelfontfamily=FONT)
    axes.grid(axis="x", color="#e6e6ea", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("")


def picture_kind(path: Path) -> str:
    from matplotlib.backend_bases import FigureCanvasBase

    kind = path.suffix[1:].lower() or "png"
    if kind not in FigureCanvasBase.get_supported_filetypes():
        raise OSError(f"{path}: .{kind} is not a picture format: use .png, .svg or .pdf")
    return kind


def save(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure in the format of the file's suffix, completely or not at all; the same figure
    gives the same bytes."""
    import matplotlib

    path = Path(path)
    kind = picture_kind(path)
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    # a user's setting savefig.bbox = tight would break the scale; without a salt, svg ids are
    # random
    style = matplotlib.rc_context({"savefig.bbox": None, "svg.hashsalt": "omnilead"})
    with replaced(path) as temporary, style, temporary.open("wb") as file:
        figure.savefig(file, format=kind, dpi=DPI, facecolor="white", metadata=undated.get(kind))
