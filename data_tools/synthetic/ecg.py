"""The signal model of `synth`: a moving heart dipole projected through each patient's own torso, in
closed form.

A patient is a set of P, QRS and T kernels (Gaussians on the Frank axes X left, Y inferior, Z
posterior; Sameni et al. 2007), an orientation of the heart and a lead field (Dower 1980,
perturbed). Block, axis, Q waves, R progression, low voltage and pacing stay the same in all
sessions. Patients also have a usual rhythm, ectopy and ST-T; a session shows each with the
probability in KEPT, else a new draw. In each session the electrodes have moved:

    draw_patients -> [patient kernels] -> _waves -> findings -> one beat [3, time] -> added at every
    R peak
                  -> lead field [8, 3 dipole + 3 wander + 1 mains] x sources -> + noise -> integer
                  uV -> 12 leads

Every draw comes from a generator keyed by (seed, ..., block of BLOCK patients), and a block is
drawn as a whole, so a record does not depend on the processes or the number of records. 24 of the
Challenge's 26 diagnoses occur; BBB and LPR are synonyms of some of these. KEPT, SESSION_JITTER and
the spread of patients are set so that two sessions are as alike, and two people as different, as in
PTB-XL. Synthetic and real: same rhythm .68, .68; same set of diagnoses .44, .44; cosine of 12-lead
median beats with the patient's other session .90, .88, between people with normal ECGs .67, .68,
between any people .31, .50 (four in five have a finding here, half of them in PTB-XL); own session
is the most similar of 438 for .51, .55.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from omnilead.data_tools.record import ABBREVIATIONS

BLOCK = 64  # patients that share one generator
SESSION_JITTER = 2.0  # multiplies the changes in `simulate` and `_beats`
KNOT_S, NOISE_COURSE = (
    2.5,
    0.5,
)  # noise strength varies within seconds: time step, standard deviation of its logarithm
PATIENT, SESSION, NOISE, DISEASE = 1, 2, 3, 7  # last part of a generator's key: what it is for

# Frank axis, centre (radians of a 1 s beat from R), amplitude (mV), width (radians): Sameni et al.
# 2007. Three QRS amplitudes (published: -0.32 on Y, -0.4 and 0.46 on Z) were changed to give the
# R/S ratios of real normal ECGs
_X = [
    (-1.09, 0.03, 0.0906),
    (-0.83, 0.08, 0.1057),
    (-0.19, -0.13, 0.0453),
    (-0.07, 0.85, 0.0378),
    (0.0, 1.11, 0.0332),
]
_X += [
    (0.06, 0.75, 0.0302),
    (0.22, 0.06, 0.0378),
    (1.2, 0.1, 0.604),
    (1.42, 0.17, 0.302),
    (1.68, 0.39, 0.1812),
]
_Y = [
    (-1.1, 0.035, 0.07),
    (-0.9, 0.015, 0.07),
    (-0.76, -0.019, 0.04),
    (-0.11, 0.32, 0.055),
    (-0.01, 0.51, 0.037),
]
_Y += [(0.065, -0.13, 0.0604), (0.8, 0.04, 0.45), (1.58, 0.08, 0.3)]
_Z = [
    (-1.1, -0.03, 0.03),
    (-0.93, -0.14, 0.12),
    (-0.7, -0.035, 0.04),
    (-0.15, -0.24, 0.045),
    (0.095, 0.69, 0.05),
]
_Z += [(1.05, -0.12, 0.8), (1.25, -0.2, 0.4), (1.55, -0.35, 0.2)]
_P_END_S, _T_START_S = -0.09, 0.06
# I, II, V1..V6 from X, Y, Z: Dower et al. 1980
_DOWER = [
    [0.632, -0.235, 0.059],
    [0.235, 1.066, -0.132],
    [-0.515, 0.157, -0.917],
    [0.044, 0.164, -1.387],
]
_DOWER += [
    [0.882, 0.098, -1.277],
    [1.213, 0.127, -0.601],
    [1.125, 0.127, -0.086],
    [0.831, 0.076, 0.230],
]
_SPAN_S = {
    "P": (-0.12, 0.12),
    "QRS": (-0.12, 0.18),
    "T": (-0.22, 0.22),
    "beat": (-0.46, 0.80),
}  # around the wave's centre
_NORMAL, _ATRIAL, _VENTRICULAR = 0, 1, 2  # kinds of beat

# Shares of patients. Tables in VARYING give the usual finding; a session has it with the
# probability in KEPT, else a new draw
RHYTHM = {
    "NSR": 0.45,
    "SB": 0.13,
    "STach": 0.12,
    "SA": 0.08,
    "AF": 0.12,
    "AFL": 0.07,
    "Brady": 0.03,
}
CONDUCTION = {
    "": 0.61,
    "IAVB": 0.08,
    "LBBB": 0.06,
    "RBBB": 0.07,
    "IRBBB": 0.07,
    "NSIVCB": 0.05,
    "LAnFB": 0.06,
}
AXIS = {"": 0.86, "LAD": 0.10, "RAD": 0.04}
CHRONIC = {"": 0.80, "LQRSV": 0.07, "QAb": 0.07, "PRWP": 0.06}
REPOLARISATION, PACED = {"": 0.70, "TInv": 0.10, "TAb": 0.11, "LQT": 0.09}, 0.04
ECTOPY = {"": 0.82, "PAC": 0.09, "PVC": 0.09}
VARYING = {"rhythm": RHYTHM, "ectopy": ECTOPY, "ST-T": REPOLARISATION}
KEPT = {"rhythm": 0.8, "ectopy": 0.7, "ST-T": 0.7}

# Standard deviations between patients: log gain of each kernel, log gain of the wave, kernel centre
# (s), log kernel width
_SPREAD = {
    "P": (0.22, 0.18, 0.0036, 0.09),
    "QRS": (0.27, 0.20, 0.0022, 0.11),
    "T": (0.22, 0.27, 0.009, 0.11),
}
_TILT_DEG, _FIELD_SPREAD = (
    (7.2, 7.2, 10.8),
    (0.11, 0.045),
)  # orientation of the heart; lead field: factor and offset

Key = Sequence[int]
Names = Sequence[str]
Findings = dict[str, np.ndarray]  # abbreviation -> bool [patients]


class Shape(NamedTuple):  # a patient's changes to a wave's kernels: [patients, kernels]
    gain: np.ndarray
    shift_s: np.ndarray
    width: np.ndarray


@dataclass(frozen=True)
class SyntheticPatients:  # arrays [BLOCK, ...]
    key: Key
    shape: dict[str, Shape]
    tilt_rad: np.ndarray
    field: np.ndarray
    pr_s: np.ndarray
    qtc_s: np.ndarray
    rate_bpm: np.ndarray
    ectopic: np.ndarray  # unit vector of the ventricular focus
    chronic: Findings
    usual: dict[str, np.ndarray]  # a name from each table in VARYING
    age: np.ndarray
    female: np.ndarray


@dataclass(frozen=True)
class Recordings:
    digital: np.ndarray  # int16 [records, samples, 12 leads], uV
    present: Findings  # the findings in the signal
    rate_bpm: np.ndarray


def _kernels() -> dict[str, np.ndarray]:
    """The published kernels by wave, around the wave's centre: rows of axis, centre (s), width (s),
    amplitude (mV).

    The gains per axis give the leads the amplitudes of real archives.
    """
    rows = [
        (axis, c / 6.2832, s / 6.2832, a)
        for axis, table in enumerate((_X, _Y, _Z))
        for c, a, s in table
    ]
    p = [
        (x, c + 0.149, max(s, 0.014), a * (1.0, 1.8, 0.5)[x]) for x, c, s, a in rows if c < _P_END_S
    ]
    p += [(1, 0.0, 0.02, 0.06), (0, 0.0, 0.02, 0.03)]
    within = [row for row in rows if _P_END_S <= row[1] <= _T_START_S]
    qrs = [(x, c, max(s, 0.0055), a * (0.72, 0.82, 0.66)[x]) for x, c, s, a in within]
    late = [row for row in rows if row[1] > _T_START_S and row[2] < 0.06]
    t = [(x, c - 0.24, max(s, 0.022), a * (0.8, 1.4, 0.75)[x]) for x, c, s, a in late]
    return {"P": np.array(p).T, "QRS": np.array(qrs).T, "T": np.array(t).T}


KERNELS = _kernels()


def _choose(rng: np.random.Generator, table: dict[str, float], without: Names) -> np.ndarray:
    """Draw one name per patient of the block, never those in `without`."""
    weight = np.array([0.0 if name in without else p for name, p in table.items()])
    return np.array(list(table))[rng.choice(len(table), BLOCK, p=weight / weight.sum())]


def draw_patients(key: Key, without: Names = ()) -> SyntheticPatients:
    """Draw the block of patients of `key` (seed, ..., block number). `without`: findings that they
    never have."""
    rng = np.random.default_rng([*key, PATIENT])
    shape = {}
    for wave, (spread, common, shift_s, width) in _SPREAD.items():
        size = (BLOCK, KERNELS[wave].shape[1])
        gain = np.exp(rng.normal(0, spread, size) + rng.normal(0, common, (BLOCK, 1)))
        shape[wave] = Shape(gain, rng.normal(0, shift_s, size), np.exp(rng.normal(0, width, size)))
    paced = rng.random(BLOCK) < PACED
    conduction = np.where(paced, "", _choose(rng, CONDUCTION, without))
    axis = np.where(paced | (conduction == "LBBB"), "", _choose(rng, AXIS, without))
    axis = np.where(conduction == "LAnFB", "LAD", axis)
    other = np.where(
        paced | np.isin(conduction, ("LBBB", "RBBB")), "", _choose(rng, CHRONIC, without)
    )
    (factor, added), usual = (
        _FIELD_SPREAD,
        {kind: _choose(rng, table, without) for kind, table in VARYING.items()},
    )
    tables = ((CONDUCTION, conduction), (AXIS, axis), (CHRONIC, other))
    chronic = {name: drawn == name for table, drawn in tables for name in table if name} | {
        "PR": paced
    }
    return SyntheticPatients(
        key=key,
        shape=shape,
        tilt_rad=rng.normal(size=(BLOCK, 3)) * np.deg2rad(_TILT_DEG),
        field=np.array(_DOWER) * (1 + factor * rng.normal(size=(BLOCK, 8, 3)))
        + added * rng.normal(size=(BLOCK, 8, 3)),
        pr_s=np.clip(rng.normal(0.155, 0.014, BLOCK), 0.125, 0.195),
        qtc_s=rng.normal(0.405, 0.018, BLOCK),
        rate_bpm=np.clip(rng.normal(74, 8, BLOCK), 60, 98),
        ectopic=(ectopic := rng.normal(size=(BLOCK, 3)))
        / np.linalg.norm(ectopic, axis=1, keepdims=True),
        chronic=chronic,
        usual=usual,
        age=np.clip(rng.normal(60, 17, BLOCK), 18, 95).astype(int),
        female=rng.random(BLOCK) < 0.48,
    )


def _draw_findings(
    rng: np.random.Generator, patients: SyntheticPatients, without: Names
) -> Findings:
    """Draw a session's findings: rhythm, ectopy, ST-T, and the chronic findings that are visible
    with this rhythm."""
    anew, chronic = (
        {kind: _choose(rng, table, without) for kind, table in VARYING.items()},
        patients.chronic,
    )
    today = {
        kind: np.where(rng.random(BLOCK) < KEPT[kind], patients.usual[kind], anew[kind])
        for kind in VARYING
    }
    present = {name: np.zeros(BLOCK, bool) for name in ABBREVIATIONS} | {
        k: v.copy() for k, v in chronic.items()
    }
    rhythm = np.where(chronic["PR"], "", today["rhythm"])
    present |= {name: rhythm == name for name in RHYTHM}
    sinus = np.isin(rhythm, ("NSR", "SB", "STach"))
    present["PAC"] = (today["ectopy"] == "PAC") & sinus
    present["PVC"] = (today["ectopy"] == "PVC") & (sinus | present["AF"])
    present["IAVB"] &= sinus | present["SA"]
    hidden = present["PR"] | present["LBBB"] | present["RBBB"] | present["AFL"]
    st_t = np.where(hidden, "", today["ST-T"])
    return present | {name: st_t == name for name in REPOLARISATION if name}


def _rhythm(
    rng: np.random.Generator, patients: SyntheticPatients, f: Findings, dur_s: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """R peaks (s) and kinds of beat [BLOCK, beats], mean RR (s), flutter rate (Hz), amplitude of
    each beat (breathing).

    The ranges touch their neighbours (a sinus bradycardia of 60, a PR interval of 0.2 s), so
    borderline cases occur.
    """

    def uniform(low: float, high: float, *shape: int) -> np.ndarray:
        return rng.uniform(low, high, (BLOCK, *shape))

    rate = np.clip(patients.rate_bpm + 5 * rng.normal(size=BLOCK), 59, 101)
    for name, low, high in (
        ("SB", 38, 60),
        ("STach", 99, 148),
        ("Brady", 34, 49),
        ("AF", 60, 140),
        ("PR", 60, 74),
    ):
        rate = np.where(f[name], uniform(low, high), rate)
    rate = np.where(f["SA"], uniform(58, 85), rate)
    flutter_hz = uniform(4.3, 5.4)
    rate = np.where(f["AFL"], 60 * flutter_hz / rng.integers(2, 5, BLOCK), rate)
    mean_s = 60 / rate
    beats = np.arange(int(dur_s / 0.28) + 8)  # no rhythm here has a shorter mean RR interval
    clocked = f["PR"] | f["AFL"]
    swing = np.where(f["SA"], uniform(0.12, 0.22), np.where(clocked, 0, uniform(0.005, 0.03)))
    breath_hz, phase = uniform(0.18, 0.3), uniform(0, 2 * np.pi)
    breathing = np.sin(2 * np.pi * (breath_hz * mean_s)[:, None] * beats + phase[:, None])
    jitter = np.where(clocked, 0, 0.008)[:, None] * rng.normal(size=(BLOCK, len(beats)))
    rr = mean_s[:, None] * (1 + swing[:, None] * breathing + jitter)
    shape = 1 / 0.22**2
    fibrillating = mean_s[:, None] * np.clip(rng.gamma(shape, 1 / shape, rr.shape), 0.45, 2.2)
    rr = np.where(f["AF"][:, None], np.maximum(fibrillating, 0.30), rr)
    first, every = rng.integers(2, 5, (BLOCK, 1)), rng.integers(2, 7, (BLOCK, 1))
    early = (f["PAC"] | f["PVC"])[:, None] & (beats >= first) & ((beats - first) % every == 0)
    kind = np.where(early, np.where(f["PVC"][:, None], _VENTRICULAR, _ATRIAL), _NORMAL)
    prematurity = uniform(0.55, 0.72, len(beats))
    rr[:, 1:] *= np.where(early[:, 1:], prematurity[:, 1:], 1)
    pause = np.where(
        kind == _VENTRICULAR, 2 - prematurity, 1.05
    )  # fully compensatory only after a ventricular beat
    rr[:, 1:] = np.where(early[:, :-1], mean_s[:, None] * pause[:, :-1], rr[:, 1:])
    peak_s = np.cumsum(rr, 1) - rr[:, :1] - uniform(0.2, 1.0, 1)
    return peak_s, kind, mean_s, flutter_hz, 1 + 0.05 * breathing


def _window(wave: str, fs_hz: int) -> np.ndarray:
    first, last = (round(edge_s * fs_hz) for edge_s in _SPAN_S[wave])
    return (np.arange(first, last + 1) / fs_hz).astype(np.float32)


def _gauss(
    window_s: np.ndarray, centre_s: np.ndarray | float, width_s: np.ndarray | float
) -> np.ndarray:
    """Gaussian bells: float32 [..., len(window_s)]."""
    centre, width = (
        np.asarray(centre_s, np.float32)[..., None],
        np.asarray(width_s, np.float32)[..., None],
    )
    bell: np.ndarray = np.exp(np.float32(-0.5) * ((window_s - centre) / width) ** 2)
    return bell


def _waves(wave: str, shape: Shape, fs_hz: int, stretch: np.ndarray | float = 1.0) -> np.ndarray:
    """A wave of every patient on the Frank axes: float32 [BLOCK, 3, window]."""
    axis, centre_s, width_s, amp_mv = KERNELS[wave]
    scale = np.reshape(stretch, (-1, 1))
    bells = _gauss(
        _window(wave, fs_hz), (centre_s + shape.shift_s) * scale, width_s * shape.width * scale
    )
    bells *= (amp_mv * shape.gain).astype(np.float32)[..., None]
    waves: np.ndarray = (axis == np.arange(3)[:, None]).astype(np.float32) @ bells
    return waves


def _rotation(angles_rad: np.ndarray) -> np.ndarray:
    """Rotation matrices [n, 3, 3] from angles [n, 3] about X, Y, Z."""
    (cx, cy, cz), (sx, sy, sz) = np.cos(angles_rad).T, np.sin(angles_rad).T
    rows = [[cy * cz, -cy * sz, sy], [cx * sz + sx * sy * cz, cx * cz - sx * sy * sz, -sx * cy]]
    rows += [[sx * sz - cx * sy * cz, sx * cz + cx * sy * sz, cx * cy]]
    return np.array(rows).transpose(2, 0, 1).astype(np.float32)


def _shape_findings(
    own: np.random.Generator,
    rng: np.random.Generator,
    f: Findings,
    qrs: np.ndarray,
    t: np.ndarray,
    fs_hz: int,
) -> None:
    """Change QRS and T in place for conduction, infarction and voltage (from `own`, equal in all
    sessions) and ST-T."""
    window_s, top_mv = _window("QRS", fs_hz), np.abs(qrs).max((1, 2))

    def uniform(low: float, high: float) -> np.ndarray:
        return own.uniform(low, high, BLOCK)

    def toward(x: float, y: float, z: float, spread: Sequence[float] = (0, 0, 0)) -> np.ndarray:
        vector: np.ndarray = (np.array([x, y, z]) + own.normal(size=(BLOCK, 3)) * spread) * top_mv[
            :, None
        ]
        return vector.astype(np.float32)

    def add(mask: np.ndarray, vector: np.ndarray, bell: np.ndarray, wave: np.ndarray = qrs) -> None:
        wave[mask] += (
            vector[mask][:, :, None] * np.broadcast_to(bell, (BLOCK, bell.shape[-1]))[mask][:, None]
        )

    wide, broad_t = f["LBBB"] | f["PR"], _gauss(_window("T", fs_hz), 0.0, 0.045)
    vector = toward(0.95, 0.12, 0.55, (0.10, 0.25, 0.15))
    vector[:, 1] -= f["PR"] * top_mv  # activation spreads upwards from the apex
    slow = 0.8 * _gauss(window_s, 0.012, uniform(0.017, 0.021))
    slow = slow + _gauss(window_s, uniform(0.055, 0.070), uniform(0.018, 0.024))
    qrs[wide] *= 0.12
    t[wide] *= 0.15
    add(wide, vector, slow)
    add(wide, -0.33 * vector, broad_t, t)
    vector = toward(-0.55, 0.05, -0.75, (0.08, 0.05, 0.10))
    add(f["RBBB"], 0.8 * vector, _gauss(window_s, uniform(0.058, 0.075), uniform(0.015, 0.020)))
    add(f["RBBB"], -0.22 * vector, broad_t, t)
    vector = toward(-0.27, 0.03, -0.35, (0.05, 0.05, 0.07))
    add(f["IRBBB"], vector, _gauss(window_s, uniform(0.038, 0.044), uniform(0.008, 0.010)))
    inferior = (own.random(BLOCK) < 0.5)[:, None]
    vector = (
        np.where(inferior, toward(-0.03, -0.6, 0), toward(-0.3, 0, 0.6))
        * uniform(0.7, 1.1)[:, None]
    )
    add(f["QAb"], vector.astype(np.float32), _gauss(window_s, -0.022, 0.011))
    add(f["PRWP"], toward(-0.25, 0, 0.62), _gauss(window_s, -0.008, 0.013))
    add(f["LAnFB"], toward(-0.18, 0.3, 0), _gauss(window_s, -0.026, 0.007))
    qrs *= np.where(f["LQRSV"], uniform(0.22, 0.36), 1).astype(np.float32)[:, None, None]
    factor = np.where(f["LQRSV"], 0.55, 1) * np.where(f["TInv"], -rng.uniform(0.5, 1.1, BLOCK), 1)
    t *= np.where(f["TAb"], rng.uniform(-0.15, 0.22, BLOCK), factor).astype(np.float32)[
        :, None, None
    ]


def _turn_axis(
    own: np.random.Generator, f: Findings, qrs: np.ndarray, field: np.ndarray
) -> np.ndarray:
    """Rotate the QRS in the frontal plane until leads I and aVF show the axis deviation."""
    area = np.einsum("bls,bs->bl", field[:, :2], qrs.sum(-1))
    now = np.arctan2(2 * (area[:, 1] - area[:, 0] / 2) / np.sqrt(3), area[:, 0])
    target = np.deg2rad(
        np.where(f["LAD"], own.uniform(-75, -33, BLOCK), own.uniform(98, 150, BLOCK))
    )
    turned = _rotation(np.outer(target - now, [0, 0, 1])) @ qrs
    return np.where((f["LAD"] | f["RAD"])[:, None, None], turned, qrs)


def _place(beat: np.ndarray, wave: np.ndarray, name: str, centre_s: np.ndarray, fs_hz: int) -> None:
    """Add each patient's wave to their beat [BLOCK, 3, beat], `centre_s` after R."""
    start = (
        np.round(centre_s * fs_hz).astype(int)
        + round(_SPAN_S[name][0] * fs_hz)
        - round(_SPAN_S["beat"][0] * fs_hz)
    )
    start = np.clip(start, 0, beat.shape[-1] - wave.shape[-1])
    for b, i in enumerate(start):
        beat[b, :, i : i + wave.shape[-1]] += wave[b]


def _beats(
    rng: np.random.Generator,
    patients: SyntheticPatients,
    f: Findings,
    mean_s: np.ndarray,
    field: np.ndarray,
    fs_hz: int,
) -> np.ndarray:
    """A session's normal, atrial premature and ventricular beats: float32 [BLOCK, 3 kinds, 3 axes,
    beat], mV."""
    own = np.random.default_rng([*patients.key, DISEASE])
    stretch = np.where(f["NSIVCB"], own.uniform(1.4, 1.75, BLOCK), np.where(f["LAnFB"], 1.12, 1.0))
    waves = []
    for name, change in (("P", 0.06), ("QRS", 0.03), ("T", 0.10)):
        gain = patients.shape[name].gain * np.exp(
            SESSION_JITTER * change * rng.normal(size=(BLOCK, 1))
        )
        shape = patients.shape[name]._replace(gain=gain)
        waves.append(_waves(name, shape, fs_hz, stretch if name == "QRS" else 1.0))
    p, qrs, t = waves
    top_mv = np.abs(qrs).max((1, 2))
    _shape_findings(own, rng, f, qrs, t, fs_hz)
    turn = _rotation(
        patients.tilt_rad + np.deg2rad(2) * SESSION_JITTER * rng.normal(size=(BLOCK, 3))
    )
    p, qrs, t = turn @ p, _turn_axis(own, f, turn @ qrs, field), turn @ t
    spike = (np.abs(_window("QRS", fs_hz) + 0.042) < 0.0025) * np.array([[1.1], [-0.85], [0.6]])
    qrs += f["PR"][:, None, None] * spike.astype(np.float32)
    p[f["AF"] | f["AFL"] | f["PR"] | f["Brady"]] = 0
    focus = (patients.ectopic * top_mv[:, None]).astype(np.float32)[:, :, None]
    window_s = _window("QRS", fs_hz)
    ventricular = (
        1.25
        * focus
        * (_gauss(window_s, 0.01, 0.022) + np.float32(0.8) * _gauss(window_s, 0.06, 0.026))
    )
    ectopic_p = _rotation(np.outer(np.deg2rad(own.uniform(60, 120, BLOCK)), [0, 0, 1])) @ p

    pr_s = np.where(f["IAVB"], own.uniform(0.20, 0.31, BLOCK), patients.pr_s) + 0.006 * rng.normal(
        size=BLOCK
    )
    qtc_s = np.where(
        f["LQT"], rng.uniform(0.47, 0.56, BLOCK), patients.qtc_s + 0.006 * rng.normal(size=BLOCK)
    )
    t_peak_s = (qtc_s - 0.115) * np.cbrt(mean_s) - 0.04 + np.where(f["LBBB"] | f["PR"], 0.04, 0)
    beats, zero = np.zeros((BLOCK, 3, 3, len(_window("beat", fs_hz))), np.float32), np.zeros(BLOCK)
    for kind, atrial in ((_NORMAL, p), (_ATRIAL, ectopic_p)):
        for name, wave, centre_s in (
            ("P", atrial, 0.02 - pr_s),
            ("QRS", qrs, zero),
            ("T", t, t_peak_s),
        ):
            _place(beats[:, kind], wave, name, centre_s, fs_hz)
    _place(beats[:, _VENTRICULAR], ventricular, "QRS", zero, fs_hz)
    _place(
        beats[:, _VENTRICULAR],
        -0.4 * focus * _gauss(_window("T", fs_hz), 0.0, 0.05),
        "T",
        zero + 0.30,
        fs_hz,
    )
    return beats


def _atrial_mv(fibrillates: bool, flutter_hz: float, u: np.ndarray, t_s: np.ndarray) -> np.ndarray:
    """Fibrillation or flutter waves of one record on the Frank axes [3, samples]; `u` are its five
    random numbers."""
    if fibrillates:
        phase = 2 * np.pi * ((4.5 + 4 * u[0]) * t_s + u[1]) + 0.8 * np.sin(
            2 * np.pi * (0.1 + 0.3 * u[2]) * t_s
        )
        wave = np.sin(phase) + 0.45 * np.sin(2 * phase + 0.7) + 0.25 * np.sin(3 * phase + 1.1)
        wave *= 1 + 0.3 * np.sin(2 * np.pi * (0.23 * t_s + u[3]))
        return np.outer((0.03 + 0.06 * u[4]) * np.array([0.35, 0.6, -0.75]), wave)
    phase = (flutter_hz * t_s + u[0]) % 1
    saw = np.where(phase < 0.7, 0.5 - phase / 0.7, (phase - 0.7) / 0.3 - 0.5)
    return np.outer((0.12 + 0.16 * u[1]) * np.array([0.1, 1.0, -0.25]), saw)


def twelve_leads(independent: np.ndarray) -> np.ndarray:
    """int16 [8, samples] (I, II, V1..V6) -> [samples, 12]: III is exactly II - I, an aV lead within
    half a unit."""
    i, ii = independent[:2]
    leads = np.empty((12, independent.shape[1]), np.int16)
    leads[0:2], leads[6:12] = independent[0:2], independent[2:8]
    leads[2], leads[3], leads[4], leads[5] = (
        ii - i,
        -((i + ii) >> 1),
        (2 * i - ii) >> 1,
        (2 * ii - i) >> 1,
    )
    return np.ascontiguousarray(leads.T)


def _noise(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Nearly Gaussian low-pass noise of unit variance: float32 [8, samples]. NumPy's normal() would
    take most of the time."""
    bits = (
        rng.integers(0, 2**64, 4 * (samples + 1), np.uint64)
        .view(np.int16)
        .reshape(2, 8, samples + 1)
        >> 1
    )
    pair = (bits[0] + bits[1]) >> 1
    noise: np.ndarray = (pair[:, 1:] + pair[:, :-1]) * np.float32(
        np.sqrt(12.0) / 2**15
    )  # sums of 15-bit uniforms
    return noise


def _disturbance(rng: np.random.Generator, mains_hz: int, knots: int) -> tuple[np.ndarray, ...]:
    """Three slow waves (breathing, electrodes) and the mains: gain per lead [BLOCK, 8, 4] (mV),
    frequency (Hz) and phase (turns) [BLOCK, 4]; muscle noise [BLOCK, 8] (mV); log strength of
    slow waves and muscle noise over the record [BLOCK, 2, knots], with a burst of muscle noise
    in one of 20 records."""
    low, high = np.array([0.05, 0.15, 0.35]), np.array([0.15, 0.35, 0.6])
    height = np.array([0.055, 0.045, 0.018]) * np.abs(rng.normal(size=(BLOCK, 3)))
    height = np.concatenate([height, rng.uniform(0, 0.012, (BLOCK, 1))], 1)
    gain_mv = height[:, None] * (1 + 0.4 * rng.normal(size=(BLOCK, 8, 4)))
    freq_hz = np.concatenate(
        [rng.uniform(low, high, (BLOCK, 3)), np.full((BLOCK, 1), float(mains_hz))], 1
    )
    noise_mv = rng.uniform(0.003, 0.018, (BLOCK, 1)) * np.exp(0.3 * rng.normal(size=(BLOCK, 8)))
    course = NOISE_COURSE * rng.normal(size=(BLOCK, 2, knots)).astype(np.float32)
    burst = np.where(rng.random(BLOCK) < 0.05, np.log(rng.uniform(2, 5, BLOCK)), 0)
    course[np.arange(BLOCK), 1, rng.integers(0, knots, BLOCK)] += burst
    return gain_mv, freq_hz, rng.random((BLOCK, 4)), noise_mv, course


def simulate(
    patients: SyntheticPatients,
    key: Key,
    who: Sequence[int],
    samples: int,
    fs_hz: int,
    mains_hz: int,
    without: Names = (),
) -> Recordings:
    """Simulate one session of the patients `who` of a block; `key` is (seed, ..., block,
    session)."""
    rng = np.random.default_rng([*key, SESSION])
    f = _draw_findings(rng, patients, without)
    field = patients.field * (1 + 0.03 * SESSION_JITTER * rng.normal(size=(BLOCK, 8, 3)))
    field += 0.015 * SESSION_JITTER * rng.normal(size=(BLOCK, 8, 3))
    peak_s, kind, mean_s, flutter_hz, amplitude = _rhythm(rng, patients, f, samples / fs_hz)
    beats = _beats(rng, patients, f, mean_s, field, fs_hz)
    disturbance_mv, freq_hz, phase, noise_mv, knots = _disturbance(
        rng, mains_hz, max(2, round(samples / fs_hz / KNOT_S) + 1)
    )
    gain_uv = (1000 * np.concatenate([field, disturbance_mv], 2)).astype(np.float32)
    top_uv, u = (1000 * noise_mv).astype(np.float32), rng.random((BLOCK, 5))

    width, t_s = beats.shape[-1], np.arange(samples) / fs_hz
    early = width + round(
        _SPAN_S["beat"][0] * fs_hz
    )  # `sources` starts one beat's width before the record
    start = np.round(peak_s * fs_hz).astype(int) + early
    sources = np.empty((7, samples + 2 * width), np.float32)
    within = sources[:, width : width + samples]
    digital = np.empty((len(who), samples, 12), np.int16)
    between = _hats(knots.shape[-1], samples)
    for made, b in zip(digital, who, strict=True):
        sources[:3] = 0
        for i, which, height in zip(
            start[b], kind[b], amplitude[b].astype(np.float32), strict=True
        ):
            if 0 <= i <= samples + width:
                sources[:3, i : i + width] += height * beats[b, which]
        if f["AF"][b] or f["AFL"][b]:
            within[:3] += _atrial_mv(bool(f["AF"][b]), flutter_hz[b], u[b], t_s)
        turns = np.outer(freq_hz[b], t_s) + phase[b][:, None]
        turns -= np.floor(turns)  # float32 is precise enough only within one turn
        strength = np.exp(knots[b]) @ between  # of slow waves and muscle noise
        within[3:] = np.sin(np.float32(2 * np.pi) * turns.astype(np.float32))
        within[3:6] *= strength[0]
        noise_uv = _noise(np.random.default_rng([*key, NOISE, b]), samples)
        noise_uv *= top_uv[b][:, None]
        noise_uv *= strength[1]
        noise_uv += gain_uv[b] @ within
        uv = np.rint(noise_uv, out=noise_uv).clip(
            -10_000, 10_000, out=noise_uv
        )  # so that three times a value fits int16
        made[:] = twelve_leads(uv.astype(np.int16))
    return Recordings(
        digital, {name: mask[list(who)] for name, mask in f.items()}, 60 / mean_s[list(who)]
    )


def _hats(knots: int, samples: int) -> np.ndarray:
    """Hat functions, float32 [knots, samples]: `values @ hats` interpolates linearly between the
    values."""
    at = np.linspace(0, knots - 1, samples)
    hats: np.ndarray = np.maximum(0, 1 - np.abs(at - np.arange(knots)[:, None])).astype(np.float32)
    return hats
