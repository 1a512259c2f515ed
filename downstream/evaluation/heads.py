"""Fits a probe as the head of a frozen model, cross-validates it, and writes both as a model, for
`omnilead fit`.

    head = fit_head(embedder, datasets, labels, train, HeadOptions("boosted"), Path("PARTS"))
    head.sentences        # the cross-validated score, the point of 95 % sensitivity
    write_head(head, model, Path("MODEL"))
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from torch import nn

from omnilead.engine.data.datasets import Datasets
from omnilead.engine.data.seen import join_seen_records, seen_record_of_crops
from omnilead.engine.model.folder import write_model
from omnilead.engine.settings.errors import ConfigError, Facts
from omnilead.engine.settings.leads import describe_leads

from ..inference.trained_model import TrainedModel, load, parse_head_info
from ..inference.trees import Trees
from ..tasks.kinds import KINDS, best_thresholds, sensitivity_points
from ..tasks.labels import TaskLabels
from ..tasks.metrics import DEFAULT_THRESHOLD, Array, has_few_patients
from ..tasks.readout import Readout
from .differences import (
    bootstrap_weights,
    cross_validated_metrics,
    mean_over_classes,
    score_interval,
    widen_spread,
)
from .embedders import FIT_FUNCTION_OF_READER, name_and_folder, with_readout
from .plan import scorable_outputs
from .probe import DEFAULT_FOLDS, ROWS_FOR_ONE_FOLD, Fit, Probe, ProbeData, ProbeJob, run_probe_jobs
from .records import ProbedRecords, assign_folds, fold_groups
from .results import nan_to_none
from .vectors import Embedder, cached_vectors

NEVER_HELD_OUT = -1  # the number of the fold of a record that is never held out


class HeadOptions(NamedTuple):
    """Options for fitting a head."""

    reader: str = "linear"
    readout: str = ""  # "": the model's own read-out
    leads: str = "12"
    # Number of folds of the cross-validation. 0: DEFAULT_FOLDS, of which only the first is tested if
    # there are many ECGs
    folds: int = 0


class FittedHead(NamedTuple):
    """A fitted head, and what is written about it."""

    probe: Probe
    readout: Readout
    leads: str  # the leads that the head was fitted on
    seen: pa.Table  # the ECGs that the head was fitted on, as in engine.data.seen
    document: Facts  # the section `head` of config.json
    people: str  # whom it was fitted on: "120 ECGs of 80 patients"
    sentences: list[str]  # say how good the head is

    @property
    def description(self) -> str:
        """Returns the kind of the head in words, such as "a linear layer"."""
        return "boosted trees" if isinstance(self.probe.head, Trees) else "a linear layer"


def require_new_folder(out: Path, flag: str) -> None:
    """Raises ConfigError if the folder exists or cannot be created. `flag`: the option that names
    the folder."""
    if os.path.lexists(out):
        raise ConfigError(flag, f" {out}: already exists: choose another folder")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            flag, f" {out}: no folder can be created in {folder}: choose another place"
        )


def require_known_labels(labels: TaskLabels, train: ProbedRecords) -> None:
    """Raises ConfigError if an output has no known label among the records of `train`."""
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
    options: HeadOptions,
    parts: Path,
) -> FittedHead:
    """Fits a head on all records of `train`, and cross-validates it. `parts`: the folder that
    embeddings are saved in."""
    # This refuses a wrong number of folds before anything is computed
    fold_N = fold_of_records(datasets, train, options)
    readout = readout_of_head(embedder, options)
    # Here the read-out keeps `rhythm`, because the written model will measure it itself, in the
    # leads that it is shown
    vectors = cached_vectors(
        with_readout(embedder, readout), datasets, train.rows, options.leads, parts
    )
    x_ND, record_N = train.mean_embeddings([vectors]), np.arange(len(train.y_NK))
    # Trees are fitted on windows, because the model will score windows
    if options.reader == "boosted":
        x_ND, record_N = train.windows_and_records(vectors)
    data = ProbeData(x_ND, train.y_NK[record_N], train.patient_N[record_N], labels.task.kind)
    fit = FIT_FUNCTION_OF_READER[options.reader]
    probe = fit(data)
    document = head_section(labels, probe)
    source_hz = datasets.column("fs_source_hz")[train.rows]
    document["source_hz"] = [float(source_hz.min()), float(source_hz.max())]
    sentences = ["not cross-validated: all ECGs are of one patient"]
    if (fold_N == 0).any():
        used_K = scorable_outputs(labels.task.kind, train, train, [np.arange(len(fold_N))], fold_N)
        sentences = ["not cross-validated: too few labels differ for every fold to learn from"]
        if used_K.any():
            scores_NK = held_out_scores(fit, data, record_N, fold_N, used_K)
            document |= cross_validation_facts(labels, train, scores_NK, fold_N, used_K)
            info = parse_head_info({"head": document})
            sentences = info.score_sentences if info else []
    seen = fitted_ecgs_table(datasets, np.sort(train.rows))
    people = ecgs_and_patients_text(train.patient_N)
    return FittedHead(probe, readout, options.leads, seen, document, people, sentences)


def fitted_ecgs_table(datasets: Datasets, rows: Array) -> pa.Table:
    """Returns the table of the ECGs that a head was fitted on, as in engine.data.seen. `rows`:
    their crops."""
    of_datasets = []
    for dataset, rows_of_dataset in zip(datasets.all, datasets.rows_by_dataset(rows), strict=True):
        if len(rows_of_dataset):
            of_datasets.append(seen_record_of_crops(dataset, rows_of_dataset, "labelled"))
    return join_seen_records(of_datasets)


def fold_of_records(datasets: Datasets, train: ProbedRecords, options: HeadOptions) -> Array:
    """Returns the number of the fold in which each record is held out. If all records are of one
    patient, all get NEVER_HELD_OUT. If there are more than ROWS_FOR_ONE_FOLD records and
    `options.folds` is 0, only fold 0 is held out, and the records of other folds get
    NEVER_HELD_OUT."""
    group_N = fold_groups(datasets, train)
    count = options.folds or min(DEFAULT_FOLDS, len(np.unique(group_N)))
    if count < 2:
        return np.full(len(group_N), NEVER_HELD_OUT)
    fold_N = assign_folds(group_N, count)
    if not options.folds and len(fold_N) > ROWS_FOR_ONE_FOLD:
        fold_N[fold_N > 0] = NEVER_HELD_OUT
    return fold_N


def readout_of_head(embedder: Embedder, options: HeadOptions) -> Readout:
    """Returns the read-out of the head: that of the options, to which the measurements and the mean
    beat are added for boosted trees."""
    model = embedder.trained_model
    readout = model.suitable_readout(options.readout)
    if options.reader == "boosted":
        more_parts = [part for part in ("rhythm", "waveform") if part not in readout]
        readout = model.suitable_readout("+".join([*readout, *more_parts]))
    return readout


def head_section(labels: TaskLabels, probe: Probe) -> Facts:
    """Returns the section `head` of config.json, still without recording rates and
    cross-validation."""
    kind = KINDS[probe.kind]
    document: Facts = {"task": labels.task.name, "kind": probe.kind, "unit": labels.task.unit}
    document |= labels.resume_facts
    document["definition"] = {**document["definition"], "head": ""}
    if isinstance(probe.head, Trees):
        document["trees"] = [len(probe.head.feature), len(probe.head.root)]
    if kind.has_scale:
        document |= {"center": probe.center_K.tolist(), "scale": probe.scale_K.tolist()}
    if kind.has_thresholds:
        document["thresholds"] = [DEFAULT_THRESHOLD] * len(labels.classes)
    return document


def held_out_scores(
    fit: Fit, data: ProbeData, record_N: Array, fold_N: Array, used_K: Array
) -> Array:
    """Returns the scores of each record for the outputs `used_K`: the means of the scores of its
    rows. The rows of a fold are scored by a probe that was fitted on all other rows. Records
    that are never held out get 0."""
    sums_NK = np.zeros((len(fold_N), used_K.sum()))
    folds = np.unique(fold_N[fold_N != NEVER_HELD_OUT])
    held_FR = [fold_N[record_N] == fold for fold in folds]
    jobs = (
        ProbeJob(fit, data.take(np.flatnonzero(~held_R)), used_K, data.x_ND[held_R])
        for held_R in held_FR
    )
    for held_R, scores_RK in zip(held_FR, run_probe_jobs(jobs), strict=True):
        np.add.at(sums_NK, record_N[held_R], scores_RK)
    return np.asarray(sums_NK / np.bincount(record_N)[:, None])


def cross_validation_facts(
    labels: TaskLabels, train: ProbedRecords, scores_NK: Array, fold_N: Array, used_K: Array
) -> Facts:
    """Returns `cross_validated` and, if the kind of task has them, `thresholds`, for the section
    `head` of config.json (downstream.inference.trained_model.HeadInfo)."""
    tested_N, names = fold_N != NEVER_HELD_OUT, np.array(labels.classes)
    y_NK, patient_N = train.y_NK[tested_N][:, used_K], train.patient_N[tested_N]
    fold_N = fold_N[tested_N]
    scores_NK, kind = scores_NK[tested_N], labels.task.kind
    samples = widen_spread(
        cross_validated_metrics(kind, y_NK, scores_NK, bootstrap_weights(patient_N), fold_N), fold_N
    )
    metrics, intervals = {}, {}
    for name, value_B in mean_over_classes(
        samples, has_few_patients(kind, y_NK, patient_N)
    ).items():
        metrics[name], intervals[name] = float(value_B[0]), score_interval(value_B)
    cross_validated: Facts = {
        "folds": len(np.unique(fold_N)),
        "n": len(y_NK),
        "metrics": metrics,
        "intervals": intervals,
        "left_out": names[~used_K].tolist(),
    }
    if KINDS[kind].has_classes:
        cross_validated["classes"] = {}
        aurocs = samples["auroc"][:, 0].tolist()
        for name, y_N, auroc in zip(names[used_K].tolist(), y_NK.T, aurocs, strict=True):
            counts = {"positives": int((y_N == 1).sum()), "n": int((~np.isnan(y_N)).sum())}
            cross_validated["classes"][name] = {**counts, "auroc": auroc}
    if not KINDS[kind].has_thresholds:
        return {"cross_validated": nan_to_none(cross_validated)}
    cross_validated["sensitive"] = sensitivity_points(y_NK, scores_NK, names[used_K].tolist())
    threshold_K = np.full(len(names), DEFAULT_THRESHOLD)
    threshold_K[used_K] = best_thresholds(y_NK, scores_NK)
    return {"cross_validated": nan_to_none(cross_validated), "thresholds": threshold_K.tolist()}


def ecgs_and_patients_text(patient_N: Array) -> str:
    """Returns how many ECGs and patients there are, such as "120 ECGs of 80 patients". An odd id is
    a known patient, an even id a record whose patient is unknown (TaskLabels.patients)."""
    known_N = patient_N % 2 == 1
    patients, unknown = len(np.unique(patient_N[known_N])), int((~known_N).sum())
    if not unknown:
        return f"{len(patient_N):,} ECGs of {patients:,} patients"
    if not patients:
        return f"{unknown:,} ECGs of unknown patients"
    known_records = len(patient_N) - unknown
    return f"{known_records:,} ECGs of {patients:,} patients and {unknown:,} of unknown patients"


def write_head(head: FittedHead, model: TrainedModel, out: Path) -> None:
    """Writes the model with this head to a folder that `omnilead predict` and `omnilead evaluate`
    can load."""
    modules = nn.ModuleDict({"encoder": model.encoder, "head": head.probe.head.float()})
    document = model.config | {
        "head": head.document,
        "readout": "+".join(head.readout),
        # 0, because the head was fitted on ECGs without masked leads
        "trained": model.history | {"rlm": 0},
    }
    limited_input = model.input.limited_to(head.leads)
    signals = model.preprocessing | {"seen": describe_leads(limited_input.seen_leads).split(",")}
    seen = join_seen_records([model.seen, head.seen])
    write_model(
        out, modules.state_dict(), document, signals, model_card_of_head(head), model.code, seen
    )


def full_precision_model(embedder: Embedder, folder: str, code: bool) -> TrainedModel:
    """Returns the model with the weights as stored in its file. The weights of the embedder are not
    used if they were rounded to bf16."""
    if embedder.model and embedder.precision != "bf16":
        return embedder.model
    return load(name_and_folder(folder)[1], code)


def model_card_of_head(head: FittedHead) -> str:
    """Returns the text of the model card."""
    return (
        f"# ECG {head.document['task']}: {head.description} on a frozen encoder\n\nThe encoder is read out "
        f"as {'+'.join(head.readout)}. The head, {head.description}, was fitted on {head.people}. "
        "config.json says what data trained both.\n\n"
        + "".join(f"- {sentence}\n" for sentence in head.sentences)
        + "\nThis is not a medical device: whatever is built on it must be validated for its use and its "
        "population.\n"
    )
