"""HL7 aECG: right microvolts for any units, order and namespaces, and only from the rhythm."""

import numpy as np
import pytest
from hospital_cases import (
    BORN,
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
from omnilead.data_tools.sharding.verify import FLAG_REASONS
from omnilead.data_tools.sources.hospital.aecg import NOT_MEASURED

KIND = "hl7-aecg"
TRUTH = leads_uv()
SUBJECT = f"""<id root="1.2.3" extension="4711"/><subjectDemographicPerson><name>{SECRET}</name>
<administrativeGenderCode code="F"/><birthTime value="{BORN}"/><raceCode displayName="{SECRET}"/></subjectDemographicPerson>"""


def sequence(code, digits="", **quantities):
    """`quantities`: value and unit of origin, scale or increment."""
    parts = ""
    for tag, text in quantities.items():
        value, _, unit = text.partition(" ")
        parts += f'<{tag} value="{value}" unit="{unit}"/>'
    text = " ".join(map(str, digits)) if isinstance(digits, np.ndarray) else digits
    value = f'<value xsi:type="SLIST_PQ">{parts}<digits>{text}</digits></value>'
    return f'<component><sequence><code code="{code}" displayName="{SECRET}"/>{value}</sequence></component>'


def lead(name, digits=None):
    digits = np.rint(TRUTH[name] / 2.5).astype(int) if digits is None else digits
    code = f"MDC_ECG_LEAD_{name.upper()}"
    return sequence(code, digits, origin="0 uV", scale="2.5 uV")


TIME = sequence("TIME_ABSOLUTE", increment="0.002 s")
EACH = "".join(map(lead, LEADS))


def series(sequences, code="RHYTHM", more=""):
    sets = f"<component><sequenceSet>{sequences}</sequenceSet></component>"
    return f'<component><series><code code="{code}"/><author>{SECRET}</author>{sets}{more}</series></component>'


BEAT = series(TIME + lead("I"), "REPRESENTATIVE_BEAT")
DERIVED = BEAT.removeprefix("<component>").removesuffix("</component>")
DERIVED = f"<derivation>{DERIVED.replace('series>', 'derivedSeries>')}</derivation>"


def aecg(sequences=TIME + EACH, age="46 a", more="", before=""):
    """`before` and `more`: further series, before and after."""
    place = f"<subject><trialSubject>{SUBJECT}</trialSubject></subject><location><name>{SECRET}</name></location>"
    for tag in ("subjectAssignment", "componentOf", "timepointEvent", "componentOf"):
        place = f"<{tag}>{place}</{tag}>"
    years, _, unit = age.partition(" ")
    stated = f'<code code="21612-7"/><value xsi:type="PQ" value="{years}" unit="{unit}"/>'
    control = (
        f"<controlVariable><relatedObservation>{stated}</relatedObservation></controlVariable>"
    )
    comment = f"<pertainsTo><subjectFindingComment><text>{SECRET}</text></subjectFindingComment></pertainsTo>"
    names = 'xmlns="urn:hl7-org:v3" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'
    waveforms = before + series(sequences, more=DERIVED) + more
    return f'<?xml version="1.0" encoding="UTF-8"?><AnnotatedECG {names}>{place}{control}{comment}{waveforms}</AnnotatedECG>'


GOOD = aecg()
STEP, STEP_MV = 'value="2.5" unit="uV"', 'value="0.0025" unit="mV"'
NAMESPACE = GOOD.replace("<", "<hl7:").replace("<hl7:/", "</hl7:").replace("<hl7:?", "<?")
EASI = "".join(lead(name).replace("LEAD_", "LEAD_d") for name in ("I", "II", "III"))
LATIN = GOOD.replace("UTF-8", "latin-1").replace("</AnnotatedECG>", "<x>é</x></AnnotatedECG>")


@pytest.mark.parametrize(
    "text",
    [
        NAMESPACE.replace("xmlns=", "xmlns:hl7="),
        aecg(TIME + "".join(map(lead, LEADS[::-1]))),
        GOOD.replace(STEP, STEP_MV),
        GOOD.replace('value="0.002" unit="s"', 'value="2" unit="ms"'),
        aecg(TIME + EACH + lead("V4R", "1") + sequence("MDC_ECG_LEAD_X", "?")),
        aecg(TIME + EACH + EASI),
        GOOD.replace("LEAD_AV", "LEAD_aV"),
        aecg(before=BEAT),
        "\ufeff" + GOOD,
        GOOD.replace("UTF-8", "UTF-16").encode("utf-16"),
        LATIN.encode("latin-1"),
        GOOD.replace(" ", "\n \t"),
    ],
    ids=range(12),
)
def test_equivalent_files_give_the_same_ecg(text):
    assert check_truth(decoded(KIND, text), TRUTH).fs_hz == 500


def test_leads_derived_from_easi_are_not_read_as_measured():
    check_truth(decoded(KIND, aecg(TIME + EASI + lead("V1"))), {"V1": TRUTH["V1"]})


def test_origins_are_added_and_unmeasured_samples_are_nan():
    text = aecg(TIME + lead("I", f"3 {NOT_MEASURED} 7") + lead("V3", " "))
    found = decoded(KIND, text.replace('value="0" unit="uV"', 'value="0.1" unit="mV"'))
    right = {"I": [107.5, np.nan, 117.5], "V3": []}
    assert not check_truth(found, right).warnings


def test_further_waveforms_give_a_warning():
    found = check_truth(decoded(KIND, aecg(more=series(TIME + lead("I")))), TRUTH)
    assert found.warnings == (("further waveforms", "the first of 2 sequence sets was read"),)
    assert found.warnings[0][0] in FLAG_REASONS


@pytest.mark.parametrize(
    ("age", "years"), [("18 mo", 1.5), (" a", np.nan), ("46", "46 "), ("old a", "old a")]
)
def test_ages_are_converted_to_years(age, years):
    """Or stay as stated, and are then reported."""
    np.testing.assert_equal(check_truth(decoded(KIND, aecg(age=age)), TRUTH).age, years)


def test_a_subject_without_an_id_has_no_patient():
    assert check_truth(decoded(KIND, GOOD.replace(SUBJECT, "")), TRUTH).patient is None


def test_only_id_age_and_sex_of_the_subject_are_copied(tmp_path):
    check_private(tmp_path, KIND, GOOD.encode(), age=46.0, sex="F")


test_edited_files_are_refused_with_a_reason = refuses(
    KIND,
    edited(
        GOOD,
        """
unknown format    | AnnotatedECG                   | sapphire
rhythm waveform   | RHYTHM                         | REPRESENTATIVE_BEAT
sampling rate     | TIME_ABSOLUTE                  | OTHER
sampling rate     | unit="s"                       | unit="furlong"
sampling rate     | value="0.002"                  | value="0"
sampling rate     | value="0.002"                  | value="nan"
sampling rate     | value="0.002"                  | value="1e-320"
duplicated lead   | LEAD_II"                       | LEAD_I"
unknown unit      | scale value="2.5" unit="uV"    | scale value="2.5" unit=""
unknown unit      | scale value="2.5" unit="uV"    | scale value="2.5" unit="mmHg"
unknown unit      | origin value="0" unit="uV"     | origin value="5" unit=""
gain              | scale value="2.5" unit="uV"    | scale value="0" unit="uV"
gain              | scale value="2.5" unit="uV"    | scale value="-5" unit="uV"
gain              | scale value="2.5" unit="uV"    | scale value="nan" unit="uV"
gain              | scale value="2.5" unit="uV"    | scale value="5" unit="V"
gain              | origin value="0" unit="uV"     | origin value="inf" unit="uV"
gain              | <origin value="0" unit="uV"/>  |
sample data       | </digits>                      | 1.5</digits>
sample data       | </digits>                      | 5-3</digits>
sample data       | </digits>                      | 1e3</digits>
sample data       | </digits>                      | 0x5</digits>
sample data       | </digits>                      | - 5</digits>
sample data       | </digits>                      | é</digits>
sample data       | </digits>                      | 999999999999999999999999999999</digits>
""",
    ),
    {
        "rhythm waveform": ["<AnnotatedECG/>"],
        "sampling rate": [aecg(TIME + TIME.replace("0.002", "0.004") + EACH)],
    },
)
SHORT = {"I": TRUTH["I"][:40]}
SMALL = aecg(TIME + lead("I", np.rint(SHORT["I"] / 2.5).astype(int))).encode()
START = SMALL.index(b"LEAD_I")
DIGITS = slice(SMALL.index(b"<digits>", START) + 8, SMALL.index(b"</digits>", START))
RATE = SMALL[SMALL.index(b'"RHYTHM"') : SMALL.index(b"<digits>")]

# The digits are left alone: the format has no checksum
test_damaged_files_are_refused_or_read_correctly = withstands(KIND, SMALL, SHORT, RATE, DIGITS)
