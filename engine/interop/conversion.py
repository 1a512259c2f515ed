"""Convert fairseq-signals checkpoints to model folders and back, exactly: see engine/convert.py.

notes = from_fairseq(Path("CKPT.pt"), Path("OUT"), classes="label_def.csv")
to_fairseq(Path("RUN"), Path("OUT.pt"))
"""

import ast
import csv
import io
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from omnilead.data_tools.dataset import CLASSES
from omnilead.engine.common import LEADS, ConfigError, describe_leads, leads_in_order, write_whole
from omnilead.engine.inference.trained_model import THRESHOLD
from omnilead.engine.interop.fairseq import (
    from_theirs,
    outputs,
    settings,
    spelling,
    their_settings,
    to_theirs,
)
from omnilead.engine.interop.safe_load import (
    ForeignCheckpointError,
    as_json,
    float_tensors,
    read_checkpoint,
)
from omnilead.engine.model.config import ModelConfig
from omnilead.engine.model.folder import (
    CONFIG,
    PREPROCESSING,
    WEIGHTS,
    config_of,
    document_of,
    front_matter,
    model_folder,
    write,
)
from omnilead.engine.model.input import SCALES, Input


def from_fairseq(
    checkpoint: Path, out: Path, scale: str = "auto", fs_hz: float | None = None, classes: str = ""
) -> list[str]:
    """`classes`: names of a classifier's outputs, or a file of them. Returns notes on what was
    assumed."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not an empty directory: choose another name")
    content = read_checkpoint(checkpoint)
    cfg, args = as_json(content.get("cfg")), as_json(content.get("args"))
    if not isinstance(cfg, dict) or not isinstance(
        cfg.get("model"), dict
    ):  # old checkpoints have flat settings
        cfg = {"model": args, "task": args}
    if not isinstance(cfg["model"], dict):
        raise ForeignCheckpointError(
            f"{checkpoint}: no model settings: is it a checkpoint of fairseq-signals?"
        )
    state = float_tensors(content.get("model"), checkpoint)
    config = settings(cfg["model"])
    weights = {
        name: w.clone() for name, w in from_theirs(state, config).items()
    }  # safetensors refuses tied tensors
    history = as_json(content.get("optimizer_history"))
    origin = {
        "cfg": cfg,
        "spelling": spelling(state),
        "order": list(state),
        "optimizer_history": history,
    }
    preprocessing, notes = _preprocessing(cfg, config, scale, fs_hz)
    document: dict[str, Any] = {"model": asdict(config), "fairseq": origin}
    if names := class_names(classes, outputs(state)):
        document["head"] = _head(cfg, names)
    if names and not classes:
        notes.append(
            f"its {len(names)} outputs were named {names[0]} to {names[-1]}: set names with "
            "--classes LIST|FILE"
        )
    card = front_matter(
        {},
        _card(
            checkpoint.name, config, preprocessing, names, sum(w.numel() for w in weights.values())
        ),
    )
    write(out, weights, document, preprocessing, card)
    return notes


def _preprocessing(
    cfg: Mapping[str, Any], config: ModelConfig, scale: str, fs_hz: float | None
) -> tuple[dict[str, Any], list[str]]:
    """The input described by the checkpoint's settings; arguments take precedence."""
    task, notes = cfg["task"] if isinstance(cfg.get("task"), dict) else {}, []
    stated = task.get("sample_rate") or _pretraining_task(cfg).get("sample_rate")
    if fs_hz is not None and stated and stated != fs_hz:
        notes.append(
            f"its settings state {stated} Hz, --fs {fs_hz:g} is used instead: leave it out if "
            "that was not intended"
        )
    elif fs_hz is None and not stated:
        notes.append(
            "its settings do not state a sampling rate: assumed 500 Hz (change with --fs; "
            "DeepECG-SSL: 250)"
        )
    fs_hz = fs_hz if fs_hz is not None else stated or 500
    named: Any = [*LEADS[: config.leads]] if config.leads == len(LEADS) else config.leads
    if scale == "auto" and (scale := _scale(cfg)) == "zscore":
        notes.append(
            "its paths name ECG-FM or MIMIC-IV-ECG: assumed the input zscore (change with --input "
            "millivolt)"
        )
    preprocessing = {
        "fs_hz": fs_hz,
        "leads": named,
        "segment_s": 5.0,
        "scale": scale,
        "meaning": SCALES[scale],
    }
    if loaded := task.get("leads_to_load"):
        try:
            wanted = ast.literal_eval(loaded[:1000]) if isinstance(loaded, str) else loaded
            rows = leads_in_order(
                [LEADS[lead] if isinstance(lead, int) else lead for lead in wanted]
            )
        except (
            SyntaxError,
            TypeError,
            LookupError,
            ValueError,
            RecursionError,
            MemoryError,
            ConfigError,
        ) as error:
            wrong = f"task.leads_to_load={str(loaded)[:80]!r} in the checkpoint's settings"
            raise ConfigError(f"{wrong}: must be a list of lead names or numbers") from error
        key = "leads" if len(rows) == config.leads else "seen"
        preprocessing[key] = describe_leads(rows).split(",")
    unnamed = isinstance(preprocessing["leads"], int)
    Input.of(
        preprocessing | ({"leads": [*LEADS]} if unnamed else {}),
        len(LEADS) if unnamed else config.leads,
    )
    if unnamed:
        notes.append(
            f"its settings do not name its {config.leads} leads: it can be converted back, but "
            "not loaded"
        )
    return preprocessing, notes


def _pretraining_task(cfg: Mapping[str, Any]) -> Mapping[str, Any]:
    """The task's settings in pre-training, which a fine-tuned checkpoint keeps among those of its
    model."""
    args = cfg["model"].get("args") or cfg["model"].get("w2v_args")
    task = args.get("task") if isinstance(args, dict) else None
    return task if isinstance(task, dict) else {}


def _scale(cfg: Mapping[str, Any]) -> str:
    """The scale of the input. ECG-FM was trained on z-scored files, which only their paths
    reveal."""
    sections = [section for section in (cfg["model"], cfg.get("task")) if isinstance(section, dict)]
    said = {key: value for section in sections for key, value in section.items()}
    for key, wanted in (
        ("filter", said.get("filter")),
        ("mean_path", said.get("normalize") and said.get("mean_path")),
    ):
        if wanted:
            lost = (
                "its signals were filtered by NeuroKit2"
                if key == "filter"
                else "its means are in another file"
            )
            said_so = f"task.{key}={str(wanted)[:80]} in the checkpoint's settings: {lost}"
            raise ConfigError(f"{said_so}: to convert it anyway, give --input millivolt or zscore")
    if said.get("normalize") is True:
        return "layernorm"
    paths = " ".join(str(section.get("data")) for section in sections).lower()
    known = any(
        name in paths for name in ("mimic_iv_ecg", "mimic-iv-ecg", "ecg_fm", "ecg-fm", "ecgfm")
    )
    return "zscore" if known else "millivolt"


def class_names(given: str, outputs: int) -> list[str]:
    """Names from A,B,C; or from a file: the column `name` of a CSV (such as ECG-FM's
    label_def.csv), or one name per line."""
    names = (
        [name.strip() for name in given.split(",")]
        if given
        else [f"class_{i}" for i in range(outputs)]
    )
    try:
        if os.path.isfile(given) or given.endswith((".csv", ".txt")):
            text = Path(given).read_text("utf-8-sig")
            table = list(csv.DictReader(io.StringIO(text)))
            names = (
                [row["name"] for row in table]
                if table and "name" in table[0]
                else text.splitlines()
            )
            names = [name.strip() for name in names if name and name.strip()]
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"--classes {given}: {error}: give a CSV with a column `name`, or one name per line"
        ) from None
    if given and not outputs:
        raise ConfigError(
            f"--classes {given[:80]}: the checkpoint is only pre-trained, without a classifier: "
            "leave it out"
        )
    if len(names) != outputs or len(set(names)) < len(names) or "" in names:
        raise ConfigError(
            f"--classes {given[:80]}: {len(set(names))} names: must be {outputs}, in the order of "
            "the outputs"
        )
    return names


def _head(cfg: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """`head` of config.json, inferred from the loss that the checkpoint was trained with."""
    criterion = cfg.get("criterion")
    criterion = criterion if isinstance(criterion, dict) else {"_name": criterion}
    loss, threshold = str(criterion.get("_name")), criterion.get("threshold")
    sigmoid = "binary" if len(names) == 1 else "multilabel"
    kind = "regression" if "mse" in loss else "multiclass" if loss == "cross_entropy" else sigmoid
    head: dict[str, Any] = {"task": "classification", "kind": kind, "classes": names}
    if kind == sigmoid:
        threshold = threshold if isinstance(threshold, float) and 0 < threshold < 1 else THRESHOLD
        head["thresholds"] = [threshold] * len(names)
    if kind == "regression":
        head |= {"center": [0.0] * len(names), "scale": [1.0] * len(names)}
    if set(names) == set(CLASSES):
        return head | {"task": "diagnosis"}
    what = "classes" if kind == "multiclass" else "columns"
    return head | {"definition": {"name": head["task"], "kind": kind, what: names}}


def to_fairseq(run: str | Path, out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out}: exists: choose another name")
    with model_folder(run) as (folder, _):
        document = document_of(folder / CONFIG)
        config, state = config_of(document, folder / CONFIG), load_file(folder / WEIGHTS)
    origin = (
        document.get("fairseq") or {}
    )  # saved by from_fairseq; models trained with omnilead have none
    if not any(name.startswith("local.") for name in state) and not (origin and outputs(state)):
        raise ConfigError(
            f"{run}: trained without the local objective, whose weights fairseq-signals needs: "
            "cannot convert it"
        )
    try:
        theirs = to_theirs(state, config, origin.get("spelling", "parametrizations"))
        weights = {name: theirs.pop(name) for name in origin.get("order") or list(theirs)}
        if theirs:
            raise LookupError(f"order lacks {next(iter(theirs))}")
        cfg, history = (
            origin.get("cfg") or their_settings(config),
            origin.get("optimizer_history") or [],
        )
    except (AttributeError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{folder / CONFIG}: section fairseq is damaged ({error!r}): restore or remove it"
        ) from error
    unused: dict[str, Any] = dict.fromkeys(("args", "criterion", "last_optimizer_state"))
    unused |= {"task_state": {}, "extra_state": {}}
    content = io.BytesIO()
    torch.save(unused | {"cfg": cfg, "model": weights, "optimizer_history": history}, content)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, content.getvalue())


def _card(
    name: str,
    config: ModelConfig,
    preprocessing: Mapping[str, Any],
    classes: list[str],
    parameters: int,
) -> str:
    predict = f'    model.predict(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")    # {len(classes)} classes\n'
    return f"""# {name}, converted from fairseq-signals

A lead-agnostic ECG encoder of the wav2vec 2.0 family (Oh et al., CHIL 2022): {parameters:,} parameters, {len(config.conv)}
convolutions, {config.layers} transformer layers of width {config.width}.

Input: {config.leads} leads at {preprocessing["fs_hz"]:g} Hz, 5 s at a time, {preprocessing["meaning"]}. See {PREPROCESSING};
{CONFIG} holds the settings, including the original ones. Every weight equals the original bit for bit; the optimiser's state is
not included. The licence is that of the original.

    import omnilead
    model = omnilead.load("THIS_FOLDER")
    vectors = model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")    # [L, T] -> [{config.width}]
{predict * bool(classes)}
    omnilead convert to-fairseq THIS_FOLDER OUT.pt      # convert back
"""
