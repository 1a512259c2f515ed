"""How fast, and of what is possible how much.

    meter = Meter(flops_per_crop, ranks.world, peak_tflops(config.train, device))
    meter.done(crops); meter.snapshot()       # crops_per_s and mfu since the last one

MFU: the floating-point operations that the model needs by formula (engine.model.config.flops_per_crop, forward and backward),
divided by what the devices can do: train.peak_tflops, or a matrix product measured at the start, which is below the data sheet.
"""

import os
import time
import warnings
from functools import partial
from typing import Any

import torch

from engine.config import TrainConfig

PRODUCTS = 60  # the fastest counts: a machine may be busy for a moment
COMPILED = {"cpu": "eager", "cuda": "layers"}  # unless train.compile says
AGAIN = {"realize_opcount_threshold": 45}  # a GPU computes again up to so many operations before it reads float32 from memory


def peak_tflops(config: TrainConfig, device: torch.device) -> float:
    if config.peak_tflops:
        return config.peak_tflops
    size = 8192 if device.type == "cuda" else 768
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    a = torch.randn(size, size, dtype=dtype, device=device)  # zeros and ones cost a GPU less power
    best_s = float("inf")
    for _ in range(PRODUCTS):
        started = _now(device)
        a @ a
        best_s = min(best_s, _now(device) - started)
    return 2 * size**3 / best_s / 1e12


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def compile_model(model: Any, how: str, **options: Any) -> None:
    """`layers` are alike, so they are compiled once: nine tenths of the work; and, each for itself, what else has many small
    operations. `step`: forward and loss as one graph."""
    options = options or {"options": AGAIN}
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch._inductor")  # about itself
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # float32 is meant to be float32
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo looks, not we
    if how == "step":
        model.compile(**options)
    if how == "layers":
        for layer in getattr(model.encoder, "layers", ()):  # another encoder may have none
            layer.compile(**options)
        for owner, names in ((model.encoder, ("features", "enter")), (model, ("draw", "compare", "pool"))):
            for name in filter(partial(hasattr, owner), names):
                setattr(owner, name, torch.compile(getattr(owner, name), **options))


def memory_gb(device: torch.device) -> float:
    """The most so far on a GPU; of the process now on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9


class Meter:
    def __init__(self, flops_per_crop: float, world: int, peak: float) -> None:
        self.flops = flops_per_crop
        self.possible = world * peak * 1e12
        self.crops, self.since = 0, time.perf_counter()

    def done(self, crops: int) -> None:
        self.crops += crops

    def pause(self, seconds: float) -> None:
        """What was no training: validation, checkpoints."""
        self.since += seconds

    def snapshot(self) -> dict[str, float]:
        now = time.perf_counter()
        per_s = self.crops / max(now - self.since, 1e-9)
        self.crops, self.since = 0, now
        return {"crops_per_s": per_s, "mfu": per_s * self.flops / self.possible}
