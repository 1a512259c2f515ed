"""GE MUSE XML: right microvolts from real files; no file is read wrongly, and only what is needed
is read."""

import base64
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import build, rejected
from hospital_cases import (
    BORN,
    BORN_ISO,
    DAMAGE,
    SECRET,
    SHARED,
    Damage,
    check_damage,
    check_private,
)
from hypothesis import given, settings

from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.hospital.files import HospitalFiles
from omnilead.data_tools.hospital.muse_xml import _COUNTS
from omnilead.data_tools.record import LEADS
from omnilead.data_tools.sources.base import Prepared, prepared, read_safely
from omnilead.data_tools.storage import folder

STORED = ("I", "II", "V1", "V2", "V3", "V4", "V5", "V6")


def lead_xml(name: str, steps: np.ndarray, **fields: object) -> str:
    data = steps.astype("<i2").tobytes()
    known: dict[str, object] = {
        "LeadByteCountTotal": len(data),
        "LeadTimeOffset": 0,
        "LeadSampleCountTotal": len(steps),
    }
    known |= {
        "LeadAmplitudeUnitsPerBit": 4.88,
        "LeadAmplitudeUnits": "MICROVOLTS",
        "LeadID": name,
        "LeadOff": "FALSE",
    }
    known |= {
        "LeadDataCRC32": zlib.crc32(data),
        "WaveFormData": base64.encodebytes(data).decode(),
    } | fields
    return (
        "<LeadData>"
        + "".join(f"<{tag}>{text}</{tag}>" for tag, text in known.items() if text is not None)
        + "</LeadData>"
    )


def waveform_xml(kind: str, leads: str, rate: object = 500, exponent: object = 0) -> str:
    fields = f"<WaveformType>{kind}</WaveformType><SampleBase>{rate}</SampleBase><SampleExponent>{exponent}</SampleExponent>"
    return f"<Waveform>{fields}{leads}</Waveform>"


def steps(samples: int = 5000) -> dict[str, np.ndarray]:
    return {
        name: np.random.default_rng(i).integers(-200, 200, samples) for i, name in enumerate(STORED)
    }


def muse(
    leads: str = "",
    rhythm: str = "",
    person: str = "<PatientID>4711</PatientID><PatientAge>61</PatientAge>",
) -> str:
    leads = leads or "".join(lead_xml(name, one) for name, one in steps().items())
    median = waveform_xml("Median", lead_xml("I", np.arange(600)))
    text = f"<PatientDemographics>{person}<Gender>FEMALE</Gender></PatientDemographics>{median}"
    text += rhythm or waveform_xml("Rhythm", leads)
    doctype = (
        '<?xml version="1.0" encoding="ISO-8859-1"?><!DOCTYPE RestingECG SYSTEM "restecg.dtd">'
    )
    return f"{doctype}<RestingECG><MuseInfo/>{text}</RestingECG>"


def read(place: Path, text: str | bytes) -> Any:
    (place / "one.xml").write_bytes(text if isinstance(text, bytes) else text.encode("latin-1"))
    return read_safely(HospitalFiles(folder(place)).read, "one.xml")


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared files")
def test_real_files_give_the_right_microvolts(tmp_path: Path) -> None:
    for name in ("muse_example1", "muse_example2", "muse_example4"):
        shutil.copy(SHARED / f"{name}.xml", tmp_path)
        right = np.load(SHARED / f"{name}.xml.npz")
        record = HospitalFiles(folder(tmp_path)).read(f"{name}.xml")
        assert (record.fs_hz, record.patient, record.unit) == (500.0, None, "uV")
        order = [record.leads.index(str(lead)) for lead in right["leads"]]
        np.testing.assert_allclose(record.signal[order], right["signal_uv"], atol=1e-3)


def test_a_folder_becomes_a_dataset(tmp_path: Path) -> None:
    for name in ("a/one.xml", "b/one.XML"):
        (tmp_path / "src" / name).parent.mkdir(parents=True)
        (tmp_path / "src" / name).write_text(muse())
    (tmp_path / "src" / "other.xml").write_text("<sapphire/>")
    made = build(tmp_path / "src", tmp_path / "out", plan="all")
    assert rejected(made) == [("other", "unknown format")]
    assert sorted(made.column("record")) == ["a_one", "b_one"]
    row = made.table().slice(0, 1).to_pylist()[0]
    assert (row["source"], row["patient"], row["age"], row["sex"]) == (
        "muse-xml",
        "4711",
        61.0,
        "F",
    )
    i, ii, *_ = steps().values()
    twelve = dict(zip(LEADS, made.read(0), strict=True))
    np.testing.assert_array_equal(twelve["I"], np.rint(i * 4.88))
    np.testing.assert_array_equal(twelve["aVF"], np.rint((ii - i / 2) * 4.88))
    np.testing.assert_array_equal(twelve["V6"], np.rint(steps()["V6"] * 4.88))


def test_only_id_age_and_sex_of_the_patient_are_copied(tmp_path: Path) -> None:
    tags = ("PatientLastName", "PatientFirstName", "Race", "PatientMiddleName", "VisitNumber")
    person = (
        "".join(f"<{tag}>{SECRET}</{tag}>" for tag in tags) + f"<DateofBirth>{BORN}</DateofBirth>"
    )
    text = muse(person=f"{person}<PatientID>4711</PatientID><PatientAge>93</PatientAge>")
    others = (
        "Diagnosis",
        "OriginalDiagnosis",
        "TestDemographics",
        "Order",
        "RestingECGMeasurements",
        "PharmaData",
    )
    free = "".join(
        f"<{tag} a='{SECRET}'>{SECRET}<StmtText>{SECRET}</StmtText><Date>{BORN_ISO}</Date></{tag}>"
        for tag in others
    )
    text = text.replace("<MuseInfo/>", free).replace(
        "</LeadData>", f"<LeadNote>{SECRET}</LeadNote></LeadData>"
    )
    check_private(tmp_path, "muse-xml", f"{text}<!-- {SECRET} -->".encode(), "4711", 90.0, "F")


@pytest.mark.parametrize(
    ("person", "age"), [("<PatientAge>6</PatientAge><AgeUnits>MONTHS</AgeUnits>", 0.5), ("", None)]
)
def test_ages_are_converted_to_years(tmp_path: Path, person: str, age: float | None) -> None:
    assert read(tmp_path, muse(person=person)).age == age


def test_an_internal_subset_without_entities_or_attributes_is_read(tmp_path: Path) -> None:
    subset = '"restecg.dtd" [<!ELEMENT RestingECG ANY><!NOTATION jpg SYSTEM "viewer">]>'
    assert len(read(tmp_path, muse().replace('"restecg.dtd">', subset)).leads) == 12


def test_lead_names_in_capitals_are_read(tmp_path: Path) -> None:
    augmented = {"AVR": steps()["V1"], "avl": steps()["V2"], "aVF": steps()["V3"]}
    record = read(
        tmp_path, muse("".join(lead_xml(name, one) for name, one in (steps() | augmented).items()))
    )
    assert set(record.leads) == set(LEADS)
    np.testing.assert_array_equal(record.signal[record.leads.index("aVR")], steps()["V1"] * 4.88)
    twice = read(tmp_path, muse("".join(lead_xml(name, steps()["I"]) for name in ("V1", "v1"))))
    assert str(twice) == "duplicated lead: V1"


def test_a_file_whose_leads_were_all_off_is_refused_with_what_it_states(tmp_path: Path) -> None:
    refused = read(
        tmp_path,
        muse("".join(lead_xml(name, one, LeadOff="TRUE") for name, one in steps().items())),
    )
    assert str(refused) == "no valid lead: the file states LeadOff for all 8 leads"


def test_leads_that_were_off_are_missing(tmp_path: Path) -> None:
    leads = [
        lead_xml(name, one, LeadOff="TRUE" if name == "II" else "FALSE")
        for name, one in steps().items()
    ]
    leads[-1] = lead_xml("V6", np.where(np.arange(5000) == 7, -32768, 5))
    assert set(read(tmp_path, muse("".join(leads))).leads) == {"I", "V1", "V2", "V3", "V4", "V5"}
    ready = prepared(HospitalFiles(folder(tmp_path)), "one.xml")
    assert (
        not isinstance(ready, ReadError)
        and not ready.crops_uv[0, 1:6].any()
        and ready.crops_uv[0, 0].any()
    )


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
def test_all_encodings_are_read(tmp_path: Path, declared: str, written: str) -> None:
    text = muse(person="<PatientLastName>Müller</PatientLastName><PatientID>4711</PatientID>")
    record = read(tmp_path, text.replace("ISO-8859-1", declared).encode(written))
    assert (record.patient, len(record.leads)) == ("4711", 12)


def test_other_leads_are_ignored_and_a_missing_lead_is_not_computed_from(tmp_path: Path) -> None:
    more = {
        **steps(),
        "V3R": steps()["V1"],
        "V4R": steps()["V2"],
        "V7": steps()["V3"],
    }  # 15 leads with the computed ones
    read(tmp_path, muse("".join(lead_xml(name, one) for name, one in more.items())))
    fifteen = prepared(HospitalFiles(folder(tmp_path)), "one.xml")
    read(tmp_path, muse())
    twelve = prepared(HospitalFiles(folder(tmp_path)), "one.xml")
    assert isinstance(fifteen, Prepared) and isinstance(twelve, Prepared)
    np.testing.assert_array_equal(fifteen.crops_uv, twelve.crops_uv)
    seven = {name: one for name, one in steps().items() if name != "II"}
    assert set(
        read(tmp_path, muse("".join(lead_xml(name, one) for name, one in seven.items()))).leads
    ) == set(seven)


def all_leads(**fields: object) -> str:
    return muse("".join(lead_xml(name, one, **fields) for name, one in steps().items()))


ENTITY = '<!DOCTYPE RestingECG [<!ENTITY a "aaaa">]><RestingECG>&a;</RestingECG>'
DEFAULTS = '<!DOCTYPE RestingECG [<!ATTLIST LeadData a CDATA "aaaa">]><RestingECG/>'
EXTERNAL = '<!DOCTYPE RestingECG SYSTEM "restecg.dtd"><RestingECG><PatientDemographics>&a;</PatientDemographics></RestingECG>'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "unknown format"),
        (muse()[:-500], "malformed XML"),
        ('<?xml version="1.0" encoding="no-such"?><RestingECG/>', "malformed XML"),
        ("<sapphire/>", "unknown format"),
        (ENTITY, "XML entity"),
        (DEFAULTS, "XML entity"),
        (EXTERNAL, "XML entity"),
        ("<RestingECG>" + "<a>" * 40, "XML too deep"),
        ("<RestingECG>" + "<a/>" * 20_000, "XML too large"),
        (muse("<LeadData/>" * 99), "signal count"),
        ("<RestingECG/>", "rhythm waveform"),
        (muse(rhythm="<Waveform/>"), "rhythm waveform"),
        (
            muse(rhythm=2 * waveform_xml("Rhythm", lead_xml("I", np.arange(5000)))),
            "rhythm waveform",
        ),
        (
            muse(rhythm=waveform_xml("Rhythm", lead_xml("I", np.arange(5000)), exponent=-1)),
            "SampleExponent",
        ),
        (muse(2 * lead_xml("I", np.arange(5000))), "duplicated lead"),
        (muse(lead_xml("I", np.arange(5000)) + lead_xml("II", np.arange(4000))), "sample count"),
        (muse(lead_xml("I", np.arange(5000), LeadOff="TRUE")), "no valid lead"),
        (all_leads(LeadAmplitudeUnits="MILLIVOLTS"), "LeadAmplitudeUnits"),
        (all_leads(LeadAmplitudeUnits=None), "unknown unit"),
        (all_leads(LeadAmplitudeUnitsPerBit="0"), "gain"),
        (all_leads(LeadAmplitudeUnitsPerBit="nan"), "gain"),
        (all_leads(LeadSampleCountTotal=4999), "LeadSampleCountTotal"),
        (all_leads(LeadDataCRC32=1), "LeadDataCRC32"),
        (all_leads(LeadTimeOffset=4), "LeadTimeOffset"),
        (all_leads(WaveFormData="AAAA!AAA"), "base64"),
        (all_leads(WaveFormData="AAAA", **dict.fromkeys(_COUNTS)), "sample count"),
    ],
)
def test_invalid_files_are_refused_with_a_reason(tmp_path: Path, text: str, reason: str) -> None:
    found = read(tmp_path, text)
    assert isinstance(found, ReadError) and found.reason == reason


def test_an_empty_sampling_rate_is_refused(tmp_path: Path) -> None:
    read(tmp_path, muse(rhythm=waveform_xml("Rhythm", lead_xml("I", np.arange(5000)), rate="")))
    found = prepared(HospitalFiles(folder(tmp_path)), "one.xml")
    assert isinstance(found, ReadError) and found.reason == "sampling rate"


SHORT = steps(500)
SMALL = muse("".join(lead_xml(name, one) for name, one in SHORT.items())).encode()
RATE = b"<WaveformType>Rhythm</WaveformType><SampleBase>500</SampleBase>"


@given(damage=DAMAGE)
@settings(max_examples=100, deadline=None)
def test_damaged_files_are_refused_or_read_correctly(damage: Damage) -> None:
    assert RATE in SMALL
    check_damage("muse-xml", damage.to(SMALL), SHORT, 500, RATE)
