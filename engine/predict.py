"""Predictions of a fine-tuned model: class probabilities and decisions, or values in their unit, as parquet or CSV.

    omnilead predict --model TUNED --data DATASET --out F.csv                  one row for each record
    omnilead predict --model TUNED --data FOLDER A.hea B.dcm --out F.parquet   records, known archives, hospital files
    omnilead predict --model TUNED --data A.npy --fs 250 --leads II,V1 --unit uV --out F.csv
    torchrun --nproc-per-node 8 -m engine.predict --model TUNED --data DATASET --out F.parquet    a GPU each; also deepspeed

Columns: source, record, patient, row (of the dataset), start_s, then by the kind of the model's task: AF (probability) and
AF_predicted (true above the threshold that was chosen in validation) for each class; `predicted` (the most probable class) and
the probability of each; age_years (values). A record is the mean over its segments of 5 s. Inputs, and how it goes on after it
was stopped: as `omnilead embed`. Exit code 2: an argument or a file is wrong. Exit code 1: writing failed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from engine.common import ConfigError, Parser, interruptible
from engine.embed import PER, add_inputs, check_inputs, checked_and_run


def main(arguments: Sequence[str] | None = None) -> int:
    return checked_and_run("predict", parse(arguments), check)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="omnilead predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_inputs(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="F", help="F.csv or F.parquet: write the predictions")
    parser.add_argument("--per", choices=PER, default="record", help="one row for each record, each 10 s, each 5 s (record)")
    return parser.parse_args(arguments)


def check(args: argparse.Namespace) -> None:
    if args.out.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--out {args.out}: must end in .csv or .parquet")
    if args.out.suffix == ".csv" and args.out.exists():  # it does not say which job wrote it
        raise ConfigError(f"--out {args.out}: is there already: remove it, or choose another --out")
    check_inputs(args)


if __name__ == "__main__":
    interruptible("omnilead predict")
    sys.exit(main())
