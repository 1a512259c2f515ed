"""A table -> the jobs that make its cells: a pure function of (table, scale, seeds, data); each job once, whoever needs it.

    plan = make([tables()[1]], Scale.read("small"), data, out, seeds=3)
    plan.jobs                                  # pre-train, fine-tune, evaluate; what a job needs stands before it
    plan.cells[1, "W2V", "Dx", 3]              # the evaluations behind a cell, one a seed

A method is pre-trained once for a set of leads, with the seed of its own file; seeds are those of fine-tuning. Tables 1, 3
and 4 start all their cells from the model of 12 leads; table 2 has a model for each set, and at 12 leads the same one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from engine.common import ConfigError, describe_leads, parse_leads
from engine.config import CONFIGS, Config, FinetuneConfig, check, load
from engine.model.config import ModelConfig, flops_per_crop
from engine.reproduction.paper import LEADS, TASKS, Row, Scale, Table, as_arguments, flat
from engine.yaml_files import read

Kind = Literal["pretrain", "finetune", "evaluate"]
KINDS: tuple[Kind, ...] = ("pretrain", "finetune", "evaluate")
DOORS = {"pretrain": ("engine/pretrain.py",), "finetune": ("engine/finetune.py",), "evaluate": ("-m", "engine.evaluate")}
GROUPS = {"Dx": "dx", "Id": "id"}  # of roles, in dataset.json
MOMENTS = 3  # numbers that a checkpoint holds for each parameter: itself and Adam's two


@dataclass(frozen=True)
class Data:
    """What a plan must know of the dataset."""

    path: str
    fingerprint: str
    split: str  # the plan of its roles: paper, paper-split, all
    roles: Mapping[str, Any]  # crops of each role, as dataset.json counts them

    def count(self, group: str, role: str = "") -> int:
        found = self.roles.get(group, 0)
        return int(found if isinstance(found, int) else found.get(role, 0))


@dataclass(frozen=True)
class Job:
    name: str
    kind: Kind
    command: tuple[str, ...]  # after `python`
    result: str  # below DIR; there if and only if the job is done
    needs: tuple[str, ...]  # names of jobs
    flops: float
    disk: float  # bytes that stay
    scratch: float = 0.0  # bytes while it runs
    says: Mapping[str, str] = field(default_factory=dict)  # what the file of an evaluation must hold, beside the score


@dataclass
class Plan:
    named: dict[str, Job] = field(default_factory=dict)
    cells: dict[tuple[int, str, str, int], tuple[str, ...]] = field(default_factory=dict)  # table, row, task, leads
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each method and task, with the scale's
    starts: dict[str, dict[str, Any]] = field(default_factory=dict)  # files below DIR for models that are not pre-trained
    configs: list[Config] = field(default_factory=list)  # of each model

    @property
    def jobs(self) -> list[Job]:
        """Pre-training first, or at the end all workers would wait for the last of it."""
        return sorted(self.named.values(), key=lambda job: job.kind != "pretrain")


@dataclass(frozen=True)
class Choice:
    """Of a table's cells; empty: all."""

    rows: tuple[str, ...] = ()
    leads: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()

    def check(self, chosen: Sequence[Table]) -> None:
        known = [name for table in chosen for name in table.rows]
        for name in self.rows:
            if name not in known:
                numbers = ", ".join(str(table.number) for table in chosen)
                raise ConfigError(f"--rows {name!r}: table {numbers} has no such row: use {', '.join(dict.fromkeys(known))}")

    def has(self, row: str, task: str, leads: int) -> bool:
        pairs = ((self.rows, row), (self.tasks, task), (self.leads, leads))
        return all(not wanted or value in wanted for wanted, value in pairs)


@dataclass(frozen=True)
class Model:
    """What fine-tuning starts from."""

    name: str
    start: str  # below DIR
    needs: tuple[str, ...]
    config: Config


def make(chosen: Sequence[Table], scale: Scale, data: Data, out: Path, seeds: int, choice: Choice | None = None) -> Plan:
    choice = choice or Choice()
    choice.check(chosen)
    maker = _Maker(scale, data, out, Plan())
    for table in chosen:
        for row in table.rows.values():
            for leads in LEADS:
                for task in TASKS:
                    if row.printed[task][leads] and choice.has(row.name, task, leads):
                        names = tuple(maker.cell(table, row, task, leads, seed) for seed in range(seeds))
                        maker.plan.cells[table.number, row.name, task, leads] = names
    return maker.plan


@dataclass
class _Maker:
    scale: Scale
    data: Data
    out: Path
    plan: Plan
    known: dict[str, Model] = field(default_factory=dict)

    def cell(self, table: Table, row: Row, task: str, leads: int, seed: int) -> str:
        """The name of the evaluation; whatever leads there is added to the plan."""
        model = self.model(row, 12 if table.padded else leads)
        seen = f"{'P-' if model.config.model.leads == 12 and leads < 12 else ''}{leads}"
        name = f"{model.name}/{TASKS[task]}-{seen}-seed{seed}"
        tuned = self.finetune(model, row, task, leads, seed, name)
        score = f"scores/{name}.json"
        command = ["--model", str(self.out / tuned.result).removesuffix("/model"), "--data", self.data.path]
        command += ["--leads", str(leads), "--role", "test", "--json", str(self.out / part(score))]
        tested = ("test",) if task == "Dx" else ("gallery", "probe")
        crops = sum(self.data.count(GROUPS[task], role) for role in tested)
        flops = crops * _flops(model.config.model) / 3  # no backward
        says = {"model": f"finetune/{name}", "data": self.data.fingerprint, "leads": describe_leads(parse_leads(leads))}
        door = (*DOORS["evaluate"], *command)
        self.add(Job(f"evaluate/{name}", "evaluate", door, score, (tuned.name,), flops, 4096, says=says))
        return f"evaluate/{name}"

    def model(self, row: Row, leads: int) -> Model:
        method, name = row.pretrain, f"{'random' if row.random else row.pretrain}-{leads}"
        if name not in self.known:
            path = CONFIGS / "pretrain" / f"{method}.yaml"
            of_leads = {} if leads == 12 else {"augment.leads": leads, "augment.padded": False, "model.leads": leads}
            sets = {**self.scale.sets["pretrain"], **of_leads}
            config: Config = load(path, as_arguments({**sets, "data.datasets": [self.data.path]}))
            check(config, 1)
            self.plan.settings[f"pretrain-{method}"] = flat(read(path)) | dict(self.scale.sets["pretrain"])
            needs: tuple[str, ...] = ()
            if row.random:
                start = f"starts/{name}.yaml"
                self.plan.starts[start] = {key: value for key, value in config.tree().items() if key not in ("run", "data")}
            else:
                job = self.pretrain(name, path, sets, config)
                start, needs = f"pretrain/{name}", (job.name,)
            self.known[name] = Model(name, start, needs, config)
            self.plan.configs.append(config)
        return self.known[name]

    def pretrain(self, name: str, path: Path, sets: Mapping[str, Any], config: Config) -> Job:
        t = config.train
        per_epoch = max(1, self.data.count("pretrain") // t.batch_crops)
        steps = t.steps or math.ceil((t.epochs or 0) * per_epoch)
        flops = steps * t.batch_crops * flops_per_crop(config.model, local=config.objective.local > 0)
        command = self.command("pretrain", path, {**sets, "run": str(self.out / "pretrain" / name)})
        size = 4 * parameters(config.model)
        kept = (t.keep + 1) * MOMENTS * size
        return self.add(Job(f"pretrain/{name}", "pretrain", command, f"pretrain/{name}/model", (), flops, size + kept))

    def finetune(self, model: Model, row: Row, task: str, leads: int, seed: int, name: str) -> Job:
        stage = TASKS[task]
        path, over = CONFIGS / "finetune" / f"{stage}.yaml", {**row.tuning[stage], **self.scale.sets[stage]}
        known = f"{stage}{'-random' if row.random else ''}"
        settings = self.plan.settings.get(known) or flat(read(path)) | over
        own = {"run": str(self.out / "finetune" / name), "start": str(self.out / model.start), "augment.leads": leads}
        own |= {"augment.padded": model.config.model.leads == 12, "train.seed": seed}
        if known not in self.plan.settings:  # what is wrong is said before the model is pre-trained
            check(load(path, as_arguments({**over, **own, "data.datasets": [self.data.path]}), FinetuneConfig), 1)
            self.plan.settings[known] = settings
        command = self.command("finetune", path, {**over, **own})
        seen = self.data.count(GROUPS[task], "train")
        flops, size = trained_crops(settings, seen) * _flops(model.config.model), 4 * parameters(model.config.model)
        head = 4 * model.config.model.width * (seen if task == "Id" else 26)  # at most a class for each crop
        result, scratch = f"finetune/{name}/model", 5 * MOMENTS * (size + head)
        return self.add(Job(f"finetune/{name}", "finetune", command, result, model.needs, flops, size, scratch))

    def command(self, door: str, path: Path, sets: Mapping[str, Any]) -> tuple[str, ...]:
        pairs = [("--set", setting) for setting in as_arguments({**sets, "data.datasets": [self.data.path]})]
        return *DOORS[door], "--config", str(path), *chain.from_iterable(pairs)

    def add(self, job: Job) -> Job:
        return self.plan.named.setdefault(job.name, job)


def part(score: str) -> str:
    """Where an evaluation writes: its score counts once it has been read and renamed."""
    return score.removesuffix(".json") + ".part.json"


def trained_crops(settings: Mapping[str, Any], crops: int) -> float:
    """Crops of 10 s that go through the model in a fine-tuning; an epoch shows each crop of the role once."""
    if settings.get("train.steps"):
        return float(settings["train.steps"] * settings.get("train.batch_crops", 1))
    return float((settings.get("train.epochs") or 1) * crops)


def parameters(model: ModelConfig) -> int:
    """About: the matrices of the transformer and the convolutions."""
    width, count = model.leads, 0
    for out, kernel in model.conv:
        count += width * kernel * out
        width = out
    d = model.width
    position = d * d // model.position_groups * model.position_kernel
    return count + width * d + position + model.layers * (4 * d * d + 2 * d * model.ffn)


def _flops(model: ModelConfig) -> float:
    return flops_per_crop(model, local=False)
