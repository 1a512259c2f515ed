"""A trained model over the crops that it was not trained on -> what it said and what was so.

    diagnoses(model, dataset, Setting(role="test", leads="I,II,V2")).document()["score"]
    identities(model, dataset, Setting()).document()["score"]

A sample of diagnosis is a half of 5 s (paper, section "Datasets"). For identification, the first 5 s of each patient's gallery
crop and probe crop are compared; with role `valid`, the two halves of each crop that was held out of fine-tuning.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data_tools.dataset import CLASSES, Dataset
from engine.common import ConfigError, describe_leads
from engine.data.augmenter import HALF
from engine.data.leakage import other_splits
from engine.data.missing_leads import unseen
from engine.data.preprocess import Input
from engine.evaluation.metrics import Array, probabilities
from engine.evaluation.results import Diagnoses, Identities
from engine.model.inference import Trained
from engine.training.validation import Patients


@dataclass(frozen=True)
class Setting:
    role: str = "test"
    leads: str = ""  # as engine.common.parse_leads reads them; none: all that the model looks at
    batch: int = 64  # halves encoded at a time
    name: str = "model"
    quiet: bool = True


def task_of(model: Trained) -> str:
    head = model.config.get("head") or {}
    return str(head.get("task", "identification"))


def diagnoses(model: Trained, dataset: Dataset, setting: Setting) -> Diagnoses:
    columns = _columns(model)
    wanted, notes = _input(model, dataset, setting)
    rows = dataset.select(dx=setting.role)
    if not len(rows):
        raise ConfigError(_empty(dataset, f"dx={setting.role}", "cpsc_2018 or georgia: shard --dx-sources names others"))
    labels = dataset.labels[rows]
    if not labels.any():
        raise ConfigError(f"{dataset.root.url}: none of its {len(rows):,} crops with dx={setting.role} has a scored diagnosis")
    logits_RK, crop_R = run(model.logits, model, dataset, rows, wanted, setting)
    table = dataset.table(["source", "record"]).take(rows).to_pydict()
    records = np.array([f"{source}/{record}" for source, record in zip(*table.values(), strict=True)])
    patients = Patients([dataset]).of_dataset[0][rows]
    scores = probabilities(logits_RK[:, columns])
    facts, notes = _facts(dataset, setting, wanted), [*notes, *_blind(dataset, wanted, rows)]
    return Diagnoses(labels[crop_R], scores, records[crop_R].tolist(), patients[crop_R].tolist(), facts, notes)


def _columns(model: Trained) -> list[int]:
    """Where the model has each of the 26 classes."""
    if model.head is None:
        kind = "only pre-trained" if not model.config.get("head") else f"fine-tuned for {task_of(model)}"
        raise ConfigError(f"--task diagnosis: the model has no head, it is {kind}: fine-tune it with engine/finetune.py")
    lacking = [name for name in CLASSES if name not in model.classes]
    if lacking:
        raise ConfigError(f"the model knows {len(model.classes)} classes, not {', '.join(lacking[:5])}: it cannot be scored")
    return [model.classes.index(name) for name in CLASSES]


def identities(model: Trained, dataset: Dataset, setting: Setting) -> Identities:
    wanted, notes = _input(model, dataset, setting)
    patients = Patients([dataset]).of_dataset[0]
    if setting.role == "valid":
        rows = dataset.select(identity="valid")
        rows = rows[dataset.column("halves")[rows] == 2]
        if not len(rows):
            raise ConfigError(_empty(dataset, "id=valid and two halves", "records that are not kept for tests"))
        c_RD, _ = run(model.pooled, model, dataset, rows, wanted, setting)
        sides = [(rows, c_RD[half::2]) for half in (0, 1)]
    else:
        sides = []
        for role in ("gallery", "probe"):
            rows = dataset.select(identity=role)
            if not len(rows):
                raise ConfigError(
                    _empty(dataset, f"id={role}", "patients of ptb-xl with two sessions: shard --id-sources names others")
                )
            sides.append((rows, run(model.pooled, model, dataset, rows, wanted, setting, most=1)[0]))
    (gallery, gallery_PD), (probe, probe_QD) = sides
    facts, notes = _facts(dataset, setting, wanted), [*notes, *_blind(dataset, wanted, np.union1d(gallery, probe))]
    return Identities(gallery_PD, patients[gallery].tolist(), probe_QD, patients[probe].tolist(), facts, notes)


def _empty(dataset: Dataset, role: str, source: str) -> str:
    plan = dataset.meta.get("plan")
    return f"{dataset.root.url}: no crop has {role}: it was made with --plan {plan}, or holds no {source}"


def _input(model: Trained, dataset: Dataset, setting: Setting) -> tuple[Input, list[str]]:
    """What the model is to see of a crop, and what is to be said of the data; refused if the two do not fit."""
    for key, value in (("fs_hz", model.preprocessing.get("fs_hz")), ("uv_per_lsb", 1.0)):
        if (seen := dataset.meta.get(key)) != value:
            raise ConfigError(f"{dataset.root.url}: {key}={seen}, where the model takes {value}: shard the data anew")
    try:
        wanted = model.input.limited_to(setting.leads) if setting.leads else model.input
    except ConfigError as error:
        raise ConfigError(f"--leads {setting.leads}: {error}") from None
    notes, own = [], model.preprocessing.get("sha256")
    if own and own != dataset.meta["preprocessing_sha256"]:
        notes.append("The data were prepared in another way than those that the model was trained on: compare dataset.json.")
    if dataset.meta.get("plan") == "paper-split":
        notes.append("The split is the authors' leaking one (--plan paper-split): for comparison only.")
    if others := other_splits(model.history.get("splits"), dataset):
        told = ", ".join(f"{name} {was}, here {is_}" for name, was, is_ in others[0])
        notes.append(f"The model was trained on these sources split in another way ({told}): perhaps on what is scored here.")
    return wanted, notes


def _blind(dataset: Dataset, wanted: Input, rows: Array) -> Iterator[str]:
    """What is scored although the model could see nothing of it."""
    if blank := int(unseen(dataset, wanted.seen)[rows].sum()):
        yield f"In {blank:,} of {len(rows):,} crops none of {describe_leads(wanted.seen)} was recorded: the model saw zeros."


def _facts(dataset: Dataset, setting: Setting, wanted: Input) -> dict[str, Any]:
    told = {"model": setting.name, "data": dataset.fingerprint, "dataset": dataset.root.url}
    return told | {"plan": dataset.meta.get("plan"), "role": setting.role, "leads": describe_leads(wanted.seen)}


@torch.inference_mode()
def run(
    forward: Callable[[Tensor], Tensor],
    model: Trained,
    dataset: Dataset,
    rows: Array,
    wanted: Input,
    setting: Setting,
    most: int = 2,
) -> tuple[Array, Array]:
    """`forward` of the halves of crops, at most the first `most` of each: values [R, ...] and R's places in `rows`."""
    halves = np.minimum(dataset.column("halves")[rows], most)
    parts, waiting = [], 0
    batch: list[Tensor] = []
    with tqdm(total=int(halves.sum()), unit="half", disable=setting.quiet, leave=False, dynamic_ncols=True) as bar:
        for x_SLT in inputs(dataset, rows.tolist(), halves.tolist(), wanted):
            batch.append(x_SLT)
            waiting += len(x_SLT)
            if waiting >= setting.batch:
                parts.append(forward(torch.cat(batch).to(model.device)).cpu())
                bar.update(waiting)
                batch, waiting = [], 0
        if batch:
            parts.append(forward(torch.cat(batch).to(model.device)).cpu())
    return torch.cat(parts).numpy(), np.repeat(np.arange(len(rows)), halves)


def inputs(dataset: Dataset, rows: Sequence[int], halves: Sequence[int], wanted: Input) -> Iterator[Tensor]:
    """x_SLT of each crop, as the model takes it: statistics, if it wants any, are over all that was recorded."""
    recorded = dataset.column("halves")
    for row, count in zip(rows, halves, strict=True):
        uv_1LT = torch.from_numpy(dataset.read(row)[None, :, : int(recorded[row]) * HALF].astype(np.float32))
        yield wanted(uv_1LT)[0].unflatten(1, (-1, HALF)).transpose(0, 1)[:count]
