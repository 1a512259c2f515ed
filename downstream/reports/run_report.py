"""Writes RUN/report.html, one self-contained page on a run: its results and warnings, and curves of
the loss, the held-out score and the speed.

    omnilead status RUN --html

Curves come from metrics.jsonl; validation.jsonl and run.json are added if they exist. All other
curves are in metrics.jsonl and in TensorBoard. An unfinished run has a report too: what was not
logged is left out. Damaged or missing files are remarks, not errors.
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
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.files import flatten
from omnilead.engine.settings.metrics import METRIC_OF, Metric
from omnilead.engine.settings.run_files import (
    MAX_PLAUSIBLE_NUMBER,
    METRICS,
    REPORT,
    RUN_FACTS,
    VALID_PREFIX,
    VALIDATION,
    crops_and_seconds,
    number_or_nan,
    read_metric_rows,
)
from omnilead.engine.training.config import Config

from ..tasks.config import FinetuneConfig
from ..tasks.metrics import Array
from .charts import curves_over_steps
from .page import Picture, metric_title, number_text, readable_items, render_page

RESULT_FILE = "result.json"
# If train.patience is 0, a run counts as converged after this many validations without improvement
DEFAULT_PATIENCE = 10
RECENT_STEPS = 10  # number of logged steps over which recent values are averaged
IDENTIFICATION_METRIC = "identification_accuracy"
# Beginnings of the names of facts in run.json that the page does not list, as it shows them elsewhere
# or as only a resumed run needs them
UNLISTED_FACTS = (
    "config.",
    "dataset_paths",
    "chance.",
    "validation",
    "finetuning.",
    "labels.definition.",
)


class StepLog:
    """A log with one JSON object for each step. It has no rows if the file is missing."""

    def __init__(self, path: Path) -> None:
        self.rows, self.unreadable = read_metric_rows(path)
        self.steps = self.column("step")

    def column(self, key: str) -> Array:
        """Returns the values of a key in all rows; NaN where it is not a number."""
        return np.array([number_or_nan(row.get(key)) for row in self.rows])

    def steps_and_values(self, key: str) -> tuple[Array, Array]:
        """Returns the steps at which the value of a key is a finite number, and these values."""
        values = self.column(key)
        is_finite = np.isfinite(values)
        return self.steps[is_finite], values[is_finite]

    def recent_mean(self, key: str) -> float:
        values = self.column(key)[-RECENT_STEPS:]
        return float(values[np.isfinite(values)].mean()) if np.isfinite(values).any() else math.nan

    def median_after_warm_up(self, key: str) -> float:
        """Returns the median of a key's values without the first row, which includes the warm-up. A
        single row is not left out."""
        values = self.column(key)[min(1, len(self.rows) - 1) :]
        return (
            float(np.median(values[np.isfinite(values)])) if np.isfinite(values).any() else math.nan
        )

    def last_value(self, key: str) -> float:
        return float(np.append(math.nan, self.steps_and_values(key)[1])[-1])

    def value_at(self, key: str, step: float | None) -> float:
        return float(np.append(self.column(key)[self.steps == step], math.nan)[0])


class RunLog:
    """The logs of a run: of its training (`metrics`), of its validations (`held_out`), and the
    `facts` of run.json."""

    def __init__(self, run: Path) -> None:
        if not (run / METRICS).is_file():
            raise ConfigError(f"{run}: no {METRICS}: give the folder of a pretrain or finetune run")
        self.name = run.resolve().name
        self.metrics = StepLog(run / METRICS)
        self.held_out = StepLog(run / VALIDATION)
        if not self.metrics.rows:
            raise ConfigError(
                f"{run / METRICS}: has no steps yet: wait until the first one is logged"
            )
        self.facts: Any = {}
        self.remarks: list[str] = []
        try:
            self.facts = json.loads((run / RUN_FACTS).read_text())
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            self.remarks.append(f"run.json cannot be read: {' '.join(str(error).split())}")

    def fact(self, *keys: str) -> Any:
        """Returns a value from run.json; None if it is missing."""
        value = self.facts
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def task(self) -> str:
        """The name of the task of a fine-tuning; "" for a pre-training."""
        return str(self.fact("config", "task", "name") or "")


def report_page(run: Path) -> str:
    log = RunLog(run)
    best = best_step(log)
    return render_page(
        "run.html",
        title=f"{log.name}: report",
        kind=f"Fine-tuning: {log.task}" if log.task else "Pre-training",
        name=log.name,
        heading=list(progress_texts(log)),
        result=[["", "", ""], *result_rows(log, best)],
        warnings=[*log.remarks, *warning_lines(log, best)],
        curves=list(curve_pictures(log, best)),
        validation=validation_note(log),
        settings=changed_settings(log),
        run=[fact for fact in readable_items(log.facts) if not fact[0].startswith(UNLISTED_FACTS)],
    )


def progress_texts(log: RunLog) -> Iterator[str]:
    metrics, total = log.metrics, number_or_nan(log.fact("steps"))
    step = f"step {metrics.steps[-1]:,.0f}"
    yield f"{step} of {total:,.0f}" if total >= metrics.steps[-1] else step
    if math.isfinite(crops := metrics.last_value("crops_seen")):
        yield f"{crops:,.0f} crops of 10 s"
    if math.isfinite(epoch := metrics.last_value("epoch")):
        yield f"epoch {epoch:.2f}"
    seconds = round(sum(seconds for _, seconds in crops_and_seconds(metrics.rows)))
    if 0 < seconds < MAX_PLAUSIBLE_NUMBER:
        yield f"{timedelta(seconds=seconds)} of training"


def changed_settings(log: RunLog) -> list[tuple[str, str]]:
    """Returns the settings that differ from the defaults. config.yaml has all settings."""
    config = log.fact("config")
    if not isinstance(config, dict):
        return []
    defaults = flatten((FinetuneConfig if log.task else Config)().tree())
    changed = {key: value for key, value in flatten(config).items() if defaults.get(key) != value}
    return list(readable_items(changed))


def warning_lines(log: RunLog, best: float | None) -> Iterator[str]:
    metrics = log.metrics
    logged = sum(row.get("loss") is not None for row in metrics.rows)
    if broken := logged - len(metrics.steps_and_values("loss")[0]):
        yield f"The loss was not finite in {broken} of {logged} logged steps."
    if (skipped := metrics.last_value("skipped_steps")) > 0:
        yield f"{skipped:.0f} steps were skipped because the loss or a gradient was not finite."
    if (wait := metrics.median_after_warm_up("data_wait_pct")) > 5 and len(metrics.rows) > 1:
        yield (
            f"Training waited for data {wait:.0f} % of the time: raise pipeline.threads or choose "
            "another pipeline.backend."
        )
    if metrics.unreadable:
        yield f"{metrics.unreadable} lines of {METRICS} could not be read."
    name, sign = selection_metric_and_sign(log)
    if not sign:
        yield f"run.json: best={name[:40]!r} is no known metric: no best step is marked."
    before, after = log.held_out.value_at(name, 0), log.held_out.value_at(name, best)
    if best is not None and sign * (before - after) >= 0:
        yield (
            f"No step is better than step 0, before training: {name} {before:.3f}, and "
            f"{after:.3f} at step {best:,.0f}."
        )
    if (ended := training_result(log)) and not ended["converged"]:
        yield f"N{ended['text'][1:]}: raise train.steps or train.epochs."


def validation_note(log: RunLog) -> str:
    differs = log.fact("validation")
    if not isinstance(differs, list) or not differs or not log.held_out.rows:
        return ""
    differences = "; ".join(map(str, differs))
    return (
        f"Held-out loss can be lower than training loss, because it is measured differently. In "
        f"validation {differences}."
    )


def result_rows(log: RunLog, best: float | None) -> Iterator[list[str]]:
    """Yields the main numbers of the exported step as rows of a table. A score is the held-out one
    or, if there is none, that of training."""
    metrics, held_out = log.metrics, log.held_out
    step = best
    if not log.task:
        step = float(held_out.steps[-1]) if held_out.rows else None
    if math.isfinite(loss := metrics.recent_mean("loss")):
        first = metrics.steps_and_values("loss")[1][0]
        entries = min(RECENT_STEPS, len(metrics.rows))
        yield [
            "Training loss",
            f"{loss:.3f}",
            f"mean of the last {entries} logged; {first:.3f} at first",
        ]
    if math.isfinite(loss := held_out.value_at("loss", step)):
        yield ["Held-out loss", f"{loss:.3f}", f"at step {step:,.0f}"]
    for metric in METRIC_OF.values():
        if metric.in_brief and (row := score_row(log, metric, step)):
            yield row
    if ended := training_result(log):
        since = f"{ended['validations_since']} validations since the best"
        yield ["Converged", "yes" if ended["converged"] else "no", since]
    if math.isfinite(rate := metrics.median_after_warm_up("crops_per_s")):
        yield ["Crops per second", f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}", ""]
    if (wait := metrics.median_after_warm_up("data_wait_pct")) >= 0:
        yield ["Waiting for data", f"{wait:.1f} %", "of the time of training"]
    if math.isfinite(used := metrics.median_after_warm_up("mfu")):
        yield ["MFU", f"{used:.1%}", "of the device's peak"]


def score_row(log: RunLog, metric: Metric, step: float | None) -> list[str] | None:
    """Returns a row with a held-out score or, if there is none, the mean of recent training scores.
    The row also shows the score of guessing. Returns None if there is neither score."""
    key, percent = metric.name, metric.percent
    value, prefix, detail = log.held_out.value_at(key, step), VALID_PREFIX, "held out"
    if not math.isfinite(value):
        value, prefix, detail = log.metrics.recent_mean(key), "", "training"
    if not math.isfinite(value):
        return None
    if math.isfinite(guess := number_or_nan(log.fact("chance", prefix + key))):
        detail += f", chance {number_text(guess, percent)}"
    before = log.held_out.value_at(key, 0)
    if prefix and key == IDENTIFICATION_METRIC and math.isfinite(before):
        detail += f", {number_text(before, percent)} before training"
    return [metric_title(key), number_text(value, percent), detail]


def selection_metric_and_sign(log: RunLog) -> tuple[str, int]:
    """Returns the metric by which the best step is chosen, and its sign: 1 if higher is better, -1
    if lower is better, 0 if that is unknown, as with a damaged run.json."""
    name = str(log.fact("best") or "loss")
    if name not in METRIC_OF or METRIC_OF[name].lower_is_better is None:
        return name, 0
    return name, -1 if METRIC_OF[name].lower_is_better else 1


def best_step(log: RunLog) -> float | None:
    """Returns the first step with the best held-out score, chosen as in training. It is never step
    0, the untrained model; None if there is no such step."""
    name, sign = selection_metric_and_sign(log)
    steps, values = log.held_out.steps_and_values(name)
    steps, values = steps[steps > 0], values[steps > 0]
    return float(steps[(sign * values).argmax()]) if sign and len(steps) else None


def training_result(log: RunLog) -> dict[str, Any]:
    """Returns how a fine-tuning ended: its best validation, whether validation has stopped
    improving, and the validation metric at each step. Returns {} before the end, or if nothing was validated."""
    (name, sign), best = selection_metric_and_sign(log), best_step(log)
    if best is None or not log.task:
        return {}
    value, since = log.held_out.value_at(name, best), int((log.held_out.steps > best).sum())
    patience = number_or_nan(log.fact("config", "train", "patience"))
    converged = since >= (patience if patience > 0 else DEFAULT_PATIENCE)
    if not converged and log.metrics.steps[-1] < number_or_nan(log.fact("steps")):
        return {}
    after = f"and {since} validations since without improvement"
    if since == 1:
        after = "and 1 validation since without improvement"
    elif not since:
        after = "the last validation"
    text = f"converged: best {name} {value:.4f} at step {best:,.0f}, {after}"
    if not converged:
        text = f"not {text}"
    curve = [
        [int(step), score] for step, score in zip(*log.held_out.steps_and_values(name), strict=True)
    ]
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


def curve_pictures(log: RunLog, best: float | None) -> Iterator[Picture]:
    """Draws the loss, the held-out score and the speed, each only if it was logged more than
    once."""
    training, held_out = log.metrics, log.held_out
    losses = {
        "training": training.steps_and_values("loss"),
        "held out": held_out.steps_and_values("loss"),
    }
    lines = {name: line for name, line in losses.items() if len(line[0]) > 1}
    if lines:
        yield curves_over_steps("Loss", lines, best=best if log.task else None)
    name, sign = selection_metric_and_sign(log)
    if name == "loss" or not sign:
        name = IDENTIFICATION_METRIC
    score = held_out.steps_and_values(name)
    if len(score[0]) > 1:
        chance = number_or_nan(log.fact("chance", VALID_PREFIX + name))
        marked = None if name == IDENTIFICATION_METRIC else best
        lines = {"held out": score}
        yield curves_over_steps(metric_title(name), lines, METRIC_OF[name].percent, chance, marked)
    speed = training.steps_and_values("crops_per_s")
    if len(speed[0]) > 1:
        yield curves_over_steps("Crops per second", {"training": speed})


def write_report(run: Path) -> Path:
    """Writes RUN/report.html and, if a fine-tuning has ended, RUN/result.json. Prints the
    `text` of the latter."""
    if ended := training_result(RunLog(run)):
        write_whole(run / RESULT_FILE, json.dumps(ended, indent=1) + "\n")
        say(ended["text"])
    write_whole(run / REPORT, report_page(run))
    return run / REPORT
