"""CODE-15 %: tracings in an unknown unit, and HDF5 files that are damaged or hostile."""

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from handmade import build, crops_of, rejected
from twins import EXAMS, crop, said, write_code15

from omnilead.data_tools.__main__ import main
from omnilead.data_tools.build import ShardOptions, shard
from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.record import LEADS, EcgRecord
from omnilead.data_tools.sources import open_sources
from omnilead.data_tools.sources.code15 import Code15
from omnilead.data_tools.storage import folder
from omnilead.data_tools.verify import verify


@pytest.mark.parametrize(
    ("unit", "per_mv"), [("mV", 1.0), ("0.1 mV", 10.0), ("uV", 1000.0), ("V", 0.001)]
)
def test_the_unit_of_the_tracings_is_detected(tmp_path: Path, unit: str, per_mv: float) -> None:
    made = write_code15(tmp_path, EXAMS, per_mv)
    source = Code15(folder(tmp_path))
    assert f"the unit of the tracings is {unit}," in source.notes()[0]
    keys = [key for key in source.keys() if not key.endswith("#2")]  # noqa: SIM118
    records = {record.name: record for record in map(source.read, keys)}
    assert set(records) == set(made)
    for name, mv in made.items():
        np.testing.assert_array_equal(records[name].signal, mv * np.float32(per_mv))
        in_mv = EcgRecord("x", mv.astype(float), 400.0, LEADS)
        np.testing.assert_allclose(
            crop(records[name]), crop(in_mv), rtol=0, atol=1
        )  # float32 of another unit
    assert said(records["1169160"]) == ("11", 38.0, "M", ())
    assert said(records["2873686"]) == ("12", 90.0, "F", ("270492004", "59118001", "164889003"))
    assert said(records["168405"]) == ("11", 17.0, "M", ("427084000",))
    assert said(records["271011"]) == ("13", None, None, ("164909002", "426177001"))


def test_rows_without_an_exam_are_refused_and_fillers_are_ignored(tmp_path: Path) -> None:
    write_code15(tmp_path, EXAMS)
    with h5py.File(tmp_path / "exams_part0.hdf5", "r+") as file:
        file["tracings"][0] = 0.0
        file["exam_id"][2] = (
            999  # was 0: a filler, as every part of the real archive has one at its end
        )
    with h5py.File(tmp_path / "exams_part1.hdf5", "r+") as file:
        file["tracings"][1] = np.nan
    made = shard([Code15(folder(tmp_path))], ShardOptions(str(tmp_path / "out"), quiet=True))
    flat = [("exams_part0_0", "no valid lead"), ("271011", "no valid lead")]
    assert rejected(made) == sorted([("exams_part0_2", "not in exams.csv"), *flat])
    assert {name for _, name in crops_of(made)} == {"168405", "2873686"}


def test_exam_ids_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_code15(tmp_path, EXAMS, parts=1)
    read, asked = h5py.Dataset.__getitem__, []
    monkeypatch.setattr(
        h5py.Dataset, "__getitem__", lambda self, at: asked.append(self.name) or read(self, at)
    )
    source = Code15(folder(tmp_path))
    assert len(list(map(source.read, source.keys()))) > 3
    assert asked.count("/exam_id") == 1


def test_a_damaged_chunk_refuses_only_its_exam(tmp_path: Path) -> None:
    made = write_code15(tmp_path, EXAMS, parts=1)
    path = tmp_path / "exams_part0.hdf5"
    with h5py.File(path, "r+") as file:
        tracings = file["tracings"][:]
        del file["tracings"]
        file.create_dataset(
            "tracings", data=tracings, chunks=(1, 4096, 12), compression="gzip", fletcher32=True
        )
        at = file["tracings"].id.get_chunk_info(1).byte_offset
    with open(path, "r+b") as raw:
        raw.seek(at)
        raw.write(bytes(64))
    source = Code15(folder(tmp_path))
    first, second, *_ = source.keys()
    np.testing.assert_array_equal(source.read(first).signal, made["1169160"])
    with pytest.raises(ReadError, match="unreadable file"):
        source.header(second)


@pytest.mark.parametrize("per_mv", [50.0, 1e6, 1e-6, 0.0, np.nan])
def test_an_unknown_unit_gives_a_one_line_error(
    tmp_path: Path, per_mv: float, capsys: pytest.CaptureFixture[str]
) -> None:
    write_code15(tmp_path / "archive", EXAMS, per_mv)
    assert (
        main(["shard", str(tmp_path / "archive"), "--out", str(tmp_path / "out"), "--workers", "1"])
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert "not an ECG's amplitude in any of V, mV, 0.1 mV, uV" in line
    assert not (tmp_path / "out" / "dataset.json").exists()


def _virtual(path: Path) -> None:
    layout = h5py.VirtualLayout((3, 4096, 12), np.float32)
    layout[:] = h5py.VirtualSource(str(path.parent / "exams_part1.hdf5"), "tracings", (3, 4096, 12))
    with h5py.File(path, "r+") as file:
        del file["tracings"]
        file.create_virtual_dataset("tracings", layout)


def _replace(name: str, value: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            del file[name]
            file[name] = value

    return change


def _create(
    name: str, *shape: int, group: bool = False, **options: object
) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            del file[name]
            if shape:
                file.create_dataset(name, shape, **options)
            elif group:
                file.create_group(name)

    return change


def _symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to("exams_part1.hdf5")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            _replace("tracings", h5py.ExternalLink("exams_part1.hdf5", "tracings")),
            "HDF5 points elsewhere",
        ),
        (
            _replace("exam_id", h5py.ExternalLink("nowhere.hdf5", "exam_id")),
            "HDF5 points elsewhere",
        ),
        (_replace("tracings", h5py.SoftLink("/exam_id")), "HDF5 points elsewhere"),
        (_virtual, "HDF5 points elsewhere"),
        (
            _create("tracings", 3, 4096, 12, dtype="f4", external=[("/etc/passwd", 0, 589_824)]),
            "HDF5 points elsewhere",
        ),
        (_create("tracings"), "unexpected HDF5 shape"),
        (_create("exam_id", group=True), "unexpected HDF5 shape"),
        (_create("tracings", 3, 4096, 8, dtype="f4"), "unexpected HDF5 shape"),
        (_create("tracings", 3, 4096, 12, dtype="i8"), "unexpected HDF5 shape"),
        (
            _create("tracings", 3, 10**9, 12, dtype="f4", chunks=(1, 1000, 12)),
            "unexpected HDF5 shape",
        ),
        (
            _create(
                "tracings", 3, 4096, 12, dtype="f4", chunks=(3, 4096, 12), maxshape=(None, None, 12)
            ),
            "",
        ),
        (
            _create("tracings", 2000, 4096, 12, dtype="f4", chunks=(2000, 4096, 12)),
            "unexpected HDF5 shape",
        ),
        (_create("exam_id", 4, dtype="i8"), "unexpected HDF5 shape"),
        (
            _create("exam_id", 3, dtype="i8", chunks=(2**29,), maxshape=(None,)),
            "unexpected HDF5 shape",
        ),
        (_create("exam_id", 3, dtype="f8"), "unexpected HDF5 shape"),
        (_create("exam_id", 3, dtype=h5py.string_dtype()), "unexpected HDF5 shape"),
        (lambda path: path.write_bytes(path.read_bytes()[:100_000]), "unreadable file"),
        (lambda path: path.write_bytes(b"<html>"), "unreadable file"),
        (_symlink, "not a regular file"),
    ],
)
def test_unexpected_hdf5_is_refused_and_the_other_parts_are_read(
    tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    write_code15(tmp_path, EXAMS)
    change(tmp_path / "exams_part0.hdf5")
    if reason:
        made = build(tmp_path, tmp_path / "out", plan="all")
        assert rejected(made) == [("exams_part0", reason)]
        assert {name for _, name in crops_of(made)} == {"2873686", "271011"}
        assert made.meta["sources"][0]["records"] == {"seen": 3, "used": 2, "refused": 1}
        assert verify(made, open_sources(str(tmp_path))) == []
    else:
        assert len(list(Code15(folder(tmp_path)).keys())) == 4


def test_no_damaged_byte_of_a_part_stops_the_others(tmp_path: Path) -> None:
    write_code15(tmp_path, EXAMS)
    path = tmp_path / "exams_part0.hdf5"
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    for number in range(40):
        data = bytearray(whole)
        at = int(draw.integers(0, 4096))  # HDF5's own structures, before the tracings
        data[at : at + 16] = draw.bytes(16)
        path.write_bytes(data)
        made = build(tmp_path, tmp_path / f"out{number}", plan="all")
        assert {"2873686", "271011"} <= {name for _, name in crops_of(made)}


def test_an_archive_of_which_no_part_can_be_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_code15(tmp_path / "src", EXAMS)
    for path in (tmp_path / "src").glob("*.hdf5"):
        path.write_bytes(b"<html>")
    assert main(["shard", f"{tmp_path}/src", "--out", f"{tmp_path}/out", "--workers", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "src: no part can be read (unreadable file: exams_part0.hdf5: " in line
