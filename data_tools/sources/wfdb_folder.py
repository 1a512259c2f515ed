"""A folder of WFDB records of any format, leads and rate: known leads are placed by name, other channels are ignored.

Patients are unknown, and every record's source is `wfdb`.
"""

from collections.abc import Iterator

from data_tools.sources.base import WfdbSource, path_name
from data_tools.sources.hospital import ENDINGS
from data_tools.sources.wfdb_header import WfdbHeader


class WfdbFolder(WfdbSource):
    name = "wfdb"
    others = 0  # hospitals' files

    def keys(self) -> Iterator[str]:
        self.others = 0
        for name in self.root.names():
            if name.endswith(".hea"):
                yield name
            self.others += name.lower().endswith(ENDINGS)

    def record_name(self, key: str, stem: str) -> str:
        return path_name(key, stem)

    def notes(self) -> list[str]:
        why = "a plain WFDB folder, read without tables: patients are unknown, so nobody can be in gallery and probe"
        notes = [f"{self.root.url}: {why}. If it belongs to a known archive, name that as SRC, or its kind with --source"]
        what = f"{self.others:,} files of hospitals' formats were left out beside WFDB records: --source hospital reads them"
        return [*notes, f"{self.root.url}: {what}"] if self.others else notes

    def check(self, header: WfdbHeader) -> None:
        """Any leads, any files."""
