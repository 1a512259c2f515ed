"""The wav2vec 2.0 encoder for ECGs, and the interface that other encoders must implement for
pre-training.

    x_RLT -> ConvStack -> z_RNF -> layer norm            (features: the quantiser's input, with the feature penalty)
          -> projection -> dropout -> mask embedding -> + GELU(positional convolution) -> layer norm -> dropout
          -> layers x [attention, + residual, norm, feed-forward, + residual, norm] -> c_RND                      (context)

`pick_operation` replaces plain operations by faster ones (engine.model.kernels). Convolution weights are
stored in the layout for matrix products, [out, kernel * in]; downstream.interop.fairseq converts them
to the authors' [out, in, kernel].

Source: paper, section "Pre-training"; fairseq-signals models/wav2vec2/wav2vec2.py,
models/transformer.py:87 (post-norm, no norm after the last layer),
modules/conv_feature_extraction.py:21-60 (no bias; one group norm, in block 0, with a group for each
channel), modules/conv_positional_encoding.py:15-28, modules/multi_head_attention.py. Shapes:
engine.model.config; K taps.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from .config import ModelConfig
from .kernels import pick_operation


@runtime_checkable
class MaskedEncoder(Protocol):
    """The interface that an encoder must have for the local objective. For global objectives `width` and
    forward(x_RLT) -> c_RND are enough."""

    width: int  # D, the width of the output
    feature_width: int  # F, the width of the features

    def features(self, x_RLT: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the normalised features z_RNF; the mean square of the features before normalisation, a
        scalar). A token may depend only on its own samples, and on the mean and variance of a group norm."""

    def context(self, z_RNF: Tensor, mask_RN: Tensor | None) -> Tensor:
        """Return c_RND, which must not depend on the features of masked tokens."""


class Dropout(nn.Module):
    """Dropout that is faster on a CPU if `kernels` (model.kernels) is `auto`."""

    def __init__(self, p: float, kernels: str) -> None:
        super().__init__()
        self.p = p
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        dropout = pick_operation("dropout", F.dropout, self.kernels, x)
        return dropout(x, self.p, self.training)


class Linear(nn.Linear):
    """A linear layer that is faster on a CPU if `kernels` (model.kernels) is `auto`."""

    def __init__(self, inputs: int, outputs: int, kernels: str) -> None:
        super().__init__(inputs, outputs)
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        linear = pick_operation("linear", F.linear, self.kernels, x)
        return linear(x, self.weight, self.bias)


class ScaleGradient(torch.autograd.Function):
    """Return x unchanged, and multiply its gradient by a factor (fairseq's GradMultiply)."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class ConvBlock(nn.Module):
    """A convolution, a norm (or none) and a GELU: x [R, T, C] -> [R, T // kernel, outputs].

    The stride equals the kernel size. With time before channels, the patches are therefore a view of x,
    and the convolution is a matrix product."""

    def __init__(self, inputs: int, outputs: int, kernel: int, norm: str, kernels: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.kernels = kernels
        self.over_time = norm == "group"
        self.weight = nn.Parameter(torch.empty(outputs, kernel * inputs))
        # for a group norm over time, this module only holds the weights
        self.norm = nn.LayerNorm(outputs) if norm else None

    def forward(self, x_RTC: Tensor) -> Tensor:
        rows, length, width = x_RTC.shape
        steps = length // self.kernel
        patches = x_RTC[:, : steps * self.kernel]
        patches = patches.reshape(rows, steps, self.kernel * width)
        y_RTC = F.linear(patches, self.weight)
        norm = self.norm
        if norm is None:
            return F.gelu(y_RTC)
        if self.over_time:
            normalise = pick_operation("group_norm_gelu", group_norm_gelu, self.kernels, y_RTC)
            return normalise(y_RTC, norm.weight, norm.bias, norm.eps)
        return F.gelu(norm(y_RTC))


def group_norm_gelu(y_RTC: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float) -> Tensor:
    """Return GELU(group norm of y over time), where each channel is a group of its own. The norm is computed
    in float32, as in fairseq-signals' modules/fp32_group_norm.py."""
    y = y_RTC.float()
    variance_R1C, mean_R1C = torch.var_mean(y, dim=1, correction=0, keepdim=True)
    scale_R1C = torch.rsqrt(variance_R1C + eps) * weight_C.float()
    shift_R1C = bias_C.float() - mean_R1C * scale_R1C
    normed = torch.addcmul(shift_R1C, y, scale_R1C)
    return F.gelu(normed.to(y_RTC.dtype))


class ConvStack(nn.Module):
    """The convolutions that turn samples into tokens: x_RLT -> z_RNF."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.feature_grad = config.feature_grad
        self.blocks = nn.ModuleList()
        inputs = config.leads
        norm: str = config.conv_norm
        for outputs, kernel in config.conv:
            self.blocks.append(ConvBlock(inputs, outputs, kernel, norm, config.kernels))
            inputs = outputs
            if norm == "group":
                norm = ""  # only the first convolution has a group norm

    def forward(self, x_RLT: Tensor) -> Tensor:
        trained = torch.is_grad_enabled() and self.feature_grad > 0
        first: Any = self.blocks[0]
        with torch.set_grad_enabled(trained):
            z_RNF = x_RLT.transpose(1, 2).to(first.weight.dtype)
            for block in self.blocks:
                z_RNF = block(z_RNF)
        if self.feature_grad in (0, 1) or not torch.is_grad_enabled():
            return z_RNF
        scaled: Tensor = ScaleGradient.apply(z_RNF, self.feature_grad)
        return scaled


class PositionalConvolution(nn.Module):
    """A grouped convolution over time and a GELU, x_RND -> [R, N, D]. The weight of each tap is gain *
    direction / |direction|."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.groups = config.position_groups
        self.kernels = config.kernels
        self.causal = config.causal
        width, kernel = config.width, config.position_kernel
        self.gain = nn.Parameter(torch.empty(1, 1, kernel))
        self.direction = nn.Parameter(torch.empty(width, width // self.groups, kernel))
        self.bias = nn.Parameter(torch.empty(width))

    def weight(self) -> Tensor:
        # the norm is computed in float32 or better, because it sums thousands of squares
        dtype = self.direction.dtype
        direction = self.direction.to(torch.promote_types(dtype, torch.float32))
        norm = direction.square().sum((0, 1), keepdim=True).sqrt()
        weight = direction * (self.gain.to(norm.dtype) / norm)
        return weight.to(dtype)

    def forward(self, x_RND: Tensor) -> Tensor:
        tokens = x_RND.shape[1]
        if self.causal:  # zeros in front delay the input, so that no tap looks ahead
            x_RND = F.pad(x_RND, (0, 0, (self.gain.numel() - 1) // 2, 0))
        kernels = self.kernels if self.training else "plain"
        convolution = pick_operation("convolve", convolve, kernels, x_RND)
        y_RND = convolution(x_RND, self.weight(), self.bias, self.groups)
        return F.gelu(y_RND[:, :tokens])


def convolve(x_RND: Tensor, weight_DcK: Tensor, bias_D: Tensor, groups: int) -> Tensor:
    """Return the grouped convolution of x over time, [R, N, D]."""
    taps = weight_DcK.shape[2]
    # fairseq-signals pads both ends by taps // 2 and, if taps is even, drops the last output; the result is
    # the same
    x_RDN = F.pad(x_RND.transpose(1, 2), (taps // 2, (taps - 1) // 2))
    low = weight_DcK.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
    if weight_DcK.is_cpu and low:
        # In float32, because on CPUs with AMX, torch 2.13's bf16 convolution returns wrong numbers for groups
        # of 4 to 15 channels and 16 taps
        with torch.autocast("cpu", enabled=False):
            y_RDN = F.conv1d(x_RDN.float(), weight_DcK.float(), bias_D.float(), groups=groups)
        return y_RDN.to(x_RND.dtype).transpose(1, 2)
    return F.conv1d(x_RDN, weight_DcK, bias_D, groups=groups).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.attention_dropout
        self.kernels = config.kernels
        self.causal = config.causal
        self.qkv = Linear(config.width, 3 * config.width, config.kernels)
        self.out = Linear(config.width, config.width, config.kernels)

    def forward(self, x_RND: Tensor) -> Tensor:
        attend = pick_operation("attention", attention, self.kernels, x_RND)
        if self.causal:
            attend = causal_attention
        dropout_p = self.dropout if self.training else 0.0
        attended = attend(self.qkv(x_RND), self.heads, dropout_p)
        y: Tensor = self.out(attended)
        return y


def attention(qkv: Tensor, heads: int, dropout_p: float, causal: bool = False) -> Tensor:
    """Return multi-head attention [R, N, D] of queries, keys and values side by side, [R, N, 3 D]. It takes
    no mask, because torch's fastest implementations on a GPU take none."""
    q_RHNd, k_RHNd, v_RHNd = split_heads(qkv, heads)
    y_RHNd = F.scaled_dot_product_attention(
        q_RHNd, k_RHNd, v_RHNd, dropout_p=dropout_p, is_causal=causal
    )
    return y_RHNd.transpose(1, 2).flatten(2)


causal_attention = partial(attention, causal=True)


def split_heads(qkv: Tensor, heads: int) -> list[Tensor]:
    """Return (queries, keys, values), each [R, heads, N, D / heads], from qkv [R, N, 3 D]."""
    return [part.unflatten(2, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1)]


def attention_backend(model: nn.Module, tokens: int = 156) -> str:
    """Return the name of the implementation of attention that is used in training. If torch chooses it, by
    device, type, shape and version, this is flash, cudnn, efficient or math. It is `omnilead` for the one in
    engine.model.kernels, and `none` if the model has no Attention module."""
    for part in model.modules():
        if isinstance(part, Attention):
            weight, width = part.qkv.weight, part.qkv.in_features
            qkv = torch.empty(1, tokens, 3 * width, dtype=weight.dtype, device=weight.device)
            replaced = pick_operation("attention", attention, part.kernels, qkv) is not attention
            if replaced and not part.causal:
                return "omnilead"
            q, k, v = split_heads(qkv.requires_grad_(), part.heads)
            choice = torch._fused_sdp_choice(q, k, v, None, part.dropout, part.causal)
            return str(SDPBackend(choice).name.removesuffix("_ATTENTION").lower())
    return "none"


class TransformerLayer(nn.Module):
    """Attention and a feed-forward network, each followed by the residual sum and a layer norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.norm1 = nn.LayerNorm(config.width)
        self.fc1 = Linear(config.width, config.ffn, config.kernels)
        self.fc2 = Linear(config.ffn, config.width, config.kernels)
        self.norm2 = nn.LayerNorm(config.width)
        self.dropout = Dropout(config.dropout, config.kernels)
        self.activation_dropout = Dropout(config.activation_dropout, config.kernels)

    def forward(self, x_RND: Tensor) -> Tensor:
        attended_RND = self.dropout(self.attention(x_RND))
        x_RND = self.norm1(x_RND + attended_RND)
        hidden_RNI = F.gelu(self.fc1(x_RND))
        hidden_RNI = self.activation_dropout(hidden_RNI)
        output_RND = self.dropout(self.fc2(hidden_RNI))
        y: Tensor = self.norm2(x_RND + output_RND)
        return y


class Encoder(nn.Module):
    """The authors' encoder, x_RLT -> c_RND. Without `mask` it has no mask embedding, which objectives
    without masked tokens do not need."""

    # True turns on activation checkpointing: a layer stores only its input, and the backward pass
    # computes the layer again with the same dropout
    recomputes = False

    def __init__(self, config: ModelConfig, mask: bool = True) -> None:
        super().__init__()
        self.width = config.width
        self.feature_width = config.feature_width
        self.causal = config.causal
        self.conv = ConvStack(config)
        self.feature_norm = nn.LayerNorm(config.feature_width)
        # there is no projection if features are as wide as the encoder, as in fairseq-signals'
        # ecg_transformer.py
        self.project: nn.Module = nn.Identity()
        if config.feature_width != config.width:
            self.project = nn.Linear(config.feature_width, config.width)
        self.input_dropout = Dropout(config.input_dropout, config.kernels)
        self.mask_embedding = nn.Parameter(torch.empty(config.width)) if mask else None
        self.position = PositionalConvolution(config)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = Dropout(config.dropout, config.kernels)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.layers))

    def features(self, x_RLT: Tensor) -> tuple[Tensor, Tensor]:
        z_RNF = self.conv(x_RLT)
        return self.feature_norm(z_RNF), z_RNF.float().square().mean()

    def context(
        self, z_RNF: Tensor, mask_RN: Tensor | None, keep_RK: Tensor | None = None
    ) -> Tensor:
        """Return the contexts c_RND, which do not depend on the features of masked tokens.

        `keep_RK`, instead of a mask, gives the indices of the only tokens that go through the layers, as
        in a masked autoencoder (ascending if the encoder is causal). The result is then c_RKD; all other
        tokens are masked in the input of the positional convolution."""
        if keep_RK is not None:
            assert mask_RN is None, "what is not in keep_RK is masked: give one of the two"
            mask_RN = torch.ones_like(z_RNF[..., 0], dtype=torch.bool).scatter_(1, keep_RK, False)
        x_RND = self.first_layer_input(z_RNF, mask_RN)
        if keep_RK is not None:
            x_RND = take_tokens(x_RND, keep_RK)
        for layer in self.layers:
            if self.recomputes and torch.is_grad_enabled():
                x_RND = checkpoint(layer, x_RND, use_reentrant=False)
            else:
                x_RND = layer(x_RND)
        return x_RND

    def first_layer_input(self, z_RNF: Tensor, mask_RN: Tensor | None) -> Tensor:
        """Return the input of the first transformer layer: the features after projection, masking, addition of
        the positional convolution, and layer norm."""
        x_RND = self.input_dropout(self.project(z_RNF))
        if mask_RN is not None:
            assert self.mask_embedding is not None, (
                "this encoder was built without a mask embedding"
            )
            x_RND = torch.where(mask_RN[..., None], self.mask_embedding.to(x_RND.dtype), x_RND)
        y_RND: Tensor = self.dropout(self.norm(x_RND + self.position(x_RND)))
        return y_RND

    def forward(self, x_RLT: Tensor) -> Tensor:
        return self.context(self.features(x_RLT)[0], None)

    @staticmethod
    def select_leads(
        weights: Mapping[str, Tensor], rows: Sequence[int], of: int
    ) -> dict[str, Tensor]:
        """Return the weights of a model of fewer leads: the input channels `rows` of the full model, which has
        `of` channels. Its output is the same as that of the full model if all other channels are zero."""
        first = "conv.blocks.0.weight"
        by_lead = weights[first].unflatten(1, (-1, of))
        selected = by_lead[:, :, list(rows)].flatten(1)
        return {**weights, first: selected.contiguous()}


def pool(c_RND: Tensor) -> Tensor:
    """Return the mean over tokens in float32. fairseq-signals (wav2vec2_cmsc.py:28-37) divides by the number of
    non-zero entries instead. This is the same, because the output of a layer norm has no zeros."""
    return c_RND.float().mean(1)


def take_tokens(x_RND: Tensor, slot_RM: Tensor) -> Tensor:
    """Return x_RMD, the tokens of each row at the indices slot_RM."""
    rows, tokens, width = x_RND.shape
    first_R1 = torch.arange(0, rows * tokens, tokens, device=x_RND.device)[:, None]
    return (
        x_RND.reshape(rows * tokens, width)
        .index_select(0, (first_R1 + slot_RM).flatten())
        .view(rows, -1, width)
    )
