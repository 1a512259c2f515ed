"""The probes (engine.evaluation.probes) on the roles of a dataset: embeddings in, a few numbers and a table out.

Diagnosis: a record is one row, the mean of its segments; fitted on the role train, chosen on valid, scored on test.
Identification: the first 5 s of each gallery and probe crop, cosine (paper, section "Patient identification").
"""

from typing import Any

import numpy as np
import pyarrow as pa

from data_tools.dataset import Dataset
from engine.common import ConfigError
from engine.evaluation.metrics import METRICS, identification, outputs_of, summary
from engine.evaluation.probes import PROBES, Rows

DX, IDENTITY = ("train", "valid", "test"), ("gallery", "probe")


def roles(dataset: Dataset) -> np.ndarray:
    """Rows that the probes need."""
    found = [dataset.select(dx=role) for role in DX] + [dataset.select(identity=role) for role in IDENTITY]
    lacking = [name for name, rows in zip(("dx train", "dx valid", "dx test", *IDENTITY), found, strict=True) if not len(rows)]
    if len(lacking) == len(found):
        raise ConfigError(f"{dataset.root.url}: no crop has a role: build it with `data_tools shard --plan paper`")
    return np.unique(np.concatenate(found))


def probe(dataset: Dataset, halves: pa.Table) -> dict[str, Any]:
    """`halves`: embeddings of the crops of `roles`, --per half."""
    row_H = halves["row"].to_numpy()
    c_HD = halves["embedding"].combine_chunks().flatten().to_numpy().reshape(len(row_H), -1)
    scores: dict[str, Any] = {}
    parts = [records(dataset, row_H, c_HD, role) for role in DX]
    if all(len(x) for x, _ in parts):
        (train, y), (valid, valid_y), (test, test_y) = parts
        rows = Rows(train, y, valid, valid_y, test)
        for name, fit in PROBES.items():
            found = fit(rows)
            numbers = summary(test_y, outputs_of(found.scores_NK), found.scores_NK)
            scores[name] = {metric: numbers[metric] for metric in METRICS} | {"chosen": found.chosen}
        scores["records"] = {role: len(x) for role, (x, _) in zip(DX, parts, strict=True)}
    (gallery, names), (probes, asked) = (firsts(dataset, row_H, c_HD, role) for role in IDENTITY)
    if len(gallery) and len(probes):
        told = identification(gallery, names, probes, asked)
        scores["identification"] = {
            name: told[name] for name in ("accuracy", "top5", "chance", "n_probes", "n_gallery", "one_sided")
        }
    return scores


def records(dataset: Dataset, row_H: np.ndarray, c_HD: np.ndarray, role: str) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings [n, D] and labels [n, 26] of the records of a dx role."""
    mine = np.flatnonzero(np.isin(row_H, dataset.select(dx=role)))
    if not len(mine):
        return np.empty((0, c_HD.shape[1])), np.empty((0, 0))
    table = dataset.table(["source", "record", "labels"]).take(row_H[mine])
    texts = zip(table["source"].to_pylist(), table["record"].to_pylist(), strict=True)
    names = np.array([f"{source}/{record}" for source, record in texts])
    _, first, which = np.unique(names, return_index=True, return_inverse=True)
    sums = np.zeros((len(first), c_HD.shape[1]))
    np.add.at(sums, which, c_HD[mine])
    labels = np.array(table["labels"].take(first).to_pylist(), bool)
    return sums / np.bincount(which)[:, None], labels


def firsts(dataset: Dataset, row_H: np.ndarray, c_HD: np.ndarray, role: str) -> tuple[np.ndarray, list[Any]]:
    """Embeddings of the first half of each crop, and its patient."""
    begins = np.diff(row_H, prepend=-1) != 0
    mine = np.flatnonzero(begins & np.isin(row_H, dataset.select(identity=role)))
    table = dataset.table(["source", "patient"]).take(row_H[mine]).to_pydict()  # two sources may number theirs alike
    return c_HD[mine], [f"{source}/{patient}" for source, patient in zip(*table.values(), strict=True)]


def report(scores: dict[str, Any]) -> str:
    lines = []
    if "records" in scores:
        count = scores["records"]
        lines.append(f"diagnosis, {count['test']:,} records of test ({count['train']:,} train, {count['valid']:,} valid)")
        lines.append(f"{'':18}" + "".join(f"{metric:>11}" for metric in METRICS))
        for name, chosen in (("linear", "strength"), ("nearest", "k")):
            told = scores[name]
            numbers = "".join(f"{told[metric]:11.4f}" for metric in METRICS)
            lines.append(f"{name:18}{numbers}   {chosen} {told['chosen']:g}")
    if "identification" in scores:
        told = scores["identification"]
        against = f"of {told['n_probes']:,} probes, {told['n_gallery']:,} in the gallery; chance {told['chance']:.4f}"
        against += f"; {told['one_sided']:,} of patients whom the gallery lacks, never hits" if told["one_sided"] else ""
        lines.append(f"{'identification':18}{told['accuracy']:11.4f}   {against}")
    return "\n".join(lines)
