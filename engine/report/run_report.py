"""Writes RUN/report.html, one self-contained page with the training curves of a run.

    omnilead report RUN

Curves come from metrics.jsonl; validation.jsonl, run.json, config.yaml and diagnostics.npz are
added if they exist. An unfinished run has a report too: what was not logged is left out, what is
not finite is marked. Damaged or missing files are remarks, not errors.

    files = RunFiles(Path("RUN"))
    files.metrics.curve("loss")                                          # steps and values, from metrics.jsonl
"""

import json
import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omnilead.data_tools.cli import say
from omnilead.engine.common import (
    DIAGNOSTICS,
    LEADS,
    METRIC_OF,
    METRICS,
    VALID,
    VALIDATION,
    ConfigError,
    Metric,
    write_whole,
)
from omnilead.engine.evaluation.metrics import Array
from omnilead.engine.inference.npz import ArrayError, load_npz
from omnilead.engine.report.page import (
    Line,
    LineStyle,
    ReportSection,
    Tile,
    readable,
    render,
    shown,
    titled,
)

REPORT, RESULT = "report.html", "result.json"
PATIENCE = 10  # validations without improvement that count as convergence if train.patience is 0
SAMPLES_SHOWN, FS_HZ = 4, 500.0
DIAGNOSTIC_AXES = {  # arrays of diagnostics.npz, with the number of their axes
    "positive_similarity": 1,  # cosines of contexts with their own targets
    "negative_similarity": 1,  # and with other targets
    "same_similarity": 1,  # cosines of pooled encodings of one crop or patient
    "other_similarity": 1,  # and of different ones
    "code_usage": 2,  # [G, V]: how often each code of each codebook was chosen
    "samples_mv": 4,  # [n, S, L, T]: augmented crops as the model saw them, in millivolts or scaled
}
LARGEST = 1e12  # larger numbers cannot be steps, losses, rates or seconds
RECENT = 10  # logged steps


class StepLog:
    """Columns of a file with one JSON object for each step; what is not a number is NaN. Without a
    file, no rows."""

    def __init__(self, path: Path) -> None:
        by_step: dict[float, dict[str, Any]] = {}
        self.unreadable = 0
        for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
            try:
                row = json.loads(line)
                step = number(row["step"])
            except (ValueError, LookupError, TypeError, RecursionError):
                step = math.nan
            if math.isfinite(step):
                by_step[step] = row  # a step that was repeated after a restart counts once
            else:
                self.unreadable += bool(line.strip())
        self.rows = [by_step[step] for step in sorted(by_step)]
        self.steps = np.array(sorted(by_step))

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


def number(value: Any) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if known else math.nan


class RunFiles:
    def __init__(self, run: Path) -> None:
        if not (run / METRICS).is_file():
            raise ConfigError(
                f"{run}: no {METRICS}: give the directory of a run of omnilead pretrain or finetune"
            )
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
        self.diagnostics, remarks = read_diagnostics(run / DIAGNOSTICS)
        self.remarks += remarks

    def fact(self, *keys: str) -> Any:
        """A value from run.json; None if it is missing."""
        value = self.facts
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_diagnostics(path: Path) -> tuple[dict[str, Array], list[str]]:
    """The arrays that can be drawn, and remarks about the others."""
    arrays, remarks = {}, []
    try:
        for name, array in load_npz(path).items() if path.is_file() else ():
            if DIAGNOSTIC_AXES.get(name) == array.ndim and array.size and array.dtype.kind in "iuf":
                arrays[name] = array.astype(np.float64)
            else:
                remarks.append(f"{path.name}: {name} {array.dtype}{list(array.shape)} is not shown")
    except ArrayError as error:
        return {}, [f"{path.name} {error}"]
    return arrays, remarks


class Curve(NamedTuple):
    key: str
    label: str
    held_out: bool = False  # from validation.jsonl


class Chart(NamedTuple):
    title: str
    curves: tuple[Curve, ...]
    style: LineStyle = LineStyle()


def _one(key: str, held_out: bool = False) -> tuple[Curve, ...]:
    return (Curve(key, "", held_out),)  # a single curve needs no label


def _both(key: str) -> tuple[Curve, ...]:
    return Curve(key, "training"), Curve(key, "held out", True)


PERPLEXITIES = (
    Curve("code_perplexity", "perplexity of codes"),
    Curve("prob_perplexity", "of probabilities"),
)
BY_CLASS = (
    Curve("auroc", "AUROC", True),
    Curve("auprc", "AUPRC", True),
    Curve("f_measure", "F", True),
)
SHARE = LineStyle(percent=True, floor=0)
SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Loss": (
        Chart("Loss", _both("loss")),
        Chart("Accuracy of halves", _both("accuracy"), SHARE),
        Chart("Local loss", _both("loss_local"), LineStyle("nats a masked token")),
        Chart("Global loss", _both("loss_global"), LineStyle("nats a half")),
        Chart(
            "Diversity loss",
            _one("loss_diversity"),
            LineStyle("share of unused codes", percent=True),
        ),
        Chart("Feature penalty", _one("loss_features"), LineStyle("mean square", log=True)),
    ),
    "Accuracy": (
        Chart("Masked tokens, among their negatives", _both("accuracy_local"), SHARE),
        Chart("Other half, among other crops", _both("accuracy_global"), SHARE),
        Chart("Patients recognised", _one("identification_accuracy", True), SHARE),
    ),
    "Validation": (
        Chart("AUROC, AUPRC, F-measure", BY_CLASS, LineStyle("mean of classes", floor=0)),
        Chart(
            "Mean absolute error",
            _one("mae", True),
            LineStyle("of the label", floor=0),
        ),
        Chart("C-index", _one("c_index", True)),
        Chart("R2", _one("r2", True), LineStyle("share of the variance")),
        Chart("CinC score", _one("challenge", True), LineStyle(smooth=False)),
    ),
    "Quantiser and masks": (
        Chart("Codes in use", PERPLEXITIES, LineStyle(floor=0)),
        Chart("Gumbel temperature", _one("gumbel_tau"), LineStyle(smooth=False)),
        Chart("Masked tokens", _one("masked_share"), LineStyle(percent=True)),
    ),
    "Optimisation": (
        Chart("Learning rate", _one("lr"), LineStyle(floor=0, smooth=False)),
        Chart("Gradient norm", _one("grad_norm"), LineStyle(log=True)),
        Chart("Skipped steps", _one("skipped_steps"), LineStyle(floor=0, smooth=False)),
    ),
    "Throughput": (
        Chart("Crops per second", _one("crops_per_s"), LineStyle(floor=0)),
        Chart("Waiting for data", _one("data_wait_pct"), LineStyle("%", floor=0)),
        Chart("Model FLOPs utilisation", _one("mfu"), SHARE),
        Chart("Memory", _one("memory_gb"), LineStyle("GB", floor=0, smooth=False)),
    ),
}
KNOWN_LOSSES = [chart.curves[0].key for chart in SECTIONS["Loss"]]
RECOGNISED = "identification_accuracy"
SIMILARITIES = {
    "Cosine of contexts and targets": {
        "positive_similarity": "own target",
        "negative_similarity": "negatives",
    },
    "Cosine of pooled encodings": {
        "same_similarity": "same crop or patient",
        "other_similarity": "others",
    },
}


def build(run: Path) -> str:
    files = RunFiles(run)
    best, absent = best_step(files), list[str]()
    sections = [
        ReportSection(tiles=list(summary(files, best))),
        ReportSection(remarks=[*files.remarks, *warnings(files, best)]),
    ]
    if isinstance(rates := files.fact("rates"), list):
        names = ("Learning rate", "Best step", f"{chosen_by(files)[0]} there", "Converged")
        sections.append(
            ReportSection(
                "Learning rates", grid=[names, *([str(cell) for cell in row] for row in rates)]
            )
        )
    for title, planned in SECTIONS.items():
        charts = [*planned, *own_losses(files)] if title == "Loss" else planned
        drawn = [draw(chart, files, best, absent) for chart in charts]
        note = validation_note(files) if title == "Loss" else ""
        sections.append(ReportSection(title, charts=list(filter(None, drawn)), note=note))
    sections.append(
        ReportSection("Similarities", charts=list(diagnostic_charts(files.diagnostics)))
    )
    sections.append(
        ReportSection(
            "Inputs",
            charts=list(sample_charts(files)),
            columns=2,
        )
    )
    table = [
        (key, value)
        for key, value in readable(files.facts)
        if not key.startswith(("config.", "chance.", "validation", "labels.", "rates"))
    ]
    missing = f"Not logged in this run: {', '.join(absent)}." if absent else ""
    sections.append(ReportSection("The run", table=table, config=files.config, note=missing))
    return render(
        f"{files.name}: report", kind_of(files), files.name, list(progress(files)), sections
    )


def own_losses(files: RunFiles) -> Iterator[Chart]:
    """Those of an objective of one's own."""
    for key in files.metrics.rows[-1]:
        if key.startswith("loss_") and key not in KNOWN_LOSSES:
            yield Chart(key, _both(key))


def kind_of(files: RunFiles) -> str:
    task = files.fact("config", "task", "name")
    return f"Fine-tuning: {task}" if task else "Pre-training"


def progress(files: RunFiles) -> Iterator[str]:
    metrics, total = files.metrics, number(files.fact("steps"))
    yield f"step {metrics.steps[-1]:,.0f}" + (
        f" of {total:,.0f}" if total >= metrics.steps[-1] else ""
    )
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
        known = f"of {codes:,.0f}" if math.isfinite(codes) else "perplexity"
        yield "Codes in use", f"{used:,.0f}", known
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
    after = f"and {since} validations since without improvement" if since else "the last validation"
    text = (
        f"{'' if converged else 'not '}converged: best {name} {value:.4f} at step {best:,.0f}, "
        f"{after}"
    )
    curve = [
        [int(step), value]
        for step, value in zip(*files.held_out.curve(name), strict=True)
        if math.isfinite(value)
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


def draw(chart: Chart, files: RunFiles, best: float | None, absent: list[str]) -> str:
    """The chart, or "" if none of its curves was logged; keys that were logged as null are added to
    `absent`."""
    from omnilead.engine.report import charts  # late, so that training starts without it

    lines: list[Line] = []
    compared = not all(curve.held_out for curve in chart.curves)  # with training
    for curve in chart.curves:
        log: StepLog = files.held_out if curve.held_out else files.metrics
        x, y = log.curve(curve.key)
        if curve.held_out:
            x, y = x[np.isfinite(y)], y[np.isfinite(y)]
        if not len(x):
            if not curve.held_out and any(curve.key in row for row in log.rows):
                absent.append(curve.key)
            continue
        key, colour, dashed = curve.key, len(lines), False
        if curve.held_out:
            key = VALID + key
            if compared:
                colour, dashed = 1, True
        chance = number(files.fact("chance", key))
        level = chance if math.isfinite(chance) else None
        lines.append(Line(key, curve.label, x, y, colour, dashed, level))
    held_out = any(line.key.startswith(VALID) for line in lines)
    mark = (best, f"best at step {best:,.0f}") if held_out and best is not None else None
    if not lines:
        return ""
    return charts.line_chart(chart.title, lines, chart.style, files.metrics.steps, mark)


def diagnostic_charts(arrays: Mapping[str, Array]) -> Iterator[str]:
    from omnilead.engine.report import charts  # late, so that training starts without it

    for title, names in SIMILARITIES.items():
        groups = [(label, arrays[name]) for name, label in names.items() if name in arrays]
        if groups:
            yield charts.histogram(title, groups)
        if "positive_similarity" in names and "code_usage" in arrays:
            yield charts.rank_chart(
                "Usage of codes", np.nan_to_num(arrays["code_usage"], posinf=0, neginf=0).clip(0)
            )


def sample_charts(files: RunFiles) -> Iterator[str]:
    from omnilead.engine.report import charts  # late, so that training starts without it

    samples = files.diagnostics.get("samples_mv")
    fs_hz = files.fact("input", "fs_hz") or FS_HZ
    scaled = files.fact("input", "scale") not in (None, "millivolt")
    unit = "standard deviations" if scaled else "mV"
    for i, mv_SLT in enumerate(samples[:SAMPLES_SHOWN] if samples is not None else ()):
        count = mv_SLT.shape[1]
        names = LEADS if count == len(LEADS) else [str(lead + 1) for lead in range(count)]
        yield charts.ecg_chart(f"Crop {i + 1}, as the model saw it", mv_SLT, names, fs_hz, unit)


def write_report(run: Path) -> Path:
    """Writes the report and RUN/result.json, and prints the result."""
    if ended := result(RunFiles(run)):
        write_whole(run / RESULT, json.dumps(ended, indent=1) + "\n")
        say(ended["text"])
    write_whole(run / REPORT, build(run))
    return run / REPORT
