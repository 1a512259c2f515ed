"""Settings files: configs shipped in configs/, merging and flattening trees of settings, and files
of the user's own code that settings name."""

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


OWN_CODE = re.compile(r"(?s).+\.py:\w+")  # file.py:Name, the user's own code
CODE_FOLDER = "code"  # folder in a run, with copies of the files of the user's own code
FILE_NAME = re.compile(r"\w[\w.-]{0,99}")  # in a model folder


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Returns `below` updated with `above`, section by section."""
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
    without suffix."""
    stem = str(name).removeprefix("configs/").removeprefix(f"{folder}/")
    for path in (
        Path(beside, name),
        *(CONFIGS / folder / f"{stem}{suffix}" for suffix in ("", ".yaml", ".json")),
    ):
        if os.path.lexists(path) and not os.path.isdir(path):  # named pipes are allowed
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
    """The names of the configs in a folder."""
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
    """The file in file.py:Name; None if `spec` names no file."""
    return Path(spec.rpartition(":")[0]) if ":" in spec else None


def portable_spec(spec: str) -> str:
    """`spec` as it is saved in a model folder, where the file lies next to the weights."""
    return f"{file.name}:{spec.rpartition(':')[2]}" if (file := plugin_file(spec)) else spec


def read_plugins(
    settings: Iterable[tuple[str, str]], run: str, others: Mapping[str, bytes] | None = None
) -> dict[str, bytes]:
    """{name: content} of `others` and of the files that these settings, pairs (name, value), refer
    to. `run` may have copies of the files."""
    files = dict(others or {})
    for setting, spec in settings:
        if file := plugin_file(spec):
            if not FILE_NAME.fullmatch(file.name):  # publishing would leave it out
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
