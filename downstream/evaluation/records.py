"""Selects the records that probes are fitted on and tested on, draws shares of their patients, and makes
folds.

    shown = ShownLeads(model.input, ("12", "1"))
    train = probed_records(data, labels, FIT_SPLITS, shown)
    train.mean_embeddings([vectors])                                  # an embedding for each record
    fold_N = assign_folds(fold_groups(data, train), 5)
    for rows, scored in train_test_rows(rows, fold_N): ...             # what one probe is fitted on, and what it scores

Axes: N records, B crops, S windows, D width of an embedding, K classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from sklearn.model_selection import GroupKFold

from omnilead.engine.data.datasets import Datasets
from omnilead.engine.model.input import Input
from omnilead.engine.settings import counter
from omnilead.engine.settings.errors import ConfigError, Flag
from omnilead.engine.settings.leads import parse_leads

from ..tasks.join import record_of_crop
from ..tasks.labels import TaskLabels
from ..tasks.metrics import Array
from .vectors import Vectors

FIT_SPLITS = ("train", "valid")  # the splits that a probe is fitted on
# A share of the patients up to 0.1 is drawn this many times; a larger share is drawn less often
MAX_LABEL_DRAWS = 5


class ProbedRecords(NamedTuple):
    """The labelled records of the splits that a probe is fitted on, or tested on."""

    rows: Array  # numbers of the crops, grouped by record
    begins: Array  # the index in `rows` of the first crop of each record
    y_NK: Array
    patient_N: Array

    def mean_embeddings(self, embeddings: Sequence[Vectors]) -> Array:
        """Returns the mean embedding of each record over its windows [N, D]. The embeddings of
        several embedders are concatenated."""
        return np.hstack(
            [self._means_of_records(vectors.take(self.rows)) for vectors in embeddings]
        )

    def _means_of_records(self, vectors: Vectors) -> Array:
        """Returns the mean vector of each record over its windows [N, D]."""
        sum_ND = np.add.reduceat(vectors.c_BSD.sum(1), self.begins)
        count_N = np.add.reduceat(vectors.windows_B, self.begins)
        return np.asarray(sum_ND / count_N[:, None])

    def windows_and_records(self, vectors: Vectors) -> tuple[Array, Array]:
        """Returns the embeddings of all windows, and the number of the record of each window."""
        _, windows_B, c_BSD = vectors.take(self.rows)
        there_BS = np.arange(c_BSD.shape[1]) < windows_B[:, None]
        record_B = np.searchsorted(self.begins, np.arange(len(self.rows)), "right") - 1
        return c_BSD[there_BS], np.repeat(record_B, windows_B)


@dataclass(frozen=True)
class ShownLeads:
    """The sets of leads that models are shown. A crop is used only if some lead of every set was
    recorded, so that all rows of a comparison score the same ECGs."""

    input: Input  # the model input with the longest window of all models
    leads: tuple[str, ...]  # sets of leads; a model is shown one set at a time

    def usable_crops(self, data: Datasets) -> Array:
        """Returns bool [crops]: True if some lead of every set was recorded, and the crop has a
        window for every model."""
        inputs = [replace(self.input, seen_leads=parse_leads(leads)) for leads in self.leads]
        return np.asarray(
            np.all([data.concatenate(model_input.usable_crops) for model_input in inputs], axis=0)
        )

    def left_out_notes(self, data: Datasets) -> list[str]:
        """Returns a note that says how many crops are not usable and why; no note if all are."""
        lost = int((~self.usable_crops(data)).sum())
        if not lost:
            return []
        return [
            f"{data.name}: {lost:,} crops are left out: none of the shown leads was recorded in "
            f"them{self.input.too_short_hint}."
        ]


def probed_records(
    data: Datasets, labels: TaskLabels, splits: Sequence[str], shown: ShownLeads
) -> ProbedRecords:
    """Returns the labelled records of these splits that models can be shown; ConfigError if there
    are none."""
    rows = np.concatenate([labels.rows_of_all_datasets(split) for split in splits])
    rows = rows[shown.usable_crops(data)[rows]]
    if not len(rows):
        raise ConfigError(
            f"{labels.name or data.name}: no record of {data.name} is in the split {splits[0]}"
        )
    record_B = record_of_crop(data.all)
    rows = rows[np.argsort(record_B[rows], kind="stable")]
    begins = np.flatnonzero(np.diff(record_B[rows], prepend=-1))
    first = rows[begins]
    return ProbedRecords(rows, begins, labels.all_y[first], labels.all_patients[first])


def draws_of_share(patient_N: Array, share: float) -> Iterator[Array]:
    """Yields, for each draw, the rows of a share of the patients. In one draw, the patients of a
    smaller share are among those of a larger one."""
    patients = np.unique(patient_N)
    count = max(1, round(share * len(patients)))
    for draw in range(max(1, min(MAX_LABEL_DRAWS, int(0.5 / share)))):
        order = np.argsort(counter.uniform(0, counter.RandomStream.LABELS, draw, patients))
        yield np.flatnonzero(np.isin(patient_N, patients[order[:count]]))


def train_test_rows(rows: Array, fold_N: Array | None) -> list[tuple[Array, Any]]:
    """Returns (training records, test records) for each probe: one pair for each fold, or only one
    pair if `fold_N` is None. The training records are among `rows`."""
    if fold_N is None:
        return [(rows, slice(None))]
    return [(rows[fold_N[rows] != fold], fold_N == fold) for fold in np.unique(fold_N)]


def fold_groups(data: Datasets, records: ProbedRecords) -> Array:
    """Returns the number of a group for each record; a group must not be split between folds.
    Records of one patient are in one group, and so are records with the same waveform, since an ECG
    may occur under two names."""
    crops = len(records.rows)
    record_B = np.repeat(np.arange(len(records.y_NK)), np.diff(records.begins, append=crops))
    wave_B = np.unique(data.column("waveform")[records.rows], return_inverse=True)[1]
    patients, patient_N = np.unique(records.patient_N, return_inverse=True)
    # The nodes of this graph are the patients and, after them, the waveforms. An edge joins a
    # patient to each waveform of the patient
    edges = patient_N[record_B], len(patients) + wave_B
    nodes = len(patients) + crops
    graph = coo_matrix((np.ones(crops), edges), (nodes, nodes))
    part_N = connected_components(graph, directed=False)[1][patient_N]
    least = np.full(part_N.max() + 1, len(patients))
    np.minimum.at(least, part_N, patient_N)
    return np.asarray(least[part_N])


def assign_folds(group_N: Array, count: int) -> Array:
    """Returns the number of the fold of each record; ConfigError if there are fewer groups than
    folds."""
    groups = len(np.unique(group_N))
    if count > groups:
        raise ConfigError(
            Flag("--folds"), f" {count}: only {groups:,} patients have labels: use fewer folds"
        )
    fold_N = np.zeros(len(group_N), np.int64)
    for fold, (_, held_out) in enumerate(GroupKFold(count).split(group_N, groups=group_N)):
        fold_N[held_out] = fold
    return fold_N
