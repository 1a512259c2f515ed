"""What a source is: the keys of an archive's records, and a record for a key.

Reading your own format takes a class of a dozen lines and `--source your_module:YourClass` (see data_tools/README.md):

    import io
    import numpy as np
    from data_tools.record import EcgRecord
    from data_tools.sources import Source

    class Csv(Source):
        name, licence = "clinic", "internal"

        def keys(self):
            return (name for name in self.root.names() if name.endswith(".csv"))

        def read(self, key):
            text = self.root.read(key, limit=10_000_000).decode()
            mv = np.loadtxt(io.StringIO(text), delimiter=",", skiprows=1).T
            return EcgRecord(key.removesuffix(".csv"), mv, 250.0, tuple(text.split("\\n")[0].split(",")), source=self.name)
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from data_tools.errors import DataError, ReadError, StorageError, printable
from data_tools.record import LEAD_INDEX, EcgRecord, Header
from data_tools.sources.wfdb_header import MAX_BYTES, WfdbHeader, parse_header, peek
from data_tools.sources.wfdb_signals import own_name, read_record
from data_tools.storage import Folder

T = TypeVar("T")


class Source(ABC):
    """An archive. Sources travel to worker processes: keep in `self` only what pickles small."""

    name = ""
    licence = "unknown"

    def __init__(self, root: Folder) -> None:
        self.root = root

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """Every record's key, in an order that depends on the archive alone."""

    @abstractmethod
    def read(self, key: str) -> EcgRecord:
        """One record; a ReadError refuses it."""

    def header(self, key: str) -> Header:
        """What the plan needs. A format that can tell it without reading the signal should."""
        try:
            record = self.read(key)
        except (DataError, MemoryError):
            raise
        except Exception as error:  # a parser of one's own on a broken file: this record is refused, the others go on
            raise ReadError("unreadable record", type(error).__name__) from None
        content = hashlib.blake2b(np.ascontiguousarray(record.signal).data, digest_size=8).digest()
        return Header(record.name, record.source or self.source_of(key), record.signal.shape[1], record.fs_hz, content)

    @staticmethod
    def detect(names: set[str]) -> bool:
        """Whether a folder with these names in it is such an archive."""
        return False

    def source_of(self, key: str) -> str:
        """Under which name a record is filed: an archive may hold several databases."""
        return self.name

    def called(self, key: str) -> str:
        """A name for a record that cannot tell its own."""
        return record_stem(key)

    def tables(self) -> bytes:
        """Whatever is read besides the records and decides what is written of them: patients, ages, diagnoses."""
        return b""

    def notes(self) -> list[str]:
        """Sentences for the user about the archive as a whole, printed before work begins."""
        return []

    def __iter__(self) -> Iterator[EcgRecord]:
        return (self.read(key) for key in self.keys())


class WfdbSource(Source):
    """Any source whose records are WFDB header files; what differs is where they lie and who the patient is."""

    suffix = ".dat"

    def name_of(self, key: str, stem: str) -> str:
        """Under which name a header file's record is filed."""
        return stem

    def called(self, key: str) -> str:
        try:
            return self.name_of(key, record_stem(key))
        except ReadError:
            return record_stem(key)

    def enrich(self, record: EcgRecord, key: str) -> EcgRecord:
        """Patient, age, sex and diagnoses from the archive's tables."""
        return record

    def header(self, key: str) -> Header:
        data = self._text(key)
        name, _, fs_hz, samples = peek(data)
        stamp = self.root.stamp(key.removesuffix(".hea") + self.suffix)
        return Header(
            self.name_of(key, own_name(name, key)),
            self.source_of(key),
            samples,
            fs_hz,
            hashlib.blake2b(data, digest_size=8).digest(),
            stamp,
        )

    def read(self, key: str) -> EcgRecord:
        header = parse_header(self._text(key))
        self.check(header)
        name = self.name_of(key, own_name(header.name, key))
        return self.enrich(read_record(self.root, key, header, name, self.source_of(key)), key)

    def _text(self, key: str) -> bytes:
        if not key.isprintable():  # bytes of another encoding, line breaks: no table could hold them
            raise ReadError("file name", printable(key.rsplit("/", 1)[-1])[:80])
        if not key.endswith(".hea"):
            raise ReadError("no header", key.rsplit("/", 1)[-1])
        return self.root.read(key, MAX_BYTES)

    def check(self, header: WfdbHeader) -> None:
        """Twelve leads in one file of the record's name, as all the large archives have them."""
        known = {LEAD_INDEX.get(lead.upper()) for lead in header.leads} - {None}
        if len(header.leads) != 12 or len(known) != 12:
            raise ReadError("not twelve leads", ", ".join(header.leads)[:80])
        if set(header.files) != {header.name + self.suffix}:
            raise ReadError("signal file name", f"{header.files[0]} for {header.name}")


def carefully(call: Callable[[str], T], key: str) -> T | ReadError:
    """A source's `header` or `read`: whatever a record's bytes make a parser do, the others go on; only a failing place stops
    the run."""
    try:
        if not key.isprintable():
            raise ReadError("file name", "not UTF-8, or with control characters")
        return call(key)
    except ReadError as error:
        return error
    except (StorageError, MemoryError):
        raise
    except Exception as error:
        return ReadError("unreadable record", f"{type(error).__name__} in {key.rsplit('/', 1)[-1][:40]}")


def record_stem(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", key.rsplit("/", 1)[-1].rsplit(".", 1)[0])[:64] or "_"


def located(key: str, detail: str) -> str:
    """What is said of a record's fault, and where the record lies."""
    path = printable(key)
    if detail.startswith(f"{path.rpartition('.')[0] or path}."):  # its signal's file
        return detail
    return f"{path}: {detail}" if detail else path


def with_orphans(names: Iterator[str], suffix: str) -> Iterator[str]:
    """Header files, and those signal files that have none (they are counted as refused); names come folder by folder."""
    stems: dict[str, bool] = {}
    place = None
    for name in names:
        folder = name.rpartition("/")[0]
        if folder != place:
            yield from _keys_of(stems, suffix)
            stems, place = {}, folder
        stem, dot, ending = name.rpartition(".")
        if dot and f".{ending}" in (".hea", suffix):
            stems[stem] = stems.get(stem, False) or ending == "hea"
    yield from _keys_of(stems, suffix)


def _keys_of(stems: dict[str, bool], suffix: str) -> Iterator[str]:
    return (stem + (".hea" if has_header else suffix) for stem, has_header in stems.items())
