"""Finds the checkpoints in RUN/checkpoints, tells which are complete and intact, and reads their progress.

    path = complete_checkpoints(root)[0]      # the newest; checkpoint_named(root, LATEST): the one that `latest` names
    find_fault(path)                          # what is missing or damaged; None
    read_state(path)["step"]

checkpoint.py writes and loads them.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

import google_crc32c
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omnilead.data_tools.io.errors import Flag
from omnilead.data_tools.io.terminal import UserError, tell

CHECKPOINTS = "checkpoints"  # the folder of checkpoints in RUN
LATEST = "latest"
BEST = "best"
MANIFEST = "manifest.json"
STATE = "state.json"
# DeepSpeed's conversion to the universal format writes this file; a kill may leave it behind
LATEST_UNIVERSAL = "latest_universal"
# The end of error messages about a damaged checkpoint
HOW_TO_RESTORE = "restore the file, or begin a new run with ", Flag("--out"), " NEW"
CHUNK_BYTES = 16 * 2**20
Count = Annotated[int, Field(ge=0, lt=2**63)]


class CheckpointError(UserError):
    """A checkpoint is damaged or missing. The message is one line that names the file."""


class WriteError(UserError):
    """A checkpoint cannot be written; existing checkpoints are intact."""

    code = 1


def crc32c(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = google_crc32c.extend(value, chunk)
    return int(value)


def step_of(path: Path) -> int:
    """Returns the step in a checkpoint's name; -1 if it is not a checkpoint's name."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 19 else -1


def checkpoint_named(root: Path, pointer: str) -> Path | None:
    """Returns the checkpoint whose name is in the file `pointer` (`latest` or `best`); None if the
    file is missing or names none."""
    try:
        path = root / (root / pointer).read_text().strip()
    except (OSError, ValueError):
        return None
    return path if path.parent == root and step_of(path) >= 0 else None


def complete_checkpoints(root: Path) -> list[Path]:
    """Returns the checkpoints that have a manifest, the newest first."""
    complete = (
        path for path in root.glob("step-*") if step_of(path) >= 0 and (path / MANIFEST).is_file()
    )
    return sorted(complete, key=step_of, reverse=True)


def remove_leftovers(root: Path, path: Path) -> None:
    """Makes the folder `root`, and removes from it unfinished checkpoints and temporary files of a
    killed run, and the folder `path`."""
    root.mkdir(exist_ok=True)
    for unfinished in root.glob("step-*"):
        if step_of(unfinished) >= 0 and not (unfinished / MANIFEST).is_file():
            shutil.rmtree(unfinished, ignore_errors=True)
    for temporary in root.glob(".*"):
        temporary.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def find_fault(path: Path) -> str | None:
    """Says what is missing or damaged in a checkpoint; None if it is intact."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        names = {
            file.name for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
        }
        if unlisted := sorted({*names, STATE} - {*manifest, MANIFEST, LATEST_UNIVERSAL}):
            return f"{path / unlisted[0]}: damaged: not listed in {MANIFEST}"
        for name, expected in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{file}: missing"
            if not (
                _matches(file, expected)
                or ("before" in expected and _matches(file, expected["before"]))
            ):
                return f"{file}: damaged: size or checksum differs from {MANIFEST}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{path / MANIFEST}: {' '.join(str(error).split())[:200]}"
    return None


def _matches(file: Path, expected: dict[str, Any]) -> bool:
    return bool(file.stat().st_size == expected["bytes"] and crc32c(file) == expected["crc32c"])


def warn(text: str) -> None:
    tell(f"warning: {text}")


class _State(BaseModel):
    """The keys that every state.json has; tasks add keys of their own."""

    model_config = ConfigDict(strict=True)
    step: Count
    crops_seen: Count
    skipped_steps: Count
    in_a_row: Count
    best: dict[str, float | list[float]]
    stale: Count
    validation_due: bool
    world: Annotated[int, Field(ge=1, lt=2**31)]
    zero_stage: Literal[0, 1, 2, 3]
    preprocessing_sha256: str
    datasets: list[str]
    sources: list[str] = []
    # name of a plugged-in file -> its checksum
    code: dict[Annotated[str, Field(pattern=r"^[^/\x00]+\.py$")], str] = {}
    config: dict[str, Any]


def read_state(path: Path) -> dict[str, Any]:
    state = _read_json(path / STATE)
    try:
        _State.model_validate(state)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key, value = ".".join(map(str, problem["loc"])), str(problem["input"])[:80]
        raise CheckpointError(
            f"{path / STATE}: {key}={value}: {problem['msg']}: ", *HOW_TO_RESTORE
        ) from None
    ranks = len(list(path.glob("loader-rank*.json")))
    if state["world"] != ranks:
        raise CheckpointError(
            f"{path / STATE}: world={state['world']}, but {ranks} ranks wrote loader-rankR.json: ",
            *HOW_TO_RESTORE,
        )
    return {"best": {}} | state


def read_loader_state(path: Path) -> dict[str, Any]:
    """Returns the loader's state. It is the same on all ranks, so that of rank 0 is read."""
    file = path / "loader-rank0.json"
    state = _read_json(file)
    if not isinstance(state.get("recipe"), dict):
        raise CheckpointError(
            f"{file}: is incomplete, so the next crops are unknown: ", *HOW_TO_RESTORE
        )
    return state


def _read_json(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as content:
            value = json.loads(content.read(CHUNK_BYTES))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: {' '.join(str(error).split())[:200]}: ", *HOW_TO_RESTORE
        ) from None
    return value
