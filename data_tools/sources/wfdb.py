"""A strict reader of WFDB records: parses the header's text, then reads the signals.

A record is refused unless every field of its header is present, of the right type and in range. The
format allows defaults (gain 200, 250 Hz, length from the file size, ...). A default could give a
wrong ECG without notice, so none is used. The text's size is limited before parsing. Dates, times
and free comments are not kept. Format 16, used by all ECG archives, is read directly, other formats
by `wfdb`.
"""

import math
import posixpath
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..ecg.record import (
    LEAD_INDEX,
    MV_PER_UNIT,
    EcgRecord,
    age_and_sex_warnings,
    clean_age,
    clean_sex,
    parse_dx,
    unit_name,
)
from ..ecg.resampling import RATE_RANGE_HZ
from ..io.errors import ReadError, machine_error
from ..io.spreadsheet import to_number
from ..io.storage import Folder

MAX_HEADER_BYTES, MAX_LINE, MAX_SIGNALS, MAX_WFDB_SAMPLES = 65_536, 512, 64, 2_000_000
GAIN_RANGE = (1e-3, 1e9)  # smallest and largest gain, in steps per mV
# {signal format: n}: a sample of -2**n was not measured
NOT_MEASURED_BITS = {
    16: 15,
    24: 23,
    32: 31,
    61: 15,
    80: 7,
    160: 15,
    212: 11,
    310: 9,
    311: 9,
    508: 7,
    516: 15,
    524: 23,
}
# {signal format: (bytes, samples) of its smallest block}, to compute a file's size; FLAC formats have none
FORMAT_BLOCKS = {
    8: (1, 1),
    16: (2, 1),
    24: (3, 1),
    32: (4, 1),
    61: (2, 1),
    80: (1, 1),
    160: (2, 1),
    212: (3, 2),
    310: (4, 3),
    311: (4, 3),
}
FLAC_FORMATS = (508, 516, 524)
# Most samples of a record, in all signals together, that the wfdb package may read. This limits the memory,
# because the package converts samples to int64
MAX_WFDB_PACKAGE_VALUES = 8_000_000

_COMMENT = re.compile(r"#\s{0,8}(Age|Sex|Dx)\s{0,8}:(.*)", re.IGNORECASE)
_SIGNAL_FORMAT = re.compile(r"(\d{1,3})(?:x(\d{1,6}))?(?::(\d{1,6}))?(?:\+(\d{1,9}))?", re.ASCII)
_GAIN = re.compile(r"([-+.\deEnaif]{1,32})(?:\((-?\d{1,10})\))?(?:/(\S{1,16}))?", re.ASCII)
_SIGNAL_LINE = re.compile(
    r"^(\S+)[ \t]+(\S+)[ \t]+(\S+)[ \t]+\d{1,2}[ \t]+(-?\d{1,10})[ \t]+"
    r"(-?\d{1,10})[ \t]+(-?\d{1,5})[ \t]+\d{1,10}[ \t]+(\S.*)$",
    re.ASCII | re.MULTILINE,
)
_SIGNAL_FILE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(?:\.[A-Za-z0-9]{1,8})?", re.ASCII)
_RECORD_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(?:\.mat)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class WfdbHeader:
    name: str
    fs_hz: float
    samples: int
    files: tuple[str, ...]  # one for each signal, as in all fields down to `leads`
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
    # (reason, detail) of warnings on the age and sex in the comments
    warnings: tuple[tuple[str, str], ...] = ()


def peek_header(data: bytes) -> tuple[str, int, float, int]:
    """Return (name, number of signals, fs_hz, samples) from the record line. This is enough for planning and
    costs a fifth of parsing the whole header."""
    for line in _header_lines(data):
        if line and not line.startswith("#"):
            return _parse_record_line(line)
    raise ReadError("empty header", "copy the file again")


def _header_lines(data: bytes) -> Iterator[str]:
    if len(data) > MAX_HEADER_BYTES:
        raise ReadError("header too large", f"{len(data)} bytes, {MAX_HEADER_BYTES} at most")
    return map(str.strip, data.decode("utf-8", "replace").splitlines())


def parse_header(data: bytes) -> WfdbHeader:
    lines: list[str] = []
    comments: dict[str, str] = {}
    for line in _header_lines(data):
        if line.startswith("#"):
            if comment := _COMMENT.match(line):
                comments.setdefault(comment[1].lower(), comment[2].strip())
        elif line:
            lines.append(line)
    if not lines:
        raise ReadError("empty header", "copy the file again")
    name, n_signals, fs_hz, samples = _parse_record_line(lines[0])
    if len(lines) - 1 != n_signals:
        raise ReadError("signal count", f"{n_signals} stated, {len(lines) - 1} described")
    files, formats, gains, zeros, initials, checksums, leads = _parse_signal_lines(lines[1:])
    columns = (
        *_parse_columns(formats, gains, zeros, leads),
        tuple(map(int, initials)),
        tuple(map(int, checksums)),
    )
    age, sex = clean_age(comments.get("age")), clean_sex(comments.get("sex"))
    return WfdbHeader(
        name,
        fs_hz,
        samples,
        files,
        *columns,
        leads,
        age,
        sex,
        comments.get("dx", ""),
        age_and_sex_warnings(comments, age=age, sex=sex),
    )


def _parse_record_line(line: str) -> tuple[str, int, float, int]:
    """Parse the line `name n_signals fs[/counter] samples [time [date]]`. The first four fields are required,
    the others are ignored."""
    if len(line) > MAX_LINE:
        raise ReadError("header line too long", f"{len(line)} characters, {MAX_LINE} at most")
    fields = line.split(maxsplit=4)
    if len(fields) < 4:
        raise ReadError("record line incomplete", f"{len(fields)} of 4 fields")
    if not _RECORD_NAME.fullmatch(fields[0]):
        raise ReadError(
            "record name",
            "a multi-segment record, which is not read"
            if "/" in fields[0]
            else f"{fields[0][:40]}: only up to 64 letters, digits, _ and - are read",
        )
    n_signals = _integer(fields[1], "signal count", MAX_SIGNALS)
    fs_hz = _number(fields[2].split("/")[0], "sampling rate", *RATE_RANGE_HZ)
    return (
        fields[0].removesuffix(".mat"),
        n_signals,
        fs_hz,
        _integer(fields[3], "sample count", MAX_WFDB_SAMPLES),
    )


def _parse_signal_lines(lines: list[str]) -> tuple[tuple[str, ...], ...]:
    """Parse lines `file format gain(baseline)/unit resolution zero first checksum block lead`, in which all
    nine fields are required.

    Return the columns of all fields except resolution and block."""
    for line in lines:
        if len(line) > MAX_LINE:
            raise ReadError("header line too long", f"{len(line)} characters, {MAX_LINE} at most")
    rows = _SIGNAL_LINE.findall("\n".join(lines))
    if len(rows) != len(lines):
        bad = next(line for line in lines if not _SIGNAL_LINE.fullmatch(line))
        raise ReadError(
            "signal line",
            f"a line has {len(bad.split(maxsplit=8))} of 9 fields, or a field is not of its type",
        )
    columns = tuple(zip(*rows, strict=True))
    for file in set(columns[0]):
        if not _SIGNAL_FILE_NAME.fullmatch(file):
            raise ReadError(
                "signal file name",
                f"{file[:40]}: only letters, digits, _ and - with at most one ending are read",
            )
    return columns


@lru_cache(maxsize=64)  # most records of an archive have the same signal lines
def _parse_columns(
    formats: tuple[str, ...], gains: tuple[str, ...], zeros: tuple[str, ...], leads: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], tuple[int, ...]]:
    """Return (formats, byte offsets, gains, baselines), each with one value for each signal."""
    rows = []
    for form, gain, zero, lead in zip(formats, gains, zeros, leads, strict=True):
        try:
            per_mv, baseline = _gain_and_baseline(gain)
        except ReadError:
            if lead.upper() in LEAD_INDEX:
                raise
            # The channel is no ECG lead, so its unit may be litres or mmHg; it is ignored later
            per_mv, baseline = 1.0, 0
        rows.append(
            (*_format_and_offset(form), per_mv, int(zero) if baseline is None else baseline)
        )
    codes, offsets, per_mvs, baselines = zip(*rows, strict=True)
    return codes, offsets, per_mvs, baselines


def _format_and_offset(text: str) -> tuple[int, int]:
    match = _SIGNAL_FORMAT.fullmatch(text)
    if not match:
        raise ReadError("signal format", f"{text[:20]} is not a WFDB format")
    code, per_frame, skew, offset = (
        int(part or absent) for part, absent in zip(match.groups(), (0, 1, 0, 0), strict=True)
    )
    if per_frame != 1:
        raise ReadError(
            "several samples a frame", f"format {text[:20]}: only one sample a frame is read"
        )
    if skew:
        raise ReadError(
            "skewed signal", f"format {text[:20]}: only signals without a skew are read"
        )
    return code, offset


def _gain_and_baseline(text: str) -> tuple[float, int | None]:
    """Parse `1000.0(0)/mV` to steps per mV and baseline. A gain of 0 means "not calibrated" and is
    refused."""
    match = _GAIN.fullmatch(text)
    if not match:
        raise ReadError("gain", f"{text[:40]}: a number is expected, or number(baseline)/unit")
    mv = MV_PER_UNIT[unit_name(match[3] or "mV")]  # in WFDB, no unit means mV
    return _number(match[1], "gain", GAIN_RANGE[0] * mv, GAIN_RANGE[1] * mv) / mv, int(
        match[2]
    ) if match[2] else None


def _integer(text: str, what: str, high: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else 0
    if not 1 <= value <= high:
        raise ReadError(what, f"{text[:40]}: only a whole number from 1 to {high} is read")
    return value


def _number(text: str, what: str, low: float, high: float) -> float:
    """Parse a number from `low` to `high`. Underscores and digits of other scripts are refused, as in WFDB."""
    value = to_number(text) if text.isascii() and "_" not in text else math.nan
    if not low <= value <= high:  # NaN fails too
        raise ReadError(what, f"{text[:40]}: only a number from {low:g} to {high:g} is read")
    return value


def checked_name(name: str, key: str) -> str:
    """Return the record name that the header states. Raise a ReadError if it differs from the file's name,
    because a renamed copy could count as an ECG of another patient."""
    stem = posixpath.basename(key).removesuffix(".hea")
    if name != stem:
        raise ReadError("record name differs from file name", f"{stem}.hea states {name}")
    return stem


def read_record(root: Folder, key: str, header: WfdbHeader, name: str, source: str) -> EcgRecord:
    """Read the signals of a record whose header is parsed. A wrong checksum or first value gives a warning."""
    place = posixpath.dirname(key)
    if len(set(header.formats)) > 1:
        raise ReadError(
            "mixed signal formats",
            f"{', '.join(map(str, header.formats))}: only one format for all signals is read",
        )
    if header.formats[0] == 16 and len(set(header.files)) == 1 and len(set(header.offsets)) == 1:
        signal = _read_format_16(root, posixpath.join(place, header.files[0]), header)
        warnings = _checksum_warnings(header, signal)
    else:
        signal, warnings = _read_with_wfdb(root, place, header), []
    bits = NOT_MEASURED_BITS.get(header.formats[0])
    invalid = None if bits is None else -(2**bits)
    rest = source, None, header.age, header.sex, parse_dx(header.dx), (*warnings, *header.warnings)
    return EcgRecord(
        name,
        signal,
        header.fs_hz,
        header.leads,
        "mV",
        header.gains,
        header.baselines,
        invalid,
        *rest,
    )


def _read_format_16(root: Folder, name: str, header: WfdbHeader) -> np.ndarray:
    signals, offset = len(header.leads), header.offsets[0]
    size = offset + 2 * signals * header.samples
    data = root.read(name, size)
    if len(data) != size:
        raise ReadError("signal file size", f"{len(data)} bytes, {size} expected from the header")
    # A MATLAB level-4 file begins with five int32 words and the name of its one variable, `val`
    if name.lower().endswith(".mat"):
        begin = np.array([30, signals, header.samples, 0, 4], "<i4").tobytes() + b"val\0"
        if offset != len(begin) or not data.startswith(begin):
            first_bytes = data[: len(begin)].hex()
            raise ReadError(
                "not the expected MATLAB file",
                f"offset {offset}, begins with {first_bytes}: expected {len(begin)} and {begin.hex()}",
            )
    interleaved = np.frombuffer(data, "<i2", offset=offset).reshape(header.samples, signals)
    # Contiguous rows, because later steps work lead by lead
    return np.ascontiguousarray(interleaved.T)


def _checksum_warnings(header: WfdbHeader, signal: np.ndarray) -> list[tuple[str, str]]:
    # Sums of int16 overflow as the checksums in headers do
    sums = np.add.reduce(signal, axis=1, dtype=np.int16).astype(np.int64)
    first = signal[:, 0] - np.array(header.initials)
    differing = {
        # Modulo 65536, because some headers state signed checksums, others unsigned ones
        "checksum differs": (sums - header.checksums) % 65536,
        "first value differs": first,
    }
    return [
        (
            reason,
            f"{np.count_nonzero(difference)} leads, first "
            f"{header.leads[int(np.argmax(difference != 0))][:8]}",
        )
        for reason, difference in differing.items()
        if difference.any()
    ]


def _read_checked(root: Folder, place: str, file: str, header: WfdbHeader) -> bytes:
    """Read a signal file and check that its size fits the format and the number of samples. The wfdb package
    would also accept longer files, and MATLAB files."""
    code = header.formats[0]
    offsets = {
        offset for name, offset in zip(header.files, header.offsets, strict=True) if name == file
    }
    if file.lower().endswith(".mat"):
        raise ReadError(
            "not the expected MATLAB file",
            f"format {code}, offsets {sorted(offsets)}: only format 16 in one file with one offset is read",
        )
    if len(offsets) > 1 or code not in (*FORMAT_BLOCKS, *FLAC_FORMATS):
        raise ReadError("signal format", f"{code} with offsets {sorted(offsets)} is not read")
    if code in FLAC_FORMATS:
        return root.read(posixpath.join(place, file), 8 * MAX_WFDB_PACKAGE_VALUES)
    values = header.samples * header.files.count(file)
    block, per_block = FORMAT_BLOCKS[code]
    smallest = -(-values * block // per_block)  # the last block may be incomplete
    largest = -(-values // per_block) * block
    data = root.read(posixpath.join(place, file), max(offsets) + largest)
    if len(data) < max(offsets) + smallest:
        raise ReadError(
            "signal file size",
            f"{len(data)} bytes, {max(offsets) + smallest} expected from the header",
        )
    return data


def _read_with_wfdb(root: Folder, place: str, header: WfdbHeader) -> np.ndarray:
    """Read signals with the wfdb package. It reads copies of the checked files in a temporary folder, so that
    it sees no links, paths or other files."""
    import wfdb

    if len(header.leads) * header.samples > MAX_WFDB_PACKAGE_VALUES:
        raise ReadError(
            "too long for its format",
            f"{header.samples} samples of format {header.formats[0]} in each of {len(header.leads)} signals: "
            f"at most {MAX_WFDB_PACKAGE_VALUES} in all signals are read",
        )
    with tempfile.TemporaryDirectory() as scratch:
        for file in dict.fromkeys(header.files):
            Path(scratch, file).write_bytes(_read_checked(root, place, file, header))
        lines = [f"x {len(header.leads)} {header.fs_hz} {header.samples}"]
        columns = header.files, header.formats, header.offsets, header.initials, header.checksums
        for i, (file, code, offset, first, checksum) in enumerate(zip(*columns, strict=True)):
            lines.append(
                f"{file} {code}{f'+{offset}' if offset else ''} 1(0)/mV 16 0 {first} {checksum} 0 "
                f"s{i}"
            )
        Path(scratch, "x.hea").write_text("\n".join(lines) + "\n")
        try:
            record = wfdb.rdrecord(str(Path(scratch, "x")), physical=False)
        except Exception as error:  # the wfdb package may raise anything on a broken file
            if failure := machine_error(error):
                raise failure from None
            raise ReadError(
                "wfdb cannot read it", f"format {header.formats[0]}: {type(error).__name__}"
            ) from None
    signal = np.asarray(record.d_signal).T
    if signal.shape != (len(header.leads), header.samples):
        raise ReadError(
            "signal file size", f"{signal.shape[1]} samples, the header states {header.samples}"
        )
    return signal
