"""A folder of WFDB records with any format, leads and rate. Known leads are placed by name, other
channels are ignored.

Patients are unknown, and the source of every record is `wfdb`.
"""

from collections.abc import Iterator

from omnilead.data_tools.sources.base import WfdbSource, path_name
from omnilead.data_tools.sources.wfdb_header import WfdbHeader


class WfdbFolder(WfdbSource):
    name = "wfdb"

    def keys(self) -> Iterator[str]:
        return (name for name in self.root.names() if name.endswith(".hea"))

    def places(self) -> list[str]:
        return [""]

    def record_name(self, key: str, stem: str) -> str:
        return path_name(key, stem)

    def notes(self) -> list[str]:
        why = (
            "a plain WFDB folder without tables: patients are unknown, so gallery and probe stay "
            "empty"
        )
        note = (
            f"{self.root.url}: {why}. If it belongs to a known archive, pass that as SRC, or set "
            "--source"
        )
        return [note, *super().notes()]

    def check(self, header: WfdbHeader) -> None:
        """Accept any leads and files."""
