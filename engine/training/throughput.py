"""Throughput and MFU, memory, and what torch.compile is given.

    throughput = Throughput(flops_per_crop, ranks.world, peak_tflops(config.train, device))
    throughput.done(crops); throughput.snapshot()     # crops_per_s and mfu since the last snapshot

MFU: the floating-point operations that the model needs by formula (engine.model.config.flops_per_crop, forward and backward),
divided by what the devices can do: train.peak_tflops, or a matrix product timed at the start, which is below the data sheet.
"""

import os
import time
import warnings
from typing import Any

import torch

from engine.config import TrainConfig

MATMULS = 60  # the fastest counts: a machine may be busy for a moment
COMPILED = {"cpu": "eager", "cuda": "layers"}  # default of train.compile
# A GPU recomputes up to so many operations before it reads float32 from memory
INDUCTOR_OPTIONS = {"realize_opcount_threshold": 45}


def peak_tflops(config: TrainConfig, device: torch.device) -> float:
    if config.peak_tflops:
        return config.peak_tflops
    size = 8192 if device.type == "cuda" else 768
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    a = torch.randn(size, size, dtype=dtype, device=device)  # zeros and ones cost a GPU less power
    best_s = float("inf")
    for _ in range(MATMULS):
        started = _now(device)
        a @ a
        best_s = min(best_s, _now(device) - started)
    return 2 * size**3 / best_s / 1e12


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def compile_model(model: Any, how: str, **options: Any) -> None:
    """`layers`: the transformer layers, which are equal and so compiled once, and other parts of many small operations.
    `step`: forward and loss as one graph."""
    options = options or {"options": INDUCTOR_OPTIONS}
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch._inductor")  # about itself
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # float32 is meant to be float32
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo looks, not we
    if how == "step":
        model.compile(**options)
    elif how == "layers":
        for layer in getattr(model.encoder, "layers", ()):  # another encoder may have none
            layer.compile(**options)
        for owner, names in ((model.encoder, ("features", "enter")), (model, ("draw", "compare", "pool"))):
            for name in names:
                if hasattr(owner, name):
                    setattr(owner, name, torch.compile(getattr(owner, name), **options))


def memory_gb(device: torch.device) -> float:
    """GPU: the peak so far; CPU: resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9


class Throughput:
    def __init__(self, flops_per_crop: float, world: int, peak: float) -> None:
        self.flops_per_crop, self.peak_flops = flops_per_crop, world * peak * 1e12
        self.crops, self.since = 0, time.perf_counter()

    def done(self, crops: int) -> None:
        self.crops += crops

    def pause(self, seconds: float) -> None:
        """Time that was not training, such as validation."""
        self.since += seconds

    def snapshot(self) -> dict[str, float]:
        now = time.perf_counter()
        per_s = self.crops / max(now - self.since, 1e-9)
        self.crops, self.since = 0, now
        return {"crops_per_s": per_s, "mfu": per_s * self.flops_per_crop / self.peak_flops}
