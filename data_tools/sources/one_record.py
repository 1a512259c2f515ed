"""A record straight from its archive, as a dataset would hold it: for whoever needs a few ECGs and no dataset.

found = prepared(source, key)      # Prepared, or the ReadError that refuses the record
"""

from typing import NamedTuple

import numpy as np

from data_tools.errors import ReadError
from data_tools.prepare import CROP, FS_HZ, Crop, crop_count, prepare_crop
from data_tools.record import LEADS
from data_tools.sources.base import Source, carefully


class Prepared(NamedTuple):
    source: str
    record: str
    patient: str | None
    crops_uv: np.ndarray  # int16 [n, 12, 5000]
    start_s: tuple[float, ...]
    halves: tuple[int, ...]


def prepared(source: Source, key: str) -> Prepared | ReadError:
    return carefully(lambda key: _prepared(source, key), key)


def _prepared(source: Source, key: str) -> Prepared:
    """Crops in which nothing was measured are left out; a record without any other is refused."""
    record = source.read(key)
    count = crop_count(record.signal.shape[1], record.fs_hz)
    if not count:
        raise ReadError("too short", f"{record.signal.shape[1] / record.fs_hz:g} s")
    crops = np.empty((count, len(LEADS), CROP), np.int16)
    told: list[Crop] = []
    for index in range(count):
        try:
            told.append(prepare_crop(record, index, crops[len(told)]))
        except ReadError as error:
            if error.reason != "no valid lead":
                raise
    if not told:
        raise ReadError("no valid lead", f"in {count * CROP / FS_HZ:g} s")
    starts, halves = tuple(crop.start_s for crop in told), tuple(crop.halves for crop in told)
    return Prepared(record.source or source.source_of(key), record.name, record.patient, crops[: len(told)], starts, halves)
