"""Keeps a record of what a model has seen: hashes of the patients and waveforms of the crops that
it was trained on.

    seen = join_seen_records([start.seen, seen_record_of_crops(dataset, rows, "unlabelled")])
    path.write_bytes(to_bytes(seen)); seen = read_seen_record(path)
    uses_by_crop(seen, dataset, rows)       # of each crop: has the model seen it or another of its patient, and how?
    seen_notes(seen, [dataset], [rows], [patients], "scored here")     # sentences for whoever reads the scores

The record lies in a model's folder, as seen.parquet. Whoever has an ECG can ask whether it is there (`omnilead
seen`: downstream/evaluation/trained_on.py), if it is bit-identical: resampled, shifted or rescaled copies are not
found. A patient (a record where the patient is unknown) is hashed

- openly, where names are public (Dataset.public_name_mask) or are pseudonyms, which nobody can guess;
- else with the key of the dataset (Dataset.name_key), which is never in a model's folder: so nobody finds a name
  by trying all ids, and whoever has the dataset can ask.

A mark of each key, from which the key does not follow, says by what else patients are known.

The use of a crop: "unlabelled", in pre-training; "selected", in validation, which chose a step, a
threshold or a penalty; "labelled", trained on with its label.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io.splitmix import mix
from omnilead.data_tools.io.terminal import tell

from ..settings.errors import ConfigError
from .patients import OWNER_COLUMNS, batches_with_masks, keyed_digests, owners_and_known

# in ascending order: if a crop had several uses, the last of them in this tuple counts
USES = ("unlabelled", "selected", "labelled")
LABELLED = USES.index("labelled")
# hash key of names that are public, and of pseudonyms; the same for all models
PUBLIC_NAME_KEY = b"omnilead seen"
# With 48 bits, and 10^7 patients and as many waveforms in the record, one in 14 million others is
# mistaken for seen
HASH_BITS = 48
SEEN_SCHEMA = pa.schema(
    [
        ("hash", pa.int64()),  # ascending
        ("patient", pa.bool_()),  # else a waveform
        ("use", pa.int8()),  # index of USES
        # True: an earlier version hashed a name without a key although it may not be public; such a
        # hash must not be published
        ("guessable", pa.bool_()),
    ]
)
# Key of the file's metadata under which a mark (a public id) of each hash key is stored. Files of
# earlier versions lack it
KEY_MARKS = b"omnilead keys"
# made by from_arrays: pa.table() and empty_table() would make pyarrow import pandas, if it is
# installed
NOTHING_SEEN = pa.Table.from_arrays(
    [pa.nulls(0, field.type) for field in SEEN_SCHEMA], schema=SEEN_SCHEMA
)


@cache
def unknown_seen_record() -> pa.Table:
    """Returns a record of one hash that no crop has. It stands for unknown training data: all
    that a model may have seen in another program, or before such records existed."""
    return pa.table(
        {"hash": [-1], "patient": [False], "use": [0], "guessable": [False]}, SEEN_SCHEMA
    )


def seen_record_of_crops(dataset: Dataset, rows: np.ndarray, use: str) -> pa.Table:
    """Returns the record of a model that has seen these crops and no others. `use`: how it used
    them, one of USES."""
    people = []
    waves = []
    is_keyed = has_pseudonyms = bool(dataset.facts.pseudonyms)
    for part, mask in batches_with_masks(dataset, [*OWNER_COLUMNS, "waveform"], [rows]):
        crops = part.filter(mask)
        names, _ = owners_and_known(crops)
        of_people = _name_hashes(names, PUBLIC_NAME_KEY)
        if dataset.name_key and not has_pseudonyms:
            secret = ~dataset.public_name_mask(crops)
            of_people[secret] = _name_hashes(names.filter(pa.array(secret)), dataset.name_key)
            is_keyed |= bool(secret.any())
        people.append(of_people)
        waves.append(_waveform_hashes(crops["waveform"].to_numpy()))
    hashes = [*people, *waves]
    table = {
        "hash": np.concatenate(hashes),
        "patient": np.repeat([True, False], sum(map(len, people))),
        "use": np.full(sum(map(len, hashes)), USES.index(use), np.int8),
        "guessable": np.zeros(sum(map(len, hashes)), bool),
    }
    return join_seen_records(
        [
            _add_key_marks(
                pa.table(table, SEEN_SCHEMA), dataset_key_marks(dataset) if is_keyed else set()
            )
        ]
    )


def dataset_key_marks(dataset: Dataset) -> set[str]:
    """Returns a set with the mark of this dataset's key, or an empty set if it has none. The mark
    tells which key hashed the names that are not public."""
    return {dataset.name_mark} if dataset.name_mark else set()


def key_marks(seen: pa.Table) -> set[str]:
    """Returns the marks of the keys with which the names in seen.parquet were hashed."""
    return {*(seen.schema.metadata or {}).get(KEY_MARKS, b"").decode().split()}


def _add_key_marks(seen: pa.Table, keys: set[str]) -> pa.Table:
    return seen.replace_schema_metadata({KEY_MARKS: " ".join(sorted(keys))})


def join_seen_records(records: Sequence[pa.Table]) -> pa.Table:
    """Returns the union of the records (`seen_record_of_crops`) of several models or datasets."""
    rows = pa.concat_tables([NOTHING_SEEN, *records])
    hashes, patient, use, guessable = (column.to_numpy() for column in rows.columns)
    key = hashes << 1 | patient
    order = np.argsort(key)
    key = key[order]
    first = np.flatnonzero(np.diff(key, prepend=key[:1] - 1))
    table = {
        "hash": key[first] >> 1,
        "patient": (key[first] & 1).astype(bool),
        "use": np.maximum.reduceat(use[order], first),
        "guessable": np.maximum.reduceat(guessable[order], first),
    }
    return _add_key_marks(pa.table(table, SEEN_SCHEMA), set[str]().union(*map(key_marks, records)))


def to_bytes(seen: pa.Table) -> bytes:
    """Returns the content of seen.parquet."""
    sink = pa.BufferOutputStream()
    # ascending hashes differ by little, so that storing their differences halves the size
    encoding = {"hash": "DELTA_BINARY_PACKED"}
    pq.write_table(seen, sink, use_dictionary=False, column_encoding=encoding, compression="zstd")
    return bytes(sink.getvalue())


def read_seen_record(path: Path) -> pa.Table:
    """Reads seen.parquet. Raises ConfigError if the file is damaged."""
    try:
        seen = pq.ParquetFile(path).read(use_threads=False)
        if seen.schema != SEEN_SCHEMA or any(column.null_count for column in seen.columns):
            raise ValueError("its columns are not as omnilead writes them")
        if not np.isin(seen["use"].to_numpy(), range(len(USES))).all():
            raise ValueError("its column `use` has an unknown value")
        key_marks(seen)
    except (OSError, ValueError, pa.ArrowException) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"{path}: cannot be read: {why}: copy it again") from None
    # a file of an earlier version does not say which of its names are public: all count as guessable
    if KEY_MARKS not in (seen.schema.metadata or {}):
        place = seen.schema.get_field_index("guessable")
        seen = seen.set_column(place, SEEN_SCHEMA.field(place), seen["patient"])
    if pc.any(seen["guessable"]).as_py():
        tell(
            f"note: {path}: has open hashes of patients, as earlier versions wrote them: whoever has a list of "
            "ids can find them. omnilead pretrain|finetune --export RUN writes RUN's own anew; those of a model "
            "that RUN was started from stay until RUN is trained again. omnilead hub push leaves all out"
        )
    return seen


def without_guessable_hashes(seen: pa.Table) -> pa.Table:
    """Returns the rows of `seen` without the hashes of names that could be guessed."""
    return seen.filter(pc.invert(seen["guessable"]))


def uses_by_crop(
    seen: pa.Table, dataset: Dataset, rows: np.ndarray, besides: Sequence[Dataset] = ()
) -> np.ndarray:
    """Returns, for each crop, how the model has used this crop or another crop of its patient:
    an index of USES, or -1 if it has not. `besides`: other datasets, whose keys are tried too."""
    rows, place = np.unique(rows, return_inverse=True)
    keys = name_keys([dataset, *besides])
    people: list[list[np.ndarray]] = [[] for _ in keys]
    waves = []
    for part, mask in batches_with_masks(dataset, [*OWNER_COLUMNS, "waveform"], [rows]):
        of_people, of_waves = _patient_and_waveform_hashes(part.filter(mask), keys)
        for hashes, under_key in zip(people, of_people, strict=True):
            hashes.append(under_key)
        waves.append(of_waves)
    used = _use_by_hash(seen, False, np.concatenate(waves))
    for hashes in people:
        used = np.maximum(used, _use_by_hash(seen, True, np.concatenate(hashes)))
    return np.asarray(used[place])


class KindsOfUse(NamedTuple):
    """How a model has used each of several crops, and other crops of its patient. A use is an
    index of USES, or -1 if there was none. A record whose patient is unknown counts as a patient."""

    of_waveform: np.ndarray
    of_patient: np.ndarray  # if crops of the patient had several uses, the last of them in USES
    patient_hash: np.ndarray  # a number that is equal for crops of the same patient


def kinds_of_use(seen: pa.Table, crops: pa.Table, keys: Sequence[bytes]) -> KindsOfUse:
    """Returns how a model has used each of `crops`, a table with the columns source, patient,
    record and waveform. `keys`: from name_keys."""
    people, waves = _patient_and_waveform_hashes(crops.combine_chunks().to_batches()[0], keys)
    of_patient = np.max([_use_by_hash(seen, True, under_key) for under_key in people], axis=0)
    return KindsOfUse(_use_by_hash(seen, False, waves), of_patient, people[0])


def were_seen_with_labels(seen: pa.Table, waveform_N: np.ndarray) -> np.ndarray:
    """Returns bool [N]: True where a model was trained, with labels, on a bit-identical
    waveform."""
    use_N = _use_by_hash(seen, False, _waveform_hashes(waveform_N))
    return np.asarray(use_N == LABELLED)


def seen_notes(
    seen: pa.Table,
    datasets: Sequence[Dataset],
    rows: Sequence[np.ndarray],
    patients: Sequence[np.ndarray],
    where: str,
    validation: bool = False,
) -> list[str]:
    """Returns sentences that say how many patients of these crops a model has seen, and how.
    `rows`: the crops of each dataset. `patients`: for each dataset, the id of every crop's
    patient (engine.data.patients.owner_ids). `where`: for example "scored here". `validation`:
    True if these crops were used to choose the model."""
    sentences = []
    if len(seen) and seen["hash"][0].as_py() == -1:
        sentences.append(
            "It is not known what the model was trained on elsewhere: it may have seen patients "
            f"that are {where}."
        )
    known_marks = set[str]().union(*map(dataset_key_marks, datasets))
    if known_marks:
        sentences += unknown_key_notes(seen, known_marks)
    use, ids = [], []
    for dataset, rows_N, ids_N in zip(datasets, rows, patients, strict=True):
        use.append(uses_by_crop(seen, dataset, rows_N, datasets))
        ids.append(ids_N[rows_N])
    use_N = np.concatenate(use)
    people, place_N = np.unique(np.concatenate(ids), return_inverse=True)
    use_P = np.full(len(people), -1)
    np.maximum.at(use_P, place_N, use_N)
    unlabelled, selected, labelled = (int((use_P == use).sum()) for use in range(len(USES)))
    units = "patients and records of unknown patients"
    if (people & 1).all():
        units = "patients"
    elif not (people & 1).any():
        units = "records"
    of_all = f"of the {len(people):,} {units} that are {where}"
    if labelled:
        sentences.append(f"Leakage: the model was trained with labels on {labelled:,} {of_all}.")
    if selected and not validation:
        sentences.append(
            f"Leakage: {selected:,} {of_all} helped to choose the model in validation."
        )
    if unlabelled:
        sentences.append(
            f"The model's pre-training has seen {unlabelled:,} {of_all}, without labels."
        )
    return sentences


def unknown_key_notes(seen: pa.Table, known_marks: set[str]) -> list[str]:
    """Returns a list of one sentence if some patients in `seen` were hashed with a key whose mark
    is not in `known_marks`; else an empty list."""
    if key_marks(seen) <= known_marks:
        return []
    return [
        "The model was also trained on patients whose ids it knows by the key of another dataset: of "
        "these, only bit-identical ECGs are recognised here."
    ]


def name_keys(datasets: Iterable[Dataset]) -> list[bytes]:
    """Returns all keys with which the patients of these datasets may have been hashed; the first
    is PUBLIC_NAME_KEY."""
    keys = [PUBLIC_NAME_KEY]
    for dataset in datasets:
        if dataset.name_key and dataset.name_key not in keys:
            keys.append(dataset.name_key)
    return keys


def _patient_and_waveform_hashes(
    crops: pa.RecordBatch, keys: Sequence[bytes]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns (the hashes of the crops' patients for each key, the hashes of their waveforms)."""
    names, _ = owners_and_known(crops)
    people = [_name_hashes(names, key) for key in keys]
    return people, _waveform_hashes(crops["waveform"].to_numpy())


def _name_hashes(names: pa.Array, key: bytes) -> np.ndarray:
    words = np.zeros((len(names), 8), np.uint8)
    hashed = np.frombuffer(keyed_digests(names, key, HASH_BITS // 8), np.uint8)
    words[:, -HASH_BITS // 8 :] = hashed.reshape(-1, HASH_BITS // 8)
    return words.view(">i8")[:, 0].astype(np.int64)


def _waveform_hashes(words: np.ndarray) -> np.ndarray:
    """Returns the hashes of waveforms. A waveform's number consists of two checksums that are
    not independent, so its bits are mixed."""
    return (mix(words.copy()) >> np.uint64(64 - HASH_BITS)).astype(np.int64)


def _use_by_hash(seen: pa.Table, patient: bool, hashes: np.ndarray) -> np.ndarray:
    """Returns the use that the record has for each hash; -1 if the record does not have the
    hash."""
    kind = seen.filter(pc.equal(seen["patient"], patient))
    use = kind["use"].take(pc.index_in(pa.array(hashes), kind["hash"]))
    return np.asarray(pc.fill_null(use, -1))
