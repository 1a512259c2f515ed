"""Check every byte, row and role of a dataset and, given the archive, every sample.

The default checks dataset.json's fingerprint, the sha256 of tables and shards, every tar header and
JSON, DALI's index, crc32c and contents of every crop in the shards and in the zarr copy, counts,
and roles, which are drawn again and checked for leakage. `fast` checks structure and sizes without
reading samples. `sources`: each crop is prepared again from the archive and compared. A finding
names the file, the crop and the failed check; an empty list means that there is nothing wrong. The data
card is not checked, because it may be edited.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm.auto import tqdm

from ..dataset import (
    COLUMNS,
    CROP_BYTES,
    CROP_SHAPE,
    META,
    REJECTS,
    SAMPLES,
    STORE,
    Dataset,
    crc_and_waveform_hash,
    flag_mask,
    label_names,
)
from ..dataset.rejects import FLAG_REASONS, Reject, read_rejects
from ..dataset.zarr_reader import decode_chunk, index_bytes
from ..ecg.crops import CROP, HALF, MAX_UV, prepare_crop, record_crop_count
from ..ecg.pseudonyms import pseudonym, wrong_key_message
from ..ecg.record import LEADS, EcgRecord, class_row, known_patient
from ..ecg.resampling import FS_HZ
from ..io import cluster
from ..io.errors import MISSING_FILE, ChunkError, DatasetError, ReadError, one_line
from ..io.storage import prefetch
from ..io.terminal import tell
from ..sources.base import Source, dataset_patient, missing_note, read_record, read_safely
from .finishing import (
    ROLE_COLUMNS,
    assign_roles,
    read_records,
    recipe_hash,
    role_counts,
    source_counts,
)
from .leave_out import LeaveOut
from .plan import check_member_name, make_plan
from .record_index import RecordIndex
from .roles import Records, RoleSources
from .same_records import waveform_sum
from .shard import table_row
from .shards import (
    MAX_INDEX_BYTES,
    TAR_BLOCK,
    index_name,
    make_index,
    member_header,
    member_name_and_size,
)

MAX_FINDINGS = 20  # most findings that are listed for one shard, storage object or folder
RECORDS_PER_TASK = 512  # records of an archive that are compared in one task
BATCH_ROWS = 65_536  # rows of a table that are held as Python objects at the same time
CONTENT_COLUMNS = ["crc32c", "waveform", "halves", "missing_leads"]
ARCHIVE_COLUMNS = (
    "patient",
    "dx",
    "age",
    "sex",
    "fs_source_hz",
    "halves",
    "missing_leads",
    "flags",
)
INDEXED_COLUMNS = ["source", "record", "start_s", "shard", "offset", "crc32c", *ARCHIVE_COLUMNS]
TEXT = pa.large_string()
PATIENT_SCHEMA = pa.schema({"source": TEXT, "record": TEXT, "patient": TEXT})
REFUSED_SCHEMA = pa.schema({"source": TEXT, "record": TEXT, "reason": TEXT})
JSON_COLUMNS = [
    name
    for name in COLUMNS.names
    if name not in ("shard", "offset", "crc32c", "waveform", *ROLE_COLUMNS)
]
# Number of a shard, or of a storage object of the zarr copy, and its rows of samples.parquet in order
Rows = tuple[int, pa.Table]


@cluster.reuse_processes()
def verify(
    dataset: Dataset,
    sources: list[Source] | None = None,
    fast: bool = False,
    workers: int = 1,
    key: bytes | None = None,
    quiet: bool = True,
    patients: str | None = None,
    leave_out: LeaveOut | None = None,
) -> list[str]:
    try:
        _check_columns(dataset)
    except (ReadError, DatasetError) as error:
        return [str(error)]  # without a valid table, all other checks are meaningless
    findings: list[str] = []
    rejects: list[Reject] = []
    try:
        rejects = read_rejects(dataset)
    except DatasetError as error:
        findings.append(str(error))
    records = read_records(dataset.table)
    findings += _check_meta(dataset, records)
    findings += _check_table(dataset, records)
    del records  # frees gigabytes at ten million crops
    begins = np.searchsorted(dataset.column("shard"), np.arange(len(dataset.shards) + 1))
    if dataset.shards and begins[-1] != len(dataset):
        return [*findings, f"{SAMPLES}: {len(dataset) - begins[-1]} rows of no shard in {META}"]
    rows = enumerate(split_rows(dataset, COLUMNS.names, begins))
    checks = cluster.run_in_order(partial(check_shard, dataset, fast), rows, workers)
    bar = {"total": len(dataset.shards), "unit": " shards", "desc": "shards", "disable": quiet}
    for of_shard in tqdm(checks, **bar):
        findings += of_shard
    if "zarr" in dataset.facts.formats:
        findings += _check_zarr(dataset, fast, workers, quiet)
    if sources:
        findings += _compare_archive(
            dataset, sources, rejects, key, quiet, patients, workers, leave_out
        )
    return findings


def _check_columns(dataset: Dataset) -> None:
    """Raises a DatasetError if samples.parquet is not a valid table of format version 1."""
    if unknown := sorted(set(dataset.stored_columns) - set(COLUMNS.names)):
        names = ", ".join(unknown)
        raise DatasetError(f"{SAMPLES}: columns that version 1 does not have: {names}"[:200])
    for name in COLUMNS.names:  # one at a time, because all columns would take gigabytes
        dataset.table([name])
    if np.mod(dataset.column("start_s"), CROP / FS_HZ).any():
        raise DatasetError(
            f"{SAMPLES}: start_s has values that are no multiples of {CROP / FS_HZ:g} s"
        )


def split_rows(dataset: Dataset, columns: list[str], begins: np.ndarray) -> Iterator[pa.Table]:
    """Yields the rows from each number in `begins` up to the next number."""
    batches = dataset.row_batches(columns)
    held = pa.schema([COLUMNS.field(name) for name in columns]).empty_table()
    first = 0
    for begin, end in pairwise(begins.tolist()):
        while first + len(held) < end:
            held = pa.concat_tables([held, pa.table(next(batches))])
        yield held.slice(begin - first, end - begin)
        held = held.slice(end - first)
        first = end


def _check_meta(dataset: Dataset, of_records: Records) -> Iterator[str]:
    """Yields where dataset.json contradicts its own hash of the preprocessing, the rows of samples.parquet
    or the files that exist."""
    facts = dataset.facts
    if recipe_hash(facts.preprocessing) != facts.preprocessing_sha256:
        yield f"{META}: preprocessing fails its sha256"
    counts = source_counts(of_records)
    for source in facts.sources:
        records, (crops, used) = source.records, counts.pop(source.name, (0, 0))
        if (source.crops, records["used"], records["seen"]) != (
            crops,
            used,
            used + records["refused"],
        ):
            yield (
                f"{META}: counts of {source.name} differ from {SAMPLES}: {crops} crops of "
                f"{used} records"
            )
    yield from (f"{META}: {name} is missing in sources" for name in counts)
    if role_counts(dataset.table(ROLE_COLUMNS)) != facts.roles:
        yield f"{META}: counts per role differ from the rows"
    expected = {
        name
        for shard in dataset.shards
        for name in (f"shards/{shard.name}", index_name(shard.name))
    }
    strays = [name for name in dataset.root.names("shards") if name not in expected]
    if "zarr" not in facts.formats and dataset.root.exists(f"{STORE}/zarr.json"):
        strays.append(STORE)
    yield from _first_findings([f"{name}: not a part of the dataset" for name in strays], "shards/")


def _check_table(dataset: Dataset, records: Records) -> Iterator[str]:
    facts = dataset.facts
    sources = RoleSources.from_facts(facts)
    doubtful = flag_mask(dataset.table(["flags"]), sources.leave_out)
    try:
        again = assign_roles(records, doubtful, facts.plan, facts.seed, sources)
    except DatasetError as error:
        yield f"{SAMPLES}: {error}"
    else:
        for column in ROLE_COLUMNS:
            if wrong := _count_unequal(again[column], dataset.table([column])[column]):
                yield f"{SAMPLES}: {column} of {wrong} crops differs from what seed {facts.seed} gives"
    for part in dataset.row_batches(["dx", "labels"]):
        labels = [class_row(tuple(dx)) for dx in part["dx"].to_pylist()]
        if labels != part["labels"].to_pylist():
            yield f"{SAMPLES}: labels do not match the dx codes"
            return


def _count_unequal(values: pa.ChunkedArray, others: pa.ChunkedArray) -> int:
    """Returns the number of values that differ; null equals null."""
    differ = pc.fill_null(pc.not_equal(values, others), False)
    return int(
        pc.sum(pc.or_(differ, pc.xor(values.is_null(), others.is_null())), min_count=0).as_py()
    )


def check_shard(dataset: Dataset, fast: bool, rows_of: Rows) -> list[str]:
    index, rows = rows_of
    shard = dataset.shards[index]
    name = f"shards/{shard.name}"
    findings: list[str] = []
    try:
        if len(rows) != shard.crops:
            findings.append(f"{name}: {len(rows)} rows, {shard.crops} crops in {META}")
        if fast:
            findings += _check_size(dataset, name, shard.bytes)
            return [*findings, *_check_size(dataset, index_name(shard.name))]
        data = dataset.root.view(name, shard.bytes)
        if len(data) != shard.bytes:
            return [f"{name}: {len(data)} bytes, {shard.bytes} expected (truncated or replaced)"]
        if hashlib.sha256(data).hexdigest() != shard.sha256:
            findings.append(f"{name}: fails its sha256")
        findings += _check_crops(name, data, rows)
        findings += _check_index(dataset, index_name(shard.name), data, rows)
        if not findings:
            findings += _check_members(name, data, rows)
    except ReadError as error:
        findings.append(f"{name}: {error.reason}")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        # A forged file can have the right sha256 and still be no valid tar
        findings.append(one_line(f"{name}: an invalid tar member: {error}"))
    return _first_findings(findings, name)


def _check_crops(name: str, data: memoryview, rows: pa.Table) -> Iterator[str]:
    for number, row in enumerate(rows.select(["offset", *CONTENT_COLUMNS]).to_pylist()):
        piece = bytes(data[row["offset"] : row["offset"] + CROP_BYTES])
        crop = np.frombuffer(piece.ljust(CROP_BYTES, b"\0"), "<i2").reshape(CROP_SHAPE)
        for finding in _check_crop(crop, row):
            yield f"{name}: crop {number} at byte {row['offset']} {finding}"


def _first_findings(findings: Iterable[str], what: str) -> list[str]:
    """Returns the first findings about a file or folder, and a line with the number of all others. A
    damaged disk can cause thousands."""
    rest = iter(findings)
    listed = list(islice(rest, MAX_FINDINGS))
    if more := sum(1 for _ in rest):
        listed.append(f"{what}: {more:,} more findings like these are not listed")
    return listed


def _check_size(dataset: Dataset, name: str, expected: int | None = None) -> Iterator[str]:
    try:
        size = dataset.root.size(name)
    except FileNotFoundError:
        yield f"{name}: missing file"
    else:
        if expected not in (None, size):
            yield f"{name}: {size} bytes, {expected} expected (truncated or replaced)"


def _check_crop(crop: np.ndarray, row: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each contradiction between a crop's samples and its row. If the crc32c is wrong,
    that is the only message."""
    crc, hashed = crc_and_waveform_hash(crop)
    if crc != row["crc32c"]:
        yield "fails its crc32c"
        return
    if hashed != row["waveform"]:
        yield f"has a different waveform hash in {SAMPLES}"
    if int(crop.min()) < -MAX_UV:
        yield "contains -32768, which is not allowed"
    if row["halves"] == 1 and crop[:, HALF:].any():
        yield "should be zero in its second half"
    if any(crop[i].any() for i, lead in enumerate(LEADS) if lead in row["missing_leads"]):
        yield "should be zero in its missing leads"


def _check_index(dataset: Dataset, name: str, data: memoryview, rows: pa.Table) -> list[str]:
    try:
        text = dataset.root.read(name, MAX_INDEX_BYTES).decode()
        expected = make_index(data, rows["offset"].to_pylist())
    except (ReadError, ValueError) as error:
        return [f"{name}: {error}"]
    return [] if text == expected else [f"{name}: names, offsets or sizes differ from the shard"]


def _check_members(name: str, data: memoryview, rows: pa.Table) -> Iterator[str]:
    """Yields a message for each contradiction between a tar and its rows: a wrong header or offset, a JSON
    that differs from its row, or anything but the tar's end after the last crop."""
    end = 0
    for number, row in enumerate(rows.to_pylist()):
        key = f"{row['source']}-{row['record']}-{round(row['start_s'] * FS_HZ) // CROP:03d}"
        place = f"{name}: crop {number} ({key})"
        start, text = (
            end + TAR_BLOCK,
            end + TAR_BLOCK + CROP_BYTES + -CROP_BYTES % TAR_BLOCK + TAR_BLOCK,
        )
        _, length = member_name_and_size(data, text)
        headers = bytes(data[end:start]), bytes(data[text - TAR_BLOCK : text])
        if row["offset"] != start or headers != (
            member_header(f"{key}.ecg", CROP_BYTES),
            member_header(f"{key}.json", length),
        ):
            yield f"{place}: another crop or another kind of tar member is in its place"
            return
        facts = json.loads(bytes(data[text : text + length]))
        if differing := _differing_entries(facts, row):
            yield f"{place}: JSON and {SAMPLES} differ in {', '.join(differing)}"
        end = text + length + -length % TAR_BLOCK
    if bytes(data[end:]) != bytes(2 * TAR_BLOCK):
        yield f"{name}: the end of the tar file does not follow its last crop"


def _differing_entries(facts: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Returns the names of the entries in which a crop's JSON differs from the crop's row."""
    expected = {column: row[column] for column in JSON_COLUMNS}
    expected["label_names"] = label_names(row["labels"])
    expected["crc32c"] = f"{row['crc32c']:08x}"
    expected["waveform"] = f"{row['waveform']:016x}"
    if facts.get("age") is not None:
        facts["age"] = float(np.float32(facts["age"]))  # samples.parquet stores ages as float32
    names = facts.keys() | expected.keys()
    return sorted(name for name in names if facts.get(name) != expected.get(name))


def _check_zarr(dataset: Dataset, fast: bool, workers: int, quiet: bool) -> list[str]:
    try:
        chunks = dataset.chunks
    except DatasetError as error:
        return [str(error)]
    if chunks.meta != chunks.layout:
        return [f"{STORE}/zarr.json: has entries that data_tools does not write"]
    blocks = range(-(-len(dataset) // chunks.block))
    expected = {f"{STORE}/zarr.json", *map(chunks.object_name, blocks)}
    files = set(dataset.root.names(STORE))
    findings = _first_findings(
        [f"{name}: not a part of the dataset" for name in sorted(files - expected)], STORE
    )
    findings += _first_findings(
        [f"{name}: missing file" for name in sorted(expected - files)], STORE
    )
    begins = np.minimum(np.arange(len(blocks) + 1) * chunks.block, len(dataset))
    rows = (
        (i, piece)
        for i, piece in enumerate(split_rows(dataset, CONTENT_COLUMNS, begins))
        if chunks.object_name(i) in files
    )
    checks = cluster.run_in_order(partial(check_zarr_object, dataset, fast), rows, workers)
    for of_object in tqdm(checks, total=len(blocks), unit=" files", desc="zarr", disable=quiet):
        findings += of_object
    return findings


def check_zarr_object(dataset: Dataset, fast: bool, rows_of: Rows) -> list[str]:
    """Returns what is wrong with a storage object of the zarr copy: with its index, or with its chunks, of
    which each holds one crop."""
    number, rows = rows_of
    chunks, root, name = dataset.chunks, dataset.root, dataset.chunks.object_name(number)
    try:
        index, size = chunks.index(number).tolist(), root.size(name)
        # The chunks must follow each other from the first byte to the index
        spans = sorted(index[: len(rows)])
        ends = [0, *(start + length for start, length in spans)]
        if [start for start, _ in spans] + [size - index_bytes(chunks.block)] != ends:
            return [f"{name}: {size} bytes do not match its index (replaced, or a crop is missing)"]
        if fast:
            return []
        data = root.view(name, size)
    except FileNotFoundError:
        return [f"{name}: missing file"]
    except (ChunkError, ReadError) as error:
        return [f"{name}: {error}"]
    crop, findings = np.empty(CROP_SHAPE, "<i2"), list[str]()
    for i, ((start, length), row) in enumerate(zip(index, rows.to_pylist(), strict=False)):
        place = f"{name}: crop {number * chunks.block + i}"
        try:
            decode_chunk(bytes(data[start : start + length]), length, crop)
            findings += [f"{place} {finding}" for finding in _check_crop(crop, row)]
        except ChunkError as error:
            findings.append(f"{place}: {error}")
    return _first_findings(findings, name)


class _RecordComparison(NamedTuple):
    """The result of comparing a record of an archive with the dataset."""

    row: int = -1  # the record's first row in the dataset; -1 if it was compared with no row
    findings: tuple[str, ...] = ()
    missing: str = ""  # the record's name if one of its files is missing


@dataclass(frozen=True)
class _ArchiveComparison:
    """Compares records of an archive with the records of a dataset. Can be sent to worker processes."""

    dataset: Dataset
    rows: RecordIndex  # index of samples.parquet
    refused: RecordIndex  # index of the refusals in rejects.csv
    named: RecordIndex  # index of the patients that the user's table names
    leave_out: LeaveOut | None
    key: bytes | None  # key of pseudonyms

    def compare_chunk(self, task: tuple[Source, list[str]]) -> list[_RecordComparison]:
        archive, keys = task
        compare = partial(self.compare_record, archive)
        remote = archive.root.remote or self.dataset.root.remote
        return list(prefetch(compare, keys) if remote else map(compare, keys))

    def compare_record(self, archive: Source, item: str) -> _RecordComparison:
        record = read_safely(partial(read_record, archive), item)
        if not isinstance(record, EcgRecord):
            lacks_file = record.reason == MISSING_FILE
            return _RecordComparison(missing=archive.name_for(item) if lacks_file else "")
        if named := self.named.find(record.source, record.name):
            record = replace(record, patient=named[0]["patient"])
        key = None if archive.pseudonyms else self.key
        name = pseudonym(key, "r", record.source, record.name)
        with suppress(ReadError):
            patient = dataset_patient(key, record.source, record.patient)
            if self.leave_out and self.leave_out.listed_name(record.source, patient):
                return _RecordComparison()
        if rows := self.rows.find(record.source, name):
            return _RecordComparison(
                rows[0]["row"], tuple(_compare_record(self.dataset, key, record, name, rows))
            )
        # Another record of the dataset has the same name in a tar, as a-b/c and a/b-c have
        if self.rows.has_member(record.source, name):
            return _RecordComparison()
        says = f"is in the archive, but neither in {SAMPLES} nor in {REJECTS}"
        if refused := self.refused.find(record.source, name):
            if not _can_be_used(record):
                return _RecordComparison()
            reason = refused[0]["reason"]
            says = f"was refused ({reason}), but can be read now: make a new dataset from it and this one"
        return _RecordComparison(findings=(f"{record.source}/{name} {says}",))


def _compare_archive(
    dataset: Dataset,
    sources: list[Source],
    rejects: list[Reject],
    key: bytes | None,
    quiet: bool,
    patients: str | None,
    workers: int,
    leave_out: LeaveOut | None,
) -> list[str]:
    """Prepares every record of the archive again and compares samples and columns with the dataset, bit
    for bit. Returns the findings."""
    if other := wrong_key_message(dataset.facts.pseudonyms, key):
        return [other]
    schema = pa.schema([COLUMNS.field(name) for name in INDEXED_COLUMNS])
    lines = [reject[:3] for reject in rejects if reject[2] not in FLAG_REASONS]
    refused = pa.Table.from_pylist(
        [dict(zip(REFUSED_SCHEMA.names, line, strict=True)) for line in lines], REFUSED_SCHEMA
    )
    named = (
        _read_patients(sources, patients, workers, quiet)
        if patients
        else PATIENT_SCHEMA.empty_table()
    )
    with tempfile.TemporaryDirectory(prefix="omnilead-") as place:
        comparison = _ArchiveComparison(
            dataset,
            RecordIndex.write(Path(place, "rows"), schema, dataset.row_batches(INDEXED_COLUMNS)),
            RecordIndex.write(
                Path(place, "refused"), REFUSED_SCHEMA, refused.to_batches(BATCH_ROWS)
            ),
            RecordIndex.write(Path(place, "named"), PATIENT_SCHEMA, named.to_batches(BATCH_ROWS)),
            leave_out,
            key,
        )
        # True at the first row of each record that is found in the archive
        seen = np.zeros(len(dataset), bool)
        findings = _archive_findings(comparison, sources, seen, workers, quiet)
        listed = _first_findings(findings, "--archive")
        if not seen.any():  # the archive has none of the dataset's records
            return _absence_finding(comparison.rows, seen, "all ", "is this the archive?")
        return listed


def _archive_findings(
    comparison: _ArchiveComparison,
    sources: list[Source],
    seen: np.ndarray,
    workers: int,
    quiet: bool,
) -> Iterator[str]:
    for archive in sources:
        missing = []
        compared = cluster.run_in_order(comparison.compare_chunk, _key_chunks(archive), workers)
        with tqdm(unit=" records", desc="archive", disable=quiet) as bar:
            for records in compared:
                bar.update(len(records))
                for record in records:
                    if record.missing:
                        missing.append(record.missing)
                    # an earlier record of this name was compared with these rows
                    if record.row >= 0 and seen[record.row]:
                        continue
                    if record.row >= 0:
                        seen[record.row] = True
                    yield from record.findings
        if missing:
            root = archive.root
            tell(f"note: {missing_note(root.url, missing, root.private)}")
    yield from _absence_finding(comparison.rows, seen, "", "pass all SRC of the dataset")


def _read_patients(sources: list[Source], url: str, workers: int, quiet: bool) -> pa.Table:
    """Returns source, record and patient of each record whose patient the table at `url` names."""
    plan = make_plan(sources, 0, workers, quiet=quiet, patients=url)
    known = plan.patients.is_valid()
    labels = plan.labels.column().filter(known)
    columns = [
        pc.replace_substring_regex(labels, "/.*", ""),
        pc.replace_substring_regex(labels, "^[^/]*/", ""),
        plan.patients.filter(known).cast(TEXT),
    ]
    return pa.table(columns, PATIENT_SCHEMA)


def _key_chunks(archive: Source) -> Iterator[tuple[Source, list[str]]]:
    keys = iter(archive.keys())
    while chunk := list(islice(keys, RECORDS_PER_TASK)):
        yield archive, chunk


def _can_be_used(record: EcgRecord) -> bool:
    try:
        check_member_name(record.source, record.name, record_crop_count(record))
        known_patient(record.patient)
        waveform_sum(record)
        return True
    except ReadError:
        return False


def _absence_finding(rows: RecordIndex, seen: np.ndarray, how_many: str, mend: str) -> list[str]:
    first_rows = rows.first_rows()
    absent = first_rows[~seen[first_rows]]
    if not len(absent):
        return []
    example = rows.row(absent[0])
    lack = f"{len(absent):,} records are" if len(absent) > 1 else "1 record is"
    return [
        f"{how_many}{lack} not in the archive, for example {example['source']}/{example['record']}: {mend}"
    ]


def _compare_record(
    dataset: Dataset,
    key: bytes | None,
    record: EcgRecord,
    name: str,
    rows: list[dict[str, Any]],
) -> Iterator[str]:
    """Yields where a record of the archive differs from its rows in the dataset."""
    parts = {round(row["start_s"] * FS_HZ) // CROP: row for row in rows}
    crop = np.empty(CROP_SHAPE, "<i2")
    try:
        count = record_crop_count(record)
    except ReadError:
        count = 0
    for part in sorted({*range(count), *parts}):
        place = f"{record.source}/{name} at {part * CROP / FS_HZ:g} s"
        try:
            again = table_row(record.source, name, record, prepare_crop(record, part, crop), key)
        except ReadError as error:
            if part in parts:
                yield f"{place}: the archive has no such crop: {error}"
            continue
        if part not in parts:
            yield f"{place}: a crop of the archive is not in {SAMPLES}"
            continue
        row = parts[part]
        try:
            address = row["row"], row["shard"], row["offset"], row["crc32c"]
            same = np.array_equal(dataset.read_at(*address), crop)
        except DatasetError as error:
            yield f"{place}: {error}"
        else:
            if not same:
                yield f"{place}: the archive has other samples"
        for column in ("dx", "missing_leads", "flags"):
            again[column] = list(again[column])
        # A dataset converted from an earlier format lacks the flag `zeros`
        if "zeros" not in row["flags"]:
            again["flags"] = [flag for flag in again["flags"] if flag != "zeros"]
        if again["age"] is not None:
            again["age"] = float(np.float32(again["age"]))  # samples.parquet stores ages as float32
        if differing := [column for column in ARCHIVE_COLUMNS if again[column] != row[column]]:
            hint = ""
            if "patient" in differing and not again["patient"]:
                hint = (
                    ", which it does not name: if `shard` was given --patients, give them here, too"
                )
            yield f"{place}: the archive differs in {', '.join(differing)}{hint}"
