"""What a run's directory holds, read forgivingly: a report is asked for when something went wrong, too.

Rows(RUN/metrics.jsonl).curve("loss")      steps and numbers; lines cut off by a kill are counted and left out
read_facts(RUN)                            run.json and the text of config.yaml
write_diagnostics(RUN/diagnostics.npz, code_usage=counts, ...)      any of these:

positive_similarity [n], negative_similarity [m]   cosines of contexts with their own and with other targets
same_similarity [n], other_similarity [m]          of pooled encodings: halves of one crop or patient, of different ones
code_usage [G, V]                                  how often each code of each codebook was chosen
samples_mv [n, S, L, T]                            augmented crops as the model saw them, millivolts
"""

import io
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from engine.common import write_whole
from engine.data.npz import ArrayError, load_npz

METRICS, VALIDATION, DIAGNOSTICS = "metrics.jsonl", "validation.jsonl", "diagnostics.npz"
VALID = "valid/"  # before the names of validation's figures where those of training stand beside them
AXES = {"positive_similarity": 1, "negative_similarity": 1, "same_similarity": 1, "other_similarity": 1}
AXES |= {"code_usage": 2, "samples_mv": 4}
LARGEST = 1e12  # beyond it nothing is a step, a loss or a rate


class ReportError(Exception):
    """One line: what is wrong with RUN."""


class Rows:
    """A file of one JSON object a step, as columns; what is no number is NaN."""

    def __init__(self, path: Path) -> None:
        by_step: dict[float, dict[str, Any]] = {}
        self.unreadable = 0
        for text in path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(text)
                step = number(row["step"])
            except (ValueError, LookupError, TypeError, RecursionError):
                step = math.nan
            if math.isfinite(step):
                by_step[step] = row  # of a step that was done again, the later
            else:
                self.unreadable += bool(text.strip())
        self.rows = [by_step[step] for step in sorted(by_step)]
        self.steps = np.array(sorted(by_step))

    def column(self, key: str) -> np.ndarray:
        return np.array([number(row.get(key)) for row in self.rows])

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and numbers where the key was logged; a logged NaN is one."""
        logged = np.array([row.get(key) is not None for row in self.rows], bool)
        return self.steps[logged], self.column(key)[logged]

    def last(self, key: str) -> float:
        values = self.column(key)
        values = values[np.isfinite(values)]
        return float(values[-1]) if len(values) else math.nan

    def median(self, key: str) -> float:
        """Without the first row, which also holds the warm-up, if there are others."""
        values = self.column(key)[min(1, len(self.rows) - 1) :]
        values = values[np.isfinite(values)]
        return statistics.median(values.tolist()) if len(values) else math.nan


def number(value: Any) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if known else math.nan


def write_diagnostics(path: Path, **arrays: np.ndarray) -> None:
    """RUN/diagnostics.npz: any of the arrays above."""
    known = ", ".join(f"{name} with {axes} axes" for name, axes in AXES.items())
    for name, array in arrays.items():
        if AXES.get(name) != np.ndim(array):
            raise ValueError(f"{name}: of shape {np.shape(array)}: the arrays are {known}")
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: np.asarray(array) for name, array in arrays.items()})  # type: ignore[arg-type]
    write_whole(path, buffer.getvalue())


def read_diagnostics(path: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays that are there and of use, and remarks about those that are not."""
    if not path.is_file():
        return {}, []
    found, remarks = {}, []
    try:
        for name, array in load_npz(path).items():
            if AXES.get(name) == array.ndim and array.size and array.dtype.kind in "iuf":
                found[name] = array.astype(np.float64)
            else:
                remarks.append(f"{path.name}: {name} {array.dtype}{list(array.shape)} is not shown")
    except ArrayError as error:
        return {}, [f"{path.name} {error}"]
    return found, remarks


def read_facts(run: Path) -> tuple[dict[str, Any], str, list[str]]:
    facts: dict[str, Any] = {}
    remarks, config = [], ""
    try:
        loaded = json.loads((run / "run.json").read_text())
        facts = loaded if isinstance(loaded, dict) else {}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        remarks.append(f"run.json cannot be read: {' '.join(str(error).split())}")
    if (run / "config.yaml").is_file():
        config = (run / "config.yaml").read_text(errors="replace")
    return facts, config, remarks
