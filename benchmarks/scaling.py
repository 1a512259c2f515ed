"""Ten million crops: time and memory from process start to a rank's first batch. Also two ranks
against one on this machine: the same number of crops for each, in CPU-seconds of both, as they
share its cores.

The dataset's tables are complete. Its 9,766 shards are sparse files of zeros with matching
checksums, so that reading, verifying and augmenting are real while the 1.2 TB take no space on the
disk.
"""

import argparse
import hashlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import e2e
from benchmarks.measure import Cases, Result, call_fresh, describe, make_dataset, spread
from omnilead.data_tools.dataset import COLUMNS, CROP_BYTES, SHARD_CROPS, Dataset, fingerprint

MEMBERS = 512 + 120_320 + 512 + 512  # bytes of a crop in a tar: two headers and two bodies
RANKS_S = 300  # a rank whose neighbour failed would wait for ever
GROUP = 2**20  # rows that are written at a time


def prepare(work: Path, options: argparse.Namespace) -> tuple[Result, Cases]:
    dataset = zeros(work / "huge", options.huge or 10_000_000)
    small = make_dataset(work, 200)
    facts = {"archive": "zeros", "ranks_archive": "synthetic", "ranks_dataset": small.fingerprint}
    loop = e2e.loop_run(options, work)
    cases: Cases = {
        "open to first batch: one rank of 8, batch 512": (first_batch, (dataset.root.url,)),
        "1 ranks": (ranks, (loop, 1)),
        "2 ranks": (ranks, (loop, 2)),
    }
    return describe(dataset) | facts, cases


def zeros(root: Path, crops: int) -> Dataset:
    """A dataset of `crops` crops whose samples are zeros."""
    (root / "shards").mkdir(parents=True)
    shards = []
    for i, start in enumerate(range(0, crops, SHARD_CROPS)):
        count = min(SHARD_CROPS, crops - start)
        size = count * MEMBERS + 1024
        name = f"{i:05d}.tar"
        with open(root / "shards" / name, "wb") as file:
            file.truncate(size)
        shards.append({"name": name, "crops": count, "bytes": size, "sha256": "0" * 64})
    samples = root / "samples.parquet"
    with pq.ParquetWriter(samples, COLUMNS, compression="zstd") as writer:
        for start in range(0, crops, GROUP):
            rows = np.arange(start, min(start + GROUP, crops))
            writer.write_table(table(rows), row_group_size=65_536)
    data = samples.read_bytes()
    meta = {"format_version": 1, "crops": crops, "formats": ["tar"], "shards": shards}
    meta |= {"plan": "all", "roles": {}}
    meta["samples"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (root / "dataset.json").write_text(json.dumps(meta | {"fingerprint": fingerprint(meta)}))
    return Dataset.open(str(root))


def table(rows: np.ndarray) -> pa.Table:
    """Part of samples.parquet as `data_tools shard` writes it; names and patients have realistic
    lengths."""
    count = len(rows)
    names = [f"JS{i:08d}" for i in rows]
    columns: dict[str, Any] = dict.fromkeys(COLUMNS.names, [None] * count)
    columns |= {
        "shard": rows // SHARD_CROPS,
        "offset": rows % SHARD_CROPS * MEMBERS + 512,
        "crc32c": np.full(count, google_crc32c.value(bytes(CROP_BYTES))),
        "waveform": rows,
        "source": ["ningbo"] * count,
        "record": names,
        "patient": names,
        "start_s": np.zeros(count),
        "halves": np.where(rows % 20, 2, 1),
        "pretrain": rows % 10 > 0,
        "age": np.full(count, 60.0),
        "fs_source_hz": np.full(count, 500.0),
    }
    return pa.Table.from_pydict(columns, schema=COLUMNS)


def first_batch(dataset: str) -> Iterator[float]:
    """Open the dataset and load one batch. The unit is 1 start: per_s is 1 / the seconds to the
    first batch."""
    import torch

    from omnilead.engine.data.loader import Loader, LoaderConfig

    torch.set_num_threads(1)
    how: dict[str, Any] = {"world": 8, "pretrain": True, "halves": 2}
    while True:
        opened = Dataset.open(dataset)
        loader = Loader(LoaderConfig(backend="torch"), (opened,), torch.device("cpu"), **how)
        next(iter(loader))
        loader.close()
        yield 1.0


def ranks(run: e2e.LoopRun, world: int) -> Result:
    """Run the training loop in `world` processes with one thread each and the same batch size."""
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    run = replace(run, run=f"{run.run}-{world}", sides=("loaded",), threads=1)

    def measured(rank: int) -> Any:
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        one = replace(run, environment=environment)
        return call_fresh(e2e.loop_turns, one, seconds=RANKS_S)["rows"]["loaded"]

    # nobody else is given this port, but rank 0 may listen there
    with socket.socket() as port, ThreadPoolExecutor(world) as pool:
        port.bind(("", 0))
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        common["MASTER_PORT"] = str(port.getsockname()[1])
        turns = list(zip(*pool.map(measured, range(world)), strict=True))
    crops = world * run.steps * run.batch
    return {
        "per_s": spread(crops / max(row["wall_s"] for row in turn) for turn in turns),
        "per_cpu_s": spread(crops / sum(row["cpu_s"] for row in turn) for turn in turns),
        "model": run.model,
        "batch": run.batch,
        "repeats": run.turns,
    }
