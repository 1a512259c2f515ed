"""The model card of a run: README.md of RUN/model, as Hugging Face shows it."""

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from omnilead.engine.common import describe_leads
from omnilead.engine.config import RunConfig
from omnilead.engine.model.encoders import file_of, portable
from omnilead.engine.model.folder import front_matter
from omnilead.engine.model.input import DEFAULT_INPUT, SCALES
from omnilead.engine.report.run_files import StepLog
from omnilead.engine.training.files import VALIDATION
from omnilead.engine.training.task import METRIC_NAMES, TrainingTask

CARD = """# {title}

{parameters:,} parameters.

{lines}
- Input: {leads} at {rate:g} Hz, 5 s at a time, {meaning} (preprocessing.json).
- Trained for {state[step]:,} steps of {t.batch_crops} crops of 10 s, {t.precision}, AdamW, lr {t.lr} ({t.schedule}).
- Augmentation: lead masking {augment.rlm}, noise {noise}.
- Data: {sources} (fingerprints of the datasets: {datasets}).
- Steps skipped because loss or gradient was not finite: {state[skipped_steps]}.

{table}This is not a medical device: whatever is built on it must be validated for its use and its population. config.json
holds the settings; weights are float32 in safetensors. Usage:

    import omnilead
    model = omnilead.load("THIS_FOLDER"{code})    # or "hf://organisation/name"
    vector = model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")    # [L, T] -> [D]
"""
PREDICT = """    answers = model.predict(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")
"""


def model_card(
    run: Path,
    config: RunConfig,
    state: dict[str, Any],
    weights: dict[str, Tensor],
    task: type[TrainingTask],
) -> str:
    title, lines = task.card(config, state)
    leads = config.augment.output_leads
    described = task.described(config, state)
    head, signals = described.get("head"), state.get("input", DEFAULT_INPUT)
    needed = file_of(described["model"].get("encoder", "")) or (
        head and file_of(head["definition"].get("head", ""))
    )
    sources = sorted({name for split in state.get("splits", ()) for name in split["sources"]})
    validated = next(
        (row for row in StepLog(run / VALIDATION).rows if row["step"] == state["step"]), {}
    )
    measured = {
        name: value
        for name, value in validated.items()
        if isinstance(value, float) and math.isfinite(value)
    }
    rows = "".join(
        f"| {METRIC_NAMES.get(name, name.replace('_', ' '))} | {value:.4f} |\n"
        for name, value in measured.items()
    )
    card = CARD.format(
        title=title,
        lines="\n".join(f"- {line}" for line in lines),
        parameters=sum(w.numel() for w in weights.values()),
        rate=signals["fs_hz"],
        meaning=SCALES[signals["scale"]],
        leads=f"{len(leads)} leads ({describe_leads(leads).replace(',', ', ')})",
        sources=", ".join(sources) or "unknown sources",
        datasets=", ".join(fingerprint[:16] for fingerprint in state["datasets"]),
        noise=", ".join([*config.augment.kinds, *filter(None, [portable(config.augment.extra)])])
        or "none",
        code=", code=True" * bool(needed),
        table=f"| in validation | |\n|---|---|\n{rows}\n" if rows else "",
        state=state,
        t=config.train,
        augment=config.augment,
    )
    facts: dict[str, Any] = {"datasets": sources}
    if measured:
        metrics = [{"type": name, "value": round(value, 4)} for name, value in measured.items()]
        about = {"name": head["task"] if head else "pre-training", "type": "ecg"}
        result = {
            "task": about,
            "dataset": {"name": ", ".join(sources), "type": "ecg", "split": "validation"},
            "metrics": metrics,
        }
        facts["model-index"] = [{"name": title, "results": [result]}]
    return front_matter(facts) + card + (PREDICT if head and head.get("classes") else "")
