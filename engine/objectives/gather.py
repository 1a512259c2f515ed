"""Tensors of all ranks, with exact gradients: a loss over the global batch from W processes.

Each rank computes the loss of its own rows against everybody's (`gather`), or of a statistic summed over all (`total`).
Backward adds up what all ranks' losses say about a rank's tensors; the engine then divides the summed gradients of the
weights by W. So the mean over ranks of the losses is the loss of the global batch, and so is its gradient. Every rank must
have equally many rows. Without a process group, or with one rank, both are the identity.

Source: torch.distributed.nn.functional, whose all_gather and all_reduce are differentiable.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
from torch import Tensor

# torch's compiler refuses to trace these, and would then trace nothing of what calls them.
_all_gather = torch.compiler.disable(functional.all_gather)
_all_reduce = torch.compiler.disable(functional.all_reduce)
_apart = False


@contextmanager
def apart() -> Iterator[None]:
    """Within it each rank computes for itself, as if it were alone."""
    global _apart
    before, _apart = _apart, True
    try:
        yield
    finally:
        _apart = before


def world_size() -> int:
    return dist.get_world_size() if not _apart and dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def gather(x: Tensor) -> Tensor:
    """[A, ...] -> [W * A, ...] in the order of ranks, with gradient."""
    if world_size() == 1:
        return x
    return torch.cat(_all_gather(x.contiguous()), 0)


def gather_constant(x: Tensor) -> Tensor:
    """The same for integers, which have no gradient."""
    if world_size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 0)


def total(x: Tensor) -> Tensor:
    """The sum over ranks, with gradient."""
    if world_size() == 1:
        return x
    summed: Tensor = _all_reduce(x)
    return summed
