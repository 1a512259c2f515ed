"""Errors that commands print on one line."""

import functools
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from omnilead.data_tools.io.errors import Flag as Flag
from omnilead.data_tools.io.plugins import error_with_line
from omnilead.data_tools.io.terminal import UserError

Kind = TypeVar("Kind")


Facts = dict[str, Any]  # values by name, as in a JSON object


def join_first_names(names: Sequence[Any], most: int) -> str:
    """Joins the first `most` names with commas for a message; "..." stands for the rest."""
    text = ", ".join(map(str, names[:most]))
    if len(names) > most:
        text += ", ..."
    return text


class ConfigError(UserError):
    """Raised if a setting is wrong. The message is one line with the key, its value and what to
    write instead."""


class OutputError(UserError):
    """Raised if a result cannot be computed or written. The message is one line."""

    code = 1


class TrainError(UserError):
    """Raised if a run failed. The message is one line."""

    code = 1


def one_line_errors(kind: type[Kind]) -> type[Kind]:
    """Decorates a dataclass that pydantic checks: a wrong argument raises a ConfigError of one
    line instead of pydantic's ValidationError."""
    from pydantic import ValidationError  # imported late, so that --help does not wait for pydantic

    validate: Any = kind.__init__

    @functools.wraps(validate)
    def init_with_one_line_errors(self: Any, *args: Any, **settings: Any) -> None:
        try:
            validate(self, *args, **settings)
        except ValidationError as error:
            raise ConfigError(f"{kind.__name__}: {_describe_wrong_setting(kind, error)}") from None

    kind.__init__ = init_with_one_line_errors  # type: ignore[method-assign]
    return kind


def _describe_wrong_setting(kind: Any, error: Any) -> str:
    errors, mend = error.errors(include_url=False), ""
    key, value = str(errors[0]["loc"][0]), errors[0]["input"]
    setting = f"{key}={reprlib.repr(value)}"
    if errors[0]["type"] != "unexpected_keyword_argument":
        if isinstance(value, list) and "tuple_type" in [detail["type"] for detail in errors]:
            mend = f": write {key}={reprlib.repr(tuple(value))}"
        return f"{setting}: {errors[0]['msg'][0].lower()}{errors[0]['msg'][1:]}{mend}"
    for name, field in kind.__dataclass_fields__.items():
        if key in getattr(field.type, "__dataclass_fields__", ()):
            part = f"{field.type.__name__}({key}=...)"
            return f"{setting}: belongs to {name}: write {name}={part}"
    return f"{setting}: no such setting: they are {', '.join(kind.__dataclass_fields__)}"


@contextmanager
def blaming(setting: str, hint: str = "") -> Iterator[None]:
    """Wraps a call of plugged-in code or the loading of a file. Whatever is raised becomes one
    line about `setting`, which named the code or file. This includes SystemExit: a sys.exit in
    the code would otherwise end a run as if all were well."""
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = error if isinstance(error, UserError) else error_with_line(error)
        raise ConfigError(f"{setting}: ", reason, hint) from None
