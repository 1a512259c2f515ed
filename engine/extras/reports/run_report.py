"""Writes RUN/report.html, one self-contained page: how a run went, what to look at, four curves.

    omnilead report RUN

Curves come from metrics.jsonl; validation.jsonl, run.json and config.yaml are added if they exist.
The other curves are in metrics.jsonl and in TensorBoard. An unfinished run has a report too: what
was not logged is left out, what is not finite is marked. Damaged or missing files are remarks, not
errors.

    files = RunFiles(Path("RUN"))
    files.metrics.curve("loss")                                          # steps and values, from metrics.jsonl
"""

import json
import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omnilead.data_tools.io.storage import write_whole
from omnilead.data_tools.io.terminal import say

from ...settings.errors import ConfigError
from ...settings.metrics import METRIC_OF, Metric
from ...settings.run_files import LARGEST, METRICS, REPORT, VALID, VALIDATION, number, read_rows
from ...training.metrics import Array
from .page import Line, LineStyle, ReportSection, Tile, readable, render, shown, titled

RESULT = "result.json"
PATIENCE = 10  # validations without improvement that count as convergence if train.patience is 0
RECENT = 10  # logged steps


class StepLog:
    """Columns of a file with one JSON object for each step; what is not a number is NaN. Without a
    file, no rows."""

    def __init__(self, path: Path) -> None:
        self.rows, self.unreadable = read_rows(path)
        self.steps = self.column("step")

    def column(self, key: str) -> Array:
        return np.array([number(row.get(key)) for row in self.rows])

    def curve(self, key: str) -> tuple[Array, Array]:
        """Steps and values where the key was logged, NaN included."""
        logged = np.array([row.get(key) is not None for row in self.rows], bool)
        return self.steps[logged], self.column(key)[logged]

    def finite(self, key: str, rows: slice = slice(None)) -> Array:
        values = self.column(key)[rows]
        return np.asarray(values[np.isfinite(values)])

    def last(self, key: str) -> float:
        return float(np.append(math.nan, self.finite(key))[-1])

    def median(self, key: str) -> float:
        """The median without the first row, which includes the warm-up, if there are others."""
        values = self.finite(key, slice(min(1, len(self.rows) - 1), None))
        return float(np.median(values)) if len(values) else math.nan

    def recent(self, key: str) -> float:
        values = self.finite(key, slice(-RECENT, None))
        return float(values.mean()) if len(values) else math.nan

    def at(self, key: str, step: float | None) -> float:
        return float(np.append(self.column(key)[self.steps == step], math.nan)[0])


class RunFiles:
    def __init__(self, run: Path) -> None:
        if not (run / METRICS).is_file():
            raise ConfigError(f"{run}: no {METRICS}: give the folder of a pretrain or finetune run")
        self.name = run.resolve().name
        self.metrics = StepLog(run / METRICS)
        self.held_out = StepLog(run / VALIDATION)
        if not self.metrics.rows:
            raise ConfigError(f"{run / METRICS}: has no step yet: wait for the first log line")
        self.facts: Any = {}
        self.remarks: list[str] = []
        try:
            self.facts = json.loads((run / "run.json").read_text())
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            self.remarks.append(f"run.json cannot be read: {' '.join(str(error).split())}")
        config = run / "config.yaml"
        self.config = config.read_text(errors="replace") if config.is_file() else ""

    def fact(self, *keys: str) -> Any:
        """A value from run.json; None if it is missing."""
        value = self.facts
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


class Curve(NamedTuple):
    key: str
    label: str
    held_out: bool = False  # from validation.jsonl


class Chart(NamedTuple):
    title: str
    curves: tuple[Curve, ...]
    style: LineStyle = LineStyle()


LOSS = Chart("Loss", (Curve("loss", "training"), Curve("loss", "held out", True)))
ACCURACY = Chart(
    "Accuracy",
    (
        Curve("accuracy_local", "masked tokens"),
        Curve("accuracy_global", "other half"),
        Curve("identification_accuracy", "patients, held out", True),
    ),
    LineStyle(percent=True, floor=0),
)
GRADIENT = Chart("Gradient norm", (Curve("grad_norm", ""),), LineStyle(log=True))
SPEED = Chart("Crops per second", (Curve("crops_per_s", ""),), LineStyle(floor=0))
RECOGNISED = "identification_accuracy"


def build(run: Path) -> str:
    files = RunFiles(run)
    best = best_step(files)
    sections = [
        ReportSection(tiles=list(summary(files, best))),
        ReportSection(remarks=[*files.remarks, *warnings(files, best)]),
    ]
    if isinstance(rates := files.fact("rates"), list):
        names = ["Learning rate", "Best step", f"{chosen_by(files)[0]} there", "Converged"]
        grid = [names, *(list(map(str, row)) for row in rates)]
        sections.append(ReportSection("Learning rates", grid=grid))
    drawn = [draw(chart, files, best) for chart in (LOSS, score_chart(files), GRADIENT, SPEED)]
    drawn = [chart for chart in drawn if chart]
    note = f"{validation_note(files)} Every curve is in {METRICS} and in TensorBoard (train.track)."
    sections.append(ReportSection("Curves", charts=drawn, columns=2, note=note.strip()))
    elsewhere = ("config.", "chance.", "validation", "labels.", "rates")
    table = [line for line in readable(files.facts) if not line[0].startswith(elsewhere)]
    sections.append(ReportSection("The run", table=table, config=files.config))
    title, facts = f"{files.name}: report", list(progress(files))
    return render(title, kind_of(files), files.name, facts, sections)


def kind_of(files: RunFiles) -> str:
    task = files.fact("config", "task", "name")
    return f"Fine-tuning: {task}" if task else "Pre-training"


def progress(files: RunFiles) -> Iterator[str]:
    metrics, total = files.metrics, number(files.fact("steps"))
    step = f"step {metrics.steps[-1]:,.0f}"
    yield f"{step} of {total:,.0f}" if total >= metrics.steps[-1] else step
    if math.isfinite(crops := metrics.last("crops_seen")):
        yield f"{crops:,.0f} crops of 10 s"
    if math.isfinite(epoch := metrics.last("epoch")):
        yield f"epoch {epoch:.2f}"
    with np.errstate(divide="ignore", invalid="ignore"):  # without validation and checkpoints
        spans = np.diff(metrics.column("crops_seen"), prepend=0) / metrics.column("crops_per_s")
    seconds = round(float(spans[(spans > 0) & (spans < LARGEST)].sum()))
    if 0 < seconds < LARGEST:
        yield f"{timedelta(seconds=seconds)} of training"


def warnings(files: RunFiles, best: float | None) -> Iterator[str]:
    metrics, (_, loss) = files.metrics, files.metrics.curve("loss")
    if broken := int((~np.isfinite(loss)).sum()):
        yield (
            f"The loss was not finite in {broken} of {len(loss)} logged steps; they are marked on "
            "its axis."
        )
    if (skipped := metrics.last("skipped_steps")) > 0:
        yield f"{skipped:.0f} steps were skipped because the loss or a gradient was not finite."
    if (wait := metrics.median("data_wait_pct")) > 5 and len(metrics.rows) > 1:
        yield (
            f"Training waited for data {wait:.0f} % of the time: raise pipeline.threads or choose "
            "another pipeline.backend."
        )
    if metrics.unreadable:
        yield f"{metrics.unreadable} lines of {METRICS} could not be read."
    name, sign = chosen_by(files)
    if not sign:
        yield f"run.json: best={name[:40]!r} is no known metric: no best step is marked."
    before, after = files.held_out.at(name, 0), files.held_out.at(name, best)
    if best is not None and sign * (before - after) >= 0:
        yield (
            f"No step is better than step 0, before training: {name} {before:.3f}, and "
            f"{after:.3f} at step {best:,.0f}."
        )
    if (ended := result(files)) and not ended["converged"]:
        yield f"N{ended['text'][1:]}: raise train.steps or train.epochs."


def validation_note(files: RunFiles) -> str:
    differs = files.fact("validation")
    if not isinstance(differs, list) or not differs or not files.held_out.rows:
        return ""
    how = "; ".join(map(str, differs))
    return (
        f"Held-out loss can be lower than training loss, because it is measured differently. In "
        f"validation {how}."
    )


def summary(files: RunFiles, best: float | None) -> Iterator[Tile]:
    """The main figures of the exported step, held-out ones rather than training ones."""
    metrics, held_out = files.metrics, files.held_out
    step = best
    if kind_of(files) == "Pre-training":
        step = float(held_out.steps[-1]) if held_out.rows else None
    if math.isfinite(loss := metrics.recent("loss")):
        yield "Training loss", f"{loss:.3f}", f"{metrics.finite('loss')[0]:.3f} at first"
    if math.isfinite(loss := held_out.at("loss", step)):
        yield "Held-out loss", f"{loss:.3f}", f"at step {step:,.0f}"
    for metric in METRIC_OF.values():
        if metric.in_brief and (tile := score_tile(files, metric, step)):
            yield tile
    if ended := result(files):
        since = f"{ended['validations_since']} validations since the best"
        yield "Converged", "yes" if ended["converged"] else "no", since
    if math.isfinite(used := metrics.last("code_perplexity")):
        codes = math.prod(
            number(files.fact("config", "model", name)) for name in ("codebooks", "codes")
        )
        detail = f"of {codes:,.0f}" if math.isfinite(codes) else "perplexity"
        yield "Codes in use", f"{used:,.0f}", detail
    if math.isfinite(rate := metrics.median("crops_per_s")):
        wait = metrics.median("data_wait_pct")
        waited = f"{wait:.1f} % data wait" if wait >= 0 else ""
        yield "Crops per second", f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}", waited
    if math.isfinite(share := metrics.median("mfu")):
        yield "MFU", f"{share:.1%}", "of the device's peak"


def score_tile(files: RunFiles, metric: Metric, step: float | None) -> Tile | None:
    """A held-out score, else the recent one of training, beside that of guessing."""
    key, percent = metric.name, metric.percent
    value, prefix, detail = files.held_out.at(key, step), VALID, "held out"
    if not math.isfinite(value):
        value, prefix, detail = files.metrics.recent(key), "", "training"
    if not math.isfinite(value):
        return None
    if math.isfinite(guess := number(files.fact("chance", prefix + key))):
        detail += f", chance {shown(guess, percent)}"
    before = files.held_out.at(key, 0)
    if prefix and key == RECOGNISED and math.isfinite(before):
        detail += f", {shown(before, percent)} before training"
    return titled(key), shown(value, percent), detail


def chosen_by(files: RunFiles) -> tuple[str, int]:
    """The metric that chooses the best step; 1 if higher is better, -1 if lower is, 0 if that is
    not known. A damaged run.json does not name it."""
    name = str(files.fact("best") or "loss")
    if name not in METRIC_OF or METRIC_OF[name].lower_is_better is None:
        return name, 0
    return name, -1 if METRIC_OF[name].lower_is_better else 1


def best_step(files: RunFiles) -> float | None:
    """The first best step, chosen as in training: never the untrained model."""
    name, sign = chosen_by(files)
    steps, values = files.held_out.curve(name)
    good = np.isfinite(values) & (steps > 0) & (sign != 0)
    return float(steps[good][(sign * values[good]).argmax()]) if good.any() else None


def result(files: RunFiles) -> dict[str, Any]:
    """How a fine-tuning ended: its best validation, whether validation has stopped improving,
    and the curve. Empty before the end, or if nothing was validated."""
    (name, sign), best = chosen_by(files), best_step(files)
    if best is None or kind_of(files) == "Pre-training":
        return {}
    value, since = files.held_out.at(name, best), int((files.held_out.steps > best).sum())
    patience = number(files.fact("config", "train", "patience"))
    converged = since >= (patience if patience > 0 else PATIENCE)
    if not converged and files.metrics.steps[-1] < number(files.fact("steps")):
        return {}
    after = f"and {since} validations since without improvement"
    if since == 1:
        after = "and 1 validation since without improvement"
    elif not since:
        after = "the last validation"
    text = f"converged: best {name} {value:.4f} at step {best:,.0f}, {after}"
    if not converged:
        text = f"not {text}"
    curve = []
    for step, score in zip(*files.held_out.curve(name), strict=True):
        if math.isfinite(score):
            curve.append([int(step), score])
    return {
        "metric": name,
        "higher_is_better": sign > 0,
        "best": value,
        "step": int(best),
        "validations_since": since,
        "converged": converged,
        "text": text,
        "curve": curve,
    }


def score_chart(files: RunFiles) -> Chart:
    """The metric that chooses the best step; in pre-training, what is recognised."""
    name, sign = chosen_by(files)
    if name == "loss" or not sign:
        return ACCURACY
    style = LineStyle(percent=METRIC_OF[name].percent, floor=0)
    return Chart(titled(name), (Curve(name, "held out", True),), style)


def draw(chart: Chart, files: RunFiles, best: float | None) -> str:
    """The chart, or "" if none of its curves was logged."""
    from . import charts  # late, so that training starts without it

    lines: list[Line] = []
    compared = not all(curve.held_out for curve in chart.curves)  # with training
    for curve in chart.curves:
        key = curve.key
        x, y = files.metrics.curve(key)
        if curve.held_out:
            x, y = files.held_out.curve(key)
            x, y = x[np.isfinite(y)], y[np.isfinite(y)]
            key = VALID + key
        if not len(x):
            continue
        chance = number(files.fact("chance", key))
        level = chance if math.isfinite(chance) and len(chart.curves) == 1 else None
        dashed = compared and curve.held_out
        lines.append(Line(key, curve.label, x, y, len(lines), dashed, level))
    if not lines:
        return ""
    mark = None
    held_out = any(line.key.startswith(VALID) for line in lines)
    if held_out and best is not None and chart is not ACCURACY:  # its legend is full
        mark = best, f"best at step {best:,.0f}"
    return charts.line_chart(chart.title, lines, chart.style, files.metrics.steps, mark)


def write_report(run: Path) -> Path:
    """Writes the report and RUN/result.json, and prints the result."""
    if ended := result(RunFiles(run)):
        write_whole(run / RESULT, json.dumps(ended, indent=1) + "\n")
        say(ended["text"])
    write_whole(run / REPORT, build(run))
    return run / REPORT
