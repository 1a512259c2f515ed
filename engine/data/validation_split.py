"""Patients kept from training so that there is something to validate on, where a dataset has no roles for it (data.hold_out).

    trained, held = sides(dataset, share=0.05)          # bool [crops] each

A patient, or a record where patients are not known, is drawn by a hash of its name and nothing else: more data moves nobody,
every run holds the same ones out, and a larger share holds out those of a smaller one too. A crop of which somebody held out
has a copy is on neither side.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dataset import Dataset

KEY = b"omnilead data.hold_out"
OWNER = ("source", "patient", "record")


@lru_cache(maxsize=4)  # each validation asks again
def sides(dataset: Dataset, share: float) -> tuple[np.ndarray, np.ndarray]:
    held, waveforms = [], []
    for part in dataset.parts([*OWNER, "waveform"]):
        names, _ = owners(part)
        held.append((uniforms(names.dictionary) < share)[names.indices.to_numpy()])
        waveforms.append(part["waveform"].to_numpy()[held[-1]])
    theirs = np.unique(np.concatenate(waveforms))
    copies = []
    for part in dataset.parts(["waveform"]):
        first, after = (np.searchsorted(theirs, part["waveform"].to_numpy(), side) for side in ("left", "right"))
        copies.append(first < after)
    return ~np.concatenate(copies), np.concatenate(held)


def owners(part: pa.RecordBatch) -> tuple[pa.DictionaryArray, np.ndarray]:
    """Whose each crop is: source/patient, or source/record where patients are not known; and whether they are."""
    known = pc.fill_null(pc.not_equal(part["patient"], ""), False)
    name = pc.if_else(known, part["patient"], part["record"])
    joined = pc.binary_join_element_wise(part["source"], name, "/")
    return pc.dictionary_encode(joined), known.to_numpy(zero_copy_only=False)


def patient_ids(datasets: Sequence[Dataset]) -> list[np.ndarray]:
    """For each dataset an integer for the patient of every crop (for its record where the patient is unknown), int64 [crops].
    Patients of two datasets never share one."""
    ids: list[np.ndarray] = []
    for number, dataset in enumerate(datasets):
        names, known = zip(*map(owners, dataset.parts(OWNER)), strict=True)
        codes = [part.indices.to_numpy() for part in pa.chunked_array(names).unify_dictionaries().chunks]
        ids.append(number << 40 | np.concatenate(codes).astype(np.int64) << 1 | np.concatenate(known))
    return ids


def uniforms(names: pa.Array) -> np.ndarray:
    """[0, 1) of each name."""
    words = bytearray()
    for name in names.to_pylist():
        words += blake2b(name.encode(), key=KEY, digest_size=8).digest()
    return (np.frombuffer(words, ">u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53
