"""PyTorch checkpoints of strangers, without running their code.

    read_checkpoint(path) -> {"model": {name: tensor}, "cfg": {...}, ...}, plain containers, numbers, texts and tensors only

A .pt file is a pickle, and a pickle may call any function it names. torch.load(weights_only=True) makes tensors and containers
only. Where a checkpoint names other classes, such as the configuration objects of OmegaConf or argparse that fairseq-signals
saved, it gets a stand-in for each, which keeps what it was given and does nothing; no module is imported.
"""

import math
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

MAX_PICKLE = 256 * 2**20  # bytes: tensors lie outside of it
MAX_DEPTH = 64  # of containers within containers
MAX_NODES = 1_000_000  # containers and what they hold: shared ones, which a small file may nest, count each time


class CheckpointError(Exception):
    """A file that is no checkpoint we can read: one line."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with warnings.catch_warnings(), safe_globals(_inert(path)):
            warnings.simplefilter("ignore")  # of what old checkpoints hold
            content = plain(torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)))
    except (CheckpointError, PermissionError):
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds objects that cannot be read without running code: save its model and cfg alone"
        ) from error
    except Exception as error:  # whatever a hostile or cut file makes torch say
        raise CheckpointError(f"{path}: is no checkpoint of torch, or a damaged one: copy it anew") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a dictionary of weights and settings")
    return content


class Inert:
    """Stands for a class or function that torch.load does not know: keeps what it was given, and does nothing."""

    def __new__(cls, *args: Any) -> "Inert":
        made = object.__new__(cls)
        made.__dict__["args"] = args
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


def _inert(path: Path) -> list[Any]:
    """A stand-in for each class or function that the file names and torch.load would refuse, with its name."""
    if not zipfile.is_zipfile(path):
        return []
    with zipfile.ZipFile(path) as archive:
        if sum(info.file_size for info in archive.infolist() if info.filename.endswith("/data.pkl")) > MAX_PICKLE:
            raise CheckpointError(f"{path}: its data.pkl has more than {MAX_PICKLE} bytes: no checkpoint of fairseq-signals")
    known: dict[str, Any] = {"collections.defaultdict": lambda *_: {}}
    names = get_unsafe_globals_in_checkpoint(path)
    return [(known.get(name) or type("Inert", (Inert,), {"named": name}), name) for name in names]


def _hashable(key: Any) -> Any:
    return key if isinstance(key, str | int | float | bool | None) else repr(type(key))


def plain(value: Any, depth: int = 0, left: list[int] | None = None) -> Any:
    """Containers, numbers, texts and tensors; settings out of the objects that held them; of the rest a text that names it."""
    left = left or [MAX_NODES]
    if depth > MAX_DEPTH:
        raise CheckpointError(f"containers within containers, more than {MAX_DEPTH} deep: no checkpoint of fairseq-signals")
    left[0] -= 1 + len(value) // 100 if isinstance(value, str) else 1
    if left[0] < 0:
        raise CheckpointError(f"more than {MAX_NODES:,} settings and weights: no checkpoint of fairseq-signals")
    if isinstance(value, Inert):
        return _unwrapped(value, depth, left)
    if isinstance(value, dict):
        return {_hashable(plain(k, depth + 1, left)): plain(v, depth + 1, left) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth + 1, left) for item in value]
    if isinstance(value, int) and value.bit_length() > 64:  # JSON's would refuse to print the longest
        return "<int>"
    if isinstance(value, str | int | float | bool | None | Tensor):
        return value
    return f"<{type(value).__name__}>"


def _unwrapped(value: Inert, depth: int, left: list[int]) -> Any:
    """argparse.Namespace keeps its settings in its state, OmegaConf's nodes in _content and _val, enums in their arguments."""
    state = value.__dict__.get("state")
    if isinstance(state, tuple) and state and isinstance(state[0], dict):  # with slots
        state = state[0]
    if isinstance(state, dict):
        inner = [state[key] for key in ("_content", "_val") if key in state]
        return plain(inner[0] if inner else state, depth + 1, left)
    args = value.__dict__.get("args", ())
    if len(args) == 1 and isinstance(args[0], str | int | float):
        return plain(args[0], depth + 1, left)
    return f"<{getattr(type(value), 'named', 'object')}>"


def tensors(values: dict[str, Any], most_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """`most_bytes`: of all together, the size of the file. A small one can claim a huge tensor that repeats one number."""
    for name, value in values.items():
        if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
            raise CheckpointError(f"a weight is named {repr(name)[:80]}: must be a printable text")
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the weight {name} is a {type(value).__name__}, not a tensor")
        dtype, where = value.dtype, f", {value.layout}, on {value.device}"
        if not dtype.is_floating_point or value.device.type != "cpu" or value.layout != torch.strided:
            raise CheckpointError(f"the weight {name} is {dtype}{where}: must be floating point, dense and in the file")
        most_bytes -= math.prod(value.shape) * dtype.itemsize
        if most_bytes < 0:
            raise CheckpointError(f"the weights are larger than their file, from {name} {tuple(value.shape)} on")
        yield name, value
