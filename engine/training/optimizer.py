"""AdamW that takes the gradient's norm, clips, and skips a step that is not finite: nothing waits for the device.

    adam = GuardedAdamW(model.parameters(), lr=..., clip_norm=1.0, partitioned=stage > 0)
    ... engine.step() ...
    adam.norm, adam.skipped, adam.in_a_row                  # tensors: read them when you log

DeepSpeed calls `step` once it has averaged the gradients; with ZeRO each rank holds a part of them (`partitioned`), so squares
are summed over ranks and all ranks skip alike. torch's fused kernels take the clipping factor and the decision to skip as
tensors (`grad_scale`, `found_inf`, made for loss scaling): a skipped step leaves weights, moments and step count as they were.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GuardedAdamW(torch.optim.AdamW):
    def __init__(self, params: Iterable[Tensor], clip_norm: float = 0.0, partitioned: bool = False, **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        self.clip_norm, self.partitioned = clip_norm, partitioned
        device = self.param_groups[0]["params"][0].device
        self.norm = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.in_a_row = torch.zeros((), device=device)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = torch._foreach_norm(grads)
        square = torch.stack([norm.float() for norm in norms]).square().sum()
        if self.partitioned and dist.get_world_size() > 1:
            dist.all_reduce(square)
        self.norm = square.sqrt()
        bad = (~torch.isfinite(self.norm)).float()
        if self.clip_norm:
            self.grad_scale = ((self.norm + 1e-6) / self.clip_norm).clamp(min=1)
        self.found_inf = bad
        super().step()
        self._count(bad)

    def refused(self) -> None:
        """A step that DeepSpeed skipped itself (ZeRO-3 does, on all ranks)."""
        self._count(torch.ones_like(self.skipped))

    def _count(self, bad: Tensor) -> None:
        self.skipped = self.skipped + bad
        self.in_a_row = (self.in_a_row + 1) * bad
