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

SPLIT = (
    "plan",
    "seed",
    "id_share",
    "role_sources",
    "pseudonyms",
)  # with a name, they determine a role: data_tools.splits
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
    mine, conflicts = split_of(dataset), []
    for one in history if isinstance(history, list) else ():
        if (
            isinstance(one, dict)
            and one.get("fingerprint") != dataset.fingerprint
            and isinstance(one.get("sources"), list)
        ):
            differ = [
                (name, one.get(name), mine[name]) for name in SPLIT if one.get(name) != mine[name]
            ]
            if differ and any(name in mine["sources"] for name in one["sources"]):
                conflicts.append(differ)
    return conflicts


def find_leak(datasets: Sequence[Dataset], role: str) -> str | None:
    """Describe a record, patient or waveform that one dataset trains on and another holds out.
    `role`: dx_role, id_role or pretrain. For pretrain, valid and test of dx_role and gallery and
    probe of id_role are held out."""
    sides = [_sides(dataset, role) for dataset in datasets] if len(datasets) > 1 else []
    for a, b in permutations(range(len(sides)), 2):
        if both := _in_both(sides[a][0], sides[b][1]):
            return (
                f"{both} is trained on in {datasets[a].root.url} and held out in "
                f"{datasets[b].root.url}"
            )
    return None


def overlap(a: Dataset, rows: np.ndarray, b: Dataset, others: np.ndarray) -> str:
    """Describe a record, patient or waveform in both `rows` of `a` and `others` of `b`; "" if there
    is none."""
    return _in_both(
        *(
            _names(one.table([*OWNER, "waveform"]).take(some))
            for one, some in ((a, rows), (b, others))
        )
    )


def _in_both(a: dict[str, pa.Array], b: dict[str, pa.Array]) -> str:
    both = {kind: names.filter(pc.is_in(names, b[kind])) for kind, names in a.items()}
    return next((f"{kind} {names[0]}" for kind, names in both.items() if len(names)), "")


def _sides(dataset: Dataset, role: str) -> tuple[dict[str, pa.Array], dict[str, pa.Array]]:
    """Patients, records and waveforms of the training set, and of the held-out sets."""
    columns = ("dx_role", "id_role", "pretrain") if role == "pretrain" else (role,)
    table = dataset.table(["source", "patient", "record", "waveform", *columns])
    if role == "pretrain":
        tests = pa.array(["valid", "test"]), pa.array(["gallery", "probe"])
        trained, held = (
            table[role],
            pc.or_(pc.is_in(table["dx_role"], tests[0]), pc.is_in(table["id_role"], tests[1])),
        )
    else:
        trained, held = pc.equal(table[role], "train"), pc.not_equal(table[role], "train")
    return _names(table.filter(trained)), _names(table.filter(held))


def _names(table: pa.Table) -> dict[str, pa.Array]:
    patients = pc.if_else(pc.not_equal(table["patient"], ""), table["patient"], None)
    named = {"record": table["record"], "patient": patients}
    sources = {"record": table["source"], "patient": _patient_source(table["source"])}
    names = {
        kind: pc.binary_join_element_wise(sources[kind], column, "/")
        for kind, column in named.items()
    }
    return {
        kind: column.drop_null().combine_chunks()
        for kind, column in (names | {"waveform": table["waveform"]}).items()
    }


def _patient_source(source: pa.Array) -> pa.Array:
    """The namespace of patient ids: a hospital uses the same ids in all its file formats."""
    return pc.if_else(pc.is_in(source, pa.array(VENDORS)), VENDORS[0], source)


@lru_cache(maxsize=4)  # every validation calls this
def validation_split(dataset: Dataset, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the training and the held-out crops, bool [crops] each."""
    held, waveforms = [], []
    for part in dataset.parts([*OWNER, "waveform"]):
        names, _ = owners(part)
        held.append((uniforms(names.dictionary) < share)[names.indices.to_numpy()])
        waveforms.append(part["waveform"].to_numpy()[held[-1]])
    theirs = np.unique(np.concatenate(waveforms))
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
        codes = [
            part.indices.to_numpy() for part in pa.chunked_array(names).unify_dictionaries().chunks
        ]
        ids.append(
            number << 40 | np.concatenate(codes).astype(np.int64) << 1 | np.concatenate(known)
        )
    return ids


def uniforms(names: pa.Array) -> np.ndarray:
    """A hash of each name in [0, 1)."""
    words = b"".join(
        blake2b(name.encode(), key=KEY, digest_size=8).digest() for name in names.to_pylist()
    )
    return (np.frombuffer(words, ">u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53
