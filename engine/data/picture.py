"""Draw every augmentation of an ECG: grey before, colour after. Modelled on figure 1B of Oh et al. 2022.

Upper rows: one lead of the first half, with a panel and the drawn parameters for each kind of noise. Below: twelve leads under
random lead masking, and the two views of 3KG.

    python -m engine.data.picture augmentations.png [--data DATASET --row 0] [--lead II] [--seed 464]
"""

import sys
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from data_tools.dataset import DataError, Dataset
from engine.common import LEADS, ConfigError, Parser
from engine.data.augment import AUTHORS_NOISE, PAPER_NOISE, AugmentConfig, ThreeKG, augment, axis, formula, numpy_ops
from engine.data.augment_draws import FROM_DIPOLE, Params, draws, white, white_bank

FS_HZ, HALF = 500.0, 2500
TIME_S = np.arange(2 * HALF) / FS_HZ
INK, GREY, BEFORE = "#14141c", "#75757d", "#8f8f98"
PAPER, AUTHORS, MASK, VIEW = "#2f6690", "#c0641c", "#5b3a72", "#2a7a4f"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "text.parse_math": False,
    "axes.edgecolor": "none",
    "axes.axisbelow": True,
}
STYLE |= {"xtick.labelsize": 8, "ytick.labelsize": 8, "xtick.labelcolor": GREY, "ytick.labelcolor": GREY}
STYLE |= {"xtick.major.size": 0, "ytick.major.size": 0, "ytick.minor.size": 0, "grid.color": "#ececf0", "grid.linewidth": 0.6}
TITLES = {"powerline": "Powerline", "emg": "Electromyographic", "wander": "Baseline wander", "shift": "Baseline shift"}
SETS = {
    "": "",
    "physio3": "powerline, EMG and wander",
    "physio4": "all four",
    "authors_physio4": "all four, limb leads again from I and II",
}
SEED = 464  # chosen because all its draws have medium size

# Waves of the synthetic ECG: Frank axis, centre (s from R), width (s), amplitude (mV)
WAVES = [(0, -0.16, 0.022, 0.08), (1, -0.16, 0.022, 0.13), (0, -0.022, 0.008, -0.12), (2, -0.018, 0.010, -0.45)]
WAVES += [(0, 0.0, 0.011, 1.15), (1, 0.0, 0.010, 0.85), (2, 0.012, 0.014, 0.55), (1, 0.028, 0.010, -0.18)]
WAVES += [(0, 0.26, 0.050, 0.24), (1, 0.26, 0.050, 0.22), (2, 0.24, 0.060, -0.28)]


def synthetic_ecg() -> np.ndarray:
    """[12, 5000] mV: a regular rhythm, with Gaussian waves of a dipole."""
    from_r_s = TIME_S[:, None] - np.arange(-0.4, 11, 0.82)
    dipole = np.zeros((3, 2 * HALF))
    for direction, centre_s, width_s, mv in WAVES:
        dipole[direction] += mv * np.exp(-0.5 * ((from_r_s - centre_s) / width_s) ** 2).sum(axis=1)
    return (FROM_DIPOLE @ dipole).astype(np.float32)


def stored_ecg(url: str, row: int) -> np.ndarray:
    """[12, 5000] mV."""
    dataset = Dataset.open(url)
    if not 0 <= row < len(dataset):
        raise ConfigError(f"--row={row}: {url} has {len(dataset)} crops: use 0 to {len(dataset) - 1}")
    return dataset.read(row).astype(np.float32) * np.float32(1e-3)


def figure(ecg: np.ndarray, title: str, lead: int, seed: int) -> Figure:
    halves = np.ascontiguousarray(ecg.reshape(12, 2, HALF).swapaxes(0, 1)[None])  # [B = 1, S, L, T]
    page = Figure(figsize=(13.5, 13), dpi=120, facecolor="white")
    page.text(0.05, 0.975, title, size=14, weight="bold", color=INK)
    legend = f"Grey: before. Colour: after. Upper rows: lead {LEADS[lead]} of the first half, mV over s. Seed {seed}."
    page.text(0.05, 0.957, legend, size=9.5, color=GREY)
    upper = page.add_gridspec(3, 4, left=0.05, right=0.99, top=0.92, bottom=0.525, hspace=0.46, wspace=0.06)
    panels: Any = upper.subplots(sharey=True)
    for axes, noise in zip(panels.flat, [*SETS, *PAPER_NOISE, *AUTHORS_NOISE], strict=True):
        after, p = apply(halves, AugmentConfig(rlm=0, noise=noise), seed)
        _draw_lead(axes, halves[0, 0, lead], after[0, 0, lead], noise)
        if noise in SETS:
            _title(axes, noise or "Original", SETS[noise])
        else:
            _title(
                axes, TITLES[formula(noise)] + ", authors' code" * (noise in AUTHORS_NOISE), _describe(formula(noise), p, lead)
            )
    lower = page.add_gridspec(1, 4, left=0.05, right=0.99, top=0.455, bottom=0.025, wspace=0.14)
    masked, p = apply(halves, AugmentConfig(), seed)
    views, _ = apply(halves[:, :1], AugmentConfig(rlm=0, threekg=ThreeKG()), seed)
    first, second = p["keep"].sum(axis=(2, 3))[0]
    axes = page.add_subplot(lower[0, :2])
    _draw_leads(axes, np.hstack(halves[0]), np.hstack(masked[0]), MASK)
    _title(axes, "Random lead masking", f"{first} of 12 leads left in the first half, {second} in the second")
    axes.axvline(5, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    for i, view in enumerate(views[0]):
        axes = page.add_subplot(lower[0, 2 + i])
        _draw_leads(axes, halves[0, 0], view, VIEW)
        _title(axes, f"3KG, view {i + 1}", "dipole turned and stretched, half of each lead zeroed")
    return page


def apply(halves: np.ndarray, config: AugmentConfig, seed: int) -> tuple[np.ndarray, Params]:
    p = draws(config, seed, np.zeros(1, int), np.zeros(1, int), samples=HALF)
    if "white_start" in p:
        p["white"] = white(white_bank(seed), p["white_start"], HALF)
    ops = numpy_ops()
    return np.asarray(augment(halves, p, config, axis(HALF, FS_HZ, ops), ops)), p


def _describe(kind: str, p: Params, lead: int) -> str:
    """The parameters of one kind of noise, as drawn for this lead."""
    drawn = {name.removeprefix(f"{kind}_"): values[0, 0, lead % values.shape[2]] for name, values in p.items()}
    a = " ".join(f"{value:.2f}" for value in drawn["amplitude"])
    if kind == "powerline":
        return f"{drawn['hz'][0]:.0f} Hz, a = {a} mV"
    if kind == "emg":
        return f"a = {a} mV"
    if kind == "wander":
        return f"{' '.join(f'{hz:.2f}' for hz in drawn['hz'])} Hz, a = {a} mV, C = {drawn['gain'][0]:.2f}"
    return f"{a} mV from {drawn['start'][0] / FS_HZ:.1f} to {drawn['stop'][0] / FS_HZ:.1f} s"


def _draw_lead(axes: Axes, before: np.ndarray, after: np.ndarray, noise: str) -> None:
    colour = AUTHORS if noise.startswith("authors") else PAPER
    axes.plot(TIME_S[:HALF], after, color=colour if noise else INK, linewidth=0.8)
    if noise:  # draw the original on top: the noise would hide it
        axes.plot(TIME_S[:HALF], before, color="white", linewidth=1.6, alpha=0.55)
        axes.plot(TIME_S[:HALF], before, color=BEFORE, linewidth=0.7)
    axes.set_xlim(0, 5)
    axes.xaxis.set_major_locator(MultipleLocator(1))
    axes.yaxis.set_major_locator(MultipleLocator(1))
    axes.yaxis.set_minor_locator(MultipleLocator(0.5))
    axes.grid(which="both")


def _draw_leads(axes: Axes, before: np.ndarray, after: np.ndarray, colour: str) -> None:
    """Draw twelve leads, one below the other, 2 mV apart."""
    time_s, level = TIME_S[: before.shape[1]], -2.0 * np.arange(12)
    axes.plot(time_s, before.T + level, color="#b9b9c0", linewidth=0.6)
    axes.plot(time_s, after.T + level, color=colour, linewidth=0.8)
    axes.set_xlim(0, before.shape[1] / FS_HZ)
    axes.set_ylim(-23.6, 1.8)
    axes.set_yticks(level, LEADS)
    axes.xaxis.set_major_locator(MultipleLocator(1))


def _title(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", pad=15, fontsize=10, color=INK, weight="bold")
    axes.annotate(subtitle, (0, 1), (0, 4), "axes fraction", "offset points", fontsize=8, color=GREY)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m engine.data.picture", description="draw each augmentation of an ECG")
    parser.add_argument("out", metavar="OUT.png")
    parser.add_argument("--data", metavar="DATASET", help="a dataset (default: a synthetic ECG)")
    parser.add_argument("--row", type=int, default=0, help="crop of the dataset (default 0)")
    parser.add_argument("--lead", default="II", choices=LEADS, help="lead in the upper rows (default II)", metavar="LEAD")
    parser.add_argument("--seed", type=int, default=SEED, help=f"seed of the augmentations (default {SEED})")
    given = parser.parse_args(arguments)
    name = f"crop {given.row} of {given.data}" if given.data else "a synthetic ECG"
    try:
        ecg = stored_ecg(given.data, given.row) if given.data else synthetic_ecg()
        with matplotlib.rc_context(STYLE):
            page = figure(ecg, f"Augmentations of {name}", LEADS.index(given.lead), given.seed)
            page.savefig(given.out, metadata={"Software": None})
    except (ConfigError, DataError, OSError, ValueError) as error:  # ValueError: matplotlib does not know the suffix
        print(f"engine.data.picture: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
