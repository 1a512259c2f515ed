"""Draw an ECG under every augmentation: the original in grey, the augmented one in colour. The figure is
modelled on figure 1B of Oh et al. 2022.

Upper rows: one lead of the first half, with a panel and the drawn parameters for each kind of
noise. Below: twelve leads under random lead masking, and the two views of 3KG.

    python -m docs.augmentations augmentations.png --data DATASET [--crop 0]
"""

import sys
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from omnilead.data_tools.dataset import DataError, Dataset
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.io.terminal import Parser, tell
from omnilead.downstream.tasks.metrics import Array
from omnilead.engine.data.augmentations import AugmentConfig
from omnilead.engine.data.augmentations.noise import AUTHORS_NOISE, PAPER_NOISE
from omnilead.engine.data.augmentations.stage import Params, Random, augment, draw_parameters
from omnilead.engine.data.augmentations.threekg import ThreeKG
from omnilead.engine.data.config import FS_HZ, HALF
from omnilead.engine.data.torch_ops import TorchOps
from omnilead.engine.settings.commandline import handle_interrupts
from omnilead.engine.settings.errors import ConfigError

TIME_S = np.arange(2 * HALF) / FS_HZ
INK, GREY, BEFORE = "#14141c", "#75757d", "#8f8f98"
PAPER, AUTHORS, MASK, VIEW = "#2f6690", "#c0641c", "#5b3a72", "#2a7a4f"
FIGURE_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "text.parse_math": False,
    "axes.edgecolor": "none",
    "axes.axisbelow": True,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.labelcolor": GREY,
    "ytick.labelcolor": GREY,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "grid.color": "#ececf0",
    "grid.linewidth": 0.6,
}
NOISE_TITLES = {
    "powerline": "Powerline",
    "emg": "Electromyographic",
    "wander": "Baseline wander",
    "shift": "Baseline shift",
}
NOISE_SETS = {
    "": "",
    "physio3": "powerline, EMG and wander",
    "physio4": "all four",
    "authors_physio4": "all four, limb leads again from I and II",
}
FIGURE_SEED = 464  # chosen because noise of all kinds has medium strength with this seed
DRAWN_LEAD = 1  # index of lead II, which the upper rows show


def draw_figure(ecg: Array, title: str) -> Figure:
    """Returns the page that shows all augmentations of one ECG, [12, 5000] in millivolts."""
    # The two halves as a batch of one: [1, S, L, T]
    halves = np.ascontiguousarray(ecg.reshape(12, 2, HALF).swapaxes(0, 1)[None])
    page = Figure(figsize=(13.5, 13), dpi=120, facecolor="white")
    page.text(0.05, 0.975, title, size=14, weight="bold", color=INK)
    legend = (
        f"Grey: before. Colour: after. Upper rows: lead {LEADS[DRAWN_LEAD]} of the first half, mV over "
        f"s. Seed {FIGURE_SEED}."
    )
    page.text(0.05, 0.957, legend, size=9.5, color=GREY)
    _draw_noise(page, halves)
    grid = page.add_gridspec(1, 4, left=0.05, right=0.99, top=0.455, bottom=0.025, wspace=0.14)
    masked, p = augmented_halves_and_params(halves, AugmentConfig())
    first, second = p["keep"].sum(axis=(2, 3))[0]
    axes = page.add_subplot(grid[0, :2])
    _draw_leads(axes, np.hstack(halves[0]), np.hstack(masked[0]), MASK)
    left = f"{first} of 12 leads left in the first half, {second} in the second"
    _draw_title(axes, "Random lead masking", left)
    axes.axvline(5, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    views, _ = augmented_halves_and_params(halves[:, :1], AugmentConfig(rlm=0, threekg=ThreeKG()))
    for i, view in enumerate(views[0]):
        axes = page.add_subplot(grid[0, 2 + i])
        _draw_leads(axes, halves[0, 0], view, VIEW)
        _draw_title(
            axes, f"3KG, view {i + 1}", "dipole turned and stretched, half of each lead zeroed"
        )
    return page


def _draw_noise(page: Figure, halves: Array) -> None:
    """Draws a panel for each kind of noise, with the original and the noisy lead."""
    place = {"left": 0.05, "right": 0.99, "top": 0.92, "bottom": 0.525}
    panels: Any = page.add_gridspec(3, 4, **place, hspace=0.46, wspace=0.06).subplots(sharey=True)
    for axes, noise in zip(panels.flat, [*NOISE_SETS, *PAPER_NOISE, *AUTHORS_NOISE], strict=True):
        after, p = augmented_halves_and_params(halves, AugmentConfig(rlm=0, noise=noise))
        _draw_lead(axes, halves[0, 0, DRAWN_LEAD], after[0, 0, DRAWN_LEAD], noise)
        if noise in NOISE_SETS:
            _draw_title(axes, noise or "Original", NOISE_SETS[noise])
        else:
            kind = noise.removeprefix("authors_")
            title = NOISE_TITLES[kind] + ", authors' code" * (noise in AUTHORS_NOISE)
            _draw_title(axes, title, _params_text(kind, p))


def augmented_halves_and_params(halves: Array, config: AugmentConfig) -> tuple[Array, Params]:
    """Returns (the augmented halves, the parameters that were drawn for the augmentation)."""
    p = draw_parameters(config.stages, Random(FIGURE_SEED, np.zeros(1, int), np.zeros(1, int)))
    given = {name: torch.from_numpy(values) for name, values in p.items()}
    x_BSLT = torch.from_numpy(halves.copy())  # copied, because augment changes its input
    ops = TorchOps(HALF, FS_HZ, x_BSLT.device, FIGURE_SEED)
    return augment(x_BSLT, given, config.stages, ops).numpy(), p


def _params_text(kind: str, p: Params) -> str:
    """Returns as text the parameters that were drawn for one kind of noise and the lead shown."""
    drawn = {
        name.removeprefix(f"{kind}_"): values[0, 0, DRAWN_LEAD % values.shape[2]]
        for name, values in p.items()
    }
    a = " ".join(f"{value:.2f}" for value in drawn["amplitude"])
    if kind == "powerline":
        return f"{drawn['hz'][0]:.0f} Hz, a = {a} mV"
    if kind == "emg":
        return f"a = {a} mV"
    if kind == "wander":
        return (
            f"{' '.join(f'{hz:.2f}' for hz in drawn['hz'])} Hz, a = {a} mV, C = "
            f"{drawn['gain'][0]:.2f}"
        )
    return f"{a} mV from {drawn['start'][0] / FS_HZ:.1f} to {drawn['stop'][0] / FS_HZ:.1f} s"


def _draw_lead(axes: Axes, before: Array, after: Array, noise: str) -> None:
    colour = AUTHORS if noise.startswith("authors") else PAPER
    axes.plot(TIME_S[:HALF], after, color=colour if noise else INK, linewidth=0.8)
    if noise:  # the original is drawn on top, because the noise would hide it
        axes.plot(TIME_S[:HALF], before, color="white", linewidth=1.6, alpha=0.55)
        axes.plot(TIME_S[:HALF], before, color=BEFORE, linewidth=0.7)
    axes.set_xlim(0, 5)
    axes.xaxis.set_major_locator(MultipleLocator(1))
    axes.yaxis.set_major_locator(MultipleLocator(1))
    axes.yaxis.set_minor_locator(MultipleLocator(0.5))
    axes.grid(which="both")


def _draw_leads(axes: Axes, before: Array, after: Array, colour: str) -> None:
    """Draws twelve leads before and after an augmentation, one below the other, 2 mV apart."""
    time_s, level = TIME_S[: before.shape[1]], -2.0 * np.arange(12)
    axes.plot(time_s, before.T + level, color="#b9b9c0", linewidth=0.6)
    axes.plot(time_s, after.T + level, color=colour, linewidth=0.8)
    axes.set_xlim(0, before.shape[1] / FS_HZ)
    axes.set_ylim(-23.6, 1.8)
    axes.set_yticks(level, LEADS)
    axes.xaxis.set_major_locator(MultipleLocator(1))


def _draw_title(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", pad=15, fontsize=10, color=INK, weight="bold")
    axes.annotate(
        subtitle, (0, 1), (0, 4), "axes fraction", "offset points", fontsize=8, color=GREY
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m docs.augmentations",
        description="draw each augmentation of an ECG",
    )
    parser.add_argument("out", metavar="OUT.png")
    parser.add_argument("--data", metavar="DATASET", required=True, help="a dataset")
    parser.add_argument(
        "--crop", type=int, default=0, metavar="N", help="crop of the dataset (default 0)"
    )
    given = parser.parse_args(arguments)
    try:
        dataset = Dataset.open(given.data)
        if not 0 <= given.crop < len(dataset):
            raise ConfigError(
                f"--crop {given.crop}: {given.data} has {len(dataset)} crops: use 0 to "
                f"{len(dataset) - 1}"
            )
        ecg = dataset.read(given.crop).astype(np.float32) * np.float32(1e-3)
        with matplotlib.rc_context(FIGURE_STYLE):
            page = draw_figure(ecg, f"Augmentations of crop {given.crop} of {given.data}")
            page.savefig(given.out, metadata={"Software": None})
    except (
        ConfigError,
        DataError,
        OSError,
        ValueError,  # raised by matplotlib if it does not know the suffix of OUT.png
    ) as error:
        tell(f"docs.augmentations: {' '.join(str(error).split())}")
        return 2
    return 0


if __name__ == "__main__":
    handle_interrupts("docs.augmentations")
    sys.exit(main())
