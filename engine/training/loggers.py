"""Writes the metrics of a run: progress lines, files in RUN, and curves for tracking services.

    logger = RunLogger(run, config, keys, facts, done, total)      # on rank 0 only
    logger.services |= open_services(run, config, step)            # engine.training.tracking
    logger.log({"step": 10, "loss": 4.2, ...})
    logger.close()

MFU: the floating-point operations that the model needs by formula
(engine.model.config.flops_per_crop, forward and backward), divided by the peak of the devices:
train.peak_tflops, or a matrix product timed at the start, which is below the data sheet. If a
service fails, it is dropped and training continues. Lines of steps that a resumed run repeats move
to metrics.cut.jsonl and validation.cut.jsonl.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from tqdm.auto import tqdm

from omnilead.data_tools.io.storage import write_whole
from omnilead.data_tools.io.terminal import is_notebook, say

from ..settings.run_files import METRICS, PROMETHEUS, RUN_FACTS, VALID_PREFIX, VALIDATION
from .config import RunConfig, TrainConfig
from .tracking import Service

LINE_COLUMNS = 100  # most characters in a line of the terminal
# number of matrix products to time; the fastest counts, as the machine may be busy for a moment
TIMED_MATMULS = 60
PACKAGES = (
    "torch",
    "deepspeed",
    "numpy",
    "pydantic",
    "safetensors",
    "nvidia-dali-cuda130",
    "nvidia-dali-cuda120",
)
Row = dict[str, Any]


def peak_tflops(config: TrainConfig, device: torch.device) -> float:
    if config.peak_tflops:
        return config.peak_tflops
    size = 8192 if device.type == "cuda" else 768
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    # random numbers, because zeros and ones cost a GPU less power
    a = torch.randn(size, size, dtype=dtype, device=device)
    best_s = float("inf")
    for _ in range(TIMED_MATMULS):
        started = _time_after_sync_s(device)
        a @ a
        best_s = min(best_s, _time_after_sync_s(device) - started)
    return 2 * size**3 / best_s / 1e12


def _time_after_sync_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def memory_gb(device: torch.device) -> float:
    """Returns the peak memory of a GPU so far; on a CPU the resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9


class RunLogger:
    def __init__(
        self,
        run: Path,
        config: RunConfig,
        keys: tuple[str, ...],
        facts: Row,
        done: tuple[int, int],  # (last step that is trained, last step that is validated)
        total: int,
    ) -> None:
        step, validated = done
        self.keys, self.total, self.first_step = keys, total, step
        self.started_s = time.perf_counter()
        self.prometheus = run / PROMETHEUS
        self.gauges: dict[str, float] = {
            "steps": total,
            "started_at_seconds": time.time(),
            "first_step": step,
        }
        run.mkdir(parents=True, exist_ok=True)
        write_whole(run / "config.yaml", yaml.safe_dump(config.tree(), sort_keys=False))
        write_whole(run / RUN_FACTS, json.dumps(facts | software_and_hardware(), indent=1) + "\n")
        self.services: dict[str, Service] = {}  # opened by engine.training.tracking
        move_repeated_lines(run / METRICS, step)
        move_repeated_lines(run / VALIDATION, validated)
        self.files = {name: open(run / name, "a", buffering=1) for name in (METRICS, VALIDATION)}  # noqa: SIM115
        self.bar = (
            tqdm(total=total, initial=step, unit=" steps", desc=run.name) if is_notebook() else None
        )

    def log(self, row: Row) -> None:
        line = {key: row.get(key) for key in self.keys}
        self._write(METRICS, line, row)
        left_s = (
            (time.perf_counter() - self.started_s)
            / max(row["step"] - self.first_step, 1)
            * (self.total - row["step"])
        )
        if self.bar is None:
            say(progress_lines(line, self.total, left_s))
        else:
            self.bar.set_postfix_str(
                f"loss {row['loss']:.4f}, {row['crops_per_s']:.1f} crops/s", refresh=False
            )
            self.bar.update(row["step"] - self.bar.n)

    def log_validation(self, row: Row) -> None:
        self._write(VALIDATION, row, {f"{VALID_PREFIX}{key}": value for key, value in row.items()})
        values = [f"{k} {v:.4g}" for k, v in row.items() if k not in ("step", "crops_seen")]
        say(fold_line("  ".join(["  validation", *values])))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        for file in self.files.values():
            file.close()
        self._call_services(lambda service: service.close())

    def _write(self, name: str, line: Row, curves: Row) -> None:
        """Writes `line` to the file RUN/`name`, and `curves` to the tracking services."""
        self.files[name].write(
            json.dumps({k: v if _is_finite(v) else None for k, v in line.items()}, allow_nan=False)
            + "\n"
        )
        finite_curves = {
            k: v
            for k, v in curves.items()
            if not k.endswith("step") and v is not None and _is_finite(v)
        }
        self._call_services(lambda service: service.log(finite_curves, int(line["step"])))
        self.gauges |= finite_curves | {"logged_at_seconds": time.time()}
        if name == METRICS:
            self.gauges["step"] = line["step"]
            # RUN was moved, which the next checkpoint will report
            with suppress(FileNotFoundError):
                write_gauges(self.prometheus, self.gauges)

    def _call_services(self, call: Callable[[Service], None]) -> None:
        for name, service in list(self.services.items()):
            try:
                call(service)
            except Exception as error:  # no error of a service may stop the training
                say(
                    f"warning: {name} failed and is no longer used: "
                    f"{' '.join(str(error).split())[:200]}"
                )
                del self.services[name]


def write_gauges(path: Path, gauges: Mapping[str, float]) -> None:
    """Writes gauges for the textfile collector of Prometheus' node_exporter, in the OpenMetrics
    format."""
    run = path.parent.resolve().name
    # the only characters to escape in this format
    for letter, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
        run = run.replace(letter, escaped)
    lines = []
    for name, value in gauges.items():
        metric = "omnilead_" + re.sub(r"\W", "_", name, flags=re.ASCII)
        lines += [f"# TYPE {metric} gauge", f'{metric}{{run="{run}"}} {value}']
    temporary = path.with_suffix(".new")  # the collector reads only *.prom
    temporary.write_text("\n".join([*lines, "# EOF\n"]))
    os.replace(temporary, path)  # not synced to the disk, so a crash may lose this file


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def fold_line(line: str) -> str:
    return textwrap.fill(line, LINE_COLUMNS, subsequent_indent="    ")


def progress_lines(row: Row, total: int, left_s: float) -> str:
    """Returns the progress line and, if the loss has parts, a second line with them."""
    parts = ", ".join(
        f"{key[5:]} {row[key]:.3f}"
        for key in row
        if key.startswith("loss_") and row[key] is not None
    )
    speed = (
        f"{row['crops_per_s']:.1f} crops/s, data wait {row['data_wait_pct']:.1f} %, MFU "
        f"{100 * row['mfu']:.1f} %"
    )
    line = (
        f"step {row['step']}/{total}  loss {row['loss']:.4f}  lr {row['lr']:.2g}  {speed}  "
        f"{timedelta(seconds=int(left_s))} left"
    )
    lines = [line, f"    losses: {parts}"] if parts else [line]
    return "\n".join(map(fold_line, lines))


def move_repeated_lines(path: Path, step: int) -> None:
    """Moves the lines after `step`, and a line that a kill truncated, to NAME.cut.jsonl, because
    the resumed run repeats those steps."""
    if not path.is_file():
        return
    kept_lines: list[bytes] = []
    cut_lines: list[bytes] = []
    for text in path.read_bytes().splitlines(keepends=True):
        try:
            is_done = json.loads(text)["step"] <= step
        except (ValueError, LookupError, TypeError, RecursionError):
            is_done = False
        (kept_lines if is_done else cut_lines).append(text)
    if cut_lines:
        with open(path.with_name(f"{path.stem}.cut{path.suffix}"), "ab") as file:
            file.writelines([*cut_lines, b"" if cut_lines[-1].endswith(b"\n") else b"\n"])
            file.flush()
            os.fsync(file.fileno())
        write_whole(path, b"".join(kept_lines))


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that training uses."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def software_and_hardware() -> Row:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    hardware = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "gpus": gpus}
    return {"hardware": hardware, "versions": versions(), "command": sys.argv}
