"""Settings for fine-tuning without a config file: the kind of the labels, and a schedule that suits
their number.

config = finetuning(None, {"start": "RUN", "data.datasets": ["DATASET"], "task.labels": "my.csv",
"run": "OUT"}) config = finetuning(None, {"start": "RUN", "data.datasets": ["DATASET"], "task.name":
"sex", "run": "OUT"}) config = finetuning("diagnosis", ["start=RUN", "data.datasets=[DATASET]",
"run=DX"])
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omnilead.data_tools.cli import say
from omnilead.engine.common import (
    ConfigError,
    find_config,
    merge,
    overridden,
    read_mapping,
    read_yaml,
)
from omnilead.engine.config import build, check, load
from omnilead.engine.tasks.config import FinetuneConfig
from omnilead.engine.tasks.finetuning import read_start
from omnilead.engine.tasks.labels import guess, read_task
from omnilead.engine.training.distributed import environment
from omnilead.engine.training.train import open_datasets

BATCH, EPOCHS, STEPS, VALIDATE = 64, 40, 20_000, 500  # at most
PATIENCE = 10  # validations
LR, LR_WIDTH = 1e-3, 0.064  # of the authors' architecture: LR_WIDTH / width, at most LR


def finetuning(
    config: str | Path | None, overrides: Sequence[str] | Mapping[str, Any]
) -> FinetuneConfig:
    """The settings of `config`, or without it, those of the task that task.name or task.labels
    names. What is not set is chosen from the data: the kind of the labels, the batch size, the
    length of the training."""
    if config is not None:
        return load(config, overrides, FinetuneConfig)
    tree = overridden({}, overrides)
    given = build(tree, FinetuneConfig).train.model_fields_set
    tree = with_task(tree)
    length_given = bool({"steps", "epochs"} & given)
    length = {} if length_given else {"epochs": EPOCHS}
    wanted = build(merge({"train": length}, tree), FinetuneConfig)
    _, world, _ = environment()
    check(wanted, world)
    task = wanted.task
    guessed = bool(task.labels) and "kind" not in tree["task"]
    if guessed:
        task = guess(task)
    crops = len(read_task(task, open_datasets(wanted)).of("train"))
    batch = max(1, min(BATCH, crops // 10) // world) * world
    if "batch_crops" in given:
        batch = wanted.train.batch_crops
    chosen = choose_training(wanted, batch, max(1, crops // batch))
    if length_given:
        del chosen["steps"]
    chosen |= saved_training(wanted, chosen)
    settled = build(merge({"train": chosen, "task": {"kind": task.kind}}, tree), FinetuneConfig)
    if os.environ.get("RANK", "0") == "0":
        say(what_was_chosen(settled, crops, guessed))
    return settled


def choose_training(wanted: FinetuneConfig, batch: int, epoch: int) -> dict[str, Any]:
    """Settings for a data set that is `epoch` batches long."""
    model = read_start(wanted.start, wanted.code).model
    return {
        "batch_crops": batch,
        "validate_every": min(epoch, VALIDATE),
        "valid_batches": 1000,
        "patience": PATIENCE,
        "lr": LR if model.encoder else min(LR, LR_WIDTH / model.width),
        "schedule": "warmup_cosine",
        "precision": "auto",
        "steps": min(EPOCHS * epoch, STEPS),
    }


def saved_training(wanted: FinetuneConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What the run to be resumed, perhaps on another number of ranks, had chosen."""
    before = Path(wanted.run, "config.yaml")
    saved = read_mapping(before) if before.is_file() else {}
    if (saved.get("task") or {}).get("name") != wanted.task.name:
        return {}
    train = saved.get("train") or {}
    return {name: train[name] for name in chosen if name in train}


def with_task(tree: dict[str, Any]) -> dict[str, Any]:
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
    kind = f"{task.kind} (--kind if it is not)" if guessed else task.kind
    length = f"{t.steps:,} steps" if t.steps else f"{t.epochs:g} epochs"
    return (
        f"{task.name}: {kind}. {crops:,} training crops: at most {length} of {t.batch_crops} "
        f"crops, lr {t.lr:.2g}; stops early after {t.patience} validations (one every "
        f"{t.validate_every} steps) without improvement"
    )
