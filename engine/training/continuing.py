"""Continues pre-training from the weights of another model: `start` is a run, a model folder or a
converted model.

    config = read_settings(None, {"start": "RUN"})      # those of the run, or of the model and its objective
    started = read_weights(config)            # ConfigError if the architectures differ
    print(started.into(model))                # what was loaded, and what starts afresh

This is a separate run: optimiser, learning rate and data order start afresh. The heads of the local
objective are loaded if all of them fit. Code in the folder is never run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn

from ..model.config import ModelConfig
from ..model.encoders import portable
from ..model.folder import (
    CONFIG,
    PREPROCESSING,
    config_of,
    document_of,
    misfits,
    model_folder,
    seen_by,
    weights_in,
)
from ..model.input import Input
from ..settings.commandline import overridden, read_mapping
from ..settings.errors import ConfigError
from ..settings.files import flatten
from ..settings.leads import describe_leads
from .config import Config, build, load

QUICKSTART = "quickstart"  # the config if none is given
INPUT = ("window_s", "fs_hz", "band_hz", "scale")
PLUGGED = ("model.encoder", "augment.extra", "objective.method")  # may name the user's own code
# and defaults
PLACES: dict[str, Any] = {
    "train.deepspeed": None,
    "train.track": ["tensorboard"],
    "pipeline.cache_dir": None,
}
MASK = "encoder.mask_embedding"  # only the local objective has it


@dataclass(frozen=True)
class StartingWeights:
    start: str
    weights: dict[str, Tensor]
    seen: pa.Table
    facts: dict[str, Any]  # for checkpoints and config.json

    @torch.no_grad()
    def into(self, model: nn.Module) -> str:
        """Loads the weights into the model; what was loaded, and what starts afresh."""
        own = model.state_dict()
        encoder = {name: w for name, w in own.items() if name.startswith("encoder.")}
        heads = {name: w for name, w in own.items() if name.startswith("local.")}
        theirs = {name: w for name, w in self.weights.items() if name.startswith("encoder.")}
        new = []
        if MASK not in encoder:
            theirs.pop(MASK, None)
        elif MASK not in theirs:
            theirs[MASK] = own[MASK]
            new.append("the mask embedding")
        if wrong := misfits(shapes(theirs), shapes(encoder)):
            raise ConfigError(
                f"start={self.start}: its weights are not those of this encoder: {wrong}"
            )
        taken = "the encoder"
        their_heads = {name: w for name, w in self.weights.items() if name in heads}
        if heads and shapes(their_heads) == shapes(heads):
            taken += " and the heads of the local objective"
            theirs |= their_heads
        elif heads:
            new.append("the heads of the local objective")
        if any(name.startswith(("plugin.", "attributes.")) for name in own):
            new.append("the objective's own weights")
        new.append("the optimiser")
        model.load_state_dict({**own, **theirs})
        return f"start={self.start}: {taken} loaded; new: {', '.join(new)}"


def shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def read_settings(
    config: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Config:
    """Like engine.training.config.load. Without a config, the settings are those of the run `start`. If
    `start` is a model folder or a fine-tuned run, they are its model and objective. Without
    `start`, they are the quick start's."""
    given = overridden({}, overrides)
    start = given.get("start")
    if config or not start or not isinstance(start, str):
        return load(config or QUICKSTART, overrides)
    before = Path(start, "config.yaml")
    if before.is_symlink():
        raise ConfigError(
            f"start={start}: {before} is a link, which is not followed: give the run itself, or "
            "RUN/model"
        )
    settings = read_mapping(before) if before.is_file() else {"task": {}}
    if "task" not in settings:
        left_out = ("run", "start", "data")
        tree = {name: section for name, section in settings.items() if name not in left_out}
    else:  # a model folder, or a fine-tuned run
        with model_folder(start) as (folder, _):
            document = document_of(folder / CONFIG)
            preprocessing = document_of(folder / PREPROCESSING)
        tree = {name: document[name] for name in ("model", "objective") if name in document}
        signals = Input.of(preprocessing, config_of(document).leads)
        tree["input"] = {name: getattr(signals, name) for name in INPUT}
    refuse_foreign(start, flatten(tree), flatten(given))
    objective, method = tree.get("objective", {}), flatten(given).get("objective.method")
    if method and portable(str(method)) != portable(str(objective.get("method"))):
        objective.pop("options", None)  # those of the other class
    return build(overridden(tree, overrides))


def refuse_foreign(start: str, settings: dict[str, Any], given: dict[str, Any]) -> None:
    """The run may come from anyone: code, files and services that it names are used only if they
    are named again."""
    for key, value in settings.items():
        again = f"--set {key}={value}"
        if key in given:
            continue
        if key in PLUGGED and ":" in str(value):
            raise ConfigError(
                f"start={start}: {key}={value} is code: to run it, name the file: {again}"
            )
        if key in PLACES and value != PLACES[key]:
            raise ConfigError(
                f"start={start}: {key}={value} is a file or a service: to use it again, {again}"
            )


def read_weights(config: Config) -> StartingWeights:
    start = config.start
    with model_folder(start) as (folder, digest):
        document = document_of(folder / CONFIG)
        preprocessing = document_of(folder / PREPROCESSING)
        theirs = config_of(document, folder / CONFIG)
        weights, seen = weights_in(folder), seen_by(folder)
    check_fits(config, theirs, Input.of(preprocessing, theirs.leads))
    trained = document.get("trained")
    trained = trained if isinstance(trained, dict) else {}
    continued: dict[str, Any] = {"start": start, "digest": digest[:16]}
    continued |= {key: trained.get(key) for key in ("step", "datasets")}
    floats = {name: w.float() for name, w in weights.items()}
    return StartingWeights(start, floats, seen, {"continued": continued})


def check_fits(config: Config, theirs: ModelConfig, signals: Input) -> None:
    start, augment = config.start, config.augment
    pairs = (
        ("architecture", "model", _architecture(theirs), _architecture(config.model)),
        ("input", "input", {name: getattr(signals, name) for name in INPUT}, vars(config.input)),
    )
    for what, section, there, here in pairs:
        differ = []
        for key, value in there.items():
            if here.get(key, value) != value:
                differ.append(f"{section}.{key} is {value!r} there, {here[key]!r} here")
        if differ:
            raise ConfigError(
                f"start={start}: another {what}: {'; '.join(differ)}: set the same, or leave out "
                "--config"
            )
    if signals.leads != augment.output_leads:
        raise ConfigError(
            f"start={start}: augment.leads={augment.leads!r}: use "
            f"{describe_leads(signals.leads)}, as it was trained on these"
        )


def _architecture(model: ModelConfig) -> dict[str, Any]:
    settings = asdict(model) | {"encoder": portable(model.encoder)}
    return {key: settings[key] for key in model.architecture}
