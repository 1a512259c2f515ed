"""What stands on the encoder while it is pre-trained, and is thrown away after: projections, quantiser, pooling.

Source: fairseq-signals models/wav2vec2/wav2vec2.py (project_q, final_proj). Shapes: engine.model.config.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.draws import Draws
from engine.model.kernels.dropout import dropout
from engine.model.quantizer import Quantized, Quantizer


class Compared(NamedTuple):
    context_RMP: Tensor
    target_RMP: Tensor
    quantized: Quantized


class LocalHead(nn.Module):
    """Contexts and quantised features of the masked tokens, where they can be compared."""

    def __init__(self, config: ModelConfig, width: int, feature_width: int) -> None:
        super().__init__()
        self.dropout = config.feature_dropout
        self.quantizer = Quantizer(config, feature_width)
        self.target = nn.Linear(config.code_width, config.projection)
        self.context = nn.Linear(width, config.projection)

    def forward(self, c_RND: Tensor, z_RNF: Tensor, draws: Draws, tau: Tensor) -> Compared:
        z_RMF = dropout(take(z_RNF, draws.slot_RM), self.dropout, self.training)
        quantized = self.quantizer(z_RMF, draws.valid_RM, tau, draws.noise_RMGV)
        return Compared(self.context(take(c_RND, draws.slot_RM)), self.target(quantized.values_RMP), quantized)


def take(x_RND: Tensor, slot_RM: Tensor) -> Tensor:
    """The tokens of each slot: x_RMD."""
    rows, tokens, width = x_RND.shape
    first_R1 = torch.arange(0, rows * tokens, tokens, device=x_RND.device)[:, None]
    return x_RND.reshape(rows * tokens, width).index_select(0, (first_R1 + slot_RM).flatten()).view(rows, -1, width)


def pool(c_RND: Tensor) -> Tensor:
    """The mean over tokens, in float32. The authors divide by the number of entries that are not zero (wav2vec2_cmsc.py:28-37),
    which of a layer norm's output are all of them."""
    return c_RND.float().mean(1)
