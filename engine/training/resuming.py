"""The checkpoint that a run resumes from, and what must not have changed since it was written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnilead.engine.common import ConfigError, flatten
from omnilead.engine.config import RunConfig, build
from omnilead.engine.training import checkpoint
from omnilead.engine.training.checkpoint import CheckpointError
from omnilead.engine.training.distributed import on_first_rank
from omnilead.engine.training.loop import Progress, run_facts
from omnilead.engine.training.task import TrainingTask

# Settings and facts that may change when a run is resumed; train.steps and train.epochs too if the
# learning rate does not depend on them
CHANGEABLE = {
    *("run", "code", "task.labels", "labels.center", "labels.scale"),
    *("data.datasets", "data.anonymous", "pipeline.source", "pipeline.check"),
    *("pipeline.on_corrupt", "pipeline.threads", "pipeline.read_ahead"),
    *("pipeline.cache_dir", "pipeline.cache_bytes"),
    *("train.log_every", "train.validate_every", "train.valid_batches", "train.patience"),
    *("train.probe_patients", "train.save_every_steps", "train.save_every_minutes", "train.keep"),
    *("train.peak_tflops", "train.timeout_s", "train.max_nonfinite", "train.deepspeed"),
    *("train.compile", "train.micro_batch", "train.zero_stage", "train.track"),
    "train.deterministic",
}
DEFINITION = "labels.definition."  # of a task; its settings are compared by themselves


@dataclass
class Resumed:
    path: Path
    state: dict[str, Any]
    loader_state: dict[str, Any]
    universal: bool  # ZeRO's partitions must be converted for another number of ranks

    def progress(self, loader_step: int, total: int) -> Progress:
        """ConfigError or CheckpointError if it does not fit the loader or the number of steps."""
        step = self.state["step"]
        if loader_step != step:
            raise CheckpointError(
                f"{self.path}: state.json is of step {step}, the loader's state of step "
                f"{loader_step}: {checkpoint.RESTORE}"
            )
        if step > total:
            raise ConfigError(
                f"{self.path.parent.parent}: has done {step} steps, more than {total}: raise "
                "train.steps, or use --out NEW"
            )
        names = vars(Progress())
        return Progress(**{name: self.state[name] for name in names if name in self.state})


def find_checkpoint(config: RunConfig, task: TrainingTask, run: Path) -> Resumed | None:
    """The checkpoint to resume from, if data and settings are still those it was written with."""
    ranks = task.ranks
    path = on_first_rank(ranks, lambda: checkpoint.newest(run, checkpoint.warn))
    if path is None:
        return None
    state = checkpoint.read_state(path)
    refuse_changes(path, state, config, task)
    loader_state = checkpoint.read_loader_state(path, ranks, state["world"])
    universal = bool(state["zero_stage"]) and state["world"] != ranks.world
    return Resumed(path, state, loader_state, universal)


def refuse_changes(
    path: Path, state: dict[str, Any], config: RunConfig, task: TrainingTask
) -> None:
    saved = saved_config(path, state, type(config))
    if subject(state["config"]) != subject(config.tree()):
        raise other_run(path, state)
    facts = run_facts(config, task.datasets, task.ranks)
    now = {name: facts[name] for name in ("preprocessing_sha256", "datasets", "zero_stage")}
    now |= task.facts()
    before = flatten({name: state.get(name) for name in now}) | flatten(saved.tree())
    now = flatten(now) | flatten(config.tree())
    changes = []
    for key in dict.fromkeys(["start", *before, *now]):
        may_change = key in CHANGEABLE or key.startswith(DEFINITION)
        if key in ("train.steps", "train.epochs"):
            may_change = not config.length_matters
        if before.get(key) != now.get(key) and not may_change:
            changes.append(f"{key} changed from {before.get(key)} to {now.get(key)}")
    if changes:
        run = path.parent.parent
        raise ConfigError(
            f"{run}: cannot resume: {'; '.join(changes)}: change it back, or use --out NEW"
        )


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
    if ("task" in state["config"]) != ("task" in kind.model_fields):
        raise other_run(path, state)
    try:
        config = build(state["config"], kind)
    except ConfigError as error:
        raise CheckpointError(f"{path / checkpoint.STATE}: config: {error}") from None
    seen, trained = state["crops_seen"], state["step"] * config.train.batch_crops
    if seen != trained:
        raise CheckpointError(
            f"{path / checkpoint.STATE}: crops_seen={seen}, but {state['step']} steps of "
            f"{config.train.batch_crops} crops are {trained}: {checkpoint.RESTORE}"
        )
    return config
