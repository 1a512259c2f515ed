"""PTB-XL at 100 Hz: the copy that holds records100 alone."""

from pathlib import Path

import pytest
from handmade import crops_of, dat, ecg, header
from twins import PTBXL_COLUMNS, write_ptbxl, write_table

from data_tools.__main__ import main
from data_tools.dataset import Dataset
from data_tools.record import LEADS
from data_tools.sources import open_sources
from data_tools.sources.ptbxl import PtbXl


def write_100_hz(root: Path, numbers: list[int]) -> None:
    place = root / "records100" / "00000"
    place.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        x = ecg(1000, seed=number)
        names = [lead.upper() for lead in LEADS]
        text = header(f"{number:05d}_lr", x, "16 1000.0(0)/mV 16 0", f"{number:05d}_lr.dat", "100", names, (), unsigned=True)
        (place / f"{number:05d}_lr.hea").write_text(text)
        (place / f"{number:05d}_lr.dat").write_bytes(dat(x))


@pytest.mark.parametrize("kind", ["ptbxl", "auto"])
def test_records100_alone_is_ptbxl(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"ecg_id": number, "patient_id": 7, "sex": 1, "age": 60, "scp_codes": "{'AFIB': 0.0}"} for number in (1, 2, 3)]
    write_100_hz(tmp_path / "src", [1, 2, 3])
    write_table(tmp_path / "src" / "ptbxl_database.csv", PTBXL_COLUMNS, rows)
    given = ["--source", kind, "--id-share", "1", "--workers", "1"]
    assert main(["shard", str(tmp_path / "src"), "--out", str(tmp_path / "out"), *given]) == 0
    assert "no records500, so records100 is read" in capsys.readouterr().err
    made = Dataset.open(str(tmp_path / "out"))
    assert made.meta["sources"][0]["licence"] == PtbXl.licence
    crops = crops_of(made)
    assert set(crops) == {("ptb-xl", f"HR0000{number}") for number in (1, 2, 3)}
    for (one,) in crops.values():
        assert (one["patient"], one["fs_source_hz"], one["dx"], one["sex"]) == ("7", 100.0, ["164889003"], "F")
        assert one["halves"] == 2
    assert made.meta["roles"]["id"]["probe"] == 1


def test_the_original_is_read_where_both_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ptbxl(tmp_path, {1: {}})
    write_100_hz(tmp_path, [1, 2])
    (source,) = open_sources(str(tmp_path))
    assert [record.fs_hz for record in source] == [500.0] and source.notes() == []
