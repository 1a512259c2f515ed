"""Pre-training that goes on from the weights of another model: `start`, a run, a model folder or one that was converted.

    started = read_weights(config)            # ConfigError if its architecture is another
    print(started.into(model))                # what was taken, and what begins anew

Only weights are taken: the optimiser, the learning rate and the order of the data begin anew, so this is a run of its own. The
heads of the local objective are taken if all of them fit, and no code that the folder may hold is run.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.common import ConfigError, describe_leads
from engine.config import Config
from engine.data.preprocess import Input
from engine.model.config import ModelConfig
from engine.model.encoders import portable
from engine.model.folder import CONFIG, PREPROCESSING, WEIGHTS, document_of, misfits, model_folder
from engine.model.inference import config_of

SHARED = ("encoder", "options", "leads")  # settings on which the weights of every encoder depend
AUTHORS = ("conv", "conv_norm", "width", "layers", "heads", "ffn", "position_kernel", "position_groups")
HEADS = "local."
MASK = "encoder.mask_embedding"  # the local objective alone needs it


@dataclass(frozen=True)
class StartingWeights:
    start: str
    weights: dict[str, Tensor]
    facts: dict[str, Any]  # for checkpoints and config.json
    scale: str  # of the signals that they were trained on

    @torch.no_grad()
    def into(self, model: nn.Module) -> str:
        own = model.state_dict()
        encoder = {name: w for name, w in self.weights.items() if name.startswith("encoder.") and (name != MASK or name in own)}
        expected = {name: tuple(w.shape) for name, w in own.items() if name.startswith("encoder.")}
        anew = [] if MASK not in expected or MASK in encoder else ["the mask embedding"]
        shapes = {name: tuple(w.shape) for name, w in encoder.items()} | ({MASK: expected[MASK]} if anew else {})
        if wrong := misfits(shapes, expected):
            raise ConfigError(f"start={self.start}: its weights are not those of this encoder: {wrong}")
        heads = {name: w.shape for name, w in own.items() if name.startswith(HEADS)}
        theirs = {name: w for name, w in self.weights.items() if name.startswith(HEADS)}
        fit = heads == {name: w.shape for name, w in theirs.items()}
        model.load_state_dict(own | encoder | (theirs if fit else {}))
        taken = ["the encoder"] + ["the heads of the local objective"] * bool(heads and fit)
        anew += ["the heads of the local objective"] * bool(heads and not fit) + ["the optimiser"]
        scale = "" if self.scale == "millivolt" else f"; it was trained on signals in {self.scale}, and goes on with millivolts"
        return f"start={self.start}: took {' and '.join(taken)}; begins anew: {', '.join(anew)}{scale}"


def read_weights(config: Config) -> StartingWeights:
    start = config.start
    with model_folder(start) as (folder, digest):
        document, preprocessing = document_of(folder / CONFIG), document_of(folder / PREPROCESSING)
        theirs, weights = config_of(document, folder / CONFIG), load_file(folder / WEIGHTS)
    before, now = _architecture(theirs), _architecture(config.model)
    differ = [
        f"model.{key} is {before[key]!r} there, {now[key]!r} here" for key in before if before[key] != now.get(key, before[key])
    ]
    if differ:
        same = f"use --config {start}/config.yaml" if Path(start, "config.yaml").is_file() else "set the same"
        raise ConfigError(f"start={start}: another architecture: {'; '.join(differ)}: {same}")
    had, leads = Input.of(preprocessing, theirs.leads).leads, config.augment.output_leads
    if tuple(had) != tuple(leads):
        raise ConfigError(f"start={start}: was trained on leads {describe_leads(had)}: augment.leads={config.augment.leads!r}")
    trained = document.get("trained")
    trained = trained if isinstance(trained, dict) else {}
    splits = trained.get("splits")
    continued = {"start": start, "step": trained.get("step"), "datasets": trained.get("datasets"), "digest": digest[:16]}
    facts: dict[str, Any] = {"continued": continued} | (
        {"splits_before": splits} if isinstance(splits, list) and splits else {}
    )
    return StartingWeights(start, {name: w.float() for name, w in weights.items()}, facts, str(preprocessing.get("scale")))


def _architecture(model: ModelConfig) -> dict[str, Any]:
    keys = SHARED if model.encoder else SHARED + AUTHORS
    settings = asdict(model) | {"encoder": portable(model.encoder)}
    return {key: settings[key] for key in keys}
