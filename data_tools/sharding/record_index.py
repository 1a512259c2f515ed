"""Find a table's rows by source and record. The index lies in a temporary folder, and processes map its
files instead of each holding the rows in memory.

    rows = RecordIndex.write(Path(place), schema, batches)       # with columns source and record
    rows.find("georgia", "E00001")      # [{"row": 7, "source": "georgia", "record": "E00001", ...}]
"""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..io.storage import explain_write_errors
from .same_records import member_hash

ROWS_FILE, HASHES_FILE, ORDER_FILE = "rows.arrow", "hashes.npy", "order.npy"


class RecordIndex:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordIndex, (self.place,)  # open files are not pickled

    @classmethod
    def write(
        cls, place: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
    ) -> "RecordIndex":
        hashes = [np.empty(0, np.uint64)]
        with explain_write_errors(str(place), ROWS_FILE):
            place.mkdir()
            with pa.ipc.new_file(str(place / ROWS_FILE), schema) as file:
                for batch in batches:
                    file.write_batch(batch)
                    names = (batch[column].to_pylist() for column in ("source", "record"))
                    hashes.append(np.fromiter(map(member_hash, *names), np.uint64, len(batch)))
            of_rows = np.concatenate(hashes)
            order = np.argsort(of_rows, kind="stable")
            np.save(place / HASHES_FILE, of_rows[order])
            np.save(place / ORDER_FILE, order)
        return cls(place)

    def row(self, number: int) -> dict[str, Any]:
        columns, begins = self._rows
        batch = int(np.searchsorted(begins, number, side="right")) - 1
        position = number - int(begins[batch])
        values = {name: column[position].as_py() for name, column in columns[batch].items()}
        return values | {"row": number}

    def find(self, source: str, name: str) -> list[dict[str, Any]]:
        """Returns the rows of a record in ascending order, each with its row number as `row`."""
        hashed = np.uint64(member_hash(source, name))
        first = np.searchsorted(self._hashes, hashed, side="left")
        last = np.searchsorted(self._hashes, hashed, side="right")
        rows = map(self.row, self._order[first:last].tolist())
        return [row for row in rows if (row["source"], row["record"]) == (source, name)]

    def has_member(self, source: str, name: str) -> bool:
        """Returns True if a record in the table has the same name in a tar, as a-b/c and a/b-c have."""
        hashed = np.uint64(member_hash(source, name))
        return bool(
            np.searchsorted(self._hashes, hashed, "right") > np.searchsorted(self._hashes, hashed)
        )

    def first_rows(self) -> np.ndarray:
        """Returns the number of the first row of each record, in ascending order."""
        other = np.ones(len(self._hashes), bool)
        other[1:] = self._hashes[1:] != self._hashes[:-1]
        return np.sort(self._order[other])

    @cached_property
    def _hashes(self) -> np.ndarray:
        return np.asarray(np.load(self.place / HASHES_FILE, mmap_mode="r"))

    @cached_property
    def _order(self) -> np.ndarray:
        return np.asarray(np.load(self.place / ORDER_FILE, mmap_mode="r"))

    @cached_property
    def _rows(self) -> tuple[list[dict[str, pa.Array]], np.ndarray]:
        """Returns (columns of each batch, row numbers at which the batches begin). The columns are kept,
        because getting a column from a batch takes longer than reading a value from the column."""
        columns, lengths = [], [0]
        with pa.memory_map(str(self.place / ROWS_FILE)) as file:
            batches = pa.ipc.open_file(file)
            for number in range(batches.num_record_batches):
                batch = batches.get_batch(number)
                columns.append(dict(zip(batch.schema.names, batch.columns, strict=True)))
                lengths.append(len(batch))
        return columns, np.cumsum(lengths)
