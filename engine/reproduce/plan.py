"""The jobs a table needs: pre-train, fine-tune, evaluate. A job that several cells or tables need
is in the plan once.

    plan = make_plan([tables()[1]], ReproductionScale.read("small"), data, out, seeds=3)
    plan.ordered                               # every job, after the jobs it needs
    plan.cells[1, "W2V", "Dx", 3]              # names of the evaluations behind a cell, one per seed

A method is pre-trained once for each set of leads, with its config's seed; the seeds of a cell are
those of fine-tuning. Tables 1, 3 and 4 fine-tune the 12-lead model in every column; table 2 has a
model for each set of leads.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from omnilead.engine.commandline import load, read_yaml
from omnilead.engine.common import ConfigError, flatten
from omnilead.engine.config import CONFIGS, Config, check
from omnilead.engine.model.config import ModelConfig, ObjectiveConfig, flops_per_crop
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.reproduce.paper import (
    LEADS,
    TASKS,
    ReproductionScale,
    Row,
    Settings,
    Table,
    as_arguments,
)
from omnilead.engine.tasks.config import FinetuneConfig

PROGRAMS = {kind: ("-m", f"engine.{kind}") for kind in ("pretrain", "finetune", "evaluate")}
GROUPS = {"Dx": "dx", "Id": "id"}  # of roles, in dataset.json
ADAM = 3  # numbers per parameter in a checkpoint: the weight and Adam's two moments


@dataclass(frozen=True)
class DatasetInfo:
    path: str
    fingerprint: str
    split: str  # how roles were assigned: paper, paper-split, all
    roles: Mapping[str, Any]  # number of crops of each role, as in dataset.json

    def count(self, group: str, role: str = "") -> int:
        counts = self.roles.get(group, 0)
        return int(counts if isinstance(counts, int) else counts.get(role, 0))


@dataclass(frozen=True)
class Job:
    name: str  # its folder below DIR, such as pretrain/MODEL or finetune/MODEL/CELL
    command: tuple[str, ...]  # after `python`
    needs: tuple[str, ...]  # names of jobs to run before
    result: str  # the path below DIR that exists once the job is done
    work: float  # its expected length, in any unit; here FLOPs
    disk: float = 0  # bytes of its result

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


@dataclass
class JobPlan:
    scale: ReproductionScale
    data: DatasetInfo
    out: Path
    jobs: dict[str, Job] = field(default_factory=dict)
    cells: dict[tuple[int, str, str, int], list[str]] = field(
        default_factory=dict
    )  # by table, row, task, leads
    settings: dict[str, Settings] = field(default_factory=dict)  # by method or task, scale included
    models: dict[str, Config] = field(
        default_factory=dict
    )  # by the path below DIR that fine-tuning starts from
    starts: dict[str, Settings] = field(
        default_factory=dict
    )  # the YAML files among these: models with random weights

    @property
    def ordered(self) -> list[Job]:
        """Pre-training first: it takes longest, and the others wait for it."""
        return sorted(self.jobs.values(), key=lambda job: job.kind != "pretrain")

    def add_cell(self, table: Table, row: Row, task: str, leads: int, seed: int) -> str:
        """Adds the jobs for one seed of a cell and returns the name of its evaluation."""
        start = self._start(row, 12 if table.padded else leads)
        model = self.models[start].model
        padded = model.leads == 12
        shown = f"P-{leads}" if padded and leads < 12 else str(leads)
        cell = f"{Path(start).stem}/{TASKS[task]}-{shown}-seed{seed}"
        own = {
            "start": str(self.out / start),
            "augment.leads": leads,
            "augment.padded": padded,
            "train.seed": seed,
        }
        finetune = self._finetune(f"finetune/{cell}", row, task, model, own)
        evaluate, score = f"evaluate/{cell}", f"scores/{cell}.json"
        command = [*PROGRAMS["evaluate"], "--model", str(self.out / finetune)]
        command += ["--data", self.data.path, "--leads", str(leads), "--role", "test"]
        command += ["--json", str(self.out / score)]
        roles = ("test",) if task == "Dx" else ("gallery", "probe")
        crops = sum(self.data.count(GROUPS[task], role) for role in roles)
        flops = crops * flops_per_crop(model, local=False) / 3  # without the backward pass
        self.jobs[evaluate] = Job(evaluate, tuple(command), (finetune,), score, flops, 4096)
        return evaluate

    def _start(self, row: Row, leads: int) -> str:
        """Adds the model that a row's fine-tuning starts from, and returns its path below DIR."""
        start = f"starts/random-{leads}.yaml" if row.random else f"pretrain/{row.pretrain}-{leads}"
        if start in self.models:
            return start
        path = CONFIGS / "pretrain" / f"{row.pretrain}.yaml"
        settings = dict(self.scale.settings["pretrain"])
        self.settings[f"pretrain-{row.pretrain}"] = flatten(read_yaml(path)) | settings
        if leads < 12:
            settings |= {"augment.leads": leads, "augment.padded": False, "model.leads": leads}
        config: Config = load(path, as_arguments(settings | {"data.datasets": [self.data.path]}))
        check(config, 1)
        self.models[start] = config
        if row.random:
            self.starts[start] = {
                key: value for key, value in config.tree().items() if key not in ("run", "data")
            }
            return start
        t, size = config.train, 4 * parameters(config.model)
        steps = t.steps or math.ceil(
            (t.epochs or 0) * max(1, self.data.count("pretrain") // t.batch_crops)
        )
        flops = (
            steps * t.batch_crops * flops_per_crop(config.model, local=config.objective.local > 0)
        )
        self._train(start, path, settings, (), flops, size + (t.keep + 1) * ADAM * size)
        return start

    def _finetune(self, name: str, row: Row, task: str, model: ModelConfig, own: Settings) -> str:
        stage = TASKS[task]
        path = CONFIGS / "finetune" / f"{stage}.yaml"
        settings = {**row.finetune.get(stage, {}), **self.scale.settings[stage]}
        key = f"{stage}-random" if row.random else stage
        if key not in self.settings:
            # an invalid setting is an error now, not after days of pre-training
            everything = settings | own | {"data.datasets": [self.data.path]}
            check(load(path, as_arguments(everything), FinetuneConfig), 1)
            self.settings[key] = flatten(read_yaml(path)) | settings
        used = self.settings[key]
        if used.get("train.steps"):
            crops = used["train.steps"] * used["train.batch_crops"]
        else:
            crops = used["train.epochs"] * self.data.count(GROUPS[task], "train")
        needs = () if row.random else (f"pretrain/{name.split('/')[1]}",)
        flops = crops * flops_per_crop(model, local=False)
        self._train(name, path, settings | own, needs, flops, 4 * parameters(model))
        return name

    def _train(
        self,
        name: str,
        config: Path,
        settings: Settings,
        needs: tuple[str, ...],
        flops: float,
        disk: float,
    ) -> None:
        own = {"run": str(self.out / name), "data.datasets": [self.data.path]}
        command = [*PROGRAMS[name.partition("/")[0]], "--config", config.stem]
        for pair in as_arguments(settings | own):
            command += ["--set", pair]
        self.jobs[name] = Job(name, tuple(command), needs, f"{name}/model", flops, disk)


def make_plan(
    chosen: Sequence[Table], scale: ReproductionScale, data: DatasetInfo, out: Path, seeds: int,
    rows: Sequence[str] = (), leads: Sequence[int] = (), tasks: Sequence[str] = (),
) -> JobPlan:  # fmt: skip
    """The plan for the chosen tables. `rows`, `leads` and `tasks` select cells; if empty, all."""
    names = list(dict.fromkeys(name for table in chosen for name in table.rows))
    if unknown := [name for name in rows if name not in names]:
        numbers = ", ".join(str(table.number) for table in chosen)
        raise ConfigError(
            f"--rows {unknown[0]!r}: table {numbers} has no such row: use {', '.join(names)}"
        )
    plan = JobPlan(scale, data, out)
    for table in chosen:
        for row in table.rows.values():
            for n in leads or LEADS:
                for task in tasks or TASKS:
                    if row.printed[task][n] and (not rows or row.name in rows):
                        cell = [plan.add_cell(table, row, task, n, seed) for seed in range(seeds)]
                        plan.cells[table.number, row.name, task, n] = cell
    return plan


@cache
def parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in Pretrainer(model, ObjectiveConfig()).parameters())
