"""Reading PyTorch's pickles without running code in them, also where DeepSpeed does the reading.

    refused(file)                                       why torch.load(weights_only=True) refuses it; None: it does not
    with weights_only(): engine.load_checkpoint(...)

A .pt file is a pickle, and a pickle may name any function to be called. weights_only=True makes tensors, plain containers and
the classes below, and nothing else. DeepSpeed asks for weights_only=False; PyTorch overrules that by an environment variable.
"""

import os
import pickle
import pkgutil
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.training.distributed import quiet_deepspeed

CLASSES = (  # all that a checkpoint of DeepSpeed holds besides; they keep values and do nothing
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
FORCE, FORBID = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # torch.load refuses both together


@contextmanager
def weights_only() -> Iterator[None]:
    """Every torch.load of this process reads with weights_only=True."""
    quiet_deepspeed()
    before = {name: os.environ.pop(name, None) for name in (FORCE, FORBID)}
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals([pkgutil.resolve_name(name) for name in CLASSES]):
            yield
    finally:
        del os.environ[FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


class StandIn:
    """For CLASSES, where nothing is done with them: DeepSpeed need not be imported."""

    def __init__(self, *_: Any) -> None:
        pass


def refused(file: Path) -> str | None:
    try:
        with torch.serialization.safe_globals([(StandIn, name) for name in CLASSES]):
            torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged or hostile file makes torch say
        return reason(error)
    return None


def reason(error: Exception) -> str:
    """In one line."""
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"GLOBAL (\S+)", str(error))
        return f"would run code when it is read ({named[1]})" if named else "holds more than weights"
    return " ".join(f"cannot be read: {type(error).__name__}: {error}".split())[:200]
