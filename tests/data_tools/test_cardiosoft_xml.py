"""GE CardioSoft XML: right microvolts from the first strip, and only what is needed is read."""

import numpy as np
import pytest
from handmade import write_files
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
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sharding.verify import FLAG_REASONS
from omnilead.data_tools.sources.base import prepare_record
from omnilead.data_tools.sources.hospital.cardiosoft_xml import MAX_LEADS, NOT_MEASURED
from omnilead.data_tools.sources.hospital_files import HOSPITAL_FORMATS, HospitalFiles

KIND = "cardiosoft-xml"
TRUTH = leads_uv()
PERSON = f"""<PID>4711</PID><Name><FamilyName>{SECRET}</FamilyName></Name><Age units="YEARS">61</Age>
<BirthDateTime><Year>{BORN}</Year></BirthDateTime><Gender>FEMALE</Gender>"""


def lead(name, uv):
    """Steps of 5 uV, in lines as CardioSoft breaks them."""
    steps = np.rint(uv / 5).astype(int).astype(str)
    lines = [",".join(steps[at : at + 30]) for at in range(0, len(steps), 30)]
    text = ",\n\t\t".join(lines)
    return f'<WaveformData lead="{name}">\t\t{text}</WaveformData>\n'


def facts(leads, samples, rate=500, step="5"):
    return f"""<NumberOfLeads>{leads}</NumberOfLeads><SampleRate units="Hz">{rate}</SampleRate>
<ChannelSampleCountTotal>{samples}</ChannelSampleCountTotal><Resolution units="uVperLsb">{step}</Resolution>\n"""


def waveforms(leads):
    return "".join(lead(name, uv) for name, uv in leads.items())


def strip(leads=TRUTH, **stated):
    inside = facts(len(leads), len(next(iter(leads.values()))), **stated) + waveforms(leads)
    return f"<StripData>{inside}<ArrhythmiaResults><Time>800</Time></ArrhythmiaResults></StripData>"


MEDIAN = facts(1, 60, 250, 20) + lead("I", np.arange(60) * 5)
MEDIAN = f"<RestingECGMeasurements><MedianSamples>{MEDIAN}</MedianSamples></RestingECGMeasurements>"
FULL = """<FullDisclosure><NumberOfChannels>1</NumberOfChannels><SampleRate units="Hz">50</SampleRate>
<FullDisclosureData>0,1,2,</FullDisclosureData></FullDisclosure>"""


def cardiosoft(strips=None, person=PERSON, more=""):
    free = f"<Interpretation><DiagnosisText>{SECRET}</DiagnosisText></Interpretation>"
    strips = strip() if strips is None else strips
    inside = f"<PatientInfo>{person}</PatientInfo>{free}{MEDIAN}{strips}{more}"
    return f'<?xml version="1.0" encoding="ISO-8859-1" ?>\n<CardiologyXML>{inside}</CardiologyXML>'


GOOD = cardiosoft()


def test_the_strip_is_read_with_its_own_rate_and_resolution():
    found = check_truth(decoded(KIND, GOOD), TRUTH)
    assert (found.fs_hz, found.patient, found.age, found.sex) == (500, "4711", 61, "FEMALE")
    assert found.warnings == ()
    other = decoded(KIND, cardiosoft(strip(rate=250, step="2.44")))
    check_truth(other, {name: uv / 5 * 2.44 for name, uv in TRUTH.items()})
    assert other.fs_hz == 250


def test_a_full_disclosure_is_left_out_and_said():
    found = check_truth(decoded(KIND, cardiosoft(more=FULL)), TRUTH)
    assert found.warnings == (("further waveforms", "the full disclosure was not read"),)
    assert found.warnings[0][0] in FLAG_REASONS
    alone = str(decoded(KIND, cardiosoft("", more=FULL)))
    assert alone.startswith("rhythm waveform: only a full disclosure, which is not read: export")


@pytest.mark.parametrize("form", ["StripData/Strip", "Strip/StripData", "twice"])
def test_the_first_strip_of_several_is_read(form):
    """An exercise ECG states rate and resolution once, before its strips."""
    three = {name: TRUTH[lead] for name, lead in (("I", "I"), ("2", "II"), ("3", "V1"))}
    other = {name: uv + 10 for name, uv in three.items()}
    strips = {
        "StripData/Strip": f"<StripData>{facts(3, 2500)}<Strip>{waveforms(three)}</Strip>"
        f"<Strip>{waveforms(other)}</Strip></StripData>",
        "Strip/StripData": f"<Strip>{strip(three)}</Strip><Strip>{strip(other)}</Strip>",
        "twice": strip(three) + strip(other),
    }
    found = check_truth(decoded(KIND, cardiosoft(strips[form])), three)
    assert found.warnings == (("further waveforms", "the first of 2 strips was read"),)


def test_leads_by_number_are_ignored(tmp_path):
    three = {name: TRUTH[lead] for name, lead in (("I", "I"), ("2", "II"), ("3", "III"))}
    write_files(tmp_path, {"one.xml": cardiosoft(strip(three))})
    crop = prepare_record(HospitalFiles(folder(tmp_path)), "one.xml").crops_uv[0]
    np.testing.assert_array_equal(crop[0, :2500], TRUTH["I"])
    assert not crop[1:].any()


def test_lead_names_in_any_case_and_order_are_read():
    turned = {name.upper(): TRUTH[name] for name in reversed(LEADS)}
    check_truth(decoded(KIND, cardiosoft(strip(turned))), TRUTH)
    assert str(decoded(KIND, cardiosoft(strip({"V1": TRUTH["V1"], "v1": TRUTH["V1"]})))) == (
        "duplicated lead: V1"
    )


def test_samples_that_were_not_measured_are_missing():
    gap = np.where(np.arange(2500) == 7, NOT_MEASURED * 5, TRUTH["V1"])
    found = decoded(KIND, cardiosoft(strip(TRUTH | {"V1": gap})))
    assert np.flatnonzero(np.isnan(found.signals["V1"])).tolist() == [7]


def test_only_id_age_and_sex_of_the_patient_are_copied(tmp_path):
    check_private(tmp_path, KIND, GOOD.encode(), 61.0, "F")


@pytest.mark.parametrize(
    ("stated", "years"),
    [
        ('<Age units="MONTHS">6</Age>', 0.5),
        ("<Age>61</Age>", 61),
        ('<Age units="YEARS"></Age>', np.nan),
        ('<Age units="FORTNIGHTS">6</Age>', "6 fortnights"),
        ("", np.nan),
    ],
)
def test_ages_have_units(stated, years):
    np.testing.assert_equal(decoded(KIND, cardiosoft(person=stated)).age, years)


test_edited_files_are_refused_with_a_reason = refuses(
    KIND,
    edited(
        GOOD,
        """
unknown format    | CardiologyXML                 | sapphire
rhythm waveform   | StripData                     | Other
signal count      | <NumberOfLeads>12             | <NumberOfLeads>8
signal count      | <NumberOfLeads>12             | <NumberOfLeads>
signal count      | WaveformData                  | Other
duplicated lead   | lead="V2"                     | lead="V1"
sampling rate     | >500</SampleRate>             | ></SampleRate>
sampling rate     | >500</SampleRate>             | >-500</SampleRate>
sampling rate     | >500</SampleRate>             | >1e400</SampleRate>
unknown unit      | "Hz">500                      | "kHz">500
unknown unit      | "Hz">500                      | "">500
unknown unit      | "uVperLsb">5</Res             | "mVperLsb">5</Res
unknown unit      | <Resolution units="uVperLsb"  | <Resolution
unknown unit      | Resolution                    | Other
gain              | "uVperLsb">5</Res             | "uVperLsb">0</Res
gain              | "uVperLsb">5</Res             | "uVperLsb">-5</Res
gain              | "uVperLsb">5</Res             | "uVperLsb">nan</Res
gain              | "uVperLsb">5</Res             | "uVperLsb">5000</Res
gain              | "uVperLsb">5</Res             | "uVperLsb"></Res
sample count      | >2500</Channel                | >5000</Channel
sample count      | >2500</Channel                | >2,500</Channel
sample data       | lead="V1">                    | lead="V1">1.5,
sample data       | lead="V1">                    | lead="V1">1e3,
sample data       | lead="V1">                    | lead="V1">,
sample data       | lead="V1">                    | lead="V1">5-3,
sample data       | lead="V1">                    | lead="V1">1 2,
sample data       | lead="V1">                    | lead="V1">1_0,
sample data       | lead="V1">                    | lead="V1">٣,
sample data       | lead="V1">                    | lead="V1">99999999999,
sample data       | lead="V1">                    | lead="V1"><b/>x,
sample count: 2501 found, ChannelSampleCountTotal states '2500': export | lead="V1"> | lead="V1">1,
gain: Resolution: '4,88' is not a positive number, with a decimal point | >5</Res | >4,88</Res
unknown unit: SampleRate in 'Samples', only Hz is read | "Hz">500 | "Samples">500
""".replace("٣", "&#1635;"),
    ),
    {
        "rhythm waveform: no StripData": ["<CardiologyXML/>"],
        "sample count: 2499 found": [
            GOOD.replace(lead("V6", TRUTH["V6"]), lead("V6", TRUTH["V6"][1:]))
        ],
        f"signal count: {MAX_LEADS + 1} leads": [
            cardiosoft(strip({f"X{i}": TRUTH["I"][:9] for i in range(MAX_LEADS + 1)}))
        ],
    },
)


def test_decimal_commas_in_samples_are_noticed():
    """`1,5` would be two samples."""
    text = GOOD.replace(lead("V1", TRUTH["V1"]), lead("V1", TRUTH["V1"]).replace(",", ",5,"))
    assert decoded(KIND, text).reason == "sample count"


def test_leads_of_different_lengths_are_refused_if_no_count_is_stated(tmp_path):
    uneven = cardiosoft(strip(TRUTH | {"V6": TRUTH["V6"][:-1]}))
    write_files(tmp_path, {"one.xml": uneven.replace("ChannelSampleCountTotal", "Other")})
    assert str(prepare_record(HospitalFiles(folder(tmp_path)), "one.xml")).startswith(
        "sample count: "
    )


def test_a_long_full_disclosure_fits():
    long = FULL.replace("0,1,2,", "-120,\n\t" * 700_000)
    assert 2**22 < len(long) < HOSPITAL_FORMATS[KIND].max_bytes
    check_truth(decoded(KIND, cardiosoft(more=long)), TRUTH)


SHORT = {"I": TRUTH["I"][:40]}
SMALL = cardiosoft(strip(SHORT)).encode()
START = SMALL.index(b'lead="I">', SMALL.index(b"<StripData>")) + len('lead="I">')
DIGITS = slice(START, SMALL.index(b"</WaveformData>", START))
RATE = SMALL[SMALL.index(b"<StripData>") : START]

# The digits are left alone: the format has no checksum
test_damaged_files_are_refused_or_read_correctly = withstands(KIND, SMALL, SHORT, RATE, DIGITS)
