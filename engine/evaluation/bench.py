"""Compares frozen embeddings of several models by linear probes and by patient identification.

    found = bench(["A=RUN", "hf://org/name"], "DATASET", "OUT", ["sex", "identification"], leads=["12", "1"], share=[0.1, 1])
    found["rows"][0]            # model, task, leads, share, noise, metrics, intervals, n, patients, draws, per_class, left_out
    found["differences"][0]     # model, against, task, leads, share, noise, metric, difference, interval

Baselines are random weights of the same architectures, and what needs no pre-training: the mean beat,
measurements, gradient boosting on both, and MiniRocket.
A probe is fitted on a share of the patients of train and valid, and scored on test, with one row per
record. A smaller share is a subset of a larger one; small shares are drawn several times and
averaged over the draws. Intervals (95 %) and differences use the same bootstrap resamples
of test patients, and of draws, for all models. Only test records and probes of identification get
noise. Identification compares the first 5 s, by cosine and after whitening by the covariance within
records.

Axes as in engine.evaluation.probe; B: weightings of the test records, of which the first counts
each record once.
"""

import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io.terminal import interactive, tell

from ..data import counter
from ..data.leakage import overlap
from ..data.patients import patient_ids
from ..data.seen import seen_in
from ..inference.commands import refuse_ranks
from ..inference.trained_model import load
from ..model.input import Input
from ..settings.commandline import writing
from ..settings.errors import ConfigError, Facts
from ..settings.files import shipped
from ..settings.leads import parse_leads
from ..tasks.config import TaskConfig
from ..tasks.kinds import KINDS
from ..tasks.labels import OWN_COLUMNS, TaskLabels, data_records, guess, read_task
from ..training.metrics import (
    TOO_FEW,
    Array,
    exact_interval,
    few_patients,
    identification,
    statistic_of,
    weighted_measures,
)
from .boosted import INSTALL, installed
from .embedders import (
    BOOSTED,
    READERS,
    ROCKET,
    Compared,
    Embedder,
    Vectors,
    embedded,
    name_and_folders,
    reading,
    rocket,
    rows_to_compare,
)
from .probe import (
    Probe,
    ProbeData,
    fit_scaled,
    labels_to_probe,
    require_free,
    require_unlike,
    save_with_head,
    unlike,
)
from .results import EvalOptions, identity_rows, leakage, load_task, nullable, require, shown_input

IDENTIFICATION = "identification"
TABLES = (".parquet", ".csv")
RESAMPLES = 1000
ROCKET_CROPS = 20_000  # MiniRocket keeps 80 kB of each
DRAWS = 5  # for shares up to 0.1; for larger ones as many as half of the labels allow
WITHIN = 4096  # pre-training crops that the covariance within records is estimated from
LIMITS = {"share": (1e-4, 1.0), "noise": (0.0, 20.0)}
DEFAULTS = {
    "test_data": "",
    "readout": "",
    "labels": "",
    "test_labels": "",
    "fit_leads": "",
    "seed": 0,
    "reader": "linear",
    "head": "",
    "code": False,
    "anonymous": False,
}
DEFAULTS |= {"device": "auto", "precision": "auto", "batch": None}
Samples = dict[str, Array]  # metrics [B]
Scored = tuple[Facts, Samples]  # facts, and metrics under all weightings
Found = dict[tuple[Any, ...], Scored]  # by model, task, leads, share and noise


class ProbedRecords(NamedTuple):
    """The records of one split."""

    rows: Array  # crops, grouped by record
    begins: Array  # where each record begins in `rows`
    y_NK: Array
    patient_N: Array

    def means(self, vectors: Vectors) -> Array:
        """Mean embedding of each record, over all its windows."""
        _, halves_B, c_BSD = vectors.of(self.rows)
        return np.asarray(
            np.add.reduceat(c_BSD.sum(1), self.begins)
            / np.add.reduceat(halves_B, self.begins)[:, None]
        )

    def windows(self, vectors: Vectors) -> tuple[Array, Array]:
        """Embeddings of all windows, and the record of each."""
        _, halves_B, c_BSD = vectors.of(self.rows)
        there_BS = np.arange(c_BSD.shape[1]) < halves_B[:, None]
        record_B = np.searchsorted(self.begins, np.arange(len(self.rows)), "right") - 1
        return c_BSD[there_BS], np.repeat(record_B, halves_B)


class ProbedTask(NamedTuple):
    labels: TaskLabels
    parts: tuple[ProbedRecords, ProbedRecords]  # train with valid, test
    draws: dict[float, list[Array]]  # by share: the drawn training records
    used: dict[
        float, Array
    ]  # by share, bool [K]: outputs whose labels vary in test and in each draw
    weight_NB: Array  # of the test records
    few: set[float]  # shares of which the test has too few patients for intervals
    patient_B: Array  # of all crops of the tested dataset

    @property
    def kind(self) -> str:
        return self.labels.task.kind


class Identities(NamedTuple):
    gallery: Array  # crops
    probe: Array
    within: Array  # crops for pre-training, with two halves
    patient_B: Array  # of all crops
    weight_NB: Array  # of the probes


class Work(NamedTuple):
    """What every model is scored on."""

    fitted: Dataset
    tested: Dataset
    tasks: dict[str, ProbedTask]  # by name
    persons: Identities | None
    noise: list[float]
    fit_leads: str  # shown while a probe is fitted; "": those that are shown in the test

    @property
    def test_rows(self) -> Array:
        """Crops that are embedded with noise."""
        rows = [task.parts[1].rows for task in self.tasks.values()]
        if self.persons:
            rows.append(self.persons.probe)
        return np.unique(np.concatenate(rows))

    @property
    def clean_rows(self) -> dict[Dataset, Array]:
        """Crops that are embedded without noise."""
        rows: dict[Dataset, list[Array]] = {self.fitted: [], self.tested: []}  # may be one key
        for task in self.tasks.values():
            rows[self.fitted].append(task.parts[0].rows)
        rows[self.tested].append(self.test_rows)
        if self.persons:
            rows[self.fitted].append(self.persons.within)
            rows[self.tested].append(self.persons.gallery)
        return {dataset: np.concatenate(parts) for dataset, parts in rows.items()}


def bench(
    models: Sequence[str], data: str, out: str | Path, tasks: Sequence[str], leads: Sequence[str] = ("12",),
    share: Sequence[float] = (1.0,), noise: Sequence[float] = (0.0,), **options: Any,
) -> Facts:  # fmt: skip
    """Returns the content of OUT/bench.json. `models`: folders, or NAME=FOLDER. `tasks`: names
    of configs/tasks, label tables, and identification. `options`: DEFAULTS, as in the command."""
    refuse_ranks("a comparison is")
    args = Namespace(**{**DEFAULTS, **options, "leads": list(dict.fromkeys(leads))})
    args.shown = [*args.leads, *filter(None, [args.fit_leads])]
    require_within("share", share)
    require_within("noise", noise)
    compared_rows = rows_to_compare(models, args)
    args.widest = widest_input(compared_rows)
    work = planned(data, tasks, sorted(set(share)), sorted(set(noise)), args)
    require_one_probe(compared_rows, work, args)
    notes = remarks(compared_rows, args, work)  # refuses bad input early
    compared_rows = affordable(compared_rows, work, notes)
    scores: Found = {}
    for number, row in enumerate(compared_rows, 1):
        for lead in args.leads:
            scores.update(row_scores(row, lead, work, Path(out, "parts")))
        if not interactive():  # there are no progress bars
            tell(f"bench: {number} of {len(compared_rows)} done: {row.name}")
    random = {row.name: row.random for row in compared_rows}
    document = {
        "data": data,
        "fingerprint": work.fitted.fingerprint,
        "test_data": args.test_data or None,
        "seed": args.seed,
        "models": random,
        "fit_leads": args.fit_leads or None,
        "readouts": readouts(compared_rows, args.readout),
        "notes": notes,
        **compared(scores, random),
    }
    if args.head:  # last: a run that is interrupted before can be run again
        save_head(models[0], compared_rows[0], work, args, Path(out, "parts"))
    return dict(nullable(document))


def widest_input(rows: Sequence[Compared]) -> Input:
    """The input with the longest window."""
    members = chain.from_iterable(row.members for row in rows)
    inputs = [embedder.input for embedder in chain.from_iterable(members)]
    return max(inputs, key=lambda model_input: model_input.window_s)


def readouts(rows: Sequence[Compared], asked: str) -> dict[str, str]:
    found = {}
    for row in rows:
        for model in row.trained:
            found[row.name] = "+".join(model.readout_of(asked))
    return found


def require_within(name: str, values: Sequence[float]) -> None:
    low, high = LIMITS[name]
    for value in values:
        if not low <= value <= high:
            raise ConfigError(f"--{name} {value:g}: must be from {low:g} to {high:g}")


def planned(
    data: str, words: Sequence[str], shares: list[float], noise: list[float], args: Namespace
) -> Work:
    require_labels("--labels", args.labels)
    require_labels("--test-labels", args.test_labels)
    fitted = Dataset.open(data, args.anonymous)
    tested = Dataset.open(args.test_data, args.anonymous) if args.test_data else fitted
    tasks: dict[str, ProbedTask] = {}
    for word in words:
        if word == IDENTIFICATION:
            continue
        task = task_to_probe(word, fitted, tested, shares, args)
        name = task.labels.task.name
        if name in tasks:
            raise ConfigError(
                f"--tasks {' '.join(words)}: two tasks have the same name: leave one out, or "
                "rename its table"
            )
        tasks[name] = task
    persons = identities(fitted, tested, args) if IDENTIFICATION in words else None
    return Work(fitted, tested, tasks, persons, noise, args.fit_leads)


def row_scores(row: Compared, lead: str, work: Work, folder: Path) -> Found:
    """The scores of a row that is shown these leads: means over its members."""
    found: Found = {}
    if not work.tasks and not row.identifies:
        return found
    members = row.members
    if not members:
        task = next(iter(work.tasks.values()))
        members = [(rocket(work.fitted, task.parts[0].rows, work.fit_leads or lead),)]
    each = [scores_of(row, member, lead, work, folder) for member in members]
    for key, (facts, _) in each[0].items():
        samples: Samples = {}
        # Every row draws its own members
        for scores, weight_B in weighted(each, seed=crc32((row.members_of or row.name).encode())):
            add_weighted(samples, scores[key][1], weight_B)
        if len(each) > 1:
            own = {name: [float(scores[key][1][name][0]) for scores in each] for name in samples}
            classes = [scores[key][0].get("per_class", {}) for scores in each]
            facts = facts | {"each": own, "per_class": mean_per_class(classes)}
        found[row.name, *key] = facts, samples
    return found


def mean_per_class(each: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Means over members, by metric and class."""
    means: dict[str, dict[str, float]] = {}
    for metric, classes in each[0].items():
        means[metric] = {name: fmean(of[metric][name] for of in each) for name in classes}
    return means


def scores_of(
    row: Compared, member: tuple[Embedder, ...], lead: str, work: Work, folder: Path
) -> Found:
    """The scores of one member, by task, leads, share and noise."""
    clean: dict[Dataset, Vectors] = {}
    for dataset, rows in work.clean_rows.items():
        clean[dataset] = embedded(member, dataset, rows, 0.0, lead, folder)
    tests = {0.0: clean[work.tested]}
    for level in filter(None, work.noise):
        tests[level] = embedded(member, work.tested, work.test_rows, level, lead, folder)
    tests = {level: tests[level] for level in work.noise}
    within, known = clean[work.fitted], clean[work.tested]
    fit = within
    if work.fit_leads:
        fit_rows = work.clean_rows[work.fitted]
        fit = embedded(member, work.fitted, fit_rows, 0.0, work.fit_leads, folder)

    scores: Found = {}
    for name, task in work.tasks.items():
        for (share, level), of_task in probe_scores(task, fit, tests, row.probe):
            scores[name, lead, share, level] = of_task
    if work.persons and row.identifies:
        for level, test in tests.items():
            # Whitened on the leads that are compared
            of_task = identified(work.persons, within, known, test, member[0].compared)
            scores[IDENTIFICATION, lead, None, level] = of_task
    return scores


def remarks(rows: Sequence[Compared], args: Namespace, work: Work) -> list[str]:
    """What a reader must know of the labels, data leakage, different preprocessing and missing
    leads; ConfigError if data do not suit a model."""
    notes = []
    for name, task in work.tasks.items():
        notes += [f"{name}: {note}" for note in task.labels.remarks]
    models = [(row.name, model) for row in rows if row.random for model in row.trained]
    for (name, model), lead, dataset in product(models, args.shown, work.clean_rows):
        warned = shown_input(model, dataset, EvalOptions(leads=lead))[1]
        notes += [f"{name}: {note}" for note in warned]
    for dataset in work.clean_rows:
        if lost := int((~measured(dataset, args)).sum()):
            notes.append(
                f"{dataset.root.url}: {lost:,} crops are left out: none of the shown leads was "
                f"recorded in them{args.widest.too_short}."
            )
    # Which models have seen the patients that they are tested on
    tested = {name: (task.parts[1].rows, task.patient_B) for name, task in work.tasks.items()}
    if persons := work.persons:
        crops = np.concatenate([persons.gallery, persons.probe])
        tested[IDENTIFICATION] = crops, persons.patient_B
    for (name, model), task_name in product(models, tested):
        warned = leakage(model, work.tested, *tested[task_name])
        notes += [f"{name}, {task_name}: {note}" for note in warned]
    if args.fit_leads:
        notes.append(f"Probes were fitted on leads {args.fit_leads}.")
    return list(dict.fromkeys(notes))  # members of a row have the same notes


def affordable(rows: list[Compared], work: Work, notes: list[str]) -> list[Compared]:
    """The rows that this machine can make; notes say which are left out."""
    if not installed():
        notes.append(f"{BOOSTED}: left out: {INSTALL}")
    crops = sum(len(np.unique(rows)) for rows in work.clean_rows.values())
    if crops <= ROCKET_CROPS:
        return rows
    notes.append(f"{ROCKET}: left out: there are more than {ROCKET_CROPS:,} crops.")
    return [row for row in rows if row.members]


def require_one_probe(rows: Sequence[Compared], work: Work, args: Namespace) -> None:
    """ConfigError unless --head can be written: one probe, fitted on known labels of every class."""
    if not args.head:
        return
    require_free(Path(args.head), "--head")
    leads = [args.fit_leads] if args.fit_leads else args.leads
    models = [row for row in rows if row.random not in ("", row.name)]
    for option, count in (
        ("--models", sum(len(row.members) for row in models)),
        ("--tasks", len(work.tasks)),
        ("--leads", len(leads)),
    ):
        if count != 1:
            raise ConfigError(
                f"--head {args.head}: is one probe of one model, but {option} names {count}: use one"
            )
    (task,) = work.tasks.values()
    unknown_K = np.isnan(task.parts[0].y_NK).all(0)
    if unknown_K.any():
        names = ", ".join(np.array(task.labels.classes)[unknown_K])
        raise ConfigError(
            f"{task.labels.name}: no record of train and valid has a known label in {names}: leave "
            "the column out, or fill in its cells"
        )


def save_head(text: str, row: Compared, work: Work, args: Namespace, folder: Path) -> None:
    """Writes the model `text` with its probe as a head, fitted on all labels of train and valid; a
    boosted one on windows, since a model scores these, with the measurements and the mean beat."""
    (task,), ((embedder, *_),) = work.tasks.values(), row.members
    model: Any = embedder.model
    readout = model.readout_of(args.readout)
    if args.reader == "boosted":
        more = [part for part in ("rhythm", "waveform") if part not in readout]
        readout = model.readout_of("+".join([*readout, *more]))
    train = task.parts[0]
    leads = args.fit_leads or args.leads[0]
    # The model will measure rhythm itself, in its own leads
    vectors = embedded([reading(embedder, readout)], work.fitted, train.rows, 0.0, leads, folder)
    x_ND, record_N = train.means(vectors), np.arange(len(train.y_NK))
    if args.reader == "boosted":
        x_ND, record_N = train.windows(vectors)
    data = ProbeData(x_ND, train.y_NK[record_N], train.patient_N[record_N], x_ND[:1], task.kind)
    fitted = seen_in(work.fitted, np.sort(train.rows), "labelled")
    if embedder.precision == "bf16":  # its weights were rounded
        model = load(name_and_folders(text)[1][0], args.code)
    out = Path(args.head)
    with writing(out, "--head"):
        save_with_head(
            model,
            embedder.input.limited_to(leads),
            readout,
            task.labels,
            READERS[args.reader],
            data,
            fitted,
            out,
        )


def measured(dataset: Dataset, args: Namespace) -> Array:
    """bool [crops]: every set of leads has a recorded lead, and every model a window, so that all
    rows are of the same ECGs."""
    inputs = [replace(args.widest, seen=parse_leads(lead)) for lead in args.shown]
    return np.asarray(np.all([one.usable(dataset) for one in inputs], axis=0))


def task_to_probe(
    word: str, fitted: Dataset, tested: Dataset, shares: Sequence[float], args: Namespace
) -> ProbedTask:
    """`tested`: if it is another dataset, it has outputs of the same names, and its own test
    split."""
    try:
        labels, parts, patient_B = _labels_and_parts(word, fitted, tested, args)
    except ConfigError as error:
        raise ConfigError(f"--tasks {word}: {error}") from None
    train, test = parts
    kind = labels.task.kind
    draws = {share: list(drawn(train.patient_N, share)) for share in shares}
    used: dict[float, Array] = {}
    for share in shares:
        in_draws = [unlike(kind, train.y_NK[rows]) for rows in draws[share]]
        used[share] = unlike(kind, test.y_NK) & np.all(in_draws, axis=0)
        if not used[share].any():
            lack = "no class has positives and negatives in both"
            if kind == "survival":
                lack = "no event in one of them"
            raise ConfigError(
                f"--tasks {word}: --share {share:g} of {len(np.unique(train.patient_N)):,} "
                f"patients of train, {len(test.y_NK):,} records of test: {lack}: use a larger share"
            )
    few = {
        share
        for share, used_K in used.items()
        if few_patients(kind, test.y_NK[:, used_K], test.patient_N)
    }
    if few:
        labels.remarks.append(f"{TOO_FEW} have no interval.")
    return ProbedTask(labels, parts, draws, used, resampled(test.patient_N), few, patient_B)


def _labels_and_parts(
    word: str, fitted: Dataset, tested: Dataset, args: Namespace
) -> tuple[TaskLabels, tuple[ProbedRecords, ProbedRecords], Array]:
    """The labels of the fitted dataset; the records of train with valid, and of test; the patients of
    the tested dataset's crops."""
    task = _task_named(word, args)
    labels = labels_to_probe(fitted, task)
    test_labels = labels
    if tested is not fitted:
        url = table_of(args.test_labels, word) or task.labels
        columns, classes = labels.task.columns, labels.task.classes
        test_task = replace(task, columns=columns, classes=classes, labels=url)
        test_labels = read_task(test_task, [tested])
    train = records_of(fitted, labels, ("train", "valid"), args)
    test = records_of(tested, test_labels, ("test",), args)
    require_unlike(test_labels, "test", tested)
    if tested is not fitted:
        shared = overlap(fitted, np.sort(train.rows), tested, test.rows)
        if shared:
            labels.remarks.append(
                f"Possible leakage: {shared} is in train or valid of --data and in test of "
                "--test-data."
            )
    return labels, (train, test), test_labels.patients[0]


def _task_named(word: str, args: Namespace) -> TaskConfig:
    """A task with its label table, or that of a table, whose kind is guessed. ConfigError if a
    shipped task needs a table and there is none."""
    if word.endswith(TABLES):
        return guess(TaskConfig(Path(word).stem[:64], labels=word))
    url, known = table_of(args.labels, word), word in shipped("tasks")
    if url and not known and not Path(word).exists():
        raise ConfigError(f"is no shipped task: to probe the table, give --tasks {url}")
    task = load_task(word)
    needed = task.split == "column" or not set(task.columns) <= set(OWN_COLUMNS)
    if known and needed and not url:
        absent = (
            f"no {word}.parquet in --labels {args.labels}" if args.labels else "needs --labels DIR"
        )
        made = f"omnilead labels {word.partition('-')[0]} SRC --out {args.labels or 'DIR'}"
        raise ConfigError(f"{absent}: `{made}` writes it")
    return replace(task, labels=url or task.labels)


def require_labels(option: str, folder: str) -> None:
    if not Path(folder).exists():  # "" is this one
        raise ConfigError(f"{option} {folder}: no such folder or table")


def table_of(folder: str, word: str) -> str:
    """The label table of a task, in a folder written by `omnilead labels` or `folder` itself; "" if
    there is none."""
    if folder.endswith(TABLES):
        return folder
    names = [Path(word).stem]
    if not word.endswith(TABLES):
        names.append(word.partition("-")[0])  # code15-mortality is in the table code15
    paths = [Path(folder, name + suffix) for name in names for suffix in TABLES]
    return next((str(path) for path in paths if folder and path.is_file()), "")


def records_of(
    dataset: Dataset, labels: TaskLabels, splits: Sequence[str], args: Namespace
) -> ProbedRecords:
    rows = np.concatenate([labels.rows(0, split) for split in splits])
    rows = rows[measured(dataset, args)[rows]]
    if not len(rows):
        raise ConfigError(
            f"{labels.name or dataset.root.url}: no record of {dataset.root.url} is in the split "
            f"{splits[0]}"
        )
    record_B = data_records([dataset]).key_of_crop
    rows = rows[np.argsort(record_B[rows], kind="stable")]
    begins = np.flatnonzero(np.diff(record_B[rows], prepend=-1))
    first = rows[begins]
    return ProbedRecords(rows, begins, labels.y[0][first], labels.patients[0][first])


def drawn(patient_N: Array, share: float) -> Iterator[Array]:
    """For each draw, the rows of a share of the patients. A smaller share is a subset of a larger
    one."""
    patients = np.unique(patient_N)
    for draw in range(max(1, min(DRAWS, int(0.5 / share)))):
        order = np.argsort(counter.uniform(0, counter.RandomStream.LABELS, draw, patients))
        yield np.flatnonzero(
            np.isin(patient_N, patients[order[: max(1, round(share * len(patients)))]])
        )


def weighted(draws: Sequence[Any], seed: int = 1) -> Iterator[tuple[Any, Array]]:
    """Each draw with its weights [B]: in the mean over the draws, and in resamples. These have
    one draw fewer, so that their means vary as means of all draws do (Rao and Wu 1988)."""
    n, fewer = len(draws), max(1, len(draws) - 1)
    weight_BR = np.random.default_rng(seed).multinomial(fewer, np.full(n, 1 / n), RESAMPLES) / fewer
    return zip(draws, np.vstack([np.full(n, 1 / n), weight_BR]).T, strict=True)


def resampled(group_N: Array) -> Array:
    """[N, B]: how often each row counts: once in the first column, then as in bootstraps of the
    groups (one group: NaN)."""
    groups, group_N = np.unique(group_N, return_inverse=True)
    n, rng = len(groups), np.random.default_rng(0)
    drawn_BG = [
        np.bincount(rng.integers(n, size=n), minlength=n) if n > 1 else [np.nan]
        for _ in range(RESAMPLES)
    ]
    return np.asarray(np.stack([np.ones(n), *drawn_BG], 1, dtype=np.float32)[group_N])


def identities(fitted: Dataset, tested: Dataset, args: Namespace) -> Identities:
    gallery, probe = identity_rows(tested, np.flatnonzero(measured(tested, args)))
    within = fitted.select(pretrain=True)
    within = within[((fitted.column("halves") == 2) & measured(fitted, args))[within]]
    require(within, fitted, "pretrain=true and two halves", "records for pre-training")
    within = within[:WITHIN]  # rows are in random order
    patient_B = patient_ids([tested])[0]
    return Identities(gallery, probe, within, patient_B, resampled(patient_B[probe]))


def probe_scores(
    task: ProbedTask, fit: Vectors, tests: Mapping[float, Vectors], method: Probe
) -> Iterator[tuple[Any, Scored]]:
    """Scores for each share and level of noise, averaged over the draws of the share."""
    train, test = task.parts
    x_ND = train.means(fit)
    tests_ND = np.concatenate([test.means(vectors) for vectors in tests.values()])
    for share, draws in task.draws.items():
        used_K = task.used[share]
        means: list[Facts] = [{} for _ in tests]
        for rows, weight_B in weighted(draws):
            data = ProbeData(
                x_ND[rows], train.y_NK[rows], train.patient_N[rows], tests_ND, task.kind
            )
            scores_NK = probed_scores(data, used_K, method)
            for mean, part_NK in zip(means, np.split(scores_NK, len(tests)), strict=True):
                samples = by_class(task.kind, test.y_NK[:, used_K], part_NK, task.weight_NB)
                add_weighted(mean, samples, weight_B)
        for level, mean in zip(tests, means, strict=True):
            samples = over_classes(mean, few=share in task.few)
            yield (share, level), (probe_facts(task, share, mean), samples)


def probed_scores(data: ProbeData, used_K: Array, method: Probe) -> Array:
    """Scores of the used classes. Exclusive classes are solved together, also those that are not
    scored."""
    solved_K = np.ones_like(used_K) if data.kind == "multiclass" else used_K
    data = data._replace(labels_NK=data.labels_NK[:, solved_K])
    return fit_scaled(method, data).scores_NK[:, used_K[solved_K]]


def add_weighted(sums: Facts, samples: Samples, weight_B: Array) -> None:
    for name, value_KB in samples.items():
        sums[name] = sums.get(name, 0) + weight_B * value_KB


def probe_facts(task: ProbedTask, share: float, samples: Samples) -> Facts:
    test, draws, used_K = task.parts[1], task.draws[share], task.used[share]
    names, people = np.array(task.labels.classes), np.unique(test.patient_N)
    used = names[used_K].tolist()
    per_class = {}
    for name, value_KB in samples.items():
        if len(value_KB) == len(used):  # values of regression are means over the columns
            per_class[name] = dict(zip(used, value_KB[:, 0].tolist(), strict=True))
    return {
        "n": len(test.y_NK),
        "patients": len(people) if (people & 1).all() else None,  # some are unknown
        "labelled": len(draws[0]),
        "draws": len(draws),
        "classes": len(used),
        "left_out": names[~used_K].tolist(),
        "per_class": per_class,
    }


def by_class(kind: str, y_NK: Array, scores_NK: Array, weight_NB: Array) -> Samples:
    """Metrics [K, B]; for regression their means over K, [1, B]."""
    if not KINDS[kind].of_classes:
        statistic = statistic_of(kind, y_NK, scores_NK)
        values_MB = np.stack([statistic(weight_N) for weight_N in weight_NB.T], 1)
        return dict(zip(statistic.names, values_MB[:, None], strict=True))
    columns = zip(y_NK.T, scores_NK.T, strict=True)
    classes = [weighted_measures(y_N, score_N, weight_NB) for y_N, score_N in columns]
    return {name: np.stack([of[name] for of in classes]) for name in classes[0]}


def over_classes(samples: Samples, few: bool = False) -> Samples:
    """Means of metrics [K, B] over the classes for which they are defined. `few`: there are too few
    patients for resamples, which become NaN."""
    means = {}
    with warnings.catch_warnings(action="ignore"):  # the mean of nothing but NaN is NaN
        for name, value_KB in samples.items():
            means[name] = np.nanmean(value_KB, 0)
            if few:
                means[name][1:] = np.nan
    return means


def identified(
    persons: Identities, fit: Vectors, known: Vectors, test: Vectors, shown: slice
) -> Scored:
    """Accuracy by cosine of the dimensions `shown`, and by cosine after whitening."""
    gallery_PD = known.of(persons.gallery).c_BSD[:, 0]
    probe_QD = test.of(persons.probe).c_BSD[:, 0]
    within_BSD = fit.of(persons.within).c_BSD
    gallery_ids = persons.patient_B[persons.gallery].tolist()
    probe_ids = persons.patient_B[persons.probe].tolist()
    compared = {"accuracy": (gallery_PD[:, shown], probe_QD[:, shown])}
    if within_BSD.shape[1] > 1:
        center_D, white_DD = whitening(within_BSD)
        compared["accuracy_whitened"] = (
            (gallery_PD - center_D) @ white_DD,
            (probe_QD - center_D) @ white_DD,
        )
    samples = {}
    for name, (gallery, probe) in compared.items():
        scores = identification(gallery, gallery_ids, probe, probe_ids)
        samples[name] = scores["hits"] @ persons.weight_NB / persons.weight_NB.sum(0)
    facts = {
        "n": len(probe_ids),
        "patients": len(set(probe_ids)),
        "gallery": len(gallery_ids),
        "chance": scores["chance"],
    }
    return facts, samples


def whitening(c_BSD: Array) -> tuple[Array, Array]:
    """Mean [D], and a matrix [D, D] after which the first two windows of a crop differ equally in every
    direction. Their covariance is shrunk towards a multiple of the identity (Chen et al. 2010,
    OAS), more so for fewer crops."""
    n, _, width = c_BSD.shape
    inside_BD = np.diff(c_BSD.astype(np.float64), axis=1)[:, 0] / np.sqrt(2)
    covariance_DD = inside_BD.T @ inside_BD / n
    trace, square = np.trace(covariance_DD), np.square(covariance_DD).sum()
    spread = (n + 1 - 2 / width) * (square - trace**2 / width)
    shrink = min(1.0, ((1 - 2 / width) * square + trace**2) / spread) if spread > 0 else 1.0
    shrunk_DD = (1 - shrink) * covariance_DD + shrink * trace / width * np.eye(width)
    values_D, basis_DD = np.linalg.eigh(shrunk_DD)
    floor = 1e-12 * max(values_D[-1], 1e-12)
    return c_BSD.mean((0, 1)), basis_DD / np.sqrt(np.maximum(values_D, floor))


def compared(scores: Found, random: Mapping[str, str]) -> Facts:
    """Rows, and their differences from random weights of the same architecture (named in `random`)
    and from the first."""
    rows, differences, first = [], [], next(iter(random))
    settings = list(dict.fromkeys(key[1:] for key in scores))
    for key in sorted(scores, key=lambda key: settings.index(key[1:])):
        facts, samples = scores[key]
        about = dict(zip(("model", "task", "leads", "share", "noise"), key, strict=True))
        row: Facts = {**about, **facts, "metrics": {}, "intervals": {}}
        for name, value_B in samples.items():
            people = facts["patients"] if name.startswith("accuracy") else 0
            row["metrics"][name] = float(value_B[0])
            row["intervals"][name] = interval(value_B, people)
        rows.append(row)
        for other in dict.fromkeys([random[key[0]], first]):
            # Not every row identifies patients
            _, against = scores.get((other, *key[1:]), ({}, {}))
            if other == key[0]:
                continue
            for name, value_B in samples.items():
                if name not in against:  # with one window in a crop nothing is whitened
                    continue
                gap_B = value_B - against[name]
                gap = {"difference": float(gap_B[0]), "interval": interval(gap_B)}
                differences.append({**about, "against": other, "metric": name, **gap})
    return {"rows": rows, "differences": differences}


def interval(of_B: Array, people: int = 0) -> list[float]:
    """Percentiles of the resamples; for a share of `people` that is 0 or 1, which resamples never
    change, Clopper-Pearson's. Otherwise none where all resamples agree on anything but 0, which is
    how much a model differs from itself."""
    if people > 1 and np.isclose(of_B[0], (0, 1)).any():
        return exact_interval(round(of_B[0]) * people, people)
    with warnings.catch_warnings(action="ignore"):  # undefined in all resamples: NaN
        ends: list[float] = np.nanpercentile(of_B[1:], (2.5, 97.5)).tolist()
    if of_B[0] and np.isclose(ends[0], ends[1]):
        return [np.nan, np.nan]
    return ends
