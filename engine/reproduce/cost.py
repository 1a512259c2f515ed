"""Estimate how long a plan takes: at first from the speed of a training step, then from the
finished jobs.

    seconds = expected_seconds(plan, folder, flops_per_s(config))       # of each unfinished job

A job's work is crops x FLOPs per crop. Once jobs of a kind are done, the others of that kind are
expected to run at their rate.
"""

import time

import numpy as np
import torch

from omnilead.engine.common import ConfigError
from omnilead.engine.config import Config
from omnilead.engine.data.augmenter import HALF
from omnilead.engine.model.config import flops_per_crop
from omnilead.engine.model.draws import row_keys
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.reproduce.plan import PROGRAMS, JobPlan
from omnilead.engine.reproduce.workdir import WorkDir

STARTUP_S = 10.0  # start-up of a process: imports, the dataset, the first step
MEASURE_S = 3.0


def expected_seconds(plan: JobPlan, folder: WorkDir, flops_per_s: float) -> dict[str, float]:
    rates = {kind: _rate(plan, folder, kind) for kind in PROGRAMS}
    expected = {}
    for job in folder.missing(plan.ordered):
        if rate := rates[job.kind]:
            expected[job.name] = job.work / rate
        else:
            expected[job.name] = STARTUP_S + job.work / flops_per_s
    return expected


def _rate(plan: JobPlan, folder: WorkDir, kind: str) -> float:
    """FLOP/s of the finished jobs of a kind, start-up included; 0 if there are none."""
    work = seconds = 0.0
    for job in plan.ordered:
        if job.kind == kind and folder.done(job) and (took := folder.seconds(job)):
            work += job.work
            seconds += took
    return work / (seconds or 1.0)


def flops_per_s(config: Config) -> float:
    """FLOP/s of forward, backward and Adam on one device of this machine."""
    try:
        return _measure(config)
    except RuntimeError as error:  # for example, the GPU's memory is in use
        raise ConfigError(
            f"measuring the speed of a training step failed: {str(error).splitlines()[0]}"
        ) from None
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _measure(config: Config) -> float:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    model = Pretrainer(config.model, config.objective).to(device, dtype).train()
    adam = torch.optim.AdamW(model.parameters(), 1e-9)
    crops = min(config.train.batch_crops, 8 if device.type == "cpu" else 64)
    x_BSLT = torch.randn(crops, 2, config.model.leads, HALF, device=device, dtype=dtype)
    keys_BS = torch.from_numpy(row_keys(0, 0, np.arange(crops))).to(device)
    ids_B, tau = torch.arange(crops, device=device), torch.tensor(1.0, device=device)

    def step() -> None:
        model(x_BSLT, keys_BS, tau, ids_B)["loss"].backward()
        adam.step()
        adam.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    step()
    started, steps = time.perf_counter(), 0
    while steps < 2 or (time.perf_counter() - started < MEASURE_S and steps < 50):
        step()
        steps += 1
    per_crop = flops_per_crop(config.model, local=config.objective.local > 0)
    return steps * crops * per_crop / (time.perf_counter() - started)
