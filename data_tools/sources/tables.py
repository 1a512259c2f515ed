"""The archives' csv tables, row by row. A table that cannot be read fails every record alike, so it stops the run at once."""

import csv
import io
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

from data_tools.errors import ReadError, StorageError
from data_tools.storage import Folder

P = ParamSpec("P")
T = TypeVar("T")


def read_table(root: Folder, name: str, limit: int, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """The columns that are asked for, and nothing of the others; what a short row lacks is empty."""
    try:
        text = root.read(name, limit).decode("utf-8-sig", "replace")
    except ReadError as error:
        raise StorageError(f"{root.url}: {error}") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        if lacking := set(columns) - set(reader.fieldnames or ()):
            raise StorageError(f"{root.url}/{name}: no column {', '.join(sorted(lacking))}")
        for row in reader:
            yield {column: (row[column] or "").strip() for column in columns}
    except csv.Error as error:
        raise StorageError(f"{root.url}/{name}: line {reader.line_num}: {error}") from None


def once(function: Callable[P, T]) -> Callable[P, T]:
    """lru_cache for threads: a worker's readers ask for a table all at the same moment, and one of them fetches it."""
    remembered, lock = lru_cache(maxsize=4)(function), threading.Lock()

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return remembered(*args, **kwargs)  # type: ignore[arg-type]

    call.cache_clear = remembered.cache_clear  # type: ignore[attr-defined]
    return call
