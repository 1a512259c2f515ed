"""Dataset -> tensors of a batch: crops a second and a CPU-second, for every backend and stage, beside the peers.

A synthetic dataset in the page cache; all sides end with float32 millivolts [2B, 12, 2500] in torch's hands, on the CPU. One
torch thread and the same malloc settings for all: loaders run beside a training step. In a run's first epoch our loader checks
each crop's crc32c, so cases named "first epoch" are measured there, the others later. The peers check nothing.
"""

import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import Case
from data_tools import synth
from data_tools.build import ShardOptions, shard
from data_tools.cli import keep_freed_memory
from data_tools.dataset import Dataset
from data_tools.sources import open_sources

HAS_MOSAIC = find_spec("streaming") is not None  # mosaicml-streaming pins versions of its own: install it beside, or do without
STAGES = {
    "crop": ("", 0.0),
    "RLM": ("", 0.5),
    "physio3+RLM": ("physio3", 0.5),
    "physio4+RLM": ("physio4", 0.5),
    "authors_physio3+RLM": ("authors_physio3", 0.5),
}
PEER_NOISE = {"RLM": (), "physio3+RLM": ("powerline", "emg", "wander"), "physio4+RLM": ("powerline", "emg", "wander", "shift")}
CROP_MB = 0.12 + 0.06 + 0.48  # in tar, in zarr and as two .mat files of float64
BACKENDS = {"torch": "torch", "resident": "resident", "dali": "dali on the CPU"}
BATCHES, THREADS = (64, 256, 1024), (1, 2)
FILLED = 4  # batches that lie ready between the stages
WARM_S = 6.0  # at most, to get to the second epoch: a case that takes longer spends little of its time on checks


def prepare(work: Path, records: int) -> Path:
    """A dataset of about `records` crops, each also as two .mat files. All of it must fit into the page cache."""
    from benchmarks.peers import write_mosaic, write_segments

    if (free := psutil.virtual_memory().available / 1e6) < (needed := 1.2 * CROP_MB * records):
        raise SystemExit(
            f"benchmarks.run: --records {records}: needs {needed:,.0f} MB of page cache, {free:,.0f} MB are free: ask for fewer"
        )
    synth.synthesise(work / "archive", patients=records // 2, sessions=1, seed=11, progress=False)
    dataset = shard(
        open_sources(str(work / "archive")), ShardOptions(str(work / "dataset"), format="both", plan="all", quiet=True)
    )
    shutil.rmtree(work / "archive")
    write_segments(dataset, work / "segments")
    if HAS_MOSAIC:
        write_mosaic(dataset, work / "mosaic")
    for _ in range(2):  # the kernel moves a page to its list of active ones at the second reading
        for path in work.rglob("*"):
            if path.is_file():
                path.read_bytes()
    return work / "dataset"


def cases(dataset: Path, work: Path, seconds: float, sizes: bool = False) -> dict[str, Case]:
    """`sizes`: of every backend and stage each batch and number of threads, and not only of gather and of RLM by torch."""
    found: dict[str, Case] = {}
    for batch in BATCHES:
        for threads in THREADS:
            found[f"gather: tar, batch {batch}{told(threads)}"] = (gather, (dataset, "tar", "first", batch, threads, seconds))
    found[f"gather: tar, batch 256{FIRST}"] = (gather, (dataset, "tar", "first", 256, 1, seconds, True))
    found["gather: tar, each crop's crc32c, batch 256"] = (gather, (dataset, "tar", "always", 256, 1, seconds))
    for threads in THREADS:
        found[f"gather: zarr, batch 256{told(threads)}"] = (gather, (dataset, "zarr", "first", 256, threads, seconds))
    for stage in STAGES:
        for backend, name in BACKENDS.items():
            if (stage, backend) == ("authors_physio3+RLM", "dali"):
                continue
            if backend == "torch" and stage != "crop":
                found[f"{stage}: {name}, batch 256{FIRST}"] = (ours, (dataset, backend, stage, 256, seconds, 1, True))
            for batch in BATCHES if sizes or (stage, backend) == ("RLM", "torch") else (256,):
                for threads in (1,) if backend == "resident" else THREADS:  # which has read all of it before
                    if threads == 1 or sizes or (stage, backend) == ("RLM", "torch"):
                        case = f"{stage}: {name}, batch {batch}{told(threads)}"
                        found[case] = (ours, (dataset, backend, stage, batch, seconds, threads))
    for stage in PEER_NOISE:
        for workers in (0, 2):
            name = f"{stage}: re-creation of fairseq-signals' loader, {workers} workers"
            found[name] = (fairseq_like, (work / "segments", stage, workers, seconds))
            if not workers:
                found[name + FIRST] = (fairseq_like, (work / "segments", stage, workers, seconds, True))
    for workers in (0, 2):
        found[f"RLM: webdataset and DataLoader, {workers} workers"] = (webdataset, (dataset, workers, seconds))
    found["RLM: fn.readers.webdataset, torch"] = (dali_reader, (dataset, seconds))
    if HAS_MOSAIC:
        found["RLM: mosaicml-streaming and DataLoader, 0 workers"] = (mosaic, (work / "mosaic", seconds))
    return found


FIRST = ", first epoch"


def told(threads: int) -> str:
    return f", {threads} threads" if threads > 1 else ""


Stream = Iterator[float]


def pumped(stream: Any, batch: int, crops: int, seconds: float, first: bool = False) -> Stream:
    """As many crops as go into `seconds`, of the `first` epoch or of later ones; what comes before does not count."""
    epoch, end = crops // batch, time.perf_counter() + WARM_S
    done = sum(1 for _ in islice(stream, FILLED))
    while not first and done < epoch + FILLED and time.perf_counter() < end:
        next(stream)
        done += 1
    yield 0.0
    end, units = time.perf_counter() + seconds, 0
    while time.perf_counter() < end and not (first and done == epoch):
        next(stream)
        done, units = done + 1, units + batch
    yield float(units)


def settle() -> None:
    """What our loader does for itself, for the peers too."""
    import torch

    torch.set_num_threads(1)
    keep_freed_memory()


def gather(dataset: Path, source: str, check: str, batch: int, threads: int, seconds: float, first: bool = False) -> Stream:
    from data_tools.dataset import CROP_SHAPE
    from engine.data.order import DatasetRows, Order
    from engine.data.prefetch import read_ahead
    from engine.data.reader import CropReader

    opened = Dataset.open(str(dataset))
    order = Order((DatasetRows.of(opened),), batch)
    reader = CropReader([opened], check, threads=threads, source=source)  # type: ignore[arg-type]
    stream = read_ahead(map(order.batch, count()), reader, (batch, *CROP_SHAPE))
    yield from pumped(stream, batch, len(opened), seconds, first)
    stream.close()


def ours(dataset: Path, backend: str, stage: str, batch: int, seconds: float, threads: int, first: bool = False) -> Stream:
    import torch

    from engine.data.augment import AugmentConfig
    from engine.data.loader import Loader, LoaderConfig

    settle()
    noise, rlm = STAGES[stage]
    augment = AugmentConfig(rlm=rlm, noise=noise)  # type: ignore[arg-type]
    config = LoaderConfig(backend=backend, batch_crops=batch, augment=augment, threads=threads)  # type: ignore[arg-type]
    opened = Dataset.open(str(dataset))
    loader = Loader(config, (opened,), torch.device("cpu"))
    yield from pumped(iter(loader), batch, len(opened), seconds, first)
    loader.close()


def fairseq_like(segments: Path, stage: str, workers: int, seconds: float, first: bool = False) -> Stream:
    from benchmarks import peers

    settle()
    files = sorted(segments.iterdir())
    pairs = list(zip(files[::2], files[1::2], strict=True))
    yield from pumped(peers.fairseq_like(pairs, PEER_NOISE[stage], 64, workers), 64, len(pairs), seconds, first)


def webdataset(dataset: Path, workers: int, seconds: float) -> Stream:
    from benchmarks import peers

    settle()
    opened = Dataset.open(str(dataset))
    yield from pumped(peers.webdataset_loader(opened, 256, workers), 256, len(opened), seconds)


def dali_reader(dataset: Path, seconds: float) -> Stream:
    from benchmarks import peers

    settle()
    opened = Dataset.open(str(dataset))
    yield from pumped(peers.dali_reader(opened, 256, 2), 256, len(opened), seconds)


def mosaic(place: Path, seconds: float) -> Stream:
    from benchmarks import peers

    settle()
    yield from pumped(peers.mosaic_loader(place, 256, 0), 256, 2048, seconds)
