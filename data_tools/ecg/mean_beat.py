"""Describe an ECG by its median beat, the size of that beat, and the rhythm, without a trained model.

    mean_beats(x_RLT)        # [R, 12 * BEAT_SAMPLES + 8]: a baseline for frozen embeddings
    measurements(x_RLT)      # [R, len(MEASUREMENTS)]: what the read-out `rhythm` adds to an embedding
    rate_and_axis(x_LT)      # "63/min, QRS axis 45\u00b0": what `omnilead show` writes

x_RLT [R, 12, T] at 500 Hz, in millivolts (microvolts for mean_beats will do). R peaks are found
where the leads together change fastest, so a blank lead does no harm. The beat runs from 0.25 s
before R to 0.45 s after it, filtered to 0.5 to 40 Hz, at 100 Hz.

The mean beat has unit length over all leads: two ECGs are compared by cosine of their first
12 * BEAT_SAMPLES numbers. Its last 8 are RHYTHM_MEASUREMENTS: logarithms of the beat's size, of the mean, the variation
and the change of the RR intervals, and of what is left of each group of leads after subtracting
the median beat. The measurements are RHYTHM_MEASUREMENTS and, for each lead, the heights of the waves.
"""

from collections.abc import Collection, Iterator

import numpy as np
from scipy import fft

from .constants import LEADS
from .resampling import FS_HZ

DECIMATION = FS_HZ // 100
BEFORE_R, AFTER_R = 25, 45  # samples of a beat at 100 Hz, before and after its R peak
BEAT_SAMPLES = BEFORE_R + AFTER_R
MAX_SHIFT = 4  # samples at 100 Hz by which a beat may be moved to match the median beat
BEAT_BAND_HZ = (0.5, 40.0)
QRS_BAND_HZ = (5.0, 25.0)  # for finding R peaks
RHYTHM_MEASUREMENTS = (
    "beat size",
    "RR mean",
    "RR variation",
    "RR change",
    "residual I to III",
    "residual aV",
    "residual V1 to V3",
    "residual V4 to V6",
)
# Slices of a beat's samples at 100 Hz
BEFORE_QRS = slice(BEFORE_R - 8, BEFORE_R - 6)
QRS = slice(BEFORE_R - 6, BEFORE_R + 8)
ST = slice(BEFORE_R + 6, BEFORE_R + 10)
T_WAVE = slice(BEFORE_R + 13, BEFORE_R + 40)
WAVES = ("R", "S", "T", "T trough", "ST")
# The beats that were found do not count as heartbeats if the QRS of their median is under MIN_QRS_MV in
# all leads, or if they differ from this median beat by more than MAX_UNLIKENESS times its size. In 1,014
# real ECGs the smallest QRS had 0.7 mV and the largest difference was 1.7 times; for white noise it is 2.9
MIN_QRS_MV, MAX_UNLIKENESS = 0.1, 2.0
# A median heart rate outside these limits, over MIN_RATED_ECGS to MAX_RATED_ECGS ECGs of one source,
# leads to a warning that asks whether the sampling rate is right. Resting adults have some 60 to 80 beats a
# minute, athletes and patients on beta blockers 50 to 55, children of two years 110. Read with half
# the true sampling rate, ECGs of adults seem to have 30 to 48, with twice the rate 113 to 150.
# Newborns have 140, so the warning comes for them, too. The medians over 20 ECGs each of PTB-XL and
# of the Challenge's databases were 59 to 104.
PLAUSIBLE_HEART_RATES = 50, 110
MIN_RATED_ECGS, MAX_RATED_ECGS = 20, 50
MEASUREMENTS = (*RHYTHM_MEASUREMENTS, *(f"{wave} {lead}" for wave in WAVES for lead in LEADS))

Array = np.ndarray


def mean_beats(x_RLT: Array) -> Array:
    """Return the median beat of each ECG, scaled to unit length, followed by its RHYTHM_MEASUREMENTS."""
    rows = []
    for x_LT in x_RLT:
        beat_LT, rhythm = median_beat_and_rhythm(x_LT)
        size = max(np.linalg.norm(beat_LT), 1e-12)
        rows.append(np.concatenate([(beat_LT / size).ravel(), rhythm]))
    return np.array(rows, np.float32).reshape(
        len(x_RLT), 12 * BEAT_SAMPLES + len(RHYTHM_MEASUREMENTS)
    )


def measurements(x_RLT: Array) -> Array:
    """Return the MEASUREMENTS of each ECG [R, len(MEASUREMENTS)]: RHYTHM_MEASUREMENTS, and the heights of
    the waves in millivolts."""
    rows = []
    for x_LT in x_RLT:
        beat_LT, rhythm = median_beat_and_rhythm(x_LT)
        qrs_LT = beat_LT[:, QRS]
        t_LT = beat_LT[:, T_WAVE]
        st_L = beat_LT[:, ST].mean(1)
        heights = [qrs_LT.max(1), qrs_LT.min(1), t_LT.max(1), t_LT.min(1), st_L]
        rows.append(np.concatenate([rhythm, *heights]))
    return np.array(rows, np.float32).reshape(len(x_RLT), len(MEASUREMENTS))


def rate_and_axis(x_LT: Array, missing: Collection[str] = ()) -> str:
    """Return heart rate and electrical axis as text, or the reason why they cannot be told. The rate is
    that of the mean RR interval; the axis in the frontal plane follows from the net deflection of the
    QRS in leads I and aVF. `x_LT` is in millivolts."""
    peaks = r_peaks(x_LT)
    if len(peaks) < 3:
        return f"no heart rate or axis: {len(peaks)} beats found, 3 are needed"
    beat_LT, rhythm = median_beat_and_rhythm(x_LT)
    if not _beats_agree(beat_LT, rhythm):
        return "no heart rate or axis: no beats that are alike"
    return f"{_beats_per_minute(peaks):.0f}/min, {_axis_text(beat_LT, missing)}"


def heart_rate(x_LT: Array) -> float | None:
    """Return the heart rate in beats a minute; None if fewer than three beats are found, if their
    QRS is too small, or if they differ too much. `x_LT` is in millivolts."""
    peaks = r_peaks(x_LT)
    if len(peaks) < 3 or not _beats_agree(*median_beat_and_rhythm(x_LT)):
        return None
    return _beats_per_minute(peaks)


class HeartRates:
    """Collects the heart rates of some ECGs of each source, to find wrong sampling rates."""

    def __init__(self) -> None:
        self.of_source: dict[str, list[float | None]] = {}

    def add(self, source: str, uv_LT: Array) -> None:
        """Adds the heart rate of an ECG of this source, unless MAX_RATED_ECGS of the source were added before.
        `uv_LT` is in microvolts at 500 Hz."""
        rates = self.of_source.setdefault(source, [])
        if len(rates) < MAX_RATED_ECGS:
            rates.append(heart_rate(uv_LT / np.float32(1000)))

    def warnings(self) -> Iterator[str]:
        """Yields a warning for each source whose median heart rate is implausible."""
        low, high = PLAUSIBLE_HEART_RATES
        for source, rates in self.of_source.items():
            found = [rate for rate in rates if rate]
            if (
                len(found) >= MIN_RATED_ECGS
                and not low <= (median := float(np.median(found))) <= high
            ):
                yield (
                    f"{source}: median heart rate {median:.0f} a minute in {len(found)} ECGs: is the "
                    "sampling rate right?"
                )


def _beats_per_minute(peaks: Array) -> float:
    return float(60 * FS_HZ / np.diff(peaks).mean())


def _beats_agree(beat_LT: Array, rhythm: Array) -> bool:
    """True if the median beat looks like a heartbeat: its QRS is tall enough, and the beats resemble it."""
    size = np.exp(rhythm[0])
    unlike = np.exp(rhythm[4:]).mean() * np.sqrt(beat_LT.size) / size
    return bool(np.ptp(beat_LT[:, QRS], axis=1).max() >= MIN_QRS_MV and unlike <= MAX_UNLIKENESS)


def _axis_text(beat_LT: Array, missing: Collection[str]) -> str:
    absent = [lead for lead in ("I", "aVF") if lead in missing]
    if absent:
        return f"no axis: {' and '.join(absent)} missing"
    qrs_LT = beat_LT[:, QRS] - beat_LT[:, BEFORE_QRS].mean(1, keepdims=True)
    net_L = qrs_LT.max(1) + qrs_LT.min(1)
    net_i, net_avf = net_L[LEADS.index("I")], net_L[LEADS.index("aVF")]
    if np.hypot(net_i, net_avf) < MIN_QRS_MV:
        return "no axis: the QRS is as much up as down in I and aVF"
    # aVF is sqrt(3) / 2 times as large as a bipolar limb lead, which the factor undoes
    degrees = np.degrees(np.arctan2(2 / np.sqrt(3) * net_avf, net_i))
    return f"QRS axis {degrees:.0f}\u00b0"


def r_peaks(x_LT: Array) -> Array:
    """Return the sample indices of the R peaks, at least 0.3 s apart."""
    return _peaks_of_qrs(*_filter_bands(x_LT, QRS_BAND_HZ))


def median_beat_and_rhythm(x_LT: Array) -> tuple[Array, Array]:
    """Return (the median beat [L, BEAT_SAMPLES] with the mean of each lead subtracted, the
    RHYTHM_MEASUREMENTS)."""
    band_LT, qrs_LT = _filter_bands(x_LT, BEAT_BAND_HZ, QRS_BAND_HZ)
    band_LT = band_LT[:, ::DECIMATION]
    peaks = _peaks_of_qrs(qrs_LT)
    whole = np.round(peaks / DECIMATION).astype(int)
    whole = whole[whole >= BEFORE_R + MAX_SHIFT]
    whole = whole[whole < band_LT.shape[1] - AFTER_R - MAX_SHIFT]
    if not len(whole):
        whole = np.array([band_LT.shape[1] // 2])
    beats_BLT = _align_beats(band_LT, whole)
    beat_LT = np.median(beats_BLT, 0)
    beat_LT -= beat_LT.mean(1, keepdims=True)
    size = np.linalg.norm(beat_LT)
    residual_L = (beats_BLT - beat_LT).std((0, 2))
    residual = residual_L.reshape(4, 3).mean(1)  # the mean of each group of three leads
    rr_s = np.diff(peaks) / FS_HZ if len(peaks) > 2 else np.ones(2)
    mean_s = rr_s.mean()
    variation = 0.02 + rr_s.std() / mean_s
    change = 0.02 + np.abs(np.diff(rr_s)).mean()
    rhythm = np.array([size, mean_s, variation, change, *(residual + 1e-3 * size)])
    return beat_LT, np.log(np.maximum(rhythm, 1e-6))


def _filter_bands(x_LT: Array, *bands_hz: tuple[float, float]) -> list[Array]:
    """Return the signal filtered to each band: second-order Butterworth, forwards and backwards. To
    avoid edge effects, the signal is first extended by its mirror image of half a second at both
    ends."""
    pad = FS_HZ // 2
    before = 2 * x_LT[:, :1] - x_LT[:, pad:0:-1]
    after = 2 * x_LT[:, -1:] - x_LT[:, -2 : -2 - pad : -1]
    x = np.concatenate([before, x_LT, after], 1, dtype=np.float32)
    length = x.shape[1]
    spectrum = fft.rfft(x)
    freq_hz = np.maximum(fft.rfftfreq(length, 1 / FS_HZ), 1e-6)
    filtered = []
    for low, high in bands_hz:
        above = 1 + (low / freq_hz) ** 4
        below = 1 + (freq_hz / high) ** 4
        gain = 1 / (above * below)
        band = fft.irfft(spectrum * gain.astype(np.float32), length)
        filtered.append(band[:, pad:-pad])
    return filtered


def _peaks_of_qrs(qrs_LT: Array) -> Array:
    # Imported here, because the import takes 0.6 CPU-s and only the analysis of beats needs it
    from scipy.signal import find_peaks

    speed = np.abs(np.diff(qrs_LT)).sum(0)
    window = FS_HZ // 12
    speed = np.convolve(speed, np.ones(window) / window, "same")
    tallest = [speed[start : start + FS_HZ].max() for start in range(0, len(speed), FS_HZ)]
    # The median over seconds, because the largest value of all may be an artefact
    height = 0.45 * np.median(tallest)
    found, _ = find_peaks(speed, height=height, distance=int(0.3 * FS_HZ))
    return np.asarray(found)


def _align_beats(band_LT: Array, peaks: Array) -> Array:
    """Return the beats [B, L, BEAT_SAMPLES] around the peaks, each moved by up to MAX_SHIFT samples to
    where it best matches the median beat."""
    offset = np.arange(-BEFORE_R, AFTER_R)
    beats_LBT = band_LT[:, peaks[:, None] + offset]
    template_LT = np.median(beats_LBT, 1)
    moves = np.arange(-MAX_SHIFT, MAX_SHIFT + 1)
    likeness = []
    for move in moves:
        moved_LBT = band_LT[:, (peaks + move)[:, None] + offset]
        likeness.append((moved_LBT * template_LT[:, None]).sum((0, 2)))
    best = np.argmax(likeness, axis=0)
    peaks = peaks + moves[best]
    beats_LBT = band_LT[:, peaks[:, None] + offset]
    return beats_LBT.transpose(1, 0, 2)
