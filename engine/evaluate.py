"""Score a trained model on held-out ECGs, as a table, JSON or an HTML report.

    omnilead evaluate --model RUN --data DATASET                        # a fine-tuned model, on the test split
    omnilead evaluate --model RUN --data DATASET --leads I,II,V2        # a 12-lead model that is shown three leads
    omnilead evaluate --model RUN --data DATASET --labels my.csv        # another label table than the one that RUN keeps
    omnilead evaluate --model RUN --data DATASET --json F.json --report F.html
    torchrun --nproc-per-node 8 -m omnilead.engine.evaluate --model RUN --data DATASET --json F.json  # a GPU per rank

Classification: AUROC, AUPRC, accuracy, F measure, sensitivity and specificity at the model's
thresholds; for diagnosis also the CinC 2021 Challenge score. Regression: mean absolute error, RMSE,
R2, Pearson r. Each is given for halves of 5 s, as in the paper, and for whole records.
Identification: the share of probes whose most similar gallery crop (cosine) is of the same patient,
and the same for random weights of the architecture; it also works for a model that was only
pre-trained. Scores have 95 % intervals from a bootstrap over patients; those from fewer than 10
positives or negatives are exact or left out.

With --json F or --report F the outputs are kept in parts next to F until the scores are written:
run the same command again to resume. Exit code 2: an argument or a file is wrong. Exit code 1:
scoring or writing failed.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from omnilead.data_tools.cli import show
from omnilead.engine.common import (
    RUN_CODE,
    ConfigError,
    OutputError,
    Parser,
    interruptible,
    positive,
    writable,
    write_result,
)

CLASSES_SHOWN = 12  # printed on the terminal
NAMES = {"challenge": "challenge at 0.5", "challenge_chosen": "challenge, chosen"}  # thresholds
COLUMNS = ("positives", "threshold", "auroc", "auprc", "f_measure", "mae", "r2", "n")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    args.out = args.json or args.report
    from omnilead.engine.inference import (
        commands,  # imported late, so that --help does not wait for PyTorch
    )

    return commands.exit_code(
        "omnilead evaluate",
        lambda: as_a_rank(args),
        args.out,
        "--json" if args.json else "--report",
    )


def as_a_rank(args: argparse.Namespace) -> int:
    from omnilead.engine.training.distributed import close, lost_a_rank

    try:
        return evaluate(args)
    except RuntimeError as error:
        if not lost_a_rank(error):
            raise
        raise OutputError(
            f"another rank died ({str(error).splitlines()[0][:150]}): run the same command again"
        ) from None
    finally:
        close()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="omnilead evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="RUN", help="a run, or a folder with model.safetensors")
    add("--code", **RUN_CODE)
    add(
        "--data",
        required=True,
        metavar="DATASET",
        help="a dataset made by omnilead shard; s3:// works too",
    )
    add(
        "--leads",
        default="",
        metavar="L",
        help='12, 6, 3, 2, 1 or names such as "I,II,V2"; others are set to zero (all)',
    )
    add(
        "--task",
        default="auto",
        metavar="NAME",
        help="a shipped task such as age, or a YAML file (default: the model's)",
    )
    add(
        "--labels",
        default="",
        metavar="CSV",
        help="a table of labels, CSV or parquet, with the columns of the task (RUN's)",
    )
    add("--role", choices=("test", "valid"), default="test", help="the split to score (test)")
    add("--json", type=Path, metavar="F", help="write the scores as JSON")
    add("--report", type=Path, metavar="F.html", help="write an HTML page with curves and tables")
    add(
        "--batch",
        type=positive,
        default=32,
        metavar="N",
        help="crops of 10 s encoded at a time (32)",
    )
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (auto: a GPU if there is one)")
    add(
        "--local_rank", type=int, help=argparse.SUPPRESS
    )  # added by deepspeed's launcher; LOCAL_RANK is used instead
    add("--anonymous", action="store_true", help="read public s3:// data without credentials")
    return parser.parse_args(arguments)


def evaluate(args: argparse.Namespace) -> int:
    for flag, place in (("--json", args.json), ("--report", args.report)):
        if place is not None:
            writable(place, flag)
    if args.json and args.report and args.json.resolve() == args.report.resolve():
        raise ConfigError(
            f"--json {args.json} and --report {args.report} are the same file: choose two names"
        )
    import omnilead
    from omnilead.data_tools.dataset import Dataset
    from omnilead.engine.evaluation.results import EvalOptions, chosen_task, identify, score_task
    from omnilead.engine.model.kernels import chosen_device
    from omnilead.engine.report import evaluation_report
    from omnilead.engine.training.distributed import environment, share_work

    world = environment()[1]
    if world > 1 and not args.out:
        raise ConfigError(
            f"WORLD_SIZE={world}: several ranks need --json F or --report F, next to which they "
            "keep the outputs"
        )
    dataset = Dataset.open(args.data, args.anonymous)
    rank = share_work()
    model = omnilead.load(args.model, args.code).to(chosen_device(args.device))
    task = chosen_task(
        model, args.task, args.labels or (labels_of_run(args.model) if args.task == "auto" else "")
    )
    kept = Path(f"{args.out}.halves.parquet") if args.out else None
    options = EvalOptions(args.role, args.leads, args.batch, args.model, kept)
    result = (
        identify(model, dataset, options)
        if task.kind == "identity"
        else score_task(model, dataset, task, options)
    )
    if rank:
        return 0
    document = result.document()
    text = "\n".join(lines(document)) + "\n"
    if args.json:
        write_result(args.json, json.dumps(document, indent=1) + "\n", "--json")
    if args.report:
        write_result(args.report, evaluation_report.build(result, dataset), "--report")
        text += f"{args.report}\n"
    if kept:
        kept.unlink()
    return show(text)


def labels_of_run(model: str) -> str:
    """The label table that RUN keeps from its training; "" if there is none. The path or address
    that a model names is never opened, because the model may come from anyone."""
    from omnilead.engine.training.files import LABELS

    table = Path(model, LABELS)
    return str(table) if table.is_file() and not table.is_symlink() else ""


def lines(document: dict[str, Any]) -> Iterator[str]:
    """The scores for the terminal."""
    yield "{task}, role {role}, leads {leads}: {model} on {dataset}".format(**document)
    if record := document.get("record"):
        left, right = f"{document['n']:,} halves of 5 s", f"{record['n']:,} records"
        yield f"{'':<18}{left:<30}{right}"
    else:
        yield f"{document['n']:,} probes against {document['gallery']:,} in the gallery"
    for name in document["metrics"]:
        columns = (_score(one, name) for one in (document, record) if one)
        shown = NAMES.get(name, name.replace("_", " "))
        yield f"{shown:<18}{''.join(f'{column:<30}' for column in columns)}".rstrip()
    if 0 < len(classes := document["classes"]) <= CLASSES_SHOWN:
        names = [name for name in COLUMNS if name in next(iter(classes.values()))]
        yield f"{'class':<18}" + "".join(f"{name.replace('_', ' '):>11}" for name in names)
        for name, of in classes.items():
            yield f"{name:<18}" + "".join(
                f"{'-' if of[key] is None else round(of[key], 4):>11}" for key in names
            )
    yield from document["remarks"]


def _score(document: dict[str, Any], name: str) -> str:
    value, interval = document["metrics"][name], document["intervals"].get(name)
    if value is None:
        return "not defined"
    return f"{value:.4f}" + (
        f"  {interval[0]:.4f} to {interval[1]:.4f}" if interval and None not in interval else ""
    )


if __name__ == "__main__":
    interruptible("omnilead evaluate")
    sys.exit(main())
