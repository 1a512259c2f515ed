"""Reads files exported by hospitals, with one ECG per file: any mixture of HOSPITAL_FORMATS, in any folders.

The format is detected from a file's content. Only the signals of the twelve leads and the patient's
id, age and sex are read: no names, dates, statements or comments. If a file has only I and II, then
III, aVR, aVL and aVF are computed. The scale that a file states can be wrong; such records are
listed as `implausible amplitude` in rejects.csv, and are not for pre-training.
"""

import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import groupby

import numpy as np

from ..ecg.crops import IMPLAUSIBLE_AMPLITUDE, implausible_amplitude_text
from ..ecg.record import (
    EcgRecord,
    Header,
    add_limb_leads,
    age_and_sex_warnings,
    clean_age,
    clean_sex,
    hashed_name,
    is_changing,
    plain_patient_id,
    record_stem,
)
from ..ecg.resampling import rate_ratio
from ..io.errors import ReadError
from ..io.storage import Folder, prefetch
from .base import Source, name_with_folders
from .hospital import aecg, cardiosoft_xml, dicom, edf, muse_xml, philips_xml, scp
from .hospital.base import FileFormat, root_tag

HOSPITAL_FORMATS: dict[str, FileFormat] = {
    "muse-xml": muse_xml.FORMAT,
    "dicom": dicom.FORMAT,
    "philips-xml": philips_xml.FORMAT,
    "cardiosoft-xml": cardiosoft_xml.FORMAT,
    "hl7-aecg": aecg.FORMAT,
    "scp-ecg": scp.FORMAT,
    "edf": edf.FORMAT,
}
HEAD_BYTES = 4096  # the format is detected from these first bytes of a file
MAX_HOSPITAL_BYTES = max(reader.max_bytes for reader in HOSPITAL_FORMATS.values())
# A file with one of these endings counts as a record, which is refused if it cannot be read
HOSPITAL_ENDINGS = (".xml", ".dcm", ".scp", ".ecg", ".edf")
# What anonymised files state in place of a patient's id
_ANONYMOUS_ID_LIST = (
    "anonymous, anonymized, anonymised, anon, unknown, none, null, n/a, na, 0, -, ., ?, unk, noid, "
    "no id, unidentified, test, not available"
)
ANONYMOUS_IDS = set(_ANONYMOUS_ID_LIST.split(", "))


class HospitalFiles(Source):
    name = "hospital"
    private = "the file names and the hospital's patient ids"
    # Number of files left out, by ending; empty until `keys` has looked at all files
    skipped: Mapping[str, int] = {}

    def __init__(self, root: Folder, only: str = "", within: tuple[str, ...] | None = None) -> None:
        """`only`: the one of HOSPITAL_FORMATS to read; "" for all of them. `within`: the folders and files to
        read, except files of WFDB records, which another source reads; None for the whole root."""
        super().__init__(root)
        self.only, self.within = only, within
        self.name = only or self.name

    def keys(self) -> Iterator[str]:
        names, skipped = self._names(), Counter[str]()
        for key, is_record in (
            prefetch(self._key_and_is_record, names)
            if self.root.remote
            else map(self._key_and_is_record, names)
        ):
            if is_record:
                yield key
            else:
                skipped[posixpath.splitext(key)[1].lower()[:8] or "no ending"] += 1
        self.skipped = skipped

    def _names(self) -> Iterator[str]:
        if self.within is None:
            yield from self.root.names()
            return
        for place in self.within:
            if place.lower().endswith(HOSPITAL_ENDINGS):
                yield place
                continue
            for _, names in groupby(self.root.names(place), posixpath.dirname):
                yield from _drop_wfdb_files(list(names))

    def _key_and_is_record(self, key: str) -> tuple[str, bool]:
        """Return (key, True if the file counts as a record). A record is later read or refused."""
        return key, (not self.only and key.lower().endswith(HOSPITAL_ENDINGS)) or bool(
            self._format_of_file(key)
        )

    def _format_of_file(self, key: str) -> str:
        try:
            return self._detect_format(self.root.read(key, HEAD_BYTES, cut=True), key)
        except ReadError:
            return ""

    def _detect_format(self, data: bytes, key: str) -> str:
        head, name = data[:HEAD_BYTES], key.rpartition("/")[2]
        known = (
            kind
            for kind in ([self.only] if self.only else HOSPITAL_FORMATS)
            if HOSPITAL_FORMATS[kind].looks_like(head, name)
        )
        return next(known, "")

    def name_for(self, key: str) -> str:
        """Return a record name made from the file's path.

        A DICOM file's name is often a UID without an ending, so only known endings are removed. If the name
        would lose letters, brackets or its end, a hash of the path is added, because different files could
        otherwise get the same name."""
        stem = record_stem(
            key if key.lower().endswith(HOSPITAL_ENDINGS) else f"{key}.", longest=None
        )
        if key.isascii() and not set("[]{}") & set(key):
            with suppress(ReadError):  # raised if the name would be too long
                return name_with_folders(key, stem)
        return hashed_name(stem, key)

    def source_of(self, key: str) -> str:
        return self._format_of_file(key) or self.name

    def notes(self) -> list[str]:
        if not self.skipped:
            return []
        most = sorted(self.skipped.items(), key=lambda pair: (-pair[1], pair[0]))[:5]
        endings = ", ".join(f"{count:,} {ending}" for ending, count in most)
        # Not shown if private, because an ending may be a part of a patient's name
        shown = "" if self.root.private else f" ({endings})"
        count = sum(self.skipped.values())
        files = f"{count:,} file{'s' * (count > 1)} of no {self.only or 'known'} format"
        return [f"{self.root.url}: {files} {'were' if count > 1 else 'was'} left out{shown}"]

    def header(self, key: str) -> Header:
        data = self.root.read(key, MAX_HOSPITAL_BYTES)
        record = self._to_record(key, data)
        return Header(
            record.name,
            record.source,
            record.signal.shape[1],
            record.fs_hz,
            sha256(data).digest(),
            patient=record.patient,
        )

    def read(self, key: str) -> EcgRecord:
        return self._to_record(key, self.root.read(key, MAX_HOSPITAL_BYTES))

    def _to_record(self, key: str, data: bytes) -> EcgRecord:
        if not (kind := self._detect_format(data, key)):
            if not data:
                raise ReadError("unknown format", "the file is empty: copy it again")
            root = root_tag(data[:HEAD_BYTES])
            raise ReadError(
                "unknown format",
                (f"its root element is {root[:40]}: " if root else "")
                + f"not a file of {', '.join(HOSPITAL_FORMATS)}",
            )
        if len(data) > HOSPITAL_FORMATS[kind].max_bytes:
            raise ReadError(
                "file too large",
                f"{len(data)} bytes of {kind}, {HOSPITAL_FORMATS[kind].max_bytes} at most",
            )
        decoded = HOSPITAL_FORMATS[kind].decode(data)
        signals = add_limb_leads(
            {lead: uv for lead, uv in decoded.signals.items() if is_changing(uv)}
        )
        if len({len(uv) for uv in signals.values()}) != 1:
            raise ReadError(
                "sample count",
                "the leads have different lengths" if signals else "no lead was measured",
            )
        leads, fs_hz = np.array(list(signals.values())), decoded.fs_hz
        rate_ratio(fs_hz)  # raises a ReadError if the rate is not supported
        age = None if isinstance(decoded.age, str) else clean_age(decoded.age)
        sex = clean_sex(decoded.sex)
        unread = age_and_sex_warnings({"age": decoded.age, "sex": decoded.sex}, age=age, sex=sex)
        warnings = (*decoded.warnings, *unread)
        if doubt := implausible_amplitude_text(leads, fs_hz):
            doubt += ": is the scale in the file right?"
            warnings = (*warnings, (IMPLAUSIBLE_AMPLITUDE, doubt))
        return EcgRecord(
            self.name_for(key),
            leads,
            fs_hz,
            tuple(signals),
            "uV",
            source=kind,
            patient=_patient_id(decoded.patient),
            age=age,
            sex=sex,
            warnings=warnings,
        )


def _drop_wfdb_files(names: Sequence[str]) -> Iterator[str]:
    """Yield the files of a folder, except those that share their name with a WFDB header and do not end like
    hospital files. Otherwise 10^5 WFDB records would be opened only to see that they are no DICOM files."""
    headers = {name.removesuffix(".hea") for name in names if name.endswith(".hea")}
    for name in names:
        if name.lower().endswith(HOSPITAL_ENDINGS) or posixpath.splitext(name)[0] not in headers:
            yield name


def _patient_id(text: str | None) -> str | None:
    """Return a patient's id; None for an empty text or one such as "anonymous", because otherwise all anonymised files
    would belong to one patient."""
    text = (text or "").strip()
    if not text or text.lower() in ANONYMOUS_IDS or len(set(text)) < 2 <= len(text):
        return None
    return plain_patient_id(text)
