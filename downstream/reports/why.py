"""Draw an ECG with what each lead adds to a model's answer.

    omnilead show A.hea --model MODEL --why AF --png why.png         also hospital files, .npy --fs 500
    omnilead show DATASET --crop 7 --model MODEL --why AF --png why.png

A lead adds as much as the logit of the class (or the value, or the risk) falls when the model is shown
zeros instead of the lead, the mean over the record's windows. Leads that say the same stand in for
each other: of the limb leads, two give the other four, so one alone rarely adds much. The numbers say
what the model uses, not where a disease is. For right bundle branch block they point at V1; for
an old infarction or atrial fibrillation do not expect the leads of the textbook.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import omnilead.data_tools.ecg.paper as paper
import omnilead.data_tools.plots as plots
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.terminal import print_result
from omnilead.engine.settings.commandline import parse_options, require_writable, run_on_ranks
from omnilead.engine.settings.errors import ConfigError

from ..inference import options as shared
from ..inference.commands import ModelSetup, load_model_setup
from ..inference.ecg_reader import CropSource, dataset_source, find_dataset, open_data
from ..inference.outputs import prediction_output
from ..inference.trained_model import SEGMENTS_PER_BATCH, TrainedModel
from ..tasks.metrics import Array

FOR_COLOUR, AGAINST_COLOUR = "#d95f02", "#0072b2"  # orange and blue differ for any colour vision
WHY_NOTE = (
    "Numbers: how much its logit (or value) falls if the model is not shown the lead (orange), or rises "
    "(-, blue). Limb leads stand in for each other."
)


class EcgToExplain(NamedTuple):
    """An ECG as the crops that the model is shown, the first of which is drawn."""

    name: str
    uv_BLT: Tensor
    halves_B: Array  # number of halves (of 5 s) of each crop

    @property
    def uv_LT(self) -> Array:
        return np.asarray(self.uv_BLT[0].numpy())

    @property
    def half_count(self) -> int:
        return int(self.halves_B[0])

    @property
    def missing_leads(self) -> list[str]:
        return [LEADS[lead] for lead in np.flatnonzero(~self.uv_LT.any(1))]


class Explanation(NamedTuple):
    score: float  # what the model predicts: a probability, a value or a risk
    output: float  # what the score is computed from: a logit, a value or a risk
    added: dict[str, float]  # for each lead, how much the output falls without it


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(draw_why, "show", __doc__, arguments)
    return run_on_ranks("omnilead show", lambda: draw_why(**options), options["png"], "--png")


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
    require_writable(Path(png), "--png")
    plots.picture_format(Path(png))
    setup = load_model_setup(
        model,
        what,
        device=device,
        precision="fp32",
        code=code,
        leads=leads,
        fs_hz=fs_hz,
        unit=unit,
    )
    output = output_index(why, setup.model)
    ecg = read_ecg(setup, what, crop)
    explanation = explain(setup, ecg, output)
    title = f"{why}: {explanation.score:.3g} in {ecg.name}"
    rate_and_axis = paper.rate_and_axis_text(ecg.uv_LT, ecg.half_count, ecg.missing_leads)
    figure = paper.ecg_figure(
        ecg.uv_LT, ecg.half_count, title, f"{WHY_NOTE} {rate_and_axis}", ecg.missing_leads
    )
    colour_leads(figure, explanation.added)
    plots.save_figure(figure, png)
    return print_result(f"{title}\n{rate_and_axis}\n{lead_table(explanation)}drawn: {png}\n")


def output_index(why: str, model: TrainedModel) -> int:
    """Returns the index of the model's output with this name; raises ConfigError if there is
    none."""
    prediction_output(model)  # raises an error for models without classes
    if why not in model.classes:
        raise ConfigError(
            f"--why {why} is no output of the model: choose one of {', '.join(model.classes)}"
        )
    return model.classes.index(why)


def explain(setup: ModelSetup, ecg: EcgToExplain, k: int) -> Explanation:
    """Returns the score and output `k` of the model, and how much each lead that the model is shown
    adds to the output."""
    x_RLT = setup.input.windows(ecg.uv_BLT, ecg.halves_B).to(setup.model.device)
    channels = [setup.input.leads.index(lead) for lead in setup.input.seen_leads]
    output, added = output_and_drops(channels, setup.model, x_RLT, k)
    with torch.no_grad():
        score = setup.model.scores(x_RLT)[:, k].mean().item()
    names = [LEADS[lead] for lead in setup.input.seen_leads]
    return Explanation(score, output, dict(zip(names, added, strict=True)))


def lead_table(explanation: Explanation) -> str:
    lines = [f"logit or value {explanation.output:+.2f}, to which each lead adds:\n"]
    for lead, value in explanation.added.items():
        lines.append(f"  {lead:<4}{value:+7.2f}\n")
    return "".join(lines)


@torch.no_grad()
def output_and_drops(
    channels: Sequence[int], model: TrainedModel, x_RLT: Tensor, k: int
) -> tuple[float, list[float]]:
    """Returns output `k` of the model, and how much it falls when each of these channels is set to
    zero."""

    def mean_output(x_RLT: Tensor) -> float:
        y_RK = torch.cat([model.logits(part) for part in x_RLT.split(SEGMENTS_PER_BATCH)])
        if model.head_info and model.head_info.kind == "regression":
            y_RK = model.head_info.scores(y_RK)
        return y_RK[:, k].mean().item()

    with_all, added = mean_output(x_RLT), []
    for channel in channels:
        without_RLT = x_RLT.clone()
        without_RLT[:, channel] = 0
        added.append(with_all - mean_output(without_RLT))
    return with_all, added


def read_ecg(setup: ModelSetup, what: str, crop: int | None) -> EcgToExplain:
    """Reads the ECG in a file, or one crop of a dataset; raises ConfigError if that is not exactly
    one ECG."""
    dataset = find_dataset(setup.options)
    if (dataset is None) != (crop is None):
        reason = "is a dataset: choose a crop with" if dataset else "is no dataset: leave out"
        raise ConfigError(f"{what}: {reason} --crop ROW")
    source: CropSource
    if dataset is None:
        source = open_data(setup.options, setup.input).source()
    elif crop in range(len(dataset)):
        source = dataset_source(dataset, np.array([crop]), setup.input, setup.options)
    else:
        raise ConfigError(f"--crop {crop}: the dataset has crops 0 to {len(dataset) - 1}")
    parts = range(source.parts)
    if (records := source.count_units(parts)) != 1:
        raise ConfigError(
            f"{what}: has {records:,} records: name one of them, as only one ECG can be drawn"
        )
    crops: list[Tensor] = []
    halves: list[Array] = []
    rows: list[dict[str, Any]] = []
    for batch in source.read_batches(parts, lambda units: None):
        # copied, as the next batch is read into the same memory
        crops.append(torch.tensor(batch.uv_BLT))
        halves.append(batch.halves_B)
        rows += batch.crops.table.to_pylist()
    name = f"{rows[0]['record']}, from {rows[0]['start_s']:g} s"
    return EcgToExplain(name, torch.cat(crops), np.concatenate(halves))


def colour_leads(figure: Figure, added_by_lead: dict[str, float]) -> None:
    """Colours the printout behind each lead. The colour is strongest for the lead with the largest
    effect, whether it adds or takes away."""
    (page,) = figure.axes
    most = max(map(abs, added_by_lead.values())) or 1.0
    width = paper.MM_PER_S * paper.COLUMN_S
    for lead, added in added_by_lead.items():
        column, row = divmod(LEADS.index(lead), 3)
        x, y = paper.TRACE_X_MM + width * column, paper.ROWS_Y_MM[row] - 9
        colour = FOR_COLOUR if added > 0 else AGAINST_COLOUR
        strength = 0.5 * abs(added) / most
        page.add_patch(Rectangle((x, y), width, 20, color=colour, alpha=strength, lw=0, zorder=1))
        page.text(x + width - 2, y + 1, f"{added:+.2f}", ha="right", fontsize=9, color=paper.INK)
