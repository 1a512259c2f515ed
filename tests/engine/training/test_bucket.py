"""--out s3://bucket/run, in a bucket on loopback: what is uploaded, resuming elsewhere, faults of the
network, kills."""

import json
import os
import tempfile
from functools import partial, partialmethod
from itertools import count
from math import inf
from pathlib import Path

import pytest
from broken_server import Fault, Server, s3fs
from ranks import column, curve, pretrain, run, settings, tuning

from omnilead.data_tools.io import storage
from omnilead.data_tools.io.storage import RemoteFolder
from omnilead.engine.settings.run_files import LOCK
from omnilead.engine.training import checkpoint, checkpoint_files
from omnilead.engine.training.bucket import Bucket
from omnilead.engine.training.run_folder import RunFolder
from tests.waiting import until

SAVED = {"train__save_every_steps": 2, "train__validate_every": 0}


class Store:
    """An empty bucket, and machines on which a run is started with the same command."""

    def __init__(self, tmp, dataset, patch):
        self.tmp, self.dataset, self.patch = tmp, dataset, patch
        self.url = f"s3://runs-{os.path.basename(tmp)[-20:].replace('_', '-').lower()}/first"
        self.server = Server()
        self.server.start(patch)
        self.fs = s3fs.S3FileSystem(skip_instance_cache=True)
        self.fs.mkdir(self.url.rpartition("/")[0])

    def folder(self, machine):
        self.patch.setenv("TMPDIR", str(self.tmp / machine))
        self.patch.setattr(tempfile, "tempdir", None)
        (self.tmp / machine).mkdir(exist_ok=True)
        return RunFolder(self.url).path

    def train(self, machine, world=1, before=None, start=None, **changes):
        self.folder(machine)
        arguments = settings(self.tmp, self.dataset, **SAVED | changes)
        if start:
            arguments = tuning(self.tmp, self.dataset, start, "age", **changes)
        env = {}
        if world > 1 or before:
            before = partial(on_machine, before)
            env = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
            env["TMPDIR"] = os.environ["TMPDIR"]
        return run(self.tmp, [*arguments, f'run="{self.url}"'], world, before, **env)

    def files(self):
        fs = s3fs.S3FileSystem(skip_instance_cache=True)
        root = self.url.removeprefix("s3://") + "/"
        return {name.removeprefix(root) for name in fs.find(self.url)}

    def steps(self):
        return {name.split("/")[1] for name in self.files() if name.startswith("checkpoints/step")}

    def latest(self):
        fs = s3fs.S3FileSystem(skip_instance_cache=True)
        return fs.cat(f"{self.url}/checkpoints/latest").decode()


def on_machine(before):
    tempfile.tempdir = None
    storage.FIRST_WAIT_S = 0.01
    if before:
        before()


@pytest.fixture
def store(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    made = Store(tmp_path, dataset.root.url, monkeypatch)
    yield made
    made.server.stop()


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """The curve of a run that nothing has interrupted, with the same settings."""
    tmp = tmp_path_factory.mktemp("whole")
    pretrain(tmp, dataset.root.url, **SAVED).good()
    return curve(tmp / "run")


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_machine_that_has_nothing_resumes_from_the_bucket(world, store, training, tmp_path):
    how = {"train__validate_every": 1, "train__keep": 1}
    training("whole", world, **SAVED | how).good()
    said = store.train("a", world, train__steps=4, **how).good()
    assert f"{store.url}: the working folder is {store.folder('a')}, uploaded" in said
    best = checkpoint_files.checkpoint_named(store.folder("a") / "checkpoints", "best").name
    assert store.steps() == {"step-4", best} and store.latest() == "step-4"
    names = "config.yaml run.json metrics.jsonl validation.jsonl model/model.safetensors"
    assert {*names.split(), "report.html", "checkpoints/best"} <= store.files()
    local = {path.name for path in (store.folder("a") / "checkpoints/step-4").iterdir()}
    there = {name for name in store.files() if name.startswith("checkpoints/step-4/")}
    assert there == {f"checkpoints/step-4/{name}" for name in local}

    said = store.train("b", world, **how).good()
    assert "resumes after step 4" in said
    assert curve(store.folder("b")) == curve(tmp_path / "whole")
    assert column(store.folder("b"), name="validation.jsonl") == [*range(7)]
    # where the run began, the bucket is ahead
    assert "resumes after step 6" in store.train("a", world, **how).good()
    assert curve(store.folder("a")) == curve(tmp_path / "whole")


def test_fine_tuning_too(store, training, tmp_path):
    training("base", train__steps=1).good()
    store.train("a", start=tmp_path / "base", train__steps=2).good()
    assert {"seen.parquet", "model/model.safetensors"} <= store.files()
    assert "resumes after step 2" in store.train("b", start=tmp_path / "base").good()
    assert column(store.folder("b")) == [1, 2, 3, 4] and store.latest() == "step-4"


@pytest.mark.parametrize("how", ["500", "drop"])
def test_what_a_severed_connection_lost_is_uploaded_with_the_next_checkpoint(how, store, whole):
    store.server.faults += [
        Fault(how, "PUT", "step-2/", times=3),
        Fault(how, "PUT", "step-4/", inf),
    ]
    said = store.train("a", train__keep=9).good()
    (warning,) = (line for line in said.splitlines() if line.startswith("warning"))
    assert said.count("has been uploaded again") == 1
    assert "cannot upload: " in warning and "step-4/" in warning and "training goes on" in warning
    assert str(store.folder("a")) in warning
    assert store.latest() == "step-6" and store.steps() == {"step-2", "step-6"}
    assert curve(store.folder("a")) == whole


def test_what_was_not_uploaded_at_the_end_is_an_error_that_names_the_folder(store, monkeypatch):
    """The server is gone from the first checkpoint on; then there is one again."""
    send, calls, asked = Bucket._upload_changes, count(), []

    def tries(self, name, call, must_exist=False):
        asked.append(self.tries or storage.MAX_TRIES)
        return retry(self, name, call, must_exist)

    def gone(*arguments):
        if next(calls) == 0:
            store.server.stop()
            monkeypatch.setattr(RemoteFolder, "_retry", tries)
        send(*arguments)

    retry = RemoteFolder._retry
    monkeypatch.setattr(Bucket, "_upload_changes", gone)
    ended = store.train("a")
    assert ended.codes == [1] and "Traceback" not in ended.output
    lines = ended.output.splitlines()
    # It is said once; the three checkpoints and the end ask 6 times, once, once, 6 times
    assert len([line for line in lines if "training goes on" in line]) == 1
    assert asked == [storage.MAX_TRIES, 1, 1, storage.MAX_TRIES]
    assert f"all is in {store.folder('a')}" in lines[-1]
    assert (store.folder("a") / "model").is_dir()
    store.server.start(monkeypatch)
    monkeypatch.setattr(Bucket, "_upload_changes", send)
    monkeypatch.setattr(RemoteFolder, "_retry", retry)
    said = store.train("a").good()
    assert "has no checkpoint" in said and "resumes after step 6" in said
    assert store.latest() == "step-6" and "model/model.safetensors" in store.files()


def test_training_goes_on_while_a_slow_connection_uploads(store, whole, monkeypatch):
    upload, steps = RemoteFolder.upload, []

    def slow(self, path, name):
        if "step-2/mp_rank" in name:
            until(lambda: len(column(store.folder("a"))) == 4)
            steps.append(column(store.folder("a"))[-1])
            assert not any("latest" in file for file in store.files())
        upload(self, path, name)

    monkeypatch.setattr(RemoteFolder, "upload", slow)
    store.train("a").good()
    assert steps == [4] and curve(store.folder("a")) == whole


def killed_at(suffix, times):
    """When a file with such a name is written to the bucket for so many times."""
    calls = count(1)

    def deadly(self, call, *arguments):
        name = arguments[1] if isinstance(arguments[0], Path) else arguments[0]
        if name.endswith(suffix) and next(calls) == times:
            os._exit(9)
        call(self, *arguments)

    RemoteFolder.upload = partialmethod(deadly, RemoteFolder.upload)
    RemoteFolder.write = partialmethod(deadly, RemoteFolder.write)


@pytest.mark.parametrize(
    ("suffix", "complete"),
    [("state.json", 1), ("manifest.json", 1), ("latest", 2)],
)
def test_a_kill_in_an_upload_leaves_the_checkpoint_before(suffix, complete, store, whole):
    ended = store.train("a", before=partial(killed_at, suffix, 2))
    assert ended.codes == [9], ended.output
    assert store.latest() == "step-2" and store.steps() == {"step-2", "step-4"}
    manifests = [name for name in store.files() if name.endswith("manifest.json")]
    assert len(manifests) == complete
    assert "resumes after step 2" in store.train("b", train__keep=1).good()
    assert curve(store.folder("b")) == whole and store.steps() == {"step-6"}


def killed_in_a_download():
    get, calls = Bucket._download_file, count()

    def deadly(*arguments):
        if next(calls) == 2:
            os._exit(9)
        get(*arguments)

    Bucket._download_file = deadly


def test_a_kill_in_a_download_begins_it_anew(store, whole):
    store.train("a", train__steps=4).good()
    assert store.train("b", before=killed_in_a_download).codes == [9]
    assert "resumes after step 4" in store.train("b").good()
    assert curve(store.folder("b")) == whole


def test_a_damaged_checkpoint_in_the_bucket_is_named_and_the_one_before_counts(store):
    store.train("a", train__steps=4).good()
    for step in (4, 2):
        name = f"checkpoints/step-{step}/mp_rank_00_model_states.pt"
        store.fs.pipe(f"{store.url}/{name}", b"not the weights")
        ended = store.train(f"b{step}", train__steps=5)
        assert f"{name}: damaged: size or checksum" in ended.output
        if step == 4:
            assert "resumes after step 2" in ended.good() and "step-5" in store.steps()
            store.fs.rm(f"{store.url}/checkpoints/step-5", recursive=True)
        else:
            assert ended.codes == [2] and "no checkpoint is intact: begin" in ended.output


def test_of_an_amended_checkpoint_only_progress_is_uploaded(store):
    store.train("a", train__steps=2).good()
    folder = store.folder("a")
    checkpoint.amend_progress(folder / "checkpoints", {"step": 2, "stale": 1})
    store.server.log.clear()
    RunFolder(store.url).upload(3)
    put = [path for method, path, _ in store.server.log if method == "PUT" and "step-2" in path]
    assert [path.rpartition("/")[2] for path in put] == ["manifest.json", "state.json"]
    state = json.loads(store.fs.cat(f"{store.url}/checkpoints/step-2/state.json"))
    assert state["stale"] == 1


def test_a_run_that_was_started_elsewhere_since_ends(store, whole, monkeypatch):
    """It uploads nothing more, and the other goes on from what it had."""
    send, calls = Bucket._upload_changes, count()

    def second(*arguments):
        if next(calls) == 1:
            store.fs.pipe(f"{store.url}/{LOCK}", b"another")
        send(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "_upload_changes", second)
        ended = store.train("a")
    assert "started elsewhere as well" in ended.last_line(2)
    assert store.latest() == "step-2" and store.steps() == {"step-2"}
    store.train("c", train__lr=0.5).last_line(2)  # is refused, so it ends no other
    assert store.fs.cat(f"{store.url}/{LOCK}") == b"another"
    assert "resumes after step 2" in store.train("b").good()
    assert curve(store.folder("b")) == whole


def test_a_bucket_that_cannot_be_used_is_one_line(store):
    store.fs.pipe(f"{store.url}/dataset.json", b"{}")
    ended = store.train("a")
    assert f"{store.url}: is a dataset" in ended.last_line(2)
    store.url = "s3://no-such-bucket/run"
    assert "make the bucket" in store.train("a").last_line(2)
