"""Faster replacements for plain operations of the model, chosen by `model.kernels`:
dropout, linear layers, normalisation, attention with dropout, long convolutions.

    pick_operation("linear", F.linear, config.kernels, x)(x, weight, bias)

| model.kernels | on a CPU | on a GPU |
|---|---|---|
| plain | torch's operations | torch's operations |
| auto | all of these, measured to be faster | torch's; the positional convolution in blocks |

A replacement has the same arguments and result as the plain operation and is tested against it. On
a CPU, torch.compile gets the plain operations, which it fuses itself. Dropout draws from torch's
default generator, so restoring that reproduces the masks.

On a GPU the blocks are matrix products, which suit tensor cores and are deterministic, unlike the
library's grouped convolution in bf16. By counts of operations and bytes they take 9 to 11 ms of a
step of 512 crops, the library's 30 to 90 (benchmarks/LOG.md); neither was timed.

Shapes: engine.model.config; C channels, K taps of a kernel, Q frequencies, c channels of a group.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Operation = Callable[..., Tensor]
# size of a number in bytes -> the integer type of that size; MaskedScale masks numbers as such integers
INTEGER_TYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# output tokens in a block of convolve_in_blocks; the 156 tokens of 5 s are six blocks
OUTPUTS_PER_BLOCK = 26


def dropout(
    x: Tensor,
    p: float,
    training: bool = True,
) -> Tensor:
    """Apply dropout ten times as fast as torch on a CPU. One 64-bit random number decides about four
    elements, 16 bits each; torch draws one number for each element. p is rounded to a multiple of
    2**-16, and the elements that remain are scaled by 1 / (1 - rounded p)."""
    if not training or p == 0:
        return x
    dropped = round(p * 65536)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    words = draws.view(torch.int16)[: x.numel()]
    # -1 keeps an element, as all its bits are set; 0 drops the element
    keep = words.ge_(dropped - 32768).neg_().view(x.shape)
    kept: Tensor = MaskedScale.apply(x, keep, 65536 / (65536 - dropped))
    return kept


class MaskedScale(torch.autograd.Function):
    """Multiply x by `scale` where `keep` is -1, and set x to zero where `keep` is 0. For that, the bits of x
    are combined with those of `keep` by `and`. The gradient is masked and scaled in the same way."""

    @staticmethod
    def forward(x: Tensor, keep: Tensor, scale: float) -> Tensor:
        integer = INTEGER_TYPES[x.element_size()]
        bits = x.contiguous().view(integer) & keep.to(integer)
        return bits.view(x.dtype).mul_(scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _, keep, ctx.scale = inputs
        ctx.save_for_backward(keep)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return MaskedScale.forward(grads[0], keep, ctx.scale), None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x weight^T + bias. The bias is added after the matrix product, because a product that
    starts from copies of the bias takes 3 % longer."""
    return F.linear(x, weight).add_(bias)


def group_norm_gelu(
    y_RTC: Tensor,
    weight_C: Tensor,
    bias_C: Tensor,
    eps: float,
) -> Tensor:
    """Do what engine.model.encoder.group_norm_gelu does, faster on a CPU."""
    result: Tensor = GroupNormGelu.apply(y_RTC, weight_C, bias_C, eps)
    return result


class GroupNormGelu(torch.autograd.Function):
    """Group norm over time, then GELU. Forward and backward process a few rows at a time, which stay in
    the CPU's cache: ten times as fast as autograd, each of whose operations passes over all rows."""

    @staticmethod
    def forward(ctx: Any, y_RTC: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float) -> Tensor:
        out_RTC = torch.empty_like(y_RTC)
        rows, _, width = y_RTC.shape
        mean_R1C, rstd_R1C = torch.empty(2, rows, 1, width)
        weight, bias = weight_C.float(), bias_C.float()
        for part in cache_sized_slices(y_RTC):
            y = y_RTC[part].float()
            mean = y.mean(1, keepdim=True)
            x = y - mean
            variance = x.square().mean(1, keepdim=True)
            rstd = torch.rsqrt(variance + eps)
            normed = torch.addcmul(bias, x, rstd * weight)
            out_RTC[part] = F.gelu(normed.to(y_RTC.dtype))
            mean_R1C[part] = mean
            rstd_R1C[part] = rstd
        ctx.save_for_backward(y_RTC, weight_C, bias_C, mean_R1C, rstd_R1C)
        return out_RTC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        y_RTC, weight_C, bias_C, mean_R1C, rstd_R1C = ctx.saved_tensors
        steps = y_RTC.shape[1]
        grad_y_RTC = torch.empty_like(y_RTC)
        grad_weight_R1C = torch.empty_like(mean_R1C)
        grad_bias_R1C = torch.empty_like(mean_R1C)
        weight, bias = weight_C.float(), bias_C.float()
        for part in cache_sized_slices(y_RTC):
            rstd = rstd_R1C[part]
            x = y_RTC[part].float() - mean_R1C[part]
            x.mul_(rstd)
            normed = torch.addcmul(bias, x, weight).to(y_RTC.dtype)
            grad = torch.ops.aten.gelu_backward(grads[0][part], normed).float()
            grad_bias = grad.sum(1, keepdim=True)
            grad_weight = (grad * x).sum(1, keepdim=True)
            grad_bias_R1C[part] = grad_bias
            grad_weight_R1C[part] = grad_weight
            scale = rstd * weight
            x.mul_(grad_weight * scale / -steps)
            x.sub_(grad_bias * scale / steps)
            grad_y_RTC[part] = x.addcmul_(grad, scale)
        return (
            grad_y_RTC,
            grad_weight_R1C.sum((0, 1)).to(weight_C.dtype),
            grad_bias_R1C.sum((0, 1)).to(bias_C.dtype),
            None,
        )


def cache_sized_slices(y_RTC: Tensor) -> Iterator[slice]:
    """Yield slices of rows, each with two megabytes of float32 per thread, or one row if a row is
    larger. With smaller slices, more time is spent on waking the threads."""
    rows = max(1, torch.get_num_threads() * 2**19 // math.prod(y_RTC.shape[1:]))
    return (slice(start, start + rows) for start in range(0, len(y_RTC), rows))


def attention(qkv: Tensor, heads: int, dropout_p: float) -> Tensor:
    """Compute attention with dropout on a CPU by explicit scores and softmax, because torch's fused
    attention on a CPU has no dropout. Without dropout, torch's fused attention is used."""
    rows, tokens, _ = qkv.shape
    parts = qkv.view(rows, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4).contiguous()
    q_RHNd, k_RHNd, v_RHNd = parts.unbind(0)
    if dropout_p == 0:
        y_RHNd = F.scaled_dot_product_attention(q_RHNd, k_RHNd, v_RHNd)
    else:
        scale = q_RHNd.shape[-1] ** -0.5
        scores = (q_RHNd * scale) @ k_RHNd.transpose(-1, -2)
        shares = Softmax.apply(scores)
        y_RHNd = dropout(shares, dropout_p) @ v_RHNd
    return y_RHNd.transpose(1, 2).flatten(2)


class Softmax(torch.autograd.Function):
    """Softmax over the last axis, computed in float32. The gradient is computed from the output, in
    the output's precision."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.float().softmax(-1).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        return torch._softmax_backward_data(grads[0], shares, -1, shares.dtype)


def convolve_by_fourier(
    x_RND: Tensor,
    weight_DcK: Tensor,
    bias_D: Tensor,
    groups: int,
) -> Tensor:
    """Convolve by Fourier transform, in float32 or better, with a tenth of the arithmetic of a direct
    convolution. Libraries are slow at the gradients of a grouped convolution. The transforms are
    matrix products, which are faster than an FFT for some hundred tokens. A period of tokens +
    kernel / 2 is long enough: what wraps around falls outside the output."""
    rows, tokens, width = x_RND.shape
    kernel = weight_DcK.shape[2]
    period = tokens + kernel // 2
    period += period % 2
    x_NX = at_least_float32(x_RND.transpose(0, 1).reshape(tokens, rows * width))
    cos_QN, sin_QN = cosines_and_sines(torch.arange(tokens), period, x_NX.dtype)
    cos_QK, sin_QK = cosines_and_sines(torch.arange(kernel) - kernel // 2, period, x_NX.dtype)
    with torch.autocast("cpu", enabled=False):
        by_group = at_least_float32(weight_DcK).unflatten(0, (groups, -1)).transpose(1, 2)
        taps_KW = by_group.reshape(-1, kernel).t()
        x_re = split_groups(cos_QN @ x_NX, rows, groups)
        # x_im and w_im are the imaginary parts of the Fourier transforms with the opposite sign
        x_im = split_groups(sin_QN @ x_NX, rows, groups)
        w_re = (cos_QK @ taps_KW).view(-1, *by_group.shape[1:3])
        w_im = (sin_QK @ taps_KW).view_as(w_re)
        y_re = torch.bmm(x_re, w_re)
        y_re = torch.baddbmm(y_re, x_im, w_im)
        y_im = torch.bmm(x_im, w_re)
        y_im = torch.baddbmm(y_im, x_re, w_im, alpha=-1)
        y_NX = torch.addmm(
            inverse_fourier_matrix(cos_QN, period) @ join_groups(y_re, rows, groups),
            inverse_fourier_matrix(sin_QN, period),
            join_groups(y_im, rows, groups),
        )
    y_RND = y_NX.view(tokens, rows, width).transpose(0, 1)
    return y_RND.to(x_RND.dtype) + bias_D


def inverse_fourier_matrix(wave_QN: Tensor, period: int) -> Tensor:
    """Return the matrix [N, Q] of the inverse transform from cosines or sines [Q, N]. Each frequency
    counts twice, because it stands for its negative counterpart, too. Only the first and the last, which
    have no counterpart, count once."""
    share_Q1 = torch.full((len(wave_QN), 1), 2 / period, dtype=wave_QN.dtype)
    share_Q1[0] = 1 / period
    share_Q1[-1] = 1 / period
    return (wave_QN * share_Q1).t()


def split_groups(x_QX: Tensor, rows: int, groups: int) -> Tensor:
    """Reshape [Q, R * D] to [Q * G, R, c], one matrix [R, c] for each of Q frequencies and G groups."""
    group_width = x_QX.shape[1] // rows // groups
    x_QRGc = x_QX.view(-1, rows, groups, group_width)
    return x_QRGc.transpose(1, 2).reshape(-1, rows, group_width)


def join_groups(x_QX: Tensor, rows: int, groups: int) -> Tensor:
    """Reshape [Q * G, R, c] to [Q, R * D], the inverse of split_groups."""
    group_width = x_QX.shape[2]
    x_QGRc = x_QX.view(-1, groups, rows, group_width)
    return x_QGRc.transpose(1, 2).reshape(-1, rows * groups * group_width)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cosines_and_sines(step_T: Tensor, period: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines) [Q, T] at T time steps for all frequencies of an even period. Turns are
    reduced modulo the period as integers, so that large angles lose no precision."""
    frequency_Q1 = torch.arange(period // 2 + 1)[:, None]
    turn_QT = (frequency_Q1 * step_T).remainder(period)
    angle_QT = turn_QT.double() * (2 * math.pi / period)
    return angle_QT.cos().to(dtype), angle_QT.sin().to(dtype)


def convolve_in_blocks(
    x_RND: Tensor,
    weight_DcK: Tensor,
    bias_D: Tensor,
    groups: int,
) -> Tensor:
    """Do what engine.model.encoder.convolve does, by matrix products that suit a GPU."""
    y_RND: Tensor = BlockConvolution.apply(x_RND, weight_DcK, groups)
    return y_RND + bias_D


class BlockConvolution(torch.autograd.Function):
    """Convolution over time as one matrix product per group, without the bias. The tokens are cut into
    blocks of OUTPUTS_PER_BLOCK outputs; each block is the inputs that it needs times a band matrix
    made of the weight. This takes a fifth more arithmetic than a direct convolution, in a shape that
    suits tensor cores. The input's gradient is computed in the same way. For the weight's gradient, a
    matrix product gives OUTPUTS_PER_BLOCK terms for each tap, which are summed in float32, always in
    the same order."""

    @staticmethod
    def forward(x_RND: Tensor, weight_DcK: Tensor, groups: int) -> Tensor:
        return multiply_blocks_by_band(x_RND, weight_DcK, groups, weight_DcK.shape[2] // 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        *saved, ctx.groups = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_RND,) = grads
        # with autocast, the saved x and weight are float32 and the gradient bfloat16, so both are cast to it
        x_RND, weight_DcK = ctx.saved_tensors
        groups, group_width, kernel = ctx.groups, weight_DcK.shape[1], weight_DcK.shape[2]
        weight_Goik = weight_DcK.to(grad_RND.dtype)
        weight_Goik = weight_Goik.view(groups, group_width, group_width, kernel)
        turned = weight_Goik.transpose(1, 2).flip(3)
        turned = turned.reshape(weight_DcK.shape)
        grad_x = multiply_blocks_by_band(grad_RND, turned, groups, (kernel - 1) // 2)
        grad_weight = weight_gradient(x_RND.to(grad_RND.dtype), grad_RND, kernel, groups)
        return (
            grad_x.to(x_RND.dtype),
            grad_weight.to(weight_DcK.dtype),
            None,
        )


def weight_gradient(
    x_RND: Tensor,
    grad_RND: Tensor,
    kernel: int,
    groups: int,
) -> Tensor:
    """Return the gradient [D, c, K] of the weight of BlockConvolution."""
    rows, tokens, width = x_RND.shape
    group_width, blocks = width // groups, -(-tokens // OUTPUTS_PER_BLOCK)
    y = F.pad(grad_RND, (0, 0, 0, blocks * OUTPUTS_PER_BLOCK - tokens))
    y = y.reshape(rows * blocks, OUTPUTS_PER_BLOCK, groups, group_width).permute(2, 0, 1, 3)
    y = y.reshape(groups, rows * blocks, OUTPUTS_PER_BLOCK * group_width)
    x = block_inputs(x_RND, kernel, groups, kernel // 2).transpose(1, 2)
    # band: [G, window, c in, OUTPUTS_PER_BLOCK, c out]
    band = torch.bmm(x, y).view(groups, -1, group_width, OUTPUTS_PER_BLOCK, group_width)
    # Tap k connects output b to input b + k. This uses views instead of as_strided, because the
    # compiler may pad `band`: with as_strided and fixed strides, the gradient was wrong on an H100,
    # without any error.
    # taps: [G, K, c in, c out, OUTPUTS_PER_BLOCK]
    taps = band.unfold(1, OUTPUTS_PER_BLOCK, 1).diagonal(dim1=3, dim2=5)
    summed = taps.sum(-1, dtype=torch.promote_types(taps.dtype, torch.float32))
    return summed.permute(0, 3, 2, 1).reshape(width, group_width, kernel)


def multiply_blocks_by_band(
    x_RND: Tensor,
    weight_DcK: Tensor,
    groups: int,
    left: int,
) -> Tensor:
    """Convolve x with the weight, OUTPUTS_PER_BLOCK outputs at a time. The first tap of output n is at
    input n - left."""
    rows, tokens, width = x_RND.shape
    kernel, group_width = weight_DcK.shape[2], width // groups
    taps_Goik = weight_DcK.view(groups, group_width, group_width, kernel)
    taps_Goik = F.pad(taps_Goik, (OUTPUTS_PER_BLOCK - 1, OUTPUTS_PER_BLOCK - 1))
    # band: [G, window, c in, OUTPUTS_PER_BLOCK, c out], flattened in the next line
    band = taps_Goik.unfold(3, OUTPUTS_PER_BLOCK, 1).flip(4).permute(0, 3, 2, 4, 1)
    band = band.reshape(groups, -1, OUTPUTS_PER_BLOCK * group_width)
    y = torch.bmm(block_inputs(x_RND, kernel, groups, left), band)
    y = y.view(groups, rows, -1, group_width)[:, :, :tokens]
    return y.permute(1, 2, 0, 3).reshape(rows, tokens, width)


def block_inputs(
    x_RND: Tensor,
    kernel: int,
    groups: int,
    left: int,
) -> Tensor:
    """Return the inputs that each block of outputs needs, [G, R * blocks, window * c in]. The inputs of one
    block are a window of kernel + OUTPUTS_PER_BLOCK - 1 tokens."""
    rows, tokens, width = x_RND.shape
    blocks = -(-tokens // OUTPUTS_PER_BLOCK)
    right = blocks * OUTPUTS_PER_BLOCK - tokens + kernel - 1 - left
    x_RTGc = F.pad(x_RND, (0, 0, left, right))
    x_RTGc = x_RTGc.reshape(rows, -1, groups, width // groups)
    windows = x_RTGc.unfold(1, kernel + OUTPUTS_PER_BLOCK - 1, OUTPUTS_PER_BLOCK)
    windows = windows.permute(2, 0, 1, 4, 3)
    return windows.reshape(groups, rows * blocks, -1)


REPLACEMENTS: dict[str, dict[str, Operation]] = {
    "cpu": {
        "dropout": dropout,
        "linear": linear,
        "group_norm_gelu": group_norm_gelu,
        "attention": attention,
        "convolve": convolve_by_fourier,
    },
    "cuda": {"convolve": convolve_in_blocks},
}


def pick_operation(name: str, plain: Operation, setting: str, x: Tensor) -> Operation:
    """Return the replacement of the operation `name` for the device of x. Return `plain` if there is none, if
    `setting` (model.kernels) is `plain`, or if torch.compile compiles the operation for a CPU."""
    device = "cpu" if x.device.type == "cpu" else "cuda"
    if setting == "plain" or (device == "cpu" and torch.compiler.is_compiling()):
        return plain
    return REPLACEMENTS[device].get(name, plain)


def disable_tf32() -> None:
    """Turn off TensorFloat32 on a GPU, which torch uses by default in convolutions, but not in
    matrix products.

    It affects the whole process: programs call it at their start; importing the engine does not."""
    torch.backends.cudnn.allow_tf32 = False
