"""Is a dataset what it says? Every byte, every row, every role; with the archive at hand, every sample to the LSB.

By default: dataset.json's fingerprint, sha256 of tables and shards, every tar header and JSON, the DALI index, crc32c and
content of every crop in the shards and in the zarr twin, counts, roles drawn again and checked for leaks.
`fast`: structure and sizes; the samples are not read. `sources`: each crop is prepared again from the archive and compared.
Findings are sentences that name file, crop and check; an empty list means that everything holds.
"""

import hashlib
import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from data_tools import cluster, pseudonyms
from data_tools.build import row_of
from data_tools.dataset import COLUMNS, CROP_BYTES, CROP_SHAPE, META, REJECTS, SAMPLES, STORE, Dataset, waveform
from data_tools.errors import ChunkError, DatasetError, ReadError, one_line
from data_tools.finish import assign_roles, read_rejects, recipe_hash, role_counts
from data_tools.plan import Reject
from data_tools.prepare import CROP, FS_HZ, HALF, MAX_UV, SPEC, crop_count, prepare_crop
from data_tools.record import LEADS, EcgRecord, class_row
from data_tools.sources.base import Source, carefully
from data_tools.splits import RoleSources
from data_tools.tar import BLOCK, MAX_INDEX, index_name, index_of, member, member_header
from data_tools.zarr_reader import decode, index_bytes

MOST = 20  # findings of one shard; a broken disk has thousands
ROLES = ("pretrain", "dx_role", "id_role")
FLAGS = (  # in rejects.csv, of records that were used
    *("lead not measured", "flat lead", "saturated", "large", "einthoven"),
    *("checksum differs", "first value differs", "diagnosis without a code", "not in ptbxl_database.csv"),
)
SAID_OF_SAMPLES = ["crc32c", "waveform", "halves", "missing_leads"]
SAID_BY_ARCHIVE = ("patient", "dx", "age", "sex", "fs_source_hz", "halves", "missing_leads", "flags")
JSON_COLUMNS = [name for name in COLUMNS.names if name not in ("shard", "offset", "crc32c", "waveform", *ROLES)]


@dataclass(frozen=True)
class Check:
    """One shard or one storage object of the zarr twin; the rows are its own, in order."""

    dataset: Dataset
    index: int
    rows: pa.Table
    fast: bool


def verify(
    dataset: Dataset,
    sources: list[Source] | None = None,
    fast: bool = False,
    workers: int = 1,
    key: bytes | None = None,
    quiet: bool = True,
) -> list[str]:
    try:
        data = dataset.root.read(SAMPLES, dataset.meta["samples"]["bytes"])
        if hashlib.sha256(data).hexdigest() != dataset.meta["samples"]["sha256"]:
            return [f"{SAMPLES}: fails its sha256"]  # nothing below can be trusted
        table = dataset.table()
    except (ReadError, DatasetError) as error:
        return [str(error)]
    if others := set(pq.read_schema(pa.BufferReader(data)).names) - set(COLUMNS.names):
        return [f"{SAMPLES}: has columns that version 1 has not: {', '.join(sorted(others))}"[:200]]
    if np.mod(table["start_s"].to_numpy(), CROP / FS_HZ).any():
        return [f"{SAMPLES}: start_s is not always a multiple of {CROP / FS_HZ:g} s"]
    found = [*_facts(dataset, table), *_tables(dataset, table)]
    rejects: list[Reject] = []
    try:
        rejects = read_rejects(dataset)
    except DatasetError as error:
        found.append(str(error))
    starts = np.searchsorted(table["shard"].to_numpy(), np.arange(len(dataset.shards) + 1))
    if len(table) != dataset.meta["crops"] or (dataset.shards and starts[-1] != len(table)):
        return [*found, f"{SAMPLES}: {len(table)} rows, {dataset.meta['crops']} crops in dataset.json"]
    checks = (Check(dataset, i, table.slice(starts[i], starts[i + 1] - starts[i]), fast) for i in range(len(dataset.shards)))
    for findings in tqdm(
        cluster.run(check_shard, checks, workers), total=len(dataset.shards), unit=" shards", desc="shards", disable=quiet
    ):
        found += findings
    if "zarr" in dataset.meta["formats"]:
        found += _store(dataset, table, fast, workers, quiet)
    if sources:
        found += _against(dataset, table, sources, rejects, key, quiet)
    return found


def _facts(dataset: Dataset, table: pa.Table) -> Iterator[str]:
    """What dataset.json says, beside what version 1 is, what the rows say and what is there."""
    meta = dataset.meta
    for name in ("fs_hz", "leads", "uv_per_lsb", "crop_samples"):
        if meta[name] != SPEC[name]:
            yield f"{META}: {name} {meta[name]}, {SPEC[name]} expected"[:200]
    if recipe_hash(meta["preprocessing"]) != meta["preprocessing_sha256"]:
        yield f"{META}: preprocessing fails its sha256"
    groups = table.group_by("source").aggregate([("record", "count"), ("record", "count_distinct")]).to_pylist()
    counts = {group["source"]: (group["record_count"], group["record_count_distinct"]) for group in groups}
    for source in meta["sources"]:
        records, (crops, used) = source["records"], counts.pop(source["name"], (0, 0))
        if (source["crops"], records["used"], records["seen"]) != (crops, used, used + records["refused"]):
            yield f"{META}: counts of {source['name']} are not those of {SAMPLES}: {crops} crops of {used} records"
    yield from (f"{META}: sources lack {name}" for name in counts)
    ours = {name for shard in dataset.shards for name in (f"shards/{shard['name']}", index_name(shard["name"]))}
    strays = [name for name in dataset.root.names("shards") if name not in ours]
    if "zarr" not in meta["formats"] and dataset.root.exists(f"{STORE}/zarr.json"):
        strays.append(STORE)
    yield from (f"{name}: not a part of the dataset" for name in strays[:MOST])


def _tables(dataset: Dataset, table: pa.Table) -> list[str]:
    found = []
    again: pa.Table | None = None
    try:
        again = assign_roles(table, dataset.meta["plan"], dataset.meta["seed"], RoleSources.of(dataset.meta))
    except DatasetError as error:
        found.append(f"{SAMPLES}: {error}")
    for column in ROLES:
        if again is not None and not again[column].equals(table[column]):
            wrong = sum(a != b for a, b in zip(again[column].to_pylist(), table[column].to_pylist(), strict=True))
            found.append(f"{SAMPLES}: {column} of {wrong} crops is not what seed {dataset.meta['seed']} draws")
    if role_counts(table) != dataset.meta["roles"]:
        found.append("dataset.json: counts per role differ from the rows")
    labels = [class_row(tuple(dx)) for dx in table["dx"].to_pylist()]
    if labels != table["labels"].to_pylist():
        found.append(f"{SAMPLES}: labels are not those of the dx codes")
    return found


def check_shard(check: Check) -> list[str]:
    shard, rows = check.dataset.shards[check.index], check.rows
    name = f"shards/{shard['name']}"
    found: list[str] = []
    try:
        if len(rows) != shard["crops"]:
            found.append(f"{name}: {len(rows)} rows, {shard['crops']} crops in {META}")
        if check.fast:
            return [*found, *_sizes(check.dataset, name, shard["bytes"]), *_sizes(check.dataset, index_name(shard["name"]))]
        with _mapped(check.dataset, name, shard["bytes"]) as data:
            if len(data) != shard["bytes"]:
                return [f"{name}: {len(data)} bytes, {shard['bytes']} expected (truncated or replaced)"]
            if hashlib.sha256(data).hexdigest() != shard["sha256"]:
                found.append(f"{name}: fails its sha256")
            found += _crops(name, data, rows)
            found += _index(check.dataset, index_name(shard["name"]), data, rows)
            if not found:
                try:
                    found += _members(name, data, rows)
                except (ValueError, TypeError, AttributeError, RecursionError) as error:  # sums of nonsense hold
                    found.append(one_line(f"{name}: a member is of another form: {error}"))
    except ReadError as error:
        found.append(f"{name}: {error.reason}")
    return found[:MOST]


def _sizes(dataset: Dataset, name: str, due: int | None = None) -> Iterator[str]:
    try:
        size = dataset.root.size(name)
    except FileNotFoundError:
        yield f"{name}: missing file"
    else:
        if due is not None and size != due:
            yield f"{name}: {size} bytes, {due} expected (truncated or replaced)"


@contextmanager
def _mapped(dataset: Dataset, name: str, size: int) -> Iterator[Any]:
    if dataset.root.remote:
        yield memoryview(dataset.root.read(name, size))
        return
    try:
        with (
            open(f"{dataset.root.url}/{name}", "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
            memoryview(mapped) as view,
        ):
            yield view
    except FileNotFoundError:
        raise ReadError("missing file") from None
    except ValueError:
        raise ReadError("empty file") from None


def _crops(name: str, data: memoryview, rows: pa.Table) -> Iterator[str]:
    for number, row in enumerate(rows.select(["offset", *SAID_OF_SAMPLES]).to_pylist()):
        piece = bytes(data[row["offset"] : row["offset"] + CROP_BYTES])
        crop = np.frombuffer(piece.ljust(CROP_BYTES, b"\0"), "<i2").reshape(CROP_SHAPE)
        yield from (f"{name}: crop {number} at byte {row['offset']} {finding}" for finding in _content(crop, row))


def _content(crop: np.ndarray, row: dict[str, Any]) -> Iterator[str]:
    """What the table says of a crop, beside its samples."""
    crc, hashed = waveform(crop)
    if crc != row["crc32c"]:
        yield "fails its crc32c"
        return
    if hashed != row["waveform"]:
        yield f"has another waveform hash than in {SAMPLES}"
    if int(crop.min()) < -MAX_UV:
        yield "holds -32768, which no crop may"
    if row["halves"] == 1 and crop[:, HALF:].any():
        yield "should be zero in its second half"
    if any(crop[i].any() for i, lead in enumerate(LEADS) if lead in row["missing_leads"]):
        yield "should be zero in its missing leads"


def _index(dataset: Dataset, name: str, data: memoryview, rows: pa.Table) -> list[str]:
    try:
        text, wanted = dataset.root.read(name, MAX_INDEX).decode(), index_of(data, rows["offset"].to_pylist())
    except (ReadError, ValueError) as error:
        return [f"{name}: {error}"]
    return [] if text == wanted else [f"{name}: names, addresses or sizes in it are not the shard's"]


def _members(name: str, data: memoryview, rows: pa.Table) -> Iterator[str]:
    """Member by member to the end of the file: headers of the format's form, and JSON that says what the row says."""
    end = 0
    for number, row in enumerate(rows.to_pylist()):
        key = f"{row['source']}-{row['record']}-{round(row['start_s'] * FS_HZ) // CROP:03d}"
        at = f"{name}: crop {number} ({key})"
        start, facts = end + BLOCK, end + BLOCK + CROP_BYTES + -CROP_BYTES % BLOCK + BLOCK
        _, length = member(data, facts)
        headers = bytes(data[end:start]), bytes(data[facts - BLOCK : facts])
        if row["offset"] != start or headers != (member_header(f"{key}.ecg", CROP_BYTES), member_header(f"{key}.json", length)):
            yield f"{at}: another crop or another kind of tar member stands where it should"
            return
        told = json.loads(bytes(data[facts : facts + length]))
        expected = {column: row[column] for column in JSON_COLUMNS}
        expected |= {"crc32c": f"{row['crc32c']:08x}", "waveform": f"{row['waveform']:016x}"}
        if told.get("age") is not None:
            told["age"] = float(np.float32(told["age"]))  # as the table holds it
        differing = sorted(name for name in told.keys() | expected.keys() if told.get(name) != expected.get(name))
        if differing:
            yield f"{at}: JSON and {SAMPLES} differ in {', '.join(differing)}"
        end = facts + length + -length % BLOCK
    if bytes(data[end:]) != bytes(2 * BLOCK):
        yield f"{name}: the end of the tar file does not follow its last crop"


def _store(dataset: Dataset, table: pa.Table, fast: bool, workers: int, quiet: bool) -> list[str]:
    try:
        chunks = dataset.chunks
    except DatasetError as error:
        return [str(error)]
    if chunks.meta != chunks.layout:
        return [f"{STORE}/zarr.json: has more in it than data_tools writes"]
    blocks = range(-(-len(table) // chunks.block))
    ours = {f"{STORE}/zarr.json", *map(chunks.name, blocks)}
    said = table.select(SAID_OF_SAMPLES)
    there = set(dataset.root.names(STORE))
    found = [f"{name}: not a part of the dataset" for name in sorted(there - ours)[:MOST]]
    found += [f"{name}: missing file" for name in sorted(ours - there)[:MOST]]
    checks = (Check(dataset, i, said.slice(i * chunks.block, chunks.block), fast) for i in blocks if chunks.name(i) in there)
    for findings in tqdm(
        cluster.run(check_object, checks, workers), total=len(blocks), unit=" files", desc="zarr", disable=quiet
    ):
        found += findings
    return found


def check_object(check: Check) -> list[str]:
    """A storage object of the zarr twin: its index, and the chunks, each of which is a crop."""
    chunks, root, count = check.dataset.chunks, check.dataset.root, len(check.rows)
    name = chunks.name(check.index)
    try:
        index, size = chunks.index(check.index).tolist(), root.size(name)
        spans = sorted(index[:count])  # one after the other, from the first byte to the index
        ends = [0, *(start + length for start, length in spans)]
        if [start for start, _ in spans] + [size - index_bytes(chunks.block)] != ends:
            return [f"{name}: {size} bytes, which are not those that its index names (replaced, or lacks a crop)"]
        if check.fast:
            return []
        with _mapped(check.dataset, name, size) as data:
            return list(islice(_chunks(name, data, index, check), MOST))
    except FileNotFoundError:
        return [f"{name}: missing file"]
    except (ChunkError, ReadError) as error:
        return [f"{name}: {error}"]


def _chunks(name: str, data: memoryview, index: list[list[int]], check: Check) -> Iterator[str]:
    crop, first = np.empty(CROP_SHAPE, "<i2"), check.index * check.dataset.chunks.block
    for number, row in enumerate(check.rows.select(SAID_OF_SAMPLES).to_pylist()):
        start, length = index[number]
        try:
            decode(bytes(data[start : start + length]), length, crop)
            yield from (f"{name}: crop {first + number} {finding}" for finding in _content(crop, row))
        except ChunkError as error:
            yield f"{name}: crop {first + number}: {error}"


def _against(
    dataset: Dataset, table: pa.Table, sources: list[Source], rejects: list[Reject], key: bytes | None, quiet: bool
) -> list[str]:
    """The archive read again: every crop of every record that it holds must be the dataset's, bit for bit, as must what is
    said of it."""
    if key and not dataset.meta["pseudonyms"]:
        return ["the dataset's names are no pseudonyms: leave out --pseudonymize"]
    if dataset.meta["pseudonyms"] != (pseudonyms.fingerprint(key) if key else None):
        return ["the dataset's names are pseudonyms: --pseudonymize with the same KEYFILE is needed to compare"]
    rows: dict[tuple[str, str], dict[int, int]] = {}
    columns = (table[name].to_pylist() for name in ("source", "record", "start_s"))
    for row, (filed, name, start_s) in enumerate(zip(*columns, strict=True)):
        rows.setdefault((filed, name), {})[round(start_s * FS_HZ) // CROP] = row
    known = {(filed, name) for filed, name, reason, _ in rejects if reason not in FLAGS} | rows.keys()
    found: list[str] = []
    for source in sources:
        for item in tqdm(source.keys(), unit=" records", desc="archive", disable=quiet):
            record = carefully(source.read, item)
            if isinstance(record, ReadError):
                continue
            name = pseudonyms.shown(key, "r", record.source, record.name)
            if parts := rows.pop((record.source, name), None):
                found += _differing(dataset, table, record, name, parts, key)
            elif (record.source, name) not in known:
                found.append(f"{record.source}/{name} is in the archive, and neither in {SAMPLES} nor in {REJECTS}")
    if rows:
        filed, name = next(iter(rows))
        found.append(f"{len(rows)} records are not in the archive, for example {filed}/{name}: were all its sources given?")
    return found[:MOST]


def _differing(
    dataset: Dataset, table: pa.Table, record: EcgRecord, name: str, parts: dict[int, int], key: bytes | None
) -> Iterator[str]:
    """One record beside its rows, {crop: row}: samples, and what is said of them."""
    crop = np.empty(CROP_SHAPE, "<i2")
    try:
        count = crop_count(record.signal.shape[1], record.fs_hz)
    except ReadError:
        count = 0
    for part in sorted({*range(count), *parts}):
        at = f"{record.source}/{name} at {part * CROP / FS_HZ:g} s"
        try:
            told = row_of(record.source, name, record, prepare_crop(record, part, crop), key)
        except ReadError as error:
            if part in parts:
                yield f"{at}: the archive has no such crop: {error}"
            continue
        if part not in parts:
            yield f"{at}: a crop of the archive that is not in {SAMPLES}"
            continue
        row = table.slice(parts[part], 1).to_pylist()[0]
        if waveform(crop)[0] != row["crc32c"] or not np.array_equal(dataset.read(parts[part]), crop):
            yield f"{at}: the archive has other samples"
        stored = {column: pa.array([value], COLUMNS.field(column).type)[0].as_py() for column, value in told.items()}
        if others := [column for column in SAID_BY_ARCHIVE if stored[column] != row[column]]:
            yield f"{at}: the archive says otherwise in {', '.join(others)}"
