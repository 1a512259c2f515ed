"""Ten million crops: how long until a rank has its first batch, and with how much memory. How well an order shuffles. And what
a second rank adds to a first on this machine: so many crops a rank, CPU-seconds of both, since they share its cores. What a
cluster adds, by formula: benchmarks.fleet.

The dataset's tables are whole; its 9,766 shards are sparse files of zeros with the checksums of zeros, so that reading,
checking and augmenting are real while the disk holds 1.2 TB of nothing.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import multiprocessing
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import e2e
from benchmarks.measure import Case, CaseError, Progress, call_fresh, kill, run_cases, spread
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


def measure(work: Path, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    progress(f"a dataset of {options.huge:,} crops that are zeros")
    dataset, left_out = prepare(work, options.huge), dict[str, str]()
    results = run_cases(cases(dataset), options.repeats, progress)
    progress("shuffle quality")
    quality = shuffle_quality(dataset)
    small = e2e.prepare(work / "small", 200)
    worlds: dict[str, Any] = {}
    for world in (1, 2):
        progress(f"{world} ranks" if world > 1 else "1 rank")
        try:
            worlds[str(world)] = ranks(e2e.setup_of(options, small, work / "small"), world)
        except CaseError as error:
            left_out[f"{world} ranks"] = str(error)
    print("\n".join(f"{world} ranks: {w['per_cpu_s']['median']:.3g} crops a CPU-second" for world, w in worlds.items()))
    if len(worlds) == 2:
        kept = worlds["2"]["per_cpu_s"]["median"] / worlds["1"]["per_cpu_s"]["median"]
        print(f"of one rank's speed, two keep {kept:.1%} each")
    facts = {"archive": "zeros", "crops": options.huge, "dataset": Dataset.open(str(dataset)).fingerprint}
    facts |= {"ranks_archive": "synthetic", "ranks_dataset": Dataset.open(str(small)).fingerprint}
    return {"input": facts, "results": results, "ranks": worlds, "shuffle_quality": quality, "left_out": left_out}


def ranks(setup: e2e.Setup, world: int) -> dict[str, Any]:
    """The real loop in `world` processes of one thread, so many crops each."""
    if importlib.util.find_spec("deepspeed") is None:
        raise CaseError("deepspeed is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
    setup = dataclasses.replace(setup, run=f"{setup.run}-{world}", world=world, kinds=("loaded",), threads=1, device="cpu")
    each = [
        dataclasses.replace(setup, environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world)
    ]
    with ThreadPoolExecutor(world) as pool:
        try:
            found = list(pool.map(call_fresh, [e2e.turns] * world, each, range(world)))
        except BaseException:  # the others would wait for one that failed
            for rank in multiprocessing.active_children():
                kill(rank.pid)
            raise
    turns = list(zip(*(one["rows"]["loaded"] for one in found), strict=True))
    crops = world * setup.steps * setup.batch
    return {
        "per_s": spread(crops / max(row["wall_s"] for row in turn) for turn in turns),
        "per_cpu_s": spread(crops / sum(row["cpu_s"] for row in turn) for turn in turns),
        "model": setup.model,
        "batch": setup.batch,
    }


def cases(dataset: Path) -> dict[str, Case]:
    return {"open to first batch: one rank of 8, batch 512": (first_batch, (dataset,))}


def first_batch(dataset: Path) -> float:
    """Units are starts: per_s is 1 / the seconds from nothing to a batch."""
    import torch

    from engine.data.loader import Loader, LoaderConfig

    torch.set_num_threads(1)
    opened = Dataset.open(str(dataset))
    loader = Loader(LoaderConfig(backend="torch"), (opened,), torch.device("cpu"), world=8, pretrain=True, halves=2)
    next(iter(loader))
    loader.close()
    return 1.0


def shuffle_quality(dataset: Path) -> dict[str, dict[str, float]]:
    from engine.data.order import DatasetRows, Order, quality

    taken = DatasetRows.of(Dataset.open(str(dataset)), pretrain=True)
    return {f"block_shards {blocks}": quality(Order((taken,), 512, block_shards=blocks)) for blocks in (0, 1, 8, 32, 128)}
