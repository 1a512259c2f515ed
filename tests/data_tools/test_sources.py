"""Archives in the formats of real ones are read back bit for bit."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from handmade import (
    build,
    crops_of,
    ecg,
    everything_in,
    found_in,
    write_challenge,
    write_files,
)
from twins import (
    EXAMS,
    MIMIC_COLUMNS,
    PTBXL_COLUMNS,
    crop,
    read,
    said,
    write_code15,
    write_mimic,
    write_ptbxl,
    write_quality,
    write_table,
)

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg.record import LEADS, EcgRecord
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sharding.finishing import read_rejects
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources import Source
from omnilead.data_tools.sources.code15 import Code15
from omnilead.data_tools.sources.detect import AbsentKey, open_sources
from omnilead.data_tools.sources.wfdb_archives import (
    PTBXL_CSV_PATHS,
    MimicIvEcg,
    PhysioNet2011,
    PhysioNet2021,
    PtbXl,
)
from tests.tables import tabulated

# The Challenge's archive


NEW = ["# Age: 78", "# Sex: Female", "# Dx: 427393009,426783006", "# Rx: Unknown"]
OLD = ["#Age: NaN", "#Sex: Unknown", "#Dx: 426177001,", "#Rx: Unknown", "#Hx: Unknown"]
MV = "16x1+24 1000.0(0)/mv 16 0"
# One record of each way in which the databases differ: place, samples, and the rest of its header
CHALLENGE = {
    "E00001": ("georgia/g1", 5000, {"comments": NEW}),
    "E10344": ("georgia/g11", 2500, {"comments": NEW}),
    "JS45551": ("ningbo/g35", 5000, {"comments": OLD, "form": "16+24 1000/mV 16 0"}),
    "HR00011": ("ptb-xl/g1", 5000, {"comments": NEW, "form": MV}),
    "HR21837": ("ptb-xl/g22", 5000, {"comments": NEW, "form": MV}),
    "I0001": ("st_petersburg_incart/g1", 6000, {"comments": OLD, "fs": "257"}),
}


@pytest.fixture
def challenge(tmp_path):
    for seed, (name, (place, samples, how)) in enumerate(CHALLENGE.items()):
        write_challenge(tmp_path / "training" / place, name, ecg(samples, seed), **how)
    return tmp_path


def test_challenge_records_are_read_correctly(challenge):
    source = PhysioNet2021(folder(challenge))
    records = read(source)
    assert set(records) == set(CHALLENGE)
    for seed, (name, (place, samples, _)) in enumerate(CHALLENGE.items()):
        np.testing.assert_array_equal(records[name].signal, ecg(samples, seed), name)
        assert (records[name].source, records[name].warnings) == (place.partition("/")[0], ())
    assert said(records["E00001"]) == (None, 78.0, "F", ("427393009", "426783006"))
    assert said(records["JS45551"]) == (None, None, None, ("426177001",))
    assert records["I0001"].fs_hz == 257


@pytest.mark.parametrize("place", PTBXL_CSV_PATHS)
def test_patients_of_the_challenge_come_from_ptbxls_table(challenge, place):
    patients = {11: "15709.0", 21837.0: 8, 1: 9, 12: ""}
    rows = [{"ecg_id": number, "patient_id": patient} for number, patient in patients.items()]
    write_table(challenge / place, PTBXL_COLUMNS, rows)
    write_challenge(challenge / "training" / "ptb-xl" / "g1", "HR00012", ecg())
    source = PhysioNet2021(folder(challenge))
    records = read(source)
    assert records["HR00012"].warnings == ()  # its row has no patient, but it has a row
    found = {name: record.patient for name, record in records.items() if record.patient}
    assert found == {"HR00011": "15709", "HR21837": "8"}


def test_ptbxls_table_may_be_stored_elsewhere(challenge, shell, tmp_path):
    table, out = tmp_path / "elsewhere" / "my table.csv", tmp_path / "out"
    place = "records500/00000/00011_hr"
    write_table(table, PTBXL_COLUMNS, [{"patient_id": "15709.0", "filename_hr": place}])
    shell.shard(challenge / "training", out, "--patients", table)
    made = Dataset.open(str(out))
    crops = crops_of(made)
    assert crops["ptb-xl", "HR00011"][0]["patient"] == "15709"
    assert crops["ptb-xl", "HR21837"][0]["patient"] is None


@pytest.mark.parametrize("below", ["training", "training/georgia", "training/georgia/g1"])
def test_any_folder_of_the_challenge_may_be_the_root(challenge, below):
    assert read(PhysioNet2021(folder(challenge / below)))["E00001"].source == "georgia"


# The same ECGs in a release of their own


def test_ecg_arrhythmias_records_are_those_of_the_challenge(tmp_path, shell):
    """Of an ECG in both releases one is read; two headers have lost 21 characters."""
    src, out = tmp_path / "src", tmp_path / "out"
    root = src / "1.0.0"
    how = {"form": "16+24 1000/mV 16 0", "comments": OLD}
    places = {"JS00001": "01/010", "JS01052": "01/019", "JS10646": "10/106", "JS10647": "10/106"}
    for seed, (name, place) in enumerate(places.items()):
        write_challenge(root / "WFDBRecords" / place, name, ecg(seed=seed), **how)
    write_files(root, {"ConditionNames_SNOMED-CT.csv": "Acronym Name,Full Name,Snomed_CT\n"})
    damaged = root / "WFDBRecords/01/019/JS01052.hea"
    damaged.write_text(damaged.read_text().replace("5000\nJS01052.mat 16+24 1000", "500000"))
    write_challenge(src / "training/chapman_shaoxing/g1", "JS00001", ecg(seed=0), **how)
    said = shell.shard(src, out, "--plan", "all")
    assert "3 of 3 records" in said  # patients are unknown
    made = Dataset.open(str(out))
    crops = crops_of(made)
    used = [("chapman_shaoxing", "JS00001"), ("chapman_shaoxing", "JS10646"), ("ningbo", "JS10647")]
    assert sorted(crops) == used
    np.testing.assert_array_equal(crops["ningbo", "JS10647"][0]["x"], ecg(seed=3))
    assert crops["ningbo", "JS10647"][0]["dx"] == ["426177001"]
    assert {source["licence"] for source in made.meta["sources"]} == {"CC-BY-4.0"}
    assert [(reason, detail) for _, _, reason, detail in read_rejects(made)] == [
        (
            "sample count",
            "WFDBRecords/01/019/JS01052.hea: 500000/mV: only a whole number from 1 to 2000000 is read",
        ),
        ("record read already", "WFDBRecords/01/010/JS00001.hea: another JS00001 came first"),
    ]


# The Challenge 2011


@pytest.mark.parametrize("below", ["", "1.0.0", "1.0.0/set-a"])
def test_the_challenge_2011_is_read_correctly(below, tmp_path):
    ecgs = {f"100{i}": ecg(seed=i) for i in range(3)}
    write_quality(tmp_path / "1.0.0/set-a", ecgs, acceptable=["1000"], unacceptable=["1001"])
    if below != "1.0.0/set-a":
        ecgs["2000"] = ecg(seed=9)
        write_quality(tmp_path / "1.0.0/set-b", {"2000": ecgs["2000"]})
    (source,) = open_sources(str(tmp_path / below))
    assert (type(source), source.licence) == (PhysioNet2011, "ODC-By-1.0")
    records = read(source)
    assert set(records) == set(ecgs)
    for name, x in ecgs.items():
        np.testing.assert_array_equal(crop(records[name]), x)
        assert said(records[name]) == (None, None, "F", ())
        assert (records[name].source, records[name].warnings) == ("physionet2011", ())


def test_a_set_a_of_another_challenge_is_a_folder(tmp_path):
    write_quality(tmp_path / "set-a", {"1000": ecg()})
    (source,) = open_sources(str(tmp_path))
    assert source.name == "wfdb"


# PTB-XL's own release


def test_ptbxl_records_are_read_correctly(tmp_path):
    columns = ("patient_id", "sex", "age", "scp_codes", "heart_axis")
    statements = "{'AFIB': 0.0, 'CLBBB': 100.0, 'IMI': 15.0}"
    rows = {
        11: ("15709.0", 1, 300, statements, "LAD"),
        1000: ("15709.0", "0.0", "17.5", "{}", " RAD "),
        21837: ("", "", "", "", "MID"),
    }
    meant = {
        "HR00011": ("15709", 90.0, "F", ("164889003", "164909002", "39732003")),
        "HR01000": ("15709", 17.5, "M", ("47665007",)),
        "HR21837": (None, None, None, ()),
    }
    made = write_ptbxl(
        tmp_path, {number: dict(zip(columns, row, strict=True)) for number, row in rows.items()}
    )
    records = read(PtbXl(folder(tmp_path)))
    assert {name: said(record) for name, record in records.items()} == meant
    for name, x in made.items():
        np.testing.assert_array_equal(crop(records[name]), x)
        assert (records[name].source, records[name].warnings) == ("ptb-xl", ())


@pytest.mark.parametrize(
    "text",
    [
        "__import__('pathlib').Path('PWNED').touch()",
        "{'NORM': __import__('pathlib').Path('PWNED').touch()}",
        "{[]: 1}",
        "{**{}}",
        "['AFIB']",
        "{1: 2, None: 3, ('AFIB',): 4}",
        "{'AFIB': 1",
        "\0",
        "-" * 100_000 + "1",
        "(" * 100_000,
        "{'AFIB': 1}" + " " * 5000 + "; import os",
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_scp_statements_are_parsed_and_never_executed(tmp_path, monkeypatch, text):
    """A text that is no dictionary of names costs the record its diagnoses, not its ECG."""
    monkeypatch.chdir(tmp_path)
    row = {"patient_id": 3, "scp_codes": text, "heart_axis": "LAD"}
    made = write_ptbxl(tmp_path / "archive", {7: row})
    record = read(PtbXl(folder(tmp_path / "archive")))["HR00007"]
    np.testing.assert_array_equal(record.signal, made["HR00007"])
    assert record.patient == "3"
    assert record.dx in (("39732003",), ("164889003", "39732003"))
    assert not (tmp_path / "PWNED").exists()


def test_a_record_that_the_table_lacks_is_read_with_a_warning(tmp_path):
    write_ptbxl(tmp_path, {1: {}, 2: {}})
    write_table(tmp_path / "ptbxl_database.csv", PTBXL_COLUMNS, [{"ecg_id": 1, "patient_id": 5}])
    record = read(PtbXl(folder(tmp_path)))["HR00002"]
    assert (record.patient, record.warnings) == (None, (("not in ptbxl_database.csv", ""),))


@pytest.mark.parametrize("kind", ["ptbxl", "auto"])
def test_records100_alone_is_ptbxl(kind, tmp_path, shell):
    row = {"patient_id": 7, "sex": 1, "age": 60, "scp_codes": "{'AFIB': 0.0}"}
    src, out = tmp_path / "src", tmp_path / "out"
    write_ptbxl(src, dict.fromkeys((1, 2, 3), row), fs=100)
    (src / "one.dcm").touch()
    said = shell.shard(src, out, "--source", kind, "--id-share", 1)
    assert "no records500, so records100 is read" in said
    if kind == "auto":
        assert ("one", "unknown format") in {
            row[1:3] for row in read_rejects(Dataset.open(str(out)))
        }
    else:
        assert "leaves out 1 file that looks like an ECG (one.dcm)" in said
    made = Dataset.open(str(out))
    assert made.meta["sources"][0]["licence"] == PtbXl.licence
    assert made.meta["roles"]["id"]["probe"] == 1
    crops = crops_of(made)
    assert set(crops) == {("ptb-xl", f"HR0000{number}") for number in (1, 2, 3)}
    known = {"patient": "7", "fs_source_hz": 100.0, "dx": ["164889003"], "sex": "F", "halves": 2}
    for (one,) in crops.values():
        assert one | known == one


def test_500_hz_is_preferred_to_100_hz(tmp_path):
    write_ptbxl(tmp_path, {1: {}, 2: {}}, fs=100)
    write_ptbxl(tmp_path, {1: {}})
    (source,) = open_sources(str(tmp_path))
    assert [record.fs_hz for record in source] == [500.0] and source.notes() == []


def below_35_hz(crop_uv):
    """What both rates hold, without the ends."""
    spectrum = np.fft.rfft(crop_uv.astype(float))
    spectrum[:, 350:] = 0
    return np.fft.irfft(spectrum)[:, 500:-500]


def test_real_records_are_the_same_at_100_and_500_hz(real_ecgs):
    """The release's 100 Hz are 1 to 2 ms ahead of its 500 Hz, in all records alike."""
    more = real_ecgs.parent / "ecg2"
    (slow,) = open_sources(str(more / "ptbxl100"))
    originals = [*open_sources(str(more / "ptbxl500")), *open_sources(str(real_ecgs))]
    fast = {}
    for one in originals:
        there = [key for key in one.keys() if not isinstance(key, AbsentKey)]  # noqa: SIM118
        fast |= {one.name_for(key): (one, key) for key in there}
    alike = []
    for key in list(slow.keys())[::8]:
        if slow.name_for(key) in fast:
            source, other = fast[slow.name_for(key)]
            pair = (below_35_hz(crop(record)) for record in (slow.read(key), source.read(other)))
            for a, b in zip(*pair, strict=True):
                if b.std() > 5:
                    alike.append(np.corrcoef(a, b)[0, 1])
                    assert a.std() == pytest.approx(b.std(), rel=0.05)
    assert len(alike) > 12 * 30 and min(alike) > 0.97 and np.median(alike) > 0.99


# MIMIC-IV-ECG


@pytest.mark.parametrize("listed", [True, False])
def test_mimic_records_are_read_correctly(tmp_path, listed):
    patients = {"41420867": "10001725", "45090959": "10001725", "40000017": "19999987"}
    made = write_mimic(tmp_path, patients, listed)
    records = read(MimicIvEcg(folder(tmp_path)))
    for name, x in made.items():
        np.testing.assert_array_equal(crop(records[name]), x)
        assert said(records[name]) == (patients[name], None, None, ())
        assert (records[name].source, records[name].warnings) == ("mimic-iv-ecg", ())


def test_mimic_rows_that_contradict_themselves_are_refused(tmp_path):
    write_mimic(tmp_path, {"41420867": "10001725", "41420868": "10001726"})
    good = "files/p1000/p10001725/s41420867/41420867"
    other = "files/p1000/p10001726/s41420868/41420868"
    paths = [f"{other}.hea", f"/{other}", f"../{other}", f"{other[:-1]}9", "/etc/passwd", ""]
    wrong = [("10001725", other), ("", other), *(("10001726", path) for path in paths)]
    rows = [{"subject_id": subject, "path": path} for subject, path in [("10001725", good), *wrong]]
    write_table(tmp_path / "record_list.csv", MIMIC_COLUMNS, rows)
    source = MimicIvEcg(folder(tmp_path))
    first, *others = source.keys()
    assert source.read(first).patient == "10001725"
    assert len(others) == len(wrong)
    for key in others:
        with pytest.raises(ReadError, match="patient contradicts the path"):
            source.header(key)
        with pytest.raises(ReadError):
            source.read(key)


# Tables

TABLES = {
    "exams.csv": lambda root: write_code15(root, EXAMS),
    "ptbxl_database.csv": lambda root: write_ptbxl(root, {1: {}}),
    "record_list.csv": lambda root: write_mimic(root, {"41420867": "10001725"}),
}


@pytest.mark.parametrize(
    ("table", "old", "new", "message"),
    tabulated("""
exams.csv          | patient_id | patient | no column patient_id
exams.csv          |            | LONG    | field larger than
ptbxl_database.csv | s          | _       | no column heart_axis, scp_codes, sex
ptbxl_database.csv | ALL        |         | no column
record_list.csv    | _id        |         | no column subject_id
record_list.csv    |            | LONG    | field larger than
"""),
)
def test_an_unusable_table_stops_the_run_with_a_one_line_error(
    tmp_path, table, old, new, message, shell
):
    root = tmp_path / "archive"
    TABLES[table](root)
    text = (root / table).read_text()
    if new == "LONG":  # a last row with an endless cell
        text += '1,"' + "x" * 200_000
    else:
        text = text.replace(text if old == "ALL" else old, new)
    (root / table).write_text(text)
    error = shell.error("shard", root, "--out", tmp_path / "out", "--workers", 1)
    assert message in error and table in error


def test_a_truncated_table_or_one_saved_by_a_spreadsheet_is_read(tmp_path):
    write_code15(tmp_path, EXAMS)
    path = tmp_path / "exams.csv"
    table = path.read_bytes().replace(b"\r\n", b"\n").rstrip()
    path.write_bytes(b"\xef\xbb\xbf" + table + b"\n999,4")
    source = Code15(folder(tmp_path))
    keys = ("exams_part0#0", "exams_part0#1", "exams_part1#0")
    assert [source.read(key).patient for key in keys] == ["11", "11", "12"]


# A source of one's own


def test_the_custom_source_in_the_readme_works(tmp_path, shell):
    """The example in the README, word for word, through the command line."""
    readme = (Path(__file__).parents[2] / "docs" / "own_format.md").read_text()
    (example, *_) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    x = ecg(2500, 3)
    lines = [",".join(LEADS), *(",".join(map(str, row)) for row in x.T / 1000)]
    files = dict.fromkeys(("archive/one.csv", "archive/two.csv"), "\n".join(lines))
    files |= {"archive/broken.csv": "I,II\n1,x\n", "clinics.py": example}
    root = write_files(tmp_path, files)
    words = ("shard", root / "archive", "--out", root / "out", "--workers", 1)
    assert "\n1 record refused; " in shell.run(*words, "--source", f"{root}/clinics.py:Csv")[0]
    made = Dataset.open(str(tmp_path / "out"))
    assert made.meta["sources"][0]["licence"] == "internal"
    crops = crops_of(made)
    assert set(crops) == {("clinic", "one"), ("clinic", "two")}
    for rows in crops.values():
        right = crop(EcgRecord("x", x / 1000.0, 250.0, LEADS))
        np.testing.assert_array_equal(rows[0]["x"], right)
    assert read_rejects(made) == [
        ("clinic", "broken", "unreadable record", "broken.csv: ValueError")
    ]


class Named(Source):
    """Keys that are source/record."""

    def keys(self):
        return iter(["a-b/c", "a/b-c", f"{'s' * 40}/{'r' * 49}", f"{'s' * 40}/{'r' * 50}"])

    def read(self, key):
        source, name = key.split("/")
        dx = ("MI", "164889003", "heart attack") if key == "a-b/c" else ("426783006",)
        return EcgRecord(name, ecg(seed=len(key)), 500.0, LEADS, gain=1000.0, dx=dx, source=source)


def test_invalid_record_names_are_refused_and_diagnoses_without_a_code_are_dropped(tmp_path):
    made = shard([Named(folder(tmp_path))], ShardOptions(str(tmp_path / "out"), quiet=True))
    long = ("s" * 40, "r" * 50)
    assert {name: rows[0]["dx"] for name, rows in crops_of(made).items()} == {
        ("a-b", "c"): ["164889003"],
        ("s" * 40, "r" * 49): ["426783006"],
    }
    flag, *lines = sorted(read_rejects(made), key=lambda line: line[2])
    assert flag[:3] == ("a-b", "c", "diagnosis without a code")
    assert flag[3].startswith("2 ")
    assert lines == [
        (*long, "record name", f"{'/'.join(long)}: 100 characters in a shard, 99 at most"),
        ("a", "b-c", "record read already", "a/b-c: another b-c came first"),
    ]
    assert b"heart attack" not in everything_in(made)
    assert verify(made, [Named(folder(tmp_path))]) == []


# Which archive is it?


@pytest.mark.parametrize("names", [[], ["archive/notes.txt", "archive/data/readme.md"]])
def test_an_unknown_folder_is_an_error(tmp_path, names, shell):
    root = write_files(tmp_path, dict.fromkeys(names, "")) / "archive"
    for _ in range(2):
        assert str(root) in shell.error("shard", root, "--out", tmp_path / "out", "--workers", 1)
        root.mkdir(exist_ok=True)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("one.hea", "one.hea", "one.hea is a file: name the folder that it is in"),
        ("a/empty.xml", "a", "unknown format (empty.xml: the file is empty: copy it again)"),
        ("a/empty.hea", "a", "empty header (empty.hea: copy the file again)"),
        (
            "a/1009874.txt",
            "a",
            "; texts do not state their rate, leads and unit: save them as .npy (--source arrays), or "
            "read them with a file.py:Class of your own (docs/own_format.md)",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_cure(name, given, says, tmp_path, shell):
    root = write_files(tmp_path, {name: ""})
    assert says in shell.error("shard", root / given, "--out", tmp_path / "out", "--workers", 1)


# What may not leave an archive

# record: patient
PEOPLE = {"HR48213577": "982451653", "418273645": "17382946", "915273648": "615243798"}


@pytest.fixture
def private(tmp_path):
    """All tables full of secrets, and of each archive a record that is refused."""
    root = tmp_path / "archive"
    ecgs = {48213577: {"patient_id": "982451653.0"}, 48213578: {"patient_id": "982451654.0"}}
    write_ptbxl(root / "a", ecgs)
    for number in (48213578, 48213579):
        (root / f"a/records500/48213000/{number}_hr.dat").write_bytes(b"")
    write_mimic(root / "b", {"418273645": "17382946", "418273646": "17382947"})
    table = root / "b" / "record_list.csv"
    text = table.read_text()
    table.write_text(text.replace("17382947,", "17382948,") + text.splitlines()[1])
    exams = {915273648: {"patient_id": "615243798"}, 915273649: {"patient_id": "615243799"}}
    write_code15(root / "c", exams)
    with h5py.File(root / "c" / "exams_part1.hdf5", "r+") as file:
        file["tracings"][:] = 0
    comments = ["# Dx: SECRET Mr. Xavier", "# Hx: SECRET"]
    write_challenge(root / "d/training/georgia/g1", "E00001", ecg(seed=8), comments=comments)
    return root


def test_a_dataset_has_no_private_columns_of_an_archives_tables(private, tmp_path):
    made = build(private, tmp_path / "out", format="both")
    patients = {name: rows[0]["patient"] for (_, name), rows in crops_of(made).items()}
    assert patients == PEOPLE | {"E00001": None}
    known = [*PEOPLE, *PEOPLE.values(), "georgia"]  # the search finds what is there
    secrets = ["SECRET", "Xavier", "recording_date", "timey"]
    assert found_in(everything_in(made), known + secrets) == known


def test_a_pseudonymized_dataset_has_no_original_ids(private, tmp_path):
    made = build(private, tmp_path / "out", format="both", pseudonym_key=bytes(range(32)))
    assert made.meta["crops"] == 4
    ids = """48213577 48213578 48213579 982451653 982451654 418273645 418273646 17382946 17382947
    17382948 915273648 915273649 615243798 615243799 E00001 exams_part SECRET"""
    assert found_in(everything_in(made), ids.split()) == []
    assert all(re.fullmatch(r"r[0-9a-f]{20}", name) for _, name in crops_of(made))
