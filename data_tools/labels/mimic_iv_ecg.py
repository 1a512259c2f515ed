"""Labels from MIMIC-IV-ECG's machine_measurements.csv: the ECG carts' computer interpretations as
codes, and measurements.

mimic_statements.csv has the codes and their patterns; a change of it, or of the patterns below,
raises VERSION. A finding is 1 if a statement names it, empty if it is only hedged ("possible",
"cannot rule out", "borderline"), and 0 if it is negated or not mentioned. If the program gave up
("no further analysis"), findings that are not mentioned are empty. These are computer
interpretations, not a physician's. No folds are published: split by patient.
"""

import csv
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
from tqdm import tqdm

from omnilead.data_tools.errors import ReadError, StorageError, one_line
from omnilead.data_tools.labels import MAX_TABLE, UNKNOWN, PublishedLabels
from omnilead.data_tools.storage import Folder

VERSION = 1
TABLE = "machine_measurements.csv"
REPORTS = tuple(f"report_{i}" for i in range(18))
NUMBERS = (
    "rr_interval",
    "p_onset",
    "p_end",
    "qrs_onset",
    "qrs_end",
    "t_end",
    "p_axis",
    "qrs_axis",
    "t_axis",
)
SPANS = {
    "RR": ("RR interval", "zero", "rr_interval"),
    "P": ("duration of the P wave", "p_onset", "p_end"),
    "PR": ("PR interval", "p_onset", "qrs_onset"),
    "QRS": ("QRS duration", "qrs_onset", "qrs_end"),
    "QT": ("QT interval, not corrected for the rate,", "qrs_onset", "t_end"),
}
MAX_MS = 5000  # larger values (29999, 32767, 65535, ...) stand for "not measured"
UNREAD, SOME = (
    "UNREAD",
    1 << 63,
)  # code for "the program gave up"; bit of records with at least one statement

with open(Path(__file__).with_name("mimic_statements.csv"), newline="", encoding="utf-8") as _file:
    CODES = {
        code: (means, re.compile(pattern)) for code, means, pattern in list(csv.reader(_file))[1:]
    }
_HEDGED = re.compile(
    r"\b(?:possibl[ey]|probabl[ey]|likely|suggests?|suggestive|suspect(?:ed)?|consider|consistent "
    r"with|compatible with|may"
    r"|might|could|cannot (?:rule out|exclude)|rule out|versus|vs|criteria for|borderline(?! "
    r"(?:abnormal )?ecg))\b|\?"
)
_DOUBTED = re.compile(
    r"\w*(?: can ?not be (?:ruled out|excluded)| is borderline| or aberr|\?)"
)  # directly after the finding
_NEGATED = re.compile(
    r"\b(?:no(?! further)|not|without|absence of|negative for)\b(?:(?!\b(?:but|with)\b)[^,;:.])*$"
)


def mimic_iv_ecg(root: Folder, quiet: bool) -> Iterator[PublishedLabels]:
    table = _read(root)
    studies = table["study_id"].to_numpy()
    said = np.zeros((2, len(table)), np.uint64)
    for name in tqdm(REPORTS, unit=" columns", disable=quiet):
        said |= _codes(table[name].unify_dictionaries().combine_chunks())
    about = (
        f"MIMIC-IV-ECG, the carts' computer interpretations, pattern list {VERSION}: 1 stated, 0 "
        "not, empty hedged"
    )
    some = said[0] != 0
    labels = _statements(said[:, some])
    read, source = (TABLE,), "mimic-iv-ecg"
    yield PublishedLabels("mimic-iv-ecg-statements", about, read, source, studies[some], labels)
    about = (
        "MIMIC-IV-ECG, intervals and axes measured by the carts' programs; empty where not measured"
    )
    labels = _intervals(table)
    yield PublishedLabels("mimic-iv-ecg-intervals", about, read, source, studies, labels)


def _statements(said: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
    """Labels from stated and hedged codes [2, records]."""
    bit = {code: np.uint64(1 << i) for i, code in enumerate(CODES)}
    unread = said[0] & bit[UNREAD] != 0
    labels = {}
    for code, (means, _) in CODES.items():
        stated, hedged = said & bit[code] != 0
        values = np.where(hedged | unread, UNKNOWN, 0)
        labels[code] = (means, np.where(stated, 1, values).astype(np.int8))
    return labels


def _intervals(table: pa.Table) -> dict[str, tuple[str, np.ndarray]]:
    x = {"zero": np.zeros(len(table), np.float32)}
    for name in NUMBERS:
        values = table[name].to_numpy()
        largest = 180 if "axis" in name else MAX_MS
        x[name] = np.where(np.abs(values) <= largest, values, np.nan)
    # Empty if a part of the P wave was not found
    p_wave = 0 * (x["p_onset"] + x["p_end"])
    x["p_onset"] = x["p_onset"] + p_wave
    x["p_axis"] = x["p_axis"] + p_wave
    labels = {}
    for name, (means, start, end) in SPANS.items():
        span = x[end] - x[start]
        span = np.where(span > 0, span, np.nan)
        labels[name] = (f"{means} in ms", span.astype(np.float32))
    for wave in ("P", "QRS", "T"):
        labels[f"{wave}_axis"] = (f"axis of {wave} in degrees", x[f"{wave.lower()}_axis"])
    return labels


def _read(root: Folder) -> pa.Table:
    words = pa.dictionary(
        pa.int32(), pa.binary()
    )  # statements repeat, so each distinct one is searched once
    kinds = {
        "study_id": pa.string(),
        **dict.fromkeys(REPORTS, words),
        **dict.fromkeys(NUMBERS, pa.float32()),
    }
    parsing = pacsv.ParseOptions(newlines_in_values=True)
    converting = pacsv.ConvertOptions(column_types=kinds, include_columns=list(kinds))
    try:
        data = pa.BufferReader(root.read(TABLE, MAX_TABLE))
        return pacsv.read_csv(data, parse_options=parsing, convert_options=converting)
    except (ReadError, pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise StorageError(one_line(f"{root.url}: {TABLE}: {error}: restore the file")) from None


def _codes(column: pa.DictionaryArray) -> np.ndarray:
    """Stated and hedged codes of each row as bits: uint64 [2, rows]."""
    found = [
        statement_codes(text.decode(errors="replace")[:300])
        for text in column.dictionary.to_pylist()
    ]
    codes: np.ndarray = np.array([*found, (0, 0)], np.uint64).T[
        :, column.indices.fill_null(len(found)).to_numpy()
    ]
    return codes


@lru_cache(maxsize=2**16)
def statement_codes(text: str) -> tuple[int, int]:
    """The codes that a statement names and the codes that it only hedges, as bits."""
    text = " ".join(text.lower().split())
    stated, hedged = SOME if text else 0, 0
    for i, (_, pattern) in enumerate(CODES.values()):
        for found in pattern.finditer(text):
            if _HEDGED.search(text[: found.end()]) or _DOUBTED.match(text, found.end()):
                hedged |= 1 << i
            elif not _NEGATED.search(text[: found.start()]):
                stated |= 1 << i
    return stated, hedged
