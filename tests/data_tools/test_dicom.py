"""DICOM waveforms, written here element by element, are read by our reader and by pydicom."""

import io
import struct

import numpy as np
import pytest
from handmade import build
from hospital_cases import (
    BORN,
    SECRET,
    check_damage,
    check_private,
    check_truth,
    decoded,
    leads_uv,
    refuses,
    withstands,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilead.data_tools.dataset.rejects import FLAG_REASONS, read_rejects
from omnilead.data_tools.ecg.record import LEADS
from omnilead.data_tools.sources.hospital.dicom import MAX_DICOM_DEPTH

pydicom = pytest.importorskip("pydicom")
KIND = "dicom"
IMPLICIT, EXPLICIT = "1.2.840.10008.1.2", "1.2.840.10008.1.2.1"
ECG_CLASS, HEMODYNAMIC = "1.2.840.10008.5.1.4.1.1.9.1.1", "1.2.840.10008.5.1.4.1.1.9.2.1"
CODES = dict(zip((*LEADS, "V4R"), (1, 2, 61, 62, 63, 64, 3, 4, 5, 6, 7, 8, 12), strict=True))
TRUTH = leads_uv()
V = {lead: TRUTH[lead] for lead in LEADS[6:]}
LIMB = {lead: TRUTH[lead] for lead in LEADS[:6]}
OPEN = 2**32 - 1


def mark(element, size):
    """An item's begin, or the end of an item or a sequence."""
    return struct.pack("<HHI", 0xFFFE, element, size)


def encoded(tree, explicit=True, open_ends=False):
    out = b""
    for name, value in sorted(tree.items()):
        kind, size = name[10:], None
        if isinstance(value, list):
            items = [encoded(item, explicit, open_ends) for item in value]
            if open_ends:
                items = [mark(0xE000, OPEN) + item + mark(0xE00D, 0) for item in items]
                value, size = b"".join([*items, mark(0xE0DD, 0)]), OPEN
            else:
                value = b"".join(mark(0xE000, len(item)) + item for item in items)
        elif isinstance(value, int):
            value = value.to_bytes({"US": 2, "UL": 4}[kind], "little")
        elif isinstance(value, str):
            value = value.encode()
            value += b" " * (len(value) % 2)
        size = len(value) if size is None else size
        out += struct.pack("<HH", int(name[1:5], 16), int(name[5:9], 16))
        if not explicit:
            out += struct.pack("<I", size)
        elif kind in ("OB", "OW", "SQ", "UN", "UT"):
            out += kind.encode() + struct.pack("<HI", 0, size)
        else:
            out += kind.encode() + struct.pack("<H", size)
        out += value
    return out


def changed(tree, more):
    """With other elements in place of those of the same tag; None leaves one out."""
    tags = {name[:9] for name in more}
    tree = {name: value for name, value in tree.items() if name[:9] not in tags} | more
    return {name: value for name, value in tree.items() if value is not None}


def unit(code):
    return [{"x00080100_SH": code}]


def channel(lead, **more):
    source = {
        "x00080100_SH": f"5.6.3-9-{CODES[lead]}",
        "x00080102_SH": "SCPECG",
        "x00080104_LO": SECRET,
    }
    tree = {
        "x003a0208_SQ": [source],
        "x003a0210_DS": "2.5",
        "x003a0211_SQ": unit("uV"),
        "x003a0212_DS": "1",
        "x003a0213_DS": "0",
        "x003a0215_DS": "0",
        "x003a021a_US": 16,
    }
    return changed(tree, more)


def group(leads, each={}, **more):
    """A multiplex group; `each`: elements of all channels."""
    steps = np.rint(np.array(list(leads.values())).T / 2.5).astype("<i2")
    tree = {
        "x003a0004_CS": "ORIGINAL",
        "x003a0005_US": len(leads),
        "x003a0010_UL": len(steps),
        "x003a001a_DS": "500",
        "x003a0020_SH": "RHYTHM",
        "x003a0200_SQ": [channel(lead, **each) for lead in leads],
        "x54001004_US": 16,
        "x54001006_CS": "SS",
        "x54001010_OW": steps.tobytes(),
    }
    return changed(tree, more)


MEDIAN = group(
    {lead: uv[:600] for lead, uv in TRUTH.items()},
    x003a0004_CS="DERIVED",
    x003a0020_SH="MEDIAN BEAT",
)


def file(*groups, syntax=EXPLICIT, open_ends=False, **more):
    tree = {
        "x00080016_UI": ECG_CLASS,
        "x00100020_LO": "4711",
        "x00100040_CS": "F",
        "x00101010_AS": "061Y",
        "x54000100_SQ": list(groups or (MEDIAN, group(TRUTH))),
    }
    meta = b"\0" * 128 + b"DICM" + encoded({"x00020010_UI": syntax})
    return meta + encoded(changed(tree, more), syntax != IMPLICIT, open_ends)


def one(open_ends=False, **more):
    """A file of one group."""
    return file(group(TRUTH, **more), open_ends=open_ends)


def each(**elements):
    """A file of one group, of which all channels have these elements."""
    return file(group(TRUTH, elements))


def of(channels):
    return one(x003a0200_SQ=channels)


def same(content, truth=TRUTH):
    return check_truth(decoded(KIND, content), truth)


@pytest.mark.parametrize("open_ends", [False, True])
@pytest.mark.parametrize("syntax", [IMPLICIT, EXPLICIT])
def test_both_transfer_syntaxes_are_read_with_and_without_lengths(syntax, open_ends):
    content = file(syntax=syntax, open_ends=open_ends)
    found = same(content)
    assert found[1:] == (500.0, "4711", 61.0, "F", ())
    theirs = pydicom.dcmread(io.BytesIO(content)).waveform_array(1)
    np.testing.assert_allclose(theirs.T, list(found.signals.values()), atol=1e-6)


@pytest.mark.parametrize(
    "content",
    [
        each(x003a0211_SQ=unit("mV"), x003a0210_DS="0.0025"),
        each(x003a0211_SQ=unit("nV"), x003a0212_DS="1000"),
        each(x003a0212_DS=None, x003a0213_DS=None),
        file(group({lead: uv - 50 for lead, uv in TRUTH.items()}, {"x003a0213_DS": "50"})),
        file(group(LIMB), group(V)),  # at the same time
        file(group(TRUTH), group({"II": TRUTH["II"]}, x00181068_DS="10000")),
        file(group(TRUTH | {"V4R": TRUTH["V4"]})),
        file(group(TRUTH), x0040b020_SQ=[{"x00700006_ST": SECRET}] * 50),
        file(group(TRUTH), x00091010_UN=b"\xfe\xff\xdd\xe0" * 9),
        one(x54001006_CS="SS "),
    ],
)
def test_valid_variants_are_read(content):
    same(content)


def test_mdc_codes_are_read_and_a_class_that_is_not_ecg_is_flagged():
    channels = []
    for lead in TRUTH:
        source = {"x00080100_SH": f"2:{CODES[lead]}", "x00080102_SH": "MDC"}
        channels.append(channel(lead, x003a0208_SQ=[source]))
    content = file(group(TRUTH, x003a0200_SQ=channels), x00080016_UI=HEMODYNAMIC)
    assert same(content).warnings[0][0] == "SOP class"


def test_unmeasured_samples_are_nan():
    leads = {lead: uv.astype(float) for lead, uv in TRUTH.items()}
    leads["V2"][7], leads["V3"][9] = -32768 * 2.5, 333 * 2.5
    content = file(group(leads, x5400100a_OW=struct.pack("<h", 333)))
    leads["V2"][7] = leads["V3"][9] = np.nan
    same(content, leads)


@pytest.mark.parametrize("stated", ["samples", "samples and seconds", "seconds"])
def test_late_channels_are_aligned(stated):
    channels, right = [], {}
    for lead, uv in TRUTH.items():
        late = lead == "V1"
        right[lead] = uv[:-3] if late else uv[3:]
        samples = "3" if late else "0.4"
        seconds = "0.0061" if late else "0"
        channels.append(
            channel(
                lead,
                x003a0215_DS=samples if "samples" in stated else None,
                x003a0214_DS=seconds if "seconds" in stated else None,
            )
        )
    same(of(channels), right)


@pytest.mark.parametrize("status", ["DISCONNECTED", "OK\\TEST DATA", "invalid", "UNCALIBRATED"])
def test_channels_that_state_that_they_are_unusable_are_left_out(status):
    statuses = {"I": "OK", "II": "QUESTIONABLE", "V2": status, "V3": status}
    channels = [channel(lead, x003a0205_CS=statuses.get(lead)) for lead in TRUTH]
    kept = {lead: uv for lead, uv in TRUTH.items() if lead not in ("V2", "V3")}
    word = status.rpartition("\\")[2].upper()
    (warning,) = same(of(channels), kept).warnings
    assert warning == ("channel status", f"left out: V2 {word}, V3 {word}")
    assert warning[0] in FLAG_REASONS
    refused = str(decoded(KIND, each(x003a0205_CS=status)))
    assert refused.startswith(f"channel status: no lead is usable: I {word}, II {word}")


def test_of_two_rates_the_one_with_more_leads_is_read():
    slow = group({"II": TRUTH["II"]}, x003a001a_DS="250")
    assert same(file(group(TRUTH), slow)).fs_hz == 500


@pytest.mark.parametrize(
    ("age", "years"), [("006M", 0.5), ("012W", 84 / 365.25), ("61", "61"), ("0x1Y", "0x1Y")]
)
def test_ages_are_converted_to_years(age, years):
    """Or stay as stated, and are then reported."""
    found = same(file(x00101010_AS=age))
    assert found.age == (years if years == age else pytest.approx(years))


def test_an_age_that_is_not_understood_is_reported(tmp_path):
    (tmp_path / "ecgs").mkdir()
    (tmp_path / "ecgs" / "A.dcm").write_bytes(file(x00101010_AS="61", x00100040_CS="X"))
    made = build(tmp_path / "ecgs", tmp_path / "out", plan="all")
    said = {reason: detail for *_, reason, detail in read_rejects(made)}
    assert said["age not understood"] == "61" and said["sex not understood"] == "X"
    assert np.isnan(made.column("age")[0])


def nested(depth):
    return [{"x0040b020_SQ": nested(depth - 1)}] if depth else []


BASE = file()
UNENDED = file(x0040b020_UN=b"").replace(b"UN\0\0\0\0\0\0", b"UN\0\0" + b"\xff" * 4)

test_invalid_files_are_refused_with_a_reason = refuses(
    KIND,
    {
        "transfer syntax": [
            file(syntax="1.2.840.10008.1.2.1.99"),  # deflated
            file(syntax="1.2.840.10008.1.2.4.50"),
            file(syntax="1.2.840.10008.1.2.2"),  # big-endian
            b"\0" * 128 + b"DICM",
        ],
        "no waveform: the SOP class is ": [file(x54000100_SQ=None)],
        "no waveform: the file holds a multi-frame image": [
            file(x54000100_SQ=None, x00280008_IS="30")
        ],
        "no waveform: the file holds an image": [file(x54000100_SQ=None, x7fe00010_OB=[])],
        "no waveform: the file holds an encapsulated document": [
            file(x54000100_SQ=None, x00420011_OB=b"%PDF")
        ],
        "encrypted": [file(x04000500_SQ=[{}])],
        "rhythm waveform": [
            file(MEDIAN),
            file(group(TRUTH), group(TRUTH, x00181068_DS="10000")),
            file(group(TRUTH | {"V4R": V["V4"]}, {"x003a0208_SQ": []})),
        ],
        "rhythm waveform: 2 of 2": [file(group(LIMB), group(V, x003a001a_DS="250"))],
        "duplicated lead": [file(group(TRUTH), group(TRUTH))],
        "too long": [file(group(dict.fromkeys(("I", "II"), np.zeros(300_100))))],
        "sampling rate": [one(x003a001a_DS="abc")],
        "sampling rate: 30000.0 Hz": [one(x003a001a_DS="30000")],
        "sample format": [one(x54001006_CS="MB")],
        "sample count": [one(x003a0010_UL=2499), one(x003a0005_US=11), one(x54001010_OW=None)],
        "unknown unit": [each(x003a0211_SQ=None), each(x003a0211_SQ=unit("mm[Hg]"))],
        "gain": [
            each(x003a0210_DS=None),
            each(x003a0210_DS="-1"),
            each(x003a0213_DS="inf"),
        ],
        "skew": [each(x003a0215_DS="1e9")],
        "skew: 3 and 6 samples": [each(x003a0215_DS="3", x003a0214_DS="0.012")],
        "channel status: no lead is usable: I TEST DATA": [each(x003a0205_CS="TEST DATA")],
        "malformed DICOM: (5400,1004) is a sequence": [one(x54001004_UN=[{}], open_ends=True)],
        "malformed DICOM: (5400,100a) is a sequence": [one(x5400100a_UN=[{}], open_ends=True)],
        "malformed DICOM": [
            BASE[:-100],
            file(open_ends=True)[:-8],
            file(open_ends=True, x0040b020_SQ=[{}] * 60_000),
            UNENDED,
        ],
        f"malformed DICOM: over {MAX_DICOM_DEPTH} nested sequences": [
            file(x0040b020_SQ=nested(40), open_ends=True)
        ],
    },
)


def test_only_id_age_and_sex_of_the_patient_are_read(tmp_path):
    """Every element of DICOM's dictionary that holds text, and private ones, are full of
    secrets."""
    kinds = dict.fromkeys(("PN", "LO", "SH", "ST", "LT", "UT"), SECRET) | {"DA": BORN, "DT": BORN}
    more = {"x00091010_LO": SECRET, "x0040b020_SQ": [{"x00700006_ST": SECRET}]}
    read = (0x00080100, 0x00080102, 0x00100020)
    for tag, (kind, *_) in pydicom.datadict.DicomDictionary.items():
        if kind in kinds and 0x00080000 < tag < 0x54000000 and tag not in read:
            more[f"x{tag:08x}_{kind}"] = kinds[kind]
    assert len(more) > 500
    assert {"x00100010_PN", "x00100030_DA", "x00080090_PN"} <= more.keys()
    check_private(tmp_path, KIND, file(**more), 61.0, "F")


SAMPLES = BASE.index(group(TRUTH)["x54001010_OW"])
RATE = encoded({"x003a001a_DS": "500", "x003a0020_SH": "RHYTHM"})
test_damaged_files_are_refused_or_read_correctly = withstands(
    KIND, BASE, TRUTH, RATE, slice(SAMPLES, len(BASE))
)


@given(
    st.integers(0, 11),
    st.sampled_from(sorted(channel("I"))),
    st.sampled_from(["drop", "empty", "twice", "junk"]),
    st.binary(max_size=8),
)
@settings(max_examples=40)
def test_damaged_channels_are_refused_or_read_correctly(row, name, how, junk):
    channels = [channel(lead) for lead in TRUTH]
    new = {"drop": None, "empty": "", "twice": 2 * channels[row][name], "junk": junk}
    channels[row] = changed(channels[row], {name: new[how]})
    check_damage(KIND, of(channels), TRUTH)


def test_messages_never_repeat_text_of_a_file():
    name = "MILLER^JANE"
    for content in (file(x54000100_SQ=None, x00080016_UI=name), file(syntax=name)):
        assert "MILLER" not in str(decoded(KIND, content))
    assert "MILLER" not in str(same(file(x00080016_UI=name)).warnings)
