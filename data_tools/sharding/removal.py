"""Remove patients from a dataset, who withdrew their consent: another version of it, without them.

    dataset, missing = remove("DATASET", "withdrawn.txt")

Shards that hold them are written again under new names, without their crops and copies of these;
other rows keep their content and roles. When dataset.json has switched, what holds them is deleted,
earlier versions and a zarr copy too, and every byte is checked. Run again, a run that was killed is
finished.
"""

import csv
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..dataset import COLUMNS, CROP_BYTES, SAMPLES, STORE, Dataset
from ..ecg.pseudonyms import REMOVED, other_key
from ..ecg.record import patient_source
from ..ecg.record_tables import decoded, ids_alike
from ..io.errors import DataError, DatasetError, ReadError, one_line
from ..io.spreadsheet import unquoted
from ..io.storage import Folder
from ..io.terminal import tell
from ..sources.base import shown_patient
from .finishing import (
    ROLES,
    owners_of,
    records_of,
    remove_traces,
    replaced,
    source_facts,
    with_roles,
    write_tables,
)
from .previous import PreviousVersion
from .rejects import Reject, rejects_of
from .shard import locked
from .shards import BLOCK, index_name, index_of, shard_name
from .verify import pieces, verify

SHOWN = 20  # names in a message
MEND = "`omnilead verify` says what is wrong"
WORD = re.compile("[A-Za-z0-9_-]+")
SHORTEST = 5  # characters of a patient that is searched in texts: 17 may be anything


def remove(
    url: str,
    patients: str,
    key: bytes | None = None,
    workers: int = 1,
    quiet: bool = True,
    forget: bool = False,
) -> tuple[Dataset, int]:
    """`patients`: a file with one on each line; `forget`: keep no marks of anybody who was ever removed.
    -> also how many of them the dataset never had."""
    wanted = _wanted(patients)
    with locked(Dataset.open(url).root):
        made = PreviousVersion.open(url)
        if not made.shards:
            raise DataError(
                f"{url} has a zarr store and no shards, so nobody can be removed: build it again "
                "without these patients"
            )
        owners = owners_of(made)
        people, missing = _people_to_remove(made, set(owners.unique().to_pylist()), wanted, key)
        is_theirs = pc.is_in(owners, pa.array(people, pa.string()))
        table = made.table(["record", "waveform"])
        waves = table["waveform"].filter(is_theirs).unique()
        lost = np.asarray(pc.is_in(table["waveform"], waves))
        mark = made.removed.mark
        marks = {mark(*person.split("/", 1)) for person in people}
        marks |= {mark("", str(wave)) for wave in waves.to_pylist()}
        records = table["record"].filter(is_theirs).to_pylist()
        names = {*records} | _written_forms([*wanted, *people])
        if people or (forget and made.removed.marks):
            left = _without(made, marks, lost, names, forget)
        else:
            left = made
        del made  # of a bucket, it holds all of samples.parquet
        remove_traces(left)  # also what a killed run has left
    own = pc.sum(is_theirs).as_py()
    tell(f"note: {own:,} crops are removed, and {lost.sum() - own:,} copies of them")
    if forget:
        tell("note: no marks of removed patients are kept: --append can bring them back")
    if findings := verify(left, workers=workers, quiet=quiet):
        raise DatasetError(
            f"{url}: {len(findings)} findings after the removal, first: {findings[0]}"
        )
    return left, missing


def _written_forms(people: list[str]) -> set[str]:
    """The names of patients with and without their source, as a text may have them."""
    names = set()
    for person in people:
        for text in (person, person.partition("/")[2]):
            if len(text) >= SHORTEST:
                names |= {text, normalize("NFC", text), normalize("NFD", text)}
    return names


def _wanted(file: str) -> list[str]:
    """The first cell of each line, or that below `patient` or `patient_id`. A quote ends with its
    line."""
    try:
        lines = list(filter(str.strip, decoded(Path(file).read_bytes()).splitlines()))
        mark = next((sign for sign in ";\t" if sign in "".join(lines[:1])), ",")
        rows = []
        for line in lines:
            row = next(csv.reader([line], delimiter=mark, skipinitialspace=True), [])
            rows.append([unquoted(cell.strip()) for cell in row])
    except (DataError, csv.Error) as error:
        raise DataError(f"--patients {file}: {error}") from None
    header = [cell.lower() for cell in rows[0]] if rows else []
    for name in ("patient", "patient_id"):
        if name in header:
            rows = [row[header.index(name) :] for row in rows[1:]]
            break
    return [row[0] for row in rows if row]


def _people_to_remove(
    made: Dataset, there: set[str], wanted: list[str], key: bytes | None
) -> tuple[list[str], int]:
    """SOURCE/PATIENT of those that are `there`, in the dataset; says who is not. -> also how many."""
    if key and (wrong := other_key(made.meta["pseudonyms"], key)):
        raise DataError(wrong)
    people: set[str] = set()
    asked: set[str] = set()
    missing, removed_before = [], 0
    all_sources = {patient_source(source["name"]) for source in made.meta["sources"]}
    for name in sorted({*wanted} - {""}):
        source, slash, who = name.partition("/")
        sources = {patient_source(source)} & all_sources
        if not slash or not sources:
            sources, who = all_sources, name
        ids = {f"{source}/{shown_patient(key, source, who)}" for source in sources}
        if len(ids & there) > 1:
            raise DataError(
                f"patient {name}: several have this id: write {' or '.join(sorted(ids & there))}"
            )
        people |= ids & there
        asked |= ids
        if ids & there:
            continue
        if any(made.removed.has(*person.split("/", 1)) for person in ids):
            removed_before += 1
        else:
            missing.append(name)
    if missing:
        shown = ", ".join(missing[:SHOWN]) + ", ..." * (len(missing) > SHOWN)
        tell(f"note: {len(missing):,} of these patients are not in the dataset: {shown}")
    _name_those_alike(asked, there - people)
    if removed_before:
        tell(f"note: {removed_before:,} of these patients were removed before")
    elif not people:
        raise DataError(f"none of the patients is in {made.root.url}: nothing is removed")
    return sorted(people), len(missing)


def _name_those_alike(asked: set[str], left: set[str]) -> None:
    """Says who stays and has an id like that of one who is to be removed. `left`: SOURCE/PATIENT of
    those who stay, or None."""
    stay = []
    for group in ids_alike(pa.array(sorted((asked | left) - {None}), pa.string())):
        if not asked.isdisjoint(group):
            stay += [person for person in group if person in left]
    if stay:
        shown = ", ".join(stay[:SHOWN]) + ", ..." * (len(stay) > SHOWN)
        tell(
            f"warning: {len(stay):,} patients stay whose ids differ from those given only in zeros or "
            f"in case: {shown}: if they are the same people, give these ids, too"
        )


def _without(
    previous: PreviousVersion, marks: set[str], lost: np.ndarray, names: set[str], forget: bool
) -> Dataset:
    """`marks`: of those who must not come back; `lost`: a mask of the crops to remove; `names`: what no
    line of rejects.csv may have; `forget`: keep no marks."""
    if lost.all():
        raise DataError(f"{previous.root.url}: no crop would be left: delete the whole dataset")

    def left(columns: list[str]) -> pa.Table:
        return previous.table(columns).filter(pa.array(~lost))

    gone = previous.table(["source", "record"]).filter(pa.array(lost))
    rejects, lost_rejects = _unnamed(rejects_of(previous), names)
    records = [*zip(*gone.to_pydict().values(), strict=True), *(line[:2] for line in lost_rejects)]
    marks |= {previous.removed.mark(source, record, "r") for source, record in records}
    marks |= previous.removed.marks
    if forget:
        marks = set()
        rejects = [line for line in rejects if line[2] != REMOVED]  # its record is a mark
    if "zarr" in previous.meta["formats"]:
        tell(f"note: {previous.root.url}/{STORE} is deleted: the shards hold the same crops")
    refused = {source["name"]: source["records"]["refused"] for source in previous.meta["sources"]}
    meta = previous.meta | {
        "formats": ["tar"],
        "sources": source_facts(previous.meta["sources"], records_of(left), refused),
        "removed": sorted(marks),
    }
    roles, shards = left(ROLES), list[dict[str, Any]]()
    rows = with_roles(_rows(previous, lost, shards), roles)
    return write_tables(previous.root, meta, rows, rejects, shards, roles, previous, "remove")


def _unnamed(rejects: list[Reject], names: set[str]) -> tuple[list[Reject], list[Reject]]:
    """Those without any of the names, and the others."""
    left = []
    others = []
    ends: dict[str, list[str]] = {}  # the names by their last words
    for name in names:
        ends.setdefault(["", *WORD.findall(name)][-1], []).append(name)
    for reject in rejects:
        text = f"{reject[1]} {reject[3]}"
        words = "", *WORD.findall(text)
        if not any(name in text for word in words for name in ends.get(word, ())):
            left.append(reject)
        else:
            others.append(reject)
    return left, others


def _rows(
    previous: PreviousVersion, lost: np.ndarray, shards: list[dict[str, Any]]
) -> Iterator[pa.Table]:
    """The rows that are left, by shard. Writes these shards, and adds what dataset.json says of
    them."""
    number = previous.next_shard_number
    numbers = np.arange(len(previous.shards) + 1)
    begins = np.searchsorted(previous.column("shard"), numbers)
    keeps = np.split(~lost, begins[1:-1])
    tables = pieces(previous, COLUMNS.names, begins)
    for facts, rows, keep in zip(previous.shards, tables, keeps, strict=True):
        if keep.any() and not keep.all():
            facts, offset = _write(previous.root, facts, rows["offset"].to_numpy(), keep, number)
            rows = replaced(rows.filter(pa.array(keep)), pa.table({"offset": offset}))
            number += 1
        if keep.any():
            shards.append(facts)
            yield rows


def _write(
    out: Folder, old: dict[str, Any], offset: np.ndarray, keep: np.ndarray, number: int
) -> tuple[dict[str, Any], np.ndarray]:
    """Write a shard without some crops as another one. -> also where the others are."""
    source, name = f"shards/{old['name']}", shard_name(number)
    try:
        data = out.view(source, old["bytes"])
        if hashlib.sha256(data).hexdigest() != old["sha256"]:
            raise ReadError("fails its sha256")
    except ReadError as error:
        raise DatasetError(f"{out.url}/{source}: {error.reason}: restore the file") from None
    begin = offset - BLOCK
    size = np.diff(begin, append=len(data) - 2 * BLOCK)
    if begin[0] != 0 or size.min() < CROP_BYTES + BLOCK:
        raise DatasetError(f"{out.url}/{SAMPLES}: offsets of {source} differ from it: {MEND}")
    size = size[keep]
    crops = [data[a : a + b] for a, b in zip(begin[keep], size, strict=True)]
    tar = b"".join([*crops, bytes(2 * BLOCK)])
    offset = np.cumsum(size) - size + BLOCK
    try:
        index = index_of(memoryview(tar), offset.tolist())
    except ValueError as error:  # a forged file with the right sha256
        raise DatasetError(one_line(f"{out.url}/{source}: {error}: {MEND}")) from None
    out.write(f"shards/{name}", tar)
    out.write(index_name(name), index.encode())
    facts = {"name": name, "crops": len(crops), "bytes": len(tar)}
    return facts | {"sha256": hashlib.sha256(tar).hexdigest()}, offset
