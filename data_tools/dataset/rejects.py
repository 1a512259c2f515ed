"""rejects.csv: every record, lead or crop that was refused, repaired or flagged, and why."""

import csv
import hashlib
import io
from collections import Counter

from ..ecg.crops import IMPLAUSIBLE_AMPLITUDE
from ..io.errors import DatasetError, ReadError, one_line
from ..io.spreadsheet import csv_text, unquote_cell
from .dataset import Dataset
from .facts import REJECTS

Reject = tuple[str, str, str, str]  # source, record, reason, detail
CROP_FLAG_REASONS = ("lead not measured", "flat lead", "saturated", "large", "zeros", "einthoven")
FLAG_REASONS = (  # reasons in rejects.csv for which no record or crop is refused
    *CROP_FLAG_REASONS,
    "age not understood",
    "sex not understood",
    "checksum differs",
    "first value differs",
    "diagnosis without a code",
    "not in ptbxl_database.csv",
    IMPLAUSIBLE_AMPLITUDE,
    "shorter than stated",
    "SOP class",
    "further waveforms",
    "channel status",
    "no calibration pulse",
    "inverted lead",
)
# Reasons of crops whose samples were changed: a lead with a gap was set to zero, values that are too
# large were clipped, or a lead that its file labels as inverted was inverted again
REPAIR_REASONS = ("lead not measured", "saturated", "inverted lead")


def rejects_csv(rejects: list[Reject]) -> bytes:
    return csv_text([("source", "record", "reason", "detail"), *sorted(set(rejects))]).encode()


def read_rejects(made: Dataset) -> list[Reject]:
    """Returns the rows of a dataset's rejects.csv: (source, record, reason, detail)."""
    url, facts = made.root.url, made.facts.rejects
    try:
        data = made.root.read(REJECTS, facts.bytes)
        if hashlib.sha256(data).hexdigest() != facts.sha256:
            raise ValueError("fails its sha256")
        _, *rows = csv.reader(io.StringIO(data.decode()))
        return [
            (source, record, reason, detail)
            for source, record, reason, detail in (map(unquote_cell, row) for row in rows)
        ]
    except (ReadError, ValueError, csv.Error) as error:
        raise DatasetError(one_line(f"{url}/{REJECTS}: {error}: restore the file")) from None


def reason_counts(rejects: list[Reject]) -> Counter[str]:
    """Returns the number of lines of rejects.csv with each reason."""
    return Counter(reason for _, _, reason, _ in set(rejects))


def common_reasons_text(rejects: list[Reject]) -> str:
    """Returns the three most common reasons for refusals, each with the detail of its first record."""
    refusals = [reject for reject in rejects if reject[2] not in FLAG_REASONS]
    examples = []
    for reason, _ in Counter(reason for _, _, reason, _ in refusals).most_common(3):
        detail = next(detail for _, _, why, detail in refusals if why == reason)
        examples.append(f"{reason} ({detail})" if detail else reason)
    return ", ".join(examples)
