"""SCP-ECG and EDF files written byte by byte from the standards, without the project's own code."""

import binascii
import struct
from collections.abc import Mapping, Sequence

import numpy as np

from omnilead.data_tools.record import LEADS

CODES = dict(zip(LEADS, (1, 2, 61, 62, 63, 64, 3, 4, 5, 6, 7, 8), strict=True))
# The standard's default table: prefix -> number; the last two announce 8 and 16 bits
PREFIXES = {
    0: "0",
    1: "100",
    -1: "101",
    2: "1100",
    -2: "1101",
    3: "11100",
    -3: "11101",
    4: "111100",
    -4: "111101",
}
PREFIXES |= {
    5: "1111100",
    -5: "1111101",
    6: "11111100",
    -6: "11111101",
    7: "111111100",
    -7: "111111101",
}
PREFIXES |= {8: "1111111100", -8: "1111111101"}


def huffman_code(numbers: Sequence[int]) -> bytes:
    bits = ""
    for number in numbers:
        wide = not -128 <= number < 128
        escape = f"1111111111{number & 0xFFFF:016b}" if wide else f"1111111110{number & 0xFF:08b}"
        bits += PREFIXES.get(number, escape)
    bits += "0" * (-len(bits) % 16)
    return int("1" + bits, 2).to_bytes(len(bits) // 8 + 1, "big")[1:]


def differences(x: np.ndarray, order: int) -> list[int]:
    """The first samples as they are, then the differences."""
    return [*x[:order].tolist(), *np.diff(x, order).tolist()]


def section(number: int, body: bytes) -> bytes:
    body += b"\0" * (len(body) % 2)
    rest = (
        struct.pack("<HIBB6s", number, 16 + len(body), 20, 20, b"SCPECG" if number == 0 else b"")
        + body
    )
    return struct.pack("<H", binascii.crc_hqx(rest, 0xFFFF)) + rest


def tags(fields: Mapping[int, bytes]) -> bytes:
    return (
        b"".join(struct.pack("<BH", tag, len(value)) + value for tag, value in fields.items())
        + b"\xff\0\0"
    )


def scp(
    leads: Mapping[str, np.ndarray],
    order: int = 2,
    raw: bool = False,
    nanovolts: int = 5000,
    interval_us: int = 2000,
    person: Mapping[int, bytes] = {2: b"4711\0", 4: b"\x3d\0\1", 8: b"\2"},
    starts: Mapping[str, int] = {},
    more: Mapping[int, bytes] = {},
    stated: int = 0,
) -> bytes:
    """A file with these leads (steps of `nanovolts`); `more`: bodies of sections, also in place of
    those made here."""
    rows = [
        (starts.get(lead, 1), max(starts.get(lead, 1), 1) + (stated or len(x)) - 1)
        for lead, x in leads.items()
    ]
    rows_3 = [
        struct.pack("<IIB", *row, CODES.get(lead, 9)) for row, lead in zip(rows, leads, strict=True)
    ]
    coded = [differences(x, order) for x in leads.values()]
    data = [np.array(one).astype("<i2").tobytes() if raw else huffman_code(one) for one in coded]
    bodies = {
        1: tags(person),
        3: bytes([len(leads), len(leads) << 3 & 0xF8 | 4]) + b"".join(rows_3),
    }
    bodies |= {} if raw else {2: struct.pack("<H", 19999)}
    sizes = struct.pack(f"<{len(data)}H", *map(len, data))
    bodies |= {6: struct.pack("<HHBB", nanovolts, interval_us, order, 0) + sizes + b"".join(data)}
    return scp_of(bodies | more)


def scp_of(bodies: Mapping[int, bytes]) -> bytes:
    sections = {number: section(number, body) for number, body in sorted(bodies.items())}
    pointers, place = (
        struct.pack("<HII", 0, 26 + 10 * len(sections), 7),
        7 + 26 + 10 * len(sections),
    )
    for number, data in sections.items():
        pointers, place = (
            pointers + struct.pack("<HII", number, len(data), place),
            place + len(data),
        )
    return checked(section(0, pointers) + b"".join(sections.values()))


def checked(sections: bytes) -> bytes:
    """All sections -> the file, with its length and checksum."""
    rest = struct.pack("<I", 6 + len(sections)) + sections
    return struct.pack("<H", binascii.crc_hqx(rest, 0xFFFF)) + rest


def edf(
    signals: Mapping[str, np.ndarray],
    records: int | str = 10,
    duration: str = "1",
    unit: str = "uV",
    scale: Sequence[object] = (-32768, 32767, -32768, 32767),
    patient: str = "MCH-0234567 F 02-MAY-1951 Haagse_Harry",
    kind: str = "EDF+C",
    free: str = "",
) -> bytes:
    """A file with these signals, cut into `records`; `free`: in every field of free text."""
    cuts = [x.astype("<i2").reshape(int(records), -1) for x in signals.values()]
    head = f"{'0':8}{patient:80}{f'Startdate 02-MAR-2002 {free}':80}02.03.0212.00.00{256 * (len(cuts) + 1):<8}{kind:44}"
    head += f"{records:<8}{duration:8}{len(cuts):<4}"
    head += (
        "".join(f"{name:16}" for name in signals)
        + f"{free:80}" * len(cuts)
        + f"{unit:8}" * len(cuts)
    )
    head += "".join(f"{value:<8}" * len(cuts) for value in scale) + f"{free:80}" * len(cuts)
    head += "".join(f"{cut.shape[1]:<8}" for cut in cuts) + f"{free:32}" * len(cuts)
    return head.encode("latin-1") + np.concatenate(cuts, axis=1).tobytes()
