"""Sources for archives of WFDB records: PTB-XL, the PhysioNet Challenges 2021 and 2011, ecg-arrhythmia,
MIMIC-IV-ECG, and plain folders.

Each is a `WfdbSource` that knows the folders and tables of its archive. Of the tables only the columns that
are named here are read, never dates, reports or names.
"""

import ast
import dataclasses
import hashlib
import posixpath
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

import numpy as np

from ..ecg.crops import millivolts_and_unmeasured
from ..ecg.record import (
    HEART_AXIS_CODES,
    LEAD_INDEX,
    LEADS,
    SCP_CODES,
    SYNTHETIC,
    EcgRecord,
    Header,
    add_limb_leads,
    clean_age,
    lead_rows,
    real_source,
    record_stem,
    synthetic_prefix,
)
from ..io.errors import ReadError
from ..io.storage import Folder
from .base import (
    RECORDS,
    Source,
    absent_key,
    absent_records,
    headers_and_orphans,
    name_with_folders,
    read_table,
    threadsafe_cache,
)
from .wfdb import MAX_HEADER_BYTES, WfdbHeader, checked_name, parse_header, peek_header, read_record

PTBXL_FOLDERS = ("records500", "records100")
PTBXL_CSV, MAX_PTBXL_CSV = "ptbxl_database.csv", 256 * 2**20
# Only so many characters of a cell in scp_codes are parsed, because literal_eval is recursive
MAX_SCP_CODES_CHARS = 4096
CHALLENGE_DATABASES = (
    "chapman_shaoxing",
    "cpsc_2018",
    "cpsc_2018_extra",
    "georgia",
    "ningbo",
    "ptb",
    "ptb-xl",
    "st_petersburg_incart",
)
# Names of folders that contain one database, real or synthetic
DATABASE_FOLDERS = {SYNTHETIC + name for name in CHALLENGE_DATABASES} | set(CHALLENGE_DATABASES)
PTBXL_CSV_PATHS = (
    PTBXL_CSV,
    f"ptb-xl/{PTBXL_CSV}",
    f"training/{PTBXL_CSV}",
    f"training/ptb-xl/{PTBXL_CSV}",
)
MIMIC_LIST, MAX_MIMIC_LIST = "record_list.csv", 512 * 2**20
ACCEPTABLE_LIST = "RECORDS-acceptable"
_MIMIC_PATH = re.compile(r"files/p\d{4}/p(\d{8})/s(\d+)/\2", re.ASCII)


class WfdbSource(Source):
    """Reads an archive of WFDB records. Subclasses know the archive's folder layout and its patients."""

    suffix = ".dat"
    # Names of the archive's folders in the root. Of a RECORDS file in the root, only the records in these
    # folders are checked; if this is empty, all are
    folders: frozenset[str] = frozenset()

    def keys(self) -> Iterator[str]:
        places, lists = self.places(), list[str]()
        within = self.folders
        if "" in places:  # the whole root is this archive, with all records of its lists
            within = frozenset()
        else:
            lists.append(RECORDS)
        for place in places:
            yield from headers_and_orphans(
                _collect_lists(self.root.names(place), lists), self.suffix
            )
        yield from absent_records(self.root, lists, (".hea", self.suffix), within)

    def record_name(self, key: str, stem: str) -> str:
        return stem

    def name_for(self, key: str) -> str:
        try:
            return self.record_name(key, record_stem(key))
        except ReadError:
            return record_stem(key)

    def patient(self, name: str, key: str) -> str | None:
        """Return a record's patient, from the archive's tables or the key; None if the patient is unknown."""
        return None

    def enrich(self, record: EcgRecord, key: str) -> EcgRecord:
        """Return the record with what the archive's tables state: patient, age, sex and diagnoses."""
        return record

    def header(self, key: str) -> Header:
        data = self._header_bytes(key)
        name, _, fs_hz, samples = peek_header(data)
        stamp = self.root.stamp(key.removesuffix(".hea") + self.suffix)
        content = hashlib.blake2b(data, digest_size=8).digest()
        name = self.record_name(key, checked_name(name, key))
        return Header(
            name,
            self.source_of(key),
            samples,
            fs_hz,
            content,
            stamp,
            self.patient(name, key),
        )

    def read(self, key: str) -> EcgRecord:
        header = parse_header(self._header_bytes(key))
        self.check_leads_and_files(header)
        name = self.record_name(key, checked_name(header.name, key))
        return self.enrich(read_record(self.root, key, header, name, self.source_of(key)), key)

    def _header_bytes(self, key: str) -> bytes:
        if not key.endswith(".hea"):
            raise ReadError("no header", f"{key.rsplit('/', 1)[-1]} has no .hea file beside it")
        return self.root.read(key, MAX_HEADER_BYTES)

    def check_leads_and_files(self, header: WfdbHeader) -> None:
        """Raise a ReadError unless the record has the twelve leads in one file with the record's name, as in
        all large archives."""
        known = {LEAD_INDEX.get(lead.upper()) for lead in header.leads} - {None}
        if len(header.leads) != 12 or len(known) != 12:
            raise ReadError("not twelve leads", ", ".join(header.leads)[:80])
        if set(header.files) != {header.name + self.suffix}:
            raise ReadError(
                "signal file name",
                f"{header.files[0]}: all signals must be in {header.name + self.suffix}",
            )


def _collect_lists(names: Iterator[str], lists: list[str]) -> Iterator[str]:
    """Yield all names, and append those of RECORDS files to `lists`."""
    for name in names:
        if posixpath.basename(name) == RECORDS:
            lists.append(name)
        yield name


class PtbXl(WfdbSource):
    """PTB-XL's own release: `records500/<thousand>/<id>_hr.dat` and ptbxl_database.csv (patient, age,
    sex, SCP statements). If records500 is missing, `records100/<thousand>/<id>_lr.dat`, the same
    ECGs at 100 Hz, is read.

    Records get the Challenge's names (ecg_id 11 is HR00011), so an ECG in both releases counts as
    one record."""

    name = "ptb-xl"
    licence = "CC-BY-4.0"

    @staticmethod
    def detect(names: set[str]) -> bool:
        return PTBXL_CSV in names and bool(names & set(PTBXL_FOLDERS))

    def keys(self) -> Iterator[str]:
        absent = dict(_ptbxl_rows(self.root, PTBXL_CSV))
        for key in headers_and_orphans(self.root.names(self._folder()), ".dat"):
            absent.pop(ecg_id(self.name_for(key)), None)
            yield key
        for number, row in absent.items():
            yield absent_key(self._path(number, row), PTBXL_CSV)

    def _path(self, number: str, row: dict[str, str]) -> str:
        """Return the path of the header of the record with this ecg_id."""
        name = f"{synthetic_prefix(row['patient_id'])}{number:0>5}"
        thousand = f"{number[:-3]:0>2}000"
        ending = "hr" if self._folder() == PTBXL_FOLDERS[0] else "lr"
        return f"{self._folder()}/{thousand}/{name}_{ending}.hea"

    def places(self) -> list[str]:
        # Both, so that no other source reads the same ECGs at the other rate
        return list(PTBXL_FOLDERS)

    def _folder(self) -> str:
        return next(filter(self.root.exists, PTBXL_FOLDERS), PTBXL_FOLDERS[0])

    def notes(self) -> list[str]:
        if self._folder() == PTBXL_FOLDERS[0]:
            return []
        what = (
            "no records500, so records100 is read: 100 Hz, resampled to 500 Hz, with nothing "
            "above 50 Hz"
        )
        return [f"{self.root.url}: {what}"]

    def tables(self) -> bytes:
        return self.root.read(PTBXL_CSV, MAX_PTBXL_CSV)

    def source_of(self, key: str) -> str:
        return SYNTHETIC * bool(synthetic_prefix(record_stem(key))) + self.name

    def record_name(self, key: str, stem: str) -> str:
        prefix = synthetic_prefix(stem)
        number = stem.removeprefix(prefix).removesuffix("_hr").removesuffix("_lr")
        if not number.isdigit():
            raise ReadError("record name", f"{stem}: a name such as 00011_hr is expected")
        return f"{prefix}HR{int(number):05d}"

    def patient(self, name: str, key: str) -> str | None:
        row = _ptbxl_rows(self.root, PTBXL_CSV).get(ecg_id(name))
        return patient_id(row["patient_id"]) if row else None

    def enrich(self, record: EcgRecord, key: str) -> EcgRecord:
        row = _ptbxl_rows(self.root, PTBXL_CSV).get(ecg_id(record.name))
        if row is None:
            return dataclasses.replace(
                record, warnings=(*record.warnings, (f"not in {PTBXL_CSV}", ""))
            )
        sex = {"0": "M", "1": "F"}.get(row["sex"].split(".")[0])
        patient, age = patient_id(row["patient_id"]), clean_age(row["age"])
        return dataclasses.replace(record, patient=patient, age=age, sex=sex, dx=_diagnoses(row))


def ecg_id(record: str) -> str:
    """Return a record's ecg_id in ptbxl_database.csv: 11 for HR00011; "" if the name has another form."""
    name = record.removeprefix(synthetic_prefix(record))
    return name.removeprefix("HR").lstrip("0") if name.startswith("HR") else ""


def patient_id(text: str) -> str | None:
    """Return a patient id without the `.0` that PTB-XL's table has after it (15709.0); None if it is not a
    number."""
    text = text.removesuffix(".0")
    number = text.removeprefix(synthetic_prefix(text))
    return text if number.isascii() and number.isdigit() else None


def parse_statements(scp_codes: str) -> dict[str, float]:
    """Parse a cell of scp_codes, a Python dict of {statement: likelihood in per cent}. A likelihood that is
    not a number becomes 0."""
    try:
        parsed = ast.literal_eval(scp_codes[:MAX_SCP_CODES_CHARS])
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        parsed = {}
    if not isinstance(parsed, dict):
        return {}
    likelihoods = {}
    for name, value in parsed.items():
        likelihoods[str(name)] = value if isinstance(value, int | float) else 0
    return likelihoods


def _diagnoses(row: dict[str, str]) -> tuple[str, ...]:
    codes = [SCP_CODES.get(name) for name in parse_statements(row["scp_codes"])]
    codes.append(HEART_AXIS_CODES.get(row["heart_axis"]))
    return tuple(dict.fromkeys(code for code in codes if code))


@threadsafe_cache
def _ptbxl_rows(root: Folder, place: str) -> dict[str, dict[str, str]]:
    """Return {ecg_id: row} of PTB-XL's table, with the six columns that are used. Other columns (dates,
    reports, names of staff) are never read."""
    columns = ("ecg_id", "patient_id", "age", "sex", "scp_codes", "heart_axis")
    rows = read_table(root, place, MAX_PTBXL_CSV, columns)
    return {row["ecg_id"].split(".")[0]: row for row in rows}


class PhysioNet2021(WfdbSource):
    """The PhysioNet Challenge 2021: `training/<database>/g<k>/<id>.hea` and `.mat` (MATLAB level 4).

    Only PTB-XL's own table has the patients of its records (HRnnnnn): put ptbxl_database.csv beside
    `training`."""

    name = "physionet2021"
    licence = "CC-BY-4.0"
    suffix = ".mat"
    folders = frozenset({"training", *DATABASE_FOLDERS})

    @staticmethod
    def detect(names: set[str]) -> bool:
        return "training" in names or bool(names & DATABASE_FOLDERS - {"ptb-xl"})

    def places(self) -> list[str]:
        """Return `training` or, without it, the folders of databases, because the root may contain other
        archives too; [""] if there are none. A folder ptb-xl that holds PTB-XL's own release is left out."""
        names = self.root.children()
        places = (
            ["training"]
            if "training" in names
            else [name for name in names if name in DATABASE_FOLDERS] or [""]
        )
        return [
            name
            for name in places
            if name != "ptb-xl"
            or not any(self.root.exists(f"ptb-xl/{folder}") for folder in PTBXL_FOLDERS)
        ]

    def has_records(self) -> bool:
        """Return True if there are both headers and .mat files. Folders of other archives can have the
        same names."""
        endings = set()
        for place in self.places():
            for name in self.root.names(place):
                endings.add(name[-4:])
                if {".hea", ".mat"} <= endings:
                    return True
        return False

    def source_of(self, key: str) -> str:
        return _database_of_folder(self.root.url, key.rpartition("/")[0]) or self.name

    def patient(self, name: str, key: str) -> str | None:
        if real_source(self.source_of(key)) != "ptb-xl":
            return None
        return _ptbxl_patients(self.root).get(ecg_id(name))

    def enrich(self, record: EcgRecord, key: str) -> EcgRecord:
        number = ecg_id(record.name)
        if real_source(record.source) != "ptb-xl" or not number:
            return record
        known = _ptbxl_patients(self.root)
        if known and number not in known:
            return dataclasses.replace(
                record, warnings=(*record.warnings, (f"not in {PTBXL_CSV}", ""))
            )
        return dataclasses.replace(record, patient=known.get(number))

    def tables(self) -> bytes:
        return repr(sorted(_ptbxl_patients(self.root).items())).encode()


@lru_cache(maxsize=256)  # one look-up serves the thousand records of a folder
def _database_of_folder(url: str, place: str) -> str | None:
    """Return the database that a folder belongs to. The root may itself be a database's folder, or lie in
    one."""
    parts = [*url.replace(".zip", "").split("/")[-2:], *place.split("/")]
    return next((part for part in reversed(parts) if part in DATABASE_FOLDERS), None)


@threadsafe_cache
def _ptbxl_patients(root: Folder) -> dict[str, str | None]:
    """Return {ecg_id: patient} from PTB-XL's table; empty if the table is missing. A patient is None if the table
    states no valid id."""
    place = next(filter(root.exists, PTBXL_CSV_PATHS), "")
    rows = _ptbxl_rows(root, place) if place else {}
    return {number: patient_id(row["patient_id"]) for number, row in rows.items()}


class EcgArrhythmia(WfdbSource):
    """The archive ecg-arrhythmia: `WFDBRecords/01/010/JS00001.hea` and `.mat`, with the databases
    Chapman-Shaoxing and Ningbo in one tree.

    Records get the Challenge's sources and names, so an ECG in both releases counts as one
    record."""

    name = "ecg-arrhythmia"
    licence = "CC-BY-4.0"
    suffix = ".mat"
    folders = frozenset({"WFDBRecords"})

    @staticmethod
    def detect(names: set[str]) -> bool:
        return "WFDBRecords" in names

    def places(self) -> list[str]:
        return ["WFDBRecords"]

    def source_of(self, key: str) -> str:
        return "chapman_shaoxing" if record_stem(key) < "JS10647" else "ningbo"


class PhysioNet2011(WfdbSource):
    """The PhysioNet Challenge 2011: `set-a/<id>.hea` and `.dat`, with lists of the acceptable and the
    unacceptable ECGs, and `set-b`, which has no lists. The root may be set-a itself."""

    name = "physionet2011"
    licence = "ODC-By-1.0"
    folders = frozenset({"set-a", "set-b"})

    @staticmethod
    def detect(names: set[str]) -> bool:
        return bool(names & {ACCEPTABLE_LIST, "set-a"})

    def places(self) -> list[str]:
        return [name for name in self.root.children() if name in ("set-a", "set-b")] or [""]

    def has_records(self) -> bool:
        """Return True if the list of acceptable ECGs exists: other Challenges have a folder set-a, too."""
        return self.root.exists(posixpath.join(self.places()[0], ACCEPTABLE_LIST))

    def enrich(self, record: EcgRecord, key: str) -> EcgRecord:
        """Replace an age of 0 by None, because this archive states unknown ages as 0."""
        return dataclasses.replace(record, age=record.age or None)


class MimicIvEcg(WfdbSource):
    """MIMIC-IV-ECG: `files/p1000/p10001725/s41420867/41420867.dat`, with the leads in an order of its own and
    200 steps per mV. record_list.csv lists the records and their patients."""

    name = "mimic-iv-ecg"
    licence = "ODbL-1.0"

    @staticmethod
    def detect(names: set[str]) -> bool:
        return {MIMIC_LIST, "files"} <= names

    def keys(self) -> Iterator[str]:
        """Yield a key for each row of record_list.csv; without this list, for each record found. If a row's
        subject_id contradicts its path, or the path has another form, the key begins with the list's name, and
        the record is refused later."""
        if not self.root.exists(MIMIC_LIST):
            yield from super().keys()
            return
        for row in read_table(self.root, MIMIC_LIST, MAX_MIMIC_LIST, ("subject_id", "path")):
            match = _MIMIC_PATH.fullmatch(row["path"])
            yield (
                f"{row['path']}.hea"
                if match and match[1] == row["subject_id"]
                else f"{MIMIC_LIST}: {row['path']}.hea"
            )

    def places(self) -> list[str]:
        return ["files"]

    def links(self) -> Iterator[str]:
        """Yield no links if record_list.csv exists, because the records that it lists are read through links."""
        return iter(()) if self.root.exists(MIMIC_LIST) else super().links()

    def patient(self, name: str, key: str) -> str | None:
        match = _MIMIC_PATH.fullmatch(key.removesuffix(".hea"))
        return match[1] if match else None

    def enrich(self, record: EcgRecord, key: str) -> EcgRecord:
        return dataclasses.replace(record, patient=self.patient(record.name, key))

    def header(self, key: str) -> Header:
        if key.startswith(MIMIC_LIST):
            raise ReadError(
                "patient contradicts the path",
                f"{key.rsplit('/', 1)[-1][:40]}: subject_id and path in {MIMIC_LIST} differ",
            )
        return super().header(key)


class WfdbFolder(WfdbSource):
    """A folder of WFDB records of any format, leads and sampling rate. Known leads are placed by name, other
    channels are ignored. Patients are unknown, and the source of every record is `wfdb`."""

    name = "wfdb"

    def __init__(self, root: Folder, within: tuple[str, ...] = ("",)) -> None:
        """`within`: the folders and header files to read, if other sources read the rest of the root."""
        super().__init__(root)
        self.within = within

    def keys(self) -> Iterator[str]:
        lists: list[str] = []
        has_headers = False
        names = chain.from_iterable(map(self._names, self.within))
        for name in _collect_lists(names, lists):
            if name.endswith(".hea"):
                has_headers = True
                yield name
        if has_headers:
            yield from absent_records(self.root, lists, (".hea",))

    def _names(self, place: str) -> Iterator[str]:
        return iter([place]) if place.endswith(".hea") else self.root.names(place)

    def places(self) -> list[str]:
        return [""]

    def record_name(self, key: str, stem: str) -> str:
        return name_with_folders(key, stem)

    def notes(self) -> list[str]:
        if self.within != ("",):
            return []  # the note in `left_out` counts these records
        why = "its WFDB records are read without tables of patients"
        mend = "if they belong to a known archive, pass that as SRC, or set --source"
        return [f"{self.root.url}: {why}: {mend}"]

    def check_leads_and_files(self, header: WfdbHeader) -> None:
        """Accept any leads and files."""

    def enrich(self, record: EcgRecord, key: str) -> EcgRecord:
        """Compute the missing limb leads if I and II were measured, as is done for hospital files."""
        rows = lead_rows(record.leads)
        if len(rows) == 12 or not {0, 1} <= rows.keys():
            return record
        mv, invalid = millivolts_and_unmeasured(
            record, list(rows.values()), 0, record.signal.shape[1]
        )
        mv[invalid] = np.nan
        measured = {LEADS[lead]: mv[row] for row, lead in enumerate(rows)}
        signals = add_limb_leads(measured)
        return dataclasses.replace(
            record,
            signal=np.array([*signals.values()]),
            leads=tuple(signals),
            gain=1.0,
            baseline=0.0,
            invalid=None,
        )
