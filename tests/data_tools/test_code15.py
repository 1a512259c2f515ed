"""CODE-15 %: tracings in an unknown unit, and HDF5 files that are damaged or hostile."""

import h5py
import numpy as np
import pytest
from handmade import build, crops_of, rejected
from twins import EXAMS, crop, said, write_code15

from omnilead.data_tools.ecg.record import LEADS, EcgRecord
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.code15 import Code15
from omnilead.data_tools.sources.detect import open_sources


@pytest.mark.parametrize(
    ("unit", "per_mv"), [("mV", 1.0), ("0.1 mV", 10.0), ("uV", 1000.0), ("V", 0.001)]
)
def test_the_unit_of_the_tracings_is_detected(tmp_path, unit, per_mv):
    made = write_code15(tmp_path, EXAMS, per_mv)
    source = Code15(folder(tmp_path))
    assert f"the unit of the tracings is {unit}," in source.notes()[0]
    keys = [key for key in source.keys() if not key.endswith("#2")]  # noqa: SIM118
    records = {record.name: record for record in map(source.read, keys)}
    for name, mv in made.items():
        np.testing.assert_array_equal(records[name].signal, mv * np.float32(per_mv))
        in_mv = crop(EcgRecord("x", mv.astype(float), 400.0, LEADS))
        np.testing.assert_allclose(crop(records[name]), in_mv, rtol=0, atol=1)  # float32
    assert {name: said(record) for name, record in records.items()} == {
        "1169160": ("11", 38.0, "M", ()),
        "2873686": ("12", 90.0, "F", ("270492004", "59118001", "164889003")),
        "168405": ("11", 17.0, "M", ("427084000",)),
        "271011": ("13", None, None, ("164909002", "426177001")),
    }


def test_rows_without_an_exam_are_refused_and_fillers_are_ignored(tmp_path):
    write_code15(tmp_path, EXAMS)
    with h5py.File(tmp_path / "exams_part0.hdf5", "r+") as file:
        file["tracings"][0] = 0.0
        file["exam_id"][2] = 999  # was 0: a filler, as each part of the archive has one at its end
    with h5py.File(tmp_path / "exams_part1.hdf5", "r+") as file:
        file["tracings"][1] = np.nan
    made = shard([Code15(folder(tmp_path))], ShardOptions(str(tmp_path / "out"), quiet=True))
    assert rejected(made) == [
        ("271011", "no valid lead"),
        ("exams_part0_0", "no valid lead"),
        ("exams_part0_2", "not in exams.csv"),
    ]
    assert {name for _, name in crops_of(made)} == {"168405", "2873686"}


def test_exam_ids_are_read_once(tmp_path, monkeypatch):
    write_code15(tmp_path, EXAMS, parts=1)
    read, asked = h5py.Dataset.__getitem__, []
    spy = lambda self, at: asked.append(self.name) or read(self, at)  # noqa: E731
    monkeypatch.setattr(h5py.Dataset, "__getitem__", spy)
    assert len(list(Code15(folder(tmp_path)))) > 3 and asked.count("/exam_id") == 1


def test_a_damaged_chunk_refuses_only_its_exam(tmp_path):
    made = write_code15(tmp_path, EXAMS, parts=1)
    path = tmp_path / "exams_part0.hdf5"
    with h5py.File(path, "r+") as file:
        data = file["tracings"][:]
        del file["tracings"]
        how = {"chunks": (1, 4096, 12), "compression": "gzip", "fletcher32": True}
        tracings = file.create_dataset("tracings", data=data, **how)
        at = tracings.id.get_chunk_info(1).byte_offset
    with path.open("r+b") as raw:
        raw.seek(at)
        raw.write(bytes(64))
    source = Code15(folder(tmp_path))
    first, second, *_ = source.keys()
    np.testing.assert_array_equal(source.read(first).signal, made["1169160"])
    with pytest.raises(ReadError, match="unreadable file"):
        source.header(second)


@pytest.mark.parametrize("per_mv", [50.0, 1e6, 1e-6, 0.0, np.nan])
def test_an_unknown_unit_gives_a_one_line_error(tmp_path, per_mv, shell):
    write_code15(tmp_path / "archive", EXAMS, per_mv)
    line = shell.error("shard", tmp_path / "archive", "--out", tmp_path / "out", "--workers", 1)
    assert "for ECGs in any of the units V, mV, 0.1 mV, uV" in line
    assert not (tmp_path / "out" / "dataset.json").exists()


PART = "exams_part0.hdf5"
SHAPE = (3, 4096, 12)


def put(name, value):
    def change(path):
        with h5py.File(path, "r+") as file:
            del file[name]
            file[name] = value

    return change


def create(name, shape=SHAPE, dtype="f4", **how):
    """Another dataset in place of one."""

    def change(path):
        with h5py.File(path, "r+") as file:
            del file[name]
            file.create_dataset(name, shape, dtype, **how)

    return change


def drop(path):
    with h5py.File(path, "r+") as file:
        del file["tracings"]


def group(path):
    with h5py.File(path, "r+") as file:
        del file["exam_id"]
        file.create_group("exam_id")


def virtual(path):
    drop(path)
    layout = h5py.VirtualLayout(SHAPE, np.float32)
    layout[:] = h5py.VirtualSource(str(path.parent / "exams_part1.hdf5"), "tracings", SHAPE)
    with h5py.File(path, "r+") as file:
        file.create_virtual_dataset("tracings", layout)


def link(path):
    path.unlink()
    path.symlink_to("exams_part1.hdf5")


HOSTILE = {
    "HDF5 points elsewhere": [
        put("tracings", h5py.ExternalLink("exams_part1.hdf5", "tracings")),
        put("exam_id", h5py.ExternalLink("nowhere.hdf5", "exam_id")),
        put("tracings", h5py.SoftLink("/exam_id")),
        virtual,
        create("tracings", external=[("/etc/passwd", 0, 589_824)]),
    ],
    "unexpected HDF5 shape": [
        drop,
        group,
        create("tracings", (3, 4096, 8)),
        create("tracings", dtype="i8"),
        create("tracings", (3, 10**9, 12), chunks=(1, 1000, 12)),
        create("tracings", (2000, 4096, 12), chunks=(2000, 4096, 12)),
        create("exam_id", (4,), "i8"),
        create("exam_id", (3,), "i8", chunks=(2**29,), maxshape=(None,)),
        create("exam_id", (3,), "f8"),
        create("exam_id", (3,), h5py.string_dtype()),
    ],
    "unreadable file": [
        lambda path: path.write_bytes(path.read_bytes()[:100_000]),
        lambda path: path.write_bytes(b"<html>"),
    ],
    "not a regular file": [link],
}


@pytest.mark.parametrize(
    ("change", "reason"), [(change, reason) for reason in HOSTILE for change in HOSTILE[reason]]
)
def test_unexpected_hdf5_is_refused_and_the_other_parts_are_read(tmp_path, change, reason):
    write_code15(tmp_path, EXAMS)
    change(tmp_path / PART)
    made = build(tmp_path, tmp_path / "out", plan="all")
    lost = [("1169160", "missing file"), ("168405", "missing file")]
    assert rejected(made) == [*lost, ("exams_part0", reason)]
    assert {name for _, name in crops_of(made)} == {"2873686", "271011"}
    assert made.meta["sources"][0]["records"] == {"seen": 5, "used": 2, "refused": 3}
    assert verify(made, open_sources(str(tmp_path))) == []


def test_a_part_that_may_grow_is_read(tmp_path):
    write_code15(tmp_path, EXAMS)
    create("tracings", chunks=SHAPE, maxshape=(None, None, 12))(tmp_path / PART)
    assert len(list(Code15(folder(tmp_path)).keys())) == 4


def test_no_damaged_byte_of_a_part_stops_the_others(tmp_path):
    write_code15(tmp_path, EXAMS)
    path = tmp_path / PART
    data = path.read_bytes()
    draw = np.random.default_rng(0)
    for number in range(20):
        at = int(draw.integers(0, 4096))  # HDF5's own structures, before the tracings
        path.write_bytes(data[:at] + draw.bytes(16) + data[at + 16 :])
        made = build(tmp_path, tmp_path / f"out{number}", plan="all")
        assert {"2873686", "271011"} <= {name for _, name in crops_of(made)}


def test_an_archive_of_which_no_part_can_be_read_is_an_error(tmp_path, shell):
    write_code15(tmp_path / "src", EXAMS)
    for path in (tmp_path / "src").glob("*.hdf5"):
        path.write_bytes(b"<html>")
    line = shell.error("shard", tmp_path / "src", "--out", tmp_path / "out", "--workers", 1)
    assert f"src: none of the .hdf5 files can be read (unreadable file: {PART}: " in line
