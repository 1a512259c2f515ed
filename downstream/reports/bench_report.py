"""Writes a comparison of models as tables and a figure: bench.json, bench.md, bench.csv and
bench.png.

write_comparison(document, Path("OUT"))        # the tables are aligned for a terminal
"""

import io
import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from omnilead.data_tools.io.spreadsheet import csv_text
from omnilead.data_tools.io.storage import write_whole
from omnilead.engine.settings.metrics import METRIC_OF

from ..evaluation.differences import ROW_KEYS

METRIC_LABELS = {metric.name: metric.label for metric in METRIC_OF.values() if metric.in_bench}
METRIC_LABELS["accuracy"] = "accuracy, cosine"  # the accuracy of patient identification
RESAMPLED_OVER = (
    "over test patients, over the seeds or draws of a row and, at small shares, over the drawn "
    "labelled patients; the gallery, and labelled patients drawn only once, are held fixed"
)
INTERVAL_NOTE = f"In brackets: 95 % intervals {RESAMPLED_OVER}. Differences use the same resamples."
FINETUNED_INTERVAL_NOTE = (
    "In brackets: 95 % intervals over test patients and seeds. Differences use the same resamples."
)
BENCH_INK = "#111111"
SHARE_MARKERS = "o^sDv"  # marker shapes, one for each share of labels
DOT_STYLE: Any = {"ls": "", "color": BENCH_INK, "markerfacecolor": "white"}
BENCH_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "legend.frameon": False,
    "text.parse_math": False,
    "lines.markersize": 4.5,
}
Row = dict[str, Any]


def write_comparison(document: Row, out: Path) -> None:
    lines: list[Sequence[Any]] = [[*ROW_KEYS, "metric", "against", "value", "low", "high", "class"]]
    for row in document["rows"]:
        for name, value in row["metrics"].items():
            lines.append([*_row_key(row), name, "", value, *row["intervals"][name], ""])
        for name, classes in row.get("per_class", {}).items():
            for label, value in classes.items():
                lines.append([*_row_key(row), name, "", value, "", "", label])
    for gap in document["differences"]:
        names = gap["metric"], gap["against"]
        lines.append([*_row_key(gap), *names, gap["difference"], *gap["interval"], ""])
    draw_comparison(document).savefig(image := io.BytesIO(), format="png", dpi=150)
    write_whole(out / "bench.md", comparison_markdown(document))
    write_whole(out / "bench.csv", csv_text(lines))
    write_whole(out / "bench.png", image.getvalue())
    write_whole(out / "bench.json", json.dumps(document, indent=1) + "\n")


def rows_by_metric(document: Row) -> dict[tuple[str, str], list[Row]]:
    """Returns the rows of each task and metric: {(task, metric): rows}."""
    rows_of_metrics: dict[tuple[str, str], list[Row]] = {}
    for row in document["rows"]:
        for metric in [name for name in row["metrics"] if name in METRIC_LABELS]:
            rows_of_metrics.setdefault((row["task"], metric), []).append(row)
    return rows_of_metrics


def comparison_markdown(document: Row) -> str:
    several = any("each" in row for row in document["rows"])
    title, intervals = f"Frozen embeddings: {document['data']}", INTERVAL_NOTE
    if all("each" in row for row in document["rows"]):
        title, intervals = f"Fine-tuned models: {document['data']}", FINETUNED_INTERVAL_NOTE
    if document.get("test_data"):
        title += f", tested on {document['test_data']}"
    text = [f"# {title}", "", intervals]
    for (task, metric), rows in rows_by_metric(document).items():
        table = score_table(document, rows, metric, several)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        table.insert(1, ["-" * width for width in widths])
        lower = " (lower is better)" * bool(METRIC_OF[metric].lower_is_better)
        text += ["", f"## {task}: {METRIC_LABELS[metric]}{lower}", "", _count_sentence(rows), ""]
        for line in table:
            cells = [f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)]
            text.append(f"| {' | '.join(cells)} |")
    text += ["", *(f"- {note}" for note in document["notes"])]
    if verdict := verdict_sentences(document):
        text += ["", *verdict]
    return "\n".join(text).rstrip() + "\n"


def verdict_sentences(document: Row) -> list[str]:
    """Returns a sentence for each task and set of leads. It says whether the first model can be
    told apart from the best other model, by the first metric and on the largest share of labels."""
    first = next(iter(document["models"]))
    gaps = {
        (*_row_key(gap), gap["metric"]): gap
        for gap in document["differences"]
        if gap["against"] == first and None not in (gap["difference"], *gap["interval"])
    }
    sentences = []
    for (task, metric), rows in rows_by_metric(document).items():
        if metric != next(iter(rows[0]["metrics"])):
            continue
        lower = bool(METRIC_OF[metric].lower_is_better)
        for leads in dict.fromkeys(row["leads"] for row in rows):
            share = max((row["share"] or 0) for row in rows if row["leads"] == leads)
            others = [
                row
                for row in rows
                if row["leads"] == leads
                and (row["share"] or 0) == share
                # leaves out the random weights with which the first model is compared
                and row["model"] != document["models"][first]
                and (*_row_key(row), metric) in gaps
            ]
            if others:
                best = sorted(others, key=lambda row: row["metrics"][metric], reverse=not lower)[0]
                where = f"{task}, {_leads_text(leads)}"
                where += f", {share:.0%} of the labels" * (share not in (0, 1))
                gap = gaps[(*_row_key(best), metric)]
                sentences.append(f"{where}: {_verdict_sentence(gap, first, best, metric)}")
    return sentences


def _verdict_sentence(gap: Row, first: str, best: Row, metric: str) -> str:
    """Returns a sentence on which of two models is better. `gap`: the difference of the best other
    model from the first model."""
    low, high = gap["interval"]
    names = [best["model"], f"`{first}`"]
    is_better = gap["difference"] > 0
    if METRIC_OF[metric].lower_is_better:
        is_better = not is_better
    said = f"{names[0]} is better than {names[1]}"
    if low <= 0 <= high:
        said = f"{names[1]} and {names[0]} cannot be told apart"
    elif not is_better:
        said, (low, high) = f"{names[1]} is better than {names[0]}", (-high, -low)
    on = f"{best['n']:,} {'probes' if 'gallery' in best else 'ECGs'}"
    return f"{said}: difference in {METRIC_LABELS[metric]} {low:+.3f} to {high:+.3f} on {on}."


def score_table(document: Row, rows: Sequence[Row], metric: str, several: bool) -> list[list[str]]:
    """Returns a table with each model's score, and its differences from random weights and from the
    first model."""
    gaps = {(*_row_key(gap), gap["metric"], gap["against"]): gap for gap in document["differences"]}
    first = next(iter(document["models"]))
    head = ["leads", "share", "model", METRIC_LABELS[metric]]
    head += ["minus random weights", f"minus {first}"]
    if several:
        head.append("of each seed or draw")
    table = [head]
    for row in rows:
        share = "" if row["share"] is None else f"{row['share']:g}"
        line = [row["leads"], share, row["model"]]
        line.append(_cell_text(row["metrics"][metric], row["intervals"][metric]))
        for against in (document["models"][row["model"]], first):
            gap = gaps.get((*_row_key(row), metric, against))
            line.append(_cell_text(gap["difference"], gap["interval"], "+") if gap else "")
        if several:
            line.append(", ".join(map(_cell_text, row.get("each", {}).get(metric, []))))
        table.append(line)
    return table


def _count_sentence(rows: Sequence[Row]) -> str:
    """Returns a sentence on how many records were scored, and on which classes are left out at
    small shares of labels."""
    row = rows[0]
    text = f"{row['n']:,} records"
    if "gallery" in row:
        text = f"{row['n']:,} probes against {row['gallery']:,} in the gallery"
    text += (
        f", of {row['patients']:,} patients" if row["patients"] else ", some of unknown patients"
    )
    lost = {row["share"]: ", ".join(row["left_out"]) for row in rows if row.get("left_out")}
    for share, names in lost.items():
        text += f"; share {share:g} without {names}"
    return f"{text}."


def _row_key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ROW_KEYS)


def _cell_text(value: float | None, ends: Sequence[float | None] = (), sign: str = "") -> str:
    if value is None:
        return "-"
    text = f"{value:{sign}.3f}"
    if None in ends:
        return f"{text} (no interval)"
    return f"{text} ({ends[0]:{sign}.3f} to {ends[1]:{sign}.3f})" if ends else text


def draw_comparison(document: Row) -> Figure:
    """Draws a row of panels for each task and metric, with one panel for each set of leads. In a
    panel, each model has a line, and on it a dot with its interval for each share of labels."""
    by_metric = rows_by_metric(document)
    columns = list(dict.fromkeys(row["leads"] for row in document["rows"]))
    shares = sorted({row["share"] for row in document["rows"]} - {None})
    marks = dict(zip(shares, cycle(SHARE_MARKERS), strict=False))
    models = []  # for each row of panels, its models in the order of the comparison
    for rows in by_metric.values():
        models_drawn = {row["model"] for row in rows}
        models.append([name for name in document["models"] if name in models_drawn])
    heights = [0.9 + len(names) * (0.14 + 0.11 * max(1, len(shares))) for names in models]
    width = 0.08 * max(map(len, document["models"])) + 3.2 * len(columns)
    with matplotlib.rc_context(BENCH_STYLE):
        figure = Figure((width, sum(heights) + 0.4), layout="constrained")
        grid = figure.subplots(
            len(by_metric),
            len(columns),
            squeeze=False,
            sharex="row",
            sharey="row",
            height_ratios=heights,
        )
        for ((task, metric), rows), names, line in zip(
            by_metric.items(), models, grid, strict=True
        ):
            for column, axes in zip(columns, line, strict=True):
                of_panel = [row for row in rows if row["leads"] == column]
                _draw_panel(axes, of_panel, metric, names, marks)
                axes.set_title(_leads_text(column), loc="left")
            line[0].set_title(f"{task}\n{_leads_text(columns[0])}", loc="left")
        if len(shares) > 1:
            _add_legend(figure, marks)
    return figure


def _add_legend(figure: Figure, marks: Mapping[float, str]) -> None:
    dots, names = [], []
    for share, mark in marks.items():
        dots.append(Line2D([], [], marker=mark, **DOT_STYLE))
        names.append(f"{100 * share:g} %")
    figure.legend(dots, names, title="patients with labels", loc="outside upper left", ncols=4)


def _leads_text(leads: str) -> str:
    """Returns a text that names the leads that the models were shown."""
    text = f"leads {leads}" if "," in leads else f"{leads} leads"
    return "lead I" if leads == "1" else text


def _draw_panel(
    axes: Axes, rows: list[Row], metric: str, names: list[str], marks: Mapping[float, str]
) -> None:
    """Draws a panel. The dots of a model are below each other, with the smallest share of labels
    first."""
    intervals = "no intervals"
    for row in rows:
        value, share = row["metrics"][metric], row["share"]
        if value is None:
            continue
        y = float(names.index(row["model"]))
        if share is not None:
            y += 0.7 * ((list(marks).index(share) + 0.5) / len(marks) - 0.5)
        low, high = row["intervals"][metric]
        if low is not None:
            axes.plot([low, high], [y, y], color=BENCH_INK, lw=1)
            intervals = "line: 95 % interval"
        axes.plot([value], [y], marker=marks.get(share, "o"), **DOT_STYLE)
    for edge in range(1, len(names)):
        axes.axhline(edge - 0.5, color="#e2e2e6", lw=0.8, zorder=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    lower = ", lower is better" * bool(METRIC_OF[metric].lower_is_better)
    axes.set_xlabel(f"{METRIC_LABELS[metric]}{lower}; {intervals}")
