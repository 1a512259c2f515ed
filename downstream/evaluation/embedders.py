"""Frozen embeddings to compare: of models, of random weights of their architectures, and of
measurements that need no training.

    first, *others = rows_to_compare(["A=RUN", "hf://org/name"], EmbedOptions())
    first.draws[0][0].forward(x_RLT)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from omnilead.data_tools.ecg import mean_beat
from omnilead.engine.model.folder import config_of
from omnilead.engine.model.input import Input
from omnilead.engine.settings.errors import ConfigError, Flag
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


@dataclass(frozen=True)
class EmbedOptions:
    """How models are loaded and read out."""

    readout: str = ""  # parts joined by +; "": the model's own
    batch: int | None = None  # crops encoded at a time; None: 16, on a GPU 256
    device: str = "auto"
    precision: str = "auto"
    code: bool = False  # run the custom code in a model folder


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


def rows_to_compare(
    models: Sequence[str], options: EmbedOptions, reader: str = "linear", seed: int = 0
) -> list[Compared]:
    """`models`: folders, or NAME=FOLDER. `reader`: what is fitted on models' embeddings. `seed`: the
    first of the random weights. Random weights follow the first model of their architecture; what
    needs no training is last. Without LightGBM, no row is boosted."""
    if reader == "boosted" and not installed():
        raise ConfigError(Flag("--reader"), f" boosted: {INSTALL}")
    beat = _measured(MEAN_BEAT, mean_beat.mean_beats, slice(12 * mean_beat.BEAT_SAMPLES))
    measured = _measured(MEASURED, mean_beat.measurements)
    rows = _model_rows(models, measured, options, seed)
    rows = [row._replace(fit=READERS[reader]) for row in rows]
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


def _model_rows(
    models: Sequence[str], measured: Embedder, options: EmbedOptions, seed: int
) -> list[Compared]:
    rows: dict[str, Compared] = {}
    random_of: dict[str, str] = {}  # by architecture, the name of its row of random weights
    for text in models:
        name, folder = name_and_folder(text)
        if name in rows or name in (RANDOM, MEAN_BEAT, MEASURED, BOOSTED):
            raise ConfigError(
                Flag("--models"), f" {text}: the name {name!r} is taken: write NAME={folder}"
            )
        embedder = embedder_of(name, folder, options)
        architecture = architecture_of(embedder, options.readout)
        random = f"{RANDOM} of {name}" if random_of else RANDOM
        random = random_of.setdefault(architecture, random)
        # The measurements are the same for all models, and made once
        readout = embedder.trained.readout_of(options.readout)
        rhythm = [measured] if "rhythm" in readout else []
        rows[name] = Compared(name, [[embedder, *rhythm]], random)
        if random not in rows:
            draws = []
            for number in range(seed, seed + DRAWS):
                drawn = _random_embedder(embedder, architecture, options.readout, number)
                draws.append([drawn._replace(name=random), *rhythm])
            rows[random] = Compared(random, draws, random)
    return list(rows.values())


def name_and_folder(text: str) -> tuple[str, str]:
    """The name of a model and its folder, from NAME=FOLDER or FOLDER."""
    name, equals, folder = text.partition("=")
    if not equals or "/" in name or Path(text).exists():
        name, folder = "", text
    if not folder:
        raise ConfigError(Flag("--models"), f" {text}: names no folder: write NAME=RUN")
    path = Path(folder)
    if "," in folder and not path.exists():
        named_runs = [f"{name or 'A'}-{n}={run}" for n, run in enumerate(folder.split(","), 1)]
        raise ConfigError(
            Flag("--models"), f" {text}: one run to a name: write {' '.join(named_runs)}"
        )
    return name or (path.parent.name if path.name == "model" else path.name), folder


def embedder_of(name: str, folder: str, options: EmbedOptions) -> Embedder:
    """The model in this folder, read out as these options say."""
    model, precision = prepare_model(folder, options.device, options.precision, options.code)
    batch = options.batch or (256 if model.device.type == "cuda" else 16)
    embedder = Embedder(name, "", model.input, model, model, batch, precision=precision)
    return reading(embedder, token_parts(model, options.readout))


def reading(embedder: Embedder, readout: Readout) -> Embedder:
    """The same model, read out in another way."""
    model = embedder.trained
    return embedder._replace(
        digest=repr([model.digest, embedder.precision, readout, _code(readout)]),
        forward=partial(model.read, readout=readout),
        compared=place_of_mean(readout, model.encoder.width),
    )


def _random_embedder(embedder: Embedder, architecture: str, readout: str, seed: int) -> Embedder:
    """Random weights of the architecture of a model, read out in the same way."""
    model = embedder.trained
    parts = token_parts(model, readout)

    def forward(x_RLT: Tensor) -> Tensor:
        return _untrained(model, seed).read(x_RLT, parts)

    return embedder._replace(digest=f"{architecture} {seed}", forward=forward)


@lru_cache(maxsize=1)  # the paper's model takes 0.4 GB, so one draw at a time
def _untrained(model: TrainedModel, seed: int) -> TrainedModel:
    return model.untrained(seed)


def token_parts(model: TrainedModel, readout: str) -> Readout:
    """The read-out without what is measured in the signal."""
    parts = tuple(part for part in model.readout_of(readout) if part != "rhythm")
    if not parts:
        raise ConfigError(
            Flag("--readout"), " rhythm: it has nothing of a model: add mean, std or beats"
        )
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


def architecture_of(embedder: Embedder, readout: str) -> str:
    """Models with the same text have the same random weights, and the same read-out."""
    model = embedder.trained
    config = config_of(model.config)
    parts = [getattr(config, name) for name in config.architecture]
    of_model = model.readout_of(readout)
    code = sorted(model.code.items())
    return repr([parts, model.input, code, embedder.precision, of_model, _code(of_model)])
