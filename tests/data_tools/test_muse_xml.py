"""GE MUSE XML: no file is read wrongly, and only what is needed is read."""

import base64
import zlib

import numpy as np
import pytest
from handmade import build, write_files
from hospital_cases import (
    BORN,
    BORN_ISO,
    SECRET,
    check_private,
    check_truth,
    decoded,
    edited,
    leads_uv,
    refuses,
    withstands,
)

from omnilead.data_tools.ecg.record import LEADS
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sources.base import prepare_record
from omnilead.data_tools.sources.hospital.base import DecodedEcg
from omnilead.data_tools.sources.hospital.muse_xml import _COUNT_AND_CHECKSUM_FIELDS
from omnilead.data_tools.sources.hospital_files import HospitalFiles

KIND = "muse-xml"
STORED = ("I", "II", "V1", "V2", "V3", "V4", "V5", "V6")
X = leads_uv(5000)
TRUTH = {name: X[name] for name in STORED}
PERSON = "<PatientID>4711</PatientID><PatientAge>61</PatientAge>"


def tags(fields):
    return "".join(f"<{tag}>{text}</{tag}>" for tag, text in fields.items() if text is not None)


def lead_xml(name, uv, **fields):
    """Steps of 2.5 uV; `fields`: None leaves one out."""
    data = np.rint(uv / 2.5).astype("<i2").tobytes()
    known = {
        "LeadByteCountTotal": len(data),
        "LeadTimeOffset": 0,
        "LeadSampleCountTotal": len(uv),
        "LeadAmplitudeUnitsPerBit": 2.5,
        "LeadAmplitudeUnits": "MICROVOLTS",
        "LeadID": name,
        "LeadOff": "FALSE",
        "LeadDataCRC32": zlib.crc32(data),
        "WaveFormData": base64.encodebytes(data).decode(),
    }
    return f"<LeadData>{tags(known | fields)}</LeadData>"


def waveform_xml(kind, leads, rate=500):
    fields = {"WaveformType": kind, "SampleBase": rate, "SampleExponent": 0}
    return f"<Waveform>{tags(fields)}{leads}</Waveform>"


def muse(leads=TRUTH, more="", person=PERSON, rate=500, **fields):
    """`more`: further leads; `fields`: of each lead."""
    each = "".join(lead_xml(name, uv, **fields) for name, uv in leads.items())
    text = f"<PatientDemographics>{person}<Gender>FEMALE</Gender></PatientDemographics>"
    text += waveform_xml("Median", lead_xml("I", np.arange(600)))
    text += waveform_xml("Rhythm", each + more, rate)
    head = '<?xml version="1.0" encoding="ISO-8859-1"?><!DOCTYPE RestingECG SYSTEM "restecg.dtd">'
    return f"{head}<RestingECG><MuseInfo/>{text}</RestingECG>"


def read(text):
    found = decoded(KIND, text)
    assert isinstance(found, DecodedEcg), found
    return found


def prepared_in(place, text):
    return prepare_record(HospitalFiles(folder(write_files(place, {"one.xml": text}))), "one.xml")


def test_missing_leads_are_computed(tmp_path):
    write_files(tmp_path, {"one.xml": muse(LeadAmplitudeUnitsPerBit=2.44)})
    i, ii = X["I"], X["II"]
    right = X | {"aVR": -(i + ii) / 2, "aVL": i - ii / 2, "aVF": ii - i / 2}
    steps = np.array([right[lead] for lead in LEADS]) / 2.5
    made = build(tmp_path, tmp_path / "out", plan="all")
    np.testing.assert_array_equal(made.read(0), np.rint(steps * 2.44))


def test_only_id_age_and_sex_of_the_patient_are_copied(tmp_path):
    secret = dict.fromkeys(("PatientLastName", "PatientFirstName", "Race", "VisitNumber"), SECRET)
    known = {"DateofBirth": BORN, "PatientID": 4711, "PatientAge": 93}
    text = muse(person=tags(secret | known))
    free = "".join(
        f"<{tag} a='{SECRET}'>{SECRET}<StmtText>{SECRET}</StmtText><Date>{BORN_ISO}</Date></{tag}>"
        for tag in ("Diagnosis", "OriginalDiagnosis", "TestDemographics", "Order", "PharmaData")
    )
    noted = f"<LeadNote>{SECRET}</LeadNote></LeadData>"
    text = text.replace("<MuseInfo/>", free).replace("</LeadData>", noted)
    check_private(tmp_path, KIND, f"{text}<!-- {SECRET} -->".encode(), 90.0, "F")


def test_an_age_in_months_is_converted_to_years():
    assert read(muse(person="<PatientAge>6</PatientAge><AgeUnits>MONTHS</AgeUnits>")).age == 0.5
    assert np.isnan(read(muse(person="")).age)


def test_an_internal_subset_without_entities_or_attributes_is_read():
    subset = '"restecg.dtd" [<!ELEMENT RestingECG ANY><!NOTATION jpg SYSTEM "viewer">]>'
    check_truth(read(muse().replace('"restecg.dtd">', subset)), TRUTH)


def test_lead_names_in_capitals_are_read():
    augmented = {"AVR": X["aVR"], "avl": X["aVL"], "aVF": X["aVF"]}
    check_truth(read(muse(TRUTH | augmented)), {name: X[name] for name in LEADS if name != "III"})
    assert str(decoded(KIND, muse({"V1": X["I"], "v1": X["I"]}))) == "duplicated lead: V1"


def test_leads_that_were_off_are_missing(tmp_path):
    gap = np.where(np.arange(5000) == 7, -32768 * 2.5, 5)
    kept = {name: uv for name, uv in TRUTH.items() if name not in ("II", "V6")}
    text = muse(kept, lead_xml("II", X["II"], LeadOff="TRUE") + lead_xml("V6", gap))
    check_truth(read(text), kept)
    crop = prepared_in(tmp_path, text).crops_uv[0]
    assert crop[0].any()
    assert not crop[1:6].any()


@pytest.mark.parametrize(
    ("declared", "written"),
    [
        ("ISO-8859-1", "latin-1"),
        ("UTF-8", "utf-8-sig"),
        ("UTF-16", "utf-16"),
        ("UTF-16", "utf-16-le"),  # without a byte order mark
        ("UTF-16", "utf-8"),
        ("UTF-16", "utf-8-sig"),
        ("windows-1252", "cp1252"),
    ],
)
def test_all_encodings_are_read(tmp_path, declared, written):
    text = muse(person="<PatientLastName>Müller</PatientLastName><PatientID>4711</PatientID>")
    write_files(tmp_path, {"one.xml": text.replace("ISO-8859-1", declared).encode(written)})
    record = HospitalFiles(folder(tmp_path)).read("one.xml")
    assert (record.patient, len(record.leads)) == ("4711", 12)


def test_other_leads_are_ignored_and_a_missing_lead_is_not_computed_from(tmp_path):
    right = {"V3R": X["V1"], "V4R": X["V2"], "V7": X["V3"]}  # 15 leads with the computed ones
    fifteen = prepared_in(tmp_path, muse(TRUTH | right))
    twelve = prepared_in(tmp_path, muse())
    np.testing.assert_array_equal(fifteen.crops_uv, twelve.crops_uv)
    prepared_in(tmp_path, muse({name: X[name] for name in STORED if name != "II"}))
    leads = HospitalFiles(folder(tmp_path)).read("one.xml").leads
    assert set(leads) == {*STORED} - {"II"}


test_edited_files_are_refused_with_a_reason = refuses(
    KIND,
    edited(
        muse(),
        """
unknown format         | RestingECG                  | sapphire
rhythm waveform        | Rhythm                      | Other
rhythm waveform        | Median                      | Rhythm
SampleExponent         | SampleExponent>0            | SampleExponent>-1
duplicated lead        | LeadID>V1                   | LeadID>v2
LeadAmplitudeUnits     | MICROVOLTS                  | MILLIVOLTS
unknown unit           | LeadAmplitudeUnits>         | Other>
gain                   | LeadAmplitudeUnitsPerBit>2  | LeadAmplitudeUnitsPerBit>-2
gain                   | LeadAmplitudeUnitsPerBit>2  | LeadAmplitudeUnitsPerBit>nan
LeadByteCountTotal     | LeadByteCountTotal>1        | LeadByteCountTotal>2
LeadSampleCountTotal   | LeadSampleCountTotal>5      | LeadSampleCountTotal>4
LeadDataCRC32          | LeadDataCRC32>              | LeadDataCRC32>1
LeadTimeOffset         | LeadTimeOffset>0            | LeadTimeOffset>4
base64                 | WaveFormData>               | WaveFormData>A!
""",
    ),
    {
        "signal count": [muse({}, "<LeadData/>" * 99)],
        "no valid lead: the file states LeadOff for all 8 leads": [muse(LeadOff="TRUE")],
        "sample count": [muse(WaveFormData="AAAA", **dict.fromkeys(_COUNT_AND_CHECKSUM_FIELDS))],
    },
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (muse({"I": X["I"], "II": X["II"][:4000]}), "sample count"),
        (muse(rate=""), "sampling rate"),
    ],
)
def test_files_that_can_be_decoded_are_refused(tmp_path, text, reason):
    found = prepared_in(tmp_path, text)
    assert isinstance(found, ReadError)
    assert found.reason == reason


SHORT = {name: uv[:500] for name, uv in TRUTH.items()}
RATE = b"<WaveformType>Rhythm</WaveformType><SampleBase>500</SampleBase>"
test_damaged_files_are_refused_or_read_correctly = withstands(
    KIND, muse(SHORT).encode(), SHORT, RATE
)
