"""Define ECGFounder's network, a RegNet-like residual network of 31 million weights (Li et al. 2024,
arXiv:2410.04133), as an encoder for `omnilead convert from-torch`. It is written from the paper, with the
sizes and names of the authors' published code. The published network does not use its batch norms, so
these are left out here, and so is the classifier `dense`.
"""

import torch
import torch.nn.functional as F
from torch import nn

# (channels, number of blocks) of each stage
STAGES = ((64, 2), (160, 2), (160, 2), (400, 3), (400, 3), (1024, 4), (1024, 4))
KERNEL = GROUP = 16


class Convolution(nn.Module):
    """A convolution whose input is padded with zeros on both sides, so that it returns
    ceil(samples / stride) samples."""

    def __init__(self, inputs, outputs, kernel=1, stride=1, groups=1):
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, stride, groups=groups)
        self.kernel, self.stride = kernel, stride

    def forward(self, x):
        samples = x.shape[-1]
        zeros = max(0, (samples - 1) // self.stride * self.stride + self.kernel - samples)
        return self.conv(F.pad(x, (zeros // 2, zeros - zeros // 2)))


class Block(nn.Module):
    """A bottleneck block of grouped convolutions, with squeeze-and-excitation and a shortcut."""

    def __init__(self, inputs, width, stride, first):
        super().__init__()
        self.conv1 = Convolution(inputs, width)
        self.conv2 = Convolution(width, width, KERNEL, stride, width // GROUP)
        self.conv3 = Convolution(width, width)
        self.se_fc1, self.se_fc2 = nn.Linear(width, width // 2), nn.Linear(width // 2, width)
        self.stride, self.first = stride, first

    def forward(self, x):
        y = self.conv1(x if self.first else F.silu(x))
        y = self.conv3(F.silu(self.conv2(F.silu(y))))
        gate = self.se_fc2(F.silu(self.se_fc1(y.mean(-1)))).sigmoid()
        # This is max_pool1d of the padded x. It is written without F.pad and max_pool1d one after the
        # other, because onnxruntime would fuse them and lose the padding (onnxruntime issue #24737)
        if self.stride == 2:
            x = torch.maximum(x[..., ::2], F.pad(x, (0, x.shape[-1] % 2))[..., 1::2])
        more = y.shape[1] - x.shape[1]
        return y * gate[..., None] + F.pad(x, (0, 0, more // 2, more - more // 2))


class Stage(nn.Module):
    def __init__(self, inputs, width, blocks, first):
        super().__init__()
        self.block_list = nn.ModuleList([Block(inputs, width, 2, first)])
        for _ in range(blocks - 1):
            self.block_list.append(Block(width, width, 1, False))


class Encoder(nn.Module):
    def __init__(self, leads):
        super().__init__()
        self.first_conv = Convolution(leads, STAGES[0][0], KERNEL, 2)
        self.stage_list, self.width = nn.ModuleList(), STAGES[0][0]
        for width, blocks in STAGES:
            self.stage_list.append(Stage(self.width, width, blocks, not self.stage_list))
            self.width = width

    def forward(self, x_RLT):
        x = F.silu(self.first_conv(x_RLT))
        for stage in self.stage_list:
            for block in stage.block_list:
                x = block(x)
        return x.transpose(1, 2)
