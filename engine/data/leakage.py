"""Data leakage: patients in the training set of one dataset and the test set of another.

refuse_leak(datasets, trained, held)                 # rows of each: a patient trained on in one is held out in another
"""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import COLUMNS, Dataset

from ..settings.errors import ConfigError
from .patients import parts_of, patient_source

KINDS = ("record", "patient", "waveform")  # of what a crop may share with another


def refuse_leak(
    datasets: Sequence[Dataset], trained: Sequence[np.ndarray], held: Sequence[np.ndarray]
) -> None:
    """ConfigError if one dataset trains on a record, patient or waveform that another holds
    out. `trained`, `held`: rows of each dataset."""
    if len(datasets) < 2 or not any(map(len, held)):
        return
    for kind in KINDS:  # one at a time: names take the most memory
        learnt, tested = [], []
        for dataset, *sides in zip(datasets, trained, held, strict=True):
            names, others = _names(dataset, sides, kind)
            learnt.append(names)
            tested.append(others)
        for one, other in permutations(range(len(datasets)), 2):
            if both := _in_both(learnt[one], tested[other]):
                url = datasets[one].root.url
                other_url = datasets[other].root.url
                raise ConfigError(
                    f"data.datasets: {kind} {both} is trained on in {url} and held out in "
                    f"{other_url}: shard both archives into one dataset, or leave one out"
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
    for kind in KINDS:
        (here,) = _names(a, [rows], kind)
        (there,) = _names(b, [others], kind)
        if both := _in_both(here, there):
            return f"{kind} {both}"
    return ""


def _in_both(names: pa.ChunkedArray, others: pa.ChunkedArray) -> str:
    """The first of the names that is among the others; "" if there is none."""
    both = names.filter(pc.is_in(names, others))
    return str(both[0]) if len(both) else ""


def _names(dataset: Dataset, sides: Sequence[np.ndarray], kind: str) -> list[pa.ChunkedArray]:
    """What the crops of each side are called; nothing for those whose patient is unknown."""
    found: list[list[pa.Array]] = [[] for _ in sides]
    columns = [kind] if kind == "waveform" else ["source", kind]
    for part, *masks in parts_of(dataset, columns, sides):
        every = _called(part, kind)
        for names, mask in zip(found, masks, strict=True):
            names.append(every.filter(mask).drop_null())
    return [pa.chunked_array(names, COLUMNS.field(kind).type) for names in found]


def _called(part: pa.RecordBatch, kind: str) -> pa.Array:
    name = part[kind]
    if kind == "waveform":
        return name
    source = part["source"]
    if kind == "patient":
        source = patient_source(source)
        name = pc.if_else(pc.not_equal(name, ""), name, None)
    return pc.binary_join_element_wise(source, name, "/")
