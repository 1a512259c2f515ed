"""Finish a build: assign roles to all records and write the zarr copy, the tables, the data card and,
last, dataset.json.
"""

import errno
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..dataset import (
    COLUMNS,
    FORMAT_MINOR,
    FORMAT_VERSION,
    META,
    NAME_KEY,
    REJECTS,
    SAMPLES,
    STORE,
    Dataset,
    DatasetFacts,
    RoleFacts,
    ShardFacts,
    fingerprint,
    flag_mask,
)
from ..dataset.rejects import (
    FLAG_REASONS,
    Reject,
    common_reasons_text,
    read_rejects,
    reason_counts,
    rejects_csv,
)
from ..ecg.crops import SPEC, SPEC_HASH
from ..ecg.record import SYNTHETIC, patient_source
from ..io.errors import DatasetError, ReadError, StorageError
from ..io.storage import Folder, explain_write_errors, temporary_path
from ..sources.dataset import StoredDataset, open_dataset
from . import roles as splits
from . import shards as shard_writers
from .data_card import write_card
from .leave_out import LeaveOut
from .plan import ShardPlan
from .roles import PAPER_SOURCES, RoleSources
from .shards import part_name, shard_name

DIGEST_BYTES = 32  # bytes of the sha256 at the end of a part file
SYNTHETIC_LICENCE = "CC0-1.0"
ROW_GROUP_ROWS = 65_536
ROLE_COLUMNS = ["pretrain", "dx_role", "id_role"]
PART_COLUMNS = pa.schema([field for field in COLUMNS if field.name not in ROLE_COLUMNS])
OLD_TABLE = f".build/{SAMPLES}"  # copy of samples.parquet that stays while a new table is written
STORED_FORMATS = {"tar": ["tar"], "zarr": ["zarr"], "both": ["tar", "zarr"]}
_SHARD_FILE = re.compile(r"shards/(\d{5,})\.(?:tar|idx)", re.ASCII)


@dataclass(frozen=True)
class ShardOptions:
    out: str
    plan: str = "paper"
    seed: int = 0
    shard_crops: int | None = None  # None means SHARD_CROPS
    role_sources: RoleSources = PAPER_SOURCES
    format: str = "tar"
    workers: int = 1
    cluster: str | None = None
    pseudonym_key: bytes | None = None
    patients: str | None = None  # a table that names the patient of each record
    leave_out: LeaveOut | None = None
    quiet: bool = False


def read_part(out: Folder, name: str) -> pa.Table:
    """Returns the rows in a shard's part file. Raises a ReadError if the file's sha256 is wrong."""
    data = memoryview(out.read(part_name(name), 2**30))
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ReadError(
            "fails its sha256",
            f"{out.url}/{part_name(name)}: run the same command again to rebuild it",
        )
    # pq.read_table would use threads of arrow, which release `body` later and abort the program if it ends
    # before that
    return pq.ParquetFile(pa.BufferReader(body)).read(use_threads=False)


def write_part(out: Folder, table: pa.Table, facts: dict[str, Any]) -> None:
    """Writes a shard's part file, which holds its rows and facts and their sha256 until the build ends."""
    data = parquet_bytes(table.replace_schema_metadata({"omnilead": json.dumps(facts)}))
    out.write(part_name(facts["name"]), data + hashlib.sha256(data).digest())


def parquet_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP_ROWS)
    return bytes(sink.getvalue())


def recipe_hash(recipe: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


class PlanFacts(NamedTuple):
    """What the end of a build needs to know about the plan, which is no longer in memory then."""

    shards: list[str]  # names of the shards
    sources: list[dict[str, Any]]  # name, licence, dropped_s and seen of each source
    rejects: list[Reject]
    name_key: bytes | None  # Dataset.name_key of the first dataset among the sources

    @classmethod
    def of_plan(cls, plan: ShardPlan) -> "PlanFacts":
        sources = []
        for name, seen in plan.seen.items():
            licence, dropped_s = plan.licence_and_dropped_s(name)
            if name.startswith(SYNTHETIC):
                licence = SYNTHETIC_LICENCE
            facts = {"name": name, "licence": licence or plan.sources[0].licence}
            sources.append(facts | {"seen": seen, "dropped_s": dropped_s})
        datasets = (source for source in plan.sources if isinstance(source, StoredDataset))
        first = next(datasets, None)
        name_key = open_dataset(first.root).name_key if first else None
        return cls([shard_name(i) for i in range(plan.shards)], sources, plan.rejects, name_key)


@dataclass(frozen=True)
class ShardParts:
    """The part files of new shards, which exist until the build ends. Each use reads them again, because
    all rows at once would take gigabytes of memory."""

    out: Folder
    shards: list[str]  # names of the shards

    def __iter__(self) -> Iterator[pa.Table]:
        return (read_part(self.out, name) for name in self.shards)

    def columns(self, names: list[str]) -> pa.Table:
        rows = (part.select(names).replace_schema_metadata() for part in self)
        return pa.concat_tables([COLUMNS.empty_table().select(names), *rows])

    def facts(self) -> Iterator[dict[str, Any]]:
        return (part_facts(part) for part in self)


def part_facts(part: pa.Table) -> dict[str, Any]:
    """Returns the facts about a shard that its part file holds besides the rows."""
    facts: dict[str, Any] = json.loads(part.schema.metadata[b"omnilead"])
    return facts


def finish_dataset(
    planned: PlanFacts, out: Folder, recipe: dict[str, Any], options: ShardOptions
) -> Dataset:
    """Writes all files of a dataset whose shards are finished, and returns the dataset."""
    parts = ShardParts(out, planned.shards)
    found = _shard_totals(parts, options.role_sources.leave_out)
    shards, rejects = found.shards, found.rejects + planned.rejects
    if not len(found.doubtful):
        return raise_no_record_error(out, rejects)
    records = read_records(partial(_read_columns, parts, found.numbers))
    sources = source_facts(
        planned.sources, records, _left_out_record_counts(records, found.left_out)
    )
    roles = assign_roles(records, found.doubtful, options.plan, options.seed, options.role_sources)
    del records
    if options.format != "tar":
        _write_zarr(parts, shards, options)
    rows = add_roles(parts, roles)
    if options.format == "zarr":
        rows, shards = map(_clear_addresses, rows), []
    meta = _meta_from_recipe(recipe) | {
        "sources": sources,
        "formats": STORED_FORMATS[options.format],
    }
    if options.leave_out:
        rejects = options.leave_out.without_names(rejects)
        meta["left_out_patients"] = _left_out_patient_counts(options.leave_out, found.left_out)
    made = write_tables(out, meta, rows, rejects, shards, roles, planned.name_key)
    if options.leave_out:
        people = {(who, person) for _, who, person, _ in found.left_out if who}
        options.leave_out.note_doubtful_names(
            people, patient_of_crops(made).unique().drop_null().to_pylist()
        )
    return remove_build_folder(made)


def _left_out_patient_counts(
    leave_out: LeaveOut, left_out: Iterable[Sequence[Any]]
) -> dict[str, int]:
    """Returns, for dataset.json, how many patients were to be left out and how many of them were
    found."""
    found = {who for _, who, _, _ in left_out if who}
    return {"asked": len(leave_out.names), "found": len(found)}


def _left_out_record_counts(
    records: splits.Records, left_out: Iterable[Sequence[Any]]
) -> Counter[str]:
    """Counts the records of each source that have no crops because their patients are left out."""
    labels = {label for label, *_ in left_out}
    names = pc.binary_join_element_wise(
        pa.array(records.source_names).take(pa.array(records.source)), records.names, "/"
    )
    labels -= set(names.filter(pc.is_in(names, pa.array(labels, pa.string()))).to_pylist())
    return Counter(label.partition("/")[0] for label in labels)


def write_roles(made: Dataset, recipe: dict[str, Any], options: ShardOptions) -> Dataset:
    """Writes samples.parquet with other roles and returns the dataset. A copy of the old table stays until
    dataset.json names the new table, so that a killed run can be continued."""
    out = made.root
    old_table = _read_old_table(made)
    records = read_records(old_table.select)
    sources = options.role_sources
    doubtful = flag_mask(old_table.select(["flags"]), sources.leave_out)
    roles = assign_roles(records, doubtful, options.plan, options.seed, sources)
    rows = replace_columns(old_table, roles)
    meta = {
        name: value
        for name, value in made.meta.items()
        if name not in ("id_share", "role_sources", "leave_out_flags", "left_out")
    }
    meta |= _meta_from_recipe(recipe) | {"recipe": recipe_hash(recipe)}
    del meta["fingerprint"]
    key = old_table.schema.metadata[NAME_KEY]
    made = write_tables(out, meta, [rows], read_rejects(made), made.shards, roles, key or None)
    return remove_build_folder(made)


def _read_old_table(made: Dataset) -> pa.Table:
    """Returns all rows of the old samples.parquet, with the name key in the metadata, and keeps a copy of
    the file. If a killed run has left a copy, reads this copy, because the run may have replaced the
    file itself."""
    out, facts = made.root, made.facts.samples
    if not out.exists(OLD_TABLE):
        key = made.name_key or b""
        data = out.read(SAMPLES, facts.bytes)
        out.write(f"{OLD_TABLE}.key", key)
        out.write(OLD_TABLE, data)
    data = out.read(OLD_TABLE, 2**40)
    if hashlib.sha256(data).hexdigest() != facts.sha256:
        raise DatasetError(
            f"{out.url}/{OLD_TABLE}: this copy of {SAMPLES} fails its sha256: restore {SAMPLES} and "
            "remove the copy"
        )
    key = out.read(f"{OLD_TABLE}.key", 64)
    return (
        pq.read_table(pa.BufferReader(data)).cast(COLUMNS).replace_schema_metadata({NAME_KEY: key})
    )


def _read_columns(parts: ShardParts, numbers: pa.Table, names: list[str]) -> pa.Table:
    """Returns the columns `names` of all rows. If `numbers`, which is in memory, has all of them, nothing is
    read."""
    if set(names) <= set(numbers.column_names):
        return numbers.select(names)
    return parts.columns(names)


def write_tables(
    out: Folder,
    meta: dict[str, Any],
    rows: Iterable[pa.Table],
    rejects: list[Reject],
    shards: list[ShardFacts],
    roles: pa.Table,
    name_key: bytes | None = None,
) -> Dataset:
    """Writes samples.parquet, rejects.csv, the data card and, last, dataset.json. `meta`: the entries of
    dataset.json that do not follow from the other arguments; `name_key`: the name key of the dataset
    that this one is made from."""
    # Leftovers must go, because other programs read every file in shards/ of a finished dataset
    _remove_leftovers(out, meta["formats"], shards)
    samples, left_out = _write_samples(out, rows, meta.get("leave_out_flags", ()), name_key)
    lines = rejects_csv(rejects)
    meta |= {
        "crops": len(roles),
        "sources": meta.pop("sources"),
        "roles": role_counts(roles).model_dump(),
        "formats": meta.pop("formats"),
        "samples": samples,
        "rejects": {"bytes": len(lines), "sha256": hashlib.sha256(lines).hexdigest()},
        "shards": [shard.model_dump() for shard in shards],
    }
    if "leave_out_flags" in meta:
        meta["left_out"] = left_out
    out.write(REJECTS, lines)
    meta["fingerprint"] = fingerprint(meta)
    write_card(out, DatasetFacts.model_validate(meta), reason_counts(rejects), FLAG_REASONS)
    out.write(META, (json.dumps(meta, indent=1) + "\n").encode())
    return Dataset.open(out.url)


def remove_build_folder(made: Dataset) -> Dataset:
    """Removes the files that only an unfinished dataset has, and returns the dataset."""
    try:
        made.root.remove(".build")
    except OSError as error:
        # Another run has opened this folder; that run will find that the dataset is finished
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise
    return made


def restore_table(made: Dataset) -> None:
    """Restores the old samples.parquet if a run was killed while it wrote other roles."""
    out = made.root
    if out.exists(OLD_TABLE):
        before = out.read(OLD_TABLE, 2**40)
        if hashlib.sha256(before).hexdigest() == made.facts.samples.sha256:
            out.write(SAMPLES, before)


def _remove_leftovers(out: Folder, formats: list[str], shards: list[ShardFacts]) -> None:
    """Removes shards and a zarr copy that do not belong to the dataset. Killed runs with other sources or
    options may have left them; with zarr only, the shards are those that the zarr copy was made from."""
    if "tar" not in formats:
        out.remove("shards")
    wanted = {shard.name.removesuffix(".tar") for shard in shards}
    for name in list(out.names("shards")):
        shard_file = _SHARD_FILE.fullmatch(name)
        if shard_file and shard_file[1] not in wanted:
            out.remove(name)
    if "zarr" not in formats and out.exists(f"{STORE}/zarr.json"):
        out.remove(STORE)


class _ShardTotals(NamedTuple):
    """What the part files of all shards hold, combined."""

    shards: list[ShardFacts]  # entries for dataset.json
    rejects: list[Reject]
    doubtful: np.ndarray  # bool [crops]: True if a flag leaves the crop out of pre-training
    left_out: list[list[Any]]  # one entry for each left-out crop, as in _ShardWriter.left_out
    numbers: pa.Table  # the columns start_s and waveform, which fit into memory


def _shard_totals(parts: ShardParts, leave_out: tuple[str, ...]) -> _ShardTotals:
    shards = []
    rejects: list[Reject] = []
    left_out: list[list[Any]] = []
    doubtful = [np.zeros(0, bool)]
    numbers = [COLUMNS.empty_table().select(["start_s", "waveform"])]
    for part in parts:
        facts = part_facts(part)
        shards.append(ShardFacts.model_validate(facts))
        rejects += [tuple(reject) for reject in facts["rejects"]]
        left_out += facts["left_out"]
        doubtful.append(flag_mask(part, leave_out))
        numbers.append(part.select(["start_s", "waveform"]).replace_schema_metadata())
    return _ShardTotals(
        shards, rejects, np.concatenate(doubtful), left_out, pa.concat_tables(numbers)
    )


def _write_zarr(parts: ShardParts, shards: list[ShardFacts], options: ShardOptions) -> None:
    crops = parts.columns(["shard", "offset", "crc32c"])
    shard_writers.write_zarr(
        crops, shards, parts.out, options.workers, options.cluster, options.quiet
    )


def _write_samples(
    out: Folder, rows: Iterable[pa.Table], leave_out: Iterable[str], name_key: bytes | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Writes samples.parquet by row groups. Returns (size and sha256 of the file, number of crops with
    each flag in `leave_out`). The metadata holds `name_key`, which Dataset.name_key explains."""
    left_out = dict.fromkeys(leave_out, 0)
    schema = COLUMNS.with_metadata({NAME_KEY: name_key}) if name_key else COLUMNS
    temporary = temporary_path(out, SAMPLES)
    try:
        with explain_write_errors(out.url, SAMPLES):
            with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
                for group in _row_groups(rows):
                    writer.write_table(group, ROW_GROUP_ROWS)
                    for flag in left_out:
                        left_out[flag] += int(flag_mask(group, [flag]).sum())
            size = temporary.stat().st_size
            with open(temporary, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        out.publish(temporary, SAMPLES)
    finally:
        temporary.unlink(missing_ok=True)
    return {"bytes": size, "sha256": digest}, left_out


def add_roles(parts: Iterable[pa.Table], roles: pa.Table) -> Iterator[pa.Table]:
    """Yields the rows of each shard, with the columns of roles and the shard's number added."""
    begin = 0
    for number, part in enumerate(parts):
        of_part = roles.slice(begin, len(part))
        begin += len(part)
        shard = pa.array(np.full(len(part), number, np.int32))
        columns = {name: part[name] for name in part.column_names} | {"shard": shard}
        columns |= {name: of_part[name] for name in ROLE_COLUMNS}
        yield pa.table([columns[name] for name in COLUMNS.names], COLUMNS)


def replace_columns(table: pa.Table, columns: pa.Table) -> pa.Table:
    """Returns the table with its columns replaced by the `columns` of the same names."""
    for name in columns.column_names:
        place = COLUMNS.get_field_index(name)
        table = table.set_column(place, COLUMNS.field(name), columns[name])
    return table


def _row_groups(rows: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yields the same rows in tables of ROW_GROUP_ROWS rows; the last table may be smaller."""
    left = COLUMNS.empty_table()
    for table in rows:
        left = pa.concat_tables([left, table])
        while len(left) >= ROW_GROUP_ROWS:
            yield left.slice(0, ROW_GROUP_ROWS)
            left = left.slice(ROW_GROUP_ROWS)
    if len(left):
        yield left


def _meta_from_recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns those entries of dataset.json that say how the dataset is made."""
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


def _clear_addresses(table: pa.Table) -> pa.Table:
    """Returns the table with -1 in the columns shard and offset. In a dataset with zarr only, the row
    number is a crop's address."""
    absent = np.full(len(table), -1)
    columns = {name: pa.array(absent, COLUMNS.field(name).type) for name in ("shard", "offset")}
    return replace_columns(table, pa.table(columns))


def raise_no_record_error(out: Folder, rejects: list[Reject]) -> NoReturn:
    """Writes rejects.csv and raises the error that no record can be used, with the most common reasons
    and an example of each."""
    out.write(REJECTS, rejects_csv(rejects))
    why = common_reasons_text(rejects) or "all are left out"
    raise StorageError(f"no record can be used: {why}; {out.url}/{REJECTS} lists every refusal")


def source_facts(
    sources: list[dict[str, Any]], records: splits.Records, left_out: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Returns the entries of dataset.json about the sources. `left_out`: the number of records of
    left-out patients, by source."""
    counts = source_counts(records)
    facts = []
    for source in sources:
        name = source["name"]
        crops, used = counts.get(name, (0, 0))
        unused = source["seen"] - used - left_out.get(name, 0)
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
    """Returns (number of crops, number of records) by source."""
    kinds = len(records.source_names)
    crops = np.bincount(records.source[records.crop_record], minlength=kinds).tolist()
    used = np.bincount(records.source, minlength=kinds).tolist()
    return dict(zip(records.source_names, zip(crops, used, strict=True), strict=True))


def read_records(read: Callable[[list[str]], pa.Table]) -> splits.Records:
    """Returns the records that the rows of samples.parquet belong to. `read` returns the columns with
    the given names. It is called for a few columns at a time, because the columns of ten million rows
    do not fit into a gigabyte together."""
    table = read(["source", "record"])
    sources = table["source"].unique()
    codes = pc.index_in(table["source"], sources).to_numpy().astype(np.int16)
    labels = pc.binary_join_element_wise(table["source"], table["record"], "/")
    crop_record = splits.number_texts(labels)
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
        place[crop_record],  # records are numbered in the order of their first rows
        read(["start_s"])["start_s"].to_numpy(),
        read(["waveform"])["waveform"].to_numpy(),
    )


def patient_of_crops(made: Dataset) -> pa.Array:
    """Returns SOURCE/PATIENT of each crop, null where the patient is unknown. SOURCE is the namespace
    of patient ids that patient_source() returns."""
    table = made.table(["source", "patient"])
    names = table["source"].unique()
    sources = pa.array(map(patient_source, names.to_pylist()))
    of_crops = sources.take(pc.index_in(table["source"], names).combine_chunks())
    return pc.binary_join_element_wise(of_crops, table["patient"].combine_chunks(), "/")


@cache
def _role_names() -> pa.Array:
    """Returns the names of the roles as an array. This is not a constant of the module, because pyarrow
    imports pandas to make its first array."""
    return pa.array([name or None for name in splits.ROLE_NAMES])


def assign_roles(
    records: splits.Records,
    doubtful: np.ndarray,
    plan: str,
    seed: int,
    sources: RoleSources = PAPER_SOURCES,
) -> pa.Table:
    """Returns a table of the columns pretrain, dx_role and id_role. `doubtful`: mask of the crops with
    a flag that leaves them out of pre-training."""
    roles = splits.assign_crop_roles(records, plan, seed, sources)
    roles.leave_out(doubtful)
    if plan != "paper-split" and (leaks := splits.describe_leaks(records, roles)):
        raise DatasetError(f"leakage between roles: {leaks[0]}")
    named = _role_names().take(pa.array(roles.dx)), _role_names().take(pa.array(roles.identity))
    return pa.table([roles.pretrain, *named], ROLE_COLUMNS)


def value_counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Returns how often each value except null occurs."""
    values = pc.value_counts(column.drop_null()).to_pylist()
    return dict(sorted((value["values"], value["counts"]) for value in values))


def role_counts(table: pa.Table) -> RoleFacts:
    return RoleFacts(
        pretrain=pc.sum(table["pretrain"], min_count=0).as_py(),
        dx=value_counts(table["dx_role"]),
        id=value_counts(table["id_role"]),
    )
