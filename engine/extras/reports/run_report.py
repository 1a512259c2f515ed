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
from typing import Any

import numpy as np

from omnilead.data_tools.io.storage import write_whole
from omnilead.data_tools.io.terminal import say

from ...settings.errors import ConfigError
from ...settings.metrics import METRIC_OF, Metric
from ...settings.run_files import LARGEST, METRICS, REPORT, VALID, VALIDATION, number, read_rows
from ...training.metrics import Array
from . import charts
from .page import Picture, ReportSection, Tile, readable, render, shown, titled

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

    def known(self, key: str) -> tuple[Array, Array]:
        """Steps and values where the key is a finite number."""
        values = self.column(key)
        good = np.isfinite(values)
        return self.steps[good], values[good]

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
        sections.append(ReportSection("Learning rates", table=grid))
    note = f"{validation_note(files)} Every curve is in {METRICS} and in TensorBoard (train.track)."
    sections.append(ReportSection("Curves", pictures=list(curves(files, best)), note=note.strip()))
    elsewhere = ("config.", "chance.", "validation", "labels.", "rates")
    facts = [line for line in readable(files.facts) if not line[0].startswith(elsewhere)]
    sections.append(ReportSection("The run", facts=facts, config=files.config))
    title, heading = f"{files.name}: report", list(progress(files))
    return render(title, kind_of(files), files.name, heading, sections)


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


def curves(files: RunFiles, best: float | None) -> Iterator[Picture]:
    """Of what was logged: loss, score, gradient norm and speed."""
    training, held_out = files.metrics, files.held_out
    pairs = [
        charts.Curve("training", *training.curve("loss")),
        charts.Curve("held out", *held_out.known("loss"), dashed=True),
    ]
    yield from drawn("Loss", pairs, best=best if len(pairs[1].x) else None)
    name, sign = chosen_by(files)
    if name == "loss" or not sign:
        recognised = [
            charts.Curve("masked tokens", *training.curve("accuracy_local")),
            charts.Curve("other half", *training.curve("accuracy_global")),
            charts.Curve("patients, held out", *held_out.known(RECOGNISED)),
        ]
        yield from drawn("Accuracy", recognised, percent=True, from_zero=True)
    else:
        score = [charts.Curve("held out", *held_out.known(name))]
        chance = number(files.fact("chance", VALID + name))
        percent = METRIC_OF[name].percent
        yield from drawn(
            titled(name), score, percent=percent, from_zero=True, chance=chance, best=best
        )
    yield from drawn("Gradient norm", [charts.Curve("", *training.curve("grad_norm"))], log=True)
    speed = [charts.Curve("", *training.curve("crops_per_s"))]
    yield from drawn("Crops per second", speed, from_zero=True)


def drawn(title: str, pairs: list[charts.Curve], **style: Any) -> Iterator[Picture]:
    if logged := [curve for curve in pairs if len(curve.x)]:
        yield charts.curves_over_steps(title, logged, **style)


def write_report(run: Path) -> Path:
    """Writes the report and RUN/result.json, and prints the result."""
    if ended := result(RunFiles(run)):
        write_whole(run / RESULT, json.dumps(ended, indent=1) + "\n")
        say(ended["text"])
    write_whole(run / REPORT, build(run))
    return run / REPORT
