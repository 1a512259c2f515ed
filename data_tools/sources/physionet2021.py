"""PhysioNet/CinC Challenge 2021: `training/<database>/g<k>/<id>.hea` and `.mat` (MATLAB level 4),
all databases in one tree.

Only PTB-XL's own table has the patients of its records (HRnnnnn): put ptbxl_database.csv beside
`training`.
"""

import dataclasses
import posixpath
from collections.abc import Iterator
from functools import lru_cache

from omnilead.data_tools.record import EcgRecord
from omnilead.data_tools.sources.base import WfdbSource, cached, with_orphans
from omnilead.data_tools.sources.ptbxl import FOLDERS, TABLE, patients
from omnilead.data_tools.storage import Folder, folder

DATABASES = (
    "chapman_shaoxing",
    "cpsc_2018",
    "cpsc_2018_extra",
    "georgia",
    "ningbo",
    "ptb",
    "ptb-xl",
    "st_petersburg_incart",
)
TABLE_PLACES = (TABLE, f"ptb-xl/{TABLE}", f"training/{TABLE}", f"training/ptb-xl/{TABLE}")


class PhysioNet2021(WfdbSource):
    name = "physionet2021"
    licence = "CC-BY-4.0"
    suffix = ".mat"
    table: str | None = None  # path of PTB-XL's table, if it is stored elsewhere

    @staticmethod
    def detect(names: set[str]) -> bool:
        return "training" in names or bool(names & set(DATABASES) - {"ptb-xl"})

    def keys(self) -> Iterator[str]:
        """Only headers in database folders, if there are any: other archives (PTB-XL's release) may
        be in the same folder."""
        for place in self.places():
            yield from with_orphans(self.root.names(place), ".mat")

    def places(self) -> list[str]:
        names = self.root.children()
        places = (
            ["training"]
            if "training" in names
            else [name for name in names if name in DATABASES] or [""]
        )
        return [
            name
            for name in places
            if name != "ptb-xl" or not any(self.root.exists(f"ptb-xl/{one}") for one in FOLDERS)
        ]

    def has_records(self) -> bool:
        """Whether there are headers with signals in .mat: other archives' folders have the same names."""
        endings = set()
        for place in self.places():
            for name in self.root.names(place):
                endings.add(name[-4:])
                if {".hea", ".mat"} <= endings:
                    return True
        return False

    def source_of(self, key: str) -> str:
        return _database(self.root.url, key.rpartition("/")[0]) or self.name

    def enrich(self, record: EcgRecord, key: str) -> EcgRecord:
        if record.source != "ptb-xl" or not record.name.startswith("HR"):
            return record
        number, known = record.name.removeprefix("HR").lstrip("0"), _patients(self.root, self.table)
        if known and number not in known:
            return dataclasses.replace(record, warnings=(*record.warnings, (f"not in {TABLE}", "")))
        return dataclasses.replace(record, patient=known.get(number))

    def tables(self) -> bytes:
        return repr(sorted(_patients(self.root, self.table).items())).encode()

    def notes(self) -> list[str]:
        if _patients(self.root, self.table) or not any(
            map(self.root.exists, ("training/ptb-xl", "ptb-xl/g1"))
        ):
            return super().notes()
        why = (
            "so this archive's PTB-XL records have no patient, and no gallery or probe role: pass "
            "it with --patients"
        )
        return [f"{self.root.url}: no {TABLE}, {why}", *super().notes()]


@lru_cache(maxsize=256)  # a folder has a thousand records
def _database(url: str, place: str) -> str | None:
    """The database of a folder. The root may itself be a database or one of its folders."""
    parts = [*url.split("/")[-2:], *place.split("/")]
    return next((part for part in reversed(parts) if part in DATABASES), None)


@cached
def _patients(root: Folder, table: str | None) -> dict[str, str | None]:
    if table:
        return patients(folder(posixpath.dirname(table) or "."), posixpath.basename(table))
    place = next((place for place in TABLE_PLACES if root.exists(place)), None)
    return patients(root, place) if place else {}
