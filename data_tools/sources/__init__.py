"""The archives that can be read, one file each, and how the one at hand is found out.

`open_sources("ROOT", "auto")` looks at the names in ROOT and in the folders just below it; a folder may hold several archives.
"""

import importlib
import sys
from pathlib import Path

from data_tools.dataset import META
from data_tools.errors import DataError, ReadError, StorageError, one_line
from data_tools.sources.base import Source
from data_tools.sources.code15 import Code15
from data_tools.sources.mimic_iv_ecg import MimicIvEcg
from data_tools.sources.one_record import Prepared, prepared
from data_tools.sources.physionet2021 import DATABASES, PhysioNet2021
from data_tools.sources.ptbxl import PtbXl
from data_tools.sources.wfdb_folder import WfdbFolder
from data_tools.storage import Folder, folder, links_in

ARCHIVES: dict[str, type[Source]] = {
    "physionet2021": PhysioNet2021,
    "ptbxl": PtbXl,
    "mimic-iv-ecg": MimicIvEcg,
    "code15": Code15,
    "wfdb": WfdbFolder,
}

__all__ = ["ARCHIVES", "DataError", "PhysioNet2021", "Prepared", "ReadError", "Source", "open_sources", "prepared"]


def open_sources(url: str, kind: str = "auto", anonymous: bool = False) -> list[Source]:
    """The sources in one place. `kind` is auto, a name in ARCHIVES, or your own `module:Class` or `file.py:Class`."""
    root = folder(url, anonymous)
    names = set(root.children())
    if not names:
        raise StorageError(f"{root.url}: nothing is there")
    if ":" in kind:
        try:
            return [_imported(kind)(root)]
        except TypeError as error:  # a method is missing
            raise DataError(f"--source {kind}: {error}") from None
    if kind != "auto":
        if kind not in ARCHIVES:
            raise DataError(f"--source {kind}: not auto, {', '.join(ARCHIVES)} or your own module:Class")
        return [ARCHIVES[kind](root)]
    found: list[Source] = [source(root) for source in ARCHIVES.values() if source.detect(names)]
    for name in sorted(names - {"training"}):
        if root.remote and "." in name:  # a file, in all likelihood: a listing for each would be a request for each
            continue
        below = folder(f"{root.url}/{name}", anonymous)
        inside = _names_in(below)
        found += [source(below) for source in ARCHIVES.values() if source.detect(inside)]
    if not found and root.url.rsplit("/", 1)[-1] in DATABASES:
        found = [PhysioNet2021(root)]
    if not found and any(name.endswith(".hea") for name in root.names()):
        found = [WfdbFolder(root)]
    if not found and META in names:
        raise StorageError(f"{root.url}: a dataset, not an archive: name what it was made from; --extend adds to a dataset")
    if not found:
        shown = ", ".join(sorted(names)[:5])
        raise StorageError(f"{root.url}: no archive that is known ({shown}, ...){links_in(root)}: name it with --source")
    return found


def _names_in(place: Folder) -> set[str]:
    try:
        return set(place.children())
    except StorageError:
        return set()  # a file, not a folder


def _imported(spec: str) -> type[Source]:
    """`module:Class` or `path/to/file.py:Class`. Classes from a file are importable by worker processes too."""
    module_name, _, class_name = spec.rpartition(":")
    try:
        if module_name.endswith(".py"):
            path = Path(module_name).resolve()
            if not path.is_file():
                raise DataError(f"--source {spec}: {module_name} is not there")
            sys.path.insert(0, str(path.parent))
            module_name = path.stem
        found = getattr(importlib.import_module(module_name), class_name)
    except DataError:
        raise
    except Exception as error:  # whatever somebody's module does when it is imported
        raise DataError(one_line(f"--source {spec}: {type(error).__name__}: {error}")) from None
    if not (isinstance(found, type) and issubclass(found, Source)):
        raise DataError(f"--source {spec}: not a subclass of data_tools.sources.Source")
    return found
