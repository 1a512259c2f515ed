"""The supported archives, one file each, and their detection.

`open_sources("ROOT")` looks at the names in ROOT and in its subfolders; ROOT may contain several
archives. Files that look like ECGs and that none of them reads are counted in the first source's
`left_out`.
"""

import os
from collections.abc import Iterator, Sequence

from omnilead.data_tools.dataset import META
from omnilead.data_tools.errors import DataError, ReadError, StorageError
from omnilead.data_tools.plugins import blame, plugin
from omnilead.data_tools.pseudonyms import key_mark, read_key
from omnilead.data_tools.sources.base import (
    FileSource,
    Prepared,
    Source,
    prepared,
    pseudonymised,
)
from omnilead.data_tools.sources.code15 import Code15
from omnilead.data_tools.sources.mimic_iv_ecg import MimicIvEcg
from omnilead.data_tools.sources.physionet2021 import DATABASES, PhysioNet2021
from omnilead.data_tools.sources.ptbxl import PtbXl
from omnilead.data_tools.sources.wfdb_folder import WfdbFolder
from omnilead.data_tools.storage import Folder, folder, links_in

__all__ = [
    "ARCHIVES",
    "DataError",
    "FileSource",
    "PhysioNet2021",
    "Prepared",
    "ReadError",
    "Source",
    "key_mark",
    "open_sources",
    "prepared",
    "pseudonymised",
    "read_key",
]

ARCHIVES: dict[str, type[Source]] = {
    "physionet2021": PhysioNet2021,
    "ptbxl": PtbXl,
    "mimic-iv-ecg": MimicIvEcg,
    "code15": Code15,
    "wfdb": WfdbFolder,
}
FileReader = type[FileSource]


def open_sources(
    url: str,
    kind: str = "auto",
    anonymous: bool = False,
    besides: Sequence[str] = (),
    private: bool = False,
    hospital: FileReader | None = None,
) -> list[Source]:
    """Open the sources in a folder. `kind`: auto, a name in ARCHIVES, `file.py:Class` or
    `module:Class`. `besides`: folders that are opened, too, so what lies in them is not left out.
    `private`: no message names a file. `hospital`: the class that reads a hospital's files, whose
    name and formats are kinds, too; without it they are not looked for."""
    root = folder(url, anonymous, private)
    names = root.children()
    if not names:
        raise StorageError(f"{root.url}: the folder is empty")
    if kind != "auto":
        return [_of_kind(root, kind, hospital)]
    tree = _Tree(root, anonymous, hospital)
    found = tree.archives() or tree.general()
    if found:
        if not isinstance(found[0], FileSource):  # which counts what it leaves out itself
            found[0].left_out = tree.left_out(besides)
        return found
    if META in names:
        raise StorageError(
            f"{root.url}: a dataset, not an archive: pass the archives that it was made from"
        )
    some = "" if private else f" ({', '.join(names[:5])}, ...)"
    raise StorageError(
        f"{root.url}: no known archive{some}{links_in(root)}: set its format with --source"
    )


def _of_kind(root: Folder, kind: str, hospital: FileReader | None) -> Source:
    if ":" in kind:
        try:
            return _import(kind)(root)
        except TypeError as error:  # the class lacks an abstract method
            raise DataError(f"--source {kind}: {error}") from None
    if kind in ARCHIVES:
        return ARCHIVES[kind](root)
    known = list(ARCHIVES)
    if hospital:
        if kind == hospital.name:
            return hospital(root)
        if kind in hospital.formats:
            return hospital(root, kind)
        known += [hospital.name, *hospital.formats]
    raise DataError(f"--source {kind}: not auto, {', '.join(known)} or your own file.py:Class")


def _import(spec: str) -> type[Source]:
    """Import `module:Class` or `path/to/file.py:Class` so that worker processes can import it,
    too."""
    try:
        found = plugin(spec, importable=True)
    except Exception as error:  # a user's module may raise anything on import
        raise DataError(f"--source {spec}: {blame(error)}") from None
    if not (isinstance(found, type) and issubclass(found, Source)):
        raise DataError(f"--source {spec}: not a subclass of data_tools.sources.Source")
    return found


class _Tree:
    """What lies in a folder, from one listing: object storage would be slow to list folder by
    folder."""

    def __init__(self, root: Folder, anonymous: bool, hospital: FileReader | None) -> None:
        self.root = root
        self.anonymous = anonymous
        self.hospital = hospital
        self.endings = hospital.endings if hospital else ()
        # The names in the folder itself ("") and in each of its subfolders
        self.inside: dict[str, set[str]] = {"": set()}
        # Paths of headers, of the Challenge's signals, and of files with a hospital format's ending
        self.ecgs: list[str] = []
        self.read: list[str] = []  # a WFDB record is read if its path begins with one of these
        self.unlisted: list[str] = []  # subfolders that could not be listed
        for name in self._names():
            top, _, below = name.partition("/")
            self.inside[""].add(top)
            if below:
                self.inside.setdefault(top, set()).add(below.partition("/")[0])
            if name.endswith((".hea", ".mat")) or self._is_hospitals(name):
                self.ecgs.append(name)

    def _is_hospitals(self, name: str) -> bool:
        return name.lower().endswith(self.endings)

    def _names(self) -> Iterator[str]:
        if self.root.remote:
            yield from self.root.names()
            return
        for top in self.root.children():
            path = self.root.path(top)
            if not os.path.isdir(path):
                yield top
                continue
            try:
                if os.path.islink(path):
                    yield top
                    if not (_is_archive({top}) or _is_archive(set(os.listdir(path)))):
                        continue  # it may lead anywhere
                yield from self.root.names(top)
            except (StorageError, OSError):
                self.unlisted.append(top)

    def archives(self) -> list[Source]:
        """The archives in the folder and in its subfolders."""
        found: list[Source] = []
        for top, names in sorted(self.inside.items()):
            place = self.root
            prefix = ""
            if top:
                place = folder(self.root.path(top), self.anonymous, self.root.private)
                prefix = f"{top}/"
            for archive in ARCHIVES.values():
                if f"{top}/" in self.read or not archive.detect(names):
                    continue
                source = archive(place)
                if self._reads(source, prefix):
                    found.append(source)
        return found

    def general(self) -> list[Source]:
        """The reader for a folder that is no known archive and has none."""
        source: Source
        if self.root.url.rsplit("/", 1)[-1] in DATABASES:
            source = PhysioNet2021(self.root)
            if self._reads(source, ""):
                return [source]
        if any(name.endswith(".hea") for name in self.ecgs):
            source = WfdbFolder(self.root)
            self._reads(source, "")
            return [source]
        if self.hospital:
            source = self.hospital(self.root)
            if next(source.keys(), None):
                return [source]
        return []

    def _reads(self, source: Source, prefix: str) -> bool:
        """Note what a source reads; False if it is the Challenge's and has none of its records:
        other folders have the same names."""
        read = [f"{prefix}{place}/" if place else prefix for place in source.places()]
        if isinstance(source, PhysioNet2021):
            endings = {name[-4:] for name in self.ecgs if name.startswith(tuple(read))}
            if not {".hea", ".mat"} <= endings:
                return False
        self.read += read
        return True

    def left_out(self, besides: Sequence[str]) -> str:
        """A sentence about the files that look like ECGs and that no source reads; empty if there
        are none."""
        root = self.root.url
        said = []
        if self.unlisted:
            count = f"{len(self.unlisted)} of its folders"
            said.append(
                f"could not list {count if self.root.private else ', '.join(self.unlisted)}"
            )
        if missed := self._missed(besides):
            one = len(missed) == 1
            count = (
                f"{len(missed):,} file{'' if one else 's'} that look{'s' if one else ''} like ECGs"
            )
            first = "" if self.root.private else f", first {missed[0]}"
            said.append(f"left out {count}{first}: {self._advice(missed[0])}")
        return f"{root}: {'; '.join(said)}" if said else ""

    def _missed(self, besides: Sequence[str]) -> list[str]:
        """The headers, then the hospital files, that neither a source nor one of the folders
        `besides` reads."""
        root = f"{self.root.url}/"
        others = []
        for url in besides:
            place = folder(url).url
            if place.startswith(root):
                others.append(f"{place.removeprefix(root)}/")
        read = tuple(self.read)
        headers = [
            name for name in self.ecgs if name.endswith(".hea") and not name.startswith(read)
        ]
        files = [name for name in self.ecgs if self._is_hospitals(name)]
        return [name for name in headers + files if not f"{name}/".startswith(tuple(others))]

    def _advice(self, name: str) -> str:
        """How to read a file that was left out: by its uppermost folder from which nothing is read
        yet."""
        parts = [] if self.root.private else name.split("/")
        for depth in range(1, len(parts)):
            place = "/".join(parts[:depth]) + "/"
            if not any(place.startswith(read) or read.startswith(place) for read in self.read):
                return f"to read them, too, give {self.root.url}/{place.rstrip('/')} as well"
        kind = "wfdb" if name.endswith(".hea") else "hospital"
        return f"`omnilead shard --source {kind}` reads them instead"


def _is_archive(names: set[str]) -> bool:
    return any(archive.detect(names) for archive in ARCHIVES.values())
