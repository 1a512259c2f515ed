"""The positional convolution on a GPU in blocks: matrix products, which suit tensor cores and are
deterministic, unlike the library's grouped convolution in bf16.

By counts of operations and bytes it takes 9 to 11 ms of a step of 512 crops, the library's 30 to 90
(benchmarks/LOG.md); neither was timed. Shapes: engine.model.config; c channels of a group.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 26  # outputs of the convolution in a block: 156 tokens are six blocks


def convolve(
    x_RND: Tensor,
    weight_DcK: Tensor,
    bias_D: Tensor,
    groups: int,
) -> Tensor:
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
        (grad_RND,) = grads
        x_RND, weight_DcK = ctx.saved_tensors  # with autocast they are wider than the gradient
        groups, each, kernel = ctx.groups, weight_DcK.shape[1], weight_DcK.shape[2]
        weight_Goik = weight_DcK.to(grad_RND.dtype)
        weight_Goik = weight_Goik.view(groups, each, each, kernel)
        turned = weight_Goik.transpose(1, 2).flip(3)
        turned = turned.reshape(weight_DcK.shape)
        grad_x = in_blocks(grad_RND, turned, groups, (kernel - 1) // 2)
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
    rows, tokens, width = x_RND.shape
    each, blocks = width // groups, -(-tokens // BLOCK)
    y = F.pad(grad_RND, (0, 0, 0, blocks * BLOCK - tokens))
    y = y.reshape(rows * blocks, BLOCK, groups, each).permute(2, 0, 1, 3)
    y = y.reshape(groups, rows * blocks, BLOCK * each)
    x = patches(x_RND, kernel, groups, kernel // 2).transpose(1, 2)
    band = torch.bmm(x, y)  # [G, window * c in, BLOCK * c out]
    # [G, c out, c in, K, BLOCK]: tap k connects output b to input b + k
    step = each * BLOCK * each  # one step of the window
    taps = band.as_strided(
        (groups, each, each, kernel, BLOCK),
        ((kernel + BLOCK - 1) * step, 1, BLOCK * each, step, step + each),
    )
    summed = taps.sum(-1, dtype=torch.promote_types(taps.dtype, torch.float32))
    return summed.view(width, each, kernel)


def in_blocks(
    x_RND: Tensor,
    weight_DcK: Tensor,
    groups: int,
    left: int,
) -> Tensor:
    """Convolve BLOCK outputs at a time; output n needs inputs from n - left on."""
    rows, tokens, width = x_RND.shape
    kernel, each = weight_DcK.shape[2], width // groups
    taps_Goik = weight_DcK.view(groups, each, each, kernel)
    taps_Goik = F.pad(taps_Goik, (BLOCK - 1, BLOCK - 1))
    # [G, window, c in, BLOCK, c out]
    band = taps_Goik.unfold(3, BLOCK, 1).flip(4).permute(0, 3, 2, 4, 1)
    band = band.reshape(groups, -1, BLOCK * each)
    y = torch.bmm(patches(x_RND, kernel, groups, left), band)
    y = y.view(groups, rows, -1, each)[:, :, :tokens]
    return y.permute(1, 2, 0, 3).reshape(rows, tokens, width)


def patches(
    x_RND: Tensor,
    kernel: int,
    groups: int,
    left: int,
) -> Tensor:
    """The inputs that each block needs: [G, R * blocks, window * c in]."""
    rows, tokens, width = x_RND.shape
    blocks = -(-tokens // BLOCK)
    right = blocks * BLOCK - tokens + kernel - 1 - left
    x_RTGc = F.pad(x_RND, (0, 0, left, right))
    x_RTGc = x_RTGc.reshape(rows, -1, groups, width // groups)
    windows = x_RTGc.unfold(1, kernel + BLOCK - 1, BLOCK)
    windows = windows.permute(2, 0, 1, 4, 3)
    return windows.reshape(groups, rows * blocks, -1)
