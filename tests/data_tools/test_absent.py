"""Records that a table of the archive lists, and whose files are not there: a copy that broke off must
not pass as the whole archive."""

import pickle
import shutil

import numpy as np
import pytest
from handmade import ecg, rejected, write_challenge, write_files
from test_left_out import plain
from twins import EXAMS, write_code15, write_mimic, write_ptbxl, write_quality

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io.errors import MISSING_FILE, DataError, ReadError
from omnilead.data_tools.sharding.finishing import read_rejects
from omnilead.data_tools.sources.base import absent_key, read_safely
from omnilead.data_tools.sources.detect import open_sources
from omnilead.downstream import predict
from tests.conftest import save_model


def ptbxl(root):
    write_ptbxl(root, {number: {} for number in (1, 2, 1500, 12001, 20999)})
    shutil.rmtree(root / "records500/12000")
    for path in (root / "records500").rglob("*"):
        if path.stem in ("00002_hr", "01500_hr", "20999_hr"):
            path.unlink()
    return (
        "ptb-xl",
        1,
        {
            "HR00002": "records500/00000/00002_hr.hea: listed in ptbxl_database.csv",
            "HR01500": "records500/01000/01500_hr.hea: listed in ptbxl_database.csv",
            "HR12001": "records500/12000/12001_hr.hea: listed in ptbxl_database.csv",
            "HR20999": "records500/20000/20999_hr.hea: listed in ptbxl_database.csv",
        },
    )


def mimic(root):
    write_mimic(root, {"41420867": "10001725", "41420868": "10001725", "41420869": "10001726"})
    shutil.rmtree(root / "files/p1000/p10001726")
    shutil.rmtree(root / "files/p1000/p10001725/s41420868")
    place = "files/p1000/p1000172"
    return (
        "mimic-iv-ecg",
        1,
        {
            "41420868": f"{place}5/s41420868/41420868.hea",
            "41420869": f"{place}6/s41420869/41420869.hea",
        },
    )


def code15(root):
    write_code15(root, EXAMS, parts=2)
    (root / "exams_part1.hdf5").unlink()
    names = [str(exam) for exam in list(EXAMS)[1::2]]
    return "code15", 2, {name: f"{name}: listed in exams.csv" for name in names}


def challenge(root):
    """The lists are as PhysioNet's: names of records, or of folders."""
    for folder, name in (("georgia/g1", "E00001"), ("georgia/g1", "E00002")):
        write_challenge(root / "training" / folder, name, ecg(seed=int(name[1:])))
    write_files(
        root,
        {
            "RECORDS": "training/georgia/g1/\ntraining/georgia/g2/\nrecords100/00000/00001_lr\n",
            "training/georgia/RECORDS": "g1/\r\n",
            "training/georgia/g1/RECORDS": "E00001\nE00002\n\nE00003\n",
        },
    )
    return (
        "georgia",
        2,
        {
            "E00003": "training/georgia/g1/E00003.hea: listed in training/georgia/g1/RECORDS",
            "g2": "training/georgia/g2: listed in RECORDS",
        },
    )


def quality(root):
    made = {"1002603": ecg(seed=1), "1005639": ecg(seed=2), "1007823": ecg(seed=3)}
    write_quality(root / "set-a", made, acceptable=["1002603"], unacceptable=[])
    for path in (root / "set-a").glob("1007823*"):
        path.unlink()
    return "physionet2011", 2, {"1007823": "set-a/1007823.hea: listed in set-a/RECORDS"}


def wfdb(root):
    plain(root / "patient1", 2)
    (root / "RECORDS").write_text("patient1/00000_hr\npatient1/00001_hr\npatient2/00000_hr\n")
    return "wfdb", 2, {"00000_hr": "patient2/00000_hr.hea: listed in RECORDS"}


ARCHIVES = [ptbxl, mimic, code15, challenge, quality, wfdb]


@pytest.mark.parametrize("write", ARCHIVES)
def test_rows_without_a_file_are_counted_named_and_listed(write, tmp_path, shell):
    source, there, absent = write(tmp_path / "a")
    said = shell.shard(tmp_path / "a", tmp_path / "out", "--strict", code=2)
    made = Dataset.open(str(tmp_path / "out"))
    assert f"--strict: {len(absent)} records were refused" in said
    (facts,) = made.meta["sources"]
    counts = {"seen": there + len(absent), "used": there, "refused": len(absent)}
    assert (facts["name"], facts["records"]) == (source, counts)
    listed = {
        (of, name): detail for of, name, why, detail in read_rejects(made) if why == MISSING_FILE
    }
    assert set(listed.values()) == set(absent.values())
    if source != "wfdb":
        assert {name for _, name in listed} == set(absent)
    first = ", ".join(sorted(name for _, name in listed)[:3])
    count = f"files of {len(absent)} record{'s' * (len(absent) > 1)} are missing"
    more = ", ..." * (len(absent) > 3)
    end = f"({first}{more}): is the copy complete?"
    assert f"note: {source}: {count} {end} rejects.csv lists them\n" in said
    said = shell.verify(tmp_path / "out", tmp_path / "a")
    assert f"note: {tmp_path / 'a'}: {count} (" in said


@pytest.mark.parametrize(
    ("write", "part", "name"),
    [(challenge, "training/georgia", "E00003"), (quality, "set-a", "1007823")],
)
def test_also_where_src_is_one_folder_of_an_archive(write, part, name, tmp_path, shell):
    write(tmp_path / "a")
    shell.shard(tmp_path / "a" / part, tmp_path / "out")
    assert rejected(Dataset.open(str(tmp_path / "out"))) == [(name, MISSING_FILE)]


@pytest.mark.parametrize("write", [ptbxl, challenge])
def test_also_from_a_zip_and_with_more_processes(write, tmp_path, shell):
    _, _, absent = write(tmp_path / "a")
    shutil.make_archive(tmp_path / "z" / "a", "zip", tmp_path, "a")
    for name, place, workers in (("out", "a", "1"), ("z-out", "z/a.zip", "2")):
        words = ("shard", tmp_path / place, "--out", tmp_path / name, "--workers", workers)
        assert f"files of {len(absent)} records are missing" in shell.run(*words)[1]
    folder, zipped = (Dataset.open(str(tmp_path / name)) for name in ("out", "z-out"))
    assert folder.fingerprint == zipped.fingerprint
    assert rejected(folder) == rejected(zipped)


@pytest.mark.parametrize("write", ARCHIVES)
def test_an_archive_whose_rows_all_have_files_is_as_before(write, tmp_path, shell):
    """The same bytes as without what its tables say of other records."""
    source, _, _ = write(tmp_path / "a")
    shell.shard(tmp_path / "a", tmp_path / "half", "--plan", "all")
    whole = (tmp_path / "a").rename(tmp_path / "whole")
    for path in whole.rglob("RECORDS"):
        path.unlink()
    for name in ("ptbxl_database.csv", "exams.csv", "record_list.csv"):
        if (table := whole / name).exists():
            head, first, *rest = table.read_text().splitlines()
            rest = [line for line in rest if source == "code15" and line.startswith("168405")]
            table.write_text("\n".join([head, first, *rest, ""]))
    assert "missing" not in shell.shard(whole, tmp_path / "out", "--plan", "all", "--strict")
    both = [Dataset.open(str(tmp_path / name)) for name in ("half", "out")]
    first, second = (one.column("waveform") for one in both)
    np.testing.assert_array_equal(np.sort(first), np.sort(second))


def test_with_a_key_no_message_names_a_record(tmp_path, key_file, shell):
    _, _, absent = ptbxl(tmp_path / "a")
    hidden = ("--pseudonymize", key_file)
    said = shell.shard(tmp_path / "a", tmp_path / "out", *hidden)
    said += shell.verify(tmp_path / "out", tmp_path / "a", *hidden)
    assert said.count("files of 4 records are missing") == 2
    rejects = (tmp_path / "out" / "rejects.csv").read_text()
    assert not [name for name in absent if name in said or name in rejects]


def test_predict_says_it_as_well(tmp_path, capsys):
    ptbxl(tmp_path / "a")
    head = {"task": "diagnosis", "kind": "multilabel", "classes": ["AF"], "thresholds": [0.5]}
    model = str(save_model(tmp_path / "model", head=head))
    words = ["--model", model, "--data", str(tmp_path / "a"), "--out", str(tmp_path / "p.csv")]
    assert predict.main(words) == 0
    note = (
        f"note: {tmp_path / 'a'}: files of 4 records are missing (HR00002, HR01500, HR12001, ...): "
    )
    assert note in capsys.readouterr().err


def test_what_was_absent_can_be_added_later(tmp_path, shell):
    ptbxl(tmp_path / "a")
    out = tmp_path / "out"
    shell.shard(tmp_path / "a", out, "--plan", "all")
    write_ptbxl(tmp_path / "a", {number: {} for number in (1, 2, 1500, 12001, 20999)})
    words = ("--plan", "all", "--workers", 1)
    shell.run("shard", out, tmp_path / "a", "--out", tmp_path / "new", *words)
    assert len(Dataset.open(str(tmp_path / "new"))) == 5


def test_a_listed_record_that_lies_in_another_folder_is_not_missing(tmp_path, shell):
    """It was copied later; what is in no folder stays missing."""
    for folder, names in (("first", ("E1", "E2")), ("later", ("E3",))):
        for name in names:
            write_challenge(tmp_path / folder / "training/georgia/g1", name, ecg())
    write_files(tmp_path, {"first/training/georgia/g1/RECORDS": "E1\nE2\nE3\nE4\n"})
    places = tmp_path / "first", tmp_path / "later"
    shell.run("shard", *places, "--out", tmp_path / "out", "--plan", "all", "--workers", 1)
    made = Dataset.open(str(tmp_path / "out"))
    assert rejected(made) == [("E4", MISSING_FILE)]
    assert made.meta["sources"][0]["records"] == {"seen": 4, "used": 3, "refused": 1}
    shell.run("verify", tmp_path / "out", "--archive", *places, "--workers", 1)


def test_the_key_of_an_absent_record_reaches_other_processes():
    key = pickle.loads(pickle.dumps(absent_key("a/b.hea", "RECORDS")))
    error = read_safely(str, key)
    assert isinstance(error, ReadError)
    assert (error.reason, error.detail) == (MISSING_FILE, "listed in RECORDS")


def test_a_file_called_records_in_a_folder_without_wfdb_is_no_list(tmp_path):
    write_files(tmp_path, {"RECORDS": "one\ntwo\n", "x/RECORDS": "three\n"})
    with pytest.raises(DataError, match="no known archive"):
        open_sources(str(tmp_path))


def test_a_linked_list_is_said_not_to_be_read(tmp_path, shell):
    challenge(tmp_path / "a")
    (tmp_path / "a/RECORDS").rename(tmp_path / "RECORDS")
    (tmp_path / "a/RECORDS").symlink_to(tmp_path / "RECORDS")
    why = "not a regular file: RECORDS: a link, which is not followed: not compared with the files"
    said = shell.shard(tmp_path / "a", tmp_path / "out")
    assert f"note: {tmp_path / 'a'}: {why}\n" in said
    assert rejected(Dataset.open(str(tmp_path / "out"))) == [("E00003", "missing file")]
