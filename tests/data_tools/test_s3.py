"""Archives and datasets in an object store: the local bytes, whatever the network does on the way.

The store is moto behind a real HTTP server on loopback; a layer before it counts the requests and breaks some of them.
"""

import json
import logging
import os
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

from data_tools import plan, storage, zarr_writer
from data_tools.__main__ import main
from data_tools.build import ShardOptions, shard
from data_tools.dataset import CROP_SHAPE, META, Dataset
from data_tools.errors import DataError, DatasetError, StorageError
from data_tools.sources import open_sources, physionet2021, ptbxl
from data_tools.storage import folder
from data_tools.synth import synthesise
from data_tools.verify import verify
from engine.data.order import Places
from engine.data.reader import CropReader
from engine.data.staging import Staging
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
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("s3") / "archive"
    synthesise(out, patients=3, sessions=2, seed=5, progress=False)
    return out


@pytest.fixture(scope="module")
def right(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The local builds of each format."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 5)
        for kind in ("tar", "both"):
            out = tmp_path_factory.mktemp("right") / kind
            shard(open_sources(str(small)), ShardOptions(str(out), format=kind, quiet=True))
            made[kind] = local_files(out)
    return made


@pytest.fixture(scope="module")
def environment(server: Server, small: Path) -> Iterator[pytest.MonkeyPatch]:
    """Credentials of the store, and none of the machine's; the archive in a public bucket."""
    keys = {"ENDPOINT_URL": server.url, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}
    keys |= {"CONFIG_FILE": os.devnull, "SHARED_CREDENTIALS_FILE": os.devnull, "EC2_METADATA_DISABLED": "true"}
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
def s3(server: Server, environment: pytest.MonkeyPatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """With an empty bucket; waits are short; the scratch folder is the test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(plan, "SHARD_CROPS", 5)
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 60)  # a busy machine's late answer is not a store that stalls
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


def local_files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def s3_files(url: str) -> dict[str, bytes]:
    fs = storage._connect(url, False)
    return {name.removeprefix(url.removeprefix("s3://") + "/"): fs.cat_file(name) for name in fs.find(url)}


def without_recipe(made: dict[str, bytes]) -> dict[str, Any]:
    """dataset.json's recipe holds the files' times of change, which an object store does not keep."""
    meta = {name: value for name, value in json.loads(made[META]).items() if name not in ("recipe", "fingerprint")}
    return made | {META: meta}


def build(source: str, out: str, **settings: Any) -> Dataset:
    return shard(open_sources(source), ShardOptions(out, quiet=True, **settings))


@pytest.mark.parametrize(
    ("source", "out", "kind", "workers"), [("s3", "local", "both", 1), ("local", "s3", "tar", 1), ("s3", "s3", "both", 1)]
)
def test_same_bytes(
    s3: Server, small: Path, right: dict[str, dict[str, bytes]], tmp_path: Path, source: str, out: str, kind: str, workers: int
) -> None:
    place = f"{BUCKET}/made" if out == "s3" else str(tmp_path / "made")
    build(ARCHIVE if source == "s3" else str(small), place, format=kind, workers=workers)
    made = s3_files(place) if out == "s3" else local_files(Path(place))
    assert without_recipe(made) == without_recipe(right[kind])  # which also says that nothing else lies there
    assert source == "s3" or made == right[kind]
    assert list(tmp_path.glob("omnilead-*/*")) == []


def test_many_requests_at_once(s3: Server, small: Path) -> None:
    """The plan's headers, a shard's records and the twin's crops do not wait for one another."""
    build(str(small), f"{BUCKET}/made")
    dataset, sources = Dataset.open(f"{BUCKET}/made"), open_sources(ARCHIVE)
    for work in (
        lambda: plan.make_plan(sources, 0),
        lambda: build(ARCHIVE, f"{BUCKET}/other"),
        lambda: zarr_writer.write(dataset.table(), dataset.shards, dataset.root, 1, None, True),
    ):
        s3.most, s3.together = 0, "(hea|mat|tar)$"
        work()
        assert s3.most >= 3


def test_requests(s3: Server, small: Path) -> None:
    """A record costs its header for the plan, then header and signal; a crop, one range; nothing is asked twice."""
    sources = open_sources(ARCHIVE)
    notes = [note for source in sources for note in source.notes()]  # as the command line asks for them
    made = shard(sources, ShardOptions(f"{BUCKET}/made", quiet=True))
    crops, records = len(made), len(list(small.rglob("*.hea")))
    assert notes == []
    assert s3.count("GET", "[.]hea$") <= records + crops
    assert s3.count("GET", "[.]mat$") <= crops
    assert s3.count("HEAD", "[.](hea|mat)$") == 0
    assert s3.count("GET", "csv$") == 1
    assert s3.count("GET", "(ecg-bucket|archives)$") + s3.count("HEAD", "") <= 12 + 6 * len(made.shards)
    s3.log.clear()
    again = Dataset.open(f"{BUCKET}/made")
    for row in range(5):
        again.read(row)
    assert Counter(method for method, *_ in s3.log) == {"GET": 7}  # dataset.json, samples.parquet, five crops


def test_used_in_place(s3: Server, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verify, show and read, as on a disk."""
    local = build(str(small), str(tmp_path / "made"), format="both")
    build(str(small), f"{BUCKET}/made", format="both")
    dataset = Dataset.open(f"{BUCKET}/made/")
    assert dataset.meta == local.meta
    for row in (0, len(local) - 1):
        assert np.array_equal(dataset.read(row), local.read(row))
        dataset.chunks.read(row, crop := np.empty(CROP_SHAPE, "<i2"))
        assert np.array_equal(crop, local.read(row))
    with pytest.raises(DatasetError, match="crc32c"):
        Dataset(dataset.root, dataset.meta | {"shards": dataset.shards[::-1]}).read(0)
    assert main(["verify", f"{BUCKET}/made", "--source", ARCHIVE, "--workers", "1"]) == 0
    assert main(["show", f"{BUCKET}/made"]) == 0
    assert main(["show", f"{BUCKET}/made", "--crop", "3", "--png", str(tmp_path / "crop.png")]) == 0
    assert f"{len(local):,} crops, everything holds" in capsys.readouterr().out
    assert (tmp_path / "crop.png").stat().st_size > 10_000
    fs = storage._connect(BUCKET, False)
    name = f"{BUCKET}/made/shards/00001.tar"
    fs.pipe_file(name, fs.cat_file(name)[:-1])
    assert main(["verify", f"{BUCKET}/made", "--workers", "1"]) == 1
    assert "shards/00001.tar" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["tar", "zarr"])
def test_public_bucket(
    s3: Server, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without credentials: --anonymous signs nothing, and its absence is told at once."""
    public, made = f"{BUCKET}/public", str(tmp_path / "made")
    build(ARCHIVE, public, format=kind)
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
    assert s3.log
    assert not any(signed for *_, signed in s3.log)
    capsys.readouterr()
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 60)
    assert main(["shard", ARCHIVE, "--out", made, "--workers", "1"]) == 2
    told = capsys.readouterr().err
    assert "--anonymous" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("how", ["500", "drop", "cut", "lie", "stall"])
def test_bad_network(s3: Server, right: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Every kind of request fails a few times, on the way in and on the way out: nothing of it is in the bytes."""
    if how == "stall":
        impatient(monkeypatch)
    reads, writes = ["hea$", "mat$", "tar$"], ["tar$", "/c/0/0/0$", "dataset.json$"]
    if how != "stall":  # each takes its time
        reads, writes = [*reads, "csv$", "parquet$"], [*writes, "idx$", "parquet$", "zarr.json$"]
    s3.faults = [Fault(how, "GET", path, 2) for path in reads]
    s3.faults += [Fault(how, "PUT", path, 2) for path in writes if how not in ("cut", "lie")]
    build(ARCHIVE, f"{BUCKET}/made", format="both")
    assert [fault for fault in s3.faults if fault.times] == []
    assert without_recipe(s3_files(f"{BUCKET}/made")) == without_recipe(right["both"])


@pytest.mark.parametrize("how", ["500", "404", "drop", "cut", "lie", "stall"])
@pytest.mark.parametrize("source", ["tar", "zarr"])
def test_training_over_a_bad_network(
    s3: Server, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Literal["tar", "zarr"], how: str
) -> None:
    """Of either twin, every crop as it is on a disk, or one line."""
    local = build(str(small), str(tmp_path / "made"), format="both")
    build(str(small), f"{BUCKET}/made", format="both")
    if how == "stall":
        impatient(monkeypatch)
    dataset, rows = Dataset.open(f"{BUCKET}/made"), np.arange(len(local))
    path = {"tar": "0000[01].tar$", "zarr": "/c/[01]/0/0$"}[source]
    s3.faults = [Fault(how, "GET", path, 1 if how == "lie" else 3)]
    s3.faults += [Fault(how, "HEAD", path, 1)] if how in ("500", "404") and source == "zarr" else []
    staging = Staging({0: dataset}, str(tmp_path / "cache"), 2**30, [(0, shard) for shard in range(len(dataset.shards))])
    out = np.empty((len(rows), *CROP_SHAPE), np.int16)
    with closing(staging), closing(CropReader([dataset], source=source, staging=staging)) as gather:
        gather.read(Places(rows * 0, rows, rows), out)
    assert [fault for fault in s3.faults if fault.times] == []
    assert all(np.array_equal(crop, local.read(row)) for crop, row in zip(out, rows.tolist(), strict=True))
    if how not in ("404", "lie"):  # those that never end take their time
        return
    s3.faults = [Fault(how, "GET", path, float("inf"))]
    monkeypatch.setattr(storage, "RETRIES", 2)
    staging = Staging({0: dataset}, str(tmp_path / "empty"), 2**30)
    gather = CropReader([dataset], source=source, staging=staging)
    with closing(staging), closing(gather), pytest.raises(DataError, match=rf"^{BUCKET}/made/[^\n]*$"):
        gather.read(Places(rows[:1] * 0, rows[:1], rows[:1]), out[:1])


@pytest.mark.parametrize(("method", "path"), [("GET", "HR0000[0-9].mat$"), ("PUT", "00001.tar$"), ("PUT", "/c/0/0/0$")])
def test_dead_network(
    s3: Server, right: dict[str, dict[str, bytes]], capsys: pytest.CaptureFixture[str], method: str, path: str
) -> None:
    """It ends with one line; when the network is back, the same command finishes."""
    command = ["shard", ARCHIVE, "--out", f"{BUCKET}/made", "--format", "both", "--workers", "1"]
    s3.faults = [Fault("500", method, path, float("inf"))]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert (BUCKET if method == "PUT" else ARCHIVE) in told
    with pytest.raises(DatasetError, match="unfinished"):
        Dataset.open(f"{BUCKET}/made")
    s3.faults.clear()
    assert main(command) == 0
    assert without_recipe(s3_files(f"{BUCKET}/made")) == without_recipe(right["both"])


def test_short_answers_are_noticed(s3: Server, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even if the length that is announced is the length that arrives: asked again, and then one line that names the file."""
    dataset = build(str(small), f"{BUCKET}/good")
    for path in ("csv$", "HR00001.hea$", "00000.parquet$"):
        s3.faults = [Fault("lie", "GET", path, float("inf"))]
        assert main(["shard", ARCHIVE, "--out", f"{BUCKET}/made", "--workers", "1"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert path.strip("$") in line and "bytes arrived of" in line
    dataset.addresses  # noqa: B018
    s3.faults = [Fault("lie", "GET", "tar$", 2)]
    assert dataset.read(0).any()  # the third answer is whole
    s3.faults = [Fault("lie", "GET", "tar$", float("inf"))]
    with pytest.raises(StorageError, match="after 6 tries: 60000 bytes arrived of 120000"):
        dataset.read(0)
    s3.faults = [Fault("lie", "GET", path, 1) for path in ("tar$", "idx$", "samples.parquet$", "rejects.csv$")]
    assert verify(dataset) == []
    assert [fault for fault in s3.faults if fault.times] == []


@pytest.mark.parametrize("path", ["00001.tar$", "store.zarr/c/0/0/0$", "dataset.json$"])
def test_killed_while_uploading(s3: Server, small: Path, right: dict[str, dict[str, bytes]], tmp_path: Path, path: str) -> None:
    """Nothing unfinished looks finished, and run again it finishes and removes the temporary files of the killed run."""
    fault = Fault("kill", "PUT", path)
    s3.faults = [fault]
    fault.victim = started(build_small, str(small), f"{BUCKET}/made", out=tmp_path / "output", env=dict(os.environ))
    fault.victim.join()
    assert fault.victim.exitcode == -9 and not fault.times
    with pytest.raises(DatasetError, match="unfinished"):
        Dataset.open(f"{BUCKET}/made")
    build(str(small), f"{BUCKET}/made", format="both")
    assert s3_files(f"{BUCKET}/made") == right["both"]
    assert list(tmp_path.glob("omnilead-*/*")) == []


def build_small(source: str, out: str) -> None:
    tempfile.tempdir = None  # TMPDIR is the test's
    plan.SHARD_CROPS = 5
    build(source, out, format="both")


def test_names_come_in_the_same_order(s3: Server, tmp_path: Path) -> None:
    """The order of records is part of the plan: it may not depend on where the archive lies."""
    for name in ("b/2", "b/1", "a", "c", "b.x", "b/c/d", "B/z", "b-/q", "aa/b/c", "a0"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(b"x")
        folder(f"{BUCKET}/tree").write(name, b"x")
    assert list(folder(f"{BUCKET}/tree").names()) == list(folder(tmp_path / "tree").names())
    assert list(folder(f"{BUCKET}/tree").names("b")) == list(folder(tmp_path / "tree").names("b"))
    assert folder(f"{BUCKET}/tree").children() == folder(tmp_path / "tree").children()


def test_broken_records_are_refused_as_on_a_disk(s3: Server, small: Path, tmp_path: Path) -> None:
    """An empty header, an empty signal, a signal that is missing: three lines in rejects.csv, and the others go on."""
    broken = tmp_path / "archive"
    shutil.copytree(small, broken)
    first, second, third = sorted(broken.rglob("HR*.hea"))[:3]
    first.write_bytes(b"")
    second.with_suffix(".mat").write_bytes(b"")
    third.with_suffix(".mat").unlink()
    storage._connect(BUCKET, False).put(f"{broken}/", f"{BUCKET}/broken/", recursive=True)
    local, remote = build(str(broken), str(tmp_path / "made")), build(f"{BUCKET}/broken", f"{BUCKET}/made")
    rejects = local.root.read("rejects.csv", 10**6)
    assert rejects == remote.root.read("rejects.csv", 10**6)
    assert all(path.stem in rejects.decode() for path in (first, second, third))


@pytest.mark.parametrize("url", ["s3://no-such-bucket/x", f"{BUCKET}/nothing", "s3://", "s3:///x", "nosuch://x/y", "http://"])
def test_wrong_addresses(s3: Server, url: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["shard", url, "--out", str(tmp_path / "made")], ["verify", url], ["show", url]):
        assert main(command) == 2
    assert main(["shard", str(small), "--out", url, "--workers", "1"]) == (0 if url.startswith(BUCKET) else 2)
    told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert len(told) == (3 if url.startswith(BUCKET) else 4)
