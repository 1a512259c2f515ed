"""Records of any form become crops of one form: bit for bit if no conversion is needed, else right
to the last bit."""

import numpy as np
import pytest
from handmade import ecg

from omnilead.data_tools.dataset import CROP_SHAPE
from omnilead.data_tools.ecg.crops import (
    CROP,
    HALF,
    crop_count,
    dropped_samples,
    prepare_crop,
    samples_at_500_hz,
)
from omnilead.data_tools.ecg.record import LEADS, EcgRecord
from omnilead.data_tools.ecg.resampling import FS_HZ, rate_ratio, resample
from omnilead.data_tools.io.errors import ReadError

RECORD = {"fs_hz": 500.0, "leads": LEADS, "gain": 1000.0}


def prepared(signal, index=0, **changes):
    """What is known of a crop, and the crop."""
    out = np.full(CROP_SHAPE, 77, np.int16)
    return prepare_crop(EcgRecord("r", signal, **RECORD | changes), index, out), out


def test_canonical_samples_are_copied_bit_for_bit():
    x = ecg()
    facts, out = prepared(x, invalid=-32768)
    np.testing.assert_array_equal(out, x)
    assert (facts.halves, facts.missing, facts.flags) == (2, (), ())


@pytest.mark.parametrize(
    ("scale", "changes"),
    [
        (1e-3, {"gain": 1.0}),  # float millivolts
        (1e-6, {"gain": 1.0, "unit": "V"}),
        (1.0, {"gain": 1.0, "unit": "uV"}),
        (0.2, {"gain": 200.0}),
        (1.0, {"leads": [*LEADS]}),
    ],
)
def test_any_gain_and_unit_give_the_same_microvolts(scale, changes):
    x = ecg()
    np.testing.assert_array_equal(prepared(x * scale, **changes)[1], x)


@pytest.mark.parametrize("kind", [int, np.float32, np.int64, np.array])
def test_scales_are_numbers_of_any_kind(kind):
    x = ecg()
    _, out = prepared(x, gain=kind(1000), baseline=kind(0), invalid=-32768)
    np.testing.assert_array_equal(out, x)


def test_baseline_is_subtracted_before_the_gain_divides():
    steps, baselines = ecg() // 5, np.arange(12)
    signal = (steps + baselines[:, None]).astype(np.int32)
    _, out = prepared(signal, gain=200.0, baseline=tuple(baselines.tolist()))
    np.testing.assert_array_equal(out, steps * 5)


def test_leads_are_placed_by_name_and_absent_ones_are_listed():
    x, order = ecg(), [3, 1, 0, 11]
    names = [*(LEADS[i].lower() for i in order), "resp"]
    facts, out = prepared(x[[*order, 5]], leads=names)
    absent = [i for i in range(12) if i not in order]
    assert facts.missing == tuple(LEADS[i] for i in absent)
    x[absent] = 0
    np.testing.assert_array_equal(out, x)


def test_records_are_cut_from_their_start_and_remainders_follow_the_rule():
    x = ecg(2 * CROP + HALF + 100)
    counts = {HALF - 1: 0, HALF: 1, 2 * CROP + HALF - 1: 2, x.shape[1]: 3}
    assert {samples: crop_count(samples, 500.0) for samples in counts} == counts
    assert dropped_samples(x.shape[1], 500.0) == 100
    facts, out = prepared(x, 2, invalid=-32768)
    assert (facts.halves, facts.start_s) == (1, 20.0)
    np.testing.assert_array_equal(out[:, :HALF], x[:, 2 * CROP : 2 * CROP + HALF])
    assert not out[:, HALF:].any()
    with pytest.raises(ReadError, match="too short"):
        prepared(x, 3)


@pytest.mark.parametrize(
    ("dtype", "value", "invalid"),
    [
        ("i2", -32768, -32768),
        ("i2", 32767, 32767),
        ("f8", np.nan, None),
        ("i4", -(2**31), -(2**31)),
    ],
)
def test_a_lead_with_an_invalid_sample_is_zero_and_missing_in_that_crop_only(dtype, value, invalid):
    x = ecg(2 * CROP)
    signal = x.astype(dtype)
    signal[7, 123] = value
    x[7, :CROP] = 0
    for index, missing in ((0, ("V2",)), (1, ())):
        facts, out = prepared(signal, index, invalid=invalid)
        assert facts.missing == missing
        np.testing.assert_array_equal(out, x[:, index * CROP :][:, :CROP])


def test_the_lowest_int16_is_a_sample_unless_it_means_not_measured():
    x = ecg()
    x[8, 7] = -32768
    facts, out = prepared(x)
    assert (facts.missing, out[8, 7]) == ((), -32767)
    assert "saturated" in facts.flags
    assert prepared(x, invalid=-32768)[0].missing == ("V3",)


def with_gap(flat):
    """Nothing was measured for 0.2 s; some leads never change."""
    signal = ecg() / 1000
    signal[:flat] = 0
    signal[flat:, 700:800] = np.nan
    return signal


@pytest.mark.parametrize(
    ("signal", "why"),
    [
        (np.repeat(np.arange(12.0)[:, None], CROP, axis=1), "12 of 12 leads never change"),
        (
            with_gap(0),
            "12 of 12 leads have samples that were not measured .one leaves out the lead.",
        ),
        (with_gap(2), "10 of 12 leads have .*, 2 of 12 leads never change"),
    ],
)
def test_a_crop_without_a_valid_lead_is_refused(signal, why):
    with pytest.raises(ReadError, match=f"^no valid lead: at 0 s: {why}$"):
        prepared(signal, gain=1.0)


def test_unusual_crops_are_flagged():
    x = ecg()
    x[9] = 5
    x[2, 100] += 60
    assert set(prepared(x)[0].flags) == {"flat:V4", "einthoven"}
    big = ecg() / 1000.0
    big[8:10, 10] = 25.0, 1e9
    facts, out = prepared(big, gain=1.0)
    assert set(facts.flags) == {"large", "saturated"}
    assert out[8:10, 10].tolist() == [25000, 32767]


@pytest.mark.parametrize(
    ("uv", "flags"), [(20_000, ()), (20_001, ("large",)), (-20_000, ()), (-20_001, ("large",))]
)
def test_large_is_flagged_only_beyond_its_threshold(uv, flags):
    x = ecg()
    x[7, 100] = uv
    assert prepared(x)[0].flags == flags


@pytest.mark.parametrize("lead", range(2, 6))
@pytest.mark.parametrize("missing", [None, 0, 1, 2, 3, 4, 5, 6])
def test_einthoven_is_flagged_only_beyond_its_threshold(lead, missing):
    for uv in (20, 21, -20, -21):
        x = ecg()
        x[lead, 100] += uv
        if missing is not None:
            x[missing, 5] = -32768
        flagged = abs(uv) > 20 and missing not in (0, 1, lead)
        assert prepared(x, invalid=-32768)[0].flags == ("einthoven",) * flagged


INNER = slice(100, -100)  # away from the record's ends


def sines(hz, t):
    return np.sin(2 * np.pi * hz[:, None] * t)


@pytest.mark.parametrize("fs_hz", [100.0, 128.0, 240.0, 250.0, 257.0, 360.0, 400.0, 977.0, 1000.0])
def test_resampling_keeps_amplitude_and_phase_of_a_sine(fs_hz):
    """Amplitude and phase of sines well below both Nyquist rates, to 2 uV of 1 mV."""
    hz = np.array([0.5, 1, 2, 3, 5, 7, 9, 11, 13, 15, 17, 20])
    signal = sines(hz, np.arange(round(10 * fs_hz) + 3) / fs_hz)
    _, out = prepared(signal, fs_hz=fs_hz, gain=1.0)
    right = 1000 * sines(hz, np.arange(CROP) / FS_HZ)
    np.testing.assert_allclose(out[:, INNER], right[:, INNER], atol=4)


def test_resampling_suppresses_aliases():
    hz = np.array([5, *range(300, 410, 10)])
    _, out = prepared(sines(hz, np.arange(10_000) / 1000.0), fs_hz=1000.0, gain=1.0)
    assert np.abs(out[0, INNER]).max() > 990
    assert np.abs(out[1:, INNER]).max() < 10  # -40 dB


@pytest.mark.parametrize("fs_hz", [257.0, 400.0, 1000.0])
def test_a_crop_of_a_resampled_record_does_not_depend_on_the_cut(fs_hz):
    """Crop 1 of 30 s equals samples 5,000 to 9,999 of the same record resampled in one piece."""
    x = np.random.default_rng(3).normal(0, 1, (12, round(30 * fs_hz)))
    whole = np.rint(resample(x, *rate_ratio(fs_hz)) * 1000)
    for index in range(2):
        _, out = prepared(x, index, fs_hz=fs_hz, gain=1.0)
        np.testing.assert_array_equal(out, whole[:, index * CROP :][:, :CROP])
    assert whole.shape[1] == samples_at_500_hz(x.shape[1], fs_hz)


def test_resampling_keeps_a_constant_constant_up_to_both_ends():
    x = np.full((12, 2570), 0.7)
    x[11] = np.sin(np.arange(2570))
    _, out = prepared(x, fs_hz=257.0, gain=1.0)
    assert np.abs(out[:11] - 700).max() <= 1


@pytest.mark.parametrize("fs_hz", [499.999, 500.001])
@pytest.mark.parametrize("gain", [1000.0, 200.0])
def test_a_rate_that_rounds_to_500_counts_as_500(fs_hz, gain):
    """Whether the samples can be taken as they are or not."""
    facts, out = prepared(ecg(), fs_hz=fs_hz, gain=gain)
    plain_facts, plain = prepared(ecg(), gain=gain)
    assert facts == plain_facts
    np.testing.assert_array_equal(out, plain)


@pytest.mark.parametrize("fs_hz", [0.0, -500.0, 49.0, 2001.0, float("nan"), 499.99, float("inf")])
def test_impossible_rates_are_refused(fs_hz):
    with pytest.raises(ReadError, match="sampling rate"):
        crop_count(5000, fs_hz)


@pytest.mark.parametrize("gain", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_gains_are_refused(gain):
    with pytest.raises(ReadError, match="gain"):
        prepared(ecg(), gain=gain)


@pytest.mark.parametrize(
    ("start", "samples", "flagged"),
    [(0, 250, True), (0, 249, False), (4750, 250, True), (333, 250, True), (333, 249, False)],
)
def test_half_a_second_of_zeros_in_all_leads_is_flagged(start, samples, flagged):
    x = ecg()
    x[:, start : start + samples] = 0
    x[:, start + samples :] |= 2
    assert ("zeros" in prepared(x)[0].flags) == flagged
    x[7] = 4  # a flat lead, and one that was not measured
    assert ("zeros" in prepared(x)[0].flags) == flagged
    x[9, 5] = -32768
    assert ("zeros" in prepared(x, invalid=-32768)[0].flags) == flagged
    x[3, start + 100] = 1  # one sample of one lead
    assert "zeros" not in prepared(x, invalid=-32768)[0].flags


def test_zeros_of_another_rate_are_flagged_and_those_of_the_second_half_of_a_crop_are_not():
    x = ecg(1000)
    x[:, 300:400] = 0
    assert "zeros" in prepared(x, fs_hz=100.0)[0].flags
    assert prepared(ecg(3000))[0].flags == ()
