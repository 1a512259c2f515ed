"""The end of a build: roles of all records, tables, the zarr copy, the data card, and dataset.json
last.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm.auto import tqdm

from ..dataset import (
    COLUMNS,
    FORMAT_MINOR,
    FORMAT_VERSION,
    META,
    NAME_KEY,
    REJECTS,
    SAMPLES,
    STORE,
    VERSIONS,
    Dataset,
    Meta,
    fingerprint,
    flagged,
)
from ..ecg.crops import SPEC, SPEC_HASH
from ..ecg.pseudonyms import REMOVED, Removed, pseudonym
from ..ecg.record import SYNTHETIC, patient_source
from ..io import cluster
from ..io.errors import DatasetError, ReadError, StorageError
from ..io.storage import Folder, temporary_path, write_errors
from ..io.terminal import tell
from . import roles as splits
from . import shards as shard_writers
from .data_card import write_card
from .plan import ShardPlan
from .previous import PreviousVersion
from .rejects import FLAGS, Reject, most_common_reasons, reason_counts, rejects_csv, rejects_of
from .roles import PAPER_SOURCES, RoleSources
from .shards import ROLES_WIDTH, extended, part_name, roles_text, shard_name

DIGEST_BYTES = 32  # at the end of a part
SYNTHETIC_LICENCE = "CC0-1.0"
ROW_GROUP = 65_536
ROLES = ["pretrain", "dx_role", "id_role"]
FORMATS = {"tar": ["tar"], "zarr": ["zarr"], "both": ["tar", "zarr"]}
_SHARD_FILE = re.compile(r"shards/(\d{5,})\.(?:tar|idx)", re.ASCII)


@dataclass(frozen=True)
class ShardOptions:
    out: str
    plan: str = "paper"
    seed: int = 0
    shard_crops: int | None = None  # None: as usual
    role_sources: RoleSources = PAPER_SOURCES
    format: str = "tar"
    workers: int = 1
    cluster: str | None = None
    pseudonym_key: bytes | None = None
    patients: str | None = None  # a table that names them
    quiet: bool = False
    append: bool = False
    removed: Removed = field(default_factory=Removed)  # of the dataset that is extended


def read_part(out: Folder, name: str) -> pa.Table:
    """The part of a shard; a ReadError if its sha256 differs."""
    data = memoryview(out.read(part_name(name), 2**30))
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ReadError(
            "fails its sha256",
            f"{out.url}/{part_name(name)}: run the same command again to rebuild it",
        )
    # pq.read_table would read in threads of arrow, which release `body` later. If the program is
    # just ending, they abort it
    return pq.ParquetFile(pa.BufferReader(body)).read(use_threads=False)


def whole_tar(out: Folder, facts: dict[str, Any]) -> memoryview:
    """The tar as it was written, whichever roles it has by now; else a ReadError."""
    tar = out.view(f"shards/{facts['name']}", facts["bytes"])
    if facts["sha256"]:  # nobody has begun to write other roles
        if hashlib.sha256(tar).hexdigest() != facts["sha256"]:
            raise ReadError("fails its sha256")
        return tar
    crc = begin = 0
    for start in facts["roles_at"]:
        crc = extended(crc, tar[begin:start])
        begin = start + ROLES_WIDTH
    if extended(crc, tar[begin:]) != facts["crc32c"]:
        raise ReadError("fails its crc32c")
    return tar


def write_part(out: Folder, table: pa.Table, facts: dict[str, Any]) -> None:
    data = as_parquet(table.replace_schema_metadata({"omnilead": json.dumps(facts)}))
    out.write(part_name(facts["name"]), data + hashlib.sha256(data).digest())


def as_parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP)
    return bytes(sink.getvalue())


def recipe_hash(recipe: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


class PlanFacts(NamedTuple):
    """What the end of a build needs of its plan."""

    shards: list[str]  # their names
    sources: list[dict[str, Any]]  # name, licence, dropped_s, seen
    rejects: list[Reject]

    @classmethod
    def of_plan(cls, plan: ShardPlan, previous: PreviousVersion | None) -> "PlanFacts":
        """With the sources of a previous version, whose licences stay."""
        sources = {}
        if previous:
            sources = {old["name"]: old | {"seen": 0} for old in previous.meta["sources"]}
        for name, seen in plan.seen.items():
            licence, dropped_s = plan.facts(name)
            if name.startswith(SYNTHETIC):
                licence = SYNTHETIC_LICENCE
            if name in sources:
                stays = sources[name]["licence"]
                if licence not in (None, stays):
                    tell(
                        f"note: the licence of {name} stays {stays}, although that of the new "
                        f"records is {licence}"
                    )
                licence = stays
                dropped_s = round(dropped_s + sources[name]["dropped_s"], 3)
            facts = {"name": name, "licence": licence or plan.sources[0].licence}
            sources[name] = facts | {"seen": seen, "dropped_s": dropped_s}
        first = previous.next_shard_number if previous else 0
        names = [shard_name(first + i) for i in range(plan.shards)]
        return cls(names, [sources[name] for name in sorted(sources)], plan.rejects)


@dataclass(frozen=True)
class Parts:
    """The parts of new shards, which lie beside them until the build ends. They are read several times:
    all rows at once would take gigabytes."""

    out: Folder
    shards: list[str]  # their names

    def __iter__(self) -> Iterator[pa.Table]:
        return (read_part(self.out, name) for name in self.shards)

    def columns(self, names: list[str]) -> pa.Table:
        rows = (part.select(names).replace_schema_metadata() for part in self)
        return pa.concat_tables([COLUMNS.empty_table().select(names), *rows])


def finish(
    planned: PlanFacts,
    out: Folder,
    recipe: dict[str, Any],
    options: ShardOptions,
    previous: PreviousVersion | None = None,
) -> Dataset:
    """The dataset of finished shards. `previous`: the version that is extended."""
    parts = Parts(out, planned.shards)
    leave_out = options.role_sources.leave_out
    shards, rejects, doubtful, written, numbers = _shard_facts(parts, leave_out)
    rejects += hidden(planned.rejects, options)
    if not len(doubtful):
        if not previous or not (news := previous.new_refusals(rejects)):
            return nothing_to_add(out, rejects, previous)
        tell(f"note: no record is added to {out.url}, but {news:,} lines to its rejects.csv")
        parts, shards = Parts(out, []), []
    records = records_of(partial(_columns, parts, previous, numbers))
    del numbers  # 160 MB of ten million crops, of which the records have copies
    refused = None
    if previous:
        rejects = previous.rejects_with(rejects, parts)
        refused = previous.refused_with(rejects, parts)
        check_patients(parts, previous)
    sources = source_facts(planned.sources, records, refused)
    roles = _roles_of_all(records, doubtful, options, previous)
    del records
    new_roles = roles.slice(len(previous or ()))
    if options.format != "zarr":
        _write_roles(out, shards, new_roles, written, options)
    if options.format != "tar":
        _write_zarr(parts, shards, options)
    rows = with_roles(parts, new_roles, len(previous.shards) if previous else 0)
    if previous:
        rows = chain(map(pa.table, previous.parts(COLUMNS.names)), rows)
        shards = previous.shards + shards
    elif options.format == "zarr":
        rows, shards = map(_without_shards, rows), []
    meta = dict(previous.meta) if previous else _settings(recipe)
    meta |= {"sources": sources, "formats": FORMATS[options.format]}
    made = write_tables(out, meta, rows, rejects, shards, roles, previous)
    return remove_traces(made, is_first=not previous)


def _columns(
    parts: Parts, previous: PreviousVersion | None, numbers: pa.Table, names: list[str]
) -> pa.Table:
    """Columns of all rows. `numbers`: some of the new ones, which have been read."""
    if set(names) <= set(numbers.column_names):
        new = numbers.select(names)
    else:
        new = parts.columns(names)
    return pa.concat_tables([previous.table(names), new]) if previous else new


def _roles_of_all(
    records: splits.Records,
    doubtful: np.ndarray,
    options: ShardOptions,
    previous: PreviousVersion | None,
) -> pa.Table:
    """The roles of all crops. `doubtful`: the new ones that are not for pre-training."""
    old = previous.table(ROLES) if previous else None
    doubtful = np.append(np.zeros(len(old or ()), bool), doubtful)
    return assign_roles(records, doubtful, options.plan, options.seed, options.role_sources, old)


def check_patients(parts: Parts, previous: PreviousVersion, fewest: int = 1) -> None:
    """An error if records of a source had patients, and none that is appended has."""
    rows = parts.columns(["source", "patient", "start_s"])
    if name := previous.source_without_patients(rows, fewest):
        remove_traces(previous)
        raise DatasetError(
            f"--append: patients of the new records of {name} are unknown, those of others are "
            "not, so one could be on both sides of a split: --patients FILE names them"
        )


def write_tables(
    out: Folder,
    meta: dict[str, Any],
    rows: Iterable[pa.Table],
    rejects: list[Reject],
    shards: list[dict[str, Any]],
    roles: pa.Table,
    previous: PreviousVersion | None = None,
    what: str = "append",
) -> Dataset:
    """Write what is not in the shards, dataset.json last. `meta`: what it says besides; `previous`: whose
    tables are kept; `what` has changed since."""
    if previous:
        previous.keep_tables()
        del meta["fingerprint"]
        meta["versions"] = previous.versions_with(what, len(roles))
    else:  # of a finished dataset, other programs read whatever lies in shards/
        _remove_leftovers(out, meta["formats"], shards)
    name_key = previous.name_key if previous else None
    samples, left_out = _write_samples(out, rows, meta.get("leave_out_flags", ()), name_key)
    lines = rejects_csv(rejects)
    meta |= {
        "crops": len(roles),
        "sources": meta.pop("sources"),
        "roles": role_counts(roles),
        "formats": meta.pop("formats"),
        "samples": samples,
        "rejects": {"bytes": len(lines), "sha256": hashlib.sha256(lines).hexdigest()},
        "shards": shards,
    }
    if "leave_out_flags" in meta:
        meta["left_out"] = left_out
    out.write(REJECTS, lines)
    meta["fingerprint"] = fingerprint(meta)
    write_card(out, Meta(meta), reason_counts(rejects), FLAGS)
    out.write(META, (json.dumps(meta, indent=1) + "\n").encode())
    return Dataset.open(out.url)


def remove_traces(made: Dataset, is_first: bool = False) -> Dataset:
    """Of the build, of killed ones, and versions before a removal. `is_first`: the first version has only
    its own."""
    if not is_first:
        _remove_leftovers(made.root, made.meta["formats"], made.shards)
        if "zarr" not in made.meta["formats"]:  # a killed removal leaves a part of it
            made.root.remove(STORE)
        for number in range(1, made.oldest):
            made.root.remove(f"{VERSIONS}/{number}")
        kept = f"{VERSIONS}/{made.version}"
        if made.root.exists(kept):  # a killed run that is not continued had begun to write tables
            rejects = rejects_of(made)
            for name in (SAMPLES, REJECTS):
                made.root.write(name, made.root.read(made.place(name), 2**40))
            write_card(made.root, made.meta, reason_counts(rejects), FLAGS)
            made.root.remove(kept)
            tell(
                f"note: {made.root.url}: what a killed run began is undone; README.md is written again"
            )
    made.root.remove(".build")
    return made


def _remove_leftovers(out: Folder, formats: list[str], shards: list[dict[str, Any]]) -> None:
    """Remove what killed runs with other sources or options left."""
    if "tar" not in formats:
        out.remove("shards")
    wanted = {shard["name"].removesuffix(".tar") for shard in shards}
    for name in list(out.names("shards")):
        shard_file = _SHARD_FILE.fullmatch(name)
        if shard_file and shard_file[1] not in wanted:
            out.remove(name)
    if "zarr" not in formats and out.exists(f"{STORE}/zarr.json"):
        out.remove(STORE)


def _shard_facts(
    parts: Parts, leave_out: tuple[str, ...]
) -> tuple[list[dict[str, Any]], list[Reject], np.ndarray, splits.CropRoles, pa.Table]:
    """For dataset.json and rejects.csv; a mask of the crops with a flag of `leave_out`; the roles that
    they were written with; and the columns that are small enough to keep."""
    shards = []
    rejects: list[Reject] = []
    doubtful = [np.zeros(0, bool)]
    written: list[tuple[np.ndarray, ...]]
    written = [(np.zeros(0, bool), np.zeros(0, np.int8), np.zeros(0, np.int8))]
    numbers = [COLUMNS.empty_table().select(["start_s", "waveform"])]
    for part in parts:
        facts = json.loads(part.schema.metadata[b"omnilead"])
        shards.append({name: facts[name] for name in ("name", "crops", "bytes", "sha256")})
        rejects += [tuple(reject) for reject in facts["rejects"]]
        doubtful.append(flagged(part, leave_out))
        written.append(tuple(vars(role_codes(part)).values()))
        numbers.append(part.select(["start_s", "waveform"]).replace_schema_metadata())
    roles = splits.CropRoles(*map(np.concatenate, zip(*written, strict=True)))
    return shards, rejects, np.concatenate(doubtful), roles, pa.concat_tables(numbers)


def _write_zarr(parts: Parts, shards: list[dict[str, Any]], options: ShardOptions) -> None:
    crops = parts.columns(["shard", "offset", "crc32c"])
    shard_writers.write_zarr(
        crops, shards, parts.out, options.workers, options.cluster, options.quiet
    )


def _write_roles(
    out: Folder,
    shards: list[dict[str, Any]],
    roles: pa.Table,
    written: splits.CropRoles,
    options: ShardOptions,
) -> None:
    """Write the roles into the shards that have others, which gives them another sha256. `written`:
    those that were written; a shard without sha256 has got some of others, by a killed run."""
    differ = role_codes(roles).differ(written)
    begins = np.cumsum([0, *(shard["crops"] for shard in shards)]).tolist()
    tasks = []
    for begin, shard in zip(begins, shards, strict=False):
        crops = slice(begin, begin + shard["crops"])
        if shard["sha256"] is None or differ[crops].any():
            tasks.append((shard["name"], roles[crops].to_pylist()))
    if not tasks:
        return
    tell(
        f"note: {len(tasks):,} of {len(shards):,} shards are written again: {differ.sum():,} crops have "
        "other roles than the headers told (records were refused, are copies of others, or have "
        "other patients)"
    )
    done = cluster.run(partial(write_roles, out), tasks, options.workers, options.cluster)
    sums = dict(tqdm(done, "roles", len(tasks), disable=options.quiet))
    for shard in shards:
        shard["sha256"] = sums.get(shard["name"], shard["sha256"])


def write_roles(out: Folder, task: tuple[str, list[dict[str, Any]]]) -> tuple[str, str]:
    """Write the roles of a shard's crops into its JSON. -> its name and its sha256."""
    name, rows = task
    try:
        part = read_part(out, name)
        facts = json.loads(part.schema.metadata[b"omnilead"])
        tar = whole_tar(out, facts)
        if facts["sha256"]:  # which is wrong as soon as this begins
            write_part(out, part, facts | {"sha256": None})
    except ReadError as error:
        out.remove(part_name(name))
        raise DatasetError(
            f"{out.url}/shards/{name}: {error.reason}: run again to rebuild the file"
        ) from None
    texts = [roles_text(*row.values()) for row in rows]
    tar = out.patch(f"shards/{name}", tar, list(zip(facts["roles_at"], texts, strict=True)))
    return name, hashlib.sha256(tar).hexdigest()


def _write_samples(
    out: Folder, rows: Iterable[pa.Table], leave_out: Iterable[str], name_key: bytes | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Write samples.parquet by row groups. -> also how many crops have each flag of `leave_out`.
    `name_key`: that of the version before, which stays (Dataset.name_key)."""
    left_out = dict.fromkeys(leave_out, 0)
    schema = COLUMNS.with_metadata({NAME_KEY: name_key}) if name_key else COLUMNS
    temporary = temporary_path(out, SAMPLES)
    try:
        with write_errors(out.url, SAMPLES):
            with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
                for group in _row_groups(rows):
                    writer.write_table(group, ROW_GROUP)
                    for flag in left_out:
                        left_out[flag] += int(flagged(group, [flag]).sum())
            size = temporary.stat().st_size
            with open(temporary, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        out.publish(temporary, SAMPLES)
    finally:
        temporary.unlink(missing_ok=True)
    return {"bytes": size, "sha256": digest}, left_out


def with_roles(
    parts: Iterable[pa.Table], roles: pa.Table, first_shard: int = 0
) -> Iterator[pa.Table]:
    """The rows of shards. `first_shard`: its place in dataset.json."""
    begin = 0
    for number, part in enumerate(parts, first_shard):
        part = part.replace_schema_metadata().cast(COLUMNS)
        of_part = roles.slice(begin, len(part))
        begin += len(part)
        shard = pa.array(np.full(len(part), number, np.int32))
        yield replaced(part, of_part.append_column("shard", shard))


def replaced(table: pa.Table, columns: pa.Table) -> pa.Table:
    """With other values of some columns."""
    for name in columns.column_names:
        place = COLUMNS.get_field_index(name)
        table = table.set_column(place, COLUMNS.field(name), columns[name])
    return table


def _row_groups(rows: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """ROW_GROUP at a time."""
    left = COLUMNS.empty_table()
    for table in rows:
        left = pa.concat_tables([left, table])
        while len(left) >= ROW_GROUP:
            yield left.slice(0, ROW_GROUP)
            left = left.slice(ROW_GROUP)
    if len(left):
        yield left


def _settings(recipe: dict[str, Any]) -> dict[str, Any]:
    """The part of dataset.json that says how it was made."""
    meta: dict[str, Any] = {"format_version": FORMAT_VERSION}
    meta["format_minor"] = FORMAT_MINOR
    for name in ("fs_hz", "leads", "uv_per_lsb", "crop_samples"):
        meta[name] = SPEC[name]
    meta["preprocessing"] = SPEC
    meta["preprocessing_sha256"] = SPEC_HASH
    for name in ("seed", "plan", "shard_crops", "id_share", "role_sources", "leave_out_flags"):
        if name in recipe:
            meta[name] = recipe[name]
    return meta | {"recipe": recipe_hash(recipe), "pseudonyms": recipe["pseudonyms"]}


def _without_shards(table: pa.Table) -> pa.Table:
    """With zarr only, the row number is the address."""
    absent = np.full(len(table), -1)
    columns = {name: pa.array(absent, COLUMNS.field(name).type) for name in ("shard", "offset")}
    return replaced(table, pa.table(columns))


def hidden(rejects: list[Reject], options: ShardOptions) -> list[Reject]:
    """With a key: names as pseudonyms, and no details, which may have names of files. Who was
    removed has no name."""
    key = options.pseudonym_key
    if key is None and not options.removed.marks:
        return rejects  # there may be millions
    shown = []
    for source, name, reason, detail in rejects:
        name = pseudonym(key, "r", source, name)
        if reason == REMOVED or options.removed.has(source, name, "r"):
            name, reason, detail = options.removed.mark(source, name, "r"), REMOVED, ""
        shown.append((source, name, reason, "" if key else detail))
    return shown


def nothing_to_add(out: Folder, rejects: list[Reject], previous: Dataset | None) -> Dataset:
    """If no record can be used: the dataset as it was, or an error, and rejects.csv. Names the most
    common reasons, each with its first file."""
    why = most_common_reasons(rejects)
    if previous:
        refused = len({reject[:2] for reject in rejects})
        why = f"{refused:,} cannot be used: {why}" if refused else "none is new"
        tell(f"note: no record is added to {out.url}: {why}")
        return remove_traces(previous)
    out.write(REJECTS, rejects_csv(rejects))
    raise StorageError(f"no record can be used: {why}: {out.url}/{REJECTS} lists all of them")


def source_facts(
    sources: list[dict[str, Any]], records: splits.Records, refused: Mapping[str, int] | None
) -> list[dict[str, Any]]:
    """`refused`: how many records of each source; None: all that were seen and have no crops."""
    counts = source_counts(records)
    facts = []
    for source in sources:
        name = source["name"]
        crops, used = counts.get(name, (0, 0))
        unused = source["seen"] - used if refused is None else refused.get(name, 0)
        of_source = {
            "name": name,
            "licence": source["licence"],
            "records": {"seen": used + unused, "used": used, "refused": unused},
            "crops": crops,
            "dropped_s": source["dropped_s"],
        }
        facts.append(of_source)
    return facts


def source_counts(records: splits.Records) -> dict[str, tuple[int, int]]:
    """The number of crops and of records by source."""
    kinds = len(records.source_names)
    crops = np.bincount(records.source[records.crop_record], minlength=kinds).tolist()
    used = np.bincount(records.source, minlength=kinds).tolist()
    return dict(zip(records.source_names, zip(crops, used, strict=True), strict=True))


def records_of(read: Callable[[list[str]], pa.Table]) -> splits.Records:
    """The records that rows of samples.parquet belong to. `read` reads some of its columns: all that
    are needed would not fit into a gigabyte for ten million rows."""
    table = read(["source", "record"])
    sources = table["source"].unique()
    codes = pc.index_in(table["source"], sources).to_numpy().astype(np.int16)
    labels = pc.binary_join_element_wise(table["source"], table["record"], "/")
    crop_record = splits.numbered(labels)
    del labels
    first = np.empty(crop_record.max(initial=-1) + 1, np.int32)
    first[crop_record[::-1]] = np.arange(len(table), dtype=np.int32)[::-1]
    order = np.argsort(first)
    first = first[order]
    place = np.empty(len(first), np.int32)
    place[order] = np.arange(len(first))
    del order
    names = table["record"].combine_chunks().take(pa.array(first))
    del table
    patients = read(["patient"])["patient"].combine_chunks().take(pa.array(first))
    return splits.Records(
        codes[first],
        tuple(sources.to_pylist()),
        names,
        patients,
        place[crop_record],  # in the order of their first rows
        read(["start_s"])["start_s"].to_numpy(),
        read(["waveform"])["waveform"].to_numpy(),
    )


def owners_of(made: Dataset) -> pa.Array:
    """SOURCE/PATIENT of each crop, with the source as of patients; null where unknown."""
    table = made.table(["source", "patient"])
    names = table["source"].unique()
    sources = pa.array(map(patient_source, names.to_pylist()))
    of_crops = sources.take(pc.index_in(table["source"], names).combine_chunks())
    return pc.binary_join_element_wise(of_crops, table["patient"].combine_chunks(), "/")


@cache
def _role_names() -> pa.Array:
    """Made when it is needed: for its first array, pyarrow imports pandas, if that is installed."""
    return pa.array([name or None for name in splits.ROLE_NAMES])


def assign_roles(
    records: splits.Records,
    doubtful: np.ndarray,
    plan: str,
    seed: int,
    sources: RoleSources = PAPER_SOURCES,
    old: pa.Table | None = None,
) -> pa.Table:
    """The columns pretrain, dx_role and id_role. `doubtful`: the crops that are not for
    pre-training; `old`: the roles of the first crops, which stay."""
    if old is None or plan == "all":
        roles = splits.assign(records, plan, seed, sources)
    else:
        roles, torn = splits.extended(records, role_codes(old), seed, sources)
        if torn:
            tell(
                f"note: {torn:,} appended records link records whose roles exclude each other: these "
                "have no role"
            )
    roles.leave_out(doubtful)
    if old is None and plan != "paper-split" and (leaks := splits.leaks(records, roles)):
        raise DatasetError(f"leakage between roles: {leaks[0]}")
    named = _role_names().take(pa.array(roles.dx)), _role_names().take(pa.array(roles.identity))
    return pa.table([roles.pretrain, *named], ROLES)


def role_codes(table: pa.Table) -> splits.CropRoles:
    """The columns of `assign_roles` as numbers."""
    codes = [
        pc.index_in(table[name], _role_names()).to_numpy().astype(np.int8) for name in ROLES[1:]
    ]
    return splits.CropRoles(table["pretrain"].to_numpy(), *codes)


def value_counts(column: pa.ChunkedArray) -> dict[str, int]:
    """How often each value occurs."""
    values = pc.value_counts(column.drop_null()).to_pylist()
    return dict(sorted((value["values"], value["counts"]) for value in values))


def role_counts(table: pa.Table) -> dict[str, Any]:
    return {
        "pretrain": pc.sum(table["pretrain"], min_count=0).as_py(),
        "dx": value_counts(table["dx_role"]),
        "id": value_counts(table["id_role"]),
    }
