"""HL7 aECG: right microvolts for any units, order and namespaces, and only from the rhythm."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hospital_cases import (
    BORN,
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

from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.hospital.aecg import MISSING
from omnilead.data_tools.hospital.base import Decoded
from omnilead.data_tools.hospital.files import HospitalFiles
from omnilead.data_tools.record import LEADS
from omnilead.data_tools.sources import open_sources, prepared
from omnilead.data_tools.storage import folder
from omnilead.data_tools.verify import FLAGS

KIND = "hl7-aecg"
TRUTH = leads_uv(step=2.5)
STEP = {"increment": ("0.002", "s")}
SUBJECT = f"""<id root="1.2.3" extension="4711"/><subjectDemographicPerson><name>{SECRET}</name>
<administrativeGenderCode code="F"/><birthTime value="{BORN}"/><raceCode displayName="{SECRET}"/></subjectDemographicPerson>"""


def sequence(code: str, digits: object = "", **quantities: tuple[str, str]) -> str:
    """`quantities`: value and unit of origin, scale or increment."""
    parts = "".join(
        f'<{tag} value="{value}" unit="{unit}"/>' for tag, (value, unit) in quantities.items()
    )
    text = " ".join(map(str, digits)) if isinstance(digits, np.ndarray) else digits
    value = f'<value xsi:type="SLIST_PQ">{parts}<digits>{text}</digits></value>'
    return f'<component><sequence><code code="{code}" displayName="{SECRET}"/>{value}</sequence></component>'


def lead(name: str, digits: object = None, **quantities: tuple[str, str]) -> str:
    digits = np.rint(TRUTH[name] / 2.5).astype(int) if digits is None else digits
    return sequence(
        f"MDC_ECG_LEAD_{name.upper()}",
        digits,
        **({"origin": ("0", "uV"), "scale": ("2.5", "uV")} | quantities),
    )


def leads(names: tuple[str, ...] = LEADS, **quantities: tuple[str, str]) -> str:
    return "".join(lead(name, **quantities) for name in names)


TIME = sequence("TIME_ABSOLUTE", **STEP)


def series(sequences: str, code: str = "RHYTHM", more: str = "") -> str:
    sets = f"<component><sequenceSet>{sequences}</sequenceSet></component>"
    return f'<component><series><code code="{code}"/><author>{SECRET}</author>{sets}{more}</series></component>'


BEAT = series(TIME + leads(("I",)), "REPRESENTATIVE_BEAT").replace("series>", "derivedSeries>")
DERIVED = (
    f"<derivation>{BEAT.removeprefix('<component>').removesuffix('</component>')}</derivation>"
)


def aecg(waveforms: str = "", age: tuple[str, str] = ("46", "a"), subject: str = SUBJECT) -> str:
    waveforms = waveforms or series(TIME + leads(), more=DERIVED)
    place = f"<subject><trialSubject>{subject}</trialSubject></subject><location><name>{SECRET}</name></location>"
    for tag in ("subjectAssignment", "componentOf", "timepointEvent", "componentOf"):
        place = f"<{tag}>{place}</{tag}>"
    stated = f'<code code="21612-7"/><value xsi:type="PQ" value="{age[0]}" unit="{age[1]}"/>'
    control = (
        f"<controlVariable><relatedObservation>{stated}</relatedObservation></controlVariable>"
    )
    comment = f"<pertainsTo><subjectFindingComment><text>{SECRET}</text></subjectFindingComment></pertainsTo>"
    names = 'xmlns="urn:hl7-org:v3" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'
    return f'<?xml version="1.0" encoding="UTF-8"?><AnnotatedECG {names}>{place}{control}{comment}{waveforms}</AnnotatedECG>'


def read(text: str | bytes) -> Decoded:
    found = decoded(KIND, text if isinstance(text, bytes) else text.encode())
    assert isinstance(found, Decoded), found
    return found


def check_truth(found: Decoded) -> None:
    assert set(found.signals) == set(TRUTH) and found.fs_hz == 500
    for name, uv in TRUTH.items():
        np.testing.assert_allclose(found.signals[name], uv, atol=1e-9)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared files")
@pytest.mark.parametrize(
    ("file", "facts"),
    [
        ("aecg_fda_example.xml", (12, 5000, "SBJ-123", 46.0, "M")),
        ("aecg_3lead_1khz.xml", (3, 10_000, "106_ABC", None, "")),
        ("philips_104_ad4d_as_aecg.xml", (12, 5500, "20044", None, "F")),
    ],
)
def test_real_files_give_the_right_microvolts(
    file: str, facts: tuple[int, int, str, float | None, str]
) -> None:
    found = check_real(KIND, file)
    assert (
        len(found.signals),
        len(found.signals["I"]),
        found.patient,
        found.age,
        found.sex,
    ) == facts


@pytest.mark.parametrize(
    "text",
    [
        aecg()
        .replace("<", "<hl7:")
        .replace("<hl7:/", "</hl7:")
        .replace("<hl7:?", "<?")
        .replace("xmlns=", "xmlns:hl7="),
        aecg(series(TIME + leads(LEADS[::-1]))),
        aecg(
            series(TIME + leads(origin=("1", "mV"), scale=("0.0025", "mV"))).replace(
                '"1" unit="mV"', '"0" unit="uV"'
            )
        ),
        aecg(series(sequence("TIME_RELATIVE", increment=("2", "ms")) + leads())),
        aecg(
            series(
                TIME
                + leads()
                + lead("I").replace("LEAD_I", "LEAD_V4R")
                + sequence("MDC_ECG_LEAD_X", "?")
            )
        ),
        aecg(series("", "REPRESENTATIVE_BEAT") + series(TIME + leads())),
        "\ufeff" + aecg(),
        aecg().replace("UTF-8", "UTF-16").encode("utf-16"),
        aecg()
        .replace("UTF-8", "latin-1")
        .replace("</AnnotatedECG>", "<x>é</x></AnnotatedECG>")
        .encode("latin-1"),
        aecg().replace(" ", "\n \t"),
    ],
    ids=[
        "namespaces",
        "order",
        "mV",
        "ms",
        "other leads",
        "beat first",
        "BOM",
        "UTF-16",
        "Latin-1",
        "spaces",
    ],
)
def test_equivalent_files_give_the_same_ecg(text: str | bytes) -> None:
    check_truth(read(text))


def test_leads_derived_from_easi_are_not_read_as_measured() -> None:
    derived = "".join(
        lead(name).replace(f"LEAD_{name}", f"LEAD_d{name}") for name in ("I", "II", "III")
    )
    assert set(read(aecg(series(TIME + derived + lead("V1")))).signals) == {"V1"}
    check_truth(read(aecg(series(TIME + leads() + derived))))
    check_truth(read(aecg(series(TIME + leads().replace("LEAD_AV", "LEAD_aV")))))


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared files")
def test_a_real_file_with_13_samples_is_refused(tmp_path: Path) -> None:
    shutil.copy(SHARED / "bad_aecg_no_waveform.xml", tmp_path)
    (source,) = open_sources(str(tmp_path), hospital=HospitalFiles)
    assert str(prepared(source, "bad_aecg_no_waveform.xml")) == "too short: 0.026 s"


def test_origins_are_added_and_unmeasured_samples_are_nan() -> None:
    gap = np.array([3, MISSING, 7])
    found = read(
        aecg(
            series(
                TIME
                + lead("I", gap, origin=("0.1", "mV"), scale=("5", "uV"))
                + lead("V2", "1 2 3")
                + lead("V3", " ")
            )
        )
    )
    np.testing.assert_array_equal(found.signals["I"], [115, np.nan, 135])
    assert {name: len(uv) for name, uv in found.signals.items()} == {
        "I": 3,
        "V2": 3,
        "V3": 0,
    } and not found.warnings


def test_further_waveforms_give_a_warning() -> None:
    found = read(aecg(series(TIME + leads()) + series(TIME + leads(("I",)))))
    check_truth(found)
    assert (
        found.warnings == (("further waveforms", "the first of 2 sequence sets was read"),)
        and found.warnings[0][0] in FLAGS
    )


@pytest.mark.parametrize(
    ("age", "years"),
    [(("18", "mo"), 1.5), (("", "a"), None), (("46", ""), None), (("old", "a"), None)],
)
def test_ages_are_converted_to_years(age: tuple[str, str], years: float | None) -> None:
    assert read(aecg(age=age)).age == years


def test_a_subject_without_an_id_has_no_patient() -> None:
    assert read(aecg(subject="")).patient is None


def test_only_id_age_and_sex_of_the_subject_are_copied(tmp_path: Path) -> None:
    check_private(tmp_path, KIND, aecg().encode(), patient="4711", age=46.0, sex="F")


def test_leads_of_different_lengths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.xml").write_text(aecg(series(TIME + leads(LEADS[:11]) + lead("V6", "1 2"))))
    with pytest.raises(ReadError, match="sample count"):
        HospitalFiles(folder(tmp_path)).read("one.xml")


ONE = lead("I", "1 2 3")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "malformed XML"),
        (aecg()[:-40], "malformed XML"),
        ("<sapphire/>", "unknown format"),
        ("<AnnotatedECG/>", "rhythm waveform"),
        (aecg(series(TIME + ONE, "REPRESENTATIVE_BEAT")), "rhythm waveform"),
        (aecg(series(ONE)), "sampling rate"),
        (aecg(series(TIME + TIME.replace("0.002", "0.004") + ONE)), "sampling rate"),
        (aecg(series(TIME.replace('"s"', '"furlong"') + ONE)), "sampling rate"),
        (aecg(series(TIME.replace("0.002", "0") + ONE)), "sampling rate"),
        (aecg(series(TIME.replace("0.002", "nan") + ONE)), "sampling rate"),
        (aecg(series(TIME.replace("0.002", "1e-320") + ONE)), "sampling rate"),
        (aecg(series(TIME + 2 * ONE)), "duplicated lead"),
        (aecg(series(TIME + lead("I", "1", scale=("5", "")))), "unknown unit"),
        (aecg(series(TIME + lead("I", "1", scale=("5", "mmHg")))), "unknown unit"),
        (aecg(series(TIME + lead("I", "1", origin=("5", "")))), "unknown unit"),
        (aecg(series(TIME + lead("I", "1", scale=("0", "uV")))), "gain"),
        (aecg(series(TIME + lead("I", "1", scale=("-5", "uV")))), "gain"),
        (aecg(series(TIME + lead("I", "1", scale=("nan", "uV")))), "gain"),
        (aecg(series(TIME + lead("I", "1", scale=("5", "V")))), "gain"),
        (aecg(series(TIME + lead("I", "1", origin=("inf", "uV")))), "gain"),
        (aecg(series(TIME + sequence("MDC_ECG_LEAD_I", "1", scale=("5", "uV")))), "gain"),
        *(
            (aecg(series(TIME + lead("I", digits))), "sample data")
            for digits in ("1.5", "5-3", "1e3", "0x5", "- 5", "é", "9" * 30)
        ),
    ],
    ids=lambda text: text if len(text) < 30 else "text",
)
def test_invalid_files_are_refused_with_a_reason(text: str, reason: str) -> None:
    found = decoded(KIND, text.encode())
    assert isinstance(found, ReadError) and found.reason == reason


SHORT = {"I": leads_uv(40, step=2.5)["I"]}
SMALL = aecg(series(TIME + lead("I", np.rint(SHORT["I"] / 2.5).astype(int)), more=DERIVED)).encode()
DIGITS = slice(
    SMALL.index(b"<digits>", SMALL.index(b"LEAD_I")) + 8,
    SMALL.index(b"</digits>", SMALL.index(b"LEAD_I")),
)


RATE = SMALL[SMALL.index(b'"RHYTHM"') : SMALL.index(b"<digits>")]


@given(damage=DAMAGE)
@settings(max_examples=200, deadline=None)
def test_damaged_files_are_refused_or_read_correctly(damage: Damage) -> None:
    """The digits are left alone: the format has no checksum."""
    check_damage(KIND, damage.to(SMALL, DIGITS), SHORT, 500, RATE)
