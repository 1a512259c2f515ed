"""Patients on two sides: train/test leakage across datasets, and the validation split of data.hold_out.

find_leak(datasets, "dx_role")                       # None, or who is trained on in one dataset and held out in another
conflicting_splits(history, dataset)                 # datasets a model was trained on that split the same sources otherwise
trained, held = validation_split(dataset, 0.05)      # bool [crops] each

`validation_split` keeps patients (records where patients are unknown) from training, so that there is something to validate on
where a dataset has no roles. Who is held out depends on a hash of the name alone: more data moves nobody, every run holds out
the same ones, and a larger share includes those of a smaller one. Copies of a held-out crop are on neither side.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dataset import VENDORS, Dataset

SPLIT = ("plan", "seed", "id_share", "role_sources", "pseudonyms")  # these and a name decide a role: data_tools.splits
KEY = b"omnilead data.hold_out"
OWNER = ("source", "patient", "record")


def split_of(dataset: Dataset) -> dict[str, Any]:
    """How a dataset was split, as a trained model remembers it."""
    sources = [source["name"] for source in dataset.meta.get("sources", ())]
    return {"fingerprint": dataset.fingerprint, "sources": sources, **{name: dataset.meta.get(name) for name in SPLIT}}


def conflicting_splits(history: Any, dataset: Dataset) -> list[list[tuple[str, Any, Any]]]:
    """For each conflict: (setting, the model's, this dataset's). `history`: a list of split_of(...) from an untrusted file."""
    mine, conflicts = split_of(dataset), []
    for one in history if isinstance(history, list) else ():
        if isinstance(one, dict) and one.get("fingerprint") != dataset.fingerprint and isinstance(one.get("sources"), list):
            differ = [(name, one.get(name), mine[name]) for name in SPLIT if one.get(name) != mine[name]]
            if differ and any(name in mine["sources"] for name in one["sources"]):
                conflicts.append(differ)
    return conflicts


def find_leak(datasets: Sequence[Dataset], role: str) -> str | None:
    """A record, patient or waveform that one dataset trains on and another holds out, in words. `role`: dx_role, id_role, or
    pretrain, for which valid and test of dx_role and gallery and probe of id_role are held out."""
    sides = [_sides(dataset, role) for dataset in datasets] if len(datasets) > 1 else []
    for a, b in permutations(range(len(sides)), 2):
        if both := _in_both(sides[a][0], sides[b][1]):
            return f"{both} is trained on in {datasets[a].root.url} and held out in {datasets[b].root.url}"
    return None


def overlap(a: Dataset, rows: np.ndarray, b: Dataset, others: np.ndarray) -> str:
    """A record, patient or waveform of these crops of `a` that is among the others of `b`, in words; "" if there is none."""
    return _in_both(*(_names(one.table([*OWNER, "waveform"]).take(some)) for one, some in ((a, rows), (b, others))))


def _in_both(a: dict[str, pa.Array], b: dict[str, pa.Array]) -> str:
    both = {kind: names.filter(pc.is_in(names, b[kind])) for kind, names in a.items()}
    return next((f"{kind} {names[0]}" for kind, names in both.items() if len(names)), "")


def _sides(dataset: Dataset, role: str) -> tuple[dict[str, pa.Array], dict[str, pa.Array]]:
    """Patients, records and waveforms that are trained on, and those that are held out."""
    columns = ("dx_role", "id_role", "pretrain") if role == "pretrain" else (role,)
    table = dataset.table(["source", "patient", "record", "waveform", *columns])
    if role == "pretrain":
        tests = pa.array(["valid", "test"]), pa.array(["gallery", "probe"])
        trained, held = table[role], pc.or_(pc.is_in(table["dx_role"], tests[0]), pc.is_in(table["id_role"], tests[1]))
    else:
        trained, held = pc.equal(table[role], "train"), pc.not_equal(table[role], "train")
    return _names(table.filter(trained)), _names(table.filter(held))


def _names(table: pa.Table) -> dict[str, pa.Array]:
    patients = pc.if_else(pc.not_equal(table["patient"], ""), table["patient"], None)
    named = {"record": table["record"], "patient": patients}
    sources = {"record": table["source"], "patient": _patient_source(table["source"])}
    names = {kind: pc.binary_join_element_wise(sources[kind], column, "/") for kind, column in named.items()}
    return {kind: column.drop_null().combine_chunks() for kind, column in (names | {"waveform": table["waveform"]}).items()}


def _patient_source(source: pa.Array) -> pa.Array:
    """Whose patient ids they are: a hospital's files have the same ones in every format."""
    return pc.if_else(pc.is_in(source, pa.array(VENDORS)), VENDORS[0], source)


@lru_cache(maxsize=4)  # each validation asks again
def validation_split(dataset: Dataset, share: float) -> tuple[np.ndarray, np.ndarray]:
    """bool [crops] each: trained on, held out."""
    held, waveforms = [], []
    for part in dataset.parts([*OWNER, "waveform"]):
        names, _ = owners(part)
        held.append((uniforms(names.dictionary) < share)[names.indices.to_numpy()])
        waveforms.append(part["waveform"].to_numpy()[held[-1]])
    theirs = np.unique(np.concatenate(waveforms))
    copies = [np.isin(part["waveform"].to_numpy(), theirs) for part in dataset.parts(["waveform"])]
    return ~np.concatenate(copies), np.concatenate(held)


def owners(part: pa.RecordBatch) -> tuple[pa.DictionaryArray, np.ndarray]:
    """Each crop's source/patient, or source/record where patients are unknown; and whether they are known."""
    known = pc.fill_null(pc.not_equal(part["patient"], ""), False)
    name = pc.if_else(known, part["patient"], part["record"])
    source = pc.if_else(known, _patient_source(part["source"]), part["source"])
    joined = pc.binary_join_element_wise(source, name, "/")
    return pc.dictionary_encode(joined), known.to_numpy(zero_copy_only=False)


def patient_ids(datasets: Sequence[Dataset]) -> list[np.ndarray]:
    """For each dataset an integer for the patient of every crop (for its record where the patient is unknown), int64 [crops].
    Patients of two datasets never share one."""
    ids: list[np.ndarray] = []
    for number, dataset in enumerate(datasets):
        names, known = zip(*map(owners, dataset.parts(OWNER)), strict=True)
        codes = [part.indices.to_numpy() for part in pa.chunked_array(names).unify_dictionaries().chunks]
        ids.append(number << 40 | np.concatenate(codes).astype(np.int64) << 1 | np.concatenate(known))
    return ids


def uniforms(names: pa.Array) -> np.ndarray:
    """A hash of each name in [0, 1)."""
    words = b"".join(blake2b(name.encode(), key=KEY, digest_size=8).digest() for name in names.to_pylist())
    return (np.frombuffer(words, ">u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53
