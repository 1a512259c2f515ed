"""Compare models on frozen embeddings: linear probes over shares of the labels and leads, and
identification.

    omnilead bench --models A=RUN B=hf://org/name --data DATASET --tasks sex identification --leads 12 1 --out OUT
    omnilead bench --models RUN --data DATASET --labels LABELS --tasks ptbxl-rhythm --share 0.01 0.1 1 --out OUT
    omnilead bench --models RUN --data A --test-data B --tasks rhythm.csv --out OUT      trained on A, tested on B
    omnilead bench --models small --data DATASET --labels my.csv --folds 5 --out OUT     few ECGs: each is tested once

Baselines are included: five draws of random weights of each architecture, and methods without
pre-training: the mean beat, measurements of the signal, and gradient boosting on both (extra
`bench`). OUT holds bench.md, bench.csv, bench.json and bench.png; OUT/parts caches the
embeddings. Run again after an interruption or with more tasks, the command computes only what is
missing. A line on stderr says how long it may take; without a terminal, another says when each model
is done. How to compare fairly: docs/comparing.md. To use what won: omnilead fit. Exit code 2: an
argument or a file is wrong.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from omnilead.data_tools.io.commands import run_as_omnilead
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.shared_options import DatasetPaths
from omnilead.data_tools.io.terminal import print_result
from omnilead.downstream.inference import options as shared
from omnilead.engine.settings.commandline import one_blas_thread, parse_options, run_on_ranks
from omnilead.engine.settings.files import File

if TYPE_CHECKING:
    import pyarrow as pa


class Comparison(dict[str, Any]):
    """The content of OUT/bench.json as a dictionary. Its `table` and `to_pandas` give the scores as
    a table."""

    @property
    def table(self) -> "pa.Table":
        """Returns a table with a row for each score. Its columns are model, task, leads, share,
        metric, value, low and high (the ends of the 95 % interval), n and patients."""
        import pyarrow as pa

        lines = []
        for row in self["rows"]:
            for metric, value in row["metrics"].items():
                low, high = row["intervals"][metric]
                line = {name: row[name] for name in ("model", "task", "leads", "share")}
                line |= {"metric": metric, "value": value, "low": low, "high": high}
                lines.append({**line, "n": row["n"], "patients": row["patients"]})
        return pa.Table.from_pylist(lines)

    def to_pandas(self) -> Any:
        return self.table.to_pandas()

    def _repr_html_(self) -> str:
        return str(self.to_pandas().to_html(index=False))


def bench(
    models: Annotated[
        Sequence[str],
        Option(
            "RUN, small, s3://... or hf://org/name; the first is the reference",
            "[NAME=]RUN",
            "--models",
        ),
    ],
    *,
    code: shared.Code = False,
    data: Annotated[
        DatasetPaths,
        Option(
            "datasets, patterns or a .txt file that lists them: probes are fitted on train and valid, scored "
            "on test",
            "DATASET",
        ),
    ],
    test_data: Annotated[
        DatasetPaths, Option("score on the test split of these datasets instead", "DATASET")
    ] = (),
    tasks: Annotated[
        Sequence[str],
        Option(
            "label tables, shipped tasks such as age, identification (the table --labels)", "TASK"
        ),
    ] = (),
    labels: Annotated[
        Sequence[str] | str,
        Option("your tables, or a folder of tables as `omnilead labels` writes them", "CSV|DIR"),
    ] = "",
    columns: shared.Columns = (),
    kind: shared.Kind = None,
    positive: shared.Positive = "",
    test_labels: Annotated[str, Option("the same for --test-data", "DIR")] = "",
    leads: Annotated[
        Sequence[str],
        Option('12, 6, 3, 2, 1 or names such as "I,II,V2"; other leads are set to zero (12)', "L"),
    ] = ("12",),
    fit_leads: Annotated[
        str, Option("leads that probes are fitted on (those of --leads)", "L")
    ] = "",
    share: Annotated[
        Sequence[float],
        Option("share of the patients of train and valid to fit on (1)", "S", low=0.0001, high=1),
    ] = (1.0,),
    folds: Annotated[
        int | None,
        Option(
            "cross-validate in K folds of patients, whatever the table's split: each labelled ECG is "
            "tested once",
            "K",
            low=2,
        ),
    ] = None,
    readout: shared.Readout = "",
    out: Annotated[File, Option("folder for the results and the embeddings", "OUT")],
    reader: shared.Reader = "linear",
    seed: Annotated[int, Option("seed of the random weights (0)")] = 0,
    batch: shared.Batch = None,
    device: shared.Device = "auto",
    precision: shared.Precision = "auto",
    anonymous: shared.Anonymous = False,
) -> Comparison:
    """Compares models on frozen embeddings, as `omnilead bench` does. Returns the content of
    OUT/bench.json, whose `table` and `to_pandas` give the scores as a table. The message of an
    error has one line."""
    # These imports wait until here, so that --help does not load PyTorch
    from omnilead.downstream.evaluation import bench as comparison
    from omnilead.downstream.evaluation.embedders import EmbedOptions
    from omnilead.downstream.evaluation.plan import BenchOptions, separate_labels_and_tasks
    from omnilead.downstream.reports.bench_report import write_comparison

    labels, tasks = separate_labels_and_tasks(labels, tuple(tasks))
    options = BenchOptions(
        models=tuple(models),
        data=data,
        out=Path(out),
        test_data=test_data or (),
        tasks=tasks,
        labels=labels,
        columns=tuple(columns),
        kind=kind,
        positive=positive,
        test_labels=test_labels,
        leads=tuple(dict.fromkeys(leads)),
        fit_leads=fit_leads,
        shares=tuple(sorted(set(share))),
        folds=folds,
        reader=reader,
        seed=seed,
        anonymous=anonymous,
        embedding=EmbedOptions(readout, batch, device, precision, code),
    )
    document = comparison.bench(options)
    write_comparison(document, options.out)
    return Comparison(document)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(bench, "bench", __doc__, arguments)
    one_blas_thread()
    from omnilead.downstream.evaluation.probe import fitting_in_processes

    def run_bench() -> int:
        with fitting_in_processes():
            bench(**options)
        out = Path(options["out"])
        text = (out / "bench.md").read_text()
        return print_result(f"{text}\n{out}: bench.md, bench.csv, bench.json, bench.png\n")

    return run_on_ranks("omnilead bench", run_bench, options["out"])


if __name__ == "__main__":
    run_as_omnilead("bench")
