"""The objective of joint-embedding prediction (JEPA). `objective.method: jepa` chooses it.

    target_RND    = layer_norm(target(x))                 without gradient; target: the encoder, its weights averaged
    predicted_RND = predict(context(features(x), hidden)) without the hidden tokens
    loss          = mean over rows of the mean of smooth_l1(predicted, target) over the tokens of the row's blocks
    target       <- momentum * target + (1 - momentum) * encoder          after each step

Each row has one long block of context and four short blocks to predict; hidden is what lies in a short
block or outside the long one. The averaged weights are kept in float32, since in bf16 one step changes
nothing: they are buffers, so every rank and every checkpoint holds all of them at any ZeRO stage. They
are what is exported, as in I-JEPA; the predictor is thrown away.

Nothing contrasts different ECGs, so a constant would be a perfect prediction. `target_spread`, in the
log, is the targets' standard deviation over tokens and ECGs: 0 if all of them are equal.

Source: Assran et al. 2023 (I-JEPA: blocks, averaged target), with smooth L1 and one layer that predicts,
as pre-training studies of ECGs have it. Shapes: engine.model.config.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..settings.errors import ConfigError
from .draws import ModelStream, random_integers
from .s4 import CHUNK_TOKENS, S4Layer, StateSpace

PREDICTED_BLOCKS = 4  # number of blocks to predict in each row
# (shortest, longest) length of the block of context, and of a block to predict, as shares of a row's tokens
CONTEXT_SHARES = (0.85, 1.0)
PREDICTED_SHARES = (0.15, 0.2)
FEWEST_TOKENS = 20  # with fewer tokens in a window, the four blocks to predict may leave no context


class JointEmbedding(nn.Module):
    """The objective `jepa`. It predicts the outputs that a copy of the encoder with averaged weights has for
    tokens hidden from the encoder."""

    def __init__(self, encoder: Any, momentum: float = 0.996) -> None:
        super().__init__()
        if not hasattr(encoder, "context") or getattr(encoder, "causal", False):
            raise ConfigError(
                "needs an encoder that can mask tokens and sees earlier and later ones: set model.causal=false; for "
                "s4 set model.options={bidirectional: true}; a class of yours needs features() and context()"
            )
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum={momentum}: must be at least 0 and less than 1")
        self.momentum = momentum
        space = StateSpace(encoder.width, states=8, length=300, bidirectional=True)
        self.predictor = S4Layer(space, encoder.width, dropout=0.0)
        self.names = [name for name, _ in encoder.named_parameters()]
        self.statistics = [name for name in encoder.state_dict() if name not in self.names]
        self.target = copy_with_weights_as_buffers(encoder)

    def train(self, mode: bool = True) -> "JointEmbedding":
        super().train(mode)
        self.target.eval()  # the targets of the prediction are computed without dropout
        return self

    def forward(
        self, encoder: Any, x_BSLT: Tensor, keys_BS: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        x_RLT = x_BSLT.flatten(0, 1)
        z_RNF, _ = encoder.features(x_RLT)
        hidden_RN, weight_RN = draw_blocks(keys_BS.flatten(), z_RNF.shape[1])
        predicted_RND = self.predictor(encoder.context(z_RNF, hidden_RN))
        target_RND = self.targets(x_RLT, z_RNF.dtype)
        with torch.autocast(x_RLT.device.type, enabled=False):
            error_RND = F.smooth_l1_loss(predicted_RND.float(), target_RND, reduction="none")
            error_R = (error_RND.mean(2) * weight_RN).sum(1) / weight_RN.sum(1)
        spread = target_RND.flatten(0, 1).std(0).mean()
        return {"jepa": error_R.mean()}, {"target_spread": spread}

    @torch.no_grad()
    def targets(self, x_RLT: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the targets of the prediction, target_RND: the normalised outputs of the averaged encoder,
        computed in `dtype`, returned in float32."""
        weights = {name: self.target.get_buffer(name).to(dtype) for name in self.names}
        target_RND = functional_call(self.target, weights, x_RLT).float()
        return F.layer_norm(target_RND, target_RND.shape[-1:])

    @torch.no_grad()
    def after_step(self, encoder: Any, momentum: float | None = None) -> None:
        """Move the weights of the averaged encoder towards those of `encoder`. A momentum of 0 makes them
        equal."""
        momentum = self.momentum if momentum is None else momentum
        weights = [encoder.get_parameter(name) for name in self.names]
        averages = [self.target.get_buffer(name) for name in self.names]
        with gathered_zero3_weights(weights):
            torch._foreach_lerp_(averages, [w.float() for w in weights], 1 - momentum)
        for name in self.statistics:  # buffers, such as the running mean of a batch norm
            self.target.get_buffer(name).copy_(encoder.get_buffer(name))


def flops_added_by_jepa(encoder_flops: float, tokens: int, width: int) -> float:
    """Return the FLOPs for one window that the objective adds to those of the encoder. It adds a forward pass
    of the averaged encoder, and a forward and backward pass of the predictor, a bidirectional S4Layer.
    `encoder_flops` are those of the encoder, forward and backward."""
    predictor = 4 * tokens * width**2 + 2 * (2 * tokens * CHUNK_TOKENS * width)
    return encoder_flops / 3 + 3 * predictor


def copy_with_weights_as_buffers(encoder: nn.Module) -> nn.Module:
    """Return a copy of the encoder in eval mode whose weights are float32 buffers of the same names.
    Optimisers and ZeRO do not touch buffers."""
    made = copy.deepcopy(encoder)
    for module in made.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, weight.detach().float().clone())
    return made.eval()


@contextmanager
def gathered_zero3_weights(weights: Sequence[Any]) -> Iterator[None]:
    """Return a context in which weights that ZeRO 3 has divided among the ranks are whole on each rank.
    Small weights, which ZeRO 3 keeps whole, are left alone: leaving the context would divide them, and
    ZeRO 3 fails if they are divided between steps."""
    divided = [w for w in weights if hasattr(w, "ds_id") and w.numel() != w.ds_numel]
    if not divided:
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import (  # type: ignore[import-untyped]
        GatheredParameters,
    )

    with GatheredParameters(divided):
        yield


def draw_blocks(keys_R: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Draw blocks in each row. Return (hidden_RN: True for tokens that the encoder does not see; weight_RN:
    the number of blocks to predict that contain each token)."""
    if tokens < FEWEST_TOKENS:
        raise ConfigError(
            f"a window has {tokens} tokens, but objective.method=jepa needs at least {FEWEST_TOKENS}: "
            "raise input.window_s"
        )
    random_RX = random_integers(keys_R, ModelStream.BLOCKS, 2 * (1 + PREDICTED_BLOCKS)) & 0xFFFFFF
    long_R2, short_RX = (random_RX.float() * 2.0**-24).split([2, 2 * PREDICTED_BLOCKS], 1)
    context_RN1 = tokens_in_blocks(long_R2, CONTEXT_SHARES, tokens)
    weight_RN = tokens_in_blocks(short_RX, PREDICTED_SHARES, tokens).sum(2)
    return ~context_RN1[:, :, 0] | (weight_RN > 0), weight_RN


def tokens_in_blocks(random_RX: Tensor, shares: tuple[float, float], tokens: int) -> Tensor:
    """Return bool [R, N, K]: True where a token lies in one of K blocks. random_RX has K numbers from 0 to 1
    for the lengths of the blocks, then K for their starts. `shares` are the shortest and the longest length,
    as shares of the tokens."""
    length_R1K, start_R1K = random_RX[:, None].chunk(2, 2)
    shortest, longest = shares
    length_R1K = (tokens * (shortest + (longest - shortest) * length_R1K)).floor()
    start_R1K = ((tokens - length_R1K + 1) * start_R1K).floor()
    token_N1 = torch.arange(tokens, device=random_RX.device)[:, None]
    return (token_N1 >= start_R1K) & (token_N1 < start_R1K + length_R1K)
