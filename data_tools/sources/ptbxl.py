"""PTB-XL's own release: `records500/<thousand>/<id>_hr.dat` and ptbxl_database.csv (patient, age,
sex, SCP statements). If records500 is missing, `records100/<thousand>/<id>_lr.dat`, the same ECGs
at 100 Hz, is read.

Records get the Challenge's names (ecg_id 11 is HR00011), so an ECG in both releases counts as one
record.
"""

import ast
import dataclasses
from collections.abc import Iterator

from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.record import HEART_AXIS_CODES, SCP_CODES, EcgRecord, clean_age
from omnilead.data_tools.sources.base import WfdbSource, cached, read_table, with_orphans
from omnilead.data_tools.storage import Folder

FOLDERS = ("records500", "records100")
TABLE, MAX_TABLE = "ptbxl_database.csv", 256 * 2**20
# Characters of scp_codes; limited because the parser in literal_eval recurses
MAX_STATEMENTS = 4096


class PtbXl(WfdbSource):
    name = "ptb-xl"
    licence = "CC-BY-4.0"

    @staticmethod
    def detect(names: set[str]) -> bool:
        return TABLE in names and bool(names & set(FOLDERS))

    def keys(self) -> Iterator[str]:
        return with_orphans(self.root.names(self._folder()), ".dat")

    def places(self) -> list[str]:
        return list(FOLDERS)  # also that of the same ECGs at the other rate

    def _folder(self) -> str:
        return next((name for name in FOLDERS if self.root.exists(name)), FOLDERS[0])

    def notes(self) -> list[str]:
        if self._folder() == FOLDERS[0]:
            return super().notes()
        what = (
            "no records500, so records100 is read: 100 Hz, resampled to 500 Hz, with nothing "
            "above 50 Hz"
        )
        return [f"{self.root.url}: {what}", *super().notes()]

    def tables(self) -> bytes:
        return self.root.read(TABLE, MAX_TABLE)

    def record_name(self, key: str, stem: str) -> str:
        number = stem.removesuffix("_hr").removesuffix("_lr")
        if not number.isdigit():
            raise ReadError("record name", stem)
        return f"HR{int(number):05d}"

    def enrich(self, record: EcgRecord, key: str) -> EcgRecord:
        row = _rows(self.root, TABLE).get(record.name.removeprefix("HR").lstrip("0"))
        if row is None:
            return dataclasses.replace(record, warnings=(*record.warnings, (f"not in {TABLE}", "")))
        sex = {"0": "M", "1": "F"}.get(row["sex"].split(".")[0])
        patient, age = patient_id(row["patient_id"]), clean_age(row["age"])
        return dataclasses.replace(record, patient=patient, age=age, sex=sex, dx=_diagnoses(row))


def patient_id(text: str) -> str | None:
    """The id as a whole number; the table writes it as a float: 15709.0."""
    text = text.removesuffix(".0")
    return text if text.isascii() and text.isdigit() else None


def patients(root: Folder, place: str) -> dict[str, str | None]:
    """Map ecg_id to patient, None if the row has none."""
    return {number: patient_id(row["patient_id"]) for number, row in _rows(root, place).items()}


def statements(scp_codes: str) -> dict[str, float]:
    """Parse a cell with a Python dict of {statement: likelihood in per cent}; a likelihood that is
    not a number becomes 0."""
    try:
        given = ast.literal_eval(scp_codes[:MAX_STATEMENTS])
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        given = {}
    if not isinstance(given, dict):
        return {}
    likelihoods = {}
    for name, value in given.items():
        likelihoods[str(name)] = value if isinstance(value, int | float) else 0
    return likelihoods


def _diagnoses(row: dict[str, str]) -> tuple[str, ...]:
    codes = [SCP_CODES.get(name) for name in statements(row["scp_codes"])]
    codes.append(HEART_AXIS_CODES.get(row["heart_axis"]))
    return tuple(dict.fromkeys(code for code in codes if code))


@cached
def _rows(root: Folder, place: str) -> dict[str, dict[str, str]]:
    """The six columns that are used, by ecg_id; others (dates, reports, names of staff) are never
    read."""
    columns = ("ecg_id", "patient_id", "age", "sex", "scp_codes", "heart_axis")
    rows = read_table(root, place, MAX_TABLE, columns)
    return {row["ecg_id"].split(".")[0]: row for row in rows}
