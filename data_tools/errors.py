"""What can go wrong, as one line for the user: the commands print the message and exit with 2; anything else is a bug."""


class DataError(Exception):
    """Wrong arguments, or one of those below."""


class ReadError(DataError):
    """A record, or a part of one, that cannot be used: `reason` is one of a fixed set of words, counted in rejects.csv."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail

    def __reduce__(self) -> tuple[type["ReadError"], tuple[str, str]]:
        return ReadError, (self.reason, self.detail)


class StorageError(DataError):
    """The place itself fails (network, credentials, a full disk): the run stops, and goes on when it is started again."""


class DatasetError(DataError):
    """A dataset that is not what it says: the message names the file, the crop and the check."""


class ChunkError(DataError):
    """What is wrong with a chunk of the zarr twin, in the words that come after its name."""


def printable(text: str) -> str:
    """On one line: control characters, and the bytes of a file's name that are not UTF-8, are escaped."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # how Python holds such a byte
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter if letter.isprintable() else ascii(letter)[1:-1]


def one_line(text: str, most: int = 300) -> str:
    """What a library says may be several."""
    return " ".join(text.split())[:most]
