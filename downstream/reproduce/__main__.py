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

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from omnilead.data_tools.io.commands import run_as_omnilead
from omnilead.data_tools.io.options import Option
from omnilead.engine.settings.commandline import parse_options, run_on_ranks


def reproduce(
    *,
    table: Annotated[Sequence[Literal[1, 2, 3, 4]], Option("1, 2, 3, 4: one or several", "N")],
    out: Annotated[
        str, Option("folder for runs, scores and tables of one dataset and one scale", "DIR")
    ],
    data: Annotated[
        str, Option("a folder or s3:// address, built with --plan paper", "DATASET")
    ] = "",
    scale: Annotated[str, Option("smoke, small, paper (the default), or a YAML file")] = "paper",
    seeds: Annotated[int, Option("fine-tunings per cell (3)", "K", low=1)] = 3,
    rows: Annotated[
        Sequence[str], Option("only these rows of the tables, such as W2V+CMSC+RLM", "NAME")
    ] = (),
    leads: Annotated[
        Sequence[Literal[12, 6, 3, 2, 1]], Option("only these columns: 12 6 3 2 1", "N")
    ] = (),
    tasks: Annotated[Sequence[Literal["Dx", "Id"]], Option("only this task: Dx or Id", "T")] = (),
    dry_run: Annotated[
        bool, Option("print every job's command and its expected time, and run nothing")
    ] = False,
    collect_only: Annotated[
        bool, Option("make the tables from the scores in DIR, and run nothing")
    ] = False,
    jobs: Annotated[
        int, Option("jobs at a time on this machine, each on one GPU (1)", "N", low=1)
    ] = 1,
    cluster: Annotated[
        str, Option("run jobs on a Dask cluster instead, one per worker thread", "ADDRESS")
    ] = "",
) -> int:
    """Plans the jobs, runs those that are not done yet, and prints the tables. Returns the exit
    code."""
    # These imports wait until here, so that --help does not load PyTorch
    from omnilead.downstream.reproduce import start
    from omnilead.downstream.reproduce.jobs import (
        Job,
        WorkDir,
        open_executor_and_slots,
        run_jobs,
        show_plan,
    )
    from omnilead.downstream.reproduce.paper import ReproductionScale, make_plan, paper_tables
    from omnilead.downstream.reproduce.results import show_tables, write_tables

    chosen = [paper_tables()[number] for number in dict.fromkeys(table)]
    folder = WorkDir(Path(out).absolute())
    if collect_only:
        settings, dataset = start.read_scale_and_data(folder)
    else:
        settings, dataset = ReproductionScale.read(scale), start.read_dataset_info(data)
    plan = make_plan(chosen, settings, dataset, folder, seeds, rows, leads, tasks)
    if dry_run:
        return show_plan(folder, plan.jobs.values(), jobs)

    def update_tables(job: Job) -> None:
        if job.kind == "evaluate":
            write_tables(plan)

    code = 0
    if not collect_only:
        start.begin_folder(plan)
        write_tables(plan)
        if folder.unfinished_jobs(plan.jobs.values()):
            with open_executor_and_slots(jobs, cluster) as (executor, slots):
                code = run_jobs(folder, plan.jobs.values(), executor, slots, update_tables)
    write_tables(plan)
    show_tables(plan)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(reproduce, "reproduce", __doc__, arguments)
    return run_on_ranks("omnilead reproduce", lambda: reproduce(**options), Path(options["out"]))


if __name__ == "__main__":
    run_as_omnilead("reproduce")
