"""Patients kept from training so that there is something to validate on, where a dataset has no roles for it (data.hold_out).

    trained, held = sides(dataset, share=0.05)          # bool [crops] each

A patient, or a record where patients are not known, is drawn by a hash of its name and nothing else: more data moves nobody,
every run holds the same ones out, and a larger share holds out those of a smaller one too. A crop of which somebody held out
has a copy is on neither side.
"""

from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dataset import Dataset

KEY = b"omnilead data.hold_out"


def sides(dataset: Dataset, share: float) -> tuple[np.ndarray, np.ndarray]:
    names, _ = owners(dataset)
    held = (uniforms(names.dictionary) < share)[names.indices.to_numpy()]
    waveform = dataset.table(["waveform"])["waveform"].to_numpy()
    return ~held & ~np.isin(waveform, waveform[held]), held


def owners(dataset: Dataset) -> tuple[pa.DictionaryArray, np.ndarray]:
    """Whose each crop is: source/patient, or source/record where patients are not known; and whether they are."""
    table = dataset.table(["source", "patient", "record"])
    known = pc.fill_null(pc.not_equal(table["patient"], ""), False)
    name = pc.if_else(known, table["patient"], table["record"])
    joined = pc.binary_join_element_wise(table["source"], name, "/").combine_chunks()
    return pc.dictionary_encode(joined), known.combine_chunks().to_numpy(zero_copy_only=False)


def uniforms(names: pa.Array) -> np.ndarray:
    """[0, 1) of each name."""
    words = bytearray()
    for name in names.to_pylist():
        words += blake2b(name.encode(), key=KEY, digest_size=8).digest()
    return (np.frombuffer(words, ">u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53
