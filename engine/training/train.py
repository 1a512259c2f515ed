"""A training run, from its settings to its last checkpoint.

    train(load("small"), PretrainTask)               # raises; may be called several times in one process

A RUN with a checkpoint is resumed if data and settings have not changed
(engine.training.resuming). engine.run writes model and report afterwards.
"""

import gc
import math
import warnings
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import torch

from omnilead.data_tools.cli import say
from omnilead.data_tools.dataset import META, Dataset
from omnilead.engine.common import ConfigError, write_whole
from omnilead.engine.config import RunConfig, check, deepspeed_json, zero_stage
from omnilead.engine.data.loader import Loader
from omnilead.engine.model.encoder import Encoder
from omnilead.engine.model.encoders import CODE
from omnilead.engine.training import checkpoint, distributed
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.loggers import RunLogger, require_installed
from omnilead.engine.training.loop import Loop, Progress, run_facts
from omnilead.engine.training.optimizer import GuardedAdamW
from omnilead.engine.training.profiler import WARM_UP, profiled
from omnilead.engine.training.resuming import Resumed, find_checkpoint
from omnilead.engine.training.task import TrainingTask

COMPILED = {"cpu": "eager", "cuda": "layers"}  # default of train.compile
# Up to this many operations, a GPU recomputes float32 values instead of reading them from memory
INDUCTOR_OPTIONS = {"realize_opcount_threshold": 45}
MAKE_DEMO = (
    "omnilead synth demo/archive --patients 100 && omnilead shard demo/archive --out demo/dataset"
)


def train(config: RunConfig, task: type[TrainingTask], profile: int = 0) -> bool:
    """Starts or resumes the run; `profile`: number of steps to trace. -> False if SIGTERM
    stopped it. Ctrl-C also writes a checkpoint, and raises KeyboardInterrupt."""
    check(config, distributed.environment()[1])
    require_installed(config)
    datasets = open_datasets(config)
    run = make_folder(config.run)
    with distributed.process_restored():
        ranks = distributed.start(config.train.timeout_s, config.train.deterministic)
        failed = True
        try:
            with checkpoint.locked(run, ranks), ExitStack() as held:
                loop = make_loop(config, task(config, datasets, ranks), run, profile, held)
                finished = run_loop(loop, profile, held)
            failed = False
        finally:
            if not failed or ranks.world == 1:  # after an error, do not wait for the other ranks
                distributed.close()
    if loop.interrupted and not finished:
        raise KeyboardInterrupt("interrupted after a checkpoint: run it again to resume")
    return finished


def make_folder(name: str) -> Path:
    run = Path(name)
    mend = "choose another with --out RUN"
    if (run / META).exists() or (run.parent / META).exists():
        raise ConfigError(f"{name}: is a dataset, or lies in one: {mend}")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}: {mend}") from None
    return run


def open_datasets(config: RunConfig) -> list[Dataset]:
    if "demo/dataset" in config.data.datasets and not Path("demo/dataset").exists():
        raise ConfigError(
            f"there is no demo/dataset: make it with `{MAKE_DEMO}`, or --set "
            "data.datasets=[DATASET]"
        )
    datasets = [Dataset.open(url, config.data.anonymous) for url in config.data.datasets]
    names = " and ".join(dataset.root.url for dataset in datasets)
    if len({dataset.fingerprint for dataset in datasets}) < len(datasets):
        raise ConfigError(
            f"data.datasets: {names} are the same data: remove one; pipeline.weights says how "
            "often each is seen"
        )
    if len({dataset.meta["preprocessing_sha256"] for dataset in datasets}) > 1:
        raise ConfigError(
            f"data.datasets: {names} were preprocessed differently: build them with the same "
            "settings"
        )
    return datasets


def make_loop(
    config: RunConfig, task: TrainingTask, run: Path, profile: int, held: ExitStack
) -> Loop:
    """`held` closes whatever is opened here, also after an error."""
    datasets, ranks = task.datasets, task.ranks
    resumed = find_checkpoint(config, task, run)
    loader = held.enter_context(closing(open_loader(config, task, resumed)))
    total = config.train.steps or math.ceil((config.train.epochs or 0) * loader.steps_per_epoch)
    progress = resumed.progress(loader.step, total) if resumed else Progress()
    check_profile(profile, total - progress.step)
    if resumed and resumed.universal:
        distributed.on_first_rank(ranks, lambda: checkpoint.to_universal(resumed.path))
    if ranks.first:
        write_files(run, task, resumed is None)
    engine, adam = make_engine(config, task, bool(resumed and resumed.universal))
    held.callback(engine.destroy)
    if resumed:
        checkpoint.load(engine, resumed.path, resumed.universal)
    logger = None
    if ranks.first:
        facts = run_facts(config, datasets, ranks) | task.facts()
        facts |= {"steps": total, "best": task.best[0]} | task.explained()
        logger = RunLogger(run, config, task.keys, facts, progress.step, total)
        held.enter_context(closing(logger))
        say(heading(config, loader, ranks, progress, engine))
        for remark in task.remarks:
            say(remark)
    return Loop(task, config, run, engine, adam, loader, progress, total, logger)


def run_loop(loop: Loop, profile: int, held: ExitStack) -> bool:
    gc.collect()
    gc.freeze()  # otherwise a collection during a step would visit everything that was imported
    held.callback(gc.unfreeze)
    ranks = loop.task.ranks
    traced = profile > 0 and ranks.first
    with (
        profiled(profile, loop.run / "profile", ranks.device) if traced else nullcontext()
    ) as tracer:
        finished = loop.train(tracer)
    if ranks.first and not finished:
        say(f"stopped after step {loop.progress.step}; the same command resumes")
    return finished


def open_loader(config: RunConfig, task: TrainingTask, resumed: Resumed | None) -> Loader:
    ranks = task.ranks
    return Loader(
        config.loader,
        task.datasets,
        ranks.device,
        ranks.rank,
        ranks.world,
        resumed.loader_state if resumed else None,
        **task.roles,
    )


def check_profile(profile: int, left: int) -> None:
    if 0 < profile > left - WARM_UP:
        raise ConfigError(
            f"--profile {profile}: {left} steps are left, of which {WARM_UP} warm up: give a "
            "smaller number, or raise train.steps"
        )


def write_files(run: Path, task: TrainingTask, new: bool) -> None:
    if new and task.code:
        (run / CODE).mkdir(exist_ok=True)
        for name, content in task.code.items():
            write_whole(run / CODE / name, content)
    for name, content in task.kept.items():
        write_whole(run / name, content)


def make_engine(config: RunConfig, task: TrainingTask, universal: bool) -> tuple[Any, GuardedAdamW]:
    deepspeed = distributed.quiet_deepspeed()
    ranks, t, stage = task.ranks, config.train, zero_stage(config)
    model: Any = task.model(torch.Generator().manual_seed(t.seed)).to(ranks.device)
    adam = GuardedAdamW(
        [p for p in model.parameters() if p.requires_grad],
        t.clip_norm,
        partitioned=stage > 0,
        lr=t.lr,
        betas=t.betas,
        eps=t.eps,
        weight_decay=t.weight_decay,
    )
    settings = deepspeed_json(config, ranks.world, universal)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings)
    except Exception as error:
        not_its_file = isinstance(error, torch.OutOfMemoryError) or distributed.lost_a_rank(error)
        if t.deepspeed is None or not_its_file:
            raise
        raise ConfigError(
            f"train.deepspeed={t.deepspeed!r}: DeepSpeed refuses it: {error}"[:300]
        ) from None
    compile_model(model, t.compile or ("eager" if stage == 3 else COMPILED[ranks.device.type]))
    return engine, adam


def compile_model(model: Any, how: str, **options: Any) -> None:
    """`layers`: compiles the transformer layers (identical, so only once) and other parts with
    many small operations; of a plugged-in encoder, the whole. `step`: compiles forward and loss
    as one graph."""
    options = options or {"options": INDUCTOR_OPTIONS}
    # torch's own; TF32 is off on purpose; dynamo reads .grad, not this code
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch._inductor")
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    if how == "step":
        model.compile(**options)
    if how != "layers":
        return
    encoder = model.encoder
    for part in encoder.layers if isinstance(encoder, Encoder) else [encoder]:
        part.compile(**options)
    methods = [(encoder, "features"), (encoder, "enter")]
    methods += [(model, name) for name in ("draw", "compare", "pool")]
    for owner, name in methods:
        if hasattr(owner, name):
            setattr(owner, name, torch.compile(getattr(owner, name), **options))


def heading(
    config: RunConfig, loader: Loader, ranks: Ranks, progress: Progress, engine: Any
) -> str:
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    begins = f"resumes after step {progress.step}" if progress.step else "begins"
    return (
        f"{config.run} {begins}: {parameters:,} parameters, {loader.steps_per_epoch} steps of "
        f"{config.train.batch_crops} crops per epoch, {ranks.world} x {ranks.device.type}, "
        f"{config.train.precision}, ZeRO {zero_stage(config)}, loader {loader.backend}"
    )
