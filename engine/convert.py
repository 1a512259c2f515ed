"""Convert weights from and to fairseq-signals (and ECG-FM, which is of the same family), exactly, and to ONNX.

    python -m engine.convert from-fairseq CKPT.pt OUT [--input auto|millivolt|zscore]
    python -m engine.convert to-fairseq   RUN OUT.pt
    python -m engine.convert to-onnx      RUN OUT.onnx                      for use without PyTorch

OUT/ gets model.safetensors, config.json, preprocessing.json and README.md, a model card. Every number keeps its bits and its
type; the optimiser's state is left out. Weights that are missing, unexpected or of another shape are an error that lists them.
A checkpoint is read without running code that may be pickled in it.

--input: what the weights were trained on. The paper's are signals in millivolts; ECG-FM's were scaled to mean 0 and deviation
1 in each lead of each record (fairseq-signals scripts/preprocess/ecg). auto follows the checkpoint's settings: zscore where
they say normalize, or name ECG-FM or MIMIC-IV-ECG among their paths, else millivolt.
"""

import argparse
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.common import LEADS, ConfigError, Parser, write_whole
from engine.data.preprocess import SCALES
from engine.model.config import ModelConfig
from engine.model.fairseq import from_theirs, settings, spelling, their_settings, to_theirs
from engine.model.folder import CONFIG, PREPROCESSING, WEIGHTS, document_of, model_folder, write
from engine.model.inference import config_of, load
from engine.model.onnx import to_onnx
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
    card = _card(checkpoint.name, config, scale, sum(w.numel() for w in weights.values()))
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

    python -m engine.convert to-fairseq THIS_FOLDER OUT.pt      # back again
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m engine.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="from-fairseq|to-fairseq|to-onnx")
    for command, source, out, text in (
        ("from-fairseq", "CKPT.pt", "OUT", "a checkpoint of fairseq-signals or ECG-FM to a model folder"),
        ("to-fairseq", "RUN", "OUT.pt", "a model folder to a checkpoint of fairseq-signals"),
        ("to-onnx", "RUN", "OUT.onnx", "a model folder to ONNX, checked with onnxruntime"),
    ):
        sub = commands.add_parser(command, help=text)
        sub.add_argument("source", type=Path, metavar=source)
        sub.add_argument("out", type=Path, metavar=out)
        if command == "from-fairseq":
            sub.add_argument("--input", choices=("auto", *SCALES), default="auto", help="scale of the signals in training")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        if args.command == "from-fairseq":
            from_fairseq(args.source, args.out, args.input)
        elif args.command == "to-fairseq":
            to_fairseq(args.source, args.out)
        else:
            worst = to_onnx(load(args.source), args.out)
            print(f"onnxruntime and PyTorch differ by {worst:.1g} at most")
    except (ConfigError, OSError, SafetensorError) as error:
        print(f"engine.convert: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
