"""Patients: their ids, age and sex, and the validation split data.hold_out.

patient_ids(datasets)[0]                             # int64 [crops]
age_and_sex_targets(datasets)[0]                     # float32 [crops, 2], NaN where unknown
trained, held = validation_split(dataset, 0.05)      # bool [crops] each

`validation_split` holds out patients (records where patients are unknown) for validation in a
dataset without roles. The choice depends only on a hash of the name: new data does not move a
patient, every run holds out the same ones, and a larger share includes a smaller one. Copies of a
held-out crop are in neither set.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import VENDORS, Dataset
from omnilead.data_tools.ecg.constants import SYNTHETIC

HOLD_OUT_HASH_KEY = b"omnilead data.hold_out"
OWNER_COLUMNS = ("source", "patient", "record")
# number of leading bits of a waveform's number that tell most waveforms apart
WAVEFORM_PREFIX_BITS = 24
NAMES_AT_A_TIME = 65_536  # number of names that are converted to Python objects at a time
Split = tuple[np.ndarray, np.ndarray]
# For each dataset, the results of `cached_choice` by data.hold_out or data.where. They are kept as
# long as the dataset, because every validation needs them
CHOICE_CACHE: WeakKeyDictionary[Dataset, dict[float | str, Any]] = WeakKeyDictionary()


def source_names(dataset: Dataset) -> list[str]:
    return [source.name for source in dataset.facts.sources]


def is_hospital_source(source: pa.Array) -> pa.Array:
    return pc.is_in(source, pa.array(VENDORS))


def patient_source(source: pa.Array) -> pa.Array:
    """Returns the source in which a patient's id is unique. A hospital uses the same ids in all
    its file formats, so these count as one source."""
    return pc.if_else(is_hospital_source(source), VENDORS[0], source)


def validation_split(dataset: Dataset, share: float) -> Split:
    """Returns two masks, bool [crops] each: the training crops, and the held-out crops."""
    split: Split = cached_choice(dataset, share, _validation_split)
    return split


def cached_choice(dataset: Dataset, by: Any, choose: Callable[[Dataset, Any], Any]) -> Any:
    """Returns choose(dataset, by). Later calls with the same dataset and `by` return the result
    of the first call."""
    chosen_by = CHOICE_CACHE.setdefault(dataset, {})
    if by not in chosen_by:
        chosen_by[by] = choose(dataset, by)
    return chosen_by[by]


def store_choice(dataset: Dataset, by: float | str, chosen: Any) -> None:
    """Makes `cached_choice` return `chosen`, which another process has computed."""
    CHOICE_CACHE.setdefault(dataset, {})[by] = chosen


def _validation_split(dataset: Dataset, share: float) -> Split:
    masks = []
    waveforms = []
    for part in dataset.row_batches([*OWNER_COLUMNS, "waveform"]):
        names, _ = owners_and_known(part)
        masks.append(uniform_hashes(names) < share)
        waveforms.append(part["waveform"].to_numpy())
    held_N = np.concatenate(masks)
    copied_N = _has_held_waveform(np.concatenate(waveforms), held_N)
    return ~copied_N, held_N


def _has_held_waveform(waveform_N: np.ndarray, held_N: np.ndarray) -> np.ndarray:
    """Returns bool [crops]: True where a held-out crop has the same waveform. All crops are
    looked up in one call, because each call makes arrow build a hash table of the held-out
    waveforms. This table is larger than a core's cache, so only waveforms that begin with the
    same bits as a held-out one are looked up."""
    prefix_N = (waveform_N >> np.uint64(64 - WAVEFORM_PREFIX_BITS)).astype(np.int32)
    is_held = np.zeros(2**WAVEFORM_PREFIX_BITS, bool)
    is_held[prefix_N[held_N]] = True
    copied_N = is_held[prefix_N]
    is_copied = pc.is_in(pa.array(waveform_N[copied_N]), pa.array(waveform_N[held_N]))
    copied_N[copied_N] = is_copied
    return copied_N


def batches_with_masks(
    dataset: Dataset, columns: Sequence[str], sides: Sequence[np.ndarray]
) -> Iterator[tuple[Any, ...]]:
    """Yields (a batch of the table's rows, then a mask of the batch for each of `sides`). Reads
    in batches, because the names of a large dataset take gigabytes. `sides`: arrays of row
    numbers."""
    masks = np.zeros((len(sides), len(dataset)), bool)
    for mask, rows in zip(masks, sides, strict=True):
        mask[rows] = True
    begin = 0
    for part in dataset.row_batches(columns):
        end = begin + len(part)
        yield part, *(pa.array(mask) for mask in masks[:, begin:end])
        begin = end


def owners_and_known(part: pa.RecordBatch) -> tuple[pa.Array, np.ndarray]:
    """Returns the owner of each crop (source/patient, or source/record if the patient is
    unknown), and a mask that is True where the patient is known."""
    patient, source = part["patient"], part["source"]
    has_patient = pc.fill_null(pc.not_equal(patient, ""), False)
    name = pc.if_else(has_patient, patient, part["record"])
    source = pc.if_else(pc.and_(has_patient, is_hospital_source(source)), VENDORS[0], source)
    joined = pc.binary_join_element_wise(source, name, "/")
    is_known = has_patient.to_numpy(zero_copy_only=False)
    return joined, is_known


def owner_and_known_of_rows(dataset: Dataset, rows: np.ndarray) -> list[tuple[str, bool]]:
    """Returns (owner, True if the patient is known) for each of `rows`, which must ascend."""
    owners_of_crops: list[tuple[str, bool]] = []
    if not len(rows):
        return owners_of_crops
    for part, mask in batches_with_masks(dataset, OWNER_COLUMNS, [rows]):
        names, is_known = owners_and_known(part.filter(mask))
        owners_of_crops += zip(names.to_pylist(), is_known.tolist(), strict=True)
    return owners_of_crops


class Owners(NamedTuple):
    """The owner of each crop: its patient, or its record if the patient is unknown."""

    names: pa.Array
    owner_N: np.ndarray  # for each crop, the index of its owner in `names`
    known_N: np.ndarray  # True for each crop whose patient is known


def all_owners(datasets: Sequence[Dataset]) -> Owners:
    """Returns the owner of each crop. The crops of all datasets are numbered consecutively."""
    names, is_known_of_parts = [], []
    for dataset in datasets:
        for part in dataset.row_batches(OWNER_COLUMNS):
            name, is_known = owners_and_known(part)
            names.append(name.dictionary_encode())
            is_known_of_parts.append(is_known)
    owner = pa.chunked_array(names).unify_dictionaries().combine_chunks()
    owner_N = owner.indices.to_numpy()
    known_N = np.concatenate(is_known_of_parts)
    return Owners(owner.dictionary, owner_N, known_N)


def patient_ids(datasets: Sequence[Dataset]) -> list[np.ndarray]:
    """Returns, for each dataset, int64 [crops]: a number for every crop's patient, or for its
    record if the patient is unknown. The same patient has the same number in all datasets."""
    _, owner_N, known_N = all_owners(datasets)
    return owner_ids(datasets, owner_N, known_N)


def owner_ids(
    datasets: Sequence[Dataset], owner_N: np.ndarray, known_N: np.ndarray
) -> list[np.ndarray]:
    """Returns, for each dataset, int64 [crops]: an odd number for the patient of each crop, or an
    even number for its record if the patient is unknown."""
    ids_N = owner_N.astype(np.int64) << 1 | known_N
    ends = np.cumsum([len(dataset) for dataset in datasets])
    return np.split(ids_N, ends[:-1])


def age_and_sex_targets(datasets: Sequence[Dataset]) -> list[np.ndarray]:
    """Returns float32 [crops, 2] for each dataset: every crop's age, in standard deviations from
    the mean, and its sex, 1 for a man and 0 for a woman. NaN where unknown, and for synthetic
    patients, whose age and sex have nothing to do with their ECGs."""
    of_datasets = []
    for dataset in datasets:
        table = dataset.table(["age", "sex", "source"])
        # (age - 60) / 20: in most archives, the mean is near 60 years and the standard deviation
        # near 20
        age_N = table["age"].to_numpy() / 20 - 3
        is_man = pc.equal(table["sex"], "M").cast(pa.float32())
        of_crops_N2 = np.stack([age_N, is_man], 1)
        synthetic = pc.starts_with(table["source"], SYNTHETIC)
        of_crops_N2[synthetic] = np.nan
        of_datasets.append(of_crops_N2)
    return of_datasets


def uniform_hashes(names: pa.Array) -> np.ndarray:
    """Returns a number in [0, 1) for each name, made from a hash of the name."""
    bits = np.frombuffer(keyed_digests(names, HOLD_OUT_HASH_KEY, 8), ">u8") >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def keyed_digests(names: pa.Array, key: bytes, size: int) -> bytearray:
    """Returns the keyed hashes of all names, concatenated; each has `size` bytes."""
    keyed = blake2b(key=key, digest_size=size)
    digest_bytes = bytearray()
    for start in range(0, len(names), NAMES_AT_A_TIME):
        for name in names.slice(start, NAMES_AT_A_TIME).cast(pa.binary()).to_pylist():
            keyed_name = keyed.copy()  # a copy takes 0.35 us, a new hash with a key 0.5 us
            keyed_name.update(name)
            digest_bytes += keyed_name.digest()
    return digest_bytes
