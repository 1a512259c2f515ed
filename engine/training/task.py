"""Defines what a training task is: what is trained, how it is validated, and what is exported. The
training loop knows nothing else about the task.

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
    """Defines what a run trains. The method `prepare` makes a task; the fields hold what it has read,
    chosen and built."""

    settings: ClassVar[type[RunConfig]]
    exports_best: ClassVar[bool]  # True: export the best checkpoint; False: the newest
    config: Any
    datasets: Sequence[Dataset]
    ranks: Ranks
    keys: tuple[str, ...]  # keys of each line in metrics.jsonl
    # (the validation metric that chooses the best step; 1 if higher is better, -1 if lower)
    best: tuple[str, int]
    selection: Selection  # the crops to train on
    flops_per_crop: float
    input: Input  # the signals that the model takes
    # number of windows that the model's input cuts from each crop; 0: the model takes the halves or
    # views of 5 s that the loader makes (LoaderConfig.windows)
    windows: int
    remarks: Sequence[str]  # lines that are printed at the start of training
    code: Mapping[str, bytes]  # name -> content of plugged-in code, for RUN/code and RUN/model
    kept_files: Mapping[str, bytes]  # name -> content of other files to write to RUN

    @classmethod
    @abstractmethod
    def prepare(cls, config: Any, datasets: Sequence[Dataset], ranks: Ranks) -> Self:
        """Makes a task on these datasets. All ranks call it. Raises ConfigError if nothing can be
        learnt from them."""

    @abstractmethod
    def model(self, generator: torch.Generator) -> nn.Module:
        """Returns the model with initial weights. Called with `arguments`, the model returns a dict
        of scalars with the key `loss`."""

    def groups(self, model: Any) -> Groups:
        """Returns the trained weights in groups, each with its factor of the learning rate."""
        return lr_groups(model, self.config.train.lr_factors)

    @abstractmethod
    def arguments(self, batch: Batch, step: int, total: int) -> Arguments:
        """Returns the arguments with which the model is called in step `step` of `total`."""

    def after_step(self, model: Any) -> None:
        """Called after each step that has changed the weights of `model`."""
        return

    @abstractmethod
    def validate(self, engine: Any, between: Between) -> dict[str, float]:
        """Returns validation metrics by name; {} if there is nothing to validate on. All ranks call
        it, and it calls `between` on all ranks before each batch."""

    def chosen_values(self) -> dict[str, Any]:
        """Returns values that the last validation chose, such as thresholds. The best checkpoint
        stores them."""
        return {}

    @abstractmethod
    def explanations(self) -> dict[str, Any]:
        """Returns entries for run.json. `chance`: what guessing would give for each curve (curves
        of validation are called valid/NAME). `validation`: how validation differs from training."""

    @abstractmethod
    def left_out_crops_text(self) -> str:
        """Says how many crops data.where leaves out, as text to append to a sentence."""

    def resume_facts(self) -> dict[str, Any]:
        """Returns facts, besides settings and data, that must not change when a run is resumed."""
        sums = {
            name: f"sha256 {hashlib.sha256(content).hexdigest()[:16]}"
            for name, content in self.code.items()
        }
        return {"code": sums} if sums else {}

    def may_change(self, fact: str) -> bool:
        """True if the fact of this dotted name may change when a run is resumed, although
        resume_facts returns it."""
        return False

    def extra_metrics(self, step: int) -> dict[str, float | None]:
        return {}

    def warning(self, values: dict[str, float]) -> str | None:
        """Returns a warning about the logged values; None if they are fine."""
        return None

    @staticmethod
    @abstractmethod
    def exported_config(config: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Returns config.json of the exported model. `state`: state.json of the checkpoint, which
        includes resume_facts."""

    @staticmethod
    @abstractmethod
    def card_title_and_lines(config: Any, state: dict[str, Any]) -> tuple[str, list[str]]:
        """Returns (title, lines of text) for the model card."""

    @staticmethod
    @abstractmethod
    def crop_uses(
        config: Any, state: dict[str, Any], run: Path, datasets: Sequence[Dataset]
    ) -> list[tuple[Dataset, np.ndarray, str]]:
        """Returns, for each dataset, (the dataset; how often the checkpoint's weights have seen
        each of its crops; how they were used). Counts are like those of Order.times_drawn; uses are
        named in engine.data.seen."""

    @staticmethod
    def exported_weights(config: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights to export, from all weights of a checkpoint."""
        return weights


def best_metric_and_sign(name: str | None, metrics: Sequence[str]) -> tuple[str, int]:
    """Returns (metric, sign). The metric is `name`, the value of the setting train.best, or the first
    of `metrics` if that is None. The sign is -1 if lower is better, else 1."""
    name = {"f1": "f_measure"}.get(name or metrics[0], name or metrics[0])
    if name not in metrics:
        raise ConfigError(
            f"train.best={name}: this task does not measure it: use {', '.join(metrics)}"
        )
    return name, -1 if METRIC_OF[name].lower_is_better else 1


def start_for_card(start: str) -> str:
    """Returns `start` as the model card names it: without folders of this machine, because the card
    may be shared."""
    return start if "://" in start else Path(start).name


def best_step_text(best: Mapping[str, float]) -> str:
    """Describes the best step in a sentence for the model card."""
    name = next((name for name in best if name != "step"), None)
    if name is None:
        return "There was no validation."
    return f"Best {label_of(name)} in validation: {best[name]:.4f}, at step {best['step']:,}."


def describe_encoder(config: ModelConfig) -> str:
    """Describes the encoder in one line for the model card."""
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
