"""What the hospital formats share: the description of a format, the result of decoding, and a safe XML parser.

Untrusted XML becomes a tree of elements in bounded time and memory: no entities, no external files,
limited depth. Namespaces are removed from tags and attributes, because they differ between vendors'
versions: `hl7:code` becomes `code`.
"""

import binascii
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np

from ...io.errors import ReadError
from ...io.spreadsheet import to_number


class DecodedEcg(NamedTuple):
    """An ECG decoded from a vendor's file."""

    signals: dict[str, np.ndarray]  # {lead name: microvolts}; NaN where not measured
    fs_hz: float
    patient: str | None = None
    age: float | str | None = None  # in years; or the file's text, if that is not an age
    sex: str | None = None
    warnings: tuple[tuple[str, str], ...] = ()  # (reason, detail) of each warning


def age_in_years(number: str, unit: str, years: Mapping[str, float]) -> float | str:
    """Return the age in years, or the file's text if that is not an age. `years`: {unit: its length in
    years}."""
    age = to_number(number) * years.get(unit, math.nan)
    return f"{number} {unit}" if number and math.isnan(age) else age


class FileFormat(NamedTuple):
    """A file format with one ECG per file."""

    # Called with the file's first 4 KiB and its name; never raises
    looks_like: Callable[[bytes, str], bool]
    # Called with the whole file; raises a ReadError to refuse it
    decode: Callable[[bytes], DecodedEcg]
    max_bytes: int


# Limits of XML files: one with a 10 s ECG has 0.2 to 0.5 MB and some hundred elements
MAX_XML_BYTES = 4 * 2**20
MAX_DEPTH = 32
MAX_ELEMENTS = 20_000
_UTF16_STARTS = (b"\xff\xfe", b"\xfe\xff", b"<\0", b"\0<")


def parse_xml(data: bytes, skipped: frozenset[str] = frozenset()) -> Element:
    """Parse untrusted XML and return its root element, without elements whose names are in `skipped`.

    A file named in a DOCTYPE is not read. Entities and default attributes are refused, because they could
    take a thousand times the memory of the file."""
    builder = TreeBuilder()
    depth = count = 0
    skipping = 0  # depth of the element that is being skipped; 0 if none is

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth, count, skipping
        depth, count = depth + 1, count + 1
        if depth > MAX_DEPTH:
            raise ReadError("XML too deep", f"over {MAX_DEPTH} levels")
        if count > MAX_ELEMENTS:
            raise ReadError("XML too large", f"over {MAX_ELEMENTS} elements")
        if skipping:
            return
        if (local := tag.rpartition(":")[2]) in skipped:
            skipping, parser.CharacterDataHandler = depth, None
        else:
            builder.start(
                local,
                {_local_name(name): value for name, value in attributes.items()}
                if attributes
                else {},
            )

    def end(tag: str) -> None:
        nonlocal depth, skipping
        if not skipping:
            builder.end(tag.rpartition(":")[2])
        elif skipping == depth:
            skipping, parser.CharacterDataHandler = 0, builder.data
        depth -= 1

    def refuse(*_: object) -> NoReturn:
        raise ReadError("XML entity", "entities and default attributes are not read")

    # Some files declare UTF-16, but are stored as UTF-8
    declares_utf16 = b"utf-16" in data[:200].lower() and not data.startswith(_UTF16_STARTS)
    parser = expat.ParserCreate("utf-8" if declares_utf16 else None)
    parser.buffer_text, parser.buffer_size = True, 2**16
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = builder.data
    parser.EntityDeclHandler = parser.SkippedEntityHandler = parser.AttlistDeclHandler = refuse
    try:
        parser.Parse(data, True)
        return builder.close()
    except (expat.ExpatError, ValueError, LookupError, AssertionError) as error:
        raise ReadError("malformed XML", str(error)[:80]) from None


def root_tag(head: bytes) -> str:
    """Return the name of an XML file's root element, without its namespace, from the first bytes of a file in
    any encoding; "" if the file is not XML."""
    text = head.replace(b"\0", b"").lstrip(b"\xff\xfe\xef\xbb\xbf \t\r\n")
    if not text.startswith(b"<"):
        return ""
    place = 0
    while (place := text.find(b"<", place)) >= 0:
        end = b"-->" if text.startswith(b"<!--", place) else b">"
        if text[place + 1 : place + 2] not in (b"?", b"!"):
            name = text[place + 1 : place + 80].replace(b"/", b" ").replace(b">", b" ").split()
            return _local_name(name[0].decode("ascii", "replace")) if name else ""
        if (place := text.find(end, place)) < 0:
            return ""
    return ""


def decode_base64(text: str, where: str = "") -> bytes:
    """Decode base64. The detail of a ReadError begins with `where`."""
    try:
        return binascii.a2b_base64("".join(text.split()), strict_mode=True)
    except ValueError as error:
        raise ReadError("base64", f"{where}{error}") from None


def _local_name(name: str) -> str:
    return name.rpartition(":")[2]
