"""Score fine-tuned models of several seeds on the test split of a dataset, and compare them in pairs over
patients and seeds.

    python -m benchmarks.finetuned NAME=RUN ... --task diagnosis --leads 12 --data DATASET --out OUT

NAME is TASK-LEADS-START-SEED; runs of other tasks and leads are left out. A row is the mean over
the seeds of a START, for whole records; its interval is from resamples of the patients and of the
seeds, the same for each START. OUT/bench.json and the others are as `omnilead bench` writes them.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import omnilead
from benchmarks import program_parser
from benchmarks.measure import say
from benchmarks.trials import runs_named
from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.downstream.evaluation.differences import (
    Scored,
    Scores,
    average_draws,
    bootstrap_weights,
    mean_over_classes,
    metrics_by_class,
    rows_and_differences,
)
from omnilead.downstream.evaluation.identification import identify
from omnilead.downstream.evaluation.results import (
    CHOSEN_THRESHOLDS_SCORE,
    EvalOptions,
    find_task,
    labels_scores_patients_by_record,
    nan_to_none,
    score_task,
)
from omnilead.downstream.reports.bench_report import write_comparison
from omnilead.downstream.reproduce.jobs import read_json
from omnilead.downstream.tasks.metrics import DEFAULT_THRESHOLD, Array, challenge_statistic
from omnilead.engine.data.datasets import Datasets
from omnilead.engine.settings.commandline import run_on_ranks
from omnilead.engine.settings.errors import ConfigError

RANDOM_START = "random"  # the START in the names of runs from random weights; other starts are compared with it


def main(arguments: Sequence[str] | None = None) -> int:
    parser = program_parser("finetuned", __doc__)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--task", required=True, metavar="TASK")
    parser.add_argument("--leads", default="12", metavar="L", help="that the models are shown (12)")
    parser.add_argument("--data", required=True, metavar="DATASET")
    parser.add_argument(
        "--labels", default="", metavar="TABLE", help="of a task with a label table"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    return run_on_ranks("benchmarks.finetuned", lambda: score_runs(options))


def score_runs(options: argparse.Namespace) -> int:
    """Score all runs of the task and write OUT/bench.json and tables. Return an exit status."""
    dataset, starts, scores = Dataset.open(options.data), dict[str, dict[str, Path]](), Scores()
    prefix = f"{options.task}-{options.leads}-"
    for name, run in runs_named(options.runs, prefix).items():
        start, _, seed = name.rpartition("-")
        starts.setdefault(start, {})[seed] = run
    if not starts:
        raise ConfigError(
            f"no NAME has the form {prefix}START-SEED: give each run as NAME=RUN with such a NAME"
        )
    seeds = {start: sorted(runs_by_seed) for start, runs_by_seed in starts.items()}
    if len(set(map(tuple, seeds.values()))) > 1:
        each_has = "; ".join(
            f"{start} {' '.join(runs_by_seed)}" for start, runs_by_seed in seeds.items()
        )
        raise ConfigError(
            f"the starts have different seeds: {each_has}: give runs with the same seeds for each start"
        )
    names = sorted(starts, key=RANDOM_START.__eq__)
    notes = ["Means over seeds."]
    for start in names:
        runs = [starts[start][seed] for seed in seeds[start]]
        scored = []
        for run in runs:
            say(f"{run.name} on {options.leads} leads ...")
            scored.append(score_run(run, dataset, options))
        samples = average_draws([of_run for _, of_run in scored])
        figures = {}
        for name in samples:
            figures[name] = [float(of_run[name][0]) for _, of_run in scored]
        facts = scored[-1][0] | {"each": figures}
        scores[start, options.task, options.leads, None] = facts, samples
        notes += [
            f"{options.task}, leads {options.leads}, {start}: {remark}."
            for remark in training_remarks(runs)
        ]
    models = {
        name: RANDOM_START if RANDOM_START in names and name != RANDOM_START else ""
        for name in names
    }
    document = {
        "data": options.data,
        "models": models,
        **rows_and_differences(scores, models),
        "notes": notes,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_comparison(nan_to_none(document), options.out)
    return 0


def training_remarks(runs: Sequence[Path]) -> Iterator[str]:
    """Yield remarks on why these runs may be worse than they could be: training was too short, or the chosen
    learning rate is the lowest or highest that was tried."""
    ended = [json.loads((run / "result.json").read_text()) for run in runs]
    short = [result for result in ended if result.get("converged") is False]
    if short:
        last = sum(result.get("validations_since") == 0 for result in short)
        yield (
            f"{len(short)} of {len(ended)} not converged"
            + f", {last} of them best at the last step" * bool(last)
        )
    for run in runs:
        facts = read_json(run / "run.json")
        rates = [float(row[0]) for row in facts.get("rates", ())]
        if rates:
            chosen = facts["config"]["train"]["lr"]
            for end, rate in (("lowest", min(rates)), ("highest", max(rates))):
                if rate == chosen:
                    yield f"the chosen learning rate, {chosen:g}, is the {end} tried"


def score_run(run: Path, dataset: Dataset, options: argparse.Namespace) -> Scored:
    """Return (facts about the test data, {metric: its values under each bootstrap weighting of the
    patients})."""
    model, eval_options = omnilead.load(str(run)), EvalOptions(leads=options.leads)
    task = find_task(model, labels=options.labels)
    if task.kind == "identity":
        result = identify(model, Datasets((dataset,)), eval_options)
        hits, weight_NB = result.scores["hits"], bootstrap_weights(np.array(result.probe_ids))
        facts = {
            "n": len(hits),
            "patients": len(set(result.probe_ids)),
            "gallery": len(result.gallery_ids),
        }
        return facts, {"accuracy": hits @ weight_NB / weight_NB.sum(0)}
    halves = score_task(model, Datasets((dataset,)), task, eval_options)
    y_NK, scores_NK, people = labels_scores_patients_by_record(
        halves.labels_NK, halves.scores_NK, halves.records_N, halves.patients_N
    )
    weight_NB, samples = bootstrap_weights(np.array(people)), dict[str, Array]()
    of_challenge = halves.head.classes == CLASSES
    for name, thresholds in (
        ("challenge", DEFAULT_THRESHOLD),
        (CHOSEN_THRESHOLDS_SCORE, halves.head.chosen),
    ):
        if of_challenge and thresholds:
            statistic = challenge_statistic(y_NK, scores_NK > np.asarray(thresholds))
            samples[name] = np.array([statistic(weight_N) for weight_N in weight_NB.T])
    samples |= mean_over_classes(metrics_by_class("multilabel", y_NK, scores_NK, weight_NB))
    return {"n": len(y_NK), "patients": len(set(people))}, samples


if __name__ == "__main__":
    sys.exit(main())
