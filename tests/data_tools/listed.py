"""Datasets of records that a test lists, also together with datasets, and without patients."""

from pathlib import Path

from handmade import ecg

from omnilead.data_tools.ecg.record import LEADS, EcgRecord
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.io.storage import LocalFolder
from omnilead.data_tools.sharding.leave_out import LeaveOut
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.base import Source
from omnilead.data_tools.sources.detect import open_sources


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


def listed(out, datasets=(), options=(), **records):
    """`datasets`: sources before the records."""
    sources = [source for made in datasets for source in open_sources(made.root.url)]
    how = ShardOptions(str(out), quiet=True, **dict(options))
    return shard([*sources, *([Listed(**records)] if records else [])], how)


def without(made, out, *patients, key=None, options=()):
    """The dataset without these patients, as another one."""
    file = Path(f"{out}.withdrawn")
    file.write_text("\n".join(patients))
    how = {"leave_out": LeaveOut.read(str(file), key), "pseudonym_key": key} | dict(options)
    return listed(out, [made], how)


def broken_at(*names):
    """A `read` of Listed that refuses these records."""
    read = Listed.read

    def reads(source, name):
        if name in names:
            raise ReadError("missing file", f"{name}.dat")
        return read(source, name)

    return reads


def dies_at_once(*_):
    raise KeyboardInterrupt
