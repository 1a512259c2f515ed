"""A task: what is trained, how it is validated, and what is exported. The training loop knows
nothing else about it.

class PretrainTask(TrainingTask): ...             # engine.training.pretraining; FinetuneTask in downstream.finetuning.task
task = PretrainTask.prepare(config, datasets, ranks)
train_run(config, PretrainTask)                   # engine.pretrain
"""

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io.plugins import load_plugin

from ..data.loader import Batch
from ..data.order import Selection
from ..model.config import ENCODERS, ModelConfig
from ..model.input import Input
from ..settings.errors import ConfigError
from ..settings.files import plugin_file, portable_spec
from ..settings.metrics import METRIC_OF, label_of
from .arguments import Arguments
from .config import RunConfig
from .distributed import Ranks
from .optimizer import Groups, lr_groups

Between = Callable[[], None]  # called by all ranks between batches; raises when the run must stop


@dataclass(eq=False, kw_only=True)
class TrainingTask(ABC):
    """A task with what `prepare` has read, chosen and built."""

    settings: ClassVar[type[RunConfig]]
    exports_best: ClassVar[bool]  # export the best checkpoint, or the newest
    config: Any
    datasets: Sequence[Dataset]
    ranks: Ranks
    keys: tuple[str, ...]  # of each line in metrics.jsonl
    # The validation metric that chooses the best step; 1: higher is better, -1: lower
    best: tuple[str, int]
    selection: Selection  # the crops to train on
    flops_per_crop: float
    input: Input  # how the model sees an ECG
    windows: int  # windows of each crop in a step: LoaderConfig.windows
    remarks: Sequence[str]  # printed at the start
    code: Mapping[str, bytes]  # plugged-in files by name, for RUN/code and RUN/model
    kept_files: Mapping[str, bytes]  # files other than code, by name, that are written to RUN

    @classmethod
    @abstractmethod
    def prepare(cls, config: Any, datasets: Sequence[Dataset], ranks: Ranks) -> Self:
        """A task on these datasets; called by all ranks. ConfigError if nothing can be learnt from them."""

    @abstractmethod
    def model(self, generator: torch.Generator) -> nn.Module:
        """The model with initial weights. Called with `arguments`, it returns a dict of scalars
        with the key `loss`."""

    def groups(self, model: Any) -> Groups:
        """Trained weights in groups, each with its factor of the learning rate."""
        return lr_groups(model, self.config.train.lr_factors)

    @abstractmethod
    def arguments(self, batch: Batch, step: int, total: int) -> Arguments:
        """The model's arguments in step `step` of `total`."""

    def after_step(self, model: Any) -> None:
        """Called when a step has changed the weights of what `model` returned."""
        return

    @abstractmethod
    def validate(self, engine: Any, between: Between) -> dict[str, float]:
        """Validation metrics by name; empty if there is nothing to validate on. Called by all
        ranks, as is `between` before each batch."""

    def chosen_values(self) -> dict[str, Any]:
        """Values that the last validation chose, such as thresholds, for the best checkpoint."""
        return {}

    @abstractmethod
    def explanations(self) -> dict[str, Any]:
        """Entries of run.json: `chance`, the value of each curve when guessing (validation:
        valid/NAME); `validation`, how validation differs from training."""

    @abstractmethod
    def left_out_text(self) -> str:
        """The number of crops that data.where leaves out, as words to append to a sentence."""

    def resume_facts(self) -> dict[str, Any]:
        """Further facts that must not change when a run is resumed."""
        sums = {
            name: f"sha256 {hashlib.sha256(content).hexdigest()[:16]}"
            for name, content in self.code.items()
        }
        return {"code": sums} if sums else {}

    def may_change(self, fact: str) -> bool:
        """True if the fact of this dotted name may change when a run is resumed."""
        return False

    def extra_metrics(self, step: int) -> dict[str, float | None]:
        return {}

    def warning(self, values: dict[str, float]) -> str | None:
        """A warning about the logged values, if there is one."""
        return None

    @staticmethod
    @abstractmethod
    def exported_config(config: Any, state: dict[str, Any]) -> dict[str, Any]:
        """The exported model's config.json; `state`: the checkpoint's, with `facts`."""

    @staticmethod
    @abstractmethod
    def card_title_and_lines(config: Any, state: dict[str, Any]) -> tuple[str, list[str]]:
        """Returns (title, lines) of the model card."""

    @staticmethod
    @abstractmethod
    def crop_uses(
        config: Any, state: dict[str, Any], run: Path, datasets: Sequence[Dataset]
    ) -> list[tuple[Dataset, np.ndarray, str]]:
        """Returns, for each dataset, (the dataset; how often the checkpoint's weights have seen each of its
        crops, as by Order.draw_counts; the use, as in engine.data.seen)."""

    @staticmethod
    def exported_weights(config: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights to export, from a checkpoint's weights."""
        return weights


def best_metric_and_sign(name: str | None, metrics: Sequence[str]) -> tuple[str, int]:
    """Returns `TrainingTask.best`: the metric that train.best names, by default the first of the
    task's validation metrics, and 1, or -1 if lower is better."""
    name = {"f1": "f_measure"}.get(name or metrics[0], name or metrics[0])
    if name not in metrics:
        raise ConfigError(
            f"train.best={name}: this task does not measure it: use {', '.join(metrics)}"
        )
    return name, -1 if METRIC_OF[name].lower_is_better else 1


def start_text(start: str) -> str:
    """`start` in words for the model card, which may be shared: without folders of this machine."""
    return start if "://" in start else Path(start).name


def best_step_text(best: Mapping[str, float]) -> str:
    """The best step in words for the model card."""
    name = next((name for name in best if name != "step"), None)
    if name is None:
        return "There was no validation."
    return f"Best {label_of(name)} in validation: {best[name]:.4f}, at step {best['step']:,}."


def describe_encoder(config: ModelConfig) -> str:
    """The encoder in one line for the model card."""
    if not config.encoder:
        size = (
            f"{len(config.conv)} convolutions, {config.layers} {'causal ' * config.causal}transformer "
            f"layers of width {config.width}"
        )
        return f"Encoder of wav2vec 2.0 for ECGs (Oh et al., CHIL 2022): {size}."
    about = (
        "with its code in this folder"
        if plugin_file(config.encoder)
        else inspect.getdoc(load_plugin(ENCODERS[config.encoder]))
    )
    options = ", ".join(f"{name}={value}" for name, value in config.options.items()) or "defaults"
    return f"Encoder `{portable_spec(config.encoder)}`, {about}. Options: {options}."
