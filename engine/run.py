"""What follows a training: RUN/model, its model card and RUN/report.html; training from Python.

if begin(config, ContinuedTask):                          # trains or resumes
    finish(config, ContinuedTask)
export(Path("RUN"), Config, ContinuedTask)                # RUN/model from a checkpoint
run = trained(Config, ContinuedTask, load, "w2v_cmsc_rlm", "DATASET", "RUN", {"train.steps": 1000})
run.model().embed(...), run.validation[-1], run.report
"""

import errno
import html
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnilead.data_tools.cli import is_memory, say
from omnilead.data_tools.dataset import DataError, Dataset
from omnilead.engine.common import METRICS, VALIDATION, ConfigError, OutputError, environment
from omnilead.engine.config import RunConfig
from omnilead.engine.inference import trained_model as inference
from omnilead.engine.interop.hub import model_card
from omnilead.engine.report.run_report import REPORT, StepLog, write_report
from omnilead.engine.training import distributed
from omnilead.engine.training.checkpoint import CheckpointError, WriteError
from omnilead.engine.training.export import ExportedTask, read_export, write_export
from omnilead.engine.training.loop import TrainError
from omnilead.engine.training.tracking import Profile, open_services, require_installed
from omnilead.engine.training.train import train

BAD_INPUT = (ConfigError, DataError, CheckpointError)
LESS_MEMORY = "lower train.micro_batch or pipeline.read_ahead, or free memory"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
Data = str | os.PathLike[str] | Dataset


def begin(config: RunConfig, task: type[ExportedTask], profile: int = 0) -> bool:
    """Trains or resumes, with the services of train.track; `profile`: number of steps to trace.
    -> False if SIGTERM stopped it."""
    require_installed(config)
    return train(config, task, open_services, Profile(profile) if profile else None)


def finish(config: RunConfig, task: type[ExportedTask]) -> None:
    """When all steps are done: RUN/model and RUN/report.html, on rank 0."""
    if environment()[0] == 0:
        run = Path(config.run)
        say(f"done: {export(run, type(config), task)}, {write_report(run)}")


def export(run: Path, kind: type[RunConfig], task: type[ExportedTask]) -> Path:
    """Writes RUN/model with its model card."""
    read = read_export(run, kind, task)
    card = model_card(run, read.config, read.state, read.weights, task)
    return write_export(run, read, task, card)


def explain(error: BaseException) -> tuple[str, int]:
    """A one-line message and an exit code: 2, settings or files are wrong; 1, the run failed;
    130, Ctrl-C. Raises other errors: bugs."""
    if isinstance(error, BAD_INPUT):
        return str(error), 2
    if isinstance(error, TrainError | WriteError | OutputError):
        return str(error), 1
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted before training: the same command continues", 130
    if is_memory(error):
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        return f"out of memory: {LESS_MEMORY} ({reason})", 1
    if isinstance(error, UnicodeEncodeError):  # torch accepts no such path
        return f"{error.object[:200]!r}: not UTF-8: choose another name", 2
    if isinstance(error, OSError):
        name = f"{error.filename or '--out RUN'}: {error.strerror}"
        if error.errno in NOT_WRITABLE:
            return f"{name}: choose another with --out RUN", 2
        return f"{name}: the last checkpoint is intact", 1
    if isinstance(error, RuntimeError) and distributed.lost_a_rank(error):
        reason = str(error).splitlines()[0][:150]
        return f"another rank died or hung ({reason}): start again to resume", 1
    raise error


@dataclass(frozen=True)
class TrainingRun:
    """A finished run. Pass it wherever a path to a run is expected: omnilead.load(run),
    omnilead.finetune(run, ...)."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def model(self, **options: Any) -> inference.TrainedModel:
        """Same as omnilead.load(RUN, **options)."""
        return inference.load(self.path, **options)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Training metrics, one row for each logged step: pandas.DataFrame(run.metrics)."""
        return StepLog(self.path / METRICS).rows

    @property
    def validation(self) -> list[dict[str, Any]]:
        return StepLog(self.path / VALIDATION).rows

    @property
    def report(self) -> Path:
        return self.path / REPORT

    def _repr_html_(self) -> str:
        page = html.escape(self.report.read_text(), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'


def trained(
    kind: type[RunConfig],
    task: type[ExportedTask],
    read: Callable[[Any, Mapping[str, Any]], RunConfig],
    config: str | Path | None,
    data: Data | Sequence[Data],
    out: str | os.PathLike[str],
    settings: Mapping[str, Any],
) -> TrainingRun:
    """Implements engine.pretrain and engine.finetune; the first three arguments come from their
    commands."""
    datasets = [data] if isinstance(data, str | os.PathLike | Dataset) else data
    urls = [one.root.url if isinstance(one, Dataset) else os.fspath(one) for one in datasets]
    given = {
        key: os.fspath(value) if isinstance(value, os.PathLike) else value
        for key, value in settings.items()
    }
    try:
        settled = read(config, {"data.datasets": urls, "run": os.fspath(out), **given})
        finished = begin(settled, task)
        if finished:
            finish(settled, task)
    except Exception as error:
        message, code = explain(error)
        if message == str(error):
            raise
        raise (ConfigError if code == 2 else TrainError)(" ".join(message.split())) from error
    if not finished:
        raise KeyboardInterrupt(f"{os.fspath(out)}: stopped: the same call resumes")
    return TrainingRun(Path(out))
