"""Functions that the engine calls at the end of a training: they write a model card and
RUN/report.html, and load the model. Each function imports the module that it needs only when it is
called, because PyTorch and matplotlib import slowly."""

from pathlib import Path
from typing import Any

from omnilead.engine.run import AfterTraining


def model_card(*of_run: Any) -> str:
    """Returns the text of the model card: see interop.hub.model_card."""
    from omnilead.downstream.interop.hub import model_card as card

    return card(*of_run)


def write_report(run: Path) -> Path:
    """Writes RUN/report.html and returns its path: see reports.run_report.write_report."""
    from omnilead.downstream.reports.run_report import write_report as write

    return write(run)


def load(path: Path, **options: Any) -> Any:
    """Loads a trained model: see inference.trained_model.load."""
    from omnilead.downstream.inference.trained_model import load as load_model

    return load_model(path, **options)


AFTER_TRAINING = AfterTraining(model_card, write_report, load)
