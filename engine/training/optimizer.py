"""Provides an AdamW that clips gradients and skips non-finite steps without waiting for the device, and
learning-rate schedules.

    adam = GuardedAdamW([(1.0, model.parameters())], lr=..., clip_norm=1.0, partitioned=stage > 0)
    ... engine.step() ...
    adam.norm, adam.skipped, adam.in_a_row                  # tensors: read them only when logging
    lr_at(config.train, step, total)                        # a pure function of the step, which counts from 0

DeepSpeed calls `step` once gradients are averaged. With ZeRO each rank holds a part of them
(`partitioned`), so squares are summed over ranks, and all skip the same steps. torch's fused
kernels take the clipping factor and the decision to skip as tensors (`grad_scale`, `found_inf`,
made for loss scaling): a skipped step leaves weights, moments and step count unchanged.

`groups` of weights may have shares of the learning rate (`lr_groups`). With ZeRO, DeepSpeed calls
`step` once for each group. The first call clips for all, so it also needs the gradients of groups not
handed over yet: `pending`. DeepSpeed's own measurement of the norm waits for the device.

Schedules. fixed: as the paper's authors pre-train. warmup_cosine: linear from start_factor to 1 over the
first `warmup` of all steps, then half a cosine to end_factor. tri_stage (fairseq): linear, constant
over `hold`, then exponential to end_factor.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..settings.errors import ConfigError
from .config import TrainConfig

# (factor of the learning rate, weights) for each group
Groups = list[tuple[float, list[nn.Parameter]]]
# Modules of an encoder that see only a few samples: `stem` in S4 and the ResNet, the others in the
# encoder of Oh et al.
STEMS = ("stem", "conv", "feature_norm")
# how many numbers a CPU takes at a time when it computes the norm, which is then off by 4e-7
NORM_CHUNK_SIZE = 2**16


class GuardedAdamW(torch.optim.AdamW):
    def __init__(
        self,
        groups: Sequence[tuple[float, Iterable[Tensor]]],
        clip_norm: float = 0.0,
        partitioned: bool = False,
        **options: Any,
    ) -> None:
        super().__init__([{"params": weights} for _, weights in groups], fused=True, **options)
        self.shares = [share for share, _ in groups]
        self.clip_norm, self.partitioned = clip_norm, partitioned
        self.calls, self.calls_per_step = 0, len(groups) if partitioned else 1
        # Returns the gradients of the groups for which `step` is called later in the same training
        # step
        self.pending: Callable[[], list[Tensor]] = list
        device = self.param_groups[0]["params"][0].device
        self.norm, self.skipped, self.in_a_row = (torch.zeros((), device=device) for _ in range(3))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.calls % self.calls_per_step == 0:
            self._compute_norm_and_clipping()
        self.calls += 1
        super().step()

    def _compute_norm_and_clipping(self) -> None:
        """Computes the norm of all gradients, by how much they are clipped, and whether the step is
        skipped."""
        weights = (p for group in self.param_groups for p in group["params"])
        grads = [p.grad for p in weights if p.grad is not None]
        grads += [grad.float() for grad in self.pending()]
        if self.norm.is_cpu:
            # On a CPU torch adds up squares one after the other, so the norm of a long tensor is
            # inexact: off by 2.5e-5 with 1 million squares, by 1.1e-5 with the half million that
            # each of two ranks has. Tensors are therefore split
            grads = [part for grad in grads for part in grad.flatten().split(NORM_CHUNK_SIZE)]
        norms = torch._foreach_norm(grads)
        square = torch.stack([norm.float() for norm in norms]).square().sum()
        if self.partitioned and dist.get_world_size() > 1:
            dist.all_reduce(square)
        self.norm = square.sqrt()
        self.found_inf = (~torch.isfinite(self.norm)).float()
        if self.clip_norm:
            self.grad_scale = ((self.norm + 1e-6) / self.clip_norm).clamp(min=1)
        self.skipped = self.skipped + self.found_inf
        self.in_a_row = (self.in_a_row + 1) * self.found_inf


def lr_groups(model: nn.Module, factors: Mapping[str, float]) -> Groups:
    """Returns the trained weights in groups, each with its factor of the learning rate. `factors`:
    train.lr_factors."""
    if not factors:
        # In the order of model.parameters(), as the optimizer's state stands in checkpoints
        return [(1.0, [p for p in model.parameters() if p.requires_grad])]
    parts: dict[str, list[nn.Parameter]] = {"stem": [], "context": [], "head": []}
    for name, p in model.named_parameters():
        owner, _, inner = name.partition(".")
        part = "head"
        if owner == "encoder":
            part = "stem" if inner.partition(".")[0] in STEMS else "context"
        if p.requires_grad:
            parts[part].append(p)
    for part in factors:
        if not parts[part]:
            raise ConfigError(
                f"train.lr_factors={dict(factors)}: this model has no trained weights in its {part}: "
                f"leave {part} out"
            )
    groups: dict[float, list[nn.Parameter]] = {}
    for part, weights in parts.items():
        groups.setdefault(factors.get(part, 1.0), []).extend(weights)
    return [(factor, weights) for factor, weights in groups.items() if weights]


def lr_at(config: TrainConfig, step: int, total: int) -> float:
    if config.schedule == "fixed":
        return config.lr
    warmup, hold = config.warmup * total, config.hold * total
    if step < warmup:
        return config.lr * (config.start_factor + (1 - config.start_factor) * step / warmup)
    if config.schedule == "warmup_cosine":
        decay_done = min(1.0, (step - warmup) / max(total - warmup, 1))
        return config.lr * (
            config.end_factor + (1 - config.end_factor) * (1 + math.cos(math.pi * decay_done)) / 2
        )
    if step < warmup + hold:
        return config.lr
    decay_done = min(1.0, (step - warmup - hold) / max(total - warmup - hold, 1))
    return config.lr * math.pow(max(config.end_factor, 1e-12), decay_done)
