"""Errors for the user: commands print the message on one line and exit with the error's code. Other
exceptions are bugs."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What fails with one of these is this machine, or the disk or network that it reads from: another try may
# succeed
MACHINE_ERRNOS = {
    *DISK_FULL_ERRNOS,
    *(errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
    *(
        errno.ETIMEDOUT,
        errno.ENODEV,
        errno.ENXIO,
        errno.EREMOTEIO,
        errno.ECONNRESET,
        errno.ENOTCONN,
    ),
}
HDF5_ERRNO = re.compile(r"errno = (\d+)")
MISSING_FILE = "missing file"  # a reason of ReadError


# Options whose arguments have other names in Python
PYTHON_NAMES = {"fs": "fs_hz", "lr": "train.lr"}


class Flag(str):
    """An option as a part of an error: "--out", or "--set train.lr=1e-4". Python calls them `out` and
    train.lr=1e-4."""

    @property
    def in_python(self) -> str:
        if self.startswith("--set "):
            return self.removeprefix("--set ")
        name = self.removeprefix("--")
        return f"`{PYTHON_NAMES.get(name, name.replace('-', '_'))}`"


class UserError(Exception):
    """Its message is the text of its parts, in `args`. An option is a Flag, which a command shows as it
    is typed, and a function of Python (`in_python`) as an argument; an error stands for its own parts.
    The message may quote any file: characters that would control the terminal are escaped. `code`: the
    exit code of a command that it ends."""

    code = 2
    in_python = False

    def __init__(self, *parts: object) -> None:
        words: list[str] = []
        for part in parts:
            if isinstance(part, UserError):
                words += part.args
            else:
                words.append(part if isinstance(part, str) else str(part))
        super().__init__(*words)

    def __str__(self) -> str:
        words = [
            part.in_python if self.in_python and isinstance(part, Flag) else part
            for part in self.args
        ]
        return printable_lines("".join(words))


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Makes errors raised inside name Python arguments instead of options. Also a decorator."""
    try:
        yield
    except UserError as error:
        error.in_python = True
        raise


class DataError(UserError):
    """Wrong arguments; the base class of the errors below."""


class ReadError(DataError):
    """A record or crop that cannot be used. `reason` comes from a fixed set of phrases and is
    counted in rejects.csv."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail

    def __reduce__(self) -> tuple[type["ReadError"], tuple[str, str]]:
        return ReadError, (self.reason, self.detail)


class StorageError(DataError):
    """The storage failed (network, credentials, full disk). The run stops; starting it again
    continues it."""


class DatasetError(DataError):
    """A damaged or invalid dataset. The message names the file, the crop and the failed check."""


class ChunkError(DataError):
    """A damaged chunk of the zarr copy; the caller adds its name."""


def machine_error(error: BaseException | None) -> StorageError | None:
    """The error that stops a command, if this error, or one that caused it, says that the machine failed and
    not what it read; else None. A record that is refused for it would be lost."""
    if error is None or isinstance(error, StorageError):
        return error
    if isinstance(error, OSError):
        found = HDF5_ERRNO.search(str(error))  # h5py sets no errno
        number = error.errno or (int(found[1]) if found else 0)
        if number in MACHINE_ERRNOS:
            place = f"{error.filename}: " if error.filename else ""
            return StorageError(
                f"{place}{os.strerror(number)}: this machine failed, not the file: run the same command again"
            )
    return machine_error(error.__cause__ or error.__context__)


def printable(text: str) -> str:
    """The text on one line, with control characters and non-UTF-8 bytes of file names escaped."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def _escaped(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # Python's surrogate escape for a non-UTF-8 byte
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter if letter.isprintable() else ascii(letter)[1:-1]


def one_line(text: str, limit: int = 300) -> str:
    """Join the lines of a message, such as a library's, and cut it to `limit` characters."""
    return " ".join(text.split())[:limit]


def write_error_advice(
    error: OSError,
    full: str = "free disk space, or choose another",
    other: str = "not writable: choose another",
) -> str:
    """Returns `full` if the disk is full, else `other`: what to do about a file that cannot be
    written."""
    return full if error.errno in DISK_FULL_ERRNOS else other
