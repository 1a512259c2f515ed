"""DICOM waveforms, written here element by element, are read by our reader and by pydicom."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hospital_cases import (
    BORN,
    DAMAGE,
    SECRET,
    SHARED,
    Damage,
    check_damage,
    check_private,
    check_real,
    decoded,
    leads_uv,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilead.data_tools.build import FLAGS
from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.hospital import dicom
from omnilead.data_tools.hospital.base import Decoded

pydicom = pytest.importorskip("pydicom")
IMPLICIT, EXPLICIT = "1.2.840.10008.1.2", "1.2.840.10008.1.2.1"
ECG_CLASS, HEMODYNAMIC = "1.2.840.10008.5.1.4.1.1.9.1.1", "1.2.840.10008.5.1.4.1.1.9.2.1"
CODES = {
    "I": 1,
    "II": 2,
    "III": 61,
    "aVR": 62,
    "aVL": 63,
    "aVF": 64,
    **{f"V{n}": n + 2 for n in range(1, 7)},
    "V4R": 12,
}
TRUTH = leads_uv()
Tree = dict[int, tuple[str, Any]]  # tag: value representation, and text, number, bytes or items


def encoded(tree: Tree, explicit: bool = True, open_ends: bool = False) -> bytes:
    out = b""
    for tag, (kind, value) in sorted(tree.items()):
        size = None
        if isinstance(value, list):
            parts = [encoded(item, explicit, open_ends) for item in value]
            if open_ends:
                ends = struct.pack("<HHI", 0xFFFE, 0xE00D, 0)
                value = b"".join(
                    struct.pack("<HHI", 0xFFFE, 0xE000, 2**32 - 1) + part + ends for part in parts
                )
                value, size = value + struct.pack("<HHI", 0xFFFE, 0xE0DD, 0), 2**32 - 1
            else:
                value = b"".join(
                    struct.pack("<HHI", 0xFFFE, 0xE000, len(part)) + part for part in parts
                )
        elif isinstance(value, int):
            value = value.to_bytes({"US": 2, "UL": 4}[kind], "little")
        elif isinstance(value, str):
            value = value.encode()
            value += b" " * (len(value) % 2)
        head = struct.pack("<HH", tag >> 16, tag & 0xFFFF)
        size = len(value) if size is None else size
        if not explicit:
            head += struct.pack("<I", size)
        elif kind in ("OB", "OW", "SQ", "UN", "UT"):
            head += kind.encode() + struct.pack("<HI", 0, size)
        else:
            head += kind.encode() + struct.pack("<H", size)
        out += head + value
    return out


def channel(lead: str, **more: Any) -> Tree:
    """`more`: tags as x003a0213, with their type and value; None leaves one out."""
    source = {
        0x00080100: ("SH", f"5.6.3-9-{CODES[lead]}"),
        0x00080102: ("SH", "SCPECG"),
        0x00080104: ("LO", SECRET),
    }
    tree: Tree = {
        0x003A0208: ("SQ", [source]),
        0x003A0210: ("DS", "2.5"),
        0x003A0212: ("DS", "1"),
        0x003A0213: ("DS", "0"),
    }
    tree |= {
        0x003A0211: ("SQ", [{0x00080100: ("SH", "uV")}]),
        0x003A0215: ("DS", "0"),
        0x003A021A: ("US", 16),
    }
    return changed(tree, more)


def group(leads: dict[str, np.ndarray], each: dict[str, Any] | None = None, **more: Any) -> Tree:
    steps = np.array([np.rint(uv / 2.5) for uv in leads.values()]).T.astype("<i2")
    tree: Tree = {
        0x003A0004: ("CS", "ORIGINAL"),
        0x003A0005: ("US", len(leads)),
        0x003A0010: ("UL", len(steps)),
    }
    tree |= {
        0x003A001A: ("DS", "500"),
        0x003A0020: ("SH", "RHYTHM"),
        0x54001004: ("US", 16),
        0x54001006: ("CS", "SS"),
    }
    tree |= {
        0x003A0200: ("SQ", [channel(lead, **each or {}) for lead in leads]),
        0x54001010: ("OW", steps.tobytes()),
    }
    return changed(tree, more)


def changed(tree: Tree, more: dict[str, Any]) -> Tree:
    tree = tree | {int(name[1:], 16): value for name, value in more.items()}
    return {tag: value for tag, value in tree.items() if value is not None}


def median() -> Tree:
    fields = {"x003a0004": ("CS", "DERIVED"), "x003a0020": ("SH", "MEDIAN BEAT")}
    return group({lead: uv[:600] for lead, uv in TRUTH.items()}, **fields)


def file(*groups: Tree, syntax: str = EXPLICIT, open_ends: bool = False, **more: Any) -> bytes:
    tree: Tree = {
        0x00080016: ("UI", ECG_CLASS),
        0x00100020: ("LO", "4711"),
        0x00100040: ("CS", "F"),
        0x00101010: ("AS", "061Y"),
    }
    tree[0x54000100] = ("SQ", list(groups or (median(), group(TRUTH))))
    meta = encoded({0x00020010: ("UI", syntax)})
    return (
        b"\0" * 128 + b"DICM" + meta + encoded(changed(tree, more), syntax != IMPLICIT, open_ends)
    )


def same(found: Decoded | ReadError, truth: dict[str, np.ndarray] = TRUTH) -> Decoded:
    assert isinstance(found, Decoded), found
    assert set(found.signals) == set(truth)
    for lead, uv in truth.items():
        np.testing.assert_allclose(found.signals[lead], uv, atol=1e-6)
    return found


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared files")
@pytest.mark.parametrize("name", ["dicom_12lead_mortara.dcm", "same_as_aecg.dcm"])
def test_real_files_give_the_right_microvolts(name: str) -> None:
    found = check_real("dicom", name)
    assert len(found.signals) == 12 and not found.warnings


@pytest.mark.parametrize("open_ends", [False, True])
@pytest.mark.parametrize("syntax", [IMPLICIT, EXPLICIT])
def test_both_transfer_syntaxes_are_read_with_and_without_lengths(
    syntax: str, open_ends: bool
) -> None:
    content = file(syntax=syntax, open_ends=open_ends)
    found = same(decoded("dicom", content))
    assert found._replace(signals={}) == Decoded({}, 500.0, "4711", 61.0, "F")
    theirs = pydicom.dcmread(io.BytesIO(content)).waveform_array(1)
    np.testing.assert_allclose(theirs.T, list(found.signals.values()), atol=1e-6)


def unit(code: str) -> Any:
    return "SQ", [{0x00080100: ("SH", code)}]


V = {lead: TRUTH[lead] for lead in ("V1", "V2", "V3", "V4", "V5", "V6")}
LIMB = {lead: uv for lead, uv in TRUTH.items() if lead not in V}


@pytest.mark.parametrize(
    "content",
    [
        file(group(TRUTH, {"x003a0211": unit("mV"), "x003a0210": ("DS", "0.0025")})),
        file(group(TRUTH, {"x003a0211": unit("nV"), "x003a0212": ("DS", "1000")})),
        file(group(TRUTH, {"x003a0212": None, "x003a0213": None})),
        file(group({lead: uv - 50 for lead, uv in TRUTH.items()}, {"x003a0213": ("DS", "50")})),
        file(group(LIMB), group(V)),  # at the same time
        file(group(TRUTH), group({"II": TRUTH["II"]}, x00181068=("DS", "10000"))),
        file(group(TRUTH | {"V4R": TRUTH["V4"]})),
        file(group(TRUTH), x0040b020=("SQ", [{0x00700006: ("ST", SECRET)}] * 50)),
        file(group(TRUTH), x00091010=("UN", b"\xfe\xff\xdd\xe0" * 9)),
        file(group(TRUTH, x54001006=("CS", "SS "))),
    ],
)
def test_valid_variants_are_read(content: bytes) -> None:
    same(decoded("dicom", content))


def test_mdc_codes_are_read_and_a_class_that_is_not_ecg_is_flagged() -> None:
    channels = group(TRUTH)[0x003A0200][1]
    for one, lead in zip(channels, TRUTH, strict=True):
        one[0x003A0208] = (
            "SQ",
            [{0x00080100: ("SH", f"2:{CODES[lead]}"), 0x00080102: ("SH", "MDC")}],
        )
    content = file(group(TRUTH, x003a0200=("SQ", channels)), x00080016=("UI", HEMODYNAMIC))
    assert same(decoded("dicom", content)).warnings[0][0] == "SOP class"


def test_unmeasured_samples_are_nan_and_late_channels_are_aligned() -> None:
    leads = {lead: uv.copy() for lead, uv in TRUTH.items()}
    leads["V2"][7], leads["V3"][9] = -32768 * 2.5, 333 * 2.5
    found = decoded("dicom", file(group(leads, x5400100a=("OW", struct.pack("<h", 333)))))
    assert isinstance(found, Decoded)
    assert {
        lead: np.flatnonzero(np.isnan(uv)).tolist()
        for lead, uv in found.signals.items()
        if np.isnan(uv).any()
    } == {
        "V2": [7],
        "V3": [9],
    }
    channels = [channel(lead, x003a0215=("DS", "3" if lead == "V1" else "0.4")) for lead in TRUTH]
    found = decoded("dicom", file(group(TRUTH, x003a0200=("SQ", channels))))
    late = {lead: uv[:-3] if lead == "V1" else uv[3:] for lead, uv in TRUTH.items()}
    same(found, late)
    for lead, one in zip(TRUTH, channels, strict=True):  # also stated in seconds, or only so
        one[0x003A0214] = ("DS", "0.0061" if lead == "V1" else "0")
        same(decoded("dicom", file(group(TRUTH, x003a0200=("SQ", channels)))), late)
    for one in channels:
        del one[0x003A0215]
    same(decoded("dicom", file(group(TRUTH, x003a0200=("SQ", channels)))), late)


@pytest.mark.parametrize("status", ["DISCONNECTED", "OK\\TEST DATA", "invalid", "UNCALIBRATED"])
def test_channels_that_state_that_they_are_unusable_are_left_out(status: str) -> None:
    statuses = {"I": "OK", "II": "QUESTIONABLE", "V2": status, "V3": status}
    channels = [
        channel(lead, x003a0205=("CS", statuses[lead])) if lead in statuses else channel(lead)
        for lead in TRUTH
    ]
    found = decoded("dicom", file(group(TRUTH, x003a0200=("SQ", channels))))
    word = status.rpartition("\\")[2].upper()
    same(found, {lead: uv for lead, uv in TRUTH.items() if lead not in ("V2", "V3")})
    assert isinstance(found, Decoded) and found.warnings == (
        ("channel status", f"left out: V2 {word}, V3 {word}"),
    )
    assert found.warnings[0][0] in FLAGS
    every = [channel(lead, x003a0205=("CS", status)) for lead in TRUTH]
    refused = str(decoded("dicom", file(group(TRUTH, x003a0200=("SQ", every)))))
    assert refused.startswith(f"channel status: I {word}, II {word}")


def test_of_two_rates_the_one_with_more_leads_is_read() -> None:
    slow = {"x003a001a": ("DS", "250")}
    found = decoded("dicom", file(group(TRUTH), group({"II": TRUTH["II"]}, **slow)))
    assert same(found).fs_hz == 500
    assert str(decoded("dicom", file(group(LIMB), group(V, **slow)))).startswith(
        "rhythm waveform: 2 of 2"
    )


@pytest.mark.parametrize(
    ("age", "years"), [("006M", 0.5), ("012W", 84 / 365.25), ("61", None), ("0x1Y", None)]
)
def test_ages_are_converted_to_years(age: str, years: float | None) -> None:
    found = same(decoded("dicom", file(x00101010=("AS", age))))
    assert found.age == (years if years is None else pytest.approx(years))


LONG = {lead: np.zeros(300_100) for lead in ("I", "II")}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (file(syntax="1.2.840.10008.1.2.1.99"), "transfer syntax"),  # deflated
        (file(syntax="1.2.840.10008.1.2.4.50"), "transfer syntax"),
        (file(syntax="1.2.840.10008.1.2.2"), "transfer syntax"),  # big-endian
        (b"\0" * 128 + b"DICM", "transfer syntax"),
        (file(x54000100=None), "no waveform: SOP class"),
        (file(x54000100=None, x00280008=("IS", "30")), "no waveform: a multi-frame image"),
        (file(x54000100=None, x7fe00010=("OB", [])), "no waveform: an image"),
        (file(x54000100=None, x00420011=("OB", b"%PDF")), "no waveform: an encapsulated document"),
        (file(x04000500=("SQ", [{}])), "encrypted"),
        (file(median()), "rhythm waveform"),
        (file(group(TRUTH), group(TRUTH, x00181068=("DS", "10000"))), "rhythm waveform"),
        (file(group(TRUTH), group(TRUTH)), "duplicated lead"),
        (file(group(TRUTH | {"V4R": V["V4"]}, {"x003a0208": ("SQ", [])})), "rhythm waveform"),
        (file(group(LONG)), "too long"),
        (file(group(TRUTH, x003a001a=("DS", "abc"))), "sampling rate"),
        (file(group(TRUTH, x54001006=("CS", "MB"))), "sample format"),
        (file(group(TRUTH, x003a0010=("UL", 2499))), "sample count"),
        (file(group(TRUTH, x003a0005=("US", 11))), "sample count"),
        (file(group(TRUTH, x54001010=None)), "sample count"),
        (file(group(TRUTH, {"x003a0211": None})), "unknown unit"),
        (file(group(TRUTH, {"x003a0211": unit("mm[Hg]")})), "unknown unit"),
        (file(group(TRUTH, {"x003a0210": None})), "gain"),
        (file(group(TRUTH, {"x003a0210": ("DS", "-1")})), "gain"),
        (file(group(TRUTH, {"x003a0213": ("DS", "inf")})), "gain"),
        (file(group(TRUTH, {"x003a0215": ("DS", "1e9")})), "skew"),
        (
            file(group(TRUTH, {"x003a0215": ("DS", "3"), "x003a0214": ("DS", "0.012")})),
            "skew: 3 and 6 samples",
        ),
        (file(group(TRUTH, x003a001a=("DS", "30000"))), "sampling rate: 30000.0 Hz"),
        (file(group(TRUTH, {"x003a0205": ("CS", "TEST DATA")})), "channel status: I TEST DATA"),
        (
            file(group(TRUTH, x54001004=("UN", [{}])), open_ends=True),
            "malformed DICOM: (5400,1004) is a sequence",
        ),
        (
            file(group(TRUTH, x5400100a=("UN", [{}])), open_ends=True),
            "malformed DICOM: (5400,100a) is a sequence",
        ),
        (file()[:-100], "malformed DICOM"),
        (file(open_ends=True)[:-8], "malformed DICOM"),
        (file(open_ends=True, x0040b020=("SQ", [{}] * 60_000)), "malformed DICOM"),
        (
            file(x0040b020=("UN", b"")).replace(b"UN\0\0\0\0\0\0", b"UN\0\0" + b"\xff" * 4),
            "malformed DICOM",
        ),
    ],
)
def test_invalid_files_are_refused_with_a_reason(content: bytes, reason: str) -> None:
    found = decoded("dicom", content)
    assert isinstance(found, ReadError) and str(found).startswith(reason)


def test_deeply_nested_sequences_are_refused() -> None:
    tree: Tree = {}
    for _ in range(40):
        tree = {0x0040B020: ("SQ", [tree])}
    assert "nested sequences" in str(
        decoded("dicom", file(**{"x0040b020": tree[0x0040B020]}, open_ends=True))
    )


def test_only_id_age_and_sex_of_the_patient_are_read(tmp_path: Path) -> None:
    """Every element of DICOM's dictionary that holds text, and private ones, are full of
    secrets."""
    kinds = {
        "PN": SECRET,
        "LO": SECRET,
        "SH": SECRET,
        "ST": SECRET,
        "LT": SECRET,
        "UT": SECRET,
        "DA": BORN,
        "DT": BORN,
    }
    entries = pydicom.datadict.DicomDictionary.items()
    known = {
        tag: (kind, kinds[kind])
        for tag, (kind, *_) in entries
        if kind in kinds and 0x00080000 < tag < 0x54000000
    }
    for tag in (0x00080100, 0x00080102, 0x00100020):
        known.pop(tag)
    assert len(known) > 500 and {0x00100010, 0x00100030, 0x00080090} <= known.keys()
    more = {f"x{tag:08x}": value for tag, value in known.items()} | {"x00091010": ("LO", SECRET)}
    more["x0040b020"] = ("SQ", [{0x00700006: ("ST", SECRET)}])
    check_private(tmp_path, "dicom", file(**more), "4711", 61.0, "F")


BASE = file()
SAMPLES = BASE.index(group(TRUTH)[0x54001010][1])
RATE = encoded({0x003A001A: ("DS", "500"), 0x003A0020: ("SH", "RHYTHM")})


@given(DAMAGE)
@settings(max_examples=60)
def test_damaged_files_are_refused_or_read_correctly(damage: Damage) -> None:
    check_damage("dicom", damage.to(BASE, slice(SAMPLES, len(BASE))), TRUTH, 500, RATE)


@given(
    st.integers(0, 11),
    st.sampled_from(sorted(channel("I"))),
    st.sampled_from(["drop", "empty", "twice", "junk"]),
    st.binary(max_size=8),
)
@settings(max_examples=40)
def test_damaged_channels_are_refused_or_read_correctly(
    row: int, tag: int, how: str, junk: bytes
) -> None:
    channels = [channel(lead) for lead in TRUTH]
    kind, value = channels[row][tag]
    one = {"drop": None, "empty": (kind, ""), "twice": (kind, value * 2), "junk": (kind, junk)}[how]
    channels[row] = changed(
        channels[row],
        {f"x{tag:08x}": one if not isinstance(value, int) or how != "twice" else None},
    )
    check_damage("dicom", file(group(TRUTH, x003a0200=("SQ", channels))), TRUTH, 500)


def test_a_dicomdir_is_not_taken_for_an_ecg() -> None:
    assert dicom.FORMAT.looks_like(BASE, "IM000001") and not dicom.FORMAT.looks_like(
        BASE, "DICOMDIR"
    )


def test_messages_never_repeat_text_of_a_file() -> None:
    name = ("UI", "MILLER^JANE")
    for content in (file(x54000100=None, x00080016=name), file(syntax=name[1])):
        with pytest.raises(ReadError) as refused:
            dicom.decode(content)
        assert "MILLER" not in str(refused.value)
    assert "MILLER" not in str(same(dicom.decode(file(x00080016=name))).warnings)
