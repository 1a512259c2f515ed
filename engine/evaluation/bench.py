"""Compares frozen embeddings of several models by linear probes and by patient identification.

    found = bench(args)         # the options of engine.bench
    found["rows"][0]            # model, task, leads, share, metrics, intervals, n, patients, draws, per_class, left_out
    found["differences"][0]     # model, against, task, leads, share, metric, difference, interval

Baselines are random weights of the same architectures, and what needs no pre-training: the mean beat,
measurements, gradient boosting on both, and MiniRocket.
A probe is fitted on a share of the patients of train and valid, and scored on test, with one row per
record. A smaller share is a subset of a larger one; small shares are drawn several times and
averaged over the draws. Identification compares the first 5 s by cosine.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from omnilead.data_tools.io.terminal import interactive, tell

from ..data.seen import seen_in
from ..inference.commands import refuse_ranks
from ..inference.trained_model import load
from ..model.input import Input
from ..settings.commandline import writing
from ..settings.errors import ConfigError, Facts
from ..tasks.kinds import KINDS
from ..training.metrics import identification
from .boosted import INSTALL, installed
from .differences import Samples, Scores, averaged, by_class, compared, over_classes
from .embedders import (
    BOOSTED,
    READERS,
    ROCKET,
    Compared,
    Embedder,
    Vectors,
    embedded,
    name_and_folder,
    reading,
    rocket,
    rows_to_compare,
)
from .plan import IDENTIFICATION, Identities, ProbedTask, Work, measured, planned
from .probe import Fit, ProbeData, require_free, save_with_head
from .results import EvalOptions, leakage, nullable, shown_input

ROCKET_CROPS = 20_000  # MiniRocket keeps 80 kB of each


def bench(args: Namespace) -> Facts:
    """Returns the content of OUT/bench.json."""
    refuse_ranks("a comparison is")
    args.leads = list(dict.fromkeys(args.leads))
    args.share = sorted(set(args.share))
    args.shown = [*args.leads, *filter(None, [args.fit_leads])]
    rows = rows_to_compare(args.models, args)
    args.widest = widest_input(rows)
    work = planned(args)
    require_one_probe(rows, work, args)
    notes = remarks(rows, args, work)  # refuses bad input early
    rows = affordable(rows, work, notes)
    parts = Path(args.out, "parts")
    scores: Scores = {}
    for number, row in enumerate(rows, 1):
        for lead in args.leads:
            for key, scored in row_scores(row, lead, work, parts).items():
                scores[row.name, *key] = scored
        if not interactive():  # there are no progress bars
            tell(f"bench: {number} of {len(rows)} done: {row.name}")
    random = {row.name: row.random for row in rows}
    readouts = {}
    for row in rows:
        if row.model:
            readouts[row.name] = "+".join(row.model.readout_of(args.readout))
    document = {
        "data": args.data,
        "fingerprint": work.fitted.fingerprint,
        "test_data": args.test_data or None,
        "seed": args.seed,
        "models": random,
        "fit_leads": args.fit_leads or None,
        "readouts": readouts,
        "notes": notes,
        **compared(scores, random),
    }
    if args.head:  # last: a run that is interrupted before can be run again
        save_head(rows[0], work, args, parts)
    return dict(nullable(document))


def widest_input(rows: Sequence[Compared]) -> Input:
    """The input with the longest window."""
    inputs = [embedder.input for row in rows for draw in row.draws for embedder in draw]
    return max(inputs, key=lambda model_input: model_input.window_s)


def row_scores(row: Compared, lead: str, work: Work, folder: Path) -> Scores:
    """The scores of a row that is shown these leads, by task, leads and share: means over its
    draws."""
    if not work.tasks and not row.identifies:
        return {}
    draws = row.draws
    if not draws:
        task = next(iter(work.tasks.values()))
        draws = [[rocket(work.fitted, task.train.rows, work.fit_leads or lead)]]
    each = [draw_samples(row, embedders, lead, work, folder) for embedders in draws]
    scores: Scores = {}
    for name, share in each[0]:
        of_draws = [samples[name, share] for samples in each]
        means = averaged(of_draws, crc32(row.name.encode()))  # every row resamples its own draws
        if name in work.tasks:
            facts = work.tasks[name].facts(share, means)
            few = share in work.tasks[name].few
        elif work.persons:
            facts, few = work.persons.facts, False
        if len(draws) > 1:
            own = [over_classes(samples) for samples in of_draws]
            facts["each"] = {key: [float(value[key][0]) for value in own] for key in means}
        scores[name, lead, share] = facts, over_classes(means, few)
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
    found: dict[tuple[str, Any], Samples] = {}
    for name, task in work.tasks.items():
        for share, samples in probe_samples(task, vectors[fit], vectors[test], row.fit):
            found[name, share] = samples
    if work.persons and row.identifies:
        compared_D = embedders[0].compared
        found[IDENTIFICATION, None] = identified(work.persons, vectors[test], compared_D)
    return found


def probe_samples(
    task: ProbedTask, fitted: Sequence[Vectors], tested: Sequence[Vectors], fit: Fit
) -> Iterator[tuple[float, Samples]]:
    """Metrics [K, B] for each share, averaged over the draws of the share."""
    data = ProbeData(task.train.means(fitted), task.train.y_NK, task.train.patient_N, task.kind)
    test_ND = task.test.means(tested)
    for share, draws in task.draws.items():
        used_K, y_NK = task.used[share], task.test.y_NK[:, task.used[share]]
        # Exclusive classes are solved together, also those that are not scored
        solved_K = np.ones_like(used_K) if KINDS[task.kind].exclusive else used_K
        each = []
        for rows in draws:
            drawn = data.of(rows)
            probe = fit(drawn._replace(y_NK=drawn.y_NK[:, solved_K]))
            scores_NK = probe.scores(test_ND)[:, used_K[solved_K]]
            each.append(by_class(task.kind, y_NK, scores_NK, task.weight_NB))
        yield share, averaged(each)


def identified(persons: Identities, each: Sequence[Vectors], compared_D: slice) -> Samples:
    """Accuracy by cosine of some dimensions of the joined vectors."""
    sides = []
    for crops in (persons.gallery, persons.probe):
        first_ND = np.hstack([vectors.of(crops).c_BSD[:, 0] for vectors in each])
        sides += [first_ND[:, compared_D], persons.patient_B[crops].tolist()]
    hits_N = identification(*sides)["hits"]
    return {"accuracy": (hits_N @ persons.weight_NB / persons.weight_NB.sum(0))[None]}


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
        if lost := int((~measured(dataset, args)).sum()):
            notes.append(
                f"{dataset.root.url}: {lost:,} crops are left out: none of the shown leads was "
                f"recorded in them{args.widest.too_short}."
            )
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
    return list(dict.fromkeys(notes))


def affordable(rows: list[Compared], work: Work, notes: list[str]) -> list[Compared]:
    """The rows that this machine can make; notes say which are left out."""
    if not installed():
        notes.append(f"{BOOSTED}: left out: {INSTALL}")
    crops = sum(len(np.unique(rows)) for rows in work.rows.values())
    if crops <= ROCKET_CROPS:
        return rows
    notes.append(f"{ROCKET}: left out: there are more than {ROCKET_CROPS:,} crops.")
    return [row for row in rows if row.draws]


def require_one_probe(rows: Sequence[Compared], work: Work, args: Namespace) -> None:
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
    unknown_K = np.isnan(task.train.y_NK).all(0)
    if unknown_K.any():
        names = ", ".join(np.array(task.labels.classes)[unknown_K])
        raise ConfigError(
            f"{task.labels.name}: no record of train and valid has a known label in {names}: leave "
            "the column out, or fill in its cells"
        )


def save_head(row: Compared, work: Work, args: Namespace, folder: Path) -> None:
    """Writes the model with its probe as a head, fitted on all labels of train and valid; a
    boosted one on windows, since a model scores these, with the measurements and the mean beat."""
    (task,), embedder = work.tasks.values(), row.draws[0][0]
    model: Any = embedder.model
    readout = model.readout_of(args.readout)
    if args.reader == "boosted":
        more = [part for part in ("rhythm", "waveform") if part not in readout]
        readout = model.readout_of("+".join([*readout, *more]))
    train = task.train
    leads = args.fit_leads or args.leads[0]
    # The model will measure rhythm itself, in its own leads
    vectors = embedded(reading(embedder, readout), work.fitted, train.rows, leads, folder)
    x_ND, record_N = train.means([vectors]), np.arange(len(train.y_NK))
    if args.reader == "boosted":
        x_ND, record_N = train.windows(vectors)
    data = ProbeData(x_ND, train.y_NK[record_N], train.patient_N[record_N], task.kind)
    fitted = seen_in(work.fitted, np.sort(train.rows), "labelled")
    if embedder.precision == "bf16":  # its weights were rounded
        model = load(name_and_folder(args.models[0])[1], args.code)
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
