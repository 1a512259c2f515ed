"""What `omnilead show` draws and prints: an ECG on ECG paper, to scale; an overview of a dataset, as a
figure and as text (sources, roles, what was refused); and warnings.

    plot_ecg(dataset[7])                    # a crop on ECG paper; notebooks display it
    plot_ecg(dataset[7]).savefig("ecg.png")

`omnilead show DATASET|RECORD --png FILE` draws the same. matplotlib is imported only to draw.
"""

import os
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .dataset import Dataset, Ecg, flagged
from .dataset.rejects import FLAGS, REPAIRED, rejects_of
from .ecg.crops import HALF, IMPLAUSIBLE, MAX_UV
from .ecg.mean_beat import FEWEST, RATED, HeartRates
from .ecg.record import ABBREVIATIONS, CLASS_OF, LEADS, real_source
from .ecg.record_tables import doubtful_patients
from .ecg.resampling import FS_HZ
from .io.errors import MISSING_FILE, DatasetError
from .io.storage import replaced
from .sharding.finishing import owners_of, records_of, value_counts
from .sharding.roles import PAPER_SOURCES, Records, RoleSources
from .sources.base import missing_note

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
NAME_MM = 12.0  # from there a trace may rise beside its lead's name
FLAT_MV = 0.005  # a lead that varies less has no signal; one step of usual converters

FONT = "DejaVu Sans"  # comes with matplotlib, so figures look the same everywhere
INK, GREY, PAPER, GRID_1_MM, GRID_5_MM = "#14141c", "#75757d", "#fffcfb", "#f8dcda", "#eeb0ad"
# Differ in lightness, for any colour vision
ROLE_COLOURS = ("#2f6690", "#db963a", "#b3d4e6", "#7d7d88", "#d9d9d4", "#3d2c4a")

# Flags that a few crops of a source may have; above this share, what to ask
DOUBTS = {
    "saturated": (0.01, f"exceed {MAX_UV // 1000} mV: is its unit"),
    "zeros": (0, "are zero in all leads for half a second or more: is that"),
    "einthoven": (0.5, "have limb leads that contradict each other: are its leads and layout"),
}
# Numbers of 5 s segments in Oh et al. 2022, section 5.1. They split by segment and exclude nothing:
# see `--plan paper-split`
PAPER_ROLES = {
    "pretrain": 189_051,
    "dx train": 32_640,
    "dx valid": 4_079,
    "dx test": 4_079,
    "id train": 147_444,
    "id valid": 17_670,
    "id gallery": 2_127,
    "id probe": 2_127,
}
# Their six databases and the numbers of records in the Challenge's release
PAPER_SETS = {
    "chapman_shaoxing": 10_247,
    "cpsc_2018": 6_877,
    "cpsc_2018_extra": 3_453,
    "georgia": 10_344,
    "ningbo": 34_905,
    "ptb-xl": 21_837,
}


def plot_ecg(ecg: Ecg) -> "Figure":
    """A figure of a crop's twelve leads on ECG paper, to scale; notebooks display it."""
    title = f"{ecg.source}/{ecg.record}, from {ecg.start_s:g} s"
    caption = caption_of(ecg.age, ecg.sex, ecg.dx)
    caption = f"{computed(ecg.signal_uv, ecg.halves, ecg.missing_leads)}. {caption}"
    if ecg.flags:  # first, because a long caption is cut
        caption = f"flagged: {', '.join(ecg.flags)}. {caption}"
    return ecg_figure(ecg.signal_uv, ecg.halves, title, caption, ecg.missing_leads)


def computed(signal_uv: np.ndarray, halves: int, missing: Collection[str]) -> str:
    """Heart rate and electrical axis of a crop, or why there are none."""
    # 0.14 CPU-s, which the notes of `shard` need not wait for
    from .ecg.mean_beat import rate_and_axis

    mv = signal_uv[:, : HALF * halves] / 1000
    return f"{rate_and_axis(mv, missing)} (computed, not a diagnosis)"


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
    """A page with a crop [12, 5000] on ECG paper."""
    (page_w, page_h), (w, h), (left, bottom) = PAGE_MM, PAPER_MM, PAPER_AT_MM
    figure = _figure((page_w / MM_PER_INCH, page_h / MM_PER_INCH))
    place = (left / page_w, bottom / page_h, w / page_w, h / page_h)
    axes = figure.add_axes(place, facecolor=PAPER)
    draw_grid(axes, 1, GRID_1_MM, 0.35)
    draw_grid(axes, 5, GRID_5_MM, 0.6)
    axes.spines[:].set(color=GRID_5_MM, linewidth=0.8)
    scale, notes = draw_ecg(axes, signal_uv, halves, missing)
    _margins(figure, title, caption, scale, notes)
    return figure


def draw_ecg(
    axes: "Axes", signal_uv: np.ndarray, halves: int, missing: Collection[str] = ()
) -> tuple[str, str]:
    """Draw a crop: 3 rows of 4 leads, 2.5 s each and contiguous in time, and a rhythm strip. The
    axes become PAPER_MM large. Returns the scale, and notes on what is drawn otherwise.

    Each lead is centred on its median, as AC-coupled carts do. A crop of 5 s is drawn again in
    the last two columns."""
    mv = signal_uv[:, : HALF * halves] / 1000.0
    length_s = mv.shape[1] / FS_HZ
    shown = {}
    for lead, values in zip(LEADS, mv, strict=True):
        if lead not in missing:
            shown[lead] = values - np.median(values)
    cells = _cells(shown, length_s)
    notes = []
    for gain in GAINS_MM_PER_MV:
        traces = [_trace_mm(shown, cell, length_s, gain) for cell in cells]
        if not any(map(_crosses_a_row, cells, traces)):
            break
    if gain != GAINS_MM_PER_MV[0]:
        notes.append(f"half gain: too tall for {GAINS_MM_PER_MV[0]:g} mm/mV")
    if any(_leaves(trace, 0.0, PAPER_MM[1]) for trace in traces):
        notes.append("cut at the edge of the paper")
    if halves == 1:
        notes.append(f"{length_s:g} s long: its end is not the last column's")

    width, height = PAPER_MM
    axes.set(xlim=(0, width), ylim=(0, height), xticks=[], yticks=[], autoscale_on=False)
    _draw_pulses(axes, gain)
    for cell, trace in zip(cells, traces, strict=True):
        _draw_lead(axes, cell, trace if cell.lead in shown else None)
    return f"{MM_PER_S:g} mm/s   {gain:g} mm/mV   {FS_HZ:g} Hz", "   ".join(notes)


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
    for row_y in ROWS_Y_MM:
        pulse = row_y + gain * np.array([0, 0, 1, 1, 0, 0])
        axes.plot(x, pulse, color=INK, lw=0.9, solid_joinstyle="miter", label="calibration")


def caption_of(age: float | None, sex: str | None, dx: Sequence[str]) -> str:
    names = [ABBREVIATIONS[CLASS_OF[code]] if code in CLASS_OF else code for code in dx]
    return ", ".join(filter(None, ["" if age is None else f"{age:.0f} years", sex, *names]))


def _leaves(trace: np.ndarray, floor: float, ceiling: float) -> bool:
    y = trace[:, 1]
    return bool(np.any((y < floor) | (y > ceiling)))


def _crosses_a_row(cell: _Cell, trace: np.ndarray) -> bool:
    """A trace may reach into the next row, but not cross its baseline."""
    edges = (PAPER_MM[1], *ROWS_Y_MM, 0.0)
    return _leaves(trace, edges[cell.row + 2], edges[cell.row])


def _draw_lead(axes: "Axes", cell: _Cell, trace: np.ndarray | None) -> None:
    lead, y = cell.lead, ROWS_Y_MM[cell.row]
    x = TRACE_X_MM + MM_PER_S * cell.start_s
    end_x = TRACE_X_MM + MM_PER_S * cell.end_s
    name_y = y + 6
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
            gid="trace",
        )
        below = trace[trace[:, 0] < x + NAME_MM, 1]  # of the lead's name
        name_y = min(max(name_y, below.max(initial=y) + 2), PAPER_MM[1] - 5)
    # under the traces
    _write(axes, x + 1.2, name_y, lead, 10, weight="bold", label=f"name {lead}", zorder=2)


def draw_grid(axes: "Axes", step: float, colour: str, lw: float) -> None:
    """Lines `step` mm apart, as one path: it makes small files."""
    width, height = PAPER_MM
    gap = (np.nan, np.nan)
    lines = [[(x, 0.0), (x, height), gap] for x in np.arange(0, width + 1, step)]
    lines += [[(0.0, y), (width, y), gap] for y in np.arange(0, height + 1, step)]
    x, y = np.concatenate(lines).T
    axes.plot(x, y, color=colour, lw=lw, zorder=0.5, snap=True, label=f"grid {step:g} mm")


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
    caption = "\n".join(textwrap.wrap(caption, 125, max_lines=2))
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
    table = dataset.table(["source", "pretrain", "dx_role", "id_role"]).to_pydict()
    labels = dataset.labels.sum(axis=0).tolist()
    counts: dict[str, Counter[str]] = {}
    for source, pretrain, dx, identity in zip(*table.values(), strict=True):
        role = "pre-training" if pretrain else "kept out"
        if dx in ("valid", "test"):
            role = f"diagnosis {dx}"
        if identity in ("gallery", "probe"):
            role = "gallery or probe"
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

    slots = max(len(counts), len(ABBREVIATIONS) if class_counts else 8)
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
    titles = {left: f"{total:,} crops by source and role", right: "crops with each diagnosis class"}
    for axes, words in titles.items():
        axes.set_title(words, loc="left", fontsize=10, color=INK, family=FONT)
    _draw_bars(left, counts, max(len(counts), 0.55 * slots))
    if total:  # below the axis, where there are no bars
        below, font = (-0.01, -1.1 / slots), {"family": FONT, "size": 9}
        left.legend(
            loc="upper left",
            bbox_to_anchor=below,
            ncols=4,
            frameon=False,
            prop=font,
            borderaxespad=0,
        )
    if class_counts:
        classes = {name: {"": class_counts.get(name, 0)} for name in ABBREVIATIONS}
        _draw_bars(right, classes, len(classes), wide_range=True)
    else:  # bars of zeros would say that nobody is ill
        right.set_axis_off()
        right.text(0.5, 0.5, "no diagnosis labels", color=GREY, ha="center", va="center")
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


def describe(dataset: Dataset) -> str:
    """Describe sources, roles (of the paper's databases: compared with it), and what was refused
    and why."""
    meta = dataset.meta
    count = len(dataset.shards)
    megabytes = sum(shard["bytes"] for shard in dataset.shards) / 1e6
    shards = f"{count} tar shard{'s' * (count != 1)} of {megabytes:,.0f} MB in all"
    zarr = ", zarr copy" if "zarr" in meta["formats"] else ""
    lines = [
        f"{dataset.root.url}: {len(dataset):,} crops of 10 s, {shards}{zarr}",
        f"plan {meta['plan']}, seed {meta['seed']}, fingerprint {dataset.fingerprint[:16]}",
        "",
        *_source_lines(meta),
        "",
        *_role_lines(dataset),
        *_duplicate_lines(dataset),
        "",
    ]
    rejects = rejects_of(dataset)
    reasons = Counter(reason for _, _, reason, _ in rejects)
    example = {reason: f"{record} {detail}" for _, record, reason, detail in reversed(rejects)}
    repaired = sum(count for reason, count in reasons.items() if reason in REPAIRED)
    flagged_only = sum(count for reason, count in reasons.items() if reason in FLAGS) - repaired
    refused = reasons.total() - repaired - flagged_only
    counts = f"{refused:,} refused, {repaired:,} repaired, {flagged_only:,} flagged"
    nothing = "nothing was refused, repaired or flagged"
    lines.append(f"lines of rejects.csv: {counts}" if reasons else nothing)
    for reason, count in reasons.most_common():
        such_as = " ".join(example[reason].split())[:60]
        lines.append(f"  {reason:30}{count:8,}  such as {such_as}")
    return "\n".join(lines)


def _like_paper(meta: Mapping[str, Any]) -> bool:
    """Whether the paper's databases are all there: for others its counts mean nothing."""
    names = {real_source(source["name"]) for source in meta["sources"]}
    return meta["plan"] != "all" and names >= PAPER_SETS.keys()


def _source_lines(meta: Mapping[str, Any]) -> Iterator[str]:
    like_paper = _like_paper(meta)
    paper = f"{'the paper':>11}" if like_paper else ""
    counts = f"{'used':>10}{'refused':>9}{'crops':>10}{'dropped':>12}"
    yield f"{'source':22}{'records':>10}{paper}{counts}  licence"
    for source in meta["sources"]:
        name, records = source["name"], source["records"]
        paper = f"{PAPER_SETS.get(real_source(name), 0):11,}" if like_paper else ""
        counts = f"{records['used']:10,}{records['refused']:9,}{source['crops']:10,}"
        dropped = f"{source['dropped_s']:10,.0f} s"
        yield f"{name:22}{records['seen']:10,}{paper}{counts}{dropped}  {source['licence']}"


def _role_lines(dataset: Dataset) -> Iterator[str]:
    like_paper = _like_paper(dataset.meta)
    paper = f"{'the paper':>11}" if like_paper else ""
    yield f"{'role':22}{'crops':>10}{'5 s parts':>11}{paper}"
    if dataset.meta["plan"] == "paper-split":
        yield (
            "paper-split LEAKS: crops of one ECG are in train and test, as in the authors' code. "
            "For comparison only."
        )
    table = dataset.table(["halves", "pretrain", "dx_role", "id_role"])
    for name, segments in PAPER_ROLES.items():
        task, _, role = name.partition(" ")
        mask = pc.equal(table[f"{task}_role"], role).fill_null(False) if role else table["pretrain"]
        crops = pc.sum(mask).as_py() or 0
        parts = pc.sum(table["halves"].filter(mask)).as_py() or 0
        if crops or like_paper:
            paper = f"{segments:11,}" if like_paper else ""
            yield f"{name:22}{crops:10,}{parts:11,}{paper}"


def _duplicate_lines(dataset: Dataset) -> list[str]:
    records = records_of(dataset.table)
    _, waveform = np.unique(records.waveform, return_inverse=True)
    in_order = np.unique(np.stack([waveform, records.crop_record]), axis=1)
    records_with = np.bincount(in_order[0])
    copies = int((records_with[waveform] > 1).sum())
    if not copies:
        return []
    first = (np.cumsum(records_with) - records_with)[records_with > 1]  # in in_order[1]
    pairs = np.unique(in_order[1][np.stack([first, first + 1])], axis=1).T
    shown = [" and ".join(sorted(_key(records, record) for record in pair)) for pair in pairs[:3]]
    more = ", ..." * (len(pairs) > len(shown))
    return [
        "",
        f"{copies:,} crops have the same waveform as a crop of another record: {', '.join(shown)}"
        f"{more}; samples.parquet has the same `waveform` for them",
    ]


def _key(records: Records, record: int) -> str:
    """SOURCE/NAME"""
    return f"{records.source_names[records.source[record]]}/{records.names[record]}"


def _whose(without: pa.Table) -> str:
    table = "FILE"
    if any(real_source(name) == "ptb-xl" for name in without["source"].unique().to_pylist()):
        table = "ptbxl_database.csv"
    return f"--patients {table} names them"


def notes(dataset: Dataset) -> Iterator[str]:
    """Warnings about problems that would appear in later commands."""
    if dataset.meta["plan"] != "all":
        yield from _role_notes(dataset)
    missing: dict[str, list[str]] = {}
    for source, name, reason, _ in rejects_of(dataset):
        if reason == MISSING_FILE:
            missing.setdefault(source, []).append(name)
    for source, names in missing.items():
        yield f"{missing_note(source, names)} rejects.csv lists them"
    table = dataset.table(["source", "record", "patient", "flags"])
    records = len(table.group_by(["source", "record"]).aggregate([]))
    without = table.filter(pc.is_null(table["patient"]))
    if unknown := len(without.group_by(["source", "record"]).aggregate([])):
        yield (
            f"patients unknown for {unknown:,} of {records:,} records: split by record, scores may "
            f"be too high; {_whose(without)}"
        )
    if doubt := doubtful_patients(owners_of(dataset)):
        yield doubt
    for flag in RoleSources.from_meta(dataset.meta).leave_out:
        if not (count := int(flagged(table, [flag]).sum())):
            continue
        why = f"they have the flag {flag} (--leave-out-flags)"
        if flag == IMPLAUSIBLE:
            why = (
                "no heart has such an amplitude (`implausible amplitude` in rejects.csv); if the "
                "scale in the files is right, --leave-out-flags none includes them"
            )
        yield f"{count:,} crop{'s' * (count > 1)} left out of pre-training: {why}"
    crops = value_counts(table["source"])
    for flag, (share, what) in DOUBTS.items():
        of_flagged = table["source"].filter(pa.array(flagged(table, [flag])))
        for source, count in value_counts(of_flagged).items():
            if count > crops[source] * share:
                yield f"{count:,} of {crops[source]:,} crops of {source} {what} right?"
    yield from _heart_rates(dataset).doubts()


def _heart_rates(dataset: Dataset) -> HeartRates:
    rates = HeartRates()
    table = dataset.table(["source", "start_s"])
    for source, count in value_counts(table["source"]).items():
        if count < FEWEST:
            continue
        is_first = pc.and_(pc.equal(table["source"], source), pc.equal(table["start_s"], 0))
        for row in np.flatnonzero(is_first)[:RATED]:  # at random: crops are shuffled
            with suppress(DatasetError):  # a damaged crop, which whoever reads it all will name
                rates.add(source, dataset.read(row))
    return rates


def _role_notes(dataset: Dataset) -> Iterator[str]:
    chosen, roles = RoleSources.from_meta(dataset.meta), dataset.meta["roles"]
    empty = []
    for name in PAPER_ROLES:
        task, _, role = name.partition(" ")
        asked = getattr(chosen, task) != getattr(PAPER_SOURCES, task) or task == "pretrain"
        if not asked and not _like_paper(dataset.meta):
            continue  # which databases have this role by default is no concern of other data
        if not (role in roles[task] if role else roles[task]):
            empty.append(name)
    advice = {
        "pretrain": "--pretrain-sources names sources for pre-training",
        "dx": f"diagnosis roles are for records of {' or '.join(chosen.dx)}: --dx-sources names "
        "others",
        "id gallery": f"gallery and probe are for patients of {' or '.join(chosen.id)} with two "
        f"sessions, at most {chosen.id_share:g} of all: --id-sources and --id-share change that",
    }
    if empty:
        fitting = [
            text for role, text in advice.items() if any(name.startswith(role) for name in empty)
        ]
        yield f"no crop for {', '.join(empty)}: {'; '.join(fitting) or 'too few records'}"
    names = [source["name"] for source in dataset.meta["sources"] if source["crops"]]
    if left_out := [name for name in names if not chosen.pretrains(name)]:
        why = "not in the paper" if chosen.pretrain is None else "not in --pretrain-sources"
        yield (
            f"not for pre-training: {', '.join(left_out)} ({why}): --pretrain-sources all "
            "includes every source"
        )
    others = [name for name in names if chosen.pretrains(name) and name not in PAPER_SETS]
    if chosen.pretrain is None and others and PAPER_SETS.keys() & set(names):
        yield (
            f"for pre-training, but not in the paper: {', '.join(others)}: --pretrain-sources "
            "names the sources to use"
        )
