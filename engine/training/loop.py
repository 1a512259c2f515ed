"""Forward, backward, step, until the steps are done; now and then a log line, a validation, a checkpoint.

    Loop(task, config, run, ranks, engine, adam, loader, datasets, progress, total, tracker).train()

What is trained is the task's: engine.training.pretraining, engine.training.finetuning. Between log lines nothing waits for the
device. Steps whose loss or gradient is not finite change nothing and are counted (engine.training.optimizer); after
train.max_nonfinite in a row the run ends. SIGTERM: a checkpoint at the next step, exit 0.
"""

import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_tools.dataset import DataError, Dataset
from engine.config import Settings, micro_batch, zero_stage
from engine.data.counter import bits
from engine.data.leakage import split_of
from engine.data.loader import Batch, Loader
from engine.data.order import Places
from engine.data.state import State
from engine.evaluation.run_files import DIAGNOSTICS, write_diagnostics
from engine.objectives.contrastive import sum_over_ranks
from engine.training import checkpoint, throughput
from engine.training.distributed import Agreement, Ranks
from engine.training.optimizer import GuardedAdamW
from engine.training.schedule import lr_at
from engine.training.task import Task
from engine.training.tracking import Tracker

DROPOUT_STREAM = 200


class TrainError(Exception):
    """The run itself went wrong: one line, exit 1."""


@dataclass
class Progress:
    """Where the run stands; what a checkpoint says of it."""

    step: int = 0  # steps done
    crops_seen: int = 0
    skipped_steps: int = 0
    in_a_row: int = 0
    best: dict[str, float] = field(default_factory=dict)


@dataclass
class Loop:
    task: Task
    config: Settings
    run: Path
    ranks: Ranks
    engine: Any
    adam: GuardedAdamW
    loader: Loader
    datasets: Sequence[Dataset]
    progress: Progress
    total: int  # steps
    tracker: Tracker | None  # on rank 0

    def __post_init__(self) -> None:
        t = self.config.train
        self.micro, _ = micro_batch(self.config, self.ranks.world)
        peak = throughput.peak_tflops(t, self.ranks.device)
        self.meter = throughput.Meter(self.task.flops_per_crop, self.ranks.world, peak)
        self.recent: deque[tuple[int, Places]] = deque(maxlen=t.max_nonfinite)
        self.adam.skipped.fill_(self.progress.skipped_steps)
        self.adam.in_a_row.fill_(self.progress.in_a_row)
        self.terminated, self.state = False, State()
        self.saved_at_step, self.saved_at_s = self.progress.step, time.monotonic()
        self.place = checkpoint.place(self.run)

    def train(self) -> bool:
        """Whether all steps are done; if not, it was asked to stop."""
        before = {asked: signal.signal(asked, self._on_signal) for asked in (signal.SIGTERM, signal.SIGINT)}
        agree = Agreement(self.ranks, ("stop", "save"))
        self.engine.train()
        batches, batch = iter(self.loader), None
        try:
            if self.config.train.validate_every and self.progress.step == 0:
                self._validate()  # the untrained model: here the curves begin
            while self.progress.step < self.total:
                try:
                    batch, self.state = next(batches)
                except DataError as error:  # of this rank alone: the others would only hear that it is gone
                    if self.ranks.world == 1:
                        self._save()
                    raise TrainError(f"rank {self.ranks.rank}: {error}" if self.ranks.world > 1 else str(error)) from None
                losses = self._step(batch)
                self._after_step(losses, batch)
                wish = agree({"stop": self.terminated, "save": self.ranks.first and self._save_is_due()})
                if wish["stop"] or wish["save"]:
                    self._save()
                if wish["stop"]:
                    return False
            if self.saved_at_step != self.progress.step:
                self._save()
            if batch is not None:
                self._diagnose(batch)
            return True
        finally:
            agree.finish()
            batches.close()  # type: ignore[attr-defined]
            for asked, handler in before.items():
                signal.signal(asked, handler)

    def _on_signal(self, *_: Any) -> None:
        self.terminated = True

    def _step(self, batch: Batch) -> list[dict[str, Tensor]]:
        """One global batch; what its micro-batches report."""
        step, config = self.progress.step, self.config
        for group in self.adam.param_groups:
            group["lr"] = lr_at(config.train, step, self.total)
        torch.manual_seed(
            int(bits(config.train.seed, DROPOUT_STREAM, step, self.ranks.rank)) >> 1
        )  # dropout, the same after a kill
        arguments = self.task.arguments(batch, step)
        called, reports = self.adam.calls, []
        for start in range(0, len(batch.places), self.micro):
            part = (a if a is None or a.ndim == 0 else a[start : start + self.micro] for a in arguments)
            losses = self.engine(*part)
            self.engine.backward(losses["loss"])
            self.engine.step()
            reports.append({name: value.detach() for name, value in losses.items()})
        if self.adam.calls == called:
            self.adam.refused()
        self.progress.step += 1
        self.progress.crops_seen = self.state["crops_seen"]
        self.meter.done(config.train.batch_crops)
        self.recent.append((step, batch.places))
        return reports

    def _after_step(self, losses: list[dict[str, Tensor]], batch: Batch) -> None:
        step, t = self.progress.step, self.config.train
        last = step == self.total
        if step % t.log_every == 0 or step == 1 or last:
            self._log(losses, batch)
            if float(self.adam.in_a_row) >= t.max_nonfinite:
                self._save()  # the weights are those of the last good step
                raise TrainError(self._unfit())
        if t.validate_every and (step % t.validate_every == 0 or last):
            self._validate()

    def _log(self, reports: list[dict[str, Tensor]], batch: Batch) -> None:
        names = list(reports[0])
        mean = torch.stack([torch.stack([report[name].float() for name in names]) for report in reports]).mean(0)
        values = dict(zip(names, (sum_over_ranks(mean) / self.ranks.world).tolist(), strict=True))
        if self.tracker is None:
            return
        if batch.skipped:
            self.tracker.note(f"left out as unreadable: {'; '.join(bad.reason for bad in batch.skipped)}")
        step = self.progress.step
        if concern := self.task.concern(values):
            self.tracker.note(concern)
        self.tracker.log(
            values
            | self.loader.meter.snapshot()  # a rank's own crops_per_s gives way to that of all
            | self.meter.snapshot()
            | self.task.values(step - 1)
            | {
                "step": step,
                "crops_seen": self.progress.crops_seen,
                "epoch": self.progress.crops_seen / self.loader.order.crops_per_epoch,
                "lr": self.adam.param_groups[0]["lr"],
                "grad_norm": float(self.adam.norm),
                "skipped_steps": int(self.adam.skipped),
                "memory_gb": throughput.memory_gb(self.ranks.device),
            }
        )

    def _unfit(self) -> str:
        """Which crops the refused steps saw."""
        named = []
        for step, places in list(self.recent)[-3:]:
            rows = places.row[:8].tolist()
            dataset = self.datasets[int(places.dataset[0])].root.url
            named.append(f"step {step + 1}: rows {', '.join(map(str, rows))} ... of {dataset}")
        count = self.config.train.max_nonfinite
        return (
            f"loss or gradient was not finite in {count} steps in a row (train.max_nonfinite): lower train.lr, set "
            f"train.clip_norm, or look at the crops (rank {self.ranks.rank}): {'; '.join(named)}"
        )

    def _validate(self) -> None:
        began = time.perf_counter()
        where = {"step": self.progress.step, "crops_seen": self.progress.crops_seen}
        with torch.compiler.set_stance("force_eager"):  # another graph for a few batches does not pay
            row = self.task.validate(self.engine)
        name, sign = self.task.best
        worst = -sign * np.inf
        trained = self.progress.step > 0  # the untrained model is never the best one: there is nothing of the run in it
        if trained and np.isfinite(row.get(name, np.nan)) and sign * (row[name] - self.progress.best.get(name, worst)) > 0:
            self.progress.best = {"step": self.progress.step, name: row[name]}
            self._save()
        if self.tracker is not None and row:
            self.tracker.validated(where | row)
        self.meter.pause(time.perf_counter() - began)

    def _diagnose(self, batch: Batch) -> None:
        with torch.compiler.set_stance("force_eager"):
            arrays = self.task.diagnostics(self.engine, batch)
        if self.ranks.first:
            write_diagnostics(self.run / DIAGNOSTICS, **arrays)

    def _save_is_due(self) -> bool:
        t = self.config.train
        by_step = t.save_every_steps and self.progress.step - self.saved_at_step >= t.save_every_steps
        if self.progress.step % t.log_every == 0 and checkpoint.place(self.run) != self.place:
            return True  # to hear of it together
        return bool(by_step) or time.monotonic() - self.saved_at_s >= 60 * t.save_every_minutes

    def _save(self) -> None:
        if self.saved_at_step == self.progress.step:  # to write it again would first take it away
            return
        checkpoint.still_there(self.run, self.place, self.ranks)
        self.progress.skipped_steps, self.progress.in_a_row = int(self.adam.skipped), int(self.adam.in_a_row)
        state = facts(self.config, self.datasets, self.ranks) | self.task.facts() | vars(self.progress)
        checkpoint.save(self.engine, self.run, state, self.state, self.ranks, self.config.train.keep)
        self.saved_at_step, self.saved_at_s = self.progress.step, time.monotonic()


def facts(config: Settings, datasets: Sequence[Dataset], ranks: Ranks) -> dict[str, Any]:
    """What a checkpoint must agree with to be gone on from."""
    return {
        "format": 1,
        "datasets": [dataset.fingerprint for dataset in datasets],
        "splits": [split_of(dataset) for dataset in datasets],
        "preprocessing_sha256": datasets[0].meta["preprocessing_sha256"],
        "world": ranks.world,
        "zero_stage": zero_stage(config),
        "config": config.tree(),
    }
