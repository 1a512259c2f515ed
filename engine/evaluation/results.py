"""A trained model scored on held-out ECGs: metrics with 95 % intervals, and the JSON of them.

    diagnose(model, dataset, EvalOptions(role="test", leads="I,II,V2")).document()["score"]     # Challenge score
    identify(model, dataset, EvalOptions()).document()["score"]                                 # accuracy
    DiagnosisResult(labels_NK, scores_NK, records, patients).document()                         # from arrays alone

A sample of diagnosis is a half of 5 s (paper, section "Datasets"). Identification compares the first 5 s of each patient's
gallery crop and probe crop; with role "valid", the two halves of each crop that was held out of fine-tuning. Intervals are
bootstraps over patients, with all halves of a patient together.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor
from tqdm import tqdm

from data_tools.dataset import CLASSES, Dataset
from engine.common import ConfigError, describe_leads
from engine.data.augmenter import none_measured
from engine.data.leakage import conflicting_splits, patient_ids
from engine.data.preprocess import Input
from engine.evaluation.metrics import Array, Classification, MetricError, bootstrap, identification, outputs_of
from engine.evaluation.predict import dataset_batches, predict
from engine.model.inference import TrainedModel

RESAMPLES = 1000
BINS = 10  # of probabilities, equally wide


@dataclass(frozen=True)
class EvalOptions:
    role: str = "test"
    leads: str = ""  # as engine.common.parse_leads reads them; "": all that the model was trained on
    batch: int = 32  # crops encoded at a time
    name: str = "model"  # in the results


@dataclass(frozen=True, eq=False)
class DiagnosisResult:
    """One row for each half of 5 s. `record`: the same for mean probabilities over the halves of a record."""

    labels_NK: Array
    scores_NK: Array  # probabilities
    records_N: Sequence[Any]
    patients_N: Sequence[Any]
    facts: dict[str, Any] = field(default_factory=dict)  # model, data, role, leads
    notes: Sequence[str] = ()  # warnings about the data
    resamples: int = RESAMPLES

    @cached_property
    def half(self) -> dict[str, Any]:
        return scored(self.labels_NK, self.scores_NK, self.patients_N, self.resamples)

    @cached_property
    def record(self) -> dict[str, Any]:
        return scored(*by_record(self.labels_NK, self.scores_NK, self.records_N, self.patients_N), self.resamples)

    @property
    def remarks(self) -> list[str]:
        remarks, half = list(self.notes), self.half
        if absent := half["without_positives"]:
            names = f"{len(absent)} of {len(CLASSES)} classes have no positives: {', '.join(absent)}"
            remarks.append(f"{names}. AUROC and AUPRC leave them out.")
        if always := half["without_negatives"]:
            remarks.append(f"All samples are positive for {', '.join(always)}: AUROC is not defined there.")
        if half["patients"] == 1:
            remarks.append("All samples are from one patient: there are no intervals.")
        return remarks

    def document(self) -> dict[str, Any]:
        half = {"unit": "half", **self.half, "score": self.half["metrics"]["challenge"]}
        record = {"unit": "record", **self.record}
        whole = {"task": "diagnosis", **self.facts, **half, "record": record, "remarks": self.remarks}
        return {key: nullable(value) for key, value in whole.items()}


def scored(labels: Array, scores: Array, patients: Sequence[Any], resamples: int = RESAMPLES) -> dict[str, Any]:
    """n, patients, metrics, intervals, classes, without_positives, without_negatives."""
    if broken := int((~np.isfinite(scores)).any(1).sum()):
        raise MetricError(f"the model gave NaN for {broken:,} of {len(scores):,} samples: check its weights and the data")
    diagnosis = Classification(labels, outputs_of(scores), scores)
    summary = diagnosis.summary()
    low, high = bootstrap(diagnosis, patients, resamples).tolist()
    error = calibration(diagnosis.labels, scores)[-1]
    return {
        "n": len(labels),
        "patients": len(set(patients)),
        "metrics": {name: summary.pop(name) for name in diagnosis.names} | {"calibration_error": error},
        "intervals": {name: [a, b] for name, a, b in zip(diagnosis.names, low, high, strict=True)},
        **summary,
    }


def by_record(labels: Array, scores: Array, records: Sequence[Any], patients: Sequence[Any]) -> tuple[Array, Array, list[Any]]:
    """Labels, mean probabilities and patients of the records, ordered by name."""
    _, first, record_N, halves = np.unique(np.asarray(records), return_index=True, return_inverse=True, return_counts=True)
    sums = np.zeros((len(first), scores.shape[1]))
    np.add.at(sums, record_N, scores)
    return np.asarray(labels)[first], sums / halves[:, None], np.asarray(patients)[first].tolist()


def calibration(labels: Array, scores: Array) -> tuple[Array, Array, Array, float]:
    """For each bin of probabilities, over all classes: their mean, the share that are true, how many there are; and the
    expected calibration error."""
    p, y = scores.ravel().astype(float), labels.ravel()
    bin_of = np.minimum((p * BINS).astype(int), BINS - 1)
    count = np.bincount(bin_of, minlength=BINS)
    mean, true = (np.bincount(bin_of, v, BINS) / np.maximum(count, 1) for v in (p, y))
    return mean, true, count, float((np.abs(mean - true) * count).sum() / len(p))


@dataclass(frozen=True, eq=False)
class IdentificationResult:
    gallery_PD: Array
    gallery_ids: Sequence[Any]
    probe_QD: Array
    probe_ids: Sequence[Any]
    facts: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    resamples: int = RESAMPLES

    @cached_property
    def scores(self) -> dict[str, Any]:
        return identification(self.gallery_PD, self.gallery_ids, self.probe_QD, self.probe_ids)

    @cached_property
    def interval(self) -> list[float]:
        hits = self.scores["hits"]
        ends: list[float] = bootstrap(lambda weight: weight @ hits / weight.sum(), self.probe_ids, self.resamples).tolist()
        return ends

    @property
    def remarks(self) -> list[str]:
        remarks, scores = list(self.notes), self.scores
        if scores["n_gallery"] == 1:
            remarks.append("The gallery has one entry: accuracy and chance say nothing.")
        elif scores["ties"] > 0.5:
            remarks.append("Most probes are equally similar to several patients: the embeddings have collapsed, or are copies.")
        if scores["one_sided"]:
            remarks.append(f"{scores['one_sided']:,} probes are of patients who are not in the gallery: they count as misses.")
        return remarks

    def document(self) -> dict[str, Any]:
        scores = self.scores
        whole = {
            **{"task": "identification", **self.facts, "unit": "patient"},
            **{"n": scores["n_probes"], "gallery": scores["n_gallery"], "one_sided": scores["one_sided"]},
            "metrics": {name: scores[name] for name in ("accuracy", "top5", "chance", "ties")},
            "intervals": {"accuracy": self.interval},
            **{"classes": {}, "cmc": scores["cmc"].tolist(), "score": scores["accuracy"], "remarks": self.remarks},
        }
        return {key: nullable(value) for key, value in whole.items()}


def nullable(value: Any) -> Any:
    """None for NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: nullable(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [nullable(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def diagnose(model: TrainedModel, dataset: Dataset, options: EvalOptions) -> DiagnosisResult:
    if model.head is None:
        kind = f"fine-tuned for {task_of(model)}" if model.config.get("head") else "only pre-trained"
        raise ConfigError(f"--task diagnosis: the model has no head, it is {kind}: fine-tune it with engine/finetune.py")
    if unknown := [name for name in CLASSES if name not in model.classes]:
        raise ConfigError(f"the model knows {len(model.classes)} classes, not {', '.join(unknown[:5])}: it cannot be scored")
    model_input, notes = _input(model, dataset, options)
    rows = _rows(dataset, "dx", options.role, "crops of cpsc_2018 or georgia: shard --dx-sources names others")
    labels = dataset.labels[rows]
    if not labels.any():
        raise ConfigError(f"{dataset.root.url}: none of its {len(rows):,} crops with dx={options.role} has a scored diagnosis")
    logits_RK, crop_R = _predict(model.logits, model, dataset, rows, model_input, options.batch)
    scores: Array = expit(logits_RK[:, [model.classes.index(name) for name in CLASSES]])
    sources, records = dataset.table(["source", "record"]).take(rows).to_pydict().values()
    names = np.array([f"{source}/{record}" for source, record in zip(sources, records, strict=True)])[crop_R].tolist()
    patients = patient_ids([dataset])[0][rows][crop_R].tolist()
    notes += _blank_crops(dataset, model_input, rows)
    return DiagnosisResult(labels[crop_R], scores, names, patients, _facts(dataset, options, model_input), notes)


def identify(model: TrainedModel, dataset: Dataset, options: EvalOptions) -> IdentificationResult:
    model_input, notes = _input(model, dataset, options)
    patients = patient_ids([dataset])[0]
    if options.role == "valid":
        gallery = probe = rows = _rows(dataset, "id", "valid", "records that are not kept for tests", halves=2)
        c_RD, _ = _predict(model.pooled, model, dataset, rows, model_input, options.batch)
        gallery_PD, probe_QD = c_RD[::2], c_RD[1::2]
    else:
        source = "patients of ptb-xl with two sessions: shard --id-sources names others"
        gallery, probe = (_rows(dataset, "id", role, source) for role in ("gallery", "probe"))
        rows = np.union1d(gallery, probe)
        c_BD, _ = _predict(model.pooled, model, dataset, rows, model_input, options.batch, first_half=True)
        gallery_PD, probe_QD = (c_BD[np.searchsorted(rows, side)] for side in (gallery, probe))
    notes += _blank_crops(dataset, model_input, rows)
    ids = patients[gallery].tolist(), patients[probe].tolist()
    return IdentificationResult(gallery_PD, ids[0], probe_QD, ids[1], _facts(dataset, options, model_input), notes)


def task_of(model: TrainedModel) -> str:
    return str((model.config.get("head") or {}).get("task", "identification"))


def _rows(dataset: Dataset, kind: str, role: str, source: str, halves: int = 1) -> Array:
    rows = dataset.select(dx=role) if kind == "dx" else dataset.select(identity=role)
    rows = rows[dataset.column("halves")[rows] >= halves]
    if len(rows):
        return np.asarray(rows)
    what = f"{kind}={role}" + " and two halves" * (halves == 2)
    made = f"it was made with --plan {dataset.meta.get('plan')}, or has no {source}"
    raise ConfigError(f"{dataset.root.url}: no crop has {what}: {made}")


def _input(model: TrainedModel, dataset: Dataset, options: EvalOptions) -> tuple[Input, list[str]]:
    """What the model is shown of a crop, and warnings about the data; data of another rate or unit are refused."""
    for key, value in (("fs_hz", model.preprocessing.get("fs_hz")), ("uv_per_lsb", 1.0)):
        if (has := dataset.meta.get(key)) != value:
            raise ConfigError(f"{dataset.root.url}: {key}={has}, the model takes {value}: make the dataset again with shard")
    try:
        model_input = model.input.limited_to(options.leads) if options.leads else model.input
    except ConfigError as error:
        raise ConfigError(f"--leads {options.leads}: {error}") from None
    notes, sha256 = [], model.preprocessing.get("sha256")
    if sha256 and sha256 != dataset.meta["preprocessing_sha256"]:
        notes.append("The data were not preprocessed like those that the model was trained on: compare dataset.json.")
    if dataset.meta.get("plan") == "paper-split":
        notes.append("The split is the authors' leaking one (--plan paper-split): for comparison only.")
    if others := conflicting_splits(model.history.get("splits"), dataset):
        differ = ", ".join(f"{name} {before}, here {now}" for name, before, now in others[0])
        notes.append(f"Possible leakage: the model was trained on these sources with another split ({differ}).")
    return model_input, notes


def _blank_crops(dataset: Dataset, model_input: Input, rows: Array) -> Iterator[str]:
    if blank := int(none_measured(dataset, model_input.seen)[rows].sum()):
        leads = describe_leads(model_input.seen)
        yield f"In {blank:,} of {len(rows):,} crops none of {leads} was recorded: the model saw zeros."


def _facts(dataset: Dataset, options: EvalOptions, model_input: Input) -> dict[str, Any]:
    data = {"data": dataset.fingerprint, "dataset": dataset.root.url, "plan": dataset.meta.get("plan")}
    return {"model": options.name, **data, "role": options.role, "leads": describe_leads(model_input.seen)}


def _predict(
    forward: Callable[[Tensor], Tensor],
    model: TrainedModel,
    dataset: Dataset,
    rows: Array,
    model_input: Input,
    size: int,
    first_half: bool = False,
) -> tuple[Array, Array]:
    """Outputs [R, ...] of the halves of these crops, and the position in `rows` of each."""

    def prepare(uv_BLT: Tensor, halves_B: Array) -> Tensor:
        x_RLT = model_input.halves(uv_BLT, halves_B)
        first_B = torch.from_numpy(np.cumsum(halves_B, dtype=np.int64) - halves_B)
        return x_RLT.index_select(0, first_B.to(x_RLT.device)) if first_half else x_RLT

    batches = [rows[at : at + size] for at in range(0, len(rows), size)]
    crops = dataset_batches(dataset, batches, pin=model.device.type == "cuda")
    outputs = []
    with tqdm(total=len(rows), unit=" crops", disable=None, leave=False, dynamic_ncols=True) as bar:
        for batch, y_RD in predict(crops, prepare, forward, model.device):
            outputs.append(y_RD)
            bar.update(len(batch.crops))
    halves = np.ones(len(rows), np.int64) if first_half else dataset.column("halves")[rows]
    return np.concatenate(outputs), np.repeat(np.arange(len(rows)), halves)
