"""Checks for every format of hospital files: private data in all fields, and damaged bytes.

check_private(tmp_path, "dicom", content, patient="4711")     the content has SECRET and BORN in every field that holds text
@given(DAMAGE)                                                flips, cuts, repeats and gaps
def test_damaged_bytes(damage): check_damage("dicom", damage.to(content), truth, 500)     truth: microvolts by lead
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from handmade import build, crops_of, everything_in
from hypothesis import strategies as st

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.hospital.base import Decoded
from omnilead.data_tools.hospital.files import FORMATS

SHARED = Path(__file__).parents[3] / "shared" / "formats"
SECRET, BORN, BORN_ISO = (
    "Quijote SECRET",
    "19370521",
    "1937-05-21",
)  # a name, a birth date; the age is to be no secret
SECRETS = (*SECRET.split(), BORN, BORN_ISO)


def leads_uv(samples: int = 2500, seed: int = 0, step: float = 5.0) -> dict[str, np.ndarray]:
    """Twelve leads in microvolts, whole multiples of `step`, which Einthoven's equations hold
    for."""
    draw = np.random.default_rng(seed)
    i, ii = (2 * draw.integers(-40, 40, samples) for _ in range(2))
    limb = {
        "I": i,
        "II": ii,
        "III": ii - i,
        "aVR": -(i + ii) // 2,
        "aVL": i - ii // 2,
        "aVF": ii - i // 2,
    }
    return {
        lead: step * x
        for lead, x in (
            limb | {f"V{n}": draw.integers(-80, 80, samples) for n in range(1, 7)}
        ).items()
    }


def decoded(kind: str, data: bytes) -> Decoded | ReadError:
    """Any exception but a ReadError fails the test."""
    try:
        return FORMATS[kind].decode(data)
    except ReadError as error:
        return error


def check_real(kind: str, file: str) -> Decoded:
    """A shared file against the microvolts that independent decoders found in it."""
    content, right = (SHARED / file).read_bytes(), np.load(SHARED / f"{file}.npz")
    assert [name for name, one in FORMATS.items() if one.looks_like(content[:4096], file)] == [kind]
    found = FORMATS[kind].decode(content)
    assert found.fs_hz == right["fs_hz"]
    truth = dict(zip(right["leads"].tolist(), right["signal_uv"], strict=True))
    for lead, uv in found.signals.items():
        np.testing.assert_allclose(uv, truth[lead][: len(uv)], atol=1e-3)
    return found


def check_private(
    place: Path,
    kind: str,
    content: bytes,
    patient: str,
    age: float | None = None,
    sex: str | None = None,
) -> None:
    """No byte of a dataset holds a secret of the file, nor, with a key, the patient's id or the
    file's name."""
    assert all(
        word.encode() in content or word.encode("utf-16-le") in content for word in (SECRET, BORN)
    )
    for name in ("plain/one", f"keyed/{SECRET}/{SECRET}"):
        (place / name).parent.mkdir(parents=True)
        (place / name).write_bytes(content)
        (place / f"{name}.xml").write_bytes(content[: len(content) // 2])  # is refused
    plain = build(place / "plain", place / "out", plan="all")
    (((source, _), rows),) = crops_of(plain).items()
    assert (source, rows[0]["patient"], rows[0]["age"], rows[0]["sex"]) == (kind, patient, age, sex)
    keyed = build(place / "keyed", place / "out with key", plan="all", pseudonym_key=bytes(32))
    assert len(keyed) == len(plain) and len(keyed.rejects()) == len(plain.rejects()) >= 1
    _check_absent(plain, SECRETS)
    _check_absent(keyed, (*SECRETS, patient))


def _check_absent(dataset: Dataset, words: tuple[str, ...]) -> None:
    everything = everything_in(dataset)
    assert [
        word
        for word in words
        if word.encode() in everything or word.encode("utf-16-le") in everything
    ] == []


class Damage(NamedTuple):
    """Damage to a file in one place."""

    how: str
    at: int
    length: int
    bit: int
    junk: bytes

    def to(self, content: bytes, spare: slice = slice(0, 0)) -> bytes:
        """`spare` are samples that no checksum protects."""
        at = self.at % (len(content) - (spare.stop - spare.start))
        end = at + self.length if at >= spare.start else min(at + self.length, spare.start)
        if at >= spare.start:
            at, end = at + spare.stop - spare.start, end + spare.stop - spare.start
        part = content[at:end]
        flipped = bytes([part[0] ^ 1 << self.bit]) + part[1:]
        new = {
            "flip": flipped,
            "junk": (self.junk * 12)[: len(part)],
            "repeat": 2 * part,
            "gap": b"",
            "cut": b"",
        }[self.how]
        return content[:at] + new + (b"" if self.how == "cut" else content[end:])


HOW = st.sampled_from(["flip", "junk", "repeat", "gap", "cut"])
DAMAGE = st.builds(
    Damage,
    HOW,
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(0, 7),
    st.binary(min_size=1, max_size=12),
)


def check_damage(
    kind: str, data: bytes, truth: Mapping[str, np.ndarray], fs_hz: float, rate: bytes = b""
) -> None:
    """Refused, or every lead that is read is right up to scale and offset: damage may turn a
    gain into another valid one. The sampling rate is right, too, unless the damage is in `rate`,
    the bytes that state it."""
    found = decoded(kind, data)
    if isinstance(found, ReadError):
        return
    assert found.fs_hz == fs_hz or rate not in data
    for lead, uv in found.signals.items():
        if lead in truth and not found.warnings:
            measured = np.isfinite(uv)
            assert len(uv) == len(truth[lead])
            x, y = truth[lead][measured], uv[measured]
            slope, offset = np.polyfit(x, y, 1)
            np.testing.assert_allclose(
                y, slope * x + offset, atol=1e-6 * max(1.0, abs(slope)) * np.abs(x).max()
            )
