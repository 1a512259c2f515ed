"""The text of `omnilead show DATASET` (sources, roles compared with the paper, what was refused),
and warnings."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.build import IMPLAUSIBLE, flagged, records_of
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.prepare import MAX_UV
from omnilead.data_tools.splits import RoleSources

MANY_SATURATED = 0.01  # share of a source's crops
# Numbers of 5 s segments in Oh et al. 2022, section 5.1. They split by segment and exclude nothing:
# see `--plan paper-split`
PAPER_ROLES = {
    "pretrain": 189_051,
    "dx train": 32_640,
    "dx valid": 4_079,
    "dx test": 4_079,
    "id train": 147_444,
    "id valid": 17_670,
    "id gallery": 2_127,
    "id probe": 2_127,
}
# Their six databases and the numbers of records in the Challenge's release
PAPER_SETS = {
    "chapman_shaoxing": 10_247,
    "cpsc_2018": 6_877,
    "cpsc_2018_extra": 3_453,
    "georgia": 10_344,
    "ningbo": 34_905,
    "ptb-xl": 21_837,
}


def describe(dataset: Dataset) -> str:
    """Describe sources, roles (with a plan of the paper: compared with it), and what was refused
    and why."""
    meta = dataset.meta
    count = len(dataset.shards)
    megabytes = sum(shard["bytes"] for shard in dataset.shards) / 1e6
    shards = f"{count} tar shard{'s' * (count != 1)} of {megabytes:,.0f} MB in all"
    zarr = ", zarr copy" if "zarr" in meta["formats"] else ""
    lines = [
        f"{dataset.root.url}: {len(dataset):,} crops of 10 s, {shards}{zarr}",
        f"plan {meta['plan']}, seed {meta['seed']}, fingerprint {dataset.fingerprint[:16]}",
        "",
        *_source_lines(meta),
        "",
        *_role_lines(dataset),
        *_duplicate_lines(dataset),
        "",
    ]
    reasons = Counter(reason for _, _, reason, _ in dataset.rejects())
    if reasons:
        lines.append("refused, repaired or flagged (rejects.csv):")
    else:
        lines.append("nothing was refused, repaired or flagged")
    lines += [f"  {reason:30}{count:8,}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def _source_lines(meta: Mapping[str, Any]) -> Iterator[str]:
    like_paper = meta["plan"] != "all"
    paper = f"{'the paper':>11}" if like_paper else ""
    counts = f"{'used':>10}{'refused':>9}{'crops':>10}{'dropped':>12}"
    yield f"{'source':22}{'records':>10}{paper}{counts}  licence"
    for source in meta["sources"]:
        name, records = source["name"], source["records"]
        paper = f"{PAPER_SETS.get(name, 0):11,}" if like_paper else ""
        counts = f"{records['used']:10,}{records['refused']:9,}{source['crops']:10,}"
        dropped = f"{source['dropped_s']:10,.0f} s"
        yield f"{name:22}{records['seen']:10,}{paper}{counts}{dropped}  {source['licence']}"


def _role_lines(dataset: Dataset) -> Iterator[str]:
    like_paper = dataset.meta["plan"] != "all"
    paper = f"{'the paper':>11}" if like_paper else ""
    yield f"{'role':22}{'crops':>10}{'5 s parts':>11}{paper}"
    if dataset.meta["plan"] == "paper-split":
        yield (
            "paper-split LEAKS: crops of one ECG are in train and test, as in the authors' code. "
            "For comparison only."
        )
    table = dataset.table(["halves", "pretrain", "dx_role", "id_role"])
    for name, segments in PAPER_ROLES.items():
        task, _, role = name.partition(" ")
        mask = pc.equal(table[f"{task}_role"], role).fill_null(False) if role else table["pretrain"]
        crops = pc.sum(mask).as_py() or 0
        parts = pc.sum(table["halves"].filter(mask)).as_py() or 0
        if crops or like_paper:
            paper = f"{segments:11,}" if like_paper else ""
            yield f"{name:22}{crops:10,}{parts:11,}{paper}"


def _duplicate_lines(dataset: Dataset) -> list[str]:
    records = records_of(dataset.table(["source", "record", "patient", "start_s", "waveform"]))
    _, number = np.unique(records.waveform, return_inverse=True)
    pairs = np.unique(np.stack([number, records.crop_record]), axis=1)
    duplicates = int((np.bincount(pairs[0])[number] > 1).sum())
    if not duplicates:
        return []
    return ["", f"{duplicates:,} crops have the same waveform as a crop of another record"]


def notes(dataset: Dataset) -> Iterator[str]:
    """Warnings about problems that would appear in later commands."""
    if dataset.meta["plan"] != "all":
        yield from _role_notes(dataset)
    table = dataset.table(["source", "flags"])
    implausible = int(flagged(table, IMPLAUSIBLE).sum())
    if implausible and not RoleSources.from_meta(dataset.meta).implausible:
        left_out = f"{implausible:,} crop{'s' * (implausible > 1)} left out of pre-training"
        why = "no heart has such an amplitude (`implausible amplitude` in rejects.csv)"
        yield (
            f"{left_out}: {why}; if the scale in the files is right, --pretrain-implausible "
            "includes them"
        )
    crops = Counter(table["source"].to_pylist())
    for source, count in sorted(
        Counter(table["source"].filter(pa.array(flagged(table, "saturated"))).to_pylist()).items()
    ):
        if count > crops[source] * MANY_SATURATED:
            yield (
                f"{count:,} of {crops[source]:,} crops of {source} exceed {MAX_UV // 1000} mV: is "
                "its unit right?"
            )


def _role_notes(dataset: Dataset) -> Iterator[str]:
    chosen, roles = RoleSources.from_meta(dataset.meta), dataset.meta["roles"]
    empty = [] if roles["pretrain"] else ["pretrain"]
    empty += [
        name
        for name in PAPER_ROLES
        if name != "pretrain" and name.split()[1] not in roles[name.split()[0]]
    ]
    advice = {
        "pretrain": "--pretrain-sources names sources for pre-training",
        "dx": f"diagnosis roles are for records of {' or '.join(chosen.dx)}: --dx-sources names "
        "others",
        "id gallery": f"gallery and probe are for patients of {' or '.join(chosen.id)} with two "
        f"sessions, at most {chosen.id_share:g} of all: --id-sources and --id-share change that",
    }
    if empty:
        given = [
            text for role, text in advice.items() if any(name.startswith(role) for name in empty)
        ]
        yield f"no crop for {', '.join(empty)}: {'; '.join(given) or 'too few records'}"
    names = [source["name"] for source in dataset.meta["sources"] if source["crops"]]
    if left_out := [name for name in names if not chosen.pretrains(name)]:
        why = "not in the paper" if chosen.pretrain is None else "not in --pretrain-sources"
        yield (
            f"not for pre-training: {', '.join(left_out)} ({why}): --pretrain-sources all "
            "includes every source"
        )
    others = [name for name in names if chosen.pretrains(name) and name not in PAPER_SETS]
    if chosen.pretrain is None and others and PAPER_SETS.keys() & set(names):
        yield (
            f"for pre-training, but not in the paper: {', '.join(others)}: --pretrain-sources "
            "names the sources to use"
        )
