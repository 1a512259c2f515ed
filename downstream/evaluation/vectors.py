"""Computes the vectors of crops, by a model or by measuring the signal, and caches them in files.

    vectors = cached_vectors(embedder, data, rows, "12", Path("OUT/parts"))
    vectors.take(rows).c_BSD

Files in the folder are reused if the model's files, the read-out, the dataset and the leads are the
same; only missing or damaged crops are computed. B: crops, S: windows, D: width.
"""

import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io.storage import write_whole
from omnilead.engine.data.batches import dataset_batches, predict
from omnilead.engine.data.datasets import Datasets
from omnilead.engine.model.input import Input
from omnilead.engine.settings.errors import ConfigError, Flag

from ..inference.outputs import progress_bar
from ..inference.trained_model import NOT_FINITE_MESSAGE, TrainedModel
from ..tasks.metrics import Array

CROPS_PER_FILE = 4096  # at most this many crops are saved in a file


class Embedder(NamedTuple):
    """A function that maps windows to vectors, with the input that it needs and a digest that names
    it in the cache."""

    name: str
    digest: str
    input: Input
    forward: Callable[[Tensor], Tensor]
    model: TrainedModel | None = None  # None if `forward` measures the signal without a model
    batch: int = 64
    identity_dims: slice = slice(None)  # the dimensions that patients are identified by
    precision: str = ""

    @property
    def trained_model(self) -> TrainedModel:
        """Returns the model; AssertionError if the embedder has none."""
        assert self.model, f"{self.name} is measured in the signal"
        return self.model


class Vectors(NamedTuple):
    """The vectors of all windows of some crops."""

    row_B: Array  # numbers of the crops, ascending
    # Number of windows of each crop. A window is a half of 5 s, unless the model takes windows of
    # another length
    windows_B: Array
    c_BSD: Array  # the vectors, with zeros for windows that a crop lacks

    def take(self, rows: Array) -> "Vectors":
        """Returns the vectors of these crops, which must be among those here."""
        positions = np.searchsorted(self.row_B, rows)
        return Vectors(*(array[positions] for array in self))


def cached_vectors(
    embedder: Embedder, data: Datasets, rows: Array, leads: str, folder: Path
) -> Vectors:
    """Returns the vectors of these crops, sorted by crop. Leads that are not in `leads` are zero.
    Computes only those that the folder lacks, and saves them there. Each dataset has files of its
    own, so that they can be reused when it is combined with others."""
    parts = []
    rows = np.unique(rows)
    for dataset, begin, rows_of_dataset in zip(
        data.all, data.first_rows, data.rows_by_dataset(rows), strict=True
    ):
        if len(rows_of_dataset):
            part = _cached_vectors_of(embedder, dataset, rows_of_dataset, leads, folder)
            parts.append(part._replace(row_B=part.row_B + begin))
    return concatenate_vectors(parts)


def _cached_vectors_of(
    embedder: Embedder, dataset: Dataset, rows: Array, leads: str, folder: Path
) -> Vectors:
    limited_input = embedder.input.limited_to(leads)
    job = json.dumps([embedder.digest, dataset.fingerprint, limited_input.seen_leads])
    folder = folder / sha256(job.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    saved = list(_saved_vectors(folder))
    missing = np.setdiff1d(rows, concatenate_vectors(saved).row_B) if saved else rows
    with progress_bar(len(missing), f" crops, {embedder.name}, leads {leads}") as bar:
        for start in range(0, len(missing), CROPS_PER_FILE):
            block = missing[start : start + CROPS_PER_FILE]
            part = _embed_crops(embedder, dataset, block, limited_input, bar)
            if not np.isfinite(part.c_BSD).all():
                raise ConfigError(f"{embedder.name}: {NOT_FINITE_MESSAGE}")
            buffer = io.BytesIO()
            np.savez(buffer, **part._asdict())
            write_whole(folder / f"{block[0]:09d}-{len(block)}.npz", buffer.getvalue())
            saved.append(part)
    vectors = concatenate_vectors(saved)
    first = np.unique(vectors.row_B, return_index=True)[1]
    return Vectors(*(array[first] for array in vectors)).take(rows)


def refuse_foreign_files(folder: Path) -> None:
    """Raises ConfigError if the folder holds anything but files of `cached_vectors`, so that
    nothing else is lost when the folder is removed after use."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if folder.is_file():
        names = [folder.name]
    for name in names:
        if not re.fullmatch("[0-9a-f]{24}", name):
            raise ConfigError(
                f"{folder}: only saved embeddings may be in this folder, but it has {name}: choose another ",
                Flag("--out"),
                ", or move what is there",
            )


def _embed_crops(
    embedder: Embedder, dataset: Dataset, rows: Array, limited_input: Input, bar: Any
) -> Vectors:
    device = embedder.model.device if embedder.model else torch.device("cpu")
    groups = np.split(rows, range(embedder.batch, len(rows), embedder.batch))
    batches = dataset_batches(dataset, groups, pin=device.type == "cuda")
    parts = []
    for batch, y_RD in predict(batches, limited_input.windows, embedder.forward, device):
        windows, windows_B = (
            limited_input.count_windows(),
            limited_input.count_windows(batch.halves_B),
        )
        c_BSD = np.zeros((len(batch.crops), windows, y_RD.shape[1]), np.float32)
        c_BSD[np.arange(windows) < windows_B[:, None]] = y_RD
        parts.append(Vectors(batch.crops, windows_B, c_BSD))
        bar.update(len(batch.crops))
    return concatenate_vectors(parts)


def concatenate_vectors(parts: Sequence[Vectors]) -> Vectors:
    return Vectors(*map(np.concatenate, zip(*parts, strict=True)))


def _saved_vectors(folder: Path) -> Iterator[Vectors]:
    """Yields the vectors of each readable file in the folder."""
    for path in sorted(folder.glob("*.npz")):
        with (
            suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile),
            # Opened here, because numpy would leave a damaged archive open
            open(path, "rb") as file,
            np.load(file) as arrays,
        ):
            yield Vectors(*(arrays[name] for name in Vectors._fields))
