"""Philips XML: right microvolts from files made here; no damaged file is read wrongly."""

import base64
import struct

import numpy as np
import pytest
from hospital_cases import (
    BORN_ISO,
    SECRET,
    check_damage,
    check_ecgdatakit,
    check_private,
    check_truth,
    decoded,
    edited,
    leads_uv,
    refuses,
    withstands,
)
from hypothesis import given
from hypothesis import strategies as st

from omnilead.data_tools.ecg.record import LEADS
from omnilead.data_tools.sharding.verify import FLAG_REASONS
from omnilead.data_tools.sources.hospital.base import DecodedEcg
from omnilead.data_tools.sources.hospital.philips_xml import ECG_S, PULSE_S

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
    "durationperchannel": "11000",
    "samplespersecond": "250",
    "signaloffset": "0",
    "signalsigned": "True",
    "bitspersample": "16",
}


def stored(height=200):
    """Steps of 5 uV for 11 s, with a pulse at the end. What the file holds in place of III, aVR,
    aVL and aVF is how far they are from what I, II and III let expect."""
    start, stop = (round((second - ECG_S) * RATE) for second in PULSE_S[1:3])
    tail = np.zeros(RATE)
    tail[start:stop] = height
    leads = {name: np.concatenate((uv / 5, tail)).astype(int) for name, uv in TRUTH.items()}
    i, ii, iii = (leads[name] for name in LEADS[:3])
    expected = {
        "III": ii - i,
        "aVR": -((i + ii) // 2),
        "aVL": (i - iii) // 2,
        "aVF": (ii + iii) // 2,
    }
    return [expected[name] - x if name in expected else x for name, x in leads.items()]


def chunk(x):
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
    bits += "0" * (-len(bits) % 8)
    data = int(bits, 2).to_bytes(len(bits) // 8)
    return struct.pack("<IHh", len(data), 1, -second[0]) + data


CHUNKS = [chunk(x) for x in stored()]
SPARE = chunk(np.zeros((ECG_S + 1) * RATE, int))  # some files hold more leads than they name


def philips(chunks=CHUNKS, version="1.04", inner="", **wave):
    """`wave`: attributes of the waveforms, None leaves one out; `inner`: in the signal's
    description."""
    fields = (WAVE | wave).items()
    attributes = " ".join(f'{name}="{text}"' for name, text in fields if text is not None)
    data = base64.encodebytes(b"".join([*chunks, SPARE])).decode()
    return f"""<?xml version="1.0" encoding="UTF-8"?><restingecgdata xmlns="http://www3.medical.philips.com">
<documentinfo><documentname>{SECRET}</documentname><documenttype>PhilipsECG</documenttype>
<documentversion>{version}</documentversion></documentinfo>
<userdefines><userdefine><label>{SECRET}</label><value>{SECRET}</value></userdefine></userdefines>
<dataacquisition date="{BORN_ISO}"><acquirer><operatorid>{SECRET}</operatorid></acquirer>
<signalcharacteristics><acquisitiontype>10-WIRE</acquisitiontype>{inner}</signalcharacteristics></dataacquisition>
<patient><generalpatientdata>{PERSON}</generalpatientdata></patient>
<interpretations><interpretation><statement>{SECRET}</statement></interpretation></interpretations>
<waveforms><parsedwaveforms {attributes}>{data}</parsedwaveforms>
<repbeats samplespersec="1000" resolution="1.0" dataencoding="Plain">
<repbeat leadname="I"><waveform>1 2 3</waveform></repbeat></repbeats></waveforms>
</restingecgdata>"""


GOOD = philips()


def read(chunks=CHUNKS, **wave):
    found = decoded(KIND, philips(chunks, **wave))
    assert isinstance(found, DecodedEcg), found
    assert found.fs_hz == RATE
    return found


def test_ecgdatakit_reads_the_same_microvolts(tmp_path):
    (tmp_path / "one.xml").write_text(philips(inner=f"<samplingrate>{RATE}</samplingrate>"))
    check_ecgdatakit(KIND, tmp_path / "one.xml")


OLD = dict.fromkeys(("compression", "bitspersample", "leadlabels", "numberofleads", "resolution"))
OLD |= {"version": "1.03", "compressmethod": "XLI", "nbitspersample": "16"}
CHANNELS = "<numberchannelsallocated>12</numberchannelsallocated>"


@pytest.mark.parametrize("resolution", ["", "<signalresolution>5</signalresolution>"])
def test_version_1_03_is_read_without_lead_names_or_resolution(resolution):
    check_truth(read(inner=CHANNELS + resolution, **OLD), TRUTH)


def test_files_with_more_or_fewer_leads_or_no_pulse_are_read():
    labels = f"{WAVE['leadlabels']} V3R V4R V7"
    check_truth(read([*CHUNKS, *CHUNKS[6:9]], leadlabels=labels, numberofleads="15"), TRUTH)
    seven = [name for name in LEADS if name not in ("III", "aVR", "aVL", "aVF", "V3")]
    chunks = [CHUNKS[LEADS.index(name)] for name in seven]
    some = read(chunks, leadlabels=" ".join(seven), numberofleads="7")
    check_truth(some, {name: TRUTH[name] for name in seven})
    off = read([*CHUNKS[:11], SPARE])
    check_truth(off, TRUTH | {"V6": 0 * TRUTH["V6"]})
    assert not off.warnings
    ten = read([*(chunk(x[: ECG_S * RATE]) for x in stored()), SPARE], durationperchannel="10000")
    check_truth(ten, TRUTH)
    for found, seconds in ((ten, "10 s"), (read([SPARE] * 12), "11 s")):
        ((reason, detail),) = found.warnings
        assert reason == "no calibration pulse"
        assert reason in FLAG_REASONS
        assert detail.startswith(seconds)


@pytest.mark.parametrize(
    ("old", "new", "patient", "years"),
    [
        ("<patientid>4711</patientid>", "<patientid/><MRN>12</MRN>", "12", 1.5),
        ("<months>18</months>", "<years>50</years>", "4711", 50.0),
        ("<months>18</months>", "<days></days>", "4711", None),
        ("<months>18</months>", "<years>?</years>", "4711", None),
        ("<months>18", "<years>0</years><months>6", "4711", 0.5),
        ("<months>18", "<years>0</years><months>", "4711", 0.0),
        ("<months>18", "<years>3</years><months>5", "4711", 3.0),
        ("<months>18", "<years>0</years><days>7</days><months>0", "4711", 7 / 365.25),
    ],
)
def test_patients_and_ages(old, new, patient, years):
    found = decoded(KIND, GOOD.replace(old, new))
    assert isinstance(found, DecodedEcg)
    assert (found.patient, found.age) == (patient, years)


def test_only_id_age_and_sex_of_the_patient_are_copied(tmp_path):
    text = GOOD.replace(BORN_ISO, BORN_ISO.replace("-", "")) + f"<!-- {BORN_ISO} {SECRET} -->"
    check_private(tmp_path, KIND, text.encode(), age=1.5, sex="F")


LOW = [chunk(x) for x in stored(height=100)]


def last(data, size=None):
    """`data` in place of the last lead."""
    size = len(data) if size is None else size
    return philips([*CHUNKS[:11], struct.pack("<IHh", size, 1, 0) + data])


test_edited_files_are_refused_with_a_reason = refuses(
    KIND,
    edited(
        GOOD,
        """
unknown format    | restingecgdata               | sapphire
format version    | 1.04<                        | 1.02<
format version    | 1.04<                        | 1.04.02<
format version    | 1.04<                        | 1.045<
format version    | 1.04<                        | <
rhythm waveform   | <parsedwaveforms             | <parsedwaveforms/><parsedwaveforms
compression       | compression="XLI"            | compression="None"
compression       | compression="XLI"            | x="XLI"
dataencoding      | dataencoding="Base64"        | dataencoding="Plain"
bitspersample     | bitspersample="16"           | bitspersample="12"
signaloffset      | signaloffset="0"             | signaloffset="2048"
signalsigned      | signalsigned="True"          | signalsigned="False"
sampling rate     | samplespersecond="250"       | x="250"
sampling rate     | samplespersecond="250"       | samplespersecond="fast"
sampling rate     | <acquisitiontype>            | <samplingrate>500</samplingrate><acquisitiontype>
sample count      | durationperchannel="11000"   | durationperchannel="11001"
sample count      | durationperchannel="11000"   | durationperchannel="10000"
sample count      | durationperchannel="11000"   | durationperchannel="9e99"
sample count      | durationperchannel="11000"   | durationperchannel="nan"
gain              | resolution="5"               | resolution="2.5"
gain              | resolution="5"               | resolution="0"
signal count      | numberofleads="12"           | numberofleads="8"
signal count      | leadlabels="I II III         | leadlabels="I II
duplicated lead   | V5 V6"                       | V5 i"
missing lead      | I II III                     | I II V9
base64            | </parsedwaveforms>           | !</parsedwaveforms>
""",
    ),
)
test_invalid_chunks_are_refused_with_a_reason = refuses(
    KIND,
    {
        "gain": [philips(LOW), philips([SPARE] * 12, resolution=None)],
        "calibration pulse": [philips([*CHUNKS[:7], LOW[7], *CHUNKS[8:]])],
        "signal count": [
            philips(inner=CHANNELS.replace("12", "8"), **OLD),
            philips(leadlabels=None, inner="<x/>").replace("10-WIRE", "FRANK"),
            philips(CHUNKS[:9]),
            philips([*CHUNKS[:11], CHUNKS[11][:-400]]),
            last(b"", 2**31),
        ],
        "sample data": [last(b"\xff" * 5), last(b"\x00\x7f" * 2 + b"\xff")],
    },
)
STATED = f'samplespersecond="{RATE}"'.encode()
test_damaged_files_are_refused_or_read_correctly = withstands(
    KIND, GOOD.encode(), TRUTH, STATED, fs_hz=RATE
)


@given(
    name=st.sampled_from(sorted(WAVE)),
    text=st.sampled_from(["", "-1", "nan", "1e308", "0x5", "5 5", "12", "II I", "500", None]),
)
def test_unusual_field_values_are_refused_or_read_correctly(name, text):
    check_damage(KIND, philips(**{name: text}).encode(), TRUTH, STATED, RATE)
