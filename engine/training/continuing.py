"""Continues pre-training from the weights of another model: `start` is a run, a model folder or a
converted model.

    started = read_starting_weights(config)            # ConfigError if the architectures differ
    print(started.load_into(model))           # what was loaded, and what starts afresh

This is a separate run: optimiser, learning rate and data order start afresh. The heads of the local
objective are loaded if all of them fit. Code in the folder is never run.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn

from ..model.config import ModelConfig
from ..model.encoders import options_with_defaults
from ..model.folder import (
    CONFIG,
    PREPROCESSING,
    config_of,
    describe_weight_mismatches,
    load_weights,
    model_folder,
    read_document,
    read_seen,
)
from ..model.input import Input
from ..settings.errors import ConfigError, Flag
from ..settings.files import portable_spec
from ..settings.leads import describe_leads
from .config import Config
from .read_settings import INPUT_SETTINGS

# only encoders whose objective masks tokens have this weight
MASK_EMBEDDING = "encoder.mask_embedding"


@dataclass(frozen=True)
class StartingWeights:
    start: str
    weights: dict[str, Tensor]
    seen: pa.Table
    facts: dict[str, Any]  # entries that are added to checkpoints and to the exported config.json

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> str:
        """Loads the weights into the model. Returns a sentence that says what was loaded and what
        starts afresh."""
        state = model.state_dict()
        encoder = {name: w for name, w in state.items() if name.startswith("encoder.")}
        heads = {name: w for name, w in state.items() if name.startswith("local.")}
        start_weights = {name: w for name, w in self.weights.items() if name.startswith("encoder.")}
        new = []
        if MASK_EMBEDDING not in encoder:
            start_weights.pop(MASK_EMBEDDING, None)
        elif MASK_EMBEDDING not in start_weights:
            start_weights[MASK_EMBEDDING] = state[MASK_EMBEDDING]
            new.append("the mask embedding")
        if problem := describe_weight_mismatches(
            shapes_by_name(start_weights), shapes_by_name(encoder)
        ):
            raise ConfigError(
                f"start={self.start}: its weights are not those of this encoder: {problem}"
            )
        loaded = "the encoder"
        start_heads = {name: w for name, w in self.weights.items() if name in heads}
        if heads and shapes_by_name(start_heads) == shapes_by_name(heads):
            loaded += " and the heads of the local objective"
            start_weights |= start_heads
        elif heads:
            new.append("the heads of the local objective")
        if any(name.startswith(("plugin.", "attributes.")) for name in state):
            new.append("the objective's own weights")
        new.append("the optimiser")
        model.load_state_dict({**state, **start_weights})
        return f"start={self.start}: {loaded} loaded; new: {', '.join(new)}"


def shapes_by_name(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def read_starting_weights(config: Config) -> StartingWeights:
    start = config.start
    with model_folder(start) as (folder, digest):
        document = read_document(folder / CONFIG)
        preprocessing = read_document(folder / PREPROCESSING)
        start_config = config_of(document, folder / CONFIG)
        weights, seen = load_weights(folder), read_seen(folder)
    check_start_fits(config, start_config, Input.from_document(preprocessing, start_config.leads))
    trained = document.get("trained")
    trained = trained if isinstance(trained, dict) else {}
    continued: dict[str, Any] = {"start": start, "digest": digest[:16]}
    continued |= {key: trained.get(key) for key in ("step", "datasets")}
    floats = {name: w.float() for name, w in weights.items()}
    return StartingWeights(start, floats, seen, {"continued": continued})


def check_start_fits(config: Config, start_config: ModelConfig, signals: Input) -> None:
    start, augment = config.start, config.augment
    pairs = (
        ("architecture", "model", _architecture(start_config), _architecture(config.model)),
        (
            "input",
            "input",
            {name: getattr(signals, name) for name in INPUT_SETTINGS},
            vars(config.input),
        ),
    )
    for what, section, start_values, run_values in pairs:
        differences = []
        for key, value in start_values.items():
            if run_values.get(key, value) != value:
                differences.append(f"{section}.{key} is {value!r} there, {run_values[key]!r} here")
        if differences:
            raise ConfigError(
                f"start={start}: has another {what}: {'; '.join(differences)}: set the same values, or leave out ",
                Flag("--config"),
            )
    if signals.leads != augment.output_leads:
        raise ConfigError(
            f"start={start}: augment.leads={augment.leads!r}: use "
            f"{describe_leads(signals.leads)}, the leads on which this model was trained"
        )


def _architecture(model: ModelConfig) -> dict[str, Any]:
    settings = asdict(model) | {"encoder": portable_spec(model.encoder)}
    settings["options"] = options_with_defaults(model)
    return {key: settings[key] for key in model.architecture_settings}
