"""Plans a comparison of models: reads its tasks, with the records and labels of their probes, and the
crops of identification.

    plan = plan_bench(BenchOptions(...), shown)  # ConfigError if a task does not suit the data
    plan.tasks["sex"].train                      # ProbedRecords
    plan.rows_to_embed[plan.tested]              # crops that every model embeds
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
from .identification import GalleryAndProbes, crops_to_identify
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
from .results import FEW_TESTED_ECGS, load_task

IDENTIFICATION = "identification"
TABLE_SUFFIXES = (".parquet", ".csv")
# A name with such an ending is that of a table, not of a shipped task. An .xls file cannot be read;
# it is listed so that the error says this, not that the task is unknown
TABLE_LIKE_SUFFIXES = (*TABLE_SUFFIXES, ".tsv", ".xls")


@dataclass(frozen=True)
class BenchOptions:
    """The options of `omnilead bench`. downstream.bench explains them."""

    models: tuple[str, ...]
    data: Data | Sequence[Data]
    out: Path
    test_data: Data | Sequence[Data] = ()  # () if probes are tested on `data`, too
    tasks: tuple[str, ...] = ()
    labels: str = ""
    columns: tuple[str, ...] = ()
    kind: TaskKind | None = None
    positive: str = ""
    test_labels: str = ""
    leads: tuple[str, ...] = ("12",)  # without repeats
    fit_leads: str = ""  # leads that probes are fitted on; "": those that they are tested on
    # Shares of the patients of train and valid; ascending, without repeats
    shares: tuple[float, ...] = (1.0,)
    folds: int | None = None
    reader: str = "linear"
    seed: int = 0
    anonymous: bool = False
    embedding: EmbedOptions = field(default_factory=EmbedOptions)

    @property
    def shown_leads(self) -> tuple[str, ...]:
        """Returns all sets of leads that models are shown: those of the test, and those that probes
        are fitted on."""
        return (*self.leads, self.fit_leads) if self.fit_leads else self.leads


class ProbeSplits(NamedTuple):
    """The names of the splits that probes are fitted on and tested on."""

    needed: Sequence[str]  # at least one of these splits must have labelled records
    fitted: Sequence[str]
    tested: Sequence[str]


TRAIN_TEST_SPLITS = ProbeSplits(("train",), FIT_SPLITS, ("test",))
CROSS_VALIDATION_SPLITS = ProbeSplits(SPLITS[1:], SPLITS[1:], SPLITS[1:])


class ProbedTask(NamedTuple):
    """A task of the comparison: the records and labels that its probes are fitted on and tested
    on."""

    labels: TaskLabels
    # The records of train and valid. With --folds, all labelled records, which are also `test`
    train: ProbedRecords
    test: ProbedRecords
    draws: dict[float, list[Array]]  # by share: for each draw, the rows of `train` to fit on
    # By share, bool [K]: True for outputs that can be fitted and scored, because their labels
    # differ in the test and in each draw
    used_outputs: dict[float, Array]
    weight_NB: Array  # how often each test record counts in each bootstrap weighting
    few_shares: set[float]  # shares at which the test has too few patients for intervals
    patient_B: Array  # the patient of each crop of the tested datasets
    fold_N: Array | None = None  # with --folds, the fold in which each record is tested
    remarks: Sequence[str] = ()

    @property
    def kind(self) -> str:
        return self.labels.task.kind

    @property
    def fit_count(self) -> int:
        """Returns the number of probes that are fitted for a model."""
        draws = (draw for of_share in self.draws.values() for draw in of_share)
        return sum(len(train_test_rows(draw, self.fold_N)) for draw in draws)

    @property
    def has_small_test(self) -> bool:
        return len(self.test.y_NK) < FEW_TESTED_ECGS

    def scored_facts(self, share: float, samples: Samples) -> Facts:
        """Returns the counts of records, patients and draws, and the values of each class, as
        bench.json has them."""
        draws, used_K = self.draws[share], self.used_outputs[share]
        names, people = np.array(self.labels.classes), np.unique(self.test.patient_N)
        used = names[used_K].tolist()
        per_class = {}
        for metric, value_KB in samples.items():
            # A regression of several columns is skipped, since its values are means over the columns
            if len(value_KB) == len(used):
                per_class[metric] = dict(zip(used, value_KB[:, 0].tolist(), strict=True))
        return {
            "n": len(self.test.y_NK),
            # None if some patients are unknown
            "patients": len(people) if (people & 1).all() else None,
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
    identities: GalleryAndProbes | None
    shown: ShownLeads
    fit_leads: str  # leads shown while a probe is fitted; "": the leads of the test

    @property
    def rows_to_embed(self) -> dict[Datasets, Array]:
        """Returns {datasets: numbers of the crops that every model embeds}."""
        none = np.zeros(0, np.int64)
        rows = {self.fitted: [none], self.tested: [none]}  # `fitted` and `tested` may be one key
        for task in self.tasks.values():
            rows[self.fitted].append(task.train.rows)
            rows[self.tested].append(task.test.rows)
        if self.identities:
            rows[self.tested] += [self.identities.gallery, self.identities.probe]
        return {data: np.concatenate(parts) for data, parts in rows.items()}


def plan_bench(options: BenchOptions, shown: ShownLeads) -> BenchPlan:
    """Reads the data, labels and tasks of the comparison; ConfigError if a task or its labels do
    not suit the data."""
    words = typed_tasks(options)
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
            task = read_probed_task(word, fitted, tested, options, shown)
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
    """Returns True if this is the name of a file of labels, False if it is that of a folder or of a
    shipped task."""
    return name.endswith(TABLE_SUFFIXES) or is_workbook(name)


def separate_labels_and_tasks(
    labels: str | Sequence[str], tasks: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """Returns the values of --labels and --tasks. If --labels names several tables, each of them is
    a task, and --labels becomes empty."""
    names = (labels,) if isinstance(labels, str) else tuple(labels)
    if len(names) < 2:
        return "".join(names), tasks
    if tasks or not all(map(is_table, names)):
        raise ConfigError(
            Flag("--labels"),
            f" {' '.join(names)}: several values must all be tables, and cannot stand beside ",
            Flag("--tasks"),
            ": give one table or one folder, and name tables that are tasks with ",
            Flag("--tasks"),
        )
    return "", names


def typed_tasks(options: BenchOptions) -> Sequence[str]:
    """Returns the tasks as the user typed them; ConfigError if there is no task, or if an option
    has no effect."""
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
            " tests only the ECGs of ",
            Flag("--data"),
            ": leave ",
            Flag("--test-data"),
            " out",
        )
    return words


def read_probed_task(
    word: str, fitted: Datasets, tested: Datasets, options: BenchOptions, shown: ShownLeads
) -> ProbedTask:
    """Reads a task of the comparison, with the records and labels that its probes are fitted on and
    tested on."""
    task = _task_from_argument(word, options)
    splits = CROSS_VALIDATION_SPLITS if options.folds else TRAIN_TEST_SPLITS
    if options.folds and task.labels and task.split != "roles":
        # A column `split` would leave out the records for which it is empty, so it is not used
        task = replace(task, split="8:1:1")
    test_labels = labels = read_labels_to_probe(fitted, task, splits.needed)
    if tested is not fitted:
        url = find_label_table(options.test_labels, word) or task.labels
        test_labels = read_labels_to_test(tested, task, labels, url)
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


def read_labels_to_test(
    tested: Datasets, task: TaskConfig, labels: TaskLabels, url: str
) -> TaskLabels:
    """Reads the labels of the tested dataset, which is not the fitted one. They have the outputs of
    `labels`, and a split of their own."""
    columns, classes = labels.task.columns, labels.task.classes
    return read_task(replace(task, columns=columns, classes=classes, labels=url), tested.all)


def leak_remarks(
    fitted: Datasets, train: ProbedRecords, tested: Datasets, test: ProbedRecords
) -> list[str]:
    """Returns a remark if the test of another dataset has patients or ECGs of the fitted records;
    else none."""
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
    """Raises ConfigError if a record, patient or waveform is in train or valid of one dataset and
    in test of another, which can happen if the datasets were made separately."""
    trained = data.rows_by_dataset(
        np.sort(np.concatenate([labels.rows_of_all_datasets(name) for name in FIT_SPLITS]))
    )
    refuse_leak(
        data.all, trained, data.rows_by_dataset(labels.rows_of_all_datasets("test")), Flag("--data")
    )


def outputs_to_score(
    kind: str,
    train: ProbedRecords,
    test: ProbedRecords,
    draws: dict[float, list[Array]],
    fold_N: Array | None,
) -> dict[float, Array]:
    """Returns the `used_outputs` of a ProbedTask, {share: bool [K]}; ConfigError if no output can be
    scored at some share."""
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
    """Returns bool [K]: True for outputs whose labels differ in the test and in every set of
    records that a probe is fitted on. `name`: the kind of task."""
    used_K = KINDS[name].varying_outputs(test.y_NK)
    for draw in draws:
        for rows, _ in train_test_rows(draw, fold_N):
            used_K = used_K & KINDS[name].varying_outputs(train.y_NK[rows])
    return used_K


def read_labels_to_probe(data: Datasets, task: TaskConfig, splits: Sequence[str]) -> TaskLabels:
    """Reads the labels of a task. ConfigError if none of these splits has labelled records, or if
    all labels of each output are the same in them."""
    if task.kind == "identity":
        raise ConfigError(
            "is a task of identifying patients: use `identification`, which takes no table"
        )
    labels = read_task(task, data.all)
    if not any(len(labels.rows_of_all_datasets(split)) for split in splits):
        mend = ": a probe needs train and test" if len(splits) == 1 else ""
        if labels.role == "dx":
            mend += f"; {DX_ROLES_HINT}"
        name = labels.name or data.name
        raise ConfigError(f"{name}: no record is in the split {' or '.join(splits)}{mend}")
    require_varying_labels(labels, splits, data)
    return labels


def require_varying_labels(labels: TaskLabels, splits: Sequence[str], data: Datasets) -> None:
    """Raises ConfigError if all labels of each output are the same in these splits."""
    kind, split = KINDS[labels.task.kind], splits[0]
    y_NK = np.concatenate([labels.all_y[labels.rows_of_all_datasets(name)] for name in splits])
    if kind.varying_outputs(y_NK).any():
        return
    mend = f"; {EMPTY_CELL_NOTE}" if kind.has_thresholds and (y_NK > 0).any() else ""
    raise ConfigError(
        f"{labels.name or data.name}: {kind.why_nothing_varies(split)}: nothing to learn or to score{mend}"
    )


def task_of_table(
    url: str, columns: Sequence[str] = (), kind: TaskKind | None = None, positive: str = ""
) -> TaskConfig:
    """Returns the task of a label table. Its kind is guessed if `kind` is None."""
    name = table_name(url)[:64]
    task = TaskConfig(name, labels=url, columns=tuple(columns), positive=positive)
    return replace(task, kind=kind) if kind else guess_kind(task)


def _task_from_argument(word: str, options: BenchOptions) -> TaskConfig:
    """Returns the task that a word after --tasks names: a shipped task with its label table, or a
    table, whose kind is guessed. ConfigError if a shipped task needs a table that is not there."""
    if word.endswith(TABLE_LIKE_SUFFIXES) or is_workbook(word):
        return task_of_table(word, options.columns, options.kind, options.positive)
    url, is_shipped = find_label_table(options.labels, word), word in shipped_configs("tasks")
    if url and not is_shipped and not Path(word).exists():
        raise ConfigError(
            "is no shipped task, but a table has this name: to probe it, give ",
            Flag("--tasks"),
            f" {url}",
        )
    task = load_task(word)
    needed = task.split == "column" or not set(task.columns) <= set(DATASET_COLUMNS)
    if is_shipped and needed and not url:
        absent, folder = ("needs ", Flag("--labels"), " DIR"), options.labels or "DIR"
        if options.labels:
            absent = f"no {word}.parquet in ", Flag("--labels"), f" {options.labels}"
        command = f"omnilead labels {word.partition('-')[0]} SRC --out {folder}"
        raise ConfigError(*absent, f": `{command}` writes this table")
    return replace(task, labels=url or task.labels)


def datasets_text(data: Data | Sequence[Data]) -> str:
    """Returns the datasets' paths or addresses as one text, for a command line or a table."""
    return " ".join(
        one.root.url if isinstance(one, Dataset) else shlex.quote(os.fspath(one))
        for one in as_list(data)
    )


def require_labels(option: str, folder: str) -> None:
    """Raises ConfigError if there is no such folder or table. `option`: the option that names
    it."""
    # If no table was given, `folder` is "", which Path takes for the current folder
    if not Path(workbook_and_sheet(folder)[0]).exists():
        raise ConfigError(option, f" {folder}: no such folder or table")


def find_label_table(folder: str, word: str) -> str:
    """Returns the path of the label table of a task; "" if there is none. `folder`: a folder that
    `omnilead labels` has written, or a table, which is returned itself."""
    if is_table(folder):
        return folder
    names = [Path(word).stem]
    if not is_table(word):
        # The table of a task such as code15-mortality may be called code15
        names.append(word.partition("-")[0])
    paths = [Path(folder, name + suffix) for name in names for suffix in TABLE_SUFFIXES]
    return next((str(path) for path in paths if folder and path.is_file()), "")
