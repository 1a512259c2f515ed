"""Leave patients out of a dataset, for example because they withdrew their consent.

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
IDS_IN_MESSAGE = 20  # most names or ids that one message lists
ID_WORD = re.compile("[A-Za-z0-9_-]+")
# The shortest id that is searched for in texts: a shorter one, such as 17, may mean anything
MIN_ID_LENGTH = 5


@dataclass(frozen=True)
class LeaveOut:
    # Each name is PATIENT or SOURCE/PATIENT, with the patient's id in the archive or in a dataset
    names: tuple[str, ...]
    key: bytes | None = None  # key of pseudonyms

    @classmethod
    def read(cls, file: str, key: bytes | None) -> "LeaveOut":
        """Reads the patients' names from the column `patient` or `patient_id` of a file, else from the
        first cell of each line. A quoted cell cannot continue on the next line."""
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
        """Returns the name in the file that means this patient, or None. `patient` is the id that the
        dataset shows."""
        return names_by_shown_id(self, patient_source(source)).get(patient) if patient else None

    def note_doubtful_names(self, found: Iterable[tuple[str, str]], owners: Iterable[str]) -> int:
        """Prints notes on names in the file that were not found, or that meant several patients, and on
        remaining patients whose ids are similar to ids in the file. `found`: pairs of a name in the
        file and the SOURCE/PATIENT that was left out for it; `owners`: SOURCE/PATIENT of those who
        remain. Returns how many names were not found."""
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
        asked = {f"{source}/{id}" for source in sources for id in names_by_shown_id(self, source)}
        _note_similar_ids(asked, set(owners))
        return len(missing)

    def without_names(self, rejects: list[Reject]) -> list[Reject]:
        """Returns the lines of rejects.csv that name none of these patients."""
        texts = set()
        for name in self.names:
            for text in (name, name.partition("/")[2]):
                if len(text) >= MIN_ID_LENGTH:
                    texts |= {text, normalize("NFC", text), normalize("NFD", text)}
        ends: dict[str, list[str]] = {}  # texts by the last word of each
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
def names_by_shown_id(leave_out: LeaveOut, source: str) -> dict[str, str]:
    """Returns a dict of the names in the file. Its keys are the patient ids that a dataset shows for them.
    `source` is the namespace of the ids, as patient_source() returns it."""
    ids = {}
    for name in leave_out.names:
        prefix, slash, rest = name.partition("/")
        namespace = VENDORS[0] if prefix == "hospital" else patient_source(prefix)
        for who in (name, rest) if slash and namespace == source else (name,):
            for key in {None, leave_out.key}:
                try:
                    shown = dataset_patient(key, source, who)
                except ReadError:  # no record can have this id
                    continue
                if shown:
                    ids[shown] = name
    return ids


def _note_similar_ids(asked: set[str], stay: set[str]) -> None:
    """Prints a warning about remaining patients whose ids are similar to ids in the file."""
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
