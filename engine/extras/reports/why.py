"""Where a model looks in an ECG, drawn on the ECG; and whether the drawing means anything.

    omnilead show A.hea --model TUNED --why AF --png why.png         also hospital files, .npy --fs 500
    omnilead show DATASET --crop 7 --model TUNED --why AF --png why.png

Integrated gradients (Sundararajan et al. 2017) of the logit of a class, of a value or of a risk,
averaged over the record's windows: how much each sample of each lead adds to it, compared with
an ECG of zeros, which is how a model sees missing leads. They sum to the difference between the
two. What a read-out measures in the signal, such as the rhythm, is kept as it is; its part of the
difference is told apart.

The deletion curve is the same output while the stretches of 100 ms of a lead are set to zero, those
that add most first, and in random order. Only if it falls clearly faster than at random does the
drawing show what the model uses.

Axes: P stretches.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

import omnilead.data_tools.extras.plots as plots
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.terminal import show

from ...data.config import FS_HZ, HALF
from ...inference.commands import Setup, exit_code, prepare
from ...inference.inputs import dataset_of, dataset_source, open_data
from ...inference.outputs import predictions
from ...inference.trained_model import ROWS, TrainedModel
from ...model.encoder import Encoder
from ...model.input import Input
from ...settings import options as shared
from ...settings.commandline import options_of, writable
from ...settings.errors import ConfigError
from ...training.metrics import Array

# The output of each window: of these samples, with measurements of those
Score = Callable[[Tensor, Tensor], Tensor]
FIRST_STEPS, MOST_STEPS = 32, 1024
TOLERANCE = 0.01  # of the difference between the ECG and zeros, or of a tenth if that is more
# Steps are close together near zero, where the encoder's group norm makes the output change most
CROWDING = 4
STRETCH_S, EYE_S = 0.1, 0.04  # deleted at once; averaged in the drawing
SHARES = np.linspace(0, 1, 21)
DRAWS = 5
FOR, AGAINST = (0.85, 0.37, 0.01), (0.0, 0.45, 0.70)  # Okabe and Ito: for colour blindness
BELOW_MM = 46.0  # of the printout
HEIGHT_MM = plots.PAGE_MM[1] + BELOW_MM


class Attribution(NamedTuple):
    a_RLT: Tensor  # the part of each sample
    output: float
    of_zeros: float
    measured: float  # the part of what the read-out measures
    gap: float  # between the sum of the parts and the difference
    steps: int
    curve: list[float]  # after deleting SHARES
    random: list[list[float]]


def score_of(model: TrainedModel, k: int) -> Score:
    model.requires_grad_(False)  # so that only what depends on the samples has a gradient
    if isinstance(model.encoder, Encoder):
        # The same outputs with true gradients: pre-training scales them, fine-tuning cuts them off
        model.encoder.conv.feature_grad = 1.0

    def score(x_RLT: Tensor, measured_RLT: Tensor) -> Tensor:
        y_RK = model.logits_of(model.tokens(x_RLT), measured_RLT)
        if model.head_info and model.head_info.kind == "regression":
            y_RK = model.head_info.scores(y_RK)
        return y_RK[:, k]

    return score


def attribute(score: Score, x_RLT: Tensor, fs_hz: float) -> Attribution:
    zeros_RLT = torch.zeros_like(x_RLT)
    with torch.no_grad():
        output = score(x_RLT, x_RLT).mean().item()
        kept = score(zeros_RLT, x_RLT).mean().item()
        of_zeros = score(zeros_RLT, zeros_RLT).mean().item()
    steps = FIRST_STEPS // 2
    gap = np.inf
    while gap > TOLERANCE * max(abs(output - kept), 0.1) and steps < MOST_STEPS:
        steps *= 2
        parts = [integrated(score, part, steps) for part in x_RLT.split(ROWS)]
        a_RLT = torch.cat(parts) / len(x_RLT)
        gap = abs(a_RLT.sum().item() - (output - kept))
    curve, *random = deletion_curves(score, x_RLT, a_RLT, round(STRETCH_S * fs_hz))
    return Attribution(a_RLT, output, of_zeros, kept - of_zeros, gap, steps, curve, random)


def deletion_curves(score: Score, x_RLT: Tensor, a_RLT: Tensor, samples: int) -> list[list[float]]:
    """The output after each of SHARES; first by attribution, then in random orders."""
    stretch_T = torch.arange(x_RLT.shape[2], device=x_RLT.device) // samples
    there_RLP = in_stretches(x_RLT.abs(), stretch_T) > 0  # a missing lead cannot be deleted
    added_RLP = in_stretches(a_RLT, stretch_T)
    draw = torch.Generator().manual_seed(0)
    firsts = [torch.rand(added_RLP.shape, generator=draw).to(x_RLT) for _ in range(DRAWS)]
    curves = []
    for first_RLP in (added_RLP, *firsts):
        order = first_RLP.masked_fill(~there_RLP, -torch.inf).flatten().argsort(descending=True)
        rank_RLP = order.argsort().view_as(first_RLP)
        curve = []
        for count in SHARES * int(there_RLP.sum()):
            left_RLT = x_RLT * (rank_RLP >= count)[..., stretch_T]
            with torch.no_grad():
                curve.append(score(left_RLT, left_RLT).mean().item())
        curves.append(curve)
    return curves


def integrated(score: Score, x_RLT: Tensor, steps: int) -> Tensor:
    total_RLT = torch.zeros_like(x_RLT)
    for step in range(steps):
        at = (step + 0.5) / steps
        part_RLT = (at**CROWDING * x_RLT).requires_grad_()
        output_R = score(part_RLT, x_RLT)
        if not output_R.requires_grad:
            raise ConfigError(
                "the model's output has no gradient: it has boosted trees, or code that leaves "
                "PyTorch's graph: use a linear head (docs/readouts.md)"
            )
        total_RLT += (
            CROWDING * at ** (CROWDING - 1) * torch.autograd.grad(output_R.sum(), part_RLT)[0]
        )
    return total_RLT * x_RLT / steps


def in_stretches(x_RLT: Tensor, stretch_T: Tensor) -> Tensor:
    sum_RLP = x_RLT.new_zeros(*x_RLT.shape[:2], int(stretch_T[-1]) + 1)
    return sum_RLP.index_add_(2, stretch_T, x_RLT)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(draw_why, "show", __doc__, arguments)
    return exit_code("omnilead show", lambda: draw_why(**options), options["png"], "--png")


def draw_why(
    what: Annotated[str, Option("a record, an array, or a dataset with --crop", "DATASET|FILE")],
    *,
    model: Annotated[str, Option("a model with a head")],
    why: Annotated[str, Option("a class, or a label column, or risk", "CLASS")],
    png: Annotated[str, Option("save the figure as .png, .svg or .pdf", "FILE")],
    crop: Annotated[int | None, Option("a crop of the dataset", "ROW")] = None,
    code: shared.Code = False,
    leads: Annotated[
        str | None, Option("shown to the model; of an array, the names of its rows", "L")
    ] = None,
    fs_hz: Annotated[float | None, Option("sampling rate of an array", "HZ", "--fs")] = None,
    unit: Annotated[str | None, Option("of an array: V, mV, uV (mV)")] = None,
    device: shared.Device = "auto",
) -> int:
    ecg = {"leads": leads, "fs_hz": fs_hz, "unit": unit}
    writable(Path(png), "--png")
    plots.picture_kind(Path(png))
    setup = prepare(model, what, device=device, precision="fp32", code=code, **ecg)
    predictions(setup.model)  # refuses models without classes
    classes = setup.model.classes
    if why not in classes:
        raise ConfigError(f"--why {why}: the model's outputs are {', '.join(classes)}")
    k = classes.index(why)
    name, uv_BLT, halves_B = read(setup, what, crop)
    x_RLT = setup.input.windows(uv_BLT, halves_B).to(setup.model.device)
    attribution = attribute(score_of(setup.model, k), x_RLT, setup.input.fs_hz)
    with torch.no_grad():
        score = setup.model.scores(x_RLT)[:, k].mean().item()
    title = f"{why}: {score:.3g} in {name}"
    caption = caption_of(attribution, len(x_RLT), setup.input.window_s)
    uv_LT = uv_BLT[0].numpy()
    halves = int(halves_B[0])
    missing = [LEADS[lead] for lead in np.flatnonzero(~uv_LT.any(1))]
    figure = plots.ecg_figure(uv_LT, halves, title, caption, missing)
    draw(figure, why, by_lead(attribution, setup.input, halves), attribution)
    plots.save(figure, png)
    return show(f"{title}\n{caption}\ndrawn: {png}\n")


def caption_of(attribution: Attribution, windows: int, window_s: float) -> str:
    samples = attribution.output - attribution.of_zeros - attribution.measured
    return (
        f"Logit or value {attribution.output:+.2f}, the mean over {windows} windows of {window_s:g} s; of zeros, as "
        f"missing leads are, {attribution.of_zeros:+.2f}. What the read-out measures adds "
        f"{attribution.measured:+.2f}, the signal {samples:+.2f}: integrated gradients, {attribution.steps} "
        f"steps, off by {attribution.gap:.3f}"
    )


def read(setup: Setup, what: str, crop: int | None) -> tuple[str, Tensor, Array]:
    """The name of the ECG, and its crops with their numbers of halves."""
    dataset = dataset_of(setup.options)
    if (dataset is None) != (crop is None):
        why = "a dataset's ECGs are chosen by" if dataset else "only a dataset has"
        raise ConfigError(f"{what}: {why} --crop ROW")
    source: Any
    if dataset is None:
        source = open_data(setup.options, setup.input).source()
    elif crop in range(len(dataset)):
        source = dataset_source(dataset, np.array([crop]), setup.input, setup.options)
    else:
        raise ConfigError(f"--crop {crop}: the dataset has crops 0 to {len(dataset) - 1}")
    parts = range(source.parts)
    if (records := source.count(parts)) != 1:
        raise ConfigError(f"{what}: has {records:,} records: name one")
    crops: list[Tensor] = []
    halves: list[Array] = []
    rows: list[dict[str, Any]] = []
    for batch in source.batches(parts, lambda units: None):
        crops.append(torch.tensor(batch.uv_BLT))  # a copy: the next batch takes its place
        halves.append(batch.halves_B)
        rows += batch.crops.table.to_pylist()
    name = f"{rows[0]['record']}, from {rows[0]['start_s']:g} s"
    return name, torch.cat(crops), np.concatenate(halves)


def by_lead(attribution: Attribution, model_input: Input, halves: int) -> Array:
    """Of the first crop, for all leads at 500 Hz."""
    a_LT = np.zeros((len(LEADS), HALF * halves))
    windows = int(model_input.count(halves))
    seen = round(windows * model_input.window_s * FS_HZ)
    for lead, a_ST in zip(
        model_input.leads, attribution.a_RLT[:windows].swapaxes(0, 1), strict=True
    ):
        a_LT[lead, :seen] = in_100_ms(a_ST.flatten().cpu().numpy(), seen)
    return a_LT


def in_100_ms(a_T: Array, samples: int) -> Array:
    """What is added within 100 ms, averaged over EYE_S, at 500 Hz."""
    eye = round(EYE_S * FS_HZ * len(a_T) / samples)
    a_T = np.convolve(a_T, np.full(eye, 1 / eye), "same")
    a_T = np.interp(np.arange(samples), np.arange(len(a_T)) * samples / len(a_T), a_T)
    return a_T * STRETCH_S * FS_HZ * len(a_T) / samples


def draw(figure: Any, why: str, a_LT: Array, attribution: Attribution) -> None:
    """Shades the traces on the printout, and adds the scale and the deletion curve below it."""
    most = float(np.quantile(np.abs(a_LT), 0.995)) or 1.0
    (page,) = figure.axes
    for line in page.lines:
        if line.get_gid() == "trace":
            x = np.asarray(line.get_xdata())
            y = np.asarray(line.get_ydata())
            at_T = np.rint((x - plots.TRACE_X_MM) / plots.MM_PER_S * FS_HZ).astype(int)
            lead = LEADS.index(line.get_label().split()[1])
            a_T = a_LT[lead, at_T % a_LT.shape[1]]
            middle = min(plots.ROWS_Y_MM, key=lambda row_y: abs(row_y - np.median(y)))
            shade(page, a_T / most, (x[0], x[-1], middle - 9, middle + 11))
    enlarge(figure, page)
    place = (0.0455, 22 / HEIGHT_MM, 0.28, 7 / HEIGHT_MM)
    scale = figure.add_axes(place, yticks=())
    shade(scale, np.linspace(-1, 1, 200), (-most, most, 0, 1))
    scale.set_title(f"against {why}          for {why}", fontsize=10)
    scale.set_xlabel("added by 100 ms of a lead", fontsize=9)
    add_curves(figure, why, attribution)


def enlarge(figure: Any, page: Axes) -> None:
    """Makes room below the printout, which keeps its size."""
    before = plots.PAGE_MM[1]
    for text in figure.texts:
        y_mm = text.get_position()[1] * before
        text.set_y((y_mm + BELOW_MM) / HEIGHT_MM)
    box = page.get_position()
    bottom_mm = box.y0 * before + BELOW_MM
    height = plots.PAPER_MM[1] / HEIGHT_MM
    page.set_position((box.x0, bottom_mm / HEIGHT_MM, box.width, height))
    width_mm = plots.PAGE_MM[0]
    figure.set_size_inches(width_mm / plots.MM_PER_INCH, HEIGHT_MM / plots.MM_PER_INCH)


def add_curves(figure: Any, why: str, attribution: Attribution) -> None:
    place = (0.42, 14 / HEIGHT_MM, 0.28, 27 / HEIGHT_MM)
    axes = figure.add_axes(place)
    for curve in attribution.random:
        axes.plot(100 * SHARES, curve, color=plots.GREY, lw=0.8)
    axes.plot(100 * SHARES, attribution.curve, color=FOR)
    axes.set_xlabel("% of all stretches of 100 ms set to zero", fontsize=9)
    axes.set_ylabel("logit or value", fontsize=9)
    first, random = np.mean(attribution.curve), np.mean(attribution.random)
    note = (
        f"orange: what is most for {why} first, mean {first:+.2f}\n"
        f"grey: in random order, {DRAWS} times, mean {random:+.2f}\n"
        "The colours mean something for this model\n"
        "only where orange lies well below grey."
    )
    figure.text(0.715, 20 / HEIGHT_MM, note, fontsize=9, color=plots.INK)


def shade(axes: Axes, a_T: Array, extent: tuple[float, float, float, float]) -> None:
    strength_T = np.abs(a_T).clip(0, 1)[:, None] * 0.8
    colour_TC = np.where(a_T[:, None] > 0, FOR, AGAINST)
    image = np.concatenate([colour_TC, strength_T], axis=1)[None]
    axes.imshow(image, extent=extent, aspect="auto", zorder=1)
