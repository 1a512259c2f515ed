"""A header is read exactly or refused; broken text never gives a wrong value or another
exception."""

import math
import re
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.record import LEADS, only_codes, parse_dx
from omnilead.data_tools.sources.wfdb_header import MAX_SAMPLES, WfdbHeader, parse_header, peek

SLOWEST_S = 1.0
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


@dataclass
class Signal:
    """One line of a header, field by field, as text."""

    file: str = "E00001.mat"
    form: str = "16x1+24"
    gain: str = "1000.0(0)/mV"
    resolution: str = "16"
    zero: str = "0"
    first: str = "-68"
    checksum: str = "1250"
    block: str = "0"
    lead: str = "I"

    def line(self) -> str:
        words = (
            self.file,
            self.form,
            self.gain,
            self.resolution,
            self.zero,
            self.first,
            self.checksum,
            self.block,
            self.lead,
        )
        return " ".join(word for word in words if word)


@dataclass
class Text:
    name: str = "E00001"
    count: str = "12"
    fs: str = "500"
    samples: str = "5000"
    rest: str = ""
    signals: list[Signal] = field(default_factory=lambda: [Signal(lead=lead) for lead in LEADS])
    comments: list[str] = field(
        default_factory=lambda: ["# Age: 78", "# Sex: Female", "# Dx: 426783006,164889003"]
    )

    def render(self) -> bytes:
        words = (self.name, self.count, self.fs, self.samples, self.rest)
        lines = [
            " ".join(word for word in words if word),
            *(signal.line() for signal in self.signals),
            *self.comments,
        ]
        return ("\n".join(lines) + "\n").encode()


def parse(data: bytes) -> WfdbHeader | str:
    """The header, or the reason of its refusal; any other exception and any slowness fail the
    test."""
    start = time.process_time()
    try:
        found: WfdbHeader | str = parse_header(data)
    except ReadError as error:
        found = error.reason
    assert time.process_time() - start < SLOWEST_S
    return found


def parsed(data: bytes) -> WfdbHeader:
    found = parse(data)
    assert isinstance(found, WfdbHeader), found
    return found


@pytest.mark.parametrize(
    ("comments", "age", "sex", "codes"),
    [
        (["# Age: NaN", "# Sex: Unknown", "# Dx: Unknown"], None, None, ()),
        (["#Age:78", "#Sex:M", "#Dx:426783006"], 78.0, "M", ("426783006",)),
        (["#   age :  4.5 ", "#\tSEX: female", "#DX : 1,,2,"], 4.5, "F", ("1", "2")),
        (["# Age: 300", "# Sex: NaN", "# Dx: 284470004,284470004"], 90.0, None, ("284470004",)),
        (["# Age: -4", "# Dx: AF,Normal"], None, None, ("164889003", "426783006")),
        (["# Ageing: 5", "# note: Dx: 7", "# x Sex: M"], None, None, ()),
        (["# Age: " + "9" * 5000, "# Dx: " + "1," * 4000 + "2"], None, None, ("1", "2")),
        ([], None, None, ()),
    ],
)
def test_comments_give_age_sex_and_dx(
    comments: list[str], age: float | None, sex: str | None, codes: tuple[str, ...]
) -> None:
    header = parsed(Text(comments=comments).render())
    assert (header.age, header.sex, only_codes(parse_dx(header.dx))[0]) == (age, sex, codes)


SIGNAL_FIELDS = {
    ("gain", "1000.0(0)/mV"): {"gains": 1000.0},
    ("gain", "1000/mv"): {"gains": 1000.0},
    ("gain", "200"): {"gains": 200.0},
    ("gain", "1e3(-5)/MV"): {"gains": 1000.0, "baselines": -5},
    ("gain", "1(7)/uV"): {"gains": 1000.0, "baselines": 7},
    ("gain", "4.88/µV"): {"gains": 4880.0},
    ("gain", "1000000/V"): {"gains": 1000.0},
    ("gain", "0.001/nV"): {"gains": 1000.0},
    ("zero", "-512"): {"baselines": -512},
    ("checksum", "-1716"): {"checksums": -1716},
    ("checksum", "63820"): {"checksums": 63820},
    ("form", "212"): {"formats": 212, "offsets": 0},
    ("file", "x_y-1.dat"): {"files": "x_y-1.dat"},
    ("lead", "ECG lead  V1"): {"leads": "ECG lead  V1"},
}


@pytest.mark.parametrize(
    ("where", "meant"), SIGNAL_FIELDS.items(), ids=lambda value: " ".join(value)
)
def test_all_valid_spellings_of_a_field_are_read(
    where: tuple[str, str], meant: dict[str, object]
) -> None:
    text = Text()
    for signal in text.signals:
        setattr(signal, where[0], where[1])
        signal.gain = (
            signal.gain.replace("(0)", "") if where[0] == "zero" else signal.gain
        )  # no baseline: the ADC's zero
    header, plain = parsed(text.render()), parsed(Text().render())
    for name in (
        "files",
        "formats",
        "offsets",
        "gains",
        "baselines",
        "initials",
        "checksums",
        "leads",
    ):
        expected = (meant[name],) * 12 if name in meant else getattr(plain, name)
        assert getattr(header, name) == (
            pytest.approx(expected, rel=1e-12) if name == "gains" else expected
        ), name


def test_a_record_name_may_end_in_mat_and_a_rate_may_have_a_counter() -> None:
    header = parsed(Text(name="E00001.mat", fs="360.5/1000(7)").render())
    assert (header.name, header.fs_hz) == ("E00001", 360.5)


def each(name: str, reason: str, words: str, form: str = "{}") -> list[tuple[str, str, str]]:
    return [(name, form.format(word), reason) for word in words.split()]


# (field, hostile text, the reason of the refusal); "" drops the field
HOSTILE_SIGNAL = [
    *each(
        "gain",
        "gain",
        "0 0.0 nan inf -inf -1000 1e-300 1e400 1e10 0x10 1_000 \uff11000 --1 1e",
        "{}(0)/mV",
    ),
    *each(
        "gain",
        "gain",
        "(0)/mV /mV mV 1000(/mV 1000(1.5)/mV 1000(99999999999)/mV 1000()/mV 1000(0)mV",
    ),
    *each("gain", "unknown unit", "kV mmHg m ADU 1/mV m\0V", "1000/{}"),
    ("gain", "1000.0(0) /mV", "signal line"),
    *[(name, "", "signal line") for name in vars(Signal())],
    *each("form", "signal format", "x 16x 16+ 16++24 1600 16.0 -16 +24 16+24+24 16:+24 1\uff16"),
    *each("form", "several samples a frame", "16x2+24 16x0+24 212x4"),
    *each("form", "skewed signal", "16:1+24 16x1:300+24"),
    *each(
        "file",
        "signal file name",
        "../x.mat ../../etc/passwd /etc/passwd a/b.mat http://x/y.mat s3://x/y ~x.mat",
    ),
    *each("file", "signal file name", "~ .. . .mat a..mat a.b.mat a\\b.mat \xe9.mat a\0b.mat"),
    *each("zero", "signal line", "nan 1.5 99999999999 0x7 \uff11"),
    *each("checksum", "signal line", "x 1234567 1e3"),
    ("lead", "I" * 600, "header line too long"),
    ("first", "9" * 5000, "header line too long"),
    ("file", "x" * 100_000, "header too large"),
]
HOSTILE_RECORD = [
    *each(
        "fs",
        "sampling rate",
        "0 -500 nan inf 1e400 1e-3 49.9 2000.1 5_00 5\uff10\uff10 x /500 500Hz",
    ),
    *each("samples", "sample count", "-1 0 2000001 1000000000000 1e3 5000.0 5_000 x 05-Feb-2020"),
    *each("count", "signal count", "0 -1 11 13 65 100000000 99999999999999 1.2 1_2 x"),
    *each("name", "record name", "E00001/3 ../E00001 /etc/passwd .. a.b a.mat.mat \xe9 ~ s3://a/b"),
    *[(name, "", "record line incomplete") for name in ("name", "count", "fs", "samples")],
    ("samples", "9" * 5000, "header line too long"),
    ("name", "E" * 100_000, "header too large"),
    ("name", "E" * 65, "record name"),
]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    HOSTILE_SIGNAL + HOSTILE_RECORD,
    ids=lambda value: ascii(value)[:30],
)
def test_a_hostile_field_refuses_the_header(name: str, value: str, reason: str) -> None:
    for row in (0, 11):
        text = Text()
        setattr(text if hasattr(text, name) else text.signals[row], name, value)
        assert parse(text.render()) == reason


GOOD = Text().render()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty header"),
        (b"\n \r\n\t\n", "empty header"),
        (b"# Age: 5\n#Dx: 1\n", "empty header"),
        (bytes(range(256)) * 4, "record"),
        (b"\xff\xfe" + GOOD, "record name"),
        (b"\xef\xbb\xbf" + GOOD, "record name"),
        (GOOD.decode().encode("utf-16"), "record"),
        (b"\0" * 60_000, "header line too long"),
        (b"A" * 60_000, "header line too long"),
        (GOOD + b"x " * 30_000, "signal count"),
        (GOOD + b"\n" * 65_536, "header too large"),
        (GOOD.split(b"\n", 1)[1], "signal count"),  # its record line lost
        (b"\n".join([GOOD, GOOD]), "signal count"),  # two headers in one file
        (b"E00001 64 500 5000\n" + b"E00001.mat 16 1000 16 0 0 0 0 x\n" * 65, "signal count"),
        *[
            (b"\n".join(GOOD.split(b"\n")[:lines]) + b"\n", "signal count")
            for lines in range(1, 13)
        ],  # cut off
    ],
)
def test_text_that_is_not_a_header_is_refused(data: bytes, reason: str) -> None:
    assert str(parse(data)).startswith(reason)


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
def test_long_comments_are_fast_and_do_not_change_the_signals(filler: bytes) -> None:
    data = (GOOD + filler * (60_000 // len(filler)))[:65_536]
    assert parsed(data).leads == LEADS


def test_only_channels_that_are_not_leads_may_have_any_unit() -> None:
    text = Text(count="13")
    text.signals.append(Signal(gain="12.5(0)/mmHg", lead="ABP"))
    assert parsed(text.render()).leads == (*LEADS, "ABP")
    text.signals[3].gain = "12.5(0)/mmHg"
    assert parse(text.render()) == "unknown unit"


# What follows draws texts at random.


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """A valid header of any count of signals, fields and spellings."""
    signals = []
    for _ in range(draw(st.integers(1, 12))):
        unit = draw(st.sampled_from(sorted(MV)))
        number, baseline = (
            draw(st.floats(1e-2, 1e8)) * MV[unit],
            draw(st.sampled_from(["", "(0)", "(-512)"])),
        )
        gain = f"{number!r}{baseline}{'/' * bool(unit)}{unit}"
        form = draw(st.sampled_from(["16x1+24", "16", "212", "80+5", "999x1"]))
        zero, first, checksum = (str(draw(st.integers(-32768, 32767))) for _ in range(3))
        lead = draw(st.sampled_from([*LEADS, "resp", "ECG lead  V1", "0 aVL"]))
        signals.append(Signal("a_file-1.dat", form, gain, "16", zero, first, checksum, "0", lead))
    rest = draw(st.sampled_from(["", "11:39:16", "05-Feb-2020 11:39:16"]))
    comment = draw(st.sampled_from(["", "# Dx: 427393009,", "# Hx: Age: 5"]))
    fs, samples = (
        str(draw(st.floats(50, 2000) | st.integers(50, 2000))),
        str(draw(st.integers(1, MAX_SAMPLES))),
    )
    return Text("E1.mat", str(len(signals)), fs, samples, rest, signals, [comment]).render()


@settings(max_examples=80, derandomize=True)
@given(headers(), st.sampled_from([b"\n", b"\r\n"]))
def test_a_valid_header_gives_exactly_its_fields(data: bytes, line_end: bytes) -> None:
    found = parsed(data.replace(b"\n", line_end))
    assert as_read(found) == plain_reading(data)
    assert peek(data) == (found.name, len(found.leads), found.fs_hz, found.samples)


NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


def plain_reading(data: bytes) -> list[object]:
    """What a text says, by the format's rules alone: words between blanks, numbers in ASCII. Fails
    where it says nothing."""
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    record, *signals = [line for line in lines if line and not line.startswith("#")]
    name, count, fs, samples = record.split()[:4]
    assert int(count) == len(signals)
    assert re.fullmatch(rf"{NUMBER}(/.*)?", fs, re.ASCII)
    assert re.fullmatch(r"\+?\d+", samples, re.ASCII)
    said: list[object] = [name.removesuffix(".mat"), float(fs.split("/")[0]), int(samples)]
    for line in signals:
        file, form, gain, _, zero, first, checksum, _, lead = line.split(None, 8)
        code, _, offset = (
            form.removesuffix("x1").replace("x1+", "+").replace("x01+", "+").partition("+")
        )
        mv_baseline = (
            _in_mv(gain) if lead.upper() in map(str.upper, LEADS) else None
        )  # nobody asks what others measure
        assert "/" not in file
        assert ".." not in file
        gain_zero = mv_baseline and (mv_baseline[0], int(mv_baseline[1] or zero))
        said.append((file, int(code), int(offset or 0), gain_zero, int(first), int(checksum), lead))
    return said


def _in_mv(gain: str) -> tuple[float, str | None]:
    number, baseline, unit = re.fullmatch(
        rf"({NUMBER})(?:\((-?\d+)\))?(?:/(\S+))?", gain, re.ASCII
    ).groups()  # type: ignore[union-attr]
    known = {spelling.lower(): factor for spelling, factor in MV.items()} | {"μv": 1e-3}
    return float(number) / known[(unit or "").lower()], baseline


def as_read(header: WfdbHeader) -> list[object]:
    known = [lead.upper() in map(str.upper, LEADS) for lead in header.leads]
    gains = [
        both if lead else None
        for both, lead in zip(zip(header.gains, header.baselines, strict=True), known, strict=True)
    ]
    columns = (
        header.files,
        header.formats,
        header.offsets,
        gains,
        header.initials,
        header.checksums,
        header.leads,
    )
    return [header.name, header.fs_hz, header.samples, *zip(*columns, strict=True)]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good header after one to four accidents."""
    data = Text(
        count=str(count := draw(st.integers(1, 12))),
        signals=[Signal(lead=lead) for lead in LEADS[:count]],
    ).render()
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(data) - 1)))
        stop = start + draw(st.integers(0, 12))
        match draw(st.integers(0, 6)):
            case 0:
                data = data[:start] + data[stop:]
            case 1:
                data = data[:stop] + data[start:]
            case 2:
                data = data[:start] + draw(st.binary(max_size=8)) + data[start:]
            case 3:
                data = (
                    data[:start]
                    + draw(st.binary(min_size=stop - start, max_size=stop - start))
                    + data[stop:]
                )
            case 4:
                likely = draw(
                    st.sampled_from(
                        [*"0123456789.-+eExX:/()\t\n _#naif", "mV", "uV", "\uff11", "\x85"]
                    )
                )
                data = data[:start] + likely.encode() + data[start + draw(st.integers(0, 1)) :]
            case 5:
                words = re.split(rb"(\s+)", data)
                del words[draw(st.integers(0, len(words) - 1))]
                data = b"".join(words)
            case 6:
                lines = data.split(b"\n")
                i, j = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
                lines[i] = lines[j] if draw(st.booleans()) else b""
                data = b"\n".join(lines)
    return data


A_CHANNEL = (
    b"E 1 500 5000\nE.mat 16x1+24 \x001000.0(0)/mV 1 16 0 -68 1250 0 aVL\n"  # called "0 aVL"
)


@settings(max_examples=1500, derandomize=True)
@given(damaged())
@example(A_CHANNEL)
def test_a_damaged_header_is_refused_or_read_as_written(data: bytes) -> None:
    found = parse(data)
    if isinstance(found, WfdbHeader):
        assert as_read(found) == plain_reading(data)
        assert all(math.isfinite(gain) and gain > 0 for gain in found.gains)
        assert 50 <= found.fs_hz <= 2000
        assert 1 <= found.samples <= MAX_SAMPLES
        assert found.dx == "" or any(
            line.rstrip().endswith(found.dx)
            for line in data.decode("utf-8", "replace").splitlines()
        )


@settings(max_examples=300, derandomize=True)
@given(st.binary(max_size=3000) | st.text(max_size=1000).map(str.encode))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert isinstance(parse(data), str)
