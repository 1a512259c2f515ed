"""Exports a run: writes RUN/model from a checkpoint, and finds out what data its weights have seen."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from omnilead.data_tools.dataset import DataError, Dataset
from omnilead.data_tools.io.terminal import write_error_advice

from ..data import seen
from ..model import folder
from ..model.window import DEFAULT_INPUT, SCALE_MEANINGS
from ..settings.errors import ConfigError, TrainError
from ..settings.leads import describe_leads
from ..settings.run_files import RUN_FACTS
from . import checkpoint, checkpoint_files, distributed
from .checkpoint_files import CheckpointError, WriteError, warn
from .config import RunConfig
from .run_folder import RunFolder
from .task import TrainingTask
from .train import saved_config


class Export(NamedTuple):
    config: RunConfig
    state: dict[str, Any]  # state of the checkpoint
    weights: dict[str, Tensor]
    seen: pa.Table
    # lowest and highest rate at which the labelled crops were recorded; []: no crop is labelled, or
    # the rates are unknown
    source_hz: list[float]


def read_export(run: RunFolder, task: type[TrainingTask]) -> Export:
    """Reads from a checkpoint of the run what RUN/model will hold. The task decides whether it is the
    best checkpoint or the newest."""
    path = run.best_checkpoint() if task.exports_best else run.newest_checkpoint(warn)
    if path is None:
        raise CheckpointError(f"{run.path}: has no checkpoint: train it first")
    state = checkpoint_files.read_state(path)
    if 0 < state["step"] <= state["skipped_steps"]:
        raise TrainError(
            f"{run.path}: in each of its {state['step']:,} steps the loss or a gradient was not finite, so it "
            "has learnt nothing and no model is written: look at the data and at augment.extra, or lower train.lr"
        )
    config: Any = saved_config(path, state, task.settings)
    # reading may import DeepSpeed, which changes the process
    with distributed.process_state_restored():
        state_dict = full_weights(path)
    weights = task.exported_weights(config, state_dict)
    known = seen_by_checkpoint(run.path, config, state, task)
    if not known.datasets:
        known = join_with_exported(run.model, known, _trained_entry(config, state))
    return Export(config, state, weights, known.seen, known.source_hz)


class SeenData(NamedTuple):
    """The data that the weights of a checkpoint have seen."""

    # crops that the weights have seen, including those that the starting model had seen
    seen: pa.Table
    # fingerprint of a dataset -> how often each of its crops was drawn (Order.times_drawn)
    times_drawn: dict[str, np.ndarray]
    # lowest and highest rate at which the labelled crops were recorded; []: no crop is labelled, or
    # the rates are unknown
    source_hz: list[float]
    datasets: list[str]  # paths of the run's datasets; []: they were not found


def seen_by_checkpoint(
    run: Path, config: Any, state: dict[str, Any], task: type[TrainingTask]
) -> SeenData:
    """Returns the data that a checkpoint has seen. Its datasets are found from any working folder,
    and also after a move if the run was restarted since."""
    records = [folder.read_seen(run)] if folder.names_a_model(config.start) else []
    times_drawn = {}
    rates_hz = set[float]()
    places: list[str] = []
    try:
        found = _find_datasets(run, config, state)
        for dataset, times, use in task.crop_uses(config, state, run, list(found.values())):
            records.append(seen.seen_record_of_crops(dataset, np.flatnonzero(times), use))
            if use != "selected":
                times_drawn[dataset.fingerprint] = times
            if use == "labelled":
                rates_hz.update(np.unique(dataset.column("fs_source_hz")[times > 0]).tolist())
        places = list(found)
    except (ConfigError, DataError, OSError) as error:
        warn(f"{run}: cannot say what it was trained on: {error}")
        records.append(seen.unknown_seen_record())
        rates_hz = set()
    source_hz = [min(rates_hz), max(rates_hz)] if rates_hz else []
    return SeenData(seen.join_seen_records(records), times_drawn, source_hz, places)


def _find_datasets(run: Path, config: Any, state: dict[str, Any]) -> dict[str, Dataset]:
    """Returns path -> dataset for the datasets of a run. Tries the paths in the settings, then
    those noted when the checkpoint was written, then those noted when the run was last started."""
    places_last: list[str] = []
    with suppress(OSError, ValueError, LookupError, TypeError):
        places_last = list(map(str, json.loads((run / RUN_FACTS).read_text())["dataset_paths"]))
    places_then = state.get("dataset_paths", [])  # checkpoints of earlier versions have no such key
    found: dict[str, tuple[str, Dataset]] = {}  # by fingerprint
    first_error: tuple[object, ...] = ()
    for place in dict.fromkeys([*config.data.datasets, *places_then, *places_last]):
        if found.keys() >= set(state["datasets"]):
            break
        try:
            dataset = Dataset.open(place, config.data.anonymous)
        except (DataError, OSError) as error:
            first_error = first_error or ("; ", error)
        else:
            found.setdefault(dataset.fingerprint, (place, dataset))
    if not found.keys() >= set(state["datasets"]):
        datasets = ", ".join(config.data.datasets)
        raise ConfigError(
            f"{datasets}: are not the datasets that this run trained on", *first_error
        )
    return dict(found[fingerprint] for fingerprint in state["datasets"])


def join_with_exported(model: Path, known: SeenData, history: dict[str, Any]) -> SeenData:
    """Completes `known`, for a run whose datasets were not found, by what RUN/model says about the
    data. If RUN/model holds the weights of this checkpoint, its record replaces that of `known`; if it
    holds earlier weights, the two records are joined."""
    try:
        written = folder.read_seen(model)
        document = folder.read_document(model / folder.CONFIG)
    except ConfigError:  # RUN/model is missing or damaged
        return known
    if document.get("trained") != history:
        return known._replace(seen=seen.join_seen_records([written, known.seen]))
    head = document.get("head")
    source_hz = head.get("source_hz", []) if isinstance(head, dict) else []
    return known._replace(seen=written, source_hz=source_hz)


def full_weights(path: Path) -> dict[str, Tensor]:
    """Returns all weights of a checkpoint in float32, under the model's own names. Frozen weights
    are only as exact as the precision of training."""
    stage = checkpoint_files.read_state(path)["zero_stage"]
    weights: dict[str, Tensor] = {}
    with checkpoint.reading_safely(path), checkpoint.silenced_output():
        if stage < 2:  # stages 2 and 3 keep the frozen weights in the optimizer's files
            weights = torch.load(
                path / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=True
            )["module"]
        if stage > 0:
            from deepspeed.utils import zero_to_fp32  # type: ignore[import-untyped]

            weights |= zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
                str(path.parent), tag=path.name
            )
        floats = {
            name: tensor.float() for name, tensor in weights.items() if tensor.is_floating_point()
        }
        return {name: tensor.contiguous().clone() for name, tensor in (weights | floats).items()}


def write_export(run: RunFolder, export: Export, task: type[TrainingTask], card: str) -> Path:
    """Writes RUN/model: the weights in safetensors, the specification of the input, and the model
    card."""
    config, state, weights, record, source_hz = export
    document = task.exported_config(config, state) | {"trained": _trained_entry(config, state)}
    if "head" in document and source_hz:
        document["head"]["source_hz"] = source_hz
    code = run.read_code(state.get("code", ()))
    signals = preprocessing_of(config, state)
    try:
        folder.write_model(run.model, weights, document, signals, card, code, record)
    except OSError as error:
        mend = write_error_advice(error, "free disk space", "make it writable")
        raise WriteError(
            f"{run.model}: {error.strerror}: {mend}, then {folder.export_command(run.path)}"
        ) from error
    return run.model


def preprocessing_of(config: RunConfig, state: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of preprocessing.json, which specifies the signals that the model
    takes."""
    leads = describe_leads(config.augment.output_leads).split(",")
    seen = describe_leads(config.augment.seen_leads).split(",")
    signals = {**DEFAULT_INPUT, "leads": leads, "segment_s": 5.0, **state.get("input", {})}
    signals["meaning"] = SCALE_MEANINGS[signals["scale"]]
    if seen != leads:
        signals["seen"] = seen
    signals["sha256"] = state["preprocessing_sha256"]
    return signals


def _trained_entry(config: RunConfig, state: dict[str, Any]) -> dict[str, Any]:
    keys = ("step", "crops_seen", "datasets", "preprocessing_sha256")
    return {
        **{name: state[name] for name in keys},
        "precision": config.train.precision,
        "rlm": config.augment.rlm,
    }
