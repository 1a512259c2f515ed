"""Files of settings: those shipped in configs/, and trees of settings merged and flattened."""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError

ARRAYS = (".npy", ".npz")


File = str | os.PathLike[str]


CONFIGS = Path(__file__).resolve().parents[2] / "configs"


OWN = re.compile(r"(?s).+\.py:\w+")  # file.py:Name, the user's own code


FILE_NAME = re.compile(r"\w[\w.-]{0,99}")  # in a model folder


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` updated with `above`, section by section."""
    both = dict(below)
    for name, value in above.items():
        inner = both.get(name)
        both[name] = (
            merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return both


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
