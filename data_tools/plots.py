"""Draw and describe what `omnilead show` shows: an ECG on ECG paper, to scale; an overview of a dataset, as
a figure and as text (sources, roles, what was refused); and warnings about a dataset.

    dataset[7].plot().savefig("ecg.png")    # a crop on ECG paper; notebooks display dataset[7]

`omnilead show DATASET|RECORD --png FILE` draws the same. matplotlib is imported only to draw.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .dataset import Dataset, DatasetFacts, flag_mask
from .dataset.rejects import FLAG_REASONS, REPAIR_REASONS, read_rejects
from .ecg.crops import HALF, IMPLAUSIBLE, MAX_UV
from .ecg.mean_beat import MAX_RATED_ECGS, MIN_RATED_ECGS, HeartRates, heart_rate
from .ecg.paper import DPI, FONT, GREY, INK, new_figure, patient_caption
from .ecg.record import CLASS_ABBREVIATIONS, LEADS, real_source
from .ecg.record_tables import similar_ids_warning
from .ecg.resampling import FS_HZ
from .io.errors import MISSING_FILE, DatasetError
from .io.storage import replacing_file
from .sharding.finishing import patient_of_crops, read_records, value_counts
from .sharding.roles import PAPER_SOURCES, Records, RoleSources
from .sources.base import missing_note

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXAMPLES, EXAMPLE_LEADS = 6, ("I", "II", "V1", "V5")  # crops and leads in a dataset's figure
# The figure's histograms of heart rates and heights are of so many crops, because measuring one takes
# some hundredths of a second
MEASURED_CROPS = 100
# These colours differ in lightness, so that people with any colour vision can tell them apart
ROLE_COLOURS = ("#2f6690", "#db963a", "#b3d4e6", "#7d7d88", "#d9d9d4", "#3d2c4a")

# {flag: (share, text)} of flags that a few crops of a source may well have. If more than the share of a
# source's crops have the flag, a warning with the text asks whether the source was read rightly
DOUBTFUL_FLAGS = {
    "saturated": (0.01, f"exceed {MAX_UV // 1000} mV: is its unit"),
    "zeros": (0, "are zero in all leads for half a second or more: is that"),
    "einthoven": (0.5, "have limb leads that contradict each other: are its leads and layout"),
}
# The number of 5 s segments with each role in Oh et al. 2022, section 5.1. That paper splits by segment,
# not by patient, and excludes nothing: see `--plan paper-split`
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
# The six databases of that paper, with the number of records of each in the Challenge's release
PAPER_DATABASES = {
    "chapman_shaoxing": 10_247,
    "cpsc_2018": 6_877,
    "cpsc_2018_extra": 3_453,
    "georgia": 10_344,
    "ningbo": 34_905,
    "ptb-xl": 21_837,
}


def dataset_figure(dataset: Dataset) -> "Figure":
    """Returns a figure with six ECGs of a dataset; histograms of heart rate, height, age and sampling rate;
    and numbers of crops by source, flag and diagnosis."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = ["source", "pretrain", "dx_role", "id_role", "flags", "age", "fs_source_hz"]
    table = dataset.table(names)
    roles = roles_by_source(table)
    flags = value_counts(pc.list_flatten(table["flags"]))
    bars: dict[str, Mapping[str, Mapping[str, int]]] = {
        f"{len(dataset):,} crops by source and role": roles,
        "crops with each flag": {name: {"": count} for name, count in flags.items()},
        "crops with each diagnosis class": class_counts(dataset),
    }
    bars = {title: counts for title, counts in bars.items() if counts}
    slots = max([len(counts) for counts in bars.values()], default=1)
    bars_tall = 0.9 + 0.22 * slots
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03)
    figure = new_figure((12.5, 6.6 + bars_tall), layout=layout)
    title = f"{len(dataset):,} crops of 10 s, plan {dataset.facts.plan}"
    style: Any = {"x": 0.012, "ha": "left", "fontsize": 13, "fontweight": "bold", "color": INK}
    figure.suptitle(title, **style, family=FONT, parse_math=False)
    parts: Any = figure.subfigures(3, 1, height_ratios=(4.2, 2.0, bars_tall))
    ecgs, measured, counted = parts
    draw_examples(ecgs, dataset)
    draw_histograms(measured, dataset, table)
    panels = np.ravel(counted.subplots(1, len(bars), squeeze=False))
    for axes, (title, counts) in zip(panels, bars.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=10, color=INK, family=FONT)
        _draw_bars(axes, counts, max(len(counts), 0.55 * slots), wide_range=counts is not roles)
        if counts is roles:  # the legend of the roles goes below the axis, where it hides no bars
            font = {"family": FONT, "size": 9}
            below = (-0.01, -1.1 / slots)
            axes.legend(loc="upper left", bbox_to_anchor=below, ncols=4, frameon=False, prop=font)
    return figure


def roles_by_source(table: pa.Table) -> dict[str, Counter[str]]:
    """Count the crops of each role for each source."""
    counts: dict[str, Counter[str]] = {}
    columns = table.select(["source", "pretrain", "dx_role", "id_role"]).to_pydict()
    for source, pretrain, dx, identity in zip(*columns.values(), strict=True):
        role = "pre-training" if pretrain else "kept out"
        if dx in ("valid", "test"):
            role = f"diagnosis {dx}"
        if identity in ("gallery", "probe"):
            role = "gallery or probe"
        counts.setdefault(source, Counter())[role] += 1
    return counts


def class_counts(dataset: Dataset) -> dict[str, dict[str, int]]:
    """Returns {class: {"": number of crops}} for each diagnosis class that occurs in a dataset."""
    labels = dataset.labels.sum(axis=0).tolist()
    return {
        name: {"": count} for name, count in zip(CLASS_ABBREVIATIONS, labels, strict=True) if count
    }


def draw_examples(figure: Any, dataset: Dataset) -> None:
    """Draws EXAMPLE_LEADS of EXAMPLES crops, evenly spaced in the dataset. Leads are 2 mV apart."""
    rows = np.unique(np.linspace(0, len(dataset) - 1, EXAMPLES).astype(int))
    panels = np.ravel(figure.subplots(2, 3))
    for axes in panels:
        axes.set_axis_off()
    for axes, row in zip(panels, rows.tolist(), strict=False):
        ecg = dataset[row]
        seconds = np.arange(HALF * ecg.halves) / FS_HZ
        for place, lead in enumerate(EXAMPLE_LEADS):
            mv = ecg.signal_mv[LEADS.index(lead), : len(seconds)]
            axes.plot(seconds, mv - np.median(mv) - 2 * place, color=INK, lw=0.6)
            axes.text(-0.3, -2 * place, lead, size=8, color=GREY, family=FONT, ha="right")
        axes.set(xlim=(-0.9, 10), ylim=(-2 * len(EXAMPLE_LEADS) + 0.5, 2.5))
        about = patient_caption(ecg.age, ecg.sex, ecg.dx)
        words = f"crop {row}: {ecg.record}" + f", {about}" * bool(about)
        shown = words[:60] + "…" * (len(words) > 60)
        axes.set_title(shown, loc="left", size=9, color=INK, family=FONT, parse_math=False)


def draw_histograms(figure: Any, dataset: Dataset, table: pa.Table) -> None:
    """Draws histograms of heart rate, height, age and sampling rate. The first two reveal a wrong sampling
    rate, by 30 instead of 60 beats a minute, or a wrong unit, by 1,000 instead of 1 mV."""
    rows = np.unique(np.linspace(0, len(dataset) - 1, MEASURED_CROPS).astype(int))
    rates, heights = [], []
    for row in rows.tolist():
        mv = dataset.read(row) / 1000
        rates.append(heart_rate(mv))
        heights.append(np.ptp(mv, axis=1).max())
    some = "" if len(rows) == len(dataset) else f" of {len(rows)} crops"
    panels = {
        f"heart rate{some}, beats a minute": np.array(rates, float),
        f"tallest lead{some}, mV": np.array(heights),
        "age, years": table["age"].to_numpy().astype(float),
        "rate of the recording, Hz": table["fs_source_hz"].to_numpy(),
    }
    for axes, (title, values) in zip(figure.subplots(1, 4), panels.items(), strict=True):
        known = values[np.isfinite(values)]
        axes.set_title(title, loc="left", size=9, color=INK, family=FONT)
        spread = len(known) and np.ptp(known) > 0
        axes.hist(known, bins=24 if spread else 1, color=ROLE_COLOURS[0])
        axes.yaxis.set_major_formatter("{x:,.0f}")
        _style_bars(axes)
        axes.xaxis.set_major_formatter("{x:g}")
        if not spread:
            axes.set_xticks(known[:1])
        said = f"median {np.median(known):.3g}" if len(known) else "unknown"
        said += f", {len(values) - len(known):,} unknown" * (0 < len(known) < len(values))
        axes.set_xlabel(said, fontsize=8, color=GREY, family=FONT)


def _draw_bars(
    axes: "Axes", counts: Mapping[str, Mapping[str, int]], slots: float, wide_range: bool = False
) -> None:
    """Draw a stacked bar for each name, the longest first, with its total behind it. With `wide_range`, the
    scale is logarithmic if the longest bar is more than 50 times as long as the shortest."""
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
    axes.set_ylim(slots - 0.4, -0.6)
    _style_bars(axes)


def _scale_bars(axes: "Axes", lowest: int, highest: int, wide_range: bool) -> float:
    """Sets the scale of the axis, with space behind the bars for their totals. Returns where bars start."""
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


def _style_bars(axes: "Axes") -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(axis="x", which="both", colors=GREY, labelsize=8, labelfontfamily=FONT)
    axes.tick_params(axis="y", length=0, labelcolor=INK, labelsize=9, labelfontfamily=FONT)
    axes.grid(axis="x", color="#e6e6ea", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("")


def picture_format(path: Path) -> str:
    """Return the picture format that the suffix of a path names, png without a suffix. Raise an OSError if
    matplotlib does not know the format."""
    from matplotlib.backend_bases import FigureCanvasBase

    kind = path.suffix[1:].lower() or "png"
    if kind not in FigureCanvasBase.get_supported_filetypes():
        raise OSError(f"{path}: .{kind} is not a picture format: use .png, .svg or .pdf")
    return kind


def save_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure in the format that the suffix names. The file is written completely or not at all, and
    the same figure always gives the same bytes."""
    import matplotlib

    path = Path(path)
    kind = picture_format(path)
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    # A user's setting savefig.bbox = tight would change the scale, so it is overridden. The salt is set
    # because matplotlib otherwise writes random ids into an SVG
    style = matplotlib.rc_context({"savefig.bbox": None, "svg.hashsalt": "omnilead"})
    with replacing_file(path) as temporary, style, temporary.open("wb") as file:
        figure.savefig(file, format=kind, dpi=DPI, facecolor="white", metadata=undated.get(kind))


def describe(dataset: Dataset) -> str:
    """Return a text about a dataset: its sources; its roles, beside the paper's numbers if it has the paper's
    databases; and what was refused and why."""
    facts = dataset.facts
    count = len(dataset.shards)
    megabytes = sum(shard.bytes for shard in dataset.shards) / 1e6
    shards = f"{count} tar shard{'s' * (count != 1)} of {megabytes:,.0f} MB in all"
    zarr = ", zarr copy" if "zarr" in facts.formats else ""
    lines = [
        f"{dataset.root.url}: {len(dataset):,} crops of 10 s, {shards}{zarr}",
        f"plan {facts.plan}, seed {facts.seed}, fingerprint {facts.fingerprint[:16]}",
        "",
        *_source_lines(facts),
        "",
        *_role_lines(dataset),
        *_duplicate_lines(dataset),
        "",
    ]
    rejects = read_rejects(dataset)
    reasons = Counter(reason for _, _, reason, _ in rejects)
    example = {reason: f"{record} {detail}" for _, record, reason, detail in reversed(rejects)}
    repaired = sum(count for reason, count in reasons.items() if reason in REPAIR_REASONS)
    flagged_only = (
        sum(count for reason, count in reasons.items() if reason in FLAG_REASONS) - repaired
    )
    refused = reasons.total() - repaired - flagged_only
    counts = f"{refused:,} refused, {repaired:,} repaired, {flagged_only:,} flagged"
    nothing = "nothing was refused, repaired or flagged"
    lines.append(f"lines of rejects.csv: {counts}" if reasons else nothing)
    for reason, count in reasons.most_common():
        such_as = " ".join(example[reason].split())[:60]
        lines.append(f"  {reason:30}{count:8,}  such as {such_as}")
    return "\n".join(lines)


def _has_paper_databases(facts: DatasetFacts) -> bool:
    """True if the dataset has roles and all databases of the paper, so that comparing its numbers with the
    paper's makes sense."""
    names = {real_source(source.name) for source in facts.sources}
    return facts.plan != "all" and names >= PAPER_DATABASES.keys()


def _source_lines(facts: DatasetFacts) -> Iterator[str]:
    """Yield a table with the number of records and crops of each source."""
    like_paper = _has_paper_databases(facts)
    paper = f"{'the paper':>11}" if like_paper else ""
    counts = f"{'used':>10}{'refused':>9}{'crops':>10}{'dropped':>12}"
    yield f"{'source':22}{'records':>10}{paper}{counts}  licence"
    for source in facts.sources:
        name, records = source.name, source.records
        paper = f"{PAPER_DATABASES.get(real_source(name), 0):11,}" if like_paper else ""
        counts = f"{records['used']:10,}{records['refused']:9,}{source.crops:10,}"
        dropped = f"{source.dropped_s:10,.0f} s"
        yield f"{name:22}{records['seen']:10,}{paper}{counts}{dropped}  {source.licence}"


def _role_lines(dataset: Dataset) -> Iterator[str]:
    """Yield a table with the number of crops and of 5 s parts of each role."""
    like_paper = _has_paper_databases(dataset.facts)
    paper = f"{'the paper':>11}" if like_paper else ""
    yield f"{'role':22}{'crops':>10}{'5 s parts':>11}{paper}"
    if dataset.facts.plan == "paper-split":
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
    """Return lines about crops that have the same waveform as a crop of another record."""
    records = read_records(dataset.table)
    _, waveform = np.unique(records.waveform, return_inverse=True)
    in_order = np.unique(np.stack([waveform, records.crop_record]), axis=1)
    records_with = np.bincount(in_order[0])
    copies = int((records_with[waveform] > 1).sum())
    if not copies:
        return []
    # `in_order` has the pairs (waveform, record), sorted. `first` has, for each waveform that several records
    # share, the position of its first pair
    first = (np.cumsum(records_with) - records_with)[records_with > 1]
    pairs = np.unique(in_order[1][np.stack([first, first + 1])], axis=1).T
    shown = [
        " and ".join(sorted(_record_with_source(records, record) for record in pair))
        for pair in pairs[:3]
    ]
    more = ", ..." * (len(pairs) > len(shown))
    return [
        "",
        f"{copies:,} crops have the same waveform as a crop of another record: {', '.join(shown)}"
        f"{more}; samples.parquet has the same `waveform` for them",
    ]


def _record_with_source(records: Records, record: int) -> str:
    """Returns the source and name of a record as SOURCE/NAME."""
    return f"{records.source_names[records.source[record]]}/{records.names[record]}"


def _patients_advice(without: pa.Table) -> str:
    table = "FILE"
    if any(real_source(name) == "ptb-xl" for name in without["source"].unique().to_pylist()):
        table = "ptbxl_database.csv"
    return f"--patients {table} names them"


def dataset_notes(dataset: Dataset) -> Iterator[str]:
    """Yield warnings about properties of a dataset that would cause problems in training or evaluation."""
    if dataset.facts.plan != "all":
        yield from _role_notes(dataset)
    missing: dict[str, list[str]] = {}
    for source, name, reason, _ in read_rejects(dataset):
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
            f"be too high; {_patients_advice(without)}"
        )
    if doubt := similar_ids_warning(patient_of_crops(dataset)):
        yield doubt
    for flag in RoleSources.from_facts(dataset.facts).leave_out:
        if not (count := int(flag_mask(table, [flag]).sum())):
            continue
        why = f"they have the flag {flag} (--leave-out-flags)"
        if flag == IMPLAUSIBLE:
            why = (
                "no heart has such an amplitude (`implausible amplitude` in rejects.csv); if the "
                "scale in the files is right, --leave-out-flags none includes them"
            )
        yield f"{count:,} crop{'s' * (count > 1)} left out of pre-training: {why}"
    crops = value_counts(table["source"])
    for flag, (share, what) in DOUBTFUL_FLAGS.items():
        of_flagged = table["source"].filter(pa.array(flag_mask(table, [flag])))
        for source, count in value_counts(of_flagged).items():
            if count > crops[source] * share:
                yield f"{count:,} of {crops[source]:,} crops of {source} {what} right?"
    yield from _heart_rates(dataset).warnings()


def _heart_rates(dataset: Dataset) -> HeartRates:
    """Measure the heart rates of some ECGs of each source that has enough of them."""
    rates = HeartRates()
    table = dataset.table(["source", "start_s"])
    for source, count in value_counts(table["source"]).items():
        if count < MIN_RATED_ECGS:
            continue
        is_first = pc.and_(pc.equal(table["source"], source), pc.equal(table["start_s"], 0))
        # The first rows are a random sample, because the crops of a dataset are shuffled
        for row in np.flatnonzero(is_first)[:MAX_RATED_ECGS]:
            # A damaged crop is skipped here; commands that read the whole dataset report it
            with suppress(DatasetError):
                rates.add(source, dataset.read(row))
    return rates


def _role_notes(dataset: Dataset) -> Iterator[str]:
    """Yield warnings about roles without crops, and about sources that are in or not in pre-training
    although a user may not expect it."""
    chosen, roles = RoleSources.from_facts(dataset.facts), dataset.facts.roles
    empty = []
    for name in PAPER_ROLES:
        task, _, role = name.partition(" ")
        asked = getattr(chosen, task) != getattr(PAPER_SOURCES, task) or task == "pretrain"
        if not asked and not _has_paper_databases(dataset.facts):
            continue  # data other than the paper's need not have all default roles
        if not (role in getattr(roles, task) if role else getattr(roles, task)):
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
    names = [source.name for source in dataset.facts.sources if source.crops]
    if left_out := [name for name in names if not chosen.pretrains(name)]:
        why = "not in the paper" if chosen.pretrain is None else "not in --pretrain-sources"
        yield (
            f"not for pre-training: {', '.join(left_out)} ({why}): --pretrain-sources all "
            "includes every source"
        )
    others = [name for name in names if chosen.pretrains(name) and name not in PAPER_DATABASES]
    if chosen.pretrain is None and others and PAPER_DATABASES.keys() & set(names):
        yield (
            f"for pre-training, but not in the paper: {', '.join(others)}: --pretrain-sources "
            "names the sources to use"
        )
