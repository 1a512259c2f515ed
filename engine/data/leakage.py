"""Data leakage: patients in the training set of one dataset and the test set of another; the
validation split data.hold_out.

find_leak(datasets, "dx_role")                       # None, or a patient trained on in one dataset and held out in another
conflicting_splits(history, dataset)                 # a model's training datasets that split the same sources differently
trained, held = validation_split(dataset, 0.05)      # bool [crops] each

`validation_split` holds out patients (records where patients are unknown) for validation in a
dataset without roles. The choice depends only on a hash of the name: new data does not move a
patient, every run holds out the same ones, and a larger share includes a smaller one. Copies of a
held-out crop are in neither set.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import VENDORS, Dataset

# with a patient's name, these settings determine its role: data_tools.splits
SPLIT = ("plan", "seed", "id_share", "role_sources", "pseudonyms")
KEY = b"omnilead data.hold_out"
OWNER = ("source", "patient", "record")


def split_of(dataset: Dataset) -> dict[str, Any]:
    """How a dataset was split, to be saved with a trained model."""
    sources = [source["name"] for source in dataset.meta.get("sources", ())]
    return {
        "fingerprint": dataset.fingerprint,
        "sources": sources,
        **{name: dataset.meta.get(name) for name in SPLIT},
    }


def conflicting_splits(history: Any, dataset: Dataset) -> list[list[tuple[str, Any, Any]]]:
    """Per conflicting dataset: (setting, the model's value, this dataset's). `history`: a list of
    split_of(...), untrusted."""
    this, conflicts = split_of(dataset), []
    for other in history if isinstance(history, list) else ():
        if not isinstance(other, dict) or other.get("fingerprint") == this["fingerprint"]:
            continue
        sources = other.get("sources")
        if not isinstance(sources, list) or not any(name in this["sources"] for name in sources):
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
    return _in_both(_names(a.table(columns).take(rows)), _names(b.table(columns).take(others)))


def _in_both(a: dict[str, pa.Array], b: dict[str, pa.Array]) -> str:
    for kind, names in a.items():
        both = names.filter(pc.is_in(names, b[kind]))
        if len(both):
            return f"{kind} {both[0]}"
    return ""


def _sides(dataset: Dataset, role: str) -> tuple[dict[str, pa.Array], dict[str, pa.Array]]:
    """Patients, records and waveforms of the training set, and of the held-out sets."""
    columns = ("dx_role", "id_role", "pretrain") if role == "pretrain" else (role,)
    table = dataset.table(["source", "patient", "record", "waveform", *columns])
    if role == "pretrain":
        trained = table[role]
        diagnosed = pc.is_in(table["dx_role"], pa.array(["valid", "test"]))
        identified = pc.is_in(table["id_role"], pa.array(["gallery", "probe"]))
        held = pc.or_(diagnosed, identified)
    else:
        trained = pc.equal(table[role], "train")
        held = pc.not_equal(table[role], "train")
    return _names(table.filter(trained)), _names(table.filter(held))


def _names(table: pa.Table) -> dict[str, pa.Array]:
    source = table["source"]
    patient = pc.if_else(pc.not_equal(table["patient"], ""), table["patient"], None)
    names = {
        "record": pc.binary_join_element_wise(source, table["record"], "/"),
        "patient": pc.binary_join_element_wise(_patient_source(source), patient, "/"),
        "waveform": table["waveform"],
    }
    return {kind: column.drop_null().combine_chunks() for kind, column in names.items()}


def _patient_source(source: pa.Array) -> pa.Array:
    """The namespace of patient ids: a hospital uses the same ids in all its file formats."""
    return pc.if_else(pc.is_in(source, pa.array(VENDORS)), VENDORS[0], source)


@lru_cache(maxsize=4)  # every validation calls this
def validation_split(dataset: Dataset, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the training and the held-out crops, bool [crops] each."""
    held, held_waveforms = [], []
    for part in dataset.parts([*OWNER, "waveform"]):
        names, _ = owners(part)
        held_here = (uniforms(names.dictionary) < share)[names.indices.to_numpy()]
        held.append(held_here)
        waveform = part["waveform"].to_numpy()
        held_waveforms.append(waveform[held_here])
    theirs = np.unique(np.concatenate(held_waveforms))
    copies = [np.isin(part["waveform"].to_numpy(), theirs) for part in dataset.parts(["waveform"])]
    return ~np.concatenate(copies), np.concatenate(held)


def owners(part: pa.RecordBatch) -> tuple[pa.DictionaryArray, np.ndarray]:
    """The owner of each crop: source/patient, or source/record if the patient is unknown; and
    whether it is known."""
    known = pc.fill_null(pc.not_equal(part["patient"], ""), False)
    name = pc.if_else(known, part["patient"], part["record"])
    source = pc.if_else(known, _patient_source(part["source"]), part["source"])
    joined = pc.binary_join_element_wise(source, name, "/")
    return pc.dictionary_encode(joined), known.to_numpy(zero_copy_only=False)


def patient_ids(datasets: Sequence[Dataset]) -> list[np.ndarray]:
    """For each dataset, an integer id of every crop's patient (its record if the patient is
    unknown), int64 [crops]. No id is used in two datasets."""
    ids: list[np.ndarray] = []
    for number, dataset in enumerate(datasets):
        names, known = zip(*map(owners, dataset.parts(OWNER)), strict=True)
        chunks = pa.chunked_array(names).unify_dictionaries().chunks
        codes = np.concatenate([chunk.indices.to_numpy() for chunk in chunks]).astype(np.int64)
        ids.append(number << 40 | codes << 1 | np.concatenate(known))
    return ids


def uniforms(names: pa.Array) -> np.ndarray:
    """A hash of each name in [0, 1)."""
    words = b"".join(
        blake2b(name.encode(), key=KEY, digest_size=8).digest() for name in names.to_pylist()
    )
    return (np.frombuffer(words, ">u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53
