"""Dropout with few operations a number; all ways draw from torch's default generator: restored, it gives the same zeros.

a CPU       16 random bits a number, four numbers to each draw: ten times as fast as torch's, which draws a Bernoulli number
            for each element and then selects by truth values, one at a time. Kept by a bitwise `and` with ones; the
            probability is rounded to a multiple of 2**-16, and what is kept is scaled to match.
compiled    a hash of each number's place and two seeds, computed again for the gradient: 10 operations where the compiler's
            own counter-based generator takes 65, which on a GPU is more than the memory takes, and no mask is kept.
else        torch's own, which on a GPU is one kernel.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a number: whole numbers as wide


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    if not training or p == 0:
        return x
    if torch.compiler.is_compiling():
        hashed: Tensor = Hashed.apply(x, p, torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=x.device))
        return hashed
    if x.device.type != "cpu":
        return F.dropout(x, p)
    dropped = round(p * 65536)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[: x.numel()]
    keep = words.ge_(dropped - 32768).neg_().view(x.shape)  # 0 or -1: no bits or all
    kept: Tensor = Keep.apply(x, keep, 65536 / (65536 - dropped))
    return kept


class Keep(torch.autograd.Function):
    """x, or zero where no bit is kept; times a scale. The gradient likewise."""

    @staticmethod
    def forward(x: Tensor, keep: Tensor, scale: float) -> Tensor:
        whole = WHOLE[x.element_size()]
        return (x.contiguous().view(whole) & keep.to(whole)).view(x.dtype).mul_(scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _, keep, ctx.scale = inputs
        ctx.save_for_backward(keep)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return Keep.forward(grads[0], keep, ctx.scale), None, None


class Hashed(torch.autograd.Function):
    """For a compiler. What is saved are the seeds."""

    @staticmethod
    def forward(x: Tensor, p: float, seeds: Tensor) -> Tensor:
        return torch.where(chosen(x, p, seeds), x * (1 / (1 - p)), 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, Tensor], output: Tensor) -> None:
        _, ctx.p, seeds = inputs
        ctx.save_for_backward(seeds)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return Hashed.forward(grads[0], ctx.p, ctx.saved_tensors[0]), None, None


def chosen(x: Tensor, p: float, seeds: Tensor) -> Tensor:
    """By the upper bits of a product of products, each of a number with its own upper half mixed into the lower."""
    bits = torch.arange(x.numel(), device=x.device).to(torch.int32) + seeds[0]
    bits = lower(bits) * 0x7FEB352D ^ seeds[1]
    bits = lower(lower(bits) * 0x2C1B3C6D) * 0x297A2D39
    return (bits >= round(p * 2**32) - 2**31).view(x.shape)


def lower(bits: Tensor) -> Tensor:
    return bits ^ (bits >> 16 & 0xFFFF)  # a logical shift: the sign bits that it copies are cleared
