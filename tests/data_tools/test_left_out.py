"""Files that look like ECGs and that no source of a folder reads are counted, whichever command
opens the folder."""

import fsspec
import pytest
from handmade import dat, ecg, header, run_shard, run_verify, write_challenge
from twins import write_code15, write_mimic, write_ptbxl

from omnilead.data_tools.__main__ import main
from omnilead.data_tools.hospital.files import HospitalFiles
from omnilead.data_tools.sources import open_sources
from omnilead.data_tools.storage import LocalFolder
from omnilead.engine import predict
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


def opened(root, *besides, kind="auto"):
    """Name and records of each source, and what was left out."""
    places = [str(root), *map(str, besides)]
    sources = open_sources(str(root), kind, besides=places, hospital=HospitalFiles)
    noted = [source.left_out for source in sources if source.left_out]
    assert len(noted) <= 1
    return [(source.name, len(list(source.keys()))) for source in sources], "".join(noted)


def test_records_beside_an_archive_are_counted_until_their_folder_is_given_too(tmp_path):
    challenge(tmp_path / "training", records=3)
    plain(tmp_path / "mywfdb" / "day 1", 21)
    found = [("physionet2021", 3)]
    what = f"{tmp_path}: leaves out 21 files that look like ECGs: "
    note = f"{what}mywfdb/day 1/00000_hr.hea and 20 more: give {tmp_path}/mywfdb as well"
    assert opened(tmp_path) == (found, note)
    assert opened(tmp_path, tmp_path / "mywfdb") == (found, "")
    assert opened(tmp_path / "mywfdb") == ([("wfdb", 21)], "")
    private = open_sources(str(tmp_path), private=True, hospital=HospitalFiles)[0].left_out
    assert private == f"{what}give the folders that hold them as well"


@pytest.mark.parametrize("kind", ["auto", "physionet2021", "wfdb"])
def test_files_in_an_archives_folder_are_counted_also_if_its_kind_is_given(tmp_path, kind):
    if kind == "wfdb":
        plain(tmp_path)
    else:
        challenge(tmp_path / "training")
    (tmp_path / "one.xml").touch()
    note = f"{tmp_path}: leaves out 1 file that looks like an ECG: one.xml: "
    assert (
        opened(tmp_path, kind=kind)[1]
        == f"{note}move them to a folder of their own and give it as well"
    )


def test_what_an_archive_reads_is_not_searched(tmp_path, monkeypatch):
    """MIMIC-IV-ECG has 800,000 folders, and its records are in a table."""
    write_mimic(tmp_path / "mimic", {"41420867": "10001725"})
    plain(tmp_path / "mine")
    names = LocalFolder.names

    def watched(self, under=""):
        assert "mimic/files" not in f"{self.url}/{under}"
        return names(self, under)

    monkeypatch.setattr(LocalFolder, "names", watched)
    assert "mine/00000_hr.hea" in open_sources(str(tmp_path))[0].left_out


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
    assert dict(found) == dict.fromkeys(places.values(), 1)
    what = f"{tmp_path}: leaves out 1 file that looks like an ECG: georgia/g1/E00000.hea"
    assert note == f"{what}: give {tmp_path}/georgia as well"
    write_ptbxl(tmp_path / "copies" / "old", {1: {}})
    challenge(tmp_path / "ptb-xl" / "more")
    found, note = opened(tmp_path, tmp_path / "georgia", tmp_path / "copies")
    assert len(found) == 4
    assert "ptb-xl/more/georgia/g1/E00000.hea: " in note
    assert note.endswith(f"give {tmp_path}/ptb-xl/more as well")


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
    (source,) = open_sources("memory://left")
    assert source.left_out.endswith("v1.0/mywfdb/00000_hr.hea: give memory://left/v1.0 as well")
    assert sorted(listed) == ["memory://left/training", "memory://left/v1.0"]


def test_every_command_says_what_it_leaves_out(tmp_path, capsys):
    src, out = str(tmp_path / "src"), str(tmp_path / "out")
    mine = f"{src}/mywfdb"
    challenge(tmp_path / "src" / "training", records=2)
    plain(tmp_path / "src" / "mywfdb")
    head = {"task": "diagnosis", "kind": "multilabel", "classes": ["AF"], "thresholds": [0.5]}
    model = ["--model", str(save_model(tmp_path / "model", head=head)), "--data", src]
    note = f"note: {src}: leaves out 1 file that looks like an ECG: mywfdb/00000_hr.hea: "
    for run, notes in (
        (lambda: run_shard(src, out), 1),
        (lambda: run_verify(out, src), 1),
        (lambda: predict.main([*model, "--out", f"{out}.csv"]), 1),
        (lambda: main(["shard", src, mine, "--out", f"{out}2", "--workers", "1"]), 0),
    ):
        assert run() == 0
        assert capsys.readouterr().err.count(note) == notes
