"""Data leakage: patients in the training set of one dataset and the test set of another.

find_leak(datasets, "dx_role")                       # None, or a patient trained on in one dataset and held out in another
conflicting_splits(history, dataset)                 # a model's training datasets that split the same sources differently
"""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.data.patients import OWNER, SPLIT, patient_source, split_of


def conflicting_splits(history: Any, dataset: Dataset) -> list[list[tuple[str, Any, Any]]]:
    """Per conflicting dataset: (setting, the model's value, this dataset's). `history`: a list of
    split_of(...), untrusted."""
    this, conflicts = split_of(dataset), []
    for other in history if isinstance(history, list) else ():
        if not isinstance(other, dict) or other.get("fingerprint") == this["fingerprint"]:
            continue
        sources = other.get("sources")
        if not isinstance(sources, list):
            continue
        if not any(name in this["sources"] for name in sources):
            continue
        settings = [(name, other.get(name), this[name]) for name in SPLIT]
        differing = [setting for setting in settings if setting[1] != setting[2]]
        if differing:
            conflicts.append(differing)
    return conflicts


def find_leak(datasets: Sequence[Dataset], role: str) -> str | None:
    """Describe a record, patient or waveform that one dataset trains on and another holds out.
    `role`: dx_role, id_role or pretrain. For pretrain, valid and test of dx_role and gallery and
    probe of id_role are held out."""
    if len(datasets) < 2:
        return None
    sides = [(dataset.root.url, *_sides(dataset, role)) for dataset in datasets]
    for (url, trained, _), (other_url, _, held) in permutations(sides, 2):
        both = _in_both(trained, held)
        if both:
            return f"{both} is trained on in {url} and held out in {other_url}"
    return None


def overlap(a: Dataset, rows: np.ndarray, b: Dataset, others: np.ndarray) -> str:
    """Describe a record, patient or waveform in both `rows` of `a` and `others` of `b`; "" if there
    is none."""
    columns = [*OWNER, "waveform"]
    these = _names(a.table(columns).take(rows))
    those = _names(b.table(columns).take(others))
    return _in_both(these, those)


def _in_both(a: dict[str, pa.Array], b: dict[str, pa.Array]) -> str:
    for kind, names in a.items():
        both = names.filter(pc.is_in(names, b[kind]))
        if len(both):
            return f"{kind} {both[0]}"
    return ""


def _sides(dataset: Dataset, role: str) -> tuple[dict[str, pa.Array], dict[str, pa.Array]]:
    """Patients, records and waveforms of the training set, and of the held-out sets."""
    columns = ("dx_role", "id_role", "pretrain") if role == "pretrain" else (role,)
    table = dataset.table([*OWNER, "waveform", *columns])
    if role == "pretrain":
        trained = table[role]
        diagnosed = pc.is_in(table["dx_role"], pa.array(["valid", "test"]))
        identified = pc.is_in(table["id_role"], pa.array(["gallery", "probe"]))
        held = pc.or_(diagnosed, identified)
    else:
        trained = pc.equal(table[role], "train")
        held = pc.not_equal(table[role], "train")
    training_set = table.filter(trained)
    return _names(training_set), _names(table.filter(held))


def _names(table: pa.Table) -> dict[str, pa.Array]:
    source, patient = table["source"], table["patient"]
    patient = pc.if_else(pc.not_equal(patient, ""), patient, None)
    names = {
        "record": pc.binary_join_element_wise(source, table["record"], "/"),
        "patient": pc.binary_join_element_wise(patient_source(source), patient, "/"),
        "waveform": table["waveform"],
    }
    return {kind: column.drop_null().combine_chunks() for kind, column in names.items()}
