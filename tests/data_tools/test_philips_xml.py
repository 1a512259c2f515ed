"""Philips XML: right microvolts from real files and from files made here; no damaged file is read
wrongly."""

import base64
import struct
from pathlib import Path

import numpy as np
import pytest
from hospital_cases import (
    BORN_ISO,
    DAMAGE,
    SECRET,
    SHARED,
    Damage,
    check_damage,
    check_private,
    check_real,
    decoded,
    leads_uv,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.hospital.base import Decoded
from omnilead.data_tools.hospital.philips_xml import ECG_S, PULSE_S
from omnilead.data_tools.record import LEADS
from omnilead.data_tools.verify import FLAGS

KIND, RATE = "philips-xml", 250
TRUTH = leads_uv(ECG_S * RATE)
PERSON = f"""<patientid>4711</patientid><name><lastname>{SECRET}</lastname></name><sex>Female</sex>
<age defaultage="50"><dateofbirth>{BORN_ISO}</dateofbirth><months>18</months></age><race code="{SECRET}">{SECRET}</race>"""
WAVE = {
    "dataencoding": "Base64",
    "compression": "XLI",
    "numberofleads": "12",
    "leadlabels": " ".join(LEADS),
    "resolution": "5",
}
WAVE |= {
    "durationperchannel": "11000",
    "samplespersecond": f"{RATE}",
    "signaloffset": "0",
    "signalsigned": "True",
}
WAVE |= {"bitspersample": "16"}


def with_pulse(leads: dict[str, np.ndarray], height: int = 200) -> dict[str, np.ndarray]:
    """Steps of 5 uV for 11 s, as the devices store them."""
    start, stop = (round(second * RATE) for second in PULSE_S[1:3])
    tail = np.zeros(RATE)
    tail[start - ECG_S * RATE : stop - ECG_S * RATE] = height
    return {name: np.concatenate((uv / 5, tail)).astype(int) for name, uv in leads.items()}


def stored(leads: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What the file holds in place of III, aVR, aVL and aVF is how far they are from what I, II and
    III let expect."""
    i, ii, iii = (leads[name] for name in LEADS[:3])
    expected = {
        "III": ii - i,
        "aVR": -((i + ii) // 2),
        "aVL": (i - iii) // 2,
        "aVF": (ii + iii) // 2,
    }
    return [expected[name] - x if name in expected else x for name, x in leads.items()]


def chunk(x: np.ndarray) -> bytes:
    """One lead in XLI: its second differences, high bytes before low bytes, in LZW with codes of 10
    bits."""
    second = np.diff(x, 2)
    steps = np.concatenate((x[:2], 64 - second[1:], [64])).astype(np.int16).view(np.uint16)
    codes, known, word = [], {bytes([i]): i for i in range(256)}, b""
    for byte in np.concatenate((steps >> 8, steps & 255)).astype(np.uint8).tobytes():
        longer = word + bytes([byte])
        if longer not in known:
            codes.append(known[word])
            if len(known) < 1023:
                known[longer] = len(known)
            longer = longer[-1:]
        word = longer
    bits = "".join(f"{code:010b}" for code in (*codes, known[word], 1023))
    data = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8))
    return struct.pack("<IHh", len(data), 1, -second[0]) + data


def text_of(chunks: list[bytes]) -> str:
    return base64.encodebytes(b"".join(chunks)).decode()


CHUNKS = [chunk(x) for x in stored(with_pulse(TRUTH))]
SPARE = chunk(np.zeros((ECG_S + 1) * RATE, int))  # some files hold more leads than they name


def philips(
    chunks: list[bytes] = CHUNKS,
    version: str = "1.04",
    more: str = "",
    inner: str = "",
    **wave: str | None,
) -> str:
    """`wave`: attributes of the waveforms, None leaves one out; `more`: before them; `inner`: in
    the signal's description."""
    attributes = " ".join(
        f'{name}="{text}"' for name, text in (WAVE | wave).items() if text is not None
    )
    return f"""<?xml version="1.0" encoding="UTF-8"?><restingecgdata xmlns="http://www3.medical.philips.com">
<documentinfo><documentname>{SECRET}</documentname><documenttype>PhilipsECG</documenttype>
<documentversion>{version}</documentversion></documentinfo>
<userdefines><userdefine><label>{SECRET}</label><value>{SECRET}</value></userdefine></userdefines>
<dataacquisition date="{BORN_ISO}"><acquirer><operatorid>{SECRET}</operatorid></acquirer>
<signalcharacteristics><acquisitiontype>10-WIRE</acquisitiontype>{inner}</signalcharacteristics></dataacquisition>
<patient><generalpatientdata>{PERSON}</generalpatientdata></patient>
<interpretations><interpretation><statement>{SECRET}</statement></interpretation></interpretations>{more}
<waveforms><parsedwaveforms {attributes}>{text_of([*chunks, SPARE])}</parsedwaveforms>
<repbeats samplespersec="1000" resolution="1.0" dataencoding="Plain">
<repbeat leadname="I"><waveform>1 2 3</waveform></repbeat></repbeats></waveforms>
</restingecgdata>"""


def read(text: str | bytes) -> Decoded:
    found = decoded(KIND, text if isinstance(text, bytes) else text.encode())
    assert isinstance(found, Decoded), found
    return found


def check_truth(found: Decoded) -> None:
    assert list(found.signals) == list(TRUTH) and found.fs_hz == RATE
    for name, uv in TRUTH.items():
        np.testing.assert_array_equal(found.signals[name], uv)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared files")
@pytest.mark.parametrize(
    ("file", "person"),
    [
        ("philips_103_mrx.xml", ("1112010721168bdc", 50.0, "Male")),
        ("philips_104_demo.xml", ("9999", None, "Male")),
        ("philips_104_ad4d.xml", ("9999", None, "Female")),
        ("philips_10401_tc.xml", ("xxxxxx", None, "Unknown")),
        ("philips_10401_wrong_encoding.xml", (None, None, "")),
    ],
)
def test_real_files_give_the_right_microvolts(
    file: str, person: tuple[str | None, float | None, str | None]
) -> None:
    found = check_real(KIND, file)
    assert (found.patient, found.age, found.sex) == person and {
        len(uv) for uv in found.signals.values()
    } == {5000}


def test_ecgdatakit_reads_the_same_microvolts(tmp_path: Path) -> None:
    kit = pytest.importorskip("ecgdatakit", reason="needs ecgdatakit, of the group test")
    (tmp_path / "one.xml").write_text(philips(inner=f"<samplingrate>{RATE}</samplingrate>"))
    leads = {
        lead.label: lead.samples
        for lead in kit.FileParser.parse(tmp_path / "one.xml", units="uV").leads
    }
    for name, uv in TRUTH.items():
        np.testing.assert_allclose(leads[name][: ECG_S * RATE], uv)


def test_version_1_03_is_read_without_lead_names_or_resolution() -> None:
    old = {
        "compression": None,
        "compressmethod": "XLI",
        "bitspersample": None,
        "nbitspersample": "16",
        "leadlabels": None,
    }
    old |= {"numberofleads": None, "resolution": None}
    channels = "<numberchannelsallocated>12</numberchannelsallocated>"
    check_truth(read(philips(version="1.03", inner=channels, **old)))
    check_truth(
        read(
            philips(
                version="1.03", inner=f"{channels}<signalresolution>5</signalresolution>", **old
            )
        )
    )
    found = decoded(
        KIND, philips(version="1.03", inner=channels.replace("12", "8"), **old).encode()
    )
    assert isinstance(found, ReadError) and found.reason == "signal count"


def test_files_with_more_or_fewer_leads_or_no_pulse_are_read() -> None:
    fifteen = philips(
        [*CHUNKS, *CHUNKS[6:9]], leadlabels=f"{' '.join(LEADS)} V3R V4R V7", numberofleads="15"
    )
    check_truth(read(fifteen))
    seven = [name for name in LEADS if name not in ("III", "aVR", "aVL", "aVF", "V3")]
    some = read(
        philips(
            [CHUNKS[LEADS.index(name)] for name in seven],
            leadlabels=" ".join(seven),
            numberofleads="7",
        )
    )
    assert list(some.signals) == seven
    off = read(philips([*CHUNKS[:11], SPARE]))
    assert not off.signals["V6"].any() and off.signals["V5"].any()
    plain = [chunk(x) for x in stored({name: uv.astype(int) // 5 for name, uv in TRUTH.items()})]
    check_truth(ten := read(philips([*plain, SPARE], durationperchannel="10000")))
    eleven = read(philips([SPARE] * 12))
    for found, seconds in ((ten, "10 s"), (eleven, "11 s")):
        assert [(reason, detail[:4]) for reason, detail in found.warnings] == [
            ("no calibration pulse", seconds)
        ]
    assert ten.warnings[0][0] in FLAGS and not off.warnings


def test_the_medical_record_number_replaces_a_missing_patient_id() -> None:
    assert (
        read(philips().replace("<patientid>4711</patientid>", "<patientid/><MRN>12</MRN>")).patient
        == "12"
    )


YOUNG = [("<years>0</years><months>6</months>", 0.5), ("<years>0</years><months/>", 0.0)]
YOUNG += [
    ("<years>3</years><months>5</months>", 3.0),
    ("<years>0</years><months>0</months><days>7</days>", 7 / 365.25),
]


@pytest.mark.parametrize(
    ("age", "years"),
    [("<years>50</years>", 50.0), ("<days></days>", None), ("<years>?</years>", None), *YOUNG],
)
def test_ages_are_converted_to_years(age: str, years: float | None) -> None:
    assert read(philips().replace("<months>18</months>", age)).age == years


def test_only_id_age_and_sex_of_the_patient_are_copied(tmp_path: Path) -> None:
    content = (
        philips().replace(BORN_ISO, BORN_ISO.replace("-", "")).encode()
        + f"<!-- {BORN_ISO} {SECRET} -->".encode()
    )
    check_private(tmp_path, KIND, content, patient="4711", age=1.5, sex="F")


LOW = [chunk(x) for x in stored(with_pulse(TRUTH, height=100))]
MIXED = [*CHUNKS[:7], LOW[7], *CHUNKS[8:]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "malformed XML"),
        (philips()[:-40], "malformed XML"),
        ("<sapphire/>", "unknown format"),
        *(
            (philips(version=version), "format version")
            for version in ("1.02", "1.04.02", "1.045", "")
        ),
        (
            philips().replace("<parsedwaveforms", "<parsedwaveforms/><parsedwaveforms"),
            "rhythm waveform",
        ),
        (philips(compression="None"), "compression"),
        (philips(compression=None), "compression"),
        (philips(dataencoding="Plain"), "dataencoding"),
        (philips(bitspersample="12"), "bitspersample"),
        (philips(signaloffset="2048"), "signaloffset"),
        (philips(signalsigned="False"), "signalsigned"),
        (philips(samplespersecond=None), "sampling rate"),
        (philips(samplespersecond="fast"), "sampling rate"),
        (philips(inner="<samplingrate>500</samplingrate>"), "sampling rate"),
        (philips(durationperchannel="11001"), "sample count"),
        (philips(durationperchannel="10000"), "sample count"),
        (philips(durationperchannel="9e99"), "sample count"),
        (philips(durationperchannel="nan"), "sample count"),
        (philips(resolution="2.5"), "gain"),
        (philips(resolution="0"), "gain"),
        (philips(LOW), "gain"),
        (philips(MIXED), "calibration pulse"),
        (philips([SPARE] * 12, resolution=None), "gain"),
        (philips(numberofleads="8"), "signal count"),
        (philips(leadlabels="I II"), "signal count"),
        (philips(leadlabels=None, inner="<x/>").replace("10-WIRE", "FRANK"), "signal count"),
        (philips(leadlabels=" ".join(LEADS[:11]) + " i"), "duplicated lead"),
        (philips(leadlabels=" ".join(LEADS).replace("III", "V9")), "missing lead"),
        (philips(CHUNKS[:9]), "signal count"),
        (philips([*CHUNKS[:11], CHUNKS[11][:-400]]), "signal count"),
        (philips([*CHUNKS[:11], struct.pack("<IHh", 2**31, 1, 0)]), "signal count"),
        (philips([*CHUNKS[:11], struct.pack("<IHh", 5, 1, 0) + b"\xff" * 5]), "sample data"),
        (
            philips([*CHUNKS[:11], struct.pack("<IHh", 5, 1, 0) + b"\x00\x7f" * 2 + b"\xff"]),
            "sample data",
        ),
        (philips().replace("</parsedwaveforms>", "!</parsedwaveforms>"), "base64"),
    ],
    ids=lambda text: text if len(text) < 30 else "text",
)
def test_invalid_files_are_refused_with_a_reason(text: str, reason: str) -> None:
    found = decoded(KIND, text.encode())
    assert isinstance(found, ReadError) and found.reason == reason


STATED = f'samplespersecond="{RATE}"'.encode()


@given(damage=DAMAGE)
@settings(max_examples=80, deadline=None)
def test_damaged_files_are_refused_or_read_correctly(damage: Damage) -> None:
    check_damage(KIND, damage.to(philips().encode()), TRUTH, RATE, STATED)


@given(
    name=st.sampled_from(sorted(WAVE)),
    text=st.sampled_from(["", "-1", "nan", "1e308", "0x5", "5 5", "12", "II I", "500", None]),
)
def test_unusual_field_values_are_refused_or_read_correctly(name: str, text: str | None) -> None:
    check_damage(KIND, philips(**{name: text}).encode(), TRUTH, RATE, STATED)
