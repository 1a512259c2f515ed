"""Names of the files in a run's folder, RUN, and readers for the metrics in it."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

# Files in RUN: training writes them; `omnilead status` and a run's report read them
METRICS = "metrics.jsonl"


VALIDATION = "validation.jsonl"


RUN_FACTS = "run.json"


PROMETHEUS = "metrics.prom"


LOCK = ".lock"  # locked while a process trains in RUN


REPORT = "report.html"


MAX_PLAUSIBLE_NUMBER = 1e12  # larger numbers cannot be steps, losses, rates or seconds


LABELS = "labels.parquet"  # the label table that a run was fine-tuned on


VALID_PREFIX = "valid/"  # prefix of validation metrics where they appear beside training metrics

# crops trained on, and the seconds that they took
CropsAndSeconds = tuple[float, float]


class MetricRows(NamedTuple):
    rows: list[dict[str, Any]]  # one row for each step, ascending
    unreadable: int  # number of lines that cannot be read


def read_metric_rows(path: Path) -> MetricRows:
    """Reads metrics.jsonl or validation.jsonl. If a step was repeated after a restart, only its
    last row counts."""
    by_step: dict[float, dict[str, Any]] = {}
    unreadable = 0
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            step = number_or_nan(row["step"])
        except (ValueError, LookupError, TypeError, RecursionError):
            step = math.nan
        if math.isfinite(step):
            by_step[step] = row
        else:
            unreadable += bool(line.strip())
    return MetricRows([by_step[step] for step in sorted(by_step)], unreadable)


def crops_and_seconds(rows: list[dict[str, Any]]) -> list[CropsAndSeconds]:
    """Returns (crops, seconds of training) between each row and the one before it. The seconds
    exclude validation and checkpoints, as crops_per_s does. Rows without crops_per_s are left
    out."""
    spans, before = [], 0.0
    for row in rows:
        seen, rate = number_or_nan(row.get("crops_seen")), number_or_nan(row.get("crops_per_s"))
        seconds = (seen - before) / rate if rate > 0 else math.nan
        if 0 < seconds < MAX_PLAUSIBLE_NUMBER:
            spans.append((seen - before, seconds))
        if math.isfinite(seen):
            before = seen
    return spans


def number_or_nan(value: Any) -> float:
    is_number = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < MAX_PLAUSIBLE_NUMBER
    )
    return float(value) if is_number else math.nan
