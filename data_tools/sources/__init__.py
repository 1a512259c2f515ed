"""The supported archives, one file each, and their detection.

`open_sources("ROOT")` looks at the names in ROOT and in its subfolders; ROOT may contain several archives.
"""

from contextlib import suppress

from data_tools.dataset import META
from data_tools.errors import DataError, ReadError, StorageError
from data_tools.plugins import blame, plugin
from data_tools.pseudonyms import key_mark, read_key
from data_tools.sources.base import Prepared, Source, prepared, pseudonymised
from data_tools.sources.code15 import Code15
from data_tools.sources.hospital import ENDINGS, FORMATS, HospitalFiles
from data_tools.sources.mimic_iv_ecg import MimicIvEcg
from data_tools.sources.physionet2021 import DATABASES, PhysioNet2021
from data_tools.sources.ptbxl import PtbXl
from data_tools.sources.wfdb_folder import WfdbFolder
from data_tools.storage import folder, links_in

ARCHIVES: dict[str, type[Source]] = {"physionet2021": PhysioNet2021, "ptbxl": PtbXl, "mimic-iv-ecg": MimicIvEcg}
ARCHIVES |= {"code15": Code15, "wfdb": WfdbFolder, "hospital": HospitalFiles}

__all__ = ["ARCHIVES", "ENDINGS", "DataError", "PhysioNet2021", "Prepared", "ReadError", "Source", "key_mark", "open_sources"]
__all__ += ["prepared", "pseudonymised", "read_key"]


def open_sources(url: str, kind: str = "auto", anonymous: bool = False) -> list[Source]:
    """Open the sources in a folder. `kind`: auto, a name in ARCHIVES or FORMATS, or `file.py:Class` or `module:Class`."""
    root = folder(url, anonymous)
    names = set(root.children())
    if not names:
        raise StorageError(f"{root.url}: the folder is empty")
    if ":" in kind:
        try:
            return [_import(kind)(root)]
        except TypeError as error:  # the class lacks an abstract method
            raise DataError(f"--source {kind}: {error}") from None
    if kind != "auto":
        if kind not in ARCHIVES | FORMATS:
            raise DataError(f"--source {kind}: not auto, {', '.join(ARCHIVES | FORMATS)} or your own file.py:Class")
        return [HospitalFiles(root, kind) if kind in FORMATS else ARCHIVES[kind](root)]
    places = [(root, names)]
    for name in sorted(names - {"training"}):
        if not (root.remote and "." in name):  # probably a file, not worth a request for its listing
            below = folder(f"{root.url}/{name}", anonymous)
            with suppress(StorageError):  # not a folder
                places.append((below, set(below.children())))
    found: list[Source] = [source(place) for place, inside in places for source in ARCHIVES.values() if source.detect(inside)]
    found = [one for one in found if not isinstance(one, PhysioNet2021) or one.has_headers()]
    if found:
        found[0].others = sum(name.lower().endswith(ENDINGS) for _, inside in places for name in inside)
    if not found and root.url.rsplit("/", 1)[-1] in DATABASES:
        found = [PhysioNet2021(root)]
    for general in (WfdbFolder, HospitalFiles):
        if not found and next(general(root).keys(), None):
            found = [general(root)]
    if not found and META in names:
        raise StorageError(f"{root.url}: a dataset, not an archive: pass the archives that it was made from")
    if not found:
        some = ", ".join(sorted(names)[:5])
        raise StorageError(f"{root.url}: no known archive ({some}, ...){links_in(root)}: set its format with --source")
    return found


def _import(spec: str) -> type[Source]:
    """Import `module:Class` or `path/to/file.py:Class` so that worker processes can import it, too."""
    try:
        found = plugin(spec, importable=True)
    except Exception as error:  # a user's module may raise anything on import
        raise DataError(f"--source {spec}: {blame(error)}") from None
    if not (isinstance(found, type) and issubclass(found, Source)):
        raise DataError(f"--source {spec}: not a subclass of data_tools.sources.Source")
    return found
