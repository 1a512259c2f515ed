"""YAML files and values as settings, bounded: the file may be anybody's.

read(Path("configs/pretrain/small.yaml"))  # over the file that its `base:` names
parse("5e-5", "--set train.lr")            # 5e-5
"""

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from engine.common import ConfigError

MOST_BYTES, MOST_NODES, MOST_INTEGER = 2**20, 10_000, 2**63


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Aliases count with all that they repeat, so that a few lines cannot grow without bound. YAML 1.1 takes 5e-5 for a string;
    a learning rate is none."""

    def __init__(self, stream: bytes | str) -> None:
        super().__init__(stream)
        self.nodes = 0
        self.sizes: dict[int, int] = {}  # of each finished node, by its id

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, before = self.check_event(yaml.AliasEvent), self.nodes
        node = super().compose_node(parent, index)
        self.nodes += self.sizes.get(id(node), MOST_NODES) if is_alias else 1  # an unfinished node is an alias of itself
        if self.nodes > MOST_NODES:
            raise yaml.YAMLError(f"more than {MOST_NODES:,} values, counting those that aliases repeat")
        self.sizes.setdefault(id(node), self.nodes - before)
        return node

    def construct_integer(self, node: Any) -> int:
        value: int = self.construct_yaml_int(node)
        if abs(value) >= MOST_INTEGER:
            raise yaml.YAMLError("an integer of more than 63 bits")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file over its `base`."""
    try:
        path = path.resolve()
        if path in seen:
            raise ConfigError(f"{path}: base: goes in a circle")
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:  # of a name with NUL, of links in a circle
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}: give another --config") from None
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path}: larger than {MOST_BYTES:,} bytes: give another --config")
    tree = parse(content, str(path)) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: is no table of keys and values")
    base = tree.pop("base", None)
    return tree if base is None else over(read(path.parent / str(base), (*seen, path)), tree)


def parse(text: str | bytes, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{where}: no UTF-8 text: {error.reason} at position {error.position}: write it in UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{where}: no YAML of settings: nested too deeply") from None
    except Exception as error:  # PyYAML raises whatever the constructor of a scalar does
        raise ConfigError(f"{where}: no YAML: {' '.join(str(error).split())}"[:300]) from None


def over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for name, value in above.items():
        inner = both.get(name)
        both[name] = over(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both
