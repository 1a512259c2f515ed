"""The comments beside settings, as descriptions in their JSON schema.

    described_schema(Config)["properties"]["run"]["description"]    # "folder of the run; ..."

They are read when somebody asks for the schema. pydantic's `use_attribute_docstrings` would read them
at each start, which makes importing the settings a third slower (0.64 instead of 0.48 CPU-seconds),
and would miss those that AugmentConfig inherits.
"""

import ast
import inspect
import textwrap
from dataclasses import is_dataclass
from typing import Any, get_args

from pydantic import BaseModel


def described_schema(settings: type[BaseModel]) -> dict[str, Any]:
    schema = settings.model_json_schema()
    for section in sections(settings):
        of_section = schema if section is settings else schema["$defs"][section.__name__]
        for name, comment in field_comments(section).items():
            if name in of_section["properties"]:
                of_section["properties"][name]["description"] = comment
    return schema


def sections(settings: type) -> set[type]:
    """Returns this class and the classes of all sections inside it."""
    found = {settings}
    fields: dict[str, Any] = getattr(settings, "__pydantic_fields__", {})
    for field in fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and hasattr(kind, "__pydantic_fields__"):
                found |= sections(kind)
    return found


def field_comments(section: type) -> dict[str, str]:
    """Returns {field: its comments, which stand beside or above it in the code}."""
    comments: dict[str, str] = {}
    for part in reversed(section.__mro__):
        if not (is_dataclass(part) or issubclass(part, BaseModel)) or part is BaseModel:
            continue
        lines = textwrap.dedent(inspect.getsource(part)).splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                beside = [
                    line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno]
                ]
                first = node.lineno - 1
                while lines[first - 1].strip().startswith("# "):
                    first -= 1
                above = [line.strip().removeprefix("# ") for line in lines[first : node.lineno - 1]]
                comment = " ".join(filter(None, beside + above))
                comments[node.target.id] = comment.replace("None:", "null:")
    return comments
