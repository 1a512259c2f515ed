"""Median beats and intervals against ECGs whose beats are known."""

import numpy as np
import pytest

from omnilead.engine.evaluation.mean_beat import BEAT, BEFORE, mean_beats, r_peaks

T_S = np.arange(5000) / 500


def ecg(beats_s: np.ndarray, noise: float = 0.0, leads: int = 12) -> np.ndarray:
    """[12, 5000] uV: R and T of every beat, lead i with its own sizes."""
    rng = np.random.default_rng(3)
    r = sum(np.exp(-0.5 * ((T_S - at) / 0.010) ** 2) for at in beats_s)
    t = sum(np.exp(-0.5 * ((T_S - at - 0.25) / 0.040) ** 2) for at in beats_s)
    x = np.outer(rng.uniform(-1000, 1000, 12), r) + np.outer(rng.uniform(-200, 200, 12), t)
    x[leads:] = 0
    return x + noise * rng.normal(size=x.shape) * (np.arange(12) < leads)[:, None]


REGULAR = np.arange(0.4, 10, 0.8)


@pytest.mark.parametrize("leads", [1, 12])
def test_peaks_are_where_the_beats_are(leads: int) -> None:
    found = r_peaks(ecg(REGULAR, 30, leads)) / 500
    assert len(found) == len(REGULAR)
    assert np.abs(found - REGULAR).max() < 0.02


def test_beats_depend_on_shape_but_not_on_size_or_noise() -> None:
    first, noisy, twice, other = mean_beats(
        np.stack([ecg(REGULAR), ecg(REGULAR, 40), 2 * ecg(REGULAR), ecg(REGULAR)[::-1]]).astype(
            np.float32
        )
    )
    shapes = np.stack([first, noisy, twice, other])[:, : 12 * BEAT]
    assert np.allclose(np.linalg.norm(shapes, axis=1), 1, atol=1e-5)
    cosine = shapes @ shapes[0]
    assert cosine[1] > 0.95 and cosine[2] > 0.9999 and cosine[3] < 0.7
    assert abs(np.abs(shapes[0].reshape(12, BEAT)).max(0).argmax() - BEFORE) <= 1
    assert twice[12 * BEAT] - first[12 * BEAT] == pytest.approx(np.log(2), abs=1e-3)


def test_intervals() -> None:
    irregular = np.cumsum(np.tile([0.6, 1.0], 6)) - 0.3
    same, mixed = mean_beats(np.stack([ecg(REGULAR), ecg(irregular)]))[:, 12 * BEAT :]
    assert same[1] == pytest.approx(np.log(0.8), abs=0.01) and mixed[1] == pytest.approx(
        np.log(0.8), abs=0.03
    )
    assert same[2] < np.log(0.04) and mixed[2] == pytest.approx(np.log(0.02 + 0.25), abs=0.1)


def test_leads_and_records_without_a_beat_are_finite() -> None:
    assert np.isfinite(
        mean_beats(np.stack([np.zeros((12, 5000)), ecg(REGULAR, leads=1), ecg(REGULAR[:1])]))
    ).all()
    assert mean_beats(np.zeros((2, 12, 2500), np.float32)).shape == (2, 12 * BEAT + 8)
    assert mean_beats(np.zeros((0, 12, 5000))).shape == (0, 12 * BEAT + 8)
