"""Shared by the whole engine: lead names, errors, YAML files, atomic writes, and command start-up.

parse_leads("3")                  # (0, 1, 7); also "12", "6", "2", "1" or names: "I,II,V2"
describe_leads((0, 1, 7))         # "I,II,V2"
find_config("w2v", "pretrain")    # a file, or a shipped config
read_yaml(path)                   # merged over the file that its `base:` names
parse_yaml("5e-5", "--set lr")    # 5e-5
write_whole(path, text)           # atomic: the whole file or nothing
interruptible("engine.x")         # call it before importing torch

Signals hold all twelve leads in the order of LEADS until the last step of augmentation. For a
subset of leads, that step either sets the others to zero (padded: the paper's "P-N leads", for a
model of twelve channels) or drops them (a model of N channels).
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]

from omnilead.data_tools.cli import Parser as Parser
from omnilead.data_tools.cli import UserError, guard_streams, is_memory, show, tell
from omnilead.data_tools.plugins import blame
from omnilead.data_tools.plugins import plugin as plugin
from omnilead.data_tools.storage import locked_by_another as locked_by_another
from omnilead.data_tools.storage import missing_package as missing_package
from omnilead.data_tools.storage import prefetch as prefetch
from omnilead.data_tools.storage import sync as sync
from omnilead.data_tools.storage import write_whole as write_whole

ARRAYS = (".npy", ".npz")
LENGTHS = ("train.steps", "train.epochs")
# A copy of data_tools' list, whose module would also import the record readers. A test compares the
# two.
LEADS = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")
LIMB, ALL = tuple(range(6)), tuple(range(12))
# Oh et al. 2022, section 4
SUBSETS = {
    "12": ALL,
    "6": LIMB,
    "3": (0, 1, 7),
    "2": (0, 1),
    "1": (0,),
}
_INDEX = {lead.upper(): i for i, lead in enumerate(LEADS)}
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
RUN_CODE: Any = {
    "action": "store_true",
    "help": "allow running the custom encoder or head code in the model folder",
}
OWN = re.compile(r"(?s).+\.py:\w+")  # file.py:Name, the user's own code
MAX_YAML_BYTES, MAX_YAML_VALUES, MAX_INTEGER = 2**20, 10_000, 2**63


class ConfigError(UserError):
    """A setting is wrong: the message is one line with the key, its value and what to write
    instead."""


class OutputError(UserError):
    """A result cannot be computed or written: the message is one line."""


def leads_in_order(leads: str | int | Iterable[str], key: str = "leads") -> tuple[int, ...]:
    """Indices into LEADS, in the order given."""
    mend = f'use {", ".join(SUBSETS)}, or names out of {" ".join(LEADS)} such as "I,II,V2"'
    text = str(leads) if isinstance(leads, str | int) else ",".join(map(str, leads))
    if text.strip() in SUBSETS:
        return SUBSETS[text.strip()]
    names = [name.strip().upper() for name in text.split(",")]
    unknown = [name for name in names if name not in _INDEX]
    if unknown:
        raise ConfigError(f"{key}={text!r}: no lead is called {unknown[0]!r}: {mend}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{key}={text!r}: a lead is named twice: {mend}")
    return tuple(_INDEX[name] for name in names)


def parse_leads(leads: str | int | Iterable[str], key: str = "leads") -> tuple[int, ...]:
    """Indices into LEADS, ascending: a model takes its leads in the order of LEADS, whatever order
    is given."""
    return tuple(sorted(leads_in_order(leads, key)))


def describe_leads(leads: Iterable[int]) -> str:
    """The names of leads; the inverse of `parse_leads`."""
    return ",".join(LEADS[i] for i in leads)


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` updated with `above`, section by section."""
    both = dict(below)
    for name, value in above.items():
        inner = both.get(name)
        both[name] = (
            merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return both


@contextmanager
def blaming(setting: str, hint: str = "") -> Iterator[None]:
    """Wraps plugged-in code: whatever it raises becomes one line about the setting that named
    it."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"{setting}: {error if isinstance(error, ConfigError) else blame(error)}{hint}"
        ) from None


class _YamlLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Has limits, because a file may come from anyone: an alias counts as all the values it
    repeats ("billion laughs"), and integers have at most 63 bits. Reads 5e-5 as a number, where
    YAML 1.1 has a string. A key must not stand twice: PyYAML would use the last value without a
    word."""

    def __init__(self, stream: bytes | str) -> None:
        super().__init__(stream)
        self.values = 0
        self.sizes: dict[int, int] = {}  # number of values of each finished node, by its id

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, before = self.check_event(yaml.AliasEvent), self.values
        node = super().compose_node(parent, index)
        # an unfinished node contains itself
        self.values += self.sizes.get(id(node), MAX_YAML_VALUES) if is_alias else 1
        if self.values > MAX_YAML_VALUES:
            raise yaml.YAMLError(
                f"more than {MAX_YAML_VALUES:,} values, counting those that aliases repeat"
            )
        self.sizes.setdefault(id(node), self.values - before)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if (key.tag, key.value) in seen:
                raise yaml.YAMLError(
                    f"line {key.start_mark.line + 1}: the key {key.value[:40]!r} stands twice: "
                    "remove one"
                )
            seen.add((key.tag, key.value))
        return node

    def construct_integer(self, node: Any) -> int | str:
        if ":" in node.value:  # 8:1:1 is text, not a base-60 number as in YAML 1.1
            return str(node.value)
        value: int = self.construct_yaml_int(node)
        if abs(value) >= MAX_INTEGER:
            raise yaml.YAMLError("an integer has more than 63 bits")
        return value


_YamlLoader.add_constructor("tag:yaml.org,2002:int", _YamlLoader.construct_integer)
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def find_config(
    name: str | Path, folder: str = "", key: str = "--config", beside: str | Path = ""
) -> Path:
    """Finds a file by its path relative to `beside`, or a shipped config by its name, with or
    without suffix."""
    stem = str(name).removeprefix("configs/").removeprefix(f"{folder}/")
    for path in (
        Path(beside, name),
        *(CONFIGS / folder / f"{stem}{suffix}" for suffix in ("", ".yaml", ".json")),
    ):
        if os.path.lexists(path) and not os.path.isdir(path):  # named pipes are allowed
            return path
    names = shipped(folder)
    near = difflib.get_close_matches(Path(stem).stem, names, 3, 0.5)
    mend = f"did you mean {', '.join(near)}?" if near else f"use {', '.join(names)}"
    raise ConfigError(
        f"{key}{' ' if key[0] == '-' else '='}{str(name)!r}: no such file or shipped config: {mend}"[
            :500
        ]
    )


def shipped(folder: str) -> list[str]:
    """The names of the configs in a folder."""
    return sorted(path.stem for path in (CONFIGS / folder).glob("*.*"))


def read_yaml(path: Path, folder: str = "", above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads a file and merges it over its `base:`, a path relative to the file or a config shipped
    in `folder`."""
    tree = read_mapping(path)
    base = tree.pop("base", None)
    if base is None:
        return tree
    path = path.resolve()
    if path in above:
        raise ConfigError(
            f"{path}: `base` refers back to itself: name another file, or leave it out"
        )
    return merge(
        read_yaml(
            find_config(str(base), folder, f"{path}: base", path.parent), folder, (*above, path)
        ),
        tree,
    )


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads one YAML file, without its `base:`."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_YAML_BYTES + 1)
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # also NUL in a name, or a loop of symbolic links
        raise ConfigError(
            f"{path}: {getattr(error, 'strerror', None) or error}: give another --config"
        ) from None
    if len(content) > MAX_YAML_BYTES:
        raise ConfigError(
            f"{path}: has more than {MAX_YAML_BYTES:,} bytes: give a file of settings"
        )
    tree = parse_yaml(content, str(path)) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: settings must be a mapping, key: value")
    return tree


def parse_yaml(text: str | bytes, source: str) -> Any:
    try:
        return yaml.load(text, _YamlLoader)
    except (
        Exception
    ) as error:  # scalar constructors raise any error; RecursionError if nested too deeply
        raise ConfigError(
            f"{source}: not valid YAML: {' '.join(str(error).split())}"[:300]
        ) from None


def overridden(
    tree: dict[str, Any], overrides: Sequence[str] | Mapping[str, Any]
) -> dict[str, Any]:
    """Applies --set strings, or values by dotted key. Setting train.steps unsets train.epochs, and
    the reverse."""
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else map(_parsed, overrides))
    given = dict(pairs)
    pairs += [
        (other, None)
        for one, other in zip(LENGTHS, LENGTHS[::-1], strict=True)
        if given.get(one) and other not in given
    ]
    for key, value in pairs:
        for name in reversed(key.split(".")):
            value = {name: value}
        tree = merge(tree, value)
    return tree


def _parsed(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override!r}: write key=value, for example --set train.lr=1e-4")
    return key, parse_yaml(text, f"--set {key}")


def writable(place: Path, flag: str) -> None:
    """Raises before hours of work, not after them, if a file cannot be written."""
    folder, mend = place.parent, "name a file in an existing folder"
    if place.is_dir():
        raise ConfigError(f"{flag} {place}: is a folder: {mend}")
    if not folder.is_dir():
        raise ConfigError(f"{flag} {place}: the folder {folder} does not exist: {mend}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{flag} {place}: no permission to write in {folder}: choose another folder"
        )


def write_result(place: Path, text: str, flag: str) -> None:
    """Writes a command's result to the file that `flag` names; an OutputError if that fails."""
    try:
        write_whole(place, text)
    except OSError as error:
        raise OutputError(
            f"{flag} {place}: {error.strerror or error}: free disk space, or choose another path"
        ) from None


def environment() -> tuple[int, int, int]:
    """Rank, world size and local rank, as set by the launcher."""
    names = ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")
    try:
        rank, world, local = (int(os.environ.get(name, default)) for name, default in names)
        if not 0 <= rank < world:
            raise ValueError(f"RANK={rank}, WORLD_SIZE={world}")
    except ValueError as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE, LOCAL_RANK in the environment: {error}: start with deepspeed or "
            "torchrun"
        ) from None
    return rank, world, local


def cores_per_rank() -> int:
    """CPU cores of this machine for each of its ranks."""
    here = next(
        (
            int(os.environ[name])
            for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")
            if os.environ.get(name)
        ),
        1,
    )
    return max(1, len(os.sched_getaffinity(0)) // here)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts by dotted key: {"train.lr": 5e-5, ...}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{name}": value}
        )
    return flat


def positive(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def leave(code: int) -> NoReturn:
    """Exits without shutting down the interpreter, where gloo threads that still hold tensors would
    raise SIGABRT."""
    code = show("") or code
    sys.stderr.flush()
    os._exit(code)


def one_blas_thread() -> None:
    """Call before importing NumPy: its threads and PyTorch's would block each other, and probes
    take ten times as long."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def interruptible(name: str) -> None:
    """Prints one line instead of a traceback for Ctrl-C (importing torch takes seconds; exit code
    130) or a lack of memory."""
    guard_streams()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            tell(f"{name}: interrupted")
            # Python would end itself by SIGINT: 130 in a shell, but -2 for a program that started
            # it
            leave(130)
        elif is_memory(error):
            tell(f"{name}: out of memory: raise the limit (ulimit -v), or free some")
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
