"""Learning rate of each step, a pure function of its number.

    lr_at(config.train, step, total)          # step counts from 0

fixed: as the authors pre-train. warmup_cosine: linear from start_factor to 1 over the first `warmup` of all steps, then half a
cosine to end_factor. tri_stage (fairseq): linear, constant over `hold`, then exponential to end_factor.
"""

import math

from engine.config import TrainConfig


def lr_at(config: TrainConfig, step: int, total: int) -> float:
    if config.schedule == "fixed":
        return config.lr
    warmup, hold = config.warmup * total, config.hold * total
    if step < warmup:
        return config.lr * (config.start_factor + (1 - config.start_factor) * step / warmup)
    if config.schedule == "warmup_cosine":
        done = min(1.0, (step - warmup) / max(total - warmup, 1))
        return config.lr * (config.end_factor + (1 - config.end_factor) * (1 + math.cos(math.pi * done)) / 2)
    if step < warmup + hold:
        return config.lr
    done = min(1.0, (step - warmup - hold) / max(total - warmup - hold, 1))
    return config.lr * math.pow(max(config.end_factor, 1e-12), done)
