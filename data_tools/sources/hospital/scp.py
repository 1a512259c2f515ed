"""Decodes SCP-ECG (EN 1064): the rhythm in section 6, raw or Huffman-coded by the standard's default table,
as samples or as their first or second differences.

Of section 1 only the patient's id, age and sex are read; the median beat in section 5 is never
read. Refused: rhythms that need section 5 (reference beats subtracted), bimodal compression, a
file's own Huffman tables, section 12. All checksums must match. Leads recorded at different times
are placed on one time axis and count as not measured elsewhere.
"""

import binascii
import struct

import numpy as np

from ...ecg.record import AGE_UNITS, SCP_LEADS
from ...io.errors import ReadError
from .base import DecodedEcg, FileFormat

# Twelve leads of 64 KiB, the most that a length field can state, have only 0.8 MB
MAX_SCP_BYTES = 4 * 2**20
MAX_SCP_SAMPLES = 2**19
# Stated as the length of a lead that is too long for the length field
OVERFLOW_LENGTHS = (2**16 - 2, 2**16 - 1)
YEARS_PER_UNIT_CODE = dict(enumerate(AGE_UNITS.values(), 1))
PATIENT_ID, AGE, SEX, END = 2, 4, 8, 255  # tags of fields in section 1
DEFAULT_TABLE = 19999
JUMP_DOUBLINGS = 4  # the Huffman decoder's loop advances 2**JUMP_DOUBLINGS numbers at a time
# The standard's default Huffman table. The next ten bits of the data are the index into these three arrays. A zero
# bit means 0. A code of n ones (1 to 8), a zero and a sign bit means n or -n. A code that begins with nine ones
# has ten bits, and a number of 8 or 16 bits follows it
_LEADING_ONES = np.array([10 - (1023 ^ bits).bit_length() for bits in range(1024)])
_CODE_LENGTHS = np.where(
    _LEADING_ONES == 0,
    1,
    np.where(_LEADING_ONES < 9, _LEADING_ONES + 2, np.where(_LEADING_ONES == 9, 18, 26)),
)
_CODE_VALUES = _LEADING_ONES * (1 - 2 * (np.arange(1024) >> np.clip(8 - _LEADING_ONES, 0, 9) & 1))
_ESCAPE_CODES = ((1022, 8), (1023, 16))  # (code, bits of the number that follows it)


def decode(data: bytes) -> DecodedEcg:
    try:
        return _decode(_sections(data))
    except (struct.error, IndexError):
        raise ReadError("truncated file", "a field does not end inside its section") from None


FORMAT = FileFormat(
    lambda head, name: head[16:22] == b"SCPECG" or name.lower().endswith(".scp"),
    decode,
    MAX_SCP_BYTES,
)


def _sections(data: bytes) -> dict[int, bytes]:
    """Check the file's checksums and lengths, and return {section number: content without its header} of the
    sections that are read."""
    checksum, length = struct.unpack_from("<HI", data)
    if length > len(data):
        raise ReadError("truncated file", f"{len(data)} of {length} stated bytes")
    if binascii.crc_hqx(memoryview(data)[2:length], 0xFFFF) != checksum:
        raise ReadError("checksum", "the whole file differs from its checksum")
    (pointers,) = struct.unpack_from("<I", data, 10)
    sections: dict[int, bytes] = {}
    for place in range(22, min(6 + pointers, length) - 9, 10):
        number, size, position = struct.unpack_from("<HII", data, place)
        if not size or number not in (1, 2, 3, 6, 12):
            continue
        start = position - 1
        section = data[max(start, 6) : start + size]
        if (
            len(section) < 16
            or struct.unpack_from("<HI", section, 2) != (number, len(section))
            or number in sections
        ):
            raise ReadError(
                "section", f"number {number} is not where section 0 says, or occurs twice"
            )
        if binascii.crc_hqx(memoryview(section)[2:], 0xFFFF) != int.from_bytes(
            section[:2], "little"
        ):
            raise ReadError("checksum", f"section {number} differs from its checksum")
        sections[number] = section[16:]
    return sections


def _decode(sections: dict[int, bytes]) -> DecodedEcg:
    if not {3, 6} <= set(sections):
        raise ReadError(
            "no rhythm",
            "the file has only section 12, which is not read"
            if 12 in sections
            else "the file lacks section 3 or 6",
        )
    nanovolts, interval_us, order = _step_interval_order(sections)
    leads, warnings = _leads_and_warnings(sections, order)
    signals = _align_in_time(
        {lead: (first, steps * nanovolts / 1000) for lead, (first, steps) in leads.items()}
    )
    nominal_hz = float(round(1e6 / interval_us))
    # Files state the interval in whole microseconds: 1,667 us mean 600 Hz
    is_nominal = round(1e6 / nominal_hz) == interval_us
    fs_hz = nominal_hz if is_nominal else 1e6 / interval_us
    return DecodedEcg(
        signals, fs_hz, *_patient_age_sex(sections.get(1, b"")), tuple(warnings.items())
    )


def _step_interval_order(sections: dict[int, bytes]) -> tuple[int, int, int]:
    """Return (nanovolts per step, microseconds between samples, order of differences)."""
    table = struct.unpack_from("<H", sections[2])[0] if 2 in sections else DEFAULT_TABLE
    nanovolts, interval_us, order, bimodal = struct.unpack_from("<HHBB", sections[6])
    if sections[3][1] & 1:
        raise ReadError(
            "reference beats", "beats were subtracted from the rhythm, which is not read"
        )
    if bimodal:
        raise ReadError(
            "bimodal compression",
            "the samples between the beats are stored at a lower rate, which is not read",
        )
    if table != DEFAULT_TABLE:
        raise ReadError(
            "Huffman table", f"{table} tables of its own, only the standard's default is read"
        )
    if order > 2:
        raise ReadError("differences", f"differences of order {order}, only orders 0 to 2 are read")
    if not nanovolts:
        raise ReadError("gain", "the file states 0 nV per step")
    if not interval_us:
        raise ReadError("sampling rate", "the file states 0 us between samples")
    return nanovolts, interval_us, order


def _leads_and_warnings(
    sections: dict[int, bytes], order: int
) -> tuple[dict[str, tuple[int, np.ndarray]], dict[str, str]]:
    """Return ({lead: (number of its first sample, samples in steps)}, warnings). Section 3 lists the leads,
    section 6 holds their samples."""
    count = sections[3][0]
    start = 6 + 2 * count
    coded_leads: dict[str, tuple[int, np.ndarray]] = {}
    warnings = {}
    for row, size in enumerate(struct.unpack_from(f"<{count}H", sections[6], 6)):
        first, last, code = struct.unpack_from("<IIB", sections[3], 2 + 9 * row)
        first = max(first, 1)  # some files count the first sample from 0, but the last from 1
        coded = sections[6][start : start + size]
        start += size
        lead = SCP_LEADS.get(str(code))
        if not lead:
            continue
        if lead in coded_leads:
            raise ReadError("duplicated lead", lead)
        if len(coded) < size:
            raise ReadError("truncated file", f"lead {lead}: {len(coded)} of {size} bytes")
        samples = last - first + 1
        is_cut = size in OVERFLOW_LENGTHS and size < 2 * samples <= 2 * MAX_SCP_SAMPLES
        if is_cut and 2 not in sections:
            warnings["shorter than stated"] = (
                f"{size // 2} of {samples} samples, the most that a lead of SCP-ECG can hold"
            )
            samples = size // 2
        coded_leads[lead] = (
            first,
            _undo_differences(_decode_steps(lead, coded, samples, 2 in sections), order),
        )
    return coded_leads, warnings


def _decode_steps(lead: str, coded: bytes, samples: int, is_coded: bool) -> np.ndarray:
    is_wrong = not is_coded and len(coded) != 2 * samples
    if is_wrong or not 0 < samples <= MAX_SCP_SAMPLES:
        detail = f"lead {lead}: {samples} samples stated, {len(coded)} bytes found"
        raise ReadError("sample count", detail)
    return (
        decode_huffman(coded, samples) if is_coded else np.frombuffer(coded, "<i2").astype(np.int64)
    )


def _patient_age_sex(section: bytes) -> tuple[str | None, float | None, str | None]:
    fields: dict[int, bytes] = {}
    place = 0
    while place < len(section) and (tag := section[place]) != END:
        (size,) = struct.unpack_from("<H", section, place + 1)
        if tag in (PATIENT_ID, AGE, SEX):
            fields[tag] = section[place + 3 : place + 3 + size]
        place += 3 + size
    age, unit = struct.unpack("<HB", fields.get(AGE, b"").ljust(3, b"\0")[:3])
    sex = {b"\1": "M", b"\2": "F"}.get(fields.get(SEX, b"")[:1])
    return (
        fields.get(PATIENT_ID, b"").split(b"\0")[0].decode("latin-1"),
        age * YEARS_PER_UNIT_CODE[unit] if unit in YEARS_PER_UNIT_CODE else None,
        sex,
    )


def decode_huffman(coded: bytes, count: int) -> np.ndarray:
    """Decode `count` numbers that are Huffman-coded by the standard's default table."""
    octets = np.frombuffer(coded + bytes(6), np.uint8).astype(np.int32)
    # For each byte, the 24 bits that begin with it
    words = octets[:-2] << 16 | octets[1:-1] << 8 | octets[2:]
    shifts = np.arange(14, 6, -1, dtype=np.int32)
    # For each bit, the 10 bits that begin with it
    windows = (words[:, None] >> shifts & 1023).ravel()
    starts = _code_starts(windows, count)
    codes = windows.take(starts)
    spare = 8 * len(coded) - int(starts[-1] + _CODE_LENGTHS[codes[-1]])
    # A lead has an even number of bytes, so up to 15 bits may be left
    if not 0 <= spare < 16:
        what = "more" if spare > 0 else "fewer"
        raise ReadError("sample count", f"{count} samples stated, the Huffman code holds {what}")
    values: np.ndarray = _CODE_VALUES.take(codes)
    for code, bits in _ESCAPE_CODES:
        where = np.flatnonzero(codes == code)
        begin = starts[where] + 10
        shift = 24 - bits - (begin & 7)
        number = (words[begin >> 3] >> shift) & ((1 << bits) - 1)
        # The number is stored in two's complement
        values[where] = number - ((number >> (bits - 1)) << bits)
    return values


def _code_starts(windows: np.ndarray, count: int) -> np.ndarray:
    """Return the position of the bit at which each number's code begins.

    The position of a number depends on all numbers before it. So the jump to the next number is
    looked up for every bit, as if a number began there, and jumps are chained into jumps over 2,
    4, 8 and 16 numbers: the loop finds only every 16th start."""
    jump = np.arange(len(windows)) + _CODE_LENGTHS.take(windows)
    jumps = [np.minimum(jump, len(windows) - 1)]
    for _ in range(JUMP_DOUBLINGS):
        jumps.append(jumps[-1].take(jumps[-1]))
    far = jumps.pop().data
    place = 0
    every = []
    for _ in range(-(-count >> JUMP_DOUBLINGS)):
        every.append(place)
        place = far[place]
    starts = np.array(every)[:, None]
    for jump in reversed(jumps):
        starts = np.stack([starts, jump.take(starts)], axis=-1).reshape(len(every), -1)
    return starts.ravel()[:count]


def _undo_differences(steps: np.ndarray, order: int) -> np.ndarray:
    """Add up differences of this order, and return the samples. The first `order` samples are stored as they
    are."""
    if order == 2:
        steps[1:2] -= steps[:1]
        steps[1:] = np.cumsum(steps[1:])
    steps = np.cumsum(steps) if order else steps
    if max(steps.max(), -steps.min()) > 2**15:
        raise ReadError("sample range", "a sum of differences does not fit in 16 bits")
    return steps


def _align_in_time(leads: dict[str, tuple[int, np.ndarray]]) -> dict[str, np.ndarray]:
    """Place the signals of {lead: (number of its first sample, signal)} on one time axis. All get the same
    length, with NaN where a lead was not measured."""
    begin = min((first for first, _ in leads.values()), default=0)
    length = max((first + len(uv) for first, uv in leads.values()), default=0) - begin
    if length > MAX_SCP_SAMPLES:
        raise ReadError(
            "sample count", f"the leads together span {length} samples, {MAX_SCP_SAMPLES} at most"
        )
    signals = {lead: np.full(length, np.nan) for lead in leads}
    for lead, (first, uv) in leads.items():
        signals[lead][first - begin : first - begin + len(uv)] = uv
    return signals
