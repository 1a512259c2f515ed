"""RUN/model/: the weights for others to use, in safetensors, with what a signal must be like and a model card.

python engine/pretrain.py --export RUN    # from the newest checkpoint; the end of a run does it too
"""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from engine.common import describe_leads
from engine.config import Settings
from engine.data.preprocess import SCALES
from engine.model import folder
from engine.training import checkpoint
from engine.training.task import Task


def export(run: Path, path: Path, config: Settings, task: Task | type[Task]) -> Path:
    """model/ of a checkpoint: all of it or nothing."""
    state = checkpoint.read_state(path)
    weights = {name: w for name, w in checkpoint.full_weights(path).items() if task.exports(config, name)}
    leads, seen = (describe_leads(which).split(",") for which in (config.augment.output_leads, config.augment.seen))
    signal = {"fs_hz": 500, "leads": leads, "segment_s": 5.0, "scale": "millivolt", "meaning": SCALES["millivolt"]}
    signal |= {"seen": seen} if seen != leads else {}
    trained = {name: state[name] for name in ("step", "crops_seen", "datasets", "preprocessing_sha256")}
    trained["precision"] = config.train.precision
    trained["splits"] = [*state.get("splits", ()), *state.get("splits_before", ())]
    about = card(config, state, task, sum(w.numel() for w in weights.values()), leads)
    document, signal["sha256"] = task.described(config, state) | {"trained": trained}, state["preprocessing_sha256"]
    out = run / "model"
    try:
        folder.write(out, weights, document, signal, about)
    except SafetensorError as error:
        raise checkpoint.WriteError(f"{out}: {error}: make room, then --export {run}") from error
    return out


def card(config: Settings, state: dict[str, Any], task: Task | type[Task], parameters: int, leads: list[str]) -> str:
    title, lines = task.card(config, state)
    t, noise = config.train, ", ".join(config.augment.kinds) or "none"
    told = "\n".join(f"- {line}" for line in lines)
    return f"""# {title}

{parameters:,} parameters. Method: Oh et al., CHIL 2022 (wav2vec 2.0, CMSC, random lead masking).

{told}
- Input: {len(leads)} leads ({", ".join(leads)}) at 500 Hz, 5 s at a time, in millivolts, not normalised: preprocessing.json.
- Trained for {state["step"]:,} steps of {t.batch_crops} crops of 10 s, {t.precision}, AdamW, lr {t.lr} ({t.schedule}).
- Augmentation: lead masking {config.augment.rlm}, noise {noise}.
- Data: {", ".join(state["datasets"])} (fingerprints).
- Left out in training steps as not finite: {state["skipped_steps"]}.

It is no medical device: whatever is built on it must be validated for its use and its population. config.json holds the
settings; weights are float32 in safetensors. In use:

    import engine
    model = engine.load("THIS_FOLDER")
    vector = model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")    # [L, T] -> [D]
"""
