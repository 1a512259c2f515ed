"""The parts of a training run, in the order in which engine.pretrain.train_run puts them together:
data, checkpoint to resume from, loader, DeepSpeed's engine, logger, loop.

A RUN with a checkpoint is resumed if data and settings have not changed since it was written.
"""

import gc
import math
import re
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from omnilead.data_tools.io.terminal import say

from ..data.loader import Loader
from ..model.config import CLASS_OBJECTIVES
from ..model.encoder import Encoder, attention_backend
from ..settings.errors import ConfigError, Flag
from ..settings.files import flatten
from ..settings.resuming import changeable_settings
from . import checkpoint, checkpoint_files, distributed
from .checkpoint_files import CheckpointError
from .config import Config, RunConfig, build_config, deepspeed_json, zero_stage
from .distributed import on_first_rank
from .loggers import RunLogger
from .loop import Loop, Progress, run_facts
from .optimizer import GuardedAdamW
from .run_folder import RunFolder
from .task import TrainingTask

LONG_RUN_S = 600  # seconds; the duration of a longer run on a CPU is estimated at its start
# The share of a matrix product's rate that a training reaches. Measured on two cores: 0.55 to 0.6
# at the paper's size, in float32 and in bfloat16; 0.24 for configs/pretrain/small.yaml
TRAINING_SHARE_OF_PEAK = 0.5
COMPILE_DEFAULTS = {"cpu": "eager", "cuda": "layers"}  # device -> default of train.compile


@dataclass
class Resumed:
    path: Path
    state: dict[str, Any]
    loader_state: dict[str, Any]
    universal: bool  # True: ZeRO's partitions must be converted for another number of ranks

    def progress(self, loader_step: int, total: int) -> Progress:
        """Returns the progress to resume from. Raises ConfigError or CheckpointError if the
        checkpoint does not fit the loader or `total`, the number of steps."""
        step = self.state["step"]
        if loader_step != step:
            raise CheckpointError(
                f"{self.path}: state.json is of step {step}, but the loader's state is of step "
                f"{loader_step}: ",
                *checkpoint_files.HOW_TO_RESTORE,
            )
        if step > total:
            raise ConfigError(
                f"{self.path.parent.parent}: has done {step} steps, more than the {total} of this run: raise train.steps, "
                "or use ",
                Flag("--out"),
                " NEW",
            )
        return Progress(**{name: self.state[name] for name in vars(Progress())})


def make_loader(task: TrainingTask, resumed: Resumed | None) -> Loader:
    ranks = task.ranks
    return Loader(
        replace(task.config.loader, windows=task.windows),
        task.datasets,
        ranks.device,
        task.selection,
        ranks.rank,
        ranks.world,
        resumed.loader_state if resumed else None,
        reuse_batches=True,
    )


def progress_of(config: RunConfig, loader: Loader, resumed: Resumed | None) -> tuple[Progress, int]:
    """Returns (the progress with which the run starts, its total number of steps)."""
    total = total_steps(config, loader.steps_per_epoch)
    return resumed.progress(loader.step, total) if resumed else Progress(), total


def total_steps(config: RunConfig, steps_per_epoch: int) -> int:
    t = config.train
    return t.steps or math.ceil((t.epochs or 0) * steps_per_epoch)


def make_logger(
    task: TrainingTask, folder: RunFolder, engine: Any, progress: Progress, total: int
) -> RunLogger:
    facts = run_json(task, engine) | {"steps": total}
    return RunLogger(
        folder.path, task.config, task.keys, facts, progress.last_trained_and_validated, total
    )


def print_run_description(
    task: TrainingTask, loader: Loader, progress: Progress, engine: Any
) -> None:
    """Prints the first lines of a run, which describe it and give remarks."""
    say(describe_run(task, loader, progress, engine))
    for remark in [*task.remarks, *batch_norm_remarks(engine, task.ranks.world)]:
        say(remark)


def batch_norm_remarks(model: nn.Module, ranks: int) -> list[str]:
    """Returns a remark if batch norm makes the training depend on the number of ranks, otherwise
    []."""
    # SyncBatchNorm is none of these kinds; it takes its statistics from all ranks
    kinds = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
    if ranks == 1 or not any(isinstance(part, kinds) for part in model.modules()):
        return []
    return [
        f"doubtful: batch norm on {ranks} ranks: each takes its statistics from its own crops, and the model "
        "keeps those of rank 0: use one rank, or another norm (of s4: model.options={norm: layer})"
    ]


def run_loop(loop: Loop, profile: Any, opened: ExitStack) -> bool:
    """Runs the training loop. Returns whether all steps are done. `profile`: an
    engine.training.profiling.Profile that traces some steps, or None."""
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a step would visit everything that was imported
    opened.callback(gc.unfreeze)
    ranks, tracer = loop.task.ranks, None
    if profile and ranks.is_first:
        tracer = opened.enter_context(profile.traced(loop.folder.path / "profile", ranks.device))
    if ranks.is_first and ranks.device.type == "cpu" and (slow := estimated_duration(loop)):
        say(slow)
    finished = loop.train(tracer)
    if ranks.is_first and not finished:
        say(describe_stop(loop))
    return finished


def estimated_duration(loop: Loop) -> str:
    """Returns a sentence on how long a long run will take on a CPU; "" for a short run."""
    crops, steps = loop.config.train.batch_crops, loop.total - loop.progress.step
    step_s = crops * loop.task.flops_per_crop / (TRAINING_SHARE_OF_PEAK * loop.peak_flops)
    if steps * step_s < LONG_RUN_S:
        return ""
    peak = "train.peak_tflops" if loop.config.train.peak_tflops else "a matrix product"
    return (
        f"estimate: {format_duration(steps * step_s)} on the CPU, {format_duration(step_s)} for each of "
        f"{steps:,} steps, without validation ({loop.task.flops_per_crop / 1e9:.3g} GFLOP per crop "
        f"at half the {loop.peak_flops / 1e9:.3g} GFLOP/s of {peak})"
    )


def format_duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.1f} seconds"


def describe_stop(loop: Loop) -> str:
    resumes = "the same command resumes"
    if loop.progress.step == 0:
        resumes = "no checkpoint yet, the same command starts again"
    parts = [f"stopped after step {loop.progress.step}", loop.unfinished, resumes]
    return "; ".join(part for part in parts if part)


def make_engine(task: TrainingTask, resumed: Resumed | None) -> tuple[Any, GuardedAdamW]:
    """Returns (DeepSpeed's engine, which holds the model; the optimiser). Both start from the checkpoint
    `resumed`; without one, from the initial weights of the task."""
    universal = bool(resumed and resumed.universal)
    if resumed and universal:
        distributed.on_first_rank(task.ranks, lambda: checkpoint.to_universal(resumed.path))
    engine, adam = initialize_deepspeed(task, universal)
    if resumed:
        checkpoint.load_checkpoint(engine, resumed.path, universal)
    return engine, adam


def initialize_deepspeed(task: TrainingTask, universal: bool) -> tuple[Any, GuardedAdamW]:
    deepspeed = distributed.import_deepspeed()
    config: RunConfig = task.config
    ranks, t, stage = task.ranks, config.train, zero_stage(config)
    model: Any = task.model(torch.Generator().manual_seed(t.seed)).to(ranks.device)
    adam = GuardedAdamW(
        task.groups(model),
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
    distributed.require_function(engine, "checkpoint_engine.save", ["state_dict", "path"])
    if adam.calls_per_step > 1:
        adam.pending = lambda: pending_gradients(engine.optimizer, adam)
    if stage == 3:
        distributed.require_function(engine, "optimizer._get_norm_groups", [])
        # DeepSpeed's own computation of the norm waits for the device in each step; that of
        # GuardedAdamW does not
        engine.optimizer._get_norm_groups = lambda: [torch.zeros(())]
    if t.recompute_layers:
        recompute_layers(model)
    compile_model(
        model, t.compile or ("eager" if stage == 3 else COMPILE_DEFAULTS[ranks.device.type])
    )
    return engine, adam


def pending_gradients(zero: Any, adam: GuardedAdamW) -> list[Tensor]:
    """Returns the gradients of the groups that ZeRO has not yet handed to the optimizer. Called when
    the optimizer is called for the first time in a step."""
    kept = getattr(zero, "averaged_gradients", {})
    groups = [grads for grads in kept.values() if grads is not None]
    if len(groups) != adam.calls_per_step - 1:
        raise ConfigError(
            "train.lr_factors: needs all gradients at once, which this DeepSpeed does not keep: leave out "
            "train.lr_factors, or use deepspeed 0.19.8"
        )
    return [grad for grads in groups for grad in grads]


def recompute_layers(model: Any) -> None:
    if not isinstance(model.encoder, Encoder):
        raise ConfigError(
            f"train.recompute_layers=true: {type(model.encoder).__name__} has no layers that omnilead "
            "knows: leave it out, and use torch.utils.checkpoint in your own encoder"
        )
    model.encoder.recomputes = True


def compile_model(model: Any, parts: str, **options: Any) -> None:
    """Compiles the parts of a model that `parts`, a value of train.compile, names. "step" compiles
    forward pass and loss as one graph. "layers" compiles the transformer layers, which are identical
    and so compiled once, and other parts with many small operations. If the encoder has no such
    layers, "layers" compiles it whole, and in one graph with CPC or JEPA. "eager" compiles
    nothing."""
    # Hide three warnings: about torch's own code; about TF32, which is off on purpose; and about
    # .grad, which dynamo reads, not this code
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch._inductor")
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    if parts == "step":
        model.compile(**options)
    if parts != "layers":
        return
    encoder = model.encoder
    for part in encoder.layers if isinstance(encoder, Encoder) else [encoder]:
        part.compile(**options)
    plugin = getattr(model, "plugin", None)
    if (
        plugin is not None
        and not isinstance(encoder, Encoder)
        and model.objective.method in CLASS_OBJECTIVES
    ):
        # This compiles the encoder too. One graph is 1.3 times as fast as two (S4 and CPC on an
        # H200)
        plugin.compile(**options)
        if model.local is None and model.attributes is None:
            return
    methods = [(encoder, "features"), (encoder, "first_layer_input")]
    if not isinstance(encoder, Encoder):
        # such an encoder is compiled whole, but an objective may call its `context` directly
        methods.append((encoder, "context"))
    methods += [(model, name) for name in ("draw", "local_objective", "pool")]
    for owner, name in methods:
        if hasattr(owner, name):
            setattr(owner, name, torch.compile(getattr(owner, name), **options))


def run_json(task: TrainingTask, engine: Any) -> dict[str, Any]:
    """Returns the content of run.json: facts about the run and explanations of its curves."""
    facts = run_facts(task.config, task.datasets, task.ranks) | task.resume_facts()
    facts |= {"best": task.best[0], "attention": attention_backend(engine.module)}
    return facts | task.explanations()


def describe_run(task: TrainingTask, loader: Loader, progress: Progress, engine: Any) -> str:
    config, ranks = task.config, task.ranks
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    begins = f"resumes after step {progress.step}" if progress.step else "begins"
    return (
        f"{config.run} {begins} on {ranks.world} x {ranks.device.type}: a model of "
        f"{parameters:,} parameters, {loader.steps_per_epoch} steps of {config.train.batch_crops} "
        f"crops to go through the data once{task.left_out_crops_text()} (for experts: "
        f"{config.train.precision}, ZeRO "
        f"{zero_stage(config)}, loader {loader.backend}, attention "
        f"{attention_backend(engine.module)})"
    )


def find_checkpoint(task: TrainingTask, folder: RunFolder) -> Resumed | None:
    """Returns the newest intact checkpoint, or None if there is none. Raises ConfigError if it
    belongs to another run, or if data or settings that shape the training have changed."""
    ranks = task.ranks
    on_first_rank(ranks, folder.fetch)
    path = on_first_rank(ranks, lambda: folder.newest_checkpoint(checkpoint_files.warn))
    if path:
        state = checkpoint_files.read_state(path)
        refuse_changes(path, state, task)
    on_first_rank(ranks, folder.claim)
    if not path:
        return None
    loader_state = checkpoint_files.read_loader_state(path)
    universal = bool(state["zero_stage"]) and state["world"] != ranks.world
    return Resumed(path, state, loader_state, universal)


def refuse_changes(path: Path, state: dict[str, Any], task: TrainingTask) -> None:
    config: RunConfig = task.config
    saved = saved_config(path, state, type(config))
    if kind_of_run(state["config"]) != kind_of_run(config.tree()):
        raise other_run_error(path, state)
    facts = run_facts(config, task.datasets, task.ranks)
    facts_now = {name: facts[name] for name in ("preprocessing_sha256", "datasets", "zero_stage")}
    facts_now |= task.resume_facts()
    before = flatten({name: state.get(name) for name in facts_now}) | flatten(saved.tree())
    facts_now = flatten(facts_now) | flatten(config.tree())
    settings_that_may = changeable_settings(type(config))
    if not config.depends_on_total_steps:
        settings_that_may |= {"train.steps", "train.epochs"}
    changes = []
    for key in dict.fromkeys(["start", *before, *facts_now]):
        may_change = key in settings_that_may or task.may_change(key)
        if before.get(key) != facts_now.get(key) and not may_change:
            text_before, now_text = before.get(key), facts_now.get(key)
            if key == "datasets":
                text_before, now_text = describe_datasets(state), describe_datasets(facts)
            changes.append(
                f"{key} changed from {shorten_checksums(text_before)} to {shorten_checksums(now_text)}"
            )
    if changes:
        run = path.parent.parent
        mend: list[object] = ["change it back, or use ", Flag("--out"), " NEW"]
        is_longer = any(change.startswith(("train.steps ", "train.epochs ")) for change in changes)
        # not offered for a fine-tuning, which with --start would begin with a new head
        if is_longer and isinstance(config, Config):
            mend += [
                "; to train its model longer: ",
                Flag("--start"),
                f" {run} ",
                Flag("--out"),
                " NEW",
            ]
        raise ConfigError(f"{run}: cannot resume: {'; '.join(changes)}: ", *mend)


def describe_datasets(facts: dict[str, Any]) -> str:
    """Describes the datasets of run_facts or of a checkpoint by path, size and fingerprint."""
    urls, fingerprints = facts["config"]["data"]["datasets"], facts["datasets"]
    # checkpoints of earlier versions have no sizes
    sizes = facts.get("crops") or [None] * len(urls)
    parts = []
    for url, size, fingerprint in zip(urls, sizes, fingerprints, strict=False):
        crops = f"{size:,} crops, " if size is not None else ""
        parts.append(f"{url} ({crops}fingerprint {fingerprint})")
    return " and ".join(parts)


def shorten_checksums(value: Any) -> str:
    """Returns the value as text, with checksums cut to eight digits, as in other messages."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b", r"\1", str(value))


def kind_of_run(settings: dict[str, Any]) -> str:
    """Returns the kind of a run with these settings: "pre-training" or "fine-tuning for TASK"."""
    if "task" not in settings:
        return "pre-training"
    task = settings["task"]
    name = task.get("name") if isinstance(task, dict) else None
    return f"fine-tuning for {name}"


def other_run_error(path: Path, state: dict[str, Any]) -> ConfigError:
    """Returns the error for a checkpoint of another run than the one that was asked for."""
    settings = state["config"]
    program = "finetune" if "task" in settings else "pretrain"
    where = (
        f"{path.parent.parent}: holds another run, a {kind_of_run(settings)} (step {state['step']})"
    )
    return ConfigError(
        f"{where}: use ",
        Flag("--out"),
        f" NEW; only `omnilead {program}` with the same settings resumes or exports it",
    )


def saved_config(path: Path, state: dict[str, Any], kind: type[RunConfig]) -> RunConfig:
    """Returns a checkpoint's settings. Those that did not exist when it was written have their
    defaults."""
    if ("task" in state["config"]) != ("task" in kind.model_fields):
        raise other_run_error(path, state)
    try:
        config = build_config(state["config"], kind)
    except ConfigError as error:
        raise CheckpointError(f"{path / checkpoint_files.STATE}: config: {error}") from None
    seen, trained = state["crops_seen"], state["step"] * config.train.batch_crops
    if seen != trained:
        raise CheckpointError(
            f"{path / checkpoint_files.STATE}: crops_seen={seen}, but {state['step']} steps of "
            f"{config.train.batch_crops} crops make {trained}: ",
            *checkpoint_files.HOW_TO_RESTORE,
        )
    return config
