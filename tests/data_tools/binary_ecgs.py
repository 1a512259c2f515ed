"""SCP-ECG and EDF files written byte by byte from the standards, without the project's own code."""

import binascii
import struct

import numpy as np

from omnilead.data_tools.ecg.record import LEADS

CODES = dict(zip(LEADS, (1, 2, 61, 62, 63, 64, 3, 4, 5, 6, 7, 8), strict=True))
# The standard's default table: number -> prefix; two more announce 8 and 16 bits
PREFIXES = {0: "0"}
for number in range(1, 9):
    PREFIXES |= {number: "1" * number + "00", -number: "1" * number + "01"}


def huffman_code(numbers):
    bits = ""
    for number in numbers:
        wide = not -128 <= number < 128
        escape = f"1111111111{number & 0xFFFF:016b}" if wide else f"1111111110{number & 0xFF:08b}"
        bits += PREFIXES.get(number, escape)
    bits += "0" * (-len(bits) % 16)
    return int("1" + bits, 2).to_bytes(len(bits) // 8 + 1, "big")[1:]


def differences(x, order):
    """The first samples as they are, then the differences."""
    return [*x[:order].tolist(), *np.diff(x, order).tolist()]


def section(number, body):
    body += b"\0" * (len(body) % 2)
    name = b"SCPECG" if number == 0 else b""
    return with_crc(struct.pack("<HIBB6s", number, 16 + len(body), 20, 20, name) + body)


def tags(fields):
    each = [struct.pack("<BH", tag, len(value)) + value for tag, value in fields.items()]
    return b"".join([*each, b"\xff\0\0"])


def row_3(first, last, lead="I"):
    """A lead in section 3."""
    return struct.pack("<IIB", first, last, CODES.get(lead, 9))


def scp(
    leads,
    order=2,
    raw=False,
    nanovolts=5000,
    interval_us=2000,
    person={2: b"4711\0", 4: b"\x3d\0\1", 8: b"\2"},
    starts={},
    more={},
    stated=0,
):
    """A file with these leads (steps of `nanovolts`); `more`: bodies of sections, also in place of
    those made here."""
    rows, data = b"", []
    for lead, x in leads.items():
        first = starts.get(lead, 1)
        rows += row_3(first, max(first, 1) + (stated or len(x)) - 1, lead)
        coded = differences(x, order)
        data.append(np.array(coded).astype("<i2").tobytes() if raw else huffman_code(coded))
    sizes = struct.pack(f"<{len(data)}H", *map(len, data))
    bodies = {
        1: tags(person),
        3: bytes([len(leads), len(leads) << 3 & 0xF8 | 4]) + rows,
        6: struct.pack("<HHBB", nanovolts, interval_us, order, 0) + sizes + b"".join(data),
    }
    if not raw:
        bodies[2] = struct.pack("<H", 19999)
    return scp_of(bodies | more)


def scp_of(bodies):
    sections = {number: section(number, body) for number, body in sorted(bodies.items())}
    size = 26 + 10 * len(sections)
    pointers, place = struct.pack("<HII", 0, size, 7), 7 + size
    for number, data in sections.items():
        pointers += struct.pack("<HII", number, len(data), place)
        place += len(data)
    return checked(section(0, pointers) + b"".join(sections.values()))


def checked(sections):
    """All sections -> the file, with its length and checksum."""
    return with_crc(struct.pack("<I", 6 + len(sections)) + sections)


def with_crc(content):
    return struct.pack("<H", binascii.crc_hqx(content, 0xFFFF)) + content


def edf(
    signals,
    records=10,
    duration="1",
    unit="uV",
    scale=(-32768, 32767, -32768, 32767),
    patient="MCH-0234567 F 02-MAY-1951 Haagse_Harry",
    kind="EDF+C",
    free="",
):
    """A file with these signals, cut into `records`; `free`: in every field of free text."""
    cuts = [x.astype("<i2").reshape(records, -1) for x in signals.values()]
    count = len(cuts)
    head = f"{'0':8}{patient:80}{f'Startdate 02-MAR-2002 {free}':80}02.03.0212.00.00"
    head += f"{256 * (count + 1):<8}{kind:44}{records:<8}{duration:8}{count:<4}"
    head += "".join(f"{name:16}" for name in signals) + f"{free:80}" * count + f"{unit:8}" * count
    head += "".join(f"{value:<8}" * count for value in scale) + f"{free:80}" * count
    head += "".join(f"{cut.shape[1]:<8}" for cut in cuts) + f"{free:32}" * count
    return head.encode("latin-1") + np.concatenate(cuts, axis=1).tobytes()
