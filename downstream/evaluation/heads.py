"""A frozen model with a probe as its head: what `omnilead fit` writes, and how good it is
by cross-validation.

    head = fit_head(embedder, datasets, labels, train, Choice("boosted"), Path("PARTS"))
    head.said        # sentences: the cross-validated score, the 95 % sensitivity point
    write_head(head, model, Path("MODEL"))
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from torch import nn

from omnilead.engine.data.datasets import Datasets
from omnilead.engine.data.seen import join_records, record_of_crops
from omnilead.engine.model.folder import write_model
from omnilead.engine.settings.errors import ConfigError, Facts
from omnilead.engine.settings.leads import describe_leads

from ..inference.trained_model import THRESHOLD, TrainedModel, head_of, load
from ..inference.trees import Trees
from ..tasks.kinds import KINDS, sensitive_points, thresholds
from ..tasks.labels import TaskLabels
from ..tasks.metrics import Array, few_patients
from ..tasks.readout import Readout
from .differences import by_fold, interval, over_classes, resampled, widened
from .embedders import READERS, name_and_folder, reading
from .plan import varied
from .probe import FOLDS, MANY, Fit, Probe, ProbeData, ProbeJob, scores_of
from .records import ProbedRecords, folds_of, groups_of
from .results import nullable
from .vectors import Embedder, embedded

NOT_TESTED = -1  # in the place of a fold


class Choice(NamedTuple):
    """How a head is fitted."""

    reader: str = "linear"
    readout: str = ""  # "": the model's own
    leads: str = "12"
    folds: int = 0  # of the cross-validation; 0: FOLDS, of which many ECGs need one


class Head(NamedTuple):
    probe: Probe
    readout: Readout
    leads: str  # that it was fitted on
    seen: pa.Table  # what it was fitted on (engine.data.seen)
    document: Facts  # `head` in config.json
    people: str  # how many ECGs of how many patients it was fitted on
    said: list[str]  # how good it is

    @property
    def made(self) -> str:
        return "boosted trees" if isinstance(self.probe.head, Trees) else "a linear layer"


def require_free(out: Path, flag: str) -> None:
    """ConfigError unless the folder can be made."""
    if os.path.lexists(out):
        raise ConfigError(flag, f" {out}: exists: choose another folder")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(flag, f" {out}: no folder can be made in {folder}: choose another")


def require_known(labels: TaskLabels, train: ProbedRecords) -> None:
    """ConfigError if nothing is known of a class."""
    unknown_K = np.isnan(train.y_NK).all(0)
    if unknown_K.any():
        names = ", ".join(np.array(labels.classes)[unknown_K])
        raise ConfigError(
            f"{labels.name}: no record of train and valid has a known label in {names}: leave "
            "the column out, or fill in its cells"
        )


def fit_head(
    embedder: Embedder,
    datasets: Datasets,
    labels: TaskLabels,
    train: ProbedRecords,
    choice: Choice,
    parts: Path,
) -> Head:
    """Fitted on all of `train`. `parts`: where embeddings are kept."""
    fold_N = folds_to_test(datasets, train, choice)  # first: it refuses a wrong number
    readout = readout_of_head(embedder, choice)
    # The model will measure rhythm itself, in its own leads
    vectors = embedded(reading(embedder, readout), datasets, train.rows, choice.leads, parts)
    x_ND, record_N = train.means([vectors]), np.arange(len(train.y_NK))
    if choice.reader == "boosted":  # on windows, since a model scores these
        x_ND, record_N = train.windows(vectors)
    data = ProbeData(x_ND, train.y_NK[record_N], train.patient_N[record_N], labels.task.kind)
    fit = READERS[choice.reader]
    probe = fit(data)
    document = head_document(labels, probe)
    source_hz = datasets.column("fs_source_hz")[train.rows]
    document["source_hz"] = [float(source_hz.min()), float(source_hz.max())]
    sentences = ["not cross-validated: all ECGs are of one patient"]
    if (fold_N == 0).any():
        used_K = varied(labels.task.kind, train, train, [np.arange(len(fold_N))], fold_N)
        sentences = ["not cross-validated: too few labels differ for every fold to learn from"]
        if used_K.any():
            scores_NK = held_out_scores(fit, data, record_N, fold_N, used_K)
            document |= cross_validation(labels, train, scores_NK, fold_N, used_K)
            info = head_of({"head": document})
            sentences = info.said if info else []
    seen = seen_in_all(datasets, np.sort(train.rows))
    people = people_of(train.patient_N)
    return Head(probe, readout, choice.leads, seen, document, people, sentences)


def seen_in_all(datasets: Datasets, rows: Array) -> pa.Table:
    """The record of these crops, which a head was fitted on."""
    of_datasets = []
    for dataset, rows_of_dataset in zip(datasets.all, datasets.rows_by_dataset(rows), strict=True):
        if len(rows_of_dataset):
            of_datasets.append(record_of_crops(dataset, rows_of_dataset, "labelled"))
    return join_records(of_datasets)


def folds_to_test(datasets: Datasets, train: ProbedRecords, choice: Choice) -> Array:
    """The fold of each record; NOT_TESTED for most of many records, and if there is one patient."""
    group_N = groups_of(datasets, train)
    count = choice.folds or min(FOLDS, len(np.unique(group_N)))
    if count < 2:
        return np.full(len(group_N), NOT_TESTED)
    fold_N = folds_of(group_N, count)
    if not choice.folds and len(fold_N) > MANY:
        fold_N[fold_N > 0] = NOT_TESTED
    return fold_N


def readout_of_head(embedder: Embedder, choice: Choice) -> Readout:
    """Boosted trees also see the measurements and the mean beat."""
    model = embedder.trained
    readout = model.readout_of(choice.readout)
    if choice.reader == "boosted":
        more_parts = [part for part in ("rhythm", "waveform") if part not in readout]
        readout = model.readout_of("+".join([*readout, *more_parts]))
    return readout


def head_document(labels: TaskLabels, probe: Probe) -> Facts:
    """`head` in config.json."""
    kind = KINDS[probe.kind]
    document: Facts = {"task": labels.task.name, "kind": probe.kind, "unit": labels.task.unit}
    document |= labels.facts
    document["definition"] = {**document["definition"], "head": ""}
    if isinstance(probe.head, Trees):
        document["trees"] = [len(probe.head.feature), len(probe.head.root)]
    if kind.has_scale:
        document |= {"center": probe.center_K.tolist(), "scale": probe.scale_K.tolist()}
    if kind.has_thresholds:
        document["thresholds"] = [THRESHOLD] * len(labels.classes)
    return document


def held_out_scores(
    fit: Fit, data: ProbeData, record_N: Array, fold_N: Array, used_K: Array
) -> Array:
    """The mean score of each record's rows for the outputs `used_K`, by a probe of all records of other
    folds; 0 for records that are not tested."""
    sums_NK = np.zeros((len(fold_N), used_K.sum()))
    folds = np.unique(fold_N[fold_N != NOT_TESTED])
    held_FR = [fold_N[record_N] == fold for fold in folds]
    jobs = (
        ProbeJob(fit, data.of(np.flatnonzero(~held_R)), used_K, data.x_ND[held_R])
        for held_R in held_FR
    )
    for held_R, scores_RK in zip(held_FR, scores_of(jobs), strict=True):
        np.add.at(sums_NK, record_N[held_R], scores_RK)
    return np.asarray(sums_NK / np.bincount(record_N)[:, None])


def cross_validation(
    labels: TaskLabels, train: ProbedRecords, scores_NK: Array, fold_N: Array, used_K: Array
) -> Facts:
    """`thresholds` and `cross_validated` in config.json (downstream.inference.trained_model.HeadInfo)."""
    tested_N, names = fold_N != NOT_TESTED, np.array(labels.classes)
    y_NK, patient_N = train.y_NK[tested_N][:, used_K], train.patient_N[tested_N]
    fold_N = fold_N[tested_N]
    scores_NK, kind = scores_NK[tested_N], labels.task.kind
    samples = widened(by_fold(kind, y_NK, scores_NK, resampled(patient_N), fold_N), fold_N)
    metrics, intervals = {}, {}
    for name, value_B in over_classes(samples, few_patients(kind, y_NK, patient_N)).items():
        metrics[name], intervals[name] = float(value_B[0]), interval(value_B)
    cross_validated: Facts = {
        "folds": len(np.unique(fold_N)),
        "n": len(y_NK),
        "metrics": metrics,
        "intervals": intervals,
        "left_out": names[~used_K].tolist(),
    }
    if KINDS[kind].of_classes:
        cross_validated["classes"] = {}
        aurocs = samples["auroc"][:, 0].tolist()
        for name, y_N, auroc in zip(names[used_K].tolist(), y_NK.T, aurocs, strict=True):
            counts = {"positives": int((y_N == 1).sum()), "n": int((~np.isnan(y_N)).sum())}
            cross_validated["classes"][name] = {**counts, "auroc": auroc}
    if not KINDS[kind].has_thresholds:
        return {"cross_validated": nullable(cross_validated)}
    cross_validated["sensitive"] = sensitive_points(y_NK, scores_NK, names[used_K].tolist())
    threshold_K = np.full(len(names), THRESHOLD)
    threshold_K[used_K] = thresholds(y_NK, scores_NK)
    return {"cross_validated": nullable(cross_validated), "thresholds": threshold_K.tolist()}


def people_of(patient_N: Array) -> str:
    """How many records there are, and of whom; ids of patients are odd (TaskLabels.patients)."""
    known_N = patient_N % 2 == 1
    patients, unknown = len(np.unique(patient_N[known_N])), int((~known_N).sum())
    if not unknown:
        return f"{len(patient_N):,} ECGs of {patients:,} patients"
    if not patients:
        return f"{unknown:,} ECGs of unknown patients"
    known_records = len(patient_N) - unknown
    return f"{known_records:,} ECGs of {patients:,} patients and {unknown:,} of unknown patients"


def write_head(head: Head, model: TrainedModel, out: Path) -> None:
    """Writes the model with this head, for `omnilead predict` and `evaluate`."""
    modules = nn.ModuleDict({"encoder": model.encoder, "head": head.probe.head.float()})
    document = model.config | {
        "head": head.document,
        "readout": "+".join(head.readout),
        # The head was fitted without missing leads
        "trained": model.history | {"rlm": 0},
    }
    limited_input = model.input.limited_to(head.leads)
    signals = model.preprocessing | {"seen": describe_leads(limited_input.seen_leads).split(",")}
    seen = join_records([model.seen, head.seen])
    write_model(out, modules.state_dict(), document, signals, card(head), model.code, seen)


def unrounded(embedder: Embedder, folder: str, code: bool) -> TrainedModel:
    """The model with the weights of its file: bf16 rounds them."""
    if embedder.model and embedder.precision != "bf16":
        return embedder.model
    return load(name_and_folder(folder)[1], code)


def card(head: Head) -> str:
    return (
        f"# ECG {head.document['task']}: {head.made} on a frozen encoder\n\nThe encoder is read out "
        f"as {'+'.join(head.readout)}. The head, {head.made}, was fitted on {head.people}. "
        "config.json says what data trained both.\n\n"
        + "".join(f"- {sentence}\n" for sentence in head.said)
        + "\nThis is not a medical device: whatever is built on it must be validated for its use and its "
        "population.\n"
    )
