"""What watches a training from outside: tracking services (train.track) and a trace of some steps
(`--profile N`), on rank 0.

    require_installed(config)                          # before any work
    services = open_services(run, config, step)        # for engine.training.loggers.RunLogger
    with Profile(20).traced(folder, device) as tracer: ...

TensorBoard, Weights & Biases and MLflow: project and account are set by the services' own
environment variables: WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME. A resumed run
keeps its id there (RUN/boards.json). A trace has these files:

RUN/profile/trace.json      every operation of every step, for https://ui.perfetto.dev or chrome://tracing
RUN/profile/operators.txt   the operations that took the most time
RUN/profile/memory.pickle   on CUDA: the allocations of these steps, for https://pytorch.org/memory_viz
"""

import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from omnilead.data_tools.io.storage import write_whole
from omnilead.data_tools.io.terminal import say

from ..settings.errors import ConfigError
from ..settings.files import flatten
from .config import RunConfig
from .loggers import Service

SERVICE_IDS = "boards.json"
# MLflow's limits: parameters per call, characters per value
MLFLOW_PARAMS, MLFLOW_LETTERS = 100, 500
WARM_UP = 5  # untraced steps first, in which kernels are compiled and buffers allocated
TERMINAL_ROWS, FILE_ROWS = 12, 200
ALLOCATIONS = 10**5  # of the memory snapshot


def open_tensorboard(run: Path, config: RunConfig, step: int, run_id: str | None) -> Service:
    tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else 0)
    hook = threading.excepthook

    def ignore_writer(failed: threading.ExceptHookArgs) -> None:
        """Prints no traceback of TensorBoard's thread: the next call raises its error."""
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

    threading.excepthook = ignore_writer
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
    for at in range(0, len(settings), MLFLOW_PARAMS):
        mlflow.log_params(dict(settings[at : at + MLFLOW_PARAMS]))
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
        # TensorBoard is on by default, so it may be missing
        if name != "tensorboard" and not is_installed(name):
            raise ConfigError(
                f"train.track={list(config.train.track)}: {name} is not installed: pip install "
                "'omnilead[track]'"
            )


def open_services(run: Path, config: RunConfig, step: int) -> dict[str, Service]:
    """Opens what train.track names."""
    path = run / SERVICE_IDS
    services: dict[str, Service] = {}
    ids: dict[str, str] = json.loads(path.read_text()) if step and path.is_file() else {}
    for name in config.train.track:
        if not is_installed(name):
            say(f"{name} is not installed: no curves are logged there")
            continue
        try:
            services[name] = SERVICES[name](run, config, step, ids.get(name))
        except Exception as error:  # no account, no network
            raise ConfigError(
                f"train.track: {name} failed to start: {' '.join(str(error).split())[:250]}"
            ) from None
    ids |= {name: service.id for name, service in services.items() if service.id}
    if ids:
        write_whole(path, json.dumps(ids) + "\n")
    return services


@dataclass
class Profile:
    steps: int  # to trace

    def check(self, left: int) -> None:
        if self.steps > left - WARM_UP:
            raise ConfigError(
                f"--profile {self.steps}: {left} steps are left, of which {WARM_UP} warm up: give a "
                "smaller number, or raise train.steps"
            )

    @contextmanager
    def traced(self, folder: Path, device: torch.device) -> Iterator[Any]:
        """Yields an object whose step() is called after each training step."""
        # silences the profiler's own messages on standard error
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        cuda = device.type == "cuda"
        by = f"self_{device.type}_time_total"

        def write(trace: profile) -> None:
            folder.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(folder / "trace.json"))
            table = trace.key_averages()
            (folder / "operators.txt").write_text(
                table.table(sort_by=by, row_limit=FILE_ROWS, max_name_column_width=80) + "\n"
            )
            if cuda:
                torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            say(table.table(sort_by=by, row_limit=TERMINAL_ROWS, max_name_column_width=40))
            say(f"profile of {self.steps} steps: {folder}/")

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        when = schedule(wait=WARM_UP - 1, warmup=1, active=self.steps, repeat=1)
        kind = AllocationProfile if cuda else profile
        with kind(activities=activities, schedule=when, on_trace_ready=write) as tracer:
            yield tracer


class AllocationProfile(profile):
    """Also records the allocations of the traced steps, with Python's stacks alone: those of C++
    cost time at each allocation and take long to resolve."""

    def step(self) -> None:
        super().step()
        if self.step_num == WARM_UP:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS, stacks="python")
