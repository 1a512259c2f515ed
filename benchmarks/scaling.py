"""Measure what ten million crops take: the time from opening the dataset to a rank's first batch, when a
turn before it has filled the caches; the time of each job that goes over all crops (benchmarks.huge), when it
is ready; and the peak memory of these processes. The jobs are measured for a tenth and a hundredth of the
crops, too. Besides, two ranks are compared with one on this machine. Each rank trains on the same number of
crops, and the CPU-seconds of both ranks are added, because they share the cores.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import e2e, huge
from benchmarks.measure import (
    Cases,
    Result,
    call_fresh,
    describe_input,
    make_dataset,
    median_and_range,
    reserve_port,
)
from benchmarks.tables import SHARE_OF_SIZE, TEN_MILLION
from omnilead.data_tools.dataset import Dataset

RANK_LIMIT_S = 300  # without a limit, a rank would wait forever for another rank that has failed


def prepare_input_and_cases(work: Path, options: argparse.Namespace) -> tuple[Result, Cases]:
    crops = options.huge or TEN_MILLION
    jobs: Cases = {}
    for size, share in SHARE_OF_SIZE.items():
        dataset = huge.make_huge_dataset(work / f"{share}", crops // share)
        for name, case in huge.cases_of_jobs(dataset).items():
            jobs[f"{size}: {name}"] = case
    small = make_dataset(work, 200)
    facts = {"archive": "zeros", "ranks_archive": "synthetic", "ranks_dataset": small.fingerprint}
    loop = e2e.loop_run_from_options(options, work)
    cases: Cases = {
        "open to first batch: one rank of 8, batch 512": (time_first_batch, (dataset.root.url,)),
        **jobs,
        "1 ranks": (run_ranks, (loop, 1)),
        "2 ranks": (run_ranks, (loop, 2)),
    }
    return describe_input(dataset) | facts, cases


def time_first_batch(dataset: str) -> Iterator[float]:
    """Opens the dataset and loads one batch, repeatedly. Yields 1 each time, so the result's `per_s` is 1 /
    (seconds to the first batch)."""
    import torch

    from omnilead.engine.data.config import LoaderConfig
    from omnilead.engine.data.loader import Loader
    from omnilead.engine.data.order import Selection

    torch.set_num_threads(1)
    loader_options: dict[str, Any] = {
        "selection": Selection(pretrain=True, halves=2),
        "world": 8,
        "reuse_batches": True,
    }
    while True:
        opened = Dataset.open(dataset)
        loader = Loader(
            LoaderConfig(backend="torch"), (opened,), torch.device("cpu"), **loader_options
        )
        next(iter(loader))
        loader.close()
        yield 1.0


def run_ranks(run: e2e.LoopRun, world: int) -> Result:
    """Measures the training loop in `world` processes at once, each with one thread and the same batch
    size."""
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    run = replace(run, run=f"{run.run}-{world}", sides=("loaded",), threads=1)

    def turns_of_rank(rank: int) -> Any:
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        rank_run = replace(run, environment=environment)
        return call_fresh(e2e.loop_turns, rank_run, seconds=RANK_LIMIT_S)["rows"]["loaded"]

    with reserve_port() as port, ThreadPoolExecutor(world) as pool:
        common["MASTER_PORT"] = str(port.getsockname()[1])
        turns = list(zip(*pool.map(turns_of_rank, range(world)), strict=True))
    crops = world * run.steps * run.batch
    return {
        "per_s": median_and_range(crops / max(row["wall_s"] for row in turn) for turn in turns),
        "per_cpu_s": median_and_range(crops / sum(row["cpu_s"] for row in turn) for turn in turns),
        "model": run.model,
        "batch": run.batch,
        "repeats": run.turns,
    }
