"""YAML files of settings, read within bounds: a file may be anybody's.

read(Path("configs/pretrain/small.yaml"))  # merged over the file that its `base:` names
parse("5e-5", "--set train.lr")            # 5e-5
"""

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from engine.common import ConfigError

MAX_BYTES, MAX_VALUES, MAX_INTEGER = 2**20, 10_000, 2**63


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`, section by section."""
    both = dict(below)
    for name, value in above.items():
        inner = both.get(name)
        both[name] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Bounded, as the file may be anybody's: an alias counts as much as what it repeats ("billion laughs"), integers fit into
    64 bits. And 5e-5 is a number, which YAML 1.1 takes for a string."""

    def __init__(self, stream: bytes | str) -> None:
        super().__init__(stream)
        self.values = 0
        self.sizes: dict[int, int] = {}  # of each finished node, by its id

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, before = self.check_event(yaml.AliasEvent), self.values
        node = super().compose_node(parent, index)
        self.values += self.sizes.get(id(node), MAX_VALUES) if is_alias else 1  # an unfinished node: an alias of itself
        if self.values > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values, counting those that aliases repeat")
        self.sizes.setdefault(id(node), self.values - before)
        return node

    def construct_integer(self, node: Any) -> int:
        value: int = self.construct_yaml_int(node)
        if abs(value) >= MAX_INTEGER:
            raise yaml.YAMLError("an integer of more than 63 bits")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file, merged over the file that its `base:` names."""
    try:
        path = path.resolve()
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:  # also a name with NUL, a circle of links
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}: give another --config") from None
    if path in seen or len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: `base` refers back to itself, or the file exceeds {MAX_BYTES:,} bytes")
    tree = parse(content, str(path)) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: settings must be a mapping, key: value")
    base = tree.pop("base", None)
    return tree if base is None else merge(read(path.parent / str(base), (*seen, path)), tree)


def parse(text: str | bytes, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # PyYAML raises whatever the constructor of a scalar does; RecursionError if nested too deeply
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}"[:300]) from None
