"""Reads the settings of a fine-tuning. Without a config file, the kind of the labels and the training
schedule are chosen from the data.

    read_settings(None, {"start": "RUN", "data.datasets": ["DATASET"], "task.labels": "my.csv", "run": "OUT"})
    read_settings(None, {"start": "RUN", "data.datasets": ["DATASET"], "task.name": "sex", "run": "OUT"})
    read_settings("diagnosis", ["start=RUN", "data.datasets=[DATASET]", "run=DX"])
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omnilead.data_tools.ecg.workbook import table_name
from omnilead.data_tools.io.terminal import say
from omnilead.engine.model.config import ModelConfig
from omnilead.engine.settings.commandline import apply_overrides, read_mapping, read_yaml
from omnilead.engine.settings.errors import ConfigError, Facts, Flag
from omnilead.engine.settings.files import find_config, merge
from omnilead.engine.settings.launcher import launched_rank
from omnilead.engine.training.config import TrainConfig, build_config, check_config, load_config
from omnilead.engine.training.run_folder import open_datasets

from ..tasks.config import FinetuneConfig

# upper limits of the settings that are chosen from the data
MAX_BATCH, MAX_EPOCHS, MAX_STEPS, MAX_VALIDATE_EVERY = 64, 40, 20_000, 500
PATIENCE = 10  # training stops after this many validations without improvement
LR_FROM_PROBE = 1e-4  # learning rate if the head begins as a probe (task.head=start)
# The highest learning rate with a new head is LR; with the authors' encoder (model.encoder: ""), it is
# LR_WIDTH / width if that is lower
LR, LR_WIDTH = 1e-3, 0.064


def read_settings(
    config: str | Path | None, overrides: Sequence[str] | Mapping[str, Any]
) -> FinetuneConfig:
    """Returns the settings of `config` or, without it, those of the task that task.name or
    task.labels names. In the latter case, what is not set is chosen from the data: the kind of the
    labels, the batch size, the length of the training."""
    if config is not None:
        return load_config(config, overrides, FinetuneConfig)
    tree = apply_overrides({}, overrides)
    first = build_config(tree, FinetuneConfig).train
    tree = add_task_settings(tree)
    length_given = bool({"steps", "epochs"} & first.model_fields_set)
    length: dict[str, int] = {} if length_given else {"epochs": MAX_EPOCHS}
    _, world, _ = launched_rank()
    length["batch_crops"] = choose_batch(first, 10 * MAX_BATCH, world)
    wanted = build_config(merge({"train": length}, tree), FinetuneConfig)
    check_config(wanted, world)
    datasets = open_datasets(wanted)
    wanted.require_files()
    # Imported only after settings and paths were checked, since importing PyTorch takes seconds
    from ..tasks.guess import guess_kind
    from ..tasks.labels import read_task
    from .start import drop_short_crops, read_start_model

    task = wanted.task
    guessed = bool(task.labels) and "kind" not in tree["task"]
    if guessed:
        task = guess_kind(task)
    start = read_start_model(wanted.start, wanted.code)
    labels = read_task(task, datasets, wanted.data.where)
    crops = len(drop_short_crops(labels, datasets, start.input).y_of("train"))
    batch = choose_batch(first, crops, world)
    chosen = choose_training(wanted, start.model, batch, max(1, crops // batch))
    if length_given:
        del chosen["steps"], chosen["epochs"]
    chosen |= saved_choices(wanted, chosen)
    own: Facts = {"train": chosen, "task": {"kind": task.kind}}
    if start.weights is None:  # convolutions with random weights must be trained
        own["encoder"] = {"feature_grad": 1.0}
    settled = build_config(merge(own, tree), FinetuneConfig)
    if os.environ.get("RANK", "0") == "0":
        say(describe_choice(settled, crops, guessed))
    return settled


def choose_batch(train: TrainConfig, crops: int, world: int) -> int:
    if "batch_crops" in train.model_fields_set:
        return train.batch_crops
    unit = world * (train.micro_batch or 1)
    return max(1, min(MAX_BATCH, max(2, crops // 10)) // unit) * unit


def choose_training(wanted: FinetuneConfig, model: ModelConfig, batch: int, epoch: int) -> Facts:
    """Returns training settings for data with `epoch` batches in an epoch."""
    rate, precision = LR, "auto"
    if wanted.task.head == "start":
        rate, precision = LR_FROM_PROBE, "fp32"
    elif not model.encoder:
        rate = min(LR, LR_WIDTH / model.width)
    return {
        "batch_crops": batch,
        "validate_every": min(epoch, MAX_VALIDATE_EVERY),
        "valid_batches": 1000,
        "patience": PATIENCE,
        "lr": rate,
        "schedule": "warmup_cosine",
        "precision": precision,
        "steps": min(MAX_EPOCHS * epoch, MAX_STEPS),
        "epochs": None,
    }


def saved_choices(wanted: FinetuneConfig, chosen: Mapping[str, Any]) -> Facts:
    """Returns the training settings that were chosen when the run in wanted.run began, perhaps on
    another number of ranks. Returns {} if no run began there, or if it is of another task."""
    before = Path(wanted.run, "config.yaml")
    begun = before.is_file() and any(Path(wanted.run, "checkpoints").glob("step-*"))
    saved = read_mapping(before) if begun else {}
    if (saved.get("task") or {}).get("name") != wanted.task.name:
        return {}
    train = saved.get("train") or {}
    return {name: train[name] for name in chosen if name in train}


def add_task_settings(tree: Facts) -> Facts:
    """Returns `tree` with the settings of the task that task.name names. For a label table
    (task.labels), adds only a name of the task, which is made from that of the table."""
    task = tree.get("task", {})
    if name := task.pop("name", None):
        return merge(read_yaml(find_config(name, "tasks", Flag("--task")), "tasks"), tree)
    if labels := task.get("labels"):
        task["name"] = table_name(labels)
        return tree
    raise ConfigError(
        "no task is given: use ",
        Flag("--labels"),
        " my.csv, ",
        Flag("--task"),
        " NAME (age, sex, ...) or ",
        Flag("--config"),
        " diagnosis",
    )


def describe_choice(config: FinetuneConfig, crops: int, guessed: bool) -> str:
    from ..tasks.kinds import KINDS

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
