"""EDF: the microvolts that the header states, and no file read wrongly or beyond what is needed of
it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from binary_ecgs import edf
from handmade import build, ecg, rejected
from hospital_cases import (
    BORN,
    DAMAGE,
    SECRET,
    SHARED,
    Damage,
    check_damage,
    check_private,
    check_real,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.hospital.edf import MAX_BYTES, decode
from omnilead.data_tools.hospital.files import HospitalFiles
from omnilead.data_tools.record import LEADS
from omnilead.data_tools.sources import open_sources
from omnilead.data_tools.storage import folder
from omnilead.data_tools.verify import verify

X = dict(zip(LEADS, ecg(), strict=True))
I = {"I": X["I"]}  # noqa: E741
GOOD = edf(X)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared files")
def test_a_real_file_states_a_wrong_scale() -> None:
    found = check_real("edf", "edf_contec.edf")
    noted = HospitalFiles(folder(SHARED)).read("edf_contec.edf").warnings
    assert [reason for reason, _ in noted] == ["implausible amplitude"]
    assert (found.patient, [lead for lead, uv in found.signals.items() if np.ptp(uv)]) == (
        None,
        list(LEADS[:6]),
    )


def test_leads_are_found_by_their_labels_and_units_are_stated() -> None:
    named = ("ECG I", "EKG II", "ECG_Lead V1", "ecg avr", "Lead V6", "V2", "SpO2", "ECG", "Event")
    signals = dict.fromkeys(named, X["I"]) | {
        "V2": np.full(5000, 7),
        "SpO2": np.arange(10),
    }  # a rate of its own
    found = decode(edf(signals, unit="mV", scale=(-3.2767, 3.2768, -32767, 32768)))
    assert not np.ptp(found.signals.pop("V2")) and list(found.signals) == [
        "I",
        "II",
        "V1",
        "aVR",
        "V6",
    ]
    assert (found.fs_hz, found.patient, found.sex, found.warnings) == (
        500.0,
        "MCH-0234567",
        "F",
        (),
    )
    for uv in found.signals.values():
        np.testing.assert_allclose(uv, 0.1 * X["I"], atol=1e-9)
    inverted = decode(
        edf(I, unit="\u00b5V", scale=(1000, -1000, -32768, 32767), records=5, duration="2.0")
    ).signals["I"]
    np.testing.assert_allclose(inverted, 1000 - (X["I"] + 32768.0) * 2000 / 65535)


SIGNS = {
    "ECG -aVR": -1,
    "-ECG aVR": -1,
    "ECG (-aVR)": -1,
    "ECG (aVR)": 1,
    "-AVR": -1,
    "ECG--I": -1,
    "Lead_-I": -1,
    "ECG:-V1": -1,
}
SIGNS |= {"ECG-aVR": 1, "EKG - I": 1, "ECG- I": 1, "ECG-Lead V1": 1, "ECGII": 1}


@pytest.mark.parametrize("label", SIGNS)
def test_the_sign_of_a_lead_is_read(tmp_path: Path, label: str) -> None:
    sign, lead = (
        SIGNS[label],
        next(lead for lead in reversed(LEADS) if label.upper().rstrip(")").endswith(lead.upper())),
    )
    (tmp_path / "one.edf").write_bytes(edf({label: sign * X[lead], "V6": X["V6"]}))
    made = build(tmp_path, tmp_path / "out", plan="all")
    np.testing.assert_array_equal(made[0].signal_uv[LEADS.index(lead)], X[lead])
    noted = [
        (reason, detail) for _, _, reason, detail in made.rejects() if reason == "inverted lead"
    ]
    assert noted == (
        [("inverted lead", f"{lead}: labelled with a minus, inverted again")] if sign < 0 else []
    )
    assert verify(made, open_sources(str(tmp_path), "edf", hospital=HospitalFiles)) == []


def test_another_reader_agrees(tmp_path: Path) -> None:
    kit = pytest.importorskip("ecgdatakit", reason="needs ecgdatakit, of the group test")
    (tmp_path / "one.edf").write_bytes(
        edf(X, records=4, duration="2.5", scale=(-900, 2100, -2048, 2047))
    )
    found = decode((tmp_path / "one.edf").read_bytes())
    for lead in kit.FileParser.parse(tmp_path / "one.edf", units="uV").leads:
        np.testing.assert_allclose(found.signals[lead.label], lead.samples)
        assert found.fs_hz == lead.sampling_rate


@pytest.mark.parametrize(
    ("patient", "kind", "known"),
    [
        ("MCH-0234567 M 02-MAY-1951 Haagse_Harry", "EDF+C", ("MCH-0234567", "M")),
        ("X X X X", "EDF+C", (None, "X")),
        ("MCH-0234567 F X X other fields", "EDF+C", ("MCH-0234567", "F")),
        (
            "Harry van der Haag",
            "EDF+C",
            (None, None),
        ),  # not as EDF+ demands: no name is taken for a code
        ("Haag F 1951 Harry", "EDF+C", (None, None)),
        ("MCH-0234567 M 02-MAY-1951 Haagse_Harry", "", (None, None)),
    ],
)
def test_only_the_code_and_the_sex_of_a_patient(
    patient: str, kind: str, known: tuple[str | None, str | None]
) -> None:
    found = decode(edf(I, patient=patient, kind=kind))
    assert (found.patient, found.sex) == known and found.age is None


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "unknown format"),
    "text": (lambda: b"0,1,2,3", "unknown format"),
    "24 bits": (lambda: b"\xffBIOSEMI" + GOOD[8:], "BDF"),
    "gaps": (lambda: edf(I, kind="EDF+D"), "EDF+D"),
    "cut header": (lambda: GOOD[:1000], "header"),
    "cut samples": (lambda: GOOD[:-1], "truncated file"),
    "more samples": (lambda: GOOD + b"\0\0", "file length"),
    "unfinished": (lambda: GOOD[:236] + b"-1      " + GOOD[244:], "header"),
    "9999 signals": (lambda: GOOD[:252] + b"9999" + GOOD[256:], "header size"),
    "no signals": (lambda: GOOD[:252] + b"0   " + GOOD[256:], "header"),
    "no duration": (lambda: edf(I, duration="0"), "sampling rate"),
    "duration nan": (lambda: edf(I, duration="nan"), "header"),
    "duration 1_0": (lambda: edf(I, duration="1_0"), "header"),
    "duration 1e-320": (lambda: edf(I, duration="1e-320"), "sampling rate"),
    "two rates": (lambda: edf({"I": X["I"], "II": X["II"][:2500]}), "sampling rate"),
    "a lead twice": (lambda: edf({"I": X["I"], "ECG I": X["I"]}), "duplicated lead"),
    "no lead": (lambda: edf({"EEG Fpz-Cz": X["I"], "V7": X["I"]}), "no known lead"),
    "no unit": (lambda: edf(I, unit=""), "unknown unit"),
    "unit mmHg": (lambda: edf(I, unit="mmHg"), "unknown unit"),
    "one value": (lambda: edf(I, scale=(5, 5, -32768, 32767)), "gain"),
    "digits turned round": (lambda: edf(I, scale=(-5, 5, 32767, -32768)), "gain"),
    "100 V": (lambda: edf(I, unit="V", scale=(-100, 100, -32768, 32767)), "gain"),
    "infinite": (lambda: edf(I, scale=("-1e999", 5, -32768, 32767)), "header"),
    "decimal comma": (lambda: edf(I, scale=("-1,5", "1,5", -32768, 32767)), "header"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    make, reason = BAD[name]
    with pytest.raises(ReadError) as error:
        decode(make())
    assert error.value.reason == reason


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 13 * 256 - 8),
            st.sampled_from(["", "0", "-1", "3", "1e300", "I", "\xb5V"]),
        ),
        max_size=3,
    )
)
def test_any_header(changes: list[tuple[int, str]]) -> None:
    data = bytearray(GOOD)
    for place, text in changes:
        data[place // 8 * 8 : place // 8 * 8 + 8] = f"{text:8}".encode("latin-1")
    try:
        signals = decode(bytes(data)).signals
    except ReadError:
        return
    assert set(signals) <= set(LEADS) and {len(uv) for uv in signals.values()} <= {5000}
    assert all(np.isfinite(uv).all() for uv in signals.values())


@settings(max_examples=100, deadline=None)
@given(DAMAGE)
def test_damaged_bytes(damage: Damage) -> None:
    check_damage("edf", damage.to(GOOD, slice(13 * 256, len(GOOD))), X, 500, GOOD[236:256])


def test_names_stay_out_of_a_dataset(tmp_path: Path) -> None:
    secret = f"{SECRET} {BORN}"
    notes = {"EDF Annotations": np.frombuffer(f"{secret:30}".encode() * 10, "<i2"), SECRET: X["I"]}
    content = edf(
        X | notes, patient=f"4711 M 21-MAY-1937 {secret}", kind=f"EDF+C {secret}", free=secret
    )
    check_private(tmp_path, "edf", content, "4711", None, "M")


def test_a_dataset_holds_the_microvolts_and_no_holter_recording(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.edf").write_bytes(GOOD)
    with (tmp_path / "src" / "holter.edf").open("wb") as large:
        large.truncate(MAX_BYTES * 9)
    made = build(tmp_path / "src", tmp_path / "out", plan="all")
    assert rejected(made) == [("holter", "file too large")]
    np.testing.assert_array_equal(made.read(0), ecg())
