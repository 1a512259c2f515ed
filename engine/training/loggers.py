"""Where curves go beside RUN's own files: TensorBoard, Weights & Biases, MLflow (train.track).

    check(config)                             # before any work: what is asked for is installed
    boards = open_boards(run, config, step, note=print)
    boards.log({"loss": 4.2}, step=10)
    boards.close()

Where to and as whom is said to the services in their own ways: WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME. A
run that goes on goes on there too: RUN/boards.json has its names. A service that fails is left out for the rest; training goes
on.
"""

import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.common import ConfigError, write_whole
from engine.config import Settings

NAMES = "boards.json"
MLFLOW_PARAMS, MLFLOW_LETTERS = 100, 500  # of one call, of one value


class Board(Protocol):
    name: str | None  # under which the service knows the run

    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    name: str | None = None

    def __init__(self, run: Path, config: Settings, step: int, name: str | None) -> None:
        module: Any = importlib.import_module("torch.utils.tensorboard")
        self.hook, threading.excepthook = threading.excepthook, self._heard_later
        self.writer = module.SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else 0)

    def _heard_later(self, failed: threading.ExceptHookArgs) -> None:
        """Its writing thread hands its error to the next call; a traceback beside it would be said twice."""
        if not type(failed.thread).__module__.startswith("tensorboard."):
            self.hook(failed)

    def log(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        try:
            self.writer.close()
        finally:
            threading.excepthook = self.hook


class Wandb:
    def __init__(self, run: Path, config: Settings, step: int, name: str | None) -> None:
        wandb: Any = importlib.import_module("wandb")
        where = {"project": os.environ.get("WANDB_PROJECT", "omnilead"), "dir": str(run), "id": name, "resume": "allow"}
        self.run = wandb.init(**where, name=run.resolve().name, config=config.tree())
        self.name: str | None = str(self.run.id)

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    def __init__(self, run: Path, config: Settings, step: int, name: str | None) -> None:
        self.mlflow: Any = importlib.import_module("mlflow")
        begun = self.mlflow.start_run(run_id=name, run_name=run.resolve().name)
        self.name: str | None = str(begun.info.run_id)
        if name is None:
            settings = list(flat(config.tree()))
            for at in range(0, len(settings), MLFLOW_PARAMS):
                self.mlflow.log_params(dict(settings[at : at + MLFLOW_PARAMS]))

    def log(self, values: dict[str, float], step: int) -> None:
        self.mlflow.log_metrics(values, step=step)

    def close(self) -> None:
        self.mlflow.end_run()


BOARDS: dict[str, Callable[[Path, Settings, int, str | None], Board]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
}


def check(config: Settings) -> None:
    for name in config.train.track:
        if name != "tensorboard" and not installed(name):  # nobody has asked for that one; it is the default
            asked = ", ".join(config.train.track)
            raise ConfigError(f"train.track=[{asked}]: {name} is not installed: pip install 'omnilead[track]'")


def installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


@dataclass
class Boards:
    note: Callable[[str], None]
    boards: dict[str, Board] = field(default_factory=dict)

    def log(self, values: dict[str, float], step: int) -> None:
        self._each(lambda board: board.log(values, step))

    def close(self) -> None:
        self._each(lambda board: board.close())

    def _each(self, work: Callable[[Board], None]) -> None:
        for name, board in list(self.boards.items()):
            try:
                work(board)
            except Exception as error:  # whatever a service throws, it is not worth a training
                self.note(f"warning: {name} is left out from here on: {' '.join(str(error).split())[:200]}")
                del self.boards[name]


def open_boards(run: Path, config: Settings, step: int, note: Callable[[str], None]) -> Boards:
    path = run / NAMES
    names: dict[str, str] = json.loads(path.read_text()) if step and path.is_file() else {}
    boards = Boards(note)
    for kind in config.train.track:
        if not installed(kind):
            note(f"{kind} is not installed: no curves there")
            continue
        try:
            boards.boards[kind] = BOARDS[kind](run, config, step, names.get(kind))
        except Exception as error:  # no account, no network, another run's name
            raise ConfigError(f"train.track: {kind} does not begin: {' '.join(str(error).split())[:250]}") from None
    names |= {kind: board.name for kind, board in boards.boards.items() if board.name}
    if names:
        write_whole(path, json.dumps(names) + "\n")
    return boards


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)[:MLFLOW_LETTERS]
