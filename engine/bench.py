"""Compare models on frozen embeddings: linear probes over shares of the labels, leads and noise,
and identification.

    omnilead bench --models A=RUN B=hf://org/name --data DATASET --tasks sex identification --leads 12 1 --out OUT
    omnilead bench --models RUN --data DATASET --labels LABELS --tasks ptbxl-rhythm --share 0.01 0.1 1 --out OUT
    omnilead bench --models RUN --data A --test-data B --tasks rhythm.csv --noise 0 1 --out OUT      trained on A, tested on B
    omnilead bench --models small --data DATASET --tasks my.csv --reader boosted --head MODEL --out OUT    for omnilead predict

Baselines are included: five draws of random weights of each architecture, and methods without
pre-training: the mean beat, measurements of the signal, gradient boosting on both (extra `bench`),
and MiniRocket. NAME=RUN,RUN,... averages the scores of runs with different seeds. OUT holds
bench.md, bench.csv, bench.json and bench.png; OUT/parts caches the embeddings. Run again after an
interruption or with more tasks, the command computes only what is missing. Without a terminal, a
line on stderr says when a model is done. How to compare fairly: docs/comparing.md. Exit code 2: an
argument or a file is wrong.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnilead.data_tools.io.terminal import show
from omnilead.engine.embed import READOUT, add_machine
from omnilead.engine.settings.commandline import (
    RUN_CODE,
    command_parser,
    interruptible,
    one_blas_thread,
)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    one_blas_thread()
    from omnilead.engine.inference import commands

    return commands.exit_code("omnilead bench", lambda: run(args), args.out)


def run(args: argparse.Namespace) -> int:
    bench(**vars(args))
    text = (args.out / "bench.md").read_text()
    text += f"\n{args.out}: bench.md, bench.csv, bench.json, bench.png\n"
    if args.head:
        text += f"{args.head}: the model with its probe as a head\n"
    return show(text)


def bench(
    models: Sequence[str],
    *,
    data: str,
    tasks: Sequence[str],
    out: str | os.PathLike[str],
    **options: Any,
) -> dict[str, Any]:
    """Compares models on frozen embeddings, as `omnilead bench`: returns what OUT/bench.json holds.

    `options` are those of the command. Errors have one-line messages."""
    from omnilead.engine.evaluation import bench as comparison
    from omnilead.engine.extras.reports.bench_report import write

    place = Path(out)
    document = comparison.bench(models, data, place, tasks, **options)
    write(document, place)
    return document


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("bench", __doc__)
    add = parser.add_argument
    add(
        "--models",
        required=True,
        nargs="+",
        metavar="[NAME=]RUN[,RUN]",
        help="RUN, small, s3://... or hf://org/name; the first is the reference",
    )
    add("--code", **RUN_CODE)
    add(
        "--data",
        required=True,
        metavar="DATASET",
        help="probes are fitted on train and valid, scored on test",
    )
    add(
        "--test-data",
        default="",
        metavar="DATASET",
        help="score on the test split of this dataset instead",
    )
    add(
        "--tasks",
        required=True,
        nargs="+",
        metavar="TASK",
        help="shipped tasks such as age, label tables, identification",
    )
    add(
        "--labels",
        default="",
        metavar="DIR",
        help="folder of label tables, as `omnilead labels` writes them, or one table",
    )
    add("--test-labels", default="", metavar="DIR", help="the same for --test-data")
    add(
        "--leads",
        nargs="+",
        default=["12"],
        metavar="L",
        help='12, 6, 3, 2, 1 or names such as "I,II,V2"; other leads are set to zero (12)',
    )
    add(
        "--fit-leads",
        default="",
        metavar="L",
        help="leads that probes are fitted on (those of --leads)",
    )
    add(
        "--share",
        nargs="+",
        type=float,
        default=[1.0],
        metavar="S",
        help="share of the patients of train and valid to fit on (1)",
    )
    add(
        "--noise",
        nargs="+",
        type=float,
        default=[0.0],
        metavar="N",
        help="noise added to test ECGs; 1: the paper's amplitude (0)",
    )
    add("--readout", **READOUT)
    add(
        "--out",
        type=Path,
        required=True,
        metavar="OUT",
        help="folder for the results and the embeddings",
    )
    add(
        "--reader",
        choices=["linear", "boosted"],
        default="linear",
        help="what is fitted on embeddings: a linear probe or gradient boosting (linear)",
    )
    add("--head", default="", metavar="MODEL", help="write the model with its probe as a head")
    add("--seed", type=int, default=0, help="seed of the random weights (0)")
    add_machine(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    interruptible("omnilead bench")
    sys.exit(main())
