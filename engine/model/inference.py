"""A trained model in use: RUN/model/ -> an encoder, its head if it has one, and what a signal must be like.

    model = engine.load("RUN")                                      # or RUN/model, a copy of that folder, s3://bucket/model
    model.embed(signal, fs_hz=250, leads=["II", "V1"], unit="mV")   # [L, T] -> [D], [B, L, T] -> [B, D]
    model(x_RLT), model.logits(x_RLT)                               # of segments that are prepared already (model.input)

Files that are not the ones config.json names by sha256 are refused (engine.model.folder), and so are weights that are missing,
too many or of another shape. Only what stands beside the encoder in pre-training (quantiser, projections) is passed over.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.common import ConfigError
from engine.data.preprocess import Input, SignalError, crops
from engine.model.config import ModelConfig, current_settings, validated
from engine.model.encoder import Encoder, pool
from engine.model.folder import CONFIG, FORMAT, PREPROCESSING, WEIGHTS, LoadError, document_of, model_folder

TASKS = ("diagnosis", "identification")
ROWS = 64  # segments encoded at a time
SHOWN = 4  # names in a message
NOT_FINITE = "the model gives embeddings that are not finite: its weights are broken"


class TrainedModel(nn.Module):
    """In eval mode. R segments of 5 s, L leads, T samples; D is `encoder.width`. `digest` is that of its files."""

    def __init__(
        self, encoder: Encoder, head: nn.Linear | None, config: dict[str, Any], preprocessing: dict[str, Any], digest: str = ""
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.config, self.preprocessing, self.digest = encoder, head, config, preprocessing, digest
        self.input = Input.of(preprocessing, config_of(config).leads)
        self.eval()

    @property
    def device(self) -> torch.device:
        return next(self.encoder.parameters()).device

    @property
    def classes(self) -> tuple[str, ...]:
        """What the logits stand for."""
        return tuple((self.config.get("head") or {}).get("classes", ()))

    @property
    def history(self) -> dict[str, Any]:
        """What config.json says of its training."""
        told = self.config.get("trained")
        return told if isinstance(told, dict) else {}

    def pooled(self, x_RLT: Tensor) -> Tensor:
        """c_RD, float32: the mean over tokens."""
        return pool(self.encoder(x_RLT))

    def forward(self, x_RLT: Tensor) -> Tensor:
        return self.pooled(x_RLT)

    def logits(self, x_RLT: Tensor) -> Tensor:
        if self.head is None:
            raise ConfigError("this model has no head: only one that was fine-tuned for diagnosis gives logits")
        y: Tensor = self.head(self.pooled(x_RLT).to(self.head.weight.dtype))
        return y.float()

    def segments(self, signal: Any, fs_hz: float, leads: str | Iterable[str], unit: str = "mV") -> Tensor:
        """x_RLT of one ECG [L, T]: what the model sees of it."""
        found = crops(signal, fs_hz, leads, unit, self.input)
        return self.input.halves(torch.from_numpy(found.uv_BLT), np.array(found.halves)).to(self.device)

    @torch.inference_mode()
    def embed(self, signal: Any, fs_hz: float, leads: str | Iterable[str], unit: str = "mV", unit_norm: bool = False) -> Tensor:
        """[D] of an ECG [L, T], [B, D] of several [B, L, T], as numpy or torch: the mean over its segments of 5 s.

        leads: the names of the rows, in any order; those not given are zeros, as random lead masking has taught the model.
        NaN, in int16 -32768: not measured. unit_norm: divided by its length, for cosines. What is refused: see
        engine.data.preprocess.
        """
        leads = leads if isinstance(leads, str) else tuple(leads)
        several = getattr(signal, "ndim", None) == 3
        parts = []
        for i, record in enumerate(signal if several else (signal,)):
            try:
                parts.append(self.segments(record, fs_hz, leads, unit))
            except SignalError as error:
                raise SignalError(f"signal[{i}]: {error}" if several else str(error)) from None
        if not parts:
            return torch.zeros(0, self.encoder.width, device=self.device)
        c_RD = torch.cat([self.pooled(x_RLT) for x_RLT in torch.cat(parts).split(ROWS)])
        c_BD = torch.stack([part.mean(0) for part in c_RD.split([len(part) for part in parts])])
        if not c_BD.isfinite().all():
            raise ConfigError(NOT_FINITE)
        c_BD = F.normalize(c_BD, dim=-1) if unit_norm else c_BD
        return c_BD if several else c_BD[0]


def load(path: str | os.PathLike[str]) -> TrainedModel:
    with model_folder(path) as (folder, digest):
        document, preprocessing = document_of(folder / CONFIG), document_of(folder / PREPROCESSING)
        config = config_of(document, folder / CONFIG)
        encoder, head = _load_weights(folder / WEIGHTS, config, _classes(document, folder / CONFIG))
        try:
            return TrainedModel(encoder, head, document, preprocessing, digest)
        except ConfigError as error:
            raise LoadError(f"{folder / PREPROCESSING}: {error}") from None


def config_of(document: Mapping[str, Any], path: Path | str = CONFIG) -> ModelConfig:
    """The architecture that config.json describes."""
    version, model = document.get("format_version"), document.get("model")
    if version != FORMAT:
        raise LoadError(f"{path}: format_version={version!r}: this program reads {FORMAT}")
    if not isinstance(model, dict):
        raise LoadError(f"{path}: no settings of a model in it: is it a config.json of omnilead?")
    try:
        return validated(ModelConfig, current_settings(model), "model")
    except ConfigError as error:
        raise LoadError(f"{path}: {error}") from None


def _classes(document: Mapping[str, Any], path: Path) -> int:
    """Outputs of the head; 0 if there is none."""
    head = document.get("head")
    if head is None:
        return 0
    task, classes = (head.get("task"), head.get("classes")) if isinstance(head, dict) else (None, None)
    named = isinstance(classes, list) and len(classes) > 0
    if task not in TASKS or named != (task == "diagnosis"):
        raise LoadError(f"{path}: head={str(head)[:60]}: use a task of {' or '.join(TASKS)}, for diagnosis with its classes")
    return len(classes or ())


def _load_weights(path: Path, config: ModelConfig, classes: int) -> tuple[Encoder, nn.Linear | None]:
    """Built without memory, then given the file's: nothing is ever there that was not trained."""
    try:
        with safe_open(path, framework="pt") as file:
            seen = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            with torch.device("meta"):
                encoder = Encoder(config, mask="encoder.mask_embedding" in seen)
                head = nn.Linear(config.width, classes) if classes else None
            parts = {"encoder": encoder} | ({"head": head} if head else {})
            wanted = {f"{part}.{n}": tuple(w.shape) for part, module in parts.items() for n, w in module.state_dict().items()}
            _compare(path, seen, wanted)
            weights = {name: file.get_tensor(name).float() for name in wanted}
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path}: cannot be read as safetensors: {error}: copy it anew".splitlines()[0]) from None
    for part, module in parts.items():
        mine = {name.removeprefix(f"{part}."): w for name, w in weights.items() if name.startswith(f"{part}.")}
        module.load_state_dict(mine, assign=True)
    return encoder, head


def _compare(path: Path, seen: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Names and shapes. Whatever is neither encoder nor head belongs to pre-training."""
    mine = [name for name in seen if name.startswith(("encoder.", "head."))]
    kinds = {
        "missing": [name for name in wanted if name not in seen],
        "unexpected": [name for name in mine if name not in wanted],
        "of another shape": [
            f"{n} is {list(seen[n])}, not {list(wanted[n])}" for n in wanted if n in seen and seen[n] != wanted[n]
        ],
    }
    told = [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds.items() if names]
    if told:
        raise LoadError(f"{path}: the weights are not those of {CONFIG}: {'; '.join(told)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
