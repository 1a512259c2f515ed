"""Datasets of records that a test lists; appending to them and removing patients."""

from pathlib import Path

from handmade import ecg

from omnilead.data_tools.ecg.record import LEADS, EcgRecord
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.io.storage import LocalFolder
from omnilead.data_tools.sharding.removal import remove
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.base import Source


class Listed(Source):
    """name: (source, patient, seed of the signal)"""

    name = "listed"

    def __init__(self, **records):
        super().__init__(LocalFolder("/"))
        self.records = records

    def keys(self):
        return iter(self.records)

    def read(self, key):
        source, patient, seed = self.records[key]
        return EcgRecord(key, ecg(seed=seed), 500.0, LEADS, "uV", source=source, patient=patient)


def listed(out, append=False, options=(), **records):
    how = ShardOptions(str(out), quiet=True, append=append, **dict(options))
    return shard([Listed(**records)], how)


def broken_at(*names):
    """A `read` of Listed that refuses these records."""
    read = Listed.read

    def reads(source, name):
        if name in names:
            raise ReadError("missing file", f"{name}.dat")
        return read(source, name)

    return reads


def remove_listed(out, *patients, key=None, forget=False):
    """-> the dataset without these patients."""
    file = Path(f"{out}.withdrawn")
    file.write_text("\n".join(patients))
    return remove(str(out), str(file), key, forget=forget)[0]


def dies_at_once(*_):
    raise KeyboardInterrupt
