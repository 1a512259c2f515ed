"""Tar shards for WebDataset and DALI: uncompressed ustar with `<key>.ecg`, then `<key>.json`, and a
separate index file.

Headers are written by hand in a fixed 512-byte form without times, owners or links, so the same
crops give the same bytes.
"""

import hashlib
from collections.abc import Iterable
from typing import BinaryIO

BLOCK, MAX_NAME = 512, 99
MAX_INDEX = 2**26
OWNER, TIME = b"0000644\0" + b"0000000\0" * 2, b"00000000000\0"
REST = b"0" + bytes(100) + b"ustar\00000" + bytes(64) + b"0000000\0" * 2 + bytes(167)
CONSTANT_SUM = sum(OWNER + TIME + REST) + 8 * 32  # the checksum field itself counts as eight spaces


def shard_name(number: int) -> str:
    return f"{number:05d}.tar"


def index_name(shard: str) -> str:
    return f"shards/{shard.removesuffix('.tar')}.idx"


def part_name(shard: str) -> str:
    """The file with the rows of a shard in an unfinished dataset."""
    return f".build/{shard.removesuffix('.tar')}.parquet"


def member_header(name: str, size: int) -> bytes:
    """The ustar header of a regular file, mode 0644, owner 0, time 0."""
    raw = name.encode("ascii")
    if len(raw) > MAX_NAME or not 0 <= size < 8**11:
        raise ValueError(
            f"no tar header for {name!r} with {size} bytes: the limits are {MAX_NAME} characters "
            "and 8 GiB"
        )
    octal = b"%011o\0" % size
    total = sum(raw) + sum(octal) + CONSTANT_SUM
    return raw.ljust(100, b"\0") + OWNER + octal + TIME + b"%06o\0 " % total + REST


class TarWriter:
    """Appends crops to an open file and keeps its size, sha256 and index."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()
        self.index: list[str] = []

    def add(self, key: str, ecg: bytes | memoryview, text: bytes) -> int:
        """Write one crop and return the offset of its signal."""
        self._write(member_header(f"{key}.ecg", len(ecg)))
        offset = self.size
        self._write(ecg)
        between = bytes(-len(ecg) % BLOCK) + member_header(f"{key}.json", len(text))
        self.index.append(
            _line(
                offset, len(ecg), f"{key}.ecg", self.size + len(between), len(text), f"{key}.json"
            )
        )
        self._write(between + text + bytes(-len(text) % BLOCK))
        return offset

    def close(self) -> str:
        """Write the end of the archive and return the text of its index."""
        self._write(bytes(2 * BLOCK))
        return _index(self.index)

    def _write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)


def index_of(shard: memoryview, offsets: Iterable[int]) -> str:
    """Make the index of a finished shard from the headers of its members."""
    lines = []
    for offset in offsets:
        ecg, size = member(shard, offset)
        below = offset + size + -size % BLOCK + BLOCK
        text, length = member(shard, below)
        lines.append(_line(offset, size, ecg, below, length, text))
    return _index(lines)


def member(shard: memoryview, offset: int) -> tuple[str, int]:
    """Name and size of the member whose data starts at `offset`."""
    header = bytes(shard[offset - BLOCK : offset])
    return header[:100].rstrip(b"\0").decode("ascii"), int(header[124:135], 8)


def _line(offset: int, size: int, ecg: str, below: int, length: int, text: str) -> str:
    return f"ecg {offset} {size} {ecg} json {below} {length} {text}\n"


def _index(lines: list[str]) -> str:
    return f"v1.2 {len(lines)}\n" + "".join(lines)
