"""A task: what is trained, and how it is validated. The training loop knows nothing else about it.

class PretrainTask(TrainingTask): ...             # engine.training.pretraining; FinetuneTask in engine.tasks.finetuning
train(config, PretrainTask, open_services)            # engine.training.train
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.common import METRIC_OF, ConfigError
from omnilead.engine.data.loader import Batch
from omnilead.engine.training.distributed import Ranks

# Tensors with one row per crop, scalars, and None for what is not given
Arguments = tuple[Tensor | None, ...]
Between = Callable[[], None]  # called by all ranks between batches; raises when the run must stop
Groups = list[tuple[float, list[nn.Parameter]]]  # shares of the learning rate, and weights


def some_crops(arguments: Arguments, start: int, stop: int) -> Arguments:
    """The arguments for a part of the batch: scalars are the same for all crops."""
    return tuple(a if a is None or a.ndim == 0 else a[start:stop] for a in arguments)


class TrainingTask(ABC):
    keys: tuple[str, ...]  # of each line in metrics.jsonl
    # The validation metric that chooses the best step; 1: higher is better, -1: lower
    best: tuple[str, int]
    # Of the crops to train on, as arguments of engine.data.order.DatasetRows.of
    roles: dict[str, Any]
    flops_per_crop: float
    windows: int = 0  # of each crop: LoaderConfig.windows
    remarks: Sequence[str] = ()  # printed at the start
    code: Mapping[str, bytes] = {}  # plugged-in files by name, for RUN/code and RUN/model
    kept: Mapping[str, bytes] = {}  # other files by name, for RUN

    def __init__(self, config: Any, datasets: Sequence[Dataset], ranks: Ranks) -> None:
        self.config, self.datasets, self.ranks = config, datasets, ranks

    @abstractmethod
    def model(self, generator: torch.Generator) -> nn.Module:
        """The model with initial weights. Called with `arguments`, it returns a dict of scalars
        with the key `loss`."""

    def groups(self, model: Any) -> Groups:
        """Trained weights in groups, each with its share of the learning rate."""
        return [(1.0, [p for p in model.parameters() if p.requires_grad])]

    @abstractmethod
    def arguments(self, batch: Batch, step: int, total: int) -> Arguments:
        """The model's arguments in step `step` of `total`."""

    @abstractmethod
    def validate(self, engine: Any, between: Between) -> dict[str, float]:
        """Called by all ranks, as is `between` before each batch; empty if there is nothing to
        validate on."""

    def chosen(self) -> dict[str, Any]:
        """Values that the last validation chose, such as thresholds, for the best checkpoint."""
        return {}

    @abstractmethod
    def explained(self) -> dict[str, Any]:
        """For run.json: `chance`, the value of each curve when guessing (validation:
        valid/NAME); `validation`, how validation differs from training."""

    def facts(self) -> dict[str, Any]:
        """Further facts that must not change when a run is resumed."""
        sums = {
            name: f"sha256 {hashlib.sha256(content).hexdigest()[:16]}"
            for name, content in self.code.items()
        }
        return {"code": sums} if sums else {}

    def extra_metrics(self, step: int) -> dict[str, float | None]:
        return {}

    def warning(self, values: dict[str, float]) -> str | None:
        """A warning about the logged values, if there is one."""
        return None


def best_metric(name: str | None, metrics: Sequence[str]) -> tuple[str, int]:
    """`TrainingTask.best` from train.best; by default the first of the task's validation
    metrics."""
    name = {"f1": "f_measure"}.get(name or metrics[0], name or metrics[0])
    if name not in metrics:
        raise ConfigError(
            f"train.best={name}: this task does not measure it: use {', '.join(metrics)}"
        )
    return name, -1 if METRIC_OF[name].lower_is_better else 1
