"""What a plan will take, before it begins: from the speed of this machine, then from the jobs that are done.

    estimate(plan, place, speed(plan, place)).total_s
    python -m engine.reproduction.cost < SETTINGS.json     measures: floating-point operations a second of a training step

A job's work is crops x operations a crop (engine.model.config.flops_per_crop). As soon as a job of a kind is done, the next
of its kind are expected to run at its rate.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.common import ConfigError
from engine.config import Config, build
from engine.data.augmenter import HALF
from engine.model.config import flops_per_crop
from engine.model.draws import row_keys
from engine.model.pretrainer import Pretrainer
from engine.reproduction.claims import here
from engine.reproduction.plan import KINDS, Plan
from engine.reproduction.workdir import Place

START_S = 10.0  # of a process: imports, the dataset, the first step
ENOUGH_S = 3.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Estimate:
    seconds: dict[str, float]  # of each job that is not done
    disk: float  # bytes that they will leave, and what runs beside

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def estimate(plan: Plan, place: Place, flops_per_s: float, workers: int = 1) -> Estimate:
    rates = {kind: _seen_rate(plan, place, kind) for kind in KINDS}
    left = [job for job in plan.jobs if not place.done(job)]
    seconds = {}
    for job in left:
        seen = rates[job.kind]
        seconds[job.name] = job.flops / seen if seen else START_S + job.flops / flops_per_s
    scratch = sum(sorted((job.scratch for job in left), reverse=True)[:workers])
    return Estimate(seconds, sum(job.disk for job in left) + scratch)


def _seen_rate(plan: Plan, place: Place, kind: str) -> float | None:
    took = [(job.flops, place.seconds(job) or 0.0) for job in plan.jobs if job.kind == kind and place.done(job)]
    seconds = sum(s for _, s in took)
    return sum(flops for flops, s in took if s) / seconds if seconds else None


def speed(plan: Plan, place: Place) -> float:
    """Operations a second on this machine, measured in a process of its own and remembered in DIR."""
    memory = place.jobs / f"speed.{here().replace('/', '.')}.json"
    try:
        return float(json.loads(memory.read_text())["flops_per_s"])
    except (OSError, ValueError, LookupError, TypeError):
        pass
    tree = json.dumps(plan.configs[0].tree())
    command = [sys.executable, "-m", "engine.reproduction.cost"]
    ended = subprocess.run(command, cwd=ROOT, input=tree, capture_output=True, text=True, check=False)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"the speed of a training step could not be measured: {last}")
    found = float(ended.stdout.split()[-1])
    if place.jobs.is_dir():
        place.keep(memory, {"flops_per_s": found})
    return found


def measure(config: Config) -> float:
    """Of forward, backward and Adam, on one device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Pretrainer(config.model, config.objective).to(device).train()
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    model.to(dtype)
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
    while steps < 2 or (time.perf_counter() - started < ENOUGH_S and steps < 50):
        step()
        steps += 1
    per_crop = flops_per_crop(config.model, local=config.objective.local > 0)
    return steps * crops * per_crop / (time.perf_counter() - started)


if __name__ == "__main__":
    print(measure(build(json.loads(sys.stdin.read()))))
