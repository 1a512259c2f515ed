"""Finds which crops must be in the same split: those of a patient or, if the patient is unknown,
those of a record."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg.record_tables import similar_ids_warning
from omnilead.engine.data.patients import all_owners, owner_ids, patient_source

from .join import JoinedSheet, record_of_crop
from .kinds import Array


class People(NamedTuple):
    names: pa.Array  # the distinct patients and records
    # for each crop of all datasets, the index in `names` of its patient or, if unknown, its record
    owner_N: Array
    known_N: Array  # True for crops whose patient is known

    def owner_ids_by_dataset(self, datasets: Sequence[Dataset]) -> list[Array]:
        """Returns int64 [crops] for each dataset: an odd id for the crop's patient or, if the
        patient is unknown, an even id for its record."""
        return owner_ids(datasets, self.owner_N, self.known_N)

    def doubtful_ids_remark(self, labelled_N: Array) -> list[str]:
        """Returns a remark if two patient ids of labelled crops may be two spellings of one id."""
        patients = np.unique(self.owner_N[labelled_N & self.known_N])
        doubt = similar_ids_warning(self.names.take(pa.array(patients)))
        return [doubt] if doubt else []

    def unknown_patient_and_record_counts(
        self, datasets: Sequence[Dataset], labelled_N: Array
    ) -> tuple[int, int]:
        """Counts the labelled records without a patient, and all labelled records."""
        record_N = record_of_crop(datasets)
        without_N = labelled_N & ~self.known_N
        return len(np.unique(record_N[without_N])), len(np.unique(record_N[labelled_N]))


def people_of(datasets: Sequence[Dataset]) -> People:
    return People(*all_owners(datasets))


def people_of_sheet(sheet: JoinedSheet, datasets: Sequence[Dataset]) -> People:
    """Returns the patients of the datasets' crops. Where a dataset does not know a patient, the
    sheet's column `patient` is used."""
    people = people_of(datasets)
    if people.known_N.all() or "patient" not in sheet.cells.column_names:
        return people
    cells = sheet.cells["patient"].combine_chunks()
    row_N = np.concatenate(sheet.row_of_crop)
    by_sheet_N = (row_N >= 0) & ~people.known_N
    by_sheet_N[by_sheet_N] = cells.is_valid().to_numpy(zero_copy_only=False)[row_N[by_sheet_N]]
    source = pa.concat_tables([dataset.table(["source"]) for dataset in datasets])["source"]
    namespace = patient_source(source.filter(pa.array(by_sheet_N)).combine_chunks())
    patients = cells.take(pa.array(row_N[by_sheet_N]))
    named = pc.binary_join_element_wise(namespace, patients, "/").dictionary_encode()
    all_names = pa.concat_arrays([people.names, named.dictionary]).dictionary_encode()
    owner_of_name = all_names.indices.to_numpy()
    owner_N = owner_of_name[people.owner_N]
    owner_N[by_sheet_N] = owner_of_name[len(people.names) + named.indices.to_numpy()]
    return People(all_names.dictionary, owner_N, people.known_N | by_sheet_N)


def unknown_patients_remark(unknown: Sequence[int]) -> list[str]:
    """Returns a remark on the records without a known patient. `unknown` holds the two counts of
    unknown_patient_and_record_counts."""
    without, records = unknown
    if not without:
        return []
    return [
        f"patients unknown for {without:,} of {records:,} records: split by record, scores may be "
        "too high"
    ]
