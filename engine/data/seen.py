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
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnilead.data_tools.dataset import VENDORS, Dataset
from omnilead.engine.common import ConfigError
from omnilead.engine.data.counter import mix
from omnilead.engine.data.patients import owners_of

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
    names, owner_N = _owners(dataset, rows)
    names = names.take(pa.array(np.unique(owner_N)))
    people = _name_hashes(names)
    guessable = np.zeros(len(people), bool)
    if not dataset.meta.get("pseudonyms"):
        source = pc.replace_substring_regex(names, "/.*", "")
        guessable = np.asarray(pc.is_in(source, pa.array(VENDORS)))
    waves = np.unique(_waveform_hashes(dataset, rows))
    table = {
        "hash": np.concatenate([people, waves]),
        "patient": np.repeat([True, False], [len(people), len(waves)]),
        "use": np.full(len(people) + len(waves), USES.index(use), np.int8),
        "guessable": np.concatenate([guessable, np.zeros(len(waves), bool)]),
    }
    return joined([pa.table(table, SCHEMA)])


def joined(records: Sequence[pa.Table]) -> pa.Table:
    """One record of several models or datasets."""
    every = pa.concat_tables([NOTHING, *records]).group_by(["hash", "patient"])
    most = every.aggregate([("use", "max"), ("guessable", "max")])
    most = most.rename_columns(["hash", "patient", "use", "guessable"])
    return most.select(SCHEMA.names).sort_by("hash").cast(SCHEMA)


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
    names, owner_N = _owners(dataset, rows)
    used, place_N = np.unique(owner_N, return_inverse=True)
    of_patient = _found(seen, True, _name_hashes(names.take(pa.array(used))))
    of_waveform = _found(seen, False, _waveform_hashes(dataset, rows))
    return np.asarray(np.maximum(of_patient[place_N], of_waveform))


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


def _owners(dataset: Dataset, rows: np.ndarray) -> tuple[pa.Array, np.ndarray]:
    names, owner_N, _ = owners_of([dataset])
    return names, owner_N[rows]


def _name_hashes(names: pa.Array) -> np.ndarray:
    words = bytearray()
    for name in names.to_pylist():
        digest = blake2b(name.encode(), key=KEY, digest_size=BITS // 8).digest()
        words += bytes(2) + digest
    return np.frombuffer(words, ">i8").astype(np.int64)


def _waveform_hashes(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Mixed, since the two checksums that a waveform's number is made of are not independent."""
    words = dataset.column("waveform")[rows]  # a copy, as `rows` are numbers
    return (mix(words) >> np.uint64(64 - BITS)).astype(np.int64)


def _found(seen: pa.Table, patient: bool, hashes: np.ndarray) -> np.ndarray:
    """The use of each hash; -1 if it is not there."""
    kind = seen.filter(pc.equal(seen["patient"], patient))
    known, use = kind["hash"].to_numpy(), kind["use"].to_numpy()
    place = np.minimum(np.searchsorted(known, hashes), max(0, len(known) - 1))
    if not len(known):
        return np.full(len(hashes), -1)
    return np.where(known[place] == hashes, use[place], -1)
