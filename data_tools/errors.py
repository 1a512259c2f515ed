"""Errors for the user: the commands print the message in one line and exit with 2. Anything else is a bug."""


class DataError(Exception):
    """Wrong arguments, or one of the errors below."""


class ReadError(DataError):
    """A record or crop that cannot be used. `reason` comes from a fixed set of phrases and is counted in rejects.csv."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail

    def __reduce__(self) -> tuple[type["ReadError"], tuple[str, str]]:
        return ReadError, (self.reason, self.detail)


class StorageError(DataError):
    """The storage fails (network, credentials, full disk): the run stops, and continues when it is started again."""


class DatasetError(DataError):
    """A damaged or invalid dataset: the message names the file, the crop and the check that failed."""


class ChunkError(DataError):
    """A damaged chunk of the zarr copy; the caller adds which one."""


def printable(text: str) -> str:
    """On one line: escapes control characters, and bytes of a file name that are not UTF-8."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # Python's stand-in for such a byte
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter if letter.isprintable() else ascii(letter)[1:-1]


def one_line(text: str, limit: int = 300) -> str:
    """A library's message, which may have several lines."""
    return " ".join(text.split())[:limit]
