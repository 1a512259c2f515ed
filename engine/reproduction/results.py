"""What has been measured so far -> DIR/table-N.md, .csv, .json, beside what the paper printed.

    write(place, table, plan, scale, data, seeds)

A cell is the mean and half of the 95 % interval (Student's t) over the seeds of fine-tuning.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

from data_tools.dataset import as_csv
from engine.common import write_whole
from engine.config import CONFIGS, Config, load
from engine.evaluation.metrics import over_seeds
from engine.reproduction.paper import LEADS, TASKS, Row, Scale, Table, as_arguments, flat
from engine.reproduction.plan import Data, Job, Plan, parameters
from engine.reproduction.workdir import Place
from engine.yaml_files import read

State = Literal["done", "part", "failed", "not yet", "not asked", "none in the paper"]
MARKS: dict[State, str] = {
    "not yet": "...: not run yet.",
    "part": "[1/3]: of so many seeds.",
    "failed": "failed: run again, it is retried.",
}
PAPER_DATA = {"pretrain": "about 85,000", "dx": "32,640 / 4,079 / 4,079 halves", "id": "2,127"}
# Settings of a run that its result does not hang on.
SILENT = {f"train.{name}" for name in ("log_every", "save_every_minutes", "keep", "zero_stage", "deepspeed", "best")}


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
    state: State
    paper_mean: float | None
    paper_interval: float | None
    scores: tuple[float, ...]
    auroc: float | None  # of diagnosis, beside the score that the paper printed
    auroc_interval: float | None


def cells(place: Place, table: Table, plan: Plan) -> list[Cell]:
    found = [_cell(place, table, row, task, leads, plan) for row in table.rows.values() for task in TASKS for leads in LEADS]
    return [_with_bold(cell, table, found) for cell in found]


def _cell(place: Place, table: Table, row: Row, task: str, leads: int, plan: Plan) -> Cell:
    jobs = [plan.named[name] for name in plan.cells.get((table.number, row.name, task, leads), ())]
    scores = tuple(score for score in map(place.score, jobs) if score is not None)
    areas = tuple(area for area in (place.score(job, "auroc") for job in jobs) if area is not None) if task == "Dx" else ()
    mean, interval = over_seeds(scores) if scores else (None, None)
    auroc, auroc_interval = over_seeds(areas) if areas else (None, None)
    printed = row.printed[task][leads]
    state: State = "not yet"
    if printed is None:
        state = "none in the paper"
    elif not jobs:
        state = "not asked"
    elif scores:
        state = "done" if len(scores) == len(jobs) else "part"
    elif any(place.why(job) for end in jobs for job in chain_of(plan, end)):
        state = "failed"
    return Cell(
        table=table.number,
        row=row.name,
        task=task,
        leads=leads,
        column=table.column(leads),
        mean=mean,
        interval=interval if len(scores) > 1 else None,
        bold=False,
        seeds_done=len(scores),
        seeds_asked=len(jobs),
        state=state,
        paper_mean=printed[0] if printed else None,
        paper_interval=printed[1] if printed else None,
        scores=scores,
        auroc=auroc,
        auroc_interval=auroc_interval if len(areas) > 1 else None,
    )


def chain_of(plan: Plan, job: Job) -> list[Job]:
    """A job and all that it needs."""
    return [job, *(before for needed in job.needs for before in chain_of(plan, plan.named[needed]))]


def _with_bold(cell: Cell, table: Table, found: list[Cell]) -> Cell:
    """As the table's caption has it; scores that print alike are alike."""
    rivals = [o for o in found if (o.task, o.leads) == (cell.task, cell.leads) and o.mean is not None and o.row != cell.row]
    if table.bold == "gain":
        rivals = [other for other in rivals if other.row == table.rows[cell.row].against]
    if cell.mean is None or not rivals:
        return cell
    mine, best = round(cell.mean, 3), max(round(other.mean or 0.0, 3) for other in rivals)
    return replace(cell, bold=mine > best or (table.bold == "best" and mine == best))


def write(place: Place, table: Table, plan: Plan, scale: Scale, data: Data, seeds: int) -> None:
    found, told = cells(place, table, plan), protocol(scale, data, seeds)
    path = place.out / f"table-{table.number}"
    about = {"table": table.number, "title": table.title, "protocol": told, "scale": scale.name, "data": asdict(data)}
    place.keep(path.with_suffix(".json"), about | {"cells": [asdict(cell) for cell in found]})
    rows = [asdict(cell) | {"scores": " ".join(map(repr, cell.scores))} for cell in found]
    write_whole(path.with_suffix(".csv"), as_csv([list(rows[0]), *(list(row.values()) for row in rows)]))
    write_whole(path.with_suffix(".md"), markdown(table, found, told))


def markdown(table: Table, found: list[Cell], told: str) -> str:
    """The rows and columns that were asked for."""
    asked = [cell for cell in found if cell.state not in ("not asked", "none in the paper")] or found
    rows, tasks = {cell.row for cell in asked}, [task for task in TASKS if task in {cell.task for cell in asked}]
    columns = [leads for leads in LEADS if leads in {cell.leads for cell in asked}]
    head = ["Methods", "", *(table.column(leads) for leads in columns)]
    lines = [f"# Table {table.number}: {table.title}", "", told, "", _line(head), _line(["---"] * len(head))]
    for row in (row for row in table.rows.values() if row.name in rows):
        for task in tasks:
            own = [cell for cell in found if (cell.row, cell.task) == (row.name, task) and cell.leads in columns]
            lines.append(_line([row.name if task == tasks[0] else "", f"{task}.", *map(_text, own)]))
            if any(cell.auroc is not None for cell in own):
                lines.append(_line(["", "AUROC", *(_number(cell.auroc, cell.auroc_interval) for cell in own)]))
    bold = "the best of its column" if table.bold == "best" else "better than without random lead masking"
    lines += ["", f"Each cell: ours / the paper's. Bold: {bold}, among ours. {_marks(asked)}".rstrip()]
    return "\n".join(lines) + "\n"


def _line(parts: list[str]) -> str:
    return "| " + " | ".join(parts) + " |"


def _text(cell: Cell) -> str:
    if cell.state == "none in the paper":
        return "-"
    ours = {"failed": "failed", "not yet": "...", "not asked": ""}.get(cell.state) or _number(cell.mean, cell.interval)
    if cell.bold:
        ours = f"**{ours}**"
    if cell.state == "part":
        ours += f" [{cell.seeds_done}/{cell.seeds_asked}]"
    return f"{ours} / {_number(cell.paper_mean, cell.paper_interval)}".strip()


def _number(mean: float | None, interval: float | None) -> str:
    if mean is None:
        return ""
    return f"{mean:.3f}" + (f" ± {interval:.3f}" if interval is not None else "")


def _marks(found: list[Cell]) -> str:
    states = {cell.state for cell in found}
    return " ".join(text for state, text in MARKS.items() if state in states)


def protocol(scale: Scale, data: Data, seeds: int) -> str:
    """How this differs from the paper, in one paragraph."""
    parts = [f"Scale `{scale.name}`, {_data(data)}"]
    parts.append(
        f"A cell is the mean over {seeds} seed{'s' * (seeds != 1)} of fine-tuning, from one pre-trained model"
        + (", ± half of the 95 % interval (Student's t)" if seeds > 1 else "")
        + "; Dx. is the CinC score, AUROC the mean over the classes of the same outputs, Id. the accuracy of identification."
    )
    best = flat(scale.sets["diagnosis"]).get("train.best", "auroc")
    parts.append(f"Dx. keeps the step with the best {'CinC score' if best == 'challenge' else best.upper()} of validation.")
    changed = list(_changes(scale))
    parts.append(
        f"Otherwise than in the configurations of the paper: {'; '.join(changed)}."
        if changed
        else "The settings of pre-training and fine-tuning are those of the paper's configurations."
    )
    return " ".join(parts)


def _data(data: Data) -> str:
    dx = " / ".join(f"{data.count('dx', role):,}" for role in ("train", "valid", "test"))
    leak = ", split by crop as in the authors' code: crops of one ECG lie on both sides" if data.split == "paper-split" else ""
    return (
        f"dataset {data.fingerprint[:12]}: {data.count('pretrain'):,} crops of 10 s for pre-training (the paper: "
        f"{PAPER_DATA['pretrain']}), {dx} for training, validation and test of diagnosis ({PAPER_DATA['dx']}), "
        f"{data.count('id', 'probe'):,} probes for identification ({PAPER_DATA['id']}){leak}."
    )


def _changes(scale: Scale) -> Iterator[str]:
    """Only what a scale sets to another value than the file below it."""
    files = {"pretrain": CONFIGS / "pretrain" / "w2v_cmsc_rlm.yaml"}
    files |= {stage: CONFIGS / "finetune" / f"{stage}.yaml" for stage in TASKS.values()}
    for stage, path in files.items():
        below = flat(read(path))
        changed = {key: value for key, value in scale.sets[stage].items() if below.get(key) != value and value is not None}
        told = [f"{key} {value}" for key, value in changed.items() if key not in SILENT]
        if stage == "pretrain" and told:
            config: Config = load(path, as_arguments(scale.sets[stage]))
            told.insert(0, f"a model of {parameters(config.model) / 1e6:.2g} M parameters")
        if told:
            yield f"{stage}: {', '.join(told)}"
