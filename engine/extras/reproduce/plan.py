"""The jobs a table needs: pre-train, fine-tune, evaluate. A job that several cells or tables need
is in the plan once.

    plan = make_plan([tables()[1]], ReproductionScale.read("small"), data, out, seeds=3)
    plan.timed(seconds_per_crop=0.1)           # every job, after the jobs it needs
    plan.cells[1, "W2V", "Dx", 3]              # names of the evaluations behind a cell, one per seed

A method is pre-trained once for each set of leads, with its config's seed; the seeds of a cell are
those of fine-tuning. Tables 1, 3 and 4 fine-tune the 12-lead model in every column; table 2 has a
model for each set of leads.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...model.config import ModelConfig, ObjectiveConfig
from ...model.pretrainer import Pretrainer
from ...settings.commandline import read_yaml
from ...settings.errors import ConfigError
from ...settings.files import CONFIGS
from ...tasks.config import FinetuneConfig
from ...training.config import Config, check, load
from .jobs import Job
from .paper import LEADS, TASKS, ReproductionScale, Row, Settings, Table, as_arguments

GROUPS = {"Dx": "dx", "Id": "id"}  # of roles, in dataset.json
ADAM = 3  # numbers per parameter in a checkpoint: the weight and Adam's two moments
STARTUP_S = 10.0  # start-up of a process: imports, the dataset, the first step


@dataclass(frozen=True)
class DatasetInfo:
    path: str
    fingerprint: str
    split: str  # how roles were assigned: paper, paper-split, all
    roles: Mapping[str, Any]  # number of crops of each role, as in dataset.json

    def count(self, group: str, role: str = "") -> int:
        counts = self.roles.get(group, 0)
        return int(counts if isinstance(counts, int) else counts.get(role, 0))


@dataclass
class JobPlan:
    scale: ReproductionScale
    data: DatasetInfo
    out: Path
    jobs: dict[str, Job] = field(default_factory=dict)
    crops: dict[str, float] = field(default_factory=dict)  # that a job passes forward and backward
    # by table, row, task, leads
    cells: dict[tuple[int, str, str, int], list[str]] = field(default_factory=dict)
    starts: dict[str, Settings] = field(default_factory=dict)  # YAML files: random weights
    config: Config = field(default_factory=Config)  # of one of the models: all are of one size

    def timed(self, seconds_per_crop: float = 0) -> list[Job]:
        """Pre-training first: it takes longest, and the others wait for it."""
        model = 4.0 * parameters(self.config.model)
        disk = {"pretrain": model * (1 + ADAM * (self.config.train.keep + 1)), "finetune": model}
        jobs = []
        for job in sorted(self.jobs.values(), key=lambda job: job.kind != "pretrain"):
            seconds = STARTUP_S + self.crops[job.name] * seconds_per_crop
            jobs.append(replace(job, minutes=seconds / 60, disk=disk.get(job.kind, 0)))
        return jobs

    def add_cell(self, table: Table, row: Row, task: str, leads: int, seed: int) -> str:
        """Adds the jobs for one seed of a cell and returns the name of its evaluation."""
        channels = 12 if table.padded else leads
        start, stage, group = self._start(row, channels), TASKS[task], GROUPS[task]
        padded = channels == 12
        shown = f"P-{leads}" if padded and leads < 12 else str(leads)
        cell = f"{Path(start).stem}/{stage}-{shown}-seed{seed}"
        finetune, evaluate, score = f"finetune/{cell}", f"evaluate/{cell}", f"scores/{cell}.json"
        settings = {
            **row.finetune.get(stage, {}),
            **self.scale.settings[stage],
            "augment.leads": leads,
            "augment.padded": padded,
            "train.seed": seed,
        }
        crops = self.data.count(group, "train")
        self._train(finetune, stage, settings, FinetuneConfig, crops, start)
        command = ["omnilead", "evaluate", "--model", str(self.out / finetune)]
        command += ["--data", self.data.path, "--leads", str(leads), "--role", "test"]
        command += ["--json", str(self.out / score)]
        self.jobs[evaluate] = Job(evaluate, tuple(command), (finetune,), score)
        tested = [self.data.count(group, role) for role in ("test", "gallery", "probe")]
        self.crops[evaluate] = sum(tested) / 3  # without the backward pass
        return evaluate

    def _start(self, row: Row, channels: int) -> str:
        """Adds the model that a row's fine-tuning starts from, and returns its path below DIR."""
        settings = dict(self.scale.settings["pretrain"])
        if channels < 12:
            settings |= {"augment.leads": channels, "augment.padded": False}
            settings["model.leads"] = channels
        start = f"pretrain/{row.pretrain}-{channels}"
        if row.random:
            start = f"starts/random-{channels}.yaml"
        crops = self.data.count("pretrain")
        self.config = self._train(start, row.pretrain, settings, Config, crops)
        if row.random:  # its settings are all that fine-tuning needs
            del self.jobs[start]
            tree = self.config.tree()
            self.starts[start] = {key: tree[key] for key in tree if key not in ("run", "data")}
        return start

    def _train(
        self, name: str, stem: str, settings: Settings, kind: type[Any], crops: int, start: str = ""
    ) -> Any:
        """Adds a training and returns its config. A wrong setting is an error now, not after days of
        pre-training."""
        path = CONFIGS / kind.folder / f"{stem}.yaml"
        own = {"run": str(self.out / name), "data.datasets": [self.data.path]}
        if start:
            own["start"] = str(self.out / start)
        config = load(path, settings | own, kind)
        check(config, 1)
        self.crops[name] = (config.train.epochs or 0) * crops
        if config.train.steps:
            self.crops[name] = config.train.steps * config.train.batch_crops
        command = ["omnilead", kind.folder, "--config", stem]
        for pair in as_arguments(settings | own):
            command += ["--set", pair]
        needs = (start,) if start in self.jobs else ()
        basis = json.dumps([read_yaml(path), self.starts.get(start)])
        basis = f" {zlib.crc32(basis.encode()):08x}"
        self.jobs[name] = Job(name, tuple(command), needs, f"{name}/model", basis=basis)
        return config


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


def parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in Pretrainer(model, ObjectiveConfig()).parameters())
