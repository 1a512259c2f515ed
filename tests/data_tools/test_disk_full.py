"""Without space or permission: a one-line error, no wrong file, and the same command can finish
later."""

import errno
import os
import subprocess

import pytest
from handmade import build, files

from omnilead.__main__ import main
from omnilead.data_tools.dataset import META, REJECTS, SAMPLES
from omnilead.data_tools.io.storage import LocalFolder
from omnilead.data_tools.sharding import finishing, plan
from omnilead.data_tools.sharding.data_card import CARD
from omnilead.data_tools.synth import synth


@pytest.fixture(scope="module")
def right(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("right") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 4)
        build(small, out, format="both")
    return files(out)


@pytest.fixture
def mount(tmp_path, monkeypatch):
    """A file system of its own; called again with other options, it changes them."""
    place = tmp_path / "disk"
    place.mkdir()
    monkeypatch.setattr(plan, "SHARD_CROPS", 4)

    def set_up(options):
        options = f"remount,{options}" if place.is_mount() else options
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a small file system is not allowed here: {done.stderr.strip()}")
        return place

    yield set_up
    if place.is_mount():
        # At once, though somebody may look into it just now
        subprocess.run(["umount", "--lazy", place], check=True)


def command(archive, out):
    return ("shard", archive, "--out", out, "--format", "both", "--workers", 1)


def fill(place, room):
    disk = os.statvfs(place)
    with open(place / "filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, disk.f_bavail * disk.f_bsize - room)


@pytest.mark.parametrize(
    "room",
    [
        0,
        700_000,
        2_400_000,
        "00001.idx",
        "00001.parquet",
        "zarr-00000",
        SAMPLES,
        REJECTS,
        CARD,
        META,
    ],
)
def test_a_full_disk_gives_a_one_line_error_and_leaves_no_wrong_file(
    room,
    small,
    right,
    mount,
    shell,
    monkeypatch,
):
    """After so many bytes (in the first shard, the second, the zarr twin), or when this file's turn
    comes."""
    place, write = mount("size=64m"), LocalFolder.write
    out = place / "out"

    def write_at_last(self, name, data):
        if isinstance(room, str) and name.endswith(room):
            fill(place, 0)
        write(self, name, data)

    if isinstance(room, int):
        fill(place, room)

    def samples_at_last(*arguments):
        if room == SAMPLES:
            fill(place, 0)
        return write_samples(*arguments)

    write_samples = finishing._write_samples
    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "write", write_at_last)
        patch.setattr(finishing, "_write_samples", samples_at_last)
        error = shell.error(*command(small, out))
    for words in (os.strerror(errno.ENOSPC), str(out), "writing", ": free disk space, then run"):
        assert words in error
    for name, data in files(out).items():
        assert name.startswith(".build/") or data == right[name]
    assert not (out / META).exists()
    mount("size=128m")
    shell.run(*command(small, out))
    assert files(out) == right


def test_a_read_only_disk_gives_a_one_line_error(small, mount, shell):
    """Refused before anything is read; a finished dataset there can still be verified, shown, and
    be the answer again."""
    place = mount("size=64m")
    shell.run(*command(small, place / "out"))
    mount("ro")
    error = shell.error(*command(small, place / "other"))
    assert os.strerror(errno.EROFS) in error and str(place / "other") in error
    shell.run("verify", place / "out", "--workers", 1)
    shell.run("show", place / "out")
    shell.run(*command(small, place / "out"))


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nothing", "/proc/a/b", "/dev/null"])
def test_an_invalid_path_is_a_one_line_error(out, small, shell, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    error = shell.error(*command(small, tmp_path / out))
    mend = "choose a folder" if out in ("file", "/dev/null") else "not writable: choose another"
    assert error.startswith("omnilead shard: --out ") and mend in error


def test_a_full_disk_names_the_option_that_chose_it(small, mount, shell):
    place = mount("size=1m")
    shell.run("shard", small, "--out", place.parent / "made", "--workers", 1)
    fill(place, 0)
    for words, option in (
        (("synth", place / "a"), f"OUT {place / 'a'}"),
        (("show", place.parent / "made", "--png", place / "a.png"), f"--png {place / 'a.png'}"),
    ):
        ended = main([str(word) for word in words])
        said = shell.capsys.readouterr().err.splitlines()[-1]
        mend = "No space left on device: free disk space, or choose another"
        assert (ended, said) == (2, f"omnilead {words[0]}: {option}: {mend}")
    with pytest.raises(OSError):
        synth(place / "b")
