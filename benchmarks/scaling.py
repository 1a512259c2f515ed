"""Ten million crops: time and memory from process start to a rank's first batch, and shuffle
quality. Also two ranks against one on this machine: the same number of crops for each, in
CPU-seconds of both, as they share its cores.

The dataset's tables are complete. Its 9,766 shards are sparse files of zeros with matching
checksums, so that reading, verifying and augmenting are real while the 1.2 TB take no space on the
disk.
"""

import argparse
import hashlib
import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import e2e
from benchmarks.measure import (
    BUG,
    Benchmark,
    CaseError,
    call_fresh,
    describe,
    kill,
    make_dataset,
    say,
    spread,
)
from omnilead.data_tools.dataset import COLUMNS, CROP_BYTES, SHARD_CROPS, Dataset, fingerprint

MEMBERS = 512 + 120_320 + 512 + 512  # bytes of a crop in a tar: two headers and two bodies
BATCHES = 256  # batches of an epoch from which shuffle quality is computed


def prepare(work: Path, options: argparse.Namespace) -> Benchmark:
    dataset = zeros(work / "huge", options.huge or 10_000_000)
    small = make_dataset(work, 200)
    facts = {"archive": "zeros", "ranks_archive": "synthetic", "ranks_dataset": small.fingerprint}
    loop = e2e.loop_run(options, work / "dataset", work / "run")
    cases = {"open to first batch: one rank of 8, batch 512": (first_batch, (dataset.root.url,))}
    return Benchmark(describe(dataset) | facts, cases, partial(extra, dataset, loop))


def extra(dataset: Dataset, loop: e2e.LoopRun) -> dict[str, Any]:
    from omnilead.engine.data.order import DatasetRows, Order

    say("shuffle quality")
    rows, worlds = DatasetRows.of(dataset, pretrain=True), dict[str, Any]()
    quality = {
        f"block_shards {n}": shuffle_quality(Order((rows,), 512, block_shards=n))
        for n in (0, 1, 8, 32, 128)
    }
    for world in (1, 2):
        say(f"{world} rank{'s' if world > 1 else ''}")
        try:
            worlds[str(world)] = ranks(loop, world)
        except CaseError as error:
            if str(error).startswith(BUG):
                raise
            say(f"{world} ranks: left out: {error}")
    return {"ranks": worlds, "shuffle_quality": quality}


def zeros(root: Path, crops: int) -> Dataset:
    """A dataset of `crops` crops whose samples are zeros."""
    (root / "shards").mkdir(parents=True)
    shards = []
    for i, start in enumerate(range(0, crops, SHARD_CROPS)):
        count = min(SHARD_CROPS, crops - start)
        shards.append(
            {
                "name": f"{i:05d}.tar",
                "crops": count,
                "bytes": count * MEMBERS + 1024,
                "sha256": "0" * 64,
            }
        )
        with open(root / "shards" / f"{i:05d}.tar", "wb") as file:
            file.truncate(count * MEMBERS + 1024)
    with pq.ParquetWriter(root / "samples.parquet", COLUMNS, compression="zstd") as writer:
        for start in range(0, crops, 1 << 20):
            writer.write_table(
                table(np.arange(start, min(start + (1 << 20), crops))), row_group_size=65_536
            )
    data = (root / "samples.parquet").read_bytes()
    meta = {
        "format_version": 1,
        "crops": crops,
        "formats": ["tar"],
        "shards": shards,
        "plan": "all",
        "roles": {},
    }
    meta["samples"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (root / "dataset.json").write_text(json.dumps(meta | {"fingerprint": fingerprint(meta)}))
    return Dataset.open(str(root))


def table(rows: np.ndarray) -> pa.Table:
    """Part of samples.parquet as `data_tools shard` writes it; names and patients have realistic
    lengths."""
    count = len(rows)
    names = pa.array([f"JS{i:08d}" for i in rows])
    given: dict[str, Any] = {
        "shard": rows // SHARD_CROPS,
        "offset": rows % SHARD_CROPS * MEMBERS + 512,
        "crc32c": np.full(count, google_crc32c.value(bytes(CROP_BYTES))),
        "waveform": rows,
        "source": pa.array(["ningbo"]).take(pa.array(np.zeros(count, np.int64))),
        "record": names,
        "patient": names,
        "start_s": np.zeros(count),
        "halves": np.where(rows % 20, 2, 1),
        "pretrain": rows % 10 > 0,
        "age": np.full(count, 60.0),
        "fs_source_hz": np.full(count, 500.0),
    }
    columns = [
        pa.array(given[f.name]).cast(f.type) if f.name in given else pa.nulls(count, f.type)
        for f in COLUMNS
    ]
    return pa.table(columns, schema=COLUMNS)


def first_batch(dataset: str) -> float:
    """Open the dataset and load one batch. The unit is 1 start: per_s is 1 / the seconds to the
    first batch."""
    import torch

    from omnilead.engine.data.loader import Loader, LoaderConfig

    torch.set_num_threads(1)
    opened = Dataset.open(dataset)
    loader = Loader(
        LoaderConfig(backend="torch"),
        (opened,),
        torch.device("cpu"),
        world=8,
        pretrain=True,
        halves=2,
    )
    next(iter(loader))
    loader.close()
    return 1.0


def shuffle_quality(order: Any) -> dict[str, float]:
    """How well an epoch of one dataset is shuffled, from 256 of its batches: the correlation of
    position and row (0 is best), the number of shards in a batch, and the central 95 % range of
    a batch's rows as a share of all rows (0.95 is best)."""
    steps = np.unique(np.linspace(0, order.steps_per_epoch - 1, BATCHES).astype(np.int64))
    row = np.stack([order.batch(int(step)).row for step in steps])
    position = steps[:, None] * order.batch_crops + np.arange(order.batch_crops)
    low, high = np.percentile(row, (2.5, 97.5), axis=1)
    (rows,) = order.rows
    return {
        "correlation": float(np.corrcoef(position.ravel(), row.ravel())[0, 1]),
        "shards_per_batch": float(np.mean([len(np.unique(rows.shard(each))) for each in row])),
        "row_span_95": float(np.mean(high - low) / rows.shard_first[-1]),
    }


def ranks(run: e2e.LoopRun, world: int) -> dict[str, Any]:
    """Run the training loop in `world` processes with one thread each and the same batch size."""
    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(e2e.free_port()),
        "DS_ACCELERATOR": "cpu",
    }
    run = replace(
        run, run=f"{run.run}-{world}", world=world, sides=("loaded",), threads=1, device="cpu"
    )
    each = [
        replace(run, environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    with ThreadPoolExecutor(world) as pool:
        try:
            measured = list(pool.map(call_fresh, [e2e.loop_turns] * world, each, range(world)))
        except BaseException:  # the other ranks would wait for the failed one
            for rank in multiprocessing.active_children():
                kill(rank.pid)
            raise
    turns = list(zip(*(one["rows"]["loaded"] for one in measured), strict=True))
    crops = world * run.steps * run.batch
    return {
        "per_s": spread(crops / max(row["wall_s"] for row in turn) for turn in turns),
        "per_cpu_s": spread(crops / sum(row["cpu_s"] for row in turn) for turn in turns),
        "model": run.model,
        "batch": run.batch,
    }
