"""What every part of the engine stands on: lead names, errors, whole files, and the command line.

parse_leads("3")                  # (0, 1, 7); also "12", "6", "2", "1" or names: "I,II,V2"
describe_leads((0, 1, 7))         # "I,II,V2"
write_whole(path, text)           # all of it or nothing
interruptible("engine.x")         # first of all, in a program

A signal always holds the twelve leads in the order of LEADS until the last step of the augmentation. There, a subset either
zeroes the others (padded: the paper's "P-N leads", and any model can take it) or drops them (a model of N channels).
"""

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from data_tools.cli import Parser as Parser
from data_tools.cli import guard_streams, is_memory

# Written again rather than imported: who trains needs nothing of the data tools' records. A test holds the two together.
LEADS = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")
LIMB, ALL = tuple(range(6)), tuple(range(12))
SUBSETS = {"12": ALL, "6": LIMB, "3": (0, 1, 7), "2": (0, 1), "1": (0,)}  # Oh et al. 2022, section 4
_INDEX = {lead.upper(): i for i, lead in enumerate(LEADS)}


class ConfigError(Exception):
    """A setting that cannot be: one line that names the key, the value seen and what to write instead."""


class OutputError(Exception):
    """One line: what could not be written."""


def leads_in_order(leads: str | int | Iterable[str], key: str = "leads") -> tuple[int, ...]:
    """Indices into LEADS, in the order in which they are named."""
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
    """The same, ascending: a model sees leads in their one canonical order, however they were asked for."""
    return tuple(sorted(leads_in_order(leads, key)))


def describe_leads(leads: Iterable[int]) -> str:
    """The inverse of `parse_leads`, by names."""
    return ",".join(LEADS[i] for i in leads)


def writable(place: Path, flag: str) -> None:
    """Asked before the work, not after it."""
    folder, mend = place.parent, "name a file in a folder that is there"
    if place.is_dir():
        raise ConfigError(f"{flag} {place}: is a folder: {mend}")
    if not folder.is_dir():
        raise ConfigError(f"{flag} {place}: no folder {folder}: {mend}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {place}: {folder} may not be written to: choose another folder")


@contextmanager
def writing(place: Path, flag: str) -> Iterator[None]:
    """What a command was asked for, at the end of its work."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{flag} {place}: {error.strerror or error}: make room, or choose another place") from None


def write_whole(path: Path, content: str | bytes) -> None:
    """All of it or nothing, on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def interruptible(name: str) -> None:
    """Seconds pass while torch is imported: Ctrl-C is then answered as it is later, and not with the importer's traceback."""
    guard_streams()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(f"{name}: interrupted", file=sys.stderr)
        elif is_memory(error):
            print(f"{name}: out of memory: raise the limit (ulimit -v), or free some", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
