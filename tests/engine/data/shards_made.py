"""Small datasets of noise, and helpers to damage and read them."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omnilead.data_tools.dataset import (
    COLUMNS,
    CROP_BYTES,
    CROP_SHAPE,
    FORMAT_MINOR,
    Dataset,
    ShardFacts,
    fingerprint,
)
from omnilead.data_tools.ecg.crops import SPEC, SPEC_HASH
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sharding import shards as shard_writers
from omnilead.data_tools.sharding.shards import TarWriter


def make_dataset(root, shards, crops=4, seed=0, zarr=False, distinct=None):
    """Shards of white noise. With `distinct`, later shards are hard links to the first ones."""
    rng, rows, entries = np.random.default_rng(seed), [], []
    (root / "shards").mkdir(parents=True)
    for s in range(shards):
        name, same = f"{s:05d}.tar", s % (distinct or shards)
        if same != s:
            os.link(root / "shards" / f"{same:05d}.tar", root / "shards" / name)
            entries.append(entries[same] | {"name": name})
            rows += [row | {"shard": s} for row in rows[same * crops : (same + 1) * crops]]
            continue
        with open(root / "shards" / name, "wb") as file:
            tar = TarWriter(file)
            for c in range(crops):
                data = rng.bytes(CROP_BYTES)
                row = {"shard": s, "offset": tar.add(f"{s}-{c}", data, b"{}")}
                rows.append(row | {"crc32c": google_crc32c.value(data)})
            tar.close()
        facts = {"crops": crops, "bytes": tar.size, "sha256": tar.sha256.hexdigest()}
        entries.append(facts | {"name": name})
    table = pa.Table.from_pylist([row | {"halves": 2, "missing_leads": []} for row in rows])
    table = table.cast(pa.schema([COLUMNS.field(name) for name in table.column_names]))
    pq.write_table(table, root / "samples.parquet")
    if zarr:
        shard_writers.write_zarr(
            table, [ShardFacts(**entry) for entry in entries], folder(root), 1, None, True
        )
    samples = (root / "samples.parquet").read_bytes()
    meta = {
        "format_version": 1,
        "format_minor": FORMAT_MINOR,
        **{name: SPEC[name] for name in ("fs_hz", "leads", "uv_per_lsb", "crop_samples")},
        "preprocessing": SPEC,
        "preprocessing_sha256": SPEC_HASH,
        "recipe": "",
        "seed": 0,
        "plan": "all",
        "roles": {},
        "sources": [],
        "crops": len(rows),
        "formats": ["tar", "zarr"] if zarr else ["tar"],
        "shards": entries,
        "samples": {"bytes": len(samples), "sha256": hashlib.sha256(samples).hexdigest()},
        "rejects": {"bytes": 0, "sha256": hashlib.sha256().hexdigest()},
    }
    document = json.dumps(meta | {"fingerprint": fingerprint(meta)})
    folder(root).write("dataset.json", document.encode())
    return Dataset.open(str(root))


def crops_of(dataset, rows):
    return np.stack([dataset.read(int(row)) for row in rows])


@dataclass
class Batch:
    dataset: np.ndarray
    row: np.ndarray


def batches(*rows):
    return [Batch(np.zeros(len(r), np.int16), np.array(r)) for r in rows]


def read(reader, rows, datasets=None):
    out = np.full((len(rows), *CROP_SHAPE), 7, np.int16)
    if datasets is None:
        datasets = np.zeros(len(rows), np.int16)
    return out, reader.read(Batch(datasets, np.array(rows)), out)


def tar_path(dataset, row):
    shard, offset, _ = dataset.addresses
    return Path(dataset.root.url, "shards", dataset.shards[shard[row]].name), int(offset[row])


def take_all(ahead, yielded, dataset):
    for request, crops, _ in ahead:
        yielded.append(request.row.tolist())
        assert np.array_equal(crops, crops_of(dataset, request.row))
