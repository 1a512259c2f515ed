"""Compares frozen embeddings of several models by linear probes and by patient identification.

    found = bench(BenchOptions(("RUN",), "DATASET", Path("OUT"), tasks=("sex",)))
    found["rows"][0]            # model, task, leads, share, metrics, intervals, n, patients, draws, per_class, left_out
    found["differences"][0]     # model, against, task, leads, share, metric, difference, interval

Baselines are random weights of the same architectures, and what needs no pre-training: the mean beat,
measurements, and gradient boosting on both.
A probe is fitted on a share of the patients of train and valid, and scored on test, with one row per
record. A smaller share is a subset of a larger one; small shares are drawn several times and
averaged over the draws. Identification compares the first 5 s by cosine.
"""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any
from zlib import crc32

import numpy as np

from omnilead.data_tools.io.terminal import is_interactive, tell
from omnilead.engine.model.input import Input
from omnilead.engine.settings.errors import Facts

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
from .plan import IDENTIFICATION, BenchOptions, ProbedTask, Work, as_typed, plan_work
from .probe import Fit, ProbeData, ProbeJob, fits_at_once, scores_of
from .records import ShownLeads, fits
from .results import EvalOptions, leakage, nullable, shown_input
from .vectors import Embedder, Vectors, embedded

# Of a comparison: rows with the same of all of these can be in one table
SETTINGS = ("fingerprint", "test_data", "seed", "fit_leads", "folds", "readouts")


def bench(options: BenchOptions) -> Facts:
    """Returns the content of OUT/bench.json."""
    refuse_ranks("a comparison is")
    rows = rows_to_compare(options.models, options.embedding, options.reader, options.seed)
    work = plan_work(options, ShownLeads(widest_input(rows), options.shown_leads))
    notes = remarks(rows, options, work)  # refuses bad input early
    if not installed():
        notes.append(f"{BOOSTED}: left out: {INSTALL}")
    random = {row.name: row.random for row in rows}
    about = {
        "data": as_typed(options.data),
        "fingerprint": work.fitted.fingerprint,
        "test_data": as_typed(options.test_data) or None,
        "seed": options.seed,
        "models": random,
        "fit_leads": options.fit_leads or None,
        "folds": options.folds,
        "readouts": readouts_of(rows, options.embedding.readout),
    }
    tell_of_others(about, options, work)
    scores = scores_of_rows(rows, options, work)
    return dict(nullable({**about, "notes": notes, **compared(scores, random)}))


def readouts_of(rows: Sequence[Compared], readout: str) -> dict[str, str]:
    """How each model is read out, by the name of its row."""
    readouts = {}
    for row in rows:
        if row.model:
            readouts[row.name] = "+".join(row.model.readout_of(readout))
    return readouts


def tell_of_others(about: Facts, options: BenchOptions, work: Work) -> None:
    """Tells if OUT has tables of other rows, data or read-outs, which will be lost."""
    try:
        before = json.loads((options.out / "bench.json").read_text())
        rows_before = {tuple(row[key] for key in KEYS) for row in before["rows"]}
        models, data = ", ".join(before["models"]), before["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # no tables of this command
    names = about["models"]
    rows_now = {*product(names, work.tasks, options.leads, options.shares)}
    if work.persons:
        rows_now |= {*product(names, [IDENTIFICATION], options.leads, [None])}
    is_same = all(before.get(name) == about[name] for name in SETTINGS)
    if not is_same or not rows_before <= rows_now:
        tell(
            f"bench: {options.out} has the tables of another comparison, of {models} on {data}: they "
            "will be replaced"
        )


def scores_of_rows(rows: Sequence[Compared], options: BenchOptions, work: Work) -> Scores:
    """The scores of all rows, which take most of the time. Embeddings are kept in OUT/parts."""
    scores: Scores = {}
    fits = sum(task.fits for task in work.tasks.values())
    clock = Clock(len(options.leads) * sum(len(row.draws) for row in rows), fits)
    for number, row in enumerate(rows, 1):
        for leads in options.leads:
            for key, scored in row_scores(row, leads, work, options.out / "parts", clock).items():
                scores[row.name, *key] = scored
            clock.count(len(row.draws))
        if not is_interactive():  # there are no progress bars
            tell(f"bench: {number} of {len(rows)} done: {row.name}")
    return scores


class Clock:
    """Says once how long it may take, if that is a minute or more: after the first of several fits of the
    first part, or after a part. A draw of random weights takes as long as its model; most baselines
    take less, and boosting more."""

    def __init__(self, parts: int, fits: int) -> None:
        """`fits`: of each part."""
        self.parts, self.fits, self.done = parts, fits, 0
        self.began = self.fits_began = monotonic()
        self.has_told, self.has_fitted = False, fits < 2

    def begin_fits(self) -> None:
        """The embeddings of a part are there."""
        if not self.has_fitted:
            self.fits_began = monotonic()

    def count_fit(self) -> None:
        if self.has_fitted:
            return
        self.has_fitted = True
        took_s = monotonic() - self.fits_began
        part_s = self.fits_began - self.began + took_s * self.fits / fits_at_once()
        self.tell(f"the first of {self.fits} fits took {took_s:.0f} s", part_s * self.parts)

    def count(self, done: int) -> None:
        self.done += done
        took_s = monotonic() - self.began
        what = f"{self.done} of {self.parts} parts took {took_s:.0f} s"
        self.tell(what, took_s * self.parts / self.done)

    def tell(self, what: str, all_s: float) -> None:
        minutes = round(all_s / 60)
        if minutes and not self.has_told:
            self.has_told = True
            tell(
                f"bench: {what}: all may take {minutes} minute{'s' * (minutes > 1)}. What is done is kept"
            )


def widest_input(rows: Sequence[Compared]) -> Input:
    """The input with the longest window."""
    inputs = [embedder.input for row in rows for draw in row.draws for embedder in draw]
    return max(inputs, key=lambda model_input: model_input.window_s)


def row_scores(row: Compared, lead: str, work: Work, folder: Path, clock: Clock) -> Scores:
    """The scores of a row that is shown these leads, by task, leads and share: means over its
    draws."""
    if not work.tasks and not row.identifies:
        return {}
    samples_of_draws = [
        draw_samples(row, embedders, lead, work, folder, clock) for embedders in row.draws
    ]
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
    row: Compared,
    embedders: Sequence[Embedder],
    lead: str,
    work: Work,
    folder: Path,
    clock: Clock,
) -> dict[tuple[str, Any], Samples]:
    """Metrics [K, B] of joined embedders, by task and share."""
    fit, test = (work.fitted, work.fit_leads or lead), (work.tested, lead)
    vectors = {}
    for data, leads in dict.fromkeys([fit, test] if work.tasks else [test]):
        rows = work.rows[data]
        vectors[data, leads] = [
            embedded(embedder, data, rows, leads, folder) for embedder in embedders
        ]
    samples_by_task: dict[tuple[str, Any], Samples] = {}
    for name, task in work.tasks.items():
        by_share = probe_samples(task, vectors[fit], vectors[test], row.fit, clock)
        for share, samples in by_share.items():
            samples_by_task[name, share] = samples
    if work.persons and row.identifies:
        compared_D = embedders[0].compared
        samples_by_task[IDENTIFICATION, None] = work.persons.scores(vectors[test], compared_D)
    return samples_by_task


def probe_samples(
    task: ProbedTask, fitted: Sequence[Vectors], tested: Sequence[Vectors], fit: Fit, clock: Clock
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
    clock.begin_fits()
    results, samples_by_share = scores_of(jobs), {}
    for share in reversed(task.draws):
        y_NK, of_draws = task.test.y_NK[:, task.used[share]], []
        for draw in task.draws[share]:
            scores_NK = np.zeros(y_NK.shape)
            for _, scored in fits(draw, task.fold_N):
                scores_NK[scored] = next(results)
                clock.count_fit()
            if task.fold_N is None:
                of_draws.append(by_class(task.kind, y_NK, scores_NK, task.weight_NB))
            else:
                fold_samples = by_fold(task.kind, y_NK, scores_NK, task.weight_NB, task.fold_N)
                of_draws.append(widened(fold_samples, task.fold_N))
        samples_by_share[share] = averaged(of_draws)
    return {share: samples_by_share[share] for share in task.draws}


def remarks(rows: Sequence[Compared], options: BenchOptions, work: Work) -> list[str]:
    """What a reader must know of the labels, data leakage, different preprocessing and missing
    leads; ConfigError if data do not suit a model."""
    notes = []
    for name, task in work.tasks.items():
        notes += [f"{name}: {note}" for note in task.remarks]
    models = {row.name: row.model for row in rows if row.random and row.model}
    for name, leads, data in product(models, work.shown.leads, work.rows):
        warned = shown_input(models[name], data, EvalOptions(leads=leads))[1]
        notes += [f"{name}: {note}" for note in warned]
    for data in work.rows:
        notes += work.shown.left_out(data)
    # Which models have seen the patients that they are tested on
    tested = {name: (task.test.rows, task.patient_B) for name, task in work.tasks.items()}
    if persons := work.persons:
        crops = np.concatenate([persons.gallery, persons.probe])
        tested[IDENTIFICATION] = crops, persons.patient_B
    for name, task_name in product(models, tested):
        warned = leakage(models[name], work.tested, *tested[task_name])
        notes += [f"{name}, {task_name}: {note}" for note in warned]
    if options.fit_leads:
        notes.append(f"Probes were fitted on leads {options.fit_leads}.")
    if options.folds:
        notes.append(
            f"Cross-validation in {options.folds} folds: each ECG is scored once, by a probe that was "
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
