"""What each augmentation does to an ECG: grey before, colour after, on one scale. After figure 1B of Oh et al. 2022.

    a crop [12, 5000] of a dataset, or a drawn one -> two halves -> draws and augment for each panel's config -> OUT.png

Upper rows: one lead of the first half, a panel for each kind of noise, the numbers drawn for it above. Below: twelve leads
under random lead masking, and as the two views of 3KG.

    python -m engine.data.picture augmentations.png [--data DATASET --row 0] [--lead II] [--seed 464]
"""

import sys
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from engine.common import LEADS, ConfigError, Parser
from engine.data.augment import AUTHORS_NOISE, PAPER_NOISE, AugmentConfig, ThreeKG, augment, axis, formula, numpy_ops
from engine.data.augment_draws import FROM_DIPOLE, Params, draws, white, white_bank

FS_HZ, HALF = 500.0, 2500
TIME_S = np.arange(2 * HALF) / FS_HZ
FONT, INK, GREY, BEFORE, GRID = "DejaVu Sans", "#14141c", "#75757d", "#8f8f98", "#ececf0"
PAPER, AUTHORS, MASK, VIEW = "#2f6690", "#c0641c", "#5b3a72", "#2a7a4f"
SEED = 464  # its draws are all of middling size
TITLES = {"powerline": "Powerline", "emg": "Electromyographic", "wander": "Baseline wander", "shift": "Baseline shift"}
SUMS = {"physio3": ("powerline, EMG and wander", PAPER), "physio4": ("all four", PAPER)}
SUMS |= {"authors_physio4": ("all four, limb leads again from I and II", AUTHORS)}

# of the drawn ECG's waves: Frank axis, centre (s from R), width (s), amplitude (mV)
_WAVES: tuple[tuple[int, float, float, float], ...]
_WAVES = ((0, -0.16, 0.022, 0.08), (1, -0.16, 0.022, 0.13), (0, -0.022, 0.008, -0.12), (2, -0.018, 0.010, -0.45))
_WAVES = (*_WAVES, (0, 0.0, 0.011, 1.15), (1, 0.0, 0.010, 0.85), (2, 0.012, 0.014, 0.55), (1, 0.028, 0.010, -0.18))
_WAVES = (*_WAVES, (0, 0.26, 0.050, 0.24), (1, 0.26, 0.050, 0.22), (2, 0.24, 0.060, -0.28))


def drawn_ecg() -> np.ndarray:
    """[12, 5000] mV: a regular rhythm of Gaussian waves of a dipole."""
    from_r_s = TIME_S[:, None] - np.arange(-0.4, 11, 0.82)
    dipole = np.zeros((3, 2 * HALF))
    for direction, centre_s, width_s, mv in _WAVES:
        dipole[direction] += mv * np.exp(-0.5 * ((from_r_s - centre_s) / width_s) ** 2).sum(axis=1)
    return (FROM_DIPOLE @ dipole).astype(np.float32)


def stored_ecg(url: str, row: int) -> np.ndarray:
    """[12, 5000] mV of a dataset's row."""
    from data_tools.dataset import Dataset

    try:
        dataset = Dataset.open(url)
        if not 0 <= row < len(dataset):
            raise ConfigError(f"--row={row}: {url} has {len(dataset)} crops: use 0 to {len(dataset) - 1}")
        return dataset.read(row).astype(np.float32) * np.float32(1e-3)
    except Exception as error:
        if "DataError" not in (kind.__name__ for kind in type(error).__mro__):  # data_tools.errors is no door of theirs
            raise
        raise ConfigError(f"--data: {error}") from None


def figure(ecg: np.ndarray, title: str, lead: int, seed: int) -> Figure:
    halves = np.ascontiguousarray(ecg.reshape(12, 2, HALF).swapaxes(0, 1)[None])  # [B = 1, S, L, T]
    page = Figure(figsize=(13.5, 13), dpi=120, facecolor="white")
    FigureCanvasAgg(page)
    legend = f"Grey: before. Colour: after. Upper rows: lead {LEADS[lead]} of the first half, mV over s. Seed {seed}."
    _write(page, 0.05, 0.975, title, 14, weight="bold")
    _write(page, 0.05, 0.957, legend, 9.5, color=GREY)
    upper = page.add_gridspec(3, 4, left=0.05, right=0.99, top=0.92, bottom=0.525, hspace=0.46, wspace=0.06)
    lower = page.add_gridspec(1, 4, left=0.05, right=0.99, top=0.455, bottom=0.025, wspace=0.14)
    panels = [page.add_subplot(upper[i // 4, i % 4]) for i in range(12)]
    before = halves[0, 0, lead]
    _trace(panels[0], before, before, INK, "Original", "")
    for axes, (kinds, (what, colour)) in zip(panels[1:4], SUMS.items(), strict=True):
        after, _ = apply(halves, AugmentConfig(rlm=0, noise=kinds), seed)
        _trace(axes, before, after[0, 0, lead], colour, kinds, what)
    for axes, kind in zip(panels[4:], PAPER_NOISE + AUTHORS_NOISE, strict=True):
        after, p = apply(halves, AugmentConfig(rlm=0, noise=kind), seed)
        owner, colour = ("", PAPER) if kind in PAPER_NOISE else (", authors' code", AUTHORS)
        _trace(axes, before, after[0, 0, lead], colour, TITLES[formula(kind)] + owner, _numbers(kind, p, lead))
    _share_scale(panels)
    _draw_twelve(page, lower, halves, seed)
    return page


def apply(halves: np.ndarray, config: AugmentConfig, seed: int) -> tuple[np.ndarray, Params]:
    p = draws(config, seed, np.zeros(1, int), np.zeros(1, int), samples=HALF)
    if "white_start" in p:
        p["white"] = white(white_bank(seed), p["white_start"], HALF)
    ops = numpy_ops()
    return np.asarray(augment(halves, p, config, axis(HALF, FS_HZ, ops), ops)), p


def _numbers(kind: str, p: Params, lead: int) -> str:
    """What was drawn for a panel."""

    def drawn(name: str) -> np.ndarray:
        values = p[f"{formula(kind)}_{name}"][0, 0]  # [1 or L, K]
        row: np.ndarray = values[min(lead, len(values) - 1)]
        return row

    a = " ".join(f"{value:.2f}" for value in drawn("amplitude"))
    if formula(kind) == "powerline":
        return f"{drawn('hz')[0]:.0f} Hz, a = {a} mV"
    if formula(kind) == "emg":
        return f"a = {a} mV"
    if formula(kind) == "wander":
        return f"{' '.join(f'{hz:.2f}' for hz in drawn('hz'))} Hz, a = {a} mV, C = {drawn('gain')[0]:.2f}"
    return f"{a} mV from {drawn('start')[0] / FS_HZ:.1f} to {drawn('stop')[0] / FS_HZ:.1f} s"


def _trace(axes: Axes, before: np.ndarray, after: np.ndarray, colour: str, title: str, numbers: str) -> None:
    axes.plot(TIME_S[:HALF], after, color=colour, linewidth=0.8)
    if after is not before:  # over the noise, which would bury it
        axes.plot(TIME_S[:HALF], before, color="white", linewidth=1.6, alpha=0.55)
        axes.plot(TIME_S[:HALF], before, color=BEFORE, linewidth=0.7)
    _title(axes, title, numbers)
    axes.set_xlim(0, 5)


def _share_scale(panels: Sequence[Axes]) -> None:
    low, high = (end([axes.get_ylim()[i] for axes in panels]) for i, end in enumerate((min, max)))
    for i, axes in enumerate(panels):
        axes.set_ylim(low, high)
        axes.xaxis.set_major_locator(MultipleLocator(1))
        axes.yaxis.set_major_locator(MultipleLocator(1))
        axes.yaxis.set_minor_locator(MultipleLocator(0.5))
        axes.grid(color=GRID, linewidth=0.6, which="both")
        axes.set_axisbelow(True)
        axes.tick_params(which="both", length=0, labelsize=8, labelcolor=GREY, labelleft=i % 4 == 0)
        axes.spines[:].set_visible(False)


def _draw_twelve(page: Figure, where: object, halves: np.ndarray, seed: int) -> None:
    masked, p = apply(halves, AugmentConfig(), seed)
    views, _ = apply(halves[:, :1], AugmentConfig(rlm=0, threekg=ThreeKG()), seed)
    both = np.concatenate([masked[0, 0], masked[0, 1]], axis=1), np.concatenate([halves[0, 0], halves[0, 1]], axis=1)
    kept = p["keep"].sum(axis=(2, 3))[0]
    axes = page.add_subplot(where[0, :2])  # type: ignore[index]
    _stack(
        axes,
        both[1],
        both[0],
        MASK,
        "Random lead masking",
        f"{kept[0]} of 12 leads left in the first half, {kept[1]} in the second",
    )
    axes.axvline(5, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    for i in range(2):
        axes = page.add_subplot(where[0, 2 + i])  # type: ignore[index]
        shape = "dipole turned and stretched, half of each lead zeroed"
        _stack(axes, halves[0, 0], views[0, i], VIEW, f"3KG, view {i + 1}", shape)


def _stack(axes: Axes, before: np.ndarray, after: np.ndarray, colour: str, title: str, numbers: str) -> None:
    """Twelve leads under each other, 2 mV apart."""
    step_mv, seconds = 2.0, before.shape[1] / FS_HZ
    for i in range(12):
        level = -step_mv * i
        axes.plot(TIME_S[: before.shape[1]], before[i] + level, color="#b9b9c0", linewidth=0.6)
        axes.plot(TIME_S[: before.shape[1]], after[i] + level, color=colour, linewidth=0.8)
    _title(axes, title, numbers)
    axes.set_xlim(0, seconds)
    axes.set_ylim(-step_mv * 11.8, step_mv * 0.9)
    axes.set_yticks([-step_mv * i for i in range(12)], LEADS)
    axes.xaxis.set_major_locator(MultipleLocator(1))
    axes.tick_params(length=0, labelsize=8, labelcolor=GREY)
    axes.spines[:].set_visible(False)


def _title(axes: Axes, title: str, numbers: str) -> None:
    axes.annotate(title, (0, 1), (0, 15), "axes fraction", "offset points", fontsize=10, color=INK, family=FONT, weight="bold")
    axes.annotate(numbers, (0, 1), (0, 4), "axes fraction", "offset points", fontsize=8, color=GREY, family=FONT)


def _write(page: Figure, x: float, y: float, text: str, size: float, color: str = INK, weight: str = "normal") -> None:
    page.text(x, y, text, fontsize=size, color=color, weight=weight, family=FONT, parse_math=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m engine.data.picture", description="a picture of each augmentation")
    parser.add_argument("out", metavar="OUT.png")
    parser.add_argument("--data", metavar="DATASET", help="a dataset; without it the ECG is a drawn one")
    parser.add_argument("--row", type=int, default=0, help="crop of the dataset (default 0)")
    parser.add_argument("--lead", default="II", help="of the upper rows (default II)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the augmentations (default {SEED})")
    given = parser.parse_args(arguments)
    of = f"crop {given.row} of {given.data}" if given.data else "a drawn ECG"
    try:
        if given.lead not in LEADS:
            raise ConfigError(f"--lead={given.lead!r}: no lead is called so: use one of {' '.join(LEADS)}")
        ecg = stored_ecg(given.data, given.row) if given.data else drawn_ecg()
        page = figure(ecg, f"Augmentations of {of}", LEADS.index(given.lead), given.seed)
        page.savefig(given.out, metadata={"Software": None})
    except (ConfigError, OSError, ValueError) as error:  # ValueError: matplotlib's, of a suffix that it does not know
        print(f"engine.data.picture: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
