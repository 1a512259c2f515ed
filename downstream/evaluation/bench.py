"""Compares frozen embeddings of several models by linear probes and by patient identification.

    found = bench(BenchOptions(("RUN",), "DATASET", Path("OUT"), tasks=("sex",)))
    found["rows"][0]            # model, task, leads, share, metrics, intervals, n, patients, draws, per_class, left_out
    found["differences"][0]     # model, against, task, leads, share, metric, difference, interval

The baselines are random weights of the same architectures, and methods without pre-training: the mean
beat, measurements of the signal, and gradient boosting on both.
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

from ..inference.commands import refuse_several_ranks
from .boosted import INSTALL_LIGHTGBM, has_lightgbm
from .differences import (
    ROW_KEYS,
    Samples,
    Scores,
    average_draws,
    cross_validated_metrics,
    mean_over_classes,
    metrics_by_class,
    rows_and_differences,
    widen_spread,
)
from .embedders import BOOSTED_ROW, ComparedRow, rows_to_compare
from .plan import IDENTIFICATION, BenchOptions, BenchPlan, ProbedTask, datasets_text, plan_bench
from .probe import Fit, ProbeData, ProbeJob, fit_process_count, run_probe_jobs
from .records import ShownLeads, train_test_rows
from .results import EvalOptions, leakage_notes, limited_input_and_warnings, nan_to_none
from .vectors import Embedder, Vectors, cached_vectors

# Two comparisons can be in one table only if they agree in all of these settings
COMPARISON_SETTINGS = ("fingerprint", "test_data", "seed", "fit_leads", "folds", "readouts")


def bench(options: BenchOptions) -> Facts:
    """Compares the models. Returns the content of OUT/bench.json."""
    refuse_several_ranks("a comparison is")
    rows = rows_to_compare(options.models, options.embedding, options.reader, options.seed)
    plan = plan_bench(options, ShownLeads(longest_input(rows), options.shown_leads))
    # This raises ConfigError for bad input before anything is computed
    notes = comparison_notes(rows, options, plan)
    if not has_lightgbm():
        notes.append(f"{BOOSTED_ROW}: left out: {INSTALL_LIGHTGBM}")
    random = {row.name: row.random for row in rows}
    about = {
        "data": datasets_text(options.data),
        "fingerprint": plan.fitted.fingerprint,
        "test_data": datasets_text(options.test_data) or None,
        "seed": options.seed,
        "models": random,
        "fit_leads": options.fit_leads or None,
        "folds": options.folds,
        "readouts": readout_by_row(rows, options.embedding.readout),
    }
    warn_if_replacing(about, options, plan)
    scores = scores_of_rows(rows, options, plan)
    return dict(nan_to_none({**about, "notes": notes, **rows_and_differences(scores, random)}))


def readout_by_row(rows: Sequence[ComparedRow], readout: str) -> dict[str, str]:
    """Returns {name of a row: read-out of its model}, such as "mean+std". Rows without a model are
    left out."""
    readouts = {}
    for row in rows:
        if row.model:
            readouts[row.name] = "+".join(row.model.suitable_readout(readout))
    return readouts


def warn_if_replacing(about: Facts, options: BenchOptions, plan: BenchPlan) -> None:
    """Warns if OUT has tables of other rows, data or read-outs, because this comparison will
    replace them."""
    try:
        before = json.loads((options.out / "bench.json").read_text())
        rows_before = {tuple(row[key] for key in ROW_KEYS) for row in before["rows"]}
        models, data = ", ".join(before["models"]), before["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # OUT has no bench.json that this command could have written
    names = about["models"]
    rows_now = {*product(names, plan.tasks, options.leads, options.shares)}
    if plan.identities:
        rows_now |= {*product(names, [IDENTIFICATION], options.leads, [None])}
    is_same = all(before.get(name) == about[name] for name in COMPARISON_SETTINGS)
    if not is_same or not rows_before <= rows_now:
        tell(
            f"bench: {options.out} has the tables of another comparison, of {models} on {data}: they "
            "will be replaced"
        )


def scores_of_rows(rows: Sequence[ComparedRow], options: BenchOptions, plan: BenchPlan) -> Scores:
    """Returns the scores of all rows. Saves the embeddings in OUT/parts, for the next
    comparison."""
    scores: Scores = {}
    fits = sum(task.fit_count for task in plan.tasks.values())
    clock = TimeEstimate(len(options.leads) * sum(len(row.draws) for row in rows), fits)
    for number, row in enumerate(rows, 1):
        for leads in options.leads:
            for key, scored in row_scores(row, leads, plan, options.out / "parts", clock).items():
                scores[row.name, *key] = scored
            clock.count_parts(len(row.draws))
        # Without a terminal there are no progress bars, so a line is printed
        if not is_interactive():
            tell(f"bench: {number} of {len(rows)} done: {row.name}")
    return scores


class TimeEstimate:
    """Prints once how long the comparison may take, if that is a minute or more. A part is one draw
    of a row with one set of leads. The estimate follows the first fit of the first part or, if a
    part has fewer than two fits, a finished part. It assumes that all parts take equally long. In
    fact most baselines take less time than a model or its random weights, and boosting takes
    more."""

    def __init__(self, parts: int, fits: int) -> None:
        """`parts`: the number of parts. `fits`: the number of probes that are fitted in each
        part."""
        self.parts, self.fits, self.done = parts, fits, 0
        self.began = self.fits_began = monotonic()
        self.has_told, self.has_fitted = False, fits < 2

    def begin_fits(self) -> None:
        """Starts timing the fits of a part, after its embeddings were computed."""
        if not self.has_fitted:
            self.fits_began = monotonic()

    def count_fit(self) -> None:
        """Notes that a fit is done. After the first fit, prints the estimate."""
        if self.has_fitted:
            return
        self.has_fitted = True
        took_s = monotonic() - self.fits_began
        part_s = self.fits_began - self.began + took_s * self.fits / fit_process_count()
        self.print_estimate_once(
            f"the first of {self.fits} fits took {took_s:.0f} s", part_s * self.parts
        )

    def count_parts(self, done: int) -> None:
        """Notes that more parts are done, and prints the estimate if it was not printed yet."""
        self.done += done
        took_s = monotonic() - self.began
        what = f"{self.done} of {self.parts} parts took {took_s:.0f} s"
        self.print_estimate_once(what, took_s * self.parts / self.done)

    def print_estimate_once(self, what: str, all_s: float) -> None:
        """Prints the estimate `all_s` if it is a minute or more and none was printed before.
        `what`: what was timed."""
        minutes = round(all_s / 60)
        if minutes and not self.has_told:
            self.has_told = True
            tell(
                f"bench: {what}: all may take {minutes} minute{'s' * (minutes > 1)}. What is done is kept"
            )


def longest_input(rows: Sequence[ComparedRow]) -> Input:
    """Returns the model input with the longest window among all rows."""
    inputs = [embedder.input for row in rows for draw in row.draws for embedder in draw]
    return max(inputs, key=lambda model_input: model_input.window_s)


def row_scores(
    row: ComparedRow, lead: str, plan: BenchPlan, folder: Path, clock: TimeEstimate
) -> Scores:
    """Returns the scores of a row that is tested with the leads `lead`, by task, leads and share. A
    score is the mean over the draws of the row."""
    if not plan.tasks and not row.identifies:
        return {}
    samples_of_draws = [
        metrics_of_draw(row, embedders, lead, plan, folder, clock) for embedders in row.draws
    ]
    scores: Scores = {}
    for name, share in samples_of_draws[0]:
        of_draws = [samples[name, share] for samples in samples_of_draws]
        # The seed is the row's own, since each row resamples its draws independently
        means = average_draws(of_draws, crc32(row.name.encode()))
        if name in plan.tasks:
            facts = plan.tasks[name].scored_facts(share, means)
            is_few = share in plan.tasks[name].few_shares
        elif plan.identities:
            facts, is_few = plan.identities.counts, False
        if len(row.draws) > 1:
            means_of_draws = [mean_over_classes(samples) for samples in of_draws]
            facts["each"] = {
                key: [float(value[key][0]) for value in means_of_draws] for key in means
            }
        scores[name, lead, share] = facts, mean_over_classes(means, is_few)
    return scores


def metrics_of_draw(
    row: ComparedRow,
    embedders: Sequence[Embedder],
    lead: str,
    plan: BenchPlan,
    folder: Path,
    clock: TimeEstimate,
) -> dict[tuple[str, Any], Samples]:
    """Returns the metrics [K, B] of one draw of a row on the bootstrap resamples, by task and share.
    The vectors of the draw's embedders are joined."""
    fit, test = (plan.fitted, plan.fit_leads or lead), (plan.tested, lead)
    vectors = {}
    for data, leads in dict.fromkeys([fit, test] if plan.tasks else [test]):
        rows = plan.rows_to_embed[data]
        vectors[data, leads] = [
            cached_vectors(embedder, data, rows, leads, folder) for embedder in embedders
        ]
    samples_by_task: dict[tuple[str, Any], Samples] = {}
    for name, task in plan.tasks.items():
        by_share = metrics_of_probes(task, vectors[fit], vectors[test], row.fit, clock)
        for share, samples in by_share.items():
            samples_by_task[name, share] = samples
    if plan.identities and row.identifies:
        identity_dims = embedders[0].identity_dims
        samples_by_task[IDENTIFICATION, None] = plan.identities.scores(vectors[test], identity_dims)
    return samples_by_task


def metrics_of_probes(
    task: ProbedTask,
    fitted: Sequence[Vectors],
    tested: Sequence[Vectors],
    fit: Fit,
    clock: TimeEstimate,
) -> dict[float, Samples]:
    """Returns the metrics [K, B] of a task's probes on the bootstrap resamples, by share, averaged
    over the draws of the labels."""
    data = ProbeData(
        task.train.mean_embeddings(fitted), task.train.y_NK, task.train.patient_N, task.kind
    )
    test_ND = task.test.mean_embeddings(tested)
    jobs = (
        ProbeJob(fit, data.take(rows), task.used_outputs[share], test_ND[scored])
        for share in reversed(task.draws)  # the largest share takes longest, so it begins first
        for draw in task.draws[share]
        for rows, scored in train_test_rows(draw, task.fold_N)
    )
    clock.begin_fits()
    results, samples_by_share = run_probe_jobs(jobs), {}
    for share in reversed(task.draws):
        y_NK, of_draws = task.test.y_NK[:, task.used_outputs[share]], []
        for draw in task.draws[share]:
            scores_NK = np.zeros(y_NK.shape)
            for _, scored in train_test_rows(draw, task.fold_N):
                scores_NK[scored] = next(results)
                clock.count_fit()
            if task.fold_N is None:
                of_draws.append(metrics_by_class(task.kind, y_NK, scores_NK, task.weight_NB))
            else:
                fold_samples = cross_validated_metrics(
                    task.kind, y_NK, scores_NK, task.weight_NB, task.fold_N
                )
                of_draws.append(widen_spread(fold_samples, task.fold_N))
        samples_by_share[share] = average_draws(of_draws)
    return {share: samples_by_share[share] for share in task.draws}


def comparison_notes(
    rows: Sequence[ComparedRow], options: BenchOptions, plan: BenchPlan
) -> list[str]:
    """Returns notes on labels, data leakage, differences in preprocessing, and missing leads.
    ConfigError if the data do not suit a model."""
    notes = []
    for name, task in plan.tasks.items():
        notes += [f"{name}: {note}" for note in task.remarks]
    models = {row.name: row.model for row in rows if row.random and row.model}
    for name, leads, data in product(models, plan.shown.leads, plan.rows_to_embed):
        warned = limited_input_and_warnings(models[name], data, EvalOptions(leads=leads))[1]
        notes += [f"{name}: {note}" for note in warned]
    for data in plan.rows_to_embed:
        notes += plan.shown.left_out_notes(data)
    # For each task, the tested crops and their patients, to find out which models have seen these
    # patients
    tested = {name: (task.test.rows, task.patient_B) for name, task in plan.tasks.items()}
    if identities := plan.identities:
        crops = np.concatenate([identities.gallery, identities.probe])
        tested[IDENTIFICATION] = crops, identities.patient_B
    for name, task_name in product(models, tested):
        warned = leakage_notes(models[name], plan.tested, *tested[task_name])
        notes += [f"{name}, {task_name}: {note}" for note in warned]
    if options.fit_leads:
        notes.append(f"Probes were fitted on leads {options.fit_leads}.")
    if options.folds:
        notes.append(
            f"Cross-validation in {options.folds} folds: each ECG is scored once, by a probe that was "
            "fitted without its patient. It is ranked among the ECGs of its own fold. Intervals are "
            "widened, because these probes share most of their ECGs."
        )
    elif plan.tested is plan.fitted:
        notes += [
            small_test_note(name, task) for name, task in plan.tasks.items() if task.has_small_test
        ]
    return list(dict.fromkeys(notes))


def small_test_note(name: str, task: ProbedTask) -> str:
    """Returns a note that the test of this task has few ECGs."""
    all_records = sum(len(records.y_NK) for records in (task.train, task.test))
    return (
        f"{name}: {len(task.test.y_NK)} ECGs are tested, which says little: --folds 5 tests "
        f"all {all_records:,}."
    )
