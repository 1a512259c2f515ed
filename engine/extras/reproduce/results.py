"""Writes the scores measured so far, beside the paper's, to DIR/table-N.md, .csv and .json.

    write_table(folder, table, plan, seeds)

A cell is the mean and half of the 95 % interval (Student's t) over the seeds of fine-tuning.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

from omnilead.data_tools.io.spreadsheet import as_csv
from omnilead.data_tools.io.storage import write_whole

from ...settings.commandline import read_yaml
from ...settings.files import CONFIGS, flatten
from ...training.config import Config, load
from ...training.metrics import over_seeds
from .jobs import Job, WorkDir, read_json, write_json
from .paper import LEADS, TASKS, ReproductionScale, Row, Table
from .plan import DatasetInfo, JobPlan, parameters

LEGEND = {
    "not yet": "...: not run yet.",
    "part": "[1/3]: 1 of 3 seeds is done.",
    "failed": "failed: run the same command again to retry.",
}
# Settings that do not influence scores or are mentioned elsewhere.
UNMENTIONED = (
    "train.log_every",
    "train.save_every_minutes",
    "train.keep",
    "train.zero_stage",
    "train.deepspeed",
    "train.best",
)


@dataclass(frozen=True)
class Cell:
    """A line of the csv."""

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
    scores: list[float]
    auroc: float | None  # of Dx.; the paper does not print it
    auroc_interval: float | None


def table_cells(folder: WorkDir, table: Table, plan: JobPlan) -> list[Cell]:
    positions = product(table.rows.values(), TASKS, LEADS)
    cells = [_cell(folder, table, row, task, leads, plan) for row, task, leads in positions]
    return [replace(cell, bold=_is_bold(cell, table, cells)) for cell in cells]


def _cell(folder: WorkDir, table: Table, row: Row, task: str, leads: int, plan: JobPlan) -> Cell:
    jobs = [plan.jobs[name] for name in plan.cells.get((table.number, row.name, task, leads), ())]
    documents = [read_json(folder.path / job.makes) for job in jobs]
    scores = _known(document.get("score") for document in documents)
    areas = _known(document.get("metrics", {}).get("auroc") for document in documents)
    mean, interval = _spread(scores)
    auroc, auroc_interval = _spread(areas if task == "Dx" else [])
    printed = row.printed[task][leads]
    paper_mean, paper_interval = printed or (None, None)
    if scores:
        state = "done" if len(scores) == len(jobs) else "part"
    elif jobs:
        state = "failed" if any(_failed(folder, plan, job) for job in jobs) else "not yet"
    else:
        state = "not asked" if printed else "none in the paper"
    return Cell(
        table.number, row.name, task, leads, table.column(leads),
        mean, interval, False, len(scores), len(jobs), state,
        paper_mean, paper_interval, scores, auroc, auroc_interval,
    )  # fmt: skip


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(values: list[float]) -> tuple[float | None, float | None]:
    center, half = over_seeds(values) if values else (None, None)
    return center, half if len(values) > 1 else None


def _failed(folder: WorkDir, plan: JobPlan, job: Job) -> bool:
    """Whether this job or one that it needs has failed."""
    needed = (plan.jobs[name] for name in job.needs)
    return bool(folder.note(job, "error")) or any(_failed(folder, plan, other) for other in needed)


def _is_bold(cell: Cell, table: Table, cells: list[Cell]) -> bool:
    """By the rule in the table's caption, with the scores as printed."""
    scores = {}
    for other in cells:
        if (other.task, other.leads) == (cell.task, cell.leads) and other.mean is not None:
            scores[other.row] = round(other.mean, 3)
    own = scores.pop(cell.row, None)
    if own is None:
        return False
    if table.bold == "gain":
        return own > scores.get(table.rows[cell.row].against, own)
    return bool(scores) and own >= max(scores.values())


def write_table(folder: WorkDir, table: Table, plan: JobPlan, seeds: int) -> None:
    cells, text = table_cells(folder, table, plan), protocol(plan.scale, plan.data, seeds)
    path = folder.path / f"table-{table.number}"
    rows = [asdict(cell) for cell in cells]
    document = {
        "table": table.number,
        "title": table.title,
        "protocol": text,
        "scale": plan.scale.name,
        "data": asdict(plan.data),
        "cells": rows,
    }
    write_json(path.with_suffix(".json"), document)
    lines = [list(rows[0])]
    for row in rows:
        row["scores"] = " ".join(map(repr, row["scores"]))
        lines.append([*row.values()])
    write_whole(path.with_suffix(".csv"), as_csv(lines))
    write_whole(path.with_suffix(".md"), markdown(table, cells, text))


def markdown(table: Table, cells: list[Cell], text: str) -> str:
    """The requested rows and columns."""
    asked = [cell for cell in cells if cell.seeds_asked] or cells
    columns = [leads for leads in LEADS if any(cell.leads == leads for cell in asked)]
    head = ["Methods", "", *(table.column(leads) for leads in columns)]
    lines = [f"# Table {table.number}: {table.title}", "", text, ""]
    lines += [_line(head), _line(["---"] * len(head))]
    shown = ""
    for row, task in dict.fromkeys((cell.row, cell.task) for cell in asked):
        own = [
            cell for cell in cells if (cell.row, cell.task) == (row, task) and cell.leads in columns
        ]
        lines.append(_line(["" if row == shown else row, f"{task}.", *map(_cell_text, own)]))
        shown = row
        if any(cell.auroc is not None for cell in own):
            areas = [_number(cell.auroc, cell.auroc_interval) for cell in own]
            lines.append(_line(["", "AUROC", *areas]))
    bold = "better than without random lead masking"
    if table.bold == "best":
        bold = "the best of its column"
    legend = f"Each cell: ours / the paper's. Bold: {bold}, among ours."
    for state, meaning in LEGEND.items():
        if any(cell.state == state for cell in asked):
            legend += f" {meaning}"
    return "\n".join([*lines, "", legend]) + "\n"


def _line(parts: list[str]) -> str:
    return "| " + " | ".join(parts) + " |"


def _cell_text(cell: Cell) -> str:
    if cell.state == "none in the paper":
        return "-"
    ours = _number(cell.mean, cell.interval)
    ours = {"failed": "failed", "not yet": "..."}.get(cell.state, ours)
    if cell.bold:
        ours = f"**{ours}**"
    if cell.state == "part":
        ours += f" [{cell.seeds_done}/{cell.seeds_asked}]"
    return f"{ours} / {_number(cell.paper_mean, cell.paper_interval)}".strip()


def _number(mean: float | None, interval: float | None) -> str:
    if mean is None:
        return ""
    return f"{mean:.3f}" if interval is None else f"{mean:.3f} ± {interval:.3f}"


def protocol(scale: ReproductionScale, data: DatasetInfo, seeds: int) -> str:
    """How this differs from the paper, in one paragraph."""
    dx = " / ".join(f"{data.count('dx', role):,}" for role in ("train", "valid", "test"))
    leak = ""
    if data.split == "paper-split":
        leak = ", split by crop as in the authors' code: crops of one ECG are on both sides"
    over = "1 seed of fine-tuning"
    if seeds > 1:
        over = f"{seeds} seeds of fine-tuning ± half of the 95 % interval (Student's t)"
    best = scale.settings["diagnosis"].get("train.best", "auroc")
    changes = "; ".join(_changes(scale)) or "nothing"
    return (
        f"Scale `{scale.name}`, dataset {data.fingerprint[:12]}: {data.count('pretrain'):,} crops "
        "of 10 s for pre-training "
        f"(the paper: about 85,000), {dx} for training, validation and test of diagnosis (the "
        "paper: 32,640 / 4,079 / 4,079 "
        f"halves), {data.count('id', 'probe'):,} probes for identification (the paper: "
        f"2,127){leak}. "
        f"A cell is the mean over {over}, from one pre-trained model. Dx. is the CinC score, "
        "AUROC the mean over the classes "
        "of the same outputs, Id. the accuracy of identification. "
        f"Dx. keeps the step with the best "
        f"{'CinC score' if best == 'challenge' else best.upper()} in validation. "
        f"Changed from the paper's configurations: {changes}."
    )


def _changes(scale: ReproductionScale) -> Iterator[str]:
    """The settings that a scale changes, by stage."""
    for stage, settings in scale.settings.items():
        path = CONFIGS / "finetune" / f"{stage}.yaml"
        if stage == "pretrain":
            path = CONFIGS / "pretrain" / "w2v_cmsc_rlm.yaml"
        base = flatten(read_yaml(path))
        shown = []
        for key, value in settings.items():
            if value is not None and value != base.get(key) and key not in UNMENTIONED:
                shown.append(f"{key} {value}")
        if stage == "pretrain" and shown:
            config: Config = load(path, settings)
            shown.insert(0, f"a model of {parameters(config.model) / 1e6:.2g} M parameters")
        if shown:
            yield f"{stage}: {', '.join(shown)}"
