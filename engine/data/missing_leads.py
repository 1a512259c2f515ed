"""Leads that a record lacks. Its crops have zeros there, and whatever is added to a batch must leave them zeros."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dataset import Dataset
from engine.common import ALL, LEADS
from engine.data.order import Places

Measured = Callable[[Places], np.ndarray]  # bool [B, 12]


@lru_cache(maxsize=4)  # each validation asks again
def lacking(dataset: Dataset) -> np.ndarray:
    """uint16 [crops]: a bit for each lead, from I at 1 on."""
    found = [np.zeros(0, np.uint16)]
    for part in dataset.parts(["missing_leads"]):
        missing, bits = part["missing_leads"], np.zeros(len(part), np.uint16)
        lead = pc.index_in(missing.flatten(), pa.array(LEADS)).fill_null(len(LEADS)).to_numpy()
        np.bitwise_or.at(bits, missing.value_parent_indices().to_numpy(), (1 << lead).astype(np.uint16))
        found.append(bits)
    return np.concatenate(found)


def unseen(dataset: Dataset, leads: Sequence[int]) -> np.ndarray:
    """bool [crops]: none of these leads was measured."""
    all_of_them = sum(1 << lead for lead in leads)
    blank: np.ndarray = lacking(dataset) & all_of_them == all_of_them
    return blank


def measured(datasets: Sequence[Dataset]) -> Measured | None:
    """Of a batch's crops; None where no record lacks a lead."""
    bits = [lacking(dataset) for dataset in datasets]

    def of(places: Places) -> np.ndarray:
        lacks = np.zeros(len(places), np.uint16)
        for d, each in enumerate(bits):
            mine = places.dataset == d
            lacks[mine] = each[places.row[mine]]
        has: np.ndarray = lacks[:, None] >> np.array(ALL) & 1 == 0
        return has

    return of if any(each.any() for each in bits) else None
