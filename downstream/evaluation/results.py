"""Scores a trained model on held-out ECGs: metrics with 95 % intervals, also as JSON.

    score_task(model, data, task, EvalOptions(role="test", leads="I,II,V2")).document()["score"]     # of a TaskConfig
    TaskResult(labels_NK, scores_NK, records, patients).document()                                       # from arrays alone

A sample is a half of 5 s, as in the paper (section "Datasets"). Intervals are from a bootstrap over
patients, which draws all halves of a patient together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch.distributed as dist

from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.engine.data import seen
from omnilead.engine.data.datasets import Datasets
from omnilead.engine.model.config import parse_settings
from omnilead.engine.model.input import Input
from omnilead.engine.model.window import HALF_S
from omnilead.engine.settings.commandline import RESUMABLE, read_yaml
from omnilead.engine.settings.errors import ConfigError, Facts, Flag, OutputError
from omnilead.engine.settings.files import find_config, shipped_configs
from omnilead.engine.settings.launcher import launched_rank
from omnilead.engine.settings.leads import describe_leads
from omnilead.engine.settings.metrics import label_of

from ..inference.ecg_reader import DatasetSource, Per
from ..inference.outputs import (
    Output,
    ParquetParts,
    compute_parts,
    compute_table,
    embedding_matrix,
    vector_output,
)
from ..inference.trained_model import HeadInfo, TrainedModel
from ..tasks.config import TaskConfig
from ..tasks.join import records_in_several_datasets
from ..tasks.kinds import KINDS, MIN_POSITIVES, sensitivity_points, sensitivity_sentences
from ..tasks.labels import DX_ROLES_HINT, TaskLabels, read_task
from ..tasks.metrics import (
    DEFAULT_THRESHOLD,
    TOO_FEW_NOTE,
    Array,
    MetricError,
    bootstrap_interval,
    calibration_curve,
    challenge_statistic,
    exact_intervals,
    has_few_patients,
    statistic_of,
)
from .differences import RESAMPLES

GROUP_RESAMPLES = 200
AGE_EDGES = (18, 40, 60, 80)  # years
AGE_BANDS = np.array(["0-17", "18-39", "40-59", "60-79", "80+", "unknown"])
FEW_TESTED_ECGS = 100  # with fewer tested ECGs, the interval of an AUROC is often wider than 0.2
CHOSEN_THRESHOLDS_SCORE = "challenge_chosen"
CHALLENGE_NOTE = (
    f"A class counts as predicted above {DEFAULT_THRESHOLD}, as in the Challenge. Only the Challenge score "
    "with chosen thresholds uses the threshold of each class that had the highest F1 in validation."
)
DIAGNOSIS_HEAD = HeadInfo("diagnosis", "multilabel", CLASSES, (DEFAULT_THRESHOLD,) * len(CLASSES))


@dataclass(frozen=True)
class EvalOptions:
    """Options for scoring a model."""

    role: str = "test"  # the split that is scored: test or valid
    # The leads that the model is shown, in any form that engine.settings.leads.parse_leads reads; "":
    # all that it was trained on
    leads: str = ""
    batch: int = 32  # crops encoded at a time
    name: str = "model"  # the name that the results give to the model
    # The file that keeps the model's outputs. It is written in parts, so that a killed evaluation
    # can resume
    halves_file: Path | None = None


@dataclass(frozen=True, eq=False)
class TaskResult:
    """The labels and scores of each window, from which all metrics are computed. A window is a half
    of 5 s, unless the model takes windows of another length. `record_scores`: the metrics of whole
    records; the score of a record is the mean over its windows."""

    # 0, 1 or NaN, which is unknown; in regression, values; in survival, times, negative if censored
    labels_NK: Array
    scores_NK: Array  # probabilities; in regression, values; in survival, risks
    records_N: Sequence[Any]
    patients_N: Sequence[Any]
    facts: Facts = field(default_factory=dict)  # what was scored: model, data, role, leads ...
    notes: Sequence[str] = ()  # notes for the user on the model and the data
    head: HeadInfo = DIAGNOSIS_HEAD
    crops_N: Array | None = None  # the crop of each row, as its number in the data
    # By "age", "sex" and "source": the group of each row
    groups_N: Mapping[str, Array] = field(default_factory=dict)
    resamples: int = RESAMPLES
    resampling_unit: str = "patients"  # what the bootstrap draws: TaskLabels.resampling_unit

    @cached_property
    def half_scores(self) -> Facts:
        """Returns the metrics of single halves, with intervals."""
        return score_arrays(
            self.labels_NK, self.scores_NK, self.patients_N, self.resamples, self.head
        )

    @cached_property
    def record_scores(self) -> Facts:
        """Returns the metrics of whole records, with intervals."""
        return self._score_records(np.arange(len(self.labels_NK)), self.resamples)

    @cached_property
    def group_scores(self) -> dict[str, Facts]:
        """Returns the metrics and intervals of the records of each group, by age, sex and source.
        Adds how many records and patients a group has and, if the task has positives, how many
        positives of each class."""
        groups: dict[str, Facts] = {}
        for name, values_N in self.groups_N.items():
            for value in np.unique(values_N).tolist():
                rows = np.flatnonzero(values_N == value)
                # A group of all records has the scores of all records, so that one number does not
                # get two intervals
                scores = self.record_scores
                if len(rows) < len(values_N):
                    scores = self._score_records(rows, min(self.resamples, GROUP_RESAMPLES))
                group = {key: scores[key] for key in ("n", "patients", "metrics", "intervals")}
                if KINDS[self.head.kind].has_positives:
                    classes = scores["classes"].items()
                    group["positives"] = {label: facts["positives"] for label, facts in classes}
                groups.setdefault(name, {})[value] = group
        return groups

    def _score_records(self, rows: Array, resamples: int) -> Facts:
        return score_arrays(*self.record_labels_scores_patients(rows), resamples, self.head)

    def record_labels_scores_patients(
        self, rows: Array | slice = slice(None)
    ) -> tuple[Array, Array, list[Any]]:
        """Returns the labels, mean scores and patients of the records in these rows."""
        records, patients = np.asarray(self.records_N)[rows], np.asarray(self.patients_N)[rows]
        return labels_scores_patients_by_record(
            self.labels_NK[rows], self.scores_NK[rows], records, patients
        )

    @cached_property
    def errors_NK(self) -> Array:
        """Returns the absolute errors [N, K] of the scores. In regression, their unit is the
        standard deviation of the column. The error of an unknown label is 0."""
        has_scale = KINDS[self.head.kind].has_scale
        spread_K = np.nanstd(self.labels_NK, 0) if has_scale else np.ones(1)
        error_NK = np.abs(self.scores_NK - self.labels_NK) / np.where(spread_K > 0, spread_K, 1)
        return np.asarray(np.nan_to_num(error_NK))

    def worst_rows(self, count: int) -> list[int]:
        """Returns one row for each of the `count` records with the largest errors: that of its
        worst half."""
        order = np.argsort(-self.errors_NK.max(1), kind="stable")
        _, first = np.unique(np.asarray(self.records_N)[order], return_index=True)
        rows: list[int] = order[np.sort(first)][:count].tolist()
        return rows

    @property
    def remarks(self) -> list[str]:
        remarks, half, labels = list(self.notes), self.half_scores, np.asarray(self.labels_NK)
        if absent := half.get("without_positives"):
            remarks.append(
                f"{len(absent)} of {len(self.head.classes)} classes have no positives: "
                f"{', '.join(absent)}. AUROC and AUPRC leave them out."
            )
        if always := half.get("without_negatives"):
            remarks.append(
                f"All samples are positive for {', '.join(always)}: AUROC is not defined there."
            )
        if labels.dtype.kind == "f" and (unknown := int(np.isnan(labels).sum())):
            remarks.append(f"{unknown:,} of {labels.size:,} labels are unknown and ignored.")
        is_few = has_few_patients(self.head.kind, labels, self.patients_N)
        without = ""
        if self.facts.get("role") == "valid" and self.head.thresholds:
            points = sensitivity_points(
                *self.record_labels_scores_patients()[:2], self.head.classes
            )
            if points or not is_few:
                remarks += sensitivity_sentences(points, self.head.classes)
            else:
                without = f"; a score with 95 % sensitivity takes {MIN_POSITIVES} positives"
        if half["patients"] == 1:
            remarks.append(f"All samples are from one patient: there are no intervals{without}.")
        elif is_few:
            remarks.append(f"{TOO_FEW_NOTE} have no interval, or an exact one{without}.")
        else:
            remarks += self._no_interval_remarks()
        return remarks

    def _no_interval_remarks(self) -> list[str]:
        """Returns a remark that names the metrics on which all resamples agree; no remark if there
        are none."""
        same = [
            name
            for name, ends in self.record_scores["intervals"].items()
            if np.isnan(ends[0]) and np.isfinite(self.record_scores["metrics"][name])
        ]
        return [f"All resamples agree on {', '.join(same)}, which has no interval then."] * bool(
            same
        )

    def document(self) -> Facts:
        """Returns the scores as `omnilead evaluate --json` writes them."""
        head = self.head
        document = {
            "task": head.task,
            "kind": head.kind,
            "thresholds": list(head.thresholds),
            "value_unit": head.unit,
            **self.facts,
            "unit": "half",
            **self.half_scores,
            "score": next(iter(self.half_scores["metrics"].values())),
            "record": {"unit": "record", **self.record_scores},
            "groups": self.group_scores,
            "remarks": self.remarks,
        }
        return dict(nan_to_none(document))


def score_arrays(
    labels: Array, scores: Array, patients: Sequence[Any], resamples: int, head: HeadInfo
) -> Facts:
    """Returns a dictionary with n, patients, metrics, intervals, classes, without_positives and
    without_negatives. The first of the metrics is the score of the task."""
    if broken := int((~np.isfinite(scores)).any(1).sum()):
        raise MetricError(
            f"the model gave NaN for {broken:,} of {len(scores):,} samples: check its weights and "
            "the data"
        )
    statistic = statistic_of(head.kind, labels, scores, head.thresholds, head.classes)
    summary, metrics = statistic.summary(), {}
    ends = bootstrap_interval(statistic, patients, resamples).T.tolist()
    intervals = dict(zip(statistic.names, ends, strict=True))
    for name in statistic.names:
        metrics[name] = summary.pop(name)
        if name == "challenge" and head.chosen:
            challenge_score = challenge_statistic(labels, scores > np.asarray(head.chosen))
            metrics[CHOSEN_THRESHOLDS_SCORE] = challenge_score(np.ones(len(labels), np.int64))
            intervals[CHOSEN_THRESHOLDS_SCORE] = bootstrap_interval(
                challenge_score, patients, resamples
            ).tolist()
    is_few = has_few_patients(head.kind, labels, patients)
    exact = exact_intervals(metrics, labels, patients)
    for name, (low, high) in intervals.items():
        # An interval of no width is replaced, because agreeing resamples do not make a score
        # certain
        if is_few or np.isclose(low, high):
            intervals[name] = exact[name]
    if KINDS[head.kind].has_classes:
        metrics["calibration_error"] = calibration_curve(labels, scores).error
    for name, threshold in zip(head.classes, head.thresholds, strict=False):
        summary["classes"][name]["threshold"] = threshold
    return {
        "n": len(labels),
        "patients": len(set(patients)),
        "metrics": metrics,
        "intervals": {name: intervals[name] for name in metrics if name in intervals},
        **summary,
    }


def labels_scores_patients_by_record(
    labels: Array, scores: Array, records: Any, patients: Any
) -> tuple[Array, Array, list[Any]]:
    """Returns the labels, mean scores and patients of the records, ordered by the name of the
    record."""
    _, first, record_N, halves = np.unique(
        np.asarray(records), return_index=True, return_inverse=True, return_counts=True
    )
    sums = np.zeros((len(first), scores.shape[1]))
    np.add.at(sums, record_N, scores)
    return np.asarray(labels)[first], sums / halves[:, None], np.asarray(patients)[first].tolist()


def nan_to_none(value: Any) -> Any:
    """Returns the value with None in place of NaN and infinite numbers, which JSON does not
    have."""
    if isinstance(value, dict):
        return {key: nan_to_none(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [nan_to_none(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def score_task(
    model: TrainedModel, data: Datasets, task: TaskConfig, options: EvalOptions
) -> TaskResult:
    """Scores a fine-tuned model on the labelled crops of a split. Returns the result."""
    head = head_for_task(model, task)
    model_input, notes = limited_input_and_warnings(model, data, options)
    if head.score_sentences:
        notes.append(f"The model: {'; '.join(head.score_sentences)}.")
    labels = read_task(task, data.all)
    require_classes(model, labels)
    labelled = labelled_rows(labels, data, options.role)
    (rows,), left_out = crops_with_leads_and_note(data, model_input, labelled)
    notes += rates_note(model, data, rows)
    output = vector_output(model, model.scores, len(model.classes))
    scores_RK, crop_R = outputs_and_positions(output, data, rows, model_input, options)
    columns = [model.classes.index(name) for name in labels.classes]
    scored_head = head_for_labels(head, labels, columns)
    if scored_head.chosen:
        notes.append(CHALLENGE_NOTE)
    notes += leakage_notes(model, data, rows, labels.all_patients, options.role)
    notes += unscored_note(model, data, labels, options.role)
    notes += few_scored_note(data, rows, labels) + left_out + labels.remarks
    facts = evaluation_facts(data, options, model_input)
    if task.labels:
        facts["labels"] = task.labels
    crops = rows[crop_R]
    return TaskResult(
        labels_NK=labels.all_y[crops],
        scores_NK=scores_RK[:, columns],
        records_N=record_names(data, crops),
        patients_N=labels.all_patients[crops].tolist(),
        facts=facts,
        notes=notes,
        head=scored_head,
        crops_N=crops,
        groups_N=subgroups_of(data, crops),
        resampling_unit=labels.resampling_unit,
    )


def head_for_task(model: TrainedModel, task: TaskConfig) -> HeadInfo:
    """Returns the facts about the model's head; ConfigError if the head cannot do the task."""
    head = model.head_info
    if model.head is None or head is None:
        kind = f"fine-tuned for {head.task}" if head else "only pre-trained"
        raise ConfigError(
            Flag("--task"),
            f" {task.name}: the model is {kind} and has no head to score: fine-tune it with omnilead "
            "finetune, or fit a head with omnilead fit",
        )
    if task.kind != head.kind:
        raise ConfigError(
            Flag("--task"),
            f" {task.name}: the kind of this task is {task.kind}, but the model was fine-tuned for "
            f"{head.task}, of kind {head.kind}: leave ",
            Flag("--task"),
            " out, or choose another model",
        )
    return head


def require_classes(model: TrainedModel, labels: TaskLabels) -> None:
    """Raises ConfigError if the labels have a class that the model does not know or, where classes
    are exclusive, if they lack a class of the model."""
    unknown = [name for name in labels.classes if name not in model.classes]
    if unknown:
        difference = f"not {', '.join(unknown[:5])}"
    elif KINDS[labels.task.kind].exclusive and len(labels.classes) < len(model.classes):
        difference = f"of which the labels have {', '.join(labels.classes)}"
    else:
        return
    raise ConfigError(
        f"the model knows {len(model.classes)} classes, {difference}: use other ",
        Flag("--labels"),
        ", or another model",
    )


def labelled_rows(labels: TaskLabels, data: Datasets, role: str) -> Array:
    """Returns the labelled crops of a split; ConfigError if there is nothing to score."""
    name, rows = labels.name or data.name, labels.rows_of_all_datasets(role)
    if labels.role:
        require_crops(rows, data, f"dx={role}", f"crop with a diagnosis role: {DX_ROLES_HINT}")
    if not len(rows):
        raise ConfigError(
            f"{name}: no record of {data.name} is in the split {role}: choose another ",
            Flag("--role"),
        )
    if KINDS[labels.task.kind].has_positives and not (labels.all_y[rows] > 0).any():
        what_is_missing = f"of the split {role} has a positive label"
        if labels.role:
            what_is_missing = f"with dx={role} has a scored diagnosis"
        raise ConfigError(f"{name}: none of its {len(rows):,} crops {what_is_missing}")
    return rows


def head_for_labels(head: HeadInfo, labels: TaskLabels, columns: Sequence[int]) -> HeadInfo:
    """Returns the head, reduced to the classes of the labels. If they are the Challenge's classes,
    the thresholds become 0.5, as in the Challenge. Other thresholds that the head had, which were
    chosen in validation, become `chosen`, and give a score of their own."""
    changes: Facts = {"task": labels.task.name, "classes": labels.classes, "chosen": ()}
    for name in ("thresholds", "center", "scale"):
        values = getattr(head, name)
        changes[name] = tuple(values[k] for k in columns if k < len(values))
    if labels.classes == CLASSES and head.thresholds:
        if set(head.thresholds) != {DEFAULT_THRESHOLD}:
            changes["chosen"] = changes["thresholds"]
        changes["thresholds"] = (DEFAULT_THRESHOLD,) * len(columns)
    return replace(head, **changes)


def rates_note(model: TrainedModel, data: Datasets, rows: Array) -> list[str]:
    """Returns a note if the sampling rates of the crops differ much from those that the head was
    fitted on."""
    note = model.note_on_rates(np.unique(data.column("fs_source_hz")[rows]).tolist())
    return [f"{note}."] if note else []


def leakage_notes(
    model: TrainedModel, data: Datasets, rows: Array, patient_N: Array, role: str = "test"
) -> list[str]:
    """Returns notes on how many patients of these crops the model has seen in training, and in
    which way."""
    valid = role == "valid"
    return seen.seen_notes(
        model.seen,
        data.all,
        data.rows_by_dataset(rows),
        data.split_by_dataset(patient_N),
        "scored here",
        valid,
    )


def unscored_note(model: TrainedModel, data: Datasets, labels: TaskLabels, role: str) -> list[str]:
    """Returns a note if labelled ECGs outside the split could be scored as well, because the model
    was trained on none of the labelled ECGs."""
    known_crops, scored = (
        int((~np.isnan(labels.all_y).all(1)).sum()),
        len(labels.rows_of_all_datasets(role)),
    )
    if not labels.task.labels or known_crops <= scored:
        return []
    for dataset, split_N in zip(data.all, labels.split, strict=True):
        if seen.LABELLED in seen.uses_by_crop(
            model.seen, dataset, np.flatnonzero(split_N), data.all
        ):
            return []
    return [
        f"{scored:,} of {known_crops:,} labelled crops are in the split {role}. To score all, give the "
        f"label table a column `split` that says {role}."
    ]


def few_scored_note(data: Datasets, rows: Array, labels: TaskLabels) -> list[str]:
    """Returns a note if few ECGs of a label table are scored."""
    scored = len(set(record_names(data, rows)))
    if not labels.task.labels or scored >= FEW_TESTED_ECGS:
        return []
    return [
        f"{scored:,} ECGs are scored, which says little: `omnilead bench --folds 5` tests every labelled "
        "ECG once."
    ]


def record_names(data: Datasets, rows: Array) -> list[str]:
    """Returns the name of the record of each crop, as source/record. If a name occurs in several
    datasets, the address of the crop's dataset is appended."""
    table = data.table(["source", "record"]).take(rows).to_pydict()
    names = [f"{source}/{name}" for source, name in zip(*table.values(), strict=True)]
    shared = set(records_in_several_datasets(data.all))
    if not shared:
        return names
    urls = [dataset.root.url for dataset in data.all]
    numbers = data.dataset_numbers(rows).tolist()
    return [
        f"{name} in {urls[number]}" if name in shared else name
        for name, number in zip(names, numbers, strict=True)
    ]


def subgroups_of(data: Datasets, rows: Array) -> dict[str, Array]:
    """Returns the age band, sex and source of each row."""
    table = data.table(["age", "sex", "source"]).take(rows).to_pydict()
    age = np.array(table["age"], float)
    band = np.where(np.isnan(age), -1, np.digitize(age, AGE_EDGES))
    return {
        "age": AGE_BANDS[band],
        "sex": np.array([sex or "unknown" for sex in table["sex"]]),
        "source": np.array(table["source"], str),
    }


def load_task(name: str) -> TaskConfig:
    """Reads a task from configs/tasks by its name, or from a YAML file by its path."""
    path = find_config(name, "tasks", Flag("--task"))
    section = read_yaml(path, "tasks").get("task")
    if not isinstance(section, dict):
        raise ConfigError(
            f"{path} has no section `task`: add one, `task: {{name: ..., kind: ...}}`"
        )
    return parse_settings(TaskConfig, section, "task")


def find_task(model: TrainedModel, name: str = "auto", labels: str = "") -> TaskConfig:
    """Returns the task of this name, with the label table `labels` if it is given. "auto": the task
    that the model was fine-tuned for or, if there is none, identification."""
    head = model.head_info
    own_task = head.task if head else "identification"
    if name == "auto":
        name = own_task
        if own_task not in shipped_configs("tasks") and not (head and head.definition):
            raise ConfigError(
                f"the model was fine-tuned for {own_task!r}, which is no shipped task: name its YAML file "
                "with ",
                Flag("--task"),
            )
    if head and head.definition and name == own_task:
        task = parse_settings(TaskConfig, head.definition, "task")
        # A label table that the model names is not opened, because the model may come from anyone
        if task.labels and not labels:
            raise ConfigError(
                f"the labels of the model's task {task.name}, {task.labels}, are not stored with the "
                "model: give them with ",
                Flag("--labels"),
            )
    else:
        task = load_task(name)
    if task.kind == "identity" and labels:
        raise ConfigError(
            Flag("--labels"),
            f" {labels}: the task is to identify patients, which needs no labels. To score labels, fit "
            f"a head to them: omnilead fit --model RUN --labels {labels} --data DATASET --out MODEL",
        )
    return replace(task, labels=labels) if labels else task


def require_crops(rows: Array, data: Datasets, criterion: str, source: str) -> None:
    """Raises ConfigError if `rows` is empty. `criterion`: what the crops must have, such as
    id=probe. `source`: what the data need for that, and may lack."""
    if not len(rows):
        reason = f"it was made with --plan {data.plan}, or has no {source}"
        raise ConfigError(f"{data.name}: no crop has {criterion}: {reason}")


def limited_input_and_warnings(
    model: TrainedModel, data: Datasets, options: EvalOptions
) -> tuple[Input, list[str]]:
    """Returns the input of the model, limited to the leads of the options, and warnings about the
    data."""
    try:
        model_input = model.input.limited_to(options.leads) if options.leads else model.input
    except ConfigError as error:
        raise ConfigError(Flag("--leads"), f" {options.leads}: ", error) from None
    notes, sha256 = [], model.preprocessing.get("sha256")
    if sha256 and sha256 != data.all[0].preprocessing_sha256:
        notes.append(
            "The data were preprocessed differently from the model's training data: compare "
            "dataset.json."
        )
    if crops := data.synthetic_crops:
        share = "All" if crops == len(data) else f"{crops:,} of {len(data):,}"
        these = "this dataset" if len(data.all) == 1 else "these datasets"
        notes.append(f"{share} crops of {these} are synthetic.")
    if any(dataset.facts.plan == "paper-split" for dataset in data.all):
        notes.append(
            "The split is the authors', which leaks (--plan paper-split): for comparison only."
        )
    return model_input, notes


def crops_with_leads_and_note(
    data: Datasets, model_input: Input, *sides: Array
) -> tuple[list[Array], list[str]]:
    """Returns the crops of each side that have a window in which at least one of the model's leads
    was recorded, and a note on the crops that are left out, if any. `sides`: the crops of each side
    of a comparison, or those of a task. ConfigError if a side has no such crop."""
    blank = ~data.concatenate(model_input.usable_crops)
    if any(blank[rows].all() for rows in sides):
        raise ConfigError(
            f"{data.name}: {model_input.unusable_crops_text}: choose other ", Flag("--leads")
        )
    notes = []
    if without := sum(int(blank[rows].sum()) for rows in sides):
        notes.append(
            f"{without:,} of {sum(map(len, sides)):,} crops are left out: none of "
            f"{describe_leads(model_input.seen_leads)} was recorded in them{model_input.too_short_hint}."
        )
    return [rows[~blank[rows]] for rows in sides], notes


def evaluation_facts(data: Datasets, options: EvalOptions, model_input: Input) -> Facts:
    """Returns what was scored, for the results: model, data, role, leads and, if windows are not
    halves of 5 s, their length."""
    facts: Facts = {} if model_input.window_s == HALF_S else {"window_s": model_input.window_s}
    if len(data.all) > 1:
        facts["datasets"] = {dataset.root.url: dataset.fingerprint for dataset in data.all}
    return facts | {
        "model": options.name,
        "data": data.fingerprint,
        "dataset": data.name,
        "plan": data.plan,
        "role": options.role,
        "leads": describe_leads(model_input.seen_leads),
    }


def sentence_to_report(document: Mapping[str, Any]) -> str:
    """Returns the sentence that says which score of an evaluation to report: that of whole records,
    with its interval."""
    part = document.get("record") or document
    name, value = next(iter(part["metrics"].items()))
    if value is None:
        return f"to report: {label_of(name)} is not defined on these ECGs"
    ends = part["intervals"].get(name) or [None]
    interval = "no interval" if None in ends else f"95 % interval {ends[0]:.3f} to {ends[1]:.3f}"
    people = f" of {part['patients']:,} patients" if "patients" in part else ""
    what = f"{part['n']:,} records{people}" if document.get("record") else f"{part['n']:,} probes"
    return f"to report: {label_of(name)} {value:.3f} ({interval}) on {what}"


def scored_windows_text(facts: Mapping[str, Any]) -> str:
    """Returns the name of the windows that were scored: halves of 5 s, or windows of the model's
    length."""
    window_s = facts.get("window_s")
    return f"windows of {window_s:g} s" if window_s else "halves of 5 s"


def outputs_and_positions(
    output: Output,
    data: Datasets,
    rows: Array,
    model_input: Input,
    options: EvalOptions,
    per: Per = "half",
) -> tuple[Array, Array]:
    """Returns the outputs [R, D] of all windows of these crops, and for each window the position of
    its crop in `rows`, which must ascend. Ranks share the work."""
    windows = 1
    if per == "half":
        windows = model_input.count_windows(data.column("halves")[rows])
    crop_R = np.repeat(np.arange(len(rows)), windows)
    outputs = []
    for number, rows_of_dataset in enumerate(data.rows_by_dataset(rows)):
        if len(rows_of_dataset):
            file = halves_file_of_dataset(options.halves_file, number)
            outputs.append(
                _outputs_of_dataset(
                    output, data.all[number], rows_of_dataset, model_input, options, per, file
                )
            )
    return np.concatenate(outputs), crop_R


def halves_file_of_dataset(first: Path | None, number: int) -> Path | None:
    """Returns the file that keeps the outputs for the dataset of this number; None if outputs are
    not kept. `first`: the file for the first dataset."""
    return first.with_name(f"{first.name}.{number}") if first and number else first


def _outputs_of_dataset(
    output: Output,
    dataset: Dataset,
    rows: Array,
    model_input: Input,
    options: EvalOptions,
    per: Per,
    file: Path | None,
) -> Array:
    """Returns the outputs [R, D] of all windows of the dataset's crops. With `file`, they are kept
    there, and ranks share the work."""
    model = output.model
    source = DatasetSource(dataset, rows, options.batch, per, pin=model.device.type == "cuda")
    if file is None:
        return embedding_matrix(compute_table(source, output, model_input, per))
    job = {
        "model": model.digest,
        "data": dataset.fingerprint,
        "leads": model_input.seen_leads,
        "per": per,
        "output": output.forward.__name__,
        "rows": sha256(rows.tobytes()).hexdigest(),
        "batch": options.batch,
        "device": model.device.type,
    }
    with ParquetParts(file, job, *launched_rank()[:2]) as parts:
        if not parts.finished:
            compute_parts(source, output, model_input, per, parts)
        _wait_for_ranks()  # until the rank that finishes last has joined the parts
        if not file.exists():
            why = "cannot be read back"
            if parts.world > 1:
                why += ": do all ranks write to the same folder?"
            raise OutputError(f"{file}: {why}{RESUMABLE}")
        table = pq.read_table(file)
        _wait_for_ranks()  # rank 0 removes the file soon, so every rank must have read it
    return embedding_matrix(table)


def _wait_for_ranks() -> None:
    """Waits until all ranks are here, if there are several."""
    if dist.is_initialized():
        dist.barrier()
