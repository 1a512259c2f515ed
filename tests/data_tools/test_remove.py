"""Removing patients from a dataset: no byte of them is left, and they do not come back."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from handmade import build, ecg, files, flip, write_challenge
from listed import Listed, listed, remove_listed

from omnilead.data_tools.dataset import META, REJECTS, STORE, Dataset
from omnilead.data_tools.ecg.pseudonyms import Removed, pseudonym
from omnilead.data_tools.ecg.record import Header
from omnilead.data_tools.io.errors import DataError, DatasetError, ReadError
from omnilead.data_tools.sharding.finishing import REMOVED, rejects_of
from omnilead.data_tools.sharding.removal import remove
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.base import shown_patient
from omnilead.data_tools.synthetic.archive import synthesise

pytestmark = pytest.mark.usefixtures("small_shards")
ROLES = ["source", "record", "start_s", "pretrain", "dx_role", "id_role"]


def test_no_byte_of_those_who_are_removed_is_left(grown, more, small, withdrawn, shell, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(grown, out)
    before = Dataset.open(str(out))
    names = withdrawn.read_text().replace("synthetic-ptb-xl/", "").replace(",1", "").split()[1:]
    theirs = [row for row, one in enumerate(before.column("patient")) if one in names]
    crops = [before.read(row).tobytes() for row in theirs]
    records = [before[row].record for row in theirs]
    contents = files(out).values()
    assert len(theirs) == 4 and all(any(crop in data for data in contents) for crop in crops)
    said, notes = shell.run("remove", out, "--patients", withdrawn, "--workers", 1)
    assert "version 3" in said and "omnilead seen" in said
    assert "4 crops are removed, and 0 copies" in notes
    for name, data in files(out).items():
        for needle in (*crops, *(word.encode() for word in (*names, *records))):
            assert needle not in data, name
    made = Dataset.open(str(out))
    rows = before.table().take([row for row in range(len(before)) if row not in theirs])
    moved = ["shard", "offset"]
    assert made.table().drop_columns(moved).equals(rows.drop_columns(moved))
    assert verify(made) == [] and not list(out.glob("versions/*"))
    for version in (1, 2, before.fingerprint):
        with pytest.raises(DatasetError, match="removing patients deletes earlier ones"):
            Dataset.open(str(out), version=version)
    was = files(out)
    _, said = shell.run("remove", out, "--patients", withdrawn, "--workers", 1)
    assert "2 of these patients were removed before" in said and files(out) == was
    also = tmp_path / "also"
    also.write_text(f"{names[0]}\nnobody\n")
    _, said = shell.run("remove", out, "--patients", also, "--workers", 1, code=1)
    assert "note: 1 of these patients are not in the dataset: nobody" in said
    # They do not come back, and whoever is new can come
    _, said = shell.run("shard", small, more, "--out", out, "--append", "--workers", 1)
    assert "patient was removed" in said and files(out) == was
    third = tmp_path / "third"
    synthesise(third, patients=2, seed=9, progress=False)
    shell.run("shard", small, third, "--out", out, "--append", "--workers", 1)
    grown_again = Dataset.open(str(out))
    assert grown_again.version == 4 and verify(grown_again) == []
    assert not set(names) & set(grown_again.column("patient"))
    text = (out / REJECTS).read_text()
    assert "patient was removed" in text and not any(record in text for record in records)
    shell.run("verify", out, "--archive", small, more, third, "--workers", 1)


def test_copies_go_too_and_names_that_clash_are_asked_for(tmp_path):
    made = listed(
        tmp_path / "out",
        a=("ptb-xl", "one", 1),
        b=("georgia", None, 1),
        c=("georgia", "one", 2),
        d=("ningbo", None, 3),
    )
    file = tmp_path / "w"
    file.write_text("one\n")
    with pytest.raises(DataError, match="several have this id: write georgia/one or ptb-xl/one"):
        remove(made.root.url, str(file))
    file.write_text("ptb-xl/one\nnobody\n")
    left, missing = remove(made.root.url, str(file))
    assert sorted(left.column("record")) == ["c", "d"] and missing == 1
    file.write_text("georgia/one\n")
    flip(next(iter(Path(made.root.url).glob("shards/*.tar"))), 2000)
    with pytest.raises(DatasetError, match="fails its sha256"):
        remove(made.root.url, str(file))
    assert len(Dataset.open(made.root.url).table()) == 2
    next(iter(Path(made.root.url).glob("shards/*.tar"))).unlink()
    with pytest.raises(DatasetError, match="tar: missing file: restore the file"):
        remove(made.root.url, str(file))


def test_copies_do_not_come_back_without_their_patient(tmp_path):
    out = tmp_path / "out"
    records = {"a": ("ptb-xl", "one", 1), "b": ("georgia", None, 1), "c": ("georgia", None, 2)}
    listed(out, **records)
    left = remove_listed(out, "one")
    again = listed(out, append=True, **records, renamed=("ningbo", None, 1))
    assert again.fingerprint == left.fingerprint and list(again.column("record")) == ["c"]
    assert verify(again, [Listed(**records)]) == []
    more = listed(out, append=True, **records, d=("georgia", None, 3))
    assert sorted(more.column("record")) == ["c", "d"]
    assert {reason for _, _, reason, _ in rejects_of(more)} == {"patient was removed"}


def guessed(made, ids):
    """Of which of these a stranger finds a mark who has the program and dataset.json."""
    text = json.dumps(made.meta)
    stranger = Removed()
    return {one for one in ids for kind in "pr" if stranger.mark("clinic", one, kind) in text}


def test_dataset_json_does_not_name_who_was_removed(tmp_path):
    """By no list of ids or of records' names; nor does it hold the key of its marks. Whoever is removed
    does not come back: under the open marks of earlier versions neither."""
    out = tmp_path / "out"
    records = {str(100 + i): ("clinic", str(200 + i), i) for i in range(4)}
    every = [*map(str, range(100, 300))]
    listed(out, **records)
    left = remove_listed(out, "200")
    assert left.meta["removed"] and guessed(left, every) == set()
    assert left.name_key.decode() not in (out / META).read_text()
    more = records | {
        "new": ("clinic", "200", 9),
        "copy": ("clinic", "7", 0),
        "next": ("clinic", "8", 8),
    }
    grown = listed(out, append=True, **more)
    assert sorted(grown.column("record")) == ["101", "102", "103", "next"]
    assert guessed(grown, every) == set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Dataset, "removed", property(lambda made: Removed(frozenset(made.meta["removed"])))
        )
        old = remove_listed(out, "200", "201")
    assert guessed(old, every) == {"101", "201"}
    last = listed(out, append=True, **more, last=("clinic", "9", 7))
    assert sorted(last.column("record")) == ["102", "103", "last", "next"]


def test_nothing_is_kept_of_whom_the_user_forgets(tmp_path, shell):
    """Nor of those who were removed before; they can come back."""
    out, file = tmp_path / "out", tmp_path / "w"
    records = {f"r{i}": ("clinic", f"who{i}", i) for i in range(4)}
    listed(out, **records)
    remove_listed(out, "who0")
    listed(out, append=True, **records, more=("clinic", "who7", 7))
    assert REMOVED in (out / REJECTS).read_text()
    file.write_text("who1")
    said = shell.run("remove", out, "--patients", file, "--forget", "--workers", 1)
    assert "no marks of removed patients are kept: --append can bring them back" in str(said)
    left = Dataset.open(str(out))
    assert left.meta["removed"] == [] and rejects_of(left) == [] and verify(left) == []
    again = listed(out, append=True, **records)
    assert sorted(again.column("record")) == ["more", "r0", "r1", "r2", "r3"]
    remove_listed(out, "who2")
    left = remove_listed(out, "who2", forget=True)  # was removed before
    assert left.meta["removed"] == [] and len(left) == 4 and verify(left) == []


@pytest.mark.parametrize("in_plan", [True, False])
@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_unreadable_files_of_those_who_are_removed_are_not_named(
    key, in_plan, tmp_path, monkeypatch, capsys
):
    """Whether the header or the signal is, of a copy as well, and of a file that was refused before."""
    out, read, how = tmp_path / "out", Listed.read, {"pseudonym_key": key}
    bad = ["second"]

    def reads(source, name):
        if name in bad:
            raise ReadError("no lead", f"of {source.records[name][1]}")
        return read(source, name)

    monkeypatch.setattr(Listed, "read", reads)
    monkeypatch.setattr(Listed, "source_of", lambda *_: "muse-xml" if key else "hospital")
    records = {"theirs": ("muse-xml", "one_b", 1), "copied": ("muse-xml", None, 1)}
    records |= {"second": ("muse-xml", "one_b", 3), "other": ("muse-xml", "two", 2)}
    listed(out, options=how, **records)
    remove_listed(out, "one_b", key=key)
    bad += ["theirs", "copied", "new"]
    more = records | {"new": ("muse-xml", None, 4), "good": ("muse-xml", "two", 5)}
    if not in_plan:
        header = Header("", "muse-xml", 5000, 500.0)
        monkeypatch.setattr(Listed, "header", lambda _, name: replace(header, name=name))
    capsys.readouterr()
    rows = rejects_of(listed(out, append=True, options=how, **more))
    named = {row[1] for row in rows if row[2] == "no lead"}
    # With a key, nobody knew whose the second was
    unknown = ("new", "second") if key else ("new",)
    assert named == {pseudonym(key, "r", "muse-xml", name) for name in unknown}
    text = f"{rows} {capsys.readouterr()}"
    for name in ("theirs", "copied"):
        assert name not in text and pseudonym(key, "r", "muse-xml", name) not in text
    assert {row[2] for row in rows} == {"no lead", "patient was removed"}


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_ids_of_other_characters_are_different_people(key, tmp_path):
    ids = ["12.3", "12.4", "12", "7/9", "8/9", "x" * 65, "x" * 66]
    records = {f"r{i}": ("arrays", one, i) for i, one in enumerate(ids)}
    made = listed(tmp_path / "out", options={"pseudonym_key": key}, **records)
    assert len(set(made.column("patient"))) == len(ids)
    assert verify(made, [Listed(**records)], key=key) == []
    left = remove_listed(tmp_path / "out", "12.3", "arrays/8/9", ids[-1], key=key)
    stay = {shown_patient(key, "arrays", ids[i]) for i in (1, 2, 3, 5)}
    assert {*left.column("patient")} == stay


@pytest.mark.parametrize("who", ["who111", "who 1.1"])
def test_no_line_of_rejects_names_them(who, tmp_path, monkeypatch):
    read, note = Listed.read, ("SOP class", f"{shown_patient(None, '', who)}/x of {who}")
    monkeypatch.setattr(Listed, "read", lambda *key: replace(read(*key), warnings=(note,)))
    made = listed(tmp_path / "out", a=("mine", who, 1), b=("mine", "two", 2))
    assert len(rejects_of(made)) == 2
    assert rejects_of(remove_listed(tmp_path / "out", f"mine/{who}")) == []


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
    made = listed(tmp_path / "out", a=("arrays", "one", 1), b=("arrays", "10", 2))
    (tmp_path / "w").write_bytes(data)
    assert list(remove(made.root.url, str(tmp_path / "w"))[0].column("record")) == ["b"]
    (tmp_path / "w").write_bytes("10.0\nMüller".encode("cp1252"))
    with pytest.raises(DataError, match="w: its text is not UTF-8"):
        remove(made.root.url, str(tmp_path / "w"))


@pytest.mark.parametrize("how", [{"format": "both"}, {"plan": "paper-split", "format": "both"}])
def test_a_removal_deletes_the_zarr_copy_and_keeps_roles(how, small, tmp_path, capsys):
    before = build(small, tmp_path / "out", **how)
    patient = next(one for one in before.column("patient") if one)
    rows = [row for row, one in enumerate(before.column("patient")) if one != patient]
    stay = before.table(ROLES).take(rows)
    made = remove_listed(tmp_path / "out", patient)
    assert f"{STORE} is deleted" in capsys.readouterr().err
    assert made.table(ROLES).equals(stay) and made.meta["formats"] == ["tar"]
    assert not (tmp_path / "out" / STORE).exists() and verify(made) == []


def test_a_removed_patients_ecg_under_a_known_name_stays_unnamed(tmp_path):
    listed(tmp_path / "out", a=("ptb-xl", "one", 1), b=("ptb-xl", "two", 2))
    remove_listed(tmp_path / "out", "one")
    made = listed(tmp_path / "out", True, b=("ptb-xl", "one", 5), c=("ptb-xl", "two", 3))
    assert [one[2:] for one in rejects_of(made)] == [("patient was removed", "")]
    assert not any(one[1] == "b" for one in rejects_of(made)) and verify(made) == []


def test_a_copy_that_a_removal_took_does_not_make_it_another_ecg(tmp_path):
    """Its other crops are still the dataset's."""
    write_challenge(tmp_path / "in", "theirs", ecg(5000, 1))
    both = np.concatenate([ecg(5000, 2), ecg(5000, 1)], axis=1)
    write_challenge(tmp_path / "in", "other", both)
    (tmp_path / "who.csv").write_text("record,patient\ntheirs,someone\nother,else\n")
    how = {"patients": str(tmp_path / "who.csv")}
    build(tmp_path / "in", tmp_path / "out", **how)
    left = remove_listed(tmp_path / "out", "someone")
    again = build(tmp_path / "in", tmp_path / "out", append=True, **how)
    assert len(left) == 1 and again.fingerprint == left.fingerprint
