"""Dataset to batches: crops per second and per CPU-second for every backend and stage, and for
other loaders on the same crops.

The dataset is synthetic and in the page cache. Every loader ends with float32 millivolts [2B, 12,
2500] in torch. On a CPU all have one torch thread and the same malloc settings, as loaders run next
to a training step. Our loader verifies each crc32c in the first epoch: cases named "first epoch"
are measured there, others later. Other loaders verify nothing, and are not measured to a GPU.

`fairseq_like` is our re-creation of fairseq-signals' path (one float64 .mat file per 5 s segment,
scipy.io.loadmat, numpy augmentation of one segment at a time, a padding mask of the data's shape);
it is not their code.
"""

import argparse
import os
import time
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from scipy.io import loadmat  # not in __getitem__, where every worker would spend time on it

from benchmarks.ingest import write_segment
from benchmarks.measure import Benchmark, Case, CaseError, describe, make_dataset
from omnilead.data_tools.cli import keep_freed_memory
from omnilead.data_tools.dataset import CROP_SHAPE, Dataset

STAGES = {
    "crop": ("", 0.0),
    "RLM": ("", 0.5),
    "physio3+RLM": ("physio3", 0.5),
    "physio4+RLM": ("physio4", 0.5),
    "authors_physio3+RLM": ("authors_physio3", 0.5),
}
PEER_NOISE = {
    "RLM": (),
    "physio3+RLM": ("powerline", "emg", "wander"),
    "physio4+RLM": ("powerline", "emg", "wander", "shift"),
}
CROP_MB = 0.12 + 0.48  # in a tar shard, and as two float64 .mat files
BACKENDS = {"torch": "torch", "dali": "dali on the CPU"}
FIRST = ", first epoch"
FILLED = 4  # batches that the stages prefetch
WARM_S = (
    6.0  # limit for reaching the second epoch: in a slower case, checksums take little of the time
)
HALF = 2500
Stream = Generator[float, bool, None]


def prepare(work: Path, options: argparse.Namespace) -> Benchmark:
    alone, records, seconds = (
        options.device == "cuda",
        options.records or 20_000,
        options.seconds or 3,
    )
    if (free := psutil.virtual_memory().available / 1e6) < (needed := 1.2 * CROP_MB * records):
        raise SystemExit(
            f"benchmarks.run: --records {records}: needs {needed:,.0f} MB of page cache, "
            f"{free:,.0f} MB are free: use fewer"
        )
    dataset, folder = make_dataset(work, records), work / "dataset"
    if alone:
        threads = min(4, max(2, len(os.sched_getaffinity(0)) // 4))  # 4, as in the target
        return Benchmark(describe(dataset, threads=threads), gpu_cases(folder, seconds, threads))
    (work / "segments").mkdir()
    for row in range(len(dataset)):
        mv = dataset.read(row) / 1000.0
        for half in range(2):
            write_segment(
                work / "segments" / f"{row:06d}_{half}.mat",
                mv[:, HALF * half : HALF * (half + 1)],
                row,
            )
    for _ in range(2):  # the kernel marks a page as active at the second read
        for path in work.rglob("*"):
            if path.is_file():
                path.read_bytes()
    return Benchmark(describe(dataset), cases(folder, work / "segments", seconds))


def cases(dataset: Path, segments: Path, seconds: float) -> dict[str, Case]:
    every: dict[str, Case] = {}

    def add(
        stage: str, backend: str, batch: int = 256, threads: int = 1, first: bool = False
    ) -> None:
        name = (
            f"{stage}: {BACKENDS[backend]}, batch {batch}"
            + f", {threads} threads" * (threads > 1)
            + FIRST * first
        )
        every[name] = (ours, (dataset, backend, stage, batch, threads, seconds, "cpu", first))

    for stage in STAGES:
        for backend in BACKENDS if stage != "authors_physio3+RLM" else ("torch",):
            add(stage, backend)
        if stage != "crop":
            add(stage, "torch", first=True)
    for batch, threads in ((64, 1), (64, 2), (256, 2), (1024, 1), (1024, 2)):
        add("RLM", "torch", batch, threads)
    for stage in PEER_NOISE:
        name = f"{stage}: re-creation of fairseq-signals' loader"
        for workers, first in ((0, False), (0, True), (2, False)):
            arguments = (fairseq_like, segments, stage, 64, workers, seconds, first)
            every[f"{name}, {workers} workers" + FIRST * first] = (peer, arguments)
    for workers in (0, 2):
        name = f"RLM: webdataset and DataLoader, {workers} workers"
        every[name] = (peer, (webdataset_loader, dataset, "RLM", 256, workers, seconds))
    every["RLM: fn.readers.webdataset, torch"] = (
        peer,
        (dali_reader, dataset, "RLM", 256, 2, seconds),
    )
    return every


def gpu_cases(dataset: Path, seconds: float, threads: int) -> dict[str, Case]:
    """Our loader on a GPU; the batch sizes of the targets first."""
    backends = [
        "torch",
        *(["dali"] if find_spec("nvidia") and find_spec("nvidia.dali") else []),
    ]
    swept = [("RLM", batch) for batch in (256, 1024, 64)] + [("physio3+RLM", 256)]
    return {
        f"{stage}: {backend} to cuda, batch {batch}": (
            ours,
            (dataset, backend, stage, batch, threads, seconds, "cuda"),
        )
        for stage, batch in swept
        for backend in backends
    }


def pumped(stream: Any, batch: int, crops: int, seconds: float, first: bool = False) -> Stream:
    """Yield how many crops were loaded in `seconds`, in the first epoch (`first`) or in later
    ones."""
    epoch, end = crops // batch, time.perf_counter() + WARM_S
    done = sum(1 for _ in islice(stream, FILLED))
    while not first and done < epoch + FILLED and time.perf_counter() < end:
        next(stream)
        done += 1
    units = 0.0
    while not (yield units):
        end, units = time.perf_counter() + seconds, 0.0
        while time.perf_counter() < end and not (first and done == epoch):
            next(stream)
            done, units = done + 1, units + batch
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def one_thread() -> None:
    """Apply the thread and malloc settings of our loader to all loaders."""
    torch.set_num_threads(1)
    keep_freed_memory()


def ours(
    dataset: Path,
    backend: str,
    stage: str,
    batch: int,
    threads: int,
    seconds: float,
    device: str = "cpu",
    first: bool = False,
) -> Stream:
    from omnilead.engine.data.augment import AugmentConfig
    from omnilead.engine.data.loader import Loader, LoaderConfig

    one_thread()
    noise, rlm = STAGES[stage]
    augment = AugmentConfig(rlm=rlm, noise=noise)  # type: ignore[arg-type]
    config = LoaderConfig(backend=backend, batch_crops=batch, augment=augment, threads=threads)
    opened = Dataset.open(str(dataset))
    loader = Loader(config, (opened,), torch.device(device))
    yield from pumped(iter(loader), batch, len(opened), seconds, first)
    loader.close()


def peer(
    make: Any,
    place: Path,
    stage: str,
    batch: int,
    workers: int,
    seconds: float,
    first: bool = False,
) -> Stream:
    one_thread()
    crops = (
        len(list(place.iterdir())) // 2 if make is fairseq_like else len(Dataset.open(str(place)))
    )
    yield from pumped(make(place, stage, batch, workers), batch, crops, seconds, first)


def fairseq_like(segments: Path, stage: str, batch: int, workers: int) -> Iterator[Any]:
    files = sorted(segments.iterdir())
    data = FairseqLike(list(zip(files[::2], files[1::2], strict=True)), PEER_NOISE[stage])
    return epochs(data, batch, workers, shuffle=True, collate_fn=_collate)


class FairseqLike(torch.utils.data.Dataset[torch.Tensor]):
    """An item is a pair of segments; each segment is augmented separately."""

    def __init__(self, pairs: list[tuple[Path, Path]], noise: tuple[str, ...]) -> None:
        self.pairs, self.noise = pairs, noise

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> torch.Tensor:
        segments = []
        for path in self.pairs[index]:
            feats = torch.from_numpy(loadmat(path)["feats"].astype(np.float64))
            for name in self.noise:
                feats = feats + torch.from_numpy(NOISE[name](feats.shape))
            segments.append(feats.float() * (torch.rand(12) >= 0.5)[:, None])
        return torch.stack(segments)


def _powerline(shape: tuple[int, ...]) -> np.ndarray:
    t = np.arange(shape[1]) / 500
    angle = 2 * np.pi * t * np.random.choice([50, 60]) + np.random.uniform(0, 2 * np.pi)
    return np.tile(np.random.uniform(0, 0.5) * np.cos(angle), (shape[0], 1))


def _emg(shape: tuple[int, ...]) -> np.ndarray:
    noise: np.ndarray = np.random.normal(0, np.random.uniform(0, 0.5, (shape[0], 1)), shape)
    return noise


def _wander(shape: tuple[int, ...]) -> np.ndarray:
    t, noise = np.arange(shape[1]) / 500, np.zeros(shape[1])
    for _ in range(3):
        f, phase = np.random.uniform(0.01, 0.2), np.random.uniform(0, 2 * np.pi)
        noise += np.random.uniform(0, 0.5) * np.cos(2 * np.pi * t * f + phase)
    return np.random.normal(1, 0.5, (shape[0], 1)) * noise


def _shift(shape: tuple[int, ...]) -> np.ndarray:
    noise = np.zeros(shape)
    length = int(np.clip(np.random.normal(0.2 * shape[1], 0.04 * shape[1]), 1, shape[1]))
    start = np.random.randint(0, shape[1] - length + 1)
    noise[:, start : start + length] = np.random.choice([-1, 1], (shape[0], 1)) - np.random.uniform(
        0, 0.5
    )
    return noise


NOISE = {"powerline": _powerline, "emg": _emg, "wander": _wander, "shift": _shift}


def _collate(pairs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    source = torch.cat(pairs)
    return {"source": source, "padding_mask": torch.zeros_like(source, dtype=torch.bool)}


def epochs(data: Any, batch: int, workers: int, **options: Any) -> Iterator[Any]:
    """Endless batches of a DataLoader with persistent workers (spawned, as forked ones print when
    they exit)."""
    if workers:
        options |= {
            "persistent_workers": True,
            "multiprocessing_context": "spawn",
            "worker_init_fn": _start_worker,
        }
    loader = torch.utils.data.DataLoader(
        data, batch, num_workers=workers, drop_last=True, **options
    )
    while True:
        empty = True
        for each in loader:
            yield each
            empty = False
        if empty:  # otherwise this would loop forever
            raise CaseError(f"too few crops for a batch of {batch}: use more --records")


def _start_worker(worker: int) -> None:
    keep_freed_memory()


def webdataset_loader(
    dataset: Path, stage: str, batch: int, workers: int
) -> Iterator[torch.Tensor]:
    """Read the shards with webdataset and its usual shuffle buffer; RLM in torch on the batch."""
    import webdataset

    shards = [
        str(dataset / "shards" / entry["name"]) for entry in Dataset.open(str(dataset)).shards
    ]
    stream = webdataset.WebDataset(shards, shardshuffle=100, seed=0).shuffle(1000).map(_decode)
    return map(_halves_with_rlm, epochs(stream, batch, workers))


def _decode(sample: dict[str, bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(sample["ecg"]), dtype=torch.int16).reshape(CROP_SHAPE)


def dali_reader(dataset: Path, stage: str, batch: int, threads: int) -> Iterator[torch.Tensor]:
    """Read the shards with `fn.readers.webdataset` on the CPU and its shuffle buffer; RLM in torch
    on the batch."""
    from nvidia import dali

    shards = [
        str(dataset / "shards" / entry["name"]) for entry in Dataset.open(str(dataset)).shards
    ]

    @dali.pipeline_def(batch_size=batch, num_threads=threads, device_id=None)
    def pipeline() -> Any:
        return dali.fn.readers.webdataset(
            paths=shards,
            index_paths=[path.removesuffix("tar") + "idx" for path in shards],
            ext=["ecg"],
            dtypes=[dali.types.INT16],
            missing_component_behavior="error",
            random_shuffle=True,
            initial_fill=1024,
        )

    running = pipeline()
    running.build()
    while True:
        (crops,) = running.run()
        yield _halves_with_rlm(torch.from_dlpack(crops.as_tensor()).reshape(-1, *CROP_SHAPE))


def _halves_with_rlm(crops: torch.Tensor) -> torch.Tensor:
    mv = (
        crops.reshape(len(crops), 12, 2, HALF).permute(0, 2, 1, 3).reshape(-1, 12, HALF).float()
        / 1000
    )
    return mv.mul_((torch.rand(len(mv), 12, 1) >= 0.5).float())
