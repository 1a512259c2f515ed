"""Compares frozen embeddings of several models by linear probes and by patient identification.

    found = bench(args)         # the options of downstream.bench
    found["rows"][0]            # model, task, leads, share, metrics, intervals, n, patients, draws, per_class, left_out
    found["differences"][0]     # model, against, task, leads, share, metric, difference, interval

Baselines are random weights of the same architectures, and what needs no pre-training: the mean beat,
measurements, and gradient boosting on both.
A probe is fitted on a share of the patients of train and valid, and scored on test, with one row per
record. A smaller share is a subset of a larger one; small shares are drawn several times and
averaged over the draws. Identification compares the first 5 s by cosine.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any
from zlib import crc32

import numpy as np

from omnilead.data_tools.io.terminal import interactive, tell
from omnilead.engine.model.input import Input
from omnilead.engine.settings.commandline import writing
from omnilead.engine.settings.errors import ConfigError, Facts

from ..inference.commands import refuse_ranks
from .boosted import INSTALL, installed
from .differences import (
    KEYS,
    Samples,
    Scores,
    averaged,
    by_class,
    by_fold,
    compared,
    over_classes,
    widened,
)
from .embedders import BOOSTED, Compared, rows_to_compare
from .heads import Choice, fit_head, require_free, require_known, unrounded, write_head
from .plan import IDENTIFICATION, ProbedTask, Work, planned
from .probe import Fit, ProbeData, ProbeJob, scores_of
from .records import FITTED, ProbedRecords, fits, left_out, records_of
from .results import EvalOptions, leakage, nullable, shown_input
from .vectors import Embedder, Vectors, embedded


def bench(args: Namespace) -> Facts:
    """Returns the content of OUT/bench.json."""
    refuse_ranks("a comparison is")
    args.leads = list(dict.fromkeys(args.leads))
    args.share = sorted(set(args.share))
    args.shown = [*args.leads, *filter(None, [args.fit_leads])]
    rows = rows_to_compare(args.models, args)
    args.widest = widest_input(rows)
    work = planned(args)
    require_one_probe(work, args)
    notes = remarks(rows, args, work)  # refuses bad input early
    if not installed():
        notes.append(f"{BOOSTED}: left out: {INSTALL}")
    parts = Path(args.out, "parts")
    readouts = {}
    for row in rows:
        if row.model:
            readouts[row.name] = "+".join(row.model.readout_of(args.readout))
    tell_of_others(rows, readouts, work, args)
    scores: Scores = {}
    clock = Clock(len(args.leads) * sum(len(row.draws) for row in rows))
    for number, row in enumerate(rows, 1):
        for lead in args.leads:
            for key, scored in row_scores(row, lead, work, parts).items():
                scores[row.name, *key] = scored
            clock.count(len(row.draws))
        if not interactive():  # there are no progress bars
            tell(f"bench: {number} of {len(rows)} done: {row.name}")
    random = {row.name: row.random for row in rows}
    document = {
        "data": args.data,
        "fingerprint": work.fitted.fingerprint,
        "test_data": args.test_data or None,
        "seed": args.seed,
        "models": random,
        "fit_leads": args.fit_leads or None,
        "folds": args.folds,
        "readouts": readouts,
        "notes": notes,
        **compared(scores, random),
    }
    if args.head:  # last: a run that is interrupted before can be run again
        notes += save_head(rows[0], work, args, parts)
    return dict(nullable(document))


def tell_of_others(rows: Sequence[Compared], readouts: Facts, work: Work, args: Namespace) -> None:
    """Tells if OUT has tables of other rows, data or read-outs, which will be lost."""
    try:
        before = json.loads(Path(args.out, "bench.json").read_text())
        rows_before = {tuple(row[key] for key in KEYS) for row in before["rows"]}
        models, data = ", ".join(before["models"]), before["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # no tables of this command
    names = [row.name for row in rows]
    now = {*product(names, work.tasks, args.leads, args.share)}
    if work.persons:
        now |= {*product(names, [IDENTIFICATION], args.leads, [None])}
    settings = {"test_data": args.test_data or None, "fit_leads": args.fit_leads or None}
    settings |= {"folds": args.folds, "seed": args.seed, "fingerprint": work.fitted.fingerprint}
    settings["readouts"] = readouts
    is_same = all(before.get(name) == value for name, value in settings.items())
    if not is_same or not rows_before <= now:
        tell(
            f"bench: {args.out} has the tables of another comparison, of {models} on {data}: they "
            "will be replaced"
        )


class Clock:
    """Says once how long it may take, if that is a minute or more. A draw of random weights takes as
    long as its model; most baselines take less, and boosting more."""

    def __init__(self, parts: int) -> None:
        self.parts, self.done, self.began, self.has_told = parts, 0, monotonic(), False

    def count(self, done: int) -> None:
        self.done += done
        took_s = monotonic() - self.began
        minutes = round(took_s * self.parts / self.done / 60)
        if minutes and not self.has_told:
            self.has_told = True
            tell(
                f"bench: {self.done} of {self.parts} parts took {took_s:.0f} s: all may take {minutes} "
                f"minute{'s' * (minutes > 1)}. What is done is kept"
            )


def widest_input(rows: Sequence[Compared]) -> Input:
    """The input with the longest window."""
    inputs = [embedder.input for row in rows for draw in row.draws for embedder in draw]
    return max(inputs, key=lambda model_input: model_input.window_s)


def row_scores(row: Compared, lead: str, work: Work, folder: Path) -> Scores:
    """The scores of a row that is shown these leads, by task, leads and share: means over its
    draws."""
    if not work.tasks and not row.identifies:
        return {}
    samples_of_draws = [draw_samples(row, embedders, lead, work, folder) for embedders in row.draws]
    scores: Scores = {}
    for name, share in samples_of_draws[0]:
        of_draws = [samples[name, share] for samples in samples_of_draws]
        means = averaged(of_draws, crc32(row.name.encode()))  # every row resamples its own draws
        if name in work.tasks:
            facts = work.tasks[name].facts(share, means)
            is_few = share in work.tasks[name].few_shares
        elif work.persons:
            facts, is_few = work.persons.facts, False
        if len(row.draws) > 1:
            means_of_draws = [over_classes(samples) for samples in of_draws]
            facts["each"] = {
                key: [float(value[key][0]) for value in means_of_draws] for key in means
            }
        scores[name, lead, share] = facts, over_classes(means, is_few)
    return scores


def draw_samples(
    row: Compared, embedders: Sequence[Embedder], lead: str, work: Work, folder: Path
) -> dict[tuple[str, Any], Samples]:
    """Metrics [K, B] of joined embedders, by task and share."""
    fit, test = (work.fitted, work.fit_leads or lead), (work.tested, lead)
    vectors = {}
    for dataset, leads in dict.fromkeys([fit, test] if work.tasks else [test]):
        rows = work.rows[dataset]
        vectors[dataset, leads] = [
            embedded(embedder, dataset, rows, leads, folder) for embedder in embedders
        ]
    samples_by_task: dict[tuple[str, Any], Samples] = {}
    for name, task in work.tasks.items():
        for share, samples in probe_samples(task, vectors[fit], vectors[test], row.fit).items():
            samples_by_task[name, share] = samples
    if work.persons and row.identifies:
        compared_D = embedders[0].compared
        samples_by_task[IDENTIFICATION, None] = work.persons.scores(vectors[test], compared_D)
    return samples_by_task


def probe_samples(
    task: ProbedTask, fitted: Sequence[Vectors], tested: Sequence[Vectors], fit: Fit
) -> dict[float, Samples]:
    """Metrics [K, B] by share, averaged over the draws of the share."""
    data = ProbeData(task.train.means(fitted), task.train.y_NK, task.train.patient_N, task.kind)
    test_ND = task.test.means(tested)
    jobs = (
        ProbeJob(fit, data.of(rows), task.used[share], test_ND[scored])
        for share in reversed(task.draws)  # the largest takes longest, so it begins first
        for draw in task.draws[share]
        for rows, scored in fits(draw, task.fold_N)
    )
    results, samples_by_share = scores_of(jobs), {}
    for share in reversed(task.draws):
        y_NK, of_draws = task.test.y_NK[:, task.used[share]], []
        for draw in task.draws[share]:
            scores_NK = np.zeros(y_NK.shape)
            for _, scored in fits(draw, task.fold_N):
                scores_NK[scored] = next(results)
            if task.fold_N is None:
                of_draws.append(by_class(task.kind, y_NK, scores_NK, task.weight_NB))
            else:
                fold_samples = by_fold(task.kind, y_NK, scores_NK, task.weight_NB, task.fold_N)
                of_draws.append(widened(fold_samples, task.fold_N))
        samples_by_share[share] = averaged(of_draws)
    return {share: samples_by_share[share] for share in task.draws}


def remarks(rows: Sequence[Compared], args: Namespace, work: Work) -> list[str]:
    """What a reader must know of the labels, data leakage, different preprocessing and missing
    leads; ConfigError if data do not suit a model."""
    notes = []
    for name, task in work.tasks.items():
        notes += [f"{name}: {note}" for note in task.labels.remarks]
    models = {row.name: row.model for row in rows if row.random and row.model}
    for name, lead, dataset in product(models, args.shown, work.rows):
        warned = shown_input(models[name], dataset, EvalOptions(leads=lead))[1]
        notes += [f"{name}: {note}" for note in warned]
    for dataset in work.rows:
        notes += left_out(dataset, args)
    # Which models have seen the patients that they are tested on
    tested = {name: (task.test.rows, task.patient_B) for name, task in work.tasks.items()}
    if persons := work.persons:
        crops = np.concatenate([persons.gallery, persons.probe])
        tested[IDENTIFICATION] = crops, persons.patient_B
    for name, task_name in product(models, tested):
        warned = leakage(models[name], work.tested, *tested[task_name])
        notes += [f"{name}, {task_name}: {note}" for note in warned]
    if args.fit_leads:
        notes.append(f"Probes were fitted on leads {args.fit_leads}.")
    if args.folds:
        notes.append(
            f"Cross-validation in {args.folds} folds: each ECG is scored once, by a probe that was "
            "fitted without its patient. It is ranked among the ECGs of its own fold. Intervals are "
            "widened, because these probes share most of their ECGs."
        )
    elif work.tested is work.fitted:
        notes += [few_tested(name, task) for name, task in work.tasks.items() if task.few_tested]
    return list(dict.fromkeys(notes))


def few_tested(name: str, task: ProbedTask) -> str:
    all_records = sum(len(records.y_NK) for records in (task.train, task.test))
    return (
        f"{name}: {len(task.test.y_NK)} ECGs are tested, which says little: --folds 5 tests "
        f"all {all_records:,}."
    )


def require_one_probe(work: Work, args: Namespace) -> None:
    """ConfigError unless --head can be written: one probe, fitted on known labels of every class."""
    if not args.head:
        return
    require_free(Path(args.head), "--head")
    for option, count in (
        ("--models", len(args.models)),
        ("--tasks", len(work.tasks)),
        ("--leads", 1 if args.fit_leads else len(args.leads)),
    ):
        if count != 1:
            raise ConfigError(
                f"--head {args.head}: is one probe of one model, but {option} names {count}: use one"
            )
    (task,) = work.tasks.values()
    require_known(task.labels, head_records(task, work, args))


def head_records(task: ProbedTask, work: Work, args: Namespace) -> ProbedRecords:
    """Those of train and valid, with --folds too, so that `omnilead evaluate` can test the head."""
    return records_of(work.fitted, task.labels, FITTED, args) if args.folds else task.train


def save_head(row: Compared, work: Work, args: Namespace, parts: Path) -> list[str]:
    """Writes the model with its probe as a head, and returns what to say of it."""
    (task,), embedder = work.tasks.values(), row.draws[0][0]
    train = head_records(task, work, args)
    leads = args.fit_leads or args.leads[0]
    choice = Choice(args.reader, args.readout, leads, args.folds)
    head = fit_head(embedder, work.fitted, task.labels, train, choice, parts)
    with writing(Path(args.head), "--head"):
        write_head(head, unrounded(embedder, args.models[0], args.code), Path(args.head))
    is_row = f"is the row {row.name!r}, leads {leads}, share 1, fitted on {head.people}"
    if args.reader == "boosted":
        is_row = (
            f"is {head.made} on {'+'.join(head.readout)} of {row.name!r}, leads {leads}, fitted on windows of "
            f"{head.people}: no row of the table is this model. Without an encoder: --readout rhythm+waveform"
        )
    return [f"{args.head}: {sentence}." for sentence in [is_row, *head.said]]
