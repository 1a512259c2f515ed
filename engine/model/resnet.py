"""A 1-D residual network, the encoder of most published ECG models. `model.encoder: resnet` chooses it.

    x_RLT -> convolution -> four residual blocks, each dividing the length by four -> c_RND, 10
    tokens for 5 s

    block: a, y -> h = convolution(dropout(ReLU(norm(convolution(a))))) + 1x1(max pool(y)) ->
    dropout(ReLU(norm(h))), h

| `model.options` | parameters | GFLOP per crop, forward and backward |
|---|---|---|
| {widths: [32, 48, 80, 96, 128]} | 1.0 M | 2.4 |
| none: [64, 128, 192, 256, 320] | 6.7 M | 14.1 |
| {widths: [96, 192, 320, 448, 576]} | 20.1 M | 35.2 |

The architecture is that of Ribeiro et al. 2020 (Nature Communications 11:1760,
antonior92/automatic-ecg-diagnosis model.py), with two changes. Widths are multiples of 16, which
suits tensor cores. Group norms replace batch norms: a row's output does not depend on the rest of
the batch (which a contrastive loss can exploit without looking at the ECG) nor on the number of
ranks, and there are no running statistics, which bf16 would round.

Convolutions are two-dimensional over one row, because torch has channels-last kernels only for
those.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, channels_last, nn

from .encoder import Dropout

KERNEL, STRIDE, NORM_GROUPS = 17, 4, 8


def convolution(inputs: int, outputs: int, kernel: int = KERNEL, stride: int = 1) -> nn.Conv2d:
    """Return a convolution over time whose output is `stride` times shorter than its input, rounded up."""
    conv = nn.Conv2d(
        inputs,
        outputs,
        kernel_size=(1, kernel),
        stride=(1, stride),
        padding=(0, kernel // 2),
        bias=False,
    )
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv


class ResidualBlock(nn.Module):
    """Two convolutions with a skip connection. The output has the length of the input divided by STRIDE."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs)
        self.norm1 = nn.GroupNorm(NORM_GROUPS, outputs)
        self.conv2 = convolution(outputs, outputs, stride=STRIDE)
        self.norm2 = nn.GroupNorm(NORM_GROUPS, outputs)
        self.skip = convolution(inputs, outputs, kernel=1)
        self.dropout = Dropout(dropout, "auto")

    def forward(self, a: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the output of the block; the sum before the last norm, ReLU and dropout). `a` and `y` are
        these two outputs of the previous block. For the first block, both are the output of the stem."""
        h = F.relu(self.norm1(self.conv1(a)))
        h = self.conv2(self.dropout(h))
        shorter = F.max_pool2d(y, (1, STRIDE + 1), (1, STRIDE), (0, STRIDE // 2))
        h = h + self.skip(shorter)  # the pooling has made `shorter` as long as h
        a = F.relu(self.norm2(h))
        return self.dropout(a), h


class ResNet(nn.Module):
    """a 1-D residual network after Ribeiro et al. 2020, with group norms"""

    def __init__(
        self,
        leads: int = 12,
        widths: Sequence[int] = (64, 128, 192, 256, 320),
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        is_allowed = [
            type(width) is int and width > 0 and width % NORM_GROUPS == 0 for width in widths
        ]
        if not all(is_allowed) or len(widths) < 2:
            raise ValueError(
                f"widths={list(widths)}: must be two or more multiples of {NORM_GROUPS}"
            )
        first = widths[0]
        self.width = widths[-1]
        self.stem = convolution(leads, first)
        self.norm = nn.GroupNorm(NORM_GROUPS, first)
        self.blocks = nn.ModuleList()
        for inputs, outputs in pairwise(widths):
            self.blocks.append(ResidualBlock(inputs, outputs, dropout))

    def forward(self, x_RLT: Tensor) -> Tensor:
        x_RL1T = x_RLT.unsqueeze(2)
        y = self.stem(x_RL1T.contiguous(memory_format=channels_last))
        y = F.relu(self.norm(y))
        a = y
        for block in self.blocks:
            a, y = block(a, y)
        return a.squeeze(2).transpose(1, 2)

    @staticmethod
    def select_leads(
        weights: Mapping[str, Tensor], rows: Sequence[int], of: int
    ) -> dict[str, Tensor]:
        """Return the weights of a model of fewer leads: the input channels `rows` of the full model. Its
        output is the same as that of the full model if all other channels are zero."""
        stem = weights["stem.weight"][:, list(rows)]
        return {**weights, "stem.weight": stem.contiguous()}
