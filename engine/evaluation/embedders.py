"""Frozen embeddings to compare: of models, of random weights of their architectures, and of
measurements that need no training.

    first, *others = rows_to_compare(["A=RUN1,RUN2", "hf://org/name"], args)     # args: bench.DEFAULTS
    vectors = embedded(first.members[0], dataset, rows, 0.0, "12", Path("OUT/parts"))

A row has one or more members: runs of several seeds, or draws of random weights, whose scores are
averaged. Files in `folder` are reused if the model's files, the read-out, the dataset, the leads
and the noise are the same; only missing or damaged crops are computed. Noise is physio4 at a
multiple of the paper's amplitude, the same for all models. B: crops, S: windows.
"""

import io
import json
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io.storage import write_whole

from ..data.augmentations import AugmentConfig
from ..data.augmentations.noise import PAPER_NOISE, AmplitudeMv
from ..data.augmenter import MV_PER_UV, Augmenter, measured_leads
from ..data.batches import CropBatch, dataset_batches, predict
from ..data.order import Places
from ..inference.commands import prepare_model
from ..inference.outputs import progress_bar
from ..inference.trained_model import NOT_FINITE, TrainedModel
from ..model import mean_beat
from ..model import readout as readouts
from ..model.folder import config_of
from ..model.input import Input
from ..model.readout import Readout, measures_signal, place_of_mean
from ..settings.errors import ConfigError
from ..settings.leads import ALL
from ..training.metrics import Array
from .boosted import INSTALL, boosted, installed
from .minirocket import MiniRocket
from .probe import Probe, least_squares, linear

RANDOM, MEAN_BEAT, MEASURED = "random weights", "mean beat", "measurements"
BOOSTED, ROCKET = "boosted features", "MiniRocket + ridge"
READERS = {"linear": linear, "boosted": boosted}
ROCKET_HZ = 100.0
ROCKET_CROPS = 64  # that give its thresholds
DRAWS = 5  # of random weights: their scores differ by as much as 0.02
BLOCK = 4096  # crops in a file


class Embedder(NamedTuple):
    """Maps windows to vectors."""

    name: str
    digest: str
    input: Input
    forward: Callable[[Tensor], Tensor]
    model: TrainedModel | None = None  # None: measured in the signal
    batch: int = 64
    compared: slice = slice(None)  # the dimensions by which patients are identified
    precision: str = ""


class Compared(NamedTuple):
    """What is compared, under one name."""

    name: str
    # The scores of the members are averaged; the embeddings within a member are joined. MiniRocket
    # has none before data are known
    members: list[tuple[Embedder, ...]]
    random: str = ""  # the row of random weights of the same architecture
    members_of: str = ""  # the row whose members these are, too; "": its own
    probe: Probe = linear
    identifies: bool = True  # whether patients are identified by it, too

    @property
    def trained(self) -> list[TrainedModel]:
        if self.name == self.random:
            return []
        embedders = chain.from_iterable(self.members)
        return [embedder.model for embedder in embedders if embedder.model]


class Vectors(NamedTuple):
    row_B: Array  # crops, ascending
    halves_B: Array  # how many windows each crop has; halves, unless a model has other windows
    c_BSD: Array  # zeros where there is no such window

    def averaged(self) -> "Vectors":
        """With the mean of each crop's windows as its only one."""
        mean_BD = self.c_BSD.sum(1) / self.halves_B[:, None]
        return Vectors(self.row_B, np.ones_like(self.halves_B), mean_BD[:, None])

    def of(self, rows: Array) -> "Vectors":
        at = np.searchsorted(self.row_B, rows)
        return Vectors(*(array[at] for array in self))


def rows_to_compare(models: Sequence[str], args: Namespace) -> list[Compared]:
    """`models`: folders, NAME=FOLDER, or NAME=FOLDER,FOLDER for runs of several seeds. Random
    weights follow the first model of their architecture; what needs no training is last. Without
    LightGBM, no row is boosted."""
    if args.reader == "boosted" and not installed():
        raise ConfigError(f"--reader boosted: {INSTALL}")
    beat = _measured(MEAN_BEAT, mean_beat.mean_beats, slice(12 * mean_beat.BEAT))
    measured = _measured(MEASURED, mean_beat.measurements)
    rows = [row._replace(probe=READERS[args.reader]) for row in _model_rows(models, measured, args)]
    both = []
    for row in rows:
        if row.trained:
            joined = [(beat, *member) for member in row.members]
            name = f"{MEAN_BEAT} + {row.name}"
            both.append(
                row._replace(
                    name=name, members=joined, random="", members_of=row.name, identifies=False
                )
            )
    untrained = [
        Compared(MEAN_BEAT, [(beat,)]),
        Compared(MEASURED, [(measured,)], identifies=False),
        Compared(ROCKET, [], probe=least_squares, identifies=False),
    ]
    if installed():
        row = Compared(BOOSTED, [(beat, measured)], probe=boosted, identifies=False)
        untrained.append(row)
    return [*rows, *untrained, *both]


def rocket(dataset: Dataset, rows: Array, leads: str) -> Embedder:
    """MiniRocket of these leads, with thresholds from some of these crops."""
    whole = Input(ALL, ALL, fs_hz=ROCKET_HZ)
    shown = whole.limited_to(leads)
    (batch,) = dataset_batches(dataset, [np.unique(rows)[:ROCKET_CROPS]])
    windows_RLT = shown.windows(torch.from_numpy(batch.uv_BLT), batch.halves_B)
    features = MiniRocket(windows_RLT, shown.seen)
    return Embedder(ROCKET, f"{ROCKET} {features.digest}", whole, features)


def _model_rows(models: Sequence[str], measured: Embedder, args: Namespace) -> list[Compared]:
    rows: dict[str, Compared] = {}
    random_of: dict[str, str] = {}  # by architecture, the name of its row of random weights
    for text in models:
        name, folders = name_and_folders(text)
        if name in rows or name in (RANDOM, MEAN_BEAT, MEASURED, BOOSTED, ROCKET):
            raise ConfigError(
                f"--models {text}: the name {name!r} is taken: write NAME={folders[0]}"
            )
        members = [_embedder(name, folder, args) for folder in folders]
        architecture, *others = [architecture_of(member, args) for member in members]
        if len(set(folders)) < len(folders) or set(others) - {architecture}:
            raise ConfigError(
                f"--models {text}: runs of one name must differ in their seed alone: give each a "
                "name of its own"
            )
        model: Any = members[0].model
        random = f"{RANDOM} of {name}" if random_of else RANDOM
        random = random_of.setdefault(architecture, random)
        # The measurements are the same for all models, and made once
        rhythm = (measured,) if "rhythm" in model.readout_of(args.readout) else ()
        rows[name] = Compared(name, [(member, *rhythm) for member in members], random)
        if random not in rows:
            seeds = range(args.seed, args.seed + DRAWS)
            draws = [_drawn(members[0], random, architecture, args, seed) for seed in seeds]
            rows[random] = Compared(random, [(draw, *rhythm) for draw in draws], random)
    return list(rows.values())


def name_and_folders(text: str) -> tuple[str, list[str]]:
    """The name of a model and its folders, from NAME=FOLDER,FOLDER or FOLDER."""
    name, equals, listed = text.partition("=")
    folders = listed.split(",")
    if not equals or "/" in name or Path(text).exists():
        name, listed, folders = "", text, [text]
    if not all(folders):
        raise ConfigError(f"--models {text}: an empty name: write NAME=RUN or NAME=RUN,RUN")
    path = Path(listed)
    name = name or (path.parent.name if path.name == "model" else path.name)
    return name, [listed] if path.exists() else folders


def _embedder(name: str, folder: str, args: Namespace) -> Embedder:
    model, precision = prepare_model(folder, args.device, args.precision, args.code)
    batch = args.batch or (256 if model.device.type == "cuda" else 16)
    embedder = Embedder(name, "", model.input, model, model, batch, precision=precision)
    return reading(embedder, token_parts(model, args))


def reading(embedder: Embedder, readout: Readout) -> Embedder:
    """The same model, read out in another way."""
    model: Any = embedder.model
    return embedder._replace(
        digest=repr([model.digest, embedder.precision, readout, _code(readout)]),
        forward=partial(model.read, readout=readout),
        compared=place_of_mean(readout, model.encoder.width),
    )


def _drawn(like: Any, name: str, architecture: str, args: Namespace, seed: int) -> Embedder:
    """Random weights of the architecture of a model, read out in the same way."""
    readout = token_parts(like.model, args)

    def forward(x_RLT: Tensor) -> Tensor:
        return _untrained(like.model, seed).read(x_RLT, readout)

    drawn: Embedder = like._replace(name=name, digest=f"{architecture} {seed}", forward=forward)
    return drawn


@lru_cache(maxsize=1)  # the paper's model takes 0.4 GB, so one draw at a time
def _untrained(model: TrainedModel, seed: int) -> TrainedModel:
    return model.untrained(seed)


def token_parts(model: TrainedModel, args: Namespace) -> Readout:
    """The read-out without what is measured in the signal."""
    parts = tuple(part for part in model.readout_of(args.readout) if part != "rhythm")
    if not parts:
        raise ConfigError("--readout rhythm: it has nothing of a model: add mean, std or beats")
    return parts


def _measured(
    name: str, measure: Callable[[Array], Array], compared: slice = slice(None)
) -> Embedder:
    def forward(x_RLT: Tensor) -> Tensor:
        return torch.from_numpy(measure(x_RLT.numpy()))

    digest = f"{name} {_code(('rhythm',))}"
    return Embedder(name, digest, Input(ALL, ALL), forward, compared=compared)


def _code(readout: Readout) -> str:
    """Other code may measure other numbers in the signal."""
    if not measures_signal(readout):
        return ""
    files = [Path(str(module.__file__)) for module in (mean_beat, readouts)]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def architecture_of(embedder: Embedder, args: Namespace) -> str:
    """Models with the same text have the same random weights, and the same read-out."""
    model: Any = embedder.model
    config = config_of(model.config)
    parts = [getattr(config, name) for name in config.architecture]
    readout = model.readout_of(args.readout)
    code = sorted(model.code.items())
    return repr([parts, model.input, code, embedder.precision, readout, _code(readout)])


def embedded(
    member: Sequence[Embedder],
    dataset: Dataset,
    rows: Array,
    noise: float,
    leads: str,
    folder: Path,
) -> Vectors:
    """The joined vectors of these crops, ascending; leads that the model is not shown are set to
    zero."""
    parts = [_embedded(embedder, dataset, rows, noise, leads, folder) for embedder in member]
    if len({part.c_BSD.shape[1] for part in parts}) > 1:
        parts = [part.averaged() for part in parts]
    c_BSD = np.concatenate([part.c_BSD for part in parts], 2)
    return parts[0]._replace(c_BSD=c_BSD)


def _embedded(
    embedder: Embedder, dataset: Dataset, rows: Array, noise: float, leads: str, folder: Path
) -> Vectors:
    shown = embedder.input.limited_to(leads)
    job = json.dumps([embedder.digest, dataset.fingerprint, shown.seen, noise])
    folder = folder / sha256(job.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.unique(rows)
    kept = list(_kept(folder))
    missing = np.setdiff1d(rows, joined(kept).row_B) if kept else rows
    with progress_bar(len(missing), f" crops, {embedder.name}, leads {leads}") as bar:
        for start in range(0, len(missing), BLOCK):
            block = missing[start : start + BLOCK]
            part = _embed(embedder, dataset, block, noise, shown, bar)
            if not np.isfinite(part.c_BSD).all():
                raise ConfigError(f"{embedder.name}: {NOT_FINITE}")
            buffer = io.BytesIO()
            np.savez(buffer, **part._asdict())
            write_whole(folder / f"{block[0]:09d}-{len(block)}.npz", buffer.getvalue())
            kept.append(part)
    whole = joined(kept)
    first = np.unique(whole.row_B, return_index=True)[1]
    return Vectors(*(array[first] for array in whole)).of(rows)


def _embed(
    embedder: Embedder, dataset: Dataset, rows: Array, noise: float, shown: Input, bar: Any
) -> Vectors:
    device = embedder.model.device if embedder.model else torch.device("cpu")
    groups = np.split(rows, range(embedder.batch, len(rows), embedder.batch))
    batches = dataset_batches(dataset, groups, pin=device.type == "cuda")
    if noise:
        batches = noisy(batches, dataset, noise)
    parts = []
    for batch, y_RD in predict(batches, shown.windows, embedder.forward, device):
        windows, windows_B = shown.count(), shown.count(batch.halves_B)
        c_BSD = np.zeros((len(batch.crops), windows, y_RD.shape[1]), np.float32)
        c_BSD[np.arange(windows) < windows_B[:, None]] = y_RD
        parts.append(Vectors(batch.crops, windows_B, c_BSD))
        bar.update(len(batch.crops))
    return joined(parts)


def joined(parts: Sequence[Vectors]) -> Vectors:
    return Vectors(*map(np.concatenate, zip(*parts, strict=True)))


def _kept(folder: Path) -> Iterator[Vectors]:
    for path in sorted(folder.glob("*.npz")):
        with (
            suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile),
            open(path, "rb") as file,  # numpy would leave that of a damaged archive open
            np.load(file) as arrays,
        ):
            yield Vectors(*(arrays[name] for name in Vectors._fields))


def noisy(batches: Iterable[CropBatch], dataset: Dataset, strength: float) -> Iterator[CropBatch]:
    paper = AmplitudeMv()
    amplitudes = {kind: strength * getattr(paper, kind) for kind in PAPER_NOISE}
    config = AugmentConfig(rlm=0.0, noise=PAPER_NOISE, amplitude_mv=AmplitudeMv(**amplitudes))
    cpu, measured = torch.device("cpu"), measured_leads([dataset])
    augmenter = Augmenter(config, "halves", 0, cpu, measured)
    for batch in batches:
        zeros = np.zeros(len(batch.crops), np.int64)
        places = Places(zeros, batch.crops, zeros)
        p = augmenter.to_device(augmenter.parameters(places))
        x_BSLT = augmenter(torch.from_numpy(batch.uv_BLT), p) / MV_PER_UV
        x_BSLT = x_BSLT.round_().clamp_(-32767, 32767)
        uv_BLT = x_BSLT.transpose(1, 2).flatten(2).to(torch.int16)
        yield batch._replace(uv_BLT=uv_BLT.numpy())
