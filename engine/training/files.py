"""Names of the files in RUN, and RUN/diagnostics.npz. engine.report.run_files reads them."""

import io
from pathlib import Path

import numpy as np

from omnilead.engine.common import write_whole

METRICS, VALIDATION, DIAGNOSTICS = "metrics.jsonl", "validation.jsonl", "diagnostics.npz"
LABELS = "labels.parquet"  # the label table that a run was fine-tuned on
VALID = "valid/"  # prefix of validation metrics where they appear beside training metrics
LOWER_IS_BETTER = ("loss", "mae", "rmse")  # among validation metrics


def write_diagnostics(path: Path, **arrays: np.ndarray) -> None:
    """The arrays are those of engine.report.run_files.DIAGNOSTIC_AXES."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_whole(path, buffer.getvalue())
