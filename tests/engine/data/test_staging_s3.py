"""Training from an S3 bucket, served on loopback."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import fsspec
import numpy as np
import pytest
from shards_made import make_dataset, read, take_all
from staged import cached, named, path_of, room, stage, through

from omnilead.data_tools import storage
from omnilead.data_tools.dataset import CROP_SHAPE, Dataset, DatasetError
from omnilead.engine.data.order import DatasetRows, Order, shards_needed
from omnilead.engine.data.reader import CropReader, read_ahead
from omnilead.engine.data.staging import Staging
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("small_and_quick")


@pytest.fixture
def bucket(ten: Dataset, stagings: list[Staging], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "ENDPOINT_URL": f"http://{host}:{port}",
        "ACCESS_KEY_ID": "x",
        "SECRET_ACCESS_KEY": "x",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # also here: a thread of the test before may have connected to its server once more
    storage._connect.cache_clear()
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    name = f"ecgs-{port}"  # moto's buckets outlive its servers
    fs.mkdir(name)
    fs.put(ten.root.url, f"{name}/ten", recursive=True)
    yield f"s3://{name}/ten"
    for one in stagings:  # or their threads go on with the next test's server
        one.close()
    until(lambda: not named("staging-part"))
    storage._connect.cache_clear()
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


def test_training_from_a_bucket(
    bucket: str, ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    """Two epochs in block order, with space for a block and two shards: right bytes, one download
    per shard and epoch."""
    dataset, root = through(Dataset.open(bucket))
    order = Order((DatasetRows.of(dataset),), batch_crops=2, block_shards=2)
    staging = Staging(
        {0: dataset}, tmp_path, room(ten, 4), shards_needed(order, 0), ahead=2, together=2
    )
    stagings.append(staging)
    with closing(CropReader([dataset], staging=staging)) as gather:
        yielded: list[list[int]] = []
        take_all(
            read_ahead((order.batch(step) for step in range(20)), gather, (2, *CROP_SHAPE)),
            yielded,
            ten,
        )
    assert sorted(row for rows in yielded for row in rows) == sorted(list(range(20)) * 2)
    assert (
        max(Counter(root.shards()).values()) <= 3 and len(root.shards()) <= 20 + 4
    )  # the next epoch's first ones
    assert cached(tmp_path) <= room(ten, 4)


def test_remote_shards_are_not_read_crop_by_crop(bucket: str) -> None:
    with pytest.raises(DatasetError, match=r"/ten is remote: its shards are read through a cache"):
        CropReader([Dataset.open(bucket)])


def test_zarr_is_read_from_a_bucket_by_ranges(bucket: str, tmp_path: Path) -> None:
    twin = make_dataset(tmp_path / "twin", shards=3, crops=4, zarr=True)
    fs, away = fsspec.filesystem("s3", skip_instance_cache=True), bucket.replace("/ten", "/twin")
    fs.put(twin.root.url, away, recursive=True)
    dataset, root = through(Dataset.open(away))
    rows = [11, 0, 5, 0]
    with closing(CropReader([dataset], source="zarr", threads=2)) as reader:
        out, _ = read(reader, rows)
    assert all(np.array_equal(crop, twin.read(row)) for crop, row in zip(out, rows, strict=True))
    assert not any(name.startswith("shards/") for name, _ in root.reads)
    (block,) = (path for path in fs.find(f"{away}/store.zarr") if "/c/" in path)
    data = bytearray(fs.cat_file(block))
    fs.pipe_file(block, bytes(data[: len(data) // 2]))
    with pytest.raises(
        DatasetError, match=rf"^{away}/store\.zarr/[^\n]*index fails its crc32c[^\n]*$"
    ):
        read(CropReader([Dataset.open(away)], source="zarr"), [3])


def test_a_damaged_object_is_refused(
    bucket: str, ten: Dataset, tmp_path: Path, stagings: list[Staging]
) -> None:
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    data = bytearray(fs.cat_file(f"{bucket}/shards/00003.tar"))
    data[1000] ^= 1
    fs.pipe_file(f"{bucket}/shards/00003.tar", bytes(data))
    fs.pipe_file(
        f"{bucket}/shards/00005.tar", bytes(fs.cat_file(f"{bucket}/shards/00005.tar"))[:-50_000]
    )
    fs.rm(f"{bucket}/shards/00007.tar")
    dataset, root = through(Dataset.open(bucket))
    stagings.append(stage(dataset, tmp_path, room(ten, 10)))
    for shard, why in (
        (3, "its bytes fail their sha256, twice"),
        (5, "bytes are missing"),
        (7, "no such file"),
    ):
        with pytest.raises(
            DatasetError, match=rf"^{bucket}/shards/0000{shard}\.tar: [^\n]*{why}[^\n]*$"
        ):
            path_of(stagings[0], shard)
    assert root.shards().count(3) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    out, report = read(CropReader([dataset], on_corrupt="skip", staging=stagings[0]), [6, 1, 14])
    assert report.row.tolist() == [8, 1, 16] and len(report.skipped) == 4
    assert all(
        np.array_equal(crop, ten.read(row)) for crop, row in zip(out, report.row, strict=True)
    )
    with pytest.raises(DatasetError, match=r"00003\.tar: .*sha256, twice.*crop 6 at byte \d+"):
        read(CropReader([dataset], staging=stagings[0]), [6])
