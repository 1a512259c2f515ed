"""Weights of fairseq-signals, and of ECG-FM, which is of the same family, to ours and back, exactly.

    python -m engine.convert from-fairseq CKPT.pt OUT [--input auto|millivolt|zscore]
    python -m engine.convert to-fairseq   RUN OUT.pt
    python -m engine.convert to-onnx      RUN OUT.onnx                      for use without PyTorch (engine.model.onnx)

OUT/ gets model.safetensors, config.json, preprocessing.json and README.md, a model card. Every number keeps its bits and its
type; the optimiser's state stays behind. Weights that are missing, unexpected or of another shape are an error that lists
them. A stranger's file is read without running any code in it (engine.model.safe_load).

--input: what the weights were trained on. The paper's are signals in millivolts; ECG-FM's were scaled to mean 0 and deviation
1 in each lead of each record (fairseq-signals scripts/preprocess/ecg). auto takes the checkpoint's settings at their word:
zscore where they say normalize, or name ECG-FM or MIMIC-IV-ECG among their paths, else millivolt.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import safetensors
import torch
from safetensors.torch import load_file

from engine.common import LEADS, ConfigError, Parser
from engine.data.preprocess import SCALES
from engine.model.config import ModelConfig
from engine.model.fairseq import WeightsError, ours, settings, spelling, their_settings, theirs
from engine.model.folder import CONFIG, PREPROCESSING, WEIGHTS, document_of, model_folder, write
from engine.model.inference import config_of, load
from engine.model.onnx import to_onnx
from engine.model.safe_load import CheckpointError, read_checkpoint, tensors


def from_fairseq(checkpoint: Path, out: Path, scale: str = "auto") -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not an empty directory: choose another name")
    content = read_checkpoint(checkpoint)
    cfg = json.loads(_json(_settings_of(content, checkpoint)))  # as it will be kept: numbers and texts, no tensors
    if not isinstance(content.get("model"), dict):
        raise CheckpointError(f"{checkpoint}: has no weights under `model`: is it a checkpoint of fairseq-signals?")
    state = dict(tensors(content["model"], checkpoint.stat().st_size))
    config = settings(cfg["model"])
    converted = ours(state, config)
    scale = _scale(cfg) if scale == "auto" else scale
    history = content.get("optimizer_history")
    origin = {"cfg": cfg, "spelling": spelling(state), "order": list(state), "optimizer_history": history}
    weights = {name: w.clone() for name, w in converted.items()}  # tied ones, once each
    card = _card(checkpoint.name, config, scale, sum(w.numel() for w in weights.values()))
    write(out, weights, json.loads(_json({"model": asdict(config), "fairseq": origin})), preprocessing(config, scale), card)


def preprocessing(config: ModelConfig, scale: str) -> dict[str, Any]:
    """What a signal must be like before the model sees it."""
    leads = list(LEADS) if config.leads == len(LEADS) else config.leads
    return {"fs_hz": 500, "leads": leads, "segment_s": 5.0, "scale": scale, "meaning": SCALES[scale]}


def _settings_of(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The configuration: a tree under `cfg`, or in old checkpoints one flat list under `args`."""
    cfg, args = content.get("cfg"), content.get("args")
    if isinstance(cfg, dict) and isinstance(cfg.get("model"), dict):
        return cfg
    if isinstance(args, dict) and "encoder_layers" in args:
        return {"model": args, "task": args}
    raise CheckpointError(f"{path}: has no settings of a model under cfg.model or args: is it a checkpoint of fairseq-signals?")


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
        try:
            state = load_file(folder / WEIGHTS)
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise ConfigError(f"{folder}: no model of ours: {type(error).__name__}: {error}".splitlines()[0]) from error
        config = config_of(document, folder / CONFIG)
    if not any(name.startswith("local.") for name in state):
        raise ConfigError(f"{run}: was trained without the local objective, whose heads their wav2vec 2.0 needs: it stays here")
    origin = _origin(document, folder / CONFIG)
    back = theirs(state, config, origin.get("spelling", "parametrizations"))
    order = origin.get("order") or list(back)
    if sorted(map(str, order)) != sorted(back):
        raise ConfigError(f"{folder / CONFIG}: fairseq.order does not list every weight once: restore it or leave it out")
    content = {
        "args": None,
        "cfg": origin.get("cfg") or their_settings(config),
        "model": {name: back[name] for name in order},
        "criterion": None,
        "optimizer_history": origin.get("optimizer_history") or [],
        "task_state": {},
        "extra_state": {},
        "last_optimizer_state": None,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            torch.save(content, stream)
        temporary.replace(out)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"{out}: cannot be written: {str(error).splitlines()[0]}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _origin(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What from_fairseq kept of the checkpoint; nothing in a model of ours."""
    origin = document.get("fairseq") or {}
    if not isinstance(origin, dict):
        raise ConfigError(f"{path}: fairseq={str(origin)[:100]}: must be an object: restore it or leave it out")
    kinds = {"cfg": dict, "order": list, "optimizer_history": list}
    wrong = [key for key, kind in kinds.items() if not isinstance(origin.get(key) or kind(), kind)]
    wrong += ["spelling"] * (origin.get("spelling", "weight_g") not in ("parametrizations", "weight_g"))
    for key in wrong:
        raise ConfigError(f"{path}: fairseq.{key}={str(origin[key])[:100]}: not as it was written: restore it or leave it out")
    return origin


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=lambda _: "<tensor>") + "\n"  # all that stranger.plain leaves


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

    python -m engine.convert to-fairseq THIS_FOLDER OUT.pt      # back again
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m engine.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="from-fairseq|to-fairseq|to-onnx")
    into = commands.add_parser("from-fairseq", help="a checkpoint of fairseq-signals or ECG-FM to a model of ours")
    into.add_argument("checkpoint", type=Path, metavar="CKPT.pt")
    into.add_argument("out", type=Path, metavar="OUT")
    into.add_argument("--input", choices=("auto", *SCALES), default="auto", help="scale of the signals it was trained on")
    back = commands.add_parser("to-fairseq", help="a model of ours to a checkpoint of fairseq-signals")
    back.add_argument("run", type=Path, metavar="RUN")
    back.add_argument("out", type=Path, metavar="OUT.pt")
    onnx = commands.add_parser("to-onnx", help="a model of ours to ONNX, checked with onnxruntime")
    onnx.add_argument("run", type=Path, metavar="RUN")
    onnx.add_argument("out", type=Path, metavar="OUT.onnx")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        if args.command == "from-fairseq":
            from_fairseq(args.checkpoint, args.out, args.input)
        elif args.command == "to-fairseq":
            to_fairseq(args.run, args.out)
        else:
            worst = to_onnx(load(args.run), args.out)
            print(f"onnxruntime and PyTorch differ by {worst:.1g} at most")
    except (CheckpointError, ConfigError, WeightsError, OSError) as error:
        print(f"engine.convert: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
