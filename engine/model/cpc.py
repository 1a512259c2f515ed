"""Contrastive predictive coding (CPC): `objective.method: cpc`.

    z_RNF = features(x)           tokens, each of its own samples (32 ms)
    c_RND = context(z)            each sees itself and those before it: model.causal
    s_tu  = cos(W_k c_t, z_u) / temperature
    loss  = mean over k = 1 .. steps and t of  log sum_u exp s_tu - s_t(t+k)

W_k is one linear map for each step ahead, and candidates u are all tokens of the same 5 s: guessing
costs log(tokens). No loss compares different ECGs, so it depends neither on the batch nor on the
ranks. The maps are thrown away afterwards. What is exported is the encoder with its causal
transformer, which is what was trained.

Source: van den Oord et al. 2018; for ECGs Mehari and Strodthoff 2022 (12 steps ahead, negatives of
the same record; an LSTM has the place of the causal transformer). Shapes: engine.model.config.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..settings.errors import ConfigError
from .objectives import unit


class PredictiveCoding(nn.Module):
    def __init__(self, encoder: Any, steps: int = 12, temperature: float = 0.1) -> None:
        super().__init__()
        if not getattr(encoder, "causal", False):
            raise ConfigError(
                "needs an encoder that does not look ahead: set model.causal=true and "
                "model.conv_norm=layer; your own needs features(), context() and causal = True"
            )
        if steps < 1 or temperature <= 0:
            raise ConfigError("use at least 1 for steps, and more than 0 for temperature")
        self.temperature = temperature
        self.maps = nn.ModuleList()
        for _ in range(steps):
            self.maps.append(nn.Linear(encoder.width, encoder.feature_width))

    def forward(self, encoder: Any, x_BSLT: Tensor, keys_BS: Tensor) -> Tensor:
        z_RNF, _ = encoder.features(x_BSLT.flatten(0, 1))
        c_RND = encoder.context(z_RNF, None)
        if (steps := len(self.maps)) >= (tokens := z_RNF.shape[1]):
            raise ConfigError(f"steps={steps}: of {tokens} tokens: use fewer than them")
        losses = []
        for ahead, linear in enumerate(self.maps, 1):
            # Of the first n tokens, which predict the one that many ahead
            predicted_RnF = linear(c_RND[:, :-ahead])
            with torch.autocast(z_RNF.device.type, enabled=False):
                s_RnN = unit(predicted_RnF) @ unit(z_RNF).transpose(1, 2) / self.temperature
            target_n = torch.arange(ahead, tokens, device=z_RNF.device)
            losses.append(F.cross_entropy(s_RnN.flatten(0, 1), target_n.repeat(len(z_RNF))))
        return torch.stack(losses).mean()
