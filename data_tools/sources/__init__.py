"""The supported archives, one file each, and their detection.

`open_sources("ROOT")` looks at the names in ROOT and in its subfolders; ROOT may contain several
archives. Files that look like ECGs and that none of them reads are counted in the first source's
`left_out`.
"""

import os
from collections.abc import Iterator, Sequence

from omnilead.data_tools.dataset import META
from omnilead.data_tools.errors import DataError, ReadError, StorageError
from omnilead.data_tools.hospital.files import ENDINGS, FORMATS, HospitalFiles
from omnilead.data_tools.plugins import blame, plugin
from omnilead.data_tools.pseudonyms import key_mark, read_key
from omnilead.data_tools.sources.base import Prepared, Source, prepared, pseudonymised
from omnilead.data_tools.sources.code15 import Code15
from omnilead.data_tools.sources.mimic_iv_ecg import MimicIvEcg
from omnilead.data_tools.sources.physionet2021 import DATABASES, PhysioNet2021
from omnilead.data_tools.sources.ptbxl import PtbXl
from omnilead.data_tools.sources.wfdb_folder import WfdbFolder
from omnilead.data_tools.storage import Folder, folder, links_in

ARCHIVES: dict[str, type[Source]] = {
    "physionet2021": PhysioNet2021,
    "ptbxl": PtbXl,
    "mimic-iv-ecg": MimicIvEcg,
}
ARCHIVES |= {"code15": Code15, "wfdb": WfdbFolder, "hospital": HospitalFiles}

__all__ = [
    "ARCHIVES",
    "ENDINGS",
    "DataError",
    "PhysioNet2021",
    "Prepared",
    "ReadError",
    "Source",
    "key_mark",
    "open_sources",
]
__all__ += ["prepared", "pseudonymised", "read_key"]


def open_sources(
    url: str,
    kind: str = "auto",
    anonymous: bool = False,
    besides: Sequence[str] = (),
    private: bool = False,
) -> list[Source]:
    """Open the sources in a folder. `kind`: auto, a name in ARCHIVES or FORMATS, or
    `file.py:Class` or `module:Class`. `besides`: folders that are opened, too, so what lies in
    them is not left out. `private`: no message names a file."""
    root = folder(url, anonymous, private)
    names = root.children()
    if not names:
        raise StorageError(f"{root.url}: the folder is empty")
    if kind != "auto":
        return [_of_kind(root, kind)]
    tree = _Tree(root, anonymous)
    found = tree.archives() or tree.general()
    if not found and META in names:
        raise StorageError(
            f"{root.url}: a dataset, not an archive: pass the archives that it was made from"
        )
    if not found:
        some = "" if private else f" ({', '.join(names[:5])}, ...)"
        raise StorageError(
            f"{root.url}: no known archive{some}{links_in(root)}: set its format with --source"
        )
    if not isinstance(
        found[0], HospitalFiles
    ):  # which looks at every file, and counts those that it leaves out
        found[0].left_out = tree.left_out(besides)
    return found


def _of_kind(root: Folder, kind: str) -> Source:
    if ":" in kind:
        try:
            return _import(kind)(root)
        except TypeError as error:  # the class lacks an abstract method
            raise DataError(f"--source {kind}: {error}") from None
    if kind not in ARCHIVES | FORMATS:
        raise DataError(
            f"--source {kind}: not auto, {', '.join(ARCHIVES | FORMATS)} or your own file.py:Class"
        )
    return HospitalFiles(root, kind) if kind in FORMATS else ARCHIVES[kind](root)


class _Tree:
    """What lies in a folder, from one listing: object storage would be slow to list folder by
    folder."""

    def __init__(self, root: Folder, anonymous: bool) -> None:
        self.root, self.anonymous = root, anonymous
        self.inside: dict[str, set[str]] = {
            "": set()
        }  # the names in the folder itself and in each of its subfolders
        self.ecgs: list[
            str
        ] = []  # paths of headers, of the Challenge's signals, and of files with a hospital format's ending
        self.read: list[str] = []  # a WFDB record is read if its path begins with one of these
        self.unlisted: list[str] = []  # subfolders that could not be listed
        for name in self._names():
            top, _, below = name.partition("/")
            self.inside[""].add(top)
            if below:
                self.inside.setdefault(top, set()).add(below.partition("/")[0])
            if name.endswith((".hea", ".mat")) or name.lower().endswith(ENDINGS):
                self.ecgs.append(name)

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
            place = (
                folder(self.root.path(top), self.anonymous, self.root.private) if top else self.root
            )
            for archive in ARCHIVES.values():
                if f"{top}/" not in self.read and archive.detect(names):
                    found += self._added(archive(place), f"{top}/" if top else "")
        return found

    def general(self) -> list[Source]:
        """The reader for a folder that is no known archive and has none."""
        if self.root.url.rsplit("/", 1)[-1] in DATABASES and (
            found := self._added(PhysioNet2021(self.root), "")
        ):
            return found
        if any(name.endswith(".hea") for name in self.ecgs):
            return self._added(WfdbFolder(self.root), "")
        hospital = HospitalFiles(self.root)
        return [hospital] if next(hospital.keys(), None) else []

    def _added(self, source: Source, place: str) -> list[Source]:
        """The source, unless it is the Challenge's and has none of its records: other folders have
        the same names."""
        read = tuple(f"{place}{one}/" if one else place for one in source.places())
        endings = {name[-4:] for name in self.ecgs if name.startswith(read)}
        if isinstance(source, PhysioNet2021) and not {".hea", ".mat"} <= endings:
            return []
        self.read += read
        return [source]

    def left_out(self, besides: Sequence[str]) -> str:
        """A sentence about the files that look like ECGs and that no source reads; empty if there
        are none."""
        root, read = f"{self.root.url}/", tuple(self.read)
        others = tuple(
            f"{folder(url).url.removeprefix(root)}/"
            for url in besides
            if folder(url).url.startswith(root)
        )
        headers = (
            name for name in self.ecgs if name.endswith(".hea") and not name.startswith(read)
        )
        files = (name for name in self.ecgs if name.lower().endswith(ENDINGS))
        missed = [name for name in (*headers, *files) if not f"{name}/".startswith(others)]
        said = []
        if self.unlisted:
            folders = (
                f"{len(self.unlisted)} of its folders"
                if self.root.private
                else ", ".join(self.unlisted)
            )
            said.append(f"could not list {folders}")
        if missed:
            count = (
                f"{len(missed):,} file{'s' * (len(missed) > 1)} that "
                f"look{'s' * (len(missed) == 1)} like ECGs"
            )
            first = "" if self.root.private else f", first {missed[0]}"
            said.append(f"left out {count}{first}: {self._advice(missed[0])}")
        return f"{self.root.url}: {'; '.join(said)}" if said else ""

    def _advice(self, name: str) -> str:
        """How to read a file that was left out: by its uppermost folder from which nothing is read
        yet."""
        parts = name.split("/")
        for depth in range(1, 1 if self.root.private else len(parts)):
            place = "/".join(parts[:depth])
            if not any(
                f"{place}/".startswith(one) or one.startswith(f"{place}/") for one in self.read
            ):
                return f"to read them, too, give {self.root.url}/{place} as well"
        kind = "wfdb" if name.endswith(".hea") else "hospital"
        return f"`omnilead shard --source {kind}` reads them instead"


def _is_archive(names: set[str]) -> bool:
    return any(archive.detect(names) for archive in ARCHIVES.values())


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
