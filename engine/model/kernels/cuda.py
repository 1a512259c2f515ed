"""Expected to be faster than torch's operations on a GPU, by counts of operations and bytes
(benchmarks/LOG.md); not timed yet.

Dropout, GELU and the linear layer are written for torch.compile; without it torch's own are used.
Shapes: engine.model.config; c channels of a group.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GELU_SERIES = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
BLOCK = 26  # outputs of the convolution in a block: 156 tokens are six blocks


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Dropout by a hash of each element's index and two seeds, recomputed for the gradient: 10
    operations instead of 65 for the compiler's own generator, and no saved mask."""
    if not training or p == 0 or not torch.compiler.is_compiling():
        return F.dropout(x, p, training)
    hashed: Tensor = HashedDropout.apply(
        x, p, torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=x.device)
    )
    return hashed


class HashedDropout(torch.autograd.Function):
    """Saves only the seeds for the backward pass."""

    @staticmethod
    def forward(x: Tensor, p: float, seeds: Tensor) -> Tensor:
        return torch.where(keep_mask(x, p, seeds), x * (1 / (1 - p)), 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, Tensor], output: Tensor) -> None:
        _, ctx.p, seeds = inputs
        ctx.save_for_backward(seeds)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return HashedDropout.forward(grads[0], ctx.p, ctx.saved_tensors[0]), None, None


def keep_mask(x: Tensor, p: float, seeds: Tensor) -> Tensor:
    """True where a hash of index and seeds is large enough; it mixes the upper bits into the lower
    before each product."""
    bits = torch.arange(x.numel(), device=x.device).to(torch.int32) + seeds[0]
    bits = mix_lower(bits) * 0x7FEB352D ^ seeds[1]
    bits = mix_lower(mix_lower(bits) * 0x2C1B3C6D) * 0x297A2D39
    return (bits >= round(p * 2**32) - 2**31).view(x.shape)


def mix_lower(bits: Tensor) -> Tensor:
    return bits ^ (bits >> 16 & 0xFFFF)  # a logical shift: clears the copied sign bits


def gelu(x: Tensor) -> Tensor:
    """When compiled in bf16, two thirds of the operations of the exact GELU, which is slower than a
    GPU's memory."""
    if torch.compiler.is_compiling() and x.dtype == torch.bfloat16:
        y: Tensor = PolynomialGelu.apply(x)
        return y
    return F.gelu(x)


class PolynomialGelu(torch.autograd.Function):
    """gelu(x) = max(x, 0) - |x| q, where q = erfc(|x| / sqrt 2) / 2 by Abramowitz and Stegun
    7.1.26, accurate to 1e-7: a polynomial in 1 / (1 + c |x|) times exp(-x^2 / 2), which the
    gradient needs anyway. bf16 itself rounds to 4e-3."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        _, q = normal_tail(wide)
        return (wide.relu() - wide.abs() * q).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        e, q = normal_tail(wide)
        slope: Tensor = torch.where(wide > 0, 1 - q, q) + wide * e * (2 * math.pi) ** -0.5
        return (grads[0] * slope).to(x.dtype)


def normal_tail(x: Tensor) -> tuple[Tensor, Tensor]:
    """exp(-x^2 / 2), and the probability that a standard normal variable exceeds |x|."""
    e = torch.exp2(x * x * (-0.5 / math.log(2)))
    t = 1 / (1 + 0.3275911 / math.sqrt(2) * x.abs())
    series = 0.5 * GELU_SERIES[-1] * t
    for factor in GELU_SERIES[-2::-1]:
        series = (series + 0.5 * factor) * t
    return e, series * e


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if (
        torch.compiler.is_compiling()
        and x.dim() == 3
        and not torch.is_autocast_enabled(x.device.type)
    ):
        y: Tensor = LinearByRows.apply(x, weight, bias)
        return y
    return F.linear(x, weight, bias)


class LinearByRows(torch.autograd.Function):
    """Sums the bias's gradient over tokens first, in the kernel that writes y's gradient, which is
    then not read again."""

    @staticmethod
    def forward(x_RNI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        return F.linear(x_RNI, weight_OI, bias_O)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_RNI, weight_OI = ctx.saved_tensors
        bias_O = grads[0].sum(1, dtype=torch.float32).sum(0)
        y_XO = grads[0].flatten(0, 1)
        return (
            (y_XO @ weight_OI).view_as(x_RNI),
            y_XO.t() @ x_RNI.flatten(0, 1),
            bias_O.to(weight_OI.dtype),
        )


def attention(qkv: Tensor, heads: int, dropout_p: float) -> Tensor:
    """Our kernel for up to 256 tokens in 16 bits, else torch's."""
    rows, tokens, width = qkv.shape
    if (
        qkv.is_cuda
        and qkv.dtype != torch.float32
        and tokens <= 256
        and width // 3 // heads in (16, 32, 64)
    ):
        from omnilead.engine.model.kernels import (
            short,  # needs triton, which CUDA builds of torch install
        )

        return short.attention(qkv, heads, dropout_p)
    q, k, v = qkv.view(rows, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p).transpose(1, 2).flatten(2)


def convolve(x_RND: Tensor, weight_DcK: Tensor, bias_D: Tensor, groups: int) -> Tensor:
    y_RND: Tensor = BlockConvolution.apply(x_RND, weight_DcK, groups)
    return y_RND + bias_D


class BlockConvolution(torch.autograd.Function):
    """One matrix product per group: BLOCK outputs at a time from the inputs they need, with the
    weight as a band matrix. This is a fifth more arithmetic than needed, in a shape that suits
    tensor cores. The input's gradient is also a convolution. The weight's gradient is a product
    that has each tap BLOCK times; these are summed in float32, always in the same order."""

    @staticmethod
    def forward(x_RND: Tensor, weight_DcK: Tensor, groups: int) -> Tensor:
        return in_blocks(x_RND, weight_DcK, groups, weight_DcK.shape[2] // 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        *saved, ctx.groups = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RND, weight_DcK = (
            saved.to(grads[0].dtype) for saved in ctx.saved_tensors
        )  # with autocast they are wider
        rows, tokens, width = x_RND.shape
        groups, each, kernel = ctx.groups, width // ctx.groups, weight_DcK.shape[2]
        turned = (
            weight_DcK.view(groups, each, each, kernel)
            .transpose(1, 2)
            .flip(3)
            .reshape(weight_DcK.shape)
        )
        grad_x = in_blocks(grads[0], turned, groups, (kernel - 1) // 2)

        blocks, window = -(-tokens // BLOCK), kernel + BLOCK - 1
        y = F.pad(grads[0], (0, 0, 0, blocks * BLOCK - tokens)).reshape(
            rows * blocks, BLOCK, groups, each
        )
        y = y.permute(2, 0, 1, 3).reshape(groups, rows * blocks, BLOCK * each)
        band = torch.bmm(
            patches(x_RND, kernel, groups, kernel // 2).transpose(1, 2), y
        )  # [G, window * c in, BLOCK * c out]
        step = each * BLOCK * each  # one step of the window
        sizes, strides = (
            (groups, each, each, kernel, BLOCK),
            (window * step, 1, BLOCK * each, step, step + each),
        )
        taps = band.as_strided(
            sizes, strides
        )  # [G, c out, c in, K, BLOCK]: tap k connects output b to input b + k
        grad_weight = taps.sum(-1, dtype=torch.promote_types(taps.dtype, torch.float32)).view_as(
            weight_DcK
        )
        x_dtype, weight_dtype = (saved.dtype for saved in ctx.saved_tensors)
        return grad_x.to(x_dtype), grad_weight.to(weight_dtype), None


def in_blocks(x_RND: Tensor, weight_DcK: Tensor, groups: int, left: int) -> Tensor:
    """Convolve BLOCK outputs at a time; output n needs inputs from n - left on."""
    rows, tokens, width = x_RND.shape
    kernel, each, blocks = weight_DcK.shape[2], width // groups, -(-tokens // BLOCK)
    taps_Goik = F.pad(weight_DcK.view(groups, each, each, kernel), (BLOCK - 1, BLOCK - 1))
    band = (
        taps_Goik.unfold(3, BLOCK, 1).flip(4).permute(0, 3, 2, 4, 1)
    )  # [G, window, c in, BLOCK, c out]
    y = torch.bmm(patches(x_RND, kernel, groups, left), band.reshape(groups, -1, BLOCK * each))
    return (
        y.view(groups, rows, blocks * BLOCK, each)[:, :, :tokens]
        .permute(1, 2, 0, 3)
        .reshape(rows, tokens, width)
    )


def patches(x_RND: Tensor, kernel: int, groups: int, left: int) -> Tensor:
    """The inputs that each block needs: [G, R * blocks, window * c in]."""
    rows, tokens, width = x_RND.shape
    blocks, window = -(-tokens // BLOCK), kernel + BLOCK - 1
    x_RTGc = F.pad(x_RND, (0, 0, left, blocks * BLOCK - tokens + kernel - 1 - left)).reshape(
        rows, -1, groups, width // groups
    )
    return x_RTGc.unfold(1, window, BLOCK).permute(2, 0, 1, 4, 3).reshape(groups, rows * blocks, -1)


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "dropout": dropout,
    "gelu": gelu,
    "linear": linear,
    "attention": attention,
    "convolve": convolve,
}
