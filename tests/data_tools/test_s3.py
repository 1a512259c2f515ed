"""Archives and datasets in an object store give the same bytes as local ones, also over a bad
network.

The store is moto behind a real HTTP server on loopback; a proxy before it counts the requests and
breaks some of them.
"""

import json
import logging
import os
import re
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from broken_server import STALL_S, Fault, Server
from handmade import build, files

from omnilead.data_tools import plan, storage, zarr_writer
from omnilead.data_tools.__main__ import main
from omnilead.data_tools.build import ShardOptions, shard
from omnilead.data_tools.dataset import CROP_SHAPE, META, Dataset
from omnilead.data_tools.errors import DataError, DatasetError, StorageError
from omnilead.data_tools.sources import open_sources, physionet2021, ptbxl
from omnilead.data_tools.storage import folder
from omnilead.engine.data.order import Places
from omnilead.engine.data.reader import CropReader
from omnilead.engine.data.staging import Staging
from tests.forks import started

s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
serving = pytest.importorskip("werkzeug.serving")

ARCHIVE, BUCKET = "s3://archives/small", "s3://ecg-bucket"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    served = Server(moto.DomainDispatcherApplication(moto.create_backend_app))
    http = serving.make_server("127.0.0.1", 0, served, threaded=True)
    served.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield served
    http.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def right(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """The local builds of each format."""
    place = tmp_path_factory.mktemp("right")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 5)
        return {kind: build(small, place / kind, format=kind) for kind in ("tar", "both")}


@pytest.fixture(scope="module")
def environment(server: Server, small: Path) -> Iterator[pytest.MonkeyPatch]:
    """Credentials of the store, and none of the machine's; the archive in a public bucket."""
    keys = {
        "ENDPOINT_URL": server.url,
        "ACCESS_KEY_ID": "key",
        "SECRET_ACCESS_KEY": "secret",
        "DEFAULT_REGION": "us-east-1",
    }
    keys |= {
        "CONFIG_FILE": os.devnull,
        "SHARED_CREDENTIALS_FILE": os.devnull,
        "EC2_METADATA_DISABLED": "true",
    }
    keys |= {"MAX_ATTEMPTS": "1"}  # botocore's own: ours are tested
    with pytest.MonkeyPatch.context() as patch:
        for name, value in keys.items():
            patch.setenv(f"AWS_{name}", value)
        forget()
        fs = s3fs.S3FileSystem(s3_additional_kwargs={"ACL": "public-read"})
        fs.mkdir("archives", acl="public-read")
        fs.put(f"{small}/", f"{ARCHIVE}/", recursive=True)
        yield patch
        forget()


@pytest.fixture
def s3(
    server: Server, environment: pytest.MonkeyPatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """With an empty bucket; waits are short; the scratch folder is the test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(plan, "SHARD_CROPS", 5)
    monkeypatch.setattr(
        s3fs.S3FileSystem, "read_timeout", 60
    )  # a busy machine's late answer is not a store that stalls
    forget()
    fs = storage._connect(BUCKET, False)
    if fs.exists(BUCKET):
        fs.rm(BUCKET, recursive=True)
    fs.mkdir(BUCKET)
    server.log.clear()
    yield server
    server.faults.clear()
    server.together = ""
    forget()


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a store that stalls is asked again soon, and so may be one that is only slow."""
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", STALL_S / 2)
    forget()


def forget() -> None:
    physionet2021._patients.cache_clear()
    ptbxl._rows.cache_clear()
    storage._connect.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


def s3_files(url: str) -> dict[str, bytes]:
    fs = storage._connect(url, False)
    return {
        name.removeprefix(url.removeprefix("s3://") + "/"): fs.cat_file(name)
        for name in fs.find(url)
    }


def without_recipe(made: dict[str, bytes]) -> dict[str, Any]:
    """dataset.json's recipe holds the files' times of change, which an object store does not
    keep."""
    meta = {
        name: value
        for name, value in json.loads(made[META]).items()
        if name not in ("recipe", "fingerprint")
    }
    return made | {META: meta}


def assert_same(url: str, local: Dataset) -> None:
    assert without_recipe(s3_files(url)) == without_recipe(files(Path(local.root.url)))


def test_labels_are_the_same_as_on_a_disk(s3: Server, small: Path, tmp_path: Path) -> None:
    assert main(["labels", "physionet2021", ARCHIVE, "--out", f"{BUCKET}/labels"]) == 0
    assert main(["labels", "physionet2021", str(small), "--out", str(tmp_path / "labels")]) == 0
    assert s3_files(f"{BUCKET}/labels") == files(tmp_path / "labels")


@pytest.mark.parametrize(
    ("source", "out", "kind"),
    [("s3", "local", "both"), ("local", "s3", "tar"), ("s3", "s3", "both")],
)
def test_archives_and_datasets_in_a_bucket_give_the_same_bytes(
    s3: Server,
    small: Path,
    right: dict[str, Dataset],
    tmp_path: Path,
    source: str,
    out: str,
    kind: str,
) -> None:
    place = f"{BUCKET}/made" if out == "s3" else str(tmp_path / "made")
    build(ARCHIVE if source == "s3" else small, place, format=kind)
    made, local = (
        s3_files(place) if out == "s3" else files(Path(place)),
        files(Path(right[kind].root.url)),
    )
    assert without_recipe(made) == without_recipe(
        local
    )  # which also says that nothing else lies there
    assert source == "s3" or made == local
    assert list(tmp_path.glob("omnilead-*/*")) == []


def test_requests_run_concurrently(s3: Server, small: Path) -> None:
    """Headers for the plan, records for a shard and crops for the zarr copy are requested
    concurrently."""
    dataset, sources = build(small, f"{BUCKET}/made"), open_sources(ARCHIVE)
    for work in (
        lambda: plan.make_plan(sources, 0),
        lambda: build(ARCHIVE, f"{BUCKET}/other"),
        lambda: zarr_writer.write(dataset.table(), dataset.shards, dataset.root, 1, None, True),
    ):
        s3.most, s3.together = 0, "(hea|mat|tar)$"
        work()
        assert s3.most >= 3


def test_the_number_of_requests_is_small(s3: Server, small: Path) -> None:
    """A record needs its header for the plan, then header and signal; a crop needs one range. No
    request is repeated."""
    sources = open_sources(ARCHIVE)
    notes = [
        note for source in sources for note in source.notes()
    ]  # as the command line asks for them
    made = shard(sources, ShardOptions(f"{BUCKET}/made", quiet=True))
    crops, records = len(made), len(list(small.rglob("*.hea")))
    assert notes == []
    assert s3.count("GET", "[.]hea$") <= records + crops
    assert s3.count("GET", "[.]mat$") <= crops
    assert s3.count("HEAD", "[.](hea|mat)$") == 0
    assert s3.count("GET", "csv$") == 1
    assert s3.count("GET", "(ecg-bucket|archives)$") + s3.count("HEAD", "") <= 12 + 6 * len(
        made.shards
    )
    s3.log.clear()
    again = Dataset.open(f"{BUCKET}/made")
    for row in range(5):
        again.read(row)
    assert Counter(method for method, *_ in s3.log) == {
        "GET": 7
    }  # dataset.json, samples.parquet, five crops


def test_a_remote_dataset_is_verified_drawn_and_read_in_place(
    s3: Server,
    small: Path,
    right: dict[str, Dataset],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """verify, show and read, as on a disk."""
    local = right["both"]
    build(small, f"{BUCKET}/made", format="both")
    dataset = Dataset.open(f"{BUCKET}/made/")
    assert dataset.meta == local.meta
    for row in (0, len(local) - 1):
        assert np.array_equal(dataset.read(row), local.read(row))
        dataset.chunks.read(row, crop := np.empty(CROP_SHAPE, "<i2"))
        assert np.array_equal(crop, local.read(row))
    with pytest.raises(DatasetError, match="crc32c"):
        Dataset(dataset.root, dataset.meta | {"shards": dataset.shards[::-1]}).read(0)
    assert main(["verify", f"{BUCKET}/made", "--archive", ARCHIVE, "--workers", "1"]) == 0
    assert main(["show", f"{BUCKET}/made"]) == 0
    assert main(["show", f"{BUCKET}/made", "--crop", "3", "--png", str(tmp_path / "crop.png")]) == 0
    assert f"{len(local):,} crops, all checks passed" in capsys.readouterr().out
    assert (tmp_path / "crop.png").stat().st_size > 10_000
    fs = storage._connect(BUCKET, False)
    name = f"{BUCKET}/made/shards/00001.tar"
    fs.pipe_file(name, fs.cat_file(name)[:-1])
    assert main(["verify", f"{BUCKET}/made", "--workers", "1"]) == 1
    assert "shards/00001.tar" in capsys.readouterr().out


def test_public_bucket(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without credentials, --anonymous sends unsigned requests; without it there is an error at
    once."""
    public, made = f"{BUCKET}/public", str(tmp_path / "made")
    build(ARCHIVE, public, format="both")
    fs = storage._connect(BUCKET, False)
    fs.chmod(BUCKET, "public-read")
    fs.chmod(BUCKET, "public-read", recursive=True)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    forget()
    s3.log.clear()
    assert main(["shard", ARCHIVE, "--out", made, "--workers", "1", "--anonymous"]) == 0
    assert main(["verify", public, "--workers", "1", "--anonymous"]) == 0
    assert main(["show", public, "--crop", "1", "--anonymous"]) == 0
    assert Dataset.open(public, anonymous=True).read(2).any()
    assert s3.log and not any(signed for *_, signed in s3.log)
    capsys.readouterr()
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 60)
    assert main(["shard", ARCHIVE, "--out", made, "--workers", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--anonymous" in line


@pytest.mark.parametrize("how", ["500", "drop", "cut", "lie", "stall"])
def test_bad_network_is_harmless(
    s3: Server, right: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Every kind of request fails a few times, for reads and for writes, and the bytes stay the
    same."""
    if how == "stall":
        impatient(monkeypatch)
    reads, writes = ["hea$", "mat$", "tar$"], ["tar$", "/c/0/0/0$", "dataset.json$"]
    if how != "stall":  # each takes its time
        reads, writes = [*reads, "csv$", "parquet$"], [*writes, "idx$", "parquet$", "zarr.json$"]
    s3.faults = [Fault(how, "GET", path, 2) for path in reads]
    s3.faults += [Fault(how, "PUT", path, 2) for path in writes if how not in ("cut", "lie")]
    build(ARCHIVE, f"{BUCKET}/made", format="both")
    assert [fault for fault in s3.faults if fault.times] == []
    assert_same(f"{BUCKET}/made", right["both"])


@pytest.mark.parametrize("how", ["500", "404", "drop", "cut", "lie", "stall"])
@pytest.mark.parametrize("source", ["tar", "zarr"])
def test_crops_read_over_a_bad_network_are_right(
    s3: Server,
    right: dict[str, Dataset],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: Literal["tar", "zarr"],
    how: str,
) -> None:
    """From tar and zarr, every crop equals the local one, or there is a one-line error."""
    local = right["both"]
    storage._connect(BUCKET, False).put(f"{local.root.url}/", f"{BUCKET}/made/", recursive=True)
    if how == "stall":
        impatient(monkeypatch)
    dataset, rows = Dataset.open(f"{BUCKET}/made"), np.arange(len(local))
    path = {"tar": "0000[01].tar$", "zarr": "/c/[01]/0/0$"}[source]
    s3.faults = [Fault(how, "GET", path, 1 if how == "lie" else 3)]
    s3.faults += [Fault(how, "HEAD", path, 1)] if how in ("500", "404") and source == "zarr" else []
    staging = Staging(
        {0: dataset},
        str(tmp_path / "cache"),
        2**30,
        [(0, shard) for shard in range(len(dataset.shards))],
    )
    out = np.empty((len(rows), *CROP_SHAPE), np.int16)
    with closing(staging), closing(CropReader([dataset], source=source, staging=staging)) as reader:
        reader.read(Places(rows * 0, rows, rows), out)
    assert [fault for fault in s3.faults if fault.times] == []
    assert all(
        np.array_equal(crop, local.read(row)) for crop, row in zip(out, rows.tolist(), strict=True)
    )
    if how not in ("404", "lie"):  # those that never end take their time
        return
    s3.faults = [Fault(how, "GET", path, float("inf"))]
    monkeypatch.setattr(storage, "RETRIES", 2)
    staging = Staging({0: dataset}, str(tmp_path / "empty"), 2**30)
    reader = CropReader([dataset], source=source, staging=staging)
    with (
        closing(staging),
        closing(reader),
        pytest.raises(DataError, match=rf"^{BUCKET}/made/[^\n]*$"),
    ):
        reader.read(Places(rows[:1] * 0, rows[:1], rows[:1]), out[:1])


@pytest.mark.parametrize(
    ("how", "method", "path"),
    [("500", "GET", "HR0000[0-9].mat$"), ("500", "PUT", "00001.tar$"), ("500", "PUT", "/c/0/0/0$")]
    + [("lie", "GET", path) for path in ("csv$", "HR00001.hea$", "00000.parquet$")],
)
def test_a_dead_network_gives_a_one_line_error_and_the_run_can_be_finished(
    s3: Server,
    right: dict[str, Dataset],
    capsys: pytest.CaptureFixture[str],
    how: str,
    method: str,
    path: str,
) -> None:
    """The run ends with one line; when the network is back, the same command finishes. A
    truncated response is noticed even if its stated length matches."""
    command = ["shard", ARCHIVE, "--out", f"{BUCKET}/made", "--format", "both", "--workers", "1"]
    s3.faults = [Fault(how, method, path, float("inf"))]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (BUCKET if method == "PUT" or "parquet" in path else ARCHIVE) in line
    assert how == "500" or (path.strip("$") in line and re.search(r"\d of \d+ bytes arrived", line))
    with pytest.raises(DatasetError, match="unfinished"):
        Dataset.open(f"{BUCKET}/made")
    s3.faults.clear()
    if how == "500":
        assert main(command) == 0
        assert_same(f"{BUCKET}/made", right["both"])


@pytest.mark.parametrize("path", ["00001.tar$", "store.zarr/c/0/0/0$", "dataset.json$"])
def test_a_killed_upload_can_be_finished(
    s3: Server, small: Path, right: dict[str, Dataset], tmp_path: Path, path: str
) -> None:
    """An unfinished dataset is recognized as such; another run finishes it and removes the killed
    run's temporary files."""
    fault = Fault("kill", "PUT", path)
    s3.faults = [fault]
    fault.victim = started(
        build_small, str(small), f"{BUCKET}/made", out=tmp_path / "output", env=dict(os.environ)
    )
    fault.victim.join()
    assert fault.victim.exitcode == -9 and not fault.times
    with pytest.raises(DatasetError, match="unfinished"):
        Dataset.open(f"{BUCKET}/made")
    build(small, f"{BUCKET}/made", format="both")
    assert s3_files(f"{BUCKET}/made") == files(Path(right["both"].root.url))
    assert list(tmp_path.glob("omnilead-*/*")) == []


def build_small(source: str, out: str) -> None:
    tempfile.tempdir = None  # TMPDIR is the test's
    plan.SHARD_CROPS = 5
    build(source, out, format="both")


def test_names_are_listed_in_the_same_order_as_on_a_disk(s3: Server, tmp_path: Path) -> None:
    """The order of records is part of the plan: it may not depend on where the archive lies."""
    remote, local = folder(f"{BUCKET}/tree"), folder(tmp_path / "tree")
    for name in ("b/2", "b/1", "a", "c", "b.x", "b/c/d", "B/z", "b-/q", "aa/b/c", "a0"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(b"x")
        remote.write(name, b"x")
    for below in ((), ("b",)):
        assert list(remote.names(*below)) == list(local.names(*below))
    assert remote.children() == local.children()


def test_broken_records_are_refused_as_on_a_disk(s3: Server, small: Path, tmp_path: Path) -> None:
    """An empty header, an empty signal and a missing signal: three rows in rejects.csv; other
    records are read."""
    broken = tmp_path / "archive"
    shutil.copytree(small, broken)
    first, second, third = sorted(broken.rglob("HR*.hea"))[:3]
    first.write_bytes(b"")
    second.with_suffix(".mat").write_bytes(b"")
    third.with_suffix(".mat").unlink()
    storage._connect(BUCKET, False).put(f"{broken}/", f"{BUCKET}/broken/", recursive=True)
    local, remote = build(broken, tmp_path / "made"), build(f"{BUCKET}/broken", f"{BUCKET}/made")
    rejects = local.root.read("rejects.csv", 10**6)
    assert rejects == remote.root.read("rejects.csv", 10**6)
    assert all(path.stem in rejects.decode() for path in (first, second, third))


@pytest.mark.parametrize(
    "url",
    ["s3://no-such-bucket/x", f"{BUCKET}/nothing", "s3://", "s3:///x", "nosuch://x/y", "http://"],
)
def test_wrong_addresses_fail(
    s3: Server, url: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["shard", url, "--out", str(tmp_path / "made")],
        ["verify", url],
        ["show", url],
    ):
        assert main(command) == 2
    assert main(["shard", str(small), "--out", url, "--workers", "1"]) == (
        0 if url.startswith(BUCKET) else 2
    )
    errors = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")
    ]
    assert len(errors) == (3 if url.startswith(BUCKET) else 4)


def test_a_store_that_does_not_answer_gives_an_error_after_retries(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    forget()
    with pytest.raises(StorageError, match="after 6 tries"):
        open_sources(ARCHIVE)
