"""A folder of WFDB records of any format, leads and rate: known leads are placed by name, other channels are ignored.

Patients are unknown, and every record's source is `wfdb`.
"""

import posixpath
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from data_tools.errors import ReadError, StorageError
from data_tools.sources.base import WfdbSource
from data_tools.sources.wfdb_header import WfdbHeader
from data_tools.storage import Folder, folder

MAX_TABLE, MAX_TABLES = 64 * 2**20, 20
PATIENT_COLUMNS = {"patient", "patient_id", "patientid", "subject", "subject_id", "subjectid", "person_id"}


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
        """A hint if a table with patients lies in this folder or in the one above: it is not read."""
        places = [self.root] if self.root.remote else [self.root, folder(posixpath.dirname(self.root.url))]
        table = next((table for place in places for table in _tables_with_patients(place)), "")
        why = "a plain WFDB folder is read without tables, so nobody can be in gallery and probe"
        return [f"{table}, but {why}: name the archive's own folder as SRC, or its kind with --source"] if table else []

    def check(self, header: WfdbHeader) -> None:
        """Any leads, any files."""


def _tables_with_patients(place: Folder) -> Iterator[str]:
    with suppress(StorageError):
        for name in islice((name for name in place.children() if name.lower().endswith(".csv")), MAX_TABLES):
            with suppress(ReadError):
                first = place.read(name, MAX_TABLE).partition(b"\n")[0].decode("utf-8-sig", "replace").lower()
                columns = {re.sub(r"[^a-z0-9]+", "_", column).strip("_") for column in re.split("[,;\t]", first)}
                if found := sorted(columns & PATIENT_COLUMNS):
                    yield f"{place.url}/{name} names patients ({found[0]})"
