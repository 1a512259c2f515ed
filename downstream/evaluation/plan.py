"""Plans a comparison of models: its tasks, with the records and labels of their probes, and the
crops of identification.

    plan = plan_bench(BenchOptions(...), shown)  # ConfigError if a task does not suit the data
    plan.tasks["sex"].train                     # ProbedRecords
    plan.rows_to_embed[plan.tested]                      # crops that every model embeds
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from omnilead.data_tools.dataset import Data, Dataset, as_list
from omnilead.data_tools.ecg.workbook import is_workbook, table_name, workbook_and_sheet
from omnilead.engine.data.datasets import Datasets, open_together
from omnilead.engine.data.leakage import describe_overlap, refuse_leak
from omnilead.engine.settings.errors import ConfigError, Facts, Flag
from omnilead.engine.settings.files import shipped_configs

from ..tasks.config import TaskConfig, TaskKind
from ..tasks.guess import guess_kind
from ..tasks.join import DATASET_COLUMNS
from ..tasks.kinds import EMPTY_CELL_NOTE, KINDS
from ..tasks.labels import DX_ROLES_HINT, TaskLabels, read_task
from ..tasks.metrics import TOO_FEW_NOTE, Array, has_few_patients
from ..tasks.splits import SPLITS
from .differences import Samples, bootstrap_weights
from .embedders import EmbedOptions
from .identification import Identities, crops_to_identify
from .records import (
    FIT_SPLITS,
    ProbedRecords,
    ShownLeads,
    assign_folds,
    draws_of_share,
    fold_groups,
    probed_records,
    train_test_rows,
)
from .results import FEW_TESTED, load_task

IDENTIFICATION = "identification"
TABLE_SUFFIXES = (".parquet", ".csv")
SHEET_SUFFIXES = (*TABLE_SUFFIXES, ".tsv", ".xls")  # the last one is refused as a sheet


@dataclass(frozen=True)
class BenchOptions:
    """The options of downstream.bench, which explains them."""

    models: tuple[str, ...]
    data: Data | Sequence[Data]
    out: Path
    test_data: Data | Sequence[Data] = ()  # (): test on `data`
    tasks: tuple[str, ...] = ()
    labels: str = ""
    columns: tuple[str, ...] = ()
    kind: TaskKind | None = None
    positive: str = ""
    test_labels: str = ""
    leads: tuple[str, ...] = ("12",)  # without repeats
    fit_leads: str = ""  # "": the leads of the test
    shares: tuple[float, ...] = (1.0,)  # ascending, without repeats
    folds: int | None = None
    reader: str = "linear"
    seed: int = 0
    anonymous: bool = False
    embedding: EmbedOptions = field(default_factory=EmbedOptions)

    @property
    def shown_leads(self) -> tuple[str, ...]:
        return (*self.leads, self.fit_leads) if self.fit_leads else self.leads


class ProbeSplits(NamedTuple):
    """The splits that a probe uses, by name."""

    needed: Sequence[str]  # at least one of these splits must have labels
    fitted: Sequence[str]
    tested: Sequence[str]


TRAIN_TEST_SPLITS = ProbeSplits(("train",), FIT_SPLITS, ("test",))
CROSS_VALIDATION_SPLITS = ProbeSplits(SPLITS[1:], SPLITS[1:], SPLITS[1:])


class ProbedTask(NamedTuple):
    labels: TaskLabels
    train: ProbedRecords  # with valid; with --folds all labelled records, also as `test`
    test: ProbedRecords
    draws: dict[float, list[Array]]  # by share: the drawn training records
    # By share, bool [K]: outputs whose labels vary in test and in each draw
    used_outputs: dict[float, Array]
    weight_NB: Array  # bootstrap weights of the test records
    few_shares: set[float]  # shares of which the test has too few patients for intervals
    patient_B: Array  # the patient of each crop of the tested dataset
    fold_N: Array | None = None  # with --folds, the fold of each record
    remarks: Sequence[str] = ()

    @property
    def kind(self) -> str:
        return self.labels.task.kind

    @property
    def fit_count(self) -> int:
        """The number of probes that are fitted for a model."""
        draws = (draw for of_share in self.draws.values() for draw in of_share)
        return sum(len(train_test_rows(draw, self.fold_N)) for draw in draws)

    @property
    def has_small_test(self) -> bool:
        return len(self.test.y_NK) < FEW_TESTED

    def scored_facts(self, share: float, samples: Samples) -> Facts:
        """Returns counts, and the values of each class, for bench.json."""
        draws, used_K = self.draws[share], self.used_outputs[share]
        names, people = np.array(self.labels.classes), np.unique(self.test.patient_N)
        used = names[used_K].tolist()
        per_class = {}
        for metric, value_KB in samples.items():
            if len(value_KB) == len(used):  # values of regression are means over the columns
                per_class[metric] = dict(zip(used, value_KB[:, 0].tolist(), strict=True))
        return {
            "n": len(self.test.y_NK),
            "patients": len(people) if (people & 1).all() else None,  # None if some are unknown
            "labelled": len(train_test_rows(draws[0], self.fold_N)[0][0]),
            "draws": len(draws),
            "classes": len(used),
            "left_out": names[~used_K].tolist(),
            "per_class": per_class,
        }


class BenchPlan(NamedTuple):
    """The data and tasks that every model is scored on."""

    fitted: Datasets
    tested: Datasets
    tasks: dict[str, ProbedTask]  # by name
    identities: Identities | None
    shown: ShownLeads
    fit_leads: str  # shown while a probe is fitted; "": those that are shown in the test

    @property
    def rows_to_embed(self) -> dict[Datasets, Array]:
        """{datasets: crops to embed}"""
        none = np.zeros(0, np.int64)
        rows = {self.fitted: [none], self.tested: [none]}  # the two may be the same
        for task in self.tasks.values():
            rows[self.fitted].append(task.train.rows)
            rows[self.tested].append(task.test.rows)
        if self.identities:
            rows[self.tested] += [self.identities.gallery, self.identities.probe]
        return {data: np.concatenate(parts) for data, parts in rows.items()}


def plan_bench(options: BenchOptions, shown: ShownLeads) -> BenchPlan:
    """Reads what to compare on; ConfigError if a task or its labels do not suit the data."""
    words = task_words(options)
    require_labels(Flag("--labels"), options.labels)
    require_labels(Flag("--test-labels"), options.test_labels)
    tested = fitted = open_together(options.data, options.anonymous)
    if options.test_data:
        tested = open_together(options.test_data, options.anonymous, Flag("--test-data"))
    tasks: dict[str, ProbedTask] = {}
    for word in words:
        if word == IDENTIFICATION:
            continue
        try:
            task = task_to_probe(word, fitted, tested, options, shown)
        except ConfigError as error:
            raise ConfigError(Flag("--tasks"), f" {word}: ", error) from None
        name, columns = task.labels.task.name, task.labels.task.columns
        if is_table(word) and len(columns) == 1 and columns[0] != name:
            name = f"{name}: {columns[0]}"
        if name in tasks:
            raise ConfigError(
                Flag("--tasks"),
                f" {' '.join(words)}: two tasks have the same name: leave one out, or rename its table",
            )
        tasks[name] = task
    identities = (
        crops_to_identify(tested, shown.usable_crops(tested)) if IDENTIFICATION in words else None
    )
    return BenchPlan(fitted, tested, tasks, identities, shown, options.fit_leads)


def is_table(name: str) -> bool:
    """True for a file of labels; False for a folder or a shipped task."""
    return name.endswith(TABLE_SUFFIXES) or is_workbook(name)


def labels_and_tasks(
    labels: str | Sequence[str], tasks: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """Returns --labels and --tasks; each of several label tables is a task."""
    names = (labels,) if isinstance(labels, str) else tuple(labels)
    if len(names) < 2:
        return "".join(names), tasks
    if tasks or not all(map(is_table, names)):
        raise ConfigError(
            Flag("--labels"),
            f" {' '.join(names)}: with ",
            Flag("--tasks"),
            " it is one table or folder: name the tables that are tasks with ",
            Flag("--tasks"),
        )
    return "", names


def task_words(options: BenchOptions) -> Sequence[str]:
    """Returns the tasks as they were typed; ConfigError if there is none, or an option has no
    use."""
    words = options.tasks
    if not words and is_table(options.labels):
        words = (options.labels,)
    if not words:
        raise ConfigError(
            "no task: name tasks with ",
            Flag("--tasks"),
            ", or a table of labels with ",
            Flag("--labels"),
            " my.csv",
        )
    if (options.columns or options.kind or options.positive) and not any(
        is_table(word) for word in words
    ):
        raise ConfigError(
            Flag("--columns"),
            ", ",
            Flag("--kind"),
            " and ",
            Flag("--positive"),
            " are for a table of labels: name one with ",
            Flag("--labels"),
            " my.csv",
        )
    if options.folds and options.test_data:
        raise ConfigError(
            Flag("--folds"),
            " tests the ECGs of ",
            Flag("--data"),
            ": leave ",
            Flag("--test-data"),
            " out",
        )
    return words


def task_to_probe(
    word: str, fitted: Datasets, tested: Datasets, options: BenchOptions, shown: ShownLeads
) -> ProbedTask:
    """Reads the records and labels of a task's probes."""
    task = _task_of_word(word, options)
    splits = CROSS_VALIDATION_SPLITS if options.folds else TRAIN_TEST_SPLITS
    if options.folds and task.labels and task.split != "roles":
        task = replace(task, split="8:1:1")  # a column `split` with gaps would leave records out
    test_labels = labels = labels_to_probe(fitted, task, splits.needed)
    if tested is not fitted:
        url = find_label_table(options.test_labels, word) or task.labels
        test_labels = labels_to_test(tested, task, labels, url)
    if not options.folds and tested is fitted:
        refuse_leak_between(fitted, labels)
    train = probed_records(fitted, labels, splits.fitted, shown)
    test = probed_records(tested, test_labels, splits.tested, shown)
    require_varying_labels(test_labels, splits.tested, tested)
    fold_N = assign_folds(fold_groups(fitted, train), options.folds) if options.folds else None
    remarks = [*labels.remarks, *leak_remarks(fitted, train, tested, test)]
    draws = {share: list(draws_of_share(train.patient_N, share)) for share in options.shares}
    used = outputs_to_score(task.kind, train, test, draws, fold_N)
    few_shares = set()
    for share, used_K in used.items():
        if has_few_patients(task.kind, test.y_NK[:, used_K], test.patient_N):
            few_shares.add(share)
    if few_shares:
        remarks.append(f"{TOO_FEW_NOTE} have no interval.")
    weight_NB, patient_B = bootstrap_weights(test.patient_N), test_labels.all_patients
    return ProbedTask(
        labels, train, test, draws, used, weight_NB, few_shares, patient_B, fold_N, remarks
    )


def labels_to_test(tested: Datasets, task: TaskConfig, labels: TaskLabels, url: str) -> TaskLabels:
    """Reads the labels of another dataset than the fitted one, for outputs of the same names, with
    a split of its own."""
    columns, classes = labels.task.columns, labels.task.classes
    return read_task(replace(task, columns=columns, classes=classes, labels=url), tested.all)


def leak_remarks(
    fitted: Datasets, train: ProbedRecords, tested: Datasets, test: ProbedRecords
) -> list[str]:
    """Remarks if another dataset's test has patients or ECGs of the fitted records."""
    if tested is fitted:
        return []
    trained, held = fitted.rows_by_dataset(np.sort(train.rows)), tested.rows_by_dataset(test.rows)
    for (number, learnt), (other, scored) in product(enumerate(trained), enumerate(held)):
        if shared := describe_overlap(fitted.all[number], learnt, tested.all[other], scored):
            return [
                f"Possible leakage: {shared} is in train or valid of --data and in test of --test-data."
            ]
    return []


def refuse_leak_between(data: Datasets, labels: TaskLabels) -> None:
    """Raises ConfigError if a record, patient or waveform is fitted on in one dataset and tested in
    another, as may happen if the datasets were made separately."""
    trained = data.rows_by_dataset(
        np.sort(np.concatenate([labels.all_rows(name) for name in FIT_SPLITS]))
    )
    refuse_leak(data.all, trained, data.rows_by_dataset(labels.all_rows("test")), Flag("--data"))


def outputs_to_score(
    kind: str,
    train: ProbedRecords,
    test: ProbedRecords,
    draws: dict[float, list[Array]],
    fold_N: Array | None,
) -> dict[float, Array]:
    """Returns `used_outputs` of a ProbedTask; ConfigError if nothing can be scored at a share."""
    used = {share: scorable_outputs(kind, train, test, draws[share], fold_N) for share in draws}
    for share, used_K in used.items():
        if not used_K.any():
            fewer = () if fold_N is None else (", or fewer ", Flag("--folds"))
            raise ConfigError(
                Flag("--share"),
                f" {share:g} of {len(np.unique(train.patient_N)):,} patients of train, {len(test.y_NK):,} "
                f"records of test: {KINDS[kind].why_share_is_too_small}: use a larger share",
                *fewer,
            )
    return used


def scorable_outputs(
    name: str,
    train: ProbedRecords,
    test: ProbedRecords,
    draws: Sequence[Array],
    fold_N: Array | None,
) -> Array:
    """bool [K]: True for outputs whose labels vary in test and wherever a probe is fitted."""
    used_K = KINDS[name].varying_outputs(test.y_NK)
    for draw in draws:
        for rows, _ in train_test_rows(draw, fold_N):
            used_K = used_K & KINDS[name].varying_outputs(train.y_NK[rows])
    return used_K


def labels_to_probe(data: Datasets, task: TaskConfig, splits: Sequence[str]) -> TaskLabels:
    """Reads the labels of a task; ConfigError if there is nothing to fit on."""
    if task.kind == "identity":
        raise ConfigError("is of patients: use identification, without a table")
    labels = read_task(task, data.all)
    if not any(len(labels.all_rows(split)) for split in splits):
        mend = ": a probe needs train and test" if len(splits) == 1 else ""
        if labels.role == "dx":
            mend += f"; {DX_ROLES_HINT}"
        name = labels.name or data.name
        raise ConfigError(f"{name}: no record is in the split {' or '.join(splits)}{mend}")
    require_varying_labels(labels, splits, data)
    return labels


def require_varying_labels(labels: TaskLabels, splits: Sequence[str], data: Datasets) -> None:
    kind, split = KINDS[labels.task.kind], splits[0]
    y_NK = np.concatenate([labels.all_y[labels.all_rows(name)] for name in splits])
    if kind.varying_outputs(y_NK).any():
        return
    mend = f"; {EMPTY_CELL_NOTE}" if kind.has_thresholds and (y_NK > 0).any() else ""
    raise ConfigError(
        f"{labels.name or data.name}: {kind.why_nothing_varies(split)}: nothing to learn or to score{mend}"
    )


def task_of_table(
    url: str, columns: Sequence[str] = (), kind: TaskKind | None = None, positive: str = ""
) -> TaskConfig:
    """Returns the task of a label table; its kind is guessed if it is None."""
    name = table_name(url)[:64]
    task = TaskConfig(name, labels=url, columns=tuple(columns), positive=positive)
    return replace(task, kind=kind) if kind else guess_kind(task)


def _task_of_word(word: str, options: BenchOptions) -> TaskConfig:
    """Returns the named task with its label table, or the task of a table, whose kind is guessed.
    ConfigError if a shipped task needs a table and there is none."""
    if word.endswith(SHEET_SUFFIXES) or is_workbook(word):
        return task_of_table(word, options.columns, options.kind, options.positive)
    url, is_shipped = find_label_table(options.labels, word), word in shipped_configs("tasks")
    if url and not is_shipped and not Path(word).exists():
        raise ConfigError(
            "is no shipped task: to probe the table, give ", Flag("--tasks"), f" {url}"
        )
    task = load_task(word)
    needed = task.split == "column" or not set(task.columns) <= set(DATASET_COLUMNS)
    if is_shipped and needed and not url:
        absent, folder = ("needs ", Flag("--labels"), " DIR"), options.labels or "DIR"
        if options.labels:
            absent = f"no {word}.parquet in ", Flag("--labels"), f" {options.labels}"
        command = f"omnilead labels {word.partition('-')[0]} SRC --out {folder}"
        raise ConfigError(*absent, f": `{command}` writes it")
    return replace(task, labels=url or task.labels)


def datasets_text(data: Data | Sequence[Data]) -> str:
    """Returns the datasets as text, for a command line or a table."""
    return " ".join(
        one.root.url if isinstance(one, Dataset) else shlex.quote(os.fspath(one))
        for one in as_list(data)
    )


def require_labels(option: str, folder: str) -> None:
    if not Path(workbook_and_sheet(folder)[0]).exists():  # "" is the current folder
        raise ConfigError(option, f" {folder}: no such folder or table")


def find_label_table(folder: str, word: str) -> str:
    """Returns the label table of a task: in a folder written by `omnilead labels`, or `folder`
    itself; "" if there is none."""
    if is_table(folder):
        return folder
    names = [Path(word).stem]
    if not is_table(word):
        names.append(word.partition("-")[0])  # code15-mortality is in the table code15
    paths = [Path(folder, name + suffix) for name in names for suffix in TABLE_SUFFIXES]
    return next((str(path) for path in paths if folder and path.is_file()), "")
