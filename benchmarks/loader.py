"""Measure how fast a dataset becomes batches: crops per second and per CPU-second, for each of our backends
and augmentations, and for other loaders on the same crops.

The dataset is synthetic and in the page cache. Every loader ends with float32 millivolts [2B, 12,
2500] in torch. On a CPU all have one torch thread and the same malloc settings, as loaders run next
to a training step. Our loader verifies each crc32c in the first epoch, which is not timed. Other
loaders verify nothing, and are not measured to a GPU. Each library stores the int16 crops in its own
format, in the fastest way that was found, and hands them one by one to the same conversion.

`fairseq_like_batches` is our re-creation of fairseq-signals' path (one float64 .mat file per 5 s segment,
scipy.io.loadmat, numpy augmentation of one segment at a time, a padding mask of the data's shape);
it is not their code.
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

# Imported here, because within __getitem__ every worker process would spend time on the import
from scipy.io import loadmat

from benchmarks.ingest import write_segment
from benchmarks.libraries import LIBRARIES, open_npy, write_npy
from benchmarks.measure import CaseError, Cases, Result, call_fresh, describe_input, make_dataset
from omnilead.data_tools.dataset import CROP_SHAPE, Dataset
from omnilead.data_tools.io.terminal import keep_freed_memory

# {augmentation: (the noise of our loader, the noise of the re-created loader)}. After the noise, half of
# the leads are masked at random
NOISE_OF_STAGE = {"RLM": ("", ()), "physio3+RLM": ("physio3", ("powerline", "emg", "wander"))}
BACKENDS = {"torch": "torch", "dali": "dali on the CPU"}
# Batch sizes. Lead masking alone is measured with all of them, noise only with the first
BATCH_SIZES = {"cpu": (256,), "cuda": (256, 1024, 64)}
THREADS = {"cpu": 1, "cuda": 4}
# Disk space of a crop in all formats together: a tar shard, four other formats, two float64 .mat files
CROP_MB_IN_ALL_FORMATS = 5 * 0.12 + 0.48
PREFETCHED_BATCHES = 4  # how many batches our loader prepares ahead
# The warm-up is the first epoch, in which our loader verifies checksums. It ends after this time at the
# latest: where an epoch takes longer, checksums take little of the time
WARM_UP_LIMIT_S = 6.0
HALF_SAMPLES = 2500
LOWER_LIMIT_CASE = "RLM: the least: reading and converting, in any order, without masks"


def prepare_input_and_cases(work: Path, options: argparse.Namespace) -> tuple[Result, Cases]:
    records, seconds, device = options.records or 10_000, options.seconds or 3, options.device
    free, needed = psutil.virtual_memory().available / 1e6, 1.2 * CROP_MB_IN_ALL_FORMATS * records
    if free < needed:
        raise CaseError(
            f"--records {records}: needs {needed:,.0f} MB of page cache, but {free:,.0f} MB are free: "
            "use fewer records"
        )
    dataset, folder, segments = make_dataset(work, records), work / "dataset", work / "segments"
    threads = THREADS[device]
    cases: Cases = {}
    for stage in NOISE_OF_STAGE:
        for batch in BATCH_SIZES[device] if stage == "RLM" else BATCH_SIZES[device][:1]:
            for backend, name in BACKENDS.items():
                name = f"{backend} to cuda" if device == "cuda" else name
                case_arguments = (folder, stage, backend, batch, threads, seconds, device)
                cases[f"{stage}: {name}, batch {batch}"] = (
                    count_crops_of_our_loader,
                    case_arguments,
                )
    if device == "cuda":
        return describe_input(dataset, threads=threads), cases
    cases[LOWER_LIMIT_CASE] = (
        count_crops_of_other_loader,
        (read_and_convert, folder, "", len(dataset), 256, seconds),
    )
    segments.mkdir()
    for row in range(len(dataset)):
        write_halves(dataset, row, segments)
    for stage in NOISE_OF_STAGE:
        name = f"{stage}: re-creation of fairseq-signals' loader, 0 workers"
        cases[name] = (
            count_crops_of_other_loader,
            (fairseq_like_batches, segments, stage, len(dataset), 64, seconds),
        )
    for name, (write, _) in LIBRARIES.items():
        place = work / name
        with suppress(CaseError):  # if this fails, the library's case fails, too, and is reported
            call_fresh(write, folder, place)
        arguments = (library_batches, place, name, len(dataset), 256, seconds)
        cases[f"RLM: {name} in a DataLoader"] = (count_crops_of_other_loader, arguments)
        if write is write_npy:
            arguments = (npy_batches, *arguments[1:])
            cases[f"RLM: {name}, converted by batch"] = (count_crops_of_other_loader, arguments)
    # All files are read twice, because the kernel marks a page of its cache as active at the second read
    for _ in range(2):
        for path in work.rglob("*.*"):
            path.read_bytes()
    return describe_input(dataset), cases


def write_halves(dataset: Dataset, row: int, segments: Path) -> None:
    """Writes the two halves of a crop as .mat files for the re-created loader."""
    for half in range(2):
        mv = dataset.read(row)[:, HALF_SAMPLES * half : HALF_SAMPLES * (half + 1)] / 1000.0
        write_segment(segments / f"{row:06d}_{half}.mat", mv, row)


def count_loaded_crops(
    stream: Iterator[Any], batch: int, crops: int, seconds: float
) -> Iterator[float]:
    """Loads the first epoch, then yields repeatedly how many crops were loaded in `seconds`."""
    first, end = crops // batch + PREFETCHED_BATCHES, time.perf_counter() + WARM_UP_LIMIT_S
    for _ in islice(stream, first):
        if time.perf_counter() > end:
            break
    units = 0.0
    while True:
        yield units
        end, units = time.perf_counter() + seconds, 0.0
        while not units or time.perf_counter() < end:
            next(stream)
            units += batch
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def limit_to_one_thread() -> None:
    """Gives this process one torch thread and our malloc settings, so that all loaders have the same."""
    torch.set_num_threads(1)
    keep_freed_memory()


def count_crops_of_our_loader(
    dataset: Path, stage: str, backend: str, batch: int, threads: int, seconds: float, device: str
) -> Iterator[float]:
    from omnilead.engine.data.augmentations import AugmentConfig
    from omnilead.engine.data.config import LoaderConfig
    from omnilead.engine.data.loader import Loader

    limit_to_one_thread()
    augment = AugmentConfig(rlm=0.5, noise=NOISE_OF_STAGE[stage][0])  # type: ignore[arg-type]
    config = LoaderConfig(backend=backend, batch_crops=batch, augment=augment, threads=threads)
    opened = Dataset.open(str(dataset))
    loader = Loader(config, (opened,), torch.device(device), reuse_batches=True)  # as in training
    try:
        yield from count_loaded_crops(iter(loader), batch, len(opened), seconds)
    finally:
        loader.close()


def count_crops_of_other_loader(
    make: Any, place: Path, name: str, crops: int, batch: int, seconds: float
) -> Iterator[float]:
    limit_to_one_thread()
    yield from count_loaded_crops(make(place, name, batch), batch, crops, seconds)


def read_and_convert(dataset: Path, _: str, batch: int) -> Iterator[torch.Tensor]:
    """Does only what no loader can do without: copies int16 samples from the page cache, and writes them as
    float32 to a batch. Crops are picked at random, with known addresses; nothing is verified or masked."""
    opened = Dataset.open(str(dataset))
    shard, offset, _ = opened.addresses
    files = [os.open(dataset / "shards" / entry.name, os.O_RDONLY) for entry in opened.shards]
    crop, x_BLT = torch.empty(CROP_SHAPE, dtype=torch.int16), torch.empty(batch, *CROP_SHAPE)
    memory, places = [crop.numpy()], x_BLT.unbind()
    while True:
        for place, row in zip(places, np.random.randint(len(opened), size=batch), strict=True):
            os.preadv(files[shard[row]], memory, offset[row])
            torch.mul(crop, 1e-3, out=place)
        yield x_BLT


def fairseq_like_batches(segments: Path, stage: str, batch: int) -> Iterator[Any]:
    """Yields batches of the re-creation of fairseq-signals' loader."""
    data = FairseqLike(sorted(segments.iterdir()), NOISE_OF_STAGE[stage][1])
    return endless_batches(data, batch, shuffle=True, collate_fn=_collate)


class FairseqLike(torch.utils.data.Dataset[torch.Tensor]):
    """The re-creation of fairseq-signals' dataset: an item is the two 5 s segments of a crop, each with its own
    augmentation."""

    def __init__(self, files: list[Path], noise: tuple[str, ...]) -> None:
        self.files, self.noise = files, noise

    def __len__(self) -> int:
        return len(self.files) // 2

    def __getitem__(self, index: int) -> torch.Tensor:
        segments = []
        for path in self.files[2 * index : 2 * index + 2]:
            feats = torch.from_numpy(loadmat(path)["feats"].astype(np.float64))
            for name in self.noise:
                feats = feats + torch.from_numpy(NOISE_FUNCTIONS[name](feats.shape))
            segments.append(feats.float() * (torch.rand(12) >= 0.5)[:, None])
        return torch.stack(segments)


def _powerline(shape: tuple[int, ...]) -> np.ndarray:
    t = np.arange(shape[1]) / 500
    angle = 2 * np.pi * t * np.random.choice([50, 60]) + np.random.uniform(0, 2 * np.pi)
    return np.tile(np.random.uniform(0, 0.5) * np.cos(angle), (shape[0], 1))


def _emg(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.normal(0, np.random.uniform(0, 0.5, (shape[0], 1)), shape)


def _wander(shape: tuple[int, ...]) -> np.ndarray:
    t, noise = np.arange(shape[1]) / 500, np.zeros(shape[1])
    for _ in range(3):
        f, phase = np.random.uniform(0.01, 0.2), np.random.uniform(0, 2 * np.pi)
        noise += np.random.uniform(0, 0.5) * np.cos(2 * np.pi * t * f + phase)
    return np.random.normal(1, 0.5, (shape[0], 1)) * noise


NOISE_FUNCTIONS = {"powerline": _powerline, "emg": _emg, "wander": _wander}


def _collate(pairs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    source = torch.cat(pairs)
    return {"source": source, "padding_mask": torch.zeros_like(source, dtype=torch.bool)}


def endless_batches(data: Any, batch: int, **options: Any) -> Iterator[Any]:
    """Yields batches of a DataLoader, epoch after epoch. It has no workers, because without them it loads most
    crops per CPU-second."""
    # Items may be read-only arrays; nothing writes to them
    warnings.filterwarnings("ignore", "The given .* not writable")
    loader = torch.utils.data.DataLoader(data, batch, drop_last=True, **options)
    while True:
        empty = True
        for batch_of_crops in loader:
            yield batch_of_crops
            empty = False
        if empty:  # without an error, this would loop forever
            raise CaseError(
                f"the dataset has too few crops for a batch of {batch}: use more --records"
            )


def library_batches(place: Path, name: str, batch: int) -> Iterator[torch.Tensor]:
    """Yields batches of crops that one of LIBRARIES reads and MaskedHalves converts."""
    data, crop_of = LIBRARIES[name][1](place)
    # The iterable datasets among those of LIBRARIES shuffle their crops themselves
    shuffle = not isinstance(data, torch.utils.data.IterableDataset)
    return endless_batches(data, batch, shuffle=shuffle, collate_fn=MaskedHalves(batch, crop_of))


def npy_batches(place: Path, name: str, batch: int) -> Iterator[torch.Tensor]:
    """Yields batches in the usual way: the DataLoader stacks int16 crops, then torch converts the whole
    batch."""
    data, _ = open_npy(place)
    return map(_halves_with_rlm, endless_batches(data, batch, shuffle=True))


def _halves_with_rlm(crops: torch.Tensor) -> torch.Tensor:
    halves = crops.unflatten(2, (2, HALF_SAMPLES)).transpose(1, 2).flatten(0, 1)
    return halves.float() / 1000 * (torch.rand(len(halves), 12, 1) >= 0.5)


class MaskedHalves:
    """Converts items of a DataLoader to a batch of masked halves, as our loader does: one crop after the other,
    while it is in the core's cache, into a batch whose memory is used again. This is several times as
    fast as converting a whole batch."""

    def __init__(self, batch: int, crop_of: Callable[[Any], torch.Tensor]) -> None:
        self.x_BSLT, self.crop_of = torch.empty(batch, 2, 12, HALF_SAMPLES), crop_of

    def __call__(self, items: list[Any]) -> torch.Tensor:
        factors = (torch.rand(len(items), 2, 12, 1) >= 0.5) * 1e-3
        for item, factor, halves in zip(items, factors, self.x_BSLT, strict=True):
            crop = self.crop_of(item).view(12, 2, HALF_SAMPLES)
            torch.mul(crop.transpose(0, 1), factor, out=halves)
        return self.x_BSLT.flatten(0, 1)
