"""Finds the configs shipped in configs/, merges and flattens trees of settings, and reads the
files of the user's own code that settings name."""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError, Flag

ARRAY_SUFFIXES = (".npy", ".npz")


File = str | os.PathLike[str]


CONFIGS = Path(__file__).resolve().parents[2] / "configs"


OWN_CODE = re.compile(r"(?s).+\.py:\w+")  # file.py:Name, a function or class in the user's own code
CODE_FOLDER = "code"  # folder of a run for copies of the files of the user's own code
CODE_FILE_NAME = re.compile(r"\w[\w.-]{0,99}")  # what a file of the user's own code may be called


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of `below` updated with `above`, section by section."""
    merged = dict(below)
    for name, value in above.items():
        inner = merged.get(name)
        merged[name] = (
            merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return merged


def find_config(
    name: str | Path, folder: str = "", key: str = Flag("--config"), beside: str | Path = ""
) -> Path:
    """Finds a file by its path relative to `beside`, or a shipped config by its name, with or
    without suffix. `key`: the option or setting that gave the name, for messages."""
    stem = str(name).removeprefix("configs/").removeprefix(f"{folder}/")
    for path in (
        Path(beside, name),
        *(CONFIGS / folder / f"{stem}{suffix}" for suffix in ("", ".yaml", ".json")),
    ):
        # not isfile(), as named pipes are allowed
        if os.path.lexists(path) and not os.path.isdir(path):
            return path
    names = shipped_configs(folder)
    near = difflib.get_close_matches(Path(stem).stem, names, 3, 0.5)
    mend = f"did you mean {', '.join(near)}?" if near else f"use {', '.join(names)}"
    raise ConfigError(
        key,
        f"{' ' if key[0] == '-' else '='}{str(name)!r}: no such file or shipped config: {mend}"[
            :500
        ],
    )


def shipped_configs(folder: str) -> list[str]:
    """Returns the names of the configs in a folder of configs/."""
    return sorted(path.stem for path in (CONFIGS / folder).glob("*.*"))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts to dotted keys: {"train.lr": 5e-5, ...}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{name}": value}
        )
    return flat


def plugin_file(spec: str) -> Path | None:
    """Returns the path of the file in `spec`, file.py:Name; None if `spec` names no file."""
    return Path(spec.rpartition(":")[0]) if ":" in spec else None


def portable_spec(spec: str) -> str:
    """Returns `spec` without the folder of its file, because a model folder holds the file beside
    the weights."""
    return f"{file.name}:{spec.rpartition(':')[2]}" if (file := plugin_file(spec)) else spec


def read_plugin_files(
    settings: Iterable[tuple[str, str]], run: str, others: Mapping[str, bytes] | None = None
) -> dict[str, bytes]:
    """Returns {file name: content} of `others` and of the files of code that the settings name.
    `settings`: pairs (setting, value). `run`: the run's folder; if a file is missing, the
    message names its copy there."""
    files = dict(others or {})
    for setting, spec in settings:
        if file := plugin_file(spec):
            # a file with another name would be left out when the model is published
            if not CODE_FILE_NAME.fullmatch(file.name):
                raise ConfigError(
                    f"{setting}={spec}: name the file with letters, digits, _, - and . only"
                )
            run_copy = Path(run, CODE_FOLDER, file.name)
            if not file.is_file():
                hint = f": the run's copy is {run_copy}" if run_copy.is_file() else ""
                raise ConfigError(f"{setting}={spec}: no such file {file}{hint}")
            if files.setdefault(file.name, content := file.read_bytes()) != content:
                raise ConfigError(
                    f"{setting}={spec}: the run already has a different {file.name}: rename one "
                    "of them"
                )
    return files
