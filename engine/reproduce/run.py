"""Reproduces tables: plans the jobs, estimates how long they take, runs the missing ones, writes the
tables. See engine/reproduce/__main__.py.

    run(parse(["--table", "1", "--data", "DATASET", "--out", "DIR"]))      # -> exit code

A job's work is crops x FLOPs per crop; at first its time is expected from the speed of a training
step. Once jobs of a kind are done, the others of that kind are expected to run at their rate.
"""

import argparse
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from omnilead.data_tools.cli import echo, say, tell
from omnilead.data_tools.cluster import connected
from omnilead.data_tools.dataset import META, Dataset
from omnilead.engine.common import ConfigError
from omnilead.engine.config import Config
from omnilead.engine.data.augmenter import HALF
from omnilead.engine.model.config import flops_per_crop
from omnilead.engine.model.draws import row_keys
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.reproduce.jobs import WorkDir, duration, on_this_machine, read_json, run_jobs
from omnilead.engine.reproduce.paper import ReproductionScale, Table, tables
from omnilead.engine.reproduce.plan import PROGRAMS, DatasetInfo, Job, JobPlan, make_plan
from omnilead.engine.reproduce.results import write_table

STARTUP_S = 10.0  # start-up of a process: imports, the dataset, the first step
MEASURE_S = 3.0
NEEDED_ROLES = ["pretrain", "dx train", "dx valid", "dx test"]
NEEDED_ROLES += ["id train", "id valid", "id gallery", "id probe"]


def run(options: argparse.Namespace) -> int:
    chosen = [tables()[number] for number in dict.fromkeys(options.table)]
    folder = WorkDir(Path(options.out).absolute())
    if folder.path.is_file() or (folder.path / META).exists():
        raise ConfigError(f"--out {options.out}: is a file or a dataset: name another folder")
    if options.collect_only:
        scale, data = _started_with(folder)
    else:
        scale, data = ReproductionScale.read(options.scale), _open(options.data)
    plan = make_plan(
        chosen, scale, data, folder.path, options.seeds, options.rows, options.leads, options.tasks
    )
    if options.dry_run:
        return _show(plan, folder)

    def collect(job: Job | None = None) -> None:
        for table in chosen if job is None or job.kind == "evaluate" else ():
            write_table(folder, table, plan, options.seeds)

    failed, missing, interrupted = dict[str, str](), [], False
    if not options.collect_only:
        folder.start(plan)
        collect()
        missing = folder.missing(plan.ordered)
    if missing:
        with _executor(options) as (executor, slots):
            speed = executor.submit(flops_per_s, next(iter(plan.models.values()))).result()
            say(_forecast(plan, expected_seconds(plan, folder, speed), slots()))
            failed, interrupted = run_jobs(plan.ordered, folder, executor, slots, collect)
    collect()
    _end(folder, plan, chosen, failed)
    return 130 if interrupted else 1 if failed else 0


@contextmanager
def _executor(options: argparse.Namespace) -> Iterator[tuple[Executor, Callable[[], int]]]:
    """The executor of the jobs, and a function that returns how many it runs at a time."""
    if options.cluster:
        with connected(options.cluster) as client:
            yield client.get_executor(pure=False), lambda: sum(client.nthreads().values())
    else:
        with on_this_machine(options.jobs) as executor:
            yield executor, lambda: options.jobs


def _open(url: str | None) -> DatasetInfo:
    if not url:
        raise ConfigError(
            "--data is missing: name a dataset made by omnilead shard SRC --out DATASET"
        )
    dataset = Dataset.open(url)
    path = url if "://" in url else str(Path(url).absolute())
    data = DatasetInfo(path, dataset.fingerprint, str(dataset.meta["plan"]), dataset.meta["roles"])
    for role in NEEDED_ROLES:
        if not data.count(*role.split()):
            built = (
                f"it was built with --plan {data.split}: use --plan paper and the paper's sources"
            )
            raise ConfigError(f"--data {url}: no crop has the role {role}: {built}")
    return data


def _started_with(folder: WorkDir) -> tuple[ReproductionScale, DatasetInfo]:
    path = folder.path / "settings" / "data.json"
    settings = read_json(path)
    try:
        return ReproductionScale.read(str(settings.pop("scale"))), DatasetInfo(**settings)
    except (KeyError, TypeError):
        raise ConfigError(
            f"{path}: missing or damaged: run without --collect-only first, or use another --out"
        ) from None


def _show(plan: JobPlan, folder: WorkDir) -> int:
    expected = expected_seconds(plan, folder, flops_per_s(next(iter(plan.models.values()))))
    for job in plan.ordered:
        state = f"about {duration(expected[job.name])}" if job.name in expected else "done"
        echo(
            f"# {job.name}: {state}\nomnilead {job.kind} "
            f"{shlex.join(job.command[len(PROGRAMS[job.kind]) :])}"
        )
    echo(f"# {_forecast(plan, expected, 1)}")
    return 0


def _forecast(plan: JobPlan, expected: dict[str, float], workers: int) -> str:
    each = ", ".join(f"{sum(job.kind == kind for job in plan.ordered)} {kind}" for kind in PROGRAMS)
    total = sum(expected.values())
    many = f" on one worker, {duration(total / workers)} on {workers}" if workers > 1 else ""
    disk = sum(plan.jobs[name].disk for name in expected) / 1e9
    return (
        f"{len(plan.jobs)} jobs ({each}), {len(expected)} to run: about {duration(total)}{many}; "
        f"{disk:.1f} GB of results"
    )


def _end(folder: WorkDir, plan: JobPlan, chosen: Sequence[Table], failed: dict[str, str]) -> None:
    for name, why in failed.items():
        tell(f"omnilead reproduce: {name} failed: {why}")
    paths = [folder.path / f"table-{table.number}.md" for table in chosen]
    for path in paths:
        echo(
            "\n".join(
                line
                for line in path.read_text().splitlines()
                if line.startswith(("#", "|", "Each cell"))
            )
            + "\n"
        )
    done = len(plan.jobs) - len(folder.missing(plan.ordered))
    again = "" if done == len(plan.jobs) else "; run the same command again to continue"
    echo(f"{', '.join(map(str, paths))}: {done} of {len(plan.jobs)} jobs done{again}")


def expected_seconds(plan: JobPlan, folder: WorkDir, flops_per_s: float) -> dict[str, float]:
    work = dict.fromkeys(PROGRAMS, 0.0)  # of the finished jobs of a kind
    seconds = dict.fromkeys(PROGRAMS, 0.0)  # start-up included
    for job in plan.ordered:
        if folder.done(job) and (took := folder.seconds(job)):
            work[job.kind] += job.work
            seconds[job.kind] += took
    expected = {}
    for job in folder.missing(plan.ordered):
        expected[job.name] = STARTUP_S + job.work / flops_per_s
        if work[job.kind]:
            expected[job.name] = job.work * seconds[job.kind] / work[job.kind]
    return expected


def flops_per_s(config: Config) -> float:
    """FLOP/s of forward, backward and Adam on one device of this machine."""
    try:
        return _measure(config)
    except RuntimeError as error:  # for example, the GPU's memory is in use
        raise ConfigError(
            f"measuring the speed of a training step failed: {str(error).splitlines()[0]}"
        ) from None
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _measure(config: Config) -> float:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    model = Pretrainer(config.model, config.objective).to(device, dtype).train()
    adam = torch.optim.AdamW(model.parameters(), 1e-9)
    crops = min(config.train.batch_crops, 8 if device.type == "cpu" else 64)
    x_BSLT = torch.randn(crops, 2, config.model.leads, HALF, device=device, dtype=dtype)
    keys_BS = torch.from_numpy(row_keys(0, 0, np.arange(crops))).to(device)
    ids_B, tau = torch.arange(crops, device=device), torch.tensor(1.0, device=device)

    def step() -> None:
        model(x_BSLT, keys_BS, tau, ids_B)["loss"].backward()
        adam.step()
        adam.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    step()
    started, steps = time.perf_counter(), 0
    while steps < 2 or (time.perf_counter() - started < MEASURE_S and steps < 50):
        step()
        steps += 1
    per_crop = flops_per_crop(config.model, local=config.objective.local > 0)
    return steps * crops * per_crop / (time.perf_counter() - started)
