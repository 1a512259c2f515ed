"""Embeddings in parts, and predict(): overlapping work, damaged parts, files in the way."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch

from omnilead.data_tools.dataset import Dataset, DatasetError
from omnilead.engine.common import ConfigError, OutputError
from omnilead.engine.inference import predict as predicting
from omnilead.engine.inference.inputs import COLUMNS, EmbeddedCrops
from omnilead.engine.inference.outputs import ParquetParts, embeddings, tables
from omnilead.engine.inference.predict import CropBatch, dataset_batches, predict

JOB = {"model": "a", "batch": 16}
COUNT = 4


def part(number: int) -> pa.Table:
    return pa.table({"x": pa.array(range(1000 * number, 1000 * number + 1000), pa.int64())})


def finish(out: Path) -> tuple[list[int], bytes]:
    """Which parts were missing, and the whole file."""
    with ParquetParts(out, JOB) as parts:
        missing = parts.missing(COUNT)
        for number in missing:
            parts.write(number, part(number))
        parts.join(COUNT, part(0).schema)
    return missing, out.read_bytes()


def cut(folder: Path) -> None:
    path = folder / "000002.parquet"
    path.write_bytes(path.read_bytes()[:-500])


def flip(folder: Path) -> None:
    path = folder / "000002.parquet"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, flip])
def test_a_damaged_part_is_computed_again(harm: Callable[[Path], None], tmp_path: Path) -> None:
    missing, whole = finish(tmp_path / "whole")
    assert missing == list(range(COUNT))
    with ParquetParts(tmp_path / "out", JOB) as parts:
        for number in (1, 2):
            parts.write(number, part(number))
    harm(tmp_path / "out.parts")
    assert finish(tmp_path / "out") == ([0, 2, 3], whole)


def test_parts_of_another_job_and_files_in_the_way_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "out.parts").write_text("mine")
    with pytest.raises(ConfigError, match=r"out\.parts"):
        ParquetParts(out, JOB)
    (tmp_path / "out.parts").unlink()
    with ParquetParts(out, JOB) as parts:
        parts.write(0, part(0))
        with pytest.raises(OutputError, match="another process"):
            ParquetParts(out, JOB)
    with pytest.raises(ConfigError, match="batch was 16, now 8"):
        ParquetParts(out, JOB | {"batch": 8})
    (tmp_path / "out.parts" / "000000.parquet").unlink()  # nothing is lost then
    assert finish(out)[0] == list(range(COUNT))
    with pytest.raises(ConfigError, match="batch was 16, now 8"):
        ParquetParts(out, JOB | {"batch": 8})


def test_the_last_rank_joins_the_parts_and_late_ranks_leave_no_files(tmp_path: Path) -> None:
    _, whole = finish(tmp_path / "whole")
    out = tmp_path / "out"
    with ParquetParts(out, JOB, 0, 2) as first, ParquetParts(out, JOB, 1, 2) as second:
        for rank, mine, others in ((first, [0, 2], [1, 3]), (second, [1, 3], [])):
            assert rank.missing(COUNT) == mine
            for number in mine:
                rank.write(number, part(number))
            if rank is second:  # as it was before one had joined
                shutil.copytree(tmp_path / "out.parts", tmp_path / "parts")
            assert rank.join(COUNT, part(0).schema) == others
        assert (
            first.join(COUNT, part(0).schema) == [] and first.rows is None and second.rows == 4000
        )
    out.unlink()
    shutil.copytree(tmp_path / "parts", tmp_path / "out.parts")
    with ParquetParts(out, JOB, 1, 3) as late:  # begins as another rank joins
        assert finish(out) == ([], whole)
        assert late.missing(COUNT) == [] and late.join(COUNT, part(0).schema) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "parts", "whole"]
    out.unlink()
    shutil.copytree(tmp_path / "parts", tmp_path / "out.parts")
    cut(tmp_path / "out.parts")
    with ParquetParts(out, JOB, 0, 2) as first, ParquetParts(out, JOB, 1, 2) as second:
        assert first.missing(COUNT) == [2] and second.missing(COUNT) == []
        assert second.join(COUNT, part(0).schema) == [2]  # the first has not made it again yet


class Source:
    """Three batches of one crop in parts 0 and 1; nothing in part 2 can be read."""

    unit, parts = " crops", 3
    table = pa.table([pa.nulls(1, kind) for kind in COLUMNS.values()], list(COLUMNS))

    def count(self, parts: Any) -> int:
        return len(list(parts))

    def batches(self, parts: Any, progress: Any) -> Any:
        for n in range(3):
            yield CropBatch(
                np.full((1, 12, 5000), n, np.int16),
                np.ones(1, int),
                EmbeddedCrops(n // 2, self.table, np.array([n])),
            )


def test_a_batch_is_launched_before_waiting_for_the_previous_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    def download(y: torch.Tensor) -> Callable[[], np.ndarray]:
        number = int(y[0, 0])
        events.append(f"launch {number}")
        return lambda: (events.append(f"wait {number}"), y.numpy())[1]  # type: ignore[func-returns-value]

    monkeypatch.setattr("omnilead.engine.inference.predict.download", download)
    model: Any = SimpleNamespace(
        device=torch.device("cpu"),
        encoder=SimpleNamespace(width=4),
        pooled=lambda x_RLT: x_RLT[:, 0, :4],
    )
    prepare: Any = SimpleNamespace(halves=lambda uv_BLT, halves_B: uv_BLT.float())
    made = dict(tables(Source(), embeddings(model), prepare, [0, 1, 2], "crop"))
    assert events == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]
    first = {
        number: [vector[0] for vector in table["embedding"].to_pylist()]
        for number, table in made.items()
    }
    assert first == {0: [0, 1], 1: [2], 2: []}


def test_gpu_copies_do_not_wait_for_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crops are copied beside the last batch's work; their memory is free when they are copied, not
    when they are used."""
    events: list[str] = []

    class Upload:
        def __init__(self, device: torch.device) -> None:
            events.append(device.type)

        def __call__(self, host: torch.Tensor) -> torch.Tensor:
            events.append("up")
            return host

        def wait(self) -> None:
            events.append("copied")

    def forward(x_RLT: torch.Tensor) -> torch.Tensor:
        events.append("compute")
        return x_RLT[:, 0, :4]

    monkeypatch.setattr("omnilead.engine.inference.predict.Upload", Upload)
    monkeypatch.setattr(
        "omnilead.engine.inference.predict.download", lambda x: events.append("down") or x.numpy
    )
    batch = CropBatch(np.ones((2, 12, 5000), np.int16), np.ones(2, int), "names")
    [(given, y_RD)] = predict(
        [batch], lambda uv_BLT, halves_B: uv_BLT.float(), forward, torch.device("cuda", 0)
    )
    assert (y_RD.shape, given.crops) == ((2, 4), "names")
    assert events == ["cuda", "up", "compute", "down", "copied"]


@pytest.mark.parametrize("sparse", [0.5, 0.0], ids=["few crops of each shard", "whole shards"])
def test_crops_of_a_remote_dataset(
    sparse: float, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read one by one or through cached shards: the same crops, and the same unreadable ones."""
    monkeypatch.setattr(predicting, "SPARSE", sparse)
    place, rows = f"/bucket/predict{sparse}", np.arange(3, 40, 4)
    files = fsspec.filesystem("memory")
    files.put(dataset.root.url, place, recursive=True)
    remote = Dataset.open(f"memory:/{place}")
    made = list(dataset_batches(remote, np.array_split(rows, 3)))
    assert np.concatenate([batch.crops for batch in made]).tolist() == rows.tolist()
    for batch in made:
        assert all(
            (uv_LT == dataset.read(row)).all()
            for uv_LT, row in zip(batch.uv_BLT, batch.crops, strict=True)
        )
        assert (batch.halves_B == dataset.column("halves")[batch.crops]).all()
    shard, offset, _ = (int(column[rows[4]]) for column in remote.addresses)
    name = f"{place}/shards/{remote.shards[shard]['name']}"
    content = bytearray(files.cat(name))
    content[offset + 100] ^= 1
    files.pipe(name, bytes(content))
    with pytest.raises(DatasetError):
        list(dataset_batches(remote, [rows]))
    if sparse:  # a shard that is damaged is not used at all
        kept = np.concatenate(
            [
                batch.crops
                for batch in dataset_batches(remote, [rows[:4], rows[4:5], rows[5:]], "skip")
            ]
        )
        assert kept.tolist() == np.delete(rows, 4).tolist()
