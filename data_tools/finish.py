"""The end of a build: roles over all records, samples.parquet, the zarr twin, rejects.csv, and dataset.json last of all."""

import csv
import hashlib
import io
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_tools import pseudonyms, splits, zarr_writer
from data_tools.dataset import COLUMNS, FORMAT_VERSION, META, REJECTS, SAMPLES, STORE, Dataset, fingerprint
from data_tools.errors import DatasetError, ReadError, StorageError, one_line
from data_tools.plan import Reject, ShardPlan
from data_tools.prepare import SPEC, SPEC_HASH
from data_tools.storage import Folder
from data_tools.tables import as_csv, unquoted

ROW_GROUP = 65_536
_SHARD_FILE = re.compile(r"shards/(\d{5,})\.(?:tar|idx)", re.ASCII)


def recipe_hash(recipe: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def finish(
    plan: ShardPlan, parts: list[pa.Table], out: Folder, base: Dataset | None, recipe: dict[str, Any], settings: Any
) -> Dataset:
    facts = [json.loads(part.schema.metadata.pop(b"omnilead")) for part in parts]
    table = pa.concat_tables([part.cast(COLUMNS) for part in parts])
    rejects = [tuple(reject) for fact in facts for reject in fact["rejects"]] + _shown(plan.rejects, settings.pseudonym_key)
    shards = [{name: fact[name] for name in ("name", "crops", "bytes", "sha256")} for fact in facts]
    sources = _source_facts(plan, table)
    if base:
        _take_shards(base, out)
        sources = _merge_sources(base.meta["sources"], sources, _refused_again(base, table, rejects))
        table, shards = pa.concat_tables([base.table().cast(COLUMNS), table]), base.shards + shards
        rejects += read_rejects(base)
    if not len(table):
        reasons = sorted({reject[2] for reject in rejects})
        raise StorageError(f"no usable crop in any record ({', '.join(reasons)[:200]}): nothing to write")
    table = assign_roles(table, settings.plan, settings.seed, settings.role_sources)
    if settings.format != "tar":
        zarr_writer.write(table, shards, out, settings.workers, settings.cluster, settings.quiet)
    if settings.format == "zarr":
        out.remove("shards")
        shards = []
        gone = pa.array(np.full(len(table), -1))
        table = table.set_column(0, COLUMNS[0], gone.cast(pa.int32())).set_column(1, COLUMNS[1], gone)
    _remove_strays(out, shards, settings.format)
    samples, refused = _parquet(table), as_csv([("source", "record", "reason", "detail"), *sorted(set(rejects))]).encode()
    meta: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "fs_hz": SPEC["fs_hz"],
        "leads": SPEC["leads"],
        "uv_per_lsb": SPEC["uv_per_lsb"],
        "crop_samples": SPEC["crop_samples"],
        "preprocessing": SPEC,
        "preprocessing_sha256": SPEC_HASH,
        "seed": settings.seed,
        "plan": settings.plan,
        **{str(key): recipe[key] for key in ("id_share", "role_sources") if key in recipe},
        "recipe": recipe_hash(recipe),
        "pseudonyms": recipe["pseudonyms"],
        "crops": len(table),
        "sources": sources,
        "roles": role_counts(table),
        "formats": {"tar": ["tar"], "zarr": ["zarr"], "both": ["tar", "zarr"]}[settings.format],
        "samples": {"bytes": len(samples), "sha256": hashlib.sha256(samples).hexdigest()},
        "rejects": {"bytes": len(refused), "sha256": hashlib.sha256(refused).hexdigest()},
        "shards": shards,
    }
    try:
        out.write(SAMPLES, samples)
        out.write(REJECTS, refused)
        out.write(META, (json.dumps(meta | {"fingerprint": fingerprint(meta)}, indent=1) + "\n").encode())
    except OSError as error:
        raise StorageError(f"writing the tables in {out.url}: {error.strerror or error}") from None
    out.remove(".build")
    return Dataset.open(settings.out)


def _remove_strays(out: Folder, shards: list[dict[str, Any]], wanted: str) -> None:
    """What a killed run with other sources or settings left behind."""
    ours = {shard["name"].removesuffix(".tar") for shard in shards}
    for name in list(out.names("shards")):
        if (found := _SHARD_FILE.fullmatch(name)) and found[1] not in ours:
            out.remove(name)
    if wanted == "tar" and out.exists(f"{STORE}/zarr.json"):
        out.remove(STORE)


def records_of(table: pa.Table) -> splits.Records:
    """The records behind rows, as `splits` wants them."""
    source = pc.dictionary_encode(table["source"].combine_chunks())
    codes = source.indices.to_numpy().astype(np.int64)
    name = pc.dictionary_encode(table["record"].combine_chunks())
    pair = codes * len(name.dictionary) + name.indices.to_numpy()
    _, first, crop_record = np.unique(pair, return_index=True, return_inverse=True)
    taken = pa.array(first)
    return splits.Records(
        codes[first].astype(np.int16),
        tuple(source.dictionary.to_pylist()),
        table["record"].combine_chunks().take(taken),
        table["patient"].combine_chunks().take(taken),
        crop_record.astype(np.int64),
        table["start_s"].to_numpy(),
        table["waveform"].to_numpy(),
    )


def assign_roles(table: pa.Table, plan: str, seed: int, whose: splits.RoleSources = splits.PAPERS) -> pa.Table:
    records = records_of(table)
    roles = splits.assign(records, plan, seed, whose)
    if plan != "paper-split" and (found := splits.leaks(records, roles)):
        raise DatasetError(f"a leak between roles: {found[0]}")
    return (
        table.set_column(table.column_names.index("pretrain"), COLUMNS.field("pretrain"), pa.array(roles.pretrain))
        .set_column(table.column_names.index("dx_role"), COLUMNS.field("dx_role"), _role_names(roles.dx))
        .set_column(table.column_names.index("id_role"), COLUMNS.field("id_role"), _role_names(roles.identity))
    )


def _role_names(roles: np.ndarray) -> pa.Array:
    names = pa.array([name or None for name in splits.ROLE_NAMES])
    return names.take(pa.array(roles))


def role_counts(table: pa.Table) -> dict[str, Any]:
    def count(column: str) -> dict[str, int]:
        values = pc.value_counts(table[column].drop_null()).to_pylist()
        return dict(sorted((value["values"], value["counts"]) for value in values))

    return {"pretrain": int(pc.sum(table["pretrain"]).as_py() or 0), "dx": count("dx_role"), "id": count("id_role")}


def _source_facts(plan: ShardPlan, table: pa.Table) -> list[dict[str, Any]]:
    licences = {source.source_of(key): source.licence for source, key in _examples(plan)}
    facts = []
    for name, seen in plan.seen.items():
        rows = table.filter(pc.equal(table["source"], name))
        used = pc.count_distinct(rows["record"]).as_py() if len(rows) else 0
        facts.append(
            {
                "name": name,
                "licence": licences.get(name, plan.sources[0].licence),
                "records": {"seen": seen, "used": used, "refused": seen - used},
                "crops": len(rows),
                "dropped_s": round(plan.dropped_s.get(name, 0.0), 3),
            }
        )
    return facts


def _examples(plan: ShardPlan) -> list[tuple[Any, str]]:
    """A key of each archive and database."""
    labels = pc.dictionary_encode(pc.list_element(pc.split_pattern(plan.labels, "/", max_splits=1), 0))
    firsts = np.unique(labels.indices.to_numpy(), return_index=True)[1]
    return [(plan.sources[plan.archive[i]], plan.keys[int(i)].as_py()) for i in firsts]


def _refused_again(base: Dataset, table: pa.Table, rejects: list[Reject]) -> Counter[str]:
    """By source: records that the base refused and that this run met again, whatever came of them now."""

    def records(rows: pa.Table) -> set[tuple[str, str]]:
        return set(zip(rows["source"].to_pylist(), rows["record"].to_pylist(), strict=True))

    refused = {line[:2] for line in read_rejects(base)} - records(base.table(["source", "record"]))
    return Counter(source for source, _ in refused & ({line[:2] for line in rejects} | records(table)))


def _merge_sources(old: list[dict[str, Any]], new: list[dict[str, Any]], twice: Counter[str]) -> list[dict[str, Any]]:
    merged = {source["name"]: source for source in old}
    for source in new:
        before = merged.get(source["name"])
        if before:
            records = {name: before["records"][name] + source["records"][name] for name in source["records"]}
            records = {name: count - twice[source["name"]] * (name != "used") for name, count in records.items()}
            source = source | {
                "records": records,
                "crops": before["crops"] + source["crops"],
                "dropped_s": round(before["dropped_s"] + source["dropped_s"], 3),
            }
        merged[source["name"]] = source
    return [merged[name] for name in sorted(merged)]


def _take_shards(base: Dataset, out: Folder) -> None:
    """The base's shards under the same names, checked first: a hard link where the disk allows it, else a copy."""
    if base.root.remote or out.remote:
        raise StorageError("--extend works between local datasets: copy one of them first")
    if base.meta["preprocessing_sha256"] != SPEC_HASH or not base.shards:
        raise DatasetError(f"{base.root.url}: its crops were prepared otherwise, or are zarr only: build anew from all sources")
    Path(out.url, "shards").mkdir(parents=True, exist_ok=True)
    for shard in base.shards:
        for name in (shard["name"], shard["name"].removesuffix(".tar") + ".idx"):
            here, there = Path(base.root.url, "shards", name), Path(out.url, "shards", name)
            if name == shard["name"]:
                with open(here, "rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                        raise DatasetError(f"{here}: fails its sha256: restore it before extending")
            there.unlink(missing_ok=True)
            try:
                os.link(here, there)
            except OSError:
                shutil.copyfile(here, there)


def _shown(rejects: list[Reject], key: bytes | None) -> list[Reject]:
    if not key:
        return rejects
    return [(source, pseudonyms.shown(key, "r", source, name), reason, "") for source, name, reason, _ in rejects]


def read_rejects(base: Dataset) -> list[Reject]:
    told, file = base.meta.get("rejects"), f"{base.root.url}/{REJECTS}"
    try:
        data = base.root.read(REJECTS, told["bytes"] if told else 2**31)
        if told and hashlib.sha256(data).hexdigest() != told["sha256"]:
            raise DatasetError(f"{file}: fails its sha256: restore the file")
        _, *rows = csv.reader(io.StringIO(data.decode()))
        return [(source, record, reason, detail) for source, record, reason, detail in (map(unquoted, row) for row in rows)]
    except (ReadError, ValueError, csv.Error) as error:
        raise DatasetError(one_line(f"{file}: {error}: restore the file")) from None


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP)
    return bytes(sink.getvalue())
