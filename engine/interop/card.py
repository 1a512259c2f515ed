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
    plugged = file_of(described["model"].get("encoder", ""))
    if head and not plugged:
        plugged = file_of(head["definition"].get("head", ""))
    sources = sorted({name for split in state.get("splits", ()) for name in split["sources"]})
    measured = _measured(run, state["step"])
    card = CARD.format(
        title=title,
        lines="\n".join(f"- {line}" for line in lines),
        parameters=sum(w.numel() for w in weights.values()),
        rate=signals["fs_hz"],
        meaning=SCALES[signals["scale"]],
        leads=f"{len(leads)} leads ({describe_leads(leads).replace(',', ', ')})",
        sources=", ".join(sources) or "unknown sources",
        datasets=", ".join(fingerprint[:16] for fingerprint in state["datasets"]),
        noise=_noise(config) or "none",
        code=", code=True" if plugged else "",
        table=_table(measured),
        state=state,
        t=config.train,
        augment=config.augment,
    )
    if head and head.get("classes"):
        card += PREDICT
    facts: dict[str, Any] = {"datasets": sources}
    if measured:
        name = head["task"] if head else "pre-training"
        facts["model-index"] = [{"name": title, "results": [_result(name, sources, measured)]}]
    return front_matter(facts, card)


def _noise(config: RunConfig) -> str:
    kinds = [*config.augment.kinds]
    if config.augment.extra:
        kinds.append(portable(config.augment.extra))
    return ", ".join(kinds)


def _measured(run: Path, step: int) -> dict[str, float]:
    """The finite numbers of this step's validation."""
    for row in StepLog(run / VALIDATION).rows:
        if row["step"] == step:
            return {
                name: value
                for name, value in row.items()
                if isinstance(value, float) and math.isfinite(value)
            }
    return {}


def _table(measured: dict[str, float]) -> str:
    if not measured:
        return ""
    rows = ["| in validation | |", "|---|---|"]
    for name, value in measured.items():
        rows.append(f"| {METRIC_NAMES.get(name, name.replace('_', ' '))} | {value:.4f} |")
    return "\n".join(rows) + "\n\n"


def _result(task: str, sources: list[str], measured: dict[str, float]) -> dict[str, Any]:
    """Hugging Face's entry for the results of one evaluation."""
    return {
        "task": {"name": task, "type": "ecg"},
        "dataset": {"name": ", ".join(sources), "type": "ecg", "split": "validation"},
        "metrics": [{"type": name, "value": round(value, 4)} for name, value in measured.items()],
    }
