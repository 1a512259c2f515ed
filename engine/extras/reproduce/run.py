"""Reproduces tables: plans the jobs, runs the missing ones, writes the tables. See
engine/extras/reproduce/__main__.py.

    run(parse(["--table", "1", "--data", "DATASET", "--out", "DIR"]))      # -> exit code

At first the time of a job is expected from its crops and the speed of a training step. Once jobs of
a kind are done, the others of that kind are expected to run at their rate.
"""

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError

from omnilead.data_tools.dataset import META, Dataset, RoleFacts
from omnilead.data_tools.io.storage import write_whole
from omnilead.data_tools.io.terminal import echo

from ...data.augmenter import HALF
from ...model.draws import row_keys
from ...model.pretrainer import Pretrainer
from ...settings.errors import ConfigError
from ...training.config import Config
from .jobs import Job, WorkDir, read_json, run_jobs, show_plan, workers, write_json
from .paper import ReproductionScale, tables
from .plan import DatasetInfo, JobPlan, make_plan
from .results import write_table

STARTED_WITH = "settings/data.json"
DX = "add records of CPSC 2018 or Georgia, or name other sources with shard --dx-sources"
PAIRS = "add PTB-XL, whose patients have several sessions, or name other sources with shard --id-sources"
MORE = "add more records"
NEEDED_ROLES = {  # and what to do if --plan paper gave them to no crop
    "pretrain": MORE,
    "dx train": DX,
    "dx valid": DX,
    "dx test": DX,
    "id train": MORE,
    "id valid": MORE,
    "id gallery": PAIRS,
    "id probe": PAIRS,
}


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
        return show_plan(folder, plan.timed(seconds_per_crop(plan.config)), options.jobs)

    def collect(job: Job | None = None) -> None:
        if job is None or job.kind == "evaluate":
            for table in chosen:
                write_table(folder, table, plan, options.seeds)

    code = 0
    if not options.collect_only:
        _start(folder, plan)
        collect()
        if folder.missing(plan.jobs.values()):
            with workers(options.jobs, options.cluster) as (executor, slots):
                pace = executor.submit(seconds_per_crop, plan.config).result()
                code = run_jobs(folder, plan.timed(pace), executor, slots, collect)
    collect()
    _show_tables(folder, plan, [folder.path / f"table-{table.number}.md" for table in chosen])
    return code


def _show_tables(folder: WorkDir, plan: JobPlan, paths: list[Path]) -> None:
    for path in paths:
        lines = path.read_text().splitlines()
        shown = [line for line in lines if line.startswith(("#", "|", "Each cell"))]
        echo("\n".join(shown) + "\n")
    left, total = len(folder.missing(plan.jobs.values())), len(plan.jobs)
    text = f"{', '.join(map(str, paths))}: {total - left} of {total} jobs done"
    if left:
        text += "; run the same command again to continue"
    echo(text)


def _open(url: str | None) -> DatasetInfo:
    if not url:
        raise ConfigError(
            "--data is missing: name a dataset made by omnilead shard SRC --out DATASET"
        )
    dataset = Dataset.open(url)
    path = url if "://" in url else str(Path(url).absolute())
    data = DatasetInfo(path, dataset.fingerprint, str(dataset.meta["plan"]), dataset.meta["roles"])
    for role, mend in NEEDED_ROLES.items():
        if data.count(*role.split()):
            continue
        if data.split != "paper":
            mend = f"it was built with --plan {data.split}: use --plan paper"
        raise ConfigError(f"--data {url}: no crop has the role {role}: {mend}")
    return data


def _start(folder: WorkDir, plan: JobPlan) -> None:
    """Creates the folder, or refuses one that was started with other data or another scale."""
    path, scale = folder.path / STARTED_WITH, plan.scale
    before = read_json(path)
    now = {"scale": scale.name, "settings": scale.settings, **asdict(plan.data)}
    for key in before.keys() - {"path"}:
        if before[key] != now.get(key):
            raise ConfigError(
                f"--out {folder.path}: was started with other data or settings ({key} was "
                f"{str(before[key])[:40]} and is {str(now.get(key))[:40]}): use another --out"
            )
    folder.start(plan.timed(), {plan.data.path: plan.data.fingerprint})
    for name in ("settings", "starts"):
        (folder.path / name).mkdir(exist_ok=True)
    write_json(path, now)
    for start, tree in plan.starts.items():
        write_whole(folder.path / start, yaml.safe_dump(tree, sort_keys=False))


def _started_with(folder: WorkDir) -> tuple[ReproductionScale, DatasetInfo]:
    path = folder.path / STARTED_WITH
    tree = read_json(path)
    tree.pop("settings", None)  # read again from the scale's file
    try:
        scale, data = str(tree.pop("scale")), DatasetInfo(**tree)
        RoleFacts.model_validate(data.roles)
        return ReproductionScale.read(scale), data
    except (KeyError, TypeError, ValidationError):
        raise ConfigError(
            f"{path}: missing or damaged: run without --collect-only first, or use another --out"
        ) from None


def seconds_per_crop(config: Config) -> float:
    """Forward and backward, on one device of this machine."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    model = Pretrainer(config.model, config.objective).to(device, dtype)
    crops = min(config.train.batch_crops, 64 if on_gpu else 8)
    x_BSLT = torch.randn(crops, 2, config.model.leads, HALF, device=device, dtype=dtype)
    keys_BS = torch.from_numpy(row_keys(0, 0, np.arange(crops))).to(device)
    ids_B, tau = torch.arange(crops, device=device), torch.tensor(1.0, device=device)
    fastest = np.inf
    for _ in range(4):  # the first one warms up
        started = time.perf_counter()
        model(x_BSLT, keys_BS, tau, ids_B)["loss"].backward()
        if on_gpu:
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest / crops
