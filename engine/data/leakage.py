"""Finds data leakage: records, patients or waveforms that one dataset trains on and another holds
out.

refuse_leak(datasets, trained, held)                 # trained, held: rows of each dataset
"""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import COLUMNS, Dataset

from ..settings.errors import ConfigError
from .patients import batches_with_masks, patient_source

LEAK_KINDS = ("record", "patient", "waveform")  # what two crops may have in common


def refuse_leak(
    datasets: Sequence[Dataset],
    trained: Sequence[np.ndarray],
    held: Sequence[np.ndarray],
    option: str = "data.datasets",
) -> None:
    """Raises ConfigError if one dataset trains on a record, patient or waveform that another
    dataset holds out. `trained`, `held`: for each dataset, the rows trained on and the rows held
    out. `option`: the option that named the datasets, for the message."""
    if len(datasets) < 2 or not any(map(len, held)):
        return
    for kind in LEAK_KINDS:  # one kind at a time, because the names take most of the memory
        learnt, tested = [], []
        for dataset, *sides in zip(datasets, trained, held, strict=True):
            names, tested_names = _names_by_side(dataset, sides, kind)
            learnt.append(names)
            tested.append(tested_names)
        for learner, tester in permutations(range(len(datasets)), 2):
            if shared_name := _first_in_both(learnt[learner], tested[tester]):
                url = datasets[learner].root.url
                other_url = datasets[tester].root.url
                raise ConfigError(
                    option,
                    f": {kind} {shared_name} is trained on in {url} and held out in "
                    f"{other_url}: shard both archives into one dataset, or leave one out",
                )


def held_out_rows(dataset: Dataset) -> np.ndarray:
    """Returns the rows that pre-training must not see: those with the role valid, test, gallery
    or probe."""
    table = dataset.table(["dx_role", "id_role"])
    diagnosed = pc.is_in(table["dx_role"], pa.array(["valid", "test"]))
    identified = pc.is_in(table["id_role"], pa.array(["gallery", "probe"]))
    return np.flatnonzero(pc.or_(diagnosed, identified))


def describe_overlap(a: Dataset, rows: np.ndarray, b: Dataset, others: np.ndarray) -> str:
    """Returns the kind and name of a record, patient or waveform that is both in `rows` of `a` and
    in `others` of `b`; "" if there is none."""
    for kind in LEAK_KINDS:
        (names,) = _names_by_side(a, [rows], kind)
        (other_names,) = _names_by_side(b, [others], kind)
        if shared_name := _first_in_both(names, other_names):
            return f"{kind} {shared_name}"
    return ""


def _first_in_both(names: pa.ChunkedArray, others: pa.ChunkedArray) -> str:
    """Returns the first of `names` that is also in `others`; "" if there is none."""
    shared = names.filter(pc.is_in(names, others))
    return str(shared[0]) if len(shared) else ""


def _names_by_side(
    dataset: Dataset, sides: Sequence[np.ndarray], kind: str
) -> list[pa.ChunkedArray]:
    """Returns, for each of `sides` (arrays of rows), the names of its records, patients or
    waveforms, as `kind` says. Unknown patients are left out."""
    names_of_sides: list[list[pa.Array]] = [[] for _ in sides]
    columns = [kind] if kind == "waveform" else ["source", kind]
    for part, *masks in batches_with_masks(dataset, columns, sides):
        names_of_part = _names_in_batch(part, kind)
        for names, mask in zip(names_of_sides, masks, strict=True):
            names.append(names_of_part.filter(mask).drop_null())
    return [pa.chunked_array(names, COLUMNS.field(kind).type) for names in names_of_sides]


def _names_in_batch(part: pa.RecordBatch, kind: str) -> pa.Array:
    name = part[kind]
    if kind == "waveform":
        return name
    source = part["source"]
    if kind == "patient":
        source = patient_source(source)
        name = pc.if_else(pc.not_equal(name, ""), name, None)
    return pc.binary_join_element_wise(source, name, "/")
