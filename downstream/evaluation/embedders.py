"""Frozen embeddings to compare: of models, of random weights of their architectures, and of
measurements that need no training.

    first, *others = rows_to_compare(["A=RUN", "hf://org/name"], args)     # args: the options of downstream.bench
    first.draws[0][0].forward(x_RLT)
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omnilead.data_tools.ecg import mean_beat
from omnilead.engine.model.folder import config_of
from omnilead.engine.model.input import Input
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.leads import ALL

from ..inference.commands import prepare_model
from ..inference.trained_model import TrainedModel
from ..tasks import readout as readouts
from ..tasks.metrics import Array
from ..tasks.readout import Readout, measures_signal, place_of_mean
from .boosted import INSTALL, boosted, installed
from .probe import Fit, linear
from .vectors import Embedder

RANDOM, MEAN_BEAT, MEASURED = "random weights", "mean beat", "measurements"
BOOSTED = "boosted features"
READERS = {"linear": linear, "boosted": boosted}
DRAWS = 5  # of random weights: their scores differ by as much as 0.02


class Compared(NamedTuple):
    """What is compared, under one name."""

    name: str
    # Each draw is a list of embedders, whose vectors are joined. Random weights are drawn several
    # times, and the scores averaged
    draws: list[list[Embedder]]
    random: str = ""  # the row of random weights of the same architecture
    fit: Fit = linear
    identifies: bool = True  # whether patients are identified by it, too

    @property
    def model(self) -> TrainedModel | None:
        """None for a baseline."""
        if self.name == self.random:
            return None
        models = [embedder.model for draw in self.draws for embedder in draw if embedder.model]
        return models[0] if models else None


def rows_to_compare(models: Sequence[str], args: Namespace) -> list[Compared]:
    """`models`: folders, or NAME=FOLDER. Random weights follow the first model of their
    architecture; what needs no training is last. Without LightGBM, no row is boosted."""
    if args.reader == "boosted" and not installed():
        raise ConfigError(f"--reader boosted: {INSTALL}")
    beat = _measured(MEAN_BEAT, mean_beat.mean_beats, slice(12 * mean_beat.BEAT))
    measured = _measured(MEASURED, mean_beat.measurements)
    rows = [row._replace(fit=READERS[args.reader]) for row in _model_rows(models, measured, args)]
    untrained = [
        Compared(MEAN_BEAT, [[beat]]),
        Compared(MEASURED, [[measured]], identifies=False),
    ]
    if installed():
        row = Compared(BOOSTED, [[beat, measured]], fit=boosted, identifies=False)
        untrained.append(row)
    with_mean_beat = []
    for row in rows:
        if row.model:
            name, draws = f"{MEAN_BEAT} + {row.name}", [[beat, *row.draws[0]]]
            with_mean_beat.append(Compared(name, draws, fit=row.fit, identifies=False))
    return [*rows, *untrained, *with_mean_beat]


def _model_rows(models: Sequence[str], measured: Embedder, args: Namespace) -> list[Compared]:
    rows: dict[str, Compared] = {}
    random_of: dict[str, str] = {}  # by architecture, the name of its row of random weights
    for text in models:
        name, folder = name_and_folder(text)
        if name in rows or name in (RANDOM, MEAN_BEAT, MEASURED, BOOSTED):
            raise ConfigError(f"--models {text}: the name {name!r} is taken: write NAME={folder}")
        embedder = embedder_of(name, folder, args)
        architecture = architecture_of(embedder, args)
        model: Any = embedder.model
        random = f"{RANDOM} of {name}" if random_of else RANDOM
        random = random_of.setdefault(architecture, random)
        # The measurements are the same for all models, and made once
        rhythm = [measured] if "rhythm" in model.readout_of(args.readout) else []
        rows[name] = Compared(name, [[embedder, *rhythm]], random)
        if random not in rows:
            seeds = range(args.seed, args.seed + DRAWS)
            draws = [_random_embedder(embedder, random, architecture, args, seed) for seed in seeds]
            rows[random] = Compared(random, [[draw, *rhythm] for draw in draws], random)
    return list(rows.values())


def name_and_folder(text: str) -> tuple[str, str]:
    """The name of a model and its folder, from NAME=FOLDER or FOLDER."""
    name, equals, folder = text.partition("=")
    if not equals or "/" in name or Path(text).exists():
        name, folder = "", text
    if not folder:
        raise ConfigError(f"--models {text}: names no folder: write NAME=RUN")
    path = Path(folder)
    if "," in folder and not path.exists():
        named_runs = [f"{name or 'A'}-{n}={run}" for n, run in enumerate(folder.split(","), 1)]
        raise ConfigError(f"--models {text}: one run to a name: write {' '.join(named_runs)}")
    return name or (path.parent.name if path.name == "model" else path.name), folder


def embedder_of(name: str, folder: str, args: Namespace) -> Embedder:
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


def _random_embedder(
    trained_embedder: Any, name: str, architecture: str, args: Namespace, seed: int
) -> Embedder:
    """Random weights of the architecture of a model, read out in the same way."""
    readout = token_parts(trained_embedder.model, args)

    def forward(x_RLT: Tensor) -> Tensor:
        return _untrained(trained_embedder.model, seed).read(x_RLT, readout)

    embedder: Embedder = trained_embedder._replace(
        name=name, digest=f"{architecture} {seed}", forward=forward
    )
    return embedder


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
