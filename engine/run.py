"""What follows a training: RUN/model, its model card and RUN/report.html; training from Python.

export(RunFolder("RUN"), PretrainTask)                   # RUN/model from a checkpoint
run = run_from_python(train_run, PretrainTask, None, "DATASET", "RUN", {"train.steps": 1000})
run.model().embed(...), run.validation[-1], run.report
"""

import errno
import html
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnilead.data_tools.dataset import DataError, Dataset
from omnilead.data_tools.io.terminal import is_memory, optional, say

from .settings.errors import ConfigError, OutputError
from .settings.launcher import environment
from .settings.run_files import METRICS, REPORT, VALIDATION, read_rows
from .training import distributed
from .training.checkpoint import CheckpointError, WriteError
from .training.loop import TrainError
from .training.run_folder import RunFolder
from .training.task import TrainingTask

if TYPE_CHECKING:
    from .inference.trained_model import TrainedModel

BAD_INPUT = (ConfigError, DataError, CheckpointError)
LESS_MEMORY = "lower train.micro_batch or pipeline.read_ahead, or free memory"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
Data = str | os.PathLike[str] | Dataset
Train = Callable[[Any, type[TrainingTask]], bool]  # engine.pretrain.train_run


def finish(run: RunFolder, task: type[TrainingTask]) -> None:
    """When all steps are done: RUN/model and RUN/report.html, on rank 0."""
    if environment()[0]:
        return
    made = [str(export(run, task))]
    with optional("RUN/report.html"):
        from .extras.reports.run_report import write_report

        made.append(str(write_report(run.path)))
    say(f"done: {', '.join(made)}")


def export(run: RunFolder, task: type[TrainingTask]) -> Path:
    """Writes RUN/model with its model card."""
    from .training.export import read_export, write_export

    read, card = read_export(run, task), ""
    with optional("a model card"):
        from .extras.interop.hub import model_card

        card = model_card(run.path, read.config, read.state, read.weights, task)
    return write_export(run, read, task, card)


def message_and_code(error: BaseException) -> tuple[str, int]:
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

    def model(self, **options: Any) -> "TrainedModel":
        """Same as omnilead.load(RUN, **options)."""
        from .inference.trained_model import load

        return load(self.path, **options)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Training metrics, one row for each logged step: pandas.DataFrame(run.metrics)."""
        return read_rows(self.path / METRICS)[0]

    @property
    def validation(self) -> list[dict[str, Any]]:
        return read_rows(self.path / VALIDATION)[0]

    @property
    def report(self) -> Path:
        return self.path / REPORT

    def _repr_html_(self) -> str:
        page = html.escape(self.report.read_text(), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'


def run_from_python(
    train: Train,
    task: type[TrainingTask],
    config: str | Path | None,
    data: Data | Sequence[Data],
    out: str | os.PathLike[str],
    settings: Mapping[str, Any],
) -> TrainingRun:
    """Implements omnilead.pretrain and omnilead.finetune."""
    datasets = [data] if isinstance(data, str | os.PathLike | Dataset) else data
    urls = [one.root.url if isinstance(one, Dataset) else os.fspath(one) for one in datasets]
    overrides: dict[str, Any] = {"data.datasets": urls, "run": os.fspath(out)}
    for name, value in settings.items():
        overrides[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    try:
        finished = train(task.read(config, overrides), task)
    except Exception as error:
        message, code = message_and_code(error)
        if message == str(error):
            raise
        raise (ConfigError if code == 2 else TrainError)(" ".join(message.split())) from error
    if not finished:
        raise KeyboardInterrupt(f"{os.fspath(out)}: stopped: the same call resumes")
    return TrainingRun(RunFolder(os.fspath(out)).path)
