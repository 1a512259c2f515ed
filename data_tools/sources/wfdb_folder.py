"""A folder of WFDB records, whatever their format, leads and rate: known leads are placed by name, other channels left out.

The patient is not known, and every record is filed under `wfdb`.
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

    def name_of(self, key: str, stem: str) -> str:
        """Names repeat in some trees (every patient's folder holds a `rec_1`): the path below the root is part of the name."""
        place = re.sub(r"[^A-Za-z0-9_-]+", "_", posixpath.dirname(key))
        name = f"{place}_{stem}" if place else stem
        if len(name) > 64:
            raise ReadError("record name", f"{len(name)} characters with its folders, 64 at most")
        return name

    def check(self, header: WfdbHeader) -> None:
        """Any leads, any files: what is no lead is left out when leads are placed."""
