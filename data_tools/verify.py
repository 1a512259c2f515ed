"""Is a dataset what it says? Every byte, every row, every role; with the archive at hand, every sample to the LSB.

Always: dataset.json's fingerprint, sha256 of tables and shards, crc32c, address and range of every crop, the DALI index,
counts, roles drawn again and checked for leaks, form and sizes of the zarr twin. `source`: each crop is prepared anew from
the archive and compared.
`deep`: tar headers and JSON against the rows, flags and waveform hashes derived again, padding zero, the zarr twin decoded.
Findings are sentences that name file, crop and check; an empty list means that everything holds.
"""

import hashlib
import io
import json
import mmap
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from data_tools import cluster, pseudonyms, quality
from data_tools.build import row_of
from data_tools.dataset import COLUMNS, CROP_BYTES, CROP_SHAPE, META, REJECTS, SAMPLES, STORE, Dataset, waveform
from data_tools.errors import DatasetError, ReadError, one_line
from data_tools.finish import assign_roles, read_rejects, recipe_hash, role_counts
from data_tools.labels import class_row
from data_tools.plan import Reject
from data_tools.prepare import CROP, FS_HZ, HALF, MAX_UV, SPEC, crop_count, prepare_crop
from data_tools.record import LEADS, EcgRecord
from data_tools.shards import index_of, member_header
from data_tools.sources.base import Source, carefully
from data_tools.splits import RoleSources

MOST = 20  # findings of one shard; a broken disk has thousands
ROLES = ("pretrain", "dx_role", "id_role")
FLAGS = (  # in rejects.csv, of records that were used
    *("lead not measured", "flat lead", "saturated", "large", "einthoven"),
    *("checksum differs", "first value differs", "diagnosis without a code", "not in ptbxl_database.csv"),
)
JSON_COLUMNS = [name for name in COLUMNS.names if name not in ("shard", "offset", "crc32c", "waveform", *ROLES)]


@dataclass(frozen=True)
class Check:
    """One shard's worth of work: the rows are its own, in order."""

    dataset: Dataset
    index: int
    rows: pa.Table
    deep: bool


def verify(
    dataset: Dataset,
    sources: list[Source] | None = None,
    deep: bool = False,
    workers: int = 1,
    key: bytes | None = None,
    quiet: bool = True,
) -> list[str]:
    data = dataset.root.read(SAMPLES, dataset.meta["samples"]["bytes"])
    if hashlib.sha256(data).hexdigest() != dataset.meta["samples"]["sha256"]:
        return [f"{SAMPLES}: fails its sha256"]  # nothing below can be trusted
    try:
        table = dataset.table()
    except DatasetError as error:
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
    checks = (Check(dataset, i, table.slice(starts[i], starts[i + 1] - starts[i]), deep) for i in range(len(dataset.shards)))
    with tqdm(total=len(table), unit=" crops", desc="shards", disable=quiet) as bar:
        for crops, findings in cluster.run(check_shard, checks, workers):
            found += findings
            bar.update(crops)
    if "zarr" in dataset.meta["formats"]:
        found += _store(dataset, table, deep or not dataset.shards, quiet)
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
    ours = {name for shard in dataset.shards for name in (shard["name"], shard["name"].removesuffix(".tar") + ".idx")}
    strays = [name for name in dataset.root.names("shards") if name.removeprefix("shards/") not in ours]
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


def check_shard(check: Check) -> tuple[int, list[str]]:
    shard, rows = check.dataset.shards[check.index], check.rows
    name = f"shards/{shard['name']}"
    found: list[str] = []
    try:
        with _mapped(check.dataset, name, shard["bytes"]) as data:
            if len(data) != shard["bytes"]:
                return len(rows), [f"{name}: {len(data)} bytes, {shard['bytes']} expected (truncated or replaced)"]
            if hashlib.sha256(data).hexdigest() != shard["sha256"]:
                found.append(f"{name}: fails its sha256")
            if len(rows) != shard["crops"]:
                found.append(f"{name}: {len(rows)} rows, {shard['crops']} crops in dataset.json")
            found += _crops(name, data, rows)
            found += _index(check.dataset, name, data, rows)
            if check.deep and not found:
                try:
                    found += _deep(name, data, rows)
                except (tarfile.TarError, ValueError, TypeError, AttributeError) as error:  # sums of nonsense hold
                    found.append(one_line(f"{name}: a member is of another form: {error}"))
    except ReadError as error:
        found.append(f"{name}: {error.reason}")
    return len(rows), found[:MOST]


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
    offsets, checksums = rows["offset"].to_pylist(), rows["crc32c"].to_pylist()
    for row, (offset, crc) in enumerate(zip(offsets, checksums, strict=True)):
        piece = bytes(data[offset : offset + CROP_BYTES])
        if google_crc32c.value(piece) != crc:
            yield f"{name}: crop {row} at byte {offset} fails its crc32c"
        elif int(np.frombuffer(piece, "<i2").min()) < -MAX_UV:
            yield f"{name}: crop {row} holds -32768, which no crop may"


def _index(dataset: Dataset, name: str, data: memoryview, rows: pa.Table) -> list[str]:
    name = name.removesuffix(".tar") + ".idx"
    try:
        text, wanted = dataset.root.read(name, 2**26).decode(), index_of(data, rows["offset"].to_pylist())
    except (ReadError, ValueError) as error:
        return [f"{name}: {error}"]
    return [] if text == wanted else [f"{name}: names, addresses or sizes in it are not the shard's"]


def _deep(name: str, data: memoryview, rows: pa.Table) -> Iterator[str]:
    """Member by member, as a stranger's tar reader would; then everything that can be derived from the samples."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        members = list(tar)
    if len(members) != 2 * len(rows):
        yield f"{name}: {len(members)} members for {len(rows)} crops"
        return
    for number, row in enumerate(rows.to_pylist()):
        ecg, text = members[2 * number : 2 * number + 2]
        key = ecg.name.removesuffix(".ecg")
        at = f"{name}: crop {number} ({key})"
        headers = bytes(data[ecg.offset : ecg.offset + 512]), bytes(data[text.offset : text.offset + 512])
        if headers != (member_header(f"{key}.ecg", CROP_BYTES), member_header(f"{key}.json", text.size)):
            yield f"{at}: tar headers are not of the format's form"
            continue
        if ecg.offset_data != row["offset"] or not key.startswith(f"{row['source']}-{row['record']}-"):
            yield f"{at}: stands where {row['source']}/{row['record']} should"
        told = json.loads(bytes(data[text.offset_data : text.offset_data + text.size]))
        expected = {column: row[column] for column in JSON_COLUMNS}
        expected |= {"crc32c": f"{row['crc32c']:08x}", "waveform": f"{row['waveform']:016x}"}
        if told.get("age") is not None:
            told["age"] = float(np.float32(told["age"]))  # as the table holds it
        differing = sorted(name for name in told.keys() | expected.keys() if told.get(name) != expected.get(name))
        if differing:
            yield f"{at}: JSON and {SAMPLES} differ in {', '.join(differing)}"
        crop = np.frombuffer(data, "<i2", CROP_BYTES // 2, row["offset"]).reshape(CROP_SHAPE)
        yield from (f"{at}: {finding}" for finding in _derived(crop, row))


def _derived(crop: np.ndarray, row: dict[str, Any]) -> Iterator[str]:
    if waveform(np.ascontiguousarray(crop)) != (row["crc32c"], row["waveform"]):
        yield "waveform hash differs"
    if row["halves"] == 1 and crop[:, HALF:].any():
        yield "its second half should be zero"
    body = crop[:, : HALF * row["halves"]]
    missing = np.isin(LEADS, row["missing_leads"])
    if body[missing].any():
        yield "a missing lead is not zero"
    flags = quality.flags_of(body, missing.tolist())
    if set(flags) != set(row["flags"]) - {"saturated"}:
        yield f"flags are {flags}, {row['flags']} in {SAMPLES}"


def _store(dataset: Dataset, table: pa.Table, deep: bool, quiet: bool) -> list[str]:
    """Form and sizes. `deep`: every chunk decoded; zarr checks its own crc32c of the compressed bytes, ours is of the crop."""
    try:
        store = dataset.store
    except DatasetError as error:
        return [str(error)]
    for what, seen, due in (
        ("shape", store.shape, (len(table), *CROP_SHAPE)),
        ("type", str(store.dtype), "int16"),
        ("chunks", store.chunks, (1, *CROP_SHAPE)),
        ("shards", store.shards and store.shards[1:], CROP_SHAPE),
        ("attributes", dict(store.attrs), {}),
        ("dimensions", store.metadata.dimension_names, ("crop", "lead", "sample")),
    ):
        if seen != due:
            return [f"{STORE}: {what} {seen}, {due} expected"[:200]]
    found = list(islice(_objects(dataset, store.shards[0]), MOST))
    if found or not deep:
        return found
    checksums = table["crc32c"].to_pylist()
    for start in tqdm(range(0, len(table), 64), unit=" chunks", desc="zarr", disable=quiet):
        try:
            block = np.ascontiguousarray(store[start : start + 64], "<i2")
        except Exception as error:  # whatever a damaged chunk makes of a codec
            found.append(f"{STORE}: crops {start} to {start + 63}: {type(error).__name__}: {error}"[:200])
            continue
        wrong = [start + i for i, crop in enumerate(block) if google_crc32c.value(crop.tobytes()) != checksums[start + i]]
        found += [f"{STORE}: crop {row} fails its crc32c" for row in wrong]
    return found[:MOST]


def _objects(dataset: Dataset, most: int) -> Iterator[str]:
    """Is every storage object, of up to `most` crops, there, and as long as the index at its end says?"""
    tail = 16 * most + 4
    for block, start in enumerate(range(0, len(dataset), most)):
        name = f"{STORE}/c/{block}/0/0"
        try:
            size = dataset.root.size(name)
            index = dataset.root.read_range(name, max(0, size - tail), tail)
        except FileNotFoundError:
            yield f"{name}: missing file"
            continue
        if len(index) != tail or google_crc32c.value(index[:-4]) != int.from_bytes(index[-4:], "little"):
            yield f"{name}: {size} bytes, the last of which are no index (truncated or replaced)"
            continue
        ends = np.frombuffer(index[:-4], "<u8").reshape(most, 2)[: len(dataset) - start].sum(axis=1)
        if int(ends.max()) != size - tail:
            yield f"{name}: {size} bytes, its index says another number, or lacks a crop"


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
        if google_crc32c.value(crop.tobytes()) != row["crc32c"] or not np.array_equal(dataset.read(parts[part]), crop):
            yield f"{at}: the archive has other samples"
        stored = {column: pa.array([value], COLUMNS.field(column).type)[0].as_py() for column, value in told.items()}
        if others := [column for column in ("patient", "dx", "age", "sex", "fs_source_hz") if stored[column] != row[column]]:
            yield f"{at}: the archive says otherwise in {', '.join(others)}"
