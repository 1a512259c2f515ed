"""What a fine-tuning starts from: a model, and settings that suit the labels.

`start` is a run or model folder; a pre-training YAML gives its architecture with random weights.

Without a config file, the kind of the labels and a schedule that suits their number are chosen:

    read_settings(None, {"start": "RUN", "data.datasets": ["DATASET"], "task.labels": "my.csv", "run": "OUT"})
    read_settings(None, {"start": "RUN", "data.datasets": ["DATASET"], "task.name": "sex", "run": "OUT"})
    read_settings("diagnosis", ["start=RUN", "data.datasets=[DATASET]", "run=DX"])
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from torch import Tensor, nn

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io.terminal import say

from ..data.seen import NOTHING
from ..inference import trained_model as inference
from ..model import encoders
from ..model.config import ModelConfig
from ..model.encoder import Encoder
from ..model.folder import config_of
from ..model.input import Input
from ..model.readout import PAPER, Readout
from ..settings.commandline import overridden, read_mapping, read_yaml
from ..settings.errors import ConfigError, Facts
from ..settings.files import find_config, merge
from ..settings.launcher import environment
from ..settings.leads import describe_leads
from ..tasks.config import FinetuneConfig
from ..tasks.guess import guess_kind
from ..tasks.kinds import KINDS
from ..tasks.labels import TaskLabels, read_task
from ..training.config import Config, TrainConfig, build, check, load
from ..training.export import is_model
from ..training.train import open_datasets

BATCH, EPOCHS, STEPS, VALIDATE = 64, 40, 20_000, 500  # at most
PATIENCE = 10  # validations
LR_AT_PROBE = 1e-4  # of a model that begins at a probe
LR, LR_WIDTH = 1e-3, 0.064  # of the authors' architecture: LR_WIDTH / width, at most LR


class Start(NamedTuple):
    """The model that fine-tuning starts from."""

    model: ModelConfig
    input: Input  # its windows, rate, band and scale, which fine-tuning keeps
    name: str
    code: dict[str, bytes]  # its plugged-in files
    seen: pa.Table = NOTHING  # what it was trained on
    weights: dict[str, Tensor] | None = None  # of its encoder; None: random
    kind: type[nn.Module] | None = None  # of its encoder; None: as `model` names it
    head: inference.HeadInfo | None = None
    head_weights: dict[str, Tensor] = {}  # noqa: RUF012 - never changed
    readout: Readout = (PAPER,)


def read_start(start: str, code: bool = False) -> Start:
    """`code`: allow running encoder code that the folder holds."""
    if not is_model(start):
        config = load(start, kind=Config)
        brought = encoders.code_of({"model.encoder": config.model.encoder}, start)
        return Start(config.model, config.signals, f"random {config.model}", code=brought)
    model = inference.load(start, code)
    weights = dict(model.encoder.state_dict())
    if isinstance(model.encoder, Encoder):
        weights.pop("mask_embedding", None)
    history = model.history
    name = " ".join(str(history.get(key)) for key in ("step", "crops_seen", "datasets"))
    return Start(
        config_of(model.config),
        model.input,
        name,
        model.code,
        model.seen,
        weights,
        type(model.encoder),
        model.head_info,
        dict(model.head.state_dict()) if isinstance(model.head, nn.Linear) else {},
        model.readout,
    )


def readout_for(start: Start, config: FinetuneConfig, labels: TaskLabels) -> Readout:
    """What the head takes; with task.head=start, that of the start, whose linear layer must be for
    these labels."""
    if config.task.head != "start":
        return (PAPER,)
    made = "omnilead bench --models MODEL --head PROBED writes one, for --start PROBED"
    if not start.head or not start.head_weights:
        raise ConfigError(f"task.head=start: start={config.start} has no linear layer: {made}")
    head, task = start.head, labels.task
    if task.kind == "regression":
        raise ConfigError("task.head=start: regression cannot begin at a probe: leave it out")
    if (head.kind, head.classes) != (task.kind, labels.classes):
        raise ConfigError(
            f"task.head=start: start={config.start} has a head for {head.kind}: "
            f"{', '.join(head.classes)}; the labels are {task.kind}: {', '.join(labels.classes)}"
            f": {made}, with these labels"
        )
    if config.train.compile == "step" and len(start.readout) > 1:
        raise ConfigError(
            "train.compile=step: with task.head=start the read-out cannot be compiled: use layers "
            "or eager"
        )
    if "rhythm" in start.readout and config.train.precision != "fp32":
        raise ConfigError(
            f"train.precision={config.train.precision}: with task.head=start and the read-out "
            "rhythm, the head would be rounded: use fp32"
        )
    return start.readout


def select_leads(start: Start, config: FinetuneConfig) -> dict[str, Tensor]:
    """The encoder's weights for these leads only: the output is the same as with the other leads
    set to zero."""
    assert start.weights is not None
    had, leads = list(start.input.leads), list(config.augment.output_leads)
    setting = f"augment.leads={config.augment.leads!r}"
    if not set(leads) <= set(had):
        raise ConfigError(
            f"{setting}: start={config.start} was trained on {describe_leads(had)} only: choose "
            "among them, with augment.padded=false"
        )
    if leads == had:
        return start.weights
    select: Any = getattr(start.kind, "select_leads", None)
    if select is None and set(leads) == set(had):
        raise ConfigError(
            f"{setting}: {start.model.encoder} takes them as {describe_leads(had)}: reorder them in "
            f"its forward, and convert it again with --leads {describe_leads(leads)}"
        )
    if select is None:
        raise ConfigError(
            f"{setting}: {start.model.encoder} cannot take fewer leads: use augment.padded=true, "
            "which sets the others to zero"
        )
    chosen: dict[str, Tensor] = select(start.weights, [had.index(lead) for lead in leads], len(had))
    return chosen


def read_settings(
    config: str | Path | None, overrides: Sequence[str] | Mapping[str, Any]
) -> FinetuneConfig:
    """The settings of `config`, or without it, those of the task that task.name or task.labels
    names. What is not set is chosen from the data: the kind of the labels, the batch size, the
    length of the training."""
    if config is not None:
        return load(config, overrides, FinetuneConfig)
    tree = overridden({}, overrides)
    first = build(tree, FinetuneConfig).train
    tree = with_task(tree)
    length_given = bool({"steps", "epochs"} & first.model_fields_set)
    length: dict[str, int] = {} if length_given else {"epochs": EPOCHS}
    _, world, _ = environment()
    length["batch_crops"] = choose_batch(first, 10 * BATCH, world)
    wanted = build(merge({"train": length}, tree), FinetuneConfig)
    check(wanted, world)
    task = wanted.task
    guessed = bool(task.labels) and "kind" not in tree["task"]
    if guessed:
        task = guess_kind(task)
    start, datasets = read_start(wanted.start, wanted.code), open_datasets(wanted)
    labels = read_task(task, datasets, wanted.data.where)
    crops = len(with_windows(labels, datasets, start.input).y_of("train"))
    batch = choose_batch(first, crops, world)
    chosen = choose_training(wanted, start.model, batch, max(1, crops // batch))
    if length_given:
        del chosen["steps"], chosen["epochs"]
    chosen |= saved_training(wanted, chosen)
    own: Facts = {"train": chosen, "task": {"kind": task.kind}}
    if start.weights is None:  # random convolutions are not worth freezing
        own["encoder"] = {"feature_grad": 1.0}
    settled = build(merge(own, tree), FinetuneConfig)
    if os.environ.get("RANK", "0") == "0":
        say(what_was_chosen(settled, crops, guessed))
    return settled


def choose_batch(train: TrainConfig, crops: int, world: int) -> int:
    if "batch_crops" in train.model_fields_set:
        return train.batch_crops
    unit = world * (train.micro_batch or 1)
    return max(1, min(BATCH, max(2, crops // 10)) // unit) * unit


def choose_training(wanted: FinetuneConfig, model: ModelConfig, batch: int, epoch: int) -> Facts:
    """Settings for a data set that is `epoch` batches long."""
    rate, precision = LR, "auto"
    if wanted.task.head == "start":
        rate, precision = LR_AT_PROBE, "fp32"
    elif not model.encoder:
        rate = min(LR, LR_WIDTH / model.width)
    return {
        "batch_crops": batch,
        "validate_every": min(epoch, VALIDATE),
        "valid_batches": 1000,
        "patience": PATIENCE,
        "lr": rate,
        "schedule": "warmup_cosine",
        "precision": precision,
        "steps": min(EPOCHS * epoch, STEPS),
        "epochs": None,
    }


def saved_training(wanted: FinetuneConfig, chosen: Mapping[str, Any]) -> Facts:
    """What the run to be resumed, perhaps on another number of ranks, had chosen."""
    before = Path(wanted.run, "config.yaml")
    begun = before.is_file() and any(Path(wanted.run, "checkpoints").glob("step-*"))
    saved = read_mapping(before) if begun else {}
    if (saved.get("task") or {}).get("name") != wanted.task.name:
        return {}
    train = saved.get("train") or {}
    return {name: train[name] for name in chosen if name in train}


def with_task(tree: Facts) -> Facts:
    """The settings with those of the task that task.name or task.labels names."""
    task = tree.get("task", {})
    if name := task.pop("name", None):
        return merge(read_yaml(find_config(name, "tasks", "--task"), "tasks"), tree)
    if labels := task.get("labels"):
        task["name"] = Path(labels).stem
        return tree
    raise ConfigError(
        "no task is given: use --labels my.csv, --task NAME (age, sex, ...) or --config diagnosis"
    )


def what_was_chosen(config: FinetuneConfig, crops: int, guessed: bool) -> str:
    t, task = config.train, config.task
    sentence = f"{task.name}: "
    if guessed:
        sentence += (
            f"the table looks like {task.kind} ({KINDS[task.kind].meaning}; --kind if not). "
        )
    length = f"{t.steps:,} steps" if t.steps else f"{t.epochs:g} x through all"
    return (
        f"{sentence}{crops:,} training crops, used {t.batch_crops} at a time (a step), for at most "
        f"{length}; learning rate {t.lr:.2g}. Every {t.validate_every} steps the model is tried on "
        f"the validation crops: it stops early after {t.patience} tries without improvement"
    )


def with_windows(labels: TaskLabels, datasets: Sequence[Dataset], model_input: Input) -> TaskLabels:
    """Without crops that are shorter than the model's window."""
    split, without = [], 0
    for dataset, split_N in zip(datasets, labels.split, strict=True):
        short_N = model_input.count(dataset.column("halves")) == 0
        without += int((split_N[short_N] > 0).sum())
        split.append(np.where(short_N, np.int8(0), split_N))
    if not without:
        return labels
    remark = (
        f"{without:,} labelled crops are left out: shorter than the {model_input.window_s:g} s that "
        "the model takes at once"
    )
    return replace(labels, split=split, remarks=[*labels.remarks, remark])
