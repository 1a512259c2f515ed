"""Arrays of many ECGs in .npy, .npz, HDF5 and zarr, described by arrays.yaml or options."""

import json
import pickle
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zarr
from handmade import crops_of, ecg, files, rejected

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg import crops as prepare
from omnilead.data_tools.ecg.crops import CROP
from omnilead.data_tools.ecg.record import LEADS
from omnilead.data_tools.ecg.record_names import match_records
from omnilead.data_tools.ecg.record_tables import read_table
from omnilead.data_tools.io.errors import DataError, ReadError
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.shard import shard
from omnilead.data_tools.sharding.finishing import read_rejects
from omnilead.data_tools.sources.arrays import ArrayDescription, ArraySource
from omnilead.data_tools.sources.detect import open_sources
from tests.tables import tabulated

N = 6
UV = np.stack([ecg(seed=number) for number in range(N)])  # [ecgs, leads, samples]
MV = (UV / 1000).astype("f4")
FACTS = "fs_hz: 500\nunit: mV\nleads: 12\n"
PEOPLE = "id,who,years,gender,row\n" + "".join(
    f"r{i},p{i // 2},{40 + i},{'MF'[i % 2]},{N - 1 - i}\n" for i in range(N)
)
TABLE = "table: t.csv\nrecord: id\npatient: who\nage: years\nsex: gender\n"


def write(place, values, said=FACTS, name="e.npy", inside="", **others):
    place.mkdir(parents=True, exist_ok=True)
    path = place / name
    path.parent.mkdir(exist_ok=True)
    if name.endswith(".npy"):
        np.save(path, values)
    elif name.endswith(".npz"):
        np.savez_compressed(path, **{inside: values}, **others)
    elif name.endswith(".zarr"):
        zarr.save_array(path / inside, values)
    else:
        with h5py.File(path, "w") as file:
            for key, value in ({inside: values} | others).items():
                file[key] = value
    if said:
        (place / "arrays.yaml").write_text(said)
    (place / "t.csv").write_text(PEOPLE)
    return place


def made_of(place, out):
    return shard(place, out=out, plan="all", workers=1)


def opened(place, **options):
    return ArraySource(folder(place), options)


def signals(source):
    """In mV, by the record's name."""
    records = [source.read(key) for key in source.keys()]  # noqa: SIM118
    return {record.name: record.signal / record.gain for record in records}


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("e.npy", ""),
        ("e.npz", "x"),
        ("e.h5", "x"),
        ("e.hdf5", "deep/x"),
        ("e.zarr", ""),
        ("e.zarr", "x"),
    ],
)
@pytest.mark.parametrize("axes", ["leads samples", "samples leads"])
def test_every_kind_of_file_is_read_by_row(tmp_path, name, inside, axes):
    values = MV if axes.startswith("leads") else MV.swapaxes(1, 2)
    deep = f"dataset: {inside}\n" * (inside == "deep/x" or (name == "e.zarr" and inside == "x"))
    source = opened(write(tmp_path, values, FACTS + deep, name, inside))
    assert source.facts.layout == ("ecgs", *axes.split())
    found = signals(pickle.loads(pickle.dumps(source)))
    assert list(found) == [f"e_{row}" for row in range(N)]
    np.testing.assert_array_equal(np.stack(list(found.values())), MV)
    header, record = source.header(f"{name}#3"), source.read(f"{name}#3")
    assert (header.name, header.samples, header.fs_hz) == (record.name, CROP, 500.0)


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        (UV, "uV"),
        (UV, 1),
        (MV, "mV"),
        (MV / 1000, "V"),
        (UV // 5, 5),
        (UV / 100, "100"),
        (MV, 1000),
    ],
)
def test_units_give_the_same_microvolts(tmp_path, values, unit):
    write(tmp_path / "a", values, FACTS.replace("mV", str(unit)))
    made = made_of(tmp_path / "a", tmp_path / "out")
    rows = crops_of(made)
    exact = UV // 5 * 5 if unit == 5 else UV
    for number in range(N):
        np.testing.assert_array_equal(rows["arrays", f"e_{number}"][0]["x"], exact[number])
    assert rejected(made) == []


def test_one_array_needs_only_options_and_any_number_of_workers_gives_the_same(tmp_path, shell):
    write(tmp_path / "a", MV, "")
    options = ("--source", "arrays", "--fs", 500, "--unit", "mV", "--leads", ",".join(LEADS))
    for workers in ("1", "2"):
        words = ("shard", tmp_path / "a", "--out", tmp_path / workers, "--workers", workers)
        assert "patients unknown for 6 of 6 records" in shell.run(*words, *options)[1]
    assert files(tmp_path / "1") == files(tmp_path / "2")
    shell.verify(tmp_path / "1", tmp_path / "a", *options)
    shell.verify(tmp_path / "1", tmp_path / "a", code=2)  # no arrays.yaml, and no options
    same = shard(
        tmp_path / "a", out=tmp_path / "p", source="arrays", fs_hz=500, unit="mV", leads=LEADS
    )
    assert same.fingerprint == Dataset.open(str(tmp_path / "1")).fingerprint


def test_patients_of_the_table_decide_the_roles(tmp_path, shell):
    made = []
    for name, said, table in (
        ("csv", TABLE, PEOPLE),
        ("tabs", TABLE, PEOPLE.replace(",", "\t")),
        ("index", TABLE + "index: row\n", PEOPLE),
    ):
        place = write(
            tmp_path / name, MV, FACTS + TABLE * (name != "index") + said * (name == "index")
        )
        (place / "t.csv").write_text(table)
        made.append(shard(place, out=tmp_path / f"{name}-out", pretrain_sources=["all"], workers=1))
        shell.verify(tmp_path / f"{name}-out", place)
    plain, tabs, indexed = map(crops_of, made)
    assert plain.keys() == tabs.keys() == {("arrays", f"r{row}") for row in range(N)}
    for row in range(N):
        ecg_of, by_index = plain["arrays", f"r{row}"][0], indexed["arrays", f"r{row}"][0]
        facts = [ecg_of[name] for name in ("patient", "age", "sex")]
        assert facts == [f"p{row // 2}", 40 + row, "MF"[row % 2]]
        np.testing.assert_array_equal(ecg_of["x"], UV[row])
        np.testing.assert_array_equal(by_index["x"], UV[N - 1 - row])
    roles = made[0].table(["patient", "id_role"]).to_pylist()
    for patient in {row["patient"] for row in roles}:
        both = {row["id_role"] for row in roles if row["patient"] == patient}
        assert len(both) == 1 or both == {"gallery", "probe"}


def test_an_age_or_a_sex_that_is_not_understood_is_reported(tmp_path):
    place = write(tmp_path / "a", MV, FACTS + TABLE)
    (place / "t.csv").write_text(PEOPLE.replace(",41,", ",forty-one,").replace(",F", ",x"))
    made = shard(place, out=tmp_path / "out", pretrain_sources=["all"], workers=1)
    said = {reason: detail for *_, reason, detail in read_rejects(made)}
    assert said["age not understood"] == "over 3 characters" and said["sex not understood"] == "x"


def test_labels_join_by_the_names_of_the_records(tmp_path):
    write(tmp_path / "a", MV, FACTS + TABLE)
    made = shard(tmp_path / "a", out=tmp_path / "out", plan="all", workers=1)
    (tmp_path / "labels.csv").write_text("record,AF\nr4,1\nr0,0\n")
    names = made.table(["record"])["record"].combine_chunks()
    url = str(tmp_path / "labels.csv")
    found = match_records(url, read_table(url), names, names)
    assert {names[i].as_py(): row for i, row in enumerate(found.row.tolist()) if row >= 0} == {
        "r4": 0,
        "r0": 1,
    }


def test_parquet_and_columns_beside_the_array(tmp_path):
    ids, who = np.arange(100, 100 + N), np.array([f"p{i}" for i in range(N)], "S2")
    place = write(tmp_path / "h", MV, FACTS, "e.h5", "x", exam=ids, who=who, hz=np.full(N, 250.0))
    words = FACTS.replace("500", "hz") + "record: exam\npatient: who\n"
    (place / "arrays.yaml").write_text(words)
    records = [ArraySource(folder(place)).read(f"e.h5#{row}") for row in range(N)]
    found = [(record.name, record.patient, record.fs_hz) for record in records]
    assert found == [(f"{100 + i}", f"p{i}", 250.0) for i in range(N)]
    who = np.array([12345678901, 7, np.nan, 7, 7, 1e16])
    place = write(tmp_path / "f", MV, words, "e.h5", "x", exam=ids, who=who, hz=np.full(N, 250.0))
    made = made_of(place, tmp_path / "out")
    assert set(made.table()["patient"].to_pylist()) == {"12345678901", "7", None}
    assert rejected(made) == [("105", "patient id")]
    place = write(tmp_path / "p", MV, FACTS + "table: t.parquet\nrecord: id\npatient: who\n")
    pq.write_table(pa.table({"id": ids, "who": [1.0, None, 2.0] * 2}), place / "t.parquet")
    source = ArraySource(folder(place))
    assert [source.read(f"e.npy#{row}").patient for row in range(3)] == ["1", None, "2"]
    assert source.read("e.npy#5").name == "105"


def test_the_example_in_the_documentation_is_valid():
    page = (Path(__file__).parents[2] / "docs" / "arrays.md").read_text()
    facts = ArrayDescription(**yaml.safe_load(page.split("```yaml\n")[1].split("```")[0]))
    assert facts.has_many_ecgs and facts.columns.keys() == {
        "record",
        "patient",
        "age",
        "sex",
        "index",
    }
    assert not set(ArrayDescription.model_fields) - facts.model_fields_set


def test_missing_leads_padding_and_implausible_units(tmp_path):
    values = MV[:, :8].copy()
    values[0, 3] = 0.0
    values[1, 2, 77] = np.nan
    values[2] = 0.0
    values[3, :, :700] = values[3, :, 4000:] = 0.0
    names = "I, II, V1, V2, V3, V4, other, V6"
    place = write(tmp_path / "a", values, FACTS.replace("12", names) + "padding: zeros\n")
    made = made_of(place, tmp_path / "out")
    found = {name: rows[0] for (_, name), rows in crops_of(made).items()}
    assert found.keys() == {"e_0", "e_1", "e_3", "e_4", "e_5"}
    absent = ["III", "aVR", "aVL", "aVF"]
    assert found["e_4"]["missing_leads"] == [*absent, "V5"]
    assert found["e_0"]["missing_leads"] == [*absent, "V2", "V5"]
    assert found["e_1"]["missing_leads"] == [*absent, "V1", "V5"]
    assert found["e_3"]["halves"] == 1 and found["e_3"]["x"][0, 0] == UV[3, 0, 700]
    assert ("e_2", "no valid lead") in rejected(made)
    write(tmp_path / "b", MV, FACTS.replace("mV", "V"))
    made = made_of(tmp_path / "b", tmp_path / "wrong")
    assert {reason for _, reason in rejected(made)} >= {"implausible amplitude"}
    invalid = UV.copy()
    invalid[0, 0, 5] = -32768
    source = opened(write(tmp_path / "c", invalid, FACTS.replace("mV", "uV")))
    assert source.read("e.npy#0").warnings == () and source.read("e.npy#0").invalid == -32768


ORDER = FACTS.replace("12", "[I, II, III, aVR, aVF, aVL, V1, V2, V3, V4, V5, V6]")
SPH = "file: records/*.h5\ntable: metadata.csv\nrecord: ECG_ID\npatient: Patient_ID\n"
SPH += "age: Age\nsex: Sex\nname: sph\n" + FACTS
ECHONEXT = "file: EchoNext_test_waveforms.npy\nlayout: [ecgs, 1, samples, leads]\nunit: mV\n"
ECHONEXT += "fs_hz: 250\nleads: 12\nname: echonext\ntable: t.csv\nrecord: id\npatient: who\n"
CODE = (
    "file: ecg_tracings.hdf5\nfs_hz: 400\nunit: 100\nleads: 12\npadding: zeros\nname: code-test\n"
)


def test_the_layouts_of_public_sets(tmp_path):
    place = tmp_path / "sph"
    for row in range(N):
        write(place, MV[row], SPH, f"records/A{row:05d}.h5", "ecg")
    rows = "".join(f"A{row:05d},S{row // 2},{row + 60},M\n" for row in reversed(range(N)))
    (place / "metadata.csv").write_text("ECG_ID,Patient_ID,Age,Sex\n" + rows)
    made = crops_of(made_of(place, tmp_path / "sph-out"))
    assert made["sph", "A00004"][0]["patient"] == "S2" and made["sph", "A00004"][0]["age"] == 64
    np.testing.assert_array_equal(made["sph", "A00004"][0]["x"], UV[4])

    values = MV[:, np.newaxis, :, :2500].swapaxes(2, 3)
    source = opened(write(tmp_path / "echo", values, ECHONEXT, "EchoNext_test_waveforms.npy"))
    record = source.read("EchoNext_test_waveforms.npy#4")
    np.testing.assert_array_equal(record.signal, MV[4, :, :2500])
    assert (record.source, record.name, record.patient) == ("echonext", "r4", "p2")

    padded = np.zeros((N, 4096, 12), "f4")
    padded[:, 48:4048] = MV[:, :, :4000].swapaxes(1, 2) * 10
    source = opened(write(tmp_path / "code", padded, CODE, "ecg_tracings.hdf5", "tracings"))
    assert source.header("ecg_tracings.hdf5#2").samples == 4000
    found = signals(source)["ecg_tracings_2"]
    np.testing.assert_allclose(found, MV[2, :, :4000], rtol=1e-6)

    ikem = (UV[:, [0, 1, *range(6, 12)], :4096] / 4.88).round().astype("i2").swapaxes(1, 2)
    said = "file: '*.hdf5'\nfs_hz: 500\nunit: 4.88\nleads: I,II,V1,V2,V3,V4,V5,V6\n"
    said += "dataset: tracings\nrecord: exam_id\nname: ikem\n"
    for part in range(2):
        ids = np.arange(N) + 10 * part
        write(tmp_path / "ikem", ikem, said, f"k{part}.hdf5", "tracings", exam_id=ids, hashes=ids)
    assert list(signals(opened(tmp_path / "ikem"))) == [
        str(i + 10 * k) for k in (0, 1) for i in range(N)
    ]

    for values in (MV, MV.swapaxes(1, 2)):
        source = opened(write(tmp_path / f"m{values.shape[1]}", values, ORDER))
        assert source.read("e.npy#0").leads[4:6] == ("aVF", "aVL")


# What arrays.yaml says; a bar between it and the error, a slash between its lines
SAID = tabulated(r"""
fs_hz: 500 / leads: 12                   | unit: Field required: mV, uV, V, or how many
unit: mV / leads: 12                     | fs_hz: Field required: the sampling rate
unit: mV / fs_hz: 500                    | leads: Field required: 12
fs_hz: HZ / unit: mV / leads: 12         | a single array, which has no HZ
fs_hz: 0 / unit: mV / leads: 12          | sampling rate: 0.0 Hz: 50 to 2000
fs_hz: 500 / unit: UNIT / leads: 12      | unknown unit: 'UNIT'
fs_hz: 500 / unit: 0 / leads: 12         | unit: 0 is not a positive number: write mV, uV
FACTS / lead: 3                          | lead: Extra inputs are not permitted: not one of file,
FACTS / 1: 3                             | arrays.yaml: 1:
FACTS / table: [a]                       | table: Input should be a valid string
FACTS / padding: ones                    | padding: Input should be '' or 'zeros'
FACTS / layout: [ecgs, x]                | layout: \[ecgs, x\]: name each axis of the array once: leads
FACTS / layout: leads leads samples      | each axis of the array once
FACTS / file: x.npy                      | file: x.npy: no file has this name
FACTS / file: ../t/e.npy                 | not a regular file: ../t/e.npy
FACTS / dataset: x                       | a single array, which has no x
FACTS / table: no.csv / patient: who     | not a regular file: no.csv
FACTS / table: t.csv                     | arrays.yaml names none of its columns: add `patient: COLUMN`
FACTS / table: t.csv / patient: x        | t.csv: no column x: the table has id, who, years
FACTS / TABLE / index: who               | who: 3 different values in 6 rows: each row needs
- a                                      | write one `name: value` on each line
a: [                                     | is not valid YAML: while parsing
a: !!bool x                              | is not valid YAML: 'x'
""")
SQUARE = np.zeros((N, 12, 12), "f4")
NEEDED = r"needs arrays.yaml .* for e.npy, float32 \[6, 12, 5000\], is \{file: e.npy, fs_hz: "
BOTH = r"\[6, 12, 12\] with 12 leads fits both layout: \[ecgs, leads, samples\] and "
NEITHER = r"\[6, 8, 5000\] with 12 leads fits neither layout: .* nor layout: "
REFUSED = [
    ("", {}, MV, NEEDED),
    ("", {"fs_hz": "500", "leads": "12"}, MV, r"unit: UNIT, leads: 12\}"),
    ("", {}, MV[:, :8], r"leads: \[I, II, ...\]\}"),
    ("FACTS", {"fs_hz": "500"}, MV, "arrays.yaml describes the arrays: leave out --fs"),
    ("[" * 9000, {}, MV, "is not valid YAML: "),
    ("#" * 70_000, {}, MV, "file too large: arrays.yaml"),
    ("fs_hz: 500 / unit: mV / leads: I, I", {}, MV[:, :2], "duplicated lead: I"),
    ("fs_hz: 500 / unit: mV / leads: A, B", {}, MV[:, :2], "no known lead: A, B"),
    ("FACTS", {}, SQUARE, BOTH),
    ("FACTS", {}, MV[:, :8], NEITHER),
    (
        "FACTS",
        {},
        MV[:, None],
        r"shape \[6, 1, 12, 5000\]: name its axes in arrays.yaml, such as `layout: ",
    ),
    ("FACTS / TABLE", {}, MV[:4], "t.csv: 6 rows for 4 ECGs: add `index: COLUMN`"),
    ("FACTS / TABLE / index: row", {}, MV[:4], "index: row: 4 is not the number of an ECG: the 4 "),
    ("FACTS / table: t.csv / patient: who", {}, MV[0], "add `record: COLUMN` to arrays.yaml"),
    ("FACTS", {}, MV.astype("O"), "cannot be read as numbers"),
    *((said, {}, MV, error) for said, error in SAID),
]


@pytest.mark.parametrize(("said", "options", "values", "error"), REFUSED)
def test_what_is_not_said_or_contradicts_is_one_error(tmp_path, said, options, values, error):
    said = said.replace(" / ", "\n").replace("FACTS", FACTS).replace("TABLE", TABLE)
    write(tmp_path / "t", values, said)
    with pytest.raises(DataError, match=error) as raised:
        opened(tmp_path / "t", **options)
    assert "\n" not in str(raised.value) and str(raised.value).startswith(f"{tmp_path}/t: ")


def test_other_refusals(tmp_path, shell):
    write(tmp_path / "two", MV, "")
    np.save(tmp_path / "two" / "f.npy", MV)
    write(tmp_path / "in", MV, "", "e.h5", "x", y=MV)
    for name, error in (
        ("two", "2 files end in .npy, "),
        ("in", r"holds x \[6, 12, 5000\], y .* add `dataset: NAME`"),
    ):
        with pytest.raises(DataError, match=error):
            opened(tmp_path / name, fs_hz=500, unit="mV", leads=12)
    write(tmp_path / "two", MV, FACTS + TABLE + "file: '*.npy'\n")
    with pytest.raises(
        DataError, match=r"a table can describe only one file of many ECGs, but .* matches 2 files"
    ):
        opened(tmp_path / "two")
    fsspec.filesystem("memory").pipe("/arrays/e.npy", b"x")
    with pytest.raises(DataError, match="arrays are only read from a local disk"):
        open_sources("memory://arrays", "arrays")
    line = shell.error("shard", tmp_path / "in", "--out", tmp_path / "o", "--fs", 500)
    assert "describe arrays: add --source arrays" in line
    (tmp_path / "in" / "arrays.yaml").symlink_to("/etc/hostname")
    with pytest.raises(DataError, match="not a regular file"):
        opened(tmp_path / "in")


def test_one_bad_file_or_row_of_many_is_refused_and_the_others_are_read(tmp_path):
    place = tmp_path / "a"
    said = FACTS + "file: '*.npy'\n" + "layout: ecgs leads samples\n"
    for name, values in (("a", MV), ("b", MV[:, :8]), ("d", MV[:, :, :100]), ("n", MV[:0])):
        write(place, values, said, f"{name}.npy")
    (place / "c.npy").write_bytes(b"\x93NUMPY")
    (place / "l.npy").symlink_to("a.npy")
    made = made_of(place, tmp_path / "out")
    assert {name for _, name in crops_of(made)} == {f"a_{row}" for row in range(N)}
    refused = dict(rejected(made))
    assert (
        refused.pop("b_0") == "unexpected array shape" and refused.pop("c_0") == "unreadable file"
    )
    assert refused.pop("l_0") == "not a regular file" and set(refused.values()) == {"too short"}
    write(tmp_path / "t", MV, FACTS + TABLE)
    rows = PEOPLE.splitlines()
    rows[2] = rows[2].replace("r1", "")
    (tmp_path / "t" / "t.csv").write_text("\n".join(rows[:4] + rows[5:] + ["x/y z,,,,"]))
    (tmp_path / "t" / "arrays.yaml").write_text(FACTS + TABLE)
    source = opened(tmp_path / "t")
    with pytest.raises(ReadError, match="record name: the cell in column id is empty"):
        source.read("e.npy#1")
    assert source.read("e.npy#5").name == "x_y_z" and source.read("e.npy#5").patient is None
    (tmp_path / "t" / "arrays.yaml").write_text(FACTS + TABLE + "index: row\n")
    (tmp_path / "t" / "t.csv").write_text("\n".join(PEOPLE.splitlines()[:3]))
    with pytest.raises(ReadError, match="not in the table: no row for 0"):
        opened(tmp_path / "t").read("e.npy#0")


def test_a_changed_array_is_another_dataset_and_an_interrupted_run_goes_on(tmp_path, shell):
    write(tmp_path / "a", MV)
    for _ in range(2):
        shell.shard(tmp_path / "a", tmp_path / "out")
    for values, said in ((MV[::-1], FACTS), (MV * 2, FACTS), (MV, FACTS + TABLE)):
        write(tmp_path / "a", values, said)
        line = shell.error("shard", tmp_path / "a", "--out", tmp_path / "out", "--workers", 1)
        assert "is already finished" in line


def test_private_messages_name_no_file(tmp_path):
    write(
        tmp_path / "a",
        MV[:, :8],
        FACTS + "layout: ecgs leads samples\nrecord: x\n",
        "Smith.h5",
        "y",
    )
    with pytest.raises(DataError) as raised:
        ArraySource(folder(tmp_path / "a", private=True))
    assert "Smith" not in str(raised.value)


def zarr_says(change):
    def write_it(path):
        zarr.save_array(path, MV, zarr_format=2)
        meta = path / ".zarray"
        meta.write_text(json.dumps(json.loads(meta.read_text()) | change))

    return write_it


def zarr_link(path):
    zarr.save_array(path, MV)
    chunk = next(one for one in path.rglob("c/**/*") if one.is_file())
    chunk.unlink()
    chunk.symlink_to("/etc/hostname")


def hdf5_group_elsewhere(path):
    with h5py.File(path, "w") as file:
        file["g"] = h5py.ExternalLink("other.h5", "/")


HOSTILE = [
    (
        "e.zarr",
        "",
        zarr_says({"filters": [{"id": "pickle"}]}),
        "zarr codec: e.zarr: not supported: pickle",
    ),
    ("e.zarr", "", zarr_says({"chunks": [10**6, 12, 5000]}), "unexpected zarr shape"),
    ("e.zarr", "", zarr_link, "zarr points elsewhere"),
    ("e.zarr", "", lambda path: zarr.save_group(path, a=MV), "unreadable file"),
    ("e.zarr", "../x.zarr", lambda path: zarr.save_array(path, MV), "not a regular file"),
    ("e.h5", "g/x", hdf5_group_elsewhere, "HDF5 points elsewhere: e.h5: g/x"),
    ("e.h5", "g/x", lambda path: h5py.File(path, "w").close(), "unexpected HDF5 shape"),
    ("e.h5", "x", lambda path: path.mkdir(), "not a regular file"),
]


@pytest.mark.parametrize(("name", "inside", "make", "error"), HOSTILE)
def test_hostile_files_are_refused(tmp_path, name, inside, make, error):
    make(tmp_path / name)
    words = FACTS + f"file: {name}\ndataset: '{inside}'\nlayout: ecgs leads samples\n"
    (tmp_path / "arrays.yaml").write_text(words)
    with pytest.raises(DataError, match=error):
        next(iter(opened(tmp_path)))


def test_an_npz_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("omnilead.data_tools.io.npz.ANY_RATIO_BYTES", 1000)
    write(tmp_path, np.zeros_like(MV), FACTS, "e.npz", "x")
    with pytest.raises(DataError, match=r"more than the \d+ bytes that are accepted"):
        opened(tmp_path)


def test_what_was_understood_is_said(tmp_path, capsys):
    """A wrong rate, rows in another order and leads that are ECGs contradict nothing."""
    said = FACTS.replace("500", "250") + TABLE
    shard(write(tmp_path / "a", MV, said), out=tmp_path / "1", workers=1)
    assert (
        "[ecgs, leads, samples], 20 s long in the first file; the rows of"
        in capsys.readouterr().err
    )
    index = write(tmp_path / "b", MV, said + "index: row\n")
    (index / "t.csv").write_text(
        "".join(f"{line}.0\n" for line in PEOPLE.splitlines()).replace("row.0", "row")
    )
    made = shard(index, out=tmp_path / "2", workers=1)
    err = capsys.readouterr().err
    assert (
        len(set(made.column("record"))) == N
        and "20 s long in the first file\n" in err
        and "contradict" not in err
    )
    swapped = np.concatenate([MV, MV]).swapaxes(0, 1)
    shard(write(tmp_path / "c", swapped), out=tmp_path / "3", workers=1)
    assert "12 of 12 crops of arrays have limb leads that contradict" in capsys.readouterr().err


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("cut", ["ecgs", "samples"])
def test_an_ecg_with_a_missing_chunk_is_refused(tmp_path, zarr_format, cut):
    place = write(tmp_path / "a", MV)
    (place / "e.npy").unlink()
    chunks = (2, 12, 5000) if cut == "ecgs" else (1, 12, 2500)
    store = {"store": place / "e.zarr", "data": MV, "chunks": chunks, "zarr_format": zarr_format}
    zarr.create_array(**store)
    names = {("ecgs", 2): "1.0.0", ("ecgs", 3): "c/1/0/0"}
    names |= {("samples", 2): "2.0.1", ("samples", 3): "c/2/0/1"}
    name = names[cut, zarr_format]
    assert len(made_of(place, tmp_path / "whole")) == N
    (place / "e.zarr" / name).unlink()
    made = made_of(place, tmp_path / "out")
    lost = {"e_2", "e_3"} if cut == "ecgs" else {"e_2"}
    assert rejected(made) == [(record, "missing chunk") for record in sorted(lost)]
    assert {record for _, record in crops_of(made)} == {f"e_{row}" for row in range(N)} - lost
    assert f"e.zarr/{name}: " in read_rejects(made)[0][3]


def test_a_missing_chunk_of_shards_and_of_columns_is_no_zero(tmp_path):
    place = write(tmp_path / "a", MV, FACTS + "dataset: x\nrecord: who\n")
    (place / "e.npy").unlink()
    group = zarr.create_group(place / "e.zarr")
    group.create_array("x", data=MV, chunks=(1, 12, 2500), shards=(3, 12, 5000))
    group.create_array("who", data=np.arange(1, N + 1), chunks=(4,))
    (place / "e.zarr/x/c/1/0/0").unlink()
    source = opened(place)
    assert source.read("e.zarr#2").name == "3"
    with pytest.raises(ReadError, match=r"missing chunk: e\.zarr/x/c/1/0/0: "):
        source.read("e.zarr#3")
    (place / "e.zarr/who/c/1").unlink()
    with pytest.raises(DataError, match=r"missing chunk: e\.zarr/who/c/1: "):
        opened(place.rename(tmp_path / "b"))


def test_a_dataset_made_before_zeros_were_flagged_still_agrees_with_its_archive(
    tmp_path, shell, monkeypatch
):
    values = MV.copy()
    values[1, :, 2500:] = 0
    monkeypatch.setattr(prepare, "_has_zeros", lambda *_: False)
    made = made_of(write(tmp_path / "a", values), tmp_path / "out")
    assert rejected(made) == []
    monkeypatch.undo()
    shell.verify(tmp_path / "out", tmp_path / "a")


def test_zeros_in_all_leads_are_flagged_and_told(tmp_path, shell, capsys):
    values = MV.copy()
    values[1, :, 2500:] = 0
    made = made_of(write(tmp_path / "a", values), tmp_path / "out")
    assert rejected(made) == [("e_1", "zeros")]
    said = "1 of 6 crops of arrays are zero in all leads for half a second or more: is that right?"
    assert said in capsys.readouterr().err
    shell.verify(tmp_path / "out", tmp_path / "a")


def test_how_to_use_a_table_with_the_arrays_name_is_said(tmp_path, shell):
    place = write(tmp_path / "a", MV, "")
    place.joinpath("t.csv").rename(place / "e.csv")
    text = PEOPLE.replace("id,who,years", "record,patient,age", 1)
    (place / "e.csv").write_text(text)
    words = ("--source", "arrays", "--fs", 500, "--unit", "mV", "--leads", 12)
    said = shell.shard(place, tmp_path / "out", *words)
    note = (
        f"note: {place}: e.csv is not read: to use it, instead of --fs, --unit and --leads write "
    )
    assert said.count(note) == 1
    told = said.split(f"{note}arrays.yaml with ")[1].split("\n")[0]
    (place / "arrays.yaml").write_text(told)
    assert "is not read" not in shell.shard(place, tmp_path / "with")
    made = Dataset.open(str(tmp_path / "with"))
    assert {rows[0]["patient"] for rows in crops_of(made).values()} == {"p0", "p1", "p2"}
    assert {name for _, name in crops_of(made)} == {f"r{row}" for row in range(N)}


@pytest.mark.parametrize(("ending", "named"), [("parquet", "patient_id"), ("csv", "COLUMN")])
def test_a_table_that_arrays_yaml_does_not_name_is_told(tmp_path, ending, named):
    place = write(tmp_path / "a", MV)
    people = pa.table(
        {"exam": range(N), ("patient_id" if named == "patient_id" else "who"): range(N)}
    )
    if ending == "csv":
        (place / "e.csv").write_text("exam,who\n1,2\n")
    else:
        pq.write_table(people, place / "e.parquet")
    note = f"{place}: e.{ending} is not read: to use it, add to arrays.yaml the lines "
    assert opened(place).notes()[1] == note + f"table: e.{ending}; patient: {named}"
    private = ArraySource(folder(place, private=True)).notes()[1]
    assert (
        private == f"{place}: a table has the array's name and is not read: name it in arrays.yaml"
    )


def test_no_array_of_the_user_passes_as_synthetic(tmp_path):
    place = write(tmp_path / "a", MV, FACTS + "name: synthetic-x\n")
    with pytest.raises(
        DataError, match=r"a: name: synthetic-x: names that begin with synthetic- are"
    ):
        opened(place)
