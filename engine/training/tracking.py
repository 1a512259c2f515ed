"""What a run tells: a line on the screen, metrics.jsonl, validation.jsonl, run.json, config.yaml, and train.track's boards.

    tracker = Tracker(run, config, keys, facts, resumed_step, total)       # rank 0 only
    tracker.log({"step": 10, "loss": 4.2, ...})

A run that goes on after a kill moves the lines after the step that it goes on from to metrics.cut.jsonl and
validation.cut.jsonl: the files look as if nothing had happened.
"""

import importlib.metadata
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from data_tools.cli import say
from engine.common import write_whole
from engine.config import Settings
from engine.evaluation.run_files import METRICS, VALID, VALIDATION
from engine.training.loggers import open_boards

PACKAGES = ("torch", "deepspeed", "numpy", "pydantic", "safetensors", "nvidia-dali-cuda130", "nvidia-dali-cuda120")


class Tracker:
    def __init__(
        self, run: Path, config: Settings, keys: tuple[str, ...], facts: dict[str, Any], step: int, total: int
    ) -> None:
        self.run, self.keys, self.total, self.first, self.began = run, keys, total, step, time.perf_counter()
        run.mkdir(parents=True, exist_ok=True)
        write_whole(run / "config.yaml", yaml.safe_dump(config.tree(), sort_keys=False))
        write_whole(run / "run.json", json.dumps(facts | hardware() | versions(), indent=1) + "\n")
        self.boards = open_boards(run, config, step, say)
        for name in (METRICS, VALIDATION):
            _cut(run / name, step)
        self.files = {name: open(run / name, "a", buffering=1) for name in (METRICS, VALIDATION)}  # noqa: SIM115

    def log(self, row: dict[str, Any]) -> None:
        whole = {key: row.get(key) for key in self.keys}
        self._write(METRICS, whole, row)
        say(line(whole, self.total, self._left_s(int(row["step"]))))

    def validated(self, row: dict[str, Any]) -> None:
        self._write(VALIDATION, row, {f"{VALID}{key}": value for key, value in row.items()})
        say("  ".join(["  validation", *(f"{k} {v:.4g}" for k, v in row.items() if k not in ("step", "crops_seen"))]))

    def note(self, text: str) -> None:
        say(text)

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.boards.close()

    def _write(self, name: str, row: dict[str, Any], curves: dict[str, Any]) -> None:
        """`curves`: for the boards, and more than a file's line has."""
        step = int(row["step"])
        self.files[name].write(json.dumps(_finite(row), allow_nan=False) + "\n")
        shown = {key: value for key, value in _finite(curves).items() if not key.endswith("step") and value is not None}
        self.boards.log(shown, step)

    def _left_s(self, step: int) -> float:
        return (time.perf_counter() - self.began) / max(step - self.first, 1) * (self.total - step)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def line(row: dict[str, Any], total: int, left_s: float) -> str:
    parts = ", ".join(f"{k[5:]} {row[k]:.3f}" for k in row if k.startswith("loss_") and row[k] is not None)
    speed = f"{row['crops_per_s']:.1f} crops/s, data wait {row['data_wait_pct']:.1f} %, MFU {100 * row['mfu']:.1f} %"
    parts = f" ({parts})" if parts else ""
    return f"step {row['step']}/{total}  loss {row['loss']:.4f}{parts}  lr {row['lr']:.2g}  {speed}  {_duration(left_s)} left"


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _cut(path: Path, step: int) -> None:
    """Lines of steps that will be done again (all, if the run begins), and one that a kill cut off, move to another file."""
    if not path.is_file():
        return
    kept: list[bytes] = []
    cut: list[bytes] = []
    for text in path.read_bytes().splitlines(keepends=True):
        try:
            done = step > 0 and json.loads(text)["step"] <= step
        except (ValueError, LookupError, TypeError, RecursionError):
            done = False
        (kept if done else cut).append(text)
    if cut:
        with open(path.with_name(f"{path.stem}.cut{path.suffix}"), "ab") as file:
            file.writelines([*cut, b"" if cut[-1].endswith(b"\n") else b"\n"])
            file.flush()
            os.fsync(file.fileno())
        write_whole(path, b"".join(kept))


def versions() -> dict[str, Any]:
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": {"python": platform.python_version(), **installed}, "command": sys.argv}


def hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"hardware": {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "gpus": gpus}}
