"""The training loop against the bare step: the overhead of loader, DeepSpeed, optimiser and log.

For each data source, a fresh process starts `engine/pretrain.py` and replaces its loop by turns of
a few steps each:

    bare     benchmarks.step: forward, backward, AdamW on one batch; no DeepSpeed, no loader, no log
    held     the loop on one batch
    loaded   the loop on the loader's batches

Overhead is the time of `loaded` above `bare`, in CPU-seconds on a CPU, in seconds on a GPU; the
loader's part is the time of `loaded` above `held`. Both are medians over adjacent turns with 95 %
intervals. Each turn ends with a log line, on a CPU five times as many as train.log_every asks for;
a checkpoint is timed once, after the turns. Stall is the share of the time in which the loop waits
for a batch. Sources: tar (with the device's default backend), torch (on a GPU), zarr, s3
(a server on loopback; shards go through the cache).
"""

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    Benchmark,
    CaseError,
    describe,
    interval,
    make_dataset,
    rates,
    spread,
    take_turns,
)

MODEL = {"cpu": "small", "cuda": "paper"}
BATCH = {"cpu": 64, "cuda": 256}  # on a CPU, the batch of the model's config
STEPS = {"cpu": 2, "cuda": 20}
SOURCES = {
    "tar": (),
    "torch": ("pipeline.backend=torch",),
    "zarr": ("pipeline.backend=torch", "pipeline.source=zarr"),
    "s3": ("pipeline.block_shards=1",),
}


@dataclass(frozen=True)
class LoopRun:
    dataset: str
    run: str
    device: str = "cpu"
    model: str = "small"
    batch: int = 64  # crops per rank
    steps: int = 10  # steps per turn
    turns: int = 3
    threads: int = 2
    settings: tuple[str, ...] = ()  # for --set
    sides: tuple[str, ...] = ("bare", "held", "loaded")
    world: int = 1
    environment: dict[str, str] = field(default_factory=dict)


def loop_run(options: argparse.Namespace, dataset: Path, run: Path) -> LoopRun:
    device = options.device
    model, batch = options.model or MODEL[device], options.batch or BATCH[device]
    return LoopRun(
        str(dataset),
        str(run),
        device,
        model,
        batch,
        options.steps or STEPS[device],
        options.repeats,
    )


def prepare(work: Path, options: argparse.Namespace) -> Benchmark:
    dataset = make_dataset(work, options.records or 600, format="both")
    base = loop_run(options, work / "dataset", work / "run")
    names = [name for name in SOURCES if name != "torch" or options.device == "cuda"]
    runs = {name: replace(base, run=f"{base.run}-{name}", settings=SOURCES[name]) for name in names}
    cases = {
        f"{name}: {base.model}, {base.batch} crops": (on_s3 if name == "s3" else compare, (run,))
        for name, run in runs.items()
    }
    facts = {
        "device": base.device,
        "model": base.model,
        "batch": base.batch,
        "steps": base.steps,
        "precision": precision(),
    }
    return Benchmark(describe(dataset, **facts), cases)


def compare(run: LoopRun) -> dict[str, Any]:
    return figures(loop_turns(run), run)


def loop_turns(run: LoopRun, rank: int = 0) -> dict[str, Any]:
    """Replace Loop.train by turns of each side and return their seconds and CPU-seconds."""
    os.environ.update(run.environment)
    if run.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from omnilead.engine.training.loop import Loop

    torch.set_num_threads(run.threads)
    measured: dict[str, Any] = {}

    def train(loop: Loop, *_: Any) -> bool:
        measured.update(measure_sides(loop, run, original))
        return False  # training has not ended: no export

    original, Loop.train = Loop.train, train  # type: ignore[method-assign]
    try:
        pretrain(run, f"{run.run}.{rank}.txt", "train.steps=1000000", "train.log_every=1000000")
    finally:
        Loop.train = original  # type: ignore[method-assign]
    if not measured:
        raise CaseError("pretrain did not reach its training loop")
    return measured


def pretrain(run: LoopRun, log: str, *settings: str, profiled: int = 0) -> None:
    """Run engine/pretrain.py in this process. Its output goes to `log`; a CaseError has the last
    line."""
    from benchmarks.step import config_file
    from omnilead.engine import pretrain

    words = ["--config", config_file(run.model)]
    for setting in (
        f"run={run.run}",
        f"data.datasets={json.dumps([run.dataset])}",
        f"train.batch_crops={run.batch * run.world}",
        f"train.precision={precision()}",
        "train.epochs=null",
        "train.schedule=fixed",
        "train.validate_every=0",
        "train.peak_tflops=1",  # skip measuring the peak for MFU
        "augment.rlm=0.5",
        *settings,
        *run.settings,
    ):
        words += ["--set", setting]
    if profiled:
        words += ["--profile", str(profiled)]
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code = pretrain.main(words)
    if code:
        said = Path(log).read_text().strip().splitlines() or ["pretrain printed nothing"]
        raise CaseError(said[-1])


def measure_sides(loop: Any, run: LoopRun, train: Callable[[Any], bool]) -> dict[str, Any]:
    import torch

    from benchmarks import step
    from omnilead.engine.training.train import COMPILED

    loader = EndlessLoader(loop.loader)
    batch, state = next(loader.stream)
    held = replace(batch, x_BSLT=batch.x_BSLT.clone())  # the loader will overwrite its buffer
    loop._save, loop._diagnose = (
        (lambda: None),
        (lambda batch: None),
    )  # train() calls these at its end

    synchronize = torch.cuda.synchronize if run.device == "cuda" else lambda: None

    def steps(held: Any = None) -> dict[str, float]:
        loader.held, loader.waited_s = held, 0.0
        loop.loader, loop.total = loader, loop.progress.step + run.steps
        train(loop)
        synchronize()
        return {"waited_s": loader.waited_s}

    def bare() -> None:
        for _ in range(run.steps):
            advance()
        synchronize()

    if "bare" in run.sides:
        kind: dict[str, Any] = {"device": run.device, "compiled": COMPILED[run.device]}
        advance = step.ours(step.StepRun(step.OURS, precision(), run.batch, run.model, **kind))
    sides = {"bare": bare, "held": lambda: steps((held, state)), "loaded": steps}
    rows = take_turns({name: sides[name] for name in run.sides}, run.turns)
    del loop._save
    began = time.perf_counter()
    loop._save()
    return {
        "rows": rows,
        "checkpoint_s": time.perf_counter() - began,
        "backend": loader.loader.backend,
    }


class EndlessLoader:
    """A loader whose stream continues over several calls of Loop.train, or which repeats one held
    batch."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.stream = loader, iter(loader)
        self.order, self.meter = loader.order, loader.meter
        self.held: Any = None
        self.waited_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        while True:
            asked = time.perf_counter()
            pair = self.held or next(self.stream)
            self.waited_s += time.perf_counter() - asked
            yield pair

    def close(self) -> None:
        self.stream.close()
        self.loader.close()


def precision() -> str:
    """What `train.precision: auto` means on this machine."""
    from omnilead.engine.config import has_bf16

    return "bf16" if has_bf16() else "fp32"


def figures(measured: dict[str, Any], run: LoopRun) -> dict[str, Any]:
    """Rates, and percentages computed from adjacent turns."""
    rows, crops = measured["rows"], run.steps * run.batch
    clock = "cpu_s" if run.device == "cpu" else "wall_s"

    def above(side: str, other: str) -> dict[str, float]:
        return interval(
            100 * (a[clock] / b[clock] - 1) for a, b in zip(rows[side], rows[other], strict=True)
        )

    return {
        **rates(rows["loaded"], crops),
        **rates(rows["bare"], crops, "bare_"),
        "overhead_pct": above("loaded", "bare"),
        "loop_pct": above("held", "bare"),
        "loader_pct": above("loaded", "held"),
        "stall_pct": spread(100 * row["waited_s"] / row["wall_s"] for row in rows["loaded"]),
        "checkpoint_s": measured["checkpoint_s"],
        "backend": measured["backend"],
        "repeats": run.turns,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_s3(run: LoopRun) -> dict[str, Any]:
    """Compare with the dataset in an object store on loopback, which runs in its own process."""
    if missing := [name for name in ("moto", "s3fs") if importlib.util.find_spec(name) is None]:
        raise CaseError(f"{missing[0]} is not installed")
    port = free_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    os.environ |= dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    import s3fs

    command = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        fs = s3fs.S3FileSystem()
        fs.mkdir("bench")
        fs.put(run.dataset, "bench/dataset", recursive=True)
        cache = f"pipeline.cache_dir={Path(run.run).parent / 'cache'}"
        return compare(replace(run, dataset="s3://bench/dataset", settings=(*run.settings, cache)))
    finally:
        server.kill()
        server.wait()


def wait_for(port: int, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise CaseError(f"the S3 server did not respond within {seconds:.0f} s")
