"""Median beats and intervals against ECGs whose beats are known."""

from pathlib import Path

import numpy as np
import pytest

from omnilead.data_tools.ecg.constants import CROP_SHAPE, LEADS
from omnilead.data_tools.ecg.crops import prepare_crop
from omnilead.data_tools.ecg.mean_beat import (
    BEAT_SAMPLES,
    BEFORE_R,
    HeartRates,
    mean_beats,
    r_peaks,
    rate_and_axis,
)
from omnilead.data_tools.sources.hospital_files import HospitalFiles
from omnilead.data_tools.sources.zip_folder import folder_or_zip
from omnilead.data_tools.synthetic import archive as synth
from omnilead.data_tools.synthetic.ecg import simulate
from omnilead.data_tools.synthetic.patients import BLOCK_PATIENTS, RHYTHM_SHARES, draw_patients

T_S = np.arange(5000) / 500
FILES = Path(__file__).parents[3] / "shared" / "formats"
REGULAR = np.arange(0.4, 10, 0.8)


def ecg(beats_s=REGULAR, noise=0.0, leads=12):
    """[12, 5000] uV: R and T of every beat, each lead with its own sizes."""
    rng, x = np.random.default_rng(3), np.zeros((12, 5000))
    for delay_s, width_s, size in ((0, 0.01, 1000), (0.25, 0.04, 200)):
        wave = sum(np.exp(-0.5 * ((T_S - at - delay_s) / width_s) ** 2) for at in beats_s)
        x += np.outer(rng.uniform(-size, size, 12), wave)
    x += noise * rng.normal(size=x.shape)
    x[leads:] = 0
    return x


@pytest.mark.parametrize("leads", [1, 12])
def test_peaks_are_where_the_beats_are(leads):
    np.testing.assert_allclose(r_peaks(ecg(noise=30, leads=leads)) / 500, REGULAR, atol=0.02)


def test_beats_depend_on_shape_but_not_on_size_or_noise():
    found = mean_beats(np.stack([ecg(), ecg(noise=40), 2 * ecg(), ecg()[::-1]]))
    shapes, (size, _, twice, _) = found[:, : 12 * BEAT_SAMPLES], found[:, 12 * BEAT_SAMPLES]
    np.testing.assert_allclose(np.linalg.norm(shapes, axis=1), 1, atol=1e-5)
    _, noisy, large, other = shapes @ shapes[0]
    assert noisy > 0.95 and large > 0.9999 and other < 0.7
    assert abs(np.abs(shapes[0].reshape(12, BEAT_SAMPLES)).max(0).argmax() - BEFORE_R) <= 1
    assert twice - size == pytest.approx(np.log(2), abs=1e-3)


def test_intervals():
    irregular = np.cumsum(np.tile([0.6, 1.0], 6)) - 0.3
    same, mixed = mean_beats(np.stack([ecg(), ecg(irregular)]))[:, 12 * BEAT_SAMPLES :]
    assert same[1] == pytest.approx(np.log(0.8), abs=0.01) and same[2] < np.log(0.04)
    assert mixed[1] == pytest.approx(np.log(0.8), abs=0.03)
    assert mixed[2] == pytest.approx(np.log(0.02 + 0.25), abs=0.1)


def with_axis(degrees, size=1.0):
    """[12, 5000] mV: R of every beat, of a heart that points there in the frontal plane."""
    wave = sum(np.exp(-0.5 * ((T_S - at) / 0.01) ** 2) for at in REGULAR)
    angle, x = np.radians(degrees), np.zeros((12, 5000))
    x[LEADS.index("I")] = size * np.cos(angle) * wave
    x[LEADS.index("aVF")] = size * np.sqrt(3) / 2 * np.sin(angle) * wave
    x[LEADS.index("V3")] = wave
    return x


@pytest.mark.parametrize("degrees", [-120, -61, -10, 0, 45, 90, 150])
def test_rate_and_axis_of_a_heart_that_is_known(degrees):
    rate, axis = rate_and_axis(with_axis(degrees)).removesuffix("\u00b0").split("/min, QRS axis ")
    assert int(rate) == 75 and abs(int(axis) - degrees) <= 1


NO_BEATS = "no heart rate or axis: no beats that are alike"


@pytest.mark.parametrize(
    ("x_LT", "missing", "says"),
    [
        (with_axis(45), ["aVF", "V1"], "75/min, no axis: aVF missing"),
        (with_axis(45), ["I", "II", "aVF"], "75/min, no axis: I and aVF missing"),
        (with_axis(45, 0.05), [], "75/min, no axis: the QRS is as much up as down in I and aVF"),
        (with_axis(45)[:, :900], [], "no heart rate or axis: 2 beats found, 3 are needed"),
        (np.zeros((12, 5000)), [], "no heart rate or axis: 0 beats found, 3 are needed"),
        (np.random.default_rng(0).normal(0, 0.3, (12, 5000)), [], NO_BEATS),
        (np.random.default_rng(0).normal(0, 0.3, (12, 2500)), [], NO_BEATS),
        (np.tile(0.5 * np.sin(100 * np.pi * T_S), (12, 1)), [], NO_BEATS),
        (0.001 * with_axis(45), [], NO_BEATS),
    ],
)
def test_why_there_is_no_rate_or_axis(x_LT, missing, says):
    assert rate_and_axis(x_LT, missing) == says


@pytest.mark.parametrize(
    ("rate", "ecgs", "says"),
    [(49, 20, "49"), (51, 60, ""), (109, 20, ""), (112, 60, "112"), (35, 19, "")],
)
def test_a_rate_that_many_hearts_together_do_not_have_is_said(rate, ecgs, says):
    rates = HeartRates()
    for _ in range(ecgs):
        rates.add("clinic", ecg(np.arange(0.4, 10, 60 / rate)))
        rates.add("noise", np.random.default_rng(0).normal(0, 300, (12, 5000)))
    line = f"clinic: median heart rate {says} a minute in {min(ecgs, 50)} ECGs: is the sampling rate right?"
    assert list(rates.warnings()) == ([line] if says else [])


# What the machines wrote into their files: rate per minute, QRS axis in degrees
VENDORS = {
    "muse_example1.xml": (48, 20),
    "muse_example2.xml": (65, -2),
    "muse_example4.xml": (61, -66),
    "philips_103_mrx.xml": (41, -21),
    "philips_104_ad4d.xml": (41, 85),
    "philips_104_demo.xml": (84, 78),
    "philips_10401_tc.xml": (64, 22),
    "dicom_12lead_mortara.dcm": (61, 52),
}


@pytest.mark.skipif(not FILES.is_dir(), reason="no real files in ../shared/formats")
def test_rate_and_axis_are_those_of_the_machines():
    source, off = HospitalFiles(folder_or_zip(FILES)), []
    for name, known in VENDORS.items():
        samples = np.empty(CROP_SHAPE, "<i2")
        prepare_crop(source.read(name), 0, samples)
        text = rate_and_axis(samples / 1000).removesuffix("\u00b0")
        off.append(np.subtract(text.split("/min, QRS axis "), known, dtype=float, casting="unsafe"))
    rates, axes = np.abs(off).T
    assert rates.max() <= 3 and axes.max() <= 12 and axes.mean() <= 4, off


def test_leads_and_records_without_a_beat_are_finite():
    unusual = np.stack([np.zeros((12, 5000)), ecg(leads=1), ecg(REGULAR[:1])])
    assert np.isfinite(mean_beats(unusual)).all()
    for n in (0, 2):
        assert mean_beats(np.zeros((n, 12, 2500))).shape == (n, 12 * BEAT_SAMPLES + 8)


@pytest.fixture(scope="module")
def sessions():
    """Two sessions of four blocks of patients, by the key that they were drawn with."""
    made = {}
    for block in range(4):
        patients = draw_patients((11, block))
        for session in range(2):
            key = (11, block, session)
            made[key] = simulate(patients, key, range(BLOCK_PATIENTS), 5000, 500, 50)
    return made


@pytest.mark.parametrize(("name", "low", "high"), [("SB", 36, 62), ("STach", 96, 152)])
def test_the_heart_rate_matches_the_label(name, low, high, sessions):
    within = []
    for made in sessions.values():
        has = made.present
        for i in np.flatnonzero(has[name] & ~has["PAC"] & ~has["PVC"]):
            rate = 60 * 500 / np.median(np.diff(r_peaks(made.digital[i].T)))
            within.append(low <= rate <= high and abs(rate - made.rate_bpm[i]) < 6)
    assert len(within) > 30 and np.mean(within) > 0.85


def mean_beat(digital):
    """The median beat [350, 12], 150 samples before to 200 after the R peak, of norm 1."""
    peaks = r_peaks(digital.T)
    peaks = peaks[(peaks > 150) & (peaks < len(digital) - 200)]
    beat = np.median(digital[peaks[:, None] + np.arange(-150, 200)], axis=0)
    beat -= beat.mean(0)
    return beat / np.linalg.norm(beat)


def test_normal_ecgs_look_normal(sessions):
    normal = []
    for made in sessions.values():
        findings = sum(mask.astype(int) for mask in made.present.values())
        normal += [*made.digital[made.present["NSR"] & (findings == 1)]]
    beats = np.median([mean_beat(digital) for digital in normal], axis=0)
    qrs, t = beats[120:180], beats[220:320, [0, 1, 9, 10]]
    high, low = qrs.max(0), -qrs.min(0)
    assert high[1] > 2 * low[1] and low[3] > high[3]  # upright in II, inverted in aVR
    v1, _, v3, v4, v5, _ = (high / low)[6:]
    assert v1 < 1 < v4 and v1 < v3 < v5  # R grows from V1 to V5
    assert beats[50:125, 1].max() - beats[:40, 1].mean() > 0.005  # a P wave in II
    assert t.max(0).min() > -t.min(0).max()  # T is upright
    std_mv = np.median([digital.std(0) for digital in normal], axis=0) / 1000
    assert (std_mv > 0.07).all() and (std_mv < 0.4).all()


def test_two_sessions_are_as_alike_as_real_ones():
    """448 patients against the figures of real PTB-XL patients with two sessions."""
    beats, diagnoses = ([], []), ([], [])  # type: ignore[var-annotated]
    for block in synth.plan_blocks(448, 1.0, 0, "ptbxl"):
        for session, (_, digital, names, _) in enumerate(synth.sessions_of(block)):
            beats[session].append(mean_beats(digital.transpose(0, 2, 1))[:, : 12 * BEAT_SAMPLES])
            diagnoses[session].extend(set(one) for one in names)
    pairs, rhythms = list(zip(*diagnoses, strict=True)), {*RHYTHM_SHARES, "PR"}
    same_rhythm = np.mean([before & rhythms == after & rhythms for before, after in pairs])
    same = np.mean([before == after for before, after in pairs])
    assert abs(same_rhythm - 0.68) < 0.12 and abs(same - 0.44) < 0.12
    first, second = (np.concatenate(session)[:438] for session in beats)
    cosine = first @ second.T
    own, others = np.diag(cosine), cosine[~np.eye(438, dtype=bool)]
    assert 0.40 < (cosine.argmax(0) == np.arange(438)).mean() < 0.65
    assert 0.80 < np.median(own) < 0.93
    assert 0.25 < np.median(others) < 0.5
