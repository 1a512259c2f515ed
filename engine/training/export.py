"""RUN/model/: the weights for others to use, in safetensors, with what a signal must be like and a model card.

python engine/pretrain.py --export RUN    # from the newest checkpoint; the end of a run does it too
"""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from engine.config import Config
from engine.model.trained import CARD, CONFIG, FORMAT, PREPROCESSING, WEIGHTS
from engine.pipelines.leads import describe
from engine.pipelines.signals import SCALES
from engine.training import checkpoint


def export(run: Path, path: Path, config: Config) -> Path:
    """model/ of a checkpoint: all of it or nothing."""
    state = checkpoint.read_state(path)
    weights = checkpoint.full_weights(path)
    temporary, out, old = run / f".model.{os.getpid()}", run / "model", run / f".model.old.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
        for name, content in documents(config, state, sum(w.numel() for w in weights.values())).items():
            (temporary / name).write_text(content)
        if out.exists():
            os.replace(out, old)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return out


def documents(config: Config, state: dict[str, Any], parameters: int) -> dict[str, str]:
    leads, seen = (describe(some).split(",") for some in (config.augment.output_leads, config.augment.seen))
    signal = {"fs_hz": 500, "leads": leads, "segment_s": 5.0, "scale": "millivolt", "meaning": SCALES["millivolt"]}
    if seen != leads:
        signal["seen"] = seen
    trained = {name: state[name] for name in ("step", "crops_seen", "datasets", "preprocessing_sha256")}
    model = {"format_version": FORMAT, "model": asdict(config.model), "objective": asdict(config.objective), "trained": trained}
    return {
        CONFIG: _json(model),
        PREPROCESSING: _json(signal | {"sha256": state["preprocessing_sha256"]}),
        CARD: card(config, state, parameters, leads),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def card(config: Config, state: dict[str, Any], parameters: int, leads: list[str]) -> str:
    m, o, t, best = config.model, config.objective, config.train, state.get("best")
    terms = [f"{getattr(o, name)} x {name}" for name in ("local", "diversity", "features", "contrast") if getattr(o, name)]
    measured = f"Best validation loss {best['loss']:.4f} at step {best['step']}." if best else "No validation was asked for."
    noise = ", ".join(config.augment.kinds) or "none"
    return f"""# Lead-agnostic ECG encoder, pre-trained with omnilead

{parameters:,} parameters: {len(m.conv)} convolutions, {m.layers} transformer layers of width {m.width}. Method: Oh et al.,
CHIL 2022 (wav2vec 2.0, CMSC, random lead masking).

- Input: {len(leads)} leads ({", ".join(leads)}) at 500 Hz, 5 s at a time, in millivolts, not normalised: preprocessing.json.
- Trained for {state["step"]:,} steps of {t.batch_crops} crops of 10 s, {t.precision}, AdamW, lr {t.lr} ({t.schedule}).
- Loss: {", ".join(terms)}; global objective {o.method if o.contrast else "none"}.
- Augmentation: lead masking {config.augment.rlm}, noise {noise}.
- Data: {", ".join(state["datasets"])} (fingerprints). {measured}
- Left out in training steps as not finite: {state["skipped_steps"]}.

It finds representations; it makes no diagnosis. Whatever is built on it must be validated for its use and its population.
config.json holds the settings; weights are float32, under the names of engine.model.pretrainer.Pretrainer. In use:

    import engine
    model = engine.load("THIS_FOLDER")
    vectors = model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")    # [L, T] -> [{m.width}]
"""
