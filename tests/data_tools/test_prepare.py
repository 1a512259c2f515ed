"""Records of any form become crops of one form: bit for bit if no conversion is needed, else right
to the last bit."""

import numpy as np
import pytest
from handmade import ecg

from omnilead.data_tools.dataset import CROP_SHAPE
from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.prepare import (
    CROP,
    FS_HZ,
    HALF,
    crop_count,
    dropped_s,
    prepare_crop,
    samples_at_500,
)
from omnilead.data_tools.record import LEADS, EcgRecord


def record(signal: np.ndarray, **changes: object) -> EcgRecord:
    given = {
        "name": "r",
        "signal": signal,
        "fs_hz": 500.0,
        "leads": LEADS,
        "gain": 1000.0,
    } | changes
    return EcgRecord(**given)  # type: ignore[arg-type]


def prepared(source: EcgRecord, index: int = 0):  # type: ignore[no-untyped-def]
    out = np.full(CROP_SHAPE, 77, np.int16)
    return prepare_crop(source, index, out), out


def test_canonical_samples_are_copied_bit_for_bit() -> None:
    x = ecg()
    facts, out = prepared(record(x, invalid=-32768))
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
def test_any_gain_and_unit_give_the_same_microvolts(
    scale: float, changes: dict[str, object]
) -> None:
    x = ecg()
    np.testing.assert_array_equal(prepared(record(x * scale, **changes))[1], x)


def test_baseline_is_subtracted_before_the_gain_divides() -> None:
    x = ecg()
    baselines = tuple(range(12))
    signal = x // 5 + np.array(baselines)[:, None]
    _, out = prepared(record(signal.astype(np.int32), gain=200.0, baseline=baselines))
    np.testing.assert_array_equal(out, x // 5 * 5)


def test_leads_are_placed_by_name_and_absent_ones_are_listed() -> None:
    x = ecg()
    order = [3, 1, 0, 11]
    facts, out = prepared(
        record(np.vstack([x[order], x[:1] + 9]), leads=(*(LEADS[i].lower() for i in order), "resp"))
    )
    np.testing.assert_array_equal(out[order], x[order])
    absent = [i for i in range(12) if i not in order]
    assert facts.missing == tuple(LEADS[i] for i in absent)
    assert not out[absent].any()


def test_records_are_cut_from_their_start_and_remainders_follow_the_rule() -> None:
    x = ecg(2 * CROP + HALF + 100)
    source = record(x, invalid=-32768)
    assert crop_count(x.shape[1], 500.0) == 3
    assert dropped_s(x.shape[1], 500.0) == pytest.approx(0.2)
    facts, out = prepared(source, 2)
    assert facts.halves == 1
    assert facts.start_s == 20.0
    np.testing.assert_array_equal(out[:, :HALF], x[:, 2 * CROP : 2 * CROP + HALF])
    assert not out[:, HALF:].any()
    assert crop_count(2 * CROP + HALF - 1, 500.0) == 2
    assert crop_count(HALF - 1, 500.0) == 0
    with pytest.raises(ReadError, match="too short"):
        prepared(source, 3)


@pytest.mark.parametrize("marker", ["int16", "nan", "wide"])
def test_a_lead_with_an_invalid_sample_is_zero_and_missing_in_that_crop_only(marker: str) -> None:
    x = ecg(2 * CROP)
    signal, invalid = {
        "int16": (x.copy(), -32768),
        "nan": (x / 1.0, np.nan),
        "wide": (x.astype(np.int32), -(2**31)),
    }[marker]
    signal[7, 123] = invalid
    source = record(signal, invalid=None if marker == "nan" else invalid)
    facts, out = prepared(source, 0)
    assert facts.missing == ("V2",)
    assert not out[7].any()
    np.testing.assert_array_equal(out[:7], x[:7, :CROP])
    facts, out = prepared(source, 1)
    assert facts.missing == ()
    np.testing.assert_array_equal(out, x[:, CROP:])


def test_the_lowest_int16_is_a_sample_unless_it_means_not_measured() -> None:
    x = ecg()
    x[8, 7] = -32768
    facts, out = prepared(record(x))
    assert (facts.missing, out[8, 7]) == ((), -32767) and "saturated" in facts.flags
    assert prepared(record(x, invalid=-32768))[0].missing == ("V3",)


@pytest.mark.parametrize(
    "signal", [np.repeat(np.arange(12.0)[:, None], CROP, axis=1), np.full((12, CROP), np.nan)]
)
def test_a_crop_without_a_valid_lead_is_refused(signal: np.ndarray) -> None:
    with pytest.raises(ReadError, match="no valid lead"):
        prepared(record(signal, gain=1.0))


def test_unusual_crops_are_flagged() -> None:
    x = ecg()
    x[9] = 5
    x[2, 100] += 60
    facts, _ = prepared(record(x))
    assert set(facts.flags) == {"flat:V4", "einthoven"}
    big = ecg() / 1000.0
    big[8, 10], big[9, 10] = 25.0, 1e9
    facts, out = prepared(record(big, gain=1.0))
    assert set(facts.flags) == {"large", "saturated"}
    assert out[9, 10] == 32767
    assert out[8, 10] == 25000


@pytest.mark.parametrize(
    ("uv", "flags"), [(20_000, ()), (20_001, ("large",)), (-20_000, ()), (-20_001, ("large",))]
)
def test_large_is_flagged_only_beyond_its_threshold(uv: int, flags: tuple[str, ...]) -> None:
    x = ecg()
    x[7, 100] = uv
    assert prepared(record(x))[0].flags == flags


@pytest.mark.parametrize("lead", range(2, 6))
@pytest.mark.parametrize("missing", [None, 0, 1, 2, 3, 4, 5, 6])
def test_einthoven_is_flagged_only_beyond_its_threshold(lead: int, missing: int | None) -> None:
    for uv in (20, 21, -20, -21):
        x = ecg()
        x[lead, 100] += uv
        if missing is not None:
            x[missing, 5] = -32768
        flags = prepared(record(x, invalid=-32768))[0].flags
        assert flags == (("einthoven",) if abs(uv) > 20 and missing not in (0, 1, lead) else ())


@pytest.mark.parametrize("fs_hz", [100.0, 128.0, 240.0, 250.0, 257.0, 360.0, 400.0, 977.0, 1000.0])
def test_resampling_keeps_amplitude_and_phase_of_a_sine(fs_hz: float) -> None:
    """Amplitude and phase of sines well below both Nyquist rates, to 2 uV of 1 mV, away from the
    record's ends."""
    t, t_500 = np.arange(round(10 * fs_hz) + 3) / fs_hz, np.arange(CROP) / FS_HZ
    hz = np.array([0.5, 1, 2, 3, 5, 7, 9, 11, 13, 15, 17, 20])[:, None]
    _, out = prepared(record(np.sin(2 * np.pi * hz * t), fs_hz=fs_hz, gain=1.0))
    inner = slice(100, -100)
    np.testing.assert_allclose(
        out[:, inner], 1000 * np.sin(2 * np.pi * hz * t_500)[:, inner], atol=4
    )


def test_resampling_suppresses_aliases() -> None:
    t = np.arange(10_000) / 1000.0
    x = np.stack(
        [np.sin(2 * np.pi * 5 * t)] + [np.sin(2 * np.pi * (300 + 10 * k) * t) for k in range(11)]
    )
    _, out = prepared(record(x, fs_hz=1000.0, gain=1.0))
    assert np.abs(out[0, 100:-100]).max() > 990
    assert np.abs(out[1:, 100:-100]).max() < 10  # -40 dB


@pytest.mark.parametrize("fs_hz", [257.0, 400.0, 1000.0])
def test_a_crop_of_a_resampled_record_does_not_depend_on_the_cut(fs_hz: float) -> None:
    """Crop 1 of 30 s equals samples 5,000 to 9,999 of the same record resampled in one piece."""
    rng = np.random.default_rng(3)
    x = rng.normal(0, 1, (12, round(30 * fs_hz)))
    _, first = prepared(record(x, fs_hz=fs_hz, gain=1.0), 0)
    _, middle = prepared(record(x, fs_hz=fs_hz, gain=1.0), 1)
    from omnilead.data_tools.prepare import rate_ratio, resample

    whole = np.rint(resample(x, *rate_ratio(fs_hz)) * 1000)
    np.testing.assert_array_equal(first, whole[:, :CROP])
    np.testing.assert_array_equal(middle, whole[:, CROP : 2 * CROP])
    assert whole.shape[1] == samples_at_500(x.shape[1], fs_hz)


def test_resampling_keeps_a_constant_constant_up_to_both_ends() -> None:
    x = np.full((12, 2570), 0.7)
    x[11] = np.sin(np.arange(2570))
    _, out = prepared(record(x, fs_hz=257.0, gain=1.0))
    assert np.abs(out[:11] - 700).max() <= 1


@pytest.mark.parametrize("fs_hz", [499.999, 500.001])
@pytest.mark.parametrize("gain", [1000.0, 200.0])
def test_a_rate_that_rounds_to_500_counts_as_500(fs_hz: float, gain: float) -> None:
    """Whether the samples can be taken as they are or not."""
    x = ecg()
    (facts, out), (plain_facts, plain) = (
        prepared(record(x, fs_hz=fs_hz, gain=gain)),
        prepared(record(x, gain=gain)),
    )
    assert facts == plain_facts
    np.testing.assert_array_equal(out, plain)


@pytest.mark.parametrize("fs_hz", [0.0, -500.0, 49.0, 2001.0, float("nan"), 499.99, float("inf")])
def test_impossible_rates_and_gains_are_refused(fs_hz: float) -> None:
    with pytest.raises(ReadError, match="sampling rate"):
        crop_count(5000, fs_hz)
    for gain in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ReadError, match="gain"):
            prepared(record(ecg(), gain=gain))
