"""Declare a command's options once, as parameters of its Python function. The command's parser and help
are made from the parameters, and the command and the function check values in the same way.

    Workers = Annotated[int | None, Option("reading threads (all)", "N", low=1)]
    def embed(model: Annotated[str, Option("RUN, or small", "RUN", "--model")], *, workers: Workers = None): ...

    add_options(parser, embed)                       # --model RUN, --workers N
    check_values(embed, ("RUN",), {"workers": 0})    # DataError: argument --workers: 0: must be ...

A parameter before the * is a positional argument unless its Option has a flag. A Literal has choices,
a bool is a flag, a Sequence takes several values, a tuple[float, float] two; a Sequence of tuples may
be given many times. Of a union, a command takes the first type; the
others are for Python alone.
"""

import argparse
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from .errors import DataError, Flag
from .terminal import invalid_choice_text


class Option(NamedTuple):
    """Declares what a parameter's name, type and default do not say about an option."""

    help: str
    metavar: str | tuple[str, ...] | None = None
    flag: str = ""  # the option on the command line, if it is not --NAME of the parameter
    # True if the command needs the option but the Python function does not: without it, the function
    # returns its result
    required: bool = False
    low: float = -math.inf
    high: float = math.inf


class DeclaredOption(NamedTuple):
    """An option of a command, made from a parameter of the command's function."""

    name: str  # name of the parameter in Python
    flag: str  # name of the option on the command line
    option: Option
    kind: type
    several: bool
    size: int  # number of values for one use of the option: more than one for a tuple
    choices: tuple[Any, ...]
    default: Any

    def parse(self, text: str) -> Any:
        """Returns the value of a text on the command line. argparse calls this as the argument's `type`."""
        value: Any = text
        with suppress(ValueError):
            value = self.kind(text)
        self.check(value)
        return value

    def check(self, value: Any) -> None:
        """Raises an ArgumentTypeError if the value is not allowed."""
        if self.choices and value not in self.choices:
            raise argparse.ArgumentTypeError(invalid_choice_text(value, self.choices))
        if self.kind not in (int, float):
            return
        low, high = self.option.low, self.option.high
        with suppress(TypeError, ValueError, OverflowError):
            if low <= value <= high and self.kind(value) == value:
                return
        what = "a whole number" if self.kind is int else "a number"
        if high < math.inf:
            what += f" from {low} to {high}"
        elif low > -math.inf:
            what += f" of at least {low}"
        raise argparse.ArgumentTypeError(f"{value!r}: must be {what}")


def declared_options(function: Callable[..., Any]) -> Iterator[DeclaredOption]:
    for name, parameter in inspect.signature(function).parameters.items():
        if not hasattr(parameter.annotation, "__metadata__"):
            continue  # this parameter is not an option of the command
        flag = name if parameter.kind is not parameter.KEYWORD_ONLY else ""
        yield declare_option(name, parameter.annotation, parameter.default, flag)


def declare_option(
    name: str, annotation: Any, default: Any = None, flag: str = ""
) -> DeclaredOption:
    """Returns the option that an annotation declares. On the command line it has the flag that the
    annotation sets, else `flag`, else --NAME."""
    option: Option = annotation.__metadata__[0]
    flag = option.flag or flag or f"--{name.replace('_', '-')}"
    kind = first_of_union(annotation.__origin__)
    several = get_origin(kind) is Sequence
    if several:
        kind = first_of_union(get_args(kind)[0])
    size = len(get_args(kind)) if get_origin(kind) is tuple else 1
    if size > 1:
        kind = get_args(kind)[0]
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if choices:
        kind = type(choices[0])
    return DeclaredOption(name, flag, option, kind, several, size, choices, default)


def first_of_union(annotation: Any) -> Any:
    """Returns the first type of a union; any other type as it is."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation)[0] if is_union else annotation


def add_options(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    for parameter in declared_options(function):
        add_option(parser, parameter)


def add_option(
    parser: argparse.ArgumentParser, parameter: DeclaredOption, more_help: str = ""
) -> None:
    settings: dict[str, Any] = {"help": parameter.option.help + more_help}
    required = parameter.option.required or parameter.default is inspect.Parameter.empty
    if parameter.flag.startswith("-"):
        settings |= {"dest": parameter.name, "required": required}
    if not required:
        settings["default"] = parameter.default
    if parameter.kind is bool:
        settings["action"] = "store_true"
    else:
        settings["metavar"] = parameter.option.metavar
    if parameter.kind in (int, float):
        settings["type"] = parameter.parse
    if parameter.choices:
        settings["choices"] = parameter.choices
    if parameter.size > 1:
        settings["nargs"] = parameter.size
        if parameter.several:
            settings["action"] = "append"
    elif parameter.several:
        settings["nargs"] = "+"
    parser.add_argument(parameter.flag, **settings)


def check_values(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises the error that the command would print if one of these values is not allowed."""
    options = {parameter.name: parameter for parameter in declared_options(function)}
    values = {**dict(zip(options, args, strict=False)), **kwargs}
    for name, value in values.items():
        parameter = options.get(name)
        if parameter is None or value is parameter.default:  # Python itself refuses unknown names
            continue
        if parameter.kind not in (int, float) and not parameter.choices:
            continue  # any value is allowed; the loop below would read a Dataset crop by crop
        is_several = parameter.several or parameter.size > 1
        several = is_several and not isinstance(value, str | os.PathLike)
        for single in value if several else [value]:
            try:
                parameter.check(single)
            except argparse.ArgumentTypeError as error:
                raise DataError("argument ", Flag(parameter.flag), f": {error}") from None
