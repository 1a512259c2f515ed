"""Appending records to a dataset and removing patients from one: what stood stays, a kill leaves a
whole dataset, and no byte of those who were removed is left."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from handmade import as_minor_0, build, ecg, expect_wrong_roles, files, flip, write_challenge

from omnilead.data_tools.build import plan
from omnilead.data_tools.build.finishing import REMOVED, rejects_of
from omnilead.data_tools.build.removal import remove
from omnilead.data_tools.build.roles import RoleSources
from omnilead.data_tools.build.shard import ShardOptions, shard
from omnilead.data_tools.build.verify import verify
from omnilead.data_tools.dataset import META, REJECTS, SAMPLES, STORE, Dataset
from omnilead.data_tools.ecg.pseudonyms import Removed, pseudonym
from omnilead.data_tools.ecg.record import LEADS, EcgRecord, Header
from omnilead.data_tools.extras.synthetic.archive import synthesise
from omnilead.data_tools.io.errors import DataError, DatasetError, ReadError
from omnilead.data_tools.io.storage import LocalFolder
from omnilead.data_tools.sources.base import Source, shown_patient
from tests import unsynced  # noqa: F401
from tests.forks import at_functions, death_at, fork, import_all

KILLS, SEED = 16, 43
ROOT = Path(__file__).parents[2]
ROLES = ["source", "record", "start_s", "pretrain", "dx_role", "id_role"]


@pytest.fixture(scope="module", autouse=True)
def small_shards():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_CROPS", 4)
        yield


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    out = tmp_path_factory.mktemp("more") / "archive"
    synthesise(out, patients=3, two_sessions=1, seed=8, progress=False)
    return out


@pytest.fixture(scope="module")
def old(small, small_shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("old") / "out"
    build(small, out)
    return out


@pytest.fixture(scope="module")
def grown(old, more, tmp_path_factory):
    out = tmp_path_factory.mktemp("grown") / "out"
    shutil.copytree(old, out)
    build(more, out, append=True)
    return out


@pytest.fixture(scope="module")
def withdrawn(grown, tmp_path_factory):
    """Of the first version and of the second."""
    patients = [one for one in Dataset.open(str(grown)).column("patient") if one]
    file = tmp_path_factory.mktemp("file") / "withdrawn.txt"
    file.write_text(f"patient\n{patients[0]}\nsynthetic-ptb-xl/{patients[-1]},1\n")
    return file


class Listed(Source):
    """name: (source, patient, seed of the signal)"""

    name = "listed"

    def __init__(self, **records):
        super().__init__(LocalFolder("/"))
        self.records = records

    def keys(self):
        return iter(self.records)

    def read(self, key):
        source, patient, seed = self.records[key]
        return EcgRecord(key, ecg(seed=seed), 500.0, LEADS, "uV", source=source, patient=patient)


def listed(out, append=False, options=(), **records):
    how = ShardOptions(str(out), quiet=True, append=append, **dict(options))
    return shard([Listed(**records)], how)


def test_a_table_of_patients_may_name_those_that_the_dataset_has(small, tmp_path, capsys):
    made = build(small, tmp_path / "out")
    record = made.column("record")[0]
    write_challenge(tmp_path / "more" / "training" / "georgia" / "g1", "E09999", ecg(seed=9))
    (tmp_path / "who.csv").write_text(f"record,patient\n{record},p1\nE09999,p2\nnobody,p3\n")
    shutil.copytree(small, tmp_path / "more", dirs_exist_ok=True)
    capsys.readouterr()
    build(tmp_path / "more", tmp_path / "out", append=True, patients=str(tmp_path / "who.csv"))
    assert "who.csv: 1 (nobody) of 3 records are not in the data" in capsys.readouterr().err


def roles_of(made):
    rows = made.table(ROLES).to_pylist()
    return {row["record"]: (row["pretrain"], row["dx_role"], row["id_role"]) for row in rows}


def test_an_append_keeps_what_stood(old, grown, small, more, tmp_path):
    before, after = files(old), files(grown)
    shards = {name: data for name, data in before.items() if name.startswith("shards/")}
    assert shards.items() < after.items()
    for name in (META, SAMPLES, REJECTS):
        assert after[f"versions/1/{name}"] == before[name]
    made, first = Dataset.open(str(grown)), Dataset.open(str(grown), version=1)
    count = len(first)
    assert made.version == 2 and count < len(made) and verify(made) == []
    rows = made.table()
    assert rows.slice(0, count).equals(Dataset.open(str(old)).table()) and first.table().equals(
        rows.slice(0, count)
    )
    assert Dataset.open(str(grown), version=first.fingerprint).version == 1
    sources = {one["name"]: one["records"] for one in made.meta["sources"]}
    assert sum(one["seen"] for one in sources.values()) == len(
        set(zip(made.column("source"), made.column("record"), strict=True))
    )
    shutil.copytree(old, tmp_path / "again")
    build(more, tmp_path / "again", append=True, workers=2)
    assert files(tmp_path / "again") == after


def test_nothing_new_changes_nothing(old, small, shell, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(old, out)
    _, said = shell.run("shard", small, "--out", out, "--append", "--workers", 1)
    assert "15 records are left out" in said
    assert f"note: no record is added to {out}: none is new\n" in said
    assert files(out) == files(old)
    _, said = shell.run("shard", small, "--out", out, "--workers", 1)
    assert files(out) == files(old)


def test_new_records_take_the_roles_of_their_people(tmp_path):
    """Whatever these are: of known patients, of copies under another name, and of both."""
    people = {f"d{i}": ("georgia", None, i) for i in range(40)}
    people |= {f"p{i}": ("ptb-xl", f"who{i}", 100 + i) for i in range(40)}
    people |= {f"q{i}": ("ptb-xl", f"who{i}", 200 + i) for i in range(12)}
    made = listed(tmp_path, **people)
    old = roles_of(made)
    tests = [name for name, role in old.items() if role[1] == "test"]
    assert {role[1] for role in old.values()} >= {"train", "valid", "test"}
    assert {role[2] for role in old.values()} >= {"gallery", "probe", "train", "valid"}
    new = {
        f"copy_{name}": ("georgia", None, seed)
        for name, (_, _, seed) in people.items()
        if name[0] == "d"
    }
    new |= {f"other_{name}": ("ningbo", None, seed) for name, (_, _, seed) in people.items()}
    new |= {f"again_{i}": ("ptb-xl", f"who{i}", 300 + i) for i in range(40)}
    new["bridge"] = ("ptb-xl", "who20", people[tests[0]][2])
    new["behind"] = ("ptb-xl", "who20", 999)
    new |= {f"new{i}": ("georgia", None, 400 + i) for i in range(40)}
    grown = listed(tmp_path, True, **new)
    now = roles_of(grown)
    assert {name: now[name] for name in old} == old and verify(grown) == []
    for name, role in old.items():
        if name[0] == "d" and name != tests[0]:
            assert now[f"copy_{name}"] == role
        if (name != tests[0] and name != "p20" and role[1] in ("valid", "test")) or role[2] in (
            "gallery",
            "probe",
        ):
            assert now[f"other_{name}"] == (False, None, None)
    for i in range(40):
        held = i != 20 and {old[f"{x}{i}"][2] for x in "pq" if f"{x}{i}" in old} & {
            "gallery",
            "probe",
        }
        trains = (True, None, old[f"p{i}"][2])
        assert now[f"again_{i}"] == ((False, None, None) if held or i == 20 else trains)
    nobody = (False, None, None)
    assert now["bridge"] == now["behind"] == now[f"copy_{tests[0]}"] == nobody
    assert {now[f"new{i}"][1] for i in range(40)} == {"train", "valid", "test"}


def test_other_settings_and_formats_are_refused(small, more, old, shell, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(old, out)
    append = ("shard", more, "--out", out, "--append", "--workers", 1)
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "key").chmod(0o600)
    for options, says in (
        (("--seed", 3), "seed was 0, not 3"),
        (("--plan", "all"), "plan was paper, not all"),
        (("--format", "both"), "format was tar, not both"),
        (("--pretrain-sources", "all"), "role_sources was None"),
        (("--leave-out-flags", "flat"), "leave_out_flags was ['implausible'], not ['flat']"),
        (("--pseudonymize", tmp_path / "key"), "pseudonyms was None"),
    ):
        assert says in shell.error(*append, *options)
    both = build(small, tmp_path / "both", format="both").root.url
    assert "has a zarr copy" in shell.error("shard", more, "--out", both, "--append")
    store = build(small, tmp_path / "store", format="zarr").root.url
    (tmp_path / "w").write_text("anyone\n")
    assert "no shards" in shell.error("remove", store, "--patients", tmp_path / "w")
    assert "no: does not exist" in shell.error("shard", more, "--out", tmp_path / "no", "--append")
    assert not (tmp_path / "no").exists()
    flip(out / SAMPLES, 300)
    assert "samples.parquet: fails its sha256" in shell.error(*append)
    assert "none of the patients" in shell.error("remove", old, "--patients", tmp_path / "w")


def test_what_the_dataset_was_made_with_may_not_be_left_out(tmp_path):
    """Sources with roles, and a table of patients: whoever has a role would be drawn again."""
    mine = {"role_sources": RoleSources(dx=("mine",))}
    made = listed(tmp_path / "out", options=mine, a=("mine", "one", 1))
    with pytest.raises(DataError, match=r"role_sources was \{'dx': .'mine'.\}, not None"):
        listed(tmp_path / "out", append=True, b=("mine", "one", 2))
    with pytest.raises(DataError, match="the new records of mine are unknown"):
        listed(tmp_path / "out", append=True, options=mine, b=("mine", None, 2))
    assert verify(Dataset.open(made.root.url)) == []
    some = {f"r{i}": ("mine", f"who{i}" if i % 3 else None, 9 + i) for i in range(9)}
    listed(tmp_path / "some", options=mine, **some)
    listed(tmp_path / "some", append=True, options=mine, b=("mine", None, 2))
    with pytest.raises(DataError, match="the new records of mine are unknown"):
        listed(
            tmp_path / "some",
            append=True,
            options=mine,
            **{f"s{i}": ("mine", None, 50 + i) for i in range(9)},
        )
    former = as_minor_0(made, tmp_path / "former")
    with pytest.raises(DataError, match="shards without roles, of an earlier omnilead"):
        listed(former.root.url, append=True, options=mine, b=("mine", "one", 2))


@pytest.mark.parametrize(
    ("sample", "patient", "built"), [(4, None, 4), (5, None, 12), (4, "who8", 12)]
)
def test_unknown_patients_are_refused_before_many_shards_are_built(
    sample, patient, built, tmp_path, monkeypatch
):
    """Unless the sample is too small, or has a patient."""
    made = listed(tmp_path, a=("mine", "who1", 1), b=("mine", "who2", 2), c=("other", "who1", 3))
    was, read, keys = files(tmp_path), Listed.read, []
    header = Header("", "mine", 5000, 500.0)
    monkeypatch.setattr(Listed, "header", lambda _, name: replace(header, name=name))
    monkeypatch.setattr(Listed, "read", lambda source, key: keys.append(key) or read(source, key))
    monkeypatch.setattr("omnilead.data_tools.build.shard.SAMPLE", sample)
    new = {f"n{i}": ("mine", patient if i % 4 else None, 9 + i) for i in range(12)}
    with nullcontext() if patient else pytest.raises(DataError, match="of mine are unknown"):
        listed(tmp_path, append=True, **new)
    assert len(keys) == built and verify(Dataset.open(made.root.url)) == []
    assert patient or files(tmp_path) == was


def test_a_source_keeps_its_licence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Listed, "licence", "ODbL-1.0")
    listed(tmp_path, a=("mine", None, 1))
    monkeypatch.setattr(Listed, "licence", "CC0-1.0")
    made = listed(tmp_path, append=True, b=("mine", None, 2))
    assert [one["licence"] for one in made.meta["sources"]] == ["ODbL-1.0"]
    assert (
        "licence of mine stays ODbL-1.0, although that of the new records is CC0"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("at", ["shard.finish", "finishing.fingerprint", "finishing.write_card"])
def test_nothing_is_left_of_an_append_that_was_killed_and_given_up(
    append, at, tmp_path, monkeypatch, capsys
):
    made = listed(tmp_path, a=("ptb-xl", "one", 1))
    was = files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(f"omnilead.data_tools.build.{at}", dies_at_once)
        with pytest.raises(KeyboardInterrupt):
            listed(tmp_path, append=True, b=("ptb-xl", "two", 2))
    assert "not a part of the dataset" in str(verify(made))
    listed(tmp_path, append=append, a=("ptb-xl", "one", 1))
    assert files(tmp_path) == was
    assert ("is undone; README.md is written again" in capsys.readouterr().err) == (
        at != "shard.finish"
    )


def dies_at_once(*_):
    raise KeyboardInterrupt


def test_an_append_has_shards_of_as_many_crops_as_the_dataset(tmp_path):
    """Also if the option is left out; and after a kill."""
    seven = {"shard_crops": 7}
    records = {f"r{i}": ("mine", f"who{i}", i) for i in range(9)}
    more = {f"s{i}": ("mine", f"who{i}", 50 + i) for i in range(9)}
    for name, killed in (("whole", False), ("killed", True)):
        out = tmp_path / name
        for append, options, new in ((False, seven, records), (True, {}, more)):
            if killed:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("omnilead.data_tools.build.shard.finish", dies_at_once)
                    with pytest.raises(KeyboardInterrupt):
                        listed(out, append, options, **new)
                assert (out / ".build").exists()
            made = listed(out, append, options, **new)
        assert [shard["crops"] for shard in made.shards] == [7, 2, 7, 2] and verify(made) == []
        assert made.meta["shard_crops"] == 7 and made.version == 2
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    again = listed(out, True, seven, t=("mine", "who1", 99))
    assert again.shards[-1]["crops"] == 1 and again.version == 3


def test_with_pseudonyms(small, more, tmp_path):
    key = {"pseudonym_key": b"k" * 32}
    made = build(small, tmp_path / "out", **key)
    grown = build(more, tmp_path / "out", append=True, **key)
    assert len(grown) > len(made) and verify(grown) == []
    again = build(more, tmp_path / "out", append=True, **key)
    assert again.fingerprint == grown.fingerprint
    (tmp_path / "w").write_text("syn7_10001\nsyn8_10001\n")
    left, _ = remove(str(tmp_path / "out"), str(tmp_path / "w"), key["pseudonym_key"])
    assert len(left) < len(grown) and verify(left) == []


def fails_at(monkeypatch, at):
    """The `at`-th change of the disk fails before it is made. -> how many there were."""
    calls = []

    def counted(name):
        real = getattr(LocalFolder, name)

        def call(self, *arguments):
            calls.append(name)
            if len(calls) == at:
                raise KeyboardInterrupt
            return real(self, *arguments)

        monkeypatch.setattr(LocalFolder, name, call)

    for name in ("write", "publish", "patch", "remove"):
        counted(name)
    return calls


def changes(out, archive, file):
    """An append to a dataset, and a removal from one that has grown."""
    return partial(build, archive, out, append=True), partial(remove, str(out), str(file))


@pytest.mark.parametrize("which", [0, 1])
def test_killed_before_any_write_the_old_version_is_whole(
    which, old, grown, more, withdrawn, tmp_path, monkeypatch
):
    begin, right = (old, grown)[which], tmp_path / "right"
    shutil.copytree(begin, right)
    with monkeypatch.context() as patch:
        calls = fails_at(patch, 0)
        changes(right, more, withdrawn)[which]()
    was = Dataset.open(str(begin))
    for at in range(1, len(calls) + 1):
        out = tmp_path / str(at)
        shutil.copytree(begin, out)
        with monkeypatch.context() as patch:
            fails_at(patch, at)
            with pytest.raises(KeyboardInterrupt):
                changes(out, more, withdrawn)[which]()
        found = Dataset.open(str(out))
        assert found.table().equals(was.table()) or found.version > was.version
        found.read(0), rejects_of(found)
        if found.version == was.version or which == 0:
            changes(out, more, withdrawn)[which]()
        elif (out / ".build").exists():
            build(more, out, append=True)
        assert files(out) == files(right), at
        shutil.rmtree(out)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("at", [SAMPLES, REJECTS, META, "README.md"])
def test_a_full_disk_leaves_the_old_version(
    at, which, old, grown, more, withdrawn, tmp_path, monkeypatch
):
    out, real = tmp_path / "out", os.replace

    def full(source, to):
        if str(to) == str(out / at):
            raise OSError(28, os.strerror(28))
        real(source, to)

    shutil.copytree((old, grown)[which], out)
    was = Dataset.open(str(out)).table()
    change = changes(out, more, withdrawn)[which]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises((DataError, OSError), match="No space left"):
            change()
    assert Dataset.open(str(out)).table().equals(was)
    change()
    assert verify(Dataset.open(str(out))) == []


def test_a_second_run_is_refused(grown, more, withdrawn, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(grown, out)
    (out / ".build/tmp").mkdir(parents=True)
    with open(out / ".build/lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for change in (*changes(out, more, withdrawn), partial(build, more, out)):
            with pytest.raises(DataError, match="another run is writing there"):
                change()


def test_no_byte_of_those_who_are_removed_is_left(grown, more, small, withdrawn, shell, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(grown, out)
    before = Dataset.open(str(out))
    names = withdrawn.read_text().replace("synthetic-ptb-xl/", "").replace(",1", "").split()[1:]
    theirs = [row for row, one in enumerate(before.column("patient")) if one in names]
    crops = [before.read(row).tobytes() for row in theirs]
    records = [before[row].record for row in theirs]
    assert len(theirs) == 4 and all(
        any(crop in data for data in files(out).values()) for crop in crops
    )
    said, notes = shell.run("remove", out, "--patients", withdrawn, "--workers", 1)
    assert (
        "version 3" in said
        and "omnilead seen" in said
        and "4 crops are removed, and 0 copies" in notes
    )
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
    synthesise(tmp_path / "third", patients=2, seed=9, progress=False)
    _, said = shell.run(
        "shard", small, tmp_path / "third", "--out", out, "--append", "--workers", 1
    )
    grown_again = Dataset.open(str(out))
    assert grown_again.version == 4 and verify(grown_again) == []
    assert not set(names) & set(grown_again.column("patient"))
    text = (out / REJECTS).read_text()
    assert "patient was removed" in text and not any(record in text for record in records)
    shell.run("verify", out, "--archive", small, more, tmp_path / "third", "--workers", 1)


@pytest.mark.parametrize("deleted", ["", META, SAMPLES])
def test_whoever_is_removed_next_a_killed_removal_ends(deleted, tmp_path, monkeypatch):
    out, file = tmp_path / "out", tmp_path / "w"
    records = {f"r{i}": ("ptb-xl", f"who{i}", i) for i in range(3)}
    listed(out, **records)
    file.write_text("who0")
    with monkeypatch.context() as patch:
        patch.setattr("omnilead.data_tools.build.removal.remove_traces", dies_at_once)
        with pytest.raises(KeyboardInterrupt):
            remove(str(out), str(file))
    assert "versions/1: not a part of the dataset" in str(verify(Dataset.open(str(out))))
    if deleted:
        (out / "versions/1" / deleted).unlink()
    file.write_text("who1")
    assert list(remove(str(out), str(file))[0].column("record")) == ["r2"]
    assert not list(out.glob("versions/*"))


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
    out, file = tmp_path / "out", tmp_path / "w"
    records = {"a": ("ptb-xl", "one", 1), "b": ("georgia", None, 1), "c": ("georgia", None, 2)}
    made = listed(out, **records)
    file.write_text("one")
    left, _ = remove(made.root.url, str(file))
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
    out, file = tmp_path / "out", tmp_path / "w"
    records = {str(100 + i): ("clinic", str(200 + i), i) for i in range(4)}
    every = [*map(str, range(100, 300))]
    listed(out, **records)
    file.write_text("200")
    left, _ = remove(str(out), str(file))
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
    file.write_text("200\n201")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Dataset, "removed", property(lambda made: Removed(frozenset(made.meta["removed"])))
        )
        old, _ = remove(str(out), str(file))
    assert guessed(old, every) == {"101", "201"}
    last = listed(out, append=True, **more, last=("clinic", "9", 7))
    assert sorted(last.column("record")) == ["102", "103", "last", "next"]


def test_nothing_is_kept_of_whom_the_user_forgets(tmp_path, shell):
    """Nor of those who were removed before; they can come back."""
    out, file = tmp_path / "out", tmp_path / "w"
    records = {f"r{i}": ("clinic", f"who{i}", i) for i in range(4)}
    listed(out, **records)
    file.write_text("who0")
    remove(str(out), str(file))
    listed(out, append=True, **records, more=("clinic", "who7", 7))
    assert REMOVED in (out / REJECTS).read_text()
    file.write_text("who1")
    said = shell.run("remove", out, "--patients", file, "--forget", "--workers", 1)
    assert "no marks of removed patients are kept: --append can bring them back" in str(said)
    left = Dataset.open(str(out))
    assert left.meta["removed"] == [] and rejects_of(left) == [] and verify(left) == []
    again = listed(out, append=True, **records)
    assert sorted(again.column("record")) == ["more", "r0", "r1", "r2", "r3"]
    file.write_text("who2")
    remove(str(out), str(file))
    remove(str(out), str(file), forget=True)  # was removed before
    left = Dataset.open(str(out))
    assert left.meta["removed"] == [] and len(left) == 4 and verify(left) == []


@pytest.mark.parametrize("in_plan", [True, False])
@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_unreadable_files_of_those_who_are_removed_are_not_named(
    key, in_plan, tmp_path, monkeypatch, capsys
):
    """Whether the header or the signal is, of a copy as well, and of a file that was refused before."""
    out, file, read, how = tmp_path / "out", tmp_path / "w", Listed.read, {"pseudonym_key": key}
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
    file.write_text("one_b")
    remove(str(out), str(file), key)
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
    assert (
        len(set(made.column("patient"))) == len(ids)
        and verify(made, [Listed(**records)], key=key) == []
    )
    file = tmp_path / "w"
    file.write_text(f"12.3\narrays/8/9\n{ids[-1]}")
    stay = {shown_patient(key, "arrays", ids[i]) for i in (1, 2, 3, 5)}
    assert {*remove(made.root.url, str(file), key)[0].column("patient")} == stay


@pytest.mark.parametrize("who", ["who111", "who 1.1"])
def test_no_line_of_rejects_names_them(who, tmp_path, monkeypatch):
    read, note = Listed.read, ("SOP class", f"{shown_patient(None, '', who)}/x of {who}")
    monkeypatch.setattr(Listed, "read", lambda *key: replace(read(*key), warnings=(note,)))
    made = listed(tmp_path / "out", a=("mine", who, 1), b=("mine", "two", 2))
    assert len(rejects_of(made)) == 2
    (tmp_path / "w").write_text(f"mine/{who}")
    assert rejects_of(remove(made.root.url, str(tmp_path / "w"))[0]) == []


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
    (tmp_path / "w").write_text(patient)
    rows = [row for row, one in enumerate(before.column("patient")) if one != patient]
    stay = before.table(ROLES).take(rows)
    made, _ = remove(before.root.url, str(tmp_path / "w"))
    assert f"{STORE} is deleted" in capsys.readouterr().err
    assert made.table(ROLES).equals(stay) and made.meta["formats"] == ["tar"]
    assert not (tmp_path / "out" / STORE).exists() and verify(made) == []


def test_damaged_tables_of_earlier_versions_are_found(grown, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(grown, out)
    flip(out / "versions/1" / SAMPLES, 300)
    assert "versions/1/samples.parquet: fails its sha256" in str(
        verify(Dataset.open(str(out)), fast=True)
    )


def broken_at(*names):
    """A `read` of Listed that refuses these records."""
    read = Listed.read

    def reads(source, name):
        if name in names:
            raise ReadError("missing file", f"{name}.dat")
        return read(source, name)

    return reads


def counts_of(made):
    (facts,) = made.meta["sources"]
    return facts["records"]


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_another_ecg_of_a_known_name_is_refused_and_said(key, tmp_path, capsys):
    how = {"pseudonym_key": key}
    made = listed(tmp_path, options=how, a=("mine", "one", 1), b=("mine", "two", 2))
    was = files(tmp_path)
    capsys.readouterr()
    other = {"a": ("mine", "three", 9), "b": ("mine", "two", 2)}
    made = listed(tmp_path, True, how, **other)
    said = capsys.readouterr().err
    assert "note: 1 record is left out: the dataset has them" in said
    shown = "1 (a)" if key is None else "1"
    what = "records with the name of another ECG of the dataset are refused"
    assert f"warning: {what}: {shown}: rename their files and append them again\n" in said
    line = ("mine", pseudonym(key, "r", "mine", "a again"), "record read already")
    (found,) = [one[:3] for one in rejects_of(made)]
    assert found == line and made.version == 2 and len(made) == 2
    assert counts_of(made) == {"seen": 3, "used": 2, "refused": 1}
    assert verify(made) == [] and files(tmp_path) != was
    again = listed(tmp_path, True, how, **other)
    assert again.fingerprint == made.fingerprint
    grown = listed(tmp_path, True, how, **other, c=("mine", "four", 4))
    assert len(grown) == 3 and [one[:3] for one in rejects_of(grown)] == [line]
    assert counts_of(grown) == {"seen": 4, "used": 3, "refused": 1} and verify(grown) == []


def test_another_ecg_of_a_known_name_in_a_folder(small, tmp_path, shell):
    """Also of a longer record, and beside a damaged file."""
    for place, name, seed in (("one", "a", 1), ("one", "b", 2), ("two", "a", 3), ("two", "b", 2)):
        write_challenge(tmp_path / place / "x", name, ecg(12_000, seed))
    write_challenge(tmp_path / "three" / "x", "b", ecg(12_000, 2))
    (tmp_path / "three" / "x" / "b.mat").write_bytes(b"")
    out = tmp_path / "out"
    shell.run("shard", tmp_path / "one", "--out", out, "--workers", 1)
    _, said = shell.run("shard", tmp_path / "two", "--out", out, "--append", "--workers", 2)
    assert "of another ECG of the dataset are refused: 1 (x/a.hea): rename" in said
    line = "wfdb,x/a.hea,record read already,x/a.hea: another x_a came first"
    assert (out / REJECTS).read_text().split("\n")[1:-1] == [line]
    shell.run("shard", tmp_path / "three", "--out", out, "--append", "--workers", 1)
    lines = (out / REJECTS).read_text().split("\n")[1:-1]
    assert lines[0] == line and lines[1].startswith("wfdb,x/b.hea,") and len(lines) == 2
    shell.run("verify", out, "--archive", tmp_path / "one", "--workers", 1)


def test_a_removed_patients_ecg_under_a_known_name_stays_unnamed(tmp_path):
    made = listed(tmp_path / "out", a=("ptb-xl", "one", 1), b=("ptb-xl", "two", 2))
    (tmp_path / "w").write_text("one")
    remove(made.root.url, str(tmp_path / "w"))
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
    made = build(tmp_path / "in", tmp_path / "out", **how)
    (tmp_path / "w").write_text("someone")
    left, _ = remove(made.root.url, str(tmp_path / "w"))
    again = build(tmp_path / "in", tmp_path / "out", append=True, **how)
    assert len(left) == 1 and again.fingerprint == left.fingerprint


@pytest.mark.parametrize("in_plan", [True, False])
@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_a_refused_record_is_appended_once_it_can_be_read(key, in_plan, tmp_path, monkeypatch):
    """Whether its header or its signal was refused; others are refused again."""
    how, records = {"pseudonym_key": key}, {f"r{i}": ("listed", "who", i) for i in range(4)}
    if in_plan:
        header = Header("", "listed", 5000, 500.0)
        monkeypatch.setattr(Listed, "header", lambda _, name: replace(header, name=name))
    with monkeypatch.context() as patch:
        patch.setattr(Listed, "read", broken_at("r1", "r2"))
        made = listed(tmp_path, options=how, **records)
        assert listed(tmp_path, True, how, **records).fingerprint == made.fingerprint
        assert verify(made, [Listed(**records)], key=key) == []
    assert counts_of(made) == {"seen": 4, "used": 2, "refused": 2}
    monkeypatch.setattr(Listed, "read", broken_at("r2"))
    r1, r2 = (pseudonym(key, "r", "listed", name) for name in ("r1", "r2"))
    assert verify(made, [Listed(**records)], key=key) == [
        f"listed/{r1} was refused (missing file), but can be read now: shard --append adds it"
    ]
    grown = listed(tmp_path, True, how, **records)
    assert len(grown) == 3 and [one[:3] for one in rejects_of(grown)] == [
        ("listed", r2, "missing file")
    ]
    assert counts_of(grown) == {"seen": 4, "used": 3, "refused": 1}
    assert verify(grown, [Listed(**records)], key=key) == []
    assert listed(tmp_path, True, how, **records).fingerprint == grown.fingerprint


def test_the_table_of_an_archive_may_name_files_that_only_the_dataset_has(tmp_path, monkeypatch):
    records = {f"r{i}": ("listed", "who", i) for i in range(3)}
    made = listed(tmp_path, **records)
    monkeypatch.setattr(Listed, "read", broken_at(*records))
    assert listed(tmp_path, True, **records).fingerprint == made.fingerprint


def test_an_append_that_only_refuses_is_killed_before_any_write(tmp_path, monkeypatch):
    old, right = tmp_path / "old", tmp_path / "right"
    listed(old, a=("mine", "one", 1))
    new = {"a": ("mine", "two", 2)}
    shutil.copytree(old, right)
    with monkeypatch.context() as patch:
        calls = fails_at(patch, 0)
        listed(right, True, **new)
    for at in range(1, len(calls) + 1):
        out = tmp_path / str(at)
        shutil.copytree(old, out)
        with monkeypatch.context() as patch:
            fails_at(patch, at)
            with pytest.raises(KeyboardInterrupt):
                listed(out, True, **new)
        Dataset.open(str(out)).read(0)
        listed(out, True, **new)
        assert files(out) == files(right), at


@pytest.mark.slow
def test_killed_over_and_over(small, more, old, grown, withdrawn, tmp_path):
    """SIGKILL at random calls of an append and of a removal, each run again until it ends."""
    command = [sys.executable, __file__, more, old, withdrawn, tmp_path]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(
        list(map(str, command)), env=environment, stdout=subprocess.PIPE, text=True
    )
    assert run.returncode == 0 and json.loads(run.stdout.splitlines()[-1]) >= KILLS


def counted(call, notes):
    calls = iter(range(10**9))
    at_functions(partial(next, calls))
    call()
    sys.setprofile(None)
    notes.write_text(json.dumps([next(calls), sorted(set(sys.modules) - {"__main__"})]))


def dies(call, change):
    at_functions(death_at(call))
    change()


def opens(out):
    made = Dataset.open(str(out))
    made.table()
    rejects_of(made)


def storm(more, old, file, root):
    rng, kills = random.Random(SEED), 0
    right = root / "right"
    shutil.copytree(old, right)
    states, lengths = [], []
    for which in (0, 1):
        assert fork(partial(counted, changes(right, more, file)[which], root / "calls")) == 0
        states.append(files(right))
        length, modules = json.loads((root / "calls").read_text())
        lengths.append(length)
        import_all(modules)
    while kills < KILLS:
        out = root / "out"
        shutil.copytree(old, out)
        for which in (0, 1):
            code = -1
            while code:
                change, call = changes(out, more, file)[which], rng.randint(1, lengths[which])
                code = fork(partial(dies, call, change))
                kills += code != 0
                assert code in (0, -signal.SIGKILL)
                assert fork(partial(opens, out)) == 0
            if (out / ".build").exists():
                fork(partial(build, more, out, append=True))
            assert files(out) == states[which]
        shutil.rmtree(out)
    return kills


if __name__ == "__main__":
    plan.SHARD_CROPS = 4
    expect_wrong_roles(0)
    print(json.dumps(storm(*map(Path, sys.argv[1:]))))
