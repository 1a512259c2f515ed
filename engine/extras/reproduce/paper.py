"""The paper's tables (configs/reproduce/paper.yaml) and the scales to reproduce them at
(configs/reproduce/scales/*.yaml).

tables()[1].rows["W2V"].printed["Dx"][12]             # [0.714, 0.011]
ReproductionScale.read("small").settings["pretrain"]  # {"model.width": 128, ...}: set over configs/pretrain/METHOD.yaml
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ...settings.commandline import read_yaml
from ...settings.errors import ConfigError
from ...settings.files import CONFIGS, find_config, flatten

Settings = dict[str, Any]
HERE = CONFIGS / "reproduce"
# As the paper calls them: configs/finetune/TASK.yaml
TASKS = {"Dx": "diagnosis", "Id": "identification"}
LEADS = (12, 6, 3, 2, 1)
TABLES = (1, 2, 3, 4)
STAGES = ("pretrain", *TASKS.values())


@dataclass(frozen=True)
class Row:
    name: str
    pretrain: str  # the method: configs/pretrain/NAME.yaml
    # By task and leads: mean, half of the interval; None: no cell
    printed: Mapping[str, Mapping[int, list[float] | None]]
    random: bool = False  # random weights instead of pre-trained ones
    against: str = ""  # the row it is compared with, where the table shows gains
    # By task: settings of this row alone
    finetune: Mapping[str, Settings] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    number: int
    title: str
    padded: bool  # pre-trained once on 12 leads; missing leads are zeros
    bold: str  # best: of a column; gain: better than the row `against`
    rows: Mapping[str, Row]

    def column(self, leads: int) -> str:
        return f"{'P-' if self.padded and leads < 12 else ''}{leads}-lead"


@cache
def tables() -> dict[int, Table]:
    found = {}
    for number, table in read_yaml(HERE / "paper.yaml")["tables"].items():
        rows = {name: Row(name, **row) for name, row in table.pop("rows").items()}
        found[number] = Table(number=number, rows=rows, **table)
    return found


@dataclass(frozen=True)
class ReproductionScale:
    """Settings that make the models smaller or the training shorter, by stage and dotted key."""

    name: str
    settings: Mapping[str, Settings]

    @classmethod
    def read(cls, name: str) -> "ReproductionScale":
        """A shipped scale, or a YAML file of the same form."""
        path = find_config(name, "reproduce/scales", "--scale").absolute()
        tree = read_yaml(path)
        if unknown := [stage for stage in tree if stage not in STAGES]:
            raise ConfigError(f"{path}: {unknown[0]}: no such stage: use {', '.join(STAGES)}")
        settings = {}
        for stage in STAGES:
            section = {} if tree.get(stage) is None else tree[stage]
            if not isinstance(section, dict):
                raise ConfigError(f"{path}: {stage}: {section!r}: write a table of keys and values")
            base: Settings = {}
            if "base" in section:
                kind = "pretrain" if stage == "pretrain" else "finetune"
                name = str(section.pop("base"))
                base = read_yaml(find_config(name, kind, f"{path}: base", path.parent), kind)
            settings[stage] = flatten(base) | flatten(section)
            for key in ("run", "data.datasets"):  # each job sets its own
                settings[stage].pop(key, None)
        return cls(path.stem if path.parent == HERE / "scales" else str(path), settings)


def as_arguments(settings: Settings) -> list[str]:
    """Arguments of --set; JSON is also YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]
