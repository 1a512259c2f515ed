"""A training run from its settings to RUN/model and RUN/report.html.

    train(load("small"), PretrainTask)               # raises; may be called several times in one process

A RUN with a checkpoint is resumed if data and settings have not changed, except those in
CHANGEABLE.
"""

import errno
import gc
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from omnilead.data_tools.cli import is_memory, say, tell
from omnilead.data_tools.dataset import META, DataError, Dataset
from omnilead.engine.common import ConfigError, OutputError, describe_leads, flatten, write_whole
from omnilead.engine.config import (
    FinetuneConfig,
    RunConfig,
    build,
    check,
    deepspeed_json,
    zero_stage,
)
from omnilead.engine.data.loader import Loader
from omnilead.engine.inference.preprocess import DEFAULT_INPUT, SCALES
from omnilead.engine.interop.card import model_card
from omnilead.engine.model import folder
from omnilead.engine.model.encoder import Encoder
from omnilead.engine.model.encoders import CODE
from omnilead.engine.report.run_report import write_report
from omnilead.engine.training import checkpoint, distributed
from omnilead.engine.training.checkpoint import CheckpointError, WriteError
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.loggers import RunLogger, require_installed
from omnilead.engine.training.loop import Loop, Progress, TrainError, run_facts
from omnilead.engine.training.optimizer import GuardedAdamW
from omnilead.engine.training.profiler import WARM_UP, profiled
from omnilead.engine.training.task import TrainingTask

# May change when a run is resumed; train.steps and train.epochs too if the learning rate does not
# depend on them
CHANGEABLE = re.compile(
    r"run|code|task\.labels|labels\.(center|scale|definition\..*)|data\.(datasets|anonymous)|pipeline\.(source|check|on_corrupt|threads|read_ahead|cache_dir|cache_bytes)|train\.(log_every|"
    r"validate_every|valid_batches|patience|probe_patients|save_every_steps|save_every_minutes|keep|peak_tflops|timeout_s|max_nonfinite|"
    r"deepspeed|compile|micro_batch|zero_stage|track|deterministic)"
)
BAD_INPUT = (ConfigError, DataError, CheckpointError)
COMPILED = {"cpu": "eager", "cuda": "layers"}  # default of train.compile
# Up to this many operations, a GPU recomputes float32 values instead of reading them from memory
INDUCTOR_OPTIONS = {"realize_opcount_threshold": 45}
LESS_MEMORY = "lower train.micro_batch or pipeline.read_ahead, or free memory"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
MAKE_DEMO = (
    "omnilead synth demo/archive --patients 100 && omnilead shard demo/archive --out demo/dataset"
)


def explain(error: BaseException) -> tuple[str, int]:
    """A one-line message and an exit code: 2, settings or files are wrong; 1, the run failed;
    130, Ctrl-C. Raises other errors: bugs."""
    if isinstance(error, BAD_INPUT):
        return str(error), 2
    if isinstance(error, TrainError | WriteError | OutputError):
        return str(error), 1
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted before training: the same command continues", 130
    if is_memory(error):
        return (
            f"out of memory: {LESS_MEMORY} "
            f"({' '.join(str(error).split())[:120] or type(error).__name__})",
            1,
        )
    if isinstance(error, UnicodeEncodeError):  # torch accepts no such path
        return f"{error.object[:200]!r}: not UTF-8: choose another name", 2
    if isinstance(error, OSError):
        name = f"{error.filename or 'RUN'}: {error.strerror}"
        wrong = error.errno in NOT_WRITABLE
        return (
            (f"{name}: choose another with --out RUN", 2)
            if wrong
            else (f"{name}: the last checkpoint is intact", 1)
        )
    if isinstance(error, RuntimeError) and distributed.lost_a_rank(error):
        return (
            f"another rank died or hung ({str(error).splitlines()[0][:150]}): start again to "
            "resume",
            1,
        )
    raise error


def train(config: RunConfig, task: type[TrainingTask], profile: int = 0) -> bool:
    """Starts or resumes the run; `profile`: number of steps to trace. -> False if SIGTERM
    stopped it. Ctrl-C also writes a checkpoint, and raises KeyboardInterrupt."""
    check(config, distributed.environment()[1])
    require_installed(config)
    datasets, run = open_datasets(config), Path(config.run)
    if (run / META).exists() or (run.parent / META).exists():
        raise ConfigError(
            f"{config.run}: is a dataset, or lies in one: choose another with --out RUN"
        )
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{config.run}: {error.strerror}: choose another with --out RUN"
        ) from None
    with distributed.process_restored():
        ranks = distributed.start(config.train.timeout_s, config.train.deterministic)
        failed = True
        try:
            with checkpoint.locked(run, ranks):
                with ExitStack() as held:
                    finished, interrupted = _train(
                        config, task(config, datasets, ranks), datasets, run, ranks, profile, held
                    )
                if ranks.first and finished:
                    say(f"done: {export_run(run, type(config), task)}, {write_report(run)}")
            failed = False
        finally:
            if not failed or ranks.world == 1:  # after an error, do not wait for the other ranks
                distributed.close()
    if interrupted and not finished:
        raise KeyboardInterrupt("interrupted after a checkpoint: run it again to resume")
    return finished


def open_datasets(config: RunConfig) -> list[Dataset]:
    if "demo/dataset" in config.data.datasets and not Path("demo/dataset").exists():
        raise ConfigError(
            f"there is no demo/dataset: make it with `{MAKE_DEMO}`, or --set "
            "data.datasets=[DATASET]"
        )
    datasets = [Dataset.open(url, config.data.anonymous) for url in config.data.datasets]
    for key, same, mend in (
        (
            "fingerprint",
            False,
            "are the same data: remove one; pipeline.weights says how often each is seen",
        ),
        (
            "preprocessing_sha256",
            True,
            "were preprocessed differently: build them with the same settings",
        ),
    ):
        by_value = {dataset.meta[key]: dataset.root.url for dataset in datasets}
        if len(by_value) != (1 if same else len(datasets)):
            raise ConfigError(
                f"data.datasets: {' and '.join(dataset.root.url for dataset in datasets)} {mend}"
            )
    return datasets


def _train(
    config: RunConfig,
    task: TrainingTask,
    datasets: Sequence[Dataset],
    run: Path,
    ranks: Ranks,
    profile: int,
    held: ExitStack,
) -> tuple[bool, bool]:
    """Whether all steps are done, and whether Ctrl-C was typed. `held` closes whatever is opened
    here, also after an error."""
    path = distributed.on_first_rank(ranks, lambda: checkpoint.newest(run, _warn))
    saved = refuse_changes(path, config, datasets, ranks, task) if path else None
    loader_state = (
        checkpoint.read_loader_state(path, ranks, saved["world"]) if path and saved else None
    )
    place = datasets, ranks.device, ranks.rank, ranks.world
    loader = held.enter_context(closing(Loader(config.loader, *place, loader_state, **task.roles)))
    total = config.train.steps or math.ceil((config.train.epochs or 0) * loader.steps_per_epoch)
    progress, universal = Progress(), False
    if path and saved:
        if loader.step != saved["step"]:
            steps = (
                f"state.json is of step {saved['step']}, the loader's state of step {loader.step}"
            )
            raise CheckpointError(f"{path}: {steps}: {checkpoint.RESTORE}")
        if saved["step"] > total:
            raise ConfigError(
                f"{run}: has done {saved['step']} steps, more than {total}: raise train.steps, or "
                "use --out NEW"
            )
        progress = Progress(
            **{name: saved.get(name, value) for name, value in vars(progress).items()}
        )
        universal = bool(saved["zero_stage"]) and saved["world"] != ranks.world
        if universal:
            distributed.on_first_rank(ranks, lambda: checkpoint.to_universal(path))
    if 0 < profile > total - progress.step - WARM_UP:
        left = f"{total - progress.step} steps are left, of which {WARM_UP} warm up"
        raise ConfigError(
            f"--profile {profile}: {left}: give a smaller number, or raise train.steps"
        )
    if not path and ranks.first:
        for name, content in task.code.items():
            (run / CODE).mkdir(exist_ok=True)
            write_whole(run / CODE / name, content)
    if ranks.first:
        for name, content in task.kept.items():
            write_whole(run / name, content)
    engine, adam = make_engine(config, ranks, task, universal)
    held.callback(engine.destroy)
    if path:
        checkpoint.load(engine, path, universal)
    logger = None
    if ranks.first:
        facts = (
            run_facts(config, datasets, ranks)
            | task.facts()
            | {"steps": total, "best": task.best[0]}
            | task.explained()
        )
        logger = held.enter_context(
            closing(RunLogger(run, config, task.keys, facts, progress.step, total))
        )
        for line in (heading(config, loader, ranks, progress, engine), *task.remarks):
            say(line)
    loop = Loop(task, config, run, ranks, engine, adam, loader, datasets, progress, total, logger)
    gc.collect()
    gc.freeze()  # otherwise a collection during a step would visit everything that was imported
    held.callback(gc.unfreeze)
    with (
        profiled(profile, run / "profile", ranks.device)
        if profile and ranks.first
        else nullcontext() as tracer
    ):
        finished = loop.train(tracer)
    if ranks.first and not finished:
        say(f"stopped after step {progress.step}; the same command resumes")
    return finished, loop.interrupted


def _warn(text: str) -> None:
    tell(f"warning: {text}")


def refuse_changes(
    path: Path, config: RunConfig, datasets: Sequence[Dataset], ranks: Ranks, task: TrainingTask
) -> dict[str, Any]:
    """The checkpoint's state, if data and settings are still those it was written with."""
    saved = checkpoint.read_state(path)
    facts = run_facts(config, datasets, ranks)
    now = {
        name: facts[name] for name in ("preprocessing_sha256", "datasets", "zero_stage")
    } | task.facts()
    before = {name: saved.get(name) for name in now} | saved_config(
        path, saved, type(config)
    ).tree()
    if subject(saved["config"]) != subject(config.tree()):
        raise other_run(path, saved)
    pairs = flatten(before), flatten(now | config.tree())
    fixed = config.train.schedule == "fixed" and not (
        isinstance(config, FinetuneConfig) and config.task.margin_warmup
    )
    lengths = ("train.steps", "train.epochs") if fixed else ()
    changes = [
        f"{key} changed from {pairs[0].get(key)} to {pairs[1].get(key)}"
        for key in dict.fromkeys(("start", *pairs[0], *pairs[1]))
        if pairs[0].get(key) != pairs[1].get(key)
        and key not in lengths
        and not CHANGEABLE.fullmatch(key)
    ]
    if changes:
        run = path.parent.parent
        raise ConfigError(
            f"{run}: cannot resume: {'; '.join(changes)}: change it back, or use --out NEW"
        )
    return saved


def subject(settings: dict[str, Any]) -> str:
    """What a run with these settings is."""
    if "task" not in settings:
        return "pre-training"
    task = settings["task"]
    name = task.get("name") if isinstance(task, dict) else None
    return f"fine-tuning for {name}"


def other_run(path: Path, state: dict[str, Any]) -> ConfigError:
    """An error that says which run the checkpoint belongs to, if it is not the one that was asked
    for."""
    settings = state["config"]
    program = "finetune" if "task" in settings else "pretrain"
    where = f"{path.parent.parent}: holds another run, a {subject(settings)} (step {state['step']})"
    return ConfigError(
        f"{where}: use --out NEW; only `omnilead {program}` with the same settings resumes or "
        "exports it"
    )


def saved_config(path: Path, state: dict[str, Any], kind: type[RunConfig]) -> RunConfig:
    """A checkpoint's settings. Those that did not exist when it was written have their defaults."""
    if ("task" in state["config"]) != issubclass(kind, FinetuneConfig):
        raise other_run(path, state)
    try:
        config = build(state["config"], kind)
    except ConfigError as error:
        raise CheckpointError(f"{path / checkpoint.STATE}: config: {error}") from None
    seen, trained = state["crops_seen"], state["step"] * config.train.batch_crops
    if seen != trained:
        why = (
            f"crops_seen={seen}, but {state['step']} steps of {config.train.batch_crops} crops "
            f"are {trained}"
        )
        raise CheckpointError(f"{path / checkpoint.STATE}: {why}: {checkpoint.RESTORE}")
    return config


def make_engine(
    config: RunConfig, ranks: Ranks, task: TrainingTask, universal: bool
) -> tuple[Any, GuardedAdamW]:
    deepspeed = distributed.quiet_deepspeed()
    t, stage = config.train, zero_stage(config)
    model: Any = task.model(torch.Generator().manual_seed(t.seed)).to(ranks.device)
    trainable = [p for p in model.parameters() if p.requires_grad]
    options = {"lr": t.lr, "betas": t.betas, "eps": t.eps, "weight_decay": t.weight_decay}
    adam = GuardedAdamW(trainable, t.clip_norm, partitioned=stage > 0, **options)
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=adam, config=deepspeed_json(config, ranks.world, universal)
        )
    except Exception as error:
        if (
            t.deepspeed is None
            or isinstance(error, torch.OutOfMemoryError)
            or distributed.lost_a_rank(error)
        ):
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
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch._inductor"
    )  # torch's own
    warnings.filterwarnings(
        "ignore", message="TensorFloat32 tensor cores"
    )  # TF32 is off on purpose
    # dynamo reads it, not this code
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    if how == "step":
        model.compile(**options)
    elif how == "layers":
        for part in model.encoder.layers if isinstance(model.encoder, Encoder) else [model.encoder]:
            part.compile(**options)
        for owner, names in (
            (model.encoder, ("features", "enter")),
            (model, ("draw", "compare", "pool")),
        ):
            for name in names:
                if hasattr(owner, name):
                    setattr(owner, name, torch.compile(getattr(owner, name), **options))


def heading(
    config: RunConfig, loader: Loader, ranks: Ranks, progress: Progress, engine: Any
) -> str:
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    begins = f"resumes after step {progress.step}" if progress.step else "begins"
    return (
        f"{config.run} {begins}: {parameters:,} parameters, {loader.steps_per_epoch} steps of "
        f"{config.train.batch_crops} crops "
        f"per epoch, {ranks.world} x {ranks.device.type}, {config.train.precision}, ZeRO "
        f"{zero_stage(config)}, "
        f"loader {loader.backend}"
    )


def export_run(run: Path, kind: type[RunConfig], task: type[TrainingTask]) -> Path:
    """Writes RUN/model atomically: weights in safetensors, the input specification, a model
    card."""
    path = checkpoint.best(run) if task.exports_best else checkpoint.newest(run, _warn)
    if path is None:
        raise CheckpointError(f"{run}: has no checkpoint: train it first")
    state = checkpoint.read_state(path)
    config: Any = saved_config(path, state, kind)
    weights = {
        name: w for name, w in checkpoint.full_weights(path).items() if task.exports(config, name)
    }
    leads, seen = (
        describe_leads(which).split(",")
        for which in (config.augment.output_leads, config.augment.seen)
    )
    signal_spec = {**DEFAULT_INPUT, "leads": leads, "segment_s": 5.0, **state.get("input", {})}
    signal_spec["meaning"] = SCALES[signal_spec["scale"]]
    signal_spec |= ({"seen": seen} if seen != leads else {}) | {
        "sha256": state["preprocessing_sha256"]
    }
    trained = {
        name: state[name] for name in ("step", "crops_seen", "datasets", "preprocessing_sha256")
    }
    trained |= {"precision": config.train.precision, "rlm": config.augment.rlm}
    trained["splits"] = [*state.get("splits", ()), *state.get("splits_before", ())]
    card = model_card(run, config, state, weights, task)
    try:
        code = {name: read_code(run / CODE / name) for name in state.get("code", ())}
        folder.write(
            run / "model",
            weights,
            task.described(config, state) | {"trained": trained},
            signal_spec,
            card,
            code,
        )
    except SafetensorError as error:
        raise WriteError(
            f"{run / 'model'}: {error}: free disk space, then --export {run}"
        ) from error
    return run / "model"


def read_code(file: Path) -> bytes:
    if file.is_symlink() or not file.is_file():
        raise CheckpointError(
            f"{file}: no such file, or a link, but the checkpoint was trained with it: "
            f"{checkpoint.RESTORE}"
        )
    return file.read_bytes()
