"""Crops to a device: each backend of the loader at several batch sizes, alone on the machine, without peers.

    python -m benchmarks.run loader --device cuda

Float32 millivolts [B, 2, 12, 2500] on the device, with random lead masking, and once with noise. Files are in the page cache.
"""

from collections.abc import Generator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.loader import STAGES
from benchmarks.measure import Case, timed
from data_tools.dataset import Dataset

BATCHES = (64, 256, 1024)
COUNTED, WARM_UP = 40, 4  # batches


def cases(dataset: Path, device: str, threads: int, batches: Sequence[int] = BATCHES) -> dict[str, Case]:
    backends = ["torch", "resident", *(["dali"] if find_spec("nvidia") and find_spec("nvidia.dali") else [])]
    found: dict[str, Case] = {}
    for backend in backends:
        for stage, sizes in (("RLM", batches), ("physio3+RLM", batches[1:2])):
            for batch in sizes:
                found[f"{stage}: {backend} to {device}, batch {batch}"] = (
                    feed,
                    (dataset, device, backend, stage, batch, threads),
                )
    return found


def alone(name: str, case: Case, dataset: Path, threads: int, repeats: int) -> dict[str, Any]:
    """One case in this process, as a part of a record."""
    opened = Dataset.open(str(dataset))
    given = {"archive": "synthetic", "crops": len(opened), "dataset": opened.fingerprint, "threads": threads}
    return {"input": given, "results": {name: timed(case, repeats)}}


def feed(dataset: Path, device: str, backend: str, stage: str, batch: int, threads: int) -> Generator[float, bool, None]:
    import torch

    from engine.data.augment import AugmentConfig
    from engine.data.loader import Loader, LoaderConfig

    torch.set_num_threads(1)
    noise, rlm = STAGES[stage]
    augment = AugmentConfig(rlm=rlm, noise=noise)  # type: ignore[arg-type]
    config = LoaderConfig(backend=backend, batch_crops=batch, threads=threads, augment=augment)  # type: ignore[arg-type]
    loader = Loader(config, (Dataset.open(str(dataset)),), torch.device(device))
    stream, counted = iter(loader), WARM_UP
    units = 0.0
    while True:
        for _ in islice(stream, counted):
            pass
        if device == "cuda":
            torch.cuda.synchronize()
        if (yield units):
            loader.close()
            return
        counted, units = COUNTED, float(COUNTED * batch)
