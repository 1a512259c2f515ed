"""The course of a run, whatever it trains: settings -> begin or go on -> loop -> model/ and report; or one line: why not.

    door = Door("engine/pretrain.py", __doc__, Config, Pretraining, QUICKSTART)
    sys.exit(door.main())

A run's directory that holds a checkpoint is gone on from, if its data and settings are those of now; what may differ is FREE.
"""

import argparse
import errno
import gc
import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data_tools.cli import is_memory, say, show
from data_tools.dataset import META, DataError, Dataset
from engine.common import ConfigError, Parser
from engine.config import Settings, build, check, deepspeed_json, load, micro_batch, schema, zero_stage
from engine.data.dali import DaliError
from engine.data.loader import Loader
from engine.data.order import OrderError
from engine.data.resident import ResidentError
from engine.data.state import LoaderError
from engine.evaluation.run_report import write_report
from engine.training import checkpoint, distributed, export, loggers
from engine.training.checkpoint import CheckpointError, WriteError
from engine.training.distributed import Ranks
from engine.training.loop import Loop, Progress, TrainError, facts
from engine.training.optimizer import GuardedAdamW
from engine.training.task import Task
from engine.training.throughput import COMPILED, compile_model
from engine.training.tracking import Tracker

# What may change between two starts of one run; train.steps and train.epochs too, if the learning rate does not hang on them.
FREE = {"run", "data.datasets", "data.anonymous"} | {
    f"{section}.{name}"
    for section, names in (
        ("pipeline", ("source", "check", "on_corrupt", "threads", "read_ahead", "cache_dir", "cache_bytes")),
        ("train", ("log_every", "validate_every", "valid_batches", "probe_patients", "save_every_steps", "save_every_minutes")),
        ("train", ("keep", "peak_tflops", "timeout_s", "max_nonfinite", "deepspeed", "compile", "micro_batch", "zero_stage")),
        ("train", ("track", "deterministic")),
    )
    for name in names
}
LESS = "lower train.micro_batch (an eighth is a start) or pipeline.read_ahead, avoid pipeline.backend=resident, or free memory"
NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
MAKE_DEMO = (
    "python -m data_tools synth demo/archive --patients 100 && python -m data_tools shard demo/archive --out demo/dataset"
)


@dataclass(frozen=True)
class Door:
    """A program that trains something: its name, its help, its settings, its task."""

    name: str
    about: str
    kind: type[Settings]
    task: type[Task]
    default: Path | None = None  # settings if none are given

    def main(self, arguments: Sequence[str] | None = None) -> int:
        args = self.parse(arguments)
        try:
            if args.schema:
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
                return show(schema(self.kind) + "\n")
            if args.export:
                return export_run(Path(args.export), self)
            config = args.config or self.default
            if config is None:
                raise ConfigError(
                    "--config is missing: give one of configs/, for example --config configs/finetune/diagnosis.yaml"
                )
            return train(load(config, args.set, self.kind), self)
        except (ConfigError, LoaderError, OrderError, DataError, CheckpointError, DaliError, ResidentError) as error:
            return self.say(error, 2)
        except (TrainError, WriteError) as error:
            return self.say(error, 1)
        except KeyboardInterrupt:
            return self.say(TrainError("stopped outside of training: the same command goes on"), 1)
        except Exception as error:
            return self.failed(error)

    def failed(self, error: Exception) -> int:
        """What libraries and the system say, in one line; the rest is a bug and its traceback wanted."""
        if is_memory(error):
            said = " ".join(str(error).split())[:120] or type(error).__name__
            return self.say(TrainError(f"out of memory: {LESS} ({said})"), 1)
        if isinstance(error, UnicodeEncodeError):  # torch takes no such path
            return self.say(ConfigError(f"{error.object[:200]!r}: a name that is not UTF-8: choose another"), 2)
        if isinstance(error, OSError):  # a bad place to write to; later, a disk that is full
            hint = "choose another with --set run=RUN" if error.errno in NO_PLACE else "the last checkpoint is good"
            code = 2 if error.errno in NO_PLACE else 1
            return self.say(OSError(f"{error.filename or 'RUN'}: {error.strerror}: {hint}"), code)
        if isinstance(error, RuntimeError) and distributed.lost_a_rank(error):
            said = str(error).splitlines()[0][:150]
            return self.say(TrainError(f"another rank died or hung ({said}): start again, it goes on"), 1)
        raise error

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = Parser(prog=self.name, description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--config", metavar="F", help="YAML" + ("; without it the quick start" if self.default else ""))
        parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="one setting; may be given many times")
        parser.add_argument("--export", metavar="RUN", help="write RUN/model and end")
        parser.add_argument("--schema", action="store_true", help="print the JSON schema of the settings and end")
        parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it; LOCAL_RANK counts
        return parser.parse_args(arguments)

    def say(self, error: Exception, code: int) -> int:
        """One line; of an error that all ranks have, one."""
        if os.environ.get("RANK", "0") == "0" or code == 1:
            with suppress(OSError):
                print(f"{self.name}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return code


def train(config: Settings, door: Door) -> int:
    check(config, distributed.environment()[1])
    loggers.check(config)
    datasets = open_datasets(config)
    run = Path(config.run)
    if (run / META).exists():
        raise ConfigError(f"{config.run}: is a dataset: choose another with --set run=RUN")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{config.run}: {error.strerror}: choose another with --set run=RUN") from None

    ranks = distributed.start(config.train.timeout_s, config.train.deterministic)
    try:
        with checkpoint.claimed(run, ranks):
            go(config, door, datasets, run, ranks)
    except BaseException:
        distributed.abandon()
        raise
    distributed.close()
    return 0


def go(config: Settings, door: Door, datasets: Sequence[Dataset], run: Path, ranks: Ranks) -> None:
    """Begin, or go on."""
    task = door.task(config, datasets, ranks)
    found, saved = resume_from(config, run, ranks, datasets, task)
    loader_state = checkpoint.read_loader_state(found, ranks, saved["world"]) if found and saved else None
    loader = make_loader(config, datasets, ranks, task, loader_state)
    total = config.train.steps or math.ceil((config.train.epochs or 0) * loader.steps_per_epoch)

    if saved and loader.step != saved["step"]:
        raise CheckpointError(
            f"{found}: state.json is of step {saved['step']}, its loader's state of step {loader.step}: {checkpoint.RESTORE}"
        )
    if saved and saved["step"] > total:
        raise ConfigError(f"{run}: has done {saved['step']} steps, of {total}: give it more, or use run=NEW")
    universal = bool(found and saved and checkpoint.recut(found, saved, ranks))
    engine, adam = make_engine(config, ranks, task, universal)
    progress = Progress()
    if found and saved:
        checkpoint.load(engine, found, universal)
        progress = Progress(**{name: saved[name] for name in vars(progress)})

    told = facts(config, datasets, ranks) | task.facts() | {"steps": total, "best": task.best[0]} | task.explained()
    tracker = Tracker(run, config, task.keys, told, progress.step, total) if ranks.first else None
    if tracker:
        for line in (heading(config, loader, ranks, progress, engine), *task.remarks):
            tracker.note(line)
    loop = Loop(task, config, run, ranks, engine, adam, loader, datasets, progress, total, tracker)
    gc.collect()
    gc.freeze()  # or a collection would go through all that has been imported, in the middle of a step
    try:
        done = loop.train()
    finally:
        gc.unfreeze()
        loader.close()
        if tracker:
            tracker.close()
        engine.destroy()
    if ranks.first:
        finish(config, run, task, done)


def open_datasets(config: Settings) -> list[Dataset]:
    for url in config.data.datasets:
        if url == "demo/dataset" and not Path(url).exists():
            raise ConfigError(f"there is no demo/dataset: make it with `{MAKE_DEMO}`, or --set data.datasets=[DATASET]")
    datasets = [Dataset.open(url, config.data.anonymous) for url in config.data.datasets]
    for number, dataset in enumerate(datasets):
        if dataset.fingerprint in [other.fingerprint for other in datasets[:number]]:
            raise ConfigError(
                f"data.datasets: {dataset.root.url} is there twice: leave one out; pipeline.weights says how often"
            )
    specs = {dataset.meta["preprocessing_sha256"]: dataset.root.url for dataset in datasets}
    if len(specs) > 1:
        raise ConfigError(
            f"data.datasets: {' and '.join(specs.values())} were preprocessed in different ways: build them alike"
        )
    return datasets


def resume_from(
    config: Settings, run: Path, ranks: Ranks, datasets: Sequence[Dataset], task: Task
) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint to go on from, the same on all ranks, if this is a run that has begun."""
    answer: list[Any] = [None]
    if ranks.first:
        try:
            answer[0] = checkpoint.newest(run, warn)
        except CheckpointError as error:
            answer[0] = error
    if ranks.world > 1:
        dist.broadcast_object_list(answer, src=0, group=ranks.control)
    if isinstance(answer[0], Exception):
        raise answer[0]
    if answer[0] is None:
        return None, None
    saved = checkpoint.read_state(answer[0])
    now = facts(config, datasets, ranks) | task.facts()
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
    begun = settings_of(answer[0], saved, type(config)).tree()  # settings that came later have their defaults
    changed = differences(begun, now["config"], free(config))
    changed += differences({name: saved.get(name) for name in task.facts()}, task.facts(), set())
    if changed:
        raise ConfigError(f"{run}: was begun with other settings: {'; '.join(changed)}: set them back, or use run=NEW")
    return answer[0], saved


def settings_of(path: Path, state: dict[str, Any], kind: type[Settings]) -> Settings:
    try:
        return build(state["config"], kind)
    except ConfigError as error:
        raise CheckpointError(f"{path / checkpoint.STATE}: config: {error}") from None


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def free(config: Settings) -> set[str]:
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


def make_loader(
    config: Settings, datasets: Sequence[Dataset], ranks: Ranks, task: Task, state: dict[str, Any] | None
) -> Loader:
    spare = micro_batch(config, ranks.world)[0] * task.kept_per_crop * (2 if config.train.precision == "bf16" else 4)
    return Loader(config.loader, datasets, ranks.device, ranks.rank, ranks.world, state, spare_bytes=spare, **task.roles)


def make_engine(config: Settings, ranks: Ranks, task: Task, universal: bool) -> tuple[Any, GuardedAdamW]:
    deepspeed = distributed.quiet_deepspeed()
    t = config.train
    model: Any = task.model(torch.Generator().manual_seed(t.seed)).to(ranks.device)
    options = {"lr": t.lr, "betas": t.betas, "eps": t.eps, "weight_decay": t.weight_decay}
    learning = [p for p in model.parameters() if p.requires_grad]
    adam = GuardedAdamW(learning, t.clip_norm, partitioned=zero_stage(config) > 0, **options)
    settings = deepspeed_json(config, ranks.world, universal)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings)
    except Exception as error:
        if t.deepspeed is None or isinstance(error, torch.OutOfMemoryError) or distributed.lost_a_rank(error):
            raise
        raise ConfigError(f"train.deepspeed={t.deepspeed!r}: DeepSpeed refuses it: {error}"[:300]) from None
    compile_model(model, t.compile or ("eager" if zero_stage(config) == 3 else COMPILED[ranks.device.type]))
    return engine, adam


def heading(config: Settings, loader: Loader, ranks: Ranks, progress: Progress, engine: Any) -> str:
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    begun = f"goes on after step {progress.step}" if progress.step else "begins"
    epoch = f"{loader.steps_per_epoch} steps of {config.train.batch_crops} crops to an epoch"
    return (
        f"{config.run} {begun}: {parameters:,} parameters, {epoch}, "
        f"{ranks.world} x {ranks.device.type}, {config.train.precision}, ZeRO {zero_stage(config)}, loader {loader.backend}"
    )


def finish(config: Settings, run: Path, task: Task, done: bool) -> None:
    path = checkpoint.newest(run)
    if path is None:
        raise CheckpointError(f"{run}: its checkpoints were deleted during training")
    if not done:
        say(f"stopped after step {checkpoint.step_of(path)}; the same command goes on")
        return
    chosen = checkpoint.best(run) if task.exports_best else path
    assert chosen is not None
    say(f"done: {export.export(run, chosen, config, task)}, {write_report(run)}")


def export_run(run: Path, door: Door) -> int:
    path = checkpoint.best(run) if door.task.exports_best else checkpoint.newest(run, warn)
    if path is None:
        raise CheckpointError(f"{run}: has no checkpoint: train first")
    say(str(export.export(run, path, settings_of(path, checkpoint.read_state(path), door.kind), door.task)))
    return 0
