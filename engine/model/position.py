"""The positional convolution: grouped, over time, as long as its input, and three ways to compute it.

    conv    the library's grouped convolution
    blocks  a matrix product a group: BLOCK outputs at a time from the inputs they look at, the weight written into a band
    dft     input and weight as sums of cosines and sines, multiplied frequency by frequency: a tenth of the arithmetic
    auto    blocks on a GPU; on a CPU dft while training, libraries being slow at a grouped convolution's gradients, else conv

Source: fairseq-signals modules/conv_positional_encoding.py:15-28. Shapes: engine.model.config; Q frequencies, c channels of a
group.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.kernels.gelu import gelu

BLOCK = 26  # 156 tokens are six blocks


def exact_float32() -> None:
    """No TensorFloat32 on a GPU, which is torch's default in convolutions, though not in matrix products.

    It holds for the whole process: programs call it when they start, and importing the engine changes nothing."""
    torch.backends.cudnn.allow_tf32 = False


class PositionalConvolution(nn.Module):
    """x_RND -> GELU(grouped convolution over time), as long as the input. Each tap's weight is gain * direction, normed."""

    def __init__(self, width: int, kernel: int, groups: int, form: str = "auto") -> None:
        super().__init__()
        self.kernel, self.groups, self.form = kernel, groups, form
        self.gain = nn.Parameter(torch.empty(1, 1, kernel))
        self.direction = nn.Parameter(torch.empty(width, width // groups, kernel))
        self.bias = nn.Parameter(torch.empty(width))

    def weight(self) -> Tensor:
        direction = exactly(self.direction)  # its norm is a sum of thousands of squares
        norm = direction.square().sum((0, 1), keepdim=True).sqrt()
        return (direction * (self.gain.to(norm.dtype) / norm)).to(self.direction.dtype)

    def forward(self, x_RND: Tensor) -> Tensor:
        form = self.form
        if form == "auto":
            form = "blocks" if x_RND.is_cuda else "dft" if self.training and x_RND.device.type == "cpu" else "conv"
        if form == "dft":
            return gelu(by_dft(x_RND, self.weight(), self.groups) + self.bias)
        if form == "blocks":
            y_RND: Tensor = Blocks.apply(x_RND, self.weight(), self.groups)
            return gelu(y_RND + self.bias)
        left, right = self.kernel // 2, (self.kernel - 1) // 2  # the authors pad both sides alike and drop the last step
        x_RDN = F.pad(x_RND.transpose(1, 2), (left, right))
        y_RDN = F.conv1d(x_RDN, self.weight(), self.bias, groups=self.groups)
        return gelu(y_RDN.transpose(1, 2))


class Blocks(torch.autograd.Function):
    """A fifth more arithmetic than needed, in a shape that matrix units like. The input's gradient is a convolution too. The
    weight's is a product, in which each tap stands BLOCK times; those are summed in float32, always in the same order."""

    @staticmethod
    def forward(x_RND: Tensor, weight_DcK: Tensor, groups: int) -> Tensor:
        return in_blocks(x_RND, weight_DcK, groups, weight_DcK.shape[2] // 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        *saved, ctx.groups = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RND, weight_DcK = (saved.to(grads[0].dtype) for saved in ctx.saved_tensors)  # in autocast they are wider
        rows, tokens, width = x_RND.shape
        groups, each, kernel = ctx.groups, width // ctx.groups, weight_DcK.shape[2]
        turned = weight_DcK.view(groups, each, each, kernel).transpose(1, 2).flip(3).reshape(weight_DcK.shape)
        grad_x = in_blocks(grads[0], turned, groups, (kernel - 1) // 2)

        blocks, window = -(-tokens // BLOCK), kernel + BLOCK - 1
        y = F.pad(grads[0], (0, 0, 0, blocks * BLOCK - tokens)).reshape(rows * blocks, BLOCK, groups, each)
        y = y.permute(2, 0, 1, 3).reshape(groups, rows * blocks, BLOCK * each)
        band = torch.bmm(patches(x_RND, kernel, groups, kernel // 2).transpose(1, 2), y)  # [G, window * c in, BLOCK * c out]
        step = each * BLOCK * each  # of the window
        sizes, strides = (groups, each, each, kernel, BLOCK), (window * step, 1, BLOCK * each, step, step + each)
        taps = band.as_strided(sizes, strides)  # [G, c out, c in, K, BLOCK]: tap k is where output b meets input b + k
        grad_weight = taps.sum(-1, dtype=torch.promote_types(taps.dtype, torch.float32)).view_as(weight_DcK)
        x_dtype, weight_dtype = (saved.dtype for saved in ctx.saved_tensors)
        return grad_x.to(x_dtype), grad_weight.to(weight_dtype), None


def in_blocks(x_RND: Tensor, weight_DcK: Tensor, groups: int, left: int) -> Tensor:
    """BLOCK outputs at a time; output n looks at the inputs from n - left on."""
    rows, tokens, width = x_RND.shape
    kernel, each, blocks = weight_DcK.shape[2], width // groups, -(-tokens // BLOCK)
    taps_Goik = F.pad(weight_DcK.view(groups, each, each, kernel), (BLOCK - 1, BLOCK - 1))
    band = taps_Goik.unfold(3, BLOCK, 1).flip(4).permute(0, 3, 2, 4, 1)  # [G, window, c in, BLOCK, c out]
    y = torch.bmm(patches(x_RND, kernel, groups, left), band.reshape(groups, -1, BLOCK * each))
    return y.view(groups, rows, blocks * BLOCK, each)[:, :, :tokens].permute(1, 2, 0, 3).reshape(rows, tokens, width)


def patches(x_RND: Tensor, kernel: int, groups: int, left: int) -> Tensor:
    """What each block looks at: [G, R * blocks, window * c in]."""
    rows, tokens, width = x_RND.shape
    blocks, window = -(-tokens // BLOCK), kernel + BLOCK - 1
    x_RTGc = F.pad(x_RND, (0, 0, left, blocks * BLOCK - tokens + kernel - 1 - left)).reshape(rows, -1, groups, width // groups)
    return x_RTGc.unfold(1, window, BLOCK).permute(2, 0, 1, 4, 3).reshape(groups, rows * blocks, -1)


def by_dft(x_RND: Tensor, weight_DcK: Tensor, groups: int) -> Tensor:
    """The convolution theorem, in float32 or better. A period of tokens + kernel / 2 is enough: what wraps meets no output.

    The transforms are matrix products: at some hundred tokens these beat an FFT, and every device has them."""
    rows, tokens, width = x_RND.shape
    kernel, each = weight_DcK.shape[2], width // groups
    period = tokens + kernel // 2
    period += period % 2
    x_NX = exactly(x_RND.transpose(0, 1).reshape(tokens, rows * width))
    cos_QN, sin_QN = waves(torch.arange(tokens, device=x_RND.device), period, x_NX.dtype)
    cos_QK, sin_QK = waves(torch.arange(kernel, device=x_RND.device) - kernel // 2, period, x_NX.dtype)

    def split(x: Tensor) -> Tensor:
        return x.view(-1, rows, groups, each).transpose(1, 2).reshape(-1, rows, each)  # [Q * G, R, c]

    def joined(x: Tensor) -> Tensor:
        return x.view(-1, groups, rows, each).transpose(1, 2).reshape(-1, rows * width)  # [Q, R * D]

    with torch.autocast(x_RND.device.type, enabled=False):
        taps_WK = exactly(weight_DcK.view(groups, each, each, kernel).transpose(1, 2).reshape(-1, kernel))
        x_re, x_im = split(cos_QN @ x_NX), split(sin_QN @ x_NX)  # im: of the conjugate
        w_re, w_im = ((wave_QK @ taps_WK.t()).view(-1, each, each) for wave_QK in (cos_QK, sin_QK))
        y_re = torch.baddbmm(torch.bmm(x_re, w_re), x_im, w_im)
        y_im = torch.baddbmm(torch.bmm(x_im, w_re), x_re, w_im, alpha=-1)
        twice_Q1 = torch.full(
            (len(cos_QN), 1), 2 / period, dtype=x_NX.dtype, device=x_RND.device
        )  # a frequency and its mirror image
        twice_Q1[0] = twice_Q1[-1] = 1 / period
        y_NX = torch.addmm((cos_QN * twice_Q1).t() @ joined(y_re), (sin_QN * twice_Q1).t(), joined(y_im))
    return y_NX.view(tokens, rows, width).transpose(0, 1).to(x_RND.dtype)


def exactly(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def waves(step_T: Tensor, period: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [Q, T] of every frequency of an even period. Exact angles: whole numbers modulo the period."""
    frequency_Q1 = torch.arange(period // 2 + 1, device=step_T.device)[:, None]
    angle_QT = (frequency_Q1 * step_T).remainder(period).double() * (2 * math.pi / period)
    return angle_QT.cos().to(dtype), angle_QT.sin().to(dtype)
