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
    """`role`: dx_role, id_role or pretrain, whose held-out crops are diagnosis valid and test, gallery and probe."""
    sides = [_sides(dataset, role) for dataset in datasets] if len(datasets) > 1 else []
    for a, b in permutations(range(len(sides)), 2):
        for kind in ("record", "patient", "waveform"):
            taught, held = sides[a][0][kind], sides[b][1][kind]
            both = taught.filter(pc.is_in(taught, held))
            if len(both):
                a_url, b_url = datasets[a].root.url, datasets[b].root.url
                return f"{kind} {both[0]} is trained on in {a_url} and held out in {b_url}"
    return None


def _sides(dataset: Dataset, role: str) -> tuple[dict[str, pa.Array], dict[str, pa.Array]]:
    """Patients, records and waveforms that are trained on, and those that are held out."""
    columns = ("dx_role", "id_role", "pretrain") if role == "pretrain" else (role,)
    table = dataset.table(["source", "patient", "record", "waveform", *columns])
    if role == "pretrain":
        tests = pa.array(["valid", "test"]), pa.array(["gallery", "probe"])
        taught, held = table[role], pc.or_(pc.is_in(table["dx_role"], tests[0]), pc.is_in(table["id_role"], tests[1]))
    else:
        taught, held = pc.equal(table[role], "train"), pc.not_equal(table[role], "train")
    return _names(table.filter(taught)), _names(table.filter(held))


def _names(table: pa.Table) -> dict[str, pa.Array]:
    patients = pc.if_else(pc.not_equal(table["patient"], ""), table["patient"], None)
    named = {"record": table["record"], "patient": patients}
    names = {kind: pc.binary_join_element_wise(table["source"], column, "/") for kind, column in named.items()}
    return {kind: column.drop_null().combine_chunks() for kind, column in (names | {"waveform": table["waveform"]}).items()}
