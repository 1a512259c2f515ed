"""Training from an S3 bucket, served on loopback."""

import secrets
from collections import Counter
from contextlib import closing

import fsspec
import numpy as np
import pytest
from broken_server import Server
from shards_made import crops_of, make_dataset, read, take_all
from staged import cached, named, room, through

from omnilead.data_tools.dataset import CROP_SHAPE, Dataset, DatasetError
from omnilead.engine.data.order import DatasetRows, Order, shards_needed
from omnilead.engine.data.reader import CropReader, read_ahead
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("small_and_quick")


@pytest.fixture
def server(monkeypatch):
    served = Server()
    served.start(monkeypatch)
    yield served
    until(lambda: not named("staging"))
    served.stop()


@pytest.fixture
def fs(server):
    return fsspec.filesystem("s3", skip_instance_cache=True)


# its caches are closed before the server, or their threads go on with the next test's
@pytest.fixture
def bucket(ten, fs, staged):
    # moto's buckets outlive its servers, and a port comes again
    name = f"ecgs-{secrets.token_hex(8)}"
    fs.mkdir(name)
    fs.put(ten.root.url, f"{name}/ten", recursive=True)
    return f"s3://{name}/ten"


def test_training_from_a_bucket(bucket, ten, tmp_path, staged):
    """Two epochs in block order, with space for a block and two shards: right bytes, one download
    per shard and epoch."""
    dataset, root = through(Dataset.open(bucket))
    order = Order((DatasetRows.select(dataset),), batch_crops=2, block_shards=2)
    needed = (shard for _, shard in shards_needed(order, 0))
    staging = staged(dataset, 4, needed, ahead=2, together=2)
    yielded = []
    with closing(CropReader([dataset], staging=staging)) as gather:
        requests = (order.batch(step) for step in range(20))
        take_all(read_ahead(requests, gather, (2, *CROP_SHAPE)), yielded, ten)
    assert sorted(row for rows in yielded for row in rows) == sorted([*range(20)] * 2)
    # the next epoch's first ones
    assert max(Counter(root.shards()).values()) <= 3 and len(root.shards()) <= 20 + 4
    assert cached(tmp_path) <= room(ten, 4)


def test_remote_shards_are_not_read_crop_by_crop(bucket):
    with pytest.raises(DatasetError, match=r"/ten is remote: its shards are read through a cache"):
        CropReader([Dataset.open(bucket)])


def test_zarr_is_read_from_a_bucket_by_ranges(bucket, fs, tmp_path):
    twin = make_dataset(tmp_path / "twin", shards=3, crops=4, zarr=True)
    away = bucket.replace("/ten", "/twin")
    fs.put(twin.root.url, away, recursive=True)
    dataset, root = through(Dataset.open(away))
    rows = [11, 0, 5, 0]
    with closing(CropReader([dataset], source="zarr", threads=2)) as reader:
        assert np.array_equal(read(reader, rows)[0], crops_of(twin, rows))
    assert not any(name.startswith("shards/") for name, _ in root.reads)
