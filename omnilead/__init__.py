"""Turn ECG archives into verified datasets, pre-train and fine-tune encoders on them, and use the
trained models.

import omnilead
run = omnilead.pretrain("w2v_cmsc_rlm", data="DATASET", out="RUN", **{"train.steps": 1000})
tuned = omnilead.finetune("RUN", data="DATASET", labels="my.csv", out="OUT")
model = omnilead.load("OUT")                   # or OUT/model, a copy of that folder, s3://bucket/model, hf://org/name
model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")
model.predict(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")

In the repository, `data_tools`, `engine`, `downstream` and `configs` in this folder are links to the
folders beside it. So modules have the same names as in an installed package, and a module of yours called
engine or data_tools is never mistaken for one of them. Type checkers and editors need the links;
without them, as in an unpacked source distribution, Python finds the folders through `__path__`.
"""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnilead.data_tools.dataset import Dataset as Dataset
    from omnilead.data_tools.shard import shard as shard
    from omnilead.data_tools.synth import synth as synth
    from omnilead.data_tools.verify import verify as verify
    from omnilead.downstream.bench import bench as bench
    from omnilead.downstream.embed import embed as embed
    from omnilead.downstream.evaluate import evaluate as evaluate
    from omnilead.downstream.finetune import finetune as finetune
    from omnilead.downstream.fit import fit as fit
    from omnilead.downstream.inference.trained_model import load as load
    from omnilead.downstream.predict import predict as predict
    from omnilead.engine.pretrain import pretrain as pretrain

__version__ = "0.1.0"

if not Path(__path__[0], "engine").is_dir():
    __path__.append(str(Path(__path__[0]).parent))

# The module that defines each public name. It is imported only when the name is first used, because
# importing PyTorch takes seconds
MODULE_OF_NAME = {
    "Dataset": "omnilead.data_tools.dataset",
    "bench": "omnilead.downstream.bench",
    "embed": "omnilead.downstream.embed",
    "evaluate": "omnilead.downstream.evaluate",
    "finetune": "omnilead.downstream.finetune",
    "fit": "omnilead.downstream.fit",
    "load": "omnilead.downstream.inference.trained_model",
    "predict": "omnilead.downstream.predict",
    "pretrain": "omnilead.engine.pretrain",
    "shard": "omnilead.data_tools.shard",
    "synth": "omnilead.data_tools.synth",
    "verify": "omnilead.data_tools.verify",
}


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from omnilead.data_tools.io.commands import shorten_busy_loops

    shorten_busy_loops()
    found = getattr(importlib.import_module(MODULE_OF_NAME[name]), name)
    if not isinstance(found, type):
        found = _as_python_function(found)
    globals()[name] = found
    return found


def _as_python_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same as a command's function, but checks its arguments as the command
    line checks options, and raises errors that name arguments instead of options."""
    from omnilead.__main__ import after_training
    from omnilead.data_tools.io.errors import naming_arguments_in_errors
    from omnilead.data_tools.io.options import check_values

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with naming_arguments_in_errors():
            check_values(function, args, kwargs)
            if function.__name__ == "pretrain":
                kwargs = {"after": after_training(), **kwargs}
            return function(*args, **kwargs)

    call.__module__, call.__qualname__ = __name__, function.__name__  # so that pickle finds it
    return call


def __dir__() -> list[str]:
    """List the public names. Anything else is imported from the module that defines it."""
    return sorted([*MODULE_OF_NAME, "__doc__", "__version__"])
