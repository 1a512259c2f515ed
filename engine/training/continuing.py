"""Continues pre-training from the weights of another model: `start` is a run, a model folder or a
converted model.

    started = read_weights(config)            # ConfigError if the architectures differ
    print(started.into(model))                # what was loaded, and what starts afresh

This is a separate run: optimiser, learning rate and data order start afresh. The heads of the local
objective are loaded if all of them fit. Code in the folder is never run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from omnilead.engine.common import ConfigError, describe_leads, flatten, overridden, read_mapping
from omnilead.engine.config import Config, build, load
from omnilead.engine.data.augmenter import FS_HZ
from omnilead.engine.model.config import ModelConfig
from omnilead.engine.model.encoders import portable
from omnilead.engine.model.folder import (
    CONFIG,
    PREPROCESSING,
    WEIGHTS,
    config_of,
    document_of,
    misfits,
    model_folder,
)
from omnilead.engine.model.input import Input

QUICKSTART = "quickstart"  # the config if none is given
SHARED = ("encoder", "options", "leads")  # settings that the weights of every encoder depend on
AUTHORS = (
    "conv",
    "conv_norm",
    "width",
    "layers",
    "heads",
    "ffn",
    "position_kernel",
    "position_groups",
)
PLUGGED = ("model.encoder", "augment.extra")  # may name the user's own code
PLACES: dict[str, Any] = {
    "train.deepspeed": None,
    "train.track": ["tensorboard"],
    "pipeline.cache_dir": None,
}  # and defaults
MASK = "encoder.mask_embedding"  # only the local objective has it


@dataclass(frozen=True)
class StartingWeights:
    start: str
    weights: dict[str, Tensor]
    facts: dict[str, Any]  # for checkpoints and config.json
    scale: str  # of their training signals

    @torch.no_grad()
    def into(self, model: nn.Module) -> str:
        own = model.state_dict()
        encoder, heads = (
            {name: own[name] for name in own if name.startswith(part)}
            for part in ("encoder.", "local.")
        )
        theirs = {
            name: w
            for name, w in self.weights.items()
            if name.startswith("encoder.") and (name != MASK or name in own)
        }
        anew = ["the mask embedding"] if MASK in encoder and MASK not in theirs else []
        theirs = {name: own[name] for name in encoder if name == MASK} | theirs
        if wrong := misfits(
            *({name: tuple(w.shape) for name, w in side.items()} for side in (theirs, encoder))
        ):
            raise ConfigError(
                f"start={self.start}: its weights are not those of this encoder: {wrong}"
            )
        fit = bool(heads) and all(
            name in self.weights and self.weights[name].shape == w.shape
            for name, w in heads.items()
        )
        model.load_state_dict(
            own | theirs | ({name: self.weights[name] for name in heads} if fit else {})
        )
        taken = "the encoder" + " and the heads of the local objective" * fit
        anew += ["the heads of the local objective"] * (bool(heads) and not fit) + ["the optimiser"]
        scale = (
            ""
            if self.scale == "millivolt"
            else f"; it was trained on signals in {self.scale}, now millivolts"
        )
        return f"start={self.start}: {taken} loaded; new: {', '.join(anew)}{scale}"


def read_config(
    config: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Config:
    """Like engine.config.load. Without a config, the settings are those of the run `start`. If
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
        tree = {
            name: section
            for name, section in settings.items()
            if name not in ("run", "start", "data")
        }
    else:  # a model folder, or a fine-tuned run
        with model_folder(start) as (folder, _):
            document = document_of(folder / CONFIG)
        tree = {name: document[name] for name in ("model", "objective") if name in document}
    named = flatten(given)
    for key, value in flatten(tree).items():
        if (
            key in PLUGGED and ":" in str(value) and key not in named
        ):  # the run may come from anyone
            raise ConfigError(
                f"start={start}: {key}={value} is code: to run it, name the file: --set "
                f"{key}={value}"
            )
        if key in PLACES and value != PLACES[key] and key not in named:
            raise ConfigError(
                f"start={start}: {key}={value} is a file or a service: to use it again, --set "
                f"{key}={value}"
            )
    return build(overridden(tree, overrides))


def read_weights(config: Config) -> StartingWeights:
    start, augment = config.start, config.augment
    with model_folder(start) as (folder, digest):
        document, preprocessing = document_of(folder / CONFIG), document_of(folder / PREPROCESSING)
        theirs, weights = config_of(document, folder / CONFIG), load_file(folder / WEIGHTS)
    before, now = _architecture(theirs), _architecture(config.model)
    if differ := [
        f"model.{key} is {value!r} there, {now[key]!r} here"
        for key, value in before.items()
        if now.get(key, value) != value
    ]:
        raise ConfigError(
            f"start={start}: another architecture: {'; '.join(differ)}: set the same, or leave "
            "out --config"
        )
    had, fs_hz = (given := Input.of(preprocessing, theirs.leads)).leads, given.fs_hz
    if fs_hz != FS_HZ:
        raise ConfigError(
            f"start={start}: was trained at {fs_hz:g} Hz, pre-training is at 500 Hz: fine-tune "
            "from it instead"
        )
    if had != augment.output_leads:
        raise ConfigError(
            f"start={start}: augment.leads={augment.leads!r}: use {describe_leads(had)}, as it "
            "was trained on these"
        )
    trained = document.get("trained") or {}
    facts = {
        "continued": {
            "start": start,
            "digest": digest[:16],
            **{key: trained.get(key) for key in ("step", "datasets")},
        }
    }
    facts |= {"splits_before": trained["splits"]} if trained.get("splits") else {}
    return StartingWeights(
        start, {name: w.float() for name, w in weights.items()}, facts, str(preprocessing["scale"])
    )


def _architecture(model: ModelConfig) -> dict[str, Any]:
    settings = asdict(model) | {"encoder": portable(model.encoder)}
    return {key: settings[key] for key in (SHARED if model.encoder else SHARED + AUTHORS)}
