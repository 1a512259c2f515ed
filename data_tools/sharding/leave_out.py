"""Patients who are left out of a dataset, because they withdrew their consent.

leave_out = LeaveOut.read("withdrawn.txt", key)
leave_out.listed_name("ptb-xl", "17")        # the line of the file that means this patient, or None
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
from ..ecg.record_tables import decode_text, similar_ids
from ..io.errors import DataError, Flag, ReadError
from ..io.spreadsheet import unquote_cell
from ..io.terminal import tell
from ..sources.base import dataset_patient

OPTION = Flag("--leave-out-patients")
IDS_IN_MESSAGE = 20  # names in a message
ID_WORD = re.compile("[A-Za-z0-9_-]+")
MIN_ID_LENGTH = 5  # characters of a patient that is searched in texts: 17 may be anything


@dataclass(frozen=True)
class LeaveOut:
    names: tuple[str, ...]  # PATIENT or SOURCE/PATIENT, as in the archive or in a dataset
    key: bytes | None = None  # key of pseudonyms

    @classmethod
    def read(cls, file: str, key: bytes | None) -> "LeaveOut":
        """Reads the column `patient` or `patient_id`, else the first cell of each line. A quote
        ends with its line."""
        try:
            lines = list(filter(str.strip, decode_text(Path(file).read_bytes()).splitlines()))
            mark = next((sign for sign in ";\t" if sign in "".join(lines[:1])), ",")
            rows = []
            for line in lines:
                row = next(csv.reader([line], delimiter=mark, skipinitialspace=True), [])
                rows.append([unquote_cell(cell.strip()) for cell in row])
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

    def listed_name(self, source: str, patient: str | None) -> str | None:
        """The name in the file that means this patient, whose id is as the dataset shows it."""
        return shown_ids(self, patient_source(source)).get(patient) if patient else None

    def tell(self, found: Iterable[tuple[str, str]], owners: Iterable[str]) -> int:
        """Says whom it did not find, and who stays although an id is like one in the file. `found`: names in
        the file and the SOURCE/PATIENT that were left out for them; `owners`: those who stay.
        Returns how many were not found."""
        people: dict[str, set[str]] = {}
        for name, person in found:
            people.setdefault(name, set()).add(person)
        missing = [name for name in self.names if name not in people]
        if missing:
            shown = ", ".join(missing[:IDS_IN_MESSAGE]) + ", ..." * (len(missing) > IDS_IN_MESSAGE)
            tell(f"note: {len(missing):,} of these patients are in none of the sources: {shown}")
        for name, several in people.items():
            if len(several) > 1:
                persons = " and ".join(sorted(several))
                tell(f"warning: patient {name} means several, all of whom are left out: {persons}")
        sources = {owner.partition("/")[0] for owner in owners}
        asked = {f"{source}/{id}" for source in sources for id in shown_ids(self, source)}
        _note_similar_ids(asked, set(owners))
        return len(missing)

    def without_names(self, rejects: list[Reject]) -> list[Reject]:
        """Returns the lines of rejects.csv that name none of these patients."""
        texts = set()
        for name in self.names:
            for text in (name, name.partition("/")[2]):
                if len(text) >= MIN_ID_LENGTH:
                    texts |= {text, normalize("NFC", text), normalize("NFD", text)}
        ends: dict[str, list[str]] = {}  # the texts by their last words
        for text in texts:
            ends.setdefault(["", *ID_WORD.findall(text)][-1], []).append(text)
        left = []
        for reject in rejects:
            line = f"{reject[1]} {reject[3]}"
            words = "", *ID_WORD.findall(line)
            if not any(text in line for word in words for text in ends.get(word, ())):
                left.append(reject)
        return left


@lru_cache(maxsize=64)
def shown_ids(leave_out: LeaveOut, source: str) -> dict[str, str]:
    """The names in the file by the ids that a dataset shows for them. `source`: as of patients."""
    ids = {}
    for name in leave_out.names:
        prefix, slash, rest = name.partition("/")
        namespace = VENDORS[0] if prefix == "hospital" else patient_source(prefix)
        for who in (name, rest) if slash and namespace == source else (name,):
            for key in {None, leave_out.key}:
                try:
                    shown = dataset_patient(key, source, who)
                except ReadError:  # no id that a record can have
                    continue
                if shown:
                    ids[shown] = name
    return ids


def _note_similar_ids(asked: set[str], stay: set[str]) -> None:
    """Notes which remaining patients have an id similar to one in the file."""
    alike = []
    for group in similar_ids(pa.array(sorted(asked | stay), pa.string())):
        if not asked.isdisjoint(group):
            alike += [person for person in group if person in stay]
    if alike:
        shown = ", ".join(alike[:IDS_IN_MESSAGE]) + ", ..." * (len(alike) > IDS_IN_MESSAGE)
        tell(
            f"warning: {len(alike):,} patients stay whose ids differ from those given only in zeros or "
            f"in case: {shown}: if they are the same people, give these ids, too"
        )
