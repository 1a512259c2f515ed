"""The supported archives, one file each, and their detection.

`open_sources("ROOT")` looks at the names in ROOT and in its subfolders; ROOT may contain several
archives. Files that look like ECGs and that none of them reads are counted in the first source's
`left_out`.
"""

from collections.abc import Sequence
from contextlib import suppress

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
from omnilead.data_tools.sources.left_out import LeftOut, looks_like_file, places_read
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
    if kind == "auto":
        found = _detected(root, names, anonymous, hospital)
    else:
        found = [_of_kind(root, kind, hospital)]
    if found:
        if ":" not in kind:  # only a reader of the user's own knows what it reads
            endings = hospital.endings if hospital else ()
            found[0].left_out = LeftOut(root, found, besides, anonymous, endings).sentence()
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


def _detected(
    root: Folder, names: Sequence[str], anonymous: bool, hospital: FileReader | None
) -> list[Source]:
    """The archives in a folder and in its subfolders. If there is none, the folder is one of WFDB
    records or of hospital files."""
    found = _archives(root, names)
    read = places_read(root, found)
    for name in names:
        if name in read or (root.remote and looks_like_file(name)):
            continue
        below = folder(root.path(name), anonymous, root.private)
        with suppress(StorageError):  # not a folder, or one that may not be listed
            found += _archives(below, below.children())
    if found:
        return found
    challenge = PhysioNet2021(root)
    if root.url.rsplit("/", 1)[-1] in DATABASES and challenge.has_records():
        return [challenge]
    general: list[Source] = [WfdbFolder(root)]
    if hospital:
        general.append(hospital(root))
    return [source for source in general if next(source.keys(), None)][:1]


def _archives(place: Folder, names: Sequence[str]) -> list[Source]:
    found = [archive(place) for archive in ARCHIVES.values() if archive.detect(set(names))]
    # other folders are called `training` or `ptb-xl`, too
    return [one for one in found if not isinstance(one, PhysioNet2021) or one.has_records()]
