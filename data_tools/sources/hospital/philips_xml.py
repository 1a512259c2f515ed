"""Decodes Philips' Sierra XML 1.03 to 1.04.01, with one resting ECG per file. Leads are stored in XLI, which
compresses their second differences.

The files have 11 s; the last second is for a calibration pulse of 1 mV in all leads. The pulse is
checked, because damage anywhere in a lead's differences changes it, and then cut off. III, aVR, aVL
and aVF are stored as residuals. Apart from the signal, only the patient's id, age and sex are read,
not the representative beats, which have their own rate and resolution.
"""

import math
from contextlib import suppress
from xml.etree.ElementTree import Element

import numpy as np

from ...ecg.record import AGE_UNITS, LEADS, lead_name
from ...io.errors import ReadError
from ...io.spreadsheet import to_number
from .base import MAX_XML_BYTES, DecodedEcg, FileFormat, decode_base64, parse_xml, root_tag

MAX_PHILIPS_LEADS, MAX_PHILIPS_SAMPLES = 32, 30_000
ECG_S = 10
# Each lead has zeros from 10.6 s, the calibration pulse from 10.7 s, zeros again from 10.9 s, and ends at 11 s
PULSE_S = (10.6, 10.7, 10.9, 11)
PULSE_UV = 1000
MAX_LZW_STRINGS = 767  # most strings that a decoder of LZW with 10-bit codes learns
END_CODE = 1023  # the LZW code that ends a lead
# Fields that could shift, scale or hide the samples, each with the only value that is accepted
_REQUIRED_FIELDS = {
    "dataencoding": "base64",
    "compression": "xli",
    "bitspersample": "16",
    "signaloffset": "0",
    "signalsigned": "true",
}
# {name of a field, mostly in version 1.03: its name in version 1.04}
_FIELD_ALIASES = {
    "compressmethod": "compression",
    "nbitspersample": "bitspersample",
    "signalresolution": "resolution",
    "samplespersecond": "samplingrate",
}
_SKIPPED_ELEMENTS = frozenset(
    (
        "internalmeasurements",
        "measurements",
        "interpretations",
        "repbeats",
        "userdefines",
        "reportinfo",
    )
)
_PERSON_PATH = "patient/generalpatientdata"
_SINGLE_LETTERS = [chr(byte) for byte in range(256)]
StatedFields = dict[str, list[str]]


def decode(data: bytes) -> DecodedEcg:
    root = parse_xml(data, _SKIPPED_ELEMENTS)
    if root.tag != "restingecgdata":
        raise ReadError("unknown format", f"not Philips XML: its root element is {root.tag[:40]}")
    version = root.findtext("documentinfo/documentversion", "").strip()
    if version not in ("1.03", "1.04", "1.04.01"):
        raise ReadError(
            "format version", f"version {version[:20] or 'none'}, only 1.03 to 1.04.01 are read"
        )
    waveforms = root.findall("waveforms/parsedwaveforms")
    if len(waveforms) != 1:
        raise ReadError(
            "rhythm waveform", f"{len(waveforms)} parsedwaveforms elements, exactly 1 is read"
        )
    stated = _stated_fields(waveforms[0], root)
    names, fs_hz = _lead_names(stated), _number(stated, "samplingrate")
    packed = decode_base64(waveforms[0].text or "")
    samples = _number(stated, "durationperchannel") * fs_hz / 1000
    if not 3 <= samples <= MAX_PHILIPS_SAMPLES or samples % 1:
        raise ReadError(
            "sample count",
            f"{samples:g} samples in a lead, only a whole number from 3 to {MAX_PHILIPS_SAMPLES} is read",
        )
    leads = _add_limb_leads(
        dict(zip(names, _decode_xli(packed, len(names), int(samples)), strict=True))
    )
    height = _pulse_height(leads, fs_hz)
    uv_per_step = _uv_per_step(stated, height)
    signals = {}
    for name, counts in leads.items():
        if name in LEADS:
            signals[name] = counts[: int(ECG_S * fs_hz) if height else None] * uv_per_step
    patient = _person_field(root, "patientid") or _person_field(root, "MRN") or None
    warnings = []
    if not height:
        detail = f"{samples / fs_hz:g} s without it: damage and a wrong scale are not noticed"
        warnings.append(("no calibration pulse", detail))
    return DecodedEcg(
        signals, fs_hz, patient, _age(root), _person_field(root, "sex"), tuple(warnings)
    )


def _person_field(root: Element, tag: str) -> str:
    return root.findtext(f"{_PERSON_PATH}/{tag}", "").strip()


def _uv_per_step(stated: StatedFields, height: int) -> float:
    """Return the resolution that the file states, or else that of its calibration pulse. If the file has both,
    they must agree."""
    is_stated = "resolution" in stated or not height
    uv_per_step = _number(stated, "resolution") if is_stated else PULSE_UV / height
    differs = height and abs(height * uv_per_step - PULSE_UV) > PULSE_UV / 20
    if differs or not 0 < uv_per_step <= 1000:
        raise ReadError(
            "gain",
            f"{uv_per_step:g} uV per step, calibration pulse of {height or 'no'} steps: a pulse must be "
            f"{PULSE_UV} uV high, and a step over 0 and up to 1000 uV",
        )
    return uv_per_step


FORMAT = FileFormat(lambda head, name: root_tag(head) == "restingecgdata", decode, MAX_XML_BYTES)


def _stated_fields(waveform: Element, root: Element) -> StatedFields:
    """Return what the file states about its samples, by the field names of version 1.04. A field that is
    stated twice has two texts. Raise a ReadError if one of _REQUIRED_FIELDS is missing or has another value."""
    stated: StatedFields = {}
    characteristics = root.iterfind("dataacquisition/signalcharacteristics/*")
    for name, text in (
        *waveform.items(),
        *((field.tag, field.text or "") for field in characteristics),
    ):
        if text.strip():
            stated.setdefault(_FIELD_ALIASES.get(name, name), []).append(text.strip())
    for name, expected in _REQUIRED_FIELDS.items():
        if wrong := [text for text in stated.get(name, ["none"]) if text.lower() != expected]:
            raise ReadError(name, f"{wrong[0][:20]}, only {expected} is read")
    return stated


def _number(stated: StatedFields, name: str) -> float:
    texts = stated.get(name, [])
    numbers = set(map(to_number, texts))
    if len(numbers) != 1 or not math.isfinite(sum(numbers)):
        reason = {"samplingrate": "sampling rate", "resolution": "gain"}.get(name, "sample count")
        raise ReadError(
            reason, f"{name}: {' and '.join(texts)[:40] or 'not stated'}: one number is expected"
        )
    return numbers.pop()


def _lead_names(stated: StatedFields) -> list[str]:
    """Return the lead names in the file's order. The twelve leads get the spelling of LEADS. Version 1.03
    states no names: its leads are in the order of LEADS."""
    labels, kind = stated.get("leadlabels", [""])[0].split(), stated.get("acquisitiontype", [""])[0]
    if not labels and kind in ("STD-12", "10-WIRE"):
        labels = list(LEADS)
    names = list(map(lead_name, labels))
    count = _number(
        stated, "numberofleads" if "numberofleads" in stated else "numberchannelsallocated"
    )
    if not 0 < len(names) == count <= MAX_PHILIPS_LEADS:
        raise ReadError(
            "signal count",
            f"{count:g} leads, {len(names)} with a name: only 1 to {MAX_PHILIPS_LEADS} leads are read, and each needs a name",
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ReadError("duplicated lead", twice[:10])
    return names


def _decode_xli(packed: bytes, leads: int, samples: int) -> list[np.ndarray]:
    """Decode the samples of the first `leads` leads. A file may hold more leads than it names."""
    chunks, starts, place = [], [], 0
    for _ in range(leads):
        size = int.from_bytes(packed[place : place + 4], "little")
        starts.append(int.from_bytes(packed[place + 6 : place + 8], "little", signed=True))
        chunks.append(packed[place + 8 : place + 8 + size])
        if not 0 < size == len(chunks[-1]) <= 4 * samples:
            raise ReadError("signal count", f"lead {len(chunks)} of {leads} is cut off")
        place += 8 + size
    return [
        _decode_lead(codes, start, samples)
        for codes, start in zip(_unpack_codes(chunks), starts, strict=True)
    ]


def _decode_lead(codes: np.ndarray, start: int, samples: int) -> np.ndarray:
    """Decode a lead. LZW yields the high bytes of all numbers, then their low bytes. The numbers are the first
    two samples, then the second differences."""
    planes = np.frombuffer(
        _decode_lzw(codes[: (codes == END_CODE).argmax()].tolist(), 2 * samples).encode("latin-1"),
        np.uint8,
    )
    steps = (planes[:samples].astype(np.int16) << 8 | planes[samples:]).astype(np.int64)
    second = np.concatenate((steps[:1], steps[1:2] - 2 * steps[0], [-start], 64 - steps[2:-1]))
    counts = second.cumsum().cumsum()
    if np.abs(counts).max() > 2**15:
        raise ReadError("sample data", "a sample does not fit in 16 bits: the file is damaged")
    return counts


def _unpack_codes(chunks: list[bytes]) -> np.ndarray:
    """Unpack 4 codes from every 5 bytes. Return uint16 [chunks, codes]; END_CODE follows the last code of a
    chunk."""
    width = max(map(len, chunks)) // 5 * 5 + 10
    data = (
        np.frombuffer(b"".join(chunk.ljust(width, b"\xff") for chunk in chunks), np.uint8)
        .reshape(-1, 5)
        .astype(np.uint16)
    )
    codes = [(data[:, i] << 2 * i + 2 | data[:, i + 1] >> 6 - 2 * i) & 1023 for i in range(4)]
    return np.stack(codes, axis=1).reshape(len(chunks), -1)


def _decode_lzw(codes: list[int], size: int) -> str:
    """Decompress LZW into a text with one letter for each byte. Each string that is learnt is the previous
    string plus the first letter of the next string."""
    first, strings = _SINGLE_LETTERS.copy(), _SINGLE_LETTERS.copy()
    try:
        string = strings[codes[0]]
        for code in codes[1 : MAX_LZW_STRINGS + 1]:
            first.append(string[0])
            strings.append(string + first[code])
            string = strings[code]
        text = "".join(map(strings.__getitem__, codes))
    except IndexError:
        raise ReadError("sample data", "unknown LZW code: the file is damaged") from None
    if len(text) != size:
        raise ReadError("sample count", f"{len(text) / 2:g} samples in a lead, {size // 2} stated")
    return text


def _add_limb_leads(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute III, aVR, aVL and aVF from I, II and the stored residuals."""
    derived = [name for name in LEADS[2:6] if name in stored]
    if missing := [name for name in ("I", "II", "III") if name not in stored and derived]:
        raise ReadError(
            "missing lead", f"{', '.join(derived)} cannot be computed without {', '.join(missing)}"
        )
    if not derived:
        return stored
    i, ii = stored["I"], stored["II"]
    iii = ii - i - stored["III"]
    expected = {
        "III": ii - i,
        "aVR": -((i + ii) // 2),
        "aVL": (i - iii) // 2,
        "aVF": (ii + iii) // 2,
    }
    return stored | {name: expected[name] - stored[name] for name in derived}


def _pulse_height(leads: dict[str, np.ndarray], fs_hz: float) -> int:
    """Return the height of the calibration pulse in steps; 0 if no lead has a pulse. Leads that are always 0
    were off and are ignored."""
    before, start, stop, end = (round(second * fs_hz) for second in PULSE_S)
    shape = np.repeat([0, 1, 0], [start - before, stop - start, end - stop])
    heights = {}
    for name, counts in leads.items():
        if counts.any() and len(counts) == end:
            has_pulse = bool((counts[before:] == counts[start] * shape).all())
            heights[name] = int(counts[start]) * has_pulse
    if len(set(heights.values())) > 1:
        wrong = min(heights, key=heights.__getitem__)
        raise ReadError(
            "calibration pulse",
            f"lead {wrong[:10]} has a different pulse from the other leads, or none: the file is damaged",
        )
    return max(heights.values(), default=0)


def _age(root: Element) -> float | None:
    """Return the age in years, from the largest unit that is not 0: an age of 0 years and 5 months is 5
    months."""
    age: float | None = None
    for unit, years in AGE_UNITS.items():
        with suppress(ValueError):
            age = age or float(root.findtext(f"{_PERSON_PATH}/age/{unit}", "")) * years
    return age
