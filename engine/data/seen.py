"""What a model has seen: hashes of the patients and waveforms of the crops it was trained on.

    seen = joined([start.seen, seen_in(dataset, rows, "unlabelled")])
    path.write_bytes(as_bytes(seen)); seen = read(path)
    notes(seen, [dataset], [rows], [patients], "scored here")     # sentences for whoever reads the scores

The record lies in a model's folder, as seen.parquet. No name can be read from it, but whoever knows a patient's id or has an
ECG can ask whether it is there. A waveform is found only if it is bit-identical: resampled, shifted
or rescaled copies are not.

The use of a crop: "unlabelled", in pre-training; "selected", in validation, which chose a step, a
threshold or a penalty; "labelled", trained on with its label.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnilead.data_tools.dataset import VENDORS, Dataset
from omnilead.engine.common import ConfigError
from omnilead.engine.data.counter import mix
from omnilead.engine.data.patients import OWNER, digests, owners, parts_of

USES = ("unlabelled", "selected", "labelled")  # where a crop had several, the last counts
LABELLED = USES.index("labelled")
KEY = b"omnilead seen"
# 48 bits: of 10^7 patients and as many waveforms, one in 14 million strangers is taken for seen
BITS = 48
SCHEMA = pa.schema(
    [
        ("hash", pa.int64()),  # ascending
        ("patient", pa.bool_()),  # else a waveform
        ("use", pa.int8()),  # index of USES
        # A hospital's own id, which a list of ids would find: not for publication
        ("guessable", pa.bool_()),
    ]
)
NOTHING = SCHEMA.empty_table()
# Stands for all that a model may have seen before there was a record, or in another program
UNKNOWN = pa.table({"hash": [-1], "patient": [False], "use": [0], "guessable": [False]}, SCHEMA)


def seen_in(dataset: Dataset, rows: np.ndarray, use: str) -> pa.Table:
    """The record of these crops of a dataset."""
    people, guessable, waves = _hashes(dataset, rows)
    table = {
        "hash": np.concatenate([people, waves]),
        "patient": np.repeat([True, False], len(people)),
        "use": np.full(2 * len(people), USES.index(use), np.int8),
        "guessable": np.concatenate([guessable, np.zeros(len(waves), bool)]),
    }
    return joined([pa.table(table, SCHEMA)])


def joined(records: Sequence[pa.Table]) -> pa.Table:
    """One record of several models or datasets."""
    every = pa.concat_tables([NOTHING, *records])
    hashes, patient, use, guessable = (column.to_numpy() for column in every.columns)
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
    return pa.table(table, SCHEMA)


def as_bytes(seen: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    # ascending hashes differ by little: half the size
    encoding = {"hash": "DELTA_BINARY_PACKED"}
    pq.write_table(seen, sink, use_dictionary=False, column_encoding=encoding, compression="zstd")
    return bytes(sink.getvalue())


def read(path: Path) -> pa.Table:
    try:
        seen = pq.ParquetFile(path).read(use_threads=False)
        if seen.schema != SCHEMA or any(column.null_count for column in seen.columns):
            raise ValueError("its columns are others")
        if not np.isin(seen["use"].to_numpy(), range(len(USES))).all():
            raise ValueError("a use is unknown")
    except (OSError, ValueError, pa.ArrowException) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"{path}: cannot be read: {why}: copy it again") from None
    return seen


def publishable(seen: pa.Table) -> pa.Table:
    """Without the hashes of ids that could be guessed."""
    return seen.filter(pc.invert(seen["guessable"]))


def uses(seen: pa.Table, dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """How each of these crops, or another of its patient, was used: an index of USES, -1 if not."""
    rows, place = np.unique(rows, return_inverse=True)
    people, _, waves = _hashes(dataset, rows)
    used = np.maximum(use_of(seen, True, people), use_of(seen, False, waves))
    return np.asarray(used[place])


def notes(
    seen: pa.Table,
    datasets: Sequence[Dataset],
    rows: Sequence[np.ndarray],
    patients: Sequence[np.ndarray],
    where: str,
    validation: bool = False,
) -> list[str]:
    """How many of the patients of these crops a model has seen, and how. `patients`: the id of each
    crop of each dataset (engine.data.patients.ids_of); `where`: for example "scored here".
    `validation`: these are meant to be those that chose the model."""
    found = []
    if len(seen) and seen["hash"][0].as_py() == -1:
        found.append(
            "It is not known what the model was trained on elsewhere: it may have seen patients "
            f"that are {where}."
        )
    use, ids = [], []
    for dataset, some, of_crops in zip(datasets, rows, patients, strict=True):
        use.append(uses(seen, dataset, some))
        ids.append(of_crops[some])
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
        found.append(f"Leakage: the model was trained with labels on {labelled:,} {of_all}.")
    if selected and not validation:
        found.append(f"Leakage: {selected:,} {of_all} helped to choose the model in validation.")
    if unlabelled:
        found.append(f"The model's pre-training has seen {unlabelled:,} {of_all}, without labels.")
    return found


def _hashes(dataset: Dataset, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of these crops in ascending order: a hash of the patient, whether it could be guessed, and a
    hash of the waveform."""
    people = []
    guessable = []
    waves = []
    for part, wanted in parts_of(dataset, [*OWNER, "waveform"], [rows]):
        crops = part.filter(wanted)
        of_people, of_waves = hashes_of(crops)
        people.append(of_people)
        guessable.append(np.asarray(pc.is_in(crops["source"], pa.array(VENDORS))))
        waves.append(of_waves)
    if dataset.meta.get("pseudonyms"):
        guessable = [np.zeros(len(rows), bool)]
    return np.concatenate(people), np.concatenate(guessable), np.concatenate(waves)


def hashes_of(crops: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """Of the patient and of the waveform of each crop."""
    names, _ = owners(crops)
    return _name_hashes(names), _waveform_hashes(crops["waveform"].to_numpy())


def _name_hashes(names: pa.Array) -> np.ndarray:
    words = np.zeros((len(names), 8), np.uint8)
    hashed = np.frombuffer(digests(names, KEY, BITS // 8), np.uint8)
    words[:, -BITS // 8 :] = hashed.reshape(-1, BITS // 8)
    return words.view(">i8")[:, 0].astype(np.int64)


def _waveform_hashes(words: np.ndarray) -> np.ndarray:
    """Mixed, since the two checksums that a waveform's number is made of are not independent."""
    return (mix(words.copy()) >> np.uint64(64 - BITS)).astype(np.int64)


def use_of(seen: pa.Table, patient: bool, hashes: np.ndarray) -> np.ndarray:
    """The use of each hash; -1 if it is not there."""
    kind = seen.filter(pc.equal(seen["patient"], patient))
    use = kind["use"].take(pc.index_in(pa.array(hashes), kind["hash"]))
    return np.asarray(pc.fill_null(use, -1))
