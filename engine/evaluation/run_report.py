"""A run's directory -> RUN/report.html: one page that shows how the training went, with nothing to load from elsewhere.

    python -m engine.evaluation.run_report RUN

metrics.jsonl makes the curves; validation.jsonl, run.json, config.yaml and diagnostics.npz (run_files.py) add to them if they
are there. A page of an unfinished run is as good: what was not logged is left out, what is not finite is marked.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

from engine.common import LEADS, Parser, write_whole
from engine.evaluation import charts, page
from engine.evaluation.charts import Line, Look
from engine.evaluation.run_files import (
    DIAGNOSTICS,
    METRICS,
    VALID,
    VALIDATION,
    ReportError,
    Rows,
    number,
    read_diagnostics,
    read_facts,
)

REPORT, PRETRAINING = "report.html", "Pre-training"
SAMPLES_SHOWN, FS_HZ = 4, 500.0
RECENT = 10  # logged steps, whose mean a card shows


class Curve(NamedTuple):
    key: str
    label: str
    held_out: bool = False  # of validation.jsonl


class Chart(NamedTuple):
    title: str
    curves: tuple[Curve, ...]
    look: Look = Look()


def _one(key: str, label: str) -> tuple[Curve, ...]:
    return (Curve(key, label),)


def _both(key: str) -> tuple[Curve, ...]:
    return Curve(key, "training"), Curve(key, "held out", True)


PERPLEXITIES = Curve("code_perplexity", "perplexity of codes"), Curve("prob_perplexity", "of probabilities")
BY_CLASS = tuple(Curve(key, label, True) for key, label in (("auroc", "AUROC"), ("auprc", "AUPRC"), ("f_measure", "F")))
SHARE = Look(percent=True, floor=0)
SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Loss": (
        Chart("Loss", _both("loss")),
        Chart("Halves answered right", _both("accuracy"), SHARE),
        Chart("Local contrast", _both("loss_local"), Look("nats a masked token")),
        Chart("Global contrast", _both("loss_global"), Look("nats a half")),
        Chart("Diversity", _one("loss_diversity", "training"), Look("of codes out of use", percent=True)),
        Chart("Feature penalty", _one("loss_features", "training"), Look("mean square", log=True)),
    ),
    "Accuracy": (
        Chart("Masked token told from others", _both("accuracy_local"), SHARE),
        Chart("Other half told from other crops", _both("accuracy_global"), SHARE),
        Chart("Patients recognised", (Curve("identification_accuracy", "held out", True),), SHARE),
    ),
    "Validation": (
        Chart("AUROC, AUPRC, F-measure", BY_CLASS, Look("mean of classes", floor=0)),
        Chart("CinC score", (Curve("challenge", "held out", True),), Look(smooth=False)),
    ),
    "Quantiser and masks": (
        Chart("Codes in use", PERPLEXITIES, Look(floor=0)),
        Chart("Gumbel temperature", _one("gumbel_tau", "temperature"), Look(smooth=False)),
        Chart("Masked tokens", _one("masked_share", "share"), Look(percent=True)),
    ),
    "Optimisation": (
        Chart("Learning rate", _one("lr", "learning rate"), Look(floor=0, smooth=False)),
        Chart("Gradient norm", _one("grad_norm", "norm"), Look(log=True)),
        Chart("Steps skipped so far", _one("skipped_steps", "not finite"), Look(floor=0, smooth=False)),
    ),
    "Throughput": (
        Chart("Crops a second", _one("crops_per_s", "all ranks"), Look(floor=0)),
        Chart("Waiting for data", _one("data_wait_pct", "of the time"), Look("%", floor=0)),
        Chart("Model FLOPs utilisation", _one("mfu", "MFU"), SHARE),
        Chart("Memory", _one("memory_gb", "rank 0"), Look("GB", floor=0, smooth=False)),
    ),
}
CONTEXTS = "Cosine of contexts and targets"
PAIRS = {
    CONTEXTS: {"positive_similarity": "its own", "negative_similarity": "others of the same half"},
    "Cosine of pooled encodings": {"same_similarity": "the same crop or patient", "other_similarity": "others"},
}


def build(run: Path) -> str:
    """The page."""
    if not (run / METRICS).is_file():
        raise ReportError(f"{run}: no {METRICS}: give the directory of a run, as engine/pretrain.py writes it")
    metrics = Rows(run / METRICS)
    if not metrics.rows:
        raise ReportError(f"{run / METRICS}: holds no step yet: wait for the first log line")
    held_out = Rows(run / VALIDATION) if (run / VALIDATION).is_file() else None
    facts, config, remarks = read_facts(run)
    diagnostics, more = read_diagnostics(run / DIAGNOSTICS)
    remarks += more + list(concerns(metrics)) + list(no_better(held_out, facts))
    absent: list[str] = []
    body = [heading(run, metrics, facts), page.tiles(summary(metrics, held_out, facts)), page.remarks(remarks)]
    for title, wanted in SECTIONS.items():
        drawn = [draw(chart, metrics, held_out, facts, absent) for chart in wanted]
        note = validation_note(facts) if title == "Loss" and held_out else ""
        body.append(page.section(title, [(chart, False) for chart in drawn if chart], note=note))
    body.append(page.section("What it tells apart", list(diagnostic_charts(diagnostics))))
    body.append(page.section("What it saw", list(sample_charts(diagnostics.get("samples_mv"))), columns=2))
    body.append(about(facts, config, absent))
    return page.page(f"{run.resolve().name}: report", body)


def concerns(metrics: Rows) -> Iterator[str]:
    """What a reader should see before the curves."""
    _, loss = metrics.curve("loss")
    if lost := int((~np.isfinite(loss)).sum()):
        yield f"The loss was not finite in {lost} of {len(loss)} logged steps; they are marked on its axis."
    if (skipped := metrics.last("skipped_steps")) > 0:
        yield f"{skipped:.0f} steps were skipped because the loss or a gradient was not finite."
    if (wait := metrics.median("data_wait_pct")) > 5 and len(metrics.rows) > 1:
        yield f"Training waited for data {wait:.0f} % of the time: raise pipeline.threads or choose another pipeline.backend."
    if metrics.unreadable:
        yield f"{metrics.unreadable} lines of {METRICS} could not be read."


def heading(run: Path, metrics: Rows, facts: Mapping[str, Any]) -> str:
    step, total = metrics.steps[-1], number(facts.get("steps"))
    parts = [f"step {step:,.0f}" + (f" of {total:,.0f}" if total >= step else "")]
    if math.isfinite(crops := metrics.last("crops_seen")):
        parts.append(f"{crops:,.0f} crops of 10 s")
    if math.isfinite(epoch := metrics.last("epoch")):
        parts.append(f"epoch {epoch:.2f}")
    if seconds := trained_s(metrics):
        parts.append(f"{duration(seconds)} of training")
    return page.header(kind_of(facts), run.resolve().name, parts)


def kind_of(facts: Mapping[str, Any]) -> str:
    try:
        return f"Fine-tuning: {facts['config']['head']['task']}"
    except (LookupError, TypeError):
        return PRETRAINING


def trained_s(metrics: Rows) -> float:
    """From crops and crops a second: validation and checkpoints do not count."""
    with np.errstate(divide="ignore", invalid="ignore"):
        spans = np.diff(metrics.column("crops_seen"), prepend=0) / metrics.column("crops_per_s")
    return float(spans[np.isfinite(spans) & (spans > 0)].sum())


def duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02d} min" if hours else f"{m} min {s:02d} s" if m else f"{s} s"


def no_better(held_out: Rows | None, facts: Mapping[str, Any]) -> Iterator[str]:
    """The untrained model is not exported, however good it is."""
    name, sign = chosen_by(held_out, facts)
    if held_out and (best := best_step(held_out, facts)) is not None:
        before, after = (at(held_out, name, step) for step in (0, best))
        if sign * (before - after) >= 0:
            yield f"No step is better than step 0, before training: {name} {before:.3f}, and {after:.3f} at step {best:,.0f}."


def validation_note(facts: Mapping[str, Any]) -> str:
    differs = facts.get("validation")
    if not isinstance(differs, list) or not differs:
        return ""
    ways = "; ".join(map(str, differs))
    return f"Held-out loss can lie below training loss: it is not measured in the same way. In validation {ways}."


def summary(metrics: Rows, held_out: Rows | None, facts: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The numbers that one asks for first, as far as they are known: held out rather than of training."""
    step = shown_step(held_out, facts)
    if math.isfinite(loss := recent(metrics, "loss")):
        yield "Training loss", f"{loss:.3f}", f"{_first(metrics.column('loss')):.3f} at first"
    if held_out and math.isfinite(loss := at(held_out, "loss", step)):
        yield "Held-out loss", f"{loss:.3f}", f"at step {step:,.0f}"
    for name, key, form in (
        ("AUROC", "auroc", ".3f"),
        ("CinC score", "challenge", ".3f"),
        ("Local accuracy", "accuracy_local", ".1%"),
        ("Global accuracy", "accuracy_global", ".1%"),
        ("Patients recognised", "identification_accuracy", ".1%"),
    ):
        value, of, where = at(held_out, key, step), VALID, "held out"
        if not math.isfinite(value):
            value, of, where = recent(metrics, key), "", "training"
        if math.isfinite(value):
            guess = chance(facts, of + key)
            yield name, f"{value:{form}}", where + (f", chance {guess:{form}}" if guess is not None else "")
    if math.isfinite(used := metrics.last("code_perplexity")):
        codes = _codes(facts)
        yield "Codes in use", f"{used:,.0f}", f"of {codes:,.0f}" if math.isfinite(codes) else "perplexity"
    if math.isfinite(rate := metrics.median("crops_per_s")):
        wait = metrics.median("data_wait_pct")
        told = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        yield "Crops a second", told, f"{wait:.1f} % data wait" if wait >= 0 else "median"
    if math.isfinite(share := metrics.median("mfu")):
        yield "MFU", f"{share:.1%}", "of the device's rate"


def chance(facts: Mapping[str, Any], key: str) -> float | None:
    """What guessing gives, as the run says."""
    known = facts.get("chance")
    value = number(known.get(key)) if isinstance(known, dict) else math.nan
    return value if math.isfinite(value) else None


def chosen_by(held_out: Rows | None, facts: Mapping[str, Any]) -> tuple[str, int]:
    """The figure that chooses the best step; 1: the higher. Runs that do not name it: the score, if they have one."""
    scored = held_out is not None and len(held_out.curve("score")[0]) > 0
    name = str(facts.get("best", "score" if scored else "loss"))
    return name, -1 if name == "loss" else 1


def best_step(held_out: Rows, facts: Mapping[str, Any]) -> float | None:
    """As the run chooses: the first of the best, the untrained model left out."""
    name, sign = chosen_by(held_out, facts)
    steps, figures = held_out.curve(name)
    good = np.isfinite(figures) & (steps > 0)
    return float(steps[good][(sign * figures[good]).argmax()]) if good.any() else None


def shown_step(held_out: Rows | None, facts: Mapping[str, Any]) -> float | None:
    """Of the model that is exported: the best step in fine-tuning, the last one in pre-training."""
    if held_out is None or not len(held_out.steps):
        return None
    return best_step(held_out, facts) if kind_of(facts) != PRETRAINING else float(held_out.steps[-1])


def at(rows: Rows | None, key: str, step: float | None) -> float:
    values = rows.column(key)[rows.steps == step] if rows else np.zeros(0)
    return float(values[0]) if len(values) else math.nan


def recent(rows: Rows, key: str) -> float:
    values = rows.column(key)[-RECENT:]
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else math.nan


def _first(values: np.ndarray) -> float:
    return float(values[np.isfinite(values)][0])


def _codes(facts: Mapping[str, Any]) -> float:
    try:
        return float(facts["config"]["model"]["codebooks"]) * float(facts["config"]["model"]["codes"])
    except (LookupError, TypeError, ValueError):
        return math.nan


def draw(chart: Chart, metrics: Rows, held_out: Rows | None, facts: Mapping[str, Any], absent: list[str]) -> str:
    """'' if none of its curves was logged."""
    lines: list[Line] = []
    for curve in chart.curves:
        rows = held_out if curve.held_out else metrics
        if rows is None or not len(rows.curve(curve.key)[0]):
            if not curve.held_out and any(curve.key in row for row in metrics.rows):
                absent.append(curve.key)
            continue
        key = VALID + curve.key if curve.held_out else curve.key
        beside = curve.held_out and not all(other.held_out for other in chart.curves)  # the same of training
        colour = 1 if beside else len(lines)
        x, y = rows.curve(curve.key)
        if curve.held_out:
            x, y = x[np.isfinite(y)], y[np.isfinite(y)]
        lines.append(Line(key, curve.label, x, y, colour, beside, chance(facts, key)))
    mark = best_step(held_out, facts) if held_out and any(line.key.startswith(VALID) for line in lines) else None
    return charts.line_chart(chart.title, lines, chart.look, metrics.steps, mark) if lines else ""


def diagnostic_charts(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, bool]]:
    for title, pairs in PAIRS.items():
        there = [(label, arrays[name]) for name, label in pairs.items() if name in arrays]
        if there:
            yield charts.histogram(title, there), True
        if title == CONTEXTS and "code_usage" in arrays:  # beside it
            counts_GV = np.nan_to_num(arrays["code_usage"], posinf=0, neginf=0).clip(0)
            yield charts.rank_chart("Codes by how often they are used", counts_GV), False


def sample_charts(samples: np.ndarray | None) -> Iterator[tuple[str, bool]]:
    if samples is None:
        return
    names = LEADS if samples.shape[2] == len(LEADS) else [str(i + 1) for i in range(samples.shape[2])]
    for i, mv_SLT in enumerate(samples[:SAMPLES_SHOWN]):
        yield charts.ecg_chart(f"Crop {i + 1}, as the model saw it", mv_SLT, names, FS_HZ), False


def about(facts: Mapping[str, Any], config: str, absent: Sequence[str]) -> str:
    rows = [(key, value) for key, value in flat(facts) if not key.startswith(("config.", "chance.", "validation"))]
    inside = page.table(rows) + page.folded("config.yaml", config)
    inside += page.small(f"Not logged in this run: {', '.join(absent)}." if absent else "")
    return f"<section><h2>The run</h2>{inside}</section>" if inside else ""


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def write_report(run: Path) -> Path:
    write_whole(run / REPORT, build(run))
    return run / REPORT


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m engine.evaluation.run_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    try:
        print(write_report(parser.parse_args(arguments).run))
    except (ReportError, OSError) as error:
        print(f"engine.evaluation.run_report: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
