"""Samples to local features: a stack of convolutions whose kernel is their stride, so that each is one matrix product.

    x_RLT -> x_RTL -> [R, T/2, 2L] @ W -> group norm -> GELU -> [R, T/4, 512] @ W -> GELU -> ... -> z_RNF

With time before channels, two neighbouring steps already lie side by side in memory: a patch is a view, nothing is copied.
Weights are kept as such products want them, [out, kernel * in]; engine.model.fairseq turns them into the authors' [out, in,
kernel].

Source: paper, section "Pre-training" (four blocks of convolution, normalisation, GELU); fairseq-signals
modules/conv_feature_extraction.py:21-60 (no bias, one group norm of as many groups as channels, in block 0) and
models/wav2vec2/wav2vec2.py:254 (GradMultiply). Where they differ: ModelConfig.conv_norm.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import ModelConfig


class ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class PatchBlock(nn.Module):
    """x [R, T, C] -> [R, T // kernel, out]: product, norm or none, GELU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, norm: str) -> None:
        super().__init__()
        self.kernel, self.norm_kind = kernel, norm
        self.weight = nn.Parameter(torch.empty(outputs, kernel * inputs))
        self.norm = nn.LayerNorm(outputs) if norm else None  # as a group norm it normalises over time instead

    def forward(self, x_RTC: Tensor, keep: int) -> Tensor:
        """`keep`: how many of its steps later blocks look at. The group norm's statistics are those of all steps."""
        rows, length, width = x_RTC.shape
        steps = length // self.kernel if self.norm_kind == "group" else keep
        patches = x_RTC[:, : steps * self.kernel].reshape(rows, steps, self.kernel * width)
        y_RTC = F.linear(patches, self.weight)
        if self.norm is not None:
            y_RTC = self._over_time(y_RTC, keep) if self.norm_kind == "group" else self.norm(y_RTC)
        return F.gelu(y_RTC)

    def _over_time(self, y_RTC: Tensor, keep: int) -> Tensor:
        """Group norm with a group for each channel; in float32, as the authors' (modules/fp32_group_norm.py)."""
        assert self.norm is not None
        dtype, y = y_RTC.dtype, y_RTC.float()
        variance_R1C, mean_R1C = torch.var_mean(y, dim=1, correction=0, keepdim=True)
        scale_R1C = torch.rsqrt(variance_R1C + self.norm.eps) * self.norm.weight.float()
        return torch.addcmul(self.norm.bias.float() - mean_R1C * scale_R1C, y[:, :keep], scale_R1C).to(dtype)


class ConvStack(nn.Module):
    """x_RLT -> z_RNF."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.feature_grad = config.feature_grad
        blocks, inputs = [], config.leads
        for i, (width, kernel) in enumerate(config.conv):
            norm = "layer" if config.conv_norm == "layer" else "group" if i == 0 else ""
            blocks.append(PatchBlock(inputs, width, kernel, norm))
            inputs = width
        self.blocks = nn.ModuleList(blocks)
        self.kernels = [kernel for _, kernel in config.conv]
        self.patch = config.patch

    def forward(self, x_RLT: Tensor) -> Tensor:
        if self.feature_grad == 0:
            with torch.no_grad():
                return self._blocks(x_RLT)
        z_RNF = self._blocks(x_RLT)
        if self.feature_grad == 1:
            return z_RNF
        scaled: Tensor = ScaleGradient.apply(z_RNF, self.feature_grad)
        return scaled

    def _blocks(self, x_RLT: Tensor) -> Tensor:
        x_RTC = x_RLT.transpose(1, 2).to(next(self.parameters()).dtype)
        keep = x_RLT.shape[-1] // self.patch * self.patch  # a remainder of samples reaches no token
        for kernel, block in zip(self.kernels, self.blocks, strict=True):
            keep //= kernel
            x_RTC = block(x_RTC, keep)
        return x_RTC
