"""The roles that crops will have if every record can be read and is what its header says.

Roles depend on all records, and shards are written before all are read. So they are written with
these. At the end roles are assigned from what was read, and the shards with other ones, of refused
records or of copies that no header tells, are written again.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools import splits
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.finishing import ROLES, ShardOptions, records_of, role_codes
from omnilead.data_tools.plan import ShardPlan
from omnilead.data_tools.prepare import CROP
from omnilead.data_tools.pseudonyms import pseudonym
from omnilead.data_tools.resampling import FS_HZ
from omnilead.data_tools.sources.base import shown_patient

# More records that look alike are no copies: their headers lack checksums, or they begin with zeros
COPIES = 16
ODD = 0x9E3779B97F4A7C15


def expected_roles(
    plan: ShardPlan, options: ShardOptions, before: Dataset | None
) -> splits.CropRoles:
    """Those of the plan's crops, by their numbers. `before`: the dataset that they are for."""
    if options.plan == "all":
        none = np.zeros(len(plan.order), np.int8)
        return splits.CropRoles(np.ones(len(none), bool), none, none)
    records = _planned_records(plan, options.pseudonym_key)
    how = options.seed, options.role_sources
    if before:
        known, stand = _of_these_patients(before, records.patients)
        if len(stand.dx):
            roles, _ = splits.extended(known.and_then(records), stand, *how)
            return roles.take(np.arange(len(stand.dx), len(roles.dx)))
    return splits.assign(records, options.plan, *how)


def _planned_records(plan: ShardPlan, key: bytes | None) -> splits.Records:
    used = plan.numbers["crops"] > 0
    crops = plan.numbers["crops"][used]
    crop_record = np.repeat(np.arange(len(crops), dtype=np.int32), crops)
    place = np.arange(len(crop_record)) - plan.first_crop[:-1][used][crop_record]
    waveform = _without_chance(plan.numbers["waveform"][used])[crop_record]
    waveform += place.astype(np.uint64) * np.uint64(ODD)
    sources = tuple(plan.seen)
    codes, names, patients = [], [], []
    for part in splits.parts(len(used)):
        keep = pa.array(used[part])
        labels, archives, tables = (
            column[part].filter(keep)
            for column in (plan.labels, plan.known_patients, plan.patients)
        )
        label = pc.split_pattern(labels, "/", max_splits=1)
        source, name = pc.list_element(label, 0), pc.list_element(label, 1)
        codes.append(pc.index_in(source, pa.array(sources, source.type)).to_numpy())
        if key:
            pairs = zip(source.to_pylist(), name.to_pylist(), strict=True)
            name = pa.array(pseudonym(key, "r", *pair) for pair in pairs)
        names.append(name.cast(pa.string()))
        if tables.null_count < len(tables):
            archives = _from_tables(source.to_pylist(), archives, tables, key)
        patient = pc.if_else(pc.equal(archives, ""), None, archives)
        patients.append(patient.cast(pa.string()))
    return splits.Records(
        np.concatenate(codes).astype(np.int16),
        sources,
        pa.chunked_array(names).combine_chunks(),
        pa.chunked_array(patients).combine_chunks(),
        crop_record,
        place * (CROP / FS_HZ),
        waveform,
    )


def _from_tables(
    sources: Sequence[str], archives: pa.Array, tables: pa.Array, key: bytes | None
) -> pa.Array:
    """The patients that a table names, as the dataset shows them; else those of the archives."""
    triples = zip(sources, archives.to_pylist(), tables.to_pylist(), strict=True)
    return pa.array(shown_patient(key, source, new) or old for source, old, new in triples)


def _without_chance(marks: np.ndarray) -> np.ndarray:
    """Marks of waveforms, with one of its own for each record that shares its with many."""
    order = np.argsort(marks, kind="stable")
    begins = splits.run_starts(marks[order])
    alike = np.diff(begins, append=len(marks))
    many = order[np.repeat(alike > COPIES, alike)]
    marks[many] = many
    return marks


def _of_these_patients(
    before: Dataset, patients: pa.Array
) -> tuple[splits.Records, splits.CropRoles]:
    """The records of a dataset that have one of these patients, and the roles of their crops."""
    theirs = pc.is_in(before.table(["patient"])["patient"], patients.unique().drop_null())

    def read(columns: list[str]) -> pa.Table:
        return before.table(columns).filter(theirs)

    return records_of(read), role_codes(read(ROLES))
