"""A folder of WFDB records of any format, leads and rate: known leads are placed by name, other channels are ignored.

Patients are unknown, and every record's source is `wfdb`.
"""

import posixpath
import re
from collections.abc import Iterator

from data_tools.errors import ReadError
from data_tools.sources.base import WfdbSource
from data_tools.sources.wfdb_header import WfdbHeader


class WfdbFolder(WfdbSource):
    name = "wfdb"

    def keys(self) -> Iterator[str]:
        return (name for name in self.root.names() if name.endswith(".hea"))

    def record_name(self, key: str, stem: str) -> str:
        """The path below the root is part of the name: in some trees every patient's folder holds a `rec_1`."""
        place = re.sub(r"[^A-Za-z0-9_-]+", "_", posixpath.dirname(key))
        name = f"{place}_{stem}" if place else stem
        if len(name) > 64:
            raise ReadError("record name", f"{len(name)} characters with its folders, 64 at most")
        return name

    def notes(self) -> list[str]:
        why = "a plain WFDB folder, read without tables: patients are unknown, so nobody can be in gallery and probe"
        return [f"{self.root.url}: {why}. If it belongs to a known archive, name that as SRC, or its kind with --source"]

    def check(self, header: WfdbHeader) -> None:
        """Any leads, any files."""
