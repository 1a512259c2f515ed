"""Score a trained model on held-out ECGs, as a table, JSON or an HTML report.

    omnilead evaluate --model RUN --data DATASET                        # a fine-tuned model, on the test split
    omnilead evaluate --model RUN --data DATASET --leads I,II,V2        # a 12-lead model that is shown three leads
    omnilead evaluate --model RUN --data DATASET --labels my.csv        # another label table than the one that RUN keeps
    omnilead evaluate --model RUN --data A B 'ds/2027-*'                # on several datasets, as if they were one
    omnilead evaluate --model RUN --data DATASET --json F.json --report F.html
    torchrun --nproc-per-node 8 -m omnilead.downstream.evaluate --model RUN --data DATASET --json F.json  # a GPU per rank

Classification: AUROC, AUPRC, Brier score, accuracy (all labels of an ECG right), F measure,
sensitivity and specificity at the model's thresholds; with --role valid, the score that 95 % of the
positive records reach, and the specificity there; for diagnosis also the CinC 2021 Challenge score.
Regression: mean absolute error, RMSE, R2, Pearson r. Survival: Harrell's C-index. Each is given for
whole records; with --halves also for halves of 5 s, as in the paper (or the model's windows).
The first line says which number to report; --json holds all of them.
Identification: the share of probes whose most similar gallery crop (cosine) is of the same
patient, and the same for random weights of the architecture; it also works for a model that was
only pre-trained. Scores have 95 % intervals from a bootstrap over patients; those from fewer than
10 positives or negatives are exact or left out.

With --json F or --report F the outputs are kept in parts next to F until the scores are written:
run the same command again to resume. Exit code 2: an argument or a file is wrong. Exit code 1:
scoring or writing failed.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from omnilead.data_tools.io.commands import run_as_omnilead
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.terminal import print_result
from omnilead.downstream.inference import options as shared
from omnilead.engine.settings.commandline import (
    parse_options,
    require_writable,
    run_on_ranks,
    write_result,
)
from omnilead.engine.settings.errors import ConfigError, Facts, Flag, OutputError
from omnilead.engine.settings.files import File
from omnilead.engine.settings.launcher import launched_rank
from omnilead.engine.settings.metrics import METRIC_OF, label_of
from omnilead.engine.settings.run_files import LABELS

if TYPE_CHECKING:
    from omnilead.downstream.evaluation.identification import IdentificationResult
    from omnilead.downstream.evaluation.results import EvalOptions, TaskResult
    from omnilead.downstream.inference.trained_model import TrainedModel
    from omnilead.engine.data.datasets import Datasets

CLASSES_PRINTED = 12  # with more classes than this, the terminal shows no table of classes


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(evaluate, "evaluate", __doc__, arguments)

    def run_evaluate() -> int:
        document = evaluate(**options)
        if document is None:
            return 0  # this is not rank 0, which prints the scores
        text = "\n".join(score_lines(document, options["halves"])) + "\n"
        return print_result(f"{text}{options['report']}\n" if options["report"] else text)

    flag = "--json" if options["json"] else "--report"
    return run_on_ranks(
        "omnilead evaluate", run_evaluate, options["json"] or options["report"], flag
    )


def evaluate(
    model: Annotated[File, Option("a run, or a folder with model.safetensors", "RUN", "--model")],
    *,
    code: shared.Code = False,
    data: shared.BuiltDatasets,
    leads: Annotated[
        str, Option('12, 6, 3, 2, 1 or names such as "I,II,V2"; others are set to zero (all)', "L")
    ] = "",
    task: Annotated[
        str, Option("a shipped task such as age, or a YAML file (default: the model's)", "NAME")
    ] = "auto",
    labels: Annotated[
        File,
        Option(
            "a table of labels, CSV or parquet, with the columns of the task (the one that RUN keeps)",
            "CSV",
        ),
    ] = "",
    role: Annotated[Literal["test", "valid"], Option("the split to score (test)")] = "test",
    json: Annotated[File | None, Option("write the scores as JSON", "F")] = None,
    report: Annotated[
        File | None, Option("write an HTML page with curves and tables", "F.html")
    ] = None,
    halves: Annotated[
        bool, Option("show the scores of single halves of 5 s, too, as the paper has them")
    ] = False,
    batch: Annotated[int, Option("crops of 10 s encoded at a time (32)", "N", low=1)] = 32,
    device: shared.Device = "auto",
    anonymous: shared.Anonymous = False,
) -> Facts | None:
    """Scores a trained model on held-out ECGs, as `omnilead evaluate` does. Returns what --json
    writes, or None on all ranks but the first. The message of an error has one line."""
    from omnilead.downstream.evaluation.results import EvalOptions
    from omnilead.downstream.inference.commands import select_device
    from omnilead.downstream.inference.trained_model import load
    from omnilead.engine.data.datasets import open_together
    from omnilead.engine.training.distributed import join_ranks

    files = ResultFiles(Path(json) if json else None, Path(report) if report else None)
    files.require_writable()
    run, table = os.fspath(model), os.fspath(labels)
    options = EvalOptions(role, leads, batch, run, files.halves_file)
    with closing_process_group():
        datasets = open_together(data, anonymous)
        join_ranks()
        trained = load(run, code).to(select_device(device))
        if not table and task == "auto":
            table = label_table_of_run(run)
        result = score_model(trained, datasets, task, table, options)
    if launched_rank().rank:
        return None
    document = result.document()
    files.write_scores(document, result, datasets, halves)
    return document


@contextmanager
def closing_process_group() -> Iterator[None]:
    """Closes the process group of the ranks when the block ends; OutputError if another rank has
    died."""
    from omnilead.engine.training.distributed import close_groups, lost_a_rank

    try:
        yield
    except RuntimeError as error:
        if not lost_a_rank(error):
            raise
        raise OutputError(
            f"another rank died ({str(error).splitlines()[0][:150]}): run the same command again"
        ) from None
    finally:
        close_groups()


def score_model(
    model: "TrainedModel", data: "Datasets", task: str, labels: str, options: "EvalOptions"
) -> "TaskResult | IdentificationResult":
    """Returns the model's scores in the task of this name with the label table `labels`. The task
    "auto" is the one that the model was fine-tuned for or, if there is none, identification."""
    from omnilead.downstream.evaluation.identification import identify
    from omnilead.downstream.evaluation.results import find_task, score_task

    task_config = find_task(model, task, labels)
    if task_config.kind == "identity":
        return identify(model, data, options)
    return score_task(model, data, task_config, options)


class ResultFiles(NamedTuple):
    """The files that the scores are written to: JSON, an HTML page, both or none."""

    json: Path | None
    page: Path | None

    @property
    def halves_file(self) -> Path | None:
        """Returns the temporary file of the model's outputs, which is deleted once the scores are
        written; None if neither a JSON file nor a page was asked for."""
        first = self.json or self.page
        return Path(f"{first}.halves.parquet") if first else None

    def require_writable(self) -> None:
        """Raises ConfigError if the files cannot be written."""
        if self.json:
            require_writable(self.json, Flag("--json"))
        if self.page:
            require_writable(self.page, Flag("--report"))
        if self.json and self.page and self.json.resolve() == self.page.resolve():
            raise ConfigError(
                Flag("--json"),
                f" {self.json} and ",
                Flag("--report"),
                f" {self.page} are the same file: choose two names",
            )
        world = launched_rank().world
        if world > 1 and not self.halves_file:
            raise ConfigError(
                f"WORLD_SIZE={world}: several ranks keep their outputs in a file next to the results, but no "
                "file of results is named: give ",
                Flag("--json"),
                " F or ",
                Flag("--report"),
                " F",
            )

    def write_scores(
        self,
        document: Facts,
        result: "TaskResult | IdentificationResult",
        data: "Datasets",
        halves: bool,
    ) -> None:
        """Writes the JSON file and the HTML page that were asked for, and removes the kept
        outputs."""
        from omnilead.downstream.evaluation.results import halves_file_of_dataset

        if self.json:
            write_result(self.json, dumps(document, indent=1) + "\n", Flag("--json"))
        if self.page:
            from omnilead.downstream.reports import evaluation_report

            page = evaluation_report.report_page(result, data, halves)
            write_result(self.page, page, Flag("--report"))
        if self.halves_file:
            for number in range(len(data.all)):
                Path(str(halves_file_of_dataset(self.halves_file, number))).unlink(missing_ok=True)


def label_table_of_run(model: str) -> str:
    """Returns the path of the label table that the run `model` has kept from its training; "" if
    there is none. A path or address that the model itself names is never opened, because the model
    may come from anyone."""
    table = Path(model, LABELS)
    return str(table) if table.is_file() and not table.is_symlink() else ""


def score_lines(document: Facts, halves: bool = False) -> Iterator[str]:
    """Yields lines for the terminal with the scores of whole records and, if `halves`, of single
    windows; for identification, with the scores of the probes."""
    from omnilead.downstream.evaluation.results import scored_windows_text, sentence_to_report

    yield "{task}, role {role}, leads {leads}: {model} on {dataset}".format(**document)
    labels = {name: label_of(name) for name in document["metrics"]}
    width = max(map(len, labels.values())) + 2
    yield sentence_to_report(document)
    record = document.get("record")
    parts = [record, document] if record and halves else [record or document]
    if record:
        counts = [f"{record['n']:,} records", f"{document['n']:,} {scored_windows_text(document)}"]
        yield f"{'':<{width}}{''.join(f'{count:<30}' for count in counts[: len(parts)])}".rstrip()
    else:
        yield f"{document['n']:,} probes against {document['gallery']:,} in the gallery"
    for name, label in labels.items():
        columns = (_score_text(part, name) for part in parts)
        yield f"{label:<{width}}{''.join(f'{column:<30}' for column in columns)}".rstrip()
    if 0 < len(classes := parts[0]["classes"]) <= CLASSES_PRINTED:
        brief = (metric.name for metric in METRIC_OF.values() if metric.in_brief)
        columns_shown = ("positives", "threshold", *brief, "n")
        names = [name for name in columns_shown if name in next(iter(classes.values()))]
        yield f"{'class':<18}" + "".join(f"{name.replace('_', ' '):>11}" for name in names)
        for name, figures in classes.items():
            line = f"{name:<18}"
            for key in names:
                line += f"{'-' if figures[key] is None else round(figures[key], 4):>11}"
            yield line
    yield from document["remarks"]


def _score_text(document: Facts, name: str) -> str:
    value, interval = document["metrics"][name], document["intervals"].get(name)
    if value is None:
        return "not defined"
    text = f"{value:.4f}"
    if interval and None not in interval:
        text += f"  {interval[0]:.4f} to {interval[1]:.4f}"
    return text


if __name__ == "__main__":
    run_as_omnilead("evaluate")
