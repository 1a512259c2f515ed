"""Makes remarks on the labels of the records that `omnilead shard` refused. No score counts these
records, and they may all be of one class, such as the poor ECGs in a table of signal quality.

remarks = remarks_on_refused(task, sheet, [dataset], classes, y_RK)    # y_RK: by row of the sheet
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.dataset.rejects import FLAG_REASONS, read_rejects
from omnilead.data_tools.ecg.record_names import NAMES_IN_MESSAGE, match_records
from omnilead.data_tools.io.errors import DataError
from omnilead.engine.settings.errors import join_first_names

from .config import TaskConfig
from .join import JoinedSheet
from .kinds import KINDS, Array


def remarks_on_refused(
    task: TaskConfig,
    sheet: JoinedSheet,
    datasets: Sequence[Dataset],
    classes: Sequence[str],
    y_RK: Array,
) -> list[str]:
    """Returns a remark on how many refused records have each label, and how many of the records in
    the data."""
    if not KINDS[task.kind].has_classes:
        return []
    refused = refused_rows(task, sheet, datasets)
    if not len(refused):
        return []
    totals, counts = [], []
    for rows in (refused, sheet.used_rows):
        count, total = _class_and_label_counts(task, sheet, classes, y_RK, rows)
        counts.append(count)
        totals.append(total)
    of_refused, of_used = counts
    said = [
        f"{records:,} of {totals[0]:,} refused ECGs are of class {name} ({of_used[name]:,} of "
        f"{totals[1]:,} others)"
        for name, records in of_refused.most_common()
        if records
    ]
    if not said:
        return []
    return [
        f"{task.labels}: {join_first_names(said, NAMES_IN_MESSAGE)}: no score counts them; rejects.csv of the data says why"
    ]


def refused_rows(task: TaskConfig, sheet: JoinedSheet, datasets: Sequence[Dataset]) -> Array:
    """Returns the rows of the sheet whose record was refused, and is in none of the datasets."""
    refused = {
        (source, record): None
        for dataset in datasets
        for source, record, reason, _ in read_rejects(dataset)
        if reason not in FLAG_REASONS
    }
    left = np.setdiff1d(np.arange(len(sheet.cells)), sheet.used_rows)
    if not refused or not len(left):
        return left[:0]
    keys = pa.array([f"{source}/{record}" for source, record in refused])
    names = pa.array([record for _, record in refused])
    try:
        matches = match_records(task.labels, sheet.cells.take(pa.array(left)), keys, names)
    except DataError:  # no row names a refused record, or a name could mean two records
        return left[:0]
    return np.asarray(left[np.sort(matches.row[matches.row >= 0])])


def _class_and_label_counts(
    task: TaskConfig, sheet: JoinedSheet, classes: Sequence[str], y_RK: Array, rows: Array
) -> tuple[Counter[str], int]:
    """Returns how many of these rows are of each class, and how many have a known label."""
    # `classes` lacks a class that only refused records have, so the cells are counted instead
    if task.kind == "multiclass":
        cells = sheet.cells[task.columns[0]].take(pa.array(rows)).drop_null().to_pylist()
        return Counter(cells), len(cells)
    y_RK = y_RK[rows]
    positive_K = (y_RK > 0).sum(0).tolist()
    labelled = int((~np.isnan(y_RK)).any(1).sum())
    return Counter(dict(zip(classes, positive_K, strict=True))), labelled
