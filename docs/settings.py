"""Write docs/settings.md: every setting, with its default, its values and the comment beside it in the code.

python -m docs.settings [FILE.md]
"""

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel

from engine.config import Config, FinetuneConfig, RunConfig, flatten

INTRO = """# Settings

In a YAML file, or as `--set section.name=value`; a shipped config (configs/) sets what its method needs and leaves the rest as
here. `omnilead pretrain --schema` and `omnilead finetune --schema` print the same as a JSON schema for editors. This page is
written by `python -m docs.settings`.
"""
KINDS: dict[str, type[RunConfig]] = {"Pre-training": Config, "Fine-tuning": FinetuneConfig}
WORDS = {"boolean": "true, false", "integer": "integer", "number": "number", "string": "text", "null": "null"}
HUGE = 10_000  # a bound that only keeps nonsense out is not shown
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def comments(section: type) -> dict[str, str]:
    """By field: the comment beside it, or those above it."""
    found: dict[str, str] = {}
    for part in reversed(section.__mro__):
        if not (is_dataclass(part) or issubclass(part, BaseModel)) or part is BaseModel:
            continue
        lines = textwrap.dedent(inspect.getsource(part)).splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                of_field = [line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno]]
                above = node.lineno - 1
                while lines[above - 1].strip().startswith("# "):
                    above -= 1
                of_field += [line.strip().removeprefix("# ") for line in lines[above : node.lineno - 1]]
                found[node.target.id] = " ".join(filter(None, of_field)).replace("None:", "null:")
    return found


def values(schema: dict[str, Any]) -> str:
    """What a setting may be, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(values, schema["anyOf"])))
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        inner = schema.get("items") or {"anyOf": schema.get("prefixItems", [{}])}
        return f"list of ({values(inner)})" if "anyOf" in inner or "enum" in inner else f"list of {values(inner)}"
    words = WORDS.get(schema.get("type", ""), "mapping")
    return ", ".join([words, *(f"{name} {schema[key]:g}" for key, name in BOUNDS.items() if abs(schema.get(key, HUGE)) < HUGE)])


def tables(kind: type[RunConfig], known: set[type]) -> Iterator[str]:
    """Of the sections that are not `known` yet, which are then."""
    schema = kind.model_json_schema()
    defaults = flatten(kind().tree())

    def rows(prefix: str, section: type, of: dict[str, Any]) -> Iterator[str]:
        meaning = comments(section)
        for name, one in of["properties"].items():
            key, reference = f"{prefix}{name}", next((x["$ref"] for x in (one, *one.get("anyOf", ())) if "$ref" in x), None)
            inside = schema["$defs"][reference.rpartition("/")[2]] if reference else {}
            if "properties" not in inside:
                default = json.dumps(defaults.get(key, one.get("default")))
                yield f"| `{key}` | `{default}` | {values(one | inside)} | {meaning[name]} |".replace("|  |", "| |")
                continue
            hint = get_type_hints(section)[name]
            below = next(part for part in (hint, *get_args(hint)) if isinstance(part, type))
            if prefix or below not in known:
                known.add(below)
                yield from rows(f"{key}.", below, inside)

    yield from rows("", kind, schema)


def text() -> str:
    known: set[type] = set()
    pages = [INTRO]
    for title, kind in KINDS.items():
        shared = sorted({name.partition(".")[0] for name in flatten(kind.defaults)})
        same = [name for name in kind.model_fields if kind.model_fields[name].annotation in known]
        pages.append(f"## {title}\n")
        if same:
            differ = ", ".join(f"`{key}` is {json.dumps(value)}" for key, value in flatten(kind.defaults).items())
            pages.append(f"Sections {', '.join(same)} as in pre-training; by default {differ}.\n" if shared else "")
        pages += ["| setting | default | values | meaning |\n|---|---|---|---|", *tables(kind, known), ""]
    return "\n".join(pages)


def main(out: Path) -> None:
    out.write_text(text())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("settings.md"))
