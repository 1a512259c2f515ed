"""The roles that crops will have if every record can be read and is what its header says.

Roles depend on all records, and shards are written before all are read. So they are written with
these. At the end roles are assigned from what was read, and the shards with other ones, of refused
records or of copies that no header tells, are written again.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..dataset import Dataset
from ..ecg.crops import CROP
from ..ecg.pseudonyms import pseudonym
from ..ecg.resampling import FS_HZ
from ..sources.base import shown_patient
from . import roles as splits
from .finishing import ROLES, ShardOptions, records_of, role_codes
from .plan import ShardPlan

# More records that look alike are no copies: their headers lack checksums, or they begin with zeros
COPIES = 16
ODD = 0x9E3779B97F4A7C15


def expected_roles(
    plan: ShardPlan, options: ShardOptions, previous: Dataset | None
) -> splits.CropRoles:
    """Those of the plan's crops, by their numbers. `previous`: the version that is extended."""
    if options.plan == "all" or not plan.crops:  # an append may only refuse
        none = np.zeros(plan.crops, np.int8)
        return splits.CropRoles(np.ones(len(none), bool), none, none)
    records = _planned_records(plan, options.pseudonym_key)
    seed, sources = options.seed, options.role_sources
    old = _rows_of_patients(previous, records.patients) if previous else None
    if old is None:
        return splits.assign(records, options.plan, seed, sources)
    both = records_of(old.select).and_then(records)
    roles, _ = splits.extended(both, role_codes(old), seed, sources)
    return roles.take(slice(len(old), None))


def _planned_records(plan: ShardPlan, key: bytes | None) -> splits.Records:
    used = plan.numbers["crops"] > 0
    sources, names, patients = _texts(plan, used, key)
    crops = plan.numbers["crops"][used]
    crop_record = np.repeat(np.arange(len(crops), dtype=np.int32), crops)
    place = np.arange(len(crop_record), dtype=np.int32)
    place -= (np.cumsum(crops, dtype=np.int32) - crops)[crop_record]
    waveform = _only_copies(plan.numbers["waveform"][used])[crop_record]
    waveform += place.astype(np.uint64) * np.uint64(ODD)
    return splits.Records(
        sources,
        tuple(plan.seen),
        names,
        patients,
        crop_record,
        place * np.float32(CROP / FS_HZ),
        waveform,
    )


def _texts(
    plan: ShardPlan, used: np.ndarray, key: bytes | None
) -> tuple[np.ndarray, pa.Array, pa.Array]:
    """The places of the sources in `seen`, the names and the patients of these records, as the dataset
    shows them."""
    seen = pa.array(plan.seen, pa.large_string())
    sources, names, patients = [], [], []
    for part in splits.parts(len(used)):
        keep = pa.array(used[part])
        columns = plan.labels.column(), plan.known_patients.column(), plan.patients
        labels, archives, tables = (column[part].filter(keep) for column in columns)
        label = pc.split_pattern(labels, "/", max_splits=1)
        source, name = pc.list_element(label, 0), pc.list_element(label, 1)
        sources.append(pc.index_in(source, seen).to_numpy().astype(np.int16))
        if key:
            pairs = zip(source.to_pylist(), name.to_pylist(), strict=True)
            name = pa.array(pseudonym(key, "r", *pair) for pair in pairs)
        names.append(name.cast(pa.string()))
        if tables.null_count < len(tables):
            archives = _from_tables(source.to_pylist(), archives, tables, key)
        patient = pc.if_else(pc.equal(archives, ""), None, archives)
        patients.append(patient.cast(pa.string()))
    return np.concatenate(sources), pa.concat_arrays(names), pa.concat_arrays(patients)


def _from_tables(
    sources: Sequence[str], archives: pa.Array, tables: pa.Array, key: bytes | None
) -> pa.Array:
    """The patients that a table names, as the dataset shows them; else those of the archives."""
    triples = zip(sources, archives.to_pylist(), tables.to_pylist(), strict=True)
    return pa.array(shown_patient(key, source, new) or old for source, old, new in triples)


def _only_copies(marks: np.ndarray) -> np.ndarray:
    """Marks of waveforms, with one of its own for each record that shares its with too many."""
    ordered = np.sort(marks)
    later = ordered[COPIES:]
    common = np.unique(later[later == ordered[:-COPIES]])
    many = np.flatnonzero(pc.is_in(pa.array(marks), pa.array(common)))
    marks[many] = many
    return marks


def _rows_of_patients(dataset: Dataset, patients: pa.Array) -> pa.Table | None:
    """The rows of a dataset that have one of these patients, if there are any."""
    people = patients.unique().drop_null()
    wanted = pc.is_in(dataset.table(["patient"])["patient"], people)
    if not pc.any(wanted).as_py():
        return None
    columns = ["source", "record", "patient", "start_s", "waveform", *ROLES]
    # One by one, as each is large before it is filtered
    return pa.table({name: dataset.table([name])[name].filter(wanted) for name in columns})
