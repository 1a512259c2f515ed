"""Files that look like ECGs and that no source of a folder reads are counted, whichever command
opens the folder."""

from pathlib import Path

import fsspec
import pytest
from handmade import dat, ecg, header, write_challenge
from twins import write_code15, write_mimic, write_ptbxl

from omnilead.data_tools.__main__ import main
from omnilead.data_tools.hospital.files import HospitalFiles
from omnilead.data_tools.sources import open_sources
from omnilead.data_tools.storage import LocalFolder
from omnilead.engine import embed, predict
from tests.conftest import save_model


def challenge(place: Path, database: str = "georgia", records: int = 1) -> None:
    for number in range(records):
        write_challenge(place / database / "g1", f"E{number:05d}", ecg(seed=number))


def plain(place: Path, records: int = 1) -> None:
    """WFDB records of format 16 in .dat files, without tables."""
    place.mkdir(parents=True, exist_ok=True)
    for number in range(records):
        x, name = ecg(seed=100 + number), f"{number:05d}_hr"
        (place / f"{name}.hea").write_text(header(name, x, "16 1000.0(0)/mV 16 0", f"{name}.dat"))
        (place / f"{name}.dat").write_bytes(dat(x))


def opened(root: Path, *besides: Path) -> tuple[list[tuple[str, int]], str]:
    """Name and records of each source, and what was left out."""
    sources = open_sources(
        str(root), besides=[str(root), *map(str, besides)], hospital=HospitalFiles
    )
    noted = [source.left_out for source in sources if source.left_out]
    assert len(noted) <= 1
    return [(source.name, len(list(source.keys()))) for source in sources], (noted or [""])[0]


def test_records_beside_an_archive_are_counted_until_their_folder_is_given_too(
    tmp_path: Path,
) -> None:
    challenge(tmp_path / "training", records=3)
    plain(tmp_path / "mywfdb" / "day 1", 21)
    found, note = opened(tmp_path)
    assert found == [("physionet2021", 3)]
    what = f"{tmp_path}: leaves out 21 files that look like ECGs: "
    assert note == f"{what}mywfdb/day 1/00000_hr.hea and 20 more: give {tmp_path}/mywfdb as well"
    assert opened(tmp_path, tmp_path / "mywfdb") == (found, "")
    assert opened(tmp_path / "mywfdb") == ([("wfdb", 21)], "")
    private = open_sources(str(tmp_path), private=True, hospital=HospitalFiles)[0].left_out
    assert private == f"{what}give the folders that hold them as well"


def test_files_in_an_archives_folder_are_counted_also_if_its_kind_is_given(tmp_path: Path) -> None:
    challenge(tmp_path / "training")
    (tmp_path / "one.xml").touch()
    note = f"{tmp_path}: leaves out 1 file that looks like an ECG: one.xml: "
    for kind in ("auto", "physionet2021"):
        (source,) = open_sources(str(tmp_path), kind, hospital=HospitalFiles)
        assert source.left_out == f"{note}move them to a folder of their own and give it as well"
    plain(tmp_path / "wfdb")
    (tmp_path / "wfdb" / "a.dcm").touch()
    assert (
        "1 file that looks like an ECG: a.dcm"
        in open_sources(f"{tmp_path}/wfdb", "wfdb", hospital=HospitalFiles)[0].left_out
    )


def test_what_an_archive_reads_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MIMIC-IV-ECG has 800,000 folders, and its records are in a table."""
    write_mimic(tmp_path / "mimic", {"41420867": "10001725"})
    plain(tmp_path / "mine")
    listed = []
    names = LocalFolder.names

    def noted(self: LocalFolder, under: str = "") -> object:
        listed.append(f"{self.url}/{under}")
        return names(self, under)

    monkeypatch.setattr(LocalFolder, "names", noted)
    assert "mine/00000_hr.hea" in open_sources(str(tmp_path))[0].left_out
    assert not [place for place in listed if "mimic/files" in place]


def test_every_archive_is_opened_and_only_the_rest_is_counted(tmp_path: Path) -> None:
    challenge(tmp_path / "training")
    challenge(tmp_path)  # databases are read from `training` only, if it exists
    write_ptbxl(tmp_path / "ptb-xl", {1: {}})
    write_ptbxl(tmp_path / "ptb-xl", {1: {}}, fs=100)  # the same ECGs once more
    write_mimic(tmp_path / "mimic", {"41420867": "10001725"})
    write_code15(tmp_path / "code15", {1: {"patient_id": "7"}})
    found, note = opened(tmp_path)
    assert dict(found) == {"physionet2021": 1, "ptb-xl": 1, "mimic-iv-ecg": 1, "code15": 1}
    assert note == (
        f"{tmp_path}: leaves out 1 file that looks like an ECG: georgia/g1/E00000.hea: "
        f"give {tmp_path}/georgia as well"
    )
    write_ptbxl(tmp_path / "copies" / "old", {1: {}})
    challenge(tmp_path / "ptb-xl" / "more")
    found, note = opened(tmp_path, tmp_path / "georgia", tmp_path / "copies")
    assert len(found) == 4
    assert "ptb-xl/more/georgia/g1/E00000.hea: " in note
    assert note.endswith(f"give {tmp_path}/ptb-xl/more as well")


@pytest.mark.parametrize(
    "place", ["ptb-xl", "ptb-xl/records500/00000", "georgia", "training", "training/georgia"]
)
def test_a_folder_with_an_archives_name_and_other_records_is_a_wfdb_folder(
    tmp_path: Path, place: str
) -> None:
    plain(tmp_path / place, 2)
    assert opened(tmp_path) == ([("wfdb", 2)], "")
    assert opened(tmp_path / place) == ([("wfdb", 2)], "")
    assert opened(tmp_path / place.split("/")[0]) == ([("wfdb", 2)], "")


def test_a_folder_of_headers_alone_is_opened(tmp_path: Path) -> None:
    challenge(tmp_path / "training", records=2)
    for path in tmp_path.rglob("*.mat"):
        path.unlink()
    assert opened(tmp_path) == ([("wfdb", 2)], "")


def test_a_folder_that_may_not_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    challenge(tmp_path / "training")
    (tmp_path / "lost+found").mkdir()
    names = LocalFolder.names
    denied = PermissionError("denied")

    def listed(self: LocalFolder, under: str = "") -> object:
        if under == "lost+found":
            raise denied
        return names(self, under)

    monkeypatch.setattr(LocalFolder, "names", listed)
    assert opened(tmp_path) == ([("physionet2021", 1)], f"{tmp_path}: could not list lost+found")


def test_a_linked_folder_is_entered_only_if_it_is_an_archive(tmp_path: Path) -> None:
    challenge(tmp_path / "src" / "training")
    challenge(tmp_path / "elsewhere" / "training", "cpsc_2018")
    plain(tmp_path / "others")
    (tmp_path / "src" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "src" / "b").symlink_to(tmp_path / "others")
    assert opened(tmp_path / "src") == (
        [("physionet2021", 1), ("physionet2021", 1)],
        f"{tmp_path}/src: does not follow linked folders: b",
    )


@pytest.mark.parametrize("linked", ["training", "georgia", "records500"])
def test_a_linked_part_of_an_archive_is_read(tmp_path: Path, linked: str) -> None:
    place = tmp_path / "src"
    if linked == "records500":
        write_ptbxl(place, {1: {}})
    else:
        challenge(place / "training" if linked == "training" else place)
    (place / linked).rename(tmp_path / "elsewhere")
    (place / linked).symlink_to(tmp_path / "elsewhere")
    assert opened(place) == ([("ptb-xl" if linked == "records500" else "physionet2021", 1)], "")


def test_a_bucket_is_listed_by_its_uppermost_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    challenge(tmp_path / "training")
    plain(tmp_path / "v1.0" / "mywfdb")
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path), "/left", recursive=True)
    listed: list[str] = []
    find = type(store).find
    monkeypatch.setattr(
        type(store),
        "find",
        lambda self, path, **options: listed.append(path) or find(self, path, **options),
    )
    (source,) = open_sources("memory://left")
    assert source.left_out.endswith("v1.0/mywfdb/00000_hr.hea: give memory://left/v1.0 as well")
    assert sorted(listed) == ["memory://left/training", "memory://left/v1.0"]


def test_every_command_says_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "src", tmp_path / "out"
    challenge(source / "training", records=2)
    plain(source / "mywfdb")
    note = f"note: {source}: leaves out 1 file that looks like an ECG: mywfdb/00000_hr.hea: "
    head = {"task": "diagnosis", "kind": "multilabel", "classes": ["AF"], "thresholds": [0.5]}
    model, data = str(save_model(tmp_path / "model", head=head)), ["--data", str(source)]
    commands = {
        "shard": lambda: main(["shard", str(source), "--out", str(out), "--workers", "1"]),
        "verify": lambda: main(["verify", str(out), "--archive", str(source), "--workers", "1"]),
        "predict": lambda: predict.main(
            ["--model", model, *data, "--out", str(tmp_path / "dx.csv")]
        ),
        "embed": lambda: embed.main(
            ["--model", model, *data, "--out", str(tmp_path / "x.parquet")]
        ),
    }
    for name, run in commands.items():
        assert run() == 0, name
        assert capsys.readouterr().err.count(note) == 1, name
    assert (
        main(["shard", str(source), f"{source}/mywfdb", "--out", f"{out}2", "--workers", "1"]) == 0
    )
    assert "leaves out" not in capsys.readouterr().err
    more = [*data, f"{source}/mywfdb", "--out", str(tmp_path / "all.csv")]
    assert predict.main(["--model", model, *more]) == 0
    assert (
        "leaves out" not in capsys.readouterr().err
        and (tmp_path / "all.csv").read_text().count("\n") == 4
    )
