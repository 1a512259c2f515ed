"""The operations that stages are made of, in torch. dali.DaliOps has the same operations for a DALI
graph.

ops = TorchOps(HALF, FS_HZ, device, seed)
x = stage.apply(x, p, ops)
"""

import functools
import operator
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from .augmentations.stage import TAU, Wave, time_axes, white_bank

# number of samples that `cosines` computes from one coarse sample: about the square root of T
FINE_STEP = 50


class TorchOps:
    """The operations that stages are made of, on tensors. dali.DaliOps has the same operations
    for a DALI graph."""

    def __init__(self, samples: int, fs_hz: float, device: torch.device, seed: int) -> None:
        axes = [torch.from_numpy(axis).to(device) for axis in time_axes(samples, fs_hz)]
        self.sample, self.time_s, self.mains_s = axes
        self.seed = seed

    @cached_property
    def bank(self) -> Tensor:
        return torch.from_numpy(white_bank(self.seed)).to(self.sample.device)

    def white_noise(self, start: Tensor) -> Tensor:
        """Copies white noise [.., L, T] from the bank. `start`, [.., L, 1]: where the noise of
        each lead begins in the bank."""
        windows = self.bank.unfold(0, len(self.sample), 1)
        slices = windows.index_select(0, start.reshape(-1))
        return slices.view(*start.shape[:-1], -1)

    def lead(self, x: Tensor, lead: int) -> Tensor:
        return x[..., lead : lead + 1, :]

    def cat(self, leads: list[Tensor]) -> Tensor:
        return torch.cat(leads, dim=-2)

    def matmul(self, matrix: Tensor, x: Tensor) -> Tensor:
        return matrix @ x

    def multiply(self, x: Tensor, factor: Tensor) -> Tensor:
        """Multiplies x by `factor` in place. A new tensor would make a batch of the DALI backend
        with physio3 on a CPU a fifth slower."""
        return _copy_if_two_views(x, factor).mul_(factor)

    def add(self, x: Tensor, waves: Sequence[Wave]) -> Tensor:
        shared: list[Wave] = []
        by_lead: list[Wave] = []
        for gain, wave in waves:
            shares = wave.shape[-2] == 1 and (gain is None or gain.shape[-2] == 1)
            (shared if shares else by_lead).append((gain, wave))
        # noise that all leads share is summed first, as the sum takes 1/L of the memory of x
        if shared:
            total = self.sum(shared)
            x = _copy_if_two_views(x, total).add_(total)
        for gain, wave in by_lead:
            x = _copy_if_two_views(x, wave)
            if gain is None:
                x.add_(wave)
            else:
                x.addcmul_(gain, wave.to(x.dtype))  # the wave of Shift is bool
        return x

    def sum(self, waves: Sequence[Wave]) -> Tensor:
        scaled: list[Tensor] = [wave if gain is None else gain * wave for gain, wave in waves]
        return functools.reduce(operator.add, scaled)

    def cosines(self, a: Tensor, hz: Tensor, phase: Tensor, time_s: Tensor, count: int) -> Tensor:
        """Returns sum_k a_k cos(2 pi hz_k t + phase_k); k is an index into the last axis of a, hz
        and phase.

        cos(u + v) = cos u cos v - sin u sin v, where u is every 50th sample and v the offset from
        it, 0 to 49: 50 times fewer cosines. It also holds for time modulo 0.1 s, where t is u + v
        up to a whole number of periods.
        """
        coarse_s, fine_s = time_s[::FINE_STEP], time_s[:FINE_STEP]
        total: Tensor | None = None
        for k in range(count):
            amplitude = a[..., k : k + 1, None]
            omega = TAU * hz[..., k : k + 1]
            u = (omega * coarse_s + phase[..., k : k + 1])[..., None]
            v = (omega * fine_s)[..., None, :]
            if total is None:
                total = (amplitude * u.cos()) * v.cos()
            else:  # in place, because a new tensor would be one more pass over memory
                total.addcmul_(amplitude * u.cos(), v.cos())
            total.addcmul_(amplitude * u.sin(), v.sin(), value=-1)
        assert total is not None
        return total.flatten(-2)[..., : time_s.shape[0]]


def _copy_if_two_views(x: Tensor, other: Tensor) -> Tensor:
    """Returns x; if x has one view and `other` has two, returns a copy of x with two views."""
    shape = torch.broadcast_shapes(x.shape, other.shape)
    return x if x.shape == shape else x.expand(shape).clone()
