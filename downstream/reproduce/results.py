"""Writes the tables DIR/table-N.md, .csv and .json: the scores measured so far, beside the paper's.

    write_tables(plan)

A cell is the mean and half of the 95 % interval (Student's t) over the seeds of fine-tuning.
"""

from collections.abc import Iterable
from dataclasses import asdict
from itertools import product
from typing import NamedTuple

from omnilead.data_tools.io.spreadsheet import csv_text
from omnilead.data_tools.io.storage import write_whole
from omnilead.data_tools.io.terminal import echo

from ..tasks.metrics import mean_and_half_width
from .jobs import Job, read_json, write_json
from .paper import CONFIG_OF_TASK, LEAD_COUNTS, PaperPlan, PaperRow, PaperTable

STATE_LEGEND = {
    "not yet": "...: not run yet.",
    "part": "[1/3]: 1 of 3 seeds is done.",
    "failed": "failed: run the same command again to retry.",
}


class TableCell(NamedTuple):
    """A cell of a table, which is a line of the CSV file."""

    table: int
    row: str
    task: str
    leads: int
    column: str
    mean: float | None
    interval: float | None
    bold: bool
    seeds_done: int
    seeds_asked: int
    state: str
    paper_mean: float | None
    paper_interval: float | None
    scores: list[float] | str  # in the CSV file: text, with spaces between the scores
    auroc: float | None  # for the task Dx only; the paper does not print AUROCs
    auroc_interval: float | None


def write_tables(plan: PaperPlan) -> None:
    text = protocol_text(plan)
    for table in plan.tables:
        cells = table_cells(table, plan)
        path = plan.folder.path / f"table-{table.number}"
        document = {
            "table": table.number,
            "title": table.title,
            "protocol": text,
            "scale": plan.scale.name,
            "data": asdict(plan.data),
            "cells": [cell._asdict() for cell in cells],
        }
        write_json(path.with_suffix(".json"), document)
        lines = [cell._replace(scores=" ".join(map(repr, cell.scores))) for cell in cells]
        write_whole(path.with_suffix(".csv"), csv_text([TableCell._fields, *lines]))
        write_whole(path.with_suffix(".md"), table_markdown(table, cells, text))


def show_tables(plan: PaperPlan) -> None:
    paths = [plan.folder.path / f"table-{table.number}.md" for table in plan.tables]
    for path in paths:
        lines = path.read_text().splitlines()
        lines_shown = [line for line in lines if line.startswith(("#", "|", "Each cell"))]
        echo("\n".join(lines_shown) + "\n")
    left, total = len(plan.folder.unfinished_jobs(plan.jobs.values())), len(plan.jobs)
    text = f"{', '.join(map(str, paths))}: {total - left} of {total} jobs done"
    if left:
        text += "; run the same command again to continue"
    echo(text)


def table_cells(table: PaperTable, plan: PaperPlan) -> list[TableCell]:
    positions = product(table.rows.values(), CONFIG_OF_TASK, LEAD_COUNTS)
    cells = [make_cell(table, row, task, leads, plan) for row, task, leads in positions]
    return [cell._replace(bold=is_bold(cell, table, cells)) for cell in cells]


def make_cell(
    table: PaperTable, row: PaperRow, task: str, leads: int, plan: PaperPlan
) -> TableCell:
    """Returns the cell with our scores so far, their state, and the paper's score."""
    jobs = [plan.jobs[name] for name in plan.cells.get((table.number, row.name, task, leads), ())]
    documents = [read_json(plan.folder.path / job.makes) for job in jobs]
    scores = [document["score"] for document in documents if document.get("score") is not None]
    areas = [document.get("metrics", {}).get("auroc") for document in documents if task == "Dx"]
    printed = row.printed[task][leads]
    paper_mean, paper_interval = printed or (None, None)
    state = "not asked" if printed else "none in the paper"
    if scores:
        state = "done" if len(scores) == len(jobs) else "part"
    elif jobs:
        state = "failed" if any(has_failed(plan, job) for job in jobs) else "not yet"
    return TableCell(
        table.number, row.name, task, leads, table.column_title(leads),
        *mean_and_interval(scores), False, len(scores), len(jobs), state,
        paper_mean, paper_interval, scores, *mean_and_interval(areas),
    )  # fmt: skip


def mean_and_interval(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Returns the mean of the values that are not None, and half of its 95 % interval if there are
    at least two."""
    known_values = [value for value in values if value is not None]
    mean, half = mean_and_half_width(known_values) if known_values else (None, None)
    return mean, half if len(known_values) > 1 else None


def has_failed(plan: PaperPlan, job: Job) -> bool:
    """Returns True if this job, or a job that it needs, has failed."""
    needed = (has_failed(plan, plan.jobs[name]) for name in job.needs)
    return bool(plan.folder.read_outcome(job, "error")) or any(needed)


def is_bold(cell: TableCell, table: PaperTable, cells: list[TableCell]) -> bool:
    """Returns True if the cell is bold by the rule that the table's caption states, applied to the
    scores as rounded for print."""
    gain, rivals = table.bold == "gain", []
    for other in cells:
        same_column = (other.task, other.leads) == (cell.task, cell.leads)
        compared = other.row == table.rows[cell.row].against if gain else other.row != cell.row
        if same_column and compared and other.mean is not None:
            rivals.append(round(other.mean, 3))
    if cell.mean is None or not rivals:
        return False
    own_score = round(cell.mean, 3)
    return own_score > max(rivals) if gain else own_score >= max(rivals)


def table_markdown(table: PaperTable, cells: list[TableCell], text: str) -> str:
    """Returns a table as Markdown, with the rows and columns that the user asked for."""
    requested = [cell for cell in cells if cell.seeds_asked] or cells
    columns = [leads for leads in LEAD_COUNTS if any(cell.leads == leads for cell in requested)]
    lines = [["Methods", "", *map(table.column_title, columns)], ["---"] * (len(columns) + 2)]
    row_before = ""
    for row, task in dict.fromkeys((cell.row, cell.task) for cell in requested):
        own_cells = [cell for cell in cells if (cell.row, cell.task) == (row, task)]
        own_cells = [cell for cell in own_cells if cell.leads in columns]
        lines.append(["" if row == row_before else row, f"{task}.", *map(cell_text, own_cells)])
        row_before = row
        if any(cell.auroc is not None for cell in own_cells):
            lines.append(
                ["", "AUROC", *(score_text(cell.auroc, cell.auroc_interval) for cell in own_cells)]
            )
    bold = "better than without random lead masking"
    if table.bold == "best":
        bold = "the best of its column"
    states = {cell.state for cell in requested}
    legend = [f"Each cell: ours / the paper's. Bold: {bold}, among ours."]
    legend += [meaning for state, meaning in STATE_LEGEND.items() if state in states]
    head = f"# Table {table.number}: {table.title}\n\n{text}\n\n"
    return (
        head + "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{' '.join(legend)}\n"
    )


def cell_text(cell: TableCell) -> str:
    if cell.state == "none in the paper":
        return "-"
    text = {"failed": "failed", "not yet": "..."}.get(
        cell.state, score_text(cell.mean, cell.interval)
    )
    if cell.bold:
        text = f"**{text}**"
    if cell.state == "part":
        text += f" [{cell.seeds_done}/{cell.seeds_asked}]"
    return f"{text} / {score_text(cell.paper_mean, cell.paper_interval)}".strip()


def score_text(mean: float | None, interval: float | None) -> str:
    if mean is None:
        return ""
    return f"{mean:.3f}" if interval is None else f"{mean:.3f} ± {interval:.3f}"


def protocol_text(plan: PaperPlan) -> str:
    """Returns a paragraph that says how this reproduction differs from the paper."""
    scale, data = plan.scale, plan.data
    dx = " / ".join(f"{data.count_crops('dx', role):,}" for role in ("train", "valid", "test"))
    leak = ""
    if data.split == "paper-split":
        leak = ", split by crop as in the authors' code: crops of one ECG are on both sides"
    over = "1 seed of fine-tuning"
    if plan.seeds > 1:
        over = f"{plan.seeds} seeds of fine-tuning ± half of the 95 % interval (Student's t)"
    best = scale.settings["diagnosis"].get("train.best", "auroc")
    best = "CinC score" if best == "challenge" else best.upper()
    stages = []
    for stage, settings in scale.settings.items():
        changed = [f"{key} {value}" for key, value in settings.items() if value is not None]
        if changed:
            stages.append(f"{stage}: {', '.join(changed)}")
    return (
        f"Scale `{scale.name}`, dataset {data.fingerprint[:12]}: {data.count_crops('pretrain'):,} crops "
        f"of 10 s for pre-training (the paper: about 85,000), {dx} for training, validation and "
        "test of diagnosis (the paper: 32,640 / 4,079 / 4,079 halves), "
        f"{data.count_crops('id', 'probe'):,} probes for identification (the paper: 2,127){leak}. "
        f"A cell is the mean over {over}, from one pre-trained model. Dx. is the CinC score, AUROC "
        "the mean over the classes of the same outputs, Id. the accuracy of identification. "
        f"Dx. keeps the step with the best {best} in validation. "
        f"Set over the paper's configurations: {'; '.join(stages) or 'nothing'}."
    )
