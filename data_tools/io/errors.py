"""Errors for the user: commands print the message on one line and exit with the error's code. Other
exceptions are bugs."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# These errors mean that this machine failed, or the disk or network that it reads from: another try
# may succeed
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
MISSING_FILE = "missing file"  # the `reason` of a ReadError if the file does not exist


# The Python arguments of options whose names differ from the option, such as fs_hz for --fs
PYTHON_NAMES_OF_OPTIONS = {"fs": "fs_hz", "lr": "train.lr"}


class Flag(str):
    """The name of an option in an error message: "--out", or "--set train.lr=1e-4". `in_python` is the
    name of the Python argument instead: `out`, or train.lr=1e-4."""

    @property
    def in_python(self) -> str:
        if self.startswith("--set "):
            return self.removeprefix("--set ")
        name = self.removeprefix("--")
        return f"`{PYTHON_NAMES_OF_OPTIONS.get(name, name.replace('-', '_'))}`"


class UserError(Exception):
    """The base class of errors for the user. Its message joins the parts in `args`.

    A part that is a Flag is shown as the option or, if the error has `in_python`, as the Python
    argument. A part that is a UserError is replaced by that error's parts. Characters that would
    control the terminal are escaped, because the message may quote any file. A command that fails
    with this error exits with `code`."""

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
def naming_arguments_in_errors() -> Iterator[None]:
    """Makes errors that are raised in the block, or in a decorated function, name Python arguments
    instead of options."""
    try:
        yield
    except UserError as error:
        error.in_python = True
        raise


class DataError(UserError):
    """The arguments of a command or function are wrong. Base class of the errors below."""


class ReadError(DataError):
    """A record or crop cannot be used. `reason` comes from a fixed set of phrases and is
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
    """A dataset is damaged or invalid. The message names the file, the crop and the failed check."""


class ChunkError(DataError):
    """A chunk of the zarr copy is damaged. The caller adds the chunk's name to the message."""


def machine_error(error: BaseException | None) -> StorageError | None:
    """Returns a StorageError if this error, or an error that caused it, is the fault of the machine and
    not of the file; else None. Such an error must stop the command: a record that was refused because
    of it would be lost."""
    if error is None or isinstance(error, StorageError):
        return error
    if isinstance(error, OSError):
        found = HDF5_ERRNO.search(str(error))  # h5py states the errno only in the text
        number = error.errno or (int(found[1]) if found else 0)
        if number in MACHINE_ERRNOS:
            place = f"{error.filename}: " if error.filename else ""
            return StorageError(
                f"{place}{os.strerror(number)}: this machine failed, not the file: run the same command again"
            )
    return machine_error(error.__cause__ or error.__context__)


def printable(text: str) -> str:
    """Returns the text on one line, with control characters and non-UTF-8 bytes of file names escaped."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def _escaped(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # Python's surrogate escape for a non-UTF-8 byte
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter if letter.isprintable() else ascii(letter)[1:-1]


def one_line(text: str, limit: int = 300) -> str:
    """Joins the lines of a message, such as a library's, and cuts it to `limit` characters."""
    return " ".join(text.split())[:limit]


def write_error_advice(
    error: OSError,
    full: str = "free disk space, or choose another",
    other: str = "not writable: choose another",
) -> str:
    """Returns advice on a file that could not be written: `full` if the disk is full, else
    `other`."""
    return full if error.errno in DISK_FULL_ERRNOS else other
