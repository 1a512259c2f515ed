"""What the paper printed (configs/reproduce/paper.yaml) and at which scale it is made again (configs/reproduce/scales/).

tables()[1].rows["W2V"].printed["Dx"][12] -> (0.714, 0.011)
Scale.read("small").sets["pretrain"] -> {"model.width": 128, ...}, to be set over configs/pretrain/METHOD.yaml
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine.common import ConfigError
from engine.config import CONFIGS
from engine.yaml_files import read

HERE = CONFIGS / "reproduce"
TASKS = {"Dx": "diagnosis", "Id": "identification"}  # as the paper calls them; configs/finetune/TASK.yaml
LEADS = (12, 6, 3, 2, 1)
TABLES = (1, 2, 3, 4)
STAGES = ("pretrain", *TASKS.values())
Printed = tuple[float, float] | None  # mean and half of the interval; None: no such cell


@dataclass(frozen=True)
class Row:
    name: str
    pretrain: str  # the method: configs/pretrain/NAME.yaml
    random: bool  # only its architecture, with random weights
    against: str | None  # the row that it should be better than, where the table is about that
    tuning: Mapping[str, Mapping[str, Any]]  # settings of fine-tuning that are this row's own
    printed: Mapping[str, Mapping[int, Printed]]  # task, leads


@dataclass(frozen=True)
class Table:
    number: int
    title: str
    padded: bool  # pre-trained once on 12 leads; absent leads are zeros
    bold: str  # best: of a column; gain: better than the row `against`
    rows: Mapping[str, Row]

    def column(self, leads: int) -> str:
        return f"{'P-' if self.padded and leads < 12 else ''}{leads}-lead"


@cache
def tables() -> dict[int, Table]:
    if not (HERE / "paper.yaml").is_file():  # the package was installed without the repository
        raise ConfigError(f"{HERE}: no such folder: clone the repository, then `pip install -e .` in it, or run from there")
    return {
        number: Table(number, t["title"], t["padded"], t["bold"], {name: _row(name, row) for name, row in t["rows"].items()})
        for number, t in read(HERE / "paper.yaml")["tables"].items()
    }


def _row(name: str, row: dict[str, Any]) -> Row:
    printed = {task: {leads: tuple(cell) if cell else None for leads, cell in row[task].items()} for task in TASKS}
    tuning = {task: row.get(task, {}) for task in TASKS.values()}
    return Row(name, row["pretrain"], row.get("start") == "random", row.get("against"), tuning, printed)


@dataclass(frozen=True)
class Scale:
    name: str
    sets: Mapping[str, Mapping[str, Any]]  # stage, dotted key

    @classmethod
    def read(cls, name: str) -> "Scale":
        """One that is shipped, or a file of the same form."""
        shipped = HERE / "scales" / f"{name}.yaml"
        path = shipped if name in scales() else Path(name).absolute()
        if not path.is_file():
            raise ConfigError(f"--scale {name!r}: no such scale: use {', '.join(scales())}, or a YAML file of their form")
        tree = read(path)
        unknown = [stage for stage in tree if stage not in STAGES]
        if unknown:
            raise ConfigError(f"{path}: {unknown[0]}: no such stage: use {', '.join(STAGES)}")
        sets = {stage: _over_base(tree.get(stage) or {}, path) for stage in STAGES}
        return cls(name if path == shipped else str(path), sets)


def scales() -> list[str]:
    return sorted(path.stem for path in (HERE / "scales").glob("*.yaml"))


def _over_base(section: Any, path: Path) -> dict[str, Any]:
    """A section over the file that its `base` names, less what a job says itself: where it runs, on which data."""
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {section!r}: a stage is a table of keys and values")
    base = section.get("base")
    below = flat(read(path.parent / str(base))) if base else {}
    both = below | flat({name: value for name, value in section.items() if name != "base"})
    return {key: value for key, value in both.items() if key not in ("run", "data.datasets")}


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    return dict(_leaves(tree, ""))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def as_arguments(sets: Mapping[str, Any]) -> list[str]:
    """For --set: values in JSON, which YAML reads alike."""
    return [f"{key}={json.dumps(value)}" for key, value in sets.items()]
