"""Makes the rows of a comparison: embeddings by frozen models, by random weights of their architectures,
and by measurements that need no training.

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
from omnilead.engine.settings.leads import ALL_LEADS

from ..inference.commands import load_model_and_precision
from ..inference.trained_model import TrainedModel
from ..tasks import readout as readouts
from ..tasks.metrics import Array
from ..tasks.readout import Readout, mean_slice, measures_signal
from .boosted import INSTALL_LIGHTGBM, fit_boosted_trees, has_lightgbm
from .probe import Fit, fit_linear_probe
from .vectors import Embedder

RANDOM_ROW, MEAN_BEAT_ROW, MEASUREMENTS_ROW = "random weights", "mean beat", "measurements"
BOOSTED_ROW = "boosted features"
FIT_FUNCTION_OF_READER = {"linear": fit_linear_probe, "boosted": fit_boosted_trees}
RANDOM_DRAWS = 5  # several draws, because the scores of two draws differ by as much as 0.02


@dataclass(frozen=True)
class EmbedOptions:
    """Options for loading models and for reading out their embeddings."""

    readout: str = ""  # parts joined by +; "": the model's own read-out
    batch: int | None = None  # crops encoded at a time; None: 16, on a GPU 256
    device: str = "auto"
    precision: str = "auto"
    code: bool = False  # whether custom code in a model folder may run


class ComparedRow(NamedTuple):
    """A row of the comparison: its name and its embedders."""

    name: str
    # Each draw is a list of embedders, whose vectors are joined. Random weights have several draws,
    # over which the scores are averaged; other rows have one
    draws: list[list[Embedder]]
    # Name of the row of random weights of the same architecture; "" if there is none
    random: str = ""
    fit: Fit = fit_linear_probe
    identifies: bool = True  # whether patient identification is scored, too

    @property
    def model(self) -> TrainedModel | None:
        """Returns the model of the row; None if the row is a baseline without a trained model."""
        if self.name == self.random:
            return None
        models = [embedder.model for draw in self.draws for embedder in draw if embedder.model]
        return models[0] if models else None


def rows_to_compare(
    models: Sequence[str], options: EmbedOptions, reader: str = "linear", seed: int = 0
) -> list[ComparedRow]:
    """Returns the rows: the models, with random weights after the first model of each architecture,
    then the methods without pre-training, then each model joined with the mean beat. Without
    LightGBM, there is no row of gradient boosting.
    `models`: FOLDER or NAME=FOLDER. `reader`: the kind of probe that is fitted on the models'
    embeddings. `seed`: the seed of the first draw of random weights; each further draw adds 1."""
    if reader == "boosted" and not has_lightgbm():
        raise ConfigError(Flag("--reader"), f" boosted: {INSTALL_LIGHTGBM}")
    beat = _measurement_embedder(
        MEAN_BEAT_ROW, mean_beat.mean_beats, slice(12 * mean_beat.BEAT_SAMPLES)
    )
    measured = _measurement_embedder(MEASUREMENTS_ROW, mean_beat.measurements)
    rows = _model_rows(models, measured, options, seed)
    rows = [row._replace(fit=FIT_FUNCTION_OF_READER[reader]) for row in rows]
    untrained = [
        ComparedRow(MEAN_BEAT_ROW, [[beat]]),
        ComparedRow(MEASUREMENTS_ROW, [[measured]], identifies=False),
    ]
    if has_lightgbm():
        row = ComparedRow(BOOSTED_ROW, [[beat, measured]], fit=fit_boosted_trees, identifies=False)
        untrained.append(row)
    with_mean_beat = []
    for row in rows:
        if row.model:
            name, draws = f"{MEAN_BEAT_ROW} + {row.name}", [[beat, *row.draws[0]]]
            with_mean_beat.append(ComparedRow(name, draws, fit=row.fit, identifies=False))
    return [*rows, *untrained, *with_mean_beat]


def _model_rows(
    models: Sequence[str], measured: Embedder, options: EmbedOptions, seed: int
) -> list[ComparedRow]:
    rows: dict[str, ComparedRow] = {}
    random_of: dict[str, str] = {}  # {architecture: name of the row of its random weights}
    for text in models:
        name, folder = name_and_folder(text)
        if name in rows or name in (RANDOM_ROW, MEAN_BEAT_ROW, MEASUREMENTS_ROW, BOOSTED_ROW):
            raise ConfigError(
                Flag("--models"), f" {text}: the name {name!r} is taken: write NAME={folder}"
            )
        embedder = load_embedder(name, folder, options)
        architecture = architecture_key(embedder, options.readout)
        random = f"{RANDOM_ROW} of {name}" if random_of else RANDOM_ROW
        random = random_of.setdefault(architecture, random)
        # The measurements of a signal do not depend on the model, so all rows share the embedder
        # that computes them
        readout = embedder.trained_model.suitable_readout(options.readout)
        rhythm = [measured] if "rhythm" in readout else []
        rows[name] = ComparedRow(name, [[embedder, *rhythm]], random)
        if random not in rows:
            draws = []
            for number in range(seed, seed + RANDOM_DRAWS):
                drawn = _random_embedder(embedder, architecture, options.readout, number)
                draws.append([drawn._replace(name=random), *rhythm])
            rows[random] = ComparedRow(random, draws, random)
    return list(rows.values())


def name_and_folder(text: str) -> tuple[str, str]:
    """Returns the name and the folder of a model, which the user typed as NAME=FOLDER or FOLDER."""
    name, equals, folder = text.partition("=")
    if not equals or "/" in name or Path(text).exists():
        name, folder = "", text
    if not folder:
        raise ConfigError(Flag("--models"), f" {text}: names no folder: write NAME=RUN")
    path = Path(folder)
    if "," in folder and not path.exists():
        named_runs = [f"{name or 'A'}-{n}={run}" for n, run in enumerate(folder.split(","), 1)]
        raise ConfigError(
            Flag("--models"), f" {text}: a name can have only one run: write {' '.join(named_runs)}"
        )
    return name or (path.parent.name if path.name == "model" else path.name), folder


def load_embedder(name: str, folder: str, options: EmbedOptions) -> Embedder:
    """Loads the model in this folder. Returns it as an embedder, with the read-out of the
    options."""
    model, precision = load_model_and_precision(
        folder, options.device, options.precision, options.code
    )
    batch = options.batch or (256 if model.device.type == "cuda" else 16)
    embedder = Embedder(name, "", model.input, model, model, batch, precision=precision)
    return with_readout(embedder, readout_without_rhythm(model, options.readout))


def with_readout(embedder: Embedder, readout: Readout) -> Embedder:
    """Returns an embedder of the same model with another read-out."""
    model = embedder.trained_model
    return embedder._replace(
        digest=repr([model.digest, embedder.precision, readout, _measurement_code_digest(readout)]),
        forward=partial(model.read, readout=readout),
        identity_dims=mean_slice(readout, model.encoder.width),
    )


def _random_embedder(embedder: Embedder, architecture: str, readout: str, seed: int) -> Embedder:
    """Returns an embedder with random weights of the model's architecture and the same read-out."""
    model = embedder.trained_model
    parts = readout_without_rhythm(model, readout)

    def forward(x_RLT: Tensor) -> Tensor:
        return _random_model(model, seed).read(x_RLT, parts)

    return embedder._replace(digest=f"{architecture} {seed}", forward=forward)


@lru_cache(maxsize=1)  # only one draw is kept, because the paper's model takes 0.4 GB
def _random_model(model: TrainedModel, seed: int) -> TrainedModel:
    return model.with_random_weights(seed)


def readout_without_rhythm(model: TrainedModel, readout: str) -> Readout:
    """Returns the read-out, or the model's own if it is "", without `rhythm`, which is measured in
    the signal and depends on no model."""
    parts = tuple(part for part in model.suitable_readout(readout) if part != "rhythm")
    if not parts:
        raise ConfigError(
            Flag("--readout"),
            " rhythm: rhythm is measured in the signal, not by the model: add mean, std or beats",
        )
    return parts


def _measurement_embedder(
    name: str, measure: Callable[[Array], Array], identity_dims: slice = slice(None)
) -> Embedder:
    """Returns an embedder that needs no model. `measure` maps signals in millivolts to vectors."""

    def forward(x_RLT: Tensor) -> Tensor:
        return torch.from_numpy(measure(x_RLT.numpy()))

    digest = f"{name} {_measurement_code_digest(('rhythm',))}"
    return Embedder(name, digest, Input(ALL_LEADS, ALL_LEADS), forward, identity_dims=identity_dims)


def _measurement_code_digest(readout: Readout) -> str:
    """Returns a digest of the code that measures the signal, so that saved vectors are not reused
    after it changed; "" if the read-out measures nothing."""
    if not measures_signal(readout):
        return ""
    files = [Path(str(module.__file__)) for module in (mean_beat, readouts)]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def architecture_key(embedder: Embedder, readout: str) -> str:
    """Returns a key that two models share only if their random weights and their read-out are the
    same."""
    model = embedder.trained_model
    config = config_of(model.config)
    parts = [getattr(config, name) for name in config.architecture_settings]
    of_model = model.suitable_readout(readout)
    code = sorted(model.code.items())
    return repr(
        [parts, model.input, code, embedder.precision, of_model, _measurement_code_digest(of_model)]
    )
