"""Data leakage: patients in the training set of one dataset and the test set of another.

refuse_leak(datasets, trained, held)                 # rows of each: a patient trained on in one is held out in another
"""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.common import ConfigError
from omnilead.engine.data.patients import OWNER, patient_source


def refuse_leak(
    datasets: Sequence[Dataset], trained: Sequence[np.ndarray], held: Sequence[np.ndarray]
) -> None:
    """ConfigError if one dataset trains on a record, patient or waveform that another holds
    out. `trained`, `held`: rows of each dataset."""
    if len(datasets) < 2 or not any(map(len, held)):
        return
    sides = [
        (dataset.root.url, _names(dataset, rows), _names(dataset, others))
        for dataset, rows, others in zip(datasets, trained, held, strict=True)
    ]
    for (url, names, _), (other_url, _, others) in permutations(sides, 2):
        if both := _in_both(names, others):
            raise ConfigError(
                f"data.datasets: {both} is trained on in {url} and held out in {other_url}: "
                "shard both archives into one dataset, or leave one out"
            )


def held_out(dataset: Dataset) -> np.ndarray:
    """The rows that pre-training must not see: of valid, test, gallery and probe."""
    table = dataset.table(["dx_role", "id_role"])
    diagnosed = pc.is_in(table["dx_role"], pa.array(["valid", "test"]))
    identified = pc.is_in(table["id_role"], pa.array(["gallery", "probe"]))
    return np.flatnonzero(pc.or_(diagnosed, identified))


def overlap(a: Dataset, rows: np.ndarray, b: Dataset, others: np.ndarray) -> str:
    """Describe a record, patient or waveform in both `rows` of `a` and `others` of `b`; "" if there
    is none."""
    return _in_both(_names(a, rows), _names(b, others))


def _in_both(a: dict[str, pa.Array], b: dict[str, pa.Array]) -> str:
    for kind, names in a.items():
        both = names.filter(pc.is_in(names, b[kind]))
        if len(both):
            return f"{kind} {both[0]}"
    return ""


def _names(dataset: Dataset, rows: np.ndarray) -> dict[str, pa.Array]:
    table = dataset.table([*OWNER, "waveform"]).take(rows)
    source, patient = table["source"], table["patient"]
    patient = pc.if_else(pc.not_equal(patient, ""), patient, None)
    names = {
        "record": pc.binary_join_element_wise(source, table["record"], "/"),
        "patient": pc.binary_join_element_wise(patient_source(source), patient, "/"),
        "waveform": table["waveform"],
    }
    return {kind: column.drop_null().combine_chunks() for kind, column in names.items()}
