"""Fit a classifier of your own labels on a frozen model, and say how good it is.

    omnilead fit --data DATASET --labels my.csv --out MODEL                      a column `record` and one for each label
    omnilead fit --data DATASET --labels my.csv --columns af --reader boosted --out MODEL
    omnilead fit --data 'ds/2027-*' more --labels my.csv --out MODEL             on several datasets, as if they were one
    omnilead fit --model RUN --data DATASET --labels my.csv --leads I --out MODEL      for ECGs of lead I alone
    omnilead predict --model MODEL --data NEW --out predictions.csv

Labels are 0 and 1, yes and no, text or numbers; an empty cell is unknown. If a column
has two other values, such as 1 and 2, --positive says which counts as 1. The head is fitted on the
ECGs of train and valid; `omnilead evaluate --model MODEL` tests it on the others. A column `fold` or
`split` splits the ECGs; without one, patients are split 8:1:1. The score that is printed is from
cross-validation: each ECG of train and valid (of more than 5,000 a fifth) is scored by a head that
was fitted without its patient. `omnilead bench` compares it with baselines. The encoder stays as it
is (`omnilead finetune` trains it, too). Exit code 2: an argument or a file is wrong.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from omnilead.data_tools.io.commands import run_as_omnilead
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.terminal import print_result
from omnilead.downstream.inference import options as shared
from omnilead.engine.settings.commandline import one_blas_thread, parse_options, run_on_ranks
from omnilead.engine.settings.errors import Facts
from omnilead.engine.settings.files import File

if TYPE_CHECKING:
    from omnilead.downstream.inference.trained_model import TrainedModel


@dataclass(frozen=True)
class FittedModel:
    """A model folder with the head that `fit` fitted. It can be passed wherever a path to a model
    is expected."""

    path: Path
    scores: Facts  # the scores of the cross-validation, as in config.json
    sentences: Sequence[str]  # say what the head is, and how good it is

    def __fspath__(self) -> str:
        return str(self.path)

    @cached_property
    def _loaded(self) -> "TrainedModel":
        from omnilead.downstream.inference.trained_model import load

        # `fit` has already run the model's custom code, so running it again adds no risk
        return load(self.path, code=True)

    def model(self) -> "TrainedModel":
        """Returns the same as omnilead.load(MODEL), loaded once."""
        return self._loaded

    def predict(self, *ecg: Any, **options: Any) -> Any:
        """Predicts an ECG. Takes and returns the same as omnilead.load(MODEL).predict."""
        return self._loaded.predict(*ecg, **options)

    @property
    def report(self) -> str:
        """Returns the lines that `omnilead fit` prints: what the head is, and how good it is."""
        return "\n".join(self.sentences)


def fit(
    model: Annotated[
        str, Option("RUN, small, s3://... or hf://org/name (small)", "RUN", "--model")
    ] = "small",
    *,
    code: shared.Code = False,
    data: shared.BuiltDatasets,
    labels: Annotated[
        File, Option("a table of labels, CSV or parquet, with a column `record`", "CSV")
    ],
    columns: shared.Columns = (),
    kind: shared.Kind = None,
    positive: shared.Positive = "",
    out: Annotated[File, Option("folder for the model with its head", "MODEL")],
    leads: Annotated[
        str, Option('12, 6, 3, 2, 1 or names such as "I,II,V2": those it will be given (12)', "L")
    ] = "12",
    reader: shared.Reader = "linear",
    readout: shared.Readout = "",
    folds: Annotated[
        int | None,
        Option(
            "folds of the cross-validation (5; of more than 5,000 ECGs, the first of 5)", "K", low=2
        ),
    ] = None,
    batch: shared.Batch = None,
    device: shared.Device = "auto",
    precision: shared.Precision = "auto",
    anonymous: shared.Anonymous = False,
) -> FittedModel:
    """Fits a classifier of your own labels on a frozen model, as `omnilead fit` does, and returns
    it. The message of an error has one line."""
    # These imports wait until here, so that --help does not load PyTorch
    from omnilead.downstream.evaluation import fit as fitting
    from omnilead.downstream.evaluation.embedders import EmbedOptions

    options = fitting.FitOptions(
        data=data,
        out=os.fspath(out),
        model=os.fspath(model),
        labels=os.fspath(labels),
        columns=tuple(columns),
        kind=kind,
        positive=positive,
        leads=leads,
        reader=reader,
        folds=folds,
        anonymous=anonymous,
        embedding=EmbedOptions(readout, batch, device, precision, code),
    )
    scores, sentences = fitting.fit_scores_and_sentences(options)
    return FittedModel(Path(out), scores, sentences)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(fit, "fit", __doc__, arguments)
    one_blas_thread()

    def run_fit() -> int:
        return print_result(f"{fit(**options).report}\n")

    return run_on_ranks("omnilead fit", run_fit, options["out"])


if __name__ == "__main__":
    run_as_omnilead("fit")
