"""Other ways to bring crops to a model, from the same dataset to the same result: float32 millivolts [2B, 12, 2500], augmented.

`fairseq_like` is our re-creation of fairseq-signals' path (one .mat file of float64 a 5 s segment, scipy.io.loadmat,
augmentation of one segment at a time in numpy, a padding mask of the data's own shape); it is not their code, and named so in
every record.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.io import loadmat  # here: an import in __getitem__ would be paid for by every worker

from benchmarks.measure import CaseError
from data_tools.cli import keep_freed_memory
from data_tools.dataset import CROP_SHAPE, Dataset

HALF = 2500


def write_segments(dataset: Dataset, out: Path) -> list[tuple[Path, Path]]:
    """Two float64 .mat files a crop, as fairseq-signals' preprocessing leaves them. -> their paths, in the dataset's order."""
    from scipy.io import savemat

    out.mkdir()
    pairs = []
    for row in range(len(dataset)):
        mv = dataset.read(row) / 1000.0
        pair = (out / f"{row:06d}_0.mat", out / f"{row:06d}_1.mat")
        for half, path in enumerate(pair):
            feats = mv[:, HALF * half : HALF * (half + 1)]
            savemat(
                path,
                {"feats": feats, "curr_sample_rate": 500, "patient_id": row, "label": np.zeros(26, bool), "age": 0, "sex": 1},
            )
        pairs.append(pair)
    return pairs


class FairseqLike(torch.utils.data.Dataset[torch.Tensor]):
    """One item is one pair of segments; each segment is augmented on its own."""

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
    noise: np.ndarray = np.random.uniform(0, 0.5) * np.cos(
        2 * np.pi * t * np.random.choice([50, 60]) + np.random.uniform(0, 2 * np.pi)
    )
    return np.tile(noise, (shape[0], 1))


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
    noise[:, start : start + length] = np.random.choice([-1, 1], (shape[0], 1)) - np.random.uniform(0, 0.5)
    return noise


NOISE = {"powerline": _powerline, "emg": _emg, "wander": _wander, "shift": _shift}


def _collate(pairs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    source = torch.cat(pairs)
    return {"source": source, "padding_mask": torch.zeros_like(source, dtype=torch.bool)}


def epochs(data: Any, batch: int, workers: int, **options: Any) -> Iterator[Any]:
    """A DataLoader's batches without end, from the same workers in all epochs; forked ones die noisily when they end. None at
    all would be no end, either."""
    if workers:
        options |= {"persistent_workers": True, "multiprocessing_context": "spawn", "worker_init_fn": _settle}
    loader = torch.utils.data.DataLoader(data, batch, num_workers=workers, drop_last=True, **options)
    while True:
        empty = True
        for each in loader:
            yield each
            empty = False
        if empty:
            raise CaseError(f"too few crops for a batch of {batch}: ask for more --records")


def _settle(worker: int) -> None:
    keep_freed_memory()


def fairseq_like(pairs: list[tuple[Path, Path]], noise: tuple[str, ...], batch: int, workers: int) -> Iterator[Any]:
    return epochs(FairseqLike(pairs, noise), batch, workers, shuffle=True, collate_fn=_collate)


def webdataset_loader(dataset: Dataset, batch: int, workers: int) -> Iterator[torch.Tensor]:
    """The shards through webdataset with its usual shuffle buffer, RLM in torch on the batch."""
    import webdataset

    urls = [f"{dataset.root.url}/shards/{entry['name']}" for entry in dataset.shards]
    stream = webdataset.WebDataset(urls, shardshuffle=100, seed=0).shuffle(1000).map(_decode)
    return map(_halves_with_rlm, epochs(stream, batch, workers))


def _decode(sample: dict[str, bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(sample["ecg"]), dtype=torch.int16).reshape(CROP_SHAPE)


def dali_reader(dataset: Dataset, batch: int, threads: int) -> Iterator[torch.Tensor]:
    """`fn.readers.webdataset` on the CPU with its shuffle buffer, RLM in torch on the batch."""
    from nvidia import dali

    shards = [f"{dataset.root.url}/shards/{entry['name']}" for entry in dataset.shards]

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


def write_mosaic(dataset: Dataset, out: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(out), columns={"ecg": "bytes"}, compression=None) as writer:
        for row in range(len(dataset)):
            writer.write({"ecg": dataset.read(row).tobytes()})


def mosaic_loader(place: Path, batch: int, workers: int) -> Iterator[torch.Tensor]:
    """mosaicml-streaming, shuffled, RLM in torch on the batch."""
    from streaming import StreamingDataset

    class Crops(StreamingDataset):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.frombuffer(bytearray(super().__getitem__(index)["ecg"]), dtype=torch.int16).reshape(CROP_SHAPE)

    stream = Crops(local=str(place), shuffle=True, batch_size=batch)
    return map(_halves_with_rlm, epochs(stream, batch, workers))


def _halves_with_rlm(crops: torch.Tensor) -> torch.Tensor:
    mv = crops.reshape(len(crops), 12, 2, HALF).permute(0, 2, 1, 3).reshape(-1, 12, HALF).float() / 1000
    return mv.mul_((torch.rand(len(mv), 12, 1) >= 0.5).float())
