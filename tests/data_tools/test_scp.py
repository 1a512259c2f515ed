"""SCP-ECG: the microvolts of real files, the standard's default code against an encoder of it, and
no file read wrongly."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from binary_ecgs import checked, scp, scp_of
from handmade import ecg
from hospital_cases import (
    BORN,
    DAMAGE,
    SECRET,
    SHARED,
    Damage,
    check_damage,
    check_private,
    check_real,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.hospital.files import changes
from omnilead.data_tools.hospital.scp import decode
from omnilead.data_tools.record import LEADS

X = dict(zip(LEADS, ecg(500), strict=True))
X_5S = dict(zip(LEADS, ecg(2500), strict=True))
TWO = {lead: X[lead][:9] for lead in ("I", "II")}
GOOD = scp(X)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared files")
def test_real_files() -> None:
    assert len(check_real("scp-ecg", "same_as_aecg.scp").signals) == 12
    cut = check_real("scp-ecg", "scp_contec_truncated.scp")
    assert [lead for lead, uv in cut.signals.items() if changes(uv)] == list(LEADS[:6])
    assert [reason for reason, _ in cut.warnings] == ["shorter than stated"]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_every_difference_is_undone(order: int, raw: bool) -> None:
    ramp = np.cumsum(np.arange(-700, 700) // 70)  # small steps: all of the code's short words
    steps = np.cumsum(np.resize([0, 1, -1, 8, -8, 9, -9, 127, -128, 128, -129, 4000, -3870], 1400))
    found = decode(
        scp(
            {"I": ramp, "II": steps, "V7": ramp, "aVF": np.arange(1400)}, order, raw, nanovolts=2500
        )
    )
    assert (found.fs_hz, found.patient, found.age, found.sex, found.warnings) == (
        500.0,
        "4711",
        61.0,
        "F",
        (),
    )
    assert list(found.signals) == ["I", "II", "aVF"]
    for lead, right in (("I", ramp), ("II", steps), ("aVF", np.arange(1400))):
        np.testing.assert_array_equal(found.signals[lead], 2.5 * right)


def test_another_reader_agrees(tmp_path: Path) -> None:
    kit = pytest.importorskip("ecgdatakit", reason="needs ecgdatakit, of the group test")
    rng, place = np.random.default_rng(0), tmp_path / "one.scp"
    x = {
        lead: np.cumsum(rng.integers(-size, size + 1, 400))
        for lead, size in zip(LEADS, (1, 2, 4, 8, 9, 99, 128, 129) * 2, strict=False)
    }
    for order, raw in ((0, True), (0, False), (1, False), (2, False)):
        place.write_bytes(scp(x, order, raw))
        found = decode(place.read_bytes()).signals
        for lead in kit.FileParser.parse(place, units="uV").leads:
            np.testing.assert_allclose(found[lead.label], lead.samples)


def test_leads_that_start_later_are_not_measured_before() -> None:
    found = decode(
        scp({"I": np.arange(50), "II": np.arange(60)}, starts={"I": 0, "II": 31})
    ).signals
    assert (
        len(found["I"]) == len(found["II"]) == 90
        and np.isnan(found["I"][50:]).all()
        and np.isnan(found["II"][:30]).all()
    )
    assert found["I"][:50].tolist() == (5.0 * np.arange(50)).tolist() and found["II"][30] == 0.0


def test_a_raw_lead_ends_where_its_length_does() -> None:
    found = decode(scp({"I": np.arange(32767)}, order=0, raw=True, stated=37855))
    assert found.warnings[0][0] == "shorter than stated" and len(found.signals["I"]) == 32767


@pytest.mark.parametrize(
    ("interval_us", "fs_hz"), [(2000, 500), (1667, 600), (2083, 480), (2100, 1e6 / 2100)]
)
def test_rates_are_stated_in_whole_microseconds(interval_us: int, fs_hz: float) -> None:
    assert decode(scp(TWO, interval_us=interval_us)).fs_hz == fs_hz


def test_who_it_is_may_be_unknown() -> None:
    for person in ({}, {2: b"", 4: b"\0\0\0", 8: b"\x09"}, {4: b"\1"}):
        found = decode(scp(X, person=person))
        assert (found.patient, found.age, found.sex) == ("", None, None)
    assert decode(scp(X, person={4: b"\6\0\2"})).age == 0.5


RHYTHM = GOOD[GOOD.index(struct.pack("<HHBB", 5000, 2000, 2, 0)) :]  # section 6's body


def rhythm(*fields: int) -> dict[int, bytes]:
    return {6: struct.pack("<HHBB", *fields) + RHYTHM[6:]}


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "truncated file"),
    "cut": (lambda: GOOD[:-1], "truncated file"),
    "its checksum": (lambda: bytes([GOOD[0] ^ 1]) + GOOD[1:], "checksum"),
    "a section's checksum": (lambda: checked(GOOD[6:-1] + b"\x55"), "checksum"),
    "no rhythm": (lambda: scp_of({1: b"\xff\0\0"}), "no rhythm"),
    "only a long rhythm": (lambda: scp_of({3: b"", 12: bytes(99)}), "no rhythm"),
    "no such place": (
        lambda: checked(GOOD[6:32] + b"\1\0\xa8\0\0\0\xff\xff\xff\0" + GOOD[42:]),
        "section",
    ),
    "another section there": (
        lambda: checked(GOOD[6:32] + b"\1\0\x20\0\0\0\x07\0\0\0" + GOOD[42:]),
        "section",
    ),
    "reference beats": (
        lambda: scp(X, more={3: b"\1\x0d" + struct.pack("<IIB", 1, 500, 1)}),
        "reference beats",
    ),
    "bimodal": (lambda: scp(X, more=rhythm(5000, 2000, 2, 1)), "bimodal compression"),
    "third differences": (lambda: scp(X, more=rhythm(5000, 2000, 3, 0)), "differences"),
    "no gain": (lambda: scp(X, nanovolts=0), "gain"),
    "no rate": (lambda: scp(X, interval_us=0), "sampling rate"),
    "its own table": (lambda: scp(X, more={2: struct.pack("<HH", 1, 0)}), "Huffman table"),
    "a lead twice": (
        lambda: scp(
            {"I": X["I"], "II": X["I"]}, more={3: b"\2\x14" + 2 * struct.pack("<IIB", 1, 500, 1)}
        ),
        "duplicated lead",
    ),
    "leads cut off": (lambda: scp(X, more={3: b"\x0c\x64"}), "truncated file"),
    "rhythm cut off": (lambda: scp(X, more={6: RHYTHM[:900]}), "truncated file"),
    "more samples stated": (lambda: scp(X, stated=600), "sample count"),
    "fewer samples stated": (lambda: scp(X, stated=400), "sample count"),
    "fewer raw samples": (lambda: scp(X, raw=True, stated=600), "sample count"),
    "no sample": (
        lambda: scp({"I": np.arange(9)}, more={3: b"\1\x0c" + struct.pack("<IIB", 9, 8, 1)}),
        "sample count",
    ),
    "4e9 samples": (
        lambda: scp(
            {"I": np.arange(9)}, more={3: b"\1\x0c" + struct.pack("<IIB", 1, 2**32 - 1, 1)}
        ),
        "sample count",
    ),
    "far apart": (lambda: scp(X, starts={"II": 2**31}), "sample count"),
    "over 16 bits": (lambda: scp({"I": 9000 * np.arange(9)}, order=1), "sample range"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    make, reason = BAD[name]
    with pytest.raises(ReadError) as error:
        decode(make())
    assert error.value.reason == reason


def test_names_stay_out_of_a_dataset(tmp_path: Path) -> None:
    secret = f"{SECRET} {BORN}".encode()
    person = dict.fromkeys(range(255), secret) | {2: b"4711", 4: b"\x3d\0\1", 8: b"\1"}
    content = scp(
        {lead: x // 5 for lead, x in X_5S.items()},
        person=person,
        more=dict.fromkeys((4, 5, 7, 8, 9, 10, 11), secret),
    )
    check_private(tmp_path, "scp-ecg", content + secret, "4711", 61.0, "M")


@settings(max_examples=100, deadline=None)
@given(DAMAGE)
def test_damaged_bytes(damage: Damage) -> None:
    check_damage("scp-ecg", damage.to(GOOD), {lead: 5.0 * x for lead, x in X.items()}, 500)


BEGINS = {1: b"\2\4\0", 2: b"\x1f\x4e", 3: b"\2\x14" + struct.pack("<IIB", 1, 9, 1), 6: RHYTHM[:10]}


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(list(BEGINS)), st.binary(max_size=60)), st.integers(0, 10))
def test_any_content_with_right_checksums(ends: dict[int, bytes], kept: int) -> None:
    try:
        signals = decode(
            scp(TWO, more={number: BEGINS[number][:kept] + end for number, end in ends.items()})
        ).signals
    except ReadError:
        return
    assert set(signals) <= set(LEADS) and len({len(uv) for uv in signals.values()}) <= 1
