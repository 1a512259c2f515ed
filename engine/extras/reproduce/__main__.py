"""Reproduce the paper's tables: pre-train, fine-tune and evaluate their models, and print our
scores beside the paper's.

    omnilead reproduce --table 1 --data DATASET --out DIR --dry-run              the commands, and how long they take
    omnilead reproduce --table 1 --data DATASET --out DIR --scale small --jobs 4
    omnilead reproduce --table 1 2 3 4 --data DATASET --out DIR --scale paper --cluster tcp://SCHEDULER:8786
    omnilead reproduce --table 1 --out DIR --collect-only                        the tables, from the scores in DIR

Scales: smoke (minutes: does it work?), small (hours on a small machine), paper (the paper's
configurations), or your own file like configs/reproduce/scales/*.yaml. After a kill or a failure,
run the same command again to continue. DIR/table-N.md, .csv and .json are updated after each score.
Exit 0: all done, or stopped by SIGTERM; 130: by Ctrl-C. Exit 1: jobs failed. Exit 2: a setting or a
file is wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omnilead.engine.extras.reproduce.paper import LEADS, TABLES, TASKS
from omnilead.engine.settings.commandline import command_parser, interruptible, positive


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from omnilead.engine.extras.reproduce.run import run
    from omnilead.engine.inference.commands import exit_code

    return exit_code("omnilead reproduce", lambda: run(options), Path(options.out))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("reproduce", __doc__)
    add = parser.add_argument
    add(
        "--table",
        type=int,
        nargs="+",
        choices=TABLES,
        required=True,
        metavar="N",
        help="1, 2, 3, 4: one or several",
    )
    add(
        "--out",
        required=True,
        metavar="DIR",
        help="folder for runs, scores and tables of one dataset and one scale",
    )
    add("--data", metavar="DATASET", help="a folder or s3:// address, built with --plan paper")
    add("--scale", default="paper", help="smoke, small, paper (the default), or a YAML file")
    add("--seeds", type=positive, default=3, metavar="K", help="fine-tunings per cell (3)")
    add(
        "--rows",
        nargs="+",
        default=(),
        metavar="NAME",
        help="only these rows of the tables, such as W2V+CMSC+RLM",
    )
    add(
        "--leads",
        nargs="+",
        type=int,
        choices=LEADS,
        default=(),
        metavar="N",
        help="only these columns: 12 6 3 2 1",
    )
    add(
        "--tasks",
        nargs="+",
        choices=sorted(TASKS),
        default=(),
        metavar="T",
        help="only this task: Dx or Id",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print every job's command and its expected time, and run nothing",
    )
    add(
        "--collect-only",
        action="store_true",
        help="make the tables from the scores in DIR, and run nothing",
    )
    add(
        "--jobs",
        type=positive,
        default=1,
        metavar="N",
        help="jobs at a time on this machine, each on one GPU (1)",
    )
    add(
        "--cluster",
        metavar="ADDRESS",
        help="run jobs on a Dask cluster instead, one per worker thread",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    interruptible("omnilead reproduce")
    sys.exit(main())
