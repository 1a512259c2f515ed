"""An append or a removal that does not end: a whole dataset, and the next run gives the same bytes."""

import fcntl
import os
import shutil
from functools import partial

import pytest
from handmade import build, files, flip
from listed import dies_at_once, listed, remove_listed

from omnilead.data_tools.dataset import META, REJECTS, SAMPLES, Dataset
from omnilead.data_tools.io.errors import DataError
from omnilead.data_tools.io.storage import LocalFolder
from omnilead.data_tools.sharding.finishing import rejects_of
from omnilead.data_tools.sharding.removal import remove
from omnilead.data_tools.sharding.verify import verify

pytestmark = pytest.mark.usefixtures("small_shards")


def fails_at(monkeypatch, at):
    """The `at`-th change of the disk fails before it is made. -> how many there were."""
    calls = []

    def counted(name):
        real = getattr(LocalFolder, name)

        def call(self, *arguments):
            calls.append(name)
            if len(calls) == at:
                raise KeyboardInterrupt
            return real(self, *arguments)

        monkeypatch.setattr(LocalFolder, name, call)

    for name in ("write", "publish", "patch", "remove"):
        counted(name)
    return calls


def killed_before_each_write(begin, change, tmp_path):
    """Copies of a dataset after a change that was killed before its first write, its second, and so on.
    Whoever takes one repeats the change: then it must have the same bytes as one that nobody killed."""
    right = tmp_path / "right"
    shutil.copytree(begin, right)
    with pytest.MonkeyPatch.context() as patch:
        calls = fails_at(patch, 0)
        change(right)
    for at in range(1, len(calls) + 1):
        out = tmp_path / str(at)
        shutil.copytree(begin, out)
        with pytest.MonkeyPatch.context() as patch:
            fails_at(patch, at)
            with pytest.raises(KeyboardInterrupt):
                change(out)
        yield out
        assert files(out) == files(right), at
        shutil.rmtree(out)


def test_an_append_that_is_killed_before_any_write_can_be_repeated(old, more, tmp_path):
    append, was = partial(build, more, append=True), Dataset.open(str(old))
    for out in killed_before_each_write(old, append, tmp_path):
        check_whole(out, was)
        append(out)


def test_a_removal_that_is_killed_before_any_write_can_be_repeated(
    grown, more, withdrawn, tmp_path
):
    def removal(out):
        remove(str(out), str(withdrawn))

    was = Dataset.open(str(grown))
    for out in killed_before_each_write(grown, removal, tmp_path):
        if check_whole(out, was) == was.version:
            removal(out)
        elif (out / ".build").exists():
            build(more, out, append=True)


def test_an_append_that_only_refuses_and_is_killed_can_be_repeated(tmp_path):
    made = listed(tmp_path / "old", a=("mine", "one", 1))
    append = partial(listed, append=True, a=("mine", "two", 2))
    for out in killed_before_each_write(tmp_path / "old", append, tmp_path):
        check_whole(out, made)
        append(out)


def check_whole(out, was):
    """It can be read, and is what it was, or a new version. -> its version"""
    found = Dataset.open(str(out))
    assert found.table().equals(was.table()) or found.version > was.version
    found.read(0), rejects_of(found)
    return found.version


def changes(out, archive, file):
    """An append to a dataset, and a removal from one that has grown."""
    return partial(build, archive, out, append=True), partial(remove, str(out), str(file))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("at", [SAMPLES, REJECTS, META, "README.md"])
def test_a_full_disk_leaves_the_old_version(
    at, which, old, grown, more, withdrawn, tmp_path, monkeypatch
):
    out, real = tmp_path / "out", os.replace

    def full(source, to):
        if str(to) == str(out / at):
            raise OSError(28, os.strerror(28))
        real(source, to)

    shutil.copytree((old, grown)[which], out)
    was = Dataset.open(str(out)).table()
    change = changes(out, more, withdrawn)[which]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises((DataError, OSError), match="No space left"):
            change()
    assert Dataset.open(str(out)).table().equals(was)
    change()
    assert verify(Dataset.open(str(out))) == []


def test_a_second_run_is_refused(grown, more, withdrawn, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(grown, out)
    (out / ".build/tmp").mkdir(parents=True)
    with open(out / ".build/lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for change in (*changes(out, more, withdrawn), partial(build, more, out)):
            with pytest.raises(DataError, match="another run is writing there"):
                change()


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("at", ["shard.finish", "finishing.fingerprint", "finishing.write_card"])
def test_nothing_is_left_of_an_append_that_was_killed_and_given_up(
    append, at, tmp_path, monkeypatch, capsys
):
    made = listed(tmp_path, a=("ptb-xl", "one", 1))
    was = files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(f"omnilead.data_tools.sharding.{at}", dies_at_once)
        with pytest.raises(KeyboardInterrupt):
            listed(tmp_path, append=True, b=("ptb-xl", "two", 2))
    assert "not a part of the dataset" in str(verify(made))
    listed(tmp_path, append=append, a=("ptb-xl", "one", 1))
    assert files(tmp_path) == was
    assert ("is undone; README.md is written again" in capsys.readouterr().err) == (
        at != "shard.finish"
    )


@pytest.mark.parametrize("deleted", ["", META, SAMPLES])
def test_whoever_is_removed_next_a_killed_removal_ends(deleted, tmp_path, monkeypatch):
    out = tmp_path / "out"
    listed(out, **{f"r{i}": ("ptb-xl", f"who{i}", i) for i in range(3)})
    with monkeypatch.context() as patch:
        patch.setattr("omnilead.data_tools.sharding.removal.remove_traces", dies_at_once)
        with pytest.raises(KeyboardInterrupt):
            remove_listed(out, "who0")
    assert "versions/1: not a part of the dataset" in str(verify(Dataset.open(str(out))))
    if deleted:
        (out / "versions/1" / deleted).unlink()
    assert list(remove_listed(out, "who1").column("record")) == ["r2"]
    assert not list(out.glob("versions/*"))


def test_damaged_tables_of_earlier_versions_are_found(grown, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(grown, out)
    flip(out / "versions/1" / SAMPLES, 300)
    found = verify(Dataset.open(str(out)), fast=True)
    assert "versions/1/samples.parquet: fails its sha256" in str(found)
