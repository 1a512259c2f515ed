"""Simulate the ECGs of `synth`: a moving heart dipole is projected through each patient's own torso, in
closed form. In each session the electrodes have moved a little.

    draw_patients -> patient's kernels -> _wave_vectors -> findings -> one beat [3 axes, time]
    beat at every R peak, wander, mains -> x lead field [8, 3 dipole + 3 wander + 1 mains]
                                        -> + noise -> integer uV -> 12 leads

USUAL_FINDING_SHARE, SESSION_JITTER and the spread of patients are set so that two sessions are as alike, and two
people as different, as in PTB-XL. Synthetic and real: same rhythm .68, .68; same set of diagnoses
.44, .44; cosine of 12-lead median beats with the patient's other session .90, .88, between people
with normal ECGs .67, .68, between any people .31, .50 (four in five have a finding here, half of
them in PTB-XL); own session is the most similar of 438 for .51, .55.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .patients import (
    BLOCK_PATIENTS,
    DISEASE_KEY,
    KERNELS,
    NOISE_KEY,
    SESSION_KEY,
    BlockDraws,
    Findings,
    Key,
    Names,
    SyntheticPatients,
    WaveShape,
    draw_findings,
)

SESSION_JITTER = 2.0  # multiplies the changes of waves, heart axis and lead field between sessions
# The strength of noise is drawn anew every NOISE_KNOT_S seconds, and interpolated in between. Its
# logarithm has the standard deviation NOISE_LOG_STRENGTH_SD
NOISE_KNOT_S = 2.5
NOISE_LOG_STRENGTH_SD = 0.5
# By how much the logarithm of a wave's gain changes from session to session, as standard deviation
_WAVE_LOG_GAIN_SD = {"P": 0.06, "QRS": 0.03, "T": 0.10}
# When each wave starts and ends, in seconds from its centre, and when a beat does, in seconds from R
_SPAN_S = {
    "P": (-0.12, 0.12),
    "QRS": (-0.12, 0.18),
    "T": (-0.22, 0.22),
    "beat": (-0.46, 0.80),
}
# The kinds of beats, as indices
_NORMAL = 0
_ATRIAL = 1
_VENTRICULAR = 2
# Ranges of the heart rate. Neighbouring ranges touch or overlap, so that borderline cases occur, such as a
# sinus bradycardia of 60 beats a minute
_RATES_BPM = {
    "SB": (38, 60),
    "STach": (99, 148),
    "Brady": (34, 49),
    "AF": (60, 140),
    "PR": (60, 74),
    "SA": (58, 85),
}


@dataclass(frozen=True)
class Recordings:
    """The ECGs of one session, one for each patient that was asked for."""

    digital: np.ndarray  # int16 [records, samples, 12 leads], in microvolts
    present: Findings  # the findings that the signals show
    rate_bpm: np.ndarray


@dataclass(frozen=True)
class _Session:
    """A session of a block of patients. In the shapes of arrays, BLOCK is BLOCK_PATIENTS."""

    patients: SyntheticPatients
    rng: BlockDraws  # for what is drawn anew in each session
    own: BlockDraws  # for how a disease looks in the ECG; it draws the same in every session
    has: Findings
    field: np.ndarray  # lead field [BLOCK, 8 leads, 3 axes]
    fs_hz: int


class _Rhythm(NamedTuple):
    """The beats of a session's records. BLOCK is BLOCK_PATIENTS."""

    peak_s: np.ndarray  # times of the R peaks [BLOCK, beats]
    kind: np.ndarray  # _NORMAL, _ATRIAL or _VENTRICULAR [BLOCK, beats]
    amplitude: np.ndarray  # factor by which breathing changes each beat [BLOCK, beats]
    mean_s: np.ndarray  # mean RR interval [BLOCK]
    flutter_hz: np.ndarray  # rate of flutter waves [BLOCK]


class _Disturbance(NamedTuple):
    """The noise of a session's records: four sine waves (three slow ones from breathing and electrodes, and
    power line hum), and muscle noise. BLOCK is BLOCK_PATIENTS."""

    gain_mv: np.ndarray  # amplitude of each sine wave in each lead [BLOCK, 8 leads, 4]
    freq_hz: np.ndarray  # frequency of each sine wave [BLOCK, 4]
    phase: np.ndarray  # phase of each sine wave, in turns [BLOCK, 4]
    noise_mv: np.ndarray  # amplitude of muscle noise [BLOCK, 8 leads]
    # Logarithm of the strength of slow waves and of muscle noise at each knot of a record
    log_strength: np.ndarray  # [BLOCK, 2, knots]


def _heart_and_flutter_rates(session: _Session, has: Findings) -> tuple[np.ndarray, np.ndarray]:
    """Returns (heart rates in beats a minute, flutter rates in Hz), each [BLOCK_PATIENTS, 1]."""
    rng = session.rng
    rate_bpm = session.patients.rate_bpm[:, None] + 5 * rng.gauss(1)
    rate_bpm = np.clip(rate_bpm, 59, 101)
    for name, (low, high) in _RATES_BPM.items():
        drawn = rng.between(low, high, 1)
        rate_bpm = np.where(has[name], drawn, rate_bpm)
    flutter_hz = rng.between(4.3, 5.4, 1)
    conducted = rng.integers(2, 5, (BLOCK_PATIENTS, 1))
    rate_bpm = np.where(has["AFL"], 60 * flutter_hz / conducted, rate_bpm)
    return rate_bpm, flutter_hz


def _draw_rhythm(session: _Session, dur_s: float) -> _Rhythm:
    """Draw the beats of records of `dur_s` seconds."""
    rng = session.rng
    has = {name: mask[:, None] for name, mask in session.has.items()}
    rate_bpm, flutter_hz = _heart_and_flutter_rates(session, has)
    mean_s = 60 / rate_bpm
    beats = np.arange(int(dur_s / 0.28) + 8)  # enough, as no mean RR interval is below 0.28 s
    clocked = has["PR"] | has["AFL"]
    arrhythmic = rng.between(0.12, 0.22, 1)
    normal = rng.between(0.005, 0.03, 1)
    swing = np.where(has["SA"], arrhythmic, np.where(clocked, 0, normal))
    breath_hz = rng.between(0.18, 0.3, 1)
    phase = rng.between(0, 2 * np.pi, 1)
    breathing = np.sin(2 * np.pi * (breath_hz * mean_s) * beats + phase)
    jitter = np.where(clocked, 0, 0.008) * rng.gauss(len(beats))
    rr_s = mean_s * (1 + swing * breathing + jitter)
    disordered_s = _fibrillating_s(rng, mean_s, len(beats))
    rr_s = np.where(has["AF"], disordered_s, rr_s)
    kind = _make_premature(rng, has, rr_s, mean_s, beats)
    start_s = rng.between(0.2, 1.0, 1)
    peak_s = np.cumsum(rr_s, 1) - rr_s[:, :1] - start_s
    amplitude = 1 + 0.05 * breathing
    return _Rhythm(peak_s, kind, amplitude, mean_s[:, 0], flutter_hz[:, 0])


def _fibrillating_s(rng: BlockDraws, mean_s: np.ndarray, beats: int) -> np.ndarray:
    """Draw the RR intervals of atrial fibrillation: independent of each other, with a coefficient of
    variation of 0.22 before clipping."""
    shape = 1 / 0.22**2
    factor = rng.gamma(shape, 1 / shape, (BLOCK_PATIENTS, beats))
    factor = np.clip(factor, 0.45, 2.2)
    rr_s: np.ndarray = mean_s * factor
    return rr_s.clip(min=0.30)


def _make_premature(
    rng: BlockDraws, has: Findings, rr_s: np.ndarray, mean_s: np.ndarray, beats: np.ndarray
) -> np.ndarray:
    """Change the RR intervals `rr_s` of patients with ectopic beats in place: every n-th beat comes early, and
    the one after it late. Return the kind of each beat."""
    first = rng.integers(2, 5, (BLOCK_PATIENTS, 1))
    every = rng.integers(2, 7, (BLOCK_PATIENTS, 1))
    turn = (beats >= first) & ((beats - first) % every == 0)
    early = turn & (has["PAC"] | has["PVC"])
    ectopic = np.where(has["PVC"], _VENTRICULAR, _ATRIAL)
    kind = np.where(early, ectopic, _NORMAL)
    prematurity = rng.between(0.55, 0.72, len(beats))
    rr_s[:, 1:] *= np.where(early, prematurity, 1)[:, 1:]
    # The pause is fully compensatory only after a ventricular beat
    pause = np.where(kind == _VENTRICULAR, 2 - prematurity, 1.05)
    pause_s = mean_s * pause
    rr_s[:, 1:] = np.where(early[:, :-1], pause_s[:, :-1], rr_s[:, 1:])
    return kind


def _window_of_wave_s(wave: str, fs_hz: int) -> np.ndarray:
    """Return the times of a wave's samples, in seconds from its centre."""
    first, last = (round(edge_s * fs_hz) for edge_s in _SPAN_S[wave])
    return (np.arange(first, last + 1) / fs_hz).astype(np.float32)


def _gaussian_bells(
    window_s: np.ndarray, centre_s: np.ndarray | float, width_s: np.ndarray | float
) -> np.ndarray:
    """Return Gaussian curves of height 1 at the times `window_s`: float32 [..., len(window_s)]."""
    centre = np.asarray(centre_s, np.float32)[..., None]
    width = np.asarray(width_s, np.float32)[..., None]
    distance = (window_s - centre) / width
    bell: np.ndarray = np.exp(np.float32(-0.5) * distance**2)
    return bell


def _wave_vectors(
    wave: str, shape: WaveShape, fs_hz: int, stretch: np.ndarray | float
) -> np.ndarray:
    """Return a wave of every patient on the three Frank axes: float32 [BLOCK_PATIENTS, 3, window]."""
    axis, centre_s, width_s, amp_mv = KERNELS[wave]
    scale = np.reshape(stretch, (-1, 1))
    centre_s = (centre_s + shape.shift_s) * scale
    width_s = width_s * shape.width * scale
    bells = _gaussian_bells(_window_of_wave_s(wave, fs_hz), centre_s, width_s)
    height_mv = amp_mv * shape.gain
    bells *= height_mv.astype(np.float32)[..., None]
    is_on_axis = axis == np.arange(3)[:, None]
    waves: np.ndarray = is_on_axis.astype(np.float32) @ bells
    return waves


def _rotation(angles_rad: np.ndarray) -> np.ndarray:
    """Return rotation matrices [n, 3, 3] for angles [n, 3] about the axes X, Y, Z."""
    cx, cy, cz = np.cos(angles_rad).T
    sx, sy, sz = np.sin(angles_rad).T
    matrix = [
        cy * cz,
        -cy * sz,
        sy,
        cx * sz + sx * sy * cz,
        cx * cz - sx * sy * sz,
        -sx * cy,
        sx * sz - cx * sy * cz,
        sx * cz + cx * sy * sz,
        cx * cy,
    ]
    return np.stack(matrix, 1).reshape(-1, 3, 3).astype(np.float32)


def _rotation_about_z(angle_rad: np.ndarray) -> np.ndarray:
    return _rotation(np.outer(angle_rad, [0, 0, 1]))


def _add_bell(wave: np.ndarray, mask: np.ndarray, vector: np.ndarray, bell: np.ndarray) -> None:
    """Add a Gaussian curve in the direction `vector` to the `wave` of the patients in `mask`, in place.
    `vector` is [BLOCK_PATIENTS, 3]; `bell` is [window], or [BLOCK_PATIENTS, window]."""
    wave[mask] += (vector[:, :, None] * bell[..., None, :])[mask]


class _QrsSizedVectors:
    """Makes vectors [BLOCK_PATIENTS, 3] in a given direction, scaled by the height of each patient's QRS."""

    def __init__(self, own: BlockDraws, qrs: np.ndarray) -> None:
        self.own = own
        self.top_mv = np.abs(qrs).max((1, 2))[:, None]

    def __call__(
        self, x: float, y: float, z: float, spread: Sequence[float] = (0, 0, 0)
    ) -> np.ndarray:
        direction = np.array([x, y, z]) + self.own.gauss(3) * spread
        vector: np.ndarray = (direction * self.top_mv).astype(np.float32)
        return vector


def _add_bundle_branches(
    session: _Session,
    toward: _QrsSizedVectors,
    window_s: np.ndarray,
    qrs: np.ndarray,
    t: np.ndarray,
) -> None:
    """Changes `qrs` and `t` in place for bundle branch blocks and pacing. The T wave points opposite to the
    added part of the QRS."""
    has, own = session.has, session.own
    broad_t = _gaussian_bells(_window_of_wave_s("T", session.fs_hz), 0.0, 0.045)

    wide = has["LBBB"] | has["PR"]
    vector = toward(0.95, 0.12, 0.55, (0.10, 0.25, 0.15))
    # A paced activation spreads upwards from the apex
    vector[:, 1] -= has["PR"] * toward.top_mv[:, 0]
    width_s = own.between(0.017, 0.021)
    slow = _gaussian_bells(window_s, 0.012, width_s)
    slow *= np.float32(0.8)
    centre_s = own.between(0.055, 0.070)
    width_s = own.between(0.018, 0.024)
    slow += _gaussian_bells(window_s, centre_s, width_s)
    opposite = -0.33 * vector
    qrs[wide] *= 0.12
    t[wide] *= 0.15
    _add_bell(qrs, wide, vector, slow)
    _add_bell(t, wide, opposite, broad_t)

    vector = toward(-0.55, 0.05, -0.75, (0.08, 0.05, 0.10))
    centre_s = own.between(0.058, 0.075)
    width_s = own.between(0.015, 0.020)
    late = _gaussian_bells(window_s, centre_s, width_s)
    forward = 0.8 * vector
    opposite = -0.22 * vector
    _add_bell(qrs, has["RBBB"], forward, late)
    _add_bell(t, has["RBBB"], opposite, broad_t)

    vector = toward(-0.27, 0.03, -0.35, (0.05, 0.05, 0.07))
    centre_s = own.between(0.038, 0.044)
    width_s = own.between(0.008, 0.010)
    late = _gaussian_bells(window_s, centre_s, width_s)
    _add_bell(qrs, has["IRBBB"], vector, late)


def _change_qrs_and_t(session: _Session, qrs: np.ndarray, t: np.ndarray) -> None:
    """Change `qrs` and `t` in place for the patients' findings. Findings of conduction, infarction and voltage
    look the same in all sessions; those of ST-T are drawn anew."""
    has, own, rng = session.has, session.own, session.rng
    window_s = _window_of_wave_s("QRS", session.fs_hz)
    toward = _QrsSizedVectors(own, qrs)
    _add_bundle_branches(session, toward, window_s, qrs, t)

    is_inferior = own.random((BLOCK_PATIENTS, 1)) < 0.5
    inferior = toward(-0.03, -0.6, 0)
    anterior = toward(-0.3, 0, 0.6)
    vector = np.where(is_inferior, inferior, anterior)
    size = own.between(0.7, 1.1, 1)
    vector = vector * size
    bell = _gaussian_bells(window_s, -0.022, 0.011)
    _add_bell(qrs, has["QAb"], vector.astype(np.float32), bell)
    vector = toward(-0.25, 0, 0.62)
    bell = _gaussian_bells(window_s, -0.008, 0.013)
    _add_bell(qrs, has["PRWP"], vector, bell)
    vector = toward(-0.18, 0.3, 0)
    bell = _gaussian_bells(window_s, -0.026, 0.007)
    _add_bell(qrs, has["LAnFB"], vector, bell)

    low = has["LQRSV"]
    small = own.between(0.22, 0.36)
    height = np.where(low, small, 1)
    qrs *= height.astype(np.float32)[:, None, None]
    inverted = -rng.between(0.5, 1.1)
    flat = rng.between(-0.15, 0.22)
    height = np.where(low, 0.55, 1)
    height = np.where(has["TInv"], height * inverted, height)
    height = np.where(has["TAb"], flat, height)
    t *= height.astype(np.float32)[:, None, None]


def _turn_axis(session: _Session, qrs: np.ndarray) -> np.ndarray:
    """Return the QRS of patients with an axis deviation rotated in the frontal plane, so that leads I and aVF
    show the deviation."""
    has, own = session.has, session.own
    area = qrs.sum(-1)
    i, ii = np.einsum("bls,bs->lb", session.field[:, :2], area)
    upright = 2 * (ii - i / 2) / np.sqrt(3)
    now = np.arctan2(upright, i)
    left = own.between(-75, -33)
    right = own.between(98, 150)
    target_deg = np.where(has["LAD"], left, right)
    turn = _rotation_about_z(np.deg2rad(target_deg) - now)
    turned = turn @ qrs
    deviates = has["LAD"] | has["RAD"]
    return np.where(deviates[:, None, None], turned, qrs)


def _add_wave(
    beat: np.ndarray, wave: np.ndarray, name: str, centre_s: np.ndarray, fs_hz: int
) -> None:
    """Add each patient's wave to `beat` [BLOCK_PATIENTS, 3, samples of a beat], in place, with its centre
    `centre_s` after R."""
    wave_start_s, _ = _SPAN_S[name]
    beat_start_s, _ = _SPAN_S["beat"]
    before_wave = round(wave_start_s * fs_hz)
    before_beat = round(beat_start_s * fs_hz)
    length = wave.shape[-1]
    last = beat.shape[-1] - length
    centres = np.round(centre_s * fs_hz).astype(int)
    starts = centres + before_wave - before_beat
    starts = np.clip(starts, 0, last)
    for patient, start in enumerate(starts):
        beat[patient, :, start : start + length] += wave[patient]


def _waves_and_qrs_height(
    session: _Session,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (P, QRS, T, height of the QRS in mV). The patients' findings change the waves; the height is that
    without the findings."""
    has, rng = session.has, session.rng
    wide = session.own.between(1.4, 1.75)
    stretch = np.where(has["LAnFB"], 1.12, 1.0)
    stretch = np.where(has["NSIVCB"], wide, stretch)
    waves = {}
    for name, change in _WAVE_LOG_GAIN_SD.items():
        shape = session.patients.shape[name]
        log_factor = SESSION_JITTER * change * rng.gauss(1)
        gain = shape.gain * np.exp(log_factor)
        shape = shape._replace(gain=gain)
        waves[name] = _wave_vectors(name, shape, session.fs_hz, stretch if name == "QRS" else 1.0)
    qrs, t = waves["QRS"], waves["T"]
    top_mv = np.abs(qrs).max((1, 2))
    _change_qrs_and_t(session, qrs, t)
    wobble_rad = np.deg2rad(2) * SESSION_JITTER * rng.gauss(3)
    turn = _rotation(session.patients.tilt_rad + wobble_rad)
    qrs = _turn_axis(session, turn @ qrs)
    paced = has["PR"][:, None, None]
    qrs += paced * _pacemaker_spike(session.fs_hz)
    p = turn @ waves["P"]
    without_p = has["AF"] | has["AFL"] | has["PR"] | has["Brady"]
    p[without_p] = 0
    return p, qrs, turn @ t, top_mv


def _pacemaker_spike(fs_hz: int) -> np.ndarray:
    """Returns the spike of a pacemaker in the window of the QRS: float32 [3, window]."""
    window_s = _window_of_wave_s("QRS", fs_hz)
    is_spike = np.abs(window_s + 0.042) < 0.0025
    direction = np.array([1.1, -0.85, 0.6])
    return np.outer(direction, is_spike).astype(np.float32)


def _beats_of_each_kind(session: _Session, mean_s: np.ndarray) -> np.ndarray:
    """Return each patient's normal, atrial premature and ventricular beat in this session, in mV: float32
    [BLOCK_PATIENTS, 3 kinds, 3 axes, samples of a beat]."""
    p, qrs, t, top_mv = _waves_and_qrs_height(session)
    turned_deg = session.own.between(60, 120)
    turn = _rotation_about_z(np.deg2rad(turned_deg))
    ectopic_p = turn @ p
    pr_s, t_peak_s = _pr_and_t_peak_s(session, mean_s)
    beats = np.zeros(
        (BLOCK_PATIENTS, 3, 3, len(_window_of_wave_s("beat", session.fs_hz))), np.float32
    )
    at_r = np.zeros(BLOCK_PATIENTS)
    for kind, atrial in ((_NORMAL, p), (_ATRIAL, ectopic_p)):
        beat = beats[:, kind]
        _add_wave(beat, atrial, "P", 0.02 - pr_s, session.fs_hz)
        _add_wave(beat, qrs, "QRS", at_r, session.fs_hz)
        _add_wave(beat, t, "T", t_peak_s, session.fs_hz)

    focus = session.patients.ectopic * top_mv[:, None]
    focus = focus.astype(np.float32)[:, :, None]
    window_s = _window_of_wave_s("QRS", session.fs_hz)
    bell = _gaussian_bells(window_s, 0.01, 0.022)
    second = _gaussian_bells(window_s, 0.06, 0.026)
    bell += np.float32(0.8) * second
    window_s = _window_of_wave_s("T", session.fs_hz)
    broad_t = _gaussian_bells(window_s, 0.0, 0.05)
    wide_qrs = 1.25 * focus * bell
    opposite_t = -0.4 * focus * broad_t
    beat = beats[:, _VENTRICULAR]
    _add_wave(beat, wide_qrs, "QRS", at_r, session.fs_hz)
    _add_wave(beat, opposite_t, "T", at_r + 0.30, session.fs_hz)
    return beats


def _pr_and_t_peak_s(session: _Session, mean_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (PR intervals, times from R to the top of T), in seconds. The latter depend on the heart rate."""
    has, own, rng = session.has, session.own, session.rng
    prolonged_s = own.between(0.20, 0.31)
    pr_s = np.where(has["IAVB"], prolonged_s, session.patients.pr_s)
    pr_s = pr_s + 0.006 * rng.gauss()
    prolonged_s = rng.between(0.47, 0.56)
    qtc_s = session.patients.qtc_s + 0.006 * rng.gauss()
    qtc_s = np.where(has["LQT"], prolonged_s, qtc_s)
    wide = has["LBBB"] | has["PR"]
    t_peak_s = (qtc_s - 0.115) * np.cbrt(mean_s) - 0.04
    return pr_s, t_peak_s + np.where(wide, 0.04, 0)


def _fibrillation_mv(u: np.ndarray, t_s: np.ndarray) -> np.ndarray:
    """Return the fibrillation waves of a record on the Frank axes, [3, samples]. Its random numbers `u`
    decide how they look."""
    drift_hz = 0.1 + 0.3 * u[2]
    drift = np.sin(2 * np.pi * drift_hz * t_s)
    wave_hz = 4.5 + 4 * u[0]
    turns = wave_hz * t_s + u[1]
    phase = 2 * np.pi * turns
    phase = phase + 0.8 * drift
    second = np.sin(2 * phase + 0.7)
    third = np.sin(3 * phase + 1.1)
    wave = np.sin(phase) + 0.45 * second + 0.25 * third
    turns = 0.23 * t_s + u[3]
    swell = np.sin(2 * np.pi * turns)
    wave *= 1 + 0.3 * swell
    height_mv = 0.03 + 0.06 * u[4]
    direction = np.array([0.35, 0.6, -0.75])
    return np.outer(height_mv * direction, wave)


def _flutter_mv(flutter_hz: float, u: np.ndarray, t_s: np.ndarray) -> np.ndarray:
    """Return the flutter waves of a record on the Frank axes, [3, samples]: a saw tooth that falls during 0.7
    of each period and rises during the rest. The record's random numbers `u` decide phase and height."""
    phase = (flutter_hz * t_s + u[0]) % 1
    down = 0.5 - phase / 0.7
    up = (phase - 0.7) / 0.3 - 0.5
    saw = np.where(phase < 0.7, down, up)
    height_mv = 0.12 + 0.16 * u[1]
    direction = np.array([0.1, 1.0, -0.25])
    return np.outer(height_mv * direction, saw)


def twelve_leads(independent: np.ndarray) -> np.ndarray:
    """Return all leads, int16 [samples, 12], from I, II and V1..V6, int16 [8, samples]. III is exactly II - I;
    the aV leads are rounded by up to half a unit."""
    i, ii = independent[:2]
    samples = len(i)
    leads = np.empty((12, samples), np.int16)
    leads[:2] = independent[:2]
    leads[2] = ii - i
    leads[3] = -((i + ii) >> 1)
    leads[4] = (2 * i - ii) >> 1
    leads[5] = (2 * ii - i) >> 1
    leads[6:] = independent[2:]
    return np.ascontiguousarray(leads.T)


def _low_pass_noise(rng: BlockDraws, samples: int) -> np.ndarray:
    """Return nearly Gaussian low-pass noise of unit variance: float32 [8, samples]. It is made by adding
    uniform random integers, because NumPy's normal() would take most of the time of a simulation."""
    count = 4 * (samples + 1)
    words = rng.integers(0, 2**64, count, np.uint64)
    bits = words.view(np.int16) >> 1
    bits = bits.reshape(2, 8, samples + 1)
    pair = (bits[0] + bits[1]) >> 1  # each a mean of two uniform 15-bit numbers
    scale = np.float32(np.sqrt(12.0) / 2**15)
    noise: np.ndarray = (pair[:, 1:] + pair[:, :-1]) * scale
    return noise


def _draw_disturbance(rng: BlockDraws, mains_hz: int, knots: int) -> _Disturbance:
    """Draw the noise of each record. One record in 20 has a burst of muscle noise."""
    slow_mv = np.array([0.055, 0.045, 0.018])
    slow_mv = slow_mv * np.abs(rng.gauss(3))
    mains_mv = rng.between(0, 0.012, 1)
    height_mv = np.concatenate([slow_mv, mains_mv], 1)
    factor = 1 + 0.4 * rng.gauss(8, 4)
    gain_mv = height_mv[:, None] * factor
    slowest_hz = [0.05, 0.15, 0.35]
    fastest_hz = [0.15, 0.35, 0.6]
    slow_hz = rng.uniform(slowest_hz, fastest_hz, (BLOCK_PATIENTS, 3))
    mains = np.full((BLOCK_PATIENTS, 1), float(mains_hz))
    freq_hz = np.concatenate([slow_hz, mains], 1)
    noise_mv = rng.between(0.003, 0.018, 1)
    factor = np.exp(0.3 * rng.gauss(8))
    noise_mv = noise_mv * factor
    course = rng.gauss(2, knots)
    course = NOISE_LOG_STRENGTH_SD * course.astype(np.float32)
    has_burst = rng.random(BLOCK_PATIENTS) < 0.05
    burst = np.log(rng.between(2, 5))
    burst = np.where(has_burst, burst, 0)
    knot = rng.integers(0, knots, BLOCK_PATIENTS)
    course[np.arange(BLOCK_PATIENTS), 1, knot] += burst
    phase = rng.random((BLOCK_PATIENTS, 4))
    return _Disturbance(gain_mv, freq_hz, phase, noise_mv, course)


class _RecordRenderer:
    """Renders the records of a session one by one, in buffers that are used again for each record."""

    def __init__(self, session: _Session, key: Key, samples: int, mains_hz: int) -> None:
        dur_s = samples / session.fs_hz
        self.key = key
        self.has = session.has
        self.rhythm = _draw_rhythm(session, dur_s)
        self.beats = _beats_of_each_kind(session, self.rhythm.mean_s)
        knots = max(2, round(dur_s / NOISE_KNOT_S) + 1)
        self.disturbance = _draw_disturbance(session.rng, mains_hz, knots)
        self.atrial = session.rng.random((BLOCK_PATIENTS, 5))
        field = np.concatenate([session.field, self.disturbance.gain_mv], 2)
        field *= 1000
        noise_uv = 1000 * self.disturbance.noise_mv
        self.gain_uv = field.astype(np.float32)
        self.noise_uv = noise_uv.astype(np.float32)
        self.samples = samples
        self.t_s = np.arange(samples) / session.fs_hz
        self.hats = _hat_functions(knots, samples)
        # The rows of `sources` are 3 axes of the heart, 3 slow waves and the power line hum. Its columns
        # begin one width of a beat before the record and end one width after it, so that beats at both
        # edges fit. `within` is the part of `sources` that belongs to the record
        self.width = self.beats.shape[-1]
        start_s, _ = _SPAN_S["beat"]
        before = self.width + round(start_s * session.fs_hz)
        peak = np.round(self.rhythm.peak_s * session.fs_hz)
        self.start = peak.astype(int) + before
        self.sources = np.empty((7, samples + 2 * self.width), np.float32)
        self.within = self.sources[:, self.width : self.width + samples]

    def leads_uv(self, patient: int) -> np.ndarray:
        """Return leads I, II and V1..V6 of a patient, in microvolts: int16 [8, samples]."""
        strength = np.exp(self.disturbance.log_strength[patient]) @ self.hats
        self._draw_heart(patient)
        self._draw_slow_waves(patient, strength[0])
        noise = _low_pass_noise(BlockDraws(*self.key, NOISE_KEY, patient), self.samples)
        noise *= self.noise_uv[patient][:, None]
        noise *= strength[1]
        noise += self.gain_uv[patient] @ self.within
        # Clipped, so that the sums from which limb leads are derived, such as 2 * II - I, fit int16
        np.rint(noise, out=noise)
        return noise.clip(-10_000, 10_000, out=noise).astype(np.int16)

    def _draw_heart(self, patient: int) -> None:
        """Write the beats, and fibrillation or flutter waves, into the first three rows of `sources`."""
        sources, rhythm = self.sources, self.rhythm
        sources[:3] = 0
        heights = rhythm.amplitude[patient].astype(np.float32)
        starts, kinds = self.start[patient], rhythm.kind[patient]
        beats = self.beats[patient]
        last = self.samples + self.width
        for start, kind, height in zip(starts, kinds, heights, strict=True):
            if 0 <= start <= last:
                end = start + self.width
                sources[:3, start:end] += height * beats[kind]
        u = self.atrial[patient]
        if self.has["AF"][patient]:
            self.within[:3] += _fibrillation_mv(u, self.t_s)
        elif self.has["AFL"][patient]:
            self.within[:3] += _flutter_mv(rhythm.flutter_hz[patient], u, self.t_s)

    def _draw_slow_waves(self, patient: int, strength: np.ndarray) -> None:
        """Write the slow waves and the power line hum into the last four rows of `sources`."""
        disturbance = self.disturbance
        freq_hz = disturbance.freq_hz[patient]
        phase = disturbance.phase[patient]
        turns = np.outer(freq_hz, self.t_s)
        turns += phase[:, None]
        turns -= np.floor(turns)  # without whole turns, float32 is precise enough
        angle = np.float32(2 * np.pi) * turns.astype(np.float32)
        self.within[3:] = np.sin(angle)
        self.within[3:6] *= strength


def simulate(
    patients: SyntheticPatients,
    key: Key,
    who: Sequence[int],
    samples: int,
    fs_hz: int,
    mains_hz: int,
    without: Names = (),
) -> Recordings:
    """Simulate one session of some patients of a block. `who`: their indices in the block. `key`: (seed, ...,
    block number, session number)."""
    rng = BlockDraws(*key, SESSION_KEY)
    own = BlockDraws(*patients.key, DISEASE_KEY)
    has = draw_findings(rng, patients, without)
    factor = 0.03 * SESSION_JITTER * rng.gauss(8, 3)
    offset = 0.015 * SESSION_JITTER * rng.gauss(8, 3)
    field = patients.field * (1 + factor)
    field += offset
    session = _Session(patients, rng, own, has, field, fs_hz)
    recorder = _RecordRenderer(session, key, samples, mains_hz)
    digital = np.empty((len(who), samples, 12), np.int16)
    for record, patient in zip(digital, who, strict=True):
        record[:] = twelve_leads(recorder.leads_uv(patient))
    chosen = list(who)
    present = {name: mask[chosen] for name, mask in has.items()}
    mean_s = recorder.rhythm.mean_s[chosen]
    return Recordings(digital, present, 60 / mean_s)


def _hat_functions(knots: int, samples: int) -> np.ndarray:
    """Return hat functions, float32 [knots, samples]. For values at the knots, `values @ hats` interpolates
    linearly between them."""
    place = np.linspace(0, knots - 1, samples)
    knot = np.arange(knots)[:, None]
    distance = np.abs(place - knot)
    hats: np.ndarray = np.maximum(0, 1 - distance)
    return hats.astype(np.float32)
