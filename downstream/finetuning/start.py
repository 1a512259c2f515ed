"""The model that a fine-tuning starts from.

`start` is a run or model folder; a pre-training YAML gives its architecture with random weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.data.seen import NOTHING_SEEN
from omnilead.engine.model.config import ModelConfig
from omnilead.engine.model.encoder import Encoder
from omnilead.engine.model.folder import config_of, names_a_model
from omnilead.engine.model.input import Input
from omnilead.engine.settings.errors import ConfigError, Flag
from omnilead.engine.settings.files import read_plugins
from omnilead.engine.settings.leads import describe_leads
from omnilead.engine.training.checkpoint_files import warn
from omnilead.engine.training.config import Config, load_config

from ..inference import trained_model as inference
from ..tasks.config import FinetuneConfig
from ..tasks.labels import TaskLabels
from ..tasks.readout import PAPER, Readout


class Start(NamedTuple):
    """The model that fine-tuning starts from."""

    model: ModelConfig
    input: Input  # windows, rate, band and scale: fine-tuning keeps them
    name: str
    code: dict[str, bytes]  # {name: content} of plugged-in files
    seen: pa.Table = NOTHING_SEEN  # the data that the model was trained on
    weights: dict[str, Tensor] | None = None  # the encoder's weights; None: random
    kind: type[nn.Module] | None = None  # the encoder's class; None: as `model` names it
    head: inference.HeadInfo | None = None
    head_weights: dict[str, Tensor] = {}  # noqa: RUF012 - never changed
    readout: Readout = (PAPER,)


def read_start(start: str, code: bool = False) -> Start:
    """Reads the model or the YAML to start from. `code`: allow running encoder code in the
    folder."""
    if not names_a_model(start):
        config = load_config(start, kind=Config)
        brought = read_plugins([("model.encoder", config.model.encoder)], start)
        return Start(config.model, config.model_input, f"random {config.model}", code=brought)
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
    """Returns the read-out for the head; with task.head=start, that of the start, whose linear
    layer must be for these labels."""
    if config.task.head != "start":
        return (PAPER,)
    made = "omnilead fit --model MODEL --out PROBED writes one, for ", Flag("--start"), " PROBED"
    if not start.head or not start.head_weights:
        raise ConfigError(f"task.head=start: start={config.start} has no linear layer: ", *made)
    head, task = start.head, labels.task
    if task.kind == "regression":
        raise ConfigError("task.head=start: regression cannot begin at a probe: leave it out")
    if (head.kind, head.classes) != (task.kind, labels.classes):
        raise ConfigError(
            f"task.head=start: start={config.start} has a head for {head.kind}: "
            f"{', '.join(head.classes)}; the labels are {task.kind}: {', '.join(labels.classes)}"
            ": ",
            *made,
            ", with these labels",
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
    """Returns the encoder's weights for these leads only: the output is the same as with the other
    leads set to zero."""
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
            "its forward, and convert it again with ",
            Flag("--leads"),
            f" {describe_leads(leads)}",
        )
    if select is None:
        raise ConfigError(
            f"{setting}: {start.model.encoder} cannot take fewer leads: use augment.padded=true, "
            "which sets the others to zero"
        )
    chosen: dict[str, Tensor] = select(start.weights, [had.index(lead) for lead in leads], len(had))
    return chosen


def with_exact_weights(config: FinetuneConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns `weights`, where those of a frozen encoder are as in `start`: training in bf16 rounds
    them."""
    kept = f"start={config.start}: the exported encoder is rounded to bf16, since the start"
    try:
        start = read_start(config.start, config.code)
        exact = select_leads(start, config) if start.weights else {}
    except (ConfigError, OSError) as error:
        warn(f"{kept} cannot be read again: {error}")
        return weights
    exact = {f"encoder.{name}": weight for name, weight in exact.items()}
    if not all(is_rounded(weights.get(name), weight) for name, weight in exact.items()):
        warn(f"{kept} has changed")
        return weights
    return weights | exact


def is_rounded(found: Tensor | None, exact: Tensor) -> bool:
    """True if `found` may be `exact` in bfloat16."""
    if found is None or found.shape != exact.shape:
        return False
    return torch.allclose(found.double(), exact.double(), rtol=2**-8, atol=0, equal_nan=True)


def drop_short_crops(
    labels: TaskLabels, datasets: Sequence[Dataset], model_input: Input
) -> TaskLabels:
    """Drops crops that are shorter than the model's window."""
    split, without = [], 0
    for dataset, split_N in zip(datasets, labels.split, strict=True):
        short_N = model_input.count_windows(dataset.column("halves")) == 0
        without += int((split_N[short_N] > 0).sum())
        split.append(np.where(short_N, np.int8(0), split_N))
    if not without:
        return labels
    remark = (
        f"{without:,} labelled crops are left out: shorter than the {model_input.window_s:g} s that "
        "the model takes at once"
    )
    return replace(labels, split=split, remarks=[*labels.remarks, remark])
