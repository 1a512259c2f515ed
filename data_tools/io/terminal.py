"""Helpers for all command lines: a parser, and one-line errors for wrong arguments, failing output
and lack of memory.

Parser("omnilead").parse_args()
tqdm(..., disable=not is_interactive())   # progress bar on a terminal or in a notebook
say("step 10")                            # keeps running if standard output cannot be written
tell("note: ...")                         # on standard error
if is_out_of_memory(error): ...           # whatever the message

Only this module prints, because text may come from anybody's file: characters that would control the
terminal are escaped here.
"""

import argparse
import atexit
import ctypes
import difflib
import errno
import io
import logging
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any, NoReturn

from .errors import UserError as UserError
from .errors import printable, printable_lines
from .errors import write_error_advice as write_error_advice

# How torch, C++, Python's threads, the system and its dynamic loader report "out of memory"
OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "can't start new thread",
    "Cannot allocate memory",
    "Resource temporarily unavailable",
    "failed to map segment",
)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


class Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        guard_streams()

    def print_help(self, file: Any = None) -> None:
        if code := print_result(self.format_help()):
            sys.exit(code)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, but reports an unknown argument here, because this parser knows
        which options the user may have meant."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option, _, value = unknown[0].partition("=")
            message = f"unrecognized arguments: {' '.join(unknown)}"
            value = value or " ".join(unknown[1:2])
            if option.startswith("-") and (mend := self.suggest(option, value)):
                message += f": did you mean {mend}?"
            self.error(message)
        return known, unknown

    def suggest(self, option: str, value: str) -> str:
        """Returns what to write instead of an unknown option; "" if nothing is close."""
        near = difflib.get_close_matches(option, self._option_string_actions, 1)
        return near[0] if near else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, invalid_choice_text(value, action.choices))

    def error(self, message: str) -> NoReturn:
        self.exit(
            2,
            f"{self.prog.removeprefix('python -m ')}: {printable(' '.join(message.split()))} "
            "(--help shows all)\n",
        )


def invalid_choice_text(value: Any, choices: Iterable[Any]) -> str:
    names = [str(choice) for choice in choices]
    if near := difflib.get_close_matches(str(value), names, 1):
        return f"invalid choice: {value!r}: did you mean {near[0]}?"
    return f"invalid choice: {value!r} (choose from {', '.join(names)})"


@cache
def guard_streams() -> None:
    """Replaces closed streams, escapes characters that a stream cannot encode, and prevents tracebacks if
    output fails. Call it before printing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort:
        logging.lastResort.setFormatter(PrintableFormatter())
    sys.excepthook = _excepthook
    atexit.register(_flush_at_exit)


class PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints no traceback if standard output cannot be written or its reader has closed the pipe."""
    if (
        isinstance(error, OSError)
        and error.filename is None
        and error.errno in (errno.EPIPE, errno.ENOSPC, errno.EBADF)
    ):
        _report_failed_output(error)
    else:
        sys.__excepthook__(kind, error, trace)


def _flush_at_exit() -> None:
    if print_result(""):
        os._exit(1)  # sys.exit no longer sets the exit code: Python is already exiting


def print_result(text: str) -> int:
    """Prints a command's result. Returns the exit code: 0 if the text is printed or the reader has
    closed the pipe, else 1."""
    try:
        print(printable_lines(text), end="", flush=True)
    except OSError as error:
        return _report_failed_output(error)
    return 0


def _report_failed_output(error: OSError) -> int:
    drop_output()
    if error.errno == errno.EPIPE:
        return 0
    tell(f"standard output: {error.strerror}: redirect it elsewhere")
    return 1


def drop_output() -> int:
    """Discards standard output: what is in the buffer, because writing it at exit would fail again, and
    all that follows. Returns the exit code 0."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def say(text: str) -> None:
    """Prints a message. If it cannot be printed, the program continues."""
    try:
        print(printable_lines(text), flush=True)
    except OSError as error:
        drop_output()
        tell(f"warning: standard output: {error.strerror}: no more output there")


class OutputClosed(BrokenPipeError):
    """Nobody reads standard output any longer, as after `| head`."""


def echo(text: object) -> None:
    """Prints a message. If it cannot be printed, the error is raised."""
    try:
        print(printable_lines(str(text)))
    except BrokenPipeError:
        raise OutputClosed from None


def tell(text: str) -> None:
    """Prints a message to standard error, on one line."""
    print(printable(text), file=sys.stderr, flush=True)


def file_error_parts(
    error: OSError, option: str, place: str | os.PathLike[str] | None
) -> tuple[str, ...]:
    """Returns parts of an error message: the file that cannot be read or written, and why. If the command
    was writing to its output, the parts name `option` and its value `place` instead of a file. This is
    also the case if the error names no file, as when the disk is full."""
    file = error.filename
    if place and file:
        whole, out = os.path.abspath(os.fsdecode(file)), os.path.abspath(place)
        temporary = os.path.join(os.path.dirname(out), f".{os.path.basename(out)}.")
        inside = whole.startswith((f"{out}{os.sep}", f"{out}.", temporary))
        # The error may name the output itself, a file in it, or a folder above it
        if whole == out or inside or out.startswith(f"{whole}{os.sep}"):
            file = None
    why = error.strerror or str(error)
    if place and not file:
        return option, f" {os.fspath(place)}: {why}"
    return (f"{file or 'a file'}: {why}",)


def is_interactive() -> bool:
    """Returns True on a terminal or in a notebook, where progress bars are shown."""
    return sys.stderr.isatty() or is_notebook()


def is_notebook() -> bool:
    return "ipykernel" in sys.modules


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns True if this error, or an error that caused it, means out of memory."""
    # A BlockingIOError means a held lock, but has the same message as the error of a thread that cannot
    # start
    if error is None or isinstance(error, BlockingIOError):
        return False
    return (
        isinstance(error, MemoryError)
        or any(words in str(error) for words in OUT_OF_MEMORY_TEXTS)
        or is_out_of_memory(error.__context__)
    )


@cache
def keep_freed_memory() -> None:
    """Lets this process keep up to 256 MB of freed memory. By default glibc returns large buffers to
    the kernel, and the next record or batch must fetch every page again. That took two thirds of the
    time in which a CPU adds noise to crops. Does nothing without glibc."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(M_TRIM_THRESHOLD, 256 * 2**20)
