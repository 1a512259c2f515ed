"""Folders of WFDB records, in every format, read as `wfdb` reads them."""

import re

import numpy as np
import pytest
import wfdb
from handmade import dat, ecg, header, write_files
from twins import FORMATS, crop_facts, read, write_wfdb

from omnilead.__main__ import main
from omnilead.data_tools.ecg.record import LEADS
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sources.base import prepare_record
from omnilead.data_tools.sources.wfdb import parse_header, read_record
from omnilead.data_tools.sources.wfdb_archives import WfdbFolder


@pytest.mark.parametrize("leads", [LEADS, ("resp", "I", "II", *LEADS[6:])], ids=["12", "8"])
@pytest.mark.parametrize("form", FORMATS)
def test_any_wfdb_format_is_read_as_wfdb_reads_it(tmp_path, form, leads):
    x = write_wfdb(tmp_path, "rec_1", form, leads)
    source = WfdbFolder(folder(tmp_path))
    found = read(source)["rec_1"]
    record = read_record(
        source.root, "rec_1.hea", parse_header(source._header_bytes("rec_1.hea")), "", ""
    )
    np.testing.assert_array_equal(record.signal, x)
    mv = (x - np.array(record.baseline)[:, None]) / np.array(record.gain)[:, None]
    right = wfdb.rdrecord(str(tmp_path / "rec_1")).p_signal.T
    np.testing.assert_array_equal(np.where(x == record.invalid, np.nan, mv), right)
    assert (found.fs_hz, record.leads) == (360, leads)
    unmeasured = {"V6"} if form != "8" else set()
    crop, samples = crop_facts(found)
    assert set(crop.missing) == unmeasured
    if len(leads) == 12:  # not a copy of the numbers: the numbers
        np.testing.assert_array_equal(found.signal, x)
        return
    measured, as_stored = crop_facts(record)
    assert set(measured.missing) == {"III", "aVR", "aVL", "aVF"} | unmeasured
    rest = [0, 1, *range(6, 12)]
    np.testing.assert_array_equal(samples[rest], as_stored[rest])


@pytest.mark.parametrize("flat", [False, True])
def test_limb_leads_that_are_not_in_a_file_are_computed_if_i_and_ii_were_measured(tmp_path, flat):
    x = ecg(5000, 1)
    x[:2] *= not flat
    kept = [1, 0, 3, *range(6, 12)]
    for name, rows in (("all", range(12)), ("nine", kept)):
        leads = [LEADS[row] for row in rows]
        text = header(name, x[list(rows)], "16 1000(0)/mV 16 0", f"{name}.dat", leads=leads)
        write_files(tmp_path, {f"{name}.hea": text, f"{name}.dat": dat(x[list(rows)])})
    records = read(WfdbFolder(folder(tmp_path)))
    (_, whole), (crop, samples) = crop_facts(records["all"]), crop_facts(records["nine"])
    np.testing.assert_array_equal(samples[kept], whole[kept])
    assert crop.missing == (("III", "aVL", "aVF") if flat else ())
    if not flat:
        assert np.abs(samples.astype(int) - whole).max() <= 1


@pytest.mark.parametrize(("form", "leads"), [("212", 3), ("24", 2), ("80", 5)])
@pytest.mark.parametrize(("size", "reason"), [(-3, "signal file size"), (4, "file too large")])
def test_a_file_of_the_wrong_length_is_refused(tmp_path, form, leads, size, reason):
    """wfdb itself takes what it needs of a longer file."""
    write_wfdb(tmp_path, "one", form, LEADS[:leads])
    data = (tmp_path / "one.dat").read_bytes()
    (tmp_path / "one.dat").write_bytes(data[:size] if size < 0 else data + bytes(size))
    with pytest.raises(ReadError, match=reason):
        WfdbFolder(folder(tmp_path)).read("one.hea")


def test_records_in_two_files_and_channels_in_other_units_are_read(tmp_path):
    x = ecg(3600, 1)
    hea = """two 3 360 3600
a.dat 16 200(0)/mV 16 0 0 0 0 II
a.dat 16 200(0)/mV 16 0 0 0 0 V1
b.dat 16 200(0)/mmHg 16 0 0 0 0 ABP
"""
    files = {"two.hea": hea, "a.dat": dat(x[:2]), "b.dat": dat(x[2:3])}
    (record,) = WfdbFolder(folder(write_files(tmp_path, files)))
    np.testing.assert_array_equal(record.signal, x[:3])
    assert set(LEADS) - set(crop_facts(record)[0].missing) == {"II", "V1"}


def test_shard_counts_ages_and_sexes_that_are_not_understood_with_an_example(tmp_path, capsys):
    x, files = ecg(5000, 1), {}
    for name, sex in (("a", "F"), ("b", "1"), ("c", "2")):
        text = header(name, x, "16 1000(0)/mV 16 0", f"{name}.dat", comments=[f"# Sex: {sex}"])
        files |= {f"{name}.hea": text, f"{name}.dat": dat(x)}
    root = str(write_files(tmp_path / "src", files))
    assert main(["shard", root, "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"(?m)^  sex not understood +2  such as b 1$", said)


def test_shard_counts_what_was_refused_repaired_and_flagged(tmp_path, shell):
    x, files = ecg(5000, 1), {}
    for name in ("good", "gap", "flat", "short"):
        signal = x[:, :1000].copy() if name == "short" else x.copy()
        if name == "gap":
            signal[7, 100] = -32768
        elif name == "flat":
            signal[8] = 5
        text = header(name, signal, "16 1000(0)/mV 16 0", f"{name}.dat")
        files |= {f"{name}.hea": text, f"{name}.dat": dat(signal)}
    root = write_files(tmp_path / "src", files)
    said, _ = shell.run("shard", root, "--out", tmp_path / "out", "--workers", 1)
    assert "lines of rejects.csv: 1 refused, 1 repaired, 1 flagged\n" in said


def test_equal_names_in_subfolders_become_different_records(tmp_path):
    made = {
        name: write_wfdb(tmp_path / place, "rec_1", "212", LEADS, samples=3600 + len(name))
        for place, name in (
            ("", "rec_1"),
            ("patient 1", "patient_1_rec_1"),
            ("patient 2/day 1", "patient_2_day_1_rec_1"),
        )
    }
    source = WfdbFolder(folder(tmp_path))
    assert "without tables of patients" in source.notes()[0]
    records = read(source)
    assert set(records) == set(made)
    for name, x in made.items():
        np.testing.assert_array_equal(records[name].signal, x)
    write_wfdb(tmp_path / ("long" * 20), "rec_1", "16", LEADS)
    with pytest.raises(ReadError, match="64 at most"):
        source.header(f"{'long' * 20}/rec_1.hea")


@pytest.mark.parametrize("leads", [LEADS, ("I", "II", *LEADS[6:], "resp")], ids=["12", "8"])
@pytest.mark.parametrize(
    ("factor", "form", "doubtful"),
    [
        (1, "16", False),
        (0.02, "16", True),
        (20, "16", True),
        (1, "212", False),
        (0.02, "212", True),
    ],
)
def test_amplitudes_that_no_heart_has_are_noted(factor, form, doubtful, leads, tmp_path):
    """As of hospital files and arrays; whatever the format, and a channel that is no lead does not count."""
    time_s = np.arange(5000) / 500
    beats = np.exp(-(((time_s % 0.8) - 0.4) ** 2) / 2e-4)
    steps = np.rint(200 * beats * np.arange(1, len(leads) + 1)[:, None] / len(leads)).astype("<i2")
    steps[1, 2500] = -2048 if form == "212" else -32768  # not measured
    signal = steps.T.copy()
    per_mv = [200 / factor] * len(leads)
    if "resp" in leads:
        per_mv[-1] = 0.01
    wfdb.wrsamp(
        *("r", 500, ["mV"] * len(leads), list(leads)),
        d_signal=signal.astype(np.int64),
        fmt=[form] * len(leads),
        adc_gain=per_mv,
        baseline=[0] * len(leads),
        write_dir=str(tmp_path),
    )
    ecg = prepare_record(WfdbFolder(folder(tmp_path)), "r.hea")
    assert [("implausible" in flags) for flags in ecg.flags] == [doubtful]
