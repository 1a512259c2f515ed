"""Read untrusted PyTorch checkpoints without running code that may be pickled in them.

    content = read_checkpoint(path); as_json(content["cfg"]); float_tensors(content["model"], path)

torch.load(weights_only=True) creates only tensors and containers. Other classes in a checkpoint,
such as the settings objects of OmegaConf or argparse that fairseq-signals saves, are replaced by
stand-ins, which only keep their state; no module is imported. What torch considers dangerous is
refused.
"""

import json
import math
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from omnilead.engine.common import ConfigError

MAX_PICKLE = 256 * 2**20  # bytes, without the tensors, which are stored separately
MAX_SETTINGS, MAX_JSON = (
    100_000,
    64 * 2**20,
)  # JSON tokens and characters; shared objects count each time they occur


class ForeignCheckpointError(ConfigError):
    """A checkpoint that cannot be read."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ForeignCheckpointError(f"{path}: no such file")
    zipped = zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings(), safe_globals(stand_ins(path) if zipped else []):
            warnings.simplefilter("ignore")  # about types in old checkpoints
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except (ForeignCheckpointError, PermissionError):
        raise
    except pickle.UnpicklingError as error:
        raise ForeignCheckpointError(
            f"{path}: cannot be read without running code: save only its model and cfg"
        ) from error
    except Exception as error:  # hostile or truncated files raise anything
        raise ForeignCheckpointError(
            f"{path}: not a PyTorch checkpoint, or damaged: copy it again"
        ) from error
    if not isinstance(content, dict):
        raise ForeignCheckpointError(
            f"{path}: contains a {type(content).__name__}, not a dictionary of weights and settings"
        )
    return content


class StandIn:
    """Replaces a class or function that torch.load does not know."""

    def __new__(cls, *args: Any) -> "StandIn":
        made = object.__new__(cls)
        made.__dict__["content"] = (
            args[0] if len(args) == 1 else f"<{cls.__name__}>"
        )  # of an enum: its value
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Keep the settings: argparse.Namespace has them in its state, OmegaConf's nodes in
        _content and _val."""
        if isinstance(state, tuple) and state:  # with slots
            state = state[0]
        if isinstance(state, dict):
            state = next((state[key] for key in ("_content", "_val") if key in state), state)
        self.__dict__["content"] = state


def stand_ins(path: Path) -> list[Any]:
    """(stand-in, name) for each class or function in the file that torch.load would refuse."""
    with zipfile.ZipFile(path) as archive:
        if (
            sum(
                info.file_size for info in archive.infolist() if info.filename.endswith("/data.pkl")
            )
            > MAX_PICKLE
        ):
            raise ForeignCheckpointError(
                f"{path}: its data.pkl has more than {MAX_PICKLE} bytes, the limit"
            )
    known: dict[str, Any] = {"collections.defaultdict": lambda *_: {}}
    names = get_unsafe_globals_in_checkpoint(path)
    return [(known.get(name) or type(name.split(".")[-1], (StandIn,), {}), name) for name in names]


def as_json(value: Any) -> Any:
    """Settings as JSON types. Stand-ins become what they kept; tensors and other objects become a
    text with their type."""
    parts, size = [], 0
    try:
        for part in json.JSONEncoder(default=_content, skipkeys=True).iterencode(value):
            size += len(part)
            parts.append(part)
            if size > MAX_JSON or len(parts) > MAX_SETTINGS:
                raise ForeignCheckpointError(
                    f"more than {MAX_SETTINGS:,} settings: not a checkpoint of fairseq-signals"
                )
    except (ValueError, RecursionError) as error:
        raise ForeignCheckpointError(
            f"settings are not valid JSON ({error}): not a checkpoint of fairseq-signals"
        ) from error
    return json.loads("".join(parts))


def _content(value: Any) -> Any:
    return (
        value.__dict__["content"]
        if isinstance(value, StandIn)
        else f"<{type(value).__name__.lower()}>"
    )


def float_tensors(values: Any, path: Path) -> dict[str, Tensor]:
    """The weights. Their total size must not exceed the file's: a tensor can claim any size by
    repeating one number."""
    if not isinstance(values, dict):
        raise ForeignCheckpointError(
            f"{path}: has no weights under `model`: is it a checkpoint of fairseq-signals?"
        )
    left = path.stat().st_size
    for name, value in values.items():
        if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
            raise ForeignCheckpointError(
                f"{path}: a weight is named {repr(name)[:80]}: must be printable text"
            )
        if not isinstance(value, Tensor):
            raise ForeignCheckpointError(
                f"{path}: the weight {name} is a {type(value).__name__}, not a tensor"
            )
        if (
            not value.dtype.is_floating_point
            or value.device.type != "cpu"
            or value.layout != torch.strided
        ):
            kind = f"{value.dtype}, {value.layout}, on {value.device}"
            raise ForeignCheckpointError(
                f"{path}: the weight {name} is {kind}: must be floating point, dense and in the "
                "file"
            )
        left -= math.prod(value.shape) * value.element_size()
        if left < 0:
            raise ForeignCheckpointError(
                f"{path}: the weights are larger than the file, from {name} {tuple(value.shape)}"
            )
    return values
