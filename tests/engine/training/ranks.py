"""Runs of engine/pretrain.py and finetune.py in processes of their own, forked from one that has imported all: quickly."""

import importlib
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.forks import started
from tests.waiting import HANG_S

TINY = """
model: {conv: [[8, 4], [8, 4], [8, 1]], width: 16, layers: 2, heads: 2, ffn: 32, position_kernel: 8, position_groups: 2,
        codes: 8, code_width: 8, projection: 8, tau_decay: 0.9}
train: {steps: 6, batch_crops: 8, precision: fp32, lr: 1e-3, clip_norm: 1.0, log_every: 1, peak_tflops: 1.0, timeout_s: 600}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Ended:
    codes: list[int | None]
    output: str  # of all ranks

    @property
    def ok(self) -> bool:
        return all(code == 0 for code in self.codes)


def train(arguments: Sequence[str], before: Callable[[], None] | None) -> int:
    torch.set_num_threads(1)
    if before:
        before()
    door = importlib.import_module("engine.finetune" if "start=" in " ".join(arguments) else "engine.pretrain")
    code: int = door.main(arguments)
    return code


def start(
    tmp: Path, arguments: Sequence[str], world: int = 1, before: Callable[[], None] | None = None, **env: str
) -> list[Any]:
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | env
    processes = []
    for rank in range(world):
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(started(train, list(arguments), before, out=tmp / "out.txt", env=environment))
    return processes


def wait(tmp: Path, processes: list[Any]) -> Ended:
    for process in processes:
        process.join(HANG_S)
    for process in processes:  # one that hangs does not outlive its test
        process.kill()
        process.join()
    output = (tmp / "out.txt").read_text() if (tmp / "out.txt").exists() else ""
    return Ended([process.exitcode for process in processes], output)


def settings(tmp: Path, dataset: str, run: str = "run", **changes: Any) -> list[str]:
    """Arguments for a tiny model; changes as train__steps=3."""
    (tmp / "tiny.yaml").write_text(TINY)
    sets = {"run": str(tmp / run), "data.datasets": json.dumps([dataset])}
    sets |= {name.replace("__", "."): json.dumps(value) for name, value in changes.items()}
    return ["--config", str(tmp / "tiny.yaml"), *(part for key, value in sets.items() for part in ("--set", f"{key}={value}"))]


def pretrain(
    tmp: Path, dataset: str, run: str = "run", world: int = 1, before: Callable[[], None] | None = None, **changes: Any
) -> Ended:
    (tmp / "out.txt").unlink(missing_ok=True)
    return wait(tmp, start(tmp, settings(tmp, dataset, run, **changes), world, before))


def tuning(tmp: Path, dataset: str, begin: Path, task: str, run: str = "run", **changes: Any) -> list[str]:
    """Arguments of a fine-tuning."""
    sets = {"run": str(tmp / run), "start": str(begin), "data.datasets": json.dumps([dataset]), "head.task": task}
    sets |= {"train.precision": "fp32", "train.batch_crops": 8, "train.steps": 4, "train.lr": 1e-3, "train.validate_every": 2}
    sets |= {"train.log_every": 1, "train.peak_tflops": 1.0, "train.timeout_s": 600}
    sets |= {name.replace("__", "."): json.dumps(value) for name, value in changes.items()}
    (tmp / "empty.yaml").write_text("{}")
    return ["--config", str(tmp / "empty.yaml"), *(part for k, v in sets.items() for part in ("--set", f"{k}={v}"))]


def finetune(
    tmp: Path,
    dataset: str,
    begin: Path,
    task: str,
    run: str = "run",
    world: int = 1,
    before: Callable[[], None] | None = None,
    **changes: Any,
) -> Ended:
    (tmp / "out.txt").unlink(missing_ok=True)
    return wait(tmp, start(tmp, tuning(tmp, dataset, begin, task, run, **changes), world, before))


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


EXACT = ("step", "crops_seen", "epoch", "loss", "loss_local", "loss_global", "lr", "grad_norm", "gumbel_tau", "accuracy_local")


def curve(run: Path) -> list[dict[str, Any]]:
    """What must be equal to the last bit."""
    return [{key: row[key] for key in EXACT} for row in rows(run)]
