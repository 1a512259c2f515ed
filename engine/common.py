"""Shared by the whole engine: lead names, metrics, errors, shipped configs, a run's files, atomic writes, ranks.

parse_leads("3")                  # (0, 1, 7); also "12", "6", "2", "1" or names: "I,II,V2"
describe_leads((0, 1, 7))         # "I,II,V2"
METRIC_OF["mae"].lower_is_better  # True
find_config("w2v", "pretrain")    # a file, or a shipped config
write_whole(path, text)           # atomic: the whole file or nothing

Signals hold all twelve leads in the order of LEADS until the last step of augmentation. For a
subset of leads, that step either sets the others to zero (padded: the paper's "P-N leads", for a
model of twelve channels) or drops them (a model of N channels).
"""

import difflib
import functools
import json
import math
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from omnilead.data_tools.cli import UserError
from omnilead.data_tools.constants import LEADS as LEADS
from omnilead.data_tools.plugins import blame
from omnilead.data_tools.plugins import plugin as plugin
from omnilead.data_tools.storage import locked_by_another as locked_by_another
from omnilead.data_tools.storage import missing_package as missing_package
from omnilead.data_tools.storage import prefetch as prefetch
from omnilead.data_tools.storage import read_into as read_into
from omnilead.data_tools.storage import sync as sync
from omnilead.data_tools.storage import write_at as write_at
from omnilead.data_tools.storage import write_whole as write_whole

ARRAYS = (".npy", ".npz")
File = str | os.PathLike[str]
Kind = TypeVar("Kind")
Facts = dict[str, Any]  # by name, as in a JSON object
# Files in RUN: training writes them, engine.report.run_report and engine.status read them
METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"
PROMETHEUS = "metrics.prom"
LOCK = ".lock"  # held while a process trains
REPORT = "report.html"
LARGEST = 1e12  # larger numbers cannot be steps, losses, rates or seconds
LABELS = "labels.parquet"  # the label table that a run was fine-tuned on
VALID = "valid/"  # prefix of validation metrics where they appear beside training metrics
LIMB, ALL = tuple(range(6)), tuple(range(12))
# Oh et al. 2022, section 4
SUBSETS = {
    "12": ALL,
    "6": LIMB,
    "3": (0, 1, 7),
    "2": (0, 1),
    "1": (0,),
}
_INDEX = {lead.upper(): i for i, lead in enumerate(LEADS)}
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
OWN = re.compile(r"(?s).+\.py:\w+")  # file.py:Name, the user's own code
FILE_NAME = re.compile(r"\w[\w.-]{0,99}")  # in a model folder


class Metric(NamedTuple):
    """All that the settings, the commands and the reports know of a metric;
    engine.evaluation.metrics computes it."""

    name: str  # in JSON and in the settings
    label: str
    lower_is_better: bool | None  # None: it chooses no checkpoint
    kinds: tuple[str, ...] = ()  # of the tasks that are scored by it
    in_brief: bool = False  # shown where there is little room: a terminal, the tiles of a run
    in_bench: bool = False  # shown where models are compared
    percent: bool = False


_YES_NO = ("binary", "multilabel")
_CLASSES = (*_YES_NO, "multiclass")
# The first of a kind is the score of its tasks, and chooses their checkpoints
METRIC_OF = {
    metric.name: metric
    for metric in (
        Metric("loss", "loss", True),
        # of the 26 classes of the CinC Challenge alone; `chosen`: with thresholds from validation
        Metric("challenge", "CinC 2021 score at 0.5", False, in_brief=True, in_bench=True),
        Metric("challenge_chosen", "CinC 2021 score, chosen thresholds", None, in_bench=True),
        Metric("auroc", "AUROC", False, _CLASSES, in_brief=True, in_bench=True),
        Metric("auprc", "AUPRC", False, _CLASSES, in_brief=True, in_bench=True),
        Metric("accuracy", "accuracy", False, _CLASSES, in_bench=True, percent=True),
        Metric("balanced_accuracy", "balanced accuracy", False, ("multiclass",)),
        Metric("f_measure", "F-measure", False, _CLASSES, in_brief=True),
        Metric("sensitivity", "sensitivity", False, _YES_NO),
        Metric("specificity", "specificity", False, _YES_NO),
        Metric("brier", "Brier score", True, _CLASSES, in_brief=True, in_bench=True),
        Metric("mae", "mean absolute error", True, ("regression",), in_brief=True, in_bench=True),
        Metric("rmse", "RMSE", True, ("regression",)),
        Metric("r2", "R\u00b2", False, ("regression",), in_brief=True),
        Metric("pearson", "Pearson r", False, ("regression",)),
        Metric("mean_error", "mean error", None),
        Metric("sd_error", "SD of the error", None),
        Metric("c_index", "C-index", False, ("survival",), in_brief=True, in_bench=True),
        Metric(
            "identification_accuracy",
            "patients recognised",
            False,
            ("identity",),
            in_brief=True,
            percent=True,
        ),
        Metric("accuracy_local", "local accuracy", None, in_brief=True, percent=True),
        Metric("accuracy_global", "global accuracy", None, in_brief=True, percent=True),
        Metric("accuracy_whitened", "accuracy, whitened", None, in_bench=True),
    )
}


def listed(names: Sequence[Any], most: int) -> str:
    """The first of these names, for a message."""
    text = ", ".join(map(str, names[:most]))
    if len(names) > most:
        text += ", ..."
    return text


def label_of(metric: str) -> str:
    return METRIC_OF[metric].label if metric in METRIC_OF else metric.replace("_", " ")


class ConfigError(UserError):
    """A setting is wrong: the message is one line with the key, its value and what to write
    instead."""


class OutputError(UserError):
    """A result cannot be computed or written: the message is one line."""


def leads_in_order(leads: str | int | Iterable[str], key: str = "leads") -> tuple[int, ...]:
    """Indices into LEADS, in the order given."""
    mend = f'use {", ".join(SUBSETS)}, or names out of {" ".join(LEADS)} such as "I,II,V2"'
    text = str(leads) if isinstance(leads, str | int) else ",".join(map(str, leads))
    if text.strip() in SUBSETS:
        return SUBSETS[text.strip()]
    names = [name.strip().upper() for name in text.split(",")]
    unknown = [name for name in names if name not in _INDEX]
    if unknown:
        raise ConfigError(f"{key}={text!r}: no lead is called {unknown[0]!r}: {mend}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{key}={text!r}: a lead is named twice: {mend}")
    return tuple(_INDEX[name] for name in names)


def parse_leads(leads: str | int | Iterable[str], key: str = "leads") -> tuple[int, ...]:
    """Indices into LEADS, ascending: a model takes its leads in the order of LEADS, whatever order
    is given."""
    return tuple(sorted(leads_in_order(leads, key)))


def describe_leads(leads: Iterable[int]) -> str:
    """The names of leads; the inverse of `parse_leads`."""
    return ",".join(LEADS[i] for i in leads)


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` updated with `above`, section by section."""
    both = dict(below)
    for name, value in above.items():
        inner = both.get(name)
        both[name] = (
            merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return both


def one_line_errors(kind: type[Kind]) -> type[Kind]:
    """Decorates a dataclass that pydantic checks: a wrong argument is a ConfigError."""
    from pydantic import ValidationError  # late, so that --help does not wait for it

    validate: Any = kind.__init__

    @functools.wraps(validate)
    def checked(self: Any, *args: Any, **settings: Any) -> None:
        try:
            validate(self, *args, **settings)
        except ValidationError as error:
            raise ConfigError(f"{kind.__name__}: {_wrong_setting(kind, error)}") from None

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


def _wrong_setting(kind: Any, error: Any) -> str:
    errors, mend = error.errors(include_url=False), ""
    key, given = str(errors[0]["loc"][0]), errors[0]["input"]
    wrong = f"{key}={reprlib.repr(given)}"
    if errors[0]["type"] != "unexpected_keyword_argument":
        if isinstance(given, list) and "tuple_type" in [one["type"] for one in errors]:
            mend = f": write {key}={reprlib.repr(tuple(given))}"
        return f"{wrong}: {errors[0]['msg'][0].lower()}{errors[0]['msg'][1:]}{mend}"
    for name, field in kind.__dataclass_fields__.items():
        if key in getattr(field.type, "__dataclass_fields__", ()):
            part = f"{field.type.__name__}({key}=...)"
            return f"{wrong}: belongs to {name}: write {name}={part}"
    return f"{wrong}: no such setting: they are {', '.join(kind.__dataclass_fields__)}"


@contextmanager
def blaming(setting: str, hint: str = "") -> Iterator[None]:
    """Wraps plugged-in code: whatever it raises becomes one line about the setting that named
    it."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"{setting}: {error if isinstance(error, ConfigError) else blame(error)}{hint}"
        ) from None


def find_config(
    name: str | Path, folder: str = "", key: str = "--config", beside: str | Path = ""
) -> Path:
    """Finds a file by its path relative to `beside`, or a shipped config by its name, with or
    without suffix."""
    stem = str(name).removeprefix("configs/").removeprefix(f"{folder}/")
    for path in (
        Path(beside, name),
        *(CONFIGS / folder / f"{stem}{suffix}" for suffix in ("", ".yaml", ".json")),
    ):
        if os.path.lexists(path) and not os.path.isdir(path):  # named pipes are allowed
            return path
    names = shipped(folder)
    near = difflib.get_close_matches(Path(stem).stem, names, 3, 0.5)
    mend = f"did you mean {', '.join(near)}?" if near else f"use {', '.join(names)}"
    raise ConfigError(
        f"{key}{' ' if key[0] == '-' else '='}{str(name)!r}: no such file or shipped config: {mend}"[
            :500
        ]
    )


def shipped(folder: str) -> list[str]:
    """The names of the configs in a folder."""
    return sorted(path.stem for path in (CONFIGS / folder).glob("*.*"))


def environment() -> tuple[int, int, int]:
    """Rank, world size and local rank, as set by the launcher."""
    names = ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")
    try:
        rank, world, local = (int(os.environ.get(name, default)) for name, default in names)
        if not 0 <= rank < world:
            raise ValueError(f"RANK={rank}, WORLD_SIZE={world}")
    except ValueError as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE, LOCAL_RANK in the environment: {error}: start with deepspeed or "
            "torchrun"
        ) from None
    return rank, world, local


def cores_per_rank() -> int:
    """CPU cores of this machine for each of its ranks."""
    here = next(
        (
            int(os.environ[name])
            for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")
            if os.environ.get(name)
        ),
        1,
    )
    return max(1, len(os.sched_getaffinity(0)) // here)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts by dotted key: {"train.lr": 5e-5, ...}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{name}": value}
        )
    return flat


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of metrics.jsonl or validation.jsonl in the order of their steps, and the number of
    lines that are none. A step that was repeated after a restart counts once."""
    by_step: dict[float, dict[str, Any]] = {}
    unreadable = 0
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            step = number(row["step"])
        except (ValueError, LookupError, TypeError, RecursionError):
            step = math.nan
        if math.isfinite(step):
            by_step[step] = row
        else:
            unreadable += bool(line.strip())
    return [by_step[step] for step in sorted(by_step)], unreadable


def number(value: Any) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if known else math.nan
