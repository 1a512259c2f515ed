"""Forward, backward, step, until the steps are done; now and then a log line, a validation, a checkpoint.

    Loop(config, run, ranks, engine, adam, loader, datasets, progress, tracker).train()

Between log lines nothing waits for the device. Steps whose loss or gradient is not finite change nothing and are counted
(engine.training.optimizer); after train.max_nonfinite in a row the run ends. SIGTERM: a checkpoint at the next step, exit 0.
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

from data_tools.dataset import Dataset
from engine.config import Config, micro_batch, zero_stage
from engine.model.quantizer import temperature
from engine.objectives.gather import total as sum_over_ranks
from engine.pipelines.counter import bits
from engine.pipelines.loader import Batch, Loader, State
from engine.training import checkpoint, throughput
from engine.training.distributed import Agreement, Ranks
from engine.training.optimizer import GuardedAdamW
from engine.training.schedule import lr_at
from engine.training.tracking import Tracker
from engine.training.validation import HeldOut, Inputs, Patients, Probe

DROPOUT_STREAM = 200
COLLAPSED_SHARE, COLLAPSED_LOGS = 0.02, 3  # of all codes; log lines in a row


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
    config: Config
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
        self.ids = Patients(self.datasets) if self.config.objective.needs_ids else None
        self.held_out = HeldOut(self.config, self.datasets, self.ranks) if t.validate_every else None
        self.probe = Probe(self.config, self.datasets, self.ranks) if t.validate_every and t.probe_patients else None
        self.micro, _ = micro_batch(self.config, self.ranks.world)
        self.meter = throughput.Meter(self.config, self.ranks.world, throughput.peak_tflops(t, self.ranks.device))
        self.recent: deque[tuple[int, Batch]] = deque(maxlen=t.max_nonfinite)
        self.adam.skipped.fill_(self.progress.skipped_steps)
        self.adam.in_a_row.fill_(self.progress.in_a_row)
        self.low_logs, self.terminated, self.state = 0, False, State()
        self.saved_at_step, self.saved_at_s = self.progress.step, time.monotonic()

    def train(self) -> bool:
        """Whether all steps are done; if not, it was asked to stop."""
        before = signal.signal(signal.SIGTERM, self._on_sigterm)
        agree = Agreement(self.ranks, ("stop", "save"))
        self.engine.train()
        batches = iter(self.loader)
        try:
            while self.progress.step < self.total:
                batch, self.state = next(batches)
                losses = self._step(batch)
                self._after_step(losses, batch)
                wish = agree({"stop": self.terminated, "save": self.ranks.first and self._save_is_due()})
                if wish["stop"] or wish["save"]:
                    self._save()
                if wish["stop"]:
                    return False
            if self.saved_at_step != self.progress.step:
                self._save()
            return True
        finally:
            agree.finish()
            batches.close()  # type: ignore[attr-defined]
            signal.signal(signal.SIGTERM, before)

    def _on_sigterm(self, *_: Any) -> None:
        self.terminated = True

    def _step(self, batch: Batch) -> list[dict[str, Tensor]]:
        """One global batch; what its micro-batches report."""
        step, config = self.progress.step, self.config
        for group in self.adam.param_groups:
            group["lr"] = lr_at(config.train, step, self.total)
        torch.manual_seed(
            int(bits(config.train.seed, DROPOUT_STREAM, step, self.ranks.rank)) >> 1
        )  # dropout, the same after a kill
        tau = torch.tensor(temperature(config.model, step))
        inputs = Inputs.of(batch, config, self.ids)
        called, reports = self.adam.calls, []
        for start in range(0, len(batch.places), self.micro):
            part = inputs.part(start, start + self.micro)
            losses = self.engine(part.x_BSLT, part.keys_BS, tau.to(self.ranks.device, non_blocking=True), part.ids_B)
            self.engine.backward(losses["loss"])
            self.engine.step()
            reports.append({name: value.detach() for name, value in losses.items()})
        if self.adam.calls == called:
            self.adam.refused()
        self.progress.step += 1
        self.progress.crops_seen = self.state["crops_seen"]
        self.meter.done(config.train.batch_crops)
        self.recent.append((step, batch))
        return reports

    def _after_step(self, losses: list[dict[str, Tensor]], batch: Batch) -> None:
        step, t = self.progress.step, self.config.train
        last = step == self.total
        if step % t.log_every == 0 or step == 1 or last:
            self._log(losses, batch)
        if step % min(t.log_every, t.max_nonfinite) == 0 and float(self.adam.in_a_row) >= t.max_nonfinite:
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
            self.tracker.note(f"left out as unreadable: {'; '.join(reason for *_, reason in batch.skipped)}")
        step = self.progress.step
        self._warn_of_collapse(values)
        self.tracker.log(
            values
            | self.meter.snapshot()
            | {
                "step": step,
                "crops_seen": self.progress.crops_seen,
                "epoch": self.progress.crops_seen / self.loader.order.crops_per_epoch,
                "lr": self.adam.param_groups[0]["lr"],
                "grad_norm": float(self.adam.norm),
                "data_wait_pct": self.loader.meter.snapshot()["data_wait_pct"],
                "gumbel_tau": temperature(self.config.model, step - 1) if self.config.objective.local else None,
                "skipped_steps": int(self.adam.skipped),
                "memory_gb": throughput.memory_gb(self.ranks.device),
            }
        )

    def _warn_of_collapse(self, values: dict[str, float]) -> None:
        in_use, m = values.get("code_perplexity"), self.config.model
        if in_use is None or self.tracker is None:
            return
        low = max(COLLAPSED_SHARE * m.codebooks * m.codes, 1.25 * m.codebooks)
        self.low_logs = self.low_logs + 1 if in_use < low else 0
        if self.low_logs == COLLAPSED_LOGS:
            self.tracker.note(
                f"warning: the quantiser collapses: {in_use:.1f} of {m.codebooks * m.codes} codes are in use. Raise "
                f"objective.diversity (now {self.config.objective.diversity}), lower train.lr (now {self.config.train.lr}), "
                f"or let the temperature fall later (model.tau_decay, now {m.tau_decay})"
            )

    def _unfit(self) -> str:
        """Which crops the refused steps saw."""
        named = []
        for step, batch in list(self.recent)[-3:]:
            rows = batch.places.row[:8].tolist()
            dataset = self.datasets[int(batch.places.dataset[0])].root.url
            named.append(f"step {step + 1}: rows {', '.join(map(str, rows))} ... of {dataset}")
        count = self.config.train.max_nonfinite
        return (
            f"loss or gradient was not finite in {count} steps in a row (train.max_nonfinite): lower train.lr, set "
            f"train.clip_norm, or look at the crops (rank {self.ranks.rank}): {'; '.join(named)}"
        )

    def _validate(self) -> None:
        began = time.perf_counter()
        where = {"step": self.progress.step, "crops_seen": self.progress.crops_seen}
        row: dict[str, float] = dict(where)
        if self.held_out is not None and self.held_out.crops:
            row = self.held_out.losses(self.engine, where)
        if self.probe is not None and self.probe.pairs:
            row["identification_accuracy"] = self.probe.accuracy(self.engine)
        best = self.progress.best
        if np.isfinite(row.get("loss", np.nan)) and row["loss"] < best.get("loss", np.inf):
            self.progress.best = {"step": self.progress.step, "loss": row["loss"]}
            self._save()
        if self.tracker is not None and len(row) > len(where):
            self.tracker.validated(row)
        self.meter.pause(time.perf_counter() - began)

    def _save_is_due(self) -> bool:
        t = self.config.train
        by_step = t.save_every_steps and self.progress.step - self.saved_at_step >= t.save_every_steps
        return bool(by_step) or time.monotonic() - self.saved_at_s >= 60 * t.save_every_minutes

    def _save(self) -> None:
        if self.saved_at_step == self.progress.step and self.progress.best.get("step") != self.progress.step:
            return
        self.progress.skipped_steps, self.progress.in_a_row = int(self.adam.skipped), int(self.adam.in_a_row)
        state = facts(self.config, self.datasets, self.ranks) | vars(self.progress)
        checkpoint.save(self.engine, self.run, state, self.state, self.ranks, self.config.train.keep)
        self.saved_at_step, self.saved_at_s = self.progress.step, time.monotonic()


def facts(config: Config, datasets: Sequence[Dataset], ranks: Ranks) -> dict[str, Any]:
    """What a checkpoint must agree with to be gone on from."""
    return {
        "format": 1,
        "datasets": [dataset.fingerprint for dataset in datasets],
        "preprocessing_sha256": datasets[0].meta["preprocessing_sha256"],
        "world": ranks.world,
        "zero_stage": zero_stage(config),
        "config": config.tree(),
    }
