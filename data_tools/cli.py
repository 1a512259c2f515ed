"""What all command lines here share: a parser, and one-line errors for wrong arguments, failing output and too little memory.

Parser("omnilead").parse_args()
tqdm(..., disable=not interactive())      # a bar on a terminal and in a notebook
say("step 10")                            # a full disk behind standard output does not end the work
if is_memory(error): ...                  # out of memory, in whatever words
"""

import argparse
import atexit
import ctypes
import errno
import io
import os
import sys
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any, NoReturn

# "out of memory", in the words of torch, C++, Python's threads, the system and its loader of libraries
MEMORY: tuple[str, ...] = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "can't start new thread")
MEMORY += ("Cannot allocate memory", "Resource temporarily unavailable", "failed to map segment")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


class Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        guard_streams()

    def print_help(self, file: Any = None) -> None:
        if code := show(self.format_help()):
            sys.exit(code)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {' '.join(message.split())} (--help shows all)\n")


@cache
def guard_streams() -> None:
    """To be called before anything is printed: replaces a closed stream and escapes what a stream cannot encode."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.excepthook = _unhandled
    atexit.register(_flush)


def _unhandled(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """No traceback if standard output cannot be written or nobody reads it any more."""
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC, errno.EBADF):
        _report(error)
    else:
        sys.__excepthook__(kind, error, trace)


def _flush() -> None:
    if show(""):
        os._exit(1)  # too late for sys.exit


def show(text: str) -> int:
    """Print a command's result. -> the exit code, 0 also if the reader has closed the pipe."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        return _report(error)
    return 0


def _report(error: OSError) -> int:
    drop_output()
    if error.errno == errno.EPIPE:
        return 0
    print(f"standard output: {error.strerror}: choose another place", file=sys.stderr, flush=True)
    return 1


def drop_output() -> int:
    """Also what is still in the buffer, which would raise again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def say(text: str) -> None:
    """Print a remark; failing to do so must not end the work."""
    try:
        print(text, flush=True)
    except OSError as error:
        drop_output()
        print(f"warning: standard output: {error.strerror}: nothing more is printed there", file=sys.stderr, flush=True)


def interactive() -> bool:
    """Whether somebody sees progress bars: on a terminal or in a notebook."""
    return sys.stderr.isatty() or in_notebook()


def in_notebook() -> bool:
    return "ipykernel" in sys.modules


def is_memory(error: BaseException | None) -> bool:
    """Whether this error, or one that led to it, is a lack of memory."""
    if error is None or isinstance(error, BlockingIOError):  # a lock held by another has the words of a thread's failed start
        return False
    return isinstance(error, MemoryError) or any(words in str(error) for words in MEMORY) or is_memory(error.__context__)


@cache
def keep_freed_memory() -> None:
    """glibc returns large buffers to the kernel when they are freed, and the next record or batch pays for every page again: on
    a CPU two thirds of the time of noise. From now on this process keeps up to 256 MB of them. Without glibc: nothing."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(M_TRIM_THRESHOLD, 256 * 2**20)
