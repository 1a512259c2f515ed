"""Store crops with other libraries and read them in a shuffled order. `benchmarks.loader` measures these
formats beside ours. Each library is used in the fastest way that was found (LOG.md).

`write_NAME(dataset, place)` stores the crops; `open_NAME(place)` returns a collection for a DataLoader, and
a function from an item of it to the int16 samples of the crop.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnilead.data_tools.dataset import CROP_SHAPE, Dataset

CROP_SAMPLES = CROP_SHAPE[0] * CROP_SHAPE[1]
# (a collection of stored crops, a function that converts an item of it to a tensor)
ItemsAndConverter = tuple[Any, Callable[[Any], torch.Tensor]]


def read_crops(dataset: Path) -> Iterator[np.ndarray]:
    """Yields the samples of all crops of a dataset."""
    opened = Dataset.open(str(dataset))
    return map(opened.read, range(len(opened)))


def crop_from_bytes(name: str, item: Any) -> torch.Tensor:
    return torch.frombuffer(item[name], dtype=torch.int16)


def write_npy(dataset: Path, place: Path) -> None:
    with place.open("wb") as file:
        np.save(file, np.stack(list(read_crops(dataset))))


def open_npy(place: Path) -> ItemsAndConverter:
    return np.load(place, mmap_mode="r"), torch.from_numpy


def write_hugging_face(dataset: Path, place: Path) -> None:
    """Writes crops as bytes, because columns of numbers would take four times as long to read."""
    from datasets import Features, Value
    from datasets.arrow_writer import ArrowWriter

    with ArrowWriter(path=str(place), features=Features(ecg=Value("binary"))) as writer:
        for crop in read_crops(dataset):
            writer.write({"ecg": crop.tobytes()})
        writer.finalize()


def open_hugging_face(place: Path) -> ItemsAndConverter:
    import datasets

    return datasets.Dataset.from_file(str(place)), partial(crop_from_bytes, "ecg")


def read_samples(dataset: str, row: int) -> torch.Tensor:
    return torch.from_numpy(Dataset.open(dataset).read(row).flatten())


def write_litdata(dataset: Path, place: Path) -> None:
    """Writes all crops as one stream of numbers (TokensLoader), because litdata maps such a stream into memory.
    Reading tensors would take 1.7 times as long."""
    import litdata

    litdata.optimize(
        partial(read_samples, str(dataset)),
        list(range(len(Dataset.open(str(dataset))))),
        str(place),
        chunk_bytes="64MB",
        num_workers=1,
        item_loader=litdata.TokensLoader(CROP_SAMPLES),
        verbose=False,
    )


def open_litdata(place: Path) -> ItemsAndConverter:
    import litdata

    blocks = litdata.TokensLoader(CROP_SAMPLES)
    data = litdata.StreamingDataset(str(place), item_loader=blocks, shuffle=True)
    return data, torch.Tensor.contiguous


def write_mosaicml(dataset: Path, place: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(place), columns={"ecg": "ndarray:int16:12,5000"}) as writer:
        for crop in read_crops(dataset):
            writer.write({"ecg": crop})


def open_mosaicml(place: Path) -> ItemsAndConverter:
    from streaming import StreamingDataset

    data = StreamingDataset(local=str(place), shuffle=True, batch_size=256)
    return data, lambda item: torch.from_numpy(item["ecg"])


def link_shards(dataset: Path, place: Path) -> None:
    """Links to our own shards, because webdataset can read them as they are."""
    place.symlink_to(dataset / "shards")


def open_webdataset(place: Path) -> ItemsAndConverter:
    """Opens our shards with webdataset, with a shuffle buffer of 1000 crops."""
    import webdataset

    shards = sorted(map(str, place.glob("*.tar")))
    stream = webdataset.WebDataset(shards, shardshuffle=100, seed=0).shuffle(1000)
    return stream, partial(crop_from_bytes, "ecg")


LIBRARIES = {
    "memory-mapped .npy": (write_npy, open_npy),
    "Hugging Face datasets": (write_hugging_face, open_hugging_face),
    "litdata": (write_litdata, open_litdata),
    "mosaicml-streaming": (write_mosaicml, open_mosaicml),
    "webdataset": (link_shards, open_webdataset),
}
