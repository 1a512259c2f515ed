"""A dataset as a source: its crops once more, with others or alone."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from handmade import as_earlier_format, build, ecg, files, flip, write_challenge
from listed import Listed, broken_at, dies_at_once, listed

from omnilead.data_tools.dataset import META, SAMPLES, Dataset
from omnilead.data_tools.dataset.rejects import FLAG_REASONS, read_rejects
from omnilead.data_tools.ecg.pseudonyms import key_fingerprint, pseudonym
from omnilead.data_tools.ecg.record import Header
from omnilead.data_tools.io.errors import DataError, DatasetError, StorageError
from omnilead.data_tools.sharding import finishing
from omnilead.data_tools.sharding.roles import RoleSources
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.detect import open_sources

pytestmark = pytest.mark.usefixtures("small_shards")
KEY = b"k" * 32


def rows_of(made, *without):
    """By crop, all that a dataset says of it but where it lies."""
    rows = {}
    for row in made.table().drop_columns(["shard", "offset", *without]).to_pylist():
        rows[row["source"], row["record"], row["start_s"]] = row
    return rows


@pytest.mark.parametrize("stored", ["tar", "zarr", "both"])
def test_a_dataset_from_another_has_the_same_crops_and_rows(stored, small, tmp_path):
    made = build(small, tmp_path / "old", format=stored)
    again = build(made.root.url, tmp_path / "new")
    assert rows_of(again) == rows_of(made) and verify(again) == []
    assert verify(again, open_sources(str(small))) == []
    assert verify(again, open_sources(made.root.url)) == []
    assert (
        read_rejects(again) == read_rejects(made) and again.meta["sources"] == made.meta["sources"]
    )
    for row in range(len(again)):
        again.read(row)  # after its crc32c


def test_200_fields_stay(archive, tmp_path):
    """Of real columns: long records, missing leads, flags and diagnoses."""
    made = build(archive, tmp_path / "old")
    again = rows_of(build(made.root.url, tmp_path / "new"))
    rng = np.random.default_rng(0)
    rows = list(rows_of(made).items())
    for place in rng.integers(len(rows), size=200):
        crop, row = rows[place]
        name = rng.choice(list(row))
        assert again[crop][name] == row[name]


def test_what_a_record_was_warned_of_stays(tmp_path, monkeypatch):
    read = Listed.read
    notes = (("SOP class", "of x"), ("implausible amplitude", "12 mV"))
    monkeypatch.setattr(Listed, "read", lambda *key: replace(read(*key), warnings=notes))
    made = listed(tmp_path / "old", a=("mine", "one", 1))
    monkeypatch.setattr(Listed, "read", read)
    again = listed(tmp_path / "new", [made])
    assert read_rejects(again) == read_rejects(made) != []
    assert rows_of(again) == rows_of(made) and "implausible" in again[0].flags
    bare = listed(tmp_path / "bare", [made], {"pseudonym_key": KEY})
    assert {detail for *_, detail in read_rejects(bare)} == {""}


@pytest.mark.parametrize("key", [None, KEY])
def test_what_is_refused_is_named_as_in_the_dataset(key, tmp_path, monkeypatch):
    """A part of a record without a signal, and another ECG of a known name."""
    read = Listed.read

    def with_gap(source, name):
        record = read(source, name)
        signal = np.tile(record.signal.astype(np.float32), (1, 3))
        signal[:, 5000:10_000] = np.nan
        return replace(record, signal=signal)

    monkeypatch.setattr(Listed, "read", with_gap)
    how = {"pseudonym_key": key}
    made = listed(tmp_path / "old", options=how, a=("mine", "one", 1))
    other = listed(tmp_path / "other", options=how, a=("mine", "two", 2))
    name = pseudonym(key, "r", "mine", "a")
    for options in ({}, how):
        grown = listed(tmp_path / f"new {bool(options)}", [made, other], options)
        of_gap, of_other = (line for line in read_rejects(grown) if line[2] not in FLAG_REASONS)
        assert of_gap[:3] == ("mine", name, "no valid lead")
        assert of_gap[3] == ("" if key else "a: the dataset has no crop at 10 s")
        assert of_other[:3] == ("mine", f"{name} again", "record read already")


def test_a_dataset_grows_into_a_new_one(small, more, old, shell, tmp_path):
    """From either side; whoever is in both is used once."""
    both = Dataset.open(build_of(tmp_path / "both", small, more))
    before = files(old)
    for name, sources in (
        ("grown", (old, more)),
        ("all", (old, small, more)),
        ("late", (more, old)),
    ):
        _, said = shell.run("shard", *sources, "--out", tmp_path / name, "--workers", 2)
        made = Dataset.open(str(tmp_path / name))
        assert rows_of(made) == rows_of(both) and verify(made) == []
        assert ("15 records are in several sources, and used once" in said) == (name == "all")
        assert made.meta["sources"] == both.meta["sources"]
    assert files(old) == before
    said = shell.error("shard", old, more, "--out", old)
    assert "is also a source, and a dataset never changes" in said


def build_of(out, *archives):
    sources = [source for archive in archives for source in open_sources(str(archive))]
    options = finishing.ShardOptions(str(out), quiet=True)
    from omnilead.data_tools.sharding.shard import shard

    return shard(sources, options).root.url


def test_the_same_command_does_nothing_and_says_so(old, tmp_path, shell):
    out = tmp_path / "new"
    shell.shard(old, out)
    was = files(out)
    assert f"note: {out} is already finished: nothing was done\n" in shell.shard(old, out)
    assert files(out) == was


def test_other_roles_are_another_table(small, tmp_path, shell):
    """No shard is written; and a name key stays, under which models know patients."""
    out, right = tmp_path / "out", tmp_path / "right"
    made = build(small, out, plan="all")
    key, shards = (
        made.name_key,
        {name: data for name, data in files(out).items() if "shards/" in name},
    )
    assert "only roles differ" in shell.shard(small, out)
    again = Dataset.open(str(out))
    assert rows_of(again) == rows_of(build(small, right)) and verify(again) == []
    assert again.name_key == key and again.meta["roles"] != made.meta["roles"]
    assert shards.items() <= files(out).items() and again.shards == made.shards
    shell.shard(small, out, "--id-share", 1, "--leave-out-flags", "flat")
    assert Dataset.open(str(out)).meta["leave_out_flags"] == ["flat"]
    assert "seed was 0, not 1" in shell.error("shard", small, "--out", out, "--seed", 1)


def test_other_roles_after_a_kill(small, tmp_path, monkeypatch):
    """Between samples.parquet and dataset.json nothing can be read; the same command goes on."""
    out = tmp_path / "out"
    build(small, out, plan="all")
    with monkeypatch.context() as patch:
        patch.setattr(finishing, "write_card", dies_at_once)
        with pytest.raises(KeyboardInterrupt):
            build(small, out)
    with pytest.raises(DatasetError, match="fails its sha256"):
        Dataset.open(str(out)).table(["record"])
    shutil.copytree(out, tmp_path / "back")
    made = build(small, out)
    assert rows_of(made) == rows_of(build(small, tmp_path / "right")) and verify(made) == []
    before = build(small, tmp_path / "back", plan="all")  # as it was
    assert verify(before) == [] and before.meta["plan"] == "all"
    assert not (out / ".build").exists() and not (tmp_path / "back" / ".build").exists()


def test_a_damaged_dataset_stops_the_build(old, tmp_path):
    """Its crops are not refused one by one."""
    bad = tmp_path / "bad"
    shutil.copytree(old, bad)
    flip(next(bad.glob("shards/*.tar")), 5000)
    with pytest.raises(
        StorageError, match=r"crop \d+ at byte 512 fails its crc32c: restore the file"
    ):
        build(bad, tmp_path / "new")
    shutil.copy(next(Path(old).glob("shards/*.tar")), next(bad.glob("shards/*.tar")))
    assert verify(build(bad, tmp_path / "new")) == []


def test_an_earlier_format_is_a_source_but_not_a_dataset(old, tmp_path):
    former = as_earlier_format(Dataset.open(str(old)), tmp_path / "former")
    with pytest.raises(DatasetError, match=r"format 1\.1, .* omnilead shard .*former --out NEW"):
        Dataset.open(str(former))
    made = build(former, tmp_path / "new")
    assert rows_of(made) == rows_of(Dataset.open(str(old))) and verify(made) == []


def test_names_that_are_pseudonyms_stay(small, more, key_file, shell, tmp_path):
    """If the key is the same."""
    other = tmp_path / "other"
    other.write_bytes(b"x" * 20)
    other.chmod(0o600)
    keyed, right = tmp_path / "keyed", tmp_path / "right"
    hidden = ("--pseudonymize", key_file)
    shell.shard(small, keyed, *hidden)
    shell.run("shard", small, more, "--out", right, "--workers", 1, *hidden)
    shell.run("shard", keyed, more, "--out", tmp_path / "grown", "--workers", 1, *hidden)
    grown = Dataset.open(str(tmp_path / "grown"))
    assert rows_of(grown) == rows_of(Dataset.open(str(right)))
    assert verify(grown, open_sources(str(more)), key=None) != []
    for options in ((), ("--pseudonymize", other)):
        said = shell.error("shard", keyed, more, "--out", tmp_path / "no", *options)
        assert (
            f"{keyed}: its names are pseudonyms: give the key that they were made with as --pseudonymize"
            in said
        )
    shell.shard(keyed, tmp_path / "alone")  # nothing is to be hidden
    alone = Dataset.open(str(tmp_path / "alone"))
    assert rows_of(alone) == rows_of(Dataset.open(str(keyed)))
    assert alone.meta["pseudonyms"] == Dataset.open(str(keyed)).meta["pseudonyms"]
    plain = build(small, tmp_path / "plain")
    shell.shard(plain.root.url, tmp_path / "hidden", *hidden)
    assert rows_of(Dataset.open(str(tmp_path / "hidden"))) == rows_of(Dataset.open(str(keyed)))


def test_models_know_patients_by_the_same_key(tmp_path):
    """As long as their names are no pseudonyms."""
    made = listed(tmp_path / "old", a=("clinic", "one", 1))
    grown = listed(tmp_path / "new", [made], b=("clinic", "two", 2))
    assert made.name_key and grown.name_key == made.name_key and key_fingerprint(grown.name_key)
    assert listed(tmp_path / "third", [grown]).name_key == made.name_key


@pytest.mark.parametrize("key", [None, KEY])
def test_another_ecg_of_a_known_name_is_refused_and_said(key, tmp_path, capsys):
    how = {"pseudonym_key": key}
    made = listed(tmp_path / "old", options=how, a=("mine", "one", 1), b=("mine", "two", 2))
    other = {"a": ("mine", "three", 9), "b": ("mine", "two", 2), "c": ("mine", "four", 4)}
    grown = listed(tmp_path / "new", [made], how, **other)
    said = capsys.readouterr().err
    assert "note: 1 record is in several sources, and used once" in said
    assert "warning: 1 record is refused that has the name of another ECG" in said
    line = (
        "mine",
        pseudonym(key, "r", "mine", "a again" if not key else "a"),
        "record read already",
    )
    assert [one[:3] for one in read_rejects(grown)] == [line]
    assert len(read_rejects(grown)) == 1 and len(grown) == 3 and verify(grown) == []
    (facts,) = grown.meta["sources"]
    assert facts["records"] == {"seen": 4, "used": 3, "refused": 1}


def test_another_ecg_in_a_folder(tmp_path, shell):
    """Also of a longer record, and beside a damaged file."""
    for place, name, seed in (("one", "a", 1), ("one", "b", 2), ("two", "a", 3), ("two", "b", 2)):
        write_challenge(tmp_path / place / "x", name, ecg(12_000, seed))
    write_challenge(tmp_path / "three" / "x", "b", ecg(12_000, 2))
    (tmp_path / "three" / "x" / "b.mat").write_bytes(b"")
    shell.shard(tmp_path / "one", tmp_path / "first")
    for place, reason in (("two", "record read already"), ("three", "signal file size")):
        out = tmp_path / f"with_{place}"
        shell.run("shard", tmp_path / "first", tmp_path / place, "--out", out, "--workers", 2)
        made = Dataset.open(str(out))
        (line,) = read_rejects(made)
        assert line[1].startswith("x/") and line[2] == reason, line
        assert rows_of(made) == rows_of(Dataset.open(str(tmp_path / "first")))
        shell.run("verify", out, "--archive", tmp_path / "one", "--workers", 1)


def test_a_refused_record_is_added_once_it_can_be_read(tmp_path, monkeypatch):
    """And one whose file is gone, which the dataset has, is no news."""
    records = {f"r{i}": ("listed", "who", i) for i in range(4)}
    with monkeypatch.context() as patch:
        patch.setattr(Listed, "read", broken_at("r1"))
        made = listed(tmp_path / "old", **records)
    assert verify(made, [Listed(**records)]) == [
        "listed/r1 was refused (missing file), but can be read now: make a new dataset from it and this one"
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Listed, "read", broken_at("r0", "r2", "r3"))
        grown = listed(tmp_path / "new", [made], **records)
    assert sorted(grown.column("record")) == sorted(records) and read_rejects(grown) == []
    (facts,) = grown.meta["sources"]
    assert facts["records"] == {"seen": 4, "used": 4, "refused": 0}
    assert verify(grown, [Listed(**records)]) == []


def test_unknown_patients_beside_known_ones_are_refused(tmp_path, capsys):
    made = listed(tmp_path / "old", a=("mine", "one", 1), b=("mine", "two", 2))
    with pytest.raises(DataError, match=r"new records of mine are unknown.*--patients FILE"):
        listed(tmp_path / "new", [made], c=("mine", None, 3))
    assert len(listed(tmp_path / "new", [made], c=("other", None, 3))) == 3
    assert len(listed(tmp_path / "newer", [made], c=("mine", "who", 3), d=("mine", None, 4))) == 4
    some = {f"r{i}": ("mine", f"who{i}" if i % 3 else None, 9 + i) for i in range(9)}
    made = listed(tmp_path / "some", **some)
    assert len(listed(tmp_path / "one", [made], b=("mine", None, 2))) == 10
    new = {f"s{i}": ("mine", None, 50 + i) for i in range(9)}
    with pytest.raises(DataError, match="new records of mine are unknown"):
        listed(tmp_path / "nine", [made], **new)
    (tmp_path / "who.csv").write_text("record,patient\n" + "".join(f"{r},x{r}\n" for r in new))
    grown = listed(tmp_path / "nine", [made], {"patients": str(tmp_path / "who.csv")}, **new)
    assert {f"x{r}" for r in new} < set(grown.column("patient"))


def test_several_licences_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Listed, "licence", "ODbL-1.0")
    made = listed(tmp_path / "old", a=("mine", None, 1))
    monkeypatch.setattr(Listed, "licence", "CC0-1.0")
    grown = listed(tmp_path / "new", [made], b=("mine", None, 2))
    assert [one["licence"] for one in grown.meta["sources"]] == ["ODbL-1.0"]
    said = "mine has several licences, dataset.json names the first: ODbL-1.0, CC0-1.0"
    assert said in capsys.readouterr().err


def test_a_build_from_a_dataset_that_is_killed_goes_on(old, more, tmp_path, monkeypatch):
    right = Path(build_of(tmp_path / "right", old, more))
    for name in ("_build_missing_shards", "finish_dataset"):
        with monkeypatch.context() as patch:
            patch.setattr(f"omnilead.data_tools.sharding.shard.{name}", dies_at_once)
            with pytest.raises(KeyboardInterrupt):
                build_of(tmp_path / "new", old, more)
    assert files(Path(build_of(tmp_path / "new", old, more))) == files(right)


def test_a_source_needs_no_header_of_its_own(tmp_path, monkeypatch):
    """Of which only the patient is unknown."""
    header = Header("", "listed", 5000, 500.0)
    monkeypatch.setattr(Listed, "header", lambda _, name: replace(header, name=name))
    made = listed(tmp_path / "old", a=("listed", "one", 1))
    assert list(made.column("patient")) == ["one"]


def test_what_was_refused_before_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Listed, "read", broken_at("b"))
    made = listed(tmp_path / "old", a=("mine", "one", 1), b=("mine", "two", 2))
    (source,) = open_sources(made.root.url)
    place = f"{made.root.url}/rejects.csv"
    assert source.notes() == []  # `listed` could not be read, so its source is the class's
    assert [one["name"] for one in made.meta["sources"]] == ["listed", "mine"] and place


@pytest.mark.slow
def test_another_process_reads_the_same(old, tmp_path):
    """Workers get keys, no tables."""
    program = "import sys; from omnilead.__main__ import main; sys.exit(main())"
    out = tmp_path / "new"
    words = ["shard", str(old), "--out", str(out), "--workers", "2", "--shard-crops", "4"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rows_of(Dataset.open(str(out))) == rows_of(Dataset.open(str(old)))
    meta = json.loads((out / META).read_text())
    assert (
        meta["shard_crops"] == 4
        and (out / SAMPLES).is_file()
        and RoleSources.from_facts(Dataset.open(str(out)).facts)
    )
