"""Embeddings in parts, and predict(): overlapping work, damaged parts, files in the way."""

import shutil
from types import SimpleNamespace

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch

from omnilead.data_tools.dataset import Dataset, DatasetError
from omnilead.downstream.inference.ecg_reader import CROP_COLUMNS, CropFacts, Skipped
from omnilead.downstream.inference.outputs import (
    ParquetParts,
    compute_parts,
    has_skipped_file,
    part_tables,
    vector_output,
    write_skipped,
)
from omnilead.engine.data import batches as predicting
from omnilead.engine.data.batches import CropBatch, dataset_batches, predict
from omnilead.engine.settings.errors import ConfigError, OutputError

JOB = {"model": "a", "batch": 16}
COUNT = 4


def part(number):
    """Of 1,000 rows; the last is empty."""
    rows = range(1000 * number, 1000 * min(number + 1, COUNT - 1))
    return pa.table({"x": pa.array(rows, pa.int64())})


def finish(out):
    """Which parts were missing, and the whole file."""
    with ParquetParts(out, JOB) as parts:
        missing = parts.missing_parts(COUNT)
        for number in missing:
            parts.write_part(number, part(number))
        parts.join_parts(COUNT, part(0).schema)
    return missing, out.read_bytes()


def cut(content):
    return content[:-500]


def flip(content):
    return content[:100] + bytes([content[100] ^ 1]) + content[101:]


def harm(folder, damage=cut):
    path = folder / "000002.parquet"
    path.write_bytes(damage(path.read_bytes()))


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_damaged_part_is_computed_again(damage, tmp_path):
    missing, whole = finish(tmp_path / "whole")
    assert missing == list(range(COUNT))
    with ParquetParts(tmp_path / "out", JOB) as parts:
        for number in (1, 2):
            parts.write_part(number, part(number))
    harm(tmp_path / "out.parts", damage)
    assert finish(tmp_path / "out") == ([0, 2, 3], whole)


def test_parts_of_another_job_and_files_in_the_way_are_refused(tmp_path):
    out = tmp_path / "out"
    (tmp_path / "out.parts").write_text("mine")
    with pytest.raises(ConfigError, match=r"out\.parts"):
        ParquetParts(out, JOB)
    (tmp_path / "out.parts").unlink()
    with ParquetParts(out, JOB) as parts:
        parts.write_part(0, part(0))
        with pytest.raises(OutputError, match="another process"):
            ParquetParts(out, JOB)
    with pytest.raises(ConfigError, match="batch was 16, now 8"):
        ParquetParts(out, JOB | {"batch": 8})
    (tmp_path / "out.parts" / "000000.parquet").unlink()  # nothing is lost then
    assert finish(out)[0] == list(range(COUNT))
    with pytest.raises(ConfigError, match="batch was 16, now 8"):
        ParquetParts(out, JOB | {"batch": 8})


def test_the_last_rank_joins_the_parts_and_late_ranks_leave_no_files(tmp_path):
    _, whole = finish(tmp_path / "whole")
    out = tmp_path / "out"
    with ParquetParts(out, JOB, 0, 2) as first, ParquetParts(out, JOB, 1, 2) as second:
        for rank, mine, others in ((first, [0, 2], [1, 3]), (second, [1, 3], [])):
            assert rank.missing_parts(COUNT) == mine
            for number in mine:
                rank.write_part(number, part(number))
            if rank is second:  # as it was before one had joined
                shutil.copytree(tmp_path / "out.parts", tmp_path / "parts")
            assert rank.join_parts(COUNT, part(0).schema) == others
        assert first.join_parts(COUNT, part(0).schema) == []
        assert (first.rows, second.rows) == (None, 3000)
    out.unlink()
    shutil.copytree(tmp_path / "parts", tmp_path / "out.parts")
    with ParquetParts(out, JOB, 1, 3) as late:  # begins as another rank joins
        assert finish(out) == ([], whole)
        assert late.missing_parts(COUNT) == [] and late.join_parts(COUNT, part(0).schema) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "parts", "whole"]
    out.unlink()
    shutil.copytree(tmp_path / "parts", tmp_path / "out.parts")
    harm(tmp_path / "out.parts")
    with ParquetParts(out, JOB, 0, 2) as first, ParquetParts(out, JOB, 1, 2) as second:
        assert first.missing_parts(COUNT) == [2] and second.missing_parts(COUNT) == []
        assert second.join_parts(COUNT, part(0).schema) == [
            2
        ]  # the first has not made it again yet


class Source:
    """Three batches of one crop in parts 0 and 1; nothing in part 2 can be read."""

    unit, parts = " crops", 3
    table = pa.table([pa.nulls(1, kind) for kind in CROP_COLUMNS.values()], list(CROP_COLUMNS))

    def count_units(self, parts):
        return len(list(parts))

    def read_batches(self, parts, progress):
        for n in range(3):
            yield CropBatch(
                np.full((1, 12, 5000), n, np.int16),
                np.ones(1, int),
                CropFacts(n // 2, self.table, np.array([n])),
            )


def test_a_batch_is_launched_before_waiting_for_the_previous_one(
    monkeypatch,
):
    events = []

    def download(y):
        number = int(y[0, 0])
        events.append(f"launch {number}")

        def wait():
            events.append(f"wait {number}")
            return y.numpy()

        return wait

    monkeypatch.setattr(predicting, "start_download", download)
    prepare = SimpleNamespace(
        windows=lambda uv_BLT, _: uv_BLT.float(), count_windows=lambda halves: halves
    )
    model = SimpleNamespace(device=torch.device("cpu"), input=prepare)
    output = vector_output(model, lambda x_RLT: x_RLT[:, 0, :4], 4)
    made = dict(part_tables(Source(), output, prepare, [0, 1, 2], "crop"))
    assert events == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]
    found = [np.array(table["embedding"].to_pylist()).ravel()[::4] for table in made.values()]
    assert list(made) == [0, 1, 2] and [of.tolist() for of in found] == [[0, 1], [2], []]


def test_gpu_copies_do_not_wait_for_computation(monkeypatch):
    """Crops are copied beside the last batch's work; their memory is free when they are copied, not
    when they are used."""
    events = []

    class Upload:
        def __init__(self, device):
            events.append(device.type)

        def __call__(self, host):
            events.append("up")
            return host

        def wait(self):
            events.append("copied")

    def forward(x_RLT):
        events.append("compute")
        return x_RLT[:, 0, :4]

    monkeypatch.setattr(predicting, "Upload", Upload)
    monkeypatch.setattr(predicting, "start_download", lambda x: events.append("down") or x.numpy)
    batch = CropBatch(np.ones((2, 12, 5000), np.int16), np.ones(2, int), "names")
    [(given, y_RD)] = predict(
        [batch], lambda uv_BLT, halves_B: uv_BLT.float(), forward, torch.device("cuda", 0)
    )
    assert (y_RD.shape, given.crops) == ((2, 4), "names")
    assert events == ["cuda", "up", "compute", "down", "copied"]


@pytest.mark.parametrize("sparse", [0.5, 0.0], ids=["few crops of each shard", "whole shards"])
def test_crops_of_a_remote_dataset(sparse, dataset, monkeypatch):
    """Read one by one or through cached shards: the same crops, and the same unreadable ones."""
    monkeypatch.setattr(predicting, "SPARSE_SHARE", sparse)
    place, rows = f"/bucket/predict{sparse}", np.arange(3, 40, 4)
    files = fsspec.filesystem("memory")
    files.put(dataset.root.url, place, recursive=True)
    remote = Dataset.open(f"memory:/{place}")
    made = list(dataset_batches(remote, np.array_split(rows, 3)))
    crops, halves, uv = (
        np.concatenate([getattr(batch, name) for batch in made])
        for name in ("crops", "halves_B", "uv_BLT")
    )
    assert crops.tolist() == rows.tolist()
    assert (halves == dataset.column("halves")[rows]).all()
    assert (uv == np.stack([dataset.read(row) for row in rows])).all()
    shard, offset, _ = (int(column[rows[4]]) for column in remote.addresses)
    name = f"{place}/shards/{remote.shards[shard].name}"
    content = files.cat(name)
    files.pipe(name, content[:offset] + flip(content[offset:]))
    with pytest.raises(DatasetError):
        list(dataset_batches(remote, [rows]))
    if sparse:  # a shard that is damaged is not used at all
        batches = dataset_batches(remote, np.split(rows, [4, 5]), "skip")
        kept = np.concatenate([batch.crops for batch in batches])
        assert kept.tolist() == np.delete(rows, 4).tolist()


def test_a_list_of_what_was_skipped_replaces_none_but_its_own(tmp_path):
    out, place, skipped = tmp_path / "F.csv", tmp_path / "F.csv.skipped.csv", [Skipped("a", "b")]
    write_skipped(out, skipped)
    write_skipped(tmp_path / "F.parquet", [])
    assert place.read_text() == "path,reason\na,b\n" and has_skipped_file(out)
    write_skipped(out, [])
    assert not place.exists()
    place.write_text("path,why\n")
    write_skipped(out, [])
    with pytest.raises(
        OutputError, match=r"F\.csv\.skipped\.csv: another program wrote this file: move it"
    ):
        write_skipped(out, skipped)
    assert place.read_text() == "path,why\n" and not has_skipped_file(out)


def test_parts_that_an_earlier_version_began_without_a_column_are_refused(tmp_path):
    with ParquetParts(tmp_path / "out", JOB) as parts:
        parts.write_part(0, part(0))
        parts.require_columns(["x"])
        (parts.folder / "000001.parquet").write_text("damaged")
        says = r"out\.parts: another job wrote it \(its parts are without a column path\): remove it, or"
        with pytest.raises(ConfigError, match=says):
            compute_parts(
                SimpleNamespace(),
                SimpleNamespace(schema=pa.schema([("x", pa.int64()), ("path", pa.string())])),
                None,
                "crop",
                parts,
            )
        parts.require_columns(["x"])
