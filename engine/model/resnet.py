"""A 1-D residual network, the encoder that most published ECG models have: `model.encoder: resnet`.

    x_RLT -> convolution -> four residual blocks, each a quarter as long as the one before -> c_RND, 10 tokens of 5 s

    block: a, y -> h = convolution(dropout(ReLU(norm(convolution(a))))) + 1x1(max pool(y)) -> dropout(ReLU(norm(h))), h

| `model.options` | parameters | GFLOP a crop, forward and backward |
|---|---|---|
| {widths: [32, 48, 80, 96, 128]} | 1.0 M | 2.4 |
| none: [64, 128, 192, 256, 320] | 6.7 M | 14.1 |
| {widths: [96, 192, 320, 448, 576]} | 20.1 M | 35.2 |

The form is that of Ribeiro et al. 2020 (Nature Communications 11:1760, antonior92/automatic-ecg-diagnosis model.py), with two
changes. Widths are multiples of 16, as tensor cores like them. Norms are group norms where they have batch norms, so a row's
output does not depend on the rest of the batch, through which a contrastive loss can be lowered without looking at the ECG;
results do not depend on the number of ranks; and there are no running statistics, which bf16 would round.

Convolutions are two-dimensional over one row, since that is where torch has kernels for channels-last memory.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, channels_last, nn

from engine.model.encoder import Dropout

KERNEL, STRIDE, GROUPS = 17, 4, 8


def convolution(inputs: int, outputs: int, kernel: int = KERNEL, stride: int = 1) -> nn.Conv2d:
    """Over time; its output has a `stride`-th of the samples, rounded up."""
    made = nn.Conv2d(inputs, outputs, (1, kernel), (1, stride), (0, kernel // 2), bias=False)
    nn.init.kaiming_normal_(made.weight, nonlinearity="relu")
    return made


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolution(inputs, outputs), nn.GroupNorm(GROUPS, outputs)
        self.conv2, self.norm2 = convolution(outputs, outputs, stride=STRIDE), nn.GroupNorm(GROUPS, outputs)
        self.skip = convolution(inputs, outputs, kernel=1)
        self.dropout = Dropout(dropout, "auto")

    def forward(self, a: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output after activation and before."""
        h = self.conv2(self.dropout(F.relu(self.norm1(self.conv1(a)))))
        h = h + self.skip(F.max_pool2d(y, (1, STRIDE + 1), (1, STRIDE), (0, STRIDE // 2)))  # as many samples as conv2 leaves
        return self.dropout(F.relu(self.norm2(h))), h


class ResNet(nn.Module):
    """a 1-D residual network after Ribeiro et al. 2020, with group norms"""

    def __init__(self, leads: int = 12, widths: Sequence[int] = (64, 128, 192, 256, 320), dropout: float = 0.2) -> None:
        super().__init__()
        if len(widths) < 2 or any(type(width) is not int or width < GROUPS or width % GROUPS for width in widths):
            raise ValueError(f"widths={list(widths)}: two or more are needed, each a multiple of {GROUPS}")
        self.width = widths[-1]
        self.stem, self.norm = convolution(leads, widths[0]), nn.GroupNorm(GROUPS, widths[0])
        self.blocks = nn.ModuleList(ResidualBlock(inputs, outputs, dropout) for inputs, outputs in pairwise(widths))

    def forward(self, x_RLT: Tensor) -> Tensor:
        y = self.stem(x_RLT.unsqueeze(2).contiguous(memory_format=channels_last))
        a = y = F.relu(self.norm(y))
        for block in self.blocks:
            a, y = block(a, y)
        return a.squeeze(2).transpose(1, 2)

    @staticmethod
    def select_leads(weights: Mapping[str, Tensor], rows: Sequence[int], of: int) -> dict[str, Tensor]:
        """Weights for some of the leads: the output is the same as with zeros for the others."""
        return {**weights, "stem.weight": weights["stem.weight"][:, list(rows)].contiguous()}
