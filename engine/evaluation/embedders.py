"""Frozen embeddings to compare: of models, of random weights of their architectures, and the mean
beat.

    first, *others = embedders_of(["A=RUN", "hf://org/name"], args)        # args: code, device, precision, seed
    vectors = embedded(first, dataset, rows, 0.0, "12", Path("OUT/parts"))

Files in `folder` are reused if the model's files, the dataset, the leads and the noise are the
same; only missing or damaged crops are computed. Noise is physio4 at a multiple of the paper's
amplitude, the same for all models. B: crops, S: halves.
"""

import io
import json
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from omnilead.data_tools.dataset import Dataset
from omnilead.engine.common import ALL, ConfigError, write_whole
from omnilead.engine.data.augment import PAPER_NOISE, AmplitudeMv, AugmentConfig
from omnilead.engine.data.augmenter import MV_PER_UV, Augmenter, measured_leads, parameters
from omnilead.engine.data.order import Places
from omnilead.engine.evaluation import mean_beat
from omnilead.engine.evaluation.metrics import Array
from omnilead.engine.inference.commands import prepare_model
from omnilead.engine.inference.outputs import progress_bar
from omnilead.engine.inference.predict import CropBatch, dataset_batches, predict
from omnilead.engine.inference.trained_model import NOT_FINITE, TrainedModel
from omnilead.engine.model.folder import config_of
from omnilead.engine.model.input import Input

MEAN_BEAT, RANDOM = "mean beat", "random weights"
ANY = ["encoder", "options", "leads"]
ARCHITECTURE = [
    *ANY,
    "conv",
    "conv_norm",
    "width",
    "layers",
    "heads",
    "ffn",
    "position_kernel",
    "position_groups",
]
BLOCK = 4096  # crops in a file


class Embedder(NamedTuple):
    """Maps segments of 5 s to vectors."""

    name: str
    digest: str
    input: Input
    forward: Callable[[Tensor], Tensor]
    model: TrainedModel | None = None  # None: the mean beat
    random: str = ""  # the name of random weights of the same architecture
    batch: int = 64
    compared: int | None = None  # how many dimensions the cosine uses; None: all


class Vectors(NamedTuple):
    row_B: Array  # crops, ascending
    halves_B: Array
    c_BSD: Array  # zeros where there is no second half

    def of(self, rows: Array) -> "Vectors":
        at = np.searchsorted(self.row_B, rows)
        return Vectors(*(array[at] for array in self))


def embedders_of(models: Sequence[str], args: Namespace) -> list[Embedder]:
    """`models`: folders, or NAME=FOLDER. Random weights follow the first model of their
    architecture; the mean beat is last."""
    found, architectures = dict[str, Embedder](), dict[str, str]()
    for text in models:
        name, place = name_and_place(text)
        if name in found or name in (MEAN_BEAT, RANDOM):
            raise ConfigError(f"--models {text}: the name {name!r} is taken: write NAME={place}")
        model, precision = prepare_model(place, args.device, args.precision, args.code)
        batch = args.batch or (256 if model.device.type == "cuda" else 16)
        digest = f"{model.digest} {precision}"
        architecture = architecture_of(model, precision, args.seed)
        random = f"{RANDOM} of {name}" if architectures else RANDOM
        random = architectures.setdefault(architecture, random)
        found[name] = Embedder(name, digest, model.input, model.pooled, model, random, batch)
        if random not in found:
            drawn, digest = model.untrained(args.seed), sha256(architecture.encode()).hexdigest()
            found[random] = Embedder(
                random, digest, model.input, drawn.pooled, drawn, random, batch
            )
    digest = sha256(Path(mean_beat.__file__).read_bytes()).hexdigest()
    width = 12 * mean_beat.BEAT
    beats = Embedder(MEAN_BEAT, digest, Input(ALL, ALL), _mean_beats, compared=width)
    return [*found.values(), beats]


def name_and_place(text: str) -> tuple[str, str]:
    """The name of a model and its folder, from NAME=FOLDER or FOLDER."""
    name, equals, place = text.partition("=")
    if not equals or "/" in name or Path(text).exists():
        name, place = "", text
    path = Path(place)
    return name or (path.parent.name if path.name == "model" else path.name), place


def architecture_of(model: TrainedModel, precision: str, seed: int) -> str:
    """Models with the same text have the same random weights."""
    config = config_of(model.config)
    names = ANY if config.encoder else ARCHITECTURE
    parts = [getattr(config, name) for name in names]
    return repr([parts, model.input, sorted(model.code.items()), precision, seed])


def _mean_beats(x_RLT: Tensor) -> Tensor:
    return torch.from_numpy(mean_beat.mean_beats(x_RLT.numpy()))


def embedded(
    one: Embedder, dataset: Dataset, rows: Array, noise: float, leads: str, folder: Path
) -> Vectors:
    """The vectors of these crops, ascending; leads that the model is not shown are set to zero."""
    shown = one.input.limited_to(leads)
    job = json.dumps([one.digest, dataset.fingerprint, shown.seen, noise])
    folder = folder / sha256(job.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    rows, kept = np.unique(rows), list(_kept(folder))
    missing = rows
    if kept:
        missing = np.setdiff1d(rows, np.concatenate([part.row_B for part in kept]))
    with progress_bar(len(missing), f" crops, {one.name}, leads {leads}") as bar:
        for start in range(0, len(missing), BLOCK):
            block = missing[start : start + BLOCK]
            part = _embed(one, dataset, block, noise, shown, bar)
            if not np.isfinite(part.c_BSD).all():
                raise ConfigError(f"{one.name}: {NOT_FINITE}")
            np.savez(buffer := io.BytesIO(), **part._asdict())
            write_whole(folder / f"{block[0]:09d}-{len(block)}.npz", buffer.getvalue())
            kept.append(part)
    whole = joined(kept)
    first = np.unique(whole.row_B, return_index=True)[1]
    return Vectors(*(array[first] for array in whole)).of(rows)


def _embed(
    one: Embedder, dataset: Dataset, rows: Array, noise: float, shown: Input, bar: Any
) -> Vectors:
    device = one.model.device if one.model else torch.device("cpu")
    groups = np.split(rows, range(one.batch, len(rows), one.batch))
    batches = dataset_batches(dataset, groups, pin=device.type == "cuda")
    if noise:
        batches = noisy(batches, dataset, noise)
    parts = []
    for batch, y_RD in predict(batches, shown.halves, one.forward, device):
        c_BSD = np.zeros((len(batch.crops), 2, y_RD.shape[1]), np.float32)
        c_BSD[np.arange(2) < batch.halves_B[:, None]] = y_RD
        parts.append(Vectors(batch.crops, batch.halves_B, c_BSD))
        bar.update(len(batch.crops))
    return joined(parts)


def joined(parts: Sequence[Vectors]) -> Vectors:
    return Vectors(*map(np.concatenate, zip(*parts, strict=True)))


def _kept(folder: Path) -> Iterator[Vectors]:
    for path in sorted(folder.glob("*.npz")):
        with (
            suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile),
            np.load(path) as arrays,
        ):
            yield Vectors(*(arrays[name] for name in Vectors._fields))


def noisy(batches: Iterable[CropBatch], dataset: Dataset, strength: float) -> Iterator[CropBatch]:
    amplitude = AmplitudeMv(
        **{kind: strength * getattr(AmplitudeMv(), kind) for kind in PAPER_NOISE}
    )
    config = AugmentConfig(rlm=0.0, noise=PAPER_NOISE, amplitude_mv=amplitude)
    augmenter = Augmenter(config, "halves", 0, torch.device("cpu"))
    measured = measured_leads([dataset])
    for batch in batches:
        zeros = np.zeros(len(batch.crops), np.int64)
        places = Places(zeros, batch.crops, zeros)
        p = parameters(config, "halves", augmenter.seed, places, measured)
        x_BSLT = augmenter(torch.from_numpy(batch.uv_BLT), augmenter.to_device(p)) / MV_PER_UV
        uv_BLT = x_BSLT.round_().clamp_(-32767, 32767).transpose(1, 2).flatten(2).to(torch.int16)
        yield batch._replace(uv_BLT=uv_BLT.numpy())
