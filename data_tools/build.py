"""From archives to a finished dataset: plan, shards in parallel, tables, and dataset.json last.

A shard is one task and depends on nothing but its list of crops. Beside a finished shard lies its *part*: the rows of
samples.parquet, its rejects, a key to its content, and the part's own sha256. Run again after any interruption, parts that
hold and whose key is the right one are kept and the rest is made; so a run may be killed at any moment, as often as you
like, and ends with the same bytes.
"""

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from data_tools import cluster, pseudonyms
from data_tools.cli import keep_freed_memory
from data_tools.dataset import COLUMNS, CROP_SHAPE, META, Dataset, waveform
from data_tools.errors import DataError, DatasetError, ReadError, StorageError
from data_tools.finish import finish, recipe_hash
from data_tools.plan import Reject, ShardPlan, make_plan
from data_tools.prepare import Crop, prepare_crop
from data_tools.record import EcgRecord, class_row
from data_tools.sources.base import Source, carefully, located, record_stem
from data_tools.splits import PAPERS, RoleSources
from data_tools.storage import Folder, ahead, folder_of_dataset
from data_tools.tar import MAX_INDEX, TarWriter, index_name, part_name, shard_name

FORMATS = ("tar", "zarr", "both")
TOLD = ("seed", "plan", "format", "id_share", "role_sources", "pseudonyms")  # of the recipe, what dataset.json says in words
DIGEST_BYTES = 32  # at the end of a part
RECORDS_HELD = 8  # long records whose crops meet in one shard are read once


@dataclass(frozen=True)
class ShardOptions:
    out: str
    plan: str = "paper"
    seed: int = 0
    role_sources: RoleSources = PAPERS
    format: str = "tar"
    workers: int = 1
    cluster: str | None = None
    pseudonym_key: bytes | None = None
    extend: str | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Task:
    index: int
    out: Folder
    sources: tuple[Source, ...]
    crops: list[tuple[int, str, str, int]]  # archive, key, label, crop of the record
    content: str
    pseudonym_key: bytes | None


def shard(sources: list[Source], settings: ShardOptions) -> Dataset:
    """Make the dataset, or finish it. -> the finished dataset."""
    out = folder_of_dataset(settings.out)
    if not out.remote and os.path.exists(out.url) and not os.path.isdir(out.url):
        raise DataError(f"--out {settings.out}: is a file: name a folder")
    base = Dataset.open(settings.extend) if settings.extend else None
    mark = _key_mark(settings.pseudonym_key)
    if base and base.meta["pseudonyms"] != mark:
        raise DatasetError(f"{settings.extend} has other pseudonyms: give the KEYFILE it was made with")
    _ours_or_empty(out)
    known = _labels(base) if base else set()
    with nullcontext() if out.exists(META) else _alone(out):
        plan = make_plan(
            sources, settings.seed, known, settings.pseudonym_key, settings.workers, settings.cluster, settings.quiet
        )
        first = len(base.shards) if base else 0
        planned = [plan.shard(i)[1:] for i in range(plan.shards)]
        contents = [seen + (mark or "") for _, seen in planned]  # a part holds names as they are shown
        recipe = {
            "contents": [identity for identity, _ in planned],
            "base": base.fingerprint if base else None,
            "plan": settings.plan,
            "seed": settings.seed,
            "format": settings.format,
            "pseudonyms": mark,
        } | ({} if settings.plan == "all" else settings.role_sources.told())
        if out.exists(META):
            return _same(Dataset.open(settings.out), recipe)
        parts = _build(plan, contents, out, first, settings)
        return finish(plan, parts, out, base, recipe, settings)


def _ours_or_empty(out: Folder) -> None:
    """A folder with other things in it is somebody's: stray shards and tables are removed from a dataset's."""
    if out.exists(META) or out.exists(".build"):
        return
    with suppress(StorageError):  # nothing is there
        if found := out.children():
            raise DataError(f"{out.url} is not empty ({found[0]}, ...) and no dataset: choose another --out")


def _labels(dataset: Dataset) -> set[str]:
    table = dataset.table(["source", "record"])
    return {f"{s}/{r}" for s, r in zip(table["source"].to_pylist(), table["record"].to_pylist(), strict=True)}


@contextmanager
def _alone(out: Folder) -> Iterator[None]:
    """One run at a time writes to a folder, and begins without the half-written files of killed ones."""
    scratch = out.scratch()
    if out.remote:  # the scratch folder is shared by this user's runs
        for path in filter(_is_left_over, scratch.iterdir()):
            path.unlink(missing_ok=True)
        yield
        return
    with open(scratch.parent / "lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StorageError(f"{out.url}: another run is writing there: wait for it, or choose another --out") from None
        for path in scratch.iterdir():
            path.unlink()
        yield


def _is_left_over(path: Path) -> bool:
    try:
        os.kill(int(path.name.split(".")[-2]), 0)  # is the process that wrote it alive?
    except ProcessLookupError:
        return True
    except (OSError, ValueError, IndexError):
        pass
    return False


def _key_mark(key: bytes | None) -> str | None:
    return pseudonyms.fingerprint(key) if key else None


def _same(finished: Dataset, recipe: dict[str, Any]) -> Dataset:
    if finished.meta["recipe"] != recipe_hash(recipe):
        was = finished.meta | {"format": "both" if len(finished.meta["formats"]) == 2 else finished.meta["formats"][0]}
        told = [f"{name} was {was.get(name)}, not {recipe.get(name)}" for name in TOLD if was.get(name) != recipe.get(name)]
        other = ", ".join(told) or "of other input or settings"
        raise DatasetError(f"{finished.root.url} is finished, and {other}: choose another --out")
    if finished.root.exists(".build"):  # killed between its last two steps
        finished.root.remove(".build")
    return finished


def _build(plan: ShardPlan, contents: list[str], out: Folder, first: int, settings: ShardOptions) -> list[pa.Table]:
    """Every shard that does not stand yet; -> all parts, in shard order."""
    done = [i for i, content in enumerate(contents) if _stands(out, first + i, content)]
    missing = sorted(set(range(plan.shards)) - set(done))
    tasks = (Task(first + i, out, plan.sources, plan.shard(i).crops, contents[i], settings.pseudonym_key) for i in missing)
    with tqdm(total=len(plan.order), unit=" crops", desc="shards", disable=settings.quiet) as bar:
        bar.update(sum(len(plan.shard(i).crops) for i in done))
        for planned in cluster.run(build_shard, tasks, settings.workers, settings.cluster):
            bar.update(planned)
    return [read_part(out, shard_name(first + i)) for i in range(plan.shards)]


def read_part(out: Folder, name: str) -> pa.Table:
    """A ReadError if it is not as it was written."""
    data = memoryview(out.read(part_name(name), 2**30))
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ReadError("fails its sha256", f"{out.url}/{part_name(name)}: run the same command again to make it anew")
    return pq.read_table(pa.BufferReader(body))


def part_facts(part: pa.Table) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(part.schema.metadata[b"omnilead"])
    return facts


def _stands(out: Folder, index: int, content: str) -> bool:
    """A part appears after its shard, and both only when complete: a part with the right key vouches for both."""
    name = shard_name(index)
    try:
        facts = part_facts(read_part(out, name))
        addresses = hashlib.sha256(out.read(index_name(name), MAX_INDEX)).hexdigest()
        return (facts["content"], facts["index"]) == (content, addresses) and out.size(f"shards/{name}") == facts["bytes"]
    except (ReadError, FileNotFoundError, KeyError):
        return False


def build_shard(task: Task) -> int:
    """One shard: read, prepare and write its crops, then publish tar, index and part in this order. -> crops planned."""
    keep_freed_memory()
    name = shard_name(task.index)
    temporary = task.out.scratch() / f"{name}.{os.getpid()}.{threading.get_ident()}"
    rows: list[dict[str, Any]] = []
    rejects: list[Reject] = []
    out = np.empty(CROP_SHAPE, "<i2")
    try:
        with open(temporary, "wb", buffering=1 << 20) as file:
            tar = TarWriter(file)
            for path, label, part, record in _records(task):
                filed, _, plain = label.partition("/")
                shown = pseudonyms.shown(task.pseudonym_key, "r", filed, plain)
                try:
                    if isinstance(record, ReadError):
                        raise record
                    if part == 0:
                        rejects += [(filed, shown, reason, detail) for reason, detail in record.warnings]
                    crop = prepare_crop(record, part, out)
                    row = row_of(filed, shown, record, crop, task.pseudonym_key)
                except ReadError as error:
                    rejects.append((filed, shown, error.reason, located(path, error.detail)))
                    continue
                rejects += [(filed, shown, *flag) for flag in _findings(crop)]
                row["crc32c"], row["waveform"] = waveform(out)
                text = json.dumps(row | {"crc32c": f"{row['crc32c']:08x}", "waveform": f"{row['waveform']:016x}"})
                row["offset"] = tar.add(f"{filed}-{shown}-{part:03d}", out.data.cast("B"), text.encode())
                rows.append(row)
            index = tar.close()
        task.out.publish(temporary, f"shards/{name}")
    except OSError as error:
        raise StorageError(f"writing shards/{name} in {task.out.url}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    if task.pseudonym_key:
        rejects = [(source, record, reason, "") for source, record, reason, _ in rejects]
    facts = {"content": task.content, "name": name, "crops": len(rows), "bytes": tar.size, "sha256": tar.sha256.hexdigest()}
    facts["index"] = hashlib.sha256(index.encode()).hexdigest()
    _write_small(task.out, index_name(name), index.encode())
    _write_small(task.out, part_name(name), _part(task.index, rows, facts | {"rejects": rejects}))
    return len(task.crops)


def _write_small(out: Folder, name: str, data: bytes) -> None:
    try:
        out.write(name, data)
    except OSError as error:
        raise StorageError(f"writing {name} in {out.url}: {error.strerror or error}") from None


def _part(index: int, rows: list[dict[str, Any]], facts: dict[str, Any]) -> bytes:
    absent = {"shard": index, "pretrain": False, "dx_role": None, "id_role": None}  # roles need all records: see finish.py
    columns = {
        field.name: pa.array([absent.get(field.name, row.get(field.name)) for row in rows], field.type) for field in COLUMNS
    }
    table = pa.table(columns, schema=COLUMNS.with_metadata({"omnilead": json.dumps(facts)}))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data = bytes(sink.getvalue())
    return data + hashlib.sha256(data).digest()


def row_of(source: str, name: str, record: EcgRecord, crop: Crop, key: bytes | None) -> dict[str, Any]:
    patient = pseudonyms.shown(key, "p", source, record_stem(record.patient)) if record.patient else None
    return {
        "source": source,
        "record": name,
        "patient": patient,
        "start_s": crop.start_s,
        "halves": crop.halves,
        "missing_leads": crop.missing,
        "flags": crop.flags,
        "dx": record.dx,
        "labels": class_row(record.dx),
        "age": record.age,
        "sex": record.sex,
        "fs_source_hz": float(record.fs_hz),
    }


def _findings(crop: Crop) -> Iterator[tuple[str, str]]:
    """Usable, but worth a line in rejects.csv."""
    at = f"at {crop.start_s:g} s"
    if crop.missing:
        yield "lead not measured", f"{' '.join(crop.missing)} {at}"
    flat = [flag.removeprefix("flat:") for flag in crop.flags if flag.startswith("flat:")]
    if flat:
        yield "flat lead", f"{' '.join(flat)} {at}"
    for flag in crop.flags:
        if not flag.startswith("flat:"):
            yield flag, at


def _records(task: Task) -> Iterator[tuple[str, str, int, EcgRecord | ReadError]]:
    """Each crop's record, in shard order; from far away, many requests are on their way at once."""
    if not any(source.root.remote for source in task.sources):
        held: dict[str, EcgRecord | ReadError] = {}
        for archive, key, label, part in task.crops:
            if label not in held:
                if len(held) >= RECORDS_HELD:
                    held.clear()
                held[label] = carefully(task.sources[archive].read, key)
            yield key, label, part, held[label]
        return

    def read(crop: tuple[int, str, str, int]) -> tuple[str, str, int, EcgRecord | ReadError]:
        archive, key, label, part = crop
        return key, label, part, carefully(task.sources[archive].read, key)

    yield from ahead(read, task.crops)
