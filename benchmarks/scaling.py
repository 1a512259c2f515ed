"""Ten million crops: how long until a rank has its first batch, and with how much memory. And how well an order shuffles.

The dataset's tables are whole; its 9,766 shards are sparse files of zeros with the checksums of zeros, so that reading,
checking and augmenting are real while the disk holds 1.2 TB of nothing.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import Case
from data_tools.dataset import COLUMNS, CROP_BYTES, SHARD_CROPS, Dataset, fingerprint

MEMBERS = 512 + 120_320 + 512 + 512  # of a crop in a tar: two headers, two bodies


def prepare(work: Path, crops: int) -> Path:
    """A dataset of `crops` crops whose samples are zeros."""
    root = work / "huge"
    (root / "shards").mkdir(parents=True)
    shards = -(-crops // SHARD_CROPS)
    facts = []
    for i in range(shards):
        count = min(SHARD_CROPS, crops - i * SHARD_CROPS)
        with open(root / "shards" / f"{i:05d}.tar", "wb") as file:
            file.truncate(count * MEMBERS + 1024)
        facts.append({"name": f"{i:05d}.tar", "crops": count, "bytes": count * MEMBERS + 1024, "sha256": "0" * 64})
    with pq.ParquetWriter(root / "samples.parquet", COLUMNS, compression="zstd") as writer:
        for start in range(0, crops, 1 << 20):
            writer.write_table(rows(np.arange(start, min(start + (1 << 20), crops))), row_group_size=65_536)
    data = (root / "samples.parquet").read_bytes()
    meta = {"format_version": 1, "crops": crops, "formats": ["tar"], "shards": facts, "plan": "all", "roles": {}}
    meta["samples"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (root / "dataset.json").write_text(json.dumps(meta | {"fingerprint": fingerprint(meta)}))
    return root


def rows(numbers: np.ndarray) -> pa.Table:
    """As `data_tools shard` writes them; names and patients are of realistic length."""
    count = len(numbers)
    names = pa.array([f"JS{i:08d}" for i in numbers])
    given: dict[str, Any] = {
        "shard": numbers // SHARD_CROPS,
        "offset": numbers % SHARD_CROPS * MEMBERS + 512,
        "crc32c": np.full(count, google_crc32c.value(bytes(CROP_BYTES))),
        "waveform": numbers,
        "source": pa.array(["ningbo"]).take(pa.array(np.zeros(count, np.int64))),
        "record": names,
        "patient": names,
        "start_s": np.zeros(count),
        "halves": np.where(numbers % 20, 2, 1),
        "pretrain": numbers % 10 > 0,
        "age": np.full(count, 60.0),
        "fs_source_hz": np.full(count, 500.0),
    }
    columns = [
        pa.array(given[field.name]).cast(field.type) if field.name in given else pa.nulls(count, field.type)
        for field in COLUMNS
    ]
    return pa.table(columns, schema=COLUMNS)


def cases(dataset: Path) -> dict[str, Case]:
    return {"open to first batch: one rank of 8, batch 512": (first_batch, (dataset,))}


def first_batch(dataset: Path) -> float:
    """Units are starts: per_s is 1 / the seconds from nothing to a batch."""
    import torch

    from engine.pipelines.loader import Loader, LoaderConfig

    torch.set_num_threads(1)
    opened = Dataset.open(str(dataset))
    loader = Loader(LoaderConfig(backend="torch"), (opened,), torch.device("cpu"), world=8, pretrain=True, halves=2)
    next(iter(loader))
    loader.close()
    return 1.0


def shuffle_quality(dataset: Path) -> dict[str, dict[str, float]]:
    from engine.pipelines.order import Order, Rows, quality

    taken = Rows.of(Dataset.open(str(dataset)), pretrain=True)
    return {f"block_shards {blocks}": quality(Order((taken,), 512, block_shards=blocks)) for blocks in (0, 1, 8, 32, 128)}
