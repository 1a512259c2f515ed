"""SCP-ECG: the standard's default code against an encoder of it, and no file read wrongly."""

import struct

import numpy as np
import pytest
from binary_ecgs import checked, row_3, scp, scp_of
from hospital_cases import (
    BORN,
    SECRET,
    check_ecgdatakit,
    check_private,
    check_truth,
    decoded,
    leads_uv,
    refuses,
    withstands,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilead.data_tools.ecg.record import LEADS
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.sources.hospital.scp import decode

KIND = "scp-ecg"
X = leads_uv(500)
TWO = {lead: X[lead][:9] for lead in ("I", "II")}
NINE = {"I": np.arange(9)}
GOOD = scp(X)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_every_difference_is_undone(order, raw, tmp_path):
    ramp = np.cumsum(np.arange(-700, 700) // 70)  # small steps: all of the code's short words
    steps = np.cumsum(np.resize([0, 1, -1, 8, -8, 9, -9, 127, -128, 128, -129, 4000, -3870], 1400))
    leads = {"I": ramp, "II": steps, "aVF": np.arange(1400)}
    found = decode(scp(leads | {"V7": ramp}, order, raw, nanovolts=2500))
    check_truth(found, {lead: 2.5 * x for lead, x in leads.items()})
    assert found[1:] == (500.0, "4711", 61.0, "F", ())
    (tmp_path / "one.scp").write_bytes(scp(leads, order, raw))
    if order == 0 or not raw:
        check_ecgdatakit(KIND, tmp_path / "one.scp")


def test_leads_that_start_later_are_not_measured_before():
    i, ii = np.arange(50), np.arange(60)
    gaps = {"I": [*5 * i, *[np.nan] * 40], "II": [*[np.nan] * 30, *5 * ii]}
    check_truth(decode(scp({"I": i, "II": ii}, starts={"I": 0, "II": 31})), gaps)


def test_a_raw_lead_ends_where_its_length_does():
    found = decode(scp({"I": np.arange(32767)}, order=0, raw=True, stated=37855))
    assert found.warnings[0][0] == "shorter than stated"
    assert len(found.signals["I"]) == 32767


@pytest.mark.parametrize(
    ("interval_us", "fs_hz"), [(2000, 500), (1667, 600), (2083, 480), (2100, 1e6 / 2100)]
)
def test_rates_are_stated_in_whole_microseconds(interval_us, fs_hz):
    assert decode(scp(TWO, interval_us=interval_us)).fs_hz == fs_hz


@pytest.mark.parametrize("person", [{}, {2: b"", 4: b"\0\0\0", 8: b"\x09"}, {4: b"\1"}])
def test_who_it_is_may_be_unknown(person):
    assert decode(scp(X, person=person))[2:5] == ("", None, None)


def test_an_age_in_months_is_converted_to_years():
    assert decode(scp(X, person={4: b"\6\0\2"})).age == 0.5


RHYTHM = GOOD[GOOD.index(struct.pack("<HHBB", 5000, 2000, 2, 0)) :]  # section 6's body


def rhythm(*fields):
    return scp(X, more={6: struct.pack("<HHBB", *fields) + RHYTHM[6:]})


def pointed(place):
    """Another place for section 1."""
    return checked(GOOD[6:32] + b"\1\0" + place + GOOD[42:])


test_invalid_files_are_refused_with_a_reason = refuses(
    KIND,
    {
        "truncated file": [
            b"",
            GOOD[:-1],
            scp(X, more={3: b"\x0c\x64"}),
            scp(X, more={6: RHYTHM[:900]}),
        ],
        "checksum": [bytes([GOOD[0] ^ 1]) + GOOD[1:], checked(GOOD[6:-1] + b"\x55")],
        "no rhythm": [scp_of({1: b"\xff\0\0"}), scp_of({3: b"", 12: bytes(99)})],
        "section": [pointed(b"\xa8\0\0\0\xff\xff\xff\0"), pointed(b"\x20\0\0\0\x07\0\0\0")],
        "reference beats": [scp(X, more={3: b"\1\x0d" + row_3(1, 500)})],
        "bimodal compression": [rhythm(5000, 2000, 2, 1)],
        "differences": [rhythm(5000, 2000, 3, 0)],
        "gain": [scp(X, nanovolts=0)],
        "sampling rate": [scp(X, interval_us=0)],
        "Huffman table": [scp(X, more={2: struct.pack("<HH", 1, 0)})],
        "duplicated lead": [scp(TWO, more={3: b"\2\x14" + 2 * row_3(1, 9)})],
        "sample count": [
            scp(X, stated=600),
            scp(X, stated=400),
            scp(X, raw=True, stated=600),
            scp(NINE, more={3: b"\1\x0c" + row_3(9, 8)}),
            scp(NINE, more={3: b"\1\x0c" + row_3(1, 2**32 - 1)}),
            scp(X, starts={"II": 2**31}),
        ],
        "sample range": [scp({"I": 9000 * np.arange(9)}, order=1)],
    },
)


def test_names_stay_out_of_a_dataset(tmp_path):
    secret = f"{SECRET} {BORN}".encode()
    person = dict.fromkeys(range(255), secret) | {2: b"4711", 4: b"\x3d\0\1", 8: b"\1"}
    more = dict.fromkeys((4, 5, 7, 8, 9, 10, 11), secret)
    leads = {lead: uv // 5 for lead, uv in leads_uv().items()}
    check_private(tmp_path, KIND, scp(leads, person=person, more=more) + secret, 61.0, "M")


test_damaged_files_are_refused_or_read_correctly = withstands(
    KIND, GOOD, {lead: 5.0 * x for lead, x in X.items()}
)
BEGINS = {1: b"\2\4\0", 2: b"\x1f\x4e", 3: b"\2\x14" + row_3(1, 9), 6: RHYTHM[:10]}


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(list(BEGINS)), st.binary(max_size=60)), st.integers(0, 10))
def test_any_content_with_right_checksums(ends, kept):
    more = {number: BEGINS[number][:kept] + end for number, end in ends.items()}
    found = decoded(KIND, scp(TWO, more=more))
    if not isinstance(found, ReadError):
        assert set(found.signals) <= set(LEADS)
        assert len({len(uv) for uv in found.signals.values()}) <= 1
