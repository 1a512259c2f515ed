"""What a run trains, and what it says of the result: everything in which pre-training and fine-tuning differ.

class Pretraining(Task): ...              # engine.training.pretraining; Finetuning beside it
Door("engine/pretrain.py", __doc__, Config, Pretraining).main()      # engine.training.train
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from data_tools.dataset import Dataset
from engine.common import ConfigError
from engine.data.loader import Batch
from engine.training.distributed import Ranks

SAMPLES = 4  # crops that the report shows
FIGURES = {
    "loss": "loss",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "challenge": "CinC 2021 score",
    "f_measure": "F-measure",
    "identification_accuracy": "share of patients recognised",
}


class Task(ABC):
    keys: ClassVar[tuple[str, ...]]  # of a line in metrics.jsonl
    best: tuple[str, int]  # the figure of `validate` that chooses the best step; 1: the higher, -1: the lower (`chosen`)
    exports_best: ClassVar[bool]  # or the newest
    roles: dict[str, Any]  # of the crops trained on, as engine.data.order.DatasetRows.of has them
    flops_per_crop: float
    kept_per_crop: float  # numbers that a step holds of a crop
    remarks: Sequence[str] = ()  # said at the start

    @abstractmethod
    def __init__(self, config: Any, datasets: Sequence[Dataset], ranks: Ranks) -> None: ...

    @abstractmethod
    def model(self, generator: torch.Generator) -> nn.Module:
        """With its first weights. Called with `arguments` it returns scalars, `loss` among them."""

    @abstractmethod
    def arguments(self, batch: Batch, step: int) -> tuple[Tensor | None, ...]:
        """Tensors by crop, scalars, None."""

    @abstractmethod
    def validate(self, engine: Any) -> dict[str, float]:
        """By all ranks. Empty: there is nothing to validate on."""

    def diagnostics(self, engine: Any, batch: Batch) -> dict[str, np.ndarray]:
        """At the end, by all ranks: arrays for RUN/diagnostics.npz (engine.evaluation.run_files). `batch`: the last one."""
        return {"samples_mv": batch.x_BSLT[:SAMPLES].float().cpu().numpy()}

    def facts(self) -> dict[str, Any]:
        """What else must be as it was when a run goes on."""
        return {}

    def explained(self) -> dict[str, Any]:
        """For readers of the curves, kept in run.json. `chance`: what guessing gives, by curve, those of validation as
        valid/NAME. `validation`: how it differs from training."""
        return {}

    def values(self, step: int) -> dict[str, float | None]:
        """More to log."""
        return {}

    def concern(self, values: dict[str, float]) -> str | None:
        """A warning, by what is logged."""
        return None

    @staticmethod
    @abstractmethod
    def described(config: Any, state: dict[str, Any]) -> dict[str, Any]:
        """The model's config.json; `state` is the checkpoint's, with `facts`."""

    @staticmethod
    @abstractmethod
    def card(config: Any, state: dict[str, Any]) -> tuple[str, list[str]]:
        """Title and lines of its model card."""

    @staticmethod
    @abstractmethod
    def exports(config: Any, name: str) -> bool:
        """Whether the weights of this name go along."""


def chosen(asked: str | None, figures: Sequence[str]) -> tuple[str, int]:
    """`best` of a task that validates these figures: the first, unless train.best names another."""
    name = asked or figures[0]
    if name not in figures:
        raise ConfigError(f"train.best={name}: this task does not measure it: use {', '.join(figures)}")
    return name, -1 if name == "loss" else 1


def told_best(best: Mapping[str, float]) -> str:
    """The best step, in a sentence for the model card."""
    names = [name for name in best if name != "step"]
    what = FIGURES.get(names[0], names[0]) if names else ""
    return (
        f"Best {what} in validation: {best[names[0]]:.4f}, at step {best['step']:,}." if names else "There was no validation."
    )
