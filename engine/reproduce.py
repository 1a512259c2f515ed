"""The paper's tables, made again beside its numbers: pre-train, fine-tune, evaluate whatever a table needs, once.

    python -m engine.reproduce --table 1 --data DATASET --out DIR --dry-run              what it would run, and how long
    python -m engine.reproduce --table 1 --data DATASET --out DIR --scale small --jobs 4
    python -m engine.reproduce --table 1 2 3 4 --data DATASET --out DIR --scale paper --hosts hosts.txt
    python -m engine.reproduce --table 1 --data DATASET --out DIR --scale paper --slurm --jobs 64     writes a script for sbatch
    python -m engine.reproduce --table 1 --out DIR --collect-only                        the tables from what is there

Scales: smoke (minutes, synthetic data: does it work?), demo (what `make demo` ends with), small (hours on a small machine),
paper (its configurations), or a file of your own like configs/reproduce/scales/*.yaml. Killed at any moment and run again it
goes on; workers on many hosts share DIR alone. DIR/table-N.md, .csv and .json are remade after each score. Exit 0: all done, or
asked to stop (SIGTERM, Ctrl-C). Exit 1: jobs failed; run again, they are retried. Exit 2: a setting or a file is wrong.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from data_tools.dataset import META, DataError, Dataset
from engine.common import ConfigError, Parser
from engine.reproduction import claims, cost, launch, results
from engine.reproduction.paper import LEADS, TABLES, TASKS, Scale, Table, tables
from engine.reproduction.plan import KINDS, Choice, Data, Job, Plan, make
from engine.reproduction.work import ROOT, Worker, spoken
from engine.reproduction.workdir import Place, begin, known

NEEDED = [("pretrain", ""), *(("dx", role) for role in ("train", "valid", "test"))]
NEEDED += [("id", role) for role in ("train", "valid", "gallery", "probe")]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return run(options)
    except (ConfigError, DataError) as error:
        return say(error, 2)
    except OSError as error:
        return say(f"{error.filename or options.out}: {error.strerror or error}: choose another --out, or make room", 2)
    except KeyboardInterrupt:  # while no worker runs
        return say("stopped: the same command goes on", 0)


def say(error: object, code: int) -> int:
    print(f"engine.reproduce: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m engine.reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--table", type=int, nargs="+", choices=TABLES, required=True, metavar="N", help="1, 2, 3, 4: one or several")
    add("--out", required=True, metavar="DIR", help="runs, scores and tables; of one dataset and one scale")
    add("--data", metavar="DATASET", help="a directory or s3:// address, with roles of the plan `paper`")
    add("--scale", default="paper", help="smoke, demo, small, paper (the default), or a YAML file")
    add("--seeds", type=positive, default=3, metavar="K", help="fine-tunings of each cell (3)")
    add("--rows", nargs="+", default=(), metavar="NAME", help="only these, as the table calls them: W2V+CMSC+RLM")
    add("--leads", nargs="+", type=int, choices=LEADS, default=(), metavar="N", help="only these columns: 12 6 3 2 1")
    add("--tasks", nargs="+", choices=sorted(TASKS), default=(), metavar="T", help="only Dx, only Id")
    add("--dry-run", action="store_true", help="print every job's command and its expected time, and do nothing")
    add("--collect-only", action="store_true", help="make the tables from what is there")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--hosts", metavar="FILE", help="one host a line: a worker on each, by ssh")
    how.add_argument("--slurm", action="store_true", help="write DIR/reproduce.sbatch: an array of --jobs workers")
    how.add_argument("--worker", nargs="?", const="", metavar="STOP", help="be one worker, until the file STOP appears")
    add("--jobs", type=positive, default=1, metavar="N", help="workers on this machine, or in the array (1)")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1")
    return number


def run(options: argparse.Namespace) -> int:
    chosen = [tables()[number] for number in dict.fromkeys(options.table)]
    place = Place(Path(options.out).absolute())
    if place.out.exists() and not place.out.is_dir():
        raise ConfigError(f"--out {options.out}: is a file: name a folder")
    if (place.out / META).exists():
        raise ConfigError(f"--out {options.out}: is a dataset: name another folder")
    scale, data = of_before(place) if options.collect_only else (Scale.read(options.scale), opened(options.data))
    choice = Choice(tuple(options.rows), tuple(options.leads), tuple(options.tasks))
    plan = make(chosen, scale, data, place.out, options.seeds, choice)
    if options.dry_run:
        return show(plan, place)

    def collect(job: Job | None = None) -> None:
        for table in chosen if job is None or job.kind == "evaluate" else ():
            results.write(place, table, plan, scale, data, options.seeds)

    if options.collect_only:
        collect()
        return end(place, plan, chosen, 0)
    begin(place, plan, scale, data)
    if options.worker is not None:
        return work(place, plan, collect, options.worker)
    collect()
    again = [*own(options, chosen, scale, data), "--out", str(place.out)]
    if options.slurm:
        return slurm(place, again, options.jobs, chosen)
    since = claims.now(place.jobs)
    stopped = together(place, plan, options, again)
    collect()
    failed = [job for job in plan.jobs if place.failed_since(job, since) and not place.done(job)]
    return end(place, plan, chosen, 1 if not stopped and left(place, plan) else 0, failed)


def opened(url: str | None) -> Data:
    """The dataset, if its roles are those that both tasks need."""
    if not url:
        raise ConfigError("--data: name the dataset, as python -m data_tools shard ... --out DATASET made it")
    dataset = Dataset.open(url)
    path = url if "://" in url else str(Path(url).absolute())
    data = Data(path, dataset.fingerprint, str(dataset.meta["plan"]), dataset.meta["roles"])
    for group, role in NEEDED:
        if not data.count(group, role):
            name = " ".join(filter(None, (group, role)))
            raise ConfigError(
                f"--data {url}: no crop has the role {name} (it was built with --plan {data.split}): "
                "build it with --plan paper, from the sources of the paper"
            )
    return data


def of_before(place: Place) -> tuple[Scale, Data]:
    """What DIR was begun with."""
    was = known(place, "data")
    if was is None:
        raise ConfigError(f"--out {place.out}: nothing was made here: run it without --collect-only")
    try:
        scale, data = str(was.pop("scale")), Data(**was)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{place.out}/settings/data.json: is not as it was written ({error}): use another --out") from None
    return Scale.read(scale), data


def own(options: argparse.Namespace, chosen: Sequence[Table], scale: Scale, data: Data) -> list[str]:
    """The arguments of a worker."""
    found = ["--table", *(str(table.number) for table in chosen), "--data", data.path, "--scale", scale.name]
    for name in ("rows", "leads", "tasks"):
        values = [str(value) for value in getattr(options, name)]
        found += [f"--{name}", *values] if values else []
    return [*found, "--seeds", str(options.seeds)]


def show(plan: Plan, place: Place) -> int:
    expected = cost.estimate(plan, place, cost.speed(plan, place))
    print(f"cd {shlex.quote(str(ROOT))}")
    for job in plan.jobs:
        state = "done" if place.done(job) else f"about {spoken(expected.seconds[job.name])}"
        print(f"# {job.name}: {state}\npython {shlex.join(job.command)}")
    print(f"# {forecast(plan, expected, 1)}")
    return 0


def forecast(plan: Plan, expected: cost.Estimate, workers: int) -> str:
    each = ", ".join(f"{sum(job.kind == kind for job in plan.jobs)} {kind}" for kind in KINDS)
    text = f"{len(plan.jobs)} jobs ({each}), {len(expected.seconds)} to do: about {spoken(expected.total_s)} of one worker"
    if workers > 1:
        text += f", {spoken(expected.total_s / workers)} of {workers}"
    return f"{text}; {expected.disk / 1e9:.1f} GB"


def work(place: Place, plan: Plan, collect: Callable[[Job | None], None], stop: str) -> int:
    worker = Worker(place, plan, collect, tell, Path(stop) if stop else None)
    worker.work()
    collect(None)
    return 1 if any(place.failed_since(job, worker.since) and not place.done(job) for job in plan.jobs) else 0


def tell(text: str) -> None:
    with suppress(OSError):  # nobody listens any more
        print(text, flush=True)


def together(place: Place, plan: Plan, options: argparse.Namespace, again: Sequence[str]) -> bool:
    """Workers here or on other hosts, until they have ended; whether they were asked to."""
    hosts = launch.read_hosts(Path(options.hosts)) if options.hosts else []
    if not left(place, plan):
        return False
    print(forecast(plan, cost.estimate(plan, place, cost.speed(plan, place)), len(hosts) or options.jobs), flush=True)
    stop = place.jobs / f"stop.{claims.here().replace('/', '.')}.{os.getpid()}"
    started = launch.by_ssh(again, hosts, stop) if hosts else launch.local(again, options.jobs, stop)
    return launch.watch(started, stop, len(plan.jobs), lambda: len(plan.jobs) - len(left(place, plan)))


def left(place: Place, plan: Plan) -> list[Job]:
    return [job for job in plan.jobs if not place.done(job)]


def slurm(place: Place, again: Sequence[str], jobs: int, chosen: Sequence[Table]) -> int:
    path = place.out / "reproduce.sbatch"
    name = "omnilead-table-" + "-".join(str(table.number) for table in chosen)
    path.write_text(launch.slurm_script(again, jobs, place.out, name))
    print(f"sbatch {path}")
    return 0


def end(place: Place, plan: Plan, chosen: Sequence[Table], code: int, failed: Sequence[Job] = ()) -> int:
    for job in failed:
        print(f"engine.reproduce: {job.name} failed: {place.why(job)}", file=sys.stderr)
    paths = [place.out / f"table-{table.number}.md" for table in chosen]
    for path in paths:
        print("\n".join(line for line in path.read_text().splitlines() if line.startswith(("#", "|", "Each cell"))) + "\n")
    files = ", ".join(map(str, paths))
    undone = len(left(place, plan))
    more = "; the same command goes on" if undone else ""
    print(f"{files}: {len(plan.jobs) - undone} of {len(plan.jobs)} jobs done{more}")
    return code


if __name__ == "__main__":
    sys.exit(main())
