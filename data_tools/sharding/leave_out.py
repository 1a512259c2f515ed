"""Patients who are left out of a dataset, because they withdrew their consent.

leave_out = LeaveOut.read("withdrawn.txt", key)
leave_out.who("ptb-xl", "17")        # the line of the file that means this patient, or None
"""

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from unicodedata import normalize

import pyarrow as pa

from ..dataset.rejects import Reject
from ..ecg.constants import VENDORS
from ..ecg.record import patient_source
from ..ecg.record_tables import decoded, ids_alike
from ..io.errors import DataError, Flag, ReadError
from ..io.spreadsheet import unquoted
from ..io.terminal import tell
from ..sources.base import shown_patient

OPTION = Flag("--leave-out-patients")
SHOWN = 20  # names in a message
WORD = re.compile("[A-Za-z0-9_-]+")
SHORTEST = 5  # characters of a patient that is searched in texts: 17 may be anything


@dataclass(frozen=True)
class LeaveOut:
    names: tuple[str, ...]  # PATIENT or SOURCE/PATIENT, as in the archive or in a dataset
    key: bytes | None = None  # of pseudonyms

    @classmethod
    def read(cls, file: str, key: bytes | None) -> "LeaveOut":
        """The first cell of each line, or that below `patient` or `patient_id`. A quote ends with its
        line."""
        try:
            lines = list(filter(str.strip, decoded(Path(file).read_bytes()).splitlines()))
            mark = next((sign for sign in ";\t" if sign in "".join(lines[:1])), ",")
            rows = []
            for line in lines:
                row = next(csv.reader([line], delimiter=mark, skipinitialspace=True), [])
                rows.append([unquoted(cell.strip()) for cell in row])
        except (DataError, csv.Error) as error:
            raise DataError(OPTION, f" {file}: {error}") from None
        header = [cell.lower() for cell in rows[0]] if rows else []
        for name in ("patient", "patient_id"):
            if name in header:
                rows = [row[header.index(name) :] for row in rows[1:]]
                break
        names = {row[0] for row in rows if row} - {""}
        if not names:
            raise DataError(OPTION, f" {file}: names no patient: write one on each line")
        return cls(tuple(sorted(names)), key)

    def who(self, source: str, patient: str | None) -> str | None:
        """The name in the file that means this patient, whose id is as the dataset shows it."""
        return ids_of_source(self, patient_source(source)).get(patient) if patient else None

    def tell(self, found: Iterable[tuple[str, str]], owners: Iterable[str]) -> int:
        """Says whom it did not find, and who stays although an id is like one in the file. `found`: names in
        the file and the SOURCE/PATIENT that were left out for them; `owners`: those who stay. -> how many
        were not found."""
        people: dict[str, set[str]] = {}
        for name, person in found:
            people.setdefault(name, set()).add(person)
        missing = [name for name in self.names if name not in people]
        if missing:
            shown = ", ".join(missing[:SHOWN]) + ", ..." * (len(missing) > SHOWN)
            tell(f"note: {len(missing):,} of these patients are in none of the sources: {shown}")
        for name, several in people.items():
            if len(several) > 1:
                persons = " and ".join(sorted(several))
                tell(f"warning: patient {name} means several, all of whom are left out: {persons}")
        sources = {owner.partition("/")[0] for owner in owners}
        asked = {f"{source}/{id}" for source in sources for id in ids_of_source(self, source)}
        _name_those_alike(asked, set(owners))
        return len(missing)

    def without_names(self, rejects: list[Reject]) -> list[Reject]:
        """The lines of rejects.csv in which none of them is named."""
        texts = set()
        for name in self.names:
            for text in (name, name.partition("/")[2]):
                if len(text) >= SHORTEST:
                    texts |= {text, normalize("NFC", text), normalize("NFD", text)}
        ends: dict[str, list[str]] = {}  # the texts by their last words
        for text in texts:
            ends.setdefault(["", *WORD.findall(text)][-1], []).append(text)
        left = []
        for reject in rejects:
            line = f"{reject[1]} {reject[3]}"
            words = "", *WORD.findall(line)
            if not any(text in line for word in words for text in ends.get(word, ())):
                left.append(reject)
        return left


@lru_cache(maxsize=64)
def ids_of_source(leave_out: LeaveOut, source: str) -> dict[str, str]:
    """The names in the file by the ids that a dataset shows for them. `source`: as of patients."""
    ids = {}
    for name in leave_out.names:
        prefix, slash, rest = name.partition("/")
        namespace = VENDORS[0] if prefix == "hospital" else patient_source(prefix)
        for who in (name, rest) if slash and namespace == source else (name,):
            for key in {None, leave_out.key}:
                try:
                    shown = shown_patient(key, source, who)
                except ReadError:  # no id that a record can have
                    continue
                if shown:
                    ids[shown] = name
    return ids


def _name_those_alike(asked: set[str], stay: set[str]) -> None:
    """Says who stays and has an id like that of one in the file."""
    alike = []
    for group in ids_alike(pa.array(sorted(asked | stay), pa.string())):
        if not asked.isdisjoint(group):
            alike += [person for person in group if person in stay]
    if alike:
        shown = ", ".join(alike[:SHOWN]) + ", ..." * (len(alike) > SHOWN)
        tell(
            f"warning: {len(alike):,} patients stay whose ids differ from those given only in zeros or "
            f"in case: {shown}: if they are the same people, give these ids, too"
        )
