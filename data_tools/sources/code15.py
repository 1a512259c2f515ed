"""CODE-15 %: `exams_part<k>.hdf5` (float tracings, 400 Hz, zero padding at both ends) and
exams.csv.

Releases and copies have different units, which no file states; the unit is estimated from the
amplitudes (`_steps_per_mv`).
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from ..ecg.record import EcgRecord, Header, clean_age, parse_pairs
from ..io.errors import ReadError, StorageError, machine_error
from ..io.storage import Folder
from .array_files import array_errors, open_hdf5, open_hdf5_file, strip_padding
from .base import Source, absent_key, read_table, threadsafe_cache

EXAMS_CSV, MAX_EXAMS_CSV, CODE15_FS_HZ = "exams.csv", 512 * 2**20, 400.0
CODE15_LEADS = ("DI", "DII", "DIII", "AVR", "AVL", "AVF", "V1", "V2", "V3", "V4", "V5", "V6")
CODE_OF_LABEL = parse_pairs("""
1dAVb 270492004, RBBB 59118001, LBBB 164909002, SB 426177001, ST 427084000, AF 164889003
""")
MAX_EXAMS = 1_000_000  # most exams in a part file; the part files of the release have 20,001
# Least number of exams from which the unit is estimated; all, if there are fewer
UNIT_SAMPLE_EXAMS = 200
# {unit: steps per mV} of the units in which known copies of CODE-15 store the tracings
STEPS_PER_MV = {"V": 1e-3, "mV": 1.0, "0.1 mV": 10.0, "uV": 1e3}
# Plausible range of the median ECG's peak-to-peak amplitude, each ECG measured in its largest lead
TYPICAL_AMPLITUDE_MV = (0.6, 6.0)


class Code15(Source):
    name = "code15"
    licence = "CC-BY-4.0"

    @staticmethod
    def detect(names: set[str]) -> bool:
        return EXAMS_CSV in names and any(name.endswith(".hdf5") for name in names)

    def keys(self) -> Iterator[str]:
        there: set[str] = set()
        for part in _part_files(self.root):
            try:
                exams = _tracings_and_exam_ids(self.root, part)[1]
            except ReadError:
                yield part  # one key for the whole part; `read` raises the same error for it
                continue
            # Rows with exam id 0 fill the end of a part and hold no ECG
            for row in np.flatnonzero(exams):
                there.add(str(exams[row]))
                yield f"{part.removesuffix('.hdf5')}#{row}"
        for exam in _exams_by_id(self.root):
            if exam not in there:
                yield absent_key(exam, EXAMS_CSV)

    def tables(self) -> bytes:
        return self.root.read(EXAMS_CSV, MAX_EXAMS_CSV)

    def header(self, key: str) -> Header:
        """Return a record's header. The whole tracing is read, because the length of the record depends on the
        zero padding."""
        record = self.read(key)
        return Header(
            record.name,
            self.name,
            record.signal.shape[1],
            CODE15_FS_HZ,
            record.signal[:, :64].tobytes()[:512],
            patient=record.patient,
        )

    def read(self, key: str) -> EcgRecord:
        part, _, row = key.partition("#")
        tracings, exams = _tracings_and_exam_ids(self.root, f"{part.removesuffix('.hdf5')}.hdf5")
        exam = str(int(exams[int(row)]))
        table = _exams_by_id(self.root)
        if exam not in table:
            raise ReadError("not in exams.csv", f"exam {exam}")
        try:
            tracing = tracings[int(row)]
        except OSError as error:
            if failure := machine_error(error):
                raise failure from None
            raise ReadError("unreadable file", f"{part}: {error}"[:100]) from None
        signal = strip_padding(tracing.T)
        patient, age, sex, dx = table[exam]
        gain = _steps_per_mv(self.root)
        return EcgRecord(
            exam,
            signal,
            CODE15_FS_HZ,
            CODE15_LEADS,
            "mV",
            gain,
            source=self.name,
            patient=patient,
            age=age,
            sex=sex,
            dx=dx,
        )

    def notes(self) -> list[str]:
        unit = next(name for name, gain in STEPS_PER_MV.items() if gain == _steps_per_mv(self.root))
        why = f"estimated from {UNIT_SAMPLE_EXAMS} ECGs"
        return [f"{self.root.url}: the unit of the tracings is {unit}, {why}"]


def _part_files(root: Folder) -> list[str]:
    parts = sorted(name for name in root.children() if name.endswith(".hdf5"))
    if not parts:
        raise StorageError(f"{root.url}: the folder contains no .hdf5 file")
    return parts


@lru_cache(maxsize=32)
def _tracings_and_exam_ids(root: Folder, part: str) -> tuple[Any, np.ndarray]:
    """Open a part file and return its tracings and their exam ids."""
    with array_errors(part):
        file = open_hdf5_file(root, part)
        tracings, exams = (open_hdf5(file, part, name) for name in ("tracings", "exam_id"))
        _check_shapes(part, tracings, exams)
        return tracings, exams[:]


def _check_shapes(part: str, tracings: Any, exams: Any) -> None:
    shape, kinds = tracings.shape, tracings.dtype.kind + exams.dtype.kind
    sound = len(shape) == 3 and 1 <= shape[1] <= 20_000 and shape[2] == 12 and kinds in ("fi", "fu")
    if not sound or exams.shape != shape[:1] or shape[0] > MAX_EXAMS:
        raise ReadError(
            "unexpected HDF5 shape",
            f"{part}: tracings {shape} {tracings.dtype}, exam_id {exams.shape} {exams.dtype}; expected "
            "floats of shape (exams, samples, 12) and one integer id per exam",
        )


@threadsafe_cache
def _exams_by_id(
    root: Folder,
) -> dict[str, tuple[str | None, float | None, str | None, tuple[str, ...]]]:
    """Return {exam_id: (patient, age, sex, diagnoses)}. Death and follow-up times are never read."""
    return {
        row["exam_id"]: (
            row["patient_id"] or None,
            clean_age(row["age"]),
            {"true": "M", "false": "F"}.get(row["is_male"].lower()),
            tuple(code for name, code in CODE_OF_LABEL.items() if row[name].lower() == "true"),
        )
        for row in read_table(
            root,
            EXAMS_CSV,
            MAX_EXAMS_CSV,
            ("exam_id", "patient_id", "age", "is_male", *CODE_OF_LABEL),
        )
    }


@threadsafe_cache
def _steps_per_mv(root: Folder) -> float:
    """Return the steps per mV of the tracings, estimated from their amplitudes: in the right unit the
    largest lead of the median ECG has 0.6 to 6 mV peak to peak."""
    sizes: list[float] = []
    refused: list[ReadError] = []
    parts = _part_files(root)
    for part in parts:
        try:
            tracings, _ = _tracings_and_exam_ids(root, part)
        except ReadError as error:
            refused.append(error)
            continue
        for row in range(0, len(tracings), max(1, len(tracings) // UNIT_SAMPLE_EXAMS)):
            try:
                size = float(np.ptp(tracings[row], axis=0).max())
            except OSError:  # the chunk is damaged; its exam is refused when it is read
                continue
            if np.isfinite(size) and size > 0:
                sizes.append(size)
        if len(sizes) >= UNIT_SAMPLE_EXAMS:
            break
    if len(refused) == len(parts):
        raise StorageError(f"{root.url}: none of the .hdf5 files can be read ({refused[0]})")
    median = float(np.median(sizes)) if sizes else 0.0
    for gain in STEPS_PER_MV.values():
        if TYPICAL_AMPLITUDE_MV[0] <= median / gain < TYPICAL_AMPLITUDE_MV[1]:
            return gain
    raise StorageError(
        f"{root.url}: the median amplitude of the tracings is {median:.3g}, which is not plausible for "
        f"ECGs in any of the units {', '.join(STEPS_PER_MV)}"
    )
