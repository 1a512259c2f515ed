"""Checks for every format of hospital files: microvolts, refusals, private data in all fields, and
damaged bytes.

test_invalid_files = refuses("dicom", {"gain": [content, ...]})
test_damaged_files = withstands("dicom", content, truth)              flips, cuts, repeats and gaps
check_private(tmp_path, "dicom", content, 61.0, "F")                  SECRET and BORN in all text
"""

from typing import NamedTuple

import handmade
import numpy as np
import pytest
from handmade import crops_of, ecg, everything_in, found_in, write_files
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilead.data_tools.ecg.record import LEADS
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.sharding.finishing import read_rejects
from omnilead.data_tools.sources.hospital.base import DecodedEcg
from omnilead.data_tools.sources.hospital_files import HOSPITAL_FORMATS
from tests.tables import tabulated

SECRET = "Quijote SECRET"  # a name
BORN, BORN_ISO = "19370521", "1937-05-21"  # the age is to be no secret
SECRETS = (*SECRET.split(), BORN, BORN_ISO)
PATIENT = "4711"


def leads_uv(samples=2500):
    """Twelve leads in microvolts, whole multiples of 10, which Einthoven's equations hold for."""
    return dict(zip(LEADS, ecg(samples).astype(int), strict=True))


def decoded(kind, data):
    """Any exception but a ReadError fails the test."""
    try:
        return HOSPITAL_FORMATS[kind].decode(data.encode() if isinstance(data, str) else data)
    except ReadError as error:
        return error


def check_truth(found, truth):
    """These leads with these microvolts, and no others."""
    assert isinstance(found, DecodedEcg), found
    assert set(found.signals) == set(truth)
    for lead, uv in truth.items():
        np.testing.assert_allclose(found.signals[lead], uv, atol=1e-9)
    return found


def check_ecgdatakit(kind, path):
    """Another project reads the same microvolts."""
    kit = pytest.importorskip("ecgdatakit", reason="needs ecgdatakit, of the group test")
    found = HOSPITAL_FORMATS[kind].decode(path.read_bytes())
    theirs = {lead.label: lead for lead in kit.FileParser.parse(path, units="uV").leads}
    for lead, uv in found.signals.items():
        np.testing.assert_allclose(theirs[lead].samples[: len(uv)], uv)
        assert theirs[lead].sampling_rate == found.fs_hz


def refuses(kind, *faults):
    """A test that each content is refused with its `reason`, or `reason: beginning of a detail`."""
    cases = []
    for some in faults:
        for reason, contents in some.items():
            cases += [(content, reason) for content in contents]

    @pytest.mark.parametrize(("content", "reason"), cases, ids=[reason for _, reason in cases])
    def test(content, reason):
        found = decoded(kind, content)
        assert isinstance(found, ReadError), found
        assert found.reason == reason.partition(": ")[0]
        assert str(found).startswith(reason)

    return test


def edited(good, table):
    """Faulty files by reason. A line of the table: reason | text of the good file | in its place."""
    faults = {}
    for reason, old, new in tabulated(table):
        assert old in good, (reason, old)
        faults.setdefault(reason, []).append(good.replace(old, new))
    return faults


def check_private(place, kind, content, age=None, sex=None):
    """No byte of a dataset holds a secret of the file, nor, with a key, the patient's id or the
    file's name."""
    assert found_in(content, (SECRET, BORN)) == [SECRET, BORN]
    half = content[: len(content) // 2]  # is refused
    for name in ("plain/one", f"keyed/{SECRET}/{SECRET}"):
        write_files(place, {name: content, f"{name}.xml": half})
    plain = handmade.build(place / "plain", place / "out", plan="all")
    (((source, _), rows),) = crops_of(plain).items()
    said = (source, rows[0]["patient"], rows[0]["age"], rows[0]["sex"])
    assert said == (kind, PATIENT, age, sex)
    keyed = handmade.build(
        place / "keyed", place / "out with key", plan="all", pseudonym_key=bytes(32)
    )
    assert len(keyed) == len(plain)
    assert len(read_rejects(keyed)) == len(read_rejects(plain)) >= 1
    assert found_in(everything_in(plain), SECRETS) == []
    assert found_in(everything_in(keyed), (*SECRETS, PATIENT)) == []


class Damage(NamedTuple):
    """Damage to a file in one place."""

    how: str
    at: int
    length: int
    bit: int
    junk: bytes

    def to(self, content, spare):
        """`spare` are samples that no checksum protects."""
        size = spare.stop - spare.start
        at = self.at % (len(content) - size)
        end = at + self.length
        if at >= spare.start:
            at, end = at + size, end + size
        else:
            end = min(end, spare.start)
        part = content[at:end]
        new = {
            "flip": bytes([part[0] ^ 1 << self.bit]) + part[1:],
            "junk": (self.junk * 12)[: len(part)],
            "repeat": 2 * part,
        }
        rest = b"" if self.how == "cut" else content[end:]
        return content[:at] + new.get(self.how, b"") + rest


DAMAGE = st.builds(
    Damage,
    st.sampled_from(["flip", "junk", "repeat", "gap", "cut"]),
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(0, 7),
    st.binary(min_size=1, max_size=12),
)


def withstands(
    kind,
    content,
    truth,
    rate=b"",
    spare=slice(0, 0),
    fs_hz=500,
):
    """A test that a damaged file is refused or read correctly."""
    assert rate in content

    @given(DAMAGE)
    @settings(max_examples=100)
    def test(damage):
        check_damage(kind, damage.to(content, spare), truth, rate, fs_hz)

    return test


def check_damage(kind, data, truth, rate=b"", fs_hz=500):
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
            right = slope * x + offset
            atol = 1e-6 * max(1.0, abs(slope)) * np.abs(x).max()
            np.testing.assert_allclose(y, right, atol=atol)
