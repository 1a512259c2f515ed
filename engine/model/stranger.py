"""PyTorch checkpoints of strangers, without running their code.

    read_checkpoint(path) -> {"model": {name: tensor}, "cfg": {...}, ...}, plain containers, numbers, texts and tensors only

A .pt file is a pickle, and a pickle may call any function it names. torch.load(weights_only=True) goes first: it knows
tensors and containers. Where a checkpoint holds more, such as the configuration objects of OmegaConf or argparse that
fairseq-signals saved, a second reader takes the zip apart by itself: every class or function it does not know becomes an
inert stand-in, which remembers what it was given and does nothing; no module is imported. Tensors are then made of bytes in
the file and of no others, and only when asked for, so nothing can be larger than the file.
"""

import math
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

MAX_PICKLE = 256 * 2**20  # bytes: tensors lie outside of it
MAX_DEPTH = 64  # of containers within containers
MAX_NODES = 1_000_000  # containers and what they hold: shared ones, which a small file may nest, count each time
_DTYPES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class CheckpointError(Exception):
    """A file that is no checkpoint we can read: one line."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what old checkpoints hold
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as refused:
            if not zipfile.is_zipfile(path):
                raise CheckpointError(f"{path}: neither a zip nor plain weights: save it anew with PyTorch 1.6+") from refused
            loaded = _read_zip(path)
        content = plain(loaded)
    except (CheckpointError, PermissionError):
        raise
    except Exception as error:  # whatever a hostile or cut file makes the readers say
        raise CheckpointError(f"{path}: is no checkpoint of torch, or a damaged one: copy it anew") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a dictionary of weights and settings")
    return content


@dataclass(frozen=True)
class Place:
    """A storage: its bytes in the zip, not read yet."""

    path: Path
    member: str
    dtype: torch.dtype


@dataclass(frozen=True)
class LazyTensor:
    place: Place
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> Tensor:
        with zipfile.ZipFile(self.place.path) as archive:
            info = archive.getinfo(self.place.member)
            if info.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(f"{self.place.path}: {self.place.member} is compressed, which PyTorch never does")
            data = bytearray(archive.read(info))
        flat = torch.frombuffer(data, dtype=self.place.dtype) if data else torch.empty(0, dtype=self.place.dtype)
        last = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        count = torch.Size(self.size).numel()
        if min((self.offset, *self.size, *self.stride)) < 0 or (count and last >= len(flat)) or count > len(flat):
            raise CheckpointError(f"{self.place.path}: a tensor of {self.size} reaches beyond its {len(flat)} numbers")
        return flat.as_strided(self.size, self.stride, self.offset).clone()


class Inert:
    """Stands for whatever a pickle names that we do not know."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        made = object.__new__(cls)
        made.__dict__["args"] = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> "Inert":
        return Inert(*args)

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("items", {})[_hashable(key)] = value

    def append(self, value: Any) -> None:
        self.__dict__.setdefault("entries", []).append(value)

    def extend(self, values: Any) -> None:
        self.__dict__.setdefault("entries", []).extend(values)


def _hashable(key: Any) -> Any:
    return key if isinstance(key, str | int | float | bool | None) else repr(type(key))


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Any:
    if not isinstance(storage, Place):
        raise CheckpointError("a tensor without a storage: save it anew with PyTorch 1.6+")
    return LazyTensor(storage, int(offset), tuple(map(int, size)), tuple(map(int, stride)))


def _parameter(data: Any, *_: Any) -> Any:
    return data


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}


class InertUnpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, path: Path, root: str) -> None:
        super().__init__(stream)
        self.path, self.root = path, root

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _DTYPES:
            return _DTYPES[name]
        return _KNOWN.get((module, name)) or type("Inert", (Inert,), {"named": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Place:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"a storage of unknown type {getattr(dtype, 'named', dtype)!s:.80}: use float")
        return Place(self.path, f"{self.root}/data/{key}", dtype)


def _read_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        pickles = [info for info in archive.infolist() if info.filename.count("/") == 1 and info.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE:
            raise CheckpointError(f"{path}: must hold one data.pkl of at most {MAX_PICKLE} bytes")
        root = pickles[0].filename.rsplit("/", 1)[0]
        if f"{root}/byteorder" in archive.namelist() and archive.read(f"{root}/byteorder") != b"little":
            raise CheckpointError(f"{path}: numbers in big-endian order are not read")
        with archive.open(pickles[0]) as stream:
            return InertUnpickler(stream, path, root).load()  # type: ignore[arg-type]


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
    if isinstance(value, str | int | float | bool | None | Tensor | LazyTensor):
        return value
    return f"<{type(value).__name__}>"


def _unwrapped(value: Inert, depth: int, left: list[int]) -> Any:
    """argparse.Namespace keeps its settings in its state, OmegaConf's nodes in _content and _val, enums in their arguments."""
    state = value.__dict__.get("state")
    if isinstance(state, tuple) and state and isinstance(state[0], dict):  # with slots
        state = state[0]
    for content in (state, value.__dict__.get("items")):
        if isinstance(content, dict):
            for key in ("_content", "_val"):
                if key in content:
                    return plain(content[key], depth + 1, left)
            return plain(content, depth + 1, left)
    args = value.__dict__.get("args", ())
    if len(args) == 1 and isinstance(args[0], str | int | float):
        return plain(args[0], depth + 1, left)
    return f"<{getattr(type(value), 'named', 'object')}>"


def tensors(values: dict[str, Any], most_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """`most_bytes`: of all together, the size of the file. A small one can claim a huge tensor that repeats one number."""
    for name, value in values.items():
        if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
            raise CheckpointError(f"a weight is named {repr(name)[:80]}: must be a printable text")
        if not isinstance(value, LazyTensor | Tensor):
            raise CheckpointError(f"the weight {name} is a {type(value).__name__}, not a tensor")
        size = value.size if isinstance(value, LazyTensor) else tuple(value.shape)
        dtype = value.place.dtype if isinstance(value, LazyTensor) else value.dtype
        dense = isinstance(value, LazyTensor) or (value.device.type == "cpu" and value.layout == torch.strided)
        if not dtype.is_floating_point or not dense:
            where = "" if isinstance(value, LazyTensor) else f", {value.layout}, on {value.device}"
            raise CheckpointError(f"the weight {name} is {dtype}{where}: must be floating point, dense and in the file")
        most_bytes -= math.prod(size) * dtype.itemsize
        if most_bytes < 0:
            raise CheckpointError(f"the weights are larger than their file, from {name} {size} on")
    for name, value in values.items():
        yield name, value.read() if isinstance(value, LazyTensor) else value
