"""A dataset without patients who withdrew their consent."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from handmade import build, ecg, files, write_challenge
from listed import Listed, listed, without

from omnilead.data_tools.dataset import REJECTS, Dataset
from omnilead.data_tools.dataset.rejects import read_rejects
from omnilead.data_tools.ecg.pseudonyms import pseudonym
from omnilead.data_tools.io.errors import DataError, ReadError, StorageError
from omnilead.data_tools.sharding.leave_out import LeaveOut
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.base import dataset_patient
from omnilead.data_tools.sources.detect import open_sources

pytestmark = pytest.mark.usefixtures("small_shards")
KEY = b"k" * 32


def bytes_of(folder):
    return b"".join(path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file())


@pytest.mark.parametrize("from_archive", [True, False])
@pytest.mark.parametrize("keyed", [True, False])
def test_nothing_is_left_of_them(from_archive, keyed, small, key_file, shell, tmp_path):
    """Of whom the file has the original ids, or those of the dataset."""
    hidden = ("--pseudonymize", key_file) if keyed else ()
    plain = build(small, tmp_path / "plain")
    patients = sorted({one for one in plain.column("patient") if one})[:2]
    shell.shard(small, tmp_path / "whole", *hidden)
    whole = Dataset.open(str(tmp_path / "whole"))
    file = tmp_path / "withdrawn.txt"
    file.write_text(f"patient\n{patients[0]}\nsynthetic-ptb-xl/{patients[1]},1\n")
    out = tmp_path / "out"
    source = small if from_archive else tmp_path / "whole"
    words = ("shard", source, "--out", out, "--leave-out-patients", file, "--workers", 1, *hidden)
    shell.run(*words)
    made = Dataset.open(str(out))
    theirs = [one in patients for one in plain.column("patient")]
    assert len(made) == len(whole) - sum(theirs) > 0 and verify(made) == []
    records = plain.column("record")[theirs]
    content = bytes_of(out)
    for name in (*patients, *records):
        assert name.encode() not in content
    gone = set(whole.column("waveform")) - set(made.column("waveform"))
    assert len(gone) == sum(theirs) and not set(made.column("waveform")) & gone
    assert made.meta["left_out_patients"] == {"asked": 2, "found": 2}
    counts = {one["name"]: one["records"] for one in made.meta["sources"]}
    assert all(one["refused"] == 0 and one["seen"] == one["used"] for one in counts.values())
    assert "already finished" in shell.run(*words)[1]
    compare = ("verify", out, "--archive", small, "--workers", 1, *hidden)
    assert shell.run(*compare, code=1)[0].count("neither in samples.parquet") == len(records)
    shell.run(*compare, "--leave-out-patients", file)


def test_others_are_as_they_would_be_without_them(tmp_path):
    records = {f"r{i}": ("ptb-xl", f"who{i // 2}", i) for i in range(12)}
    made = listed(tmp_path / "old", **records)
    left = without(made, tmp_path / "left", "who1", "who4")
    kept = {name: of for name, of in records.items() if of[1] not in ("who1", "who4")}
    right = listed(tmp_path / "right", **kept)
    columns = ["record", "patient", "pretrain", "dx_role", "id_role", "crc32c"]
    rows = (one.table(columns).to_pylist() for one in (left, right))
    first, second = (sorted(one, key=lambda row: row["record"]) for one in rows)
    assert first == second


def test_who_is_not_there_is_named_and_is_exit_code_1(tmp_path, small, shell):
    file, out = tmp_path / "w", tmp_path / "out"
    file.write_text("nobody\nsyn7_10001\n")
    words = ("shard", small, "--out", out, "--leave-out-patients", file, "--workers", 1)
    _, said = shell.run(*words, code=1)
    assert "note: 1 of these patients are in none of the sources: nobody\n" in said
    shell.run(*words, code=1)  # also when it is finished
    file.write_text("\n")
    assert "names no patient" in shell.error(*words)
    assert "no: No such file" in shell.error(*words[:4], "--leave-out-patients", tmp_path / "no")


def test_ids_that_differ_in_zeros_or_case_are_said(tmp_path, capsys):
    made = listed(tmp_path / "old", a=("mine", "007", 1), b=("mine", "ab", 2), c=("mine", "x", 3))
    without(made, tmp_path / "new", "7", "AB", "x")
    said = capsys.readouterr().err
    assert "warning: 2 patients stay whose ids differ from those given only in zeros" in said
    assert "mine/007, mine/ab" in said and "2 of these patients are in none" in said


def test_copies_of_their_ecgs_go_too(tmp_path, capsys):
    """Whoever they are said to be of, in whatever shard; the other crops of a record stay."""
    write_challenge(tmp_path / "in", "theirs", ecg(5000, 1))
    both = np.concatenate([ecg(5000, 2), ecg(5000, 1)], axis=1)
    write_challenge(tmp_path / "in", "other", both)
    for seed in range(3, 9):
        write_challenge(tmp_path / "in", f"more{seed}", ecg(5000, seed))
    names = "".join(f"more{seed},who{seed}\n" for seed in range(3, 9))
    (tmp_path / "who.csv").write_text(f"record,patient\ntheirs,someone\nother,else\n{names}")
    (tmp_path / "w").write_text("someone\n")
    how = {
        "patients": str(tmp_path / "who.csv"),
        "leave_out": LeaveOut.read(str(tmp_path / "w"), None),
    }
    made = build(tmp_path / "in", tmp_path / "out", **how)
    places = {
        (row["record"], row["start_s"]) for row in made.table(["record", "start_s"]).to_pylist()
    }
    assert len(made) == 7 and ("other", 0.0) in places and ("other", 10.0) not in places
    assert verify(made) == []
    again = build(tmp_path / "in", tmp_path / "again", **how)
    assert files(tmp_path / "again") == files(tmp_path / "out") and len(again) == 7
    alone = listed(
        tmp_path / "a", x=("ptb-xl", "one", 1), y=("georgia", None, 1), z=("ningbo", None, 3)
    )
    left = without(alone, tmp_path / "b", "one")
    assert list(left.column("record")) == ["z"]
    assert [one["records"]["seen"] for one in left.meta["sources"]] == [0, 1, 0]


def test_an_id_of_several_sources_means_all_of_them(tmp_path, capsys):
    made = listed(
        tmp_path / "old", a=("ptb-xl", "one", 1), c=("georgia", "one", 2), d=("ningbo", None, 3)
    )
    assert list(without(made, tmp_path / "new", "one").column("record")) == ["d"]
    said = (
        "warning: patient one means several, all of whom are left out: georgia/one and ptb-xl/one"
    )
    assert said in capsys.readouterr().err
    left = without(made, tmp_path / "some", "georgia/one")
    assert sorted(left.column("record")) == ["a", "d"] and "warning" not in capsys.readouterr().err


def test_nobody_may_be_left(tmp_path):
    made = listed(tmp_path / "old", a=("ptb-xl", "one", 1))
    with pytest.raises(StorageError, match="no record can be used: all are left out"):
        without(made, tmp_path / "new", "one")


@pytest.mark.parametrize("key", [None, KEY])
def test_ids_of_other_characters_are_different_people(key, tmp_path):
    ids = ["12.3", "12.4", "12", "7/9", "8/9", "x" * 65, "x" * 66]
    records = {f"r{i}": ("arrays", one, i) for i, one in enumerate(ids)}
    made = listed(tmp_path / "out", options={"pseudonym_key": key}, **records)
    assert len(set(made.column("patient"))) == len(ids)
    assert verify(made, [Listed(**records)], key=key) == []
    left = without(made, tmp_path / "new", "12.3", "arrays/8/9", ids[-1], key=key)
    assert {*left.column("patient")} == {
        dataset_patient(key, "arrays", ids[i]) for i in (1, 2, 3, 5)
    }


@pytest.mark.parametrize("who", ["who111", "who 1.1"])
def test_no_line_of_rejects_names_them(who, tmp_path, monkeypatch):
    """Of their records, of files that could not be read, or of others."""
    read, note = Listed.read, ("SOP class", f"{dataset_patient(None, '', who)}/x of {who}")

    def reads(source, name):
        if name == "bad":
            raise ReadError("no lead", f"of {who}")
        return replace(read(source, name), warnings=(note,))

    monkeypatch.setattr(Listed, "read", reads)
    records = {"a": ("mine", who, 1), "b": ("mine", "two", 2), "bad": ("mine", who, 3)}
    made = listed(tmp_path / "out", **records)
    assert len(read_rejects(made)) == 3
    assert read_rejects(without(made, tmp_path / "new", f"mine/{who}")) == []
    (tmp_path / "w").write_text(f"mine/{who}")
    leave_out = LeaveOut.read(str(tmp_path / "w"), None)
    assert read_rejects(listed(tmp_path / "again", (), {"leave_out": leave_out}, **records)) == []


@pytest.mark.parametrize(
    "data",
    [
        "patient\r\none\r\n".encode("utf-16"),
        b'\xef\xbb\xbf"one";"A, B"\n',
        b"one\tx\n",
        b'record,"patient"\n10,"one"\n"b, c",nobody\n',
        b'10; Patient\n10; "one"\n',
        b"ecg_id\tpatient_id\n10\n\tone\n",
        b"none,x\none,y\n\none",
    ],
)
def test_the_file_may_come_from_a_spreadsheet(data, tmp_path):
    (tmp_path / "w").write_bytes(data)
    leave_out = LeaveOut.read(str(tmp_path / "w"), None)
    assert (
        leave_out.listed_name("arrays", "one") == "one"
        and leave_out.listed_name("arrays", "10") is None
    )
    (tmp_path / "w").write_bytes("10.0\nMüller".encode("cp1252"))
    with pytest.raises(
        DataError, match=r"--leave-out-patients .*w: the text of the file is not UTF-8"
    ):
        LeaveOut.read(str(tmp_path / "w"), None)


def test_with_a_zarr_copy(small, tmp_path):
    made = build(small, tmp_path / "old", format="both")
    patient = next(one for one in made.column("patient") if one)
    left = without(made, tmp_path / "new", patient, options={"format": "both"})
    assert verify(left) == [] and len(left) < len(made)
    assert patient not in set(left.column("patient")) and REJECTS in files(tmp_path / "new")


def test_a_hospitals_ids_are_one_namespace(tmp_path):
    """Whatever the format of the file."""
    made = listed(
        tmp_path / "old", a=("muse-xml", "one", 1), b=("dicom", "one", 2), c=("edf", "x", 3)
    )
    for name in ("one", "hospital/one", "scp-ecg/one"):
        left = without(made, tmp_path / name.replace("/", "_"), name)
        assert list(left.column("record")) == ["c"], name


def test_sources_of_a_dataset_are_opened_one_by_one(small, tmp_path):
    made = build(small, tmp_path / "old", pseudonym_key=KEY)
    names = [source.name for source in open_sources(made.root.url)]
    assert names == sorted({*made.column("source")})
    first = open_sources(made.root.url)[0]
    assert pseudonym(None, "r", "x", first.name_for(next(first.keys()))) in set(
        made.column("record")
    )
