"""Pre-train, fine-tune and use ECG models on verified datasets.

import engine
run = engine.pretrain("w2v_cmsc_rlm", data="DATASET", out="RUN", **{"train.steps": 1000})
tuned = engine.finetune("RUN", data="DATASET", labels="my.csv", out="OUT")
model = engine.load("OUT")                     # or OUT/model, a copy of that folder, s3://bucket/model, hf://org/name
model.embed(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")
model.predict(signal, fs_hz=500, leads=["I", "II", "V1"], unit="mV")
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from engine.finetune import finetune as finetune
    from engine.model.inference import TrainedModel
    from engine.pretrain import pretrain as pretrain

CALLABLE = ("finetune", "pretrain")  # command modules that can also be called as functions

__version__ = "0.1.0"


def load(path: str | os.PathLike[str], code: bool = False, **classes: "type[nn.Module]") -> "TrainedModel":
    """Loads a trained or converted model in eval mode. PyTorch is imported here, not with the package.

    A custom encoder or head keeps its code in the model folder. That code runs only with `code=True`; alternatively, pass
    the classes as `encoder=Class` and `head=Class`.
    """
    from engine.model.inference import load

    return load(path, code, **classes)


def __getattr__(name: str) -> Any:
    if name in CALLABLE:
        return importlib.import_module(f"engine.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *CALLABLE})
