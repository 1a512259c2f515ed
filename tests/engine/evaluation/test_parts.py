"""A table in parts that something has happened to."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from engine.common import ConfigError
from engine.evaluation.table_parts import Parts

JOB = {"model": "a", "batch": 16}
COUNT = 4


def table(number: int) -> pa.Table:
    return pa.table({"x": pa.array(range(1000 * number, 1000 * number + 1000), pa.int64())})


def finish(out: Path, job: dict[str, object] = JOB) -> tuple[list[int], bytes]:
    """Which parts were made, and the table."""
    with Parts(out, job) as parts:
        todo = parts.missing(COUNT)
        for number in todo:
            parts.write(number, table(number))
        parts.publish(COUNT, table(0).schema)
    return todo, out.read_bytes()


def cut(folder: Path) -> None:
    path = folder / "000002.parquet"
    path.write_bytes(path.read_bytes()[:-500])


def flip(folder: Path) -> None:
    path = folder / "000002.parquet"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def swap(folder: Path) -> None:
    shutil.copy(folder / "000001.parquet", folder / "000002.parquet")


def foreign(folder: Path) -> None:
    with Parts(folder.with_name("other"), JOB | {"batch": 8}) as parts:
        parts.write(2, table(2))
    shutil.copy(folder.with_name("other.parts") / "000002.parquet", folder)


@pytest.mark.parametrize("harm", [cut, flip, swap, foreign])
def test_a_part_that_is_not_what_it_should_be_is_made_again(harm: Callable[[Path], None], tmp_path: Path) -> None:
    todo, whole = finish(tmp_path / "whole")
    assert todo == list(range(COUNT))
    with Parts(tmp_path / "out", JOB) as parts:
        for number in (1, 2):
            parts.write(number, table(number))
    harm(tmp_path / "out.parts")
    assert finish(tmp_path / "out") == ([0, 2, 3], whole)


def test_what_stands_where_the_parts_should_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "out.parts").write_text("mine")
    with pytest.raises(ConfigError, match=r"out\.parts is a file: remove it, or choose another --out"):
        Parts(tmp_path / "out", JOB)
    with Parts(tmp_path / "cut", JOB) as parts:
        parts.write(0, table(0))
    for broken in ('{"model', "[" * 100_000):
        (tmp_path / "cut.parts" / "job.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"job\.json: cannot be read: .*: remove that folder, or choose") as caught:
            Parts(tmp_path / "cut", JOB)
        assert "\n" not in str(caught.value)
