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
from omnilead.engine.settings.files import read_plugin_files
from omnilead.engine.settings.leads import describe_leads
from omnilead.engine.training.checkpoint_files import warn
from omnilead.engine.training.config import Config, load_config

from ..inference import trained_model as inference
from ..tasks.config import FinetuneConfig
from ..tasks.labels import TaskLabels
from ..tasks.readout import PAPER_READOUT, Readout


class StartModel(NamedTuple):
    """The model that a fine-tuning starts from."""

    model: ModelConfig
    input: Input  # windows, rate, band and scale of the signals, which fine-tuning does not change
    name: str
    code: dict[str, bytes]  # files of plugged-in code: {name: content}
    # hashes of the patients and waveforms that the model was trained on
    seen: pa.Table = NOTHING_SEEN
    weights: dict[str, Tensor] | None = None  # weights of the encoder; None: random weights
    kind: type[nn.Module] | None = None  # class of the encoder; None: the class that `model` names
    head: inference.HeadInfo | None = None
    head_weights: dict[str, Tensor] = {}  # noqa: RUF012 - never changed
    readout: Readout = (PAPER_READOUT,)


def read_start_model(start: str, code: bool = False) -> StartModel:
    """Reads the model folder, or the pre-training YAML, to start from. `code`: allow running the
    code of an encoder in the folder."""
    if not names_a_model(start):
        config = load_config(start, kind=Config)
        brought = read_plugin_files([("model.encoder", config.model.encoder)], start)
        return StartModel(config.model, config.model_input, f"random {config.model}", code=brought)
    model = inference.load(start, code)
    weights = dict(model.encoder.state_dict())
    if isinstance(model.encoder, Encoder):
        weights.pop("mask_embedding", None)
    history = model.history
    name = " ".join(str(history.get(key)) for key in ("step", "crops_seen", "datasets"))
    return StartModel(
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


def choose_readout(start: StartModel, config: FinetuneConfig, labels: TaskLabels) -> Readout:
    """Returns the read-out for the head. With task.head=start it is the read-out of the start
    model, whose linear layer must be for the same labels."""
    if config.task.head != "start":
        return (PAPER_READOUT,)
    made = "omnilead fit --model MODEL --out PROBED writes one, for ", Flag("--start"), " PROBED"
    if not start.head or not start.head_weights:
        raise ConfigError(f"task.head=start: start={config.start} has no linear layer: ", *made)
    head, task = start.head, labels.task
    if task.kind == "regression":
        raise ConfigError(
            "task.head=start: kind regression cannot begin with a probe: leave task.head out"
        )
    if (head.kind, head.classes) != (task.kind, labels.classes):
        raise ConfigError(
            f"task.head=start: start={config.start} has a head for {head.kind}: "
            f"{', '.join(head.classes)}, but the labels are {task.kind}: {', '.join(labels.classes)}"
            ". For a head with these labels: ",
            *made,
        )
    if config.train.compile == "step" and len(start.readout) > 1:
        raise ConfigError(
            "train.compile=step cannot compile the read-out that task.head=start uses: use layers "
            "or eager"
        )
    if "rhythm" in start.readout and config.train.precision != "fp32":
        raise ConfigError(
            f"train.precision={config.train.precision} would round the head of task.head=start, which has "
            "the read-out rhythm: use fp32"
        )
    return start.readout


def select_leads(start: StartModel, config: FinetuneConfig) -> dict[str, Tensor]:
    """Returns the encoder's weights for the leads of this fine-tuning only. They give the same
    output as all weights with the other leads set to zero."""
    assert start.weights is not None
    had, leads = list(start.input.leads), list(config.augment.output_leads)
    setting = f"augment.leads={config.augment.leads!r}"
    if not set(leads) <= set(had):
        raise ConfigError(
            f"{setting}: start={config.start} was trained on the leads {describe_leads(had)} only: "
            "choose among these leads, with augment.padded=false"
        )
    if leads == had:
        return start.weights
    select: Any = getattr(start.kind, "select_leads", None)
    if select is None and set(leads) == set(had):
        raise ConfigError(
            f"{setting}: {start.model.encoder} takes the leads as {describe_leads(had)}: reorder "
            "them in its forward, and convert it again with ",
            Flag("--leads"),
            f" {describe_leads(leads)}",
        )
    if select is None:
        raise ConfigError(
            f"{setting}: {start.model.encoder} cannot take fewer leads: use augment.padded=true, "
            "which sets the missing leads to zero"
        )
    chosen: dict[str, Tensor] = select(start.weights, [had.index(lead) for lead in leads], len(had))
    return chosen


def with_exact_weights(config: FinetuneConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of a trained model, with those of its frozen encoder taken from `start`,
    since training in bf16 rounded them. If `start` has changed or cannot be read, warns and returns
    the weights as they are."""
    kept = f"start={config.start}: the exported encoder is rounded to bf16, since the start"
    try:
        start = read_start_model(config.start, config.code)
        exact = select_leads(start, config) if start.weights else {}
    except (ConfigError, OSError) as error:
        warn(f"{kept} cannot be read again: {error}")
        return weights
    exact = {f"encoder.{name}": weight for name, weight in exact.items()}
    if not all(equal_in_bfloat16(weights.get(name), weight) for name, weight in exact.items()):
        warn(f"{kept} has changed")
        return weights
    return weights | exact


def equal_in_bfloat16(found: Tensor | None, exact: Tensor) -> bool:
    """Returns True if `found` may be `exact` after rounding to bfloat16."""
    if found is None or found.shape != exact.shape:
        return False
    return torch.allclose(found.double(), exact.double(), rtol=2**-8, atol=0, equal_nan=True)


def drop_short_crops(
    labels: TaskLabels, datasets: Sequence[Dataset], model_input: Input
) -> TaskLabels:
    """Returns the labels without the crops that are shorter than the model's window."""
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
