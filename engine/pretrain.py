"""Pre-train an ECG encoder: W2V + CMSC + random lead masking (Oh et al., CHIL 2022) and its
baselines.

    omnilead pretrain --data DATASET --out RUN                the quick start: a small model, a minute or two on a CPU
    omnilead pretrain --config w2v_cmsc_rlm --data DATASET --out RUN --set train.steps=1000
    omnilead pretrain --start MODEL --data MORE --out RUN2 --set train.steps=1000         continues from another model's weights
    deepspeed --module omnilead.engine.pretrain --config w2v_cmsc_rlm ...     on all GPUs of this machine
    torchrun --nproc-per-node 8 --module omnilead.engine.pretrain --config F ...       the same
    deepspeed --hostfile H --no_ssh --node_rank I --master_addr A --module omnilead.engine.pretrain ...   many nodes
    omnilead pretrain --config F --data DATASET --out RUN --dry-run 8     data, memory, hours and disk on 8 GPUs; trains nothing
    omnilead pretrain --config F --dry-run 8 --crops 1000000 --hourly 3       the same before there is a dataset, and the money
    omnilead pretrain --export RUN                            writes RUN/model from the newest checkpoint
    omnilead pretrain --schema                                JSON schema of the settings

In a clone of the repository `deepspeed engine/pretrain.py` is the same program, and `python
engine/pretrain.py` in one process.

RUN/ holds config.yaml, run.json, metrics.jsonl, validation.jsonl, tensorboard/, checkpoints/ and
finally model/, report.html. A RUN on s3:// is uploaded after every checkpoint. Started again with the
same RUN, training resumes from the last checkpoint: bit for bit with the same number of ranks; with
another number it sees the same batches, but each rank draws its own dropout, so losses differ. An
error names data or settings that have changed. SIGTERM or Ctrl-C stops it after the micro-batch,
with a checkpoint of the last whole step and exit code 0 or 130. Exit 2: a setting or a file is
wrong. Exit 1: the run failed. In Python:

    run = omnilead.pretrain("w2v_cmsc_rlm", data="DATASET", out="RUN", **{"train.steps": 1000})
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from omnilead.data_tools.io.commands import run_as_omnilead
from omnilead.engine.run import (
    SHORTCUTS,
    AfterTraining,
    finish_run,
    run_from_python,
    run_training_command,
)

if TYPE_CHECKING:
    from omnilead.data_tools.dataset import Data
    from omnilead.engine.run import Task, TrainingRun
    from omnilead.engine.training.config import Config, RunConfig
    from omnilead.engine.training.pretraining import PretrainTask


def pretrain_task() -> "type[PretrainTask]":
    """Returns PretrainTask. It is imported only here, because importing PyTorch takes seconds."""
    from omnilead.engine.training.pretraining import PretrainTask

    return PretrainTask


def pretrain_settings() -> "tuple[type[Config], Callable[..., Config]]":
    """Returns (the class of the settings, the function that reads them)."""
    from omnilead.engine.training.config import Config
    from omnilead.engine.training.read_settings import read_settings

    return Config, read_settings


def train_run(
    config: "RunConfig",
    import_task: "Task",
    profile: int = 0,
    after: AfterTraining | None = None,
) -> bool:
    """Trains or resumes a run, and exports its model at the end. Fine-tuning calls this with
    another task. `profile`: the number of steps to trace. `after`: makes the model card and the
    report. Returns False if SIGTERM stopped the run. Raises KeyboardInterrupt if Ctrl-C stopped it.
    Either leaves a checkpoint, unless Ctrl-C came twice. All other errors are raised."""
    from omnilead.engine.settings.launcher import launched_rank
    from omnilead.engine.training import run_folder, tracking
    from omnilead.engine.training.config import check_config

    check_config(config, launched_rank().world)
    tracking.require_installed(config)
    datasets = run_folder.open_datasets(config)
    config.require_files()
    folder = run_folder.RunFolder(config.run)
    folder.make()
    # PyTorch and DeepSpeed, which take seconds, are imported only after wrong settings and paths
    # are reported
    from omnilead.engine.training import distributed, equal_ranks, train
    from omnilead.engine.training.loop import Loop
    from omnilead.engine.training.profiling import Profile

    task_class = import_task()
    profiler = Profile(profile) if profile else None
    # The lock outlives the engine and the connections of the ranks, because the model is written
    # after these are closed
    with ExitStack() as lock:
        with distributed.started_ranks(config.train) as ranks, ExitStack() as opened:
            equal_ranks.require_equal(ranks, equal_ranks.facts_of_rank(config, datasets))
            lock.enter_context(folder.locked(ranks))
            # What is trained is defined in training/pretraining.py; for fine-tuning, in
            # downstream/finetuning/task.py
            task = task_class.prepare(config, datasets, ranks)
            equal_ranks.require_equal(ranks, equal_ranks.facts_of_task(task.resume_facts()))
            resumed = train.find_checkpoint(task, folder)
            # data/order.py, reader.py and augmenter.py turn crops into batches on the device
            loader = opened.enter_context(closing(train.make_loader(task, resumed)))
            progress, total = train.progress_of(config, loader, resumed)
            if profiler:
                profiler.require_enough_steps(total - progress.step)
            if ranks.is_first:
                folder.write_run_files(task.code, task.kept_files)
            # The model is in model/pretrainer.py, its optimiser in training/optimizer.py; DeepSpeed
            # wraps both
            engine, adam = train.make_engine(task, resumed)
            opened.callback(engine.destroy)
            logger = None
            if ranks.is_first:
                logger = train.make_logger(task, folder, engine, progress, total)
                opened.enter_context(closing(logger))
                logger.services |= tracking.open_services(folder.path, config, progress.step)
                train.print_run_description(task, loader, progress, engine)
            loop = Loop(task, folder, engine, adam, loader, progress, total, logger)
            finished = train.run_loop(loop, profiler, opened)
        if finished:
            finish_run(folder, task_class, after)
        folder.upload(config.train.keep, last=True)
    if not finished and loop.interrupted_at_s is not None:
        raise KeyboardInterrupt("interrupted: start the same run again to resume it")
    return finished


def pretrain(
    config: str | Path | None = None,
    *,
    data: "Data | Sequence[Data]",
    out: str | os.PathLike[str],
    after: AfterTraining | None = None,
    **settings: Any,
) -> "TrainingRun":
    """Pre-trains an encoder. Called again with the same `out` it resumes, or returns the finished
    run.

    config: a shipped configuration by name, or a YAML file; by default the quick start, or with
    `start` that model's own architecture and objective. data: a dataset or several. out: RUN, where
    everything is written. settings: those of --set, by their dotted names: start="RUN",
    **{"train.steps": 1000, "augment.rlm": 0.5}. Ctrl-C writes a checkpoint and raises
    KeyboardInterrupt. Other errors have one-line messages, such as engine.settings.errors.ConfigError.
    """
    return run_from_python(
        train_run, pretrain_task, pretrain_settings, config, data, out, settings, after
    )


main = partial(
    run_training_command,
    "pretrain",
    __doc__,
    train_run,
    pretrain_task,
    pretrain_settings,
    "quickstart, or what --start was trained with",
    SHORTCUTS,
)

if __name__ == "__main__":
    run_as_omnilead("pretrain")
