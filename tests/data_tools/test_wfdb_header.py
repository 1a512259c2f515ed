"""A header is read exactly or refused; broken text never gives a wrong value or another
exception."""

import math
import re
from dataclasses import asdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnilead.data_tools.ecg.record import LEADS, parse_dx, snomed_codes_and_word_count
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.sources.wfdb import MAX_WFDB_SAMPLES, WfdbHeader, parse_header, peek_header
from tests.tables import tabulated
from tests.waiting import bounded_work

CAPITALS = {lead.upper() for lead in LEADS}
MV = {
    "V": 1e3,
    "mV": 1.0,
    "mv": 1.0,
    "MV": 1.0,
    "uV": 1e-3,
    "UV": 1e-3,
    "µV": 1e-3,
    "nV": 1e-6,
    "": 1.0,
}


RECORD = {"name": "E00001", "count": "12", "fs": "500", "samples": "5000"}
SIGNAL = {
    "file": "E00001.mat",
    "form": "16x1+24",
    "gain": "1000.0(0)/mV",
    "resolution": "16",
    "zero": "0",
    "first": "-68",
    "checksum": "1250",
    "block": "0",
    "lead": "I",
}
COMMENTS = ("# Age: 78", "# Sex: Female", "# Dx: 426783006,164889003")


def header(
    *comments,
    signals=({},) * 12,
    each={},
    **record,
):
    """`signals`: of each signal line, `each`: of all of them, and `record`: of the record line, what
    differs from a good header. "" drops a field."""
    lines = [RECORD | record]
    for lead, fields in zip((*LEADS, "ABP"), signals, strict=False):
        lines.append(SIGNAL | {"lead": lead} | each | fields)
    texts = [" ".join(word for word in fields.values() if word) for fields in lines]
    return "\n".join([*texts, *(comments or COMMENTS), ""]).encode()


def parse(data):
    """The header, or the reason of its refusal; any other exception and work without end fail the
    test."""
    with bounded_work():
        try:
            return parse_header(data)
        except ReadError as error:
            return error.reason


def parsed(data):
    found = parse(data)
    assert isinstance(found, WfdbHeader), found
    return found


@pytest.mark.parametrize(
    ("said", "comments"),
    [
        ("- - -", "# Age: NaN\n# Sex: Unknown\n# Dx: Unknown"),
        ("78.0 M 426783006", "#Age:78\n#Sex:M\n#Dx:426783006"),
        ("4.5 F 1,2", "#   age :  4.5 \n#\tSEX: female\n#DX : 1,,2,"),
        ("45.0 F -", "# Age: 45 Y\n# Sex: W"),
        ("45.5 F -", "# Age: 45,5\n# Sex: w"),
        ("45.0 - -", "# Age: 045 years\n# Sex: 1"),
        ("- - -", "# Age: 6 months\n# Sex: 2"),
        ("90.0 - 284470004", "# Age: 300\n# Sex: NaN\n# Dx: 284470004,284470004"),
        ("- - 164889003,426783006", "# Age: -4\n# Dx: AF,Normal"),
        ("- - -", "# Ageing: 5\n# note: Dx: 7\n# x Sex: M"),
        ("- - 1,2", "# Age: " + "9" * 5000 + "\n# Dx: " + "1," * 4000 + "2"),
        ("- - -", "#"),
    ],
    ids=range(12),
)
def test_comments_give_age_sex_and_dx(said, comments):
    found = parsed(header(comments))
    codes = ",".join(snomed_codes_and_word_count(parse_dx(found.dx))[0])
    assert said == f"{found.age or '-'} {found.sex or '-'} {codes or '-'}"


def test_ages_and_sexes_that_are_not_understood_are_said():
    found = parsed(header("# Age: 12.03.1956\n# Sex: 1"))
    long = ("age not understood", "over 3 characters")  # it may identify somebody
    assert found.warnings == (long, ("sex not understood", "1"))
    for unknown in ("# Age: NaN\n# Sex: Unknown", "# Age:\n# Sex:", "#", "# Age: 45 Y\n# Sex: W"):
        assert not parsed(header(unknown)).warnings


# A field, its text, and the columns that are then not those of a good header
SPELLINGS = """
gain      1000.0(0)/mV  gains 1000.0
gain      1000/mv       gains 1000.0
gain      200           gains 200.0
gain      1e3(-5)/MV    gains 1000.0  baselines -5
gain      1(7)/uV       gains 1000.0  baselines 7
gain      4.88/µV       gains 4880.0
gain      1000000/V     gains 1000.0
gain      0.001/nV      gains 1000.0
zero      -512
checksum  -1716         checksums -1716
checksum  63820         checksums 63820
form      212           formats 212  offsets 0
file      x_y-1.dat     files x_y-1.dat
lead      V9            leads V9
"""


@pytest.mark.parametrize("line", SPELLINGS.strip().splitlines())
def test_all_valid_spellings_of_a_field_are_read(line):
    name, text, *columns = line.split()
    found, right = asdict(parsed(header(each={name: text}))), asdict(parsed(header()))
    for column, value in zip(columns[::2], columns[1::2], strict=True):
        right[column] = (type(found[column][0])(value),) * 12
    assert found.pop("gains") == pytest.approx(right.pop("gains"), rel=1e-12)
    assert found == right


def test_a_leads_name_may_have_blanks():
    assert parsed(header(each={"lead": "ECG lead  V1"})).leads == ("ECG lead  V1",) * 12


def test_without_a_baseline_it_is_the_zero_of_the_converter():
    assert parsed(header(each={"gain": "1/uV", "zero": "-512"})).baselines == (-512,) * 12


def test_lines_may_end_as_in_windows():
    assert parsed(GOOD.replace(b"\n", b"\r\n")) == parsed(GOOD)


def test_a_record_name_may_end_in_mat_and_a_rate_may_have_a_counter():
    found = parsed(header(name="E00001.mat", fs="360.5/1000(7)"))
    assert (found.name, found.fs_hz) == ("E00001", 360.5)


# A field, the reason of the refusal, hostile words for the field, and what is around each
HOSTILE_WORDS = tabulated("""
gain     | gain               | 0 0.0 nan inf -inf -1000 1e-300 1e400 1e10 0x10 1_000 \uff11000 --1 1e | {}(0)/mV
gain     | gain               | (0)/mV /mV mV 1000(/mV 1000(1.5)/mV 1000(99999999999)/mV 1000()/mV 1000(0)mV
gain     | unknown unit       | kV mmHg m ADU 1/mV m\0V | 1000/{}
form     | signal format      | x 16x 16+ 16++24 1600 16.0 -16 +24 16+24+24 16:+24 1\uff16
form     | several samples a frame | 16x2+24 16x0+24 212x4
form     | skewed signal      | 16:1+24 16x1:300+24
file     | signal file name   | ../x.mat ../../etc/passwd /etc/passwd a/b.mat http://x/y.mat s3://x/y ~x.mat
file     | signal file name   | ~ .. . .mat a..mat a.b.mat a\\b.mat \xe9.mat a\0b.mat
zero     | signal line        | nan 1.5 99999999999 0x7 \uff11
checksum | signal line        | x 1234567 1e3
fs       | sampling rate      | 0 -500 nan inf 1e400 1e-3 49.9 2000.1 5_00 5\uff10\uff10 x /500 500Hz
samples  | sample count       | -1 0 2000001 1000000000000 1e3 5000.0 5_000 x 05-Feb-2020
count    | signal count       | 0 -1 11 13 65 100000000 99999999999999 1.2 1_2 x
name     | record name        | E00001/3 ../E00001 /etc/passwd .. a.b a.mat.mat \xe9 ~ s3://a/b
""")
HOSTILE = [
    (name, (*around, "{}")[0].format(word), reason)
    for name, reason, words, *around in HOSTILE_WORDS
    for word in words.split(" ")
]
HOSTILE += [(name, "", "signal line") for name in SIGNAL]  # without the field
HOSTILE += [(name, "", "record line incomplete") for name in RECORD]
HOSTILE += [
    ("gain", "1000.0(0) /mV", "signal line"),
    ("lead", "I" * 600, "header line too long"),
    ("first", "9" * 5000, "header line too long"),
    ("file", "x" * 100_000, "header too large"),
    ("samples", "9" * 5000, "header line too long"),
    ("name", "E" * 100_000, "header too large"),
    ("name", "E" * 65, "record name"),
]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    HOSTILE,
    ids=lambda value: ascii(value)[:30],
)
def test_a_hostile_field_refuses_the_header(name, value, reason):
    if name in RECORD:
        assert parse(header(**{name: value})) == reason
    else:
        for row in (0, 11):
            signals = [{}] * 12
            signals[row] = {name: value}
            assert parse(header(signals=signals)) == reason


GOOD = header()
LINES = GOOD.splitlines(keepends=True)


NO_HEADERS = {
    "empty header": [b"", b"\n \r\n\t\n", b"# Age: 5\n#Dx: 1\n"],
    "record": [bytes(range(256)) * 4, GOOD.decode().encode("utf-16")],
    "record name": [b"\xff\xfe" + GOOD, b"\xef\xbb\xbf" + GOOD],
    "header line too long": [b"\0" * 60_000, b"A" * 60_000],
    "header too large": [GOOD + b"\n" * 65_536],
    "signal count": [
        GOOD + b"x " * 30_000,
        GOOD + GOOD,
        b"".join(LINES[1:]),  # its record line lost
        *(b"".join(LINES[:lines]) for lines in range(1, 13)),  # cut off
        b"E00001 64 500 5000\n" + b"E00001.mat 16 1000 16 0 0 0 0 x\n" * 65,
    ],
}


@pytest.mark.parametrize("reason", NO_HEADERS)
def test_text_that_is_not_a_header_is_refused(reason):
    for text in NO_HEADERS[reason]:
        assert str(parse(text)).startswith(reason)


@pytest.mark.parametrize(
    "filler",
    [
        b"#",
        b"# ",
        b"#" + b" " * 60_000 + b"Age",
        b"#Dx:" + b"," * 60_000,
        b"#Age: " + b"1" * 60_000,
        b"#Age: 1\n",
        b" \n",
    ],
    ids=lambda filler: ascii(filler[:8]),
)
def test_long_comments_are_fast_and_do_not_change_the_signals(filler):
    data = (GOOD + filler * (65_536 // len(filler) + 1))[:65_536]
    assert parsed(data).leads == LEADS


def test_only_channels_that_are_not_leads_may_have_any_unit():
    pressure = {"gain": "12.5(0)/mmHg"}
    good = [{}] * 12
    assert parsed(header(count="13", signals=[*good, pressure])).leads == (*LEADS, "ABP")
    assert parse(header(signals=[pressure, *good[1:]])) == "unknown unit"


# What follows draws texts at random.


NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


def plain_reading(data):
    """What a text says, by the format's rules alone: words between blanks and tabs, numbers in
    ASCII. Fails where it says nothing."""
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    record, *signals = [line for line in lines if line and not line.startswith("#")]
    name, count, fs, samples = record.split()[:4]
    assert int(count) == len(signals)
    assert re.fullmatch(rf"{NUMBER}(/.*)?", fs, re.ASCII)
    assert re.fullmatch(r"\+?\d+", samples, re.ASCII)
    said = [name.removesuffix(".mat"), float(fs.split("/")[0]), int(samples)]
    for line in signals:
        words = re.split("[ \t]+", line, maxsplit=8)
        file, form, gain, _, zero, first, checksum, _, lead = words
        code, _, offset = re.sub("x0?1(?=$|[+])", "", form).partition("+")
        assert "/" not in file
        assert ".." not in file
        # Nobody asks what channels that are not leads measure
        meant = _in_mv(gain, zero) if lead.upper() in CAPITALS else None
        said.append((file, int(code), int(offset or 0), meant, int(first), int(checksum), lead))
    return said


def _in_mv(text, zero):
    found = re.fullmatch(rf"({NUMBER})(?:\((-?\d+)\))?(?:/(\S+))?", text, re.ASCII)
    assert found
    number, baseline, unit = found.groups()
    known = {spelling.lower(): factor for spelling, factor in MV.items()} | {"μv": 1e-3}
    return float(number) / known[(unit or "").lower()], int(baseline or zero)


def as_read(found):
    said = [found.name, found.fs_hz, found.samples]
    for row, lead in enumerate(found.leads):
        meant = (found.gains[row], found.baselines[row]) if lead.upper() in CAPITALS else None
        stored = (found.files[row], found.formats[row], found.offsets[row])
        said.append((*stored, meant, found.initials[row], found.checksums[row], lead))
    return said


LIKELY = ["mV", "uV", "\uff11", "\x85", *"0123456789.-+eExX:/()\t\n _#naif"]


@st.composite
def damaged(draw):
    """A good header after one to four accidents."""
    count = draw(st.integers(1, 12))
    data = header(signals=[{}] * count, count=str(count))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = start + draw(st.integers(0, 12))
        junk = draw(st.binary(max_size=8) | st.sampled_from(LIKELY).map(str.encode))
        words, lines = re.split(rb"(\s+)", data), data.split(b"\n")
        words[draw(st.integers(0, len(words) - 1))] = b""
        i, j = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        lines[i] = lines[j]
        accidents = [
            data[:start] + data[end:],
            data[:end] + data[start:],
            data[:start] + junk + data[start:],
            data[:start] + junk + data[end:],
            data[:start] + junk + data[start + 1 :],
            b"".join(words),
            b"\n".join(lines),
        ]
        data = draw(st.sampled_from(accidents))
    return data


# Channels called "0 aVL" and "\x1fIII"
CHANNELS = (
    b"E 1 500 5000\nE.mat 16x1+24 \x001000.0(0)/mV 1 16 0 -68 1250 0 aVL\n",
    b"E 1 500 5000\nE.mat 16x1+24 1000.0(0)/mV 16 0 -68 1250 0 \x1fIII\n",
)


@settings(max_examples=1000)
@given(damaged())
@example(CHANNELS[0])
@example(CHANNELS[1])
def test_a_damaged_header_is_refused_or_read_as_written(data):
    found = parse(data)
    if isinstance(found, WfdbHeader):
        assert as_read(found) == plain_reading(data)
        assert peek_header(data) == (found.name, len(found.leads), found.fs_hz, found.samples)
        assert all(math.isfinite(gain) and gain > 0 for gain in found.gains)
        assert 50 <= found.fs_hz <= 2000
        assert 1 <= found.samples <= MAX_WFDB_SAMPLES
        lines = data.decode("utf-8", "replace").splitlines()
        assert any(line.rstrip().endswith(found.dx) for line in lines)


@settings(max_examples=100)
@given(st.binary(max_size=3000) | st.text(max_size=1000).map(str.encode))
def test_arbitrary_bytes_are_refused(data):
    assert isinstance(parse(data), str)
