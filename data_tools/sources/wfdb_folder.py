"""A folder of WFDB records of any format, leads and rate: known leads are placed by name, other channels are ignored.

Patients are unknown, and every record's source is `wfdb`.
"""

from collections.abc import Iterator

from data_tools.sources.base import WfdbSource, path_name
from data_tools.sources.wfdb_header import WfdbHeader


class WfdbFolder(WfdbSource):
    name = "wfdb"

    def keys(self) -> Iterator[str]:
        return (name for name in self.root.names() if name.endswith(".hea"))

    def record_name(self, key: str, stem: str) -> str:
        return path_name(key, stem)

    def notes(self) -> list[str]:
        why = "a plain WFDB folder, read without tables: patients are unknown, so nobody can be in gallery and probe"
        return [f"{self.root.url}: {why}. If it belongs to a known archive, name that as SRC, or its kind with --source"]

    def check(self, header: WfdbHeader) -> None:
        """Any leads, any files."""
