"""MIMIC-IV-ECG: `files/p1000/p10001725/s41420867/41420867.dat`, leads in its own order, 200 steps
per mV.

record_list.csv lists the records and their patients; only its columns subject_id and path are read,
never the time.
"""

import dataclasses
import re
from collections.abc import Iterator

from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.record import EcgRecord, Header
from omnilead.data_tools.sources.base import WfdbSource, read_table, with_orphans

LIST, MAX_LIST = "record_list.csv", 512 * 2**20
_PATH = re.compile(r"files/p\d{4}/p(\d{8})/s(\d+)/\2", re.ASCII)


class MimicIvEcg(WfdbSource):
    name = "mimic-iv-ecg"
    licence = "ODbL-1.0"

    @staticmethod
    def detect(names: set[str]) -> bool:
        return {LIST, "files"} <= names

    def keys(self) -> Iterator[str]:
        """The rows of the list, or the files if there is no list. Rows whose subject contradicts
        the path are refused later."""
        if not self.root.exists(LIST):
            yield from with_orphans(self.root.names("files"), ".dat")
            return
        for row in read_table(self.root, LIST, MAX_LIST, ("subject_id", "path")):
            found = _PATH.fullmatch(row["path"])
            yield (
                f"{row['path']}.hea"
                if found and found[1] == row["subject_id"]
                else f"{LIST}: {row['path']}.hea"
            )

    def places(self) -> list[str]:
        return ["files"]

    def enrich(self, record: EcgRecord, key: str) -> EcgRecord:
        found = _PATH.fullmatch(key.removesuffix(".hea"))
        return dataclasses.replace(record, patient=found[1] if found else None)

    def header(self, key: str) -> Header:
        if key.startswith(LIST):
            raise ReadError("patient contradicts the path", key.rsplit("/", 1)[-1][:40])
        return super().header(key)
