"""Detects the supported archives in a folder, and the files in it that no source reads.

`open_sources("ROOT")` looks at the names in ROOT and in its subfolders. ROOT may contain several
archives. Folders that no archive reads may contain WFDB records and hospital files. The patients of WFDB
records outside the archives are unknown: the first source's `left_out` counts these records. If the user
names a format, `left_out` counts the files that look like ECGs but are of other formats, so that no
record is lost unnoticed.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..dataset import META
from ..ecg.pseudonyms import key_fingerprint, read_key
from ..io.errors import DataError, Flag, ReadError, StorageError
from ..io.plugins import error_with_line, load_plugin
from ..io.shared_options import Paths
from ..io.storage import Folder, folder
from ..io.terminal import tell
from .arrays import ArraySource
from .base import (
    AbsentKey,
    PreparedRecord,
    Source,
    links_hint,
    missing_note,
    prepare_record,
    pseudonymize_record,
)
from .code15 import Code15
from .dataset import dataset_sources
from .hospital_files import HOSPITAL_ENDINGS, HOSPITAL_FORMATS, HospitalFiles
from .wfdb_archives import (
    DATABASE_FOLDERS,
    EcgArrhythmia,
    MimicIvEcg,
    PhysioNet2011,
    PhysioNet2021,
    PtbXl,
    WfdbFolder,
)
from .zip_folder import archive_folder_and_names, folder_below

__all__ = [
    "ARCHIVES",
    "AbsentKey",
    "DataError",
    "PreparedRecord",
    "ReadError",
    "Source",
    "key_fingerprint",
    "missing_note",
    "open_sources",
    "prepare_record",
    "pseudonymize_record",
    "read_key",
]

ARCHIVES: dict[str, type[Source]] = {
    "physionet2021": PhysioNet2021,
    "ptbxl": PtbXl,
    "mimic-iv-ecg": MimicIvEcg,
    "code15": Code15,
    "ecg-arrhythmia": EcgArrhythmia,
    "physionet2011": PhysioNet2011,
    "wfdb": WfdbFolder,
    "arrays": ArraySource,
}
TEXT_ENDINGS = (".txt", ".csv", ".tsv", ".asc")


class UnknownArchive(StorageError):
    """Raised if no source finds an archive in a folder."""


def open_archives(
    archives: Paths, kind: str, anonymous: bool, private: bool, arrays: dict[str, Any]
) -> list[Source]:
    """Open archives and return their sources. `private`: messages name no file. `arrays`: the fs_hz, unit
    and leads of arrays; None for each that the user does not state."""
    urls = as_paths(archives)
    stated = {name: value for name, value in arrays.items() if value is not None}
    if stated and kind != "arrays":
        raise DataError(
            Flag("--fs"),
            ", ",
            Flag("--unit"),
            " and ",
            Flag("--leads"),
            " describe arrays: add ",
            Flag("--source"),
            " arrays",
        )
    sources = []
    for url in urls:
        sources += open_sources(url, kind, anonymous, urls, private, stated)
    return sources


def as_paths(paths: Paths) -> list[str]:
    if isinstance(paths, str | os.PathLike):
        return [os.fspath(paths)]
    return [os.fspath(path) for path in paths]


def tell_notes(notes: list[str], told_before: Sequence[str] = ()) -> list[str]:
    """Print the notes, except empty ones and those in `told_before`. Return all notes."""
    for note in notes:
        if note and note not in told_before:
            tell(f"note: {note}")
    return notes


def open_sources(
    url: str,
    kind: str = "auto",
    anonymous: bool = False,
    besides: Sequence[str] = (),
    private: bool = False,
    arrays: Mapping[str, Any] | None = None,
) -> list[Source]:
    """Open the archives in a folder and return their sources.

    `kind`: auto, a name in ARCHIVES or HOSPITAL_FORMATS, hospital, `file.py:Class` or `module:Class`.
    `besides`: folders that the caller opens too; files in them do not count as left out. `private`: messages
    name no file. `arrays`: the fs_hz, unit and leads of arrays."""
    root, names = archive_folder_and_names(url, anonymous, private)
    if not names:
        raise StorageError(f"{root.url}: the folder is empty")
    if kind == "auto" and META in names:
        return dataset_sources(root)
    if kind == "auto":
        sources = _detect_below(root, names, anonymous)
        left = LeftOutFiles(root, sources, besides)
        read = tuple(dict.fromkeys(source.name for source in sources))
        if left.wfdb:
            sources.append(WfdbFolder(root, tuple(left.places)))
        vendors = HospitalFiles(root, within=tuple(left.places))
        if next(vendors.keys(), None):
            sources.append(vendors)
        if sources:
            sources[0].left_out = left.note(archives=read)
    else:
        sources = [ArraySource(root, arrays) if kind == "arrays" else _open_kind(root, kind)]
        # Files of other formats are not counted here: HospitalFiles counts them itself, and it is unknown
        # which files a user's own source reads
        if ":" in kind or isinstance(sources[0], HospitalFiles):
            sources[0].left_out = LeftOutFiles(root, [], besides).note()
        else:
            sources[0].left_out = LeftOutFiles(root, sources, besides).note(kind)
    if sources:
        return sources
    some = "" if private else f" ({', '.join(names[:5])}, ...)"
    found, more = f"{root.url}: no known archive{some}{links_hint(root)}", ""
    if any(name.lower().endswith(TEXT_ENDINGS) for name in names):
        more = (
            "; texts do not state their rate, leads and unit: save them as .npy (--source arrays), or "
            "read them with a file.py:Class of your own (docs/own_format.md)"
        )
    raise UnknownArchive(f"{found}: set its format with ", Flag("--source"), more)


def _open_kind(root: Folder, kind: str) -> Source:
    if ":" in kind:
        try:  # `importable`, because worker processes import the class too
            reader = load_plugin(kind, importable=True)
        except Exception as error:  # a user's module may raise anything on import
            raise DataError(Flag("--source"), f" {kind}: {error_with_line(error)}") from None
        if not (isinstance(reader, type) and issubclass(reader, Source)):
            raise DataError(
                Flag("--source"),
                f" {kind}: the class is not a subclass of data_tools.sources.Source",
            )
        try:
            return reader(root)
        except TypeError as error:  # such as an abstract method that the class does not define
            raise DataError(Flag("--source"), f" {kind}: ", error) from None
    if kind in ARCHIVES:
        return ARCHIVES[kind](root)
    if kind == HospitalFiles.name:
        return HospitalFiles(root)
    if kind in HOSPITAL_FORMATS:
        return HospitalFiles(root, kind)
    known = [*ARCHIVES, HospitalFiles.name, *HOSPITAL_FORMATS]
    raise DataError(
        Flag("--source"),
        f" {kind}: unknown format: choose auto, {', '.join(known)} or your own file.py:Class",
    )


def _detect_below(root: Folder, names: Sequence[str], anonymous: bool) -> list[Source]:
    """Return the sources of the archives in a folder and in its subfolders. If there is no archive, return
    a source of the folder's WFDB records, if it contains any."""
    sources = _detect_archives(root, names)
    read = places_read(root, sources)
    for name in names:
        if name in read or (root.remote and looks_like_file(name)):
            continue
        below = folder_below(root, name, anonymous)
        with suppress(StorageError):  # `below` may be a file, or a folder that may not be listed
            sources += _detect_archives(below, below.children())
    if sources:
        return sources
    challenge = PhysioNet2021(root)
    if (
        root.url.rsplit("/", 1)[-1].removesuffix(".zip") in DATABASE_FOLDERS
        and challenge.has_records()
    ):
        return [challenge]
    plain = WfdbFolder(root)
    return [plain] if next(plain.keys(), None) else []


def _detect_archives(place: Folder, names: Sequence[str]) -> list[Source]:
    archives = [archive(place) for archive in ARCHIVES.values() if archive.detect(set(names))]
    return [source for source in archives if source.has_records()]


def places_read(root: Folder, sources: Sequence[Source]) -> set[str]:
    """Return the paths below `root` of the folders that these sources read; "" stands for all of `root`."""
    read = set()
    for source in sources:
        for place in source.places():
            path = f"{source.root.url}/{place}".removeprefix(root.url)
            read.add(path.strip("/"))
    return read


class LeftOutFiles:
    """Finds the files and links in a folder and its subfolders that none of the folder's archives reads.

    Folders that an archive reads are not searched: that of MIMIC-IV-ECG has 800,000 subfolders."""

    def __init__(self, root: Folder, sources: Sequence[Source], besides: Sequence[str]) -> None:
        self.root = root
        # Paths of folders that no archive reads, and of single files beside them that end like WFDB headers or
        # hospital files
        self.places: list[str] = []
        self.wfdb: list[str] = []  # paths of WFDB headers
        self.capitals: list[str] = []  # paths of headers that end in .HEA, which no source reads
        self.vendors: list[str] = []  # paths of files that end like hospital files
        self.links: list[str] = []
        self.unlisted: list[str] = []
        self.opened = {source.root.url for source in sources} | {folder(url).url for url in besides}
        self.read = places_read(root, sources)
        for url in besides:
            self.read.add(folder(url).url.removeprefix(f"{root.url}/"))
        for source in sources:
            self._add_links(source.root, source.links())
        if not sources:
            self._add_links(root, root.links())
        if "" in self.read or not sources:
            # Hospital files may be anywhere in the root. WFDB headers are not searched for: a source reads them
            # all, there are none, or the note does not count them
            self.places = [""]
        else:
            self._search("")

    def _search(self, place: str) -> None:
        for name in self.root.children(place):
            path = f"{place}/{name}" if place else name
            if path in self.read:
                continue
            if any(place_read.startswith(f"{path}/") for place_read in self.read):
                self._search(path)
            elif name.lower().endswith((".hea", *HOSPITAL_ENDINGS)):
                self._add_files(path, [path])
            elif not (self.root.remote and looks_like_file(name)):
                self._add_folder(path)

    def _add_folder(self, path: str) -> None:
        place = self.root.path(path)
        if not self.root.remote and os.path.islink(place):
            if os.path.isdir(place):
                self._add_links(self.root, [path])
            return
        self._add_links(self.root, self.root.links(path))
        try:
            self._add_files(path, list(self.root.names(path)))
        except (StorageError, OSError):
            self.unlisted.append(path)

    def _add_links(self, root: Folder, links: Iterable[str]) -> None:
        for link in links:
            place = root.path(link)
            if os.path.realpath(place) not in self.opened:
                self.links.append(place.removeprefix(f"{self.root.url}/"))

    def _add_files(self, path: str, names: Sequence[str]) -> None:
        """Add `path` to the folders that no archive reads, and its files to the lists, by their endings."""
        if names:
            self.places.append(path)
        for name in names:
            if name.endswith(".hea"):
                self.wfdb.append(name)
            elif name.lower().endswith(".hea"):
                self.capitals.append(name)
            elif name.lower().endswith(HOSPITAL_ENDINGS):
                self.vendors.append(name)

    def note(self, kind: str = "", archives: Sequence[str] = ()) -> str:
        """Return a note on files and links that are not read, and on WFDB records outside of these `archives`;
        "" if there are none. `kind`: the format that the user chose; if it is given, the note also counts the
        files of other formats."""
        clauses = []
        if archives and self.wfdb:
            records = "1 WFDB record"
            if len(self.wfdb) > 1:
                records = f"{len(self.wfdb):,} WFDB records"
            more = ", ..." * (len(self.wfdb) > 1)
            first = "" if self.root.private else f" ({self.wfdb[0]}{more})"
            others = " and ".join(archives)
            clauses.append(f"reads {records} outside of {others}, of unknown patients{first}")
        if self.capitals:
            count = len(self.capitals)
            names = (
                f"{count:,} of its files" if self.root.private else self._paths_text(self.capitals)
            )
            clauses.append(f"does not read {names}: a header's name ends in .hea")
        if self.unlisted:
            clauses.append(f"could not list {self._paths_text(self.unlisted)}")
        if self.links:
            clauses.append(f"does not follow linked folders: {self._paths_text(self.links)}")
        if kind and (files := self._ecg_like_files()):
            look = "1 file that looks like an ECG"
            if len(files) > 1:
                look = f"{len(files):,} files that look like ECGs"
            first = "" if self.root.private else f" ({files[0]}{', ...' * (len(files) > 1)})"
            clauses.append(f"leaves out {look}{first}: without --source {kind} none is left out")
        return f"{self.root.url}: {'; '.join(clauses)}" if clauses else ""

    def _ecg_like_files(self) -> list[str]:
        if self.places == [""]:
            return [name for name in self.root.names() if name.lower().endswith(HOSPITAL_ENDINGS)]
        return [*self.wfdb, *self.vendors]

    def _paths_text(self, paths: Sequence[str]) -> str:
        if self.root.private:
            return f"{len(paths)} of its folders"
        return ", ".join(paths[:3]) + ", ..." * (len(paths) > 3)


def looks_like_file(name: str) -> bool:
    """Return True if the name has the ending of a file (table.csv, but not v1.0). This saves a request to
    object storage for each file."""
    ending = name.rpartition(".")[2]
    return ending != name and not ending.isdigit()
