"""Real ECGs, cross-validated over patients: what encoders are worth for people that none of their
training has seen.

    python -m benchmarks.real dataset ARCHIVE ... --out DIR python -m benchmarks.real score DIR
    --models fold-0=RUN ... fold-4=RUN synthetic=RUN --leads 12 1 --out OUT

`dataset`: DIR/all, and for pre-training DIR/fold-K, with the records of all patients but the K-th
fold's. `score` writes what `omnilead bench` does; the models fold-0, fold-1, ... count as one, each
on its own fold. Diagnosis: a linear probe on the other folds, one of which chooses the penalty.
AUROC and AUPRC of a class are means over the folds in which it has positives and negatives, since
the scores of five probes are not on one scale; a class with few positives, or with none among the
training records of a fold in a draw, is left out. Identification: the other half of each held-out
record, and a patient's second session, among the first halves of everyone, whitened by the other
folds. The notes are McNemar's exact tests.

Axes: F folds, B crops, S halves, D width, N records or halves, K classes.
"""

import argparse
import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from omnilead.data_tools.__main__ import main as data_tools
from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.data_tools.errors import DataError, ReadError
from omnilead.data_tools.hospital.files import HospitalFiles
from omnilead.data_tools.sources import open_sources
from omnilead.engine.common import ConfigError, Parser, positive, write_whole
from omnilead.engine.data.leakage import patient_ids
from omnilead.engine.evaluation.bench import (
    DEFAULTS,
    ProbedRecords,
    Scored,
    by_class,
    compared,
    drawn,
    over_classes,
    resampled,
    weighted,
    whitening,
)
from omnilead.engine.evaluation.embedders import Vectors, embedded, embedders_of
from omnilead.engine.evaluation.metrics import Array, identification
from omnilead.engine.evaluation.probe import ProbeData, fit_scaled, linear, unlike
from omnilead.engine.evaluation.results import nullable
from omnilead.engine.report.bench_report import write

FOLDS, BOTH = "folds.json", "with real ECGs"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "python -m benchmarks.real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    make, test = commands.add_parser("dataset"), commands.add_parser("score")
    make.add_argument("archives", nargs="+", metavar="ARCHIVE")
    make.add_argument(
        "--folds", type=int, choices=range(3, 21), default=5, metavar="F", help="3 to 20 (5)"
    )
    test.add_argument("data", type=Path, metavar="DIR")
    test.add_argument("--models", nargs="+", required=True, metavar="NAME=RUN")
    test.add_argument("--leads", nargs="+", default=["12"], metavar="L")
    test.add_argument(
        "--share",
        nargs="+",
        type=float,
        default=[1.0],
        metavar="X",
        help="of the patients with labels",
    )
    test.add_argument(
        "--positives", type=positive, default=20, metavar="N", help="fewest of a class (20)"
    )
    for command in (make, test):
        command.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        return (
            make_datasets(options.archives, options.folds, options.out)
            if options.command == "dataset"
            else score(options)
        )
    except (ConfigError, DataError, OSError) as error:
        print(f"benchmarks.real: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def make_datasets(archives: Sequence[str], folds: int, out: Path) -> int:
    if code := data_tools(["shard", *archives, "--out", str(out / "all"), "--workers", "1"]):
        return code
    dataset, headers = Dataset.open(str(out / "all")), dict[str, Path]()
    for source in (
        source for archive in archives for source in open_sources(archive, hospital=HospitalFiles)
    ):
        for key in source.keys():  # noqa: SIM118 - iterating a source reads its records
            with suppress(ReadError):  # a record that the dataset does not have
                headers[source.header(key).name] = Path(source.root.url, key)
    names = dataset.table(["record"])["record"].to_pylist()
    for fold in range(folds):
        (files := out / f"files-{fold}").mkdir(exist_ok=True)
        for name in {
            name for name, its in zip(names, folds_of(dataset, folds), strict=True) if its != fold
        }:
            for path in headers[name].parent.glob(f"{headers[name].stem}.*"):
                shutil.copyfile(path, files / path.name)
        words = ["--source", "wfdb", "--plan", "all", "--workers", "1"]
        if code := data_tools(["shard", str(files), "--out", str(out / f"fold-{fold}"), *words]):
            return code
        shutil.rmtree(files)
    write_whole(
        out / FOLDS, json.dumps({"folds": folds, "fingerprint": dataset.fingerprint}) + "\n"
    )
    return 0


def folds_of(dataset: Dataset, folds: int) -> Array:
    """Of each crop, by patient."""
    people_B = np.unique(patient_ids([dataset])[0], return_inverse=True)[1]
    return np.asarray(np.random.default_rng(0).permutation(people_B.max() + 1)[people_B] % folds)


def score(options: argparse.Namespace) -> int:
    folds = int(json.loads((options.data / FOLDS).read_text())["folds"])
    dataset, found = Dataset.open(str(options.data / "all")), dict[tuple[Any, ...], Scored]()
    hits: dict[tuple[str, str], dict[str, Array]] = {}
    crops = RealCrops(dataset, folds, options.positives)
    embedders = {one.name: one for one in embedders_of(options.models, Namespace(**DEFAULTS))}
    own = [name for name in (f"fold-{fold}" for fold in range(folds)) if name in embedders]
    if own and len(own) < folds:
        raise ConfigError(
            f"--models: {', '.join(own)} of {folds} folds: name one for each, or none"
        )
    models = {BOTH: own} if own else {}
    models |= {name: [name] * folds for name in embedders if name not in own}
    for leads in options.leads:
        vectors = {
            one.name: embedded(one, dataset, crops.all, 0.0, leads, options.out / "parts")
            for one in embedders.values()
        }
        for name, of in models.items():
            vectors_F, width = [vectors[one] for one in of], embedders[of[0]].compared
            for share in options.share:
                found[name, "diagnosis", leads, share, 0.0] = crops.diagnosis(vectors_F, share)
            for task in ("other half", "second session"):
                scores, hit = crops.identification(vectors_F, task, width)
                found[name, task, leads, None, 0.0] = scores
                hits.setdefault((task, leads), {})[name] = hit
    random = {name: embedders[of[0]].random for name, of in models.items()}
    document = compared(found, random) | {
        "data": str(options.data),
        "fingerprint": dataset.fingerprint,
        "models": random,
    }
    unknown = (
        f"{crops.unlabelled} records without a SNOMED code are left out, also those whose "
        "statements have none"
    )
    document["notes"] = [
        f"Diagnosis: {', '.join(crops.classes)}; {unknown}.",
        *(exact(*key, of) for key, of in hits.items()),
    ]
    write(nullable(document), options.out)
    return 0


class RealCrops:
    """Crops of a dataset with the folds of their patients; of the records those that have labels,
    and those with two halves."""

    def __init__(self, dataset: Dataset, folds: int, positives: int) -> None:
        self.all, self.fold_B, self.people_B = (
            np.arange(len(dataset)),
            folds_of(dataset, folds),
            patient_ids([dataset])[0],
        )
        source, name = dataset.table(["source", "record"]).to_pydict().values()
        record_B = np.unique(
            [f"{a}/{b}" for a, b in zip(source, name, strict=True)], return_inverse=True
        )[1]
        known_B = np.array([bool(codes) for codes in dataset.table(["dx"])["dx"].to_pylist()])
        self.unlabelled = len(np.unique(record_B[~known_B]))
        rows = np.argsort(record_B, kind="stable")
        rows = rows[known_B[rows]]
        begins = np.flatnonzero(np.diff(record_B[rows], prepend=-1))
        y_NK = dataset.labels[rows[begins]].astype(float)
        frequent_K = y_NK.sum(0) >= positives
        if not frequent_K.any():
            raise ConfigError(
                f"--positives {positives}: no class has as many: name a smaller number"
            )
        self.records = ProbedRecords(rows, begins, y_NK[:, frequent_K], self.people_B[rows[begins]])
        self.classes = np.array(CLASSES)[frequent_K].tolist()
        whole_B = (dataset.column("halves") == 2) & (dataset.column("start_s") == 0)
        self.whole = np.flatnonzero(whole_B)  # crops: the first of each record
        order = np.lexsort((np.array(name)[self.whole], self.people_B[self.whole]))
        first_N = np.diff(self.people_B[self.whole][order], prepend=-1) != 0
        self.first, rest = self.whole[order[first_N]], self.whole[order[~first_N]]
        self.second = rest[np.unique(self.people_B[rest], return_index=True)[1]]

    def diagnosis(self, vectors_F: Sequence[Vectors], share: float) -> Scored:
        """Means over the folds where a class has both labels, each with the weights of its own
        records, then over the draws."""
        of, draws, samples = (
            self.records,
            list(drawn(self.records.patient_N, share)),
            dict[str, Any](),
        )
        weight_NB, fold_N, x_FND = (
            resampled(of.patient_N),
            self.fold_B[of.rows[of.begins]],
            [*map(of.means, vectors_F)],
        )
        folds, drawn_RN = range(len(x_FND)), [np.isin(np.arange(len(fold_N)), at) for at in draws]
        test_FN, valid_FN = (
            [fold_N == (fold + ahead) % len(x_FND) for fold in folds] for ahead in (0, 1)
        )
        train_RFN = [
            [at_N & ~test_FN[fold] & ~valid_FN[fold] for fold in folds] for at_N in drawn_RN
        ]
        used_K = np.any([unlike(of.y_NK[test_N]) for test_N in test_FN], 0)
        used_K &= np.all(
            [unlike(of.y_NK[train_N]) for train_FN in train_RFN for train_N in train_FN], 0
        )
        if not used_K.any():
            raise ConfigError(
                f"--share {share:g}: no class has positives in every draw and fold: use a larger "
                "share"
            )
        y_NK, names = of.y_NK[:, used_K], np.array(self.classes)
        for train_FN, weight_B in weighted(train_RFN):
            parts: dict[str, list[Array]] = {}
            for x_ND, train_N, valid_N, test_N in zip(
                x_FND, train_FN, valid_FN, test_FN, strict=True
            ):
                data = ProbeData(
                    x_ND[train_N], y_NK[train_N], x_ND[valid_N], y_NK[valid_N], x_ND[test_N]
                )
                scores_NK = fit_scaled(linear, data).scores_NK
                for name, values_KB in by_class(
                    "multilabel", y_NK[test_N], scores_NK, weight_NB[test_N]
                ).items():
                    parts.setdefault(name, []).append(values_KB)
            for name, mean_KB in over_classes(
                {name: np.stack(of_F) for name, of_F in parts.items()}
            ).items():  # over folds
                samples[name] = samples.get(name, 0) + weight_B * mean_KB
        facts = {"n": len(y_NK), "patients": len(np.unique(of.patient_N)), "draws": len(draws)}
        return facts | {
            "classes": int(used_K.sum()),
            "left_out": names[~used_K].tolist(),
        }, over_classes(samples)

    def identification(
        self, vectors_F: Sequence[Vectors], task: str, width: int | None
    ) -> tuple[Scored, Array]:
        """The metrics, and the hits of whitened embeddings."""
        gallery, probes, half = (
            (self.whole, self.whole, 1) if task == "other half" else (self.first, self.second, 0)
        )
        hits = {name: np.zeros(len(probes)) for name in ("accuracy", "accuracy_whitened")}
        for fold, vectors in enumerate(vectors_F):
            asked_N = self.fold_B[probes] == fold
            center_D, matrix_DD = whitening(
                vectors.of(self.whole[self.fold_B[self.whole] != fold]).c_BSD
            )
            sides = vectors.of(gallery).c_BSD[:, 0], vectors.of(probes[asked_N]).c_BSD[:, half]
            ids = self.people_B[gallery].tolist(), self.people_B[probes[asked_N]].tolist()
            for name, (entries, asked) in zip(
                hits,
                ([c[:, :width] for c in sides], [(c - center_D) @ matrix_DD for c in sides]),
                strict=True,
            ):
                if len(asked):
                    hits[name][asked_N] = identification(entries, ids[0], asked, ids[1])["hits"]
        weight_NB = resampled(self.people_B[probes])
        facts = {
            "n": len(probes),
            "patients": len(np.unique(self.people_B[probes])),
            "gallery": len(gallery),
        }
        return (
            facts,
            {name: hit @ weight_NB / weight_NB.sum(0) for name, hit in hits.items()},
        ), hits["accuracy_whitened"]


def exact(task: str, leads: str, hits: dict[str, Array]) -> str:
    """McNemar's exact test of each two models."""
    said = []
    for (a, of_a), (b, of_b) in combinations(hits.items(), 2):
        only_a, only_b = (
            int((one & ~other).sum())
            for one, other in ((of_a > 0.5, of_b > 0.5), (of_b > 0.5, of_a > 0.5))
        )
        p = binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
        said.append(f"{only_a} only by {a}, {only_b} only by {b}, p {p:.2g}")
    return f"{task}, leads {leads}, found whitened: {'; '.join(said)}."


if __name__ == "__main__":
    sys.exit(main())
