"""Describes an ECG without any training: the median beat of its leads, and the intervals between
beats.

A baseline for frozen embeddings. R peaks are found where the leads together change fastest, so a
blank lead does no harm.

    x_RLT [R, 12, T] at 500 Hz, uV or mV  ->  mean_beats(x_RLT) [R, 12 * BEAT + 8] float32

The beat runs from 0.25 s before R to 0.45 s after it, filtered to 0.5 to 40 Hz, at 100 Hz, with
unit length over all leads: two ECGs are compared by cosine of their first 12 * BEAT numbers. The
others are logarithms: size of the beat, mean and variation of the RR intervals, and residual of
each group of leads (I to III, aV, V1 to V3, V4 to V6) after subtracting the median beat.
"""

import numpy as np
from scipy import fft
from scipy.signal import find_peaks

from omnilead.data_tools.prepare import FS_HZ

STEP = FS_HZ // 100
BEFORE, AFTER = 25, 45  # samples at 100 Hz
BEAT = BEFORE + AFTER
SHIFT = 4  # samples at 100 Hz by which a beat may be moved onto the others
BAND_HZ, QRS_HZ = (0.5, 40.0), (5.0, 25.0)

Array = np.ndarray


def mean_beats(x_RLT: Array) -> Array:
    if not len(x_RLT):
        return np.zeros((0, 12 * BEAT + 8), np.float32)
    return np.stack([_mean_beat(x_LT) for x_LT in x_RLT])


def r_peaks(x_LT: Array) -> Array:
    """R peaks as sample indices, at least 0.3 s apart."""
    return _peaks(*_filtered(x_LT, QRS_HZ))


def _filtered(x_LT: Array, *bands_hz: tuple[float, float]) -> list[Array]:
    """Second-order Butterworth band-passes, forwards and backwards; half a second is mirrored at
    both ends."""
    pad = FS_HZ // 2
    before = 2 * x_LT[:, :1] - x_LT[:, pad:0:-1]
    after = 2 * x_LT[:, -1:] - x_LT[:, -2 : -2 - pad : -1]
    x = np.concatenate([before, x_LT, after], 1, dtype=np.float32)
    length = x.shape[1]
    spectrum = fft.rfft(x)
    freq_hz = np.maximum(fft.rfftfreq(length, 1 / FS_HZ), 1e-6)
    filtered = []
    for low, high in bands_hz:
        gain = 1 / ((1 + (low / freq_hz) ** 4) * (1 + (freq_hz / high) ** 4))
        band = fft.irfft(spectrum * gain.astype(np.float32), length)
        filtered.append(band[:, pad:-pad])
    return filtered


def _peaks(qrs_LT: Array) -> Array:
    speed = np.abs(np.diff(qrs_LT)).sum(0)
    window = FS_HZ // 12
    speed = np.convolve(speed, np.ones(window) / window, "same")
    seconds = [speed[start : start + FS_HZ].max() for start in range(0, len(speed), FS_HZ)]
    height = 0.45 * np.median(seconds)  # the tallest second may be a spike
    return np.asarray(find_peaks(speed, height=height, distance=int(0.3 * FS_HZ))[0])


def _mean_beat(x_LT: Array) -> Array:
    band, qrs = _filtered(x_LT, BAND_HZ, QRS_HZ)
    peaks, band = _peaks(qrs), band[:, ::STEP]
    within = np.round(peaks / STEP).astype(int)
    within = within[within >= BEFORE + SHIFT]
    within = within[within < band.shape[1] - AFTER - SHIFT]
    if not len(within):
        within = np.array([band.shape[1] // 2])
    beats_BLT = _aligned(band, within)
    beat_LT = np.median(beats_BLT, 0)
    beat_LT -= beat_LT.mean(1, keepdims=True)
    size = np.linalg.norm(beat_LT)
    residual = (beats_BLT - beat_LT).std((0, 2)).reshape(4, 3).mean(1)  # of the groups of leads
    rr_s = np.diff(peaks) / FS_HZ if len(peaks) > 2 else np.ones(2)
    numbers = [
        size,
        rr_s.mean(),
        0.02 + rr_s.std() / rr_s.mean(),
        0.02 + np.abs(np.diff(rr_s)).mean(),
        *(residual + 1e-3 * size),
    ]
    shape = (beat_LT / max(size, 1e-12)).ravel()
    return np.concatenate([shape, np.log(np.maximum(numbers, 1e-6))]).astype(np.float32)


def _aligned(band_LT: Array, peaks: Array) -> Array:
    """Beats [B, L, BEAT], each moved by up to SHIFT onto the median beat."""
    offset = np.arange(-BEFORE, AFTER)
    beats_BLT = band_LT[:, peaks[:, None] + offset].transpose(1, 0, 2)
    template = np.median(beats_BLT, 0)
    moves = np.arange(-SHIFT, SHIFT + 1)
    likeness = []
    for move in moves:
        moved_LBT = band_LT[:, (peaks + move)[:, None] + offset]
        likeness.append((moved_LBT * template[:, None]).sum((0, 2)))
    peaks = peaks + moves[np.argmax(likeness, axis=0)]
    return band_LT[:, peaks[:, None] + offset].transpose(1, 0, 2)
