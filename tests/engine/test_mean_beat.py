"""Median beats and intervals against ECGs whose beats are known."""

import numpy as np
import pytest

from omnilead.engine.inference.mean_beat import BEAT, BEFORE, mean_beats, r_peaks

T_S = np.arange(5000) / 500
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
    shapes, (size, _, twice, _) = found[:, : 12 * BEAT], found[:, 12 * BEAT]
    np.testing.assert_allclose(np.linalg.norm(shapes, axis=1), 1, atol=1e-5)
    _, noisy, large, other = shapes @ shapes[0]
    assert noisy > 0.95 and large > 0.9999 and other < 0.7
    assert abs(np.abs(shapes[0].reshape(12, BEAT)).max(0).argmax() - BEFORE) <= 1
    assert twice - size == pytest.approx(np.log(2), abs=1e-3)


def test_intervals():
    irregular = np.cumsum(np.tile([0.6, 1.0], 6)) - 0.3
    same, mixed = mean_beats(np.stack([ecg(), ecg(irregular)]))[:, 12 * BEAT :]
    assert same[1] == pytest.approx(np.log(0.8), abs=0.01) and same[2] < np.log(0.04)
    assert mixed[1] == pytest.approx(np.log(0.8), abs=0.03)
    assert mixed[2] == pytest.approx(np.log(0.02 + 0.25), abs=0.1)


def test_leads_and_records_without_a_beat_are_finite():
    unusual = np.stack([np.zeros((12, 5000)), ecg(leads=1), ecg(REGULAR[:1])])
    assert np.isfinite(mean_beats(unusual)).all()
    for n in (0, 2):
        assert mean_beats(np.zeros((n, 12, 2500))).shape == (n, 12 * BEAT + 8)
