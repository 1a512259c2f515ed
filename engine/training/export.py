"""Exports a run: RUN/model from a checkpoint."""

from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from omnilead.engine.common import describe_leads
from omnilead.engine.config import RunConfig
from omnilead.engine.model import folder
from omnilead.engine.model.encoders import CODE
from omnilead.engine.model.input import DEFAULT_INPUT, SCALES
from omnilead.engine.training import checkpoint, distributed
from omnilead.engine.training.checkpoint import CheckpointError, WriteError, warn
from omnilead.engine.training.resuming import saved_config
from omnilead.engine.training.task import TrainingTask


class Export(NamedTuple):
    config: RunConfig
    state: dict[str, Any]  # of the checkpoint
    weights: dict[str, Tensor]


def read_export(run: Path, kind: type[RunConfig], task: type[TrainingTask]) -> Export:
    """What RUN/model will hold, from the best or the newest checkpoint."""
    path = checkpoint.best(run) if task.exports_best else checkpoint.newest(run, warn)
    if path is None:
        raise CheckpointError(f"{run}: has no checkpoint: train it first")
    state = checkpoint.read_state(path)
    config: Any = saved_config(path, state, kind)
    with distributed.process_restored():  # reading may import DeepSpeed
        every = checkpoint.full_weights(path)
    weights = {name: tensor for name, tensor in every.items() if task.exports(config, name)}
    return Export(config, state, weights)


def write_export(run: Path, export: Export, task: type[TrainingTask], card: str) -> Path:
    """Writes RUN/model atomically: weights in safetensors, the input specification, the card."""
    config, state, weights = export
    document = task.described(config, state) | {"trained": _history(config, state)}
    code = {name: read_code(run / CODE / name) for name in state.get("code", ())}
    try:
        folder.write(run / "model", weights, document, _signals(config, state), card, code)
    except SafetensorError as error:
        raise WriteError(
            f"{run / 'model'}: {error}: free disk space, then --export {run}"
        ) from error
    return run / "model"


def _signals(config: RunConfig, state: dict[str, Any]) -> dict[str, Any]:
    """preprocessing.json: the signals that the model takes."""
    leads = describe_leads(config.augment.output_leads).split(",")
    seen = describe_leads(config.augment.seen).split(",")
    signals = {**DEFAULT_INPUT, "leads": leads, "segment_s": 5.0, **state.get("input", {})}
    signals["meaning"] = SCALES[signals["scale"]]
    if seen != leads:
        signals["seen"] = seen
    signals["sha256"] = state["preprocessing_sha256"]
    return signals


def _history(config: RunConfig, state: dict[str, Any]) -> dict[str, Any]:
    kept = ("step", "crops_seen", "datasets", "preprocessing_sha256")
    return {
        **{name: state[name] for name in kept},
        "precision": config.train.precision,
        "rlm": config.augment.rlm,
        "splits": [*state.get("splits", ()), *state.get("splits_before", ())],
    }


def read_code(file: Path) -> bytes:
    if file.is_symlink() or not file.is_file():
        raise CheckpointError(
            f"{file}: no such file, or a link, but the checkpoint was trained with it: "
            f"{checkpoint.RESTORE}"
        )
    return file.read_bytes()
