"""Model folders from and to checkpoints of fairseq-signals, exactly: see engine/convert.py.

from_fairseq(Path("CKPT.pt"), Path("OUT"))
to_fairseq(Path("RUN"), Path("OUT.pt"))
"""

import io
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from engine.common import LEADS, ConfigError, write_whole
from engine.data.preprocess import SCALES
from engine.model.config import ModelConfig
from engine.model.fairseq import from_theirs, settings, spelling, their_settings, to_theirs
from engine.model.folder import CONFIG, PREPROCESSING, WEIGHTS, document_of, front_matter, model_folder, write
from engine.model.inference import config_of
from engine.model.safe_load import ForeignCheckpointError, as_json, float_tensors, read_checkpoint


def from_fairseq(checkpoint: Path, out: Path, scale: str = "auto") -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not an empty directory: choose another name")
    content = read_checkpoint(checkpoint)
    cfg, args = as_json(content.get("cfg")), as_json(content.get("args"))
    if not isinstance(cfg, dict) or not isinstance(cfg.get("model"), dict):  # old checkpoints have one flat list of settings
        cfg = {"model": args, "task": args}
    if not isinstance(cfg["model"], dict):
        raise ForeignCheckpointError(f"{checkpoint}: no settings of a model: is it a checkpoint of fairseq-signals?")
    state = float_tensors(content.get("model"), checkpoint)
    config = settings(cfg["model"])
    weights = {name: w.clone() for name, w in from_theirs(state, config).items()}  # tied ones, once each
    scale = _scale(cfg) if scale == "auto" else scale
    history = as_json(content.get("optimizer_history"))
    origin = {"cfg": cfg, "spelling": spelling(state), "order": list(state), "optimizer_history": history}
    leads = list(LEADS) if config.leads == len(LEADS) else config.leads
    preprocessing = {"fs_hz": 500, "leads": leads, "segment_s": 5.0, "scale": scale, "meaning": SCALES[scale]}
    card = front_matter({}, _card(checkpoint.name, config, scale, sum(w.numel() for w in weights.values())))
    write(out, weights, {"model": asdict(config), "fairseq": origin}, preprocessing, card)


def _scale(cfg: Mapping[str, Any]) -> str:
    sections = [section for section in (cfg.get("task"), cfg.get("model")) if isinstance(section, dict)]
    paths = " ".join(str(section.get("data")) for section in sections).lower()
    known = any(name in paths for name in ("mimic_iv_ecg", "mimic-iv-ecg", "ecg_fm", "ecg-fm", "ecgfm"))
    return "zscore" if known or any(section.get("normalize") is True for section in sections) else "millivolt"


def to_fairseq(run: Path, out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out}: exists: choose another name")
    with model_folder(run) as (folder, _):
        document = document_of(folder / CONFIG)
        config, state = config_of(document, folder / CONFIG), load_file(folder / WEIGHTS)
    if not any(name.startswith("local.") for name in state):
        raise ConfigError(f"{run}: trained without the local objective, whose weights fairseq-signals needs: not converted")
    origin = document.get("fairseq") or {}  # what from_fairseq kept; nothing in a model that was trained here
    try:
        theirs = to_theirs(state, config, origin.get("spelling", "parametrizations"))
        weights = {name: theirs.pop(name) for name in origin.get("order") or list(theirs)}
        if theirs:
            raise LookupError(f"order lacks {next(iter(theirs))}")
        cfg, history = origin.get("cfg") or their_settings(config), origin.get("optimizer_history") or []
    except (AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"{folder / CONFIG}: section fairseq is damaged ({error!r}): restore or remove it") from error
    unused: dict[str, Any] = dict.fromkeys(("args", "criterion", "last_optimizer_state"))
    unused |= {"task_state": {}, "extra_state": {}}
    content = io.BytesIO()
    torch.save(unused | {"cfg": cfg, "model": weights, "optimizer_history": history}, content)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, content.getvalue())


def _card(name: str, config: ModelConfig, scale: str, parameters: int) -> str:
    return f"""# {name}, converted from fairseq-signals

A lead-agnostic ECG encoder of the wav2vec 2.0 family (Oh et al., CHIL 2022): {parameters:,} parameters, {len(config.conv)}
convolutions, {config.layers} transformer layers of width {config.width}, {config.codebooks} codebooks of {config.codes} codes.

Input: {config.leads} leads at 500 Hz, 5 s at a time, {SCALES[scale]}. See {PREPROCESSING}; {CONFIG}
holds the settings, the original ones included. Every weight is bit for bit that of the original; the optimiser's state is not
here. The licence is that of the original.

    import engine
    model = engine.load("THIS_FOLDER")
    vectors = model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")    # [L, T] -> [{config.width}]

    omnilead convert to-fairseq THIS_FOLDER OUT.pt      # back again
"""
