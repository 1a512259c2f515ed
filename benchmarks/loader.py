"""Dataset -> tensors of a batch: crops a second and a CPU-second, for every backend and stage, beside the peers.

A synthetic dataset in the page cache; all sides end with float32 millivolts [2B, 12, 2500] in torch's hands, on the CPU. One
torch thread: loaders run beside a training step.
"""

import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import Any

from benchmarks.measure import Case
from data_tools import synth
from data_tools.build import Settings, shard
from data_tools.dataset import Dataset
from data_tools.sources import open_sources

HAS_MOSAIC = find_spec("streaming") is not None  # mosaicml-streaming pins versions of its own: install it beside, or do without
STAGES = {"crop": ("", 0.0), "RLM": ("", 0.5), "physio3+RLM": ("physio3", 0.5), "physio4+RLM": ("physio4", 0.5)}
PEER_NOISE = {"RLM": (), "physio3+RLM": ("powerline", "emg", "wander"), "physio4+RLM": ("powerline", "emg", "wander", "shift")}
PEER_CROPS = 512  # 122 MB of .mat files
BACKENDS = {"torch": "torch", "resident": "resident", "dali": "dali on the CPU"}
BATCHES, THREADS = (64, 256, 1024), (1, 2)
FILLED = 4  # batches that lie ready between the stages


def prepare(work: Path, records: int) -> Path:
    """A dataset of about `records` crops, of which the first PEER_CROPS also lie as two .mat files each."""
    from benchmarks.peers import write_mosaic, write_segments

    synth.synthesise(work / "archive", patients=records // 2, sessions=1, seed=11, progress=False)
    dataset = shard(open_sources(str(work / "archive")), Settings(str(work / "dataset"), format="both", plan="all", quiet=True))
    shutil.rmtree(work / "archive")
    write_segments(dataset, work / "segments", PEER_CROPS)
    if HAS_MOSAIC:
        write_mosaic(dataset, work / "mosaic")
    return work / "dataset"


def cases(dataset: Path, work: Path, seconds: float, sizes: bool = False) -> dict[str, Case]:
    """`sizes`: of every backend and stage each batch and number of threads, and not only of gather and of RLM by torch."""
    found: dict[str, Case] = {}
    for batch in BATCHES:
        for threads in THREADS:
            found[f"gather: tar, batch {batch}{told(threads)}"] = (gather, (dataset, "tar", "first", batch, threads, seconds))
    found["gather: tar, each crop's crc32c, batch 256"] = (gather, (dataset, "tar", "always", 256, 1, seconds))
    for threads in THREADS:
        found[f"gather: zarr, batch 256{told(threads)}"] = (gather, (dataset, "zarr", "first", 256, threads, seconds))
    for stage in STAGES:
        for backend, name in BACKENDS.items():
            for batch in BATCHES if sizes or (stage, backend) == ("RLM", "torch") else (256,):
                for threads in (1,) if backend == "resident" else THREADS:  # which has read all of it before
                    if threads == 1 or sizes or (stage, backend) == ("RLM", "torch"):
                        case = f"{stage}: {name}, batch {batch}{told(threads)}"
                        found[case] = (ours, (dataset, backend, stage, batch, seconds, threads))
    for stage in PEER_NOISE:
        for workers in (0, 2):
            name = f"{stage}: re-creation of fairseq-signals' loader, {workers} workers"
            found[name] = (fairseq_like, (work / "segments", stage, workers, seconds))
    for workers in (0, 2):
        found[f"RLM: webdataset and DataLoader, {workers} workers"] = (webdataset, (dataset, workers, seconds))
    found["RLM: fn.readers.webdataset, torch"] = (dali_reader, (dataset, seconds))
    if HAS_MOSAIC:
        found["RLM: mosaicml-streaming and DataLoader, 0 workers"] = (mosaic, (work / "mosaic", seconds))
    return found


def told(threads: int) -> str:
    return f", {threads} threads" if threads > 1 else ""


Stream = Iterator[float]


def pumped(stream: Any, batch: int, crops: int, seconds: float) -> Stream:
    """All crops once, which does not count, for the page cache and each crop's one check; then as many as go into `seconds`."""
    for _ in islice(stream, crops // batch + FILLED):
        pass
    yield 0.0
    end, units = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        next(stream)
        units += batch
    yield float(units)


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def gather(dataset: Path, source: str, check: str, batch: int, threads: int, seconds: float) -> Stream:
    from data_tools.dataset import CROP_SHAPE
    from engine.pipelines.ahead import read_ahead
    from engine.pipelines.gather import Gather
    from engine.pipelines.order import Order, Rows

    opened = Dataset.open(str(dataset))
    order = Order((Rows.of(opened),), batch)
    reader = Gather([opened], check, threads=threads, source=source)  # type: ignore[arg-type]
    stream = read_ahead(map(order.batch, count()), reader, (batch, *CROP_SHAPE))
    yield from pumped(stream, batch, len(opened), seconds)
    stream.close()


def ours(dataset: Path, backend: str, stage: str, batch: int, seconds: float, threads: int) -> Stream:
    import torch

    from engine.pipelines.augment import AugmentConfig
    from engine.pipelines.loader import Loader, LoaderConfig

    one_thread()
    noise, rlm = STAGES[stage]
    augment = AugmentConfig(rlm=rlm, noise=noise)  # type: ignore[arg-type]
    config = LoaderConfig(backend=backend, batch_crops=batch, augment=augment, threads=threads)  # type: ignore[arg-type]
    opened = Dataset.open(str(dataset))
    loader = Loader(config, (opened,), torch.device("cpu"))
    yield from pumped(iter(loader), batch, len(opened), seconds)
    loader.close()


def fairseq_like(segments: Path, stage: str, workers: int, seconds: float) -> Stream:
    from benchmarks import peers

    one_thread()
    files = sorted(segments.iterdir())
    pairs = list(zip(files[::2], files[1::2], strict=True))
    yield from pumped(peers.fairseq_like(pairs, PEER_NOISE[stage], 64, workers), 64, PEER_CROPS, seconds)


def webdataset(dataset: Path, workers: int, seconds: float) -> Stream:
    from benchmarks import peers

    one_thread()
    opened = Dataset.open(str(dataset))
    yield from pumped(peers.webdataset_loader(opened, 256, workers), 256, len(opened), seconds)


def dali_reader(dataset: Path, seconds: float) -> Stream:
    from benchmarks import peers

    one_thread()
    opened = Dataset.open(str(dataset))
    yield from pumped(peers.dali_reader(opened, 256, 2), 256, len(opened), seconds)


def mosaic(place: Path, seconds: float) -> Stream:
    from benchmarks import peers

    one_thread()
    yield from pumped(peers.mosaic_loader(place, 256, 0), 256, 2048, seconds)
