"""EDF: the microvolts that the header states, and no file read wrongly or beyond what is needed of
it."""

import os

import numpy as np
import pytest
from binary_ecgs import edf
from handmade import build, rejected, write_files
from hospital_cases import (
    BORN,
    SECRET,
    check_ecgdatakit,
    check_private,
    check_truth,
    decoded,
    leads_uv,
    refuses,
    withstands,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilead.data_tools.ecg.record import LEADS
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.detect import open_sources
from omnilead.data_tools.sources.hospital.edf import MAX_EDF_BYTES, decode

KIND = "edf"
X = leads_uv(5000)
I = {"I": X["I"]}  # noqa: E741
GOOD = edf(X)


def test_leads_are_found_by_their_labels_and_units_are_stated():
    named = {"ECG I": "I", "EKG II": "II", "ECG_Lead V1": "V1", "ecg avr": "aVR", "Lead V6": "V6"}
    signals = dict.fromkeys((*named, "ECG", "Event"), X["I"]) | {"V2": np.full(5000, 7)}
    signals["SpO2"] = np.arange(10)  # a rate of its own
    found = decode(edf(signals, unit="mV", scale=(-3.2767, 3.2768, -32767, 32768)))
    assert not np.ptp(found.signals.pop("V2"))
    check_truth(found, dict.fromkeys(named.values(), 0.1 * X["I"]))
    assert found[1:] == (500.0, "MCH-0234567", None, "F", ())
    scale = (1000, -1000, -32768, 32767)
    inverted = decode(edf(I, unit="\u00b5V", scale=scale, records=5, duration="2.0"))
    check_truth(inverted, {"I": 1000 - (X["I"] + 32768.0) * 2000 / 65535})


MINUS = """ECG -aVR
-ECG aVR
ECG (-aVR)
-AVR
ECG--I
Lead_-I
ECG:-V1""".splitlines()
PLUS = """ECG (aVR)
ECG-aVR
EKG - I
ECG- I
ECG-Lead V1
ECGII""".splitlines()


@pytest.mark.parametrize("label", MINUS + PLUS)
def test_the_sign_of_a_lead_is_read(label):
    minus = label in MINUS
    found = decode(edf({label: -X["I"] if minus else X["I"]}))
    (lead,) = found.signals
    assert label.upper().rstrip(")").endswith(lead.upper())
    check_truth(found, {lead: X["I"]})
    note = ("inverted lead", f"{lead}: labelled with a minus, inverted again")
    assert found.warnings == (note,) * minus


def test_ecgdatakit_reads_the_same_microvolts(tmp_path):
    content = edf(X, records=4, duration="2.5", scale=(-900, 2100, -2048, 2047))
    write_files(tmp_path, {"one.edf": content})
    check_ecgdatakit(KIND, tmp_path / "one.edf")


@pytest.mark.parametrize(
    ("patient", "kind", "known"),
    [
        ("MCH-0234567 M 02-MAY-1951 Haagse_Harry", "EDF+C", ("MCH-0234567", "M")),
        ("X X X X", "EDF+C", (None, "X")),
        ("MCH-0234567 F X X other fields", "EDF+C", ("MCH-0234567", "F")),
        # Not as EDF+ demands: no name is taken for a code
        ("Harry van der Haag", "EDF+C", (None, None)),
        ("Haag F 1951 Harry", "EDF+C", (None, None)),
        ("MCH-0234567 M 02-MAY-1951 Haagse_Harry", "", (None, None)),
    ],
)
def test_only_the_code_and_the_sex_of_a_patient(patient, kind, known):
    found = decode(edf(I, patient=patient, kind=kind))
    assert (found.patient, found.sex, found.age) == (*known, None)


def put(at, text):
    return GOOD[:at] + text + GOOD[at + len(text) :]


def scaled(*scale, unit="uV"):
    return edf(I, scale=scale, unit=unit)


test_invalid_files_are_refused_with_a_reason = refuses(
    KIND,
    {
        "unknown format": [b"", b"0,1,2,3"],
        "BDF": [put(0, b"\xffBIOSEMI")],
        "EDF+D": [edf(I, kind="EDF+D")],
        "header": [
            GOOD[:1000],
            put(184, b"x"),
            put(236, b"-1      "),
            put(252, b"0   "),
            edf(I, duration="nan"),
            edf(I, duration="1_0"),
            scaled("-1e999", 5, -32768, 32767),
            scaled("-1,5", "1,5", -32768, 32767),
        ],
        "header size": [put(252, b"9999")],
        "truncated file": [GOOD[:-1]],
        "file length": [GOOD + b"\0\0"],
        "sampling rate": [
            edf(I, duration="0"),
            edf(I, duration="1e-320"),
            edf({"I": X["I"], "II": X["II"][:2500]}),
        ],
        "duplicated lead": [edf({"I": X["I"], "ECG I": X["I"]})],
        "no known lead": [edf({"EEG Fpz-Cz": X["I"], "V7": X["I"]})],
        "unknown unit": [edf(I, unit=""), edf(I, unit="mmHg")],
        "gain": [
            scaled(5, 5, -32768, 32767),
            scaled(-5, 5, 32767, -32768),
            scaled(-100, 100, -32768, 32767, unit="V"),
        ],
    },
)


@settings(max_examples=150)
@given(st.integers(0, 13 * 32 - 1), st.sampled_from(["", "0", "-1", "3", "1e300", "I", "\xb5V"]))
def test_any_header(field, text):
    found = decoded(KIND, put(8 * field, f"{text:8}".encode("latin-1")))
    if not isinstance(found, ReadError):
        assert set(found.signals) <= set(LEADS)
        assert all(len(uv) == 5000 and np.isfinite(uv).all() for uv in found.signals.values())


test_damaged_files_are_refused_or_read_correctly = withstands(
    KIND, GOOD, X, GOOD[236:256], slice(13 * 256, len(GOOD))
)


def test_names_stay_out_of_a_dataset(tmp_path):
    secret = f"{SECRET} {BORN}"
    notes = {"EDF Annotations": np.frombuffer(f"{secret:30}".encode() * 10, "<i2"), SECRET: X["I"]}
    patient = f"4711 M 21-MAY-1937 {secret}"
    content = edf(X | notes, patient=patient, kind=f"EDF+C {secret}", free=secret)
    check_private(tmp_path, KIND, content, None, "M")


def test_a_dataset_holds_the_microvolts_and_no_holter_recording(tmp_path):
    leads = {"ECG -I": -X["I"]} | {lead: X[lead] for lead in LEADS[1:]}
    src = write_files(tmp_path / "src", {"one.edf": edf(leads), "holter.edf": b""})
    os.truncate(src / "holter.edf", MAX_EDF_BYTES * 9)
    made = build(src, tmp_path / "out", plan="all")
    assert rejected(made) == [("holter", "file too large"), ("one", "inverted lead")]
    np.testing.assert_array_equal(made.read(0), list(X.values()))
    assert verify(made, open_sources(str(src))) == []
