"""Reads the files of a run for its report. Damaged or missing files are remarks, not errors.

files = RunFiles(Path("RUN"))
files.metrics.curve("loss")                                          # steps and values, from metrics.jsonl
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from omnilead.engine.inference.npz import ArrayError, load_npz
from omnilead.engine.training.files import DIAGNOSTICS, METRICS, VALIDATION

DIAGNOSTIC_AXES = {  # arrays of diagnostics.npz, with the number of their axes
    "positive_similarity": 1,  # cosines of contexts with their own targets
    "negative_similarity": 1,  # and with other targets
    "same_similarity": 1,  # cosines of pooled encodings of one crop or patient
    "other_similarity": 1,  # and of different ones
    "code_usage": 2,  # [G, V]: how often each code of each codebook was chosen
    "samples_mv": 4,  # [n, S, L, T]: augmented crops as the model saw them, in millivolts
}
LARGEST = 1e12  # larger numbers cannot be steps, losses or rates
RECENT = 10  # logged steps


class ReportError(Exception):
    """There is no report. The message is one line."""


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

    def column(self, key: str) -> np.ndarray:
        return np.array([number(row.get(key)) for row in self.rows])

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values where the key was logged, NaN included."""
        logged = np.array([row.get(key) is not None for row in self.rows], bool)
        return self.steps[logged], self.column(key)[logged]

    def finite(self, key: str, rows: slice = slice(None)) -> np.ndarray:
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
            raise ReportError(
                f"{run}: no {METRICS}: give the directory of a run of omnilead pretrain or finetune"
            )
        self.name, self.metrics, self.held_out = (
            run.resolve().name,
            StepLog(run / METRICS),
            StepLog(run / VALIDATION),
        )
        if not self.metrics.rows:
            raise ReportError(f"{run / METRICS}: has no step yet: wait for the first log line")
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


def read_diagnostics(path: Path) -> tuple[dict[str, np.ndarray], list[str]]:
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
