"""Logs curves to the tracking services of train.track, on rank 0.

    require_installed(config)                          # before any work
    services = open_services(run, config, step)        # for engine.training.loggers.RunLogger

TensorBoard, Weights & Biases and MLflow: project and account are set by the services' own
environment variables: WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME. A resumed run
keeps its id there (RUN/boards.json).
"""

import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from omnilead.data_tools.io.storage import write_whole
from omnilead.data_tools.io.terminal import say

from ..settings.errors import ConfigError
from ..settings.files import flatten
from .config import RunConfig

SERVICE_IDS_FILE = "boards.json"
# MLflow's limits: parameters in a call, characters in a value
MLFLOW_PARAMS, MLFLOW_LETTERS = 100, 500


class Service(NamedTuple):
    id: str | None  # the run's id in the service, with which a resumed run goes on there
    log: Callable[[dict[str, float], int], None]
    close: Callable[[], None]


def open_tensorboard(run: Path, config: RunConfig, step: int, run_id: str | None) -> Service:
    tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else 0)
    hook = threading.excepthook

    def hide_writer_errors(failed: threading.ExceptHookArgs) -> None:
        """Prints no traceback if TensorBoard's thread fails, because the next call of the writer
        raises the thread's error."""
        if not type(failed.thread).__module__.startswith("tensorboard."):
            hook(failed)

    def log(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    def close() -> None:
        try:
            writer.close()
        finally:
            threading.excepthook = hook

    threading.excepthook = hide_writer_errors
    return Service(None, log, close)


def open_wandb(run: Path, config: RunConfig, step: int, run_id: str | None) -> Service:
    wandb: Any = importlib.import_module("wandb")
    project = os.environ.get("WANDB_PROJECT", "omnilead")
    name = run.resolve().name
    opened = wandb.init(
        project=project, dir=str(run), id=run_id, resume="allow", name=name, config=config.tree()
    )
    return Service(
        str(opened.id), lambda values, step: opened.log(values, step=step), opened.finish
    )


def open_mlflow(run: Path, config: RunConfig, step: int, run_id: str | None) -> Service:
    mlflow: Any = importlib.import_module("mlflow")
    opened = mlflow.start_run(run_id=run_id, run_name=run.resolve().name)
    settings = (
        [(key, str(value)[:MLFLOW_LETTERS]) for key, value in flatten(config.tree()).items()]
        if run_id is None
        else []
    )
    for start in range(0, len(settings), MLFLOW_PARAMS):
        mlflow.log_params(dict(settings[start : start + MLFLOW_PARAMS]))
    return Service(
        str(opened.info.run_id),
        lambda values, step: mlflow.log_metrics(values, step=step),
        mlflow.end_run,
    )


SERVICES = {"tensorboard": open_tensorboard, "wandb": open_wandb, "mlflow": open_mlflow}


def is_installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def require_installed(config: RunConfig) -> None:
    for name in config.train.track:
        # TensorBoard is on by default, so it is no error if it is missing
        if name != "tensorboard" and not is_installed(name):
            raise ConfigError(
                f"train.track={list(config.train.track)}: {name} is not installed: pip install "
                "'omnilead[track]'"
            )


def open_services(run: Path, config: RunConfig, step: int) -> dict[str, Service]:
    """Opens the services that train.track names."""
    path = run / SERVICE_IDS_FILE
    services: dict[str, Service] = {}
    ids: dict[str, str] = json.loads(path.read_text()) if step and path.is_file() else {}
    for name in config.train.track:
        if not is_installed(name):
            say(f"{name} is not installed: no curves are logged there")
            continue
        try:
            services[name] = SERVICES[name](run, config, step, ids.get(name))
        except Exception as error:  # for example no account, or no network
            raise ConfigError(
                f"train.track: {name} failed to start: {' '.join(str(error).split())[:250]}"
            ) from None
    ids |= {name: service.id for name, service in services.items() if service.id}
    if ids:
        write_whole(path, json.dumps(ids) + "\n")
    return services
