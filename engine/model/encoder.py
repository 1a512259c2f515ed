"""Local features to contexts: the transformer of wav2vec 2.0, and what any other encoder must offer to be pre-trained.

    x_RLT -> ConvStack -> z_RNF -> layer norm            (features: what the quantiser sees, with the penalty on their size)
          -> projection -> dropout -> mask embedding -> + GELU(positional convolution) -> layer norm -> dropout
          -> layers x [attention, + residual, norm, feed-forward, + residual, norm] -> c_RND                      (context)

Source: paper, section "Pre-training"; fairseq-signals models/wav2vec2/wav2vec2.py, models/transformer.py:87 (post-norm, no
norm after the last layer), modules/conv_positional_encoding.py:15-28, modules/multi_head_attention.py. Shapes:
engine.model.config.
"""

from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.model.config import ModelConfig
from engine.model.features import ConvStack
from engine.model.kernels.dropout import dropout
from engine.model.kernels.gelu import gelu
from engine.model.position import PositionalConvolution


@runtime_checkable
class MaskedEncoder(Protocol):
    """What the local objective asks of an encoder. For the global ones, `width` and forward(x_RLT) -> c_RND are enough."""

    width: int  # D
    feature_width: int  # F

    def features(self, x_RLT: Tensor) -> tuple[Tensor, Tensor]:
        """z_RNF, each token made of its own samples only, and the mean square of the features before they were normalised."""

    def context(self, z_RNF: Tensor, mask_RN: Tensor | None) -> Tensor:
        """c_RND, with the masked tokens hidden."""


FUSED = {  # on a GPU; on a CPU torch has one
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout, self.kind = config.heads, config.attention_dropout, config.attention
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width)

    def forward(self, x_RND: Tensor) -> Tensor:
        rows, tokens, width = x_RND.shape
        qkv = self.qkv(x_RND)
        dropout_p = self.dropout if self.training else 0.0
        if self.kind == "short" and qkv.is_cuda and qkv.dtype != torch.float32 and tokens <= 256:
            from engine.model.kernels import short  # needs triton, which torch for a GPU brings

            short_y: Tensor = self.out(short.attention(qkv, self.heads, dropout_p))
            return short_y
        if x_RND.device.type == "cpu":
            q_RHNd, k_RHNd, v_RHNd = qkv.view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).contiguous().unbind(0)
        else:
            q_RHNd, k_RHNd, v_RHNd = (part.view(rows, tokens, self.heads, -1).transpose(1, 2) for part in qkv.chunk(3, -1))
        slow = dropout_p > 0 and x_RND.device.type == "cpu"  # there, torch fuses it without dropout only
        manual = self.kind == "manual" or (self.kind == "auto" and slow)
        if manual:
            y_RHNd = manual_attention(q_RHNd, k_RHNd, v_RHNd, dropout_p)
        else:
            with sdpa_kernel(FUSED[self.kind]) if self.kind in FUSED and x_RND.device.type != "cpu" else nullcontext():
                y_RHNd = F.scaled_dot_product_attention(q_RHNd, k_RHNd, v_RHNd, dropout_p=dropout_p)
        y: Tensor = self.out(y_RHNd.transpose(1, 2).reshape(rows, tokens, width))
        return y


def manual_attention(q_RHNd: Tensor, k_RHNd: Tensor, v_RHNd: Tensor, dropout_p: float = 0.0) -> Tensor:
    """The reference; in bf16 on some CPUs the faster one at 156 tokens."""
    scores = (q_RHNd * q_RHNd.shape[-1] ** -0.5) @ k_RHNd.transpose(-1, -2)
    shares: Tensor = Softmax.apply(scores)
    return dropout(shares, dropout_p) @ v_RHNd


class Softmax(torch.autograd.Function):
    """Over the last axis, in float32; its gradient from what it gave, in whatever precision that is kept."""

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


class Linear(nn.Linear):
    """On a CPU the bias is added after the product: one that starts from copies of the bias takes 3 % longer."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and x.dim() == 3 and not torch.is_autocast_enabled(x.device.type):
            y: Tensor = Product.apply(x, self.weight, self.bias)
            return y
        if x.device.type != "cpu":
            return super().forward(x)
        return F.linear(x, self.weight).add_(self.bias)


class Product(torch.autograd.Function):
    """x @ weight + bias for a compiler: the bias's gradient is summed row by row first, in the kernel that makes y's gradient,
    which is not read again for it."""

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
        return (y_XO @ weight_OI).view_as(x_RNI), y_XO.t() @ x_RNI.flatten(0, 1), bias_O.to(weight_OI.dtype)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout, self.activation_dropout = config.dropout, config.activation_dropout
        self.attention = Attention(config)
        self.norm1 = nn.LayerNorm(config.width)
        self.fc1 = Linear(config.width, config.ffn)
        self.fc2 = Linear(config.ffn, config.width)
        self.norm2 = nn.LayerNorm(config.width)

    def forward(self, x_RND: Tensor) -> Tensor:
        """Sums and norms are of one long matrix: from rows of tokens a compiler would make norm 1's input again, in float32."""
        x_XD = x_RND.flatten(0, 1)
        x_XD = self.norm1(x_XD + dropout(self.attention(x_RND).flatten(0, 1), self.dropout, self.training))
        hidden_RNI = dropout(gelu(self.fc1(x_XD.view_as(x_RND))), self.activation_dropout, self.training)
        y: Tensor = self.norm2(x_XD + dropout(self.fc2(hidden_RNI).flatten(0, 1), self.dropout, self.training))
        return y.view_as(x_RND)


class Encoder(nn.Module):
    """x_RLT -> c_RND. `mask` false: no mask embedding, for objectives that hide nothing."""

    def __init__(self, config: ModelConfig, mask: bool = True) -> None:
        super().__init__()
        self.width, self.feature_width = config.width, config.feature_width
        self.input_dropout, self.dropout = config.input_dropout, config.dropout
        self.conv = ConvStack(config)
        self.feature_norm = nn.LayerNorm(config.feature_width)
        same = config.feature_width == config.width  # then the authors project nothing (ecg_transformer.py)
        self.project: nn.Module = nn.Identity() if same else nn.Linear(config.feature_width, config.width)
        self.mask_embedding = nn.Parameter(torch.empty(config.width)) if mask else None
        self.position = PositionalConvolution(config.width, config.position_kernel, config.position_groups, config.position)
        self.norm = nn.LayerNorm(config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))

    def features(self, x_RLT: Tensor) -> tuple[Tensor, Tensor]:
        z_RNF = self.conv(x_RLT)
        return self.feature_norm(z_RNF), z_RNF.float().square().mean()

    def context(self, z_RNF: Tensor, mask_RN: Tensor | None) -> Tensor:
        x_RND = self.enter(z_RNF, mask_RN)
        for layer in self.layers:
            x_RND = layer(x_RND)
        return x_RND

    def enter(self, z_RNF: Tensor, mask_RN: Tensor | None) -> Tensor:
        """What the first layer sees."""
        x_RND = dropout(self.project(z_RNF), self.input_dropout, self.training)
        if mask_RN is not None:
            assert self.mask_embedding is not None, "this encoder was built without a mask embedding"
            x_RND = torch.where(mask_RN[..., None], self.mask_embedding.to(x_RND.dtype), x_RND)
        x_RND = self.norm(x_RND + self.position(x_RND))
        return dropout(x_RND, self.dropout, self.training)

    def forward(self, x_RLT: Tensor) -> Tensor:
        return self.context(self.features(x_RLT)[0], None)
