"""Every ECG below a folder is read, whichever command opens it; only where the user chooses a format,
the others are left out and counted."""

import subprocess

import fsspec
import pytest
from handmade import (
    crops_of,
    dat,
    ecg,
    header,
    write_challenge,
    write_files,
)
from test_dicom import BASE
from test_muse_xml import muse
from twins import write_code15, write_mimic, write_ptbxl

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io.storage import LocalFolder
from omnilead.data_tools.sources.detect import open_sources
from omnilead.downstream import predict
from tests.conftest import save_model


def challenge(place, database="georgia", records=1):
    for number in range(records):
        write_challenge(place / database / "g1", f"E{number:05d}", ecg(seed=number))


def plain(place, records=1):
    """WFDB records of format 16 in .dat files, without tables."""
    place.mkdir(parents=True, exist_ok=True)
    for number in range(records):
        x, name = ecg(seed=100 + number), f"{number:05d}_hr"
        (place / f"{name}.hea").write_text(header(name, x, "16 1000.0(0)/mV 16 0", f"{name}.dat"))
        (place / f"{name}.dat").write_bytes(dat(x))


def opened(root, *besides, kind="auto", **options):
    """Name and records of each source, and what was left out."""
    places = [str(root), *map(str, besides)]
    sources = open_sources(str(root), kind, besides=places, **options)
    noted = [source.left_out for source in sources if source.left_out]
    assert len(noted) <= 1
    return [(source.name, len(list(source.keys()))) for source in sources], "".join(noted)


@pytest.mark.parametrize("kind", ["auto", "physionet2021"])
def test_a_header_in_capitals_beside_an_archive_is_named(kind, tmp_path, shell):
    challenge(tmp_path / "a")
    write_challenge(tmp_path / "a/x", "R1", ecg(seed=5))
    (tmp_path / "a/x/R1.hea").rename(tmp_path / "a/x/R1.HEA")
    note = f"note: {tmp_path / 'a'}: does not read x/R1.HEA: a header's name ends in .hea\n"
    assert note in shell.shard(tmp_path / "a", tmp_path / "out", "--source", kind)


def test_records_beside_an_archive_are_read_with_a_note(tmp_path):
    challenge(tmp_path / "training", records=3)
    plain(tmp_path / "mywfdb" / "day 1", 21)
    found = [("physionet2021", 3)]
    what = f"{tmp_path}: reads 21 WFDB records outside of physionet2021, of unknown patients"
    both = [*found, ("wfdb", 21)]
    assert opened(tmp_path) == (both, f"{what} (mywfdb/day 1/00000_hr.hea, ...)")
    assert opened(tmp_path, private=True) == (both, what)
    assert opened(tmp_path, tmp_path / "mywfdb") == (found, "")
    assert opened(tmp_path / "mywfdb") == ([("wfdb", 21)], "")


@pytest.mark.parametrize("kind", ["physionet2021", "wfdb"])
def test_only_if_a_format_is_chosen_other_files_are_left_out_with_a_note(tmp_path, kind):
    if kind == "wfdb":
        plain(tmp_path)
    else:
        challenge(tmp_path / "training")
    (tmp_path / "one.xml").touch()
    what = f"{tmp_path}: leaves out 1 file that looks like an ECG"
    end = f": without --source {kind} none is left out"
    assert opened(tmp_path, kind=kind) == ([(kind, 1)], f"{what} (one.xml){end}")
    assert opened(tmp_path, kind=kind, private=True)[1] == what + end
    assert opened(tmp_path) == ([(kind, 1), ("hospital", 1)], "")


def test_vendor_files_are_read_beside_any_archive(tmp_path):
    """Also those without an ending; what has the name of a WFDB header belongs to its record."""
    challenge(tmp_path / "training")
    plain(tmp_path / "mine" / "day 1", 2)
    write_files(tmp_path / "mine" / "day 1", {"00000_hr.atr": BASE, "notes.txt": "none"})
    for place in ("mine", "mine/day 1", "scans/old"):
        write_files(tmp_path / place, {"one.xml": muse(), "1.2.3": BASE})
    (tmp_path / "two.xml").write_text(muse())
    assert opened(tmp_path / "mine") == ([("wfdb", 2), ("hospital", 4)], "")
    assert opened(tmp_path / "scans") == ([("hospital", 2)], "")
    found = [("physionet2021", 1), ("hospital", 3)]
    assert opened(tmp_path, tmp_path / "mine") == (found, "")


def test_a_folder_of_records_and_vendor_files_has_all_of_them_under_their_own_names(
    tmp_path, shell
):
    src, out = tmp_path / "src", tmp_path / "out"
    plain(src / "day 1", 2)
    write_files(src, {"day 1/00000_hr.xml": muse(), "scans/two.dcm": BASE, "notes.txt": "none"})
    assert "1 file of no known format was left out (1 .txt)" in shell.shard(src, out)
    mixed = crops_of(Dataset.open(str(out)))
    assert set(mixed) == {
        *{("wfdb", "day_1_00000_hr"), ("wfdb", "day_1_00001_hr")},
        *{("muse-xml", "day_1_00000_hr"), ("dicom", "scans_two")},
    }
    shell.verify(out, src)
    for kind in ("wfdb", "hospital"):  # as each of the two alone
        shell.shard(src, tmp_path / kind, "--source", kind)
        for name, (crop,) in crops_of(Dataset.open(str(tmp_path / kind))).items():
            assert mixed[name][0]["crc32c"] == crop["crc32c"]
    said = shell.shard(src, tmp_path / "no", "--source", "hospital", "--strict")
    assert "5 files of no known format were left out (2 .dat, 2 .hea, 1 .txt)" in said


def test_files_of_no_format_are_counted_once_all_have_been_looked_at(tmp_path, shell):
    src = write_files(tmp_path / "src", {"a.txt": "none", "b.xml": muse(), "c/d.txt": "none"})
    assert shell.shard(src, tmp_path / "out").count("of no known format") == 1


def test_what_an_archive_reads_is_not_searched(tmp_path, monkeypatch):
    """MIMIC-IV-ECG has 800,000 folders, and its records are in a table."""
    write_mimic(tmp_path / "mimic", {"41420867": "10001725"})
    plain(tmp_path / "mine")
    names = LocalFolder.names

    def watched(self, under=""):
        assert "mimic/files" not in f"{self.url}/{under}"
        return names(self, under)

    monkeypatch.setattr(LocalFolder, "names", watched)
    found = [("mimic-iv-ecg", 1), ("wfdb", 1)]
    assert opened(tmp_path)[0] == found and "mine/00000_hr.hea" in opened(tmp_path)[1]


def test_every_archive_is_opened_and_only_the_rest_is_counted(tmp_path):
    challenge(tmp_path / "training")
    challenge(tmp_path)  # databases are read from `training` only, if it exists
    write_ptbxl(tmp_path / "ptb-xl", {1: {}})
    write_ptbxl(tmp_path / "ptb-xl", {1: {}}, fs=100)  # the same ECGs once more
    write_mimic(tmp_path / "mimic", {"41420867": "10001725"})
    write_code15(tmp_path / "code15", {1: {"patient_id": "7"}})
    places = {"training": "physionet2021", "ptb-xl": "ptb-xl", "mimic": "mimic-iv-ecg"}
    places["code15"] = "code15"
    for place, name in places.items():
        assert opened(tmp_path / place)[0] == [(name, 1)]
    found, note = opened(tmp_path)
    assert dict(found) == dict.fromkeys([*places.values(), "wfdb"], 1)
    assert note.startswith(f"{tmp_path}: reads 1 WFDB record outside of ")
    assert note.endswith(", of unknown patients (georgia/g1/E00000.hea)")
    assert all(name in note for name in places.values())
    found, note = opened(tmp_path, tmp_path / "georgia")
    assert (dict(found), note) == (dict.fromkeys(places.values(), 1), "")
    write_ptbxl(tmp_path / "copies" / "old", {1: {}})
    challenge(tmp_path / "ptb-xl" / "more")
    found, note = opened(tmp_path, tmp_path / "georgia", tmp_path / "copies")
    assert ("wfdb", 1) in found and note.endswith(" (ptb-xl/more/georgia/g1/E00000.hea)")


@pytest.mark.parametrize(
    "place", ["ptb-xl", "ptb-xl/records500/00000", "georgia", "training", "training/georgia"]
)
def test_a_folder_with_an_archives_name_and_other_records_is_a_wfdb_folder(tmp_path, place):
    plain(tmp_path / place, 2)
    assert opened(tmp_path) == ([("wfdb", 2)], "")
    assert [source.name for source in open_sources(str(tmp_path))] == ["wfdb"]
    assert opened(tmp_path / place) == ([("wfdb", 2)], "")
    assert opened(tmp_path / place.split("/")[0]) == ([("wfdb", 2)], "")


def test_a_folder_of_headers_alone_is_opened(tmp_path):
    challenge(tmp_path / "training", records=2)
    for path in tmp_path.rglob("*.mat"):
        path.unlink()
    assert opened(tmp_path) == ([("wfdb", 2)], "")


def test_a_folder_that_may_not_be_listed_is_named(tmp_path, monkeypatch):
    challenge(tmp_path / "training")
    (tmp_path / "lost+found").mkdir()
    names = LocalFolder.names

    def listed(self, under=""):
        if under == "lost+found":
            raise PermissionError("denied")
        return names(self, under)

    monkeypatch.setattr(LocalFolder, "names", listed)
    assert opened(tmp_path) == ([("physionet2021", 1)], f"{tmp_path}: could not list lost+found")


def test_a_linked_folder_is_entered_only_if_it_is_an_archive(tmp_path):
    challenge(tmp_path / "src" / "training")
    challenge(tmp_path / "elsewhere" / "training", "cpsc_2018")
    plain(tmp_path / "others")
    (tmp_path / "src" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "src" / "b").symlink_to(tmp_path / "others")
    assert opened(tmp_path / "src") == (
        [("physionet2021", 1), ("physionet2021", 1)],
        f"{tmp_path}/src: does not follow linked folders: b",
    )


@pytest.mark.parametrize(
    ("linked", "name"),
    [("training", "physionet2021"), ("georgia", "physionet2021"), ("records500", "ptb-xl")],
)
def test_a_linked_part_of_an_archive_is_read(tmp_path, linked, name):
    place = tmp_path / "src"
    if linked == "records500":
        write_ptbxl(place, {1: {}})
    else:
        challenge(place / linked.replace("georgia", ""))
    (place / linked).rename(tmp_path / "elsewhere")
    (place / linked).symlink_to(tmp_path / "elsewhere")
    assert opened(place) == ([(name, 1)], "")


def test_a_bucket_is_listed_by_its_uppermost_folders(tmp_path, monkeypatch):
    challenge(tmp_path / "training")
    plain(tmp_path / "v1.0" / "mywfdb")
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path), "/left", recursive=True)
    listed = []
    find = type(store).find
    monkeypatch.setattr(
        type(store),
        "find",
        lambda self, path, **options: listed.append(path) or find(self, path, **options),
    )
    assert "(v1.0/mywfdb/00000_hr.hea)" in open_sources("memory://left")[0].left_out
    assert set(listed) == {"memory://left/training", "memory://left/v1.0"}


def test_no_command_leaves_out_half_of_a_folder(tmp_path, shell):
    src, out = tmp_path / "src", tmp_path / "out"
    mine = src / "mywfdb"
    challenge(src / "training", records=2)
    head = {"task": "diagnosis", "kind": "multilabel", "classes": ["AF"], "thresholds": [0.5]}
    model = str(save_model(tmp_path / "model", head=head))
    shell.shard(src, out)
    plain(mine)

    def predicted(name, *places):
        words = ["--model", model, "--data", *map(str, places), "--out", str(tmp_path / name)]
        assert predict.main(words) == 0
        assert (tmp_path / name).read_text().count("\n") == 1 + 3
        return shell.capsys.readouterr().err

    note = f"{src}: reads 1 WFDB record outside of physionet2021, "
    assert shell.shard(src, f"{out}2").count(note) == 1
    assert shell.verify(f"{out}2", src).count(note) == 1
    assert predicted("a.csv", src).count(note) == 1
    both = ("shard", src, mine, "--out", f"{out}3", "--workers", 1)
    assert note not in shell.run(*both)[1]
    assert note not in shell.run("verify", f"{out}3", "--archive", src, mine, "--workers", 1)[1]
    assert note not in predicted("b.csv", src, mine)
    shell.verify(out, src, code=1)  # the dataset was made before


def link(place, target):
    """Twelve WFDB records of another folder, linked."""
    if not target.exists():
        plain(target, 12)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


@pytest.mark.parametrize("kind", ["wfdb", "hospital", "challenge", "ptb-xl", "muse-xml", "plug-in"])
def test_a_linked_folder_is_named_wherever_it_is(tmp_path, kind, shell):
    src, elsewhere, options = tmp_path / "src", tmp_path / "elsewhere", []
    inside = ("day 1/deep/more", "more")
    if kind in ("wfdb", "plug-in"):
        plain(src / "day 1")
    elif kind in ("hospital", "muse-xml"):
        write_files(src, {"day 1/one.xml": muse()})
    elif kind == "challenge":
        challenge(src / "training")
        inside = ("training/georgia/g2", "other/g3")
    else:
        write_ptbxl(src, {1: {}})
        inside = ("records500/01000", "more/deep")
    if kind == "plug-in":
        options = ["--source", "omnilead.data_tools.sources.wfdb_archives:WfdbFolder"]
    elif kind == "muse-xml":
        options = ["--source", kind]
    for place in inside:
        link(src / place, elsewhere)
    note = f"{src}: does not follow linked folders: {', '.join(inside)}\n"
    out = tmp_path / "out"
    assert shell.shard(src, out, *options).count(note) == 1
    assert shell.verify(out, src, *options).count(note) == 1


def test_a_linked_folder_that_is_given_too_is_not_named(tmp_path):
    plain(tmp_path / "src")
    link(tmp_path / "src/more", tmp_path / "elsewhere")
    assert opened(tmp_path / "src", tmp_path / "src/more") == ([("wfdb", 1)], "")
    assert opened(tmp_path / "src", tmp_path / "elsewhere") == ([("wfdb", 1)], "")
    hidden = f"{tmp_path}/src: does not follow linked folders: 1 of its folders"
    assert opened(tmp_path / "src", private=True) == ([("wfdb", 1)], hidden)


def test_a_linked_folder_in_a_zip_is_named(tmp_path):
    plain(tmp_path / "src")
    link(tmp_path / "src/more", tmp_path / "elsewhere")
    subprocess.run(["zip", "-qry", "src.zip", "src"], cwd=tmp_path, check=True)
    note = "does not follow linked folders: more"
    assert opened(tmp_path / "src.zip") == ([("wfdb", 1)], f"{tmp_path}/src.zip: {note}")
