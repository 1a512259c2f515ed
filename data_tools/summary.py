"""A dataset in words and in one figure: sources, roles beside the paper's, what was refused and why."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dataset import Dataset
from data_tools.finish import read_rejects, records_of
from data_tools.prepare import MAX_UV
from data_tools.record import ABBREVIATIONS
from data_tools.splits import RoleSources

MANY_SATURATED = 0.01  # of a source's crops

# Oh et al. 2022, section 5.1, in 5 s segments. Its split is by segment and excludes nothing: see `--plan paper-split`.
PAPER = {
    "pretrain": 189_051,
    "dx train": 32_640,
    "dx valid": 4_079,
    "dx test": 4_079,
    "id train": 147_444,
    "id valid": 17_670,
    "id gallery": 2_127,
    "id probe": 2_127,
}
# Its six sets, in records of the Challenge's release.
PAPER_SETS = {
    "chapman_shaoxing": 10_247,
    "cpsc_2018": 6_877,
    "cpsc_2018_extra": 3_453,
    "georgia": 10_344,
    "ningbo": 34_905,
    "ptb-xl": 21_837,
}


def role_rows(dataset: Dataset) -> list[tuple[str, int, int, int]]:
    """(role, crops, 5 s segments, the paper's segments)."""
    table = dataset.table(["halves", "pretrain", "dx_role", "id_role"])
    halves = table["halves"].to_numpy()
    masks = {"pretrain": table["pretrain"].to_numpy()}
    for task in ("dx", "id"):
        roles = np.asarray(table[f"{task}_role"].to_pylist(), dtype=object)
        masks |= {name: roles == name.split()[1] for name in PAPER if name.startswith(task)}
    return [(name, int(mask.sum()), int(halves[mask].sum()), PAPER[name]) for name, mask in masks.items()]


def describe(dataset: Dataset) -> str:
    meta = dataset.meta
    megabytes = sum(shard["bytes"] for shard in dataset.shards) / 1e6
    shards = f"{len(dataset.shards)} tar shard{'s' * (len(dataset.shards) != 1)}"
    lines = [
        f"{dataset.root.url}: {len(dataset):,} crops of 10 s, {shards} of {megabytes:,.0f} MB in all"
        + (", zarr twin" if "zarr" in meta["formats"] else ""),
        f"plan {meta['plan']}, seed {meta['seed']}, fingerprint {dataset.fingerprint[:16]}",
        "",
        f"{'source':22}{'records':>10}{'the paper':>11}{'used':>10}{'refused':>9}{'crops':>10}{'dropped':>12}  licence",
    ]
    for source in meta["sources"]:
        records = source["records"]
        lines.append(
            f"{source['name']:22}{records['seen']:10,}{PAPER_SETS.get(source['name'], 0):11,}{records['used']:10,}"
            f"{records['refused']:9,}{source['crops']:10,}{source['dropped_s']:10,.0f} s  {source['licence']}"
        )
    lines += ["", f"{'role':22}{'crops':>10}{'5 s parts':>11}{'the paper':>11}"]
    if meta["plan"] == "paper-split":
        lines.append(
            "plan paper-split LEAKS: crops of one ECG are on both sides, as in the authors' code. For comparison only."
        )
    for name, crops, segments, paper in role_rows(dataset):
        lines.append(f"{name:22}{crops:10,}{segments:11,}{paper:11,}")
    if twice := _shared(dataset):
        lines += ["", f"{twice:,} crops have a waveform that another record has too"]
    reasons = Counter(line[2] for line in read_rejects(dataset))
    lines += ["", "refused, repaired or flagged (rejects.csv):" if reasons else "nothing refused, repaired or flagged"]
    lines += [f"  {reason:30}{count:8,}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def notes(dataset: Dataset) -> list[str]:
    """What the next commands would stumble over."""
    found = [] if dataset.meta["plan"] == "all" else [*_empty(dataset), *_sets(dataset)]
    table = dataset.table(["source", "flags"])
    flags = table["flags"].combine_chunks()
    beyond = np.zeros(len(table), bool)
    beyond[np.asarray(pc.list_parent_indices(flags))[np.asarray(pc.equal(pc.list_flatten(flags), "saturated"))]] = True
    all_of = Counter(table["source"].to_pylist())
    for source, count in sorted(Counter(table["source"].filter(pa.array(beyond)).to_pylist()).items()):
        if count > all_of[source] * MANY_SATURATED:
            found.append(
                f"{count:,} of {all_of[source]:,} crops of {source} are beyond {MAX_UV // 1000} mV: is its unit right?"
            )
    return found


def _empty(dataset: Dataset) -> Iterator[str]:
    """Roles that no crop has, and what would change that."""
    whose, roles = RoleSources.of(dataset.meta), dataset.meta["roles"]
    empty = ["pretrain"] if not roles["pretrain"] else []
    empty += [name for name in PAPER if name != "pretrain" and name.split()[1] not in roles[name.split()[0]]]
    cures = {
        "pretrain": "--pretrain-sources names what is for pre-training",
        "dx": f"diagnosis roles are for records of {' or '.join(whose.dx)}: --dx-sources names others",
        "id gallery": f"gallery and probe are for patients of {' or '.join(whose.id)} with two sessions, at most "
        f"{whose.id_share:g} of all: --id-sources and --id-share change that",
    }
    told = [cure for role, cure in cures.items() if any(name.startswith(role) for name in empty)]
    if empty:
        yield f"no crop for {', '.join(empty)}: {'; '.join(told) or 'too few records'}"


def _sets(dataset: Dataset) -> Iterator[str]:
    """Where the data for pre-training is not the paper's six sets."""
    whose, names = RoleSources.of(dataset.meta), [source["name"] for source in dataset.meta["sources"] if source["crops"]]
    if left_out := [name for name in names if not whose.pretrains(name)]:
        wanted = "not in the paper's" if whose.pretrain is None else "not in --pretrain-sources"
        yield f"not for pre-training: {', '.join(left_out)} ({wanted}): --pretrain-sources all includes every source"
    others = [name for name in names if whose.pretrains(name) and name not in PAPER_SETS]
    if whose.pretrain is None and others and PAPER_SETS.keys() & set(names):
        yield f"for pre-training, though not in the paper's: {', '.join(others)}: --pretrain-sources names only what is wanted"


def _shared(dataset: Dataset) -> int:
    """Crops whose waveform stands in two records."""
    records = records_of(dataset.table(["source", "record", "patient", "start_s", "waveform"]))
    _, number = np.unique(records.waveform, return_inverse=True)
    pairs = np.unique(np.stack([number, records.crop_record]), axis=1)
    return int((np.bincount(pairs[0])[number] > 1).sum())


def figure(dataset: Dataset) -> Any:
    from data_tools.plots import summary_figure

    table = dataset.table(["source", "pretrain", "dx_role", "id_role", "labels"])
    roles = [_role(*row) for row in zip(*(table[name].to_pylist() for name in ("pretrain", "dx_role", "id_role")), strict=True)]
    counts: dict[str, dict[str, int]] = {}
    for source, role in zip(table["source"].to_pylist(), roles, strict=True):
        by_role = counts.setdefault(source, {})
        by_role[role] = by_role.get(role, 0) + 1
    labels = pc.list_flatten(table["labels"]).to_numpy().reshape(-1, len(ABBREVIATIONS))
    classes = {name: int(count) for name, count in zip(ABBREVIATIONS, labels.sum(axis=0), strict=True) if count}
    return summary_figure(counts, classes, f"{len(dataset):,} crops of 10 s, plan {dataset.meta['plan']}")


def _role(pretrain: bool, dx: str | None, identity: str | None) -> str:
    if identity in ("gallery", "probe"):
        return "gallery or probe"
    if dx in ("valid", "test"):
        return f"diagnosis {dx}"
    return "pre-training" if pretrain else "kept out"
