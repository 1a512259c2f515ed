"""Tar shards as WebDataset and DALI read them: ustar, uncompressed, `<key>.ecg` then `<key>.json`, and an index beside.

Headers are written by hand: a fixed 512-byte form without times, owners or links, so the same crops give the same bytes.
"""

import hashlib
from collections.abc import Iterable
from typing import BinaryIO

BLOCK, MAX_NAME = 512, 99
MAX_INDEX = 2**26
ECG, JSON = "ecg", "json"
OWNER, TIME = b"0000644\0" + b"0000000\0" * 2, b"00000000000\0"
REST = b"0" + bytes(100) + b"ustar\00000" + bytes(64) + b"0000000\0" * 2 + bytes(167)
CONSTANT_SUM = sum(OWNER + TIME + REST) + 8 * 32  # the sum itself counts as eight blanks


def shard_name(number: int) -> str:
    return f"{number:05d}.tar"


def index_name(shard: str) -> str:
    return f"shards/{shard.removesuffix('.tar')}.idx"


def part_name(shard: str) -> str:
    """Of an unfinished dataset: the shard's rows."""
    return f".build/{shard.removesuffix('.tar')}.parquet"


def member_header(name: str, size: int) -> bytes:
    """A ustar header of a regular file, mode 0644, owner 0, time 0."""
    raw = name.encode("ascii")
    if len(raw) > MAX_NAME or not 0 <= size < 8**11:
        raise ValueError(f"a tar member of this form cannot be: {name!r}, {size} bytes")
    octal = b"%011o\0" % size
    total = sum(raw) + sum(octal) + CONSTANT_SUM
    return raw.ljust(100, b"\0") + OWNER + octal + TIME + b"%06o\0 " % total + REST


class TarWriter:
    """Appends members to an open file; offsets, size and sha256 come as they are written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()
        self.index: list[str] = []

    def add(self, key: str, ecg: bytes | memoryview, text: bytes) -> int:
        """One crop; -> the offset of its signal."""
        signal, facts = f"{key}.{ECG}", f"{key}.{JSON}"
        self._write(member_header(signal, len(ecg)))
        at = self.size
        self._write(ecg)
        before = bytes(-len(ecg) % BLOCK) + member_header(facts, len(text))
        self.index.append(_line(at, len(ecg), signal, self.size + len(before), len(text), facts))
        self._write(before + text + bytes(-len(text) % BLOCK))
        return at

    def close(self) -> str:
        """End of archive; -> the index's text."""
        self._write(bytes(2 * BLOCK))
        return _index(self.index)

    def _write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)


def index_of(shard: memoryview, offsets: Iterable[int]) -> str:
    """The index of a finished shard, from the headers of its members."""
    lines = []
    for at in offsets:
        signal, size = member(shard, at)
        below = at + size + -size % BLOCK + BLOCK
        facts, length = member(shard, below)
        lines.append(_line(at, size, signal, below, length, facts))
    return _index(lines)


def member(shard: memoryview, at: int) -> tuple[str, int]:
    """Name and size of the member whose bytes begin there."""
    header = bytes(shard[at - BLOCK : at])
    return header[:100].rstrip(b"\0").decode("ascii"), int(header[124:135], 8)


def _line(at: int, size: int, signal: str, below: int, length: int, facts: str) -> str:
    return f"{ECG} {at} {size} {signal} {JSON} {below} {length} {facts}\n"


def _index(lines: list[str]) -> str:
    return f"v1.2 {len(lines)}\n" + "".join(lines)
