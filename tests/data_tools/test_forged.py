"""Datasets whose files are another's work, with checksums that fit: each is one line that says what
is wrong, for a command that reads the column."""

import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from handmade import build
from test_verify import with_table

from omnilead.data_tools.dataset import COLUMNS, Dataset
from omnilead.data_tools.io.errors import DatasetError
from omnilead.data_tools.sharding.roles import RoleSources
from omnilead.data_tools.sharding.shards import member_header, member_name_and_size
from omnilead.data_tools.sharding.verify import verify

NOT_UTF8 = b"a\xffb"


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    roles = RoleSources(pretrain=("all",), id_share=1.0)
    return build(small, tmp_path_factory.mktemp("whole") / "tar", role_sources=roles)


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole.root.url, tmp_path / "copy"))


def set_column(name, values, kind=None):
    return lambda table: table.set_column(
        table.schema.get_field_index(name), name, pa.array(values, kind)
    )


def first(name, value):
    """The column with this value in the first row."""

    def change(table):
        values = [value, *table[name].to_pylist()[1:]]
        return set_column(name, values, COLUMNS.field(name).type)(table)

    return change


def as_type(name, kind):
    return lambda table: set_column(name, table[name].cast(kind))(table)


def not_utf8(name):
    def change(table):
        text = pa.array([NOT_UTF8] * len(table), pa.binary())
        if pa.types.is_string(COLUMNS.field(name).type):
            return set_column(name, _as_string(text))(table)
        lists = pa.ListArray.from_arrays(
            pa.array(range(len(table) + 1), pa.int32()), _as_string(text)
        )
        return set_column(name, lists)(table)

    return change


def _as_string(text):
    return pa.Array.from_buffers(pa.string(), len(text), text.buffers())


TABLES = [  # a change, the column that a command reads, what it says
    (as_type("crc32c", pa.int64()), "crc32c", "crc32c is int64, not uint32"),
    (as_type("record", pa.large_string()), "record", "record is large_string, not string"),
    (as_type("record", pa.binary()), "record", "record is binary, not string"),
    (as_type("age", pa.float64()), "age", "age is double, not float"),
    (lambda table: table.slice(1), "age", "14 rows, 15 expected"),
    (lambda table: pa.concat_tables([table, table]), "age", "30 rows, 15 expected"),
    (first("record", None), "record", "record is missing in some rows"),
    (first("start_s", None), "start_s", "start_s is missing in some rows"),
    (first("start_s", np.inf), "start_s", "start_s has values that are not from 0 to 1e+09"),
    (first("start_s", np.nan), "start_s", "start_s has values that are not from"),
    (first("halves", 3), "halves", "halves has values that are not from 1 to 2"),
    (first("offset", -2), "offset", "offset has values that are not from"),
    (first("offset", 2**63 - 1), "offset", "offset has values that are not from"),
    (first("fs_source_hz", 0.0), "fs_source_hz", "fs_source_hz has values that are not from"),
    (first("shard", 1), "shard", "the column shard does not match the shards in dataset.json"),
    (first("shard", -1), "shard", "the column shard does not match"),
    (first("dx_role", "all"), "dx_role", "dx_role has values other than train, valid, test"),
    (first("id_role", "probes"), "id_role", "id_role has values other than train"),
    (first("dx", [None]), "dx", "dx has a list with a missing value"),
    (first("labels", [None] * 26), "labels", "labels has a list with a missing value"),
    *[
        (not_utf8(name), name, f"{name} has text that is not UTF-8")
        for name in ("record", "source", "patient", "sex", "dx", "flags", "id_role")
    ],
]


@pytest.mark.parametrize(("change", "name", "says"), TABLES)
def test_a_forged_table_is_one_line(change, name, says, copy):
    with_table(change)(copy)
    made = Dataset.open(str(copy))
    reads = [lambda: made.table([name])]
    if name != "shard":  # of one batch it is not known which shards it should have
        reads.append(lambda: list(made.row_batches([name])))
    if name in ("record", "dx", "labels", "halves", "start_s"):
        reads.append(lambda: made[0])
    for read in reads:
        with pytest.raises(DatasetError, match=re.escape(f"samples.parquet: {says}")) as caught:
            read()
        assert "\n" not in str(caught.value)
    (finding,) = verify(made)
    assert says in finding


@pytest.mark.parametrize("header", [b"", b"\0" * 512, b"\xff" * 512, b"7" * 100 + b"-1" * 206])
def test_what_is_no_header_is_no_member(header):
    with pytest.raises(ValueError, match="no tar member at byte 512"):
        member_name_and_size(memoryview(header), 512)
    assert member_name_and_size(memoryview(member_header("a.ecg", 9)), 512) == ("a.ecg", 9)
