"""Who learns and who is asked, where there are several datasets: those of a run, those that a model has seen before.

torn(datasets, "dx_role")            # None, or a line: whom one dataset trains on and another holds out
other_splits(seen, dataset)          # [[("seed", 0, 1)]]: of what a model has seen, same sources with other roles: why
"""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dataset import Dataset

# A role is a function of these and of who it is: data_tools.splits
SPLIT = ("plan", "seed", "id_share", "role_sources", "pseudonyms")


def split_of(dataset: Dataset) -> dict[str, Any]:
    sources = [source["name"] for source in dataset.meta.get("sources", ())]
    return {"fingerprint": dataset.fingerprint, "sources": sources, **{name: dataset.meta.get(name) for name in SPLIT}}


def other_splits(seen: Any, dataset: Dataset) -> list[list[tuple[str, Any, Any]]]:
    """`seen`: of split_of(...), out of a file that anybody may have written."""
    mine, found = split_of(dataset), []
    for one in seen if isinstance(seen, list) else ():
        if isinstance(one, dict) and one.get("fingerprint") != dataset.fingerprint and isinstance(one.get("sources"), list):
            differ = [(name, one.get(name), mine[name]) for name in SPLIT if one.get(name) != mine[name]]
            found += [differ] if differ and any(name in mine["sources"] for name in one["sources"]) else []
    return found


def torn(datasets: Sequence[Dataset], role: str) -> str | None:
    sides = [_sides(dataset, role) for dataset in datasets] if len(datasets) > 1 else []
    for a, b in permutations(range(len(sides)), 2):
        taught, held = sides[a][0], sides[b][1]
        both = taught.filter(pc.is_in(taught, held))
        if len(both):
            a_url, b_url = datasets[a].root.url, datasets[b].root.url
            return f"{both[0]} is one to learn from in {a_url} and is held out in {b_url}"
    return None


def _sides(dataset: Dataset, role: str) -> tuple[pa.Array, pa.Array]:
    """Names of the patients and records that are trained on, and of those that have another role."""
    table = dataset.table(["source", "patient", "record", role])
    taught, given = pc.equal(table[role], "train"), pc.not_equal(table[role], "")
    return _names(table.filter(taught)), _names(table.filter(pc.and_(given, pc.invert(taught))))


def _names(table: pa.Table) -> pa.Array:
    known = pc.if_else(pc.not_equal(table["patient"], ""), table["patient"], None)
    parts = [
        pc.binary_join_element_wise(f"{kind} ", table["source"], "/", name, "")
        for kind, name in (("record", table["record"]), ("patient", known))
    ]
    return pa.chunked_array([chunk for part in parts for chunk in part.chunks], pa.string()).drop_null().combine_chunks()
