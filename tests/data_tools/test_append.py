"""Appending records to a dataset: what stood stays."""

import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
from handmade import as_minor_0, build, ecg, files, flip, write_challenge
from listed import Listed, broken_at, dies_at_once, listed, remove_listed

from omnilead.data_tools.dataset import META, REJECTS, SAMPLES, Dataset
from omnilead.data_tools.ecg.pseudonyms import pseudonym
from omnilead.data_tools.ecg.record import Header
from omnilead.data_tools.io.errors import DataError
from omnilead.data_tools.sharding.finishing import rejects_of
from omnilead.data_tools.sharding.roles import RoleSources
from omnilead.data_tools.sharding.verify import verify

pytestmark = pytest.mark.usefixtures("small_shards")
ROLES = ["source", "record", "start_s", "pretrain", "dx_role", "id_role"]


def test_a_table_of_patients_may_name_those_that_the_dataset_has(small, tmp_path, capsys):
    made = build(small, tmp_path / "out")
    record = made.column("record")[0]
    write_challenge(tmp_path / "more" / "training" / "georgia" / "g1", "E09999", ecg(seed=9))
    (tmp_path / "who.csv").write_text(f"record,patient\n{record},p1\nE09999,p2\nnobody,p3\n")
    shutil.copytree(small, tmp_path / "more", dirs_exist_ok=True)
    capsys.readouterr()
    build(tmp_path / "more", tmp_path / "out", append=True, patients=str(tmp_path / "who.csv"))
    assert "who.csv: 1 (nobody) of 3 records are not in the data" in capsys.readouterr().err


def test_an_append_keeps_what_stood(old, grown, more, tmp_path):
    before, after = files(old), files(grown)
    shards = {name: data for name, data in before.items() if name.startswith("shards/")}
    assert shards.items() < after.items()
    for name in (META, SAMPLES, REJECTS):
        assert after[f"versions/1/{name}"] == before[name]
    made, first = Dataset.open(str(grown)), Dataset.open(str(grown), version=1)
    count = len(first)
    assert made.version == 2 and count < len(made) and verify(made) == []
    rows = made.table()
    for same in (Dataset.open(str(old)), first):
        assert rows.slice(0, count).equals(same.table())
    assert Dataset.open(str(grown), version=first.fingerprint).version == 1
    records = set(zip(made.column("source"), made.column("record"), strict=True))
    assert sum(source["records"]["seen"] for source in made.meta["sources"]) == len(records)
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


def roles_of(made):
    rows = made.table(ROLES).to_pylist()
    return {row["record"]: (row["pretrain"], row["dx_role"], row["id_role"]) for row in rows}


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
    new = {f"copy_d{i}": ("georgia", None, i) for i in range(40)}
    new |= {f"other_{name}": ("ningbo", None, seed) for name, (_, _, seed) in people.items()}
    new |= {f"again_{i}": ("ptb-xl", f"who{i}", 300 + i) for i in range(40)}
    new["bridge"] = ("ptb-xl", "who20", people[tests[0]][2])
    new["behind"] = ("ptb-xl", "who20", 999)
    new |= {f"new{i}": ("georgia", None, 400 + i) for i in range(40)}
    grown = listed(tmp_path, True, **new)
    now = roles_of(grown)
    assert {name: now[name] for name in old} == old and verify(grown) == []
    nobody, pair = (False, None, None), {"gallery", "probe"}
    for name, role in old.items():
        if name[0] == "d" and name != tests[0]:
            assert now[f"copy_{name}"] == role
        bridged = name in (tests[0], "p20")
        if (role[1] in ("valid", "test") and not bridged) or role[2] in pair:
            assert now[f"other_{name}"] == nobody
    for i in range(40):
        held = {old[name][2] for name in (f"p{i}", f"q{i}") if name in old} & pair
        trains = (True, None, old[f"p{i}"][2])
        assert now[f"again_{i}"] == (nobody if held or i == 20 else trains)
    assert now["bridge"] == now["behind"] == now[f"copy_{tests[0]}"] == nobody
    assert {now[f"new{i}"][1] for i in range(40)} == {"train", "valid", "test"}


def test_other_settings_and_formats_are_refused(small, more, old, key_file, shell, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(old, out)
    append = ("shard", more, "--out", out, "--append", "--workers", 1)
    for options, says in (
        (("--seed", 3), "seed was 0, not 3"),
        (("--plan", "all"), "plan was paper, not all"),
        (("--format", "both"), "format was tar, not both"),
        (("--pretrain-sources", "all"), "role_sources was None"),
        (("--leave-out-flags", "flat"), "leave_out_flags was ['implausible'], not ['flat']"),
        (("--pseudonymize", key_file), "pseudonyms was None"),
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
    new = {f"s{i}": ("mine", None, 50 + i) for i in range(9)}
    with pytest.raises(DataError, match="the new records of mine are unknown"):
        listed(tmp_path / "some", append=True, options=mine, **new)
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
    monkeypatch.setattr("omnilead.data_tools.sharding.shard.SAMPLE", sample)
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
    said = "licence of mine stays ODbL-1.0, although that of the new records is CC0"
    assert said in capsys.readouterr().err


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
                    patch.setattr("omnilead.data_tools.sharding.shard.finish", dies_at_once)
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
    left = remove_listed(tmp_path / "out", "syn7_10001", "syn8_10001", key=key["pseudonym_key"])
    assert len(left) < len(grown) and verify(left) == []


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


def test_another_ecg_of_a_known_name_in_a_folder(tmp_path, shell):
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
