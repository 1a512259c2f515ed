"""Writes a comparison of models as tables and a figure: bench.json, bench.md, bench.csv and
bench.png.

write(document, Path("OUT"))        # the tables are aligned for a terminal
"""

import io
import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from omnilead.data_tools.spreadsheet import as_csv
from omnilead.engine.common import METRIC_OF, write_whole

MAIN = {}
for _metric in METRIC_OF.values():
    if _metric.in_bench:
        MAIN[_metric.name] = _metric.label
MAIN["accuracy"] = "accuracy, cosine"  # of identification
KEYS = ("model", "task", "leads", "share", "noise")
OVER = (
    "over test patients, over the seeds or draws of a row and, at small shares, over the drawn "
    "labelled patients; the gallery, and labelled patients drawn only once, are held fixed"
)
INTERVALS = f"In brackets: 95 % intervals {OVER}. Differences use the same resamples."
OF_TUNED = (
    "In brackets: 95 % intervals over test patients and seeds. Differences use the same resamples."
)
# Okabe and Ito: for colour blindness
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKS, CROSSES = "os^Dv<>", "x+*dPXp"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,
    "lines.markersize": 4,
    "lines.linewidth": 1.5,
}
Row = dict[str, Any]


def write(document: Row, out: Path) -> None:
    lines: list[Sequence[Any]] = [[*KEYS, "metric", "against", "value", "low", "high", "class"]]
    for row in document["rows"]:
        lines += [
            [*_key(row), name, "", value, *row["intervals"][name], ""]
            for name, value in row["metrics"].items()
        ]
        for name, of in row.get("per_class", {}).items():
            lines += [[*_key(row), name, "", value, "", "", label] for label, value in of.items()]
    for gap in document["differences"]:
        lines.append(
            [*_key(gap), gap["metric"], gap["against"], gap["difference"], *gap["interval"], ""]
        )
    picture(document).savefig(image := io.BytesIO(), format="png", dpi=150)
    write_whole(out / "bench.md", markdown(document))
    write_whole(out / "bench.csv", as_csv(lines))
    write_whole(out / "bench.png", image.getvalue())
    write_whole(out / "bench.json", json.dumps(document, indent=1) + "\n")


def panels(document: Row) -> dict[tuple[str, str], list[Row]]:
    """Rows by task and metric."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in document["rows"]:
        for metric in [name for name in row["metrics"] if name in MAIN]:
            found.setdefault((row["task"], metric), []).append(row)
    return found


def markdown(document: Row) -> str:
    tuned = all("each" in row for row in document["rows"])
    several = any("each" in row for row in document["rows"])
    kind, intervals = ("Fine-tuned models", OF_TUNED) if tuned else ("Frozen embeddings", INTERVALS)
    tested = f", tested on {document['test_data']}" if document.get("test_data") else ""
    text = [f"# {kind}: {document['data']}{tested}", "", intervals]
    for (task, metric), rows in panels(document).items():
        table = score_table(document, rows, metric, several)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        table.insert(1, ["-" * width for width in widths])
        text += ["", f"## {task}: {MAIN[metric]}", "", _count(rows), ""]
        for line in table:
            cells = [f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)]
            text.append(f"| {' | '.join(cells)} |")
    return "\n".join([*text, "", *(f"- {note}" for note in document["notes"])]).rstrip() + "\n"


def score_table(document: Row, rows: Sequence[Row], metric: str, several: bool) -> list[list[str]]:
    """Each model's score, and its differences from its random weights and from the first model."""
    gaps = {(*_key(gap), gap["metric"], gap["against"]): gap for gap in document["differences"]}
    first = next(iter(document["models"]))
    head = ["leads", "share", "noise", "model", MAIN[metric]]
    head += ["minus random weights", f"minus {first}"] + ["of each seed or draw"] * several
    table = [head]
    for row in rows:
        share = "" if row["share"] is None else f"{row['share']:g}"
        line = [row["leads"], share, f"{row['noise']:g}", row["model"]]
        line.append(_cell(row["metrics"][metric], row["intervals"][metric]))
        for against in (document["models"][row["model"]], first):
            gap = gaps.get((*_key(row), metric, against))
            line.append(_cell(gap["difference"], gap["interval"], "+") if gap else "")
        if several:
            line.append(", ".join(map(_cell, row.get("each", {}).get(metric, []))))
        table.append(line)
    return table


def _count(rows: Sequence[Row]) -> str:
    """What was scored, and the classes that small shares leave out."""
    one = rows[0]
    unit = f"probes against {one['gallery']:,} in the gallery" if "gallery" in one else "records"
    lost = {row["share"]: ", ".join(row["left_out"]) for row in rows if row.get("left_out")}
    about = "".join(f"; share {share:g} without {names}" for share, names in lost.items())
    return f"{one['n']:,} {unit}, of {one['patients']:,} patients{about}."


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEYS)


def _cell(value: float | None, ends: Sequence[float | None] = (None,), sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{sign}.3f}" + (
        "" if None in ends else f" ({ends[0]:{sign}.3f} to {ends[1]:{sign}.3f})"
    )


def picture(document: Row) -> Figure:
    """A row of panels for each task and metric, a column for each set of leads and level of
    noise."""
    found, styles = panels(document), model_styles(document["models"])
    columns = list(dict.fromkeys((row["leads"], row["noise"]) for row in document["rows"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            (max(5.5, 3.4 * len(columns)), 2.2 * len(found) + 0.8), layout="constrained"
        )
        grid = figure.subplots(len(found), len(columns), squeeze=False, sharey="row")
        for ((task, metric), rows), line in zip(found.items(), grid, strict=True):
            line[0].set_ylabel(MAIN[metric])
            for (leads, noise), axes in zip(columns, line, strict=True):
                of_panel = [row for row in rows if (row["leads"], row["noise"]) == (leads, noise)]
                for place, (name, style) in enumerate(styles.items()):
                    _draw(axes, [r for r in of_panel if r["model"] == name], metric, place, style)
                title = f"{task}, {_leads(leads)}" + (f", noise {noise:g}" if noise else "")
                axes.set_title(title, fontsize=9, loc="left")
        shown: Row = {}
        for axes in grid.flat:
            handles, names = axes.get_legend_handles_labels()
            shown.update(zip(names, handles, strict=True))
        figure.legend(
            shown.values(), shown.keys(), loc="outside upper left", ncols=4, frameon=False
        )
    return figure


def model_styles(models: Mapping[str, str]) -> dict[str, Row]:
    """Trained models in colours; random weights and other baselines in grey and black, broken
    lines."""
    styles: dict[str, Row] = {}
    trained, baselines = zip(cycle(COLOURS), cycle(MARKS)), cycle(CROSSES)
    for name, random in models.items():
        if random and random != name:
            line = "-"
            colour, marker = next(trained)
        else:
            colour, line = ("#777777", "--") if random else ("#111111", ":")
            marker = next(baselines)
        styles[name] = {"label": name, "color": colour, "ls": line, "marker": marker}
    return styles


def _leads(leads: str) -> str:
    if leads == "1":
        return "lead I"
    return f"leads {leads}" if "," in leads else f"{leads} leads"


def _draw(axes: Axes, rows: list[Row], metric: str, position: int, style: Row) -> None:
    """A curve with its band over the shares of labels; for a single share, or none, a dot with its
    interval."""
    values = np.array(
        [[row["metrics"][metric], *row["intervals"][metric]] for row in rows], float
    )  # None: NaN, not drawn
    if len(rows) > 1:
        shares = [row["share"] for row in rows]
        axes.plot(shares, values[:, 0], **style)
        axes.fill_between(
            shares, values[:, 1], values[:, 2], color=style["color"], alpha=0.13, lw=0
        )
        axes.set(xscale="log", xlabel="patients with labels")
        axes.set_xticks(shares, [f"{100 * share:g} %" for share in shares])
        axes.set_xticks([], minor=True)
    elif rows:
        axes.errorbar(
            [position], values[:, 0], abs(values[:, 1:] - values[:, :1]).T, capsize=3, **style
        )
        axes.set_xticks([])
        axes.margins(x=0.15)
