"""Crops to weights through the real loop, beside the bare step: what loader, DeepSpeed, optimiser and log add.

    python -m benchmarks.run e2e [--device cpu|cuda] [--model small] [--batch 64] [--steps 2]

For each source of data a process of its own begins `engine/pretrain.py` and takes over where its loop would begin: turns of
so many steps, again and again,

    bare     benchmarks.step: forward, backward, AdamW on a batch that is there; no DeepSpeed, no loader, no log
    held     the loop on one batch that is there
    loaded   the loop on the loader's batches

Overhead is what `loaded` takes above `bare`, per CPU-second on a CPU, per second on a GPU; the loader's own part is what it
takes above `held`: medians of turns side by side, and where they lie with 95 %. Turns are short, since a shared core's speed
changes by the second. A log line ends each, on a CPU five times as many as train.log_every asks for; a checkpoint is timed
once, after the turns. Stall: the share of seconds in which the loop waits for a batch. Sources: tar (the backend that the
device gets by default), torch (if that is not it), resident, zarr, s3 (a moto server on loopback, shards through the cache).
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import CaseError, Progress, call_fresh, cpu_s, middle, spread
from benchmarks.run import only
from data_tools import synth
from data_tools.build import ShardOptions, shard
from data_tools.dataset import Dataset
from data_tools.sources import open_sources

MODEL = {"cpu": "small", "cuda": "paper"}
BATCH = {"cpu": 64, "cuda": 256}  # on a CPU the model's own
STEPS = {"cpu": 2, "cuda": 20}
TURNS = {"cpu": 60, "cuda": 5}
KINDS = ("bare", "held", "loaded")
MINUTES_BETWEEN_CHECKPOINTS = 30


@dataclass(frozen=True)
class Setup:
    dataset: str
    run: str
    device: str = "cpu"
    model: str = "small"
    batch: int = 64  # of one rank
    steps: int = 10
    turns: int = 3
    threads: int = 2
    settings: tuple[str, ...] = ()  # --set, what makes it this source
    kinds: tuple[str, ...] = KINDS
    world: int = 1
    environment: dict[str, str] = field(default_factory=dict)


SOURCES = {
    "tar": (),
    "torch": ("pipeline.backend=torch",),
    "resident": ("pipeline.backend=resident",),
    "zarr": ("pipeline.backend=torch", "pipeline.source=zarr"),
    "s3": ("pipeline.block_shards=1",),
}


def setup_of(options: argparse.Namespace, dataset: Path, work: Path) -> Setup:
    device = options.device
    return Setup(
        str(dataset),
        str(work / "run"),
        device,
        options.model or MODEL[device],
        options.batch or BATCH[device],
        options.steps or STEPS[device],
        options.repeats or TURNS[device],
        options.threads,
    )


def prepare(work: Path, records: int) -> Path:
    """A dataset of about `records` crops, as tar and zarr."""
    synth.synthesise(work / "archive", patients=records // 2, sessions=1, seed=11, progress=False)
    shard(open_sources(str(work / "archive")), ShardOptions(str(work / "dataset"), format="both", plan="all", quiet=True))
    shutil.rmtree(work / "archive")
    return work / "dataset"


def measure(work: Path, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    progress(f"a dataset of about {options.records} crops")
    dataset = prepare(work, options.records)
    base, left_out, results = setup_of(options, dataset, work), dict[str, str](), {}
    wanted = {name: how for name, how in SOURCES.items() if name != "torch" or options.device == "cuda"}
    for name, how in only(wanted, options.only).items():
        progress(f"{name}: {', '.join(base.kinds)}, {base.turns} turns")
        mine = dataclasses.replace(base, run=str(work / f"run-{name}"), settings=how)
        try:
            lack = missing(name)
            if lack:
                raise CaseError(f"{lack} is not installed")
            with served(mine, work) if name == "s3" else contextlib.nullcontext(mine) as ready:
                results[f"{name}: {base.model}, {base.batch} crops"] = told(call_fresh(turns, ready), ready)
        except CaseError as error:
            left_out[name] = str(error)
            progress(f"{name}: left out: {error}")
    print("\n".join(lines(results)))
    return {"input": given(base), "results": results, "left_out": left_out}


def missing(source: str) -> str:
    """A package without which this source cannot be."""
    names = ["deepspeed", *(["moto", "s3fs"] if source == "s3" else [])]
    return next((name for name in names if importlib.util.find_spec(name) is None), "")


def alone(name: str, setup: Setup) -> dict[str, Any]:
    """One source in this process, as a part of a record."""
    case = f"{name}: {setup.model}, {setup.batch} crops"
    return {"input": given(setup), "results": {case: told(turns(setup), setup)}}


def given(setup: Setup) -> dict[str, Any]:
    dataset = Dataset.open(setup.dataset)
    facts = {"archive": "synthetic", "crops": len(dataset), "dataset": dataset.fingerprint, "device": setup.device}
    return facts | {"model": setup.model, "batch": setup.batch, "steps": setup.steps, "precision": precision()}


def turns(setup: Setup, rank: int = 0, take: Callable[..., dict[str, Any]] | None = None) -> dict[str, Any]:
    """In a process of its own: what `take`, instead of Loop.train, finds; or seconds and CPU-seconds of each kind's turns."""
    os.environ.update(setup.environment)
    if setup.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from engine.training.loop import Loop

    torch.set_num_threads(setup.threads)
    found: dict[str, Any] = {}

    def instead(loop: Loop) -> bool:
        found.update((take or take_turns)(loop, setup, original))
        return False  # not at its end: nothing is exported

    original, Loop.train = Loop.train, instead  # type: ignore[method-assign]
    settings = ("train.steps=1000000", "augment.rlm=0.5", "train.log_every=1000000", "train.peak_tflops=1")  # MFU: nobody asks
    trained(setup, f"{setup.run}.{rank}.txt", *settings)
    if not found:
        raise CaseError("pretrain never came to its loop")
    return found


def trained(setup: Setup, said: str, *settings: str) -> None:
    """engine/pretrain.py in this process; what it says goes to a file, of which a CaseError has the last line."""
    from benchmarks.step import config_file
    from engine import pretrain

    common = (f"run={setup.run}", f"data.datasets={json.dumps([setup.dataset])}", "train.epochs=null", "train.schedule=fixed")
    common += (f"train.batch_crops={setup.batch * setup.world}", "train.validate_every=0", f"train.precision={precision()}")
    words = [word for each in (*common, *settings, *setup.settings) for word in ("--set", each)]
    with open(said, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code = pretrain.main(["--config", config_file(setup.model), *words])
    if code:
        raise CaseError((Path(said).read_text().strip().splitlines() or ["pretrain said nothing"])[-1])


def take_turns(loop: Any, setup: Setup, train: Callable[[Any], bool]) -> dict[str, Any]:
    import torch

    kept = Kept(loop.loader)
    batch, state = next(kept.stream)
    held = dataclasses.replace(batch, x_BSLT=batch.x_BSLT.clone())  # its buffer will be used again
    loop._save, loop._diagnose = (lambda: None), (lambda batch: None)  # what train() does at its end
    bare = bare_step(setup) if "bare" in setup.kinds else None

    def turn(kind: str) -> None:
        if bare and kind == "bare":
            for _ in range(setup.steps):
                bare()
        else:
            kept.again = (held, state) if kind == "held" else None
            loop.loader, loop.total = kept, loop.progress.step + setup.steps
            train(loop)
        if setup.device == "cuda":
            torch.cuda.synchronize()

    for kind in setup.kinds:  # warm-up
        turn(kind)
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in setup.kinds}
    for number in range(setup.turns):
        for kind in setup.kinds[:: 1 if number % 2 else -1]:  # there and back: a machine that slows down favours nobody
            kept.waited_s, wall, cpu = 0.0, time.perf_counter(), cpu_s()
            turn(kind)
            rows[kind].append({"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu, "waited_s": kept.waited_s})
    del loop._save
    began = time.perf_counter()
    loop._save()
    return {"rows": rows, "checkpoint_s": time.perf_counter() - began, "backend": kept.loader.backend}


class Kept:
    """A loader whose stream outlives each call of Loop.train, or one batch again and again."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.stream = loader, iter(loader)
        self.order, self.meter = loader.order, loader.meter
        self.again: Any = None
        self.waited_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        while True:
            asked = time.perf_counter()
            pair = self.again or next(self.stream)
            self.waited_s += time.perf_counter() - asked
            yield pair

    def close(self) -> None:
        self.stream.close()
        self.loader.close()


def precision() -> str:
    """What `train.precision: auto` is here."""
    from engine.config import has_bf16

    return "bf16" if has_bf16() else "fp32"


def bare_step(setup: Setup) -> Callable[[], None]:
    from benchmarks import step
    from engine.training.throughput import COMPILED

    how = COMPILED[setup.device]
    run = step.Run(step.OURS, precision(), setup.batch, setup.model, compiled=how, device=setup.device)
    return step.ours(run)


def told(found: dict[str, Any], setup: Setup) -> dict[str, Any]:
    """The turns as figures; percentages are of turns side by side."""
    rows, crops = found["rows"], setup.steps * setup.batch
    clock = "cpu_s" if setup.device == "cpu" else "wall_s"

    def above(what: str, than: str) -> dict[str, float]:
        pairs = zip(rows[what], rows[than], strict=True)
        return middle(100 * (a[clock] / b[clock] - 1) for a, b in pairs)

    share = 100 * found["checkpoint_s"] / (60 * MINUTES_BETWEEN_CHECKPOINTS)
    return {
        "per_s": spread(crops / row["wall_s"] for row in rows["loaded"]),
        "per_cpu_s": spread(crops / row["cpu_s"] for row in rows["loaded"]),
        "bare_per_s": spread(crops / row["wall_s"] for row in rows["bare"]),
        "bare_per_cpu_s": spread(crops / row["cpu_s"] for row in rows["bare"]),
        "overhead_pct": above("loaded", "bare"),
        "loop_pct": above("held", "bare"),
        "loader_pct": above("loaded", "held"),
        "stall_pct": spread(100 * row["waited_s"] / row["wall_s"] for row in rows["loaded"]),
        "checkpoint_s": found["checkpoint_s"],
        "checkpoint_pct": share,
        "backend": found["backend"],
        "repeats": setup.turns,
    }


def lines(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    width = max(map(len, results), default=8)
    yield f"{'':<{width}}  crops/s  per CPU-s  bare per CPU-s  overhead %  of it loader %  stall %  checkpoint s"
    for name, r in results.items():
        middle = [
            r[key]["median"] for key in ("per_s", "per_cpu_s", "bare_per_cpu_s", "overhead_pct", "loader_pct", "stall_pct")
        ]
        yield f"{name:<{width}}  {{:7.4g}}  {{:9.4g}}  {{:14.4g}}  {{:10.2f}}  {{:14.2f}}  {{:7.2f}}  {{:12.2f}}".format(
            *middle, r["checkpoint_s"]
        )


@contextlib.contextmanager
def served(setup: Setup, work: Path) -> Iterator[Setup]:
    """The dataset in an object store on loopback, a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {f"AWS_{name}": value for name, value in (("ENDPOINT_URL", f"http://127.0.0.1:{port}"), *CREDENTIALS)}
    command = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        call_fresh(upload, setup.dataset, "s3://bench/dataset", environment)
        cache = (f"pipeline.cache_dir={work / 'cache'}",)
        yield dataclasses.replace(setup, dataset="s3://bench/dataset", settings=setup.settings + cache, environment=environment)
    finally:
        server.terminate()
        server.wait()


CREDENTIALS = (
    *(("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")),
    *(("CONFIG_FILE", os.devnull), ("SHARED_CREDENTIALS_FILE", os.devnull), ("EC2_METADATA_DISABLED", "true")),
)


def wait_for(port: int, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise CaseError(f"the S3 server did not answer within {seconds:.0f} s")


def upload(dataset: str, url: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import s3fs

    fs = s3fs.S3FileSystem()
    fs.mkdir(url.split("/")[2])
    files: Sequence[Path] = [path for path in Path(dataset).rglob("*") if path.is_file() and "store.zarr" not in path.parts]
    for path in files:
        fs.put_file(str(path), f"{url}/{path.relative_to(dataset)}")
