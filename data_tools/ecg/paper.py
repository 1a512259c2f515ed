"""Draw an ECG on ECG paper, to scale.

    ecg_figure(signal_uv, halves, "a title")          # an A4 page, which notebooks display
    ecg_figure(signal_uv, halves).savefig("ecg.png")

matplotlib is imported only to draw.
"""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .crops import HALF
from .record import CLASS_ABBREVIATIONS, CLASS_OF_CODE, LEADS
from .resampling import FS_HZ

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI, MM_PER_INCH = 150, 25.4
MM_PER_S = 25.0
COLUMN_S = 2.5  # how much of a lead one column shows
GAINS_MM_PER_MV = (10.0, 5.0)  # the standard gain, and half of it for tall traces

# Sizes of the A4 page and of the ECG paper on it, and where the paper's lower left corner is, so that a
# print at 100 % is to scale. Positions below are in millimetres from that corner
PAGE_MM, PAPER_MM, PAPER_AT_MM = (297.0, 210.0), (270.0, 175.0), (13.5, 13.0)
TRACE_X_MM = 15.0  # x at which traces begin; the calibration pulse is left of it
# y of the baselines of three rows with four leads each, and of the rhythm strip
ROWS_Y_MM = (140.0, 100.0, 60.0, 20.0)
LEAD_NAME_WIDTH_MM = 12.0  # space for a lead's name, which is written above the trace there
# A lead that varies by no more than this, one step of usual converters, counts as a lead without a signal
FLAT_MV = 0.005

FONT = "DejaVu Sans"  # comes with matplotlib, so figures look the same everywhere
INK, GREY, PAPER, GRID_1_MM, GRID_5_MM = "#14141c", "#75757d", "#fffcfb", "#f8dcda", "#eeb0ad"


def rate_and_axis_text(signal_uv: np.ndarray, halves: int, missing: Collection[str]) -> str:
    """Returns the heart rate and electrical axis of a crop as text, or why there are none."""
    # Imported here, because the import takes 0.14 CPU-s and only this text needs it
    from .mean_beat import rate_and_axis

    mv = signal_uv[:, : HALF * halves] / 1000
    return f"{rate_and_axis(mv, missing)} (computed, not a diagnosis)"


class _Panel(NamedTuple):
    """The part of a lead that is drawn in one row of the paper: `lead` from `start_s` to `end_s`."""

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
    """Return an A4 page with a crop, [12, 5000] microvolts, drawn on ECG paper."""
    (page_w, page_h), (w, h), (left, bottom) = PAGE_MM, PAPER_MM, PAPER_AT_MM
    figure = new_figure((page_w / MM_PER_INCH, page_h / MM_PER_INCH))
    place = (left / page_w, bottom / page_h, w / page_w, h / page_h)
    axes = figure.add_axes(place, facecolor=PAPER)
    draw_grid(axes, 1, GRID_1_MM, 0.35)
    draw_grid(axes, 5, GRID_5_MM, 0.6)
    axes.spines[:].set(color=GRID_5_MM, linewidth=0.8)
    scale, notes = draw_ecg(axes, signal_uv, halves, missing)
    _write_margins(figure, title, caption, scale, notes)
    return figure


def draw_ecg(
    axes: "Axes", signal_uv: np.ndarray, halves: int, missing: Collection[str] = ()
) -> tuple[str, str]:
    """Draw a crop: 3 rows of 4 leads, 2.5 s each and contiguous in time, and a rhythm strip. The axes
    get the limits PAPER_MM. Return the scale as text, and notes on what differs from the usual drawing,
    such as half gain.

    Each lead is centred on its median, as AC-coupled carts do. Of a crop of 5 s, the last two columns
    show the same seconds as the first two."""
    mv = signal_uv[:, : HALF * halves] / 1000.0
    length_s = mv.shape[1] / FS_HZ
    shown = {}
    for lead, values in zip(LEADS, mv, strict=True):
        if lead not in missing:
            shown[lead] = values - np.median(values)
    panels = _lay_out_panels(shown, length_s)
    notes = []
    for gain in GAINS_MM_PER_MV:
        traces = [_trace_mm(shown, panel, length_s, gain) for panel in panels]
        if not any(map(_crosses_other_row, panels, traces)):
            break
    if gain != GAINS_MM_PER_MV[0]:
        notes.append(f"half gain: too tall for {GAINS_MM_PER_MV[0]:g} mm/mV")
    if any(_leaves_range(trace, 0.0, PAPER_MM[1]) for trace in traces):
        notes.append("cut at the edge of the paper")
    if halves == 1:
        notes.append(f"{length_s:g} s long: its end is not the last column's")

    width, height = PAPER_MM
    axes.set(xlim=(0, width), ylim=(0, height), xticks=[], yticks=[], autoscale_on=False)
    _draw_calibration_pulses(axes, gain)
    for panel, trace in zip(panels, traces, strict=True):
        _draw_lead(axes, panel, trace if panel.lead in shown else None)
    return f"{MM_PER_S:g} mm/s   {gain:g} mm/mV   {FS_HZ:g} Hz", "   ".join(notes)


def _lay_out_panels(shown: Mapping[str, np.ndarray], length_s: float) -> list[_Panel]:
    """Return the panels of four columns with three leads each, and of the rhythm strip, which shows lead
    II, or the first lead with a signal if II has none."""
    panels = []
    for i, lead in enumerate(LEADS):
        column, row = divmod(i, 3)
        panels.append(_Panel(lead, row, COLUMN_S * column, COLUMN_S * (column + 1)))
    rhythm = "II"
    for lead in ("II", *LEADS):
        if lead in shown and np.ptp(shown[lead]) > FLAT_MV:
            rhythm = lead
            break
    panels.append(_Panel(rhythm, 3, 0.0, length_s))
    return panels


def _trace_mm(
    shown: Mapping[str, np.ndarray], panel: _Panel, length_s: float, gain: float
) -> np.ndarray:
    """Return the points [samples, (x, y)] of a panel's trace. A sample on the edge between two columns is in
    both of their traces."""
    first = round(panel.start_s % length_s * FS_HZ)
    last = first + round((panel.end_s - panel.start_s) * FS_HZ)
    mv = shown.get(panel.lead, np.empty(0))[first : last + 1]
    x = TRACE_X_MM + MM_PER_S * (panel.start_s + np.arange(len(mv)) / FS_HZ)
    return np.stack([x, ROWS_Y_MM[panel.row] + gain * mv], axis=1)


def _draw_calibration_pulses(axes: "Axes", gain: float) -> None:
    x = (2, 5, 5, 10, 10, 13)
    for row_y in ROWS_Y_MM:
        pulse = row_y + gain * np.array([0, 0, 1, 1, 0, 0])
        axes.plot(x, pulse, color=INK, lw=0.9, solid_joinstyle="miter", label="calibration")


def patient_caption(age: float | None, sex: str | None, dx: Sequence[str]) -> str:
    """Return age, sex and diagnoses as text, leaving out what is unknown."""
    names = [
        CLASS_ABBREVIATIONS[CLASS_OF_CODE[code]] if code in CLASS_OF_CODE else code for code in dx
    ]
    return ", ".join(filter(None, ["" if age is None else f"{age:.0f} years", sex, *names]))


def _leaves_range(trace: np.ndarray, floor: float, ceiling: float) -> bool:
    """True if a point of a trace is below `floor` or above `ceiling`."""
    y = trace[:, 1]
    return bool(np.any((y < floor) | (y > ceiling)))


def _crosses_other_row(panel: _Panel, trace: np.ndarray) -> bool:
    """True if a trace crosses the baseline of the row above or below its own."""
    edges = (PAPER_MM[1], *ROWS_Y_MM, 0.0)
    return _leaves_range(trace, edges[panel.row + 2], edges[panel.row])


def _draw_lead(axes: "Axes", panel: _Panel, trace: np.ndarray | None) -> None:
    """Draw a panel with its trace and name; a dashed line if `trace` is None."""
    lead, y = panel.lead, ROWS_Y_MM[panel.row]
    x = TRACE_X_MM + MM_PER_S * panel.start_s
    end_x = TRACE_X_MM + MM_PER_S * panel.end_s
    name_y = y + 6
    if panel.start_s > 0:
        axes.plot([x, x], [y - 4, y + 4], color=INK, lw=0.7, label="separator")
    if trace is None:
        axes.plot([x, end_x], [y, y], color=GREY, lw=0.9, ls=(0, (5, 4)), label=f"missing {lead}")
        write_text(
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
            gid="trace",
        )
        below_name = trace[trace[:, 0] < x + LEAD_NAME_WIDTH_MM, 1]
        name_y = min(max(name_y, below_name.max(initial=y) + 2), PAPER_MM[1] - 5)
    # With a lower zorder than the traces, so that the name does not hide them
    write_text(axes, x + 1.2, name_y, lead, 10, weight="bold", label=f"name {lead}", zorder=2)


def draw_grid(axes: "Axes", step: float, colour: str, lw: float) -> None:
    """Draw a grid with lines `step` mm apart, as one path, because that makes small files."""
    width, height = PAPER_MM
    gap = (np.nan, np.nan)
    lines = [[(x, 0.0), (x, height), gap] for x in np.arange(0, width + 1, step)]
    lines += [[(0.0, y), (width, y), gap] for y in np.arange(0, height + 1, step)]
    x, y = np.concatenate(lines).T
    axes.plot(x, y, color=colour, lw=lw, zorder=0.5, snap=True, label=f"grid {step:g} mm")


def new_figure(size: tuple[float, float], **options: Any) -> "Figure":
    """Return an empty figure that notebooks display. A figure of pyplot would need `%matplotlib inline`
    to be displayed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=DPI, facecolor="white", **options)
    FigureCanvasAgg(figure)
    figure._repr_png_ = partial(png_bytes, figure)  # type: ignore[attr-defined]
    return figure


def png_bytes(figure: "Figure") -> bytes:
    """Return a figure as PNG, for notebooks. As SVG, an ECG would be more than twice as large."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=figure.dpi / 1.5)
    return file.getvalue()


def _write_margins(figure: "Figure", title: str, caption: str, scale: str, notes: str) -> None:
    """Write title and caption above the ECG paper, scale and notes below it."""
    (page_w, page_h), (w, h), (left, bottom) = PAGE_MM, PAPER_MM, PAPER_AT_MM
    x, right, footer_y = left / page_w, (left + w) / page_w, (bottom - 5.5) / page_h
    caption = "\n".join(textwrap.wrap(caption, 125, max_lines=2))
    write_text(
        figure,
        x,
        (bottom + h + 12) / page_h,
        title[:80] + ("…" if title[80:] else ""),
        13,
        weight="bold",
    )
    write_text(
        figure, x, (bottom + h + 9.5) / page_h, caption, 9, color=GREY, va="top", linespacing=1.25
    )
    write_text(figure, x, footer_y, scale, 9.5, weight="bold" if "gain" in notes else "normal")
    write_text(figure, right, footer_y, notes, 9, color=GREY, ha="right")


def write_text(
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
