"""Turn ECG archives into verified datasets, pre-train and fine-tune encoders on them, and use the
trained models.

import omnilead
run = omnilead.pretrain("w2v_cmsc_rlm", data="DATASET", out="RUN", **{"train.steps": 1000})
tuned = omnilead.finetune("RUN", data="DATASET", labels="my.csv", out="OUT")
model = omnilead.load("OUT")                   # or OUT/model, a copy of that folder, s3://bucket/model, hf://org/name
model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")
model.predict(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")

In the repository, `engine`, `data_tools` and `configs` in this folder are links to the folders
beside it. So modules have the same names as in an installed package, and a module of yours called
engine or data_tools is never mistaken for one of them. Type checkers and editors need the links;
without them, as in an unpacked source distribution, Python finds the folders through `__path__`.
"""

import functools
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnilead import moved

if TYPE_CHECKING:
    from omnilead.data_tools.__main__ import shard as shard
    from omnilead.data_tools.__main__ import synth as synth
    from omnilead.data_tools.__main__ import verify as verify
    from omnilead.data_tools.dataset import Dataset as Dataset
    from omnilead.engine.bench import bench as bench
    from omnilead.engine.embed import embed as embed
    from omnilead.engine.evaluate import evaluate as evaluate
    from omnilead.engine.finetune import finetune as finetune
    from omnilead.engine.fit import fit as fit
    from omnilead.engine.inference.trained_model import load as load
    from omnilead.engine.predict import predict as predict
    from omnilead.engine.pretrain import pretrain as pretrain

__version__ = "0.1.0"
moved.install()

# PyTorch's threads wait for each other in long busy loops. With shorter ones `small` trains 1.3 to 2
# times as fast on two cores that others use as well, and as fast on two that nobody else uses. Read
# when PyTorch is imported, which must not have happened yet
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if not Path(__path__[0], "engine").is_dir():
    __path__.append(str(Path(__path__[0]).parent))

# Where each name comes from. Imported on first use: PyTorch takes seconds
MODULES = {
    "Dataset": "omnilead.data_tools.dataset",
    "bench": "omnilead.engine.bench",
    "embed": "omnilead.engine.embed",
    "evaluate": "omnilead.engine.evaluate",
    "finetune": "omnilead.engine.finetune",
    "fit": "omnilead.engine.fit",
    "load": "omnilead.engine.inference.trained_model",
    "predict": "omnilead.engine.predict",
    "pretrain": "omnilead.engine.pretrain",
    "shard": "omnilead.data_tools.__main__",
    "synth": "omnilead.data_tools.__main__",
    "verify": "omnilead.data_tools.__main__",
}


# Options whose arguments have other names
ARGUMENTS = {"fs": "fs_hz", "lr": "train.lr"}
# A command line stays one; --set train.lr=1e-4 and --out are said as in Python
WORDS = re.compile(r"`[^`]*`|\bomnilead [a-z]+[^:;,)]*|--set |--([a-z][a-z_-]*)")


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(MODULES[name]), name)
    if not isinstance(found, type):
        found = _in_python(found)
    globals()[name] = found
    return found


def _in_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, but its arguments are checked as those of the command, and its errors name
    arguments instead of options."""
    from omnilead.data_tools.io.errors import UserError
    from omnilead.data_tools.io.options import check_values

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            check_values(function, args, kwargs)
            return function(*args, **kwargs)
        except UserError as error:
            error.args = (WORDS.sub(_argument, str(error)),)
            raise

    call.__module__, call.__qualname__ = __name__, function.__name__  # as pickle finds it
    return call


def _argument(found: re.Match[str]) -> str:
    option = found[1]
    if not option:
        return "" if found[0] == "--set " else found[0]
    return f"`{ARGUMENTS.get(option, option.replace('-', '_'))}`"


def __dir__() -> list[str]:
    """What is meant to be used; the rest is imported from where it is."""
    return sorted([*MODULES, "__doc__", "__version__"])
