"""Zip archives as input: the same bytes as the unpacked archive, and every bound."""

import pickle
import shutil
import stat
import struct
import zipfile
from pathlib import Path

import pytest
from handmade import (
    build,
    ecg,
    files,
    rejected,
    write_challenge,
    write_files,
)
from twins import EXAMS, write_code15, write_mimic, write_ptbxl, write_wfdb

from omnilead.data_tools.io.errors import ReadError, StorageError
from omnilead.data_tools.sharding import plan
from omnilead.data_tools.sources import zip_folder
from omnilead.data_tools.sources.zip_folder import archive_folder_and_names, folder_or_zip
from tests.tables import tabulated

BOTH = pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])


def opened(path):
    return archive_folder_and_names(path)[0]


def zipped(root, path, top="", method=zipfile.ZIP_DEFLATED):
    """All files below `root`, in the folder `top` of the zip."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for file in sorted(root.rglob("*"), reverse=True):
            archive.write(file, Path(top) / file.relative_to(root))
    return path


def write_challenge_archive(root):
    for place in ("georgia/g1", "cpsc_2018/g1"):
        for number in range(3):
            name = f"{place[0].upper()}{number:05d}"
            write_challenge(root / "training" / place, name, ecg(seed=number + len(place)))
    (root / "training/georgia/g1/G00000.mat").unlink()  # refused


def write_ptbxl_archive(root):
    write_ptbxl(root, {1: {"patient_id": "7.0"}, 2: {"patient_id": "7.0"}})
    (root / "records500/00000/00001_hr.dat").write_bytes(b"short")


def write_plain(root):
    write_wfdb(root / "sub", "rec", "16", ("I", "II", "V1"))
    write_wfdb(root / "other", "rec", "16", ("I", "II", "V1"))
    (root / "other/orphan.hea").write_text("")


LAYOUTS = {
    "challenge": write_challenge_archive,
    "ptbxl": write_ptbxl_archive,
    "mimic": lambda root: write_mimic(root, {"41420867": "10001725", "41420868": "10001726"}),
    "plain": write_plain,
}


@BOTH
@pytest.mark.parametrize("top", ["", "x", "long-name-1.0"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bytes_as_unpacked(layout, top, method, shell, tmp_path):
    LAYOUTS[layout](tmp_path / "made")
    zipped(tmp_path / "made", tmp_path / "x.zip", top, method)
    # What unpacking makes, called as the zip; a zip of a folder of its own name is this folder
    root = tmp_path / "x"
    shutil.copytree(tmp_path / "made", root if top in ("", "x") else root / top)
    build(root, tmp_path / "right")
    shutil.rmtree(root)
    build(tmp_path / "x.zip", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "right")
    shell.verify(tmp_path / "out", tmp_path / "x.zip")


def test_zips_in_a_folder_are_folders(tmp_path):
    """Archives, plain records and what is not in a zip, with names and refusals as unpacked."""
    for name, write in (("p", write_ptbxl_archive), ("q.1", write_challenge_archive)):
        write(tmp_path / "unpacked" / name)
        zipped(tmp_path / "unpacked" / name, tmp_path / f"{name}.zip")
    (tmp_path / "zips").mkdir()
    for path in tmp_path.glob("*.zip"):
        path.rename(tmp_path / "zips" / path.name)
    build(tmp_path / "unpacked", tmp_path / "right")
    build(tmp_path / "zips", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "right")
    write_plain(tmp_path / "plain" / "a")
    write_plain(tmp_path / "plain" / "c")
    shutil.copytree(tmp_path / "plain", tmp_path / "mixed")
    zipped(tmp_path / "mixed" / "a", tmp_path / "mixed" / "a.zip")
    shutil.rmtree(tmp_path / "mixed" / "a")
    build(tmp_path / "plain", tmp_path / "right2")
    build(tmp_path / "mixed", tmp_path / "out2")
    assert files(tmp_path / "out2") == files(tmp_path / "right2")


def test_a_zip_that_was_unpacked_beside_it_is_left_out(tmp_path, capsys):
    write_plain(tmp_path / "all" / "a")
    zipped(tmp_path / "all" / "a", tmp_path / "all" / "a.zip")
    (tmp_path / "all" / "l.zip").symlink_to("a.zip")
    root = opened(tmp_path / "all")
    assert root.children() == ["a", "a.zip", "l.zip"]
    assert capsys.readouterr().err.count(".zip is left out, as it is a link or unpacked") == 2


def test_listing_is_that_of_the_unpacked_folder(tmp_path):
    names = ["b/2", "b/1", "a", "c", "b.x", "b/c/d", "B/z", "b-/q", "aa/b/c", "a0", "ä/ö", "b0/x"]
    write_files(tmp_path / "t", dict.fromkeys(names, "x"))
    zipped(tmp_path / "t", tmp_path / "z.zip")
    right, found = opened(tmp_path / "t"), opened(tmp_path / "z.zip")
    for under in ("", "b", "b/c", "ä", "a", "nothing"):
        assert list(found.names(under)) == list(right.names(under))
        assert found.exists(under) == right.exists(under)
        if (tmp_path / "t" / under).is_dir():
            assert found.children(under) == right.children(under)
    below = pickle.loads(pickle.dumps(folder_or_zip(tmp_path / "z.zip/b")))
    assert list(below.names()) == ["1", "2", "c/d"] and below.read("c/d", 9) == b"x"
    assert found.read("ä/ö", 9) == b"x"


def test_resumed_with_workers(small, tmp_path, monkeypatch):
    """A build that dies in the middle is finished by two workers, with the same bytes."""
    monkeypatch.setattr(plan, "SHARD_CROPS", 4)
    build(small, tmp_path / "right")
    source, out = zipped(small, tmp_path / "z.zip"), tmp_path / "out"
    read, left = zip_folder.ZipFolder.read, iter(range(30))

    def dies(self, *how, **more):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return read(self, *how, **more)

    monkeypatch.setattr(zip_folder.ZipFolder, "read", dies)
    with pytest.raises(KeyboardInterrupt):
        build(source, out)
    assert list(out.glob(".build/*.parquet")) and not (out / "dataset.json").exists()
    monkeypatch.setattr(zip_folder.ZipFolder, "read", read)
    build(source, out, workers=2)
    assert files(out) == files(tmp_path / "right")


def test_labels_and_show(small, shell, tmp_path):
    source = zipped(small, tmp_path / "z.zip")
    for place, out in ((small, "right"), (source, "out")):
        shell.run("labels", "physionet2021", place, "--out", tmp_path / out)
    assert files(tmp_path / "out") == files(tmp_path / "right")
    header = next(name for name in opened(source).names() if name.endswith(".hea"))
    assert "12 leads" in shell.run("show", f"{source}/{header}")[0]
    assert f"show one of its records, {source}/" in shell.error("show", source)


def test_arrays_are_refused(shell, tmp_path):
    write_code15(tmp_path / "made", EXAMS)
    source = zipped(tmp_path / "made", tmp_path / "z.zip")
    assert "unpack" in shell.error("shard", source, "--out", tmp_path / "out", "--workers", 1)
    words = ("--source", "arrays", "--fs", 500, "--unit", "mV", "--leads", 12)
    assert "unpack" in shell.error("shard", source, "--out", tmp_path / "out", *words)


# Hostile and damaged zips


@pytest.fixture
def three(tmp_path):
    """A zip of three records, a part of which is damaged by a test."""
    for number in range(3):
        write_challenge(tmp_path / "made", f"E{number:05d}", ecg(seed=number))
    return lambda method=zipfile.ZIP_DEFLATED: zipped(
        tmp_path / "made", tmp_path / "z.zip", method=method
    )


def entry_of(path, name):
    """Where its entry of the directory and its header begin."""
    data = path.read_bytes()
    place = data.rindex(name.encode()) - 46
    return place, struct.unpack_from("<L", data, place + 42)[0]


def overwrite(path, at, new):
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)


@BOTH
def test_a_flipped_byte_in_a_member_is_a_refusal(three, method, tmp_path):
    path = three(method)
    _, begin = entry_of(path, "E00001.mat")
    data = path.read_bytes()
    overwrite(path, begin + 2000, bytes([data[begin + 2000] ^ 1]))
    made = build(path, tmp_path / "out")
    assert rejected(made) == [("E00001", "damaged zip")]


@pytest.mark.parametrize(
    ("at", "new", "reason"),
    [
        (8, b"\1", "encrypted"),
        (10, b"\x0c", "zip compression"),  # bzip2
        (24, struct.pack("<L", 119_000), "damaged zip"),  # larger than its entry says
        (24, struct.pack("<L", 300_000), "file too large"),
        (16, b"\0\0\0\0", "damaged zip"),
        (38, struct.pack("<L", (stat.S_IFLNK | 0o777) << 16), "not a regular file"),
    ],
)
def test_a_member_that_is_not_read_is_a_refusal(three, at, new, reason, tmp_path):
    path = three()
    place, _ = entry_of(path, "E00001.mat")
    overwrite(path, place + at, new)
    assert rejected(build(path, tmp_path / "out")) == [("E00001", reason)]


def one_member(path, name, data=b"x", twice=False):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.hea", "x")
        archive.writestr(name, data)
        if twice:
            with pytest.warns(UserWarning, match="Duplicate"):
                archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("name", "why"),
    tabulated("""
../x   | an unsafe path
/x     | an unsafe path
a/./x  | an unsafe path
a//x   | an unsafe path
in.ZIP | another zip, which is not read
"""),
)
def test_unsafe_names_stop_the_run(name, why, shell, tmp_path):
    path = one_member(tmp_path / "z.zip", name)
    line = shell.error("shard", path, "--out", tmp_path / "out")
    assert why in line and str(path) in line


def test_a_name_that_stands_twice_stops_the_run(shell, tmp_path):
    path = one_member(tmp_path / "z.zip", "x", twice=True)
    assert "twice" in shell.error("shard", path, "--out", tmp_path / "out")


def test_truncated_or_damaged_directories_stop_the_run(three, shell, tmp_path):
    path = three()
    whole = path.read_bytes()
    for size in (0, 1, 10, len(whole) // 2, len(whole) - 1, len(whole) - 22):
        path.write_bytes(whole[:size])
        assert "download the zip again" in shell.error("shard", path, "--out", tmp_path / "out")
    path.write_bytes(whole)
    place, _ = entry_of(path, "E00001.mat")
    overwrite(path, place + 42, struct.pack("<L", 0))
    assert "overlap" in shell.error("shard", path, "--out", tmp_path / "out")
    (tmp_path / "all").mkdir()
    (tmp_path / "all/good.zip").write_bytes(whole)
    (tmp_path / "all/bad.zip").write_bytes(whole[:-30])
    assert "bad.zip" in shell.error("shard", tmp_path / "all", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_number_size_and_ratio_are_bounded(tmp_path, monkeypatch):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in "abc":
            archive.writestr(name, bytes(100_000))
    root = opened(path)
    assert root.read("a", 100_000) == bytes(100_000)
    assert root.read("a", 99, cut=True) == bytes(99)
    with pytest.raises(ReadError, match=r"^file too large: a: 100000 bytes, 99999 at most$"):
        root.read("a", 99_999)
    monkeypatch.setattr(zip_folder, "ANY_RATIO_BYTES", 1000)
    with pytest.raises(ReadError, match=r"^zip compression: a: 100000 bytes compressed to"):
        root.read("a", 100_000)
    monkeypatch.setattr(zip_folder, "MAX_MEMBERS", 2)
    zip_folder._read_index.cache_clear()
    with pytest.raises(StorageError, match=r"3 members, listed in .* bytes, but at most 2 members"):
        opened(path)


def test_zip64(tmp_path):
    """Entries and end as in a zip over 4 GiB, made by hand of a small one."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("d/a", b"first")
        archive.writestr("d/b", b"second")
    data = (tmp_path / "x.zip").read_bytes()
    begin = data.index(b"PK\1\2")
    made, places = b"", [data.index(b"PK\3\4"), data.rindex(b"PK\3\4")]
    for at, name in zip(places, (b"d/a", b"d/b"), strict=True):
        size = len(b"first" if name == b"d/a" else b"second")
        entry = bytearray(data[data.index(b"PK\1\2") :][:46])
        entry[16:20] = data[at + 14 : at + 18]
        entry[20:28], entry[42:46] = b"\xff" * 8, b"\xff" * 4
        entry[30:32] = struct.pack("<H", 8 + 28)
        extra = struct.pack("<HHL", 99, 4, 7) + struct.pack("<HH3Q", 1, 24, size, size, at)
        made += bytes(entry) + name + extra
    end = begin + len(made)
    made += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, len(made), begin)
    made += struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    made += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *[0xFFFF] * 2, *[2**32 - 1] * 2, 0)
    path = tmp_path / "z.zip"
    path.write_bytes(data[:begin] + made)
    assert zipfile.ZipFile(path).read("d/b") == b"second"
    root = opened(path)
    assert [root.read(name, 9) for name in root.names()] == [b"first", b"second"]


def test_a_table_whose_name_is_damaged_is_noticed(three, shell, tmp_path):
    write_files(tmp_path / "made", {"ptbxl_database.csv": "x"})
    path = three()
    place, _ = entry_of(path, "ptbxl_database.csv")
    overwrite(path, place + 46, b"q")
    line = shell.error("shard", path, "--out", tmp_path / "out")
    assert "the zip holds something else at this file's position" in line


def test_nothing_is_written(three):
    root = opened(three())
    for call in (lambda: root.write("x", b""), lambda: root.remove("E00001.mat"), root.workdir):
        with pytest.raises(StorageError, match="can only be read"):
            call()
