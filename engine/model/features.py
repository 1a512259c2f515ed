"""Samples to local features: a stack of convolutions whose kernel is their stride, so that each is one matrix product.

    x_RLT -> x_RTL -> [R, T/2, 2L] @ W -> group norm -> GELU -> [R, T/4, 512] @ W -> GELU -> ... -> z_RNF

With time before channels, two neighbouring steps already lie side by side in memory: a patch is a view, nothing is copied.
Weights are kept as such products want them, [out, kernel * in]; engine.model.fairseq turns them into the authors' [out, in,
kernel].

Source: paper, section "Pre-training" (four blocks of convolution, normalisation, GELU); fairseq-signals
modules/conv_feature_extraction.py:21-60 (no bias, one group norm of as many groups as channels, in block 0) and
models/wav2vec2/wav2vec2.py:254 (GradMultiply). Where they differ: ModelConfig.conv_norm.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.kernels.gelu import gelu


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


class NormGelu(torch.autograd.Function):
    """GELU of the group norm over time, for a CPU: a few rows at a time while they are in its cache, which is ten times as fast
    as autograd's passes over all of them. `keep`: how many steps are wanted; the statistics are those of all."""

    @staticmethod
    def forward(ctx: Any, y_RTC: Tensor, weight_C: Tensor, bias_C: Tensor, keep: int, eps: float) -> Tensor:
        rows, _, width = y_RTC.shape
        out_RTC = y_RTC.new_empty(rows, keep, width)
        mean_R1C, rstd_R1C = torch.empty(2, rows, 1, width)
        for part in in_cache(y_RTC):
            y = y_RTC[part].float()
            mean_R1C[part] = y.mean(1, keepdim=True)
            x = y - mean_R1C[part]
            rstd_R1C[part] = torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
            normed = torch.addcmul(bias_C.float(), x[:, :keep], rstd_R1C[part] * weight_C.float())
            out_RTC[part] = F.gelu(normed.to(y_RTC.dtype))
        ctx.save_for_backward(y_RTC, weight_C, bias_C, mean_R1C, rstd_R1C)
        ctx.keep = keep
        return out_RTC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (grad_RTC,), keep = grads, ctx.keep
        y_RTC, weight_C, bias_C, mean_R1C, rstd_R1C = ctx.saved_tensors
        grad_y_RTC, steps = torch.empty_like(y_RTC), y_RTC.shape[1]
        grad_weight_R1C, grad_bias_R1C = torch.empty_like(mean_R1C), torch.empty_like(mean_R1C)
        for part in in_cache(y_RTC):
            x = (y_RTC[part].float() - mean_R1C[part]).mul_(rstd_R1C[part])
            normed = torch.addcmul(bias_C.float(), x[:, :keep], weight_C.float()).to(y_RTC.dtype)
            grad = torch.ops.aten.gelu_backward(grad_RTC[part], normed).float()
            grad_bias_R1C[part] = grad.sum(1, keepdim=True)
            grad_weight_R1C[part] = (grad * x[:, :keep]).sum(1, keepdim=True)
            scale_R1C = rstd_R1C[part] * weight_C.float()
            x.mul_(grad_weight_R1C[part] * scale_R1C / -steps).sub_(grad_bias_R1C[part] * scale_R1C / steps)
            x[:, :keep].addcmul_(grad, scale_R1C)
            grad_y_RTC[part] = x
        grad_weight_C, grad_bias_C = grad_weight_R1C.sum((0, 1)), grad_bias_R1C.sum((0, 1))
        return grad_y_RTC, grad_weight_C.to(weight_C.dtype), grad_bias_C.to(bias_C.dtype), None, None


def in_cache(y_RTC: Tensor) -> Iterator[slice]:
    """As many rows as are two megabytes of float32 for each thread, at least one: less is lost in waking threads."""
    rows = max(1, torch.get_num_threads() * 2**19 // math.prod(y_RTC.shape[1:]))
    return (slice(start, start + rows) for start in range(0, len(y_RTC), rows))


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
        if self.norm is not None and self.norm_kind == "group":
            if y_RTC.device.type == "cpu" and not torch.compiler.is_compiling():
                done: Tensor = NormGelu.apply(y_RTC, self.norm.weight, self.norm.bias, keep, self.norm.eps)
                return done
            y_RTC = self._over_time(y_RTC, keep)
        elif self.norm is not None:
            y_RTC = self.norm(y_RTC)
        return gelu(y_RTC)

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
