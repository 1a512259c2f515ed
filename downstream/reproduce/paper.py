"""Plans the jobs that reproduce the paper's tables (configs/reproduce/paper.yaml) at a scale
(configs/reproduce/scales/*.yaml). A job that several cells or tables need is in the plan once.

paper_tables()[1].rows["W2V"].printed["Dx"][12]             # [0.714, 0.011]
ReproductionScale.read("small").settings["pretrain"]  # {"model.width": 128, ...}: set over configs/pretrain/METHOD.yaml
plan = make_plan([paper_tables()[1]], scale, data, folder, seeds=3)
plan.jobs["pretrain/w2v-12"]                          # every job is after those that it needs
plan.cells[1, "W2V", "Dx", 3]                         # names of the evaluations behind a cell, one per seed

A method is pre-trained once for each set of leads, with its config's seed; the seeds of a cell are
those of fine-tuning. Tables 1, 3 and 4 fine-tune the 12-lead model in every column; table 2 has a
model for each set of leads.
"""

import json
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from omnilead.engine.settings.commandline import read_yaml
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.files import CONFIGS, find_config, flatten
from omnilead.engine.training.config import Config, check_config, load_config

from ..tasks.config import FinetuneConfig
from .jobs import Job, WorkDir, job_of_step

Settings = dict[str, Any]
PAPER_CONFIGS = CONFIGS / "reproduce"
# By the paper's name of a task: its config, configs/finetune/NAME.yaml
CONFIG_OF_TASK = {"Dx": "diagnosis", "Id": "identification"}
LEAD_COUNTS = (12, 6, 3, 2, 1)
STAGES = ("pretrain", *CONFIG_OF_TASK.values())


@dataclass(frozen=True)
class PaperRow:
    """A row of a table in the paper: a method, and the scores that the paper prints."""

    name: str
    pretrain: str  # name of the method's config, configs/pretrain/NAME.yaml
    # By task and number of leads: the paper's mean and half of its interval; None if the paper has
    # no such cell
    printed: Mapping[str, Mapping[int, list[float] | None]]
    random: bool = False  # fine-tuned from random weights, without pre-training
    against: str = ""  # if the table's `bold` is "gain": the row to compare with
    # By task: settings that only this row's fine-tuning has
    finetune: Mapping[str, Settings] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper."""

    number: int
    title: str
    # True: all columns fine-tune the model that was pre-trained on 12 leads, and missing leads are
    # zeros. False: each number of leads has a pre-trained model of its own
    padded: bool
    # Which cells are bold: the best of a column ("best"), or those better than the row `against`
    # ("gain")
    bold: str
    rows: Mapping[str, PaperRow]

    def column_title(self, leads: int) -> str:
        return f"{'P-' if self.padded and leads < 12 else ''}{leads}-lead"


@cache
def read_paper_config() -> Settings:
    """Returns configs/reproduce/paper.yaml: the tables, the steps of a cell, and the expected
    minutes of each kind of job."""
    return read_yaml(PAPER_CONFIGS / "paper.yaml")


@cache
def paper_tables() -> dict[int, PaperTable]:
    built = {}
    for number, table in read_paper_config()["tables"].items():
        rows = {name: PaperRow(name, **row) for name, row in table["rows"].items()}
        built[number] = PaperTable(number=number, **table | {"rows": rows})
    return built


@dataclass(frozen=True)
class ReproductionScale:
    """Settings that make the models smaller or the training shorter. `settings`: by stage, then by
    dotted key."""

    name: str
    settings: Mapping[str, Settings]
    minutes: Mapping[str, float]  # by kind of job: its expected duration

    @classmethod
    def read(cls, name: str) -> "ReproductionScale":
        """Reads a shipped scale by its name, or a YAML file of the same form by its path."""
        path = find_config(name, "reproduce/scales", "--scale").absolute()
        tree = read_yaml(path)
        for stage, section in tree.items():
            if stage not in (*STAGES, "minutes"):
                raise ConfigError(f"{path}: no stage is called {stage}: use {', '.join(STAGES)}")
            if section is not None and not isinstance(section, dict):
                raise ConfigError(
                    f"{path}: {stage} is {section!r}: write a table of keys and values"
                )
        settings = {}
        for stage in STAGES:
            section = tree.get(stage) or {}
            kind: type[Any] = Config if stage == "pretrain" else FinetuneConfig
            base: Settings = {}
            if "base" in section:
                name = str(section.pop("base"))
                base = read_yaml(
                    find_config(name, kind.config_folder, f"{path}: base", path.parent),
                    kind.config_folder,
                )
            settings[stage] = flatten(base) | flatten(section)
            for key in ("run", "data.datasets"):  # each job sets these two itself
                settings[stage].pop(key, None)
            # The settings are checked now, so that a wrong one does not fail after days of
            # pre-training
            method = "w2v_cmsc_rlm" if stage == "pretrain" else stage
            places = {"data.datasets": ["DATASET"], "start": "RUN"}
            check_config(load_config(method, {**settings[stage], **places}, kind), 1)
        usual = read_paper_config()["minutes"]
        minutes = usual | (tree.get("minutes") or {})
        if minutes.keys() != usual.keys() or set(map(type, minutes.values())) - {int, float}:
            raise ConfigError(
                f"{path}: minutes is {minutes}: write a number for {', '.join(usual)}"
            )
        return cls(
            path.stem if path.parent == PAPER_CONFIGS / "scales" else str(path), settings, minutes
        )


def set_options_text(settings: Settings) -> str:
    """Returns the settings as --set options of a command. Values are JSON, which is also YAML."""
    pairs = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return " ".join(f"--set {shlex.quote(pair)}" for pair in pairs)


@dataclass(frozen=True)
class DatasetInfo:
    """Facts about the dataset that the tables are reproduced on."""

    path: str
    fingerprint: str
    split: str  # the value of `shard --plan` that assigned the roles, such as paper or paper-split
    roles: Mapping[str, Any]  # the number of crops of each role, as in dataset.json

    def count_crops(self, group: str, role: str = "") -> int:
        """Returns the number of crops with a role, such as dx train or pretrain."""
        counts = self.roles.get(group, 0)
        return int(counts if isinstance(counts, int) else counts.get(role, 0))


@dataclass
class PaperPlan:
    """The jobs that fill the chosen tables, and the cells that they fill."""

    tables: Sequence[PaperTable]
    scale: ReproductionScale
    data: DatasetInfo
    folder: WorkDir
    seeds: int
    jobs: dict[str, Job] = field(default_factory=dict)
    # By table, row, task and number of leads: the names of the evaluations, one for each seed
    cells: dict[tuple[int, str, str, int], list[str]] = field(default_factory=dict)
    # By path of a YAML file below DIR: the settings that are written to it. Fine-tuning starts from
    # random weights of their architecture
    starts: dict[str, Settings] = field(default_factory=dict)

    def add_cell(self, table: PaperTable, row: PaperRow, task: str, leads: int, seed: int) -> str:
        """Adds the paper's steps for one seed of a cell as jobs. Returns the name of the evaluation,
        which is the last of them."""
        channels, stage = 12 if table.padded else leads, CONFIG_OF_TASK[task]
        pretraining = dict(self.scale.settings["pretrain"])
        if channels < 12:
            pretraining |= {"augment.leads": channels, "augment.padded": False}
            pretraining["model.leads"] = channels
        start, steps = f"pretrain/{row.pretrain}-{channels}", read_paper_config()["steps"]
        if row.random:  # the first step is pre-training, which random weights skip
            start, steps = f"starts/random-{channels}.yaml", steps[1:]
            tree = load_config(row.pretrain, pretraining, Config).tree()
            self.starts[start] = {key: tree[key] for key in tree if key not in ("run", "data")}
        column = table.column_title(leads).removesuffix("-lead")
        words = {
            "out": shlex.quote(str(self.folder.path)),
            "data": shlex.quote(self.data.path),
            "method": row.pretrain,
            "pretraining": set_options_text(pretraining),
            "start": start,
            "task": stage,
            "finetuning": set_options_text(
                {**row.finetune.get(stage, {}), **self.scale.settings[stage]}
            ),
            "leads": leads,
            "padded": json.dumps(channels == 12),
            "seed": seed,
            "cell": f"{Path(start).stem}/{stage}-{column}-seed{seed}",
        }
        bases = {
            "pretrain": settings_checksum("pretrain", row.pretrain),
            "finetune": settings_checksum("finetune", stage, self.starts.get(start)),
        }
        for step in steps:
            job = job_of_step(step, words, self.jobs, self.folder.path)
            minutes = self.scale.minutes[job.kind]
            job = replace(job, minutes=minutes, basis=bases.get(job.kind, ""))
            self.jobs.setdefault(job.name, job)
        return job.name


def make_plan(
    chosen: Sequence[PaperTable], scale: ReproductionScale, data: DatasetInfo, folder: WorkDir, seeds: int,
    rows: Sequence[str] = (), leads: Sequence[int] = (), tasks: Sequence[str] = (),
) -> PaperPlan:  # fmt: skip
    """Returns the plan for the chosen tables. `rows`, `leads` and `tasks` select cells; if one of
    them is empty, it excludes none."""
    names = list(dict.fromkeys(name for table in chosen for name in table.rows))
    if unknown := [name for name in rows if name not in names]:
        numbers = ", ".join(str(table.number) for table in chosen)
        raise ConfigError(
            f"--rows {unknown[0]!r}: table {numbers} has no such row: use {', '.join(names)}"
        )
    plan = PaperPlan(chosen, scale, data, folder, seeds)
    for table in chosen:
        for row, n, task in product(
            table.rows.values(), leads or LEAD_COUNTS, tasks or CONFIG_OF_TASK
        ):
            if row.printed[task][n] and (not rows or row.name in rows):
                names = [plan.add_cell(table, row, task, n, seed) for seed in range(seeds)]
                plan.cells[table.number, row.name, task, n] = names
    # Pre-training comes first, because it takes longest and fine-tuning waits for it
    plan.jobs = dict(sorted(plan.jobs.items(), key=lambda item: item[1].kind != "pretrain"))
    return plan


def settings_checksum(folder: str, name: str, start: Settings | None = None) -> str:
    """Returns a checksum of the settings of a training that its command does not show: those in the
    config's file, and `start`, those of the random weights that fine-tuning starts from."""
    text = json.dumps([read_yaml(CONFIGS / folder / f"{name}.yaml"), start])
    return f" {zlib.crc32(text.encode()):08x}"
