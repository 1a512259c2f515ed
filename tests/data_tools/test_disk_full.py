"""Without space or permission: a one-line error, no wrong file, and the same command can finish
later."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from handmade import files

from omnilead.data_tools import plan
from omnilead.data_tools.__main__ import main
from omnilead.data_tools.dataset import META, REJECTS, SAMPLES
from omnilead.data_tools.storage import LocalFolder

Mount = Callable[[str], Path]


@pytest.fixture(scope="module")
def right(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("right") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 4)
        assert main(command(small, out)) == 0
    return files(out)


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    """A file system of its own; called again with other options, it changes them."""
    place = tmp_path / "disk"
    place.mkdir()
    monkeypatch.setattr(plan, "SHARD_CROPS", 4)

    def set_up(options: str) -> Path:
        options = f"remount,{options}" if place.is_mount() else options
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting a small file system is not allowed here: {done.stderr.strip()}")
        return place

    yield set_up
    if place.is_mount():
        subprocess.run(
            ["umount", "--lazy", place], check=True
        )  # at once, though somebody may look into it just now


def command(archive: Path, out: Path) -> list[str]:
    return ["shard", str(archive), "--out", str(out), "--format", "both", "--workers", "1"]


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    "room",
    [0, 700_000, 2_400_000, "00001.idx", "00001.parquet", "zarr-00000", SAMPLES, REJECTS, META],
)
def test_a_full_disk_gives_a_one_line_error_and_leaves_no_wrong_file(
    small: Path,
    right: dict[str, bytes],
    mount: Mount,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    room: int | str,
) -> None:
    """After so many bytes (in the first shard, the second, the zarr twin), or when this file's turn
    comes."""
    place = mount("size=64m")
    write = LocalFolder.write

    def write_at_last(self: LocalFolder, name: str, data: bytes) -> None:
        if isinstance(room, str) and name.endswith(room):
            fill(place, 0)
        write(self, name, data)

    if isinstance(room, int):
        fill(place, room)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "write", write_at_last)
        assert main(command(small, place / "out")) == 2
    error = one_line(capsys)
    assert all(word in error for word in (os.strerror(errno.ENOSPC), str(place / "out"), "writing"))
    for name, data in files(place / "out").items():
        assert name.startswith(".build/") or data == right[name]
    assert not (place / "out" / META).exists()
    mount("size=128m")
    assert main(command(small, place / "out")) == 0
    assert files(place / "out") == right


def fill(place: Path, room: int) -> None:
    with open(place / "filler", "wb") as filler:
        os.posix_fallocate(
            filler.fileno(), 0, os.statvfs(place).f_bavail * os.statvfs(place).f_bsize - room
        )


def test_a_read_only_disk_gives_a_one_line_error(
    small: Path, mount: Mount, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before anything is read; a finished dataset there can still be verified, shown, and
    be the answer again."""
    place = mount("size=64m")
    assert main(command(small, place / "out")) == 0
    mount("ro")
    capsys.readouterr()
    assert main(command(small, place / "other")) == 2
    error = one_line(capsys)
    assert os.strerror(errno.EROFS) in error and str(place / "other") in error
    assert main(["verify", str(place / "out"), "--workers", "1"]) == 0
    assert main(["show", str(place / "out")]) == 0
    assert main(command(small, place / "out")) == 0


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nothing", "/dev/null"])
def test_an_invalid_path_is_a_one_line_error(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert main(command(small, tmp_path / out)) == 2
    assert "omnilead shard: " in one_line(capsys)
