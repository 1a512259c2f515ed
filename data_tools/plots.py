"""Pictures to judge data by eye: one ECG on ECG paper, true to scale, and one overview of a whole dataset.

Arrays and counts come in, a matplotlib `Figure` goes out, `save` writes it; nothing here reads a dataset.

    python -m data_tools show DATASET --png FILE
"""

import math
import os
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from data_tools.record import ABBREVIATIONS, LEADS

DPI, MM_PER_INCH = 150, 25.4
MM_PER_S = 25.0
COLUMN_S, SHOWN_S = 2.5, 10.0
GAINS_MM_PER_MV = (10.0, 5.0)  # the standard one, and the one for traces that would leave the paper

# A4 landscape, so that a print at 100 % is to scale. The paper's own axes count millimetres from its lower left corner.
PAGE_MM, PAPER_MM, PAPER_AT_MM = (297.0, 210.0), (270.0, 175.0), (13.5, 13.0)
TRACE_X_MM = 15.0  # where second 0 lies; the calibration pulse stands left of it
ROWS_Y_MM = (140.0, 100.0, 60.0, 20.0)  # baselines: three rows of four leads, then the rhythm strip
FLAT_MV = 0.005  # less than this from end to end is no signal: one step of the usual converters

FONT = "DejaVu Sans"  # comes with matplotlib: the same picture everywhere
INK, GREY, PAPER, GRID_1_MM, GRID_5_MM = "#14141c", "#75757d", "#fffcfb", "#f8dcda", "#eeb0ad"
ROLE_COLOURS = ("#2f6690", "#db963a", "#b3d4e6", "#7d7d88", "#d9d9d4", "#3d2c4a")  # apart in lightness: any colour vision


def ecg_figure(mv: np.ndarray, fs_hz: float, title: str = "", caption: str = "", missing: Collection[str] = ()) -> Figure:
    """Twelve leads `mv` [12, n] in the order of LEADS: 3 x 4 columns of 2.5 s, contiguous in time, over a rhythm strip.

    Each lead is centred on its median, as AC-coupled carts do. NaN leaves a gap; a lead of nothing else is missing.
    """
    if mv.ndim != 2 or mv.shape[0] != len(LEADS) or mv.shape[1] < 2:
        raise ValueError(f"mv: expected [{len(LEADS)}, n >= 2] millivolts, got shape {mv.shape}")
    if not (math.isfinite(fs_hz) and fs_hz > 0):
        raise ValueError(f"fs_hz: expected a positive frequency, got {fs_hz}")
    if unknown := sorted(set(missing) - set(LEADS)):
        raise ValueError(f"missing: no such lead {unknown}; leads are {', '.join(LEADS)}")

    mv = np.array(mv[:, : math.ceil(SHOWN_S * fs_hz - 1e-9)], dtype=np.float64)
    mv[~np.isfinite(mv)] = np.nan
    absent = {lead for lead, row in zip(LEADS, mv, strict=True) if lead in missing or np.isnan(row).all()}
    shown = {lead: row - np.nanmedian(row) for lead, row in zip(LEADS, mv, strict=True) if lead not in absent}
    beating = {lead for lead, row in shown.items() if np.nanmax(row) - np.nanmin(row) > FLAT_MV}
    rhythm = next((lead for lead in ("II", *LEADS) if lead in beating), "II")

    # (lead, row, seconds from, seconds to): what is printed where
    cells = [(lead, i % 3, COLUMN_S * (i // 3), COLUMN_S * (i // 3 + 1)) for i, lead in enumerate(LEADS)]
    cells.append((rhythm, 3, 0.0, SHOWN_S))
    length_s = mv.shape[1] / fs_hz
    whole_s = max(1, math.floor(length_s / COLUMN_S + 1e-9)) * COLUMN_S
    # (place on the paper, time in the ECG) at which a column begins: those past a short ECG's end begin at its start again
    begins = {s: (s, s if s < length_s - 2 / fs_hz else s % whole_s) for _, _, s, _ in cells}

    def draw_at(gain: float) -> list[np.ndarray]:
        return [
            _trace_mm(shown.get(lead), fs_hz, gain, row, begins[start_s], end_s - start_s)
            for lead, row, start_s, end_s in cells
        ]

    gain = GAINS_MM_PER_MV[0]
    edges = (PAPER_MM[1], *ROWS_Y_MM, 0.0)  # a trace may reach into the next row, but not across that row's baseline
    traces, notes = draw_at(gain), []
    if any(_leaves(trace, edges[row + 2], edges[row]) for trace, (_, row, _, _) in zip(traces, cells, strict=True)):
        gain = GAINS_MM_PER_MV[1]
        traces = draw_at(gain)
        notes.append(f"half gain: too tall for {GAINS_MM_PER_MV[0]:g} mm/mV")
    if any(_leaves(trace, 0.0, PAPER_MM[1]) for trace in traces):
        notes.append("cut at the edge of the paper")
    if any(place_s != time_s for place_s, time_s in begins.values()):
        notes.append(f"{length_s:.3g} s long: its end is not the last column's")

    figure, axes = _paper()
    for row_y in ROWS_Y_MM:
        pulse = row_y + gain * np.array([0, 0, 1, 1, 0, 0])
        axes.plot((2, 5, 5, 10, 10, 13), pulse, color=INK, lw=0.9, solid_joinstyle="miter", label="calibration")
    for (lead, row, start_s, end_s), trace in zip(cells, traces, strict=True):
        end_s = min(end_s, length_s + start_s - begins[start_s][1])
        _draw_lead(axes, lead, row, start_s, end_s, trace if lead in shown else None)
        x, y = TRACE_X_MM + MM_PER_S * start_s, ROWS_Y_MM[row]
        _write(axes, x + 1.2, _free_y(traces, x, y, lead), lead, 10, weight="bold", label=f"name {lead}", zorder=4)
    _margins(figure, title, caption, f"{MM_PER_S:g} mm/s   {gain:g} mm/mV   {fs_hz:g} Hz", "   ".join(notes))
    return figure


def _trace_mm(
    mv: np.ndarray | None, fs_hz: float, gain: float, row: int, starts_s: tuple[float, float], dur_s: float
) -> np.ndarray:
    """[points, (x, y)] in mm, from (place on the paper, time in the ECG). The sample on a column's right edge is its last point
    and the next one's first."""
    if mv is None:
        return np.empty((0, 2))
    place_s, start_s = starts_s
    first, last = math.ceil(start_s * fs_hz - 1e-9), math.floor((start_s + dur_s) * fs_hz + 1e-9)
    at = np.arange(first, min(last + 1, len(mv)))
    return np.stack([TRACE_X_MM + MM_PER_S * (at / fs_hz - start_s + place_s), ROWS_Y_MM[row] + gain * mv[at]], axis=1)


def _leaves(trace: np.ndarray, floor: float, ceiling: float) -> bool:
    return bool(np.any(trace[:, 1] < floor) or np.any(trace[:, 1] > ceiling))


def _draw_lead(axes: Axes, lead: str, row: int, start_s: float, end_s: float, trace: np.ndarray | None) -> None:
    x, end_x, y = TRACE_X_MM + MM_PER_S * start_s, TRACE_X_MM + MM_PER_S * end_s, ROWS_Y_MM[row]
    if start_s > 0:
        axes.plot([x, x], [y - 4, y + 4], color=INK, lw=0.7, label="separator")
    if trace is None:
        axes.plot([x, end_x], [y, y], color=GREY, lw=0.9, ls=(0, (5, 4)), label=f"missing {lead}")
        _write(axes, (x + end_x) / 2, y + 1.5, "missing", 9, color=GREY, style="italic", ha="center")
    else:
        axes.plot(trace[:, 0], trace[:, 1], color=INK, lw=0.9, solid_joinstyle="round", zorder=3, label=f"trace {lead}")


def _free_y(traces: list[np.ndarray], x: float, baseline: float, name: str) -> float:
    """Where a lead's name stands clear of every trace: the usual place if it can, else the next free one."""
    width, height, usual = 2.2 + sum(1.5 if letter == "I" else 2.5 for letter in name), 3.2, 6.0
    near = [trace[(trace[:, 0] >= x - 0.5) & (trace[:, 0] <= x + width), 1] for trace in traces]
    low = np.concatenate([np.minimum(y[:-1], y[1:]) for y in near])
    high = np.concatenate([np.maximum(y[:-1], y[1:]) for y in near])
    for offset in (usual, 8.0, 10.0, 12.0, 14.0, 17.0, 20.0, -8.0, -10.0, -12.0, -15.0, -18.0):
        y = baseline + offset
        if 0 < y < PAPER_MM[1] - height and not np.any((low < y + height + 0.8) & (high > y - 0.8)):
            return y
    return baseline + usual


def _paper() -> tuple[Figure, Axes]:
    """An empty sheet, and its axes in millimetres."""
    (page_w, page_h), (w, h), (left, bottom) = PAGE_MM, PAPER_MM, PAPER_AT_MM
    figure = Figure(figsize=(page_w / MM_PER_INCH, page_h / MM_PER_INCH), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((left / page_w, bottom / page_h, w / page_w, h / page_h), facecolor=PAPER)
    axes.set(xlim=(0, w), ylim=(0, h), xticks=[], yticks=[], autoscale_on=False)
    for step, colour, lw in ((1, GRID_1_MM, 0.35), (5, GRID_5_MM, 0.6)):
        lines = [((x, 0.0), (x, h)) for x in np.arange(0, w + 1, step)]
        lines += [((0.0, y), (w, y)) for y in np.arange(0, h + 1, step)]
        grid = LineCollection(lines, colors=colour, linewidths=lw, zorder=0.5, snap=True, label=f"grid {step} mm")
        axes.add_collection(grid, autolim=False)
    axes.spines[:].set(color=GRID_5_MM, linewidth=0.8)
    return figure, axes


def _margins(figure: Figure, title: str, caption: str, footer: str, notes: str) -> None:
    """The words round the paper; `footer` carries the scale."""
    (page_w, page_h), (w, h), (left, bottom) = PAGE_MM, PAPER_MM, PAPER_AT_MM
    x, right, footer_y = left / page_w, (left + w) / page_w, (bottom - 5.5) / page_h
    lines = [part for line in caption.splitlines() for part in textwrap.wrap(line, 125)]
    caption = "\n".join(lines[:2]) + (" …" if lines[2:] else "")
    _write(figure, x, (bottom + h + 12) / page_h, title[:80] + ("…" if title[80:] else ""), 13, weight="bold")
    _write(figure, x, (bottom + h + 9.5) / page_h, caption, 9, color=GREY, va="top", linespacing=1.25)
    _write(figure, x, footer_y, footer, 9.5, weight="bold" if "gain" in notes else "normal")
    _write(figure, right, footer_y, notes, 9, color=GREY, ha="right")


def _write(where: Figure | Axes, x: float, y: float, text: str, size: float, color: str = INK, **style: object) -> None:
    where.text(x, y, text, fontsize=size, color=color, fontfamily=FONT, parse_math=False, **style)  # type: ignore[arg-type]


def summary_figure(counts: Mapping[str, Mapping[str, int]], class_counts: Mapping[str, int], title: str) -> Figure:
    """Left: crops of each source, by role (counts[source][role]). Right: crops that carry each diagnosis class."""
    slots = max(len(counts), len(ABBREVIATIONS) if class_counts else 0, 8)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03)
    figure = Figure(figsize=(12.5, 1.8 + 0.22 * slots), dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK, family=FONT, parse_math=False)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1.0))
    crops = sum(sum(roles.values()) for roles in counts.values())
    panels = ((left, f"{crops:,} crops by source and role"), (right, "crops that carry each diagnosis class"))
    for axes, panel in panels:
        axes.set_title(panel, loc="left", fontsize=10, color=INK, family=FONT)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GREY)
        axes.tick_params(axis="x", which="both", colors=GREY, labelsize=8, labelfontfamily=FONT)
        axes.tick_params(axis="y", length=0, labelcolor=INK, labelsize=9, labelfontfamily=FONT)
        axes.grid(axis="x", color="#e6e6ea", linewidth=0.6)
        axes.set_axisbelow(True)
    _draw_sources(left, counts, slots)
    _draw_classes(right, class_counts)
    return figure


def _draw_sources(axes: Axes, counts: Mapping[str, Mapping[str, int]], slots: int) -> None:
    totals = {source: sum(roles.values()) for source, roles in counts.items()}
    order = sorted(totals, key=lambda source: (-totals[source], source))
    done = np.zeros(len(order))
    for i, role in enumerate(dict.fromkeys(role for roles in counts.values() for role in roles)):
        part = np.array([counts[source].get(role, 0) for source in order])
        colour, label = ROLE_COLOURS[i % len(ROLE_COLOURS)], f"{role}  {part.sum():,}"
        axes.barh(range(len(order)), part, 0.68, left=done, color=colour, label=label)
        done += part
    axes.set_xlim(0, max([1, *totals.values()]) * 1.14)
    _finish_bars(axes, order, [totals[source] for source in order], max(len(order), 0.55 * slots))
    if done.any():  # under the axis, where no bar can be
        at, font = (-0.01, -1.1 / slots), {"family": FONT, "size": 9}
        axes.legend(loc="upper left", bbox_to_anchor=at, ncols=4, frameon=False, prop=font, borderaxespad=0)


def _draw_classes(axes: Axes, class_counts: Mapping[str, int]) -> None:
    if not class_counts:
        axes.set_axis_off()
        _write(axes, 0.5, 0.5, "no diagnosis labels", 10, color=GREY, style="italic", ha="center", va="center")
        return
    full = dict.fromkeys(ABBREVIATIONS, 0) | dict(class_counts)
    order = sorted(full, key=lambda name: (-full[name], name))
    least, most = min((n for n in full.values() if n > 0), default=1), max(1, *full.values())
    span, start = most / least, 0.0
    if span > 50:
        start = least / 2
        axes.set_xscale("log")
        axes.set_xlabel("crops, logarithmic scale", fontsize=8, color=GREY, family=FONT)
    widths = [max(full[name] - start, 0) for name in order]
    axes.barh(range(len(order)), widths, 0.68, left=start, color=ROLE_COLOURS[0])
    axes.set_xlim(start, most * (span**0.14 if start else 1.14))
    _finish_bars(axes, order, [full[name] for name in order], len(order))


def _finish_bars(axes: Axes, names: list[str], values: list[int], slots: float) -> None:
    """Names at the left, numbers behind the bars, ticks that are whole numbers."""
    axes.set_ylim(slots - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    for y, value in enumerate(values):
        at, colour = (max(value, axes.get_xlim()[0]), y), INK if value else GREY
        text = axes.annotate(f"{value:,}", at, (4, 0), textcoords="offset points", va="center", color=colour)
        text.set(fontsize=8, fontfamily=FONT)
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("")


def kind_of(path: Path) -> str:
    """Of a picture, by its file's name."""
    kind = path.suffix[1:].lower() or "png"
    if kind not in FigureCanvasBase.get_supported_filetypes():
        raise OSError(f"{path}: no picture can be written as .{kind}: use .png, .svg or .pdf")
    return kind


def save(figure: Figure, path: str | os.PathLike[str], dpi: float = DPI) -> None:
    """Write the file whole or not at all, in the format of its suffix; the same figure gives the same bytes."""
    path = Path(path)
    kind = kind_of(path)
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # a user's savefig.bbox = tight would break the scale, svg ids are random without a salt
        with matplotlib.rc_context({"savefig.bbox": None, "svg.hashsalt": "omnilead"}), temporary.open("wb") as file:
            figure.savefig(file, format=kind, dpi=dpi, facecolor="white", metadata=undated.get(kind))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
