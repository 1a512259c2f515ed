"""What a run trains, and what it says of the result: everything in which pre-training and fine-tuning differ.

class Pretraining(Task): ...              # engine.training.pretraining; Finetuning beside it
Door("engine/pretrain.py", __doc__, Config, Pretraining).main()      # engine.training.course
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from data_tools.dataset import Dataset
from engine.pipelines.loader import Batch
from engine.training.distributed import Ranks

SAMPLES = 4  # crops that the report shows


class Task(ABC):
    keys: ClassVar[tuple[str, ...]]  # of a line in metrics.jsonl
    best: ClassVar[tuple[str, int]]  # the figure of `validate` that says which model is best; 1: the higher, -1: the lower
    exports_best: ClassVar[bool]  # or the newest
    roles: dict[str, Any]  # of the crops trained on, as engine.pipelines.order.Rows.of has them
    flops_per_crop: float
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
        """At the end, by all ranks: arrays for RUN/diagnostics.npz (engine.scoring.rundir). `batch`: the last one."""
        return {"samples_mv": batch.x_BSLT[:SAMPLES].float().cpu().numpy()}

    def facts(self) -> dict[str, Any]:
        """What else must be as it was when a run goes on."""
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
