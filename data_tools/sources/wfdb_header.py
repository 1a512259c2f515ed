"""Strict parsing of WFDB headers: a record is refused unless every field is present, of the right
type and in range.

The format allows defaults (gain 200, 250 Hz, length from the file size, ...). A default could give
a wrong ECG without notice, so none is used. The text's size is limited before parsing. Dates, times
and free comments are not kept.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.record import (
    LEAD_INDEX,
    MV_PER_UNIT,
    RATE_RANGE_HZ,
    as_number,
    clean_age,
    clean_sex,
    unit_name,
)

MAX_BYTES, MAX_LINE, MAX_SIGNALS, MAX_SAMPLES = 65_536, 512, 64, 2_000_000
GAIN_RANGE = (1e-3, 1e9)  # steps per mV

_COMMENT = re.compile(r"#\s{0,8}(Age|Sex|Dx)\s{0,8}:(.*)", re.IGNORECASE)
_FORMAT = re.compile(r"(\d{1,3})(?:x(\d{1,6}))?(?::(\d{1,6}))?(?:\+(\d{1,9}))?", re.ASCII)
_GAIN = re.compile(r"([-+.\deEnaif]{1,32})(?:\((-?\d{1,10})\))?(?:/(\S{1,16}))?", re.ASCII)
_SIGNALS = re.compile(
    r"^(\S+)[ \t]+(\S+)[ \t]+(\S+)[ \t]+\d{1,2}[ \t]+(-?\d{1,10})[ \t]+"
    r"(-?\d{1,10})[ \t]+(-?\d{1,5})[ \t]+\d{1,10}[ \t]+(\S.*)$",
    re.ASCII | re.MULTILINE,
)
_FILE = re.compile(r"[A-Za-z0-9_-]{1,64}(?:\.[A-Za-z0-9]{1,8})?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(?:\.mat)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class WfdbHeader:
    name: str
    fs_hz: float
    samples: int
    files: tuple[str, ...]  # one per signal, like the fields up to `leads`
    formats: tuple[int, ...]
    offsets: tuple[int, ...]
    gains: tuple[float, ...]  # steps per mV
    baselines: tuple[int, ...]
    initials: tuple[int, ...]
    checksums: tuple[int, ...]
    leads: tuple[str, ...]
    age: float | None
    sex: str | None
    dx: str


def peek(data: bytes) -> tuple[str, int, float, int]:
    """(name, signals, fs_hz, samples) from the record line only: enough for planning, at a fifth of
    the cost."""
    for line in _lines(data):
        if line and not line.startswith("#"):
            return _record_line(line)
    raise ReadError("empty header")


def _lines(data: bytes) -> Iterator[str]:
    if len(data) > MAX_BYTES:
        raise ReadError("header too large", f"{len(data)} bytes")
    return map(str.strip, data.decode("utf-8", "replace").splitlines())


def parse_header(data: bytes) -> WfdbHeader:
    lines: list[str] = []
    comments: dict[str, str] = {}
    for line in _lines(data):
        if line.startswith("#"):
            if found := _COMMENT.match(line):
                comments.setdefault(found[1].lower(), found[2].strip())
        elif line:
            lines.append(line)
    if not lines:
        raise ReadError("empty header")
    name, n_signals, fs_hz, samples = _record_line(lines[0])
    if len(lines) - 1 != n_signals:
        raise ReadError("signal count", f"{n_signals} announced, {len(lines) - 1} described")
    files, formats, gains, zeros, initials, checksums, leads = _signal_lines(lines[1:])
    columns = (
        *_parse_columns(formats, gains, zeros, leads),
        tuple(map(int, initials)),
        tuple(map(int, checksums)),
    )
    age, sex = clean_age(comments.get("age")), clean_sex(comments.get("sex"))
    return WfdbHeader(
        name, fs_hz, samples, files, *columns, leads, age, sex, comments.get("dx", "")
    )


def _record_line(line: str) -> tuple[str, int, float, int]:
    """`name n_signals fs[/counter] samples [time [date]]`: the first four are required, the rest is
    ignored."""
    if len(line) > MAX_LINE:
        raise ReadError("header line too long", f"{len(line)} characters")
    fields = line.split(maxsplit=4)
    if len(fields) < 4:
        raise ReadError("record line incomplete", f"{len(fields)} fields")
    if not _NAME.fullmatch(fields[0]):
        raise ReadError(
            "record name", "a multi-segment record" if "/" in fields[0] else fields[0][:40]
        )
    n_signals = _integer(fields[1], "signal count", MAX_SIGNALS)
    fs_hz = _number(fields[2].split("/")[0], "sampling rate", *RATE_RANGE_HZ)
    return (
        fields[0].removesuffix(".mat"),
        n_signals,
        fs_hz,
        _integer(fields[3], "sample count", MAX_SAMPLES),
    )


def _signal_lines(lines: list[str]) -> tuple[tuple[str, ...], ...]:
    """`file format gain(baseline)/unit resolution zero first checksum block lead`: all nine fields
    are required.

    Returns the columns of all fields except resolution and block."""
    for line in lines:
        if len(line) > MAX_LINE:
            raise ReadError("header line too long", f"{len(line)} characters")
    rows = _SIGNALS.findall("\n".join(lines))
    if len(rows) != len(lines):
        bad = next(line for line in lines if not _SIGNALS.fullmatch(line))
        raise ReadError(
            "signal line", f"{len(bad.split(maxsplit=8))} of 9 fields, or one is not of its type"
        )
    columns = tuple(zip(*rows, strict=True))
    for file in set(columns[0]):
        if not _FILE.fullmatch(file):
            raise ReadError("signal file name", file[:40])
    return columns


@lru_cache(maxsize=64)  # most records of an archive have the same signal lines
def _parse_columns(
    formats: tuple[str, ...], gains: tuple[str, ...], zeros: tuple[str, ...], leads: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], tuple[int, ...]]:
    """Parse to formats, offsets, gains and baselines."""
    lead_gains = {
        gain for gain, lead in zip(gains, leads, strict=True) if lead.upper() in LEAD_INDEX
    }
    gain_of = {text: _gain(text) if text in lead_gains else _any_gain(text) for text in set(gains)}
    codes, offsets = zip(*map(_format, formats), strict=True)
    stated = ((gain_of[gain][1], int(zero)) for gain, zero in zip(gains, zeros, strict=True))
    baselines = tuple(zero if baseline is None else baseline for baseline, zero in stated)
    return codes, offsets, tuple(gain_of[text][0] for text in gains), baselines


def _format(text: str) -> tuple[int, int]:
    found = _FORMAT.fullmatch(text)
    if not found:
        raise ReadError("signal format", text[:20])
    code, per_frame, skew, offset = (
        int(part or absent) for part, absent in zip(found.groups(), (0, 1, 0, 0), strict=True)
    )
    if per_frame != 1:
        raise ReadError("several samples a frame", text[:20])
    if skew:
        raise ReadError("skewed signal", text[:20])
    return code, offset


def _any_gain(text: str) -> tuple[float, int | None]:
    """Channels that are not ECG leads may be in litres or mmHg; they are ignored later, so any gain
    is accepted."""
    try:
        return _gain(text)
    except ReadError:
        return 1.0, 0


def _gain(text: str) -> tuple[float, int | None]:
    """Parse `1000.0(0)/mV` to steps per mV and baseline. A gain of 0 means "not calibrated" and is
    refused."""
    found = _GAIN.fullmatch(text)
    if not found:
        raise ReadError("gain", text[:40])
    mv = MV_PER_UNIT[unit_name(found[3] or "mV")]  # in WFDB, no unit means mV
    return _number(found[1], "gain", GAIN_RANGE[0] * mv, GAIN_RANGE[1] * mv) / mv, int(
        found[2]
    ) if found[2] else None


def _integer(text: str, what: str, high: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else 0
    if not 1 <= value <= high:
        raise ReadError(what, text[:40])
    return value


def _number(text: str, what: str, low: float, high: float) -> float:
    """Python also accepts underscores and digits of other scripts, WFDB does not."""
    value = as_number(text) if text.isascii() and "_" not in text else math.nan
    if not low <= value <= high:  # NaN fails too
        raise ReadError(what, f"{text[:40]}: {low:g} to {high:g} is read")
    return value
