"""Training runs for tests: one rank in this process; several, or a patched one, in processes
forked from one that has imported everything."""

import contextlib
import gc
import importlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from omnilead.engine.config import CONFIGS
from tests.forks import started
from tests.waiting import HANG_S

TINY = """
model: {conv: [[8, 4], [8, 4], [8, 1]], width: 16, layers: 2, heads: 2, ffn: 32, position_kernel: 8, position_groups: 2,
        codes: 8, code_width: 8, projection: 8, tau_decay: 0.9}
train: {steps: 6, batch_crops: 8, precision: fp32, lr: 1e-3, clip_norm: 1.0, log_every: 1, peak_tflops: 1.0, timeout_s: 600}
"""
TUNING = {
    "train.precision": "fp32",
    "train.batch_crops": 8,
    "train.steps": 4,
    "train.lr": 1e-3,
    "train.validate_every": 2,
}
TUNING |= {"train.log_every": 1, "train.peak_tflops": 1.0, "train.timeout_s": 600}
EXACT = (
    "step",
    "crops_seen",
    "epoch",
    "loss",
    "loss_local",
    "loss_global",
    "lr",
    "grad_norm",
    "gumbel_tau",
    "accuracy_local",
)


@dataclass
class Ended:
    codes: list[int | None]
    output: str  # of all ranks

    @property
    def ok(self) -> bool:
        return all(code == 0 for code in self.codes)

    def one_line(self, code: int = 2) -> str:
        assert set(self.codes) == {code} and self.output.count("\n") == 1, self.output
        return self.output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train(arguments: Sequence[str], before: Callable[[], None] | None = None) -> int:
    torch.set_num_threads(1)
    if before:
        before()
    tunes = "start=" in " ".join(arguments) and not arguments[1].endswith("tiny.yaml")
    script = importlib.import_module(
        "omnilead.engine.finetune" if tunes else "omnilead.engine.pretrain"
    )
    code: int = script.main(arguments)
    return code


def nothing() -> None:
    """For `before`: a process of its own, with nothing patched."""


def start(
    tmp: Path,
    arguments: Sequence[str],
    world: int = 1,
    before: Callable[[], None] | None = None,
    **env: str,
) -> list[Any]:
    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    } | env
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [started(train, list(arguments), before, out=tmp / "out.txt", env=env) for env in ranks]


def wait(tmp: Path, processes: list[Any]) -> Ended:
    for process in processes:
        process.join(HANG_S)
    for process in processes:  # one that hangs does not outlive its test
        process.kill()
        process.join()
    output = (tmp / "out.txt").read_text() if (tmp / "out.txt").exists() else ""
    return Ended([process.exitcode for process in processes], output)


def run(
    tmp: Path,
    arguments: Sequence[str],
    world: int = 1,
    before: Callable[[], None] | None = None,
    **env: str,
) -> Ended:
    (tmp / "out.txt").unlink(missing_ok=True)
    if world > 1 or before or env:
        return wait(tmp, start(tmp, arguments, world, before, **env))
    with (
        open(tmp / "out.txt", "w", buffering=1) as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        mock.patch.dict(os.environ),
        mock.patch.object(
            gc, "collect"
        ),  # of all that the tests have imported: half of a tiny run's time
    ):
        code = train(arguments)
    return Ended([code], (tmp / "out.txt").read_text())


def settings(tmp: Path, dataset: str, run: str = "run", **changes: Any) -> list[str]:
    """Arguments for a tiny model; changes as train__steps=3."""
    (tmp / "tiny.yaml").write_text(TINY)
    sets = {"run": str(tmp / run), "data.datasets": json.dumps([dataset])}
    return ["--config", str(tmp / "tiny.yaml"), *_sets(sets, changes)]


def tuning(
    tmp: Path, dataset: str, begin: Path, task: str, run: str = "run", **changes: Any
) -> list[str]:
    """Arguments of a fine-tuning."""
    (tmp / "task.yaml").write_text(f"base: {CONFIGS / 'tasks' / task}.yaml")
    sets = {"run": str(tmp / run), "start": str(begin), "data.datasets": json.dumps([dataset])}
    return ["--config", str(tmp / "task.yaml"), *_sets(sets | TUNING, changes)]


def _sets(sets: dict[str, Any], changes: dict[str, Any]) -> list[str]:
    sets |= {name.replace("__", "."): json.dumps(value) for name, value in changes.items()}
    return [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]


Before = Callable[[], None] | None


def pretrain(
    tmp: Path,
    dataset: str,
    name: str = "run",
    world: int = 1,
    before: Before = None,
    **changes: Any,
) -> Ended:
    return run(tmp, settings(tmp, dataset, name, **changes), world, before)


def finetune(
    tmp: Path,
    dataset: str,
    begin: Path,
    task: str,
    name: str = "run",
    world: int = 1,
    before: Before = None,
    **changes: Any,
) -> Ended:
    return run(tmp, tuning(tmp, dataset, begin, task, name, **changes), world, before)


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def curve(run: Path, keys: Sequence[str] = EXACT) -> list[dict[str, Any]]:
    """The logged values that must be equal bit for bit."""
    return [{key: row[key] for key in keys} for row in rows(run)]
