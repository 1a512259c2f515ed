"""Pre-train an ECG encoder: W2V + CMSC + random lead masking (Oh et al., CHIL 2022) and its baselines.

    deepspeed engine/pretrain.py                              quick start: a small model on demo/dataset, two minutes on a CPU
    deepspeed engine/pretrain.py --config configs/pretrain/w2v_cmsc_rlm.yaml --set data.datasets=[DATASET] --set run=RUN
    torchrun --nproc-per-node 8 engine/pretrain.py --config F ...             the same; plain python too, for one process
    deepspeed --hostfile H --no_ssh --node_rank I --master_addr A engine/pretrain.py --config F ...      on each of many nodes
    python engine/pretrain.py --export RUN                    RUN/model from the newest checkpoint
    python engine/pretrain.py --schema                        JSON schema of the settings

RUN/ holds config.yaml, run.json, metrics.jsonl, validation.jsonl, tensorboard/, checkpoints/, in the end model/, report.html.
Started again with the same RUN it goes on where the last checkpoint stands, bit for bit with as many ranks; with another number
of ranks the same batches follow, and losses are equal to rounding. Other data, other settings: refused, naming what differs.
SIGTERM writes a checkpoint at the next step and ends with 0. Exit 2: a setting or a file is wrong. Exit 1: the run failed.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import errno
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from data_tools.dataset import Dataset, DatasetError
from engine.config import QUICKSTART, Config, build, check, deepspeed_json, load, schema, zero_stage
from engine.model.pretrainer import Pretrainer
from engine.pipelines.dali import DaliError
from engine.pipelines.leads import ConfigError
from engine.pipelines.loader import Loader, LoaderError
from engine.pipelines.order import OrderError
from engine.pipelines.resident import ResidentError
from engine.scoring.report import write_report
from engine.training import checkpoint, distributed, export
from engine.training.checkpoint import CheckpointError, WriteError
from engine.training.distributed import Ranks
from engine.training.loop import Loop, Progress, TrainError, facts
from engine.training.optimizer import GuardedAdamW
from engine.training.tracking import Tracker

# What may change between two starts of one run; train.steps and train.epochs too, if the learning rate does not hang on them.
FREE = {"run", "data.datasets", "data.anonymous"} | {
    f"{section}.{name}"
    for section, names in (
        ("pipeline", ("source", "check", "on_corrupt", "threads", "read_ahead", "cache_dir", "cache_bytes")),
        ("train", ("log_every", "validate_every", "valid_batches", "probe_patients", "save_every_steps", "save_every_minutes")),
        ("train", ("keep", "peak_tflops", "timeout_s", "max_nonfinite", "deepspeed", "compile", "micro_batch", "zero_stage")),
    )
    for name in names
}
NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
MAKE_DEMO = (
    "python -m data_tools synth demo/archive --patients 100 && python -m data_tools shard demo/archive --out demo/dataset"
)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        if args.schema:
            print(schema())
            return 0
        return export_run(Path(args.export)) if args.export else train(load(args.config or QUICKSTART, args.set))
    except (ConfigError, LoaderError, OrderError, DatasetError, CheckpointError, DaliError, ResidentError) as error:
        return say(error, 2)
    except (TrainError, WriteError) as error:
        return say(error, 1)
    except OSError as error:  # a bad place to write to; later, a disk that is full
        hint = "choose another with --set run=RUN" if error.errno in NO_PLACE else "the last checkpoint is good"
        return say(OSError(f"{error.filename or 'RUN'}: {error.strerror}: {hint}"), 2 if error.errno in NO_PLACE else 1)
    except RuntimeError as error:
        if not distributed.lost_a_rank(error):
            raise
        return say(TrainError(f"another rank died or hung ({str(error).splitlines()[0][:150]}): start again, it goes on"), 1)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="engine/pretrain.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="F", help="YAML; without it the quick start")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="one setting; may be given many times")
    parser.add_argument("--export", metavar="RUN", help="write RUN/model and end")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of the settings and end")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it; LOCAL_RANK counts
    return parser.parse_args(arguments)


def say(error: Exception, code: int) -> int:
    """One line; of an error that all ranks have, one."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or code == 1:
        print(f"engine/pretrain.py: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code


def train(config: Config) -> int:
    check(config, distributed.environment()[1])
    datasets = open_datasets(config)
    run = Path(config.run)
    run.mkdir(parents=True, exist_ok=True)

    ranks = distributed.start(config.train.timeout_s)
    try:
        found, saved = resume_from(config, run, ranks, datasets)
        loader_state = checkpoint.read_loader_state(found, ranks, saved["world"]) if found and saved else None
        loader = make_loader(config, datasets, ranks, loader_state)
        total = config.train.steps or math.ceil((config.train.epochs or 0) * loader.steps_per_epoch)

        universal = bool(found and saved and checkpoint.recut(found, saved, ranks))
        engine, adam = make_engine(config, ranks, universal)
        progress = Progress()
        if found and saved:
            checkpoint.load(engine, found, universal)
            progress = Progress(**{name: saved[name] for name in vars(progress)})

        told = facts(config, datasets, ranks)
        tracker = Tracker(run, config, told | {"steps": total}, progress.step, total) if ranks.first else None
        if tracker:
            tracker.note(heading(config, loader, ranks, progress, engine))
        loop = Loop(config, run, ranks, engine, adam, loader, datasets, progress, total, tracker)
        try:
            done = loop.train()
        finally:
            loader.close()
            if tracker:
                tracker.close()
        if ranks.first:
            finish(config, run, done)
    except BaseException:
        distributed.abandon()
        raise
    distributed.close()
    return 0


def open_datasets(config: Config) -> list[Dataset]:
    for url in config.data.datasets:
        if url == "demo/dataset" and not Path(url).exists():
            raise ConfigError(f"there is no demo/dataset: make it with `{MAKE_DEMO}`, or --set data.datasets=[DATASET]")
    datasets = [Dataset.open(url, config.data.anonymous) for url in config.data.datasets]
    specs = {dataset.meta["preprocessing_sha256"]: dataset.root.url for dataset in datasets}
    if len(specs) > 1:
        raise ConfigError(
            f"data.datasets: {' and '.join(specs.values())} were preprocessed in different ways: build them alike"
        )
    return datasets


def resume_from(
    config: Config, run: Path, ranks: Ranks, datasets: Sequence[Dataset]
) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint to go on from, the same on all ranks, if this is a run that has begun."""
    answer: list[Any] = [None]
    if ranks.first:
        try:
            answer[0] = checkpoint.newest(run, lambda text: print(f"warning: {text}", file=sys.stderr))
        except CheckpointError as error:
            answer[0] = error
    if ranks.world > 1:
        dist.broadcast_object_list(answer, src=0, group=ranks.control)
    if isinstance(answer[0], Exception):
        raise answer[0]
    if answer[0] is None:
        return None, None
    saved = checkpoint.read_state(answer[0])
    now = facts(config, datasets, ranks)
    spec, data = "preprocessing_sha256", "datasets"
    if saved[spec] != now[spec]:
        was, is_ = saved[spec][:12], now[spec][:12]
        raise ConfigError(f"{run}: its data had another preprocessing: sha256 was {was}... and is {is_}...: use run=NEW")
    if saved[data] != now[data]:
        was, is_ = (", ".join(name[:12] for name in facts_[data]) for facts_ in (saved, now))
        raise ConfigError(f"{run}: was trained on other data: data.datasets had fingerprints {was} and has {is_}: use run=NEW")
    if saved["zero_stage"] != now["zero_stage"]:
        raise ConfigError(
            f"{run}: train.zero_stage was {saved['zero_stage']} and is {now['zero_stage']}: set it back, or run=NEW"
        )
    changed = differences(saved["config"], now["config"], free(config))
    if changed:
        raise ConfigError(f"{run}: was begun with other settings: {'; '.join(changed)}: set them back, or use run=NEW")
    return answer[0], saved


def free(config: Config) -> set[str]:
    return FREE | ({"train.steps", "train.epochs"} if config.train.schedule == "fixed" else set())


def differences(before: dict[str, Any], now: dict[str, Any], allowed: set[str], prefix: str = "") -> list[str]:
    found = []
    for name in sorted(before.keys() | now.keys()):
        key, was, is_ = f"{prefix}{name}", before.get(name), now.get(name)
        if isinstance(was, dict) and isinstance(is_, dict):
            found += differences(was, is_, allowed, f"{key}.")
        elif was != is_ and key not in allowed:
            found.append(f"{key} was {was} and is {is_}")
    return found


def make_loader(config: Config, datasets: Sequence[Dataset], ranks: Ranks, state: dict[str, Any] | None) -> Loader:
    roles = {name: value for name, value in config.data.train if value is not None}
    return Loader(config.loader, datasets, ranks.device, ranks.rank, ranks.world, state, **roles, halves=2)


def make_engine(config: Config, ranks: Ranks, universal: bool) -> tuple[Any, GuardedAdamW]:
    deepspeed = distributed.quiet_deepspeed()
    t = config.train
    model = Pretrainer(config.model, config.objective, generator=torch.Generator().manual_seed(t.seed)).to(ranks.device)
    options = {"lr": t.lr, "betas": t.betas, "eps": t.eps, "weight_decay": t.weight_decay}
    adam = GuardedAdamW(model.parameters(), t.clip_norm, partitioned=zero_stage(config) > 0, **options)
    settings = deepspeed_json(config, ranks.world, universal)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings)
    if t.compile if t.compile is not None else ranks.device.type == "cuda":
        for layer in model.encoder.layers:  # alike, so compiled once; they are nine tenths of the work
            layer.compile()
    return engine, adam


def heading(config: Config, loader: Loader, ranks: Ranks, progress: Progress, engine: Any) -> str:
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    begun = f"goes on after step {progress.step}" if progress.step else "begins"
    epoch = f"{loader.steps_per_epoch} steps of {config.train.batch_crops} crops to an epoch"
    return (
        f"{config.run} {begun}: {parameters:,} parameters, {epoch}, "
        f"{ranks.world} x {ranks.device.type}, {config.train.precision}, ZeRO {zero_stage(config)}, loader {loader.backend}"
    )


def finish(config: Config, run: Path, done: bool) -> None:
    path = checkpoint.newest(run)
    assert path is not None
    if not done:
        print(f"stopped after step {checkpoint.step_of(path)}; the same command goes on", flush=True)
        return
    print(f"done: {export.export(run, path, config)}, {write_report(run)}", flush=True)


def export_run(run: Path) -> int:
    path = checkpoint.newest(run)
    if path is None:
        raise CheckpointError(f"{run}: has no checkpoint: train first")
    print(export.export(run, path, build(checkpoint.read_state(path)["config"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
