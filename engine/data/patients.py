"""Whose crops are whose: ids of patients, and the validation split data.hold_out.

patient_ids(datasets)[0]                             # int64 [crops]
trained, held = validation_split(dataset, 0.05)      # bool [crops] each

`validation_split` holds out patients (records where patients are unknown) for validation in a
dataset without roles. The choice depends only on a hash of the name: new data does not move a
patient, every run holds out the same ones, and a larger share includes a smaller one. Copies of a
held-out crop are in neither set.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import VENDORS, Dataset

KEY = b"omnilead data.hold_out"
OWNER = ("source", "patient", "record")


def source_names(dataset: Dataset) -> list[str]:
    return [source["name"] for source in dataset.meta.get("sources", ())]


def patient_source(source: pa.Array) -> pa.Array:
    """The namespace of patient ids: a hospital uses the same ids in all its file formats."""
    is_hospital = pc.is_in(source, pa.array(VENDORS))
    return pc.if_else(is_hospital, VENDORS[0], source)


@lru_cache(maxsize=4)  # every validation calls this
def validation_split(dataset: Dataset, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the training and the held-out crops, bool [crops] each."""
    held, held_waveforms, copied = [], [], []
    for part in dataset.parts([*OWNER, "waveform"]):
        names, _ = owners(part)
        is_held = uniforms(names.dictionary) < share
        held_here = is_held[names.indices.to_numpy()]
        waveform = part["waveform"].to_numpy()
        held.append(held_here)
        held_waveforms.append(waveform[held_here])
    theirs = np.unique(np.concatenate(held_waveforms))
    for part in dataset.parts(["waveform"]):
        waveform = part["waveform"].to_numpy()
        copied.append(np.isin(waveform, theirs))
    trained = ~np.concatenate(copied)
    return trained, np.concatenate(held)


def owners(part: pa.RecordBatch) -> tuple[pa.DictionaryArray, np.ndarray]:
    """The owner of each crop: source/patient, or source/record if the patient is unknown; and
    whether it is known."""
    patient, source = part["patient"], part["source"]
    known = pc.fill_null(pc.not_equal(patient, ""), False)
    name = pc.if_else(known, patient, part["record"])
    source = pc.if_else(known, patient_source(source), source)
    joined = pc.binary_join_element_wise(source, name, "/")
    is_known = known.to_numpy(zero_copy_only=False)
    return pc.dictionary_encode(joined), is_known


def owners_of(datasets: Sequence[Dataset]) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """The names of all owners; of each crop of all datasets, the index of its owner, and whether it
    is known."""
    names, known = [], []
    for dataset in datasets:
        for part in dataset.parts(OWNER):
            name, is_known = owners(part)
            names.append(name)
            known.append(is_known)
    owner = pa.chunked_array(names).unify_dictionaries().combine_chunks()
    owner_N = owner.indices.to_numpy()
    known_N = np.concatenate(known)
    return owner.dictionary, owner_N, known_N


def patient_ids(datasets: Sequence[Dataset]) -> list[np.ndarray]:
    """For each dataset, an integer id of every crop's patient (its record if the patient is
    unknown), int64 [crops]. The same patient has the same id in all of them."""
    _, owner_N, known_N = owners_of(datasets)
    return ids_of(datasets, owner_N, known_N)


def ids_of(
    datasets: Sequence[Dataset], owner_N: np.ndarray, known_N: np.ndarray
) -> list[np.ndarray]:
    """Odd where the patient is known."""
    ids_N = owner_N.astype(np.int64) << 1 | known_N
    ends = np.cumsum([len(dataset) for dataset in datasets])
    return np.split(ids_N, ends[:-1])


def uniforms(names: pa.Array) -> np.ndarray:
    """A hash of each name in [0, 1)."""
    words = bytearray()
    for name in names.to_pylist():
        words += blake2b(name.encode(), key=KEY, digest_size=8).digest()
    bits = np.frombuffer(words, ">u8") >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
