"""Label tables of published archives: `omnilead labels ptbxl SRC --out DIR`.

A table is a parquet file with columns `source` and `record`, as in a dataset of the archive, one
column per label, and `fold`, if folds are published. An empty cell means unknown. The JSON file
beside it has the meaning of the columns, the files that were read, and counts. Only codes, numbers
and record ids are copied: no free text, dates or patients.
"""

import hashlib
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnilead.data_tools.build import as_parquet
from omnilead.data_tools.errors import DataError, printable
from omnilead.data_tools.pseudonyms import pseudonym
from omnilead.data_tools.storage import (
    dataset_folder,
    folder,
    remove_leftovers,
    write_errors,
    write_whole,
)

MODULES = dict.fromkeys(("ptbxl", "code15", "physionet2021"), "archives") | {
    "mimic-iv-ecg": "mimic_iv_ecg"
}
UNKNOWN = -1  # in columns of 0 and 1; columns of measurements use NaN
MAX_TABLE = 2**30
_RECORD = re.compile(r"[A-Za-z0-9_-]{1,64}")


class PublishedLabels(NamedTuple):
    name: str  # file name without its ending
    about: str
    read: tuple[str, ...]  # the archive files that were read
    source: str | Sequence[str]  # one for all records, or one per record
    records: Sequence[str] | np.ndarray
    labels: Mapping[
        str, tuple[str, np.ndarray]
    ]  # meaning and values: int8 of 0, 1 and UNKNOWN, or floats
    fold: np.ndarray | None = None


def write_labels(
    archive: str, url: str, out: str, key: bytes | None, anonymous: bool, quiet: bool
) -> Iterator[str]:
    """Write all tables of an archive and yield a line about each. With a key, records get their
    pseudonyms."""
    module = importlib.import_module(f"omnilead.data_tools.labels.{MODULES[archive]}")
    root, place = folder(url, anonymous), dataset_folder(out)
    root.children()  # raises if there is no such folder
    if not place.remote:
        with write_errors(place.url, "tables"):
            os.makedirs(place.url, exist_ok=True)
            remove_leftovers(Path(place.url))
    write = (
        place.write
        if place.remote
        else lambda name, data: write_whole(Path(place.path(name)), data)
    )
    for one in getattr(module, archive.replace("-", "_"))(root, quiet):
        table, labels = _in_arrow(one, key)
        if not labels:
            yield f"{one.name}: not written, because no record has such a label"
            continue
        read = {name: hashlib.sha256(root.read(name, MAX_TABLE)).hexdigest() for name in one.read}
        facts = {
            "archive": archive,
            "about": one.about,
            "sha256": read,
            "records": len(table),
            "labels": labels,
        }
        write(f"{one.name}.json", (json.dumps(facts, indent=1) + "\n").encode())
        write(f"{one.name}.parquet", as_parquet(table))
        yield f"{place.path(one.name)}.parquet: {len(table):,} records, {len(labels)} labels"


def _in_arrow(one: PublishedLabels, key: bytes | None) -> tuple[pa.Table, dict[str, Any]]:
    """The table without labels that no record has, and the meaning of the others."""
    if wrong := next((name for name in one.records if not _RECORD.fullmatch(name)), None):
        raise DataError(
            f"{', '.join(one.read)}: {printable(wrong[:40])!r} is not a record's id: restore the "
            "file"
        )
    sources = [one.source] * len(one.records) if isinstance(one.source, str) else one.source
    names = [pseudonym(key, "r", *pair) for pair in zip(sources, one.records, strict=True)]
    columns = {"source": pa.array(sources, pa.string()), "record": pa.array(names, pa.string())}
    labels: dict[str, Any] = {}
    for name, (means, values) in one.labels.items():
        measured = values.dtype.kind == "f"
        column = pa.array(values, mask=np.isnan(values) if measured else values == UNKNOWN)
        known, positive = len(column) - column.null_count, int((values == 1).sum())
        if known if measured else positive:
            count = (
                {"median": round(pc.quantile(column)[0].as_py(), 3)}
                if measured
                else {"positive": positive}
            )
            columns[name], labels[name] = column, {"means": means, "known": known} | count
    if one.fold is not None:
        columns["fold"] = pa.array(one.fold, pa.int8())
    return pa.table(columns), labels
