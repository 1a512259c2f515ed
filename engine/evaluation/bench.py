"""Compares frozen embeddings of several models by linear probes and by patient identification.

    found = bench(["A=RUN", "hf://org/name"], "DATASET", "OUT", ["sex", "identification"], leads=["12", "1"], share=[0.1, 1])
    found["rows"][0]            # model, task, leads, share, noise, metrics, intervals, n, patients, draws, per_class, left_out
    found["differences"][0]     # model, against, task, leads, share, noise, metric, difference, interval

Baselines are random weights of the same architectures, and the mean beat, which needs no training.
A probe is fitted on a share of the training patients, chosen on all of valid and scored on test,
with one row per record. A smaller share is a subset of a larger one; small shares are drawn several
times and averaged over the draws. Intervals (95 %) and differences use the same bootstrap resamples
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
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc

from omnilead.data_tools.cli import interactive, tell
from omnilead.data_tools.dataset import Dataset
from omnilead.engine.common import ConfigError, parse_leads
from omnilead.engine.data import counter
from omnilead.engine.data.augmenter import none_measured
from omnilead.engine.data.leakage import overlap, patient_ids
from omnilead.engine.evaluation.embedders import Embedder, Vectors, embedded, embedders_of
from omnilead.engine.evaluation.metrics import (
    Array,
    exact_interval,
    identification,
    statistic_of,
    weighted_areas,
)
from omnilead.engine.evaluation.probe import (
    IDENTITY,
    ProbeData,
    fit_scaled,
    labels_to_probe,
    linear,
    require_unlike,
    unlike,
)
from omnilead.engine.evaluation.results import (
    EvalOptions,
    load_task,
    nullable,
    require,
    shown_input,
)
from omnilead.engine.report.bench_report import write
from omnilead.engine.tasks.labels import TaskLabels, read_task

IDENTIFICATION = "identification"
TABLES = (".parquet", ".csv")
RESAMPLES = 1000
DRAWS = 5  # for shares up to 0.1; for larger ones as many as half of the labels allow
WITHIN = 4096  # pre-training crops that the covariance within records is estimated from
LIMITS = {"share": (1e-4, 1.0), "noise": (0.0, 20.0)}
DEFAULTS = {
    "test_data": "",
    "labels": "",
    "test_labels": "",
    "seed": 0,
    "code": False,
    "anonymous": False,
}
DEFAULTS |= {"device": "auto", "precision": "auto", "batch": None}
Samples = dict[str, Array]  # metrics [B]
Scored = tuple[dict[str, Any], Samples]  # facts, and metrics under all weightings
Found = dict[tuple[Any, ...], Scored]  # by model, task, leads, share and noise


class ProbedRecords(NamedTuple):
    """The records of one split."""

    rows: Array  # crops, grouped by record
    begins: Array  # where each record begins in `rows`
    y_NK: Array
    patient_N: Array

    def means(self, vectors: Vectors) -> Array:
        """Mean embedding of each record, over all its halves."""
        _, halves_B, c_BSD = vectors.of(self.rows)
        return np.asarray(
            np.add.reduceat(c_BSD.sum(1), self.begins)
            / np.add.reduceat(halves_B, self.begins)[:, None]
        )


class ProbedTask(NamedTuple):
    labels: TaskLabels
    parts: tuple[ProbedRecords, ProbedRecords, ProbedRecords]  # train, valid, test
    draws: dict[float, list[Array]]  # by share: the drawn training records
    used: dict[
        float, Array
    ]  # by share, bool [K]: outputs whose labels vary in test and in each draw
    weight_NB: Array  # of the test records


class Identities(NamedTuple):
    gallery: Array  # crops
    probe: Array
    within: Array  # crops for pre-training, with two halves
    patient_B: Array  # of all crops
    weight_NB: Array  # of the probes


def bench(
    models: Sequence[str], data: str, out: str | Path, tasks: Sequence[str], leads: Sequence[str] = ("12",),
    share: Sequence[float] = (1.0,), noise: Sequence[float] = (0.0,), **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns the content of OUT/bench.json. `models`: folders, or NAME=FOLDER. `tasks`: names
    of configs/tasks, label tables, and identification. `options`: DEFAULTS, as in the command."""
    noise, leads = sorted(set(noise)), list(dict.fromkeys(leads))
    how = Namespace(**{**DEFAULTS, **options, "leads": leads})
    for name, values in (("share", share), ("noise", noise)):
        if wrong := [value for value in values if not LIMITS[name][0] <= value <= LIMITS[name][1]]:
            raise ConfigError(
                f"--{name} {wrong[0]:g}: must be from {LIMITS[name][0]:g} to {LIMITS[name][1]:g}"
            )
    fitted = Dataset.open(data, how.anonymous)
    tested = Dataset.open(how.test_data, how.anonymous) if how.test_data else fitted
    planned = [
        task_to_probe(word, fitted, tested, sorted(set(share)), how)
        for word in tasks
        if word != IDENTIFICATION
    ]
    probed = {task.labels.task.name: task for task in planned}
    if len(probed) < len(planned):
        raise ConfigError(
            f"--tasks {' '.join(tasks)}: two tasks have the same name: leave one out, or rename "
            "its table"
        )
    persons = identities(fitted, tested, leads) if IDENTIFICATION in tasks else None
    test_rows = np.unique(
        np.concatenate(
            [*(task.parts[2].rows for task in planned), *([persons.probe] if persons else [])]
        )
    )
    needed = {
        fitted: [part.rows for task in planned for part in task.parts[:2]]
        + ([persons.within] if persons else [])
    }
    needed.setdefault(tested, []).extend([test_rows, *([persons.gallery] if persons else [])])
    embedders = embedders_of(models, how)
    notes = [f"{name}: {remark}" for name, task in probed.items() for remark in task.labels.remarks]
    notes += remarks(embedders, leads, tuple(needed))  # refuses bad input before the work starts
    found: Found = {}
    for number, one in enumerate(embedders, 1):
        for lead in leads:
            place = lead, Path(out, "parts")
            clean = {
                dataset: embedded(one, dataset, np.concatenate(rows), 0.0, *place)
                for dataset, rows in needed.items()
            }
            tests = {
                level: embedded(one, tested, test_rows, level, *place) if level else clean[tested]
                for level in noise
            }
            for name, task in probed.items():
                for key, row in probe_scores(task, clean[fitted], tests):
                    found[one.name, name, lead, *key] = row
            for level, test in tests.items():
                if persons:
                    row = identified(persons, clean[fitted], clean[tested], test, one.compared)
                    found[one.name, IDENTIFICATION, lead, None, level] = row
        if not interactive():  # there are no progress bars
            tell(f"bench: {number} of {len(embedders)} done: {one.name}")
    about = {
        "data": data,
        "fingerprint": fitted.fingerprint,
        "test_data": how.test_data or None,
        "seed": how.seed,
    }
    random = {one.name: one.random for one in embedders}
    document: dict[str, Any] = nullable(
        {**about, "models": random, "notes": notes, **compared(found, random)}
    )
    write(document, Path(out))
    return document


def remarks(
    embedders: Sequence[Embedder], leads: Sequence[str], datasets: Sequence[Dataset]
) -> list[str]:
    """Warnings of data leakage, different preprocessing and missing leads; ConfigError if data do
    not suit a model."""
    notes: dict[str, None] = {}
    for one, lead, dataset in product(embedders, leads, datasets):
        if one.model and one.name != one.random:
            warned = shown_input(one.model, dataset, EvalOptions(leads=lead))[1]
            notes |= dict.fromkeys(f"{one.name}: {note}" for note in warned)
    for dataset in datasets:
        if lost := int((~measured(dataset, leads)).sum()):
            notes[
                f"{dataset.root.url}: {lost:,} crops are left out: none of the shown leads was "
                "recorded in them."
            ] = None
    return list(notes)


def measured(dataset: Dataset, leads: Sequence[str]) -> Array:
    """bool [crops]: every set of leads has a recorded lead, so that all rows are of the same
    ECGs."""
    return np.asarray(
        ~np.any([none_measured(dataset, parse_leads(lead)) for lead in leads], axis=0)
    )


def task_to_probe(
    word: str, fitted: Dataset, tested: Dataset, shares: Sequence[float], how: Namespace
) -> ProbedTask:
    """`tested`: if it is another dataset, it has outputs of the same names, and its own test
    split."""
    table = word.endswith(TABLES)
    try:
        named = ("", word) if table else (word, table_of(how.labels, word))
        labels = labels_to_probe(fitted, *named, ("train", "valid"))
        if labels is None:
            raise ConfigError("name a task")
        own = replace(labels.task, folds={}) if table else load_task(word)
        own = replace(own, columns=labels.task.columns, classes=labels.task.classes)
        own = replace(own, labels=table_of(how.test_labels, word) or labels.task.labels)
        other = labels if tested is fitted else read_task(own, [tested])
        sides = (fitted, labels, "train"), (fitted, labels, "valid"), (tested, other, "test")
        train, valid, test = (records_of(*side, how.leads) for side in sides)
        require_unlike(other, "test", tested)
        if tested is not fitted and (
            both := overlap(fitted, np.union1d(train.rows, valid.rows), tested, test.rows)
        ):
            labels.remarks.append(
                f"Possible leakage: {both} is in train or valid of --data and in test of "
                "--test-data."
            )
    except ConfigError as error:
        absent = how.labels and not table and not table_of(how.labels, word)
        raise ConfigError(
            f"--tasks {word}: "
            f"{f'no {word}.parquet in --labels {how.labels}: ' * bool(absent)}{error}"
        ) from None
    draws = {share: list(drawn(train.patient_N, share)) for share in shares}
    used = {
        share: unlike(test.y_NK) & np.all([unlike(train.y_NK[at]) for at in draws[share]], axis=0)
        for share in shares
    }
    if none := [share for share in shares if not used[share].any()]:
        counts = (
            f"{none[0]:g} of {len(np.unique(train.patient_N)):,} patients of train, "
            f"{len(test.y_NK):,} records of test"
        )
        raise ConfigError(
            f"--tasks {word}: --share {counts}: no class has positives and negatives in both: use "
            "a larger share"
        )
    return ProbedTask(labels, (train, valid, test), draws, used, resampled(test.patient_N))


def table_of(folder: str, word: str) -> str:
    """The label table of a task in a folder written by `omnilead labels`; "" if there is none."""
    paths = [Path(folder, Path(word).stem + suffix) for suffix in TABLES]
    return next((str(path) for path in paths if folder and path.is_file()), "")


def records_of(
    dataset: Dataset, labels: TaskLabels, split: str, leads: Sequence[str]
) -> ProbedRecords:
    rows = labels.rows(0, split)
    rows = rows[measured(dataset, leads)[rows]]
    if not len(rows):
        raise ConfigError(
            f"{labels.name or dataset.root.url}: no record of {dataset.root.url} is in the split "
            f"{split}"
        )
    names = pc.binary_join_element_wise(
        *dataset.table(["source", "record"]).columns, "/"
    ).combine_chunks()
    record_B = names.dictionary_encode().indices.to_numpy()
    rows = rows[np.argsort(record_B[rows], kind="stable")]
    begins = np.flatnonzero(np.diff(record_B[rows], prepend=-1))
    return ProbedRecords(
        rows, begins, labels.y[0][rows[begins]], patient_ids([dataset])[0][rows[begins]]
    )


def drawn(patient_N: Array, share: float) -> Iterator[Array]:
    """For each draw, the rows of a share of the patients. A smaller share is a subset of a larger
    one."""
    patients = np.unique(patient_N)
    for draw in range(max(1, min(DRAWS, int(0.5 / share)))):
        order = np.argsort(counter.uniform(0, counter.RandomStream.LABELS, draw, patients))
        yield np.flatnonzero(
            np.isin(patient_N, patients[order[: max(1, round(share * len(patients)))]])
        )


def weighted(draws: Sequence[Any]) -> Iterator[tuple[Any, Array]]:
    """Each draw with its weights [B]: in the mean over the draws, and in resamples. These have
    one draw fewer, so that their means vary as means of all draws do (Rao and Wu 1988)."""
    n, fewer = len(draws), max(1, len(draws) - 1)
    weight_BR = np.random.default_rng(1).multinomial(fewer, np.full(n, 1 / n), RESAMPLES) / fewer
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


def identities(fitted: Dataset, tested: Dataset, leads: Sequence[str]) -> Identities:
    there = np.flatnonzero(measured(tested, leads))
    gallery, probe = (np.intersect1d(tested.select(identity=role), there) for role in IDENTITY)
    for role, rows in zip(IDENTITY, (gallery, probe), strict=True):
        require(
            rows,
            tested,
            f"id={role}",
            "patients of ptb-xl with two sessions: shard --id-sources names others",
        )
    within, patient_B = fitted.select(pretrain=True), patient_ids([tested])[0]
    within = within[((fitted.column("halves") == 2) & measured(fitted, leads))[within]]
    require(within, fitted, "pretrain=true and two halves", "records for pre-training")
    return Identities(
        gallery, probe, within[:WITHIN], patient_B, resampled(patient_B[probe])
    )  # rows are in random order


def probe_scores(
    task: ProbedTask, fit: Vectors, tests: Mapping[float, Vectors]
) -> Iterator[tuple[Any, Scored]]:
    """Scores for each share and level of noise."""
    (train, valid, test), kind, names = (
        task.parts,
        task.labels.task.kind,
        np.array(task.labels.classes),
    )
    x_ND, valid_ND = train.means(fit), valid.means(fit)
    tests_ND = np.concatenate([test.means(vectors) for vectors in tests.values()])
    for share, draws in task.draws.items():
        used_K = task.used[share]
        solved_K = used_K | (kind == "multiclass")  # exclusive classes are solved together
        sums: dict[float, dict[str, Any]] = {level: {} for level in tests}
        for at, weight_B in weighted(draws):
            known = train.y_NK[at][:, solved_K], valid.y_NK[:, solved_K]
            scores_NK = fit_scaled(
                linear, ProbeData(x_ND[at], known[0], valid_ND, known[1], tests_ND, kind)
            ).scores_NK
            for sum_, part_NK in zip(
                sums.values(), np.split(scores_NK[:, used_K[solved_K]], len(tests)), strict=True
            ):
                for name, of_KB in by_class(
                    kind, test.y_NK[:, used_K], part_NK, task.weight_NB
                ).items():
                    sum_[name] = sum_.get(name, 0) + weight_B * of_KB
        facts = {
            "n": len(test.y_NK),
            "patients": len(np.unique(test.patient_N)),
            "labelled": len(draws[0]),
        }
        facts |= {
            "draws": len(draws),
            "classes": int(used_K.sum()),
            "left_out": names[~used_K].tolist(),
        }
        for level, of in sums.items():
            used = names[used_K].tolist()
            classes = {
                name: of_KB[:, 0].tolist() for name, of_KB in of.items() if len(of_KB) == len(used)
            }
            per_class = {
                name: dict(zip(used, values, strict=True)) for name, values in classes.items()
            }
            yield (share, level), (facts | {"per_class": per_class}, over_classes(of))


def by_class(kind: str, y_NK: Array, scores_NK: Array, weight_NB: Array) -> Samples:
    """Metrics [K, B]; for regression their means over K, [1, B]."""
    if kind == "regression":
        statistic = statistic_of(kind, y_NK, scores_NK)
        return dict(
            zip(
                statistic.names,
                np.stack([statistic(w_N) for w_N in weight_NB.T], 1)[:, None],
                strict=True,
            )
        )
    areas = [
        weighted_areas(y_N, score_N, weight_NB)
        for y_N, score_N in zip(y_NK.T, scores_NK.T, strict=True)
    ]
    return dict(zip(("auroc", "auprc"), np.stack(areas, 1), strict=True))


def over_classes(of: Samples) -> Samples:
    """Means of metrics [K, B] over the classes for which they are defined."""
    with warnings.catch_warnings(action="ignore"):  # the mean of nothing but NaN is NaN
        return {name: np.nanmean(of_KB, 0) for name, of_KB in of.items()}


def identified(
    of: Identities, fit: Vectors, known: Vectors, test: Vectors, width: int | None
) -> Scored:
    """Accuracy by cosine of the first `width` dimensions, and by cosine after whitening."""
    gallery, probe = known.of(of.gallery).c_BSD[:, 0], test.of(of.probe).c_BSD[:, 0]
    center_D, white_DD = whitening(fit.of(of.within).c_BSD)
    ids, found = (of.patient_B[of.gallery].tolist(), of.patient_B[of.probe].tolist()), {}
    for name, (a, b) in {
        "accuracy": (gallery[:, :width], probe[:, :width]),
        "accuracy_whitened": ((gallery - center_D) @ white_DD, (probe - center_D) @ white_DD),
    }.items():
        scores = identification(a, ids[0], b, ids[1])
        found[name] = scores["hits"] @ of.weight_NB / of.weight_NB.sum(0)
    return {
        "n": len(probe),
        "patients": len(set(ids[1])),
        "gallery": len(gallery),
        "chance": scores["chance"],
    }, found


def whitening(c_BSD: Array) -> tuple[Array, Array]:
    """Mean [D], and a matrix [D, D] after which the two halves of a crop differ equally in every
    direction. Their covariance is shrunk towards a multiple of the identity (Chen et al. 2010,
    OAS), more so for fewer crops."""
    inside_BD, (n, _, width) = (
        np.diff(c_BSD.astype(np.float64), axis=1)[:, 0] / np.sqrt(2),
        c_BSD.shape,
    )
    covariance_DD = inside_BD.T @ inside_BD / n
    trace, square = np.trace(covariance_DD), np.square(covariance_DD).sum()
    spread = (n + 1 - 2 / width) * (square - trace**2 / width)
    shrink = min(1.0, ((1 - 2 / width) * square + trace**2) / spread) if spread > 0 else 1.0
    values_D, basis_DD = np.linalg.eigh(
        (1 - shrink) * covariance_DD + shrink * trace / width * np.eye(width)
    )
    return c_BSD.mean((0, 1)), basis_DD / np.sqrt(
        np.maximum(values_D, 1e-12 * max(values_D[-1], 1e-12))
    )


def compared(found: Found, random: Mapping[str, str]) -> dict[str, Any]:
    """Rows, and their differences from random weights of the same architecture (named in `random`)
    and from the first."""
    rows, differences, first = [], [], next(iter(random))
    place = {key[1:]: i for i, key in reversed(list(enumerate(found)))}
    for key, (facts, samples) in sorted(found.items(), key=lambda one: place[one[0][1:]]):
        about = dict(zip(("model", "task", "leads", "share", "noise"), key, strict=True))
        metrics = {name: float(of_B[0]) for name, of_B in samples.items()}
        ends = {
            name: interval(of_B, facts["patients"] * name.startswith("accuracy"))
            for name, of_B in samples.items()
        }
        rows.append(about | facts | {"metrics": metrics, "intervals": ends})
        for other in dict.fromkeys([random[key[0]], first]):
            for name, of_B in samples.items() if other not in ("", key[0]) else ():
                gap_B = of_B - found[other, *key[1:]][1][name]
                one = {
                    "against": other,
                    "metric": name,
                    "difference": float(gap_B[0]),
                    "interval": interval(gap_B),
                }
                differences.append(about | one)
    return {"rows": rows, "differences": differences}


def interval(of_B: Array, people: int = 0) -> list[float]:
    """Percentiles of the resamples; for a share of `people` that is 0 or 1, which resamples never
    change, Clopper-Pearson's."""
    if people > 1 and of_B[0] in (0, 1):
        return exact_interval(int(of_B[0]) * people, people)
    with warnings.catch_warnings(action="ignore"):  # undefined in all resamples: NaN
        ends: list[float] = np.nanpercentile(of_B[1:], (2.5, 97.5)).tolist()
    return ends
