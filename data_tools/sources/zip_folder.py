"""Reads zip archives as if they were folders. Members are read by byte range; nothing is unpacked to a disk.

    archive_folder_and_names("x.zip")             # the folder x that unpacking makes; also s3://bucket/x.zip
    archive_folder_and_names("x.zip/records")     # a folder in it
    archive_folder_and_names("FOLDER")            # FOLDER; a file x.zip in it appears as a folder x

The directory at the end of a zip is read once in each process, without `zipfile`, which takes a
gigabyte for 1.6 million members. A directory has no checksum. So each name in it is compared with the
name in the member's header, and the data of a member with their size and CRC-32.
"""

import heapq
import os
import re
import struct
import threading
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from stat import S_IFMT, S_IFREG
from typing import Any, NamedTuple, NoReturn

import numpy as np
from deflate import DeflateError, crc32, deflate_decompress  # twice as fast as zlib

from ..io.errors import MISSING_FILE, ReadError, StorageError
from ..io.npz import ANY_RATIO_BYTES, MAX_COMPRESSION
from ..io.storage import Folder, LocalFolder, folder, local_sort_key, prefetch
from ..io.terminal import tell

MAX_MEMBERS, MAX_DIRECTORY = 10_000_000, 2**31
MAX_CACHED_DIRECTORIES = 1024
REQUEST_BYTES = 2**24  # most bytes of a zip's directory that one request reads
MAX_FIELD_BYTES = 2**16  # a name, extra field or comment is shorter, as its length has 16 bits
# Layouts of the parts of a zip, without versions and times. ENTRY, in the directory: system, flags, method,
# CRC-32, packed and unpacked bytes, lengths of name, extra field and comment, Unix mode, position of the
# member. HEADER, before a member's data: signature, method, lengths of name and extra field. END_RECORD,
# after the directory: numbers of disks and entries, length and position of the directory
ENTRY, HEADER = struct.Struct("<4xxB2x2H4x3L3H6xHL"), struct.Struct("<4s4xH16x2H")
END_RECORD, END_RECORD_64 = struct.Struct("<4x4H2LH"), struct.Struct("<16x2L4Q")
# Stands in a 32-bit field for a number that needs more bits; that number is in the extra field
IN_EXTRA_FIELD = 2**32 - 1
STORED, DEFLATED = 0, 8
LINK, ENCRYPTED = -1, -2
UTF8, UNIX = 1 << 11, 3
DAMAGED_DIRECTORY = "the zip's directory is damaged, or the zip is split: download the zip again"
# Files with these endings are not checked when a zip is opened: a record that lacks one of its files is
# refused anyway
RECORD_ENDINGS = (b".hea", b".dat", b".mat")
MAX_CHECKED_MEMBERS = 256
_INDEX_LOCK = threading.Lock()


class Member(NamedTuple):
    """Where a file in a zip is stored, and how."""

    begin: int  # position of the member's header; its data follow the header
    end: int  # position of the next member, or of the directory
    packed: int  # size in bytes, compressed
    size: int  # size in bytes, unpacked
    crc: int
    method: int  # compression method; LINK or ENCRYPTED if the member is not read
    name_crc: int  # CRC-32 of the name


class ZipIndex(NamedTuple):
    """The members of a zip, sorted as LocalFolder.names sorts files."""

    keys: list[bytes]  # sort key of each member
    numbers: np.ndarray  # one row for each member: the fields of Member

    def find(self, path: str) -> Member | None:
        key = _sort_key(path)
        row = bisect_left(self.keys, key)
        if row < len(self.keys) and self.keys[row] == key:
            return Member(*self.numbers[row].tolist())
        return None

    def keys_below(self, path: str) -> Iterator[bytes]:
        """Yield the sort keys of the members in a folder, relative to this folder."""
        if not path:
            yield from self.keys
            return
        begin = _sort_key(f"{path}/")[:-1]
        rows = (bisect_left(self.keys, key) for key in (begin, begin[:-1] + b"\1"))
        for key in self.keys[slice(*rows)]:
            yield key[len(begin) :]


def _sort_key(path: str) -> bytes:
    """Return a sort key for the order of LocalFolder.names, in which files come before subfolders."""
    place, slash, name = path.encode(errors="surrogatepass").rpartition(b"/")
    return (b"\2" + place.replace(b"/", b"\0\2") + b"\0" if slash else b"") + b"\1" + name


def _path_of_sort_key(key: bytes) -> str:
    text = key[1:].replace(b"\0\2", b"/").replace(b"\0\1", b"/")
    return text.decode(errors="surrogatepass")


@dataclass(frozen=True)
class Zip:
    """A zip, or a folder inside a zip."""

    base: Folder
    file: str
    version: bytes  # size and modification time of a local zip; when they change, its directory is read again
    inside: str = ""  # path of the folder inside the zip; "" if it is the whole zip

    @property
    def index(self) -> ZipIndex:
        with _INDEX_LOCK:
            return _read_index(self.base, self.file, self.version)

    def path(self, name: str) -> str:
        return f"{self.inside}/{name}".strip("/") if self.inside else name

    def read_packed(self, member: Member, name: str, most: int) -> memoryview:
        """Return a member's data as they are stored, mostly compressed. `most`: the most bytes to read, with
        the header; `name`: the file's name for errors."""
        try:
            size = min(member.end - member.begin, most)
            data = self.base.read_range(self.file, member.begin, size)
        except OSError as error:
            raise StorageError(
                f"{self.base.url}: cannot read a zip: {error.strerror or error}"
            ) from None
        if len(data) >= HEADER.size:
            signature, method, length, extra = HEADER.unpack_from(data)
            begin = HEADER.size + length
            known = signature, method, crc32(data[HEADER.size : begin])
            if known == (b"PK\3\4", member.method, member.name_crc):
                return memoryview(data)[begin + extra : begin + extra + member.packed]
        raise ReadError(
            "damaged zip",
            f"{name}: the zip holds something else at this file's position: download the zip again",
        )


@dataclass(frozen=True, kw_only=True)
class ZipFolder(LocalFolder):
    """A zip that is read like a folder, or a folder in which each zip x.zip appears as a folder x."""

    base: Folder
    # {name of the folder as which the zip appears: zip}; the name is "" if the whole archive is a zip
    zips: dict[str, Zip] = field(compare=False)
    remote: bool

    def zip_and_path(self, name: str) -> tuple[Zip | None, str]:
        """Return the zip that contains a file or folder, None if no zip does, and the path in that zip."""
        first, _, rest = name.partition("/")
        zipped, path = self.zips.get(""), name
        if first and first in self.zips:
            zipped, path = self.zips[first], rest
        return zipped, zipped.path(path) if zipped else path

    def _zip_files(self) -> set[str]:
        return {zipped.file for zipped in self.zips.values()}

    def read(self, name: str, limit: int, cut: bool = False) -> bytes:
        zipped, path = self.zip_and_path(name)
        if zipped is None:
            return self.base.read(name, limit, cut)
        member = zipped.index.find(path)
        if member is None:
            raise ReadError(MISSING_FILE, name)
        is_whole = member.size <= limit
        _check_member(member, name, limit if not cut else member.size)
        most = member.packed if is_whole else limit
        data = zipped.read_packed(member, name, HEADER.size + 2 * MAX_FIELD_BYTES + most)
        try:
            if member.method == DEFLATED and is_whole:
                data = memoryview(deflate_decompress(data, member.size))
            elif member.method == DEFLATED:
                data = memoryview(zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, limit))
        except (DeflateError, zlib.error):
            data = data[:0]
        if is_whole and (len(data) != member.size or crc32(data) != member.crc):
            raise ReadError(
                "damaged zip",
                f"{name}: its data do not have the size and CRC-32 that the zip states",
            )
        return bytes(data[:limit])

    def stamp(self, name: str) -> bytes:
        zipped, path = self.zip_and_path(name)
        if zipped is None:
            return self.base.stamp(name)
        member = zipped.index.find(path)
        return f"{member.size},{member.crc}".encode() if member else b""

    def exists(self, name: str) -> bool:
        zipped, path = self.zip_and_path(name)
        if zipped is None:
            return self.base.exists(name)
        return bool(zipped.index.find(path)) or any(zipped.index.keys_below(path))

    def names(self, under: str = "") -> Iterator[str]:
        zipped, path = self.zip_and_path(under)
        if zipped:
            before = f"{under}/" if under else ""
            yield from (before + _path_of_sort_key(key) for key in zipped.index.keys_below(path))
        elif under:
            yield from self.base.names(under)
        else:
            files = self._zip_files()
            others = (name for name in self.base.names() if name not in files)
            yield from heapq.merge(others, *map(self.names, self.zips), key=local_sort_key)

    def links(self, under: str = "") -> Iterator[str]:
        """Yield the links that may lead to folders. A zip does not say where its links lead, so those without
        a dot in their names are yielded."""
        if self.zip_and_path(under)[0] is None:
            yield from self.base.links(under)
        for name in self.names(under):
            zipped, path = self.zip_and_path(name)
            if zipped and "." not in name.rpartition("/")[2]:
                member = zipped.index.find(path)
                if member and member.method == LINK:
                    yield name

    def children(self, under: str = "") -> list[str]:
        zipped, path = self.zip_and_path(under)
        if zipped is None:
            names = {*self.base.children(under)}
            if not under:
                names = (names | self.zips.keys()) - self._zip_files()
            return sorted(names)
        keys = {key.partition(b"\0")[0] for key in zipped.index.keys_below(path)}
        if not keys:
            raise StorageError(f"cannot list {self.path(under)}: no such folder in the zip")
        return sorted(map(_path_of_sort_key, keys))

    def _raise_read_only(self, *_: Any, **__: Any) -> NoReturn:
        raise StorageError(f"{self.url}: a zip can only be read: choose another folder")

    size = read_range = write = publish = workdir = remove = _raise_read_only


def _check_member(member: Member, name: str, limit: int) -> None:
    if member.method == LINK:
        raise ReadError("not a regular file", f"{name}: a link in a zip, which is not followed")
    if member.method == ENCRYPTED:
        raise ReadError("encrypted", f"{name}: the file is encrypted in the zip: unpack the zip")
    if member.method not in (STORED, DEFLATED):
        raise ReadError(
            "zip compression",
            f"{name}: compression method {member.method} is not read: unpack the zip",
        )
    if member.size > limit:
        raise ReadError("file too large", f"{name}: {member.size} bytes, {limit} at most")
    if member.size > max(ANY_RATIO_BYTES, MAX_COMPRESSION * member.packed):
        raise ReadError(
            "zip compression",
            f"{name}: {member.size} bytes compressed to {member.packed}, over {MAX_COMPRESSION} to 1: "
            "unpack the zip",
        )


# The directory of a zip


@lru_cache(maxsize=MAX_CACHED_DIRECTORIES)
def _read_index(base: Folder, file: str, version: bytes) -> ZipIndex:
    place = f"a zip in {base.url} (unzip -tq finds it)" if base.private else base.path(file)
    try:
        count, begin, end = _directory_count_and_range(base, file)
        parts = range(begin, end, REQUEST_BYTES)
        read = prefetch(
            lambda start: base.read_range(file, start, min(REQUEST_BYTES, end - start)), parts, 4
        )
        index = _parse_directory(b"".join(read), count, begin)
        # Check the files that may be tables: if the directory held a damaged name of a table, nobody would
        # notice that the table is missing
        names = (_path_of_sort_key(key) for key in index.keys if not key.endswith(RECORD_ENDINGS))
        for name in islice(names, MAX_CHECKED_MEMBERS):
            if (member := index.find(name)) and member.method >= 0:
                Zip(base, file, version).read_packed(member, name, 2**13)
        return index
    except OSError as error:
        raise StorageError(f"{place}: {error.strerror or error}") from None
    except (struct.error, OverflowError):
        raise StorageError(f"{place}: {DAMAGED_DIRECTORY}") from None
    except ReadError as error:
        raise StorageError(f"{place}: {error.reason if base.private else error}") from None


def _directory_count_and_range(base: Folder, file: str) -> tuple[int, int, int]:
    """Return (number of entries, start, end) of a zip's directory."""
    size = base.size(file)
    first = max(0, size - MAX_FIELD_BYTES - END_RECORD_64.size)
    tail = base.read_range(file, first, size - first)
    position = tail.rfind(b"PK\5\6")
    if position < 0:
        raise ReadError("not a zip, or its end is missing: download the zip again")
    end = first + position
    disk, start, here, count, length, begin, comment = END_RECORD.unpack_from(tail, position)
    if position + END_RECORD.size + comment != len(tail):
        raise ReadError(DAMAGED_DIRECTORY)
    # A locator before the end record leads to the Zip64 end record, which holds 64-bit numbers
    if tail[max(0, position - 20) : position].startswith(b"PK\6\7"):
        (end,) = struct.unpack_from("<Q", tail, position - 12)
        numbers = END_RECORD_64.unpack(base.read_range(file, end, END_RECORD_64.size))
        disk, start, here, count, length, begin = numbers
    if disk or start or here != count or begin + length != end:
        raise ReadError(DAMAGED_DIRECTORY)
    if count > MAX_MEMBERS or length > MAX_DIRECTORY:
        raise ReadError(
            f"the zip has {count:,} members, listed in {length:,} bytes, but at most {MAX_MEMBERS:,} members and "
            f"{MAX_DIRECTORY:,} bytes are read: unpack the zip"
        )
    return count, begin, end


def _parse_directory(data: bytes, count: int, end: int) -> ZipIndex:
    """Parse a zip's directory of `count` entries. `end`: position in the zip before which all members end."""
    keys, numbers, position = [], array("q"), 0
    for _ in range(count):
        fields = ENTRY.unpack_from(data, position)
        system, flags, method, crc, packed, size, length, extra, comment, mode, begin = fields
        if not data.startswith(b"PK\1\2", position):
            raise ReadError(DAMAGED_DIRECTORY)
        position += ENTRY.size + length
        name = data[position - length : position]
        if IN_EXTRA_FIELD in (size, packed, begin):
            size, packed, begin = _zip64_numbers(
                (size, packed, begin), data[position : position + extra]
            )
        position += extra + comment
        unicode = flags & UTF8 or system == UNIX or name.isascii()  # as unzip has it
        path = name.decode("utf-8" if unicode else "cp437", "surrogateescape")
        _check_path(path)
        if path.endswith("/"):
            continue
        if system == UNIX and S_IFMT(mode) not in (0, S_IFREG):
            method = LINK
        elif flags & 1:
            method = ENCRYPTED
        keys.append(_sort_key(path))
        least = begin + HEADER.size + length + packed
        numbers.extend((begin, least, packed, size, crc, method, crc32(name)))
    if position != len(data) or not keys:
        raise ReadError(DAMAGED_DIRECTORY)
    return _build_index(keys, np.frombuffer(numbers, np.int64).reshape(len(keys), -1), end)


def _zip64_numbers(numbers: tuple[int, ...], extra: bytes) -> tuple[int, ...]:
    """Return (unpacked bytes, packed bytes, position) of a member. Numbers that need more than 32 bits are
    taken from the extra field."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            more = iter(struct.unpack_from(f"<{length // 8}Q", extra, 4))
            return tuple(
                next(more, number) if number == IN_EXTRA_FIELD else number for number in numbers
            )
        extra = extra[4 + length :]
    return numbers


def _build_index(keys: list[bytes], members: np.ndarray, end: int) -> ZipIndex:
    """Build the index of a zip. Overlapping members are refused, because a zip bomb has them."""
    by_place = np.argsort(members[:, 0])
    ends = np.append(members[by_place[1:], 0], end)
    if (members[by_place, 1] > ends).any():
        raise ReadError("the zip's members overlap: unpack the zip")
    members[by_place, 1] = ends
    order = sorted(range(len(keys)), key=keys.__getitem__)
    if len(set(keys)) < len(keys):
        raise ReadError("the zip holds a file twice: unpack the zip")
    return ZipIndex([keys[row] for row in order], members[order])


def _check_path(path: str) -> None:
    if {"", ".", ".."} & set(path.removesuffix("/").split("/")) or "\0" in path:
        raise ReadError("the zip holds an unsafe path", path)
    if path.lower().endswith(".zip"):
        raise ReadError("the zip holds another zip, which is not read: unpack the outer zip", path)


# Paths and addresses


def folder_or_zip(
    url: str | os.PathLike[str], anonymous: bool = False, private: bool = False
) -> Folder:
    """Return the folder at a path or address. The path may lead to a zip or to a folder inside a zip."""
    text = os.fspath(url)
    for match in re.finditer(r"\.zip(?=/|$)", text, re.IGNORECASE):
        path = text[: match.end()]
        if "://" in path or os.path.isfile(path):
            place, slash, file = path.rpartition("/")
            base = folder(place or slash or ".", anonymous, private)
            zipped, inside = _open_zip(base, file), text[match.end() :].strip("/")
            zipped = replace(zipped, inside=zipped.path(inside))
            url = f"{base.path(file)}/{inside}".rstrip("/")
            return ZipFolder(url, private, base=base, zips={"": zipped}, remote=base.remote)
    return folder(url, anonymous, private)


def _open_zip(base: Folder, file: str) -> Zip:
    """Open a zip. If it holds nothing but a folder of the zip's own name, return this folder."""
    zipped, name = Zip(base, file, base.stamp(file)), file[:-4]
    keys, prefix = zipped.index.keys, _sort_key(f"{name}/")[:-1]
    is_all = keys[0].startswith(prefix) and keys[-1].startswith(prefix)
    return replace(zipped, inside=name) if is_all else zipped


def archive_folder_and_names(
    url: str | os.PathLike[str], anonymous: bool = False, private: bool = False
) -> tuple[Folder, list[str]]:
    """Return the folder of an archive, in which each zip x.zip appears as a folder x, and the names in this
    folder."""
    root = folder_or_zip(url, anonymous, private)
    names = root.children()
    zips: dict[str, Zip] = {}
    for file in names:
        name, path = file[:-4], root.path(file)
        if not file.lower().endswith(".zip") or (not root.remote and os.path.isdir(path)):
            continue
        if name in {*names, *zips} or (not root.remote and os.path.islink(path)):
            what = "a zip" if private else file
            tell(f"note: {root.url}: {what} is left out, as it is a link or unpacked beside it")
        else:
            zips[name] = _open_zip(root, file)
    if not zips:
        return root, names
    root = ZipFolder(root.url, private, base=root, zips=zips, remote=root.remote)
    return root, root.children()


def folder_below(root: Folder, name: str, anonymous: bool) -> Folder:
    if isinstance(root, ZipFolder):
        zipped, path = root.zip_and_path(name)
        if zipped:
            zips = {"": replace(zipped, inside=path)}
            return replace(root, url=root.path(name), zips=zips)
    return folder(root.path(name), anonymous, root.private)


def is_in_zip(root: Folder, name: str = "") -> bool:
    return isinstance(root, ZipFolder) and bool(root.zip_and_path(name)[0])
