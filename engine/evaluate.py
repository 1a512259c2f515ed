"""How good a model is on the crops that were held out: a table, JSON, a page.

    python -m engine.evaluate --model RUN --data DATASET                        # a fine-tuned model, on its task's test role
    python -m engine.evaluate --model RUN --data DATASET --leads I,II,V2        # a 12-lead model that is shown three
    python -m engine.evaluate --model RUN --data DATASET --json F.json --report F.html

Diagnosis: the CinC 2021 Challenge score, AUROC, AUPRC, accuracy and F measure of halves of 5 s, as in the paper, and of
records.
Identification: is the gallery crop most similar to a probe (cosine) of the same patient? A model that was only pre-trained can
be asked that too. Scores come with 95 % intervals: a bootstrap over patients.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from engine.common import Parser, interruptible

if __name__ == "__main__":
    interruptible("engine.evaluate")

import torch

import engine
from data_tools.dataset import DataError, Dataset
from engine.common import ConfigError, OutputError, writable, write_whole, writing
from engine.evaluation import evaluation_report
from engine.evaluation.metrics import MetricError
from engine.evaluation.predict import Setting, diagnoses, identities, task_of
from engine.evaluation.results import Diagnoses, Identities
from engine.model.position import exact_float32

TASKS, ROLES, DEVICES = ("auto", "diagnosis", "identification"), ("test", "valid"), ("auto", "cpu", "cuda")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        evaluate(args)
    except (MetricError, OutputError) as error:  # what the model gave cannot be scored, or written
        return _say(error, 1)
    except (ConfigError, DataError) as error:
        return _say(error, 2)
    except OSError as error:
        return _say(ConfigError(f"{error.filename or args.data}: {error.strerror or error}"), 2)
    except KeyboardInterrupt as error:
        return _say(error, 130)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m engine.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="RUN", help="a run, or a folder with model.safetensors")
    parser.add_argument("--data", required=True, metavar="DATASET", help="a dataset that data_tools made, s3:// too")
    parser.add_argument("--leads", default="", metavar="N", help="12, 6, 3, 2, 1 or names: the others are zeros (all it knows)")
    parser.add_argument("--task", choices=TASKS, default="auto", help="auto: what the model was fine-tuned for")
    parser.add_argument("--role", choices=ROLES, default="test", help="which of the held-out crops (test)")
    parser.add_argument("--json", type=Path, metavar="F", help="write the numbers")
    parser.add_argument("--report", type=Path, metavar="F.html", help="write a page with curves and tables")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="halves encoded at a time (64)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda if there is one")
    parser.add_argument("--anonymous", action="store_true", help="public s3:// data, without credentials")
    return parser.parse_args(arguments)


def _say(error: BaseException, code: int) -> int:
    print(f"engine.evaluate: {' '.join(str(error).split()) or 'interrupted'}", file=sys.stderr)
    return code


def evaluate(args: argparse.Namespace) -> None:
    if args.batch < 1:
        raise ConfigError(f"--batch {args.batch}: at least 1")
    for flag, place in (("--json", args.json), ("--report", args.report)):
        if place is not None:
            writable(place, flag)
    if args.json and args.report and args.json.resolve() == args.report.resolve():
        raise ConfigError(f"--json {args.json}, --report {args.report}: are one file: name two")
    dataset = Dataset.open(args.data, args.anonymous)
    model = engine.load(args.model).to(_device(args.device))
    task = task_of(model) if args.task == "auto" else args.task
    setting = Setting(args.role, args.leads, args.batch, args.model, quiet=not sys.stderr.isatty())
    told: Diagnoses | Identities
    told = diagnoses(model, dataset, setting) if task == "diagnosis" else identities(model, dataset, setting)
    document = told.document()
    print("\n".join(lines(told, document)))
    if args.json:
        with writing(args.json, "--json"):
            write_whole(args.json, json.dumps(document, indent=1) + "\n")
    if args.report:
        with writing(args.report, "--report"):
            evaluation_report.report(told, args.report)
        print(args.report)


def _device(name: str) -> torch.device:
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError("--device cuda: torch sees no GPU here: use --device cpu")
    exact_float32()
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def lines(told: Diagnoses | Identities, document: dict[str, Any]) -> Iterator[str]:
    """For the screen."""
    yield "{task}, role {role}, leads {leads}: {model} on {dataset}".format(**document)
    if isinstance(told, Diagnoses):
        record = document["record"]
        left, right = f"{document['n']:,} halves of 5 s", f"{record['n']:,} records"
        yield f"{'':<18}{left:<28}{right}"
        for name in document["metrics"]:
            yield f"{name.replace('_', ' '):<18}{_figure(document, name):<28}{_figure(record, name)}".rstrip()
    else:
        yield f"{document['n']:,} probes against {document['gallery']:,} in the gallery"
        for name in document["metrics"]:
            yield f"{name:<18}{_figure(document, name)}".rstrip()
    yield from told.remarks


def _figure(document: dict[str, Any], name: str) -> str:
    value, span = document["metrics"][name], document["intervals"].get(name)
    if value is None:
        return "not defined"
    return f"{value:.4f}" + (f"  {span[0]:.4f} to {span[1]:.4f}" if span and None not in span else "")


if __name__ == "__main__":
    sys.exit(main())
