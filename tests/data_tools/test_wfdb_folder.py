"""Folders of WFDB records, in every format, read as `wfdb` reads them."""

from pathlib import Path

import numpy as np
import pytest
import wfdb
from handmade import dat, ecg
from twins import FORMATS, read, write_wfdb

from omnilead.data_tools.dataset import CROP_SHAPE
from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.prepare import prepare_crop
from omnilead.data_tools.record import LEADS
from omnilead.data_tools.sources.wfdb_folder import WfdbFolder
from omnilead.data_tools.storage import folder


@pytest.mark.parametrize(
    "leads",
    [LEADS, ("resp", "I", "II", "V1", "V2", "V3", "V4", "V5", "V6")],
    ids=["12 leads", "8 leads"],
)
@pytest.mark.parametrize("form", FORMATS)
def test_any_wfdb_format_is_read_as_wfdb_reads_it(
    tmp_path: Path, form: str, leads: tuple[str, ...]
) -> None:
    x = write_wfdb(tmp_path, "rec_1", form, leads)
    record = read(WfdbFolder(folder(tmp_path)))["rec_1"]
    oracle = wfdb.rdrecord(str(tmp_path / "rec_1"))
    np.testing.assert_array_equal(record.signal, x)
    mv = (record.signal - np.array(record.baseline)[:, None]) / np.array(record.gain)[:, None]
    np.testing.assert_array_equal(
        np.where(record.signal == record.invalid, np.nan, mv), oracle.p_signal.T
    )
    assert (record.fs_hz, record.leads) == (360, leads)
    missing = set(prepare_crop(record, 0, np.empty(CROP_SHAPE, "<i2")).missing)
    assert missing == set(LEADS) - set(leads) | ({"V6"} if form != "8" else set())


def test_a_file_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    """wfdb itself takes what it needs of a longer file."""
    for form, leads in (("212", 3), ("24", 2), ("80", 5)):
        write_wfdb(tmp_path, f"f{form}", form, LEADS[:leads])
        path = tmp_path / f"f{form}.dat"
        for data, reason in (
            (path.read_bytes()[:-3], "signal file size"),
            (path.read_bytes() + b"\0\0\0\0", "file too large"),
        ):
            path.write_bytes(data)
            with pytest.raises(ReadError, match=reason):
                WfdbFolder(folder(tmp_path)).read(f"f{form}.hea")
            path.write_bytes(data[:-4] if reason == "file too large" else data + bytes(3))


def test_records_in_two_files_and_channels_in_other_units_are_read(tmp_path: Path) -> None:
    x = ecg(3600, 1)
    line = "{}.dat 16 200(0)/{} 16 0 0 0 0 {}".format
    lines = [
        "two 3 360 3600",
        line("a", "mV", "II"),
        line("a", "mV", "V1"),
        line("b", "mmHg", "ABP"),
    ]
    (tmp_path / "two.hea").write_text("\n".join(lines))
    (tmp_path / "a.dat").write_bytes(dat(x[:2]))
    (tmp_path / "b.dat").write_bytes(dat(x[2:3]))
    (record,) = WfdbFolder(folder(tmp_path))
    np.testing.assert_array_equal(record.signal, x[:3])
    assert set(LEADS) - set(prepare_crop(record, 0, np.empty(CROP_SHAPE, "<i2")).missing) == {
        "II",
        "V1",
    }


def test_equal_names_in_subfolders_become_different_records(tmp_path: Path) -> None:
    places = ["", "patient 1", "patient 2/day 1"]
    made = [
        write_wfdb(tmp_path / place, "rec_1", "212", LEADS, samples=3600 + i)
        for i, place in enumerate(places)
    ]
    write_wfdb(tmp_path / ("long" * 20), "rec_1", "16", LEADS)
    source = WfdbFolder(folder(tmp_path))
    assert "patients are unknown" in source.notes()[0]
    keys = list(source.keys())
    with pytest.raises(ReadError, match="64 at most"):
        source.header(keys.pop(1))
    records = [source.read(key) for key in keys]
    assert [record.name for record in records] == [
        "rec_1",
        "patient_1_rec_1",
        "patient_2_day_1_rec_1",
    ]
    for record, x in zip(records, made, strict=True):
        np.testing.assert_array_equal(record.signal, x)
