"""Draw synthetic patients, and the findings of each session; ecg.py simulates the signals from these.

A patient is a set of P, QRS and T kernels (Gaussians on the Frank axes X left, Y inferior, Z
posterior; Sameni et al. 2007), an orientation of the heart and a lead field (Dower 1980,
perturbed). Block, axis, Q waves, R progression, low voltage and pacing stay the same in all
sessions. Patients also have a usual rhythm, ectopy and ST-T; a session shows each with the
probability in USUAL_FINDING_SHARE, else a new draw. 24 of the Challenge's 26 diagnoses occur; BBB and LPR are
synonyms of some of these.

Every draw comes from a generator keyed by (seed, ..., block of BLOCK_PATIENTS patients), and a block is
drawn as a whole, so a record does not depend on the processes or the number of records.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..ecg.constants import CLASS_ABBREVIATIONS

BLOCK_PATIENTS = 64  # how many patients are drawn together, from the same random generator
# The key of a random generator includes one of these numbers, which stands for what is drawn
PATIENT_KEY = 1
SESSION_KEY = 2
NOISE_KEY = 3
DISEASE_KEY = 7

# The kernels of Sameni et al. 2007. Columns: Frank axis, centre (radians from R, of a beat of 1 s),
# amplitude (mV), width (radians). Three QRS amplitudes (published: -0.32 on Y, -0.4 and 0.46 on Z)
# were changed to give the R/S ratios of real normal ECGs
_PUBLISHED_KERNELS = """
X -1.09   0.03   0.0906
X -0.83   0.08   0.1057
X -0.19  -0.13   0.0453
X -0.07   0.85   0.0378
X  0.0    1.11   0.0332
X  0.06   0.75   0.0302
X  0.22   0.06   0.0378
X  1.2    0.1    0.604
X  1.42   0.17   0.302
X  1.68   0.39   0.1812
Y -1.1    0.035  0.07
Y -0.9    0.015  0.07
Y -0.76  -0.019  0.04
Y -0.11   0.32   0.055
Y -0.01   0.51   0.037
Y  0.065 -0.13   0.0604
Y  0.8    0.04   0.45
Y  1.58   0.08   0.3
Z -1.1   -0.03   0.03
Z -0.93  -0.14   0.12
Z -0.7   -0.035  0.04
Z -0.15  -0.24   0.045
Z  0.095  0.69   0.05
Z  1.05  -0.12   0.8
Z  1.25  -0.2    0.4
Z  1.55  -0.35   0.2
"""
_P_END_S, _T_START_S = -0.09, 0.06
# The matrix of Dower et al. 1980: rows give leads I, II, V1..V6 from the Frank axes X, Y, Z
_DOWER = """
 0.632 -0.235  0.059
 0.235  1.066 -0.132
-0.515  0.157 -0.917
 0.044  0.164 -1.387
 0.882  0.098 -1.277
 1.213  0.127 -0.601
 1.125  0.127 -0.086
 0.831  0.076  0.230
"""
DOWER = np.array(_DOWER.split(), np.float64).reshape(8, 3)

# The share of patients with each finding; "" stands for none. Tables in VARYING_FINDINGS give a patient's usual
# finding: a session has it with the probability in USUAL_FINDING_SHARE, and otherwise one drawn anew
RHYTHM_SHARES = {
    "NSR": 0.45,
    "SB": 0.13,
    "STach": 0.12,
    "SA": 0.08,
    "AF": 0.12,
    "AFL": 0.07,
    "Brady": 0.03,
}
CONDUCTION_SHARES = {
    "": 0.61,
    "IAVB": 0.08,
    "LBBB": 0.06,
    "RBBB": 0.07,
    "IRBBB": 0.07,
    "NSIVCB": 0.05,
    "LAnFB": 0.06,
}
AXIS_SHARES = {"": 0.86, "LAD": 0.10, "RAD": 0.04}
CHRONIC_SHARES = {"": 0.80, "LQRSV": 0.07, "QAb": 0.07, "PRWP": 0.06}
REPOLARISATION_SHARES = {"": 0.70, "TInv": 0.10, "TAb": 0.11, "LQT": 0.09}
ECTOPY_SHARES = {"": 0.82, "PAC": 0.09, "PVC": 0.09}
PACED_SHARE = 0.04
VARYING_FINDINGS = {"rhythm": RHYTHM_SHARES, "ectopy": ECTOPY_SHARES, "ST-T": REPOLARISATION_SHARES}
USUAL_FINDING_SHARE = {"rhythm": 0.8, "ectopy": 0.7, "ST-T": 0.7}


class WaveSpread(NamedTuple):
    """The standard deviations, between patients, of the properties of a wave."""

    log_gain: float  # of the logarithm of each kernel's gain
    log_wave_gain: float  # of the logarithm of a gain that all kernels of the wave share
    shift_s: float  # of the position of each kernel's centre
    log_width: float  # of the logarithm of each kernel's width


_SPREAD = {
    "P": WaveSpread(0.22, 0.18, 0.0036, 0.09),
    "QRS": WaveSpread(0.27, 0.20, 0.0022, 0.11),
    "T": WaveSpread(0.22, 0.27, 0.009, 0.11),
}
# Standard deviations between patients: of the heart's rotation about X, Y and Z, of the factors by which
# the lead field is multiplied, and of the offsets that are added to it
_TILT_DEG = (7.2, 7.2, 10.8)
_FIELD_FACTOR, _FIELD_OFFSET = 0.11, 0.045

Key = Sequence[int]
Names = Sequence[str]
# {abbreviation of a finding: which patients have it, bool [patients]}
Findings = dict[str, np.ndarray]


class BlockDraws(np.random.Generator):
    """A random generator that draws a number, or an array of `shape`, for every patient of a block."""

    def __init__(self, *key: int) -> None:
        super().__init__(np.random.PCG64(key))

    def between(self, low: float, high: float, *shape: int) -> np.ndarray:
        """Draw uniformly between `low` and `high`."""
        return self.uniform(low, high, (BLOCK_PATIENTS, *shape))

    def gauss(self, *shape: int) -> np.ndarray:
        """Draw from the standard normal distribution."""
        return self.normal(size=(BLOCK_PATIENTS, *shape))


class WaveShape(NamedTuple):
    """How each patient's wave differs from KERNELS: arrays [patients, kernels]."""

    gain: np.ndarray
    shift_s: np.ndarray
    width: np.ndarray


@dataclass(frozen=True)
class SyntheticPatients:
    """The patients of a block; all arrays are [BLOCK_PATIENTS, ...]."""

    key: Key
    shape: dict[str, WaveShape]  # for each of P, QRS and T
    tilt_rad: np.ndarray
    field: np.ndarray
    pr_s: np.ndarray
    qtc_s: np.ndarray
    rate_bpm: np.ndarray
    ectopic: np.ndarray  # unit vector of the direction of ventricular ectopic beats
    chronic: Findings
    # {key of VARYING_FINDINGS: the name of each patient's usual finding}
    usual: dict[str, np.ndarray]
    age: np.ndarray
    female: np.ndarray


def _make_kernels() -> dict[str, np.ndarray]:
    """Return the kernels of each wave, an array with the rows axis, centre (s, from the wave's centre), width
    (s) and amplitude (mV).

    The published amplitudes are multiplied by a gain per axis, so that the leads have the amplitudes of
    real archives.
    """
    p, qrs, t = [], [], []
    for line in _PUBLISHED_KERNELS.strip().split("\n"):
        name, *numbers = line.split()
        axis = "XYZ".index(name)
        centre, amplitude, width = map(float, numbers)
        centre_s, width_s = centre / 6.2832, width / 6.2832
        if centre_s < _P_END_S:
            gain = (1.0, 1.8, 0.5)[axis]
            p.append((axis, centre_s + 0.149, max(width_s, 0.014), amplitude * gain))
        elif centre_s <= _T_START_S:
            gain = (0.72, 0.82, 0.66)[axis]
            qrs.append((axis, centre_s, max(width_s, 0.0055), amplitude * gain))
        elif width_s < 0.06:
            gain = (0.8, 1.4, 0.75)[axis]
            t.append((axis, centre_s - 0.24, max(width_s, 0.022), amplitude * gain))
    p += [(1, 0.0, 0.02, 0.06), (0, 0.0, 0.02, 0.03)]
    return {"P": np.array(p).T, "QRS": np.array(qrs).T, "T": np.array(t).T}


KERNELS = _make_kernels()


def _choose_names(rng: BlockDraws, table: dict[str, float], without: Names) -> np.ndarray:
    """Draw a name from `table`, {name: probability}, for every patient of a block; never one in `without`."""
    names = np.array(list(table))
    weight = np.array(list(table.values()))
    weight[np.isin(names, without)] = 0
    chosen = rng.choice(len(table), BLOCK_PATIENTS, p=weight / weight.sum())
    return names[chosen]


def _draw_shape(rng: BlockDraws, wave: str) -> WaveShape:
    spread = _SPREAD[wave]
    kernels = KERNELS[wave].shape[1]
    log_gain = spread.log_gain * rng.gauss(kernels)
    log_gain += spread.log_wave_gain * rng.gauss(1)
    shift_s = spread.shift_s * rng.gauss(kernels)
    log_width = spread.log_width * rng.gauss(kernels)
    return WaveShape(np.exp(log_gain), shift_s, np.exp(log_width))


def _draw_chronic(rng: BlockDraws, without: Names) -> Findings:
    """Draw the findings that patients have in every session. If one finding would hide another in the ECG,
    such as pacing an axis deviation, the patient does not get the hidden one."""
    paced = rng.random(BLOCK_PATIENTS) < PACED_SHARE
    conduction = _choose_names(rng, CONDUCTION_SHARES, without)
    conduction = np.where(paced, "", conduction)
    axis = _choose_names(rng, AXIS_SHARES, without)
    axis = np.where(conduction == "LAnFB", "LAD", axis)
    hidden = paced | (conduction == "LBBB")
    axis = np.where(hidden, "", axis)
    other = _choose_names(rng, CHRONIC_SHARES, without)
    hidden = paced | np.isin(conduction, ("LBBB", "RBBB"))
    other = np.where(hidden, "", other)
    chronic = {"PR": paced}
    for table, drawn in (
        (CONDUCTION_SHARES, conduction),
        (AXIS_SHARES, axis),
        (CHRONIC_SHARES, other),
    ):
        for name in table:
            if name:
                chronic[name] = drawn == name
    return chronic


def draw_patients(key: Key, without: Names = ()) -> SyntheticPatients:
    """Draw the patients of the block with this `key`: (seed, ..., block number). `without`: findings that
    they never have."""
    rng = BlockDraws(*key, PATIENT_KEY)
    shape = {wave: _draw_shape(rng, wave) for wave in _SPREAD}
    chronic = _draw_chronic(rng, without)
    usual = {kind: _choose_names(rng, table, without) for kind, table in VARYING_FINDINGS.items()}
    tilt_rad = rng.gauss(3) * np.deg2rad(_TILT_DEG)
    field = DOWER * (1 + _FIELD_FACTOR * rng.gauss(8, 3))
    field += _FIELD_OFFSET * rng.gauss(8, 3)
    pr_s = 0.155 + 0.014 * rng.gauss()
    qtc_s = 0.405 + 0.018 * rng.gauss()
    rate_bpm = 74 + 8 * rng.gauss()
    ectopic = rng.gauss(3)
    ectopic /= np.linalg.norm(ectopic, axis=1, keepdims=True)
    return SyntheticPatients(
        key=key,
        shape=shape,
        tilt_rad=tilt_rad,
        field=field,
        pr_s=np.clip(pr_s, 0.125, 0.195),
        qtc_s=qtc_s,
        rate_bpm=np.clip(rate_bpm, 60, 98),
        ectopic=ectopic,
        chronic=chronic,
        usual=usual,
        age=np.clip(60 + 17 * rng.gauss(), 18, 95).astype(int),
        female=rng.random(BLOCK_PATIENTS) < 0.48,
    )


def draw_findings(rng: BlockDraws, patients: SyntheticPatients, without: Names) -> Findings:
    """Draw the findings of a session: rhythm, ectopy, ST-T, and those chronic findings that the rhythm does
    not hide."""
    anew = {kind: _choose_names(rng, table, without) for kind, table in VARYING_FINDINGS.items()}
    today = {}
    for kind in VARYING_FINDINGS:
        kept = rng.random(BLOCK_PATIENTS) < USUAL_FINDING_SHARE[kind]
        today[kind] = np.where(kept, patients.usual[kind], anew[kind])
    has = {name: np.zeros(BLOCK_PATIENTS, bool) for name in CLASS_ABBREVIATIONS}
    for name, mask in patients.chronic.items():
        has[name] = mask.copy()
    rhythm = np.where(has["PR"], "", today["rhythm"])
    for name in RHYTHM_SHARES:
        has[name] = rhythm == name
    sinus = np.isin(rhythm, ("NSR", "SB", "STach"))
    has["PAC"] = (today["ectopy"] == "PAC") & sinus
    has["PVC"] = (today["ectopy"] == "PVC") & (sinus | has["AF"])
    has["IAVB"] &= sinus | has["SA"]
    hidden = has["PR"] | has["LBBB"] | has["RBBB"] | has["AFL"]
    st_t = np.where(hidden, "", today["ST-T"])
    for name in REPOLARISATION_SHARES:
        if name:
            has[name] = st_t == name
    return has
