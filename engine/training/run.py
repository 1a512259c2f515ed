"""Training from Python: trains or resumes a run, or finds it finished; errors are exceptions with
one-line messages.

run = trained(Config, PretrainTask, load, "w2v_cmsc_rlm", "DATASET", "RUN", {"train.steps": 1000})
run.model().embed(...), run.validation[-1], run.report
"""

import html
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.common import ConfigError
from omnilead.engine.config import RunConfig
from omnilead.engine.inference import trained_model as inference
from omnilead.engine.report.run_report import REPORT
from omnilead.engine.training.files import METRICS, VALIDATION, StepLog
from omnilead.engine.training.loop import TrainError
from omnilead.engine.training.rates import train_rates
from omnilead.engine.training.task import TrainingTask
from omnilead.engine.training.train import explain

Data = str | os.PathLike[str] | Dataset


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
    task: type[TrainingTask],
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
        finished = train_rates(
            read(config, {"data.datasets": urls, "run": os.fspath(out), **given}), task
        )
    except Exception as error:
        message, code = explain(error)
        if message == str(error):
            raise
        raise (ConfigError if code == 2 else TrainError)(" ".join(message.split())) from error
    if not finished:
        raise KeyboardInterrupt(
            f"{os.fspath(out)}: stopped after a checkpoint: the same call resumes"
        )
    return TrainingRun(Path(out))
