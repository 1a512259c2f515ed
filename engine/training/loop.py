"""The training loop: forward, backward, step, with regular logging, validation and checkpoints.

    Loop(task, folder, engine, adam, loader, progress, total, logger).train()

Nothing waits for the device between log lines. Steps with a non-finite loss or gradient change
nothing and are counted (engine.training.optimizer); after train.max_nonfinite in a row the run
ends. SIGTERM stops the run before the next micro-batch, with several ranks one micro-batch later: an
unfinished step is given up, an unfinished validation is due again, and a checkpoint of the last
whole step is written. The exit code is 0. Ctrl-C does the same with exit code 130. A second Ctrl-C
ends the run at once.
"""

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnilead.data_tools.dataset import DataError, Dataset
from omnilead.data_tools.io.terminal import say

from ..data.loader import Batch, Loader, State
from ..data.order import Places
from ..data.patients import source_names
from ..model.objectives import sum_over_ranks
from ..settings.counter import bits
from ..settings.errors import TrainError
from .arguments import slice_arguments
from .config import RunConfig, micro_batch_and_passes, zero_stage
from .distributed import DeepSpeedLauncher, MaxOverRanks, Ranks, on_first_rank
from .loggers import RunLogger, memory_gb, peak_tflops
from .optimizer import GuardedAdamW, lr_at
from .run_folder import RunFolder
from .task import TrainingTask

DROPOUT_STREAM = 200
# Seconds after a Ctrl-C in which another one is ignored, because launchers may send each one twice
SECOND_SIGNAL_S = 2


class Stopped(Exception):
    """Raised on all ranks when one of them was asked to stop. The message says what is not
    finished."""


@dataclass
class Progress:
    """The progress of a training, which checkpoints store."""

    step: int = 0  # steps done
    crops_seen: int = 0
    skipped_steps: int = 0
    in_a_row: int = 0  # number of consecutive steps, up to now, that were skipped
    # the best step, its validation metric, and the values that its validation chose
    best: dict[str, Any] = field(default_factory=dict)
    stale: int = 0  # validations since the best one
    validation_due: bool = True  # True until the validation of this step is finished

    @property
    def last_trained_and_validated(self) -> tuple[int, int]:
        """(the last step that is trained, the last step that is validated). If not even the
        untrained model is validated, the second is -1."""
        return self.step, self.step - self.validation_due


@dataclass
class Loop:
    task: TrainingTask
    folder: RunFolder
    engine: Any
    adam: GuardedAdamW
    loader: Loader
    progress: Progress
    total: int  # steps
    logger: RunLogger | None  # on rank 0

    def __post_init__(self) -> None:
        self.config: RunConfig = self.task.config
        t = self.config.train
        self.ranks = self.task.ranks
        self.micro, _ = micro_batch_and_passes(self.config, self.ranks.world)
        self.peak_flops = self.ranks.world * peak_tflops(t, self.ranks.device) * 1e12
        self.loader.meter.restart()
        self.recent: deque[tuple[int, Places]] = deque(maxlen=t.max_nonfinite)
        self.adam.skipped.fill_(self.progress.skipped_steps)
        self.adam.in_a_row.fill_(self.progress.in_a_row)
        self.terminated = False  # True once SIGTERM or Ctrl-C has come
        self.launcher = DeepSpeedLauncher()
        self.interrupted_at_s: float | None = None  # when the first Ctrl-C came (time.monotonic)
        self.unfinished = ""  # what was not finished when the run was stopped
        self.asked_to_stop = MaxOverRanks(self.ranks)
        self.asked_to_save = MaxOverRanks(self.ranks)
        self.loader_state = State()  # state of the loader after the last whole step
        self.writer = self.folder.writer(self.ranks, t)
        self.saved = replace(self.progress)
        self.saved_at_s = time.monotonic()

    def train(self, tracer: Any = None) -> bool:
        """Trains until all steps are done, and returns True; returns False if the run was asked to
        stop. `tracer`: see engine.training.profiling.Profile.traced."""
        self.engine.train()
        batches = iter(self.loader)
        with self._signals_handled():
            try:
                if self.progress.validation_due and self.config.train.validate_every:
                    self._validate()
                while not self._is_done():
                    batch, state = self._next_batch(batches)
                    losses = self._step(batch)
                    self.loader_state = state
                    self._after_step(losses, batch)
                    if tracer:
                        tracer.step()
                    self.writer.raise_if_failed()
                    if self._save_is_due():
                        self._save()
                    self._stop_if_asked()
                self._save_and_wait()
                return True
            except Stopped as stopped:
                self.unfinished = str(stopped)
                self._save_and_wait()
                # After SIGTERM, a launcher fails when its ranks have ended, and Slurm then kills
                # all other ranks. So no rank may end before rank 0 has written `latest` and
                # uploaded it
                on_first_rank(self.ranks, lambda: None)
                return False
            finally:
                self.writer.close(sys.exc_info()[1])
                self.asked_to_stop.finish()
                self.asked_to_save.finish()
                batches.close()  # type: ignore[attr-defined]

    def _stop_if_asked(self, unfinished: str = "") -> None:
        """Raises Stopped on all ranks in the same call if one of them was asked to stop. With several
        ranks this is the call after the one in which that rank told the others. All ranks call it
        between micro-batches. `unfinished`: what will not be finished."""
        if self.asked_to_stop(self.terminated or self.launcher.has_ended()):
            raise Stopped(unfinished)

    def _is_done(self) -> bool:
        stopped_early = 0 < self.config.train.patience <= self.progress.stale
        return stopped_early or self.progress.step >= self.total

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """A context in which SIGTERM and Ctrl-C end the run after the current micro-batch. A second
        Ctrl-C ends it at once, because the data or another rank may never come. Signals can be
        handled only in the main thread."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: Any) -> None:
        self.terminated = True
        if number != signal.SIGINT:
            return
        now_s = time.monotonic()
        if self.interrupted_at_s is None:
            self.interrupted_at_s = now_s
            # not `print`, because the signal may have interrupted one
            if self.ranks.is_first:
                os.write(
                    2, b"stopping after this micro-batch; Ctrl-C again: at once, no checkpoint\n"
                )
        elif now_s - self.interrupted_at_s >= SECOND_SIGNAL_S:
            raise KeyboardInterrupt("stopped without a checkpoint: the same command continues")

    def _next_batch(self, batches: Any) -> tuple[Batch, State]:
        try:
            return next(batches)  # type: ignore[no-any-return]
        except DataError as error:
            if self.ranks.world > 1:
                # No checkpoint is written, because that needs all ranks, and the others only see that
                # this one is gone
                raise TrainError(f"rank {self.ranks.rank}: {error}") from None
            self._save_and_wait()
            raise TrainError(error) from None

    def _step(self, batch: Batch) -> list[dict[str, Tensor]]:
        """Trains on one global batch and returns the losses of its micro-batches."""
        step, t = self.progress.step, self.config.train
        for group, share in zip(self.adam.param_groups, self.adam.shares, strict=True):
            group["lr"] = share * lr_at(t, step, self.total)
        # Seeded by the step, so that dropout is the same after a resume
        torch.manual_seed(int(bits(t.seed, DROPOUT_STREAM, step, self.ranks.rank)) >> 1)
        arguments = self.task.arguments(batch, step, self.total)
        reports: list[dict[str, Tensor]] = []
        count = -(-len(batch.places) // self.micro)
        for start in range(0, len(batch.places), self.micro):
            if reports:
                lost = f"{len(reports)} of {count} micro-batches lost"
                self._stop_if_asked(f"step {step + 1} begins again: {lost}")
            losses = self.engine(*slice_arguments(arguments, start, start + self.micro))
            self.engine.backward(losses["loss"])
            self.engine.step()
            reports.append({name: value.detach() for name, value in losses.items()})
        self.task.after_step(self.engine.module)
        self.progress.step += 1
        self.recent.append((step, batch.places))
        return reports

    def _after_step(self, losses: list[dict[str, Tensor]], batch: Batch) -> None:
        step, t = self.progress.step, self.config.train
        self.progress.crops_seen = self.loader_state["crops_seen"]
        validate_every = t.validate_every
        self.progress.validation_due = validate_every > 0 and (
            step % validate_every == 0 or step == self.total
        )
        if step % t.log_every == 0 or step in (1, self.total):
            self._log(losses, batch)
            if float(self.adam.in_a_row) >= t.max_nonfinite:
                self._save_and_wait()  # the weights are those of the last good step
                raise TrainError(self._describe_nonfinite())
        if self.progress.validation_due:
            self._validate()

    def _log(self, reports: list[dict[str, Tensor]], batch: Batch) -> None:
        names = list(reports[0])
        rows = [torch.stack([report[name].float() for name in names]) for report in reports]
        mean = sum_over_ranks(torch.stack(rows).mean(0)) / self.ranks.world
        if self.logger is None:
            return
        values = dict(zip(names, mean.tolist(), strict=True))
        if batch.skipped:
            say(
                f"skipped as unreadable: {'; '.join(bad_crop.reason for bad_crop in batch.skipped)}"
            )
        if warning := self.task.warning(values):
            say(f"warning: {warning}")
        progress, speed = self.progress, self.loader.meter.snapshot()
        crops_per_s = speed["crops_per_s"] * self.ranks.world
        self.logger.log(
            {
                **values,
                **speed,
                **self.task.extra_metrics(progress.step - 1),
                "step": progress.step,
                "crops_seen": progress.crops_seen,
                "epoch": progress.crops_seen / self.loader.order.crops_per_epoch,
                "lr": lr_at(self.config.train, progress.step - 1, self.total),
                "grad_norm": float(self.adam.norm),
                "skipped_steps": int(self.adam.skipped),
                "memory_gb": memory_gb(self.ranks.device),
                "crops_per_s": crops_per_s,
                "mfu": crops_per_s * self.task.flops_per_crop / self.peak_flops,
            }
        )

    def _describe_nonfinite(self) -> str:
        """Returns a sentence that names the crops of the last skipped steps."""
        crops = []
        for step, places in list(self.recent)[-3:]:
            rows = ", ".join(map(str, places.row[:8].tolist()))
            url = self.task.datasets[int(places.dataset[0])].root.url
            crops.append(f"step {step + 1}: rows {rows} ... of {url}")
        return (
            f"loss or gradient was not finite in {self.config.train.max_nonfinite} steps in a row "
            "(train.max_nonfinite): lower train.lr, set train.clip_norm, or inspect the crops "
            f"(rank {self.ranks.rank}): {'; '.join(crops)}"
        )

    def _validate(self) -> None:
        started_s = time.perf_counter()
        message = f"the validation of step {self.progress.step} begins again"
        # Not compiled, because another graph is not worth it for a few batches
        with torch.compiler.set_stance("force_eager"):
            row = self.task.validate(self.engine, lambda: self._stop_if_asked(message))
        self.progress.validation_due = False
        if self.logger is not None and row:
            counts = {"step": self.progress.step, "crops_seen": self.progress.crops_seen}
            self.logger.log_validation(counts | row)
        if self.progress.step > 0:  # the untrained model never counts as the best
            self._compare_with_best(row)
        self.loader.meter.exclude(time.perf_counter() - started_s)

    def _compare_with_best(self, row: dict[str, float]) -> None:
        name, sign = self.task.best
        progress = self.progress
        value = row.get(name, np.nan)
        best = progress.best.get(name, -sign * np.inf)
        if np.isfinite(value) and sign * (value - best) > 0:
            progress.best = {"step": progress.step, name: value, **self.task.chosen_values()}
            progress.stale = 0
            self._save()
        elif np.isfinite(value) or progress.best:
            # nothing is counted before the metric was defined once: it may be undefined on these crops
            progress.stale += 1

    def _save_is_due(self) -> bool:
        """Returns True, on all ranks at the same step, if enough steps or enough minutes on rank 0's
        clock have passed since the last checkpoint. With several ranks the clock's answer comes one
        step late, and does not count if a checkpoint was written meanwhile."""
        t, step = self.config.train, self.progress.step
        late = time.monotonic() - self.saved_at_s >= 60 * t.save_every_minutes
        asked_at_step = self.asked_to_save(step if late and self.ranks.is_first else 0)
        by_step = 0 < t.save_every_steps <= step - self.saved.step
        return by_step or asked_at_step > self.saved.step

    def _save_and_wait(self) -> None:
        self._save()
        self.writer.wait()

    def _save(self) -> None:
        """Writes a checkpoint of this step while training continues, but none of the untrained model.
        If this step has a checkpoint already, only its progress is changed, because writing it
        again would delete it first."""
        self.progress.skipped_steps = int(self.adam.skipped)
        self.progress.in_a_row = int(self.adam.in_a_row)
        if self.progress.step == 0 or self.progress == self.saved:
            return
        if self.progress.step > self.saved.step:
            self._write_checkpoint()
        else:  # this step has a checkpoint and was only validated since
            self.writer.amend_progress(vars(self.progress))
        self.saved, self.saved_at_s = replace(self.progress), time.monotonic()

    def _write_checkpoint(self) -> None:
        facts = run_facts(self.config, self.task.datasets, self.ranks)
        state = {**facts, **self.task.resume_facts(), **vars(self.progress)}
        self.writer.save(self.engine, state, self.loader_state)


def run_facts(config: RunConfig, datasets: Sequence[Dataset], ranks: Ranks) -> dict[str, Any]:
    """Returns facts about a run for its checkpoints and for run.json."""
    return {
        "format": 1,
        "datasets": [dataset.fingerprint for dataset in datasets],
        # Absolute paths, unlike those in `config`
        "dataset_paths": [dataset.root.url for dataset in datasets],
        "crops": [len(dataset) for dataset in datasets],
        "sources": sorted({name for dataset in datasets for name in source_names(dataset)}),
        "preprocessing_sha256": datasets[0].preprocessing_sha256,
        "world": ranks.world,
        "zero_stage": zero_stage(config),
        "config": config.tree(),
    }
