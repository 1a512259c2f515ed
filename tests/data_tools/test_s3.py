"""Archives and datasets in an object store give the same bytes as local ones, also over a bad
network."""

import json
import os
import re
import shutil
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from broken_server import STALL_S, Fault, Server, forget_connections, s3fs
from handmade import build, files

from omnilead.data_tools.dataset import CROP_SHAPE, META, Dataset
from omnilead.data_tools.io import storage
from omnilead.data_tools.io.errors import DataError, DatasetError, StorageError
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sharding import plan
from omnilead.data_tools.sharding import shards as shard_writers
from omnilead.data_tools.sharding.leave_out import LeaveOut
from omnilead.data_tools.sharding.shard import ShardOptions, lock_folder, shard
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources import wfdb_archives
from omnilead.data_tools.sources.detect import open_sources
from omnilead.data_tools.synthetic.archive import synthesise
from omnilead.engine.data.order import Places
from omnilead.engine.data.reader import CropReader
from omnilead.engine.data.staging import Staging
from tests.forks import started

ARCHIVE, BUCKET = "s3://archives/small", "s3://ecg-bucket"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Nine records, six of them of PTB-XL: each costs several requests a test."""
    out = tmp_path_factory.mktemp("small") / "archive"
    synthesise(out, patients=3, two_sessions=1, seed=7, progress=False)
    return out


@pytest.fixture(scope="module")
def right(small, tmp_path_factory):
    """The local build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 3)
        return build(small, tmp_path_factory.mktemp("right") / "both", format="both")


@pytest.fixture(scope="module")
def server(small):
    """With the archive in a public bucket."""
    served = Server()
    with pytest.MonkeyPatch.context() as patch:
        # A busy machine's late answer is not a store that stalls
        patch.setattr(s3fs.S3FileSystem, "read_timeout", 60)
        served.start(patch)
        fs = s3fs.S3FileSystem(s3_additional_kwargs={"ACL": "public-read"})
        fs.mkdir("archives", acl="public-read")
        fs.put(f"{small}/", f"{ARCHIVE}/", recursive=True)
        yield served
        served.stop()


@pytest.fixture
def s3(server, tmp_path, monkeypatch):
    """With an empty bucket; waits are short; the scratch folder is the test's own. The client stays
    for the next test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(plan, "SHARD_CROPS", 3)
    forget_tables()
    fs = storage._connect(BUCKET, False)
    if fs.exists(BUCKET):
        fs.rm(BUCKET, recursive=True)
    fs.mkdir(BUCKET)
    server.log.clear()
    yield server
    server.faults.clear()
    server.together = ""


@pytest.fixture
def another_client(s3):
    """To be called after a change of its settings, which end with the test."""
    yield forget
    forget()


def forget_tables():
    wfdb_archives._ptbxl_patients.cache_clear()
    wfdb_archives._ptbxl_rows.cache_clear()


def forget():
    forget_tables()
    forget_connections()


def s3_files(url):
    fs, below = storage._connect(url, False), url.removeprefix("s3://") + "/"
    return {name.removeprefix(below): fs.cat_file(name) for name in fs.find(url)}


def without_recipe(made):
    """dataset.json's recipe holds the files' times of change, which an object store does not
    keep."""
    meta = json.loads(made[META])
    del meta["recipe"], meta["fingerprint"]
    return made | {META: meta}


def assert_same(url, local):
    assert without_recipe(s3_files(url)) == without_recipe(files(Path(local.root.url)))


def upload(folder, url):
    storage._connect(url, False).put(f"{folder}/", f"{url}/", recursive=True)


def test_labels_are_the_same_as_on_a_disk(s3, small, shell, tmp_path):
    shell.run("labels", "physionet2021", ARCHIVE, "--out", f"{BUCKET}/labels")
    shell.run("labels", "physionet2021", small, "--out", tmp_path / "labels")
    assert s3_files(f"{BUCKET}/labels") == files(tmp_path / "labels")


def test_a_dataset_of_a_remote_archive_has_the_same_bytes(s3, right, tmp_path):
    build(ARCHIVE, tmp_path / "made", format="both")
    local = files(Path(right.root.url))
    assert without_recipe(files(tmp_path / "made")) == without_recipe(local)
    assert list(tmp_path.glob("omnilead-*/*")) == []


def test_requests_run_concurrently(s3, small):
    """Headers for the plan, records for a shard and crops for the zarr copy are requested
    concurrently, and records to be compared."""
    dataset, sources = build(small, f"{BUCKET}/made"), open_sources(ARCHIVE)
    for paths, work in (
        ("hea", lambda: plan.make_plan(sources, 0)),
        ("hea|mat", lambda: verify(dataset, sources)),
        ("hea|mat", lambda: build(ARCHIVE, f"{BUCKET}/other")),
        (
            "tar",
            lambda: shard_writers.write_zarr(
                dataset.table(), dataset.shards, dataset.root, 1, None, True
            ),
        ),
    ):
        s3.most, s3.together = 0, f"({paths})$"
        work()
        assert s3.most >= 3


def test_the_number_of_requests_is_small(s3, small):
    """A record needs its header for the plan, then header and signal; a crop needs one range. No
    request is repeated."""
    sources = open_sources(ARCHIVE)
    assert [note for source in sources for note in source.notes()] == []  # as the command asks
    made = shard(sources, ShardOptions(f"{BUCKET}/made", quiet=True))
    crops, records = len(made), len(list(small.rglob("*.hea")))
    assert s3.count("GET", "[.]hea$") <= records + crops
    assert s3.count("GET", "[.]mat$") <= crops
    assert s3.count("HEAD", "[.](hea|mat)$") == 0
    assert s3.count("GET", "csv$") == 1
    others = s3.count("GET", "(ecg-bucket|archives)$") + s3.count("HEAD", "")
    assert others <= 12 + 6 * len(made.shards)
    s3.log.clear()
    again = Dataset.open(f"{BUCKET}/made")
    for row in range(5):
        again.read(row)
    # dataset.json, samples.parquet, five crops
    assert [method for method, *_ in s3.log] == ["GET"] * 7


def uploads(s3):
    """How often each tar was uploaded."""
    return Counter(
        path[-9:] for method, path, _ in s3.log if (method, path[-4:]) == ("PUT", ".tar")
    )


def test_each_shard_is_uploaded_once(s3, small):
    made = build(small, f"{BUCKET}/made")
    assert uploads(s3) == Counter(shard.name for shard in made.shards)
    assert s3.count("GET", "tar$") == 0


def test_a_remote_dataset_is_verified_and_drawn_in_place(s3, small, right, shell, tmp_path):
    local, url, png = right, f"{BUCKET}/made", tmp_path / "crop.png"
    build(small, url, format="both")
    dataset = Dataset.open(f"{url}/")
    assert dataset.meta == local.meta
    assert np.array_equal(dataset.read(0), local.read(0))
    with pytest.raises(DatasetError, match="crc32c"):
        Dataset(dataset.root, dataset.meta | {"shards": dataset.shards[::-1]}).read(0)
    out, _ = shell.run("verify", url, "--archive", ARCHIVE, "--workers", 1)
    assert f"{len(local):,} crops, all checks passed" in out
    shell.run("show", url)
    shell.run("show", url, "--crop", 3, "--png", png)
    assert png.stat().st_size > 10_000
    fs, name = storage._connect(BUCKET, False), f"{url}/shards/00001.tar"
    fs.pipe_file(name, fs.cat_file(name)[:-1])
    assert "shards/00001.tar" in shell.run("verify", url, "--workers", 1, code=1)[0]


def test_public_bucket(s3, another_client, shell, tmp_path, monkeypatch):
    """Without credentials, --anonymous sends unsigned requests; without it there is an error at
    once."""
    public, command = f"{BUCKET}/public", ("shard", ARCHIVE, "--out", tmp_path, "--workers", 1)
    build(ARCHIVE, public, format="both")
    fs = storage._connect(BUCKET, False)
    fs.chmod(BUCKET, "public-read")
    fs.chmod(BUCKET, "public-read", recursive=True)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    another_client()
    s3.log.clear()
    shell.run(*command, "--anonymous")
    shell.run("verify", public, "--workers", 1, "--anonymous")
    shell.run("show", public, "--crop", 1, "--anonymous")
    assert Dataset.open(public, anonymous=True).read(2).any()
    assert s3.log and not any(signed for *_, signed in s3.log)
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 60)
    assert "use --anonymous" in shell.error(*command)
    assert "use --anonymous" in shell.error("verify", public)
    with pytest.raises(StorageError, match="use `anonymous`"):
        Dataset.open(public)


@pytest.mark.parametrize("how", ["500", "drop", "cut", "lie", "stall"])
def test_bad_network_is_harmless(s3, another_client, right, monkeypatch, how):
    """Every kind of request fails a few times, for reads and for writes, and the bytes stay the
    same."""
    if how == "stall":  # a store that is only slow may be asked again, too
        monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", STALL_S / 2)
        another_client()
    reads, writes = ["mat$", "tar$"], ["tar$", "dataset.json$"]
    if how != "stall":  # each takes its time
        reads += ["hea$", "csv$", "parquet$"]
        writes += ["/c/0/0/0$", "idx$", "parquet$", "zarr.json$"]
    times = 1 if how == "stall" else 2
    s3.faults = [Fault(how, "GET", path, times) for path in reads]
    s3.faults += [Fault(how, "PUT", path, times) for path in writes if how not in ("cut", "lie")]
    build(ARCHIVE, f"{BUCKET}/made", format="both")
    assert not any(fault.times for fault in s3.faults)
    assert_same(f"{BUCKET}/made", right)


@pytest.mark.parametrize("how", ["500", "404", "drop", "cut", "lie", "stall"])
def test_crops_read_over_a_bad_network_are_right(
    s3, another_client, right, tmp_path, monkeypatch, how
):
    """From tar and zarr, every crop equals the local one, or there is a one-line error."""
    url = f"{BUCKET}/made"
    upload(right.root.url, url)
    if how == "stall":
        monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", STALL_S / 2)
        another_client()
    dataset, rows = Dataset.open(url), np.arange(len(right))
    ahead = [(0, shard) for shard in range(len(dataset.shards))]
    out = np.empty((len(rows), *CROP_SHAPE), np.int16)

    def read(source, cache, rows, ahead):
        staging = Staging({0: dataset}, str(tmp_path / cache), 2**30, ahead)
        reader = CropReader([dataset], source=source, staging=staging)
        with closing(staging), closing(reader):
            reader.read(Places(rows * 0, rows, rows), out[: len(rows)])

    for source, path in (("tar", "0000[01].tar$"), ("zarr", "/c/[01]/0/0$")):
        s3.faults = [Fault(how, "GET", path, 1 if how in ("lie", "stall") else 3)]
        if how in ("500", "404") and source == "zarr":
            s3.faults.append(Fault(how, "HEAD", path))
        out[:] = 0
        read(source, source, rows, ahead)
        assert not any(fault.times for fault in s3.faults)
        assert np.array_equal(out, [right.read(row) for row in rows.tolist()])
    if how in ("404", "lie"):  # the others take their time
        monkeypatch.setattr(storage, "MAX_TRIES", 2)
        for source, path in (("tar", "tar$"), ("zarr", "/c/[01]/0/0$")):
            s3.faults = [Fault(how, "GET", path, float("inf"))]
            with pytest.raises(DataError, match=rf"^{url}/[^\n]*$"):
                read(source, f"empty {source}", rows[:1], [])


def shard_command(out):
    return ["shard", ARCHIVE, "--out", out, "--format", "both", "--workers", "1"]


@pytest.mark.parametrize(("method", "path"), [("GET", "HR0000[0-9].mat$"), ("PUT", "00001.tar$")])
def test_after_a_dead_network_the_same_command_finishes(method, path, s3, right, shell):
    out = f"{BUCKET}/made"
    s3.faults = [Fault("500", method, path, float("inf"))]
    assert (BUCKET if method == "PUT" else ARCHIVE) in shell.error(*shard_command(out))
    with pytest.raises(DatasetError, match="unfinished"):
        Dataset.open(out)
    s3.faults.clear()
    shell.run(*shard_command(out))
    assert_same(out, right)


def test_a_truncated_response_is_noticed_even_if_its_stated_length_matches(s3, shell):
    for path, place in (("csv", ARCHIVE), ("HR00001.hea", ARCHIVE), ("00000.parquet", BUCKET)):
        s3.faults = [Fault("lie", "GET", f"{path}$", float("inf"))]
        line = shell.error(*shard_command(f"{BUCKET}/{path}"))
        assert re.search(rf"{place}/.*{path}.*\d of \d+ bytes arrived", line)


@pytest.mark.parametrize("path", ["00001.tar$", "store.zarr/c/0/0/0$", "dataset.json$"])
def test_a_killed_upload_can_be_finished(s3, small, right, tmp_path, path):
    """An unfinished dataset is recognized as such; another run finishes it and removes the killed
    run's temporary files."""
    out, log = f"{BUCKET}/made", tmp_path / "output"
    fault = Fault("kill", "PUT", path)
    s3.faults = [fault]
    fault.victim = started(build_small, str(small), out, out=log, env=dict(os.environ))
    fault.victim.join()
    assert fault.victim.exitcode == -9 and not fault.times
    with pytest.raises(DatasetError, match="unfinished"):
        Dataset.open(out)
    build(small, out, format="both")
    assert s3_files(out) == files(Path(right.root.url))
    assert list(tmp_path.glob("omnilead-*/*")) == []


def test_the_working_folder_is_nobody_elses(tmp_path, monkeypatch):
    """Its name can be foreseen: whoever puts a link there must not choose which files are removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place, victim = folder("s3://b/made"), tmp_path / "victim"
    ours = place.workdir()
    assert ours.parent == tmp_path and ours.stat().st_mode & 0o777 == 0o700
    assert place.workdir() == ours  # of a run before
    (victim / "tmp").mkdir(parents=True)
    (victim / "tmp" / "thesis").write_text("unique")

    def refused(why):
        with (
            pytest.raises(StorageError, match=f"{why}.*: remove it, or set TMPDIR") as caught,
            lock_folder(place),
        ):
            raise AssertionError
        assert str(ours) in str(caught.value) and (victim / "tmp" / "thesis").exists()

    shutil.rmtree(ours)
    ours.symlink_to(victim)
    refused("is a link or a file")
    ours.unlink()
    ours.symlink_to(tmp_path / "nowhere")
    refused("is a link or a file")
    ours.unlink()
    ours.write_text("")
    refused("is a link or a file")
    ours.unlink()
    ours.mkdir()
    ours.chmod(0o777)
    refused("is open to other users")
    if os.getuid() == 0:  # only root can give a folder away
        ours.chmod(0o700)
        os.chown(ours, 12345, 12345)
        refused("belongs to another user")


def build_small(source, out):
    tempfile.tempdir = None  # TMPDIR is the test's
    plan.SHARD_CROPS = 3
    build(source, out, format="both")


def test_names_are_listed_in_the_same_order_as_on_a_disk(s3, tmp_path):
    """The order of records is part of the plan: it may not depend on where the archive lies."""
    remote, local = folder(f"{BUCKET}/tree"), folder(tmp_path / "tree")
    for name in ("b/2", "b/1", "a", "c", "b.x", "b/c/d", "B/z", "b-/q", "aa/b/c", "a0"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(b"x")
        remote.write(name, b"x")
    for below in ((), ("b",)):
        assert list(remote.names(*below)) == list(local.names(*below))
    assert remote.children() == local.children()


def test_broken_records_are_refused_as_on_a_disk(s3, small, tmp_path):
    """An empty header, an empty signal and a missing signal: three rows in rejects.csv; other
    records are read."""
    broken = tmp_path / "archive"
    shutil.copytree(small, broken)
    first, second, third = sorted(broken.rglob("*_HR*.hea"))[:3]
    first.write_bytes(b"")
    second.with_suffix(".mat").write_bytes(b"")
    third.with_suffix(".mat").unlink()
    upload(broken, f"{BUCKET}/broken")
    local, remote = build(broken, tmp_path / "made"), build(f"{BUCKET}/broken", f"{BUCKET}/made")
    rejects = local.root.read("rejects.csv", 10**6)
    assert rejects == remote.root.read("rejects.csv", 10**6)
    assert all(path.stem in rejects.decode() for path in (first, second, third))


def test_a_zip_gives_the_same_bytes_as_on_a_disk(s3, small, right, tmp_path):
    """Alone, and in a folder."""
    shutil.make_archive(str(tmp_path / "zips" / "z"), "zip", small)
    upload(tmp_path / "zips", f"{BUCKET}/zips")
    build(f"{BUCKET}/zips/z.zip", f"{BUCKET}/made", format="both")
    assert s3_files(f"{BUCKET}/made") == files(Path(right.root.url))
    build(f"{BUCKET}/zips", f"{BUCKET}/made2", format="both")
    assert s3_files(f"{BUCKET}/made2") == files(Path(right.root.url))


def test_a_dataset_from_another_as_on_a_disk(s3, small, tmp_path):
    synthesise(tmp_path / "more", patients=3, two_sessions=1, seed=8, progress=False)
    made = []
    for out in (str(tmp_path / "out"), f"{BUCKET}/out"):
        old = build(small, f"{out}-old")
        (tmp_path / "w").write_text(old.column("patient")[-1])
        sources = [*open_sources(f"{out}-old"), *open_sources(str(tmp_path / "more"))]
        leave_out = LeaveOut.read(str(tmp_path / "w"), None)
        made.append(shard(sources, ShardOptions(out, quiet=True, leave_out=leave_out)))
    assert len(made[1]) > len(old) and made[1].fingerprint == made[0].fingerprint
    assert s3_files(f"{BUCKET}/out") == files(tmp_path / "out")


def test_wrong_addresses_fail(s3, small, shell, tmp_path):
    nothing = f"{BUCKET}/nothing"
    for url in ("s3://no-such-bucket/x", nothing, "s3://", "s3:///x", "nosuch://x/y", "http://"):
        shell.error("shard", url, "--out", tmp_path / "made")
        shell.error("verify", url)
        shell.error("show", url)
        if url != nothing:
            shell.error("shard", small, "--out", url, "--workers", 1)


def test_a_store_that_does_not_answer_gives_an_error_after_retries(another_client, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    another_client()
    with pytest.raises(StorageError, match="after 6 tries"):
        open_sources(ARCHIVE)
